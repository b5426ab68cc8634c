"""What a GGUF file says of layers of several kinds: heads by window (MiMo-V2-Flash, Step 3.5), an index (GLM-5), what
a search has left of them (Nemotron NAS), what bends their activations (Apertus).
"""

from __future__ import annotations

import math
import re
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.gates import XIELU_LEAST, XIELU_SLOPE
from diptych.models.gguf.file import GgufArray, GgufFile
from diptych.models.gguf.keys import Keys

WINDOWED, FULL = "sliding_attention", "full_attention"
PATTERN, SWA_BASE = "attention.sliding_window_pattern", "rope.freq_base_swa"
HEADS = {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
FFN = "feed_forward_length"
LIMITS = {"swiglu_clamp_exp": "swiglu_limits", "swiglu_clamp_shexp": "swiglu_limits_shared"}
INDEXER_TYPES = "attention.indexer.types"
OWN, SHARED = "full", "shared"
SHARING_CONTEXT, SHARED_EVERY, SHARED_FROM = 1_048_576, 4, 3
ROPE_FREQS = "rope_freqs.weight"
# Apertus's activations: a number for each layer, or one for all, under keys without the architecture's name
CURVE = re.compile(r"^model\.layers\.(\d+)\.mlp\.act_fn\.(alpha_[pn])$")
CURVES = ("alpha_p", "alpha_n")
ALIKE = {"beta": XIELU_SLOPE, "eps": XIELU_LEAST}  # which all published models have


def add_windowed_heads(config: dict[str, Any], keys: Keys) -> None:
    """layer_types, and heads of those that attend to everything in place of lists; those of windowed layers come out last.

    Lists may go on behind the model's layers, of those that draft.
    """
    n_layers = config["num_hidden_layers"]
    pattern = keys.values(PATTERN)
    if pattern is None or len(pattern) < n_layers or any(one not in (0, 1) for one in pattern):
        raise LoadError(
            f"{keys.full(PATTERN)} in {keys.path} must hold {n_layers} truth values or more, one for each layer"
        )
    kinds = config["layer_types"] = [WINDOWED if one else FULL for one in pattern[:n_layers]]
    for name, ours in HEADS.items():
        values = keys.values(name) or [keys.number(name)] * n_layers
        if len(values) < n_layers:
            raise LoadError(
                f"{keys.full(name)} in {keys.path} has {len(values)} entries; the model has {n_layers} layers"
            )
        found = {kind: {value for one, value in zip(kinds, values, strict=False) if one == kind} for kind in kinds}
        if any(len(one) > 1 for one in found.values()):
            raise LoadError(f"{keys.full(name)} in {keys.path} differs between layers of one kind")
        of_kind = {kind: one.pop() for kind, one in found.items()}
        config[ours] = of_kind.get(FULL, of_kind.get(WINDOWED))
        config[f"windowed {ours}"] = of_kind.get(WINDOWED, config[ours])


def add_searched(config: dict[str, Any], keys: Keys) -> None:
    """Of Nemotron NAS: block_configs of the numbers of heads, of KV heads and of an MLP's width of each layer, 0 for none."""
    n_layers = config["num_hidden_layers"]
    by_layer = []
    for name in (*HEADS, FFN):
        values = keys.values(name) or [keys.number(name)] * n_layers
        if len(values) != n_layers or any(type(one) is not int or one < 0 for one in values):
            raise LoadError(f"{keys.full(name)} in {keys.path} must hold {n_layers} whole numbers, one for each layer")
        by_layer.append(values)
    n_heads = config["num_attention_heads"] = max(by_layer[0])
    config["num_key_value_heads"], blocks = max(by_layer[1]), []
    for i, (n, n_kv, width) in enumerate(zip(*by_layer, strict=True)):
        if n and not n_kv:
            raise LoadError(f"layer {i} in {keys.path} has a product in place of attention, which is not supported")
        if n not in (0, n_heads) or (n_kv and n % n_kv):
            raise LoadError(f"layer {i} in {keys.path} has {n} query heads for {n_kv} KV heads, of {n_heads} elsewhere")
        blocks.append({
            "attention": {"no_op": not n, "n_heads_in_group": n // n_kv if n else None},
            "ffn": {"no_op": not width, "intermediate_size": width or None},
        })  # fmt: skip
    config["block_configs"], config["intermediate_size"] = blocks, None


def add_mimo(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """Of MiMo-V2-Flash: widths of values, a base of windowed layers, which layers have experts and which sinks."""
    n, n_kv = (config.pop(f"windowed {ours}") for ours in HEADS.values())
    config |= {"swa_num_attention_heads": n, "swa_num_key_value_heads": n_kv}
    config["v_head_dim"] = keys.number("attention.value_length") or config["head_dim"]
    config["swa_rope_theta"] = keys.number(SWA_BASE) or 10_000.0
    kinds = config["layer_types"]
    config["mlp_layer_types"] = [
        "sparse" if f"blk.{i}.ffn_gate_inp.weight" in file.tensors else "dense" for i in range(len(kinds))
    ]
    for kind, ours in ((FULL, "add_full_attention_sink_bias"), (WINDOWED, "add_swa_attention_sink_bias")):
        config[ours] = any(f"blk.{i}.attn_sinks.weight" in file.tensors for i, one in enumerate(kinds) if one == kind)


def add_step(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """Of Step 3.5: query heads and positions of windowed layers; half of a head turns in the others; limits by layer."""
    n, n_kv = (config.pop(f"windowed {ours}") for ours in HEADS.values())
    if n_kv != config["num_key_value_heads"]:
        raise LoadError(
            f"{keys.full('attention.head_count_kv')} in {keys.path} differs from layer to layer, which is not supported"
        )
    config["num_sliding_attention_heads"] = n
    n_layers, width = config["num_hidden_layers"], config["head_dim"]
    for name, ours in LIMITS.items():
        values = keys.values(name)
        if values is not None and len(values) < n_layers:
            raise LoadError(
                f"{keys.full(name)} in {keys.path} has {len(values)} entries; the model has {n_layers} layers"
            )
        config[ours] = None if values is None else values[:n_layers]
    turned = (keys.number("rope.dimension_count") or width) / width
    full = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": turned / 2}
    freqs = file.floats(ROPE_FREQS)
    if freqs is not None:  # padded with ones, which windowed layers do not read
        freqs = freqs[: int(width * turned / 2) // 2]
        full |= {"rope_type": "longrope", "long_factor": freqs, "short_factor": freqs, "factor": 1.0, "attention_factor": 1.0,
                 "original_max_position_embeddings": config["max_position_embeddings"]}  # fmt: skip
    windowed = {"rope_type": "default", "rope_theta": keys.number(SWA_BASE) or config["rope_theta"],
                "partial_rotary_factor": turned}  # fmt: skip
    config["rope_parameters"] = {FULL: full, WINDOWED: windowed}


def index_kinds(file: GgufFile, n_layers: int) -> list[str]:
    """Whether each layer has an index of its own, or takes the choice of one before it: in llama.cpp, too, those of GLM-5.2 are
    known by its context where a file does not say.
    """
    keys = Keys(file)
    given = keys.values(INDEXER_TYPES)
    if given is None:
        shares = (keys.number("context_length") or 0) >= SHARING_CONTEXT
        return [SHARED if shares and i >= SHARED_FROM and (i - 2) % SHARED_EVERY else OWN for i in range(n_layers)]
    if len(given) < n_layers or any(one not in (0, 1) for one in given):
        raise LoadError(
            f"{keys.full(INDEXER_TYPES)} in {file.path} must hold {n_layers} truth values or more, one for each layer"
        )
    return [OWN if one else SHARED for one in given[:n_layers]]


def number_of_curve(name: str, file: GgufFile) -> float | None:
    """What the tensor that a checkpoint calls `name` holds, of an activation's; None for another tensor."""
    match = CURVE.match(name)
    if match is None:
        return None
    found, layer = curve_of(match[2], file), int(match[1])
    return found[layer] if len(found) > 1 else found[0]


def check_curves(file: GgufFile, n_layers: int) -> None:
    """LoadError for activations that have other numbers than layers, or another form."""
    for name in (*CURVES, *ALIKE):
        found = curve_of(name, file)
        if len(found) not in (1, n_layers):
            raise LoadError(f"xielu.{name} in {file.path} has {len(found)} numbers; the model has {n_layers} layers")
        wanted = ALIKE.get(name)
        if wanted is not None and any(not math.isclose(one, wanted, rel_tol=0.01) for one in found):
            raise LoadError(f"xielu.{name} in {file.path} is {found[0]:g}; {wanted:g} can be read")


def curve_of(name: str, file: GgufFile) -> list[float]:
    """The numbers of all layers, or one for all."""
    stored = file.metadata.get(f"xielu.{name}")
    values = stored.values() if isinstance(stored, GgufArray) and stored.count <= 2**20 else [stored]
    found = [one for one in values if isinstance(one, float) and math.isfinite(one)]
    if not found or len(found) != len(values):
        raise LoadError(
            f"xielu.{name} is missing from {file.path}, or holds what is no number",
            hint="the file may be incomplete, or made by an older converter",
        )
    return found
