"""Experiments on prompts and answers: the prefix cache, scaffolding, thinking tokens, cold starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from diptych.engine.engine import OutputDelta
from diptych.engine.llm import LLM
from diptych.engine.load import load
from diptych.engine.text.template import RenderedPrompt
from diptych.ground.clock import MonotonicClock
from diptych.ground.errors import ExecutorError
from diptych.ground.request import SamplingParams
from diptych.lab.drive import Driver
from diptych.lab.experiment import Check, Experiment, Outcome, Point, Stage, cannot, conclude, point
from diptych.lab.rounds import Sampler

GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
QUESTION = "What is the capital of France?"
SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
NO_TEXT = cannot("needs a model with a tokenizer and a chat template; this one is a shape with random weights")
COLD_PROMPT = "Once upon a time"
FIRST_TOKEN_S = 120.0  # a fresh process that takes longer than this to its first token is given up


class _SharedPrefix:
    """A prompt whose first `shared` tokens an earlier request has left in the prefix cache; nothing else is cached."""

    def __init__(self, driver: Driver, *, prompt_tokens: int, shared: int) -> None:
        self._driver = driver
        self._prompt_tokens = prompt_tokens
        self._shared = shared
        self.hit_tokens = 0

    def ttft_s(self) -> float:
        """Run both requests; the second one's time to first token."""
        driver, rest = self._driver, self._prompt_tokens - self._shared
        driver.core.reset_prefix_cache()
        common = driver.prompt(self._shared)
        driver.submit("first", common + driver.prompt(rest), new_tokens=2)
        driver.run()
        before = driver.core.stats().prefix_hits_tokens
        arrival_s = driver.submit("second", common + driver.prompt(rest), new_tokens=2)
        driver.run()
        self.hit_tokens = driver.core.stats().prefix_hits_tokens - before
        return driver.token_s["second"][0] - arrival_s


def _prefix_cache(stage: Stage) -> Outcome:
    n = min(2048, stage.context_tokens - 8)
    engines = stage.engines(context_tokens=n + 2, n_tokens=2 * (n + 2))
    settings = {"max_running_sequences": 1, "enable_prefix_cache": True}
    driver, rehearsal = engines.driver(**settings), engines.rehearsal(**settings)
    runs = [_SharedPrefix(driver, prompt_tokens=n, shared=int(n * share)) for share in SHARES]
    rounds = stage.measure([run.ttft_s for run in runs])
    points = []
    for i, share in enumerate(SHARES):
        rehearsed_s = None
        if rehearsal is not None:
            rehearsed_s = _SharedPrefix(rehearsal, prompt_tokens=n, shared=int(n * share)).ttft_s()
        points.append(point("TTFT", share, rounds.point(i), rehearsed_s))
    missed = max(abs(int(n * share) - run.hit_tokens) for share, run in zip(SHARES, runs, strict=True))
    gain = rounds.of(lambda t: t[0] / t[-1])
    return conclude(
        points,
        [Check(what=f"times as quick with {SHARES[-1]:.0%} shared", estimate=gain, limit=2.0)],
        rounds,
        finding=(
            f"a prompt of {n:,} tokens takes {1e3 * rounds.point(0).value:.1f} ms to its first token when nothing is "
            f"shared and {1e3 * rounds.point(len(SHARES) - 1).value:.1f} ms when {SHARES[-1]:.0%} is ({gain.value:.1f}x)"
        ),
        notes=[
            f"the tokens found in the cache differ from those shared by at most {missed} (blocks of "
            f"{stage.config.block_tokens} are shared whole)"
        ],
    )


def _llm(stage: Stage) -> LLM | None:
    if stage.loaded is None:
        return None
    scheduler = replace(stage.config.scheduler, max_running_sequences=1, enable_prefix_cache=False)
    return LLM(stage.loaded, replace(stage.config, scheduler=scheduler))


def _ttft_sampler(llm: LLM, prompt: RenderedPrompt) -> Sampler:
    def sample() -> float:
        ttft_s = llm.generate([prompt], GREEDY)[0].timings.ttft_s
        assert ttft_s is not None
        return ttft_s

    return sample


def _predicted_ttft_s(stage: Stage, prompt_tokens: int) -> float | None:
    predicted = stage.predicted_request_s(prompt_tokens, 1)
    return None if predicted is None else predicted[0]


def _prompt_shape(stage: Stage) -> Outcome:
    llm = _llm(stage)
    if llm is None:
        return NO_TEXT
    document = "Paris has been the capital of France for many centuries and lies on the river Seine. "
    system = "You are a careful assistant. You answer briefly, and you say so when you do not know something. "
    room = stage.longest_tokens // 3
    repeats = max(1, room // max(1, len(llm.loaded.tokenizer.encode(document))))
    prompts = [
        llm.render([{"role": "user", "content": QUESTION}]),
        llm.render(
            [
                {"role": "system", "content": system * 4},
                {"role": "user", "content": document * repeats + "\n\n" + QUESTION},
            ]
        ),
    ]
    sizes = [len(llm.generate([prompt], GREEDY)[0].prompt_token_ids) for prompt in prompts]
    rounds = stage.measure([_ttft_sampler(llm, prompt) for prompt in prompts])
    names = ("question alone", "with scaffolding")
    ratio = rounds.of(lambda t: t[1] / t[0])
    return conclude(
        [point(name, i, rounds.point(i), _predicted_ttft_s(stage, sizes[i])) for i, name in enumerate(names)],
        [Check(what="TTFT with scaffolding over that of the question alone", estimate=ratio, limit=2.0)],
        rounds,
        finding=(
            f"the same question takes {1e3 * rounds.point(0).value:.1f} ms to its first token in {sizes[0]} tokens and "
            f"{1e3 * rounds.point(1).value:.1f} ms in {sizes[1]:,} ({ratio.value:.1f}x): the scaffolding is what one waits for"
        ),
        notes=["no prefix is cached; the second prompt has a system prompt and a document before the same question"],
        x_names=names,
    )


class _Thought:
    """One answer that thinks first: the decode time of the thinking, then of the answer."""

    def __init__(self, llm: LLM, prompt: RenderedPrompt, end_token_id: int) -> None:
        self._llm = llm
        self._prompt = prompt
        self._end = end_token_id
        self.n_prompt = self.n_thinking = self.n_answer = 0
        self._answer_s = 0.0

    def thinking_s(self) -> float:
        """Run it; seconds from the first token to the end of the thinking."""
        times_s: list[float] = []

        def note(_: int, delta: OutputDelta) -> None:
            times_s.extend([delta.at_s] * len(delta.token_ids))

        done = self._llm.generate([self._prompt], SamplingParams(max_tokens=200, temperature=0.0), on_delta=note)[0]
        ids = done.choices[0].token_ids
        self.n_prompt = len(done.prompt_token_ids)
        self.n_thinking = ids.index(self._end) + 1 if self._end in ids else 0
        self.n_answer = len(ids) - self.n_thinking
        end_s = times_s[self.n_thinking - 1] if self.n_thinking else times_s[0]
        self._answer_s = times_s[-1] - end_s
        return end_s - times_s[0]

    def answer_s(self) -> float:
        """Seconds from there to the last token, of the same run."""
        return self._answer_s


def _thinking(stage: Stage) -> Outcome:
    llm = _llm(stage)
    if llm is None:
        return NO_TEXT
    end = llm.loaded.tokenizer.token_id("</think>")
    if end is None:
        return cannot("this model has no thinking tags")
    prompt = llm.render([{"role": "user", "content": "What is 17 + 25?"}], kwargs={"enable_thinking": True})
    thought = _Thought(llm, prompt, end)
    thought.thinking_s()
    if thought.n_thinking < 2 or not thought.n_answer:
        return cannot("the model did not think and answer within 200 tokens")
    rounds = stage.measure([thought.thinking_s, thought.answer_s])
    n_thinking, n_answer = thought.n_thinking, thought.n_answer
    share = rounds.of(lambda t: t[0] / (t[0] + t[1]))
    by_count = (n_thinking - 1) / (n_thinking - 1 + n_answer)  # the first token is prefill's
    closeness = rounds.of(lambda t: min(t[0] / (t[0] + t[1]), by_count) / max(t[0] / (t[0] + t[1]), by_count))
    # the first token ends prefill, so the thinking has one step less than tokens
    thinking = stage.predicted_request_s(thought.n_prompt, n_thinking)
    whole = stage.predicted_request_s(thought.n_prompt, n_thinking + n_answer)
    predicted = (None, None) if thinking is None or whole is None else (thinking[1], whole[1] - thinking[1])
    return conclude(
        [point("thinking", 0, rounds.point(0), predicted[0]), point("answer", 1, rounds.point(1), predicted[1])],
        [
            Check(
                what="closeness of thinking's share of the time to its share of the tokens",
                estimate=closeness,
                limit=0.85,
            )
        ],
        rounds,
        finding=(
            f"{n_thinking} thinking tokens come before {n_answer} tokens of answer and take {share.value:.0%} of decode "
            f"({by_count:.0%} of its tokens): thinking is decode like any other, paid per token before the reader sees a word"
        ),
        x_names=(f"thinking, {n_thinking} tokens", f"answer, {n_answer} tokens"),
    )


def _cold_start(stage: Stage) -> Outcome:
    if stage.loaded is None:
        return NO_TEXT
    directory, config, clock = str(stage.loaded.directory), stage.config, MonotonicClock()
    one_at_a_time = replace(
        config, scheduler=replace(config.scheduler, max_running_sequences=1, enable_prefix_cache=False)
    )
    warm = LLM(stage.loaded, one_at_a_time)
    command = [sys.executable, "-m", "diptych", "generate", COLD_PROMPT, "--model", directory, "--max-tokens", "1"]
    command += ["--backend", stage.model.backend_name, "--weights", stage.loaded.compute.weights]

    def process_s() -> float:
        begin_s = clock.now_s()
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=FIRST_TOKEN_S)
        except subprocess.TimeoutExpired:
            raise ExecutorError(f"a fresh process had no token within {FIRST_TOKEN_S:g} s") from None
        if done.returncode != 0:
            raise ExecutorError(f"a fresh process failed: {done.stderr.decode(errors='replace').strip()[-200:]}")
        return clock.now_s() - begin_s

    def load_s() -> float:
        begin_s = clock.now_s()
        loaded = load(directory, config)
        LLM(loaded, one_at_a_time).generate([COLD_PROMPT], GREEDY)
        cold_s = clock.now_s() - begin_s
        loaded.model.close()
        return cold_s

    def warm_s() -> float:
        ttft_s = warm.generate([COLD_PROMPT], GREEDY)[0].timings.ttft_s
        assert ttft_s is not None
        return ttft_s

    samplers: list[Callable[[], float]] = [process_s, load_s, warm_s]
    rounds = stage.measure(samplers)
    n_prompt = len(stage.loaded.tokenizer.encode(COLD_PROMPT))
    names = ("a new process", "load and first answer", "loaded: time to first token")
    # the cost model knows steps, not starts
    predicted = (None, None, _predicted_ttft_s(stage, n_prompt))
    points: list[Point] = [point(name, i, rounds.point(i), predicted[i]) for i, name in enumerate(names)]
    gain = rounds.of(lambda t: t[1] / t[2])
    return conclude(
        points,
        [Check(what="load and first answer over a loaded model's TTFT", estimate=gain, limit=1.0, pattern="{:.1f}")],
        rounds,
        finding=(
            f"a new process has its first token after {rounds.point(0).value:.2f} s, loading and answering in a running one "
            f"takes {1e3 * rounds.point(1).value:.0f} ms, a loaded model {1e3 * rounds.point(2).value:.2f} ms "
            f"({gain.value:.1f}x)"
        ),
        notes=[
            "a new process pays for the interpreter and its libraries first",
            "the files were in the page cache already; from a disk the load takes their bytes over its rate longer",
            "the cost model predicts steps, not starts",
        ],
        x_names=names,
    )


PREFIX_CACHE = Experiment(
    name="prefix-cache",
    title="Prefix caching: time to first token against the shared share",
    claim="what is in the prefix cache costs no prefill",
    x_label="share of the prompt that is cached",
    y_label="TTFT",
    run=_prefix_cache,
)
PROMPT_SHAPE = Experiment(
    name="prompt-shape",
    title="The same question in two prompts",
    claim="time to first token is paid for scaffolding, not for the question",
    x_label="",
    y_label="TTFT",
    run=_prompt_shape,
    is_log_y=True,
)
THINKING = Experiment(
    name="thinking",
    title="Where the time of a reasoning answer goes",
    claim="thinking tokens are decode tokens: they delay the answer by their number times the time per token",
    x_label="",
    y_label="decode",
    run=_thinking,
)
COLD_START = Experiment(
    name="cold-start",
    title="Cold start against warm",
    claim="the first request after a start pays for loading and packing the weights",
    x_label="",
    y_label="to the first token",
    run=_cold_start,
    is_log_y=True,
)
