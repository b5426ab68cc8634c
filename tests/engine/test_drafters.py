"""Drafters that run tensors: their guesses are worth what they are worth, and answers are those without."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import tiny_config
from tests.engine.test_speculation import BASE, CASES, PROMPTS, SAMPLED, plain, said, unpriced

from diptych.compute.drafting.drafter import DraftModel
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.control.speculation import NOTHING, EveryGuess
from diptych.engine.drafters import open_drafters
from diptych.engine.drafting import Drafting, Draftings
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel, load
from diptych.engine.pool_size import size_pool
from diptych.ground.config import ComputeConfig, EngineConfig, engine_config
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.ground.request import SamplingParams
from diptych.ground.step import Chunk, ChunkResult, SequenceStart, StepPlan


@pytest.fixture
def exact(loaded: LoadedModel) -> LoadedModel:
    """The cpu backend, where a row has the same bits however the step is cut."""
    if loaded.model.backend_name != "cpu":
        pytest.skip("bit for bit on the cpu backend only; on torch logits are equal within its tolerance")
    return loaded


def drafting(loaded: LoadedModel, config: EngineConfig, draft: Path, **settings: object) -> LLM:
    """An engine with a draft model, whose depths are not priced."""
    llm = LLM(loaded, config, speculate="draft", draft_model=str(draft), **settings)
    return unpriced(llm)


def counts(done: Sequence[Completion]) -> tuple[int, int]:
    """(drafted, accepted) tokens."""
    return sum(d.usage.drafted_tokens for d in done), sum(d.usage.accepted_tokens for d in done)


@pytest.mark.parametrize("name", CASES)
def test_a_drafter_that_is_the_model_itself_is_always_right(exact: LoadedModel, tiny_dir: Path, name: str) -> None:
    """Same noise, penalties and grammar, and keys and values where they belong: or it would be wrong somewhere.

    Beside neighbours, with prompts in chunks and, the second time, from the prefix cache.
    """
    config = tiny_config()
    wanted = plain(exact, CASES[name])
    llm = drafting(exact, config, tiny_dir)
    for _ in range(2):
        got = llm.generate(PROMPTS, CASES[name])
        drafted, accepted = counts(got)
        ends = (
            len(PROMPTS) if name == "regex" else 0
        )  # a draft that ends the grammar is drawn, and nothing stands behind it
        assert 0 < accepted == drafted - ends
        if name != "choices":  # their seeds are the engine's next
            assert [[c.token_ids for c in d.choices] for d in got] == [[c.token_ids for c in d.choices] for d in wanted]
    assert llm.engine.stepper.executor.drafting.failures == 0


@pytest.fixture(scope="session")
def other_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary that is mostly wrong."""
    directory = tmp_path_factory.mktemp("other")
    make_checkpoint("qwen3", directory, seed=5, vocab_size=4096, max_position_embeddings=512, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, directory / name)
    return directory


@pytest.mark.parametrize("name", ["greedy", "sampled_logprobs", "penalties", "choices", "json", "regex"])
def test_a_drafter_that_is_mostly_wrong_changes_nothing(exact: LoadedModel, other_dir: Path, name: str) -> None:
    """Another family, another size of the cache: every answer as without."""
    config = tiny_config()
    wanted = plain(exact, CASES[name])
    llm = drafting(exact, config, other_dir)
    got = llm.generate(PROMPTS, CASES[name])
    assert [said(done) for done in got] == [said(done) for done in wanted]
    drafted, accepted = counts(got)
    assert drafted > accepted


def test_it_stays_right_through_preemption(exact: LoadedModel, tiny_dir: Path) -> None:
    """Blocks go and come back with other numbers: the drafter's keys and values go with them."""
    config = tiny_config(max_context_tokens=96)
    both = 2 * exact.model.kv_bytes_per_block(config.block_tokens)
    config = replace(config, kv_memory_bytes=(8 + 8) * both)
    params = replace(SAMPLED, max_tokens=40, repetition_penalty=1.2)
    prompts = [list(range(40 + i, 85 + i)) for i in range(6)]
    wanted = LLM(exact, config).generate(prompts, params)
    llm = drafting(exact, config, tiny_dir)
    got = llm.generate(prompts, params)
    assert llm.engine.stats().preemptions > 0
    assert [c.token_ids for d in got for c in d.choices] == [c.token_ids for d in wanted for c in d.choices]
    drafted, accepted = counts(got)
    assert drafted == accepted > 0
    llm.engine.core.check()


@pytest.mark.parametrize("depth", [1, 2, 7, 16])
def test_at_every_depth(exact: LoadedModel, tiny_dir: Path, depth: int) -> None:
    """Drafts that reach over the ends of blocks lie in scratch, and are computed again when they have come true."""
    config = tiny_config()
    params = replace(SAMPLED, max_tokens=70)
    wanted = plain(exact, params)
    got = drafting(exact, config, tiny_dir, max_draft_tokens=depth).generate(PROMPTS, params)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    drafted, accepted = counts(got)
    assert drafted == accepted > 0


@pytest.mark.native
@pytest.mark.parametrize(("weights", "kv"), [("int8", "bf16"), ("int4", "int8"), ("bf16", "int8")])
def test_in_every_format(tiny_dir: Path, other_dir: Path, weights: str, kv: str) -> None:
    """A row has the same bits among others in every format of weights and cache."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    config = tiny_config("cpu")
    config = replace(config, compute=replace(config.compute, weights=weights, kv=kv))
    loaded = load(str(tiny_dir), config)
    for params in (BASE, SAMPLED):
        wanted = LLM(loaded, config).generate(PROMPTS, params)
        for draft in (tiny_dir, other_dir):
            got = drafting(loaded, config, draft).generate(PROMPTS, params)
            assert [said(done) for done in got] == [said(done) for done in wanted]
            assert counts(got)[0] > 0


def test_a_neighbour_that_nobody_drafts_for_can_be_caught_up_with(exact: LoadedModel, tiny_dir: Path) -> None:
    """A sequence is given up and tried again later: the drafter first reads what it has missed, in several steps where that is
    much. Nobody asked for it in this test once, as the switch that it turned had gone.
    """
    config = tiny_config()
    params = replace(BASE, max_tokens=60)
    wanted = LLM(exact, config).generate([[7, 8, 9] * 40], params)
    llm = drafting(exact, config, tiny_dir)

    class Late(EveryGuess):
        """Gives everybody up for the prompt and the first tokens."""

        def read(self, estimates: object, end: int, n: int) -> None:
            return None

        def ask(self, options, **settings):
            is_late = llm.engine.core._next_step_id > 12
            return super().ask(options, **settings) if is_late else [NOTHING] * len(options)

    llm.engine.core._scheduler.drafts.depths = Late(rows=64)
    got = llm.generate([[7, 8, 9] * 40], params)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    drafted, accepted = counts(got)
    assert drafted == accepted > 0


def test_on_torch_greedy_text_stays(loaded: LoadedModel, tiny_dir: Path) -> None:
    """In fp32 torch's rows differ by rounding however they are cut; the likeliest token of this model does not."""
    if loaded.model.backend_name != "torch":
        pytest.skip("the cpu backend is held bit for bit above")
    for params in (BASE, replace(BASE, repetition_penalty=1.3), replace(SAMPLED, top_p=0.9)):
        wanted = LLM(loaded, tiny_config()).generate(PROMPTS, params)
        got = drafting(loaded, tiny_config(), tiny_dir).generate(PROMPTS, params)
        assert [c.token_ids for d in got for c in d.choices] == [c.token_ids for d in wanted for c in d.choices]
        drafted, accepted = counts(got)
        assert 0 < 0.9 * drafted < accepted


class Trouble(Exception):
    """What a drafter dies of."""


def _raise(*_: object, **__: object) -> None:
    raise Trouble("the drafter is broken")


@pytest.mark.parametrize("method", ["begin", "end", "copy_blocks", "follow", "reads", "propose"])
def test_a_drafter_that_raises_is_switched_off(
    exact: LoadedModel, tiny_dir: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs speed and no answer: the requests of its last step go on too."""
    config = tiny_config()
    params = replace(SAMPLED, n=2)
    prompts = [list(range(9 + i, 40 + i)) for i in range(3)]
    wanted = LLM(exact, config).generate(prompts, params)
    llm = drafting(exact, config, tiny_dir)
    monkeypatch.setattr(DraftModel, method, _raise)
    with caplog.at_level(logging.WARNING):
        got = llm.generate(prompts, params)
        llm.generate(prompts, BASE)
    state = llm.engine.stepper.executor.drafting
    assert (state.failures, state.is_on) == (1, False)
    assert llm.engine.stats().drafter_faults == 1, "the server's metrics knew of control's drafters only"
    assert "drafter switched off, answers go on without: Trouble: the drafter is broken" in caplog.text
    assert [[c.token_ids for c in d.choices] for d in got] == [[c.token_ids for c in d.choices] for d in wanted]


LIES: dict[str, Callable[[random.Random, int], list[object]]] = {
    "out_of_range": lambda rng, n: [rng.choice([-1, 4096, 2**40, -(2**70)]) for _ in range(n)],
    "too_many": lambda rng, n: [rng.randrange(4096) for _ in range(n + 40)],
    "too_few": lambda rng, n: [],
    "no_integers": lambda rng, n: ["a", None, 1.5, True][:n],
    "wrong": lambda rng, n: [rng.randrange(4096) for _ in range(n)],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_drafter_that_lies_changes_nothing(
    exact: LoadedModel, tiny_dir: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are none, more than were asked, sequences that nobody asked for."""
    config = tiny_config()
    wanted = plain(exact, SAMPLED)
    llm = drafting(exact, config, tiny_dir)
    rng = random.Random(2)

    def propose(self: object, chunks: Sequence[Chunk], *rest: object) -> dict[int, list[object]]:
        return {seq_id: LIES[lie](rng, 3) for seq_id in (*(chunk.seq_id for chunk in chunks), 10**9)}

    monkeypatch.setattr(DraftModel, "propose", propose)
    got = llm.generate(PROMPTS, SAMPLED)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    state = llm.engine.stepper.executor.drafting
    assert state.is_on
    assert (state.refused_tokens > 0) == (lie in ("out_of_range", "too_many", "no_integers", "wrong"))
    assert (counts(got)[0] > 0) == (lie in ("too_many", "wrong"))


def test_another_vocabulary_is_refused_with_both_numbers(loaded: LoadedModel, tmp_path: Path, tiny_dir: Path) -> None:
    """Drafts are token ids: between other vocabularies they would mean other words."""
    import json

    make_checkpoint("llama", tmp_path, vocab_size=4000)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, tmp_path / name)
    config = engine_config(tiny_config(loaded.model.backend_name), speculate="draft", draft_model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"vocabulary of 4000 tokens; the model's has 4096"):
        open_drafters(config, loaded.model)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    (a, i), (b, j) = list(vocab.items())[700:702]
    vocab[a], vocab[b] = j, i
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=rf"differs in 2 of 4096 tokens: id {min(i, j)} is"):
        open_drafters(config, loaded.model, tokenizer=loaded.tokenizer)
    with pytest.raises(ConfigError, match="speculate is 'draft', and no draft model is given"):
        open_drafters(replace(config, draft_model=None), loaded.model, directory=tiny_dir)


def padded(tiny_dir: Path, directory: Path, vocab_size: int) -> Path:
    """A checkpoint with the tiny model's words, and more rows in its table than there are words."""
    make_checkpoint("qwen3", directory, seed=3, vocab_size=vocab_size, max_position_embeddings=512, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, directory / name)
    return directory


@pytest.mark.parametrize("name", ["greedy", "sampled", "json"])
def test_a_table_padded_to_another_size_is_no_other_vocabulary(
    exact: LoadedModel, tiny_dir: Path, tmp_path: Path, name: str
) -> None:
    """Models of one family pad their tables to different sizes (Qwen2.5: 151,936 and 152,064 rows), and were refused."""
    config = tiny_config()
    large = padded(tiny_dir, tmp_path, 4160)
    wanted = plain(exact, CASES[name])
    llm = drafting(exact, config, large)
    assert [said(done) for done in llm.generate(PROMPTS, CASES[name])] == [said(done) for done in wanted]
    assert llm.engine.stats().drafter_faults == 0
    # the other way round, and the model says what the drafter has no row for
    loaded = load(str(large), tiny_config("cpu"))
    params = replace(CASES[name], logit_bias={4100: 30.0}) if name != "json" else CASES[name]
    wanted = LLM(loaded, config).generate(PROMPTS, params)
    assert name == "json" or any(4100 in done.choices[0].token_ids for done in wanted)
    llm = drafting(loaded, config, tiny_dir)
    assert [said(done) for done in llm.generate(PROMPTS, params)] == [said(done) for done in wanted]
    assert llm.engine.stats().drafter_faults == 0


def test_a_draft_model_is_for_drafters_that_read_one() -> None:
    """An option that does nothing would be a silent lie."""
    with pytest.raises(ConfigError, match="draft_model is 'x', and speculate is 'lookup'"):
        engine_config(speculate="lookup", draft_model="x")
    with pytest.raises(ConfigError, match="max_draft_tokens is 17"):
        engine_config(max_draft_tokens=17)


def test_the_pool_pays_for_both_stores(loaded: LoadedModel, tiny_dir: Path) -> None:
    """A drafter's keys and values are memory too: of the same bytes there are fewer blocks."""
    config = replace(tiny_config(loaded.model.backend_name), kv_memory_bytes=1_000_000)
    alone = size_pool(loaded.model, config).n_blocks
    config = engine_config(config, speculate="draft", draft_model=str(tiny_dir))
    (drafter,) = open_drafters(config, loaded.model)
    n_blocks = size_pool(loaded.model, config, [drafter]).n_blocks
    assert n_blocks < 0.6 * alone
    spent = n_blocks * (loaded.model.kv_bytes_per_block(16) + drafter.block_bytes) + drafter.scratch_bytes
    assert 950_000 < spent <= 1_000_000


@pytest.mark.native
@pytest.mark.parametrize(("drafter", "temperature"), [("draft", 0.0), ("draft", 0.8), ("eagle", 0.0)])
def test_the_bundled_drafters_save_steps(drafter: str, temperature: float) -> None:
    """`speculate` alone takes the bundled drafter for the bundled model; a quarter of the steps goes at least."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    loaded = load("bundled", EngineConfig(compute=ComputeConfig(threads=1)))
    params = SamplingParams(max_tokens=80, temperature=temperature, seed=3, ignore_eos=True)
    prompts = ["Once upon a time there was a little girl who", "The capital of France is"]
    wanted = LLM(loaded).generate(prompts, params)
    llm = unpriced(LLM(loaded, speculate=drafter, max_draft_tokens=4))
    steps: list[object] = []
    llm.engine.book.on_step.append(steps.append)
    got = llm.generate(prompts, params)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert len(steps) < 60


def test_a_step_that_asks_nothing_of_a_drafter_does_not_call_it(tiny_dir: Path) -> None:
    """Every step told it what came, which a small model's step noticed: now it is told when it is asked, and misses nothing."""
    calls: list[tuple[str, int]] = []

    class Noting:
        taps: tuple[int, ...] = ()
        n_read = 0

        def begin(self, start: SequenceStart) -> None:
            calls.append(("begin", start.seq_id))

        def end(self, seq_id: int) -> None:
            calls.append(("end", seq_id))

        def follow(self, chunks, token_ids) -> None:
            calls.extend(("follow", given[0]) for given in token_ids)

        def reads(self, chunk: Chunk) -> bool:
            return bool(chunk.wanted_drafts)

        def propose(self, chunks, token_ids, tables_CM, states=None):
            return {chunks[0].seq_id: [7]}

    drafting = Draftings([Drafting(Noting(), vocab_size=100)])  # type: ignore[arg-type]

    def step(token_id: int, wanted: int | None) -> None:
        chunk = Chunk(1, Phase.DECODE, token_id, (token_id,), 0, (), True, wanted)
        plan = StepPlan(step_id=token_id, chunks=(chunk,))
        results = (ChunkResult(seq_id=1, token_ids=(token_id + 1,)),)
        drafting.begin(plan)
        (done,) = drafting.end(plan, results, lambda seq_ids: np.zeros((1, 1), dtype=np.int32), None)
        assert done.draft_token_ids == ((7,) if wanted else ())

    for token_id in range(10):
        step(token_id, None)
    assert calls == []
    step(10, 1)
    assert calls == [("follow", token_id + 1) for token_id in range(11)]
    for token_id in range(11, 20):
        step(token_id, None)
    drafting.begin(StepPlan(step_id=20, chunks=(), ended_seq_ids=(1,)))
    assert calls[11:] == [*(("follow", token_id + 1) for token_id in range(11, 20)), ("end", 1)], "in their order"
