"""Experts in MXFP4, as gpt-oss is published: the values of transformers' dequantiser, and the same answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from golden import ask_reference, check_golden
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from checkpoints import make_checkpoint, make_reference
from coded_files import MXFP4, mxfp4_checkpoint, random_blocks
from diptych.compute.loading.quant import save_quantised
from diptych.compute.loading.views import Mxfp4Tensor
from diptych.compute.ops.contract import WeightTensor
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import LoadError
from diptych.ground.formats import KEPT_MXFP4
from diptych.models.contents import contents_of
from stepping import Stepper


class Memory(WeightTensor):
    random_seed = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype, self.name = tensor, tuple(tensor.shape), tensor.dtype, "memory"

    def read(self) -> torch.Tensor:
        return self.tensor


def test_values_are_those_of_transformers() -> None:
    """Exact in bf16, over all codes and far scales."""
    blocks, scales = random_blocks(3, 5, 2, seed=1)
    scales[0, 0], scales[1, 2] = 1, 250
    theirs = convert_moe_packed_tensors(blocks, scales)  # [E, K, N]
    for e in range(3):
        ours = Mxfp4Tensor("w", Memory(blocks), Memory(scales), e)
        assert torch.equal(ours.read(), theirs[e].T)
        assert torch.equal(ours.part(slice(1, 4), 9), theirs[e].T[1:4, :9])


def test_a_published_layout_answers_as_its_values(tmp_path: Path) -> None:
    """gpt-oss's files hold nothing but blocks of the experts."""
    path, dequantised = mxfp4_checkpoint(tmp_path)
    oracle = make_reference("gpt_oss")
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name in dequantised:
                parameter.copy_(dequantised[name])
    golden = ask_reference(oracle, path, new_tokens=6)
    model = load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32"))
    check_golden(model, golden, chunk=9)
    assert model.n_parameters == sum(parameter.numel() for parameter in oracle.parameters())


def test_blocks_of_another_family_or_shape_are_refused(tmp_path: Path) -> None:
    path, _ = mxfp4_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    for changed, words in (({"intermediate_size": 96}, "shape"), ({"hidden_size": 48}, "shape|blocks of 32")):
        (path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(LoadError, match=words):
            load_model(path, ComputeConfig(backend="torch", device="cpu"))
    llama = make_checkpoint("llama", tmp_path / "llama")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    with pytest.raises(LoadError, match="mxfp4"):
        load_model(llama, ComputeConfig(backend="torch", device="cpu"))


@pytest.mark.native
@pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed")
def test_experts_stay_in_four_bits(tmp_path: Path) -> None:
    """They were unpacked to bf16, at nearly four times the memory; `inspect` and the model agree."""
    path, _ = mxfp4_checkpoint(tmp_path)
    tokens = list(range(5, 30))
    kept, plain = (
        load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1)) for weights in ("auto", "bf16")
    )
    assert kept.formats[KEPT_MXFP4.name] > 0
    assert KEPT_MXFP4.name not in plain.formats
    assert kept.weight_bytes < plain.weight_bytes
    assert contents_of(path).kept == KEPT_MXFP4.name
    got, exact = (Stepper(model).prefill("it", tokens) for model in (kept, plain))
    assert (got - exact).abs().mean() < 0.02 * exact.abs().max()


@pytest.mark.native
@pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed")
def test_blocks_are_packed_once(tmp_path: Path) -> None:
    """A folder of packed weights knows the shapes of what the blocks held; the cache of packed weights is made the same way."""
    path, _ = mxfp4_checkpoint(tmp_path / "blocks")
    tokens = list(range(5, 30))
    direct = load_model(path, ComputeConfig(backend="cpu", weights="int8", threads=1))
    save_quantised(path, tmp_path / "packed", weights="int8")
    packed = load_model(tmp_path / "packed", ComputeConfig(backend="cpu", threads=1))
    assert torch.equal(*(Stepper(model).prefill("it", tokens) for model in (direct, packed)))
    assert direct.n_parameters == packed.n_parameters
