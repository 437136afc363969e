"""The cells of a picture, of one rank or, in a large world, of many; the nodes they are in; their colors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.errors import AxisError, LayoutError, did_you_mean
from namedmesh.plan.members import group_of

if TYPE_CHECKING:
    from namedmesh.layout import Layout
    from namedmesh.plan.core import Plan

__all__ = ["LARGEST", "Box", "Cell", "Grid", "Shade", "shades"]

LARGEST = 512
"""How many cells a picture has at most."""
_ROW = 8
_DISTINCT = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#d55e00", "#8c8c8c")
# From dark to light, for coordinates that are too many to tell apart by hue.
_RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_MOST_SHADES = 64


@dataclass(frozen=True)
class Shade:
    """A background, and the color of text that can be read on it."""

    fill: str
    text: str


@dataclass(frozen=True)
class Cell:
    """Consecutive ranks that are drawn as one; a single rank unless the world is large."""

    first: int
    count: int

    @property
    def label(self) -> str:
        """The rank, or the first and the last."""
        return str(self.first) if self.count == 1 else f"{self.first}\N{EN DASH}{self.first + self.count - 1}"


@dataclass(frozen=True)
class Box:
    """The cells that are drawn together, a node's where nodes are known, and their label."""

    label: str
    rows: tuple[tuple[Cell, ...], ...]


def shades(size: int) -> tuple[Shade, ...]:
    """Return a color for each coordinate of an axis: hues up to eight, a ramp above, shared shades beyond 64.

    Example:
        >>> shades(2)[0], len(shades(1000))
        (Shade(fill='#56b4e9', text='#000000'), 64)
    """
    if size <= len(_DISTINCT):
        return tuple(Shade(fill, _text_on(_channels(fill))) for fill in _DISTINCT[:size])
    count = min(size, _MOST_SHADES)
    # Every other one is paler, so that neighbors differ however many there are.
    return tuple(_ramped(number / (count - 1), 0.3 * (number % 2)) for number in range(count))


def _channels(fill: str) -> tuple[int, int, int]:
    return int(fill[1:3], 16), int(fill[3:5], 16), int(fill[5:7], 16)


def _ramped(at: float, paler: float) -> Shade:
    position = at * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    mixed = [round(a + (b - a) * (position - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True)]
    mixed = [round(channel + (255 - channel) * paler) for channel in mixed]
    channels = mixed[0], mixed[1], mixed[2]
    return Shade(f"#{channels[0]:02x}{channels[1]:02x}{channels[2]:02x}", _text_on(channels))


def _text_on(channels: tuple[int, int, int]) -> str:
    """Return black or white, whichever contrasts more (relative luminance, with the usual gamma of 2.2)."""
    linear = [(channel / 255) ** 2.2 for channel in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


class Grid:
    """The cells of a plan.

    Args:
        plan: the plan.

    Attributes:
        block: how many ranks a cell stands for.
        boxes: the cells, in boxes.
    """

    boxes: tuple[Box, ...]

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        world = plan.world_size
        node = plan.gpus_per_node or plan.nvlink_domain or min(_ROW, world)
        self.block = 1 if world <= LARGEST else node * -(-world // (node * LARGEST))
        if self.block > 1:
            cells = [Cell(first, min(self.block, world - first)) for first in range(0, world, self.block)]
            self.boxes = (Box("", _rows(cells)),)
            return
        known = plan.gpus_per_node is not None or plan.nvlink_domain is not None
        self.boxes = tuple(
            Box(
                self._box_label(first, node, world, known=known),
                _rows([Cell(rank, 1) for rank in range(first, min(first + node, world))]),
            )
            for first in range(0, world, node)
        )

    def _box_label(self, first: int, node: int, world: int, *, known: bool) -> str:
        if known:
            return f"node {first // node}" if self.plan.gpus_per_node else f"NVLink domain {first // node}"
        return f"ranks {first}\N{EN DASH}{min(first + node, world) - 1}"

    @property
    def axes(self) -> dict[str, Layout]:
        """The axes that can give the colors, with the layout of each."""
        plan = self.plan
        axes = dict.fromkeys(plan.layout, plan.layout)
        if plan.expert is not None:
            axes |= {axis: plan.expert for axis in plan.expert if axis not in axes}
        return axes

    def color_axis(self, name: str | None = None) -> str:
        """Return the axis that gives the colors: the one with the name, or the slowest of size above 1.

        Raises:
            AxisError: there is no such axis.
        """
        axes = self.axes
        if name is None:
            return next((axis for axis, layout in axes.items() if layout[axis] > 1), next(iter(axes)))
        if name not in axes:
            raise AxisError(f"axis {name!r} is not one of {tuple(axes)}{did_you_mean(name, axes)}")
        return name

    def coordinate(self, cell: Cell, axis: str) -> int | None:
        """Return the coordinate of a cell on an axis; None if its ranks have several."""
        layout = self.axes[axis]
        stride = layout.strides[layout.axes.index(axis)]
        first, last = cell.first // stride, (cell.first + cell.count - 1) // stride
        return first % layout[axis] if first == last or layout[axis] == 1 else None

    def shade(self, cell: Cell, axis: str) -> Shade | None:
        """Return the color of a cell; None if its ranks have several."""
        at = self.coordinate(cell, axis)
        colors = shades(self.axes[axis][axis])
        return None if at is None else colors[at * len(colors) // self.axes[axis][axis]]

    def outlined_axis(self) -> str | None:
        """Return the axis whose groups are neighbors in the picture: the fastest of size above 1."""
        layout = self.plan.layout
        return next((axis for axis in reversed(layout.axes) if layout[axis] > 1), None)

    def outlines(self, row: tuple[Cell, ...]) -> list[tuple[int, int]]:
        """Return the first and last column of each group of the outlined axis in a row."""
        axis = self.outlined_axis()
        if axis is None or self.block > 1:
            return []
        firsts = [group_of(self.plan.layout, cell.first, axis).first for cell in row]
        starts = [i for i in range(len(row)) if i == 0 or firsts[i] != firsts[i - 1]]
        return [(start, stop - 1) for start, stop in zip(starts, [*starts[1:], len(row)], strict=True)]

    def check_rank(self, rank: int | None) -> None:
        """Check that a rank is in the world.

        Raises:
            LayoutError: it is not.
        """
        if rank is not None and not 0 <= rank < self.plan.world_size:
            raise LayoutError(
                f"rank {rank} is outside {self.plan.layout}; its ranks are 0 to {self.plan.world_size - 1}"
            )


def _rows(cells: list[Cell]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(cells[i : i + _ROW]) for i in range(0, len(cells), _ROW))
