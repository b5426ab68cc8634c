"""Ranks that have no memory in common, joined by gloo over loopback: the bits of one, whatever the model is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import make_checkpoint
from diptych.compute.adapters import read_adapter
from diptych.compute.loading.calibration import Calibration, calibrated
from diptych.compute.model import Want
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model, open_blueprint
from diptych.ground.config import ComputeConfig
from lora import ALL, write_adapter
from stepping import Stepper
from thread_ranks import load_over_links
from worlds import alone, beside, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]

CONFIG = ComputeConfig(backend="cpu", threads=1)
# a tied head that is the embedding; norms behind, q and k normed over all heads, fewer KV heads than ranks; experts with
# hidden rows in bf16 and in int8, shared and gated, clamped, with sinks; latents, and a rank that has none of two heads
KINDS: dict[str, tuple[str, str, int, dict[str, int]]] = {
    "tied": ("qwen3", "bf16", 2, {}),
    "full norms": ("olmo2", "int8", 3, {"num_key_value_heads": 1}),
    "experts": ("mixtral", "bf16", 3, {}),
    "shared experts": ("qwen2_moe", "int8", 2, {}),
    "clamped experts and sinks": ("gpt_oss", "int4", 2, {}),
    "latents": ("deepseek_v3", "bf16", 3, {"num_attention_heads": 2, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_linked_ranks_change_no_bit(tmp_path: Path, kind: str) -> None:
    """What is carried lands where the rank itself would have written it: KV, logits, states and blocks as they travel."""
    family, weights, ranks, fields = KINDS[kind]
    path = make_checkpoint(family, tmp_path, num_hidden_layers=2, dtype=torch.bfloat16, **fields)
    config = replace(CONFIG, weights=weights)
    one, tokens = load_model(path, config), prompt(37)
    model = load_over_links(path, replace(config, tp=ranks))
    whole = alone(one, tokens, None)
    assert whole.logits.std() > 0.05
    assert not (found := alone(model, tokens, 5).differs_from(whole)), found
    assert not (found := beside(model, tokens, 2, seed=1).differs_from(whole)), found
    steppers = [Stepper(each) for each in (model, one)]
    states = [each.model.forward(each.batch({"it": tokens}), each.kv, Want.HIDDEN) for each in steppers]
    assert torch.equal(*states)
    best = [each.model.forward(each.batch({"it": [5]}), each.kv, Want.BEST) for each in steppers]
    assert best[0] == best[1]
    sent, theirs = (each.kv.export_blocks([3, 0, 5]) for each in steppers)
    assert np.array_equal(sent.data_NB, theirs.data_NB)
    assert sent.header == theirs.header
    steppers[0].kv.import_blocks([60, 61, 62], sent)
    assert np.array_equal(steppers[0].kv.export_blocks([60, 61, 62]).data_NB, sent.data_NB)
    model.close()


def test_adapters_come_to_linked_ranks(tmp_path: Path) -> None:
    """By the same message as all else."""
    path = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=2, dtype=torch.bfloat16)
    adapter = read_adapter(write_adapter(tmp_path / "adapter", path, ALL), max_rank=64)
    rows = []
    for model in (load_model(path, CONFIG), load_over_links(path, replace(CONFIG, tp=2))):
        stepper = Stepper(model)
        stepper.adapters = {"it": model.add_adapter(adapter)}
        rows.append(stepper.prefill("it", prompt(20)))
        model.close()
    assert torch.equal(*rows)


def test_what_was_measured_over_a_text_comes_to_linked_ranks(tmp_path: Path) -> None:
    """Each machine would come to numbers of its own, and to other weights."""
    path = make_checkpoint("mixtral", tmp_path, num_hidden_layers=2, dtype=torch.bfloat16)
    config = replace(CONFIG, weights="int8")
    own = Calibration(name="a text", windows=lambda: [prompt(40)])
    measured = calibrated(open_blueprint(path, config).blueprint, own)
    rows = []
    for model in (
        load_model(path, config, calibration=own),
        load_over_links(path, replace(config, tp=2), measured=measured),
    ):
        rows.append(Stepper(model).prefill("it", prompt(20)))
        model.close()
    assert torch.equal(*rows)
