"""`diptych plan MODEL --users 1000`: how many devices a number of people needs, and what limits them.

    diptych plan llama-3.1-8b --users 1000 --think 30s --turns 8 --slo ttft=1s,tpot=80ms --hardware l40s,a100,h100

The simulator, searched (`diptych.sim.search`). Neither torch nor numpy is loaded, matplotlib only for --picture.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.cli.layouts import devices_of, layout_of, layout_options, prices_of, table_name
from diptych.cli.plan_json import dump
from diptych.cli.simulate import MAX_USERS, limits_of, seconds
from diptych.cli.users_text import as_json, show
from diptych.cli.written import errors_told
from diptych.cost.profile import LOCAL
from diptych.cost.roofline import NoRate
from diptych.cost.setup import Setup, setup_of
from diptych.cost.sizing import TRIED_TP
from diptych.cost.tables import device_spec
from diptych.ground.bounds import Bound, shown
from diptych.ground.errors import ConfigError
from diptych.lab.pictures import check_picture
from diptych.sim.capacity import Ask
from diptych.sim.link import parse_link
from diptych.sim.load import usual_context
from diptych.sim.pools import Pool
from diptych.sim.search import PriceOf, search
from diptych.workload import LengthRange


def app(args: Sequence[str] | None = None, prog_name: str = "diptych plan") -> None:
    """Run the command. Exit code 2 on an error of input, said on standard error."""
    options = _parser(prog_name).parse_args(args)
    with errors_told():
        _answer(options)


def _parser(prog_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name,
        description="How many devices a number of users needs: the simulator, searched.",
        usage=f"{prog_name} MODEL --users 1000 --think 30s --turns 8 --slo ttft=1s,tpot=80ms [--hardware A,B,C] [options]",
    )
    add = parser.add_argument
    add("model", nargs="?", default="bundled", metavar="MODEL", help="a name, a config.json, a folder, or `bundled`")
    add("--users", type=int, required=True, metavar="N", help="people who each wait for their answer, think, and go on")
    add("--think", default="30s", metavar="TIME", help="mean time between an answer and the next message (default 30s)")
    add("--turns", type=int, default=8, metavar="N", help="messages of a conversation (default 8)")
    add("--prompt", default="50:350", metavar="N[:M]", help="tokens of a message, uniform (default 50:350)")
    add("--output", default="50:400", metavar="N[:M]", help="tokens of an answer, uniform (default 50:400)")
    add("--shared-prefix", type=int, default=200, metavar="N", help="tokens before every conversation (default 200)")
    add("--slo", default="ttft=1s,tpot=80ms", metavar="LIMITS", help="of a good request (default ttft=1s,tpot=80ms)")
    add("--share", type=float, default=0.95, metavar="S", help="of requests that must be good (default 0.95)")
    add("--hardware", "-d", metavar="NAME[,NAME]", help="devices to choose from (default: all with a price)")
    add("--weights", "-w", metavar="FORMAT", help="weight format (default bf16, with `local` a quantised file's own)")
    add("--kv", default="bf16", metavar="FORMAT", help="KV cache format (default bf16)")
    add("--tp", metavar="N[,N]", help="devices that share one copy (default: 1, 2, 4 and 8 are tried)")
    layout_options(parser)
    add("--stack", metavar="NAME", help="software whose fitted constants to use (see `diptych plan --list`)")
    add("--link", default="50GB/s,10us", metavar="RATE[,TIME]", help="between two pools (default 50GB/s,10us)")
    add("--price", action="append", metavar="NAME=USD", help="price per hour of one device; may be repeated")
    add("--processes", type=int, metavar="N", help="simulations at one time (default: the cores); changes no number")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and think times")
    add("--json", dest="as_json", action="store_true", help="print JSON")
    add("--picture", type=Path, metavar="FILE", help="also write a picture (.png, .svg, .pdf)")
    return parser


def _answer(options: argparse.Namespace) -> None:
    check_picture(options.picture)
    Bound(int, 1, MAX_USERS, "users").take("--users", options.users, ConfigError)
    ask = Ask(
        n_users=options.users,
        think_s=seconds(options.think, "think time"),
        turns=options.turns,
        message=LengthRange.parse(options.prompt, "--prompt"),
        output=LengthRange.parse(options.output, "--output"),
        limits=limits_of(options.slo),
        system_tokens=options.shared_prefix,
        good_share=options.share,
        seed=options.seed,
    )
    prices = prices_of(options.price)
    names = devices_of(options.hardware, prices)
    price_of, unit = _price_of(names, prices)
    pools, left_out = _candidates(options, names, ask)
    processes = _cores() if options.processes is None else options.processes
    with _progress() as tell:
        found = search(ask, pools, link=parse_link(options.link), price_of=price_of, processes=processes, tell=tell)
        picture = options.picture
        points = None
        if picture is not None:
            pareto = import_module("diptych.sim.pareto")
            points = pareto.sweep(ask, pools, found, processes=processes, tell=tell)
    if options.as_json:
        print(dump(as_json(found, unit, left_out, points)))
    else:
        show(found, unit, left_out)
    if picture is not None:  # last, so that one that cannot be written costs no answer
        import_module("diptych.cli.users_picture").draw(found, points, picture)
        print(f"picture: {picture}", file=sys.stderr)


def _candidates(options: argparse.Namespace, names: list[str], ask: Ask) -> tuple[list[Pool], dict[str, str]]:
    """Every device and split that can hold the model, and why the others cannot."""
    context = usual_context(ask.load(1, 1))
    splits, layout = TRIED_TP if options.tp is None else _degrees(options.tp), layout_of(options)
    pools: list[Pool] = []
    left_out: dict[str, ConfigError] = {}
    for name in names:
        try:
            base = setup_of(
                options.model, name, weights=options.weights, kv=options.kv, stack=options.stack, of_services=True
            )
        except NoRate as error:
            left_out[name] = error
            continue
        before = len(pools)
        for tp in splits:
            try:
                setup = replace(base, tp=tp, layout=layout)
                pools.append(Pool.of(setup, context_tokens=context, block_tokens=ask.block_tokens))
            except ConfigError as error:
                left_out.setdefault(base.label, error)
        if len(pools) > before:
            left_out.pop(base.label, None)
    if not pools:
        errors = left_out.values()
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        raise ConfigError("; ".join(error.message for error in errors), hint="; ".join(hints) or None)
    return pools, {label: error.message for label, error in left_out.items()}


def _cores() -> int:
    return min(8, os.cpu_count() or 1)


def _degrees(text: str) -> tuple[int, ...]:
    """Whole numbers from "1,2,4"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 10 and int(part) for part in parts):
        raise ConfigError(f"--tp is {shown(text)}; it must be whole numbers of at least 1, with commas")
    return tuple(int(part) for part in parts)


def _price_of(names: list[str], prices: Mapping[str, float]) -> tuple[PriceOf, str]:
    """What one device costs, and in what: USD per hour where all prices are known, else every device counts 1."""
    known = dict(prices)
    for name in map(table_name, names):
        usd = None if name in LOCAL else device_spec(name).usd_per_hour
        if usd is not None:
            known.setdefault(name, usd)
        elif name not in known:
            return lambda setup: 1.0, "devices"

    def price_of(setup: Setup) -> float:
        return known[setup.hardware.name]

    return price_of, "USD an hour"


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object] | None]:
    """A bar over the stages of the search on standard error; none where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("searching", total=None)
        yield lambda words, done, of: bar.update(task, completed=done, total=of, description=f"simulating: {words}")
