"""Checkpoints of bitsandbytes (NF4, FP4, LLM.int8): its own files give the very values that it gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bitsandbytes_files import DATA, DIGESTS, KINDS, MORE_KINDS, digest, quantise
from coded_files import logits_of, said_in_use
from diptych.compute.formats.coded import CodedCheckpoint
from diptych.compute.formats.matrices import LEVEL_TABLES, TableMatrix, TableState
from diptych.ground.errors import LoadError
from diptych.models.config import HfConfig, read_json
from diptych.models.quantised.method import quantisation_of

DOWN = "model.layers.0.mlp.down_proj.weight"
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"


def opened(path: Path) -> CodedCheckpoint:
    how = quantisation_of(HfConfig(read_json(path / "config.json")))
    assert how is not None
    return CodedCheckpoint(path, how, dtype=torch.float32)


def matrix(checkpoint: CodedCheckpoint, name: str) -> Any:
    inner, ffn, kv = 64, 128, 32
    rows = {"gate_proj": ffn, "up_proj": ffn, "k_proj": kv, "v_proj": kv}.get(name.split(".")[-2], inner)
    return checkpoint.tensor(name, rows, ffn if "down_proj" in name else inner)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_give_the_values_of_bitsandbytes(kind: str) -> None:
    """Which half of a byte comes first, whose scale, and scales that are codes themselves: to the bit, whole and in part."""
    checkpoint = opened(DATA / kind)
    expected = json.loads((DATA / kind / DIGESTS).read_text())
    assert len(expected) == 7
    for name, digest_of_theirs in expected.items():
        tensor = matrix(checkpoint, name)
        values = tensor.read()
        assert digest(values) == digest_of_theirs, name
        assert torch.equal(tensor.part(slice(3, 20, 4), 40), values[3:20:4, :40])


def test_eight_bits_are_fractions_of_the_largest_of_a_row() -> None:
    """LLM.int8: SCB over 127 for each output."""
    tensors = load_file(DATA / "int8" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensor = matrix(opened(DATA / "int8"), name)
        expected = tensors[name].double() * tensors[name.replace("weight", "SCB")].double()[:, None] / 127
        assert (tensor.read() - expected).abs().max() < 1e-7 * expected.abs().max()
        assert tensor.kept.name == "group8-g128-f32-wide"


def kept_values(matrix: Any) -> torch.Tensor:
    """What its codes stand for in the kernels."""
    codes, levels = matrix.codes(), torch.tensor(LEVEL_TABLES[matrix.kept.grid].levels)
    return levels[codes.codes.long()] * codes.scales.float().repeat_interleave(matrix.kept.group, 1)


def error_of(matrix: Any, values: torch.Tensor) -> float:
    """Of the kept values, in parts of the root mean square of `values`."""
    return float((kept_values(matrix) - values).norm() / values.norm())


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.006), ("fp4", 0.0045)])
def test_fractions_are_the_nearest_levels(kind: str, most: float) -> None:
    """A twentieth of what four bits cost themselves, held against the values that bitsandbytes gives (above)."""
    checkpoint = opened(DATA / kind)
    for name in json.loads((DATA / kind / DIGESTS).read_text()):
        tensor = matrix(checkpoint, name)
        assert tensor.kept.name == f"group4-g64-bf16-{kind}"
        assert error_of(tensor, tensor.read()) < most, name


class Stored(dict[str, torch.Tensor]):
    """As the files of a checkpoint hold them."""

    holds, stored = dict.__contains__, dict.__getitem__


@pytest.mark.parametrize(
    ("k", "block", "group"),
    [(128, 64, 64), (96, 64, 32), (80, 128, 16), (64, 256, 64), (256, 4096, 128), (96, 256, 32), (40, 64, None)],
)
def test_groups_lie_within_blocks_that_run_over_rows(k: int, block: int, group: int | None) -> None:
    """Blocks count the values of all rows in turn: a row may begin within one, and one may hold several rows."""
    n, random = 7, torch.Generator().manual_seed(k)
    raw = Stored({
        "w": torch.randint(256, (n * k // 2, 1), generator=random, dtype=torch.uint8),
        "w.absmax": 1 + torch.rand(-(-n * k // block), generator=random),
        "w.quant_map": load_file(DATA / "nf4" / "model.safetensors")[f"{DOWN}.quant_map"],
    })  # fmt: skip
    found = TableMatrix("w", raw, (n, k), TableState(kind="nf4", block=block, nested_block=None, offset=0.0), 0)
    if group is None:
        assert found.kept is None
        assert "rows of 40 and blocks of 64" in found.why
        return
    assert found.kept.name == f"group4-g{group}-bf16-nf4"
    assert error_of(found, found.values(slice(None))) < 0.007


def test_another_table_is_not_kept() -> None:
    """Levels are those of one table; a file brings its own."""
    raw = Stored({"w.quant_map": torch.linspace(-1, 1, 16)})
    found = TableMatrix("w", raw, (64, 64), TableState(kind="nf4", block=64, nested_block=None, offset=0.0), 0)
    assert found.kept is None
    assert "not that of nf4" in found.why


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_they_run_and_the_log_says_as_what(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """All are kept: fractions as the nearest levels of 8 bits."""
    said = said_in_use(DATA / kind, caplog, 0.01 if kind == "int8" else 0.03)
    assert f"stored=bitsandbytes-{kind}:100.0%" in said
    assert f"kept={'group8-g128-f32-wide' if kind == 'int8' else f'group4-g64-bf16-{kind}'}:100.0%" in said


def state_of(tensors: dict[str, torch.Tensor], **changed: Any) -> None:
    state = json.loads(bytes(tensors[STATE].tolist())) | changed
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: state_of(t, blocksize=48), "names blocks of 48; 32 to 4096"),
        (lambda t: state_of(t, blocksize=True), "names blocks of True"),
        (lambda t: state_of(t, nested_blocksize=None), "names blocks of None"),
        (lambda t: state_of(t, nested_offset="1"), "names an offset of '1'"),
        (lambda t: state_of(t, nested_offset=float("nan")), "names an offset of nan"),
        (lambda t: state_of(t, shape=[128, 64]), r"does not describe nf4 of shape \[64, 128\]"),
        (lambda t: state_of(t, quant_type="fp4"), "does not describe nf4"),
        (lambda t: t.update({STATE: torch.zeros(70, dtype=torch.uint8)}), "does not describe nf4"),
        (lambda t: t.update({STATE: torch.zeros(5000, dtype=torch.uint8)}), "no quant_state of nf4 or fp4"),
        (lambda t: t.pop(STATE), "no quant_state of nf4 or fp4"),
        (lambda t: t.pop(f"{DOWN}.nested_quant_map"), "nested_quant_map is missing"),
        (lambda t: t.pop(f"{DOWN}.quant_map"), "quant_map is missing"),
        (lambda t: t.update({DOWN: t[DOWN][:-1].clone()}), r"is U8 \[4095, 1\]; 4096 bytes of codes"),
        (lambda t: t.update({f"{DOWN}.absmax": t[f"{DOWN}.absmax"][:5].clone()}), r"absmax is U8 \[5\]"),
        (lambda t: t.update({f"{DOWN}.nested_absmax": t[f"{DOWN}.nested_absmax"] * float("inf")}), "not finite"),
        (lambda t: t.update({f"{DOWN}.other": torch.zeros(2)}), "other"),
    ],
)
def test_a_damaged_file_is_refused(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    """What, the number and the limit, before a model of it stands."""
    path = tmp_path / "it"
    shutil.copytree(DATA / "nf4", path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=message):
        logits_of(path, backend="torch", weights="fp32")


def test_tiles_of_a_gpu_are_refused(tmp_path: Path) -> None:
    """Older versions saved what a first step had put in another order, in the same shape: noise, in silence."""
    path = tmp_path / "it"
    shutil.copytree(DATA / "int8", path)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{DOWN}_format"] = torch.tensor(2, dtype=torch.uint8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"weight_format is 2; .* only rows \(0\)"):
        logits_of(path, backend="torch", weights="fp32")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit .* is True; one of it and load_in_8bit"),
        ({}, "load_in_4bit .* is False; one of it"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type .* is 'nf3'"),
    ],
)
def test_a_config_that_says_neither_is_refused(changed: dict[str, Any], message: str) -> None:
    """By name."""
    with pytest.raises(LoadError, match=message):
        quantisation_of(HfConfig({"quantization_config": {"quant_method": "bitsandbytes", **changed}}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_from_before_methods_had_names_is_read(kind: str) -> None:
    """As transformers reads it: of bitsandbytes by what is loaded. It was refused as quantised with None."""
    raw = read_json(DATA / kind / "config.json")["quantization_config"]
    older = {name: value for name, value in raw.items() if name != "quant_method"}
    assert quantisation_of(HfConfig({"quantization_config": older})) == quantisation_of(
        HfConfig({"quantization_config": raw})
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_what_bitsandbytes_writes_now_is_read(kind: str, tmp_path: Path) -> None:
    """Fresh from the package, with the logits of the plain checkpoint of its values."""
    pytest.importorskip("bitsandbytes")
    coded, values = quantise(tmp_path, kind)
    checkpoint = opened(coded)
    for name, expected in values.items():
        got = matrix(checkpoint, name).read()
        assert torch.equal(got, expected) if kind != "int8" else torch.allclose(got, expected, rtol=1e-6), name
    plain = tmp_path / "plain"
    shutil.copytree(tmp_path / "original", plain)
    tensors = load_file(plain / "model.safetensors")
    save_file(tensors | values, plain / "model.safetensors", metadata={"format": "pt"})
    both = (logits_of(path, backend="torch", weights="fp32") for path in (coded, plain))
    assert torch.allclose(*both, atol=1e-5)
