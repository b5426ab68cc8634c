from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from diptych.cli.asked import fields_of, headers_of, refusal
from diptych.cli.explain import app, text_of
from diptych.ground.errors import ConfigError
from diptych.insight.explanation import Part, explain, volatile_spot
from server_process import ServerProcess


def part(name: str, tokens: int, cost_s: float) -> Part:
    return Part(name=name, tokens=tokens, cost_s=cost_s, cached_tokens=0)


CHAT = [
    part("system", 100, 1.0),
    part("turn 1 user", 50, 0.5),
    part("new message", 30, 0.3),
    part("generation prompt", 4, 0.1),
]


def test_the_next_turn_reuses_whole_blocks_before_the_generation_prompt() -> None:
    found = explain(CHAT, source="measured", block_tokens=32)
    assert found.next_turn_tokens == 160  # of 180, in blocks of 32
    assert found.new_chat_tokens == 96
    assert found.new_chat_saved_s == pytest.approx(0.96)
    assert found.reorderings == []


def test_a_bound_says_why_it_is_no_prediction() -> None:
    """On a GPU it advised to measure the processor, which it would not have used."""
    gap = "this GPU was never measured (diptych lab calibrate --device cuda)"
    found = text_of(explain(CHAT, source="bound", block_tokens=32), gap)
    assert f"the least this machine's ceilings allow; no prediction: {gap})" in found


def test_a_time_of_a_small_model_is_told() -> None:
    """All of a prompt that took 20 us took "0.0 ms", part by part."""
    found = text_of(explain([part("new message", 12, 14e-6)], source="predicted", block_tokens=32))
    assert "prefill 14 us (predicted" in found
    assert found.count("14 us") == 2


def test_a_clock_in_the_system_prompt_costs_the_whole_cache() -> None:
    """The most common way to lose a prefix cache, and the cheapest to mend."""
    found = explain(CHAT, source="measured", block_tokens=32, volatile=[("system", 0, 10, "a time")])
    assert found.next_turn_tokens == 0
    assert found.reorderings[0].saved_tokens == 160
    assert found.reorderings[0].saved_s == pytest.approx(1.6), "of the whole blocks that are saved"
    assert "a time" in found.reorderings[0].what


def test_tools_behind_a_question_should_stand_first() -> None:
    found = explain([part("turn 1 user", 50, 0.5), part("tools", 200, 2.0)], source="bound", block_tokens=32)
    assert [(one.saved_tokens, one.saved_s) for one in found.reorderings] == [(192, pytest.approx(1.92))]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("now 14:05", "a time"),
        ("on 2026-01-31 we", "a date"),
        ("March 5, 2026", "a date"),
        ("Today Date: 26 Jul 2024", "a date"),
        ("Sat Jan 31 2026", "a date"),
        ("at 2026-01-31T14:05:00Z", "a date"),
        ("the Decembrists of 1825, in Juniper 2024", None),
        ("id 123e4567-e89b-12d3-a456-426614174000", "an id"),
        ("chapter 3 verse 16", None),
    ],
)
def test_changing_text_is_recognised(text: str, what: str | None) -> None:
    spot = volatile_spot(text)
    assert (None if spot is None else spot[1]) == what


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def test_a_prediction_reads_a_chat_as_the_server_does(server: ServerProcess, tmp_path: Path) -> None:
    """Content in parts, a developer turn and a call with its arguments as text used to be counted differently."""
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "utc"}'}}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": " Be kind."}],
        },
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    chat, tools = tmp_path / "chat.json", tmp_path / "tools.json"
    chat.write_text(json.dumps(messages))
    tools.write_text(json.dumps([TOOL]))
    options = ["--messages", str(chat), "--tools", str(tools), "--json"]
    parts = []
    for where in (["--url", server.url], ["--backend", "torch"]):
        result = CliRunner().invoke(app, [*options, *where])
        assert result.exit_code == 0, result.output
        parts.append([(one["name"], one["tokens"]) for one in json.loads(result.stdout)["parts"]])
    assert parts[0] == parts[1]
    assert "tools" in dict(parts[0])


def test_a_file_that_is_no_chat_is_refused_by_name(tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    for content, words in (
        ([], "holds no messages"),
        ([{"role": "king", "content": "x"}], "messages[0].role is 'king'"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}, "tools is"),
    ):
        chat.write_text(json.dumps(content))
        result = CliRunner().invoke(app, ["--messages", str(chat)])
        assert isinstance(result.exception, ConfigError)
        assert words in str(result.exception)


@pytest.mark.parametrize(("on_server", "in_parts"), [(True, False), (False, False), (False, True)])
def test_the_command_explains_a_chat(server: ServerProcess, tmp_path: Path, on_server: bool, in_parts: bool) -> None:
    """In content of parts no date was seen, so all of the prompt was said to be reused."""
    system = "You are brief. Today is 2026-01-31. " + "Be polite. " * 20
    chat = [
        {"role": "system", "content": [{"type": "text", "text": system}] if in_parts else system},
        {"role": "user", "content": "Hello?"},
    ]
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(chat))
    where = ["--url", server.url] if on_server else ["--backend", "torch"]
    result = CliRunner().invoke(app, ["--messages", str(file), "--json", *where])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [one["name"] for one in found["parts"]] == ["system", "new message", "generation prompt"]
    assert sum(one["cost_s"] for one in found["parts"]) == pytest.approx(found["prefill_s"])
    assert found["prefill_s"] > 0
    assert found["reorderings"][0]["saved_tokens"] > 0
    assert (found["source"] == "measured") is on_server


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            httpx.Response(404, json={"error": {"message": "no request 'x' is open"}}),
            "it answers 404: no request 'x' is open",
        ),
        (httpx.Response(401, json={"error": {"message": "no key"}}), "no key\nhint: give its key with --api-key"),
        (httpx.Response(502, text="<html>bad gateway"), "it answers 502: <html>bad gateway"),
        (httpx.Response(400, json=["x"]), 'it answers 400: ["x"]'),
    ],
)
def test_a_server_s_refusal_is_told_in_its_words(answer: httpx.Response, told: str) -> None:
    """`diptych explain --request` printed the JSON of the refusal."""
    assert told in str(refusal(answer, "it"))


@pytest.mark.parametrize("text", ["<html>hi</html>", "[1]", '{"prompt": "hi"}'])
def test_an_answer_of_another_server_is_no_traceback(text: str) -> None:
    """A page for every path, and llama.cpp's /apply-template, which has the prompt alone."""
    with pytest.raises(ConfigError, match=r"/apply-template answers .* which no server of Diptych says"):
        fields_of(httpx.Response(200, text=text), "/apply-template", "cached_tokens")
    assert fields_of(httpx.Response(200, json={"cached_tokens": 1}), "it", "cached_tokens") == {"cached_tokens": 1}


@pytest.mark.parametrize("asked", [["--request", "x"], ["--messages", "chat.json"]])
def test_a_url_that_is_none_is_said(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.json").write_text('[{"role": "user", "content": "hi"}]')
    told = CliRunner().invoke(app, [*asked, "--url", "http://127.0.0.1:port"])
    assert isinstance(told.exception, ConfigError)
    assert "cannot reach http://127.0.0.1:port: Invalid port" in str(told.exception)


def test_a_key_may_be_of_any_bytes() -> None:
    """httpx takes texts of ASCII only, and ended in a UnicodeEncodeError."""
    assert httpx.Headers(headers_of("sch\u00fcssel")).raw == [(b"Authorization", "Bearer sch\u00fcssel".encode())]
