"""Tables and paragraphs, and the four ways to write them: text, JSON, CSV and Markdown.

What only one of them needs is imported when it is written: a command costs little more than its interpreter.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORMATS = ("text", "json", "csv", "markdown")
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    Args:
        columns: the names.
        rows: the cells of each row.
        struck: the rows, by number, that are ruled out.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    struck: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Document:
    """The output of a command.

    Args:
        parts: paragraphs and tables, for people.
        data: makes the same as JSON values.
        table: makes the rows that a spreadsheet wants.
        picture: makes lines for a terminal of some width: texts, each with its background and its color.
    """

    parts: tuple[str | Table, ...]
    data: Callable[[], dict[str, Any]]
    table: Callable[[], Table]
    picture: Callable[[int], Sequence[Sequence[tuple[str, str, str]]]] | None = None


def show(document: Document, how: str) -> None:
    """Write a document to standard output; with ``rich``, if that is installed and the output is a terminal."""
    if how == "text" and sys.stdout.isatty() and _has_rich():
        _show_rich(document)
    else:
        sys.stdout.write(rendered(document, how))


def _has_rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None


def rendered(document: Document, how: str) -> str:
    """Render a document in one of :data:`FORMATS`.

    Example:
        >>> print(rendered(Document((), dict, lambda: Table(("axis", "size"), (("tp", 2),))), "csv"), end="")
        axis,size
        tp,2
    """
    if how == "json":
        import json

        return json.dumps(document.data(), indent=1) + "\n"
    if how == "csv":
        return _as_csv(document.table())
    write = _as_markdown if how == "markdown" else _as_text
    parts = [write(part) for part in document.parts]
    return "\n\n".join(part for part in parts if part) + "\n"


def _as_text(part: str | Table) -> str:
    return part if isinstance(part, str) else as_text(part)


def as_text(table: Table) -> str:
    """Render a table with aligned columns, numbers to the right.

    Example:
        >>> print(as_text(Table(("axis", "size"), (("tp", 2), ("dp_shard", 64)))))
        axis      size
        tp           2
        dp_shard    64
    """
    lines = [table.columns, *([_text(cell) for cell in row] for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    right = [_is_number_column(table, i) for i in range(len(table.columns))]
    written = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]
    if table.struck:
        marks = ["x " if number - 1 in table.struck else "  " for number in range(len(written))]
        written = [(mark + line).rstrip() for mark, line in zip(marks, written, strict=True)]
    return "\n".join(written)


def _text(cell: Cell) -> str:
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
        return first + "\n" * bool(others) + "".join(f"\n- {other.strip()}" for other in others)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = ["--:" if _is_number_column(table, i) else "---" for i in range(len(table.columns))]
    rows = [
        line([f"~~{_text(cell)}~~" if number in table.struck else _text(cell) for cell in row])
        for number, row in enumerate(table.rows)
    ]
    return "\n".join([line(table.columns), line(rule), *rows])


def _show_rich(document: Document) -> None:
    import shutil

    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(width=max(80, shutil.get_terminal_size().columns), highlight=False, markup=False)
    for line in document.picture(console.width) if document.picture is not None else ():
        console.print(
            Text.assemble(*((text, f"{ink} on {fill}" if fill else "") for text, fill, ink in line))
        )
    for number, part in enumerate(part for part in document.parts if part):
        if number or document.picture is not None:
            console.print()
        if isinstance(part, str):
            console.print(part, soft_wrap=True)
            continue
        grid = RichTable(show_edge=False, pad_edge=False)
        for i, name in enumerate(part.columns):
            grid.add_column(name, justify="right" if _is_number_column(part, i) else "left")
        for i, row in enumerate(part.rows):
            grid.add_row(*map(_text, row), style="strike dim" if i in part.struck else None)
        console.print(grid)
