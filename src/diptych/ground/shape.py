"""What a step is to whoever prices it: chunks without tokens. Predictors, accounting and the stall budget see nothing else.

    step = StepShape.decode(batch=8, context_tokens=1024)
    step.plus(ChunkShape(phase=Phase.PREFILL, new_tokens=512, start_pos=0, samples=False))   # a mixed step

A step is one GEMM over all its rows, so a mixed step is a single shape, not the sum of two. The phase is the scheduler's
word and is never guessed from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase


class AdapterShape(NamedTuple):
    """A low-rank adapter without its numbers: read once a step, multiplied with each of its rows."""

    number: int  # in the model: two chunks of one number read the same
    parameters: int  # elements of all its A and B


class ChunkShape(NamedTuple):
    """`count` sequences that each compute `new_tokens` tokens from position `start_pos` on.

    samples: whether logits are wanted: of the last row of a prefill chunk, of all rows of a decode chunk (its token and its
    drafts). adapter: that all of them have. both_ways: each token attends to all of the chunk's, behind it too. A named tuple:
    the scheduler makes one per chunk and step.
    """

    phase: Phase
    new_tokens: int
    start_pos: int
    samples: bool
    count: int = 1  # type: ignore[assignment]  # in place of tuple.count
    adapter: AdapterShape | None = None
    both_ways: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether this is decode work."""
        return self.phase is Phase.DECODE

    @property
    def end_pos(self) -> int:
        """The context of each sequence after the chunk."""
        return self.start_pos + self.new_tokens

    def pairs(self, window: int | None) -> int:
        """(query, key) pairs of one sequence: causal, and at most `window` keys per query; both_ways: as many behind it."""
        causal = self._causal_pairs(window)
        return 2 * causal - self.new_tokens if self.both_ways else causal

    def _causal_pairs(self, window: int | None) -> int:
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


_NO_ADAPTERS: frozenset[AdapterShape] = frozenset()


class StepShape:
    """All chunks of one step; never changed once made. `plus` shares what was there, so it costs O(1).

    before: the shape that this one adds its `own` chunks to (None: nothing). The sums are over all chunks.
    """

    __slots__ = (
        "_moved",
        "_own",
        "adapted_products",
        "adapters",
        "before",
        "decode_context_tokens",
        "decode_pairs",
        "decode_tokens",
        "n_logits_rows",
        "n_sequences",
        "n_tokens",
        "prefill_context_tokens",
        "prefill_pairs",
        "prefill_start_tokens",
    )

    n_tokens: int  # rows of the step's GEMMs (N)
    n_logits_rows: int  # rows that need logits (R)
    n_sequences: int
    decode_tokens: int  # rows that belong to decode
    decode_context_tokens: int  # positions that decode reads, new ones included
    decode_pairs: int  # (query, key) pairs of decode, without any window
    prefill_start_tokens: int  # positions that stood before the prefill chunks
    prefill_context_tokens: int  # the same with the new ones
    prefill_pairs: int  # (query, key) pairs of prefill, causal or both ways, without any window
    adapters: frozenset[AdapterShape]  # that some chunk has
    adapted_products: int  # rows times the parameters of their adapters, over all rows

    def __init__(self, shapes: Sequence[ChunkShape], before: StepShape | None = None) -> None:
        self._own = tuple(shapes)
        self._moved = 0  # steps since the chunks of _own, each of which moved every chunk one position on
        self.before = before
        decode = context = seen = rows = logits = sequences = prefill_context = prefill_start = pairs = 0
        products, has_adapters = 0, False
        for phase, new_tokens, start_pos, samples, count, adapter, both_ways in self._own:
            sequences += count
            tokens = new_tokens * count
            if adapter is not None:
                products += tokens * adapter.parameters
                has_adapters = True
            if samples:
                logits += tokens if phase is Phase.DECODE else count
            if phase is Phase.DECODE:
                decode += tokens
                context += count * (start_pos + new_tokens)
                seen += tokens * start_pos + count * _triangle(new_tokens)
            else:
                rows += tokens
                prefill_start += count * start_pos
                prefill_context += count * (start_pos + new_tokens)
                pairs += (
                    tokens * (start_pos + new_tokens)
                    if both_ways
                    else tokens * start_pos + count * _triangle(new_tokens)
                )
        if before is not None:
            decode += before.decode_tokens
            context += before.decode_context_tokens
            seen += before.decode_pairs
            rows += before.n_tokens - before.decode_tokens
            logits += before.n_logits_rows
            sequences += before.n_sequences
            prefill_start += before.prefill_start_tokens
            prefill_context += before.prefill_context_tokens
            pairs += before.prefill_pairs
            products += before.adapted_products
        self.n_tokens = rows + decode
        self.n_logits_rows = logits
        self.n_sequences = sequences
        self.decode_tokens = decode
        self.decode_context_tokens = context
        self.decode_pairs = seen
        self.prefill_start_tokens = prefill_start
        self.prefill_context_tokens = prefill_context
        self.prefill_pairs = pairs
        self.adapters = _NO_ADAPTERS if before is None else before.adapters
        self.adapted_products = products
        if has_adapters:
            own = {one.adapter for one in self._own if one.adapter is not None}
            self.adapters = self.adapters if own <= self.adapters else self.adapters | own

    @classmethod
    def prefill(cls, *, batch: int, new_tokens: int, cached_tokens: int = 0, samples: bool = True) -> StepShape:
        """`batch` prompts (B) with `new_tokens` new (S) and `cached_tokens` already cached (P) tokens each."""
        _at_least("batch", batch, 1)
        _at_least("new_tokens", new_tokens, 1)
        _at_least("cached_tokens", cached_tokens, 0)
        return cls((ChunkShape(Phase.PREFILL, new_tokens, cached_tokens, samples, batch),))

    @classmethod
    def decode(cls, *, batch: int, context_tokens: int) -> StepShape:
        """One new token for each of `batch` sequences; the context (T) includes the new token."""
        _at_least("batch", batch, 1)
        _at_least("context_tokens", context_tokens, 1)
        return cls((ChunkShape(Phase.DECODE, 1, context_tokens - 1, True, batch),))

    @classmethod
    def tokens(cls, chunks: Sequence[ChunkShape], context_tokens: int) -> StepShape:
        """Decode chunks of one sequence and token each, none with an adapter, that read so many positions together: what
        nearly all steps are made of, without counting them one by one.
        """
        n = len(chunks)
        made = cls.__new__(cls)
        made._own, made._moved, made.before = tuple(chunks), 0, None
        made.n_tokens = made.n_logits_rows = made.n_sequences = made.decode_tokens = n
        made.decode_context_tokens = made.decode_pairs = context_tokens
        made.prefill_start_tokens = made.prefill_context_tokens = made.prefill_pairs = 0
        made.adapters, made.adapted_products = _NO_ADAPTERS, 0
        return made

    def later(self, n_steps: int) -> StepShape:
        """What a step of decode chunks, one token each, becomes when it has run so many times over. Costs O(1)."""
        assert self.before is None, self
        assert self.decode_tokens == self.n_tokens == self.n_sequences, self
        rows = self.n_tokens
        moved = StepShape.__new__(StepShape)
        moved.before = None
        moved._own, moved._moved = self._own, self._moved + n_steps
        moved.n_tokens = moved.n_logits_rows = moved.n_sequences = moved.decode_tokens = rows
        moved.decode_context_tokens = self.decode_context_tokens + n_steps * rows
        moved.decode_pairs = self.decode_pairs + n_steps * rows
        moved.prefill_start_tokens = moved.prefill_context_tokens = moved.prefill_pairs = 0
        moved.adapters, moved.adapted_products = self.adapters, self.adapted_products
        return moved

    @property
    def own(self) -> tuple[ChunkShape, ...]:
        """The chunks that this shape adds to those of `before`."""
        moved = self._moved
        if not moved:
            return self._own
        return tuple([one._replace(start_pos=one.start_pos + moved) for one in self._own])

    def own_tokens_within(self, window: int) -> int:
        """Keys that the chunks of `own` read through a window, where each is one token of decode."""
        moved = self._moved + 1
        return sum([min(start + moved, window) * count for _, _, start, _, count, *_ in self._own])

    def plus(self, other: ChunkShape | StepShape) -> StepShape:
        """One step that does both."""
        return StepShape((other,) if isinstance(other, ChunkShape) else other.shapes, self)

    def with_drafts(self, depths: Sequence[int]) -> StepShape:
        """The step with so many drafts behind each of its decode chunks, which are its first: O(chunks)."""
        shapes = self.shapes
        longer = [
            ChunkShape(one.phase, one.new_tokens + depth, one.start_pos, True, one.count, one.adapter) if depth else one
            for one, depth in zip(shapes, depths, strict=False)
        ]
        decodes = StepShape(longer)
        return decodes if len(shapes) == len(longer) else StepShape(shapes[len(longer) :], decodes)

    @property
    def shapes(self) -> tuple[ChunkShape, ...]:
        """Every chunk, in order: O(chunks)."""
        parts = [self.own]
        before = self.before
        while before is not None:
            parts.append(before.own)
            before = before.before
        return parts[0] if len(parts) == 1 else tuple(shape for own in reversed(parts) for shape in own)

    @property
    def phase(self) -> Phase:
        """DECODE when the step does nothing else."""
        return Phase.DECODE if self.decode_tokens == self.n_tokens else Phase.PREFILL

    @property
    def prefill_tokens(self) -> int:
        """Rows that belong to prefill."""
        return self.n_tokens - self.decode_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepShape) and self.shapes == other.shapes

    def __hash__(self) -> int:
        return hash(self.shapes)

    def __repr__(self) -> str:
        return f"StepShape({self.shapes!r})"


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
