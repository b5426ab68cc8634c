"""Scripted acceptance stands for a trained drafter, so its guesses must be the model's own answer, as often as was said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.compute.runner import random_model
from diptych.control.speculation import EveryGuess
from diptych.engine.drafters import OpenDraftModel
from diptych.engine.load import bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.lab.drive import Engines
from diptych.lab.scripted import Race


@pytest.mark.parametrize(("acceptance", "least"), [(1.0, 1.0), (0.5, 0.1)])
def test_a_drafter_that_runs_is_right_as_often_as_was_said(acceptance: float, least: float) -> None:
    """A random layer takes the time of a head; what it says is replaced by the answer, with errors."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_running_sequences=2), compute=ComputeConfig(threads=1), max_context_tokens=128
    )
    model = load(str(bundled_dir("diptych-1m-draft")), config).model
    layer = random_model(model.hf_config | {"num_hidden_layers": 1}, config.compute, seed=2, beside=model)
    drafts = replace(config, scheduler=replace(config.scheduler, max_draft_tokens=3))
    opened = OpenDraftModel(model=layer, config=drafts, kind="draft", vocab_size=layer.spec.vocab_size)
    engines = Engines(model, config, predictor=None, context_tokens=128, n_tokens=256)
    race = Race(engines, batch=2, prompt_tokens=20, new_tokens=40)
    lane = race.drafting_lane(opened, acceptance=acceptance)
    lane.driver.core._scheduler.drafts.depths = EveryGuess(rows=64)  # whatever this machine's time
    lane.token_s()
    assert lane.answers == race.plain.answers
    assert least * lane.drafted_tokens <= lane.accepted_tokens <= lane.drafted_tokens
    assert (lane.accepted_tokens == lane.drafted_tokens) == (acceptance == 1.0)
    assert lane.drafted_tokens > 30
