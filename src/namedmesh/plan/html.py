"""Draw a plan as one HTML page that loads nothing: the ranks in their nodes; the reader picks axes and a rank."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from namedmesh.plan.cells import Cell, Grid, shades
from namedmesh.plan.text import replicas_line

if TYPE_CHECKING:
    from namedmesh.layout import Layout
    from namedmesh.plan.cells import Box
    from namedmesh.plan.core import Plan

_MANY = 128  # cells that leave no room beside them


def draw_html(plan: Plan, *, color_by: str | None = None, rank: int | None = None) -> str:
    """Write a plan as a page.

    Args:
        plan: the plan.
        color_by: the axis that gives the colors at first; by default the slowest of size above 1.
        rank: the rank that is picked at first.

    Returns:
        An HTML document that needs nothing else. Up to 512 ranks each has a cell; above, a cell stands for a
        range of ranks. Any axis can give the colors or the outlines; the peers of a picked rank on every axis
        are marked with the names of the axes. The picture fits the window, or is as large as the reader likes.

    Raises:
        AxisError: there is no such axis.
        LayoutError: the rank is not in the layout.

    Example:
        >>> from namedmesh.plan import make_plan
        >>> draw_html(make_plan("pp=2,tp=4")).count('class="rank"')
        8
    """
    grid = Grid(plan)
    axis = grid.color_axis(color_by)
    if rank is not None:
        plan.layout.coords(rank)  # raises if there is no such rank
    data = _layout_data(grid)
    classes, note = "", ""
    if len(grid.cells) > _MANY:
        classes = "many "
    colored, outlines = [own["name"] for own in data["axes"]], ["none", *grid.axes]
    if grid.block > 1:
        classes += "blocks"
        note = f"{grid.note[0].upper()}{grid.note[1:]}. "
        colored, outlines = list(grid.axes), ["none"]
    nodes = []
    for around, boxes in groupby(grid.boxes, key=lambda box: box.around):
        text = "\n".join(_box(grid, box, axis) for box in boxes)
        nodes.append(f'<div class="domain"><h3>{escape(around)}</h3>\n{text}\n</div>' if around else text)
    return Template(_read("page.html")).substitute(
        title=escape(str(plan.layout)),
        style=_read("page.css"),
        note=note,
        replicas=escape(replicas_line(plan)),
        experts=f" Experts: {escape(str(plan.expert))}." if plan.expert is not None else "",
        warnings="".join(f'<li class="warning">{escape(warning)}</li>' for warning in plan.warnings),
        colors=_options(colored, axis),
        outlines=_options(outlines, grid.outlined),
        last=plan.world_size - 1,
        rank="" if rank is None else rank,
        classes=classes,
        width=max(len(cell.label) for cell in grid.cells) + 1,
        nodes="\n".join(nodes),
        layout=json.dumps(data).replace("<", "\\u003c"),  # cannot end the element that contains it
        script=_read("page.js"),
    )


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _options(names: list[str], chosen: str | None) -> str:
    return "".join(
        f"<option{' selected' if name == chosen else ''}>{escape(name)}</option>" for name in names
    )


def _box(grid: Grid, box: Box, axis: str) -> str:
    rows = "\n".join(
        f'<div class="row">{"".join(_cell(grid, cell, axis) for cell in row)}</div>' for row in box.rows
    )
    heading = f"<h3>{escape(box.label)}</h3>" if box.label else ""
    return f'<div class="node">{heading}\n{rows}\n</div>'


def _cell(grid: Grid, cell: Cell, axis: str) -> str:
    """Write a cell, with its color for readers without scripts."""
    colors = grid.shades(cell, axis)
    style = f' style="background:{colors[0].fill};color:{colors[0].text}"' if len(colors) == 1 else ""
    return (
        f'<span class="slot"><button class="rank" type="button" data-rank="{cell.first}" data-count="{cell.ranks}" '
        f'aria-label="{escape(grid.describe(cell))}"{style}>{cell.label}</button></span>'
    )


def _layout_data(grid: Grid) -> dict[str, Any]:
    plan = grid.plan
    where = {placement.axis: placement.words for placement in plan.placements}

    def entry(name: str, layout: Layout, peers: tuple[str, ...], *, is_axis: bool) -> dict[str, Any]:
        loops = {axis: [layout[axis], stride] for axis, stride in zip(layout, layout.strides, strict=True)}
        places = [axis for axis in layout if (axis in peers) == is_axis]
        size = layout.size(*places) if places else 1
        return {
            "name": name,
            "size": size,
            "runs": [loops[axis] for axis in places],  # what the coordinate is computed from
            "peers": [loops[axis] for axis in layout if axis in peers],
            "shades": [[shade.fill, shade.text] for shade in shades(size)],
            "where": where.get(name, ""),
            "tagged": is_axis,
        }

    axes = [entry(axis, layout, (axis,), is_axis=True) for axis, layout in grid.axes.items()]
    axes.append(entry("model replica", plan.layout, plan.replica_axes, is_axis=False))
    node = plan.gpus_per_node or plan.nvlink_domain or 0
    return {"world": plan.world_size, "block": grid.block, "node": node, "axes": axes}
