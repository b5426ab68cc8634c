"""States on the torch backend: they move on with the tokens of a step, chunk by chunk.

Within a chunk of n tokens the delta rule is a triangular system (arXiv:2412.06464, section 3.3): with G the running sum of log
decays and D = exp(G_i - G_j) below the diagonal, u solves (1 + beta (k k^T) D) u = beta (v - exp(G) k S), the outputs are
exp(G) q S + (q k^T) D u, and the state becomes exp(G_n) S + (exp(G_n - G) k)^T u. Of Mamba-2 u is step * v, of a
steady state v. Where it fades by key G has d columns, and D stands inside the sums over them. A selective state has a decay
for each of its numbers, which no such sum has in common: it moves on token by token, behind exponentials of a chunk at one
time, and so do recurrent units.

Legend: B sequences, n tokens of each, C channels of q, k and v, H value heads, K key heads, d key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.kv_store import TorchStates as States
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.contract_states import StateOps
from diptych.compute.ops.torch.loader import TorchAttention, TorchLinear, TorchRule
from diptych.models.states import StateRule, StateSpec

CHUNK_TOKENS = 64
LEAST_SQUARE = 1e-6  # in the root of a query's and a key's length


class TorchStates(StateOps[torch.Tensor, TorchLinear, TorchAttention]):
    """The part of `TorchOps` that is about them."""

    _kv: TorchKVStore
    _batch: ForwardBatch

    def move_states(
        self,
        qkv: torch.Tensor,
        rates: torch.Tensor | None,
        attention: TorchAttention,
        *,
        decays: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """a [T, H v]."""
        return move_states(
            qkv, rates, attention, self._kv.states[attention.spec.cache_layer], self._batch, decays_TD=decays
        )

    def by_head(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """y [T, H n]."""
        assert isinstance(weight.weight, torch.Tensor)
        y = torch.einsum("xhk,hnk->xhn", h.unflatten(-1, (len(weight.weight), -1)), weight.weight).flatten(1)
        return y if weight.bias is None else y + weight.bias


def move_states(
    qkv_TC: torch.Tensor,
    rates_TR: torch.Tensor | None,
    attention: TorchAttention,
    states: States,
    batch: ForwardBatch,
    *,
    decays_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """a [T, H v], as `Ops.move_states` promises."""
    spec, rule = attention.spec, attention.rule
    assert rule is not None
    assert spec.state is not None
    out = torch.empty((len(qkv_TC), spec.state.width), dtype=qkv_TC.dtype, device=qkv_TC.device)
    for sequences, pieces in groups_of(batch):
        assert batch.states is not None
        reads = [int(batch.states.reads_S[s]) for s in sequences]
        matrices, tails = states.read(reads)
        begins = torch.tensor([place < 0 for place in reads], device=qkv_TC.device)
        for rows, places in pieces:
            x_BnC = qkv_TC[rows].unflatten(0, (len(sequences), -1)).float()
            if spec.state.rule in (StateRule.TAPS, StateRule.BENT_TAPS):
                a, tails = _tap(x_BnC, tails, rule, spec.state)
            elif spec.state.rule is StateRule.CONVOLUTION:
                a, tails = _convolve(x_BnC, tails, rule, spec.state)
            elif spec.state.is_selective:
                assert rates_TR is not None
                assert decays_TD is not None
                keys, steps = (x[rows].unflatten(0, (len(sequences), -1)).float() for x in (rates_TR, decays_TD))
                a, matrices = _select(x_BnC, keys, steps, matrices, rule)
            elif spec.state.is_unit:
                assert rates_TR is not None
                gates = rates_TR[rows].unflatten(0, (len(sequences), -1)).float()
                a, matrices = _recur(x_BnC, gates, matrices, rule, begins)
                begins = torch.zeros_like(begins)
            elif rates_TR is None:
                a, matrices, tails = _advance(x_BnC, None, matrices, tails, rule, spec)
            else:
                given = rates_TR[rows] if decays_TD is None else torch.cat([rates_TR[rows], decays_TD[rows]], dim=-1)
                rates_BnR = given.unflatten(0, (len(sequences), -1)).float()
                a, matrices, tails = _advance(x_BnC, rates_BnR, matrices, tails, rule, spec)
            if rule.norm is not None:
                a = F.rms_norm(a, a.shape[-1:], rule.norm.weight, spec.norm_eps)
            out[rows] = a.flatten(2).flatten(0, 1).to(out.dtype)
            for place in places:
                states.write([place], matrices, tails)
        states.write([int(batch.states.writes_S[s]) for s in sequences], matrices, tails)
    return out


Piece = tuple[slice | list[int], list[int]]  # rows of the step, and places where the state behind them is left, too


def groups_of(batch: ForwardBatch) -> Iterator[tuple[list[int], list[Piece]]]:
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


def _taps(seen_BnC: torch.Tensor, rule: TorchRule) -> torch.Tensor:
    """[B, n - taps + 1, C]: of each channel the sums over its taps."""
    assert rule.taps is not None
    return F.conv1d(seen_BnC.transpose(1, 2), rule.taps[:, None], rule.tap_bias, groups=len(rule.taps)).transpose(1, 2)


def _convolve(
    x_BnC: torch.Tensor, tails: torch.Tensor, rule: TorchRule, form: StateSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, n, H, v], and the tails behind n tokens."""
    b, c, x = x_BnC.chunk(3, dim=-1)
    seen = torch.cat([tails, b * x], dim=1)
    return (c * _taps(seen, rule)).unflatten(-1, (form.n_value_heads, -1)), seen[:, x.shape[1] :]


def _tap(
    x_BnC: torch.Tensor, tails: torch.Tensor, rule: TorchRule, form: StateSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, n, H, v], and the tails behind n tokens."""
    seen = torch.cat([tails, x_BnC], dim=1)
    sums = _taps(seen, rule)
    sums = F.silu(sums) if form.rule is StateRule.BENT_TAPS else sums
    return sums.unflatten(-1, (form.n_value_heads, -1)), seen[:, x_BnC.shape[1] :]


def _select(
    x_BnC: torch.Tensor,
    keys_Bnd: torch.Tensor,
    steps_BnC: torch.Tensor,
    matrices: torch.Tensor,
    rule: TorchRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, n, H, v] and the matrices behind n tokens. keys: each token's key, then its query."""
    assert rule.decay is not None
    assert rule.shift is not None
    assert rule.skip is not None
    (heads, d, values), n_keys = matrices.shape[1:], keys_Bnd.shape[2] // (2 * matrices.shape[2])
    state = matrices.transpose(2, 3).flatten(1, 2).unflatten(1, (n_keys, -1))  # [B, K, C / K, d]
    step = F.softplus(steps_BnC + rule.shift)
    k, q = keys_Bnd.unflatten(-1, (n_keys, 2, d)).unbind(dim=3)
    rows = []
    for begin in range(0, x_BnC.shape[1], CHUNK_TOKENS):
        of_step, of_x, of_k, of_q = (one[:, begin : begin + CHUNK_TOKENS] for one in (step, x_BnC, k, q))
        left = torch.exp(-of_step[..., None] * rule.decay).unflatten(2, (n_keys, -1))
        news = (of_step * of_x).unflatten(2, (n_keys, -1))[..., None] * of_k[:, :, :, None]
        for t in range(of_x.shape[1]):
            state = left[:, t] * state + news[:, t]
            rows.append((state @ of_q[:, t, ..., None])[..., 0].flatten(1))
    a = torch.stack(rows, dim=1) + rule.skip * x_BnC
    return a.unflatten(-1, (heads, -1)), state.flatten(1, 2).unflatten(1, (heads, values)).transpose(2, 3)


def _recur(
    x_BnC: torch.Tensor, gates_BnG: torch.Tensor, matrices: torch.Tensor, rule: TorchRule, begins_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, n, H, v] and the units [B, H, 1, v] behind n tokens. begins_B: whether nothing came before the first."""
    assert rule.decay is not None
    state, (heads, values) = matrices[:, :, 0], matrices.shape[1::2]
    let_in, fade = torch.sigmoid(gates_BnG).unflatten(-1, (heads, 2, values)).unbind(dim=-2)
    log = -rule.decay.view(heads, values) * fade
    opened = torch.sqrt(-torch.expm1(2 * log))
    opened[:, 0] = torch.where(begins_B[:, None, None], 1.0, opened[:, 0])
    left, news, rows = log.exp(), opened * let_in * x_BnC.unflatten(-1, (heads, values)), []
    for t in range(x_BnC.shape[1]):
        state = left[:, t] * state + news[:, t]
        rows.append(state)
    return torch.stack(rows, dim=1), state[:, :, None]


def _advance(
    x_BnC: torch.Tensor,
    rates_BnR: torch.Tensor | None,
    matrices: torch.Tensor,
    tails: torch.Tensor,
    rule: TorchRule,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a [B, n, H, v], the matrices and the tails behind n tokens."""
    form = spec.state
    assert form is not None
    is_delta = form.rule is StateRule.DELTA
    seen = torch.cat([tails, x_BnC], dim=1)
    keys = form.n_key_heads * form.key_dim
    q, k, v = F.silu(seen if rule.taps is None else _taps(seen, rule)).split((keys, keys, form.width), dim=-1)
    group = form.n_value_heads // form.n_key_heads
    q, k = (x.unflatten(-1, (form.n_key_heads, -1)) for x in (q, k))
    q, k = (_unit(q) * spec.scale, _unit(k)) if is_delta else (q, k)
    q, k = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (q, k))
    v = v.unflatten(-1, (form.n_value_heads, -1)).transpose(1, 2)
    beta, log_decay = _rates(rates_BnR, rule, form, n_tokens=x_BnC.shape[1])
    outputs = []
    whole = (q, k, v, beta, log_decay)
    for begin in range(0, q.shape[2], CHUNK_TOKENS):
        of_q, of_k, of_v, betas, decays = (x[:, :, begin : begin + CHUNK_TOKENS] for x in whole)
        a, matrices = _chunk(of_q, of_k, of_v, betas, decays, matrices, is_delta=is_delta)
        outputs.append(a)
    a = torch.cat(outputs, dim=2)
    if rule.skip is not None:
        a = a + rule.skip[:, None, None] * v
    return a.transpose(1, 2), matrices, seen[:, x_BnC.shape[1] :]


def _rates(
    rates_BnR: torch.Tensor | None, rule: TorchRule, form: StateSpec, *, n_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What weighs news [B or 1, H, n], and logarithms of what is left [B or 1, H, n, 1 or d]."""
    assert rule.decay is not None
    heads = form.n_value_heads
    if rates_BnR is None:
        log_decay = -rule.decay[None, :, None, None].expand(1, heads, n_tokens, 1)
        return torch.ones_like(log_decay[..., 0]), log_decay
    assert rule.shift is not None
    is_delta, rates = form.rule is StateRule.DELTA, rates_BnR.transpose(1, 2)
    shifted = form.rate_scale * rates[:, -(form.n_decays or heads) :] + rule.shift[:, None]
    shifted = shifted.unflatten(1, (heads, -1)).transpose(2, 3)  # one for all keys, or each
    step = F.softplus(shifted)
    if not is_delta:
        step = step.clamp(*form.step_limits)
    beta = form.most_weight * rates[:, :heads].sigmoid() if is_delta else step[..., 0]
    log_decay = -rule.decay[:, None, None] * step
    if form.least_decay is not None:
        log_decay = form.least_decay * torch.sigmoid(rule.decay[:, None, None] * shifted)
    return beta, log_decay


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LEAST_SQUARE)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    state: torch.Tensor,
    *,
    is_delta: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [B, H, n, v] and the state behind; q, k [B, H, n, d], v [B, H, n, v], beta [B, H, n], log_decay [B, H, n, 1 or d]."""
    total, beta = log_decay.cumsum(dim=-2), beta[..., None]
    so_far = total.exp()
    u = beta * v
    if is_delta:
        system = (beta * _products(k, k, total)).tril(-1)
        given = u - beta * ((so_far * k) @ state)
        u = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    a = (so_far * q) @ state + _products(q, k, total) @ u
    left = (total[..., -1:, :] - total).exp()
    return a, so_far[..., -1, :, None] * state + (left * k).transpose(-1, -2) @ u


def _products(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """[B, H, n, n]: of a's row i and b's row j <= i, each product times what is left of it between them."""
    if total.shape[-1] == 1:
        between = (total - total.transpose(-1, -2)).exp()
        return ((a @ b.transpose(-1, -2)) * between).tril()
    n = a.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=a.device).triu(1)[..., None]
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    return torch.einsum("...id,...jd,...ijd->...ij", a, b, between)
