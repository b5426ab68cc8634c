"""Structured output: a JSON schema, regex, choice or grammar becomes a mask over the next token, through llguidance.

Owns the bounds on what a client may ask to compile, the cache of compiled grammars, and each sequence's matcher.
Masks of large vocabularies are filled by a worker thread as soon as a token is known, so that they are ready when the next
logits are. Where only one text can follow, no mask is filled: its tokens are forced.

A model that thinks may do so first: the constraint holds for what comes behind the thinking tag.

Text in a grammar is text: a string "<think>" is spelled with ordinary tokens, and a regex never matches a special token.
Only the name without quotes in a Lark grammar (`start: <think> "..." </think>`) means the token.

>>> compiler = GrammarCompiler(tokenizer, vocab_size)  # doctest: +SKIP
>>> state = compiler.compile(StructuredSpec(kind="regex", source="[0-9]+")).begin()  # doctest: +SKIP
>>> state.mask(logits_V); state.advance(token_id)  # doctest: +SKIP
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import llguidance
import numpy as np
import tokenizers

from diptych.compute.sampling.deep_threads import DeepThreads, NoPlaceError
from diptych.compute.sampling.json_schema import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH, holdable
from diptych.compute.sampling.lark_terminals import check_terminals
from diptych.compute.sampling.schema_numbers import check_multiples, check_numbers
from diptych.ground.errors import CapacityError, GrammarError, InternalError, LoadError
from diptych.ground.request import FreeReasoning, StructuredSpec

MAX_REGEX_BYTES = 4 * 1024
MAX_COMPILE_S = 2.0
COMPILE_STACK_BYTES = 128 << 20  # llguidance goes down a chain of rules on the stack: 64 KiB of them take up to 64 MB
KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")

_MAX_CACHED = 256
_MAX_LEFT = 4  # compiles past their time, which nothing can end
_LATER = "try again later; grammars that are in use are known"
_QUICK_TOKENS = 16_384  # a mask over so few takes 5 to 15 us, and 30 by another thread
# Whitespace between JSON tokens is free but bounded: an unbounded run is where weak models get lost.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{0,32}"}
# [256, 8]: for each byte of a mask, which of its eight tokens (lowest bit first) may not come
_FORBIDDEN = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)

logger = logging.getLogger("diptych.compute")


class Vocabulary(Protocol):
    """What a grammar needs to know of a tokenizer. mark_token_ids: tokens that no text spells (special tokens, tags)."""

    eos_token_ids: tuple[int, ...]
    mark_token_ids: frozenset[int]

    @property
    def json_text(self) -> str:
        """The whole tokenizer.json."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        ...


class _Speller:
    """The tokenizer as llguidance wants to call it: bytes of every token, and text to tokens in the middle of a text.

    Where the output is forced, llguidance asks how the tokenizer would cut the text. A tokenizer cuts "<think>" in it to
    the special token, adds a space in front, or normalises; none of that spells the text asked for.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in vocabulary.mark_token_ids if i < vocab_size)
        self.eos_token_id = next(iter(_ends(vocabulary, vocab_size)), 0)
        self._marks = vocabulary.mark_token_ids
        self._encode = tokenizers.Tokenizer.from_str(vocabulary.json_text).encode
        self.cut: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        is_plain = self._marks.isdisjoint(ids) and b"".join(self.tokens[i] for i in ids) == text.encode()
        assert self.cut is not None
        return ids if is_plain else self.cut(text)


def _ends(vocabulary: Vocabulary, vocab_size: int) -> list[int]:
    """Tokens that end an answer, of those that the model can write: files name others too."""
    return [token_id for token_id in vocabulary.eos_token_ids if token_id < vocab_size]


def _ll_tokenizer(vocabulary: Vocabulary, vocab_size: int) -> llguidance.LLTokenizer:
    beyond = range(
        vocab_size, vocabulary.vocab_size
    )  # what stands for pictures is read and not written (Llama 3.2 Vision)
    if not vocabulary.mark_token_ids.issuperset(beyond):
        raise LoadError(
            f"tokenizer cannot be used for structured output: it has {vocabulary.vocab_size} tokens and the model "
            f"{vocab_size} logits"
        )
    try:
        speller = _Speller(vocabulary, vocab_size)
        made = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(speller), eos_token=_ends(vocabulary, vocab_size) or None
        )
    except Exception as error:  # the libraries raise what their Rust sides give
        raise LoadError(f"tokenizer cannot be used for structured output: {error}") from error
    speller.cut = made.greedy_tokenize
    return made


class GrammarCompiler:
    """Compiles and caches grammars for one tokenizer. Safe to use from several threads.

    vocab_size: width of the model's logits, at least the tokenizer's.
    """

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._cache: OrderedDict[StructuredSpec, CompiledGrammar] = OrderedDict()
        # grammars of open requests stay known however many others were compiled since
        self._in_use: WeakValueDictionary[StructuredSpec, CompiledGrammar] = WeakValueDictionary()
        self._compiles = DeepThreads(at_once=2, stack_bytes=COMPILE_STACK_BYTES, name="grammar-compile")
        self._mask_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-mask")

    def compile(self, spec: StructuredSpec) -> CompiledGrammar:
        """The grammar of `spec`, from the cache or compiled now by a worker thread.

        Raises GrammarError when it is over a bound, wrong, or not compiled within MAX_COMPILE_S, CapacityError when others that
        are compiled leave it no place.
        """
        with self._lock:
            known = self._in_use.get(spec)
            if known is not None and not known.is_spoiled:
                self._keep(spec, known)
                return known
        taken = spec
        try:
            matcher = self._compiled(spec)
        except GrammarError:
            if spec.looser is None:
                raise
            taken = replace(spec, source=spec.looser)
            matcher = self._compiled(taken)
        ends, again = _ends(self._vocabulary, self._vocab_size), partial(self._compiled, taken)
        compiled = CompiledGrammar(matcher, self._vocab_size, ends, self._mask_pool.submit, again)
        with self._lock:
            self._in_use[spec] = compiled
            self._keep(spec, compiled)
        return compiled

    def _compiled(self, spec: StructuredSpec) -> llguidance.LLMatcher:
        grammar = _grammar_text(spec)
        if spec.reasoning is not None:
            grammar = partial(_after_reasoning, grammar, spec.reasoning, self._vocabulary)
        tokenizer = self._ll_tokenizer()  # about a second for a large vocabulary, once; not the client's time
        if self._compiles.n_left >= _MAX_LEFT:
            raise CapacityError(
                f"{spec.kind} is not compiled now: {_MAX_LEFT} others that took more than {MAX_COMPILE_S:g} s still are",
                hint=_LATER,
            )
        try:
            return self._compiles.run(partial(_compile, tokenizer, grammar), timeout_s=MAX_COMPILE_S)
        except NoPlaceError:
            raise CapacityError(
                f"{spec.kind} is not compiled now: others are, and none of them ended in {MAX_COMPILE_S:g} s",
                hint=_LATER,
            ) from None
        except TimeoutError:
            raise GrammarError(
                f"{spec.kind} took more than {MAX_COMPILE_S:g} s to compile", hint="simplify it", param=spec.kind
            ) from None

    def _keep(self, spec: StructuredSpec, compiled: CompiledGrammar) -> None:
        self._cache[spec] = compiled
        self._cache.move_to_end(spec)
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)

    def close(self) -> None:
        """End the masks' thread."""
        self._mask_pool.shutdown(wait=False, cancel_futures=True)

    def _ll_tokenizer(self) -> llguidance.LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _ll_tokenizer(self._vocabulary, self._vocab_size)
            return self._tokenizer


@dataclass(slots=True, weakref_slot=True, eq=False)
class CompiledGrammar:
    """A grammar ready to be begun any number of times. submit: hands a function and its arguments to the masks' thread.

    again: compiles it once more. is_spoiled: copies of `matcher` share a lexer, which does nothing more for any of them once
    one has gone over its limits.
    """

    matcher: llguidance.LLMatcher
    vocab_size: int
    eos_token_ids: Sequence[int]
    submit: Callable[..., Future[None]]
    again: Callable[[], llguidance.LLMatcher]
    is_spoiled: bool = False

    def begin(self) -> GrammarState:
        """The state of one sequence at the start of its output."""
        return GrammarState(self)


class GrammarState:
    """Where one sequence stands in its grammar. Used by one thread; only the mask is filled by another.

    Text that the grammar forces is not asked of a model: its tokens, as the tokenizer cuts it, are known for a whole run at a
    time (`forced`), and each mask in it admits one token. What is forced follows from the tokens so far alone.

    A grammar can turn out too complex while it is followed (llguidance bounds the work per token). Then `advance`,
    `mask` and `allowed` raise GrammarError: what was written until there is no whole sentence of it. What other sequences or
    guesses met on their ways says nothing of this one: it begins once more on its own before it gives up.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._is_alone = False  # the matcher shares nothing with others
        self._token_ids: list[int] = []
        self._vocab_size = grammar.vocab_size
        self._submit = grammar.submit
        self._words = np.zeros(-(-grammar.vocab_size // 32), dtype=np.int32)
        self._flags = np.empty((self._words.nbytes, 8), dtype=bool)
        self._only_eos = np.zeros(grammar.vocab_size, dtype=bool)
        self._only_eos[list(grammar.eos_token_ids)] = True
        self._filling: Future[None] | None = None
        self._is_filled = False  # for the tokens so far
        self._runs: list[
            tuple[list[int], int]
        ] = []  # before each token so far: the forced run, and how much of it had come
        self._run: list[int] = []
        self._come = 0
        self.is_complete = False  # nothing more can be accepted but an end of text
        self._look()

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is a whole sentence of the grammar."""
        self._settle()
        return bool(self._matcher.is_accepting())

    @property
    def forced_token_id(self) -> int | None:
        """The one token that may come next, where the text is forced."""
        return self._run[self._come] if self._come < len(self._run) else None

    def forced(self, n: int) -> list[int]:
        """The next tokens, n at most, as far as they are forced."""
        return self._run[self._come : self._come + n]

    def advance(self, token_id: int) -> None:
        """Take one output token."""
        self._settle()
        self._matcher.consume_token(token_id)
        self._token_ids.append(token_id)
        self._runs.append((self._run, self._come))
        self._check()
        if token_id == self.forced_token_id:
            self._come += 1
        else:
            self._run, self._come = [], 0
        self._look()

    def rollback(self, n_tokens: int) -> None:
        """Forget the last `n_tokens` tokens."""
        if n_tokens == 0:
            return
        assert 0 < n_tokens <= len(self._runs), (n_tokens, len(self._runs))
        self._wait()
        self._run, self._come = self._runs[-n_tokens]
        del self._runs[-n_tokens:], self._token_ids[-n_tokens:]
        if self._matcher.is_error():
            self._begin_alone()
            self._check()
        elif not self._matcher.rollback(n_tokens):
            raise InternalError(f"grammar cannot roll back {n_tokens} tokens: {self._matcher.get_error()}")
        self._look()

    def allowed(self) -> np.ndarray:
        """[V] bool: which tokens may come next. End-of-text only where the output may end."""
        return ~self._forbidden()

    def admits(self, token_id: int) -> bool:
        """Whether this token may come next."""
        self._settle()
        if self.is_complete:
            return bool(self._only_eos[token_id])
        if self.forced_token_id is not None:
            return token_id == self.forced_token_id
        self._fill_now()
        return bool(self._words[token_id >> 5] >> (token_id & 31) & 1)

    def mask(self, logits_V: np.ndarray) -> None:
        """Set the logits (fp32) of tokens that may not come next to -inf, in place. Some token stays allowed."""
        np.putmask(logits_V, self._forbidden(), -np.inf)

    def begin_fill(self) -> None:
        """Compute the mask beside whatever runs next, where it will be needed and takes longer than to say so."""
        is_worth = self._vocab_size > _QUICK_TOKENS and self.forced_token_id is None
        if is_worth and not (self._is_filled or self.is_complete or self._filling):
            self._filling = self._submit(self._fill)

    def _look(self) -> None:
        """What is known without a mask of what may come next."""
        self._is_filled = False
        self.is_complete = bool(self._matcher.is_stopped())
        if self._come == len(self._run) and not self.is_complete:
            self._run, self._come = self._matcher.compute_ff_tokens(), 0

    def _forbidden(self) -> np.ndarray:
        """[V] bool: which tokens may not come next."""
        self._settle()
        if self.is_complete:
            return ~self._only_eos
        flags_V = self._flags.reshape(-1)[: self._vocab_size]
        if self.forced_token_id is not None:
            flags_V[:] = True
            flags_V[self.forced_token_id] = False
            return flags_V
        self._fill_now()
        # a table of eight flags per byte fills a buffer we keep; unpackbits would allocate a vocabulary each time
        np.take(_FORBIDDEN, self._words.view(np.uint8), axis=0, out=self._flags, mode="clip")
        return flags_V

    def _fill_now(self) -> None:
        while not self._is_filled:
            self._fill()
            self._check()

    def _fill(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._is_filled = True

    def _settle(self) -> None:
        self._wait()
        self._check()

    def _wait(self) -> None:
        """Until the worker has filled the mask: the matcher is used by one thread at a time."""
        if self._filling is not None:
            self._filling.result()
            self._filling = None

    def _begin_alone(self) -> None:
        self._grammar.is_spoiled = True
        self._matcher, self._is_alone, self._is_filled = self._grammar.again(), True, False
        self._matcher.consume_tokens(self._token_ids)

    def _check(self) -> None:
        if self._matcher.is_error() and not self._is_alone:
            self._begin_alone()
        if self._matcher.is_error():
            raise GrammarError(
                f"the grammar cannot be followed after {len(self._runs)} tokens: {_reason(self._matcher)}",
                hint="simplify it: it is too complex, or nothing can follow what it allowed",
            )


def _compile(tokenizer: llguidance.LLTokenizer, grammar: Callable[[], str]) -> llguidance.LLMatcher:
    try:
        text = grammar()
    except ValueError as error:  # what JSON has and no text, or no number, is: half a surrogate pair, 1e999
        raise GrammarError(f"grammar cannot be compiled: {error}") from error
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(f"grammar cannot be compiled: {matcher.get_error().strip()}")
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise GrammarError(f"grammar allows no output at all, or none within the limits: {_reason(first)}")
    return matcher


def _reason(matcher: llguidance.LLMatcher) -> str:
    text = str(matcher.get_error()).partition("\n")[0]
    return "no token can come next" if text == "NoExtensionBias" else text


def _grammar_text(spec: StructuredSpec) -> Callable[[], str]:
    """Check the bounds of `spec`; returns a function that makes llguidance's own form of it (in the worker)."""
    source = spec.source
    if spec.kind == "json_object":
        return lambda: llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS)
    if spec.kind == "regex":
        _check_bytes("regex", source, MAX_REGEX_BYTES)
        return lambda: llguidance.LLMatcher.grammar_from_regex(source)
    if spec.kind == "grammar":
        _check_bytes("grammar", source, MAX_SCHEMA_BYTES)
        within = list(_schemas_within(source))
        check_multiples(*within)
        check_numbers(*within)
        return lambda: _grammar_from_lark(source)
    if spec.kind == "choice":
        _check_bytes("choice", source, MAX_SCHEMA_BYTES)
        return _choice_grammar(source)
    if spec.kind == "json_schema":
        _check_bytes("json_schema", source, MAX_SCHEMA_BYTES)
        schema = json.dumps(json_form(spec))
        return lambda: llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    raise GrammarError(f"structured output kind is {spec.kind!r}; it must be one of {', '.join(KINDS)}")


def _after_reasoning(answer: Callable[[], str], reasoning: FreeReasoning, vocabulary: Vocabulary) -> str:
    """The grammar of `answer` behind free text that ends with a tag."""
    text = answer()
    grammars = json.loads(text)["grammars"] if text.lstrip().startswith("{") else [{"lark_grammar": text}]
    name = grammars[0].setdefault("name", "answer")
    marks = {vocabulary.token_bytes(token_id).decode(): token_id for token_id in vocabulary.mark_token_ids}
    end = _spelled(reasoning.end, marks)
    if end.startswith("<["):
        thought = f"thought: TEXT {end}\nTEXT: /(?s:.*)/"
    else:
        thought = f"thought[lazy]: /(?s:.*){re.escape(reasoning.end).replace('/', chr(92) + '/')}/"
    start = "thought BLANK" if reasoning.begin is None else f"({_spelled(reasoning.begin, marks)} thought BLANK)?"
    lark = f"start: {start} @{name}\n{thought}\nBLANK: /[ \\n\\r\\t]{{0,8}}/"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _spelled(text: str, marks: Mapping[str, int]) -> str:
    """Text in a grammar, what is a token of its own as that token."""
    names = "|".join(re.escape(name) for name in sorted(marks, key=len, reverse=True) if name)
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


def _grammar_from_lark(source: str) -> str:
    # llguidance looks for the line that a Lark grammar begins with by a search that is quadratic in empty lines
    source = re.sub(r"\n\s*\n", "\n\n", source)
    try:
        lark = str(llguidance.grammar_from("grammar", source))
    except ValueError as error:
        raise GrammarError(f"grammar cannot be read: {error}") from error
    check_terminals(lark)  # rules of GBNF have become terminals
    return lark


def _schemas_within(lark: str) -> Iterator[Any]:
    """What a grammar has behind %json."""
    for found in re.finditer(r"%json\s*", lark):
        try:
            yield json.JSONDecoder().raw_decode(lark, found.end())[0]
        except (ValueError, RecursionError):  # the compiler says what is wrong with it
            continue


def _choice_grammar(source: str) -> Callable[[], str]:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"choice is not a JSON array: {error}", param="choice") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(text, str) and text for text in choices):
        raise GrammarError("choice must be a JSON array of at least one non-empty string", param="choice")
    # one terminal, as a lexer holds any number of texts, and a parser 2,000 at a place
    lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in choices)
    return lambda: llguidance.LLMatcher.grammar_from_lark(lark)


def json_form(spec: StructuredSpec) -> dict[str, Any]:
    """The schema of a `json_schema` or a `json_object`, in the form that a grammar can hold.

    Raises GrammarError for what is no JSON object, or beyond what can be held.
    """
    if spec.kind == "json_object":
        return {"type": "object"}
    try:
        schema = json.loads(spec.source)
    except RecursionError:
        raise GrammarError(f"json_schema is nested more than {MAX_SCHEMA_DEPTH} deep", param="json_schema") from None
    except ValueError as error:
        raise GrammarError(f"json_schema is not JSON: {error}", param="json_schema") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"json_schema is a {type(schema).__name__}; it must be an object", param="json_schema")
    return holdable(schema)


def _check_bytes(name: str, source: str, limit: int) -> None:
    size = len(source.encode("utf-8", errors="replace"))
    if size > limit:
        raise GrammarError(f"{name} has {size} bytes; at most {limit} are accepted", param=name)
