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
from diptych.engine.load import bundled_dir
from diptych.engine.text.tokenizer import Tokenizer
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


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 128), pytest.param(4, 32, marks=pytest.mark.slow)])
def test_keeping_values_adds_a_tenth_of_what_the_file_s_rounding_cost(bits: int, group: int, tmp_path: Path) -> None:
    """KL over real text against the file's values in fp32, the cache in bf16 on both sides, as all formats have it.

    Rows of 8 bits (`activations="int8"`) would add more than weights of 8 bits cost themselves: the bound can be missed.
    """
    bundled = bundled_dir()
    tokens = Tokenizer.from_dir(bundled).encode((bundled.parent / "heldout.txt").read_text())[:512]
    coded, plain = quantised_checkpoints(bundled, tmp_path, gptq(bits, group, symmetric=bits == 8))

    def logprobs(path: Path, **compute: str) -> torch.Tensor:
        model = load_model(path, ComputeConfig(**compute))
        return torch.log_softmax(alone(model, tokens, None).logits.double(), dim=-1)

    def divergence(expected: torch.Tensor, got: torch.Tensor) -> float:
        return float((expected.exp() * (expected - got)).sum(-1).mean())

    exact = {"backend": "torch", "device": "cpu", "weights": "fp32", "kv": "bf16"}
    values = logprobs(plain, **exact)
    own = divergence(logprobs(bundled, **exact), values)
    assert divergence(values, logprobs(coded, backend="cpu")) < 0.1 * own
    if bits == 8:
        assert divergence(values, logprobs(coded, backend="cpu", activations="int8")) > own
