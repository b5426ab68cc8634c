"""Random weights in codes, as another program's file would have them: for measuring the kernels that hold those."""

from __future__ import annotations

import torch

from diptych.compute.loading.random_weights import RANDOM_BLOCK, RandomSource, RandomTensor
from diptych.compute.ops.contract_parts import Codes
from diptych.compute.ops.torch.device_codes import SCALE_DTYPES
from diptych.ground.formats import KEPT_BITS, KeptFormat


class CodedRandomTensor(RandomTensor):
    """A matrix in codes of `kept`, with plain scales; values are of order 1 / sqrt(inputs)."""

    def __init__(self, name: str, shape: tuple[int, ...], seed: int, kept: KeptFormat) -> None:
        super().__init__(name, shape, seed)
        self.kept = kept

    def codes(self) -> Codes:
        """A block of random ones, again and again."""
        assert self.kept is not None
        assert self.random_seed is not None
        (n, k), kept = self.shape, self.kept
        draw = torch.Generator().manual_seed(self.random_seed)
        bits = KEPT_BITS.get(kept.kind, 8)
        block = torch.randint(0, 1 << bits, (RANDOM_BLOCK,), generator=draw, dtype=torch.uint8)
        if kept.kind == "fp8":
            block &= 0xB7  # of order one
        shape = (n, -(-k // kept.group) if kept.group else 1)
        size = k**-0.5 * (1.0 if kept.kind == "fp8" else 4.0 / (1 << bits))
        scales = torch.full(shape, size, dtype=SCALE_DTYPES[kept.scale])
        offsets = {
            "zeros": torch.full(shape, 1 << (bits - 1), dtype=torch.uint8),
            "minima": -scales.float() * (1 << (bits - 1)),
        }.get(kept.grid)
        return Codes(codes=block.repeat(-(-n * k // RANDOM_BLOCK))[: n * k].view(n, k), scales=scales, offsets=offsets)


class CodedRandomSource(RandomSource):
    """As RandomSource, with every matrix of the layers in codes of `kept`."""

    is_keeping = True

    def __init__(self, seed: int, kept: KeptFormat) -> None:
        super().__init__(seed)
        self._kept = kept

    def tensor(self, name: str, *shape: int) -> RandomTensor:
        """The random tensor of that name."""
        plain = super().tensor(name, *shape)
        if len(shape) != 2 or ".layers." not in name or plain.random_seed is None:
            return plain
        return CodedRandomTensor(name, shape, plain.random_seed, self._kept)
