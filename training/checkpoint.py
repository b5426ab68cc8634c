"""Owns the training checkpoint: weights, optimiser state and cursors in one safetensors file, written atomically.

Example:
    save_checkpoint(path, model, optimizers, progress)
    progress = load_checkpoint(path, model, optimizers)
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands. Owned by the training loop."""

    seed: int
    step: int = 0
    tokens_seen: int = 0
    book_tokens_seen: int = 0
    next_document: int = 0


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer], progress: Progress
) -> None:
    """Write model, state of every optimiser by parameter name, and progress (as metadata); replaces `path` at once."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for label, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer/{label}/{names[parameter]}/{key}"] = torch.as_tensor(value).contiguous()
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(temporary, path)


def load_checkpoint(path: Path, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> Progress:
    """Fill model and the given optimisers from `path`; a missing weight raises."""
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file:
        for name, parameter in parameters.items():
            with torch.no_grad():
                parameter.copy_(file.get_tensor(f"model/{name}"))
        for key in file.keys():  # noqa: SIM118, safe_open is not a mapping
            _, label, name, field = key.split("/") if key.startswith("optimizer/") else ("", "", "", "")
            if label in optimizers:
                optimizers[label].state[parameters[name]][field] = file.get_tensor(key)
        return Progress(**json.loads(file.metadata()["progress"]))
