"""How many workers there are, and where: what `serve --prefill 1 --decode 2` and its other options say."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.errors import ConfigError

OBJECT_STORE_BYTES = 256 * 2**20  # blocks stay in it for milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How many workers. prefill: those that read for the others; decode: those that answer, with prefill = 0 all they do.

    takes_other_kernels: see `cluster.worker`. otlp_traces_endpoint: see `engine.spans`. address: of a Ray cluster that runs
    ("auto" finds one); None: one is started here, on loopback, and ends with this process.
    max_prefill, max_decode: pools grow up to these and shrink again, so that workers have target_queue_s of predicted work
    each; None: they stay as they are. calm_s: see `cluster.autoscale`.
    """

    prefill: int = 0
    decode: int = 1
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
        if self.target_queue_s <= 0.0 or self.calm_s < 0.0:
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
        return (self.max_prefill or self.prefill) + (self.max_decode or self.decode)

    @property
    def names(self) -> list[str]:
        """Of the workers, those that decode first."""
        return [f"decode-{i}" for i in range(self.decode)] + [f"prefill-{i}" for i in range(self.prefill)]
