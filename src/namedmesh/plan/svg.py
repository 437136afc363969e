"""Draw a plan as one SVG picture: the ranks in their nodes, colored by an axis, the groups of the fastest axis outlined."""

from __future__ import annotations

from math import ceil, sqrt
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

from namedmesh.errors import AxisError, did_you_mean

if TYPE_CHECKING:
    from namedmesh.plan.describe import Plan

_LARGEST = 512  # cells that are drawn
_ROW, _MARGIN, _LABEL, _PAD, _WIDEST, _NARROWEST = 8, 24, 18, 12, 1360, 512
_TICKS = 16  # colors in the legend
_DISTINCT = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#8c8c8c")
# From dark to light, for coordinates that are too many to tell apart by hue; every other one is paler.
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_STYLE = """<style>.paper { fill: #ffffff; } .ink { fill: #1f2933; } .soft { fill: #52606d; } .node { fill: #f3f5f8; }
.edge { stroke: #7b8794; } .group { stroke: #1f2933; fill: none; stroke-width: 1.75; }
.crosses { stroke: #c2185b; stroke-dasharray: 6 3; }
@media (prefers-color-scheme: dark) { .paper { fill: #14181d; } .ink { fill: #e6eaee; } .soft { fill: #a7b1bb; }
.node { fill: #1e242b; } .group { stroke: #e6eaee; } .crosses { stroke: #ff80ab; } }</style>"""


class _Cell(NamedTuple):
    """The size of a cell and of its text; ``small`` is 0 where there is room for the rank only."""

    width: int
    height: int
    font: int
    small: int
    gap: int


def draw_svg(plan: Plan, *, color_by: str | None = None) -> str:
    """Draw a plan.

    Args:
        plan: the plan; nodes are drawn where it has ``gpus_per_node``, else rows of eight ranks.
        color_by: the axis that gives the colors; by default the slowest of size above 1.

    Returns:
        An SVG document, which follows the reader's preference for light or dark. Of more than 512 ranks the first are drawn.

    Raises:
        AxisError: there is no such axis.

    Example:
        >>> from namedmesh.plan import make_plan
        >>> draw_svg(make_plan("pp=2,tp=4")).count('class="rank"')
        8
    """
    layout = plan.layout
    large = [axis for axis in layout if layout[axis] > 1] or list(layout)
    axis = large[0] if color_by is None else color_by
    if axis not in layout:
        raise AxisError(f"axis {axis!r} is not one of {tuple(layout)}{did_you_mean(axis, layout)}")
    drawn, node = min(layout.world_size, _LARGEST), plan.gpus_per_node or _ROW
    cell = _cell(len(large), layout.world_size, max(map(len, large)))
    columns, boxes = min(node, _ROW), ceil(drawn / node)
    wide = columns * (cell.width + cell.gap) - cell.gap + 2 * _PAD
    high = ceil(min(node, drawn) / columns) * (cell.height + cell.gap) - cell.gap + 2 * _PAD + _LABEL
    across = ceil(sqrt(boxes * 1.5 * high / wide))  # a picture half as wide again as it is high
    across = max(1, min(boxes, across, (_WIDEST - 2 * _MARGIN) // (wide + _PAD)))
    width = max(_NARROWEST, across * (wide + _PAD) - _PAD + 2 * _MARGIN)
    notes = [f"colored by {axis}", f"outlined: groups of {large[-1]}"]
    if any(_crosses(plan, rank, large[-1]) for rank in range(drawn)):
        notes[1] += ", dashed where they leave a node"
    if drawn < layout.world_size:
        notes.append(f"ranks {drawn} to {layout.world_size - 1} are not drawn")
    parts, top = _head(str(layout), notes, axis, layout[axis], width)
    for number in range(boxes):
        ranks = range(number * node, min((number + 1) * node, drawn))
        x = _MARGIN + number % across * (wide + _PAD)
        y = top + number // across * (high + _PAD)
        label = f"node {number}" if plan.gpus_per_node else f"ranks {ranks.start} to {ranks.stop - 1}"
        parts.append(f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" class="node edge" rx="10"/>')
        parts.append(_text(x + _PAD, y + _PAD + 6, label, 13, 'class="soft"'))
        for row in range(0, len(ranks), columns):
            line = y + _LABEL + _PAD + row // columns * (cell.height + cell.gap)
            parts += _draw_row(plan, ranks[row : row + columns], axis, large, cell, (x + _PAD, line))
    height = top + ceil(boxes / across) * (high + _PAD) - _PAD + _MARGIN
    size = f'width="{width}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} '
    start += 'font-family="Helvetica, Arial, sans-serif" role="img">'
    title = f"<title>{escape(str(layout))}, colored by {axis}</title>"
    return "\n".join([start, title, _STYLE, f'<rect class="paper" {size}/>', *parts, "</svg>\n"])


def _cell(axes: int, world_size: int, letters: int) -> _Cell:
    if world_size > 128:  # noqa: PLR2004  where coordinates have no room
        return _Cell(max(30, len(str(world_size - 1)) * 9 + 4), 22, 14, 0, 7)
    font, small = (20, 13) if world_size <= 16 else (17, 11)  # noqa: PLR2004
    per_line = 2 if letters <= 4 else 1  # noqa: PLR2004  short names stand side by side
    width = min(150, max(58, round(per_line * (letters + 3) * small * 0.6) + 4))
    return _Cell(width, font + ceil(axes / per_line) * (small + 3) + 14, font, small, 8)


def _head(title: str, notes: list[str], axis: str, size: int, width: int) -> tuple[list[str], int]:
    """Return the heading, the notes and the legend, and the y coordinate below."""
    parts, y = [], _MARGIN - 8
    for text, font, ink in ((title, 20, "ink"), *((note, 14, "soft") for note in notes)):
        for line in wrap(text, (width - 2 * _MARGIN) // round(font * 0.58), break_on_hyphens=False):
            y += font + 5
            parts.append(_text(_MARGIN, y, line, font, f'class="{ink}"'))
    x, y, step = _MARGIN, y + 12, ceil(size / _TICKS)
    for at in range(0, size, step):
        name = f"{axis} {at}" if step == 1 or at + step < size else f"{axis} {at} ... {size - 1}"
        if x + 34 + 9 * len(name) > width - _MARGIN:
            x, y = _MARGIN, y + 24
        parts.append(
            f'<rect x="{x}" y="{y}" width="18" height="18" class="edge" fill="{_color(at, size)}" rx="4"/>'
        )
        parts.append(_text(x + 24, y + 14, name, 14, 'class="ink"'))
        x += 34 + 9 * len(name)
    return parts, y + 36


def _draw_row(  # noqa: PLR0917  what it is drawn from
    plan: Plan, ranks: range, axis: str, large: list[str], cell: _Cell, place: tuple[int, int]
) -> list[str]:
    parts, layout, (left, y) = [], plan.layout, place
    for column, rank in enumerate(ranks):
        coords, x = layout.coords(rank), left + column * (cell.width + cell.gap)
        fill, words = _color(coords[axis], layout[axis]), [f"{name} {coords[name]}" for name in large]
        ink, middle = f'fill="{_ink(fill)}" text-anchor="middle"', x + cell.width / 2
        parts.append(f'<g class="rank" data-rank="{rank}"><title>rank {rank}: {", ".join(words)}</title>')
        parts.append(
            f'<rect x="{x}" y="{y}" width="{cell.width}" height="{cell.height}" fill="{fill}" rx="5"/>'
        )
        step = 2 if max(map(len, large)) <= 4 else 1  # noqa: PLR2004
        lines = [" ".join(words[i : i + step]) for i in range(0, len(words), step)] if cell.small else []
        base = y + (cell.height - cell.font - len(lines) * (cell.small + 2)) / 2 + cell.font * 0.82
        parts.append(_text(middle, base, str(rank), cell.font, ink))
        for number, line in enumerate(lines, 1):
            parts.append(_text(middle, base + number * (cell.small + 3), line, cell.small, ink))
        parts.append("</g>")
    # What follows each other in a row and is of one group has one outline.
    firsts, reach = [_ends(plan, rank, large[-1])[0] for rank in ranks], cell.gap / 2 - 1.25
    starts = [i for i in range(len(ranks)) if i == 0 or firsts[i] != firsts[i - 1]]
    for start, stop in zip(starts, [*starts[1:], len(ranks)], strict=True):
        x = left + start * (cell.width + cell.gap)
        length = (stop - start) * (cell.width + cell.gap) - cell.gap
        crosses = " crosses" if _crosses(plan, ranks[start], large[-1]) else ""
        parts.append(
            f'<rect class="group{crosses}" x="{x - reach:g}" y="{y - reach:g}" width="{length + 2 * reach:g}" '
            f'height="{cell.height + 2 * reach:g}" rx="6"/>'
        )
    return parts


def _ends(plan: Plan, rank: int, axis: str) -> tuple[int, int]:
    """Return the first and the last rank of a group over an axis."""
    layout = plan.layout
    stride = layout.strides[layout.axes.index(axis)]
    first = rank - layout.coords(rank)[axis] * stride
    return first, first + (layout[axis] - 1) * stride


def _crosses(plan: Plan, rank: int, axis: str) -> bool:
    node = plan.gpus_per_node or plan.layout.world_size
    first, last = _ends(plan, rank, axis)
    return first // node != last // node


def _text(x: float, y: float, text: str, size: int, paint: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {paint}>{escape(text)}</text>'


def _color(at: int, size: int) -> str:
    if size <= len(_DISTINCT):
        return _DISTINCT[at]
    position = at / (size - 1) * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    mixed = [a + (b - a) * (position - low) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)]
    return f"#{bytes(round(channel + (255 - channel) * 0.3 * (at % 2)) for channel in mixed).hex()}"


def _ink(fill: str) -> str:
    """Return black or white, whichever contrasts more (relative luminance, with the usual gamma of 2.2)."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in bytes.fromhex(fill[1:]))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"
