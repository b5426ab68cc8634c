"""Metrics from hand-written event logs: every definition once, in every state a request can end in."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.ground.definitions import DEFINITIONS
from diptych.ground.events import (
    ArrivalEvent,
    DraftEvent,
    FinishEvent,
    PreemptEvent,
    ScheduledEvent,
    StepBeginEvent,
    StepEndEvent,
    TokenEvent,
)
from diptych.ground.phase import FinishReason, Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.metrics import ChoiceRecord, EventBook, Limits, Sample, distribution, percentile, summarize


class Log:
    """Writes the events of steps into a book."""

    def __init__(self):
        self.book = EventBook()
        self.step_id = -1

    def arrive(self, at_s, prompt=10, n=1, request_id="r"):
        self.book.fold([ArrivalEvent(request_id=request_id, at_s=at_s, prompt_tokens=prompt, n=n)])

    def step(self, begin_s, end_s, *chunks, tokens=()):
        """chunks: (phase, tokens, context, changes) of request r; tokens: (index, position)."""
        self.step_id += 1
        self.begin(begin_s, *chunks)
        for index, position in tokens:
            self.book.fold(
                [
                    TokenEvent(
                        request_id="r", index=index, at_s=end_s, token_id=1, position=position, step_id=self.step_id
                    )
                ]
            )
        self.book.fold([StepEndEvent(step_id=self.step_id, at_s=end_s, device_s=0.5, host_s=0.25)])

    def begin(self, begin_s, *chunks):
        shape = StepShape([ChunkShape(phase, n_tokens, context, True) for phase, n_tokens, context, _ in chunks])
        self.book.fold([StepBeginEvent(step_id=self.step_id, at_s=begin_s, shape=shape)])
        for phase, n_tokens, context, changes in chunks:
            if phase is Phase.DECODE:
                continue
            fields = {"request_id": "r", "index": 0, "cached_tokens": 0} | changes
            self.book.fold(
                [
                    ScheduledEvent(
                        step_id=self.step_id,
                        at_s=begin_s,
                        chunk_tokens=n_tokens,
                        context_tokens=context,
                        **fields,
                    )
                ]
            )

    def finish(self, at_s, index=0, reason=FinishReason.LENGTH):
        self.book.fold([FinishEvent(request_id="r", index=index, at_s=at_s, reason=reason, output_tokens=0)])

    @property
    def record(self):
        return self.book.records["r"]

    def sums_hold(self):
        timings, usage = self.record.timings(), self.record.usage()
        assert timings.queue_s + timings.prefill_s + timings.decode_s == pytest.approx(timings.e2e_s)
        if timings.ttft_s is not None:
            assert timings.queue_s + timings.prefill_s == pytest.approx(timings.ttft_s)
        assert usage.computed_tokens + usage.cached_tokens + usage.remaining_tokens == usage.prompt_tokens
        return timings, usage


PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


@pytest.mark.parametrize("read", [lambda record: record.usage(), lambda record: record.timings()])
def test_a_record_is_read_while_a_choice_begins(read):
    """Timelines and message deltas read it on the server's thread; a choice that the engine's began meanwhile broke them."""

    class Overtaken(list):
        def __iter__(self):
            log.record.choices.setdefault(1, ChoiceRecord())
            return super().__iter__()

        def __len__(self):
            log.record.choices.setdefault(1, ChoiceRecord())
            return super().__len__()

    log = Log()
    log.arrive(0.0, n=2)
    log.record.choices[0] = ChoiceRecord(token_times_s=Overtaken([1.0, 2.0]))
    assert read(log.record)


def test_a_plain_request_by_hand():
    """Arrival 0, planned at 1, chunks of 4 + 4 after 2 cached, tokens at 3, 4, 6."""
    log = Log()
    log.arrive(0.0)
    log.step(1.0, 2.0, (PREFILL, 4, 2, {"cached_tokens": 2}))
    log.step(2.0, 3.0, (PREFILL, 4, 6, {}), tokens=[(0, 0)])
    log.step(3.0, 4.0, (DECODE, 1, 10, {}), tokens=[(0, 1)])
    log.step(5.0, 6.0, (DECODE, 1, 11, {}), tokens=[(0, 2)])
    log.finish(6.0)
    timings, usage = log.sums_hold()
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 2.0, 3.0)
    assert (timings.ttft_s, timings.e2e_s, timings.itl_s, timings.tpot_s) == (3.0, 6.0, (1.0, 2.0), 1.5)
    assert (usage.computed_tokens, usage.cached_tokens, usage.output_tokens) == (8, 2, 3)
    assert timings.stall_s == 0.0
    assert log.record.is_over
    assert log.record.reasons == (FinishReason.LENGTH,)


def test_cancelled_before_it_was_scheduled():
    log = Log()
    log.arrive(1.0)
    log.finish(4.0, reason=FinishReason.ABORT)
    timings, usage = log.sums_hold()
    assert (timings.queue_s, timings.prefill_s, timings.decode_s, timings.ttft_s) == (3.0, 0.0, 0.0, None)
    assert (usage.computed_tokens, usage.remaining_tokens) == (0, 10)
    assert not log.record.sample().is_complete


def test_cancelled_within_prefill():
    log = Log()
    log.arrive(1.0)
    log.step(2.0, 3.0, (PREFILL, 6, 0, {}))
    log.finish(5.0, reason=FinishReason.ABORT)
    timings, usage = log.sums_hold()
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (1.0, 3.0, 0.0)
    assert (usage.computed_tokens, usage.remaining_tokens) == (6, 4)
    assert timings.tpot_s is None


def test_preempted_tokens_count_as_recomputed_and_never_again_as_prompt():
    """The recompute reads the prompt and two output tokens, one of them for the first time."""
    log = Log()
    log.arrive(0.0)
    log.step(0.0, 1.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    log.step(1.0, 2.0, (DECODE, 1, 10, {}), tokens=[(0, 1)])
    log.book.fold([PreemptEvent(request_id="r", index=0, at_s=2.0, computed_tokens=11)])
    again = {"is_recompute": True, "cached_tokens": 4}
    log.step(4.0, 5.0, (PREFILL, 7, 4, again), (PREFILL, 1, 11, {}), tokens=[(0, 2)])
    log.finish(5.0)
    timings, usage = log.sums_hold()
    assert (usage.computed_tokens, usage.cached_tokens, usage.recomputed_tokens) == (10, 0, 11)
    assert timings.n_preemptions == 1
    assert timings.itl_s == (1.0, 3.0)
    assert timings.stall_s == 0.0, "its own recompute is no stall by others"


def test_choices_count_the_prompt_once_and_end_together():
    """Choice 1 computes the last prompt token again for itself; e2e is the last choice's end."""
    log = Log()
    log.arrive(0.0, n=2)
    log.step(0.0, 1.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    log.step(1.0, 2.0, (DECODE, 1, 10, {}), (PREFILL, 1, 9, {"index": 1}), tokens=[(0, 1), (1, 0)])
    log.finish(2.0)
    assert not log.record.is_over
    log.step(2.0, 5.0, (DECODE, 1, 10, {"index": 1}), tokens=[(1, 1)])
    log.finish(5.0, index=1)
    timings, usage = log.sums_hold()
    assert (usage.prompt_tokens, usage.computed_tokens, usage.output_tokens) == (10, 10, 4)
    assert (timings.ttft_s, timings.e2e_s, timings.itl_s, timings.tpot_s) == (1.0, 5.0, (1.0, 3.0), 2.0)
    assert timings.stall_s == 0.0, "its own choice's prefill is no stall by others"


def test_stall_is_the_excess_over_the_requests_own_calm_steps():
    """Calm decode steps take 1, 1 and 2 s (median 1); one of 5 s held another's prefill of 30 tokens."""
    log = Log()
    other = {"request_id": "other"}
    log.arrive(0.0)
    log.step(0.0, 1.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    for position, (begin_s, end_s) in enumerate([(1.0, 2.0), (2.0, 3.0), (3.0, 5.0)], start=1):
        log.step(begin_s, end_s, (DECODE, 1, 10, {}), (DECODE, 1, 99, other), tokens=[(0, position)])
    log.step(5.0, 10.0, (DECODE, 1, 13, {}), (PREFILL, 30, 0, other), tokens=[(0, 4)])
    assert log.record.timings().stall_s == pytest.approx(4.0)


def test_stall_without_a_calm_step_is_the_prefill_share():
    """Nothing to compare with: 5 s of a step of 1 own and 4 prefill tokens count 4 s."""
    log = Log()
    log.arrive(0.0)
    log.step(0.0, 1.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    log.step(1.0, 6.0, (DECODE, 1, 10, {}), (PREFILL, 4, 0, {"request_id": "other"}), tokens=[(0, 1)])
    assert log.record.timings().stall_s == pytest.approx(4.0)


def test_an_open_request_is_timed_up_to_now():
    log = Log()
    log.arrive(0.0)
    assert log.record.timings(2.5).queue_s == 2.5
    log.step(3.0, 4.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    timings = log.record.timings(9.0)
    assert (timings.queue_s, timings.prefill_s, timings.decode_s, timings.e2e_s) == (3.0, 1.0, 5.0, 9.0)
    assert log.record.timings().e2e_s == 4.0


def test_every_step_is_told_with_what_it_held():
    """Phase reports, telemetry and the live page read steps here; nobody folds them a second time."""
    log = Log()
    steps = []
    log.book.on_step.append(steps.append)
    log.arrive(0.0)
    log.step(0.0, 2.0, (PREFILL, 10, 0, {}), tokens=[(0, 0)])
    log.step(3.0, 7.0, (DECODE, 1, 11, {}), (PREFILL, 4, 0, {"request_id": "x"}), tokens=[(0, 2)])
    assert [step.time_s for step in steps] == [2.0, 4.0]
    assert [(step.shape.prefill_tokens, step.shape.decode_tokens) for step in steps] == [(10, 0), (4, 1)]
    assert [step.prefills for step in steps] == [[("r", 10, 0)], [("x", 4, 0)]]
    assert log.book.device_s == sum(step.device_s for step in steps) == 1.0


def test_rejected_drafts_are_rows_and_no_tokens():
    """The live page and the phase report counted rows of rejected drafts as tokens, and showed rates nobody had."""
    steps = []
    book = EventBook(on_step=steps.append)
    shape = StepShape([ChunkShape(Phase.DECODE, 5, 9, True), ChunkShape(Phase.DECODE, 1, 20, True)])
    plain = StepShape([ChunkShape(Phase.DECODE, 1, 12, True)])
    book.fold([ArrivalEvent(request_id="r", at_s=0.0, prompt_tokens=9, n=1)])
    book.fold([StepBeginEvent(7, 1.0, shape), DraftEvent("r", 0, 2.0, 7, 4, 2), StepEndEvent(7, 2.0, 0.5, 0.1)])
    book.fold([StepBeginEvent(8, 2.0, plain), StepEndEvent(8, 3.0, 0.5, 0.1)])
    assert [step.decode_tokens for step in steps] == [4, 1]
    assert [(step.drafted_tokens, step.accepted_tokens) for step in steps] == [(4, 2), (0, 0)]
    (note,) = book.records["r"].drafts
    assert (note.step_id, note.index, note.at_s, note.drafted_tokens, note.accepted_tokens) == (7, 0, 2.0, 4, 2)


def test_a_taken_record_is_gone_and_late_events_are_harmless():
    """A server hands records over, or it would grow with every request."""
    log = Log()
    log.arrive(0.0)
    record = log.book.take("r")
    assert record is not None
    assert log.book.take("r") is None
    log.finish(1.0)
    assert not record.is_over


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40), st.integers(1, 99))
def test_percentile_is_the_linear_one(values, q):
    """Against the standard library's inclusive quantiles, the same definition."""
    expected = statistics.quantiles(values, n=100, method="inclusive")[q - 1]
    assert percentile(values, float(q)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_percentile_of_few_values():
    assert percentile([], 50.0) is None
    assert percentile([3.0], 99.0) == 3.0
    assert (percentile([1.0, 2.0], 0.0), percentile([1.0, 2.0], 100.0)) == (1.0, 2.0)
    assert distribution([]) is None


def sample(start_s=0.0, end_s=2.0, ttft_s=0.5, tpot_s=0.1, itl_s=(0.1, 0.1), output=3, is_complete=True):
    return Sample(
        start_s=start_s,
        end_s=end_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        itl_s=itl_s,
        prompt_tokens=10,
        output_tokens=output,
        is_complete=is_complete,
    )


def test_goodput_needs_every_limit_and_counts_failures_as_misses():
    """Dropping requests must not raise goodput."""
    limits = Limits(ttft_s=0.6, tpot_s=0.2, e2e_s=3.0)
    cases = [
        (sample(), True),
        (sample(ttft_s=0.7), False),
        (sample(tpot_s=0.3), False),
        (sample(end_s=3.5), False),
        (sample(is_complete=False), False),
        (sample(ttft_s=None, tpot_s=None, output=0), False),
        (sample(tpot_s=None, itl_s=(), output=1), True),
    ]
    assert [limits.are_met(each) for each, _ in cases] == [good for _, good in cases]
    summary = summarize([each for each, _ in cases], limits=limits, duration_s=10.0)
    assert summary.goodput_requests_per_s == pytest.approx(0.2)
    assert summary.good_share == pytest.approx(2 / 7)


def test_summary_rates_are_over_the_whole_run():
    """From the first request being due to the last one's end; failed requests give no tokens and no percentiles."""
    samples = [sample(), sample(start_s=1.0, end_s=5.0, itl_s=(0.3,)), sample(ttft_s=9.0, is_complete=False)]
    summary = summarize(samples)
    assert (summary.n_complete, summary.n_failed, summary.duration_s) == (2, 1, 5.0)
    assert summary.output_tokens_per_s == pytest.approx(6 / 5)
    assert summary.total_tokens_per_s == pytest.approx(26 / 5)
    assert summary.itl_s is not None
    assert (summary.itl_s.n, summary.itl_s.mean) == (3, pytest.approx(0.5 / 3))
    assert summary.ttft_s is not None
    assert summary.ttft_s.max == 0.5
    assert summary.e2e_s is not None
    assert (summary.e2e_s.min, summary.e2e_s.max) == (2.0, 4.0)


def test_summary_of_nothing():
    summary = summarize([])
    assert (summary.n_complete, summary.requests_per_s, summary.ttft_s) == (0, 0.0, None)


def test_definitions_tell_the_two_meanings_of_itl_apart():
    """What aiperf and guidellm call inter-token latency is our tpot_s; llmperf's contains the first token."""
    by_name = {definition.name: definition for definition in DEFINITIONS}
    assert len(by_name) == len(DEFINITIONS)
    assert by_name["tpot_s"].aiperf == by_name["tpot_s"].guidellm == "inter_token_latency"
    assert by_name["itl_s"].vllm_sglang == "itl"
    assert by_name["e2e_per_token_s"].llmperf == "inter_token_latency"
    assert by_name["e2e_per_token_s"].guidellm == "time_per_output_token"
