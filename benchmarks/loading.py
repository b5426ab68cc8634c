"""From a checkpoint on disk to the first token: seconds, bytes per second and memory, each run in a process of its own.

    .venv/bin/python benchmarks/loading.py --shape qwen2.5-0.5b --cases bf16 int4 stored-int4

A case is a weight format, or `stored-` and a format: a folder that `diptych quantize` wrote, whose weights are only copied.
Before the clock starts a process reads the files once and touches as much memory as it will need, because a virtual
machine gets memory that it has not used for a while from its host at a fraction of the speed (`--cold` leaves that out).
"""

from __future__ import annotations

import argparse
import json
import mmap
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from random_checkpoint import write_checkpoint, write_tokenizer
from rich.console import Console
from rich.table import Table

from diptych.compute.loading.quant import save_quantised
from diptych.compute.runner import load_model
from diptych.engine.llm import LLM
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.request import SamplingParams
from diptych.models.named import SHAPES

ROOT = Path(__file__).resolve().parent.parent
CASES = ("bf16", "int8", "int4", "stored-int8", "stored-int4")
CONTEXT_TOKENS = 2048
PROMPT_TOKENS = 16

console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)


def memory_bytes() -> dict[str, int]:
    """What this process holds and the most it has held since `forget_peak`, from /proc/self/status."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"peak": "VmHWM", "all": "VmRSS", "anonymous": "RssAnon", "mapped": "RssFile"}
    return {name: int(fields[field].split()[0]) * 1024 for name, field in names.items()}


def forget_peak() -> None:
    """Start the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def touch(n_bytes: int) -> float:
    """Write to each page of n_bytes of fresh memory and give it back; bytes per second."""
    begin_s = time.perf_counter()
    with mmap.mmap(-1, n_bytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, n_bytes, mmap.PAGESIZE):
            memory[at] = 1
    return n_bytes / (time.perf_counter() - begin_s)


def measure(directory: Path, weights: str, *, is_cold: bool) -> dict[str, float]:
    """One load in this process. weights_s: mapped and packed alone; first_token_s: from nothing loaded to one token."""
    ready_s = time.monotonic()
    config = EngineConfig(compute=ComputeConfig(backend="cpu", weights=weights), max_context_tokens=CONTEXT_TOKENS)
    file_bytes = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            while part := file.read(2**24):
                file_bytes += len(part)
    if not is_cold:
        touch(3 * file_bytes)
    begin_s = time.perf_counter()
    model = load_model(directory, config.compute, max_context_tokens=CONTEXT_TOKENS)
    weights_s = time.perf_counter() - begin_s
    model.close()
    del model

    forget_peak()
    before = memory_bytes()
    begin_s = time.perf_counter()
    llm = LLM.from_pretrained(str(directory), config)
    load_s = time.perf_counter() - begin_s
    after = memory_bytes()
    llm.generate([list(range(PROMPT_TOKENS))], SamplingParams(max_tokens=1, temperature=0.0))
    first_token_s = time.perf_counter() - begin_s
    return {
        "ready_s": ready_s,  # on the clock that the parent started the process by
        "file_bytes": file_bytes,
        "weights_s": weights_s,
        "load_s": load_s,
        "first_token_s": first_token_s,
        "anonymous_bytes": after["anonymous"] - before["anonymous"],
        "peak_bytes": after["peak"] - before["all"],
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def spawn(directory: Path, weights: str, *, is_cold: bool) -> dict[str, float]:
    """`measure` in a new process; start_s is what interpreter and imports took."""
    command = [sys.executable, __file__, "--child", str(directory), weights, *(["--cold"] if is_cold else [])]
    begin_s = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "start_s": found.pop("ready_s") - begin_s}


def prepare(shape: str, case: str, checkpoints: Path) -> tuple[Path, str]:
    """(folder, weights) of a case; writes the random checkpoint and its quantised form."""
    original = checkpoints / f"{shape}-seed0"
    if not (original / "model.safetensors").exists():
        console.print(f"writing random weights to {original}")
        write_checkpoint(SHAPES[shape], original)
    if not (original / "tokenizer.json").exists():
        write_tokenizer(SHAPES[shape]["vocab_size"], original)
    if not case.startswith("stored-"):
        return original, case
    weights = case.removeprefix("stored-")
    stored = checkpoints / f"{shape}-seed0-{weights}"
    shutil.rmtree(stored, ignore_errors=True)  # the packed form may have changed since
    begin_s = time.perf_counter()
    save_quantised(original, stored, weights=weights)
    console.print(f"{stored} packed and written in {time.perf_counter() - begin_s:.2f} s")
    return stored, "auto"


def table_of(results: dict[str, list[dict[str, float]]]) -> Table:
    """Medians, and extremes of the two times that matter."""
    table = Table()
    for column in ("case", "file MB", "start s", "weights s", "GB/s", "load s", "first token s", "peak MB", "kept MB"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, runs in results.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        weights, first = ([run[name] for run in runs] for name in ("weights_s", "first_token_s"))
        table.add_row(
            case, f"{middle['file_bytes'] / 1e6:.0f}", f"{middle['start_s']:.2f}",
            f"{middle['weights_s']:.2f} ({min(weights):.2f} to {max(weights):.2f})",
            f"{middle['file_bytes'] / middle['weights_s'] / 1e9:.2f}", f"{middle['load_s']:.2f}",
            f"{middle['first_token_s']:.2f} ({min(first):.2f} to {max(first):.2f})",
            f"{middle['peak_bytes'] / 1e6:.0f}", f"{middle['anonymous_bytes'] / 1e6:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="time from a checkpoint on disk to the first token")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--repeat", type=int, default=5, help="processes per case; medians are reported")
    parser.add_argument("--checkpoints", type=Path, default=ROOT / "build" / "peers", help="where weights are kept")
    parser.add_argument("--cold", action="store_true", help="do not touch memory before the clock starts")
    parser.add_argument("--json", action="store_true", help="every run, on standard output")
    parser.add_argument("--child", nargs=2, metavar=("DIR", "WEIGHTS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        directory, weights = arguments.child
        print(json.dumps(measure(Path(directory), weights, is_cold=arguments.cold)))
        return
    cases = {case: prepare(arguments.shape, case, arguments.checkpoints) for case in arguments.cases}
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(arguments.repeat):
        for case, (directory, weights) in cases.items():
            results[case].append(spawn(directory, weights, is_cold=arguments.cold))
    console.print(table_of(results))
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
