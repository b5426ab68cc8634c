"""`AsyncLLM`: many clients at once, the engine on its own thread; each has a `RequestHandle`, on its own event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from diptych.control.stats import CoreStats, WorkerStats
from diptych.engine.engine import Engine, OpenRequest, OutputDelta
from diptych.engine.holder import EngineHolder
from diptych.engine.load import LoadedModel, Progress, make_engine, opened, warn_of_long_steps
from diptych.engine.model_profile import profile_gap
from diptych.engine.prompts import Prompt
from diptych.ground.config import EngineConfig
from diptych.ground.errors import CapacityError, EngineError, ExecutorError, RequestError
from diptych.ground.events import Event
from diptych.ground.phase import FinishReason
from diptych.ground.request import AdapterRef, Pooling, Request, SamplingParams
from diptych.ground.spare_time import start_in_spare_time
from diptych.ground.step import TokenLogprobs
from diptych.metrics import RequestRecord

logger = logging.getLogger("diptych.engine")


class RequestHandle:
    """One request as its client sees it: iterate it for deltas; `record` and `prompt_logprobs` are final at the end.

    One reader at a time; leaving the iteration before the end aborts the request.
    """

    def __init__(self, request: Request, abort: Callable[[RequestHandle], object]) -> None:
        self.request = request
        self.opened: OpenRequest | None = None
        self._abort = abort
        self._queue: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._held: OutputDelta | None = None  # taken from the queue, and of a later step
        self._is_read = False
        self._open_choices = request.sampling.n
        self.reasons: dict[int, FinishReason] = {}  # of each choice that is over, read or not
        self._is_over = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id under which the request can be aborted."""
        return self.request.request_id

    def record(self) -> RequestRecord:
        """The account so far (tokens by source, time by phase); final after the last delta."""
        assert self.opened is not None
        assert self.opened.record is not None
        return self.opened.record

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """One entry per prompt token, None for the first; empty unless asked for."""
        return tuple(self.opened.prompt_logprobs) if self.opened is not None else ()

    @property
    def error(self) -> EngineError | None:
        """Why the engine failed this request, when it did."""
        return self.opened.error if self.opened is not None else None

    def abort(self) -> None:
        """End this request, and no other that has its name by now."""
        self._abort(self)

    def put(self, delta: OutputDelta) -> None:
        """Called on the event loop."""
        self._queue.put_nowait(delta)
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason
            if len(self.reasons) == self.request.sampling.n:
                self._is_over.set()

    async def over(self) -> None:
        """Until every choice is, whoever reads, or has stopped to: the record is final then."""
        await self._is_over.wait()

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[OutputDelta]:
        async with aclosing(self.steps()) as steps:
            async for group in steps:
                for delta in group:
                    yield delta

    async def steps(self) -> AsyncGenerator[list[OutputDelta], None]:
        """The same deltas in groups, one per engine step: a stream sends one event per step and choice.

        A consumer that leaves before the end (break, an exception, cancellation) ends the request. RequestError for a second
        one beside it: each would get a part, and one of them no end.
        """
        if self._is_read:
            raise RequestError(f"request {self.request_id} is being read already", hint="read it once")
        self._is_read = True
        try:
            while self._open_choices > 0:
                yield await self._next_step()
        finally:
            self._is_read = False
            if self._open_choices > 0:
                self.abort()

    async def _next_step(self) -> list[OutputDelta]:
        group: list[OutputDelta] = []
        delta = self._held if self._held is not None else await self._queue.get()
        self._held = None
        while True:
            if group and delta.at_s != group[0].at_s:
                self._held = delta
                return group
            group.append(delta)
            self._open_choices -= delta.finish_reason is not None
            # a step's deltas are put together, so an empty queue means that the step is complete
            if self._queue.empty():
                return group
            delta = self._queue.get_nowait()


class AsyncLLM:
    """An engine for servers. Every method may be called from any event loop or thread; the engine steps on its own.

    >>> async with AsyncLLM("bundled") as llm:  # doctest: +SKIP
    ...     async for delta in await llm.generate("Once upon a time", SamplingParams(max_tokens=20)):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "bundled",
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        engine: Engine | None = None,
        **settings: Any,
    ) -> None:
        """As for `LLM`; `start` begins stepping."""
        self.loaded, self.config = opened(model, config, settings, progress)
        self._held = EngineHolder(
            self.loaded,
            make_engine(self.loaded, self.config) if engine is None else engine,
            owns_model=not isinstance(model, LoadedModel),
        )
        if engine is None:
            warn_of_long_steps(self.loaded.model, self.config, self._held.engine.core.context_limit_tokens)
        self.failure: BaseException | None = None
        self.is_draining = False
        # why the measured profile of this machine predicts no steps; None where it does
        gap = profile_gap(self.loaded.model) if engine is None else None
        self.unpredicted: Callable[[], str | None] = lambda: gap
        self.scale: Callable[[str, int], object] | None = None  # have a pool grow or shrink, where there are pools
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], object]] = deque()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, OutputDelta]]] = {}
        self._is_stopping = False
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._memory: threading.Thread | None = None
        self._on_failure: Callable[[BaseException], object] | None = None
        self._forget_loss: Callable[[], object] = lambda: None

    @classmethod
    def from_pretrained(cls, model: str | Path = "bundled", *arguments: Any, **settings: Any) -> AsyncLLM:
        """The same by another name, as in `transformers`."""
        return cls(model, *arguments, **settings)

    def start(self, *, on_failure: Callable[[BaseException], object] | None = None) -> None:
        """Begin stepping. `on_failure` is called on the engine's thread after a crash, once every request is answered.

        CapacityError for an engine that was started, or closed, before.
        """
        if self._held.is_closed or self._thread is not None:
            state = "closed" if self._held.is_closed else "started"
            raise CapacityError(f"this engine was {state} before", hint="make another one")
        self._on_failure = on_failure
        self._forget_loss = self.loaded.model.on_loss(lambda error: self._post(lambda: _raise(error)))
        self._thread = threading.Thread(target=self._run, name="diptych-engine", daemon=True)
        self._thread.start()
        # streams would wait for pages that a step is the first to write; no daemon, as it must leave native code before the end
        self._memory = start_in_spare_time(
            lambda: self.engine.back_memory(lambda: self._is_stopping), name="diptych-memory"
        )

    @property
    def engine(self) -> Engine:
        """What the thread steps. CapacityError after `close`."""
        return self._held.engine

    @property
    def is_ready(self) -> bool:
        """Loaded, stepping, and taking new requests."""
        return self._is_stepping and not self.is_draining

    @property
    def _is_stepping(self) -> bool:
        return self._thread is not None and self.failure is None and not self._is_over

    def drain(self) -> None:
        """Take no new requests; those in flight go on."""
        self.is_draining = True

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Drain for at most drain_s seconds, abort what is left, end the thread."""
        self.drain()
        with self._wake:
            self._wake.wait_for(lambda: self.engine.n_open == 0 or self.failure is not None, timeout=drain_s)
            self._is_stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._forget_loss()

    def close(self, *, drain_s: float = 0.0) -> None:
        """`stop`, and give everything back: KV memory, threads, weights, rank processes. A LoadedModel stays loaded.

        A second time does nothing. What is asked afterwards raises CapacityError. On an event loop use `async with`.
        """
        if self._held.is_closed:
            return
        self.stop(drain_s=drain_s)
        if self._memory is not None:
            self._memory.join()
        self._held.close()

    async def __aenter__(self) -> Self:
        if self._thread is None:
            self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | AdapterRef | None = None,
        arrival_s: float | None = None,
        pooling: Pooling | None = None,
        trace: str | None = None,
        is_begun: bool = False,
    ) -> RequestHandle:
        """Submit a request and return its handle once the engine has taken it. pooling: for its state and no tokens.

        trace: the W3C traceparent of its span, where somebody follows it.
        is_begun: a part of what was taken before the engine began to drain, which it finishes.
        adapter: the name of a loaded adapter, or what `Adapters.find` gave for it.
        arrival_s: when the request came in, on this engine's clock (default now), so that TTFT includes its rendering.
        Raises RequestError for a bad request, CapacityError when draining or when the waiting line is full.
        """
        if not (self._is_stepping if is_begun else self.is_ready):
            state = "closed" if self._held.is_closed else "draining" if self.is_draining else "not running"
            is_new = self._thread is None and not self._held.is_closed
            hint = "call start, or use `async with`" if is_new else "try again elsewhere or later"
            raise CapacityError(f"the engine is {state} and takes no new requests", hint=hint)
        arrival_s = self.engine.clock.now_s() if arrival_s is None else arrival_s
        # tokenising a long prompt or compiling a grammar takes time that other streams must not wait for
        request = await asyncio.to_thread(
            self.engine.make_request,
            prompt,
            sampling,
            arrival_s=arrival_s,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            pooling=pooling,
            trace=trace,
        )
        loop = asyncio.get_running_loop()
        handle = RequestHandle(request, self._abort)
        accepted: asyncio.Future[None] = loop.create_future()
        self._post(lambda: self._submit(handle, loop, accepted))
        try:
            await accepted
        except asyncio.CancelledError:
            handle.abort()
            raise
        return handle

    def abort(self, request_id: str) -> None:
        """End a request, in any state; its handle gets the last deltas. Unknown ids are ignored."""
        if not self._held.is_closed:
            self._post(lambda: self.engine.abort(request_id))

    def _abort(self, handle: RequestHandle) -> None:
        def end() -> None:
            if handle.opened is not None:  # else it was refused
                self.engine.abort(handle.request_id, of=handle.opened)

        if not self._held.is_closed:
            self._post(end)

    async def load_lora(self, name: str, path: str | Path, *, replaces: bool = False) -> None:
        """Load an adapter from its folder while requests run. LoadError, ConfigError, CapacityError."""
        adapter = await asyncio.to_thread(self.engine.adapters.read, name, path)
        await self.call(lambda engine: engine.adapters.add(name, adapter, replaces=replaces))

    async def unload_lora(self, name: str) -> None:
        """Serve an adapter no more; returns when its last request is over and its memory free. RequestError for another."""
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[object] = loop.create_future()
        await self.call(lambda engine: engine.adapters.remove(name, lambda: _tell(loop, gone, None, None)))
        await gone

    @asynccontextmanager
    async def keeping(self, adapter: AdapterRef | None, *, n_requests: int) -> AsyncGenerator[None]:
        """Within it all requests of one body may come, one by one, though their adapter is unloaded meanwhile.

        RequestError where it was unloaded before.
        """
        if adapter is None or n_requests < 2:  # one is taken or refused as a whole
            yield
            return
        kept: list[AdapterRef] = []

        def keep(engine: Engine) -> None:
            engine.adapters.keep(adapter)
            kept.append(adapter)

        def end() -> None:
            for one in kept:
                self.engine.adapters.keep_no_more(one)

        try:
            await self.call(keep)
            yield
        finally:  # also where the caller left before it was told: what was posted first runs first
            if not self._held.is_closed:
                self._post(end)

    async def call(self, function: Callable[[Engine], object]) -> object:
        """Run `function(engine)` between two steps on the engine's thread and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def run() -> None:
            try:
                answer = function(self.engine)
            except EngineError as error:
                _tell(loop, future, None, error)
            except BaseException as error:
                _tell(loop, future, None, ExecutorError(f"the engine failed: {error}"))
                raise
            else:
                _tell(loop, future, answer, None)

        self._post(run)
        return await future

    def wake(self) -> None:
        """Have the engine's thread look whether there is work: something came that it could not see."""
        self._post(lambda: None)

    def stats(self) -> CoreStats:
        """Counts of sequences and blocks, as of the last step."""
        return self.engine.stats()

    def workers(self) -> tuple[WorkerStats, ...]:
        """The engines behind this one, where it is a cluster's."""
        return self.engine.core.worker_stats()

    def subscribe(self, listener: Callable[[list[Event]], None]) -> Callable[[], None]:
        """Give every batch of events to `listener`, on the engine's thread: be quick. Returns the function that ends it."""
        return self.engine.listen(listener)

    def _post(self, action: Callable[[], object]) -> None:
        with self._wake:
            if not self._is_over:
                self._inbox.append(action)
                self._wake.notify_all()
                return
        # the thread has ended: nobody else touches the engine any more, and the caller still gets its answer
        action()

    def _submit(self, handle: RequestHandle, loop: asyncio.AbstractEventLoop, accepted: asyncio.Future[None]) -> None:
        def on_delta(delta: OutputDelta) -> None:
            self._outbox.setdefault(loop, []).append((handle, delta))

        try:
            if self.failure is not None or self._is_stopping:
                raise CapacityError("the engine has stopped", hint="restart the server")
            handle.opened = self.engine.submit(handle.request, on_delta)
        except EngineError as error:
            _tell(loop, accepted, None, error)
        except BaseException as error:
            # a bug of ours ends the engine; the client must not wait for it
            _tell(loop, accepted, None, ExecutorError(f"the engine failed: {error}"))
            raise
        else:
            _tell(loop, accepted, None, None)

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                self.engine.step()
                self._flush()
        except BaseException as error:
            self._fail(error)
        finally:
            with self._wake:
                self._is_stopping = self._is_over = True
            self._end_all(FinishReason.ABORT)

    def _serve_inbox(self) -> bool:
        """Run what others asked for; sleep while there is nothing to do. False when it is time to end."""
        with self._wake:
            if self.engine.n_open == 0:
                self._wake.notify_all()  # someone may be draining
            self._wake.wait_for(
                lambda: self._inbox or self._is_stopping or self.engine.has_work, timeout=self.engine.due_in_s
            )
            if self._is_stopping:
                return False
        self._drain_inbox()
        self._flush()
        return True

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _flush(self) -> None:
        # one wake-up of each event loop per step, however many tokens the step made
        outbox, self._outbox = self._outbox, {}
        for loop, items in outbox.items():
            _call_soon(loop, _deliver, items)

    def _fail(self, error: BaseException) -> None:
        logger.error("engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        self.failure = error
        answer = error if isinstance(error, EngineError) else ExecutorError(f"the engine failed: {error}")
        self._end_all(FinishReason.ERROR, answer)
        with self._wake:
            self._wake.notify_all()
        if self._on_failure is not None:
            self._on_failure(error)

    def _end_all(self, reason: FinishReason, error: EngineError | None = None) -> None:
        """Answer everybody, also where what failed before fails again."""
        while self._inbox:
            try:
                self._drain_inbox()
            except Exception as fault:
                logger.error("an action failed while the engine ended", exc_info=fault)
        self.engine.end_all(reason, error)
        self._flush()


def _raise(error: EngineError) -> None:
    raise error


def _deliver(items: list[tuple[RequestHandle, OutputDelta]]) -> None:
    for handle, delta in items:
        handle.put(delta)


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: object, error: BaseException | None
) -> None:
    _call_soon(loop, _settle, future, value, error)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call on a loop that may have been closed by its owner: then nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
