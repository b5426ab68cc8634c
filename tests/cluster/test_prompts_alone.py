"""Prompts of which nothing is written, behind workers: whoever answers reads them, and nothing travels."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cluster.local import LocalCluster
from tests.cluster.test_hand_off import prompts, said
from tests.engine.conftest import tiny_config

from diptych.engine.llm import LLM
from diptych.engine.load import load
from diptych.ground.request import SamplingParams


@pytest.mark.native
@pytest.mark.parametrize("weighs", [None, 1])
def test_a_prompt_alone_is_read_where_it_is_answered(tiny_dir: Path, weighs: int | None) -> None:
    config = tiny_config("cpu")
    loaded = load(str(tiny_dir), config)
    asked, sampling = prompts((5, 40, 97, 130, 200)), SamplingParams(max_tokens=0, prompt_logprobs=weighs, n=2)
    cluster = LocalCluster(loaded, config, decode=2)
    got = cluster.llm.generate(asked, sampling)
    assert said(got) == said(LLM(loaded, config).generate(asked, sampling))
    assert [(one.usage.output_tokens, one.timings.ttft_s) for one in got] == [(0, None)] * len(asked)
    assert not cluster.total("sent_tokens")
    cluster.check()
