"""Projections packed into a native program, from whatever there is: values, codes of a file, a seed, or packed before.

    packer = Packer(program, source, config, threads_on=placement, n_ranks=1)
    handle = packer.pack(parts, "int8")          # a LinearHandle; `rows` of it alone, where ranks share it
    packer.finish()                              # those packed before are read and checked, all in one pass

What of a projection is a rank's, and what it is for, is the loader's matter (`loader.py` beside this).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from diptych.compute.loading.balance import Exponents
from diptych.compute.loading.weights import Saved, Source
from diptych.compute.ops.contract import Activation, LinearParts, Role, WeightTensor
from diptych.compute.ops.cpu.handles import LinearHandle, native_shape
from diptych.compute.ops.cpu.parts import (
    Rows,
    bias_of,
    directions_for,
    finite_weights,
    name_of,
    native_codes,
    noted_exponents,
    order_of,
    runs_of,
)
from diptych.compute.ops.cpus import Placement
from diptych.compute.ops.made import MadeTensor, made_parts
from diptych.ground.config import AS_STORED, ComputeConfig
from diptych.ground.errors import ConfigError
from diptych.ground.formats import STRIP_LANES, KeptFormat


class Packer:
    """See the module. Where nothing is asked for, what a file has quantised keeps its values (`WeightTensor.kept`)."""

    def __init__(
        self, program: Any, source: Source, config: ComputeConfig, *, threads_on: Placement, n_ranks: int
    ) -> None:
        self.program = program
        self.source = source
        self.threads_on = threads_on
        self._n_ranks = n_ranks
        self.weights_format = "bf16" if config.weights in AS_STORED else config.weights
        self.is_keeping = config.weights in AS_STORED
        self.asked_wide = {"int8": False, "int15": True}.get(config.activations)  # None: as each format has them
        self.packed: dict[str, int] = {}  # key -> number in the program, of all that was packed
        self.kept: dict[str, KeptFormat] = {}  # key -> format, of those that kept their values
        self.n_values: Counter[str] = Counter()  # format -> weights of the layers that were packed in it
        self.exponents: dict[str, Exponents] = {}  # of what may be balanced
        self.orders: dict[str, torch.Tensor] = {}  # key -> `WeightTensor.order` of those that have one
        self.input_orders: dict[str, np.ndarray] = {}  # the same by name
        self._unread: list[tuple[int, Saved]] = []  # packed weights whose bytes `finish` reads

    def finish(self) -> None:
        """Packed weights are read in their file, and checked as they are copied or used there, with all else to be checked.

        That runs aside, so that the source's `meanwhile` has the interpreter even if it never lets go of it.
        """
        read = [*self._unread, *((-1, saved) for saved in self.source.unchecked)]
        packed = [(index, saved.values, saved.in_pass) for index, saved in read]
        with ThreadPoolExecutor(max_workers=1) as aside:
            reading = aside.submit(self.program.read_packed, packed) if packed else None
            if self.source.meanwhile is not None:
                self.source.meanwhile()
        for damaged in () if reading is None else reading.result():
            raise read[damaged][1].damage()
        self.source.unchecked.clear()
        self._unread.clear()

    def runs(self, parts: LinearParts) -> list[LinearParts]:
        """Neighbours that are kept alike, or not at all; one where there is a bias for several tensors together."""
        return runs_of(parts, self.is_alike)

    @property
    def main_format(self) -> str:
        """The format of most weights of the layers."""
        return self.n_values.most_common(1)[0][0] if self.n_values else self.weights_format

    @property
    def has_wide_rows(self) -> bool:
        """Whether most layers meet rows of 15 bits: then a head's rows in bf16 would cost as much as all their codes do."""
        return self.main_format.endswith("-wide")

    def is_alike(self, parts: Sequence[WeightTensor]) -> bool:
        """Whether one format and order holds the stored values of all parts, or none of them is kept."""
        return not self.is_keeping or len({(part.kept, name_of(part.order)) for part in parts}) == 1

    def kept_of(self, parts: LinearParts, *, is_gated: bool = False) -> KeptFormat | None:
        """What holds the stored values of all parts."""
        is_made = isinstance(parts.weights[0], MadeTensor)
        kept = parts.weights[0].kept if is_made or (self.is_keeping and self.is_alike(parts.weights)) else None
        if kept is not None and kept.kind == "fp8":  # it meets rows in bf16, whatever is asked
            is_cut = is_gated and len(parts.weights) == 1 and parts.n_outputs % (2 * STRIP_LANES) != 0
            return None if kept.group and is_cut else kept
        if kept is None or self.asked_wide is None:
            return kept
        if kept.kind == "int8" and self.asked_wide:
            raise ConfigError(
                f"activations is int15, and {parts.weights[0].name} is W8A8, which is met by rows of 8 bits alone",
                hint="activations auto or int8",
            )
        return replace(kept, is_wide=self.asked_wide)

    def count_elsewhere(self, parts: LinearParts) -> None:
        """What only other ranks have: all say the same of the model's formats, and `has_wide_rows` is one answer."""
        parts, plain = made_parts(parts, self.weights_format)
        kept = self.kept_of(parts)
        self.n_values[plain if kept is None else kept.name] += parts.n_outputs * parts.n_inputs

    def pack(
        self,
        parts: LinearParts,
        weights_format: str,
        *,
        activation: Activation | None = None,
        role: Role | None = None,
        rows: Rows | None = None,
        keep: bool = True,
        of_table: KeptFormat | None = None,
        is_rates: bool = False,
    ) -> LinearHandle:
        """`rows` of the projection, one range after the other; all of it where there is None. of_table: what holds a table.

        is_rates: in bf16, and balanced where the others are.
        """
        parts, weights_format = made_parts(parts, weights_format)
        k = parts.n_inputs
        n = parts.n_outputs if rows is None else sum(end - begin for begin, end in rows)
        kept = of_table or (self.kept_of(parts, is_gated=activation is not None) if keep else None)
        form = {"is_gated": activation is not None, "has_bias": bool(parts.biases)}
        shape, whole = (native_shape(kept or weights_format, outputs, k, **form) for outputs in (n, parts.n_outputs))
        key = "+".join(part.name for part in (*parts.weights, *parts.biases))
        if kept is not None:
            self.kept[key] = parts.weights[0].kept or kept
            weights_format = kept.name
        if role is not None and role.layer is not None and key not in self.packed:
            self.n_values[weights_format] += parts.n_outputs * k
        self.packed[key], is_packed = self.add(shape, whole, key, parts, rows, weights_format, kept)
        order = self._note_order(key, parts) if kept is not None else ""
        is_balanced = weights_format != "bf16" or is_rates
        if is_balanced:
            self.exponents |= noted_exponents(self.source, key, parts, is_packed=is_packed)
        return LinearHandle(
            index=self.packed[key],
            key=key,
            format=weights_format,
            n_inputs=k,
            n_outputs=n if activation is None else n // 2,
            activation=activation,
            role=role,
            rows=rows,
            order=order,
            is_balanced=is_balanced,
        )

    def add(
        self,
        shape: Any,
        whole: Any,
        key: str,
        parts: LinearParts,
        rows: Rows | None,
        weights_format: str,
        kept: KeptFormat | None,
    ) -> tuple[int, bool]:
        """The weight's number in the program, and whether it was packed already. Nothing else writes there."""
        saved = self.source.find_packed(key, whole.packed_bytes)
        seed = parts.weights[0].random_seed
        if saved is not None:
            return self._add_saved(shape, whole, rows, saved), True
        if seed is not None and not parts.biases:
            return self._add_random(shape, whole, rows, seed & (2**63 - 1), (3.0 / parts.n_inputs) ** 0.5), False
        return self._add_read(shape, parts, rows or ((0, parts.n_outputs),), weights_format, kept), False

    def _note_order(self, key: str, parts: LinearParts) -> str:
        """The name of the order in which a kept weight has its inputs."""
        order = order_of(parts)
        name = name_of(order)
        if order is not None:
            self.orders[key] = order
            self.input_orders[name] = order.numpy()
        return name

    def _add_read(
        self, shape: Any, parts: LinearParts, rows: Rows, weights_format: str, kept: KeptFormat | None
    ) -> int:
        """Rows of the tensors, packed."""
        bias = bias_of(parts, rows)
        if kept is not None:
            return int(self.program.add_coded_linear(shape, native_codes(parts.weights, rows), bias))
        weights, directions = finite_weights(parts, rows, weights_format), directions_for(parts, weights_format)
        return int(self.program.add_linear(shape, weights, bias, directions))

    def _add_random(self, shape: Any, whole: Any, rows: Rows | None, seed: int, amplitude: float) -> int:
        if rows is None:
            return int(self.program.add_random_linear(shape, seed, amplitude))
        return int(self.program.add_random_part(shape, whole, rows, seed, amplitude))

    def _add_saved(self, shape: Any, whole: Any, rows: Rows | None, saved: Saved) -> int:
        if rows is None:
            is_there = self._is_used_there
            index = self._add_mapped(shape, saved) if is_there else int(self.program.add_packed_linear(shape))
            self._unread.append((index, saved))
            return index
        try:
            return int(self.program.add_packed_part(shape, whole, rows, saved.checked()))
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint is packed, and with tp of {self._n_ranks} {error}",
                hint="load the original checkpoint, or ask for another number of ranks",
            ) from error

    @property
    def _is_used_there(self) -> bool:
        """Whether packed weights are used in their file. Its pages may lie on one node: threads of several want a copy."""
        return self.source.is_lasting and len(self.threads_on.nodes) <= 1

    def _add_mapped(self, shape: Any, saved: Saved) -> int:
        try:
            return int(self.program.add_mapped_linear(shape, saved.values))
        except ValueError as error:  # not where it was written: what the header says of it is damaged
            raise saved.damage() from error
