"""`diptych explain --request ID --what-if ...`: one request's times, had one thing been different."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from diptych.cli.asked import client_of, fields_of
from diptych.cost.setup import setup_of
from diptych.ground.bounds import counted
from diptych.ground.config import AS_STORED
from diptych.ground.errors import ConfigError
from diptych.sim.counterfactual import USUAL_CHANGES, Change, Machine, what_if
from diptych.sim.journal import is_journal, journal_minutes
from diptych.sim.recorded import minutes_of


def asked_of_server(request: str, changes: list[str], *, url: str, key: str | None) -> dict[str, Any]:
    """A server's answer about one of its last requests. ConfigError where it has none."""
    for change in changes:
        Change.parse(change)
    path = f"/v1/requests/{quote(request, safe='')}/what-if"
    with client_of(url, key, hint="give --url of the server, or --recording FILE") as client:
        answer = client.get(path, params={"change": changes} if changes else None)
        return fields_of(answer, url, "id", "measured", "outcomes")


def asked_of_recording(
    request: str, changes: list[str], *, recording: Path, model: str, weights: str
) -> dict[str, Any]:
    """The same of a recording; model and weights are what another device is priced with."""
    setup = setup_of(model, "h100-80gb-sxm", weights="bf16" if weights in AS_STORED else weights)
    machine = Machine(model=setup.model, quant=setup.quant, kv=setup.kv)
    wanted = [Change.parse(change) for change in changes or USUAL_CHANGES]
    if is_journal(recording):
        minutes, name = journal_minutes(recording, request, machine=machine)
        return {"id": request} | what_if(minutes, name, wanted)
    try:
        with recording.open(encoding="utf-8") as file:
            minutes = minutes_of(iter(file), name=recording.name, machine=machine)
    except OSError as error:
        raise ConfigError(f"cannot read {recording}: {error.strerror}") from None
    return {"id": request} | what_if(minutes, request, wanted)


def text_of(found: dict[str, Any]) -> str:
    """A table: measured, run again, and one line per change."""
    cells = ("queue_ms", "prefill_ms", "ttft_ms", "tpot_ms")
    rows = [{"words": "measured"} | found["measured"], *found["outcomes"]]
    width = max(len(row["words"]) for row in rows) + 1  # with the usual changes the lines have 78 characters
    lines = [
        f"request {found['id']}: {found['prompt_tokens']} prompt tokens; "
        f"{counted(found['requests'], 'request')} and {counted(found['steps'], 'step')} are remembered",
        f"  {'':<{width}}{'queue':>10}{'prefill':>10}{'TTFT':>10}{'TPOT':>10}{'cached':>8}",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"  {row['words']:<{width}} {row['error']}")
        else:
            times = "".join(f"{_ms(row[name]):>10}" for name in cells)
            lines.append(f"  {row['words']:<{width}}{times}{row['cached_tokens']:>8}")
    notes = {f"{row['words']}: {row['note']}" for row in found["outcomes"] if row.get("note")}
    again, measured = found["outcomes"][0], found["measured"]
    off = [
        f"{name} is {again[key] / measured[key] - 1.0:+.0%}"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"))
        if measured[key] and again.get(key) is not None
    ]
    if off:
        lines.append(f"run again as it was, {' and '.join(off)} off what was measured; trust the others as far")
    return "\n".join([*lines, *sorted(notes)])


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"
