"""What a step touches of a context, as far as a layer reaches: cached tokens that are read, and (query, key) pairs."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape
from diptych.models.spec import AttentionLayer


@dataclass(frozen=True, slots=True)
class Chosen:
    """So many positions, chosen for each token anew: by blocks of so many, of which the last is the token's own. shift: 1 where
    that is not whole, and one that is counts as any other.
    """

    most: int
    block: int = 1
    shift: int = 0

    def seen_before(self, end: int) -> int:
        """What tokens [0, end) see, all together."""
        all_of = min(end, self.most)
        count = all_of * (all_of + 1) // 2
        own = self._own(end + self.shift) - self._own(all_of + self.shift)
        return count + own + (end - all_of) * (self.most - self.block)

    def _own(self, end: int) -> int:
        """Of their own blocks."""
        whole, rest = divmod(end, self.block)
        return (whole * self.block * (self.block + 1) + rest * (rest + 1)) // 2


@dataclass(frozen=True, slots=True)
class Listed:
    """The last `window` positions, and whole entries of so many tokens (0: none), `most` of them at most (None: all)."""

    window: int
    tokens: int = 0
    most: int | None = None

    def seen_before(self, end: int) -> int:
        """What tokens [0, end) see, all together."""
        near = min(end, self.window)
        count = near * (near + 1) // 2 + (end - near) * self.window
        if not self.tokens:
            return count
        last = end if self.most is None else min(end, (self.most + 1) * self.tokens - 1)
        whole, rest = divmod(last, self.tokens)
        return count + self.tokens * whole * (whole - 1) // 2 + whole * (rest + 1) + (end - last) * (self.most or 0)

    def read_by(self, start: int, end: int) -> int:
        """Rows that tokens [start, end) read at least once, where those that are chosen are all that there are."""
        return min(end, self.window + end - start - 1) + (end // self.tokens if self.tokens else 0)


@dataclass(frozen=True, slots=True)
class Scored:
    """All positions, by each token that sees more than so many: what an index that chooses them looks at."""

    most: int


# how far a layer looks: within a window, everywhere (None), or by an index
Reach = int | Chosen | Listed | Scored | None


def reach_of(attention: AttentionLayer) -> Reach:
    """Of the layer's attention."""
    index = attention.index
    if attention.mla is not None and attention.mla.n_groups:
        assert attention.window is not None
        tokens = 0 if attention.entries is None else attention.entries.tokens
        return Listed(attention.window, tokens, None if index is None else index.most)
    return attention.window if index is None else Chosen(index.most, index.block, int(index.by_means))


def read_tokens(reach: Reach, shape: ChunkShape) -> int:
    """Cached tokens of one sequence of a chunk that are read at least once; chosen ones of each token may be others."""
    if isinstance(reach, Scored):
        return shape.end_pos if shape.end_pos > reach.most else 0
    if isinstance(reach, Chosen):
        return min(shape.end_pos, pairs(reach, shape))
    if isinstance(reach, Listed):
        return min(reach.read_by(shape.start_pos, shape.end_pos), pairs(reach, shape))
    return shape.kv_read_tokens(reach)


def pairs(reach: Reach, shape: ChunkShape) -> int:
    """(query, key) pairs of one sequence of a chunk."""
    if isinstance(reach, Scored):
        first, end = min(max(shape.start_pos, reach.most), shape.end_pos), shape.end_pos
        return (end * (end + 1) - first * (first + 1)) // 2
    if isinstance(reach, Chosen | Listed):
        return reach.seen_before(shape.end_pos) - reach.seen_before(shape.start_pos)
    return shape.pairs(reach)


# what a step's attention touches: cached tokens read and pairs of prefill, then the same of decode
Seen = tuple[int, int, int, int]


def all_of(shape: StepShape) -> Seen:
    """Of a layer that reaches everywhere: the sums that a shape carries."""
    return shape.prefill_context_tokens, shape.prefill_pairs, shape.decode_context_tokens, shape.decode_pairs


class Attended:
    """The same within one reach. Remembers the last base, so that a shape that adds to it costs what it adds."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._base: StepShape | None = None
        self._of_base: Seen = (0, 0, 0, 0)

    def of(self, shape: StepShape) -> Seen:
        """What the step touches."""
        added: list[StepShape] = []
        node: StepShape | None = shape
        while node is not None and node is not self._base:
            added.append(node)
            node = node.before
        seen: Seen = (0, 0, 0, 0) if node is None else self._of_base
        for node in reversed(added):
            seen = self._with(seen, node)
            if node is not shape or node.before is None:
                self._base, self._of_base = node, seen
        return seen

    def _with(self, seen: Seen, node: StepShape) -> Seen:
        """Those of `node` on top of what stood before it."""
        reach = self._reach
        most = (reach.most if reach.block == 1 else None) if isinstance(reach, Chosen) else reach
        prefill_tokens, prefill_pairs, decode_tokens, decode_pairs = seen
        # plain decode, one row each, which reads as many of a choice as within a window
        if isinstance(most, int) and node.before is None and node.decode_tokens == node.n_tokens == node.n_sequences:
            tokens = node.own_tokens_within(most)
            return prefill_tokens, prefill_pairs, decode_tokens + tokens, decode_pairs + tokens
        for shape in node.own:
            tokens, touched = shape.count * read_tokens(reach, shape), shape.count * pairs(reach, shape)
            if shape.phase is Phase.DECODE:
                decode_tokens, decode_pairs = decode_tokens + tokens, decode_pairs + touched
            else:
                prefill_tokens, prefill_pairs = prefill_tokens + tokens, prefill_pairs + touched
        return prefill_tokens, prefill_pairs, decode_tokens, decode_pairs
