"""Options that several commands share, and what they become: EngineConfig, SamplingParams, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.engine.load import Progress as ProgressCall
from diptych.ground.config import ComputeConfig, EngineConfig, SchedulerConfig
from diptych.ground.errors import ConfigError
from diptych.ground.request import SamplingParams

Model = Annotated[str, typer.Option("--model", "-m", help="'bundled', a checkpoint folder, or a hub name")]
Backend = Annotated[str, typer.Option(help="auto | cpu | torch")]
Device = Annotated[str, typer.Option(help="auto | cpu | cuda (torch backend)")]
Weights = Annotated[str, typer.Option(help="auto | fp32 | bf16 | int8 | int4")]
Kv = Annotated[str, typer.Option(help="KV cache format: auto | fp32 | bf16 | int8")]
Threads = Annotated[int | None, typer.Option(help="compute threads (default: one per core this process may use)")]
Numa = Annotated[str, typer.Option(help="where they are pinned: auto (node by node) | off | nodes such as 0 or 0,1")]
MaxContext = Annotated[int | None, typer.Option("--max-context-tokens", help="longest sequence (default: the model's)")]
KvMemory = Annotated[int | None, typer.Option("--kv-memory-bytes", help="memory of the KV pool in bytes")]
StallBudget = Annotated[
    float | None, typer.Option("--stall-budget-ms", help="longest a running stream may wait for others' prefill")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="most tokens to write")]
Temperature = Annotated[float, typer.Option(help="0 is greedy")]
TopK = Annotated[int | None, typer.Option(help="keep the k likeliest tokens")]
TopP = Annotated[float, typer.Option(help="keep the likeliest tokens that hold this probability")]
MinP = Annotated[float, typer.Option(help="keep tokens at least this likely, relative to the likeliest")]
RepetitionPenalty = Annotated[float, typer.Option(help="divide the logits of tokens already seen")]
PresencePenalty = Annotated[float, typer.Option(help="subtract once from tokens already written")]
FrequencyPenalty = Annotated[float, typer.Option(help="subtract per occurrence from tokens already written")]
Seed = Annotated[int | None, typer.Option(help="noise depends on the seed and the position only")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="end before this text (may be repeated)")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="go on after an end-of-sequence token")]

Say = Callable[[str], None]  # shows what is being done

console = Console(stderr=True, highlight=False)


def engine_config(
    *,
    backend: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    kv: str = "auto",
    threads: int | None = None,
    numa: str = "auto",
    max_context_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    stall_budget_ms: float | None = None,
    max_running_sequences: int | None = None,
    max_step_tokens: int = 2048,
) -> EngineConfig:
    """The shared options as an EngineConfig; ConfigError for impossible values."""
    return EngineConfig(
        scheduler=SchedulerConfig(
            stall_budget_s=None if stall_budget_ms is None else stall_budget_ms / 1000.0,
            max_running_sequences=max_running_sequences,
            max_step_tokens=max_step_tokens,
        ),
        compute=ComputeConfig(backend=backend, device=device, weights=weights, kv=kv, threads=threads, numa=numa),
        max_context_tokens=max_context_tokens,
        kv_memory_bytes=kv_memory_bytes,
    )


def sampling_params(*, stop: list[str] | None = None, **values: object) -> SamplingParams:
    """The sampling options as SamplingParams; BadSampling names the one that is impossible."""
    return SamplingParams(stop=tuple(stop or ()), **values)  # type: ignore[arg-type]


@contextmanager
def loading_bar(label: str) -> Iterator[ProgressCall]:
    """A progress bar over bytes on standard error (silent when that is not a terminal)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the argument, a file, or standard input (`-`). ConfigError when there is none or two."""
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give either PROMPT or --prompt-file", hint="a PROMPT of - reads standard input")
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the prompt from {prompt_file}: {error}") from error
    return sys.stdin.read() if prompt == "-" else str(prompt)
