"""Rows of stacked tensors (q, k and v; gate and up) as a native program packs them: of which tensor, in codes or values."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from diptych.compute.loading.balance import Exponents, directions_of
from diptych.compute.loading.finite import are_finite
from diptych.compute.loading.weights import Source
from diptych.compute.ops.contract import LinearParts, WeightTensor
from diptych.compute.ops.contract_parts import Codes
from diptych.ground.errors import LoadError
from diptych.models.contents import EXPONENTS

logger = logging.getLogger("diptych.compute")

STANDS_OUT = 32.0  # from there rows of 8 bits leave what lies beside a large channel three bits or less

Rows = tuple[tuple[int, int], ...]  # ranges of a projection's outputs


def own_rows(tensors: tuple[WeightTensor, ...], rows: Rows) -> Iterator[tuple[WeightTensor, slice]]:
    """Which rows of which of the stacked tensors `rows` of the stack are, in their order."""
    for begin, end in rows:
        first = 0
        for tensor in tensors:
            low, high = max(begin, first), min(end, first + tensor.shape[0])
            if low < high:
                yield tensor, slice(low - first, high - first)
            first += tensor.shape[0]


def runs_of(parts: LinearParts, is_alike: Callable[[Sequence[WeightTensor]], bool]) -> list[LinearParts]:
    """Neighbours that are alike; one run where there is a bias for several tensors together."""
    if len(parts.biases) not in (0, len(parts.weights)):
        return [parts]
    runs: list[LinearParts] = []
    for i, tensor in enumerate(parts.weights):
        one = LinearParts(weights=(tensor,), biases=parts.biases[i : i + 1])
        if runs and is_alike((runs[-1].weights[0], tensor)):
            before = runs[-1]
            runs[-1] = LinearParts(weights=(*before.weights, tensor), biases=(*before.biases, *one.biases))
        else:
            runs.append(one)
    return runs


def native_codes(tensors: tuple[WeightTensor, ...], rows: Rows) -> list[tuple[Any, ...]]:
    """Codes, scales, offsets and factors of rows of the stack: each row has its own."""
    read: dict[str, Codes] = {}
    native = []
    for part, own in own_rows(tensors, rows):
        if part.name not in read:
            read[part.name] = part.codes()
        codes = read[part.name].rows(own)
        floats = codes.scales if codes.factors is None else codes.factors
        if not are_finite(floats.to(torch.float32)):
            raise LoadError(
                f"tensor {part.name} has a scale that is not finite",
                hint="the checkpoint is damaged; download it again",
            )
        parts = (codes.codes, codes.scales, codes.offsets, codes.factors)
        native.append(tuple(None if one is None else one.contiguous() for one in parts))
    return native


def finite_weights(parts: LinearParts, rows: Rows, weights_format: str) -> list[torch.Tensor]:
    """The rows' values; rounding one that is not finite to a grid would make a number of it, and hide it."""
    weights = [(part.name, part.part(own, parts.n_inputs).detach()) for part, own in own_rows(parts.weights, rows)]
    if weights_format in ("int8", "int4"):
        for name, values in weights:
            if not are_finite(values):
                raise LoadError(
                    f"tensor {name} has a weight that is not finite; {weights_format} cannot hold it",
                    hint="the checkpoint is damaged; download it again",
                )
    return [values for _, values in weights]


def directions_for(parts: LinearParts, weights_format: str) -> np.ndarray | None:
    """fp32 [n, K] that rounding to a format heeds; None: it heeds none, or nothing was measured."""
    found = directions_of(parts) if weights_format == "int4" else None
    return None if found is None else found.numpy()


def warn_of_large_channel(times: float, norm: str, formats: Iterable[str]) -> None:
    """Rows of 8 bits have few levels beside such a channel, and codes that are kept cannot be balanced.

    times: how far it stands out of the middle one of that norm; formats: that weights were packed in.
    """
    is_narrow = any(name.startswith("group") and not name.endswith("-wide") for name in formats)
    if times < STANDS_OUT or not is_narrow:
        return
    logger.warning(
        "a channel of %s is %d times as large as the middle one: activations of 8 bits have few levels beside it, "
        "and cost more than the file's own quantisation may (--activations int15 takes 15)",
        norm, round(times),
    )  # fmt: skip


def bias_of(parts: LinearParts, rows: Rows) -> torch.Tensor | None:
    """Those of some rows in fp32, one behind the other; None: they have none."""
    if not parts.biases:
        return None
    biases = [part.read().detach().reshape(-1)[own] for part, own in own_rows(parts.biases, rows)]
    return torch.cat([values.to(torch.float32) for values in biases])


def order_of(parts: LinearParts) -> torch.Tensor | None:
    """Of all of them: what is kept has one."""
    return parts.weights[0].order


def name_of(order: torch.Tensor | None) -> str:
    """Of an order, which equal ones have; empty where there is none."""
    return "" if order is None else f" {hashlib.sha256(order.numpy().tobytes()).hexdigest()}"


def noted_exponents(source: Source, key: str, parts: LinearParts, *, is_packed: bool) -> dict[str, Exponents]:
    """What the weight was multiplied by before it was packed: now, or when it was saved; nothing where nobody has noted it."""
    if not is_packed:
        return {key: Exponents.of(parts)}
    n, k = parts.n_outputs, parts.n_inputs
    saved = source.find_packed(key + EXPONENTS, 4 * (n + k))
    if saved is None:
        return {}
    values = torch.from_numpy(np.frombuffer(saved.checked(), dtype=np.float32).copy())
    return {key: Exponents(((n, values[:n]),), k, values[n:])}
