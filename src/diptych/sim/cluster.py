"""Engines behind a router, each on a clock of its own, in one order of events.

One heap holds the instant at which each engine with work begins its next step, another what comes from outside: requests,
and keys and values that have travelled. Whatever is due first happens. A step can only cause what comes after its end, so
nothing ever happens in an engine's past. What the router sees of an engine in a step is how the step will leave it.

Steps in which nothing is left to decide (`control.ahead`) are not walked through one by one: their ends are known at
once, and they are committed when the last has ended or when something comes to their engine, as far as they had begun.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush

from diptych.control.router import Place, Price, Route, Router
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, InternalError, RequestError
from diptych.ground.events import ArrivalEvent, FinishEvent, TransferEvent
from diptych.ground.handoff import HandOff
from diptych.ground.request import READ_ONLY, Request
from diptych.ground.shape import StepShape
from diptych.metrics import RequestRecord, StepRecord
from diptych.sim.drafts import Drafts
from diptych.sim.link import Link, Ports
from diptych.sim.load import Due, Load
from diptych.sim.member import Member
from diptych.sim.outlook import Outlook
from diptych.sim.price import PredictedPrice
from diptych.sim.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`n_engines` alike. decodes False: they read prompts and hand them over.

    predict_run_s: of so many steps that decode, each one position further; the same numbers as predict_s has (None: asked).
    wake_s: what the first step behind a time without work takes longer.
    """

    n_engines: int
    config: SchedulerConfig
    blocks: BlockConfig
    predict_s: Callable[[StepShape], float]
    predict_run_s: Callable[[StepShape, int], list[float]] | None = None
    wake_s: float = 0.0
    decodes: bool = True
    drafts: Drafts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What joins groups. kv_bytes: of the first so many tokens of a prompt. state_bytes: of a sequence, behind them.

    local_prefill_us: see `control.router`.
    """

    link: Link
    kv_bytes: Callable[[int], float]
    local_prefill_us: int = 0
    state_bytes: float = 0.0


@dataclass(slots=True)
class _Journey:
    """A prompt read on one engine and answered on another. sent, end: leading tokens that went over, and that are to."""

    request: Request
    route: Route
    asked_s: float = 0.0
    sent_tokens: int = 0
    end_tokens: int = 0
    arrives_s: float = 0.0
    read_s: float | None = None  # when its last chunk was computed
    room: tuple[int, ...] | None = None  # where it is answered, when there was none for it last

    @property
    def reading_id(self) -> str:
        """Of the request to the engine that reads."""
        return f"read {self.request.request_id}"


class Cluster:
    """Groups of engines. tally: what is told about every step and request; `refused` counts by the error's name.

    wire: where some group only reads prompts. leaps: False walks through every step, for executors that are not predicted.
    request_s: from a client's sending to the router, of every request; it counts from when it was sent.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        tally: Tally,
        router: str = "least-delay",
        wire: Wire | None = None,
        seed: int = 0,
        leaps: bool = True,
        request_s: float = 0.0,
    ) -> None:
        records: dict[str, RequestRecord] = {}
        self.members: list[Member] = []
        places: list[Place] = []
        for number, group in enumerate(groups):
            price: Price = PredictedPrice(group.predict_s)
            work = tally.work_of(number)
            for _ in range(group.n_engines):
                i = len(self.members)
                member = Member(
                    group.config,
                    group.blocks,
                    predict_s=group.predict_s,
                    predict_run_s=group.predict_run_s,
                    wake_s=group.wake_s,
                    seed=seed + i,
                    work=work,
                    drafts=group.drafts,
                )
                member.engine.book.records = records
                member.leaps = leaps
                member.on_finish = self._finished
                if not group.decodes:
                    member.on_prefill = self._on_prefill
                self.members.append(member)
                places.append(Place(cache=member.engine.core, price=price, decodes=group.decodes))
        self.tally = tally
        self.refused: Counter[str] = Counter()
        self.n_over = 0
        self._records = records
        self._wire = wire
        self._request_s = request_s
        self._ports = None if wire is None else Ports(wire.link)
        self._router = Router(places, policy=router, local_prefill_us=0 if wire is None else wire.local_prefill_us)
        self._looks = len(places) > 1 and router != "round-robin"
        for member in self.members:
            if self._looks and member.on_prefill is None:
                member.on_begin = self._began
        self._open: dict[str, Request] = {}
        self._journeys: dict[str, _Journey] = {}  # by reading_id
        self._unplaced: dict[int, deque[_Journey]] = defaultdict(deque)  # by engine that has no room for them yet
        self._coming: list[tuple[float, int, Request | Callable[[float], None]]] = []
        self._n_coming = 0
        self._steps: list[tuple[float, int, int]] = []  # when, whose, and its number where that changed meanwhile
        self._load: Load | None = None
        self._n_left = 0  # requests to come
        self._outlook: Outlook | None = None

    def run(
        self,
        load: Load,
        *,
        progress: Callable[[int, float], object] | None = None,
        good_share: float = 0.0,
        is_won_enough: bool = False,
    ) -> None:
        """Serve the whole load. progress(requests that are over, seconds simulated) is called now and then.

        good_share: given up as soon as it is certain that less than this share of the load's requests will be good;
        is_won_enough: or that as many will be.
        """
        self._load, self._n_left = load, load.n_requests
        outlook = None
        if good_share:
            outlook = self._outlook = Outlook(self.tally, n_requests=load.n_requests, good_share=good_share)
        decoders = [member.engine.core for member in self.members if member.on_prefill is None]
        for number, token_ids in enumerate(load.histories()):
            decoders[number % len(decoders)].warm(token_ids)
        starting = load.start()
        coming, steps = self._coming, self._steps
        self._expect(next(starting, None))
        n_last = self._n_coming  # the number of the newest request that came by itself
        n_told = 0
        while coming or steps:
            if coming and (not steps or coming[0][0] <= steps[0][0]):
                at_s, number, thing = heappop(coming)
                if number == n_last:
                    self._expect(next(starting, None))
                    n_last = self._n_coming
                if isinstance(thing, Request):
                    self._dispatch(thing, at_s)
                else:
                    thing(at_s)
            else:
                at_s, i, version = heappop(steps)
                if version == self.members[i].version:
                    self._step(i)
            if progress is not None and self.n_over >= n_told:
                progress(self.n_over, at_s)
                n_told = self.n_over + 64
            if outlook is not None:
                outlook.passed(at_s)
                if outlook.is_lost or (is_won_enough and outlook.is_won):
                    return
        if self._journeys:
            raise InternalError(f"{len(self._journeys)} prompts were read and never answered")

    def _step(self, i: int) -> None:
        member = self.members[i]
        next_s = member.step()
        if next_s is not None:
            heappush(self._steps, (next_s, i, member.version))
        if self._unplaced and self._unplaced[i]:
            self._later(member.engine.clock.now_s(), partial(self._place, i))

    def _wake(self, i: int, at_s: float) -> None:
        """Something comes to this engine: what it does next is to be planned anew."""
        member = self.members[i]
        if member.settle(at_s) or not member.is_busy:
            member.version += 1
            member.is_busy = True
            member.engine.clock.advance(max(0.0, at_s - member.engine.clock.now_s()))
            heappush(self._steps, (member.engine.clock.now_s(), i, member.version))

    def _began(self, request_id: str) -> None:
        """A choice has its first token; the request is not open where all its choices ended with it."""
        if request_id in self._open:
            self._router.began(request_id)

    def _finished(self, event: FinishEvent) -> None:
        """A choice ended; where it was the last of its request, the next one may follow."""
        record = self._records.get(event.request_id)
        if record is None or not record.is_over:  # None: another choice that ended in the same step was looked at first
            return
        del self._records[event.request_id]
        self.tally.finished(record)
        if self._outlook is not None:
            self._outlook.over(record.request_id)
        self._router.forget(event.request_id, output_tokens=record.output_tokens)
        self._follow(self._open.pop(event.request_id), event.at_s, record.output_tokens)

    def _dispatch(self, request: Request, at_s: float) -> None:
        if not self._n_left:  # users who are thinking when all have come
            return
        self.tally.arrived(request.arrival_s)
        self._n_left -= 1
        if not self._n_left:
            self.tally.close(at_s)
        if self._looks:
            for i, member in enumerate(self.members):
                if member.run_evicts and member.settle(at_s):
                    self._again(i)
        route = self._router.choose(request)
        member = self.members[route.decode]
        if member.settle(at_s):
            self._again(route.decode)
        try:
            if route.prefill == route.decode:
                member.engine.stepper.submit(request)
            else:
                member.engine.core.check_prompt(request)
        except (RequestError, CapacityError) as error:
            if self.tally.counts(request.arrival_s):
                self.refused[type(error).__name__] += 1
            self._router.forget(request.request_id)
            self._follow(request, at_s, 0)
            return
        self._open[request.request_id] = request
        if route.prefill == route.decode:
            self._look_out_for(request)
            self._wake(route.decode, at_s)
            return
        arrival = ArrivalEvent(
            request_id=request.request_id,
            at_s=request.arrival_s,
            prompt_tokens=len(request.prompt_token_ids),
            n=request.sampling.n,
        )
        member.engine.book.fold([arrival])
        self._look_out_for(request)
        self._unplaced[route.decode].append(_Journey(request, route))
        self._place(route.decode, at_s)

    def _look_out_for(self, request: Request) -> None:
        if self._outlook is not None and self.tally.counts(request.arrival_s):
            self._outlook.came(self._records[request.request_id], request.sampling.max_tokens)

    def _again(self, i: int) -> None:
        """Its run of steps was cut short: it goes on from where it was cut."""
        member = self.members[i]
        member.version += 1
        heappush(self._steps, (member.engine.clock.now_s(), i, member.version))

    def _follow(self, request: Request, at_s: float, output_tokens: int) -> None:
        assert self._load is not None
        self.n_over += 1
        self._expect(self._load.after(request, at_s, output_tokens=output_tokens))

    def _expect(self, due: Due | None) -> None:
        if due is not None and self._n_left:
            at_s, request = due
            self._later(at_s + self._request_s, request)

    def _later(self, at_s: float, thing: Request | Callable[[float], None]) -> None:
        self._n_coming += 1
        heappush(self._coming, (at_s, self._n_coming, thing))

    # From the engine that reads to the one that answers, as `cluster.worker` does it

    def _place(self, i: int, at_s: float) -> None:
        """Hold blocks on an engine for the prompts that are to come to it, in order, as long as there are some."""
        waiting, member = self._unplaced[i], self.members[i]
        if waiting and member.settle(at_s):
            self._again(i)
        core = member.engine.core
        while waiting:
            journey = waiting[0]
            if journey.room == core.room:
                return
            cached_tokens = core.reserve(HandOff.of(journey.request))
            if cached_tokens is None:
                journey.room = core.room
                return
            waiting.popleft()
            self._ask(journey, cached_tokens, at_s)

    def _ask(self, journey: _Journey, cached_tokens: int, at_s: float) -> None:
        """Have whole blocks read elsewhere: the rest of the prompt, at least its last token, is read where it is answered."""
        request, route, journey.asked_s = journey.request, journey.route, at_s
        block_tokens = self.members[route.decode].engine.core.pool.block_tokens
        journey.end_tokens = (len(request.prompt_token_ids) - 1) // block_tokens * block_tokens
        journey.sent_tokens = cached_tokens
        if cached_tokens == journey.end_tokens:
            self._settle(journey, at_s)
            return
        reading = replace(
            request,
            request_id=journey.reading_id,
            prompt_token_ids=request.prompt_token_ids[: journey.end_tokens + 1],
            sampling=READ_ONLY,
            arrival_s=at_s,
        )
        reader = self.members[route.prefill]
        if reader.settle(at_s):
            self._again(route.prefill)
        try:
            reader.engine.book.fold(reader.engine.core.submit_prefill(reading))
        except (RequestError, CapacityError):
            self._settle(journey, at_s)  # nothing comes
            return
        self._journeys[journey.reading_id] = journey
        self._wake(route.prefill, at_s)

    def _on_prefill(self, step: StepRecord) -> None:
        """A step of a group that only reads ended: what it computed may travel from then on."""
        for reading_id, *_ in step.prefills:
            tokens = self._records[reading_id].chunks[-1].end
            self._later(step.end_s, partial(self._computed, self._journeys[reading_id], tokens))

    def _computed(self, journey: _Journey, tokens: int, at_s: float) -> None:
        """So many leading tokens have their keys and values: the blocks that are full go on their way."""
        assert self._wire is not None
        assert self._ports is not None
        route = journey.route
        block_tokens = self.members[route.decode].engine.core.pool.block_tokens
        ready_tokens = min(tokens // block_tokens * block_tokens, journey.end_tokens)
        if ready_tokens > journey.sent_tokens:
            n_bytes = self._wire.kv_bytes(ready_tokens) - self._wire.kv_bytes(journey.sent_tokens)
            if ready_tokens == journey.end_tokens:
                n_bytes += self._wire.state_bytes
            journey.arrives_s = self._ports.send(route.prefill, route.decode, n_bytes, at_s)
            journey.sent_tokens = ready_tokens
            self.tally.sent(n_bytes)
        if tokens > journey.end_tokens:
            journey.read_s = at_s
            self._later(max(at_s, journey.arrives_s), partial(self._arrived, journey))

    def _arrived(self, journey: _Journey, at_s: float) -> None:
        """The last piece is there: one engine lets its blocks go, the other reads what is left, and answers."""
        route = journey.route
        del self._journeys[journey.reading_id]
        reader = self.members[route.prefill].engine.core
        _, place = reader.places_of(journey.reading_id, journey.end_tokens)
        reader.sent(journey.reading_id)
        self._wake(route.prefill, at_s)
        self._settle(journey, at_s, has_state=place is not None)
        assert journey.read_s is not None
        self.tally.handed_off(wait_s=at_s - journey.read_s)

    def _settle(self, journey: _Journey, at_s: float, *, has_state: bool = False) -> None:
        request_id, i = journey.request.request_id, journey.route.decode
        self._router.handed_off(request_id)
        member, reading = self.members[i], self._records.pop(journey.reading_id, None)
        if member.settle(at_s):
            self._again(i)
        (event,) = member.engine.core.settle(request_id, journey.sent_tokens, at_s, has_state=has_state)
        assert isinstance(event, TransferEvent)
        if reading is not None and journey.read_s is not None and reading.first_scheduled_s is not None:
            begin_s = reading.first_scheduled_s
            event = replace(
                event, begin_s=journey.asked_s, queue_s=begin_s - journey.asked_s, read_s=journey.read_s - begin_s
            )
        member.engine.book.fold([event])
        self._wake(i, at_s)
