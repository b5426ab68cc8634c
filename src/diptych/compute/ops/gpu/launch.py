"""How kernels are called: compiled once for what their arguments are, then without a look at each argument."""

from __future__ import annotations

from typing import Any

import torch

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[torch.Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """Call a kernel whose arguments are tensors, then numbers, then constants.

    Triton looks at each argument of each call, which takes longer than a small kernel runs: what it looks for is the key here.
    """
    seen = [None if one is None else (one.dtype, one.data_ptr() % 16 == 0, one.device.index) for one in tensors]
    key = (kernel.__name__, *seen, *map(_kind, numbers), *constants.values(), *options.values())
    compiled = _compiled.get(key)
    if compiled is None:
        # None where kernels are interpreted
        _compiled[key] = kernel[grid](*tensors, *numbers, **constants, enable_fp_fusion=False, **options)
    else:
        compiled[grid](*tensors, *numbers, *constants.values())


def _kind(number: float) -> object:
    """What Triton compiles a number in: a float or not, 1, a multiple of 16."""
    return type(number), number == 1, number % 16 == 0


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes microseconds where the host calls it."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least that is not below n, which is above 0."""
    return 1 << (n - 1).bit_length()
