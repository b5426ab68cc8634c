"""What fits: weights, activations and KV in a device's memory, the largest batch and the longest context."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from diptych.cost.components import LOGIT_BYTES, SAID_BYTES
from diptych.cost.kv_bytes import kv_bytes_of_context, kv_bytes_of_tokens
from diptych.cost.parameters import weight_bytes_stored
from diptych.cost.setup import Setup
from diptych.cost.streams import related_matrices
from diptych.ground.formats import engine_quant, head_format
from diptych.ground.specs import QuantSpec
from diptych.models.latent import IndexSpec
from diptych.models.mlp import MlpSpec, MoeSpec
from diptych.models.spec import ModelSpec
from diptych.models.streams import GatedSpec

# The part of memory an engine may use; the rest is the runtime's, the allocator's and other programs'.
MEMORY_SHARE = 0.9
# CUDA context, graphs and libraries on a GPU; next to nothing elsewhere.
GPU_RESERVE_BYTES = 2e9
# Tokens of the largest step, which sizes the activation buffers.
MAX_STEP_TOKENS = 8192
MAX_CONTEXT_SEARCHED = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """What of a device's memory an engine takes for itself.

    share: of all memory, weights among it; is_of_free: of what the weights and the buffers leave, for KV alone.
    has_buffers: whether a share of all memory holds the buffers too, which lie beside it else.
    """

    share: float = MEMORY_SHARE
    is_of_free: bool = False
    has_buffers: bool = True

    def free(self, memory: float, *, weights: float, buffers: float) -> float:
        """Bytes for keys and values; below 0 where the rest does not fit."""
        if self.is_of_free:
            return (memory - weights - buffers) * self.share
        return memory * self.share - weights - (buffers if self.has_buffers else 0.0)


USUAL_RULE = MemoryRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Bytes of one device, and what fits: 0 sequences or tokens where nothing does.

    kv_tokens: of all sequences together, each as long as was asked: where layers have windows, longer ones hold more of them.
    """

    memory_bytes: float
    weight_bytes: float
    activation_bytes: float
    free_kv_bytes: float
    kv_tokens: int
    max_batch: int  # at the asked context
    max_context_tokens: int  # at the asked batch; at most what the model accepts
    is_fitting: bool


def capacity_of(setup: Setup, *, context_tokens: int, batch: int, rule: MemoryRule = USUAL_RULE) -> Capacity:
    """What one of the setup's devices holds."""
    hardware, layout = setup.hardware, setup.layout
    weights = _weight_bytes(setup) + setup.adapter_bytes
    activations = activation_bytes_of(setup)
    reserve = GPU_RESERVE_BYTES if hardware.kind in ("gpu", "tpu", "accelerator") else 0.0
    free = rule.free(hardware.memory_bytes, weights=weights, buffers=activations + reserve)
    group_free = free * layout.pp  # stages hold their layers of all sequences, groups sequences of their own
    max_batch = max(int(group_free // _kv_bytes(setup, context_tokens)), 0) * layout.dp
    longest = _longest_context(setup, group_free / max(-(-batch // layout.dp), 1))
    return Capacity(
        memory_bytes=hardware.memory_bytes,
        weight_bytes=weights,
        activation_bytes=activations,
        free_kv_bytes=max(free, 0.0),
        kv_tokens=_kv_tokens(setup, free, context_tokens, max_batch),
        max_batch=max_batch,
        max_context_tokens=longest,
        is_fitting=max_batch >= batch,
    )


def _kv_tokens(setup: Setup, free_bytes: float, context_tokens: int, max_batch: int) -> int:
    """Where no layer keeps keys and values, those of as many sequences as there is room for states of."""
    token_bytes = _token_bytes(setup, context_tokens)
    if not token_bytes:
        return max_batch * context_tokens
    return max(int(free_bytes * setup.layout.parts // token_bytes), 0)


def _weight_bytes(setup: Setup) -> float:
    """Of one device; this machine's as the engine holds them."""
    if setup.calibration.is_local:
        return _held_bytes(setup.model, setup.quant) / setup.tp
    return weight_bytes_stored(setup.model, setup.quant, tp=setup.tp, layout=setup.layout)


def _kv_bytes(setup: Setup, context_tokens: int) -> float:
    return kv_bytes_of_context(setup.model, setup.kv, context_tokens, tp=setup.tp, is_ours=setup.calibration.is_local)


def _token_bytes(setup: Setup, context_tokens: int) -> float:
    """Of each token of a sequence of so many, windowed layers counted by what they keep of it."""
    is_ours = setup.calibration.is_local
    return kv_bytes_of_tokens(setup.model, setup.kv, context_tokens, setup.tp, is_ours=is_ours) / context_tokens


def engine_weight_bytes(model: ModelSpec, weights: str) -> float:
    """Bytes of all weights in the engine's format of that name."""
    return _held_bytes(model, engine_quant(weights, head_format(weights)))


def _held_bytes(model: ModelSpec, quant: QuantSpec) -> float:
    """With the embedding, which the engine keeps in 16 bits (32 for fp32). A tied one is the head itself where both have 16
    or 32 bits.
    """
    table = model.n_embeddings * model.row_width
    plain = 4.0 if quant.name == "fp32" else 2.0
    stored = weight_bytes_stored(model, quant)
    stored += sum(n * related_matrices(layer.attention) for layer, n in model.layer_groups) * plain
    if model.is_tied:
        return stored if quant.head_bytes >= 2.0 else stored + table * plain
    return stored + table * (plain - quant.head_bytes)


def activation_bytes_of(setup: Setup) -> float:
    """Buffers of the largest step: residual, normed input, projections, the widest of MLPs, and logits of a few rows."""
    model = setup.model
    tokens = min(MAX_STEP_TOKENS, model.max_context_tokens or MAX_STEP_TOKENS)
    layers = [layer.attention for layer, _ in model.layer_groups]
    attention = max(one.n_heads * one.head_dim + one.width for one in layers)
    attention = max(
        attention, *(2 * one.n_heads * one.mla.row for one in layers if one.mla is not None and one.mla.n_groups), 0
    )
    mlp = max(_mlp_width(setup, layer.mlp) for layer, _ in model.layer_groups)
    rows = model.n_streams if isinstance(model.streams, GatedSpec) else 1  # whose norms and gates are as wide as they
    width = 3 * rows * model.hidden + max(mlp, attention / setup.tp)
    index = max((_index_bytes(one.own_index) for one in layers), default=0)
    logits = 256 * model.vocab_size * model.has_head * LOGIT_BYTES / setup.tp
    said = max((2 * one.n_heads * one.related.n_places for one in layers if one.related is not None), default=0)
    of_token = width * setup.quant.activation_bytes + index + said * SAID_BYTES / setup.tp
    return tokens * of_token + logits


def _index_bytes(index: IndexSpec | None) -> int:
    """Of one token: its choice, the queries as they come and as they turned, its key and the heads' weights."""
    if index is None:
        return 0
    queries = index.n_heads * (4 * index.head_dim + 2 * index.key_width)
    return 4 * index.n_choices + queries + 4 * (index.n_key_inputs + index.n_weights)


def _mlp_width(setup: Setup, mlp: MlpSpec | MoeSpec | None) -> float:
    """Values of one token: gate and up of an MLP; of a mixture those of each expert that the token has, and what each leaves,
    which is summed when all have.
    """
    if mlp is None:
        return 0.0
    if isinstance(mlp, MlpSpec):
        return 2 * mlp.ffn / setup.tp
    layout = setup.layout
    groups = max(layout.ep, layout.dp)  # that have whole experts, and each its part of all tokens' rows
    rows = mlp.met_experts * layout.dp / groups
    slices = setup.tp * layout.dp / groups
    width = mlp.latent or setup.model.hidden
    return max(rows * (width + 2 * mlp.expert_ffn / slices), 2 * mlp.shared_ffn / setup.tp)


def _longest_context(setup: Setup, free_bytes: float) -> int:
    limit = setup.model.max_context_tokens or MAX_CONTEXT_SEARCHED

    def fits(tokens: int) -> bool:
        return _kv_bytes(setup, tokens) <= free_bytes

    if fits(limit):
        return limit
    return bisect_left(range(1, limit), True, key=lambda tokens: not fits(tokens))
