"""How many parameters a model has, by component: the checksum that catches a wrong row in the model table.

>>> from diptych.cost.tables import model_spec
>>> parameter_count(model_spec("llama-3.1-8b"))
8030261248
"""

from __future__ import annotations

from diptych.ground.specs import KVSpec, QuantSpec
from diptych.models.spec import ModelSpec, QkNorm


def parameters_by_component(model: ModelSpec) -> dict[str, int]:
    """Exact parameter count of each component over all layers."""
    counts = {
        "embedding": (model.vocab_size + model.n_position_embeddings) * model.hidden,
        "head": 0 if model.is_tied else model.vocab_size * model.hidden,
        "attention": model.n_layers * _attention(model),
        "mlp": 0,
        "router": 0,
        "experts": 0,
        "shared_experts": 0,
        "norms": _norms(model),
    }
    for layer in range(model.n_layers):
        if model.is_moe_layer(layer):
            for name, count in _moe(model).items():
                counts[name] += count
        else:
            counts["mlp"] += _mlp(model)
    return counts


def parameter_count(model: ModelSpec) -> int:
    """All parameters; tied embeddings are counted once."""
    return sum(parameters_by_component(model).values())


def active_parameter_count(model: ModelSpec) -> int:
    """Parameters one token is multiplied with: no input embedding (unless tied), only the routed experts."""
    counts = parameters_by_component(model)
    active = sum(counts.values()) - counts["embedding"] + (model.vocab_size * model.hidden if model.is_tied else 0)
    if model.moe is None:
        return active
    return active - counts["experts"] + counts["experts"] * model.moe.experts_per_token // model.moe.n_experts


def linear_parameter_count(model: ModelSpec) -> int:
    """Matrix parameters one token meets in the layers (no head, no norms, no biases): half the linear FLOPs/token."""
    total = 0
    for layer in range(model.n_layers):
        total += _attention_matrices(model)
        if model.is_moe_layer(layer) and model.moe is not None:
            moe = model.moe
            per_expert = 3 * model.hidden * moe.expert_ffn
            total += moe.experts_per_token * per_expert + model.hidden * moe.n_experts
            total += 3 * model.hidden * moe.shared_ffn
        else:
            assert model.mlp is not None
            total += (3 if model.mlp.is_gated else 2) * model.hidden * model.mlp.ffn
    return total


def weight_bytes_stored(model: ModelSpec, quant: QuantSpec, *, tp: int = 1) -> float:
    """Bytes of weights one of `tp` devices must hold: all experts, split evenly (embedding and head too)."""
    counts = parameters_by_component(model)
    ends = counts["embedding"] + counts["head"]
    inner = sum(counts.values()) - ends - counts["experts"]
    small = counts["norms"] + counts["router"]
    stored = ends * quant.head_bytes + counts["experts"] * quant.expert_bytes
    stored += (inner - small) * quant.weight_bytes + small * 2.0
    return stored / tp


def kv_bytes_stored(model: ModelSpec, kv: KVSpec, context_tokens: int) -> float:
    """KV bytes of one sequence over the whole model, unsplit and unrounded (what a hand-off must move)."""
    width = 2 * model.n_kv_heads * model.head_dim
    if model.mla is not None:
        width = model.mla.kv_rank + model.mla.rope_dim
    tokens = sum(context_tokens if w is None else min(context_tokens, w) for w in model.windows)
    return tokens * width * kv.bytes_per_element


def _attention_matrices(model: ModelSpec) -> int:
    mla, hidden, heads = model.mla, model.hidden, model.n_heads
    if mla is None:
        width = (heads + 2 * model.n_kv_heads) * model.head_dim
        return hidden * width + heads * model.head_dim * hidden
    q_head = mla.nope_dim + mla.rope_dim
    q = hidden * heads * q_head if mla.q_rank is None else mla.q_rank * (hidden + heads * q_head)
    latent = hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
    return q + latent + heads * mla.v_dim * hidden


def _attention(model: ModelSpec) -> int:
    count = _attention_matrices(model)
    if model.mla is not None:
        return count + model.mla.kv_rank + (model.mla.q_rank or 0)
    spec = model.attention
    if spec.has_qkv_bias:
        count += (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    if spec.has_o_bias:
        count += model.hidden
    if spec.has_sinks:
        count += model.n_heads
    if spec.qk_norm is QkNorm.HEAD:
        count += 2 * model.head_dim
    elif spec.qk_norm is QkNorm.FULL:
        count += (model.n_heads + model.n_kv_heads) * model.head_dim
    return count


def _mlp(model: ModelSpec) -> int:
    mlp = model.mlp
    assert mlp is not None
    matrices = 3 if mlp.is_gated else 2
    bias = (matrices - 1) * mlp.ffn + model.hidden if mlp.has_bias else 0
    return matrices * model.hidden * mlp.ffn + bias


def _moe(model: ModelSpec) -> dict[str, int]:
    moe = model.moe
    assert moe is not None
    bias = 2 * moe.expert_ffn + model.hidden if moe.has_expert_bias else 0
    return {
        "router": model.hidden * moe.n_experts + (moe.n_experts if moe.has_router_bias else 0),
        "experts": moe.n_experts * (3 * model.hidden * moe.expert_ffn + bias),
        "shared_experts": 3 * model.hidden * moe.shared_ffn + (model.hidden if moe.has_shared_gate else 0),
    }


def _norms(model: ModelSpec) -> int:
    per_norm = model.hidden * (2 if model.has_norm_bias else 1)
    ends = per_norm * (2 if model.has_embedding_norm else 1)
    return model.n_layers * model.norms.count * per_norm + ends
