"""What a calibration makes of steps with adapters and without."""

from __future__ import annotations

import pytest

from diptych.compute.runner import random_model
from diptych.ground.config import ComputeConfig
from diptych.lab.adapters import AdaptedSteps, adapted_steps, constants_of
from diptych.lab.calibrate import EMPTY_MODEL
from diptych.lab.rounds import Effort


def test_constants_of_steps_that_they_made() -> None:
    layer_s, read, peak = 2e-6, 1e10, 1e12
    base_s, product_s, prompt_s = 4 * layer_s + 2e6 / read, 2.0 * 1e6 / (0.1 * peak), 2.0 * 1e6 / (0.4 * peak)
    seen = AdaptedSteps(
        n_layers=4,
        n_parameters=10**6,
        n_bytes=2 * 10**6,
        few_s=base_s + product_s,
        many_s=base_s + 16 * product_s,
        prompt_s=base_s + 256 * prompt_s,
    )
    found = constants_of({"bf16": seen}, {"bf16": peak}, {"bf16": read})
    assert found["layer_s"] == pytest.approx(layer_s)
    assert found["decode_ef"]["bf16"] == pytest.approx(0.1)
    assert found["prefill_ef"]["bf16"] == pytest.approx(0.4)
    noise = AdaptedSteps(n_layers=4, n_parameters=1, n_bytes=9, few_s=1e-6, many_s=0.0, prompt_s=-1.0)
    disturbed = constants_of({"bf16": noise}, {"bf16": peak}, {"bf16": read})
    assert 0.0 < disturbed["decode_ef"]["bf16"] <= 1.0, "a difference below zero is no rate"
    assert 0.0 < disturbed["prefill_ef"]["bf16"] <= 1.0


def test_an_adapter_is_timed_on_the_engines_own_steps() -> None:
    model = random_model(EMPTY_MODEL, ComputeConfig(threads=1), seed=0)
    seen = adapted_steps(model, Effort(rounds=1, budget_s=0.0))
    assert seen.n_layers == 24
    assert seen.n_parameters == 24 * 16 * (4 * 128 + 3 * 128)
    assert seen.n_bytes >= 2 * seen.n_parameters
    model.close()
