"""What control costs per step, in microseconds: begin_step, end_step and the learning of step times, without any model.

    python benchmarks/step_cost.py --sequences 1 8 64 --context 1000

Sequences decode at the given context with the stall budget's predictor on; medians over the steps.
"""

from __future__ import annotations

import argparse
from statistics import median

from diptych.control.loop import EngineCore
from diptych.cost.step_time import StepTimeModel
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import BlockConfig, SchedulerConfig
from diptych.ground.request import Request, SamplingParams
from diptych.ground.step import ChunkResult, StepPlan, StepResult


def answer(plan: StepPlan) -> StepResult:
    """Token 0 for every chunk that samples."""
    results = tuple(ChunkResult(seq_id=one.seq_id, token_ids=(0,) if one.samples else ()) for one in plan.chunks)
    return StepResult(step_id=plan.step_id, results=results, device_s=0.001, host_s=0.0)


def measure(n_sequences: int, context_tokens: int, n_steps: int) -> tuple[float, float, float]:
    """Median seconds of begin_step, end_step and observe."""
    clock, step_time = MonotonicClock(), StepTimeModel()
    room_tokens = context_tokens + n_steps + 64
    core = EngineCore(
        SchedulerConfig(
            max_running_sequences=n_sequences,
            max_context_tokens=room_tokens,
            max_step_tokens=n_sequences * context_tokens,
            max_waiting_tokens=2 * n_sequences * room_tokens,
        ),
        BlockConfig(n_blocks=n_sequences * (room_tokens // 16 + 2), block_tokens=16),
        model_revision="none",
        predict_s=step_time.predict_s,
    )
    sampling = SamplingParams(max_tokens=n_steps + 32, temperature=0.0, ignore_eos=True)
    for i in range(n_sequences):
        prompt = tuple(range(i, i + context_tokens))
        core.submit(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling, arrival_s=0.0))
    seconds: tuple[list[float], list[float], list[float]] = [], [], []
    while len(seconds[0]) < n_steps:
        t0 = clock.now_s()
        plan, _ = core.begin_step(t0)
        t1 = clock.now_s()
        assert plan is not None
        result = answer(plan)
        t2 = clock.now_s()
        core.end_step(plan, result, t2)
        t3 = clock.now_s()
        step_time.observe(plan.shape, 0.001)
        t4 = clock.now_s()
        if plan.shape.prefill_tokens == 0 and len(plan.chunks) == n_sequences:
            for times, value in zip(seconds, (t1 - t0, t3 - t2, t4 - t3), strict=True):
                times.append(value)
    return median(seconds[0]), median(seconds[1]), median(seconds[2])


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    print(f"{'sequences':>9} {'begin_step':>12} {'end_step':>12} {'observe':>12}  us, median of {given.steps} steps")
    for n_sequences in given.sequences:
        begin_s, end_s, observe_s = measure(n_sequences, given.context, given.steps)
        print(f"{n_sequences:>9} {begin_s * 1e6:>12.1f} {end_s * 1e6:>12.1f} {observe_s * 1e6:>12.1f}")


if __name__ == "__main__":
    main()
