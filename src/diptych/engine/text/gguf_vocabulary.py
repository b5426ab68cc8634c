"""Tokenizer and chat template out of a GGUF file's metadata.

A byte-level BPE ("gpt2") has its merges in the file; how text is split before them only by a name, whose meaning is in
`SPLITS`. A SentencePiece vocabulary ("llama") has no merges: they are the pairs of pieces that make a piece, in the order of
the pieces' scores. Sources: `llama-vocab.cpp` of llama.cpp (release of llama-cpp-python 0.3.36) for names, defaults and ends
of a turn; the tokenizer.json files of the models for the splits themselves.

>>> gguf_tokenizer(open_gguf(Path("model.gguf"))).encode("Hello")  # doctest: +SKIP
[9906]
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from diptych.engine.text.sentencepiece_model import (
    SPACE,
    TRIAL,
    Kind,
    Pieces,
    add_marked,
    contradictions,
    first_ids,
    merges_by_score,
    put_around,
    spaced_backend,
    unigram_model,
    write_spaces,
)
from diptych.engine.text.template import ChatTemplate
from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.wordpiece import pieces_backend, put_around_texts
from diptych.ground.errors import LoadError
from diptych.models.gguf.file import GgufArray, GgufFile

logger = logging.getLogger("diptych.engine")

MOST_TOKENS = 2_097_152
KEY = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
SEPARATOR = "seperator"  # as llama.cpp spells it  # codespell:ignore seperator
LETTERS = bytes(set(range(256)) - set(b" \n"))

ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
CASED_ENGLISH = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENGLISH}?"
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (rf"{ENGLISH}|{WORDS}|\p{{N}}{{1,3}}|{REST}",)
QWEN_2 = (rf"{ENGLISH}|{WORDS}|\p{{N}}|{REST}",)
QWEN_35 = (
    rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
DIGIT_BY_DIGIT = (r"\p{N}", GPT2)
BLOOM = r" ?[^(\s|.,!?" "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
HAN_UPPER, HAN_LOWER = (rf"[{letters[1:-1]}&&[^\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI_2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}*{HAN_LOWER}+{ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{HAN_UPPER}+{HAN_LOWER}*{ENGLISH}?|\p{{N}}{{1,3}}|{REST}",
)
# names -> what cuts a text, one after the other, each within the pieces of those before
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "modern-bert", "exaone4", "trillion",
                     "granite-docling", "a.x-4.0"), (GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
                     "smaug-bpe", "chatglm-bpe", "glm4", "glm5"), LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
                     "grok-2"), QWEN_2),
    "qwen35": QWEN_35,
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    DIGIT_BY_DIGIT),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{DEEPSEEK_LETTERS}]+", rf"\s?[{DEEPSEEK_SIGNS}]+", r"\s+$", DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK_3),
    "tekken": (rf"{CASED}|\p{{N}}|{CASED_REST}",),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
                    (rf"{CASED_ENGLISH}|\p{{N}}{{1,3}}|{CASED_REST}",)),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"{CASED_ENGLISH}|\p{{N}}|{CASED_REST}",
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"),
                    (r"\d{1,3}(?=(?:\d{3})*\b)", rf"{CASED_ENGLISH}|\p{{N}}{{1,3}}|{CASED_REST}")),
    "kimi-k2": KIMI_2,
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (BLOOM,)),
    "viking": (BLOOM, r"\p{N}"),
    "seed-coder": (rf"{ENGLISH}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"),
                    (rf"'(?i:[sdmt]|ll|ve|re)|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)),
    # what llama.cpp does with a file that names nothing, and warns of
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
# a word that is a token is that token, whatever the merges make of it
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "glm4",
               "glm5", "youtu")  # fmt: skip
BEGINS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
# whose tokenizer.json composes characters and their accents first
COMPOSED = ("qwen2",)
# tokens that end a turn in the templates there are; a file names one or two of them, a model may write any it has
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
        "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
        "<｜end▁of▁sentence｜>")  # fmt: skip


class Vocabulary:
    """The tokens of a file, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.model = self._text("model")
        found = self._found("tokens")
        if found is None or not found.is_text or not 0 < found.count <= MOST_TOKENS:
            raise LoadError(
                f"{KEY}tokens of {file.path} holds {0 if found is None else found.count} tokens; "
                f"1 to {MOST_TOKENS} texts are read",
                hint="the file has no vocabulary of its own; take one that has",
            )
        lines = _lines(found)
        tokens: list[str] = found.values() if lines is None else lines.split("\n")
        if not all(tokens):  # an empty token has no text to be found by
            tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        self.tokens = tokens
        self.kinds: list[Any] = self.array("token_type") or [Kind.NORMAL] * len(tokens)
        if len(self.kinds) < len(tokens):
            raise LoadError(f"{KEY}token_type of {file.path} has {len(self.kinds)} entries for {len(tokens)} tokens")
        self.ids = first_ids(tokens)
        table = file.tensors.get("token_embd.weight")
        if table is not None and len(tokens) > table.shape[0]:
            raise LoadError(f"{file.path} has {len(tokens)} tokens and an embedding of {table.shape[0]}")

    def _found(self, name: str) -> GgufArray | None:
        value = self.file.metadata.get(KEY + name)
        if value is not None and not isinstance(value, GgufArray):
            raise LoadError(f"{KEY}{name} of {self.file.path} is {value!r}; it must be an array")
        return value

    def array(self, name: str) -> list[Any] | None:
        """Its entries; None where there is none."""
        found = self._found(name)
        return None if found is None else found.values()

    def _text(self, name: str) -> str:
        value = self.file.metadata.get(KEY + name, "")
        if not isinstance(value, str):
            raise LoadError(f"{KEY}{name} of {self.file.path} is {value!r}; it must be a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.file.metadata.get(KEY + name, default)
        if not isinstance(value, bool):
            raise LoadError(f"{KEY}{name} of {self.file.path} is {value!r}; it must be true or false")
        return value

    def special(self, name: str) -> int | None:
        """The id under `<name>_token_id`; None where there is none, or none that is a token (some files say -1)."""
        value = self.file.metadata.get(f"{KEY}{name}_token_id")
        if value is None or isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            return None
        return value

    @property
    def split(self) -> str:
        """The name of how text is split."""
        return self._text("pre") or "default"

    def merges(self) -> list[tuple[str, str]]:
        """The pairs in the file."""
        stored = self._found("merges")
        if stored is None:
            raise LoadError(
                f"{KEY}merges is missing from {self.file.path}", hint="the file is damaged; download it again"
            )
        lines = _lines(stored)
        if lines is not None and lines.encode().translate(None, LETTERS) == (b" \n" * stored.count)[:-1]:
            words = lines.replace(" ", "\n").split("\n")
            return list(zip(words[::2], words[1::2], strict=True))
        found = stored.values()
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else () for merge in found]
        wrong = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
        if wrong is not None:
            raise LoadError(
                f"merge {wrong} of {self.file.path} is {found[wrong]!r}; it must be two texts with a space between"
            )
        return pairs  # type: ignore[return-value]

    def merges_by_score(self) -> list[tuple[str, str]]:
        """Every pair of pieces that makes a piece, the best first; of Gemma by the order of the pieces, as it was trained."""
        scores = self.array("scores")
        architecture = str(self.file.metadata.get("general.architecture"))
        if scores is None or architecture.startswith("gemma"):
            scores = [-i for i in range(len(self.tokens))]
        if len(scores) < len(self.tokens):
            raise LoadError(f"{KEY}scores of {self.file.path} has {len(scores)} entries for {len(self.tokens)} tokens")
        return merges_by_score(self.file.path, self.tokens, self.ids, self.kinds, scores)


def _lines(found: GgufArray) -> str | None:
    """All texts, a line each; None where that cannot be. No step of the interpreter for each: a file has half a million."""
    if not found.is_text or not found.count:
        return None
    stored, ends = found.stored()
    begins = np.concatenate(([0], np.frombuffer(ends, dtype=np.int64)[:-1]))
    letters, is_text = np.frombuffer(stored, dtype=np.uint8).copy(), np.ones(len(stored), dtype=bool)
    letters[begins] = ord("\n")  # in the place of the first byte of each length
    for i in range(1, 8):
        is_text[begins + i] = False
    try:
        lines = letters[is_text].tobytes()[1:].decode("utf-8")
    except UnicodeDecodeError:
        return None
    return lines if lines.count("\n") == found.count - 1 else None


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises LoadError where it has none, or a kind that is not known."""
    words = Vocabulary(file)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece, "bert": _wordpiece,
                "t5": _unigram}  # fmt: skip
    if words.model not in builders:
        raise LoadError(f"{KEY}model of {file.path} is {words.model!r}; {', '.join(builders)} are read")
    if words.model == "bert":
        words.tokens = [_as_piece(token, kind) for token, kind in zip(words.tokens, words.kinds, strict=False)]
        words.ids = first_ids(words.tokens)
    elif words.model != "gpt2":
        words.tokens = [SPACE * len(token) if not token.strip(" ") else token for token in words.tokens]
        words.ids = first_ids(words.tokens)
    with contradictions(file.path):
        backend = builders[words.model](words)
        add_marked(backend, words.tokens, words.ids, words.kinds, words.special("unknown"))
    is_spm = words.model != "gpt2"
    begin, end = words.special("bos"), words.special("eos")
    if words.model in ("bert", "t5"):
        return _around_texts(backend, words)
    first = begin if words.flag("add_bos_token", is_spm or words.split in BEGINS) else None
    last = end if words.flag("add_eos_token", False) else None
    if words.model == "gpt2":
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
    put_around(backend, words.tokens, first, last)
    names = {
        "bos_token": begin,
        "eos_token": end,
        "unk_token": words.special("unknown"),
        "pad_token": words.special("padding"),
    }
    config = {name: words.tokens[token_id] for name, token_id in names.items() if token_id is not None}
    return Tokenizer(backend, config, _ends_of_turn(words))


def gguf_template(file: GgufFile, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a GGUF file, with those it has under other names; a file without one gets the default."""
    sources = {}
    for key, value in file.metadata.items():
        if key == TEMPLATE_KEY or key.startswith(f"{TEMPLATE_KEY}."):
            if not isinstance(value, str):
                raise LoadError(f"{key} of {file.path} is no text")
            sources[key.removeprefix(TEMPLATE_KEY).removeprefix(".") or "default"] = value
    return ChatTemplate(tokenizer, sources) if sources else ChatTemplate(tokenizer, is_default=True)


def _byte_level(words: Vocabulary) -> tokenizers.Tokenizer:
    if words.split not in SPLITS:
        raise LoadError(
            f"{KEY}pre of {words.file.path} is {words.split!r}, which says how text is split; known: {', '.join(SPLITS)}",
            hint="the file is newer than this version knows; take the Hugging Face checkpoint",
        )
    if words.split == "default":
        logger.warning(
            "%s does not say how its tokenizer splits text; the usual way is taken, which may be another",
            words.file.path,
        )
    model = models.BPE(words.ids, words.merges(), ignore_merges=words.split in WHOLE_WORDS)
    backend = tokenizers.Tokenizer(model)
    if words.split in COMPOSED:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(tokenizers.Regex(cut), behavior="isolated") for cut in SPLITS[words.split]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(words: Vocabulary) -> tokenizers.Tokenizer:
    has_merges = KEY + "merges" in words.file.metadata
    merges = words.merges() if has_merges else words.merges_by_score()
    unknown = words.special("unknown")
    unk_token = None if unknown is None else words.tokens[unknown]
    model = models.BPE(words.ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    write_spaces(backend, is_prefixed=words.flag("add_space_prefix", words.model == "llama"))
    return backend


def _unigram(words: Vocabulary) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's: spaces are joined, whatever the converter has taken that from."""
    scores, unknown = words.array("scores"), words.special("unknown")
    if scores is None or len(scores) < len(words.tokens):
        found = 0 if scores is None else len(scores)
        raise LoadError(f"{KEY}scores of {words.file.path} has {found} entries for {len(words.tokens)} tokens")
    if unknown is None:
        raise LoadError(
            f"{KEY}unknown_token_id is missing from {words.file.path}; it says what stands for what no piece is"
        )
    used = [score for score, kind in zip(scores, words.kinds, strict=False) if kind != Kind.UNUSED]
    least = min(used, default=0.0)
    pieces = Pieces(
        charsmap=bytes(words.array("precompiled_charsmap") or ()), has_prefix=words.flag("add_space_prefix", True)
    )
    pieces.kinds = [Kind.UNKNOWN if i == unknown else kind for i, kind in enumerate(words.kinds)]
    # places that nothing fills have names of the converter's, and scores so low that what is unknown would cost as little
    for i, (text, score, kind) in enumerate(zip(words.tokens, scores, words.kinds, strict=False)):
        pieces.texts.append(f"\0{i}" if kind == Kind.UNUSED else text)
        pieces.scores.append(max(score, least))
    backend = spaced_backend(unigram_model(pieces), pieces)
    backend.encode(TRIAL)
    return backend


def _as_piece(token: str, kind: int) -> str:
    """As a vocabulary of WordPiece has it: a file marks the pieces that begin a word, and there those that go on are marked."""
    if kind in (Kind.CONTROL, Kind.UNKNOWN) or (token.startswith("[") and token.endswith("]")):
        return token
    return token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"


def _wordpiece(words: Vocabulary) -> tokenizers.Tokenizer:
    """No file says whether words become small letters first: they do where no piece has a capital."""
    own = [
        token
        for token, kind in zip(words.tokens, words.kinds, strict=False)
        if kind == Kind.NORMAL and token[:1] != "["
    ]
    normalizer = normalizers.BertNormalizer(lowercase=all(token == token.lower() for token in own))
    return pieces_backend(words.ids, unknown="[UNK]", normalizer=normalizer)


def _around_texts(backend: tokenizers.Tokenizer, words: Vocabulary) -> Tokenizer:
    """[CLS] before each text and [SEP] behind it, by the ids that the file has or by name; <s> and </s> of XLM-RoBERTa."""
    found, is_bert = {}, words.model == "bert"
    marks = (("[CLS]", "cls_token", "cls"), ("[SEP]", "sep_token", SEPARATOR))
    for mark, name, key in marks if is_bert else (("<s>", "cls_token", "bos"), ("</s>", "sep_token", "eos")):
        token_id = words.special(key)
        token_id = words.ids.get(mark) if token_id is None else token_id
        if token_id is None:
            raise LoadError(f"{KEY}tokens of {words.file.path} has no {mark}, which stands around every text")
        found[name] = words.tokens[token_id], token_id
    put_around_texts(backend, found["cls_token"], found["sep_token"], has_types=is_bert)
    return Tokenizer(backend, {name: text for name, (text, _) in found.items()}, [])


def _ends_of_turn(words: Vocabulary) -> list[int]:
    named = [words.special(name) for name in ("eos", "eot", "eom")]
    marks = {
        token: i
        for token in ENDS
        if (i := words.ids.get(token)) is not None and words.kinds[i] in (Kind.CONTROL, Kind.USER_DEFINED)
    }
    if {"<|return|>", "<|call|>"} <= marks.keys():  # in harmony a message ends so, and the turn goes on
        marks.pop("<|end|>", None)
    return list(dict.fromkeys([*(i for i in named if i is not None), *marks.values()]))
