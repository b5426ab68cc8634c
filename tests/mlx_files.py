"""Folders that mlx-lm quantised: small ones that it wrote (tests/data/mlx), with its own logits of them, and fresh ones.

    python tests/mlx_files.py tests/data/mlx      # how those were made; wants mlx-lm, with mlx[cpu] on Linux

MLX runs on few systems, so only slow tests that make fresh folders import it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoints import VOCAB, make_checkpoint
from coded_files import mxfp4_checkpoint

DATA = Path(__file__).parent / "data" / "mlx"
LOGITS = "logits.safetensors"  # of PROMPT, by mlx-lm in fp32 [T, V]
PROMPT = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(7)).tolist()
GROUP = 32
MODES = ("nvfp4", "mxfp8")
NO_EXPERT_IS_DENSE = {"mlp_only_layers": []}
STATES = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
WIDE = {"moe_intermediate_size": 64}  # that groups divide
# mlx-lm rounds where yarn begins and ends, which gpt-oss does not
PLAIN_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
# kind -> family, bits (none: left as they are), fields of the checkpoint
KINDS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    **{f"{bits} bits": ("llama", bits, {"num_hidden_layers": 1}) for bits in (2, 3, 4, 5, 6, 8)},
    "tied": ("qwen3", 4, {"num_hidden_layers": 1}),
    "experts": ("qwen3_moe", 4, {**WIDE, **NO_EXPERT_IS_DENSE, "num_hidden_layers": 2}),
    "latent": ("deepseek_v3", 4, {**WIDE, "num_hidden_layers": 2}),
    "delta": ("qwen3_5", 4, STATES),
    "plain": ("qwen3_5_moe", None, {**STATES, **WIDE, "shared_expert_intermediate_size": 48}),
    "correction": ("exaone_moe", 4, {**WIDE, "num_hidden_layers": 2, "sliding_window": 64}),
    "taps": ("lfm2_moe", 4, {**WIDE, "num_dense_layers": 1}),
    "nvfp4": ("qwen3_moe", 4, {**WIDE, **NO_EXPERT_IS_DENSE, "num_hidden_layers": 1}),
    "mxfp8": ("llama", 8, {"num_hidden_layers": 1}),
    "powers": ("gpt_oss", 8, {"num_hidden_layers": 2, "intermediate_size": 64, **PLAIN_POSITIONS}),  # experts in MXFP4
}


def published(config: dict[str, Any]) -> dict[str, Any]:
    """With the keys that mlx-lm asks for, which published files have and transformers no longer writes."""
    rope = config.get("rope_parameters") or {}
    is_scaled = rope.get("rope_type", "default") != "default"
    more = {"rope_theta": rope.get("rope_theta", 1e4), "rope_scaling": rope if is_scaled else None}
    kind = config["model_type"]
    if kind == "qwen3_moe":
        more["num_experts"] = config.get("num_experts") or config["num_local_experts"]
    if kind == "deepseek_v3":
        more |= {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if kind == "exaone_moe":
        is_sparse = [one == "sparse" for one in config["mlp_layer_types"]]
        more |= {"head_dim": config["hidden_size"] // config["num_attention_heads"], "is_moe_layer": is_sparse}
    if kind == "lfm2_moe":
        more |= {"norm_topk_prob": True, "use_expert_bias": True}
    return config | {name: value for name, value in more.items() if name not in config}


def stack_experts(file: Path) -> None:
    """All of a layer in one tensor for gate and up and one for down, as Qwen3.5 is published."""
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith(".experts.0.down_proj.weight")]
    for name in names:
        root, found = name.removesuffix("0.down_proj.weight"), {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            n = sum(one.startswith(root) and one.endswith(f"{part}.weight") for one in tensors)
            found[part] = torch.stack([tensors.pop(f"{root}{i}.{part}.weight") for i in range(n)])
        tensors[f"{root}gate_up_proj"] = torch.cat([found["gate_proj"], found["up_proj"]], dim=1)
        tensors[f"{root}down_proj"] = found["down_proj"]
    save_file(tensors, file, metadata={"format": "pt"})


def quantise(folder: Path, kind: str) -> Path:
    """The folder that mlx-lm makes of a checkpoint, with its logits beside it."""
    import mlx.core as mx
    import mlx_lm.utils as mlx
    import numpy as np

    family, bits, fields = KINDS[kind]
    has_powers = family == "gpt_oss"
    if has_powers:
        original = mxfp4_checkpoint(folder / "original", **fields)[0]
    else:
        original = make_checkpoint(family, folder / "original", dtype=torch.bfloat16, **fields)
    config = published(json.loads((original / "config.json").read_text()))
    if config["model_type"].startswith("qwen3_5"):  # as they are published
        outer = config["model_type"].removesuffix("_text")
        name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[outer]
        config = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": outer, "text_config": config}
    (original / "config.json").write_text(json.dumps(config))
    if family == "qwen3_5_moe":
        stack_experts(original / "model.safetensors")
    model, _ = mlx.load_model(original, lazy=False)

    def finer(path: str, module: Any) -> bool | dict[str, int]:
        """A mixture of bits, as its recipes have it, and a finer router."""
        is_finer = path.endswith(("v_proj", "mlp.gate")) or (has_powers and hasattr(module, "to_quantized"))
        return {"bits": 8, "group_size": GROUP} if is_finer else hasattr(module, "to_quantized")

    made = config
    if kind in MODES:  # with what its recipe has finer
        model, made = mlx.quantize_model(model, config, None, None, mode=kind)
    elif bits is not None:
        model, made = mlx.quantize_model(model, config, GROUP, bits, quant_predicate=finer)
    if has_powers:  # what experts have is what most of it has, as in the folders there are
        made["quantization"] |= {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        made["quantization_config"] = made["quantization"]
    target = folder / "quantised"
    target.mkdir()
    mlx.save_model(target, model)
    mlx.save_config(made, config_path=target / "config.json")
    model, _ = mlx.load_model(target)
    model.set_dtype(mx.float32)
    logits = torch.from_numpy(np.array(model(mx.array([PROMPT]))[0]))
    save_file({"logits": logits}, target / LOGITS)
    return target


def logits_by_mlx(folder: Path) -> torch.Tensor:
    """Those beside a folder."""
    return load_file(folder / LOGITS)["logits"]


if __name__ == "__main__":
    for kind in KINDS:
        place = Path(sys.argv[1]) / kind.replace(" ", "-")
        shutil.rmtree(place, ignore_errors=True)
        made = quantise(place / "made", kind)
        for file in ("config.json", "model.safetensors", LOGITS):
            shutil.copyfile(made / file, place / file)
        shutil.rmtree(place / "made")
