"""`diptych classify TEXT ...`: a line of JSON per text to standard output, the phase report (one phase) to standard error."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from diptych.cli import options
from diptych.cli.embed import Reader, Texts

app = options.command_app()


@app.command()
@options.takes(engine=options.ENGINE, adapter=options.ONE_LORA)
def classify(
    texts: Texts,
    model: Annotated[str, typer.Option("--model", "-m", help="folder or hub name of a ...ForSequenceClassification")],
    pair: Annotated[
        list[str] | None, typer.Option(help="a second text behind the first, as a hypothesis; repeatable")
    ] = None,
    instruction: Annotated[str | None, typer.Option(help="an instruction in words, put before every text")] = None,
    *,
    engine: dict[str, Any],
    adapter: dict[str, Any],
    quiet: options.NoReport = False,
) -> None:
    """Write the likeliest label of each TEXT and what each label has, and report the one phase there is.

    With --pair one TEXT stands before each second text, or as many TEXTs as there are.
    """
    reader = Reader(model, engine, adapter, made="a label")
    given = reader.texts(texts)
    done = reader.llm.classify(given, pair, instruction=instruction, adapter=reader.adapter)
    given = given * len(done) if len(given) == 1 else given
    for number, (text, one) in enumerate(zip(given, done, strict=True)):
        second = {} if not pair else {"text_pair": pair[number]}
        told = {"text": text, **second, "label": one.label, "probs": dict(zip(one.labels, one.odds, strict=True))}
        print(json.dumps(told, ensure_ascii=False), flush=True)
    if not quiet:
        reader.report(done)
