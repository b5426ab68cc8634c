"""What would have been, asked of a real server about a request that it has just answered."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from typer.testing import CliRunner

from diptych.cli.explain import app
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder
from diptych.engine.engine import Engine
from diptych.ground.clock import VirtualClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import StepBeginEvent, StepEndEvent
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.metrics import EventBook
from diptych.server.watch.recent import Recent
from diptych.sim.executor import PredictedExecutor
from diptych.stepper import Stepper, serve
from server_process import ServerProcess


def answered(http: httpx.Client, prompt: str, *, max_tokens: int = 24) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return str(http.post("/v1/completions", json=body).raise_for_status().json()["id"])


def test_a_recent_request_is_run_again_with_each_change(http: httpx.Client) -> None:
    """Tokens and cache hits are the server's own: the second of two equal prompts finds the first one again."""
    text = "A long story about a lighthouse and the people who kept its lamp. " * 20
    answered(http, text)
    name = answered(http, text)
    changes = ["cached", "chunk=64", "device=l4", "device=a100-80gb-sxm"]
    found = http.get(f"/v1/requests/{name}/what-if", params={"change": changes}).raise_for_status().json()
    assert found["id"] == name
    again, cached, chunk, slow, quick = found["outcomes"]
    assert again["change"] is None
    assert again["cached_tokens"] == found["measured"]["cached_tokens"] > 0
    assert cached["cached_tokens"] >= again["cached_tokens"]
    assert quick["prefill_ms"] < slow["prefill_ms"]  # both by the planner: of this machine's own times nothing is known
    assert quick["tpot_ms"] < slow["tpot_ms"]
    assert "for gpt-fast" in quick["note"]
    for one in (again, cached, chunk, slow, quick):
        assert abs(one["ttft_ms"] - one["queue_ms"] - one["prefill_ms"]) < 0.01
    assert len(http.get(f"/v1/requests/{name}/what-if").json()["outcomes"]) == 6


def test_what_cannot_be_asked_is_refused_with_words(http: httpx.Client) -> None:
    name = answered(http, "Once")
    refused = http.get(f"/v1/requests/{name}/what-if", params={"change": "quicker"})
    assert refused.status_code == 400
    assert "cannot change 'quicker'" in refused.json()["error"]["message"]
    assert http.get("/v1/requests/nobody/what-if").status_code == 404


def test_a_server_that_keeps_nothing_says_so() -> None:
    with ServerProcess("--keep-minutes", "0", "--kv-memory-bytes", "33554432") as server:
        http = server.client()
        name = answered(http, "Once", max_tokens=2)
        refused = http.get(f"/v1/requests/{name}/what-if")
        assert refused.status_code == 404
        assert "--keep-minutes" in refused.json()["error"]["message"]


def test_a_step_longer_than_what_is_kept_ends_nothing() -> None:
    """A process that stood still for two minutes, as in a container that is paused, lost its engine at the next step."""
    clock, book = VirtualClock(), EventBook()
    engine = SimpleNamespace(on_submit=[], on_end=[], book=book, clock=clock)
    recent = Recent(cast("Engine", engine), keep_s=120.0, machine=None)
    shape = StepShape.prefill(batch=1, new_tokens=8)
    book.fold([StepBeginEvent(step_id=0, at_s=0.0, shape=shape, decode_request_ids=(), predicted_s=None)])
    book.fold([StepEndEvent(0, 600.0, 600.0, 0.0)])
    assert [one[:2] for one in recent._steps] == [(0.0, 600.0)]


def test_the_command_asks_a_server(http: httpx.Client, server: ServerProcess) -> None:
    name = answered(http, "The lamp burned all night. " * 8)
    told = CliRunner().invoke(app, ["--request", name, "--what-if", "cached", "--url", server.url])
    assert told.exit_code == 0, told.output
    for word in ("measured", "run again as it was", "its prompt cached", "TTFT", "trust the others as far"):
        assert word in told.output
    usual = CliRunner().invoke(app, ["--request", name, "--url", server.url])
    table = [line for line in usual.output.splitlines() if line.startswith("  ")]
    assert len(table) == 8
    assert max(map(len, table)) <= 80, "columns wrapped on a terminal"


def test_the_command_asks_a_recording(tmp_path: Path) -> None:
    """An afternoon that was recorded yesterday answers as a server does."""
    clock = VirtualClock()
    recorder = Recorder(
        EngineCore(
            SchedulerConfig(max_running_sequences=4), BlockConfig(n_blocks=64), model_revision="x", predict_s=None
        )
    )
    executor = PredictedExecutor(lambda shape: 1e-3 + 1e-4 * shape.n_tokens, clock)
    stepper = Stepper(recorder, executor, clock, fold=lambda events: None)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [
        Request(request_id=f"r{i}", prompt_token_ids=tuple(range(i, i + 200)), sampling=sampling, arrival_s=0.05 * i)
        for i in range(3)
    ]
    serve(stepper, requests, wait=clock.advance)
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(recorder.lines()), "utf-8")
    told = CliRunner().invoke(app, ["--request", "r1", "--recording", str(path), "--model", "llama-3.1-8b", "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    assert [one["change"] for one in found["outcomes"]] == [
        None, "cached", "chunk=512", "stall-budget=20ms", "pools", "device=h100-80gb-sxm",
    ]  # fmt: skip
    assert found["outcomes"][0]["ttft_ms"] == pytest.approx(found["measured"]["ttft_ms"], rel=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--messages FILE"),
        (["--request", "x", "--messages", "chat.json"], "--messages FILE"),
        (["--messages", "chat.json", "--what-if", "cached"], "give --request ID"),
        (["--request", "x", "--tools", "tools.json"], "--tools belongs to --messages"),
        (["--request", "x", "--recording", "run.jsonl", "--url", "http://h"], "two places to look"),
        (["--request", "x", "--recording", "/nowhere.jsonl"], "cannot read /nowhere.jsonl"),
        (["--request", "x", "--backend", "cpu"], "--request does not read --backend"),
        (["--request", "x", "--model", "bundled", "--weights", "int8"], "--request does not read --model, --weights"),
        (
            ["--request", "x", "--recording", "r", "--backend", "cpu"],
            "--request with --recording does not read --backend",
        ),
        (["--request", "x", "--recording", "r", "--api-key", "k"], "does not read --api-key"),
        (["--messages", "c", "--url", "http://h", "-m", "x"], "--messages with --url does not read --model"),
        (["--messages", "c", "--url", "http://h", "--backend", "cpu"], "does not read --backend"),
        (["--messages", "c", "--api-key", "k"], "--messages does not read --api-key"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options: list[str], words: str) -> None:
    told = CliRunner().invoke(app, options)
    assert isinstance(told.exception, ConfigError)
    assert words in str(told.exception)
