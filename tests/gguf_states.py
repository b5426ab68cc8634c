"""What the converter of llama.cpp does to layers with a state, for `gguf_files`."""

from __future__ import annotations

from typing import Any

import gguf
import torch

STATES_ALONE = ("mamba", "falcon_mamba", "mamba2")


def write_states_alone(out: gguf.GGUFWriter, config: Any) -> None:
    """All that the converter writes of a model without attention; how long its texts may be is any large number there."""
    out.add_context_length(2**20)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(0)
    out.add_head_count(0)
    out.add_block_count(config.num_hidden_layers)
    out.add_vocab_size(config.vocab_size)
    out.add_ssm_conv_kernel(config.conv_kernel)
    out.add_ssm_state_size(config.state_size)
    out.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if config.model_type == "mamba2":
        out.add_ssm_inner_size(config.num_heads * config.head_dim)
        out.add_ssm_time_step_rank(config.num_heads)
        out.add_ssm_group_count(config.n_groups)
        return
    out.add_ssm_inner_size(config.intermediate_size)
    out.add_ssm_time_step_rank(config.time_step_rank)
    out.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def write_states(out: gguf.GGUFWriter, config: Any) -> None:
    """Of a gated delta rule, of Mamba-2, of short convolutions, or nothing."""
    if hasattr(config, "linear_num_key_heads"):
        write_delta(out, config)
    if hasattr(config, "mamba_n_heads"):
        write_mamba(out, config)
    if config.model_type == "jamba":
        out.add_ssm_conv_kernel(config.mamba_d_conv)
        out.add_ssm_state_size(config.mamba_d_state)
        out.add_ssm_time_step_rank(config.mamba_dt_rank)
        out.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    if config.model_type == "kimi_linear":
        write_by_key(out, config)
    if config.model_type == "nemotron_h":
        write_blocks(out, config)
    if hasattr(config, "conv_L_cache"):
        out.add_shortconv_l_cache(config.conv_L_cache)


def tensors_with_states(name: str, values: torch.Tensor, config: Any) -> dict[str, torch.Tensor] | None:
    """A tensor that such models alone have, as the converter leaves it; None for any other."""
    if "linear_attn." in name:
        return states_of(name, values, config)
    if config.model_type == "jamba" and ".feed_forward.experts." in name:
        return experts_of(name, values)
    if config.model_type in ("jamba", "mamba", "falcon_mamba") and name.endswith(("A_log", ".D")):
        return {f"{name}.none": -values.float().exp() if name.endswith("A_log") else values}
    if config.model_type in ("jamba", "mamba", "falcon_mamba"):
        return None
    if config.model_type == "falcon_h1":
        values = multiplied(name, values, config)
        return mamba_of(name, values) if ".mamba." in name else {name: values}
    if ".mamba." in name:
        return mamba_of(name, values)
    if config.model_type == "kimi_linear" and ".self_attn." in name:
        return by_key_of(name, values)
    if ".mixer." in name:
        return mixer_of(name, values, config)
    if ".shared_mlp." in name and config.model_type == "granitemoehybrid":
        return shared_of(name, values, config)
    if "feed_forward.expert" in name and config.model_type == "lfm2_moe":
        return operators_of(name, values)
    return None


def keeps_axes(name: str, values: torch.Tensor) -> bool:
    """Whether axes of one stay in the file."""
    if "_conv1d." in name or name.endswith("self_attn.A_log.none"):
        return True
    return values.ndim == 2 and (".mamba." in name or ".mixer." in name)


def write_delta(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    out.add_ssm_state_size(config.linear_key_head_dim)
    out.add_ssm_group_count(config.linear_num_key_heads)
    out.add_ssm_time_step_rank(config.linear_num_value_heads)
    out.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    out.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    out.add_array(f"{out.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types])


def write_mamba(out: gguf.GGUFWriter, config: Any) -> None:
    out.add_ssm_conv_kernel(config.mamba_d_conv)
    out.add_ssm_state_size(config.mamba_d_state)
    out.add_ssm_group_count(config.mamba_n_groups)
    out.add_ssm_time_step_rank(config.mamba_n_heads)
    out.add_ssm_inner_size(getattr(config, "mamba_d_ssm", config.mamba_expand * config.hidden_size))
    if config.model_type == "falcon_h1":
        return
    out.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    out.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def write_by_key(out: gguf.GGUFWriter, config: Any) -> None:
    out.kv_data[0].pop(f"{out.arch}.attention.head_count_kv", None)
    out.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    out.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    out.add_kda_head_dim(config.linear_head_dim)


def by_key_of(name: str, values: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """A tensor of a layer that fades by key, as the converter leaves it; None for one of the others."""
    name = name.replace("forget_gate.", "")
    if name.endswith("conv1d.weight"):
        parts = zip("qkv", values.chunk(3), strict=True)
        return {name.replace("conv1d", f"{one}_conv1d"): part[None] for one, part in parts}
    if name.endswith("A_log"):
        return {f"{name}.none": -values.float().exp()}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): values}
    return {name: values} if any(f".{one}_proj." in name for one in ("f_a", "f_b", "g_a", "g_b", "b")) else None


def multiplied(name: str, values: torch.Tensor, config: Any) -> torch.Tensor:
    """Of Falcon-H1, times what its config multiplies by."""
    attention, gate, down = config.attention_in_multiplier, *config.mlp_multipliers
    factors = {
        "down_proj": down, "gate_proj": gate, "q_proj": attention, "v_proj": attention,
        "k_proj": attention,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    if "in_proj" in name:
        keys = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads)
        parts = zip(values.split(sizes), config.ssm_multipliers, strict=True)
        return torch.cat([config.ssm_in_multiplier * part * factor for part, factor in parts])
    if "mamba.norm" in name:
        return values.view(config.mamba_n_groups, -1)
    if "k_proj" in name:  # one after the other, which rounds twice
        values = values * config.key_multiplier
    return values * next((factor for part, factor in factors.items() if part in name), 1.0)


def write_blocks(out: gguf.GGUFWriter, config: Any) -> None:
    """What Nemotron-H's blocks are, by their KV heads and inner widths."""
    kinds, has_experts = config.layers_block_type, "moe" in config.layers_block_type
    mlp, width = ("moe", config.moe_intermediate_size) if has_experts else ("mlp", config.intermediate_size)
    for key in ("attention.head_count_kv", "feed_forward_length", "expert_count"):
        out.kv_data[0].pop(f"{out.arch}.{key}", None)
    out.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    out.add_feed_forward_length([width if kind == mlp else 0 for kind in kinds])
    out.add_ssm_conv_kernel(config.conv_kernel)
    out.add_ssm_state_size(config.ssm_state_size)
    out.add_ssm_group_count(config.n_groups)
    out.add_ssm_time_step_rank(config.mamba_num_heads)
    out.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    out.add_rope_scaling_finetuned(False)
    if has_experts:
        out.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        out.add_expert_shared_count(config.n_shared_experts)
        out.add_expert_weights_norm(config.norm_topk_prob)
        out.add_expert_weights_scale(config.routed_scaling_factor)
        out.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            out.add_moe_latent_size(config.moe_latent_size)


def mixer_of(name: str, values: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """A tensor of Nemotron-H in the words of the converter."""
    root, _, part = name.partition("mixer.")
    if part in ("experts.up_proj", "experts.down_proj"):
        return {f"{root.replace('backbone.', 'model.')}mlp.{part}.weight": values}
    if part == "gate.e_score_correction_bias":
        return {f"{root}mixer.gate.e_score_correction.bias": values}
    if part == "norm.weight":
        return {name: values.view(config.n_groups, -1)}
    if part == "dt_bias" and "moe" in getattr(config, "layers_block_type", ()):
        return {f"{root}mixer.dt.bias": values}
    return mamba_of(name, values)


def experts_of(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of Jamba's mixture, by the names of others."""
    name = name.replace("feed_forward.", "mlp.")
    if name.endswith("down_proj"):
        return {f"{name}.weight": values}
    parts = zip(("gate_proj", "up_proj"), values.chunk(2, dim=1), strict=True)
    return {f"{name.replace('gate_up_proj', one)}.weight": part for one, part in parts}


def mamba_of(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor of Mamba-2 in the words of the converter: -e^A_log, with an axis more than a checkpoint has."""
    if name.endswith("A_log"):
        return {f"{name}.none": -values.float().exp()[:, None]}
    if name.endswith(".D"):
        return {f"{name}.none": values[:, None]}
    return {name.replace(".dt_bias", ".dt_proj.bias"): values[None] if name.endswith("norm.weight") else values}


def shared_of(name: str, values: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Of Granite's shared experts gate and up apart, or of what is the MLP where there are no others."""
    root = name.partition("shared_mlp.")[0] + ("mlp.shared_expert." if config.num_local_experts else "mlp.")
    if name.endswith("output_linear.weight"):
        return {f"{root}down_proj.weight": values}
    gate, up = values.chunk(2)
    return {f"{root}gate_proj.weight": gate, f"{root}up_proj.weight": up}


def operators_of(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of LFM2's mixture, experts stacked."""
    if name.endswith("expert_bias"):
        return {f"{name}.bias": values}
    name = name.removeprefix("model.")
    if name.endswith("experts.down_proj"):
        return {name.replace("down_proj", "w2.weight"): values}
    gate, up = values.chunk(2, dim=1)
    return {name.replace("gate_up_proj", "w1.weight"): gate, name.replace("gate_up_proj", "w3.weight"): up}


def states_of(name: str, values: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """A tensor of a gated delta rule in the words of the converter: q, k, v and z apart, value heads tiled, -e^A_log."""
    keys, many = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    root, _, part = name.partition("linear_attn.")
    if part == "in_proj_qkvz.weight":
        own = many * config.linear_value_head_dim
        sizes = (config.linear_key_head_dim, config.linear_key_head_dim, own, own)
        q, k, v, z = (one.flatten(0, 1) for one in values.unflatten(0, (keys, -1)).split(sizes, dim=1))
        return {
            f"{root}linear_attn.in_proj_qkv.weight": torch.cat([q, k, v]),
            f"{root}linear_attn.in_proj_z.weight": z,
        }
    if part == "A_log":
        values = -values.float().exp()
    if config.model_type != "qwen3_next" and part not in ("norm.weight", "out_proj.weight"):
        width = (
            1 if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight") else config.linear_value_head_dim
        )
        first = len(values) - keys * many * width
        heads = values[first:].unflatten(0, (keys, many, width)).transpose(0, 1).flatten(0, 2)
        values = torch.cat([values[:first], heads])
    if config.model_type != "qwen3_next" and part == "out_proj.weight":
        values = values.unflatten(1, (keys, many, -1)).transpose(1, 2).flatten(1)
    return {name.replace(".dt_bias", ".dt_proj.bias").replace("A_log", "A_log.none"): values}
