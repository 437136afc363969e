"""Draw a layout as one SVG picture: the ranks in their nodes, colored by an axis, the groups of the fastest axis outlined."""

from __future__ import annotations

from itertools import groupby
from math import ceil, sqrt

from namedmesh.layout import Layout

_LARGEST, _DETAILED = 512, 128  # cells that are drawn; ranks up to which a cell has its coordinates
_ROW, _MARGIN, _LABEL, _PAD, _GAP, _WIDEST, _NARROWEST = 8, 24, 18, 12, 8, 1360, 640
_TICKS = 16  # colors in the legend
# That black stands out from, and that the color-blind tell apart (Okabe and Ito, but for the blue).
_DISTINCT = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#6f8fe8", "#d55e00", "#8c8c8c")
_FONT = 'font-family="Helvetica, Arial, sans-serif" role="img"'
_STYLE = """<style>.paper { fill: #ffffff; } .ink { fill: #1f2933; } .soft { fill: #52606d; } .node { fill: #f3f5f8; }
.edge { stroke: #7b8794; } .group { stroke: #1f2933; fill: none; stroke-width: 1.75; }
.crosses { stroke: #c2185b; stroke-dasharray: 6 3; }
@media (prefers-color-scheme: dark) { .paper { fill: #14181d; } .ink { fill: #e6eaee; } .soft { fill: #a7b1bb; }
.node { fill: #1e242b; } .group { stroke: #e6eaee; } .crosses { stroke: #ff80ab; } }</style>"""


def draw_svg(layout: Layout, *, gpus_per_node: int | None = None, color_by: str | None = None) -> str:
    """Draw a layout as an SVG document, which follows the reader's preference for light or dark.

    Args:
        layout: of more than 512 ranks the first are drawn.
        gpus_per_node: nodes are drawn where it is given, else rows of eight ranks.
        color_by: the axis that gives the colors; by default the slowest of size above 1.
    """
    ranks = layout.world_size
    large = [axis for axis in layout if layout[axis] > 1] or list(layout)
    axis = large[0] if color_by is None else color_by
    drawn, node = min(ranks, _LARGEST), gpus_per_node or _ROW
    shown = large if ranks <= _DETAILED else []  # in a line of a cell each
    longest = max(len(f"{name} {layout[name]}") for name in large)
    wide = 9 * longest + 36 if shown else 10 * len(str(ranks)) + 10
    high = 24 + 16 * len(shown)
    columns, boxes = min(node, _ROW), ceil(drawn / node)
    box_wide = columns * (wide + _GAP) - _GAP + 2 * _PAD
    box_high = ceil(min(node, drawn) / columns) * (high + _GAP) - _GAP + 2 * _PAD + _LABEL
    across = ceil(sqrt(boxes * 1.5 * box_high / box_wide))  # a picture half as wide again as it is high
    across = max(1, min(boxes, across, (_WIDEST - 2 * _MARGIN) // (box_wide + _PAD)))
    width = max(_NARROWEST, across * (box_wide + _PAD) - _PAD + 2 * _MARGIN)

    size = layout[large[-1]]  # of a group that is outlined: its ranks follow each other
    starts = range(0, drawn, size) if gpus_per_node else ()
    crossing = {start // size for start in starts if start // node != (start + size - 1) // node}
    notes = [f"colored by {axis}", f"outlined: groups of {large[-1]}"]
    if crossing:
        notes[1] += ", dashed where they leave a node"
    if drawn < ranks:
        notes.append(f"ranks {drawn} to {ranks - 1} are not drawn")
    parts, top = _legend(str(layout), notes, axis, layout[axis], width)
    places = dict[int, tuple[int, int]]()
    for box in range(boxes):
        inside = range(box * node, min((box + 1) * node, drawn))
        x, y = _MARGIN + box % across * (box_wide + _PAD), top + box // across * (box_high + _PAD)
        label = f"node {box}" if gpus_per_node else f"ranks {inside[0]} to {inside[-1]}"
        parts.append(_rect(x, y, box_wide, box_high, 'class="node edge" rx="10"'))
        parts.append(_text(x + _PAD, y + _PAD + 6, label, 13, 'class="soft"'))
        for rank in inside:
            row, column = divmod(rank - inside[0], columns)
            places[rank] = x + _PAD + column * (wide + _GAP), y + _PAD + _LABEL + row * (high + _GAP)
    for rank, (x, y) in places.items():
        coords = layout.coords(rank)
        words = [f"{name} {coords[name]}" for name in large]
        parts.append(f'<g class="rank" data-rank="{rank}"><title>rank {rank}: {", ".join(words)}</title>')
        parts.append(_rect(x, y, wide, high, f'fill="{_color(coords[axis], layout[axis])}" rx="5"'))
        parts.append(_text(x + wide / 2, y + 18, str(rank), 17 if shown else 14, 'text-anchor="middle"'))
        for line, word in enumerate(words[: len(shown)], 1):
            parts.append(_text(x + wide / 2, y + 18 + 16 * line, word, 13, 'text-anchor="middle"'))
        parts.append("</g>")
    # What follows each other in a row and is of one group has one outline.
    for (_, y, group), members in groupby(places, lambda rank: (rank // node, places[rank][1], rank // size)):
        first, *others = members
        length = (len(others) + 1) * (wide + _GAP) - _GAP
        kind = "group crosses" if group in crossing else "group"
        parts.append(_rect(places[first][0] - 3, y - 3, length + 6, high + 6, f'class="{kind}" rx="6"'))
    height = top + ceil(boxes / across) * (box_high + _PAD) - _PAD + _MARGIN
    whole = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    tag = f'<svg xmlns="http://www.w3.org/2000/svg" {whole} {_FONT}>'
    title, paper = f"<title>{layout}, colored by {axis}</title>", _rect(0, 0, width, height, 'class="paper"')
    return "\n".join([tag, title, _STYLE, paper, *parts, "</svg>\n"])


def _legend(title: str, notes: list[str], axis: str, size: int, width: int) -> tuple[list[str], int]:
    """Return the heading, the notes and the colors, and the y coordinate below."""
    parts, y = [_text(_MARGIN, 40, title, 20, 'class="ink"')], 40
    for note in notes:
        y += 19
        parts.append(_text(_MARGIN, y, note, 14, 'class="soft"'))
    x, y, step = _MARGIN, y + 12, ceil(size / _TICKS)
    for at in range(0, size, step):
        name = f"{axis} {at}" if step == 1 or at + step < size else f"{axis} {at} ... {size - 1}"
        if x + 34 + 9 * len(name) > width - _MARGIN:
            x, y = _MARGIN, y + 24
        parts.append(_rect(x, y, 18, 18, f'class="edge" fill="{_color(at, size)}" rx="4"'))
        parts.append(_text(x + 24, y + 14, name, 14, 'class="ink"'))
        x += 34 + 9 * len(name)
    return parts, y + 36


def _rect(x: float, y: float, width: float, height: float, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {more}/>'


def _text(x: float, y: float, text: str, size: int, more: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {more}>{text}</text>'


def _color(at: int, size: int) -> str:
    return _DISTINCT[at] if size <= len(_DISTINCT) else f"hsl({360 * at / size:g}, 65%, 68%)"
