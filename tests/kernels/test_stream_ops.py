"""Streams beside each other, embeddings of layers and sparse gates: the native backend and torch against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops import reference
from diptych.compute.ops.contract import Activation
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from diptych.compute.ops.torch.loader import TorchLinear, TorchNorm
from diptych.compute.ops.torch.ops import TorchOps
from diptych.models.gates import CLAMPED, EXACT, SQUARED, GateForm
from op_bench import Bench, check, make_batch, noise

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
T, CPU = 5, torch.device("cpu")
WIDTHS = [2, 15, 64, 130]


def others(bench: Bench, *values: torch.Tensor) -> list[int]:
    """Further inputs of the program, as buffers."""
    buffers = [bench.program.add_f32(one.shape[1]) for one in values]
    for buffer, one in zip(buffers, values, strict=True):
        bench.program.embed(bench.program.add_table(one.contiguous()), buffer, 1.0)
    return buffers


def torch_ops() -> TorchOps:
    batch, n_blocks = make_batch(EdgeShape(name="", sequences=((0, T),)))
    sizes: dict[str, Any] = {"heads": [(1, 2, 2)], "n_blocks": n_blocks, "block_tokens": 16}
    kv = TorchKVStore(dtype=torch.float32, device=CPU, **sizes)
    return TorchOps(batch, kv, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
def test_sparse_gate(isa: str, activation: Activation, width: int) -> None:
    """Mean and deviation are of the token's own gate: lanes behind its end count for neither."""
    x = noise(T, 2 * width, seed=1) + 0.5
    bench = Bench(isa, x)
    out = bench.program.add_f32(width)
    bench.program.sparse_gate(x=bench.x, out=out, cutoff=0.3, activation=activation.value)
    expected = reference.sparse_gate(x, activation, 0.3)
    check("sparse_gate", bench.run(out, width), expected)
    both = TorchLinear(torch.eye(2 * width), None, activation)
    torch.testing.assert_close(torch_ops().sparse_gate(x, both, cutoff=0.3), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", [CLAMPED, GateForm(bound=0.8), GateForm(alpha=0.5, limit=1.5, bound=0.7, shift=-0.3)])
def test_bent_gate(isa: str, form: GateForm, width: int) -> None:
    """Bounds before the sigmoid and behind it, of both signs for up; each value by itself."""
    x = noise(T, 2 * width, seed=1, scale=6.0)
    bench = Bench(isa, x)
    out = bench.program.add_f32(width)
    bench.program.bent_gate(x=bench.x, out=out, form=form.numbers)
    expected = reference.bent_gate(x, form)
    scale = max(1.0, expected.abs().max().item())
    check("bent_gate", bench.run(out, width) / scale, expected / scale)
    both = TorchLinear(torch.eye(2 * width), None, Activation.SILU)
    torch.testing.assert_close(torch_ops().bent_gate(x, both, form=form), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [SQUARED, EXACT])
@pytest.mark.parametrize("width", WIDTHS)
def test_curved_gate(isa: str, width: int, form: GateForm) -> None:
    """BitNet's and ModernBERT's: the curve of the first half of a row times the second."""
    assert form.curve is not None
    x = noise(T, 2 * width, seed=1, scale=3.0)
    bench = Bench(isa, x)
    out = bench.program.add_f32(width)
    bench.program.curve(x=bench.x, out=out, activation=form.curve.value)
    expected = reference.bent_gate(x, form)
    check("bent_gate", bench.run(out, width), expected)
    both = TorchLinear(torch.eye(2 * width), None, form.curve)
    torch.testing.assert_close(torch_ops().bent_gate(x, both, form=form), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "activation",
    [
        Activation.SILU,
        Activation.GELU_TANH,
        Activation.GELU,
        Activation.RELU,
        Activation.SQUARED_RELU,
        Activation.XIELU,
        Activation.SOFTPLUS,
    ],
)
def test_curve(isa: str, activation: Activation, width: int) -> None:
    """Each value by itself; what is not a number stays none."""
    x = noise(T, width, seed=1, scale=3.0)
    numbers = (0.8, 0.9, 0.5, -0.1)
    expected = reference.curve(x, activation, numbers)
    for factor in (None, -0.3):
        bench = Bench(isa, x)
        out = bench.program.add_f32(width)
        bench.program.curve(x=bench.x, out=out, activation=activation.value, numbers=numbers)
        if factor is not None:  # in place, as `scale` does
            bench.program.branch(x=out, out=out, scale=factor)
        check("curve", bench.run(out, width), expected * (1.0 if factor is None else factor))
    weight = TorchLinear(torch.eye(width), None, activation)
    torch.testing.assert_close(torch_ops().curve(x, weight, numbers=numbers), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch_ops().scale(expected, -0.3), -0.3 * expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_clip(isa: str, width: int) -> None:
    """In place, as projections are."""
    x = noise(T, width, seed=1, scale=3.0)
    bench = Bench(isa, x)
    bench.program.curve(x=bench.x, out=bench.x, activation="clip", numbers=(1.5, 0.0, 0.0, 0.0))
    check("clip", bench.run(bench.x, width), x.clamp(-1.5, 1.5))
    assert torch.equal(torch_ops().clip(x, 1.5), x.clamp(-1.5, 1.5))


@pytest.mark.parametrize("activation", [Activation.SIGMOID, Activation.SOFTPLUS])
@pytest.mark.parametrize(("n_heads", "head_dim"), [(3, 24), (17, 5), (4, 128), (50, 1)])
def test_gates_of_heads(isa: str, n_heads: int, head_dim: int, activation: Activation) -> None:
    """One number a head: LFM3 has one projection for all, of a row for each; or by softplus one a channel (Laguna)."""
    a, gates = noise(T, n_heads * head_dim, seed=1, scale=3.0), noise(T, n_heads, seed=2, scale=3.0)
    bench = Bench(isa, a)
    (given,), odd = others(bench, gates), bench.program.add_f32(n_heads * head_dim - 1)
    with pytest.raises(ValueError, match="equal parts"):
        bench.program.gate_heads(gates=odd, x=bench.x)
    with pytest.raises(ValueError, match="activation"):
        bench.program.gate_heads(gates=given, x=bench.x, activation="silu")
    bench.program.gate_heads(gates=given, x=bench.x, activation=activation.value)
    curve = torch.sigmoid if activation is Activation.SIGMOID else torch.nn.functional.softplus
    expected = (a.unflatten(-1, (n_heads, head_dim)) * curve(gates)[..., None]).flatten(1)
    check("gate_heads", bench.run(bench.x, n_heads * head_dim), expected)
    one_each = TorchLinear(torch.eye(n_heads), None, activation)
    torch.testing.assert_close(torch_ops().gate_heads(gates, one_each, a), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch_ops().sum(a, expected), a + expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_stream_is_made_as_large_as_another(isa: str, width: int) -> None:
    """One that is next to nothing stays so."""
    y, x = noise(T, width, seed=1, scale=3.0), noise(T, width, seed=2)
    y[1] *= 1e-4
    bench = Bench(isa, y)
    (other,), out, copy = others(bench, x), bench.program.add_f32(width), bench.program.add_f32(width)
    bench.program.match(y=bench.x, x=other, out=out, least=1e-5)
    bench.program.branch(x=out, out=copy, scale=0.5)
    expected = reference.match(y, x, least=1e-5)
    check("match", bench.run(out, width), expected)
    bench = Bench(isa, y)
    out = bench.program.add_f32(width)
    bench.program.branch(x=bench.x, out=out, scale=0.5)
    check("branch", bench.run(out, width), 0.5 * y)
    torch.testing.assert_close(torch_ops().match(y, x, 1, least=1e-5), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_streams_predict_and_correct_each_other(isa: str, width: int, n: int) -> None:
    """Every new value is of all old ones, whichever is written first."""
    xs = [noise(T, width, seed=i) for i in range(n)]
    y, routed, active = noise(T, width, seed=20), noise(T, n, seed=21, scale=2.0), n - 1
    first, second = noise(n * n, n, seed=22, scale=0.3), noise(n, n, seed=23, scale=0.3)
    predicted = reference.predict(xs, routed, first, scale=0.7)
    expected = reference.correct(predicted, y, routed, second, scale=0.7, active=active)
    for i in range(n):
        bench = Bench(isa, xs[0])
        buffers = [bench.x, *others(bench, *xs[1:])]
        new, route = others(bench, y, routed)
        weights = [bench.program.add_vector(one.flatten()) for one in (first, second)]
        bench.program.predict(xs=buffers, routed=route, weight=weights[0], scale=0.7)
        bench.program.correct(xs=buffers, y=new, routed=route, weight=weights[1], scale=0.7, active=active)
        check("correct", bench.run(buffers[i], width), expected[i])
    ops = torch_ops()
    got = ops.predict(tuple(xs), routed, TorchNorm(first), scale=0.7)
    got = ops.correct(got, y, routed, TorchNorm(second), scale=0.7, active=active)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_streams_are_joined_by_what_a_connection_says(isa: str, width: int, n: int) -> None:
    """Every weight is of all streams; outputs have the scale of their n, those behind the last scale that one."""
    xs, y = [noise(T, width, seed=i, scale=3.0) for i in range(n)], noise(T, width, seed=20)
    m, eps, magnitude = 2 * n + 5, 0.03, 1.5
    weight, base = noise(m, n * width, seed=21, scale=(n * width) ** -0.5), noise(m, seed=22)
    scale = torch.tensor([0.7, 1.3])
    c = reference.connections(xs, weight, scale, base, eps=0.5)
    joined = reference.gather(xs, c, eps=eps)
    spread = reference.spread(xs, y, c, magnitude=magnitude, eps=eps)

    def run(*, spreads: bool, buffer: int, size: int) -> torch.Tensor:
        bench = Bench(isa, xs[0])
        program, buffers = bench.program, [bench.x, *others(bench, *xs[1:])]
        (new,), out, to = others(bench, y), program.add_f32(m), program.add_f32(width)
        vectors = [program.add_vector(one.flatten().contiguous()) for one in (weight, scale, base)]
        program.connections(xs=buffers, weight=vectors[0], scale=vectors[1], base=vectors[2], out=out, eps=0.5)
        if spreads:
            program.spread(xs=buffers, y=new, c=out, magnitude=magnitude, eps=eps)
        else:
            program.gather(xs=buffers, c=out, out=to, eps=eps)
        return bench.run([*buffers, out, to][buffer], size)

    check("connections", run(spreads=False, buffer=n, size=m), c)
    check("gather", run(spreads=False, buffer=n + 1, size=width), joined)
    for i in range(n):
        check("spread", run(spreads=True, buffer=i, size=width), spread[i])
    ops, vectors = torch_ops(), [TorchNorm(one) for one in (weight, scale, base)]
    found = ops.connections(tuple(xs), *vectors, eps=0.5)
    torch.testing.assert_close(found, c, atol=1e-5, rtol=0)
    torch.testing.assert_close(ops.gather(tuple(xs), c, n, eps=eps), joined, atol=1e-5, rtol=0)
    for one, other in zip(ops.spread(tuple(xs), y, c, magnitude=magnitude, eps=eps), spread, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_streams_mix_by_a_matrix_whose_sums_are_near_one(isa: str, width: int, n: int, rounds: int) -> None:
    """Outputs of connections that are far apart, so that a softmax alone would be far from it."""
    xs, y = [noise(T, width, seed=i) for i in range(n)], noise(T, width, seed=20)
    c, settings = noise(T, n * (n + 2), seed=21, scale=3.0), {"magnitude": 2.0, "rounds": rounds, "eps": 1e-3}
    expected = reference.mingle(xs, y, c, **settings)
    for i in range(n):
        bench = Bench(isa, xs[0])
        buffers = [bench.x, *others(bench, *xs[1:])]
        new, given = others(bench, y, c)
        bench.program.mingle(xs=buffers, y=new, c=given, **settings)
        check("mingle", bench.run(buffers[i], width), expected[i])
    for one, other in zip(torch_ops().mingle(tuple(xs), y, c, **settings), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [3, 16, 40])
def test_embeddings_of_layers(isa: str, width: int, dtype: torch.dtype) -> None:
    """Each layer's part is normed by itself; tokens behind the table have its first row."""
    x, norm, table = noise(T, 3 * width, seed=1), noise(width, seed=2) + 1, noise(T - 1, 3 * width, seed=3).to(dtype)
    rows = table[[*range(T - 1), 0]]
    settings = {"eps": 1e-3, "table_scale": 4.0, "scale": 0.7}
    bench = Bench(isa, x)
    program = bench.program
    program.layer_inputs(x=bench.x, norm=program.add_vector(norm), table=program.add_table(table), **settings)
    out = program.add_f32(width)
    program.copy_columns(x=bench.x, out=out, first=width)
    expected = reference.layer_inputs(x, norm, rows, **settings)
    check("layer_inputs", bench.run(bench.x, 3 * width), expected)
    whole = TorchLinear(torch.eye(3 * width), None)
    got = torch_ops().layer_inputs(x, whole, TorchNorm(norm), table.float(), **settings)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_joined(isa: str, width: int) -> None:
    """Each keeps its columns, whoever is written first."""
    x, y = noise(T, width, seed=1), noise(T, 9, seed=2)
    bench = Bench(isa, x)
    (other,), out = others(bench, y), bench.program.add_f32(width + 9)
    bench.program.copy_columns(x=other, out=out, column=width, n=9)
    bench.program.copy_columns(x=bench.x, out=out, n=width)
    check("join", bench.run(out, width + 9), torch.cat([x, y], dim=1))
    assert torch.equal(torch_ops().join(x, y), torch.cat([x, y], dim=1))


@pytest.mark.parametrize("width", WIDTHS)
def test_weighed_and_scaled(isa: str, width: int) -> None:
    """What a stream is added with may be scaled, normed or not."""
    x, y, weight = noise(T, width, seed=1), noise(T, width, seed=2), noise(width, seed=3)
    bench = Bench(isa, x)
    out, vector = bench.program.add_f32(width), bench.program.add_vector(weight)
    bench.program.weigh(x=bench.x, weight=vector, out=out)
    check("weigh", bench.run(out, width), x * weight)
    bench = Bench(isa, x)
    (other,), vector = others(bench, y), bench.program.add_vector(weight)
    bench.program.add(other, bench.x, scale=0.5)
    bench.program.add_norm(other, vector, 1e-6, bench.x, 0.25)
    check("add", bench.run(bench.x, width), x + 0.5 * y + 0.25 * reference.rms_norm(y, weight, eps=1e-6))
    assert torch.equal(torch_ops().weigh(x, TorchNorm(weight)), x * weight)
    torch.testing.assert_close(torch_ops().add(x, y, scale=0.5), x + 0.5 * y)


def test_what_does_not_fit_is_refused(isa: str) -> None:
    """A program is recorded by numbers: a wrong one must not reach memory."""
    bench = Bench(isa, noise(T, 8, seed=1))
    program = bench.program
    (other,), nine = others(bench, noise(T, 6, seed=2)), program.add_vector(torch.ones(9))
    with pytest.raises(ValueError, match="one width"):
        program.branch(x=bench.x, out=other, scale=1.0)
    with pytest.raises(ValueError, match="as long as a row"):
        program.weigh(x=bench.x, weight=nine, out=bench.x)
    with pytest.raises(ValueError, match="as many streams"):
        program.predict(xs=[bench.x, bench.x], routed=other, weight=nine, scale=1.0)
    with pytest.raises(ValueError, match="from 1 to 8"):
        program.correct(xs=[bench.x] * 9, y=bench.x, routed=other, weight=nine, scale=1.0, active=0)
    two, vectors = [bench.x, program.add_f32(8)], {"weight": nine, "scale": nine, "base": nine}
    with pytest.raises(ValueError, match="a base for each output"):
        program.connections(xs=two, out=other, eps=1.0, **vectors)
    with pytest.raises(ValueError, match="from 1 to 8"):
        program.connections(xs=[bench.x] * 9, out=other, eps=1.0, **vectors)
    with pytest.raises(ValueError, match="not of as many streams"):
        program.spread(xs=[*two, *two], y=program.add_f32(8), c=other, magnitude=1.0, eps=0.0)
    with pytest.raises(ValueError, match="one width"):
        program.gather(xs=two, c=other, out=other, eps=0.0)
    with pytest.raises(ValueError, match="beside them"):
        program.gather(xs=two, c=other, out=two[1], eps=0.0)
    with pytest.raises(ValueError, match="none of them"):
        program.spread(xs=two, y=two[1], c=other, magnitude=1.0, eps=0.0)
    with pytest.raises(ValueError, match="not of as many streams"):
        program.mingle(xs=two, y=program.add_f32(8), c=other, magnitude=1.0, rounds=1, eps=0.0)
    with pytest.raises(ValueError, match="one round at least"):
        program.mingle(xs=two, y=program.add_f32(8), c=bench.x, magnitude=1.0, rounds=0, eps=0.0)
    with pytest.raises(ValueError, match="beyond the row"):
        program.copy_columns(x=bench.x, out=other, first=3)
    with pytest.raises(ValueError, match="beyond the row"):
        program.copy_columns(x=other, out=bench.x, column=3, n=6)
    with pytest.raises(ValueError, match="beside each other"):
        program.sparse_gate(x=bench.x, out=other, cutoff=1.0, activation="silu")
    with pytest.raises(ValueError, match="beside each other"):
        program.bent_gate(x=bench.x, out=other, form=CLAMPED.numbers)
    with pytest.raises(ValueError, match="half as wide"):
        program.curve(x=bench.x, out=other, activation="squared_relu")
    with pytest.raises(ValueError, match="whole number"):
        program.layer_inputs(x=bench.x, norm=nine, table=0, eps=1e-6, table_scale=1.0, scale=1.0)
