"""Named shapes: every one has exactly as many parameters as the published model, and random models run."""

from __future__ import annotations

import pytest
import torch

from counted import loaded_parameters
from diptych.compute.runner import random_model
from diptych.ground.config import ComputeConfig
from diptych.models.named import ALIASES, SHAPES, named_model
from stepping import Stepper


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_the_published_number_of_parameters(name: str) -> None:
    """A wrong width in the table would make every benchmark of that name a benchmark of something else."""
    spec = named_model(ALIASES.get(name, name))
    assert loaded_parameters(spec) == spec.published_parameters


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
