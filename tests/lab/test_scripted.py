"""Scripted acceptance stands for a trained drafter, so its guesses must be the model's own answer, as often as was said."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import mean, pstdev

import pytest

from diptych.compute.runner import random_model
from diptych.control.speculation import EveryGuess
from diptych.cost.drafts.acceptance import chances_at, expected_tokens
from diptych.engine.drafters import OpenDraftModel
from diptych.engine.load import bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.lab.drive import Engines
from diptych.lab.scripted import Luck, Race, ScriptedDrafter


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


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 0.95])
def test_an_answer_takes_as_many_steps_as_the_rate_says(acceptance: float) -> None:
    """Errors drawn one by one made a short answer take a third more steps or fewer, and a median of pairs tell the luck."""
    luck = Luck(Random(3))
    answer = list(range(64))
    steps = []
    for _ in range(200):
        drafter, at, n_steps = ScriptedDrafter(answer, start=0, acceptance=acceptance, luck=luck), 0, 0
        while at < len(answer):
            drafts = drafter.propose(answer[:at], 4)
            held = next((j for j, draft in enumerate(drafts) if draft != answer[at + j]), len(drafts))
            at, n_steps = at + held + 1, n_steps + 1
        steps.append(n_steps)
    wanted = 64 / expected_tokens(chances_at(acceptance, 4))
    assert mean(steps) == pytest.approx(wanted, rel=0.06)
    assert pstdev(steps) < 0.07 * wanted
