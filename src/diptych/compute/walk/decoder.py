"""A model's forward in the op vocabulary: one walk for every family, over the handles that `loading.decoder` made.

What differs between families is data (`models.families`): which norms a layer has, how its tensors are called, whether its
MLP is a mixture. No look into a handle: the same code runs eagerly on the torch backend and is recorded into a program on
the cpu backend.
"""

from __future__ import annotations

from diptych.compute.ops.contract import Experts, Heads, Hidden, Linear, Ops, Stream, Table, Vector
from diptych.compute.walk.aside import run_aside
from diptych.compute.walk.gated_streams import add_ngrams, gated_streams
from diptych.compute.walk.latents import run_latents
from diptych.compute.walk.layer_weights import DecoderWeights, LayerWeights
from diptych.compute.walk.mlps import mlp_alone, run_apart, run_dense, run_experts, run_inner
from diptych.compute.walk.part_weights import (
    LatentWeights,
    NormGate,
    SelectiveWeights,
    StateWeights,
    UnitWeights,
    WeighedSums,
)
from diptych.compute.walk.selective_states import run_selective, run_units
from diptych.compute.walk.stream_weights import BranchWeights
from diptych.models.spec import ModelSpec
from diptych.models.streams import GatedSpec, HyperSpec, StreamsSpec

HALF_POWER = 2.0**-0.5  # of a sum of two that is to be as large as each of them
LEAST_SQUARE = 1e-5  # of what is made as large as another stream
MOST_INJECTED = 2.0  # of what attention and MLPs give, to each of the streams in one row


def run_decoder(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """Logits [R, V] of the step that `ops` stands for.

    Where what a layer adds is scaled, x is the residual stream over that scale: norms of x see the same but for their eps.
    """
    scale = spec.residual_scale
    eps = spec.norm_eps / scale**2
    x = ops.embed(
        weights.embedding, scale=spec.embed_scale / scale, positions=weights.positions, first_position=spec.first_position,
        types=weights.types,
    )  # fmt: skip
    if weights.embedding_norm is not None:
        h = ops.norm(x, weights.embedding_norm, eps=eps)
        x = ops.stream(h, 0, is_residual=True) if weights.words is None else ops.start(h, weights.words)
    if isinstance(spec.streams, StreamsSpec):
        x = run_streams(ops, spec, spec.streams, weights, x)
    elif isinstance(spec.streams, HyperSpec):
        x = run_connected(ops, spec, spec.streams, weights, x)
    elif spec.streams is not None:
        x = run_gated(ops, spec, spec.streams, weights, x)
    else:
        given = begin_inputs(ops, spec, weights, x)
        onto: Stream | None = None
        late: Hidden | None = None
        wide = ops.widen(x, 2) if any(layer.aside is not None for layer in weights.layers) else None
        for number, layer in enumerate(weights.layers):
            if layer.aside is not None:
                assert wide is not None
                onto = x
                wide, x = run_aside(ops, x, wide, layer, layer.aside, eps=eps)
                ops.tap(x, number)
                continue
            if layer.is_shared:  # streams in turn: that of two layers before has ended
                onto = run_layer(
                    ops, x, layer, eps=eps, added_eps=spec.added_eps, onto=ops.branch(x, 1 + number // 2 % 2)
                )
                ops.tap(x, number)
                continue
            if layer.is_late:
                x, mixture = run_late(ops, x, layer, eps=eps)
                late = mixture
                ops.tap(x, number)
                continue
            x = run_layer(ops, x, layer, eps=eps, added_eps=spec.added_eps, onto=onto)
            onto = None
            if late is not None:
                x, late = ops.add(x, late), None
            if given is not None:
                x = ops.add(x, own_embedding(ops, spec, x, layer, given, number))
            if layer.scale != 1.0:
                x = ops.scale(x, layer.scale)
            ops.tap(x, number)
    norm = weights.norm
    if weights.transform is not None:
        assert norm is not None
        dense, behind = weights.transform
        x = ops.stream(ops.norm(ops.curve(ops.norm(x, norm, eps=eps), dense), behind, eps=eps), 0)
        norm = None
    return ops.head(x, norm, weights.head, eps=eps, softcap=spec.logit_softcap, scale=spec.logit_scale)


def run_layer(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
    added_eps: float,
    own: int = 0,
    onto: Stream | None = None,
) -> Stream:
    """x + attention(x), then + mlp(x), if any, each with the norms that it has before and after it. added_eps: of those after.

    own: the number of the stream that it computes in where it has a branch beside attention; x stays as it is then.
    onto: to which attention adds in place of x, which it reads, and which stays as it is then.
    """
    if weights.norms_sums:
        return run_summed(ops, x, weights, eps=eps)
    if weights.keeps_norms:
        return run_kept(ops, x, weights, eps=eps)
    if weights.weighed is not None:
        return run_weighed(ops, x, weights, weights.weighed, eps=eps, added_eps=added_eps)
    h = gated_norm(ops, x, weights.input_norm, weights.input_gate, eps=eps)
    if weights.is_parallel:
        # before anything is added to x, which both norms are of
        attended = run_attention(ops, h, weights)
        h = h if weights.pre_mlp_norm is None else ops.norm(x, weights.pre_mlp_norm, eps=eps)
        if weights.dense is None:
            assert weights.experts is not None
            return run_experts(ops, h, weights, weights.experts, x, eps=added_eps, attended=attended)
        gate_up, down = weights.dense
        beside = run_dense(ops, h, gate_up, weights)
        assert weights.o is not None
        return ops.linear_add(beside, down, ops.linear_add(attended, weights.o, x))
    if weights.o is None:
        assert onto is None, "an MLP alone adds to what it reads"
    elif weights.branch is None:
        x = add_normed(
            ops, x if onto is None else onto, run_attention(ops, h, weights), weights.o, weights.post_attention_norm,
            eps=added_eps, scale=weights.attention_scale,
        )  # fmt: skip
    else:
        x = add_branched(ops, x, h, weights, weights.branch, eps=eps, number=own)
    if weights.dense is None and weights.experts is None:
        return x
    h = gated_norm(ops, x, weights.pre_mlp_norm, weights.mlp_gate, eps=eps)
    if weights.dense is not None:
        gate_up, down = weights.dense
        return add_normed(
            ops, x, run_dense(ops, h, gate_up, weights), down, weights.post_mlp_norm,
            eps=added_eps, scale=weights.mlp_scale,
        )  # fmt: skip
    assert weights.experts is not None
    if weights.apart is not None:
        return run_apart(ops, x, h, weights, weights.experts, weights.apart, eps=eps)
    return run_experts(ops, h, weights, weights.experts, x, eps=added_eps)


def run_summed(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> Stream:
    """norm(n + mlp(n)) of n = norm(x + attention(x)); each norm gives a stream of its own, which the other does not read."""
    assert weights.o is not None
    assert weights.dense is not None
    assert weights.post_attention_norm is not None
    assert weights.post_mlp_norm is not None
    gate_up, down = weights.dense
    x = ops.linear_add(run_attention(ops, x, weights), weights.o, x)
    x = ops.stream(ops.norm(x, weights.post_attention_norm, eps=eps), 0, is_residual=True)
    x = ops.linear_add(run_dense(ops, x, gate_up, weights), down, x)
    return ops.stream(ops.norm(x, weights.post_mlp_norm, eps=eps), 1, is_residual=True)


def run_kept(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> Stream:
    """m + mixture(m) of m = norm(n + attention(n)), n = norm(x), all four scaled; each norm gives a stream of its own."""
    assert weights.input_norm is not None
    assert weights.pre_mlp_norm is not None
    assert weights.o is not None
    assert weights.experts is not None
    x = ops.stream(ops.norm(x, weights.input_norm, eps=eps), 0, is_residual=True)
    a = run_attention(ops, x, weights)
    if weights.before_attention == 1.0:
        x = add_normed(ops, x, a, weights.o, None, eps=eps, scale=weights.attention_scale)
    else:  # ranks read x until they have met behind the projection
        added = ops.linear(a, weights.o)
        x = ops.add(ops.scale(x, weights.before_attention), added, scale=weights.attention_scale)
    x = ops.stream(ops.norm(x, weights.pre_mlp_norm, eps=eps), 1, is_residual=True)
    mixture = ops.experts(x, weights.experts)
    x = x if weights.before_mlp == 1.0 else ops.scale(x, weights.before_mlp)
    return ops.add(x, mixture, scale=weights.mlp_scale)


def run_weighed(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    sums: WeighedSums[Vector],
    *,
    eps: float,
    added_eps: float,
) -> Stream:
    """x * a + norm(attention(norm(x))), then * b + norm(s * mlp(norm(x))), where the norms behind have weights by channel."""
    assert weights.input_norm is not None
    assert weights.post_attention_norm is not None
    assert weights.post_mlp_norm is not None
    assert weights.o is not None
    # ranks read x until they have met behind the last projection
    y = ops.linear(run_attention(ops, ops.norm(x, weights.input_norm, eps=eps), weights), weights.o)
    x = ops.add(ops.keep(x, sums.by_attention), ops.norm(y, weights.post_attention_norm, eps=added_eps))
    y = ops.weigh_hidden(mlp_alone(ops, x, weights, eps=eps), sums.mlp_given)
    return ops.add(ops.keep(x, sums.by_mlp), ops.norm(y, weights.post_mlp_norm, eps=added_eps))


def run_late(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> tuple[Stream, Hidden]:
    """x + attention(x), then + the shared experts of it; and what the mixture gives, by the same norm, which is to be added."""
    assert weights.input_norm is not None
    assert weights.pre_mlp_norm is not None
    assert weights.o is not None
    assert weights.experts is not None
    assert weights.shared is not None
    x = ops.linear_add(run_attention(ops, ops.norm(x, weights.input_norm, eps=eps), weights), weights.o, x)
    h = ops.norm(x, weights.pre_mlp_norm, eps=eps)
    mixture = ops.experts(h, weights.experts)
    beside = run_inner(ops, h, weights.shared.gate_up, weights)
    return ops.linear_add(beside, weights.shared.down, x), mixture


def gated_norm(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    norm: Vector | None,
    gate: NormGate[Linear] | None,
    *,
    eps: float,
) -> Stream | Hidden:
    """norm(x) times what gates it, if anything does; x where it has no norm."""
    if norm is None:
        return x
    h = ops.norm(x, norm, eps=eps)
    return h if gate is None else ops.gate_given(ops.curve(h, gate.down), gate.up, h, 0)


def add_branched(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    h: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    branch: BranchWeights[Vector, Linear],
    *,
    eps: float,
    number: int,
) -> Stream:
    """(x + norm(attention(h)) + h + norm(h L^T R^T)) / sqrt(2), where h is the norm of x, as stream `number`."""
    assert weights.post_attention_norm is not None
    assert weights.o is not None
    low = ops.norm(ops.linear(ops.linear(h, branch.left), branch.right), branch.norm, eps=eps)
    y = ops.add(ops.branch(x, number, scale=HALF_POWER), low, scale=HALF_POWER)
    y = ops.add(y, h, scale=HALF_POWER)
    attended = ops.norm(ops.linear(run_attention(ops, h, weights), weights.o), weights.post_attention_norm, eps=eps)
    return ops.add(y, attended, scale=HALF_POWER)


def run_streams(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    streams: StreamsSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
    x: Stream,
) -> Stream:
    """All layers over streams that x begins, and their mean: each is made as large as the first, at both ends."""
    n = streams.n_streams
    given = begin_inputs(ops, spec, weights, x)
    begin = [ops.match(ops.linear(x, one), x, i, least=LEAST_SQUARE) for i, one in enumerate(weights.begin, 1)]
    xs = (ops.branch(x, 0), *begin)
    for number, layer in enumerate(weights.layers):
        xs = mix_layer(ops, spec, streams, xs, layer)
        if given is not None:
            added = own_embedding(ops, spec, xs[streams.active], layer, given, number)
            xs = (xs[0], *(ops.add(one, added) for one in xs[1:]))
        if number < spec.n_layers - 1:
            ops.tap(xs[streams.active], number)
    x = ops.branch(xs[0], n, scale=1 / n)
    for i, one in enumerate(weights.end, 1):
        x = ops.add(x, ops.match(ops.linear(xs[i], one), xs[0], i, least=LEAST_SQUARE), scale=1 / n)
    ops.tap(x, spec.n_layers - 1)
    return x


def run_connected(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    hyper: HyperSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
    x: Stream,
) -> Stream:
    """All layers over streams that x begins, and their sum or mean: what reads and adds to them is weighed by connections, by
    which they may mix, too.
    """
    n, eps = hyper.n_streams, spec.norm_eps
    xs = tuple(ops.branch(x, i) for i in range(n))
    for number, layer in enumerate(weights.layers):
        assert layer.connections is not None
        for connection, run in zip(layer.connections, (attention_alone, mlp_alone), strict=True):
            c = ops.connections(xs, connection.weight, connection.scale, connection.base, eps=eps)
            y = run(ops, ops.gather(xs, c, n, eps=hyper.eps), layer, eps=eps)
            how = {"magnitude": hyper.magnitude, "eps": hyper.eps}
            xs = ops.mingle(xs, y, c, rounds=hyper.rounds, **how) if hyper.rounds else ops.spread(xs, y, c, **how)
        if number < spec.n_layers - 1:
            ops.tap(xs[0], number)
    end = weights.connection
    if end is None:
        x = ops.branch(xs[0], n, scale=1 / n)
        for other in xs[1:]:
            x = ops.add(x, other, scale=1 / n)
    else:
        x = ops.gather(xs, ops.connections(xs, end.weight, end.scale, end.base, eps=eps), n, eps=hyper.eps)
    ops.tap(x, spec.n_layers - 1)
    return x


def run_gated(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    streams: GatedSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
    x: Stream,
) -> Stream:
    """All layers over streams in one row that x begins, and what the end's connection reads of them, which alone is tapped."""
    n, eps = streams.n_streams, spec.norm_eps
    x = ops.widen(x, n)
    before: Hidden | None = None
    if spec.ngrams is not None:
        assert weights.ids is not None
        before = ops.move_states(ops.token_ids(spec.ngrams.n_before, spec.ngrams.end), None, weights.ids)
    for layer in weights.layers:
        assert layer.gated is not None
        if layer.ngrams is not None:
            assert before is not None
            assert spec.ngrams is not None
            x = add_ngrams(ops, x, before, layer.ngrams, spec.ngrams, n, eps=eps)
        for connection, run in zip(layer.gated, (attention_alone, mlp_alone), strict=True):
            assert connection.inject is not None
            h = ops.norm(x, connection.norm, eps=eps, parts=n)
            c = ops.injections(h, connection.inject)
            y = run(ops, gated_streams(ops, h, connection, n), layer, eps=eps)
            x = ops.inject(x, y, c, magnitude=MOST_INJECTED, scale=1 / n)
    end = weights.gated
    assert end is not None
    x = ops.stream(gated_streams(ops, ops.norm(x, end.norm, eps=eps, parts=n), end, n), n)
    ops.tap(x, spec.n_layers - 1)
    return x


def attention_alone(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
    *,
    eps: float,
) -> Hidden:
    """attention(norm(x)), or of x where it has no norm."""
    assert weights.o is not None
    h = x if weights.input_norm is None else ops.norm(x, weights.input_norm, eps=eps)
    return ops.linear(run_attention(ops, h, weights), weights.o)


def begin_inputs(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    weights: DecoderWeights[Table, Vector, Linear, Heads, Experts],
    x: Stream,
) -> Hidden | None:
    """The embeddings of all layers, if there are any; x is the stream's beginning."""
    inputs, of_layers = weights.inputs, spec.layer_inputs
    if inputs is None or of_layers is None:
        return None
    # what the stream's beginning adds is divided by sqrt(D) before its norm
    return ops.layer_inputs(
        x, inputs.projection, inputs.norm, inputs.table, eps=spec.norm_eps * spec.hidden,
        table_scale=of_layers.width**0.5, scale=HALF_POWER,
    )  # fmt: skip


def mix_layer(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    streams: StreamsSpec,
    xs: tuple[Stream, ...],
    layer: LayerWeights[Table, Vector, Linear, Heads, Experts],
) -> tuple[Stream, ...]:
    """Predict all streams from all of them, compute the active one, correct each by how far that was off."""
    mixing, eps, active = layer.mixing, spec.norm_eps, streams.active
    assert mixing is not None
    assert layer.branch is not None, "a layer over streams computes in one of its own"
    scale = 1 / spec.hidden
    routed = ops.linear(ops.norm(xs[active], mixing.norm, eps=eps), mixing.router)
    xs = ops.predict(xs, routed, mixing.predict, scale=scale)
    y = run_layer(ops, xs[active], layer, eps=eps, added_eps=eps, own=streams.n_streams)
    routed = ops.linear(ops.norm(y, mixing.norm, eps=eps), mixing.router)
    return ops.correct(xs, y, routed, mixing.correct, scale=scale, active=active)


def own_embedding(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    spec: ModelSpec,
    x: Stream,
    layer: LayerWeights[Table, Vector, Linear, Heads, Experts],
    given: Hidden,
    number: int,
) -> Hidden:
    """What the layer's own embedding, gated by x, adds to the stream, or to all streams but the first."""
    own, of_layers = layer.embedding, spec.layer_inputs
    assert own is not None
    assert of_layers is not None
    output = None if layer.mixing is None else layer.mixing.output
    h = x if output is None else ops.weigh(x, output)
    gated = ops.gate_given(h, own.gate, given, number * of_layers.width)
    return ops.norm(ops.linear(gated, own.projection), own.norm, eps=spec.norm_eps)


def add_normed(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    x: Stream,
    y: Hidden,
    projection: Linear,
    norm: Vector | None,
    *,
    eps: float,
    scale: float = 1.0,
) -> Stream:
    """x + scale * norm(y W^T), or x + scale * y W^T."""
    if norm is None and scale == 1.0:
        return ops.linear_add(y, projection, x)
    added = ops.linear(y, projection)
    return ops.add(x, added if norm is None else ops.norm(added, norm, eps=eps), scale=scale)


def run_attention(
    ops: Ops[Stream, Hidden, Table, Vector, Linear, Heads, Experts],
    h: Stream | Hidden,
    weights: LayerWeights[Table, Vector, Linear, Heads, Experts],
) -> Hidden:
    """The heads' outputs [T, H dv], or [T, H v] of latent attention and of states.

    Latents are attended to as they lie in the cache, in prefill as in decode, and states move on token by token: one form,
    so that both phases have the same bits.
    """
    heads, qkv = weights.attention, weights.qkv
    assert heads is not None
    assert qkv is not None
    if isinstance(qkv, StateWeights):
        # first, as what lies between its steps may be as wide as rates are, and is done with then
        decays: Hidden | None = None
        for one in qkv.decays:
            decays = ops.linear(h if decays is None else decays, one)
        rates = None if qkv.rates is None else ops.linear(h, qkv.rates)
        a = ops.move_states(ops.linear(h, qkv.qkv), rates, heads, decays=decays)
    elif isinstance(qkv, LatentWeights):
        a = run_latents(ops, h, qkv, heads)
    elif isinstance(qkv, SelectiveWeights):
        a = run_selective(ops, h, qkv, heads)
    elif isinstance(qkv, UnitWeights):
        a = run_units(ops, h, qkv, heads)
    else:
        if weights.has_index:
            ops.choose(h, h, heads)
        y = ops.linear(h, qkv)
        y = y if weights.clip is None else ops.clip(y, weights.clip)
        a = ops.attention(ops.rotate_and_cache(y, heads), heads)
    if not isinstance(qkv, StateWeights):
        if weights.gates_normed and weights.gate is not None:
            assert weights.o_norm is not None
            a = ops.norm(a, weights.o_norm, eps=weights.inner_eps, parts=weights.o_norms)
            return ops.gate_heads(h, weights.gate, a)
        a = a if weights.gate is None else ops.gate_heads(h, weights.gate, a)
        if weights.difference is not None:
            a = ops.fold(a, (1.0, -weights.difference))
        return (
            a if weights.o_norm is None else ops.norm(a, weights.o_norm, eps=weights.inner_eps, parts=weights.o_norms)
        )
    if qkv.norms_first:
        assert qkv.norm is not None
        assert weights.gate is not None
        return ops.gate_heads(h, weights.gate, ops.norm(a, qkv.norm, eps=qkv.norm_eps))
    if weights.gate is not None:
        a = ops.gate_heads(h if qkv.first_gate is None else ops.linear(h, qkv.first_gate), weights.gate, a)
    return a if qkv.norm is None else ops.norm(a, qkv.norm, eps=qkv.norm_eps, parts=qkv.n_norms)
