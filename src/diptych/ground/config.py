"""Settings of each room, and the only place where environment variables are read.

A room takes its own config; only `engine` and `cli` see `EngineConfig`. Bad values raise ConfigError by name and limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from diptych.ground.errors import ConfigError

BACKENDS = ("auto", "cpu", "torch")
WEIGHT_FORMATS = ("auto", "fp32", "bf16", "int8", "int4")
KV_FORMATS = ("auto", "fp32", "bf16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the waiting line.

    max_step_tokens: token budget of a step. stall_budget_s: a step that holds running decodes may not be predicted to
    last longer than this (None: no limit). max_waiting_tokens: admission bound over prompt + max_tokens of all waiting
    requests. aging_s: a waiting request gains one priority level per this many seconds, so that none starves.
    """

    max_step_tokens: int = 2048
    max_running_sequences: int = 64
    stall_budget_s: float | None = None
    max_waiting_tokens: int = 4_194_304
    max_context_tokens: int = 4096
    aging_s: float = 2.0
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse impossible limits."""
        at_least("max_step_tokens", self.max_step_tokens, 1)
        at_least("max_running_sequences", self.max_running_sequences, 1)
        at_least("max_waiting_tokens", self.max_waiting_tokens, 1)
        at_least("max_context_tokens", self.max_context_tokens, 2)
        if self.stall_budget_s is not None and self.stall_budget_s <= 0.0:
            raise ConfigError(f"stall_budget_s is {self.stall_budget_s}; it must be greater than 0")
        if self.aging_s <= 0.0:
            raise ConfigError(f"aging_s is {self.aging_s}; it must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The KV pool: `n_blocks` blocks of `block_tokens` tokens."""

    n_blocks: int
    block_tokens: int = 32

    def __post_init__(self) -> None:
        """Refuse an empty pool."""
        at_least("n_blocks", self.n_blocks, 1)
        at_least("block_tokens", self.block_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Which kernels run and on what. `auto` is resolved once at start and logged, never silently changed later.

    threads: of the kernels; None is one per physical core that this process may use. numa: where they are pinned: `auto`
    (cores of one NUMA node after the other), nodes such as `0` or `0,1`, or `off` (not pinned at all). instruction_set: the
    cpu backend's kernel set, `auto` being the best that this processor runs; other names are checked when the model is loaded.
    """

    backend: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    threads: int | None = None
    instruction_set: str = "auto"
    numa: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        one_of("backend", self.backend, BACKENDS)
        one_of("weights", self.weights, WEIGHT_FORMATS)
        one_of("kv", self.kv, KV_FORMATS)
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        numa_nodes(self.numa)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything `LLM` needs. `max_context_tokens` None: the model's own; kv_memory_bytes None: a share of free memory."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    max_context_tokens: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 32
    seed: int = 0


def at_least(name: str, value: int, low: int) -> None:
    """Raise ConfigError unless value >= low."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value}; it must be a whole number of at least {low}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless value is one of choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def numa_nodes(numa: str) -> tuple[int, ...]:
    """The NUMA nodes that the setting names, none for `auto` and `off`; ConfigError for anything else."""
    if numa in ("auto", "off"):
        return ()
    parts = numa.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(f"numa is {numa!r}; it must be auto, off, or nodes such as 0 or 0,1")
    return tuple(sorted({int(part) for part in parts}))


def env_text(name: str) -> str | None:
    """The environment variable DIPTYCH_<name>, or None when unset or empty."""
    return os.environ.get(f"DIPTYCH_{name}") or None


def profile_dir() -> Path:
    """Where measured hardware profiles live: DIPTYCH_HOME, else the user's cache folder."""
    home = env_text("HOME")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "diptych"
