"""What adapters cost a step, with and without in turns. Close everything else first.

    .venv/bin/python benchmarks/lora.py --shape qwen2.5-1.5b --weights bf16        # decode of 16, four adapters of rank 16
    .venv/bin/python benchmarks/lora.py --shape llama-3.2-1b --weights int8 int4 --batches 1 16 --prompt 512

One random model of the shape, its adapters on every projection of attention and MLP. Points: the model before any adapter was
loaded (which must cost nothing more than ever), with all loaded and no row of the step that has one, with one adapter for all
rows, and with all of them spread over the rows. Medians of rounds in turns with their 95 % interval; a disturbed run says so.
"""

from __future__ import annotations

import argparse

from diptych.compute.model import Model
from diptych.compute.runner import random_model
from diptych.ground.config import ComputeConfig
from diptych.ground.shape import StepShape
from diptych.lab.adapters import random_adapter
from diptych.lab.probe import StepProbe
from diptych.lab.rounds import Effort, measure
from diptych.models.named import SHAPES


def report(model: Model, works: dict[str, StepShape], options: argparse.Namespace) -> None:
    """One table row per kind of step."""
    tokens = max(options.batches) * (options.context + 32) + options.prompt
    probe = StepProbe(model, max_tokens=tokens)
    before = {
        name: measure([probe.sampler(work)], Effort(rounds=5, budget_s=5)).point(0) for name, work in works.items()
    }
    numbers = [model.add_adapter(random_adapter(model.spec, options.rank, seed)) for seed in range(options.adapters)]
    held = sum(model.adapter_bytes(number) for number in numbers)
    print(
        f"{len(numbers)} adapters of rank {options.rank}: {held / 1e6:.1f} MB beside {model.weight_bytes / 1e6:.0f} MB"
    )
    for name, work in works.items():
        rounds = measure(
            [probe.sampler(work), probe.sampler(work, adapters=numbers[:1]), probe.sampler(work, adapters=numbers)],
            Effort(rounds=options.rounds, budget_s=30),
        )
        one, several = (rounds.of(lambda times, n=n: 100 * (times[n] / times[0] - 1)) for n in (1, 2))
        print(
            f"{name:22} before {before[name].times(1e3).text()} ms, loaded {rounds.point(0).times(1e3).text()} ms, "
            f"one adapter +{one.text('{:.1f}')} %, {len(numbers)} adapters +{several.text('{:.1f}')} %"
            + (f" DISTURBED by {rounds.others:.0%}" if rounds.is_disturbed else "")
        )


def main() -> None:
    """Print a table per weight format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["bf16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    for weights in options.weights:
        compute = ComputeConfig(backend="cpu", weights=weights, threads=options.threads)
        model = random_model(SHAPES[options.shape], compute, seed=0)
        print(f"{options.shape} {weights} {model.instruction_set} threads={model.threads}")
        works = {
            f"decode of {n} at {options.context}": StepShape.decode(batch=n, context_tokens=options.context)
            for n in options.batches
        }
        works[f"prefill of {options.prompt}"] = StepShape.prefill(batch=1, new_tokens=options.prompt)
        report(model, works, options)
        model.close()


if __name__ == "__main__":
    main()
