"""Whose kernels the torch backend's ops are tested on: torch's on a CPU, and ours.

Ours run on a GPU where there is one, in bf16. Elsewhere Triton interprets them (conftest.py), which it does in fp32 and fp16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from diptych.compute.ops.torch_loader import TorchLoader
from diptych.compute.ops.torch_ops import TorchOps

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
    debugs alone, and makes a table of numpy's types each time that it looks for one: a sixth.
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
