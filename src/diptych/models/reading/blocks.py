"""Models whose layers are something else than ours, as layers of attention and an MLP: each of the two a block of its own with
a norm before it (Nemotron-H), or attention and a state by one norm (Falcon-H1), of which a layer here has one; or states
alone (Mamba); or two of attention and of MLPs, which are two layers here (LongCat-Flash); or between
layers that attend to pictures (Llama 3.2 Vision), which text without pictures does not pass through; or what a search has left
of a Llama's layers (Nemotron NAS): attention and MLP, one of the two, or none.

>>> as_layers({"hybrid_override_pattern": "ME*-M"}, "config.json")["mlp_layer_types"]
['sparse', 'dense', None]
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import SIZE_LIMITS, HfConfig

FFN_STEP = 256  # of widths that are said as multiples
PATTERN = "hybrid_override_pattern"
LIST = "layers_block_type"
STATE, ATTENTION, DENSE, MIXTURE = "linear_attention", "full_attention", "mlp", "moe"
LETTERS: Mapping[str, str] = MappingProxyType({"M": STATE, "*": ATTENTION, "-": DENSE, "E": MIXTURE})
CALLED: Mapping[str, str] = MappingProxyType({  # of all files so far
    **{kind: kind for kind in LETTERS.values()}, "mamba": STATE, "attention": ATTENTION,
})  # fmt: skip
DEFAULT = (STATE, MIXTURE, ATTENTION, DENSE)  # of the class
MLPS: Mapping[str, str] = MappingProxyType({DENSE: "dense", MIXTURE: "sparse"})


def as_layers(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keys that say of usual layers what the config says of blocks; in mlp_layer_types None is none.

    blocks: of each layer the number of the one that attends, or moves a state on, and of the MLP behind it, if any.
    """
    kinds = _kinds(raw, path)
    paired = _pairs(kinds, path)
    return {
        "blocks": paired,
        "num_hidden_layers": len(paired),
        "layer_types": [kinds[attention] for attention, _ in paired],
        "mlp_layer_types": [None if mlp is None else MLPS[kinds[mlp]] for _, mlp in paired],
    }


def as_pairs(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Likewise, of layers that have a state beside attention: a layer with that alone, and the one that it is added with."""
    n_layers = HfConfig(raw, path=path).integer("num_hidden_layers")
    return {
        "blocks": tuple((i, mlp) for i in range(n_layers) for mlp in (None, i)),
        "num_hidden_layers": 2 * n_layers,
        "layer_types": [STATE, ATTENTION] * n_layers,
    }


def as_states(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Likewise, of layers that each have a state alone (Mamba)."""
    n_layers = HfConfig(raw, path=path).integer("num_hidden_layers")
    return {"blocks": tuple((i, None) for i in range(n_layers)), "layer_types": [STATE] * n_layers}


def as_halves(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Likewise, of layers with two attentions and two MLPs, the first of them beside a mixture."""
    config = HfConfig(raw, path=path)
    said = config.optional_integer("num_hidden_layers")
    n_layers = config.integer("num_layers", 28 if said is None else said // 2)  # 28 in the class
    if said is not None and said != 2 * n_layers:
        raise LoadError(f"num_hidden_layers in {path} is {said}; it must be twice num_layers, {n_layers}")
    return {
        "blocks": tuple((i, i) for i in range(n_layers) for _ in range(2)),
        "num_hidden_layers": 2 * n_layers,
        "mlp_layer_types": ["sparse", "dense"] * n_layers,
    }


def without_pictures(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Likewise, of a model some of whose layers attend to pictures: those that text passes through.

    left_out: the numbers of the others.
    """
    config = HfConfig(raw, path=path)
    n_layers, listed = config.integer("num_hidden_layers"), config.integers("cross_attention_layers")
    to_pictures = frozenset(range(3, n_layers, 5) if listed is None else listed)  # 3, 8, 13 ... in the class
    blocks = tuple((i, i) for i in range(n_layers) if i not in to_pictures)
    if not blocks:
        raise LoadError(f"cross_attention_layers in {path} names all {n_layers} layers; none is left for text")
    left_out = tuple(i for i in range(n_layers) if i in to_pictures)
    return {"blocks": blocks, "num_hidden_layers": len(blocks), "left_out": left_out}


def as_searched(raw: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Likewise, of layers that block_configs describe one by one: KV heads, 0 where there is no attention, and widths of MLPs.

    left_out: the numbers of those that have neither. Without block_configs all are usual layers, with KV heads of their own.
    """
    described = raw.get("block_configs")
    if described is None:
        return {}
    config = HfConfig(raw, path=path)
    n_heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    if not isinstance(described, list) or len(described) != n_layers:
        raise LoadError(f"block_configs in {path} must hold {n_layers} objects, one for each layer")
    of_heads, widths, blocks = [], [], []
    for i, one in enumerate(described):
        of_layer = HfConfig(one if isinstance(one, dict) else {}, path=f"block_configs[{i}] of {path}")
        n_kv, width = (
            _searched_heads(of_layer.section("attention"), n_heads),
            _searched_width(of_layer.section("ffn"), hidden),
        )
        if n_kv or width:
            blocks.append((i, i if width else None))
            of_heads.append(n_kv)
            widths.append(width or 1)  # which nobody reads where there is no MLP
    kept = {i for i, _ in blocks}
    return {
        "blocks": tuple(blocks),
        "num_hidden_layers": len(blocks),
        "left_out": tuple(i for i in range(n_layers) if i not in kept),
        "num_key_value_heads": max(of_heads, default=0) or None,
        "num_key_value_heads_per_layer": of_heads,
        "intermediate_size": widths,
    }


def _searched_heads(attention: HfConfig, n_heads: int) -> int:
    """KV heads of a layer, 0 where it has no attention. LoadError, which names it, for what has another form."""
    _refuse_more(attention, ("n_heads_in_group", "no_op"))
    if attention.flag("no_op"):
        return 0
    group = attention.integer("n_heads_in_group")
    if n_heads % group:
        raise LoadError(f"n_heads_in_group in {attention.path} is {group}; {n_heads} query heads cannot be divided so")
    return n_heads // group


def _searched_width(ffn: HfConfig, hidden: int) -> int:
    """Of a layer's MLP, 0 where it has none: a number, or the multiple of two thirds of the model's width, whole 256s."""
    _refuse_more(ffn, ("ffn_mult", "intermediate_size", "no_op"), usual={"gated": True, "hidden_act": "silu"})
    if ffn.flag("no_op"):
        return 0
    if ffn.raw.get("intermediate_size") is not None:
        return ffn.integer("intermediate_size")
    return -(-int(2 * ffn.number("ffn_mult") * hidden / 3) // FFN_STEP) * FFN_STEP


def _refuse_more(config: HfConfig, read: tuple[str, ...], usual: Mapping[str, Any] = MappingProxyType({})) -> None:
    for key, value in config.raw.items():
        if key not in read and (value or key in usual) and value is not None and value != usual.get(key):
            raise LoadError(
                f"{key} in {config.path} is {value!r}; only attention, a gated MLP, or nothing is supported"
            )


def _pairs(kinds: list[str], path: str) -> tuple[tuple[int, int | None], ...]:
    found: list[tuple[int, int | None]] = []
    for number, kind in enumerate(kinds):
        if kind not in MLPS:
            found.append((number, None))
        elif found and found[-1] == (number - 1, None):
            found[-1] = (number - 1, number)
        else:
            raise LoadError(
                f"block {number} in {path} is an MLP with no attention or state right before it, which is not supported"
            )
    return tuple(found)


def _kinds(raw: Mapping[str, Any], path: str) -> list[str]:
    usual = LIST if raw.get(LIST) is not None else "layer_types"
    listed, pattern = raw.get(usual), raw.get(PATTERN)
    if listed is None and pattern is None:
        listed, usual = list(DEFAULT), f"the default of {LIST}"
    key, given, known = (usual, listed, CALLED) if listed is not None else (PATTERN, pattern, LETTERS)
    if not isinstance(given, list if listed is not None else str) or any(
        not isinstance(one, str) or one not in known for one in given
    ):
        raise LoadError(f"{key} in {path} is {given!r:.80}; it must name each block: {', '.join(known)}")
    limit = SIZE_LIMITS["num_hidden_layers"]
    if not 0 < len(given) <= limit:
        raise LoadError(f"{key} in {path} names {len(given)} blocks; it must be 1 to {limit}")
    said = raw.get("num_hidden_layers")
    if said is not None and said != len(given):
        raise LoadError(f"{key} in {path} names {len(given)} blocks; num_hidden_layers is {said!r}")
    return [known[one] for one in given]
