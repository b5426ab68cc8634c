"""A service on paper: engines of one setup, or two pools of them joined by a link.

setup = setup_of("llama-3.1-8b", "h100-80gb-sxm", of_services=True)
trace = open_trace(Path("trace.csv"))
load = OpenLoad(trace, shares_prefixes=False)
report = simulate(Service.of(setup, n_engines=2), load, limits=Limits(ttft_s=1.0, tpot_s=0.08))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypedDict, Unpack

from diptych.cost.kv_bytes import state_bytes
from diptych.cost.memory import capacity_of
from diptych.cost.parameters import kv_bytes_stored
from diptych.cost.places import Places, beside_states, places, state_places
from diptych.cost.setup import Setup
from diptych.ground.bounds import Bound, counted
from diptych.ground.config import BlockConfig, SchedulerConfig, at_least
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.sim.cluster import Group, Wire
from diptych.sim.drafts import StatedDrafts
from diptych.sim.link import Link

MAX_ENGINES = 1024
MAX_BLOCKS = 2**24  # each costs the simulator some 50 bytes per engine
UNKNOWN_CONTEXT = 1 << 20  # of a model that states no limit
USUAL_CONTEXT = 4096  # of a sequence, where nobody says
# a suffix that is read where it is answered may delay the streams there so long: about one step of a full engine
LOCAL_PREFILL_S = 0.03


class _Predictor(Protocol):
    """What tells how long steps take."""

    def predict_s(self, shape: StepShape) -> float:
        """Of one step."""
        ...

    def predict_run_s(self, shape: StepShape, n_steps: int) -> list[float]:
        """Of as many that decode, each one position further."""
        ...


@dataclass(frozen=True, slots=True)
class _Paced:
    """Another one's times, so many times as long."""

    model: _Predictor
    pace: float

    def predict_s(self, shape: StepShape) -> float:
        """Of one step."""
        return self.pace * self.model.predict_s(shape)

    def predict_run_s(self, shape: StepShape, n_steps: int) -> list[float]:
        """Of a run of them."""
        return [self.pace * step_s for step_s in self.model.predict_run_s(shape, n_steps)]


class EngineOptions(TypedDict, total=False):
    """How the engines of a pool are set up, beside their setup; defaults are those of `Pool.of`."""

    n_engines: int
    kv_tokens: int | None
    context_tokens: int
    block_tokens: int
    max_step_tokens: int
    max_running_sequences: int | None
    max_waiting_tokens: int
    stall_budget_s: float | None
    enable_prefix_cache: bool
    prefills_alone: bool
    drafts: StatedDrafts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """`n_engines` engines of one setup. places_reason: what set the number of sequences at one time.

    pace: how much longer steps take than predicted, to see what an error of the prediction would change.
    """

    setup: Setup
    n_engines: int
    scheduler: SchedulerConfig
    blocks: BlockConfig
    places_reason: str
    pace: float = 1.0
    drafts: StatedDrafts | None = None

    @classmethod
    def of(
        cls,
        setup: Setup,
        *,
        n_engines: int = 1,
        kv_tokens: int | None = None,
        context_tokens: int = USUAL_CONTEXT,
        block_tokens: int = 32,
        max_step_tokens: int = 2048,
        max_running_sequences: int | None = None,
        max_waiting_tokens: int = SchedulerConfig().max_waiting_tokens,
        stall_budget_s: float | None = None,
        enable_prefix_cache: bool = True,
        prefills_alone: bool = False,
        drafts: StatedDrafts | None = None,
    ) -> Pool:
        """KV blocks from the device's memory less weights and buffers, and as many places as the engine would give itself.

        context_tokens: of a usual sequence. Where layers have windows, a pool has room for more tokens the longer it is, as
        other software keeps no more of it than the window; on this machine, whose blocks hold all layers, it changes nothing.
        Raises ConfigError where the weights do not fit, and for impossible numbers.
        """
        Bound(int, 1, MAX_ENGINES, "engines").take("engines", n_engines, ConfigError)
        at_least("block tokens", block_tokens, 1)
        n_states = partial(_states, setup, running=max_running_sequences, is_caching=enable_prefix_cache)
        blocks = _blocks(setup, kv_tokens, context_tokens, block_tokens, n_states)
        context = min(setup.model.max_context_tokens or UNKNOWN_CONTEXT, blocks.n_blocks * block_tokens)
        predict_s = setup.model_of_time().predict_s

        def decode_s(sequences: int, tokens: int) -> float:
            return predict_s(StepShape.decode(batch=sequences, context_tokens=tokens))

        found = places(blocks.n_blocks * block_tokens, context, decode_s)
        found = beside_states(found, blocks.n_places, is_caching=enable_prefix_cache)
        if max_running_sequences is not None:
            found = Places(max_running_sequences, "as asked")
        scheduler = SchedulerConfig(
            max_step_tokens=max_step_tokens,
            max_running_sequences=found.number,
            stall_budget_s=stall_budget_s,
            max_waiting_tokens=max_waiting_tokens,
            max_context_tokens=context,
            enable_prefix_cache=enable_prefix_cache,
            prefills_alone=prefills_alone,
        )
        return cls(
            setup=setup,
            n_engines=n_engines,
            scheduler=scheduler,
            blocks=blocks,
            places_reason=found.reason,
            drafts=drafts,
        )

    @property
    def n_devices(self) -> int:
        """Of all engines together."""
        return self.n_engines * self.setup.n_devices

    @property
    def kv_tokens(self) -> int:
        """Tokens that one engine's KV pool holds."""
        return self.blocks.n_blocks * self.blocks.block_tokens

    def group(self, *, decodes: bool) -> Group:
        """These engines for a cluster."""
        calibrated = self.setup.model_of_time()
        model: _Predictor = calibrated
        if self.pace != 1.0:
            model = _Paced(model, self.pace)
        return Group(
            n_engines=self.n_engines,
            config=self.scheduler,
            blocks=self.blocks,
            predict_s=model.predict_s,
            predict_run_s=model.predict_run_s,
            wake_s=calibrated.calibration.host.wake_s,
            decodes=decodes,
            drafts=self.drafts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Engines behind a router. readers: the engines of a pool of their own that read prompts for `pool`, over `link`;
    None: those of `pool` do both.

    local_prefill_s: what is left of a prompt is read where it is answered if that takes no longer.
    """

    pool: Pool
    router: str = "least-delay"
    readers: Pool | None = None
    link: Link | None = None
    local_prefill_s: float = LOCAL_PREFILL_S

    def __post_init__(self) -> None:
        """Refuse pools that cannot work together."""
        if self.readers is None:
            if self.link is not None:
                raise ConfigError("a link joins two pools; this service has one", hint="name the engines that prefill")
            return
        reader, decoder = self.readers.setup, self.pool.setup
        if self.link is None:
            raise ConfigError(
                "two pools need a link that carries keys and values", hint="for example --link 50GB/s,10us"
            )
        if reader.model != decoder.model or reader.kv != decoder.kv:
            raise ConfigError(
                f"one pool holds {reader.model.name} with KV {reader.kv.name}, the other {decoder.model.name} with KV "
                f"{decoder.kv.name}; keys and values of one are of no use to the other"
            )
        if self.readers.blocks.block_tokens != self.pool.blocks.block_tokens:
            raise ConfigError(
                f"one pool has blocks of {self.readers.blocks.block_tokens} tokens, the other of "
                f"{self.pool.blocks.block_tokens}; what is handed over must fit"
            )

    @classmethod
    def of(cls, setup: Setup, *, router: str = "least-delay", **options: Unpack[EngineOptions]) -> Service:
        """One pool whose engines do both; options as of `Pool.of`."""
        return cls(pool=Pool.of(setup, **options), router=router)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """All of them, the one that decodes first."""
        return (self.pool,) if self.readers is None else (self.pool, self.readers)

    @property
    def n_engines(self) -> int:
        """Of all pools."""
        return sum(pool.n_engines for pool in self.pools)

    @property
    def n_devices(self) -> int:
        """Of all pools."""
        return sum(pool.n_devices for pool in self.pools)

    @property
    def request_s(self) -> float:
        """From a client to the scheduler, where the software of any pool was seen to take time for it."""
        return max(pool.setup.calibration.request_s for pool in self.pools)

    @property
    def label(self) -> str:
        """Short text that names it."""
        parts = [f"{pool.n_engines} x ({pool.setup.label})" for pool in self.pools]
        return parts[0] if len(parts) == 1 else f"prefill on {parts[1]}, decode on {parts[0]}"

    def usd_per_hour(self, price: float | None = None) -> float | None:
        """Of all devices; price: of one, where it is not the device's own. None: some price is not known."""
        prices = [pool.setup.hardware.usd_per_hour if price is None else price for pool in self.pools]
        if None in prices:
            return None
        return sum(each * pool.n_devices for each, pool in zip(prices, self.pools, strict=True) if each is not None)

    def kv_bytes(self, tokens: int) -> float:
        """Of so many leading tokens of a prompt: what a hand-off must move."""
        setup = self.pool.setup
        return kv_bytes_stored(setup.model, setup.kv, tokens, is_ours=setup.calibration.is_local)

    def groups(self) -> list[Group]:
        """The pools for a cluster, in their order."""
        return [pool.group(decodes=pool is self.pool) for pool in self.pools]

    def wire(self) -> Wire | None:
        """What joins them."""
        if self.link is None:
            return None
        kv_bytes: Callable[[int], float] = self.kv_bytes
        return Wire(
            link=self.link,
            kv_bytes=kv_bytes,
            local_prefill_us=int(self.local_prefill_s * 1e6),
            state_bytes=state_bytes(self.pool.setup.model),
        )

    def part(self, number: int, of: int) -> Service:
        """One of several equal cells that each have a router of their own. ConfigError where they do not divide."""
        for pool in self.pools:
            if pool.n_engines % of:
                raise ConfigError(
                    f"{counted(pool.n_engines, 'engine')} cannot be divided into {of} cells", hint="use a divisor"
                )
        pools = [replace(pool, n_engines=pool.n_engines // of) for pool in self.pools]
        return replace(self, pool=pools[0], readers=pools[1] if len(pools) > 1 else None)


def _states(setup: Setup, memory_bytes: float, *, running: int | None, is_caching: bool) -> int:
    return state_places(state_bytes(setup.model, tp=setup.tp), memory_bytes, running=running, is_caching=is_caching)


def _blocks(
    setup: Setup, kv_tokens: int | None, context_tokens: int, block_tokens: int, n_states: Callable[[float], int]
) -> BlockConfig:
    if kv_tokens is None:
        capacity = capacity_of(setup, context_tokens=context_tokens, batch=1)
        kv_tokens = capacity.kv_tokens
        if kv_tokens < block_tokens:
            raise ConfigError(
                f"{setup.label} leaves room for {kv_tokens} tokens of KV: of {capacity.memory_bytes / 1e9:.4g} GB, weights "
                f"take {capacity.weight_bytes / 1e9:.4g} GB; at least one block of {block_tokens} tokens is needed",
                hint="a larger device, a larger --tp or a smaller weight format",
            )
        states = n_states(capacity.free_kv_bytes)
        if not setup.model.kv_layers:  # blocks number tokens, and states alone take room
            kv_tokens = min(kv_tokens, MAX_BLOCKS * block_tokens)
            return BlockConfig(n_blocks=kv_tokens // block_tokens, block_tokens=block_tokens, n_places=states)
        kv_tokens -= int(kv_tokens * states * state_bytes(setup.model, tp=setup.tp) / capacity.free_kv_bytes)
    else:
        states = n_states(math.inf)
    Bound(int, 1, MAX_BLOCKS * block_tokens, "tokens").take("KV tokens", kv_tokens, ConfigError)
    n_blocks = kv_tokens // block_tokens
    if n_blocks < 1:
        raise ConfigError(f"the KV pool is {kv_tokens} tokens; it must be at least one block of {block_tokens} tokens")
    return BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens, n_places=states)
