"""States that move on: every kernel set and torch against the reference, cut anywhere, with states left on the way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.kv_store import TorchKVStore
from diptych.compute.ops import reference_states
from diptych.compute.ops.contract import AttentionSpec
from diptych.compute.ops.cpu import kernels as cpu
from diptych.compute.ops.cpu.handles import by_lanes
from diptych.compute.ops.shares import OwnHeads
from diptych.compute.ops.tolerances import OPS
from diptych.compute.ops.torch.loader import TorchAttention, TorchNorm, TorchRule
from diptych.compute.ops.torch.ops import TorchOps
from diptych.models.states import StateRule, StateSpec
from op_bench import Bench, noise
from worlds import KERNEL_SETS

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not cpu.instruction_sets(), reason="the native kernels are not installed"),
]
N_PLACES, T, EPS, CPU = 9, 41, 1e-6, torch.device("cpu")
State = tuple[torch.Tensor, torch.Tensor]
# heads of one lane, of half a vector, of odd widths, of one key head for many (in parts), and of the published sizes; taps of
# one to four
SSD: Any = {"rule": StateRule.SSD, "has_tap_bias": True}
STEADY: Any = {"rule": StateRule.SSD, "n_taps": 1, "is_steady": True}
SELECTIVE: Any = {"rule": StateRule.SELECTIVE, "n_taps": 1}
UNITS: Any = {"rule": StateRule.RG_LRU, "n_key_heads": 1, "key_dim": 1, "n_taps": 1}
CONVOLUTION: Any = {"rule": StateRule.CONVOLUTION, "key_dim": 0}
FORMS = {
    "one": StateSpec(n_key_heads=1, key_dim=1, n_value_heads=1, value_dim=1, n_taps=1),
    "odd": StateSpec(n_key_heads=2, key_dim=7, n_value_heads=4, value_dim=19, n_taps=3),
    "wide": StateSpec(n_key_heads=1, key_dim=24, n_value_heads=3, value_dim=40, n_taps=2),
    "usual": StateSpec(n_key_heads=2, key_dim=128, n_value_heads=4, value_dim=128, n_taps=4),
    "by-key-one": StateSpec(n_key_heads=1, key_dim=1, n_value_heads=1, value_dim=1, n_taps=1, fades_by_key=True),
    "by-key-odd": StateSpec(n_key_heads=2, key_dim=21, n_value_heads=4, value_dim=19, n_taps=3, fades_by_key=True),
    "by-key-bounded": StateSpec(
        n_key_heads=2, key_dim=21, n_value_heads=4, value_dim=19, n_taps=3, fades_by_key=True, least_decay=-5.0
    ),
    "by-key-usual": StateSpec(n_key_heads=2, key_dim=128, n_value_heads=2, value_dim=128, n_taps=4, fades_by_key=True),
    "ssd-one": StateSpec(n_key_heads=1, key_dim=1, n_value_heads=1, value_dim=1, n_taps=1, rule=StateRule.SSD),
    "ssd-odd": StateSpec(
        n_key_heads=2, key_dim=7, n_value_heads=20, value_dim=19, n_taps=3, step_limits=(0.5, 2.0), **SSD
    ),
    "ssd-usual": StateSpec(n_key_heads=1, key_dim=128, n_value_heads=24, value_dim=64, n_taps=4, rate_scale=0.7, **SSD),
    "steady-one": StateSpec(n_key_heads=1, key_dim=1, n_value_heads=1, value_dim=1, **STEADY),
    "steady-odd": StateSpec(n_key_heads=3, key_dim=7, n_value_heads=3, value_dim=19, **STEADY),
    "steady-usual": StateSpec(n_key_heads=4, key_dim=128, n_value_heads=4, value_dim=128, **STEADY),
    "taps-one": StateSpec(n_key_heads=1, n_value_heads=1, value_dim=1, n_taps=1, **CONVOLUTION),
    "taps-odd": StateSpec(n_key_heads=3, n_value_heads=3, value_dim=19, n_taps=4, has_tap_bias=True, **CONVOLUTION),
    "taps-usual": StateSpec(n_key_heads=4, n_value_heads=4, value_dim=64, n_taps=3, **CONVOLUTION),
    "alone": StateSpec(n_key_heads=1, n_value_heads=1, value_dim=2, n_taps=3, key_dim=0, rule=StateRule.TAPS),
    "bent-odd": StateSpec(n_key_heads=3, n_value_heads=3, value_dim=19, n_taps=10, key_dim=0, rule=StateRule.BENT_TAPS),
    "bent-biased": StateSpec(
        n_key_heads=1, n_value_heads=6, value_dim=19, n_taps=4, key_dim=0, rule=StateRule.BENT_TAPS, has_tap_bias=True
    ),
    "selective-one": StateSpec(n_key_heads=1, key_dim=1, n_value_heads=1, value_dim=1, **SELECTIVE),
    "selective-odd": StateSpec(n_key_heads=1, key_dim=7, n_value_heads=20, value_dim=19, **SELECTIVE),
    "selective-heads": StateSpec(n_key_heads=2, key_dim=16, n_value_heads=6, value_dim=32, **SELECTIVE),
    "selective-usual": StateSpec(n_key_heads=1, key_dim=16, n_value_heads=24, value_dim=32, **SELECTIVE),
    "units-one": StateSpec(n_value_heads=1, value_dim=1, **UNITS),
    "units-odd": StateSpec(n_value_heads=20, value_dim=19, **UNITS),
    "units-usual": StateSpec(n_value_heads=5, value_dim=256, **UNITS),
    "bent-usual": StateSpec(
        n_key_heads=4, n_value_heads=4, value_dim=64, n_taps=10, key_dim=0, rule=StateRule.BENT_TAPS
    ),
}


@dataclass
class Rule:
    """Random inputs of T tokens and the numbers of a layer."""

    form: StateSpec

    def __post_init__(self) -> None:
        form, heads = self.form, self.form.n_value_heads
        self.qkv, self.rates = noise(T, form.n_inputs, seed=1), noise(T, form.n_rates, seed=2, scale=3.0)
        self.decays = noise(T, form.n_decays, seed=8, scale=3.0) if form.n_decays else None
        self.scale = max(1, form.key_dim) ** -0.5
        if form.is_selective:
            width = form.width
            self.numbers = {
                "decay": noise(width, form.key_dim, seed=4).exp(),
                "shift": noise(width, seed=5),
                "skip": noise(width, seed=6),
            }
            return
        if form.is_unit:
            self.numbers = {"decay": noise(form.width, seed=4).exp()}
            return
        if form.is_steady:
            self.numbers = {"decay": noise(heads, seed=4).exp()}
            return
        self.numbers = {"taps": noise(form.n_channels, form.n_taps, seed=3)}
        if form.has_tap_bias:
            self.numbers["tap_bias"] = noise(form.n_channels, seed=7)
        if form.n_rates:
            self.numbers |= {"decay": noise(heads, seed=4).exp(), "shift": noise(form.n_decays or heads, seed=5)}
        if form.rule is StateRule.DELTA:
            self.numbers["norm"] = noise(form.value_dim, seed=6) + 1
        if form.rule is StateRule.SSD:
            self.numbers["skip"] = noise(heads, seed=6)

    @cached_property
    def nothing(self) -> State:
        form = self.form
        return (
            torch.zeros(form.n_value_heads, form.key_dim, form.value_dim),
            torch.zeros(form.n_taps - 1, form.n_channels),
        )

    def expected(self, begin: int, end: int, state: State) -> tuple[torch.Tensor, State]:
        return reference_states.move_states(
            self.qkv[begin:end], self.rates[begin:end], state, self.form, self.numbers, scale=self.scale, eps=EPS,
            decays=None if self.decays is None else self.decays[begin:end], begins=state is self.nothing,
        )  # fmt: skip


def batch_of(chunks: list[tuple[int, int]], reads: list[int], writes: list[int], saves: Any = ()) -> ForwardBatch:
    """Chunk i is tokens [begin, end) of the inputs, a sequence of its own."""
    return ForwardBatch(
        token_ids_T=np.concatenate([np.arange(*chunk, dtype=np.int32) for chunk in chunks]),
        query_start_S1=np.array([0, *accumulate(end - begin for begin, end in chunks)], dtype=np.int32),
        context_tokens_S=np.array([end - begin for begin, end in chunks], dtype=np.int32),
        block_table_SM=np.arange(len(chunks), dtype=np.int32)[:, None],
        logits_rows_R=np.zeros(0, dtype=np.int32),
        states=StatePlaces(
            reads_S=np.array(reads, dtype=np.int32),
            writes_S=np.array(writes, dtype=np.int32),
            saves_N3=np.array(saves, dtype=np.int32).reshape(-1, 3),
        ),
    )


class Native(Bench):
    """The rule alone in a program, whose states stay from step to step."""

    def __init__(self, isa: str, rule: Rule, *, threads: int = 1) -> None:
        super().__init__(isa, rule.qkv, threads=threads)
        program, form = self.program, rule.form
        rates = -1
        if form.n_rates:
            rates = program.add_f32(form.n_rates)
            program.embed(program.add_table(rule.rates), rates, 1.0)
        decays = -1
        if rule.decays is not None:
            decays = program.add_f32(form.n_decays)
            program.embed(program.add_table(rule.decays), decays, 1.0)
        self._out_width = form.width
        self.out = program.add_f32(form.width)
        heads = OwnHeads(first_head=0, n_heads=form.n_value_heads, first_kv_head=0, n_kv_heads=form.n_key_heads)
        shape = cpu.state_shape(form, heads, scale=rule.scale, norm_eps=EPS)
        laid = {name: one.mT if one.ndim == 2 else one for name, one in rule.numbers.items()}
        if form.is_selective:
            laid["decay"] = by_lanes(rule.numbers["decay"].view(form.n_value_heads, form.value_dim, -1))
        numbers = {name: program.add_vector(one.reshape(-1).contiguous().numpy()) for name, one in laid.items()}
        program.move_states(qkv=self.x, rates=rates, decays=decays, out=self.out, layer=0, shape=shape, **numbers)
        self._attend_for_form()
        rows = program.add_rows("bf16", self.width)
        program.head(x=self.x, norm=self.norm, eps=1e-6, rows=rows, weight=self.head)
        self.kv = cpu._cpu.KvCache(heads=[(1, 2, 2)], n_blocks=64, block_tokens=64, format="bf16")
        self.kv.add_states([shape.floats], N_PLACES)

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        states = batch.states
        assert states is not None
        self.program.run(
            batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, batch.logits_rows_R,
            self.kv, torch.empty(0, 1), states=(states.reads_S, states.writes_S, states.saves_N3),
        )  # fmt: skip
        result = torch.empty(len(batch.token_ids_T), self._out_width)
        self.program.read_buffer(self.out, result)
        return result


class Torch:
    """The same on the torch backend."""

    def __init__(self, rule: Rule) -> None:
        self._rule, form = rule, rule.form
        spec = AttentionSpec(
            layer=0, n_heads=form.n_value_heads, n_kv_heads=form.n_key_heads, head_dim=form.value_dim, scale=rule.scale,
            norm_eps=EPS, state=form, place=0,
        )  # fmt: skip
        numbers: dict[str, Any] = dict(rule.numbers)
        if "norm" in numbers:
            numbers["norm"] = TorchNorm(numbers["norm"])
        torch_rule = TorchRule(**numbers)
        self._attention = TorchAttention(spec, None, None, rule=torch_rule)
        self._kv = TorchKVStore(
            heads=[(1, 2, 2)], n_blocks=64, block_tokens=64, dtype=torch.float32, device=CPU, forms=[form],
            n_places=N_PLACES,
        )  # fmt: skip

    def step(self, batch: ForwardBatch) -> torch.Tensor:
        ops = TorchOps(batch, self._kv, device=CPU, dtype=torch.float32)
        rates = self._rule.rates[batch.token_ids_T] if self._rule.form.n_rates else None
        decays = None if self._rule.decays is None else self._rule.decays[batch.token_ids_T]
        return ops.move_states(self._rule.qkv[batch.token_ids_T], rates, self._attention, decays=decays)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    """To fp32's tolerance, of rows whose norm magnifies what is next to nothing."""
    assert got.shape == expected.shape
    error = (got - expected).abs().max().item()
    assert error <= OPS["move_states"].tolerance_fp32 * max(1.0, expected.abs().max().item()), (
        f"states differ by {error}"
    )


@pytest.fixture(params=[*KERNEL_SETS, "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


def made(kernels: str, rule: Rule, threads: int = 1) -> Native | Torch:
    return Torch(rule) if kernels == "torch" else Native(kernels, rule, threads=threads)


@cache  # every set has the same, number by number
def three_steps(form: StateSpec) -> list[torch.Tensor]:
    """What the rule says of the next test's steps."""
    rule = Rule(form)
    whole, _ = rule.expected(0, 20, rule.nothing)
    _, behind_7 = rule.expected(0, 7, rule.nothing)
    one, behind_one = rule.expected(20, 21, rule.nothing)
    three, behind_three = rule.expected(21, 24, rule.nothing)
    second = rule.expected(24, 40, behind_7), rule.expected(40, 41, behind_one), rule.expected(20, 23, behind_three)
    third = rule.expected(30, 33, behind_7), rule.expected(30, 31, behind_three)
    return [torch.cat([whole, one, three]), *(torch.cat([rows for rows, _ in step]) for step in (second, third))]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_step_is_what_the_rule_says(kernels: str, form: StateSpec) -> None:
    """Sequences that begin, go on in their place, and begin with another's state; states left on the way hold too."""
    rule = Rule(form)
    side = made(kernels, rule)
    first = side.step(
        batch_of([(0, 20), (20, 21), (21, 24)], [-1, -1, -1], [3, 0, 8], [(0, 7, 1), (0, 16, 2), (2, 3, 5)])
    )
    wanted = three_steps(form)
    check(first, wanted[0])
    # from the state left on the way, in its own place, and from one that a sequence left at its end
    second = side.step(batch_of([(24, 40), (40, 41), (20, 23)], [1, 0, 5], [4, 0, 5]))
    check(second, wanted[1])
    # nobody but who was named wrote anywhere: what was left still is there
    third = side.step(batch_of([(30, 33), (30, 31)], [1, 8], [6, 7]))
    check(third, wanted[2])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_bit_depends_on_how_a_sequence_is_cut(form: StateSpec) -> None:
    """Nor on threads, neighbours, or states left on the way."""
    rule = Rule(form)
    for isa in cpu.instruction_sets():
        whole = Native(isa, rule).step(batch_of([(0, T)], [-1], [0]))
        for seed in range(4):
            random = np.random.default_rng(seed)
            side = Native(isa, rule, threads=1 + seed % 2)  # two wait for each other, and for what runs beside them
            cuts = sorted({0, T, *random.integers(1, T, size=random.integers(0, 9)).tolist()})
            rows, place = [], -1
            for begin, end in pairwise(cuts):
                goes_on = begin > 0 and bool(random.integers(0, 2))
                write = place if goes_on else (place + 1) % 4
                saves = [
                    (0, n, 5 + i) for i, n in enumerate(sorted(random.integers(1, end - begin + 1, size=2).tolist()))
                ]
                neighbour = (0, int(random.integers(1, T)))
                out = side.step(batch_of([(begin, end), neighbour], [place, -1], [write, 8], saves))
                rows.append(out[: end - begin])
                place = write
            assert torch.equal(torch.cat(rows), whole), (isa, seed, cuts)


def test_an_end_of_what_was_left_begins_the_next() -> None:
    """A state that leaves the machine and comes back is the same; one of another size is refused."""
    for isa in cpu.instruction_sets():
        rule = Rule(FORMS["odd"])
        side, other = Native(isa, rule), Native(isa, rule)
        side.step(batch_of([(0, 20)], [-1], [3]))
        state = torch.empty(side.kv.place_floats)
        side.kv.read_state(3, state)
        other.kv.write_state(6, state)
        assert torch.equal(other.step(batch_of([(20, 30)], [6], [0])), side.step(batch_of([(20, 30)], [3], [3]))), isa
        for place, given in ((N_PLACES, state), (-1, state), (0, state[:-1])):
            with pytest.raises(ValueError, match=r"place|size"):
                other.kv.write_state(place, given)


@pytest.mark.parametrize(
    ("reads", "writes", "saves"),
    [
        ([-1, -1], [0, 0], []),
        ([-1, -1], [0, N_PLACES], []),
        ([-1, -1], [0, -1], []),
        ([-2, -1], [0, 1], []),
        ([N_PLACES, -1], [0, 1], []),
        ([1, -1], [0, 1], []),
        ([-1, 5], [0, 1], [(0, 1, 5)]),
        ([-1, -1], [0, 1], [(0, 1, 1)]),
        ([-1, -1], [0, 1], [(0, 0, 2)]),
        ([-1, -1], [0, 1], [(0, 4, 2)]),
        ([-1, -1], [0, 1], [(2, 1, 2)]),
        ([-1, -1], [0, 1], [(-1, 1, 2)]),
        ([-1, -1], [0, 1], [(1, 1, 2), (0, 1, 3)]),
        ([-1, -1], [0, 1], [(0, 2, 2), (0, 1, 3)]),
        ([-1, -1], [0, 1], [(0, 1, 2), (0, 2, 2)]),
        ([-1, -1], [0, 1], [(0, 1, N_PLACES)]),
        ([-1], [0, 1], []),
        ([-1, -1], [0], []),
    ],
)  # fmt: skip
def test_places_that_cannot_be_meant_are_refused(reads: list[int], writes: list[int], saves: list[Any]) -> None:
    """Each would write over another's state, or beyond all of them; nothing of such a step runs."""
    rule = Rule(FORMS["odd"])
    side = Native(cpu.instruction_sets()[0], rule)
    side.step(batch_of([(0, 3), (3, 6)], [-1, -1], [5, 1]))
    with pytest.raises(ValueError, match=r"stat|place"):
        side.step(batch_of([(0, 3), (3, 6)], reads, writes, saves))
    wanted, _ = rule.expected(6, 9, rule.expected(0, 3, rule.nothing)[1])
    check(side.step(batch_of([(6, 9)], [5], [5])), wanted)


def test_a_step_without_places_is_refused() -> None:
    """A model with states cannot run without them."""
    rule = Rule(FORMS["odd"])
    side = Native(cpu.instruction_sets()[0], rule)
    batch = batch_of([(0, 3)], [-1], [0])
    with pytest.raises(ValueError, match="names no places"):
        side.program.run(
            batch.token_ids_T, batch.query_start_S1, batch.context_tokens_S, batch.block_table_SM, batch.logits_rows_R,
            side.kv, torch.empty(0, 1),
        )  # fmt: skip
