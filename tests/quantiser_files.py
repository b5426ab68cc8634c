"""Checkpoints that several programs quantised: small ones that they wrote (tests/data/quantisers), and fresh ones.

    python tests/quantiser_files.py tests/data/quantisers     # how those were made: the kinds of the tool that is installed

These tools are large and hold to versions of torch and transformers of their own, so only slow tests that make fresh
checkpoints import them, where somebody has installed them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from bitsandbytes_files import ship
from checkpoints import make_checkpoint

DATA = Path(__file__).parent / "data" / "quantisers"
GROUP = 32
FIELDS: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
GPTQMODEL: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "sym": True, "desc_act": False, "act_group_aware": False},
    "gptq-4-act-order": {"bits": 4, "sym": False, "desc_act": True, "act_group_aware": False},
    "gptq-8-act-order": {"bits": 8, "sym": True, "desc_act": True, "act_group_aware": False},
    "awq": {"bits": 4, "sym": False, "method": "awq", "format": "gemm"},
}
MORE_OF_GPTQMODEL: dict[str, dict[str, Any]] = {
    "gptq-4 v2": {"bits": 4, "sym": False, "desc_act": False, "format": "gptq_v2", "act_group_aware": False},
    "gptq-4 group aware": {"bits": 4, "sym": True, "desc_act": False, "act_group_aware": True},
    "gptq-2": {"bits": 2, "sym": False, "desc_act": False, "act_group_aware": False},
    "gptq-3": {"bits": 3, "sym": False, "desc_act": True, "act_group_aware": False},
    "gptq-8 asymmetric": {"bits": 8, "sym": False, "desc_act": False, "act_group_aware": False},
    "awq symmetric": {"bits": 4, "sym": True, "method": "awq", "format": "gemm"},
}
AUTO_ROUND: dict[str, dict[str, Any]] = {
    "auto-round-mixture": {
        "bits": 4, "sym": False, "layer_config": {
            "model.layers.0.mlp.down_proj": {"bits": 8}, "q_proj": {"bits": 2, "group_size": 16},
        },
    },
    "auto-round-3": {"bits": 3, "sym": True},
    "auto-round-awq": {"bits": 4, "sym": False, "format": "auto_round:auto_awq"},
    "auto-round-mxfp8": {"scheme": "MXFP8"},
}  # fmt: skip
MORE_OF_AUTO_ROUND: dict[str, dict[str, Any]] = {
    **{f"auto-round {bits}": {"bits": bits, "sym": True} for bits in (2, 4, 8)},
    "auto-round rows": {"bits": 3, "sym": True, "group_size": -1},
    **{f"auto-round asymmetric {bits}": {"bits": bits, "sym": False} for bits in range(2, 8)},
    "auto-round gptq": {"bits": 3, "sym": False, "format": "auto_round:auto_gptq"},
    "auto-round gptqmodel": {"bits": 4, "sym": False, "format": "auto_round:gptqmodel"},
    "auto-round mxfp4": {"scheme": "MXFP4"},
    "auto-round awq symmetric": {"bits": 4, "sym": True, "format": "auto_round:auto_awq"},
}
MODELOPT: dict[str, dict[str, Any]] = {"modelopt-fp8": {"name": "FP8_DEFAULT_CFG"}}
MORE_OF_MODELOPT: dict[str, dict[str, Any]] = {
    f"modelopt {name}": {"name": f"{name}_CFG"}
    for name in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_2D_BLOCKWISE_WEIGHT_ONLY", "MXFP8_DEFAULT", "NVFP4_DEFAULT")
}
HQQ: dict[str, dict[str, Any]] = {
    "hqq-4": {"nbits": 4},
    "hqq-mixture": {
        "self_attn.q_proj": {"nbits": 3}, "self_attn.k_proj": {"nbits": 6}, "self_attn.v_proj": {"nbits": 4},
        "self_attn.o_proj": {"nbits": 8}, "mlp.gate_proj": {"nbits": 2}, "mlp.up_proj": {"nbits": 1},
        "mlp.down_proj": {"nbits": 4, "group_size": 16},
    },
    "hqq-columns": {"nbits": 4, "axis": 0},
    "hqq-floats": {
        "self_attn.q_proj": {"nbits": 3, "view_as_float": True},
        "self_attn.k_proj": {"nbits": 4, "view_as_float": True, "group_size": None},
        "self_attn.v_proj": {"nbits": 2, "view_as_float": True},
        "self_attn.o_proj": {"nbits": 8, "view_as_float": True, "quant_scale": True, "quant_zero": True},
        "mlp.gate_proj": {"nbits": 1, "view_as_float": True}, "mlp.up_proj": {"nbits": 4, "axis": 0, "view_as_float": True},
        "mlp.down_proj": {"nbits": 5, "group_size": None},
    },
}  # fmt: skip
MORE_OF_HQQ: dict[str, dict[str, Any]] = {
    **{f"hqq {bits}": {"nbits": bits} for bits in (1, 1.58, 2, 3, 5, 6, 8)},
    **{f"hqq columns {bits}": {"nbits": bits, "axis": 0} for bits in (1, 2, 3, 8)},
    "hqq across rows": {"nbits": 4, "group_size": 64},
}
TORCHAO: dict[str, dict[str, Any]] = {
    "torchao-intx-4": {"name": "IntxWeightOnly", "weight_dtype": torch.int4, "granularity": GROUP},
    "torchao-int8": {"name": "Int8DynamicActivationInt8Weight"},
    "torchao-fp8": {"name": "Float8WeightOnly"},
    "torchao-nvfp4": {"name": "NVFP4WeightOnly"},
    "torchao-mxfp4": {"name": "MXDynamicActivationMXWeight", "weight_dtype": torch.float4_e2m1fn_x2},
}
QUANTO: dict[str, dict[str, Any]] = {
    "quanto-4": {"weights": "qint4"},
    "quanto-8": {"weights": "qint8"},
}
MORE_OF_QUANTO: dict[str, dict[str, Any]] = {
    "quanto 2": {"weights": "qint2"},
    "quanto fp8": {"weights": "qfloat8"},
    "quanto e5m2": {"weights": "qfloat8_e5m2"},
    "quanto e4m3fnuz": {"weights": "qfloat8_e4m3fnuz"},
}
MORE_OF_TORCHAO: dict[str, dict[str, Any]] = {
    "torchao mxfp8": {"name": "MXDynamicActivationMXWeight"},
    "torchao int8 weights": {"name": "Int8WeightOnly"},
    "torchao int8 groups": {"name": "Int8WeightOnly", "granularity": GROUP},
    **{
        f"torchao intx asymmetric {bits}": {
            "name": "IntxWeightOnly", "weight_dtype": getattr(torch, f"int{bits}"), "granularity": GROUP,
            "mapping_type": "ASYMMETRIC",
        }
        for bits in range(1, 9)
    },
    "torchao intx rows": {"name": "Int8DynamicActivationIntxWeight", "weight_dtype": torch.int4},
}  # fmt: skip
COMPRESSED: dict[str, dict[str, Any]] = {
    "w4a16": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "w8a8": {"num_bits": 8, "strategy": "channel"},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
}
MORE_COMPRESSED: dict[str, dict[str, Any]] = {
    "w4a16 symmetric": {"num_bits": 4, "strategy": "group", "group_size": GROUP, "actorder": "weight"},
    "w8a16": {"num_bits": 8, "strategy": "group", "group_size": GROUP, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}
VPTQ: dict[str, dict[str, Any]] = {
    "vptq-2": {"vector_lens": [4, 6], "num_centroids": [16, 64], "num_res_centroids": [-1, 16], "outlier_size": 8,
               "group_num": 1, "enable_norm": True, "enable_perm": True},
    "vptq-1": {"vector_lens": [-1, 8], "num_centroids": [-1, 256], "num_res_centroids": [-1, -1], "outlier_size": 0,
               "group_num": 2, "enable_norm": False, "enable_perm": False},
}  # fmt: skip
KINDS = {**GPTQMODEL, **AUTO_ROUND, **MODELOPT, **HQQ, **TORCHAO, **QUANTO, **VPTQ, **COMPRESSED}
MORE_KINDS = {
    **MORE_OF_GPTQMODEL,
    **MORE_OF_AUTO_ROUND,
    **MORE_OF_MODELOPT,
    **MORE_OF_HQQ,
    **MORE_OF_TORCHAO,
    **MORE_OF_QUANTO,
    **MORE_COMPRESSED,
}


def tool_of(kind: str) -> str:
    """The package that writes it."""
    if kind in AUTO_ROUND | MORE_OF_AUTO_ROUND:
        return "auto_round"
    if kind in MODELOPT | MORE_OF_MODELOPT:
        return "modelopt"
    if kind in HQQ | MORE_OF_HQQ:
        return "hqq"
    if kind in TORCHAO | MORE_OF_TORCHAO:
        return "torchao"
    if kind in QUANTO | MORE_OF_QUANTO:
        return "optimum.quanto"
    if kind in VPTQ:
        return "vptq"
    return "gptqmodel" if kind in GPTQMODEL | MORE_OF_GPTQMODEL else "llmcompressor"


def quantise(folder: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """(the checkpoint, its matrices in fp32 as the tool dequantises them)."""
    # GPTQModel's AWQ looks at 64 outputs at a time; a block of fp8 that the matrix ends within
    own = {"awq": {"intermediate_size": 128, "num_key_value_heads": 4}, "fp8-block": {"intermediate_size": 160}}
    original = make_checkpoint(
        "llama", folder / "original", dtype=torch.bfloat16, **{**FIELDS, **own.get(kind.split()[0], {})}
    )
    write_tokenizer(original)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, FIELDS["vocab_size"], (1, 64), generator=generator) for _ in range(16)]
    tools = {
        "gptqmodel": _by_gptqmodel,
        "auto_round": _by_auto_round,
        "modelopt": _by_modelopt,
        "hqq": _by_hqq,
        "torchao": _by_torchao,
        "optimum.quanto": _by_quanto,
        "vptq": _by_vptq,
    }
    return folder / "coded", tools.get(tool_of(kind), _by_llmcompressor)(
        original, folder / "coded", (KINDS | MORE_KINDS)[kind], rows
    )


def write_tokenizer(folder: Path) -> None:
    """Neither tool goes on without one."""
    words = models.WordLevel({f"{i}": i for i in range(FIELDS["vocab_size"])}, unk_token="0")
    special = {"bos_token": "1", "eos_token": "2", "pad_token": "0", "unk_token": "0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


def _by_gptqmodel(
    original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # of fewer it makes no pool
    import gptqmodel
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    config = gptqmodel.QuantizeConfig(**{"group_size": GROUP, **how})
    model = gptqmodel.GPTQModel.load(str(original), config, device="cpu", dtype=torch.float16)
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    model.save(str(target))
    # in the file's own type: it would take the scales to bf16
    read = gptqmodel.GPTQModel.load(str(target), device="cpu", backend=gptqmodel.BACKEND.TORCH, dtype=torch.float16)
    values = {}
    for name, module in read.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        module.scales = module.scales.float()
        if how.get("method") == "awq":
            weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
        else:
            weight = module.dequantize_weight()
        values[f"{name}.weight"] = weight.T.float().contiguous()
    return values


def _by_auto_round(
    original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    del rows  # of rounding to nearest
    import auto_round
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    options = {"iters": 0, "disable_opt_rtn": True, "disable_model_free": True, **how}
    if "scheme" not in how:
        options = {"group_size": GROUP, **options}
    form = options.pop("format", "auto_round")
    outer = target.with_suffix(".outer")  # within which it makes a folder with a name of its own
    auto_round.AutoRound(str(original), device_map="cpu", **options).quantize_and_save(str(outer), format=form)
    next(outer.rglob("config.json")).parent.rename(target)
    if "scheme" in how:
        model = transformers.AutoModelForCausalLM.from_pretrained(target, device_map="cpu")
        modules = {name: one for name, one in model.named_modules() if hasattr(one, "dequant_weight_online")}
        return {f"{name}.weight": one.dequant_weight_online().float() for name, one in modules.items()}
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    tensors, values = load_file(target / "model.safetensors"), {}
    for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
        parts = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        codes, scales = parts["qweight"], parts["scales"].float()  # in the file's own type
        if section["packing_format"] == "auto_round:auto_awq":
            weight = dequantize_gemm(codes, parts["qzeros"], scales, 4, GROUP)
        else:
            n_inputs = codes.shape[0] * 32 // _bits_of(name, section)
            less_one = section["packing_format"] == "auto_round:auto_gptq"
            kind = (qlinear_torch_zp if less_one else qlinear_torch).QuantLinear
            group, bits = n_inputs // len(scales), _bits_of(name, section)
            module = kind(bits, group, n_inputs, codes.shape[1], bias=False)  # g_idx is in order
            module.qweight, module.qzeros, module.scales = codes, parts["qzeros"], scales
            with patch.object(torch, "matmul", lambda _, weight: weight):  # behind a product zeros have no sign
                weight = module(torch.zeros(n_inputs, n_inputs))
        values[f"{name}.weight"] = weight.T.contiguous()
    return values


def _bits_of(name: str, section: dict[str, Any]) -> int:
    return int(section.get("extra_config", {}).get(name, {}).get("bits", section["bits"]))


def _by_modelopt(
    original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    from modelopt.torch import quantization as tool
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    model = tool.quantize(model, getattr(tool, how["name"]), lambda one: [one(row) for row in rows])
    export_hf_checkpoint(model, export_dir=target)
    tensors, values = load_file(target / "model.safetensors"), {}
    for name in [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]:
        codes, scale = tensors[name], tensors[f"{name}_scale"]
        shape = torch.Size((codes.shape[0], codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)))
        if codes.dtype == torch.uint8:
            more = {"scale": scale, "double_scale": tensors[f"{name}_scale_2"], "block_sizes": {-1: 16}}
            values[name] = NVFP4QTensor(shape, torch.float32, codes).dequantize(dtype=torch.float32, **more)
        elif scale.dtype == torch.uint8:
            values[name] = MXFP8QTensor(shape, torch.float32, codes).dequantize(scale=scale)
        else:
            flat = scale[:, None] if scale.ndim == 1 else scale
            blocks = {-1: 128, -2: 128} if scale.ndim == 4 else None
            flat = scale[:, 0, :, 0] if scale.ndim == 4 else flat
            values[name] = FP8QTensor(shape, torch.float32, codes).dequantize(scale=flat, block_sizes=blocks)
    return {name: one.contiguous() for name, one in values.items()}


def _by_hqq(original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    del rows  # it looks at the weights alone
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer
    from hqq.models.hf.base import AutoHQQHFModel

    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.float16)
    options = {"group_size": GROUP, "axis": 1}
    is_mixture = "nbits" not in how
    config = {tag: BaseQuantizeConfig(**{**options, **one}) for tag, one in (how if is_mixture else {"": how}).items()}
    AutoHQQHFModel.quantize_model(
        model, quant_config=config if is_mixture else config[""], compute_dtype=torch.float16, device="cpu"
    )
    stored = config if is_mixture else config[""]
    model.config.quantization_config = {"quant_method": "hqq", "quant_config": stored, "skip_modules": ["lm_head"]}
    model.save_pretrained(target)
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, HQQLinear):
            meta = {key: one.float() if key in ("scale", "zero") else one for key, one in module.meta.items()}
            values[f"{name}.weight"] = Quantizer.dequantize(module.W_q, {**meta, "compute_dtype": torch.float32})
    return values


def _by_torchao(original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    del rows  # of rounding to nearest
    from torchao import quantization as tool
    from torchao.quantization.quant_primitives import dequantize_affine

    options = {key: value for key, value in how.items() if key != "name"}
    if "granularity" in options:
        options["granularity"] = tool.PerGroup(options["granularity"])
    if "mapping_type" in options:
        options["mapping_type"] = tool.MappingType[options["mapping_type"]]
    name = f"{how['name']}Config"
    kind = getattr(tool, name, None) or getattr(importlib.import_module("torchao.prototype.mx_formats"), name)
    if name.startswith("MX") and "weight_dtype" in options:
        options["activation_dtype"] = options["weight_dtype"]
    config = transformers.TorchAoConfig(kind(**options))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        original, quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(target)
    values = {}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "qdata"):
            continue
        if parameter.qdata.dtype == torch.int8:
            found, scale = parameter.detach(), parameter.scale.float()
            values[name] = dequantize_affine(
                found.qdata, found.block_size, scale, found.zero_point, torch.int8, output_dtype=torch.float32
            )
        else:
            values[name] = parameter.dequantize(torch.float32).detach()
    return values


def _by_quanto(original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    del rows  # of rounding to nearest
    from optimum import quanto

    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    coded = quanto.QuantizedModelForCausalLM.quantize(model, weights=getattr(quanto, how["weights"]), exclude="lm_head")
    coded.save_pretrained(target)
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, quanto.QLinear):
            weight = module.weight.detach()
            weight._scale = weight._scale.float()  # the arithmetic is that of its scales
            if hasattr(weight, "_shift"):
                weight._shift = weight._shift.float()
            values[f"{name}.weight"] = weight.dequantize().float().contiguous()
    return values


def _by_vptq(original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random vectors, in its own module and by its own packing: what chooses them is not in the package."""
    del rows
    from vptq.layers.vqlinear import VQuantLinear
    from vptq.ops import dequant
    from vptq.utils.pack import pack_index

    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    generator, values, layers = torch.Generator().manual_seed(3), {}, {}
    (first, length), (outlier_size, size), rest = how["vector_lens"], how["num_centroids"], how["num_res_centroids"][1]
    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        n, k, runs = module.out_features, module.in_features, how["group_num"]
        sides = {"in_features": k, "out_features": n, "group_size": (k - how["outlier_size"]) // runs}
        layers[name] = {**how, **sides, "indices_as_float": False, "is_indice_packed": True, "bias": False}
        layer = VQuantLinear(**layers[name], dtype=torch.bfloat16, enable_proxy_error=False)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16() * 0.1

        def codes(below: int, *shape: int) -> torch.Tensor:
            return torch.randint(below, shape, generator=generator).to(torch.uint16)

        main, more = (codes(max(one, 1), runs, layer.num_indices, layer.group_size) for one in (size, rest))
        bits = [one.bit_length() - 1 for one in (size, max(rest, 1))]
        layer.indices.data = pack_index(main, bits[0], more if rest > 0 else None, bits[1])
        layer.centroids.weight.data = numbers(runs, size * length)
        if rest > 0:
            layer.res_centroids.weight.data = numbers(runs, rest * length)
        if how["outlier_size"]:
            layer.outlier_centroids.weight.data = numbers(1, outlier_size * first)
            layer.outlier_indices.data = codes(outlier_size, 1, -(-n // first), how["outlier_size"]).view(torch.int16)
        if how["enable_perm"]:
            layer.perm.data = torch.randperm(k, generator=generator).to(torch.int16)
        if how["enable_norm"]:
            layer.weight_scale.data, layer.weight_bias.data = 1 + numbers(k), numbers(k)
        model.set_submodule(name, layer)
        wide = {key: one.float() if one.is_floating_point() else one for key, one in layer.state_dict().items()}
        values[f"{name}.weight"] = dequant(
            wide["indices"], wide["centroids.weight"].view(runs, size, length), wide.get("outlier_indices"),
            wide.get("outlier_centroids.weight"), None, wide.get("res_centroids.weight"), wide.get("perm"),
            wide.get("weight_scale"), wide.get("weight_bias"), True, layer.enable_outlier, layer.enable_residual,
            layer.enable_perm, layer.enable_norm, size, outlier_size, rest, layer.padding, layer.outlier_padding, runs,
            layer.group_size, layer.outlier_size, length, first,
        ).contiguous()  # fmt: skip
    model.config.quantization_config = {"quant_method": "vptq", "config_for_layers": layers}
    model.save_pretrained(target)
    return values


def _by_llmcompressor(
    original: Path, target: Path, how: dict[str, Any], rows: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    import datasets
    import llmcompressor
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers import gptq, quantization

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**how))
    if how["num_bits"] == 8 and how["strategy"] != "group":
        scheme.input_activations = QuantizationArgs(
            num_bits=8, type=how.get("type", "int"), strategy="token", dynamic=True
        )
    modifier = gptq.GPTQModifier if how["strategy"] == "group" else quantization.QuantizationModifier
    model = transformers.AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(original)
    calibration = datasets.Dataset.from_dict({"input_ids": [row[0].tolist() for row in rows]})
    recipe = modifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    llmcompressor.oneshot(
        model=model, tokenizer=tokenizer, dataset=calibration, recipe=recipe, num_calibration_samples=len(rows)
    )
    model.save_pretrained(target, save_compressed=True)
    form = json.loads((target / "config.json").read_text())["quantization_config"]["format"]
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors, values = load_file(target / "model.safetensors"), {}
    for name in [name.removesuffix("weight_scale") for name in tensors if name.endswith("weight_scale")]:
        state = {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}
        state["weight_scale"] = state["weight_scale"].float()
        values[f"{name}weight"] = compressor.decompress(state, scheme)["weight"].float().contiguous()
    return values


if __name__ == "__main__":
    for kind in [kind for kind in KINDS if importlib.util.find_spec(tool_of(kind).split(".")[0]) is not None]:
        ship(kind, Path(sys.argv[1]) / kind, quantise)
