"""The tokenizer of a checkpoint: text to ids, ids to text, and what the model's files say about its special tokens.

Owns the reading of tokenizer.json (where there is none, of tokenizer.model, or vocab.txt of BERT and its kin),
tokenizer_config.json and added_tokens.json, and of the EOS ids that generation_config.json and config.json add; what else the
first says of an answer is named in a warning. Decoding never "cleans up" spaces: the text is what the tokens say.

>>> Tokenizer.from_dir("model").encode("Hello")  # doctest: +SKIP
[9906]
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from diptych.engine.text.sentencepiece_model import sentencepiece_backend
from diptych.engine.text.wordpiece import kind_of, wordpiece_backend
from diptych.ground.bounds import lone_surrogate
from diptych.ground.errors import LoadError, PromptTooLong, RequestError, UnsupportedModel, told_of
from diptych.models.config import HfConfig, read_json

logger = logging.getLogger("diptych.engine")

_NAMED_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Special tokens that stay in the text, because clients and our own parsers look for them there.
SHOWN_TOKENS = frozenset(
    {"<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>"}
    | {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
)


# what tokenizers written in Python read, and SentencePiece vocabularies whose ids that code moves (XGLM)
_OTHER_FILES = (
    "vocab.json", "merges.txt", "vocab.txt", "emoji.json", "sentencepiece.bpe.model", "spiece.model", "tekken.json",
    "tiktoken.model",
)  # fmt: skip
# only `encode_batch` lets other threads run meanwhile; 90,000 tokens held every stream for 0.2 s
_LONG_TEXT_CHARS = 4096
_MANY_CHARS_PER_TOKEN = 16  # English has about 4; only blanks and repeated signs have so many


# of generation_config.json, what would change a greedy answer and is read by nobody -> the value that changes nothing
_NOT_HONOURED: Mapping[str, object] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "stop_strings", "forced_bos_token_id",
         "forced_eos_token_id", "forced_decoder_ids", "exponential_decay_length_penalty")),
    "num_beams": 1,
}  # fmt: skip


class PieceKind(Enum):
    """How the text of tokens is put together."""

    BYTE_LEVEL = "byte_level"  # every token is bytes; the text is their concatenation read as UTF-8
    SENTENCEPIECE = "sentencepiece"  # tokens are text with U+2581 for space, or <0xAB> for one byte
    GENERIC = "generic"  # only the library's decoder knows


class PairIds(NamedTuple):
    """Two texts as one input, and of which type tokenizer.json says that each token is."""

    token_ids: list[int]
    type_ids: list[int]


class Tokenizer:
    """Immutable after loading (and `show`), and safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], eos_token_ids: Sequence[int]) -> None:
        self._backend = backend
        self._config = config
        self.eos_token_ids = tuple(dict.fromkeys(int(token_id) for token_id in eos_token_ids))
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # what text never spells; models write tags such as <tool_call> as one token whether it is flagged special or not
        self.mark_token_ids = frozenset(
            token_id for token_id, token in added.items() if token.special or _is_tag(token.content)
        )
        shown = {token_id for token_id, token in added.items() if token.content in SHOWN_TOKENS}
        self.hidden_token_ids = self.special_token_ids - shown
        decoder = backend.decoder  # its pickled form is the JSON of tokenizer.json
        self.piece_kind, self.stripped_spaces = _piece_kind(decoder and json.loads(decoder.__getstate__()))
        self._bytes_of_char = _byte_level_chars() if self.piece_kind is PieceKind.BYTE_LEVEL else {}
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of the checkpoint folder `path`. Raises LoadError when it is missing or damaged."""
        folder = Path(path)
        tokenizer_path = folder / "tokenizer.json"
        config = read_json_object(folder / "tokenizer_config.json")
        _refuse_dictionary(folder, config)
        if tokenizer_path.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(tokenizer_path))
            except Exception as error:  # the library raises bare Exception for a damaged file
                raise LoadError(f"{tokenizer_path} cannot be read: {error}", hint="download the file again") from error
        elif (folder / "tokenizer.model").is_file():
            backend = sentencepiece_backend(folder / "tokenizer.model", config)
        elif (folder / "vocab.txt").is_file() and (kind := kind_of(config, _model_type(folder))) is not None:
            special_tokens = read_json_object(folder / "special_tokens_map.json")
            backend = wordpiece_backend(folder / "vocab.txt", kind, config, special_tokens)
        else:
            raise _no_tokenizer(folder)
        backend.no_padding()
        backend.no_truncation()
        with told_of(folder):
            _add_missing_tokens(backend, config, read_json_object(folder / "added_tokens.json"))
        _warn_of_generation(folder)
        return cls(backend, config, _eos_token_ids(folder, backend, config))

    def lowered(self) -> Tokenizer:
        """The same over texts in small letters, as sentence-transformers has it where files say `do_lower_case`."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        usual = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *usual])
        return Tokenizer(backend, self._config, self.eos_token_ids)

    # Walks over the whole vocabulary take a tenth of a second each for 150,000 entries; a first token needs none of them.
    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def json_text(self) -> str:
        """tokenizer.json, with the tokens that only other files knew."""
        return self._backend.to_str()

    def over_model(self, renamed: Callable[[str], str]) -> tokenizers.Tokenizer:
        """Another tokenizer over the same vocabulary in memory, its added tokens under new names; nothing is put around texts.

        Added tokens that the vocabulary has not have other ids there.
        """
        backend = tokenizers.Tokenizer(self._backend.model)
        backend.normalizer, backend.pre_tokenizer = self._backend.normalizer, self._backend.pre_tokenizer
        added = self._backend.get_added_tokens_decoder().values()
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        backend.add_tokens(
            [
                one
                if (name := renamed(one.content)) == one.content
                else tokenizers.AddedToken(
                    name, **{**{flag: getattr(one, flag) for flag in flags}, "normalized": False}
                )
                for one in added
            ]
        )
        return backend

    @property
    def bos_token(self) -> str | None:
        """The text of the begin-of-text token, or None."""
        return token_text(self._config.get("bos_token"))

    @cached_property
    def begin(self) -> str | None:
        """The token that tokenizer.json puts before every text, such as BOS; None: a text begins with its own."""
        first, own = (self.encode("a", add_special_tokens=is_added)[:1] for is_added in (True, False))
        return self.token(first[0]) if first and first != own else None

    @cached_property
    def missing_end(self) -> int | None:
        """The id that should end every text to be embedded and that tokenizer.json does not put there; None: none.

        Of these classes `transformers` makes the post-processor anew, by the flag beside it (e5-mistral's files).
        """
        has_own = str(self._config.get("tokenizer_class")).startswith(("Llama", "Gemma"))
        text = token_text(self._config.get("eos_token"))
        if not has_own or self._config.get("add_eos_token") is not True or text is None:
            return None
        end = self._backend.token_to_id(text)
        return None if self.encode("a")[-1:] == [end] else end

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Named special tokens (bos_token, eos_token, ...) as chat templates see them."""
        named = {name: token_text(self._config.get(name)) for name in _NAMED_SPECIAL_TOKENS}
        named |= {
            name: token_text(value) for name, value in self._config.items()
            if name.endswith("_token") and name not in named and isinstance(value, str | dict)
        }  # fmt: skip
        return {name: text for name, text in named.items() if text is not None}

    def tags_in(self, texts: Sequence[str]) -> dict[str, int]:
        """The tokens that no text spells whose names stand in `texts`."""
        names = self.added_tokens.items()
        return {name: i for name, i in names if i in self.mark_token_ids and any(name in text for text in texts)}

    def show(self, texts: Sequence[str]) -> None:
        """Let special tokens whose names stand in `texts` be seen in outputs; before the first one is read."""
        self.hidden_token_ids -= frozenset(self.tags_in(texts).values()) - frozenset(self.eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts BOS (and EOS) where tokenizer.json says so.

        Raises RequestError when the text holds a lone surrogate (it is no Unicode text).
        """
        return self._encode(text, add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> PairIds:
        """Two texts as one input, with what tokenizer.json puts around and between them."""
        self.encode(first), self.encode(second)  # what is wrong with one of them is said as of any text
        encoding = self._backend.encode_batch([(first, second)])[0]
        return PairIds(encoding.ids, encoding.type_ids)

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, for each, the half-open range of characters of `text` it came from."""
        encoding = self._encode(text, add_special_tokens)
        return encoding.ids, encoding.offsets

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        return encode_with(self._backend, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; invalid UTF-8 becomes U+FFFD. Unknown ids are skipped.

        Special tokens are left out unless asked for; those that mark thinking and tool calls are always shown.
        """
        if skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if token_id not in self.hidden_token_ids]
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def refuse_endless(self, text: str, limit_tokens: int, *, param: str = "prompt") -> None:
        """Raise PromptTooLong for a text that surely has more tokens, without reading all of it.

        Tokenising takes about 150 bytes of memory and 2 microseconds per character: 5 GB for the longest body.
        """
        begin = text[: limit_tokens * _MANY_CHARS_PER_TOKEN]
        if len(begin) == len(text):
            return
        n_tokens = len(self.encode(begin, add_special_tokens=False))
        if n_tokens > limit_tokens:
            raise PromptTooLong(
                f"{param} has more than {n_tokens} tokens ({len(text)} characters); at most {limit_tokens} are read",
                hint="shorten it",
                param=param,
            )

    def token_id(self, token: str) -> int | None:
        """The id of the vocabulary entry `token`, or None."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of `token_id` as written in the file, or None when the id is not used."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for (added tokens: their own text; unused ids: empty)."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._read_token_bytes(token_id)
        return known

    def _read_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self.piece_kind is PieceKind.BYTE_LEVEL:
            # A token with a character outside the byte alphabet (an added token with a space, say) is its own text.
            known = [self._bytes_of_char.get(char) for char in token]
            return bytes(byte for byte in known if byte is not None) if None not in known else token.encode()
        if self.piece_kind is PieceKind.SENTENCEPIECE:
            byte = fallback_byte(token)
            return bytes([byte]) if byte is not None else token.replace("\u2581", " ").encode()
        if token_id in self.added_token_ids:
            return token.encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def encode_with(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, sent: str | None = None
) -> tokenizers.Encoding:
    """The encoding of `text`, other threads running meanwhile where it is long. RequestError for a lone surrogate, whose place
    is told in what was `sent`, where that is another text.
    """
    try:
        if len(text) > _LONG_TEXT_CHARS:
            return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return backend.encode(text, add_special_tokens=add_special_tokens)
    except TypeError:  # what the library says to text it cannot read
        lone = lone_surrogate(sent or text)
        if lone is None:
            raise
        raise RequestError(
            f"text has {lone}; it must be valid Unicode",
            hint="bytes that are no UTF-8 become such characters, U+DC80 to U+DCFF",
        ) from None


def _is_tag(text: str) -> bool:
    return len(text) > 2 and text.startswith("<") and text.endswith(">")


def fallback_byte(token: str) -> int | None:
    """The byte of a byte-fallback token such as <0xE2>, or None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def token_text(value: object) -> str | None:
    """The text of a special token that a config gives as a string or as an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file. Raises LoadError when it is something else."""
    return read_json(path) if path.is_file() else {}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Add tokens that only tokenizer_config.json or added_tokens.json know, at the ids those files say."""
    try:
        wanted = _named_tokens(config, added)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise LoadError(
            f"added_tokens.json, or added_tokens_decoder in tokenizer_config.json, does not map texts and ids: {error!r}",
            hint="download the file again",
        ) from error
    present = backend.get_added_tokens_decoder()
    for token_id, token in sorted(wanted.items()):
        if token_id in present:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        got = backend.token_to_id(token.content)
        if got != token_id:
            raise LoadError(
                f"added token {token.content!r} has id {token_id} in tokenizer_config.json but {got} in tokenizer.json"
            )


def _named_tokens(config: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    wanted: dict[int, tokenizers.AddedToken] = {}
    for text, token_id in added.items():
        wanted[int(token_id)] = tokenizers.AddedToken(text, special=False, normalized=False)
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        wanted[int(token_id)] = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
    return wanted


def _model_type(folder: Path) -> object:
    return read_json_object(folder / "config.json").get("model_type")


def _refuse_dictionary(folder: Path, config: Mapping[str, Any]) -> None:
    """UnsupportedModel for RoFormer's tokenizer, whose tokenizer.json lacks what cuts Chinese into words."""
    named = config.get("tokenizer_class")
    if str(named).startswith("RoFormerTokenizer") or (named is None and _model_type(folder) == "roformer"):
        raise UnsupportedModel(
            f"the tokenizer of {folder} cuts Chinese by a dictionary (jieba), which no file of it has and nobody runs here",
            hint="over a vocabulary of single signs a BertTokenizer gives the same ids for Chinese and English: "
            "save one there, with tokenizer_class in tokenizer_config.json",
        )


def _no_tokenizer(folder: Path) -> LoadError:
    """Of a folder without one that can be read, with what it has in place of one."""
    found = [name for name in _OTHER_FILES if (folder / name).is_file()]
    if not found:
        hint = "point to a folder that holds one of them"
        return LoadError(f"no tokenizer.json in {folder}, and no tokenizer.model", hint=hint)
    return LoadError(
        f"no tokenizer.json in {folder}, and no tokenizer.model; {', '.join(found)} there can't be read",
        hint="transformers writes tokenizer.json, where its tokenizer of this model is a fast one: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
    )


def _warn_of_generation(folder: Path) -> None:
    """Name what generation_config.json asks for beside the end of a text and how tokens are drawn, and nobody does."""
    said = read_json_object(folder / "generation_config.json")
    named = [
        f"{key} {reprlib.repr(said[key])}"
        for key, usual in _NOT_HONOURED.items()
        if said.get(key) not in (None, usual, [], {})
    ]
    if named:
        logger.warning(
            "%s asks for what requests must ask for here, and is not read: %s",
            folder / "generation_config.json", ", ".join(named))  # fmt: skip


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> list[int]:
    """Every end-of-text id of the model: generation_config.json, config.json, then tokenizer_config.json."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        values = read_json_object(folder / name)
        decoder = HfConfig(values, path=str(folder / name)).decoder
        for source in (values, {} if decoder is None else decoder.raw):
            value = source.get("eos_token_id")
            found += [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(value, bool) or not isinstance(value, int) for value in found):
        raise LoadError(f"eos_token_id of {folder} is {found}; it must be a whole number or a list of them")
    found = [value for value in found if 0 <= value < 2**31]  # some files say -1 for none
    text = token_text(config.get("eos_token"))
    token_id = backend.token_to_id(text) if text is not None else None
    return found if token_id is None else [*found, token_id]


def _piece_kind(decoder: Mapping[str, Any] | None) -> tuple[PieceKind, int]:
    """Which PieceKind the decoder of tokenizer.json is, and how many leading spaces of a text it strips."""
    if decoder is None:
        return PieceKind.GENERIC, 0
    if decoder.get("type") == "ByteLevel":
        return PieceKind.BYTE_LEVEL, 0
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    names = [step.get("type") for step in steps]
    if names[:3] != ["Replace", "ByteFallback", "Fuse"] or names[3:] not in ([], ["Strip"]):
        return PieceKind.GENERIC, 0
    if steps[0].get("pattern") != {"String": "\u2581"} or steps[0].get("content") != " ":
        return PieceKind.GENERIC, 0
    if names[3:] == []:
        return PieceKind.SENTENCEPIECE, 0
    strip = steps[3]
    if strip.get("content") != " " or strip.get("stop"):
        return PieceKind.GENERIC, 0
    return PieceKind.SENTENCEPIECE, int(strip.get("start", 0))


def _byte_level_chars() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in chars.values()]
    return chars | {chr(256 + i): byte for i, byte in enumerate(others)}
