"""Work that nothing can interrupt, on threads with deep stacks: what takes too long is left behind and holds up nobody else."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

Answer = TypeVar("Answer")
_IDLE_NICE = 19
_STACK_LOCK = threading.Lock()  # the size is of all threads that are begun meanwhile


class NoPlaceError(TimeoutError):
    """A work was not begun in its time: others had all places."""


class DeepThreads:
    """Runs so many works at once, each on a thread of its own with stack_bytes, of which only what is used takes memory.

    A work past its time gives its place to others and goes on with what they leave of the processor; at its end, and at the
    process's, nobody waits for it.
    """

    def __init__(self, *, at_once: int, stack_bytes: int, name: str) -> None:
        self._places = threading.Semaphore(at_once)
        self._stack_bytes = stack_bytes
        self._name = name
        self._left: set[Future[Any]] = set()

    @property
    def n_left(self) -> int:
        """Works that were given up and are not over."""
        return len(self._left)

    def run(self, work: Callable[[], Answer], *, timeout_s: float) -> Answer:
        """What `work` returns or raises. Raises NoPlaceError where it has no place, TimeoutError where it has no end, within
        timeout_s each.
        """
        if not self._places.acquire(timeout=timeout_s):
            raise NoPlaceError
        job: Future[Answer] = Future()
        try:
            thread = self._begun(work, job)
            return job.result(timeout=timeout_s)
        except FutureTimeoutError:
            if job.done():  # it raised this itself, or has ended just now
                return job.result()
            self._leave(thread, job)
            raise TimeoutError from None
        finally:
            self._places.release()

    def _begun(self, work: Callable[[], Answer], job: Future[Answer]) -> threading.Thread:
        def run() -> None:
            try:
                job.set_result(work())
            except BaseException as error:
                job.set_exception(error)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        with _STACK_LOCK:
            before = threading.stack_size(self._stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return thread

    def _leave(self, thread: threading.Thread, job: Future[Answer]) -> None:
        self._left.add(job)
        job.add_done_callback(self._left.discard)
        if sys.platform == "linux" and thread.native_id is not None:  # elsewhere this number may be another process's
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread.native_id, _IDLE_NICE)
