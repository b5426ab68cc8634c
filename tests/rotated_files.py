"""Checkpoints with rotations, by compressed-tensors' own transforms over a model of transformers, and what that model says.

python tests/rotated_files.py tests/data/quantisers     # how AutoRound's were made, where it is installed
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformScheme, apply_transform_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FourOverSixConfig

from checkpoints import make_checkpoint
from coded_files import TOKENS, Layout
from quantiser_files import FIELDS, write_tokenizer

Groups = dict[str, dict[str, Any]]


def spinquant(kind: str = "hadamard", block: int | None = None) -> dict[str, Any]:
    """R4 of llm-compressor's SpinQuantModifier: inputs of down."""
    apply = [{"targets": ["re:.*down_proj$"], "location": "input"},
             {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True}]  # fmt: skip
    return {"type": kind, "head_dim": block, "apply": apply}


def quip(side: str, kind: str, block: int | None = None) -> dict[str, Any]:
    """'v', the inputs, or 'u', the outputs, of its QuIPModifier."""
    first, second = ("input", "weight_input") if side == "v" else ("weight_output", "output")
    apply = [{"targets": ["Linear"], "location": place, "inverse": place == second, "ignore": ["lm_head"]}
             for place in (first, second)]  # fmt: skip
    return {"type": kind, "head_dim": block, "apply": apply}


def rotated(original: Path, folder: Path, groups: Groups, layout: Layout | None) -> tuple[Path, torch.Tensor]:
    """(a checkpoint whose projections lie as the layout has them, None: in floats; logits [12, V] of transformers in fp32)."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    schemes = {
        name: TransformScheme(
            **{**group, "apply": [TransformArgs(**one) for one in group["apply"]]}, precision="float64"
        )
        for name, group in groups.items()
    }
    config = TransformConfig(config_groups=schemes)
    torch.manual_seed(len(groups))
    apply_transform_config(model, config)
    coded: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if layout is not None and isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            coded[name], values = layout.write(module.weight.detach())
            module.weight.data = values
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    model.save_pretrained(folder)
    ModelCompressor(transform_config=config).update_config(folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name, parts in coded.items():
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads(config_file.read_text())
    fields["quantization_config"] = (layout.config if layout is not None else {}) | fields["quantization_config"]
    config_file.write_text(json.dumps(fields))
    return folder, logits


AUTO_ROUND = {"auto-round-mxfp4-hadamard": ("MXFP4", 32), "auto-round-nvfp4-hadamard": ("NVFP4", 16)}
LOGITS = "logits.json"


def by_auto_round(target: Path, scheme: str, block: int) -> None:
    """A folder that AutoRound wrote, and the logits of its own model, whose activations are rotated and not rounded."""
    from auto_round import AutoRound
    from auto_round.experimental.qmodules.mx import MXFP4QuantLinear
    from auto_round.experimental.qmodules.nvfp4 import NVFP4QuantLinear

    original = make_checkpoint("llama", target / "original", dtype=torch.bfloat16, **FIELDS)
    write_tokenizer(original)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(3, FIELDS["vocab_size"], (1, 64), generator=generator)} for _ in range(4)]
    how = {"hadamard_type": "hadamard", "block_size": block}
    options = {
        "iters": 0,
        "disable_opt_rtn": True,
        "disable_model_free": True,
        "seqlen": 64,
        "nsamples": 4,
        "batch_size": 1,
    }
    tool = AutoRound(str(original), device_map="cpu", scheme=scheme, rotation_config=how, dataset=rows, **options)
    tool.quantize_and_save(str(target / "made"), format="auto_round")
    made = next((target / "made").rglob("config.json")).parent
    for kind in (MXFP4QuantLinear, NVFP4QuantLinear):
        kind.qdq_input = lambda _, inputs: inputs
    model = AutoModelForCausalLM.from_pretrained(made, device_map="cpu", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(made / name, target / name)
    (target / LOGITS).write_text(json.dumps([[round(one, 5) for one in row] for row in logits.tolist()]) + "\n")
    for one in ("original", "made"):
        shutil.rmtree(target / one)


FOUR_OVER_SIX = {"four-over-six": "mse", "four-over-six-static": "static_4"}


def by_four_over_six(target: Path, rule: str) -> None:
    """A folder of its own numbers in its own names, and the logits of transformers with what it dequantises in fp32."""
    from fouroversix import ModelQuantizationConfig, dequantize, quantize_model
    from fouroversix.model.modules.linear import FourOverSixLinear

    original = make_checkpoint("llama", target / "original", dtype=torch.bfloat16, **FIELDS)
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    quantize_model(model, ModelQuantizationConfig(quantize_backend="pytorch", scale_rule=rule))
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    tensors = load_file(original / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, FourOverSixLinear) or name == "lm_head":
            continue
        parts = module.get_quantized_parameters("weight", tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{key}": part.contiguous() for key, part in parts.items()}
        for key, part in parts.items():
            setattr(module, key, torch.nn.Parameter(part, requires_grad=False))
        values = dequantize(module.quantized_weight(), torch.float32)
        plain.get_submodule(name).weight.data = values
    with torch.no_grad():
        logits = plain(torch.tensor([TOKENS])).logits[0]
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = FourOverSixConfig(scale_rule=rule).to_dict()
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / LOGITS).write_text(json.dumps([[round(one, 5) for one in row] for row in logits.tolist()]) + "\n")
    shutil.rmtree(target / "original")


if __name__ == "__main__":
    for tool, write, kinds in (
        ("auto_round", by_auto_round, AUTO_ROUND),
        ("fouroversix", by_four_over_six, {kind: (rule,) for kind, rule in FOUR_OVER_SIX.items()}),
    ):
        for kind, how in kinds.items() if importlib.util.find_spec(tool) is not None else ():
            write(Path(sys.argv[1]) / kind, *how)
