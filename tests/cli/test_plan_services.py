"""`diptych plan accuracy --services` from the command line to its tables, on a few rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.cli import plan, plan_services
from diptych.cost import stacks
from diptych.cost.calibration import Constants
from diptych.cost.fitting.fit import Free
from diptych.cost.fitting.service_forms import ServiceForm
from diptych.cost.tables import device_spec
from diptych.sim import service_fits, truth

HEAD = (
    "backend,backend_version,model_path,system,precision,mode,isl,osl,tp_size,pp_size,attention_dp_size,moe_tp_size,"
    "moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,measured,concurrency\n"
)
PUBLISHED = "system,hardware,model,precision,tp,batch,prompt,gen,phase,value,unit,source\n"


def line(model: str, streams: int, *, ttft_ms: float = 60.0, tpot_ms: float = 9.0, mode: str = "agg") -> str:
    return f"vllm,1,{model},h100_sxm,,{mode},256,64,1,1,1,1,1,{ttft_ms},{tpot_ms},2026-01-01,{streams}\n"


@pytest.fixture(autouse=True)
def small_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows that are shipped, and one constant to fit."""
    free = (Free(path="decode.layer_s", start=30e-6), Free(path="request_s", start=0.02))
    for module in (truth, service_fits):
        monkeypatch.setattr(module, "SERVICE_FORMS", (ServiceForm(stack="vllm", fixed=Constants(), free=free),))
    shipped = HEAD + "".join(line(model, n) for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B") for n in (1, 4))
    texts = {plan_services.SHIPPED: shipped, "published_rows.csv": PUBLISHED}
    monkeypatch.setattr(plan_services, "data_text", texts.__getitem__)


def test_built_in_rows_are_judged_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    plan.app(["accuracy", "--services", "--json"])
    found = json.loads(capsys.readouterr().out)
    everything = found["groups"]["model"][0]
    assert (everything["by"], everything["rows"]) == ("all", 8)
    assert {row["held_out"] for row in found["rows"]} == {"model"}  # one device: nothing is left without it
    plan.app(["accuracy", "--services"])
    assert "without the row's model" in capsys.readouterr().out


def test_constants_of_all_rows_are_written_for_simulations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What services were judged by stayed in the command: `simulate` priced them by constants of single steps."""
    file = tmp_path / "services.json"
    plan.app(["accuracy", "--services", "--json", "--refit", str(file)])
    prefill, decode = json.loads(file.read_text())["calibrations"]
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert decode["constants"]["layer_s"] != pytest.approx(30e-6, rel=1e-3), "fitted"
    assert prefill["constants"]["layer_s"] == 0.0
    texts = {stacks.SERVICES: file.read_text(), stacks.STEPS: stacks.data_text(stacks.STEPS)}
    monkeypatch.setattr(stacks, "data_text", texts.__getitem__)
    stacks._entries.cache_clear()
    try:
        found = stacks.calibration_for(device_spec("h100-80gb-sxm"), stack="vllm", of_services=True)
        steps = stacks.calibration_for(device_spec("h100-80gb-sxm"), stack="vllm")
    finally:
        stacks._entries.cache_clear()
    assert found.decode.layer_s == decode["constants"]["layer_s"]
    assert found.request_s == prefill["request_s"] != pytest.approx(0.02, rel=1e-3), "fitted"
    assert steps.request_s == 0.0
    assert found.source.count("vllm, of services, fitted on this device (4 rows)") == 2
    assert (found.prefill_residual.rows, found.decode_residual.rows) == (4, 4)
    assert "of services" not in steps.source


def test_rows_of_a_file_are_judged_with_the_help_of_the_built_in_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        HEAD + line("meta-llama/Llama-3.2-3B", 2) + line("nobody/unknown", 2) + line("Qwen/Qwen3-8B", 2, mode="disagg")
    )
    plan.app(["accuracy", "--services", "--rows", str(file), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 2
    assert sum(found["left_out"].values()) == 2


@pytest.mark.parametrize(
    ("more", "words"), [(["--neutral"], "--neutral"), (["--rows", "/nowhere.csv"], "cannot read /nowhere.csv")]
)
def test_what_it_does_not_read_is_refused(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.app(["accuracy", "--services", *more])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
