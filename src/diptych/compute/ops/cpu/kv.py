"""The native KV cache behind the KVStore interface."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from diptych.compute.kv_store import KVHeader, KVPayload, said_once
from diptych.compute.ops.cpu.kernels import _cpu, refuse_block
from diptych.ground.errors import CapacityError

logger = logging.getLogger("diptych.compute")

# csrc/memory/kv_cache.h; the number is raised when that changes
LAYOUT = "cpu 1: {n_kv_heads} heads of {width}, K [P/16][d/2][16][2], V [P/2][dv][2]"
LATENT_LAYOUT = "cpu 1: latents of {width}, [P/16][d/2][16][2]"
INDEX_LAYOUT = "keys of an index of {width}, [P/16][d/2][16][2]"
CHOSEN_LAYOUT = "cpu 1: latents of {attended}, [P][d], keys of an index of {index_dim}, [P/16][i/2][16][2]"
ENTRIES_LAYOUT = (
    "cpu 1: rows of {attended}, [P + P/{shared_by}][d], keys of an index of {index_dim}, [P/16][i/2][16][2]"
)
BACKED_BYTES = 2 << 20  # a huge page asked for at a time: milliseconds, in which who needs new memory may have to wait


def layout_of(cache: dict[str, Any]) -> str:
    """How a block of such a cache lies."""
    if any(order for _, _, _, *order in cache["heads"]):
        said = []
        for _, width, _, *order in cache["heads"]:
            if not order:
                said.append(INDEX_LAYOUT.format(width=width))
                continue
            attended, *shared_by = order
            behind = width - attended - sum(attended // one for one in shared_by)
            layout = ENTRIES_LAYOUT if shared_by else CHOSEN_LAYOUT
            said.append(layout.format(attended=attended, index_dim=behind, shared_by=sum(shared_by)))
        return said_once(said)
    alone = INDEX_LAYOUT if any(dv for _, _, dv, *_ in cache["heads"]) else LATENT_LAYOUT
    return said_once(
        [
            (LAYOUT if dv else alone).format(n_kv_heads=n, width=d if dv in (0, d) else f"{d} and {dv}")
            for n, d, dv, *_ in cache["heads"]
        ]
    )


class CpuKVStore:
    """The native cache behind the KVStore interface."""

    def __init__(
        self,
        cache: dict[str, Any],
        *,
        n_blocks: int,
        block_tokens: int,
        nodes: Sequence[int] = (),
        revision: str = "",
        state_floats: Sequence[int] = (),
        n_places: int = 1,
    ) -> None:
        refuse_block(block_tokens)
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        self.n_places = n_places if state_floats else 0
        beside = f" and {self.n_places} states {self.n_places * sum(state_floats) * 4}" if state_floats else ""
        self._heads = list(cache["heads"])
        try:
            self.native = _cpu.KvCache(n_blocks=n_blocks, block_tokens=block_tokens, **cache)
            if state_floats:
                self.native.add_states(list(state_floats), n_places)
            # any thread may meet any block
            if len(nodes) > 1 and self._heads and not self.native.interleave(list(nodes)):
                logger.warning(
                    "the KV cache stays where it is first written: the system refused to deal it out over nodes"
                )
        except MemoryError as error:
            per_block = _cpu.kv_bytes_per_block(block_tokens=block_tokens, **cache)
            raise CapacityError(
                f"the KV cache of {n_blocks} blocks needs {n_blocks * per_block} bytes{beside}, which this machine "
                "does not have",
                hint="ask for a smaller max_context_tokens or kv_memory_bytes",
            ) from error

        self.header = KVHeader(
            revision=revision,
            layout=layout_of(cache),
            dtype=cache["format"],
            n_layers=len(self._heads),
            block_tokens=block_tokens,
            block_bytes=int(self.native.block_bytes),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self.native.nbytes + self.native.state_bytes)

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """A huge page that is first written inside a step holds every stream for milliseconds, so servers ask ahead.

        Blocks that are handed out first come first, in all layers: a step writes to every layer.
        """
        layers = list(pairwise(self.native.begins))
        for at in range(0, max((end - begin for begin, end in layers), default=0), BACKED_BYTES):
            for begin, end in layers:
                if wants_stop():
                    return
                if begin + at < end:
                    self.native.back(begin + at, min(begin + at + BACKED_BYTES, end))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        self.native.copy_blocks([list(pair) for pair in pairs])

    def export_blocks(self, block_ids: Sequence[int], out: np.ndarray | None = None) -> KVPayload:
        """The bytes of these blocks in every layer; a copy, in `out` [>= N, block_bytes] where that is given."""
        n = len(block_ids)
        data = np.empty((n, self.header.block_bytes), dtype=np.uint8) if out is None else out[:n]
        checksums = self.native.export_checked(np.asarray(block_ids, dtype=np.int32), data)
        return KVPayload(header=self.header, checksums=tuple(checksums), data_NB=data)

    def import_blocks(self, block_ids: Sequence[int], payload: KVPayload) -> None:
        """Take in blocks that an equal store exported. TransferError unless all of them are right: see KVStore."""
        payload.check_form(self.header, len(block_ids))
        ids = np.asarray(block_ids, dtype=np.int32)
        payload.check_sums(self.native.import_checked(ids, np.ascontiguousarray(payload.data_NB)))

    def read(
        self, layer: int, block_ids: Sequence[int] | np.ndarray, n_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, [K, T, d] and [K, T, dv] fp32; copies."""
        n_heads, d, dv, *_ = self._heads[layer]
        keys, values = (torch.empty((n_heads, n_tokens, width), dtype=torch.float32) for width in (d, dv or d))
        self.native.read(layer, np.asarray(block_ids, dtype=np.int32), keys.numpy(), values.numpy())
        return keys, values

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [K, T, d] and values [K, T, dv] as the first T tokens of block_ids."""
        self.native.write(
            layer,
            np.asarray(block_ids, dtype=np.int32),
            keys.to(torch.float32).contiguous().numpy(),
            values.to(torch.float32).contiguous().numpy(),
        )

    def read_state(self, place: int) -> torch.Tensor:
        """As the kernels have it."""
        state = torch.empty(int(self.native.place_floats), dtype=torch.float32)
        self.native.read_state(place, state.numpy())
        return state

    def write_state(self, place: int, state: torch.Tensor) -> None:
        """As the kernels have it."""
        self.native.write_state(place, state.to(torch.float32).contiguous().numpy())
