"""The cells of a picture, of one rank or, in a large world, of many; the nodes they are in; their colors."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.errors import AxisError, did_you_mean
from namedmesh.plan.members import group_of

if TYPE_CHECKING:
    from namedmesh.plan.core import Plan

LARGEST = 512
"""How many cells a picture has at most."""
_ROW = 8
_STRIPES = 16
_DISTINCT = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#8c8c8c")
# From dark to light, for coordinates that are too many to tell apart by hue.
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_MOST_SHADES = 64


class Shade(NamedTuple):
    """A background, and the color of text that can be read on it."""

    fill: str
    text: str


class Cell(NamedTuple):
    """Consecutive ranks that are drawn as one; a single rank unless the world is large."""

    first: int
    ranks: int

    @property
    def label(self) -> str:
        """The rank, or the first and the last."""
        return str(self.first) if self.ranks == 1 else f"{self.first}\N{EN DASH}{self.first + self.ranks - 1}"


class Box(NamedTuple):
    """The cells that are drawn together, a node's where nodes are known, their label, and that of the block around it."""

    label: str
    rows: tuple[tuple[Cell, ...], ...]
    around: str = ""


class Outline(NamedTuple):
    """The part of a group that is in a row: its first and last column, whether it starts and ends there, and leaves its node."""

    first: int
    last: int
    starts: bool
    ends: bool
    crosses: bool


@cache
def shades(size: int) -> tuple[Shade, ...]:
    """Return a color for each coordinate of an axis: hues up to eight, a ramp above, shared shades beyond 64."""
    fills = list(_DISTINCT[:size])
    if size > len(_DISTINCT):
        count = min(size, _MOST_SHADES)
        # Every other one is paler, so that neighbors differ however many there are.
        fills = [_ramped(number / (count - 1), 0.3 * (number % 2)) for number in range(count)]
    return tuple(Shade(fill, _text_on(fill)) for fill in fills)


def _ramped(at: float, paler: float) -> str:
    position = at * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    mixed = [a + (b - a) * (position - low) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)]
    return f"#{bytes(round(channel + (255 - channel) * paler) for channel in mixed).hex()}"


def _text_on(fill: str) -> str:
    """Return black or white, whichever contrasts more (relative luminance, with the usual gamma of 2.2)."""
    linear = [(channel / 255) ** 2.2 for channel in bytes.fromhex(fill[1:])]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


class Grid:
    """The cells of a plan, in ``boxes``; each stands for ``block`` ranks.

    ``axes`` can give the colors, each with its layout; groups of the ``outlined`` one, the fastest of size above 1, are
    neighbors in the picture.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.block = plan, 1
        self.axes = dict.fromkeys(plan.layout, plan.layout)
        if plan.expert is not None:
            self.axes |= {axis: plan.expert for axis in plan.expert if axis not in self.axes}
        self.outlined = next((axis for axis in reversed(plan.layout.axes) if plan.layout[axis] > 1), None)
        world = plan.world_size
        named = {"node": plan.gpus_per_node, "NVLink domain": plan.nvlink_domain}
        sizes = {word: size for word, size in named.items() if size is not None}
        node = next(iter(sizes.values()), min(_ROW, world))
        box, around, columns = node, "", _ROW
        if world > LARGEST:
            self.block = node * -(-world // (node * LARGEST))
            domain = plan.nvlink_domain or 0
            box = domain if domain > self.block and domain % self.block == 0 else world
            sizes = {word: size for word, size in sizes.items() if size == box < world}
            if self.block > 1:
                columns = 16 if world < 10**4 else 10  # labels of two numbers are wide
        else:
            small, large = min([*sizes.values(), node]), max([*sizes.values(), node])
            if small < large and large % small == 0:  # the small ones stand in the large ones
                box, around = small, max(sizes, key=sizes.__getitem__)
        outer = sizes.pop(around, 0)
        self.boxes: list[Box] = []
        for first in range(0, world, box):
            stop = min(first + box, world)
            label = ", ".join(_numbered(word, first, stop, size) for word, size in sizes.items())
            if not label and self.block == 1:
                label = _numbered("rank", first, stop, 1)
            cells = [Cell(at, min(self.block, stop - at)) for at in range(first, stop, self.block)]
            rows = tuple(tuple(cells[i : i + columns]) for i in range(0, len(cells), columns))
            self.boxes.append(Box(label, rows, _numbered(around, first, stop, outer) if outer else ""))
        self.cells = [cell for box in self.boxes for row in box.rows for cell in row]

    @property
    def note(self) -> str:
        """What a cell stands for, if that is more than one rank; otherwise what is outlined."""
        if self.block > 1:
            nodes = self.plan.gpus_per_node and self.block // self.plan.gpus_per_node
            what = {None: "", 1: "a node of "}.get(nodes, f"{nodes} nodes, ")
            return f"each cell is {what}{self.block} ranks; stripes where they differ"
        if self.outlined is None:
            return ""
        note = f"outlined: groups of {self.outlined}"
        rows = [self.outlines(row) for box in self.boxes for row in box.rows]
        if any(outline.crosses for row in rows for outline in row):
            place = "a node" if self.plan.gpus_per_node else "an NVLink domain"
            note += f", dashed and open where they leave {place}"
        return note

    def color_axis(self, name: str | None = None) -> str:
        """Return the axis that gives the colors: the one with the name, or the slowest of size above 1."""
        axes = self.axes
        if name is None:
            return next((axis for axis, layout in axes.items() if layout[axis] > 1), next(iter(axes)))
        if name not in axes:
            raise AxisError(f"axis {name!r} is not one of {tuple(axes)}{did_you_mean(name, axes)}")
        return name

    def coordinates(self, cell: Cell, axis: str) -> list[int]:
        """Return the coordinates of a cell's ranks on an axis, as they follow each other; 16 of them at most."""
        layout = self.axes[axis]
        size, stride = layout[axis], layout.strides[layout.axes.index(axis)]
        first = cell.first // stride
        steps = min((cell.first + cell.ranks - 1) // stride - first + 1, size)
        shown = min(steps, _STRIPES)
        return [(first + i * steps // shown) % size for i in range(shown)]

    def shades(self, cell: Cell, axis: str) -> list[Shade]:
        """Return the color of a cell, or those of its stripes if its ranks have several coordinates."""
        size = self.axes[axis][axis]
        colors = shades(size)
        return [colors[at * len(colors) // size] for at in self.coordinates(cell, axis)]

    def describe(self, cell: Cell) -> str:
        """Return a cell's ranks and coordinates in words."""
        places = []
        for axis in self.axes:
            found = self.coordinates(cell, axis)
            places.append(f"{axis} {found[0] if len(found) == 1 else 'several'}")
        return f"{'rank' if cell.ranks == 1 else 'ranks'} {cell.label}: {', '.join(places)}"

    def outlines(self, row: tuple[Cell, ...]) -> list[Outline]:
        """Return the parts of groups of the outlined axis that are in a row."""
        if self.outlined is None or self.block > 1:
            return []
        node = self.plan.gpus_per_node or self.plan.nvlink_domain or self.plan.world_size
        groups = [group_of(self.plan.layout, cell.first, self.outlined) for cell in row]
        starts = [i for i in range(len(row)) if i == 0 or groups[i] != groups[i - 1]]
        found = []
        for start, stop in zip(starts, [*starts[1:], len(row)], strict=True):
            low, high = groups[start].first, groups[start][-1]
            starts_here, ends_here = row[start].first == low, row[stop - 1].first == high
            found.append(Outline(start, stop - 1, starts_here, ends_here, low // node != high // node))
        return found

    def blocks(self, name: str | None) -> list[list[tuple[str, str, str]]]:
        """Return lines for a terminal, of which each cell is a single rank: texts with their background and color."""
        axis = self.color_axis(name)
        size = max(len(cell.label) for cell in self.cells) + 2
        wide = max(len(box.label) for box in self.boxes) + 1
        colors = shades(self.axes[axis][axis])
        step = -(-len(colors) // _STRIPES)
        lines = [[(f" {axis} {at} ", *colors[at]) for at in range(0, len(colors), step)], []]
        for box in self.boxes:
            label = box.label
            for row in box.rows:
                colored = [(f"{cell.label:^{size}}", *self.shades(cell, axis)[0]) for cell in row]
                lines.append([(f"{label:<{wide}}", "", ""), *colored])
                label = ""
        return lines


def _numbered(word: str, first: int, stop: int, size: int) -> str:
    """Write which blocks some ranks are in: ``node 2``, or a first and a last one."""
    low, high = first // size, (stop - 1) // size
    return f"{word} {low}" if low == high else f"{word}s {low}\N{EN DASH}{high}"
