"""What the description of a model family holds: names of architectures, keys of the config, how layers are made, tensor names.

`families` is the table of them. Plain data, no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from diptych.models.gates import Activation
from diptych.models.mlp import Scores
from diptych.models.spec import Norms, QkNorm
from diptych.models.states import StateRule

NORM_NAMES: Mapping[Norms, tuple[str | None, str | None, str | None, str | None]] = MappingProxyType({
    Norms.BEFORE: ("input_layernorm", None, "post_attention_layernorm", None),
    Norms.AFTER: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    Norms.AROUND: (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    Norms.AROUND_MLP: ("input_layernorm", None, "post_attention_layernorm", "post_mlp_layernorm"),
    Norms.BEFORE_MLP: (None, None, "post_attention_layernorm", None),
    Norms.SUMS: (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    Norms.KEPT: ("input_layernorm", None, "post_attention_layernorm", None),
    Norms.BARE: (None, None, None, None),
    Norms.ALONE: ("input_layernorm", None, None, None),
    Norms.MLP_ALONE: (None, None, "post_attention_layernorm", None),
    Norms.SHARED: ("input_layernorm", None, None, None),
    Norms.PARALLEL: ("input_layernorm", None, None, None),
    Norms.BESIDE: ("input_layernorm", None, "post_attention_layernorm", None),
    Norms.ASIDE: ("input_layernorm", None, "pre_ff_layernorm", None),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """A layer between a state and the logits of labels: its name, what bends what it gives, and the norm behind that."""

    name: str
    curve: Activation | None = None
    norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names inside a layer, without '.weight'. qkv and gate_up: separate projections, or one that is already stacked.

    qkv_by_head: its rows lie by KV head: the queries that share it, its key, its value. qkv_parts: they lie in so many parts,
    of each the queries, values and keys of its heads. qkv_biases: of stacked q, k and v, where they stand apart, or None.
    of_distances: what projects rows of distances as queries, and as keys. transposes: projections of a layer are stored as
    [inputs, outputs].
    up_first: in the projection that is stacked, up's rows come before gate's.
    embedding, embedding_norm, positions, types, tasks, distances, final_norm, layers, head: at the ends, behind a prefix.
    embedding_ending: what is there in place of '.weight'. transform: what stands before the head, a projection and a norm.
    words: what takes rows of the embedding to the stream's width, of families that may have others.
    mlp: where the MLP may be found, tried in order. expert: gate (if any), up and down of one expert, where they are separate;
    stacked: of all experts in one tensor each, is_transposed: as [inputs, outputs] (None: in some files), takes_turns: rows of
    gate and up in turn, is_flat: below each other in one matrix each, down as [inputs, outputs].
    transposes_router: that is stored as [inputs, outputs].
    base: what may lie between a projection's name and .weight, where files hold adapters of their own beside it.
    o_bias: of o, where it has a name of its own. o_norm, down_norm: of `ModelSpec.has_inner_norms`, beside attention's
    projections and the MLP's. apart: norms before the mixture, behind shared experts, behind it, of `MoeSpec.is_apart`.
    choice_bias: with a point in front, of the layer; choice_axes: what it has before its experts; choice_bias_may_lack: files
    without one mean zeros. norms: before attention, after it, before the MLP, after it. q_norm, k_norm: where each head has a
    weight of its own they are stacked in one tensor, or {} stands for the head. attention, norms: {half} stands for the part
    of a layer that has two. latent: what takes the stream to experts and back, of `MoeSpec.latent`. gate: what gates the
    heads, where it is a tensor of its own. dense: where a dense MLP lies, if not where mlp says. states: where tensors of a
    layer with a state lie. states_in: its projections, by a delta rule of q, k and v (or of each), of the gate, of beta, of
    the decay, or of the first two and of the last two together, by key head; of a steady one q, k and v by head, and the
    gate; else one. states_o, states_norm: what it leaves by, and the norm of it. taps: of its convolution, or of q's, k's and
    v's where they lie apart. reads_taps, steps, step_norms: of a selective state, what makes steps, keys and queries of what
    taps give, the steps' second projection, and norms of the three; selects_by_head: the first two, decays and skips lie by key
    head, and what taps see in turn with what gates. units: what precedes the names of recurrent units. aside: what precedes
    those of layers that stand aside, behind: their last projection, after_aside: what precedes those of the layer that reads
    it, which a checkpoint has in one with them. wraps_decays: the numbers of its heads' decays have axes of one around them.
    index: what precedes the names of an index of blocks. others: what some files call the embedding, a norm, the choice bias,
    stacked experts, or what precedes those, and projections, and sinks.
    """

    embedding: str = "embed_tokens"
    embedding_ending: str = ".weight"
    embedding_norm: str = "embedding_norm"
    positions: str = "embed_positions"
    types: str = "token_type_embeddings"
    tasks: str = "embeddings.task_type_embeddings"
    distances: str = "encoder.relative_attention_bias"
    of_distances: tuple[str, str] = ("self.pos_query_proj", "self.pos_key_proj")
    final_norm: str | None = "norm"
    layers: str = "layers"
    head: str = "lm_head"
    transform: tuple[str, str] | None = None
    words: str | None = None
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    qkv_by_head: bool = False
    qkv_biases: tuple[str | None, ...] = ()
    qkv_parts: int = 0
    transposes: bool = False
    base: str | None = None
    o: str = "o_proj"
    o_bias: str | None = None
    o_norm: str = "attn_sub_norm"
    gate: str | None = None
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    sinks: str = "sinks"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    up_first: bool = False
    down: str = "down_proj"
    down_norm: str = "ffn_sub_norm"
    mlp: tuple[str, ...] = ("mlp.",)
    expert: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj")
    is_transposed: bool | None = False
    takes_turns: bool = False
    is_flat: bool = False
    router: str = "gate"
    transposes_router: bool = False
    choice_bias: str = "gate.e_score_correction_bias"
    choice_axes: tuple[int, ...] = ()
    choice_bias_may_lack: bool = False
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    apart: tuple[str, str, str] = (
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    )
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    dense: str | None = None
    states: str = "linear_attn"
    states_o: str = "out_proj"
    states_norm: str = "norm"
    taps: tuple[str, ...] = ("conv1d",)
    reads_taps: str = "x_proj"
    steps: str = "dt_proj"
    selects_by_head: bool = False
    step_norms: tuple[str, str, str] = ("dt_layernorm", "b_layernorm", "c_layernorm")
    units: str = "rg_lru."
    aside: str = "shared_transformer."
    behind: str = "linear"
    after_aside: str = ""
    wraps_decays: bool = False
    index: str = "indexer."
    states_in: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    norms: Mapping[Norms, tuple[str | None, str | None, str | None, str | None]] = field(
        default_factory=lambda: NORM_NAMES
    )
    others: Mapping[str, str] = field(default_factory=dict)

    def of_half(self, half: int) -> TensorNames:
        """Of one part of a layer."""
        if half and self.after_aside:
            before = self.after_aside
            alone = (f"{before}{self.norms[Norms.ALONE][0]}", None, None, None)
            return replace(self, states=f"{before}{self.states}", norms={Norms.ALONE: alone})
        if "{half}" not in self.attention:
            return self

        def named(name: str | None) -> str | None:
            return name and name.replace("{half}", str(half))

        norms = {kind: (named(a), named(b), named(c), named(d)) for kind, (a, b, c, d) in self.norms.items()}
        return replace(self, attention=self.attention.replace("{half}", str(half)), norms=norms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Where a field is `bool | str`, a string names the key of the config that decides.

    keys: every key read, with its class default; None: from the others. fixed: known keys and the values they may have.
    unread: keys that mean something elsewhere, and nothing here, whatever they say.
    renamed: this class's name of a key -> the name used here. sections: of the config, whose keys count as its own.
    by_layer: keys that may hold a list with the same for each layer. numbered: keys with a number
    for each layer -> a list of names of ours, and what 0, 1, ... stand for in it.
    full_every: without layer_types, every so many-th layer attends to everything, full_first: beginning with the first,
    first_is_full: and the first, too; windows_begin: every other layer before max_window_layers is windowed, not all behind
    it. local_theta: the key with the rotary base of windowed layers, which then have no scaling.
    longrope_names: rope types that mean longrope here. turns_windowed_only: layers that attend to everything have no rotary
    positions; turns_full_alone: unless the model has no window. turns_by_kind: rope_parameters says of each kind of layers
    how it turns, or null. turns_back: as in `Rope`. attends_in_chunks: what is `sliding_window` here is the length of chunks
    that layers with rotary positions attend within; scales_queries: queries of the other layers are scaled by position.
    mixture_norms: of layers with mixtures, if not the others'; first_norms: of the first layer. positions_offset: learned
    positions, and how many come first; counts_offset: max_position_embeddings counts those, too; computes_positions: sines and
    cosines in their place. has_last_bias: o has a bias in the last layer.
    is_encoder: each token attends to all others, and no head writes tokens. classifier: the layers that make a score of a
    state. projects_words: rows of the embedding are projected whatever their width. shares_layers: all layers have the weights
    of the first. types_may_lack: type_vocab_size may be 0. down_bias: as `MlpSpec.has_down_bias`.
    norms_unturned: heads are normed without a weight where they know no positions, too.
    parallel_key: the key that says whether a layer norms by `parallel_norms`: attention and MLP side by side, or behind each.
    scores: or the key that says it. has_head_bias: the output projection has one. has_sinks: or the keys that say it, of layers
    that attend to everything and of the others. has_slopes: scores fall with the distance (ALiBi), down to a head where they
    do by 2^-alibi_bias_max.
    built_as: the class of another family with which transformers builds this one.
    attention_scale: of scores, whatever the heads' width. has_v_norm: heads of v are normed without a weight. full_last: the
    last layer attends to everything. has_full_heads: layers that attend to everything have heads of their own number and
    width (`read_streams.full_heads`). scales_layers, has_inner_norms: as in `ModelSpec`.
    mixes_apart: the dense MLP is the shared expert of a mixture, as `MoeSpec.is_apart` says.
    has_blocks: attention and MLPs are blocks of their own; has_pairs: each layer has a state beside its attention;
    has_states_alone: each has a state and nothing else; has_halves: each has two of attention and of dense MLPs, and a mixture
    beside the first, added behind the second (`reading.blocks`); shares_blocks: before some that have a state stands a block
    aside, whose weights layers share (`reading.shared`).
    differs, norms_given, gates_heads, gate_by: as `AttentionLayer` has them; mixes_queries: as `MlaSpec.is_mixed` says.
    index_turns_last: of an index as `IndexSpec.turns_last` says, and the key's norm has the model's eps. norms_latents_alike:
    norms of latents have it, too. shares_latents: layers may, as `kv_source_layers` says, beside an index as
    `IndexSpec.is_apart` has it; queries are scaled by head, and those of layers without rotary positions have no part that
    would turn. learns_turns: as `Rope.is_learned`.
    scales_latents: behind those they are multiplied by the root of the model's width over theirs.
    has_other_experts: of pictures, as many as of text and behind them, with a row of their own of the choice's bias; sizes of
    both are in lists. limits_all: `swiglu_limit` is of dense MLPs and shared experts, too. has_end_connection: as
    `HyperSpec.has_end`.
    norms_experts: as `MoeSpec.behind_eps` says, by the eps of norms of what layers add; the router's outputs are multiplied as
    logits are.
    state_rule: some layers have a state in place of keys and values, which moves on by it (`reading.states`): those that
    layer_types names so, or all but every `full_every`-th. state_norms, state_norm_eps: theirs, if not the others'.
    spare_embeddings: rows of the embedding behind the vocabulary, for tokens that nobody writes.
    theta_may_be_null: a rotary base of null means that no positions are known. has_attention_gate: as
    `AttentionLayer.has_gate`; its rows lie behind each query head's unless names.gate says where. needs_layer_types: no layer
    is what it is without being named so.
    prefixes: where tensors may begin, tried in order; ignored: parts of names of tensors that nobody needs.
    """

    name: str
    architectures: tuple[str, ...]
    keys: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    by_layer: tuple[str, ...] = ()
    numbered: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    more_model_types: tuple[str, ...] = ()
    built_as: str | None = None
    norms: Norms = Norms.BEFORE
    mixture_norms: Norms | None = None
    first_norms: Norms | None = None
    parallel_key: str | None = None
    parallel_norms: Norms = Norms.PARALLEL
    norm_offset: float = 0.0
    final_norm_offset: float | None = None
    centres_norms: bool = False
    has_norm_weight: bool | str = True
    has_norm_bias: bool | str = False
    has_embedding_norm: bool = False
    has_embedding_norm_weight: bool = True
    projects_words: bool = False
    shares_layers: bool = False
    has_scaled_embedding: bool | str = False
    qk_norm: QkNorm = QkNorm.NONE
    qk_norm_key: str | None = None
    norms_unturned: bool = False
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    has_last_bias: bool = False
    mlp_bias: bool | str = False
    has_head_bias: bool | str = False
    down_bias: bool = False
    is_gated: bool | str = True
    gelu_means_tanh: bool = False
    activation: Activation | None = None
    has_sinks: bool | tuple[str, str] = False
    has_slopes: bool = False
    has_v_norm: bool = False
    attention_scale: float | None = None
    full_every: int | None = None
    full_first: bool = False
    first_is_full: bool = False
    needs_layer_types: bool = False
    full_last: bool = False
    has_full_heads: bool = False
    scales_layers: bool = False
    has_inner_norms: bool = False
    windows_begin: bool = False
    local_theta: str | None = None
    longrope_names: tuple[str, ...] = ("su",)
    is_interleaved: bool | str = False
    turns_windowed_only: bool = False
    turns_full_alone: bool = False
    turns_by_kind: bool = False
    turns_back: bool = False
    attends_in_chunks: bool = False
    scales_queries: bool = False
    positions_offset: int | None = None
    counts_offset: bool = False
    computes_positions: bool = False
    types_may_lack: bool = False
    is_encoder: bool = False
    classifier: tuple[HeadLayer, ...] = (HeadLayer("score"),)
    renormalises: bool | str = "norm_topk_prob"
    scores: Scores | str = Scores.SOFTMAX
    group_best: int = 1
    has_router_bias: bool = False
    has_choice_bias: bool | str = False
    has_other_experts: bool = False
    has_expert_bias: bool = False
    has_shared_gate: bool = False
    mixes_apart: bool = False
    has_blocks: bool = False
    has_pairs: bool = False
    has_states_alone: bool = False
    has_halves: bool = False
    shares_blocks: bool = False
    state_rule: StateRule | None = None
    state_norms: Norms | None = None
    state_norm_eps: float | None = None
    theta_may_be_null: bool = False
    has_attention_gate: bool | str = False
    spare_embeddings: int = 0
    differs: bool = False
    norms_given: bool = False
    norms_experts: bool = False
    gates_heads: bool | str = False
    gate_by: Activation = Activation.SIGMOID
    mixes_queries: bool = False
    index_turns_last: bool = False
    norms_latents_alike: bool = False
    shares_latents: bool = False
    learns_turns: bool = False
    scales_latents: bool = False
    limits_all: bool = False
    has_end_connection: bool = True
    weighs_input: bool = False
    reads_mxfp4: bool = False
    names: TensorNames = field(default_factory=TensorNames)
    prefixes: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    @property
    def model_types(self) -> tuple[str, ...]:
        """What model_type may say."""
        return (self.name, *self.more_model_types)
