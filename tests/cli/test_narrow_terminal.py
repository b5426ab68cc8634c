"""What a terminal of 80 columns shows: tables whose numbers stay whole, and text that breaks between words."""

from __future__ import annotations

import re
import sys
from io import StringIO

import pytest
from rich.console import Console

from diptych.cli.plan import app as plan
from diptych.cli.simulate import app as simulate
from diptych.cli.tables import plain_table

COLUMNS = 80


def lines_of(console_columns: int, *rows: tuple[str, ...]) -> list[str]:
    """A plain table's lines, the headings left out."""
    table = plain_table("", "setup of it", "largest batch", "time", "rate", "why")
    for row in rows:
        table.add_row(*row)
    out = StringIO()
    Console(file=out, width=console_columns).print(table)
    text = out.getvalue()
    assert all(len(line) <= console_columns for line in text.splitlines())
    return [line for line in text.partition("\u2500 \n")[2].splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (100, [" a-13b bf16 on l40s-x    1,234   37.5 ms (23.4-63.5)   8.12 T   not in memory "]),
        (72, [" a-13b bf16 on l40s-x   1,234 37.5 ms (23.4-63.5) 8.12 T not in memory "]),
        (60, [" a-13b bf16 on l40s-x   1,234     37.5 ms 8.12 T not in ", " (23.4-63.5) memory "]),
    ],
)
def test_numbers_stay_whole(columns: int, lines: list[str]) -> None:
    """They were cut wherever the column ended: "25.77 / T", "strea / ms"."""
    found = lines_of(columns, ("a-13b bf16 on l40s-x", "1,234", "37.5 ms (23.4-63.5)", "8.12 T", "not in memory"))
    assert [" ".join(line.split()) for line in found] == [" ".join(line.split()) for line in lines]


def test_a_name_breaks_before_it_is_cut() -> None:
    """And nothing of it is lost."""
    found = lines_of(44, ("a-13b bf16 on l40s-x", "1,234", "37.5 ms (23.4-63.5)", "8.12 T", "never"))
    assert "".join(line[:12] for line in found).split() == ["a-13b", "bf16", "on", "l40s-x"]
    assert any("37.5 ms" in line for line in found)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "llama-3.1-8b", "-d", "h100-sxm", "-b", "8"],
        ["plan", "compare", "llama-3.1-8b", "-d", "h100-sxm,l40s", "-b", "1,8"],
        ["simulate", "llama-3.1-8b", "-d", "l40s", "--rate", "4/s", "--requests", "20"],
    ],
)
def test_pages_fit_a_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    {"plan": plan, "simulate": simulate}[words[0]](words[1:])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "e+0" not in text
    for unit in ("ms", "T", "G", "GB", "s"):
        assert f" {unit} " not in {f" {' '.join(line.split())} " for line in text.splitlines()}, (
            "a unit alone in a line"
        )


@pytest.mark.parametrize(("columns", "is_fitted"), [(60, True), (30, False)])
def test_tables_of_narrower_terminals_fit_where_their_words_do(
    columns: int, is_fitted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were 71 columns wide at 60, and the terminal cut each row. Where no table can be had, rows are whole as before."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    simulate(["llama-3.1-8b", "-d", "l40s", "--rate", "4/s", "--requests", "20"])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).splitlines()
    begin = next(number for number, line in enumerate(lines) if "\u2500" in line)
    rows = lines[begin - 1 : next(number for number, line in enumerate(lines) if line.startswith(" end to end")) + 1]
    assert len(rows) > 6
    assert (max(map(len, rows)) <= columns) is is_fitted
    assert "time to first token" in "\n".join(rows)
