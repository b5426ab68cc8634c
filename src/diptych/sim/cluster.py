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
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from diptych.control.router import Place, Price, Route, Router
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.errors import CapacityError, InternalError, RequestError
from diptych.ground.events import FinishEvent
from diptych.ground.handoff import HandOff
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.metrics import RequestRecord, StepRecord
from diptych.sim.drafts import StatedDrafts
from diptych.sim.executor import DRAWN_TOKEN
from diptych.sim.link import Link, Ports
from diptych.sim.load import Due, Load
from diptych.sim.member import Member
from diptych.sim.price import PredictedPrice
from diptych.sim.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`n_engines` alike. decodes False: they read prompts and hand them over.

    predict_run_s: of so many steps that decode, each one position further; the same numbers as predict_s has (None: asked).
    """

    n_engines: int
    config: SchedulerConfig
    blocks: BlockConfig
    predict_s: Callable[[StepShape], float]
    predict_run_s: Callable[[StepShape, int], list[float]] | None = None
    decodes: bool = True
    drafts: StatedDrafts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What joins groups. kv_bytes: of the first so many tokens of a prompt. local_prefill_us: see `control.router`."""

    link: Link
    kv_bytes: Callable[[int], float]
    local_prefill_us: int = 0


@dataclass(slots=True)
class _Journey:
    """A prompt that is read on one engine and answered on another. ready, sent: leading tokens."""

    request: Request
    route: Route
    ready_tokens: int = 0
    sent_tokens: int | None = None  # None: no blocks are held for it yet
    arrives_s: float = 0.0
    read_s: float | None = None  # when its last chunk was computed


class Cluster:
    """Groups of engines. tally: what is told about every step and request; `refused` counts by the error's name.

    wire: where some group only reads prompts. leaps: False walks through every step, for executors that are not predicted.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        tally: Tally,
        router: str = "least-work",
        wire: Wire | None = None,
        seed: int = 0,
        leaps: bool = True,
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
        self._ports = None if wire is None else Ports(wire.link)
        self._router = Router(places, policy=router, local_prefill_us=0 if wire is None else wire.local_prefill_us)
        self._looks = len(places) > 1 and router != "round-robin"
        self._open: dict[str, Request] = {}
        self._journeys: dict[str, _Journey] = {}
        self._unplaced: dict[int, deque[_Journey]] = defaultdict(deque)  # by engine that has no room for them yet
        self._coming: list[tuple[float, int, Request | Callable[[float], None]]] = []
        self._n_coming = 0
        self._steps: list[tuple[float, int, int]] = []  # when, whose, and its number where that changed meanwhile
        self._load: Load | None = None
        self._n_left = 0  # requests to come

    def run(self, load: Load, *, progress: Callable[[int, float], object] | None = None) -> None:
        """Serve the whole load. progress(requests that are over, seconds simulated) is called now and then."""
        self._load, self._n_left = load, load.n_requests
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
        if self._journeys:
            raise InternalError(f"{len(self._journeys)} prompts were read and never answered")

    def _step(self, i: int) -> None:
        member = self.members[i]
        n_drops = member.engine.core.pool.n_drops
        next_s = member.step()
        if next_s is not None:
            heappush(self._steps, (next_s, i, member.version))
        if self._unplaced and self._unplaced[i] and member.engine.core.pool.n_drops != n_drops:
            self._later(member.engine.clock.now_s(), partial(self._place, i))

    def _wake(self, i: int, at_s: float) -> None:
        """Something comes to this engine: what it does next is to be planned anew."""
        member = self.members[i]
        if member.settle(at_s) or not member.is_busy:
            member.version += 1
            member.is_busy = True
            member.engine.clock.advance(max(0.0, at_s - member.engine.clock.now_s()))
            heappush(self._steps, (member.engine.clock.now_s(), i, member.version))

    def _finished(self, event: FinishEvent) -> None:
        """A choice ended; where it was the last of its request, the next one may follow."""
        if not self._records[event.request_id].is_over:
            return
        record = self._records.pop(event.request_id)
        self.tally.finished(record)
        journey = self._journeys.pop(event.request_id, None)
        if journey is not None and journey.sent_tokens is not None:  # its first token was its last
            self._later(event.at_s, partial(self._let_go, journey.route.decode, event.request_id))
        self._router.forget(event.request_id, output_tokens=record.output_tokens)
        self._follow(self._open.pop(event.request_id), event.at_s, record.output_tokens)

    def _dispatch(self, request: Request, at_s: float) -> None:
        self.tally.arrived(at_s)
        self._n_left -= 1
        if not self._n_left:
            self.tally.close(at_s)
        if self._looks:
            for i, member in enumerate(self.members):
                if member.run_evicts and member.settle(at_s):
                    self._again(i)
        route = self._router.choose(request)
        member = self.members[route.prefill]
        if member.settle(at_s):
            self._again(route.prefill)
        try:
            if route.prefill == route.decode:
                member.engine.stepper.submit(request)
            else:
                self.members[route.decode].engine.core.check_prompt(request)
                member.engine.book.fold(member.engine.core.submit_prefill(request))
                self._journeys[request.request_id] = _Journey(request, route)
        except (RequestError, CapacityError) as error:
            self.refused[type(error).__name__] += 1
            self._router.forget(request.request_id)
            self._follow(request, at_s, 0)
            return
        self._open[request.request_id] = request
        self._wake(route.prefill, at_s)

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
        if due is not None:
            self._later(*due)

    def _later(self, at_s: float, thing: Request | Callable[[float], None]) -> None:
        self._n_coming += 1
        heappush(self._coming, (at_s, self._n_coming, thing))

    # From the engine that reads to the one that answers

    def _on_prefill(self, step: StepRecord) -> None:
        """A step of a group that only reads ended: what it computed may travel from then on."""
        for request_id, *_ in step.prefills:
            tokens = self._records[request_id].chunks[-1].end
            self._later(step.end_s, partial(self._computed, self._journeys[request_id], tokens))

    def _computed(self, journey: _Journey, tokens: int, at_s: float) -> None:
        """So many leading tokens have their keys and values, and more of them can be sent."""
        request, route = journey.request, journey.route
        if request.request_id not in self._journeys:
            return  # its first token was its last
        journey.ready_tokens = max(journey.ready_tokens, tokens)
        if tokens == len(request.prompt_token_ids):
            journey.read_s = at_s
            self._router.handed_off(request.request_id)
        if journey.sent_tokens is not None:
            self._send(journey, at_s)
        elif journey not in self._unplaced[route.decode]:
            self._unplaced[route.decode].append(journey)
            self._place(route.decode, at_s)

    def _place(self, i: int, at_s: float) -> None:
        """Hold blocks on an engine for the prompts that come to it, in order, as long as there are some."""
        waiting, member = self._unplaced[i], self.members[i]
        if waiting and member.settle(at_s):
            self._again(i)
        while waiting:
            journey = waiting[0]
            if journey.request.request_id in self._journeys:
                journey.sent_tokens = member.engine.core.reserve(HandOff.of(journey.request))
                if journey.sent_tokens is None:
                    return
                self._send(journey, at_s)
            waiting.popleft()

    def _send(self, journey: _Journey, at_s: float) -> None:
        assert self._wire is not None
        assert self._ports is not None
        assert journey.sent_tokens is not None
        if journey.ready_tokens > journey.sent_tokens:
            n_bytes = self._wire.kv_bytes(journey.ready_tokens) - self._wire.kv_bytes(journey.sent_tokens)
            journey.arrives_s = self._ports.send(journey.route.prefill, journey.route.decode, n_bytes, at_s)
            journey.sent_tokens = journey.ready_tokens
            self.tally.sent(n_bytes)
        if journey.read_s is not None:
            self._later(max(at_s, journey.arrives_s), partial(self._arrived, journey))

    def _arrived(self, journey: _Journey, at_s: float) -> None:
        """The last piece is there: one engine lets its blocks go, the other decodes."""
        request_id, route = journey.request.request_id, journey.route
        del self._journeys[request_id]
        self.members[route.prefill].engine.core.sent(request_id)
        self._wake(route.prefill, at_s)
        decoder = self.members[route.decode]
        if decoder.settle(at_s):
            self._again(route.decode)
        decoder.engine.core.receive(request_id, DRAWN_TOKEN)
        self._wake(route.decode, at_s)
        assert journey.read_s is not None
        self.tally.handed_off(wait_s=at_s - journey.read_s)

    def _let_go(self, i: int, request_id: str, at_s: float) -> None:
        """Blocks were held for a prompt that is not coming."""
        if self.members[i].settle(at_s):
            self._again(i)
        self.members[i].engine.core.cancel(request_id, at_s)
        self._place(i, at_s)
