"""Every family against transformers: logits at every position and greedy text, however the prompt was prefilled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden import PROMPT_TOKENS, Golden, check_golden, make_golden

from checkpoints import FAMILIES, MORE_FAMILIES
from diptych.compute.model import Model
from diptych.compute.runner import load_model
from diptych.ground.config import ComputeConfig

REFERENCE = ComputeConfig(backend="torch", device="cpu", weights="fp32")
CHUNKS = {"whole": None, "chunks": 7, "token by token": 1}


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return make_golden(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(golden: Golden) -> Model:
    return load_model(golden.path, REFERENCE)


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_family_matches_transformers(model: Model, golden: Golden, chunk: int | None) -> None:
    """The whole point of a model file: the same numbers as the code the weights were trained with."""
    check_golden(model, golden, chunk=chunk)


@pytest.mark.parametrize("family", MORE_FAMILIES)
def test_other_families_match_transformers(family: str, tmp_path: Path) -> None:
    """The same of the families whose layers have something of their own."""
    golden = make_golden(family, tmp_path, new_tokens=8)
    check_golden(load_model(golden.path, REFERENCE), golden, chunk=9)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_family_matches_transformers_on_cuda(golden: Golden, chunk: int | None) -> None:
    """Nothing in the torch backend may assume a CPU."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    model = load_model(golden.path, ComputeConfig(backend="torch", device="cuda", weights="fp32"))
    check_golden(model, golden, chunk=chunk)
    assert PROMPT_TOKENS > 16, "windows of 16 must be shorter than the prompt"
