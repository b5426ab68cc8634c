"""The linear layers of csrc (every format) against exact references, and their promise of equal bits."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from functools import cache

import linear_layers
import numpy as np
import pytest
import torch
from built_kernels import compiler, made
from linear_layers import (
    ADD_F32,
    FORMATS,
    GELU_TANH,
    GROUPED,
    KINDS,
    MINIMA,
    MINIMA16,
    SILU,
    STORE_BF16,
    STORE_F32,
    WHOLE,
    ZEROS,
    Codes,
    address,
    encode,
    from_bf16,
    levels_of,
    pack,
    prepared,
    reference,
    to_bf16,
    world,
)  # fmt: skip

from worlds import KERNEL_SETS

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    compiler()
    loaded = ctypes.CDLL(str(made("libdiptych_kernels.so")))
    loaded.kernels_packed_bytes.restype = ctypes.c_int64
    loaded.kernels_pool_check.restype = ctypes.c_int64
    loaded.kernels_find.restype = ctypes.c_void_p
    return loaded


def runnable(kernels: ctypes.CDLL) -> list[str]:
    return [name for name in KERNEL_SETS if kernels.kernels_find(name.encode()) is not None]


@pytest.fixture(params=KERNEL_SETS)
def isa(request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> str:
    assert request.param in runnable(kernels), "the library of the tests lacks what the installation has"
    return request.param


SHAPES = [
    (1, 64, 32),
    (3, 1, 1),
    (5, 70, 33),
    (6, 128, 96),
    (7, 65, 127),
    (13, 200, 300),
    (16, 96, 256),
    (50, 130, 160),
]


@pytest.mark.parametrize("format_name", KINDS)
def test_linear_equals_the_exact_product_of_its_rounded_operands(kernels, isa, format_name):
    """Everything above trusts this: one wrong lane at an odd edge is a wrong model."""
    for m, n, k in SHAPES:
        x, w, bias = world(m * 7919 + n, m, n, k)
        packed = pack(kernels, isa, format_name, [w], bias=bias)
        exact, scale = reference(packed, format_name, x)
        # bf16 adds in fp32 (k roundings), groups each group's sum; int8's and int4's are exact, only the last scaling rounds.
        steps = 8 if format_name in WHOLE else 8 + k
        threads = 1 + (m % 2 == 0)  # which wait for each other where tests run beside these: some shapes
        assert np.all(np.abs(packed.apply(x, threads=threads) - exact) <= scale * steps * 2.0**-24), (m, n, k)


@pytest.mark.parametrize("k", [2500, 9000])
@pytest.mark.parametrize("format_name", FORMATS)
def test_partial_sums_survive_the_blocks_of_k(kernels, isa, format_name, k):
    """Large K is cut for the cache; the cut must neither lose a block nor change a bit between row counts."""
    x, w, bias = world(k, 60, 67, k)
    packed = pack(kernels, isa, format_name, [w], bias=bias)
    whole = packed.apply(x, threads=2)
    exact, scale = reference(packed, format_name, x)
    assert np.all(np.abs(whole - exact) <= scale * 2.0**-14)
    assert np.array_equal(packed.apply(x[:9]), whole[:9])
    assert np.array_equal(packed.apply(x[4:5])[0], whole[4])


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(kernels, isa, format_name):
    """Phase equality (DESIGN section 4): decode is one row, prefill many; caching is lossless only if they agree."""
    x, w, bias = world(11, 50, 200, 416)
    packed = pack(kernels, isa, format_name, [w], bias=bias, group=32)
    alone = np.concatenate([packed.apply(x[i : i + 1], threads=1) for i in range(len(x))])
    for threads in (1, 2, 3):
        for m in (*range(1, 15), 16, 24, 31, 50):
            assert np.array_equal(packed.apply(x[:m], threads=threads), alone[:m]), (threads, m)
    for m in (1, 7, 50):  # more threads than parts of the work and than CPUs: late ones find theirs taken
        assert np.array_equal(packed.apply(x[:m], threads=11), alone[:m]), m
    shuffled = np.random.default_rng(5).permutation(len(x))
    assert np.array_equal(packed.apply(x[shuffled]), alone[shuffled])


@pytest.mark.parametrize("format_name", FORMATS)
def test_many_rows_have_the_bits_of_few(kernels, isa, format_name):
    """Prefill cuts rows into cache blocks; rows at the edges of a block are the ones that could differ."""
    # groups of int4 come in pairs: the last one alone
    k, group = (300, 128) if format_name == "int4" else (192, 64)
    x, w, bias = world(12, 530, 130, k)
    packed = pack(kernels, isa, format_name, [w], bias=bias, group=group)
    whole = packed.apply(x, threads=2)
    for first, last in ((0, 1), (190, 197), (383, 385), (490, 530)):
        assert np.array_equal(packed.apply(x[first:last], threads=1), whole[first:last])


@pytest.mark.parametrize("format_name", FORMATS)
def test_matrix_tiles_have_the_same_bits_however_the_caches_are_shared(kernels, isa, format_name):
    """Rows that no L2 holds make several panels share a block of K, the last rows of a block are computed with some of the
    rows before them, and gathered rows are copied.
    """
    if not isa.startswith("amx"):
        pytest.skip("has no matrix tiles")
    x, w, bias = world(13, 530, 330, 2080)
    packed = pack(kernels, isa, format_name, [w], bias=bias)
    whole = packed.apply(x, threads=2)
    exact, scale = reference(packed, format_name, x[-3:])
    assert np.all(np.abs(whole[-3:] - exact) <= scale * 2.0**-13)
    ids = np.random.default_rng(3).integers(0, len(x), 77).astype(np.int32)
    assert np.array_equal(packed.apply(x, row_ids=ids, threads=3), whole[ids])
    for first, last in ((0, 1), (100, 133), (255, 290), (510, 530)):
        assert np.array_equal(packed.apply(x[first:last]), whole[first:last]), (first, last)


@pytest.mark.parametrize("format_name", FORMATS)
def test_amx_has_the_bits_of_its_twin(kernels, format_name):
    """What is tested on every machine stands for the hardware only while the two are one."""
    if "amx" not in runnable(kernels):
        pytest.skip("this CPU has no AMX, or the system refuses its tiles")
    x, w, bias = world(14, 70, 150, 700)
    for m in (1, 16, 17, 33, 70):
        twin, amx = (
            pack(kernels, isa, format_name, [w], bias=bias).apply(x[:m], threads=2) for isa in ("amx_twin", "amx")
        )
        assert np.array_equal(twin, amx)


def test_what_is_compiled_for_amx_has_the_bits_of_its_twin(kernels):
    """Registers, addresses and configurations of the instructions themselves: emulated where the processor has none."""
    if "amx_twin" not in runnable(kernels):
        pytest.skip("this CPU has no AVX-512")
    run = subprocess.run([made("amx_check"), "3"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


# four nested groups share their factors, so that none is larger than 64
GROUP_SIZES = [(name, group) for name in GROUPED for group in (16, 32, 64, 128) if group < 128 or "nested" not in name]


@cache  # every set has the same
def values_of_codes(format_name, group):
    """A weight, and the values that its codes stand for."""
    _, w, _ = world(23, 1, 70, 300)
    offset = KINDS[format_name][2]
    stored = encode(w, format_name, group)
    spread = [part.repeat(group, 1)[:, :300] for part in stored.grid(format_name, group) if part is not None]
    level = levels_of(format_name)[stored.codes].astype(np.float32)
    expected = spread[0] * (level - spread[1] if offset == ZEROS else level)
    return w, (expected + spread[1] if offset in (MINIMA, MINIMA16) else expected).astype(np.float32)


@pytest.mark.parametrize(("format_name", "group"), GROUP_SIZES)
def test_groups_stand_for_the_values_of_their_codes(kernels, isa, format_name, group):
    """The file's values are kept: no other grid, no rounding of a scale. Also in a ragged last group, and gated."""
    w, expected = values_of_codes(format_name, group)
    for gated in (False, True):
        parts, threads = [w[:20], w[20:]], 1 + gated
        got = pack(kernels, isa, format_name, parts, group=group, gated=gated, threads=threads).unpacked()
        assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("format_name", "group"), [one for one in GROUP_SIZES if one[0] not in ("group4-minima", "group4-fp4", "group8")]
)
def test_rows_of_groups_are_exact_products_at_every_group_size(kernels, isa, format_name, group):
    """The other tests have groups of 32; heads of four groups lie otherwise at 64 and 128, and a channel of large values must
    take the levels of its own group alone: the others' steps are the row's, halved as often as the group allows.
    """
    x, w, bias = world(24, 9, 70, 900)
    x[:, 5] *= 1000.0
    packed = pack(kernels, isa, format_name, [w], bias=bias, group=group)
    exact, scale = reference(packed, format_name, x)
    assert np.all(np.abs(packed.apply(x, threads=1 + (group == 64)) - exact) <= scale * 900 * 2.0**-24)
    levels = 127 * 128 if format_name.endswith("-wide") else 127
    of_row, rows = np.abs(x).max(1), prepared(kernels, isa, format_name, x, group)
    for begin in range(0, 900, group):
        part = x[:, begin : begin + group]
        step = of_row * 2.0 ** -np.floor(np.log2(of_row / np.abs(part).max(1))) / levels
        assert np.all(step <= 2.0 * np.abs(part).max(1) / levels * (1 + 1e-6))
        seen = rows[:, begin : begin + group]
        assert np.all(np.abs(seen - part) <= 0.501 * step[:, None])


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 1e-20), (3e9, 0.0)], ids=["one", "fractions", "far"])
def test_every_code_of_fp8_stands_for_bf16_of_its_product_with_the_scale(kernels, isa, monkeypatch, scales):
    """All 254 that are numbers, the smallest without an exponent among them, in two blocks of inputs. torch reads E4M3."""
    numbers = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    codes = np.resize(numbers.numpy(), (32, 256))
    by_block = np.tile(np.array(scales, np.float32), (32, 1))
    monkeypatch.setattr(linear_layers, "encode_codes", lambda *_: Codes(codes, by_block, None))
    packed = pack(kernels, isa, "fp8-blocks", [np.zeros((32, 256), np.float32)])
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    wanted = (values * torch.from_numpy(by_block).repeat_interleave(128, 1)).to(torch.bfloat16).float().numpy()
    assert np.array_equal(packed.unpacked(), wanted)
    bf16 = pack(kernels, isa, "bf16", [wanted])
    x = np.eye(256, dtype=np.float32)
    for m in (1, 3, 8, 13, 256):  # kernels multiply by the same numbers, in the order of bf16
        assert np.array_equal(packed.apply(x[:m]), bf16.apply(x[:m]))
        assert np.array_equal(packed.apply(x[:m] - 0.3), bf16.apply(x[:m] - 0.3))


def test_a_scale_of_each_row_of_fp8_rounds_no_weight(kernels, isa):
    x, w, _ = world(8, 5, 48, 300)
    packed = pack(kernels, isa, "fp8", [w])
    kept = linear_layers.encode(w, "fp8", 0)
    assert np.array_equal(
        packed.unpacked(), torch.from_numpy(kept.codes).view(torch.float8_e4m3fn).float().numpy() * kept.scales
    )
    assert np.abs(packed.unpacked() - w).max() < np.abs(w).max() / 16
    exact, scale = reference(packed, "fp8", x)
    assert np.all(np.abs(packed.apply(x) - exact) <= scale * 300 * 2.0**-24)


@pytest.mark.parametrize("m", [2, 40])
@pytest.mark.parametrize("format_name", ["group4-fp4", "group4-powers", "group8-powers-wide"])
def test_scales_next_to_nothing_give_nothing(kernels, isa, format_name, m, monkeypatch):
    """Where a group's power of two joins the exponent of a scale, one of 2^-110 would come out beyond all numbers."""

    def fading(w: np.ndarray, format_name: str, group: int) -> Codes:
        stored = encode(w, format_name, group)
        if "powers" in format_name:
            stored.scales[:, 1], stored.scales[:, 2] = 18, 0
            return stored
        scales = from_bf16(stored.scales)
        scales[:, 1], scales[:, 2], scales[:, 3] = 2.0**-110, 0.0, -scales[:, 3]
        return replace(stored, scales=to_bf16(scales))

    x, w, _ = world(26, m, 70, 300)
    x[:, 32:128] *= 2.0**-20
    with monkeypatch.context() as patched:
        patched.setattr(linear_layers, "encode_codes", fading)
        packed = pack(kernels, isa, format_name, [w])
    assert not packed.unpacked()[:, 32:96].any()
    exact, scale = reference(packed, format_name, x)
    assert np.all(np.abs(packed.apply(x) - exact) <= scale * 300 * 2.0**-24)


@pytest.mark.parametrize("m", [1, 8, 40])
def test_every_power_of_two_is_half_of_what_e8m0_says(kernels, isa, m, monkeypatch):
    """Twice the levels of E2M1 make that up; what is less than 2^-100 is nothing, on packing."""
    powers = np.arange(256, dtype=np.uint8).clip(max=254).reshape(32, 8)  # 255 is no number
    codes = np.resize(np.arange(16, dtype=np.uint8), (32, 256))
    monkeypatch.setattr(linear_layers, "encode_codes", lambda *_: Codes(codes, powers, None))
    packed = pack(kernels, isa, "group4-powers", [np.zeros((32, 256), np.float32)])
    with np.errstate(over="ignore"):
        wanted = levels_of("group4-powers")[codes] * np.exp2(powers.astype(np.float64) - 128).repeat(32, 1)
        wanted = np.where((powers < 28).repeat(32, 1), 0, wanted).astype(np.float32)
    assert np.array_equal(packed.unpacked(), wanted)
    rows = slice(0, 28)  # sums of higher powers leave fp32
    x = np.random.default_rng(27).standard_normal((m, 256)).astype(np.float32)
    exact = prepared(kernels, isa, "group4-powers", x) @ wanted[rows].astype(np.float64).T
    bound = np.abs(prepared(kernels, isa, "group4-powers", x)) @ np.abs(wanted[rows]).astype(np.float64).T
    assert np.all(np.abs(packed.apply(x)[:, rows] - exact) <= bound * 256 * 2.0**-24)


@pytest.mark.parametrize("format_name", ["bf16", "int8", "group4", "group8-wide"])
def test_inputs_are_taken_in_another_order(kernels, isa, format_name):
    """act-order: the weights of a group lie together, and so must their inputs before they share a scale."""
    x, _, _ = world(25, 3, 4, 300)
    order = np.random.default_rng(25).permutation(300).astype(np.int32)
    expected = prepared(kernels, isa, format_name, x[:, order])
    assert np.array_equal(prepared(kernels, isa, format_name, x, order=order), expected)


@pytest.mark.parametrize("format_name", ["int8", "group8", "group8-wide"])
def test_numbers_too_small_for_a_grid_are_zero(kernels, isa, format_name):
    """A closed gate leaves 1e-37: its inverse was infinite, every code the lowest, and their sum overflowed."""
    x = np.zeros((2, 128), np.float32)
    x[0, :2], x[1] = (1.7e-37, -8e-38), np.linspace(-3e-38, 3e-38, 128)
    assert not prepared(kernels, isa, format_name, x).any()
    x[0, 100] = 1.0  # in a group of its own, and in int8 one that the whole row shares
    assert np.flatnonzero(prepared(kernels, isa, format_name, x)).tolist() == [100]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_groups_reconstruct_the_weights(kernels, isa, group):
    """Each weight must land within about half a step of its group's grid, also in a ragged last group."""
    _, w, _ = world(21, 1, 70, 300)
    got = pack(kernels, isa, "int4", [w], group=group).unpacked()
    for start in range(0, w.shape[1], group):
        part = w[:, start : start + group]
        low, high = np.minimum(part.min(1), 0 if part.shape[1] < group else np.inf), part.max(1)
        step = (high - low)[:, None] / 15
        error = np.abs(got[:, start : start + group] - part)
        assert error.max() <= step.max() * 2.0
        assert np.sqrt((error**2).mean()) <= 0.32 * step.mean()


def test_int8_weights_are_within_half_a_step(kernels, isa):
    """Symmetric per-lane scales: the largest weight of a lane is exact, no other is further than half a step."""
    _, w, _ = world(22, 1, 70, 300)
    got = pack(kernels, isa, "int8", [w]).unpacked()
    step = np.abs(w).max(1, keepdims=True) / 127
    assert np.all(np.abs(got - w) <= step * 0.5001)


@pytest.mark.parametrize("source", ["bf16", "f16"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_packing_reads_every_checkpoint_type(kernels, isa, format_name, source):
    """Checkpoints are bf16 or fp16; the packed form must be that of the same values in fp32."""
    _, w, _ = world(31, 1, 66, 130)
    w[3, 5], w[4, 6] = 0.0, 1e-7  # zero and an fp16 subnormal
    values = from_bf16(to_bf16(w)) if source == "bf16" else w.astype(np.float16).astype(np.float32)
    assert np.array_equal(
        pack(kernels, isa, format_name, [values], source=source).blob, pack(kernels, isa, format_name, [values]).blob
    )


@pytest.mark.parametrize("format_name", FORMATS)
def test_packed_bytes_do_not_depend_on_threads_or_instruction_set(kernels, format_name):
    """A quantised checkpoint saved on one machine must be the one another machine would make."""
    _, w, bias = world(32, 1, 200, 224)
    blobs = []
    for isa in runnable(kernels):
        blobs += [pack(kernels, isa, format_name, [w], bias=bias, threads=threads).blob for threads in (1, 3)]
    assert len(blobs) >= 2
    assert all(np.array_equal(blob, blobs[0]) for blob in blobs)


@pytest.mark.parametrize("format_name", FORMATS)
def test_parts_are_concatenated_along_the_outputs(kernels, isa, format_name):
    """q, k and v share one call; part edges fall inside panels."""
    x, w, _ = world(33, 4, 150, 64)
    whole = pack(kernels, isa, format_name, [w]).apply(x)
    assert np.array_equal(pack(kernels, isa, format_name, [w[:70], w[70:75], w[75:]]).apply(x), whole)


@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize("features", [16, 40, 100])
@pytest.mark.parametrize("format_name", FORMATS)
def test_gated_epilogue_is_activation_of_gate_times_up(kernels, isa, format_name, features, activation):
    """Gate and up are interleaved at pack time; a slip pairs the wrong lanes and still looks plausible."""
    x, w, bias = world(41, 7, 2 * features, 96)
    packed = pack(kernels, isa, format_name, [w[:features], w[features:]], gated=True, bias=bias)
    plain = pack(kernels, isa, format_name, [w], bias=bias).apply(x).astype(np.float64)
    gate, up = plain[:, :features], plain[:, features:]
    if activation == SILU:
        expected = gate / (1 + np.exp(-gate)) * up
    else:
        expected = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    got = packed.apply(x, activation=activation, threads=1 + (features == 100))
    # products are rounded to bf16 (2e-3) next, and AVX-512 approximates the activation to 2e-4
    np.testing.assert_allclose(got, expected, rtol=3e-4, atol=2e-6)
    assert np.array_equal(packed.apply(x[2:3], activation=activation)[0], got[2])


def test_activations_stay_finite_at_the_ends(kernels, isa):
    """exp overflows for large negative gates; the limit is zero, not NaN."""
    x = np.array([[1e4], [-1e4], [90.0], [-90.0], [0.0]], np.float32)
    packed = pack(kernels, isa, "bf16", [np.ones((16, 1)), np.ones((16, 1))], gated=True)
    for activation in (SILU, GELU_TANH):
        got = packed.apply(x, activation=activation)[:, 0]
        seen = from_bf16(to_bf16(x))[:, 0].astype(np.float64)
        np.testing.assert_allclose(got, np.where(seen > 0, seen * seen, 0.0), rtol=1e-5, atol=1e-25)


@pytest.mark.parametrize("format_name", FORMATS)
def test_stores_agree_with_the_plain_one(kernels, isa, format_name):
    """Residual add and bf16 output are the same numbers through another door."""
    x, w, bias = world(51, 9, 75, 64)
    packed = pack(kernels, isa, format_name, [w], bias=bias)
    plain = packed.apply(x)
    assert np.array_equal(packed.apply(x, store=STORE_BF16, threads=2), to_bf16(plain))
    residual = np.random.default_rng(1).standard_normal(plain.shape).astype(np.float32)
    added = packed.apply(x, store=ADD_F32, out=residual.copy(), threads=2)
    assert np.array_equal(added, residual + plain)


@pytest.mark.parametrize("format_name", FORMATS)
def test_an_expert_reads_and_writes_only_its_rows(kernels, isa, format_name):
    """A mixture of experts routes a few rows to each expert: gathered input, weighted scattered sum."""
    x, w, _ = world(61, 12, 75, 64)
    packed = pack(kernels, isa, format_name, [w])
    plain = packed.apply(x)
    ids, weights = np.array([7, 2, 11], np.int32), np.array([0.25, 0.5, 2.0], np.float32)
    out = np.full((12, 75), 3.0, np.float32)
    packed.apply(x, row_ids=ids, out_rows=ids, weights=weights, store=ADD_F32, out=out, threads=2)
    expected = np.full((12, 75), 3.0, np.float32)
    expected[ids] += weights[:, None] * plain[ids]  # the weights are powers of two, so the product does not round
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("store", [STORE_F32, STORE_BF16])
def test_nothing_is_written_past_the_last_output(kernels, isa, store):
    """The padded lanes of the last panel exist in the weights only."""
    x, w, _ = world(71, 3, 70, 64)
    out = np.full((3, 100), 77, np.uint16 if store == STORE_BF16 else np.float32)
    pack(kernels, isa, "bf16", [w]).apply(x, store=store, out=out, threads=2)
    assert np.all(out[:, 70:] == 77)
    assert not np.any(out[:, :70] == 77)


def test_zero_rows_quantise_to_zero(kernels, isa):
    """A row of zeros has no scale; it must give the bias and not NaN."""
    _, w, bias = world(81, 1, 70, 64)
    for format_name in FORMATS:
        got = pack(kernels, isa, format_name, [w], bias=bias).apply(np.zeros((2, 64), np.float32))
        assert np.array_equal(got, np.stack([bias, bias]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_none(kernels, isa, value):
    """Infinity less infinity lies in a row of a model that overflows; as a level of 0 it gave text, and nobody was told."""
    x, w, _ = world(83, 4, 70, 200)
    for row, place in ((0, 0), (1, 100), (2, 199)):
        x[row, place] = value
    for format_name in KINDS:
        got = pack(kernels, isa, format_name, [w], group=64).apply(x)
        assert not np.isfinite(got[:3]).any(), format_name
        assert np.isfinite(got[3]).all(), format_name


def test_no_rows_is_no_work(kernels, isa):
    """An expert that no token chose is called with m = 0."""
    _, w, _ = world(82, 1, 70, 64)
    assert pack(kernels, isa, "int8", [w]).apply(np.zeros((0, 64), np.float32)).shape == (0, 70)


def test_integer_formats_agree_between_instruction_sets(kernels):
    """Whole sums are exact and what rounds is one fixed expression, of a lane or a group, so every set gives the same bits."""
    x, w, bias = world(91, 7, 100, 200)
    names = [name for name in KINDS if name in WHOLE or name in GROUPED]
    for rows in (x, x[:2]):
        results = []
        for isa in runnable(kernels):
            results += [np.stack([pack(kernels, isa, name, [w], bias=bias, group=64).apply(rows) for name in names])]
        assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_barriers_keep_every_thread_in_step(kernels, threads):
    """A thread that slips past a barrier reads a layer that is not finished."""
    counts = np.zeros(threads, np.int64)
    assert kernels.kernels_pool_check(threads, ctypes.c_int64(30), ctypes.c_int64(10), address(counts)) == 0
    assert counts.tolist() == [30] * threads


def test_the_pool_works_in_a_forked_child(kernels):
    """A server that forks workers after loading must not wait for ever on threads that stayed in the parent."""
    assert kernels.kernels_pool_fork_check(3) == 3
