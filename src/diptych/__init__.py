"""Diptych: an inference engine for large language models built around its two phases, prefill and decode.

The public names are imported on first use, so that `import diptych` (and `diptych --help`) loads no tensor library.

>>> from diptych import LLM, SamplingParams
>>> LLM("bundled").generate("Once upon a time")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.ground.importing import on_first_use
from diptych.ground.request import SamplingParams
from diptych.ground.version import VERSION as __version__

if TYPE_CHECKING:
    from diptych.engine.async_llm import AsyncLLM
    from diptych.engine.llm import LLM
    from diptych.engine.phases import TwoPhase

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "TwoPhase", "__version__"]

_HOMES = {"diptych.engine.llm": "LLM", "diptych.engine.async_llm": "AsyncLLM", "diptych.engine.phases": "TwoPhase"}
__getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    """The public names, those that nobody has used yet among them: for completion."""
    return sorted({*globals(), *__all__})
