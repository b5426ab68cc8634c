"""tokenizer.model: a SentencePiece vocabulary, for folders whose publisher has no tokenizer.json (InternLM 2.5, openPangu).

The file is a protobuf message (`sentencepiece_model.proto` of google/sentencepiece), of which the pieces and what decides about
texts are read. BPE has no merges in it: they are the pairs of pieces that make a piece, in the order of the pieces' scores.

>>> sentencepiece_backend(Path("tokenizer.model"), {}).encode("Hello").ids  # doctest: +SKIP
[1, 15043]
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from diptych.ground.errors import LoadError

SPACE = "\u2581"
LONGEST_PIECE_CHARS = 256  # each is tried at every place it could be cut at
MOST_PIECES = 2_097_152
HINT = "download the file again"
UNIGRAM, BPE = 1, 2  # trainer_spec.model_type; of words and characters nobody trains models
# fields of the messages: of ModelProto, of SentencePiece, of TrainerSpec, of NormalizerSpec
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE, SCORE, KIND = 1, 2, 3
MODEL_TYPE, SPACE_BEHIND, BYTE_FALLBACK, BEGIN_PIECE, END_PIECE = 3, 24, 35, 46, 47
CHARSMAP, DUMMY_PREFIX, NO_EXTRA_SPACES, ESCAPES_SPACES = 2, 3, 4, 5
TRIAL = "a \u00bd\n"  # read once at loading: a damaged table of characters fails with the first text


class Kind(IntEnum):
    """What a piece is; GGUF files have the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(slots=True, kw_only=True)
class Pieces:
    """What the file says. charsmap: how characters are replaced first, as the library compiled it."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    has_bytes: bool = False
    charsmap: bytes = b""
    has_prefix: bool = True
    joins_spaces: bool = True
    begin: str = "<s>"
    end: str = "</s>"

    @property
    def unknown(self) -> int | None:
        """The piece for what no piece is."""
        return self.kinds.index(Kind.UNKNOWN) if Kind.UNKNOWN in self.kinds else None


def read_pieces(path: Path) -> Pieces:
    """Raises LoadError for a file that is no such model, or is cut short."""
    made = Pieces()
    try:
        for number, value in _fields(path.read_bytes()):
            if number == PIECES:
                _add_piece(made, dict(_fields(_bytes(value))))
            elif number == TRAINER:
                _read_trainer(made, dict(_fields(_bytes(value))))
            elif number == NORMALIZER:
                spec = dict(_fields(_bytes(value)))
                made.charsmap = _bytes(spec.get(CHARSMAP, b""))
                made.has_prefix, made.joins_spaces = (
                    bool(_number(spec, one, 1)) for one in (DUMMY_PREFIX, NO_EXTRA_SPACES)
                )
                if not _number(spec, ESCAPES_SPACES, 1):
                    raise LoadError(f"{path} does not write spaces as {SPACE}, which is not read")
    except (ValueError, IndexError, struct.error) as error:
        raise LoadError(f"{path} is no SentencePiece model: {error}", hint=HINT) from error
    if not 0 < len(made.texts) <= MOST_PIECES:
        raise LoadError(f"{path} holds {len(made.texts)} pieces; 1 to {MOST_PIECES} are read", hint=HINT)
    if made.model_type not in (UNIGRAM, BPE):
        raise LoadError(f"{path} is of model_type {made.model_type}; unigram ({UNIGRAM}) and BPE ({BPE}) are read")
    return made


def _read_trainer(made: Pieces, spec: Mapping[int, int | bytes]) -> None:
    made.model_type, made.has_bytes = _number(spec, MODEL_TYPE, UNIGRAM), bool(_number(spec, BYTE_FALLBACK, 0))
    made.begin, made.end = (
        _bytes(spec.get(name, usual)).decode("utf-8") for name, usual in ((BEGIN_PIECE, b"<s>"), (END_PIECE, b"</s>"))
    )
    if _number(spec, SPACE_BEHIND, 0):
        raise ValueError("it writes spaces behind words, which is not read")


def _add_piece(made: Pieces, found: Mapping[int, Any]) -> None:
    made.texts.append(_bytes(found.get(PIECE, b"")).decode("utf-8"))
    made.scores.append(struct.unpack("<f", _bytes(found[SCORE]))[0] if SCORE in found else 0.0)
    made.kinds.append(int(found.get(KIND, Kind.NORMAL)))
    if len(made.texts) > MOST_PIECES:
        raise ValueError(f"more than {MOST_PIECES} pieces")


def _number(found: Mapping[int, int | bytes], name: int, default: int) -> int:
    value = found.get(name, default)
    if isinstance(value, bytes):
        raise ValueError("a message where a number is expected")
    return value


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where a message is expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message: a number, or bytes of a text, a message or a float."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"a field of type {wire} at byte {at}")
        size, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if at + size > end:
            raise ValueError(f"a field of {size} bytes at byte {at} of {end}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError(f"a number of more than 10 bytes before byte {at}")


def sentencepiece_backend(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of the file; config: tokenizer_config.json, which says what stands around a text. Raises LoadError."""
    pieces = read_pieces(path)
    _rename(pieces, config)
    ids = first_ids(pieces.texts)
    with contradictions(path):
        backend = spaced_backend(
            unigram_model(pieces) if pieces.model_type == UNIGRAM else _bpe(path, pieces, ids), pieces
        )
        add_marked(backend, pieces.texts, ids, pieces.kinds, pieces.unknown)
        begin = _special(config, "bos_token", pieces.begin, ids) if config.get("add_bos_token", True) else None
        end = _special(config, "eos_token", pieces.end, ids) if config.get("add_eos_token", False) else None
        put_around(backend, pieces.texts, begin, end)
        backend.encode(TRIAL)
    return backend


@contextmanager
def contradictions(path: Path) -> Iterator[None]:
    """LoadError for whatever the library says of a vocabulary: it raises bare Exception, and panics over characters' tables."""
    try:
        yield
    except LoadError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise LoadError(f"the vocabulary of {path} contradicts itself: {error}", hint=HINT) from error


def spaced_backend(model: Any, pieces: Pieces) -> tokenizers.Tokenizer:
    """The model over texts as the library makes them ready; no piece is a mark yet."""
    backend = tokenizers.Tokenizer(model)
    first: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.joins_spaces:
        first += [normalizers.Replace(tokenizers.Regex(cut), "") for cut in (r"\A +", r" +\z")]
        first.append(normalizers.Replace(tokenizers.Regex(" {2,}"), " "))
    write_spaces(backend, is_prefixed=pieces.has_prefix, first=first)
    return backend


def _rename(pieces: Pieces, config: Mapping[str, Any]) -> None:
    """Marks of a chat in the place of pieces that were left free for them (InternLM 2's `[UNUSED_TOKEN_145]`)."""
    named = config.get("added_tokens_decoder")
    for number, entry in (named if isinstance(named, dict) else {}).items():
        text = entry.get("content") if isinstance(entry, dict) else None
        is_number = str(number).isascii() and str(number).isdigit() and len(str(number)) < 10
        i = int(number) if is_number else len(pieces.texts)
        if isinstance(text, str) and i < len(pieces.texts) and text not in pieces.texts:
            pieces.texts[i] = text
            pieces.kinds[i] = Kind.CONTROL if entry.get("special") else Kind.USER_DEFINED


def _special(config: Mapping[str, Any], name: str, usual: str, ids: Mapping[str, int]) -> int | None:
    named = config.get(name, usual)
    text = named.get("content") if isinstance(named, dict) else named
    return ids.get(text) if isinstance(text, str) else None


def _bpe(path: Path, pieces: Pieces, ids: Mapping[str, int]) -> models.BPE:
    merges = merges_by_score(path, pieces.texts, ids, pieces.kinds, pieces.scores)
    unknown = None if pieces.unknown is None else pieces.texts[pieces.unknown]
    return models.BPE(dict(ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=pieces.has_bytes)


def unigram_model(pieces: Pieces) -> models.Unigram:
    """Of all pieces, by their scores."""
    if pieces.unknown is None:
        raise ValueError("it has no piece for what no piece is")
    words = list(zip(pieces.texts, pieces.scores, strict=True))
    return models.Unigram(words, unk_id=pieces.unknown, byte_fallback=pieces.has_bytes)


def first_ids(texts: Sequence[str]) -> dict[str, int]:
    """Of equal texts the first counts."""
    ids = dict(zip(texts, range(len(texts)), strict=True))
    if len(ids) < len(texts):
        ids |= dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))
    return ids


def merges_by_score(
    path: Path, texts: Sequence[str], ids: Mapping[str, int], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best first."""
    ranked = []
    for text, i in ids.items():
        if kinds[i] in (Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE) or len(text) < 2:
            continue
        if len(text) > LONGEST_PIECE_CHARS:
            if kinds[i] == Kind.NORMAL:
                raise LoadError(
                    f"piece {i} of {path} has {len(text)} characters; at most {LONGEST_PIECE_CHARS} are read"
                )
            continue
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                ranked.append((-scores[i], i, ids[left], ids[right]))
    ranked.sort()
    return [(texts[left], texts[right]) for _, _, left, right in ranked]


def write_spaces(backend: tokenizers.Tokenizer, *, is_prefixed: bool, first: Sequence[Any] = ()) -> None:
    """Spaces as SPACE, one before a text where that is so, and bytes for what no piece is; taken back by the decoder."""
    marked = normalizers.Replace(" ", SPACE)
    steps = [*first, normalizers.Prepend(SPACE), marked] if is_prefixed else [*first, marked]
    backend.normalizer = normalizers.Sequence(steps) if len(steps) > 1 else marked
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if is_prefixed else back)


def add_marked(
    backend: tokenizers.Tokenizer,
    texts: Sequence[str],
    ids: Mapping[str, int],
    kinds: Sequence[int],
    unknown: int | None,
) -> None:
    """Control tokens as special ones, user's tokens as plain ones: text that spells one of these is it, before any merge."""
    special: list[tokenizers.AddedToken] = []
    plain: list[tokenizers.AddedToken] = []
    for i in [i for i, kind in enumerate(kinds) if kind in (Kind.CONTROL, Kind.USER_DEFINED) or i == unknown]:
        if i >= len(texts) or ids[texts[i]] != i:
            continue  # another token has that name
        is_special = kinds[i] == Kind.CONTROL or i == unknown
        token = tokenizers.AddedToken(texts[i], normalized=False, special=is_special)
        (special if is_special else plain).append(token)
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def put_around(backend: tokenizers.Tokenizer, texts: Sequence[str], first: int | None, last: int | None) -> None:
    """Tokens before and behind each text."""
    if first is None and last is None:
        return
    begin = [] if first is None else [texts[first]]
    end = [] if last is None else [texts[last]]
    used = dict.fromkeys(token_id for token_id in (first, last) if token_id is not None)
    backend.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *(f"{token}:1" for token in begin), "$B:1", *(f"{token}:1" for token in end)],
        special_tokens=[(texts[token_id], token_id) for token_id in used],
    )
