"""What people have in the place of a model: each is told apart, with the number and a way on, by whoever opens it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import make_checkpoint
from diptych.engine.load import model_dir
from diptych.ground.errors import LoadError
from diptych.models.contents import contents_of
from diptych.models.files import INDEX_FILE, model_files, weight_files
from diptych.models.read import load_model_file

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><body>404</body></html>"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("olmo2", tmp_path_factory.mktemp("olmo2"), max_shard_size="60KB")


def cut(path: Path, n: int) -> None:
    os.truncate(path, path.stat().st_size - n)


@pytest.mark.parametrize(
    ("damage", "said", "hint"),
    [
        (lambda shard: shard.unlink(), r"1 of \d files that .* names are missing, the first is model-00002", "too"),
        (lambda shard: cut(shard, 4), r"model-00002.* tensor .* reaches to byte (\d+); the file has \d+", "again"),
        (lambda shard: os.truncate(shard, 0), "its header reaches to byte 8; the file has 0", "again"),
        (lambda shard: shard.write_bytes(b"abc"), r"its header reaches to byte \d+; the file has 3", "again"),
        (lambda shard: shard.write_bytes(POINTER), "is the pointer of git LFS to a file", "git lfs pull"),
        (lambda shard: shard.write_bytes(PAGE), "is a page of HTML or XML", "again"),
    ],
)
def test_a_damaged_shard_is_told_apart(
    damage: Callable[[Path], None], said: str, hint: str, sharded: Path, tmp_path: Path
) -> None:
    """`inspect` described a folder that lacked a shard, or had half of one, as if nothing were wrong."""
    folder = Path(shutil.copytree(sharded, tmp_path / "copy"))
    damage(weight_files(folder)[1])
    with pytest.raises(LoadError, match=said) as refused:
        contents_of(folder)
    assert hint in str(refused.value.hint)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (b"", "has 0 bytes"),
        (b"abc", "begins with b'abc', not with GGUF"),
        (b"hello world, this is a text", "begins with b'hello world, thi', not with GGUF"),
        (POINTER, "is the pointer of git LFS"),
        (PAGE, "is a page of HTML"),
    ],
)
def test_what_is_called_gguf_and_is_none_is_told_apart(begin: bytes, said: str, tmp_path: Path) -> None:
    """An empty file said "cannot mmap an empty file", without a hint."""
    path = tmp_path / "m.gguf"
    path.write_bytes(begin)
    with pytest.raises(LoadError, match=said) as refused:
        contents_of(path)
    assert refused.value.hint


def test_paths_that_are_no_model_get_one_answer(tmp_path: Path) -> None:
    """An empty folder was told that it had no tokenizer.json; a file of weights, that some byte was no UTF-8."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\xd0\x17")
    (tmp_path / "empty").mkdir()
    for path, hint in ((weights, f"give its folder, {tmp_path}"), (tmp_path / "empty", "a model is a folder")):
        for opened in (model_dir, lambda name: load_model_file(Path(name))):
            with pytest.raises(
                LoadError, match=r"no config.json and no GGUF file|is a file that is no GGUF"
            ) as refused:
                opened(str(path))
            assert str(refused.value.hint).startswith(hint)


def test_a_missing_gguf_file_is_not_looked_for_on_the_hub() -> None:
    """`models/m.gguf` looks like a hub name, and the answer spoke of its cache."""
    with pytest.raises(LoadError, match=r"no such folder or file: models/nothere\.gguf"):
        model_dir("models/nothere.gguf")


def test_weights_that_the_index_does_not_name_are_others(sharded: Path, tmp_path: Path) -> None:
    """Mistral publishes each model twice in one folder; `inspect` counted both."""
    folder = Path(shutil.copytree(sharded, tmp_path / "copy"))
    before = contents_of(folder)
    shutil.copy(weight_files(folder)[0], folder / "consolidated.safetensors")
    assert contents_of(folder) == before
    assert set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values()) == {
        Path(name).name for name in before.files
    }


def test_a_config_stands_for_the_folder_of_its_weights_and_alone_for_no_files(tmp_path: Path) -> None:
    """What `diptych inspect` looks into, and what the planner prices as the engine holds it."""
    config = tmp_path / "config.json"
    assert model_files(None) is None
    assert model_files(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert model_files(tmp_path) == tmp_path
    assert model_files(config) is None
    (tmp_path / "model.safetensors").touch()
    assert model_files(config) == tmp_path
    assert model_files(tmp_path / "other.json") is None


def test_a_config_in_a_models_place_is_answered_with_its_folder(tmp_path: Path) -> None:
    """`diptych plan` takes one, and other commands said only what a model is."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(LoadError) as refused:
        model_dir(str(config))
    assert refused.value.hint == f"give its folder, {tmp_path}"
