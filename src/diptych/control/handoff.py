"""Between two engines: one reads a prompt and keeps its blocks while they are sent, the other holds as many for them.

What does not come is read where the answer is written, so nothing here can lose a token: a hand-off only moves work.
"""

from __future__ import annotations

from diptych.control.scheduler import Scheduler
from diptych.control.sequence import Sequence
from diptych.ground.events import TransferEvent
from diptych.ground.phase import Status


def start_sending(scheduler: Scheduler, seq: Sequence) -> None:
    """Its prompt is computed, and somebody else will answer it."""
    seq.move(Status.SENDING)
    scheduler.prefilling.remove(seq)


def reserve(scheduler: Scheduler, seq: Sequence) -> int | None:
    """Hold blocks for a prompt that another engine reads; answers how many of its tokens are here. None: no room."""
    hits, pool = scheduler.lookup(seq), scheduler.pool
    if scheduler.waiting or not scheduler.has_blocks_for(seq, hits):
        return None  # who was here before goes first
    if scheduler.states is not None and not scheduler.states.expect(seq):
        return None
    seq.move(Status.RECEIVING)
    for entry in hits:
        pool.hold(entry.block_id)
        seq.block_ids.append(entry.block_id)
        seq.serials.append(entry.serial)
    seq.block_ids += pool.take(pool.blocks_for(seq.known_tokens) - len(hits))
    return len(hits) * pool.block_tokens


def settle(scheduler: Scheduler, seq: Sequence, n_tokens: int, now_s: float, *, has_state: bool) -> TransferEvent:
    """The leading n_tokens, whole blocks, have their keys and values: put it in line with them, and give other blocks back.

    Where sequences have states they are worth nothing without the one behind them: then it begins as any other does.
    The event says how many of them were here and how many came, counting none that were accounted for before.
    """
    pool = scheduler.pool
    before, cached = seq.peak_computed_tokens, len(seq.serials) * pool.block_tokens
    assert cached <= n_tokens < seq.known_tokens, (cached, n_tokens, seq.known_tokens)
    if scheduler.states is not None and not (has_state and n_tokens):
        scheduler.release(seq)
        before = cached = n_tokens = 0
    while len(seq.block_ids) * pool.block_tokens > n_tokens:
        pool.drop(seq.block_ids.pop())
    if seq.block_ids:  # else it is looked up once more when it is admitted, and counted then
        scheduler.count_hits(seq, len(seq.serials))
        seq.advance(n_tokens)
        scheduler.register_computed(seq)
    seq.move(Status.WAITING)
    scheduler.enqueue(seq)
    of_here, came = max(0, cached - before), max(0, n_tokens - max(cached, before))
    return TransferEvent(
        request_id=seq.request.request_id,
        at_s=now_s,
        cached_tokens=of_here,
        transferred_tokens=came,
        recomputed_tokens=n_tokens - of_here - came,
    )


def state_behind(scheduler: Scheduler, seq: Sequence, n_tokens: int) -> int | None:
    """The place of the state behind so many of its tokens, whole blocks; None where none was kept."""
    n = n_tokens // scheduler.pool.block_tokens
    serial = seq.serials[n - 1] if 0 < n <= len(seq.serials) else None
    return None if scheduler.states is None or serial is None else scheduler.states.pool.place_of(serial)
