"""A real server writes down what it did; simulations read it, and nobody reads in it what was said."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from diptych.cli.explain import app as explain
from diptych.cli.simulate import app as simulate
from diptych.compute.adapters import read_adapter
from diptych.engine.engine import Engine
from diptych.engine.load import bundled_dir
from diptych.ground.clock import VirtualClock, sleep_s
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.events import StepBeginEvent, StepEndEvent
from diptych.ground.shape import AdapterShape, StepShape
from diptych.metrics import EventBook
from diptych.server.config import ServerConfig
from diptych.server.watch import journal
from diptych.sim.journal import id_digest, journal_load, journal_minutes
from lora import ALL, write_adapter
from server_process import ServerProcess

TEXT = "A long story about a lighthouse and the people who kept its lamp. " * 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The file, and the ids of two equal prompts, a chat of two choices, and the prompt twice more for an adapter."""
    folder = tmp_path_factory.mktemp("record")
    path, poet = folder / "afternoon.jsonl", write_adapter(folder / "poet", bundled_dir(), ALL)
    options = ("--record", str(path), "--kv-memory-bytes", "33554432", "--lora", f"poet={poet}")
    with ServerProcess(*options, key="top-secret-key") as server:
        http = server.client()
        body = {"prompt": TEXT, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        names = [str(http.post("/v1/completions", json=body).raise_for_status().json()["id"]) for _ in range(2)]
        chat = {"messages": [{"role": "user", "content": "Who kept it?"}], "max_tokens": 12, "n": 2}
        names.append(str(http.post("/v1/chat/completions", json=chat).raise_for_status().json()["id"]))
        body["model"] = "poet"
        names += [str(http.post("/v1/completions", json=body).raise_for_status().json()["id"]) for _ in range(2)]
        assert server.stop()[0] == 0
    return path, names


def test_nothing_said_and_no_key_stands_in_it(recorded: tuple[Path, list[str]]) -> None:
    """Times, lengths and numbers of blocks; nor can texts be tried against the numbers, as their key is gone."""
    path, names = recorded
    text = path.read_text("utf-8")
    for word in ("lighthouse", "kept", "top-secret", "user", "poet", *names):
        assert word not in text
    requests = [line["request"] for line in map(json.loads, text.splitlines()) if "request" in line]
    assert [one["id"] for one in requests] == [id_digest(name) for name in names]
    assert [len(one["output_tokens"]) for one in requests] == [1, 1, 2, 1, 1]
    first, second, *_ = requests
    assert first["blocks"] == second["blocks"], "equal prompts and greedy answers have equal blocks"
    assert second["cached_tokens"] > 0 == first["cached_tokens"]
    assert path.stat().st_mode & 0o077 == 0


def test_a_full_disk_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the error came as lines were flushed the thread was gone, and the server's end waited for it for ever."""
    monkeypatch.setattr(journal, "FLUSH_S", 0.01)
    monkeypatch.setattr(journal, "MAX_QUEUED", 4)
    book = EventBook()
    core = SimpleNamespace(config=SchedulerConfig(), block_config=BlockConfig(n_blocks=4, block_tokens=16))
    engine = SimpleNamespace(on_submit=[], on_end=[], book=book, clock=VirtualClock(), core=core)
    one = journal.Journal(cast("Engine", engine), ServerConfig(record=tmp_path / "afternoon"))
    shape = StepShape.prefill(batch=1, new_tokens=8)
    sound, one._file = one._file, os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    sound.close()
    for number in range(9):  # more than wait
        book.fold([StepBeginEvent(step_id=number, at_s=0.0, shape=shape, decode_request_ids=(), predicted_s=None)])
        book.fold([StepEndEvent(number, 1.0, 1.0, 0.0)])
        sleep_s(0.03)
    end = threading.Thread(target=one.close, daemon=True)
    end.start()
    end.join(20)
    assert not end.is_alive()


def test_an_adapter_shares_no_prefix_with_the_model(recorded: tuple[Path, list[str]]) -> None:
    """Scopes of the cache are kept: the numbers of blocks were the same for an adapter's keys and values as for the model's,
    so a simulation found in its cache what no engine would, and an adapter's request was replayed as the model's.
    """
    path, names = recorded
    entries = [line["request"] for line in map(json.loads, path.read_text("utf-8").splitlines()) if "request" in line]
    plain, adapted, again = entries[0], *entries[3:]
    assert not {*plain["blocks"]} & {*adapted["blocks"]}
    assert adapted["blocks"] == again["blocks"]
    assert (plain["adapter"], adapted["adapter"] == again["adapter"] != "") == (None, True)
    assert adapted["cached_tokens"] == 0 < again["cached_tokens"]
    sizes = [due.adapter.shape if due.adapter else None for _, due in journal_load(path).start()]
    assert sizes[0] is None
    assert sizes[-1] == sizes[-2] == AdapterShape(0, adapted["adapter_parameters"])  # a simulation did not pay for them
    assert adapted["adapter_parameters"] == read_adapter(path.parent / "poet", max_rank=64).n_parameters
    minutes, target = journal_minutes(path, names[3])
    scopes = {past.request.request_id: past.request.cache_scope for past in minutes.requests}
    assert scopes[target] == scopes[id_digest(names[4])] != scopes[id_digest(names[0])]
    for name, measured in zip(names[3:], (adapted, again), strict=True):
        told = answer_of(path, name)
        assert told["outcomes"][0]["cached_tokens"] == measured["cached_tokens"], name


def answer_of(path: Path, name: str) -> dict[str, Any]:
    told = CliRunner().invoke(
        explain, ["--request", name, "--recording", str(path), "--model", "llama-3.1-8b", "--json"]
    )
    assert told.exit_code == 0, told.output
    found: dict[str, Any] = json.loads(told.output)
    return found


def test_a_simulation_takes_it(recorded: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """The worked example of docs/capacity.md: the same requests, their shared prefix found again."""
    path, _ = recorded
    assert journal_load(path).n_requests == 6  # two choices are two requests
    simulate(["llama-3.1-8b", "--hardware", "l40s", "--trace", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["n_complete"] == 6
    entries = [json.loads(line).get("request") for line in path.read_text("utf-8").splitlines()]
    assert found["prefix_hit_tokens"] == sum(one["cached_tokens"] for one in entries if one)


def test_a_prompt_alone_has_no_output_there(tmp_path: Path) -> None:
    """It had the token that the engine wrote all the same."""
    path = tmp_path / "alone.jsonl"
    with ServerProcess("--record", str(path), "--kv-memory-bytes", "33554432") as server:
        body = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
        name = server.client().post("/v1/completions", json=body).raise_for_status().json()["id"]
        server.check_balance()
        assert server.stop()[0] == 0
    entries = [line["request"] for line in map(json.loads, path.read_text("utf-8").splitlines()) if "request" in line]
    (alone,) = entries
    assert (alone["max_tokens"], alone["output_tokens"], alone["seen"]["ttft_s"]) == (0, [0, 0], None)
    assert journal_load(path).n_requests == 2
    minutes, target = journal_minutes(path, name)
    assert [(past.request.request_id, past.request.only_reads) for past in minutes.requests] == [(target, True)]


def test_what_if_takes_it(recorded: tuple[Path, list[str]]) -> None:
    path, names = recorded
    found = answer_of(path, names[1])
    again = found["outcomes"][0]
    assert again["cached_tokens"] == found["measured"]["cached_tokens"] > 0
    page = CliRunner().invoke(explain, ["--request", names[1], "--recording", str(path), "--model", "bundled"]).output
    assert re.search(r"as it was, TTFT is [+-]\d+% and TPOT is [+-]\d+% off what was measured", page), page
    with pytest.raises(ConfigError, match=r"no request 'nobody' in afternoon\.jsonl"):
        journal_minutes(path, "nobody")


def test_a_full_recording_ends_with_a_word_and_the_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    with ServerProcess(
        "--record", str(path), "--max-record-bytes", "65536", "--kv-memory-bytes", "33554432", "--log-level", "warning"
    ) as server:
        http = server.client()
        body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
        for _ in range(4):
            http.post("/v1/completions", json=body).raise_for_status()
        code, log = server.stop()
    assert code == 0
    assert path.stat().st_size <= 65536
    assert "recording ends: it is full" in log
    assert journal_load(path).n_requests >= 1


def test_a_server_that_was_killed_starts_again_by_the_same_command(tmp_path: Path) -> None:
    """Its recording was there, so that whoever watches over it started it in vain, again and again."""
    path = tmp_path / "afternoon.jsonl"
    options = ("--record", str(path), "--kv-memory-bytes", "33554432", "--log-level", "warning")
    body = {"prompt": "Once", "max_tokens": 4}
    with ServerProcess(*options) as server:  # at whose end it is killed
        server.client().post("/v1/completions", json=body).raise_for_status()
    left = path.read_bytes()
    with ServerProcess(*options) as server:
        server.client().post("/v1/completions", json=body).raise_for_status()
        code, log = server.stop()
    assert code == 0
    assert "afternoon-2.jsonl" in log
    assert path.read_bytes() == left
    assert journal_load(tmp_path / "afternoon-2.jsonl").n_requests == 1


def test_another_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "there.jsonl"
    path.write_text("mine")
    again, file = journal.new_file(path)
    file.close()
    assert (again.name, path.read_text()) == ("there-2.jsonl", "mine")
    with pytest.raises(ConfigError, match="it is no file"):
        ServerConfig(record=tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        ServerConfig(record=tmp_path / "no" / "x.jsonl")


def test_a_damaged_journal_names_its_line(tmp_path: Path, recorded: tuple[Path, list[str]]) -> None:
    lines = recorded[0].read_text("utf-8").splitlines(keepends=True)
    path = tmp_path / "bad.jsonl"
    path.write_text("".join([*lines[:2], "{]\n", *lines[2:]]))
    with pytest.raises(ConfigError, match=r"bad.jsonl line 3 cannot be read"):
        journal_load(path)
    path.write_text("".join(lines)[:-5])  # as a crash leaves it
    assert journal_load(path).n_requests <= 6
