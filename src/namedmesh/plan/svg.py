"""Draw the ranks of a layout as an SVG picture.

Ranks are drawn in their nodes and colored by one axis; groups of the fastest axis are outlined.
"""

from __future__ import annotations

from itertools import groupby
from math import ceil, sqrt
from typing import NamedTuple

from namedmesh.layout import Layout

_MOST_CELLS = 512  # ranks that are drawn
_MOST_DETAILED = 128  # ranks up to which a cell shows all coordinates
_MOST_LEGEND_ENTRIES = 16
_COLUMNS = 8  # cells in a row; without nodes, a box has one row
# Lengths in pixels. The picture is as wide as a page of documentation at most.
_MARGIN = 24
_PADDING = 12
_GAP = 8
_LABEL_HEIGHT = 18
_LINE_HEIGHT = 16
_LEAST_WIDTH = 640
_MOST_WIDTH = 1360
# Colors on which black text is readable and that color-blind readers can distinguish (Okabe and
# Ito, except the blue).
_DISTINCT = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#6f8fe8", "#d55e00", "#8c8c8c")
_FONT = 'font-family="Helvetica, Arial, sans-serif" role="img"'
_STYLE = """<style>.paper { fill: #ffffff; } .ink { fill: #1f2933; } .soft { fill: #52606d; } .node { fill: #f3f5f8; }
.edge { stroke: #7b8794; } .group { stroke: #1f2933; fill: none; stroke-width: 1.75; }
.crosses { stroke: #c2185b; stroke-dasharray: 6 3; }
@media (prefers-color-scheme: dark) { .paper { fill: #14181d; } .ink { fill: #e6eaee; } .soft { fill: #a7b1bb; }
.node { fill: #1e242b; } .group { stroke: #e6eaee; } .crosses { stroke: #ff80ab; } }</style>"""


def draw_svg(layout: Layout, *, gpus_per_node: int | None = None, color_by: str | None = None) -> str:
    """Draw a layout as an SVG document, in the reader's light or dark theme.

    Args:
        layout: the layout; only its first 512 ranks are drawn.
        gpus_per_node: the number of consecutive ranks of a node; without it, rows of eight ranks
            are drawn.
        color_by: the axis that gives the colors; by default the slowest axis of size above 1.

    Raises:
        AxisError: if the layout does not have this axis.
    """
    axes = [axis for axis in layout if layout[axis] > 1] or list(layout)
    color_axis = axes[0] if color_by is None else color_by
    drawn = min(layout.world_size, _MOST_CELLS)
    grid = _make_grid(layout, axes, drawn, gpus_per_node or _COLUMNS)

    # Ranks of the fastest axis are consecutive, so a group is a run of cells.
    group_size = layout[axes[-1]]
    crossing = set()
    if gpus_per_node:
        crossing = _find_crossing_groups(drawn, group_size, gpus_per_node)
    outlined = f"outlined: groups of {axes[-1]}"
    if crossing:
        outlined += ", dashed where they leave a node"
    notes = [f"colored by {color_axis}", outlined]
    if drawn < layout.world_size:
        notes.append(f"ranks {drawn} to {layout.world_size - 1} are not drawn")
    elements, top = _draw_legend(str(layout), notes, color_axis, layout[color_axis], grid.width)

    positions: dict[int, tuple[int, int]] = {}
    for box in range(grid.boxes):
        x, y = grid.box_position(box, top)
        ranks = range(box * grid.box_size, min((box + 1) * grid.box_size, drawn))
        label = f"node {box}" if gpus_per_node else f"ranks {ranks[0]} to {ranks[-1]}"
        elements.append(_format_rect(x, y, grid.box_width, grid.box_height, 'class="node edge" rx="10"'))
        elements.append(_format_text(x + _PADDING, y + _PADDING + 6, label, 13, 'class="soft"'))
        for index, rank in enumerate(ranks):
            positions[rank] = grid.cell_position(index, x, y)
    for rank, (x, y) in positions.items():
        coords = layout.coords(rank)
        lines = [f"{axis} {coords[axis]}" for axis in axes]
        color = _choose_color(coords[color_axis], layout[color_axis])
        # Browsers show the title as a tooltip, also if the cell has no room for coordinates.
        elements.append(f'<g class="rank" data-rank="{rank}"><title>rank {rank}: {", ".join(lines)}</title>')
        elements.append(_format_rect(x, y, grid.cell_width, grid.cell_height, f'fill="{color}" rx="5"'))
        elements += _draw_cell_text(grid, rank, lines, x + grid.cell_width / 2, y + 18)
        elements.append("</g>")
    elements += _draw_outlines(grid, positions, group_size, crossing)

    height = top + ceil(grid.boxes / grid.boxes_per_row) * (grid.box_height + _PADDING) - _PADDING + _MARGIN
    size = f'viewBox="0 0 {grid.width} {height}" width="{grid.width}" height="{height}"'
    heading = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>',
        f"<title>{layout}, colored by {color_axis}</title>",
        _STYLE,
        _format_rect(0, 0, grid.width, height, 'class="paper"'),
    ]
    return "\n".join([*heading, *elements, "</svg>\n"])


class _Grid(NamedTuple):
    """The sizes in pixels and the numbers of cells and boxes; a box is a node or a row."""

    cell_width: int
    cell_height: int
    columns: int
    box_size: int
    box_width: int
    box_height: int
    boxes: int
    boxes_per_row: int
    width: int
    is_detailed: bool

    def box_position(self, box: int, top: int) -> tuple[int, int]:
        """Return the upper left corner of a box below ``top``."""
        row, column = divmod(box, self.boxes_per_row)
        return _MARGIN + column * (self.box_width + _PADDING), top + row * (self.box_height + _PADDING)

    def cell_position(self, index: int, x: int, y: int) -> tuple[int, int]:
        """Return the upper left corner of a cell, by its index in a box at ``x`` and ``y``."""
        row, column = divmod(index, self.columns)
        left = x + _PADDING + column * (self.cell_width + _GAP)
        return left, y + _PADDING + _LABEL_HEIGHT + row * (self.cell_height + _GAP)


def _make_grid(layout: Layout, axes: list[str], drawn: int, box_size: int) -> _Grid:
    """Choose sizes so that the text fits into the cells and the picture is wider than high."""
    is_detailed = layout.world_size <= _MOST_DETAILED
    cell_height = 24
    cell_width = 10 * len(str(layout.world_size)) + 10
    if is_detailed:
        cell_height += _LINE_HEIGHT * len(axes)
        cell_width = 9 * max(len(f"{axis} {layout[axis]}") for axis in axes) + 36
    columns = min(box_size, _COLUMNS)
    rows = ceil(min(box_size, drawn) / columns)
    box_width = columns * (cell_width + _GAP) - _GAP + 2 * _PADDING
    box_height = rows * (cell_height + _GAP) - _GAP + 2 * _PADDING + _LABEL_HEIGHT
    boxes = ceil(drawn / box_size)
    most_in_width = (_MOST_WIDTH - 2 * _MARGIN) // (box_width + _PADDING)
    # The picture is half as wide again as it is high, if that is not wider than a page.
    boxes_per_row = ceil(sqrt(boxes * 1.5 * box_height / box_width))
    boxes_per_row = max(1, min(boxes, boxes_per_row, most_in_width))
    width = max(_LEAST_WIDTH, boxes_per_row * (box_width + _PADDING) - _PADDING + 2 * _MARGIN)
    return _Grid(
        cell_width, cell_height, columns, box_size, box_width, box_height, boxes, boxes_per_row, width, is_detailed
    )  # fmt: skip


def _find_crossing_groups(drawn: int, group_size: int, gpus_per_node: int) -> set[int]:
    """Return the indices of the groups that have ranks on several nodes."""
    crossing = set()
    for first_rank in range(0, drawn, group_size):
        last_rank = first_rank + group_size - 1
        if first_rank // gpus_per_node != last_rank // gpus_per_node:
            crossing.add(first_rank // group_size)
    return crossing


def _draw_cell_text(grid: _Grid, rank: int, lines: list[str], x: float, y: float) -> list[str]:
    """Draw the rank, and if there is room its coordinates, below each other."""
    if not grid.is_detailed:
        return [_format_text(x, y, str(rank), 14, 'text-anchor="middle"')]
    elements = [_format_text(x, y, str(rank), 17, 'text-anchor="middle"')]
    for line in lines:
        y += _LINE_HEIGHT
        elements.append(_format_text(x, y, line, 13, 'text-anchor="middle"'))
    return elements


def _draw_outlines(
    grid: _Grid, positions: dict[int, tuple[int, int]], group_size: int, crossing: set[int]
) -> list[str]:
    """Draw an outline around each run of cells of one group that are next to each other."""

    def run_of(rank: int) -> tuple[int, int, int]:
        # A group that continues in another row or box has an outline in each of them.
        return rank // grid.box_size, positions[rank][1], rank // group_size

    elements = []
    for (_, y, group), ranks in groupby(positions, run_of):
        first_rank, *others = ranks
        length = (len(others) + 1) * (grid.cell_width + _GAP) - _GAP
        css_class = "group crosses" if group in crossing else "group"
        left = positions[first_rank][0] - 3
        elements.append(
            _format_rect(left, y - 3, length + 6, grid.cell_height + 6, f'class="{css_class}" rx="6"')
        )
    return elements


def _draw_legend(title: str, notes: list[str], axis: str, size: int, width: int) -> tuple[list[str], int]:
    """Draw the title, the notes and the colors; return them and the y coordinate below them."""
    y = 40
    elements = [_format_text(_MARGIN, y, title, 20, 'class="ink"')]
    for note in notes:
        y += 19
        elements.append(_format_text(_MARGIN, y, note, 14, 'class="soft"'))
    x = _MARGIN
    y += 12
    step = ceil(size / _MOST_LEGEND_ENTRIES)
    for position in range(0, size, step):
        name = f"{axis} {position}"
        if step > 1 and position + step >= size:
            name += f" ... {size - 1}"
        entry_width = 34 + 9 * len(name)
        if x + entry_width > width - _MARGIN:
            x = _MARGIN
            y += 24
        color = _choose_color(position, size)
        elements.append(_format_rect(x, y, 18, 18, f'class="edge" fill="{color}" rx="4"'))
        elements.append(_format_text(x + 24, y + 14, name, 14, 'class="ink"'))
        x += entry_width
    return elements, y + 36


def _format_rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    """Format a rectangle as an SVG element."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {attributes}/>'


def _format_text(x: float, y: float, text: str, size: int, attributes: str) -> str:
    """Format a text as an SVG element."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {attributes}>{text}</text>'


def _choose_color(position: int, size: int) -> str:
    """Return the color of a coordinate: a distinct color, or a hue on a long axis."""
    if size <= len(_DISTINCT):
        return _DISTINCT[position]
    return f"hsl({360 * position / size:g}, 65%, 68%)"
