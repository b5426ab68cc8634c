"""Named shapes: every one has exactly as many parameters as the published model, and random models run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.compute.models.decoder import load_decoder
from diptych.compute.models.hf_config import HfConfig
from diptych.compute.models.registry import family_of
from diptych.compute.runner import random_model
from diptych.compute.shapes import SHAPES
from diptych.compute.weights import RandomSource
from diptych.ground.config import ComputeConfig
from stepping import Stepper

# published parameter counts, to the last one
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "phi-3-mini": 3_821_079_552,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736,
}


class NothingLoader:
    """Takes every tensor and reads none."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_published_number_of_parameters(name: str) -> None:
    """A wrong width in the table would make every benchmark of that name a benchmark of something else."""
    config = HfConfig(SHAPES[name])
    family = family_of(config)
    source = RandomSource(0)
    load_decoder(family, source, NothingLoader(), family.spec(config, None))
    assert source.n_parameters == PUBLISHED[name]


def test_random_model_is_a_function_of_its_seed() -> None:
    """Benchmarks are repeated; the same seed must give the same model, another seed another."""
    config = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
              "vocab_size": 100}  # fmt: skip
    answers = []
    for seed in (1, 1, 2):
        model = random_model(config, ComputeConfig(backend="torch", device="cpu"), seed=seed)
        logits = Stepper(model).step({"a": [5, 6, 7, 8]})["a"]
        assert logits.isfinite().all()
        assert 0.1 < logits.std() < 10, "activations stay of order one"
        answers.append((model.revision, logits))
    assert answers[0][0] == answers[1][0] != answers[2][0]
    assert torch.equal(answers[0][1], answers[1][1])
    assert not torch.equal(answers[0][1], answers[2][1])
