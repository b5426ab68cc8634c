"""`diptych bench`: both phases of one model or a named shape against the machine's ceilings; `mix` and `serve` load it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from diptych.cli import options, working
from diptych.cli.bench_serve import serve
from diptych.cli.options import console, engine_config, loading_bar, refuse_before
from diptych.cli.tables import page
from diptych.ground.bounds import counted
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import EngineConfig
from diptych.ground.errors import ConfigError
from diptych.models.named import SHAPES
from diptych.workload import LengthRange, WorkloadSpec

app = options.command_app(invoke_without_command=True)
app.command("serve")(serve)

Repeat = Annotated[int, typer.Option(min=1, help="repetitions; medians are reported")]


@app.callback()
@options.takes(engine=options.BACKEND)
def bench(
    context: typer.Context,
    model: options.Model = "bundled",
    shape: options.Shape = None,
    prompt_tokens: Annotated[str, typer.Option(help="prompt lengths, comma-separated")] = "512",
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens written per sequence")] = 64,
    batch: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1",
    behind: Annotated[
        str, typer.Option(help="tokens that stand before each prompt and are not read, comma-separated: a long context")
    ] = "0",
    repeat: Repeat = 5,
    *,
    engine: dict[str, Any],
    as_json: options.AsJson = False,
) -> None:
    """Measure prefill and decode apart, for each prompt length and batch size."""
    if context.invoked_subcommand is not None:
        refuse_before(context, "bench")
        return
    config = engine_config(**engine)
    options.refuse_both(context, shape)
    name, built, load_s, loaded = _load(model, shape, config)
    lengths, batches = _numbers("--prompt-tokens", prompt_tokens), _numbers("--batch", batch)
    contexts = _numbers("--behind", behind, least=0)
    static = working.StaticBench(built, name=name, load_s=load_s, config=config, loaded=loaded)
    with console.status("measuring") as status:
        report = static.run(
            prompt_tokens=lengths,
            batches=batches,
            behind_tokens=contexts,
            new_tokens=new_tokens,
            repeats=repeat,
            progress=lambda text: status.update(f"measuring {text}"),
        )
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print_static(report)


@app.command()
@options.takes(engine=options.BACKEND)
def mix(
    context: typer.Context,
    model: options.Model = "bundled",
    shape: options.Shape = None,
    requests: Annotated[int, typer.Option(min=1, help="how many requests")] = 32,
    prompt_tokens: Annotated[str, typer.Option(help="LOW:HIGH")] = "64:512",
    new_tokens: Annotated[str, typer.Option(help="LOW:HIGH")] = "64:128",
    rate: Annotated[float | None, typer.Option(help="arrivals per second, Poisson (default: all at once)")] = None,
    seed: Annotated[int, typer.Option(help="of lengths, arrivals and tokens")] = 0,
    repeat: Repeat = 5,
    *,
    engine: dict[str, Any],
    stall_budget_ms: options.StallBudget = None,
    max_running: Annotated[int, typer.Option(help="sequences that run at one time")] = 64,
    max_step_tokens: options.MaxStepTokens = 2048,
    as_json: options.AsJson = False,
) -> None:
    """Run a seeded mixed load offline."""
    config = engine_config(
        stall_budget_ms=stall_budget_ms, max_running_sequences=max_running, max_step_tokens=max_step_tokens, **engine
    )
    if rate is not None and not rate > 0.0:
        raise ConfigError(f"--rate is {rate}; it must be greater than 0")
    spec = WorkloadSpec(
        n_requests=requests,
        prompt=LengthRange.parse(prompt_tokens, "--prompt-tokens"),
        output=LengthRange.parse(new_tokens, "--new-tokens"),
        rate_per_s=rate,
        seed=seed,
    )
    options.refuse_both(context, shape)
    name, built, _, loaded = _load(model, shape, config)
    with console.status("running the mix") as status:
        report = working.run_mix(built, config, spec, name=name, repeats=repeat, progress=status.update, loaded=loaded)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        _print_mix(report)


def _load(
    model: str, shape: str | None, config: EngineConfig
) -> tuple[str, working.Model, float, working.LoadedModel | None]:
    clock = MonotonicClock()
    begin_s = clock.now_s()
    with loading_bar(f"loading {shape or model}") as progress:
        if shape is None:
            loaded = working.load(model, config, progress=progress)
            loaded.must_write("decode")
            loaded.model.settle(waits=True)
            return loaded.name, loaded.model, loaded.load_s, loaded
        options.refuse_text(shape, config.calibrate)
        if shape not in SHAPES:
            raise ConfigError(f"no shape {shape!r}", hint=f"known shapes: {', '.join(SHAPES)}")
        built = working.random_model(SHAPES[shape], config.compute, seed=config.seed)
    return shape, built, clock.now_s() - begin_s, None


def _numbers(name: str, text: str, *, least: int = 1) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < least:
        raise ConfigError(f"{name} is {text!r}; it must be whole numbers of at least {least}, comma-separated")
    return values


def _print_static(report: working.BenchReport) -> None:
    ceilings = report.ceilings
    table = Table(
        box=None,  # nine columns of numbers stand in 80 characters without one
        title=f"{escape(report.model)} · {report.backend} · {report.weights} weights · {counted(report.threads, 'thread')}\n"
        f"ceilings {ceilings.words()} {ceilings.compute_dtype}",
        caption="ceiling: share of what the machine allows, of the roof named; GB/s: read beside each measurement, "
        f"from the {ceilings.roof}; host: share of the time",
    )
    for column in ("phase", "batch", "prompt", "context", "tok/s", "min..max", "ceiling", "GB/s", "host"):
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for point in report.results:
        rate = point.tokens_per_s
        table.add_row(
            point.phase, str(point.batch), str(point.prompt_tokens), str(point.context_tokens), _rate(rate.median),
            f"{_rate(rate.min)}..{_rate(rate.max)}", f"{point.fraction_of_ceiling:.0%}", f"{point.read_bytes_per_s / 1e9:.1f}",
            f"{point.host_fraction:.1%}",
        )  # fmt: skip
    page().print(table, soft_wrap=False)
    for phase, bound in dict.fromkeys((p.phase, p.bound) for p in report.results if p.fraction_of_ceiling > 1.0):
        page().print(f"{phase} above 100%: {working.ABOVE[bound]}")
    page().print(f"load {report.load_s:.2f} s · peak memory {report.peak_rss_bytes / 2**20:.0f} MiB")


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.1f}" if tokens_per_s < 100.0 else f"{tokens_per_s:.0f}"


def _print_mix(report: working.MixReport) -> None:
    rate, ceilings = report.output_tokens_per_s, report.ceilings
    page().print(
        f"{report.model} · {report.backend} · {report.weights} · {counted(report.requests, 'request')} in "
        f"{report.wall_s:.2f} s: "
        f"{rate.median:.1f} output tok/s ({rate.min:.1f}..{rate.max:.1f}), "
        f"{report.total_tokens_per_s.median:.1f} tok/s with prompts; medians of {report.repeats}, ceilings "
        f"{ceilings.words()} {ceilings.compute_dtype}",
        markup=False,
    )
    for name, values in (("TTFT", report.ttft_s), ("ITL", report.itl_s)):
        page().print(f"  {name} " + ", ".join(f"{q} {value * 1e3:.1f} ms" for q, value in values.items()))
