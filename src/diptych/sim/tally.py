"""What is kept of a simulated service while it runs, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from diptych.ground.phase import FinishReason
from diptych.ground.shape import StepShape
from diptych.metrics import Limits, RequestRecord
from diptych.sim.statistics import Stream, Timeline

MOST_BEFORE = 0.5  # of a load's requests may come before the count begins


@dataclass(slots=True)
class Work:
    """What a group of engines did in steps that end from from_s to until_s."""

    from_s: float = 0.0
    until_s: float = math.inf
    timeline: Timeline = field(default_factory=Timeline)
    n_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_s: float = 0.0
    mixed_prefill_s: float = 0.0  # by how much the prefill in mixed steps made them longer
    kv_share_s: float = 0.0
    kv_peak: float = 0.0
    running_s: float = 0.0
    waiting_peak: int = 0

    @property
    def step_s(self) -> float:
        """In steps."""
        return self.prefill_s + self.decode_s + self.mixed_s

    def stepped(
        self,
        end_s: float,
        time_s: float,
        shape: StepShape,
        *,
        output_tokens: int,
        kv_share: float,
        running: int,
        waiting: int,
    ) -> None:
        """A step ended. output_tokens: that it gave. kv_share: of the engine's pool, held while it ran."""
        if not self.from_s <= end_s <= self.until_s:
            return
        self.n_steps += 1
        self.kv_share_s += kv_share * time_s
        if kv_share > self.kv_peak:
            self.kv_peak = kv_share
        self.running_s += shape.n_sequences * time_s
        if waiting > self.waiting_peak:
            self.waiting_peak = waiting
        stretch = self.timeline.at(end_s)
        stretch.kv_share_s += kv_share * time_s
        stretch.running_s += running * time_s
        stretch.waiting_s += waiting * time_s
        stretch.output_tokens += output_tokens
        if shape.decode_tokens == 0:
            stretch.prefill_s += time_s
            self.prefill_s += time_s
        elif shape.decode_tokens == shape.n_tokens:
            stretch.decode_s += time_s
            self.decode_s += time_s
        else:
            stretch.mixed_s += time_s
            self.mixed_s += time_s

    def decoded(
        self, begin_s: float, ends_s: Sequence[float], held_blocks: Iterable[int], *, of: int, n: int, waiting: int
    ) -> None:
        """Steps one after the other from begin_s on, each of which decoded a token of all n running sequences.

        held_blocks: by each, of so many. The same as `stepped` for every one of them.
        """
        stretch, stretch_end_s = None, -math.inf
        first_s, last_s = self.from_s, self.until_s
        # sums in local names: a simulation spends its time here, and this halves it
        kv_share_s, running_s, decode_s, kv_peak = self.kv_share_s, self.running_s, self.decode_s, self.kv_peak
        for end_s, held in zip(ends_s, held_blocks, strict=False):
            time_s, begin_s = end_s - begin_s, end_s
            if not first_s <= end_s <= last_s:
                continue
            kv_share, ran_s = held / of, n * time_s
            self.n_steps += 1
            kv_share_s += kv_share * time_s
            if kv_share > kv_peak:
                kv_peak = kv_share
            running_s += ran_s
            decode_s += time_s
            if stretch is None or end_s >= stretch_end_s:
                stretch = self.timeline.at(end_s)
                bin_s = self.timeline.bin_s
                stretch_end_s = (end_s // bin_s + 1.0) * bin_s
            stretch.kv_share_s += kv_share * time_s
            stretch.running_s += ran_s
            stretch.waiting_s += waiting * time_s
            stretch.output_tokens += n
            stretch.decode_s += time_s
        self.kv_share_s, self.running_s, self.decode_s, self.kv_peak = kv_share_s, running_s, decode_s, kv_peak
        if waiting > self.waiting_peak and stretch is not None:
            self.waiting_peak = waiting

    def take(self, other: Work) -> None:
        """Add what engines elsewhere did."""
        for name in ("n_steps", "prefill_s", "decode_s", "mixed_s", "mixed_prefill_s", "kv_share_s", "running_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_peak = max(self.kv_peak, other.kv_peak)
        self.waiting_peak = max(self.waiting_peak, other.waiting_peak)
        self.timeline.take(other.timeline)


class Tally:
    """Told of every arrival, step and end. limits: what a request must meet to count for goodput.

    from_s: requests that came before are served and not counted, nor are steps before it or after `close`. The count begins
    sooner where more than MOST_BEFORE of n_requests would come before it.
    """

    def __init__(self, limits: Limits, *, n_groups: int = 1, from_s: float = 0.0, n_requests: float = math.inf) -> None:
        self.limits = limits
        self._from_s = from_s
        self._most_before = MOST_BEFORE * n_requests
        self._last_before_s, self._n_last_before = -math.inf, 0  # when the last of these came, and how many then
        self.ttft_s, self.itl_s, self.tpot_s, self.queue_s, self.e2e_s, self.hand_off_s = (Stream() for _ in range(6))
        self.work = [Work(from_s=from_s) for _ in range(n_groups)]
        self.close_s: float | None = None
        self.n_before = self.n_arrived = self.n_complete = self.n_failed = self.n_good = 0
        self.n_late_ttft = self.n_late_tpot = self.n_late_e2e = 0  # of those that completed
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.recomputed_tokens = 0
        self.first_arrival_s, self.last_end_s = math.inf, 0.0
        self.n_sent = 0
        self.sent_bytes = 0.0

    def work_of(self, group: int) -> Work:
        """Where a group of engines puts down its steps."""
        return self.work[group]

    @property
    def timeline(self) -> Timeline:
        """Of all groups together; made anew at every call."""
        found = Timeline()
        for work in self.work:
            found.take(work.timeline)
        return found

    def arrived(self, at_s: float) -> None:
        """A request came, whatever becomes of it."""
        n_come = 1 if self.counts(at_s) else self._come_before(at_s)
        if not n_come:
            return
        self.n_arrived += n_come
        self.first_arrival_s = min(self.first_arrival_s, at_s)
        self.last_end_s = max(self.last_end_s, at_s)
        self.work[0].timeline.at(at_s).arrivals += n_come

    def _come_before(self, at_s: float) -> int:
        """One that is not to be counted; where it is one too many the count begins with all who came at that instant."""
        self._n_last_before = self._n_last_before + 1 if at_s == self._last_before_s else 1
        self._last_before_s = at_s
        self.n_before += 1
        if self.n_before <= self._most_before:
            return 0
        self.n_before -= self._n_last_before
        self._from_s = at_s
        for work in self.work:
            work.from_s = at_s
        return self._n_last_before

    def close(self, at_s: float) -> None:
        """The last request came: what follows is the engines running dry, which is no steady state."""
        if self._from_s:
            self.close_s = at_s
            for work in self.work:
                work.until_s = at_s

    @property
    def n_bad(self) -> int:
        """Requests that are over and missed a limit, or failed."""
        return self.n_complete + self.n_failed - self.n_good

    @property
    def good_share(self) -> float:
        """Of all that came."""
        return self.n_good / self.n_arrived if self.n_arrived else 0.0

    def most_good_share(self, n_requests: int, *, n_late: int = 0) -> float:
        """Of so many requests in all, those before from_s among them: the share that is good if all that are left are, but for
        n_late that are open and have missed a limit.
        """
        n = n_requests - self.n_before
        return (n - self.n_bad - n_late) / n if n else 0.0

    def least_good_share(self, n_requests: int) -> float:
        """The same if none is that is left."""
        n = n_requests - self.n_before
        return self.n_good / n if n else 0.0

    def counts(self, arrival_s: float) -> bool:
        """Whether a request that came then is counted."""
        return arrival_s >= self._from_s

    @property
    def steps_s(self) -> float:
        """How long steps were counted."""
        if self.close_s is not None:
            return max(0.0, self.close_s - self._from_s)
        return max(0.0, self.last_end_s - self.first_arrival_s)

    def sent(self, n_bytes: float) -> None:
        """Keys and values went from one engine to another."""
        self.sent_bytes += n_bytes

    def handed_off(self, *, wait_s: float) -> None:
        """A prompt's last keys and values were there so long after they had been computed."""
        self.n_sent += 1
        self.hand_off_s.add((wait_s,))

    def finished(self, record: RequestRecord) -> None:
        """A request is over."""
        end_s = record.end_s
        assert end_s is not None
        if not self.counts(record.arrival_s):
            return
        self.last_end_s = max(self.last_end_s, end_s)
        if any(reason not in (FinishReason.STOP, FinishReason.LENGTH) for reason in record.reasons):
            self.n_failed += 1
            return
        usage = record.usage()
        self.n_complete += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.recomputed_tokens += usage.recomputed_tokens
        sample = record.sample()
        limits = self.limits
        self.n_good += limits.are_met(sample)
        self.n_late_ttft += _is_over(sample.ttft_s, limits.ttft_s)
        self.n_late_tpot += _is_over(sample.tpot_s, limits.tpot_s)
        self.n_late_e2e += _is_over(sample.e2e_s, limits.e2e_s)
        self.e2e_s.add((sample.e2e_s,))
        if record.first_scheduled_s is not None:
            self.queue_s.add((record.first_scheduled_s - record.arrival_s,))
        self.ttft_s.add(() if sample.ttft_s is None else (sample.ttft_s,))
        self.tpot_s.add(() if sample.tpot_s is None else (sample.tpot_s,))
        self.itl_s.add(sample.itl_s)

    def take(self, other: Tally) -> None:
        """Add what another part of the service saw."""
        for name in ("ttft_s", "itl_s", "tpot_s", "queue_s", "e2e_s", "hand_off_s"):
            getattr(self, name).take(getattr(other, name))
        for mine, theirs in zip(self.work, other.work, strict=True):
            mine.take(theirs)
        counts = (
            "n_before",
            "n_arrived",
            "n_complete",
            "n_failed",
            "n_good",
            "n_late_ttft",
            "n_late_tpot",
            "n_late_e2e",
        )
        tokens = ("prompt_tokens", "cached_tokens", "output_tokens", "recomputed_tokens", "n_sent", "sent_bytes")
        for name in (*counts, *tokens):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_arrival_s = min(self.first_arrival_s, other.first_arrival_s)
        self.last_end_s = max(self.last_end_s, other.last_end_s)
        if self.close_s is not None and other.close_s is not None:
            self.close_s = max(self.close_s, other.close_s)


def _is_over(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit
