"""Harmony, the form of gpt-oss: every answer is a row of messages, each with a header that names its channel and recipient.

`<|channel|>analysis<|message|>` is thought, `commentary to=functions.name` a call, anything else is said. No template
shows that a header may come at any time, so this reader is written by hand: thoughts apart, and calls in one form, `HARMONY`.
Source: OpenAI's harmony response format (github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re

from diptych.engine.text.call_form import NAME, CallForm, Style
from diptych.engine.text.reasoning import Place, ReasoningSplitter, SplitDelta, partial_end

_MESSAGE, _START = "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_HEADER = re.compile(r"<\||assistant\b|to=")
_HEADER_BEGINS = ("<|", "assistant", "to=")
HARMONY = CallForm(
    style=Style.NAMED,
    head=f"<|channel|>commentary to=functions.{NAME} <|constrain|>json{_MESSAGE}",
    close="<|call|>",
    is_single=True,
)
# a thought, and what stands behind it until the next header
HARMONY_TAGS = (f"<|channel|>analysis{_MESSAGE}", f"<|end|>{_START}assistant")


def is_harmony(source: str) -> bool:
    """Whether a template writes messages with channels."""
    return all(mark in source for mark in ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"))


class HarmonySplitter(ReasoningSplitter):
    """One output, piece by piece; `START` is within a header."""

    _is_call = False

    def _advance(self, *, is_last: bool) -> SplitDelta:
        reasoning: list[str] = []
        answer: list[str] = []
        while self._held:
            if self._place is Place.START:
                if not self._read_header(answer):
                    break
                continue
            found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
            keep = 0 if is_last or found else max(partial_end(self._held, end) for end in _ENDS)
            at, end = min(found, default=(len(self._held) - keep, ""))
            (reasoning if self._place is Place.REASONING else answer).append(self._held[:at])
            self._held = self._held[at + (0 if end == _START else len(end)) :]
            if not end:
                break
            if self._is_call:
                answer.append(HARMONY.close)
            self._place, self._is_call = Place.START, False
        if is_last:
            answer.append("" if "<|" in self._held else self._held)  # a header that never ended is nobody's text
            self._held = ""
        return SplitDelta("".join(reasoning), "".join(answer))

    def _read_header(self, answer: list[str]) -> bool:
        """Up to the text of the message; False while it is not there."""
        text = self._held.lstrip()
        if not _HEADER.match(text) and not any(begin.startswith(text) for begin in _HEADER_BEGINS):
            self._place = Place.ANSWER  # an output that a grammar holds to something else
            return True
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            return False
        self._held = rest
        recipient = _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self._place = Place.REASONING if "analysis" in header and recipient is None else Place.ANSWER
        if recipient is not None:
            answer.append(HARMONY.head.replace(NAME, recipient[1]))
        return True
