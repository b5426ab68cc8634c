"""`diptych generate "PROMPT"`: the text goes to standard output as it is made, the phase report to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli import INTERRUPTED, options, working
from diptych.cli.options import (
    config_without_guesses,
    console,
    interrupts,
    loading_bar,
    read_prompt,
    sampling_params,
    tell_room,
)
from diptych.cli.prompt_bar import PromptBar
from diptych.ground.phase import FinishReason

app = options.command_app()


@app.command()
@options.takes(engine=options.ENGINE, drawing=options.SAMPLING, adapter=options.ONE_LORA)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="the text to continue; - reads standard input")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="read the prompt from a file")] = None,
    model: options.Model = "bundled",
    chat: Annotated[bool, typer.Option("--chat", help="put the prompt through the model's chat template")] = False,
    max_tokens: options.MaxTokens = 256,
    *,
    drawing: dict[str, Any],
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    ignore_eos: options.IgnoreEos = False,
    n: Annotated[int, typer.Option(help="how many answers (they share the prompt's KV)")] = 1,
    engine: dict[str, Any],
    adapter: dict[str, Any],
    as_json: options.AsJson = False,
    quiet: options.NoReport = False,
) -> None:
    """Write the continuation of PROMPT and report both phases."""
    sampling = sampling_params(
        max_tokens=max_tokens, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        ignore_eos=ignore_eos, n=n, **drawing,
    )  # fmt: skip
    config = config_without_guesses(max_running_sequences=n, **engine, **options.one_lora(**adapter))
    text = read_prompt(prompt, prompt_file)  # behind the options: standard input may take its time
    with loading_bar(f"loading {model}") as progress:
        llm = working.LLM(model, config, progress=progress)
    asked = llm.render([{"role": "user", "content": text}]) if chat else llm.loaded.tokenizer.encode(text)
    prompt_tokens = len(asked if isinstance(asked, list) else asked.token_ids)
    tell_room(llm, prompt_tokens, sampling)
    streams = n == 1 and not as_json
    before = [text] if streams and not chat else []

    def write(_: int, delta: working.OutputDelta) -> None:
        bar.close()
        while before:  # once the prompt was taken: one that is refused may be a megabyte long
            _write(before.pop())
        _write(delta.text)

    observer = working.PhaseObserver()
    llm.engine.listen(observer)
    with interrupts() as is_interrupted, PromptBar(llm.engine, prompt_tokens, console=console) as bar:
        done = llm.generate(
            [asked], sampling, adapter=next(iter(config.loras), None), on_delta=write if streams else None,
            is_cancelled=is_interrupted,
        )[0]  # fmt: skip
        bar.close()
        _tell(llm, observer, done, as_json=as_json, streams=streams, quiet=quiet)
        if is_interrupted():
            raise typer.Exit(INTERRUPTED)


def _tell(
    llm: working.LLM,
    observer: working.PhaseObserver,
    done: working.Completion,
    *,
    as_json: bool,
    streams: bool,
    quiet: bool,
) -> None:
    if done.error is not None:
        raise done.error
    if as_json:
        report = None if quiet else _report(llm, observer, done)
        _write(json.dumps(_as_json(done, report), ensure_ascii=False) + "\n")
        return
    if streams:
        _write("\n")
    else:
        for choice in done.choices:
            _write(f"--- {choice.index}\n{choice.text}\n")
    if any(choice.finish_reason is FinishReason.ABORT for choice in done.choices):
        console.print("stopped by Ctrl-C; this is what there was", style="yellow", soft_wrap=True)
    if not quiet:
        console.print(_report(llm, observer, done).table(), soft_wrap=True)


def _report(llm: working.LLM, observer: working.PhaseObserver, done: working.Completion) -> working.PhaseReport:
    ceilings = working.machine_ceilings(llm.loaded.model)
    return working.phase_report(llm.loaded, observer, ceilings=ceilings, usage=done.usage, timings=done.timings)


def _as_json(done: working.Completion, report: working.PhaseReport | None) -> dict[str, object]:
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason.value,
        }
        for choice in done.choices
    ]
    found: dict[str, object] = {"choices": choices, "usage": asdict(done.usage), "timings": asdict(done.timings)}
    return found if report is None else found | {"report": report.as_json()}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
