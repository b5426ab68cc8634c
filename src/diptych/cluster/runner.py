"""A worker on a thread of its own: messages in from any thread, batches out to whoever fetches them."""

from __future__ import annotations

import logging
import threading
from collections import deque

from diptych.cluster.messages import Batch, Heard, ToWorker
from diptych.cluster.worker import Worker
from diptych.control.stats import WorkerCounts
from diptych.ground.clock import Clock
from diptych.ground.events import Event

logger = logging.getLogger("diptych.cluster")

IDLE_S = 0.01  # between looks at what cannot go on now


class WorkerRunner:
    """Owns the worker's thread. After a failure it hands out what was said before it, and then raises what it was."""

    def __init__(self, worker: Worker, *, clock: Clock) -> None:
        self._worker = worker
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: deque[ToWorker] = deque()
        self._events: list[Event | Heard] = []
        self._counts: WorkerCounts | None = None  # of the newest step that nobody has fetched
        self._failure: BaseException | None = None
        self._is_stopping = False
        threading.Thread(target=self._run, name="diptych-worker", daemon=True).start()

    def post(self, message: ToWorker) -> None:
        """Have the worker take a message before its next step."""
        with self._wake:
            self._inbox.append(message)
            self._wake.notify_all()

    def fetch(self, timeout_s: float) -> Batch | None:
        """What the worker did since the last call, as soon as there is something; None where there is nothing in time."""
        with self._wake:
            self._wake.wait_for(lambda: self._counts is not None or self._failure is not None, timeout=timeout_s)
            counts, self._counts = self._counts, None
            events, self._events = self._events, []
            if counts is not None:
                return Batch(events=events, counts=counts, now_s=self._clock.now_s())
            if self._failure is not None:
                raise self._failure
            return None

    @property
    def has_failed(self) -> bool:
        """Whether its engine has, and everything that it said before was fetched."""
        return self._failure is not None and self._counts is None

    def fail(self, error: BaseException) -> None:
        """The engine cannot go on, and its steps may not know it yet: a rank is gone. No step begins any more."""
        with self._wake:
            self._failure, self._is_stopping = self._failure or error, True
            self._wake.notify_all()

    def stop(self) -> None:
        """End the thread after the step that it is in."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            self._publish()  # its numbers, so that nobody has to wait for its first step to know them
            did_step = False
            while self._wait(did_step):
                try:
                    while self._inbox:
                        self._worker.take(self._inbox.popleft())
                    did_step = self._worker.step()
                finally:
                    self._publish()
        except BaseException as error:
            logger.error("worker failed name=%s: %s", self._worker.name, type(error).__name__, exc_info=error)
            with self._wake:
                self._failure = error
                self._wake.notify_all()

    def _wait(self, did_step: bool) -> bool:
        """Until there is something to do; False when it is time to end."""
        if did_step and self._worker.has_work:
            return not self._is_stopping
        with self._wake:
            due_s = self._worker.next_due_s
            left_s = None if due_s is None else max(0.0, due_s - self._clock.now_s())
            if self._worker.has_work:  # it waits for blocks, which may come back without a message
                left_s = IDLE_S if left_s is None else min(left_s, IDLE_S)
            self._wake.wait_for(lambda: self._inbox or self._is_stopping, timeout=left_s)
            return not self._is_stopping

    def _publish(self) -> None:
        batch = self._worker.batch()
        with self._wake:
            self._events += batch.events
            self._counts = batch.counts
            self._wake.notify_all()
