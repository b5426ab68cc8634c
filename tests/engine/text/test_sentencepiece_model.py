"""tokenizer.model against the library that makes it: the same ids for the same texts, and a clear word for a damaged file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from diptych.engine.text.sentencepiece_model import read_pieces
from diptych.engine.text.tokenizer import PieceKind, Tokenizer
from diptych.ground.errors import LoadError

CORPUS = Path(__file__).parents[3] / "src" / "diptych" / "bundled" / "heldout.txt"
TEXTS = (
    "The fox went into the woods.",
    "  two spaces, and  more   between ",
    "tabs\tand\nlines\n\n",
    "\n begins and ends with lines \n",
    "Füchse, лиса, 狐狸 🦊 ½ ﬁ Å",
    "<s>not a mark</s> <user>said</user>",
    "x",
    " ",
    "a" * 300,
)
LLAMA = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
         "remove_extra_whitespaces": False}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "as Llama's": LLAMA,
    # of which a space before is no part of what follows a token of a user
    "digits and a user's tokens": {
        **LLAMA,
        "split_digits": True,
        "user_defined_symbols": ["<user>", "</user>"],
        "add_dummy_prefix": False,
    },
    "without a space before": {**LLAMA, "add_dummy_prefix": False},
    "characters are composed, spaces joined": {"model_type": "bpe", "byte_fallback": True},
    "spaces joined alone": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "marks by other names": {**LLAMA, "bos_piece": "<bos>", "eos_piece": "<eos>"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram as it is": {**LLAMA, "model_type": "unigram"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind, trained once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("model")
            sentencepiece.SentencePieceTrainer.train(
                input=str(CORPUS), model_prefix=str(made[kind] / "tokenizer"), vocab_size=700, minloglevel=2,
                num_threads=1, **KINDS[kind],
            )  # fmt: skip
        return made[kind]

    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(kind: str, trained: Callable[[str], Path]) -> None:
    """Pieces, bytes, joined spaces, composed characters; and the text comes back."""
    folder = trained(kind)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ours = Tokenizer.from_dir(folder)
    assert ours.piece_kind is PieceKind.SENTENCEPIECE
    assert ours.vocab_size == oracle.vocab_size()
    for text in TEXTS:
        ids = ours.encode(text)
        spelt = text
        if "<s>" in text:  # which the library never reads as a mark
            spelt = text.replace("<s>", "").replace("</s>", "")
            ids = ours.encode(spelt)
        assert ids == [oracle.bos_id(), *oracle.encode(spelt)], text
        assert ours.decode(ids[1:]) == oracle.decode(ids[1:]), text


def test_marks_in_a_text_are_marks(trained: Callable[[str], Path]) -> None:
    """As of a tokenizer.json: templates write them as text."""
    ours = Tokenizer.from_dir(trained("as Llama's"))
    assert ours.encode("<s>", add_special_tokens=False)[:1] == [1]
    assert ours.encode("</s>", add_special_tokens=False)[-1:] == [2]


@pytest.mark.parametrize(
    ("config", "ends"),
    [({}, (1, None)), ({"add_bos_token": False}, (None, None)), ({"add_eos_token": True}, (1, 2))],
    ids=str,
)
def test_what_stands_around_a_text_says_its_config(
    config: dict[str, Any], ends: tuple[int | None, int | None], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """InternLM begins a text and does not end it; tokens that only the config knows come behind the pieces."""
    (tmp_path / "tokenizer.model").write_bytes((trained("as Llama's") / "tokenizer.model").read_bytes())
    added = {"700": {"content": "<|im_end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    ids = tokenizer.encode("fox<|im_end|>")
    assert 700 in ids
    assert (ids[0] if ends[0] else None, ids[-1] if ends[1] else None) == ends
    assert (1 in ids, 2 in ids) == (ends[0] is not None, ends[1] is not None)


def test_marks_may_stand_where_pieces_were_left_free(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """InternLM 2's chat: the config's name of an id counts, and text that spells the piece's own is text."""
    (tmp_path / "tokenizer.model").write_bytes((trained("as Llama's") / "tokenizer.model").read_bytes())
    free = read_pieces(tmp_path / "tokenizer.model").texts[600]
    added = {"600": {"content": "<|im_start|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert 600 in tokenizer.special_token_ids
    assert 600 in tokenizer.encode("<|im_start|>fox")
    assert 600 not in tokenizer.encode(free)


def test_a_damaged_file_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """Cut anywhere, or of another kind: a word within a moment, never an exception of Python's."""
    whole = (trained("as Llama's") / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    for end in (*range(0, 200, 7), len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with contextlib.suppress(LoadError):  # a cut between two pieces leaves a smaller model
            read_pieces(path)
    for data in (b"", b"\xff" * 40, b"not a model at all", b"\x0a\x7f", whole[:-300] + b"\xff" * 300):
        path.write_bytes(data)
        with pytest.raises(LoadError, match=r"tokenizer\.model"):
            Tokenizer.from_dir(tmp_path)


def test_what_is_not_read_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """Spaces behind words; a unigram model without an unknown piece; names and numbers that nobody could mean."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS), model_prefix=str(tmp_path / "tokenizer"), vocab_size=700, minloglevel=2, num_threads=1,
        treat_whitespace_as_suffix=True, **LLAMA,
    )  # fmt: skip
    with pytest.raises(LoadError, match="writes spaces behind words"):
        Tokenizer.from_dir(tmp_path)
    whole = (trained("as Llama's") / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(whole)
    added = {"\u00b2": {"content": "<a>"}, "9" * 5000: {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(LoadError, match="does not map texts and ids"):
        Tokenizer.from_dir(tmp_path)
    unigram = (trained("unigram as it is") / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer_config.json").unlink()
    unknown = b"<unk>\x15\x00\x00\x00\x00\x18"  # its score is 0, and its kind 2
    (tmp_path / "tokenizer.model").write_bytes(unigram.replace(unknown + b"\x02", unknown + b"\x01"))
    with pytest.raises(LoadError, match="no piece for what no piece is"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_a_kind_that_nobody_uses_is_refused(kind: str, tmp_path: Path) -> None:
    """By its number."""
    sentencepiece.SentencePieceTrainer.train(
        input=str(CORPUS), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, model_type=kind, minloglevel=2,
        hard_vocab_limit=False, num_threads=1,
    )  # fmt: skip
    with pytest.raises(LoadError, match=r"is of model_type [34]; unigram"):
        Tokenizer.from_dir(tmp_path)
