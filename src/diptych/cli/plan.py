"""`diptych plan`: what both phases of a model cost on a device, before anyone buys or runs it.

    diptych plan llama-3.1-8b --hardware a100-80gb-sxm
    diptych plan --ask ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200 llama-3.1-8b --devices l40s,h100-80gb-sxm
    diptych plan llama-3.1-8b --users 1000 --think 30s --turns 8 --slo ttft=1s,tpot=80ms --hardware l40s,h100
    diptych plan compare llama-3.1-8b,qwen3-8b --hardware l40s,rtx-4090
    diptych plan accuracy · diptych plan --list

Arithmetic only: neither torch nor numpy is loaded; matplotlib only for --picture.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from diptych.cli.layouts import devices_of, layout_of, layout_options, lora_option, loras_of, prices_of
from diptych.cli.written import errors_told, refuse_unread, written
from diptych.cost.advice import chunk_for, pools_for, speculation_advice, what_ifs
from diptych.cost.planner import Plan, Question, make_plan
from diptych.cost.roofline import NoRate
from diptych.cost.setup import Setup, setup_of
from diptych.cost.sizing import TRIED_TP, Answer, parse_ask, parse_duration_s, parse_rate, size
from diptych.cost.stacks import stack_names
from diptych.cost.tables import data_text, device_names, model_names
from diptych.ground.bounds import Bound, shown
from diptych.ground.errors import ConfigError
from diptych.ground.formats import KV_FORMATS, QUANTS

PROMPT_TOKENS = 2048  # where nobody says
ASK_WEIGHTS = ("bf16", "fp8", "int8", "int4")

_SETUP = {"hardware", "weights", "kv", "tp", "stack", "ep", "pp", "dp_attention", "lora"}
_QUESTION = {"batch", "prompt", "cached", "output", "context"}
_ADVICE = {"stall_budget", "rate", "speculate", "acceptance", "draft_cost"}
# What each kind of answer reads, beside --json: any other option given with it is refused, as it would change nothing.
READS = {
    "plan": _SETUP | _QUESTION | _ADVICE | {"picture"},
    "compare": _SETUP | _QUESTION,
    "--ask": {"hardware", "weights", "kv", "tp", "stack", "ask", "devices", "budget", "price"},
    "accuracy": {"rows", "refit", "neutral", "services"},
    "--list": {"listing"},
}


def app(args: Sequence[str] | None = None, prog_name: str = "diptych plan") -> None:
    """Run the command. Exit code 2 on an error of input, said on standard error.

    argparse on purpose: importing typer costs more than the whole answer.
    """
    if any(word == "--users" or word.startswith("--users=") for word in (sys.argv[1:] if args is None else args)):
        import_module("diptych.cli.plan_users").app(args, prog_name)
        return
    options = _parser(prog_name).parse_args(args)
    with errors_told():
        _answer(options, given=written(_parser(prog_name), args))


def _parser(prog_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name,
        description="Predict both phases of a model on a device.",
        usage=f"{prog_name} MODEL --hardware NAME [options]\n"
        f"       {prog_name} MODEL --ask ttft=500ms,tpot=50ms,rate=3/s,in=1500,out=200 [--devices NAME,NAME]\n"
        f"       {prog_name} MODEL --users 1000 --think 30s --turns 8 --slo ttft=1s,tpot=80ms [--hardware NAME,NAME]\n"
        f"       {prog_name} compare MODEL[,MODEL] --hardware NAME[,NAME] [--weights FORMAT[,FORMAT]] [--batch N[,N]]\n"
        f"       {prog_name} accuracy [--rows FILE.csv] [--neutral]\n"
        f"       {prog_name} --list",
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="MODEL", help="a name, a config.json, a folder with one, or `bundled` (default)")
    add(
        "--hardware",
        "-d",
        metavar="NAME",
        help="device, or `local` (default), `local-cpu`, `local-gpu`: this machine as measured; several: a table",
    )
    add(
        "--weights",
        "-w",
        metavar="FORMAT",
        help="weight format (default bf16, with `local` a quantised file's own); several with commas",
    )
    add("--kv", default="bf16", metavar="FORMAT", help="KV cache format: bf16, fp8, int8, int4, fp32")
    add("--tp", type=int, default=1, metavar="N", help="devices that share one copy of the model")
    layout_options(parser)
    lora_option(parser)
    add("--batch", "-b", default="1", metavar="N[,N]", help="sequences in flight; several make a table")
    add(
        "--prompt", "-p", type=int, metavar="N", help=f"prompt tokens (default {PROMPT_TOKENS}, less in short contexts)"
    )
    add("--cached", type=int, default=0, metavar="N", help="prompt tokens already in the prefix cache")
    add("--output", "-o", type=int, default=256, metavar="N", help="tokens of the answer")
    add("--context", type=int, metavar="N", help="context of the decode step (default: the middle of the answer)")
    add("--stall-budget", default="50ms", metavar="TIME", help="longest step while others decode")
    add("--rate", default="1/s", metavar="R", help="requests per second, such as 3/s or 40/min, for one pool or two")
    add("--speculate", type=int, default=4, metavar="N", help="tokens drafted per sequence and verify step")
    add("--acceptance", type=float, default=0.7, metavar="A", help="chance that a drafted token is right")
    add("--draft-cost", type=float, default=0.05, metavar="C", help="cost of one drafted token, in decode steps")
    add("--stack", metavar="NAME", help="software whose fitted constants to use (see --list)")
    add("--ask", metavar="LIMITS", help="name the cheapest setup for ttft=..,tpot=..,rate=..,in=..,out=..")
    add("--devices", metavar="NAMES", help="devices to choose from (default: all with a price)")
    add("--budget", type=float, metavar="USD", help="most USD per hour")
    add("--price", action="append", metavar="NAME=USD", help="price per hour of one device; may be repeated")
    add("--json", dest="as_json", action="store_true", help="print JSON")
    add("--picture", type=Path, metavar="FILE", help="also write a picture (.png, .svg, .pdf)")
    add("--rows", type=Path, metavar="FILE", help="published rows (CSV) for `accuracy`")
    add("--refit", type=Path, metavar="FILE", help="with `accuracy`: also write the constants fitted to all rows")
    add("--services", action="store_true", help="with `accuracy`: simulate published services (takes minutes)")
    add("--neutral", action="store_true", help="with `accuracy`: one form and one start for all software")
    add("--list", dest="listing", action="store_true", help="list models, devices, formats and software")
    return parser


def _answer(options: argparse.Namespace, *, given: dict[str, str]) -> None:
    words: list[str] = options.words
    kind = _kind(options)
    refuse_unread(kind, given, READS[kind] | {"as_json"})
    if kind == "--list":
        _no_more(words, "--list takes no model")
        _list(options.as_json)
    elif kind == "accuracy":
        _no_more(words[1:], "rows of one's own: --rows FILE.csv")
        if options.services:
            _services(options, given)
            return
        if options.neutral and options.refit is not None:
            raise ConfigError("--refit writes the constants of every software's own form, which --neutral leaves out")
        _accuracy(options.rows, options.refit, options.as_json, is_neutral=options.neutral)
    elif kind == "compare":
        _compare(options, words[1:])
    elif kind == "--ask":
        if options.devices and options.hardware:
            raise ConfigError("--devices and --hardware both name devices to choose from", hint="give one of them")
        prices = prices_of(options.price)
        names = devices_of(options.devices or options.hardware, prices)
        if options.budget is not None:
            Bound(float, 0.0, None, "USD", is_low_open=True).take("--budget", options.budget, ConfigError)
        splits = (options.tp,) if "tp" in given else TRIED_TP
        setups, not_tried = _setups(_model(words), names, options, splits)
        answer = size(setups, parse_ask(options.ask), prices=prices, budget_usd_per_hour=options.budget)
        _show_answer(answer, not_tried, options.as_json)
    elif len(_batches(options)) > 1 or any(
        "," in text for text in (*words, options.hardware or "", options.weights or "")
    ):
        refuse_unread("a table of several answers", given, READS["compare"] | {"as_json"})
        _compare(options, words)
    else:
        setup = setup_of(
            _model(words),
            _device(options.hardware),
            weights=options.weights,
            kv=options.kv,
            tp=options.tp,
            stack=options.stack,
            layout=layout_of(options),
            loras=loras_of(options),
        )
        prompt_tokens, batch = _prompt_tokens(options, [setup]), _batches(options)[0]
        _plan(_planned(options, setup, batch, prompt_tokens), options.as_json, options.picture)


def _kind(options: argparse.Namespace) -> str:
    first = options.words[0] if options.words else None
    if options.listing:
        return "--list"
    if first in ("accuracy", "compare"):
        return str(first)
    if options.ask is not None:
        return "--ask"
    return "plan"


def _batches(options: argparse.Namespace) -> list[int]:
    parts = _split(options.batch, "--batch")
    if not parts or not all(part.isascii() and part.isdigit() and len(part) <= 10 for part in parts):
        raise ConfigError(
            f"--batch is {shown(options.batch)}; it must be a number of sequences of at most 10 digits, or several with commas"
        )
    return list(dict.fromkeys(map(int, parts)))


def _prompt_tokens(options: argparse.Namespace, setups: Sequence[Setup]) -> int:
    """Those asked for; else as many as fit all contexts, so that the rows of a table answer one question."""
    if options.prompt is not None:
        return int(options.prompt)
    room = min(setup.model.max_context_tokens for setup in setups) - options.output
    return max(1, min(PROMPT_TOKENS, room))


def _planned(options: argparse.Namespace, setup: Setup, batch: int, prompt_tokens: int) -> Plan:
    question = Question(
        prompt_tokens=prompt_tokens,
        cached_tokens=options.cached,
        output_tokens=options.output,
        batch=batch,
        context_tokens=options.context,
        stall_budget_s=parse_duration_s(options.stall_budget, "stall budget"),
        requests_per_s=parse_rate(options.rate),
        draft_tokens=options.speculate,
        acceptance=options.acceptance,
        draft_cost=options.draft_cost,
    )
    return make_plan(setup, question)


def _plan(plan: Plan, as_json: bool, picture: Path | None) -> None:
    setup, question = plan.setup, plan.question
    extras = {
        "what_if": what_ifs(setup, question),
        "speculation": speculation_advice(setup, question),
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


def _show_answer(answer: Answer, not_tried: dict[str, list[str]], as_json: bool) -> None:
    if as_json:
        print(_module("plan_json").dump({**_module("plan_json").plain(answer), "not_tried": not_tried}))
    else:
        _module("plan_text").show_answer(answer, not_tried)


def _compare(options: argparse.Namespace, words: list[str]) -> None:
    models, names = _split(_model(words), "MODEL"), _split(_device(options.hardware), "--hardware")
    setups = [
        setup_of(
            model,
            name,
            weights=weights,
            kv=options.kv,
            tp=options.tp,
            stack=options.stack,
            layout=layout_of(options),
            loras=loras_of(options),
        )
        for model in models
        for name in names
        for weights in (_split(options.weights, "--weights") or (None,))
    ]
    prompt_tokens = _prompt_tokens(options, setups)
    plans = [_planned(options, setup, batch, prompt_tokens) for setup in setups for batch in _batches(options)]
    if options.as_json:
        print(_module("plan_json").dump({"plans": plans}))
    else:
        _module("plan_text").show_comparison(plans)


def _accuracy(rows_file: Path | None, refit_file: Path | None, as_json: bool, *, is_neutral: bool) -> None:
    """Leave one model out, on the file's rows or on the built-in copy; other rows only help to fit."""
    accuracy, reader = import_module("diptych.cost.fitting.accuracy"), import_module("diptych.cost.fitting.rows")
    text = data_text("published_rows.csv")
    known = reader.read_rows(text)[0]
    if rows_file is not None:
        text = reader.text_of(rows_file)
    rows, left_out = reader.read_rows(text)
    service = accuracy.service_errors(reader.read_service_rows(text))
    if not rows and not service:
        raise ConfigError(f"{rows_file} has no row that describes one timed step on a known device")
    auxiliary = [*reader.read_rows(data_text("auxiliary_rows.csv"))[0], *(row for row in known if row not in rows)]
    forms = import_module("diptych.cost.fitting.forms")
    errors = accuracy.leave_one_model_out(
        rows, auxiliary=auxiliary, forms=forms.NEUTRAL_FORMS if is_neutral else forms.FORMS
    )
    summaries = accuracy.summarise(errors)
    uncovered = accuracy.uncovered(rows)
    holding = []
    if not is_neutral:
        held_out = import_module("diptych.cost.fitting.held_out")
        everything = [*rows, *auxiliary]
        near, far = accuracy.near_rows(accuracy.leave_one_model_out(everything)), held_out.hold_back(everything)
        holding = held_out.check(near, far)
    if refit_file is not None:
        _write_calibrations(refit_file, accuracy.refit(near, far))
    if as_json:
        content = {
            "summaries": summaries,
            "rows": errors,
            "service": service,
            "holding": holding,
            "uncovered": uncovered,
        }
        print(_module("plan_json").dump(content))
    else:
        _module("plan_text").show_accuracy(
            summaries, service, holding, uncovered=len(uncovered), left_out=left_out - len(service)
        )


def _write_calibrations(file: Path, entries: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    try:
        file.write_text(f'{{\n"schema": 1,\n"calibrations": [\n{lines}\n]\n}}\n', "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


def _services(options: argparse.Namespace, given: dict[str, str]) -> None:
    refuse_unread("accuracy --services", given, {"rows", "refit", "services", "as_json"})
    shown = _module("plan_services")
    refits = options.refit is not None
    found = shown.services(options.rows, processes=min(8, os.cpu_count() or 1), refits=refits)
    if refits:
        _write_calibrations(options.refit, found.pop("calibrations"))
    if options.as_json:
        print(_module("plan_json").dump(found))
    else:
        shown.show(found)


def _list(as_json: bool) -> None:
    if as_json:
        formats = {"weights": list(QUANTS), "kv": list(KV_FORMATS)}
        print(
            json.dumps(
                {"models": model_names(), "devices": device_names(), **formats, "stacks": stack_names()}, indent=1
            )
        )
    else:
        _module("plan_text").show_list()


def _setups(
    model: str, names: list[str], options: argparse.Namespace, splits: Sequence[int]
) -> tuple[list[Setup], dict[str, list[str]]]:
    """Every device x format x split that is possible, and what was not tried by reason. Unknown names are errors."""
    found: list[Setup] = []
    not_tried: dict[str, list[str]] = {}
    for name in names:
        for weights in _split(options.weights, "--weights") or list(ASK_WEIGHTS):
            try:
                base = setup_of(model, name, weights=weights, kv=options.kv, stack=options.stack)
                base.model_of_time()
            except NoRate as error:
                not_tried.setdefault(error.message, []).append(f"{weights} on {name}")
                continue
            if weights == "fp8" and "fp8" not in base.hardware.flops_per_s:
                not_tried.setdefault("the device does not multiply in fp8", []).append(base.label)
                continue
            for tp in splits:
                try:
                    found.append(replace(base, tp=tp))
                except ConfigError as error:
                    not_tried.setdefault(error.message, []).append(f"{tp} x {base.label}")
    return found, not_tried


def _model(words: list[str]) -> str:
    if not words:
        return "bundled"
    _no_more(words[1:])
    return words[0]


def _no_more(words: list[str], hint: str | None = None) -> None:
    if words:
        raise ConfigError(f"did not expect {' '.join(words)!r}", hint=hint or "several models are joined with commas")


def _device(hardware: str | None) -> str:
    return hardware or "local"


def _split(text: str | None, what: str) -> list[str]:
    # one that is named twice is one: its row, and its notes, would only be repeated
    parts = list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if text and not parts:
        raise ConfigError(f"{what} is {text!r}; it must name one at least", hint="several are joined with commas")
    return parts


def _module(name: str) -> Any:
    """A sibling that draws or prints, imported only when its output is asked for."""
    return import_module(f"diptych.cli.{name}")


if __name__ == "__main__":
    app()
