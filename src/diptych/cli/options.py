"""Options that several commands share, and what they become: EngineConfig, SamplingParams, a progress bar."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.ground.config import (
    ACTIVATIONS,
    BACKENDS,
    BY_TEXT,
    BY_WEIGHTS,
    KV_FORMATS,
    MODEL_DRAFTERS,
    MOST_DRAFTS,
    SPECULATE,
    TASKS,
    WEIGHT_FORMATS,
    EngineConfig,
)
from diptych.ground.config import BOUNDS as CONFIG
from diptych.ground.config import engine_config as ground_config
from diptych.ground.errors import ConfigError
from diptych.ground.request import BOUNDS as REQUEST
from diptych.ground.request import SamplingParams
from diptych.models.named import SHAPES

if TYPE_CHECKING:  # doctor needs options, and no tensor library
    from diptych.engine.llm import LLM
    from diptych.engine.load import Progress as ProgressCall

Model = Annotated[str, typer.Option("--model", "-m", help="'bundled', a checkpoint folder, a GGUF file, or a hub name")]
Backend = Annotated[str, typer.Option(help=" | ".join(BACKENDS))]
Device = Annotated[str, typer.Option(help="auto | cpu | cuda (torch backend)")]
Weights = Annotated[str, typer.Option(help=" | ".join(WEIGHT_FORMATS))]
Activations = Annotated[
    str,
    typer.Option(help=f"what meets weights in groups, int8 faster in prefill: {' | '.join(ACTIVATIONS)}"),
]
Calibrate = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help=f"text by which channels of int8 and int4 are balanced when they are made: {BY_TEXT} (one that ships) | "
        f"{BY_WEIGHTS} (none: by the weights alone) | a file",
    ),
]
Kv = Annotated[str, typer.Option(help=f"KV cache format: {' | '.join(KV_FORMATS)}")]
Threads = Annotated[int | None, typer.Option(help=CONFIG["threads"].what)]
OwnThreads = Annotated[int | None, typer.Option("--threads", help="compute threads (default: one per core)")]  # no --tp
Tp = Annotated[int, typer.Option("--tp", help=CONFIG["tp"].what)]
TpAddress = Annotated[
    str | None,
    typer.Option(
        "--tp-address",
        help="HOST:PORT of this machine where ranks on others join (`diptych rank`), one on each machine",
    ),
]
Numa = Annotated[str, typer.Option(help="where they are pinned: auto (node by node) | off | nodes such as 0 or 0,1")]
InstructionSet = Annotated[
    str,
    typer.Option("--instruction-set", help="kernel set of the cpu backend: auto (this processor's best) | avx2 | ..."),
]
MaxContext = Annotated[int | None, typer.Option("--max-context-tokens", help=CONFIG["max_context_tokens"].what)]
KvMemory = Annotated[int | None, typer.Option("--kv-memory-bytes", help=CONFIG["kv_memory_bytes"].what)]
StallBudget = Annotated[float | None, typer.Option("--stall-budget-ms", help=CONFIG["stall_budget_s"].what)]
MaxRunning = Annotated[int | None, typer.Option(help=CONFIG["max_running_sequences"].what)]
Speculate = Annotated[
    str, typer.Option(help=f"guess tokens ahead and verify them, same answer: {' | '.join(SPECULATE)}")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help=f"checkpoint of the drafter, for --speculate {' | '.join(MODEL_DRAFTERS)}; for auto several, between commas",
    ),
]
Task = Annotated[
    str, typer.Option(help=f"what the model gives beside text, auto: as its files say: {' | '.join(TASKS)}")
]
NoReport = Annotated[bool, typer.Option("--quiet", "-q", help="no phase report")]
MaxDraftTokens = Annotated[int, typer.Option("--max-draft-tokens", help=CONFIG["max_draft_tokens"].what)]
MaxStepTokens = Annotated[int, typer.Option(help=CONFIG["max_step_tokens"].what)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help=REQUEST["max_tokens"].what)]
Temperature = Annotated[float, typer.Option(help=REQUEST["temperature"].what)]
TopK = Annotated[int | None, typer.Option(help=REQUEST["top_k"].what)]
TopP = Annotated[float, typer.Option(help=REQUEST["top_p"].what)]
MinP = Annotated[float, typer.Option(help=REQUEST["min_p"].what)]
RepetitionPenalty = Annotated[float, typer.Option(help=REQUEST["repetition_penalty"].what)]
PresencePenalty = Annotated[float, typer.Option(help=REQUEST["presence_penalty"].what)]
FrequencyPenalty = Annotated[float, typer.Option(help=REQUEST["frequency_penalty"].what)]
Seed = Annotated[int | None, typer.Option(help=REQUEST["seed"].what)]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="end before this text (may be repeated)")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="go on after an end-of-sequence token")]
Lora = Annotated[
    list[str] | None, typer.Option("--lora", help="load an adapter: name=FOLDER, or a hub name (may be repeated)")
]
OneLora = Annotated[str | None, typer.Option("--lora", help="answer with this adapter: its folder, or a hub name")]
MaxLoras = Annotated[int, typer.Option("--max-loras", help=CONFIG["max_loras"].what)]
MaxLoraRank = Annotated[int, typer.Option("--max-lora-rank", help=CONFIG["max_lora_rank"].what)]
Shape = Annotated[str | None, typer.Option(help=f"random weights of a known shape: {', '.join(SHAPES)}")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]
AsJsonList = Annotated[bool, typer.Option("--json", help="one JSON list on standard output")]
ApiKey = Annotated[str | None, typer.Option(help="key of the server (default: DIPTYCH_API_KEY)")]

# Blocks of options that commands take together, by name: what typer reads, and the default.
Block = dict[str, tuple[Any, Any]]
BACKEND: Block = {
    "backend": (Backend, "auto"),
    "device": (Device, "auto"),
    "weights": (Weights, "auto"),
    "activations": (Activations, "auto"),
    "calibrate": (Calibrate, BY_TEXT),
    "kv": (Kv, "auto"),
    "threads": (Threads, None),
    "numa": (Numa, "auto"),
    "instruction_set": (InstructionSet, "auto"),
    "tp": (Tp, 1),
    "tp_address": (TpAddress, None),
    "speculate": (Speculate, "off"),
    "draft_model": (DraftModel, None),
    "max_draft_tokens": (MaxDraftTokens, MOST_DRAFTS),
}
ENGINE: Block = BACKEND | {"max_context_tokens": (MaxContext, None), "kv_memory_bytes": (KvMemory, None)}
LORAS: Block = {"lora": (Lora, None), "max_loras": (MaxLoras, 8), "max_lora_rank": (MaxLoraRank, 64)}
ONE_LORA: Block = {"lora": (OneLora, None)}
SAMPLING: Block = {
    "temperature": (Temperature, 0.0),
    "top_k": (TopK, None),
    "top_p": (TopP, 1.0),
    "min_p": (MinP, 0.0),
    "repetition_penalty": (RepetitionPenalty, 1.0),
    "seed": (Seed, None),
    "stop": (Stop, None),
}

Say = Callable[[str], None]  # shows what is being done

console = Console(stderr=True, highlight=False, markup=False)  # names and errors may hold brackets


def command_app(**settings: Any) -> typer.Typer:
    """The typer app of a command. Its pages are plain lines: rich's boxes cut long names short at 80 columns."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **settings)


def takes(**blocks: Block) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command's parameter of each name given here becomes the options of that block, and gets them as a dict.

    typer reads options off a signature, so that a command would spell each option of a block three times.
    """

    def take(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def taking(**values: Any) -> None:
            for name, block in blocks.items():
                values[name] = {option: values.pop(option) for option in block}
            command(**values)

        kind = inspect.Parameter.KEYWORD_ONLY
        taken: list[inspect.Parameter] = []
        for one in inspect.signature(command, eval_str=True).parameters.values():
            if one.name in blocks:
                block = blocks[one.name].items()
                taken += [
                    inspect.Parameter(name, kind, annotation=what, default=value) for name, (what, value) in block
                ]
            else:
                taken.append(one.replace(kind=kind))
        taking.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        taking.__annotations__ = {one.name: one.annotation for one in taken}
        return taking

    return take


def engine_config(
    *, stall_budget_ms: float | None = None, lora: list[str] | None = None, **settings: object
) -> EngineConfig:
    """The shared options as an EngineConfig; ConfigError for impossible values."""
    if lora:
        settings["loras"] = _loras(lora)
    stall_budget_s = None if stall_budget_ms is None else stall_budget_ms / 1000.0
    return ground_config(stall_budget_s=stall_budget_s, **settings)


def config_without_guesses(**settings: Any) -> EngineConfig:
    """`engine_config` of a command whose requests bring no guesses of their own (a prediction, a grammar)."""
    config = engine_config(**settings)
    most, speculate = config.scheduler.max_draft_tokens, config.scheduler.speculate
    if speculate == "off" and most != MOST_DRAFTS:
        raise ConfigError(
            f"max_draft_tokens is {most}, and nothing guesses: speculate is 'off'", hint="--speculate auto"
        )
    return config


def _loras(given: list[str]) -> dict[str, str]:
    loras: dict[str, str] = {}
    for one in given:
        name, _, path = one.partition("=")
        if not name or not path:
            raise ConfigError(f"lora is {one!r}; it must be name=FOLDER")
        if name in loras:
            raise ConfigError(f"lora names {name!r} twice, for {loras[name]} and {path}")
        loras[name] = path
    return loras


def one_lora(lora: str | None) -> dict[str, Any]:
    """Settings for one adapter, whatever its rank, called "lora"; none without one."""
    return {} if lora is None else {"loras": {"lora": lora}, "max_lora_rank": CONFIG["max_lora_rank"].high}


def sampling_params(*, stop: list[str] | None = None, **values: object) -> SamplingParams:
    """The sampling options as SamplingParams; BadSampling names the one that is impossible."""
    return SamplingParams(stop=tuple(stop or ()), **values)  # type: ignore[arg-type]


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """While inside, Ctrl-C makes the yielded function say True: the engine stops between two steps. A second one raises."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            signal.default_int_handler(number, frame)
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def tell_room(llm: LLM, prompt_tokens: int, sampling: SamplingParams) -> None:
    """Say before the answer when the context will end it, not --max-tokens."""
    context = llm.engine.core.context_limit_tokens
    room = context - prompt_tokens
    if 0 < room < sampling.max_tokens:
        console.print(
            f"note: the context holds {context} tokens and the prompt takes {prompt_tokens}, so at most {room} are "
            f"written, not {sampling.max_tokens}",
            style="dim",
            soft_wrap=True,
        )


@contextmanager
def loading_bar(label: str) -> Iterator[ProgressCall]:
    """A progress bar over bytes on standard error (silent when that is not a terminal)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def given(context: typer.Context) -> dict[str, str]:
    """Options that a person wrote, by what they set: {"tp": "--tp"}."""
    found: dict[str, str] = {}
    for one in context.command.params:
        source = None if one.name is None else context.get_parameter_source(one.name)
        if one.name is not None and source is not None and source.name == "COMMANDLINE":
            found[one.name] = next((name for name in one.opts if name.startswith("--")), one.name)
    return found


def refuse_before(context: typer.Context, command: str) -> None:
    """Raise ConfigError for options of a command that stand before its subcommand, which has options of its own."""
    names = list(given(context).values())
    if names:
        raise ConfigError(
            f"{', '.join(names)} before {context.invoked_subcommand} would change nothing: it is read by {command!r} alone",
            hint=f"write it behind {context.invoked_subcommand}, if that has it",
        )


def refuse_both(context: typer.Context, shape: str | None) -> None:
    """Raise ConfigError where a model is named beside a shape, which has no weights but random ones."""
    if shape is not None and "model" in given(context):
        raise ConfigError(
            f"--shape {shape} has random weights, and --model weights of its own", hint="give one of them"
        )


def refuse_text(shape: str | None, calibrate: str) -> None:
    """Raise ConfigError where a text is named, or none is wanted, for a shape: it learns nothing from any."""
    if shape is not None and calibrate != BY_TEXT:
        raise ConfigError(
            f"--shape {shape} has random weights, and --calibrate {calibrate} is about trained ones",
            hint="leave it out",
        )


def check_writable(path: Path | None) -> None:
    """Raise OSError now rather than after minutes of measuring, when a file cannot be written at `path`. None is left there."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input (`-`). ConfigError when there is none or two."""
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give either PROMPT or --prompt-file", hint="a PROMPT of - reads standard input")
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8-sig")  # an editor's byte order mark is none of its text
        except OSError as error:
            raise ConfigError(f"cannot read the prompt from {prompt_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the prompt from {prompt_file}: it is no UTF-8 text ({error})") from error
    return sys.stdin.read() if prompt == "-" else str(prompt)
