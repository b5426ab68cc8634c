"""What adapters add to this machine's steps, measured for its profile; and adapters of random numbers to measure with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from diptych.compute.adapters import Adapter, LowRank
from diptych.compute.model import Model
from diptych.ground.shape import StepShape
from diptych.lab.probe import StepProbe
from diptych.lab.rounds import Effort, measure
from diptych.models.mlp import MlpSpec
from diptych.models.spec import ModelSpec

RANK = 16
FEW, MANY, PROMPT = 1, 16, 256  # rows that are timed, of decode and of a prompt
CONTEXT = 64


def modules_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every projection that an adapter may have."""
    found: dict[str, tuple[int, int]] = {}
    for number, layer in enumerate(spec.layers):
        heads, mlp, root = layer.attention, layer.mlp, f"model.layers.{number}."
        q, n_kv = heads.n_heads * heads.head_dim, heads.own_kv_heads
        sizes: dict[str, tuple[int, int]] = {}
        if q:
            sizes |= {"self_attn.q_proj": (q, spec.hidden), "self_attn.o_proj": (spec.hidden, heads.width)}
        if n_kv:
            sizes |= {"self_attn.k_proj": (n_kv * heads.head_dim, spec.hidden),
                      "self_attn.v_proj": (heads.kv_width - n_kv * heads.head_dim, spec.hidden)}  # fmt: skip
        if isinstance(mlp, MlpSpec):
            sizes |= {"mlp.gate_proj": (mlp.ffn, spec.hidden), "mlp.up_proj": (mlp.ffn, spec.hidden),
                      "mlp.down_proj": (spec.hidden, mlp.ffn)}  # fmt: skip
        found |= {f"{root}{name}": size for name, size in sizes.items()}
    return found


def random_adapter(spec: ModelSpec, rank: int, seed: int) -> Adapter:
    """Small random numbers on every projection."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.1 * columns**-0.5

    modules = {
        name: LowRank(a=numbers(rank, inputs), b=numbers(outputs, rank))
        for name, (outputs, inputs) in modules_of(spec).items()
    }
    return Adapter(path=Path(f"random {seed}"), modules=modules, rank=rank, revision=str(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedSteps:
    """Seconds that one adapter adds to a step of FEW and of MANY decoding rows, and to a prompt of PROMPT rows."""

    n_layers: int
    n_parameters: int
    n_bytes: int
    few_s: float
    many_s: float
    prompt_s: float


def adapted_steps(model: Model, effort: Effort) -> AdaptedSteps:
    """Steps with an adapter and without, in turns."""
    adapter = random_adapter(model.spec, RANK, 0)
    number = model.add_adapter(adapter)
    probe = StepProbe(model, max_tokens=MANY * (CONTEXT + 32) + PROMPT)
    works = [StepShape.decode(batch=rows, context_tokens=CONTEXT) for rows in (FEW, MANY)]
    works.append(StepShape.prefill(batch=1, new_tokens=PROMPT))
    rounds = measure([probe.usual(work, adapters=adapters) for work in works for adapters in ((), (number,))], effort)
    few_s, many_s, prompt_s = (rounds.of(partial(_added_s, point=point)).value for point in range(3))
    return AdaptedSteps(
        n_layers=model.spec.n_layers,
        n_parameters=adapter.n_parameters,
        n_bytes=model.adapter_bytes(number),
        few_s=few_s,
        many_s=many_s,
        prompt_s=prompt_s,
    )


def _added_s(times_N: np.ndarray, point: int) -> float:
    return float(times_N[2 * point + 1] - times_N[2 * point])


def constants_of(
    found: Mapping[str, AdaptedSteps], flops_per_s: Mapping[str, float], bytes_per_s: Mapping[str, float]
) -> dict[str, Any]:
    """The profile's entry: seconds of a layer, and shares of the peak that low-rank products reach, by dtype and phase.

    found: by compute dtype. bytes_per_s: at which weights beside them are read.
    """
    layer_s: list[float] = []
    shares: dict[str, dict[str, float]] = {"prefill_ef": {}, "decode_ef": {}}
    for dtype, seen in found.items():
        product_s = max(seen.many_s - seen.few_s, 1e-9) / (MANY - FEW)
        base_s = max(0.0, seen.few_s - FEW * product_s - seen.n_bytes / bytes_per_s[dtype])
        layer_s.append(base_s / seen.n_layers)
        prompt_s = max(seen.prompt_s - base_s - seen.n_bytes / bytes_per_s[dtype], 1e-9) / PROMPT
        for name, row_s in (("decode_ef", product_s), ("prefill_ef", prompt_s)):
            shares[name][dtype] = min(1.0, 2.0 * seen.n_parameters / row_s / flops_per_s[dtype])
    return {"layer_s": median(layer_s)} | shares
