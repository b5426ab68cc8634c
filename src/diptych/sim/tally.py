"""What is kept of a simulated service while it runs, in bounded memory."""

from __future__ import annotations

import math

from diptych.ground.phase import FinishReason
from diptych.metrics import Limits, RequestRecord, Sample, StepRecord
from diptych.sim.statistics import Stream, Timeline


class Tally:
    """Told of every arrival, step and end. limits: what a request must meet to count for goodput."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ttft_s, self.itl_s, self.tpot_s, self.queue_s, self.e2e_s = (Stream() for _ in range(5))
        self.timeline = Timeline()
        self.n_arrived = self.n_complete = self.n_failed = self.n_good = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.recomputed_tokens = 0
        self.first_arrival_s, self.last_end_s = math.inf, 0.0
        self.kv_share_s = self.kv_peak = 0.0
        self.running_s = 0.0
        self.n_steps = 0
        self.spent_s = {"prefill": 0.0, "decode": 0.0, "mixed": 0.0}  # of all engines, by what a step held
        self.waiting_peak = 0

    def arrived(self, at_s: float) -> None:
        """A request came, whatever becomes of it."""
        self.n_arrived += 1
        self.first_arrival_s = min(self.first_arrival_s, at_s)
        self.last_end_s = max(self.last_end_s, at_s)
        self.timeline.at(at_s).arrivals += 1

    def stepped(self, step: StepRecord, *, kv_share: float, running: int, waiting: int) -> None:
        """A step ended. kv_share: of the engine's pool, held while it ran."""
        time_s = step.time_s
        self.n_steps += 1
        self.kv_share_s += kv_share * time_s
        self.kv_peak = max(self.kv_peak, kv_share)
        self.running_s += step.shape.n_sequences * time_s
        self.waiting_peak = max(self.waiting_peak, waiting)
        stretch = self.timeline.at(step.end_s)
        stretch.kv_share_s += kv_share * time_s
        stretch.running_s += running * time_s
        stretch.waiting_s += waiting * time_s
        stretch.output_tokens += step.shape.n_logits_rows
        if step.shape.decode_tokens == 0:
            stretch.prefill_s += time_s
            self.spent_s["prefill"] += time_s
        elif step.shape.prefill_tokens == 0:
            stretch.decode_s += time_s
            self.spent_s["decode"] += time_s
        else:
            stretch.mixed_s += time_s
            self.spent_s["mixed"] += time_s

    def finished(self, record: RequestRecord) -> None:
        """A request is over."""
        timings, usage = record.timings(), record.usage()
        end_s = record.arrival_s + timings.e2e_s
        self.last_end_s = max(self.last_end_s, end_s)
        if any(reason not in (FinishReason.STOP, FinishReason.LENGTH) for reason in record.reasons):
            self.n_failed += 1
            return
        self.n_complete += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens
        self.recomputed_tokens += usage.recomputed_tokens
        sample = Sample(
            start_s=record.arrival_s,
            end_s=end_s,
            ttft_s=timings.ttft_s,
            tpot_s=timings.tpot_s,
            itl_s=(),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            is_complete=True,
        )
        self.n_good += self.limits.are_met(sample)
        self.queue_s.add((timings.queue_s,))
        self.e2e_s.add((timings.e2e_s,))
        self.ttft_s.add(() if timings.ttft_s is None else (timings.ttft_s,))
        self.tpot_s.add(() if timings.tpot_s is None else (timings.tpot_s,))
        self.itl_s.add(timings.itl_s)
