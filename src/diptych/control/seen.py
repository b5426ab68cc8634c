"""What an engine's prefix cache is likely to hold, as seen from outside: the prompts it was sent, by their digests.

A guess, for the router alone: the engine looks for itself, and nothing is believed here that it does not find there.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from diptych.control.blocks import chain, root_digest
from diptych.ground.request import CacheScope


class SeenPrefixes:
    """Digests of at most n_blocks full blocks, those used longest ago going first, as an engine's pool drops them."""

    def __init__(self, *, model_revision: str, block_tokens: int, n_blocks: int) -> None:
        self._revision = model_revision
        self._block_tokens = block_tokens
        self._n_blocks = n_blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def prefix_match(
        self, token_ids: tuple[int, ...], salt: CacheScope = None, *, digests: list[bytes] | None = None
    ) -> int:
        """Leading tokens that are likely to be cached there; see `router.Cache`."""
        known = [] if digests is None else digests
        if not known:
            known += self._chain(token_ids, salt)
        most = max(0, len(token_ids) - 1) // self._block_tokens
        n_blocks = 0
        for digest in islice(known, most):
            if digest not in self._seen:
                break
            n_blocks += 1
        return n_blocks * self._block_tokens

    def add(self, token_ids: tuple[int, ...], salt: CacheScope = None) -> None:
        """These tokens are read there."""
        seen = self._seen
        for digest in reversed(self._chain(token_ids, salt)):  # the head of a prefix is kept longest
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._n_blocks:
            seen.popitem(last=False)

    def clear(self) -> None:
        """It holds nothing any more."""
        self._seen.clear()

    def _chain(self, token_ids: tuple[int, ...], salt: CacheScope) -> list[bytes]:
        n_blocks = len(token_ids) // self._block_tokens
        return chain(token_ids, root_digest(self._revision, salt), self._block_tokens, n_blocks)
