"""An option is honoured or refused: what a mode of a command does not read, it does not take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.cli import bench, bench_serve, embed, explain, generate, lab, plan, serve, simulate
from diptych.ground.errors import ConfigError
from encoder_files import make_plain


@pytest.mark.parametrize(
    ("app", "arguments", "words"),
    [
        (bench.app, ["--weights", "int8", "mix"], "--weights before mix would change nothing"),
        (bench.app, ["--json", "serve"], "--json before serve would change nothing"),
        (bench.app, ["--shape", "llama-1b", "-m", "bundled"], "--shape llama-1b has random weights, and --model"),
        (bench.app, ["mix", "--shape", "llama-1b", "-m", "bundled"], "--shape llama-1b has random weights"),
        (lab.app, ["--threads", "2", "calibrate"], "--threads before calibrate would change nothing"),
        (lab.app, ["--list", "--only", "kv-cache"], "--list does not read --only"),
        (lab.app, ["simulated", "-m", "/nowhere", "--only", "opened"], "no load is called 'opened'"),
        (lab.app, ["--quick", "--repeat", "9", "--budget", "3"], "--quick does not read --repeat, --budget"),
        (lab.app, ["--shape", "llama-1b", "-m", "bundled"], "--shape llama-1b has random weights"),
        (bench_serve.app, ["--explain", "--json"], "--explain words the numbers of the page"),
        (embed.app, ["a text", "--speculate", "lookup"], "--speculate lookup drafts tokens, and an embedding writes none"),
        (embed.app, ["a text", "--max-draft-tokens", "3"], "max_draft_tokens is 3, and nothing guesses"),
        (generate.app, ["The", "--max-draft-tokens", "3"], "max_draft_tokens is 3, and nothing guesses"),
        (generate.app, ["The", "--activations", "int8"], "activations is 'int8', and the weights of this model are bf16"),
        (generate.app, ["The", "--weights", "int8", "--activations", "int15"], "and the weights of this model are int8"),
        (generate.app, ["The", "--backend", "torch", "--activations", "int8"], "and torch multiplies in floats"),
        (serve.app, ["--log-level", "loud"], "--log-level is 'loud'; it must be one of debug, info, warning, error"),
        (serve.app, ["--local-prefill-tokens", "9"], "a server without --prefill does not read --local-prefill-tokens"),
        (serve.app, ["--take-kv-of-other-kernels"], "one engine in this process does not read --take-kv-of-other-kernels"),
        (serve.app, ["--calm-s", "3"], "stay as many as they are does not read --calm-s"),
        (serve.app, ["--max-record-bytes", "9"], "a server without --record does not read --max-record-bytes"),
        (serve.app, ["--max-lora-rank", "9"], "a server without --lora and --runtime-lora does not read --max-lora-rank"),
    ],
)  # fmt: skip
def test_what_a_mode_does_not_read_is_refused(app, arguments: list[str], words: str) -> None:
    """Each was taken, and did nothing."""
    told = CliRunner().invoke(app, arguments)
    assert isinstance(told.exception, ConfigError), told.output
    assert words in str(told.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "1,8", "--picture", "x.png"], "a table of several answers does not read --picture"),
        (["--batch", "1,8", "--stall-budget", "9ms"], "a table of several answers does not read --stall-budget"),
        (["--list"], "did not expect 'llama-3.1-8b'"),
    ],
)
def test_plan_reads_what_it_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], words: str
) -> None:
    """A table drew no picture though one was asked for."""
    with pytest.raises(SystemExit):
        plan.app(["llama-3.1-8b", *arguments] if "--list" in arguments else ["llama-3.1-8b", "-d", "l40s", *arguments])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("app", "arguments"),
    [
        (bench.app, ["--prompt-tokens", "16", "--new-tokens", "4"]),
        (lab.app, ["--only", "kv-cache", "--out", "report"]),
        (lab.app, ["quality"]),
        (explain.app, ["--messages", "chat.json"]),
    ],
)
def test_a_model_that_writes_nothing_is_asked_for_no_answer(
    app, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab wrote a page of experiments that could not be run, and a chat of BERT was explained as if it were one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "Hello"}]', "utf-8")
    path = make_plain(tmp_path / "made", "bert")
    told = CliRunner().invoke(app, [*arguments, "--model", str(path)])
    assert isinstance(told.exception, ConfigError), told.output
    assert "needs a model that writes, and made has no output projection" in str(told.exception).replace(
        str(path), "made"
    )


def test_a_trace_has_no_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing of it is drawn, but whether drafts hold."""
    with pytest.raises(SystemExit):
        simulate.app(["llama-3.1-8b", "-d", "l40s", "--trace", str(tmp_path / "t.csv"), "--seed", "3"])
    assert "a trace without --speculate does not read --seed" in capsys.readouterr().err


def test_no_report_is_none_in_json_either() -> None:
    """`--json --quiet` measured the ceilings and printed the report."""
    told = CliRunner().invoke(generate.app, ["The", "--max-tokens", "2", "--json", "-q"])
    assert set(json.loads(told.stdout)) == {"choices", "usage", "timings"}


def test_a_number_of_sequences_that_is_too_long_hears_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """It "must be a number of sequences", which it was."""
    with pytest.raises(SystemExit):
        plan.app(["llama-3.1-8b", "-d", "l40s", "--batch", "99999999999"])
    assert "of at most 10 digits" in capsys.readouterr().err
