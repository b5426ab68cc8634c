"""The lab on a tiny model: every experiment runs, keeps measurement and prediction apart, and can be resumed."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from diptych.cli import lab
from diptych.compute import ceilings
from diptych.compute.runner import random_model
from diptych.cost.calibration import Cache
from diptych.cost.profile import load_profile, read_profile
from diptych.engine.load import bundled_dir, load
from diptych.engine.model_profile import local_predictor
from diptych.ground.clock import VirtualClock, sleep_s
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.lab import calibrate as calibration
from diptych.lab import fitted as fitting
from diptych.lab import rounds as rounds_module
from diptych.lab.calibrate import cache_level
from diptych.lab.experiment import (
    Check,
    Experiment,
    Outcome,
    Stage,
    Verdict,
    cannot,
    conclude,
    point,
    polynomial,
    quantity,
)
from diptych.lab.experiments import EXPERIMENTS, lengths, speculation
from diptych.lab.experiments.roofline import PARTS, REST
from diptych.lab.probe import StepParts
from diptych.lab.report import picture
from diptych.lab.rounds import Effort, Estimate, Rounds, burst, measure
from diptych.lab.session import LabRun, alone_in, choose
from diptych.lab.style import DECODE, PREFILL, colours_of, log_axis


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
        effort=Effort(rounds=2, budget_s=0.0),
        progress=lambda text: None,
    )


@pytest.fixture(scope="module")
def outcome_of(stage: Stage) -> Iterator[Callable[[Experiment], Outcome]]:
    """What an experiment says on that stage, measured once, and speculation with one sequence and with many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "BATCHES", (1, 16))
        yield cache(lambda experiment: experiment.run(stage))


@pytest.mark.parametrize(
    "experiment",
    # a cold start begins whole processes
    [pytest.param(one, marks=[pytest.mark.slow] * (one.name == "cold-start"), id=one.name) for one in EXPERIMENTS],
)
def test_experiment_measures_something_and_says_what(
    experiment: Experiment, outcome_of: Callable[[Experiment], Outcome]
) -> None:
    """A lab whose experiments only run on the author's model is no lab."""
    outcome = outcome_of(experiment)
    assert isinstance(outcome.verdict, Verdict)
    assert len(outcome.finding) > 20
    if experiment.name != "thinking":  # the draft may not think and answer in 200 tokens, and then says so
        assert len(outcome.points) >= 2
    for one in outcome.points:
        assert 0 < one.low <= one.measured <= one.high


def keep(folder: Path, *names: str) -> None:
    """Make saved results ones that are kept: a busy machine withholds verdicts for noise, and those are measured again."""
    for name in names:
        saved = json.loads((folder / f"{name}.json").read_text())
        saved["outcome"]["is_noisy"] = False
        (folder / f"{name}.json").write_text(json.dumps(saved))


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

    keep(tmp_path, "decode-position", "kv-cache")
    again = [Experiment(**{name: getattr(one, name) for name in one.__slots__} | {"run": broken}) for one in chosen]
    run = LabRun(stage, tmp_path)
    run.run(again, on_result=lambda *_: None)
    assert run.kept == ["decode-position", "kv-cache"]  # the command says so
    second = json.loads((tmp_path / "results.json").read_text())["experiments"]
    assert {name: one["points"] for name, one in second.items()} == {
        name: one["points"] for name, one in first["experiments"].items()
    }


@pytest.mark.parametrize("text", ["[]", '{"key": 3}', "null", '"text"', "{"])
def test_a_file_that_is_no_result_is_none(stage: Stage, tmp_path: Path, text: str) -> None:
    """A folder of the user's own with a kv-cache.json in it ended in a traceback."""
    (tmp_path / "kv-cache.json").write_text(text)
    done = cannot("not here")
    experiment = replace(choose(["kv-cache"])[0], run=lambda _: done)
    run = LabRun(stage, tmp_path)
    run.run([experiment], on_result=lambda *_: None)
    assert run.kept == []


def test_a_sweep_can_be_measured_in_parts_and_noisy_results_again(stage: Stage, tmp_path: Path) -> None:
    """The report of the second part holds the first; a verdict withheld for noise is worth another try, a clear one not."""
    LabRun(stage, tmp_path).run(choose(["kv-cache"]), on_result=lambda *_: None)
    LabRun(stage, tmp_path).run(choose(["decode-position"]), on_result=lambda *_: None)
    assert set(json.loads((tmp_path / "results.json").read_text())["experiments"]) == {"decode-position", "kv-cache"}
    for name, is_noisy in (("kv-cache", True), ("decode-position", False)):
        saved = json.loads((tmp_path / f"{name}.json").read_text())
        saved["outcome"] |= {"is_noisy": is_noisy, "finding": "as saved"}
        (tmp_path / f"{name}.json").write_text(json.dumps(saved))
    findings: dict[str, str] = {}
    LabRun(stage, tmp_path).run(
        choose(["decode-position", "kv-cache"]),
        on_result=lambda one, outcome: findings.update({one.name: outcome.finding}),
    )
    assert findings["decode-position"] == "as saved"
    assert findings["kv-cache"] != "as saved"


def test_a_second_lab_in_a_folder_is_told_of_the_first(tmp_path: Path) -> None:
    """Both measured, disturbed each other, and wrote one report over the other."""
    folder = tmp_path / "new" / "report"
    with alone_in(folder):
        with pytest.raises(ConfigError, match=f"another lab measures into {folder}"):
            lab.app(["--only", "kv-cache", "--out", str(folder)], standalone_mode=False)
        with alone_in(tmp_path / "other"):
            pass
        assert not list(folder.iterdir())
    with alone_in(folder):
        pass


def test_every_kind_of_operation_belongs_to_one_part_of_a_step(stage: Stage) -> None:
    """The roofline's points per component are worth nothing if an operation is counted twice or not at all."""
    parts = StepParts(stage.probe(64), StepShape.prefill(batch=1, new_tokens=32))
    parts.total()
    kinds = [*REST, *(kind for _, kinds, _ in PARTS for kind in kinds)]
    assert sorted(kinds) == sorted(stage.model.program.nanoseconds())
    assert {kind for kind in kinds if parts.part([kind]) == 0.0} == {"moe"}


def verdict_of(times_RN: list[list[float]], *, limit: float) -> Outcome:
    """What a lab says of 'the second point takes more than `limit` times as long as the first'."""
    rounds = Rounds(np.array(times_RN))
    gain = rounds.of(lambda t: t[1] / t[0])
    points = [point("time", n, rounds.point(n)) for n in range(2)]
    return conclude(points, [Check(what="gain", estimate=gain, limit=limit)], rounds, finding="x")


def test_an_interval_that_straddles_its_limit_withholds_the_verdict() -> None:
    """A conclusion drawn on an unsteady machine is worth less than none."""
    clear = verdict_of([[1.0, 3.0 + 0.01 * i] for i in range(8)], limit=2.0)
    assert clear.verdict is Verdict.HOLDS
    assert verdict_of([[1.0, 1.5 + 0.01 * i] for i in range(8)], limit=2.0).verdict is Verdict.FAILS
    unclear = verdict_of([[1.0, 1.8], [1.0, 2.2], [1.0, 1.9], [1.0, 2.1], [1.0, 1.95]], limit=2.0)
    assert unclear.verdict is Verdict.WITHHELD
    assert unclear.is_noisy
    assert "straddles" in unclear.notes[-1]


def test_a_slow_spell_that_hits_both_sides_decides_nothing() -> None:
    """Ratios are taken within a round, so a machine that halves its speed half-way leaves them alone, but is told."""
    spells = [[1.0, 3.0]] * 6 + [[2.0, 6.0]] * 6
    rounds = Rounds(np.array(spells))
    assert rounds.of(lambda t: t[1] / t[0]).low == pytest.approx(3.0)
    outcome = verdict_of(spells, limit=2.0)
    assert outcome.verdict is Verdict.WITHHELD  # no time of its own is known to 15 %
    assert "2 of 2 medians" in outcome.notes[-1]


def test_interval_of_a_median_is_that_of_the_textbook() -> None:
    """Order statistics: of ten values the second and the ninth bound the median with 97.9 %, of five the range."""
    ten = Estimate.of([5, 1, 9, 3, 7, 2, 8, 4, 6, 10])
    assert (ten.value, ten.low, ten.high) == (5.5, 2, 9)
    five = Estimate.of([3, 1, 2, 5, 4])
    assert (five.value, five.low, five.high) == (3, 1, 5)


def test_rounds_in_which_others_used_the_cores_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the processor time of others alone: the samples of a disturbed round are not looked at."""
    shares = iter([0.0, 0.5, 0.0, 0.6, 0.0, 0.0])
    monkeypatch.setattr(rounds_module.Others, "share", lambda self: next(shares))
    samples = iter([0.0, 1.0, 9.0, 2.0, 0.5, 3.0, 4.0])  # the first is the warm-up
    measured = measure([lambda: next(samples)], Effort(rounds=4, budget_s=10.0, settled=1e9))
    assert measured.times_RN[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert measured.set_aside == 2
    assert measured.others == pytest.approx(1.1 / 6)


def test_disturbed_rounds_come_back_only_with_the_verdict_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    """They came back in without a word when few were quiet, though the page says that they are set aside."""
    monkeypatch.setattr(rounds_module.Others, "share", lambda self: 0.5)
    measured = measure([lambda: 1.0, lambda: 3.0], Effort(rounds=4, budget_s=0.0))
    assert measured.is_disturbed
    gain = measured.of(lambda t: t[1] / t[0])
    outcome = conclude(
        [point("time", 0, measured.point(0))], [Check(what="gain", estimate=gain, limit=2.0)], measured, finding="x"
    )
    assert outcome.verdict is Verdict.WITHHELD
    assert "nearly every round" in outcome.notes[-1]
    shares = iter([0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5])  # three quiet ones are enough; the others stay out
    monkeypatch.setattr(rounds_module.Others, "share", lambda self: next(shares))
    few = measure([lambda: 1.0], Effort(rounds=7, budget_s=0.0))
    assert (few.is_disturbed, len(few.times_RN), few.set_aside) == (False, 3, 4)


def test_two_rounds_that_differ_are_not_called_settled() -> None:
    """The middle half of two values is empty: nothing measured in two rounds could be withheld for noise."""
    assert Estimate.of([1.0, 2.0]).spread == pytest.approx(2.0 / 3.0)
    outcome = verdict_of([[1.0, 3.0], [2.0, 6.1]], limit=2.0)
    assert outcome.verdict is Verdict.WITHHELD


def test_a_cache_level_is_found_below_twice_the_rate_of_memory() -> None:
    """131 GB/s at 4 MiB, 55 to 60 from 8 to 128 MiB and 36 from memory: no cache was found, and decode predicted at half."""
    rates = {1: 140e9, 2: 138e9, 4: 131e9, 8: 60e9, 16: 58e9, 32: 57e9, 64: 56e9, 128: 55e9, 192: 40e9}
    level = cache_level(rates, 36e9)
    assert level == {"bytes": 128 * 2.0**20, "bytes_per_s": pytest.approx(57e9, rel=0.02)}
    assert cache_level({1: 37e9, 2: 90e9}, 36e9) is None  # behind a size that memory serves, a quick one is chance
    assert cache_level({1: 140e9, 2: 130e9, 4: 37e9}, 36e9)["bytes"] == 2 * 2.0**20


def test_sizes_that_lie_in_a_cache_in_part_are_no_level_of_their_own() -> None:
    """175 GB/s up to 16 MiB, then ever less: the level was said to be 64 MiB at 50 GB/s, and no fitted share could reach what
    small models read.
    """
    rates = {
        1: 202e9,
        4: 178e9,
        8: 177e9,
        12: 175e9,
        16: 174e9,
        24: 108e9,
        32: 75e9,
        48: 52e9,
        64: 43e9,
        96: 36e9,
        192: 33e9,
    }
    level = cache_level(rates, 33e9)
    assert level["bytes_per_s"] == pytest.approx(175e9, rel=0.02)
    cache = Cache(eb={}, **level)
    assert 20 * 2**20 < cache.bytes < 28 * 2**20
    for mib in (16, 32, 48, 64):  # and so it says what was read
        share = cache.share_of(mib * 2**20)
        assert 1 / (share / cache.bytes_per_s + (1 - share) / 33e9) == pytest.approx(rates[mib], rel=0.25)


def test_the_roofline_says_which_roof_and_draws_the_one_of_the_cache(
    outcome_of: Callable[[Experiment], Outcome],
) -> None:
    """Dots stood above the roof beside "the claim holds": a model that fits a cache is not read from memory."""
    outcome = outcome_of(choose(["roofline"])[0])
    shares = [note for note in outcome.notes if "FLOP per byte," in note]
    assert len(shares) > 8
    for note in shares:
        assert re.search(r"% of the (roof of the arithmetic|memory's roof|cache's roof)", note), note
        share = int(re.search(r"(\d+)% of the (roof|memory|cache)", note)[1])
        assert share <= 100 or "above it, so that a nearer cache" in note, note
    assert outcome.roofs[0].name == "memory"
    assert all(roof.slope >= outcome.roofs[0].slope for roof in outcome.roofs)


def test_a_phase_has_one_colour_in_every_picture() -> None:
    """Prefill was blue in one picture and orange in the next; the live page has the same two."""
    assert colours_of(["decode", "prefill", "all requests"]) == {
        "decode": DECODE,
        "prefill": PREFILL,
        "all requests": colours_of(["all requests"])["all requests"],
    }
    assert colours_of(["prefill step", "TTFT of the long prompt"]) == {
        "prefill step": PREFILL,
        "TTFT of the long prompt": PREFILL,
    }
    assert colours_of(["with the cache", "recomputing everything"]) == {
        "with the cache": DECODE,
        "recomputing everything": PREFILL,
    }
    page = files("diptych.server").joinpath("page", "page.css").read_text("utf-8")
    assert f"--prefill: {PREFILL}; --decode: {DECODE};" in page


def test_a_long_first_sample_counts_where_the_effort_says_so() -> None:
    """`lab --quick` read a prompt of 10,000 tokens three times for two rounds; the first one was thrown away."""
    for long_s, long_samples in ((None, 3), (0.5, 2)):
        taken: list[float] = []

        def take(seconds: float, taken: list[float] = taken) -> float:
            taken.append(seconds)
            return seconds

        effort = Effort(rounds=2, budget_s=0.0, long_s=long_s)
        measured = measure([lambda: take(0.01), lambda: take(2.0)], effort)
        assert measured.times_RN.tolist() == [[0.01, 2.0]] * 2
        assert (taken.count(0.01), taken.count(2.0)) == (3, long_samples)


def test_a_request_is_a_bar_of_its_phases_in_time() -> None:
    """The picture of short and long prompts was two crossing lines on logarithmic axes; a reader asks where the time went."""
    experiment = choose(["phase-shares"])[0]
    steady = Rounds(np.array([[2.0, 98.0, 9000.0, 1000.0]] * 5))
    series = [("prefill", 10), ("decode", 10), ("prefill", 10_000), ("decode", 10_000)]
    points = [quantity(name, x, steady.point(i), "ms", label="200 new") for i, (name, x) in enumerate(series)]
    figure = picture(experiment, Outcome(points=tuple(points), verdict=Verdict.HOLDS, finding="x"))
    short, long = figure.axes
    assert [bar.get_width() for bar in short.patches] == [2.0, 98.0]
    assert [bar.get_x() for bar in long.patches] == [0.0, 9.0]  # in seconds
    assert [to_hex(bar.get_facecolor()) for bar in long.patches] == [PREFILL, DECODE]
    assert short.get_title(loc="left") == "10 prompt tokens, 200 new: prefill 2 ms = 2%, decode 98 ms = 98%"


def test_axes_have_plain_numbers() -> None:
    """10^0 and 10^1 under four batch sizes; a reader wants 1, 2, 4, 8."""
    axes = Figure().add_subplot()
    axes.plot([1, 64], [0.5, 20000])
    log_axis(axes.xaxis, [1, 2, 4, 64])
    log_axis(axes.yaxis)
    axes.figure.canvas.draw()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "64"]
    assert {"1", "100", "1,000", "10k"} <= {tick.get_text() for tick in axes.get_yticklabels()}


@pytest.mark.slow
def test_others_sees_a_busy_process() -> None:
    """The judge of disturbed rounds is only as good as its reading of the system's clocks."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            others = rounds_module.Others()
            sleep_s(1.0)
            assert others.share() > 0.5 / (os.cpu_count() or 1)
        finally:
            busy.kill()


def test_polynomial_finds_known_coefficients() -> None:
    """The fit behind 'linear part, quadratic part, knee'."""
    xs = [10, 100, 1000, 10_000]
    ys = [2.0 + 0.5 * x + 1e-4 * x * x for x in xs]
    assert polynomial(xs, ys, 2) == pytest.approx([2.0, 0.5, 1e-4], rel=1e-6)


TINY = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"} | TINY, "nothing to compare"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
         "num_key_value_heads in config.json is 2"),
    ],
    ids=["falcon", "gpt2"],
)  # fmt: skip
def test_heads_that_cannot_be_shared_withhold_the_verdict(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    """A KeyError for GPT-2 took the whole lab with it; of Falcon's three equal models failed the claim."""
    compute = ComputeConfig(backend="torch", threads=1)
    stage = Stage(
        model=random_model(config, compute, seed=0),
        name="tiny",
        config=EngineConfig(compute=compute),
        loaded=None,
        longest_tokens=64,
        effort=Effort(rounds=2, budget_s=0.0),
        progress=lambda text: None,
    )
    outcomes: list[Outcome] = []
    LabRun(stage, tmp_path).run(choose(["head-sharing"]), on_result=lambda _, outcome: outcomes.append(outcome))
    assert outcomes[0].verdict is Verdict.WITHHELD
    assert words in outcomes[0].finding


@pytest.mark.parametrize(
    ("longest", "context", "prompts"), [(64, 384, [10, 64]), (384, 384, [10, 288]), (1000, 1200, [10, 1000])]
)
def test_requests_end_at_the_longest_length(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, longest: int, context: int, prompts: list[int]
) -> None:
    """`--longest-tokens` was read by the other lengths alone, and a prompt of just the length that fits was left out."""
    seen: list[int] = []

    class Request:
        def __init__(self, driver: object, prompt_tokens: int, new_tokens: int) -> None:
            seen.append(prompt_tokens)

        def prefill_s(self) -> float:
            return 1.0

        decode_s = prefill_s

    monkeypatch.setattr(lengths, "_Request", Request)
    monkeypatch.setattr(stage, "longest_tokens", longest)
    monkeypatch.setattr(stage, "context_tokens", context)
    lengths.PHASE_SHARES.run(stage)
    assert list(dict.fromkeys(seen)) == prompts


def test_a_fresh_process_that_takes_too_long_ends_its_experiment_alone(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, and the experiments behind it were not run."""

    def stuck(command: list[str], *, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stuck)
    outcomes: list[Outcome] = []
    LabRun(stage, tmp_path).run(choose(["cold-start"]), on_result=lambda _, outcome: outcomes.append(outcome))
    assert outcomes[0].finding == "could not be run: a fresh process had no token within 120 s"


@pytest.mark.parametrize(
    ("name", "longest", "words"),
    [
        ("decode-position", 64, "a line needs two positions"),
        ("prefill-length", 20, "a square needs three lengths"),
        ("chunked-prefill", 40, "streams need 64 tokens"),
    ],
)
def test_too_few_lengths_prove_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str, longest: int, words: str
) -> None:
    """Through one position every line goes: "0.000 ms and 1,055 ns per token of context", and the claim held."""
    monkeypatch.setattr(stage, "longest_tokens", longest)
    monkeypatch.setattr(stage, "context_tokens", longest)
    outcome = next(one for one in EXPERIMENTS if one.name == name).run(stage)
    assert outcome.verdict is Verdict.WITHHELD
    assert words in outcome.finding


def test_words_in_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """What a process said of [/a/path] ended the lab, as a tag that closes nothing."""
    lab._print(EXPERIMENTS[0], cannot("could not be run: see [/tmp/x] and [note]"))
    assert "could not be run: see [/tmp/x] and [note]" in capsys.readouterr().err


def test_unknown_experiment_is_named() -> None:
    """A typing error should cost one look."""
    with pytest.raises(ConfigError, match="no experiment 'speed'"):
        choose(["speed"])


def test_a_profile_without_a_date_is_no_traceback(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner reads one, and the lab's report ended in a KeyError."""
    residual = {"low": -0.1, "high": 0.1, "median_error": 0.0, "rows": 1}
    profile = {
        "schema": 1, "memory_bytes_per_s": 1e10, "memory_bytes": 1e10, "flops_per_s": {"bf16": 1e11}, "p": 3.0,
        "eb": {"bf16": 0.9}, "ef": {"bf16": 0.9}, "attention": {"kv_eb": 0.8, "prefill_ef": 0.5, "decode_ef": 0.3},
        "residuals": {"prefill": residual, "decode": residual},
    }  # fmt: skip
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    (tmp_path / "hardware.json").write_text(json.dumps(profile))
    monkeypatch.setattr(stage, "predictor", local_predictor(stage.model))
    assert stage.predictions == "this machine's measured profile of a date unknown"


@pytest.fixture
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a calibration does, of small models and fewer steps; caches are read once, of memory as much as shows a rate,
    and the fit takes a few of its steps: what it comes to is test_gpu_calibration.py's.
    """
    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
             "num_hidden_layers": 2, "vocab_size": 512}  # fmt: skip
    for name in ("PROBE_MODEL", "DEEP_MODEL", "SMALL_MODEL", "HOST_MODEL"):
        monkeypatch.setattr(calibration, name, getattr(calibration, name) | small)
    monkeypatch.setattr(fitting, "STEPS", 3)
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**24)
    monkeypatch.setattr(calibration, "ATTENTION_STEPS", calibration.ATTENTION_STEPS[2:4])
    monkeypatch.setattr(calibration, "GROUPED_STEPS", calibration.GROUPED_STEPS[:1])
    for name in ("CLIMBS", "CACHE_ROUNDS", "CACHE_READS"):
        monkeypatch.setattr(calibration, name, 1)


@pytest.mark.usefixtures("quick_calibration")
def test_calibration_writes_a_profile_the_planner_reads(tmp_path: Path) -> None:
    """Measured, fitted, stored: and every constant the planner wants is there and possible."""
    path = tmp_path / "hardware.json"
    calibration.calibrate(
        ComputeConfig(threads=1),
        progress=lambda text: None,
        effort=Effort(rounds=1, budget_s=0.0),
        path=path,
        takes_busy=True,
    )
    hardware, fitted = read_profile(load_profile(path))
    assert hardware.memory_bytes_per_s > 1e8
    assert fitted.is_local
    assert fitted.decode_residual.rows >= 7
    assert fitted.prefill_residual.rows >= 8
    assert fitted.decode.attention_ef_of.keys() == {"int8", "int8x8", "fp8"}
    assert fitted.prefill.group_ends.keys() == {"int8", "bf16"}
    assert fitted.host.step_s > 0.0
    profile = load_profile(path)
    assert (profile["threads"], profile["host"].keys() >= {"wake_s"}) == (1, True)
    elsewhere = profile["elsewhere"]
    assert (elsewhere["backend"], elsewhere["weights"]) == ("torch", "bf16")
    assert min(elsewhere["prefill"], elsewhere["decode"]) > 0.0


@pytest.mark.usefixtures("quick_calibration")
def test_a_profile_of_a_busy_machine_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured beside eight test runs, a machine was said to be eight times slower, and the scheduler believed it."""
    monkeypatch.setattr(rounds_module.Others, "share", lambda others: 0.4)
    path = tmp_path / "hardware.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="other programs used 40% of the cores") as caught:
        calibration.calibrate(
            ComputeConfig(threads=1), progress=lambda text: None, effort=Effort(rounds=1, budget_s=0.0), path=path
        )
    assert "--busy" in str(caught.value)
    assert path.read_text() == "{}"


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk left half a profile, of which no step is predicted."""
    path = tmp_path / "hardware.json"
    path.write_text("{}")

    def full(file: Path, text: str) -> None:
        file.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            calibration._written({"schema": 1}, path)
    assert path.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [path]
    calibration._written({"schema": 1}, path)
    assert json.loads(path.read_text())["schema"] == 1


def test_what_a_step_usually_takes_is_not_its_best_time() -> None:
    """A calibration by best times priced every step of an engine too short."""
    clock = VirtualClock()
    taken = [2e-3, 1e-3, *[3e-3] * 7]
    times_s = iter(taken)
    assert burst(lambda: clock.advance(next(times_s)), clock, choose=statistics.median)() == pytest.approx(3e-3)
    times_s = iter(taken)
    assert burst(lambda: clock.advance(next(times_s)), clock)() == pytest.approx(1e-3)
