"""`diptych embed TEXT ...`: a line of JSON per text to standard output, the phase report (one phase) to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli import options, working
from diptych.cli.options import config_without_guesses, console, loading_bar
from diptych.ground.errors import ConfigError
from diptych.ground.events import Usage

if TYPE_CHECKING:
    from diptych.engine.encoded import ReadPrompt

app = options.command_app()

Texts = Annotated[list[str], typer.Argument(help="the texts; - reads them from standard input, one per line")]


@app.command()
@options.takes(engine=options.ENGINE, adapter=options.ONE_LORA)
def embed(
    texts: Texts,
    model: options.Model = "bundled",
    prompt_name: Annotated[str | None, typer.Option(help="an instruction that the model knows by name (query)")] = None,
    instruction: Annotated[str | None, typer.Option(help="an instruction in words, put before every text")] = None,
    dimensions: Annotated[int | None, typer.Option(help="cut vectors to so many numbers (Matryoshka)")] = None,
    *,
    task: options.Task = "embed",
    engine: dict[str, Any],
    adapter: dict[str, Any],
    quiet: options.NoReport = False,
) -> None:
    """Write the vector of each TEXT, and report the one phase there is."""
    reader = Reader(model, {"task": task, **engine}, adapter, made="an embedding")
    given = reader.texts(texts)
    done = reader.llm.embed(
        given,
        prompt_name=prompt_name,
        instruction=instruction,
        dimensions=dimensions,
        adapter=reader.adapter,
    )
    for text, one in zip(given, done, strict=True):
        print(json.dumps({"text": text, "embedding": one.vector.tolist()}, ensure_ascii=False), flush=True)
    if not quiet:
        reader.report(done)


class Reader:
    """A model that reads texts and writes none: what the commands around it share. adapter: the name of the one loaded."""

    def __init__(self, model: str, settings: Mapping[str, Any], adapter: Mapping[str, Any], *, made: str) -> None:
        """made: what the command gives of a text. Raises ConfigError where tokens would be drafted."""
        if settings["speculate"] != "off":
            raise ConfigError(
                f"--speculate {settings['speculate']} drafts tokens, and {made} writes none", hint="leave it out"
            )
        config = config_without_guesses(**settings, **options.one_lora(**adapter))
        self.adapter = next(iter(config.loras), None)
        with loading_bar(f"loading {model}") as progress:
            self.llm = working.LLM(model, config, progress=progress)
        self._observer = working.PhaseObserver()
        self.llm.engine.listen(self._observer)

    @staticmethod
    def texts(given: list[str]) -> list[str]:
        """As given, or the lines of standard input that are not blank."""
        return [line.rstrip("\n") for line in sys.stdin if line.strip()] if given == ["-"] else given

    def report(self, done: Sequence[ReadPrompt]) -> None:
        """The phase report of what was read, to standard error; none of nothing."""
        if not done:
            return
        usage = Usage(
            prompt_tokens=sum(one.usage.prompt_tokens for one in done),
            cached_tokens=sum(one.usage.cached_tokens for one in done),
            computed_tokens=sum(one.usage.computed_tokens for one in done),
            output_tokens=0,
        )
        timings = max((one.timings for one in done), key=lambda one: one.e2e_s)
        loaded = self.llm.loaded
        ceilings = working.machine_ceilings(loaded.model)
        report = working.phase_report(loaded, self._observer, ceilings=ceilings, usage=usage, timings=timings)
        console.print(report.table(), soft_wrap=True)
