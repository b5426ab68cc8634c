"""The native kernels as Python finds them: whether they are there, which kernel sets this processor runs, and its ceilings.

`_cpu` is the extension module built from csrc, or None where pip could not build it.
"""

from __future__ import annotations

import logging
import shutil
from importlib.util import find_spec
from typing import Any

from diptych.compute.ops.cpus import Placement
from diptych.compute.ops.shares import OwnHeads, Rank
from diptych.ground.errors import ConfigError
from diptych.models.spec import ModelSpec
from diptych.models.states import StateRule, StateSpec

try:
    from diptych.compute.ops import _cpu  # type: ignore[attr-defined]

    IMPORT_FAILURE = ""
except ImportError as error:
    _cpu = None
    IMPORT_FAILURE = str(error)

logger = logging.getLogger("diptych.compute")

COMPILERS = ("c++", "g++", "clang++")
# what the kernels hold (csrc/memory/kv_cache.cpp): of a head with keys and values, of one whose keys are both; tokens a block
MOST_HEAD_DIM, MOST_LATENT_DIM, BLOCK_TILE = 512, 1024, 16


def is_available() -> tuple[bool, str]:
    """(whether the native kernels can be used, what they run on or why not)."""
    if _cpu is None:
        return False, _why_missing()
    refusal = _cpu.kernel_set_refusal()
    return True, f"native kernels, {_cpu.kernel_sets()[0]}" + (f"; {refusal}" if refusal else "")


def _why_missing() -> str:
    """pip hides why a build failed, so the first use says what is known and how to see the rest."""
    if find_spec("diptych.compute.ops._cpu") is not None:
        return f"the cpu kernels do not load: {IMPORT_FAILURE}"
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        now = "no C++ compiler is on PATH: install g++ or clang++, then Diptych again"
    else:
        now = f"{compiler} is on PATH now: install Diptych again, with `pip install -v` to see the compiler's messages"
    return f"the cpu kernels were not built when Diptych was installed; {now}"


def instruction_sets() -> list[str]:
    """The kernel sets that this processor runs, best first."""
    return list(_cpu.kernel_sets()) if _cpu is not None else []


def choose_instruction_set(name: str) -> str:
    """The kernel set of that name, "auto" being the best; ConfigError when this processor does not run it."""
    known = instruction_sets()
    hint = f"its processor has {', '.join(_cpu.capabilities()) or 'none of the instructions that sets are made for'}"
    if refusal := _cpu.kernel_set_refusal():
        hint += f"; {refusal}"
    if name == "auto":
        return known[0]
    if name not in known:
        raise ConfigError(f"instruction_set is {name!r}; this machine runs {', '.join(known)}", hint=hint)
    return name


def faster_set(name: str) -> str | None:
    """The best kernel set of this processor where `name` is one of the others; None where it is the best, or none of them."""
    known = instruction_sets()
    return known[0] if name in known[1:] else None


def warn_of_faster_set(name: str) -> None:
    """Said once for each model, as the set is chosen at several places of a load."""
    if faster := faster_set(name):
        logger.warning("kernels use %s; this processor also has %s, which is faster", name, faster)


def kv_bytes_per_block(
    spec: ModelSpec, kv_format: str, block_tokens: int, heads: list[tuple[int, ...]] | None = None
) -> int:
    """Bytes of one block in all layers of a model. heads: how many of each layer, and how wide, if not its own."""
    sizes = {**cache_sizes(spec), **({} if heads is None else {"heads": heads})}
    return int(_cpu.kv_bytes_per_block(block_tokens=block_tokens, format=kv_format, **sizes))


def refuse_heads(spec: ModelSpec) -> None:
    """ConfigError for a model whose heads, or latents, are wider than the kernels hold, or of an odd width."""
    for cache in spec.caches:
        most = MOST_HEAD_DIM if cache.value_dim else MOST_LATENT_DIM
        keys = cache.attended or cache.head_dim
        widest = max(keys, cache.head_dim - keys, cache.value_dim)
        if widest > most or keys % 2 or cache.head_dim % 2:
            what = f"heads of {widest}" if cache.value_dim else f"latents of {keys}"
            raise ConfigError(
                f"this model has {what} numbers; the cpu backend takes an even number of at most {most}",
                hint="use --backend torch",
            )


def refuse_block(block_tokens: int) -> None:
    """ConfigError for blocks that hold no whole tiles."""
    if block_tokens % BLOCK_TILE != 0:
        raise ConfigError(f"block_tokens is {block_tokens}; the cpu backend needs a multiple of {BLOCK_TILE}")


def cache_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The cache of a model as the kernels want to know it: of each layer that keeps something how many heads, how wide, and in
    which order.
    """
    return {"heads": [(*cache.sizes, *cache.order) for cache in spec.caches]}


def state_shape(state: StateSpec, own: OwnHeads, *, scale: float = 1.0, norm_eps: float = 0.0) -> Any:
    """The kernels' description of a rank's heads and their states."""
    return _cpu.StateShape(
        rule=state.rule.value,
        n_key_heads=own.n_kv_heads,
        n_value_heads=own.n_heads,
        key_dim=state.key_dim,
        value_dim=state.value_dim,
        n_taps=state.n_taps,
        scale=scale,
        norm_eps=norm_eps,
        least_step=state.step_limits[0],
        most_step=state.step_limits[1],
        most_weight=state.most_weight,
        rate_scale=state.rate_scale,
        fades_by_key=state.fades_by_key,
        least_decay=state.least_decay or 0.0,
        is_steady=state.is_steady,
    )


def state_floats(spec: ModelSpec, rank: Rank) -> list[int]:
    """What the kernels keep of a sequence in each layer that has a state, in numbers of 4 bytes: of a rank's heads."""
    found = []
    for place, one in enumerate(spec.states):  # those behind the layers' each rank has whole
        own = (rank if place < spec.n_layer_states else Rank()).heads(one.n_value_heads, one.n_key_heads)
        if own is None:
            found.append(0)
            continue
        is_of_entries = one.rule is StateRule.ENTRIES
        found.append(one.state_elements if is_of_entries else state_shape(one, own).floats)
    return found


def measure_read_bytes_per_s(n_bytes: int, placement: Placement, repeats: int) -> float:
    """The best rate at which these threads read `n_bytes`, again and again.

    From 512 MiB on it is the memory's: one half is timed after the other was read, so that caches hold nothing of it.
    """
    return float(_cpu.measure_read_bytes_per_s(n_bytes, placement.threads, placement.cpus, repeats))


def measure_signal_s(placement: Placement, repeats: int = 3) -> float:
    """How long one of these threads waits for what another has just written, seconds; 0 of a thread alone."""
    return float(_cpu.measure_signal_s(placement.threads, placement.cpus, repeats))


def measure_ops_per_s(dtype: str, placement: Placement, repeats: int = 25) -> float:
    """The best rate at which these threads multiply `dtype` (fp32, bf16, int8, int4) by any instruction, from registers.

    int4: codes of fewer than eight bits by int8.
    """
    return float(_cpu.measure_ops_per_s(dtype, placement.threads, placement.cpus, repeats))
