"""Experts that lie in one tensor of fp8, as transformers 5 saves them and Mistral Small 4 is published."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.utils.quantization_config import FineGrainedFP8Config

from checkpoints import make_checkpoint
from coded_files import Tensors, damaged, logits_of
from diptych.compute.coded import CodedCheckpoint
from diptych.compute.ops.cpu_kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import contents_of
from diptych.models.quantised import quantisation_of

UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 4}


def by_transformers(
    block: tuple[int, int] | None, **fields: str
) -> Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """What its quantiser saves of a tensor, and its values as its own dequantisation has them, in fp32."""
    made = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block, **fields)))

    def write(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = made.convert({name: w.float()})
        assert len(parts) == 2, name
        scale = next(part for one, part in parts.items() if one != name)
        return parts, made.reverse_op._dequantize_one(parts[name], scale, torch.float32)

    return write


def of_halves(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale of gate and one of up, for which FP8Experts has room."""
    is_pair = w.ndim == 3 and "gate_up" in name
    return by_transformers((w.shape[-2] // (2 if is_pair else 1), w.shape[-1]))(name, w)


def of_all(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale for all experts."""
    parts, values = by_transformers(None)(name, w.flatten(0, -2))
    parts[name] = parts[name].view(w.shape)
    return {one: part if one == name else part.reshape(1) for one, part in parts.items()}, values.view(w.shape)


def of_experts(name: str, w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As Mistral Small 4: a scale of each expert, and one of its inputs."""
    parts, values = by_transformers(None)(name, w)
    if w.ndim == 3:
        return {**parts, f"{name}_activation_scale": torch.full((len(w),), 0.5)}, values
    return {**parts, f"{name.removesuffix('weight')}activation_scale": torch.tensor(0.5)}, values


# block of the config, how its tensors are written, what holds stacked experts
KINDS = {
    "blocks": ([128, 128], by_transformers((128, 128)), "fp8-g128"),
    "blocks in powers of two": ([128, 128], by_transformers((128, 128), scale_fmt="ue8m0"), "fp8-g128"),
    "small blocks": ([32, 64], by_transformers((32, 64)), None),
    "experts": (None, of_experts, "fp8"),
    "gate and up": (None, of_halves, "fp8"),
    "all": (None, of_all, "fp8"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint("mistral4", tmp_path_factory.mktemp("plain"), dtype=torch.bfloat16, **SIZES)
    assert UP in load_file(path / "model.safetensors")
    return path


def made(kind: str, original: Path, folder: Path) -> tuple[Path, Path]:
    """(as transformers quantises it, plain fp32 of the same values)"""
    block, write, _ = KINDS[kind]
    coded: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        coded[name] = plain[name] = tensor
        if ".experts." in name or (".shared_experts." in name and tensor.ndim == 2):
            parts, values = write(name, tensor)
            coded |= {one: part.contiguous() for one, part in parts.items()}
            plain[name] = values.contiguous()
    config = read_json(original / "config.json")
    scheme = "static" if kind == "experts" else "dynamic"
    section = {"quant_method": "fp8", "activation_scheme": scheme, "weight_block_size": block}
    for path, tensors, more in (
        (folder / "coded", coded, {"quantization_config": section}),
        (folder / "plain", plain, {}),
    ):
        shutil.copytree(original, path)
        (path / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return folder / "coded", folder / "plain"


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_the_values_that_transformers_reads(kind: str, original: Path, tmp_path: Path) -> None:
    """A neighbour's scale, or gate's in place of up's, is another expert; they were refused as a dtype that cannot be read."""
    coded, plain = made(kind, original, tmp_path)
    how = quantisation_of(HfConfig(read_json(coded / "config.json")))
    assert how is not None
    checkpoint, expected = CodedCheckpoint(coded, how, dtype=torch.float32), load_file(plain / "model.safetensors")
    for name in (UP, DOWN):
        stack = checkpoint.tensor(name, *expected[name].shape)
        assert torch.equal(stack.read(), expected[name]), name
        entry = stack.entry(3)
        assert (None if entry.kept is None else entry.kept.name) == KINDS[kind][2]
        assert torch.equal(entry.part(slice(3, 20, 4), 40), expected[name][3, 3:20:4, :40])
    exact = logits_of(plain, backend="torch", weights="fp32")
    assert torch.equal(logits_of(coded, backend="torch", weights="fp32"), exact)
    counted = sum(group.parameters for group in contents_of(coded).groups)
    assert counted == load_model(coded, ComputeConfig(backend="torch", threads=1)).n_parameters
    assert counted == sum(values.numel() for values in expected.values())


@pytest.mark.native
@pytest.mark.parametrize("kind", ["blocks", "small blocks", "experts", "gate and up"])
def test_kept_experts_answer_as_their_values_do(
    kind: str, original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the kernels, and the log says what is kept."""
    if not instruction_sets():
        pytest.skip("the native kernels are not installed")
    coded, plain = made(kind, original, tmp_path)
    exact = logits_of(plain, backend="torch", weights="fp32")
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        got = logits_of(coded, backend="cpu")
    assert (got - exact).std() < 0.1 * exact.std()
    said = next(record.getMessage() for record in caplog.records if "weights stored=" in record.getMessage())
    assert f"{KINDS[kind][2] or 'bf16'}:" in said
    assert torch.equal(logits_of(coded, backend="cpu"), got)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("experts", lambda t: t.pop(f"{DOWN}_scale_inv"), "down_proj is fp8 and has no scale beside it"),
        ("experts", lambda t: t.update({f"{DOWN}_scale_inv": t[f"{DOWN}_scale_inv"][:4].clone()}), "4 entries for 8 experts"),
        ("experts", lambda t: t.update({DOWN: t[DOWN][:4].clone()}), r"has shape \[4, 128, 128\] in the files"),
        ("experts", lambda t: t.update({f"{UP}_scale_inv": t[f"{UP}_scale_inv"] * float("nan")}), "not finite"),
        ("blocks", lambda t: t.update({f"{UP}_scale_inv": torch.ones(8, 3, 1)}), r"gate_up_proj_scale_inv is F32 \[3, 1\]"),
        ("blocks", lambda t: t.update({f"{UP}_scale_inv": t[f"{UP}_scale_inv"].to(torch.int32)}), "scale_inv is I32"),
    ],
)  # fmt: skip
def test_damaged_stacks_are_refused(
    kind: str, change: Callable[[Tensors], object], message: str, original: Path, tmp_path: Path
) -> None:
    """What, the number and the limit, by the names that the file has."""
    coded, _ = made(kind, original, tmp_path)
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")
