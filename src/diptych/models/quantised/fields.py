"""What a `quantization_config` says of a checkpoint's weights, and its fields one by one: each is known or refused by name.

`models.quantised.method` has the programs that write such sections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from diptych.ground.errors import LoadError
from diptych.ground.formats import FP8_BLOCK, WIDE_BITS, KeptFormat, group_held
from diptych.models.config import HfConfig
from diptych.models.rotations import Rotation

MOST_SIGNS = 512
# of what a pattern may hold: nothing that a search could take long over
PLAIN_PATTERN = re.compile(r"[\w.^$|()\\\[\]?:-]*(\.[*+][\w.^$|()\\\[\]?:-]*){0,2}")
OF_CACHE_NOTE = (
    "scales for a cache of 8 bits in the file are not used: --kv fp8 and int8 find one for each token and head"
)
HINT = "use the unquantised checkpoint and choose the weight format with --weights"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Bits of a code, and inputs that share a scale (None: all of a row)."""

    bits: int
    group: int | None

    def makes(self, words: int, groups: int, inputs: int | None) -> bool:
        """Whether a row of codes takes so many words of 32 bits and so many scales."""
        k = 32 * words // self.bits if inputs is None else inputs
        return k * self.bits == 32 * words and groups == (1 if self.group is None else -(-k // self.group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Outputs in runs that are vectors of codebooks (vptq), of one module.

    sides: outputs and inputs; length: of a vector; size, rest: vectors of the first codebook, and of a second that is added (0:
    none); runs: of so many inputs, `run`, that have codebooks of their own. outliers: inputs before those with a codebook of
    their own, of `outlier_size` vectors of `outlier_length`. has_order: inputs are in another order; has_norm: each is scaled
    and shifted.
    """

    sides: tuple[int, int]
    length: int
    size: int
    rest: int
    runs: int
    run: int
    outliers: int
    outlier_length: int
    outlier_size: int
    has_order: bool
    has_norm: bool

    @property
    def code_bits(self) -> tuple[int, int]:
        """Of a code of the first codebook, and of one of the second that lies above it."""
        return self.size.bit_length() - 1, max(0, self.rest.bit_length() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint was quantised.

    bits, group: of all matrices (awq, gptq; group None: a whole row), or of most (mlx), own_groups: of those that have others.
    own_bits: bits by pattern of a module's name, the first that fits (gemma).
    own_schemes: bits and group by module, or part of a name, of those that a mixture names (gptq).
    groups: of compressed-tensors, how many inputs may share a scale where a row has several. block: rows and inputs that share
    one (fp8), None without. has_zeros: each matrix has zero points beside it; has_order: it says in which group each input is.
    zero_added: to every zero point as it is stored (gptq's first layout: 1). divides: what the scale of a matrix does (bitnet).
    layout: which of AWQ's ('gemm', 'gemv', 'gemv_fast', 'marlin'), of which gptq has the last, too, or 'planes'; of quark,
    which floats of 6 bits.
    is_ordered: codes of a word lie in their order, not in AutoAWQ's; is_signed: they are signed (quark, awq).
    meets_int8_rows: codes of 8 bits meet activations of 8, as their publisher runs them (torchao, quark).
    is_online: floats of layers are rounded at load, as the model does it whenever it runs (bitnet), but for those of `plain`.
    largest: what a matrix's largest value is in codes and scales (fouroversix).
    rotations: of what layers read and give, which are multiplied into weights. vectors: by module, or its last part (vptq).
    kept: the kernels' format that will hold most matrices, as far as the config says.
    note: what is read otherwise than its publisher runs it, for the log.
    """

    method: str
    kept: KeptFormat | None = None
    bits: int | None = None
    group: int | None = None
    groups: tuple[int, ...] = ()
    own_groups: Mapping[str, int] = field(default_factory=dict)
    own_bits: tuple[tuple[re.Pattern[str], int], ...] = ()
    own_schemes: Mapping[str, Scheme] = field(default_factory=dict)
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    has_order: bool = False
    zero_added: int = 0
    layout: str = "gemm"
    divides: bool = False
    is_ordered: bool = False
    is_signed: bool = False
    meets_int8_rows: bool = False
    is_online: bool = False
    plain: tuple[str, ...] = ()
    largest: int = 1
    rotations: tuple[Rotation, ...] = ()
    vectors: Mapping[str, Vectors] = field(default_factory=dict)
    note: str = ""

    def rounds(self, module: str) -> bool:
        """Whether floats there are rounded at load: not the head, nor what the config names, by its beginning or its end."""
        is_plain = any(module == one or module.startswith(f"{one}.") or module.endswith(one) for one in self.plain)
        return self.is_online and ".layers." in f".{module}" and not is_plain

    def group_of(self, module: str) -> int:
        """Inputs that share a scale there, where the config says it."""
        return self.own_groups.get(module, self.group or 0)

    def bits_of(self, module: str) -> int:
        """Bits of a code there, where the config says it."""
        return next((bits for pattern, bits in self.own_bits if pattern.search(module)), self.bits or 4)

    def vectors_of(self, module: str) -> Vectors | None:
        """What a matrix there is made of; None where the config does not name it."""
        return self.vectors.get(module, self.vectors.get(module.rpartition(".")[2]))

    def scheme_of(self, module: str, words: int, groups: int, inputs: int | None = None) -> Scheme:
        """Bits and group there. words: of 32 bits, that one output's codes take; groups: its scales; inputs: where known.

        The one that the config has for that module where it makes so many words and scales, else the first of a mixture that
        does: wrappers change names. Where none does, the usual one, which the caller finds contradicted.
        """
        usual = Scheme(self.bits or 4, self.group)
        named = self.own_schemes.get(module)
        mixture = (*(() if named is None else (named,)), usual, *self.own_schemes.values())
        return next((one for one in mixture if one.makes(words, groups, inputs)), usual)


def kept_groups(bits: int, group: int | None, scale: str, *, is_symmetric: bool) -> KeptFormat | None:
    """What holds integer codes; None where nothing does."""
    held = 128 if group is None else group_held(group)
    grid = "signed" if is_symmetric else "zeros" if bits == 4 else "minima"
    if held is None:
        return None
    return KeptFormat(kind=f"group{bits}", group=held, scale=scale, grid=grid, is_wide=bits >= WIDE_BITS)


def kept_fp8(block: tuple[int, int] | None) -> KeptFormat | None:
    """What holds E4M3 with a scale of a row, or of a block."""
    if block is None:
        return KeptFormat(kind="fp8")
    return None if any(size % FP8_BLOCK for size in block) else KeptFormat(kind="fp8", group=FP8_BLOCK)


def refuse(section: HfConfig, name: str, allowed: str, *, default: Any = None) -> NoReturn:
    """LoadError that names the field, what it is and what it may be."""
    raise LoadError(f"{name} in {section.path} is {section.raw.get(name, default)!r}; {allowed}", hint=HINT)


def one_of(section: HfConfig, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    """A field of which some values are read. A bool is no number here."""
    value = section.raw.get(name, default)
    if isinstance(value, str):
        value = value.lower()
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
        refuse(section, name, f"{' or '.join(map(repr, allowed))} can be read", default=default)
    return value


def group_size(section: HfConfig, name: str) -> int | None:
    """Inputs that share a scale; None: all of a row."""
    value = section.raw.get(name, 128)
    if value in (-1, None):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        refuse(section, name, "it must be -1 (a whole row) or a whole number of inputs")
    return int(value)


def is_module(name: object) -> bool:
    """Whether it is a plain name: what else a pattern may say is not read."""
    return isinstance(name, str) and name.replace(".", "").replace("_", "").isalnum()


def pattern_of(path: str, pattern: str) -> re.Pattern[str]:
    """A pattern of modules' names, as `path` has it. LoadError for one that a search could take long over."""
    if len(pattern) > MOST_SIGNS or not PLAIN_PATTERN.fullmatch(pattern):
        raise LoadError(
            f"{path} has a pattern that is not read: {pattern[:80]!r}",
            hint=f"at most {MOST_SIGNS} signs with two of '.*' can be, and no other repetition",
        )
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise LoadError(f"{path} has a pattern that is none: {pattern[:80]!r} ({error})") from error


def block_of(section: HfConfig, name: str) -> tuple[int, int] | None:
    """Rows and inputs that share a scale; None where the field is absent."""
    block = section.integers(name)
    if block is not None and (len(block) != 2 or min(block) < 1):
        refuse(section, name, "it must be two whole numbers, rows and inputs")
    return None if block is None else (block[0], block[1])
