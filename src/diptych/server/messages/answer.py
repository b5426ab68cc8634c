"""`POST /v1/messages`: Anthropic's JSON around a turn, whole or as its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from diptych.engine.text.tools import ToolCallDelta
from diptych.ground.events import Usage
from diptych.ground.phase import FinishReason
from diptych.server.generation import Generation, asked
from diptych.server.http.errors import anthropic_error, of_stream
from diptych.server.http.sse import named_event
from diptych.server.messages.body import MessagesBody
from diptych.server.messages.conversation import turn_request
from diptych.server.turn import TurnShape
from diptych.server.turn_parts import Part, TextPart, ThinkingPart


class Blocks:
    """Content blocks as the parts of a turn come: a part goes on with the open block, or ends it and begins the next."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._call: int | None = None  # of the open block, when it is one

    def push(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        """Take parts; gives the events that tell of them."""
        for part in parts:
            match part:
                case TextPart(text):
                    yield from self._go_on("text", None, {"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text}, text)
                case ThinkingPart(text):
                    yield from self._go_on("thinking", None, {"type": "thinking", "thinking": "", "signature": ""})
                    yield self._delta({"type": "thinking_delta", "thinking": text}, text)
                case ToolCallDelta():
                    block = {"type": "tool_use", "id": part.id or "", "name": part.name or "", "input": {}}
                    yield from self._go_on("tool_use", part.index, block)
                    if part.arguments:
                        yield self._delta({"type": "input_json_delta", "partial_json": part.arguments}, part.arguments)

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the open block."""
        if self.content:
            yield from self._end()

    def _go_on(self, kind: str, call: int | None, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.content and self.content[-1]["type"] == kind and self._call == call:
            return
        if self.content:
            yield from self._end()
        self._call = call
        self.content.append(dict(block))
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any], piece: str) -> dict[str, Any]:
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        block, text = self.content[-1], "".join(self._pieces)
        self._pieces = []
        if block["type"] == "tool_use":
            block["input"] = read_input(text)
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": len(self.content) - 1}


def read_input(text: str) -> dict[str, Any]:
    """The arguments of a call as the object that Anthropic's clients expect.

    What the length cut off is read as far as it goes, as their SDKs do; what is no JSON stands under `unreadable`.
    """
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"unreadable": text}


class MessagesAnswer(TurnShape):
    """One body on its way to an answer; `close` must follow in every case."""

    def __init__(self, generation: Generation, body: MessagesBody, *, arrival_s: float) -> None:
        constraint = "output_config.format" if body.output_config and body.output_config.format else "tools"
        super().__init__(generation, asked(generation, body, prefix="msg_", arrival_s=arrival_s, constraint=constraint))
        self._body = body
        self._blocks = Blocks()

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        await self._begin(turn_request(self._generation, self._body))

    async def answer(self) -> dict[str, Any]:
        """The whole message."""
        turn, blocks = self._started, self._blocks
        async for deltas in turn.deltas():
            for delta in deltas:
                list(blocks.push(delta.parts))
        list(blocks.finish())
        return {**self._message(blocks.content), **self._end(), "usage": self._usage(), **self._timings()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Anthropic's events: the message's head, its blocks with their deltas, why it ended with usage, and the end."""
        turn, blocks, is_begun = self._started, self._blocks, False
        try:
            async for deltas in turn.deltas():
                if not is_begun:  # by now it is known what the cache held
                    is_begun = True
                    head = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
                    yield named_event({"type": "message_start", "message": head})
                for delta in deltas:
                    for told in blocks.push(delta.parts):
                        yield named_event(told)
            for told in blocks.finish():
                yield named_event(told)
            end = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
            yield named_event(end | self._timings())
            yield named_event({"type": "message_stop"})
        except Exception as error:
            yield named_event(anthropic_error(of_stream(error)))
        finally:
            self.close()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._asked.served.name,
            "system_fingerprint": self._asked.served.fingerprint,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`."""
        finish = self._started.choices[0].finish
        assert finish is not None, "not over"
        stop = finish.stop if isinstance(finish.stop, str) else None
        if finish.reason is FinishReason.LENGTH:
            is_cut = self._started.max_tokens < self._body.max_tokens
            reason = "model_context_window_exceeded" if is_cut else "max_tokens"
        elif finish.reason is not FinishReason.STOP:
            reason = finish.reason.value  # an abort; Anthropic's has no word for it
        elif finish.stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if finish.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """input + cache_creation + cache_read = the prompt: read elsewhere, kept for later ones, found in the cache."""
        turn = self._started
        usage: Usage = turn.usage()
        written = self._generation.accountant.cache_written_tokens(usage)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"thinking_tokens": turn.choices[0].thinking.tokens},
            "service_tier": "standard",
        }

    def _timings(self) -> dict[str, Any]:
        return {"timings": self._generation.accountant.timings([self._started.account()])}
