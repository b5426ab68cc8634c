"""Quantised checkpoints: written once, loaded back bit for bit, and refused when they do not fit."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from diptych.compute.loading.quant import save_quantised
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import CapacityError, ConfigError, LoadError
from worlds import alone, prompt

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed"),
]
CONFIG = ComputeConfig(backend="cpu", threads=1)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "mixtral"])
def test_saved_checkpoint_answers_as_the_original_packed_at_load(tmp_path: Path, family: str, weights: str) -> None:
    """Biases, tied heads, norm offsets and experts all have to survive the file."""
    original = make_checkpoint(family, tmp_path / "original", dtype=torch.bfloat16)
    save_quantised(original, tmp_path / "packed", weights=weights, threads=1)
    packed = load_model(tmp_path / "packed", CONFIG)
    fresh = load_model(original, ComputeConfig(backend="cpu", threads=1, weights=weights))
    assert packed.weights_format == weights
    assert packed.n_parameters == fresh.n_parameters
    assert not alone(packed, prompt(30), None).differs_from(alone(fresh, prompt(30), None))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    original = make_checkpoint("llama", directory / "original", dtype=torch.bfloat16)
    save_quantised(original, directory / "int8", weights="int8", threads=1)
    return directory / "int8"


def test_other_weights_than_the_stored_ones_are_refused(packed: Path) -> None:
    """Silently running int8 for a user who asked for bf16 would be a lie."""
    with pytest.raises(ConfigError, match="packed as int8"):
        load_model(packed, ComputeConfig(backend="cpu", weights="bf16"))
    with pytest.raises(ConfigError, match="packed for the cpu backend"):
        load_model(packed, ComputeConfig(backend="torch"))


def test_another_layout_or_shape_is_refused(packed: Path, tmp_path: Path) -> None:
    """Packed bytes read in another layout would give noise, not an error."""
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((packed / "config.json").read_text())
    layout = {**config["quantization_config"], "packed_layout": 0}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": layout}))
    with pytest.raises(LoadError, match="layout 0"):
        load_model(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 112}))
    with pytest.raises(LoadError, match="expects"):
        load_model(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ("name", "value"),
    [("packed_shapes", '{"a": [Infinity]}'), ("xxh3_64", '{"a": Infinity}'), ("kept_formats", "[" * 100_000),
     ("packed_shapes", None)],
)  # fmt: skip
def test_lists_that_are_none_are_refused(packed: Path, tmp_path: Path, name: str, value: str | None) -> None:
    """As a damaged file may have them; or one without any tensor, where value is None."""
    shutil.copytree(packed, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"][name] = value
    text = b"{}" if value is None else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + (b"" if value is None else raw[8 + size :]))
    with pytest.raises(LoadError, match="damaged has no list of packed shapes and checksums"):
        load_model(tmp_path / "damaged", CONFIG)


def test_folder_in_use_and_unknown_format_are_refused(packed: Path, tmp_path: Path) -> None:
    """An existing folder is never written into."""
    with pytest.raises(ConfigError, match="not empty"):
        save_quantised(packed, packed, weights="int8")
    with pytest.raises(ConfigError, match="int8 or int4"):
        save_quantised(packed, tmp_path / "new", weights="bf16")
    with pytest.raises(LoadError, match="diptych"):
        save_quantised(packed, tmp_path / "new", weights="int8")


def test_all_templates_come_along_and_the_folder_may_be_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates for tools lie in a folder of their own; "." has no name to make another of."""
    original = make_checkpoint("llama", tmp_path / "original", dtype=torch.bfloat16)
    (original / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (original / name).write_text(name)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    save_quantised(original, Path(), weights="int8", threads=1)
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (tmp_path / "out" / name).read_text() == name


def test_a_flipped_bit_in_any_tensor_is_an_error(packed: Path, tmp_path: Path) -> None:
    """A damaged byte in packed weights used to load in silence and answer with other words."""
    shutil.copytree(packed, tmp_path / "damaged")
    path = tmp_path / "damaged" / "model.safetensors"
    data = bytearray(path.read_bytes())
    n_header = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n_header])
    names = [name for name in header if name != "__metadata__"]
    assert {name.startswith("packed:") for name in names} == {True, False}
    for name in (names[0], names[len(names) // 2], next(name for name in names if not name.startswith("packed:"))):
        at = 8 + n_header + header[name]["data_offsets"][1] - 1
        data[at] ^= 0x10
        path.write_bytes(data)
        with pytest.raises(LoadError, match=f"tensor {re.escape(name)} .*damaged"):
            load_model(tmp_path / "damaged", CONFIG)
        data[at] ^= 0x10
    path.write_bytes(data)
    load_model(tmp_path / "damaged", CONFIG).close()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_not_rounded_to_one(tmp_path: Path, weights: str, value: float) -> None:
    """A NaN in the file became a level of the int8 grid: the model answered, with other words and without a complaint."""
    folder = make_checkpoint("qwen3", tmp_path / "damaged", dtype=torch.bfloat16)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][0, 0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=f"{re.escape(name)} has a weight that is not finite"):
        load_model(folder, ComputeConfig(backend="cpu", threads=1, weights=weights))
    with pytest.raises(LoadError, match="not finite"):
        save_quantised(folder, tmp_path / "packed", weights=weights, threads=1)
    assert not (tmp_path / "packed").exists()


def test_a_full_disk_leaves_nothing_behind(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a folder loads as a broken checkpoint next week; it used to stay, under a traceback."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diptych.compute.loading.quant.os.fsync", full)
    with pytest.raises(CapacityError, match="No space left on device"):
        save_quantised(packed.parent / "original", tmp_path / "new", weights="int8", threads=1)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be a folder"):
        save_quantised(packed.parent / "original", tmp_path / "file", weights="int8", threads=1)
