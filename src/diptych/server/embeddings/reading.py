"""Prompts of one body read for their states: admitted once, submitted as far as the engine keeps up, closed in every case."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from diptych.engine.encoder import NO_TOKENS, PooledPrompt
from diptych.server.accounting import Account
from diptych.server.generation import Asked, Generation, OpenedRequest, close_all
from diptych.server.http.errors import ApiError

# in line at one time: what the next steps take, and no more, so that other people's prompts do not wait behind a long list
STEPS_AHEAD = 2
MOST_OPEN = 256


class StateReader:
    """The texts of one body. `close` must follow `read` in every case."""

    def __init__(self, generation: Generation, asked: Asked) -> None:
        self._generation = generation
        self._asked = asked
        self._opened: dict[int, OpenedRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._states: dict[int, bytes] = {}
        self._is_counted = False  # as one open request, beside those of its texts that are

    async def read(self, prompts: Sequence[PooledPrompt], *, param: str) -> list[bytes]:
        """Their states, in order. Raises ApiError or EngineError; then nothing of them runs on. param: where they came from."""
        most = self._generation.context_tokens
        for number, prompt in enumerate(prompts):
            if len(prompt.token_ids) > most:
                where = f"entry {number} of {param}" if len(prompts) > 1 else param
                raise ApiError(
                    400,
                    f"{where} has {len(prompt.token_ids)} tokens; at most {most} are read of one text",
                    param=param,
                    code="context_length_exceeded",
                )
        desk = self._generation.desk
        desk.refuse_when_draining()
        several = [f"{self._asked.response_id}-{number}" for number in range(len(prompts))]
        names = several if len(prompts) > 1 else [self._asked.response_id]
        desk.timelines.group(self._asked.response_id, names)
        room = STEPS_AHEAD * desk.engine.config.scheduler.max_step_tokens
        begun = in_line = 0
        sizes = [len(prompt.token_ids) for prompt in prompts]
        waiting: dict[asyncio.Task[None], int] = {}
        async with (
            desk.engine.keeping(self._asked.served.adapter, n_requests=len(prompts)),
            AsyncExitStack() as entering,
        ):
            entering.enter_context(desk.admit(self._asked.response_id, min(sum(sizes), room)))
            desk.admission.opened()
            self._is_counted = True
            while begun < len(prompts) or waiting:
                while (
                    begun < len(prompts)
                    and len(waiting) < MOST_OPEN
                    and (not waiting or in_line + sizes[begun] <= room)
                ):
                    task = asyncio.ensure_future(self._read_one(begun, names[begun], prompts[begun]))
                    self._tasks.add(task)
                    waiting[task] = sizes[begun]
                    in_line += sizes[begun]
                    begun += 1
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                await entering.aclose()  # the engine counts them now
                for task in done:
                    in_line -= waiting.pop(task)
                    task.result()
        return [self._states[number] for number in range(len(prompts))]

    async def _read_one(self, number: int, name: str, prompt: PooledPrompt) -> None:
        asked, desk = self._asked, self._generation.desk
        handle = await desk.engine.generate(
            prompt.rendered,
            NO_TOKENS,
            request_id=name,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            adapter=asked.served.adapter,
            arrival_s=asked.arrival_s,
            pooling=prompt.pooling,
            is_begun=True,
        )
        opened = self._opened[number] = OpenedRequest(desk, handle, number=number)
        async for _ in opened.steps():
            pass
        opened.close()
        state = None if handle.opened is None else handle.opened.state
        if state is None:
            raise ApiError(409, "the request was ended from outside before its text was read", code="aborted")
        self._states[number] = state

    def accounts(self) -> list[Account]:
        """Of every prompt, in order, once `read` has returned."""
        accountant = self._generation.accountant
        return [accountant.account(self._opened[number].handle) for number in sorted(self._opened)]

    def close(self) -> None:
        """Abort what still runs, and count what is over."""
        for task in self._tasks:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # one of them was told to the client already
        close_all(list(self._opened.values()))
        if self._is_counted:
            self._is_counted = False
            self._generation.desk.admission.closed(service_s=None)
