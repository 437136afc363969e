"""Draw a plan as one SVG picture: the ranks in their nodes, colored by an axis, the groups of another outlined.

A small world without nodes is drawn as boxes in boxes, one level for each axis.
"""

from __future__ import annotations

from itertools import groupby
from math import ceil, sqrt
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from namedmesh.plan.cells import Cell, Grid, Outline, shades

if TYPE_CHECKING:
    from namedmesh.plan.cells import Box
    from namedmesh.plan.core import Plan

_MARGIN, _LABEL, _WIDEST, _NARROWEST = 24, 18, 1360, 512
_WIDEST_CELL = 150  # eight of them fit side by side
_FEW, _SOME = 16, 128
_SHORT = 4  # letters of an axis of which two fit on a line
_TICKS = 16
_NESTED, _LEVELS = 32, 3  # ranks and axes that are drawn as boxes in boxes
Rect = tuple[float, float, float, float]
"""The left, the top, the width and the height."""


def draw_svg(plan: Plan, *, color_by: str | None = None) -> str:
    """Draw a plan.

    Args:
        plan: the plan.
        color_by: the axis that gives the colors; by default the slowest of size above 1.

    Returns:
        An SVG document, which follows the reader's preference for light or dark. Up to 512 ranks each has a
        cell; above, a cell stands for a range of ranks, striped where they differ on the axis. Up to 32 ranks on
        up to three axes, without nodes and ``color_by``, are boxes in boxes.

    Raises:
        AxisError: there is no such axis.

    Example:
        >>> from namedmesh.plan import make_plan
        >>> draw_svg(make_plan("pp=2,tp=4")).count('class="rank"')
        8
    """
    grid = Grid(plan)
    axis = grid.color_axis(color_by)
    axes = [axis for axis in plan.layout if plan.layout[axis] > 1]
    nodes = plan.gpus_per_node or plan.nvlink_domain
    picture = _Picture(grid, axis)
    if color_by is None and nodes is None and plan.world_size <= _NESTED and 0 < len(axes) <= _LEVELS:
        return picture.nested(axes)
    return picture.nodes()


class _Size(NamedTuple):
    """The size of a cell, and of its text."""

    width: int
    height: int
    font: int
    small: int
    gap: int = 8
    pad: int = 12
    per_line: int = 2


class Drawing:
    """The elements of an SVG picture of some width."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[str] = []

    def rect(
        self, box: Rect, classes: str = "", rounded: int = 0, *, fill: str = "", title: str = ""
    ) -> None:
        """Draw a rectangle, in the paint of classes or in a color; a title shows when the mouse is over it."""
        place = 'x="{:g}" y="{:g}" width="{:g}" height="{:g}"'.format(*box)
        named = {"class": classes, "fill": fill, "rx": rounded}
        paint = "".join(f' {name}="{value}"' for name, value in named.items() if value)
        end = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.parts.append(f"<rect {place}{paint}{end}")

    def text(
        self, x: float, y: float, text: str, size: int, ink: str = "ink", *, fill: str = "", anchor: str = ""
    ) -> None:
        """Draw a line of text, in the ink of a class or in a color."""
        paint = f'fill="{fill}"' if fill else f'class="{ink}"'
        where = f' text-anchor="{anchor}"' if anchor else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" {paint}{where}>{escape(text)}</text>'
        )

    def page(self, title: str, height: int) -> str:
        """Return the document, which follows the reader's preference for light or dark."""
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" width="{self.width}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">\n<title>{escape(title)}</title>\n'
        )
        css = " ".join(Path(__file__).with_name("picture.css").read_text(encoding="utf-8").split())
        paper = f'<rect class="paper" width="{self.width}" height="{height}"/>'
        return f"{start}<style>{css}</style>\n" + "\n".join([paper, *self.parts, "</svg>\n"])


class _Picture(Drawing):
    def __init__(self, grid: Grid, axis: str) -> None:
        super().__init__(_NARROWEST)
        self.grid, self.axis, self.layout = grid, axis, grid.plan.layout
        self.size = _cell_size(grid)

    def nodes(self) -> str:
        """Draw the ranks in their nodes, and the nodes in the NVLink domains around them."""
        size, boxes = self.size, self.grid.boxes
        rows, columns = max(len(box.rows) for box in boxes), max(len(box.rows[0]) for box in boxes)
        label = _LABEL if boxes[0].label else 0
        box_width = columns * (size.width + size.gap) - size.gap + 2 * size.pad
        box_height = rows * (size.height + size.gap) - size.gap + 2 * size.pad + label
        blocks = [list(block) for _, block in groupby(boxes, key=lambda box: box.around)]
        frame = size.pad if boxes[0].around else 0
        room = _WIDEST - 2 * _MARGIN
        across = _across(max(map(len, blocks)), box_width, box_height, room - 2 * frame, size.pad)
        down = ceil(max(map(len, blocks)) / across)
        block_width = across * (box_width + size.pad) - size.pad + 2 * frame
        block_height = down * (box_height + size.pad) - size.pad + 2 * frame + (_LABEL if frame else 0)
        wide = _across(len(blocks), block_width, block_height, room, size.pad)
        self.width = max(_NARROWEST, wide * (block_width + size.pad) - size.pad + 2 * _MARGIN)
        top = self._head(f"colored by {self.axis}", self.grid.note)
        for number, block in enumerate(blocks):
            x = _MARGIN + number % wide * (block_width + size.pad)
            y = top + number // wide * (block_height + size.pad)
            if frame:
                self.rect((x, y, block_width, block_height), "paper edge domain", 14)
                self.text(x + frame, y + frame + 8, block[0].around, 13, "soft")
                y += _LABEL
            for place, box in enumerate(block):
                left = x + frame + place % across * (box_width + size.pad)
                height = box_height - (rows - len(box.rows)) * (size.height + size.gap)
                self._box(box, left, y + frame + place // across * (box_height + size.pad), box_width, height)
        bottom = top + ceil(len(blocks) / wide) * (block_height + size.pad) - size.pad
        return self.page(f"{self.layout}, colored by {self.axis}", bottom + _MARGIN)

    def nested(self, axes: list[str]) -> str:
        """Draw boxes in boxes: the slowest axis outside, the fastest from left to right."""
        self.size = _Size(94, 54, 16, 0)
        *outer, fast = axes
        slow = outer[0] if len(axes) == _LEVELS else None
        middle = outer[-1] if outer else None
        columns, lines = self.layout[fast], self.layout[middle] if middle else 1
        step, high, gutter = 106, 62, 12 + (9 * len(f"{_short(middle, 12)} {lines}") if middle else 0)
        wide, tall = gutter + columns * step + 12, lines * (high + 20) + 16
        count = self.layout[slow] if slow else 1
        across = _across(count, wide, tall + 60, _WIDEST - 2 * _MARGIN, 24)
        self.width = max(_NARROWEST, across * (wide + 24) - 24 + 2 * _MARGIN)
        top = self._head()
        for block in range(count):
            x = _MARGIN + block % across * (wide + 24)
            y = top + block // across * (tall + 60) + 22
            if slow:
                self.text(x + wide / 2, y - 8, f"{_short(slow, 24)} = {block}", 15, "slow", anchor="middle")
                self.rect((x, y, wide, tall), "outer rim", 14)
            for line in range(lines):
                at = y + 12 + line * (high + 20)
                if middle:
                    self.text(x + 10, at + high / 2 + 9, f"{_short(middle, 12)} {line}", 13, "middle")
                self.rect((x + gutter - 6, at, columns * step + 4, high + 8), "inner line", 12)
                for column in range(columns):
                    rank = (block * lines + line) * columns + column
                    self._cell(Cell(rank, 1), x + gutter + column * step + 2, at + 8, nested=True)
            for column in range(columns):
                middle_x = x + gutter + column * step + 47
                self.text(
                    middle_x, y + tall + 18, f"{_short(fast, 8)} = {column}", 13, "fast", anchor="middle"
                )
        bottom = top + ceil(count / across) * (tall + 60)
        return self.page(f"{self.layout}, boxes of {', '.join(axes)}", bottom + _MARGIN)

    def _head(self, *notes: str) -> int:
        """Draw the heading, the notes and, with some, the legend; return the y coordinate below."""
        y = _MARGIN - 8
        for text, size, ink in ((str(self.layout), 20, "ink"), *((note, 14, "soft") for note in notes)):
            for line in wrap(text, (self.width - 2 * _MARGIN) // round(size * 0.58), break_on_hyphens=False):
                y += size + 5
                self.text(_MARGIN, y, line, size, ink)
        if not notes:
            return y + 14
        size = self.grid.axes[self.axis][self.axis]
        colors, step = shades(size), ceil(size / _TICKS)
        x, y = _MARGIN, y + 12
        for at in range(0, size, step):
            name = f"{_short(self.axis, 24)} {at}"
            if step > 1 and at + step >= size:
                name += f" ... {size - 1}"
            wide = 34 + 9 * len(name)
            if x + wide > self.width - _MARGIN:
                x, y = _MARGIN, y + 24
            self.rect((x, y, 18, 18), "edge", 4, fill=colors[at * len(colors) // size].fill)
            self.text(x + 24, y + 14, name, 14)
            x += wide
        return y + 36

    def _box(self, box: Box, x: int, y: int, width: int, height: int) -> None:
        if box.label:
            self.rect((x, y, width, height), "node edge", 10)
            self.text(x + self.size.pad, y + self.size.pad + 6, box.label, 13, "soft")
            y += _LABEL
        for number, row in enumerate(box.rows):
            top = y + self.size.pad + number * (self.size.height + self.size.gap)
            step, left = self.size.width + self.size.gap, x + self.size.pad
            for column, cell in enumerate(row):
                self._cell(cell, left + column * step, top)
            for outline in self.grid.outlines(row):
                self._outline(outline, left, top, x, x + width)

    def _outline(self, outline: Outline, x: int, y: int, left: int, right: int) -> None:
        """Draw the part of a group in a row: open, and as far as the box, on the side where it goes on."""
        step, reach = self.size.width + self.size.gap, self.size.gap / 2 - 1.25  # neighbors do not touch
        start = x + outline.first * step - reach if outline.starts else left
        end = x + (outline.last + 1) * step - self.size.gap + reach if outline.ends else right
        low, high = y - reach, y + self.size.height + reach
        if outline.starts:
            line = f"M{end:g} {low:g}H{start:g}V{high:g}H{end:g}{'Z' if outline.ends else ''}"
        else:
            line = f"M{start:g} {low:g}H{end:g}{'V' if outline.ends else f'M{end:g} '}{high:g}H{start:g}"
        classes = "group crosses" if outline.crosses else "group"
        self.parts.append(f'<path class="{classes}" d="{line}" stroke-linejoin="round"/>')

    def _cell(self, cell: Cell, x: int, y: int, *, nested: bool = False) -> None:
        size = self.size
        colors = [] if nested else self.grid.shades(cell, self.axis)
        plain = len(colors) == 1
        self.parts.append(
            f'<g class="rank" data-rank="{cell.first}"><title>{escape(self.grid.describe(cell))}</title>'
        )
        if plain:
            self.rect((x, y, size.width, size.height), rounded=5, fill=colors[0].fill)
        else:
            self.rect((x, y, size.width, size.height), "paper edge" if nested else "node", 5)
            stripe = size.width / max(1, len(colors))
            for number, shade in enumerate(colors):
                self.rect((x + number * stripe, y + size.height - 6, stripe, 6), fill=shade.fill)
        words = [] if nested else self._words(cell)
        label = f"rank {cell.label}" if nested else cell.label
        line = y + (size.height - size.font - len(words) * (size.small + 2)) / 2 + size.font * 0.82
        if len(colors) > 1:
            line -= 3
        ink = colors[0].text if plain else ""
        for word, font in ((label, size.font), *((word, size.small) for word in words)):
            self.text(x + size.width / 2, line, word, font, fill=ink, anchor="middle")
            line += size.small + 3
        self.parts.append("</g>")

    def _words(self, cell: Cell) -> list[str]:
        """Return the lines below the rank, where there is room: its coordinates."""
        if not self.size.small:
            return []
        room = _SHORT if self.size.per_line > 1 else int(self.size.width / self.size.small / 0.56) - _SHORT
        places = self.layout.coords(cell.first).items()
        words = [f"{_short(axis, room)} {at}" for axis, at in places if self.layout[axis] > 1]
        step = self.size.per_line
        return [" ".join(words[i : i + step]) for i in range(0, len(words), step)]


def _across(count: int, width: int, height: int, room: int, gap: int) -> int:
    """Return how many boxes stand side by side, for a picture that is half as wide again as it is high."""
    return max(1, min(count, ceil(sqrt(count * 1.5 * height / width)), (room + gap) // (width + gap)))


def _short(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: max(1, letters - 1)]}\N{HORIZONTAL ELLIPSIS}"


def _cell_size(grid: Grid) -> _Size:
    count = len(grid.cells)
    layout = grid.plan.layout
    digits = len(str(grid.plan.world_size - 1))
    longest = max((len(axis) for axis in layout if layout[axis] > 1), default=2)
    per_line = 2 if longest <= _SHORT else 1
    lines = ceil(sum(size > 1 for size in layout.sizes) / per_line)
    if grid.block > 1:
        return _Size(min(_WIDEST_CELL, round((2 * digits + 1) * 6.3) + 12), 28, 11, 0, gap=6)
    if count <= _SOME:
        font, small = (20, 13) if count <= _FEW else (17, 11)
        width = min(_WIDEST_CELL, max(58, round(per_line * (longest + 3) * small * 0.56) + 8))
        return _Size(width, font + lines * (small + 3) + 14, font, small, per_line=per_line)
    return _Size(max(30, digits * 9 + 4), 22, 14, 0, gap=7, pad=9)
