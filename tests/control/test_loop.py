"""EngineCore from the outside: what a request sees."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from diptych.control import recording
from diptych.control.loop import EngineCore
from diptych.control.recording import Recorder, encode, replay
from diptych.control.sequence import Sequence
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ExecutorError, IllegalMove, PromptTooLong, RequestError, SequenceError
from diptych.ground.events import FinishEvent, PreemptEvent, PromptLogprobsEvent, TokenEvent
from diptych.ground.phase import FinishReason, Phase, Status
from diptych.ground.request import FreeReasoning, StructuredSpec
from diptych.ground.step import ChunkResult, StepResult, TokenLogprobs

from .toy import ToyExecutor, greedy, request


def make(n_blocks=64, block_tokens=4, **config):
    core = EngineCore(
        SchedulerConfig(**config), BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens), model_revision="toy"
    )
    return core, ToyExecutor(n_blocks, block_tokens)


def run(core, executor, *, now_s=0.0, max_steps=2000):
    events = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        now_s += 1.0
        plan, begun = core.begin_step(now_s)
        events += begun
        assert plan is not None, "open requests, yet nothing planned"
        core.check()
        events += core.end_step(plan, executor.execute(plan), now_s + 0.5)
        core.check()
    raise AssertionError("did not end")


def texts(events):
    out = {}
    for event in events:
        if isinstance(event, TokenEvent):
            out.setdefault((event.request_id, event.index), []).append(event.token_id)
    return out


def test_requests_of_every_length_answer_as_if_alone():
    """Continuous batching may change nothing but the time."""
    core, executor = make(n_blocks=24, max_step_tokens=16, max_context_tokens=80)
    for i in range(10):
        core.submit(request(prompt=3 + 5 * i, max_tokens=4 + i, request_id=f"r{i}", arrival_s=0.1 * i))
    events = run(core, executor)
    assert texts(events) == {(f"r{i}", 0): greedy(tuple(range(100, 103 + 5 * i)), 4 + i) for i in range(10)}
    assert sum(isinstance(event, FinishEvent) for event in events) == 10


@pytest.mark.parametrize("failing_step", [1, 2, 4])
def test_a_failed_sequence_ends_its_request_and_nothing_else(failing_step):
    """One bad row used to be the end of everybody: the neighbours' tokens must be those of a run without it."""
    core, executor = make(n_blocks=24, max_step_tokens=16, max_context_tokens=80)
    core.submit(request(prompt=20, max_tokens=8, request_id="bad", n=3))
    for i in range(3):
        core.submit(
            request(prompt=range(200 + 9 * i, 209 + 9 * i), max_tokens=12, request_id=f"good{i}", arrival_s=0.1)
        )
    error = SequenceError("no token could be drawn")

    class Failing:
        def execute(self, plan):
            result = executor.execute(plan)
            results = tuple(
                ChunkResult(seq_id=one.seq_id, error=error)
                if plan.step_id >= failing_step and one.seq_id in (0, 1)
                else one
                for one in result.results
            )
            return replace(result, results=results)

    events = run(core, Failing())
    ends = {(event.request_id, event.index): event for event in events if isinstance(event, FinishEvent)}
    assert len(ends) == 6
    for index in range(3):
        assert (ends["bad", index].reason, ends["bad", index].error) == (FinishReason.ERROR, error)
    for i in range(3):
        assert texts(events)[f"good{i}", 0] == greedy(tuple(range(200 + 9 * i, 209 + 9 * i)), 12)
        assert ends[f"good{i}", 0].error is None
    stats = core.stats()
    assert (stats.blocks_in_use, stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0, 0)


def test_a_block_written_by_a_failed_step_is_not_shared():
    """Its keys may be as broken as its logits were; the next request with this prompt must compute them itself."""
    core, executor = make(n_blocks=24, max_step_tokens=64, max_context_tokens=80)
    core.submit(request(prompt=16, max_tokens=4, request_id="bad"))
    plan, _ = core.begin_step(1.0)
    results = tuple(ChunkResult(seq_id=chunk.seq_id, error=SequenceError("nan")) for chunk in plan.chunks)
    core.end_step(plan, replace(executor.execute(plan), results=results), 1.5)
    assert core.prefix_match(tuple(range(100, 116))) == 0
    core.check()


def test_choices_share_the_prompt_and_answer_alike():
    """Greedy n = 4 gives four equal answers from one prefill."""
    for prompt in (11, 12, 13):
        core, executor = make()
        core.submit(request(prompt=prompt, max_tokens=6, n=4))
        answers = texts(run(core, executor))
        assert list(answers) == [("r", i) for i in range(4)]
        assert all(text == greedy(tuple(range(100, 100 + prompt)), 6) for text in answers.values())


def finishes(events):
    return {(e.request_id, e.index): e for e in events if isinstance(e, FinishEvent)}


def answer(prompt, n):
    return greedy(tuple(range(100, 100 + prompt)), n)


def test_prompt_beyond_the_context_is_refused_with_number_and_limit():
    """One token is left for the answer; the engine goes on."""
    core, executor = make(max_context_tokens=16)
    with pytest.raises(PromptTooLong, match="prompt has 16 tokens; a context of 16 takes at most 15") as caught:
        core.submit(request(prompt=16))
    assert caught.value.param == "prompt"
    core.submit(request(prompt=15, max_tokens=9))
    events = run(core, executor)
    assert finishes(events)["r", 0].reason is FinishReason.LENGTH
    assert texts(events)["r", 0] == answer(15, 1)


def test_prompt_beyond_the_pool_is_refused_with_number_and_limit():
    core, executor = make(n_blocks=3, block_tokens=4)
    with pytest.raises(PromptTooLong, match="prompt has 12 tokens; the KV pool of 3 blocks of 4 takes at most 11"):
        core.submit(request(prompt=12))
    core.submit(request(prompt=11, max_tokens=9, n=3))
    assert list(texts(run(core, executor)).values()) == [answer(11, 1)] * 3


def test_answer_ends_where_the_pool_ends():
    """A lone sequence that fills the pool ends with LENGTH instead of preempting itself for ever."""
    core, executor = make(n_blocks=3, block_tokens=4)
    core.submit(request(prompt=5, max_tokens=100))
    events = run(core, executor)
    assert texts(events)["r", 0] == answer(5, 7)
    assert finishes(events)["r", 0].reason is FinishReason.LENGTH


def test_empty_prompt_and_a_second_use_of_an_open_id_are_refused():
    core, executor = make()
    with pytest.raises(RequestError, match="prompt has 0 tokens; at least 1"):
        core.submit(request(prompt=0))
    core.submit(request())
    with pytest.raises(RequestError, match="'r' is already open"):
        core.submit(request())
    run(core, executor)
    core.submit(request())
    assert len(texts(run(core, executor))["r", 0]) == 3


def test_waiting_line_is_bounded_by_tokens():
    """Admission names what waits, what was asked and the limit; the line empties and then takes more."""
    core, executor = make(max_waiting_tokens=40)
    core.submit(request(prompt=90, max_tokens=5, request_id="large"))  # alone it is always taken
    with pytest.raises(CapacityError, match="95 tokens are waiting and this request may need 15; at most 40 may wait"):
        core.submit(request(request_id="more"))
    run(core, executor)
    for i in range(2):
        core.submit(request(prompt=10, max_tokens=10, request_id=f"r{i}"))
    with pytest.raises(CapacityError):
        core.submit(request(prompt=1, max_tokens=1, request_id="last"))
    assert core.stats().waiting_tokens == 40
    run(core, executor)
    assert core.stats().waiting_tokens == 0


def test_choices_that_wait_for_the_first_weigh_in_the_line_too():
    """Of four answers three weighed nothing until the prompt was read: four times as many tokens waited as may."""
    core, executor = make(max_waiting_tokens=60)
    core.submit(request(prompt=10, max_tokens=10, n=4, request_id="many"))
    stats = core.stats()
    assert (stats.waiting, stats.waiting_tokens) == (4, 50)
    with pytest.raises(CapacityError, match="50 tokens are waiting and this request may need 20; at most 60 may wait"):
        core.submit(request(prompt=10, max_tokens=10, request_id="more"))
    plan, _ = core.begin_step(0.0)
    assert (core.stats().waiting, core.stats().waiting_tokens) == (3, 30)
    core.end_step(plan, executor.execute(plan), 0.5)
    core.submit(request(prompt=10, max_tokens=10, n=2, request_id="two"))
    assert core.stats().waiting_tokens == 60
    core.cancel("two", 1.0)
    assert core.stats().waiting_tokens == 30
    run(core, executor)
    assert core.stats().waiting_tokens == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["waiting", "prefill", "forked", "decode", "preempted", "in flight"])
def test_cancel_in_every_state_gives_one_end_per_choice_and_all_blocks_back(when, n):
    """A client may leave at any moment; nothing leaks and nothing more is said."""
    core, executor = make(n_blocks=8, max_step_tokens=8, max_context_tokens=32)
    core.submit(request(prompt=14, max_tokens=15, n=n))
    steps = {"waiting": 0, "prefill": 1, "forked": 2, "decode": 4, "preempted": 6, "in flight": 1}[when]
    if when == "preempted":
        core.submit(request(prompt=range(9), max_tokens=20, request_id="other", priority=9))
    for k in range(60 if when == "preempted" else steps):
        plan, begun = core.begin_step(float(k))
        core.end_step(plan, executor.execute(plan), k + 0.5)
        if any(isinstance(e, PreemptEvent) and e.request_id == "r" for e in begun):
            break
    plan = None
    if when == "in flight":
        plan, _ = core.begin_step(9.0)
        result = executor.execute(plan)
    events = core.cancel("r", 10.0)
    assert {event.index for event in events} == set(range(n))
    assert all(event.reason is FinishReason.ABORT and event.at_s == 10.0 for event in events)
    core.check()
    if plan is not None:
        assert not texts(core.end_step(plan, result, 10.5))
    assert not any(request_id == "r" for request_id, _ in texts(run(core, executor, now_s=11.0)))
    assert core.stats().blocks_in_use == 0
    assert core.cancel("r", 12.0) == core.cancel("unknown", 12.0) == []


def test_one_choice_ends_early_and_the_others_go_on():
    """A stop string in one choice is seen above control."""
    core, executor = make()
    core.submit(request(prompt=9, max_tokens=8, n=3))
    events = []
    for k in range(4):
        plan, _ = core.begin_step(float(k))
        events += core.end_step(plan, executor.execute(plan), k + 0.5)
    (finish,) = core.finish("r", 1, 4.0, reason=FinishReason.STOP)
    assert (finish.index, finish.output_tokens) == (1, 3)
    assert core.finish("r", 1, 4.0, reason=FinishReason.STOP) == []
    events += run(core, executor, now_s=5.0)
    assert {index: len(text) for (_, index), text in texts(events).items()} == {0: 8, 1: 3, 2: 8}


def test_choice_0_may_end_before_it_has_read_the_prompt():
    """The others then read it themselves."""
    core, executor = make(max_step_tokens=4)
    core.submit(request(prompt=9, max_tokens=5, n=2))
    plan, _ = core.begin_step(0.0)
    core.end_step(plan, executor.execute(plan), 0.5)
    core.finish("r", 0, 0.6, reason=FinishReason.ABORT)
    assert texts(run(core, executor, now_s=1.0)) == {("r", 1): answer(9, 5)}


BROKEN = ExecutorError("no device")


def test_a_step_without_a_result_ends_its_own_requests_and_no_other():
    """Any exception of the executor poisoned the core for good: "the step before has not ended"."""
    core, executor = make(max_running_sequences=2)
    core.submit(request(request_id="a"))
    run(core, executor)
    core.submit(request(prompt=20, request_id="b", n=2))
    core.submit(request(request_id="c"))
    core.submit(request(prompt=range(9), request_id="waits"))
    core.begin_step(0.0)
    core.cancel("c", 0.5)
    events = core.abort_step(1.0, error=BROKEN)
    assert {key: (e.reason, e.error) for key, e in finishes(events).items()} == dict.fromkeys(
        [("b", 0), ("b", 1)], (FinishReason.ERROR, BROKEN)
    )
    core.check()
    assert core.stats().blocks_in_use == 0
    assert core.abort_step(2.0, error=BROKEN) == []  # nothing is in flight
    assert texts(run(core, executor)) == {("waits", 0): greedy(tuple(range(9)), 3)}


@pytest.mark.parametrize("has_run", [False, True])
def test_what_a_failed_step_was_told_to_forget_is_told_again(has_run):
    """The executor may have failed before it looked at the plan, or after."""
    core, executor = make()
    core.submit(request(request_id="a"))
    run(core, executor)
    core.submit(request(request_id="b"))
    plan, _ = core.begin_step(0.0)
    assert plan.ended_seq_ids
    if has_run:
        executor.execute(plan)
    core.abort_step(1.0, error=BROKEN)
    core.submit(request(request_id="c"))
    run(core, executor, now_s=2.0)
    core.submit(request(request_id="d"))
    plan, _ = core.begin_step(50.0)
    executor.execute(plan)
    assert list(executor.starts) == [plan.chunks[0].seq_id]


@pytest.mark.parametrize("in_call", ["begin_step", "end_step", "submit", "cancel"])
def test_a_call_cut_short_ends_every_request_and_loses_no_block(in_call, monkeypatch):
    """Ctrl-C lands between any two instructions, also between taking a block and writing down who has it."""
    core, executor = make()
    core.submit(request(prompt=20, request_id="b", n=2))
    core.submit(request(request_id="c"))
    plan, _ = core.begin_step(0.0)
    if in_call == "begin_step":
        core.end_step(plan, executor.execute(plan), 0.5)
    scheduler = core._scheduler
    verb = {"begin_step": "_take_blocks", "end_step": "start_decode", "submit": "enqueue", "cancel": "detach"}[in_call]
    real = getattr(scheduler, verb)

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, verb, interrupted)
    calls = {
        "begin_step": lambda: run(core, executor, now_s=1.0),
        "end_step": lambda: core.end_step(plan, executor.execute(plan), 0.5),
        "submit": lambda: core.submit(request(request_id="late")),
        "cancel": lambda: core.cancel("b", 1.0),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[in_call]()
    ended = finishes(core.abort_step(5.0, error=BROKEN))
    assert {("b", 0), ("c", 0)} <= set(ended)
    assert {event.error for event in ended.values()} == {BROKEN}
    core.check()
    assert not core.has_work
    assert core.stats().blocks_free == 64
    core.submit(request(request_id="d"))
    assert texts(run(core, executor, now_s=6.0))["d", 0] == answer(12, 3)
    assert [seq_id for seq_id in executor.starts if seq_id < 3] == []


def test_eos_stop_ids_and_min_tokens():
    """What ends a text: any EOS id unless ignored, any stop id, but nothing before min_tokens."""
    text = answer(12, 8)
    eos = text[2]
    first, second = text.index(eos), text[4]

    def finish_of(**sampling):
        core, executor = make()
        core.submit(request(prompt=12, max_tokens=8, **sampling))
        event = finishes(run(core, executor))["r", 0]
        return event.output_tokens, event.reason, event.stop_token_id

    assert finish_of() == (8, FinishReason.LENGTH, None)
    assert finish_of(eos=(5000, eos)) == (first + 1, FinishReason.STOP, eos)
    assert finish_of(eos=(eos,), ignore_eos=True) == (8, FinishReason.LENGTH, None)
    assert finish_of(eos=(eos,), ignore_eos=True, stop_token_ids=(second,)) == (
        text.index(second) + 1,
        FinishReason.STOP,
        second,
    )
    assert finish_of(eos=(eos,), min_tokens=first + 1) == (first + 1, FinishReason.STOP, eos)
    assert finish_of(eos=(eos,), min_tokens=first + 2)[0] > first + 1


def drafted(plan, tokens):
    """The plan as a drafting scheduler would make it: decode chunks with guesses behind their token."""
    return replace(
        plan,
        chunks=tuple(
            chunk._replace(token_ids=(*chunk.token_ids, *tokens)) if chunk.phase is Phase.DECODE else chunk
            for chunk in plan.chunks
        ),
    )


@pytest.mark.parametrize(
    ("says", "stop", "kept"), [((1, 2, 3), (), 3), ((1, 2, 3), (1,), 1), ((1, 2, 3), (2,), 2), ((7,), (), 1)]
)
def test_a_result_of_several_tokens_is_committed_up_to_the_stop(says, stop, kept):
    """Accepted drafts move computed forward; tokens behind a stop are never handed out."""
    core, executor = make()
    core.submit(request(prompt=5, max_tokens=6, stop_token_ids=stop))
    plan, _ = core.begin_step(0.0)
    core.end_step(plan, executor.execute(plan), 0.5)
    plan, _ = core.begin_step(1.0)
    wide = drafted(plan, (1, 2))
    core._plan = wide
    result = StepResult(
        step_id=wide.step_id, results=(ChunkResult(seq_id=0, token_ids=says),), device_s=0.0, host_s=0.0
    )
    events = core.end_step(wide, result, 1.5)
    assert texts(events) == {("r", 0): list(says[:kept])}
    assert [e.position for e in events if isinstance(e, TokenEvent)] == list(range(1, 1 + kept))
    assert bool(finishes(events)) == bool(stop)
    core.check()
    if not stop:
        plan, _ = core.begin_step(2.0)
        assert (plan.chunks[0].start_pos, plan.chunks[0].token_ids) == (5 + kept, (says[-1],))


def test_a_complete_grammar_ends_the_text():
    core, executor = make()
    core.submit(request(max_tokens=9))
    plan, _ = core.begin_step(0.0)
    result = executor.execute(plan)
    result = replace(result, results=(replace(result.results[0], is_complete=True),))
    finish = finishes(core.end_step(plan, result, 0.5))["r", 0]
    assert (finish.reason, finish.output_tokens, finish.stop_token_id) == (FinishReason.STOP, 1, None)


class WithPromptLogprobs(ToyExecutor):
    """Reports an entry per prompt token of a chunk: its token id, as log-probability of itself."""

    def execute(self, plan):
        result = super().execute(plan)
        results = []
        for chunk, r in zip(plan.chunks, result.results, strict=True):
            start = self.starts[chunk.seq_id]
            prompt = start.prompt_token_ids if start.sampling.prompt_logprobs is not None else ()
            entries = tuple(
                TokenLogprobs(token_id=prompt[pos], logprob=-1.0, rank=1) if pos else None
                for pos in range(chunk.start_pos + (chunk.start_pos > 0), min(chunk.end_pos + 1, len(prompt)))
            )
            results.append(replace(r, prompt_logprobs=entries))
        return replace(result, results=tuple(results))


def test_prompt_logprobs_come_once_and_in_order_despite_preemption():
    """A recomputed prompt must not be reported twice."""
    core, _ = make(n_blocks=8, max_step_tokens=6, max_context_tokens=32)
    executor = WithPromptLogprobs(8, 4)
    core.submit(request(prompt=14, max_tokens=10, n=2, prompt_logprobs=0))
    core.submit(request(prompt=range(9), max_tokens=20, request_id="other", priority=9, arrival_s=1.0))
    events = run(core, executor)
    assert any(isinstance(e, PreemptEvent) and e.request_id == "r" for e in events)
    entries = []
    for event in events:
        if isinstance(event, PromptLogprobsEvent):
            assert (event.request_id, event.start) == ("r", len(entries))
            entries += event.entries
    assert [entry and entry.token_id for entry in entries] == [None, *range(101, 114)]


def test_seeds_differ_between_choices_and_repeat_between_runs():
    """Noise comes from (seed, position): equal runs are equal, choices are not."""

    def seeds(engine_seed, **sampling):
        core = EngineCore(SchedulerConfig(), BlockConfig(n_blocks=8), model_revision="toy", seed=engine_seed)
        core.submit(request(n=3, **sampling))
        core.submit(request(request_id="s", **sampling))
        started = []
        executor = ToyExecutor(8, 32)
        for k in range(2):
            plan, _ = core.begin_step(float(k))
            started += [start.seed for start in plan.starts]
            core.end_step(plan, executor.execute(plan), k + 0.5)
        return started

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 4
    own = seeds(1, seed=-1)
    assert own.count(2**64 - 1) == 2
    assert len(set(own)) == 3
    assert own == seeds(2, seed=-1)


def test_executor_may_forget_ended_sequences_and_only_those():
    """Its memory must not grow with requests served."""
    core, executor = make()
    for i in range(5):
        core.submit(request(request_id=f"r{i}", n=2))
        run(core, executor)
    core.submit(request(request_id="gone"))
    core.cancel("gone", 0.0)  # never started, so never announced
    core.submit(request(request_id="last"))
    plan, _ = core.begin_step(0.0)
    executor.execute(plan)
    assert list(executor.starts) == [plan.chunks[0].seq_id]


def test_illegal_status_changes_are_refused():
    """MOVES is the one table of legal changes."""
    seq = Sequence(seq_id=0, index=0, request=request(), rank=0.0, seed=0, max_output_tokens=3)
    with pytest.raises(IllegalMove, match="cannot go from waiting to decode"):
        seq.move(Status.DECODE)
    seq.move(Status.FINISHED)
    for status in Status:
        with pytest.raises(IllegalMove):
            seq.move(status)


def test_stats_add_up_to_the_pool_and_count_tokens_once():
    core, executor = make()
    core.submit(request(prompt=17, request_id="a"))
    run(core, executor)
    core.submit(request(prompt=17, request_id="b"))
    core.submit(request(prompt=range(9), request_id="c", arrival_s=1.0))
    before = core.stats()
    assert (before.waiting, before.waiting_tokens) == (2, 17 + 3 + 9 + 3)
    plan, _ = core.begin_step(0.0)
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 0, 0)
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (17 + 17 + 9, 16)
    assert stats.blocks_in_use + stats.blocks_cached + stats.blocks_free == 64
    core.end_step(plan, executor.execute(plan), 0.5)
    core.reset_prefix_cache()
    assert core.prefix_match(tuple(range(100, 117))) == 0
    assert texts(run(core, executor))["b", 0] == answer(17, 3)[1:]


def test_a_step_is_written_down_when_somebody_reads_it(monkeypatch):
    """It was encoded as it ran, which took a fifth of a small model's step: what was recorded was another engine."""
    core, executor = make()
    recorder = Recorder(core)
    encoded = []
    monkeypatch.setattr(recording, "encode", lambda value: encoded.append(value) or encode(value))
    recorder.submit(request(max_tokens=3))
    for now_s in (0.0, 1.0, 2.0):
        plan, _ = recorder.begin_step(now_s)
        recorder.end_step(plan, executor.execute(plan), now_s + 0.5)
    assert not encoded
    lines = recorder.lines()
    assert encoded
    assert [json.loads(line)["call"] for line in lines[1:]] == ["submit"] + 3 * ["begin_step", "end_step"]
    assert recorder.lines() == lines
    assert replay(lines) == []


def test_a_recording_holds_failures_and_replays_them():
    """A result with an error could not be written down, and a step that was given up has no other trace."""
    core, executor = make()
    recorder = Recorder(core)
    for name in ("fails", "breaks", "lives"):
        recorder.submit(request(request_id=name, max_tokens=9))
    plan, _ = recorder.begin_step(0.0)
    result = executor.execute(plan)
    failed = ChunkResult(seq_id=plan.chunks[0].seq_id, error=SequenceError("no number"))
    recorder.end_step(plan, replace(result, results=(failed, *result.results[1:])), 0.5)
    recorder.begin_step(1.0)
    recorder.abort_step(1.5, error=BROKEN)
    recorder.submit(request(request_id="after"))
    plan, _ = recorder.begin_step(2.0)
    assert [chunk.seq_id for chunk in plan.chunks] == [3]
    assert replay(recorder.lines()) == []


def test_a_grammar_behind_a_thought_is_recorded_and_replayed():
    """What may stand before the constrained text was written down and could not be read back."""
    core, executor = make()
    recorder = Recorder(core)
    thinks = StructuredSpec(kind="regex", source="a+", reasoning=FreeReasoning(begin=None, end="</think>"))
    wanted = request()
    recorder.submit(replace(wanted, sampling=replace(wanted.sampling, structured=thinks)))
    plan, _ = recorder.begin_step(0.0)
    assert plan.starts[0].sampling.structured == thinks
    recorder.end_step(plan, executor.execute(plan), 0.5)
    assert replay(recorder.lines()) == []
