"""Streams beside each other, recorded into a native program: what `contract_streams` asks of the cpu backend.

They are every rank's own, whole: what mixes them is small beside the products, and ranks would have to meet behind each of its
operations.
"""

from __future__ import annotations

from diptych.compute.ops.contract_streams import StreamOps
from diptych.compute.ops.cpu_buffers import Buffers
from diptych.compute.ops.cpu_handles import VectorHandle
from diptych.compute.ops.cpu_values import ResidualStream, Value


class StreamRecorder(Buffers, StreamOps[ResidualStream, Value, VectorHandle]):
    """The part of `CpuOps` that is about streams."""

    def branch(self, x: ResidualStream, number: int, *, scale: float = 1.0) -> ResidualStream:
        """A copy."""
        out = ResidualStream(self._f32(f"stream {number}", x.width), x.width, is_whole=True)
        self.program.branch(x=x.buffer, out=out.buffer, scale=scale)
        return out

    def stream(self, h: Value, number: int, *, is_residual: bool = False) -> ResidualStream:
        """Written by the norm itself."""
        assert h.kind == "norm"
        assert h.emit_rows is not None
        is_shared = is_residual and self._is_team
        out = ResidualStream(self._f32(f"stream {number}", h.width, is_shared), h.width)
        h.emit_rows(out.buffer)
        return out

    def match(self, y: Value, x: ResidualStream, number: int, *, least: float) -> ResidualStream:
        """From the projection's buffer."""
        out = ResidualStream(self._f32(f"stream {number}", x.width), x.width)
        self.program.match(y=self._materialised(y), x=x.buffer, out=out.buffer, least=least)
        return out

    def predict(
        self, xs: tuple[ResidualStream, ...], routed: Value, weight: VectorHandle, *, scale: float
    ) -> tuple[ResidualStream, ...]:
        """In place."""
        buffers = [x.buffer for x in xs]
        self.program.predict(xs=buffers, routed=self._materialised(routed), weight=weight.index, scale=scale)
        return tuple(self._written(x) for x in xs)

    def correct(
        self,
        xs: tuple[ResidualStream, ...],
        y: ResidualStream,
        routed: Value,
        weight: VectorHandle,
        *,
        scale: float,
        active: int,
    ) -> tuple[ResidualStream, ...]:
        """In place."""
        buffers = [x.buffer for x in xs]
        self.program.correct(
            xs=buffers, y=y.buffer, routed=self._materialised(routed), weight=weight.index, scale=scale, active=active
        )
        return tuple(self._written(x) for x in xs)

    def connections(
        self,
        xs: tuple[ResidualStream, ...],
        weight: VectorHandle,
        scale: VectorHandle,
        base: VectorHandle,
        *,
        eps: float,
    ) -> Value:
        """Of a row at a time, in fp32."""
        width = self.program.vector_size(base.index)
        out = self._f32("connections", width)
        self.program.connections(
            xs=[x.buffer for x in xs], weight=weight.index, scale=scale.index, base=base.index, out=out, eps=eps
        )
        return Value("connections", width, buffer=out)

    def gather(self, xs: tuple[ResidualStream, ...], c: Value, number: int, *, eps: float) -> ResidualStream:
        """From all of them."""
        out = ResidualStream(self._f32(f"stream {number}", xs[0].width), xs[0].width, is_whole=True)
        self.program.gather(xs=[x.buffer for x in xs], c=self._materialised(c), out=out.buffer, eps=eps)
        return out

    def spread(
        self, xs: tuple[ResidualStream, ...], y: Value, c: Value, *, magnitude: float, eps: float
    ) -> tuple[ResidualStream, ...]:
        """In place."""
        self.program.spread(
            xs=[x.buffer for x in xs], y=self._materialised(y), c=self._materialised(c), magnitude=magnitude, eps=eps
        )
        return tuple(self._written(x) for x in xs)

    def mingle(
        self,
        xs: tuple[ResidualStream, ...],
        y: Value,
        c: Value,
        *,
        magnitude: float,
        rounds: int,
        eps: float,
    ) -> tuple[ResidualStream, ...]:
        """In place."""
        settings = {"magnitude": magnitude, "rounds": rounds, "eps": eps}
        self.program.mingle(xs=[x.buffer for x in xs], y=self._materialised(y), c=self._materialised(c), **settings)
        return tuple(self._written(x) for x in xs)
