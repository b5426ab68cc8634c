"""FLOPs and bytes of every component of a transformer, for any step: the formulas everything else rests on.

Symbols as in the code: N rows of the step, R rows with logits, t tensor-parallel degree; a multiply-add is 2 FLOPs.
All figures are of ONE of the t devices. Matrix FLOPs and vector FLOPs (softmax, norms, rotary) are kept apart.

>>> from diptych.cost.tables import model_spec
>>> step = cost_of(model_spec("llama-3.1-8b"), StepShape.decode(batch=1, context_tokens=2048), quant=BF16, kv=KVSpec())
>>> round(step.flops / 1e9, 3), round(step.bytes / 1e9, 3)
(16.083, 15.278)
"""

from __future__ import annotations

from dataclasses import replace

from diptych.cost.adapters import adapter_bytes, adapter_parameters
from diptych.cost.attended import Scored, pairs, reach_of, read_tokens
from diptych.cost.kv_bytes import STATE_BYTES, index_kv_bytes, kv_bytes_read, layer_kv_bytes, vector_bytes
from diptych.cost.phase_cost import Component, PhaseCost
from diptych.cost.routing import touched_experts
from diptych.cost.streams import (
    end_norms,
    inner_width,
    ngram_elements,
    own_heads,
    own_inner,
    related_matrices,
    stream_matrices,
    stream_vectors,
    table_width,
    word_matrix,
)
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.ground.specs import KVSpec, QuantSpec
from diptych.models.latent import IndexSpec, MlaSpec
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.positions import Related
from diptych.models.spec import AttentionLayer, LayerSpec, ModelSpec, QkNorm
from diptych.models.states import EXPONENTIAL_FLOPS, StateSpec

BF16 = QuantSpec(name="bf16", weight_bytes=2.0)

LOGIT_BYTES = 4
SAID_BYTES = 4  # of what queries and keys say of distances


def ring_bytes(payload_bytes: float, tp: int) -> float:
    """Bytes each of `tp` devices sends in a ring all-reduce of `payload_bytes`."""
    return 2.0 * (tp - 1) / tp * payload_bytes


def gathered_bytes(payload_bytes: float, tp: int) -> float:
    """The same in a ring all-gather, where each has its part of `payload_bytes` at first."""
    return (tp - 1) / tp * payload_bytes


def cost_of(
    model: ModelSpec, work: StepShape, *, quant: QuantSpec, kv: KVSpec, tp: int = 1, is_ours: bool = False
) -> PhaseCost:
    """Every component of one step. `tp` must divide the query heads.

    is_ours: as Diptych's engine runs it. Its latent attention works on the latents in prefill, too, where others expand
    them, and over rows of int8 its adapters are int8.
    """
    check_tp(model, tp)
    sizes = _Sizes(model, model.layers[0], work, quant, kv, tp, is_ours=is_ours)
    totals: dict[str, Component] = {"embedding": _embedding(sizes)}
    for layer, n_layers in model.layer_groups:
        for component in _layer(_Sizes(model, layer, work, quant, kv, tp, is_ours=is_ours)):
            part = component.times(n_layers)
            totals[part.name] = totals[part.name].plus(part) if part.name in totals else part
    totals["norms"] = totals["norms"].plus(_final_norm(sizes))
    if stream_matrices(model) or model.scales_layers:
        totals["streams"] = _streams(sizes)
    totals["head"] = _head(sizes)
    if work.adapters:
        totals["adapters"] = Component(
            name="adapters",
            flops=2.0 * work.adapted_products / tp,
            weight_bytes=adapter_bytes(quant, is_ours=is_ours) * adapter_parameters(work) / tp,
        )
    return PhaseCost(components=tuple(totals.values()), tp=tp)


def check_tp(model: ModelSpec, tp: int) -> None:
    """Refuse a split that cuts through a query head."""
    if tp < 1:
        raise ConfigError(f"tensor parallel degree is {tp}; it must be at least 1")
    for n_heads in {layer.attention.n_heads for layer, _ in model.layer_groups}:
        if n_heads % tp:
            raise ConfigError(
                f"{model.name} has {n_heads} query heads; they cannot be split evenly over {tp} devices",
                hint=f"use a divisor of {n_heads}",
            )


class _Sizes:
    """The numbers that the formulas of one layer's components share."""

    def __init__(
        self,
        model: ModelSpec,
        layer: LayerSpec,
        work: StepShape,
        quant: QuantSpec,
        kv: KVSpec,
        tp: int,
        *,
        is_ours: bool,
    ) -> None:
        self.is_ours = is_ours
        self.model = model
        self.layer = layer
        self.attention = layer.attention
        self.work = work
        self.quant = quant
        self.kv = kv
        self.tp = tp
        self.n = work.n_tokens
        self.a = quant.activation_bytes
        self.w = quant.weight_bytes
        self.heads = layer.attention.n_heads / tp
        self.kv_heads = max(layer.attention.n_kv_heads / tp, 1.0)
        key, value = (vector_bytes(width, kv) for width in (layer.attention.head_dim, layer.attention.value_dim))
        self.of_values = value / (key + value)  # the part of a token's bytes
        written = layer.attention.keeps_kv * layer_kv_bytes(layer.attention, kv, tp) + index_kv_bytes(
            layer.attention, kv
        )
        if layer.attention.entries is not None:
            written += layer_kv_bytes(layer.attention, kv, tp) / layer.attention.entries.tokens
        self.written_bytes = written


def _layer(sizes: _Sizes) -> tuple[Component, ...]:
    mla, state, mlp = sizes.attention.mla, sizes.attention.state, sizes.layer.mlp
    ffn: tuple[Component, ...] = ()
    if mlp is not None:
        ffn = _experts(sizes, mlp) if isinstance(mlp, MoeSpec) else (_mlp(sizes, mlp),)
    if sizes.layer.is_aside:  # and what it has of its own
        ffn = (ffn[0].plus(_own(sizes, "mlp", own_inner(sizes.model, sizes.layer))),)
    if state is not None:
        return (_norms(sizes), *_states(sizes, state), *ffn)
    if sizes.attention.is_absent:
        return (_norms(sizes), *ffn)
    projections = _gqa(sizes) if mla is None else _mla(sizes, mla)
    own = sizes.attention.own_index
    index = () if own is None else (_index(sizes, own),)
    return (_norms(sizes), *projections, *index, *_attention(sizes), *ffn)


def _states(sizes: _Sizes, state: StateSpec) -> tuple[Component, Component, Component]:
    """Projections, and states, which every chunk reads and writes once: the update and S^T q for each of its tokens, by the
    delta rule S^T k before them, of a selective state an exponential of each number.
    """
    hidden, n, tp = sizes.model.hidden, sizes.n, sizes.tp
    sizes_of = state.n_channels, state.n_inputs, state.width, state.n_value_heads
    channels, inputs, width, heads = (one / tp for one in sizes_of)
    # what lies between two steps, rates and decays each device makes whole
    late = state.gate_width if state.rank and not state.is_selective else 0  # of what gates, in a second step
    divided = (state.n_inputs + state.gate_width - late) / tp
    qkv = _linear(sizes, "qkv", hidden, divided + state.n_projected - divided * tp)
    if state.is_unit:  # what v is projected to, head by head
        qkv = qkv.plus(_linear(sizes, "qkv", state.value_dim, state.n_rates / tp))
    if state.is_selective:  # what v is projected to
        n_heads = state.n_key_heads
        qkv = qkv.plus(_linear(sizes, "qkv", state.width / n_heads, n_heads * state.rank + state.n_rates))
    if state.rank:
        qkv = qkv.plus(_linear(sizes, "qkv", state.rank, late / tp + state.n_decays))
    moved = sum(shape.count for shape in sizes.work.shapes) * state.layer_elements * STATE_BYTES / tp
    states = Component(
        name="states",
        flops=state.flops_each * n * heads * state.key_dim * state.value_dim,
        vector_flops=n * (2.0 * channels * (state.tapped or state.n_taps) + 8.0 * width),
        weight_bytes=state.n_small / tp * 4.0,
        activation_bytes=n * (inputs + width) * sizes.a,
        kv_read_bytes=moved,
        kv_write_bytes=moved,
    )
    return qkv, states, _linear(sizes, "o", width, hidden, link=_all_reduce_bytes(sizes))


def _all_reduce_bytes(sizes: _Sizes) -> float:
    return ring_bytes(sizes.n * sizes.model.hidden * sizes.a, sizes.tp)


def _linear(sizes: _Sizes, name: str, n_in: float, n_out: float, *, bias: float = 0.0, link: float = 0.0) -> Component:
    return Component(
        name=name,
        flops=2.0 * sizes.n * n_in * n_out,
        weight_bytes=n_in * n_out * sizes.w + bias * 2.0,
        activation_bytes=sizes.n * (n_in + n_out) * sizes.a,
        link_bytes=link,
    )


def _own(sizes: _Sizes, name: str, count: float) -> Component:
    """Low ranks of a layer's own, and what projects what it gives, divided evenly."""
    shard = count / sizes.tp
    return Component(name=name, flops=2.0 * sizes.n * shard, weight_bytes=shard * sizes.w)


def _gqa(sizes: _Sizes) -> tuple[Component, Component]:
    hidden, attention, head_dim = sizes.model.hidden, sizes.attention, sizes.attention.head_dim
    kv_heads = sizes.kv_heads if attention.kv_layer is None else 0.0
    q_width, k_width, v_width = sizes.heads * head_dim, kv_heads * head_dim, kv_heads * attention.value_dim
    width = q_width + attention.gate_width / sizes.tp + k_width + attention.has_v * v_width
    qkv = _linear(sizes, "qkv", hidden + attention.beside, width, bias=width if attention.has_qkv_bias else 0.0)
    if attention.own_rank:
        qkv = qkv.plus(_own(sizes, "qkv", own_heads(sizes.model, attention)))
    if attention.qk_norm not in (QkNorm.NONE, QkNorm.UNIT):
        norm = (
            (2 if kv_heads else 1) * head_dim
            if attention.qk_norm in (QkNorm.HEAD, QkNorm.TURNED, QkNorm.CENTRED)
            else q_width + k_width
        )
        qkv = replace(qkv, weight_bytes=qkv.weight_bytes + norm * 2.0)
    if attention.related is not None:
        qkv = qkv.plus(_related(sizes, attention.related))
    rotary = 6.0 * sizes.n * (sizes.heads + kv_heads) * head_dim
    own = attention.own_index
    if own is not None:  # whole on every device
        width = (own.n_heads + 1) * own.head_dim
        qkv = qkv.plus(_linear(sizes, "qkv", hidden, width, bias=2 * own.head_dim))
        rotary += 6.0 * sizes.n * width
    qkv = replace(qkv, kv_write_bytes=sizes.n * sizes.written_bytes, vector_flops=rotary)
    o_bias = hidden if attention.has_o_bias else 0.0
    return qkv, _linear(sizes, "o", attention.width / sizes.tp, hidden, bias=o_bias, link=_all_reduce_bytes(sizes))


def _related(sizes: _Sizes, related: Related) -> Component:
    """What queries and keys say of each distance, written and read once in fp32."""
    met, said = related_matrices(sizes.attention) / sizes.tp, 2 * sizes.heads * related.n_places
    return Component(
        name="qkv",
        flops=2.0 * sizes.n * met,
        weight_bytes=met * 2.0,
        activation_bytes=2.0 * sizes.n * said * SAID_BYTES,
    )


def _mla(sizes: _Sizes, mla: MlaSpec) -> tuple[Component, Component]:
    """Down projections are replicated on every device, up projections split by heads.

    Absorbing W_UK and W_UV costs the same as expanding one token; where prefill expands, a chunk also expands the
    latents of the tokens cached before it.
    """
    hidden = sizes.model.hidden
    q_head, gate = mla.nope_dim + mla.rope_dim, sizes.attention.gate_width / sizes.tp
    q_width = sizes.heads * q_head
    if mla.q_rank is None:
        q = _linear(sizes, "qkv", hidden, q_width)
    else:
        q = _linear(sizes, "qkv", hidden, mla.q_rank, bias=mla.q_rank)
        q = q.plus(_linear(sizes, "qkv", mla.q_inputs, q_width + mla.is_mixed * gate))
    if gate and not mla.is_mixed:  # which reads the layer's input then
        q = q.plus(_linear(sizes, "qkv", hidden, gate))
    keeps = sizes.attention.keeps_kv
    latent = _linear(sizes, "qkv", hidden, keeps * mla.row, bias=keeps * mla.norm_width)
    if mla.n_groups:  # of heads, which are projected together
        return _met_rows(sizes, mla, q, latent)
    up = _linear(sizes, "qkv", mla.kv_rank, sizes.heads * (mla.nope_dim + mla.v_dim))
    own = sizes.attention.own_index
    is_expanded = not sizes.is_ours and sizes.attention.index is None
    expanded = sum(s.start_pos * s.count for s in sizes.work.shapes if is_expanded and not s.is_decode)
    up = replace(up, flops=up.flops + 2.0 * expanded * mla.kv_rank * sizes.heads * (mla.nope_dim + mla.v_dim))
    rotary = 6.0 * sizes.n * (sizes.heads + 1) * mla.rope_dim
    if own is not None:  # whole on every device
        n_heads, width = own.n_heads, own.key_width
        q = q.plus(_linear(sizes, "qkv", mla.q_rank or hidden, n_heads * own.head_dim))
        latent = latent.plus(_linear(sizes, "qkv", hidden, width + n_heads, bias=own.n_small(hidden)))
        rotary += 6.0 * sizes.n * (n_heads + 1) * mla.rope_dim
    qkv = replace(q.plus(latent).plus(up), kv_write_bytes=sizes.n * sizes.written_bytes, vector_flops=rotary)
    return qkv, _linear(sizes, "o", sizes.heads * mla.v_dim, hidden, link=_all_reduce_bytes(sizes))


def _met_rows(sizes: _Sizes, mla: MlaSpec, q: Component, row: Component) -> tuple[Component, Component]:
    """The same of rows that all heads meet as they are, with what entries are made of, whole on every device."""
    hidden, attention, own = sizes.model.hidden, sizes.attention, sizes.attention.own_index
    inner = mla.n_inner(attention.n_heads) / sizes.tp
    groups = Component(name="qkv", flops=2.0 * sizes.n * inner, weight_bytes=inner * sizes.w)
    widths = [] if attention.entries is None else [(attention.entries, mla.row)]
    if own is not None:
        assert own.entries is not None
        widths.append((own.entries, own.head_dim))
        q = q.plus(_linear(sizes, "qkv", mla.q_rank or 0, own.n_heads * own.head_dim))
        row = row.plus(_linear(sizes, "qkv", hidden, own.n_heads))
    moved = 12.0 * sizes.n * sizes.heads * mla.row  # norms, and turns there and back
    for entries, width in widths:  # of each number a weight by an exponential, and what is kept of the weights before
        row = row.plus(_linear(sizes, "qkv", hidden, 2 * entries.n_series * width, bias=entries.n_small(width)))
        moved += 2.0 * (EXPONENTIAL_FLOPS + 4.0) * sizes.n * entries.n_series * width
    qkv = replace(q.plus(row).plus(groups), kv_write_bytes=sizes.n * sizes.written_bytes, vector_flops=moved)
    return qkv, _linear(sizes, "o", sizes.heads * mla.v_dim, hidden, link=_all_reduce_bytes(sizes))


def _index(sizes: _Sizes, index: IndexSpec) -> Component:
    """A key of every position before each token that sees more of them than are chosen, whole on every device."""
    reach, shapes = Scored(index.n_unchosen), sizes.work.shapes
    scored = float(sum(pairs(reach, shape) * shape.count for shape in shapes))
    tokens = sum(read_tokens(reach, shape) * shape.count for shape in shapes)
    return Component(
        name="index",
        flops=2.0 * index.n_heads * index.key_width * scored,
        vector_flops=(3.0 if index.n_weights else 1.0) * index.n_heads * scored,
        kv_read_bytes=tokens * index_kv_bytes(sizes.attention, sizes.kv),
    )


def _attention(sizes: _Sizes) -> tuple[Component, Component]:
    """Scores read K, values read V; with MLA both come from one latent, charged to the scores."""
    mla = sizes.attention.mla
    score_flops = value_flops = softmax = kv_read = 0.0
    for shape in sizes.work.shapes:
        seen = float(pairs(reach_of(sizes.attention), shape) * shape.count)
        kv_read += kv_bytes_read(sizes.attention, shape, sizes.kv, sizes.tp) * shape.count
        on_latents = sizes.is_ours or shape.is_decode
        score_width, value_width = attention_widths(sizes.attention, on_latents=on_latents)
        score_flops += 2.0 * sizes.heads * score_width * seen
        value_flops += 2.0 * sizes.heads * value_width * seen
        softmax += 5.0 * sizes.heads * seen
    width = sizes.heads * (sizes.attention.value_dim if mla is None else mla.v_dim)
    of_values = kv_read * sizes.of_values if mla is None else 0.0
    io = sizes.n * width * sizes.a
    sinks = sizes.heads * 2.0 if sizes.attention.has_sinks else 0.0
    scores = Component(
        name="scores",
        flops=score_flops,
        vector_flops=softmax,
        weight_bytes=sinks,
        activation_bytes=io,
        kv_read_bytes=kv_read - of_values,
    )
    return scores, Component(name="values", flops=value_flops, activation_bytes=io, kv_read_bytes=of_values)


def attention_widths(attention: AttentionLayer, *, on_latents: bool) -> tuple[int, int]:
    """Width of one head's dot products: (scores, values). on_latents: where they are MLA's, as in decode.

    Those that an index chooses always are: each token has its own, and expanding them would serve no other.
    """
    mla = attention.mla
    if mla is None:
        return attention.head_dim, attention.value_dim
    if mla.n_groups:
        return mla.row, mla.row
    if on_latents or attention.index is not None:
        return mla.row, mla.kv_rank
    return mla.nope_dim + mla.rope_dim, mla.v_dim


def _mlp(sizes: _Sizes, mlp: MlpSpec) -> Component:
    return _ffn(sizes, "mlp", mlp.ffn, matrices=3 if mlp.is_gated else 2, has_bias=mlp.has_bias)


def _ffn(sizes: _Sizes, name: str, width: int, *, matrices: int = 3, has_bias: bool = False) -> Component:
    model = sizes.model
    shard = width / sizes.tp
    bias = (matrices - 1) * shard + model.hidden if has_bias else 0.0
    return Component(
        name=name,
        flops=2.0 * matrices * sizes.n * model.hidden * shard,
        vector_flops=4.0 * sizes.n * shard,
        weight_bytes=matrices * model.hidden * shard * sizes.w + bias * 2.0,
        activation_bytes=sizes.n * (2 * model.hidden + matrices * shard) * sizes.a,
        link_bytes=_all_reduce_bytes(sizes),
    )


def _experts(sizes: _Sizes, moe: MoeSpec) -> tuple[Component, ...]:
    """Experts are split in width over the devices, so every device reads a slice of each expert touched."""
    model, n = sizes.model, sizes.n
    shard, width = moe.expert_ffn / sizes.tp, moe.latent or model.hidden
    per_expert = moe.n_products * width * shard * sizes.quant.expert_bytes
    if moe.has_expert_bias:
        per_expert += ((moe.n_products - 1) * shard + width) * 2.0
    touched = touched_experts(moe, n)
    router_bias = (
        moe.n_scored * (moe.has_router_bias + moe.has_choice_bias * moe.choice_rows + moe.is_apart)
        + model.hidden * moe.is_apart
    )
    router = Component(
        name="router",
        flops=2.0 * n * model.hidden * moe.n_scored,
        weight_bytes=(model.hidden * moe.n_scored + router_bias) * 2.0,
        activation_bytes=n * (model.hidden + moe.n_scored) * sizes.a,
    )
    experts = Component(
        name="experts",
        flops=2.0 * moe.n_products * n * moe.met_experts * width * shard,
        vector_flops=4.0 * n * moe.met_experts * shard,
        weight_bytes=touched * per_expert,
        activation_bytes=n * moe.met_experts * (4 * width + moe.n_products * shard) * sizes.a,
        link_bytes=_all_reduce_bytes(sizes),
    )
    if not moe.shared_ffn and not moe.latent:
        return router, experts
    shared = replace(
        _ffn(sizes, "shared_experts", moe.shared_ffn, matrices=moe.n_products, has_bias=moe.has_shared_bias),
        link_bytes=0.0,
    )
    latents = 2.0 * model.hidden * moe.latent / sizes.tp  # what takes every token to them, and back
    shared = replace(
        shared,
        flops=shared.flops + 2.0 * n * latents,
        weight_bytes=shared.weight_bytes + latents * sizes.w + model.hidden * 2.0 * moe.has_shared_gate,
    )
    return router, experts, shared


def own_norms(mlp: MlpSpec | MoeSpec | None) -> int:
    """Norms that a layer has for what its mixture is made of."""
    return mlp.n_own_norms if isinstance(mlp, MoeSpec) else 0


def _norms(sizes: _Sizes) -> Component:
    model, count = sizes.model, sizes.layer.norms.count + own_norms(sizes.layer.mlp)
    per_norm = model.hidden * (model.has_norm_weight + model.has_norm_bias)
    inner = inner_width(model, sizes.layer)
    width = count * model.hidden + inner
    return Component(
        name="norms",
        vector_flops=4.0 * width * sizes.n,
        weight_bytes=(count * per_norm + inner) * 2.0,
        activation_bytes=3.0 * width * sizes.n * sizes.a,
    )


def _final_norm(sizes: _Sizes) -> Component:
    hidden = sizes.model.hidden * end_norms(sizes.model)
    rows = sizes.work.n_logits_rows
    return Component(name="norms", vector_flops=4.0 * rows * hidden, weight_bytes=hidden * 2.0)


def _embedding(sizes: _Sizes) -> Component:
    """A gather: only the rows of the step's tokens, listed as activations because they depend on N alone; and what takes them
    to the stream's width, if anything.
    """
    width, projected = sizes.model.row_width + table_width(sizes.model), word_matrix(sizes.model) / sizes.tp
    written = sizes.model.hidden * sizes.a if projected else 0.0
    return Component(
        name="embedding",
        flops=2.0 * sizes.n * projected,
        weight_bytes=projected * sizes.w,
        activation_bytes=sizes.n * (width * sizes.quant.head_bytes + written),
    )


def _streams(sizes: _Sizes) -> Component:
    """Of all layers: each device has what mixes streams and embeds layers whole. A layer passes over them some five times."""
    model = sizes.model
    passed = sizes.n * model.n_layers * model.n_streams * model.hidden
    moved = sum(shape.count for shape in sizes.work.shapes) * ngram_elements(model) * STATE_BYTES
    passes = 5.0 if stream_matrices(model) else 2.0  # where layers are only scaled
    return Component(
        name="streams",
        flops=2.0 * sizes.n * stream_matrices(model),
        vector_flops=2.0 * (model.n_streams + 4) * passed,
        weight_bytes=stream_matrices(model) * sizes.w + stream_vectors(model) * 2.0,
        activation_bytes=passes * passed * sizes.a,
        kv_read_bytes=moved,
        kv_write_bytes=moved,
    )


def _head(sizes: _Sizes) -> Component:
    """The LM head runs only on the rows that need logits; the weights are read when there is at least one.

    Logits are gathered as the product writes them, before they are widened for the sampler.
    """
    model = sizes.model
    rows = sizes.work.n_logits_rows * model.has_head
    vocab = model.vocab_size / sizes.tp
    transform = model.transforms_head * model.hidden**2  # of all rows, on each device
    return Component(
        name="head",
        flops=2.0 * rows * model.hidden * vocab + 2.0 * sizes.n * transform,
        weight_bytes=(model.hidden * vocab * sizes.quant.head_bytes if rows else 0.0) + transform * sizes.w,
        activation_bytes=rows * (model.hidden * sizes.a + vocab * LOGIT_BYTES),
        link_bytes=gathered_bytes(rows * model.vocab_size * sizes.a, sizes.tp),
    )
