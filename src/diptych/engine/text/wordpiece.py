"""vocab.txt: a WordPiece vocabulary, for folders of BERT and its kin whose publisher has no tokenizer.json.

The file has a piece in each line, whose number is its id. How texts are made ready and what stands around them is said in
tokenizer_config.json, special_tokens_map.json beside it, or by the class of transformers.

>>> wordpiece_backend(Path("vocab.txt"), BERT, {}, {}).encode("Hello").ids  # doctest: +SKIP
[101, 7592, 102]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig

MOST_PIECES = 2_097_152
CONFIG = "tokenizer_config.json"
HINT = "download the files again"
LONGEST_WORD_CHARS = 100  # a longer one is unknown, in every class


@dataclass(frozen=True, slots=True)
class Kind:
    """What a class puts around texts: the names of its special tokens, and whether the second text of a pair is of a type of
    its own. stripping: tokens that take the spaces before them, unless the files say otherwise.
    """

    tokens: Mapping[str, str]
    has_types: bool = True
    stripping: tuple[str, ...] = ()


BERT = Kind(MappingProxyType({
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}))  # fmt: skip
MPNET = Kind(MappingProxyType({
    "unk_token": "[UNK]", "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>", "mask_token": "<mask>",
    "bos_token": "<s>", "eos_token": "</s>",
}), has_types=False, stripping=("mask_token",))  # fmt: skip
# by tokenizer_class, without a Fast behind it; by model_type where no file says the class
CLASSES: Mapping[str, Kind] = MappingProxyType({
    "BertTokenizer": BERT, "DistilBertTokenizer": BERT, "ElectraTokenizer": BERT, "MPNetTokenizer": MPNET,
})  # fmt: skip
MODEL_TYPES: Mapping[str, Kind] = MappingProxyType({
    **dict.fromkeys(("bert", "distilbert", "electra", "ernie", "megatron-bert", "nomic_bert"), BERT), "mpnet": MPNET,
})  # fmt: skip


def pieces_backend(ids: Mapping[str, int], *, unknown: str, normalizer: Any) -> tokenizers.Tokenizer:
    """Words of pieces, as BERT has them; nothing is put around texts."""
    model = models.WordPiece(dict(ids), unk_token=unknown, max_input_chars_per_word=LONGEST_WORD_CHARS)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def put_around_texts(
    backend: tokenizers.Tokenizer, cls: tuple[str, int], sep: tuple[str, int], *, has_types: bool = True
) -> None:
    """`cls` before each text and `sep` behind it; the second of a pair is of type 1, or of the same behind one more `sep`."""
    second = ["$B:1", f"{sep[0]}:1"] if has_types else [sep[0], "$B", sep[0]]
    backend.post_processor = processors.TemplateProcessing(
        single=[cls[0], "$A", sep[0]], pair=[cls[0], "$A", sep[0], *second], special_tokens=[cls, sep]
    )


def kind_of(config: Mapping[str, Any], model_type: object) -> Kind | None:
    """By tokenizer_config.json's class, or by config.json's model_type where it names none; None: another's vocab.txt."""
    named = config.get("tokenizer_class")
    if named is None:
        return MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    return CLASSES.get(named.removesuffix("Fast")) if isinstance(named, str) else None


def wordpiece_backend(
    path: Path, kind: Kind, config: Mapping[str, Any], special_tokens: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer of vocab.txt at `path`, as transformers' class makes it of the same files.

    config: tokenizer_config.json; special_tokens: special_tokens_map.json, whose words hold where the other has none.
    LoadError for a file that is no such vocabulary, UnsupportedModel for texts that are made ready otherwise.
    """
    said = HfConfig(
        {name: value for name, value in config.items() if value is not None}, path=str(path.parent / CONFIG)
    )
    for name, usual in (("do_basic_tokenize", True), ("never_split", [])):
        if said.raw.get(name, usual) != usual:
            raise UnsupportedModel(
                f"{name} in {said.path} is {said.raw[name]!r}; words are cut at spaces and marks here"
            )
    ids = read_vocabulary(path)
    marks = {name: _mark(name, kind, said, special_tokens) for name in kind.tokens}
    for name, mark in marks.items():
        if mark.content not in ids:
            raise LoadError(f"{path} has no piece {mark.content!r}, which is its {name}", hint=HINT)
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=said.flag("tokenize_chinese_chars", True),
        strip_accents=said.flag("strip_accents") if "strip_accents" in said.raw else None,
        lowercase=said.flag("do_lower_case", True),
    )
    backend = pieces_backend(ids, unknown=marks["unk_token"].content, normalizer=normalizer)
    cls, sep = ((marks[name].content, ids[marks[name].content]) for name in ("cls_token", "sep_token"))
    put_around_texts(backend, cls, sep, has_types=kind.has_types)
    more = said.raw.get("additional_special_tokens") or special_tokens.get("additional_special_tokens") or []
    own = [_added(one, "additional_special_tokens", said.path) for one in more]
    # those that the vocabulary lacks have ids in files of their own
    backend.add_special_tokens([*marks.values(), *(one for one in own if one.content in ids)])
    return backend


def read_vocabulary(path: Path) -> dict[str, int]:
    """Piece -> id, of lines that end as any system ends them; of a piece that stands twice the later id, as transformers do."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is no text: {error}", hint=HINT) from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    if not text or len(lines) > MOST_PIECES:
        raise LoadError(f"{path} holds {len(lines) if text else 0} pieces; 1 to {MOST_PIECES} are read")
    return {piece: i for i, piece in enumerate(lines)}


def _mark(name: str, kind: Kind, config: HfConfig, special_tokens: Mapping[str, Any]) -> tokenizers.AddedToken:
    """A special token of that name: as the files say it, or the class."""
    said = config.raw.get(name) or special_tokens.get(name) or kind.tokens[name]
    return _added(said, name, config.path, is_stripping=name in kind.stripping)


def _added(said: object, name: str, path: str, *, is_stripping: bool = False) -> tokenizers.AddedToken:
    if isinstance(said, str):
        return tokenizers.AddedToken(said, lstrip=is_stripping, normalized=False, special=True)
    if isinstance(said, dict) and isinstance(said.get("content"), str):
        flags = {flag: bool(said.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
        return tokenizers.AddedToken(said["content"], special=True, **flags)
    raise LoadError(f"{name} in {path} is {said!r}; it is a text, or an object with its content")
