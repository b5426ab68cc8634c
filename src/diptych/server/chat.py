"""`POST /v1/chat/completions`: OpenAI's JSON around a turn. What the model writes is split into parts by `turn`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from diptych.engine.text.tokenizer import Tokenizer
from diptych.engine.text.tools import ToolCallDelta
from diptych.ground.clock import wall_time_s
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.server.accounting import running_usage
from diptych.server.generation import Generation, asked, sampling_params
from diptych.server.http.answers import Fragments
from diptych.server.http.errors import of_stream
from diptych.server.http.sse import DONE, error_event, event
from diptych.server.logprobs import logprobs_json
from diptych.server.reader import tool_dicts
from diptych.server.schema import ChatBody
from diptych.server.structured import constraint_field, structured_spec
from diptych.server.tool_choice import chosen
from diptych.server.turn import ToolUse, TurnRequest, TurnShape
from diptych.server.turn_parts import ChoiceParts, Finish, Part, TextPart, ThinkingPart, TurnDelta


def turn_request(generation: Generation, body: ChatBody) -> TurnRequest:
    """A body in the words of a turn."""

    def sampling(max_tokens: int, structured: StructuredSpec | None) -> SamplingParams:
        return sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured=structured,
        )

    choice = chosen(body.tool_choice)
    max_tokens, limit_param = body.asked_tokens
    return TurnRequest(
        render=lambda limit_tokens: generation.reader.chat(body, limit_tokens=limit_tokens),
        continues=bool(body.continue_final_message),
        tool_use=ToolUse(
            tools=tool_dicts(body.offered) or (),
            must_call=choice.must_call,
            name=choice.name,
            is_parallel=body.parallel_tool_calls is not False,
        ),
        structured=structured_spec(body),
        n=body.n or 1,
        max_tokens=max_tokens,
        limit_param=limit_param,
        sampling=sampling,
        wants_progress=bool(body.return_progress),
    )


class ChatAnswer(TurnShape):
    """One body on its way to an answer; `close` must follow in every case."""

    def __init__(self, generation: Generation, body: ChatBody, *, arrival_s: float) -> None:
        known = asked(generation, body, prefix="chatcmpl-", arrival_s=arrival_s, constraint=constraint_field(body))
        super().__init__(generation, known)
        self._body = body
        self._created = int(wall_time_s())

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        await self._begin(turn_request(self._generation, self._body))

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        turn = self._started
        logprobs = [Fragments() for _ in turn.choices]
        async for deltas in turn.deltas():
            if self._body.logprobs:
                for delta in deltas:
                    logprobs[delta.index].add(logprobs_json(self._tokenizer, delta.logprobs))
        choices = [self._whole(one, at, logprobs[at]) for at, one in enumerate(turn.choices)]
        whole = self._frame("chat.completion", choices)
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = list(turn.prompt_token_ids)
        return whole | self._accounts()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events: one per step and choice, or as many as `by_chunk` says; usage and timings on the last, then [DONE]."""
        turn, options = self._started, self._body.stream_options
        n_open, n_made = len(turn.choices), 0
        includes_usage = options is not None and bool(options.include_usage)
        counts_usage = options is not None and bool(options.continuous_usage_stats)
        begun: set[int] = set()

        def role(index: int) -> dict[str, Any]:
            """OpenAI's first chunk of a choice says who speaks and nothing else; many clients read no text from it."""
            message = {} if index in begun else {"role": "assistant", "content": ""}
            begun.add(index)
            return plain(index, message)

        def plain(index: int, delta: dict[str, Any]) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            usage = running_usage(len(turn.prompt_token_ids), n_made) if counts_usage else {}
            return self._frame("chat.completion.chunk", [choice]) | usage

        try:
            async for told in turn.progress():
                yield event(role(0) | {"prompt_progress": told.json()})
            async for deltas in turn.deltas():
                for delta in deltas:
                    if delta.index not in begun:
                        yield event(role(delta.index))
                    *before, parts = by_chunk(delta.parts)
                    for some in before:
                        yield event(plain(delta.index, delta_json(some)))
                    n_open -= delta.finish is not None
                    data = self._frame("chat.completion.chunk", [self._part(delta, parts)])
                    n_made += len(delta.token_ids)
                    if counts_usage:
                        data |= running_usage(len(turn.prompt_token_ids), n_made)
                    if n_open == 0 and not includes_usage:
                        data |= self._accounts()
                    yield event(data)
            if includes_usage:
                yield event(self._frame("chat.completion.chunk", []) | self._accounts())
            yield DONE
        except Exception as error:
            yield error_event(of_stream(error))
        finally:
            self.close()

    def _whole(self, choice: ChoiceParts, index: int, logprobs: Fragments) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "message": message(choice),
            "logprobs": {"content": logprobs} if self._body.logprobs else None,
            "finish_reason": finish_word(choice.finish),
            "stop_reason": None if choice.finish is None else choice.finish.stop,
        }
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _part(self, delta: TurnDelta, parts: Sequence[Part]) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": delta.index,
            "delta": delta_json(parts),
            "logprobs": {"content": logprobs_json(self._tokenizer, delta.logprobs)} if self._body.logprobs else None,
            "finish_reason": finish_word(delta.finish),
        }
        if delta.finish is not None:
            shown["stop_reason"] = delta.finish.stop
        if self._body.return_token_ids:
            shown["token_ids"] = list(delta.token_ids)
        return shown

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._generation.reader.tokenizer

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.response_id,
            "object": kind,
            "created": self._created,
            "model": self._asked.served.name,
            "system_fingerprint": self._asked.served.fingerprint,
            "choices": choices,
        }

    def _accounts(self) -> dict[str, Any]:
        account, accountant = self._started.account(), self._generation.accountant
        return {"usage": accountant.usage([account]), "timings": accountant.timings([account])}


def finish_word(finish: Finish | None) -> str | None:
    """OpenAI's finish_reason: a turn that ends in calls says so; one that the length cut says that."""
    if finish is None:
        return None
    return "tool_calls" if finish.has_calls and finish.reason is FinishReason.STOP else finish.reason.value


def message(choice: ChoiceParts) -> dict[str, Any]:
    """The assistant's message so far."""
    made: dict[str, Any] = {"role": "assistant", "content": choice.text if choice.text or not choice.calls else None}
    if choice.thought:
        made["reasoning_content"] = choice.thought
    if choice.calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls.values()
        ]
    return made


def delta_json(parts: Sequence[Part]) -> dict[str, Any]:
    """The `delta` of a stream chunk; a step without text yet has empty content."""
    shown: dict[str, Any] = {}
    for part in parts:
        match part:
            case ThinkingPart(text):
                shown["reasoning_content"] = shown.get("reasoning_content", "") + text
            case TextPart(text):
                shown["content"] = shown.get("content", "") + text
            case ToolCallDelta():
                shown.setdefault("tool_calls", []).append(_call_delta(part))
    return shown or {"content": ""}


def by_chunk(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts of one step, by the chunks that tell them, one at least: each has a call once, as OpenAI's client adds to the
    first entry of a chunk's list what comes in later ones.
    """
    chunks: list[list[Part]] = [[]]
    told: set[int] = set()
    for part in parts:
        if isinstance(part, ToolCallDelta):
            if part.index in told:
                chunks.append([])
                told.clear()
            told.add(part.index)
        chunks[-1].append(part)
    return chunks


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """OpenAI's stream shape: id and name once, then pieces of the arguments."""
    function: dict[str, Any] = {"arguments": call.arguments}
    shown: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        shown |= {"id": call.id, "type": "function"}
    if call.name is not None:
        function["name"] = call.name
    return shown
