"""The work of one step as the cost model sees it: groups of equal chunks, whichever phase they belong to.

A step is one GEMM over all its rows, so a mixed step is a single `Workload`, not the sum of two.

>>> Workload.decode(batch=8, context_tokens=1024).n_tokens
8
"""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.errors import ConfigError
from diptych.ground.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkShape:
    """`count` equal sequences that each compute `new_tokens` tokens from position `start_pos` on."""

    new_tokens: int
    start_pos: int
    samples: bool
    count: int = 1

    @property
    def is_decode(self) -> bool:
        """One new token on top of a cache: the shape of a decode step."""
        return self.new_tokens == 1 and self.start_pos > 0

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs of one sequence: causal, and at most `window` keys per query."""
        start, end = self.start_pos, self.start_pos + self.new_tokens
        if window is None or end <= window:
            return _triangle(end) - _triangle(start)
        # Queries below position `window` see all their past; the others see exactly `window` keys.
        growing_end = max(start, min(end, window))
        return _triangle(growing_end) - _triangle(start) + (end - growing_end) * window

    def kv_read_tokens(self, window: int | None) -> int:
        """Cached tokens of one sequence whose keys and values are read at least once."""
        end = self.start_pos + self.new_tokens
        return end if window is None else min(end, window - 1 + self.new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All chunks of one step."""

    shapes: tuple[ChunkShape, ...]

    @classmethod
    def prefill(cls, *, batch: int, new_tokens: int, cached_tokens: int = 0, samples: bool = True) -> Workload:
        """`batch` prompts (B) with `new_tokens` new (S) and `cached_tokens` already cached (P) tokens each."""
        _at_least("batch", batch, 1)
        _at_least("new_tokens", new_tokens, 1)
        _at_least("cached_tokens", cached_tokens, 0)
        shape = ChunkShape(new_tokens=new_tokens, start_pos=cached_tokens, samples=samples, count=batch)
        return cls(shapes=(shape,))

    @classmethod
    def decode(cls, *, batch: int, context_tokens: int) -> Workload:
        """One new token for each of `batch` sequences; the context (T) includes the new token."""
        _at_least("batch", batch, 1)
        _at_least("context_tokens", context_tokens, 1)
        return cls(shapes=(ChunkShape(new_tokens=1, start_pos=context_tokens - 1, samples=True, count=batch),))

    @classmethod
    def of_plan(cls, plan: StepPlan) -> Workload:
        """The work of a scheduler's plan, chunk by chunk."""
        return cls(
            shapes=tuple(
                ChunkShape(new_tokens=len(chunk.token_ids), start_pos=chunk.start_pos, samples=chunk.samples)
                for chunk in plan.chunks
            )
        )

    def plus(self, other: Workload) -> Workload:
        """One step that does both."""
        return Workload(shapes=self.shapes + other.shapes)

    @property
    def n_tokens(self) -> int:
        """Rows of the step's GEMMs (N)."""
        return sum(shape.new_tokens * shape.count for shape in self.shapes)

    @property
    def n_logits_rows(self) -> int:
        """Rows that need logits (R)."""
        return sum(shape.count for shape in self.shapes if shape.samples)

    @property
    def n_sequences(self) -> int:
        """Sequences in the step."""
        return sum(shape.count for shape in self.shapes)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
