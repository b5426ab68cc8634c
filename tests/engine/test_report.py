"""The phase report: what it charges is what the steps did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.engine.conftest import tiny_config
from tests.engine.test_speculation import unpriced

from diptych.compute.ceilings import Ceilings, compute_dtype, is_measured_natively, machine_ceilings
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.ops.cpus import Placement
from diptych.engine import load as load_room
from diptych.engine import model_profile
from diptych.engine import report as report_room
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.cost_view import CostView
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel
from diptych.engine.report import PhaseObserver, phase_report
from diptych.ground.formats import ENGINE_WEIGHTS
from diptych.ground.request import SamplingParams
from diptych.ground.shape import StepShape
from diptych.ground.specs import Stored

CEILINGS = Ceilings(read_bytes_per_s=1e10, flops_per_s=1e11, compute_dtype="fp32", threads=1)


def observed(loaded: LoadedModel) -> tuple[PhaseObserver, Completion]:
    """A short request, and what an observer saw of it."""
    llm, observer = LLM(loaded, tiny_config()), PhaseObserver()
    stop = llm.engine.listen(observer)
    (done,) = llm.generate([list(range(40, 65))], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    stop()
    return observer, done


def test_only_the_chunk_that_samples_is_charged_an_output_head(loaded: LoadedModel) -> None:
    """Every chunk of a prompt was charged a head it never ran, so that chunked prefill looked better than it was."""
    scheduler = replace(tiny_config().scheduler, max_step_tokens=10)
    llm, observer = LLM(loaded, tiny_config(scheduler=scheduler)), PhaseObserver()
    stop = llm.engine.listen(observer)
    (done,) = llm.generate([list(range(40, 65))], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    stop()
    assert [step.shape.n_logits_rows for step in observer.steps] == [0, 0, 1, 1, 1]
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    assert report.decode is not None
    assert (report.prefill.tokens, report.decode.tokens) == (25, 2)
    view = CostView(loaded.model)
    chunks = [
        StepShape.prefill(batch=1, new_tokens=n, cached_tokens=start, samples=start == 20)
        for n, start in ((10, 0), (10, 10), (5, 20))
    ]
    bound_s = sum(view.bound_s(one, CEILINGS) for one in chunks)
    assert abs(report.prefill.fraction_of_ceiling * report.prefill.time_s - bound_s) < 1e-6 * bound_s


def test_attention_has_a_ceiling_of_its_own(loaded: LoadedModel) -> None:
    """int8 weights had attention over a cache of bf16 charged at twice the rate that the machine has for it."""
    view, work = CostView(loaded.model), StepShape.prefill(batch=1, new_tokens=200)
    ceilings = replace(CEILINGS, attention_flops_per_s=CEILINGS.flops_per_s / 4)
    flops = {part.name: part.flops for part in view.cost(work).components}
    attention = flops["scores"] + flops["values"]
    assert 0 < attention < sum(flops.values())
    expected_s = (sum(flops.values()) + 3 * attention) / CEILINGS.flops_per_s
    assert view.parts_s(work, ceilings)[1] == pytest.approx(expected_s)
    assert view.bound_s(work, replace(ceilings, read_bytes_per_s=1e15)) == pytest.approx(expected_s)


def test_a_phase_above_its_ceiling_says_which_one(loaded: LoadedModel) -> None:
    """102 to 152 % of a "roof" stood there without a word; then caches were named where arithmetic was the bound."""
    llm, observer = LLM(loaded, tiny_config()), PhaseObserver()
    stop = llm.engine.listen(observer)
    (done,) = llm.generate([list(range(40, 65))], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    stop()
    for ceilings, says in (
        (
            replace(CEILINGS, read_bytes_per_s=1.0),
            ["prefill above 100%: the ceiling is the memory's", "decode above 100%: the c"],
        ),
        (
            replace(CEILINGS, flops_per_s=1.0),
            ["prefill above 100%: the processor is faster", "decode above 100%: the processor"],
        ),
        (
            replace(CEILINGS, cached_bytes_per_s=1.0),
            ["prefill above 100%: the ceiling is that of the cache", "decode above 100%: the ceiling is that of the c"],
        ),
        (replace(CEILINGS, read_bytes_per_s=1e18, flops_per_s=1e18), []),
    ):
        report = phase_report(loaded, observer, ceilings=ceilings, usage=done.usage, timings=done.timings)
        told = [line.strip() for line in report.table().splitlines() if "above 100%" in line]
        assert len(told) == len(says)
        assert all(line.startswith(begin) for line, begin in zip(told, says, strict=True))


def test_ceilings_say_how_far_the_threads_are_apart(loaded: LoadedModel) -> None:
    """A host that moves two threads to different caches halves or doubles the bandwidth: for long nobody could tell why."""
    ceilings = machine_ceilings(loaded.model)
    assert bool(ceilings.signal_s) == (is_measured_natively(loaded.model) and loaded.model.threads > 1)
    assert "threads 170 ns apart" in replace(ceilings, signal_s=170e-9).words()
    assert "apart" not in replace(ceilings, signal_s=0.0).words()


@pytest.mark.native
def test_every_dtype_of_the_engine_has_a_ceiling() -> None:
    """int4 had int8's, above which its prompts stood where no dot product is: which the report laid to the processor."""
    for weights in ENGINE_WEIGHTS:
        assert cpu_kernels.measure_ops_per_s(compute_dtype(weights), Placement(threads=1), repeats=1) > 1e6
    with pytest.raises(ValueError, match="no ceiling for fp8; there are fp32, bf16, int8 and int4"):
        cpu_kernels.measure_ops_per_s("fp8", Placement(threads=1))


def test_kernels_that_are_not_the_processors_best_are_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log alone said so, and it is long gone when somebody looks at a rate."""
    observer, done = observed(loaded)
    own = loaded.model.instruction_set
    monkeypatch.setattr(loaded.model, "backend_name", "cpu")
    for sets, is_told in (([own, "older"], False), (["newer", own], True), (["newer"], False)):
        monkeypatch.setattr(cpu_kernels, "instruction_sets", lambda sets=sets: sets)
        report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
        assert (f"kernels use {own}; this processor also has newer" in report.table()) == is_told


def test_a_backend_that_is_faster_for_a_phase_is_named(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """bf16 prefill stood at 63 % of a ceiling where torch was three times as fast, and nothing said so."""
    observer, done = observed(loaded)
    weights = loaded.model.weights_format
    profile = tmp_path / "hardware.json"
    elsewhere = {"backend": "other", "weights": weights, "prefill": 3.0, "decode": 0.5}
    profile.write_text(json.dumps({"elsewhere": elsewhere}))
    monkeypatch.setattr(model_profile, "is_measured", lambda _: True)
    monkeypatch.setattr(model_profile, "load_profile", lambda **_: json.loads(profile.read_text()))
    monkeypatch.setattr(report_room, "local_predictor", lambda _: None)
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    assert f"prefill: the other backend is 3.0 times as fast here with {weights} weights" in report.table()
    assert "decode: the other" not in report.table()

    # the same profile, told to the backend that it is not of: it heard nothing where it was half as fast
    own = loaded.model.backend_name
    profile.write_text(json.dumps({"backend": "best", "elsewhere": elsewhere | {"backend": own}}))
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    assert f"decode: the best backend is 2.0 times as fast here with {weights} weights" in report.table()
    assert "prefill: the best" not in report.table()


def test_one_is_counted_in_the_singular(loaded: LoadedModel) -> None:
    """It said "prompt 1 tokens = 1 computed + 0 cached"."""
    llm, observer = LLM(loaded, tiny_config()), PhaseObserver()
    stop = llm.engine.listen(observer)
    (done,) = llm.generate([[40]], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    stop()
    table = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings).table()
    assert "  prompt 1 token = 1 computed + 0 cached" in table


def test_predictions_of_replayed_steps_say_so(loaded: LoadedModel) -> None:
    """The first steps of a form are recorded, which takes many times what it is predicted to take."""
    observer, done = observed(loaded)
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    assert not report.is_replayed
    told = {
        gap: replace(report, is_replayed=True, unpredicted=gap).table() for gap in (None, "this GPU was never measured")
    }
    assert "predicted: replayed steps" in told[None]
    assert "predicted: replayed steps" not in told["this GPU was never measured"]


def test_a_profile_of_another_number_of_threads_says_so(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A profile of two threads priced the steps of one: half of what they took, and the stall budget believed it."""
    profile, own = tmp_path / "hardware.json", loaded.model.threads
    monkeypatch.setattr(model_profile, "is_measured", lambda _: True)
    monkeypatch.setattr(model_profile, "load_profile", lambda **_: json.loads(profile.read_text()))
    profile.write_text(json.dumps({"threads": own + 1}))
    words = f"measured with {own + 1} threads, not with {own} thread"
    assert words in (model_profile.profile_gap(loaded.model) or "")
    assert model_profile.local_predictor(loaded.model) is None
    for fits in ({"threads": own}, {}):  # one from before there was such an entry
        profile.write_text(json.dumps(fits))
        assert model_profile.profile_gap(loaded.model) is None


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{", "cannot read the hardware profile {path}: Expecting property name"),
        ("[]", "the hardware profile {path} is not a JSON object"),
        ('{"schema": 1}', "{path}: hardware profile has no flops_per_s"),
    ],
)
def test_a_damaged_profile_costs_predictions_and_no_answer(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    written: str,
    words: str,
) -> None:
    """No engine started: generate and chat ended with the profile's error."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    path = tmp_path / "hardware.json"
    path.write_text(written)
    observer, done = observed(loaded)
    assert len(done.choices[0].token_ids) == 2
    words = words.format(path=path)
    assert words in caplog.text
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    assert f"no prediction: {words}" in report.table()
    assert "(diptych lab calibrate writes it anew)" in report.table()


def test_only_who_serves_is_warned_of_steps_that_hold_others(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat was told of running streams that wait for others' prompts, and of an option that it does not have."""
    slow = SimpleNamespace(predict_s=lambda shape: 3.4, predict=lambda shape: SimpleNamespace(total_s=3.4))
    monkeypatch.setattr(load_room, "local_predictor", lambda model: slow)
    LLM(loaded, tiny_config())
    assert "running streams" not in caplog.text
    AsyncLLM(loaded, tiny_config())
    assert "running streams may wait 3.4 s for others' prompts; --stall-budget-ms" in caplog.text


def test_layers_and_experts_of_several_formats_are_seen_as_they_are(loaded: LoadedModel) -> None:
    """Bytes were averaged over all, experts too: those of a mixture in mxfp4 beside attention in bf16 cost too much each, the
    attention too little.
    """
    kept = "group4-g32-e8m0-e2m1"
    model = SimpleNamespace(
        spec=loaded.model.spec, weights_format=kept, head_format="bf16", kv_format="bf16",
        formats={kept: 900, "bf16": 60, "int8": 40}, expert_formats={kept: 900},
    )  # fmt: skip
    quant = CostView(model).quant  # type: ignore[arg-type]
    assert quant.expert_bytes == pytest.approx(4.25 / 8)
    assert quant.weight_bytes == pytest.approx(1.6)
    assert quant.mix == (Stored(0.6, 2.0, "bf16"), Stored(0.4, 1.0, "int8"))
    assert (quant.expert_mix, quant.head_compute) == ((), "bf16")
    model.formats = {kept: 900, "bf16": 100}  # one format, and not that in which most weights are multiplied
    assert CostView(model).quant.mix == (Stored(1.0, 2.0, "bf16"),)  # type: ignore[arg-type]
    model.formats, model.expert_formats = {kept: 10}, {}
    assert CostView(model).quant.mix == ()  # type: ignore[arg-type]


def test_speculation_is_told_as_tokens_per_step_and_what_it_gained(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of rejected drafts were once decode tokens; and a gain against nothing says nothing."""
    params = SamplingParams(max_tokens=41, temperature=0.0, ignore_eos=True)
    (plain,) = LLM(loaded, tiny_config()).generate(["One two"], params)
    llm, observer = unpriced(LLM(loaded, tiny_config())), PhaseObserver()
    stop = llm.engine.listen(observer)
    text = plain.choices[0].text
    (done,) = llm.generate(["One two"], replace(params, prediction=text[:30] + "something else" + text[30:]))
    stop()

    class TenPerSecond:
        def predict_s(self, shape: StepShape) -> float:
            assert shape.n_tokens == shape.n_sequences
            return 0.1

        def predict(self, shape: StepShape) -> SimpleNamespace:
            return SimpleNamespace(total_s=0.1)

    monkeypatch.setattr("diptych.engine.report.local_predictor", lambda model: TenPerSecond())
    report = phase_report(loaded, observer, ceilings=CEILINGS, usage=done.usage, timings=done.timings)
    decode = [step for step in observer.steps if step.shape.decode_tokens]
    assert done.usage.drafted_tokens > done.usage.accepted_tokens > 0
    assert report.decode is not None
    assert report.decode.tokens == 40
    assert report.tokens_per_decode_step == 40 / len(decode) > 1.0
    assert report.undrafted_s == pytest.approx(4.0)
    assert f"{done.usage.accepted_tokens} of {done.usage.drafted_tokens} drafts accepted; " in report.table()
    assert "x the speed predicted without, 4000.0 ms" in report.table()
