"""Streams beside each other, recorded into a native program: what `contract_streams` asks of the cpu backend.

They are every rank's own, whole: what mixes them is small beside the products, and ranks would have to meet behind each of its
operations.
"""

from __future__ import annotations

from diptych.compute.ops.contract_streams import StreamOps
from diptych.compute.ops.cpu.buffers import Buffers
from diptych.compute.ops.cpu.handles import LinearHandle, TableHandle, VectorHandle
from diptych.compute.ops.cpu.values import ResidualStream, Value
from diptych.models.ngrams import NgramSpec


class StreamRecorder(Buffers, StreamOps[ResidualStream, Value, TableHandle | LinearHandle, VectorHandle, LinearHandle]):
    """The part of `CpuOps` that is about streams."""

    def branch(self, x: ResidualStream, number: int, *, scale: float = 1.0) -> ResidualStream:
        """A copy."""
        out = ResidualStream(self._f32(f"stream {number}", x.width), x.width, is_whole=True)
        self.program.branch(x=x.buffer, out=out.buffer, scale=scale)
        return out

    def stream(self, h: Value, number: int, *, is_residual: bool = False) -> ResidualStream:
        """Written by the norm itself; what lies in a buffer stays there."""
        if h.kind == "folded":
            return ResidualStream(self._materialised(h), h.width, is_whole=True)
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

    def widen(self, x: ResidualStream, n: int) -> ResidualStream:
        """Copies of it."""
        out = ResidualStream(self._f32("streams", n * x.width), n * x.width, is_whole=True)
        for i in range(n):
            self.program.copy_columns(x=x.buffer, out=out.buffer, column=i * x.width, n=x.width)
        return out

    def renew(self, wide: ResidualStream, x: ResidualStream) -> ResidualStream:
        """In place."""
        self.program.copy_columns(x=x.buffer, out=wide.buffer, n=x.width)
        return self._written(wide)

    def fold(self, h: Value, weights: tuple[float, ...]) -> Value:
        """In a buffer of its own."""
        width = h.width // len(weights)
        out = self._f32("folded", width)
        self.program.fold(x=self._materialised(h), out=out, weights=weights)
        return Value("folded", width, buffer=out)

    def injections(self, h: Value, weight: LinearHandle) -> Value:
        """In a buffer that nothing else is written to."""
        out = self._f32("injections", weight.n_outputs)
        self.program.linear(category="qkv", weight=weight.index, rows=self._rows(h, weight), out=out)
        return Value("injections", weight.n_outputs, buffer=out)

    def inject(self, x: ResidualStream, y: Value, c: Value, *, magnitude: float, scale: float) -> ResidualStream:
        """In place."""
        self.program.inject(
            x=x.buffer, y=self._materialised(y), c=self._materialised(c), magnitude=magnitude, scale=scale
        )
        return self._written(x)

    def token_ids(self, width: int, end: int) -> Value:
        """In fp32, which holds every id."""
        out = self._f32("token ids", width)
        self.program.ids(out=out, shift=end)
        return Value("token ids", width, buffer=out)

    def ngrams(
        self, before: Value, tables: tuple[TableHandle | LinearHandle, ...], spec: NgramSpec, place: int
    ) -> Value:
        """From the checkpoint's own pages."""
        out = self._f32("ngrams", spec.width)
        self.program.ngrams(
            before=self._materialised(before),
            out=out,
            tables=[table.index for table in tables],
            shift=spec.end,
            factors=list(spec.factors(place)),
            heads=[list(head) for head in spec.heads(place)],
        )
        return Value("ngrams", spec.width, buffer=out)

    def meet_keys(self, keys: Value, queries: Value, values: Value) -> Value:
        """Norms in buffers of their own."""
        width, out = keys.width, self._f32("met", keys.width)
        both = [self._f32(name, width) for name in ("met keys", "met queries")]
        for h, buffer in zip((keys, queries), both, strict=True):
            assert h.emit_rows is not None
            h.emit_rows(buffer)
        self.program.meet_keys(keys=both[0], queries=both[1], values=self._materialised(values), out=out)
        return Value("met", width, buffer=out)
