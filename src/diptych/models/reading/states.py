"""Layers with a state in place of keys and values, as a config gives them: which they are, and their heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import NUMBER_LIMIT, HfConfig
from diptych.models.families.family import Family
from diptych.models.gates import Activation
from diptych.models.spec import AttentionLayer
from diptych.models.states import StateRule, StateSpec, StepNorms
from diptych.models.streams import LayerScales

FULL = ("full_attention", "attention")  # what layer_types call a layer without a state
CALLED: Mapping[StateRule, tuple[str, ...]] = MappingProxyType({  # and one with it
    StateRule.DELTA: ("linear_attention",),
    StateRule.SSD: ("linear_attention", "mamba"),
    StateRule.CONVOLUTION: ("conv",),
    StateRule.SELECTIVE: ("linear_attention", "mamba"),
    StateRule.RG_LRU: ("recurrent", "linear_attention"),
})  # fmt: skip
IN_LINEAR = ("full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size")
CONVOLVED_HEAD = 64  # channels of a convolution that are computed together, where its width allows it
SELECTED_HEAD = 32  # those of a selective state


def state_layers(config: HfConfig, family: Family, n_layers: int) -> list[bool]:
    """Which layers have a state."""
    return [False] * n_layers if family.state_rule is None else _found(config, family, family.state_rule, n_layers)


def _found(config: HfConfig, family: Family, rule: StateRule, n_layers: int) -> list[bool]:
    """By layer_types, by the numbers of those without, or all but every so many-th."""
    types, called = config.raw.get("layer_types"), CALLED[rule]
    windowed = ("sliding_attention",) if "sliding_window" in family.keys else ()
    if types is not None:
        if not isinstance(types, list) or any(kind not in (*FULL, *windowed, *called) for kind in types):
            known = (FULL[0], *windowed, called[-1])
            raise LoadError(f"layer_types in {config.path} may hold {' and '.join(known)} only")
        if len(types) != n_layers:
            raise LoadError(f"layer_types in {config.path} has {len(types)} entries; the model has {n_layers} layers")
        return [kind in called for kind in types]
    if "linear_attn_config" in family.keys:
        return _counted(config.section("linear_attn_config"), n_layers)
    if "attention_layers" in family.keys:
        without = config.integers("attention_layers")
        if without is None and rule is StateRule.CONVOLUTION:
            return [False] * n_layers
        return [i not in (without or ()) for i in range(n_layers)]
    if "attn_layer_period" in family.keys:
        period, first = every_so_many(config, "attn_layer")
        return [i % period != first for i in range(n_layers)]
    interval = config.integer("full_attention_interval", family.full_every)
    return [(i + (not family.full_first)) % interval != 0 for i in range(n_layers)]


def every_so_many(config: HfConfig, of: str) -> tuple[int, int]:
    """Which layers are of a kind, of Jamba: those whose numbers leave the second number, divided by the first."""
    period, first = config.integer(f"{of}_period"), config.integer(f"{of}_offset", low=0)
    if first >= period:
        raise LoadError(f"{of}_offset in {config.path} is {first}; it must be at most {period - 1}")
    return period, first


def _counted(given: HfConfig, n_layers: int) -> list[bool]:
    """By the numbers of both kinds of layers, from 1 on (Kimi Linear)."""
    full, others = (given.integers(name) or [] for name in ("full_attn_layers", "kda_layers"))
    if sorted([*full, *others]) != list(range(1, n_layers + 1)):
        raise LoadError(
            f"full_attn_layers and kda_layers in {given.path} must hold the numbers from 1 to {n_layers}, each in one of them"
        )
    return [i + 1 in others for i in range(n_layers)]


def state_attention(config: HfConfig, family: Family) -> AttentionLayer:
    """The attention of such a layer."""
    assert family.state_rule is not None
    # sums over taps go through it, too; the classes of short convolutions know no other
    name = "mamba_hidden_act" if "mamba_hidden_act" in config.raw else "hidden_act"
    if family.state_rule is not StateRule.RG_LRU and config.activation(name) is not Activation.SILU:
        raise LoadError(
            f"{name} in {config.path} is {config.raw[name]!r}; layers with a state are computed with silu only"
        )
    state = READERS[family.state_rule](config)
    state = replace(state, norm_eps=family.state_norm_eps or state.norm_eps)
    if state.n_value_heads % state.n_key_heads:
        raise LoadError(
            f"{state.n_value_heads} value heads cannot share {state.n_key_heads} key heads evenly ({config.path})"
        )
    return AttentionLayer(
        n_heads=state.n_value_heads,
        n_kv_heads=state.n_key_heads,
        head_dim=state.value_dim,
        scale=state.key_dim**-0.5 if state.rule is StateRule.DELTA else 1.0,
        has_qkv_bias=state.is_unit,
        has_o_bias=state.is_unit,
        state=state,
    )


def _delta(config: HfConfig) -> StateSpec:
    if "linear_attn_config" in config.raw:
        return _by_key(config)
    if "kda_lower_bound" in config.raw:
        least = config.raw["kda_lower_bound"] if config.flag("kda_safe_gate") else None
        return _bounded(config, "kda_lower_bound", least)
    if "linear_lower_bound" in config.raw:
        state = _bounded(config, "linear_lower_bound", config.raw["linear_lower_bound"])
        return replace(state, rank=state.key_dim)
    heads = config.integer("num_attention_heads")  # where the config says no more
    n_key_heads = config.integer("linear_num_key_heads", heads)
    key_dim = config.integer("linear_key_head_dim", max(1, int(0.75 * config.integer("hidden_size") / n_key_heads)))
    return StateSpec(
        n_key_heads=n_key_heads,
        key_dim=key_dim,
        n_value_heads=config.integer("linear_num_value_heads", heads),
        value_dim=config.integer("linear_value_head_dim", 2 * key_dim),
        n_taps=config.integer("linear_conv_kernel_dim"),
        most_weight=2.0 if config.flag("linear_allow_neg_eigval") else 1.0,
        gate=_output_gate(config),
    )


def _output_gate(config: HfConfig) -> Activation:
    """What gates the heads' outputs: by output_gate_type, of families that have it."""
    named = config.raw.get("output_gate_type")
    if named not in (None, "silu", "sigmoid"):
        raise LoadError(f"output_gate_type in {config.path} is {named!r}; it may be silu or sigmoid")
    return Activation.SIGMOID if named == "sigmoid" else Activation.SILU


def _by_key(config: HfConfig) -> StateSpec:
    """Of Kimi Linear; published files have an object of the numbers, in which Kimi K3, which calls itself so, has more."""
    given = config.section("linear_attn_config")
    for name, value in given.raw.items():
        if value and name not in IN_LINEAR:
            raise LoadError(
                f"{name} in {given.path} is {value!r}; no such thing is supported of a rule that fades by key"
            )
    heads, width = (given.integer(name, config.integer(f"linear_{name}"), low=2) for name in ("num_heads", "head_dim"))
    return StateSpec(
        n_key_heads=heads,
        key_dim=width,
        n_value_heads=heads,
        value_dim=width,
        n_taps=given.integer("short_conv_kernel_size", config.integer("linear_conv_kernel_dim")),
        fades_by_key=True,
        gate=Activation.SIGMOID,
        rank=width,
    )


def _bounded(config: HfConfig, key: str, least: Any) -> StateSpec:
    """Of Ling 3.0 and GLM-5.3-Flash, whose decays by key have a bound, which `key` says, or none."""
    if least is not None and (
        isinstance(least, bool) or not isinstance(least, int | float) or not -NUMBER_LIMIT <= least < 0
    ):
        raise LoadError(f"{key} in {config.path} is {least!r}; it must be below 0")
    heads = config.integer("linear_num_heads", config.integer("num_attention_heads"))
    width = config.integer("linear_head_dim", low=2)
    return StateSpec(
        n_key_heads=heads,
        key_dim=width,
        n_value_heads=heads,
        value_dim=width,
        n_taps=config.integer("linear_conv_kernel_dim"),
        fades_by_key=True,
        least_decay=None if least is None else float(least),
        gate=Activation.SIGMOID,
    )


def _ssd(config: HfConfig) -> StateSpec:
    """Of Mamba-2: as many channels as its heads say, normed by group (Nemotron-H; Falcon-H1, if at all), or mamba_expand times
    the stream's. What multiplies a gate bends it, so that the layer's input has that (`layer_scales`) and all else the rest.
    Lightning attention is the same rule with constant decays, and has sizes of its own.
    """
    if "linear_attn_alpha_factor" in config.raw:
        return _steady(config)
    n_heads, n_groups, n_norms = config.integer("mamba_n_heads"), config.integer("mamba_n_groups"), 1
    gate, x, b, c, steps = _multipliers(config)
    if "mamba_d_ssm" in config.raw:
        head_dim, n_norms = _given_head(config, n_heads), n_groups if config.flag("mamba_rms_norm") else 0
        if n_norms and config.flag("mamba_norm_before_gate"):
            raise LoadError(
                f"mamba_norm_before_gate in {config.path} is true; what heads give is normed behind what gates it only"
            )
    elif "mamba_expand" in config.raw:
        head_dim = _expanded_head(config, n_heads, n_groups)
    else:
        head_dim, n_norms = config.integer("mamba_d_head"), n_groups
    return StateSpec(
        rule=StateRule.SSD,
        n_key_heads=n_groups,
        key_dim=config.integer("mamba_d_state"),
        n_value_heads=n_heads,
        value_dim=head_dim,
        n_taps=config.integer("mamba_d_conv"),
        n_norms=n_norms,
        q_scale=c / gate,
        k_scale=b / gate,
        v_scale=x / gate,
        rate_scale=steps / gate,
        has_tap_bias=config.flag("mamba_conv_bias"),
        step_limits=_step_limits(config),
    )


def _steady(config: HfConfig) -> StateSpec:
    """Of MiniMax-01: as many heads as attend, each as wide."""
    heads = config.integer("num_attention_heads")
    width = config.integer("head_dim", max(1, config.integer("hidden_size") // heads))
    return StateSpec(
        rule=StateRule.SSD,
        n_key_heads=heads,
        key_dim=width,
        n_value_heads=heads,
        value_dim=width,
        n_taps=1,
        is_steady=True,
        gate=Activation.SIGMOID,
    )


def _expanded_head(config: HfConfig, n_heads: int, n_groups: int) -> int:
    """The width of a head where all are so many times as wide as the stream (Granite 4, Bamba)."""
    width = config.integer("mamba_expand") * config.integer("hidden_size")
    if width % n_heads or config.raw.get("mamba_d_head") not in ("auto", None, width // n_heads):
        raise LoadError(
            f"mamba_d_head in {config.path} is {config.raw.get('mamba_d_head')!r}; mamba_expand times hidden_size is "
            f"{width}, for {n_heads} heads"
        )
    if n_groups > 1:
        raise LoadError(
            f"mamba_n_groups in {config.path} is {n_groups}; what the heads of such a model give is normed by group by some "
            "and over all heads by others, so only 1 is supported"
        )
    return width // n_heads


def _given_head(config: HfConfig, n_heads: int) -> int:
    """The width of a head where mamba_d_ssm is that of all, or mamba_expand times the stream's (Falcon-H1)."""
    width = config.integer("mamba_d_ssm", config.integer("mamba_expand") * config.integer("hidden_size"))
    if width % n_heads or config.raw.get("mamba_d_head") not in ("auto", None, width // n_heads):
        raise LoadError(
            f"mamba_d_head in {config.path} is {config.raw.get('mamba_d_head')!r}; mamba_d_ssm is {width}, for {n_heads} heads"
        )
    return width // n_heads


def _multipliers(config: HfConfig) -> tuple[float, ...]:
    """Of what gates, of x, of B, of C and of the steps, in Falcon-H1."""
    return (1.0,) * 5 if config.raw.get("ssm_multipliers") is None else config.numbers("ssm_multipliers", 5)


def layer_scales(config: HfConfig, attention: AttentionLayer) -> LayerScales:
    """Falcon-H1's multipliers: those of gates multiply all that is read, and are taken away behind."""
    if attention.state is not None:
        return LayerScales(
            attention_in=config.number("ssm_in_multiplier", 1.0) * _multipliers(config)[0],
            attention_out=config.number("ssm_out_multiplier", 1.0),
        )
    gate, down = (1.0, 1.0) if config.raw.get("mlp_multipliers") is None else config.numbers("mlp_multipliers", 2)
    return LayerScales(
        attention_in=config.number("attention_in_multiplier", 1.0),
        attention_out=config.number("attention_out_multiplier", 1.0),
        mlp_in=gate,
        mlp_out=down / gate,
    )


def kept_scales(config: HfConfig, attention: AttentionLayer) -> LayerScales:
    """MiniMax-01's factors: alpha of what the norm gives, beta of what is added to it."""
    kind = "full_attn" if attention.state is None else "linear_attn"
    return LayerScales(
        attention_out=config.number(f"{kind}_beta_factor"),
        mlp_out=config.number("mlp_beta_factor"),
        before_attention=config.number(f"{kind}_alpha_factor"),
        before_mlp=config.number("mlp_alpha_factor"),
    )


def _step_limits(config: HfConfig) -> tuple[float, float]:
    """Between which a step of Mamba-2 is held; of transformers infinity may be an object, as JSON has no number for it."""
    given = config.raw.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    found = [math.inf if _is_infinite(one) else one for one in given] if isinstance(given, list) else []
    are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in found)
    # a whole number above what a float holds is no infinity
    if (
        len(found) != 2
        or not are_numbers
        or not 0 <= found[0] <= found[1]
        or any(NUMBER_LIMIT < one != math.inf for one in found)
    ):
        raise LoadError(
            f"time_step_limit in {config.path} is {given!r}; it must be two numbers from 0 on, the smaller first, each at "
            f"most {NUMBER_LIMIT:g} or infinite"
        )
    return float(found[0]), float(found[1])


def _is_infinite(limit: object) -> bool:
    """Whether it holds nothing back: no step is as large as the largest numbers of a float (Nemotron 3 Ultra has 1e308)."""
    return limit == {"__float__": "Infinity"} or (isinstance(limit, float) and limit > NUMBER_LIMIT)


def _convolution(config: HfConfig) -> StateSpec:
    width = config.integer("hidden_size")
    head = math.gcd(width, CONVOLVED_HEAD)
    return StateSpec(
        rule=StateRule.CONVOLUTION,
        n_key_heads=width // head,
        key_dim=0,
        n_value_heads=width // head,
        value_dim=head,
        n_taps=config.integer("conv_L_cache"),
    )


def _selective(config: HfConfig) -> StateSpec:
    """Of Mamba-1: heads are as many channels as are computed together, which ranks divide; Zamba's are its key heads here."""
    hidden = config.integer("hidden_size")
    width = config.integer("mamba_d_ssm", config.integer("mamba_expand") * hidden)
    n_heads, has_bare = config.integer("n_mamba_heads", 1), config.raw.get("mixer_rms_eps") is not None
    if width % n_heads:
        raise LoadError(f"n_mamba_heads in {config.path} is {n_heads}, of {width} channels, which they do not divide")
    head = math.gcd(width // n_heads, SELECTED_HEAD)
    norms = StepNorms.BARE if has_bare else StepNorms.WEIGHED if "expert_layer_period" in config.raw else StepNorms.NONE
    auto = config.raw.get("mamba_dt_rank") in ("auto", None)
    return StateSpec(
        rule=StateRule.SELECTIVE,
        n_key_heads=n_heads,
        key_dim=config.integer("mamba_d_state"),
        n_value_heads=width // head,
        value_dim=head,
        n_taps=1,
        tapped=config.integer("mamba_d_conv"),
        has_tap_bias=config.flag("mamba_conv_bias"),
        rank=-(-hidden // 16) if auto else config.integer("mamba_dt_rank"),
        step_norms=norms,
        norm_eps=config.number("mixer_rms_eps") if has_bare else None,
    )


def _units(config: HfConfig) -> StateSpec:
    """Of RecurrentGemma: channels in as many heads as attend."""
    n_heads = config.integer("num_attention_heads")
    width = config.integer("lru_width", config.integer("hidden_size"))
    if width % n_heads:
        raise LoadError(f"lru_width in {config.path} is {width}; {n_heads} heads do not divide it")
    return StateSpec(
        rule=StateRule.RG_LRU,
        n_key_heads=1,
        key_dim=1,
        n_value_heads=n_heads,
        value_dim=width // n_heads,
        n_taps=1,
        tapped=config.integer("conv1d_width"),
        has_tap_bias=True,
        gate=config.activation("hidden_act"),
    )


READERS: Mapping[StateRule, Callable[[HfConfig], StateSpec]] = MappingProxyType({
    StateRule.DELTA: _delta, StateRule.SSD: _ssd, StateRule.CONVOLUTION: _convolution,
    StateRule.SELECTIVE: _selective, StateRule.RG_LRU: _units,
})  # fmt: skip


def adjusted_width(config: HfConfig, width: int) -> int:
    """Of an MLP whose config gives it for one without a gate (LFM2): two thirds of it, times a factor, in whole steps."""
    factor, step = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of")
    adjusted = -(-int(factor * int(2 * width / 3)) // step) * step
    made = HfConfig({"intermediate_size": adjusted}, path=f"block_auto_adjust_ff_dim of {config.path}")
    return made.integer("intermediate_size")  # with the bounds of one that a key gives
