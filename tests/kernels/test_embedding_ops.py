"""Rows of the embedding on the native backend: of a table, of a packed head, and of learned positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.tolerances import EdgeShape
from op_bench import Bench, check, make_batch, noise

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
BF16 = torch.bfloat16
BEST = cpu.instruction_sets()[0] if cpu.instruction_sets() else ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_embedding_rows_are_exact(isa: str, dtype: torch.dtype) -> None:
    """fp16 subnormals, zeros and the largest values included."""
    table = noise(4, 37, seed=1).to(dtype)
    table[1, :4] = torch.tensor([6e-8, -6e-8, 0.0, 65504.0]).to(dtype)
    bench = Bench(isa, table)
    assert torch.equal(bench.run(bench.x, 37), table.float())


def test_only_a_table_of_many_rows_needs_its_stride() -> None:
    """Older torch gives an axis of one entry the stride 1, whatever its array has."""
    values = noise(3, 37, seed=1).numpy()
    program = Bench(BEST, noise(1, 37, seed=1)).program
    program.add_table(np.lib.stride_tricks.as_strided(values, (1, 37), (4, 4)))
    with pytest.raises(ValueError, match="contiguous"):
        program.add_table(values[::2])


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("width", [1, 37, 64, 100, 896])
def test_rows_of_a_packed_head_have_the_bits_of_its_table(isa: str, width: int, scale: float) -> None:
    """A tied bf16 embedding is read out of the packed head: panels of 64 rows in strips of 16, pairs of inputs."""
    table = noise(150, width, seed=1, scale=10.0).to(BF16)
    table[3] = torch.tensor([0.0, -0.0, 3e38, -1e-40, torch.inf] * width).to(BF16)[:width]
    bench = Bench(isa, table.float(), threads=2)  # its tokens are rows 0, 1, 2, ...
    program = bench.program
    head = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=150, k=width), [table])
    separate, tied = program.add_f32(width), program.add_f32(width)
    program.embed(program.add_table(table), separate, scale)
    program.embed_tied(head, tied, scale)
    got, expected = bench.run(tied, width), torch.empty(150, width)
    program.read_buffer(separate, expected)
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    # `separate` holds denormals as zero, so the values are checked without them
    values = torch.where(table.abs() < 1e-37, 0.0, table.float())
    assert torch.equal(got, values * scale)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_learned_positions_are_added_to_either_embedding(isa: str, dtype: torch.dtype) -> None:
    """By a token's position in its sequence, behind the rows that stand for none; one beyond the table is refused."""
    shape = EdgeShape(name="", sequences=((3, 2), (0, 4), (6, 1)))
    batch, table = make_batch(shape)[0], noise(7, 37, seed=1).to(BF16)
    places = noise(9, 37, seed=2).to(dtype)
    expected = 0.5 * table.float() + places.float()[[2 + p for p in (3, 4, 0, 1, 2, 3, 6)]]
    for rows in (places, places[:-1].clone()):
        bench = Bench(isa, table.float(), threads=2)
        program = bench.program
        head = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=7, k=37), [table])
        separate, tied = program.add_f32(37), program.add_f32(37)
        placed = {"positions": program.add_table(rows), "first_position": 2}
        program.embed(program.add_table(table), separate, 0.5, **placed)
        program.embed_tied(head, tied, 0.5, **placed)
        if len(rows) < 9:
            with pytest.raises(ValueError, match="longer than the table of positions"):
                bench.run(tied, 37, batch)
            continue
        check("embed", bench.run(tied, 37, batch), expected)
        got = torch.empty(7, 37)
        program.read_buffer(separate, got)
        check("embed", got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_row_of_its_type_is_added_to_a_token(isa: str, dtype: torch.dtype) -> None:
    """The first where no sequence has a second text; behind where one begins the second, in a later chunk, too."""
    shape = EdgeShape(name="", sequences=((3, 2), (0, 4), (6, 1)))
    batch, table = make_batch(shape)[0], noise(7, 37, seed=1).to(BF16)
    types, places = noise(2, 37, seed=2).to(dtype), noise(7, 37, seed=3).to(dtype)
    positions = [3, 4, 0, 1, 2, 3, 6]
    begins = np.array([4, 2, 7], dtype=np.int32)
    for second, of in ((None, [0] * 7), (begins, [0, 1, 0, 0, 1, 1, 0])):
        bench = Bench(isa, table.float(), threads=2)
        program = bench.program
        head = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=7, k=37), [table])
        plain, separate, tied = (program.add_f32(37) for _ in range(3))
        placed = {"types": program.add_table(types), "positions": program.add_table(places)}
        program.embed(program.add_table(table), separate, 0.5, **placed)
        program.embed(program.add_table(table), plain, 0.5, types=placed["types"])
        program.embed_tied(head, tied, 0.5, **placed)
        expected = 0.5 * table.float() + types.float()[of]
        check("embed", bench.run(plain, 37, replace(batch, second_S=second)), expected)
        assert replace(batch, second_S=second).types_T.tolist() == of
        for buffer in (separate, tied):
            got = torch.empty(7, 37)
            program.read_buffer(buffer, got)
            check("embed", got, expected + places.float()[positions])


def test_a_second_type_that_is_in_no_table_is_refused() -> None:
    """RoBERTa has one type: a row behind the table's end was read."""
    bench = Bench(BEST, noise(7, 16, seed=1))
    batch = replace(make_batch(EdgeShape(name="", sequences=((0, 7),)))[0], second_S=np.array([3], dtype=np.int32))
    with pytest.raises(ValueError, match="no second type"):
        bench.run(bench.x, 16, batch)
    out = bench.program.add_f32(16)
    bench.program.embed(0, out, 1.0, types=bench.program.add_table(noise(1, 16, seed=2)))
    with pytest.raises(ValueError, match="no second type"):
        bench.run(out, 16, batch)
    with pytest.raises(ValueError, match="wide"):
        bench.program.embed(0, out, 1.0, types=bench.program.add_table(noise(2, 17, seed=2)))


def test_a_head_that_cannot_serve_as_the_embedding_is_refused() -> None:
    """An int8 head has lost bits, a gated one is in another order, and a token past the last row is not there."""
    program = cpu._cpu.Program(BEST, 1)
    weight = noise(32, 16, seed=1)
    int8 = program.add_linear(cpu._cpu.LinearShape(format="int8", n=32, k=16), [weight])
    gated = program.add_linear(cpu._cpu.LinearShape(format="bf16", n=32, k=16, is_gated=True), [weight])
    for head in (int8, gated):
        with pytest.raises(ValueError, match="bf16 or in groups"):
            program.embed_tied(head, program.add_f32(16), 1.0)
    bench = Bench(BEST, noise(40, 16, seed=2))
    head = bench.program.add_linear(cpu._cpu.LinearShape(format="bf16", n=39, k=16), [noise(39, 16, seed=2)])
    with pytest.raises(ValueError, match="wide"):
        bench.program.embed_tied(head, bench.program.add_f32(17), 1.0)
    out = bench.program.add_f32(16)
    bench.program.embed_tied(head, out, 1.0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        bench.run(out, 16)
