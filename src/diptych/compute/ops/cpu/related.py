"""What scores gain of contents and distances, recorded into a native program."""

from __future__ import annotations

from typing import Any

from diptych.compute.ops.cpu.buffers import Buffers
from diptych.compute.ops.cpu.handles import AttentionHandle
from diptych.compute.ops.cpu.values import Value


class RelatedRecorder(Buffers):
    """The part of `CpuOps` that is about it."""

    def relate(self, qkv: Value, attention: AttentionHandle) -> None:
        """What queries and keys say of each distance, by a product for each head, where scores gain it."""
        own, related, given = attention.own, attention.related, self.gains_of(attention)
        if own is None or related is None:
            return
        width, sides = attention.spec.head_dim, ((0, "of_queries", related.keys), (1, "of_keys", related.queries))
        for side, role, weights in sides:
            self.program.heads(
                weights=[one.index for one in weights],
                x=qkv.buffer,
                first=side * own.n_heads * width,
                head_stride=width,
                rows=self._rows_buffer("related", width, weights[0], own.n_heads),
                out=given[role],
                out_head_stride=given["n_places"],
                store="f32",
            )

    def gains_of(self, attention: AttentionHandle) -> dict[str, Any]:
        """How `Program::attention` is told of it; empty where scores gain nothing."""
        own, spec = attention.own, attention.spec.related
        if own is None or spec is None or attention.related is None:
            return {}
        width = own.n_heads * spec.n_places
        buffers = {role: self._f32(role, width) for role in ("of_queries", "of_keys")}
        return {**buffers, "places": attention.related.places, "n_places": spec.n_places}
