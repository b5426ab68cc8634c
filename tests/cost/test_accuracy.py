"""The gate: the planner's error on frozen published rows may not grow."""

from __future__ import annotations

import json
import re

import pytest

from diptych.cli.plan_text import show_accuracy
from diptych.cost.fitting import accuracy, held_out
from diptych.cost.fitting.accuracy import (
    ServiceError,
    leave_one_model_out,
    near_rows,
    refit,
    service_errors,
    summarise,
    uncovered,
)
from diptych.cost.fitting.fit import fit
from diptych.cost.fitting.forms import NEUTRAL_FORMS
from diptych.cost.fitting.held_out import check, hold_back
from diptych.cost.fitting.rows import read_rows, read_service_rows, text_of
from diptych.cost.setup import setup_of
from diptych.cost.tables import data_text, device_spec
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.shape import StepShape

# Medians asked for by the issue, on rows not used for that device's fit.
DECODE_LIMIT = 0.08
PREFILL_LIMIT = 0.10


@pytest.fixture(autouse=True, scope="module")
def each_fit_is_made_once():
    """Nearly half of them rest on the same rows under the same form, whose constants are the same."""
    known = {}

    def fit_once(form, rows):
        key = id(form), tuple(rows)  # the forms are constants of their module; rows are equal by all that they say
        if key not in known:
            known[key] = fit(form, rows)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (accuracy, held_out):
            patch.setattr(module, "fit", fit_once)
        yield


@pytest.fixture(scope="module")
def rows():
    return read_rows(data_text("published_rows.csv"))[0]


@pytest.fixture(scope="module")
def auxiliary():
    return read_rows(data_text("auxiliary_rows.csv"))[0]


@pytest.fixture(scope="module")
def evidence(rows, auxiliary):
    """All rows held back: by model, and along every axis on which a question can leave them."""
    everything = [*rows, *auxiliary]
    return near_rows(leave_one_model_out(everything)), hold_back(everything)


def test_intervals_of_80_percent_hold_70_to_90_percent_of_rows_left_out(evidence):
    """They were as narrow far from the rows as near them: "surely meets" held for 10 of 22 services.

    Each group (software, device, model) is judged by residuals and widths of all others; shares by phase and axis.
    """
    holdings = check(*evidence)
    axes = {holding.group.partition(", ")[2] for holding in holdings}
    assert axes == {"model", "device", "vendor", "format", "mixture", "batch", "split", "length"}
    assert sum(holding.rows for holding in holdings) > 2000
    for holding in holdings:
        assert 0.70 <= holding.share <= 0.90 + 1.0 / holding.rows, holding


def test_surely_meets_holds_for_the_running_services():
    """The slow end of an interval is what a promise rests on; 10 of 22 held before intervals grew with distance."""
    errors = service_errors(read_service_rows(data_text("published_rows.csv")))
    kept = [e.row.measured >= e.low if e.row.measure == "throughput" else e.row.measured <= e.high for e in errors]
    assert sum(kept) >= 0.8 * len(kept)
    assert 0.7 <= sum(e.is_held for e in errors) / len(errors) <= 0.9


def test_mixtures_are_modelled_by_dtype_and_stack_or_said_to_be_unmeasured():
    """One share of the peak stood for every dtype and stack: Mixtral came out at 38.8 ms by one and 498 by another."""
    work = StepShape.prefill(batch=1, new_tokens=2048)
    times = []
    for stack in ("tensorrt-llm-2024", "tensorrt-llm", "vllm", "llama.cpp-cuda"):
        setup = setup_of("mixtral-8x7b", "h100-80gb-sxm", weights="fp8", tp=2, stack=stack)
        cost = setup.model_of_time().predict(work)
        gaps = {gap.axis for gap in setup.model_of_time().gaps(work)}
        assert ("mixture" in gaps) == (stack in ("vllm", "llama.cpp-cuda")), stack
        assert cost.high_s / cost.low_s > (2.0 if "mixture" in gaps else 1.2)
        times.append(cost.total_s)
    assert max(times) < 3.0 * min(times)


def test_held_out_error_stays_within_the_promised_medians(rows, auxiliary):
    """Every covered row is judged by constants fitted without its model (or without its device)."""
    errors = leave_one_model_out(rows, auxiliary=auxiliary)
    medians = {summary.group: summary for summary in summarise(errors)}
    decode, prefill = medians["decode"], medians["prefill"]
    assert decode.rows >= 90
    assert prefill.rows >= 90
    assert decode.median <= DECODE_LIMIT
    assert prefill.median <= PREFILL_LIMIT
    assert decode.median < decode.bound_median / 3
    assert prefill.median < prefill.bound_median / 3
    assert len(uncovered(rows)) == 2  # one Vulkan device


def test_the_medians_do_not_rest_on_forms_chosen_for_each_software(rows, auxiliary):
    """The forms were chosen on these rows; one neutral form for all of them bounds what that choice may have flattered."""
    errors = leave_one_model_out(rows, auxiliary=auxiliary, forms=NEUTRAL_FORMS)
    medians = {summary.group: summary.median for summary in summarise(errors)}
    assert medians["decode"] <= 1.5 * DECODE_LIMIT
    assert medians["prefill"] <= 1.5 * PREFILL_LIMIT


def test_no_row_is_judged_by_a_fit_that_saw_it(rows, auxiliary):
    """Corrupting the rows of one model and device must not change what is predicted for them."""
    target = ("a100-80gb-sxm", "mixtral-8x7b", Phase.DECODE)

    def is_target(row) -> bool:
        return (row.device, row.model, row.phase) == target

    def predictions(of_rows):
        errors = leave_one_model_out([row for row in of_rows if row.stack == "gpt-fast"], auxiliary=auxiliary)
        return [error.predicted_s for error in errors if is_target(error.row)]

    honest = predictions(rows)
    assert honest
    for wrong in (row for row in rows if is_target(row)):
        object.__setattr__(wrong, "measured_s", wrong.measured_s * 10)
    try:
        assert predictions(rows) == honest
    finally:
        for wrong in (row for row in rows if is_target(row)):
            object.__setattr__(wrong, "measured_s", wrong.measured_s / 10)


def test_shipped_calibrations_are_the_fit_of_the_shipped_rows(evidence):
    """Data that nobody can reproduce is not evidence: refitting must give the file."""
    shipped = json.loads(data_text("calibrations.json"))["calibrations"]
    again = json.loads(json.dumps(refit(*evidence)))
    assert [(entry["stack"], entry["phase"], entry["device"]) for entry in again] == [
        (entry["stack"], entry["phase"], entry["device"]) for entry in shipped
    ]
    for new, old in zip(again, shipped, strict=True):
        for name in ("layer_s", "p", "kv_eb", "link_fraction"):
            assert new["constants"][name] == pytest.approx(old["constants"][name], rel=0.02), (old["stack"], name)
        assert new["widths"] == pytest.approx(old["widths"], abs=0.02), old["stack"]
        assert new["residual"]["median_error"] == pytest.approx(old["residual"]["median_error"], abs=0.01)


def test_running_services_are_predicted_from_both_phases():
    """TTFT, TPOT with its prefill tax, and throughput of services that no fit saw; single streams come out closest."""
    errors = service_errors(read_service_rows(data_text("published_rows.csv")))
    assert len(errors) >= 20
    single = [abs(error.error) for error in errors if error.row.batch == 1]
    assert len(single) == 4
    assert max(single) < 0.15
    sizes = sorted(abs(error.error) for error in errors)
    assert sizes[len(sizes) // 2] < 0.25


def test_rows_are_read_with_units_and_names():
    """tok/s of a prompt are prompt tokens; ms are ms; unknown hardware is counted, not guessed."""
    header = "system,hardware,model,precision,tp,batch,prompt,gen,phase,value,unit,source\n"
    text = header + (
        "llama.cpp Metal,M1 Pro16,Llama-2-7B,Q4_0,1,1,512,0,prefill,256,tok/s,x\n"
        "gpt-fast,A100-80,Llama-2-7B,bf16,1,1,5,200,decode,100,tok/s,x\n"
        "TensorRT-LLM 0.9,H100,Llama-2-7B,fp8,1,1,128,1,prefill,6.3,ms,x\n"
        "gpt-fast,Abacus,Llama-2-7B,bf16,1,1,5,200,decode,100,tok/s,x\n"
        "vLLM 0.19,RTX4090,Llama-3.1-8B,bf16,1,open loop,s,s,TTFT mean,65460,ms,x\n"
    )
    found, left_out = read_rows(text)
    assert left_out == 2
    assert [row.device for row in found] == ["m1-pro-16", "a100-80gb-sxm", "h100-80gb-sxm"]
    assert [row.measured_s for row in found] == pytest.approx([2.0, 0.01, 0.0063])
    assert found[1].work.shapes[0].start_pos + 1 == 105
    with pytest.raises(ConfigError, match="no column"):
        read_rows("a,b\n1,2\n")


def test_every_shipped_row_names_its_source(rows, auxiliary):
    """Published numbers are plain facts; a fact still needs a place to check it."""
    assert len(rows) + len(auxiliary) > 300
    for row in [*rows, *auxiliary]:
        assert row.source.split(": ", 1)[1].strip()
        assert device_spec(row.device)


HEAD = "system,hardware,model,precision,tp,batch,prompt,gen,phase,value,unit,source"
ROW = "gpt-fast,A100-80,llama-2-7b,bf16,1,1,5,200,decode,{},{},a test"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ROW.format("fast", "ms"), "line 3 of the rows: value is 'fast'; it must be a number greater than 0"),
        (ROW.format("0", "tok/s"), "line 3 of the rows: value is '0'"),
        (ROW.format("nan", "ms"), "line 3 of the rows: value is 'nan'"),
        ("gpt-fast,A100-80,llama-2-7b", "line 3 of the rows ends before precision"),
        ('"' + "x" * 200_000, "line 3 of the rows is no CSV: field larger than field limit"),
    ],
)
def test_damaged_rows_are_told_by_line(line, words):
    """Each ended in a traceback."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        read_rows("\n".join((HEAD, ROW.format("9.5", "ms"), line)))


def test_a_number_that_is_none_leaves_a_row_out():
    """A superscript counted as a digit, and an answer of no tokens divided by nothing."""
    odd = ROW.format("9", "ms").replace(",1,1,5,", ",²,1,5,")
    assert read_rows("\n".join((HEAD, odd))) == ([], 1)
    empty = "gpt-fast,A100-80,llama-2-7b,bf16,1,1,5,0,TPOT,9,ms,a test"
    assert read_service_rows("\n".join((HEAD, empty))) == []


@pytest.mark.parametrize(
    "change", [(",1,1,5,", ",3,1,5,"), (",1,1,5,", ",16,1,5,"), ("bf16", "fp32"), (",5,", "," + 5000 * "9" + ",")]
)
def test_a_row_that_cannot_be_is_left_out(change):
    """Devices that cannot share the model, or multiply it: one such row was the end of all others, without its line."""
    odd = ROW.format("9", "ms").replace("A100-80", "H800").replace(*change)
    assert read_rows("\n".join((HEAD, odd, ROW.format("9", "ms"))))[1] == 1


def test_a_rows_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((HEAD, ROW.format("9", "ms"))), "utf-8-sig")
    assert len(read_rows(text_of(file))[0]) == 1


def test_a_rows_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_bytes(b"\xff\xfe" + HEAD.encode("utf-16-le"))
    with pytest.raises(ConfigError, match="it is no UTF-8 text"):
        text_of(file)
    with pytest.raises(ConfigError, match="cannot read"):
        text_of(tmp_path)


def test_the_median_of_an_even_number_lies_between_two(capsys):
    """Of 22 services the twelfth was called the median."""
    text = data_text("published_rows.csv")
    rows = [row for row in read_service_rows(text) if row.measure == "tpot"][:2]
    errors = [ServiceError(row=row, predicted=row.measured * by, low=0.0, high=1e9)
              for row, by in zip(rows, (1.1, 1.3), strict=True)]  # fmt: skip
    show_accuracy([], errors, [], uncovered=0, left_out=0)
    assert "median 20% over 2 rows" in capsys.readouterr().out
