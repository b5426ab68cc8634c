"""Weights in codes on a GPU: products over them have the bits of products over the values that a file's reader makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kinds import KINDS, Kind, in_turns
from test_torch_ops import noise

from checkpoints import make_checkpoint
from coded_files import awq, block_fp8, compressed, gptq, mxfp4_checkpoint, quantised_checkpoints
from diptych.compute import runner
from diptych.compute.formats.gguf_codes import codes_of
from diptych.compute.model import Model
from diptych.compute.ops.contract import Activation, LinearParts
from diptych.compute.ops.contract_parts import Codes
from diptych.compute.ops.torch import model as torch_model
from diptych.compute.ops.torch.device_codes import SCALE_DTYPES, CodedWeight, JoinedWeight
from diptych.compute.ops.torch.loader import TorchLinear, TorchLoader
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.formats import FP8_BLOCK, GGUF_KEPT, DeviceFormat, KeptFormat
from gguf_files import gguf_reference, tame_blocks, write_gguf
from worlds import alone, differing, prompt

OURS = {name: kind for name, kind in KINDS.items() if name.startswith("triton")}
pytestmark = pytest.mark.skipif(not OURS, reason="triton is not installed")
of_ours = pytest.mark.parametrize("kind", OURS.values(), ids=OURS)
CONFIG = ComputeConfig(backend="torch", device="cuda", weights="file")
N_TOKENS = 75


@dataclass
class InCodes:
    """A WeightTensor in memory, as codes and as the values that its file's reader makes of them."""

    name: str
    kept: KeptFormat
    held: Codes
    values: torch.Tensor
    random_seed: int | None = None
    order: torch.Tensor | None = None
    row_order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def read(self) -> torch.Tensor:
        return self.values

    def codes(self) -> Codes:
        return self.held


def of_blocks(kind: str) -> Callable[[int, int, int], InCodes]:
    """Random blocks of GGUF, beside what its own package makes of them."""

    def made(n: int, k: int, seed: int) -> InCodes:
        type_ = gguf.GGMLQuantizationType[kind]
        blocks = tame_blocks(type_, (n, k), seed)
        values = torch.from_numpy(gguf.quants.dequantize(blocks, type_).astype(np.float32))
        return InCodes("w", GGUF_KEPT[kind], codes_of(torch.from_numpy(blocks).view(n, -1), kind), values)

    return made


def of_formula(name: str) -> Callable[[int, int, int], InCodes]:
    """Random codes and scales; values by the formulas of `formats.matrices`."""

    def made(n: int, k: int, seed: int) -> InCodes:
        kept, draw = KeptFormat.named(name), torch.Generator().manual_seed(seed)
        bits = int(kept.kind[5:]) if kept.is_grouped else 8
        codes = torch.randint(0, 1 << bits, (n, k), generator=draw, dtype=torch.uint8)
        group = kept.group or k
        of_input = torch.arange(k) // group
        scales = 0.02 * torch.rand((n, -(-k // group)), generator=draw) + 0.001
        if kept.kind == "fp8":
            codes = torch.where((codes & 127) == 127, 3, codes)
            values = codes.view(torch.float8_e4m3fn).float() * scales[:, of_input]
            return InCodes("w", kept, Codes(codes=codes, scales=scales), values)
        scales = scales.to(SCALE_DTYPES[kept.scale])
        offsets, of_code = None, codes.float() - (1 << (bits - 1))
        by_input = scales.float()[:, of_input]
        if kept.grid == "zeros":
            offsets = torch.randint(0, 1 << bits, scales.shape, generator=draw, dtype=torch.uint8)
            of_code = codes.float() - offsets.float()[:, of_input]
        values = by_input * of_code
        if kept.grid == "minima":
            offsets = torch.randn(scales.shape, generator=draw) * 0.1
            values = by_input * codes.float() + offsets[:, of_input]
        if kept.grid == "minima16":
            offsets = (torch.randn(scales.shape, generator=draw) * 0.1).to(scales.dtype)
            values = by_input * codes.float() + offsets.float()[:, of_input]
        return InCodes("w", kept, Codes(codes=codes, scales=scales, offsets=offsets), values)

    return made


BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
WEIGHTS = {kind: of_blocks(kind) for kind in BLOCKS} | {
    name: of_formula(name)
    for name in ("group4-g128-f16-zeros", "group4-g64-bf16-zeros", "group4-g32-f32-zeros", "group4-g16-f16", "group4-g128-bf16",
                 "group4-g64-bf16-minima16", "group4-g64-f16-minima", "group3-g32-f32-minima", "group6-g32-bf16-minima16",
                 "group8-g64-f16-wide", "int8", "fp8", f"fp8-g{FP8_BLOCK}")
}  # fmt: skip
of_weights = pytest.mark.parametrize("name", WEIGHTS)


def rows_for(rows: int, tensor: InCodes, seed: int) -> torch.Tensor:
    """Whose products with it are of order one."""
    k = tensor.shape[1]
    return noise(rows, k, seed=seed) / (tensor.values.std() * k**0.5)


def loaded(kind: Kind, *tensors: InCodes, gate: Activation | None = None, keeps: bool = True) -> TorchLinear:
    loader = TorchLoader(kind.device, kind.dtype, keeps_codes=keeps)
    parts = LinearParts(weights=tensors)
    return loader.linear(parts) if gate is None else loader.gated(parts, gate)


def same_tiles(kind: Kind, monkeypatch: pytest.MonkeyPatch, name: str = "") -> None:
    """Interpreted, a product of two tiles is numpy's, whose sums depend on how many inputs it has; on a GPU nothing does.

    name: of WEIGHTS, of whose groups kernels take some inputs at a time.
    """
    if kind.device.type != "cpu":
        return
    products = import_module("diptych.compute.ops.gpu.products")
    inputs = 16 if name in ("Q2_K", "Q3_K", "Q6_K") or "g16" in name else 32
    monkeypatch.setattr(products, "tile_of", lambda *sizes, **form: (64, 64, inputs, 4, 3))
    monkeypatch.setattr(products, "coded_tile_of", lambda rows, bits: (64, 64, 1024 // bits, 4, 3))
    monkeypatch.setattr(
        products, "expert_tile", lambda rows, bits: (64, 64, inputs if bits == 16 else 1024 // bits, 4, 3)
    )


@of_ours
@in_turns
@of_weights
@pytest.mark.parametrize(("rows", "is_gate"), [(1, False), (17, True), (70, False)])
def test_products_have_the_bits_of_the_values(
    rows: int, is_gate: bool, name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices behind one another, of outputs that no tile divides; K is whole blocks of GGUF, and otherwise no tile's."""
    same_tiles(kind, monkeypatch, name)
    products = import_module("diptych.compute.ops.gpu.products")
    k = 512 if name in GGUF_KEPT else 416 if "128" not in name else 640
    tensors = [WEIGHTS[name](50, k, seed) for seed in (1, 2)]
    x = kind.put(rows_for(rows, tensors[0], seed=3).to(kind.dtype))
    bias, gate = kind.put(noise(100, seed=4).to(kind.dtype)), Activation.SILU if is_gate else None
    coded, plain = (loaded(kind, *tensors, gate=gate, keeps=keeps).weight for keeps in (True, False))
    assert isinstance(coded, CodedWeight)
    assert isinstance(plain, torch.Tensor)
    got, expected = (products.multiply(x, weight, bias, kind=int(is_gate)) for weight in (coded, plain))
    assert expected.float().std() > 0.3
    assert torch.equal(got, expected)


@in_turns
@of_ours
@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("name", ["group4-g128-f16-zeros", "Q6_K"])
def test_values_written_part_by_part_have_the_same_bits(
    name: str, gate: int, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For many rows, a hundred outputs and some at a time."""
    products = import_module("diptych.compute.ops.gpu.products")
    same_tiles(kind, monkeypatch, name)
    monkeypatch.setattr(products, "WRITTEN_BYTES", 1)
    tensor = WEIGHTS[name](600, 256, 1)
    coded, plain = (loaded(kind, tensor, keeps=keeps).weight for keeps in (True, False))
    x, n = kind.put(rows_for(70, tensor, seed=2).to(kind.dtype)), 300 if gate else 600
    bias, added = (kind.put(noise(*shape, seed=3).to(kind.dtype)) for shape in ((600,), (70, n)))
    assert torch.equal(*(products.multiply(x, weight, bias, kind=gate, added=added) for weight in (coded, plain)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["group4-g128-f16-zeros", "Q4_K", "Q6_K", f"fp8-g{FP8_BLOCK}"])
@pytest.mark.parametrize("rows", [1, 20, 60])
def test_every_tile_has_the_same_bits(rows: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever instructions its size is multiplied by."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    products, kind = import_module("diptych.compute.ops.gpu.products"), OURS["triton bf16"]
    tensor = WEIGHTS[name](320, 768, 1)
    coded, plain = (loaded(kind, tensor, keeps=keeps).weight for keeps in (True, False))
    x = kind.put(rows_for(rows, tensor, seed=2).to(kind.dtype))
    expected = products.multiply(x, plain)
    for bm, bn, warps, stages in ((16, 32, 4, 6), (16, 64, 4, 3), (16, 128, 8, 3), (32, 64, 4, 4), (32, 32, 4, 2)):
        tile = bm, bn, 1024 // coded.format.bits, warps, stages
        monkeypatch.setattr(products, "coded_tile_of", lambda *sizes, tile=tile: tile)
        assert torch.equal(products.multiply(x, coded), expected), tile


@of_ours
def test_projections_of_several_formats_lie_each_in_its_own(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """As q, k and v of many GGUF files do: what is added and the bias go to each."""
    same_tiles(kind, monkeypatch)
    products = import_module("diptych.compute.ops.gpu.products")
    tensors = [WEIGHTS[name](32, 512, seed) for seed, name in enumerate(("Q4_K", "Q4_K", "Q8_0"))]
    x, added = (kind.put(noise(5, width, seed=3).to(kind.dtype)) for width in (512, 96))
    bias = kind.put(noise(96, seed=4).to(kind.dtype))
    coded, plain = (loaded(kind, *tensors, keeps=keeps).weight for keeps in (True, False))
    assert isinstance(coded, JoinedWeight)
    assert [len(piece) for piece in coded.pieces] == [64, 32]
    assert torch.equal(*(products.multiply(x, weight, bias, added=added) for weight in (coded, plain)))


@in_turns
@of_ours
@pytest.mark.parametrize("name", ["MXFP4", "Q4_K", "group4-g128-f16-zeros", f"fp8-g{FP8_BLOCK}"])
@pytest.mark.parametrize("n_tokens", [3, 80])
def test_experts_have_the_bits_of_the_values(
    n_tokens: int, name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate, up and down of each; for many tokens written out, three experts and then the last."""
    same_tiles(kind, monkeypatch)
    products = import_module("diptych.compute.ops.gpu.products")
    monkeypatch.setattr(products, "WRITTEN_BYTES", 3 * 2 * 512 * 256)
    of_experts = [(LinearParts(weights=(WEIGHTS[name](512, 256, e),)), LinearParts(weights=(WEIGHTS[name](96, 256, 9 + e),)))
                  for e in range(4)]  # fmt: skip
    found = []
    for keeps in (True, False):
        loader = TorchLoader(kind.device, kind.dtype, stacks_experts=True, keeps_codes=keeps)
        first, second = (loader._all_of([both[i] for both in of_experts]) for i in (0, 1))
        assert isinstance(first[0], CodedWeight) == keeps
        chosen = kind.put(noise(n_tokens, 4, seed=1).topk(2).indices)
        weights = kind.put(noise(n_tokens, 2, seed=2).softmax(-1))
        x = kind.put(rows_for(n_tokens, of_experts[0][0].weights[0], seed=3).to(kind.dtype))
        found.append(products.mix(x, first, second, chosen, weights, kind=1))
    assert (found[0] != 0).all()
    assert torch.equal(*found)


def test_codes_are_kept_where_kernels_meet_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--weights file` was asked for: nothing else is loaded in its place."""
    path = make_checkpoint("llama", tmp_path)
    config = ComputeConfig(backend="torch", device="cpu", weights="file")
    with pytest.raises(
        ConfigError, match="weights is 'file', and torch's kernels on cpu have no codes\nhint: leave --w"
    ):
        load_model(path, config)
    monkeypatch.setattr(torch_model.TorchModel, "multiplies_codes", True)
    with pytest.raises(ConfigError, match="weights is 'file', and its other weights are fp32"):
        load_model(path, config)


def test_formats_take_what_they_say() -> None:
    """Of a matrix of whole blocks, but for scales beside a row or a matrix."""
    for name, make in WEIGHTS.items():
        tensor = make(64, 1024, 1)
        loader = TorchLoader(torch.device("cpu"), torch.float32, keeps_codes=True)
        weight = loader.linear(LinearParts(weights=(tensor,))).weight
        assert isinstance(weight, CodedWeight)
        form = weight.format
        assert DeviceFormat.named(form.name) == form
        beside = 0 if form.group else 4 * 64
        assert loader.weight_bytes == weight.nbytes == 64 * 1024 * form.number.bytes + beside, name


def test_what_has_no_kernel_is_read_as_values() -> None:
    """And the loader says why."""
    loader = TorchLoader(torch.device("cpu"), torch.float32, keeps_codes=True)
    table = of_blocks("IQ4_NL")(32, 256, 1)
    turned = WEIGHTS["Q4_0"](32, 256, 2)
    turned.order = torch.arange(256, dtype=torch.int32).flip(0)
    for tensor in (table, turned):
        weight = loader.linear(LinearParts(weights=(tensor,))).weight
        assert torch.equal(weight, tensor.values)
    gate = LinearParts(weights=(WEIGHTS["Q4_0"](32, 256, 3), WEIGHTS["Q8_0"](32, 256, 4)))
    assert isinstance(loader.gated(gate, Activation.SILU).weight, torch.Tensor)
    assert dict(loader.lost) == {
        "no kernel for group4-g32-f16-iq4_nl": 1,
        "inputs in an order of their own would be summed in it": 1,
        "gate and up lie in several formats": 2,
    }


FILES: dict[str, tuple[Any, str]] = {
    "awq": (lambda: awq(32), "gpu4-g32-f16-zeros"),
    "gptq": (lambda: gptq(4, 32, symmetric=True), "gpu4-g32-f16"),
    "gptq 8": (lambda: gptq(8, 32, symmetric=True), "gpu8-g32-f16"),
    "w4a16": (
        lambda: compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "gpu4-g32-bf16",
    ),
    "fp8 rows": (
        lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "gpu8-row-f32-e4m3",
    ),
    "fp8 blocks": (block_fp8, "gpu8-g128-f32-e4m3"),
}


def interpreted(path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model in codes, on a CPU with our ops in a type that the interpreter has; it answers as from the files' values."""
    kind = OURS.get("triton fp32")
    if kind is None:
        pytest.skip("on a GPU the interpreter is not at hand")
    same_tiles(kind, monkeypatch)
    monkeypatch.setitem(torch_model.DTYPES, "bf16", kind.dtype)
    monkeypatch.setattr(runner, "_dequantised_dtype", lambda config: kind.dtype)
    monkeypatch.setattr(torch_model.TorchModel, "ops", kind.ops)
    monkeypatch.setattr(torch_model.TorchModel, "multiplies_codes", True)
    monkeypatch.setattr(torch_model, "_auto_format", lambda blueprint: "bf16")
    coded, plain = (
        load_model(path, ComputeConfig(backend="torch", device="cpu", weights=how)) for how in ("file", "bf16")
    )
    answers = [alone(model, prompt(10), 8) for model in (coded, plain)]
    assert answers[1].logits.std() > 0.1, "the model says nearly the same everywhere; the test would see nothing"
    assert not (found := answers[0].differs_from(answers[1])), found
    assert (plain.weights_format, plain.head_format) == ("bf16", "bf16")
    assert coded.weight_bytes < plain.weight_bytes
    assert coded.revision == plain.revision
    return coded


@pytest.mark.parametrize("layout", ["awq", "fp8 blocks"])
def test_a_checkpoint_is_loaded_in_codes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From its files to logits."""
    make, form = FILES[layout]
    original = make_checkpoint(
        "llama", tmp_path / "original", hidden_size=128, intermediate_size=256, num_hidden_layers=1
    )
    path, _ = quantised_checkpoints(original, tmp_path, make())
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        model = interpreted(path, monkeypatch)
    assert model.weights_format == form
    assert f"kept={form}:100.0%" in caplog.text


MIXED = {"attn_v": "Q8_0", "ffn_down_exps": "Q5_K", "ffn_gate_inp": "F32", "token_embd": "F32", "output.": "Q8_0"}


def test_a_mixture_in_several_formats_is_loaded_in_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As llama.cpp writes them: values in more bits than queries and keys, down in more than gate and up, and the head."""
    sizes = {
        "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
    }  # fmt: skip
    path = write_gguf(
        gguf_reference("qwen3_moe", **sizes),
        tmp_path / "model.gguf",
        choose=lambda name: next((kind for part, kind in MIXED.items() if part in name), "Q4_K"),
    )
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        model = interpreted(path, monkeypatch)
    assert model.formats.keys() == {"gpu4-g32-s8-minima", "gpu8-g32-f16", "gpu8-g32-s8-minima"}
    assert model.expert_formats.keys() == {"gpu4-g32-s8-minima", "gpu8-g32-s8-minima"}
    assert model.head_format == "gpu8-g32-f16"
    assert "because the kernels hold the file's values" in caplog.text


def both_ways(path: Path) -> tuple[Model, Model]:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return load_model(path, CONFIG), load_model(path, ComputeConfig(backend="torch", device="cuda", weights="bf16"))


def answers_alike(path: Path) -> Model:
    """The model in codes, once whole, in parts and beside others it has the bits of the one in bf16."""
    coded, plain = both_ways(path)
    tokens = prompt(N_TOKENS)
    whole = alone(plain, tokens, None)
    assert whole.logits.std() > 0.1, "the model says nearly the same everywhere; the test would see nothing"
    assert not (found := alone(coded, tokens, None).differs_from(whole)), found
    assert not (found := differing(coded, tokens, whole)), found
    assert coded.revision == plain.revision
    return coded


@pytest.mark.gpu
@pytest.mark.parametrize("layout", FILES)
def test_a_model_in_codes_is_the_model_in_bf16(layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logits and cache, however the work is cut."""
    make, form = FILES[layout]
    original = make_checkpoint(
        "llama", tmp_path / "original", hidden_size=128, intermediate_size=256, num_hidden_layers=1
    )
    path, _ = quantised_checkpoints(original, tmp_path, make())
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        model = answers_alike(path)
    assert model.weights_format == form
    assert f"kept={form}" in caplog.text


@pytest.mark.gpu
def test_experts_in_mxfp4_are_those_in_bf16(tmp_path: Path) -> None:
    """As gpt-oss has them, beside attention in bf16."""
    path, _ = mxfp4_checkpoint(tmp_path, dtype=torch.bfloat16)
    assert set(answers_alike(path).expert_formats) == {"gpu4-g32-bf16-e2m1"}
