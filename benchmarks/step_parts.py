"""Where a step's time goes: what each kind of kernel takes beyond its bytes or its operations, and the host.

    python benchmarks/step_parts.py decode --shape qwen2.5-0.5b --weights bf16 int8 int4 --batch 1 --context 512
    python benchmarks/step_parts.py prefill --shape qwen2.5-0.5b --weights int8 --context 512

Random weights, through scheduler, executor and sampler. Medians over the steps of one run (of prefill, whole prompts one after
the other) between two measurements of the machine and of how far the threads are apart (where these differ a host moved them
meanwhile: run again), the counters of the cpu backend beside the clock; a kind's time ends when the threads have met behind it.
The least that a kind could take is its bytes over the bandwidth or its operations over the peak of the weights' arithmetic, of
attention's its own, whichever is longer: states, which compute in another format, have a peak that is lower.
`decode --batch 5` says what a draft of four costs in the layers, though with five contexts instead of one.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.ops.cpu.kernels import measure_signal_s
from diptych.compute.ops.cpu.model import CpuModel
from diptych.compute.runner import random_model
from diptych.cost.phase_cost import ATTENTION
from diptych.engine.cost_view import CostView
from diptych.engine.load import make_machinery
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.phase import Phase
from diptych.ground.request import Request, SamplingParams
from diptych.ground.shape import StepShape
from diptych.models.named import SHAPES

# what the counters and the components of the cost model name apart, as one kind
KINDS = {
    "gate_up": "mlp",
    "down": "mlp",
    "states": "attention",
    "scores": "attention",
    "values": "attention",
    "norms": "norm",
    "embedding": "embed",
    "experts": "moe",
    "router": "moe",
}


@dataclass(slots=True)
class Steps:
    """Of every step of a phase, in seconds."""

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


def measure(model: CpuModel, phase: Phase, *, batch: int, context: int, n_steps: int) -> Steps:
    """Decode `batch` sequences behind `context` tokens each, or read `n_steps` times a prompt of `context` tokens."""
    is_decode = phase is Phase.DECODE
    clock, draw, room_tokens = MonotonicClock(), random.Random(0), context + n_steps + 16
    config = EngineConfig(
        max_context_tokens=room_tokens,
        kv_memory_bytes=2**29,
        scheduler=SchedulerConfig(
            max_running_sequences=batch, max_step_tokens=max(batch, 2) * context, enable_prefix_cache=False
        ),
    )
    machinery = make_machinery(model, config, clock=clock)
    sampling = SamplingParams(max_tokens=n_steps + 1 if is_decode else 1, temperature=0.0, ignore_eos=True)
    for i in range(batch if is_decode else n_steps):
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
        if plan.shape.phase is phase and len(plan.chunks) == batch:
            steps.begin.append(t1 - t0)
            steps.tables_and_draw.append(t2 - t1 - result.device_s)
            steps.end.append(t3 - t2)
            steps.kernels.append(result.device_s)
            steps.kinds.append(by_kind((name, 1e-9 * ns) for name, ns in model.nanoseconds().items()))


def print_table(model: CpuModel, steps: Steps, shape: StepShape, machine: Ceilings) -> None:
    """One row a part, in microseconds."""
    view = CostView(model)
    components = view.cost(shape).components
    peaks = dict.fromkeys(ATTENTION, machine.attention_flops_per_s or machine.flops_per_s)
    bytes_s = by_kind((one.name, one.bytes / machine.roof_bytes_per_s) for one in components)
    flops_s = by_kind((one.name, one.flops / peaks.get(one.name, machine.flops_per_s)) for one in components)
    least = {name: max(bytes_s[name], flops_s[name]) for name in bytes_s}
    kernels_s, bound_s = median(steps.kernels), view.bound_s(shape, machine)
    host = {
        "begin_step": median(steps.begin),
        "tables and draw": median(steps.tables_and_draw),
        "end_step": median(steps.end),
    }
    total_s = kernels_s + sum(host.values())
    print(f"{'part':16} {'us':>9} {'least':>9} {'beyond':>9} {'of step':>8}")

    def row(name: str, took_s: float, least_s: float) -> None:
        print(
            f"{name:16} {took_s * 1e6:9.0f} {least_s * 1e6:9.0f} {(took_s - least_s) * 1e6:9.0f} {took_s / total_s:8.1%}"
        )

    counted_s = 0.0
    for name in steps.kinds[0]:
        counted_s += steps.kind(name)
        if steps.kind(name) > 0.0:
            row(name, steps.kind(name), least.get(name, 0.0))
    row("around kernels", kernels_s - counted_s, 0.0)
    for name, took_s in host.items():
        row(name, took_s, 0.0)
    row("step", total_s, bound_s)
    print(f"{shape.n_tokens / total_s:.1f} tok/s, {bound_s / total_s:.1%} of {machine.words()}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each format at each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=[one.value for one in Phase])
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--instruction-set", default="auto", help="of the kernels; peaks are the machine's all the same"
    )
    args = parser.parse_args(arguments)
    phase = Phase(args.phase)
    if phase is Phase.PREFILL and args.batch != [1]:
        parser.error("prompts are read one at a time: --batch is of decode")
    for weights in args.weights:
        model = random_model(
            SHAPES[args.shape],
            ComputeConfig(backend="cpu", weights=weights, threads=args.threads, instruction_set=args.instruction_set),
            seed=0,
        )
        assert isinstance(model, CpuModel)
        for batch in args.batch:
            measure(model, phase, batch=batch, context=64, n_steps=2)  # caches, buffers, memory of the pool
            before, apart_s = machine_ceilings(model), measure_signal_s(model.placement)
            steps = measure(model, phase, batch=batch, context=args.context, n_steps=args.steps)
            after = machine_ceilings(model)
            machine = replace(
                before.reading(0.5 * (before.roof_bytes_per_s + after.roof_bytes_per_s)),
                flops_per_s=0.5 * (before.flops_per_s + after.flops_per_s),
            )
            apart = " and ".join(f"{1e9 * one_s:.0f}" for one_s in (apart_s, measure_signal_s(model.placement)))
            if phase is Phase.DECODE:
                what = f"batch {batch}, {args.context} tokens before"
                shape = StepShape.decode(batch=batch, context_tokens=args.context + len(steps.kernels) // 2)
            else:
                what, shape = f"prompts of {args.context} tokens", StepShape.prefill(batch=1, new_tokens=args.context)
            print(f"\n{args.shape} {weights}, {what}, threads {apart} ns apart")
            print_table(model, steps, shape, machine)


if __name__ == "__main__":
    main()
