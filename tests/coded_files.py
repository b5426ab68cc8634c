"""Checkpoints as other programs quantise them, made from a plain one: compressed-tensors and fp8 by the library's own code and
torch's own casts, AWQ and GPTQ by the packing loops of AutoAWQ 0.2.9 (`awq/modules/linear/gemm.py`) and AutoGPTQ
(`nn_modules/qlinear`), written out here. Beside each a plain checkpoint in fp32 of the very values.

    coded, plain = quantised_checkpoints(original, tmp_path, "awq")
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.gemma_quant import QuantizedLinear
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import FbgemmFp8Config, FineGrainedFP8Config

from checkpoints import make_checkpoint
from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.models.config import HfConfig, read_config_file
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of
from stepping import Stepper

Tensors = dict[str, torch.Tensor]
TOKENS = [5, 9, 33, 120, 7, 7, 81, 40, 12, 99, 3, 64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def logits_of(path: Path, **config: Any) -> torch.Tensor:
    """[12, V]: what a checkpoint says to a dozen tokens."""
    model = load_model(path, ComputeConfig(threads=1, **config))
    try:
        return Stepper(model).prefill("it", TOKENS).clone()
    finally:
        model.close()


def said_in_use(path: Path, caplog: pytest.LogCaptureFixture, tolerance: float) -> str:
    """What the log says of a checkpoint's weights, after its logits on the cpu backend stood near those in fp32.

    tolerance: of the mean difference, in standard deviations of the logits.
    """
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    exact = logits_of(path, backend="torch", weights="fp32")
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        got = logits_of(path, backend="cpu")
    assert exact.std() > 0.3
    assert (got - exact).abs().mean() < tolerance * exact.std()
    return next(record.getMessage() for record in caplog.records if "weights stored=" in record.getMessage())


def opened(path: Path) -> CodedCheckpoint:
    """With values in fp32."""
    how = quantisation_of(HfConfig(read_config_file(path / "config.json")))
    assert how is not None
    return CodedCheckpoint(path, how, dtype=torch.float32)


def check_values(coded: Path, plain: Path, kept: str | None) -> None:
    """That one gives the values of the other, as many as are counted, and in which format down's are kept."""
    checkpoint, expected = opened(coded), load_file(plain / "model.safetensors")
    for name, values in expected.items():
        tensor = checkpoint.tensor(name, *values.shape)
        assert torch.equal(tensor.read().float(), values.float()), name
        if name.endswith("down_proj.weight"):
            assert (None if tensor.kept is None else tensor.kept.name) == kept
            assert torch.equal(tensor.part(slice(3, 20, 4), 40).float(), values[3:20:4, :40].float())
    checkpoint.finish(lambda name: False)
    assert checkpoint.n_parameters == sum(values.numel() for values in expected.values())
    assert checkpoint.n_parameters == sum(group.parameters for group in contents_of(coded).groups)
    assert torch.equal(
        logits_of(coded, backend="torch", weights="fp32"), logits_of(plain, backend="torch", weights="fp32")
    )


def check_in_use(coded: Path, plain: Path, kept: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """That the cpu backend answers from one as from the other, and says what it keeps."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        got = logits_of(coded, backend="cpu")
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert (got - exact).abs().max() < 0.06 * exact.abs().max()
    said = next(record.getMessage() for record in caplog.records if "weights stored=" in record.getMessage())
    assert f"kept={kept or 'bf16'}:100.0%" in said
    assert kept is not None or "no kernel" in said
    assert re.search(r"at \d+\.\d\d bits per weight", said)


@dataclass(frozen=True)
class Layout:
    """quantization_config, and how a matrix becomes (tensors by suffix, the values that they stand for in fp32)."""

    config: dict[str, Any]
    write: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def rounded(
    w: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [n,k], scales fp16 [n,G], zeros [n,G]) by rounding to nearest."""
    n, k = w.shape
    by_group = w.reshape(n, k // group, group)
    low, high = by_group.amin(-1), by_group.amax(-1)
    middle = 1 << (bits - 1)
    if symmetric:
        scales = (torch.maximum(high, -low) / (middle - 1)).half()
        zeros = torch.full_like(scales, middle, dtype=torch.int64)
    else:
        scales = ((high - low) / (2 * middle - 1)).half()
        zeros = (-low / scales.float()).round().clamp(0, 2 * middle - 1).long()
        zeros[::5] = 0  # of weights that are all positive
    codes = (by_group / scales.float()[..., None]).round().long() + zeros[..., None]
    return codes.clamp(0, 2 * middle - 1).reshape(n, k), scales, zeros


def valued(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """fp32."""
    return scales.float()[:, index] * (codes - zeros[:, index]).float()


def awq(group: int, *, zero_point: bool = True) -> Layout:
    """AutoAWQ's `gemm` version."""

    def packed(values: torch.Tensor) -> torch.Tensor:  # [rows, n] -> [rows, n / 8]
        words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
        for column in range(words.shape[1]):
            for i in range(8):
                words[:, column] |= values[:, column * 8 + AWQ_ORDER[i]] << (i * 4)
        return words.to(torch.int32)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        of = w.shape[1] if group == -1 else group
        codes, scales, zeros = rounded(w, 4, of, symmetric=not zero_point)
        tensors = {"qweight": packed(codes.T), "scales": scales.T.contiguous()}
        if zero_point:
            tensors["qzeros"] = packed(zeros.T)
        return tensors, valued(codes, scales, zeros, torch.arange(w.shape[1]) // of)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero_point, "version": "gemm"}
    return Layout(config, write)


def packed_threes(values: torch.Tensor) -> torch.Tensor:
    """Along the first axis, ten codes and parts of two neighbours in a word, as `qlinear_cuda_old.py` goes through them."""
    words = torch.zeros(values.shape[0] // 32 * 3, values.shape[1], dtype=torch.int64)
    i = 0
    for row in range(len(words)):
        first = row % 3  # bits of the code that began in the word before
        for j in range(10):
            words[row] |= values[i + j] << (3 * j + first)
        i += 10
        if first < 2:
            fits = 2 - first
            words[row] |= (values[i] & ((1 << fits) - 1)) << (32 - fits)
            words[row + 1] |= values[i] >> fits
            i += 1
    return words.to(torch.int32)


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: int = 1) -> Layout:
    """GPTQModel's layout, which was AutoGPTQ's: version 1 stores zero points less one (`convert_gptq_v2_to_v1_format`)."""
    per_word = 32 // bits

    def packed(values: torch.Tensor, less: int = 0) -> torch.Tensor:  # along the first axis
        if bits == 3:
            return packed_threes(values - less & 7)
        words = torch.zeros(values.shape[0] // per_word, values.shape[1], dtype=torch.int64)
        for i in range(per_word):
            words += values[i::per_word] - less << (i * bits)  # off whole words: a 0 borrows of the next
        return words.to(torch.int32)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        k = w.shape[1]
        of = k if group == -1 else group
        order = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
        index = torch.empty(k, dtype=torch.int64)
        index[order] = torch.arange(k) // of
        codes, scales, zeros = rounded(w[:, order], bits, of, symmetric=symmetric)
        codes = codes[:, torch.argsort(order)]
        stored = packed(zeros, 1 if version == 1 else 0).T.contiguous()
        tensors = {
            "qweight": packed(codes.T), "qzeros": stored, "scales": scales.T.contiguous(),
            "g_idx": index.to(torch.int32),
        }  # fmt: skip
        return tensors, valued(codes, scales, zeros, index)

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order,
              "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}  # fmt: skip
    return Layout(config, write)


def compressed(form: str, inputs: dict[str, Any] | None = None, **weights: Any) -> Layout:
    """By compressed-tensors' own compressor and its own dequantisation."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        generate_gparam,
        maybe_pad_tensor_for_block_quant,
    )

    args = QuantizationArgs(**weights)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(form)

    def write_nvfp4(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        whole = generate_gparam(w.amin().float(), w.amax().float())
        by_group = w.unflatten(-1, (-1, args.group_size))
        scale, _ = calculate_qparams(by_group.amin(-1), by_group.amax(-1), args, global_scale=whole)
        coded = compressor.compress({"weight": w, "weight_scale": scale, "weight_global_scale": whole}, scheme)
        levels = unpack_fp4_from_uint8(
            coded["weight_packed"], *w.shape, dtype=torch.float32
        )  # `decompress` rounds to bf16
        values = dequantize(levels, coded["weight_scale"].float(), args=args, dtype=torch.float32, global_scale=whole)
        return coded | {"input_global_scale": torch.tensor([3.0])}, values

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        w = w.to(torch.bfloat16)
        if args.strategy == "tensor_group":
            return write_nvfp4(w)
        if args.strategy == "block":
            rows, columns = args.block_structure
            padded = maybe_pad_tensor_for_block_quant(w, (rows, columns))
            blocks = padded.view(-(-n // rows), rows, -1, columns).transpose(1, 2)
            low, high = blocks.amin((-2, -1)), blocks.amax((-2, -1))
        else:
            group = args.group_size if args.strategy == "group" else k
            by_group = w.reshape(n, k // group, group)
            low, high = by_group.amin(-1), by_group.amax(-1)
        scale, zero_point = calculate_qparams(low, high, args)
        state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero_point}
        coded = compressor.compress(state, scheme)
        given = coded if coded["weight_scale"].dtype == torch.uint8 else {**coded, "weight_scale": scale.float()}
        return coded, compressor.decompress(given, scheme)["weight"].float()

    section = scheme.model_dump(mode="json", exclude_none=True)
    return Layout(
        {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": section}, "ignore": ["lm_head"],
         "kv_cache_scheme": None, "sparsity_config": {}}, write,
    )  # fmt: skip


def block_fp8(rows: int = 128, inputs: int = 128, *, in_powers: bool = False) -> Layout:
    """As DeepSeek-V3 and Qwen3 publish it: E4M3 with `weight_scale_inv` for each block (inference/kernel.py of DeepSeek-V3).

    in_powers: scales in E8M0, which transformers reads too.
    """

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        padded = torch.zeros(math.ceil(n / rows) * rows, math.ceil(k / inputs) * inputs)
        padded[:n, :k] = w
        blocks = padded.view(-1, rows, padded.shape[1] // inputs, inputs)
        scales = blocks.abs().amax((1, 3)) / 448.0
        scales = torch.exp2(torch.log2(scales).ceil()) if in_powers else scales
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(inputs, 1)[:n, :k]
        quantised = (w / wide).to(torch.float8_e4m3fn)
        stored = scales.to(torch.float8_e8m0fnu) if in_powers else scales
        return {"weight": quantised, "weight_scale_inv": stored}, quantised.float() * wide

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [rows, inputs]}
    return Layout(config, write)


def quark(kind: str, *, in_order: bool = False) -> Layout:
    """As amd-quark 0.13 exports it (`torch/utils/pack.py`, `realquantizer.py`): fp8, int8, fp4, int4 or uint4 in groups."""
    spec: dict[str, Any] = {"dtype": kind, "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "is_dynamic": False}
    spec |= {"scale_format": "e8m0"} if kind == "fp4" else {}
    spec |= {"qscheme": "per_channel", "ch_axis": 0, "group_size": None} if kind in ("fp8_e4m3", "int8") else {}
    order = range(8) if in_order else AWQ_ORDER

    def packed(values: torch.Tensor) -> torch.Tensor:  # [rows, n] -> [rows, n / 8], of two's complement where signed
        words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
        for i in range(8):
            words |= (values[:, [8 * c + order[i] for c in range(words.shape[1])]] & 15) << (4 * i)
        return words.to(torch.int32)

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if kind == "fp8_e4m3":
            scale = w.abs().amax(1) / 448.0
            codes = (w / scale[:, None]).to(torch.float8_e4m3fn)
            return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]
        if kind == "int8":
            scale = (w.abs().amax(1) / 127.0).bfloat16()
            codes = (w / scale.float()[:, None]).round().clamp(-128, 127)
            parts = {
                "weight": codes.to(torch.int8),
                "weight_scale": scale,
                "weight_zero_point": 0 * scale.to(torch.int8),
            }
            return parts, codes * scale.float()[:, None]
        if kind == "fp4":
            blocks, exponents = random_blocks(len(w), w.shape[1] // 32, seed=w.shape[1])
            plain = convert_moe_packed_tensors(blocks[None], exponents[None], dtype=torch.float32)[0].T
            return {"weight": blocks.flatten(1), "weight_scale": exponents}, plain.contiguous()
        codes, scales, zeros = rounded(w, 4, 32, symmetric=kind == "int4")
        shift = 8 if kind == "int4" else 0
        parts = {
            "weight": packed((codes - shift).T),
            "weight_scale": scales.T,
            "weight_zero_point": packed((zeros - shift).T),
        }
        return parts, valued(codes, scales, zeros, torch.arange(w.shape[1]) // 32)

    inputs = {"dtype": "int8", "is_dynamic": True} if kind == "int8" else None
    config = {"quant_method": "quark", "global_quant_config": {"weight": spec, "input_tensors": inputs, "bias": None},
              "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"], "softmax_quant_spec": None,
              "export": {"weight_format": "real_quantized", "pack_method": "order" if in_order else "reorder"}}  # fmt: skip
    return Layout(config, write)


def gemma(bits: int, *, activation_scale: float = 0.0) -> Layout:
    """As Gemma's packed checkpoints have it: the values are those that transformers' own layer makes of the tensors."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        layer = QuantizedLinear(w.shape[1], w.shape[0], num_bits=bits)
        scale = w.abs().amax(1, keepdim=True) / (1 << (bits - 1))
        codes = (w / scale).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).to(torch.int8)
        layer.weight.data, layer.weight_scale.data = packed_bytes(codes, bits), scale
        parts = {name: one.data for name, one in layer.named_parameters()}
        for name in ("input_activation_scale", "output_activation_scale"):
            parts[name] = torch.tensor(activation_scale)
        return parts, layer._dequantize_weights().float()

    return Layout({"quant_method": "gemma", "num_bits": bits, "quantize_embeddings": False}, write)


def packed_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed codes of 2 or 4 bits, of which several share a byte, the lowest bits first; of 8 as they are."""
    if bits == 8:
        return codes
    unsigned = (codes.to(torch.int16) + (1 << (bits - 1))).unflatten(1, (-1, 8 // bits))
    return sum(unsigned[..., i] << (bits * i) for i in range(8 // bits)).to(torch.uint8)


def fbgemm_fp8() -> Layout:
    """As Meta publishes Llama 3.1 405B: E4M3 with a scale of each row [n, 1] in fp32 (FbgemmFp8Linear of transformers)."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = w.abs().amax(1, keepdim=True) / 448.0
        quantised = (w / scale).to(torch.float8_e4m3fn)
        return {"weight": quantised, "weight_scale": scale}, quantised.float() * scale

    return Layout(FbgemmFp8Config(activation_scale_ub=1200.0).to_dict(), write)


def mxfp8(*, in_bytes: bool = False) -> Layout:
    """By transformers' own quantiser and dequantisation. in_bytes: exponents as whole numbers, as some are published."""
    section = FineGrainedFP8Config(quant_method="mxfp8", weight_block_size=(1, 32), scale_fmt="ue8m0")
    made = Fp8Quantize(SimpleNamespace(quantization_config=section))

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = made.convert({"weight": w})
        values = made.reverse_op.convert(parts)["weight"]
        scales = parts["weight_scale_inv"]
        stored = scales.view(torch.uint8) if in_bytes else scales
        return {"weight": parts["weight"], "weight_scale_inv": stored}, values.float()

    return Layout(section.to_dict(), write)


def whole_fp8() -> Layout:
    """As Mistral publishes it: a scale for each matrix, and one for its inputs (FP8Linear of transformers, static)."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (w.abs().amax() / 448.0).to(torch.bfloat16)
        quantised = (w / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        beside = {"weight_scale_inv": scale, "activation_scale": torch.tensor(0.01, dtype=torch.bfloat16)}
        return {"weight": quantised, **beside}, quantised.float() * scale.float()

    return Layout({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, write)


def bitnet(linear: str = "autobitlinear", mode: str = "offline", *, saved: bool = False) -> Layout:
    """By transformers' own packing and rounding. saved: as it saves what it has unpacked."""

    def write(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from transformers.integrations.bitnet import WeightQuant, pack_weights  # which loads all of torch's compiler

        plain = w.bfloat16()
        with torch.compiler.set_stance("force_eager"):
            if mode == "online":
                return {"weight": plain}, WeightQuant.apply(plain).float()
            scale = plain.float().abs().mean()[None].to(torch.bfloat16)
            found = (w / scale.float()).round().clamp(-1, 1)
            stored = found.bfloat16() if saved else pack_weights(found.clone())
            if linear == "bitlinear":
                inverse = (1 / scale.float()).to(torch.bfloat16)
                return {"weight": stored, "weight_scale": inverse}, found * (1 / inverse.float())
            return {"weight": stored, "weight_scale": scale}, found * scale.float()

    config = {"quant_method": "bitnet", "linear_class": linear, "quantization_mode": mode}
    return Layout(config, write)


def quantised_checkpoints(original: Path, folder: Path, layout: Layout) -> tuple[Path, Path]:
    """(as the layout has it, plain fp32 of the same values). Matrices of the layers but for routers are quantised."""
    config = json.loads((original / "config.json").read_text())
    coded: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        coded[name] = plain[name] = tensor
        is_projection = name.endswith(("proj.weight", "in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight"))
        is_matrix = (".layers." in name and tensor.ndim == 2 and is_projection) or ".experts." in name
        if not is_matrix:
            continue
        del coded[name]
        parts, values = layout.write(tensor.float())
        coded |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
        plain[name] = values.contiguous()
    for path, tensors, more in (
        (folder / "coded", coded, {"quantization_config": layout.config}),
        (folder / "plain", plain, {}),
    ):
        path.mkdir(parents=True)
        for file in original.glob("*.json"):
            shutil.copyfile(file, path / file.name)
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return folder / "coded", folder / "plain"


def damaged(path: Path, change: Callable[[Tensors], object]) -> None:
    """Change its tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def random_blocks(*rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, and scales around 2^-5."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*rows, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(119, 124, rows, generator=generator, dtype=torch.uint8)


def mxfp4_checkpoint(directory: Path, **fields: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint whose experts lie in blocks, and what transformers reads in them."""
    path = make_checkpoint("gpt_oss", directory, **fields)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    tensors, dequantised = load_file(path / "model.safetensors"), {}
    for seed, name in enumerate([n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]):
        n_experts, columns, rows = tensors.pop(name).shape
        blocks, scales = random_blocks(n_experts, rows, columns // 32, seed=seed)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dequantised[name] = convert_moe_packed_tensors(blocks, scales).float()
    save_file(tensors, path / "model.safetensors")
    return path, dequantised
