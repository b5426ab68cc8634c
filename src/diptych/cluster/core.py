"""The door before the workers, in `EngineCore`'s place: an `Engine` over it serves a whole cluster and does not know.

Requests go to workers as messages, and their events come back in batches of whole steps, which `begin_step` hands over; a
plan of its own there is never. What makes a request move is all here (`cluster.open_request`). When a worker dies, each of
its requests goes on elsewhere from there; positions and noise are the same, so no token comes twice and none is missing.
One that was lost with MAX_MOVES workers, or finds none in PARK_S, ends with an error.

Salts hold across workers: they are part of the digests by which workers name blocks.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from diptych.cluster.link import Link
from diptych.cluster.messages import Batch, Cancel, Facts, Finish, ForgetPrefixes, Heard, Lost, Submit
from diptych.cluster.open_request import OpenRequest
from diptych.control.entry import check_prompt
from diptych.control.router import Place, Price, Router, TokenPrice
from diptych.control.seen import SeenPrefixes
from diptych.control.stats import CoreStats, WorkerCounts, WorkerStats
from diptych.ground.bounds import counted
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, ConfigError, EngineError, ExecutorError, RequestError
from diptych.ground.events import (
    ArrivalEvent,
    Event,
    FinishEvent,
    StepBeginEvent,
    StepEndEvent,
    TokenEvent,
    TransferEvent,
)
from diptych.ground.phase import FinishReason
from diptych.ground.request import CacheScope, Request
from diptych.ground.step import StepPlan, StepResult

logger = logging.getLogger("diptych.cluster")

MAX_MOVES = 3  # a request that takes its worker down with it must not take them all
PARK_S = 45.0  # a worker that died should be back by then


@dataclass(slots=True)
class WorkerState:
    """One worker as the door knows it."""

    name: str
    decodes: bool
    link: Link
    facts: Facts
    seen: SeenPrefixes
    is_up: bool = True
    is_draining: bool = False
    is_gone: bool = False  # drained, and ended
    n_lost: int = 0  # lost or sent away: what it said before does not count after it
    n_deaths: int = 0
    clock_ahead_s: float = 0.0  # of ours, where it runs on another machine
    counts: WorkerCounts | None = None


class ClusterCore:
    """See the module. Not thread-safe but for `deliver`: one thread owns it, as it owns the engine over it."""

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        seed: int = 0,
        router: str = "least-delay",
        local_prefill_tokens: int = 64,
        pump: Callable[[], object] = lambda: None,
    ) -> None:
        """local_prefill_tokens: a prompt is read where it is answered if no more of it are left to read. pump: called in every
        step, to have workers that run in this thread do something.
        """
        self._now_s = now_s
        self._seed = seed
        self._policy = router
        self._local_prefill_tokens = local_prefill_tokens
        self._pump = pump
        self._routes: Router | None = None  # until a worker is attached
        self.workers: list[WorkerState] = []
        self._number: dict[str, int] = {}
        self._open: dict[str, OpenRequest] = {}
        # (worker, request) that ended here first, and how many Cancels it has not taken: what it says until then is of the old
        # request, and its client may have sent another under the same name
        self._unheard: Counter[tuple[int, str]] = Counter()
        self._parked: deque[str] = deque()
        self._batches: deque[tuple[str, int, Batch]] = deque()
        self._made: list[Event] = []  # by the door itself
        self._asked: deque[Callable[[], object]] = deque()
        self._n_requests = 0
        self.moved: Counter[str] = Counter()  # requests that went on elsewhere, by where they were

    # Workers come and go

    def attach(
        self,
        link: Link,
        facts: Facts,
        *,
        decodes: bool = True,
        clock_ahead_s: float = 0.0,
        price: Price | None = None,
    ) -> None:
        """A worker is ready; one of the same name takes the place of the one that was lost.

        price: what its work is worth (None: tokens), for all workers or for none, as they are added up.
        Raises ConfigError where it cannot stand beside the others.
        """
        first = self.workers[0].facts if self.workers else facts
        if facts.blocks.block_tokens != first.blocks.block_tokens:
            raise ConfigError(
                f"worker {facts.name} has blocks of {facts.blocks.block_tokens} tokens; "
                f"the others have {first.blocks.block_tokens}"
            )
        number = self._number.get(facts.name)
        if number is not None:
            state = self.workers[number]
            state.link, state.facts, state.is_up, state.clock_ahead_s = link, facts, True, clock_ahead_s
            if state.is_gone:
                state.is_gone = state.is_draining = False
            state.seen.clear()
            if not state.is_draining:
                self._router.open(number)
        else:
            seen = SeenPrefixes(
                model_revision=first.model_revision,  # a name for prompts here, and the same for all
                block_tokens=facts.blocks.block_tokens,
                n_blocks=facts.blocks.n_blocks if facts.scheduler.enable_prefix_cache else 0,
            )
            price = price or TokenPrice()
            place = Place(cache=seen, price=price, decodes=decodes)
            if self._routes is None:
                if not decodes:
                    raise ConfigError("the first worker that is attached must decode")
                local_us = price.prefill_us(self._local_prefill_tokens, 0)
                self._routes = Router([place], policy=self._policy, local_prefill_us=local_us)
            else:
                self._routes.add(place)
            self._number[facts.name] = len(self.workers)
            self.workers.append(
                WorkerState(
                    name=facts.name, decodes=decodes, link=link, facts=facts, seen=seen, clock_ahead_s=clock_ahead_s
                )
            )
        logger.info("worker ready name=%s node=%s pid=%d", facts.name, facts.node, facts.pid)
        self._place_parked()

    def lost(self, name: str, why: str) -> None:
        """A worker died: everything that was there goes on elsewhere."""
        number = self._number[name]
        worker = self.workers[number]
        if not worker.is_up:
            return
        logger.warning("worker lost name=%s why=%s", name, why)
        worker.is_up = False
        worker.n_lost += 1
        worker.n_deaths += 1
        worker.counts = None
        worker.seen.clear()
        self._router.close(number)
        self._tell_lost(number)
        for request_id, one in list(self._open.items()):
            if one.reader == number:
                one.reader = None
                self.moved["reading"] += 1
            if one.decoder == number:
                self._move(request_id, one)

    def _tell_lost(self, number: int) -> None:
        for key in [key for key in self._unheard if key[0] == number]:
            del self._unheard[key]
        for other in self.workers:
            if other.is_up:
                other.link.send(Lost(name=self.workers[number].name))

    def drain(self, name: str) -> None:
        """Send a worker nothing new; what it has goes on."""
        number = self._number[name]
        self.workers[number].is_draining = True
        self._router.close(number)

    def keep(self, name: str) -> None:
        """A worker that is drained is not to go after all."""
        number = self._number[name]
        self.workers[number].is_draining = False
        if self.workers[number].is_up:
            self._router.open(number)
            self._place_parked()

    def n_open_at(self, name: str) -> int:
        """Requests that a worker has a part in. Any thread may ask."""
        number = self._number[name]
        return sum(1 for one in list(self._open.values()) if number in (one.decoder, one.reader))

    def work_s(self, *, decodes: bool) -> float:
        """Predicted seconds of open work in a pool, where workers have a price in time. Any thread may ask."""
        return 0.0 if self._routes is None else self._routes.open_work_us(decodes=decodes) / 1e6

    def detach(self, name: str) -> None:
        """A worker that is drained has ended."""
        number = self._number[name]
        worker = self.workers[number]
        worker.is_up, worker.is_gone, worker.counts = False, True, None
        worker.n_lost += 1  # what it may still have said does not count
        worker.seen.clear()
        self._tell_lost(number)
        logger.info("worker ended name=%s", name)

    def deliver(self, name: str, batch: Batch) -> None:
        """Take in what a worker said; any thread may. What one said before it was lost does not count after it."""
        self._batches.append((name, self.workers[self._number[name]].n_lost, batch))

    def ask(self, action: Callable[[], object]) -> None:
        """Have something done in the next step; any thread may."""
        self._asked.append(action)

    # What an engine asks of its core

    @property
    def has_work(self) -> bool:
        """Whether a step would hand over events."""
        return bool(self._batches) or bool(self._made) or bool(self._asked)

    @property
    def due_s(self) -> float | None:
        """When a request is given up that waits for a worker; None where none does."""
        return self._open[self._parked[0]].parked_s + PARK_S if self._parked else None

    @property
    def config(self) -> SchedulerConfig:
        """Of the workers, which are configured alike."""
        return self.workers[0].facts.scheduler

    @property
    def _present(self) -> list[WorkerState]:
        """All but those that were sent away; one that is lost will be back."""
        return [one for one in self.workers if not one.is_gone]

    @property
    def block_config(self) -> BlockConfig:
        """All blocks of all workers."""
        facts = [one.facts for one in self._present]
        return BlockConfig(
            n_blocks=sum(one.blocks.n_blocks for one in facts), block_tokens=facts[0].blocks.block_tokens
        )

    @property
    def context_limit_tokens(self) -> int:
        """What every worker can take."""
        return min(one.facts.context_limit_tokens for one in self._present)

    @property
    def max_running_sequences(self) -> int:
        """Over all workers that answer."""
        return sum(one.facts.max_running_sequences for one in self._present if one.decodes)

    def submit(self, request: Request) -> list[Event]:
        """Send a request to a worker. Raises as `EngineCore.submit` does."""
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is already open", param="request_id")
        first = self.workers[0].facts
        check_prompt(
            request,
            max_context_tokens=self.context_limit_tokens,
            n_blocks=min(one.facts.blocks.n_blocks for one in self._present),
            block_tokens=first.blocks.block_tokens,
            max_step_tokens=first.scheduler.max_step_tokens,
        )
        waiting = sum(one.counts.core.waiting_tokens for one in self.workers if one.counts is not None)
        limit = first.scheduler.max_waiting_tokens * max(1, sum(one.decodes for one in self.workers))
        if waiting > limit:
            raise CapacityError(
                f"{waiting} tokens are waiting; at most {limit} may wait",
                hint="try again later, or raise max_waiting_tokens",
            )
        self._open[request.request_id] = OpenRequest.of(request, self._with_seed(request))
        self._n_requests += 1
        self._place(request.request_id)
        return [
            ArrivalEvent(
                request_id=request.request_id,
                at_s=request.arrival_s,
                prompt_tokens=len(request.prompt_token_ids),
                n=request.sampling.n,
            )
        ]

    def cancel(
        self,
        request_id: str,
        now_s: float,
        *,
        reason: FinishReason = FinishReason.ABORT,
        error: EngineError | None = None,
    ) -> list[Event]:
        """End every open choice of a request. Its worker is told, and whatever it still says of it does not count."""
        one = self._open.get(request_id)
        if one is None:
            return []
        if one.decoder is not None:
            self._dismiss(one.decoder, request_id)
        return self._end(request_id, one, now_s, reason, error)

    def finish(
        self, request_id: str, index: int, now_s: float, *, reason: FinishReason, output_tokens: int | None = None
    ) -> list[Event]:
        """End one choice from outside (a stop string was seen)."""
        one = self._open.get(request_id)
        if one is None or one.is_ended[index]:
            return []
        if output_tokens is not None:
            del one.token_ids[index][output_tokens:]
        n_tokens = len(one.token_ids[index])
        if one.decoder is not None:
            self.workers[one.decoder].link.send(Finish(request_id=request_id, index=index, output_tokens=n_tokens))
        one.is_ended[index] = True
        if one.is_over and one.decoder is not None:
            self._dismiss(one.decoder, request_id)
        self._forget_if_over(request_id, one)
        return [FinishEvent(request_id=request_id, index=index, at_s=now_s, reason=reason, output_tokens=n_tokens)]

    def begin_step(self, now_s: float) -> tuple[StepPlan | None, list[Event]]:
        """What workers said since the last call; there is never a plan."""
        self._pump()
        while self._asked:
            self._asked.popleft()()
        events, self._made = self._made, []
        while self._batches:
            name, n_lost, batch = self._batches.popleft()
            worker = self.workers[self._number[name]]
            if worker.is_up and worker.n_lost == n_lost:
                worker.counts = batch.counts
                self._take(self._number[name], worker, batch.events, events)
        while self.due_s is not None and self.due_s <= now_s:
            request_id = self._parked.popleft()
            error = ExecutorError(f"no worker took the request within {PARK_S:g} s", hint="see the server's log")
            events += self._end(request_id, self._open[request_id], now_s, FinishReason.ERROR, error)
        return None, events

    def end_step(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """There are no plans."""
        raise AssertionError("a cluster's core plans no steps")

    def abort_step(self, now_s: float, *, error: EngineError) -> list[Event]:
        """There is no step that could be cut short."""
        return []

    def stats(self) -> CoreStats:
        """Sums over the workers, as of their last batches."""
        # on any thread: a worker that is lost meanwhile has none
        cores = [counts.core for one in self.workers if (counts := one.counts) is not None]
        names = CoreStats.__dataclass_fields__
        sums = CoreStats(**{name: sum(getattr(core, name) for core in cores) for name in names})
        return replace(sums, waiting=sums.waiting + len(self._parked))

    def worker_stats(self) -> tuple[WorkerStats, ...]:
        """Of every worker, as of its last batch."""
        has_readers = any(not one.decodes for one in self._present)
        parts = [(one.decoder, one.reader) for one in list(self._open.values())]
        return tuple(
            WorkerStats(
                name=one.name,
                pool=("decode" if has_readers else "both") if one.decodes else "prefill",
                node=one.facts.node,
                pid=one.facts.pid,
                is_up=one.is_up,
                is_draining=one.is_draining,
                deaths=one.n_deaths,
                open=sum(number in part for part in parts),
                counts=one.counts,
            )
            for number, one in enumerate(self.workers)
            if not one.is_gone
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, everywhere."""
        for worker in self.workers:
            worker.seen.clear()
            if worker.is_up:
                worker.link.send(ForgetPrefixes())

    def prefix_match(
        self, token_ids: tuple[int, ...], salt: CacheScope = None, *, digests: list[bytes] | None = None
    ) -> int:
        """Leading tokens that are likely to be cached at the worker that has most of them."""
        return max(one.seen.prefix_match(token_ids, salt) for one in self.workers if one.decodes)

    # Inside

    @property
    def _router(self) -> Router:
        assert self._routes is not None, "a worker is attached"
        return self._routes

    def _with_seed(self, request: Request) -> Request:
        """Workers draw no seeds: a request that moves has to have the one it began with."""
        if request.sampling.seed is not None:
            return request
        source = f"cluster {self._seed} {self._n_requests}"
        seed = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "little")
        return replace(request, sampling=replace(request.sampling, seed=seed))

    def _place_parked(self) -> None:
        for _ in range(len(self._parked)):
            self._place(self._parked.popleft())

    def _place(self, request_id: str) -> None:
        """Send a request to the workers that the router names; park it while there is none."""
        one = self._open.get(request_id)
        if one is None:
            return
        if self._routes is None or not self._router.can_answer:
            one.parked_s = self._now_s()
            self._parked.append(request_id)
            return
        hand_off = one.hand_off()
        # a state is drawn of the prompt itself, all of it
        is_read_here = one.request.only_reads or one.request.sampling.prompt_logprobs is not None
        may_part = hand_off.shares_prompt and not is_read_here
        known = hand_off.known_token_ids
        route = self._router.choose(replace(one.sent, prompt_token_ids=known), may_part=may_part)
        is_apart = route.prefill != route.decode
        one.decoder, one.reader = route.decode, route.prefill if is_apart else None
        one.has_begun = False
        for number in set(route):
            self.workers[number].seen.add(known, one.request.cache_salt)
        reader = self.workers[route.prefill].name if is_apart else None
        self.workers[route.decode].link.send(Submit(hand_off=hand_off, reader=reader))

    def _move(self, request_id: str, one: OpenRequest) -> None:
        """Its worker is gone: go on elsewhere, unless it was there when too many went."""
        state = "transferring" if one.reader is not None else "decoding" if any(one.token_ids) else "queued"
        self.moved[state] += 1
        self._router.forget(request_id)
        one.decoder = one.reader = None
        one.n_moves += 1
        if one.n_moves > MAX_MOVES:
            error = ExecutorError(
                f"{counted(one.n_moves, 'worker')} died with this request", hint="see the server's log"
            )
            self._made += self._end(request_id, one, self._now_s(), FinishReason.ERROR, error)
            return
        self._place(request_id)

    def _dismiss(self, number: int, request_id: str) -> None:
        """A worker is to forget a request, of which it may have said more by now."""
        self._unheard[number, request_id] += 1
        self.workers[number].link.send(Cancel(request_id=request_id))

    def _heard(self, number: int, request_id: str) -> None:
        self._unheard[number, request_id] -= 1
        if not self._unheard[number, request_id]:
            del self._unheard[number, request_id]

    def _take(self, number: int, worker: WorkerState, said: list[Event | Heard], events: list[Event]) -> None:
        ahead_s = worker.clock_ahead_s
        for event in said:
            if isinstance(event, Heard):
                self._heard(number, event.request_id)
                continue
            if ahead_s:
                event = _earlier(event, ahead_s)
            if isinstance(event, StepBeginEvent | StepEndEvent):
                events.append(event)
                continue
            one = self._open.get(event.request_id)
            if one is None or one.decoder != number or isinstance(event, ArrivalEvent):
                continue
            if self._unheard and (number, event.request_id) in self._unheard:
                continue
            if one.note(event):
                self._tell_router(one, event)
                events.append(event)
                if isinstance(event, FinishEvent):
                    self._forget_if_over(event.request_id, one)

    def _tell_router(self, one: OpenRequest, event: Event) -> None:
        """When a prompt is read, where that was another worker's part, and when nobody waits for the answer any more."""
        if isinstance(event, TokenEvent) and not one.has_begun:
            one.has_begun = True
            self._router.began(event.request_id)
        elif isinstance(event, TransferEvent) and one.reader is not None:
            one.reader = None
            self._router.handed_off(event.request_id)

    def _end(
        self, request_id: str, one: OpenRequest, now_s: float, reason: FinishReason, error: EngineError | None
    ) -> list[Event]:
        events = one.end(now_s, reason, error)
        self._forget_if_over(request_id, one)
        return events

    def _forget_if_over(self, request_id: str, one: OpenRequest) -> None:
        if not one.is_over or self._open.pop(request_id, None) is None:
            return
        if one.decoder is None:
            if request_id in self._parked:
                self._parked.remove(request_id)
            return
        self._router.forget(request_id, output_tokens=one.longest)
        known = one.request.prompt_token_ids + tuple(one.token_ids[0])
        self.workers[one.decoder].seen.add(known, one.request.cache_salt)


def _earlier(event: Event, by_s: float) -> Event:
    """On a clock that is so much behind."""
    at_s = event.at_s - by_s
    if isinstance(event, tuple):
        return event._replace(at_s=at_s)
    if isinstance(event, TransferEvent) and event.begin_s is not None:
        return replace(event, at_s=at_s, begin_s=event.begin_s - by_s)
    return replace(event, at_s=at_s)
