"""A family's forward recorded into a native program: the cpu backend's `Ops`.

A handle of an activation is a `Value`: where it will lie and how it comes about. Norms, gates and attention are recorded
only when their consumer is known, because the consumer's weight format decides the form in which they are written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.compute.ops.contract import Ops, QkNorm
from diptych.compute.ops.cpu.buffers import Given
from diptych.compute.ops.cpu.handles import AttentionHandle, ExpertsHandle, LinearHandle, TableHandle, VectorHandle
from diptych.compute.ops.cpu.index import IndexRecorder
from diptych.compute.ops.cpu.related import RelatedRecorder
from diptych.compute.ops.cpu.states import StateRecorder
from diptych.compute.ops.cpu.streams import StreamRecorder
from diptych.compute.ops.cpu.values import CATEGORIES, ResidualStream, Value
from diptych.models.gates import PLAIN, Activation, GateForm


class CpuOps(
    StateRecorder,
    StreamRecorder,
    IndexRecorder,
    RelatedRecorder,
    Ops[ResidualStream, Value, TableHandle | LinearHandle, VectorHandle, LinearHandle, AttentionHandle, ExpertsHandle],
):
    """Records a family's forward into the loader's program.

    What a Value records later holds the program alone: a circle back to here would keep a closed model's weights.

    Of several ranks each records the same operations over its own weights. Shared are the residual stream and what a
    projection sums over: gathered outputs, the heads' values, a gate's. Norms and rows of int8 each rank makes for itself:
    a meeting of all would cost more where a step is small, and where it is large they are little beside the products.
    """

    def embed(
        self,
        table: TableHandle | LinearHandle,
        *,
        scale: float,
        positions: TableHandle | LinearHandle | None = None,
        first_position: int = 0,
        types: TableHandle | LinearHandle | None = None,
    ) -> ResidualStream:
        """x = scale * rows of the table, or of the packed head that serves as one."""
        placed = {"positions": -1 if positions is None else positions.index, "first_position": first_position}
        placed["types"] = -1 if types is None else types.index
        width = table.n_inputs if isinstance(table, LinearHandle) else table.width
        x = ResidualStream(self._f32("residual", width, self._is_team), width)
        if isinstance(table, LinearHandle):
            self.program.embed_tied(table.index, x.buffer, scale, first=table.column, vocab=table.n_outputs, **placed)
        else:
            self.program.embed(table.index, x.buffer, scale, **placed)
        return x

    def input(self, width: int) -> ResidualStream:
        """A buffer of its own each time: a later layer may write into one and another still read the rows."""
        self._n_inputs += 1
        x = ResidualStream(self._f32(f"input {self._n_inputs}", width), width)
        self.program.input(x.buffer)
        return x

    def tap(self, x: Given, number: int) -> None:
        """A copy to the caller, passed over in steps that do not ask for it."""
        self.program.tap(x.buffer if isinstance(x, ResidualStream) else self._materialised(x), number)

    def start(self, h: Given, weight: LinearHandle) -> ResidualStream:
        """A projection into a stream's buffer."""
        h = self._as_value(h)
        x = ResidualStream(self._f32("start", weight.n_outputs, weight.is_gathered), weight.n_outputs)
        self._linear_into(h, weight, CATEGORIES[h.kind], x.buffer)
        return x

    def norm(self, x: Given, weight: VectorHandle, *, eps: float, parts: int = 1) -> Value:
        """Recorded by its consumer: a projection takes it as rows, `add` fuses it."""
        if isinstance(x, Value):
            buffer = self._given(x)
            value = Value("norm", x.width, buffer=buffer, norm=(weight, eps))
        else:
            buffer = x.buffer
            value = Value("norm", x.width, source=x, source_version=x.version, buffer=buffer, norm=(weight, eps))
        program = self.program
        value.emit_rows = lambda rows: program.norm(buffer, weight.index, eps, rows, parts=parts, **weight.kind)
        return value

    def linear(self, h: Given, weight: LinearHandle) -> Value:
        """y in an fp32 buffer."""
        h = self._as_value(h)
        category = CATEGORIES[h.kind]
        if weight.index is None:  # of a rank without heads; what ranks share lies at the same places in all of them
            for _ in weight.pieces:
                self.program.meet(self._f32(f"{category} out", weight.n_outputs, weight.is_gathered))
            return Value("projection", weight.n_outputs)
        role = h.kind if h.kind == "bent" else category  # several may read that, and are read together
        out = self._f32(f"{role} out", weight.n_outputs, weight.is_gathered)
        self._linear_into(h, weight, category, out)
        return Value("projection", weight.n_outputs, buffer=out)

    def linear_gate(self, h: Given, weight: LinearHandle) -> Value:
        """act(gate) * up, written by the product's epilogue in the form that the next projection reads."""
        assert weight.activation is not None
        if weight.pieces:
            return self._gate_apart(self._as_value(h), weight)
        rows = self._rows(self._as_value(h), weight)
        settings = {"category": "gate_up", "weight": weight.index, "rows": rows}
        settings |= {"activation": weight.activation.value, "column": weight.column}
        value = Value("gate", weight.n_outputs, is_shared=weight.is_gathered)
        program = self.program
        value.emit_f32 = lambda out: program.linear(out=out, store="f32", **settings)
        value.emit_bf16 = value.emit_rows = lambda out: program.linear(out=out, store="bf16", **settings)
        return value

    def _gate_apart(self, h: Value, weight: LinearHandle) -> Value:
        """The same of two weights: up is there when gate's epilogue joins them."""
        assert weight.activation is not None
        out = self._f32("gate", weight.n_outputs, weight.is_gathered)
        settings: dict[str, Any] = {"category": "gate_up", "out": out, "column": weight.column}
        gate, up = weight.pieces
        self.program.linear(weight=up.index, rows=self._rows(h, up), **settings)
        self.program.linear(
            weight=gate.index,
            rows=self._rows(h, gate),
            store="gate_f32",
            activation=weight.activation.value,
            **settings,
        )
        return Value("gate", weight.n_outputs, buffer=out)

    def sparse_gate(self, h: Given, weight: LinearHandle, *, cutoff: float) -> Value:
        """Joined apart."""
        assert weight.activation is not None
        return self._joined_apart(h, weight, "sparse_gate", cutoff=cutoff, activation=weight.activation.value)

    def bent_gate(
        self, h: Given, weight: LinearHandle, *, form: GateForm, added: tuple[Value, LinearHandle] | None = None
    ) -> Value:
        """Joined apart."""
        if form.curve is not None:
            return self._joined_apart(h, weight, "curve", added, activation=form.curve.value)
        return self._joined_apart(h, weight, "bent_gate", added, form=form.numbers)

    def _joined_apart(
        self,
        h: Given,
        weight: LinearHandle,
        operation: str,
        added: tuple[Value, LinearHandle] | None = None,
        **settings: Any,
    ) -> Value:
        """Gate and up in one buffer, which every rank reads whole, joined in the form that their reader wants."""
        first, *ups = weight.pieces or (weight,)
        width = first.n_outputs if ups else weight.n_outputs // 2
        both = self._f32("gate and up", 2 * width, weight.is_gathered)
        for given, projection, store in ((h, weight, "f32"), *([] if added is None else [(*added, "add_f32")])):
            gate, *ups = projection.pieces or (projection,)
            self._linear_into(self._as_value(given), gate, "gate_up", both, store=store)
            for up in ups:
                own = replace(up, column=width + up.column)
                self._linear_into(self._as_value(given), own, "gate_up", both, store=store)
        record, value = getattr(self.program, operation), Value("gate", width)
        value.emit_f32 = value.emit_rows = lambda out: record(x=both, out=out, **settings)
        return value

    def curve(self, h: Given, weight: LinearHandle, *, numbers: tuple[float, ...] = ()) -> Value:
        """Of whole rows, which ranks gather, in the form that the next projection reads."""
        assert weight.activation is not None
        x = self._f32("curve", weight.n_outputs, weight.is_gathered)
        self._linear_into(self._as_value(h), weight, "gate_up", x)
        program, settings = self.program, {"activation": weight.activation.value, "numbers": numbers or (0.0,) * 4}
        value = Value("gate", weight.n_outputs)
        value.emit_f32 = value.emit_rows = lambda out: program.curve(x=x, out=out, **settings)
        return value

    def clip(self, y: Value, limit: float) -> Value:
        """In place; a rank without heads has nothing there."""
        if y.buffer is not None:
            self.program.curve(x=y.buffer, out=y.buffer, activation="clip", numbers=(limit, 0.0, 0.0, 0.0))
        return y

    def gate_given(self, h: Given, weight: LinearHandle, given: Value, first: int) -> Value:
        """On a copy; a norm is made there, and stays apart from inner values of MLPs, which its readers make."""
        out, kind = self._f32("given", weight.n_outputs), "gate"
        if given.norm is None:
            self.program.copy_columns(x=self._materialised(given), out=out, first=first)
        else:
            assert first == 0
            assert given.width == weight.n_outputs, "a norm is gated whole"
            self._norm_into(given, out)
            kind = "gated norm"
        return Value(kind, weight.n_outputs, buffer=self._gate_onto(h, weight, "gate_up", out))

    def join(self, a: Value, b: Value) -> Value:
        """In a buffer of both."""
        out, norm = self._f32("joined", a.width + b.width), self._f32("joined norm", a.width)
        self._norm_into(a, norm)
        self.program.copy_columns(x=norm, out=out, n=a.width)
        self.program.copy_columns(x=self._materialised(b), out=out, column=a.width, n=b.width)
        return Value("joined", a.width + b.width, buffer=out)

    def _gate_onto(self, h: Given, weight: LinearHandle, category: str, out: int) -> int:
        """What is gated lies in the buffer when the gate's epilogue joins them."""
        assert weight.activation is not None
        how = {"category": category, "out": out, "store": "gate_f32", "activation": weight.activation.value}
        for one in weight.pieces or (weight,):
            self.program.linear(weight=one.index, rows=self._rows(self._as_value(h), one), column=one.column, **how)
        return out

    def keep(self, x: ResidualStream, weight: VectorHandle) -> ResidualStream:
        """In place."""
        self.program.weigh(x=x.buffer, weight=weight.index, out=x.buffer)
        return self._written(x)

    def weigh_hidden(self, h: Value, weight: VectorHandle) -> Value:
        """In place."""
        buffer = self._materialised(h)
        self.program.weigh(x=buffer, weight=weight.index, out=buffer)
        return h

    def weigh(self, x: ResidualStream, weight: VectorHandle) -> Value:
        """Recorded by its consumer, as rows."""
        program, buffer = self.program, x.buffer
        value = Value("norm", x.width, source=x, source_version=x.version, buffer=buffer)
        value.emit_rows = lambda rows: program.weigh(x=buffer, weight=weight.index, out=rows)
        return value

    def layer_inputs(
        self,
        x: ResidualStream,
        projection: LinearHandle,
        norm: VectorHandle,
        table: TableHandle | LinearHandle,
        *,
        eps: float,
        table_scale: float,
        scale: float,
    ) -> Value:
        """In the product's own buffer, which lasts as long as the step."""
        out = self._f32("layer inputs", projection.n_outputs)
        self._linear_into(self._as_value(x), projection, "qkv", out)
        which = {"packed" if isinstance(table, LinearHandle) else "table": table.index}
        self.program.layer_inputs(x=out, norm=norm.index, eps=eps, table_scale=table_scale, scale=scale, **which)
        return Value("given", projection.n_outputs, buffer=out)

    def linear_add(self, h: Given, weight: LinearHandle, x: ResidualStream) -> ResidualStream:
        """x += h W^T + b in the product's epilogue; a rank that has all of x adds what all ranks made."""
        if self._is_team and x.is_whole:
            return self.add(x, self.linear(h, weight))
        self._linear_onto(h, weight, x.buffer)
        return self._written(x)

    def linear_sum(self, h: Given, weight: LinearHandle, y: Value) -> Value:
        """The same onto a projection's buffer."""
        self._linear_onto(h, weight, self._materialised(y))
        return y

    def _linear_onto(self, h: Given, weight: LinearHandle, buffer: int) -> None:
        h = self._as_value(h)
        category, rows = CATEGORIES[h.kind], self._rows(h, weight)
        self.program.linear(
            category=category, weight=weight.index, rows=rows, out=buffer, store="add_f32", column=weight.column
        )

    def add(self, x: ResidualStream, y: Given, *, scale: float = 1.0) -> ResidualStream:
        """x += scale * y, with y's norm fused where it is one."""
        if isinstance(y, ResidualStream):
            self.program.add(y.buffer, x.buffer, scale=scale)
        elif y.kind == "norm":
            assert y.norm is not None
            assert y.source is not x, "the norm of a stream is not added to it"
            assert y.source is None or y.source.version == y.source_version, "the norm's input has been overwritten"
            weight, eps = y.norm
            assert weight == VectorHandle(index=weight.index), (
                "a norm that is added to the stream has no bias and no mean"
            )
            self.program.add_norm(y.buffer, weight.index, eps, x.buffer, scale)
        else:
            self.program.add(self._materialised(y), x.buffer, scale=scale)
        return self._written(x)

    def add_gated(self, x: ResidualStream, y: Value, gate: Value) -> ResidualStream:
        """x += sigmoid(gate) y."""
        self.program.add(self._materialised(y), x.buffer, self._materialised(gate))
        return self._written(x)

    def scale(self, x: ResidualStream, factor: float) -> ResidualStream:
        """In place."""
        self.program.branch(x=x.buffer, out=x.buffer, scale=factor)
        return self._written(x)

    def rotate_and_cache(self, qkv: Value, attention: AttentionHandle) -> Value:
        """q in bf16 for the attention kernel; k and v go to the cache."""
        spec, own = attention.spec, attention.own
        if own is None:
            return Value("query", 0)
        self.relate(qkv, attention)
        width = own.n_heads * spec.head_dim
        q = self._buffer("q", width, lambda width: self.program.add_bf16(width))
        is_full, scale = spec.qk_norm is QkNorm.FULL, spec.query_scale
        row = (spec.n_heads, spec.n_kv_heads, own.first_head, own.first_kv_head)
        self.program.rotate(
            qkv=qkv.buffer,
            q=q,
            layer=spec.cache_layer,
            shape=attention.shape,
            rope=attention.rope,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            has_full_width_norm=is_full,
            norm_eps=spec.norm_eps,
            row=row if is_full else None,
            has_head_norms=spec.qk_norm in (QkNorm.HEADS, QkNorm.CENTRED),
            has_norm_biases=spec.qk_norm is QkNorm.CENTRED,
            query_scale=scale and scale.numbers,
            has_v_norm=spec.has_v_norm,
            writes_kv=spec.owns_kv,
            has_v=spec.has_v,
            norms_turned=spec.qk_norm is QkNorm.TURNED,
            v_scale=spec.v_scale,
        )
        return Value("query", width, buffer=q)

    def cache_latents(self, kv: Value, attention: AttentionHandle) -> None:
        """Straight into the cache."""
        spec, (mla, latent) = attention.spec, attention.latents
        if attention.own is None:
            return
        if mla.n_groups:
            self.cache_row(kv, attention)
            return
        self.program.cache_latents(
            kv=self._materialised(kv),
            layer=spec.cache_layer,
            norm=latent.norm,
            norm_eps=spec.norm_eps,
            rope=attention.rope,
            rank=mla.kv_rank,
        )

    def cache_entries(self, h: Given, attention: AttentionHandle) -> None:
        """By every rank that attends, in its own cache."""
        spec, (mla, latent) = attention.spec, attention.latents
        if attention.own is None:
            return
        assert latent.entries is not None
        assert spec.entries is not None
        self.cache_made(self._as_value(h), latent.entries, spec.entries, attention, width=mla.row, is_index=False)

    def absorb(self, q: Value, attention: AttentionHandle) -> Value:
        """q in bf16 for the attention kernel, by a product for each head."""
        spec, own, (mla, latent) = attention.spec, attention.own, attention.latents
        if own is None:
            return Value("query", 0)
        if mla.n_groups:
            return self.turn_queries(q, attention)
        width, n_heads = own.n_heads * spec.head_dim, own.n_heads
        out = self._buffer("q", width, lambda width: self.program.add_bf16(width))
        x = self._materialised(q)
        if spec.query_scale is not None:
            self.program.scale_queries(q=x, scale=spec.query_scale.numbers)
        if latent.scales != -1:
            self.program.scale_heads(q=x, by_head=latent.scales)
        self.program.heads(
            weights=[head.index for head in latent.keys],
            x=x,
            head_stride=mla.nope_dim + mla.rope_dim,
            rows=self._rows_buffer("absorb", mla.nope_dim, latent.keys[0], n_heads),
            out=out,
            out_head_stride=spec.head_dim,
            store="bf16",
        )
        self.program.rotate_queries(q=x, out=out, rope=attention.rope, n_heads=n_heads)
        return Value("query", width, buffer=out)

    def expand(self, a: Value, attention: AttentionHandle) -> Value:
        """A product for each head, gathered."""
        spec, own, (mla, latent) = attention.spec, attention.own, attention.latents
        out = self._f32("heads", spec.n_heads * mla.v_dim, self._is_team)
        if own is None:
            self.program.meet(out)
        elif mla.n_groups:
            self.expand_groups(a, attention, out)
        else:
            self.program.heads(
                weights=[head.index for head in latent.values],
                x=self._materialised(a),
                head_stride=spec.head_dim,
                rows=self._rows_buffer("expand", mla.kv_rank, latent.values[0], own.n_heads),
                out=out,
                out_head_stride=mla.v_dim,
                store="f32",
                column=own.first_head * mla.v_dim,
            )
        return Value("attention", spec.n_heads * mla.v_dim, buffer=out)

    def attention(self, q: Value, attention: AttentionHandle) -> Value:
        """Recorded by its consumer, as rows in bf16 or as fp32 to be quantised. Of latents a rank reads its own heads alone."""
        spec, own, program = attention.spec, attention.own, self.program
        is_gathered = attention.latent is None
        n_heads = spec.n_heads if is_gathered or own is None else own.n_heads
        value = Value("attention", n_heads * spec.value_dim, is_shared=is_gathered and self._is_team)
        if own is None:
            value.emit_f32 = value.emit_rows = program.meet
            return value
        column = own.first_head * spec.value_dim if is_gathered else 0
        settings = {"q": q.buffer, "layer": spec.cache_layer, "shape": attention.shape, "column": column}
        settings |= {"sinks": attention.sinks, "slopes": attention.slopes, "distances": attention.distances}
        settings |= self.gains_of(attention)
        if spec.index is not None:
            settings["choice"] = self._choice
        value.emit_f32 = value.emit_rows = lambda out: program.attention(out=out, **settings)
        return value

    def gate_heads(self, h: Given, weight: LinearHandle, a: Value) -> Value:
        """In place; a norm is made in a buffer first, by the rows' owners."""
        act = weight.activation
        if a.norm is not None:
            out = self._f32("normed heads", a.width, self._is_team)
            self._norm_into(a, out)
            a = Value("gated heads", a.width, buffer=out)
        if weight.n_outputs == a.width and act is not Activation.SOFTPLUS:  # which no epilogue has
            return Value("gated heads", a.width, buffer=self._gate_onto(h, weight, "qkv", self._materialised(a)))
        assert act in (Activation.SIGMOID, Activation.SOFTPLUS)
        gates, x = self._materialised(self.linear(h, weight)), self._materialised(a)
        self.program.gate_heads(gates=gates, x=x, activation=act.value)
        return Value("gated heads", a.width, buffer=a.buffer)

    def sum(self, a: Value, b: Value, *, gate: Value | None = None) -> Value:
        """In place; a rank without heads has nothing there."""
        if a.buffer is None and a.emit_f32 is None:
            return a
        gates = () if gate is None else (self._materialised(gate),)
        self.program.add(self._materialised(b), self._materialised(a), *gates)
        return a

    def experts(self, h: Given, experts: ExpertsHandle, *, routed: Given | None = None) -> Value:
        """Summed per token in ascending order of expert."""
        h = self._as_value(h)
        spec, first, down = experts.spec, experts.gate_up[0], experts.down[0]
        top_k = spec.experts_per_token
        gates, ups = [expert.pieces or (expert,) for expert in experts.gate_up], first.pieces[1:]
        # rows of its own, which the mixture's must not be written over
        of_router = h if routed is None else replace(self._as_value(routed), kind="routed", rows={})
        router_rows, rows = self._rows(of_router, experts.router), self._rows(h, first)
        team = self._is_team
        out = self._f32("experts out", h.width, team)
        hidden = wide = None
        if spec.joins_apart:
            width = (spec.n_products - 1) * spec.expert_ffn
            wide = self._buffer(
                "experts wide gate", width, lambda width: self.program.add_f32(width, top_k, team), top_k
            )
        elif ups or down.format != "bf16":
            hidden = self._buffer(
                "experts hidden", spec.expert_ffn, lambda width: self.program.add_f32(width, top_k, team), top_k
            )
        self.program.moe(
            router=experts.router.index,
            router_rows=router_rows,
            scores=self._f32("experts scores", spec.n_scored),
            gate_up=[gate.index for gate, *_ in gates],
            up=[up.index for _, *some in gates for up in some],
            up_rows=self._rows(h, ups[0]) if ups else -1,
            down=[expert.index for expert in experts.down],
            rows=rows,
            hidden=hidden,
            hidden_rows=self._rows_buffer(
                "experts hidden rows", spec.expert_ffn, down, top_k, team and hidden is None and wide is None
            ),
            expanded=self._buffer(
                "experts wide", h.width, lambda width: self.program.add_f32(width, top_k, team), top_k
            ),
            out=out,
            top_k=top_k,
            renormalises=spec.renormalises,
            activation=(Activation.SILU if spec.joins_apart else spec.activation).value,
            scores_by=(spec.scores.value, spec.margin),
            score_scale=spec.score_scale,
            softcap=spec.softcap or 0.0,
            behind=(experts.behind, spec.behind_eps or 0.0),
            choice_bias=experts.choice_bias,
            scales=experts.scales,
            by_token=experts.table,
            groups=(spec.n_groups, spec.groups_per_token, spec.group_best),
            routed_scale=spec.routed_scale,
            wide=wide,
            gate=(spec.form or PLAIN).numbers,
            curve="" if spec.is_gated else spec.activation.value,
            weighs_input=spec.weighs_input,
            identities=(spec.n_identities, self._given(h) if spec.n_identities else -1),
            hidden_column=first.column,
            column=down.column,
        )
        return Value("experts", h.width, buffer=out)

    def _given(self, h: Value) -> int:
        """What experts give as they read it, or a norm reads, in fp32: a norm in a buffer of its own."""
        if h.norm is None:
            return self._materialised(h)
        out = self._f32("given", h.width)
        self._norm_into(h, out)
        return out

    def head(
        self,
        x: ResidualStream,
        norm: VectorHandle | None,
        weight: LinearHandle | None,
        *,
        eps: float,
        softcap: float | None,
        scale: float = 1.0,
    ) -> Value:
        """Norm, projection and softcap of the wanted rows, straight into the caller's logits."""
        if weight is None:
            return Value("logits", x.width)
        rows = self._rows_buffer("head", x.width, weight, is_head=True)
        index = None if norm is None else norm.index
        kind = {} if norm is None else norm.kind
        self.program.head(
            x=x.buffer,
            norm=index,
            eps=eps,
            rows=rows,
            weight=weight.index,
            scale=scale,
            softcap=softcap,
            first=weight.column,
            vocab=weight.n_outputs,
            **kind,
        )
        return Value("logits", weight.n_outputs)
