"""Token by token to text: valid UTF-8 only, stop strings found across token borders.

Owns the bytes and characters that are not yet safe to hand out. The concatenated deltas equal
`Tokenizer.decode` of all pushed ids (up to the stop string). Cost per token is constant on average.

>>> stream = TextStream(tokenizer, ("END",))  # doctest: +SKIP
>>> stream.push(123)  # doctest: +SKIP
TextDelta(text=' the', is_stopped=False, stop_string=None)
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.engine.text.tokenizer import PieceKind, Tokenizer, fallback_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text. Once `is_stopped`, the stream takes no more tokens; `stop_string` is the one that was found."""

    text: str
    is_stopped: bool
    stop_string: str | None = None


class TextStream:
    """The text of one sequence's output tokens.

    Hidden special tokens are not shown. `follows_text`: the output continues a prompt, so a tokenizer that strips the
    first space of a text (Llama 2) must not strip it here. `min_tokens`: what the first so many tokens write ends no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        *,
        follows_text: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = _decoder_for(tokenizer, follows_text)
        self._hidden_ids = tokenizer.hidden_token_ids
        self._stop = StopFinder(stop) if stop else None
        self._include_stop = include_stop
        self._tokens_before_stop = min_tokens
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._is_stopped = False

    def push(self, token_id: int) -> TextDelta:
        """Add one token; returns the text that became certain (often, but not always, this token's)."""
        assert not self._is_stopped, "push after the stream stopped"
        self._tokens_before_stop -= 1
        text = "" if token_id in self._hidden_ids else self._decoder.push(token_id)
        return self._advance(text, is_last=False)

    def finish(self) -> TextDelta:
        """The end of the sequence: everything held back comes out, incomplete UTF-8 as U+FFFD."""
        if self._is_stopped:
            return TextDelta(text="", is_stopped=True)
        delta = self._advance(self._decoder.finish(), is_last=True)
        self._is_stopped = True
        return delta

    def _advance(self, text: str, *, is_last: bool) -> TextDelta:
        if self._stop is None:
            return TextDelta(text=text, is_stopped=False)
        begin = len(self._held)  # characters of `window` the finder has already seen
        window = self._held + text
        found = self._stop.feed(text)
        while found is not None and self._tokens_before_stop >= 0:  # too early: read past it
            text = text[found[0] :]
            found = self._stop.feed(text)
        if found is not None:
            end, stop_string = begin + found[0], found[1]
            out = window[: end if self._include_stop else end - len(stop_string)]
            self._is_stopped = True
            self._held = ""
            return TextDelta(text=out, is_stopped=True, stop_string=stop_string)
        keep = 0 if is_last else self._stop.partial
        self._held = window[len(window) - keep :]
        return TextDelta(text=window[: len(window) - keep], is_stopped=False)


class StopFinder:
    """Finds the stop string that is complete first (of those, the longest), whatever pieces the text comes in.

    One Knuth-Morris-Pratt automaton per stop string: `partial` is the longest end of the text that begins one of them.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._failures = [_failure_table(text) for text in self._stop]
        self._states = [0] * len(self._stop)

    @property
    def partial(self) -> int:
        """How many characters at the end of the text may still become a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read `text`; returns (one past the match in `text`, stop string) of the first match, else None."""
        for i, char in enumerate(text):
            found: str | None = None
            for number, stop in enumerate(self._stop):
                state = self._states[number]
                while state and stop[state] != char:
                    state = self._failures[number][state - 1]
                state += stop[state] == char
                self._states[number] = state
                if state == len(stop):
                    found = found or stop
                    self._states[number] = self._failures[number][state - 1]
            if found is not None:
                return i + 1, found
        return None


def _failure_table(text: str) -> list[int]:
    """KMP: for each end, the longest proper prefix of `text` that is also a suffix of text[:end + 1]."""
    table = [0] * len(text)
    state = 0
    for i in range(1, len(text)):
        while state and text[i] != text[state]:
            state = table[state - 1]
        state += text[i] == text[state]
        table[i] = state
    return table


class _Decoder(Protocol):
    """Ids to text, holding back what is not yet certain."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class _ByteLevelDecoder:
    """Every token is bytes; UTF-8 is decoded as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieceDecoder:
    """Text tokens with U+2581 for space, and runs of byte tokens.

    A run of byte tokens counts as a whole: valid UTF-8, or one U+FFFD per byte. So it is held until it ends.
    """

    def __init__(self, tokenizer: Tokenizer, *, stripped_spaces: int) -> None:
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._spaces_to_strip = stripped_spaces

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        byte = fallback_byte(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self._end_run() + self._strip(token.replace("\u2581", " "))

    def finish(self) -> str:
        return self._end_run()

    def _end_run(self) -> str:
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return self._strip(run.decode())
        except UnicodeDecodeError:
            return self._strip("\ufffd" * len(run))

    def _strip(self, text: str) -> str:
        while self._spaces_to_strip and text.startswith(" "):
            text = text[1:]
            self._spaces_to_strip -= 1
        if text:
            self._spaces_to_strip = 0
        return text


class _WindowDecoder:
    """Any other tokenizer: decode a short window before and after each token and hand out the difference.

    Such decoders treat the first token of a text in their own way (Metaspace drops its space). So an output that follows
    a text begins behind a token that is never shown. A run of byte tokens is held until it ends: a byte that fits to none
    before it makes U+FFFD of them all.
    """

    def __init__(self, tokenizer: Tokenizer, *, follows_text: bool) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._ids: list[int] = _some_word(tokenizer) if follows_text else []
        self._read = len(self._ids)  # ids[:read] are out as text; ids[read:] are not

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._ids.append(token_id)
        if fallback_byte(token) is not None:
            return ""
        before = self._decode(self._ids[: self._read], False)
        after = self._decode(self._ids, False)
        if after == before or after.endswith("\ufffd") or not after.startswith(before):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return after[len(before) :]

    def finish(self) -> str:
        before = self._decode(self._ids[: self._read], False)
        return self._decode(self._ids, False)[len(before) :]


def _some_word(tokenizer: Tokenizer) -> list[int]:
    """A token that is plain text wherever it stands; none where the vocabulary has no such."""
    for token_id in (*tokenizer.encode("a", add_special_tokens=False), *range(tokenizer.vocab_size)):
        if token_id not in tokenizer.special_token_ids and tokenizer.decode([token_id]).strip(" \ufffd"):
            return [token_id]
    return []


def _decoder_for(tokenizer: Tokenizer, follows_text: bool) -> _Decoder:
    if tokenizer.piece_kind is PieceKind.BYTE_LEVEL:
        return _ByteLevelDecoder(tokenizer)
    if tokenizer.piece_kind is PieceKind.SENTENCEPIECE:
        return _SentencePieceDecoder(tokenizer, stripped_spaces=0 if follows_text else tokenizer.stripped_spaces)
    return _WindowDecoder(tokenizer, follows_text=follows_text)
