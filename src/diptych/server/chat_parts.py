"""What a chat model writes, split into content, reasoning and tool calls while it is being written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diptych.engine.text.reasoning import Opening, ReasoningSplitter
from diptych.engine.text.tools import ToolCallDelta, ToolCallParser, ToolFormat, tool_format_of_template
from diptych.ground.phase import FinishReason
from diptych.ground.step import TokenLogprobs
from diptych.server.accounting import Thinking
from diptych.server.generation import StepDelta


@dataclass(slots=True)
class PartDelta:
    """What one step added to a choice. tool_calls: OpenAI's delta objects."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The `delta` of a stream chunk; a step without text yet has empty content."""
        shown: dict[str, Any] = {}
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = self.tool_calls
        if self.content or not shown:
            shown["content"] = self.content
        return shown


class ChatChoice:
    """One choice of one chat answer. Fed with steps, in order.

    tags: the model's thinking tags, None for a model that does not think.
    """

    def __init__(
        self,
        *,
        tags: tuple[str, str] | None,
        opening: Opening,
        tool_format: ToolFormat,
        tool_names: Sequence[str],
        has_tools: bool,
    ) -> None:
        self.thinking = Thinking()
        self.has_begun = False
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop_reason: str | int | None = None
        self._reason: FinishReason | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._splitter = ReasoningSplitter(tags, opening=opening) if tags else None
        self._parser: ToolCallParser | None = None
        if has_tools:
            self._parser = ToolCallParser(tool_format, tool_names=tool_names)

    def push(self, step: StepDelta) -> PartDelta:
        """Take a step; returns what it adds to the answer."""
        self.has_begun = True
        self.token_ids += step.token_ids
        self.logprobs += step.logprobs
        is_last = step.finish_reason is not None
        if is_last:
            self._reason, self.stop_reason = step.finish_reason, step.stop_reason
        delta = PartDelta()
        answer = self._split(step, delta, is_last=is_last)
        self._parse(answer, delta, is_last=is_last)
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        return delta

    def _split(self, step: StepDelta, delta: PartDelta, *, is_last: bool) -> str:
        """Put reasoning into `delta`; returns the rest of the text."""
        thinking, splitter = self.thinking, self._splitter
        if splitter is None:
            if step.token_ids and thinking.visible_s is None:
                thinking.visible_s = step.at_s
            return step.text
        parts = [splitter.push(step.text, len(step.token_ids))]
        if is_last:
            parts.append(splitter.finish())
        if splitter.reasoning_tokens > thinking.tokens:
            thinking.tokens, thinking.end_s = splitter.reasoning_tokens, step.at_s
        if splitter.answer_tokens > 0 and thinking.visible_s is None:
            thinking.visible_s = step.at_s
        delta.reasoning = "".join(part.reasoning for part in parts)
        return "".join(part.answer for part in parts)

    def _parse(self, text: str, delta: PartDelta, *, is_last: bool) -> None:
        """Put content and calls into `delta`."""
        if self._parser is None:
            delta.content = text
            return
        parts = [self._parser.push(text)]
        if is_last:
            parts.append(self._parser.finish())
        delta.content = "".join(part.content for part in parts)
        for call in (call for part in parts for call in part.calls):
            known = self._calls.setdefault(
                call.index, {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            )
            known["function"]["arguments"] += call.arguments
            delta.tool_calls.append(_call_delta(call))

    @property
    def finish_word(self) -> str | None:
        """OpenAI's finish_reason: a turn that ends in calls says so."""
        if self._reason is None:
            return None
        return "tool_calls" if self._calls and self._reason is FinishReason.STOP else self._reason.value

    def message(self) -> dict[str, Any]:
        """The assistant's message so far."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
        return message


def tool_format(template_source: str) -> ToolFormat:
    """How this model writes calls; Hermes where the template does not say."""
    return tool_format_of_template(template_source) or ToolFormat.HERMES


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """OpenAI's stream shape: id and name once, then pieces of the arguments."""
    function: dict[str, Any] = {"arguments": call.arguments}
    shown: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        shown |= {"id": call.id, "type": "function"}
    if call.name is not None:
        function["name"] = call.name
    return shown
