"""Experts that lie in one tensor of fp8, as transformers 5 saves them and Mistral Small 4 is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coded_files import Tensors, damaged, logits_of, said_in_use
from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_json
from diptych.models.contents import contents_of
from diptych.models.quantised.method import quantisation_of
from stacked_files import KINDS, original_stacks, stacked_checkpoints

UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = original_stacks(tmp_path_factory.mktemp("plain"))
    assert UP in load_file(path / "model.safetensors")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_has_the_values_that_transformers_reads(kind: str, original: Path, tmp_path: Path) -> None:
    """A neighbour's scale, or gate's in place of up's, is another expert; they were refused as a dtype that cannot be read."""
    coded, plain = stacked_checkpoints(kind, original, tmp_path)
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
    coded, _ = stacked_checkpoints(kind, original, tmp_path)
    assert f"{KINDS[kind][2] or 'bf16'}:" in said_in_use(coded, caplog, 0.05)
    first, second = (logits_of(coded, backend="cpu") for _ in range(2))
    assert torch.equal(first, second)


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
    coded, _ = stacked_checkpoints(kind, original, tmp_path)
    damaged(coded, change)
    with pytest.raises(LoadError, match=message):
        logits_of(coded, backend="torch", weights="fp32")
