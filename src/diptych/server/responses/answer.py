"""`POST /v1/responses`: the response object around a turn, whole, as semantic events, or in the background."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from diptych.engine.text.template import RenderedPrompt
from diptych.ground.clock import wall_time_s
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams, StructuredSpec
from diptych.server.generation import Generation, asked, sampling_params
from diptych.server.http.answers import json_bytes
from diptych.server.http.errors import ApiError, error_body, of_stream
from diptych.server.http.sse import DONE
from diptych.server.logprobs import logprobs_json
from diptych.server.responses.body import ENCRYPTED, ResponsesBody, ResponsesCountBody
from diptych.server.responses.items import (
    ROOM_TOKENS,
    Item,
    conversation,
    given_items,
    render_fitting,
    settings,
    structured,
    tool_use,
    without_first,
)
from diptych.server.responses.output import OutputItems
from diptych.server.responses.store import ResponseStore, StoredResponse
from diptych.server.turn import TurnRequest, TurnShape
from diptych.server.turn_parts import TurnDelta

logger = logging.getLogger("diptych.server")

# the events at both ends repeat instructions and tools; above this they are encoded on a thread
LONG_ECHO_CHARS = 32 * 1024
_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "cancelled"}


@dataclass(slots=True)
class Responses:
    """What the routes of Responses share: those that are kept, and those still being written."""

    store: ResponseStore
    max_bytes: int  # of a conversation that is read from the store, and of items that are
    open: dict[str, ResponsesAnswer] = field(default_factory=dict)

    async def has(self, response_id: str) -> bool:
        """Whether a response of that id is kept or being written, also where only its reader is behind."""
        return response_id in self.open or await self.store.get(response_id) is not None

    async def model_before(self, body: ResponsesBody | ResponsesCountBody) -> str | None:
        """The name that a body without one asks for: of what wrote the response that it goes on from. None: there is none."""
        return None if body.previous_response_id is None else await self.store.model(body.previous_response_id)

    async def items_before(self, previous_id: str | None, given: list[Item]) -> tuple[list[Item], list[Item]]:
        """(the conversation that `given` goes on from, `given` with its references resolved). Raises ApiError 400."""
        before: list[Item] = []
        if previous_id is not None:
            if previous_id in self.open:
                raise ApiError(
                    400,
                    f"previous_response_id: {previous_id!r} is still being written; wait for its end",
                    param="previous_response_id",
                    code="previous_response_not_finished",
                )
            before = await self.store.conversation(previous_id, max_bytes=self.max_bytes)
        wanted = [item["id"] for item in given if item["type"] == "item_reference"]
        known = await self.store.items(wanted, max_bytes=self.max_bytes)
        unknown = next((item_id for item_id in wanted if item_id not in known), None)
        if unknown is not None:
            raise ApiError(
                400, f"input refers to the item {unknown[:100]!r}; no stored response has it", param="input",
                code="item_not_found",
            )  # fmt: skip
        return before, [known[item["id"]] if item["type"] == "item_reference" else item for item in given]


class ResponsesAnswer(TurnShape):
    """One body on its way to an answer; `close` must follow in every case."""

    def __init__(self, generation: Generation, shared: Responses, body: ResponsesBody, *, arrival_s: float) -> None:
        constraint = "text.format" if structured(body) else "tools"
        super().__init__(
            generation, asked(generation, body, prefix="resp_", arrival_s=arrival_s, constraint=constraint)
        )
        self._shared = shared
        self._body = body
        self._created = int(wall_time_s())
        self._given: list[Item] = []
        self._n_dropped = 0
        self._output = OutputItems(encodes_reasoning=ENCRYPTED in (body.include or ()), namespaces=body.namespaces)
        self._error: ApiError | None = None
        self._is_stored = body.is_stored
        self._sequence = 0
        self._echo = self._echoed()
        self.over = asyncio.Event()

    @property
    def id(self) -> str:
        """Of the response."""
        return self._asked.response_id

    async def start(self) -> None:
        """Render, admit and submit. Raises ApiError or EngineError; then nothing is left open."""
        body = self._body
        if body.request_id is not None and await self._shared.has(self.id):
            told = f"request_id is {body.request_id!r}; a response that is stored or being written has it"
            raise ApiError(400, told, param="request_id")
        if body.model is None:
            self._asked = replace(self._asked, served=self._generation.served(await self._shared.model_before(body)))
        before, self._given = await self._shared.items_before(body.previous_response_id, given_items(body))
        await self._begin(self._request(before + self._given))
        self._shared.open[self.id] = self

    def _request(self, items: list[Item]) -> TurnRequest:
        body, generation = self._body, self._generation
        variables = settings(body, generation.reader.template.source)
        reader = generation.reader

        async def render(limit_tokens: int) -> RenderedPrompt:
            if body.truncation != "auto":
                return await reader.render(lambda: conversation(body, items, variables), limit_tokens=limit_tokens)
            rendered, n_dropped = await render_fitting(
                reader,
                lambda n_dropped: conversation(body, items, variables, n_dropped=n_dropped),
                n_items=len(items),
                limit_tokens=limit_tokens,
                room_tokens=body.max_output_tokens or min(ROOM_TOKENS, limit_tokens // 4),
            )
            self._n_dropped = len(items) - len(without_first(items, n_dropped))
            return rendered

        def sampling(max_tokens: int, constraint: StructuredSpec | None) -> SamplingParams:
            return sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, structured=constraint)

        return TurnRequest(
            render=render,
            continues=False,
            tool_use=tool_use(body),
            structured=structured(body),
            n=1,
            max_tokens=body.max_output_tokens,
            limit_param="max_output_tokens",
            sampling=sampling,
        )

    def close(self) -> None:
        """Abort what still runs."""
        super().close()
        self._shared.open.pop(self.id, None)
        self.over.set()

    def cancel(self) -> None:
        """End the answer; who reads it gets what there is, as `cancelled`."""
        self._generation.desk.engine.abort(self.id)

    async def answer(self) -> dict[str, Any]:
        """The whole response."""
        async for deltas in self._started.deltas():
            for delta in deltas:
                list(self._push(delta))
        list(self._finish())
        return await self._kept()

    async def keep_begun(self) -> None:
        """Where responses outlive the server, keep what is true of this one should that be killed before the end.

        Call it once `run` is on its way, which keeps the end of the response in its place.
        """
        if not self._shared.store.is_lasting:
            return
        told = {"code": "server_error", "message": "the server was killed while it wrote this response"}
        response = self._resource("failed", []) | {"error": told}
        kept = StoredResponse(
            id=self.id,
            previous_id=self._body.previous_response_id,
            body=json_bytes(response),
            given=self._given,
            output=[],
        )
        with suppress(sqlite3.Error):  # whether it can be kept is told at its end
            await self._shared.store.put(kept)

    async def run(self) -> None:
        """Write the response with nobody waiting for it; what fails is told to whoever asks for it."""
        try:
            await self.answer()
        except Exception as error:
            self._error = of_stream(error)
            await self._kept()
        finally:
            self.close()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The semantic events, then [DONE]."""
        try:
            for kind in ("response.created", "response.in_progress"):
                yield await self._event({"type": kind, "response": self.snapshot()}, is_long=self._has_long_echo)
            async for deltas in self._started.deltas():
                for delta in deltas:
                    for told in self._push(delta):
                        yield await self._event(told)
            for told in self._finish():
                yield await self._event(told, is_long=self._body.is_answered_at_length)
            yield await self._last_event()
        except Exception as error:
            self._error = of_stream(error)
            yield await self._last_event()
            shown = error_body(self._error)["error"]
            # the specification has an object here, OpenAI's own events the same fields beside the type
            told = {"type": "error", "error": shown, **{name: shown[name] for name in ("code", "message", "param")}}
            yield await self._event(told)
        finally:
            self.close()
        yield DONE

    async def _last_event(self) -> bytes:
        response = await self._kept()
        # there is no event for `cancelled`; readers take this one for the end
        word = response["status"] if response["status"] in ("completed", "failed") else "incomplete"
        is_long = self._body.is_answered_at_length or self._has_long_echo
        return await self._event({"type": f"response.{word}", "response": response}, is_long=is_long)

    async def _event(self, data: dict[str, Any], *, is_long: bool = False) -> bytes:
        told = {"type": data["type"], "sequence_number": self._sequence, **data}
        self._sequence += 1
        raw = await self._generation.workers.run(json_bytes, told) if is_long else json_bytes(told)
        return b"event: " + data["type"].encode() + b"\ndata: " + raw + b"\n\n"

    def _push(self, delta: TurnDelta) -> Iterator[dict[str, Any]]:
        told = self._body.logprobs is not None
        entries = logprobs_json(self._generation.reader.tokenizer, delta.logprobs) if told else []
        yield from self._output.push(delta.parts, entries)

    def _finish(self) -> Iterator[dict[str, Any]]:
        finish = self._started.choices[0].finish
        yield from self._output.finish(is_whole=finish is not None and finish.reason is FinishReason.STOP)

    async def _kept(self) -> dict[str, Any]:
        """The response as it ended, kept where it should be: a client may go on from it as soon as it has it."""
        try:
            return await self._stored(self._ended())
        finally:
            self._shared.open.pop(self.id, None)

    async def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        if not self._is_stored or (self._error is not None and not self._body.background):
            return response
        kept = StoredResponse(
            id=self.id,
            previous_id=self._body.previous_response_id,
            body=await self._generation.workers.run(json_bytes, response),
            given=self._given,
            output=self._output.done,
        )
        try:
            self._is_stored = await self._shared.store.put(kept, replaces=bool(self._body.background))
        except sqlite3.Error as error:
            logger.error("response not stored id=%s error=%s", self.id, error)
            self._is_stored = False
        return response | {"store": self._is_stored}

    def snapshot(self) -> dict[str, Any]:
        """The response while it is being written."""
        return self._resource("in_progress", self._output.done)

    def _ended(self) -> dict[str, Any]:
        turn, error = self._started, self._error
        if error is not None:
            list(self._output.finish(is_whole=False))
            shown = {"code": error.code or "server_error", "message": error.message}
            return self._resource("failed", self._output.items) | {"error": shown}
        finish = turn.choices[0].finish
        assert finish is not None, "not over"
        status = _STATUS.get(finish.reason, "incomplete")
        account, accountant = turn.account(), self._generation.accountant
        told: dict[str, Any] = {
            "usage": self._usage(accountant.usage([account])),
            "timings": accountant.timings([account]),
        }
        if status == "completed":
            told["completed_at"] = int(wall_time_s())
        if status == "incomplete":
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._n_dropped:
            told["dropped_items"] = self._n_dropped
        return self._resource(status, self._output.items) | told

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _resource(self, status: str, output: list[Item]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._asked.served.name,
            "system_fingerprint": self._asked.served.fingerprint,
            "output": list(output),
            "usage": None,
            "store": self._is_stored,
            **self._echo,
        }

    @property
    def _has_long_echo(self) -> bool:
        body = self._body
        return len(body.instructions or "") > LONG_ECHO_CHARS or bool(body.tools and len(body.tools) > 16)

    def _echoed(self) -> dict[str, Any]:
        """The settings that were used, as every response repeats them."""
        body = self._body
        form: dict[str, Any] = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True)
        if form["type"] != "json_schema":
            form = {"type": form["type"]}
        elif form["strict"] is None:
            form["strict"] = True  # the output always fits
        choice = body.tool_choice
        of_functions = dict.fromkeys(("description", "parameters", "strict"))
        return {
            "previous_response_id": body.previous_response_id,
            "instructions": body.instructions,
            "tools": [
                {**({} if tool.type == "namespace" else of_functions), **tool.model_dump(exclude_none=True)}
                for tool in body.tools or ()
            ],
            "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
            "truncation": body.truncation or "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {
                "format": form,
                **({"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}),
            },
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "top_logprobs": body.top_logprobs or 0,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "background": bool(body.background),
            "service_tier": "default",
            "metadata": body.metadata or {},
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "user": body.user,
        }
