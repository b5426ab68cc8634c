"""The lab on a tiny model: every experiment runs, keeps measurement and prediction apart, and can be resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from diptych.cost.profile import load_profile, read_profile
from diptych.engine.load import bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.lab import calibrate as calibration
from diptych.lab.experiment import Experiment, Outcome, Stage, Verdict, polynomial
from diptych.lab.experiments import EXPERIMENTS
from diptych.lab.probe import Measured
from diptych.lab.session import LabRun, choose


@pytest.fixture(scope="module")
def stage() -> Stage:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_running_sequences=8), compute=ComputeConfig(threads=1), max_context_tokens=384
    )
    loaded = load(str(bundled_dir("diptych-1m-draft")), config)
    return Stage(
        model=loaded.model,
        name="tiny",
        config=config,
        loaded=loaded,
        longest_tokens=384,
        repeats=2,
        progress=lambda text: None,
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_experiment_measures_something_and_says_what(experiment: Experiment, stage: Stage) -> None:
    """A lab whose experiments only run on the author's model is no lab."""
    outcome = experiment.run(stage)
    assert isinstance(outcome.verdict, Verdict)
    assert len(outcome.finding) > 20
    if experiment.name != "thinking":  # the draft may not think and answer in 200 tokens, and then says so
        assert len(outcome.points) >= 2
    for point in outcome.points:
        assert 0 < point.low <= point.high
        assert point.measured > 0


def test_report_is_self_contained_and_resumes(stage: Stage, tmp_path: Path) -> None:
    """One file that can be mailed; a second run takes over what is there."""
    chosen = choose(["decode-position", "kv-cache"])
    ran: list[str] = []
    page = LabRun(stage, tmp_path).run(chosen, on_result=lambda experiment, _: ran.append(experiment.name))
    text = page.read_text()
    assert ran == ["decode-position", "kv-cache"]
    assert text.count("data:image/png;base64,") == 2
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    first = json.loads((tmp_path / "results.json").read_text())
    assert (tmp_path / "points.csv").read_text().count("\n") > 4

    def broken(_: Stage) -> Outcome:
        raise AssertionError("measured again")

    again = [Experiment(**{name: getattr(one, name) for name in one.__slots__} | {"run": broken}) for one in chosen]
    LabRun(stage, tmp_path).run(again, on_result=lambda *_: None)
    assert json.loads((tmp_path / "results.json").read_text())["experiments"] == first["experiments"]


def test_noise_withholds_the_verdict() -> None:
    """A conclusion drawn on an unsteady machine is worth less than none."""
    calm, wild = Measured.of([1.0, 1.01, 1.02, 1.0, 1.01]), Measured.of([1.0, 2.0, 1.0, 3.0, 2.5])
    outcome = Outcome(points=(), verdict=Verdict.HOLDS, finding="x")
    assert outcome.withheld_if_noisy([calm] * 4 + [wild]).verdict is Verdict.HOLDS
    noisy = outcome.withheld_if_noisy([calm, wild])
    assert noisy.verdict is Verdict.WITHHELD
    assert "1 of 2 points" in noisy.notes[-1]


def test_polynomial_finds_known_coefficients() -> None:
    """The fit behind 'linear part, quadratic part, knee'."""
    xs = [10, 100, 1000, 10_000]
    ys = [2.0 + 0.5 * x + 1e-4 * x * x for x in xs]
    assert polynomial(xs, ys, 2) == pytest.approx([2.0, 0.5, 1e-4], rel=1e-6)


def test_unknown_experiment_is_named() -> None:
    """A typing error should cost one look."""
    with pytest.raises(ConfigError, match="no experiment 'speed'"):
        choose(["speed"])


def test_calibration_writes_a_profile_the_planner_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, fitted, stored: and every constant the planner wants is there and possible."""
    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
             "num_hidden_layers": 2, "vocab_size": 512}  # fmt: skip
    monkeypatch.setattr(calibration, "PROBE_MODEL", calibration.PROBE_MODEL | small)
    path = tmp_path / "hardware.json"
    calibration.calibrate(ComputeConfig(threads=1), progress=lambda text: None, repeats=1, path=path)
    hardware, fitted = read_profile(load_profile(path))
    assert hardware.memory_bytes_per_s > 1e8
    assert fitted.is_local
    assert fitted.decode_residual.rows >= 7
    assert fitted.prefill_residual.rows >= 8
