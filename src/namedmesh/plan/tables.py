"""Tables for people: rows under named columns, written as aligned text."""

from __future__ import annotations

from typing import NamedTuple

Value = str | int | float | None


class Table(NamedTuple):
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


def as_text(table: Table) -> str:
    """Write a table with aligned columns, numbers to the right.

    Example:
        >>> print(as_text(Table(("axis", "size"), (("pp", 4), ("dp", 16)))))
        axis  size
        pp       4
        dp      16
    """
    written = [list(table.columns)]
    written += [["" if cell is None else str(cell) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*written, strict=True)]
    numbers = [
        any(isinstance(cell, (int, float)) for cell in column)
        and not any(isinstance(cell, str) and cell for cell in column)
        for column in zip(*table.rows, strict=True)
    ] or [False] * len(widths)
    lines = []
    for row in written:
        cells = []
        for text, width, number in zip(row, widths, numbers, strict=True):
            cells.append(text.rjust(width) if number else text.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
