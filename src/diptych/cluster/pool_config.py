"""How many workers there are, and where: what `serve --prefill 1 --decode 2` and its other options say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from diptych.ground.config import EngineConfig
from diptych.ground.errors import ConfigError
from diptych.models.spec import ModelSpec

OBJECT_STORE_BYTES = 256 * 2**20  # blocks stay in it for milliseconds


class OnCores(NamedTuple):
    """What a worker runs on: threads on the cores of a node. cores None: it computes on something else."""

    name: str
    node: str
    threads: int
    cores: int | None


def crowding(workers: Iterable[OnCores]) -> str | None:
    """Whose threads are more than the cores of their node, in words; None where each can have one of its own.

    A prediction knows a worker that has its cores to itself, so it speaks of none of these.
    """
    nodes: dict[str, list[OnCores]] = {}
    for one in workers:
        nodes.setdefault(one.node, []).append(one)
    for some in nodes.values():
        computing = [one for one in some if one.cores is not None]
        threads, cores = sum(one.threads for one in computing), max((one.cores or 0 for one in computing), default=0)
        if len(computing) > 1 and threads > cores:
            each = ", ".join(f"{one.name} {one.threads}" for one in computing)
            return f"workers compete: {threads} threads ({each}) on {cores} core{'s' * (cores != 1)} of one machine"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """What the workers of one pool run on, where it is not what all do.

    node: a custom resource of Ray's (`ray start --resources '{"reader": 2}'`), of which each worker takes one.
    """

    threads: int | None = None
    device: str | None = None
    node: str | None = None

    @classmethod
    def of(cls, text: str | None) -> PoolPlace:
        """From "threads=8,device=cuda,node=reader", any of them. Raises ConfigError for what is no such list."""
        said = {}
        for part in filter(None, (text or "").split(",")):
            name, _, value = part.partition("=")
            if name not in cls.__dataclass_fields__ or not value or name in said:
                raise ConfigError(
                    f"a pool cannot run on {part!r}",
                    hint="name threads=N, device=NAME, node=RESOURCE, each once at most",
                )
            said[name] = value
        threads = said.get("threads", "1")
        if not threads.isdecimal() or int(threads) < 1:
            raise ConfigError(f"a pool cannot run on threads={threads}; it must be a whole number of at least 1")
        return cls(
            threads=int(threads) if "threads" in said else None, device=said.get("device"), node=said.get("node")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many workers. prefill: those that read for the others; decode: those that answer, with prefill = 0 all they do.

    prefill_on, decode_on: what they run on, where it is not what the engine's configuration says of all.
    takes_other_kernels: see `cluster.worker`. otlp_traces_endpoint: see `engine.spans`. address: of a Ray cluster that runs
    ("auto" finds one); None: one is started here, on loopback, and ends with this process.
    max_prefill, max_decode: pools grow up to these and shrink again, so that workers have target_queue_s of predicted work
    each; None: they stay as they are. calm_s: see `cluster.autoscale`.
    """

    prefill: int = 0
    decode: int = 1
    prefill_on: PoolPlace = PoolPlace()
    decode_on: PoolPlace = PoolPlace()
    address: str | None = None
    local_prefill_tokens: int = 64
    takes_other_kernels: bool = False
    object_store_bytes: int = OBJECT_STORE_BYTES
    otlp_traces_endpoint: str | None = None
    max_prefill: int | None = None
    max_decode: int | None = None
    target_queue_s: float = 2.0
    calm_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what answers nobody."""
        if self.decode < 1 or self.prefill < 0:
            raise ConfigError(f"{self.decode} workers decode and {self.prefill} prefill; at least 1 must decode")
        for pool, (least, most) in self.bounds.items():
            if not 1 <= least <= most:
                raise ConfigError(
                    f"pool {pool} begins with {least} workers and may have {most}; it must begin with 1 at least and "
                    f"with {most} at most"
                )
        for pool, place in self.places.items():
            if place.node is not None and self.address is None:
                raise ConfigError(
                    f"pool {pool} runs on node={place.node}, and there is one machine",
                    hint="--ray-address names a cluster whose nodes have such a resource",
                )
            if place != PoolPlace() and not self.most_of(pool):
                raise ConfigError(f"pool {pool} has no workers that could run on anything", hint=f"add --{pool} 1")
        if not (0.0 < self.target_queue_s < inf and 0.0 <= self.calm_s < inf):
            raise ConfigError(
                f"target_queue_s is {self.target_queue_s} and calm_s {self.calm_s}; they must be more than 0, and 0 or more"
            )

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """Of pools that follow their load, the fewest and the most workers."""
        pools = {"prefill": (self.prefill, self.max_prefill), "decode": (self.decode, self.max_decode)}
        return {pool: (least, most) for pool, (least, most) in pools.items() if most is not None}

    @property
    def most(self) -> int:
        """Workers that there may be at one time."""
        return self.most_of("prefill") + self.most_of("decode")

    def most_of(self, pool: str) -> int:
        """Of one pool."""
        return (self.max_prefill or self.prefill) if pool == "prefill" else (self.max_decode or self.decode)

    @property
    def places(self) -> Mapping[str, PoolPlace]:
        """What the workers of each pool run on; a worker's name begins with its pool's."""
        return {"prefill": self.prefill_on, "decode": self.decode_on}

    def engines(self, config: EngineConfig, *, cores: int) -> dict[str, EngineConfig]:
        """The engine of each pool's workers.

        Several on one machine share its cores, less what a pool was given, and none is pinned where another may be.
        """
        compute = config.compute
        if self.address is None and self.most > 1:
            if compute.numa == "auto":
                compute = replace(compute, numa="off")
            given = {pool: place.threads for pool, place in self.places.items() if place.threads is not None}
            others = self.most - sum(map(self.most_of, given))
            if compute.threads is None and others:
                left = cores - sum(self.most_of(pool) * threads for pool, threads in given.items())
                compute = replace(compute, threads=max(1, left // others // compute.tp) * compute.tp)
        return {
            pool: replace(
                config,
                compute=replace(
                    compute, threads=place.threads or compute.threads, device=place.device or compute.device
                ),
            )
            for pool, place in self.places.items()
        }

    @property
    def names(self) -> list[str]:
        """Of the workers, those that decode first."""
        return [f"decode-{i}" for i in range(self.decode)] + [f"prefill-{i}" for i in range(self.prefill)]

    def check_states(self, spec: ModelSpec, config: EngineConfig) -> None:
        """ConfigError where prompts are to be read elsewhere and the states behind them could not come along."""
        if not spec.n_with_states or not self.most_of("prefill"):
            return
        missing = None if config.scheduler.enable_prefix_cache else "the prefix cache, in which they are kept"
        if config.compute.tp > 1:
            missing = f"workers of one rank (tp is {config.compute.tp})"
        if missing is not None:
            raise ConfigError(
                f"{spec.n_with_states} of the model's {spec.n_layers} layers keep a state of each sequence; to send states "
                f"from a worker to another takes {missing}",
                hint="--workers has each worker read its own prompts",
            )
