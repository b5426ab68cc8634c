"""What Gemma 3n and 4 have beside other decoders, from a config: shared keys and values, heads of layers that attend to
everything, streams, embeddings of layers, cutoffs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.family import Family
from diptych.models.ngrams import NgramSpec
from diptych.models.streams import GatedSpec, HyperSpec, LayerInputs, StreamsSpec

MOST_STREAMS = 8  # that a kernel holds at a time
SPARSE_LAYERS, SPARSITY = 10, 0.95  # of a config that does not say, where it has more layers than that


def shared_layers(config: HfConfig, windows: list[int | None]) -> list[int | None]:
    """For each layer the one whose keys and values it attends to, None: its own.

    The last `num_kv_shared_layers` attend to those of the last layer before them that has a window as they do, or none.
    """
    n_layers, n_shared = len(windows), config.integer("num_kv_shared_layers", 0, low=0)
    config.at_most("num_kv_shared_layers", n_shared, n_layers - 1)
    first = n_layers - n_shared
    last = {windows[i] is None: i for i in range(first)}
    for i in range(first, n_layers):
        if (windows[i] is None) not in last:
            kind = "full" if windows[i] is None else "windowed"
            raise LoadError(
                f"layer {i} in {config.path} is to attend to the keys and values of a {kind} layer before layer {first}, "
                f"and there is none (num_kv_shared_layers is {n_shared})"
            )
    return [None if i < first else last[windows[i] is None] for i in range(n_layers)]


def shared_latents(config: HfConfig, turns: Sequence[object | None]) -> list[int | None]:
    """For each layer the one whose latents it attends to by kv_source_layers, None: its own. turns: None for each layer without
    rotary positions.

    Its class remembers one layer of each kind, with rotary positions and without: the last whose latents another attends to.
    """
    n_layers, given = len(turns), config.integers("kv_source_layers")
    if given is None:
        return [None] * n_layers
    if len(given) != n_layers:
        raise LoadError(f"kv_source_layers in {config.path} has {len(given)} entries; the model has {n_layers} layers")
    last: dict[bool, int] = {}
    for i, source in enumerate(given):
        has_turns = turns[i] is not None
        if source == i:
            last |= {has_turns: i} if i in given[i + 1 :] else {}
        elif last.get(has_turns) != source:
            kind = "with" if has_turns else "without"
            raise LoadError(
                f"layer {i} in {config.path} is to attend to the latents of layer {source} (kv_source_layers); the last layer "
                f"{kind} rotary positions before it whose latents others attend to is {last.get(has_turns, 'none')}"
            )
    return [None if source == i else source for i, source in enumerate(given)]


def full_heads(config: HfConfig, windows: list[int | None], usual: tuple[int, int]) -> tuple[int, int]:
    """(KV heads, head_dim) of the layers without a window, where others have the usual ones.

    Older configs say both once, and mean the number only where keys are values; newer ones say by layer what differs.
    """
    by_layer = config.raw.get("per_layer_config")
    if by_layer is None:
        given = {"head_dim": config.raw.get("global_head_dim")}
        if config.flag("attention_k_eq_v"):
            given["num_key_value_heads"] = config.raw.get("num_global_key_value_heads")
    else:
        full = [i for i, window in enumerate(windows) if window is None]
        by_layer = by_layer if isinstance(by_layer, dict) else {"": by_layer}
        entries = list(by_layer.values())
        named = sorted(int(number) if str(number).isdecimal() else -1 for number in by_layer)
        if named != full or any(one != entries[0] for one in entries):
            raise LoadError(
                f"per_layer_config in {config.path} must say the same of each layer that attends to everything, and nothing of "
                f"others; those are {', '.join(map(str, full)) or 'none'}"
            )
        given = dict(entries[0]) if entries and isinstance(entries[0], dict) else {}
        if unread := sorted(set(given) - {"head_dim", "num_key_value_heads"}):
            raise LoadError(
                f"{unread[0]} in per_layer_config of {config.path} is {given[unread[0]]!r}; no layer has its own"
            )
    section = HfConfig({key: value for key, value in given.items() if value is not None}, path=config.path)
    n_kv, width = section.integer("num_key_value_heads", usual[0]), section.integer("head_dim", usual[1])
    if width % 2:
        raise LoadError(f"head_dim of layers that attend to everything is {width} in {config.path}; it must be even")
    return n_kv, width


def mlp_widths(config: HfConfig, n_layers: int) -> list[int]:
    """The width of each layer's MLP: one for all, or a list of them."""
    value = config.raw.get("intermediate_size")
    if not isinstance(value, list):
        return [config.integer("intermediate_size", 4 * config.integer("hidden_size"))] * n_layers
    if len(value) != n_layers:
        raise LoadError(f"intermediate_size in {config.path} has {len(value)} entries; the model has {n_layers} layers")
    return [HfConfig({"intermediate_size": one}, path=config.path).integer("intermediate_size") for one in value]


def cutoffs(config: HfConfig, n_layers: int) -> list[float | None]:
    """By how many deviations a value of each layer's gate must stand out: the quantile of activation_sparsity_pattern."""
    pattern = config.raw.get("activation_sparsity_pattern")
    if pattern is None:
        n_sparse = SPARSE_LAYERS if n_layers > SPARSE_LAYERS else 0
        pattern = [SPARSITY] * n_sparse + [0.0] * (n_layers - n_sparse)
    pattern = pattern if isinstance(pattern, list) else [pattern] * n_layers
    if len(pattern) != n_layers:
        raise LoadError(
            f"activation_sparsity_pattern in {config.path} has {len(pattern)} entries; the model has {n_layers} layers"
        )
    for value in pattern:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
            raise LoadError(
                f"activation_sparsity_pattern in {config.path} has {value!r}; it must hold numbers from 0 to below 1"
            )
    return [NormalDist().inv_cdf(value) if value > 0 else None for value in pattern]


def streams(config: HfConfig, family: Family) -> StreamsSpec | HyperSpec | GatedSpec | None:
    """How many residual streams there are, and which is computed or how they are joined; None where there is but one."""
    if "hc_mult" in family.keys:
        n_streams = config.integer("hc_mult")
        config.at_most("hc_mult", n_streams, MOST_STREAMS)
        return HyperSpec(
            n_streams=n_streams,
            magnitude=config.number("hc_magnitude", 2.0),
            eps=config.number("hc_eps"),
            rounds=config.integer("hc_sinkhorn_iters") if "hc_sinkhorn_iters" in family.keys else 0,
            has_end=family.has_end_connection,
        )
    if "hc_count" in family.keys:
        n_streams = config.integer("hc_count", low=2)
        config.at_most("hc_count", n_streams, MOST_STREAMS)
        return GatedSpec(n_streams=n_streams, rank=config.integer("hc_lowrank"))
    if "altup_num_inputs" not in family.keys:
        return None
    n_streams, active = config.integer("altup_num_inputs"), config.integer("altup_active_idx", low=0)
    config.at_most("altup_num_inputs", n_streams, MOST_STREAMS)
    config.at_most("altup_active_idx", active, n_streams - 1)
    return StreamsSpec(n_streams=n_streams, active=active, scales_output=config.flag("altup_correct_scale"))


def layer_inputs(config: HfConfig) -> LayerInputs:
    """The embeddings of layers."""
    return LayerInputs(
        width=config.integer("hidden_size_per_layer_input"), vocab=config.integer("vocab_size_per_layer_input")
    )


def ngrams(config: HfConfig, has_state: list[bool]) -> NgramSpec | None:
    """The embeddings of n-grams, if any layer has some. has_state: which layers keep one; no other may have them."""
    numbers = sorted(set(config.integers("ple_layer_ids") or ()))
    if not numbers:
        return None
    if any(not 1 <= one <= len(has_state) or not has_state[one - 1] for one in numbers):
        raise LoadError(
            f"ple_layer_ids in {config.path} is {numbers}; each must be the number, from 1 to {len(has_state)}, of a layer "
            "with linear attention"
        )
    longest, n_heads = config.integer("ngram_size", low=2), config.integer("heads_per_ngram")
    width, n = config.integer("ple_embed_dim", config.integer("hidden_size")), (longest - 1) * n_heads
    if width % n:
        raise LoadError(f"ple_embed_dim in {config.path} is {width}; {n} heads of n-grams cannot share it evenly")
    ends = config.raw.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    vocab = config.integer("vocab_size")
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < vocab:
        raise LoadError(
            f"eos_token_id in {config.path} is {ends!r}; n-grams begin anew behind the first, which must be below {vocab}"
        )
    return NgramSpec(
        layers=tuple(one - 1 for one in numbers),
        width=width,
        longest=longest,
        n_heads=n_heads,
        least_rows=config.integer("ngram_vocab_size_base"),
        multiple=config.integer("make_ngram_vocab_size_divisible_by"),
        seed=config.integer("seed", low=0),
        parts=config.integer("split_ngram_parts"),
        vocab=vocab,
        end=end,
        n_taps=config.integer("ple_conv_kernel_size"),
    )
