"""Experiments on prompts and answers: the prefix cache, scaffolding, thinking tokens, cold starts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from diptych.engine.engine import OutputDelta
from diptych.engine.llm import LLM, Completion
from diptych.engine.load import load
from diptych.ground.clock import MonotonicClock
from diptych.ground.request import SamplingParams
from diptych.lab.experiment import Experiment, Outcome, Stage, Verdict, point
from diptych.lab.experiments.lengths import predicted_prompt_s
from diptych.lab.probe import Measured

GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
QUESTION = "What is the capital of France?"
NO_TEXT = Outcome(
    points=(),
    verdict=Verdict.WITHHELD,
    finding="needs a model with a tokenizer and a chat template; this one is a shape with random weights",
)


def _llm(stage: Stage) -> LLM | None:
    if stage.loaded is None:
        return None
    config = replace(stage.config, scheduler=replace(stage.config.scheduler, max_running_sequences=1))
    return LLM(stage.loaded, config)


def _ttft(done: Completion) -> float:
    assert done.timings.ttft_s is not None
    return done.timings.ttft_s


def _prefix_cache(stage: Stage) -> Outcome:
    llm = _llm(stage)
    if llm is None:
        return NO_TEXT
    n = min(2048, stage.longest_tokens - 8)
    rng, vocab = random.Random(3), stage.model.spec.vocab_size
    points, times, all_add_up = [], [], True
    for share in (0.0, 0.25, 0.5, 0.75, 0.95):
        stage.progress(f"{share:.0%} of the prompt shared")
        shared = int(n * share)
        samples = []
        for _ in range(stage.repeats):
            llm.engine.core.reset_prefix_cache()
            common = [rng.randrange(vocab) for _ in range(shared)]
            llm.generate([common + [rng.randrange(vocab) for _ in range(n - shared)]], GREEDY)
            done = llm.generate([common + [rng.randrange(vocab) for _ in range(n - shared)]], GREEDY)[0]
            all_add_up &= shared - done.usage.cached_tokens < llm.config.block_tokens
            samples.append(_ttft(done))
        measured = Measured.of(samples)
        times.append(measured)
        predicted = predicted_prompt_s(stage, n)
        points.append(point("TTFT", share, measured, None if predicted is None else predicted * (1 - share)))
    gain = times[0].median_s / times[-1].median_s
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if gain > 2 and all_add_up else Verdict.FAILS,
        finding=(
            f"a prompt of {n:,} tokens takes {1e3 * times[0].median_s:.1f} ms to its first token when nothing is shared and "
            f"{1e3 * times[-1].median_s:.1f} ms when 95 % is ({gain:.1f}x)"
        ),
        notes=("cached tokens reported by the engine agreed with the shared prefix to within one block",),
    ).withheld_if_noisy(times)


def _prompt_shape(stage: Stage) -> Outcome:
    llm = _llm(stage)
    if llm is None:
        return NO_TEXT
    document = "Paris has been the capital of France for many centuries and lies on the river Seine. "
    system = "You are a careful assistant. You answer briefly, and you say so when you do not know something. "
    room = stage.longest_tokens // 3
    repeats = max(1, room // max(1, len(llm.loaded.tokenizer.encode(document))))
    bare = [{"role": "user", "content": QUESTION}]
    scaffolded = [
        {"role": "system", "content": system * 4},
        {"role": "user", "content": document * repeats + "\n\n" + QUESTION},
    ]
    points, times, shares = [], [], []
    for number, (name, messages) in enumerate((("question alone", bare), ("with scaffolding", scaffolded))):
        stage.progress(name)
        samples = []
        for _ in range(stage.repeats):
            llm.engine.core.reset_prefix_cache()
            done = llm.generate([llm.render(messages)], GREEDY)[0]
            samples.append(_ttft(done))
        measured = Measured.of(samples)
        times.append(measured)
        shares.append((name, len(done.prompt_token_ids)))
        points.append(point(name, number, measured, predicted_prompt_s(stage, len(done.prompt_token_ids))))
    ratio = times[1].median_s / times[0].median_s
    return Outcome(
        points=tuple(points),
        verdict=Verdict.HOLDS if ratio > 2 else Verdict.FAILS,
        finding=(
            f"the same question takes {1e3 * times[0].median_s:.1f} ms to its first token in {shares[0][1]} tokens and "
            f"{1e3 * times[1].median_s:.1f} ms in {shares[1][1]:,} ({ratio:.0f}x): the scaffolding is what one waits for"
        ),
    ).withheld_if_noisy(times)


def _thinking(stage: Stage) -> Outcome:
    llm = _llm(stage)
    if llm is None:
        return NO_TEXT
    end = llm.loaded.tokenizer.token_id("</think>")
    if end is None:
        return replace(NO_TEXT, finding="this model has no thinking tags")
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    params = SamplingParams(max_tokens=200, temperature=0.0)
    thought: list[float] = []
    answered: list[float] = []
    n_thinking = n_answer = 0
    for repeat in range(stage.repeats):
        stage.progress(f"repeat {repeat + 1}")
        llm.engine.core.reset_prefix_cache()
        times_s: list[float] = []
        prompt = llm.render(messages, kwargs={"enable_thinking": True})
        done = llm.generate([prompt], params, on_delta=partial(_note_times, times_s))[0]
        ids = done.choices[0].token_ids
        n_thinking = ids.index(end) + 1 if end in ids else 0
        n_answer = len(ids) - n_thinking
        if not n_thinking or not n_answer:
            return replace(NO_TEXT, finding="the model did not think and answer within 200 tokens")
        thought.append(times_s[n_thinking - 1] - times_s[0])
        answered.append(times_s[-1] - times_s[n_thinking - 1])
    measured = [Measured.of(thought), Measured.of(answered)]
    share = measured[0].median_s / (measured[0].median_s + measured[1].median_s)
    return Outcome(
        points=(point("thinking", n_thinking, measured[0]), point("answer", n_answer, measured[1])),
        verdict=Verdict.HOLDS if (share > 0.5) == (n_thinking > n_answer) else Verdict.FAILS,
        finding=(
            f"{n_thinking} thinking tokens come before {n_answer} tokens of answer and take {share:.0%} of decode: "
            "thinking is decode like any other, paid per token before the reader sees a word"
        ),
    ).withheld_if_noisy(measured)


def _note_times(times_s: list[float], _: int, delta: OutputDelta) -> None:
    times_s += [delta.at_s] * len(delta.token_ids)


def _cold_start(stage: Stage) -> Outcome:
    if stage.loaded is None:
        return NO_TEXT
    clock = MonotonicClock()
    cold: list[float] = []
    warm: list[float] = []
    prompt = [1 + i % (stage.model.spec.vocab_size - 1) for i in range(min(64, stage.longest_tokens - 8))]
    for repeat in range(max(2, stage.repeats // 2)):
        stage.progress(f"load {repeat + 1}")
        begin_s = clock.now_s()
        loaded = load(str(stage.loaded.directory), stage.config)
        llm = LLM(loaded, replace(stage.config, scheduler=replace(stage.config.scheduler, max_running_sequences=1)))
        llm.generate([prompt], GREEDY)
        cold.append(clock.now_s() - begin_s)
        llm.engine.core.reset_prefix_cache()
        warm.append(_ttft(llm.generate([prompt], GREEDY)[0]))
        loaded.model.close()
    measured = [Measured.of(cold), Measured.of(warm)]
    ratio = measured[0].median_s / measured[1].median_s
    return Outcome(
        points=(
            point("cold: load to first tokens", 0, measured[0]),
            point("warm: time to first token", 1, measured[1]),
        ),
        verdict=Verdict.HOLDS if ratio > 1 else Verdict.FAILS,
        finding=f"the first answer after a start takes {1e3 * measured[0].median_s:.0f} ms, a later one "
        f"{1e3 * measured[1].median_s:.1f} ms to its first token ({ratio:.0f}x)",
        notes=(
            "the files were in the page cache already; from a disk the load takes their bytes over its rate longer",
        ),
    ).withheld_if_noisy(measured[:1])


PREFIX_CACHE = Experiment(
    name="prefix-cache",
    title="Prefix caching: time to first token against the shared share",
    claim="what is in the prefix cache costs no prefill",
    x_label="share of the prompt that is cached",
    y_label="TTFT, ms",
    run=_prefix_cache,
)
PROMPT_SHAPE = Experiment(
    name="prompt-shape",
    title="The same question in two prompts",
    claim="time to first token is paid for scaffolding, not for the question",
    x_label="0: question alone, 1: with scaffolding",
    y_label="TTFT, ms",
    run=_prompt_shape,
    is_log_y=True,
)
THINKING = Experiment(
    name="thinking",
    title="Where the time of a reasoning answer goes",
    claim="thinking tokens are decode tokens: they delay the answer by their number times the time per token",
    x_label="tokens",
    y_label="ms",
    run=_thinking,
)
COLD_START = Experiment(
    name="cold-start",
    title="Cold start against warm",
    claim="the first request after a start pays for loading and packing the weights",
    x_label="0: cold, 1: warm",
    y_label="ms",
    run=_cold_start,
    is_log_y=True,
)
