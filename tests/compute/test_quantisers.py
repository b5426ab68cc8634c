"""Checkpoints that several programs wrote give the very values that these programs read in them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from bitsandbytes_files import DIGESTS, digest
from checkpoints import make_checkpoint
from coded_files import damaged, logits_of, opened, said_in_use
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import read_json
from diptych.models.contents import contents_of
from quantiser_files import DATA, KINDS, MORE_KINDS, VPTQ, quantise, tool_of

HELD = {
    "gptq-4": "group4-g32-f16",
    "gptq-4-act-order": "group4-g32-f16-zeros",
    "gptq-8-act-order": "group8-g32-f16-wide",
    "awq": "group4-g32-f16-zeros",
    "auto-round-mixture": ("group4-g32-f16-zeros", "group8-g32-f16-wide", "group2-g16-f16-minima"),
    "auto-round-3": "group3-g32-f16",
    "auto-round-awq": "group4-g32-f16-zeros",
    "auto-round-mxfp8": "bf16",
    "modelopt-fp8": "fp8",
    "hqq-4": "group4-g32-f16-minima",
    "hqq-mixture": ("group4-g16-f16-minima", "group8-g32-f16-minima-wide", "group6-g32-f16-minima-wide",
                    "group3-g32-f16-minima", "group2-g32-f16-minima"),
    "hqq-columns": "bf16",
    "hqq-floats": ("bf16", "group2-g32-f16-minima", "group3-g32-f16-minima", "group4-g128-f16-minima", "group5-g128-f16-minima",
                   "group8-g32-f16-minima-wide"),
    "torchao-intx-4": "group4-g32-bf16",
    "torchao-int8": "int8",
    "torchao-fp8": "fp8",
    "torchao-nvfp4": "group4-g16-e4m3-e2m1",
    "torchao-mxfp4": "group4-g32-e8m0-e2m1",
    "quanto-4": "group4-g128-bf16-minima16",
    "quanto-8": "group8-g128-bf16-wide",
    "vptq-2": "bf16",
    "vptq-1": "bf16",
    "w4a16": "group4-g32-bf16-zeros",
    "w8a8": "int8",
    "fp8-channel": "fp8",
    "fp8-block": "fp8-g128",
}  # fmt: skip
K = "model.layers.0.self_attn.k_proj."
AO = f"{K}_weight_"
HQQ = "model.layers.0.mlp.down_proj."


def matrices(path: Path) -> dict[str, torch.Tensor]:
    """Every quantised matrix in fp32, as Diptych reads it."""
    config = read_json(path / "config.json")
    checkpoint = opened(path)
    inner, ffn = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    rows = {"gate": ffn, "up": ffn, "k": kv, "v": kv}
    with safe_open(path / "model.safetensors", "pt") as file:
        names = {name[: name.index("_proj.")] for name in file.keys() if "_proj." in name}  # noqa: SIM118
    return {
        f"{name}_proj.weight": checkpoint.tensor(
            f"{name}_proj.weight", rows.get(name.split(".")[-1], inner), ffn if name.endswith("down") else inner
        ).read()
        for name in names
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_values_that_its_own_tool_reads(kind: str) -> None:
    """Our own packing loops could be wrong together with our reader; these files were written by somebody else."""
    expected = json.loads((DATA / kind / DIGESTS).read_text())
    assert len(expected) == 7
    assert {name: digest(values) for name, values in matrices(DATA / kind).items()} == expected


@pytest.mark.parametrize("kind", VPTQ)
def test_parts_of_vectors_are_those_of_the_whole(kind: str) -> None:
    """Rows begin and end within vectors, of two lengths where outliers have one of their own."""
    tensor = opened(DATA / kind).tensor("model.layers.0.mlp.down_proj.weight", 64, 96)
    whole = tensor.read()
    for rows in (slice(3, 20, 4), slice(5, 6), slice(60, 64), slice(None)):
        assert torch.equal(tensor.part(rows, 40), whole[rows, :40])


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_parameters_are_counted_as_loaded(kind: str) -> None:
    """From the headers alone, of mixtures of bits too: `inspect` and `plan` say bits per weight by them."""
    folder = DATA / kind
    counted = sum(group.parameters for group in contents_of(folder).groups)
    assert counted == load_model(folder, ComputeConfig(backend="torch", threads=1)).n_parameters


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_they_run_and_the_log_says_as_what(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With everything else that these tools write into a config."""
    said = said_in_use(DATA / kind, caplog, 0.02)
    held = HELD[kind]
    for name in held if isinstance(held, tuple) else (f"{held}:100.0%",):
        assert f" {name}" in said.replace("=", " "), said


def test_mixtures_of_gptqmodel_are_read(tmp_path: Path) -> None:
    """Its `dynamic` names bits and groups by pattern; what is in the files is as AutoRound has it."""
    path = tmp_path / "it"
    shutil.copytree(DATA / "auto-round-mixture", path)
    config = read_json(path / "config.json")
    mixture = {"+:.*down_proj": {"bits": 8}, r".*q_proj": {"bits": 2, "group_size": 16}, "-:.*lm_head": {}}
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {**section, "dynamic": mixture}}))
    expected = json.loads((path / DIGESTS).read_text())
    assert {name: digest(values) for name, values in matrices(path).items()} == expected
    counted = sum(group.parameters for group in contents_of(path).groups)
    assert counted == load_model(path, ComputeConfig(backend="torch", threads=1)).n_parameters
    mixture["+:.*down_proj"] = {"bits": 5}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {**section, "dynamic": mixture}}))
    with pytest.raises(LoadError, match=r"bits in \+:\.\*down_proj in dynamic .* is 5"):
        matrices(path)


def test_what_modelopt_says_in_a_file_beside_the_config_is_read(tmp_path: Path) -> None:
    """Its older folders have it there alone, and their fp8 was refused as a dtype that cannot be read."""
    path = tmp_path / "it"
    shutil.copytree(DATA / "modelopt-fp8", path)
    config = read_json(path / "config.json")
    section = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    how = {"quant_algo": section["quant_algo"], "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = {"producer": section["producer"], "quantization": how}
    (path / "hf_quant_config.json").write_text(json.dumps(beside))
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{one}_scale": torch.tensor(0.5) for one in "kv"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    got, expected = (logits_of(one, backend="torch", weights="fp32") for one in (path, DATA / "modelopt-fp8"))
    assert torch.equal(got, expected)
    assert contents_of(path).kept == "fp8"
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    with pytest.raises(LoadError, match=r"quant_algo in quantization_config .* is 'W4A16_AWQ'"):
        logits_of(path, backend="torch")


BEFORE = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
          "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "beside", "section"),
    [
        ("gptq-4", "quantize_config.json", BEFORE),
        ("gptq-4-act-order", "quantize_config.json", {**BEFORE, "desc_act": True, "sym": False}),
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)
def test_what_autogptq_and_autoawq_said_beside_the_config_is_read(
    kind: str, beside: str, section: dict[str, Any], tmp_path: Path
) -> None:
    """Folders of 2023 have it there alone; tensors of theirs were called missing."""
    path = tmp_path / "it"
    shutil.copytree(DATA / kind, path)
    config = read_json(path / "config.json")
    of_config = config.pop("quantization_config")
    if of_config.get("checkpoint_format") == "gptq_v2":
        section = {**section, "checkpoint_format": "gptq_v2"}
    (path / "config.json").write_text(json.dumps(config))
    (path / beside).write_text(json.dumps(section))
    got, expected = (logits_of(one, backend="torch", weights="fp32") for one in (path, DATA / kind))
    assert torch.equal(got, expected)
    assert contents_of(path).kept == contents_of(DATA / kind).kept
    (path / beside).write_text(json.dumps({**section, "bits": 5, "w_bit": 5}))
    with pytest.raises(LoadError, match=r"bits?.* is 5"):
        logits_of(path, backend="torch")


FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("folder", "section"),
    [
        ("fp8-channel", {"kv_cache_scheme": FP8_CACHE}),
        ("w4a16", {"kv_cache_scheme": FP8_CACHE}),
        (None, {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8_CACHE}),
        (None, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}),
        (None, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}),
    ],
    ids=["beside fp8", "beside w4a16", "a cache alone", "modelopt's", "modelopt's older word"],
)
def test_scales_of_a_cache_are_left_and_the_log_says_so(
    folder: str | None, section: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llm-compressor and modelopt write them for engines whose caches have one scale; the weights are what they were."""
    path = tmp_path / "it"
    plain = DATA / folder if folder is not None else tmp_path / "plain"
    if folder is None:
        make_checkpoint("llama", plain)
    shutil.copytree(plain, path)
    config = read_json(path / "config.json")
    config["quantization_config"] = {**config.get("quantization_config", {}), **section}
    (path / "config.json").write_text(json.dumps(config))
    names = ("k_scale", "v_scale", "v_zero_point", "q_scale", "k_proj.k_scale", "v_proj.v_scale", "qkv_proj.k_scale")
    scales = {f"model.layers.0.self_attn.{one}": torch.tensor(0.5) for one in names}
    damaged(path, lambda tensors: tensors.update(scales))
    expected = logits_of(plain, backend="torch", weights="fp32")
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        assert torch.equal(logits_of(path, backend="torch", weights="fp32"), expected)
    assert "scales for a cache of 8 bits in the file are not used" in caplog.text
    counts = [sum(group.parameters for group in contents_of(one).groups) for one in (path, plain)]
    assert counts[0] == counts[1]


def test_biases_beside_codes_of_hqq_are_read(tmp_path: Path) -> None:
    """They lie in its own modules, under the name that they have in a plain checkpoint."""
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    shutil.copytree(DATA / "hqq-mixture", coded)
    values, config = matrices(coded), read_json(coded / "config.json")
    generator = torch.Generator().manual_seed(2)
    biases = {
        name.replace("weight", "bias"): torch.randn(len(one), generator=generator).half()
        for name, one in values.items()
        if "self_attn" in name
    }
    damaged(coded, lambda tensors: tensors.update(biases))
    others = {name: one for name, one in load_file(coded / "model.safetensors").items() if "_proj." not in name}
    (coded / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    plain.mkdir()
    save_file({**others, **values, **biases}, plain / "model.safetensors", metadata={"format": "pt"})
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    got, expected = (logits_of(path, backend="torch", weights="fp32") for path in (coded, plain))
    assert torch.equal(got, expected)
    assert not torch.allclose(got, logits_of(DATA / "hqq-mixture", backend="torch", weights="fp32"), atol=0.1)
    counted = sum(group.parameters for group in contents_of(coded).groups)
    assert counted == load_model(coded, ComputeConfig(backend="torch", threads=1)).n_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_of_hqq_are_seen_as_floats_of_any_size(dtype: torch.dtype, tmp_path: Path) -> None:
    """It takes those in which a model computes; some of them are no numbers, and all bits count."""
    coded = tmp_path / "coded"
    shutil.copytree(DATA / "hqq-floats", coded)
    before = matrices(coded)

    def seen(tensors: dict[str, torch.Tensor]) -> None:
        viewed = {
            name: one.view(dtype) for name, one in tensors.items() if name.endswith("W_q") and one.is_floating_point()
        }
        assert len(viewed) == 6
        tensors |= viewed

    damaged(coded, seen)
    after = matrices(coded)
    assert all(torch.equal(after[name], one) for name, one in before.items())
    counted = sum(group.parameters for group in contents_of(coded).groups)
    assert counted == load_model(coded, ComputeConfig(backend="torch", threads=1)).n_parameters


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("hqq-4", lambda t: t.pop(f"{HQQ}zero"), "zero is missing beside HQQ's codes"),
        ("hqq-4", lambda t: t.update({f"{HQQ}W_q": t[f"{HQQ}W_q"][1:].clone()}), r"W_q is U8 \[95, 32\]; U8 \[96, 32\]"),
        ("hqq-4", lambda t: t.update({f"{HQQ}scale": t[f"{HQQ}scale"] * float("inf")}), "scale has a number that is not"),
        ("hqq-4", lambda t: t.update({f"{HQQ}nbits": torch.tensor(7, dtype=torch.int32)}), "names codes of 7 bits in groups"),
        ("hqq-4", lambda t: t.update({f"{HQQ}group_size": torch.tensor(float("nan"))}), "group_size is F32"),
        ("hqq-4", lambda t: t.update({f"{HQQ}group_size": torch.tensor(80)}), "6144 values, which groups of 80"),
        ("hqq-4", lambda t: t.update({f"{HQQ}shape": torch.tensor([96, 64])}), r"shape is \[96, 64\]; .* \[64, 96\]"),
        ("hqq-4", lambda t: t.update({f"{HQQ}view_as_float": torch.tensor(1)}), r"W_q is U8 \[96, 32\]; F16 or BF16"),
        ("hqq-4", lambda t: t.update({f"{HQQ}quant_scale": torch.tensor(1)}), "quant_scale is set, and scales that are quant"),
        ("hqq-4", lambda t: t.update({f"{HQQ}zero_scale": t.pop(f"{HQQ}scale")}), "zero_scale is there, and scales in such a"),
        ("hqq-floats", lambda t: t.pop(f"{K}view_as_float"), r"W_q is F16 \[16, 32\]; U8 \[16, 64\] is expected"),
        ("hqq-floats", lambda t: t.update({f"{K}W_q": t[f"{K}W_q"].view(torch.uint8)}), r"W_q is U8 \[16, 64\]; F16"),
        ("hqq-4", lambda t: t.update({f"{HQQ}other": torch.tensor(1)}), "other"),
        ("hqq-mixture", lambda t: t.update({f"{K}W_q": t[f"{K}W_q"] | 64}), r"W_q has a code of \d+; 6 bits are named"),
        ("torchao-intx-4", lambda t: t.pop(f"{AO}scale"), "_weight_scale is missing beside torchao's codes"),
        ("torchao-intx-4", lambda t: t.update({f"{AO}qdata": t[f"{AO}qdata"] * 2}), "codes from -16 to 14; .* names 4 bits"),
        ("torchao-intx-4", lambda t: t.update({f"{AO}zero_point": t[f"{AO}zero_point"] + 9}), "zero points from 9 to 9"),
        ("torchao-intx-4", lambda t: t.update({f"{AO}qdata": t[f"{AO}qdata"].view(torch.uint8)}), "qdata is U8"),
        ("torchao-intx-4", lambda t: t.update({f"{AO}act_pre_scale": torch.ones(1)}), "act_pre_scale"),
        ("torchao-fp8", lambda t: t.pop(f"{AO}scale"), "is fp8 and has no scale beside it"),
        ("vptq-2", lambda t: t.pop(f"{HQQ}res_centroids.weight"), "down_proj.res_centroids.weight is missing"),
        ("vptq-2", lambda t: t.update({f"{HQQ}indices": t[f"{HQQ}indices"][:, 1:].clone()}), r"indices is I32 \[1, 10, 28\]"),
        ("vptq-2", lambda t: t[f"{HQQ}perm"].fill_(3), "perm is no order of 96 inputs"),
        ("vptq-2", lambda t: t[f"{HQQ}outlier_indices"].fill_(-1), "a code of 65535; 16 vectors are there"),
        ("vptq-2", lambda t: t[f"{HQQ}weight_scale"].fill_(float("inf")), "weight_scale has a number that is not finite"),
        ("vptq-2", lambda t: t.update({f"{HQQ}other": torch.tensor(1)}), "other"),
        ("vptq-1", lambda t: t.update({f"{HQQ}centroids.weight": torch.ones(2, 8)}), r"centroids.weight is F32 \[2, 8\]"),
        ("hqq-columns", lambda t: t.update({f"{HQQ}zero": t[f"{HQQ}zero"].T.contiguous()}), r"zero is F16 \[192, 1\]"),
    ],
)  # fmt: skip
def test_damaged_codes_are_refused(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    """What, the number and the limit, before a model of it stands."""
    path = tmp_path / "it"
    shutil.copytree(DATA / kind, path)
    damaged(path, change)
    with pytest.raises(LoadError, match=message):
        logits_of(path, backend="torch", weights="fp32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_what_the_tools_write_now_is_read(kind: str, tmp_path: Path) -> None:
    """Fresh from the package, with the logits of the plain checkpoint of its values."""
    pytest.importorskip(tool_of(kind))
    coded, values = quantise(tmp_path, kind)
    got = matrices(coded)
    assert len(got) == 7
    for name, expected in values.items():
        assert torch.equal(got[name], expected), name
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "original", plain)
    others = {name: tensor for name, tensor in load_file(coded / "model.safetensors").items() if "_proj." not in name}
    save_file({**others, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    both = (logits_of(path, backend="torch", weights="fp32") for path in (coded, plain))
    assert torch.allclose(*both, atol=1e-5)
