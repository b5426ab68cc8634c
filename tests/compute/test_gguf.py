"""GGUF files against transformers: the checkpoint that they were made from, and what transformers itself reads out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from golden import ask_reference, check_golden
from gguf_files import ARCHITECTURES, gguf_reference, write_gguf

from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_gives_the_logits_of_the_checkpoint_it_was_made_from(family: str, tmp_path: Path) -> None:
    """Rows of q and k, norms plus 1, stacked experts: each of them undone, or the text is noise."""
    reference = gguf_reference(family)
    path = write_gguf(reference, tmp_path / "model.gguf")
    golden = ask_reference(reference, path, new_tokens=16)
    check_golden(load_model(path, REFERENCE), golden, chunk=7)
