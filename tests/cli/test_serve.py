"""`diptych serve`: which model it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from started import run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-queue-s", "-1"), "max_queue_s is -1.0; it must be greater than 0\nhint: --max-queue-s 0 "),
        (("--keep-minutes", "-1"), "keep_minutes is -1.0; it must be 0 to 60"),
        (("--max-queue-s", "nan"), "max_queue_s is nan; it must be greater than 0"),
        (("--drain-timeout-s", "nan"), "drain_timeout_s is nan; it must be at least 0"),
        (("--response-ttl-s", "nan"), "response_ttl_s is nan; it must be greater than 0"),
        (("--max-open-requests", "0"), "max_open_requests is 0; it must be a whole number of at least 1"),
        (("--insecure", "--host", "a..b"), "cannot listen on a..b:0: Name or service not known"),
        (("--insecure", "--host", "\u00e9..b"), "cannot listen on \u00e9..b:0: encoding of hostname failed"),
        (("--lora", "poet=./none"), "hint: an adapter is a folder with adapter_config.json"),
        (("--response-store", "none/there"), "cannot keep responses in none/there: there is no folder none"),
        (("--record", "none/there"), "cannot record to none/there: there is no folder none"),
        (("--otlp-traces-endpoint", "here"), "otlp-traces-endpoint is 'here'; it must be an address such as http://"),
        (("--otlp-traces-endpoint", "http://[::1"), "otlp-traces-endpoint is 'http://[::1'; it must be an address"),
    ],
)
def test_a_refused_limit_is_called_as_it_was_written(arguments: tuple[str, str], said: str) -> None:
    """`--max-queue-s` denied that it takes 0, `--keep-minutes` was called by another name, an adapter's hint told of models.
    NaN held for ever, no open requests were the default, and a host that is none was an "Unknown error -2".
    """
    done = run("serve", *arguments, "--port", "0")
    assert done.returncode == 2
    assert said in done.stderr
    assert "engine ready" not in done.stderr, "a large model takes minutes to load"


def test_a_start_that_fails_leaves_no_recording(tmp_path: Path) -> None:
    """The next start was refused for the empty file that it found."""
    (tmp_path / "text").write_text("no database " * 100)
    done = run("serve", "--record", "day.jsonl", "--response-store", "text", "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "the response store text cannot be used" in done.stderr
    assert not (tmp_path / "day.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "none.gguf"), "none.gguf"),
        (("one", "-m", "another"), "MODEL is 'one' and --model is 'another'"),
        (("bundled", "--model", "another"), "MODEL is 'bundled' and --model is 'another'"),
    ],
)
def test_a_model_may_be_named_as_elsewhere(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """The page on models said `serve --model`, which was no option: refused as a mistyped `--decode`."""
    done = run("serve", *arguments, "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "No such option" not in done.stderr
