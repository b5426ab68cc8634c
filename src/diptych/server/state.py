"""Builds what one server process holds, each part from the parts it needs; nothing below imports this module.

Routes get the parts from `ServerState`; the parts do not know of it. Nothing here is global.
"""

from __future__ import annotations

import logging

from diptych.compute.ceilings import Ceilings
from diptych.cost.parameters import attention_flops_per_pair, linear_parameter_count
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.cost_view import CostView
from diptych.engine.model_profile import faster_kernels
from diptych.engine.spans import spans_to
from diptych.engine.text.template import DEFAULT_TEMPLATE_WORDS
from diptych.ground.errors import ConfigError, EngineError
from diptych.ground.version import VERSION
from diptych.insight.segments import TokenWork
from diptych.server.accounting import Accountant
from diptych.server.admission import Admission
from diptych.server.config import ServerConfig
from diptych.server.desk import Desk
from diptych.server.fingerprint import system_fingerprint
from diptych.server.generation import Generation
from diptych.server.http.door import BodyLimits, BodyReader, Workers
from diptych.server.reader import Reader
from diptych.server.responses.store import ResponseStore
from diptych.server.watch.journal import Journal
from diptych.server.watch.live import LiveFeed
from diptych.server.watch.metrics_export import MetricsCollector, ServedModel
from diptych.server.watch.recent import Recent
from diptych.server.watch.telemetry import Telemetry
from diptych.server.watch.timelines import Timelines
from diptych.sim.counterfactual import Machine

logger = logging.getLogger("diptych.server")

MAX_COUNTED_TOKENS = 65536  # of a text that is only tokenised, where the model's context is shorter


class ServerState:
    """The parts of one server."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig, *, ceilings: Ceilings | None) -> None:
        loaded = engine.loaded
        work, view = token_work(engine), cost_view(engine)
        self.engine = engine
        self.config = config
        self.model = served_model(engine, config)
        self.workers = Workers()
        self.bodies = BodyReader(self.workers, BodyLimits.of_context(self.counted_tokens, config.max_body_bytes))
        self.telemetry = Telemetry(engine.engine.book)
        engine.engine.on_submit.append(lambda opened: self.telemetry.on_taken(opened.request))
        self.timelines = Timelines(self.telemetry, kept=config.kept_timelines)
        self.collector = MetricsCollector(
            self.telemetry, self.model, is_vllm_compatible=config.metrics_compat == "vllm"
        )
        self.admission = Admission(max_queue_s=config.max_queue_s, max_open_requests=config.max_open_requests)
        self.spans = None
        if config.otlp_traces_endpoint is not None:
            self.spans = spans_to(config.otlp_traces_endpoint, clock=engine.engine.clock, process="server")
        self.desk = Desk(
            engine, admission=self.admission, telemetry=self.telemetry, timelines=self.timelines, spans=self.spans
        )
        self.reader = Reader(
            loaded.tokenizer, loaded.template, self.workers, reads_control_tokens=config.reads_control_tokens
        )
        if loaded.template.is_default and loaded.encoder is None:
            logger.warning(DEFAULT_TEMPLATE_WORDS)
        self.generation = Generation(
            model=self.model,
            names=frozenset({self.model.name, *config.served_model_names, loaded.name, str(loaded.directory)}),
            takes_any_name=config.takes_any_model_name,
            adapters=engine.engine.adapters,
            reader=self.reader,
            desk=self.desk,
            workers=self.workers,
            encoder=loaded.encoder,
            accountant=Accountant(
                work=work,
                view=view,
                ceilings=ceilings,
                cold_start_s=loaded.load_s,
                cache_block_tokens=self.model.block_tokens if engine.config.scheduler.enable_prefix_cache else None,
                unpredicted=engine.unpredicted,
            ),
        )
        taken = next(
            (one.ref.name for one in engine.engine.adapters.served if one.ref.name in self.generation.names), None
        )
        if taken is not None:
            raise ConfigError(f"an adapter is called {taken!r}, which is the model's own name", hint="choose another")
        self.recent = recent_of(engine, config)
        self.store = ResponseStore(
            config.response_store, max_bytes=config.max_stored_bytes, ttl_s=config.response_ttl_s
        )
        # last of what may be refused: its file would be there at the next start, and refused
        self.journal = None if config.record is None else Journal(engine.engine, config)
        self.live = LiveFeed(
            self.desk, self.model, work=work, view=view, ceilings=ceilings, keeps_minutes=self.recent is not None
        )

    @property
    def counted_tokens(self) -> int:
        """Of a text that is only tokenised."""
        return max(self.model.max_context_tokens, MAX_COUNTED_TOKENS)

    def now_s(self) -> float:
        """The engine's clock."""
        return self.desk.now_s()


def served_model(engine: AsyncLLM, config: ServerConfig) -> ServedModel:
    """Names and sizes of what is served."""
    loaded, core = engine.loaded, engine.engine.core
    model = loaded.model
    return ServedModel(
        name=config.served_model_names[0] if config.served_model_names else loaded.name,
        fingerprint=system_fingerprint(engine, reads_control_tokens=config.reads_control_tokens),
        backend=model.backend_name,
        kernels=model.instruction_set,
        faster_kernels=faster_kernels(model) or "",
        weights=model.weights_format,
        kv=model.kv_format,
        version=VERSION,
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
    return TokenWork(linear=2.0 * linear_parameter_count(spec), attention=attention_flops_per_pair(spec))


def recent_of(engine: AsyncLLM, config: ServerConfig) -> Recent | None:
    """The engine's last minutes; None where nobody wants them kept."""
    if not config.kept_minutes:
        return None
    view = cost_view(engine)
    machine = None if view is None else Machine(model=view.spec, quant=view.quant, kv=view.kv)
    return Recent(engine.engine, keep_s=60.0 * config.kept_minutes, machine=machine)


def cost_view(engine: AsyncLLM) -> CostView | None:
    """The cost model of the loaded model; None where its config is one the cost room does not read."""
    try:
        return CostView(engine.loaded.model)
    except EngineError:
        return None
