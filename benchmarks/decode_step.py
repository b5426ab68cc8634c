"""Where a decode step's time goes: bytes over the bandwidth, what each kind of kernel takes beyond its bytes, and the host.

    python benchmarks/decode_step.py --shape qwen2.5-0.5b --weights bf16 int8 int4 --batch 1 --context 512

Random weights, through scheduler, executor and sampler. Medians over the steps of one run between two measurements of the
bandwidth and of how far the threads are apart (where these differ a host moved them meanwhile: run again), the counters of the
cpu backend beside the clock; a kind's time ends when the threads have met behind it.
`--batch 5` says what a draft of four costs in the layers, though with five contexts instead of one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from diptych.compute.ceilings import read_ceiling
from diptych.compute.ops.cpu_kernels import measure_signal_s
from diptych.compute.ops.cpu_model import CpuModel
from diptych.compute.runner import random_model
from diptych.engine.cost_view import CostView
from diptych.engine.load import make_machinery
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.models.named import SHAPES

# what the counters and the components of the cost model name apart, as one kind
KINDS = {
    "gate_up": "mlp",
    "down": "mlp",
    "scores": "attention",
    "values": "attention",
    "norms": "norm",
    "embedding": "embed",
    "experts": "moe",
    "router": "moe",
}


@dataclass(slots=True)
class Steps:
    """Of every decode step, in seconds."""

    begin: list[float] = field(default_factory=list)
    tables_and_draw: list[float] = field(default_factory=list)  # the executor but for the kernels
    end: list[float] = field(default_factory=list)
    kernels: list[float] = field(default_factory=list)
    kinds: list[dict[str, float]] = field(default_factory=list)

    def kind(self, name: str) -> float:
        """Median of one kind of operation."""
        return median(one.get(name, 0.0) for one in self.kinds)


def by_kind(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums of what belongs together."""
    sums: dict[str, float] = {}
    for name, value in parts:
        kind = KINDS.get(name, name)
        sums[kind] = sums.get(kind, 0.0) + value
    return sums


def measure(model: CpuModel, *, batch: int, context: int, n_steps: int) -> Steps:
    """Decode `batch` sequences behind `context` tokens each."""
    clock, draw, room_tokens = MonotonicClock(), random.Random(0), context + n_steps + 16
    config = EngineConfig(
        max_context_tokens=room_tokens,
        kv_memory_bytes=2**29,
        scheduler=SchedulerConfig(
            max_running_sequences=batch, max_step_tokens=batch * context, enable_prefix_cache=False
        ),
    )
    machinery = make_machinery(model, config, clock=clock)
    sampling = SamplingParams(max_tokens=n_steps + 1, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        prompt = tuple(draw.choices(range(model.spec.vocab_size), k=context))
        machinery.core.submit(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    steps = Steps()
    while True:
        t0 = clock.now_s()
        plan, _ = machinery.core.begin_step(t0)
        if plan is None:
            return steps
        t1 = clock.now_s()
        result = machinery.executor.execute(plan)
        t2 = clock.now_s()
        machinery.core.end_step(plan, result, t2)
        t3 = clock.now_s()
        if plan.shape.prefill_tokens == 0 and len(plan.chunks) == batch:
            steps.begin.append(t1 - t0)
            steps.tables_and_draw.append(t2 - t1 - result.device_s)
            steps.end.append(t3 - t2)
            steps.kernels.append(result.device_s)
            steps.kinds.append(by_kind((name, 1e-9 * ns) for name, ns in model.nanoseconds().items()))


def print_table(model: CpuModel, steps: Steps, *, batch: int, context: int, read_bytes_per_s: float) -> None:
    """One row a part, in microseconds."""
    cost = CostView(model).cost(StepShape.decode(batch=batch, context_tokens=context + len(steps.kernels) // 2))
    bytes_of = by_kind((component.name, component.bytes) for component in cost.components)
    kernels_s, bound_s = median(steps.kernels), cost.bytes / read_bytes_per_s
    host = {
        "begin_step": median(steps.begin),
        "tables and draw": median(steps.tables_and_draw),
        "end_step": median(steps.end),
    }
    total_s = kernels_s + sum(host.values())
    print(f"{'part':16} {'us':>9} {'bytes/bandwidth':>16} {'beyond':>9} {'of step':>8}")

    def row(name: str, took_s: float, least_s: float) -> None:
        print(
            f"{name:16} {took_s * 1e6:9.0f} {least_s * 1e6:16.0f} {(took_s - least_s) * 1e6:9.0f} {took_s / total_s:8.1%}"
        )

    counted_s = 0.0
    for name in steps.kinds[0]:
        counted_s += steps.kind(name)
        if steps.kind(name) > 0.0:
            row(name, steps.kind(name), bytes_of.get(name, 0.0) / read_bytes_per_s)
    row("around kernels", kernels_s - counted_s, 0.0)
    for name, took_s in host.items():
        row(name, took_s, 0.0)
    row("step", total_s, bound_s)
    print(f"{batch / total_s:.1f} tok/s, {bound_s / total_s:.1%} of {read_bytes_per_s * 1e-9:.1f} GB/s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each format at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args(arguments)
    for weights in args.weights:
        model = random_model(
            SHAPES[args.shape], ComputeConfig(backend="cpu", weights=weights, threads=args.threads), seed=0
        )
        assert isinstance(model, CpuModel)
        for batch in args.batch:
            measure(model, batch=batch, context=64, n_steps=2)  # caches, buffers, memory of the pool
            before, apart_s = read_ceiling(model), measure_signal_s(model.placement)
            steps = measure(model, batch=batch, context=args.context, n_steps=args.steps)
            read = 0.5 * (before + read_ceiling(model))
            apart = " and ".join(f"{1e9 * one_s:.0f}" for one_s in (apart_s, measure_signal_s(model.placement)))
            print(f"\n{args.shape} {weights}, batch {batch}, {args.context} tokens before, threads {apart} ns apart")
            print_table(model, steps, batch=batch, context=args.context, read_bytes_per_s=read)


if __name__ == "__main__":
    main()
