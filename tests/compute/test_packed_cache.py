"""Packed weights kept between starts: the same model, from another file, or none at all."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import FAMILIES, MORE_FAMILIES, make_checkpoint
from coded_files import awq, gptq, quantised_checkpoints
from diptych.compute import runner
from diptych.compute.loading import packed_cache, quant
from diptych.compute.loading.packed_cache import PackedCache
from diptych.compute.model import Model
from diptych.compute.ops.cpu import loader as cpu_loader
from diptych.compute.ops.cpus import Placement
from diptych.compute.runner import load_model
from diptych.cost.profile import load_profile
from diptych.engine.llm import LLM
from diptych.engine.model_profile import profile_gap
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, LoadError
from diptych.models.files import WHOLE_FILE
from encoder_files import make_plain
from family_configs import fewest_layers
from gguf_files import gguf_reference, write_gguf
from mlx_files import DATA as MLX_DATA
from stepping import Stepper
from thread_ranks import load_over_threads

pytestmark = pytest.mark.native
PROMPT = list(range(3, 60))
MAPS = Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder; every model is worth keeping."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(runner, "PackedCache", lambda **fields: PackedCache(**fields, worth_bytes=0))
    monkeypatch.setattr(packed_cache, "Thread", AtOnce)
    return tmp_path / "home" / "packed"


class AtOnce(threading.Thread):
    """Has ended when it has begun."""

    def start(self) -> None:
        super().start()
        self.join()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def load(path: Path, weights: str = "int8", **fields: object) -> Model:
    return load_model(path, ComputeConfig(backend="cpu", weights=weights, threads=1, **fields))


def logits(model: Model) -> torch.Tensor:
    return Stepper(model).prefill("it", PROMPT, chunk=None)


@pytest.mark.parametrize(
    ("family", "weights"),
    [
        ("llama", "bf16"),
        ("llama", "int4"),
        ("llama", "q8_0"),
        ("mixtral", "q4_1"),
        *((family, "int8") for family in (*FAMILIES, *MORE_FAMILIES)),
    ],
)
def test_a_second_start_has_the_bits_of_the_first(family: str, weights: str, tmp_path: Path, folder: Path) -> None:
    """And reads nothing of the checkpoint but what says that it is the same."""
    fields: dict[str, int] = {"tie_word_embeddings": True} if family == "llama" else {}
    if family in MORE_FAMILIES:
        fields = {"num_hidden_layers": fewest_layers(family)}
    path = make_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16, **fields)
    first = load(path, weights)
    (entry,) = entries(folder)
    before = (entry / WHOLE_FILE).stat()
    second = load(path, weights)
    assert torch.equal(logits(first), logits(second))
    assert (first.revision, first.n_parameters, first.weight_bytes) == (
        second.revision,
        second.n_parameters,
        second.weight_bytes,
    )
    assert [path.name for path in entries(folder)] == [entry.name]
    assert (entry / WHOLE_FILE).stat().st_mtime_ns == before.st_mtime_ns, "it was written again"


@pytest.mark.parametrize("kind", ["albert", "electra-small", "deberta-v2", "deberta-v2-apart", "deberta", "ernie"])
def test_encoders_come_back_from_the_cache(kind: str, tmp_path: Path, folder: Path) -> None:
    """Also rows that are made of several tensors, and layers that have the weights of another."""
    path = make_plain(tmp_path / "model", kind, dtype=torch.bfloat16)
    first = LLM(path, backend="cpu", weights="int8", threads=1)
    (entry,) = entries(folder)
    before = (entry / WHOLE_FILE).stat().st_mtime_ns
    second = LLM(path, backend="cpu", weights="int8", threads=1)
    vectors = [llm.embed([PROMPT])[0].vector for llm in (first, second)]
    np.testing.assert_array_equal(*vectors)
    assert first.loaded.model.revision == second.loaded.model.revision
    assert (entry / WHOLE_FILE).stat().st_mtime_ns == before, "it was written again"


@pytest.mark.parametrize("weights", ["auto", "int8"])
@pytest.mark.parametrize("kind", ["experts", "latent", "plain", "correction", "powers"])
def test_folders_of_mlx_come_back_from_the_cache(kind: str, weights: str, folder: Path) -> None:
    """What it left in floats was kept by its names, of which nobody asks: each start threw the entry away and packed anew."""
    first = load(MLX_DATA / kind, weights)
    (entry,) = entries(folder)
    before = (entry / WHOLE_FILE).stat().st_mtime_ns
    second = load(MLX_DATA / kind, weights)
    assert torch.equal(logits(first), logits(second))
    assert (first.revision, first.n_parameters) == (second.revision, second.n_parameters)
    assert (entry / WHOLE_FILE).stat().st_mtime_ns == before, "it was written again"


@pytest.mark.parametrize(("family", "layout"), [("llama", "awq"), ("mixtral", "awq"), ("llama", "act-order")])
def test_kept_values_come_back_from_the_cache(
    family: str, layout: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their format is in no option and no config, nor the order of their inputs: the entry itself has to say it."""
    original = make_checkpoint(family, tmp_path / "model", dtype=torch.bfloat16)
    made = awq(32) if layout == "awq" else gptq(4, 32, symmetric=True, act_order=True)
    path, _ = quantised_checkpoints(original, tmp_path, made)
    first = load(path, "auto")
    monkeypatch.setattr("diptych.compute.formats.coded.CodedTensor.codes", lambda *_: pytest.fail("read again"))
    second = load(path, "auto")
    kept = "group4-g32-f16-zeros" if layout == "awq" else "group4-g32-f16"
    assert first.weights_format == second.weights_format == kept
    assert torch.equal(logits(first), logits(second))
    assert first.revision == second.revision
    monkeypatch.undo()


@pytest.mark.parametrize(("family", "copies"), [("qwen2", 1), ("gemma2", 1), ("qwen2_moe", 7)])
def test_joined_projections_of_several_types_keep_their_values(
    family: str,
    copies: int,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Q4_K_M files have v in Q6_K and q and k in Q4_K, others up and not gate: all became bf16.

    Also from the cache, cut and over ranks. copies: MLPs of a layer, with experts (6) and what is beside them.
    """
    fields = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    if copies > 1:
        fields |= {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    reference = gguf_reference(family, **fields, num_key_value_heads=4, num_hidden_layers=2)
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q6_K"}
    path = write_gguf(
        reference,
        tmp_path / "m.gguf",
        choose=lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_K"),
    )
    with caplog.at_level("INFO", logger="diptych"):
        first = load(path, "auto")
    is_fine = copies > 1  # more than half of the codes have 6 bits, and rows of 8 would be seen beside what they lost
    assert first.formats == {"group4-g32-s8-minima": 2 * 256 * (256 + 128 + 256 + copies * 256),
                             "group6-g16-s8" + "-wide" * is_fine: 2 * 256 * (128 + copies * 512)}  # fmt: skip
    assert "because the kernels hold the file's values\n" in caplog.text
    whole = logits(first)
    exact = logits(load_model(path, ComputeConfig(backend="torch", device="cpu", weights="fp32")))
    assert (whole - exact).std() < 0.15 * exact.std(), "a wrong part would be all of it: blocks are random bits"
    assert torch.equal(whole, Stepper(first).prefill("cut", PROMPT, chunk=5))
    over_ranks = load_over_threads(path, ComputeConfig(backend="cpu", threads=2, tp=2))
    assert torch.equal(whole, logits(over_ranks))
    over_ranks.close()
    monkeypatch.setattr("diptych.compute.formats.gguf.codes_of", lambda *_: pytest.fail("read again"))
    second = load(path, "auto")
    assert torch.equal(whole, logits(second))
    assert (first.revision, first.formats) == (second.revision, second.formats)


@pytest.mark.parametrize(
    "family", ["granitemoehybrid", "qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "kimi_linear", "jamba"]
)
def test_some_rows_of_a_kept_tensor_come_back_from_the_cache(
    family: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What Mamba-2 and gated heads have in one tensor is read by several: each start packed it anew, with a warning."""
    reference, several = gguf_reference(family, hidden_size=256), ("attn_q.", "attn_qkv", "ssm_in", "ssm_ba", "ssm_x")
    path = write_gguf(
        reference, tmp_path / "m.gguf", choose=lambda name: "Q8_0" if any(one in name for one in several) else "F32"
    )
    first = load(path, "auto")
    (entry,) = entries(folder)
    before = (entry / WHOLE_FILE).stat()
    monkeypatch.setattr("diptych.compute.formats.gguf.codes_of", lambda *_: pytest.fail("read again"))
    second = load(path, "auto")
    assert "thrown away" not in caplog.text
    assert (entry / WHOLE_FILE).stat().st_mtime_ns == before.st_mtime_ns
    assert torch.equal(logits(first), logits(second))
    assert (first.revision, first.formats) == (second.revision, second.formats)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_gguf_file_is_dequantised_once(
    family: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes longest at the first start."""
    path = write_gguf(
        gguf_reference(family), tmp_path / "m.gguf", choose=lambda name: "Q8_0" if "ffn_up" in name else "F16"
    )
    first = load(path)
    monkeypatch.setattr("diptych.compute.formats.gguf.dequantised", lambda *_: pytest.fail("dequantised again"))
    assert torch.equal(logits(first), logits(load(path)))


def test_another_file_format_or_kernel_set_is_another_entry(tmp_path: Path, folder: Path) -> None:
    """A fine-tune of the same shape, written over the file, must not be answered with the old weights."""
    path = make_checkpoint("llama", tmp_path / "model")
    first = load(path)
    load(path, "int4")
    load(path, instruction_set="scalar")
    assert len(entries(folder)) == 3
    make_checkpoint("llama", tmp_path / "model", seed=1)
    assert not torch.equal(logits(first), logits(load(path)))
    assert len(entries(folder)) == 4


@pytest.mark.parametrize("damage", ["a bit", "a cut", "no header"])
def test_a_damaged_entry_is_thrown_away_and_made_again(damage: str, tmp_path: Path, folder: Path) -> None:
    """A disk that forgets a bit must not change an answer, nor keep a model from starting."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    file = entries(folder)[0] / WHOLE_FILE
    data = bytearray(file.read_bytes())
    data[-100] ^= 4
    file.write_bytes({"a bit": data, "a cut": data[:-5000], "no header": b""}[damage])
    assert torch.equal(expected, logits(load(path)))
    assert torch.equal(expected, logits(load(path)))
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("found", ["a folder for the file", "an empty folder", "a file", "a link to nothing"])
def test_what_stands_in_an_entry_s_place_is_thrown_away(found: str, tmp_path: Path, folder: Path) -> None:
    """It kept the entry from its place, and the model was packed again at each start."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    (entry,) = entries(folder)
    shutil.rmtree(entry)
    if found == "a folder for the file":
        (entry / WHOLE_FILE / "more").mkdir(parents=True)
    elif found == "an empty folder":
        entry.mkdir()
    elif found == "a file":
        entry.write_bytes(b"weights")
    else:
        entry.symlink_to(tmp_path / "nowhere")
    assert torch.equal(expected, logits(load(path)))
    assert entries(folder) == [entry]
    before = (entry / WHOLE_FILE).stat().st_mtime_ns
    assert torch.equal(expected, logits(load(path)))
    assert (entry / WHOLE_FILE).stat().st_mtime_ns == before, "it was written again"


@pytest.mark.parametrize("name", ["the largest packed", "model.embed_tokens.weight"])
@pytest.mark.parametrize("at", [0, 2000, -1])
def test_each_byte_is_checked_whether_it_is_copied_or_used_in_place(
    name: str, at: int, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packed weights in the pass that copies them, a large embedding beside them in the same pass."""
    monkeypatch.setattr(quant, "LARGE_BYTES", 1)
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    assert torch.equal(expected, logits(load(path)))
    assert "thrown away" not in caplog.text
    file = entries(folder)[0] / WHOLE_FILE
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    sizes = {one: np.subtract(*header[one]["data_offsets"][::-1]) for one in header if one.startswith("packed:")}
    name = name if name in header else max(sizes, key=lambda one: sizes[one])
    begin, end = (8 + int.from_bytes(data[:8], "little") + offset for offset in header[name]["data_offsets"])
    data[(begin if at >= 0 else end) + at] ^= 1
    file.write_bytes(data)
    assert torch.equal(expected, logits(load(path)))
    assert f"reason=tensor {name} in" in caplog.text


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list what is mapped")
@pytest.mark.parametrize("nodes", [(0,), (0, 1)])
def test_packed_weights_are_used_where_they_are_mapped(
    nodes: tuple[int, ...], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copy waited for a gigabyte of memory. Threads of several nodes have one, dealt out."""
    path = make_checkpoint("llama", tmp_path / "model")
    first = load(path)
    monkeypatch.setattr(cpu_loader, "choose_cpus", lambda *_: Placement(threads=1, cpus=(), nodes=nodes))
    second = load(path)
    (entry,) = entries(folder)
    assert _mapped_file(first) == ""
    assert _mapped_file(second) == ("" if len(nodes) > 1 else str(entry / WHOLE_FILE))
    assert torch.equal(logits(first), logits(second))


def _mapped_file(model: Model) -> str:
    """That the model's first weight lies in, or nothing."""
    address = model.program.packed_blob(0).ctypes.data  # type: ignore[attr-defined]
    for line in MAPS.read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            return line.partition("/")[1] + line.partition("/")[2]
    return "nowhere"


@pytest.mark.skipif(not MAPS.exists(), reason="the system does not list what is mapped")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_move_from_the_mapped_file_between_steps(family: str, tmp_path: Path, folder: Path) -> None:
    """A file that is cut while a server runs on it would end the server; no step may see a weight of which a part has moved."""
    path = make_checkpoint(family, tmp_path / "model", tie_word_embeddings=True, dtype=torch.bfloat16)
    expected, model = logits(load(path, "bf16")), load(path, "bf16")
    (entry,) = entries(folder)
    assert _mapped_file(model) == str(entry / WHOLE_FILE)
    model.settle()
    model.settle()  # once is enough
    end_s = time.monotonic() + 60.0
    is_moving = True
    while is_moving and time.monotonic() < end_s:
        is_moving = _mapped_file(model) != ""
        assert torch.equal(expected, logits(model))
    assert _mapped_file(model) == ""
    while model.program.is_settling and time.monotonic() < end_s:  # type: ignore[attr-defined]
        assert torch.equal(expected, logits(model))
    os.truncate(entry / WHOLE_FILE, 0)
    assert torch.equal(expected, logits(model))


def test_a_model_may_go_before_its_weights_have_moved(tmp_path: Path, folder: Path) -> None:
    """What copies them must not outlive where they come from and go to."""
    path = make_checkpoint("llama", tmp_path / "model")
    load(path)
    for _ in range(20):
        model = load(path)
        model.settle()
        model.close()


def test_who_measures_waits_until_weights_have_moved(tmp_path: Path, folder: Path) -> None:
    """`diptych bench` timed steps from a mapped file, beside the thread that copied it."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected, model = logits(load(path)), load(path)
    model.settle()
    model.settle(waits=True)
    assert not model.program.is_settling  # type: ignore[attr-defined]
    assert _mapped_file(model) == ""
    assert torch.equal(expected, logits(model))


def test_an_entry_that_is_thrown_away_lasts_as_long_as_its_models(tmp_path: Path, folder: Path) -> None:
    """Another process makes room, or has found damage: who runs on its weights goes on."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    model = load(path)
    shutil.rmtree(folder)
    load(path)  # written again, beside the one in use
    gc.collect()
    assert torch.equal(expected, logits(model))


def test_weights_that_do_not_lie_as_they_were_written_are_no_entry(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels read whole lines of the cache; a header of another length moves every tensor, and no checksum says so."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    file = entries(folder)[0] / WHOLE_FILE
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    file.write_bytes((n + 4).to_bytes(8, "little") + data[8 : 8 + n] + b"    " + data[8 + n :])
    assert torch.equal(expected, logits(load(path)))
    assert "packed weights thrown away" in caplog.text
    assert file.read_bytes() == data


def test_the_folder_stays_within_its_bound(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was unused for longest goes first, and what a killed process left goes with it."""
    paths = [make_checkpoint("llama", tmp_path / str(seed), seed=seed) for seed in range(3)]
    load(paths[0])
    (entry,) = entries(folder)
    monkeypatch.setenv("DIPTYCH_PACKED_CACHE", str(int(2.5 * (entry / WHOLE_FILE).stat().st_size)))
    os.utime(entry, (1, 1))
    load(paths[1])
    left = folder / f"{packed_cache.UNFINISHED}abc-{_ended_process()}"
    left.mkdir()
    (left / WHOLE_FILE).write_bytes(b"half")
    load(paths[2])
    assert len(entries(folder)) == 2
    assert not left.exists()
    assert not entry.exists()


def _ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_no_room_keeps_no_entry_and_the_model_runs(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a folder that cannot be written, a bound below the model: a start is slower, no more."""
    path = make_checkpoint("llama", tmp_path / "model")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
        load(path)
    with monkeypatch.context() as failing:
        failing.setattr(packed_cache, "write_tensors", _fail)
        load(path)
    with monkeypatch.context() as bounded:
        bounded.setenv("DIPTYCH_PACKED_CACHE", "1000")
        load(path)
    with monkeypatch.context() as off:
        off.setenv("DIPTYCH_PACKED_CACHE", "off")
        load(path)
    assert entries(folder) == []
    monkeypatch.setenv("DIPTYCH_PACKED_CACHE", "much")
    with pytest.raises(ConfigError, match="DIPTYCH_PACKED_CACHE is 'much'"):
        load(path)


def test_a_folder_that_may_only_be_read_gives_its_entries(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time of use could not be written, and a whole entry was called damaged and packed anew at every start."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(packed_cache, "write_tensors", refuse)
    model = load(path)
    assert str(folder) in _mapped_file(model)
    assert torch.equal(expected, logits(model))
    assert "thrown away" not in caplog.text


def test_a_folder_that_may_not_be_entered_keeps_no_entry_and_the_model_runs(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service whose HOME is another user's: that it may not look there was the end of the start."""
    path = make_checkpoint("llama", tmp_path / "model")
    seen, made = os.stat, os.mkdir

    def look(what: Any, *rest: Any, **fields: Any) -> os.stat_result:
        return _if_allowed(folder, what, seen, *rest, **fields)

    def make(what: Any, *rest: Any, **fields: Any) -> None:
        _if_allowed(folder, what, made, *rest, **fields)

    monkeypatch.setattr(os, "stat", look)
    monkeypatch.setattr(os, "mkdir", make)
    assert logits(load(path)).isfinite().all()
    assert f"packed weights not kept folder={folder} reason=Permission denied" in caplog.text


def _if_allowed(folder: Path, what: Any, do: Callable[..., Any], *rest: Any, **fields: Any) -> Any:
    if str(what).startswith(str(folder)):
        raise PermissionError(13, "Permission denied", str(what))
    return do(what, *rest, **fields)


def test_who_has_no_home_keeps_nothing_and_the_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user that a container made up ended in a traceback of pathlib's, also where XDG_CACHE_HOME named a folder."""
    path = make_checkpoint("llama", tmp_path / "model")

    def nobody(_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nobody))
    for name in ("DIPTYCH_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level("INFO", logger="diptych"):
        model = load(path)
    assert "this user has no home" in caplog.text
    assert "this machine was never measured" in str(profile_gap(model))
    with pytest.raises(ConfigError, match="no home to keep a hardware profile in"):
        load_profile()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load(path)
    assert len(entries(tmp_path / "cache" / "diptych" / "packed")) == 1


def _fail(path: Path, *_: object, **__: object) -> int:
    path.write_bytes(b"begun")
    raise OSError(28, "No space left on device")


def test_a_first_start_does_not_wait_for_its_entry(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes as long as packing: the answer was late by that. The model may go meanwhile."""
    path = make_checkpoint("llama", tmp_path / "model")
    expected = logits(load(path))
    shutil.rmtree(folder)
    monkeypatch.setattr(packed_cache, "Thread", threading.Thread)
    written, may_write = packed_cache.write_tensors, threading.Event()

    def late(*arguments: object, **fields: object) -> int:
        assert may_write.wait(60)
        return written(*arguments, **fields)

    monkeypatch.setattr(packed_cache, "write_tensors", late)
    model = load(path)
    (writer,) = (one for one in threading.enumerate() if one.name == "packed weights")
    assert torch.equal(expected, logits(model))
    assert not any((entry / WHOLE_FILE).exists() for entry in entries(folder))
    model.close()
    may_write.set()
    writer.join()
    assert torch.equal(expected, logits(load(path)))
    assert len(entries(folder)) == 1


def test_two_processes_at_once_leave_one_entry(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that finishes second finds the entry there, and both have the model."""
    path = make_checkpoint("llama", tmp_path / "model")
    written = packed_cache.write_tensors

    def slow(*arguments: object, **fields: object) -> int:
        monkeypatch.setattr(packed_cache, "write_tensors", written)
        load(path)  # the other process, from begin to end
        return written(*arguments, **fields)

    monkeypatch.setattr(packed_cache, "write_tensors", slow)
    load(path)
    assert len(entries(folder)) == 1


def test_small_models_are_packed_each_time(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants a cache of what takes no time."""
    monkeypatch.setattr(runner, "PackedCache", PackedCache)
    load(make_checkpoint("llama", tmp_path / "model"))
    assert entries(folder) == []


def test_a_fault_of_the_checkpoint_is_said_by_the_checkpoint(tmp_path: Path, folder: Path) -> None:
    """A file that was cut after it was packed is another file."""
    path = make_checkpoint("llama", tmp_path / "model")
    load(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(LoadError, match="damaged or cut short"):
        load(path)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_else_a_start_reads_is_asked_in_time(
    is_first: bool, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is packed, else while packed weights are copied; what it refuses is no fault of the entry."""
    path = make_checkpoint("llama", tmp_path / "model", dtype=torch.bfloat16)
    config = ComputeConfig(backend="cpu", weights="int8", threads=1)
    if is_first:
        monkeypatch.setattr(runner, "build_cpu_model", lambda *_, **__: pytest.fail("packed first"))
    else:
        load(path)
        asked: list[str] = []
        load_model(path, config, meanwhile=lambda: asked.append(threading.current_thread().name))
        assert asked == [threading.current_thread().name]
    before = entries(folder)

    def refuse() -> None:
        raise LoadError("no tokenizer.json")

    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        load_model(path, config, meanwhile=refuse)
    assert entries(folder) == before
