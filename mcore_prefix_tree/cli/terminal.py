"""Tables and lines for a terminal of 80 columns or more, in the characters that it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

# A width that fits everywhere: also into a log, whose reader's terminal is unknown.
WIDTH = 80
_SEPARATOR, _INDENT = " | ", "  "


def wrapped(parts: Iterable[str], *, begins: str = "") -> list[str]:
    """Join parts into lines of at most :data:`WIDTH` columns; a part is never cut, and ``begins`` each line."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_SEPARATOR) + len(part) <= WIDTH:
            lines[-1] += _SEPARATOR + part
        else:
            lines.append((begins if not lines else begins or _INDENT) + part)
    return lines


def grid(headings: Sequence[str], *, left: Sequence[int] = (0,)) -> Table:
    """Return a table without lines, whose long cells end in an ellipsis; columns ``left`` are left-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right", no_wrap=True, overflow="ellipsis")
    return table


def rows(lines: Iterable[tuple[str, str, str]]) -> Table:
    """Return names, values and remarks as a table; a long remark continues below itself."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table


def say(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a sentence, broken between words at the terminal's width."""
    console.print(text, style=style, markup=False, highlight=False)


def say_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line unchanged, however long: it may hold a path, to be copied or searched for."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
