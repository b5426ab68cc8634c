"""What the pages of arithmetic commands share: a console that leaves closed pipes alone, plain tables, numbers for people."""

from __future__ import annotations

import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


PIPED_COLUMNS = 120  # width of tables that go to a file or a pipe


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave a closed pipe (`diptych plan ... | head`) to the one handler of all commands; rich would exit 1."""
        raise


def page() -> Console:
    """Standard output, as wide as the terminal."""
    width = None if sys.stdout.isatty() else PIPED_COLUMNS
    return _Console(highlight=False, soft_wrap=True, width=width)


def amount(value: float) -> str:
    """A number with a decimal prefix: 29.69 T."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.4g} "


def duration(seconds: float | None) -> str:
    """A time in the unit that reads best."""
    if seconds is None or seconds == float("inf"):
        return "-"
    if seconds >= 1.0:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def plain_table(title: str, *columns: str) -> Table:
    """Left the names, right the numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0, overflow="fold")
    return made
