"""Tables and paragraphs, and the four ways to write them: text, JSON, CSV and Markdown.

What only one of them needs is imported when it is written: a command costs little more than its interpreter.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORMATS = ("text", "json", "csv", "markdown")
Value = str | int | float | None
_NARROWEST = 12
"""The width that a column of words keeps."""


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Those in ``struck``, by number, are ruled out; a narrow terminal does without the ``optional`` columns, the first to go first.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    struck: frozenset[int] = frozenset()
    optional: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Value]]:
        """Return each row by the names of the columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Document:
    """The output of a command: paragraphs and tables for people, and what makes the same for others."""

    parts: tuple[str | Table, ...]
    data: Callable[[], dict[str, Any]]  # JSON values
    table: Callable[[], Table]  # the rows that a spreadsheet wants
    picture: Callable[[], Sequence[Sequence[tuple[str, str, str]]]] | None = (
        None  # texts, backgrounds and colors
    )


def show(document: Document, how: str) -> None:
    """Write a document to standard output; on a terminal as wide as that, with its picture where 24-bit colors are."""
    if how != "text" or not sys.stdout.isatty():
        sys.stdout.write(rendered(document, how))
        return
    import os
    import shutil

    width = shutil.get_terminal_size().columns
    colors = os.environ.get("COLORTERM") in {"truecolor", "24bit"} and not os.environ.get("NO_COLOR")
    if document.picture is not None and colors:
        for line in document.picture():
            sys.stdout.write("".join(_painted(*cell) for cell in line).rstrip() + "\n")
        sys.stdout.write("\n")
    sys.stdout.write(rendered(document, how, width))


def _painted(text: str, fill: str, ink: str) -> str:
    """Return a text in a color on a background, as terminals take it; as it is where there is none."""
    if not fill:
        return text
    colors = [";".join(str(int(each[i : i + 2], 16)) for i in (1, 3, 5)) for each in (fill, ink)]
    return f"\x1b[48;2;{colors[0]}m\x1b[38;2;{colors[1]}m{text}\x1b[0m"


def rendered(document: Document, how: str, width: int | None = None) -> str:
    """Render a document in one of :data:`FORMATS`; text in lines of a width, if there is one to fit."""
    if how == "json":
        import json

        return json.dumps(document.data(), indent=1) + "\n"
    if how == "csv":
        return _as_csv(document.table())
    if how == "markdown":
        parts = [_as_markdown(part) for part in document.parts]
    else:
        parts = [part if isinstance(part, str) else as_text(part, width) for part in document.parts]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_text(table: Table, width: int | None = None) -> str:
    """Render a table with aligned columns, numbers to the right; words that do not fit a width go on below."""
    margin = 2 if table.struck else 0
    rows = [table.columns, *(tuple(map(_text, row)) for row in table.rows)]
    kept, widths = _fitted(table, rows, None if width is None else width - margin)
    right = [_is_number_column(table, i) for i in kept]
    written = []
    for number, row in enumerate(rows):
        mark = "x " if number - 1 in table.struck else "  "
        columns = [_wrapped(row[i], size) for i, size in zip(kept, widths, strict=True)]
        for line in zip_longest(*columns, fillvalue=""):
            cells = [
                cell.rjust(size) if to_right else cell.ljust(size)
                for cell, size, to_right in zip(line, widths, right, strict=True)
            ]
            written.append((mark[:margin] + "  ".join(cells)).rstrip())
            mark = "  "
    return "\n".join(written)


def _fitted(table: Table, rows: Sequence[Sequence[str]], width: int | None) -> tuple[list[int], list[int]]:
    """Return the columns that fit a width, first without optional ones, then with narrow ones; and the width of each."""
    kept = list(range(len(table.columns)))
    widths = [max(len(row[i]) for row in rows) for i in kept]
    if width is None:
        return kept, widths
    least = []
    for i, title in enumerate(table.columns):
        cells = max((len(row[i]) for row in rows[1:]), default=0)
        words = map(len, title.replace("-", "- ").split())
        whole = cells if _is_number_column(table, i) else min(_NARROWEST, cells)
        least.append(max([whole, *words]))
    for name in table.optional:
        if sum(least[i] + 2 for i in kept) - 2 > width:
            kept = [i for i in kept if table.columns[i] != name]
    while sum(widths[i] + 2 for i in kept) - 2 > width:
        wide = [i for i in kept if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return kept, [widths[i] for i in kept]


def _wrapped(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else wrap(cell, width)


def _text(cell: Value) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"  # noqa: PLR2004  beyond, 3 digits need an exponent
    return str(cell)


def _is_number_column(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column] is not None]
    return bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)


def _as_csv(table: Table) -> str:
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
    return buffer.getvalue()


def _as_markdown(table: str | Table) -> str:
    """Write a table, or a paragraph whose later lines are a list, because lines of Markdown run together."""
    if isinstance(table, str):
        first, *others = table.split("\n")
        return "\n- ".join([f"{first}\n" if others else first, *map(str.strip, others)])

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ["--:" if _is_number_column(table, i) else "---" for i in range(len(table.columns))]
    rows = [
        line([f"~~{_text(cell)}~~" if number in table.struck else _text(cell) for cell in row])
        for number, row in enumerate(table.rows)
    ]
    return "\n".join([line(table.columns), line(rule), *rows])
