"""Published services against the simulated ones: which rows are used, and that no row judges itself."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from diptych.cost import stacks
from diptych.cost.calibration import Constants
from diptych.cost.fitting.fit import Free
from diptych.cost.fitting.recipes import Scheduling
from diptych.cost.fitting.rows import read_service_rows
from diptych.cost.fitting.service_forms import SERVICE_FORMS, ServiceConstants, ServiceForm, put_in
from diptych.cost.fitting.services import MeasuredService, ServiceLoad, of_published, read_deployments
from diptych.cost.layout import Layout
from diptych.cost.memory import MemoryRule, capacity_of
from diptych.cost.tables import data_text, device_spec
from diptych.ground.errors import ConfigError
from diptych.ground.shape import StepShape
from diptych.sim import truth
from diptych.sim.load import UsersLoad, UsersSpec
from diptych.sim.service import Service, simulate
from diptych.sim.service_fits import is_checked, made_of
from diptych.sim.truth import case_of, cases_of, judge, possible, predicted_of, summarise_services
from diptych.workload import LengthRange

FORM = ServiceForm(
    stack="vllm",
    fixed=Constants(),
    free=(
        Free(path="both.eb.bf16", start=0.8),
        Free(path="decode.layer_s", start=30e-6),
        Free(path="request_s", start=0.02),
    ),
)
TRUE = put_in(FORM, (0.6, 60e-6, 0.01))


def service(model: str, device: str, streams: int, **fields: object) -> MeasuredService:
    """A row that a world of constants TRUE would have published."""
    load = ServiceLoad(streams=streams, input_tokens=256, output_tokens=64)
    row = MeasuredService(
        stack="vllm", version="1", device=device, model=model, quant="bf16", tp=1, load=load, ttft_s=1.0, tpot_s=1.0
    )
    said = predicted_of(case_of(row), TRUE)
    return replace(row, **{"ttft_s": said["ttft"], "tpot_s": said["tpot"], **fields})


def test_a_published_service_and_a_simulated_one_have_the_same_price() -> None:
    """What rows are judged by is what `simulate` says, the way between client and scheduler included."""
    row = replace(service("llama-3.1-8b", "h100-80gb-sxm", 1), quant="fp8")
    constants = replace(TRUE, request_s=0.25)
    case = case_of(row)
    said = predicted_of(case, constants)
    calibration = replace(
        case.setup.calibration, prefill=TRUE.prefill, decode=TRUE.decode, request_s=constants.request_s
    )
    spec = UsersSpec(
        n_users=1, n_requests=12, think_s=0.0, turns=1, message=LengthRange(low=256, high=256),
        output=LengthRange(low=64, high=64),
    )  # fmt: skip
    report = simulate(Service.of(replace(case.setup, calibration=calibration)), UsersLoad(spec))
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    assert report.ttft_s.mean == pytest.approx(said["ttft"], rel=0.01)
    assert report.tpot_s.mean == pytest.approx(said["tpot"], rel=0.01)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredService]:
    monkeypatch.setattr(truth, "SERVICE_FORMS", (FORM,))
    monkeypatch.setattr(truth, "PRIOR_COST", 0.03)  # few constants, and rows that err in nothing
    monkeypatch.setattr(truth, "ROUNDS", 25)
    models, devices = ("llama-3.1-8b", "qwen3-8b", "llama-3.2-3b"), ("h100-80gb-sxm", "a100-80gb-sxm")
    return [service(model, device, streams) for model in models for device in devices for streams in (1, 8)]


@pytest.mark.parametrize("held_out", ["model", "device"])
def test_constants_that_made_the_rows_are_found_again(world: list[MeasuredService], held_out: str) -> None:
    """The whole way: schedules, fit without the row's own, errors and their groups."""
    judged = judge([case_of(row) for row in world], [], held_out=held_out)
    assert len(judged) == 2 * len(world)
    assert all(abs(one.error) < 0.06 for one in judged)
    groups = summarise_services(judged, by=("measure", "device"))
    assert [(one.by, one.group, one.rows) for one in groups][:3] == [
        ("all", "all", 24),
        ("measure", "tpot", 12),
        ("measure", "ttft", 12),
    ]
    assert sum(one.rows for one in groups if one.by == "device") == 24


def test_no_service_is_judged_by_a_fit_that_saw_its_model(world: list[MeasuredService]) -> None:
    """Rows of one model made ten times slower must not change what is predicted for it."""

    def said(rows: list[MeasuredService]) -> list[float]:
        judged = judge([case_of(row) for row in rows], [], held_out="model")
        return [one.predicted for one in judged if one.case.row.model == "qwen3-8b"]

    slower = [replace(row, tpot_s=10 * (row.tpot_s or 0)) if row.model == "qwen3-8b" else row for row in world]
    assert said(slower) == said(world)


def test_intervals_come_from_other_models(world: list[MeasuredService]) -> None:
    """A model that is wrong by a factor of three lies outside, and widens the intervals of the others, not its own."""
    odd = [replace(row, tpot_s=3 * (row.tpot_s or 0)) if row.model == "qwen3-8b" else row for row in world]
    judged = [one for one in judge([case_of(row) for row in odd], [], held_out="model") if one.measure == "tpot"]
    assert not any(one.is_held for one in judged if one.case.row.model == "qwen3-8b")
    for one in judged:
        assert one.low <= one.predicted * 1.5
        assert (one.high > 2 * one.predicted) == (one.case.row.model != "qwen3-8b")


def test_models_weigh_alike_in_an_interval() -> None:
    """Quantiles of rows were those of the models with most of them: of SGLang's numbers, six of ten lay within 80 %."""
    ratios = [1.0 + i / 1000 for i in range(1000)]
    low, high = truth.bounds_of([[3.0] * 5000, *([ratios] * 19)])
    assert 1.0 < low < 1.2
    assert high < 2.0, "one of twenty, though it has a fifth of all rows"
    assert truth.bounds_of([]) == (1.0, 1.0)
    assert truth.bounds_of([ratios]) == (1.0, 1.999)


def test_an_interval_is_as_wide_as_models_stand_apart() -> None:
    """One weight for an unseen model held 85 % of rows left out by model and 92 % by device, which differ less."""
    ratios = [1.0 + i / 1000 for i in range(1000)]
    alike = truth.bounds_of([ratios] * 6)
    assert alike == pytest.approx((1.1, 1.9), abs=0.01)
    apart = [[shift * ratio for ratio in ratios] for shift in (0.5, 0.7, 1.0, 1.4, 2.0)]
    low, high = truth.bounds_of(apart)
    n_rows = sum(len(group) for group in apart)
    plain = sorted(ratio for group in apart for ratio in group)
    assert low < plain[n_rows // 10]
    assert high > plain[-n_rows // 10]
    held = []
    for number, group in enumerate(apart):
        low, high = truth.bounds_of(apart[:number] + apart[number + 1 :])
        held.append(sum(low <= ratio <= high for ratio in group) / len(group))
    assert 0.6 < sum(held) / len(held) < 0.95


def test_a_series_with_rows_beyond_all_peaks_is_not_believed(world: list[MeasuredService]) -> None:
    """As of 416 streams with prompts of 15,000 tokens on two devices: cached prompts, or copies that nobody stated."""
    cases = [case_of(row) for row in world]
    assert possible(cases) == cases
    too_fast = replace(world[0], ttft_s=1e-4, tpot_s=1e-4)
    mixed = [case_of(too_fast), *cases[1:]]
    kept = possible(mixed)
    series = {(one.row.model, one.row.device) for one in kept}
    assert (too_fast.model, too_fast.device) not in series
    assert len(kept) == len(cases) - 2
    other = [case_of(replace(row, version="2")) for row in world]
    assert possible([*mixed, *other])[-len(other) :] == other
    crowd = [case_of(replace(world[1], tpot_s=1.0 + i / 100)) for i in range(10)]
    assert len(possible([mixed[0], *crowd])) == 10


def row_of(**fields: object) -> dict[str, object]:
    return {
        "backend": "vllm", "backend_version": "1", "model_path": "openai/gpt-oss-120b", "system": "h100_sxm",
        "precision": "fp4", "mode": "agg",
        "isl": 1024, "osl": 1024, "tp_size": 2, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 2,
        "moe_ep_size": 1, "silicon_ttft_ms": 50, "silicon_tpot_ms": 8, "measured": "2026-01-01", "concurrency": 16,
    } | fields  # fmt: skip


def read(*rows: dict[str, object]) -> tuple[list[MeasuredService], Counter[str]]:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(row_of()))
    writer.writeheader()
    writer.writerows(rows)
    return read_deployments(text.getvalue())


def test_launches_of_a_long_prompt_are_hidden_by_the_device() -> None:
    """They run ahead of it: what one more of them takes is seen in a short prompt, and hardly in a long one."""
    setup = case_of(service("qwen3-30b-a3b", "b200-180gb", 1)).setup
    for form in SERVICE_FORMS:
        starts = [entry.start for entry in form.free]
        place = [entry.path for entry in form.free].index("prefill.moe_layer_s")
        slow = [2.0 * start if number == place else start for number, start in enumerate(starts)]
        seen = []
        for tokens in (64, 32_768):
            prices = [
                replace(setup, calibration=replace(setup.calibration, prefill=put_in(form, values).prefill))
                .model_of_time()
                .predict_s(StepShape.prefill(batch=1, new_tokens=tokens))
                for values in (starts, slow)
            ]
            seen.append((prices[1] - prices[0]) / (setup.model.n_layers * starts[place]))
        assert seen[0] > 0.8 > 0.2 > seen[1]


def test_rows_are_read_with_their_load_and_counted_by_reason() -> None:
    other = row_of(silicon_tpot_ms=14, concurrency=8)
    rows, left_out = read(
        row_of(), row_of(), row_of(concurrency=8), other, row_of(mode="disagg"), row_of(concurrency=""),
        row_of(attention_dp_size=4), row_of(model_path="nobody/unknown"), row_of(measured="", isl=2048),
        row_of(backend="trtllm", tp_size=64, moe_tp_size=8, moe_ep_size=8),
        row_of(tp_size=4, attention_dp_size=4, moe_tp_size=1, moe_ep_size=16),
        row_of(tp_size=1, attention_dp_size="", moe_tp_size=2, isl=1000),
        row_of(backend="trtllm", tp_size=4, attention_dp_size="", moe_tp_size=2, moe_ep_size=2, isl=1000),
    )  # fmt: skip
    assert [(one.stack, one.tp, one.load.spread, one.load.input_tokens) for one in rows] == [
        ("vllm", 2, 0.8, 1024),
        ("vllm", 2, 0.8, 1024),
        ("vllm", 2, 1.0, 2048),
        ("tensorrt-llm", 8, 0.8, 1024),
        ("vllm", 4, 0.8, 1024),
        ("vllm", 1, 1.0, 1000),
        ("tensorrt-llm", 4, 1.0, 1000),
    ]
    assert (rows[0].ttft_s, rows[0].tpot_s, rows[0].quant) == (0.05, 0.008, "mxfp4")
    assert rows[3].load.scheduling == Scheduling(
        step_tokens=20_000, ahead_steps=2, reserves_answers=True, max_running=512
    )
    assert [one.layout for one in rows] == [
        Layout(), Layout(dp=4), Layout(), Layout(ep=8), Layout(ep=4), Layout(dp=2), Layout(ep=2),
    ]  # fmt: skip
    assert sorted(left_out.values()) == [1, 1, 1, 1, 2]
    with pytest.raises(ConfigError, match="no column"):
        read_deployments("a,b\n1,2\n")


def test_a_row_names_a_model_of_the_tables_whatever_lies_under_that_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without a model was the end of all others; a folder called as a model was read in its place."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai" / "gpt-oss-120b").mkdir(parents=True)
    rows, left_out = read(row_of(), row_of(model_path=""), row_of(model_path="/etc"))
    assert [one.model for one in rows] == ["gpt-oss-120b"]
    assert sum(left_out.values()) == 2


def test_rows_are_run_as_their_recipes_say() -> None:
    """SGLang polls every 30 steps on B200, reads 32,768 tokens in a step of prompts alone; Llama on TensorRT-LLM gathers them;
    runs with drafts are not used, and rows with a date and other lengths are nobody's recipe.
    """
    deepseek = {"model_path": "deepseek-ai/DeepSeek-R1", "precision": "fp8", "tp_size": 8, "moe_tp_size": 8}
    sglang = row_of(backend="sglang", system="b200_sxm", **deepseek)
    llama = row_of(backend="trtllm", model_path="meta-llama/Llama-3.1-70B", precision="fp8", moe_tp_size=1)
    drafted = row_of(backend="trtllm", backend_version="1.2.0rc6.post3", system="b200_sxm", **deepseek)
    rows, left_out = read(sglang, sglang | {"system": "h200_sxm"}, llama, llama | {"osl": 500}, drafted)
    assert [one.load.scheduling for one in rows] == [
        Scheduling(step_tokens=32_768, ahead_steps=2, prefills_alone=True, poll_steps=30, max_running=128),
        Scheduling(step_tokens=32_768, ahead_steps=2, prefills_alone=True, max_running=512),
        Scheduling(step_tokens=16_384, ahead_steps=2, reserves_answers=True, gather_steps=20, gather_tokens=14_745),
        Scheduling(reserves_answers=True, at_once=2, ahead_steps=1),
    ]
    assert [one.load.spread for one in rows] == [0.8, 0.8, 0.8, 1.0]
    assert list(left_out) == ["drafts of tokens (multi-token prediction), of which nobody states how many held"]


DEEPSEEK = {
    "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm", "precision": "fp8",
    "tp_size": 8, "moe_tp_size": 8,
}  # fmt: skip
MINIMAX = {"model_path": "MiniMaxAI/MiniMax-M2.5", "system": "b200_sxm", "precision": "fp8"}


def test_streams_that_come_few_at_once_run_all_their_requests() -> None:
    """They find their places among the steps one by one; four requests of each would show the way there."""
    row = service("llama-3.1-8b", "h100-80gb-sxm", 8)
    marching, coming = (replace(row, load=replace(row.load, scheduling=Scheduling(at_once=n))) for n in (None, 2))
    assert case_of(marching).schedule.output_tokens == 8 * 4 * 64
    assert case_of(coming).schedule.output_tokens == 8 * 10 * 64


def test_more_streams_than_a_recipe_had_places_for_had_places_all_the_same() -> None:
    """DeepSeek in fp8 on B200 with 256 streams of 1,024 tokens: the first token came after 2 s, where a place takes 30."""
    rows, _ = read(*(row_of(**DEEPSEEK | {"backend": "sglang"}, concurrency=streams) for streams in (128, 256)))
    assert [one.load.scheduling.max_running for one in rows] == [128, None]


def test_a_client_that_sees_ten_tokens_at_once_waits_for_the_tenth() -> None:
    """TensorRT-LLM's recipes for DeepSeek: TTFT was said 30 to 60 % too short by ten tokens' time, at 7 ms a token as at 50."""
    deepseek, gpt_oss, undated, vllm = (
        read(row_of(**fields))[0][0].shown_tokens
        for fields in (
            DEEPSEEK | {"backend_version": "x"},
            {"backend": "trtllm"},
            DEEPSEEK | {"backend_version": "x", "measured": "", "isl": 2000},
            DEEPSEEK | {"backend": "vllm"},
        )
    )
    assert (deepseek, gpt_oss, undated, vllm) == (10, 1, 1, 1)
    row = service("llama-3.1-8b", "h100-80gb-sxm", 4)
    at_once, late = (predicted_of(case_of(replace(row, shown_tokens=shown)), TRUE) for shown in (1, 10))
    assert late["ttft"] == pytest.approx(at_once["ttft"] + 9 * at_once["tpot"])
    assert late["ttft"] + 63 * late["tpot"] == pytest.approx(at_once["ttft"] + 63 * at_once["tpot"])


def test_the_file_of_constants_is_what_the_fit_makes_of_these_rows() -> None:
    """The fit takes minutes. What it started from, and what its constants say about the smallest services, is in the file: a
    form, a price, a scheduler, a recipe or a row that changes asks for `plan accuracy --services --refit`.
    """
    entries = [entry for entry in json.loads(data_text(stacks.SERVICES))["calibrations"] if "made_of" in entry]
    rows = read_deployments(data_text("service_rows.csv"))[0]
    rows += of_published(read_service_rows(data_text("published_rows.csv")))
    for form, entry in zip(SERVICE_FORMS, entries, strict=True):
        found = stacks.calibration_for(device_spec("h100-80gb-sxm"), stack=form.stack, of_services=True)
        constants = ServiceConstants(found.prefill, found.decode, found.request_s)
        small = [row for row in rows if row.stack == form.stack and row.model in entry["models"] and is_checked(row)]
        cases = [case for case in cases_of(small) if case is not None]
        made = made_of(form, constants, cases)
        assert made == entry["made_of"] | {
            measure: pytest.approx(entry["made_of"][measure], rel=1e-3) for measure in ("tpot", "ttft")
        }, form.stack


def test_recipes_are_those_of_their_day() -> None:
    """Two prompts in a step of vLLM on Blackwell since 3 April; prompts that wait together for DeepSeek since 29 January."""
    old, new, hopper = (
        read(row_of(**MINIMAX, measured=day) | system)[0][0]
        for day, system in (("2026-03-11", {}), ("2026-04-08", {}), ("2026-03-27", {"system": "h200_sxm"}))
    )
    assert [one.load.scheduling.step_tokens for one in (old, new, hopper)] == [8192, 2048, 8192]
    assert [one.memory for one in (old, new, hopper)] == [MemoryRule(share=0.95), MemoryRule(), MemoryRule(share=0.95)]
    assert [one.layout for one in (old, new, hopper)] == [Layout(ep=2), Layout(), Layout(ep=2)]
    early, late, small = (
        read(row_of(**DEEPSEEK, backend_version="x", concurrency=streams, measured=day))[0][0]
        for day, streams in (("2025-12-15", 64), ("2026-02-05", 64), ("2026-02-05", 16))
    )
    assert early.load.scheduling == Scheduling(step_tokens=1152, ahead_steps=2, reserves_answers=True)
    assert late.load.scheduling == replace(early.load.scheduling, step_tokens=8192, gather_steps=40, gather_tokens=6553)
    assert small.load.scheduling == replace(early.load.scheduling, step_tokens=8192)
    assert early.memory == MemoryRule(share=0.8, is_of_free=True)


def test_prompts_of_few_tokens_are_launched_as_decode_is_where_recipes_capture_them() -> None:
    """`max-cudagraph-capture-size: 2048` in vLLM's recipes for gpt-oss, and in those for MiniMax-M2.5 since 3 April 2026."""
    gpt_oss = {"model_path": "openai/gpt-oss-120b", "system": "h200_sxm", "precision": "fp4"}
    new, old, other, trt = (
        read(row_of(**fields))[0][0].graph_tokens
        for fields in (
            MINIMAX | {"measured": "2026-04-03"},
            MINIMAX | {"measured": "2026-04-02"},
            gpt_oss,
            gpt_oss | {"backend": "trtllm"},
        )
    )
    assert (new, old, other, trt) == (2048, 0, 2048, 0)
    form = next(form for form in SERVICE_FORMS if form.stack == "vllm")
    starts = put_in(form, [entry.start for entry in form.free])
    for prompt, is_captured in ((1024, True), (4096, False)):
        load = ServiceLoad(streams=1, input_tokens=prompt, output_tokens=16)
        row = replace(service("qwen3-30b-a3b", "h100-80gb-sxm", 1), load=load)
        launched, replayed = (predicted_of(case_of(replace(row, graph_tokens=tokens)), starts) for tokens in (0, 2048))
        assert replayed["tpot"] == launched["tpot"]
        assert (replayed["ttft"] < 0.75 * launched["ttft"]) == is_captured
        assert is_captured or replayed["ttft"] == launched["ttft"]


def test_between_pieces_of_a_graph_attention_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that was replayed was launched as a step of decode is, which is one graph; its graphs end at each attention."""
    form = next(form for form in SERVICE_FORMS if form.stack == "vllm")
    starts = put_in(form, [entry.start for entry in form.free])
    starts = replace(starts, prefill=replace(starts.prefill, launch_p=1.0))  # what is launched is added
    row = replace(service("qwen3-30b-a3b", "h100-80gb-sxm", 1), graph_tokens=2048)
    called = predicted_of(case_of(row), starts)
    monkeypatch.setattr(truth, "ATTENTION_CALL_S", 0.0)
    whole = predicted_of(case_of(row), starts)
    assert called["ttft"] == pytest.approx(whole["ttft"] + 48 * 150e-6, rel=1e-3)
    assert called["tpot"] == whole["tpot"]


def test_experts_of_triton_are_launched_as_vllms_whatever_the_software() -> None:
    """`moe_config: backend: TRITON` in TensorRT-LLM's recipe for gpt-oss on H200, and on no other device."""
    gpt_oss = {"model_path": "openai/gpt-oss-120b", "precision": "fp4", "backend": "trtllm"}
    told = [
        read(row_of(**fields))[0][0].has_triton_experts
        for fields in (
            gpt_oss | {"system": "h200_sxm"},
            gpt_oss | {"system": "b200_sxm"},
            gpt_oss | {"system": "h200_sxm", "backend": "vllm"},
            DEEPSEEK | {"backend_version": "x"},
        )
    ]
    assert told == [True, False, False, False]
    form = next(form for form in SERVICE_FORMS if form.stack == "tensorrt-llm")
    starts = put_in(form, [entry.start for entry in form.free])
    for model, has_experts in (("qwen3-30b-a3b", True), ("llama-3.1-8b", False)):
        row = replace(service(model, "h100-80gb-sxm", 1), stack="tensorrt-llm")
        own, tritons = (
            predicted_of(case_of(replace(row, has_triton_experts=is_told)), starts) for is_told in (False, True)
        )
        for measure in ("ttft", "tpot"):
            assert (tritons[measure] > 1.02 * own[measure]) == has_experts, (model, measure)


def test_recipes_of_2025_chose_their_layout_by_the_streams() -> None:
    """Rows of November 2025 say tensor parallel whatever ran; 64 streams had attention-data parallel, which looks rarely."""
    few, many = (
        read(row_of(**DEEPSEEK, backend_version="", concurrency=streams, measured="2025-11-02"))[0][0]
        for streams in (16, 64)
    )
    assert (few.tp, few.layout, few.load.scheduling.poll_steps) == (8, Layout(ep=8), 1)
    assert (many.tp, many.layout) == (1, Layout(dp=8, ep=8))
    assert many.load.scheduling == Scheduling(
        step_tokens=8 * 1152, ahead_steps=2, reserves_answers=True, poll_steps=60, poll_prompts=22
    )
    halves = row_of(**MINIMAX, concurrency=256, measured="2026-04-22", tp_size=2, attention_dp_size=2) | {
        "precision": "fp4", "moe_tp_size": 1, "moe_ep_size": 4,
    }  # fmt: skip
    short, long = (read(halves | lengths)[0][0] for lengths in ({}, {"isl": 8192}))
    assert (short.layout, short.load.scheduling.step_tokens) == (Layout(dp=2, ep=2), 4096)
    assert (long.layout, long.load.scheduling.step_tokens) == (Layout(ep=2), 16_384)


def test_a_row_without_a_date_that_states_its_whole_split_is_a_recipes() -> None:
    """They repeat dated ones, number for number, and were run as streams of equal lengths."""
    dated, repeated, others = row_of(), row_of(measured=""), row_of(measured="", attention_dp_size="")
    rows, left_out = read(dated, repeated, others)
    assert [one.load.spread for one in rows] == [0.8, 1.0]
    assert left_out["the same row once more"] == 1


def test_a_pool_is_what_the_engine_gives_itself() -> None:
    """SGLang's share holds weights and KV alone; TensorRT-LLM's is of what the rest leaves."""
    row = service("llama-3.1-8b", "h100-80gb-sxm", 4)
    rules = (MemoryRule(), MemoryRule(share=0.95), MemoryRule(has_buffers=False), MemoryRule(is_of_free=True))
    usual, most, beside, of_free = (
        capacity_of(case_of(row).setup, context_tokens=320, batch=1, rule=rule) for rule in rules
    )
    buffers = usual.activation_bytes + 2e9
    assert most.free_kv_bytes - usual.free_kv_bytes == pytest.approx(0.05 * usual.memory_bytes)
    assert beside.free_kv_bytes - usual.free_kv_bytes == pytest.approx(buffers)
    assert of_free.free_kv_bytes == pytest.approx(0.9 * (usual.memory_bytes - usual.weight_bytes - buffers))
    crowded = replace(row, load=replace(row.load, input_tokens=60_000, streams=8))
    assert case_of(crowded).is_short_of_kv
    assert not case_of(replace(crowded, memory=MemoryRule(share=0.98, has_buffers=False))).is_short_of_kv


def test_keys_and_values_are_held_as_recipes_and_checkpoints_ask() -> None:
    """They were taken to have 8 bits wherever weights have: 512 streams of gpt-oss on two H100 wait 113 s, and 20 were said."""
    rows, _ = read_deployments(data_text("service_rows.csv"))
    found = {(row.stack, row.model, row.quant, row.device): row.kv for row in rows}
    gpt_oss = {
        device: kv for (_, model, quant, device), kv in found.items() if (model, quant) == ("gpt-oss-120b", "mxfp4")
    }
    assert gpt_oss == {"b200-180gb": "fp8", "h100-80gb-sxm": "bf16", "h200-141gb-sxm": "bf16"}
    assert found["vllm", "llama-3.1-70b", "fp8", "h200-141gb-sxm"] == "fp8"
    assert found["vllm", "minimax-m2", "fp8", "h200-141gb-sxm"] == "bf16"
    assert {row.kv for row in rows if row.stack == "vllm" and row.device == "b200-180gb" and row.quant == "fp8"} == {
        "bf16",
        "fp8",
    }
    assert {row.kv for row in rows if row.quant == "fp4"} == {"fp8"}
    assert {row.kv for row in rows if row.quant in ("bf16", "int4")} == {"bf16"}


def test_the_shipped_rows_are_read() -> None:
    rows, left_out = read_deployments(data_text("service_rows.csv"))
    assert len(rows) > 2000
    assert {row.stack for row in rows} == {"tensorrt-llm", "vllm", "sglang"}
    assert sum(left_out.values()) < len(rows) / 2


def test_the_largest_loads_go_first_and_rows_keep_their_order() -> None:
    """A bar that counted rows stood still for minutes; one process was left with the largest load at the end."""
    rows = [service("llama-3.1-8b", "h100-80gb-sxm", streams) for streams in (2, 12, 1, 12, 6)]
    told: list[tuple[int, int]] = []
    cases = truth.cases_of(rows, told=lambda done, of: told.append((done, of)))
    assert [case.row for case in cases if case is not None] == rows
    assert told == [(64 * done, 64 * 21) for done in (12, 18, 20, 21)]
