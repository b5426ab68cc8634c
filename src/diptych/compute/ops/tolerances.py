"""What tests hold a backend's ops to: how far each may be from the reference, and the batches that attention is tested on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContract:
    """What tests hold a backend to. Tolerances are absolute errors against the reference on inputs of order one."""

    name: str
    inputs: str
    output: str
    writes: str
    tolerance_fp32: float
    tolerance_bf16: float

    def tolerance(self, dtype: torch.dtype) -> float:
        """The largest absolute error allowed when the backend computes in `dtype`."""
        return self.tolerance_fp32 if dtype == torch.float32 else self.tolerance_bf16


# Rows whose sequence has an adapter (`ForwardBatch.adapters_S`) get W + s B A in `linear`, `linear_gate` and `linear_add`: the
# low-rank part comes of the same h, behind the bias and before activation and sum, to its own outputs (`reference.adapted`).
# bf16 keeps 8 bits: one rounding of a value of order one is 2^-9; sums of products of order one round once more.
OPS: dict[str, OpContract] = {
    op.name: op
    for op in (
        OpContract(name="embed", inputs="table [V,D], token_ids [T] i32, types [n,D], positions [P,D]", output="x [T,D]",
                   writes="", tolerance_fp32=0.0, tolerance_bf16=2e-2),
        OpContract(name="norm", inputs="x [T,D], weight [D] fp32, bias [D] fp32", output="h [T,D]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="linear", inputs="h [T,K], W [N,K], b [N]", output="y [T,N]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="by_head", inputs="h [T,HK], W [H,N,K], b [HN]", output="y [T,HN]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="linear_gate", inputs="h [T,D], W [2F,D], b [2F]", output="y [T,F]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="linear_add", inputs="h [T,K], W [N,K], b [N], x [T,N]", output="x [T,N]", writes="x",
                   tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="add", inputs="x [T,D], y [T,D]", output="x [T,D]", writes="x",
                   tolerance_fp32=1e-6, tolerance_bf16=2e-2),
        OpContract(name="add_gated", inputs="x [T,D], y [T,D], gate [T,1]", output="x [T,D]", writes="x",
                   tolerance_fp32=1e-6, tolerance_bf16=3e-2),
        OpContract(name="scale", inputs="x [T,D]", output="x [T,D]", writes="x", tolerance_fp32=1e-6, tolerance_bf16=2e-2),
        OpContract(name="bent_gate", inputs="h [T,D], W [2F,D], b [2F]", output="y [T,F]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="sparse_gate", inputs="h [T,D], W [2F,D], b [2F]", output="y [T,F]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="curve", inputs="h [T,D], W [F,D], b [F]", output="y [T,F]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="clip", inputs="y [T,N]", output="y [T,N]", writes="y", tolerance_fp32=0.0, tolerance_bf16=0.0),
        OpContract(name="gate_given", inputs="h [T,D], W [F,D], given [T,W]", output="y [T,F]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="join", inputs="a [T,N], b [T,M]", output="y [T,N+M]", writes="",
                   tolerance_fp32=0.0, tolerance_bf16=0.0),
        OpContract(name="weigh", inputs="x [T,D], weight [D] fp32", output="h [T,D]", writes="",
                   tolerance_fp32=1e-6, tolerance_bf16=2e-2),
        OpContract(name="layer_inputs", inputs="x [T,D], W [LP,D], norm [P] fp32, table [V,LP], token_ids [T] i32",
                   output="h [T,LP]", writes="", tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="branch", inputs="x [T,D]", output="x [T,D]", writes="a stream", tolerance_fp32=1e-6,
                   tolerance_bf16=2e-2),
        OpContract(name="stream", inputs="h [T,D]", output="x [T,D]", writes="a stream", tolerance_fp32=0.0,
                   tolerance_bf16=0.0),
        OpContract(name="match", inputs="y [T,D], x [T,D]", output="x [T,D]", writes="a stream", tolerance_fp32=1e-5,
                   tolerance_bf16=3e-2),
        OpContract(name="predict", inputs="xs n of [T,D], routed [T,n], W [n n,n] fp32", output="xs n of [T,D]",
                   writes="xs", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="correct", inputs="xs n of [T,D], y [T,D], routed [T,n], W [n,n] fp32", output="xs n of [T,D]",
                   writes="xs", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="connections", inputs="xs n of [T,D], W [m,n D] fp32, scale [s] fp32, base [m] fp32",
                   output="c [T,m] fp32", writes="", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="gather", inputs="xs n of [T,D], c [T,m]", output="x [T,D]", writes="a stream",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="spread", inputs="xs n of [T,D], y [T,D], c [T,m]", output="xs n of [T,D]", writes="xs",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="mingle", inputs="xs n of [T,D], y [T,D], c [T,n (n + 2)]", output="xs n of [T,D]", writes="xs",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="widen", inputs="x [T,D]", output="x [T,n D]", writes="", tolerance_fp32=0.0, tolerance_bf16=0.0),
        OpContract(name="fold", inputs="h [T,n D]", output="h [T,D]", writes="", tolerance_fp32=1e-6,
                   tolerance_bf16=2e-2),
        OpContract(name="injections", inputs="h [T,n D], W [n,n D]", output="c [T,n]", writes="", tolerance_fp32=1e-5,
                   tolerance_bf16=3e-2),
        OpContract(name="inject", inputs="x [T,n D], y [T,D], c [T,n]", output="x [T,n D]", writes="x",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="token_ids", inputs="token_ids [T] i32", output="h [T,w] fp32", writes="", tolerance_fp32=0.0,
                   tolerance_bf16=0.0),
        OpContract(name="ngrams", inputs="before [T,n] fp32, tables of [r,w], token_ids [T] i32", output="h [T,W]",
                   writes="", tolerance_fp32=0.0, tolerance_bf16=0.0),
        OpContract(name="meet_keys", inputs="keys [T,n D], queries [T,n D], values [T,D]", output="h [T,n D]",
                   writes="", tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="rotate_and_cache", inputs="qkv [T,(H+2K)d], positions [T] i32, slots [T] i32",
                   output="q [T,H,d]", writes="kv of slots", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="attention", inputs="q [T,H,d], kv paged, block_table [S,M] i32, context_tokens [S] i32",
                   output="a [T,H*d]", writes="", tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="cache_latents", inputs="kv [T,r+p], positions [T] i32, slots [T] i32", output="",
                   writes="kv of slots", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="choose", inputs="h [T,D], low [T,q], queries [ni,q], key [i,D], weights [n,D], positions [T] i32",
                   output="", writes="kv of slots", tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="absorb", inputs="q [T,H(n+p)], keys [H,r,n], positions [T] i32", output="q [T,H,r+p]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=4e-2),
        OpContract(name="expand", inputs="a [T,H(r+p)], values [H,v,r]", output="a [T,Hv]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="move_states", inputs="qkv [T,2Kd+Hv], rates [T,2H], decays [T,Hd], states [S,H,d,v], taps",
                   output="a [T,H*v]", writes="states, taps", tolerance_fp32=2e-5, tolerance_bf16=4e-2),
        OpContract(name="gate_heads", inputs="h [T,D], W [N,D], a [T,N]", output="a [T,N]", writes="a",
                   tolerance_fp32=1e-5, tolerance_bf16=3e-2),
        OpContract(name="experts", inputs="h [T,D], router [E,D], choice_bias [E], experts", output="y [T,D]", writes="",
                   tolerance_fp32=1e-5, tolerance_bf16=5e-2),
        OpContract(name="head", inputs="x [T,D], norm [D], W [V,D], logits_rows [R] i32", output="logits [R,V] fp32",
                   writes="", tolerance_fp32=2e-5, tolerance_bf16=4e-2),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeShape:
    """One batch every attention backend is tested on: (tokens already cached, new tokens) of each sequence."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int | None = None
    block_tokens: int = 16

    @property
    def value_dim(self) -> int:
        """As `AttentionSpec` has it."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


EDGE_SHAPES: tuple[EdgeShape, ...] = (
    EdgeShape(name="one token, empty cache", sequences=((0, 1),)),
    EdgeShape(name="one block exactly", sequences=((0, 16),)),
    EdgeShape(name="one block and one", sequences=((0, 17),)),
    EdgeShape(name="one block less one", sequences=((0, 15),)),
    EdgeShape(name="decode at the last slot of a block", sequences=((15, 1),)),
    EdgeShape(name="decode at the first slot of a block", sequences=((16, 1),)),
    EdgeShape(name="decode at the second slot of a block", sequences=((17, 1),)),
    EdgeShape(name="ragged decode", sequences=((1, 1), (63, 1), (16, 1), (0, 1), (300, 1))),
    EdgeShape(name="chunk after a prefix", sequences=((31, 18),)),
    EdgeShape(name="mixed step", sequences=((40, 1), (7, 1), (0, 33), (16, 16), (5, 2))),
    EdgeShape(name="multi-head", sequences=((9, 1), (0, 20)), n_heads=4, n_kv_heads=4),
    EdgeShape(name="groups of four", sequences=((9, 1), (0, 20)), n_heads=8, n_kv_heads=2),
    EdgeShape(name="groups of eight, one kv head", sequences=((9, 1), (0, 20)), n_heads=8, n_kv_heads=1),
    EdgeShape(name="odd head dim groups", sequences=((33, 3), (0, 5)), n_heads=9, n_kv_heads=3, head_dim=24),
    EdgeShape(name="narrow values", sequences=((40, 1), (7, 1), (0, 33), (5, 2)), head_dim=24, v_head_dim=10),
    EdgeShape(name="wide values", sequences=((40, 1), (0, 33)), n_heads=6, head_dim=16, v_head_dim=40),
)
