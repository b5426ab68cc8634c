"""A service on paper, and what it would have answered: `simulate(Service.of(setup), load)`.

setup = setup_of("llama-3.1-8b", "h100-80gb-sxm")
items = read_trace(Path("trace.csv"))
load = OpenLoad(items, n_requests=len(items), shares_prefixes=False)
report = simulate(Service.of(setup, n_engines=2), load, limits=Limits(ttft_s=1.0, tpot_s=0.08))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diptych.cost.memory import capacity_of
from diptych.cost.places import places
from diptych.cost.setup import Setup
from diptych.ground.bounds import Bound
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.metrics import Distribution, Limits
from diptych.sim.cluster import Cluster
from diptych.sim.drafts import StatedDrafts
from diptych.sim.load import Load
from diptych.sim.statistics import Timeline
from diptych.sim.tally import Tally

MAX_ENGINES = 1024
MAX_BLOCKS = 2**24  # each costs the simulator some 50 bytes per engine
UNKNOWN_CONTEXT = 1 << 20  # of a model that states no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """`n_engines` engines of one setup, all prefill and decode in one pool each, behind a router."""

    setup: Setup
    n_engines: int
    scheduler: SchedulerConfig
    blocks: BlockConfig
    router: str
    places_reason: str
    drafts: StatedDrafts | None = None

    @classmethod
    def of(
        cls,
        setup: Setup,
        *,
        n_engines: int = 1,
        router: str = "least-work",
        kv_tokens: int | None = None,
        block_tokens: int = 32,
        max_step_tokens: int = 2048,
        max_running_sequences: int | None = None,
        max_waiting_tokens: int = SchedulerConfig().max_waiting_tokens,
        stall_budget_s: float | None = None,
        enable_prefix_cache: bool = True,
        drafts: StatedDrafts | None = None,
    ) -> Service:
        """The pool from the device's memory less weights and buffers, and as many places as the engine would give itself.

        Raises ConfigError where the weights do not fit, and for impossible numbers.
        """
        Bound(int, 1, MAX_ENGINES, "engines").take("engines", n_engines, ConfigError)
        blocks = _blocks(setup, kv_tokens, block_tokens)
        context = min(setup.model.max_context_tokens or UNKNOWN_CONTEXT, blocks.n_blocks * block_tokens)
        predict_s = setup.model_of_time().predict_s

        def decode_s(sequences: int, tokens: int) -> float:
            return predict_s(StepShape.decode(batch=sequences, context_tokens=tokens))

        found = places(blocks.n_blocks * block_tokens, context, decode_s)
        is_given = max_running_sequences is not None
        scheduler = SchedulerConfig(
            max_step_tokens=max_step_tokens,
            max_running_sequences=max_running_sequences if is_given else found.number,
            stall_budget_s=stall_budget_s,
            max_waiting_tokens=max_waiting_tokens,
            max_context_tokens=context,
            enable_prefix_cache=enable_prefix_cache,
        )
        return cls(
            setup=setup,
            n_engines=n_engines,
            scheduler=scheduler,
            blocks=blocks,
            router=router,
            places_reason="as asked" if is_given else found.reason,
            drafts=drafts,
        )

    @property
    def n_devices(self) -> int:
        """Of all engines together."""
        return self.n_engines * self.setup.tp

    @property
    def kv_tokens(self) -> int:
        """Tokens that one engine's pool holds."""
        return self.blocks.n_blocks * self.blocks.block_tokens


def _blocks(setup: Setup, kv_tokens: int | None, block_tokens: int) -> BlockConfig:
    if kv_tokens is None:
        capacity = capacity_of(setup, context_tokens=1, batch=1)
        kv_tokens = capacity.kv_tokens
        if kv_tokens < block_tokens:
            raise ConfigError(
                f"{setup.label} leaves room for {kv_tokens} tokens of KV: of {capacity.memory_bytes / 1e9:.4g} GB, weights "
                f"take {capacity.weight_bytes / 1e9:.4g} GB; at least one block of {block_tokens} tokens is needed",
                hint="a larger device, a larger --tp or a smaller weight format",
            )
    Bound(int, 1, MAX_BLOCKS * block_tokens, "tokens").take("KV tokens", kv_tokens, ConfigError)
    n_blocks = kv_tokens // block_tokens
    if n_blocks < 1:
        raise ConfigError(f"the KV pool is {kv_tokens} tokens; it must be at least one block of {block_tokens} tokens")
    return BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a load. Rates are over duration_s, from the first arrival to the last end.

    Latencies are of the requests that completed, percentiles within half a percent. Shares of busy are of the time of all
    engines together and add up to 1. usd_per_million_tokens: of output tokens; None where no price is known.
    """

    service: Service
    limits: Limits
    duration_s: float
    n_requests: int
    n_complete: int
    n_failed: int
    refused: Mapping[str, int]
    requests_per_s: float
    goodput_requests_per_s: float
    good_share: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    queue_s: Distribution | None
    e2e_s: Distribution | None
    busy: Mapping[str, float]  # prefill, decode, mixed, idle
    n_steps: int
    sequences_per_step: float  # weighted by time
    kv_share: float  # of the pool, weighted by time in steps
    kv_peak: float
    waiting_peak: int  # of one engine
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    usd_per_million_tokens: float | None
    timeline: Timeline
    curves: Mapping[str, list[tuple[float, float]]]  # (seconds, share of values at or below) of ttft, tpot, itl, queue


def simulate(
    service: Service,
    load: Load,
    *,
    limits: Limits | None = None,
    usd_per_hour: float | None = None,
    seed: int = 0,
    progress: Callable[[int, float], object] | None = None,
) -> Report:
    """Serve the load. usd_per_hour: of one device; None: the device's own price. Same arguments, same report."""
    tally = Tally(Limits() if limits is None else limits)
    cluster = Cluster(
        service.n_engines,
        service.scheduler,
        service.blocks,
        predict_s=service.setup.model_of_time().predict_s,
        tally=tally,
        router=service.router,
        seed=seed,
        drafts=service.drafts,
    )
    cluster.run(load, progress=progress)
    each = service.setup.hardware.usd_per_hour if usd_per_hour is None else usd_per_hour
    return _report(service, tally, cluster, None if each is None else each * service.n_devices)


def _report(service: Service, tally: Tally, cluster: Cluster, usd_per_hour: float | None) -> Report:
    duration_s = max(0.0, tally.last_end_s - tally.first_arrival_s)
    per_s = 1.0 / duration_s if duration_s else 0.0
    stats = [member.engine.core.stats() for member in cluster.engines]
    step_s, all_s = sum(tally.spent_s.values()), duration_s * service.n_engines
    tokens = tally.prompt_tokens + tally.output_tokens
    usd = None if usd_per_hour is None else usd_per_hour * duration_s / 3600.0
    return Report(
        service=service,
        limits=tally.limits,
        duration_s=duration_s,
        n_requests=tally.n_arrived,
        n_complete=tally.n_complete,
        n_failed=tally.n_failed,
        refused=dict(cluster.refused),
        requests_per_s=tally.n_complete * per_s,
        goodput_requests_per_s=tally.n_good * per_s,
        good_share=tally.n_good / tally.n_arrived if tally.n_arrived else 0.0,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        recomputed_tokens=tally.recomputed_tokens,
        output_tokens_per_s=tally.output_tokens * per_s,
        total_tokens_per_s=tokens * per_s,
        ttft_s=tally.ttft_s.distribution(),
        tpot_s=tally.tpot_s.distribution(),
        itl_s=tally.itl_s.distribution(),
        queue_s=tally.queue_s.distribution(),
        e2e_s=tally.e2e_s.distribution(),
        busy={name: s / all_s if all_s else 0.0 for name, s in tally.spent_s.items()}
        | {"idle": max(0.0, 1.0 - step_s / all_s) if all_s else 1.0},
        n_steps=tally.n_steps,
        sequences_per_step=tally.running_s / step_s if step_s else 0.0,
        kv_share=tally.kv_share_s / step_s if step_s else 0.0,
        kv_peak=tally.kv_peak,
        waiting_peak=tally.waiting_peak,
        preemptions=sum(one.preemptions for one in stats),
        prefix_query_tokens=sum(one.prefix_queries_tokens for one in stats),
        prefix_hit_tokens=sum(one.prefix_hits_tokens for one in stats),
        usd_per_hour=usd_per_hour,
        usd_per_million_output_tokens=_per_million(usd, tally.output_tokens),
        usd_per_million_tokens=_per_million(usd, tokens),
        timeline=tally.timeline,
        curves={name: getattr(tally, f"{name}_s").shares() for name in ("ttft", "tpot", "itl", "queue")},
    )


def _per_million(usd: float | None, tokens: int) -> float | None:
    return None if usd is None or not tokens else usd / tokens * 1e6
