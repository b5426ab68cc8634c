"""The engine's tiny model is the cluster's too; and the engine that every answer of real workers has to equal."""

from __future__ import annotations

import pytest
from tests.engine.conftest import tiny_dir

from diptych.engine.llm import LLM

__all__ = ["tiny_dir"]


@pytest.fixture(scope="module")
def one() -> LLM:
    """With the settings of `tests.cluster.test_serve.OPTIONS`."""
    return LLM("bundled", threads=1, kv_memory_bytes=33554432, max_context_tokens=2048)
