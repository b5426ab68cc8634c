"""Settings of each room, and the only place where environment variables are read.

A room takes its own config; only `engine` and `cli` see `EngineConfig`. Bad values raise ConfigError by name and limit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from diptych.ground.bounds import Bound, exactly, shown
from diptych.ground.errors import ConfigError
from diptych.ground.formats import ENGINE_KV, ENGINE_WEIGHTS, MADE_WEIGHTS

BACKENDS = ("auto", "cpu", "torch")
AS_STORED = ("auto", "file")
BALANCED = ("int8", "int4")  # weights of which channels are balanced when they are made
BY_TEXT, BY_WEIGHTS = "auto", "weights"
WEIGHT_FORMATS = (*AS_STORED, *ENGINE_WEIGHTS, *MADE_WEIGHTS)
KV_FORMATS = ("auto", *ENGINE_KV)
LONGROPE_FACTORS = ("auto", "short", "long")
ACTIVATIONS = ("auto", "int8", "int15")
MODEL_DRAFTERS = ("draft", "medusa", "eagle")  # what the executor runs, from a checkpoint of their own
TASKS = ("auto", "generate", "embed", "score")
SPECULATE = ("off", "lookup", *MODEL_DRAFTERS, "auto")
PACKED_CACHE_BYTES = 32 * 2**30  # a dozen models of the sizes that a CPU serves
MOST_DRAFTS = 16  # of one sequence and step
MOST_DRAFT_ROWS = 128  # of all sequences of a step: beyond it a step is bound by arithmetic on every machine we know
_NAME = re.compile(r"[a-z0-9_]{1,32}")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,4})?")

# every number of the configs below; `what` is the text of the help pages
BOUNDS: Mapping[str, Bound] = MappingProxyType(
    {
        "max_step_tokens": Bound(int, 1, 2**31 - 1, "most tokens of one step (largest prefill chunk)"),
        "max_running_sequences": Bound(
            int, 1, 2**20, "sequences that run at one time (default: what memory and step time allow)", is_optional=True
        ),
        "stall_budget_s": Bound(
            float,
            0.0,
            None,
            "longest a running stream may wait for others' prefill",
            is_low_open=True,
            is_optional=True,
        ),
        "max_waiting_tokens": Bound(int, 1, 2**62, "refuse requests beyond this many waiting tokens"),
        "max_context_tokens": Bound(int, 2, 2**31 - 1, "longest sequence (default: the model's)", is_optional=True),
        "aging_s": Bound(float, 0.0, None, "a waiting request gains a priority level in this time", is_low_open=True),
        "lookup_memory_tokens": Bound(
            int, 0, 2**24, "tokens of recent answers in which lookup looks, too, by cache salt (0: none)"
        ),
        "max_draft_tokens": Bound(int, 1, MOST_DRAFTS, "most tokens guessed ahead for one sequence and step"),
        "n_blocks": Bound(int, 1, 2**31 - 1, "blocks of the KV pool"),
        "n_places": Bound(int, 0, 2**31 - 1, "places for states of sequences"),
        "block_tokens": Bound(int, 1, 2**20, "tokens of a KV block"),
        "threads": Bound(
            int, 1, 4096, "compute threads, of all --tp together (default: one per core)", is_optional=True
        ),
        "tp": Bound(int, 1, 64, "processes that divide the model's outputs, on this machine (same answers)"),
        "kv_memory_bytes": Bound(int, 1, 2**62, "memory of the KV pool in bytes", is_optional=True),
        "max_loras": Bound(int, 0, 4096, "most adapters loaded at one time"),
        "max_lora_rank": Bound(int, 1, 4096, "highest rank of an adapter"),
        "seed": Bound(int, -(2**63), 2**64 - 1, "of what the engine draws for requests without a seed"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the waiting line.

    max_step_tokens: token budget of a step. max_running_sequences: None: what KV memory and the time of a step allow (the
    engine settles it, see `engine.places`). stall_budget_s: a step that holds running decodes may not be expected to
    last longer than this (None: no limit). max_waiting_tokens: admission bound over prompt + max_tokens of all waiting
    requests. aging_s: a waiting request gains one priority level per this many seconds, so that none starves. speculate: who
    guesses tokens ahead (`control.speculation`; `MODEL_DRAFTERS` are run by the executor); it changes speed and no answer.
    max_draft_tokens: most guesses of one sequence and step. lookup_memory_tokens: recent answers that `lookup` knows beside the
    sequence's own text, those with the same cache salt only; about 200 bytes each. prefills_alone: a step with prompts holds
    nothing else, and comes before decode; as other engines do, for the simulator.
    """

    max_step_tokens: int = 2048
    max_running_sequences: int | None = None
    stall_budget_s: float | None = None
    max_waiting_tokens: int = 4_194_304
    max_context_tokens: int = 4096
    aging_s: float = 2.0
    enable_prefix_cache: bool = True
    speculate: str = "off"
    lookup_memory_tokens: int = 0
    max_draft_tokens: int = MOST_DRAFTS
    prefills_alone: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible limits."""
        _take(self, "max_step_tokens", "max_running_sequences", "stall_budget_s", "max_waiting_tokens", "aging_s")
        _take(self, "lookup_memory_tokens", "max_draft_tokens")
        at_least("max_context_tokens", self.max_context_tokens, 2)  # settled here: the model's own is known
        _take(self, "max_context_tokens")
        exactly(bool, "enable_prefix_cache", self.enable_prefix_cache, ConfigError)
        exactly(bool, "prefills_alone", self.prefills_alone, ConfigError)
        one_of("speculate", self.speculate, SPECULATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The KV pool: `n_blocks` blocks of `block_tokens` tokens.

    n_places: for states of sequences, of models that have states: of those that run, and of cached prefixes. 0: it has none.
    """

    n_blocks: int
    block_tokens: int = 32
    n_places: int = 0

    def __post_init__(self) -> None:
        """Refuse an empty pool."""
        _take(self, "n_blocks", "block_tokens", "n_places")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeConfig:
    """Which kernels run and on what. `auto` is resolved once at start and logged, never silently changed later.

    weights: what a file has in codes (AWQ, GGUF, ...) stays so with `file`, and with `auto` on the cpu backend; torch's `auto`
    takes the codes' values in 16 bits, which take more memory and less time. q8_0, q5_1, q4_1, q4_0 (cpu): blocks of GGUF, made
    when a checkpoint is loaded; int8 and int4: one scale for an output, and for a row of activations.
    threads: of the kernels; None is one per physical core that this process may use. numa: where they are pinned: `auto`
    (cores of one NUMA node after the other), nodes such as `0` or `0,1`, or `off` (not pinned at all). instruction_set: the
    cpu backend's kernel set, `auto` being the best that this processor runs; other names are checked when the model is loaded.
    tp: processes (ranks) that divide the outputs of every projection, on one machine; threads are those of all of them.
    tp_address: HOST:PORT where rank 0 listens for ranks on other machines, one on each; threads are then those of this one.
    activations: what meets weights in groups; int15: 15 bits, which cost next to nothing but up to
    twice the time of prefill; int8: 8 bits; auto: 15 for codes of 6 bits and more, to which 8 would add more than a tenth of
    what they lost, else 8, as beside a GGUF file's coarser codes. W8A8 with a scale per row has its publisher's 8 bits alone.
    longrope: which factors turn keys in models that have two sets; auto: long beyond the trained length, else short.
    """

    backend: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    kv: str = "auto"
    threads: int | None = None
    instruction_set: str = "auto"
    numa: str = "auto"
    longrope: str = "auto"
    activations: str = "auto"
    tp: int = 1
    tp_address: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        one_of("backend", self.backend, BACKENDS)
        one_of("weights", self.weights, WEIGHT_FORMATS)
        one_of("kv", self.kv, KV_FORMATS)
        one_of("longrope", self.longrope, LONGROPE_FACTORS)
        one_of("activations", self.activations, ACTIVATIONS)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            hint = "a CUDA device is named cuda, or cuda:0 where there are several"
            raise ConfigError(f"device is {shown(self.device)}; it must be auto, cpu, cuda or cuda:N", hint=hint)
        if not isinstance(self.instruction_set, str) or not _NAME.fullmatch(self.instruction_set):
            raise ConfigError(
                f"instruction_set is {shown(self.instruction_set)}; it must be auto or the name of a kernel set"
            )
        _take(self, "threads", "tp")
        numa_nodes(self.numa)
        if self.tp > 1 and self.backend == "torch":
            raise ConfigError(
                f"tp is {self.tp}, and the torch backend computes in one process",
                hint="use --backend cpu, or leave tp out",
            )
        if self.tp_address is not None:
            host_and_port(self.tp_address)
            if self.tp == 1:
                raise ConfigError(
                    f"tp_address is {self.tp_address!r} and tp is 1",
                    hint="tp is the number of machines, this one included",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything `LLM` needs. `max_context_tokens` None: the model's own; kv_memory_bytes None: a share of free memory.

    task: what the model is for beside writing; auto: as its files say (`models.pooling`); generate: nothing; embed, score:
    that too where they say nothing.
    calibrate: of int8 and int4 that are made when a model is loaded: by which text their channels are balanced, `auto` the one
    that ships, otherwise a file's; `weights`: by the weights alone.
    draft_model: checkpoint of the drafter that `speculate` names, a folder or a hub name; for auto several, between commas, one
    of each kind; None: the bundled model's own.
    loras: adapters to load at start, name -> folder or hub name. max_loras, max_lora_rank: what may be loaded, then or later.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    max_context_tokens: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 32
    seed: int = 0
    task: str = "auto"
    calibrate: str = BY_TEXT
    draft_model: str | None = None
    loras: Mapping[str, str | Path] = field(default_factory=dict)
    max_loras: int = 8
    max_lora_rank: int = 64

    def __post_init__(self) -> None:
        """Refuse impossible numbers, and settings of other kinds."""
        for name, kind in (("scheduler", SchedulerConfig), ("compute", ComputeConfig)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be a {kind.__name__}")
        _take(self, "max_context_tokens", "kv_memory_bytes", "block_tokens", "seed", "max_loras", "max_lora_rank")
        one_of("task", self.task, TASKS)
        self._check_calibrate()
        self._check_draft_model()
        self._check_loras()

    def _check_calibrate(self) -> None:
        """What nobody would read is refused."""
        calibrate, weights = self.calibrate, self.compute.weights
        if not isinstance(calibrate, str) or not calibrate:
            raise ConfigError(f"calibrate is {shown(calibrate)}; it must be {BY_TEXT}, {BY_WEIGHTS} or a text's path")
        if calibrate != BY_TEXT and weights not in BALANCED:
            raise ConfigError(
                f"calibrate is {calibrate!r}, and weights is {weights!r}",
                hint=f"it is about weights that are made {' or '.join(BALANCED)}; leave it out",
            )

    def _check_loras(self) -> None:
        """Names and paths, no more of them than may be loaded."""
        loras = self.loras
        if not isinstance(loras, Mapping) or not all(
            isinstance(name, str) and name and isinstance(path, str | Path) for name, path in loras.items()
        ):
            raise ConfigError(f"loras is {shown(loras)}; it must map names to folders")
        if len(loras) > self.max_loras:
            raise ConfigError(
                f"loras has {len(loras)} adapters; max_loras is {self.max_loras}", hint="raise max_loras (--max-loras)"
            )
        object.__setattr__(self, "loras", dict(loras))

    def _check_draft_model(self) -> None:
        """A drafter's checkpoint is read where its drafter runs, and refused elsewhere."""
        if self.draft_model is None:
            return
        if not isinstance(self.draft_model, str):
            raise ConfigError(f"draft_model is {shown(self.draft_model)}; it must be a checkpoint's folder or name")
        if self.scheduler.speculate not in (*MODEL_DRAFTERS, "auto"):
            raise ConfigError(
                f"draft_model is {self.draft_model!r}, and speculate is {self.scheduler.speculate!r}",
                hint=f"a draft model is for speculate of {', '.join(MODEL_DRAFTERS)}, auto",
            )


def engine_config(base: EngineConfig | None = None, /, **settings: Any) -> EngineConfig:
    """`base` (default: the defaults) with the settings of any of its rooms by their plain names.

    Raises ConfigError for an unknown name, with the nearest known ones, and for impossible values.

    >>> engine_config(weights="int8", max_context_tokens=8192).compute.weights
    'int8'
    """
    base = EngineConfig() if base is None else base
    if not isinstance(base, EngineConfig):
        raise ConfigError(f"config is {shown(base)}; it must be an EngineConfig")
    parts: dict[str, dict[str, Any]] = {"": {}, "scheduler": {}, "compute": {}}
    for name, value in settings.items():
        if name not in SETTINGS:
            near = get_close_matches(name, SETTINGS, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(SETTINGS))}"
            raise ConfigError(f"no setting {name!r}", hint=hint)
        parts[SETTINGS[name]][name] = value
    return replace(
        base,
        scheduler=replace(base.scheduler, **parts["scheduler"]),
        compute=replace(base.compute, **parts["compute"]),
        **parts[""],
    )


def _names(config: type[SchedulerConfig | ComputeConfig | EngineConfig]) -> list[str]:
    return [one.name for one in fields(config) if one.name not in ("scheduler", "compute")]


# setting -> the part of EngineConfig that holds it ("": itself, also where a part has a field of the same name)
SETTINGS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(_names(SchedulerConfig), "scheduler")
    | dict.fromkeys(_names(ComputeConfig), "compute")
    | dict.fromkeys(_names(EngineConfig), "")
)


def _take(config: SchedulerConfig | BlockConfig | ComputeConfig | EngineConfig, *names: str) -> None:
    """Check the numbers of a config and make them plain."""
    for name in names:
        object.__setattr__(config, name, BOUNDS[name].take(name, getattr(config, name), ConfigError))


def at_least(name: str, value: int, low: int) -> None:
    """Raise ConfigError unless value is a whole number >= low."""
    Bound(int, low, None, name).take(name, value, ConfigError)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless value is one of choices."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}")


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT; ConfigError for anything else."""
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"tp_address is {shown(address)}; it must be HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)


def numa_nodes(numa: str) -> tuple[int, ...]:
    """The NUMA nodes that the setting names, none for `auto` and `off`; ConfigError for anything else."""
    if numa in ("auto", "off"):
        return ()
    parts = numa.split(",") if isinstance(numa, str) else [""]
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(f"numa is {shown(numa)}; it must be auto, off, or nodes such as 0 or 0,1")
    return tuple(sorted({int(part) for part in parts}))


def env_text(name: str) -> str | None:
    """The environment variable DIPTYCH_<name>, or None when unset or empty."""
    return os.environ.get(f"DIPTYCH_{name}") or None


def quiet_ray(*, is_local: bool) -> None:
    """Have the Ray that is started from here report to nobody and, on one machine, listen on loopback only. Before ray is
    imported; what the environment says already stands.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_local:
        # Ray's own switch for "no other machine": without it, 127.0.0.1 becomes the machine's address
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def packed_cache() -> tuple[Path, int] | None:
    """Where packed weights are kept between starts, and how many bytes of them; None for DIPTYCH_PACKED_CACHE=off, and where
    there is no place for them.

    DIPTYCH_PACKED_CACHE: `off`, or the most bytes; PACKED_CACHE_BYTES where it is unset.
    """
    asked = env_text("PACKED_CACHE")
    if asked == "off":
        return None
    if asked is not None and not (asked.isascii() and asked.isdigit()):
        raise ConfigError(f"DIPTYCH_PACKED_CACHE is {shown(asked)}; it must be off, or a number of bytes")
    folder = profile_dir()
    return None if folder is None else (folder / "packed", PACKED_CACHE_BYTES if asked is None else int(asked))


def profile_dir() -> Path | None:
    """Where measured hardware profiles and packed weights live: DIPTYCH_HOME, else the user's cache folder.

    None where nobody says so and the user has no home, as one that a container made up.
    """
    home = env_text("HOME")
    if home:
        return Path(home)
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "diptych"
    except RuntimeError:
        return None
