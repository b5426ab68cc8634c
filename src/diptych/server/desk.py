"""The desk where requests come in: draining and overload are judged here, and jobs outlive their request here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any

from diptych.engine.async_llm import AsyncLLM
from diptych.engine.spans import Spans
from diptych.server.admission import Admission, Backlog, Outlook
from diptych.server.http.errors import ApiError
from diptych.server.watch.telemetry import Telemetry
from diptych.server.watch.timelines import Timelines


class Desk:
    """Joins the engine with what the server keeps about its requests. Used on the event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        *,
        admission: Admission,
        telemetry: Telemetry,
        timelines: Timelines,
        spans: Spans | None = None,
    ) -> None:
        """spans: where requests are told of, if anywhere."""
        self.engine = engine
        self.spans = spans
        self.admission = admission
        self.telemetry = telemetry
        self.timelines = timelines
        self.is_leaving = False  # what is aborted now was not asked for: its client gets an error
        self._tasks: set[asyncio.Task[None]] = set()

    def now_s(self) -> float:
        """The engine's clock."""
        return self.engine.engine.clock.now_s()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a job that nobody waits for, and keep it alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def refuse_when_draining(self) -> None:
        """Raise 503 while draining or after a failure."""
        if self.engine.failure is not None:
            raise ApiError(
                503, "the engine has failed; this server is going down", code="engine_failed", retry_after_s=5
            )
        if not self.engine.is_ready:
            raise ApiError(503, "this server is draining and takes no new requests", code="draining", retry_after_s=5)

    def backlog(self) -> Backlog:
        """What stands before a request that arrives now."""
        telemetry, now_s = self.telemetry, self.now_s()
        # in this order: a request that the engine takes in between is missed for once, and not counted twice
        counts, unread_tokens = self.engine.stats(), telemetry.unread_tokens
        entering = [tokens for name, tokens in self.admission.entering.items() if name not in telemetry.records]
        # list() of a dict's values is one C call, so the engine's thread cannot change it half-way
        oldest = next((one for one in list(telemetry.records.values()) if not one.chunks), None)
        return Backlog(
            unread_tokens=unread_tokens + sum(entering),
            step_left_s=max(0.0, (telemetry.step_end_s or now_s) - now_s),
            oldest_s=0.0 if oldest is None else now_s - oldest.arrival_s,
            decode_step_s=telemetry.step_s["decode"].mean,
            sequences=counts.running + counts.waiting + len(entering),
            max_running=self.engine.engine.core.max_running_sequences,
        )

    def admit(self, request_id: str, prompt_tokens: int, *, n_requests: int = 1) -> AbstractContextManager[None]:
        """Raise ApiError 503 when a request must not be taken now; else count it until the context ends.

        n_requests: of its body, of which the first speaks for all.
        """
        telemetry, admission = self.telemetry, self.admission
        read_tokens = (
            telemetry.computed_tokens
            + telemetry.cached_tokens
            + telemetry.recomputed_tokens
            + telemetry.transferred_tokens
        )
        admission.observe(read_tokens, telemetry.step_s["prefill"].total + telemetry.step_s["mixed"].total)
        admission.check(self.backlog(), prompt_tokens=prompt_tokens, now_s=self.now_s(), n_requests=n_requests)
        return admission.enter(request_id, prompt_tokens)

    def outlook(self) -> Outlook:
        """What a request that arrives now would meet."""
        return self.admission.outlook(self.backlog(), now_s=self.now_s())

    def retry_after_s(self) -> float:
        """When it may make sense to try again."""
        return max(1.0, self.outlook().wait_s)
