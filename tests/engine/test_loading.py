"""Loading a checkpoint and its tokenizer side by side: what fails in either ends the load, and nothing of it stays."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from tests.engine.conftest import BACKENDS, tiny_config

from diptych.engine.load import load
from diptych.ground.errors import LoadError


@pytest.fixture
def damaged(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "damaged"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_damaged_tokenizer_ends_the_load_before_there_is_a_model(damaged: Path, backend: str) -> None:
    """It is found on another thread while weights are packed; a user must not wait for the rest of a large model."""
    (damaged / "tokenizer.json").write_text("{")
    progress: list[tuple[int, int]] = []
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read"):
        load(str(damaged), tiny_config(backend), progress=lambda done, total: progress.append((done, total)))
    assert all(done < total for done, total in progress)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diptych-words")]


def test_damaged_weights_are_named_and_no_thread_is_left(damaged: Path) -> None:
    """The tokenizer is good and on its way when the model's load fails."""
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(LoadError, match="damaged or cut short"):
        load(str(damaged), tiny_config())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diptych-words")]


def test_progress_reaches_the_total_once_words_and_weights_are_there(tiny_dir: Path) -> None:
    """What the caller's bar is told is what the checkpoint reports."""
    progress: list[tuple[int, int]] = []
    loaded = load(str(tiny_dir), tiny_config(), progress=lambda done, total: progress.append((done, total)))
    size = (tiny_dir / "model.safetensors").stat().st_size
    assert progress[-1] == (size, size)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Once upon a time")) == "Once upon a time"
    loaded.model.close()
