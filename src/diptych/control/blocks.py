"""The KV pool as integers: reference counts, the free list, and the prefix index over full blocks.

Every block is in exactly one of three states:

    # free    in the free list, contents worthless
    # held    referenced by one or more block tables (it may be in the prefix index too)
    # idle    referenced by none, still in the prefix index; evicted in least-recently-used order

A prefix-index entry is found by the SHA-256 chain over (model revision, salt and adapter, tokens), and believed only when its
token ids, its salt and its predecessor agree as well, so a digest collision is a miss and never a wrong answer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import NamedTuple

from diptych.ground.errors import BlockLeak
from diptych.ground.request import CacheScope

ROOT_SERIAL = 0


class PrefixEntry(NamedTuple):
    """One full block in the prefix index. `previous_serial` is the entry of the block before it (0: none)."""

    digest: bytes
    token_ids: tuple[int, ...]
    salt: CacheScope
    previous_serial: int
    serial: int
    block_id: int


_new = tuple.__new__  # of a NamedTuple, in half the time: an entry is made with every block


@lru_cache(maxsize=1024)  # asked for with every block of a step
def root_digest(model_revision: str, salt: CacheScope) -> bytes:
    """The start of a chain. Lengths are part of it, so no two of (revision, adapter's revision, salt) share one."""
    adapter, own = salt if isinstance(salt, tuple) else ("", salt)
    revision_bytes, adapter_bytes = model_revision.encode(), adapter.encode()
    salt_bytes = b"" if own is None else b"+" + own.encode()
    head = f"diptych {len(revision_bytes)} {len(adapter_bytes)} {len(salt_bytes)} ".encode()
    return hashlib.sha256(head + revision_bytes + adapter_bytes + salt_bytes).digest()


def next_digest(previous: bytes, token_ids: SequenceOf[int]) -> bytes:
    """The chain one block further."""
    return hashlib.sha256(previous + array("q", token_ids).tobytes()).digest()


def chain(token_ids: SequenceOf[int], root: bytes, block_tokens: int, n_blocks: int) -> list[bytes]:
    """The digests of the first n_blocks full blocks."""
    digests: list[bytes] = []
    for i in range(n_blocks):
        block = token_ids[i * block_tokens : (i + 1) * block_tokens]
        digests.append(next_digest(digests[-1] if digests else root, block))
    return digests


class BlockPool:
    """Owns block ids 0 .. n_blocks - 1; compute owns their bytes."""

    def __init__(self, *, n_blocks: int, block_tokens: int, is_caching: bool = True) -> None:
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.is_caching = is_caching
        self.next_digest = next_digest  # a simulator, whose tokens nobody chose to collide, puts a cheaper one here
        self.n_drops = 0  # how often a block was dropped; a parked admission looks again when this moves
        self._refs = [0] * n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, PrefixEntry] = {}
        self._entries: list[PrefixEntry | None] = [None] * n_blocks
        self._next_serial = n_blocks or 1  # serials of a block's entries are its id modulo the number of blocks

    @property
    def available_blocks(self) -> int:
        """Blocks that `take` can hand out now: free and idle."""
        return len(self._free) + len(self._idle)

    @property
    def n_registered(self) -> int:
        """Blocks that entered the prefix index so far."""
        return self._next_serial // self.n_blocks if self.n_blocks else 0

    @property
    def free_blocks(self) -> int:
        """Blocks with worthless contents."""
        return len(self._free)

    @property
    def idle_blocks(self) -> int:
        """Blocks kept only for the prefix index."""
        return len(self._idle)

    @property
    def held_blocks(self) -> int:
        """Blocks referenced by at least one table."""
        return self.n_blocks - len(self._free) - len(self._idle)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that `n_tokens` tokens fill, the last one perhaps partly."""
        return -(-n_tokens // self.block_tokens)

    def references(self, block_id: int) -> int:
        """How many tables hold this block."""
        return self._refs[block_id]

    def take(self, n: int) -> list[int]:
        """Hand out `n` blocks with one reference each, evicting idle ones when none is free.

        The caller has checked `available_blocks`; asking for more is a bug of ours.
        """
        assert n <= self.available_blocks, (n, self.available_blocks)
        taken = self._free[: -n - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        evict, forget = self._idle.popitem, self._forget
        for _ in range(n - len(taken)):
            block_id, _ = evict(last=False)
            forget(block_id)
            taken.append(block_id)
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def hold(self, block_id: int) -> None:
        """Add a reference to a held or idle block."""
        if self._refs[block_id] == 0:
            del self._idle[block_id]
        self._refs[block_id] += 1

    def drop(self, block_id: int) -> None:
        """Remove one reference; the last one makes the block idle (if indexed) or free."""
        if self._refs[block_id] <= 0:
            raise BlockLeak(f"block {block_id} was dropped more often than held")
        self.n_drops += 1
        self._refs[block_id] -= 1
        if self._refs[block_id] > 0:
            return
        if self._entries[block_id] is None:
            self._free.append(block_id)
        else:
            self._idle[block_id] = None

    def is_idle(self, block_id: int) -> bool:
        """Whether only the prefix index keeps this block."""
        return block_id in self._idle

    def match(
        self, token_ids: SequenceOf[int], *, salt: CacheScope, digests: list[bytes], root: bytes, max_blocks: int
    ) -> list[PrefixEntry]:
        """The longest indexed chain of leading full blocks, at most `max_blocks`; holds nothing.

        digests is extended by the chain computed on the way, for later use by `register`.
        """
        found: list[PrefixEntry] = []
        if not self.is_caching:
            return found
        size, index, previous, known = self.block_tokens, self._index, ROOT_SERIAL, len(digests)
        for i in range(max_blocks):
            if i >= known:
                known = min(max_blocks, 2 * i + 4)  # more at a time, the longer the chain is found
                self._extend(digests, known, token_ids, root)
            entry = index.get(digests[i])
            if entry is None:
                break
            _, tokens, its_salt, its_previous, serial, _ = entry
            if its_previous != previous or its_salt != salt or tokens != tuple(token_ids[i * size : (i + 1) * size]):
                break
            found.append(entry)
            previous = serial
        return found

    def register(
        self,
        block_ids: SequenceOf[int],
        end: int,
        *,
        serials: list[int | None],
        token_ids: SequenceOf[int],
        salt: CacheScope,
        digests: list[bytes],
        root: bytes,
    ) -> None:
        """Offer the computed full blocks len(serials) .. end - 1 of a sequence to the index; serials gets their entries'.

        An equal block that is indexed already stays; a colliding one stays too, and None tells that this chain ends.
        """
        if not self.is_caching:
            serials += [None] * (end - len(serials))
            return
        size, index = self.block_tokens, self._index
        previous = serials[-1] if serials else ROOT_SERIAL
        if previous is not None:
            self._extend(digests, end, token_ids, root)
        for i in range(len(serials), end):
            if previous is None:
                serials += [None] * (end - i)
                return
            digest = digests[i]
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            entry = index.get(digest)
            if entry is not None:
                _, its_tokens, its_salt, its_previous, serial, _ = entry
                if its_previous == previous and its_salt == salt and its_tokens == tokens:
                    previous = serial
                    serials.append(previous)
                    continue
                if its_previous == ROOT_SERIAL or self._is_live(its_previous):
                    previous = None
                    serials.append(None)
                    continue
                self._discard(entry.block_id)  # its predecessor was evicted, so no walk can reach it any more
            block_id = block_ids[i]
            serial = self._next_serial + block_id
            entry = _new(PrefixEntry, (digest, tokens, salt, previous, serial, block_id))
            index[digest] = self._entries[block_id] = entry
            self._next_serial += self.n_blocks
            previous = serial
            serials.append(serial)

    def reset_index(self) -> None:
        """Forget every prefix; idle blocks become free, held ones stay held."""
        for block_id in range(self.n_blocks):
            if self._entries[block_id] is not None:
                self._discard(block_id)

    def check(self, tables: SequenceOf[SequenceOf[int]]) -> None:
        """Raise BlockLeak unless free + held + idle is the pool and the references are exactly those of `tables`."""
        counts = [0] * self.n_blocks
        for table in tables:
            for block_id in table:
                counts[block_id] += 1
        if counts != self._refs:
            wrong = [b for b in range(self.n_blocks) if counts[b] != self._refs[b]]
            raise BlockLeak(f"{len(wrong)} of {self.n_blocks} blocks have a wrong reference count, first {wrong[0]}")
        held = {b for b in range(self.n_blocks) if counts[b] > 0}
        free, idle = set(self._free), set(self._idle)
        is_partition = len(held) + len(self._free) + len(idle) == self.n_blocks and not (held & free or held & idle)
        if not is_partition or free & idle or len(free) != len(self._free):
            raise BlockLeak(f"{len(held)} held, {len(free)} free and {len(idle)} idle are not {self.n_blocks} blocks")
        indexed = {b for b in range(self.n_blocks) if self._entries[b] is not None}
        if any(len(entry.token_ids) != self.block_tokens for entry in self._index.values()):
            raise BlockLeak(f"an index entry does not hold {self.block_tokens} tokens")
        if not idle <= indexed or indexed & free or len(self._index) != len(indexed):
            raise BlockLeak(f"{len(indexed)} indexed blocks do not agree with {len(self._index)} index entries")

    def _extend(self, digests: list[bytes], end: int, token_ids: SequenceOf[int], root: bytes) -> None:
        """Make `digests` the chain of the first `end` blocks at least."""
        size, next_digest, start = self.block_tokens, self.next_digest, len(digests)
        previous = digests[-1] if digests else root
        for at in range(start * size, end * size, size):
            previous = next_digest(previous, token_ids[at : at + size])
            digests.append(previous)

    def _is_live(self, serial: int) -> bool:
        """Whether the entry with this serial is still indexed."""
        entry = self._entries[serial % self.n_blocks]
        return entry is not None and entry.serial == serial

    def _forget(self, block_id: int) -> None:
        entry = self._entries[block_id]
        assert entry is not None, block_id
        del self._index[entry.digest]
        self._entries[block_id] = None

    def _discard(self, block_id: int) -> None:
        """Take a block out of the index, and out of idle if it was there."""
        self._forget(block_id)
        if block_id in self._idle:
            del self._idle[block_id]
            self._free.append(block_id)
