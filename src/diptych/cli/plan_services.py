"""`diptych plan accuracy --services`: published services, simulated with constants that did not see their model or device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from diptych.cli.tables import page, plain_table
from diptych.cost.fitting.rows import read_service_rows, text_of
from diptych.cost.fitting.services import MeasuredService, is_deployments, of_published, read_deployments
from diptych.cost.tables import data_text
from diptych.ground.bounds import counted
from diptych.sim.service_fits import refit_services
from diptych.sim.truth import Case, Judged, cases_of, judge, possible, summarise_services
from diptych.sim.workers import Mapped, workers

GROUPS = ("measure", "software", "device", "model", "weights", "layout", "streams", "lengths", "pool")
SHIPPED = "service_rows.csv"
Tell = Callable[[str, int, int], object]  # what is done, how much of it, of how much


def services(rows_file: Path | None, *, processes: int = 1, refits: bool = False) -> dict[str, Any]:
    """Judge the rows of a file (or the built-in ones); built-in rows help to fit. processes: they change no number.

    refits: with the constants of all rows, as "calibrations".
    """
    left_out: Counter[str] = Counter()
    shipped = [
        *read_deployments(data_text(SHIPPED))[0],
        *of_published(read_service_rows(data_text("published_rows.csv"))),
    ]
    if rows_file is None:
        rows, left_out = read_deployments(data_text(SHIPPED))
        rows += of_published(read_service_rows(data_text("published_rows.csv")))
    else:
        rows, left_out = _of_file(rows_file)
    known = set(rows)
    with workers(processes) as mapped, _progress() as tell:
        targets = _cases(rows, left_out, mapped, tell)
        others = _cases([row for row in shipped if row not in known], Counter(), mapped, tell)
        judged = {
            held_out: judge(targets, others, held_out=held_out, told=_fits(tell, held_out), mapped=mapped)
            for held_out in ("model", "device")
        }
        refitted = {"calibrations": refit_services([*targets, *others], judged["model"])} if refits else {}
    seen = {id(one.case) for one in judged["model"]}
    left_out["software without a form, or with one model"] += sum(id(case) not in seen for case in targets)
    return {
        "groups": {name: summarise_services(found, by=GROUPS) for name, found in judged.items() if found},
        "rows": [_row(one) for found in judged.values() for one in found],
        "left_out": dict(+left_out),
    } | refitted


def _fits(tell: Tell, held_out: str) -> Tell:
    return lambda words, done, of: tell(f"fits without a {held_out}: {words}", done, of)


def _of_file(path: Path) -> tuple[list[MeasuredService], Counter[str]]:
    text = text_of(path)
    if is_deployments(text):
        return read_deployments(text)
    return of_published(read_service_rows(text)), Counter()


def _cases(rows: Sequence[MeasuredService], left_out: Counter[str], mapped: Mapped, tell: Tell) -> list[Case]:
    cases = cases_of(rows, mapped=mapped, told=lambda done, of: tell("the scheduler under their loads", done, of))
    found = [case for case in cases if case is not None]
    left_out["a split or a pool that the device does not have"] += len(rows) - len(found)
    believed = possible(found)
    left_out["faster than the devices' peaks, or of a series with such rows"] += len(found) - len(believed)
    return believed


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on standard error over what is simulated, then over the fits."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda words, done, of: bar.update(task, completed=done, total=of, description=words)


def _row(one: Judged) -> dict[str, Any]:
    row = one.case.row
    return {
        "software": row.stack,
        "version": row.version,
        "label": row.label,
        "measure": one.measure,
        "held_out": one.held_out,
        "measured": one.measured,
        "predicted": one.predicted,
        "low": one.low,
        "high": one.high,
        "source": row.source,
    }


def show(found: dict[str, Any]) -> None:
    """Tables by what was left out."""
    console = page()
    for held_out, groups in found["groups"].items():
        title = f"services, simulated with constants fitted without the row's {held_out}"
        table = plain_table(title, "rows of", "numbers", "median error", "p90", "bias", "held by the interval")
        for one in groups:
            name = "[bold]all[/bold]" if one.by == "all" else f"{one.by}: {escape(one.group)}"
            cells = f"{one.median:.1%}", f"{one.p90:.0%}", f"{one.bias:+.0%}", f"{one.held:.0%}"
            table.add_row(name, f"{one.rows:,}", *cells)
        console.print(table)
    for reason, n_rows in sorted(found["left_out"].items(), key=lambda item: -item[1]):
        console.print(f"not used, {counted(n_rows, 'row')}: {reason}")
