"""The `diptych` command as a user runs it: real processes, real streams, clear errors."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NoReturn

import pytest
import typer
from typer.testing import CliRunner

from diptych.cli.chat import Conversation
from diptych.engine.async_llm import AsyncLLM
from diptych.engine.llm import LLM
from diptych.engine.load import bundled_dir
from diptych.engine.text.template import DEFAULT_TEMPLATE_WORDS
from diptych.ground.request import SamplingParams
from diptych.server.config import ServerConfig
from diptych.server.page_routes import abilities_json
from diptych.server.state import ServerState
from lora import write_adapter
from started import run

RUN = [sys.executable, "-m", "diptych"]


def test_help_lists_the_commands_without_loading_a_tensor_library() -> None:
    """The first thing a newcomer types must answer at once."""
    code = "import sys; sys.argv=['diptych','--help']; from diptych.cli import main; main(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for name in ("generate", "chat", "serve", "bench", "plan", "lab"):
        assert f"\n  {name}" in done.stdout


@pytest.mark.parametrize("command", ["generate", "serve", "bench serve", "lab"])
def test_help_names_every_option_whole_at_80_columns(command: str) -> None:
    """`diptych serve --help` told of `--max-running-seq…`, which nobody can type."""
    name, *rest = command.split()
    app = importlib.import_module(f"diptych.cli.{name}").app
    page = CliRunner().invoke(app, [*rest, "--help"], env={"COLUMNS": "80"}, prog_name=f"diptych {name}").output
    parsed = typer.main.get_command(app)
    for word in rest:
        parsed = parsed.commands[word]  # type: ignore[attr-defined]
    for parameter in parsed.params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"(^|[ ,]){option}( |,|$)", page, re.MULTILINE), option


def test_unknown_command_is_named_with_the_nearest() -> None:
    """A typing error should cost one look."""
    done = run("generat")
    assert done.returncode == 2
    assert "no command 'generat'" in done.stderr
    assert "diptych generate" in done.stderr


def test_generate_continues_a_fact_and_reports_both_phases() -> None:
    """The main job on the bundled model: text on standard output, the account on standard error."""
    done = run("generate", "The capital of France is", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")
    for word in (
        "prefill",
        "decode",
        "of ceiling",
        "TTFT",
        "load",
        "queue",
        "first token",
        "p99",
        "computed",
        "cached",
    ):
        assert word in done.stderr


def test_generate_json_adds_up(tmp_path: Path) -> None:
    """One object that a script can read; its numbers agree with each other."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Once upon a time", encoding="utf-8-sig")  # as some editors begin a file
    done = run("generate", "--prompt-file", str(prompt), "--max-tokens", "12", "--ignore-eos", "--json", "--n", "2",
                   "--temperature", "0.8", "--seed", "3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    usage, timings, report = answer["usage"], answer["timings"], answer["report"]
    assert usage["computed_tokens"] + usage["cached_tokens"] == usage["prompt_tokens"]
    plain = json.loads(run("generate", "Once upon a time", "--max-tokens", "1", "--json").stdout)
    assert usage["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"]) == 24
    assert timings["ttft_s"] == pytest.approx(timings["queue_s"] + timings["prefill_s"], abs=1e-3)
    assert report["prefill"]["tokens"] >= usage["computed_tokens"]
    assert report["ceilings"]["read_bytes_per_s"] > 1e8


def test_generate_reads_standard_input() -> None:
    """A prompt of - makes the command a filter."""
    done = subprocess.run(
        [*RUN, "generate", "-", "--max-tokens", "4", "--quiet"],
        input="The capital of France is", capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris")
    assert "phase report" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate",), "give either PROMPT or --prompt-file"),
        (("generate", "hi", "--top-p", "0"), "top_p is 0.0"),
        (("generate", "hi", "--model", "no/such-folder-or-model-here"), "no/such-folder-or-model-here"),
        (("generate", "hi", "--weights", "int3"), "int3"),
        (("generate", "hi", "--max-context-tokens", "999999"), "999999"),
        (("generate", "hi", "--kv-memory-bytes", "1000"), "1000 bytes"),
        (("bench", "--shape", "no-such-shape"), "no-such-shape"),
        (("bench", "--prompt-tokens", "x"), "--prompt-tokens"),
        (("bench", "--behind", "500"), "480 would be"),
        (("bench", "mix", "--prompt-tokens", "9:3"), "LOW:HIGH"),
        (("bench", "mix", "--prompt-tokens", "\u00b2"), "LOW:HIGH"),
        (("lab", "--only", "nothing"), "no experiment 'nothing'"),
    ],
)
def test_bad_input_names_the_value_and_exits_2(arguments: tuple[str, ...], message: str) -> None:
    """An error a user can act on, never a traceback."""
    done = run(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_json_has_the_promised_shape() -> None:
    """Scripts read these names. That each length meets each batch is tests/lab/test_bench.py's."""
    done = run(
        "bench",
        "--prompt-tokens",
        "16",
        "--new-tokens",
        "4",
        "--batch",
        "2",
        "--behind",
        "0,544",
        "--repeat",
        "2",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"model", "backend", "weights", "threads", "ceilings", "results", "load_s", "peak_rss_bytes"} <= set(report)
    assert {"read_bytes_per_s", "flops_per_s"} <= set(report["ceilings"])
    assert [(p["behind_tokens"], p["prompt_tokens"], p["batch"], p["phase"]) for p in report["results"]] == [
        *itertools.product((0, 544), (16,), (2,), ("prefill", "decode"))
    ]
    for point in report["results"]:
        rate = point["tokens_per_s"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        assert point["fraction_of_ceiling"] > 0
        assert point["context_tokens"] >= point["behind_tokens"] + point["prompt_tokens"]


@pytest.mark.parametrize("extra", [(), ("--rate", "50", "--speculate", "draft")])
def test_mix_json_has_the_promised_shape(extra: tuple[str, ...]) -> None:
    """All at once and at a Poisson rate, every request answered; the bundled drafter was not found without --draft-model."""
    done = run("bench", "mix", "--requests", "6", "--prompt-tokens", "4:40", "--new-tokens", "2:9", "--repeat", "2",
                   "--json", *extra)  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["output_tokens_per_s"]["min"] > 0
    assert report["total_tokens_per_s"]["median"] > report["output_tokens_per_s"]["median"]
    assert set(report["ttft_s"]) == set(report["itl_s"]) == {"p50", "p95", "p99"}
    assert report["wall_s"] > 0


def read_prompt(stream: IO[str]) -> None:
    """Read until the chat waits for a line."""
    seen = ""
    while not seen.endswith("\n> "):
        character = stream.read(1)
        assert character, f"the chat ended after {seen!r}"
        seen += character


def test_chat_keeps_its_history_in_the_cache_and_survives_ctrl_c() -> None:
    """Ctrl-C stops the answer and not the program; the second question finds the first in the prefix cache."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*RUN, "chat", "--max-tokens", "40"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell inherit it ignored
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        read_prompt(process.stderr)
        process.send_signal(signal.SIGINT)
        read_prompt(process.stderr)  # it asks again: only the line was dropped
        question = "What is the capital of France? Please tell me which city it is, and nothing else at all."
        process.stdin.write(f"{question}\nAnd what is the capital of Italy?\n/report\n/nonsense\n/reset\n/quit\n")
        process.stdin.flush()
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out.strip()
    assert err.count("cached 0") == 1  # the first answer; the second found the first turn
    assert "phase report" in err


def test_what_was_not_answered_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind a second Ctrl-C two messages of the user's stood in a row, which many templates refuse."""
    with LLM("bundled", max_context_tokens=256) as llm:
        talk = Conversation(llm, SamplingParams(max_tokens=2), system=None, think=False)
        asked: list[int] = []

        def break_off(messages: list[dict[str, object]], **_: object) -> NoReturn:
            asked.append(len(messages))
            raise KeyboardInterrupt

        lines = io.StringIO("one\ntwo\nthree")
        monkeypatch.setattr(sys, "stdin", lines)
        monkeypatch.setattr(llm, "render", break_off)
        talk.run()
    assert asked == [1, 1, 1]
    assert capsys.readouterr().err.endswith("> \n")  # the end of input does not leave the shell in this line


def test_who_talks_to_a_model_without_a_template_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A base model went on with made-up lines, and nothing said that they were no template of its own."""
    for path in bundled_dir("diptych-1m-draft").iterdir():
        if path.name != "chat_template.jinja":
            shutil.copyfile(path, tmp_path / path.name)
    named = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": None}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    with LLM(str(tmp_path), max_context_tokens=256) as llm:
        Conversation(llm, SamplingParams(max_tokens=2), system=None, think=False).run()
        assert DEFAULT_TEMPLATE_WORDS in capsys.readouterr().err
    engine = AsyncLLM(str(tmp_path), max_context_tokens=256)
    with caplog.at_level(logging.WARNING, logger="diptych.server"):
        state = ServerState(engine, ServerConfig(), ceilings=None)
    told = abilities_json(state)
    engine.close()
    assert DEFAULT_TEMPLATE_WORDS in caplog.messages
    assert (told["writes"], told["note"], told["thinking"]) == (True, DEFAULT_TEMPLATE_WORDS, [])


def test_embed_writes_a_vector_per_line_and_reports_one_phase(tmp_path: Path) -> None:
    done = run("embed", "-", "--dimensions", "4", input="once upon a time\n\nbread\n")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["text"] for line in lines] == ["once upon a time", "bread"]
    for line in lines:
        assert len(line["embedding"]) == 4
        assert sum(value * value for value in line["embedding"]) == pytest.approx(1.0, abs=1e-5)
    assert "no decode" in done.stderr
    adapter = write_adapter(tmp_path / "adapter", bundled_dir(), {"o_proj": 4})
    by_adapter = run("embed", "bread", "--dimensions", "4", "--lora", str(adapter), "-q")
    assert by_adapter.returncode == 0, by_adapter.stderr
    assert json.loads(by_adapter.stdout)["embedding"] != pytest.approx(lines[1]["embedding"], abs=1e-3)
    refused = run("embed", "a", "--dimensions", "0")
    assert refused.returncode == 2
    assert "dimensions is 0" in refused.stderr
