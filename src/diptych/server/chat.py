"""`POST /v1/chat/completions`: a conversation in, an assistant's turn out: text, reasoning, tool calls.

Owns the shape of the answer and of its stream. What the model writes is split into its parts by `chat_parts`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diptych.engine.text.reasoning import Opening, opening_of_prompt, tags_of_template
from diptych.engine.text.template import RenderedPrompt
from diptych.engine.text.tools import CALL_TAGS, tool_call_spec
from diptych.ground.clock import wall_time_s
from diptych.ground.request import FreeReasoning, StructuredSpec
from diptych.ground.step import TokenLogprobs
from diptych.server.chat_parts import ChatChoice, PartDelta, tool_format
from diptych.server.completions import finite
from diptych.server.errors import ApiError
from diptych.server.generation import (
    OpenedRequest,
    StepDelta,
    asked,
    check_model,
    close_all,
    merged_steps,
    open_requests,
    output_limit,
    sampling_params,
)
from diptych.server.schema import ChatBody, Message, NamedToolChoice, TemplateBody, TokenizeBody, Tool
from diptych.server.sse import DONE, error_event, event
from diptych.server.state import ServerState
from diptych.server.structured import structured_spec


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: parts joined, `developer` as `system`, absent fields left out."""
    made = []
    for message in messages:
        fields: dict[str, Any] = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        elif message.content is None:
            fields["content"] = ""
        if message.role == "developer":
            fields["role"] = "system"
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _object_or_text(call["function"]["arguments"])
        made.append(fields)
    return made


def _object_or_text(arguments: str) -> Any:
    """Templates print arguments as JSON themselves, so they want the object; broken JSON stays text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tool_dicts(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them."""
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


async def render_messages(
    state: ServerState,
    body: ChatBody | TokenizeBody | TemplateBody,
    *,
    limit_tokens: int,
    documents: Sequence[Mapping[str, Any]] | None = None,
    has_tools: bool = True,
) -> RenderedPrompt:
    """Run the chat template on a worker thread. Raises TemplateError, or PromptTooLong for far more than limit_tokens."""
    continues = bool(body.continue_final_message)
    adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt

    def render() -> RenderedPrompt:
        return state.template.render(
            message_dicts(body.messages or ()),
            tools=tool_dicts(body.tools) if has_tools else None,
            documents=documents,
            add_generation_prompt=adds_prompt,
            continue_final_message=continues,
            kwargs=body.chat_template_kwargs,
            limit_tokens=limit_tokens,
        )

    return await state.workers.run(render)


class Chat:
    """One body on its way to an answer. `opened` is set by `start`; `close` must follow in every case."""

    def __init__(self, state: ServerState, body: ChatBody, *, arrival_s: float) -> None:
        self._state = state
        self._body = body
        self._asked = asked(body, prefix="chatcmpl", arrival_s=arrival_s)
        self._created = int(wall_time_s())
        self._choices: list[ChatChoice] = []
        self._tags = tags_of_template(state.template.source)
        self._opening = Opening.BEHIND
        self.opened: list[OpenedRequest] = []

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        body, state = self._body, self._state
        check_model(state, body.model)
        if body.max_tokens == 0:
            raise ApiError(400, "max_tokens is 0; it must be at least 1", param="max_tokens")
        rendered = await render_messages(
            state,
            body,
            limit_tokens=state.context_tokens,
            documents=body.documents,
            has_tools=body.tool_choice != "none",
        )
        if self._tags is not None:
            self._opening = opening_of_prompt(rendered.text, self._tags)
            if body.continue_final_message and self._opening is Opening.FREE:
                self._opening = Opening.BEHIND
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        sampling = sampling_params(
            body,
            max_tokens=output_limit(
                limit, default=None, prompt_tokens=len(rendered.token_ids), context_tokens=state.context_tokens
            ),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured=self._behind_reasoning(self._constraint()),
        )
        self._choices = [self._new_choice() for _ in range(body.n or 1)]
        self.opened = await open_requests(state, [rendered], [sampling], self._asked)

    def _constraint(self) -> StructuredSpec | None:
        body = self._body
        spec = structured_spec(body)
        if body.tool_choice in (None, "auto", "none"):
            return spec
        if spec is not None:
            raise ApiError(
                400, "a forced tool_choice and another constraint on the output exclude each other", param="tool_choice"
            )
        tokenizer = self._state.tokenizer
        tag_ids = [(tag, tokenizer.token_id(tag)) for tag in CALL_TAGS]
        return tool_call_spec(
            tool_dicts(body.tools) or [],
            tool_format(self._state.template.source),
            name=body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None,
            is_parallel=body.parallel_tool_calls is not False,
            tag_ids={tag: token_id for tag, token_id in tag_ids if token_id in tokenizer.mark_token_ids},
        )

    def _behind_reasoning(self, spec: StructuredSpec | None) -> StructuredSpec | None:
        """Let a model that thinks do so before the constraint holds; a grammar that names the tags rules over both."""
        tags = self._tags
        if spec is None or tags is None or self._opening is Opening.BEHIND:
            return spec
        if spec.kind == "grammar" and (tags[0] in spec.source or tags[1] in spec.source):
            return spec
        begin = None if self._opening is Opening.INSIDE else tags[0]
        return replace(spec, reasoning=FreeReasoning(begin=begin, end=tags[1]))

    def _new_choice(self) -> ChatChoice:
        body = self._body
        tools = body.tools if body.tool_choice != "none" else None
        return ChatChoice(
            tags=self._tags,
            opening=self._opening,
            tool_format=tool_format(self._state.template.source),
            tool_names=[tool.function.name for tool in tools or ()],
            has_tools=bool(tools),
        )

    def close(self) -> None:
        """Abort what still runs."""
        close_all(self.opened)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        async for steps in merged_steps(self.opened):
            for step in steps:
                self._choices[step.index].push(step)
        self._note_reasoning()

        def whole() -> list[dict[str, Any]]:
            return [self._whole(one, at) for at, one in enumerate(self._choices)]

        made = await self._state.workers.run(whole) if self._body.is_answered_at_length else whole()
        return self._frame("chat.completion", made) | self._accounts()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events: one per step and choice, usage and timings on the last, then [DONE]."""
        n_open = len(self._choices)
        includes_usage = self._body.stream_options is not None and bool(self._body.stream_options.include_usage)
        try:
            async for steps in merged_steps(self.opened):
                for step in steps:
                    choice = self._choices[step.index]
                    is_first = not choice.has_begun
                    delta = choice.push(step)
                    n_open -= step.finish_reason is not None
                    data = self._frame("chat.completion.chunk", [self._part(choice, step, delta, is_first=is_first)])
                    if n_open == 0 and not includes_usage:
                        self._note_reasoning()
                        data |= self._accounts()
                    yield event(data)
            if includes_usage:
                self._note_reasoning()
                yield event(self._frame("chat.completion.chunk", []) | self._accounts())
            yield DONE
        except ApiError as error:
            yield error_event(error)
        finally:
            self.close()

    def _note_reasoning(self) -> None:
        self.opened[0].reasoning_tokens = sum(choice.thinking.tokens for choice in self._choices)

    def _whole(self, choice: ChatChoice, index: int) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "message": choice.message(),
            "logprobs": {"content": self._logprobs(choice.logprobs)} if self._body.logprobs else None,
            "finish_reason": choice.finish_word,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _part(self, choice: ChatChoice, step: StepDelta, delta: PartDelta, *, is_first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"role": "assistant"} if is_first else {}
        content |= delta.as_json()
        shown: dict[str, Any] = {
            "index": step.index,
            "delta": content,
            "logprobs": {"content": self._logprobs(step.logprobs)} if self._body.logprobs else None,
            "finish_reason": choice.finish_word if step.finish_reason is not None else None,
        }
        if step.finish_reason is not None:
            shown["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            shown["token_ids"] = step.token_ids
        return shown

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            self._token(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._state.tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {
            "id": self._asked.response_id,
            "object": kind,
            "created": self._created,
            "model": self._state.model.name,
            "choices": choices,
        }
        if self._body.return_token_ids and kind == "chat.completion":
            frame["prompt_token_ids"] = list(self.opened[0].handle.request.prompt_token_ids)
        return frame

    def _accounts(self) -> dict[str, Any]:
        account = self._state.account(self.opened[0].handle, [choice.thinking for choice in self._choices])
        accountant = self._state.accountant
        return {"usage": accountant.usage([account]), "timings": accountant.timings([account])}
