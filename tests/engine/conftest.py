"""One tiny random Llama with a real tokenizer, shared by the engine's tests: text quality does not matter, equality does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.checkpoints import make_checkpoint

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig

BACKENDS = ["torch", pytest.param("cpu", marks=pytest.mark.native)]


def tiny_config(backend: str = "torch", **changes: object) -> EngineConfig:
    """Small pool, small steps: so that chunking, preemption and queueing happen."""
    scheduler = SchedulerConfig(max_step_tokens=48, max_running_sequences=8, max_context_tokens=256)
    values: dict[str, object] = {
        "scheduler": scheduler,
        "compute": ComputeConfig(backend=backend, weights="fp32" if backend == "torch" else "bf16", threads=1),
        "max_context_tokens": 256,
        "kv_memory_bytes": None,
        "block_tokens": 16,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose vocabulary is that of the bundled tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint("llama", directory, vocab_size=4096, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, directory / name)
    return directory


@pytest.fixture(scope="session", params=BACKENDS)
def loaded(tiny_dir: Path, request: pytest.FixtureRequest) -> LoadedModel:
    """The tiny model on each backend: what holds for one must hold for the other."""
    if request.param == "cpu" and not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    return load(str(tiny_dir), tiny_config(request.param))


@pytest.fixture
def llm(loaded: LoadedModel) -> LLM:
    return LLM(loaded, tiny_config())
