"""The buffers that a forward is recorded over: who has which, and in which form a value lies in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.compute.ops.cpu.handles import LinearHandle
from diptych.compute.ops.cpu.loader import CpuLoader
from diptych.compute.ops.cpu.values import ResidualStream, Value

Given = Value | ResidualStream  # what an operation reads


class Buffers:
    """Of one program. They are shared by role: a layer's die with the layer."""

    def __init__(self, loader: CpuLoader) -> None:
        self.program = loader.program
        self._buffers: dict[tuple[Any, ...], int] = {}
        self._owner: dict[int, Value] = {}
        self._n_inputs = 0
        self._is_team = loader.rank.size > 1
        self._orders = loader.packer.input_orders
        self._has_wide_rows = loader.packer.has_wide_rows

    def _buffer(self, role: str, width: int, make: Callable[[int], int], *more: Any) -> int:
        key = (role, width, *more)
        if key not in self._buffers:
            self._buffers[key] = make(width)
        return self._buffers[key]

    def _f32(self, role: str, width: int, is_shared: bool = False) -> int:
        return self._buffer(role, width, lambda width: self.program.add_f32(width, is_shared=is_shared), is_shared)

    def _rows_buffer(
        self,
        role: str,
        width: int,
        weight: LinearHandle,
        rows_per_token: int = 1,
        is_shared: bool = False,
        is_head: bool = False,
    ) -> int:
        kind, order = weight.rows_format, self._orders.get(weight.order)
        if is_head and kind == "bf16" and self._has_wide_rows:
            kind = "bf16_pair"
        return self._buffer(
            f"{role} rows",
            width,
            lambda width: self.program.add_rows(kind, width, rows_per_token, is_shared, order),
            kind,
            weight.order,
            rows_per_token,
            is_shared,
        )

    def _rows(self, h: Value, weight: LinearHandle) -> int:
        """The rows buffer of h in the form the weight reads; recorded on first use, again if another took the buffer."""
        form, key = weight.rows_format, weight.rows_format + weight.order
        is_direct = h.emit_rows is not None and (h.kind == "norm" or form == "bf16")
        rows = self._rows_buffer(h.kind, h.width, weight, is_shared=is_direct and h.is_shared)
        if h.rows.get(key) == rows and self._owner.get(rows) is h:
            return rows
        assert h.source is None or h.source.version == h.source_version, "the norm's input has been overwritten"
        if is_direct:
            assert h.emit_rows is not None
            h.emit_rows(rows)
        elif h.emit_bf16 is not None and not form.startswith("wide"):  # which bf16 would make narrow
            half = self._buffer(f"{h.kind} bf16", h.width, lambda width: self.program.add_bf16(width, h.is_shared))
            h.emit_bf16(half)
            self.program.prepare(half, rows)
        else:
            self.program.prepare(self._materialised(h), rows)
        h.rows[key] = rows
        self._owner[rows] = h
        return rows

    def _as_value(self, h: Given) -> Value:
        """The residual stream itself as an input (families without a norm before the projection)."""
        if isinstance(h, Value):
            return h
        return Value("residual", h.width, source=h, source_version=h.version, buffer=h.buffer)

    def _materialised(self, h: Value) -> int:
        """The fp32 buffer of h."""
        if h.buffer is None:
            assert h.emit_f32 is not None
            h.buffer = self._f32(h.kind, h.width, h.is_shared)
            h.emit_f32(h.buffer)
        return h.buffer

    def _norm_into(self, h: Value, out: int) -> None:
        """A norm in fp32."""
        assert h.norm is not None
        assert h.emit_rows is not None
        assert h.source is None or h.source.version == h.source_version, "the norm's input has been overwritten"
        h.emit_rows(out)

    def _written(self, x: ResidualStream) -> ResidualStream:
        x.version += 1
        return x
