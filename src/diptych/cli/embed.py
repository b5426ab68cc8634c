"""`diptych embed TEXT ...`: a line of JSON per text to standard output, the phase report (one phase) to standard error."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from diptych.cli import options, working
from diptych.cli.options import config_without_guesses, console, loading_bar
from diptych.ground.errors import ConfigError
from diptych.ground.events import Usage

app = options.command_app()


@app.command()
@options.takes(engine=options.ENGINE, adapter=options.ONE_LORA)
def embed(
    texts: Annotated[list[str], typer.Argument(help="the texts; - reads them from standard input, one per line")],
    model: options.Model = "bundled",
    prompt_name: Annotated[str | None, typer.Option(help="an instruction that the model knows by name (query)")] = None,
    instruction: Annotated[str | None, typer.Option(help="an instruction in words, put before every text")] = None,
    dimensions: Annotated[int | None, typer.Option(help="cut vectors to so many numbers (Matryoshka)")] = None,
    *,
    task: options.Task = "embed",
    engine: dict[str, Any],
    adapter: dict[str, Any],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no phase report")] = False,
) -> None:
    """Write the vector of each TEXT, and report the one phase there is."""
    if engine["speculate"] != "off":
        raise ConfigError(
            f"--speculate {engine['speculate']} drafts tokens, and an embedding writes none", hint="leave it out"
        )
    config = config_without_guesses(task=task, **engine, **options.one_lora(**adapter))
    given = [line.rstrip("\n") for line in sys.stdin if line.strip()] if texts == ["-"] else texts
    with loading_bar(f"loading {model}") as progress:
        llm = working.LLM(model, config, progress=progress)
    observer = working.PhaseObserver()
    llm.engine.listen(observer)
    done = llm.embed(
        given,
        prompt_name=prompt_name,
        instruction=instruction,
        dimensions=dimensions,
        adapter=next(iter(config.loras), None),
    )
    for text, one in zip(given, done, strict=True):
        print(json.dumps({"text": text, "embedding": one.vector.tolist()}, ensure_ascii=False), flush=True)
    if quiet or not done:
        return
    usage = Usage(
        prompt_tokens=sum(one.usage.prompt_tokens for one in done),
        cached_tokens=sum(one.usage.cached_tokens for one in done),
        computed_tokens=sum(one.usage.computed_tokens for one in done),
        output_tokens=0,
    )
    timings = max((one.timings for one in done), key=lambda one: one.e2e_s)
    report = working.phase_report(
        llm.loaded, observer, ceilings=working.machine_ceilings(llm.loaded.model), usage=usage, timings=timings
    )
    console.print(report.table(), soft_wrap=True)
