"""What is done row by row: norms, and what comes of q, k and v before attention.

Legend: M rows; T tokens, H query heads, K kv heads, d head dim, dv that of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.compute.ops.gpu.launch import launch, power_of_two


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, D, eps, BLOCK: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    y = x * scale
    if w_ptr is not None:
        y *= tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + row * D + d, y.to(y_ptr.dtype.element_ty), mask=d < D)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight [M, D], weight fp32 [D], if any."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if len(x):
        block = power_of_two(x.shape[1])
        warps = min(16, max(1, block // 256))
        launch(_norm, (len(x), 1, 1), (x, weight, y), (x.shape[1], eps), {"BLOCK": block}, num_warps=warps)
    return y


@triton.jit
def _rotate(
    qkv_ptr, q_ptr, k_ptr, v_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, qkv_stride, eps, v_scale,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    IS_TURNED: tl.constexpr,
):  # fmt: skip
    t, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    is_value = head >= H + K
    is_in = d < tl.where(is_value, DV, D)
    row_ptr = qkv_ptr + t * qkv_stride + head * D
    if is_value:
        row_ptr += (head - H - K) * (DV - D)
    x = tl.load(row_ptr + d, mask=is_in, other=0.0).to(tl.float32)
    if head < H + K:  # a query or a key
        other = tl.where(d < HALF, d + HALF, d - HALF)
        is_turned = d < 2 * HALF
        beside = tl.load(row_ptr + other, mask=is_turned, other=0.0).to(tl.float32)
        if q_norm_ptr is not None and not IS_TURNED:
            norm_ptr = q_norm_ptr if head < H else k_norm_ptr
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = x * scale * tl.load(norm_ptr + d, mask=is_in, other=0.0)
            beside = beside * scale * tl.load(norm_ptr + other, mask=is_turned, other=0.0)
        if HALF > 0:
            at = t * HALF + tl.where(d < HALF, d, d - HALF)
            cos = tl.load(cos_ptr + at, mask=is_turned, other=1.0)
            sin = tl.load(sin_ptr + at, mask=is_turned, other=0.0)
            x = x * cos + tl.where(d < HALF, -beside, beside) * sin
        if q_norm_ptr is not None and IS_TURNED:
            norm_ptr = q_norm_ptr if head < H else k_norm_ptr
            scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
            x = x * scale * tl.load(norm_ptr + d, mask=is_in, other=0.0)
    if head < H:
        tl.store(q_ptr + (t * H + head) * D + d, x.to(q_ptr.dtype.element_ty), mask=is_in)
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        is_in = is_in & (slot + d >= d)  # a block, as every mask
        if head < H + K:
            tl.store(k_ptr + (slot * K + head - H) * D + d, x.to(k_ptr.dtype.element_ty), mask=is_in)
        else:
            tl.store(v_ptr + (slot * K + head - H - K) * DV + d, (x * v_scale).to(v_ptr.dtype.element_ty), mask=is_in)


def rotate_and_cache(
    qkv: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    n_heads: int,
    head_dim: int,
    owns_kv: bool,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    is_turned_first: bool,
    eps: float,
    v_scale: float,
) -> torch.Tensor:
    """q [T, H, d]; k and v of qkv [T, (H + K) d + K dv] go to their slots of keys [slots, K, d] and values [slots, K, dv].

    slots [T]: below 0 nothing is written. turn: cos and sin [T, turned / 2] fp32. norms: weights [d] fp32 of q and k, applied
    before they are turned, or behind. v_scale: values are multiplied by it.
    """
    n_kv_heads, value_dim = values.shape[1:]
    q = torch.empty((len(qkv), n_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    cos, sin = turn or (None, None)
    q_norm, k_norm = norms or (None, None)
    launch(
        _rotate,
        (len(qkv), n_heads + (2 * n_kv_heads if owns_kv else 0), 1),
        (qkv, q, keys, values, slots, cos, sin, q_norm, k_norm),
        (qkv.stride(0), eps, v_scale),
        {
            "H": n_heads,
            "K": n_kv_heads,
            "D": head_dim,
            "DV": value_dim,
            "DP": power_of_two(max(head_dim, value_dim)),
            "HALF": 0 if cos is None else cos.shape[-1],
            "IS_TURNED": is_turned_first,
        },
        num_warps=1,
    )
    return q
