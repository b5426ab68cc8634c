"""Diptych: an inference engine for large language models built around its two phases, prefill and decode.

The public names are imported on first use, so that `import diptych` (and `diptych --help`) loads no tensor library.

>>> from diptych import LLM, SamplingParams
>>> LLM("bundled").generate("Once upon a time")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diptych.ground.importing import import_whole
from diptych.ground.request import SamplingParams
from diptych.ground.version import VERSION as __version__

if TYPE_CHECKING:
    from diptych.engine.async_llm import AsyncLLM
    from diptych.engine.llm import LLM
    from diptych.engine.phases import TwoPhase

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "TwoPhase", "__version__"]

_LAZY = {"LLM": "diptych.engine.llm", "AsyncLLM": "diptych.engine.async_llm", "TwoPhase": "diptych.engine.phases"}


def __getattr__(name: str) -> Any:
    """Import the engine's public classes on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'diptych' has no attribute {name!r}")
    return getattr(import_whole(_LAZY[name]), name)


def __dir__() -> list[str]:
    """The public names, those that nobody has used yet among them: for completion."""
    return sorted({*globals(), *__all__})
