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
    of which it makes objects and a text for every value, and a quarter of the rest are types that it looks for.
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

    def patch_member(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        own = getattr(member, "__wrapped__", member)  # behind what asks whether it is called as below

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return own(*args, **options)

        scope.set_attr(place, name, called)

    def hold(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}  # and asks not whether numpy's type is wider

    interpreter._patch_attr, interpreter.TensorHandle.__init__ = patch_member, hold
    share_shapes()


def share_shapes() -> None:
    """What Triton's language makes of a shape anew for each type of a block and each value, once for each shape."""
    core, semantic = import_module("triton.language.core"), import_module("triton.language.semantic").TritonSemantic
    of_block, broadcast = core.block_type.__init__, semantic.broadcast_impl_value
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_values: dict[int, tuple[Any, Any, Any]] = {}
    of_elements: dict[tuple[str, Any], Any] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if sizes not in of_types:
            of_block(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def of_element(self: Any, element_ty: Any) -> Any:
        if element_ty.is_ptr():  # of a name that is not its own
            return core.block_type(element_ty, self.shape)
        key = element_ty.name, self.shape
        if key not in of_elements:
            of_elements[key] = core.block_type(element_ty, self.shape)
        return of_elements[key]

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

    core.block_type.__init__, core.block_type.with_element_ty = make_block, of_element
    core.tensor.__init__ = make_tensor
    semantic.broadcast_impl_value = broadcast_values
    share_numbers(core, semantic)


def share_numbers(core: Any, semantic: Any) -> None:
    """Operators of one type take their sides as they are, where the language looks for a type of both. Numbers that a kernel
    has written in it are made once for each type and shape, and nobody may write to them.
    """
    check, constant = semantic.binary_op_type_checking_impl, semantic.scalar_constant
    of_numbers: dict[tuple[Any, ...], Any] = {}

    def number(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), repr(value), dtype.name  # text, as 0.0 and -0.0 are equal
        if key not in of_numbers:
            of_numbers[key] = constant(self, value, dtype).handle
            of_numbers[key].data.flags.writeable = False
        return self.make_tensor(of_numbers[key], dtype)

    def beside(self: Any, left: Any, value: Any) -> Any:
        """A number of the type and shape of what stands left of it; None where it has another type, or makes it another."""
        key = type(value), repr(value), left.dtype.name, left.type.shape if left.type.is_block() else None
        if key not in of_numbers:
            both = self.computation_type_impl(left.dtype, False, self.to_tensor_type(value), True, False)
            _, made = check(self, left, value)
            of_numbers[key] = made.handle if both is left.dtype else None
            made.handle.data.flags.writeable = False
        return None if of_numbers[key] is None else self.make_tensor(of_numbers[key], left.type)

    def check_types(self: Any, left: Any, right: Any, *allowed: bool, **options: bool) -> Any:
        if type(left) is core.tensor and not options and len(allowed) < 3:  # no quotient, which may have another type
            is_pointer = left.dtype.is_ptr()
            if type(right) is core.tensor:
                if right.dtype.is_int() if is_pointer and allowed else right.dtype is left.dtype and not is_pointer:
                    return self.broadcast_impl_value(left, right)
            elif not is_pointer and type(right) in (int, float):
                made = beside(self, left, right)
                if made is not None:
                    return left, made
        return check(self, left, right, *allowed, **options)

    semantic.binary_op_type_checking_impl, semantic.scalar_constant = check_types, number


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
