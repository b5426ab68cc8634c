"""What machines and number formats are, as plain numbers: the nouns of the cost model.

Standard library only. Tables of named devices live in `cost/`; the arithmetic over these specs too.
Rates are per second, sizes in bytes, and always of one device (one GPU, one socket) unless a name says otherwise.

>>> QuantSpec(name="int8", weight_bytes=1.0).head_bytes
1.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Flag(Enum):
    """How far a number can be trusted."""

    MEASURED = "measured"  # timed on the thing itself
    VENDOR = "vendor"  # the maker's sheet, or a page that quotes it
    UNVERIFIED = "unverified"  # from memory, second hand, or computed from clocks


class Bottleneck(Enum):
    """What a step waits for most."""

    COMPUTE = "compute"
    MEMORY = "memory"
    LINK = "link"
    LAUNCH = "launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the number in `field` comes from."""

    field: str
    flag: Flag
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """One device. `flops_per_s` is the dense peak by compute dtype: fp32, bf16 (any 16-bit), fp8, int8, int4, fp4.

    link_bytes_per_s: per direction to its peers; None when devices of this kind are not joined.
    """

    name: str
    title: str
    kind: str  # gpu | tpu | accelerator | apple | cpu
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    memory_bytes: float
    architecture: str = ""
    link_bytes_per_s: float | None = None
    link_name: str | None = None
    max_linked_devices: int = 1
    usd_per_hour: float | None = None
    provenance: tuple[Provenance, ...] = ()

    def flag_of(self, field_name: str) -> Flag:
        """The flag of one number; UNVERIFIED when the table says nothing about it."""
        for fact in self.provenance:
            if fact.field == field_name:
                return fact.flag
        return Flag.UNVERIFIED


class Stored(NamedTuple):
    """Weights in one of several formats: their share of all, bytes of one, and the dtype in which they are multiplied.

    pace: the part of that dtype's rate that they leave, whose sums end with every group.
    """

    share: float
    bytes: float
    compute: str
    pace: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How weights are stored and in which dtype they are multiplied.

    Bytes are per parameter with scales included (int4 in groups of 32 with bf16 scale and zero: 0.625).
    head_weight_bytes / expert_weight_bytes: None means the same as `weight_bytes`; head_compute: the same as `compute`.
    pace: of the products of what is in no mix (`Stored`).
    mix, expert_mix: of layers, and of experts, whose weights are in several formats; empty: in one, which the rest says.
    """

    name: str
    weight_bytes: float
    head_weight_bytes: float | None = None
    expert_weight_bytes: float | None = None
    compute: str = "bf16"
    head_compute: str | None = None
    pace: float = 1.0
    mix: tuple[Stored, ...] = ()
    expert_mix: tuple[Stored, ...] = ()
    attention_compute: str = "bf16"
    activation_bytes: float = 2.0

    @property
    def head_bytes(self) -> float:
        """Bytes per parameter of the LM head and the embedding."""
        return self.weight_bytes if self.head_weight_bytes is None else self.head_weight_bytes

    @property
    def expert_bytes(self) -> float:
        """Bytes per parameter of routed experts."""
        return self.weight_bytes if self.expert_weight_bytes is None else self.expert_weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """How the KV cache is stored: bytes per element, and the block that a sequence's length is rounded up to.

    scale_bytes: beside the elements of each token's key in a head, and as many beside its value, held where there is none, too.
    compute: the dtype that attention multiplies in; None: that of the weights' format (`QuantSpec.attention_compute`).
    """

    name: str = "bf16"
    bytes_per_element: float = 2.0
    scale_bytes: float = 0.0
    block_tokens: int = 16
    compute: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step costs. The parts overlap, so `total_s` is not their sum; total_s lies in [low_s, high_s].

    host_s: launch and bookkeeping that no arithmetic explains. is_bound: a plain roofline, which reality cannot beat.
    """

    compute_s: float
    memory_s: float
    link_s: float
    host_s: float
    total_s: float
    low_s: float
    high_s: float
    bound: Bottleneck
    is_bound: bool
    parts_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
