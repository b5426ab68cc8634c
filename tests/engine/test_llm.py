"""`LLM` end to end on a tiny random model: the answer may not depend on anything but the request."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.cost.test_profile import PROFILE
from tests.engine.conftest import tiny_config

from diptych.compute.batch import ForwardBatch
from diptych.compute.kv_store import KVStore
from diptych.compute.model import Best, Want
from diptych.cost.profile import profile_path
from diptych.engine.engine import OutputDelta
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import LoadedModel
from diptych.engine.model_profile import local_predictor
from diptych.engine.pool_size import size_pool
from diptych.ground.config import EngineConfig
from diptych.ground.errors import (
    BadSampling,
    CapacityError,
    ConfigError,
    GrammarError,
    PromptTooLong,
    RequestError,
    SequenceError,
)
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams, StructuredSpec

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The capital of France is", "It was a dark and stormy night; " * 6, "a", "One two three"]


def texts(completions: list[Completion]) -> list[str]:
    return [one.choices[0].text for one in completions]


def assert_account_adds_up(done: Completion) -> None:
    """Every token has one source and every second one phase."""
    usage, timings = done.usage, done.timings
    assert usage.prompt_tokens == len(done.prompt_token_ids)
    assert usage.computed_tokens + usage.cached_tokens == usage.prompt_tokens
    assert usage.output_tokens == sum(len(choice.token_ids) for choice in done.choices)
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s, abs=1e-3)
    assert timings.e2e_s == pytest.approx(timings.queue_s + timings.prefill_s + timings.decode_s, abs=1e-3)


@pytest.mark.parametrize("max_step_tokens", [1, 5, 16, 17, 48])
def test_prompt_logprobs_do_not_depend_on_how_the_prompt_was_cut(loaded: LoadedModel, max_step_tokens: int) -> None:
    """Entries were lost or shifted wherever a prompt took more than one chunk: two sides left out what each other had."""
    params = replace(GREEDY, prompt_logprobs=2, max_tokens=4)
    prompt = list(range(40, 87))
    (whole,) = LLM(loaded, tiny_config()).generate([prompt], params)
    scheduler = replace(tiny_config().scheduler, max_step_tokens=max_step_tokens)
    llm = LLM(loaded, tiny_config(scheduler=scheduler))
    llm.generate([prompt], GREEDY)  # its blocks are in the prefix index now
    again, beside = llm.generate([prompt, prompt], replace(params, n=2))
    judged = [None, *prompt[1:]]
    for done in (whole, again, beside):
        assert [entry and entry.token_id for entry in done.prompt_logprobs] == judged
        for entry, right in zip(done.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
            assert entry is not None
            assert right is not None
            assert entry.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_prompt_logprobs_survive_preemption(loaded: LoadedModel) -> None:
    """A prompt that is computed twice is reported once, whole."""
    config = tiny_config(max_context_tokens=96)
    config = replace(config, kv_memory_bytes=7 * loaded.model.kv_bytes_per_block(config.block_tokens))
    llm = LLM(loaded, config)
    params = replace(GREEDY, prompt_logprobs=0, max_tokens=40)
    prompts = [list(range(40 + i, 85 + i)) for i in range(3)]
    together = llm.generate(prompts, params)
    assert sum(done.timings.n_preemptions for done in together) > 0
    for prompt, done in zip(prompts, together, strict=True):
        assert [entry and entry.token_id for entry in done.prompt_logprobs] == [None, *prompt[1:]]


def test_batch_gives_the_same_answers_as_one_by_one(llm: LLM) -> None:
    """Continuous batching that changes an answer is a bug whatever it gains."""
    together = llm.generate(PROMPTS, GREEDY)
    llm.engine.core.reset_prefix_cache()
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert texts(together) == texts(alone)
    for done in together + alone:
        assert_account_adds_up(done)
        assert done.choices[0].finish_reason is FinishReason.LENGTH
        assert len(done.choices[0].token_ids) == GREEDY.max_tokens


def test_prefix_cache_saves_tokens_and_changes_nothing(llm: LLM) -> None:
    """A hit must be visible in the account and invisible in the text."""
    first = llm.generate(PROMPTS[2], GREEDY)[0]
    again = llm.generate(PROMPTS[2], GREEDY)[0]
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens >= llm.config.block_tokens
    assert texts([first]) == texts([again])
    assert_account_adds_up(again)


def test_pool_too_small_for_all_preempts_and_answers_everyone(loaded: LoadedModel) -> None:
    """Preemption recomputes; it may cost time but neither a request nor a token."""
    block_bytes = loaded.model.kv_bytes_per_block(16)
    config = tiny_config(kv_memory_bytes=block_bytes * 9, max_context_tokens=128)
    small = LLM(loaded, config)
    prompts = [f"{word} " * 24 for word in ("river", "stone", "light", "wind")]
    params = replace(GREEDY, max_tokens=40)
    crowded = small.generate(prompts, params)
    assert sum(one.timings.n_preemptions for one in crowded) > 0
    alone = [LLM(loaded, tiny_config()).generate(prompt, params)[0] for prompt in prompts]
    assert texts(crowded) == texts(alone)
    for done in crowded:
        assert_account_adds_up(done)
    stats = small.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_in_use) == (0, 0, 0)


def test_n_answers_share_the_prompt_and_differ(llm: LLM) -> None:
    """n > 1 draws with different noise over one computed prompt."""
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=5, ignore_eos=True)
    done = llm.generate(PROMPTS[2], params)[0]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len({choice.text for choice in done.choices}) > 1
    assert_account_adds_up(done)


def test_seed_makes_noise_independent_of_neighbours(llm: LLM) -> None:
    """The same seed gives the same text alone and in a crowd."""
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=11, ignore_eos=True)
    alone = llm.generate(PROMPTS[0], params)[0]
    crowd = llm.generate(PROMPTS, [params, *[replace(params, seed=seed) for seed in range(4)]])
    assert crowd[0].choices[0].text == alone.choices[0].text


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    """The stop string is found in text, across token borders, and is not part of the answer."""
    whole = llm.generate(PROMPTS[0], GREEDY)[0].choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    done = llm.generate(PROMPTS[0], replace(GREEDY, stop=(stop,)))[0].choices[0]
    assert done.finish_reason is FinishReason.STOP
    assert done.stop_reason == stop
    assert done.text == whole[: whole.index(stop)]
    kept = llm.generate(PROMPTS[0], replace(GREEDY, stop=(stop,), include_stop_str_in_output=True))[0].choices[0]
    assert kept.text == whole[: whole.index(stop) + len(stop)]
    last = llm.generate(PROMPTS[0], replace(GREEDY, stop=(stop,), max_tokens=len(done.token_ids)))[0]
    assert last.choices[0].finish_reason is FinishReason.STOP
    assert last.record.reasons == (FinishReason.STOP,), (
        "in the last token that the limit allows, too, and in all accounts"
    )


@pytest.mark.parametrize("min_tokens", [1, 7, 24])
def test_no_stop_string_ends_the_text_before_min_tokens(llm: LLM, min_tokens: int) -> None:
    """min_tokens used to hold for EOS and stop ids alone: a stop string ended the text after two tokens of twenty."""
    whole = llm.generate(PROMPTS[0], GREEDY)[0].choices[0]
    stop = next(char for char in whole.text if not char.isspace())
    done = llm.generate(PROMPTS[0], replace(GREEDY, stop=(stop,), min_tokens=min_tokens))[0].choices[0]
    assert len(done.token_ids) > min(min_tokens, GREEDY.max_tokens - 1)
    assert whole.text.startswith(done.text)
    early = llm.loaded.tokenizer.decode(list(whole.token_ids[:min_tokens]))
    assert done.text.startswith(early)
    if done.finish_reason is FinishReason.STOP:
        assert done.text == whole.text[: whole.text.index(stop, len(early))]


def test_stop_token_is_reported_and_not_in_the_text(llm: LLM) -> None:
    """An EOS or stop token counts as output but prints nothing."""
    whole = llm.generate(PROMPTS[0], GREEDY)[0].choices[0]
    stop_id = whole.token_ids[5]
    first = whole.token_ids.index(stop_id)
    done = llm.generate(PROMPTS[0], replace(GREEDY, stop_token_ids=(stop_id,)))[0].choices[0]
    assert done.token_ids == whole.token_ids[: first + 1]
    assert done.stop_reason == stop_id
    assert done.text == llm.loaded.tokenizer.decode(list(whole.token_ids[:first]))


def test_streamed_deltas_add_up_to_the_text(llm: LLM) -> None:
    """What a client saw must be what the completion says."""
    seen: dict[int, str] = {}
    done = llm.generate(PROMPTS, GREEDY, on_delta=lambda i, delta: seen.update({i: seen.get(i, "") + delta.text}))
    assert [seen[i] for i in range(len(PROMPTS))] == texts(done)


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    """One entry per token; a greedy token is its own best alternative; prompt entries do not depend on chunking."""
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=4)
    done = llm.generate(PROMPTS[2], params)[0]
    choice = done.choices[0]
    assert len(choice.logprobs) == 4
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry.token_id == token_id == entry.top[0][0]
        assert entry.rank == 1
        assert entry.logprob == pytest.approx(entry.top[0][1])
    assert len(done.prompt_logprobs) == len(done.prompt_token_ids)
    assert done.prompt_logprobs[0] is None
    judged = [entry.token_id for entry in done.prompt_logprobs[1:] if entry is not None]
    assert judged == list(done.prompt_token_ids[1:])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "0 tokens"), ([1, 4096], "token id 4096"), ([-1], "token id -1"), ([3] * 256, "256")],
)
def test_bad_prompts_name_the_number_and_leave_the_engine_working(
    llm: LLM, prompt: str | list[int], message: str
) -> None:
    """A refused request must not take the engine, or its neighbours in the same call, with it."""
    with pytest.raises((RequestError, PromptTooLong), match=message):
        llm.generate([PROMPTS[0], prompt], GREEDY)
    assert llm.engine.n_open == 0
    assert llm.generate(PROMPTS[0], GREEDY)[0].usage.output_tokens == GREEDY.max_tokens


def test_impossible_sampling_is_refused_by_name() -> None:
    """The bound lives in one place, so that every door refuses alike."""
    with pytest.raises(BadSampling, match=r"top_p is 0\.0"):
        SamplingParams(top_p=0.0)
    with pytest.raises(BadSampling, match="temperature is nan"):
        SamplingParams(temperature=float("nan"))


def test_extreme_options_are_refused_or_harmless(llm: LLM) -> None:
    """Found by fuzzing: a repetition penalty near 0 made a logit infinite and brought the whole engine down."""
    with pytest.raises(BadSampling, match="repetition_penalty is 1e-30"):
        SamplingParams(repetition_penalty=1e-30)
    for params in (
        SamplingParams(max_tokens=4, repetition_penalty=0.01, temperature=1e-4, seed=1),
        SamplingParams(max_tokens=4, repetition_penalty=100.0, temperature=100.0, top_p=0.5, seed=1),
        SamplingParams(max_tokens=4, temperature=1e-45, seed=1),
        SamplingParams(max_tokens=4, min_p=1.0, frequency_penalty=-2.0, logit_bias={5: 100.0, 6: -100.0}, seed=1),
    ):
        assert llm.generate(PROMPTS[0], params)[0].usage.output_tokens >= 1


def break_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt_tokens: int) -> None:
    """Make the logits of every sequence whose prompt has this length NaN once it decodes: one broken row among good ones."""
    model = llm.loaded.model
    forward = model.forward

    def broken_rows(batch: ForwardBatch) -> list[int]:
        sequences = [int(np.searchsorted(batch.query_start_S1, t, side="right")) - 1 for t in batch.logits_rows_R]
        is_broken_S = (np.diff(batch.query_start_S1) == 1) & (batch.context_tokens_S == prompt_tokens + 3)
        return [row for row, s in enumerate(sequences) if is_broken_S[s]]

    def broken(batch: ForwardBatch, kv: KVStore, want: Want) -> torch.Tensor | Best:
        if want is Want.BEST:
            token_ids, logits = forward(batch, kv, Want.BEST)
            for row in broken_rows(batch):
                logits[row] = math.nan
            return token_ids, logits
        logits_RV = forward(batch, kv, Want.LOGITS).clone()
        logits_RV[broken_rows(batch), 7] = torch.nan
        return logits_RV

    monkeypatch.setattr(model, "forward", broken)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"n": 2, "logprobs": 1}])
def test_broken_row_fails_its_request_and_leaves_the_others_bits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """NaN in one sequence's logits used to end the engine; now it ends that sequence's request, with the reason."""
    bad = "zebra " * 9
    expected = texts(llm.generate(PROMPTS, GREEDY))
    n_bad = len(llm.loaded.tokenizer.encode(bad))
    assert n_bad not in [len(llm.loaded.tokenizer.encode(prompt)) for prompt in PROMPTS]
    break_logits(llm, monkeypatch, n_bad)
    done = llm.generate([*PROMPTS, bad], [GREEDY] * len(PROMPTS) + [replace(GREEDY, **options)])  # type: ignore[arg-type]
    assert texts(done[:-1]) == expected
    assert [one.error for one in done[:-1]] == [None] * len(PROMPTS)
    assert isinstance(done[-1].error, SequenceError)
    assert "the largest logit is nan" in done[-1].error.message
    for choice in done[-1].choices:
        assert choice.finish_reason is FinishReason.ERROR
        assert len(choice.token_ids) <= 3
    assert len(done[-1].choices[0].token_ids) == 3
    assert_account_adds_up(done[-1])
    llm.engine.core.check()
    assert llm.engine.stats().blocks_in_use == 0
    monkeypatch.undo()
    assert texts(llm.generate([*PROMPTS, bad], GREEDY))[:-1] == expected


def test_greedy_text_is_the_same_with_and_without_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities need the logits, plain greedy decoding does not: asking for them must not change a token."""
    model = llm.loaded.model
    wanted: set[Want] = set()
    forward = model.forward

    def counted(batch: ForwardBatch, kv: KVStore, want: Want) -> object:
        wanted.add(want)
        return forward(batch, kv, want)

    monkeypatch.setattr(model, "forward", counted)
    plain = [one.choices[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert wanted == {Want.BEST}
    mixed = [replace(GREEDY, logprobs=1), *[GREEDY] * (len(PROMPTS) - 1)]
    assert [one.choices[0].token_ids for one in llm.generate(PROMPTS, mixed)] == plain
    assert Want.LOGITS in wanted
    assert [one.choices[0].token_ids for one in llm.generate(PROMPTS, replace(GREEDY, prompt_logprobs=0))] == plain


def test_grammar_that_leads_nowhere_fails_its_request_alone(llm: LLM) -> None:
    """A real failing row: the grammar's mask forbids every token after "one "."""
    blind = StructuredSpec(kind="grammar", source='start: "one " X\nX: /a/ & /b/')
    expected = texts(llm.generate(PROMPTS, GREEDY))
    done = llm.generate([*PROMPTS, "z"], [GREEDY] * len(PROMPTS) + [replace(GREEDY, structured=blind)])
    assert texts(done[:-1]) == expected
    assert isinstance(done[-1].error, GrammarError)
    assert done[-1].choices[0].finish_reason is FinishReason.ERROR
    assert llm.engine.stats().blocks_in_use == 0


def test_options_the_sampler_refuses_fail_their_request_alone(llm: LLM) -> None:
    """A sequence that cannot begin is answered, also while its prompt is still being read in chunks."""
    request = llm.engine.make_request("word " * 100, GREEDY, arrival_s=0.0, request_id="bad")
    outside = replace(request, sampling=replace(GREEDY, logit_bias={10**6: 1.0}))
    deltas: list[OutputDelta] = []
    opened = llm.engine.submit(outside, deltas.append)
    done = llm.generate(PROMPTS, GREEDY)
    assert isinstance(opened.error, BadSampling)
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ERROR]
    assert all(len(one.choices[0].token_ids) == GREEDY.max_tokens for one in done)
    assert llm.engine.n_open == 0


def test_kv_memory_that_does_not_fit_names_the_largest_context(loaded: LoadedModel) -> None:
    """The refusal must say what would have worked."""
    block_bytes = loaded.model.kv_bytes_per_block(16)
    config = EngineConfig(max_context_tokens=256, kv_memory_bytes=block_bytes * 4, block_tokens=16)
    with pytest.raises(CapacityError, match="at most 64 tokens"):
        size_pool(loaded.model, config)
    with pytest.raises(ConfigError, match="max_context_tokens is 100000"):
        size_pool(loaded.model, EngineConfig(max_context_tokens=100_000))


def test_cancelled_call_returns_what_it_has(llm: LLM) -> None:
    """Ctrl-C in a chat stops the answer between two steps; the text so far is kept."""
    seen: list[str] = []
    done = llm.generate(
        PROMPTS, GREEDY, on_delta=lambda _, delta: seen.append(delta.text), is_cancelled=lambda: len(seen) > 12
    )
    assert {one.choices[0].finish_reason for one in done} == {FinishReason.ABORT}
    assert "".join(texts(done))
    for one in done:
        assert_account_adds_up(one)
    assert llm.engine.n_open == 0
    assert llm.engine.stats().blocks_in_use == 0


def test_broken_callback_leaves_nothing_behind(llm: LLM) -> None:
    """An error of the caller reaches the caller; the next call must find every block free."""

    def broken(_: int, delta: object) -> None:
        raise ValueError("caller's bug")

    with pytest.raises(ValueError, match="caller's bug"):
        llm.generate(PROMPTS, GREEDY, on_delta=broken)
    assert llm.engine.n_open == 0
    assert llm.generate(PROMPTS[0], GREEDY)[0].usage.output_tokens == GREEDY.max_tokens
    assert llm.engine.stats().blocks_in_use == 0


def test_threads_take_turns(llm: LLM) -> None:
    """Two threads in one `LLM` used to fail each other's requests with "the step before has not ended"."""
    alone = texts(llm.generate(PROMPTS, GREEDY))
    with ThreadPoolExecutor(4) as pool:
        crowd = list(pool.map(lambda _: texts(llm.generate(PROMPTS, GREEDY)), range(8)))
    assert crowd == [alone] * 8
    assert llm.engine.stats().blocks_in_use == 0


def test_a_callback_may_ask_the_same_engine(llm: LLM) -> None:
    """It runs within a call, on its thread: it must not wait for that call to end."""
    inner: list[str] = []

    def ask(_: int, delta: OutputDelta) -> None:
        if not inner:
            inner.append("")
            inner[0] = texts(llm.generate(PROMPTS[1], GREEDY))[0]

    outer = texts(llm.generate(PROMPTS[0], GREEDY, on_delta=ask))
    assert [*outer, *inner] == texts(llm.generate(PROMPTS[:2], GREEDY))


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_a_callback_asks_takes_no_token_from_the_others_of_its_call(llm: LLM, is_broken: bool) -> None:
    """The steps of its answer were told before the rest of the step that it was told of: tokens came late, or never."""
    alone = llm.generate(PROMPTS, GREEDY)
    found: dict[int, list[int]] = {}
    asked: list[list[str]] = []

    def broken(_: int, delta: OutputDelta) -> None:
        raise ValueError("inner caller's bug")

    def ask(i: int, delta: OutputDelta) -> None:
        found.setdefault(i, []).extend(delta.token_ids)
        if len(asked) < 2 and len(found[i]) == 5:
            asked.append([])
            if is_broken:
                with pytest.raises(ValueError, match="inner caller"):
                    llm.generate(PROMPTS[:2], GREEDY, on_delta=broken)
            else:
                asked[-1] += texts(llm.generate(PROMPTS[:2], GREEDY))

    assert texts(llm.generate(PROMPTS, GREEDY, on_delta=ask)) == texts(alone)
    assert [tuple(found[i]) for i in range(len(PROMPTS))] == [one.choices[0].token_ids for one in alone]
    assert asked == [[] if is_broken else texts(alone)[:2]] * 2
    assert llm.engine.n_open == 0
    assert llm.engine.stats().blocks_in_use == 0


def test_a_profile_of_other_kernels_predicts_nothing(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times measured on one backend would be printed beside another's as if they were its own."""
    monkeypatch.setenv("DIPTYCH_HOME", str(tmp_path))
    model = llm.loaded.model
    other = "torch" if model.backend_name == "cpu" else "cpu"
    shares = {share: PROFILE[share] | {"fp32": 0.9} for share in ("eb", "ef")}
    assert local_predictor(model) is None
    profile_path().write_text(json.dumps(PROFILE | shares | {"backend": model.backend_name}))
    assert local_predictor(model) is not None
    profile_path().write_text(json.dumps(PROFILE | shares | {"backend": other}))
    assert local_predictor(model) is None
