"""From config.json to a `ModelSpec`: one reading for the engine and the planner, of keys in one set of words (`canonical`).

>>> config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
>>> read_model(HfConfig(config)).head_dim
16
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from diptych.ground.errors import LoadError, UnsupportedModel
from diptych.models.config import HfConfig, read_json
from diptych.models.families.family import Family
from diptych.models.families.table import BY_ARCHITECTURE, BY_MODEL_TYPE, SUPPORTED, WRAPPERS, with_head
from diptych.models.files import no_model
from diptych.models.gates import Activation
from diptych.models.latent import IndexSpec
from diptych.models.mlp import MlpSpec, MoeSpec, Scores
from diptych.models.positions import QueryScale, Rope, slopes
from diptych.models.reading.canonical import canonical
from diptych.models.reading.deepseek_v4 import with_entries
from diptych.models.reading.embedding import base_stretch, embedding_width, residual_scale, types_of, words_of
from diptych.models.reading.encoders import by_distance
from diptych.models.reading.gpt import arrangement
from diptych.models.reading.heads import Heads, HeadsByWindow
from diptych.models.reading.index import layer_indices
from diptych.models.reading.latents import latents
from diptych.models.reading.mixtures import (
    expert_groups,
    limits_of,
    mixture_layers,
    mixture_scales,
    scores_of,
    within_limit,
)
from diptych.models.reading.shared import with_shares
from diptych.models.reading.states import adjusted_width, kept_scales, layer_scales, state_attention, state_layers
from diptych.models.reading.streams import (
    cutoffs,
    layer_inputs,
    mlp_widths,
    ngrams,
    shared_latents,
    shared_layers,
    streams,
)
from diptych.models.reading.windows import is_both_ways, layer_ropes, rope_sections, windows_of
from diptych.models.refused import ENCODER_BESIDE, not_supported, reason_for
from diptych.models.rope import latent_stretch, make_rope, position_limit
from diptych.models.spec import AttentionLayer, LayerSpec, ModelSpec, Norms, QkNorm
from diptych.models.streams import LayerScales

NO_ATTENTION = AttentionLayer(n_heads=0, n_kv_heads=1, head_dim=2, scale=1.0)
RUN_ACTIVATIONS = (Activation.SILU, Activation.GELU_TANH)  # of gates
RUN_CURVES = (
    *RUN_ACTIVATIONS,
    Activation.GELU,
    Activation.RELU,
    Activation.SQUARED_RELU,
    Activation.XIELU,
)  # of MLPs without one


def read_model(
    config: HfConfig, max_context_tokens: int | None = None, *, longrope: str = "auto", name: str | None = None
) -> ModelSpec:
    """The shape behind a config. LoadError names the key that is missing, impossible or not understood.

    max_context_tokens: the longest sequence that will run, which some rotary scalings depend on; None: the model's own.
    longrope: which of its two sets of factors; auto: by max_context_tokens.
    """
    family, has_head, is_wrapped = family_of(config), not is_headless(config), config.decoder is not None
    name = name or str(config.raw.get("_name_or_path") or family.name)
    config = canonical(config, family)
    sections = rope_sections(config, family)
    limit = position_limit(config, sections[0] if sections else None, max_context_tokens)
    context = limit if max_context_tokens is None else min(limit, max_context_tokens)
    windows = windows_of(config, family, config.integer("num_hidden_layers"))
    heads = HeadsByWindow.read(config, family, windows)
    ropes = [
        make_rope(config, one, head_dim=width, max_context_tokens=context, longrope=longrope)
        for one, width in zip(sections, (heads.full.width, heads.windowed.width), strict=False)
    ]
    if _decided(config, family.is_interleaved):
        ropes = [replace(rope, is_interleaved=True) for rope in ropes]
    ropes = [replace(rope, turns_back=family.turns_back, is_learned=family.learns_turns) for rope in ropes]
    norm_eps, centres_norms = _norms(config, family)
    (hidden, word_width), (vocab_size, spare_embeddings) = embedding_width(config, family), words_of(config, family)
    return ModelSpec(
        name=name,
        family=family.name,
        architecture=family.architectures[0],
        hidden=hidden,
        vocab_size=vocab_size,
        layers=_layers(config, family, ropes, windows, heads),
        max_context_tokens=limit,
        norm_eps=norm_eps,
        norm_offset=family.norm_offset,
        final_norm_offset=family.final_norm_offset,
        added_norm_eps=config.optional_number("post_norm_eps"),
        embed_scale=hidden**0.5
        if _decided(config, family.has_scaled_embedding)
        else config.number("embedding_multiplier", 1.0),
        residual_scale=residual_scale(config),
        logit_scale=config.number("logit_scale", 1.0) / config.number("logits_scaling", base_stretch(config, hidden)),
        logit_softcap=config.optional_number("final_logit_softcapping"),
        is_tied=not has_head or config.flag("tie_word_embeddings"),
        is_wrapped=is_wrapped,
        has_head=has_head and not is_both_ways(config),
        centres_norms=centres_norms,
        has_norm_weight=_decided(config, family.has_norm_weight),
        has_norm_bias=_decided(config, family.has_norm_bias),
        has_embedding_norm=family.has_embedding_norm,
        has_embedding_norm_weight=family.has_embedding_norm_weight,
        has_head_bias=has_head and _decided(config, family.has_head_bias),
        has_final_norm=family.names.final_norm is not None,
        transforms_head=has_head and family.names.transform is not None,
        computes_positions=family.computes_positions,
        word_width=word_width,
        n_position_embeddings=0 if family.positions_offset is None else limit + family.positions_offset,
        first_position=family.positions_offset or 0,
        n_token_types=types_of(config, family),
        n_task_types=config.integer("task_type_vocab_size") if config.flag("use_task_id") else 0,
        low_rank=config.optional_integer("laurel_rank") or 0,
        norm_rank=config.optional_integer("gated_norm_rank") or 0,
        streams=streams(config, family),
        layer_inputs=layer_inputs(config) if config.raw.get("hidden_size_per_layer_input") else None,
        ngrams=ngrams(config, state_layers(config, family, len(windows))) if "ple_layer_ids" in family.keys else None,
        scales_layers=family.scales_layers,
        residual_temperature=config.optional_number("residual_gate_temperature"),
        has_inner_norms=family.has_inner_norms,
        blocks=config.raw.get("blocks", ()),
        left_out=config.raw.get("left_out", ()),
        spare_embeddings=spare_embeddings,
    )


def _norms(config: HfConfig, family: Family) -> tuple[float, bool]:
    """The eps, and whether the mean is taken away first: of Command A+, which has either, by the key that says the eps."""
    if "layer_norm_eps" in family.keys and config.raw.get("rms_norm_eps") is None:
        return config.number("layer_norm_eps"), True
    return config.number("rms_norm_eps"), family.centres_norms and "layer_norm_eps" not in family.keys


def load_model_file(path: Path) -> ModelSpec:
    """The model of a config.json, or of a folder that holds one. LoadError for another file or folder."""
    if path.exists() and not (path.suffix == ".json" or (path / "config.json").exists()):
        raise no_model(path)
    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return read_model(HfConfig(read_json(file), path=str(file)), name=name)


def family_of(config: HfConfig) -> Family:
    """The family of the first architecture in the config, or of its model_type where no architecture is named.

    UnsupportedModel, with the nearest of those that are, for any other.
    """
    raw = config.raw
    kind, whole = raw.get("model_type"), None
    if "architectures" in raw:
        named = raw["architectures"]
        what, name = "architecture", named[0] if isinstance(named, list) and named else None
        whole = with_head(name) if isinstance(name, str) else None
        family = None if whole is None else BY_ARCHITECTURE.get(whole)
        known = BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
        if whole in WRAPPERS:
            kind = (config.decoder or HfConfig({})).raw.get("model_type")
            family = BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
        elif known is not None and whole is not None and known.built_as == whole:
            family = known
    else:
        what, name = "model_type", kind
        family = BY_MODEL_TYPE.get(name) if isinstance(name, str) else None
    is_inside = family is not None and family.is_encoder and whole in WRAPPERS  # it is what the decoder attends to
    if family is None or is_inside:
        reason = ENCODER_BESIDE if is_inside else reason_for(kind) or reason_for(name)
        listed = SUPPORTED if what == "architecture" else BY_MODEL_TYPE
        raise not_supported(what, name, config.path, listed, reason=reason)
    if kind is not None and kind not in family.model_types:
        raise UnsupportedModel(
            f"model_type {kind!r} in {config.path} is not that of {family.architectures[0]}, "
            f"which is {' or '.join(family.model_types)}"
        )
    return family


def is_headless(config: HfConfig) -> bool:
    """Whether the first architecture is one of a decoder without an output projection (MistralModel), or of an encoder."""
    if family_of(config).is_encoder:
        return True
    named = config.raw.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return isinstance(name, str) and with_head(name) != name


def reads_mxfp4(config: HfConfig) -> bool:
    """Whether its experts lie in blocks of MXFP4, as the family is published."""
    return config.is_mxfp4 and family_of(config).reads_mxfp4


def _layers(
    config: HfConfig, family: Family, ropes: list[Rope], windows: list[int | None], heads_of: HeadsByWindow
) -> tuple[LayerSpec, ...]:
    n_layers = len(windows)
    turns = layer_ropes(config, family, ropes, windows)
    mixtures = mixture_layers(config, n_layers)
    moe = _moe(config, family) if mixtures else None
    shared = shared_latents(config, turns) if family.shares_latents else shared_layers(config, windows)
    mlps = _mlps(config, family, shared)
    norms = arrangement(config, family)
    # equal layers are one object
    states = state_layers(config, family, n_layers)
    indices = layer_indices(config, family, states)
    kinds = list(zip(heads_of.by_layer(windows), windows, turns, shared, states, indices, strict=True))
    attention = {
        (own, window, rope, kv_layer, has_state, index): NO_ATTENTION
        if own is None
        else state_attention(config, family)
        if has_state
        else _attention(config, family, own, window=window, rope=rope, kv_layer=kv_layer, index=index)
        for own, window, rope, kv_layer, has_state, index in dict.fromkeys(kinds)
    }
    alone = {i for i, (_, mlp) in enumerate(config.raw.get("blocks", ())) if mlp is None}
    without_mlp = Norms.SHARED if family.has_pairs else Norms.ALONE
    made: dict[tuple[int, int, bool], LayerSpec] = {}
    limits, limited = limits_of(config, n_layers), dict[tuple[int, tuple[float | None, float | None]], Any]()
    layers = []
    for i in range(n_layers):
        heads, plain = attention[kinds[i]], None if i in alone else moe if i in mixtures else mlps[i]
        mlp = limited.setdefault((id(plain), limits[i]), within_limit(plain, limits[i]))
        key = (id(heads), id(mlp), i == 0 and family.first_norms is not None)
        if key not in made:
            own = norms if heads.state is None or family.state_norms is None else family.state_norms
            own = Norms.MLP_ALONE if heads.is_absent else own
            if isinstance(mlp, MoeSpec) and family.mixture_norms is not None:
                own = family.mixture_norms
            if i == 0 and family.first_norms is not None:
                own = family.first_norms
            made[key] = LayerSpec(
                attention=heads,
                mlp=mlp,
                norms=without_mlp if i in alone else own,
                scales=_scales(config, family, own, heads, mlp),
            )
        layers.append(made[key])
    if family.shares_blocks:
        layers = with_shares(config, layers)
    if config.flag("scale_attn_by_inverse_layer_idx"):
        layers = [replace(one, attention=replace(one.attention, scale=one.attention.scale / (i + 1)))
                  for i, one in enumerate(layers)]  # fmt: skip
    if family.shares_layers:
        layers[1:] = [replace(layer, shares=0) for layer in layers[1:]]
    if family.has_last_bias:
        layers[-1] = replace(layers[-1], attention=replace(layers[-1].attention, has_o_bias=True))
    return with_entries(config, tuple(layers)) if "entry_layers" in family.keys else tuple(layers)


def _scales(
    config: HfConfig, family: Family, norms: Norms, attention: AttentionLayer, mlp: MlpSpec | MoeSpec | None
) -> LayerScales:
    if family.has_pairs:
        return layer_scales(config, attention)
    return kept_scales(config, attention) if norms is Norms.KEPT else mixture_scales(config, mlp)


def _attention(
    config: HfConfig,
    family: Family,
    heads: Heads,
    *,
    window: int | None,
    rope: Rope | None,
    kv_layer: int | None,
    index: IndexSpec | None,
) -> AttentionLayer:
    n_heads, head_dim = heads.n, heads.width
    mla, sinks = None, family.has_sinks
    if family.names.qkv_parts and n_heads % family.names.qkv_parts:
        raise LoadError(
            f"num_attention_heads in {config.path} is {n_heads}; "
            f"q, k and v of {family.name} lie in {family.names.qkv_parts} parts"
        )
    if family.differs and heads.n_kv % 2:
        raise LoadError(
            f"num_key_value_heads in {config.path} is {heads.n_kv}; values of {family.name} are those of two heads"
        )
    scale = config.number("query_pre_attn_scalar", head_dim or 1) ** -0.5
    qk_norm = family.qk_norm if family.qk_norm_key is None or config.flag(family.qk_norm_key) else QkNorm.NONE
    if config.raw.get("qk_norm_type") == "olmo":
        qk_norm = QkNorm.FULL
    if qk_norm is QkNorm.UNIT:  # stands behind the rotation, which changes no length
        qk_norm = QkNorm.NONE if rope is None and not family.norms_unturned else qk_norm
        if rope is not None and rope.attention_factor != 1.0:
            raise LoadError(f"{rope.kind} rope in {config.path} stretches what {family.name} norms behind it")
    if config.raw.get("kv_lora_rank") is not None:
        mla = latents(config, family, heads, is_turned=rope is not None)
        stretch = 1.0 if rope is None and not family.shares_latents else latent_stretch(config)
        scale = (mla.nope_dim + mla.rope_dim) ** -0.5 * stretch**2
    elif index is not None and rope is not None and rope.rotary_dim > index.head_dim:
        raise LoadError(
            f"index_head_dim in {config.path} is {index.head_dim}; {rope.rotary_dim} dimensions of a head turn there, too"
        )
    if "attention_multiplier" in family.keys:
        scale = config.number("attention_multiplier", scale)
    if not config.flag("scale_attn_weights", True):
        scale = 1.0
    scale *= config.number("key_multiplier", 1.0)
    if family.attention_scale is not None:
        scale = family.attention_scale
    return AttentionLayer(
        n_heads=n_heads,
        n_kv_heads=heads.n_kv,
        head_dim=head_dim,
        scale=scale,
        window=window,
        is_chunked=window is not None and family.attends_in_chunks,
        softcap=config.optional_number("attn_logit_softcapping"),
        clip=config.optional_number("clip_qkv"),
        rope=rope,
        query_scale=_query_scale(config, family, rope),
        scales_heads=family.shares_latents,
        qk_norm=qk_norm,
        has_qkv_bias=_decided(config, family.qkv_bias),
        has_k_bias=None not in family.names.qkv_biases,
        has_o_bias=_decided(config, family.o_bias),
        has_sinks=_decided(config, sinks if isinstance(sinks, bool) else sinks[window is not None]),
        slopes=slopes(n_heads, config.number("alibi_bias_max", 8.0)) if family.has_slopes else (),
        **by_distance(config),
        has_v_norm=family.has_v_norm,
        has_v=heads.has_v,
        v_head_dim=2 * head_dim if family.differs else heads.v_width,
        differs=family.differs,
        norms_given=family.norms_given,
        v_scale=config.number("attention_value_scale", 1.0),
        kv_layer=kv_layer,
        has_gate=_decided(config, family.has_attention_gate),
        gates_heads=_decided(config, family.gates_heads),
        gate_by=family.gate_by,
        mla=mla,
        index=index,
    )


def _query_scale(config: HfConfig, family: Family, rope: Rope | None) -> QueryScale | None:
    """By the rotary settings, or in layers without rotary positions (Llama 4, whose older files say 4 for true)."""
    if rope is not None and rope.query_slope:
        return QueryScale(slope=rope.query_slope, tokens=rope.trained_tokens)
    if not family.scales_queries:
        return None
    is_tuned = config.raw.get("attn_temperature_tuning")
    if rope is not None or not (is_tuned == 4 or config.flag("attn_temperature_tuning")):
        return None
    return QueryScale(slope=config.number("attn_scale"), tokens=config.integer("floor_scale"), shift=1)


def _decided(config: HfConfig, by: bool | str) -> bool:
    return config.flag(by) if isinstance(by, str) else by


def _mlps(config: HfConfig, family: Family, shared: list[int | None]) -> list[MlpSpec]:
    """Each layer's; equal ones are one object. shared: as `shared_layers` gives it."""
    n_layers, are_apart = len(shared), "activation_sparsity_pattern" in family.keys
    has_list = are_apart or family.has_full_heads or "block_configs" in family.keys
    widths = mlp_widths(config, n_layers) if has_list else [_ffn(config)] * n_layers
    if "use_double_wide_mlp" in family.keys and config.flag("use_double_wide_mlp"):
        widths = [width if one is None else 2 * width for width, one in zip(widths, shared, strict=True)]
    kinds = list(zip(widths, cutoffs(config, n_layers) if are_apart else [None] * n_layers, strict=True))
    has_bias, activation = _decided(config, family.mlp_bias), _activation(config, family)
    is_gated = _decided(config, family.is_gated)
    made = {
        (ffn, cutoff): MlpSpec(
            ffn=ffn,
            activation=activation,
            is_gated=is_gated,
            has_bias=has_bias,
            has_down_bias=family.down_bias,
            cutoff=cutoff,
            limit=config.number("swiglu_limit") if family.limits_all else None,
            limits_gate=family.limits_all,
        )
        for ffn, cutoff in dict.fromkeys(kinds)
    }
    return [made[kind] for kind in kinds]


def _ffn(config: HfConfig) -> int:
    if config.raw.get("num_experts") == 0 and not {"blocks", "decoder_sparse_step"} & config.raw.keys():
        # what a mixture has beside its experts is left; where some layers have none anyway, all have a dense MLP
        return config.integer("shared_expert_intermediate_size")
    if config.raw.get("intermediate_size") is None and config.raw.get("moe_intermediate_size") is not None:
        return config.integer("moe_intermediate_size")
    width = config.integer("intermediate_size", 4 * config.integer("hidden_size"))
    return adjusted_width(config, width) if config.flag("block_auto_adjust_ff_dim") else width


def _activation(config: HfConfig, family: Family) -> Activation:
    if family.activation is not None:
        return family.activation
    names = ("hidden_activation", "hidden_act") if "hidden_activation" in family.keys else ("hidden_act",)
    found = config.activation(*names)
    if family.gelu_means_tanh and found is Activation.GELU:
        return Activation.GELU_TANH
    # BitNet's and ModernBERT's, of dense MLPs alone
    own = {Activation.SQUARED_RELU: "relu2", Activation.GELU: "gelu"}.get(found)
    is_own = own is not None and family.keys.get(names[0]) == own and "num_experts" not in family.keys
    if not is_own and found not in (RUN_ACTIVATIONS if _decided(config, family.is_gated) else RUN_CURVES):
        raise LoadError(f"{names[0]} in {config.path} is {config.raw.get(names[0])!r}; no op of the engine computes it")
    return found


def _moe(config: HfConfig, family: Family) -> MoeSpec:
    n_experts, chosen = config.integer("num_experts"), config.integer("num_experts_per_tok")
    n_identities = config.integer("zero_expert_num", 0, low=0)
    config.at_most("num_experts_per_tok", chosen, n_experts + n_identities)
    has_own = config.raw.get("moe_intermediate_size") is not None
    ffn = config.integer("moe_intermediate_size" if has_own else "intermediate_size")
    n_groups, per_token = expert_groups(config, family, n_experts + n_identities, chosen)
    shared = config.optional_integer("shared_expert_intermediate_size", low=0)
    if family.mixes_apart or family.has_halves:
        shared = config.integer("intermediate_size")
    if shared is None:
        shared = ffn * (config.optional_integer("n_shared_experts", low=0) or 0)
    scores, renormalises = scores_of(config, family), _decided(config, family.renormalises)
    if isinstance(family.scores, str) and scores is Scores.SOFTMAX:  # of the chosen alone
        renormalises = True
    return MoeSpec(
        n_experts=n_experts,
        experts_per_token=chosen,
        expert_ffn=ffn,
        is_gated=_decided(config, family.is_gated),
        latent=config.optional_integer("moe_latent_size") or 0,
        activation=_activation(config, family),
        renormalises=renormalises,
        shared_ffn=shared,
        routed_scale=config.number("routed_scaling_factor", 1.0),
        n_groups=n_groups,
        groups_per_token=per_token,
        group_best=family.group_best,
        scores=scores,
        softcap=config.optional_number("moe_router_logit_softcapping"),
        margin=2 * config.number("router_jitter_noise", 0.0) if scores is Scores.SPARSEMIXER else 0.0,
        has_router_bias=family.has_router_bias,
        has_choice_bias=_decided(config, family.has_choice_bias),
        choice_rows=2 if family.has_other_experts else 1,
        has_expert_bias=family.has_expert_bias,
        has_shared_gate=family.has_shared_gate,
        has_shared_bias=_decided(config, family.mlp_bias),
        weighs_input=family.weighs_input,
        n_identities=n_identities,
        is_late=family.has_halves,
        is_apart=family.mixes_apart,
        limit=config.number("swiglu_limit") if "swiglu_limit" in family.keys else None,
        limits_gate="swiglu_limit" in family.keys,
        shared_limit=config.number("swiglu_limit") if family.limits_all and shared else None,
        score_scale=config.number("logit_scale") if family.norms_experts else 1.0,
        behind_eps=config.number("post_norm_eps") if family.norms_experts else None,
    )
