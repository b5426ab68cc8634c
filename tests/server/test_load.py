"""The load generator: what it sends is seeded, what it reports is honest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from diptych.cli import bench_serve
from diptych.cli.bench_serve import app
from diptych.ground.errors import ConfigError
from diptych.lab.http_client import HttpClient
from diptych.lab.load import WORDS, LoadConfig, SentRequest, bodies, carries_output, run_load, summarize
from diptych.lab.load_picture import draw, draw_rate
from server_process import ServerProcess


def test_bodies_depend_on_the_seed_only() -> None:
    config = LoadConfig(
        url="http://x", requests=5, prompt_tokens=(10, 20), new_tokens=(1, 4), vocab_size=100, shared_prefix_tokens=8
    )
    first, again = bodies(config), bodies(config)
    assert first == again
    assert len({tuple(body["prompt"][:8]) for body in first}) == 1
    assert all(18 <= len(body["prompt"]) <= 28 and 1 <= body["max_tokens"] <= 4 for body in first)
    assert bodies(LoadConfig(url="http://x", requests=5, seed=1)) != bodies(
        LoadConfig(url="http://x", requests=5, seed=2)
    )


def test_a_chat_is_words_whatever_ids_there_are() -> None:
    """Ids were sent as text of numerals, several tokens each, as if the lengths were exact."""
    (chat,) = bodies(LoadConfig(url="http://x", endpoint="chat", requests=1, prompt_tokens=(9, 9), vocab_size=10**6))
    assert set(chat["messages"][0]["content"].split(" ")) <= set(WORDS)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
def test_a_file_that_cannot_be_written_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk behind --out took an hour's numbers with it: they were printed behind the writing."""

    async def sent(config: LoadConfig, **_: object) -> list[SentRequest]:
        return [outcome(0, due_s=0.0, events=[1.0, 1.1])]

    monkeypatch.setattr(bench_serve, "run_load", sent)
    told = CliRunner().invoke(app, ["--requests", "1", "--out", "/dev/full"])
    assert isinstance(told.exception, OSError)
    assert "answered 1 of 1" in told.stdout


def outcome(number: int, *, due_s: float, events: list[float], error: str | None = None) -> SentRequest:
    done = SentRequest(number=number, due_s=due_s, sent_s=due_s + 0.5, event_s=events, error=error)
    done.end_s, done.output_tokens = (events[-1] if events else due_s + 1.0), len(events)
    return done


def test_latency_counts_from_when_a_request_was_due_and_failures_are_misses() -> None:
    """A client that sends late must not hide the queue it stood in, nor a refusal improve the goodput."""
    config = LoadConfig(url="http://x", requests=3, ttft_objective_s=2.0, tpot_objective_s=0.2)
    outcomes = [
        outcome(0, due_s=0.0, events=[1.0, 1.1, 1.2]),
        outcome(1, due_s=1.0, events=[4.5, 4.6]),
        outcome(2, due_s=2.0, events=[], error="status 503: busy"),
    ]
    summary = summarize(config, outcomes)
    assert summary["ttft_s"]["p50"] == pytest.approx((1.0 + 3.5) / 2)
    assert summary["lag_s"]["p50"] == pytest.approx(0.5)
    assert summary["itl_s"]["p50"] == pytest.approx(0.1)
    assert summary["tpot_s"]["p50"] == pytest.approx(0.1)
    assert summary["answered"] == 2
    assert summary["attainment"] == pytest.approx(1 / 3)
    assert sum(summary["failed"].values()) == 1
    assert set(summary["definitions"]) >= {"ttft_s", "itl_s", "tpot_s", "goodput_per_s"}


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, False),
        ({"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "x"}, "finish_reason": None}]}, True),
        ({"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"text": "x", "finish_reason": None}]}, True),
        ({"choices": [], "usage": {}}, False),
    ],
)
def test_only_events_with_output_count_as_tokens(chunk: dict[str, object], expected: bool) -> None:
    assert carries_output(chunk) is expected


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_open_and_closed_loop_against_the_server(server: ServerProcess, endpoint: str) -> None:
    for extra in ({"rate_per_s": 50.0}, {"concurrency": 3}):
        config = LoadConfig(
            url=server.url,
            endpoint=endpoint,
            requests=6,
            prompt_tokens=(5, 20),
            new_tokens=(4, 6),
            **extra,  # type: ignore[arg-type]
        )
        outcomes = asyncio.run(run_load(config))
        assert [one.error for one in outcomes] == [None] * 6
        assert [one.number for one in outcomes] == list(range(6))
        for one in outcomes:
            assert 4 <= one.output_tokens <= 6
            assert len(one.event_s) >= one.output_tokens - 1
            assert one.timings is not None
            assert one.due_s <= one.sent_s <= one.event_s[0] <= one.end_s


def test_a_refused_connection_is_a_failure_with_a_name() -> None:
    outcomes = asyncio.run(run_load(LoadConfig(url="http://127.0.0.1:9", requests=2, concurrency=1, timeout_s=5)))
    assert all(one.error is not None and "no connection" in one.error for one in outcomes)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"data: hello\n\ndata: [DONE]\n\n", "an event is no chunk of an answer: hello"),
        (b"data: [1]\n\ndata: [DONE]\n\n", "an event is no chunk of an answer: [1]"),
        (b'data: {"choices": [], "usage": 7}\n\ndata: [DONE]\n\n', "an event is no chunk of an answer"),
        (None, "connection broke: ValueError: the answer begins with 'SSH-2.0', which is no HTTP"),
    ],
)
def test_a_server_of_another_kind_is_a_failure_with_a_name(answer: bytes | None, error: str) -> None:
    """The run ended in a traceback, and what it had seen was gone."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"SSH-2.0\r\n\r\n" if answer is None else b"HTTP/1.1 200 OK\r\n\r\n" + answer)
        writer.close()

    async def run() -> list[SentRequest]:
        async with await asyncio.start_server(other, "127.0.0.1", 0) as listener:
            host, port = listener.sockets[0].getsockname()
            return await run_load(LoadConfig(url=f"http://{host}:{port}", requests=2, concurrency=1, timeout_s=5))

    assert all(one.error is not None and one.error.startswith(error) for one in asyncio.run(run()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--url", "http://127.0.0.1:port"), "it must look like http://HOST:PORT"),
        (("--url", "http://[::1"), "it must look like http://HOST:PORT"),
        (("--prompt-tokens", "\u00b2"), "it must be N or LOW:HIGH"),
        (("--new-tokens", "9" * 5000), "it must be N or LOW:HIGH"),
        (("--timeout-s", "nan"), "--timeout-s is nan"),
        (("--timeout-s", "inf"), "--timeout-s is inf"),
        (("--ttft-ms", "-1"), "--ttft-ms is -1.0"),
        (("--rate", "nan"), "rate is nan"),
        (("--endpoint=chat", "--vocab-size=9"), "a chat has texts alone"),
        (("--picture", "run.foo"), "run.foo ends in .foo"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_request_is_sent(options: tuple[str, str], words: str) -> None:
    """Most of these were tracebacks, the picture's behind the whole load."""
    told = CliRunner().invoke(app, ["--requests", "1", *options])
    assert isinstance(told.exception, ConfigError)
    assert words in str(told.exception)
    assert CliRunner().invoke(app, ["--vocab-size", "0"]).exit_code == 2


def test_a_picture_without_an_ending_is_the_file_that_was_named(tmp_path: Path) -> None:
    """It was written beside it, to another name."""
    draw([outcome(0, due_s=0.0, events=[1.0])], {"output_tokens_per_s": None, "wall_s": 1.0}, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bars_of_a_rate_are_as_large_as_what_they_count() -> None:
    """They lay between the first and the last event, and were divided by parts of the whole run: of a tenth of it, a tenth."""
    axes = Figure().subplots()
    draw_rate(axes, [outcome(n, due_s=4.0, events=[5.0 + n / 10, 5.5, 6.0]) for n in range(4)])
    assert sum(bar.get_height() * bar.get_width() for bar in axes.patches) == pytest.approx(12)
    assert axes.patches[0].get_x() == pytest.approx(0.0, abs=1e-9)


def test_the_command_writes_json_and_a_picture(server: ServerProcess, tmp_path: Path) -> None:
    out, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = [
        "--url",
        server.url,
        "--requests",
        "4",
        "--concurrency",
        "2",
        "--new-tokens",
        "3",
        "--prompt-tokens",
        "4:8",
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--picture", str(picture), "--explain"])
    assert result.exit_code == 0, result.output
    assert "answered 4 of 4" in result.output
    assert "time to first token: from when the request was due" in result.output
    assert len(json.loads(out.read_text())["outcomes"]) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_says_why_requests_failed(server: ServerProcess) -> None:
    """All it said was "120 x status 400", of prompts with ids beyond the vocabulary."""
    arguments = ["--url", server.url, "--requests", "2", "--concurrency", "1", "--vocab-size", str(10**6)]
    result = CliRunner().invoke(app, arguments)
    assert "answered 0 of 2" in result.output
    assert "2 x status 400" in result.output
    assert "for example status 400: " in result.output
    assert "ids are whole numbers between 0 and" in result.output.replace("\n", " ")


def test_a_connection_closed_while_idle_costs_no_request() -> None:
    """Servers close idle connections at any moment; the request that crosses the closing was never read."""
    n_answered = 0

    async def one_answer_per_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_answered
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            n_answered += 1
            await reader.read(1)  # the next request arrives and is dropped with the connection
        finally:
            writer.close()

    async def run() -> int:
        async with await asyncio.start_server(one_answer_per_connection, "127.0.0.1", 0) as listener:
            host, port = listener.sockets[0].getsockname()
            client = HttpClient(f"http://{host}:{port}")
            assert [await client.get("/") for _ in range(3)] == [b"ok"] * 3
            await client.close()
            return client.n_stale

    assert asyncio.run(run()) == 2
    assert n_answered == 3
