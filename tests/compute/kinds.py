"""Whose kernels the torch backend's ops are tested on: torch's on a CPU, and ours.

Ours run on a GPU where there is one, in bf16. Elsewhere Triton interprets them (conftest.py), which it does in fp32 and fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def patch_once() -> None:
    """Triton's interpreter puts its own functions into the language anew for each call of each function of a kernel.

    That is a quarter of what the tests with it take; nothing else here compiles for a GPU that is not there.
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


def kinds() -> dict[str, Kind]:
    found = {name: Kind(TorchOps, CPU, dtype) for name, dtype in DTYPES.items()}
    if not find_spec("triton"):
        return found
    ops = import_module("diptych.compute.ops.gpu.ops").TritonOps
    if torch.cuda.is_available():
        return found | {"triton bf16": Kind(ops, torch.device("cuda"), torch.bfloat16)}
    patch_once()
    return found | {f"triton {name}": Kind(ops, CPU, dtype) for name, dtype in INTERPRETED.items()}


KINDS = kinds()
of_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
# Interpreted, types take turns over a test's other parameters (conftest.py): each of these meets one of them.
in_turns = pytest.mark.in_turns
