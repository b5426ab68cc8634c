"""What dividing a model among processes costs: ranks against threads, and a meeting against an all-reduce.

    python benchmarks/tensor_parallel.py ranks [--shape qwen2.5-0.5b] [--weights bf16 int8] [--ranks 2] [--rounds 9]
                                            [--steps "prefill 512" "decode 1" "decode 16"]
    python benchmarks/tensor_parallel.py gather [--ranks 2] [--meetings 20000]

`ranks`: N ranks of one thread and one rank of N threads compute the same steps in turns: a prefill of 512 tokens, a decode
of 1 and of 16 sequences behind 512 tokens. Told is the median over rounds of the rate of ranks over that of threads, with its
95 % interval, and the time of a step on ranks.
`gather`: one meeting of N processes behind each has written its columns (rows of 896 fp32), against the all-reduce that a
projection split by its inputs needs (torch.distributed, gloo, over loopback) for the same rows. Least and median time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from diptych.compute.batch import ForwardBatch
from diptych.compute.model import Model, Want
from diptych.compute.ops.cpu.kernels import _cpu
from diptych.compute.runner import random_model
from diptych.ground.config import ComputeConfig
from diptych.lab.rounds import Effort, Sampler, burst, measure
from diptych.models.named import SHAPES

BLOCK_TOKENS = 32
PROMPT = 512
WIDTH = 896  # of the residual stream of the 0.5B shape
ROWS = (1, 16, 512)
STEPS = ("prefill 512", "decode 1", "decode 16")


def batch_of(sequences: int, begin: int, end: int) -> ForwardBatch:
    """Tokens [begin, end) of each of some sequences."""
    blocks = -(-(PROMPT + 1) // BLOCK_TOKENS)
    n = end - begin
    return ForwardBatch(
        token_ids_T=np.arange(sequences * n, dtype=np.int32) % 1000,
        query_start_S1=np.arange(0, sequences * n + 1, n, dtype=np.int32),
        context_tokens_S=np.full(sequences, end, dtype=np.int32),
        block_table_SM=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        logits_rows_R=np.arange(n - 1, sequences * n, n, dtype=np.int32),
    )


def samplers(model: Model, names: Sequence[str]) -> dict[str, Sampler]:
    """These steps on one model, which has then read 512 tokens of 16 sequences."""
    kv = model.make_kv(16 * -(-(PROMPT + 1) // BLOCK_TOKENS), BLOCK_TOKENS)
    whole = batch_of(16, 0, PROMPT)
    for sequence in range(16):
        row = slice(sequence, sequence + 1)
        one = replace(batch_of(1, 0, PROMPT), block_table_SM=np.ascontiguousarray(whole.block_table_SM[row]))
        model.forward(one, kv, Want.BEST)
    every = {
        "prefill 512": batch_of(1, 0, PROMPT),
        "decode 1": batch_of(1, PROMPT, PROMPT + 1),
        "decode 16": batch_of(16, PROMPT, PROMPT + 1),
    }
    steps = {name: every[name] for name in names}
    return {name: burst(lambda batch=batch: model.forward(batch, kv, Want.BEST)) for name, batch in steps.items()}  # type: ignore[misc]


def compare_ranks(shape: str, weights: str, ranks: int, names: Sequence[str], effort: Effort) -> None:
    """Ranks and threads in turns."""
    config = ComputeConfig(backend="cpu", weights=weights, threads=ranks)
    models = [random_model(SHAPES[shape], one, seed=0) for one in (config, replace(config, tp=ranks))]
    threads, divided = (samplers(model, names) for model in models)
    rounds = measure([one[name] for name in names for one in (threads, divided)], effort)
    for i, name in enumerate(names):
        ratio = rounds.of(lambda times_N, i=i: times_N[2 * i] / times_N[2 * i + 1])  # type: ignore[misc]
        step_s = rounds.point(2 * i + 1)
        print(
            f"{shape} {weights} {name:12s} {ranks} ranks / {ranks} threads {ratio.text()}  step {step_s.times(1e3).text()} ms"
        )
    print(
        f"  others took {rounds.others:.1%} of the cores; set aside {rounds.set_aside}, disturbed {rounds.is_disturbed}"
    )
    for model in models:
        model.close()
    gc.collect()


def gather(rank: int, ranks: int, fd: int, store: str, rounds: int) -> None:
    """One process of the comparison; rank 0 prints. Each does as many rounds of each kind."""
    team = _cpu.Team(fd, rank, ranks, ranks > (os.cpu_count() or 1))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    for rows in ROWS:
        nbytes = rows * WIDTH * 4
        shared = team.outputs(nbytes)[:nbytes].view(np.float32).reshape(rows, WIDTH)
        columns = slice(WIDTH * rank // ranks, WIDTH * (rank + 1) // ranks)
        own, partial = np.ones((rows, WIDTH // ranks), dtype=np.float32), torch.ones(rows, WIDTH)

        def write_and_meet(view: np.ndarray = shared, place: slice = columns, values: np.ndarray = own) -> None:
            view[:, place] = values
            team.meet()

        tell(rank, "meeting", rows, times_s(team.meet, rounds))
        tell(rank, "write and meet", rows, times_s(write_and_meet, rounds))
        tell(rank, "all-reduce (gloo)", rows, times_s(partial_sum(partial), rounds // 10))
        tell(rank, "all-gather (gloo)", rows, times_s(gathering(torch.from_numpy(own), ranks), rounds // 10))
    dist.destroy_process_group()


def partial_sum(partial: torch.Tensor) -> Callable[[], object]:
    """The all-reduce of these rows, in place."""
    return lambda: dist.all_reduce(partial)


def gathering(own: torch.Tensor, ranks: int) -> Callable[[], object]:
    """What ranks on several machines do instead of a meeting: everybody gets everybody's columns."""
    every = [torch.empty_like(own) for _ in range(ranks)]
    return lambda: dist.all_gather(every, own)


def times_s(run: Callable[[], object], rounds: int) -> list[float]:
    """How long each call took."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def tell(rank: int, name: str, rows: int, found: list[float]) -> None:
    """Least and median, by rank 0."""
    if rank == 0:
        print(
            f"{name:18s} {rows:4d} rows  least {min(found) * 1e6:8.1f} us  median {statistics.median(found) * 1e6:8.1f} us"
        )


def compare_gather(ranks: int, rounds: int) -> None:
    """Start the other processes and be rank 0."""
    fd = os.memfd_create("diptych-bench")
    _cpu.Team(fd, 0, ranks, False)  # makes the file large before the others come
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        others = [
            subprocess.Popen(
                [sys.executable, __file__, "one", str(rank), str(ranks), str(fd), store, str(rounds)], pass_fds=(fd,)
            )
            for rank in range(1, ranks)
        ]
        gather(0, ranks, fd, store, rounds)
        for other in others:
            other.wait()


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["one"]:
        rank, ranks, fd, store, rounds = sys.argv[2:]
        gather(int(rank), int(ranks), int(fd), store, int(rounds))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ranks", "gather"))
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--meetings", type=int, default=20000)
    options = parser.parse_args()
    if options.what == "gather":
        compare_gather(options.ranks, options.meetings)
        return
    for weights in options.weights:
        effort = Effort(rounds=options.rounds, budget_s=options.budget_s)
        compare_ranks(options.shape, weights, options.ranks, options.steps, effort)


if __name__ == "__main__":
    main()
