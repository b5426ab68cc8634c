"""`auto`: several drafters of one executor, each asked about chunks of its own, and answers that are those without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.conftest import tiny_config
from tests.engine.test_drafters import counts, exact  # noqa: F401
from tests.engine.test_heads import Fickle, make_heads
from tests.engine.test_speculation import CASES, PROMPTS, said

from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.compute.sampling.sampler import Sampler
from diptych.engine.drafters import open_drafters
from diptych.engine.llm import LLM
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig, engine_config
from diptych.ground.errors import ConfigError
from diptych.ground.request import SamplingParams
from diptych.ground.shape import StepShape


def folders(tiny_dir: Path, tmp_path: Path, *layouts: str) -> str:
    """A draft model and heads, as one option names them."""
    return ",".join(map(str, (tiny_dir, *(make_heads(tmp_path / one, one)[0] for one in layouts))))


@pytest.mark.parametrize("eagle", ["eagle1", "eagle3"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "json"])
def test_answers_are_those_without_whoever_is_asked(
    exact: LoadedModel,  # noqa: F811
    tiny_dir: Path,
    tmp_path: Path,
    name: str,
    eagle: str,
) -> None:
    """Three drafters take turns within a sequence and within a step; each goes on from what it knows of the text.

    The draft model is the model itself, so it is right whatever the others did in between.
    """
    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, CASES[name])
    llm = LLM(exact, config, speculate="auto", draft_model=folders(tiny_dir, tmp_path, "medusa", eagle))
    asked: Counter[tuple[int, bool]] = Counter()
    execute = llm.engine.stepper.executor.execute

    def watched(plan):
        result = execute(plan)
        for chunk, one in zip(plan.chunks, result.results, strict=True):
            if chunk.wanted_drafts:
                asked[chunk.drafter, bool(one.draft_token_ids)] += 1
        return result

    llm.engine.stepper.executor.execute = watched
    for seed in (1, 2):
        llm.engine.core._scheduler.drafts.depths = Fickle(seed)
        got = llm.generate(PROMPTS, CASES[name])  # the second time from the prefix cache
        assert [done.choices for done in got] == [done.choices for done in wanted]
        assert counts(got)[1] > 0
    assert min(asked[number, True] for number in range(3)) > 0, asked
    assert llm.engine.stats().drafter_faults == 0
    llm.engine.core.check()


def test_one_that_dies_leaves_the_others(
    exact: LoadedModel,  # noqa: F811
    tiny_dir: Path,
    tmp_path: Path,
) -> None:
    """A drafter that raises is off for itself alone, and is counted."""
    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, CASES["sampled"])
    llm = LLM(exact, config, speculate="auto", draft_model=folders(tiny_dir, tmp_path, "eagle3"))
    llm.engine.core._scheduler.drafts.depths = Fickle(1)
    drafting = llm.engine.stepper.executor.drafting

    def propose(*_: object) -> None:
        raise RuntimeError("broken")

    drafting._all[1]._drafter.propose = propose
    got = llm.generate(PROMPTS, CASES["sampled"])
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert [one.is_on for one in drafting._all] == [True, False]
    assert llm.engine.stats().drafter_faults == 1
    assert counts(llm.generate(PROMPTS, CASES["sampled"]))[1] > 0


def test_drafters_are_known_by_their_files(loaded: LoadedModel, tiny_dir: Path, tmp_path: Path) -> None:
    """Nobody has to say which of the folders are heads; one of each kind."""
    named = folders(tiny_dir, tmp_path, "medusa", "eagle1")
    config = engine_config(tiny_config(loaded.model.backend_name), speculate="auto", draft_model=named)
    opened = open_drafters(config, loaded.model, directory=tiny_dir, tokenizer=loaded.tokenizer)
    assert [one.kind for one in opened] == ["draft", "medusa", "eagle"]
    assert [one.cost.begins_every for one in opened] == [1, 1, config.block_tokens]
    assert [one.cost.most_drafts for one in opened] == [16, 3, 16]
    medusa = named.split(",")[1]
    for kind in ("draft", "eagle"):
        with pytest.raises(ConfigError, match=f"speculate is '{kind}', and .* holds medusa heads"):
            open_drafters(engine_config(config, speculate=kind, draft_model=medusa), loaded.model, directory=tiny_dir)
    twice = replace(config, draft_model=f"{named}, {tiny_dir}")
    with pytest.raises(ConfigError, match="two drafters of the kind draft"):
        open_drafters(twice, loaded.model, directory=tiny_dir, tokenizer=loaded.tokenizer)


def test_drafters_have_run_before_they_are_asked(exact: LoadedModel, tiny_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """The first forward of a head is cold and was its price for many steps."""
    named = folders(tiny_dir, tmp_path, "medusa", "eagle3")
    config = engine_config(tiny_config(), speculate="auto", draft_model=named)
    opened = open_drafters(config, exact.model, directory=tiny_dir, tokenizer=exact.tokenizer)
    shape = StepShape.decode(batch=1, context_tokens=10)
    before_s = [one.price_s(shape, [1]) for one in opened]
    for one, first_s in zip(opened, before_s, strict=True):
        drafter = one.drafter(8, Sampler(exact.model.spec.vocab_size, exact.model.device), clock=MonotonicClock())
        assert one.times.n_observed >= 2
        assert one.price_s(shape, [1]) < 0.5 * first_s, "what nobody has measured is a slow machine's"
        assert one.cost.is_measured
        if hasattr(drafter, "_store"):
            assert not any(drafter._store._written), "nothing that was written there is taken for a text"


@pytest.mark.native
def test_the_bundled_model_has_three() -> None:
    """Heads shipped beside the model were used by nobody who did not name them."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    loaded = load("bundled", EngineConfig(compute=ComputeConfig(threads=1)))
    opened = open_drafters(engine_config(speculate="auto"), loaded.model, directory=bundled_dir())
    assert [one.kind for one in opened] == ["draft", "medusa", "eagle"]
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    prompts = ["Once upon a time there was a little girl who", "The capital of France is"]
    wanted = LLM(loaded).generate(prompts, params)
    assert [said(done) for done in LLM(loaded, speculate="auto").generate(prompts, params)] == [
        said(done) for done in wanted
    ]
