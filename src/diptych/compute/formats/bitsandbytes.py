"""How bitsandbytes lays out a quantised matrix: whole numbers of 8 bits with the largest of a row, or codes of 4 bits that are
entries of a table, with what its quantiser notes beside them. Sources: its `functional.py` and `nn/modules.py`.
"""

from __future__ import annotations

import json
import math

import torch

from diptych.compute.formats.matrices import CodedMatrix, CodedParts, Matrix, RawTensors, TableMatrix, TableState
from diptych.compute.formats.tensors import CONTRADICTION, FLOATS, all_bytes, nbytes_of, require
from diptych.ground.errors import LoadError

_TABLES = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_MOST_STATE_BYTES = 4096


def open_bitsandbytes(raw: RawTensors, prefix: str, shape: tuple[int, int]) -> Matrix | None:
    """Of 8 bits: weight int8 [n, k] and SCB [n], the largest of a row. Of 4: codes two to a byte with `TableState`."""
    weight = f"{prefix}.weight"
    if raw.holds(f"{prefix}.SCB"):
        require(raw, weight, shape, "I8")
        require(raw, f"{prefix}.SCB", shape[:1], "F32")
        _require_rows(raw, f"{prefix}.weight_format")

        def parts() -> CodedParts:
            return CodedParts(scales=(raw.stored(f"{prefix}.SCB") / 127).view(-1, 1), zeros=None, group=shape[1])

        def codes() -> torch.Tensor:
            return raw.stored(weight).view(torch.uint8) ^ 128

        return CodedMatrix(prefix, shape, 8, "bitsandbytes-int8", codes, parts, all_bytes(raw, prefix))
    if not raw.holds(f"{weight}.absmax"):
        return None  # one that was left in floats
    state, n_values = _table_state(raw, weight, shape), shape[0] * shape[1]
    if raw.header(weight)[1] not in ("U8", *FLOATS) or nbytes_of(raw, weight) != -(-n_values // 2):
        found, dtype = raw.header(weight)
        raise LoadError(
            f"tensor {weight} is {dtype} {list(found)}; {-(-n_values // 2)} bytes of codes are expected",
            hint=CONTRADICTION,
        )
    blocks = -(-n_values // state.block)
    require(raw, f"{weight}.quant_map", (16,), "F32")
    require(raw, f"{weight}.absmax", (blocks,), *(FLOATS if state.nested_block is None else ("U8",)))
    if state.nested_block is not None:
        require(raw, f"{weight}.nested_absmax", (-(-blocks // state.nested_block),), "F32")
        require(raw, f"{weight}.nested_quant_map", (256,), "F32")
    return TableMatrix(weight, raw, shape, state, all_bytes(raw, prefix))


def _require_rows(raw: RawTensors, name: str) -> None:
    """LoadError where a version for older GPUs saved the matrix in tiles: it says so beside it, in a number."""
    if not raw.holds(name):
        return
    require(raw, name, (1,) if raw.header(name)[0] == (1,) else (), "U8")
    found = int(raw.stored(name))
    if found != 0:
        raise LoadError(
            f"tensor {name} is {found}; of int8 only rows (0) are read, not the tiles of a GPU",
            hint="quantise the original checkpoint anew with a bitsandbytes of today",
        )


def _table_state(raw: RawTensors, weight: str, shape: tuple[int, int]) -> TableState:
    """The JSON in the tensor `quant_state`, whose name ends in the kind of its table."""
    name, kind = next(
        ((name, kind) for kind in _TABLES if raw.holds(name := f"{weight}.quant_state.bitsandbytes__{kind}")), ("", "")
    )
    if not name or raw.header(name)[1] != "U8" or nbytes_of(raw, name) > _MOST_STATE_BYTES:
        raise LoadError(
            f"tensor {weight} has no quant_state of {' or '.join(_TABLES)} beside it that can be read",
            hint=CONTRADICTION,
        )
    try:
        state = json.loads(bytes(raw.stored(name).flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or state.get("quant_type") != kind or state.get("shape") != list(shape):
        raise LoadError(
            f"tensor {name} does not describe {kind} of shape {list(shape)}, which config.json calls for",
            hint=CONTRADICTION,
        )
    is_nested = raw.holds(f"{weight}.nested_absmax")
    offset = state.get("nested_offset", 0.0) if is_nested else 0.0
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise LoadError(f"tensor {name} names an offset of {offset!r}; it must be a number")
    return TableState(
        kind=kind,
        block=_block_named(name, state.get("blocksize")),
        nested_block=_block_named(name, state.get("nested_blocksize")) if is_nested else None,
        offset=float(offset),
    )


def _block_named(name: str, found: object) -> int:
    size = next((size for size in _BLOCKS if type(found) is int and size == found), None)
    if size is None:
        raise LoadError(f"tensor {name} names blocks of {found!r}; {_BLOCKS[0]} to {_BLOCKS[-1]} are read")
    return size
