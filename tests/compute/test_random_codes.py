"""Random weights as another program's file would have them in codes."""

from __future__ import annotations

import pytest
import torch

from diptych.compute.formats.random_codes import CodedRandomSource, CodedRandomTensor
from diptych.compute.runner import random_model
from diptych.engine.cost_view import CostView
from diptych.ground.config import ComputeConfig
from diptych.ground.formats import KeptFormat

SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["group4-g32-f16", "group4-g32-f16-minima", "group4-g64-bf16-zeros", "group8-g32-f16-wide", "fp8"]
)
def test_codes_fill_their_format_and_are_of_layers_alone(name: str) -> None:
    """What a kernel is timed on has the sizes, and all the codes, of a file's."""
    kept = KeptFormat.named(name)
    source = CodedRandomSource(3, kept)
    tensor = source.tensor("model.layers.0.mlp.up_proj.weight", 48, 128)
    assert isinstance(tensor, CodedRandomTensor)
    codes = tensor.codes()
    n_groups = 128 // kept.group if kept.group else 1
    assert (codes.codes.shape, codes.scales.shape) == ((48, 128), (48, n_groups))
    assert (codes.offsets is None) == (kept.grid not in ("zeros", "minima"))
    if kept.kind.startswith("group"):
        assert len(codes.codes.unique()) == 2 ** int(kept.kind.removeprefix("group"))
    else:
        assert codes.codes.view(torch.float8_e4m3fn).float().isfinite().all()
    for plain in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        assert source.tensor(plain, *((96, 64) if "embed" in plain else (64,))).kept is None


@pytest.mark.native
def test_a_model_of_such_weights_is_priced_as_what_it_holds() -> None:
    """The calibration times it in place of a file."""
    model = random_model(
        SHAPE, ComputeConfig(backend="cpu", threads=1), seed=0, kept=KeptFormat.named("group4-g32-f16")
    )
    assert model.weights_format == "group4-g32-f16"
    assert CostView(model).quant.pace < 1.0
    model.close()
