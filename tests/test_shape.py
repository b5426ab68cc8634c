"""`StepShape`: sums that are right however the shape was put together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from diptych.ground.phase import Phase
from diptych.ground.shape import ChunkShape, StepShape

CHUNKS = st.lists(
    st.builds(
        ChunkShape,
        phase=st.sampled_from(Phase),
        new_tokens=st.integers(1, 9),
        start_pos=st.integers(0, 30),
        samples=st.booleans(),
        count=st.integers(1, 3),
        both_ways=st.booleans(),
    ),
    max_size=8,
)


def brute(chunks: list[ChunkShape], phase: Phase) -> tuple[int, int, int, int]:
    """(rows, positions before, positions after, pairs), one query at a time."""
    rows = start = end = pairs = 0
    for chunk in chunks:
        if chunk.phase is phase:
            rows += chunk.count * chunk.new_tokens
            start += chunk.count * chunk.start_pos
            end += chunk.count * chunk.end_pos
            sees_all = chunk.both_ways and phase is Phase.PREFILL
            positions = range(chunk.start_pos, chunk.end_pos)
            pairs += chunk.count * sum(chunk.end_pos if sees_all else position + 1 for position in positions)
    return rows, start, end, pairs


@given(chunks=CHUNKS, cuts=st.lists(st.integers(0, 8), max_size=4))
def test_sums_are_those_of_the_chunks_however_they_were_added(chunks: list[ChunkShape], cuts: list[int]) -> None:
    """Predictors read sums only; a wrong one is a wrong price for every step."""
    bounds = [0, *sorted(min(cut, len(chunks)) for cut in cuts), len(chunks)]
    shape = StepShape(())
    for low, high in pairwise(bounds):
        shape = shape.plus(StepShape(chunks[low:high]))
    assert shape.shapes == tuple(chunks)
    assert shape == StepShape(chunks)
    assert hash(shape) == hash(StepShape(chunks))
    rows, start, end, pairs = brute(chunks, Phase.PREFILL)
    decode_rows, _, context, decode_pairs = brute(chunks, Phase.DECODE)
    assert (shape.prefill_tokens, shape.prefill_start_tokens) == (rows, start)
    assert (shape.prefill_context_tokens, shape.prefill_pairs) == (end, pairs)
    assert (shape.decode_tokens, shape.decode_context_tokens, shape.decode_pairs) == (
        decode_rows,
        context,
        decode_pairs,
    )
    assert shape.n_tokens == rows + decode_rows
    assert shape.n_sequences == sum(chunk.count for chunk in chunks)
    drawn = [(chunk.count, chunk.new_tokens if chunk.phase is Phase.DECODE else 1) for chunk in chunks if chunk.samples]
    assert shape.n_logits_rows == sum(count * rows for count, rows in drawn), "a decode row is drawn from, drafts too"


def test_a_step_of_thousands_of_prompts_is_no_recursion() -> None:
    """Each admitted prompt adds a link; comparing, printing and walking must not need a deep stack."""
    shape = StepShape(())
    for _ in range(5000):
        shape = shape.plus(ChunkShape(Phase.PREFILL, 1, 0, True))
    assert shape == StepShape([ChunkShape(Phase.PREFILL, 1, 0, True)] * 5000)
    assert len(repr(shape)) > 5000


@given(st.lists(st.integers(0, 10_000), max_size=9), st.integers(0, 40))
def test_tokens_that_are_counted_beforehand_are_the_same_shape(starts: list[int], n_steps: int) -> None:
    """A step of nothing but tokens is put together without looking at each; every sum is that of its chunks."""
    chunks = [ChunkShape(Phase.DECODE, 1, start, True) for start in starts]
    quick, plain = StepShape.tokens(chunks, sum(starts) + len(starts)), StepShape(chunks)
    more = ChunkShape(Phase.PREFILL, 5, 7, True)
    for one, other in (
        (quick, plain),
        (quick.later(n_steps), plain.later(n_steps)),
        (quick.plus(more), plain.plus(more)),
    ):
        for name in StepShape.__slots__:
            assert getattr(one, name) == getattr(other, name), name
