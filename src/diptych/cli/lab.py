"""`diptych lab`: every claim about the two phases as a measured experiment; `lab calibrate` measures the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diptych.cli import options
from diptych.cli.options import check_writable, console, engine_config, given, loading_bar, refuse_before
from diptych.cli.tables import page, plain_table
from diptych.cli.written import refuse_unread
from diptych.compute.runner import random_model
from diptych.cost.profile import profile_path
from diptych.cost.setup import BUNDLED
from diptych.engine.load import LoadedModel, bundled_dir, load
from diptych.engine.model_profile import local_predictor, profile_gap
from diptych.ground.bounds import counted
from diptych.ground.clock import MonotonicClock
from diptych.ground.config import BY_TEXT, ComputeConfig, EngineConfig
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.lab.calibrate import USUAL_EFFORT
from diptych.lab.calibrate import calibrate as run_calibration
from diptych.lab.calibration_words import calibration_words
from diptych.lab.experiment import Experiment, Outcome, Stage, Verdict
from diptych.lab.experiments import EXPERIMENTS, QUICK
from diptych.lab.quality import USUAL_TOKENS, measure_quality
from diptych.lab.report import prediction_text
from diptych.lab.rounds import Effort
from diptych.lab.session import LabRun, alone_in, choose
from diptych.lab.simulated import MEASURES, MEDIAN_LIMIT, P99_LIMIT, Compared, chosen, compare
from diptych.models.named import SHAPES

app = options.command_app(invoke_without_command=True)
MOST_ANSWER_TOKENS = 256  # written after the longest prompt
BUNDLED_SHAPE = "bundled"  # for --shape: the bundled model's, with random weights and as many positions as asked for
QUICK_EFFORT = Effort(rounds=2, budget_s=1.0, settled=0.05, long_s=0.5)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
COLOUR = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.WITHHELD: "yellow"}


@app.callback()
def lab(
    context: typer.Context,
    model: options.Model = "bundled",
    shape: options.Shape = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder of the report; results found in it are kept")] = Path(
        "lab-report"
    ),
    only: Annotated[list[str] | None, typer.Option("--only", help="run only this experiment (may be repeated)")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="six experiments in under 40 s, prompts up to 10,000 tokens; without a model on the bundled one's shape",
        ),
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="name the experiments and their claims")] = False,
    longest_tokens: Annotated[int, typer.Option(min=64, help="longest context to go to")] = 10_000,
    repeat: Annotated[
        int, typer.Option(min=2, help="rounds at least: each times every point of an experiment once")
    ] = 5,
    budget: Annotated[
        float, typer.Option(min=0, help="seconds for which an experiment goes on until its medians are settled")
    ] = 12.0,
    backend: options.Backend = "auto",
    weights: options.Weights = "auto",
    calibrate: options.Calibrate = BY_TEXT,
    kv: options.Kv = "auto",
    threads: options.OwnThreads = None,
    numa: options.Numa = "auto",
) -> None:
    """Run the experiments on the two phases and write one page with pictures, a CSV and a JSON."""
    if context.invoked_subcommand is not None:
        refuse_before(context, "lab")
        return
    if show_list:
        refuse_unread("--list", given(context), {"show_list"})
        for one in EXPERIMENTS:
            print(f"{one.name:<22}{one.claim}")
        return
    if quick and only:
        raise ConfigError("--quick chooses the experiments, and so does --only", hint="give one of them")
    if quick:
        written = given(context)
        refuse_unread("--quick", written, written.keys() - {"repeat", "budget"})
    options.refuse_both(context, shape)
    experiments = list(QUICK) if quick else choose(only or [])
    if quick and model == "bundled" and shape is None:
        shape = BUNDLED_SHAPE  # the trained model ends at 4,096 positions
    config = engine_config(backend=backend, weights=weights, calibrate=calibrate, kv=kv, threads=threads, numa=numa)
    options.refuse_text(shape, calibrate)
    check_writable(out / "report.html")
    clock = MonotonicClock()
    begin_s = clock.now_s()
    with alone_in(out), console.status("") as status:
        effort = QUICK_EFFORT if quick else Effort(rounds=repeat, budget_s=budget)
        stage = _stage(model, shape, config, longest_tokens, effort, status.update)
        if stage.cut:
            console.print(stage.cut, style="dim")
            if shape is None:
                console.print(f"--shape {BUNDLED_SHAPE} (random weights) goes to any length", style="dim")
        run = LabRun(stage, out)
        finished: list[str] = []

        def tell(experiment: Experiment, outcome: Outcome) -> None:
            finished.append(experiment.name)
            _print(experiment, outcome)

        try:
            report = run.run(experiments, on_result=tell)
        except KeyboardInterrupt:
            console.print(
                f"stopped by Ctrl-C: {len(finished)} of {len(experiments)} experiments are finished"
                + (f" and in {out / 'report.html'}" if finished else "")
                + "; the same command goes on from there",
                soft_wrap=True,
            )
            raise
    if run.kept:
        console.print(
            f"{len(run.kept)} of {len(experiments)} results were found in {out} and are shown again, not measured: "
            f"{', '.join(run.kept)}; another --out measures them anew",
            soft_wrap=True,
        )
    console.print(f"report: {report} ({clock.now_s() - begin_s:.0f} s)")


@app.command()
def calibrate(
    backend: options.Backend = "auto",
    device: options.Device = "auto",
    threads: options.OwnThreads = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="rounds at least: each times every step once")
    ] = USUAL_EFFORT.rounds,
    out: Annotated[
        Path | None, typer.Option(help="write the profile here instead of where the planner reads it")
    ] = None,
    busy: Annotated[
        bool, typer.Option("--busy", help="keep it though other programs were busy, as a GPU's is")
    ] = False,
) -> None:
    """Measure this machine, or its GPU, in a minute or two; the planner, the reports and the scheduler then use the profile."""
    check_writable(out or profile_path())
    compute = ComputeConfig(backend=backend, device=device, threads=threads)
    with console.status("") as status:
        profile = run_calibration(
            compute,
            progress=status.update,
            effort=replace(USUAL_EFFORT, rounds=repeat),
            path=out,
            takes_busy=busy,
        )
    for line in calibration_words(profile):
        page().print(line)
    page().print(f"written to {out or profile_path(profile['kind'])}")


@app.command()
def quality(
    model: options.Model = "bundled",
    text: Annotated[Path | None, typer.Option(help="held-out text (default: the bundled one)")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=2, help=f"how many tokens of it (default: what memory takes, {USUAL_TOKENS:,} at most)"),
    ] = None,
    calibrate: options.Calibrate = BY_TEXT,
    threads: options.OwnThreads = None,
    as_json: options.AsJsonList = False,
) -> None:
    """Measure what each number format costs: perplexity, divergence from fp32, how often the likeliest token is fp32's."""
    path = text or bundled_dir("heldout.txt")
    try:
        held_out = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the text in {path}: {error}") from error
    with console.status("") as status:
        rows = measure_quality(
            model, held_out, config=engine_config(threads=threads), calibrate=calibrate, n_tokens=tokens,
            progress=status.update,
        )  # fmt: skip
    if as_json:
        print(json.dumps([row.as_json() for row in rows]))
        return
    columns = ("backend", "weights", "KV", "perplexity", "over bf16", "KL to fp32, nats", "same token")
    table = plain_table(escape(f"{model} over {rows[0].tokens:,} tokens of {path.name}"), *columns)
    for row in rows:
        table.add_row(
            row.backend,
            row.weights if row.activations is None else f"{row.weights}, rows of {row.activations}",
            row.kv,
            f"{row.perplexity:.4f}",
            f"{row.perplexity_over_bf16:+z.2%}",
            f"{row.kl_nats:z.6f}",
            f"{row.same_token:.2%}",
        )
    page().print(table)


def _stage(
    model: str, shape: str | None, config: EngineConfig, longest_tokens: int, effort: Effort, progress: options.Say
) -> Stage:
    loaded: LoadedModel | None = None
    if shape is None:
        with loading_bar(f"loading {model}") as bar:
            loaded = load(model, config, progress=bar)
        loaded.must_write("an experiment on decode")
        loaded.model.settle(waits=True)
        name, built = loaded.name, loaded.model
    elif shape in SHAPES or shape == BUNDLED_SHAPE:
        progress(f"packing random weights of {shape}")
        config_file = bundled_dir(BUNDLED) / "config.json"
        settings = SHAPES[shape] if shape in SHAPES else json.loads(config_file.read_text("utf-8"))
        # random weights know no positions, so the table of rotations may be as long as the sweep with its answers
        positions = max(longest_tokens + MOST_ANSWER_TOKENS, settings["max_position_embeddings"])
        raised = settings | {"max_position_embeddings": positions}
        name, built = f"{shape} shape, random weights", random_model(raised, config.compute, seed=0)
    else:
        raise ConfigError(f"no shape {shape!r}", hint=f"known shapes: {', '.join((BUNDLED_SHAPE, *SHAPES))}")
    return Stage(
        model=built,
        name=name,
        config=config,
        loaded=loaded,
        longest_tokens=longest_tokens,
        effort=effort,
        progress=progress,
    )


def _print(experiment: Experiment, outcome: Outcome) -> None:
    verdict = f"[{COLOUR[outcome.verdict]}]{outcome.verdict.value}[/]"
    finding = escape(outcome.finding)  # an error's words may be anything
    console.print(f"[bold]{experiment.title}[/bold] · {verdict}\n  {finding}", markup=True, soft_wrap=True)
    agreement = " · ".join(filter(None, (prediction_text(experiment, outcome), outcome.noise)))
    for line in (agreement, outcome.notes[-1] if outcome.is_noisy else ""):
        if line:
            console.print(f"  {line}", style="dim", highlight=False, soft_wrap=True)


@app.command()
def simulated(
    model: options.Model = "bundled",
    only: Annotated[
        list[str] | None, typer.Option("--only", help="only loads with this in their name (may be repeated)")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="of every load, two runs of the same requests each")] = 5,
    requests: Annotated[int, typer.Option(min=16, help="requests of a run")] = 48,
    threads: options.OwnThreads = None,
    as_json: options.AsJsonList = False,
) -> None:
    """Run the engine under nine loads and simulate the same: equal decisions, and how near the predicted times come."""
    config, situations = engine_config(threads=threads), chosen(only or [])
    with loading_bar(f"loading {model}") as progress:
        loaded = load(model, config, progress=progress)
    loaded.must_write("a load of answers")
    loaded.model.settle(waits=True)
    predictor = local_predictor(loaded.model)
    if predictor is None:
        raise ConfigError(f"no prediction: {profile_gap(loaded.model)}")
    with Progress(*COLUMNS, console=console, transient=True) as bar:
        task = bar.add_task("measuring the capacity", total=(2 + rounds) * len(situations))

        def tell(run: str) -> None:
            bar.update(task, description=f"running and simulating: {run}", advance=1)

        found = list(
            compare(loaded.model, predictor, n_requests=requests, rounds=rounds, situations=situations, told=tell)
        )
    if as_json:
        print(json.dumps([one.as_json() for one in found], indent=1))
        return
    _print_compared(found)


def _apart(one: Compared, measure: str) -> str:
    share = one.apart(measure)
    return "-" if share is None else f"{share:.1%}"


def _interval(one: Compared, measure: str) -> str:
    ratio = one.ratio(measure)
    return f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f}"


def _print_compared(found: list[Compared]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("load", "plans", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "verdict"):
        table.add_column(name, justify="left" if name == "load" else "right", no_wrap=name == "load", overflow="fold")
    for one in found:
        decisions = "differ" if one.differences else "same"
        for by_profile, name in ((False, one.situation.name), (True, "  by the profile alone")):
            errors = [f"{one.error(measure, by_profile=by_profile):+.1%}" for measure in MEASURES]
            verdict = one.verdict(by_profile=by_profile)
            table.add_row(name, "" if by_profile else decisions, *errors, f"[{COLOUR[verdict]}]{verdict.value}[/]")
            if not by_profile:
                table.add_row("", "95 %", *(_interval(one, measure) for measure in MEASURES), style="dim")
        apart = [_apart(one, measure) for measure in MEASURES]
        aside = f"{one.set_aside} again" if one.set_aside else ""
        table.add_row("  engine misses itself by", "", *apart, aside, style="dim")
    page().print(table, soft_wrap=False)
    print("errors are simulated / measured - 1, with step times of a ladder around each run; then by the profile alone")
    print("95 %: the interval of that median in percent; a miss whose interval reaches the goal is not judged")
    print("steps, means over all: measured, and predicted / measured - 1 (by the profile alone)")
    for one in found:
        for phase, words in ((Phase.DECODE, "decode"), (Phase.PREFILL, "prompts")):
            parts, alone = (one.parts(by_profile=by_profile).phases[phase] for by_profile in (False, True))
            if parts.steps:
                times = ", ".join(
                    f"{name} {1e3 * part.measured_s / parts.steps:.2f} ms {part.error:+.1%} ({profile.error:+.1%})"
                    for name, part, profile in (
                        ("kernels", parts.kernels, alone.kernels),
                        ("host", parts.host, alone.host),
                        ("both", parts.total, alone.total),
                    )
                )
                print(f"  {one.situation.name}: {words}, {counted(parts.steps, 'step')}, {times}")
    counts = [sum(one.verdict(by_profile=by_profile) is Verdict.HOLDS for one in found) for by_profile in (False, True)]
    print(
        f"{counts[0]} of {len(found)} hold, {counts[1]} by the profile alone: "
        f"the same decisions, within {MEDIAN_LIMIT:.0%} at p50 and {P99_LIMIT:.0%} at p99"
    )
