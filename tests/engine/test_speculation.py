"""Speculation changes speed and nothing else: answers, log-probabilities, finish reasons and KV are those without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.conftest import tiny_config

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore
from diptych.compute.ops.cpu import kernels as cpu_kernels
from diptych.control.blocks import root_digest
from diptych.control.speculation import EveryGuess, NewDrafter
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel, load
from diptych.ground.config import EngineConfig
from diptych.ground.request import SamplingParams, StructuredSpec

BASE = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = replace(BASE, temperature=0.9, seed=7)
PROMPTS = ["One two three four, one two three four, one two", "The capital of France is", [5, 6, 7] * 20, "a"]
FORCED = StructuredSpec(kind="regex", source="(The ferry leaves at seven|On Sundays it leaves at ten)[.] [a-z]+ [.]")
CASES = {
    "greedy": BASE,
    "logprobs": replace(BASE, logprobs=3),
    "sampled": SAMPLED,
    "sampled_logprobs": replace(SAMPLED, logprobs=2),
    "top_p": replace(SAMPLED, top_p=0.8),
    "top_k": replace(SAMPLED, top_k=12),
    "min_p": replace(SAMPLED, min_p=0.1),
    "penalties": replace(BASE, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    "sampled_penalties": replace(SAMPLED, repetition_penalty=1.2, frequency_penalty=0.5, top_p=0.9),
    "bias": replace(SAMPLED, logit_bias={17: 5.0, 300: -4.0}),
    "min_tokens": replace(BASE, ignore_eos=False, min_tokens=9),
    "choices": replace(SAMPLED, n=3),
    "json": replace(SAMPLED, ignore_eos=False, structured=StructuredSpec(kind="json_object", source="")),
    "forced": replace(BASE, ignore_eos=False, structured=FORCED),
    "forced_logprobs": replace(SAMPLED, ignore_eos=False, structured=FORCED, logprobs=2),
    "regex": replace(BASE, ignore_eos=False, structured=StructuredSpec(kind="regex", source="(one|two|three){4}")),
}


class Scripted:
    """Knows the answers, and errs at a rate: acceptance by script, at a depth of its own for every step."""

    def __init__(self, known: Sequence[Sequence[int]], rng: random.Random, error_rate: float) -> None:
        self.known, self.rng, self.error_rate = known, rng, error_rate
        self.confidence = 0

    def propose(self, token_ids: Sequence[int], n: int) -> list[int]:
        head = list(token_ids)
        for text in self.known:
            if list(text[: len(head)]) == head:
                right = list(text[len(head) : len(head) + self.rng.randint(1, n)])
                return [t if self.rng.random() >= self.error_rate else self.rng.randrange(4000) for t in right]
        return []


def speculating(loaded: LoadedModel, config: EngineConfig, wanted: list[Completion], *, errs: float) -> LLM:
    """An engine whose drafter knows what should come."""
    known = [(*done.prompt_token_ids, *choice.token_ids) for done in wanted for choice in done.choices]
    rng = random.Random(11)
    return unpriced(LLM(loaded, config), {"scripted": lambda request: Scripted(known, rng, errs)})


def unpriced(llm: LLM, drafters: dict[str, NewDrafter] | None = None) -> LLM:
    """Depths that do not hang on how fast this machine is just now; these drafters in place of the engine's."""
    drafts = llm.engine.core._scheduler.drafts
    drafts.depths = EveryGuess(rows=64)
    if drafters is not None:
        drafts.guesser._drafters = drafters
    return llm


def said(done: Completion) -> object:
    """All that a caller sees, times and counts of speculation apart."""
    usage = replace(done.usage, drafted_tokens=0, accepted_tokens=0)
    choices = [(c.index, c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in done.choices]
    return choices, usage, done.error


_PLAIN: dict[str, list[Completion]] = {}


def plain(exact: LoadedModel, params: SamplingParams) -> list[Completion]:
    """The tiny model's answers to PROMPTS without speculation, which every drafter's are held against; once a process."""
    asked = repr(params)
    if asked not in _PLAIN:
        _PLAIN[asked] = LLM(exact, tiny_config()).generate(PROMPTS, params)
    return _PLAIN[asked]


@pytest.fixture
def exact(loaded: LoadedModel) -> LoadedModel:
    """The cpu backend, where a row has the same bits however the step is cut."""
    if loaded.model.backend_name != "cpu":
        pytest.skip("bit for bit on the cpu backend only; on torch logits are equal within its tolerance")
    return loaded


@pytest.mark.parametrize("errs", [0.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_without(exact: LoadedModel, name: str, errs: float) -> None:
    """Every way to draw, beside neighbours and prefill in chunks, at scripted acceptance."""
    config = tiny_config()
    wanted = plain(exact, CASES[name])
    llm = speculating(exact, config, wanted, errs=errs)
    got = llm.generate(PROMPTS, CASES[name])
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert sum(done.usage.accepted_tokens for done in got) > 0
    again = llm.generate(PROMPTS, CASES[name] if name != "choices" else BASE)  # from the prefix cache
    if name != "choices":
        assert [[c.token_ids for c in d.choices] for d in again] == [[c.token_ids for c in d.choices] for d in wanted]


def test_what_a_grammar_quotes_lookup_finds_in_the_prompt(exact: LoadedModel) -> None:
    """Structured output whose values are sentences of the prompt: the drafter that is shipped, under masks, at both ends of
    temperature, and drafts that run into the end of the grammar.
    """
    config = tiny_config()
    lines = [
        "The ferry leaves the harbour at seven in the morning",
        "On Sundays the first ferry leaves at ten, not at seven",
    ]
    prompt = "\n".join(lines) + "\nCite two lines:\n"
    grammar = StructuredSpec(kind="regex", source=f"({'|'.join(lines)})\n({'|'.join(lines)})\n")
    off, on = LLM(exact, config), unpriced(LLM(exact, config, speculate="lookup", max_draft_tokens=6))
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=200, temperature=temperature, seed=3, structured=grammar, n=2)
        (wanted,), (got,) = off.generate([prompt], params), on.generate([prompt], params)
        assert said(got) == said(wanted)
        assert all(choice.text.split("\n")[0] in lines for choice in got.choices), "the grammar has its way"
        assert got.usage.accepted_tokens > 10


@pytest.mark.parametrize("speculate", ["lookup", "draft"])
def test_what_a_grammar_forces_is_drafted_and_asks_for_no_logits(
    exact: LoadedModel, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, speculate: str
) -> None:
    """Text that stands nowhere in the prompt, and that no drafter of tensors need guess."""
    grammar = StructuredSpec(
        kind="regex", source="It is forbidden to (lean out|smoke) while the train is moving[.] [a-z]{5}"
    )
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3, structured=grammar)
    others = replace(BASE, max_tokens=40)
    asked: list[int] = []
    forward = exact.model.forward

    def counted(batch: ForwardBatch, *rest: object, **named: object) -> object:
        asked.append(len(batch.logits_rows_R))
        return forward(batch, *rest, **named)

    monkeypatch.setattr(exact.model, "forward", counted)
    off = LLM(exact, tiny_config())
    wanted = off.generate(["Rules:", "a"], [params, others])
    n_off = sum(asked)
    drafting = {"draft_model": str(tiny_dir)} if speculate == "draft" else {}
    llm = unpriced(LLM(exact, tiny_config(), speculate=speculate, **drafting))
    got = llm.generate(["Rules:", "a"], [params, others])
    assert [said(done) for done in got] == [said(done) for done in wanted]
    usage = got[0].usage
    assert usage.accepted_tokens > 0.6 * usage.output_tokens
    n_drawn = sum(done.usage.output_tokens for done in wanted)
    assert n_off < n_drawn - 0.6 * usage.output_tokens, "forced rows need no logits, drafted or not"


def test_lookup_itself_saves_steps_and_changes_nothing(exact: LoadedModel) -> None:
    """The drafter that is shipped, on a text that repeats itself."""
    config = tiny_config()
    params = replace(BASE, max_tokens=60, logit_bias={17: 6.0, 300: 5.5, 9: 5.0})
    off = LLM(exact, config)
    steps_off, steps_on = [], []
    off.engine.book.on_step.append(steps_off.append)
    wanted = off.generate(PROMPTS, params)
    on = unpriced(LLM(exact, config, speculate="lookup"))
    on.engine.book.on_step.append(steps_on.append)
    got = on.generate(PROMPTS, params)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert sum(done.usage.accepted_tokens for done in got) > 0
    assert len(steps_on) < len(steps_off)


def test_a_preempted_sequence_goes_on_as_without(exact: LoadedModel) -> None:
    """Too few blocks for all: drafts never take one that a token needs, and a recompute forgets none."""
    config = tiny_config(max_context_tokens=96)
    config = replace(config, kv_memory_bytes=8 * exact.model.kv_bytes_per_block(config.block_tokens))
    params = replace(SAMPLED, max_tokens=40, repetition_penalty=1.2)
    prompts = [list(range(40 + i, 85 + i)) for i in range(3)]
    wanted = LLM(exact, config).generate(prompts, params)
    llm = speculating(exact, config, wanted, errs=0.2)
    got = llm.generate(prompts, params)
    assert [c.token_ids for d in got for c in d.choices] == [c.token_ids for d in wanted for c in d.choices]
    assert llm.engine.stats().preemptions > 0
    llm.engine.core.check()


@pytest.mark.parametrize("params", [BASE, SAMPLED], ids=["greedy", "sampled"])
def test_a_stop_in_the_middle_of_a_run_ends_there(exact: LoadedModel, params: SamplingParams) -> None:
    """Tokens behind a stop string or stop id were counted as output, and a later limit gave the reason."""
    config = tiny_config()
    free = LLM(exact, config).generate(PROMPTS, params)
    n_cut = 0
    for done in free:
        tokens = done.choices[0].token_ids
        for at in (5, 11, 17):
            text = exact.tokenizer.decode(list(tokens[: at + 1]))
            for stopping in (
                replace(params, stop_token_ids=(tokens[at],)),
                replace(params, stop=(text[-3:],)),
                replace(params, max_tokens=at),
            ):
                prompt = list(done.prompt_token_ids)
                wanted = LLM(exact, config).generate([prompt], stopping)
                llm = speculating(exact, config, free, errs=0.0)
                got = llm.generate([prompt], stopping)
                assert [said(one) for one in got] == [said(one) for one in wanted]
                usage = got[0].usage
                assert usage.accepted_tokens <= min(usage.drafted_tokens, usage.output_tokens)
                n_cut += usage.accepted_tokens > 0
                llm.engine.core.check()
    assert n_cut > 0


@pytest.mark.parametrize("params", [BASE, replace(SAMPLED, n=2)], ids=["greedy", "sampled"])
def test_a_prediction_saves_steps_and_changes_nothing(exact: LoadedModel, params: SamplingParams) -> None:
    """The user's text as the draft: right, with words changed, wrong, or of another request; nobody else guesses."""
    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, params)
    right = [done.choices[0].text for done in wanted]
    edited = [text[:20] + " an edit " + text[25:] for text in right]
    n_accepted = {}
    for name, predicted in {
        "right": right,
        "edited": edited,
        "wrong": right[1:] + right[:1],
        "empty": [""] * 4,
    }.items():
        llm = unpriced(LLM(exact, config))
        asked = [replace(params, prediction=text) for text in predicted]
        got = llm.generate(PROMPTS, asked)
        assert [said(done) for done in got] == [said(done) for done in wanted], name
        n_accepted[name] = sum(done.usage.accepted_tokens for done in got)
    assert n_accepted["right"] > n_accepted["edited"] > n_accepted["wrong"]
    assert n_accepted["empty"] == 0


def test_requests_that_want_no_drafts_stand_beside_those_that_do(exact: LoadedModel) -> None:
    """Off for one request is off for it alone, and changes neither's answer."""
    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, SAMPLED)
    llm = speculating(exact, config, wanted, errs=0.2)
    asked = [replace(SAMPLED, max_draft_tokens=most) for most in (0, None, 2, 0)]
    asked[3] = replace(asked[3], prediction=wanted[3].choices[0].text)
    got = llm.generate(PROMPTS, asked)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    assert [done.usage.drafted_tokens > 0 for done in got] == [False, True, True, False]


def test_memory_of_answers_saves_steps_and_changes_nothing(exact: LoadedModel) -> None:
    """The second of two alike is guessed from the first; one with another salt is not."""
    config = tiny_config()
    prompt, params = "The capital of France is", replace(SAMPLED, max_tokens=60)
    wanted = LLM(exact, config).generate([prompt], params)

    def drafted(**settings) -> list[tuple[int, int]]:
        llm = unpriced(LLM(exact, config, speculate="lookup", **settings))
        counts = []
        for salt in ("a", "a", "b"):
            request = llm.engine.make_request(prompt, params, arrival_s=0.0, cache_salt=salt)
            (got,) = llm._run([request], None, None)
            assert [c.token_ids for c in got.choices] == [c.token_ids for c in wanted[0].choices]
            counts.append(got.usage.accepted_tokens)
        return counts

    without, known = drafted(), drafted(lookup_memory_tokens=1000)
    assert known[1] > without[1] + 20
    assert (known[0], known[2]) == (without[0], without[2])


@pytest.mark.parametrize("name", ["greedy", "sampled_penalties", "json"])
def test_auto_changes_nothing(exact: LoadedModel, name: str) -> None:
    """As shipped, with the prices that this machine has."""
    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, CASES[name])
    got = LLM(exact, config, speculate="auto").generate(PROMPTS, CASES[name])
    assert [said(done) for done in got] == [said(done) for done in wanted]


def test_a_drafter_that_dies_costs_speed_and_no_answer(exact: LoadedModel) -> None:
    """A token outside the vocabulary read beyond the embedding; an exception ended every request of the step."""

    class Dying:
        confidence = 0

        def __init__(self) -> None:
            self.n = 0

        def propose(self, token_ids: Sequence[int], n: int) -> list[int]:
            self.n += 1
            if self.n == 3:
                return [exact.model.spec.vocab_size]
            return [1, 2]

    config = tiny_config()
    wanted = LLM(exact, config).generate(PROMPTS, SAMPLED)
    llm = unpriced(LLM(exact, config), {"dying": lambda request: Dying()})
    assert [said(done) for done in llm.generate(PROMPTS, SAMPLED)] == [said(done) for done in wanted]
    assert llm.engine.stats().drafter_faults == len(PROMPTS)


@pytest.mark.native
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_keys_and_values_are_those_without(tiny_dir: Path, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of rejected drafts are written over by the tokens that came instead, in every format of the cache."""
    if not cpu_kernels.is_available()[0]:
        pytest.skip(cpu_kernels.is_available()[1])
    config = tiny_config("cpu")
    config = replace(config, compute=replace(config.compute, kv=kv))
    loaded = load(str(tiny_dir), config)
    stores: list[KVStore] = []
    make_kv = loaded.model.make_kv

    def kept(n_blocks: int, block_tokens: int, n_places: int) -> KVStore:
        stores.append(make_kv(n_blocks, block_tokens, n_places))
        return stores[-1]

    monkeypatch.setattr(loaded.model, "make_kv", kept)
    params = replace(SAMPLED, max_tokens=100)
    off = LLM(loaded, config)
    wanted = off.generate(PROMPTS, params)
    on = speculating(loaded, config, wanted, errs=0.3)
    got = on.generate(PROMPTS, params)
    assert [said(done) for done in got] == [said(done) for done in wanted]
    for done in got:
        assert 0 < done.usage.accepted_tokens < done.usage.drafted_tokens
        tokens = [*done.prompt_token_ids, *done.choices[0].token_ids]
        n_blocks = (len(tokens) - 1) // config.block_tokens
        cached = [blocks_of(llm, tokens, n_blocks) for llm in (off, on)]
        assert len(cached[0]) == len(cached[1]) == n_blocks > 5
        for layer in range(loaded.model.spec.n_layers):
            sides = [
                store.read(layer, ids, n_blocks * config.block_tokens)
                for store, ids in zip(stores, cached, strict=True)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))


def blocks_of(llm: LLM, tokens: list[int], n_blocks: int) -> list[int]:
    """Where the prefix index holds a text."""
    core = llm.engine.core
    root = root_digest(core.model_revision, None)
    found = core.pool.match(tokens, salt=None, digests=[], root=root, max_blocks=n_blocks)
    return [entry.block_id for entry in found]


def test_on_torch_drafts_change_greedy_text_no_more_than_chunks_do(
    loaded: LoadedModel,
) -> None:
    """In fp32 torch's rows differ by rounding however they are cut; the likeliest token of this model does not."""
    if loaded.model.backend_name != "torch":
        pytest.skip("the cpu backend is held bit for bit above")
    wanted = LLM(loaded, tiny_config()).generate(PROMPTS, BASE)
    llm = speculating(loaded, tiny_config(), wanted, errs=0.3)
    got = llm.generate(PROMPTS, BASE)
    assert [done.choices[0].token_ids for done in got] == [done.choices[0].token_ids for done in wanted]
    assert sum(done.usage.accepted_tokens for done in got) > 0
