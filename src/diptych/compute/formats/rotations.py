"""Rotations beside quantised matrices, multiplied into these: x M W^T is x (W M^T)^T, and (x W^T + b) M is x (M^T W)^T + b M.

A matrix M is one for all inputs (outputs), or for each run of them alike. Its tensor lies beside one of the modules that it is
for, where several share it (`models.rotations`); a Hadamard's has 1 and -1, or these over the root of its sides, by which M is
divided anyway. Sylvester's needs no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from diptych.compute.formats.matrices import Dequantised, Matrix, RawTensors
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, finite, require
from diptych.compute.ops.contract import WeightTensor
from diptych.ground.errors import LoadError
from diptych.models.contents import part_of
from diptych.models.quantised.fields import HINT, Quantisation
from diptych.models.rotations import HADAMARD, Rotation

MOST_SIDES = 1 << 15
ROWS = 1024  # that are turned at one time


@dataclass(frozen=True, slots=True)
class Turn:
    """M of so many sides. read: its values in fp64."""

    sides: int
    read: Callable[[], torch.Tensor]


class Rotated(Dequantised):
    """Another matrix with rotations of its inputs and outputs multiplied in, in fp64, rounded to fp32.

    In fp32 the order of sums, which may go by the rows that are asked for, could tell ranks from one another.
    """

    why = "no kernel rotates rows"

    def __init__(self, matrix: Matrix, inputs: Turn | None, outputs: Turn | None) -> None:
        self._matrix, self._inputs, self._outputs = matrix, inputs, outputs
        self.label, self.stored_bytes = f"{matrix.label}-rotated", matrix.stored_bytes

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        found = self._matrix.values(rows if self._outputs is None else slice(None))
        if self._inputs is not None:
            turn, sides = self._inputs.read().T, self._inputs.sides
            found = torch.cat(
                [(one.double().unflatten(1, (-1, sides)) @ turn).flatten(1).float() for one in found.split(ROWS)]
            )
        if self._outputs is None:
            return found
        turn, runs = self._outputs.read().T, found.view(-1, self._outputs.sides, found.shape[1])
        return torch.cat([(turn @ one.double()).float() for one in runs])[rows]


class PlainFloats(Dequantised):
    """A matrix of floats that only a rotation makes others of."""

    label, why = "plain", "no kernel rotates rows"

    def __init__(self, raw: RawTensors, weight: str, shape: tuple[int, int]) -> None:
        require(raw, weight, shape, *FLOATS)
        self._raw, self._weight = raw, weight
        self.stored_bytes = math.prod(shape) * (4 if raw.header(weight)[1] == "F32" else 2)

    def values(self, rows: slice) -> torch.Tensor:
        """fp32."""
        return self._raw.stored(self._weight)[rows].float()


class RotatedBias(WeightTensor):
    """b M, in fp32."""

    random_seed: int | None = None
    dtype = torch.float32

    def __init__(self, bias: WeightTensor, turn: Turn) -> None:
        self.name, self.shape = bias.name, bias.shape
        self._bias, self._turn = bias, turn

    def read(self) -> torch.Tensor:
        """New."""
        return (self._bias.read().double().view(-1, self._turn.sides) @ self._turn.read()).flatten().float()


class Rotations:
    """Those of one checkpoint. names: of all its tensors; stored: of those, the rotations' own; used: those asked for."""

    def __init__(self, raw: RawTensors, names: list[str], how: Quantisation) -> None:
        self._raw, self._each = raw, tuple(one for one in how.rotations if not one.is_idle)
        endings = tuple(ending for one in how.rotations for ending in (one.ending, *one.shared))
        self.stored = frozenset(name for name in names if endings and name.endswith(endings))
        self.used: set[str] = set()
        self._made: dict[tuple[str, int, bool], torch.Tensor] = {}
        self._met: set[Rotation] = set()

    def applied(self, raw: RawTensors, prefix: str, shape: tuple[int, int], matrix: Matrix | None) -> Matrix | None:
        """The matrix under `prefix` (None: of plain floats) with all rotations; itself where there are none."""
        if not self._each:
            return matrix
        inputs, outputs = (self._turn(prefix, at, shape[0 if at else 1], matrix is not None) for at in (False, True))
        if inputs is None and outputs is None:
            return matrix
        return Rotated(matrix or PlainFloats(raw, f"{prefix}.weight", shape), inputs, outputs)

    def with_plain(self, name: str, tensor: WeightTensor, *, is_coded: Callable[[str], bool]) -> WeightTensor:
        """A tensor that is no matrix: a bias of rotated outputs is rotated as they are. LoadError for stacked matrices.

        is_coded: whether the matrix under a prefix is quantised.
        """
        module, _, ending = name.rpartition(".")
        stack = module if ending == "weight" else name
        if len(tensor.shape) > 2 and any(one.reaches(stack, is_linear=False) for one in self._each):
            raise LoadError(
                f"config.json rotates what {name} is for, which are stacked matrices; only single ones are read"
            )
        if not self._each or ending != "bias":
            return tensor
        turn = self._turn(module, True, tensor.shape[0], is_coded(module))
        return tensor if turn is None else RotatedBias(tensor, turn)

    def check(self) -> None:
        """LoadError where a rotation met no matrix."""
        for one in self._each:
            if one not in self._met:
                raise LoadError(
                    f"config.json names a rotation ({one.ending.removesuffix('.weight')[1:]}) that is for none of the matrices",
                    hint=CONTRADICTION,
                )

    def _turn(self, module: str, is_of_outputs: bool, side: int, is_coded: bool) -> Turn | None:
        """M of that side, of so many numbers; None where there is none."""
        each = [one for one in self._each if one.is_of_outputs == is_of_outputs]
        part, what = part_of(f"{module}.weight"), "outputs" if is_of_outputs else "inputs"
        found = [one for one in each if one.reaches(module, is_linear=is_coded or part == "head")]
        is_clear = is_coded or part in ("embedding", "head", "norms")
        if not is_clear and any(one.is_by_class and one.reaches(module, is_linear=True) for one in each):
            raise LoadError(
                f"config.json rotates {what} of what is linear, and whether {module}, which lies in floats, is so is not known",
                hint=HINT,
            )
        if not found:
            return None
        if len(found) > 1 or part == "embedding":
            raise LoadError(
                f"config.json rotates {what} of {module} {len(found)} times; once, and not of embeddings, can be read",
                hint=HINT,
            )
        one = found[0]
        sides = one.block or side
        if side % sides or sides > MOST_SIDES:
            raise LoadError(f"{module} has {side} {what}, which rotations of {sides} do not divide", hint=CONTRADICTION)
        self._met.add(one)
        name = self._stored(one, module, sides)
        if name:
            require(self._raw, name, (sides, sides), *FLOATS, "F64")
            self.used.add(name)
        elif one.kind != HADAMARD[0] or sides & sides - 1:
            raise LoadError(
                f"no tensor {module}{one.ending} of {sides} by {sides} is there, nor beside another module",
                hint="the checkpoint is incomplete",
            )
        return Turn(sides, partial(self._read, one, name, sides))

    def _read(self, one: Rotation, name: str, sides: int) -> torch.Tensor:
        key = (name, sides, one.is_inverse)
        if key not in self._made:
            matrix = finite(self._raw, name).double() if name else _sylvester(sides)
            if one.kind in HADAMARD:
                matrix = _hadamard(matrix, name)
                matrix = matrix.T if one.is_inverse else matrix
            self._made[key] = matrix
        return self._made[key]

    def _stored(self, one: Rotation, module: str, sides: int) -> str:
        """The tensor's name; "" where there is none. Beside the module, or the first of the sides beside another."""
        if self._raw.holds(f"{module}{one.ending}"):
            return f"{module}{one.ending}"
        endings = (one.ending, *(one.shared if one.kind in HADAMARD else ()))
        fitting = [name for name in sorted(self.stored) if self._raw.header(name)[0] == (sides, sides)]
        return next((name for ending in endings for name in fitting if one.shared and name.endswith(ending)), "")


def _sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def _hadamard(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """Of rows of length 1. LoadError for a matrix that has other numbers than one and its negative."""
    size = len(matrix)
    each = matrix.abs()
    least, most = (float(one) for one in torch.aminmax(each))
    if not any(abs(least - one) < 0.01 * one and abs(most - one) < 0.01 * one for one in (1.0, size**-0.5)):
        raise LoadError(
            f"{name} has numbers of a size from {least:g} to {most:g}; a Hadamard matrix has 1, or {size**-0.5:g}, and their "
            "negatives alone",
            hint="the checkpoint is damaged; download it again",
        )
    return matrix.sign() * size**-0.5
