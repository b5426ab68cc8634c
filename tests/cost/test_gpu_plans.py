"""Plans, simulations and descriptions of files for a GPU that was calibrated here: what the engine would do there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpoints import make_checkpoint
from coded_files import block_fp8, quantised_checkpoints
from diptych.cli.inspect import facts_of
from gguf_files import gguf_reference, write_gguf
from h200 import h200_profile

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def profile() -> str:
    """Of a GPU, as it is written."""
    return json.dumps(h200_profile())


@pytest.fixture(autouse=True)
def calibrated(profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has that GPU."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hardware-gpu.json").write_text(profile)
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path / "home"))


def of_gguf(choose: Callable[[str], str]) -> Callable[[Path], Path]:
    """A file of tensors of the types that are chosen."""
    return lambda folder: write_gguf(gguf_reference("llama", **WIDE), folder / "m.gguf", choose=choose)


def fp8(folder: Path) -> Path:
    """A checkpoint in blocks of fp8."""
    original = make_checkpoint("llama", folder / "original", dtype=torch.bfloat16, **WIDE)
    return quantised_checkpoints(original, folder, block_fp8())[0]


FILES: dict[str, Callable[[Path], Path]] = {
    "Q8_0": of_gguf(lambda name: "F16" if "token" in name else "Q8_0"),
    "fp8 in blocks": fp8,
    # most values have 16 bits, and the mean is nearer to 8
    "two types": of_gguf(lambda name: "Q4_0" if "ffn_gate" in name or "ffn_up" in name else "F16"),
}


@pytest.mark.native
@pytest.mark.parametrize("name", FILES)
def test_files_in_formats_that_were_not_timed_are_described(name: str, tmp_path: Path) -> None:
    """The command ended with "no achieved fraction": what was not timed is left out, the engine reads values in bf16."""
    facts = facts_of(str(FILES[name](tmp_path)), "local")
    kept = facts["contents"].kept
    assert (kept is None) == (name == "two types")
    assert kept is None or kept in facts["memory"]["weight_bytes"]
    assert facts["phases"].keys() == {"bf16"}
    assert facts["phases"]["bf16"]["decode_s"] > 0.0
