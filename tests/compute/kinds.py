"""Whose kernels the torch backend's ops are tested on: torch's on a CPU, and ours.

Ours run on a GPU where there is one, in bf16. Elsewhere Triton interprets them (conftest.py), which it does in fp32 and fp16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

import pytest
import torch

from diptych.compute.ops.torch.loader import TorchLoader
from diptych.compute.ops.torch.ops import TorchOps

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INTERPRETED = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Kind:
    """Whose kernels, where, in which type."""

    ops: type[TorchOps]
    device: torch.device
    dtype: torch.dtype

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def loader(self) -> TorchLoader:
        return TorchLoader(self.device, self.dtype, stacks_experts=self.ops is not TorchOps)


def make_faster() -> None:
    """Spare Triton's interpreter, which takes much of what the tests do, what changes nothing that it computes.

    It puts its own functions into the language anew for each call of each function of a kernel, a quarter of its time; nothing
    else here compiles for a GPU that is not there. It finds for each whole number whether it overflows, and says so where it
    debugs alone, and makes a table of numpy's types each time that it looks for one: a sixth. Half of what is left are shapes,
    of which it makes objects and a text for every value.
    """
    interpreter = import_module("triton.runtime.interpreter")
    patch, scopes = getattr(interpreter, "_patch_lang", None), {}
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return  # another version than 3.9, and slower

    def patch_module(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in scopes:
            scopes[module] = patch(function)
        return interpreter._LangPatchScope()  # with nothing to take back

    interpreter._patch_lang = patch_module
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    find, numpys = interpreter._get_np_dtype, {}

    def type_of(one: Any) -> Any:
        name = one.scalar.name
        if name not in numpys:
            numpys[name] = find(one)
        return numpys[name]

    interpreter._get_np_dtype = type_of
    share_shapes()


def share_shapes() -> None:
    """What Triton's language makes of a shape anew for each type of a block and each value, once for each shape."""
    core, semantic = import_module("triton.language.core"), import_module("triton.language.semantic").TritonSemantic
    of_block, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_values: dict[int, tuple[Any, Any, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in of_types:
            of_block(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if id(shape) not in of_values:  # with the shape, so that its number stays its own
            sizes = core.tuple([core.constexpr(size) for size in shape])
            of_values[id(shape)] = shape, core.constexpr(prod(shape)), sizes
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.numel, self.shape = of_values[id(shape)]

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        are_blocks = left.type.is_block(), right.type.is_block()
        if not any(are_blocks) or (all(are_blocks) and left.type.shape is right.type.shape):
            return left, right
        return broadcast(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    semantic.broadcast_impl_value = broadcast_values


def kinds() -> dict[str, Kind]:
    found = {name: Kind(TorchOps, CPU, dtype) for name, dtype in DTYPES.items()}
    if not find_spec("triton"):
        return found
    ops = import_module("diptych.compute.ops.gpu.ops").TritonOps
    if torch.cuda.is_available():
        return found | {"triton bf16": Kind(ops, torch.device("cuda"), torch.bfloat16)}
    make_faster()
    return found | {f"triton {name}": Kind(ops, CPU, dtype) for name, dtype in INTERPRETED.items()}


KINDS = kinds()
of_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# Interpreted, types take turns over a test's other parameters (conftest.py): each of these meets one of them.
in_turns = pytest.mark.in_turns
