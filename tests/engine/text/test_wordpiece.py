"""vocab.txt without tokenizer.json, as older checkpoints of BERT and its kin have it, held against transformers' tokenizers."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.wordpiece import read_vocabulary
from diptych.ground.errors import LoadError, UnsupportedModel

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OF_MPNET = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]"]
LETTERS = string.ascii_letters + "éÉüñçßøа́日本語中文한"
WORDS = ["the", "The", "cafe", "café", "##ing", "##é", "über", "uber", "日本", "naïve", "##ve", "fox", "Fox"]
PIECES = [*string.digits, *string.punctuation, *LETTERS, *(f"##{one}" for one in LETTERS), *WORDS]
TEXTS = [
    "The fox was running to the café.", "Ein Über-Fox, naïve und süß", "日本語の本 中文 한", "É é É",
    "a\tb\u00a0c\u2028d\ue000e\x00f \ufffd", "fox[MASK] [SEP]fox [mask]", "x" * 100 + " " + "x" * 101, "",
    "don't stop... (ever)!", "😀 fox $5.00 fi̇x", "the <mask> fox<mask>", "[PAD]", "fox[unused1] fox [unused1]",
]  # fmt: skip
SETTINGS = [
    {}, {"do_lower_case": False}, {"strip_accents": False}, {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False}, {"strip_accents": None, "never_split": None, "do_basic_tokenize": True},
]  # fmt: skip


def make(
    path: Path,
    config: dict[str, Any] | None,
    pieces: list[str],
    *,
    model_type: str = "bert",
    ending: str = "\n",
    **more: Any,
) -> Path:
    """A folder with vocab.txt, and what else is given as JSON."""
    path.mkdir(parents=True)
    (path / "vocab.txt").write_bytes("".join(one + ending for one in pieces).encode())
    files = {"config": {"model_type": model_type}, "tokenizer_config": config, **more}
    for name, value in files.items():
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("kind", ["megatron-bert", "ernie"])
def test_a_kind_without_a_class_is_that_of_its_model(tmp_path: Path, kind: str) -> None:
    """As GatorTron's folders have it."""
    path = make(tmp_path / "it", None, [*MARKS, *PIECES], model_type=kind)
    assert (
        Tokenizer.from_dir(path).encode(TEXTS[0])
        == transformers.AutoTokenizer.from_pretrained(path)(TEXTS[0])["input_ids"]
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("named", ["BertTokenizer", "BertTokenizerFast", None])
def test_ids_are_those_of_both_tokenizers_of_transformers(
    tmp_path: Path, settings: dict[str, Any], named: str | None
) -> None:
    """Small letters, accents and Chinese signs by the files' own words; the one written in Python, and the fast one."""
    config = settings if named is None else {"tokenizer_class": named, **settings}
    path = make(tmp_path / "it", config, [*MARKS, *PIECES])
    ours, fast = Tokenizer.from_dir(path), transformers.BertTokenizer.from_pretrained(path)
    slow = BertTokenizerLegacy(
        str(path / "vocab.txt"), **{key: one for key, one in settings.items() if one is not None}
    )
    for text in TEXTS:
        assert ours.encode(text) == fast(text)["input_ids"] == slow(text)["input_ids"], text
        pair, got = fast(text, "the fox"), ours.encode_pair(text, "the fox")
        assert (got.token_ids, got.type_ids) == (pair["input_ids"], pair["token_type_ids"]), text
        assert ours.decode(ours.encode(text)) == fast.decode(
            fast(text)["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_a_tokenizer_that_cuts_by_a_dictionary_is_refused(tmp_path: Path) -> None:
    """What transformers saves of RoFormer's lacks jieba: read as it stands, Chinese words would be unknown."""
    made = transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(dict.fromkeys([*MARKS, *PIECES]))})
    path = make(tmp_path / "it", None, [*MARKS, *PIECES], model_type="roformer")
    made.save_pretrained(path)
    assert Tokenizer.from_dir(path).encode("日本") == made("日本")["input_ids"]
    config = json.loads((path / "tokenizer_config.json").read_text())
    for named in ("RoFormerTokenizer", "RoFormerTokenizerFast", None):
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
        with pytest.raises(UnsupportedModel, match="jieba"):
            Tokenizer.from_dir(path)


def test_a_vocabulary_of_mpnet_is_read_as_its_class_does(tmp_path: Path) -> None:
    """all-mpnet-base's marks are RoBERTa's, and so are its pairs; what is masked takes the space before it."""
    config = {"tokenizer_class": "MPNetTokenizer", "bos_token": "<s>", "do_lower_case": True}
    path = make(tmp_path / "it", config, [*OF_MPNET, *PIECES, "<mask>"], model_type="mpnet")
    ours, theirs = Tokenizer.from_dir(path), transformers.MPNetTokenizer.from_pretrained(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        pair = ours.encode_pair(text, "the fox")
        assert pair.token_ids == theirs(text, "the fox")["input_ids"], text
        assert set(pair.type_ids) == {0}
    assert Tokenizer.from_dir(make(tmp_path / "bare", None, [*OF_MPNET, *PIECES, "<mask>"], model_type="mpnet")).encode(
        "the fox"
    ) == ours.encode("the fox")


@pytest.mark.parametrize("where", ["tokenizer_config", "special_tokens_map"])
def test_special_tokens_have_the_names_that_files_say(tmp_path: Path, where: str) -> None:
    """As texts and as objects; more of them may be pieces of the vocabulary."""
    marks = {
        "cls_token": "<c>",
        "sep_token": {"__type": "AddedToken", "content": "<e>", "lstrip": True},
        "additional_special_tokens": ["[unused1]"],
    }
    config: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
    more = {"special_tokens_map": marks} if where == "special_tokens_map" else {}
    config |= marks if where == "tokenizer_config" else {}
    path = make(tmp_path / "it", config, [*MARKS, "<c>", "<e>", "[unused1]", *PIECES], **more)
    ours = Tokenizer.from_dir(path)
    assert ours.encode("fox [unused1]") == [5, *ours.encode("fox", add_special_tokens=False), 7, 6]
    assert 7 in ours.special_token_ids
    if where == "tokenizer_config":
        theirs = transformers.BertTokenizer.from_pretrained(path)
        for text in TEXTS:
            assert ours.encode(text) == theirs(text)["input_ids"], text


def test_lines_may_end_as_anywhere_and_pieces_may_stand_twice(tmp_path: Path) -> None:
    """Signs that split lines elsewhere are pieces of multilingual vocabularies."""
    pieces = [*MARKS, "a", "\u2028", "\u0085", "fox", "a"]
    want = {piece: i for i, piece in enumerate(pieces)}
    for name, ending in (("unix", "\n"), ("windows", "\r\n")):
        path = make(tmp_path / name, {}, pieces, ending=ending)
        assert read_vocabulary(path / "vocab.txt") == want
        assert transformers.models.bert.tokenization_bert.load_vocab(str(path / "vocab.txt")) == want


@pytest.mark.parametrize(
    ("config", "pieces", "error", "named"),
    [
        ({"do_basic_tokenize": False}, [*MARKS, "a"], UnsupportedModel, "do_basic_tokenize in .*config.json is False"),
        ({"never_split": ["a"]}, [*MARKS, "a"], UnsupportedModel, "never_split"),
        ({"cls_token": 3}, [*MARKS, "a"], LoadError, "cls_token in .* is 3"),
        ({"do_lower_case": "no"}, [*MARKS, "a"], LoadError, "do_lower_case"),
        ({}, [*MARKS[:-1], "a"], LoadError, r"has no piece '\[MASK\]', which is its mask_token"),
        ({}, [], LoadError, "holds 0 pieces"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, [*MARKS, "a"], LoadError, "vocab.txt there can't be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said(
    tmp_path: Path, config: dict[str, Any], pieces: list[str], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        Tokenizer.from_dir(make(tmp_path / "it", config, pieces))


def test_bytes_that_are_no_text_are_said(tmp_path: Path) -> None:
    path = make(tmp_path / "it", {}, MARKS)
    (path / "vocab.txt").write_bytes(b"[PAD]\n\xff\xfe\n")
    with pytest.raises(LoadError, match=r"vocab.txt is no text"):
        Tokenizer.from_dir(path)
