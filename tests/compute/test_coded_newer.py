"""More checkpoints that other programs quantised: AWQ's other layouts, sparsity, AQLM, SINQ, quanto, Metal, torchao's int4."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from coded_files import (
    Tensors,
    check_in_use,
    check_values,
    compressed,
    damaged,
    gptq,
    logits_of,
    opened,
    quantised_checkpoints,
    quark,
)
from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.formats.matrices import CodedParts
from diptych.compute.ops.made import MadeTensor
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_config_file, read_json
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of
from newer_files import (
    aqlm,
    awq_gemv,
    awq_marlin,
    by_quantisers,
    four_over_six,
    fp_quant,
    gptq_marlin,
    gptq_planes,
    marlin,
    metal,
    plain_floats,
    quanto,
    quanto_fp8,
    quark_awq,
    quark_blocks,
    quark_fp8,
    quark_nvfp4,
    scaled_inputs,
    sinq,
    sparse,
    torchao_int4,
    torchao_int8_whole,
)

ROWS = {"num_bits": 8, "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP6 = {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
# layout -> how it is made, and what holds it
LAYOUTS: dict[str, tuple[Any, str | None]] = {
    "gemv": (lambda: awq_gemv(32), "group4-g32-f16-zeros"),
    "gemv 64": (lambda: awq_gemv(64), "group4-g64-f16-zeros"),
    "gemv fast": (lambda: awq_gemv(32, is_fast=True), "group4-g32-f16-minima16"),
    "gemv fast 64": (lambda: awq_gemv(64, is_fast=True), "group4-g64-f16-minima16"),
    "awq marlin": (lambda: awq_marlin(64), "group4-g64-f16"),
    "awq marlin rows": (lambda: awq_marlin(None), "group4-g128-f16"),
    "gptq marlin": (lambda: gptq_marlin(64, checkpoint_format="marlin"), "group4-g64-f16"),
    "gptq marlin rows": (lambda: gptq_marlin(None, is_marlin_format=True), "group4-g128-f16"),
    "gptq planes 3": (lambda: gptq_planes(3, symmetric=False), "group3-g32-f16-minima"),
    "gptq planes 4": (lambda: gptq_planes(4, symmetric=False), "group4-g32-f16-zeros"),
    "gptq planes 5": (lambda: gptq_planes(5, symmetric=True), "group5-g32-f16"),
    "gptq planes 6": (lambda: gptq_planes(6, symmetric=False), "group6-g32-f16-minima-wide"),
    "gptq planes 7": (lambda: gptq_planes(7, symmetric=True), "group8-g32-f16-wide"),
    "quark as awq": (quark_awq, "group4-g32-f16-zeros"),
    "quark as awq in order": (lambda: quark_awq(in_order=True), "group4-g32-f16-zeros"),
    "quark as symmetric awq": (lambda: quark_awq(symmetric=True), "group4-g32-f16"),
    "quark as fp8": (quark_fp8, "fp8"),
    "quark fp8 blocks": (lambda: quark_blocks(128, 128), "fp8-g128"),
    "quark fp8 small blocks": (lambda: quark_blocks(32, 16), None),
    "quark nvfp4": (quark_nvfp4, "group4-g16-e4m3-e2m1"),
    "quark nvfp4 by module": (lambda: quark_nvfp4(by_module=True), "group4-g16-e4m3-e2m1"),
    "quark int4 by module": (lambda: by_quantisers(quark("int4")), "group4-g32-f16"),
    "quark fp4 by module": (lambda: by_quantisers(quark("fp4")), "group4-g32-e8m0-e2m1"),
    "quark fp8 by module": (lambda: by_quantisers(quark("fp8_e4m3")), "fp8"),
    "sparse": (lambda: sparse(plain_floats()), None),
    "sparse, any number": (lambda: sparse(plain_floats(), "sparse-bitmask"), None),
    "sparse fp8": (lambda: sparse(compressed("float-quantized", type="float", **ROWS)), "fp8"),
    "sparse w8a8": (lambda: sparse(compressed("int-quantized", DYNAMIC, type="int", **ROWS), "sparse-bitmask"), "int8"),
    "marlin": (lambda: marlin(4, None), "group4-g128-f16"),
    "marlin in groups": (lambda: marlin(4, 32), "group4-g32-f16"),
    "marlin of 8 bits": (lambda: marlin(8, 64), "group8-g64-f16-wide"),
    "mxfp6": (lambda: compressed("mxfp6-pack-quantized", **FP6), "group8-g32-bf16-wide"),
    "aqlm 1x16": (lambda: aqlm(16, 1), None),
    "aqlm 2x8": (lambda: aqlm(8, 2), None),
    "aqlm runs": (lambda: aqlm(7, 1, rows=2, inputs=4), None),
    "quanto 2": (lambda: quanto(2, 64), "group2-g64-bf16-minima16"),
    "quanto 4": (lambda: quanto(4, 32), "group4-g32-bf16-minima16"),
    "quanto 4 with zero points": (lambda: quanto(4, None, has_zero_points=True), "group4-g128-bf16-zeros"),
    "quanto 8": (lambda: quanto(8, None), "group8-g128-bf16-wide"),
    "quanto e5m2": (lambda: quanto_fp8("float8_e5m2"), None),
    "quanto e4m3fnuz": (lambda: quanto_fp8("float8_e4m3fnuz"), None),
    "sinq 4": (lambda: sinq(4, 64), None),
    "sinq 3": (lambda: sinq(3, 64, has_small_scales=False), None),
    "sinq 5": (lambda: sinq(5, 32), None),
    "fp-quant": (lambda: fp_quant("mxfp4"), None),
    "fp-quant padded": (lambda: fp_quant("mxfp4", padded=True, scale=2.0), None),
    "fp-quant gsr": (lambda: fp_quant("mxfp4", "gsr"), None),
    "fp-quant plain": (lambda: fp_quant("mxfp4", "identity"), "group4-g32-e8m0-e2m1"),
    "fp-quant plain over 3": (lambda: fp_quant("mxfp4", "identity", scale=3.0), None),
    "fp-quant nvfp4": (lambda: fp_quant("nvfp4", sides=16, scale=8.0, padded=True), None),
    "fp-quant nvfp4 plain": (lambda: fp_quant("nvfp4", "identity", scale=10.0), "group4-g16-e4m3-e2m1"),
    "fp-quant floats": (lambda: fp_quant("floats"), None),
    "four over six": (four_over_six, "group4-g16-e4m3-e2m1"),
    "four over six, always four": (lambda: four_over_six("static_4", 4 * 448), "group4-g16-e4m3-e2m1"),
    "metal 2": (lambda: metal(2), "group2-g32-f32-minima"),
    "metal 4": (lambda: metal(4), "group4-g32-f32-minima"),
    "metal 8": (lambda: metal(8), "group8-g32-f32-minima-wide"),
    "torchao int8 whole": (torchao_int8_whole, "group8-g128-f32-wide"),
    "torchao int4": (lambda: torchao_int4("PLAIN"), "group4-g32-bf16-minima"),
    "torchao int4 symmetric": (lambda: torchao_int4("PLAIN", 64, symmetric=True), "group4-g64-bf16"),
    "torchao int4 scaled": (lambda: scaled_inputs(torchao_int4("PLAIN")), None),
    "torchao int4 tiles": (lambda: torchao_int4("TILE_PACKED_TO_4D"), "group4-g32-bf16-minima"),
}
DOWN = "model.layers.0.mlp.down_proj."
AO = f"{DOWN}_weight_"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sides that all of them divide."""
    fields = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 32}
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16, **fields)


def made(layout: str, original: Path, folder: Path) -> tuple[Path, Path]:
    if layout.startswith(("sparse fp8", "sparse w8a8", "mxfp6")):
        pytest.importorskip("compressed_tensors")
    return quantised_checkpoints(original, folder, LAYOUTS[layout][0]())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_values_of_its_own_formula(layout: str, original: Path, tmp_path: Path) -> None:
    """A place of a kernel's order that is off, or zeros at other places than the mask has: another model."""
    coded, plain = made(layout, original, tmp_path)
    if layout.endswith("tiles"):  # which the file fills up to 1024 inputs
        padded = sum(group.parameters for group in contents_of(coded).groups)
        assert padded > sum(values.numel() for values in load_file(plain / "model.safetensors").values())
        for name, values in load_file(plain / "model.safetensors").items():
            assert torch.equal(opened(coded).tensor(name, *values.shape).read().float(), values.float()), name
        return
    check_values(coded, plain, LAYOUTS[layout][1])


@pytest.mark.native
@pytest.mark.parametrize(
    "layout",
    ["gemv", "gemv fast", "gptq marlin", "sparse", "sparse fp8", "marlin in groups", "mxfp6", "aqlm 2x8", "quanto 2",
     "quanto 4", "sinq 4", "fp-quant padded", "fp-quant plain", "metal 8", "torchao int4", "torchao int4 scaled",
     "torchao int4 tiles", "quark as symmetric awq", "quark nvfp4 by module"],
)  # fmt: skip
def test_kept_weights_answer_as_their_values_do(
    layout: str, original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the cpu backend, within what rows of 8 bits cost; and the log says what is kept and what is not."""
    check_in_use(*made(layout, original, tmp_path), LAYOUTS[layout][1], caplog)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            "quanto e5m2",
            lambda t: t[f"{DOWN}weight._data"].view(torch.uint8).fill_(124),
            "weight._data has a number that is not finite",
        ),
        ("quanto e5m2", lambda t: t.pop(f"{DOWN}weight._scale"), "weight._scale is missing"),
        ("four over six", lambda t: t.pop(f"{DOWN}quantized_weight_amax"), "quantized_weight_amax is missing"),
        ("four over six", lambda t: t[f"{DOWN}quantized_weight_metadata"][5].fill_(0), r"metadata is \[128, 192, 128, 192, 1"),
        ("four over six", lambda t: t[f"{DOWN}quantized_weight_amax"].fill_(float("inf")), "amax has a number that is not"),
        (
            "four over six",
            lambda t: t.update({f"{DOWN}quantized_weight_values": t[f"{DOWN}quantized_weight_values"][1:].clone()}),
            r"quantized_weight_values is U8 \[127, 96\]",
        ),
        ("fp-quant", lambda t: t.pop(f"{DOWN}forward_hadamard_matrix"), "forward_hadamard_matrix is missing"),
        ("fp-quant", lambda t: t.update({f"{DOWN}forward_hadamard_matrix": torch.ones(9, 9)}), r"F32 \[9, 9\]; .* \[32, 32\]"),
        ("fp-quant", lambda t: t[f"{DOWN}forward_hadamard_matrix"].fill_(float("nan")), "matrix has a number that is not"),
        ("fp-quant", lambda t: t.update({f"{DOWN}scales": t[f"{DOWN}scales"][:, 1:].clone()}), r"scales is U8 \[128, 5\]"),
        ("fp-quant", lambda t: t[f"{DOWN}scales"].fill_(255), "scales has a scale that is negative or not finite"),
        ("fp-quant", lambda t: t.update({f"{DOWN}qweight": t[f"{DOWN}qweight"].int()}), "qweight is I32"),
        ("fp-quant plain over 3", lambda t: t[f"{DOWN}weight_global_scale"].fill_(0), "weight_global_scale is 0.0"),
        ("fp-quant nvfp4", lambda t: t[f"{DOWN}weight_global_scale"].fill_(0), "weight_global_scale is 0.0"),
        ("fp-quant floats", lambda t: t.update({f"{DOWN}dqweight": t[f"{DOWN}dqweight"][1:].clone()}), r"BF16 \[127, 192\]"),
        ("gemv", lambda t: t.pop(f"{DOWN}qzeros"), "qzeros is missing"),
        ("gemv", lambda t: t.update({f"{DOWN}scales": t[f"{DOWN}scales"][:, :6].clone()}), r"scales is F16 \[128, 6\]"),
        ("gemv fast", lambda t: t.update({f"{DOWN}qweight": t[f"{DOWN}qweight"].int()}), r"qweight is I32 .* I16 \[32, 192\]"),
        ("gemv fast", lambda t: t.update({f"{DOWN}qzeros": t[f"{DOWN}qzeros"] * float("nan")}), "scale that is not finite"),
        ("gptq marlin", lambda t: t.pop(f"{DOWN}s"), "down_proj.s is missing"),
        ("gptq marlin", lambda t: t.pop(f"{DOWN}B"), "down_proj.weight is missing"),
        ("gptq marlin", lambda t: t.update({f"{DOWN}s": t[f"{DOWN}s"][1:].clone()}), r"down_proj.s is F16 \[2, 128\]"),
        ("quark nvfp4", lambda t: t.pop(f"{DOWN}weight_scale_2"), "weight_scale_2 is missing"),
        ("quark nvfp4 by module", lambda t: t.pop(f"{DOWN}weight_quantizer.0.scale"), "weight_scale is missing"),
        ("quark int4 by module", lambda t: t.pop(f"{DOWN}weight_quantizer.scale"), "weight_scale is missing"),
        ("sparse", lambda t: t.pop(f"{DOWN}bitmask"), "bitmask is missing"),
        ("sparse", lambda t: t[f"{DOWN}bitmask"].bitwise_or_(1), r"bitmask has \d+ bits for the 12288 values"),
        ("sparse", lambda t: t.update({f"{DOWN}shape": torch.tensor([192, 128])}), r"shape is \[192, 128\]; .* \[128, 192\]"),
        ("sparse", lambda t: t.update({f"{DOWN}compressed": t[f"{DOWN}compressed"][1:].clone()}), r"compressed is BF16 \[127"),
        ("sparse, any number", lambda t: t.update({f"{DOWN}compressed": t[f"{DOWN}compressed"][1:].clone()}), "12287 values"),
        ("sparse, any number", lambda t: t.update({f"{DOWN}row_offsets": torch.zeros(3).long()}), r"row_offsets is I64 \[3\]"),
        ("marlin", lambda t: t.pop(f"{DOWN}meta"), "meta is missing"),
        ("marlin", lambda t: t.update({f"{DOWN}meta": t[f"{DOWN}meta"].T.contiguous()}), r"meta is I16 \[256, 6\]"),
        ("marlin", lambda t: t.update({f"{DOWN}scale_packed": t[f"{DOWN}scale_packed"].repeat(5, 1)}), "5 scales a row"),
        ("mxfp6", lambda t: t[f"{DOWN}weight_scale"].fill_(255), "a scale that is no number"),
        ("mxfp6", lambda t: t.update({f"{DOWN}weight_scale": t[f"{DOWN}weight_scale"][:, 1:].clone()}), "weight_scale is U8"),
        ("aqlm 2x8", lambda t: t.pop(f"{DOWN}codebooks"), "codebooks is missing"),
        ("aqlm 2x8", lambda t: t.update({f"{DOWN}codebooks": t[f"{DOWN}codebooks"][:, :99].clone()}), "codes of 1 to 16 bits"),
        ("aqlm 2x8", lambda t: t.update({f"{DOWN}codebooks": t[f"{DOWN}codebooks"][..., :5].clone()}), "runs of 1 by 5 do not"),
        ("aqlm 2x8", lambda t: t.update({f"{DOWN}codes": t[f"{DOWN}codes"].short()}), r"codes is I16 .* I8 \[128, 24, 2\]"),
        ("aqlm 2x8", lambda t: t[f"{DOWN}codebooks"].fill_(float("inf")), "codebooks has a number that is not finite"),
        ("quanto 4", lambda t: t.pop(f"{DOWN}weight._shift"), "_shift is missing"),
        ("quanto 4", lambda t: t.update({f"{DOWN}weight._scale": t[f"{DOWN}weight._scale"][:5].clone()}), "has 5 scales"),
        ("quanto 8", lambda t: t.update({f"{DOWN}weight._data": t[f"{DOWN}weight._data"].T.contiguous()}), "_data is I8"),
        ("sinq 4", lambda t: t.pop(f"{DOWN}meta.scale.s"), "meta.scale.s is missing"),
        ("sinq 4", lambda t: t.pop(f"{DOWN}meta.zero.x"), "meta.zero is missing"),
        ("sinq 4", lambda t: t[f"{DOWN}meta.scale2"].fill_(float("nan")), "meta.scale2 has a number that is not finite"),
        ("sinq 4", lambda t: t.update({f"{DOWN}W_q": t[f"{DOWN}W_q"][1:].clone()}), r"W_q is U8 \[191, 64\]; U8 \[192, 64\]"),
        ("sinq 3", lambda t: t.update({f"{DOWN}meta.scale": t[f"{DOWN}meta.scale"][1:].clone()}), "383 scales and 384 zero"),
        ("metal 4", lambda t: t.pop(f"{DOWN}qbiases"), "qbiases is missing"),
        ("torchao int4", lambda t: t.pop(f"{AO}zero_point"), "zero_point is missing"),
        ("torchao int4", lambda t: t.update({f"{AO}scale": t[f"{AO}scale"].T.contiguous()}), "128 scales a row, which 192"),
        ("torchao int4", lambda t: t.update({f"{AO}act_pre_scale": torch.ones(1)}), r"act_pre_scale is F32 \[1\]"),
        ("torchao int4 scaled", lambda t: t[f"{AO}act_pre_scale"].fill_(float("inf")), "pre_scale has a number that is not"),
        ("torchao int4 tiles", lambda t: t.update({f"{AO}qdata": t[f"{AO}qdata"][1:].clone()}), r"qdata is I32 \[15, 8, 32"),
        ("torchao int4 tiles", lambda t: t.pop(f"{AO}scale_and_zero"), "scale_and_zero"),
    ],
)  # fmt: skip
def test_damaged_codes_are_refused(layout: str, change: Any, message: str, original: Path, tmp_path: Path) -> None:
    """What, the number and the limit, before a model of it stands."""
    coded, _ = made(layout, original, tmp_path)
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")


def test_mxfp8_stands_beside_blocks_of_fp8(original: Path, tmp_path: Path) -> None:
    """Whichever group comes last: the size of the blocks was taken to be that of MXFP8's, and the file refused as another's."""
    pytest.importorskip("compressed_tensors")
    floats = {"num_bits": 8, "type": "float"}
    blocks = compressed("float-quantized", **floats, strategy="block", block_structure=[16, 32], dynamic=False)
    mx = compressed("mxfp8-quantized", **floats, strategy="group", group_size=32, scale_dtype=torch.uint8)
    (coded, plain), (others, values) = (
        quantised_checkpoints(original, tmp_path / name, one) for name, one in (("blocks", blocks), ("mx", mx))
    )
    config = read_json(coded / "config.json")
    section = read_json(others / "config.json")["quantization_config"]
    config["quantization_config"] |= {"format": "mixed-precision"}
    config["quantization_config"]["config_groups"]["mx"] = section["config_groups"]["group_0"]
    expected = load_file(plain / "model.safetensors")
    tensors = {name: one for name, one in load_file(coded / "model.safetensors").items() if ".up_proj." not in name}
    tensors |= {name: one for name, one in load_file(others / "model.safetensors").items() if ".up_proj." in name}
    expected |= {name: one for name, one in load_file(values / "model.safetensors").items() if ".up_proj." in name}
    save_file(tensors, coded / "model.safetensors", metadata={"format": "pt"})
    groups = config["quantization_config"]["config_groups"]
    for order in (groups, dict(reversed(groups.items()))):
        config["quantization_config"]["config_groups"] = order
        (coded / "config.json").write_text(json.dumps(config))
        checkpoint = opened(coded)
        for name, one in expected.items():
            assert torch.equal(checkpoint.tensor(name, *one.shape).read().float(), one.float()), name
    own = {**groups["group_0"], "weights": {**groups["group_0"]["weights"], "block_structure": [32, 32]}}
    config["quantization_config"]["config_groups"] = {**groups, "other": own}
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LoadError, match=r"block_structure .* is \[32, 32\]; blocks of one size .* others are \[16, 32\]"
    ):
        opened(coded)


def with_config(folder: Path, **fields: Any) -> Path:
    config = read_json(folder / "config.json")
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layout", "fields", "message"),
    [
        ("gemv fast", {"version": "gemv"}, r"qweight is I16 \[48, 128\]; I32 \[192, 16\]"),
        ("gemv", {"version": "gemm"}, "qweight is I32"),
        ("gemv", {"version": "marlin", "zero_point": False}, r"qweight is I32 .* I32 \[8, 384\]"),
        ("awq marlin", {"zero_point": True}, "zero_point .* is True; False can be read"),
        ("awq marlin", {"version": "exllama"}, "version .* is 'exllama'"),
        ("gptq marlin", {"checkpoint_format": "gptq"}, "weight is missing"),
        ("gptq marlin", {"desc_act": True}, "desc_act .* is True; False can be read"),
        ("gptq marlin", {"sym": False}, "sym .* is False; True can be read"),
        ("gptq marlin", {"bits": 8}, "bits .* is 8; 4 can be read"),
        ("gemv", {"group_size": 40}, "128 inputs, which groups of 40 do not divide"),
    ],
)
def test_a_layout_that_the_config_does_not_name_is_refused(
    layout: str, fields: dict[str, Any], message: str, original: Path, tmp_path: Path
) -> None:
    """The same words would be read in another order."""
    coded, _ = made(layout, original, tmp_path)
    with pytest.raises(LoadError, match=message):
        logits_of(with_config(coded, **fields), backend="torch")


@pytest.mark.parametrize(
    ("layout", "sides", "message"),
    [
        ("gemv", (128, 36), "groups of 32 do not divide"),
        ("gemv fast", (128, 96), r"is 128 by 96; .* 4 rows and 64 inputs share their words"),
        ("gptq marlin", (96, 192), r"is 96 by 192; in the layout marlin 64 rows and 16 inputs"),
        ("gptq planes 5", (128, 80), r"is 128 by 80; whole words of 32 bits hold 32 codes"),
        ("awq marlin", (96, 192), r"is 96 by 192; in the layout marlin 64 rows and 16 inputs"),
        ("marlin", (96, 192), r"is 96 by 192; .* outputs come in 64 and inputs in 32"),
        ("mxfp6", (128, 40), "40 inputs, which groups of 32 do not divide"),
    ],
)
def test_sides_that_a_layout_cannot_have_are_refused(
    layout: str, sides: tuple[int, int], message: str, original: Path, tmp_path: Path
) -> None:
    """As no file that the program wrote has them."""
    coded, _ = made(layout, original, tmp_path)
    damaged(coded, lambda tensors: tensors.update({f"{DOWN}weight_packed": torch.zeros(128, 30, dtype=torch.uint8)}))
    with pytest.raises(LoadError, match=message):
        opened(coded).tensor(f"{DOWN}weight", *sides)


QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 16}
QUARK_SCALES = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True}
QUARK_BLOCKS = {"dtype": "fp8_e4m3", "qscheme": "per_block"}


def quark_of(weight: Any, **fields: Any) -> dict[str, Any]:
    """A config of Quark with that type of weights."""
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, **fields}


HADAMARD = {"algorithm": "hadamard", "hadamard_type": "hadamard", "block_size": 32}
ROTATED = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
SPARSE = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}


def vptq_with(**fields: Any) -> dict[str, Any]:
    """Of one module."""
    usual = {"vector_lens": [-1, 8], "num_centroids": [-1, 256], "num_res_centroids": [-1, -1], "group_num": 1,
             "group_size": 64, "outlier_size": 0, "in_features": 64, "out_features": 64}  # fmt: skip
    return {"quant_method": "vptq", "config_for_layers": {"model.layers.0.mlp.down_proj": usual | fields}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_method": "awq", "version": "llm-awq"}, "version .* is 'llm-awq'; 'gemm' .* or 'marlin' can be read"),
        ({"quant_method": "awq", "version": "gemm", "backend": "llm-awq"}, "backend .* is 'llm-awq'"),
        ({"quant_method": "awq", "version": "gemv_fast", "bits": 8}, "bits .* is 8; 4 can be read"),
        (SPARSE | {"sparsity_config": {"format": "sparse-50"}}, "format in sparsity_config .* is 'sparse-50'"),
        (SPARSE | {"config_groups": {"a": {"weights": {"num_bits": 6, "type": "int"}}}}, "num_bits .* is 6; 4 or 8"),
        (SPARSE | {"config_groups": {"a": {"weights": FP6 | {"group_size": 16}}}}, "group_size .* is 16; 32 can be read"),
        ({"quant_method": "aqlm", "nbits_per_codebook": "many"}, "nbits_per_codebook .* is 'many'"),
        ({"quant_method": "quanto"}, "weights .* is None"),
        ({"quant_method": "quanto", "weights": "int3"}, "weights .* is 'qint3'"),
        ({"quant_method": "quanto", "weights": "int8", "activations": "int8"}, "activations .* is 'int8'; None or 'none'"),
        ({"quant_method": "quanto", "quanto_qmap.json": {"a": 4}}, "a in quanto_qmap.json .* is a int"),
        ({"quant_method": "quanto", "quanto_qmap.json": {"a": {"weights": "qint3"}}}, "weights in a .* is 'qint3'"),
        ({"quant_method": "quanto", "quanto_qmap.json": {}}, "it must name modules"),
        ({"quant_method": "metal", "bits": 3}, "bits .* is 3; 2 or 4 or 8"),
        ({"quant_method": "metal", "group_size": -1}, "group_size .* is -1; it must be a whole number"),
        (torchao_int4("PRESHUFFLED").config, "int4_packing_format .* PLAIN or TILE_PACKED_TO_4D can be read"),
        ({"quant_method": "eetq", "weights": "int8"}, "quantised with 'eetq', in the order of a GPU that the file does not"),
        ({"quant_method": "sinq", "nbits": 7}, "nbits .* is 7; 8 or 6"),
        ({"quant_method": "sinq", "nbits": 4, "tiling_mode": "2D"}, "tiling_mode .* is '2D'"),
        ({"quant_method": "sinq", "nbits": 4, "method": "asinq_nf4"}, "method .* is 'asinq_nf4'"),
        ({"quant_method": "fp_quant", "forward_dtype": "mxfp8"}, "forward_dtype .* is 'mxfp8'"),
        ({"quant_method": "fp_quant", "store_master_weights": True}, "store_master_weights .* is True"),
        ({"quant_method": "fp_quant", "transform_init": "random"}, "transform_init .* is 'random'"),
        ({"quant_method": "fouroversix", "dtype": "if4"}, "dtype .* is 'if4'"),
        ({"quant_method": "fouroversix", "weight_dtype": "mxfp4"}, "weight_dtype .* is 'mxfp4'"),
        ({"quant_method": "fouroversix", "weight_scale_rule": "learned"}, "weight_scale_rule .* is 'learned'"),
        ({"quant_method": "fouroversix", "keep_master_weights": True}, "keep_master_weights .* is True"),
        ({"quant_method": "fouroversix", "module_config_overrides": {"a": {}}}, "module_config_overrides"),
        (quark_of([QUARK_FP4, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}]), "weight in .* or NVFP4"),
        (quark_of([QUARK_FP4, QUARK_SCALES, {}]), "weight in .* or NVFP4"),
        (quark_of([QUARK_FP4, QUARK_SCALES | {"dtype": "fp8_e5m3"}]), "dtype in weight in .* is 'fp8_e5m3'"),
        (quark_of([QUARK_FP4 | {"group_size": 32}, QUARK_SCALES]), "group_size in weight in .* is 32; 16 can be read"),
        (quark_of({"dtype": "fp8_e4m3", "qscheme": "per_block"}), "block_size .* two whole numbers"),
        (
            quark_of(QUARK_BLOCKS | {"block_size": [128, 128]},
                     layer_quant_config={"*": {"weight": QUARK_BLOCKS | {"block_size": [64, 64]}}}),
            "layer_quant_config .* blocks of one size",
        ),
        ({"quant_method": "awq", "pack_method": "other"}, "pack_method .* is 'other'"),
        ({"quant_method": "vptq"}, "config_for_layers .* must say how"),
        ({"quant_method": "vptq", "config_for_layers": {"a": 3}}, "a in config_for_layers .* is a int"),
        (vptq_with(is_indice_packed=False), "is_indice_packed .* is False"),
        (vptq_with(vector_quant_dim="in"), "vector_quant_dim .* is 'in'"),
        (vptq_with(vector_lens=[8]), "vector_lens .* two whole numbers"),
        (vptq_with(vector_lens=[4, 0]), "vector_lens .* a length and a number"),
        (vptq_with(num_centroids=[-1, 100]), "num_centroids .* powers of two up to 65536"),
        (vptq_with(num_centroids=[-1, 1 << 40]), "num_centroids .* two whole numbers"),
        (vptq_with(num_res_centroids=[8, 8]), "num_res_centroids .* sum of two vectors"),
        (vptq_with(group_size=0), "group_size .* is 0"),
        (ROTATED | {"rotation_config": HADAMARD}, "rotation_config .* mx_fp and nv_fp can be read"),
        (ROTATED | {"data_type": "mx_fp", "rotation_config": {"hadamard_type": "inplace_random"}}, "hadamard_type .* is"),
        (ROTATED | {"data_type": "mx_fp", "rotation_config": HADAMARD | {"backend": "inplace"}}, "backend .* is 'inplace'"),
        (ROTATED | {"data_type": "mx_fp", "rotation_config": HADAMARD | {"block_size": 24}}, "block_size .* is 24"),
        ({"quant_method": "spqr"}, "quantised with 'spqr', with single weights beside its groups; .* are read"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    """An unknown order read by the rules of a known one gives noise, not an error."""
    with pytest.raises(LoadError, match=message):
        quantisation_of(HfConfig({"quantization_config": changed}))


def test_scales_of_a_cache_beside_floats_are_left_alone(original: Path, tmp_path: Path) -> None:
    """Quark names them as what k and v give, also where those are not quantised."""
    coded, plain = quantised_checkpoints(original, tmp_path, quark("fp4"))
    floats, kv = load_file(plain / "model.safetensors"), "model.layers.0.self_attn."

    def unquantised(tensors: Tensors) -> None:
        for name in [one for one in tensors if one.startswith((f"{kv}k_proj.weight", f"{kv}v_proj.weight"))]:
            del tensors[name]
        tensors |= {f"{kv}{one}_proj.weight": floats[f"{kv}{one}_proj.weight"].bfloat16() for one in "kv"}
        tensors |= {
            f"{kv}k_proj.output_scale": torch.tensor(0.5),
            f"{kv}v_proj.output_quantizer.scale": torch.tensor(0.5),
        }

    damaged(coded, unquantised)
    config: dict[str, Any] = {"backend": "torch", "weights": "fp32"}
    damaged(
        plain,
        lambda tensors: tensors.update(
            {f"{kv}{one}_proj.weight": floats[f"{kv}{one}_proj.weight"].bfloat16().float() for one in "kv"}
        ),
    )
    assert torch.equal(logits_of(coded, **config), logits_of(plain, **config))


def test_sinqs_own_word_for_its_method_is_read(original: Path, tmp_path: Path) -> None:
    """Where its library saved a model without transformers' config of it."""
    coded, plain = made("sinq 4", original, tmp_path)
    config = read_json(coded / "config.json")
    config["quantization_config"] = {
        "sinq": True,
        "backend": "sinq",
        "quantization_method": "sinq",
        "sinq_version": "auto",
    }
    (coded / "config.json").write_text(json.dumps(config))
    check_values(coded, plain, None)


class Counting(CodedCheckpoint):
    """Notes what is read of its files."""

    n_read: ClassVar[Counter[str]] = Counter()

    def stored(self, name: str) -> torch.Tensor:
        self.n_read[name] += 1
        return super().stored(name)


def test_scales_of_matrices_are_let_go_and_codes_are_read_once(tmp_path: Path) -> None:
    """All scales and zero points stayed until the model was closed, a third of 4 bits in groups of 32 as much again as its
    weights; and for every million values that blocks were made of, all codes of the matrix were taken out of their words.
    """
    sizes = {"intermediate_size": 2**15, "num_hidden_layers": 1}
    original = make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16, **sizes)
    coded, _ = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=False))
    how = quantisation_of(HfConfig(read_config_file(coded / "config.json")))
    assert how is not None
    checkpoint = Counting(coded, how, dtype=torch.float32)
    gc.collect()  # once: it takes longer than all of this
    before = n_parts()
    for part in ("gate_proj", "up_proj"):
        tensor = checkpoint.tensor(f"model.layers.0.mlp.{part}.weight", 2**15, 64)
        assert tensor.kept is not None
        assert n_parts() == before
        tensor.codes()
        assert n_parts() == before
        checkpoint.n_read.clear()
        MadeTensor(tensor, "q8_0").codes()
        assert checkpoint.n_read[f"model.layers.0.mlp.{part}.qweight"] == 1
        assert n_parts() == before


def n_parts() -> int:
    """Scales of matrices that somebody holds."""
    return sum(type(one) is CodedParts for one in gc.get_objects())
