from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli.explain import app
from diptych.server.explanation import Part, explain, volatile_spot
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


def test_a_clock_in_the_system_prompt_costs_the_whole_cache() -> None:
    """The most common way to lose a prefix cache, and the cheapest to mend."""
    found = explain(CHAT, source="measured", block_tokens=32, volatile=[("system", 0, 10, "a time")])
    assert found.next_turn_tokens == 0
    assert found.reorderings[0].saved_tokens == 160
    assert "a time" in found.reorderings[0].what


def test_tools_behind_a_question_should_stand_first() -> None:
    found = explain([part("turn 1 user", 50, 0.5), part("tools", 200, 2.0)], source="bound", block_tokens=32)
    assert [(one.saved_tokens, one.saved_s) for one in found.reorderings] == [(192, 2.0)]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("now 14:05", "a time"),
        ("on 2026-01-31 we", "a date"),
        ("March 5, 2026", "a date"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "an id"),
        ("chapter 3 verse 16", None),
    ],
)
def test_changing_text_is_recognised(text: str, what: str | None) -> None:
    spot = volatile_spot(text)
    assert (None if spot is None else spot[1]) == what


@pytest.mark.parametrize("on_server", [True, False])
def test_the_command_explains_a_chat(server: ServerProcess, tmp_path: Path, on_server: bool) -> None:
    chat = [
        {"role": "system", "content": "You are brief. Today is 2026-01-31. " + "Be polite. " * 20},
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
