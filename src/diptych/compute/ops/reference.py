"""The plain definition of right: every op as the formula says, in fp32 or fp64, one sequence and one token at a time.

Nothing here is fast and nothing is clever; backends are tested against it (what moves states on: `reference_states`).
`attention_prefill_dense` and `attention_decode_dense` are the textbook forms of the two phases over [B, H, T, d], for study
and tests.

Legend: B batch, T tokens, S sequences, H query heads, K kv heads, d head dim, N pool blocks, P tokens per block, M table width.
"""

from __future__ import annotations

import math

import torch

from diptych.compute.batch import ForwardBatch
from diptych.compute.ops.contract import Activation, AttentionSpec, RopeSpec
from diptych.models.gates import CLAMPED, GateForm
from diptych.models.mlp import MoeSpec, Scores
from diptych.models.ngrams import NgramSpec
from diptych.models.positions import QueryScale


def attention_prefill_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a whole prompt at once: every token looks at itself and at those before it.

    q, k, v [B, H, T, d]. Returns (output [B, H, T, d], weights [B, H, T, T]); weights above the diagonal are 0.
    The mask is the lower triangle: row i may look at columns 0..i. scale: d**-0.5 unless given.
    """
    n_tokens, d = q.shape[2], q.shape[3]
    scores = q @ k.transpose(2, 3) * (d**-0.5 if scale is None else scale)
    may_look = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~may_look, float("-inf")).softmax(dim=-1)
    return weights @ v, weights


def attention_decode_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token against the cache: everything cached is in its past, so there is no mask.

    q [B, H, 1, d], k and v [B, H, T, d] with the new token's own. Returns (output [B, H, 1, d], weights [B, H, 1, T]).
    """
    d = q.shape[3]
    weights = (q @ k.transpose(2, 3) * (d**-0.5 if scale is None else scale)).softmax(dim=-1)
    return weights @ v, weights


def attention_paged(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
    related: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Each query of the batch against its sequence's blocks, one token at a time.

    q [T, H, d] · keys [N, P, K, d], values [N, P, K, dv], read · sinks [H] · distances [H, 2 reach + 1] · related: keys and
    queries [H, n_places, d], places [2 reach + 1] (`RelatedParts`).
    Returns [T, H, dv] fp32.
    """
    block_tokens = keys.shape[1]
    group = spec.n_heads // spec.n_kv_heads
    out = torch.zeros((*q.shape[:2], values.shape[-1]), dtype=torch.float32)
    for s in range(batch.n_sequences):
        for t in range(int(batch.query_start_S1[s]), int(batch.query_start_S1[s + 1])):
            position = int(batch.positions_T[t])
            seen = _seen(position, spec, int(batch.context_tokens_S[s]) if _is_both_ways(batch, s) else None)
            blocks = [int(batch.block_table_SM[s, p // block_tokens]) for p in seen]
            offsets = [p % block_tokens for p in seen]
            k, v = (one[blocks, offsets].float().repeat_interleave(group, dim=1) for one in (keys, values))  # [n, H, d]
            query, away = q[t].float(), torch.tensor([p - position for p in seen])
            scores = torch.einsum("nhd,hd->hn", k, query) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.slopes:
                scores = scores + torch.tensor(spec.slopes)[:, None] * away
            if spec.distances is not None:
                assert distances is not None
                reach = spec.distances.reach
                scores = scores + distances[:, away.clamp(-reach, reach) + reach]
            if related is not None:
                reach = len(related[2]) // 2
                rows = related[2][(-away).clamp(-reach, reach) + reach].long()
                keys_h, queries_h = (one.float()[:, rows] for one in related[:2])  # [H, n, d]
                scores = scores + torch.einsum("hnd,hd->hn", keys_h, query) + torch.einsum("hnd,nhd->hn", queries_h, k)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None]], dim=1)
            out[t] = torch.einsum("hn,nhd->hd", scores.softmax(dim=-1)[:, : len(v)], v)
    return out


def _is_both_ways(batch: ForwardBatch, s: int) -> bool:
    return batch.both_ways_S is not None and bool(batch.both_ways_S[s])


def _seen(position: int, spec: AttentionSpec, whole: int | None) -> range:
    """The positions that a query attends to. whole: tokens of its sequence where it attends both ways, else None."""
    if whole is None:
        return range(max(0, spec.first_seen(position)), position + 1)
    if spec.window is None:
        return range(whole)
    return range(max(0, position - spec.window), min(whole, position + spec.window + 1))


def latent_attention(
    q: torch.Tensor, latents: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """One sequence's latent attention in its expanded form: every head's own keys and values are made of the latents.

    q [T, H, n + p], latents [T, r + p], last p turned · keys [H, r, n], values [H, v, r]. Returns [T, H v] fp32.
    """
    rank = keys.shape[1]
    c_Tr, k_Tp = latents[:, :rank].float(), latents[:, rank:].float()
    out = []
    for h in range(q.shape[1]):
        k = torch.cat([c_Tr @ keys[h].float(), k_Tp], dim=-1)
        v = c_Tr @ values[h].float().T
        out.append(attention_prefill_dense(*(x[None, None] for x in (q[:, h].float(), k, v)), scale=scale)[0][0, 0])
    return torch.cat(out, dim=-1)


def choose(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, *, most: int) -> list[list[int]]:
    """The positions that each token of one sequence attends to, ascending: those of the highest scores, the lower of equals.

    q [T, n, d] and keys [T, d], both turned, weights [T, n].
    """
    chosen = []
    for t in range(len(q)):
        scores = [
            float(sum(weights[t, n] * max(float(q[t, n] @ keys[p]), 0.0) for n in range(q.shape[1])))
            for p in range(t + 1)
        ]
        chosen.append(sorted(sorted(range(t + 1), key=lambda p: -scores[p])[:most]))
    return chosen


def pool_keys(k: torch.Tensor, gates: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What each whole pool of one sequence's keys [T, d] is together, [T // pool, d] fp32; gates [T, d], offsets [pool, d]."""
    pool, found = len(offsets), []
    for begin in range(0, len(k) - pool + 1, pool):
        weights = torch.softmax(gates[begin : begin + pool].float() + offsets, dim=0)
        found.append((weights * k[begin : begin + pool].float()).sum(dim=0))
    return torch.stack(found) if found else torch.zeros(0, k.shape[1])


def entries(series: torch.Tensor, gates: torch.Tensor, offsets: torch.Tensor, *, tokens: int) -> torch.Tensor:
    """[whole entries, d] of a sequence, fp32: series and gates [T, n, d], offsets [tokens, n, d]."""
    made = []
    for begin in range(0, len(series) // tokens * tokens, tokens):
        own = [(begin + t, t, -1) for t in range(tokens)]
        if series.shape[1] == 2 and begin:
            own += [(begin - tokens + t, t, 0) for t in range(tokens)]
        weights = torch.stack([gates[at, i].float() + offsets[t, i] for at, t, i in own]).softmax(dim=0)
        made.append((weights * torch.stack([series[at, i].float() for at, _, i in own])).sum(dim=0))
    return torch.stack(made) if made else series.new_zeros((0, series.shape[-1]))


def choose_pools(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, *, pool: int, n_pools: int
) -> list[list[int]]:
    """As `choose`, of whole pools by their keys [T // pool, d], and all positions behind the last whole one."""
    chosen = []
    for t in range(len(q)):
        n_whole = (t + 1) // pool
        scores = [
            float(sum(weights[t, n] * max(float(q[t, n] @ keys[p]), 0.0) for n in range(q.shape[1])))
            for p in range(n_whole)
        ]
        best = sorted(sorted(range(n_whole), key=lambda p: -scores[p])[:n_pools])
        chosen.append([p * pool + i for p in best for i in range(pool)] + list(range(n_whole * pool, t + 1)))
    return chosen


def gate_heads(a: torch.Tensor, given: torch.Tensor, activation: Activation) -> torch.Tensor:
    """A [T, N] times act of what a projection gave of the same size, fp32."""
    return a.float() * curve(given, activation)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """X / sqrt(mean(x^2) + eps) * weight over the last axis, fp32."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float) -> torch.Tensor:
    """(X - mean) / sqrt(variance + eps) * weight + bias over the last axis, fp32."""
    x = x.float()
    x = x - x.mean(dim=-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()
    return y if bias is None else y + bias.float()


def linear(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """H W^T + b, fp32. h [T, K], weight [N, K], bias [N]."""
    y = h.float() @ weight.float().T
    return y if bias is None else y + bias.float()


def adapted(y: torch.Tensor, h: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, begin: int) -> torch.Tensor:
    """Y [T, N] with what an adapter adds to outputs [begin, begin + n): (h A^T) B^T, fp32. a [r, K], b [n, r], scaled."""
    y = y.float().clone()
    y[:, begin : begin + len(b)] += linear(linear(h, a), b)
    return y


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate) * up for gate_up [T, 2F] with gate first, fp32."""
    half = gate_up.shape[-1] // 2
    g, up = gate_up[..., :half].float(), gate_up[..., half:].float()
    return bent_gate(gate_up, CLAMPED) if activation is Activation.CLAMPED else curve(g, activation) * up


def bent_gate(gate_up: torch.Tensor, form: GateForm) -> torch.Tensor:
    """As `GateForm` says, for gate_up [T, 2F] with gate first, fp32."""
    g, up = gate_up.float().chunk(2, dim=-1)
    if form.curve is not None:
        return curve(g, form.curve) * up
    g, up = g.clamp(max=form.limit), up.clamp(-form.most_up, form.most_up)
    return (g / (1 + torch.exp(-form.alpha * g))).clamp(max=form.bound) * (up + form.shift)


def curve(x: torch.Tensor, activation: Activation, numbers: tuple[float, ...] = ()) -> torch.Tensor:
    """act(x), fp32. numbers: of XIELU, as `Activation` has them."""
    x = x.float()
    if activation is Activation.XIELU:
        above, below, slope, least = numbers
        return slope * x + torch.where(x > 0, above * x**2, below * (torch.expm1(x.clamp(max=least)) - x))
    if activation in (Activation.RELU, Activation.SQUARED_RELU):
        return x.clamp(min=0) ** (2 if activation is Activation.SQUARED_RELU else 1)
    if activation is Activation.SIGMOID:
        return 1 / (1 + torch.exp(-x))
    if activation is Activation.SOFTPLUS:
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
    if activation is Activation.SILU:
        return x / (1 + torch.exp(-x))
    if activation is Activation.GELU:
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def sparse_gate(gate_up: torch.Tensor, activation: Activation, cutoff: float) -> torch.Tensor:
    """act(max(gate - (mean + cutoff * deviation), 0)) * up for gate_up [T, 2F] with gate first, fp32."""
    g, up = gate_up.float().chunk(2, dim=-1)
    mean = g.mean(dim=-1, keepdim=True)
    deviation = ((g - mean) ** 2).mean(dim=-1, keepdim=True).sqrt()
    left = torch.clamp(g - (mean + cutoff * deviation), min=0)
    return gate(torch.cat([left, up], dim=-1), activation)


def layer_inputs(
    of_stream: torch.Tensor,
    norm: torch.Tensor,
    rows: torch.Tensor,
    *,
    eps: float,
    table_scale: float,
    scale: float,
) -> torch.Tensor:
    """Scale * (norm of each layer's part + table_scale * rows), both [T, L P], norm [P], fp32."""
    parts = [rms_norm(part, norm, eps=eps) for part in of_stream.split(len(norm), dim=-1)]
    return scale * (torch.cat(parts, dim=-1) + table_scale * rows.float())


def match(y: torch.Tensor, x: torch.Tensor, *, least: float) -> torch.Tensor:
    """Y as large as x, both [T, D], fp32."""
    wanted, found = ((one.float() ** 2).mean(dim=-1, keepdim=True) for one in (x, y))
    return y.float() * torch.sqrt(wanted) / torch.sqrt(found.clamp(min=least))


def predict(xs: list[torch.Tensor], routed: torch.Tensor, weight: torch.Tensor, *, scale: float) -> list[torch.Tensor]:
    """Each of n streams [T, D] plus all of them times its n coefficients, fp32. routed [T, n], weight [n n, n]."""
    coefficients = linear(torch.tanh(scale * routed.float()), weight)
    return [
        x.float() + sum(coefficients[:, i * len(xs) + j, None] * other.float() for j, other in enumerate(xs))
        for i, x in enumerate(xs)
    ]


def correct(
    xs: list[torch.Tensor],
    y: torch.Tensor,
    routed: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: float,
    active: int,
) -> list[torch.Tensor]:
    """Each of n streams [T, D] plus what y has beyond the active one, times its coefficient, fp32. weight [n, n]."""
    coefficients = linear(torch.tanh(scale * routed.float()), weight) + 1
    return [x.float() + coefficients[:, i, None] * (y - xs[active]).float() for i, x in enumerate(xs)]


def connections(
    xs: list[torch.Tensor], weight: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, *, eps: float
) -> torch.Tensor:
    """[T, m] of all n streams [T, D] side by side, fp32: weight [m, n D], base [m], a scale for each n outputs."""
    x = torch.cat(xs, dim=-1).float()
    scales = torch.stack([scale[min(i // len(xs), len(scale) - 1)] for i in range(len(base))])
    return scales * linear(x, weight) / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) + base


def gather(xs: list[torch.Tensor], c: torch.Tensor, *, eps: float) -> torch.Tensor:
    """The streams' sum [T, D], each times a sigmoid of its own, fp32."""
    total = torch.zeros_like(xs[0], dtype=torch.float32)
    for i, x in enumerate(xs):
        total = total + (torch.sigmoid(c[:, i, None]) + eps) * x.float()
    return total


def spread(
    xs: list[torch.Tensor], y: torch.Tensor, c: torch.Tensor, *, magnitude: float, eps: float
) -> list[torch.Tensor]:
    """Each of n streams plus y times a sigmoid of its own, fp32."""
    n = len(xs)
    return [x.float() + (magnitude * torch.sigmoid(c[:, n + i, None]) + eps) * y.float() for i, x in enumerate(xs)]


def mingle(
    xs: list[torch.Tensor], y: torch.Tensor, c: torch.Tensor, *, magnitude: float, rounds: int, eps: float
) -> list[torch.Tensor]:
    """Each of n streams becomes a sum of all, by a matrix of nearly doubly stochastic numbers, and y times a sigmoid, fp32."""
    n, out = len(xs), [torch.zeros_like(x, dtype=torch.float32) for x in xs]
    for t in range(len(y)):
        m = torch.softmax(c[t, 2 * n :].float().view(n, n), dim=1) + eps
        m = m / (m.sum(dim=0) + eps)
        for _ in range(rounds - 1):
            m = m / (m.sum(dim=1, keepdim=True) + eps)
            m = m / (m.sum(dim=0) + eps)
        for i in range(n):
            out[i][t] = magnitude * torch.sigmoid(c[t, n + i]) * y[t].float()
            for j in range(n):
                out[i][t] += m[j, i] * xs[j][t].float()
    return out


def fold(x: torch.Tensor, weights: tuple[float, ...]) -> torch.Tensor:
    """The sum [T, D] of streams in one row by these weights, fp32."""
    parts = x.float().chunk(len(weights), dim=-1)
    return torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(dim=0)


def inject(x: torch.Tensor, y: torch.Tensor, c: torch.Tensor, *, magnitude: float, scale: float) -> torch.Tensor:
    """Each of the streams in a row plus y times a sigmoid of its own, fp32."""
    parts = x.float().chunk(c.shape[1], dim=-1)
    gates = magnitude * torch.sigmoid(scale * c)
    return torch.cat([part + gates[:, i, None] * y.float() for i, part in enumerate(parts)], dim=-1)


def meet_keys(keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values [T, D] for each stream in a row of keys and queries, gated by what those have in common, fp32."""
    width, parts = values.shape[1], []
    for key, query in zip(keys.float().split(width, dim=-1), queries.float().split(width, dim=-1), strict=True):
        met = (key * query).sum(dim=-1, keepdim=True) / width**0.5
        root = torch.sqrt(torch.clamp(torch.abs(met), min=1e-6))
        parts.append(torch.sigmoid(root * torch.sign(met)) * values.float())
    return torch.cat(parts, dim=-1)


def ngrams(token_ids: list[int], tables: list[torch.Tensor], spec: NgramSpec, place: int) -> torch.Tensor:
    """[T, width] fp32 of one sequence from its beginning: each head's row, by what is hashed token by token."""
    table, factors, rows = torch.cat(tables).float(), spec.factors(place), []
    for t in range(len(token_ids)):
        seen = []  # the token itself and those before it, up to the end of another text
        for back in range(spec.longest):
            has_ended = spec.end in token_ids[max(t - back, 0) : t] or t < back
            seen.append(spec.end if has_ended else token_ids[t - back])
        found = []
        for head, (size, first) in enumerate(spec.heads(place)):
            mixed = 0
            for token, factor in list(zip(seen, factors, strict=True))[: head // spec.n_heads + 2]:
                mixed ^= token * factor
            found.append(table[mixed % size + first])
        rows.append(torch.cat(found))
    return torch.stack(rows)


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """X [T, heads, d] with dimensions i and i + rotary_dim/2 turned by position * inv_freq[i], fp32."""
    x = x.float()
    cos, sin = (torch.from_numpy(table) for table in rope.tables(int(positions.max()) + 1))
    out = x.clone()
    half = rope.rotary_dim // 2
    for t, position in enumerate(positions.tolist()):
        first, second = x[t, :, :half], x[t, :, half : 2 * half]
        out[t, :, :half] = first * cos[position] - second * sin[position]
        out[t, :, half : 2 * half] = second * cos[position] + first * sin[position]
    return out


def query_scales(positions: torch.Tensor, scale: QueryScale) -> torch.Tensor:
    """What queries at these positions [T] are multiplied by, fp32."""
    steps = [(int(position) + scale.shift) // scale.tokens for position in positions]
    return 1 + scale.slope * torch.log(torch.tensor([1.0 + n for n in steps]))


def head_scales(positions: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What queries at these positions [T] are multiplied by, [T, H] fp32, by the numbers [2 H] of their heads."""
    slopes, offsets = scales.float().chunk(2)
    return torch.log(positions.float() + 1.0)[:, None] * slopes + offsets


def experts(
    h: torch.Tensor,
    router: torch.Tensor,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    spec: MoeSpec,
    choice_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's best experts [T, D], fp32. gate_up[e] [2F, D], without a gate [F, D]; down[e] [D, F],
    choice_bias [E].
    """
    out = torch.zeros(h.shape, dtype=torch.float32)
    for t in range(len(h)):
        for e, weight in route(linear(h[t : t + 1], router)[0], spec, choice_bias).items():
            if e >= spec.n_experts:
                out[t] += weight * h[t].float()
                continue
            before, after = (weight, 1.0) if spec.weighs_input else (1.0, weight)
            inner = linear(before * h[t : t + 1], gate_up[e])
            if not spec.is_gated:
                inner = curve(inner, spec.activation)
            else:
                inner = gate(inner, spec.activation) if spec.form is None else bent_gate(inner, spec.form)
            out[t] += after * linear(inner, down[e])[0]
    return out


def route(logits: torch.Tensor, spec: MoeSpec, choice_bias: torch.Tensor | None = None) -> dict[int, float]:
    """One token's experts and their weights, from the router's logits [E]."""
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    if spec.scores is Scores.SPARSEMIXER:
        left, weights = dict(enumerate(logits.tolist())), {}
        for _ in range(spec.experts_per_token):
            best = max(left, key=lambda e: left[e])
            near = [s for s in left.values() if left[best] - s <= spec.margin * max(abs(s), left[best])]
            weights[best] = spec.routed_scale / sum(math.exp(s - left[best]) for s in near)
            del left[best]
        return weights
    scores = (logits.softmax(dim=-1) if spec.scores is Scores.SOFTMAX else logits.sigmoid()).tolist()
    chosen_by = logits.tolist() if spec.scores is Scores.LATE_SIGMOID else scores
    choice = [score + (0.0 if choice_bias is None else float(choice_bias[e])) for e, score in enumerate(chosen_by)]
    size = spec.n_scored // spec.n_groups

    def worth(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size], reverse=True)[: spec.group_best])

    groups = sorted(range(spec.n_groups), key=lambda group: -worth(group))[: spec.groups_per_token]
    allowed = [e for e in range(spec.n_scored) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: spec.experts_per_token]
    total = sum(scores[e] for e in chosen) if spec.renormalises else 1.0
    return {e: spec.routed_scale * scores[e] / total for e in chosen}


def head(
    x: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, *, rows: list[int], eps: float, softcap: float | None
) -> torch.Tensor:
    """Logits [R, V] fp32 of the given rows of x [T, D]."""
    logits = linear(rms_norm(x[rows], norm, eps=eps), weight)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
