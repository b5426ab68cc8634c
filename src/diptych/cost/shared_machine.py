"""Whether workers pay on the machine that they share, by the step times predicted for all of it.

Arithmetic is shared out with the cores, so workers read no more prompts together than one engine does. A decode step waits
for memory, which a part of the cores may use up: at best, workers that decode lose nothing, and what reads beside them comes
on top. What pools buy in any case is calm: no stream waits for another's prompt. A stall budget buys the same in one engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from diptych.ground.shape import StepShape

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 2048, 256  # of the load that is judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Step times of one engine with all the machine's cores: a prompt alone, and BATCH sequences behind it."""

    read_s: float
    decode_s: float

    @classmethod
    def of(cls, predict_s: Callable[[StepShape], float], context_tokens: int) -> Speeds:
        """By a model of step times, which knows no context longer than the engine's."""
        tokens = min(PROMPT_TOKENS, context_tokens - 1)
        return cls(
            read_s=predict_s(StepShape.prefill(batch=1, new_tokens=tokens)) * PROMPT_TOKENS / tokens,
            decode_s=predict_s(StepShape.decode(batch=BATCH, context_tokens=tokens)),
        )

    def prefill_us(self, new_tokens: int, cached_tokens: int) -> int:
        """Of so many tokens behind so many, on a line (see `control.router.Price`)."""
        return int(new_tokens * self.read_s / PROMPT_TOKENS * 1e6)

    def decode_us(self, context_tokens: int, output_tokens: int) -> int:
        """One sequence's share of the steps of BATCH."""
        return int(output_tokens * self.decode_s / BATCH * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Requests a second of the load, the workers' at best, and the longest gap that a prompt puts into a running stream."""

    one_per_s: float
    workers_per_s: float
    one_gap_s: float
    workers_gap_s: float

    @property
    def pays(self) -> bool:
        """Whether the workers may answer more."""
        return self.workers_per_s > self.one_per_s


def judge(speeds: Speeds, *, prefill: int, decode: int, max_step_tokens: int) -> Verdict:
    """So many workers, which divide the machine's cores, against one engine that has them all."""
    n_workers, part = prefill + decode, min(1.0, max_step_tokens / PROMPT_TOKENS)
    answer_s = OUTPUT_TOKENS * speeds.decode_s / BATCH
    one_per_s = 1.0 / (speeds.read_s + answer_s)
    if not prefill:
        return Verdict(
            one_per_s=one_per_s,
            workers_per_s=one_per_s,
            one_gap_s=speeds.read_s * part,
            workers_gap_s=speeds.read_s * part * n_workers,
        )
    return Verdict(
        one_per_s=one_per_s,
        workers_per_s=min(prefill / n_workers / speeds.read_s, 1.0 / answer_s),
        one_gap_s=speeds.read_s * part,
        workers_gap_s=speeds.decode_s,
    )
