"""How far a prompt has been read, told while it is: llama.cpp's `return_progress`.

`Telemetry` calls the watch on the engine's thread when a chunk is planned, so whoever asks for no progress pays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from diptych.engine.text.template import RenderedPrompt
from diptych.ground.events import ScheduledEvent
from diptych.ground.request import SamplingParams
from diptych.server.desk import Desk
from diptych.server.generation import Asked, OpenedRequest, StepDelta, merged_steps, open_requests
from diptych.server.reader import Ids
from diptych.server.watch.telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """processed prompt tokens of `total` are in the KV cache; `cached` of them were found there. Since the first chunk."""

    total: int
    cached: int
    processed: int
    time_ms: float

    def json(self) -> dict[str, Any]:
        """llama.cpp's `prompt_progress`."""
        time_ms = round(self.time_ms, 3)
        return {"total": self.total, "cache": self.cached, "processed": self.processed, "time_ms": time_ms}


class PromptWatch:
    """Follows the prompt of one request. Made and read on the event loop; `close` must follow."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[PromptProgress] = asyncio.Queue()
        self._request_id = ""
        self._total = 0
        self._begin_s: float | None = None
        self._cached = 0

    def follow(self, request_id: str, prompt_tokens: int) -> None:
        """Before the request is submitted."""
        self._request_id, self._total = request_id, prompt_tokens
        self._telemetry.watches[request_id] = self._on_chunk

    def close(self) -> None:
        """Hear no more."""
        self._telemetry.watches.pop(self._request_id, None)

    def _on_chunk(self, event: ScheduledEvent) -> None:
        """On the engine's thread, when a chunk of choice 0 is planned: what stands before it is done."""
        with suppress(RuntimeError):  # the loop has ended, and its readers with it
            self._loop.call_soon_threadsafe(self._note, event)

    def _note(self, event: ScheduledEvent) -> None:
        self._begin_s = event.at_s if self._begin_s is None else self._begin_s
        self._cached = max(self._cached, event.cached_tokens)
        self._told.put_nowait(self._at(min(event.context_tokens, self._total), event.at_s))

    def _at(self, processed: int, now_s: float) -> PromptProgress:
        begin_s = now_s if self._begin_s is None else self._begin_s
        return PromptProgress(
            total=self._total, cached=self._cached, processed=processed, time_ms=(now_s - begin_s) * 1e3
        )

    async def until(self, first: asyncio.Task[list[StepDelta]]) -> AsyncIterator[PromptProgress]:
        """What is told until the first token comes; the whole prompt last. Does not read the outcome of a failure."""
        while not first.done() or not self._told.empty():
            news = asyncio.ensure_future(self._told.get())
            try:
                await asyncio.wait({first, news}, return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    yield news.result()
            finally:
                news.cancel()
        if not first.cancelled() and first.exception() is None:
            yield self._at(self._total, first.result()[0].at_s)


class WatchedSteps:
    """The steps of an answer, and before them, where a watch is given, how far its prompt is."""

    def __init__(self, steps: AsyncIterator[list[StepDelta]], watch: PromptWatch | None) -> None:
        self._steps = steps
        self._watch = watch
        self._first: asyncio.Task[list[StepDelta]] | None = None

    async def progress(self) -> AsyncIterator[PromptProgress]:
        """To be read before the steps, or not at all."""
        if self._watch is not None:
            self._first = asyncio.ensure_future(_next_of(self._steps))
            async for told in self._watch.until(self._first):
                yield told

    async def __aiter__(self) -> AsyncIterator[list[StepDelta]]:
        if self._first is not None:
            yield await self._first
        async for group in self._steps:
            yield group

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._first is not None:
            self._first.cancel()
        if self._watch is not None:
            self._watch.close()


async def open_watched(
    desk: Desk,
    prompts: Sequence[RenderedPrompt | Ids],
    sampling: Sequence[SamplingParams],
    asked: Asked,
    *,
    wants_progress: bool,
) -> tuple[list[OpenedRequest], WatchedSteps]:
    """`open_requests`, and what they give: steps, and before them progress where it is wanted."""
    watch = PromptWatch(desk.telemetry) if wants_progress else None
    try:
        follow = watch.follow if watch is not None else None
        opened = await open_requests(desk, prompts, sampling, asked, follow=follow)
    except BaseException:
        if watch is not None:
            watch.close()
        raise
    return opened, WatchedSteps(merged_steps(opened), watch)


async def _next_of(steps: AsyncIterator[list[StepDelta]]) -> list[StepDelta]:
    return await anext(steps)
