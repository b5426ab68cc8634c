"""The torch backend: the op vocabulary executed eagerly on any device torch has. Reference on a CPU, path to a GPU.

Legend: T packed tokens, S sequences, C context tokens gathered, H query heads, K kv heads, G = H / K, d head dim, P tokens
per block, M block table width, R logits rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from diptych.compute.adapters import LowRank
from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops.contract import Activation, AttentionSpec, Ops, QkNorm, RopeSpec, Taps, refuse_logits
from diptych.compute.ops.torch.curves import activated, bent, xielu
from diptych.compute.ops.torch.device_codes import Weight
from diptych.compute.ops.torch.index import TorchIndexOps
from diptych.compute.ops.torch.loader import TorchAttention, TorchExperts, TorchLinear, TorchNorm
from diptych.compute.ops.torch.queries import QueryGroups, gained_by_contents, gained_by_distance
from diptych.compute.ops.torch.routing import route
from diptych.compute.ops.torch.states import TorchStates
from diptych.compute.ops.torch.step_numbers import StepNumbers
from diptych.compute.ops.torch.streams import TorchStreams
from diptych.compute.sites import Site
from diptych.models.gates import CLAMPED, GateForm
from diptych.models.positions import QueryScale

# what an adapter adds, by id of the projection's handle; A and B on the device in the compute dtype
TorchAdapter = Mapping[int, Sequence[tuple[Site, LowRank]]]


@cache  # for good: recorded steps read them where they lie
def _inv_freq(rope: RopeSpec, device: torch.device) -> torch.Tensor:
    return torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)


class TorchOps(
    TorchStates,
    TorchStreams,
    TorchIndexOps,
    Ops[torch.Tensor, torch.Tensor, torch.Tensor, TorchNorm, TorchLinear, TorchAttention, TorchExperts],
):
    """The ops of one step: made for a batch and a cache, used once. Index tensors are made when first needed."""

    def __init__(
        self,
        batch: ForwardBatch,
        kv: TorchKVStore,
        *,
        device: torch.device,
        dtype: torch.dtype,
        wants_hidden: bool = False,
        given: torch.Tensor | None = None,
        taps: Taps | None = None,
        adapters: Mapping[int, TorchAdapter] | None = None,
        numbers: StepNumbers | None = None,
    ) -> None:
        self._wants_hidden = wants_hidden
        self._given = given
        self._wanted = () if taps is None else taps.numbers
        self.tapped: dict[int, torch.Tensor] = {}
        self._batch = batch
        self._kv = kv
        self._device = device
        self._dtype = dtype
        numbers = numbers or StepNumbers.of(batch, kv.block_tokens, device)
        self._token_ids = numbers.token_ids_T
        self._positions = numbers.positions_T
        self._slots = numbers.slots_T
        self._logits_rows = numbers.logits_rows_R
        self._table = numbers.table_SM
        self._rotations: dict[tuple[RopeSpec, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._queries = QueryGroups(batch, numbers.table_SM, kv.block_tokens, device)
        self._chosen: torch.Tensor | None = None  # [T, 1 or K, C] bool, of the last choice; None: all
        self._adapted = [] if batch.adapters_S is None else self._rows_of_adapters(batch.adapters_S, adapters or {})

    def embed(
        self,
        table: torch.Tensor,
        *,
        scale: float,
        positions: torch.Tensor | None = None,
        first_position: int = 0,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, D]. The scale is rounded to the compute dtype first, as the models were trained."""
        x = table[self._token_ids]
        if scale != 1.0:
            x = x * torch.tensor(scale, dtype=self._dtype).item()
        if types is not None:
            second = self._batch.second_S
            x = x + (types[0] if second is None else types[self._on_device(self._batch.types_T)])
        return x if positions is None else x + positions[first_position + self._positions]

    def input(self, width: int) -> torch.Tensor:
        """x [T, width], on the device in the compute dtype."""
        assert self._given is not None, "the walk takes an input, and the step has none"
        assert self._given.shape[1] == width, (self._given.shape, width)
        return self._given.to(device=self._device, dtype=self._dtype)

    def tap(self, x: torch.Tensor, number: int) -> None:
        """Kept where the step asks for it."""
        if number in self._wanted:
            self.tapped[number] = x.float()

    def start(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """x [T, N]."""
        return self.linear(h, weight)

    def norm(self, x: torch.Tensor, weight: TorchNorm, *, eps: float, parts: int = 1) -> torch.Tensor:
        """h [T, D]."""
        shape = weight.weight.shape
        if parts > 1:
            by_part = F.rms_norm(x.float().unflatten(-1, (parts, -1)), (shape[0] // parts,), eps=eps)
            return (by_part.flatten(-2) * weight.weight).to(x.dtype)
        if weight.is_centred:
            return F.layer_norm(x.float(), shape, weight.weight, weight.bias, eps).to(x.dtype)
        h = F.rms_norm(x.float(), shape, weight.weight, eps)
        return (h if weight.bias is None else h + weight.bias).to(x.dtype)

    def linear(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """y [T, N]."""
        return self._product(h, weight, None)

    def _product(self, h: torch.Tensor, weight: TorchLinear, tokens: torch.Tensor | None) -> torch.Tensor:
        """y [len(h), N]. tokens: of the step, which the rows of h are; None: all in their order."""
        y = self._multiply(h, weight.weight, weight.bias)
        for of_adapter, adapter in self._adapted:
            sites = adapter.get(id(weight), ())
            rows = of_adapter if tokens is None or not sites else torch.isin(tokens, of_adapter).nonzero()[:, 0]
            for site, low_rank in sites:
                y[rows, site.begin : site.end] += self._multiply(
                    self._multiply(h[rows], low_rank.a, None), low_rank.b, None
                )
        return y

    def _multiply(self, h: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor), "codes are loaded for ops that multiply by them"
        return F.linear(h, weight, bias)

    def linear_gate(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """y [T, F]."""
        return self._gated(h, weight, None)

    def _gated(self, h: torch.Tensor, weight: TorchLinear, tokens: torch.Tensor | None) -> torch.Tensor:
        both = self._product(h, weight, tokens)
        if weight.activation is Activation.CLAMPED:
            return bent(both, CLAMPED)
        gate, up = both.chunk(2, dim=-1)
        return activated(gate, weight.activation) * up

    def bent_gate(
        self,
        h: torch.Tensor,
        weight: TorchLinear,
        *,
        form: GateForm,
        added: tuple[torch.Tensor, TorchLinear] | None = None,
    ) -> torch.Tensor:
        """y [T, F]."""
        both = self._product(h, weight, None)
        return bent(both if added is None else self.linear_add(*added, both), form)

    def sparse_gate(self, h: torch.Tensor, weight: TorchLinear, *, cutoff: float) -> torch.Tensor:
        """y [T, F]."""
        gate, up = self._product(h, weight, None).chunk(2, dim=-1)
        deviation, mean = torch.std_mean(gate.float(), dim=-1, keepdim=True, correction=0)
        return activated(F.relu(gate - (mean + cutoff * deviation).to(gate.dtype)), weight.activation) * up

    def curve(self, h: torch.Tensor, weight: TorchLinear, *, numbers: tuple[float, ...] = ()) -> torch.Tensor:
        """y [T, F]."""
        y = self._product(h, weight, None)
        return xielu(y, numbers) if weight.activation is Activation.XIELU else activated(y, weight.activation)

    def clip(self, y: torch.Tensor, limit: float) -> torch.Tensor:
        """y [T, N]."""
        return y.clamp(-limit, limit)

    def gate_given(self, h: torch.Tensor, weight: TorchLinear, given: torch.Tensor, first: int) -> torch.Tensor:
        """y [T, F]."""
        gate = self._product(h, weight, None)
        return activated(gate, weight.activation) * given[:, first : first + gate.shape[1]]

    def join(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[T, N + M]."""
        return torch.cat([a, b], dim=-1)

    def keep(self, x: torch.Tensor, weight: TorchNorm) -> torch.Tensor:
        """[T, D]."""
        return self.weigh(x, weight)

    def weigh_hidden(self, h: torch.Tensor, weight: TorchNorm) -> torch.Tensor:
        """[T, N]."""
        return self.weigh(h, weight)

    def weigh(self, x: torch.Tensor, weight: TorchNorm) -> torch.Tensor:
        """h [T, D]."""
        return (x * weight.weight).to(x.dtype)

    def layer_inputs(
        self,
        x: torch.Tensor,
        projection: TorchLinear,
        norm: TorchNorm,
        table: torch.Tensor,
        *,
        eps: float,
        table_scale: float,
        scale: float,
    ) -> torch.Tensor:
        """[T, L P]."""
        by_layer = self.linear(x, projection).unflatten(-1, (-1, len(norm.weight)))
        of_stream = self.norm(by_layer, norm, eps=eps).flatten(1)
        rows = table[torch.where(self._token_ids < len(table), self._token_ids, 0)]
        return (of_stream + rows.to(x.dtype) * table_scale) * scale

    def linear_add(self, h: torch.Tensor, weight: TorchLinear, x: torch.Tensor) -> torch.Tensor:
        """x + h W^T + b [T, D]."""
        return x + self.linear(h, weight)

    def injections(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """[T, n]."""
        return self.linear(h, weight)

    def linear_sum(self, h: torch.Tensor, weight: TorchLinear, y: torch.Tensor) -> torch.Tensor:
        """y + h W^T + b [T, N]."""
        return self.linear_add(h, weight, y)

    def add(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """x + scale * y [T, D]."""
        return torch.add(x, y, alpha=scale)

    def add_gated(self, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x + sigmoid(gate) * y [T, D]."""
        return x + torch.sigmoid(gate) * y

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """factor * x [T, D]."""
        return x * factor

    def rotate_and_cache(self, qkv: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """q [T, H, d]; k and v go to their slots."""
        spec = attention.spec
        n_q = spec.n_heads * spec.head_dim
        q_THd = self._placed(qkv[:, :n_q], spec.n_heads, attention.q_norm, spec)
        if spec.query_scale is not None:
            q_THd = (q_THd * self._scales(spec.query_scale)[:, None, None]).to(q_THd.dtype)
        if not spec.owns_kv:
            return q_THd
        n_k = spec.n_kv_heads * spec.head_dim
        k, v = qkv[:, n_q : n_q + n_k], qkv[:, n_q + n_k if spec.has_v else n_q :]
        v_TKd = v.unflatten(-1, (spec.n_kv_heads, spec.value_dim))
        if spec.has_v_norm:
            v_TKd = F.rms_norm(v_TKd.float(), v_TKd.shape[-1:], eps=spec.norm_eps)
        if spec.v_scale != 1.0:
            v_TKd = v_TKd * spec.v_scale
        keys, values = self._pool(spec.cache_layer)
        keys[self._slots] = self._placed(k, spec.n_kv_heads, attention.k_norm, spec).to(keys.dtype)
        values[self._slots] = v_TKd.to(values.dtype)
        return q_THd

    def _placed(self, x: torch.Tensor, n_heads: int, norm: TorchNorm | None, spec: AttentionSpec) -> torch.Tensor:
        """Queries or keys [T, heads, d]: normed as the layer says, turned to their positions."""
        if spec.qk_norm is QkNorm.FULL:
            x = self._norm(x, norm, spec)
        x_THd = x.unflatten(-1, (n_heads, spec.head_dim))
        if spec.qk_norm in (QkNorm.HEAD, QkNorm.HEADS, QkNorm.CENTRED):
            x_THd = self._norm(x_THd, norm, spec)
        if spec.rope is not None:
            x_THd = self._rotate(x_THd, spec.rope)
        return self._norm(x_THd, norm, spec) if spec.qk_norm is QkNorm.TURNED else x_THd

    def cache_latents(self, kv: torch.Tensor, attention: TorchAttention) -> None:
        """Latent and rotary key side by side, in their slots."""
        spec, latent = attention.spec, attention.latent
        assert spec.mla is not None
        assert latent is not None
        assert spec.rope is not None
        if spec.mla.n_groups:
            return self.cache_row(kv, attention)
        assert latent.norm is not None
        c_Tr, k_Tp = kv.split((spec.mla.kv_rank, spec.mla.rope_dim), dim=-1)
        keys, _ = self._pool(spec.cache_layer)
        turned = self._rotate(k_Tp[:, None], spec.rope)[:, 0]
        rows = torch.cat([self.norm(c_Tr, latent.norm, eps=spec.norm_eps), turned], dim=-1)
        keys[self._slots, :, : spec.mla.row] = rows[:, None].to(keys.dtype)

    def absorb(self, q: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """q [T, H, r + p]."""
        spec, latent = attention.spec, attention.latent
        assert spec.mla is not None
        if spec.mla.n_groups:
            return self.turn_queries(q, attention)
        assert latent is not None
        assert latent.keys is not None
        assert spec.rope is not None
        if spec.query_scale is not None:
            q = (q * self._scales(spec.query_scale)[:, None]).to(q.dtype)
        q = self._scaled_heads(q, latent.scales)
        q_THn, q_THp = q.unflatten(-1, (spec.n_heads, -1)).split((spec.mla.nope_dim, spec.mla.rope_dim), dim=-1)
        absorbed = torch.einsum("xhn,hrn->xhr", q_THn, latent.keys)
        return torch.cat([absorbed, self._rotate(q_THp, spec.rope)], dim=-1)

    def expand(self, a: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """[T, H v]."""
        spec, latent = attention.spec, attention.latent
        assert spec.mla is not None
        if spec.mla.n_groups:
            return self.expand_groups(a, attention)
        assert latent is not None
        a_THr = a.unflatten(-1, (spec.n_heads, -1))[..., : spec.mla.kv_rank]
        return torch.einsum("thr,hvr->thv", a_THr, latent.values).flatten(1)

    def attention(self, q_THd: torch.Tensor, attention: TorchAttention) -> torch.Tensor:
        """a [T, H dv]."""
        spec = attention.spec
        keys, values = self._pool(spec.cache_layer)
        width = values.shape[-1] if spec.mla is None else spec.mla.row
        out = q_THd.new_empty((len(q_THd), spec.n_heads, width))
        for queries in self._queries.of(spec):
            n_sequences = queries.slots.shape[0]
            q_BnHd = q_THd[queries.rows].unflatten(0, (n_sequences, -1))
            k_BKCd = keys[queries.slots].transpose(1, 2).to(q_THd.dtype)
            v_BKCd = values[queries.slots].transpose(1, 2).to(q_THd.dtype)
            mask = queries.mask
            if spec.mla is not None:
                k_BKCd, v_BKCd = k_BKCd[..., : spec.mla.row], v_BKCd[..., : spec.mla.row]
            if spec.mla is not None and spec.mla.n_groups:
                k_BKCd, mask = self.with_entries(queries, k_BKCd, spec)
                v_BKCd = k_BKCd
            elif spec.index is not None:
                mask = self.of_chosen(queries)
            a_BHnd = _attend(q_BnHd.transpose(1, 2), k_BKCd, v_BKCd, mask, attention, queries.positions)
            out[queries.rows] = a_BHnd.transpose(1, 2).flatten(0, 1)
        return out.flatten(1)

    def gate_heads(self, h: torch.Tensor, weight: TorchLinear, a: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        gates = activated(self._product(h, weight, None), weight.activation)
        return (a.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2)

    def sum(self, a: torch.Tensor, b: torch.Tensor, *, gate: torch.Tensor | None = None) -> torch.Tensor:
        """[T, N]."""
        return a + b if gate is None else self.add_gated(a, b, gate)

    def experts(self, h: torch.Tensor, experts: TorchExperts, *, routed: torch.Tensor | None = None) -> torch.Tensor:
        """The gated sum of the chosen experts [T, D]."""
        spec, routed = experts.spec, h if routed is None else routed
        weights_Tk, chosen_Tk = route(self.linear(routed, experts.router).float(), experts, self._token_ids)
        total = torch.zeros_like(h)
        for expert in chosen_Tk.unique().tolist():
            rows, column = torch.where(chosen_Tk == expert)
            weights, given = weights_Tk[rows, column, None], h[rows]
            if expert >= spec.n_experts:
                total.index_add_(0, rows, (given * weights).to(total.dtype))
                continue
            if spec.weighs_input:
                given, weights = (given * weights).to(h.dtype), torch.ones_like(weights)
            first = experts.gate_up[expert]
            if not spec.is_gated:
                inner = activated(self._product(given, first, rows), first.activation)
            elif spec.form is None:
                inner = self._gated(given, first, rows)
            else:
                inner = bent(self._product(given, first, rows), spec.form)
            y = self._product(inner, experts.down[expert], rows)
            if experts.behind is not None:
                y = F.rms_norm(y.float() * experts.behind, y.shape[-1:], eps=spec.behind_eps)
            total.index_add_(0, rows, (y * weights).to(total.dtype))
        return total

    def head(
        self,
        x: torch.Tensor,
        norm: TorchNorm | None,
        weight: TorchLinear | None,
        *,
        eps: float,
        softcap: float | None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Logits [R, V] fp32, or h [R, D] fp32 where that is all the forward is for."""
        h = x[self._logits_rows]
        if weight is None:
            refuse_logits(len(h))
            return h.float()
        if norm is not None:
            h = self.norm(h, norm, eps=eps)
        if self._wants_hidden:
            return h.float()
        assert scale == 1.0 or weight.bias is None, "no family scales logits and has a bias of them"
        logits = self._scores(h, weight)
        if scale != 1.0:
            logits = logits * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits.float()

    def _scores(self, h: torch.Tensor, weight: TorchLinear) -> torch.Tensor:
        """Logits [R, V] of the rows that they are wanted of."""
        return self._product(h, weight, self._logits_rows)

    def _on_device(self, array: object) -> torch.Tensor:
        return torch.as_tensor(array).to(device=self._device, dtype=torch.long)

    def _rows_of_adapters(
        self, adapters_S: np.ndarray, adapters: Mapping[int, TorchAdapter]
    ) -> list[tuple[torch.Tensor, TorchAdapter]]:
        """The rows of the step that have an adapter, adapter by adapter."""
        adapters_T = np.repeat(adapters_S, np.diff(self._batch.query_start_S1))
        numbers = [int(number) for number in np.unique(adapters_S) if number >= 0]
        return [(self._on_device(np.flatnonzero(adapters_T == number)), adapters[number]) for number in numbers]

    def _norm(self, x: torch.Tensor, weight: TorchNorm | None, spec: AttentionSpec) -> torch.Tensor:
        assert weight is not None, "a spec with q/k norm is loaded with its weights"
        if spec.qk_norm is QkNorm.HEADS:
            unit = F.layer_norm(x.float(), x.shape[-1:], eps=spec.norm_eps)
            return (unit * weight.weight.view(x.shape[1:])).to(x.dtype)
        if spec.qk_norm is QkNorm.CENTRED:
            scales, biases = weight.weight.view(x.shape[1], 2, x.shape[2]).unbind(1)
            return torch.addcmul(biases, F.layer_norm(x.float(), x.shape[-1:], eps=spec.norm_eps), scales).to(x.dtype)
        return self.norm(x, weight, eps=spec.norm_eps)

    def _scales(self, scale: QueryScale) -> torch.Tensor:
        """[T] fp32."""
        times = torch.div(self._positions + scale.shift, scale.tokens, rounding_mode="floor")
        return 1.0 + scale.slope * torch.log1p(times.float())

    def _scaled_heads(self, q: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """q [T, H d], each head by its position as its two numbers [2 H] say; None: as it is."""
        if scales is None:
            return q
        slopes, offsets = scales.chunk(2)
        factors_TH = torch.log((self._positions + 1).float())[:, None] * slopes + offsets
        return (q.unflatten(-1, (len(slopes), -1)) * factors_TH[..., None]).to(q.dtype).flatten(1)

    def _pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        planes = self._kv.layers[layer]
        return planes[0].flatten(0, 1), planes[-1].flatten(0, 1)  # [N * P, K, d] and [N * P, K, dv], views

    def _rotate(self, x_THd: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
        cos, sin = (part[:, None] for part in self._turns(rope, self._dtype))
        half = rope.rotary_dim // 2
        first, second, rest = x_THd[..., :half], x_THd[..., half : 2 * half], x_THd[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def _turns(self, rope: RopeSpec, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, turned / 2], made in fp32 when first needed."""
        key = rope, dtype
        if key not in self._rotations:
            angles = self._positions[:, None].float() * _inv_freq(rope, self._device)
            cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
            self._rotations[key] = cos.to(dtype), sin.to(dtype)
        return self._rotations[key]


def _attend(
    q_BHnd: torch.Tensor,
    k_BKCd: torch.Tensor,
    v_BKCd: torch.Tensor,
    mask: torch.Tensor | None,
    attention: TorchAttention,
    positions_Bn: torch.Tensor,
) -> torch.Tensor:
    """a [B, H, n, d]; mask [B, 1 or K, n, C] or None for all; positions: the queries'."""
    spec, sinks = attention.spec, attention.sinks
    group = spec.n_heads // spec.n_kv_heads
    n = q_BHnd.shape[2]
    # the G query heads of a kv head become further queries: no copy of keys and values per query head
    q = q_BHnd.unflatten(1, (spec.n_kv_heads, group)).flatten(2, 3)  # [B, K, G * n, d]
    gained = gained_by_distance(spec, attention.distances, positions_Bn, k_BKCd.shape[2])
    if attention.related is not None:
        gained = gained_by_contents(attention.related, q, k_BKCd, positions_Bn)
    if mask is not None and group > 1:
        mask = mask.repeat(1, 1, group, 1) if n > 1 else mask
    if spec.softcap is None and sinks is None and gained is None:
        a = F.scaled_dot_product_attention(q, k_BKCd, v_BKCd, attn_mask=mask, scale=spec.scale)
    else:
        scores = torch.matmul(q, k_BKCd.transpose(2, 3)).float() * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        if gained is not None:
            scores = scores + gained
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:  # one more key, which has no value
            of_rows = sinks.view(1, spec.n_kv_heads, group, 1).repeat_interleave(n, dim=2)
            scores = torch.cat([scores, of_rows.expand(len(scores), -1, -1, -1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : k_BKCd.shape[2]]
        a = torch.matmul(weights.to(v_BKCd.dtype), v_BKCd)
    return a.unflatten(2, (group, n)).flatten(1, 2)
