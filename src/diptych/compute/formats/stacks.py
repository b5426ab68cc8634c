"""Experts stacked in one quantised tensor [E, n, k], as transformers 5 saves mixtures in fp8, as one matrix each.

Beside `experts.gate_up_proj` lies `experts.gate_up_proj_scale_inv`: [E, blocks of rows, blocks of inputs], [E, 1, 1], [E], one
number, or [E, 2, 1], where gate and up have a scale each. Source: transformers 5.23 (`integrations/finegrained_fp8.py`,
FP8Experts and Fp8Dequantize).
"""

from __future__ import annotations

import torch

from diptych.compute.formats.matrices import RawTensors
from diptych.ground.errors import LoadError


class Entry:
    """One of stacked tensors, as `RawTensors`."""

    def __init__(self, raw: RawTensors, index: int) -> None:
        self._raw, self.index = raw, index

    def holds(self, name: str) -> bool:
        """Whether the stack is there."""
        return self._raw.holds(name)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Without the axis of the stack. LoadError where the stack has no such entry."""
        shape, dtype = self._raw.header(name)
        if not shape or shape[0] <= self.index:
            raise LoadError(
                f"tensor {name} has {shape[0] if shape else 0} entries; entry {self.index} is asked for",
                hint="config.json contradicts the weights; they must come from the same model",
            )
        return shape[1:], dtype

    def stored(self, name: str) -> torch.Tensor:
        """A view."""
        return self._raw.stored(name)[self.index]


class Fp8Entry:
    """One matrix [n, k] of a stack of fp8, as `RawTensors`. block_rows: that share a scale, None without."""

    def __init__(self, raw: RawTensors, stack: str, index: int, block_rows: int | None) -> None:
        self._raw, self._entry, self._stack = raw, Entry(raw, index), stack
        self._n_entries, self._n_rows = raw.header(stack)[0][:2]
        self._has_halves = self._n_rows % 2 == 0 and (block_rows is None or self._n_rows <= block_rows)

    def _is_of_all(self, name: str) -> bool:
        return name != self._stack and self._n_entries != 1 and self._raw.header(name)[0] in ((), (1,))

    def _is_of_halves(self, name: str) -> bool:
        """Whether gate and up have a scale each."""
        return name != self._stack and self._has_halves and self._entry.header(name)[0] == (2, 1)

    def holds(self, name: str) -> bool:
        """Whether the stack is there."""
        return self._raw.holds(name)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Of scales of gate and up, those of each row."""
        if self._is_of_all(name):
            return (), self._raw.header(name)[1]
        shape, dtype = self._entry.header(name)
        if name != self._stack and self._raw.header(name)[0][0] != self._n_entries:
            raise LoadError(
                f"tensor {name} has {self._raw.header(name)[0][0]} entries for {self._n_entries} experts",
                hint="config.json contradicts the weights; they must come from the same model",
            )
        return ((self._n_rows, 1) if self._is_of_halves(name) else shape), dtype

    def stored(self, name: str) -> torch.Tensor:
        """A view, but of scales of rows."""
        if self._is_of_all(name):
            return self._raw.stored(name).reshape(())
        stored = self._entry.stored(name)
        return stored.repeat_interleave(self._n_rows // 2, 0) if self._is_of_halves(name) else stored
