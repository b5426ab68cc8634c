"""BlockPool: reference counts, eviction order, and a prefix index that never believes a digest alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.control import blocks
from diptych.control.blocks import BlockPool, root_digest
from diptych.ground.errors import BlockLeak

P = 4


def put(pool, tokens, *, salt=None, root=None):
    """Compute and register every full block of `tokens`; answers the held block ids."""
    root = root or root_digest("toy", salt)
    ids = pool.take(len(tokens) // pool.block_tokens)
    pool.register(ids, len(ids), serials=[], token_ids=tokens, salt=salt, digests=[], root=root)
    return ids


def found(pool, tokens, *, salt=None, root=None):
    root = root or root_digest("toy", salt)
    max_blocks = len(tokens) // pool.block_tokens
    entries = pool.match(tokens, salt=salt, digests=[], root=root, max_blocks=max_blocks)
    return [entry.block_id for entry in entries]


def drop_all(pool, ids):
    for block_id in reversed(ids):
        pool.drop(block_id)


def test_dropped_blocks_stay_findable_until_evicted():
    """A finished request leaves its prefix for the next one; a take evicts the longest unused first."""
    pool = BlockPool(n_blocks=4, block_tokens=P)
    first, second = list(range(8)), list(range(50, 58))
    first_ids, second_ids = put(pool, first), put(pool, second)
    drop_all(pool, first_ids)
    drop_all(pool, second_ids)
    assert (pool.free_blocks, pool.idle_blocks, pool.held_blocks) == (0, 4, 0)
    assert found(pool, first) == first_ids
    pool.take(1)
    assert found(pool, first) == first_ids[:1], "the tail of the older prefix goes first"
    assert found(pool, second) == second_ids
    pool.check([[first_ids[1]]])


def test_salts_and_revisions_keep_apart():
    """One tenant must not learn from timing what another one asked."""
    pool = BlockPool(n_blocks=8, block_tokens=P)
    tokens = list(range(8))
    put(pool, tokens, salt="a")
    assert len(found(pool, tokens, salt="a")) == 2
    assert found(pool, tokens, salt="b") == found(pool, tokens) == []
    put(pool, tokens, salt=("adapter", "a"))
    assert len(found(pool, tokens, salt=("adapter", "a"))) == 2
    for other in (("adapter", None), ("other", "a"), "adapter", ("a", None), ("adapter+a", None), "adapter+a"):
        assert found(pool, tokens, salt=other) == []
    assert root_digest("m", None) != root_digest("m", "")
    assert root_digest("m1", "2") != root_digest("m", "12") != root_digest("m", "+12")
    assert root_digest("m", None) != root_digest("n", None)


def test_a_digest_collision_is_a_miss(monkeypatch):
    """With every digest equal, token ids, salt and predecessor must still tell blocks apart."""
    monkeypatch.setattr(blocks, "next_digest", lambda previous, token_ids: bytes([len(previous) % 2]))
    pool = BlockPool(n_blocks=8, block_tokens=P)
    root = b"same"
    ids = put(pool, [1, 2, 3, 4], root=root, salt="a")
    assert found(pool, [1, 2, 3, 4], root=root, salt="a") == ids
    assert found(pool, [1, 2, 3, 5], root=root, salt="a") == []
    assert found(pool, [1, 2, 3, 4], root=root, salt="b") == []
    other = put(pool, [9, 9, 9, 9], root=root, salt="a")
    assert found(pool, [9, 9, 9, 9], root=root, salt="a") == []
    pool.check([ids, other])


def test_equal_block_behind_another_past_is_a_miss(monkeypatch):
    """Same tokens, same digest, different predecessor: the KV differs, so it must not hit."""
    monkeypatch.setattr(blocks, "next_digest", lambda previous, token_ids: bytes(token_ids))
    pool = BlockPool(n_blocks=8, block_tokens=2)
    ids = put(pool, [1, 1, 7, 7], root=b"r")
    put(pool, [2, 2], root=b"r")
    assert found(pool, [1, 1, 7, 7], root=b"r") == ids
    assert len(found(pool, [2, 2, 7, 7], root=b"r")) == 1


def test_entry_behind_an_evicted_one_is_replaced():
    """A block whose predecessor left the index can never be reached; it must not keep its successor out."""
    pool = BlockPool(n_blocks=3, block_tokens=P)
    tokens = list(range(8))
    ids = put(pool, tokens)
    pool.drop(ids[0])
    pool.take(1)
    evicted = pool.take(1)  # takes the head of the prefix, its tail is still held
    assert evicted == [ids[0]]
    drop_all(pool, [ids[1], evicted[0]])
    again = put(pool, tokens)
    assert found(pool, tokens) == again
    assert len(again) == 2


def test_dropping_too_often_is_a_leak():
    """A double free must be loud, not a block with two owners."""
    pool = BlockPool(n_blocks=2, block_tokens=P)
    (block_id,) = pool.take(1)
    pool.drop(block_id)
    with pytest.raises(BlockLeak, match="more often than held"):
        pool.drop(block_id)


def test_check_sees_a_lost_reference():
    """The balance check itself must be able to fail."""
    pool = BlockPool(n_blocks=2, block_tokens=P)
    ids = pool.take(1)
    pool.check([ids])
    with pytest.raises(BlockLeak, match="wrong reference count"):
        pool.check([])
    with pytest.raises(BlockLeak, match="wrong reference count"):
        pool.check([ids, ids])


def test_reset_frees_idle_and_keeps_held():
    pool = BlockPool(n_blocks=4, block_tokens=P)
    kept, gone = put(pool, list(range(8))), put(pool, list(range(20, 28)))
    drop_all(pool, gone)
    pool.reset_index()
    assert found(pool, list(range(8))) == found(pool, list(range(20, 28))) == []
    assert (pool.free_blocks, pool.held_blocks) == (2, 2)
    pool.check([kept])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_any_order_of_calls_balances(calls):
    """Take, share, drop, look up and reset in any order: free + held + idle is the pool."""
    pool = BlockPool(n_blocks=6, block_tokens=2)
    tables = []
    for kind, which, size in calls:
        tokens = [which // 2] * 2 * size
        if kind == 0 and pool.available_blocks >= size:
            tables.append(put(pool, tokens))
        elif kind == 1:
            hits = found(pool, tokens)
            for block_id in hits:
                pool.hold(block_id)
            tables.append(hits)
        elif kind == 2 and tables:
            drop_all(pool, tables.pop(which % len(tables)))
        elif kind == 3 and which == 0:
            pool.reset_index()
        pool.check(tables)
