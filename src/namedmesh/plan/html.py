"""Draw a plan as one HTML page that loads nothing: the ranks in their nodes; the reader picks the axis and the rank."""

from __future__ import annotations

import json
from html import escape
from typing import TYPE_CHECKING, Any

from namedmesh.plan.cells import Cell, Grid, shades

if TYPE_CHECKING:
    from namedmesh.plan.cells import Box
    from namedmesh.plan.core import Plan

__all__ = ["draw_html"]

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2933; --soft: #52606d; --node: #f3f5f8; --edge: #b8c2cc;
  --hatch: #cbd2d9; --ring: #c2185b; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6eaee; --soft: #a7b1bb; --node: #1e242b;
  --edge: #47525d; --hatch: #3a444e; --ring: #ff80ab; } }
body { margin: 24px; background: var(--paper); color: var(--ink); font: 15px/1.45 Helvetica, Arial, sans-serif; }
h1 { font-size: 20px; margin: 0 0 4px; }
p { margin: 0 0 12px; color: var(--soft); }
form { display: flex; flex-wrap: wrap; gap: 12px 20px; align-items: center; margin: 0 0 12px; }
select, input, form button { font: inherit; color: inherit; background: var(--node); border: 1px solid var(--edge);
  border-radius: 6px; padding: 3px 8px; }
#legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 0 0 14px; min-height: 22px; }
#legend i { display: inline-block; width: 14px; height: 14px; border-radius: 4px; margin-right: 5px; vertical-align: -2px; }
main { display: flex; flex-wrap: wrap; gap: 20px; align-items: flex-start; }
#nodes { display: flex; flex-wrap: wrap; gap: 10px; flex: 1 1 560px; }
.node { background: var(--node); border: 1px solid var(--edge); border-radius: 10px; padding: 6px 10px 10px; }
.node h2 { font-size: 12px; font-weight: normal; color: var(--soft); margin: 0 0 4px; }
.row { display: flex; gap: 5px; margin-top: 5px; }
.group { display: flex; gap: 5px; border: 1.5px solid var(--soft); border-radius: 8px; padding: 3px; }
.rank { font: inherit; font-size: 13px; min-width: max(38px, var(--cell)); height: 30px; padding: 0 4px; border: 0; border-radius: 5px;
  cursor: pointer; }
.rank.mixed { background: repeating-linear-gradient(45deg, var(--node) 0 8px, var(--hatch) 8px 10px) !important;
  color: var(--ink) !important; }
.rank.peer { outline: 3px solid var(--ring); outline-offset: 1px; }
.rank.self { outline: 3px solid var(--ink); outline-offset: 1px; font-weight: bold; }
.picked .rank:not(.peer):not(.self) { opacity: 0.5; }
aside { flex: 0 1 340px; min-width: 260px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 3px 8px 3px 0; border-bottom: 1px solid var(--edge); }
td { overflow-wrap: anywhere; }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("layout").textContent);
const cells = [...document.querySelectorAll(".rank")];
const axisOf = name => data.axes.find(axis => axis.name === name);
const at = (rank, axis) => Math.floor(rank / axis.stride) % axis.size;
const color = document.getElementById("axis"), picked = document.getElementById("rank");
const shadeOf = (axis, place) => axis.shades[Math.floor(place * axis.shades.length / axis.size)];
function place(first, count, axis) {
  const same = Math.floor(first / axis.stride) === Math.floor((first + count - 1) / axis.stride);
  return same || axis.size === 1 ? at(first, axis) : null;
}
function peers(rank, axis) {
  const base = rank - at(rank, axis) * axis.stride;
  return Array.from({ length: axis.size }, (_, i) => base + i * axis.stride);
}
function paint() {
  const axis = axisOf(color.value);
  for (const cell of cells) {
    const where = place(+cell.dataset.rank, +cell.dataset.count, axis);
    cell.classList.toggle("mixed", where === null);
    const shade = shadeOf(axis, where ?? 0);
    cell.style.background = shade[0];
    cell.style.color = shade[1];
  }
  const legend = document.getElementById("legend"), step = Math.ceil(axis.size / 16);
  legend.replaceChildren();
  for (let i = 0; i < axis.size; i += step) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = shadeOf(axis, i)[0];
    item.append(swatch, `${axis.name} ${i}`);
    legend.append(item);
  }
  if (step > 1) legend.append(`... ${axis.size - 1}`);
}
function pick() {
  const text = picked.value.trim(), rank = Number(text);
  const valid = text !== "" && Number.isInteger(rank) && rank >= 0 && rank < data.world;
  document.getElementById("nodes").classList.toggle("picked", valid);
  const mates = valid ? peers(rank, axisOf(color.value)) : [];
  const blocks = new Set(mates.map(mate => Math.floor(mate / data.block)));
  for (const cell of cells) {
    const block = Math.floor(+cell.dataset.rank / data.block), own = Math.floor(rank / data.block);
    cell.classList.toggle("self", valid && block === own);
    cell.classList.toggle("peer", valid && block !== own && blocks.has(block));
  }
  const body = document.getElementById("places");
  body.replaceChildren();
  document.getElementById("who").textContent = valid ? `rank ${rank}` : "pick a rank";
  for (const axis of valid ? data.axes : []) {
    const row = body.insertRow(), all = peers(rank, axis);
    const shown = all.slice(0, 32).join(", ") + (all.length > 32 ? `, ... (${all.length})` : "");
    for (const text of [axis.name, `${at(rank, axis)} of ${axis.size}`, axis.size === 1 ? "alone" : shown])
      row.insertCell().textContent = text;
  }
}
color.addEventListener("change", () => { paint(); pick(); });
picked.addEventListener("input", pick);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
document.getElementById("none").addEventListener("click", () => { picked.value = ""; pick(); });
for (const cell of cells) cell.addEventListener("click", () => { picked.value = cell.dataset.rank; pick(); });
paint();
pick();
"""


def draw_html(plan: Plan, *, color_by: str | None = None, rank: int | None = None) -> str:
    """Write a plan as a page.

    Args:
        plan: the plan.
        color_by: the axis that gives the colors at first; by default the slowest of size above 1.
        rank: the rank that is picked at first.

    Returns:
        An HTML document that needs nothing else. Up to 512 ranks each has a cell; above, a cell stands for a
        range of ranks.

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
    grid.check_rank(rank)
    options = "".join(
        f"<option{' selected' if name == axis else ''}>{escape(name)}</option>" for name in grid.axes
    )
    note = f"Each cell is {grid.block} ranks, hatched where they differ. " if grid.block > 1 else ""
    outlined = grid.outlined_axis()
    if grid.block == 1 and outlined is not None:
        note = f"Outlined: groups of {escape(outlined)}. "
    longest = max(len(cell.label) for box in grid.boxes for row in box.rows for cell in row)
    title = escape(str(plan.layout))
    experts = f" Experts: {escape(str(plan.expert))}." if plan.expert is not None else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{note}Pick an axis and a rank: the ranks that it shares the axis with are ringed.{experts}</p>
<form>
<label>Axis <select id="axis">{options}</select></label>
<label>Rank <input id="rank" type="number" min="0" max="{plan.world_size - 1}" value="{"" if rank is None else rank}"></label>
<button id="none" type="button">No rank</button>
</form>
<div id="legend"></div>
<main>
<div id="nodes" style="--cell:{longest + 1}ch">
{chr(10).join(_box(grid, box, axis) for box in grid.boxes)}
</div>
<aside>
<h1 id="who">pick a rank</h1>
<table><thead><tr><th>axis</th><th>place</th><th>ranks</th></tr></thead><tbody id="places"></tbody></table>
</aside>
</main>
<script type="application/json" id="layout">{_embedded(_layout_data(grid))}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _box(grid: Grid, box: Box, axis: str) -> str:
    rows = "\n".join(f'<div class="row">{_row(grid, row, axis)}</div>' for row in box.rows)
    heading = f"<h2>{escape(box.label)}</h2>" if box.label else ""
    return f'<div class="node">{heading}\n{rows}\n</div>'


def _row(grid: Grid, row: tuple[Cell, ...], axis: str) -> str:
    """Write the cells of a row, those of one group of the fastest axis inside an outline."""
    cells = [_cell(grid, cell, axis) for cell in row]
    groups = grid.outlines(row)
    if not groups:
        return "".join(cells)
    return "".join(f'<span class="group">{"".join(cells[first : last + 1])}</span>' for first, last in groups)


def _cell(grid: Grid, cell: Cell, axis: str) -> str:
    """Write a cell, with its color for readers without scripts."""
    shade = grid.shade(cell, axis)
    style = f' style="background:{shade.fill};color:{shade.text}"' if shade is not None else ""
    return f'<button class="rank" data-rank="{cell.first}" data-count="{cell.count}"{style}>{cell.label}</button>'


def _layout_data(grid: Grid) -> dict[str, Any]:
    return {
        "world": grid.plan.world_size,
        "block": grid.block,
        "axes": [
            {
                "name": axis,
                "size": layout[axis],
                "stride": layout.strides[layout.axes.index(axis)],
                "shades": [[shade.fill, shade.text] for shade in shades(layout[axis])],
            }
            for axis, layout in grid.axes.items()
        ],
    }


def _embedded(data: dict[str, Any]) -> str:
    """Write JSON that cannot end the element that contains it."""
    return json.dumps(data).replace("<", "\\u003c")
