"""A native program around one op, for the tests of the kernels' ops: its input, its run, and how far it may be off."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import OPS, EdgeShape
from diptych.ground.formats import KV_IN_BYTES


def noise(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def quantised(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / scale) * scale


def quantised_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """torch's own E4M3, behind the scale that makes the largest the largest code."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


ROUNDED = {"int8": quantised, KV_IN_BYTES: quantised, "fp8": quantised_to_fp8}


def distances_of(shape: EdgeShape, reach: int) -> torch.Tensor:
    return noise(shape.n_heads, 2 * reach + 1, seed=5, scale=2.0)


def padded_distances(shape: EdgeShape, reach: int) -> torch.Tensor:
    """As the kernels have them: 16 and 15 more beyond either end."""
    return torch.nn.functional.pad(distances_of(shape, reach), (16, 15), mode="replicate").flatten()


def make_batch(shape: EdgeShape) -> tuple[ForwardBatch, int]:
    """Token i of the step has id i, so that an embedding table is the step's input."""
    size = shape.block_tokens
    counts = [-(-(cached + new) // size) for cached, new in shape.sequences]
    ids = np.random.default_rng(0).permutation(sum(counts) + 3)
    table = np.zeros((len(counts), max(counts)), dtype=np.int32)
    for s, count in enumerate(counts):
        table[s, :count] = ids[sum(counts[:s]) : sum(counts[: s + 1])]
    batch = ForwardBatch(
        token_ids_T=np.arange(sum(new for _, new in shape.sequences), dtype=np.int32),
        query_start_S1=np.array([0, *accumulate(new for _, new in shape.sequences)], dtype=np.int32),
        context_tokens_S=np.array([sum(pair) for pair in shape.sequences], dtype=np.int32),
        block_table_SM=table,
        logits_rows_R=np.zeros(0, dtype=np.int32),
    )
    return batch, len(ids)


class Bench:
    """A program around one op: its input comes from a table, its result is read from a buffer."""

    def __init__(self, isa: str, x: torch.Tensor, *, threads: int = 1) -> None:
        self.program = cpu._cpu.Program(isa, threads)
        self.n_tokens, self.width = x.shape
        width = self.width
        self.x = self.program.add_f32(width)
        self.program.embed(self.program.add_table(x.contiguous()), self.x, 1.0)
        head = cpu._cpu.LinearShape(format="bf16", n=1, k=width)
        self.head = self.program.add_linear(head, [torch.zeros(1, width)])
        self.norm = self.program.add_vector(torch.ones(width))

    def run(
        self, out: int, width: int, batch: ForwardBatch | None = None, kv: Any = None, *, rows: int | None = None
    ) -> torch.Tensor:
        self.program.head(
            x=self.x, norm=self.norm, eps=1e-6, rows=self.program.add_rows("bf16", self.width), weight=self.head
        )
        batch = batch or make_batch(EdgeShape(name="", sequences=((0, self.n_tokens),)))[0]
        if kv is None:
            kv = cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=64, block_tokens=16, format="bf16")
            self._attend_for_form()
        self.program.run(
            batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, batch.logits_rows_R,
            kv, torch.empty(0, 1), both_ways=batch.both_ways_S, second=batch.second_S,
        )  # fmt: skip
        result = torch.empty(self.n_tokens, width)
        self.program.read_buffer(out, result)
        return result

    def _attend_for_form(self) -> None:
        """A program is checked against the cache's shape, so it needs an attention; this one is over zeros."""
        shape = cpu._cpu.AttentionShape(n_heads=1, n_kv_heads=1, head_dim=2, scale=1.0)
        self.program.attention(q=self.program.add_bf16(2), out=self.program.add_f32(2), layer=0, shape=shape)


def check(name: str, got: torch.Tensor, expected: torch.Tensor, *, tolerance: float | None = None) -> None:
    assert got.shape == expected.shape
    error = (got - expected).abs().max().item()
    assert error <= (tolerance or OPS[name].tolerance_bf16), f"{name} differs by {error}"
