"""What one server process holds: the engine, its helpers' threads, counters, admission, and the logs it keeps.

Made once by `make_state`; routes get it from the app. Nothing here is global.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import Any

from diptych import __version__
from diptych.compute.ceilings import Ceilings
from diptych.cost.parameters import linear_parameter_count
from diptych.engine.cost_view import CostView
from diptych.engine.llm import AsyncLLM, RequestHandle
from diptych.ground.errors import EngineError
from diptych.server.accounting import Account, Accountant, Thinking
from diptych.server.admission import Admission, Backlog, Outlook
from diptych.server.config import ServerConfig
from diptych.server.door import Workers
from diptych.server.errors import ApiError
from diptych.server.live import LiveFeed
from diptych.server.metrics_export import MetricsCollector, ServedModel
from diptych.server.segments import TokenWork
from diptych.server.telemetry import RequestLog, Telemetry


class Timelines:
    """The logs of the last requests. `keep` runs on the engine's thread, the rest on the event loop."""

    def __init__(self, telemetry: Telemetry, *, kept: int) -> None:
        self._telemetry = telemetry
        self._kept = kept
        self._finished: OrderedDict[str, RequestLog] = OrderedDict()
        telemetry.on_log.append(self.keep)

    def keep(self, log: RequestLog) -> None:
        """Add a finished request's log and forget the oldest."""
        self._finished[log.request_id] = log
        # open answers still need theirs, so a few more than asked for are kept
        while len(self._finished) > self._kept + 1024:
            self._finished.popitem(last=False)

    def find(self, request_id: str) -> RequestLog | None:
        """The log of an open or a recently finished request, by its id in the answer or the client's own."""
        for name in (request_id, f"chatcmpl-{request_id}", f"cmpl-{request_id}"):
            log = self._telemetry.logs.get(name) or self._finished.get(name)
            if log is not None:
                return log
        return None


class ServerState:
    """See the module. `tasks` are background jobs that must outlive their request."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, *, ceilings: Ceilings | None) -> None:
        self.engine = engine
        self.config = config
        self.tokenizer = engine.loaded.tokenizer
        self.template = engine.loaded.template
        self.model = served_model(engine, config)
        self.model_names = {self.model.name, engine.loaded.name, str(engine.loaded.directory)}
        self.workers = Workers()
        self.telemetry = Telemetry()
        self.timelines = Timelines(self.telemetry, kept=config.kept_timelines)
        self.collector = MetricsCollector(
            self.telemetry, self.model, is_vllm_compatible=config.metrics_compat == "vllm"
        )
        self.admission = Admission(max_queue_s=config.max_queue_s, max_open_requests=config.max_open_requests)
        self.work = token_work(engine)
        self.accountant = Accountant(
            work=self.work,
            view=cost_view(engine),
            ceilings=ceilings,
            cold_start_s=engine.loaded.load_s,
        )
        self.ceilings = ceilings
        self.live = LiveFeed(self)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def context_tokens(self) -> int:
        """Prompt and output of one sequence together."""
        return self.model.max_context_tokens

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

    def account(self, handle: RequestHandle, thinking: list[Thinking]) -> Account:
        """The account of a request whose last delta has arrived."""
        record = handle.record()
        log = self.timelines.find(handle.request_id)
        if log is None:
            raise EngineError(f"no log of request {handle.request_id!r} was kept")
        return Account(
            request=handle.request, usage=record.usage(), timings=record.timings(), log=log, thinking=tuple(thinking)
        )

    def backlog(self) -> Backlog:
        """What stands before a request that arrives now."""
        telemetry, now_s = self.telemetry, self.now_s()
        # in this order: a request that the engine takes in between is missed for once, and not counted twice
        counts, unread_tokens = self.engine.stats(), telemetry.unread_tokens
        entering = [tokens for name, tokens in self.admission.entering.items() if name not in telemetry.logs]
        # list() of a dict's values is one C call, so the engine's thread cannot change it half-way
        oldest = next((log for log in list(telemetry.logs.values()) if not log.chunks), None)
        return Backlog(
            unread_tokens=unread_tokens + sum(entering),
            step_left_s=max(0.0, (telemetry.step_end_s or now_s) - now_s),
            oldest_s=0.0 if oldest is None else now_s - oldest.arrival_s,
            decode_step_s=telemetry.step_s["decode"].mean,
            sequences=counts.running + counts.waiting + len(entering),
            max_running=self.engine.config.scheduler.max_running_sequences,
        )

    def admit(self, request_id: str, prompt_tokens: int) -> AbstractContextManager[None]:
        """Raise ApiError 503 when a request must not be taken now; else count it until the context ends."""
        telemetry, admission = self.telemetry, self.admission
        read_tokens = telemetry.computed_tokens + telemetry.cached_tokens + telemetry.recomputed_tokens
        admission.observe(read_tokens, telemetry.step_s["prefill"].total + telemetry.step_s["mixed"].total)
        admission.check(self.backlog(), prompt_tokens=prompt_tokens, now_s=self.now_s())
        return admission.enter(request_id, prompt_tokens)

    def outlook(self) -> Outlook:
        """What a request that arrives now would meet."""
        return self.admission.outlook(self.backlog(), now_s=self.now_s())

    def retry_after_s(self) -> float:
        """When it may make sense to try again."""
        return max(1.0, self.outlook().wait_s)


def served_model(engine: AsyncLLM, config: ServerConfig) -> ServedModel:
    """Names and sizes of what is served."""
    loaded, core = engine.loaded, engine.engine.core
    model = loaded.model
    return ServedModel(
        name=config.served_model_name or loaded.name,
        backend=model.backend_name,
        weights=model.weights_format,
        kv=model.kv_format,
        version=__version__,
        block_tokens=core.block_config.block_tokens,
        n_blocks=core.block_config.n_blocks,
        max_context_tokens=core.context_limit_tokens,
        load_s=loaded.load_s,
        n_parameters=model.n_parameters,
        weight_bytes=model.weight_bytes,
    )


def token_work(engine: AsyncLLM) -> TokenWork:
    """FLOPs of one prompt token: two per parameter it meets, and two products over the context in every layer."""
    spec = engine.loaded.model.spec
    return TokenWork(
        linear=2.0 * linear_parameter_count(spec), attention=4.0 * spec.n_layers * spec.n_heads * spec.head_dim
    )


def cost_view(engine: AsyncLLM) -> CostView | None:
    """The cost model of the loaded model; None where its config is one the cost room does not read."""
    try:
        return CostView(engine.loaded.model)
    except EngineError:
        return None


def tool_json(value: object) -> str:
    """Compact JSON as it stands in prompts and schemas."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
