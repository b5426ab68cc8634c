"""An engine over Gemma 3n and small Gemma 4: layers that keep nothing take no room, and no cut of work changes a token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import tiny_config

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.engine.phases import TwoPhase
from diptych.ground.request import SamplingParams

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu_kernels.is_available()[0], reason=cpu_kernels.is_available()[1]),
]
TOKENS = [5, 77, 1024, 300, 9, 2048, 41, 42, 43, 7, 600, 601, 602, 8, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="module", params=["gemma3n", "gemma4-e2b"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Of the second, layers keep heads of two widths."""
    directory = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, directory, dtype=torch.bfloat16, vocab_size=4096, vocab_size_per_layer_input=4000)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, directory / name)
    return load(str(directory), tiny_config("cpu"))


def test_a_state_has_the_keys_that_a_layer_attends_to(loaded: LoadedModel, tmp_path: Path) -> None:
    """Of a layer that keeps none, those of the one that does; a saved state holds them once."""
    phases = TwoPhase(loaded, tiny_config())
    state = phases.prefill(TOKENS)
    for layer, kept in ((4, 2), (5, 3)):
        for one, other in zip(phases.keys_values(state, layer), phases.keys_values(state, kept), strict=True):
            assert torch.equal(one, other)
    phases.save(state, tmp_path / "state")
    again = phases.load_state(tmp_path / "state")
    assert torch.equal(phases.decode(again)[1], phases.decode(state)[1])


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("family", ["mimo_v2_flash", "deepseek_v2", "minimax_m3"])
def test_what_a_state_keeps_of_each_layer_comes_back(family: str, backend: str, tmp_path: Path) -> None:
    """Values narrower than keys, keys that are the values, and an index's, which have none."""
    make_checkpoint(family, tmp_path, dtype=torch.bfloat16, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(bundled_dir() / name, tmp_path / name)
    phases = TwoPhase(load(str(tmp_path), tiny_config(backend)), tiny_config(backend))
    state = phases.prefill(TOKENS)
    phases.save(state, tmp_path / "state")
    again = phases.load_state(tmp_path / "state")
    assert torch.equal(phases.decode(again)[1], phases.decode(state)[1])


def test_a_small_pool_changes_no_token(loaded: LoadedModel) -> None:
    """Prompts that share a beginning, with too few blocks for all of them."""
    prompts = [TOKENS + [100 + i] * (9 + 7 * i) for i in range(5)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    alone = [LLM(loaded, tiny_config("cpu")).generate([one], params)[0] for one in prompts]
    room = 14 * loaded.model.kv_bytes_per_block(16)
    llm = LLM(loaded, tiny_config("cpu", kv_memory_bytes=room, max_context_tokens=112))
    together = llm.generate(prompts, params)
    assert [one.choices[0].token_ids for one in together] == [one.choices[0].token_ids for one in alone]
    assert llm.engine.stats().preemptions > 0
