"""How a step is filled: budgets, order, forks, preemption, and what a plan costs."""

from __future__ import annotations

import pytest

from diptych.control.loop import EngineCore
from diptych.control.policy import MIN_PREFILL_TOKENS
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.events import FinishEvent, PreemptEvent, ScheduledEvent, TokenEvent
from diptych.ground.phase import FinishReason, Phase
from diptych.ground.request import Pool, Pooling

from .counting import CountingList, operations
from .toy import ToyExecutor, greedy, prefill_tokens, request


class Driver:
    """A core with its toy executor and a clock of one second a step."""

    def __init__(self, *, n_blocks=64, block_tokens=4, predict_s=None, **config):
        blocks = BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens)
        self.core = EngineCore(SchedulerConfig(**config), blocks, model_revision="toy", predict_s=predict_s)
        self.executor = ToyExecutor(n_blocks, block_tokens)
        self.now_s = 0.0
        self.events = []

    def step(self):
        plan, events = self.core.begin_step(self.now_s)
        self.events += events
        self.core.check()
        if plan is not None:
            result = self.executor.execute(plan)
            self.events += self.core.end_step(plan, result, self.now_s + 0.5)
            self.core.check()
        self.now_s += 1.0
        return plan

    def run(self, limit=3000):
        plans = []
        while self.core.has_work:
            assert len(plans) < limit, "does not end"
            plans.append(self.step())
        return plans

    def text(self, request_id):
        return [event.token_id for event in self.of(TokenEvent) if event.request_id == request_id]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def sizes(plan):
    return [(chunk.phase, len(chunk.token_ids)) for chunk in plan.chunks]


def test_prefill_gets_what_decode_leaves():
    """Decode first: a running stream never waits because a prompt filled the step."""
    driver = Driver(max_step_tokens=10)
    driver.core.submit(request(prompt=4, max_tokens=20, request_id="a"))
    driver.step()
    driver.core.submit(request(prompt=range(5, 30), max_tokens=2, request_id="b", arrival_s=1.0))
    plans = [driver.step() for _ in range(3)]
    assert sizes(plans[0]) == [(Phase.DECODE, 1), (Phase.PREFILL, 9)]
    assert sizes(plans[1]) == [(Phase.DECODE, 1), (Phase.PREFILL, 9)]
    assert sizes(plans[2]) == [(Phase.DECODE, 1), (Phase.PREFILL, 7)]
    assert [chunk.samples for plan in plans for chunk in plan.chunks[1:]] == [False, False, True]


def test_prefills_alone_take_steps_of_their_own_before_decode():
    """Other engines' policy, for the simulator: streams wait while any prompt is read, and answers stay what they were."""
    driver = Driver(max_step_tokens=10, prefills_alone=True)
    driver.core.submit(request(prompt=4, max_tokens=20, request_id="a"))
    driver.step()
    driver.core.submit(request(prompt=range(5, 30), max_tokens=2, request_id="b", arrival_s=1.0))
    plans = [driver.step() for _ in range(4)]
    read, both = Phase.PREFILL, [(Phase.DECODE, 1), (Phase.DECODE, 1)]
    assert [sizes(plan) for plan in plans] == [[(read, 10)], [(read, 10)], [(read, 5)], both]
    driver.run()
    assert driver.text("b") == greedy(range(5, 30), 2)


def test_prefills_alone_end_in_a_pool_that_is_too_small_for_all():
    """Where a prompt finds no blocks, those who decode go on, and give theirs back."""
    driver = Driver(n_blocks=10, max_step_tokens=16, prefills_alone=True)
    for number in range(4):
        driver.core.submit(request(prompt=12, max_tokens=12, request_id=str(number), arrival_s=float(number)))
    driver.run()
    assert [len(driver.text(str(number))) for number in range(4)] == [12] * 4


def test_the_stall_budget_is_searched_over_shapes_that_share_their_start():
    """Every probe of the bisection used to build a whole plan: O(chunks) each, several times per prefill."""
    asked = []

    def predict_s(shape):
        asked.append(shape)
        return 0.001 * shape.n_tokens

    driver = Driver(n_blocks=256, max_step_tokens=500, predict_s=predict_s, stall_budget_s=0.2)
    for i in range(8):
        driver.core.submit(request(prompt=range(i, i + 4), max_tokens=50, request_id=f"d{i}"))
    driver.step()
    driver.core.submit(request(prompt=400, max_tokens=2, request_id="p", arrival_s=1.0))
    asked.clear()
    plan = driver.step()
    probes, final = asked[:-1], asked[-1]
    assert len(probes) > 3
    assert {id(probe.before) for probe in probes} == {id(final.before)}
    assert all(len(probe.own) == 1 for probe in probes)
    assert final is plan.shape
    assert [chunk.shape for chunk in plan.chunks] == list(final.shapes)
    assert 192 - 16 < final.prefill_tokens <= 192


def test_chunk_is_as_long_as_the_stall_budget_allows():
    """The budget is in seconds; only steps with running decodes have it."""
    driver = Driver(max_step_tokens=500, predict_s=lambda plan: 0.01 * plan.n_tokens, stall_budget_s=1.0)
    driver.core.submit(request(prompt=200, max_tokens=30, request_id="a"))
    assert sizes(driver.step()) == [(Phase.PREFILL, 200)]
    driver.core.submit(request(prompt=range(5, 45), max_tokens=2, request_id="b", arrival_s=1.0))
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 40)]
    driver = Driver(max_step_tokens=500, predict_s=lambda plan: 0.01 * plan.n_tokens, stall_budget_s=1.0)
    driver.core.submit(request(prompt=4, max_tokens=30, request_id="a"))
    driver.step()
    driver.core.submit(request(prompt=range(5, 155), max_tokens=2, request_id="b", arrival_s=1.0))
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 96)]  # 99 fit; 96 is the multiple of 16
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 54)]


def test_the_stall_budget_holds_where_steps_take_longer_than_predicted():
    """On a machine that does something else besides, steps of 50 ms took 80, and every stream waited as long."""
    driver = Driver(
        n_blocks=2048, max_step_tokens=500, predict_s=lambda shape: 0.001 * shape.n_tokens, stall_budget_s=0.1
    )
    driver.core.submit(request(prompt=4, max_tokens=200, request_id="a"))
    driver.step()
    driver.executor.seconds = lambda plan: 0.0016 * plan.n_tokens
    driver.core.submit(request(prompt=range(5, 4000), max_tokens=2, request_id="b", arrival_s=1.0))
    took_s = [driver.executor.seconds(driver.step()) for _ in range(20)]
    assert took_s[0] > 0.14
    assert max(took_s[1:]) < took_s[0]
    assert 0.07 < took_s[-1] <= 0.1
    driver.executor.seconds = lambda plan: 0.0001 * plan.n_tokens
    predicted_s = [0.001 * driver.step().n_tokens for _ in range(30)]
    assert predicted_s[0] < predicted_s[-1] <= 0.1, "and nobody is late for ever"


def test_prefill_ends_although_no_size_fits_the_stall_budget():
    """A budget below the launch time must not keep prompts waiting for ever behind an endless stream."""
    driver = Driver(predict_s=lambda plan: 9.0, stall_budget_s=1.0)
    driver.core.submit(request(prompt=4, max_tokens=200, request_id="a"))
    driver.step()
    for i in range(3):
        driver.core.submit(request(prompt=range(i, i + 30), max_tokens=1, request_id=f"b{i}", arrival_s=1.0 + i))
    plans = [driver.step() for _ in range(6)]
    assert [prefill_tokens(plan) for plan in plans] == [MIN_PREFILL_TOKENS, 14] * 3
    assert [event.request_id for event in driver.of(FinishEvent)] == ["b0", "b1", "b2"]


WHOLE = Pooling(pool=Pool.MEAN, both_ways=True)


def test_a_prompt_that_cannot_be_cut_waits_for_a_step_that_holds_it():
    """Its tokens attend to what stands behind them, so a chunk of it would be wrong; decode goes on beside it."""
    driver = Driver(max_step_tokens=10)
    driver.core.submit(request(prompt=4, max_tokens=20, request_id="a"))
    driver.step()
    driver.core.submit(request(prompt=range(30, 37), max_tokens=1, request_id="b"))
    driver.core.submit(request(prompt=range(60, 66), request_id="whole", pooling=WHOLE))
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 7)]
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 6)]
    assert driver.core.stats().blocks_cached == 1, "nothing of it is kept: of the others one block is whole"
    driver.core.submit(request(prompt=range(60, 66), request_id="again", pooling=WHOLE))
    assert sizes(driver.step()) == [(Phase.DECODE, 1), (Phase.PREFILL, 6)]
    driver.run()


def test_prompts_as_long_as_a_step_and_decode_take_turns():
    """One that is as long as a step never finds room beside decode: without turns it would wait for ever, or decode would."""
    driver = Driver(max_step_tokens=10)
    driver.core.submit(request(prompt=4, max_tokens=20, request_id="a"))
    driver.step()
    for name in ("x", "y"):
        driver.core.submit(request(prompt=10, request_id=name, pooling=WHOLE))
    whole, alone = [(Phase.PREFILL, 10)], [(Phase.DECODE, 1)]
    assert [sizes(driver.step()) for _ in range(4)] == [whole, alone, whole, alone]
    driver.run()


def test_the_stall_budget_does_not_cut_what_cannot_be_cut():
    """The budget is kept by taking one such prompt at a time, beside decode."""
    driver = Driver(max_step_tokens=500, predict_s=lambda shape: shape.n_tokens / 100, stall_budget_s=0.5, n_blocks=256)
    driver.core.submit(request(prompt=4, max_tokens=20, request_id="a"))
    driver.step()
    for name in ("x", "y"):
        driver.core.submit(request(prompt=90, request_id=name, pooling=WHOLE))
    assert [sizes(driver.step())[1:] for _ in range(3)] == [[(Phase.PREFILL, 90)], [(Phase.PREFILL, 90)], []]
    driver.run()


def test_forked_choices_compute_the_last_prompt_token_alone():
    """Each choice draws its own first token; the rest of the prompt is shared, the block it writes is copied."""
    for prompt in (12, 13, 15):
        driver = Driver()
        driver.core.submit(request(prompt=prompt, max_tokens=3, n=3))
        driver.step()
        plan = driver.step()
        assert sizes(plan) == [(Phase.DECODE, 1), (Phase.PREFILL, 1), (Phase.PREFILL, 1)]
        assert [chunk.start_pos for chunk in plan.chunks] == [prompt, prompt - 1, prompt - 1]
        assert all(chunk.samples and chunk.first_new_block == 0 for chunk in plan.chunks[1:])
        n_full = (prompt - 1) // 4
        first = driver.core._books.requests["r"][0].block_ids
        for chunk in plan.chunks[1:]:
            assert list(chunk.new_block_ids[:n_full]) == first[:n_full]
        assert len(plan.copies) == 2


def test_the_last_holder_of_a_shared_block_writes_it_without_a_copy():
    """Choice 0 has ended, so choice 1 alone holds the prompt's block."""
    driver = Driver()
    driver.core.submit(request(prompt=4, max_tokens=1, n=2))
    driver.step()
    assert driver.step().copies == ()


def test_prefills_that_together_exceed_the_pool_take_turns():
    """Blocks that an admitted prompt will need are promised to it; admitting another into them would preempt one."""
    driver = Driver(n_blocks=10, block_tokens=4, max_step_tokens=8, max_context_tokens=40)
    driver.core.submit(request(prompt=24, max_tokens=1, request_id="a"))
    driver.step()
    driver.core.submit(request(prompt=range(20), max_tokens=15, request_id="b", priority=5, arrival_s=1.0))
    driver.run()
    assert driver.of(PreemptEvent) == []


def test_the_tail_of_a_finished_prefix_is_evicted_first():
    """The head serves many more prompts than the tail."""
    driver = Driver(n_blocks=6, block_tokens=4)
    driver.core.submit(request(prompt=13, max_tokens=1, request_id="a"))
    driver.run()
    driver.core.submit(request(prompt=range(14), max_tokens=1, request_id="b"))
    driver.run()
    assert driver.core.prefix_match(tuple(range(100, 114))) == 8


def test_lowest_rank_is_preempted_and_answers_the_same():
    """Preemption is by recompute: another wait, the same text, and no token counted as cached."""
    driver = Driver(n_blocks=8, block_tokens=4, max_context_tokens=32)
    driver.core.submit(request(prompt=10, max_tokens=20, request_id="low", priority=0))
    driver.core.submit(request(prompt=range(50, 60), max_tokens=20, request_id="high", priority=1, arrival_s=0.5))
    driver.run()
    preempted = driver.of(PreemptEvent)
    assert preempted
    assert {event.request_id for event in preempted} == {"low"}
    scheduled = [event for event in driver.of(ScheduledEvent) if event.request_id == "low"]
    assert all(event.cached_tokens == 0 or event.is_recompute for event in scheduled)
    again = sum(event.chunk_tokens + event.cached_tokens for event in scheduled if event.is_recompute)
    assert again == sum(event.computed_tokens for event in preempted)
    stats = driver.core.stats()
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (20, 0)
    assert driver.text("low") == greedy(tuple(range(100, 110)), 20)
    assert driver.text("high") == greedy(tuple(range(50, 60)), 20)


def test_preempted_sequence_restarts_as_prefill_with_a_new_table():
    """It goes WAITING -> PREFILL over its known tokens, and the executor is told the whole table again, not the start."""
    driver = Driver(n_blocks=8, block_tokens=4, max_context_tokens=32, enable_prefix_cache=False)
    for i in range(2):
        driver.core.submit(request(prompt=range(10 * i, 10 * i + 10), max_tokens=20, request_id=f"r{i}"))
    plans = driver.run()
    second = [chunk for plan in plans for chunk in plan.chunks if chunk.seq_id == 1]
    restart = [k for k, chunk in enumerate(second) if k and chunk.start_pos == 0]
    assert restart
    for k in restart:
        assert second[k].phase is Phase.PREFILL
        assert second[k].first_new_block == 0
        assert second[k].end_pos == second[k - 1].end_pos + 1
    assert sum(start.seq_id == 1 for plan in plans for start in plan.starts) == 1


def test_recompute_after_losing_a_hit_is_no_new_hit():
    """A sequence whose cached prefix is found again after preemption had those tokens before."""
    driver = Driver(n_blocks=9, block_tokens=4, max_context_tokens=36)
    stem = tuple(range(8))
    driver.core.submit(request((*stem, 40), max_tokens=1, request_id="seed"))
    driver.run()
    for i in range(2):
        driver.core.submit(request((*stem, 50 + i), max_tokens=25, request_id=f"r{i}", arrival_s=5.0 + i))
    driver.run()
    assert driver.of(PreemptEvent)
    for name in ("r0", "r1"):
        scheduled = [event for event in driver.of(ScheduledEvent) if event.request_id == name]
        assert sum(event.cached_tokens for event in scheduled if not event.is_recompute) == 8


def test_hit_never_covers_the_last_prompt_token():
    """Its logits give the first output token, so it must be computed even when all of it is cached."""
    driver = Driver()
    for name in ("first", "second"):
        driver.core.submit(request(prompt=16, max_tokens=2, request_id=name))
        driver.run()
    event = next(event for event in driver.of(ScheduledEvent) if event.request_id == "second")
    assert (event.cached_tokens, event.context_tokens, event.chunk_tokens) == (12, 12, 4)
    assert driver.core.prefix_match(tuple(range(100, 116))) == 12
    assert driver.core.prefix_match(tuple(range(100, 117))) == 16
    assert driver.core.prefix_match(tuple(range(100, 117)), "other") == 0


def test_generated_tokens_are_cached_too():
    """The next turn of a chat begins with the last answer."""
    driver = Driver()
    driver.core.submit(request(prompt=6, max_tokens=11, request_id="turn1"))
    driver.run()
    prompt = tuple(range(100, 106))
    history = prompt + tuple(greedy(prompt, 11))
    assert driver.core.prefix_match((*history, 1)) == 16  # 17 tokens, the last one without KV


def test_prompt_logprobs_skip_the_cache():
    """A cached token has no logits to report."""
    driver = Driver()
    driver.core.submit(request(prompt=16, max_tokens=1, request_id="first"))
    driver.run()
    driver.core.submit(request(prompt=16, max_tokens=1, request_id="second", prompt_logprobs=2))
    assert sizes(driver.step()) == [(Phase.PREFILL, 16)]


def test_nobody_overtakes_the_first_in_line():
    """A long prompt that lacks blocks must not be passed by short ones for ever."""
    driver = Driver(n_blocks=10, block_tokens=4, max_context_tokens=40)
    driver.core.submit(request(prompt=20, max_tokens=18, request_id="runs"))
    driver.step()
    driver.core.submit(request(prompt=range(30), max_tokens=2, request_id="long", arrival_s=1.0))
    driver.core.submit(request(prompt=range(3), max_tokens=2, request_id="short", arrival_s=2.0))
    driver.run()
    order = [event.request_id for event in driver.of(ScheduledEvent)]
    assert order.index("long") < order.index("short")


@pytest.mark.parametrize("reverse", [False, True])
def test_higher_priority_is_admitted_first_whatever_the_order_of_arrival(reverse):
    driver = Driver(max_running_sequences=1)
    names = [("low", -1), ("mid", 0), ("high", 3)]
    for name, priority in reversed(names) if reverse else names:
        driver.core.submit(request(prompt=4, max_tokens=2, request_id=name, priority=priority))
    driver.run()
    assert [event.request_id for event in driver.of(FinishEvent)] == ["high", "mid", "low"]


def test_cancel_in_flight_keeps_the_blocks_until_the_step_ends():
    """The kernels may still write there; another sequence must not own the block yet."""
    driver = Driver()
    driver.core.submit(request(prompt=12, max_tokens=5))
    plan, _ = driver.core.begin_step(0.0)
    result = driver.executor.execute(plan)
    (finish,) = driver.core.cancel("r", 0.2)
    assert finish.reason is FinishReason.ABORT
    assert driver.core.stats().blocks_in_use == 3
    driver.core.check()
    assert [type(event).__name__ for event in driver.core.end_step(plan, result, 0.5)] == ["StepEndEvent"]
    assert driver.core.stats().blocks_in_use == 0
    assert driver.core.cancel("r", 1.0) == []


def decoding(context, *, n_sequences=4, n_waiting=0, n_blocks=4096, max_running_sequences=None):
    """A core in the middle of decoding at a context, with its lists counted."""
    driver = Driver(
        n_blocks=n_blocks,
        block_tokens=16,
        max_step_tokens=20_000,
        max_running_sequences=max_running_sequences or n_sequences,
        max_context_tokens=8192,
    )
    for i in range(n_sequences):
        prompt = tuple(range(i, i + context))
        driver.core.submit(request(prompt, max_tokens=60, request_id=f"r{i}"))
    for i in range(n_waiting):
        driver.core.submit(request(prompt=50, request_id=f"w{i}", arrival_s=1.0))
    plan, _ = driver.core.begin_step(0.0)
    results = ToyExecutor(n_blocks, 16)
    results._read = lambda table, position: 0  # the text does not matter here, only what planning costs
    driver.core.end_step(plan, results.execute(plan), 0.5)
    for seq in driver.core._scheduler.decoding:
        seq.token_ids = CountingList(seq.token_ids)
        seq.block_ids = CountingList(seq.block_ids)
        seq.digests = CountingList(seq.digests)
        seq.serials = CountingList(seq.serials)
    return driver.core, results


def cost_of_steps(core, executor, n_steps=40):
    costs = []
    for k in range(n_steps):
        (plan, _), begin = operations(lambda k=k: core.begin_step(1.0 + k))
        result = executor.execute(plan)
        _, end = operations(lambda k=k, plan=plan, result=result: core.end_step(plan, result, 1.5 + k))
        costs.append(begin + end)
    return costs


def test_a_decode_step_costs_the_same_at_any_context():
    """Work per step is O(chunks + chunk tokens + new blocks): counted operations are equal at 64 and 4,096 tokens."""
    assert cost_of_steps(*decoding(64)) == cost_of_steps(*decoding(4096))


def test_a_step_costs_the_same_whatever_waits_and_however_large_the_pool():
    """A long line and a large pool are looked at when they change, not at every step."""
    alone, beside_one = cost_of_steps(*decoding(64)), cost_of_steps(*decoding(64, n_waiting=1))
    assert max(cost_of_steps(*decoding(64, n_waiting=500))) <= max(beside_one) + 10
    assert cost_of_steps(*decoding(64, n_blocks=40_000)) == alone


def test_a_prompt_that_lacks_blocks_is_not_looked_up_at_every_step():
    """The first in line shares 4,096 tokens with a running sequence; that look-up is O(context)."""
    core, executor = decoding(4096, n_sequences=1, n_blocks=289, max_running_sequences=2)
    alone = cost_of_steps(core, executor, 5)
    core.submit(request(tuple(range(4096 + 500)), request_id="large", arrival_s=9.0))
    costs = cost_of_steps(core, executor, 6)
    assert core.stats().waiting == 1
    assert max(costs[1:]) < max(alone) + 100


def test_a_step_costs_in_proportion_to_its_chunks():
    """Sixteen times the sequences may cost little more than sixteen times the operations."""
    few, many = (sum(cost_of_steps(*decoding(64, n_sequences=n))) for n in (2, 32))
    assert many < 1.2 * 16 * few


def test_a_prefill_chunk_costs_by_its_length_and_not_by_what_came_before():
    """Chunks of 64 tokens of one long prompt: the last costs what the second did."""
    driver = Driver(n_blocks=512, block_tokens=16, max_step_tokens=64, max_context_tokens=8192)
    driver.core.submit(request(prompt=64 * 40, max_tokens=2))
    seq = driver.core._books.requests["r"][0]
    seq.token_ids, seq.block_ids = CountingList(seq.token_ids), CountingList(seq.block_ids)
    seq.digests, seq.serials = CountingList(seq.digests), CountingList(seq.serials)
    driver.executor._read = lambda table, position: 0
    costs = cost_of_steps(driver.core, driver.executor, 39)
    assert len(set(costs[1:38])) == 1
