"""The gated delta rule on the torch backend: states that move on with the tokens of a step, chunk by chunk.

Within a chunk of n tokens the rule is a triangular system (arXiv:2412.06464, section 3.3): with G the running sum of log decays
and D = exp(G_i - G_j) below the diagonal, u solves (1 + beta (k k^T) D) u = beta (v - exp(G) k S), the outputs are
exp(G) q S + (q k^T) D u, and the state becomes exp(G_n) S + (exp(G_n - G) k)^T u.

Legend: B sequences, n tokens of each, C channels of q, k and v, H value heads, K key heads, d key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchStates
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.torch_loader import TorchAttention, TorchDelta

CHUNK_TOKENS = 64
LEAST_SQUARE = 1e-6  # in the root of a query's and a key's length


def move_states(
    qkv_TC: torch.Tensor, rates_T2H: torch.Tensor, attention: TorchAttention, states: TorchStates, batch: ForwardBatch
) -> torch.Tensor:
    """a [T, H v], as `Ops.delta` promises."""
    spec, delta = attention.spec, attention.delta
    assert delta is not None
    assert spec.delta is not None
    out = torch.empty((len(qkv_TC), spec.delta.width), dtype=qkv_TC.dtype, device=qkv_TC.device)
    for sequences, pieces in _groups(batch):
        assert batch.states is not None
        matrices, tails = states.read([int(batch.states.reads_S[s]) for s in sequences])
        for rows, places in pieces:
            x_BnC, rates_Bn2H = (one[rows].unflatten(0, (len(sequences), -1)).float() for one in (qkv_TC, rates_T2H))
            a, matrices, tails = _advance(x_BnC, rates_Bn2H, matrices, tails, delta, spec)
            out[rows] = (
                F.rms_norm(a, a.shape[-1:], delta.norm.weight, spec.norm_eps).flatten(2).flatten(0, 1).to(out.dtype)
            )
            for place in places:
                states.write([place], matrices, tails)
        states.write([int(batch.states.writes_S[s]) for s in sequences], matrices, tails)
    return out


Piece = tuple[slice | list[int], list[int]]  # rows of the step, and places where the state behind them is left, too


def _groups(batch: ForwardBatch) -> Iterator[tuple[list[int], list[Piece]]]:
    """Sequences that move on together: all of one row that leave no state elsewhere; others alone, cut where they do."""
    assert batch.states is not None, "a step of a model with states names their places"
    starts = batch.query_start_S1.tolist()
    saves: dict[int, dict[int, list[int]]] = {}
    for s, rows, place in batch.states.saves_N3.tolist():
        saves.setdefault(s, {}).setdefault(rows, []).append(place)
    single = [s for s, (begin, end) in enumerate(pairwise(starts)) if end - begin == 1 and s not in saves]
    if single:
        yield single, [([starts[s] for s in single], [])]
    alone = set(range(len(starts) - 1)) - set(single)
    for s in sorted(alone):
        begin, end = starts[s], starts[s + 1]
        cuts = sorted({0, *saves.get(s, {}), end - begin})
        yield [s], [(slice(begin + a, begin + b), saves.get(s, {}).get(b, [])) for a, b in pairwise(cuts)]


def _advance(
    x_BnC: torch.Tensor,
    rates_Bn2H: torch.Tensor,
    matrices: torch.Tensor,
    tails: torch.Tensor,
    delta: TorchDelta,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [B, n, H, v], the matrices and the tails behind n tokens."""
    form = spec.delta
    assert form is not None
    seen = torch.cat([tails, x_BnC], dim=1)
    mixed = F.conv1d(seen.transpose(1, 2), delta.taps[:, None], groups=form.n_channels).transpose(1, 2)
    keys = form.n_key_heads * form.key_dim
    q, k, v = F.silu(mixed).split((keys, keys, form.width), dim=-1)
    group = form.n_value_heads // form.n_key_heads
    q, k = (
        _unit(x.unflatten(-1, (form.n_key_heads, -1))).repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k)
    )
    v = v.unflatten(-1, (form.n_value_heads, -1)).transpose(1, 2)
    of_beta, of_decay = rates_Bn2H.transpose(1, 2).chunk(2, dim=1)
    beta, log_decay = of_beta.sigmoid(), -delta.decay[:, None] * F.softplus(of_decay + delta.shift[:, None])
    outputs = []
    whole = (q * spec.scale, k, v, beta, log_decay)
    for begin in range(0, q.shape[2], CHUNK_TOKENS):
        of_q, of_k, of_v, betas, decays = (x[:, :, begin : begin + CHUNK_TOKENS] for x in whole)
        a, matrices = _chunk(of_q, of_k, of_v, betas, decays, matrices)
        outputs.append(a)
    return torch.cat(outputs, dim=2).transpose(1, 2), matrices, seen[:, x_BnC.shape[1] :]


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LEAST_SQUARE)


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, H, n, v] and the state behind; q, k [B, H, n, d], v [B, H, n, v], beta and log_decay [B, H, n]."""
    total, beta = log_decay.cumsum(dim=-1), beta[..., None]
    so_far = total.exp()[..., None]
    between = (total[..., :, None] - total[..., None, :]).exp().tril()
    system = (beta * (k @ k.transpose(-1, -2)) * between).tril(-1)
    given = beta * (v - so_far * (k @ state))
    u = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    a = so_far * (q @ state) + ((q @ k.transpose(-1, -2)) * between).tril() @ u
    left = (total[..., -1:] - total).exp()[..., None]
    return a, so_far[..., -1:, :] * state + (left * k).transpose(-1, -2) @ u
