"""Random worlds: tiny pools, shared prefixes, forks, cancels, priorities, stall budgets; rules checked every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from diptych.control.loop import EngineCore
from diptych.control.policy import MIN_PREFILL_TOKENS
from diptych.control.recording import Recorder, replay
from diptych.control.speculation import EveryGuess
from diptych.cost.drafts.prices import DraftPrices
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, PromptTooLong
from diptych.ground.events import FinishEvent, PreemptEvent, TokenEvent
from diptych.ground.phase import FinishReason, Phase
from diptych.ground.request import Request, StructuredSpec
from diptych.ground.shape import StepShape
from diptych.ground.step import StepResult
from diptych.metrics import EventBook

from .toy import VOCAB, ToyExecutor, greedy, prefill_tokens, request, toy_kv, toy_next

N_WORLDS = 1200
N_SHARDS = 12
N_STATE_WORLDS = 450
N_STATE_SHARDS = 7  # odd, so that each has worlds that speculate and others


def shards(n: int) -> list:
    """Numbers of the shards, each of which reaches every corner: two fifths by default, the others run with -m slow."""
    return [pytest.param(i, marks=pytest.mark.slow) if 5 * i >= 2 * n else i for i in range(n)]


class KnowingDrafter:
    """Proposes the right answer, and errs at a set rate: scripted acceptance, nonsense and silence among it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.error_rate = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        self.confidence = 0
        self.contents: list[int] = []

    def propose(self, token_ids, n: int) -> list[int]:
        self.confidence = self.rng.randrange(3)
        for position in range(len(self.contents), len(token_ids)):
            self.contents.append(toy_kv(self.contents[-1] if position else 0, token_ids[position], position))
        contents, drafts = list(self.contents), []
        for _ in range(self.rng.randint(0, n)):
            right = toy_next(contents)
            contents.append(toy_kv(contents[-1], right, len(contents)))
            drafts.append(self.rng.randrange(10 * VOCAB) if self.rng.random() < self.error_rate else right)
        if self.rng.random() < 0.005:
            return self.rng.choice(([-1], [0] * (n + 1), "text", [1.5], [True], 7))  # counted as a fault
        if self.rng.random() < 0.005:
            raise OSError("a drafter died")
        return drafts


class ForcingToy(ToyExecutor):
    """Says of requests with a grammar what comes next at four of every seven positions, as a grammar that forces it does."""

    def execute(self, plan) -> StepResult:
        result = super().execute(plan)
        forced = [self._forced(chunk, one) for chunk, one in zip(plan.chunks, result.results, strict=True)]
        results = [replace(one, forced_token_ids=some) for one, some in zip(result.results, forced, strict=True)]
        return replace(result, results=tuple(results))

    def _forced(self, chunk, one) -> tuple[int, ...]:
        known = chunk.end_pos - len(chunk.draft_token_ids) + len(one.token_ids)
        forced: list[int] = []
        if self.starts[chunk.seq_id].sampling.structured is None or not one.token_ids:
            return ()
        contents = [self._read(self.tables[chunk.seq_id], position) for position in range(known - 1)]
        contents.append(toy_kv(contents[-1], one.token_ids[-1], known - 1))
        while (known + len(forced)) % 7 < 4:
            forced.append(toy_next(contents))
            contents.append(toy_kv(contents[-1], forced[-1], len(contents)))
        return tuple(forced)


def toy_seconds(shape) -> float:
    """A step time with a launch cost, rows, and attention over the context."""
    pairs = sum(chunk.new_tokens * chunk.end_pos for chunk in shape.shapes)
    return 1.0 + 0.1 * shape.n_tokens + 0.002 * pairs


@dataclass
class World:
    """One seeded world: its limits, and the requests still to arrive by step."""

    rng: random.Random
    config: SchedulerConfig
    blocks: BlockConfig
    arrivals: list[tuple[int, Request]]

    @property
    def work_tokens(self) -> int:
        return sum(len(r.prompt_token_ids) + r.sampling.n * r.sampling.max_tokens for _, r in self.arrivals)


def make_world(seed: int) -> World:
    rng = random.Random(seed)
    block_tokens = rng.choice((1, 2, 3, 4, 8))
    n_blocks = max(2, rng.randint(4, 60) // block_tokens + rng.randint(0, 6))
    config = SchedulerConfig(
        max_step_tokens=rng.choice((1, 2, 5, 8, 16, 64)),
        max_running_sequences=rng.choice((1, 2, 4, 8)),
        stall_budget_s=rng.choice((None, None, 0.5, 1.5, 2.0, 4.0)),
        max_context_tokens=rng.choice((24, 48, 200)),
        max_waiting_tokens=rng.choice((60, 1000, 100_000)),
        aging_s=rng.choice((0.5, 2.0, 10.0)),
        enable_prefix_cache=rng.random() < 0.75,
    )
    stems = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))) for _ in range(3)]
    arrivals = []
    for i in range(rng.randint(2, 10)):
        stem = rng.choice(stems)
        tail = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0 if stem else 1, 10)))
        arrived = rng.randint(0, 25)
        arrivals.append(
            (
                arrived,
                request(
                    stem + tail,
                    max_tokens=rng.randint(1, 12),
                    request_id=f"r{i}",
                    arrival_s=float(arrived),
                    priority=rng.choice((0, 0, 0, 1, -1, 5)),
                    salt=rng.choice((None, None, "tenant")),
                    eos=(rng.randrange(VOCAB), rng.randrange(VOCAB)),
                    n=rng.choice((1, 1, 1, 2, 4)),
                    min_tokens=rng.choice((0, 0, 1)),
                    ignore_eos=rng.random() < 0.3,
                ),
            )
        )
    arrivals.sort(key=lambda pair: pair[0])
    return World(rng, config, BlockConfig(n_blocks=n_blocks, block_tokens=block_tokens), arrivals)


def right_answer(wanted: Request, limit_tokens: int) -> tuple[list[int], FinishReason]:
    """What the request must say: the greedy text alone, cut by its own rules."""
    sampling = wanted.sampling
    room = min(sampling.max_tokens, limit_tokens - len(wanted.prompt_token_ids))
    answer: list[int] = []
    for token_id in greedy(wanted.prompt_token_ids, room):
        answer.append(token_id)
        is_eos = token_id in wanted.eos_token_ids and not sampling.ignore_eos
        if is_eos and len(answer) >= sampling.min_tokens:
            return answer, FinishReason.STOP
    return answer, FinishReason.LENGTH


class Referee:
    """Drives one world and checks every rule after every call."""

    def __init__(self, seed: int, settings=None, *, has_states=False, **speculation) -> None:
        """settings: of the scheduler, in place of the world's; has_states: sequences have some; speculation: of the core."""
        self.world = make_world(seed)
        world = self.world
        world.config = replace(world.config, **(settings or {}))
        if has_states:
            few = random.Random(seed).choice((0, 1, 2, 5, 20))
            places = max(1, world.config.max_running_sequences + few - 2 * (few == 1))
            world.blocks = replace(world.blocks, n_places=places)
        self.core = EngineCore(
            world.config, world.blocks, model_revision="toy", predict_s=toy_seconds, seed=seed, **speculation
        )
        self.recorder = Recorder(self.core)
        self.executor = ToyExecutor(world.blocks.n_blocks, world.blocks.block_tokens)
        self.book = EventBook()
        self.requests: dict[str, Request] = {}
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], FinishEvent] = {}
        self.cut: set[str] = set()  # requests that the referee itself ended early
        self.n_mixed = 0
        self.n_drafted = 0

    def run(self) -> None:
        limit_steps = 60 + 6 * self.world.work_tokens
        step = 0
        pending = list(self.world.arrivals)
        while pending or self.core.has_work:
            assert step < limit_steps, f"{step} steps for {self.world.work_tokens} tokens: somebody starves"
            while pending and pending[0][0] <= step:
                self.submit(pending.pop(0)[1])
            self.step(step)
            step += 1
        self.check_end()

    def submit(self, wanted: Request) -> None:
        try:
            events = self.recorder.submit(wanted)
        except PromptTooLong:
            assert len(wanted.prompt_token_ids) >= self.core.context_limit_tokens
            return
        except CapacityError:
            assert self.core.stats().waiting_tokens > 0
            return
        self.requests[wanted.request_id] = wanted
        self.take(events)

    def step(self, step: int) -> None:
        rng, now_s = self.world.rng, float(step)
        if self.requests and rng.random() < 0.03:
            self.cancel(rng.choice(sorted(self.requests)), now_s)
        if rng.random() < 0.01:
            self.recorder.reset_prefix_cache()
        waiting_before = {seq.seq_id for seq in self.core._scheduler.waiting}
        best = min((seq.key for seq in self.core._scheduler.decoding), default=None)
        better = min((seq.key for seq in self.core._scheduler.prefilling), default=None)
        plan, events = self.recorder.begin_step(now_s)
        self.take(events)
        self.core.check()
        if plan is None:
            assert not self.core.has_work, "open requests, yet nothing planned"
            return
        self.check_plan(plan)
        self.check_drafts(plan)
        self.check_line(plan, waiting_before, preempted=any(isinstance(event, PreemptEvent) for event in events))
        if best is not None and (better is None or best < better):
            assert best[1] in {chunk.seq_id for chunk in plan.chunks}, "the first in rank was passed over"
        result = self.executor.execute(plan)
        if rng.random() < 0.02:
            self.cancel(rng.choice(sorted(self.requests)), now_s)
            self.core.check()
        self.take(self.recorder.end_step(plan, result, now_s + 0.5))
        self.core.check()
        if self.requests and rng.random() < 0.03:
            request_id = rng.choice(sorted(self.requests))
            self.cut.add(request_id)
            self.take(self.recorder.finish(request_id, 0, now_s + 0.5, reason=FinishReason.STOP))
            self.core.check()

    def cancel(self, request_id: str, now_s: float) -> None:
        self.cut.add(request_id)
        self.take(self.recorder.cancel(request_id, now_s))

    def take(self, events) -> None:
        self.book.fold(events)
        for event in events:
            if isinstance(event, TokenEvent):
                assert (event.request_id, event.index) not in self.finishes, "a token after the end"
                self.texts.setdefault((event.request_id, event.index), []).append(event.token_id)
            elif isinstance(event, FinishEvent):
                assert (event.request_id, event.index) not in self.finishes, "ended twice"
                self.finishes[event.request_id, event.index] = event

    def check_plan(self, plan) -> None:
        config = self.world.config
        phases = [chunk.phase for chunk in plan.chunks]
        n_decode = phases.count(Phase.DECODE)
        assert phases == [Phase.DECODE] * n_decode + [Phase.PREFILL] * (len(phases) - n_decode)
        assert 0 < plan.n_tokens <= config.max_step_tokens
        assert len(plan.chunks) <= config.max_running_sequences
        assert len({chunk.seq_id for chunk in plan.chunks}) == len(plan.chunks)
        if 0 < n_decode < len(plan.chunks):
            self.n_mixed += 1
            is_least = n_decode == len(plan.chunks) - 1 and prefill_tokens(plan) <= MIN_PREFILL_TOKENS
            is_priced = config.stall_budget_s is not None and self.core._scheduler.predict_s is not None
            if is_priced and toy_seconds(self.priced_shape(plan)) > config.stall_budget_s:
                assert is_least, "more than the smallest chunk over the stall budget"

    def priced_shape(self, plan) -> StepShape:
        """What the budget counts: `EveryGuess` prices nothing, so its drafts come on top."""
        if isinstance(self.core._scheduler.drafts.depths, EveryGuess):
            return plan.shape.with_drafts([-len(chunk.draft_token_ids) for chunk in plan.chunks])
        return plan.shape

    def check_drafts(self, plan) -> None:
        """Rows only ever go where nobody else reads: into blocks of one table that are not in the prefix index."""
        pool = self.core.pool
        for chunk in plan.chunks:
            self.n_drafted += len(chunk.draft_token_ids)
            seq = self.core._in_flight[chunk.seq_id]
            if not chunk.draft_token_ids:
                continue
            most = seq.request.sampling.max_draft_tokens
            assert most is None or len(chunk.draft_token_ids) <= most
            assert seq.output_tokens + len(chunk.draft_token_ids) < seq.max_output_tokens
            for position in range(chunk.start_pos, chunk.end_pos):
                block_id = seq.block_ids[position // pool.block_tokens]
                assert pool.references(block_id) == 1, "a draft is written where others read"
                assert pool._entries[block_id] is None, "a draft is written into an indexed block"

    def check_line(self, plan, waiting_before: set[int], *, preempted: bool) -> None:
        """Nobody is admitted past someone of better rank, and nobody in a step that took blocks from the running."""
        aging_s = self.world.config.aging_s
        alive = {seq.seq_id: seq for seqs in self.core._books.requests.values() for seq in seqs}
        place = {
            seq_id: (seq.request.arrival_s - seq.request.priority * aging_s, seq_id) for seq_id, seq in alive.items()
        }
        planned = {chunk.seq_id for chunk in plan.chunks}
        running = self.core._scheduler.n_running
        admitted = [place[seq_id] for seq_id in planned & waiting_before]
        left = [place[seq.seq_id] for seq in self.core._scheduler.waiting]
        if admitted and left:
            assert max(admitted) < min(left)
        if preempted and running > 1:
            assert not admitted
        assert not planned & {seq.seq_id for seq in self.core._scheduler.waiting}

    def check_end(self) -> None:
        for request_id, wanted in self.requests.items():
            answer, reason = right_answer(wanted, self.core.context_limit_tokens)
            for index in range(wanted.sampling.n):
                finish = self.finishes[request_id, index]
                text = self.texts.get((request_id, index), [])
                assert finish.output_tokens == len(text)
                assert text == answer[: len(text)], f"{request_id}/{index} answers otherwise than alone"
                if request_id not in self.cut:
                    assert (text, finish.reason) == (answer, reason)
            self.check_record(request_id, wanted)
        stats = self.core.stats()
        assert stats.blocks_in_use == stats.waiting == stats.running == stats.waiting_tokens == 0
        assert self.core._scheduler._promised_blocks == 0

    def check_record(self, request_id: str, wanted: Request) -> None:
        record = self.book.records[request_id]
        usage, timings = record.usage(), record.timings()
        assert usage.prompt_tokens == len(wanted.prompt_token_ids)
        assert usage.computed_tokens + usage.cached_tokens + usage.remaining_tokens == usage.prompt_tokens
        if self.texts.get((request_id, 0)):
            assert usage.remaining_tokens == 0
        assert usage.cached_tokens < usage.prompt_tokens
        assert 0 <= usage.accepted_tokens <= min(usage.drafted_tokens, usage.output_tokens)
        assert usage.output_tokens == sum(len(self.texts.get((request_id, i), [])) for i in range(wanted.sampling.n))
        if timings.ttft_s is not None:
            assert timings.queue_s + timings.prefill_s == pytest.approx(timings.ttft_s, abs=1e-9)
        total_s = timings.queue_s + timings.prefill_s + timings.decode_s
        assert total_s == pytest.approx(timings.e2e_s, abs=1e-9)


@pytest.mark.parametrize("shard", shards(N_SHARDS))
def test_every_rule_holds_in_random_worlds(shard):
    """Blocks balance, budgets hold, nobody starves, and the text is the one-by-one answer, whatever else happens."""
    seen = {"preemptions": 0, "hits": 0, "mixed": 0, "cut": 0}
    for seed in range(shard, N_WORLDS, N_SHARDS):
        referee = Referee(seed)
        try:
            referee.run()
        except Exception as error:
            raise AssertionError(f"world {seed}: {error!r}") from error
        stats = referee.core.stats()
        seen["preemptions"] += stats.preemptions
        seen["hits"] += stats.prefix_hits_tokens
        seen["mixed"] += referee.n_mixed
        seen["cut"] += len(referee.cut)
        if seed % 10 == 0:
            assert replay(referee.recorder.lines(), predict_s=toy_seconds) == []
    assert min(seen.values()) > 0, f"these worlds no longer reach every corner: {seen}"


@pytest.mark.parametrize("shard", shards(N_STATE_SHARDS))
def test_a_state_is_that_of_its_tokens_in_random_worlds(shard):
    """Whoever runs has a place, nobody reads another's, and prefixes whose states were kept are found."""
    seen = {"preemptions": 0, "hits": 0, "mixed": 0, "cut": 0, "drafted": 0, "rejected": 0}
    for seed in range(shard, N_STATE_WORLDS, N_STATE_SHARDS):
        speculates = seed % 2 == 0
        try:
            referee = run_speculating(seed, has_states=True) if speculates else Referee(seed, has_states=True)
            if not speculates:
                referee.run()
        except Exception as error:
            raise AssertionError(f"world {seed}: {error!r}") from error
        stats = referee.core.stats()
        usages = [record.usage() for record in referee.book.records.values()]
        seen["preemptions"] += stats.preemptions
        seen["hits"] += stats.prefix_hits_tokens
        seen["mixed"] += referee.n_mixed
        seen["cut"] += len(referee.cut)
        seen["drafted"] += referee.n_drafted
        seen["rejected"] += sum(usage.drafted_tokens - usage.accepted_tokens for usage in usages)
        if seed % 10 == 1:
            assert replay(referee.recorder.lines(), predict_s=toy_seconds) == []
    assert min(seen.values()) > 0, f"these worlds no longer reach every corner: {seen}"


def asked_otherwise(rng: random.Random, wanted: Request) -> Request:
    """Some requests want no drafts or few; some bring their own, right with gaps, or nonsense."""
    if rng.random() < 0.3:
        wanted = replace(wanted, sampling=replace(wanted.sampling, max_draft_tokens=rng.choice((0, 1, 3))))
    if rng.random() < 0.3:
        grammar = StructuredSpec(kind="regex", source="forced here and there")
        wanted = replace(wanted, sampling=replace(wanted.sampling, structured=grammar))
    if rng.random() < 0.3:
        answer = greedy(wanted.prompt_token_ids, wanted.sampling.max_tokens)
        kept = [token_id for token_id in answer if rng.random() < 0.9] + [rng.randrange(VOCAB) for _ in range(5)]
        wanted = replace(wanted, prediction_token_ids=tuple(kept))
    return wanted


def run_speculating(seed: int, *, has_states: bool = False) -> Referee:
    """The same world with a drafter: every rule holds, and nothing it proposes reaches an answer."""
    rng = random.Random(seed)
    depths = DraftPrices(toy_seconds) if rng.random() < 0.8 else EveryGuess(rng.choice((2, 8, 64)))
    settings = {"speculate": rng.choice(("off", "lookup"))}
    drafters = {"knowing": lambda request: KnowingDrafter(rng)}
    referee = Referee(seed, settings, has_states=has_states, depths=depths, drafters=drafters)
    referee.executor = ForcingToy(referee.world.blocks.n_blocks, referee.world.blocks.block_tokens)
    referee.world.arrivals = [(step, asked_otherwise(rng, wanted)) for step, wanted in referee.world.arrivals]
    try:
        referee.run()
    except Exception as error:
        raise AssertionError(f"world {seed}: {error!r}") from error
    return referee


def test_speculation_changes_no_answer_in_random_worlds():
    """Whatever a drafter proposes: the text is the one-by-one answer, blocks balance, budgets hold, nobody starves."""
    check_speculating(range(100))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some ten seconds alone; others may be using the cores
@pytest.mark.parametrize("shard", range(40))
def test_speculation_changes_no_answer_in_ten_thousand_worlds(shard):
    """The same for many more."""
    check_speculating(range(shard, 10_000, 40))


def check_speculating(seeds) -> None:
    seen = {"preemptions": 0, "hits": 0, "mixed": 0, "cut": 0, "drafted": 0, "accepted": 0, "rejected": 0, "faults": 0}
    for seed in seeds:
        referee = run_speculating(seed)
        stats = referee.core.stats()
        usages = [record.usage() for record in referee.book.records.values()]
        accepted = sum(usage.accepted_tokens for usage in usages)
        seen["preemptions"] += stats.preemptions
        seen["hits"] += stats.prefix_hits_tokens
        seen["mixed"] += referee.n_mixed
        seen["cut"] += len(referee.cut)
        seen["drafted"] += referee.n_drafted
        seen["accepted"] += accepted
        seen["faults"] += stats.drafter_faults
        seen["rejected"] += sum(usage.drafted_tokens for usage in usages) - accepted
    assert min(seen.values()) > 0, f"these worlds no longer reach every corner: {seen}"
