"""DeepSeek V4's configs: what layers attend to beside their window, by several names, and where ids choose experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.latent import GROUP_TOKENS, EntrySpec, IndexSpec
from diptych.models.mlp import MoeSpec
from diptych.models.rope import yarn_attention
from diptych.models.spec import AttentionLayer, LayerSpec

NEAR, CHOSEN, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {CHOSEN: 4, ALL: 128}  # tokens of an entry, where a config does not say
RATIOS = {0: NEAR, **{tokens: kind for kind, tokens in RATES.items()}}  # of published configs
OLDER_RATES = {"compress_rate_csa": CHOSEN, "compress_rate_hca": ALL}
HASHED, ROUTED = "hash_moe", "moe"
HASHED_FIRST = 3  # layers, where a config does not say which
# of rotary settings: cos and sin are multiplied by attention_factor, scores by nothing, and what turns is said beside them
UNREAD = ("mscale", "mscale_all_dim", "partial_rotary_factor")
SAID = ("head_dim", "intermediate_size", "compress_ratios", "compress_rates", "num_hash_layers", "partial_rotary_factor",
        "compress_rope_theta", "rope_scaling", *OLDER_RATES)  # fmt: skip


def as_deepseek_v4(raw: dict[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The same config in terms of latent attention and windows, with `entry_layers`: of each layer the tokens of an entry, 0
    where it has none, and whether an index chooses among them; and `token_layers`: whose experts a token's id chooses.
    """
    config = HfConfig({**defaults, **raw}, path=path)
    n, width, n_heads = (config.integer(key) for key in ("num_hidden_layers", "head_dim", "num_attention_heads"))
    turned = _turned(raw, config, width)
    n_groups, rank = config.integer("o_groups"), config.integer("o_lora_rank")
    if n_heads % n_groups or n_groups * rank % n_heads:
        raise LoadError(
            f"o_groups in {path} is {n_groups}, each of {rank} outputs (o_lora_rank); {n_heads} heads must share both evenly"
        )
    ffn = config.integer("moe_intermediate_size")
    if raw.get("intermediate_size", ffn) != ffn:  # its other name
        if "moe_intermediate_size" in raw:
            raise LoadError(
                f"intermediate_size in {path} is {raw['intermediate_size']!r}; moe_intermediate_size is {ffn}"
            )
        ffn = config.integer("intermediate_size")
    kinds, rates = _kinds(raw, n, path), _rates(raw, path)
    for tokens in {rates[kind] for kind in kinds if kind != NEAR}:
        shared = min(tokens, GROUP_TOKENS)
        if tokens < 2 or (GROUP_TOKENS % tokens if tokens < GROUP_TOKENS else tokens % GROUP_TOKENS):
            raise LoadError(
                f"compress_rates in {path} has {tokens}; it must be 2, 4, 8 or a multiple of {GROUP_TOKENS}"
            )
        if width % (2 * shared):
            raise LoadError(
                f"head_dim in {path} is {width}; with entries of {tokens} it must be a multiple of {2 * shared}"
            )
    return {
        **{key: value for key, value in raw.items() if key not in SAID},
        "moe_intermediate_size": ffn,
        "kv_lora_rank": width - turned,
        "qk_nope_head_dim": width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": n_groups * rank // n_heads,
        "layer_types": [NEAR if kind == NEAR else "full_attention" for kind in kinds],
        "entry_layers": [(0 if kind == NEAR else rates[kind], kind == CHOSEN) for kind in kinds],
        "token_layers": _by_token(raw, n, path),
        "mlp_layer_types": ["sparse"] * n,
        "rope_parameters": _ropes(raw, config, turned),
        "rope_theta": config.number("rope_theta"),
    }


def with_entries(config: HfConfig, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Layers that all have a window, and what they attend to beside it. Equal ones are one object."""
    window, width = config.integer("sliding_window"), config.integer("index_head_dim")
    turned = config.integer("qk_rope_head_dim")
    if width % 2 or width < turned:
        raise LoadError(f"index_head_dim in {config.path} is {width}; it must be even, and {turned} of it turn")
    made: dict[tuple[int, bool, bool], LayerSpec] = {}
    found = []
    for layer, (tokens, is_chosen), by_token in zip(
        layers, config.raw["entry_layers"], config.raw["token_layers"], strict=True
    ):
        key = tokens, is_chosen, by_token
        if key not in made:
            mlp = layer.mlp
            if by_token and isinstance(mlp, MoeSpec):
                mlp = replace(mlp, by_token=True, has_choice_bias=False)
            made[key] = replace(
                layer, attention=_attending(config, layer.attention, window, tokens, is_chosen), mlp=mlp
            )
        found.append(made[key])
    return tuple(found)


def _attending(
    config: HfConfig, attention: AttentionLayer, window: int, tokens: int, is_chosen: bool
) -> AttentionLayer:
    if not tokens:
        return replace(attention, window=window)
    entries = EntrySpec(tokens=tokens, overlaps=is_chosen)
    index = IndexSpec(
        most=config.integer("index_topk"),
        n_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        norm_eps=config.number("rms_norm_eps"),
        entries=entries,
    )
    return replace(attention, window=window, entries=entries, index=index if is_chosen else None)


def _turned(raw: Mapping[str, Any], config: HfConfig, width: int) -> int:
    """Of a row, said as a number or as a part of it."""
    said, part = config.optional_integer("qk_rope_head_dim"), raw.get("partial_rotary_factor")
    own = None if part is None else int(width * config.number("partial_rotary_factor"))
    if said is not None and own is not None and said != own:
        raise LoadError(f"qk_rope_head_dim in {config.path} is {said}; by partial_rotary_factor it is {own}")
    turned = said or own or width // 8
    if turned % 2 or not 0 < turned < width:
        raise LoadError(f"of head_dim in {config.path}, {width}, {turned} turn; it must be an even part of it")
    return turned


def _rates(raw: Mapping[str, Any], path: str) -> dict[str, int]:
    given = HfConfig(raw, path=path).section("compress_rates")
    if unknown := sorted(set(given.raw) - set(RATES)):
        raise LoadError(f"{unknown[0]} in {given.path} is no kind of layer; known are {CHOSEN} and {ALL}")
    found = {kind: given.integer(kind, usual) for kind, usual in RATES.items()}
    older = HfConfig(raw, path=path)
    return found | {kind: older.integer(key) for key, kind in OLDER_RATES.items() if raw.get(key) is not None}


def _kinds(raw: Mapping[str, Any], n: int, path: str) -> list[str]:
    """Of each layer; published configs have numbers, for layers that draft, too."""
    kinds, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if kinds is None and ratios is not None:
        if not isinstance(ratios, list) or len(ratios) < n or any(one not in RATIOS for one in ratios):
            raise LoadError(f"compress_ratios in {path} must hold {n} numbers, each {', '.join(map(str, RATIOS))}")
        return [RATIOS[one] for one in ratios[:n]]
    if kinds is None:
        return [ALL] * min(n, 2) + [CHOSEN if i % 2 else ALL for i in range(max(n - 2, 0))]
    if not isinstance(kinds, list) or len(kinds) != n or any(kind not in (NEAR, CHOSEN, ALL) for kind in kinds):
        raise LoadError(f"layer_types in {path} must name {n} layers, each {NEAR}, {CHOSEN} or {ALL}")
    return kinds


def _by_token(raw: Mapping[str, Any], n: int, path: str) -> list[bool]:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        first = HfConfig(raw, path=path).integer("num_hash_layers", HASHED_FIRST, low=0)
        return [i < first for i in range(n)]
    if not isinstance(kinds, list) or len(kinds) != n or any(kind not in (HASHED, ROUTED) for kind in kinds):
        raise LoadError(f"mlp_layer_types in {path} must name {n} layers, each {HASHED} or {ROUTED}")
    return [kind == HASHED for kind in kinds]


def _ropes(raw: Mapping[str, Any], config: HfConfig, turned: int) -> dict[str, dict[str, Any]]:
    """Of layers with entries, and of those without, as kinds of layers have them. LoadError where either turns another part."""
    given = HfConfig(raw, path=config.path).section("rope_parameters")
    main, beside = given.raw.get("main"), given.raw.get("compress")
    if isinstance(main, dict) and isinstance(beside, dict):
        near, far = dict(main), dict(beside)
        width = config.integer("head_dim")
        for name, own in (("main", near), ("compress", far)):
            said = HfConfig(own, path=f"{name} of {given.path}")
            part = said.number("partial_rotary_factor", 1.0)
            if int(width * part) != turned:
                raise LoadError(
                    f"partial_rotary_factor in {said.path} is {part:g} of {width}; {turned} dimensions turn"
                )
            if (own.get("rope_type") or own.get("type")) == "yarn":
                own["attention_factor"] = yarn_attention(said, said.number("factor"))
    else:
        scaling = HfConfig(raw, path=config.path).section("rope_scaling").raw or given.raw
        near = {"rope_type": "default", "rope_theta": config.number("rope_theta")}
        far = {**scaling, "rope_theta": config.number("compress_rope_theta")}
        if (far.get("rope_type") or far.get("type")) == "yarn":
            far["attention_factor"] = far.get("attention_factor") or 1.0
    return {kind: {key: value for key, value in own.items() if key not in UNREAD}
            for kind, own in (("full_attention", far), ("sliding_attention", near))}  # fmt: skip
