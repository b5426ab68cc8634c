"""`POST /v1/chat/completions`: OpenAI's JSON around a turn. What the model writes is split into parts by `turn`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from diptych.engine.text.tools import ToolCallDelta
from diptych.ground.clock import wall_time_s
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.ground.step import TokenLogprobs
from diptych.server.accounting import running_usage
from diptych.server.answers import Fragments
from diptych.server.completions import finite
from diptych.server.errors import ApiError
from diptych.server.generation import Generation, asked, sampling_params
from diptych.server.reader import tool_dicts
from diptych.server.schema import ChatBody, NamedToolChoice
from diptych.server.sse import DONE, error_event, event
from diptych.server.structured import structured_spec
from diptych.server.turn import ToolUse, Turn, TurnRequest
from diptych.server.turn_parts import ChoiceParts, Finish, Part, TextPart, ThinkingPart, TurnDelta


def template_kwargs(body: ChatBody, template_source: str) -> dict[str, Any]:
    """The fields that only a template can honour, as its variables. Raises ApiError 400 where it knows none of that name."""
    made: dict[str, Any] = {}
    effort, verbosity = body.reasoning_effort, body.verbosity
    if effort is not None:
        if "enable_thinking" in template_source:  # as vLLM does: it can only be on or off
            made["enable_thinking"] = effort != "none"
        if "reasoning_effort" in template_source:
            made["reasoning_effort"] = effort
        if not made:
            raise _unknown_to_template("reasoning_effort", effort)
    if verbosity is not None and "verbosity" in template_source:
        made["verbosity"] = verbosity
    elif verbosity not in (None, "medium"):  # OpenAI's default
        raise _unknown_to_template("verbosity", verbosity)
    return made


def _unknown_to_template(name: str, value: str | None) -> ApiError:
    return ApiError(
        400,
        f"{name} is {value!r}; the chat template of this model has no such setting "
        "(hint: leave it out; what the template does know can be sent as chat_template_kwargs)",
        param=name,
        code="invalid_value",
    )


def turn_request(generation: Generation, body: ChatBody) -> TurnRequest:
    """A body in the words of a turn."""

    def sampling(max_tokens: int, structured: StructuredSpec | None) -> SamplingParams:
        return sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured=structured,
        )

    has_tools = body.tool_choice != "none"
    kwargs = template_kwargs(body, generation.reader.template.source)
    max_tokens, limit_param = body.asked_tokens
    return TurnRequest(
        render=lambda limit_tokens: generation.reader.render(
            body, limit_tokens=limit_tokens, documents=body.documents, has_tools=has_tools, kwargs=kwargs
        ),
        continues=bool(body.continue_final_message),
        tool_use=ToolUse(
            tools=tool_dicts(body.tools) or () if has_tools else (),
            must_call=body.tool_choice not in (None, "auto", "none"),
            name=body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None,
            is_parallel=body.parallel_tool_calls is not False,
        ),
        structured=structured_spec(body),
        n=body.n or 1,
        max_tokens=max_tokens,
        limit_param=limit_param,
        sampling=sampling,
    )


class ChatAnswer:
    """One body on its way to an answer; `close` must follow in every case."""

    def __init__(self, generation: Generation, body: ChatBody, *, arrival_s: float) -> None:
        self._generation = generation
        self._body = body
        self._asked = asked(body, prefix="chatcmpl", arrival_s=arrival_s)
        self._created = int(wall_time_s())
        self._turn: Turn | None = None

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        self._generation.check_model(self._body.model)
        if self._body.max_tokens == 0:
            raise ApiError(400, "max_tokens is 0; it must be at least 1", param="max_tokens")
        turn = Turn(self._generation, turn_request(self._generation, self._body), self._asked)
        await turn.start()
        self._turn = turn

    def close(self) -> None:
        """Abort what still runs."""
        if self._turn is not None:
            self._turn.close()

    @property
    def _started(self) -> Turn:
        assert self._turn is not None, "not started"
        return self._turn

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        turn = self._started
        logprobs = [Fragments() for _ in turn.choices]
        async for deltas in turn.deltas():
            if self._body.logprobs:
                for delta in deltas:
                    logprobs[delta.index].add(self._logprobs(delta.logprobs))
        choices = [self._whole(one, at, logprobs[at]) for at, one in enumerate(turn.choices)]
        whole = self._frame("chat.completion", choices)
        if self._body.return_token_ids:
            whole["prompt_token_ids"] = list(turn.prompt_token_ids)
        return whole | self._accounts()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events: one per step and choice, usage and timings on the last, then [DONE]."""
        turn, options = self._started, self._body.stream_options
        n_open, n_made = len(turn.choices), 0
        includes_usage = options is not None and bool(options.include_usage)
        counts_usage = options is not None and bool(options.continuous_usage_stats)
        try:
            async for deltas in turn.deltas():
                for delta in deltas:
                    n_open -= delta.finish is not None
                    data = self._frame("chat.completion.chunk", [self._part(delta)])
                    n_made += len(delta.token_ids)
                    if counts_usage:
                        data |= running_usage(len(turn.prompt_token_ids), n_made)
                    if n_open == 0 and not includes_usage:
                        data |= self._accounts()
                    yield event(data)
            if includes_usage:
                yield event(self._frame("chat.completion.chunk", []) | self._accounts())
            yield DONE
        except ApiError as error:
            yield error_event(error)
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

    def _part(self, delta: TurnDelta) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": delta.index,
            "delta": ({"role": "assistant"} if delta.is_first else {}) | delta_json(delta.parts),
            "logprobs": {"content": self._logprobs(delta.logprobs)} if self._body.logprobs else None,
            "finish_reason": finish_word(delta.finish),
        }
        if delta.finish is not None:
            shown["stop_reason"] = delta.finish.stop
        if self._body.return_token_ids:
            shown["token_ids"] = list(delta.token_ids)
        return shown

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._generation.reader.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._asked.response_id,
            "object": kind,
            "created": self._created,
            "model": self._generation.model.name,
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
                shown["reasoning_content"] = text
            case TextPart(text):
                shown["content"] = text
            case ToolCallDelta():
                shown.setdefault("tool_calls", []).append(_call_delta(part))
    return shown or {"content": ""}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """OpenAI's stream shape: id and name once, then pieces of the arguments."""
    function: dict[str, Any] = {"arguments": call.arguments}
    shown: dict[str, Any] = {"index": call.index, "function": function}
    if call.id is not None:
        shown |= {"id": call.id, "type": "function"}
    if call.name is not None:
        function["name"] = call.name
    return shown
