"""The linear layers of csrc by their C entry points, without the engine: weights of every format packed and applied."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from diptych.compute.formats.matrices import LEVEL_TABLES

# s8: whole numbers times an f16, which is the type that is told; e8m0 has none of these
SOURCES = {"f32": 0, "bf16": 1, "f16": 2, "s8": 2, "e8m0": 0}
NESTED_INPUTS = 256
NO_OFFSET, ZEROS, MINIMA, MINIMA16 = 0, 1, 2, 3  # the last: minima in the type of the scales
CENTRED, PLAIN, IQ4_NL, E2M1, IQ2, NF4, FP4 = 0, 1, 2, 3, 4, 8, 9
IQ4_NL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
BITS = {4: 4, 5: 8, 6: 6, 7: 2, 8: 3, 9: 5}
TABLES = {
    IQ4_NL: np.array(IQ4_NL_LEVELS),
    E2M1: np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]),
    IQ2: np.array([8, 25, 43, 0, -8, -25, -43, 0]),
    NF4: np.array(LEVEL_TABLES["nf4"].levels),
    FP4: np.array(LEVEL_TABLES["fp4"].levels),
}
# name -> Format, and in groups the type of scales, the kind of offset and the levels
KINDS = {
    "bf16": (0,),
    "int8": (1,),
    "int4": (2,),
    "fp8": (3, "f32", NO_OFFSET, PLAIN),
    "fp8-blocks": (3, "f32", NO_OFFSET, PLAIN),
    "group4": (4, "f16", NO_OFFSET, CENTRED),
    "group4-zeros": (4, "bf16", ZEROS, PLAIN),
    "group4-minima": (4, "f16", MINIMA, PLAIN),
    "group4-table": (4, "f32", NO_OFFSET, NF4),
    "group4-fp4": (4, "bf16", NO_OFFSET, FP4),
    "group8": (5, "f16", NO_OFFSET, CENTRED),
    "group8-minima": (5, "f32", MINIMA, CENTRED),
    "group4-zeros-wide": (4, "bf16", ZEROS, PLAIN),
    "group4-table-wide": (4, "f32", NO_OFFSET, IQ4_NL),
    "group8-wide": (5, "f32", MINIMA, CENTRED),
    "group6": (6, "f16", NO_OFFSET, CENTRED),
    "group6-minima": (6, "f16", MINIMA, PLAIN),
    "group4-nested": (4, "s8", MINIMA, PLAIN),
    "group4-nested-table": (4, "s8", NO_OFFSET, IQ4_NL),
    "group6-nested": (6, "s8", MINIMA, PLAIN),
    "group6-nested-wide": (6, "s8", NO_OFFSET, CENTRED),
    "group2-nested": (7, "s8", MINIMA, PLAIN),
    "group2-wide": (7, "f16", NO_OFFSET, CENTRED),
    "group3": (8, "bf16", NO_OFFSET, CENTRED),
    "group3-nested-table": (8, "s8", NO_OFFSET, IQ2),
    "group5": (9, "f16", NO_OFFSET, CENTRED),
    "group5-nested-wide": (9, "s8", MINIMA, PLAIN),
    "group4-powers": (4, "e8m0", NO_OFFSET, E2M1),
    "group8-powers-wide": (5, "e8m0", NO_OFFSET, CENTRED),
    "group5-halves": (9, "f16", MINIMA16, PLAIN),
    "group6-halves-wide": (6, "bf16", MINIMA16, PLAIN),
}
FORMATS = (
    "bf16",
    "int8",
    "int4",
    "fp8",
    "group4-zeros",
    "group8",
    "group8-wide",
    "group6-nested",
)  # what most tests draw from
GROUPED = tuple(name for name in KINDS if name.startswith("group"))
WHOLE = ("int8", "int4")  # sums are exact over the whole K
STORE_F32, STORE_BF16, ADD_F32 = 0, 1, 2
SILU, GELU_TANH = 0, 1


def kernel_set(kernels: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(kernels.kernels_find(name.encode()))


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def aligned(n_bytes: int) -> np.ndarray:
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stored_as(kind: str, values: np.ndarray) -> np.ndarray:
    """Scales or minima in the type of that name; e8m0: the next power of two, of which E8M0 says twice as much."""
    if kind == "e8m0":
        return (np.ceil(np.log2(values)) + 128).astype(np.uint8)
    return to_bf16(values) if kind == "bf16" else values.astype(np.float16 if kind == "f16" else np.float32)


def read_as(kind: str, stored: np.ndarray) -> np.ndarray:
    """What those are, in fp32."""
    if kind == "e8m0":
        return np.exp2(stored.astype(np.float32) - 128)
    return from_bf16(stored) if kind == "bf16" else stored.astype(np.float32)


@dataclass
class Packed:
    """W [n,k] in its packed form, and what that form stands for in fp32."""

    kernels: ctypes.CDLL
    isa: str
    shape: np.ndarray
    blob: np.ndarray
    bias: np.ndarray | None

    @property
    def n_outputs(self) -> int:
        return int(self.shape[1]) // (2 if self.shape[4] else 1)

    def unpacked(self) -> np.ndarray:
        out = np.zeros((int(self.shape[1]), int(self.shape[2])), np.float32)
        self.kernels.kernels_unpack(address(self.shape), address(self.blob), address(out))
        return out

    def apply(
        self, x, *, threads=1, store=STORE_F32, activation=SILU, row_ids=None, out=None, out_rows=None, weights=None
    ):
        x = np.ascontiguousarray(x, np.float32)
        m = len(x) if row_ids is None else len(row_ids)
        if out is None:
            out = np.zeros((m, self.n_outputs), np.uint16 if store == STORE_BF16 else np.float32)
        self.kernels.kernels_linear(
            kernel_set(self.kernels, self.isa), address(self.shape), address(self.blob), address(x),
            ctypes.c_int64(len(x)), address(row_ids), ctypes.c_int64(m),
            store, activation, address(out), ctypes.c_int64(out.shape[1]), address(out_rows), address(weights), threads,
        )  # fmt: skip
        return out


@dataclass
class Codes:
    """W [n,k] as somebody else's quantiser might have left it: codes u8 [n,k], scales and offsets [n, groups].

    factors [n, blocks, 2]: of nested scales and minima, which are s8.
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    factors: np.ndarray | None = None

    def grid(self, format_name: str, group: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Scales and offsets in fp32."""
        _, kind, offset, _ = KINDS[format_name]
        scales = read_as(kind, self.scales)
        offsets = None if self.offsets is None else read_as(kind if offset == MINIMA16 else "f32", self.offsets)
        if self.factors is None:
            return scales, offsets
        of_groups = self.factors.astype(np.float32).repeat(NESTED_INPUTS // group, 1)[:, : scales.shape[1]]
        return scales * of_groups[..., 0], None if offsets is None else offsets * of_groups[..., 1]


def levels_of(format_name: str) -> np.ndarray:
    """What the codes stand for, but for scale and offset."""
    number, _, _, levels = KINDS[format_name]
    if levels in TABLES:
        return TABLES[levels]
    codes = np.arange(1 << BITS[number])
    return codes - len(codes) // 2 if levels == CENTRED else codes


def nested(values: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """[n, groups] -> s8 likewise and their f16 [n, blocks], so that the largest of a block has 127."""
    n, groups = values.shape
    blocks = -(-groups * group // NESTED_INPUTS)
    padded = np.zeros((n, blocks * NESTED_INPUTS // group), np.float32)
    padded[:, :groups] = values
    by_block = padded.reshape(n, blocks, -1)
    factors = np.maximum(np.abs(by_block).max(-1) / 127, 2.0**-20).astype(np.float16)
    whole = np.clip(np.rint(by_block / factors.astype(np.float32)[..., None]), -127, 127)
    return np.ascontiguousarray(whole.astype(np.int8).reshape(n, -1)[:, :groups]), factors


FP8_ROWS, FP8_INPUTS = 16, 128  # that share a scale, in blocks


def fp8_group(format_name: str) -> int:
    return FP8_INPUTS if format_name == "fp8-blocks" else 0


def encode_fp8(w: np.ndarray, format_name: str) -> Codes:
    """E4M3 of each row's own scale, or of each block's, repeated for its rows."""
    n, k = w.shape
    group = fp8_group(format_name) or k
    groups = -(-k // group)
    padded = np.zeros((-(-n // FP8_ROWS) * FP8_ROWS, groups * group), np.float32)
    padded[:n, :k] = np.abs(w)
    most = padded.reshape(-1, groups, group).max(-1)
    if fp8_group(format_name):
        most = most.reshape(-1, FP8_ROWS, groups).max(1).repeat(FP8_ROWS, 0)
    scales = np.ascontiguousarray(most[:n] / 448)
    by_input = np.where(scales == 0, np.float32(1), scales).repeat(group, 1)[:, :k]
    codes = torch.from_numpy(w / by_input).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return Codes(codes, scales, None)


def encode(w: np.ndarray, format_name: str, group: int) -> Codes:
    """Nearest levels; the grid follows the range of each group, roughly."""
    if format_name.startswith("fp8"):
        return encode_fp8(w, format_name)
    _, scale_type, offset, levels = KINDS[format_name]
    n, k = w.shape
    padded = np.zeros((n, -(-k // group) * group), np.float32)
    padded[:, :k] = w
    by_group = padded.reshape(n, -1, group)
    low, high = by_group.min(-1), by_group.max(-1)
    grid = levels_of(format_name)
    spread = np.ptp(grid) if offset != NO_OFFSET else np.abs(grid).max()
    reach = high - low if offset != NO_OFFSET else np.maximum(high, -low)
    scales = np.maximum(reach / spread, 2.0**-14).astype(np.float32)
    offsets = factors = None
    if scale_type == "s8":
        bits, of_scales = nested(scales, group)
        of_minima = np.zeros_like(of_scales)
        if offset == MINIMA:
            offsets, of_minima = nested(low, group)
        factors = np.stack((of_scales, of_minima), -1)
    else:
        bits = stored_as(scale_type, scales)
    kept = Codes(bits, bits, offsets, factors).grid(format_name, group)[0]
    kept = np.where(kept == 0, np.float32(1), kept)
    if offset == ZEROS:
        offsets = np.clip(np.rint(-low / kept), 0, 16).astype(np.uint8)
    elif offset in (MINIMA, MINIMA16) and factors is None:
        offsets = stored_as(scale_type if offset == MINIMA16 else "f32", low - grid.min() * kept)
    shift = Codes(bits, bits, offsets, factors).grid(format_name, group)[1]
    shift = np.zeros_like(kept) if shift is None else -shift * kept if offset == ZEROS else shift
    wanted = (by_group - shift[..., None]) / kept[..., None]
    if levels in (CENTRED, PLAIN):
        codes = np.clip(np.rint(wanted - grid.min()), 0, len(grid) - 1).astype(np.uint8)
    else:
        codes = np.abs(wanted[..., None] - grid).argmin(-1).astype(np.uint8)
    return Codes(np.ascontiguousarray(codes.reshape(n, -1)[:, :k]), bits, offsets, factors)


encode_codes = encode  # what `pack` is given, another in a test of odd scales


def pack_codes(kernels, isa, format_name, parts, *, group, gated, bias, threads) -> Packed:
    number, scale_type, offset, levels = KINDS[format_name]
    n, k = sum(len(p) for p in parts), parts[0].shape[1]
    is_wide = format_name.endswith("-wide")
    group = fp8_group(format_name) if format_name.startswith("fp8") else group
    shape = np.array(
        [
            number,
            n,
            k,
            group,
            gated,
            bias is not None,
            SOURCES[scale_type],
            min(offset, MINIMA),
            levels,
            is_wide,
            scale_type == "s8",
            scale_type == "e8m0",
            offset == MINIMA16,
        ],
        np.int64,
    )
    blob = aligned(kernels.kernels_packed_bytes(address(shape)))
    stored = [encode_codes(part, format_name, group) for part in parts]
    table = np.array(
        [[p.codes.ctypes.data, p.scales.ctypes.data, 0 if p.offsets is None else p.offsets.ctypes.data, len(p.codes),
          0 if p.factors is None else p.factors.ctypes.data] for p in stored],
        np.int64,
    )  # fmt: skip
    kernels.kernels_pack_codes(
        kernel_set(kernels, isa), address(shape), address(table), ctypes.c_int64(len(stored)), address(bias),
        address(blob), threads,
    )  # fmt: skip
    return Packed(kernels, isa, shape, blob, bias)


def pack(kernels, isa, format_name, parts, *, group=32, gated=False, bias=None, source="f32", threads=1) -> Packed:
    stored = []
    for part in parts:
        converted = {"f32": lambda p: p.astype(np.float32), "bf16": to_bf16, "f16": lambda p: p.astype(np.float16)}[
            source
        ](part)
        stored.append(np.ascontiguousarray(converted))
    if len(KINDS[format_name]) > 1:
        return pack_codes(kernels, isa, format_name, parts, group=group, gated=gated, bias=bias, threads=threads)
    n, k = sum(len(p) for p in parts), parts[0].shape[1]
    shape = np.array([KINDS[format_name][0], n, k, group, gated, bias is not None, *[0] * 7], np.int64)
    blob = aligned(kernels.kernels_packed_bytes(address(shape)))
    table = np.array([[p.ctypes.data, SOURCES[source], len(p), p.shape[1]] for p in stored], np.int64)
    kernels.kernels_pack(
        kernel_set(kernels, isa),
        address(shape),
        address(table),
        ctypes.c_int64(len(stored)),
        address(bias),
        address(blob),
        threads,
    )
    return Packed(kernels, isa, shape, blob, bias)


def prepared(kernels, isa, format_name, x, group=32, order=None) -> np.ndarray:
    """What the activations stand for after preparation, in fp64. group: of weights in groups."""
    x = np.ascontiguousarray(x, np.float32)
    m, k = x.shape
    if format_name == "bf16" or format_name.startswith("fp8"):
        bits = np.zeros((m, k), np.uint16)
        kernels.kernels_prepare(
            kernel_set(kernels, isa), 0, ctypes.c_int64(m), ctypes.c_int64(k), address(x), address(bits), address(None),
            address(None), address(order),
        )  # fmt: skip
        return from_bf16(bits).astype(np.float64)
    is_whole = format_name in WHOLE
    is_wide = format_name.endswith("-wide")
    kind = 1 if is_whole else {16: 2, 32: 3, 64: 4, 128: 5}[group] + 4 * is_wide
    groups = 1 if is_whole else -(-k // 128) * 128 // group
    q, low, scales = np.zeros((m, k), np.int8), np.zeros((m, k), np.int8), np.zeros((m, groups), np.float32)
    kernels.kernels_prepare(
        kernel_set(kernels, isa), kind, ctypes.c_int64(m), ctypes.c_int64(k), address(x), address(q),
        address(low) if is_wide else address(None), address(scales), address(order),
    )  # fmt: skip
    of_group = scales if is_whole else scales.repeat(group, 1)[:, :k]
    return (q.astype(np.float64) * 128 + low if is_wide else q.astype(np.float64)) * of_group


def reference(packed: Packed, format_name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y = x W^T + b in fp64 on the rounded operands, and the scale of its rounding: sum of |x| |w| + |b|."""
    rows = prepared(packed.kernels, packed.isa, format_name, x, int(packed.shape[3]))
    w = packed.unpacked().astype(np.float64)
    bias = np.zeros(len(w)) if packed.bias is None else packed.bias.astype(np.float64)
    return rows @ w.T + bias, np.abs(rows) @ np.abs(w).T + np.abs(bias)


def world(seed: int, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)).astype(np.float32) * rng.uniform(0.1, 4.0, (m, 1)).astype(np.float32)
    w = rng.standard_normal((n, k)).astype(np.float32) * 0.05
    return x, w, rng.standard_normal(n).astype(np.float32)
