"""Draw a plan as one HTML page that loads nothing: the ranks in their nodes; the reader picks axes and a rank."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from namedmesh.plan.cells import Cell, Grid, shades
from namedmesh.plan.text import replicas_line

if TYPE_CHECKING:
    from namedmesh.layout import Layout
    from namedmesh.plan.cells import Box
    from namedmesh.plan.core import Plan

PAIRS = (
    ("ink", "paper"),
    ("soft", "paper"),
    ("ink", "node"),
    ("soft", "node"),
    ("alarm", "paper"),
    ("paper", "ring"),
)
"""Which text is drawn on which ground; each pair has a contrast of 4.5 or more, light and dark."""
_MANY = 128  # cells that leave no room beside them
STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2933; --soft: #52606d; --node: #f3f5f8; --edge: #7b8794;
  --ring: #c2185b; --alarm: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6eaee; --soft: #a7b1bb; --node: #1e242b;
  --edge: #7b8794; --ring: #ff80ab; --alarm: #ffb4ab; } }
* { box-sizing: border-box; }
body { margin: 16px; background: var(--paper); color: var(--ink); font: 15px/1.4 Helvetica, Arial, sans-serif;
  overflow-wrap: anywhere; }
h1, h2 { font-size: 18px; margin: 0 0 4px; }
p, ul { margin: 0 0 8px; color: var(--soft); }
ul { padding-left: 20px; }
form { display: flex; flex-wrap: wrap; gap: 8px 16px; align-items: center; margin: 0 0 8px; }
label { display: flex; gap: 6px; align-items: center; max-width: 100%; }
select, input, form button { font: inherit; color: inherit; background: var(--node); border: 1px solid var(--edge);
  border-radius: 6px; padding: 2px 8px; max-width: 100%; min-width: 0; }
:focus-visible { outline: 3px solid var(--ring); outline-offset: 2px; }
#legend { display: flex; flex-wrap: wrap; gap: 2px 12px; margin: 0 0 8px; min-height: 21px; }
#legend i { display: inline-block; width: 14px; height: 14px; border-radius: 4px; margin-right: 5px; vertical-align: -2px; }
main { display: flex; flex-wrap: wrap; gap: 16px; align-items: flex-start; }
#nodes { display: flex; flex-wrap: wrap; gap: .6em; flex: 1 1 60%; min-width: 0; font-size: 13px;
  font-variant-numeric: tabular-nums; }
.domain { display: flex; flex-wrap: wrap; gap: .6em; border: 1px solid var(--edge); border-radius: .9em; padding: .5em; }
.domain > h3 { flex: 0 0 100%; }
.node { background: var(--node); border: 1px solid var(--edge); border-radius: .7em; padding: .3em .4em; }
h3 { font-size: .85em; font-weight: normal; color: var(--soft); margin: 0; }
.row { display: flex; flex-wrap: wrap; }
.slot { border: 2px solid transparent; padding: .15em; margin: .1em 0; }
.slot.in { border-top-color: var(--ink); border-bottom-color: var(--ink); }
.slot.start { border-left-color: var(--ink); border-radius: .5em 0 0 .5em; }
.slot.end { border-right-color: var(--ink); border-radius: 0 .5em .5em 0; }
.slot.start.end { border-radius: .5em; }
.slot.crosses { border-color: var(--ring); border-style: dashed; }
.slot.crosses:not(.start) { border-left-color: transparent; }
.slot.crosses:not(.end) { border-right-color: transparent; }
.rank { font: inherit; line-height: 1.2; min-width: max(2.6em, var(--cell)); min-height: 1.7em; padding: .1em .2em; border: 0;
  border-radius: .35em; cursor: pointer; position: relative; background: var(--node); color: var(--ink); }
.rank[data-tag]::after { content: attr(data-tag); position: absolute; top: -.7em; right: -.5em; padding: 0 .3em;
  border-radius: .4em; font-size: max(.7em, 8px); background: var(--ring); color: var(--paper); z-index: 1; }
.rank.peer { outline: 3px solid var(--ring); outline-offset: 1px; }
.rank.self { outline: 3px solid var(--ink); outline-offset: 1px; }
aside { flex: 1 1 300px; min-width: 0; }
.many #nodes, .many aside { flex-basis: 100%; }
.many aside { position: sticky; bottom: 0; max-height: 40vh; overflow: auto; background: var(--paper); z-index: 2; }
.many aside:not(.picked) table { display: none; }
.many .node { display: flex; flex-wrap: wrap; align-items: center; gap: 0 .4em; }
.many h3 { min-width: 4.6em; }
.blocks .node { display: flex; flex-wrap: wrap; flex: 1; }
.blocks h3 { flex: 0 0 100%; }
.blocks .row { display: contents; }
table { border-collapse: collapse; width: 100%; margin: 0 0 8px; }
th, td { text-align: left; vertical-align: top; padding: 2px 8px 2px 0; border-bottom: 1px solid var(--edge); }
td { overflow-wrap: break-word; }  /* unlike "anywhere", a column is as wide as its longest word */
th { white-space: nowrap; overflow-wrap: normal; }
.warning, #who.refused { color: var(--alarm); }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("layout").textContent), get = id => document.getElementById(id);
const cells = [...document.querySelectorAll(".rank")], nodes = get("nodes");
const color = get("axis"), outlined = get("outline"), picked = get("rank"), zoom = get("zoom"), who = get("who");
const axisOf = name => data.axes.find(axis => axis.name === name);
const at = (rank, axis) => axis.runs.reduce((n, [size, stride]) => n * size + Math.floor(rank / stride) % size, 0);
const shadeOf = (axis, place) => axis.shades[Math.floor(place * axis.shades.length / axis.size)];
const firstOf = cell => +cell.dataset.rank, countOf = cell => +cell.dataset.count;
function peers(rank, axis) {
  return axis.peers.reduce((ranks, [size, stride]) => ranks.flatMap(first =>
    Array.from({ length: Math.min(size, 1e6) }, (_, i) => first + (i - Math.floor(rank / stride) % size) * stride)), [rank]);
}
function places(cell, axis) {
  if (countOf(cell) === 1) return [at(firstOf(cell), axis)];
  const [size, stride] = axis.runs[0], start = Math.floor(firstOf(cell) / stride);
  const steps = Math.min(Math.floor((firstOf(cell) + countOf(cell) - 1) / stride) - start + 1, size), shown = Math.min(steps, 16);
  return Array.from({ length: shown }, (_, i) => (start + Math.floor(i * steps / shown)) % size);
}
function paint() {
  const axis = axisOf(color.value);
  for (const cell of cells) {
    const shades = places(cell, axis).map(place => shadeOf(axis, place)), plain = shades.length === 1;
    const stripes = shades.map((shade, i) => `${shade[0]} ${i * 100 / shades.length}% ${(i + 1) * 100 / shades.length}%`);
    cell.style.background = plain ? shades[0][0] : `linear-gradient(90deg, ${stripes}) bottom / 100% .4em no-repeat var(--node)`;
    cell.style.color = plain ? shades[0][1] : "var(--ink)";
  }
  const legend = get("legend"), step = Math.ceil(axis.size / 16);
  legend.replaceChildren();
  for (let i = 0; i < axis.size; i += step) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = shadeOf(axis, i)[0];
    item.append(swatch, `${axis.name} ${i}`);
    legend.append(item);
  }
  if (step > 1) legend.append(`... ${axis.size - 1}`);
}
function outline() {
  const axis = axisOf(outlined.value);
  for (const cell of cells) {
    const slot = cell.parentElement, rank = firstOf(cell);
    slot.className = "slot";
    if (!axis || axis.size === 1 || data.block > 1) continue;
    const group = peers(rank, axis), low = Math.min(...group), high = Math.max(...group);
    const joined = other => other && group.includes(firstOf(other.firstElementChild));
    const whole = high - low === group.length - 1;  // the ranks follow each other
    slot.classList.add("in");
    slot.classList.toggle("start", whole ? rank === low : !joined(slot.previousElementSibling));
    slot.classList.toggle("end", whole ? rank === high : !joined(slot.nextElementSibling));
    slot.classList.toggle("crosses", data.node > 0 && Math.floor(low / data.node) !== Math.floor(high / data.node));
  }
}
function say(text, refused) {
  who.textContent = text;
  who.classList.toggle("refused", refused);
  picked.setAttribute("aria-invalid", refused);
}
function pick(focus) {
  const text = picked.value.trim(), rank = Number(text);
  const valid = text !== "" && Number.isInteger(rank) && rank >= 0 && rank < data.world;
  const tags = new Map(), own = Math.floor(rank / data.block);
  for (const axis of valid ? data.axes : [])
    for (const mate of axis.tagged ? peers(rank, axis) : []) {
      const block = Math.floor(mate / data.block);
      if (block !== own) tags.set(block, (tags.get(block) ?? new Set()).add(axis.name));
    }
  cells.forEach((cell, i) => {
    const block = Math.floor(firstOf(cell) / data.block), tag = tags.get(block);
    cell.classList.toggle("self", valid && block === own);
    cell.classList.toggle("peer", valid && tag !== undefined);
    if (tag) cell.dataset.tag = [...tag].join(" "); else delete cell.dataset.tag;
    cell.tabIndex = (valid ? block === own : i === 0) ? 0 : -1;
    if (valid && focus && block === own) cell.focus();
  });
  if (valid) say(`rank ${rank}: ` + data.axes.map(axis => `${axis.name} ${at(rank, axis)}`).join(", "), false);
  else if (text === "" && !picked.validity.badInput) say("pick a rank", false);
  else say(`rank ${text} is not one of 0 to ${data.world - 1}`, true);
  who.parentElement.classList.toggle("picked", valid);
  const body = get("places");
  body.replaceChildren();
  for (const axis of data.axes) {
    const row = body.insertRow(), all = valid ? peers(rank, axis) : [], listed = all.slice(0, 32).join(", ");
    const ranks = all.length === 1 ? "alone" : listed + (all.length > 32 ? `, ... (${all.length})` : "");
    for (const text of [axis.name, valid ? `${at(rank, axis)} of 0 to ${axis.size - 1}` : axis.size, ranks, axis.where])
      row.insertCell().textContent = text;
  }
}
function fit() {
  let size = 22.5;
  const over = () => nodes.getBoundingClientRect().bottom + scrollY + 44 > innerHeight;
  const ragged = () => {  // a node whose ranks break into lines of different lengths
    const slots = [...nodes.querySelector(".row").children];
    return data.block === 1 && slots.length % slots.filter(slot => slot.offsetTop === slots[0].offsetTop).length;
  };
  do nodes.style.fontSize = `${size -= 0.5}px`; while (size > 8 && (over() || ragged()));
  if (over()) nodes.style.fontSize = `${size = innerWidth > 700 ? 9 : 12}px`;
  zoom.value = size;
}
function move(event) {
  const i = cells.indexOf(event.target), box = event.target.getBoundingClientRect();
  const steps = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: cells.length - 1 }, down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  const away = cell => {  // the nearest row first, and in it the nearest column
    const other = cell.getBoundingClientRect(), far = (other.top - box.top) * down;
    return far > 2 ? far * 1e4 + Math.abs(other.left - box.left) : Infinity;
  };
  const beyond = down ? cells.filter(cell => away(cell) < Infinity) : [];
  const target = beyond.length ? beyond.reduce((a, b) => away(b) < away(a) ? b : a) : cells[steps[event.key]];
  if (!target) return;
  event.preventDefault();
  picked.value = firstOf(target);
  pick(true);
}
color.addEventListener("change", paint);
outlined.addEventListener("change", outline);
picked.addEventListener("input", () => pick());
zoom.addEventListener("input", () => { nodes.style.fontSize = `${zoom.value}px`; });
get("fit").addEventListener("click", fit);
document.querySelector("form").addEventListener("submit", event => event.preventDefault());
get("none").addEventListener("click", () => { picked.value = ""; pick(); });
nodes.addEventListener("keydown", event => { if (event.target.matches(".rank")) move(event); });
for (const cell of cells) cell.addEventListener("click", () => { picked.value = firstOf(cell); pick(); });
paint();
outline();
pick();
fit();
"""


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
    count = sum(len(row) for box in grid.boxes for row in box.rows)
    classes = "many " * (count > _MANY) + "blocks" * (grid.block > 1)
    longest = max(len(cell.label) for box in grid.boxes for row in box.rows for cell in row)
    title = escape(str(plan.layout))
    experts = f" Experts: {escape(str(plan.expert))}." if plan.expert is not None else ""
    cells = f"{grid.note[0].upper()}{grid.note[1:]}. " if grid.block > 1 else ""
    warnings = "".join(f'<li class="warning">{escape(warning)}</li>' for warning in plan.warnings)
    colored = [own["name"] for own in data["axes"] if grid.block == 1 or own["tagged"]]
    outlines = ["none", *grid.axes] if grid.block == 1 else ["none"]
    blocks = groupby(grid.boxes, key=lambda box: box.around)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>{cells}{escape(replicas_line(plan))}.{experts} Pick a rank with a click, a number or the arrow keys: the ranks that it
shares an axis with are ringed and carry the name of the axis.</p>
<ul>{warnings}</ul>
<form>
<label>Color <select id="axis">{_options(colored, axis)}</select></label>
<label>Outline <select id="outline">{_options(outlines, grid.outlined_axis())}</select></label>
<label>Rank <input id="rank" type="number" min="0" max="{plan.world_size - 1}" value="{"" if rank is None else rank}"></label>
<button id="none" type="button">No rank</button>
<label>Size <input id="zoom" type="range" min="6" max="28" step="0.5" value="13"></label>
<button id="fit" type="button">Fit to window</button>
</form>
<div id="legend"></div>
<main class="{classes}">
<div id="nodes" role="group" aria-label="Ranks" style="--cell:{longest + 1}ch">
{chr(10).join(_block(grid, around, list(boxes), axis) for around, boxes in blocks)}
</div>
<aside>
<h2 id="who" role="status" aria-live="polite">pick a rank</h2>
<table><thead><tr><th>axis</th><th>place</th><th>ranks</th><th>nodes</th></tr></thead><tbody id="places"></tbody></table>
</aside>
</main>
<script type="application/json" id="layout">{_embedded(data)}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _options(names: list[str], chosen: str | None) -> str:
    return "".join(
        f"<option{' selected' if name == chosen else ''}>{escape(name)}</option>" for name in names
    )


def _block(grid: Grid, around: str, boxes: list[Box], axis: str) -> str:
    """Write the boxes of one NVLink domain, or all of them where none is around them."""
    text = "\n".join(_box(grid, box, axis) for box in boxes)
    return f'<div class="domain"><h3>{escape(around)}</h3>\n{text}\n</div>' if around else text


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
        f'<span class="slot"><button class="rank" type="button" data-rank="{cell.first}" data-count="{cell.count}" '
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


def _embedded(data: dict[str, Any]) -> str:
    """Write JSON that cannot end the element that contains it."""
    return json.dumps(data).replace("<", "\\u003c")
