"""How many parameters a model has, by component: the checksum that catches a wrong row in the model table.

>>> from diptych.cost.tables import model_spec
>>> parameter_count(model_spec("llama-3.1-8b"))
8030261248
"""

from __future__ import annotations

from diptych.cost.components import attention_widths, own_norms
from diptych.cost.kv_bytes import kv_bytes_of_tokens
from diptych.cost.layout import PLAIN, Layout
from diptych.cost.streams import (
    end_norms,
    inner_width,
    own_heads,
    own_inner,
    related_matrices,
    stream_matrices,
    stream_vectors,
    table_width,
    word_matrix,
)
from diptych.ground.specs import KVSpec, QuantSpec
from diptych.models.gates import Activation
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import AttentionLayer, ModelSpec, QkNorm


def parameters_by_component(model: ModelSpec) -> dict[str, int]:
    """Exact parameter count of each component over all layers."""
    counts = {
        "embedding": (model.n_embeddings + _learned_positions(model) + model.n_token_types + model.n_task_types)
        * model.row_width
        + _layer_table(model)
        + word_matrix(model)
        + model.hidden * (model.word_width > 0),
        "head": (0 if model.is_tied else model.vocab_size * model.hidden)
        + model.has_head_bias * model.vocab_size
        + model.transforms_head * model.hidden**2,
        **dict.fromkeys(("attention", "mlp", "router", "experts", "shared_experts"), 0),
        "streams": stream_matrices(model) + stream_vectors(model),
        "norms": _norms(model),
    }
    for layer, n in model.layer_groups:
        mlp, held = layer.mlp, layer.shares is None
        counts["attention"] += n * (held * _attention(model, layer.attention) + own_heads(model, layer.attention))
        for name, count in _mlp_counts(model, mlp).items():
            counts[name] += n * held * count
        counts["mlp"] += n * own_inner(model, layer)
    counts["attention"] += _learned_distances(model)
    return counts


def _learned_distances(model: ModelSpec) -> int:
    """What scores gain by distance, of all layers the same: numbers, or rows and their norm."""
    first = model.layers[0].attention
    if first.related is not None:
        return (first.related.n_places + 2 * first.related.is_normed) * model.hidden
    return 0 if first.distances is None else first.distances.n_buckets * first.n_heads


def _learned_positions(model: ModelSpec) -> int:
    return 0 if model.computes_positions else model.n_position_embeddings


def _layer_table(model: ModelSpec) -> int:
    if model.ngrams is not None:
        return model.ngrams.table_elements
    return 0 if model.layer_inputs is None else model.layer_inputs.vocab * table_width(model)


def parameter_count(model: ModelSpec) -> int:
    """All parameters; tied embeddings are counted once."""
    return sum(parameters_by_component(model).values())


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters one token is multiplied with: no input embedding (unless tied), only the routed experts."""
    counts = parameters_by_component(model)
    active = sum(counts.values()) - counts["embedding"] + word_matrix(model)
    active += model.vocab_size * model.row_width if model.is_tied and model.has_head else 0
    if model.moe is None:
        return active
    return active - counts["experts"] + counts["experts"] * model.moe.experts_per_token // model.moe.n_scored


def linear_parameter_count(model: ModelSpec) -> int:
    """Matrix parameters one token meets but for the head (no norms, no biases): half the linear FLOPs/token."""
    total = stream_matrices(model) + word_matrix(model)
    for layer, n in model.layer_groups:
        mlp = layer.mlp
        own = own_heads(model, layer.attention) + own_inner(model, layer)
        own += related_matrices(layer.attention)
        total += n * (_attention_matrices(model, layer.attention) + _met_by_token(model, mlp) + own)
    return total


def _met_by_token(model: ModelSpec, mlp: MlpSpec | MoeSpec | None) -> int:
    """Matrix parameters of an MLP or a mixture that one token meets."""
    if mlp is None:
        return 0
    if isinstance(mlp, MlpSpec):
        return model.hidden * _matrices(mlp) * mlp.ffn
    experts = int((mlp.latent or model.hidden) * mlp.n_products * mlp.met_experts * mlp.expert_ffn)
    return experts + model.hidden * (2 * mlp.latent + mlp.n_products * mlp.shared_ffn + mlp.n_scored)


def attention_flops_per_pair(model: ModelSpec, *, on_latents: bool = False) -> float:
    """FLOPs of one query and one key in all layers: a dot product for the score and one for the value, each head.

    on_latents: where they are latent attention's, as in our engine's prefill.
    """
    return float(
        sum(
            2 * n * layer.attention.n_heads * sum(attention_widths(layer.attention, on_latents=on_latents))
            for layer, n in model.layer_groups
            if layer.attention.state is None
        )
    )


def weight_bytes_stored(model: ModelSpec, quant: QuantSpec, *, tp: int = 1, layout: Layout = PLAIN) -> float:
    """Bytes of weights one device must hold: all experts, split evenly (embedding and head too).

    What is not split stands on each: norms, routers, what makes latents or mixes streams, a KV head where heads are fewer than
    devices. Values of two KV heads lie with each of the two.
    Attention-data parallel splits the experts alone, stages of a pipeline all.
    """
    counts = parameters_by_component(model)
    ends = counts["embedding"] + counts["head"]
    inner = sum(counts.values()) - ends - counts["experts"]
    small = counts["norms"] + counts["router"]
    repeated = sum(n * _repeated(model, layer.attention, tp) for layer, n in model.layer_groups)
    stored = ends * quant.head_bytes + counts["experts"] * quant.expert_bytes / layout.dp
    repeated += (tp - 1) * counts["streams"] + sum(
        n * _twice(model, layer.attention) for layer, n in model.layer_groups
    )
    stored += (inner - small + repeated) * quant.weight_bytes + small * tp * 2.0
    return stored / tp / layout.pp


def kv_bytes_stored(model: ModelSpec, kv: KVSpec, context_tokens: int, *, is_ours: bool = False) -> float:
    """KV bytes of one sequence over the whole model, unsplit and unrounded (what a hand-off must move)."""
    return kv_bytes_of_tokens(model, kv, context_tokens, 1, is_ours=is_ours)


def _attention_matrices(model: ModelSpec, attention: AttentionLayer) -> int:
    mla, state, hidden, heads = attention.mla, attention.state, model.hidden, attention.n_heads
    if state is not None:
        return hidden * (state.n_projected + state.width) + state.n_second
    if mla is None:
        read = heads * attention.head_dim + attention.kv_width + attention.gate_width
        return hidden * (read + attention.width) + attention.beside * read + _index_matrices(model, attention)
    q_head = mla.nope_dim + mla.rope_dim
    q = hidden * heads * q_head
    if mla.q_rank is not None:
        q = mla.q_rank * hidden + mla.q_inputs * (heads * q_head + mla.is_mixed * attention.gate_width)
    if not mla.is_mixed:
        q += hidden * attention.gate_width
    latent = hidden * (attention.keeps_kv * mla.row + _entry_rows(attention)) + mla.n_inner(heads)
    return q + latent + heads * mla.v_dim * hidden + _index_matrices(model, attention)


def _entry_rows(attention: AttentionLayer) -> int:
    """Outputs of what entries are made of."""
    return 0 if attention.entries is None else 2 * attention.entries.n_series * attention.cache.attended_width


def _index_matrices(model: ModelSpec, attention: AttentionLayer) -> int:
    own, mla = attention.own_index, attention.mla
    n_inputs = model.hidden if mla is None or mla.q_rank is None else mla.q_rank
    return 0 if own is None else own.n_matrices(n_inputs, model.hidden)


def _index_norms(model: ModelSpec, attention: AttentionLayer) -> int:
    return 0 if attention.own_index is None else attention.own_index.n_small(model.hidden)


def _repeated(model: ModelSpec, attention: AttentionLayer, tp: int) -> int:
    """Parameters of projections that tp devices hold together beyond one of each."""
    mla = attention.mla
    if mla is not None:
        down = model.hidden * ((mla.q_rank or 0) + attention.keeps_kv * mla.row + _entry_rows(attention))
        return (tp - 1) * (down + _index_matrices(model, attention))
    if attention.state is not None:
        state = attention.state  # what lies between two steps, and decays by key, each has whole
        if state.is_by_channel:  # of units each has its heads', of selective ones its key heads'
            copies = max(tp - state.n_key_heads, 0)
            return 0 if state.is_unit else copies * state.n_second // state.n_key_heads
        small = state.n_rates + (state.rank * (2 if state.n_decays else 1) if state.rank else state.n_decays)
        return (tp - 1) * (small * model.hidden + state.rank * state.n_decays)
    copied = max(tp - attention.n_kv_heads, 0) * attention.kv_width // attention.n_kv_heads
    # and of what every layer has of its own the first projections
    return (
        3 * (tp - 1) * attention.own_rank * (model.hidden + attention.beside)
        + copied * (model.hidden + attention.has_qkv_bias)
        + (tp - 1) * _index_matrices(model, attention)
    )


def _twice(model: ModelSpec, attention: AttentionLayer) -> int:
    """Parameters of the projection of values that lie a second time."""
    values = attention.own_kv_heads * (attention.value_dim - attention.head_dim) if attention.differs else 0
    return values * (model.hidden + attention.has_qkv_bias)


def _attention(model: ModelSpec, spec: AttentionLayer) -> int:
    count, state = _attention_matrices(model, spec), spec.state
    if state is not None:
        return count + state.n_small + spec.has_qkv_bias * state.n_projected + spec.has_o_bias * model.hidden
    if spec.mla is not None:
        biases = (spec.mla.q_rank or 0) + spec.keeps_kv * spec.mla.row + model.hidden
        norms = spec.keeps_kv * spec.mla.norm_width + (spec.mla.q_rank or 0)
        norms += 0 if spec.entries is None else spec.entries.n_small(spec.mla.row)
        norms += _index_norms(model, spec) + (spec.has_sinks + 2 * spec.scales_heads) * spec.n_heads
        return count + norms + (biases if spec.has_o_bias else 0)
    if spec.has_qkv_bias:
        count += (1 + spec.has_gate) * spec.n_heads * spec.head_dim + spec.kv_width
        count -= 0 if spec.has_k_bias else spec.own_kv_heads * spec.head_dim
    if spec.has_o_bias:
        count += model.hidden
    if spec.has_sinks:
        count += spec.n_heads
    if spec.related is not None and not spec.related.is_shared:  # projections of rows of distances
        count += (2 * model.hidden + 1 + spec.has_k_bias) * spec.n_heads * spec.head_dim
    if spec.differs:  # two vectors for each of the two numbers whose difference is learned
        count += 4 * spec.head_dim
    if spec.qk_norm in (QkNorm.HEAD, QkNorm.TURNED):
        count += (2 if spec.own_kv_heads else 1) * spec.head_dim
    elif spec.qk_norm is QkNorm.CENTRED:
        count += (4 if spec.own_kv_heads else 2) * spec.head_dim
    elif spec.qk_norm in (QkNorm.FULL, QkNorm.HEADS):
        count += (spec.n_heads + spec.own_kv_heads) * spec.head_dim
    return count + _index_norms(model, spec)


def _matrices(mlp: MlpSpec) -> int:
    return 3 if mlp.is_gated else 2


def _mlp(model: ModelSpec, mlp: MlpSpec) -> int:
    bias = (_matrices(mlp) - 1) * mlp.ffn + model.hidden if mlp.has_bias else model.hidden * mlp.has_down_bias
    own = 2 if mlp.activation is Activation.XIELU else 0
    return _matrices(mlp) * model.hidden * mlp.ffn + bias + own


def _mlp_counts(model: ModelSpec, mlp: MlpSpec | MoeSpec | None) -> dict[str, int]:
    if mlp is None:
        return {}
    return {"mlp": _mlp(model, mlp)} if isinstance(mlp, MlpSpec) else _moe(model, mlp)


def _moe(model: ModelSpec, moe: MoeSpec) -> dict[str, int]:
    """Under shared experts stands what every token meets: what takes the stream to latents and back, too."""
    width = moe.latent or model.hidden
    bias = (moe.n_products - 1) * moe.expert_ffn + width if moe.has_expert_bias else 0
    of_shared = (moe.n_products - 1) * moe.shared_ffn + model.hidden if moe.has_shared_bias and moe.shared_ffn else 0
    return {
        "router": model.hidden * (moe.n_scored + moe.is_apart)
        + moe.n_scored * (moe.has_router_bias + moe.has_choice_bias * moe.choice_rows + moe.is_apart),
        "experts": moe.n_experts * (moe.n_products * width * moe.expert_ffn + bias),
        "shared_experts": model.hidden * (moe.n_products * moe.shared_ffn + 2 * moe.latent + moe.has_shared_gate)
        + of_shared
        + 2 * width * (moe.behind_eps is not None),
    }


def _norms(model: ModelSpec) -> int:
    per_norm = model.hidden * (model.has_norm_weight + model.has_norm_bias)
    has_first = model.has_embedding_norm and model.has_embedding_norm_weight
    ends = per_norm * end_norms(model) + has_first * per_norm // model.hidden * model.row_width
    held = [(layer, n) for layer, n in model.layer_groups if layer.shares is None]
    of_layers = sum(n * (layer.norms.count + own_norms(layer.mlp)) for layer, n in held)
    inner = sum(n * inner_width(model, layer) for layer, n in model.layer_groups)
    # two gates of sums, where the norm behind attention has no weight
    weighed = model.n_layers * model.hidden * (model.residual_temperature is not None)
    return of_layers * per_norm + inner + ends + weighed + _learned_turns(model)


def _learned_turns(model: ModelSpec) -> int:
    """One number of each pair of dimensions, for all layers."""
    ropes = (layer.attention.rope for layer in model.layers)
    return next((rope.rotary_dim // 2 for rope in ropes if rope is not None and rope.is_learned), 0)
