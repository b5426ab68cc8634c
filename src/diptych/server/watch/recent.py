"""The engine's last minutes, kept so that one request of them can be asked what would have been (`sim.counterfactual`).

Nothing is copied while a request runs: the request, the lists of tokens that the engine fills anyway, its record and the
shapes of steps are held by reference, and of a request that is over only what is asked for later: its answer's text, stream
and grammar are gone. All is let go when it is older than the minutes or too much. `benchmarks/recent_cost.py` measures what
a step pays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from diptych.engine.engine import Engine, OpenRequest
from diptych.ground.errors import ConfigError
from diptych.ground.request import Request
from diptych.ground.shape import StepShape
from diptych.metrics import RequestRecord, StepRecord
from diptych.server.http.errors import ApiError
from diptych.sim.counterfactual import Change, Machine, Minutes, Past, past_of, times_of, what_if

# what is held at most, whatever the load
MAX_CHUNKS = 200_000  # of steps
MAX_TOKENS = 4_000_000  # of prompts


@dataclass(slots=True)
class _Open:
    """A request that was taken, with what the engine still writes."""

    request: Request
    record: RequestRecord
    outputs: list[list[int]]
    came_s: float

    def past(self) -> Past:
        """What is known of it so far."""
        return past_of(self.request, self.outputs, self.record, came_s=self.came_s)


class Recent:
    """The last `keep_s` seconds of an engine. Written on the engine's thread; `minutes` is called there too."""

    def __init__(self, engine: Engine, *, keep_s: float, machine: Machine | None) -> None:
        self._engine = engine
        self._keep_s = keep_s
        self._machine = machine
        self._open: dict[str, _Open] = {}
        self._over: deque[Past] = deque()  # in the order of ends
        self._steps: deque[tuple[float, float, StepShape]] = deque()
        self._n_chunks = self._n_tokens = 0
        engine.on_submit.append(self._on_submit)
        engine.on_end.append(self._on_end)
        engine.book.on_step.append(self._on_step)

    def minutes(self) -> Minutes:
        """A copy of what is held."""
        core = self._engine.core
        pasts = [*self._over, *(one.past() for one in self._open.values())]
        return Minutes(
            config=core.config,
            blocks=core.block_config,
            requests=tuple(sorted(pasts, key=lambda past: past.request.arrival_s)),
            steps=times_of(self._steps),
            machine=self._machine,
            seed=core.seed,
        )

    def _on_submit(self, opened: OpenRequest) -> None:
        if opened.record is not None:
            outputs = [choice.token_ids for choice in opened.choices]
            self._open[opened.request.request_id] = _Open(
                opened.request, opened.record, outputs, self._engine.clock.now_s()
            )

    def _on_end(self, opened: OpenRequest) -> None:
        kept = self._open.pop(opened.request.request_id, None)
        if kept is None:
            return
        self._over.append(kept.past())
        self._n_tokens += len(kept.request.prompt_token_ids)
        oldest_s = self._engine.clock.now_s() - self._keep_s
        while self._over and (self._n_tokens > MAX_TOKENS or (self._over[0].end_s or oldest_s) < oldest_s):
            self._n_tokens -= len(self._over.popleft().request.prompt_token_ids)

    def _on_step(self, step: StepRecord) -> None:
        steps = self._steps
        steps.append((step.begin_s, step.end_s, step.shape))
        self._n_chunks += step.shape.n_sequences
        oldest_s = step.end_s - self._keep_s
        # the newest stays: where the process stood still, it alone is longer than all that is kept
        while len(steps) > 1 and (self._n_chunks > MAX_CHUNKS or steps[0][0] < oldest_s):
            self._n_chunks -= steps.popleft()[2].n_sequences


def parse_changes(texts: Iterable[str]) -> list[Change]:
    """ApiError 400 for one that is none."""
    try:
        return [Change.parse(text) for text in texts]
    except ConfigError as error:
        raise ApiError(400, str(error), param="change", code="invalid_value") from error


def what_if_answer(minutes: Minutes, name: str, request_id: str, changes: list[Change]) -> dict[str, Any]:
    """What a client is told. ApiError 404 where the minutes do not tell enough of the request."""
    try:
        return {"id": name, "object": "request.what_if"} | what_if(minutes, request_id, changes)
    except ConfigError as error:
        raise ApiError(404, str(error), code="not_found") from error
