"""States of sequences, recorded into a native program: what `contract_states` asks of the cpu backend."""

from __future__ import annotations

from diptych.compute.ops.contract_states import StateOps
from diptych.compute.ops.cpu.buffers import Buffers
from diptych.compute.ops.cpu.handles import AttentionHandle, LinearHandle
from diptych.compute.ops.cpu.values import Value
from diptych.models.states import StateRule


class StateRecorder(Buffers, StateOps[Value, LinearHandle, AttentionHandle]):
    """The part of `CpuOps` that is about them."""

    def move_states(
        self, qkv: Value, rates: Value | None, attention: AttentionHandle, *, decays: Value | None = None
    ) -> Value:
        """The heads' outputs in fp32: of a rank its own, at their columns."""
        spec, rule, own = attention.spec, attention.rule, attention.own
        assert spec.state is not None
        assert rule is not None
        width = spec.state.width
        is_before = spec.state.rule in (StateRule.TAPS, StateRule.BENT_TAPS) and not spec.is_whole
        name = "taps" if spec.is_whole else "bent" if is_before else "states"
        # what taps give as it is, only the heads read that it is of
        is_shared = self._is_team and spec.state.rule is not StateRule.TAPS and not spec.is_whole
        out = self._f32(name, width, is_shared)
        if own is None:
            if is_shared:
                self.program.meet(out)
        else:
            self.program.move_states(
                qkv=self._states_inputs(qkv),
                rates=-1 if rates is None else self._states_inputs(rates),
                decays=-1 if decays is None else self._materialised(decays),
                out=out,
                **rule.numbers,
                layer=spec.cache_layer,
                shape=rule.shape,
                first_head=own.first_head,
                column=own.first_head * spec.state.value_dim,
                first_key_head=own.first_kv_head if spec.state.is_selective else 0,
            )
        return Value("attention" if name == "states" else name, width, buffer=out)

    def _states_inputs(self, qkv: Value) -> int:
        """A projection lies in a buffer already; a norm is made in one."""
        if qkv.kind != "norm":
            assert qkv.buffer is not None
            return qkv.buffer
        given = self._f32("tapped", qkv.width)
        self._norm_into(qkv, given)
        return given

    def by_head(self, h: Value, weight: LinearHandle) -> Value:
        """In a buffer of each rank's own, of its heads."""
        role = f"{h.kind} by head"  # what is made of that may be read beside it
        out = self._f32(role, weight.n_outputs)
        if weight.pieces:
            of_head = weight.pieces[0]
            width, n, first = of_head.n_inputs, of_head.n_outputs, weight.column // of_head.n_outputs
            self.program.heads(
                weights=[head.index for head in weight.pieces],
                x=self._materialised(h),
                first=first * width,
                head_stride=width,
                rows=self._rows_buffer(role, width, of_head, len(weight.pieces)),
                out=out,
                out_head_stride=n,
                store="f32",
                column=weight.column,
            )
        return Value("projection", weight.n_outputs, buffer=out)
