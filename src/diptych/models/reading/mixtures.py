"""What a config says of mixtures of experts: which layers have one, how a token's experts are chosen, what they add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.mlp import MlpSpec, MoeSpec, Scores
from diptych.models.reading.states import every_so_many
from diptych.models.streams import LayerScales


def mixture_layers(config: HfConfig, n_layers: int) -> frozenset[int]:
    """Layers whose MLP is a mixture. "Every step-th layer" counts from 1: layers step-1, 2 step-1, ..."""
    if config.raw.get("num_experts") in (None, 0) or not config.flag("enable_moe_block", True):
        return frozenset()
    named = config.integers("moe_layers")
    if named is not None:
        return frozenset(named) & frozenset(range(n_layers))
    dense = config.integers("mlp_only_layers") or []
    step = config.integer("decoder_sparse_step", 1)
    kinds = config.raw.get("mlp_layer_types")
    if kinds is None and "hc_mult" in config.raw:
        return frozenset(range(1, n_layers))
    if kinds is not None:
        known = ("dense", "sparse", *((None,) if "blocks" in config.raw else ()))
        if not isinstance(kinds, list) or len(kinds) < n_layers or any(kind not in known for kind in kinds):
            raise LoadError(f"mlp_layer_types in {config.path} must name {n_layers} layers, each dense or sparse")
        return frozenset(i for i in range(n_layers) if kinds[i] == "sparse")
    if "expert_layer_period" in config.raw:
        period, begin = every_so_many(config, "expert_layer")
        return frozenset(range(begin, n_layers, period)) if config.integer("num_experts") > 1 else frozenset()
    first = config.optional_integer("first_k_dense_replace", low=0)
    if first is not None:
        return frozenset(range(first, n_layers, step))
    if config.raw.get("moe_layer_start_index") is not None:  # first and last, -1 for the model's last
        first, last = (config.integer(f"moe_layer_{end}_index", low=-1) for end in ("start", "end"))
        last = n_layers - 1 if last == -1 else last
        return frozenset(i for i in range(max(first, 0), min(last + 1, n_layers)) if (i + 1) % step == 0)
    return frozenset(i for i in range(n_layers) if i not in dense and (i + 1) % step == 0)


def limits_of(config: HfConfig, n_layers: int) -> list[tuple[float | None, float | None]]:
    """Within what experts, and dense MLPs and shared experts, of each layer are held; 0 and null mean nothing."""
    return list(
        zip(*(_limits(config, key, n_layers) for key in ("swiglu_limits", "swiglu_limits_shared")), strict=True)
    )


def _limits(config: HfConfig, key: str, n_layers: int) -> list[float | None]:
    given = config.raw.get(key) or [None] * n_layers
    if not isinstance(given, list) or len(given) != n_layers:
        raise LoadError(f"{key} in {config.path} must hold {n_layers} numbers, one for each layer")
    return [None if one in (0, None) else HfConfig({key: one}, path=config.path).number(key) for one in given]


def within_limit(mlp: MlpSpec | MoeSpec | None, limits: tuple[float | None, float | None]) -> MlpSpec | MoeSpec | None:
    """The same, held within a layer's limits."""
    if mlp is None or limits == (None, None):
        return mlp
    if isinstance(mlp, MlpSpec):
        return replace(mlp, limit=limits[1])
    return replace(mlp, limit=limits[0], shared_limit=limits[1] if mlp.shared_ffn else None)


def expert_groups(config: HfConfig, family: Family, n_experts: int, chosen: int) -> tuple[int, int]:
    """Into how many groups the experts fall, and of how many a token may choose."""
    method = config.raw.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise LoadError(
            f"topk_method in {config.path} is {method!r}; of {family.name}, greedy and group_limited_greedy are supported"
        )
    if method == "greedy":
        return 1, 1
    n_groups, per_token = config.integer("n_group", 1), config.integer("topk_group", 1)
    if n_experts % n_groups or n_experts // n_groups < family.group_best:
        raise LoadError(
            f"{n_experts} experts cannot form {n_groups} equal groups of {family.group_best} or more ({config.path})"
        )
    config.at_most("topk_group", per_token, n_groups)
    config.at_most("num_experts_per_tok", chosen, n_experts // n_groups * per_token)
    return n_groups, per_token


def scores_of(config: HfConfig, family: Family) -> Scores:
    """The family's, or what its key says."""
    if not isinstance(family.scores, str):
        return family.scores
    said = config.raw[family.scores]
    found = {"softmax": Scores.SOFTMAX, "sigmoid": Scores.SIGMOID}.get(said if isinstance(said, str) else "")
    if found is None:
        raise LoadError(f"{family.scores} in {config.path} is {said!r}; it must be softmax or sigmoid")
    return found


def mixture_scales(config: HfConfig, mlp: MlpSpec | MoeSpec | None) -> LayerScales:
    """Of a mixture and shared experts whose mean is added, where it is not their sum."""
    how = config.raw.get("shared_expert_combination_strategy", "sum")
    if how not in ("sum", "average"):
        raise LoadError(f"shared_expert_combination_strategy in {config.path} is {how!r}; it must be sum or average")
    is_mean = isinstance(mlp, MoeSpec) and mlp.shared_ffn > 0 and how == "average"
    return LayerScales(mlp_out=0.5) if is_mean else LayerScales()


def of_text(raw: dict[str, Any]) -> dict[str, Any]:
    """The config with the number and width of experts of text alone, the first of two where it has those of pictures, too."""
    both = {key: raw.get(key) for key in ("num_experts", "moe_intermediate_size")}
    return {**raw, **{key: one[0] for key, one in both.items() if isinstance(one, list) and len(one) == 2}}
