"""Checkpoints that other programs quantised: each layout gives the values of its formula, kept where a kernel holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from coded_files import (
    Layout,
    awq,
    bitnet,
    block_fp8,
    check_in_use,
    check_values,
    compressed,
    damaged,
    fbgemm_fp8,
    gemma,
    gptq,
    logits_of,
    mxfp8,
    opened,
    quantised_checkpoints,
    quark,
    whole_fp8,
)
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, LoadError
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of

native = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local", "group_size": 16}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
GROUPS = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32}


def hqq_with(**weights: Any) -> dict[str, Any]:
    """A config of HQQ."""
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, **weights}}}


def torchao_with(name: str, **data: Any) -> dict[str, Any]:
    """A config of torchao."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_version": 2, "_data": data}}}


def quark_with(weight: Any, **fields: Any) -> dict[str, Any]:
    """A config of Quark with another type of weights."""
    own = {"dtype": "fp4", "scale_format": "e8m0", **GROUPS, **weight} if isinstance(weight, dict) else weight
    return {"quant_method": "quark", "global_quant_config": {"weight": own}, **fields}


# layout -> how it is made, and what holds it
LAYOUTS: dict[str, tuple[Any, str | None]] = {
    "awq": (lambda: awq(32), "group4-g32-f16-zeros"),
    "awq rows": (lambda: awq(-1), "group4-g128-f16-zeros"),
    "awq symmetric": (lambda: awq(32, zero_point=False), "group4-g32-f16"),
    "gptq": (lambda: gptq(4, 32, symmetric=True), "group4-g32-f16"),
    "gptq asymmetric": (lambda: gptq(4, 32, symmetric=False), "group4-g32-f16-zeros"),
    "gptq v2": (lambda: gptq(4, 32, symmetric=False, version=2), "group4-g32-f16-zeros"),
    "gptq 8": (lambda: gptq(8, 32, symmetric=True), "group8-g32-f16-wide"),
    "gptq 8 asymmetric": (lambda: gptq(8, 32, symmetric=False), "group8-g32-f16-minima-wide"),
    "gptq 8 rows": (lambda: gptq(8, -1, symmetric=True), "group8-g128-f16-wide"),
    "gptq 2": (lambda: gptq(2, 32, symmetric=False), "group2-g32-f16-minima"),
    "gptq 2 symmetric": (lambda: gptq(2, -1, symmetric=True), "group2-g128-f16"),
    "gptq 3": (lambda: gptq(3, 32, symmetric=False, act_order=True), "group3-g32-f16-minima"),
    "gptq 3 symmetric": (lambda: gptq(3, 32, symmetric=True, version=2), "group3-g32-f16"),
    "gptq act-order": (lambda: gptq(4, 32, symmetric=True, act_order=True), "group4-g32-f16"),
    "w4a16": (
        lambda: compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        "group4-g32-bf16",
    ),
    "w4a16 asymmetric": (
        lambda: compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        "group4-g32-bf16-zeros",
    ),
    "w4a16 rows": (lambda: compressed("pack-quantized", **{**CHANNEL, "num_bits": 4}), "group4-g128-bf16"),
    "w8a16 rows": (lambda: compressed("pack-quantized", **CHANNEL), "group8-g128-bf16-wide"),
    "w8a8": (lambda: compressed("int-quantized", DYNAMIC, **CHANNEL), "int8"),
    "fp8 rows": (
        lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        "fp8",
    ),
    "fp8 rows and blocks": (
        lambda: compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32], dynamic=False
        ),
        None,
    ),
    "fp8 rows and blocks that do not divide": (
        lambda: compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 28], dynamic=False
        ),
        None,
    ),
    "w4a4 nvfp4": (
        lambda: compressed(
            "nvfp4-pack-quantized",
            FP4,
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
            scale_dtype=torch.float8_e4m3fn,
        ),
        "group4-g16-e4m3-e2m1",
    ),
    "w4a16 mxfp4": (
        lambda: compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        ),
        "group4-g32-e8m0-e2m1",
    ),
    "fp8 blocks": (lambda: block_fp8(), "fp8-g128"),
    "fp8 small blocks": (lambda: block_fp8(32, 16), None),
    "fp8 blocks in powers of two": (lambda: block_fp8(32, 16, in_powers=True), None),
    "fp8 whole": (lambda: whole_fp8(), "fp8"),
    "fp8 of fbgemm": (lambda: fbgemm_fp8(), "fp8"),
    "gemma 2": (lambda: gemma(2), "group2-g128-f32"),
    "gemma 4": (lambda: gemma(4, activation_scale=0.02), "group4-g128-f32"),
    "gemma 8": (lambda: gemma(8, activation_scale=0.02), "group8-g128-f32-wide"),
    "quark int4": (lambda: quark("int4"), "group4-g32-f16"),
    "quark uint4": (lambda: quark("uint4"), "group4-g32-f16-zeros"),
    "quark uint4 in order": (lambda: quark("uint4", in_order=True), "group4-g32-f16-zeros"),
    "quark int8": (lambda: quark("int8"), "int8"),
    "quark fp8": (lambda: quark("fp8_e4m3"), "fp8"),
    "quark fp4": (lambda: quark("fp4"), "group4-g32-e8m0-e2m1"),
    "mxfp8": (lambda: mxfp8(), None),
    "mxfp8 in bytes": (lambda: mxfp8(in_bytes=True), None),
    "w8a8 mxfp8": (
        lambda: compressed(
            "mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
        ),
        None,
    ),
    "bitnet": (lambda: bitnet(), "group2-g128-bf16"),
    "bitnet divided": (lambda: bitnet("bitlinear"), "group2-g128-f32"),
    "bitnet saved": (lambda: bitnet(saved=True), "group2-g128-bf16"),
    "bitnet online": (lambda: bitnet(mode="online"), "group2-g128-bf16"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def original_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts one by one, as checkpoints are published."""
    folder = make_checkpoint("mixtral", tmp_path_factory.mktemp("experts"), dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    assert any(".experts.0.w1" in name for name in tensors)
    return folder


def made(layout: str, original: Path, folder: Path) -> tuple[Path, Path]:
    if layout.startswith(("w", "fp8 rows")):
        pytest.importorskip("compressed_tensors")
    if layout.startswith("gptq 3"):  # 32 codes are three words
        original = make_checkpoint("llama", folder / "sides of 32", dtype=torch.bfloat16, head_dim=32)
    return quantised_checkpoints(original, folder, LAYOUTS[layout][0]())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_values_of_its_own_formula(layout: str, original: Path, tmp_path: Path) -> None:
    """A nibble in the wrong place, a zero point off by one (GPTQ's first layout), a neighbour's scale: another model."""
    check_values(*made(layout, original, tmp_path), LAYOUTS[layout][1])


@pytest.mark.native
@pytest.mark.parametrize(
    "layout",
    [
        "awq",
        "awq rows",
        "gptq 8 asymmetric",
        "gptq 8 rows",
        "gptq act-order",
        "gptq 2",
        "gptq 3",
        "gptq 3 symmetric",
        "w8a8",
        "w4a4 nvfp4",
        "w4a16 mxfp4",
        "fp8 rows",
        "fp8 blocks",
        "fp8 small blocks",
        "fp8 whole",
        "fp8 of fbgemm",
        "gemma 4",
        "gemma 8",
        "quark int4",
        "quark fp4",
        "mxfp8",
        "bitnet",
        "bitnet divided",
        "bitnet online",
    ],
)
def test_kept_weights_answer_as_their_values_do(
    layout: str, original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the cpu backend, within what rows of 8 bits cost; and the log says what is kept and what is not."""
    check_in_use(*made(layout, original, tmp_path), LAYOUTS[layout][1], caplog)


@pytest.mark.native
def test_rows_of_15_bits_are_refused_where_the_publisher_has_8(original: Path, tmp_path: Path) -> None:
    """The option would change nothing."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    coded, _ = made("w8a8", original, tmp_path)
    with pytest.raises(ConfigError, match=r"activations is int15, and .* is W8A8"):
        logits_of(coded, backend="cpu", activations="int15")


@pytest.mark.native
def test_experts_keep_their_values(original_experts: Path, tmp_path: Path) -> None:
    """Gathered rows, rows of the gate's output and a router of 16 bits beside them."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    coded, plain = quantised_checkpoints(original_experts, tmp_path, awq(32))
    got, exact = logits_of(coded, backend="cpu"), logits_of(plain, backend="torch", weights="fp32")
    assert (got - exact).abs().mean() < 0.02 * exact.abs().max()


@pytest.mark.native
def test_another_format_may_be_asked_for(original: Path, tmp_path: Path) -> None:
    """--weights is honoured: the values are taken out of their codes and packed anew."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    coded, plain = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=False))
    for weights in ("bf16", "int8"):
        assert torch.equal(
            logits_of(coded, backend="cpu", weights=weights), logits_of(plain, backend="cpu", weights=weights)
        )


def test_fp4_of_modelopt_is_that_of_compressed_tensors_by_other_names(original: Path, tmp_path: Path) -> None:
    """The library's own converter goes from these names to its own; a scale of the whole that divides would be far off."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    coded, plain = made("w4a4 nvfp4", original, tmp_path)
    tensors, renamed = load_file(coded / "model.safetensors"), {}
    for name, tensor in tensors.items():
        stem, _, ending = name.rpartition(".")
        of_modelopt = {
            "weight_packed": "weight",
            "weight_global_scale": "weight_scale_2",
            "input_global_scale": "input_scale",
        }
        is_whole = ending in ("weight_global_scale", "input_global_scale")
        renamed[f"{stem}.{of_modelopt.get(ending, ending)}"] = 1 / tensor.reshape(()) if is_whole else tensor
    renamed["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(renamed, coded / "model.safetensors", metadata={"format": "pt"})
    config = read_json(coded / "config.json")
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4",
                                     "kv_cache_scheme": {"num_bits": 8, "type": "float"}}  # fmt: skip
    (coded / "config.json").write_text(json.dumps(config))
    back = ModelOptNvfp4Converter(targets=[r"re:.*_proj$"]).process(dict(renamed))
    assert torch.equal(back[f"{DOWN}weight_packed"], tensors[f"{DOWN}weight_packed"])
    checkpoint = opened(coded)
    for name, values in load_file(plain / "model.safetensors").items():
        assert torch.allclose(checkpoint.tensor(name, *values.shape).read().float(), values.float(), rtol=1e-6), name
    checkpoint.finish(lambda name: False)
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert (logits_of(coded, backend="torch", weights="fp32") - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.native
@pytest.mark.parametrize(
    "layout", [block_fp8(), gptq(4, 64, symmetric=False), gptq(4, 64, symmetric=True, act_order=True), awq(64)],
    ids=["fp8 blocks", "gptq", "gptq act-order", "awq"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_rows_of_heads_and_of_what_gates_them_come_out_of_one_matrix(
    family: str, layout: Layout, tmp_path: Path
) -> None:
    """Queries and their gate lie head by head in one projection, of Qwen3-Next q, k, v and z too: each finds its own codes."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
             "linear_value_head_dim": 64, "head_dim": 128, "hidden_size": 128, "num_hidden_layers": 2,
             "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
    sizes |= {"num_experts_per_tok": 6, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128} if (
        family == "qwen3_next"
    ) else {"intermediate_size": 128}  # fmt: skip
    original = make_checkpoint(family, tmp_path / "original", dtype=torch.bfloat16, **sizes)
    coded, plain = quantised_checkpoints(original, tmp_path, layout)
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), exact)
    if instruction_sets():
        kept = logits_of(coded, backend="cpu")
        assert (kept - exact).std() < 0.1 * exact.std(), float((kept - exact).std() / exact.std())
        assert torch.equal(logits_of(coded, backend="cpu"), kept)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quant_method": "eetq"}, "quantised with 'eetq', in the order of a GPU"),
        ({"quant_method": "awq", "bits": 3}, "bits .* is 3; 4 can be read"),
        ({"quant_method": "gptq", "bits": 5}, "bits .* is 5; 2 or 3 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* is 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin_24"}, "checkpoint_format .* is 'marlin_24'"),
        (
            {"quant_method": "gptq", "bits": 4, "is_marlin_format": 1, "sym": False},
            "is_marlin_format .* is 1; True or False",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-48"}, "format .* is 'marlin-48'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp6-quantized"}, "mxfp6"),
        ({"quant_method": "mxfp8", "scale_fmt": "float"}, "scale_fmt .* is 'float'; 'ue8m0' can be read"),
        ({"quant_method": "fp8", "expert_dtype": "fp6"}, "expert_dtype .* is 'fp6'"),
        ({"quant_method": "nvfp4"}, "quantised with 'nvfp4'"),
        (AUTO_ROUND | {"data_type": "mx_fp", "bits": 6, "packing_format": "auto_round:llm_compressor"}, "bits .* is 6"),
        (AUTO_ROUND | {"data_type": "nv_fp"}, "packing_format .* is None"),
        (AUTO_ROUND | {"data_type": "nvfp4_v2"}, "data_type .* is 'nvfp4_v2'"),
        (AUTO_ROUND | {"data_type": "fp", "bits": 8, "group_size": [128]}, "group_size"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": FP4 | {"symmetric": False}}}},
            "symmetric .* is False",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo .* is 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers .* is None"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W8A16"}},
            },
            "quant_algo in a of quantized_layers .* is 'W8A16'",
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": "much"}, "activation_scale_ub .* is 'much'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt .* is 'e5m2'"),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "bits": 3}, "bits .* is 3; 4 can be read"),
        (AUTO_ROUND | {"bits": 1}, "bits .* is 1"),
        (AUTO_ROUND | {"bits": True}, "bits .* is True"),
        (AUTO_ROUND | {"packing_format": "auto_round:other"}, "packing_format .* is 'auto_round:other'"),
        (AUTO_ROUND | {"packing_format": 3}, "packing_format .* is 3"),
        (AUTO_ROUND | {"backend": "gemlite"}, "backend .* is 'gemlite'"),
        (AUTO_ROUND | {"data_type": "int_asym_dq"}, "data_type .* is 'int_asym_dq'"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits .* is 8"),
        (AUTO_ROUND | {"rotation_config": {"block_size": 32}}, "rotation_config"),
        (AUTO_ROUND | {"extra_config": {"lm_head": 4}}, "has a int for lm_head"),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 9}}}, "bits in lm_head in extra_config .* is 9"),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"data_type": "mx_fp"}}}, "data_type in lm_head .* is 'mx_fp'"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"group_size": 64}}},
            "a in extra_config",
        ),
        ({"quant_method": "gemma", "num_bits": 3}, "num_bits .* is 3; 2 or 4 or 8"),
        ({"quant_method": "gemma", "module_quant_configs": {"mlp": {"num_bits": 5}}}, "num_bits in 'mlp' .* is 5"),
        ({"quant_method": "gemma", "module_quant_configs": {"mlp": {"group": 5}}}, "an object with num_bits alone"),
        ({"quant_method": "gemma", "module_quant_configs": {"(a+)+b": {"num_bits": 4}}}, "a pattern that is not read"),
        ({"quant_method": "gemma", "module_quant_configs": {"(mlp": {"num_bits": 4}}}, "a pattern that is none"),
        ({"quant_method": "quark"}, "global_quant_config"),
        (quark_with({"dtype": "mx"}), "dtype in weight of global_quant_config .* is 'mx'"),
        (quark_with({"dtype": "fp4", "group_size": 16}), "group_size .* is 16; 32 can be read"),
        (quark_with({"dtype": "fp4", "scale_format": "e4m3"}), "scale_format .* is 'e4m3'"),
        (quark_with([{}, {}]), "weight in global_quant_config .* one type with one scale"),
        (quark_with({}, export={"weight_format": "fake_quantized"}), "weight_format .* is 'fake_quantized'"),
        (quark_with({}, export={"pack_method": "other"}), "pack_method .* is 'other'"),
        (quark_with({}, algo_config=[{"name": "awq"}, {"name": "rotation"}]), "algo_config"),
        (quark_with({}, softmax_quant_spec={}), "softmax_quant_spec"),
        (
            quark_with({"dtype": "int4"}, layer_quant_config={"*v_proj": {"weight": {"dtype": "uint4", **GROUPS}}}),
            "layer_quant_config .* one kind of whole numbers",
        ),
        ({"quant_method": "hqq"}, "quant_config .* it must say how"),
        (hqq_with(nbits=7), "nbits .* is 7; 8 or 6"),
        (hqq_with(group_size=0), "group_size .* is 0"),
        (hqq_with(axis=2), "axis .* is 2; 0 or 1"),
        (hqq_with(channel_wise=False), "channel_wise .* is False"),
        (hqq_with(view_as_float=2), "view_as_float .* is 2"),
        ({"quant_method": "hqq", "quant_config": {"mlp.up_proj": 4}}, "a int for 'mlp.up_proj'"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type"),
        ({"quant_method": "torchao"}, "_type in .* is None"),
        (torchao_with("GemliteUIntXWeightOnlyConfig"), "_type .* is 'Gemlite.*; Int8WeightOnlyConfig"),
        (torchao_with("Int4WeightOnlyConfig"), "int4_packing_format .* is None"),
        (
            torchao_with("FqnToConfig", fqn_to_config={"_default": {"_type": "NVFP4Config"}}),
            "_type .* is 'NVFP4Config'",
        ),
        (torchao_with("FqnToConfig"), "'default' must say how"),
        (torchao_with("IntxWeightOnlyConfig", weight_dtype={"_data": "uint4"}), "weight_dtype .* int1 or int2"),
        (torchao_with("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE"}), "intx_packing_format"),
        (
            torchao_with("Float8WeightOnlyConfig", weight_dtype={"_data": "float8_e5m2"}),
            "weight_dtype .* float8_e4m3fn",
        ),
        ("awq", "is a str"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed: Any, message: str) -> None:
    """An unknown method read by the rules of a known one gives noise, not an error."""
    with pytest.raises(LoadError, match=message):
        quantisation_of(HfConfig({"quantization_config": changed}))


@pytest.mark.parametrize(
    ("named", "bits", "version"),
    [
        ({"backend": "auto_round:gptq:exllamav2"}, 4, 1),
        ({"backend": "auto_round:exllamav2"}, 4, 2),
        ({"backend": "autoround:exllamav2"}, 4, 1),
        ({"packing_format": "auto_round:auto_gptq"}, 2, 1),
        ({"packing_format": "auto_round:gptqmodel", "backend": "auto"}, 8, 2),
        ({}, 3, 1),
    ],
)
def test_auto_round_stores_zero_points_as_its_layout_does(
    named: dict[str, str], bits: int, version: int, tmp_path: Path
) -> None:
    """Files of 0.2 to 0.4 name the kernel in place of the layout, and whole numbers off by one are another model."""
    original = make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16, head_dim=32)
    coded, plain = quantised_checkpoints(original, tmp_path, gptq(bits, 32, symmetric=False, version=version))
    config = read_json(coded / "config.json")
    config["quantization_config"] = {
        "quant_method": "intel/auto-round",
        "bits": bits,
        "group_size": 32,
        "sym": False,
        **named,
    }
    (coded / "config.json").write_text(json.dumps(config))
    checkpoint = opened(coded)
    for name, values in load_file(plain / "model.safetensors").items():
        assert torch.equal(checkpoint.tensor(name, *values.shape).read().float(), values.float()), name


def test_parameters_of_a_mixture_of_bits_are_counted_by_their_own(original: Path, tmp_path: Path) -> None:
    """llm-compressor's groups of modules: words were counted by the bits of the last of them."""
    pytest.importorskip("compressed_tensors")
    folders = {}
    for layout in ("w8a16 rows", "w4a16 rows", "w4a16", "w8a8"):
        folders[layout], _ = made(layout, original, tmp_path / layout)
    mixed, *others = folders.values()
    config = read_json(mixed / "config.json")
    groups, tensors = config["quantization_config"]["config_groups"], load_file(mixed / "model.safetensors")
    for module, folder in zip(("up_proj", "q_proj", "down_proj"), others, strict=True):
        section = read_json(folder / "config.json")["quantization_config"]
        groups[module] = {**section["config_groups"]["group_0"], "format": section["format"]}
        tensors = {name: one for name, one in tensors.items() if f".{module}." not in name}
        tensors |= {name: one for name, one in load_file(folder / "model.safetensors").items() if f".{module}." in name}
    (mixed / "config.json").write_text(json.dumps(config))
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    counted = sum(group.parameters for group in contents_of(mixed).groups)
    assert counted == load_model(mixed, ComputeConfig(backend="torch", threads=1)).n_parameters


def test_bits_that_no_part_of_a_mixture_has_are_refused(original: Path, tmp_path: Path) -> None:
    """Wrappers change the names of modules, so a matrix may be any of those that the config has, but no other."""
    coded, plain = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=False))
    config = read_json(coded / "config.json")
    section = {"quant_method": "auto-round", "bits": 8, "group_size": 128, "sym": False}
    config["quantization_config"] = section | {"extra_config": {"other.name": {"bits": 4, "group_size": 32}}}
    (coded / "config.json").write_text(json.dumps(config))
    values = load_file(plain / "model.safetensors")[f"{DOWN}weight"]
    assert torch.equal(opened(coded).tensor(f"{DOWN}weight", *values.shape).read(), values)
    config["quantization_config"] = section | {"extra_config": {"other.name": {"bits": 4, "group_size": 48}}}
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"qweight is I32 .* is expected by config.json and its quantization_config"):
        logits_of(coded, backend="torch")


DOWN = "model.layers.0.mlp.down_proj."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{DOWN}scales": t[f"{DOWN}scales"] * float("nan")}), "scale that is not finite"),
        (lambda t: t.update({f"{DOWN}g_idx": t[f"{DOWN}g_idx"] * 9}), "groups from 0 to 18; 0 to 2 are there"),
        (lambda t: t.update({f"{DOWN}qzeros": t[f"{DOWN}qzeros"][:2].clone()}), r"qzeros is I32 \[2, 8\]"),
        (lambda t: t.update({f"{DOWN}qweight": t[f"{DOWN}qweight"][:-1].clone()}), r"qweight is I32 \[11, 64\]"),
        (lambda t: t.pop(f"{DOWN}scales"), "scales is missing"),
        (lambda t: t.update({f"{DOWN}scales": t[f"{DOWN}scales"].to(torch.int32)}), "scales is I32"),
        (lambda t: t.update({f"{DOWN}other": torch.zeros(2)}), "other"),
    ],
)
def test_a_damaged_file_is_refused(original: Path, tmp_path: Path, change: Any, message: str) -> None:
    """What, the number and the limit, before a model of it stands."""
    coded, _ = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=False))
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("awq", lambda t: t.pop(f"{DOWN}qzeros"), "qzeros is missing"),
        ("gptq act-order", lambda t: t.pop(f"{DOWN}g_idx"), "g_idx is missing"),
        ("w4a16 asymmetric", lambda t: t.pop(f"{DOWN}weight_zero_point"), "weight_zero_point is missing"),
        ("w4a16", lambda t: t.update({f"{DOWN}weight_g_idx": torch.arange(40)}), r"weight_g_idx is I64 \[40\]"),
        ("w4a16", lambda t: t.update({f"{DOWN}weight_scale": t[f"{DOWN}weight_scale"][:, :2].clone()}),
         "a scale for each 48 of 96 inputs; quantization_config names 32"),
        ("w8a8", lambda t: t.update({f"{DOWN}weight_zero_point": torch.zeros(3, dtype=torch.int8)}),
         r"weight_zero_point is I8 \[3\]"),
        ("w4a4 nvfp4", lambda t: t.pop(f"{DOWN}weight_global_scale"), "weight_global_scale is missing"),
        ("w4a4 nvfp4", lambda t: t.update({f"{DOWN}weight_global_scale": torch.zeros(1)}), r"weight_global_scale is 0\.0"),
        ("w4a4 nvfp4", lambda t: t.update({f"{DOWN}weight_scale": (-t[f"{DOWN}weight_scale"].float()).to(torch.float8_e4m3fn)}),
         "weight_scale has a scale that is negative"),
        ("w4a4 nvfp4", lambda t: t.update({f"{DOWN}weight_packed": t[f"{DOWN}weight_packed"][:, 1:].clone()}),
         "weight_packed is U8"),
        ("fp8 rows", lambda t: t.update({f"{DOWN}weight_scale": t[f"{DOWN}weight_scale"].to(torch.uint8)}),
         "weight_scale is U8"),
    ],
)  # fmt: skip
def test_what_the_config_says_of_a_matrix_lies_beside_it(
    layout: str, change: Any, message: str, original: Path, tmp_path: Path
) -> None:
    """Codes without their zero points, their order or their groups were read as others are: noise, in silence."""
    coded, _ = made(layout, original, tmp_path)
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")


def test_outputs_that_words_do_not_hold_are_refused(tmp_path: Path) -> None:
    """A RuntimeError of tensors of 92 and 88 came through."""
    original = make_checkpoint("mistral", tmp_path / "original", dtype=torch.bfloat16, intermediate_size=92)
    coded, _ = quantised_checkpoints(original, tmp_path, awq(-1))
    with pytest.raises(LoadError, match=r"(gate|up)_proj has 92 outputs, of which words of 32 bits hold 8 each"):
        logits_of(coded, backend="torch", weights="fp32")


def test_a_bias_of_zeros_beside_codes_is_none(tmp_path: Path) -> None:
    """AutoGPTQ's files have one beside every matrix, whatever the family: hundreds of them were refused as unknown tensors."""
    original = make_checkpoint("mistral", tmp_path / "original", dtype=torch.bfloat16)
    coded, plain = quantised_checkpoints(original, tmp_path, gptq(4, 32, symmetric=True))
    damaged(coded, lambda tensors: tensors.update({f"{DOWN}bias": torch.zeros(64, dtype=torch.float16)}))
    config: dict[str, Any] = {"backend": "torch", "weights": "fp32"}
    assert torch.equal(logits_of(coded, **config), logits_of(plain, **config))
    damaged(coded, lambda tensors: tensors.update({f"{DOWN}bias": torch.ones(64, dtype=torch.float16)}))
    with pytest.raises(LoadError, match=r"does not call for, the first is .*down_proj\.bias"):
        logits_of(coded, **config)


def test_a_group_that_does_not_divide_the_inputs_is_refused(original: Path, tmp_path: Path) -> None:
    """AWQ has no ragged groups."""
    coded, _ = quantised_checkpoints(original, tmp_path, awq(32))
    config = json.loads((coded / "config.json").read_text())
    config["quantization_config"]["group_size"] = 40
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="64 inputs, which groups of 40 do not divide"):
        logits_of(coded, backend="torch")


def test_a_config_that_promises_codes_beside_plain_weights_is_refused(original: Path, tmp_path: Path) -> None:
    """Somebody copied config.json from another folder; silence would hide which weights run."""
    coded, plain = quantised_checkpoints(original, tmp_path, awq(32))
    (plain / "config.json").write_bytes((coded / "config.json").read_bytes())
    with pytest.raises(LoadError, match="none of them is"):
        logits_of(plain, backend="torch")
