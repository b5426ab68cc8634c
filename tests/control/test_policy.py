"""The order of service and the length of a chunk."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.control.policy import RankedList, longest_within, rank_of
from diptych.control.sequence import Sequence

from .toy import request


def sequence(seq_id, rank):
    return Sequence(seq_id=seq_id, index=0, request=request(), rank=rank, seed=0, max_output_tokens=3)


def test_a_level_of_priority_is_worth_its_aging_time():
    """A low priority that waits long enough goes first, so nobody starves under a stream of higher ones."""
    old_low = rank_of(arrival_s=0.0, priority=0, aging_s=2.0)
    assert rank_of(arrival_s=1.9, priority=1, aging_s=2.0) < old_low
    assert rank_of(arrival_s=2.1, priority=1, aging_s=2.0) > old_low
    assert rank_of(arrival_s=1.0, priority=0, aging_s=2.0) > old_low


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.booleans()), max_size=30))
def test_ranked_list_is_a_sorted_list(entries):
    """Order, ends, membership and successors are those of a plain sort."""
    ranked, kept = RankedList(), []
    for seq_id, (rank, stays) in enumerate(entries):
        seq = sequence(seq_id, rank)
        ranked.add(seq)
        if stays:
            kept.append(seq)
        else:
            ranked.remove(seq)
            assert not ranked.holds(seq)
    kept.sort(key=lambda seq: (seq.key[0], seq.seq_id))
    assert list(ranked) == kept
    assert (ranked.first, ranked.last) == ((kept[0], kept[-1]) if kept else (None, None))
    assert ranked.after(None) is ranked.first
    for seq, successor in zip(kept, [*kept[1:], None][: len(kept)], strict=True):
        assert ranked.after(seq.key) is successor


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 400))
def test_longest_within_is_the_best_of_all_candidates(limit, quantum, bound):
    """Bisection finds what trying every candidate finds."""
    candidates = [limit, *range(0, limit, quantum)]
    best = max((n for n in candidates if n <= bound), default=0)
    assert longest_within(limit=limit, quantum=quantum, is_within=lambda n: n <= bound) == best


def test_longest_within_only_answers_what_was_accepted():
    """A predictor that is not monotone may cost length, never the budget."""
    accepted = {16, 80}
    n = longest_within(limit=100, quantum=16, is_within=lambda n: n in accepted)
    assert n in accepted | {0}
