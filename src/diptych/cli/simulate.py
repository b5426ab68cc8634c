"""`diptych simulate`: what a service would have answered a load, by the engine's own scheduler on a virtual clock.

    diptych simulate llama-3.1-8b --hardware h100-80gb-sxm --engines 2 --trace azure.csv --slo ttft=1s,tpot=80ms
    diptych simulate llama-3.1-8b --hardware l40s --rate 3/s --prompt 200:1800 --output 50:400
    diptych simulate llama-3.1-8b --hardware l40s --users 50 --think 30s --turns 8 --prompt 40:160 --output 100:400
    diptych simulate llama-3.1-8b --hardware l40s --engines 4 --prefill-hardware h100 --link 50GB/s,10us --rate 12/s

No tensor is computed; neither torch nor numpy is loaded, matplotlib only for --picture.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diptych.cli.layouts import layout_of, layout_options, lora_option, loras_of
from diptych.cli.plan_json import dump
from diptych.cli.simulate_text import as_json, show
from diptych.cli.written import errors_told, refuse_unread, written
from diptych.control.router import POLICIES
from diptych.cost.kv_bytes import state_bytes
from diptych.cost.setup import setup_of
from diptych.cost.sizing import parse_duration_s, parse_rate
from diptych.ground.bounds import Bound, counted
from diptych.ground.errors import ConfigError
from diptych.lab.pictures import check_picture
from diptych.metrics import Limits
from diptych.sim.drafts import StatedDrafts
from diptych.sim.journal import is_journal, journal_load
from diptych.sim.link import parse_link
from diptych.sim.load import MOST_PROMPT_TOKENS, AdaptedLoad, Load, OpenLoad, UsersLoad, UsersSpec, usual_context
from diptych.sim.pools import LOCAL_PREFILL_S, Pool, Service
from diptych.sim.recorded import is_recording, recorded_load
from diptych.sim.service import simulate
from diptych.workload import LengthRange, WorkloadSpec, open_trace

MAX_REQUESTS = 10_000_000
MAX_USERS = 1_000_000

_SERVICE = {
    "hardware", "weights", "kv", "tp", "stack", "engines", "router", "kv_tokens", "block_tokens", "max_step_tokens",
    "max_running_sequences", "stall_budget", "no_prefix_cache", "slo", "usd_per_hour", "as_json", "picture", "seed",
    "prefill_hardware", "prefill_engines", "prefill_tp", "link", "local_prefill", "cells", "processes", "steps",
    "speculate", "acceptance", "draft_cost", "ep", "pp", "dp_attention", "prefills_alone", "lora",
}  # fmt: skip
_LENGTHS = {"requests", "prompt", "output", "shared_prefix"}
# what each kind of load reads, beside the service's: any other option given with it is refused
READS = {
    "trace": {"trace", "limit", "speed"},
    "rate": {"rate", "burstiness", "prefixes"} | _LENGTHS,
    "users": {"users", "think", "turns"} | _LENGTHS,
}


def app(args: Sequence[str] | None = None, prog_name: str = "diptych simulate") -> None:
    """Run the command. Exit code 2 on an error of input, said on standard error."""
    parser = _parser(prog_name)
    options = parser.parse_args(args)
    with errors_told():
        kinds = [kind for kind in READS if getattr(options, kind) is not None]
        if len(kinds) != 1:
            given = " and ".join(f"--{kind}" for kind in kinds) or "none"
            raise ConfigError(f"a load is one of --trace, --rate and --users; given: {given}")
        given_options = written(_parser(prog_name), args)
        refuse_unread(f"--{kinds[0]}", given_options, READS[kinds[0]] | _SERVICE)
        for is_read, words, names in (
            (options.speculate is not None, "a service without --speculate", {"acceptance", "draft_cost"}),
            (options.shared_prefix > 0, "a load without --shared-prefix", {"prefixes"}),
            (options.cells != 1, "a service of one cell", {"processes"}),
            (not options.prefills_alone, "--prefills-alone", {"stall_budget"}),
            (kinds[0] != "trace" or options.speculate is not None, "a trace without --speculate", {"seed"}),
        ):
            if not is_read:
                refuse_unread(words, given_options, given_options.keys() - names)
        _simulate(options, kinds[0])


def _parser(prog_name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog_name,
        description="What a service would answer a load: the engine's scheduler, with predicted step times.",
        usage=f"{prog_name} MODEL --hardware NAME --trace FILE [options]\n"
        f"       {prog_name} MODEL --hardware NAME --rate 3/s --prompt 200:1800 --output 50:400 [options]\n"
        f"       {prog_name} MODEL --hardware NAME --users 50 --think 30s --turns 8 [options]",
    )
    add = parser.add_argument
    add("model", nargs="?", default="bundled", metavar="MODEL", help="a name, a config.json, a folder, or `bundled`")
    add("--hardware", "-d", default="local", metavar="NAME", help="device name, or `local` (default): as calibrated")
    add("--weights", "-w", metavar="FORMAT", help="weight format (default bf16, with `local` a quantised file's own)")
    add("--kv", default="bf16", metavar="FORMAT", help="KV cache format (default bf16)")
    add("--tp", type=int, default=1, metavar="N", help="devices that share one copy of the model")
    layout_options(parser)
    lora_option(parser)
    add("--stack", metavar="NAME", help="software whose fitted constants to use (see `diptych plan --list`)")
    add("--engines", type=int, default=1, metavar="N", help="copies of the model behind the router")
    add("--router", default="least-delay", metavar="NAME", help=" | ".join(POLICIES))
    add("--prefill-hardware", metavar="NAME", help="device of a pool of its own that reads prompts for --engines")
    add("--prefill-engines", type=int, metavar="N", help="copies of the model in that pool (default 1)")
    add("--prefill-tp", type=int, metavar="N", help="devices that share one copy there (default: --tp)")
    add("--link", metavar="RATE[,TIME]", help="what carries keys and values between the pools, such as 50GB/s,10us")
    add("--local-prefill", metavar="TIME", help="read a prompt where it is answered if that takes no longer (30ms)")
    add("--cells", type=int, default=1, metavar="N", help="equal parts of service and load with a router of their own")
    add("--processes", type=int, default=1, metavar="N", help="cells simulated at one time; changes no number")
    add("--kv-tokens", type=int, metavar="N", help="tokens of an engine's KV pool (default: what the memory holds)")
    add("--block-tokens", type=int, default=32, metavar="N", help="tokens of a KV block")
    add("--max-step-tokens", type=int, default=2048, metavar="N", help="most tokens of one step")
    add("--prefills-alone", action="store_true", help="prompts in steps of their own, before decode (as SGLang)")
    add("--max-running-sequences", type=int, metavar="N", help="sequences that run at one time (default: the engine's)")
    add("--stall-budget", metavar="TIME", help="longest step while others decode (default: no limit)")
    add("--no-prefix-cache", action="store_true", help="find no prefix again")
    add("--speculate", type=int, metavar="N", help="draft at most N tokens per sequence and step, as many as pay")
    add("--acceptance", type=float, default=0.7, metavar="A", help="chance that a drafted token is right")
    add("--draft-cost", type=float, default=0.05, metavar="C", help="cost of one drafted token, in decode steps")
    add("--slo", metavar="LIMITS", help="what counts for goodput, such as ttft=1s,tpot=80ms,e2e=30s")
    add("--usd-per-hour", type=float, metavar="USD", help="price of one device (default: the device's, if known)")
    add("--trace", type=Path, metavar="FILE", help="Azure CSV, Mooncake JSONL, or a recording of ours")
    add("--limit", type=int, metavar="N", help="only the trace's first N requests")
    add("--speed", type=float, default=1.0, metavar="X", help="play the trace X times as fast")
    add("--rate", metavar="R", help="requests per second, such as 3/s or 40/min")
    add("--burstiness", type=float, default=1.0, metavar="K", help="shape of the gamma gaps; 1 is Poisson")
    add("--prefixes", type=int, default=1, metavar="N", help="how many shared prefixes there are")
    add("--users", type=int, metavar="N", help="people who each wait for their answer, think, and go on")
    add("--think", default="30s", metavar="TIME", help="mean time between an answer and the next message (default 30s)")
    add("--turns", type=int, default=8, metavar="N", help="messages of a conversation (default 8)")
    add("--requests", type=int, default=1000, metavar="N", help="requests in all (default 1000)")
    add(
        "--prompt",
        default="200:1800",
        metavar="N[:M]",
        help="tokens of a prompt or message, uniform (default 200:1800)",
    )
    add("--output", default="50:400", metavar="N[:M]", help="tokens of an answer, uniform (default 50:400)")
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens that stand before every prompt or conversation",
    )
    add("--steps", type=Path, metavar="FILE", help="also write the first engine's first minute for the live page")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and think times")
    add("--json", dest="as_json", action="store_true", help="print JSON")
    add("--picture", type=Path, metavar="FILE", help="also write a picture (.png, .svg, .pdf)")
    return parser


def _simulate(options: argparse.Namespace, kind: str) -> None:
    check_picture(options.picture)
    setup = setup_of(
        options.model,
        options.hardware,
        weights=options.weights,
        kv=options.kv,
        tp=options.tp,
        stack=options.stack,
        layout=layout_of(options),
        loras=loras_of(options),
        of_services=True,
    )
    limits = limits_of(options.slo)
    usd = options.usd_per_hour
    if usd is not None:
        usd = Bound(float, 0.0, None, "USD").take("--usd-per-hour", usd, ConfigError)
    load, note = _load(options, kind)
    context = usual_context(load)
    if setup.loras is not None:
        load = AdaptedLoad(load, setup.loras, setup.loras.parameters(setup.model))
    budget = options.stall_budget
    # a cache that would find nothing only costs time, but where sequences have states it says how many of them run at one time
    is_cached = load.shares_prefixes or state_bytes(setup.model) > 0
    pool = Pool.of(
        setup,
        n_engines=options.engines,
        kv_tokens=options.kv_tokens,
        context_tokens=context,
        block_tokens=options.block_tokens,
        max_step_tokens=options.max_step_tokens,
        max_running_sequences=options.max_running_sequences,
        stall_budget_s=None if budget is None else parse_duration_s(budget, "stall budget"),
        enable_prefix_cache=is_cached and not options.no_prefix_cache,
        prefills_alone=options.prefills_alone,
        drafts=_drafts(options),
    )
    service = _service(options, pool, context)
    with _progress(load.n_requests) as tell, _written(options.steps) as film:
        report = simulate(
            service,
            load,
            limits=limits,
            usd_per_hour=usd,
            seed=options.seed,
            cells=options.cells,
            processes=options.processes,
            film=film,
            progress=tell,
        )
    if options.as_json:
        print(dump(as_json(report, note)))
    else:
        show(report, note)
    if options.picture is not None:  # last, so that one that cannot be written costs no answer
        import_module("diptych.cli.simulate_picture").draw(report, options.picture)
        print(f"picture: {options.picture}", file=sys.stderr)


def _service(options: argparse.Namespace, pool: Pool, context_tokens: int) -> Service:
    """One pool, or two where a device that prefills is named."""
    if options.prefill_hardware is None:
        for name in ("prefill_engines", "prefill_tp", "link", "local_prefill"):
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(
                    f"{option} is of a pool that prefills", hint="name its device: --prefill-hardware NAME"
                )
        return Service(pool=pool, router=options.router)
    setup = setup_of(
        options.model,
        options.prefill_hardware,
        weights=options.weights,
        kv=options.kv,
        tp=options.tp if options.prefill_tp is None else options.prefill_tp,
        stack=options.stack,
        layout=layout_of(options),
        loras=loras_of(options),
        of_services=True,
    )
    readers = Pool.of(
        setup,
        n_engines=1 if options.prefill_engines is None else options.prefill_engines,
        context_tokens=context_tokens,
        block_tokens=options.block_tokens,
        max_step_tokens=options.max_step_tokens,
        enable_prefix_cache=pool.scheduler.enable_prefix_cache,
    )
    local = options.local_prefill
    return Service(
        pool=pool,
        router=options.router,
        readers=readers,
        link=None if options.link is None else parse_link(options.link),
        local_prefill_s=LOCAL_PREFILL_S if local is None else seconds(local, "local prefill"),
    )


def seconds(text: str, what: str) -> float:
    """A duration, 0 in any unit included."""
    is_zero = re.fullmatch(r"0+(\.0+)?\s*(us|ms|s|min)?", text.strip().lower())
    return 0.0 if is_zero else parse_duration_s(text, what)


def _drafts(options: argparse.Namespace) -> StatedDrafts | None:
    if options.speculate is None:
        return None
    return StatedDrafts(draft_tokens=options.speculate, acceptance=options.acceptance, draft_cost=options.draft_cost)


def _load(options: argparse.Namespace, kind: str) -> tuple[Load, str]:
    """The load, and what it is in words."""
    if kind == "trace":
        return _trace(options)
    _count("--requests", options.requests, MAX_REQUESTS)
    prompt, output = (LengthRange.parse(getattr(options, name), f"--{name}") for name in ("prompt", "output"))
    lengths = f"prompts of {options.prompt} and answers of {options.output} tokens"
    if kind == "users":
        _count("--users", options.users, MAX_USERS)
        think_s = seconds(options.think, "think time")
        spec = UsersSpec(
            n_users=options.users,
            n_requests=options.requests,
            think_s=think_s,
            turns=options.turns,
            message=prompt,
            output=output,
            system_tokens=options.shared_prefix,
            seed=options.seed,
        )
        return UsersLoad(
            spec
        ), f"{counted(options.users, 'user')}, {options.turns} turns, thinking {options.think}, {lengths}"
    if options.shared_prefix + prompt.high > MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"a prompt may have {options.shared_prefix + prompt.high} tokens; at most {MOST_PROMPT_TOKENS} can be simulated"
        )
    rate = WorkloadSpec(
        n_requests=options.requests,
        prompt=prompt,
        output=output,
        rate_per_s=parse_rate(options.rate),
        burstiness=options.burstiness,
        shared_prefix_tokens=options.shared_prefix,
        n_prefixes=options.prefixes,
        seed=options.seed,
    )
    load = OpenLoad(rate, shares_prefixes=options.shared_prefix > 0)
    return load, f"{rate.rate_per_s:g} requests/s, {lengths}"


def _trace(options: argparse.Namespace) -> tuple[Load, str]:
    path: Path = options.trace
    if options.lora is not None and (is_recording(path) or is_journal(path)):
        raise ConfigError(f"{path.name} is a recording, which names its adapters", hint="leave --lora out")
    if not 0.0 < options.speed < float("inf"):
        raise ConfigError(f"--speed is {options.speed}; it must be greater than 0")
    if options.limit is not None:
        _count("--limit", options.limit, MAX_REQUESTS)
    faster = "" if options.speed == 1.0 else f", {options.speed:g} times as fast"
    if is_recording(path):
        load = recorded_load(path, limit=options.limit, speed=options.speed)
        return load, f"recording {path.name}{faster}"
    if is_journal(path):
        journal = journal_load(path, limit=options.limit, speed=options.speed)
        return journal, f"recording {path.name}{faster}"
    trace = open_trace(path, limit=options.limit)
    _count("requests of the trace", trace.n_requests, MAX_REQUESTS)
    words = f"trace {path.name}{faster}" + (", requests of one tick spread over it" if trace.is_spread else "")
    return OpenLoad(trace, shares_prefixes=trace.shares_prefixes, speed=options.speed), words


def _count(name: str, value: int, most: int) -> None:
    Bound(int, 1, most, name).take(name, value, ConfigError)


def limits_of(text: str | None) -> Limits:
    """Limits from ttft=1s,tpot=80ms,e2e=30s."""
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text is not None else ():
        name, is_pair, value = part.strip().partition("=")
        if not is_pair or name not in ("ttft", "tpot", "e2e") or f"{name}_s" in found:
            raise ConfigError(
                f"cannot read {part.strip()!r} in --slo", hint="for example --slo ttft=1s,tpot=80ms,e2e=30s"
            )
        found[f"{name}_s"] = parse_duration_s(value, name)
    return Limits(**found)


@contextmanager
def _written(path: Path | None) -> Iterator[TextIO | None]:
    """A file to write, if one is named, that takes the place of an older one at the end. ConfigError when it cannot be."""
    if path is None:
        yield None
        return
    is_plain = path.is_file() or not path.exists()  # else a pipe, say
    part = path.with_name(path.name + ".part") if is_plain else path
    try:
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    try:
        with file:
            yield file
        if is_plain:
            part.replace(path)
    finally:
        if is_plain:
            part.unlink(missing_ok=True)


@contextmanager
def _progress(n_requests: int) -> Iterator[Callable[[int, float], object] | None]:
    """A bar over requests on standard error; none where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,} of {task.total:,}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=n_requests)
        yield lambda done, at_s: bar.update(task, completed=done, description=f"simulating, {at_s:,.0f} s")
