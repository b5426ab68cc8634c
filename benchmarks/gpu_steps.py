"""Steps of both phases on a GPU, by our kernels and by torch's, in milliseconds.

    python benchmarks/gpu_steps.py llama-3.1-8b
    python benchmarks/gpu_steps.py qwen3-30b-a3b --layers 8 --kernels torch
    python benchmarks/gpu_steps.py llama-3.1-8b --weights group4-g128-f16-zeros

Random weights, in bf16 or as codes that a file might have (`KeptFormat`). Each step runs until it is recorded where steps are,
then seven times; medians. "host": how long the host takes to launch it, behind which it waits for the device. Where the GPU was
calibrated its prediction stands beside each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from diptych.compute.ops.torch import model as torch_model
from diptych.compute.runner import random_model
from diptych.engine.model_profile import local_predictor
from diptych.ground.config import ComputeConfig
from diptych.ground.formats import KeptFormat
from diptych.ground.shape import StepShape
from diptych.lab.ladder import kernels_price_s
from diptych.lab.probe import StepProbe
from diptych.models.named import SHAPES

DECODE = [(1, 512), (1, 8192), (16, 512), (64, 512)]  # sequences, and tokens that each is behind
PREFILL = [(512, 0), (2048, 0), (2048, 8192)]  # tokens, and those before them
WARM_UPS, REPEATS = 3, 7


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="so many of the shape's")
    parser.add_argument("--kernels", choices=("ours", "torch"), default="ours")
    parser.add_argument("--weights", default="bf16", help="bf16, or a format of codes such as group4-g128-f16-zeros")
    asked = parser.parse_args()
    if asked.kernels == "torch":
        torch_model._class_for = lambda device: torch_model.TorchModel
    config: dict[str, Any] = dict(SHAPES[asked.shape])
    if asked.layers is not None:
        config["num_hidden_layers"] = asked.layers
    kept = None if asked.weights == "bf16" else KeptFormat.named(asked.weights)
    how = ComputeConfig(backend="torch", device="cuda", weights="bf16" if kept is None else "file")
    model = random_model(config, how, seed=0, kept=kept)
    held = f"{model.weights_format} weights, {model.weight_bytes / 1e9:.2f} GB"
    print(f"{asked.shape}, {config['num_hidden_layers']} layers, {held}, {model.instruction_set}")
    probe, predictor = StepProbe(model, max_tokens=40_000), local_predictor(model)

    def predicted(work: StepShape) -> str:
        return "" if predictor is None else f", predicted {kernels_price_s(predictor, work) * 1e3:.2f} ms"

    for batch, context in DECODE:
        work = StepShape.decode(batch=batch, context_tokens=context)
        step_s, host_s = measured(probe.step(work))
        nbytes = model.weight_bytes + batch * context * 2 * sum(cache.elements for cache in model.spec.caches)
        rate = f"{batch / step_s:7.0f} tok/s, all weights and its KV at {nbytes / step_s / 1e9:.0f} GB/s"
        times = f"{step_s * 1e3:7.2f} ms{predicted(work)}"
        print(f"decode {batch:3} behind {context:5}: {times}, {rate}, host {host_s * 1e3:.2f} ms")
    for new, cached in PREFILL:
        work = StepShape.prefill(batch=1, new_tokens=new, cached_tokens=cached)
        step_s, host_s = measured(probe.step(work))
        times = f"{step_s * 1e3:.2f} ms{predicted(work)}"
        print(f"prefill {new} behind {cached}: {times}, {new / step_s:.0f} tok/s, host {host_s * 1e3:.2f} ms")


def measured(step: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Median seconds of the step, and of its launch."""
    steps_s, hosts_s = [], []
    for number in range(WARM_UPS + REPEATS):
        begin_s = perf_counter()
        step()
        hosts_s.append(perf_counter() - begin_s)
        torch.cuda.synchronize()
        steps_s.append(perf_counter() - begin_s)
        if number < WARM_UPS:
            steps_s, hosts_s = [], []
    return median(steps_s), median(hosts_s)


if __name__ == "__main__":
    main()
