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
        (("--lora", "poet=./none"), "hint: an adapter is a folder with adapter_config.json"),
    ],
)
def test_a_refused_limit_is_called_as_it_was_written(arguments: tuple[str, str], said: str) -> None:
    """`--max-queue-s` denied that it takes 0, `--keep-minutes` was called by another name, an adapter's hint told of models."""
    done = run("serve", *arguments, "--port", "0")
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--model", "none.gguf"), "none.gguf"), (("one", "-m", "another"), "MODEL is 'one' and --model is 'another'")],
)
def test_a_model_may_be_named_as_elsewhere(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """The page on models said `serve --model`, which was no option: refused as a mistyped `--decode`."""
    done = run("serve", *arguments, "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "No such option" not in done.stderr
