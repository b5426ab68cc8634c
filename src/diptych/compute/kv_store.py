"""Where keys and values live. Control owns block ids; a KVStore owns their bytes, in a layout of its own.

Legend: N pool blocks, P tokens per block, K kv heads, T tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from diptych.ground.errors import CapacityError


class KVStore(Protocol):
    """The paged cache of one model. Blocks 0 .. n_blocks - 1; a block holds block_tokens tokens in every layer."""

    @property
    def n_blocks(self) -> int:
        """N."""
        ...

    @property
    def block_tokens(self) -> int:
        """P."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """Have the system provide the pool's memory now instead of at first writes; may take seconds, beside steps."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        ...

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, each [K, T, d]; copies."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [K, T, d] as the first T tokens of block_ids."""
        ...


class TorchKVStore:
    """One tensor per layer, [2, N, P, K, d], on the model's device. Zeroed, so that masked slots hold no NaN."""

    def __init__(
        self,
        *,
        n_layers: int,
        n_blocks: int,
        block_tokens: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_blocks = n_blocks
        self.block_tokens = block_tokens
        shape = (2, n_blocks, block_tokens, n_kv_heads, head_dim)
        try:
            self.layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            per_block = 2 * n_layers * block_tokens * n_kv_heads * head_dim * dtype.itemsize
            raise CapacityError(
                f"the KV cache of {n_blocks} blocks needs {n_blocks * per_block} bytes, which {device} does not have",
                hint="ask for a smaller max_context_tokens or kv_memory_bytes",
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.layers)

    def back_memory(self, wants_stop: Callable[[], bool]) -> None:
        """Nothing to do: torch owns the memory."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block target in every layer, in the order of the pairs."""
        for layer in self.layers:
            for source, target in pairs:
                layer[:, target].copy_(layer[:, source])

    def read(self, layer: int, block_ids: Sequence[int], n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the first n_tokens of a sequence that lies in block_ids, each [K, T, d]; copies."""
        data = self.layers[layer]
        blocks = data[:, torch.as_tensor(block_ids, dtype=torch.long, device=data.device)]  # [2, n, P, K, d]
        tokens = blocks.flatten(1, 2)[:, :n_tokens].transpose(1, 2).contiguous()
        return tokens[0], tokens[1]

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [K, T, d] as the first T tokens of block_ids."""
        data = self.layers[layer]
        positions = torch.arange(keys.shape[1], device=data.device)
        blocks = torch.as_tensor(block_ids, dtype=torch.long, device=data.device)[positions // self.block_tokens]
        both = torch.stack([keys, values]).to(device=data.device, dtype=data.dtype)
        data[:, blocks, positions % self.block_tokens] = both.transpose(1, 2)
