"""`diptych plan accuracy --services`: published services, simulated with constants that did not see their model or device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych.cli.tables import page, plain_table
from diptych.cost.rows import read_service_rows
from diptych.cost.services import MeasuredService, is_deployments, of_published, read_deployments
from diptych.cost.tables import data_text
from diptych.ground.errors import ConfigError
from diptych.sim.truth import Case, Judged, cases_of, judge, possible, summarise_services
from diptych.sim.workers import Mapped, workers

GROUPS = ("measure", "software", "device", "model", "weights", "layout", "streams", "lengths", "pool")
SHIPPED = "service_rows.csv"


def services(rows_file: Path | None, *, processes: int = 1) -> dict[str, Any]:
    """Judge the rows of a file (or the built-in ones); built-in rows help to fit. processes: they change no number."""
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
    with workers(processes) as mapped:
        targets = _cases(rows, left_out, mapped)
        others = _cases([row for row in shipped if row not in known], Counter(), mapped)
        judged = {
            held_out: judge(targets, others, held_out=held_out, told=_tell, mapped=mapped)
            for held_out in ("model", "device")
        }
    _tell("")
    seen = {id(one.case) for one in judged["model"]}
    left_out["software without a form, or with one model"] += sum(id(case) not in seen for case in targets)
    return {
        "groups": {name: summarise_services(found, by=GROUPS) for name, found in judged.items() if found},
        "rows": [_row(one) for found in judged.values() for one in found],
        "left_out": dict(+left_out),
    }


def _of_file(path: Path) -> tuple[list[MeasuredService], Counter[str]]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if is_deployments(text):
        return read_deployments(text)
    return of_published(read_service_rows(text)), Counter()


def _cases(rows: Sequence[MeasuredService], left_out: Counter[str], mapped: Mapped) -> list[Case]:
    cases = cases_of(rows, mapped=mapped, told=lambda n: _tell(f"the scheduler under {len(rows)} loads: {n}"))
    found = [case for case in cases if case is not None]
    left_out["a split or a pool that the device does not have"] += len(rows) - len(found)
    believed = possible(found)
    left_out["faster than the devices' peaks, or of a series with such rows"] += len(found) - len(believed)
    return believed


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text[:78]:<78}", end="\n" if not text else "", file=sys.stderr, flush=True)


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
            name = "[bold]all[/bold]" if one.by == "all" else f"{one.by}: {one.group}"
            cells = f"{one.median:.1%}", f"{one.p90:.0%}", f"{one.bias:+.0%}", f"{one.held:.0%}"
            table.add_row(name, f"{one.rows:,}", *cells)
        console.print(table)
    for reason, n_rows in sorted(found["left_out"].items(), key=lambda item: -item[1]):
        console.print(f"not used, {n_rows} rows: {reason}")
