"""Layouts of one copy of a model beyond tensor parallel, as work per device: formulas, with no calibration of their own.

attention-data parallel (dp): so many groups each hold the attention and the dense layers whole and serve sequences of their
own; the experts are spread over all groups. A device has 1/dp of the rows and of the KV cache, and 1/dp of the experts.

expert parallel (ep): experts stand whole on their devices, in so many groups, in place of slices of each on every device.
Bytes and FLOPs are those of tensor parallel; the busiest group decides, which has more than its share of the tokens and of the
experts that they ask for.

pipeline (pp): so many stages of layers, and as many parts of every step on their way through them at one time. A round takes
as long as all layers take for 1/pp of the rows, every weight being read once on the way, and pp hops more.

Communication: two all-reduces a layer over the tp devices of a group; between groups two all-to-alls a mixture layer, of
rows x experts per token x width x (groups - 1) / groups; between stages rows x width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from diptych.cost.roofline import link_rate, no_link
from diptych.ground.errors import ConfigError
from diptych.ground.specs import HardwareSpec
from diptych.models.spec import ModelSpec

HOP_S = 10e-6  # between stages, beside the bytes: a point-to-point message of NCCL
# what predictions of such layouts are off beyond those of tensor parallel, natural log at 80 %, of each kind used
# (60 published services with dp have a median error of TPOT of 25 %, 573 with ep of 10 %, all others of 9 %; with pp there is
# none)
SPREADS = {"ep": 0.2, "dp": 0.3, "pp": 0.3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees beside tensor parallel. See the module."""

    dp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of devices."""
        for name in ("dp", "ep", "pp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{WORDS[name]} degree is {getattr(self, name)}; it must be at least 1")

    @property
    def parts(self) -> int:
        """Rows of a step are shared by so many devices, beside tensor parallel."""
        return self.dp * self.pp

    @property
    def words(self) -> str:
        """Short text; empty for plain tensor parallel."""
        found = [f"{name} {getattr(self, name)}" for name in ("dp", "ep", "pp") if getattr(self, name) > 1]
        return " ".join(found)

    @property
    def spread_squared(self) -> float:
        """What it adds to the interval."""
        return sum(spread**2 for name, spread in SPREADS.items() if getattr(self, name) > 1)

    def check(self, model: ModelSpec, tp: int) -> None:
        """Refuse a layout that the model cannot be put into."""
        moe = model.moe
        if self.ep > 1:
            if moe is None:
                raise ConfigError(f"{model.name} has no experts to be parallel; expert parallel is {self.ep}")
            if tp * self.dp % self.ep or moe.n_experts % self.ep:
                raise ConfigError(
                    f"expert parallel is {self.ep}; it must divide the {tp * self.dp} devices (tensor times attention-data "
                    f"parallel) and the {moe.n_experts} experts of {model.name}"
                )
        if self.dp > 1 and moe is None:
            raise ConfigError(
                f"{model.name} has no experts to share; attention-data parallel {self.dp} of it is as many copies",
                hint="so many copies: `diptych simulate --engines`",
            )
        if self.pp > model.n_blocks:
            raise ConfigError(f"{model.name} has {model.n_blocks} layers; they cannot stand on {self.pp} stages")

    def check_links(self, hardware: HardwareSpec, tp: int) -> None:
        """Refuse devices that cannot be joined so. A stage is within the reach of the fast link, several need not be."""
        link_rate(hardware, tp * self.dp, what=WORDS["tp"] if self.dp == 1 else f"tensor times {WORDS['dp']}")
        if self.pp > 1 and hardware.link_bytes_per_s is None:
            raise no_link(hardware, f"{WORDS['pp']} {self.pp}")

    def crowding(self, model: ModelSpec, rows: float) -> float:
        """How many times its even share of the tokens the busiest group of experts gets.

        Even routing at random: m tokens in n groups have about m/n + sqrt(2 m/n ln n) in the fullest (Raab and Steger, 1998).
        """
        moe = model.moe
        if self.ep == 1 or moe is None or rows <= 0:
            return 1.0
        mean = rows * moe.met_experts / self.ep
        return min(1.0 + math.sqrt(2.0 * math.log(self.ep) / mean), float(self.ep))

    def most_experts(self, model: ModelSpec, read: float) -> float:
        """Of so many experts that a step reads: as many as if every group had as many of them as the busiest has.

        They fall on n groups by chance: the largest of n normal numbers, Blom's approximation (0.56, 1.03 and 1.42 deviations
        above the mean for 2, 4 and 8). A group has no more than its own.
        """
        moe = model.moe
        if self.ep == 1 or moe is None or read <= 0:
            return read
        mean, most = read / self.ep, moe.n_experts / self.ep
        largest = NormalDist().inv_cdf((self.ep - 0.375) / (self.ep + 0.25))
        return self.ep * min(mean + largest * math.sqrt(mean * max(1.0 - mean / most, 0.0)), most)


PLAIN = Layout()
WORDS = {
    "tp": "tensor parallel",
    "dp": "attention-data parallel",
    "ep": "expert parallel",
    "pp": "pipeline parallel",
}
