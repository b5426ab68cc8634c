"""Every number format of weights and KV, once: what the engine has, and what the planner prices besides.

Standard library only. Bytes include scales: bits of a parameter plus its part of what its group shares.

>>> FORMATS["q4_0"].bytes
0.5625
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diptych.ground.specs import KVSpec, QuantSpec, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """`bits` per value, and `group_bits` (scale, zero point) that `group` values share."""

    name: str
    bits: float
    group: int = 1
    group_bits: int = 0

    @property
    def bytes(self) -> float:
        """Bytes per value."""
        return (self.bits + self.group_bits / self.group) / 8


FORMATS: dict[str, NumberFormat] = {
    one.name: one
    for one in (
        NumberFormat(name="fp32", bits=32),
        NumberFormat(name="bf16", bits=16),
        NumberFormat(name="fp8", bits=8),
        NumberFormat(name="int8", bits=8),  # a scale per row, which is nothing beside it
        NumberFormat(name="int4", bits=4),
        NumberFormat(name="int4-g64", bits=4, group=64, group_bits=16),  # the cpu backend's: unit and zero of 8 bits
        NumberFormat(name="int4-g32", bits=4, group=32, group_bits=32),  # bf16 scale and zero
        NumberFormat(name="nvfp4", bits=4, group=16, group_bits=8),
        NumberFormat(name="mxfp4", bits=4, group=32, group_bits=8),
        NumberFormat(name="q8_0", bits=8, group=32, group_bits=16),  # llama.cpp: one fp16 scale
        NumberFormat(name="q6_k", bits=6, group=256, group_bits=144),  # llama.cpp: 16 scales of 8 bits, one of 16
        NumberFormat(name="q5_1", bits=5, group=32, group_bits=32),  # one fp16 scale and minimum
        NumberFormat(name="q4_1", bits=4, group=32, group_bits=32),
        NumberFormat(name="q4_0", bits=4, group=32, group_bits=16),
    )
}

KEPT_BITS = {f"group{bits}": bits for bits in (2, 3, 4, 5, 6, 8)}
HALVES = ("f16", "bf16")
KEPT_SCALES = (*HALVES, "f32", "s8", "e4m3", "e8m0")
NESTED_SCALES = ("s8", "e4m3")
OFFSET_GRIDS = ("zeros", "minima", "minima16")
USUAL_GRIDS = ("signed", "minima", "minima16")
KEPT_GRIDS = {  # by kind; the others have the usual ones alone
    "group3": (*USUAL_GRIDS, "iq2", "iq1"),
    "group4": (*USUAL_GRIDS, "zeros", "iq4_nl", "e2m1", "iq3_xxs", "iq3_s", "nf4", "fp4"),
}
# Dot products of four inputs that the end of a group costs, as kernels on Zen 4 were measured at 512 rows (LAB.md): groups of
# 32, 64 and 128 have 0.85, 0.92 and 0.96 of int4's rate, of 32 with minima 0.76; wide ones of 16 and 32 0.39 and 0.44
END, END_OFFSETS, END_WIDE = 1.4, 2.5, 2.25
GROUPS = (128, 64, 32, 16)  # that the kernels have, the cheapest first
MOST_NESTED = 64  # inputs of a group with nested scales
NESTED_INPUTS = 256  # that share a factor
FP8_BLOCK = 128  # rows and inputs, or a multiple of each, of which blocks of fp8 with a scale of their own are kept
STRIP_LANES = 16  # outputs that the kernels hold beside one another: they share the scales of blocks
WIDE_BITS = 6  # of codes that rows of 8 bits would cost more than their own rounding did (numbers in LAB.md)
FINE_BITS = 5  # of a file's codes on the average, below which what its coarser ones lost hides that (likewise)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFormat:
    """How the cpu backend holds weights that somebody else quantised: in groups of codes, in its own 'int8', or as 'fp8'.

    group: inputs that share a scale of type `scale`: f16, bf16, f32, e8m0, a power of two of 8 bits (2^(e - 128), as e2m1 has
    twice its values), or nested, times a factor that 256 inputs share: s8, a whole number of 8 bits, or e4m3, a float of 8.
    grid: what a code q stands for, over s the scale: signed s (q - 2^(bits - 1)), zeros s (q - z) with z of 8 bits, minima
    s q + m with m of 32 (beside s8 nested as the scales are), minima16 with m of 16 bits, in the type of s, or an entry of a
    table.
    int8 has a scale per row, in fp32, and neither group nor grid; fp8 (E4M3) likewise, or with a group a scale of that many
    inputs of a block's rows, with which codes are multiplied and rounded to bf16 before they meet rows in bf16. Nothing else
    is rounded, but what nf4 and fp4 are made of (`compute.formats.matrices`). is_wide (in groups): it meets rows of 15 bits, in
    two halves, instead of 8.

    >>> KeptFormat.named("group4-g128-f16-zeros").number.bytes * 8
    4.1875
    """

    kind: str
    group: int = 0
    scale: str = "f32"
    grid: str = "signed"
    is_wide: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether codes of whole numbers lie in groups, each with a scale."""
        return self.kind in KEPT_BITS

    @property
    def name(self) -> str:
        """Everything about it in a word."""
        if not self.is_grouped:
            return f"{self.kind}-g{self.group}" if self.group else self.kind
        grid = "" if self.grid == "signed" else f"-{self.grid}"
        return f"{self.kind}-g{self.group}-{self.scale}{grid}{'-wide' if self.is_wide else ''}"

    @classmethod
    def named(cls, name: str) -> KeptFormat:
        """The format of that name. ValueError where there is none."""
        kind, *rest = name.removesuffix("-wide").split("-")
        if name in ("int8", "fp8"):
            return cls(kind=name)
        if name == f"fp8-g{FP8_BLOCK}":
            return cls(kind=kind, group=FP8_BLOCK)
        grid, is_wide = rest[2] if len(rest) == 3 else "signed", name.endswith("-wide")
        groups = {f"g{group}": group for group in GROUPS}
        if (
            kind not in KEPT_BITS
            or len(rest) not in (2, 3)
            or rest[0] not in groups
            or rest[1] not in KEPT_SCALES
            or grid not in KEPT_GRIDS.get(kind, USUAL_GRIDS)
            or (rest[1] in NESTED_SCALES and (groups[rest[0]] > MOST_NESTED or grid == "zeros"))
            or (rest[1] in ("e4m3", "e8m0") and grid in OFFSET_GRIDS)
            or (rest[1] not in HALVES and grid == "minima16")
        ):
            raise ValueError(f"{name!r} names no format of kept weights")
        return cls(kind=kind, group=groups[rest[0]], scale=rest[1], grid=grid, is_wide=is_wide)

    @property
    def number(self) -> NumberFormat:
        """What it takes."""
        if not self.is_grouped:
            each = FORMATS[self.kind]
            return replace(each, name=self.name, group=self.group * STRIP_LANES, group_bits=32) if self.group else each
        is_nested = self.scale in NESTED_SCALES
        offset_bits = {"zeros": 8, "minima": 8 if is_nested else 32, "minima16": 16}.get(self.grid, 0)
        factor_bits = 32 * self.group // NESTED_INPUTS if is_nested else 0
        scale_bits = {"f32": 32, "f16": 16, "bf16": 16}.get(self.scale, 8) + factor_bits
        return NumberFormat(
            name=self.name, bits=KEPT_BITS[self.kind], group=self.group, group_bits=scale_bits + offset_bits
        )

    @property
    def rows(self) -> str:
        """The form of the rows it multiplies, as the program names it."""
        if not self.is_grouped:
            return self.compute
        return f"{'wide' if self.is_wide else 'group'}{self.group}"

    @property
    def compute(self) -> str:
        """The dtype in which its products are priced: two of int8 for each input take as long as one of bf16."""
        if self.is_wide or self.kind == "fp8":
            return "bf16"
        return "int4" if self.is_grouped and KEPT_BITS[self.kind] < 8 else "int8"

    @property
    def pace(self) -> float:
        """The part of that dtype's rate that is left: what ends a group takes as long as END dot products, beside its own."""
        if not self.is_grouped:
            return 1.0
        dots = self.group / 4 * (2 if self.is_wide else 1)
        return dots / (dots + (END_WIDE if self.is_wide else END if self.grid not in OFFSET_GRIDS else END_OFFSETS))


WORD_INPUTS = 32  # words of 32 bits beside one another: word j has inputs j, 32 + j, 64 + j, ... of their block
DEVICE_MIDDLES = {4: 8, 8: 128}  # the code of 0 where a grid is signed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFormat:
    """How a GPU holds weights that somebody else quantised: codes of 4 or 8 bits in words of 32, scales by group and output.

    group: inputs that share a scale; 0: all of a row. scale: f16, bf16 or f32, or s8, a whole number of 8 bits times a factor
    for 256 inputs. grid: what a code q stands for, over s the scale: signed s (q - middle), zeros s (q - z), minima s q + m, or
    s times what it is the bits of: e2m1, e4m3.

    >>> DeviceFormat.of(KeptFormat.named("group4-g128-f16-zeros")).name
    'gpu4-g128-f16-zeros'
    >>> DeviceFormat.named("gpu4-g128-f16-zeros").number.bytes * 8
    4.25
    """

    bits: int
    group: int
    scale: str
    grid: str

    @classmethod
    def of(cls, kept: KeptFormat) -> DeviceFormat | None:
        """What holds such values, each the number that it is dequantised to; None where nothing does.

        Minima of 8 bits stand for another code than the file's, whose sums may round otherwise; tables are no arithmetic;
        a factor that scales were divided by is not its inverse.
        """
        if not kept.is_grouped:
            return cls(bits=8, group=kept.group, scale="f32", grid="signed" if kept.kind == "int8" else "e4m3")
        bits = KEPT_BITS[kept.kind]
        grid = "minima" if kept.grid == "minima16" else kept.grid
        if grid not in ("signed", "zeros", "minima", "e2m1") or kept.scale == "e4m3":
            return None
        if grid == "minima" and bits == 8:
            return None
        scale = "bf16" if kept.scale == "e8m0" else kept.scale
        if scale != "s8" and grid == "minima" and (kept.grid == "minima" or bits != 4):
            scale = "f32"  # 16 bits may not hold them: zeros times scales, say, or those of a file whose scales have less bits
        if kept.grid == "signed" and scale != "s8" and kept.group >= 128:
            scale = "f32"  # of which a kernel reads ahead as few as it wants, and which weigh next to nothing there
        return cls(bits=4 if bits <= 4 else 8, group=kept.group, scale=scale, grid=grid)

    @property
    def name(self) -> str:
        """Everything about it in a word."""
        group = f"g{self.group}" if self.group else "row"
        return f"gpu{self.bits}-{group}-{self.scale}{'' if self.grid == 'signed' else f'-{self.grid}'}"

    @classmethod
    def named(cls, name: str) -> DeviceFormat:
        """The format of that name. ValueError where there is none."""
        kind, group, scale, *grid = name.split("-")
        found = cls(
            bits=int(kind.removeprefix("gpu")),
            group=0 if group == "row" else int(group.removeprefix("g")),
            scale=scale,
            grid=grid[0] if grid else "signed",
        )
        if found.name != name:
            raise ValueError(f"{name!r} names no format of a GPU")
        return found

    @property
    def has_offsets(self) -> bool:
        """Whether zeros or minima stand beside its scales."""
        return self.grid in OFFSET_GRIDS

    @property
    def inputs(self) -> int:
        """Those of a block of words: rows are filled up to whole ones."""
        return WORD_INPUTS * 32 // self.bits

    @property
    def number(self) -> NumberFormat:
        """What it takes."""
        if not self.group:
            return NumberFormat(name=self.name, bits=self.bits)
        if self.scale == "s8":  # and the minimum beside it, whether there is one or not
            group_bits = 16 + 32 * self.group // NESTED_INPUTS
        else:
            group_bits = (32 if self.scale == "f32" else 16) * (2 if self.has_offsets else 1)
        return NumberFormat(name=self.name, bits=self.bits, group=self.group, group_bits=group_bits)


def _of_gguf(kind: str, scale: str, grid: str = "signed", *, group: int = 32, bits: int = 0) -> KeptFormat:
    return KeptFormat(kind=kind, group=group, scale=scale, grid=grid, is_wide=bits >= WIDE_BITS)


KEPT_MXFP4 = _of_gguf("group4", "e8m0", "e2m1")
LEAST_WHOLE = (
    2.0**-64
)  # of one scale of a whole matrix, and the inverse of the largest: no group's leaves what the kernels hold
KEPT_NVFP4 = _of_gguf("group4", "e4m3", "e2m1", group=16)

# Types of GGUF whose blocks are held as they are (`compute.formats.gguf_codes`, `compute.formats.gguf_lattices`).
GGUF_KEPT: dict[str, KeptFormat] = {
    "Q4_0": _of_gguf("group4", "f16"),
    "Q4_1": _of_gguf("group4", "f16", "minima16"),
    "Q5_0": _of_gguf("group5", "f16"),
    "Q5_1": _of_gguf("group5", "f16", "minima16"),
    "Q8_0": _of_gguf("group8", "f16", bits=8),
    "IQ4_NL": _of_gguf("group4", "f16", "iq4_nl"),
    "MXFP4": KEPT_MXFP4,
    "Q4_K": _of_gguf("group4", "s8", "minima"),
    "Q5_K": _of_gguf("group5", "s8", "minima"),
    "Q6_K": _of_gguf("group6", "s8", group=16, bits=6),
    "Q3_K": _of_gguf("group3", "s8", group=16),
    "Q2_K": _of_gguf("group2", "s8", "minima", group=16),
    "IQ4_XS": _of_gguf("group4", "s8", "iq4_nl"),
    "IQ3_S": _of_gguf("group4", "s8", "iq3_s"),
    "IQ3_XXS": _of_gguf("group4", "s8", "iq3_xxs"),
    "IQ2_S": _of_gguf("group3", "s8", "iq2", group=16),
    "IQ2_XS": _of_gguf("group3", "s8", "iq2", group=16),
    "IQ2_XXS": _of_gguf("group3", "s8", "iq2"),
    "IQ1_M": _of_gguf("group3", "s8", "iq1", group=16),
    "IQ1_S": _of_gguf("group3", "s8", "iq1"),
    "TQ1_0": _of_gguf("group2", "s8", group=64),
    "TQ2_0": _of_gguf("group2", "s8", group=64),
    "NVFP4": KEPT_NVFP4,
    "Q1_0": _of_gguf("group2", "f16", group=128),
    "Q2_0": _of_gguf("group2", "f16", group=64),
}


def gguf_kept(kind: str, values: Mapping[str, int]) -> KeptFormat | None:
    """What holds blocks of that type in a file with so many values of each type in its layers; None where nothing does."""
    kept = GGUF_KEPT.get(kind)
    if kept is None or not kept.is_wide:
        return kept
    missing = sum(
        count * (FINE_BITS - KEPT_BITS[GGUF_KEPT[one].kind]) for one, count in values.items() if one in GGUF_KEPT
    )
    return replace(kept, is_wide=missing <= 0)


def group_held(stored: int) -> int | None:
    """The kernels' group that cuts groups of `stored` inputs evenly; None where they have none."""
    return next((group for group in GROUPS if stored % group == 0), None)


# What the engine offers: its name -> the format, and the dtype in which the linear layers multiply. int4: codes of fewer than
# eight bits by rows of int8. Processors without a dot product sum several such products in 16 bits; int8 by int8 takes longer.
ENGINE_WEIGHTS: dict[str, tuple[NumberFormat, str]] = {
    "fp32": (FORMATS["fp32"], "fp32"),
    "bf16": (FORMATS["bf16"], "bf16"),
    "int8": (FORMATS["int8"], "int8"),
    "int4": (FORMATS["int4-g64"], "int4"),
}
KV_IN_BYTES = (
    "int8x8"  # kept as int8 is, and met by queries and weights of 8 bits, which take half the time of finer ones
)
ENGINE_KV = ("fp32", "bf16", "int8", KV_IN_BYTES, "fp8")

# Made of a checkpoint's values when it is loaded, as a GGUF file of them would be kept (`compute.ops.made`).
MADE_WEIGHTS = {kind.lower(): GGUF_KEPT[kind] for kind in ("Q8_0", "Q5_1", "Q4_1", "Q4_0")}


def _kept_of(name: str) -> KeptFormat:
    return MADE_WEIGHTS[name] if name in MADE_WEIGHTS else KeptFormat.named(name)


def engine_weights(name: str) -> tuple[NumberFormat, str]:
    """As ENGINE_WEIGHTS, of kept formats too."""
    if name in ENGINE_WEIGHTS:
        return ENGINE_WEIGHTS[name]
    if name.startswith("gpu"):
        return DeviceFormat.named(name).number, "bf16"
    kept = _kept_of(name)
    return kept.number, kept.compute


def rows_dtype(compute: str) -> str:
    """In which rows meet the weights of products of that dtype."""
    return "int8" if compute == "int4" else compute


def engine_pace(name: str) -> float:
    """The part of its dtype's rate that products with weights of that format of the engine have."""
    return 1.0 if name in ENGINE_WEIGHTS or name.startswith("gpu") else _kept_of(name).pace


def head_format(weights: str) -> str:
    """The format of the output projection beside weights of that format: every token's probabilities pass through it."""
    if weights in MADE_WEIGHTS:
        return "q8_0"
    if weights not in ENGINE_WEIGHTS:
        return "bf16"  # other programs leave it in 16 bits
    return "int8" if weights == "int4" else weights


def mean_bytes(formats: Mapping[str, int]) -> float:
    """Bytes of a weight where there are so many of each format."""
    return sum(engine_weights(name)[0].bytes * n for name, n in formats.items()) / sum(formats.values())


def mix_of(formats: Mapping[str, int], *, usual: str) -> tuple[Stored, ...]:
    """The formats of weights of which there are so many each; nothing where all are in the usual one."""
    if formats.keys() <= {usual}:
        return ()
    n_all = sum(formats.values())
    kinds = {name: engine_weights(name) for name in formats}
    return tuple(
        Stored(n / n_all, kinds[name][0].bytes, kinds[name][1], engine_pace(name)) for name, n in formats.items()
    )


def engine_quant(weights: str, head: str) -> QuantSpec:
    """How the engine stores and multiplies weights of that format, with the output projection in `head`."""
    body, compute = engine_weights(weights)
    return QuantSpec(
        name=weights,
        weight_bytes=body.bytes,
        head_weight_bytes=engine_weights(head)[0].bytes,
        compute=compute,
        head_compute=engine_weights(head)[1],
        pace=engine_pace(weights),
        attention_compute="fp32" if weights == "fp32" else "bf16",
    )


def _quant(
    name: str,
    body: str,
    *,
    head: str | None = None,
    experts: str | None = None,
    compute: str = "bf16",
    head_compute: str | None = None,
    attention_compute: str = "bf16",
) -> QuantSpec:
    return QuantSpec(
        name=name,
        weight_bytes=FORMATS[body].bytes,
        head_weight_bytes=None if head is None else FORMATS[head].bytes,
        expert_weight_bytes=None if experts is None else FORMATS[experts].bytes,
        activation_bytes=FORMATS[body].bytes if body == "fp32" else 2.0,
        compute=compute,
        head_compute=head_compute,
        attention_compute=attention_compute,
    )


# What the planner prices: also what other engines store. The head of q4_0 is in q6_k, as llama.cpp does.
QUANTS: dict[str, QuantSpec] = {
    quant.name: quant
    for quant in (
        _quant("fp32", "fp32", compute="fp32", attention_compute="fp32"),
        _quant("bf16", "bf16"),
        _quant("fp8", "fp8", compute="fp8"),
        _quant("int8", "int8"),
        _quant("w8a8", "int8", compute="int8"),
        _quant("int4", "int4-g32"),
        _quant("fp4", "nvfp4", head="bf16", compute="fp4", head_compute="bf16"),
        _quant("mxfp4", "bf16", experts="mxfp4"),
        _quant("mxfp4-gguf", "q8_0", experts="mxfp4", compute="int8"),
        _quant("q8_0", "q8_0", compute="int8"),
        _quant("q5_1", "q5_1", head="q8_0", compute="int8"),
        _quant("q4_1", "q4_1", head="q8_0", compute="int8"),
        _quant("q4_0", "q4_0", head="q6_k", compute="int8"),
    )
}
QUANT_ALIASES = {"fp16": "bf16", "f16": "bf16", "float16": "bf16", "bfloat16": "bf16", "int4g32": "int4", "q4": "q4_0"}

KV_FORMATS: dict[str, KVSpec] = {
    name: KVSpec(name=name, bytes_per_element=FORMATS[name].bytes, scale_bytes=4.0 if name in ("int8", "fp8") else 0.0)
    for name in ("fp32", "bf16", "fp8", "int8", "int4")
}
KV_FORMATS[KV_IN_BYTES] = replace(KV_FORMATS["int8"], name=KV_IN_BYTES, compute="int8")
