"""Weights that keep the values of another program's quantiser: equal bits however the work is cut, in every kernel set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worlds import KERNEL_SETS, alone, beside, prompt

from checkpoints import make_checkpoint
from coded_files import Layout, awq, gptq, quantised_checkpoints
from diptych.compute.ops.cpu_kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "zeros": ("llama", awq(32)),
    "bytes": ("gemma2", gptq(8, -1, symmetric=False)),
    "experts": ("mixtral", gptq(4, 32, symmetric=True)),
    "act-order": ("llama", gptq(4, 32, symmetric=True, act_order=True)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (family, layout) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        wide = {"intermediate_size": 160, "num_hidden_layers": 2}
        original = make_checkpoint(family, folder / "original", dtype=torch.bfloat16, **wide)
        made[name] = quantised_checkpoints(original, folder, layout)[0]
    return made


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_of_the_work_changes_no_bit(folders: dict[str, Path], layout: str, kernels: str) -> None:
    """Few rows meet packed codes and many rows expanded ones; the sums of groups must be the same numbers in the same order."""
    if kernels not in instruction_sets():
        pytest.skip(f"this CPU cannot run {kernels}")
    model = load_model(folders[layout], ComputeConfig(backend="cpu", threads=2, instruction_set=kernels))
    assert model.weights_format.startswith("group")
    tokens = prompt(40)
    whole = alone(model, tokens, None)
    assert whole.logits.std() > 0.1
    for chunk in (1, 5, 16):
        assert not alone(model, tokens, chunk).differs_from(whole), chunk
    assert not beside(model, tokens, 3, 1).differs_from(whole)
