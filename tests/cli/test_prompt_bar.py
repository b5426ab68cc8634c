"""The bar of a long prompt: there while it is read, gone before the first word, silent otherwise."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diptych.cli.prompt_bar import PromptBar
from diptych.engine.llm import LLM
from diptych.ground.clock import sleep_s
from diptych.ground.events import Event
from diptych.ground.request import SamplingParams

PROMPT = list(range(5, 305))
ASK = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", max_context_tokens=512, max_step_tokens=64, enable_prefix_cache=False)


def shown(llm: LLM, *, patience_s: float, is_terminal: bool = True, step_s: float = 0.0) -> str:
    """What a console gets while the prompt is read in steps of 64 tokens."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=100)
    texts: list[str] = []

    def wait(events: list[Event]) -> None:
        sleep_s(step_s)

    end_waiting = llm.engine.listen(wait)
    with PromptBar(llm.engine, len(PROMPT), console=console, patience_s=patience_s) as bar:

        def write(_: int, delta: object) -> None:
            bar.close()
            texts.append(written.getvalue())

        llm.generate([PROMPT], ASK, on_delta=write)
    end_waiting()
    assert written.getvalue() == texts[0], "nothing is drawn over the answer"
    return texts[0]


def test_a_prompt_that_takes_long_is_shown_as_it_is_read(llm: LLM) -> None:
    text = shown(llm, patience_s=0.0, step_s=0.15)
    assert "reading the prompt" in text
    assert "64 of 300 tokens" in text or "128 of 300 tokens" in text
    assert text.endswith(("\x1b[2K", "\x1b[?25h")), "it is gone"


def test_who_need_not_wait_or_has_no_terminal_sees_nothing(llm: LLM) -> None:
    assert shown(llm, patience_s=60.0) == ""
    assert shown(llm, patience_s=0.0, is_terminal=False, step_s=0.05) == ""
