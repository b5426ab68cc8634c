"""`diptych plan`: what both phases of a model cost on a device, before anyone buys or runs it.

    diptych plan llama-3.1-8b --hardware a100-80gb-sxm
    diptych plan --ask ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200 llama-3.1-8b --devices l40s,h100-80gb-sxm
    diptych plan compare llama-3.1-8b,qwen3-8b --hardware l40s,rtx-4090
    diptych plan accuracy · diptych plan --list

Arithmetic only: neither torch nor numpy is loaded; matplotlib only for --picture.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cost.advice import chunk_for, pools_for, speculation, what_ifs
from diptych.cost.planner import Plan, Question, make_plan
from diptych.cost.rows import read_rows
from diptych.cost.setup import Setup, setup_of
from diptych.cost.sizing import TRIED_TP, Answer, parse_ask, parse_duration_s, size
from diptych.cost.stacks import stack_names
from diptych.cost.tables import QUANTS, data_text, device_names, device_spec, model_names
from diptych.ground.errors import ConfigError, EngineError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ASK_WEIGHTS = ("bf16", "fp8", "int8", "int4")

Words = Annotated[
    list[str] | None, typer.Argument(help="MODEL (name, config.json or folder) | compare MODEL[,MODEL] | accuracy")
]
Hardware = Annotated[str | None, typer.Option("--hardware", "-d", help="device name, `local`, or several with commas")]
Weights = Annotated[str | None, typer.Option("--weights", "-w", help="weight format; with --ask several with commas")]


@app.command()
def plan(
    words: Words = None,
    hardware: Hardware = None,
    weights: Weights = None,
    kv: Annotated[str, typer.Option("--kv", help="KV cache format: bf16, fp8, int8, int4, fp32")] = "bf16",
    tp: Annotated[int, typer.Option("--tp", help="devices that share one copy of the model")] = 1,
    batch: Annotated[int, typer.Option("--batch", "-b", help="sequences in flight")] = 1,
    prompt: Annotated[int, typer.Option("--prompt", "-p", help="prompt tokens")] = 2048,
    cached: Annotated[int, typer.Option("--cached", help="prompt tokens already in the prefix cache")] = 0,
    output: Annotated[int, typer.Option("--output", "-o", help="tokens of the answer")] = 256,
    context: Annotated[
        int | None, typer.Option("--context", help="context of the decode step (default: mid-answer)")
    ] = None,
    stall_budget: Annotated[str, typer.Option("--stall-budget", help="longest step while others decode")] = "50ms",
    rate: Annotated[float, typer.Option("--rate", help="requests per second, for one pool or two")] = 1.0,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", help="tokens drafted per verify step")] = 4,
    acceptance: Annotated[float, typer.Option("--acceptance", help="chance that a drafted token is right")] = 0.7,
    draft_cost: Annotated[float, typer.Option("--draft-cost", help="one drafted token, in decode steps")] = 0.05,
    stack: Annotated[str | None, typer.Option("--stack", help="software whose constants to use")] = None,
    ask: Annotated[str | None, typer.Option("--ask", help="ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200")] = None,
    devices: Annotated[str | None, typer.Option("--devices", help="devices to choose from, with commas")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="most USD per hour")] = None,
    price: Annotated[list[str] | None, typer.Option("--price", help="DEVICE=USD per hour of one device")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="write a picture (.png, .svg, .pdf)")] = None,
    rows: Annotated[Path | None, typer.Option("--rows", help="published rows (CSV) for `accuracy`")] = None,
    listing: Annotated[bool, typer.Option("--list", help="list models, devices, formats and software")] = False,
) -> None:
    """Predict both phases for a model on a device."""
    words = words or []
    try:
        question = Question(
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            batch=batch,
            context_tokens=context,
            stall_budget_s=parse_duration_s(stall_budget, "stall budget"),
            requests_per_s=rate,
            draft_tokens=draft_tokens,
            acceptance=acceptance,
            draft_cost=draft_cost,
        )
        if listing:
            _list(as_json)
        elif words[:1] == ["accuracy"]:
            _no_more(words[1:])
            _accuracy(rows, as_json)
        elif words[:1] == ["compare"]:
            _compare(
                words[1:], hardware, question, weights=weights or "bf16", kv=kv, tp=tp, stack=stack, as_json=as_json
            )
        elif ask is not None:
            names = _split(devices or hardware) or _priced_devices()
            setups = _setups(_model(words), names, weights=_split(weights) or list(ASK_WEIGHTS), kv=kv, stack=stack)
            _ask(size(setups, parse_ask(ask), prices=_prices(price), budget_usd_per_hour=budget), as_json)
        else:
            setup = setup_of(_model(words), _device(hardware), weights=weights or "bf16", kv=kv, tp=tp, stack=stack)
            _plan(make_plan(setup, question), as_json, picture)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _plan(plan: Plan, as_json: bool, picture: Path | None) -> None:
    setup, question = plan.setup, plan.question
    extras = {
        "what_if": what_ifs(setup, question),
        "speculation": speculation(setup, question),
        "chunk": chunk_for(setup, question),
        "pools": pools_for(setup, question),
    }
    if picture is not None:
        _module("plan_picture").draw(plan, picture)
    if as_json:
        print(_module("plan_json").dump({"plan": plan, **extras}))
    else:
        _module("plan_text").show_plan(plan, **extras)
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr)


def _ask(answer: Answer, as_json: bool) -> None:
    if as_json:
        print(_module("plan_json").dump(answer))
    else:
        _module("plan_text").show_answer(answer)


def _compare(
    words: list[str],
    hardware: str | None,
    question: Question,
    *,
    weights: str,
    kv: str,
    tp: int,
    stack: str | None,
    as_json: bool,
) -> None:
    _no_more(words[1:])
    models, names = _split(_model(words)), _split(_device(hardware))
    plans = [
        make_plan(setup_of(model, name, weights=each, kv=kv, tp=tp, stack=stack), question)
        for model in models
        for name in names
        for each in _split(weights)
    ]
    if as_json:
        print(_module("plan_json").dump({"plans": plans}))
    else:
        _module("plan_text").show_comparison(plans)


def _accuracy(rows_file: Path | None, as_json: bool) -> None:
    """Leave one model out, on the file's rows or on the built-in copy; other rows only help to fit."""
    accuracy = import_module("diptych.cost.accuracy")
    known = read_rows(data_text("published_rows.csv"))[0]
    rows, left_out = known, 0
    if rows_file is not None:
        try:
            rows, left_out = read_rows(rows_file.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {rows_file}: {error.strerror}") from None
        if not rows:
            raise ConfigError(f"{rows_file} has no row that describes one timed step on a known device")
    auxiliary = [*read_rows(data_text("auxiliary_rows.csv"))[0], *(row for row in known if row not in rows)]
    errors = accuracy.leave_one_model_out(rows, auxiliary=auxiliary)
    summaries = accuracy.summarise(errors)
    uncovered = accuracy.uncovered(rows)
    if as_json:
        content = {"summaries": summaries, "rows": errors, "uncovered": uncovered, "left_out": left_out}
        print(_module("plan_json").dump(content))
    else:
        _module("plan_text").show_accuracy(summaries, uncovered=len(uncovered), left_out=left_out)


def _list(as_json: bool) -> None:
    if as_json:
        names = {"models": model_names(), "devices": device_names(), "weights": list(QUANTS), "stacks": stack_names()}
        print(json.dumps(names, indent=1))
    else:
        _module("plan_text").show_list()


def _setups(model: str, names: list[str], *, weights: list[str], kv: str, stack: str | None) -> list[Setup]:
    """Every device x format x split that is possible; impossible splits are skipped, unknown names are errors."""
    found: list[Setup] = []
    for name in names:
        for each in weights:
            base = setup_of(model, name, weights=each, kv=kv, stack=stack)
            if each == "fp8" and "fp8" not in base.hardware.flops_per_s:
                continue
            for tp in TRIED_TP:
                try:
                    found.append(setup_of(model, name, weights=each, kv=kv, tp=tp, stack=stack))
                except ConfigError:
                    break
    return found


def _priced_devices() -> list[str]:
    return [name for name in device_names() if device_spec(name).usd_per_hour is not None]


def _prices(entries: list[str] | None) -> dict[str, float]:
    prices: dict[str, float] = {}
    for entry in entries or []:
        name, _, value = entry.partition("=")
        try:
            prices[device_spec(name).name] = float(value)
        except ValueError:
            raise ConfigError(f"cannot read --price {entry!r}", hint="for example --price h100-80gb-sxm=2.50") from None
    return prices


def _model(words: list[str]) -> str:
    if not words:
        return "bundled"
    _no_more(words[1:])
    return words[0]


def _no_more(words: list[str]) -> None:
    if words:
        raise ConfigError(f"did not expect {' '.join(words)!r}", hint="several models are joined with commas")


def _device(hardware: str | None) -> str:
    return hardware or "local"


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _module(name: str) -> Any:
    """A sibling that draws or prints, imported only when its output is asked for."""
    return import_module(f"diptych.cli.{name}")


if __name__ == "__main__":
    app()
