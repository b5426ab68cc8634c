"""How many workers a pool needs, by the predicted seconds of work that is open there. No clock, no ray.

    scaler = Autoscaler({"decode": (1, 4)}, target_s=2.0, calm_s=60.0)
    n = scaler.wanted("decode", n_workers=1, work_s=7.5, now_s=now_s)      # 4

A pool grows at once, to as many as have target_s of work each. It shrinks when fewer were enough for calm_s, to the most
that were needed in that time: a worker that is started reads all weights, so one that was wanted a moment ago stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diptych.cost.shared_machine import BATCH, PROMPT_TOKENS, Speeds
from diptych.engine.load import Machinery
from diptych.ground.clock import Clock
from diptych.ground.errors import InternalError
from diptych.ground.events import Event, FinishEvent, TokenEvent
from diptych.ground.request import Request, SamplingParams
from diptych.stepper import Stepper

PROBE_PROMPT_TOKENS, PROBE_TOKENS = 256, 8


@dataclass(slots=True)
class _Calm:
    since_s: float
    most: int  # that were needed since


class Autoscaler:
    """See the module. bounds: of each pool that follows its load, the fewest and the most workers."""

    def __init__(self, bounds: Mapping[str, tuple[int, int]], *, target_s: float, calm_s: float) -> None:
        self.bounds = dict(bounds)
        self._target_s, self._calm_s = target_s, calm_s
        self._calm: dict[str, _Calm] = {}

    def wanted(self, pool: str, *, n_workers: int, work_s: float, now_s: float) -> int:
        """Workers that the pool should have now, where it has n_workers."""
        least, most = self.bounds[pool]
        needed = min(most, max(least, math.ceil(work_s / self._target_s)))
        if needed >= n_workers:
            self._calm.pop(pool, None)
            return needed
        calm = self._calm.setdefault(pool, _Calm(now_s, needed))
        calm.most = max(calm.most, needed)
        if now_s - calm.since_s < self._calm_s:
            return n_workers
        del self._calm[pool]
        return calm.most


def probe(machinery: Machinery, clock: Clock) -> Speeds:
    """Step times of this engine as it is, by some steps of its own before it serves: where no profile predicts them."""
    core, tokens = machinery.core, min(PROBE_PROMPT_TOKENS, machinery.core.context_limit_tokens - PROBE_TOKENS - 1)
    n = min(BATCH, core.max_running_sequences)
    times_s: list[float] = []
    events: list[Event] = []
    stepper = Stepper(core, machinery.executor, clock, fold=events.extend)
    for number, n_tokens in ((1, min(16, tokens)), (2, tokens)):  # the first, a short one, touches memory
        sampling = SamplingParams(n=n, max_tokens=PROBE_TOKENS, temperature=1.0, seed=number, ignore_eos=True)
        prompt = tuple((number * 37 + i) % 100 for i in range(n_tokens))
        begin_s = clock.now_s()
        stepper.submit(Request(request_id="probe", prompt_token_ids=prompt, sampling=sampling, arrival_s=begin_s))
        while core.has_work:
            stepper.step()
        failed = [one.error for one in events if isinstance(one, FinishEvent) and one.error is not None]
        if failed:
            raise InternalError(f"the engine cannot serve: {failed[0]}")
        times_s = [begin_s, *(one.at_s for one in events if isinstance(one, TokenEvent))]
        events.clear()
    core.reset_prefix_cache()
    step_s = (times_s[-1] - times_s[1]) / (PROBE_TOKENS - 1)
    return Speeds(read_s=(times_s[1] - times_s[0]) * PROMPT_TOKENS / tokens, decode_s=step_s * BATCH / n)
