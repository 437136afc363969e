"""Draw a plan as one SVG picture: the ranks in their nodes, colored by an axis, the groups of another outlined."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from namedmesh.plan.cells import Cell, Grid, shades

if TYPE_CHECKING:
    from namedmesh.plan.cells import Box
    from namedmesh.plan.core import Plan

__all__ = ["draw_svg"]

_MARGIN, _LABEL, _WIDEST = 24, 16, 1360
_INK, _SOFT, _PAPER, _NODE, _EDGE = "#1f2933", "#52606d", "#ffffff", "#f3f5f8", "#b8c2cc"
_FEW, _SOME = 16, 128
_SHORT = 4  # letters of an axis of which two fit on a line
_TICKS = 16


@dataclass(frozen=True)
class _Size:
    """The size of a cell, and of its text."""

    width: int
    height: int
    font: int
    small: int
    gap: int = 8
    pad: int = 12
    per_line: int = 2


def draw_svg(plan: Plan, *, color_by: str | None = None) -> str:
    """Draw a plan.

    Args:
        plan: the plan.
        color_by: the axis that gives the colors; by default the slowest of size above 1.

    Returns:
        An SVG document. Up to 512 ranks each has a cell; above, a cell stands for a range of ranks, hatched
        where they differ on the axis.

    Raises:
        AxisError: there is no such axis.

    Example:
        >>> from namedmesh.plan import make_plan
        >>> draw_svg(make_plan("pp=2,tp=4")).count('class="rank"')
        8
    """
    grid = Grid(plan)
    axis = grid.color_axis(color_by)
    return _Picture(grid, axis).document()


class _Picture:
    def __init__(self, grid: Grid, axis: str) -> None:
        self.grid, self.axis = grid, axis
        self.size = _cell_size(grid)
        rows, columns = max(len(box.rows) for box in grid.boxes), max(len(box.rows[0]) for box in grid.boxes)
        self.box_width = columns * (self.size.width + self.size.gap) - self.size.gap + 2 * self.size.pad
        self.label = _LABEL if grid.boxes[0].label else 0
        self.box_height = (
            rows * (self.size.height + self.size.gap) - self.size.gap + 2 * self.size.pad + self.label
        )
        across = sqrt(len(grid.boxes) * 1.5 * self.box_height / self.box_width)
        room = (_WIDEST + self.size.pad - 2 * _MARGIN) // (self.box_width + self.size.pad)
        self.across = max(1, min(len(grid.boxes), ceil(across), room))
        self.parts: list[str] = []
        self.title, self.note = str(grid.plan.layout), self._note()
        boxes = self.across * (self.box_width + self.size.pad) - self.size.pad
        words = max(len(self.title) * 11, len(self.note) * 8)
        self.width = 2 * _MARGIN + max(512, boxes, words)

    def document(self) -> str:
        """Draw the whole picture."""
        top = self._head()
        for number, box in enumerate(self.grid.boxes):
            x = _MARGIN + number % self.across * (self.box_width + self.size.pad)
            y = top + number // self.across * (self.box_height + self.size.pad)
            self._box(box, x, y)
        down = ceil(len(self.grid.boxes) / self.across)
        width = self.width
        height = top + down * (self.box_height + self.size.pad) - self.size.pad + _MARGIN
        title = f"{self.grid.plan.layout}, colored by {self.axis}"
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">'
        )
        hatch = (
            '<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="8" height="8" fill="#e4e7eb"/>'
            '<rect width="3" height="8" fill="#cbd2d9"/></pattern></defs>'
        )
        paper = f'<rect width="{width}" height="{height}" fill="{_PAPER}"/>'
        lines = [start, f"<title>{escape(title)}</title>", hatch, paper, *self.parts, "</svg>"]
        return "\n".join(lines) + "\n"

    def _note(self) -> str:
        note, outlined = f"colored by {self.axis}", self.grid.outlined_axis()
        if self.grid.block > 1:
            return f"{note}; each cell is {self.grid.block} ranks, hatched where they differ in {self.axis}"
        return note if outlined is None else f"{note}; outlined: groups of {outlined}"

    def _head(self) -> int:
        """Draw the heading and the legend; return the y coordinate below."""
        self._text(_MARGIN, _MARGIN + 14, self.title, 20, weight="bold")
        self._text(_MARGIN, _MARGIN + 38, self.note, 14, fill=_SOFT)
        size = self.grid.axes[self.axis][self.axis]
        colors = shades(size)
        step = ceil(size / _TICKS)
        x, y = _MARGIN, _MARGIN + 52
        for at in range(0, size, step):
            name = f"{self.axis} {at}"
            wide = 24 + 9 * len(name) + 10
            if x + wide > self.width - _MARGIN:
                x, y = _MARGIN, y + 24
            shade = colors[at * len(colors) // size]
            self.parts.append(
                f'<rect x="{x}" y="{y}" width="18" height="18" rx="4" fill="{shade.fill}" '
                f'stroke="{_SOFT}" stroke-width="0.75"/>'
            )
            self._text(x + 24, y + 14, name, 14)
            x += wide
        if step > 1:
            self._text(x, y + 14, f"... {size - 1}", 14)
        return y + 36

    def _box(self, box: Box, x: int, y: int) -> None:
        if box.label:
            height = (
                len(box.rows) * (self.size.height + self.size.gap)
                - self.size.gap
                + 2 * self.size.pad
                + self.label
            )
            self.parts.append(
                f'<rect x="{x}" y="{y}" width="{self.box_width}" height="{height}" rx="10" fill="{_NODE}" '
                f'stroke="{_EDGE}"/>'
            )
            self._text(x + self.size.pad, y + self.size.pad + 7, box.label, 13, fill=_SOFT)
        for number, row in enumerate(box.rows):
            top = y + self.size.pad + self.label + number * (self.size.height + self.size.gap)
            self._row(row, x + self.size.pad, top)

    def _row(self, row: tuple[Cell, ...], x: int, y: int) -> None:
        step = self.size.width + self.size.gap
        for column, cell in enumerate(row):
            self._cell(cell, x + column * step, y)
        reach = self.size.gap / 2 - 1.25  # the outlines of neighbors do not touch
        for first, last in self.grid.outlines(row):
            self.parts.append(
                f'<rect class="group" x="{x + first * step - reach}" y="{y - reach}" '
                f'width="{(last - first + 1) * step - self.size.gap + 2 * reach}" height="{self.size.height + 2 * reach}" rx="7" '
                f'fill="none" stroke="{_INK}" stroke-width="1.75"/>'
            )

    def _cell(self, cell: Cell, x: int, y: int) -> None:
        shade = self.grid.shade(cell, self.axis)
        fill, ink = ("url(#hatch)", _INK) if shade is None else (shade.fill, shade.text)
        words = self._words(cell)
        self.parts.append(f'<g class="rank" data-rank="{cell.first}">')
        self.parts.append(f"<title>{escape(self._tip(cell))}</title>")
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{self.size.width}" height="{self.size.height}" rx="5" fill="{fill}"/>'
        )
        middle = x + self.size.width / 2
        total = self.size.font + len(words) * (self.size.small + 2)
        line = y + (self.size.height - total) / 2 + self.size.font * 0.82
        self._text(middle, line, cell.label, self.size.font, fill=ink, anchor="middle")
        for word in words:
            line += self.size.small + 3
            self._text(middle, line, word, self.size.small, fill=ink, anchor="middle")
        self.parts.append("</g>")

    def _words(self, cell: Cell) -> list[str]:
        """Return the lines below the rank, where there is room: its coordinates."""
        if not self.size.small:
            return []
        layout = self.grid.plan.layout
        words = [f"{axis} {at}" for axis, at in layout.coords(cell.first).items() if layout[axis] > 1]
        step = self.size.per_line
        return [" ".join(words[i : i + step]) for i in range(0, len(words), step)]

    def _tip(self, cell: Cell) -> str:
        coordinates = ", ".join(
            f"{axis} {'several' if at is None else at}"
            for axis in self.grid.axes
            for at in [self.grid.coordinate(cell, axis)]
        )
        return f"rank{'s' * (cell.count > 1)} {cell.label}: {coordinates}"

    def _text(
        self,
        x: float,
        y: float,
        text: str,
        size: int,
        *,
        fill: str = _INK,
        anchor: str = "start",
        weight: str = "normal",
    ) -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )


def _cell_size(grid: Grid) -> _Size:
    count = sum(len(row) for box in grid.boxes for row in box.rows)
    layout = grid.plan.layout
    digits = len(str(grid.plan.world_size - 1))
    longest = max((len(axis) for axis in layout if layout[axis] > 1), default=2)
    per_line = 2 if longest <= _SHORT else 1
    lines = ceil(sum(size > 1 for size in layout.sizes) / per_line)
    if grid.block > 1:
        return _Size(max(64, (2 * digits + 1) * 8 + 10), 26, 12, 0)
    if count <= _SOME:
        font, small = (20, 13) if count <= _FEW else (17, 11)
        width = max(58, round(per_line * (longest + 3) * small * 0.56) + 8)
        return _Size(width, font + lines * (small + 3) + 14, font, small, per_line=per_line)
    return _Size(max(30, digits * 9 + 4), 22, 14, 0, gap=7, pad=9)
