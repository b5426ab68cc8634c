"""`diptych serve`: which model it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from started import run


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
