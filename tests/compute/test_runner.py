"""The backend is chosen once, at the door, and says why."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from checkpoints import make_checkpoint, make_reference
from diptych.compute import runner
from diptych.compute.batch import ForwardBatch
from diptych.compute.model import Want
from diptych.compute.ops.cpu.kernels import instruction_sets
from diptych.compute.runner import choose_backend, load_model, random_model
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.models.named import SHAPES


@pytest.mark.parametrize(
    ("config", "has_kernels", "has_gpu", "backend"),
    [
        (ComputeConfig(), True, False, "cpu"),
        (ComputeConfig(), False, False, "torch"),
        (ComputeConfig(), True, True, "torch"),
        (ComputeConfig(device="cpu"), True, True, "cpu"),
        (ComputeConfig(device="cuda"), True, True, "torch"),
        (ComputeConfig(weights="fp32"), True, False, "torch"),
        (ComputeConfig(kv="fp32"), True, False, "torch"),
        (ComputeConfig(weights="int8"), True, False, "cpu"),
        (ComputeConfig(backend="torch"), True, False, "torch"),
        (ComputeConfig(backend="cpu"), False, False, "cpu"),
    ],
)
def test_backend_choice(
    config: ComputeConfig, has_kernels: bool, has_gpu: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'auto' prefers a GPU, then the native kernels; a backend asked for is never replaced."""
    monkeypatch.setattr(runner.cpu_kernels, "is_available", lambda: (has_kernels, "detail"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_backend(config)[0] == backend


@pytest.mark.parametrize("compiler", [None, "g++"])
def test_missing_kernels_are_a_warning_that_says_what_to_do(
    compiler: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip hides the output of a failed build; without a word here the user has a slow engine and no idea why."""
    path = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(runner.cpu_kernels, "_cpu", None)
    monkeypatch.setattr(runner.cpu_kernels, "find_spec", lambda name: None)
    monkeypatch.setattr(runner.cpu_kernels.shutil, "which", lambda name: name if name == compiler else None)
    model = load_model(path, ComputeConfig(device="cpu"))
    model.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "kernels were not built" in warnings[0]
    assert ("no C++ compiler" if compiler is None else "g++ is on PATH now") in warnings[0]
    with pytest.raises(ConfigError, match="kernels were not built"):
        load_model(path, ComputeConfig(backend="cpu"))


def test_choice_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A service that silently runs on the slow backend is found out too late."""
    path = make_checkpoint("llama", tmp_path)
    with caplog.at_level(logging.INFO, logger="diptych.compute"):
        model = load_model(path, ComputeConfig(weights="fp32", device="cpu"))
    assert model.backend_name == "torch"
    assert "name=torch reason=fp32 was asked for" in caplog.text
    model.close()


@pytest.mark.native
@pytest.mark.skipif(not instruction_sets(), reason="the native kernels are not installed")
@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "gemma-2-2b"])
def test_closed_model_gives_its_weights_back_at_once(shape: str) -> None:
    """They used to hang in a circle of the recorder until the collector came by: the next model then had no room."""
    config = {**SHAPES[shape], "num_hidden_layers": 1, "vocab_size": 8_000, "intermediate_size": 8_000}
    gc.collect()
    gc.disable()
    try:
        process = psutil.Process()
        model = random_model(config, ComputeConfig(backend="cpu", weights="bf16", threads=1), seed=0)
        held, weight_bytes = process.memory_info().rss, model.weight_bytes
        model.close()
        assert held - process.memory_info().rss > 0.9 * weight_bytes
    finally:
        gc.enable()


def test_an_instruction_set_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """With what this machine has; and torch, which chooses its own, does not drop the option in silence."""
    path = make_checkpoint("llama", tmp_path)
    if instruction_sets():
        with pytest.raises(ConfigError, match=f"'abacus'; this machine runs .*{instruction_sets()[-1]}"):
            load_model(path, ComputeConfig(backend="cpu", instruction_set="abacus"))
    with pytest.raises(ConfigError, match="torch chooses its own"):
        load_model(path, ComputeConfig(backend="torch", device="cpu", instruction_set="avx2"))


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.native)])
def test_hidden_states_are_those_that_transformers_gives(backend: str, tmp_path: Path) -> None:
    """Drafting heads and embeddings start from them; with scale and softcap of the head (Gemma 2) left out."""
    if backend == "cpu" and not instruction_sets():
        pytest.skip("the native kernels are not installed")
    reference = make_reference("gemma2")
    path = make_checkpoint("gemma2", tmp_path)
    model = load_model(path, ComputeConfig(backend=backend, device="cpu"))
    ids = [5, 9, 2, 77, 31, 8]
    batch = ForwardBatch(
        token_ids_T=np.array(ids, dtype=np.int32),
        query_start_S1=np.array([0, len(ids)], dtype=np.int32),
        context_tokens_S=np.array([len(ids)], dtype=np.int32),
        block_table_SM=np.array([[0]], dtype=np.int32),
        logits_rows_R=np.array([5, 1], dtype=np.int32),
    )
    kv = model.make_kv(n_blocks=1, block_tokens=16)
    got = model.forward(batch, kv, Want.HIDDEN)
    with torch.no_grad():
        expected = reference.model(torch.tensor([ids])).last_hidden_state[0, [5, 1]]
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < (1e-4 if model.weights_format == "fp32" else 0.1) * expected.abs().max()
    ids_best, values = model.forward(batch, kv, Want.BEST)
    logits = model.forward(batch, kv, Want.LOGITS)
    assert ids_best == logits.argmax(dim=-1).tolist()
    assert values == logits.max(dim=-1).values.tolist()


@pytest.mark.native
@pytest.mark.skipif(len(runner.cpu_kernels.instruction_sets()) < 2, reason="this processor has one kernel set")
def test_kernels_that_are_not_the_processors_best_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was said for every place of a load that asks for the set."""
    path = make_checkpoint("llama", tmp_path)
    best, *others = runner.cpu_kernels.instruction_sets()
    for name, expected in ((best, 0), ("auto", 0), (others[-1], 1)):
        caplog.clear()
        load_model(path, ComputeConfig(backend="cpu", instruction_set=name, threads=1)).close()
        assert sum("this processor also has" in record.getMessage() for record in caplog.records) == expected
