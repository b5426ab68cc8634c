"""What the pages of arithmetic commands share: a console that leaves closed pipes alone, plain tables, numbers for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


PIPED_COLUMNS = 120  # width of tables that go to a file or a pipe
LEAST_COLUMNS = 80  # where all our tables can be had; some fit into fewer
WHOLE_NUMBER = 9  # characters of a cell that stays whole: a number with its unit
WHOLE_UNIT = 11  # and what may stand beside it, such as an interval


class _Console(Console):
    terminal_columns: int | None = None  # where the terminal is narrower than the page

    def on_broken_pipe(self) -> None:
        """Leave a closed pipe (`diptych plan ... | head`) to the one handler of all commands; rich would exit 1."""
        raise


def page() -> Console:
    """Standard output, as wide as the terminal, where lines break between words; in a file or a pipe lines stay whole.

    So they do in a terminal narrower than LEAST_COLUMNS, which breaks them itself; tables fit it as far as their words do.
    """
    if not sys.stdout.isatty():
        return _Console(highlight=False, soft_wrap=True, width=PIPED_COLUMNS)
    columns = Console().width
    made = _Console(highlight=False, soft_wrap=columns < LEAST_COLUMNS, width=max(columns, LEAST_COLUMNS))
    made.terminal_columns = min(columns, LEAST_COLUMNS)
    return made


class _PlainTable(Table):
    """On a narrow terminal the gaps go, then headings and long cells break between words, then names, at last numbers."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = getattr(console, "terminal_columns", None) or options.max_width
        if self.__rich_measure__(console, options).maximum > min(widest, options.max_width):
            self.padding = 0
            beside = len(self.columns) + 1
            # where a narrow terminal has no room for its words and numbers, the table is as wide as the page
            if not self._fit(console, widest - beside):
                self._fit(console, options.max_width - beside)
        yield from super().__rich_console__(console, options)

    def _fit(self, console: Console, room: int) -> bool:
        """Set the widths; False where nothing that is whole fits."""
        columns = [
            [console.render_str(str(cell)).plain for cell in (column.header, *column.cells)] for column in self.columns
        ]
        for whole, whole_name in (
            (WHOLE_NUMBER + WHOLE_UNIT, True),
            (WHOLE_NUMBER, True),
            (WHOLE_NUMBER, False),
            (0, False),
        ):
            widths = [
                _least_width(cells, room if place == 0 and whole_name else whole) for place, cells in enumerate(columns)
            ]
            if sum(widths) <= room:
                break
        else:
            return False  # rich divides what there is
        for column, cells, width in zip(self.columns, columns, widths, strict=True):
            more = min(room - sum(widths), max(map(len, cells)) - width)
            column.width, room = width + more, room - more
        self.columns[0].no_wrap = whole_name
        return True


def _least_width(cells: Sequence[str], whole: int) -> int:
    """What a column needs where cells of up to so many characters stay whole; the first cell is the heading."""
    kept = [cell for cell in cells[1:] if len(cell) <= whole]
    return max(map(len, (*kept, *(word for cell in cells for word in cell.split()))), default=0)


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
    made = _PlainTable(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0, overflow="fold")
    return made
