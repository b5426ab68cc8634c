"""How a GGUF file's metadata becomes a config.json's keys, and which of its tensors are the model's.

A file is read as the Hugging Face checkpoint that it was converted from: the keys of `read_config` go through
`models.read` like any config.json. What differs between architectures is in `architectures`; where a tensor of such a
checkpoint lies in the file, `places` knows.
"""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig
from diptych.models.families.table import BY_ARCHITECTURE
from diptych.models.gguf.architecture import USUAL, GgufArchitecture
from diptych.models.gguf.architectures import (
    APERTUS,
    DECI,
    DEEPSEEK_V2,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GLM_DSA,
    MIMO2,
    MODERN_BERT,
    NEMOTRON_H,
    STEP35,
    architecture_of,
)
from diptych.models.gguf.file import PART, GgufFile, GgufTensor, open_gguf
from diptych.models.gguf.keys import NEEDED, Keys
from diptych.models.gguf.layers import (
    CURVES,
    FFN,
    HEADS,
    SHARED,
    add_mimo,
    add_searched,
    add_step,
    add_windowed_heads,
    check_curves,
    index_kinds,
)
from diptych.models.gguf.places import TYPES
from diptych.models.gguf.states import add_states
from diptych.models.read import read_model
from diptych.models.spec import ModelSpec

logger = logging.getLogger("diptych.models")

# what a rotation divides its frequencies by: Llama 3's own scaling, and the two sets of Phi 3
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
INDEX = re.compile(r"^blk\.(\d+)\.indexer\.")
UNUSED_KV = re.compile(r"^blk\.\d+\.attn_(k|v|k_norm)\.weight$")
NEVER = 1e20  # what a frequency is divided by that is none
BLOCK = re.compile(r"^blk\.(\d+)\.")
ROPE_TENSOR = re.compile(r"^(blk\.\d+\.)?rope_(freqs|factors_long|factors_short)\.weight$")


def read_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as a config.json. Raises UnsupportedModel and LoadError, which name the key."""
    kind = architecture_of(file)
    keys = Keys(file)
    names = {**USUAL, **kind.keys, kind.eps: "rms_norm_eps"}
    keys.refuse_changing(names, kind)
    config: dict[str, Any] = {"architectures": [kind.architecture], **kind.fixed}
    for name, ours in names.items():
        if (kind.has_windowed_heads and name in HEADS) or (kind is DECI and name in (*HEADS, FFN)):
            continue
        read = keys.by_layer if name in kind.by_layer else keys.number
        value = read(name) if ours else None
        is_needed = ours and name in (*NEEDED, kind.eps) and not (name == "feed_forward_length" and kind.is_tiled)
        if value is None and is_needed:
            raise LoadError(
                f"{keys.full(name)} is missing from {file.path}", hint="the file is damaged, or no language model"
            )
        if value is not None:
            config[ours] = value
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise LoadError(
            f"tensor token_embd.weight is missing from {file.path}", hint="it holds a vocabulary, or an adapter"
        )
    config["num_hidden_layers"] = n_layers_of(file)
    HfConfig(config, path=str(file.path)).integer("num_hidden_layers")  # lists as long as that are made below
    if kind.has_windowed_heads:
        add_windowed_heads(config, keys)
    elif kind is DECI:
        add_searched(config, keys)
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    heads = config["num_attention_heads"]
    if not isinstance(heads, int) or heads < 1:
        raise LoadError(f"{keys.full('attention.head_count')} in {file.path} is {heads}; it must be at least 1")
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", config["hidden_size"] // heads)
    if not isinstance(config["head_dim"], int) or config["head_dim"] < 1:
        raise LoadError(
            f"heads in {file.path} are {config['head_dim']} wide ({keys.full('attention.key_length')}); it must be at least 1"
        )
    config.setdefault("rope_theta", 10_000.0)
    blocks = {name.partition(".")[2].partition(".")[2] for name in file.tensors if name.startswith("blk.")}
    blocks |= {"attn_q.bias" for name in blocks if name == "attn_qkv.bias"}
    config |= {ours: theirs in blocks for ours, theirs in kind.present.items()}
    config |= {ours: theirs not in blocks for ours, theirs in kind.absent.items()}
    if "attention.kv_lora_rank" in kind.keys:
        _add_latent(config, keys)
    elif kind is not MIMO2 and keys.number("attention.value_length") not in (
        None,
        config.get("global_head_dim", config["head_dim"]),
    ):
        raise LoadError(f"{file.path} has values of another width than keys, which are not read from GGUF files")
    if keys.number("pooling_type"):
        config["pooling_type"] = keys.number("pooling_type")
    _add_own(config, keys, file, kind)
    return _without_unread(config, file)


def _add_own(config: dict[str, Any], keys: Keys, file: GgufFile, kind: GgufArchitecture) -> None:
    """What families have of their own: scales, states, windows, how they turn."""
    if kind.wide_layers is not None:
        is_wide = config["num_hidden_layers"] == kind.wide_layers
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
        )
    if kind.keys.get("attention.scale"):
        config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)
    if kind is GEMMA3N:
        _add_streams(config, keys, file)
    add_states(config, keys, file, kind)
    _add_windows(config, keys, kind)
    if kind is GLM_DSA:
        config["indexer_types"] = index_kinds(file, config["num_hidden_layers"])
    if kind is MIMO2:
        add_mimo(config, keys, file)
    if kind is APERTUS:
        check_curves(file, config["num_hidden_layers"])
    if kind is GEMMA4:
        _add_full_heads(config, keys, file)
    elif kind is STEP35:
        add_step(config, keys, file)
    elif kind is not NEMOTRON_H:  # which knows no positions, whatever the converter says of how much of a head turns
        _add_rope(config, keys, file, kind)
    if "multi_query" in BY_ARCHITECTURE[kind.architecture].keys:
        config["multi_query"] = config["num_key_value_heads"] == 1
    if kind is FALCON:
        _add_grouping(config, file)
    if kind is MODERN_BERT and keys.text("hidden_activation") is not None:
        config["hidden_activation"] = keys.text("hidden_activation")
    if TYPES in file.tensors and "type_vocab_size" in BY_ARCHITECTURE[kind.architecture].keys:
        config["type_vocab_size"] = file.tensors[TYPES].shape[0]


def _add_grouping(config: dict[str, Any], file: GgufFile) -> None:
    """Of Falcon: one KV head is the older architecture's; two norms, or several KV heads, are the newer one's."""
    has_two_norms = "blk.0.attn_norm_2.weight" in file.tensors
    config["new_decoder_architecture"] = has_two_norms or not config["multi_query"]
    config["num_ln_in_parallel_attn"] = 2 if has_two_norms else 1


def _without_unread(config: dict[str, Any], file: GgufFile) -> dict[str, Any]:
    """Without what was filled in above and the family has no key for. LoadError where it says more than usual."""
    read = BY_ARCHITECTURE[config["architectures"][0]].keys
    usual: dict[str, Any] = {
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "num_key_value_heads": config["num_attention_heads"],
    }
    if "rope_theta" not in read:
        usual |= {"rope_theta": 10_000.0, "partial_rotary_factor": 1.0, "rope_scaling": {"rope_type": "default"}}
    for name in [name for name in usual if name in config and name not in read]:
        value = config.pop(name)
        if value != usual[name]:
            raise LoadError(f"{name} of {file.path} is {value}; {config['architectures'][0]} has no such key")
    return config


def n_layers_of(file: GgufFile) -> int:
    """Its layers but those that only draft, which come last."""
    keys = Keys(file)
    drafting = keys.number("nextn_predict_layers") or 0
    n_blocks = keys.number("block_count")
    if n_blocks is None or (drafting and not 0 <= drafting < n_blocks):
        raise LoadError(f"{file.path} has {n_blocks} blocks, of which {drafting} draft", hint="the file is damaged")
    return int(n_blocks - drafting) if drafting else n_blocks


def _add_latent(config: dict[str, Any], keys: Keys) -> None:
    """Widths of heads: the file's are those of the latents, which one head of keys serves for all."""
    whole = keys.number("attention.key_length_mla") or keys.number("attention.key_length")
    turned = keys.number("rope.dimension_count")
    if not whole or not turned or turned >= whole:
        raise LoadError(
            f"{keys.full('rope.dimension_count')} is {turned} of heads of {whole}; it must be a part of them"
        )
    config.pop("head_dim")
    config["qk_rope_head_dim"], config["qk_nope_head_dim"] = turned, whole - turned
    config.setdefault("v_head_dim", keys.number("attention.value_length"))
    config["num_key_value_heads"] = config["num_attention_heads"]
    if config["architectures"] == [DEEPSEEK_V2.architecture]:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _add_streams(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """What the tensors say of widths, and quantiles of deviations as the parts of a row that they cut."""
    table, left = (file.tensors.get(name) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"))
    if table is None or left is None:
        name = "per_layer_token_embd.weight" if table is None else "blk.0.laurel_l.weight"
        raise LoadError(f"tensor {name} is missing from {file.path}", hint="the file may be incomplete")
    config |= {"vocab_size_per_layer_input": table.shape[0], "laurel_rank": left.shape[0]}
    deviations = keys.values("activation_sparsity_scale")
    if deviations is not None:
        if any(not isinstance(one, float) or math.isnan(one) for one in deviations):
            raise LoadError(f"{keys.full('activation_sparsity_scale')} in {file.path} must hold numbers")
        config["activation_sparsity_pattern"] = [NormalDist().cdf(one) for one in deviations]


def _add_full_heads(config: dict[str, Any], keys: Keys, file: GgufFile) -> None:
    """What layers that attend to everything have of their own: KV heads, no projection of values, pairs that do not turn."""
    table, experts = (file.tensors.get(name) for name in ("per_layer_token_embd.weight", "blk.0.ffn_down_exps.weight"))
    config["vocab_size_per_layer_input"] = config["vocab_size"] if table is None else table.shape[0]
    config["enable_moe_block"] = experts is not None
    if experts is not None and experts.type.name == "NVFP4":
        raise LoadError(f"{file.path} has experts in NVFP4 whose scales are of the mixture too, which is not supported")
    windowed = [
        one == "sliding_attention" for one in config.get("layer_types") or [False] * config["num_hidden_layers"]
    ]
    full = [i for i, one in enumerate(windowed) if not one]
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):
        if len(heads) != len(windowed) or len(set(zip(windowed, heads, strict=True))) > 2:
            raise LoadError(f"{keys.full('attention.head_count_kv')} in {file.path} differs between layers of one kind")
        of_kind = dict(zip(windowed, heads, strict=True))
        config["num_key_value_heads"] = of_kind.get(True, of_kind.get(False))
        config["num_global_key_value_heads"] = of_kind.get(False)
    width = config.get("global_head_dim") or config["head_dim"]
    differing = {"head_dim": width}
    if isinstance(heads, list):
        differing["num_key_value_heads"] = config.pop("num_global_key_value_heads")
    config.pop("global_head_dim", None)
    config["per_layer_config"] = {str(i): differing for i in full}
    names = [{one for one in ("attn_k", "attn_v") if f"blk.{i}.{one}.weight" in file.tensors} for i in full]
    config["attention_k_eq_v"] = {"attn_k"} in names
    for name, wanted in (("rope.dimension_count", width), ("rope.dimension_count_swa", config["head_dim"])):
        if keys.number(name) not in (None, wanted):
            raise LoadError(
                f"{keys.full(name)} in {file.path} is {keys.number(name)} of heads of {wanted}; all of it must turn"
            )
    divisors = file.floats(ROPE_FREQS) or [1.0] * (width // 2)
    n_turning = sum(one == 1.0 for one in divisors)
    if len(divisors) != width // 2 or any(one < NEVER for one in divisors[n_turning:]):
        raise LoadError(
            f"{ROPE_FREQS} in {file.path} must hold {width // 2} numbers: 1 for pairs that turn, then {NEVER:g} or more"
        )
    # the next number up, as the product with the width is cut to a whole number
    part = min(math.nextafter(2 * n_turning / width, 2.0), 1.0)
    theta = {kind: {"rope_type": "default", "rope_theta": config[key]} for kind, key in
             (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq"))}  # fmt: skip
    theta["full_attention"] |= {"rope_type": "proportional", "partial_rotary_factor": part}
    config["rope_parameters"] = theta


def _add_windows(config: dict[str, Any], keys: Keys, kind: GgufArchitecture) -> None:
    local, pattern_key = keys.number("rope.freq_base_swa"), "attention.sliding_window_pattern"
    if kind is MODERN_BERT and local is not None:
        config["rope_local_base_freq"] = local
    elif kind in (GEMMA3N, GEMMA4) or kind.architecture == "Gemma3ForCausalLM":
        config["rope_local_base_freq"] = local or 10_000.0
    elif not kind.has_windowed_heads and local not in (None, config["rope_theta"]):
        raise LoadError(f"{keys.full('rope.freq_base_swa')} is {local}; {kind.architecture} turns all its layers alike")
    if kind.keys.get("attention.sliding_window") != "sliding_window":
        return
    config["sliding_window"] = config.get("sliding_window") or None
    if kind.window_every is None or config["sliding_window"] is None:
        return
    pattern = keys.values(pattern_key)
    if pattern is None:
        every = keys.number(pattern_key) or kind.window_every
        if not isinstance(every, int) or every < 1:
            raise LoadError(f"{keys.full(pattern_key)} is {every}; it must be at least 1")
        pattern = [(i + 1) % every != 0 for i in range(config["num_hidden_layers"])]
    config["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _add_rope(config: dict[str, Any], keys: Keys, file: GgufFile, kind_of_file: GgufArchitecture) -> None:
    """partial_rotary_factor and rope_scaling: classes have defaults of their own, which a file that is silent does not mean."""
    if "head_dim" in config:
        config["partial_rotary_factor"] = (keys.number("rope.dimension_count") or config["head_dim"]) / config[
            "head_dim"
        ]
    kind, factor = (
        keys.text("rope.scaling.type"),
        keys.number("rope.scaling.factor") or keys.number("rope.scale_linear"),
    )
    original = keys.number("rope.scaling.original_context_length")
    attention = keys.number("rope.scaling.yarn_attn_factor") or keys.number("rope.scaling.attn_factor")
    freqs, long, short = (file.floats(name) for name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT))
    scaling: dict[str, Any] = {"rope_type": "default"}
    if freqs is not None and (long or short or kind not in (None, "none")):
        raise LoadError(f"{file.path} scales its positions twice: by {ROPE_FREQS} and by another rule")
    if freqs is not None:
        # the converter keeps Llama 3's rule as the numbers that come out of it, and drops the rule
        scaling = {"rope_type": "longrope", "long_factor": freqs, "short_factor": freqs, "factor": 1.0,
                   "attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}  # fmt: skip
    elif long is not None or short is not None:
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": attention or 1.0,
        }
        config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                   "attention_factor": attention, "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
                   "beta_slow": keys.number("rope.scaling.yarn_beta_slow"), **kind_of_file.yarn}  # fmt: skip
        stretch, bend = (
            keys.number(name) for name in ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
        )
        if stretch:  # is the same for both here, as all published models have it; of latent attention a tenth of it
            stretch = stretch / 0.1 if "attention.kv_lora_rank" in kind_of_file.keys else stretch
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), stretch)
        if bend:
            scaling["llama_4_scaling_beta"] = bend
    elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in (None, "none", "longrope"):
        raise LoadError(
            f"{keys.full('rope.scaling.type')} in {file.path} is {kind!r}; linear, yarn and longrope are read"
        )
    config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}


def load_gguf_spec(path: Path) -> ModelSpec:
    """The model of a GGUF file, as the planner sees it. LoadError where it holds another number of parameters than it says."""
    file, part = open_gguf(path), PART.match(path.name)
    return read_model(HfConfig(read_config(file), path=str(path)), name=path.stem if part is None else part["stem"])


def is_beside(name: str, file: GgufFile) -> bool:
    """Whether a tensor is none of the decoder's: how positions turn, layers that only draft, keys and values of layers that
    attend to another's, an index of those that take another's choice, or for pooled states.
    """
    block = BLOCK.match(name)
    if block is not None and int(block[1]) >= n_layers_of(file):
        return True
    if INDEX.match(name) and block is not None:
        return index_kinds(file, n_layers_of(file))[int(block[1])] == SHARED
    if block is not None and "attention.shared_kv_layers" in architecture_of(file).keys and UNUSED_KV.match(name):
        return int(block[1]) >= n_layers_of(file) - (Keys(file).number("attention.shared_kv_layers") or 0)
    return ROPE_TENSOR.match(name) is not None or name in architecture_of(file).dense


def scales_beside(tensor: GgufTensor) -> tuple[str, ...]:
    """The names of what NVFP4 may have beside a matrix: its scale, and that of its inputs, which are rounded otherwise here."""
    stem = tensor.name.removesuffix("weight")
    return (f"{stem}scale", f"{stem}input_scale") if tensor.type.name == "NVFP4" else ()


def count_parameters(file: GgufFile) -> int:
    """Elements of all tensors that are the model's."""
    scales = {name for tensor in file.tensors.values() for name in scales_beside(tensor)}
    curves = len(CURVES) * n_layers_of(file) if architecture_of(file) is APERTUS else 0
    return curves + sum(
        math.prod(tensor.shape)
        for name, tensor in file.tensors.items()
        if name not in scales and not is_beside(name, file)
    )
