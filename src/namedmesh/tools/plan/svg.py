"""Draw the ranks of a layout as an SVG picture.

Ranks are drawn in their nodes and colored by one axis; groups of the fastest axis are outlined.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import groupby
from math import ceil, sqrt

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
_TOP = 112  # of the boxes, below the title and up to three notes
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
    colors = [_choose_color(position, layout[color_axis]) for position in range(layout[color_axis])]
    grid = _Grid(layout, axes, gpus_per_node or _COLUMNS)
    # Ranks of the fastest axis are consecutive, so a group is a run of cells.
    group_size = layout[axes[-1]]
    crossing = set()
    for group in range(ceil(grid.drawn / group_size) if gpus_per_node else 0):
        first_rank = group * group_size
        if first_rank // grid.box_size != (first_rank + group_size - 1) // grid.box_size:
            crossing.add(group)
    notes = [f"colored by {color_axis}", f"outlined: groups of {axes[-1]}"]
    if crossing:
        notes[-1] += ", dashed where they leave a node"
    if grid.drawn < layout.world_size:
        notes.append(f"ranks {grid.drawn} to {layout.world_size - 1} are not drawn")
    elements = [_format_text(_MARGIN, 40, str(layout), 20, 'class="ink"')]
    for line, note in enumerate(notes, 1):
        elements.append(_format_text(_MARGIN, 40 + 19 * line, note, 14, 'class="soft"'))
    for first_rank in range(0, grid.drawn, grid.box_size):
        x, y = grid.find_box(first_rank)
        last_rank = min(first_rank + grid.box_size, grid.drawn) - 1
        label = (
            f"node {first_rank // grid.box_size}" if gpus_per_node else f"ranks {first_rank} to {last_rank}"
        )
        elements.append(_format_rect(x, y, grid.box_width, grid.box_height, 'class="node edge" rx="10"'))
        elements.append(_format_text(x + _PADDING, y + _PADDING + 6, label, 13, 'class="soft"'))
    for rank in range(grid.drawn):
        coords = layout.coords(rank)
        lines = [f"{axis} {coords[axis]}" for axis in axes]
        x, y = grid.find_cell(rank)
        fill = f'fill="{colors[coords[color_axis]]}" rx="5"'
        # Browsers show the title as a tooltip, also if the cell has no room for coordinates.
        elements.append(f'<g class="rank" data-rank="{rank}"><title>rank {rank}: {", ".join(lines)}</title>')
        elements.append(_format_rect(x, y, grid.cell_width, grid.cell_height, fill))
        middle = x + grid.cell_width / 2
        elements.append(_format_text(middle, y + 18, str(rank), 17, 'text-anchor="middle"'))
        for index, text in enumerate(lines if grid.is_detailed else (), 1):
            baseline = y + 18 + index * _LINE_HEIGHT
            elements.append(_format_text(middle, baseline, text, 13, 'text-anchor="middle"'))
        elements.append("</g>")
    elements += _draw_outlines(grid, group_size, crossing)
    legend, height = _draw_legend(grid, color_axis, colors)

    size = f'viewBox="0 0 {grid.width} {height}" width="{grid.width}" height="{height}"'
    heading = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT}>',
        f"<title>{layout}, colored by {color_axis}</title>",
        _STYLE,
        _format_rect(0, 0, grid.width, height, 'class="paper"'),
    ]
    return "\n".join([*heading, *elements, *legend, "</svg>\n"])


class _Grid:
    """The sizes and positions of cells and boxes in pixels.

    A box is a node, or a row of ranks.

    Args:
        layout: the layout.
        axes: the axes whose coordinates a cell shows.
        box_size: the number of ranks in a box.
    """

    def __init__(self, layout: Layout, axes: list[str], box_size: int) -> None:
        self.drawn = min(layout.world_size, _MOST_CELLS)
        self.box_size = box_size
        # The text must fit into a cell.
        self.is_detailed = layout.world_size <= _MOST_DETAILED
        self.cell_height = 24
        self.cell_width = 10 * len(str(layout.world_size)) + 10
        if self.is_detailed:
            self.cell_height += _LINE_HEIGHT * len(axes)
            self.cell_width = 9 * max(len(f"{axis} {layout[axis]}") for axis in axes) + 36
        self.columns = min(box_size, _COLUMNS)
        rows = ceil(min(box_size, self.drawn) / self.columns)
        self.box_width = self.columns * (self.cell_width + _GAP) - _GAP + 2 * _PADDING
        self.box_height = rows * (self.cell_height + _GAP) - _GAP + 2 * _PADDING + _LABEL_HEIGHT
        boxes = ceil(self.drawn / box_size)
        most_in_width = (_MOST_WIDTH - 2 * _MARGIN) // (self.box_width + _PADDING)
        # The picture is half as wide again as it is high, if that is not wider than a page.
        self.boxes_per_row = ceil(sqrt(boxes * 1.5 * self.box_height / self.box_width))
        self.boxes_per_row = max(1, min(boxes, self.boxes_per_row, most_in_width))
        box_rows = ceil(boxes / self.boxes_per_row)
        width = self.boxes_per_row * (self.box_width + _PADDING) - _PADDING + 2 * _MARGIN
        self.width = max(_LEAST_WIDTH, width)
        self.bottom = _TOP + box_rows * (self.box_height + _PADDING)

    def find_box(self, rank: int) -> tuple[int, int]:
        """Return the upper left corner of the box of a rank."""
        row, column = divmod(rank // self.box_size, self.boxes_per_row)
        return _MARGIN + column * (self.box_width + _PADDING), _TOP + row * (self.box_height + _PADDING)

    def find_cell(self, rank: int) -> tuple[int, int]:
        """Return the upper left corner of the cell of a rank."""
        x, y = self.find_box(rank)
        row, column = divmod(rank % self.box_size, self.columns)
        left = x + _PADDING + column * (self.cell_width + _GAP)
        return left, y + _PADDING + _LABEL_HEIGHT + row * (self.cell_height + _GAP)


def _draw_outlines(grid: _Grid, group_size: int, crossing: Container[int]) -> list[str]:
    """Draw an outline around each run of cells of one group that are next to each other."""

    def find_run(rank: int) -> tuple[int, int, int]:
        # A group that continues in another row or box has an outline in each of them.
        return rank // grid.box_size, grid.find_cell(rank)[1], rank // group_size

    elements = []
    for (_, y, group), ranks in groupby(range(grid.drawn), find_run):
        first_rank, *others = ranks
        length = (len(others) + 1) * (grid.cell_width + _GAP) - _GAP
        css_class = "group crosses" if group in crossing else "group"
        left = grid.find_cell(first_rank)[0] - 3
        elements.append(
            _format_rect(left, y - 3, length + 6, grid.cell_height + 6, f'class="{css_class}" rx="6"')
        )
    return elements


def _draw_legend(grid: _Grid, axis: str, colors: list[str]) -> tuple[list[str], int]:
    """Draw the colors of the coordinates on an axis; on a long axis, of some of them.

    Returns:
        The elements, and the height of the picture that ends below them.
    """
    step = ceil(len(colors) / _MOST_LEGEND_ENTRIES)
    names = [f"{axis} {position}" for position in range(0, len(colors), step)]
    if step > 1:
        names[-1] += f" ... {len(colors) - 1}"
    width = 34 + 9 * max(map(len, names))
    elements = []
    y = grid.bottom
    for entry, name in enumerate(names):
        row, column = divmod(entry, max(1, (grid.width - 2 * _MARGIN) // width))
        x = _MARGIN + column * width
        y = grid.bottom + 24 * row
        elements.append(_format_rect(x, y, 18, 18, f'class="edge" fill="{colors[entry * step]}" rx="4"'))
        elements.append(_format_text(x + 24, y + 14, name, 14, 'class="ink"'))
    return elements, y + 18 + _MARGIN


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
