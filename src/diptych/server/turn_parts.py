"""What a chat model writes, split into typed parts while it is being written: text, thinking, tool calls.

Knows no protocol: the JSON shapes of answers stand in `chat`, `messages` and `responses`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.engine.text.dialect import Dialect
from diptych.engine.text.reasoning import Opening, ReasoningSplitter
from diptych.engine.text.tools import ToolCall, ToolCallDelta, ToolCallParser, ToolDelta
from diptych.ground.phase import FinishReason
from diptych.ground.step import TokenLogprobs
from diptych.server.accounting import Thinking
from diptych.server.generation import StepDelta


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """A piece of the reasoning before it."""

    text: str


Part = TextPart | ThinkingPart | ToolCallDelta
# of the tags and the JSON of calls, in every format
_CALL_EDGES = re.compile(r"(?<=[>\]}{])|(?=[<\[{])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a choice ended. has_calls: its last word are tool calls. stop: the stop string or id that the client asked for."""

    reason: FinishReason
    has_calls: bool
    stop: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDelta:
    """What one step added to one choice, in the order in which the model wrote it."""

    index: int
    parts: tuple[Part, ...]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: Finish | None


@dataclass(slots=True)
class ChoiceParts:
    """One choice of one turn: fed with steps in order, it keeps what came so far.

    dialect: how the model writes. tools: parameter schemas by name of those that are offered.
    """

    dialect: Dialect
    opening: Opening
    tools: Mapping[str, Mapping[str, Any]]
    thinking: Thinking = field(default_factory=Thinking)
    token_ids: list[int] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    finish: Finish | None = None
    _texts: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _splitter: ReasoningSplitter | None = None
    _parser: ToolCallParser | None = None

    def __post_init__(self) -> None:
        """Set up the parsers that this model and request need."""
        self._splitter = self.dialect.splitter(self.opening)
        if self.tools:
            self._parser = ToolCallParser(self.dialect.form, tools=self.tools)

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """The reasoning so far."""
        return "".join(self._thoughts)

    def push(self, step: StepDelta) -> TurnDelta:
        """Take a step; returns what it adds to the answer."""
        self.token_ids += step.token_ids
        is_last = step.finish_reason is not None
        thought, rest = self._split(step, is_last=is_last)
        parts: list[Part] = [ThinkingPart(thought)] if thought else []
        parts += self._parse(rest, is_last=is_last)
        self._thoughts.append(thought)
        if step.finish_reason is not None:
            self.finish = Finish(reason=step.finish_reason, has_calls=bool(self.calls), stop=step.stop_reason)
        return TurnDelta(
            index=step.index,
            parts=tuple(parts),
            token_ids=step.token_ids,
            logprobs=step.logprobs,
            finish=self.finish,
        )

    def _split(self, step: StepDelta, *, is_last: bool) -> tuple[str, str]:
        """(reasoning, the rest) of a step's text."""
        thinking, splitter = self.thinking, self._splitter
        if splitter is None:
            if step.token_ids and thinking.visible_s is None:
                thinking.visible_s = step.at_s
            return "", step.text
        pieces = [splitter.push(step.text, len(step.token_ids))]
        if is_last:
            pieces.append(splitter.finish())
        if splitter.reasoning_tokens > thinking.tokens:
            thinking.tokens, thinking.end_s = splitter.reasoning_tokens, step.at_s
        if splitter.answer_tokens > 0 and thinking.visible_s is None:
            thinking.visible_s = step.at_s
        return "".join(piece.reasoning for piece in pieces), "".join(piece.answer for piece in pieces)

    def _parse(self, text: str, *, is_last: bool) -> list[TextPart | ToolCallDelta]:
        """Content and pieces of calls in what is no reasoning."""
        if self._parser is None:
            pieces = [ToolDelta(content=text)]
        else:
            # a step may end a call and go on with text, or the other way round: cut where either can begin, order shows
            pieces = [self._parser.push(part) for part in _CALL_EDGES.split(text)]
            if is_last:
                pieces.append(self._parser.finish())
        parts: list[TextPart | ToolCallDelta] = []
        for piece in pieces:
            if piece.content:
                self._texts.append(piece.content)
                if parts and isinstance(parts[-1], TextPart):
                    parts[-1] = TextPart(parts[-1].text + piece.content)
                else:
                    parts.append(TextPart(piece.content))
            for call in piece.calls:
                known = self.calls.get(call.index, ToolCall(id=call.id or "", name=call.name or "", arguments=""))
                arguments = known.arguments + call.arguments
                self.calls[call.index] = ToolCall(id=known.id, name=known.name, arguments=arguments)
                parts.append(call)
        return parts
