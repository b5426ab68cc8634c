r"""Splits an answer into what the model thought and what it says, while the text is still coming.

Owns the tags. A begin tag counts only at the very start of the output (the word may occur in an answer later), or when
the template has already opened it in the prompt; behind a prompt that has closed it, all output is answer. Blank space
next to the tags belongs to neither part.

>>> splitter = ReasoningSplitter(("<think>", "</think>"))
>>> splitter.push("<think>2 + 2 is 4</th"), splitter.push("ink>\n\nFour.")
(SplitDelta(reasoning='2 + 2 is 4', answer=''), SplitDelta(reasoning='', answer='Four.'))
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Pairs in use by open models; the first that a template mentions is taken.
KNOWN_TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
DEFAULT_TAGS = KNOWN_TAGS[0]


@dataclass(frozen=True, slots=True)
class SplitDelta:
    """New text of each part."""

    reasoning: str = ""
    answer: str = ""


class Place(Enum):
    """Where a reader stands in an output."""

    START = "start"  # nothing but blanks or part of a begin tag so far
    REASONING = "reasoning"
    AFTER = "after"  # the end tag is there; blanks are skipped
    ANSWER = "answer"


def tags_of_template(source: str) -> tuple[str, str] | None:
    """The thinking tags a chat template mentions, or None for a model that does not think."""
    return next((tags for tags in KNOWN_TAGS if tags[0] in source or tags[1] in source), None)


class Opening(Enum):
    """Where a prompt leaves the model that goes on from it."""

    FREE = "free"  # it may open the tags itself, or not think at all
    INSIDE = "inside"  # the prompt ends with the begin tag: the output starts as reasoning
    BEHIND = "behind"  # the prompt ends with the end tag (thinking is switched off), or within an answer


def opening_of_prompt(prompt: str, tags: tuple[str, str] = DEFAULT_TAGS) -> Opening:
    """Read off the end of a rendered prompt."""
    end = prompt.rstrip()
    if end.endswith(tags[0]):
        return Opening.INSIDE
    return Opening.BEHIND if end.endswith(tags[1]) else Opening.FREE


_FIRST_PLACE = {Opening.FREE: Place.START, Opening.INSIDE: Place.REASONING, Opening.BEHIND: Place.ANSWER}


class ReasoningSplitter:
    """One output, piece by piece.

    reasoning_tokens and answer_tokens count the pushed tokens, those of one push together; tags count as reasoning.
    """

    def __init__(self, tags: tuple[str, str] = DEFAULT_TAGS, *, opening: Opening = Opening.FREE) -> None:
        self._begin, self._end = tags
        self._place = _FIRST_PLACE[opening]
        self._held = ""
        self._has_reasoning = False  # something of it is out, so blanks now stand inside it
        self._waiting_tokens = 0  # pushed while it was open where they belong
        self.reasoning_tokens = 0
        self.answer_tokens = 0

    def push(self, text: str, n_tokens: int = 1) -> SplitDelta:
        """Take new text that came with `n_tokens` tokens."""
        before = self._place
        self._held += text
        delta = self._advance(is_last=False)
        self._count(before, n_tokens)
        return delta

    def finish(self) -> SplitDelta:
        """The output is over; what was held back comes out."""
        delta = self._advance(is_last=True)
        if self._place is Place.REASONING:
            self.reasoning_tokens += self._waiting_tokens
        else:
            self.answer_tokens += self._waiting_tokens
        self._waiting_tokens = 0
        return delta

    def _count(self, before: Place, n_tokens: int) -> None:
        self._waiting_tokens += n_tokens
        if self._place is Place.START:
            return
        begins_after = before is Place.START and self._place is Place.AFTER
        if before is Place.REASONING or self._place is Place.REASONING or begins_after:
            self.reasoning_tokens += self._waiting_tokens
        else:
            self.answer_tokens += self._waiting_tokens
        self._waiting_tokens = 0

    def _advance(self, *, is_last: bool) -> SplitDelta:
        reasoning = ""
        if self._place is Place.START:
            self._leave_start(is_last=is_last)
        if self._place is Place.REASONING:
            reasoning = self._take_reasoning(is_last=is_last)
        if self._place is Place.AFTER:
            self._held = self._held.lstrip()
            if self._held:
                self._place = Place.ANSWER
        answer = ""
        if self._place is Place.ANSWER:
            answer, self._held = self._held, ""
        return SplitDelta(reasoning, answer)

    def _leave_start(self, *, is_last: bool) -> None:
        text = self._held.lstrip()
        if text.startswith(self._begin):
            self._place = Place.REASONING
            self._held = text[len(self._begin) :]
        elif is_last or not self._begin.startswith(text):
            self._place = Place.ANSWER

    def _take_reasoning(self, *, is_last: bool) -> str:
        if not self._has_reasoning:
            self._held = self._held.lstrip()
        at = self._held.find(self._end)
        if at >= 0:
            out = self._held[:at].rstrip()
            self._held = self._held[at + len(self._end) :]
            self._place = Place.AFTER
        else:
            keep = 0 if is_last else partial_end(self._held, self._end)
            # blanks at the end wait: they are dropped if the end tag follows
            out = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(out) :]
        self._has_reasoning = self._has_reasoning or bool(out)
        return out


def partial_end(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:n]):
            return n
    return 0
