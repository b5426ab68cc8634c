"""Vocabularies of GGUF files against the ids that the models' own tokenizers give, as llama.cpp recorded them."""

from __future__ import annotations

import lzma
from pathlib import Path

import gguf
import pytest

from diptych.engine.text.gguf_vocabulary import Vocabulary, gguf_template, gguf_tokenizer
from diptych.engine.text.tokenizer import PieceKind
from diptych.ground.errors import LoadError
from diptych.models.gguf.file import open_gguf
from llama_cpp import llama_cpp_source

DATA = Path(__file__).resolve().parents[2] / "data" / "gguf_vocabularies"
BUNDLED = {"phi-3": PieceKind.SENTENCEPIECE, "deepseek-coder": PieceKind.BYTE_LEVEL, "gpt-2": PieceKind.BYTE_LEVEL,
           "qwen2": PieceKind.BYTE_LEVEL}  # fmt: skip
# all that carry texts, but bert-bge (below); aquila, baichuan, gpt-neox and nomic-bert-moe carry none
ALL = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3",
       "qwen2", "qwen35", "refact", "starcoder")  # fmt: skip


def check(vocabulary: Path, texts: str, expected: str) -> None:
    tokenizer = gguf_tokenizer(open_gguf(vocabulary))
    pairs = list(zip(texts.split("\n__ggml_vocab_test__\n"), expected.split("\n"), strict=False))
    assert len(pairs) > 40
    for text, line in pairs:
        ids = [int(token_id) for token_id in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        if "e\u0301" not in text:  # composed by some tokenizers before anything else
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", BUNDLED)
def test_texts_have_the_ids_of_the_models_own_tokenizer(name: str, tmp_path: Path) -> None:
    """Splits, merges by score, byte fallback and added tokens: one of them wrong is a model that writes worse, not an error."""
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    check(path, (DATA / "texts.inp").read_text(encoding="utf-8"), (DATA / f"{name}.out").read_text(encoding="utf-8"))
    assert gguf_tokenizer(open_gguf(path)).piece_kind is BUNDLED[name]


# how a text is split -> what llama.cpp (the release above) makes of DIGITS with GPT-2's vocabulary
BEHIND_DIGITS = [171, 120, 223, 33768, 98, 17312, 105, 45739, 252, 5641, 24336, 43302, 220, 47991, 250, 166, 113, 255, 168, 244,
                 112, 220, 201, 198, 1003, 87]  # fmt: skip
SPLIT_DIGITS = {"youtu": [16, 17, 18, 19, 20, 21, 22], "tiny_aya": [16, 24409, 20, 3134], "kimi-k2": [10163, 29228, 22]}
DIGITS = "I'LL say 中文Abc的def 1234567！日本語のテスト 한국어 \r\n//x"


@pytest.mark.parametrize("name", SPLIT_DIGITS)
def test_splits_of_models_without_recorded_texts(name: str, tmp_path: Path) -> None:
    """Youtu, Kimi K2 and Tiny Aya: their models were read, and their files refused for the name of their splits."""
    path = tmp_path / "it.gguf"
    path.write_bytes(lzma.decompress((DATA / "gpt-2.gguf.xz").read_bytes()))
    file = open_gguf(path)
    file.metadata["tokenizer.ggml.pre"] = name
    before = [40, 6, 3069, 910, 220, 40792, 23877, 229, 4826, 66, 21410, 4299, 220]
    assert gguf_tokenizer(file).encode(DIGITS, add_special_tokens=False) == before + SPLIT_DIGITS[name] + BEHIND_DIGITS


def test_tokens_and_merges_may_hold_the_ends_of_lines(tmp_path: Path) -> None:
    """Texts are read a line each where none of them holds two; Gemma's do. The first of equal tokens counts."""
    tokens, merges = ["a", "\n", "\n\n", "b", "a", ""], ["\n \n", "a b"]
    for number, kept in enumerate((merges, merges[1:])):
        out = gguf.GGUFWriter(str(tmp_path / f"{number}.gguf"), "llama")
        out.add_token_list(tokens)
        out.add_token_merges(kept)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.close()
        words = Vocabulary(open_gguf(tmp_path / f"{number}.gguf"))
        assert words.tokens == [*tokens[:5], "[EMPTY_5]"]
        assert words.ids == {"a": 0, "\n": 1, "\n\n": 2, "b": 3, "[EMPTY_5]": 5}
        assert words.merges() == [tuple(merge.split(" ")) for merge in kept]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_all_vocabularies_of_llama_cpp(name: str) -> None:
    """As above, for all that the source package carries."""
    path = llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    check(path, *(path.with_name(path.name + ending).read_text(encoding="utf-8") for ending in (".inp", ".out")))


@pytest.mark.slow
def test_pieces_of_words_have_the_ids_of_llama_cpp() -> None:
    """BERT's words (bge): small letters, accents and signs apart, which no decoding brings back."""
    path = llama_cpp_source() / "models" / "ggml-vocab-bert-bge.gguf"
    tokenizer = gguf_tokenizer(open_gguf(path))
    texts, lines = (path.with_name(path.name + ending).read_text(encoding="utf-8") for ending in (".inp", ".out"))
    pairs = list(zip(texts.split("\n__ggml_vocab_test__\n"), lines.split("\n"), strict=False))
    assert len(pairs) > 40
    for text, line in pairs:
        assert tokenizer.encode(text, add_special_tokens=False) == [int(one) for one in line.split()], repr(text)


SMALL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_end|>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
]
KINDS = [2, 3, 3, 3, *[6] * 256, *[1] * 5]


def write(path: Path, **changes: object) -> Path:
    """A small SentencePiece vocabulary; `changes` are keys after tokenizer.ggml. (None: left out)."""
    out = gguf.GGUFWriter(str(path), "llama")
    keys: dict[str, object] = {
        "model": "llama", "tokens": SMALL, "scores": [-float(i) for i in range(len(SMALL))], "token_type": KINDS,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    for key, value in (keys | changes).items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            out.add_bool(name, value)
        elif isinstance(value, str):
            out.add_string(name, value)
        elif isinstance(value, int):
            out.add_uint32(name, value)
        elif value is not None:
            out.add_array(name, value)
    out.add_chat_template(
        [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "T"}]
    )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    return path


def test_begin_end_and_prefix_follow_the_flags(tmp_path: Path) -> None:
    """A BOS too many or too few changes every answer, and nothing says so."""
    usual = gguf_tokenizer(open_gguf(write(tmp_path / "a.gguf")))
    ids = [SMALL.index("<s>"), SMALL.index("\u2581ab")]
    assert usual.encode("ab") == ids
    assert usual.encode("ab", add_special_tokens=False) == ids[1:]
    assert usual.encode("é", add_special_tokens=False)[1:] == [SMALL.index("<0xC3>"), SMALL.index("<0xA9>")]
    assert (usual.bos_token, usual.decode(ids)) == ("<s>", "ab")
    bare = gguf_tokenizer(
        open_gguf(write(tmp_path / "b.gguf", add_bos_token=False, add_eos_token=True, add_space_prefix=False))
    )
    assert bare.encode("ab") == [SMALL.index("ab"), SMALL.index("</s>")]


def test_every_end_of_turn_ends(tmp_path: Path) -> None:
    """Files of chat models name <|endoftext|> as the end and write <|im_end|>: answers went on with the user's next turn."""
    tokenizer = gguf_tokenizer(open_gguf(write(tmp_path / "a.gguf")))
    assert tokenizer.eos_token_ids == (2, SMALL.index("<|im_end|>"))


def test_templates_keep_their_names(tmp_path: Path) -> None:
    """A model with another template for tools must get that one."""
    file = open_gguf(write(tmp_path / "a.gguf"))
    template = gguf_template(file, gguf_tokenizer(file))
    assert template.source == "{{ messages[0].content }}"
    assert template.render([{"role": "user", "content": "x"}], tools=[{"type": "function"}]).text == "T"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv'; gpt2, llama"),
        ({"tokens": None}, "0 tokens"),
        ({"token_type": [1]}, "1 entries for"),
        ({"scores": [0.5]}, "scores of .* has 1 entries for"),
        ({"model": "gpt2", "pre": "of-tomorrow", "merges": ["a b"]}, "'of-tomorrow', which says how text is split"),
        ({"model": "gpt2", "pre": "gpt-2"}, "merges is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, "merge 0 of .* is 'a b c'"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a nowhere"]}, "contradicts itself"),
        ({"add_bos_token": 1}, "must be true or false"),
        ({"tokens": [*SMALL[:-1], "x" * 300]}, "300 characters; at most 256"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_refused_by_name(changes: dict, message: str, tmp_path: Path) -> None:
    """What the library says of such a file names neither the key nor the file."""
    with pytest.raises(LoadError, match=message):
        gguf_tokenizer(open_gguf(write(tmp_path / "a.gguf", **changes)))
