"""Rotations of what goes into a projection, or comes out of it, that a checkpoint's publisher runs beside its weights.

>>> Rotation(ending=".R4_input.weight", kind="hadamard", targets=("lm_head",)).reaches("lm_head", is_linear=True)
True
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LINEAR = "Linear"  # by class, in place of a name
HADAMARD = ("hadamard", "random-hadamard")  # whose inverse is the transpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """One square matrix M for some modules, where x M is what their weights expect, or y M what they should give.

    ending: of the names of its tensors, behind that of a module; kind: 'hadamard', 'random-hadamard' or 'random-matrix'.
    shared: further endings under which the same matrix may lie. block: sides of M, of which as many stand in a diagonal as fit;
    None: all inputs or outputs. is_of_outputs: y M; is_inverse: a Hadamard's M is transposed. is_idle: nothing is to be done,
    as queries meet keys that are rotated alike. targets, ignored: names of modules, patterns of them, or `LINEAR`.
    """

    ending: str
    kind: str
    shared: tuple[str, ...] = ()
    block: int | None = None
    is_of_outputs: bool = False
    is_inverse: bool = False
    is_idle: bool = False
    targets: tuple[str | re.Pattern[str], ...] = ()
    ignored: tuple[str | re.Pattern[str], ...] = ()

    @property
    def is_by_class(self) -> bool:
        """Whether it names what it is for by class."""
        return LINEAR in self.targets

    def reaches(self, module: str, *, is_linear: bool) -> bool:
        """Whether it is for the module of that name. is_linear: what its class is."""
        if self.is_idle:
            return False
        found, left = (
            any(_fits(one, module, is_linear=is_linear) for one in each) for each in (self.targets, self.ignored)
        )
        return found and not left


def _fits(target: str | re.Pattern[str], module: str, *, is_linear: bool) -> bool:
    if isinstance(target, str):
        return module == target or (is_linear and target == LINEAR)
    return target.match(module) is not None
