"""GGUF files for tests, written by the `gguf` package (container, names, quantisation) from models of transformers.

    path = write_gguf("gemma2", tmp_path / "m.gguf", types={"ffn_down": "Q8_0"})

What the converter of llama.cpp does to numbers (rows of q and k, norms plus 1) is done here in its words; the slow tests run
that converter itself (tests/compute/test_gguf_converter.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch

from checkpoints import VOCAB, make_reference
from gguf_layers import (
    BY_WINDOW,
    ffn_width,
    kv_heads,
    longest,
    padded_freqs,
    rope_of,
    turning_pairs,
    write_choice,
    write_mixture,
    write_windowed_heads,
)
from gguf_parts import OWN_EXPERTS, write_dbrx
from gguf_states import STATES_ALONE, keeps_axes, tensors_with_states, write_states, write_states_alone

# family of tests/checkpoints.py -> general.architecture
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2",
    "gemma3": "gemma3", "olmo2": "olmo2", "smollm3": "smollm3", "mixtral": "llama", "qwen3_moe": "qwen3moe",
    "gemma": "gemma", "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4-e2b": "gemma4", "gemma4-a4b": "gemma4",
    "granite": "granite", "granitemoe": "granitemoe", "glm": "chatglm", "glm4": "glm4",
    "glm4_moe": "glm4moe", "cohere": "command-r", "cohere2": "cohere2", "stablelm": "stablelm", "olmoe": "olmoe",
    "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "ernie4_5_moe": "ernie4_5-moe", "qwen2_moe": "qwen2moe",
    "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "internlm3": "llama", "olmo3": "olmo2", "exaone4": "exaone4", "ministral3": "mistral3", "dots1": "dots1",
    "llama4": "llama4", "exaone_moe": "exaone-moe", "jais2": "jais2", "apertus": "apertus",
    "youtu": "deepseek2", "glm4_moe_lite": "deepseek2", "command-r-plus": "command-r", "stablelm-2-12b": "stablelm",
    "minicpm3": "minicpm3", "starcoder2": "starcoder2", "nemotron": "nemotron", "arcee": "arcee",
    "hunyuan_v1_dense": "hunyuan-dense", "gpt2": "gpt2", "gpt_bigcode": "starcoder", "gpt_neox": "gptneox",
    "bloom": "bloom", "mpt": "mpt",
    "phi": "phi2", "falcon": "falcon", "falcon-40b": "falcon", "olmo": "olmo", "dbrx": "dbrx", "minimax_m2": "minimax-m2",
    "granitemoehybrid": "granitehybrid", "granite-h-dense": "granitehybrid", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "kimi_linear": "kimi-linear", "falcon_h1": "falcon-h1", "falcon-h1-normed": "falcon-h1",
    "afmoe": "afmoe", "nemotron_h": "nemotron_h", "nemotron-3": "nemotron_h_moe",
    "hunyuan_v1_moe": "hunyuan-moe", "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
    "jamba": "jamba", "jamba-dense": "jamba", "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2",
    "mistral4": "mistral4", "glm_moe_dsa": "glm-dsa", "mimo_v2_flash": "mimo2", "step3p7": "step35",
}  # fmt: skip
EVERY_SECOND = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
# what a GGUF file cannot say, so that the model must be without it
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EVERY_SECOND, "mlp_only_layers": []},
    "qwen3_5": EVERY_SECOND,
    "qwen3_5_moe": EVERY_SECOND,
    "mistral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    # the converter takes the width of heads from that of the model
    "nemotron": {"head_dim": 16, "mlp_bias": True},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24, "sliding_window_pattern": 3},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    # the converter knows neither its epsilon nor its length
    "glm": {"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "num_attention_heads": 4, "head_dim": 16},
    # the converter fills the table up with zeros
    "gemma3n": {"vocab_size_per_layer_input": VOCAB},
    "gemma4-e2b": {"vocab_size_per_layer_input": VOCAB},
    "cohere2": {"sliding_window_pattern": 4, "num_hidden_layers": 5},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "qwen2_moe": {"mlp_only_layers": []},
    "dots1": {"sliding_window": None},
    # whose own rule for long contexts the converter computes in fp32
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    # chunks are longer than any prompt here, and the last layer has no positions
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "no_rope_layer_interval": 4},
    "gpt2": {"n_inner": None},
    "mpt": {"attn_config": {"clip_qkv": 0.8}},
    "mamba": {"intermediate_size": 128},  # as the converter wants it
    "falcon_mamba": {"intermediate_size": 128, "mixer_rms_eps": 1e-5},  # a file has one epsilon
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},  # as the converter says of all of them
    "hunyuan_v1_moe": {"moe_topk": 3},
    # a tied head has the embedding's multiplier there
    "falcon-h1-normed": {"tie_word_embeddings": False},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 24, "n_group": 1},  # as many heads as attend
    "afmoe": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    # the converter leaves q, k and v's biases as they lie
    "falcon-40b": {"bias": False, "max_position_embeddings": 2048},
    "falcon": {"max_position_embeddings": 2048},
    # llama.cpp has the numbers of the one size in its code; values are as wide as the model over its heads
    "minicpm3": {"v_head_dim": 16, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    "deepseek_v2": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1e4,
            "mscale": 0.5,
            "mscale_all_dim": 0.5,
            "beta_fast": 32,
            "beta_slow": 1,
        }
    },
}
# what becomes a scale beside another tensor
ROUTER_SCALES = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
BY_DEFAULT = ("gpt2", "gpt_bigcode", "gpt_neox", "phi", "falcon", "bloom", "mpt")
ALONE = ("gpt2", "gpt_neox", "bloom", "mpt")  # each query head has a KV head of its own, and nothing says so
SAVED_AS = {"block_sparse_moe.router.": "block_sparse_moe.router.layer.", "block_sparse_moe.experts.": "mlp.experts.",
            "mlp.gate.moe_statics.": "mlp.moe_statics."}  # fmt: skip
BEGIN = {"nemotron_h": ("model.", "backbone."), "bloom": ("transformer.", "")}
Choose = Callable[[str], str]
Tensors = dict[str, np.ndarray]


def gguf_reference(family: str, **overrides: Any) -> Any:
    """The transformers model that `write_gguf` writes."""
    return make_reference(family, **(OVERRIDES.get(family, {}) | overrides))


def add_numbered_words(out: gguf.GGUFWriter, n: int) -> None:
    """A vocabulary of one token per id."""
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([f"t{i}" for i in range(n)])
    out.add_token_types([1] * n)
    out.add_token_merges(["t 0"])


def write_gguf(
    model: Any,
    path: Path,
    *,
    choose: Choose = lambda name: "F32",
    add_words: Callable[[gguf.GGUFWriter], None] | None = None,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    metadata: Mapping[str, Any] = MappingProxyType({}),
    called: str | None = None,
    **writer: Any,
) -> Path:
    """Write the model; `choose` says a tensor's type by its GGUF name, `add_words` adds a vocabulary.

    change: made to all tensors, by their GGUF names. metadata: keys after the architecture's name, in place of the usual;
    None: without it. called: the architecture, where it is not the model's own.
    """
    config = getattr(model.config, "text_config", model.config)
    config.allow_global_per_layer_attribute_access = True  # layers differ: what most of them have
    is_nemotron_3 = config.model_type == "nemotron_h" and "moe" in config.layers_block_type
    family = {"step3p5": "step3p7"}.get(config.model_type, config.model_type.removesuffix("_text"))
    name = called or ARCHITECTURES["nemotron-3" if is_nemotron_3 else family]
    out = gguf.GGUFWriter(str(path), name, **writer)
    write_metadata(out, config)
    if add_words is None:
        add_numbered_words(out, config.vocab_size)
    else:
        add_words(out)
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors, curves = {}, {}
    for theirs, values in tensors_of(model, name).items():
        stem, ending = theirs.rsplit(".", 1)
        if stem.endswith(".act_fn"):  # by layer, in order
            curves.setdefault(f"xielu.{ending}", []).append(float(values.item()))
            continue
        for ours, its in ROUTER_SCALES.items():
            if theirs.endswith(ours):
                stem, ending = theirs.removesuffix(ours) + its, "scale"
        if config.model_type == "falcon_h1" and theirs.endswith("pre_ff_layernorm.weight"):
            tensors[names.get_name(theirs)] = values  # the package's table gives it a name without an ending
            continue
        if ending == "none":  # likewise
            tensors[names.get_name(stem)] = values
            continue
        tensors[f"{names.get_name(stem)}.{ending}"] = values
    for key, numbers in curves.items():
        out.add_array(key, numbers)
    for key, value in metadata.items():
        full = key if key in curves else f"{name}.{key}"
        out.kv_data[0].pop(full, None)
        if value is None:
            continue
        kind = gguf.GGUFValueType.get_type(value)
        out.kv_data[0][full] = gguf.gguf_writer.GGUFValue(value=value, type=kind)
    if config.model_type == "gemma4_text":
        tensors["rope_freqs.weight"] = turning_pairs(config)
    for full, values in change(tensors).items():
        kind = gguf.GGMLQuantizationType[choose(full) if values.ndim > 1 and values.shape[-1] > 1 else "F32"]
        out.add_tensor(full, quantised(values, kind), raw_dtype=kind)
    rope = rope_of(config)
    of_full = rope.get("full_attention", rope)
    if rope.get("rope_type") == "llama3":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        out.add_tensor("rope_freqs.weight", llama3_freqs(width, rope))
    elif config.model_type == "step3p5" and of_full.get("rope_type") == "llama3":
        divisors = padded_freqs(config, of_full, lambda turned: llama3_freqs(turned, of_full))
        out.add_tensor("rope_freqs.weight", divisors)
    for length in ("long", "short"):
        if rope.get(f"{length}_factor"):
            out.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def quantised(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """In blocks of that kind; those that the package cannot quantise to are random blocks with tame scales."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        return tame_blocks(kind, values.shape)


# codes without a sign: those with offsets add theirs (_1) or take them away (_K)
MEAN_CODES = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def tame_blocks(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random blocks of a kind whose values are of order one or less, with a mean of next to nothing: sums of others grow."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (math.prod(shape) // elements, nbytes), dtype=np.uint8)
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind.name, 0)
    scales = np.array([1.0, MEAN_CODES.get(kind.name, 0.0)], dtype=np.float16) * np.float16(2.0**-10)
    n_scales = 2 if kind.name in MEAN_CODES else 1  # a block's own, and that of its offsets
    blocks[:, at : at + 2 * n_scales] = scales[:n_scales].view(np.uint8)
    if kind.name == "MXFP4":  # 2^-9 to 2^-6
        blocks[:, 0] = np.random.default_rng(seed + 1).integers(118, 122, len(blocks))
    if kind.name == "NVFP4":  # 2^-6 to 2^-5
        blocks[:, :4] = np.random.default_rng(seed + 1).integers(8, 16, (len(blocks), 4))
    if kind.name == "IQ1_M":  # its scale lies in the upper half of every second byte
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | np.array([0, 0, 4, 1], dtype=np.uint8) << 4
    return blocks.reshape(*shape[:-1], -1)


def write_kinds_of_heads(out: gguf.GGUFWriter, config: Any) -> None:
    """Of Gemma 4: the usual keys are of layers that attend to everything."""
    windowed, n_shared = [kind == "sliding_attention" for kind in config.layer_types], config.num_kv_shared_layers
    full = config.per_layer_config[windowed.index(False)]
    widths = [config.intermediate_size * (2 if config.use_double_wide_mlp and i >= config.num_hidden_layers - n_shared else 1)
              for i in range(config.num_hidden_layers)]  # fmt: skip
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(widths if config.use_double_wide_mlp else config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    alike = full.num_key_value_heads == config.num_key_value_heads
    by_layer = [config.num_key_value_heads if one else full.num_key_value_heads for one in windowed]
    out.add_head_count_kv(config.num_key_value_heads if alike else by_layer)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_vocab_size(config.vocab_size)
    if config.enable_moe_block:
        out.add_expert_count(config.num_experts)
        out.add_expert_used_count(config.top_k_experts)
        out.add_expert_feed_forward_length(config.moe_intermediate_size)
    out.add_sliding_window(config.sliding_window)
    out.add_sliding_window_pattern(windowed)
    out.add_shared_kv_layers(n_shared)
    out.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        out.add_final_logit_softcapping(config.final_logit_softcapping)
    for add in (out.add_key_length, out.add_value_length, out.add_rope_dimension_count):
        add(full.head_dim)
    for add in (out.add_key_length_swa, out.add_value_length_swa, out.add_rope_dimension_count_swa):
        add(config.head_dim)
    out.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    out.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def write_metadata(out: gguf.GGUFWriter, config: Any) -> None:
    """What the converter writes of a config."""
    if config.model_type in STATES_ALONE:
        return write_states_alone(out, config)
    rope = rope_of(config)
    full, heads = rope.get("full_attention", rope), config.num_attention_heads
    if config.model_type in ("gemma4_text", "dbrx"):
        return (write_dbrx if config.model_type == "dbrx" else write_kinds_of_heads)(out, config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    out.add_context_length(longest(config))
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(ffn_width(config))
    if config.model_type not in BY_WINDOW:
        out.add_head_count(heads)
    if config.model_type not in BY_DEFAULT:  # which no converter writes for these
        out.add_rope_freq_base(full["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    centred = [
        getattr(config, name)
        for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        if hasattr(config, name)
    ]
    if config.model_type == "mpt":
        out.add_clamp_kqv(config.attn_config.clip_qkv)
        out.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if config.model_type.startswith("lfm2"):
        out.add_layer_norm_rms_eps(config.norm_eps)
    elif centred or config.model_type == "olmo":
        out.add_layer_norm_eps(centred[0] if centred else 1e-5)
    else:
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "olmo":
        out.add_clamp_kqv(config.clip_qkv)
    if config.model_type == "gpt_neox":
        out.add_parallel_residual(config.use_parallel_residual)
    write_heads(out, config, full, head_dim)
    write_scaling(out, config, full)
    if config.model_type in ("phi3", "gemma2", "gemma3_text", "gemma3n_text", "cohere2", "gpt_oss", "olmo3", "exaone4",
                             "exaone_moe", "afmoe"):  # fmt: skip
        out.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        out.add_attn_logit_softcapping(config.attn_logit_softcapping)
        out.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("gemma3_text", "gemma3n_text", "olmo3", "exaone4", "exaone_moe"):
        out.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if "sliding_attention" in rope:
        out.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if config.model_type == "stablelm":
        out.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "gemma3n_text":
        write_streams(out, config)
    write_scales(out, config)
    write_states(out, config)
    if config.model_type == "glm_moe_dsa":
        write_choice(out, config)
    is_dense = getattr(config, "num_local_experts", None) == 0
    is_dense |= config.model_type == "nemotron_h" and "moe" not in config.layers_block_type
    if getattr(config, "num_experts_per_tok", None) and not is_dense:
        write_experts(out, config)


def write_scaling(out: gguf.GGUFWriter, config: Any, full: Mapping[str, Any]) -> None:
    """How positions are scaled."""
    if full.get("rope_type") in ("linear", "yarn"):
        out.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        out.add_rope_scaling_factor(full["factor"])
    if full.get("original_max_position_embeddings"):
        out.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full.get("rope_type") == "yarn" and "beta_fast" in full:
        out.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        out.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if full.get("attention_factor"):
        out.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
    if full.get("mscale_all_dim"):
        out.add_rope_scaling_yarn_log_mul((0.1 if hasattr(config, "kv_lora_rank") else 1.0) * full["mscale_all_dim"])
    if full.get("llama_4_scaling_beta"):
        out.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if config.model_type == "phi3" and full.get("long_factor"):
        stretch = config.max_position_embeddings / full["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(stretch) / math.log(full["original_max_position_embeddings"]))
        out.add_rope_scaling_attn_factors(attention)


def write_heads(out: gguf.GGUFWriter, config: Any, full: Mapping[str, Any], head_dim: int) -> None:
    """How many, how wide, and how much of them turns."""
    if config.model_type in BY_WINDOW:
        write_windowed_heads(out, config, full)
    elif hasattr(config, "kv_lora_rank"):
        write_latent(out, config)
    elif config.model_type in BY_DEFAULT:
        if config.model_type not in ALONE:
            is_old = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
            names = ("num_kv_heads", "num_key_value_heads")
            many = next(n for n in (getattr(config, name, None) for name in names) if n)
            out.add_head_count_kv(1 if is_old else many)
        if "partial_rotary_factor" in full:
            out.add_rope_dimension_count(int(head_dim * full["partial_rotary_factor"]))
    else:
        kinds = getattr(config, "layer_types", None) or []
        has_states = not {"conv", "linear_attention"}.isdisjoint(kinds) and not hasattr(config, "linear_num_key_heads")
        n_kv = config.num_key_value_heads
        out.add_head_count_kv([n_kv if kind == "full_attention" else 0 for kind in kinds] if has_states else n_kv)
        out.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
        out.add_key_length(head_dim)
        out.add_value_length(head_dim)


def write_streams(out: gguf.GGUFWriter, config: Any) -> None:
    """Quantiles in place of parts: of a gate that is not cut they lie below every number."""
    out.add_final_logit_softcapping(config.final_logit_softcapping)
    out.add_altup_active_idx(config.altup_active_idx)
    out.add_altup_num_inputs(config.altup_num_inputs)
    out.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    out.add_shared_kv_layers(config.num_kv_shared_layers)
    normal = torch.distributions.normal.Normal(0, 1)
    out.add_activation_sparsity_scale(normal.icdf(torch.tensor(config.activation_sparsity_pattern)).tolist())


def write_latent(out: gguf.GGUFWriter, config: Any) -> None:
    """Heads as wide as latents, of which one serves all queries; of MiniCPM3 as the mathematics has them."""
    out.add_rope_dimension_count(config.qk_rope_head_dim)
    out.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank:
        out.add_q_lora_rank(config.q_lora_rank)
    if config.model_type == "minicpm3":
        out.add_head_count_kv(config.num_key_value_heads)
        out.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
        return
    out.add_head_count_kv(1)
    out.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    out.add_value_length(config.kv_lora_rank)
    out.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    out.add_value_length_mla(config.v_head_dim)


def write_scales(out: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type.startswith("granite"):
        out.add_attention_scale(config.attention_multiplier)
        out.add_embedding_scale(config.embedding_multiplier)
        out.add_residual_scale(config.residual_multiplier)
        out.add_logit_scale(config.logits_scaling)
    if config.model_type.startswith("cohere"):
        out.add_logit_scale(config.logit_scale)


def write_experts(out: gguf.GGUFWriter, config: Any) -> None:
    kind = config.model_type
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    out.add_expert_count(next(n for n in (getattr(config, name, None) for name in names) if n))
    out.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size") or kind in ("gpt_oss", "llama4_text", "minimax_m2", "hunyuan_v1_moe"):
        out.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    if kind in (*BY_WINDOW, "glm_moe_dsa"):
        write_mixture(out, config)
    if kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        out.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if kind == "hunyuan_v1_moe":
        out.add_expert_shared_feed_forward_length(config.intermediate_size)
        out.add_expert_shared_count(1)
    if kind == "llama4_text":
        out.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind == "ernie4_5_moe":
        out.add_expert_shared_count(config.moe_num_shared_experts)
        out.add_leading_dense_block_count(config.moe_layer_start_index)
        out.add_interleave_moe_layer_step(config.moe_layer_interval)
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe_lite", "mistral4"):
        out.add_expert_group_count(config.n_group or 1)
        out.add_expert_group_used_count(config.topk_group or 1)
        out.add_expert_shared_count(config.n_shared_experts)
        out.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
        out.add_expert_weights_scale(config.routed_scaling_factor)
        if config.norm_topk_prob:
            out.add_expert_weights_norm(True)
    if kind == "exaone_moe":
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.num_shared_experts)
        out.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
        out.add_expert_weights_scale(config.routed_scaling_factor)
        out.add_expert_weights_norm(config.norm_topk_prob)
    if kind == "afmoe":
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_leading_dense_block_count(config.num_dense_layers)
        out.add_expert_weights_scale(config.route_scale)
    if kind == "lfm2_moe":
        out.add_leading_dense_block_count(config.num_dense_layers)
    if kind == "kimi_linear":
        out.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
        out.add_expert_shared_count(config.num_shared_experts)
        out.add_expert_weights_scale(config.routed_scaling_factor)
    if kind in ("glm4_moe", "deepseek_v3", "minimax_m2", "lfm2_moe", "kimi_linear", "exaone_moe"):
        out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def tensors_of(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The model's tensors as the converter leaves them, by names that the package's table knows."""
    config, state = getattr(model.config, "text_config", model.config), dict(model.state_dict())
    if config is not model.config:  # beside a tower
        state = {
            k.replace(".language_model.", "."): v for k, v in state.items() if "language_model." in k or "lm_head" in k
        }
    is_transposed = config.model_type == "llama4_text"  # experts as [inputs, outputs]
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    tensors: dict[str, torch.Tensor] = {}
    for full, values in state.items():
        name = full
        if config.model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = values.T
        if "query_key_value." in name:
            n_kv = 1 if config.model_type == "falcon" and not config.new_decoder_architecture else None
            values = by_site(values, config, n_kv)
        for new, old in SAVED_AS.items():  # what transformers calls it in a file
            name = name.replace(new, old)
        old, new = BEGIN.get(config.model_type, ("", ""))
        name = new + name.removeprefix(old) if name.startswith(old) else name
        if name.endswith(("q_proj.weight", "q_proj.bias")) and is_permuted(config, architecture):
            values = permuted(values, config.num_attention_heads)
        if name.endswith(("k_proj.weight", "k_proj.bias")) and is_permuted(config, architecture):
            values = permuted(values, kv_heads(config, name))
        is_added = hasattr(config, "linear_num_key_heads") and not name.endswith("linear_attn.norm.weight")
        if name.endswith("norm.weight") and (
            is_added or config.model_type in ("gemma", "gemma2", "gemma3_text", "nemotron", "step3p5")
        ):
            values = values.float() + 1
        with_states = tensors_with_states(name, values, config)
        if with_states is not None:
            tensors |= with_states
        elif config.model_type in OWN_EXPERTS and ".experts." in name:
            tensors |= OWN_EXPERTS[config.model_type](name, values)
        elif config.model_type == "gemma4_text" and name.endswith("experts.gate_up_proj"):
            tensors[f"{name}.weight"] = values  # as they are
        elif name.endswith("experts.gate_up_proj"):
            root = name.removesuffix("gate_up_proj")
            gate, up = (values.transpose(-1, -2) if is_transposed else values).chunk(2, dim=1)
            tensors |= {f"{root}gate_proj.weight": gate, f"{root}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            tensors[f"{name}.weight"] = values.transpose(-1, -2) if is_transposed else values
        elif name.endswith("kv_b_proj.weight") and config.model_type != "minicpm3":
            keys, heads = values.view(config.num_attention_heads, -1, config.kv_lora_rank).split(
                [config.qk_nope_head_dim, config.v_head_dim], dim=1
            )
            tensors[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
            tensors[name.replace("kv_b", "v_b")] = heads
        elif "_layernorm.norms." in name:  # of each head, stacked
            if name.endswith("norms.0.weight"):
                many = [one for key, one in state.items() if key.startswith(full.removesuffix("0.weight"))]
                tensors[name.replace(".norms.0", "")] = torch.stack(many)
        elif "projections.0.weight" in name:  # those of all streams stacked
            many = [one for key, one in state.items() if key.startswith(full.removesuffix("0.weight"))]
            tensors[name.replace(".0.", ".")] = torch.stack(many)
        elif ".altup_" in name and "projections." in name:
            continue
        elif name.endswith(("sinks", "correct_output_scale", "layer_scalar")):
            tensors[f"{name}.weight"] = values
        else:
            name = name.replace("mlp.expert_bias", "mlp.expert_bias.bias")
            tensors[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return {
        name: np.atleast_1d(
            (values if keeps_axes(name, values) else values.squeeze()).detach().float().contiguous().numpy()
        )
        for name, values in tensors.items()
    }


def joined(tensors: Tensors) -> Tensors:
    """q, k and v in one tensor, and gate and up of all experts, as the converter's options have it."""
    left = dict(tensors)
    for name in tensors:
        if ".attn_q." in name:
            parts = [left.pop(name.replace("attn_q", one)) for one in ("attn_q", "attn_k", "attn_v")]
            left[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
        if ".ffn_gate_exps." in name:
            parts = [left.pop(name.replace("gate", one)) for one in ("gate", "up")]
            left[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    return left


def by_site(values: torch.Tensor, config: Any, n_kv: int | None) -> torch.Tensor:
    """q, k and v one behind the other, of rows that lie by KV head."""
    heads = config.num_attention_heads
    n_kv = n_kv or getattr(config, "num_kv_heads", heads)
    rows = values.reshape(n_kv, heads // n_kv + 2, config.hidden_size // heads, *values.shape[1:])
    parts = (rows[:, :-2], rows[:, -2], rows[:, -1])
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def is_permuted(config: Any, architecture: str) -> bool:
    kinds = ("llama", "mistral", "mixtral", "smollm3", "granite", "granitemoe", "granitemoehybrid", "nemotron_h", "internlm3",
             "ministral3", "arcee", "olmo")  # fmt: skip
    return config.model_type in kinds and architecture not in ("exaone", "pangu-embedded")


def permuted(weights: torch.Tensor, n_heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of the converter."""
    halves = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def llama3_freqs(dim: int, rope: Mapping[str, Any]) -> np.ndarray:
    """`generate_extra_tensors` of the converter: what each frequency of so many dimensions is divided by."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < length / high or wavelength > length / low:
            factors.append(1.0 if wavelength < length / high else factor)
            continue
        smooth = (length / wavelength - low) / (high - low)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
