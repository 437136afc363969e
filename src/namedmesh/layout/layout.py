"""Layouts: named axes, their sizes and their order, and the ranks that follow from them.

A layout is arithmetic on ints, without torch. This is the only module that computes ranks. As in
torch's ``DeviceMesh``, ranks are in row-major order: along the last axis, neighbors differ by one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from namedmesh._errors import AxisError, LayoutError, did_you_mean, format_count, format_items
from namedmesh.layout.sizes import as_int, format_sizes, infer_sizes, suggest_axis


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """Named axes over a contiguous range of ranks.

    Args:
        world_size: the number of ranks. It is needed if a size is -1. Otherwise it must be the
            product of the sizes.
        rank_offset: the first rank, for a layout over a part of a larger world.
        **sizes: the size of each axis by keyword, slowest first. One may be -1, for the remaining
            ranks.

    Raises:
        LayoutError: names or sizes that do not form a layout; all problems at once. Methods raise
            it for ranks and coordinates outside the layout, and AxisError for an unknown axis.

    Example:
        >>> layout = Layout(pp=2, dp=-1, tp=2, world_size=8)
        >>> layout
        Layout(pp=2, dp=2, tp=2)
        >>> layout.groups("tp"), layout.groups("pp")
        (((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
        >>> layout.coords(5)
        {'pp': 1, 'dp': 0, 'tp': 1}
    """

    axes: tuple[str, ...]
    """The names of the axes, slowest first."""
    sizes: tuple[int, ...]
    """The size of each axis, in the order of :attr:`axes`."""
    rank_offset: int
    """The first rank of the layout."""
    strides: tuple[int, ...]
    """The distance between neighboring ranks along each axis, in the order of :attr:`axes`."""
    world_size: int
    """The number of ranks of the layout."""

    def __init__(self, /, *, world_size: int | None = None, rank_offset: int = 0, **sizes: int) -> None:
        self._set_fields(tuple(sizes), tuple(sizes.values()), world_size, rank_offset)

    @classmethod
    def from_shape(
        cls, axes: Iterable[str], sizes: Iterable[int], *, world_size: int | None = None, rank_offset: int = 0
    ) -> Layout:
        """Return a layout from names and sizes, as ``init_device_mesh`` takes them.

        Args:
            axes: the names of the axes, slowest first.
            sizes: the size of each axis.
            world_size: as for :class:`Layout`.
            rank_offset: as for :class:`Layout`.

        Raises:
            LayoutError: names or sizes that do not form a layout; all problems at once.

        Example:
            >>> Layout.from_shape(("dp", "tp"), (4, 2))
            Layout(dp=4, tp=2)
        """
        axes = tuple(axes)
        sizes = tuple(sizes)
        if len(axes) != len(sizes):
            raise LayoutError(
                f"{len(axes)} axes {axes} but {len(sizes)} sizes {sizes}; give one size for each axis"
            )
        # The constructor takes the sizes as keywords, so it would lose a name that occurs twice
        # instead of reporting it.
        layout = cls.__new__(cls)
        layout._set_fields(axes, sizes, world_size, rank_offset)
        return layout

    @classmethod
    def from_order(
        cls, order: str, /, *, world_size: int | None = None, rank_offset: int = 0, **sizes: int
    ) -> Layout:
        """Return a layout from Megatron's order string, in which the first axis is the *fastest*.

        Args:
            order: the names of the axes joined by ``-``, fastest first, e.g. ``"tp-cp-ep-dp-pp"``.
            world_size: the number of ranks. It is needed if a size is inferred.
            rank_offset: as for :class:`Layout`.
            **sizes: the sizes of axes by keyword. If one axis has no size, it is inferred from
                ``world_size``. If several have none, ``dp`` is inferred and the others are 1, as in
                Megatron. The order may omit an axis of size 1.

        Raises:
            LayoutError: the order and the sizes do not form a layout; all problems at once.

        Example:
            >>> Layout.from_order("tp-pp-dp", tp=2, pp=2, world_size=8).groups("pp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        fastest_first = order.split("-")
        problems = []
        for axis, size in sizes.items():
            if size != 1 and axis not in fastest_first:
                problems.append(
                    f"axis {axis!r} has size {size} but is not in the order {order!r}"
                    f"{did_you_mean(axis, fastest_first)}"
                )
        known = dict(sizes)
        # A name that is twice in the order is reported by the constructor.
        open_axes = [axis for axis in dict.fromkeys(fastest_first) if axis not in sizes]
        # If a size is -1, that axis is inferred, and axes without a size are 1.
        if open_axes and -1 not in sizes.values():
            if len(open_axes) == 1:
                known[open_axes[0]] = -1
            elif "dp" in open_axes:
                known["dp"] = -1
            else:
                problems.append(
                    f"axes {format_items(map(repr, open_axes))} of the order {order!r} have no "
                    "size, and none of them is 'dp'; give all of them but one"
                )
        if problems:
            raise LayoutError(*problems)
        # A Layout has the opposite order.
        axes = fastest_first[::-1]
        full_sizes = [known.get(axis, 1) for axis in axes]
        return cls.from_shape(axes, full_sizes, world_size=world_size, rank_offset=rank_offset)

    def _set_fields(
        self, axes: tuple[str, ...], sizes: tuple[Any, ...], world_size: Any, rank_offset: Any
    ) -> None:
        """Check names and sizes, and set every field of a new layout."""
        full_sizes, problems = infer_sizes(axes, sizes, world_size, rank_offset)
        if problems:
            raise LayoutError(*problems)
        # From the fastest axis to the slowest: the stride of an axis is the product of the sizes of
        # all faster ones. The last product is the size of the layout.
        strides = []
        stride = 1
        for size in reversed(full_sizes):
            strides.append(stride)
            stride *= size
        # A frozen dataclass allows no other assignment.
        set_field = object.__setattr__
        set_field(self, "axes", axes)
        set_field(self, "sizes", full_sizes)
        set_field(self, "strides", tuple(strides[::-1]))
        set_field(self, "world_size", stride)
        set_field(self, "rank_offset", operator.index(rank_offset))

    def __repr__(self) -> str:
        arguments = [f"{axis}={size}" for axis, size in self.items()]
        if self.rank_offset:
            arguments.append(f"rank_offset={self.rank_offset}")
        return f"Layout({', '.join(arguments)})"

    def __str__(self) -> str:
        """Return the sizes as messages show them: ``pp=2 x dp=2 x tp=2 (8 ranks)``."""
        return f"{format_sizes(self.axes, self.sizes)} ({format_count(self.world_size, 'rank')})"

    def __contains__(self, axis: object) -> bool:
        return axis in self.axes

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the axes, slowest first."""
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis: ``layout["tp"]``."""
        return self.sizes[self._find_index(axis)]

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the size of each axis, slowest first."""
        return zip(self.axes, self.sizes, strict=True)

    @property
    def ranks(self) -> range:
        """The ranks of the layout."""
        return range(self.rank_offset, self.rank_offset + self.world_size)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over some axes: the product of their sizes.

        Args:
            *axes: one or more axes, in any order.

        Raises:
            AxisError: an unknown axis, or none; all problems at once. So do all methods.
        """
        # A list, as torch.compile cannot trace a generator here.
        return prod([self.sizes[index] for index in self._find_indices(axes)])

    def count(self, *axes: str) -> int:
        """Return the number of groups over some axes.

        Args:
            *axes: one or more axes, in any order.
        """
        return self.world_size // self.size(*axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis.

        Args:
            rank: a rank of the layout.

        Raises:
            LayoutError: the rank is outside the layout. So do all methods.
        """
        position = self._find_position(rank)
        coords = {}
        for axis, size, stride in zip(self.axes, self.sizes, self.strides, strict=True):
            coords[axis] = position // stride % size
        return coords

    def rank(self, /, **coords: int) -> int:
        """Return the rank at the given coordinates.

        Args:
            **coords: the coordinate on each axis. Axes of size 1 may be omitted.

        Raises:
            LayoutError: a coordinate is missing or outside its axis.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).rank(pp=1, dp=0, tp=1)
            5
        """
        self._check_coords(coords)
        missing = [axis for axis, size in self.items() if size > 1 and axis not in coords]
        if missing:
            raise LayoutError(
                f"no coordinate for {format_items(map(repr, missing))} of {self}; give one for "
                "each axis, or ask where() for all ranks that share some"
            )
        return self._find_first_rank(coords)

    def where(self, /, **coords: int) -> tuple[int, ...]:
        """Return all ranks at the given coordinates, in ascending order.

        Args:
            **coords: the coordinates on some axes. The ranks may have any coordinate on the others.

        Raises:
            LayoutError: a coordinate is outside its axis.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).where(pp=1, tp=0)
            (4, 6)
        """
        self._check_coords(coords)
        open_indices = [index for index, axis in enumerate(self.axes) if axis not in coords]
        return _add_to_each(self._compute_offsets(open_indices), self._find_first_rank(coords))

    def group(self, rank: int, /, *axes: str) -> tuple[int, ...]:
        """Return the ranks of the group over some axes that a rank belongs to, in ascending order.

        The cost depends on the size of the group, and not on the size of the world.

        Args:
            rank: a rank of the layout.
            *axes: one or more axes, in any order.

        Example:
            >>> layout = Layout(pp=2, dp=2, tp=2)
            >>> layout.group(5, "tp"), layout.group(5, "pp", "tp")
            ((4, 5), (0, 1, 4, 5))
        """
        indices = self._find_indices(axes)
        position = self._find_position(rank)
        first = rank
        # The first rank of the group has coordinate 0 on each of the axes.
        for index in indices:
            stride = self.strides[index]
            first -= position // stride % self.sizes[index] * stride
        return _add_to_each(self._compute_offsets(indices), first)

    def group_rank(self, rank: int, /, *axes: str) -> int:
        """Return the group rank of a rank: its position in its group over some axes.

        Args:
            rank: a rank of the layout.
            *axes: one or more axes, in any order.
        """
        position = self._find_position(rank)
        group_rank = 0
        # Group ranks are row-major, too: the last axis in layout order is the fastest.
        for index in self._find_indices(axes):
            size = self.sizes[index]
            group_rank = group_rank * size + position // self.strides[index] % size
        return group_rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups over some axes. Together they have each rank of the layout once.

        Args:
            *axes: one or more axes, in any order.

        Returns:
            The ranks of each group in ascending order. The groups are ordered by their first rank.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).groups("pp", "tp")
            ((0, 1, 4, 5), (2, 3, 6, 7))
        """
        indices = self._find_indices(axes)
        offsets = self._compute_offsets(indices)
        other_indices = [index for index in range(len(self.axes)) if index not in indices]
        first_ranks = _add_to_each(self._compute_offsets(other_indices), self.rank_offset)
        if len(offsets) > len(first_ranks):
            return tuple(_add_to_each(offsets, first) for first in first_ranks)
        # If there are many small groups, zip makes them faster than a Python step for each group:
        # from one column for each group rank, with the ranks of all groups.
        columns = [_add_to_each(first_ranks, offset) for offset in offsets]
        return tuple(zip(*columns, strict=True))

    def _find_index(self, axis: str) -> int:
        """Return the index of an axis in the layout; raise an AxisError if it does not exist."""
        try:
            return self.axes.index(axis)
        except ValueError:
            raise AxisError(self._format_unknown_axis(axis)) from None

    def _format_unknown_axis(self, axis: object) -> str:
        return f"axis {axis!r} is not one of {self.axes}{suggest_axis(axis, self.axes)}"

    def _find_indices(self, axes: Sequence[str]) -> list[int]:
        """Return the indices of axes in layout order; raise one AxisError for all problems."""
        indices = [index for index, axis in enumerate(self.axes) if axis in axes]
        # Axes may be named twice, so a difference in length is a problem only if one is unknown.
        if len(indices) != len(axes) or not axes:
            problems = [self._format_unknown_axis(axis) for axis in axes if axis not in self]
            if not axes:
                problems.append(f"no axis is named; name one or more of {self.axes}")
            if problems:
                raise AxisError(*problems)
        return indices

    def _find_position(self, rank: int) -> int:
        """Return the position of a rank in :attr:`ranks`."""
        number = as_int(rank)
        if number is None:
            raise LayoutError(f"rank {rank!r} is not an int; give one of the ranks of {self}")
        position = number - self.rank_offset
        if not 0 <= position < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside {self}; its ranks are {self.ranks.start} to {self.ranks.stop - 1}"
            )
        return position

    def _check_coords(self, coords: Mapping[str, int]) -> None:
        """Raise an AxisError or a LayoutError if coordinates are not in the layout."""
        unknown = [self._format_unknown_axis(axis) for axis in coords if axis not in self]
        if unknown:
            raise AxisError(*unknown)
        problems = []
        for axis, coord in coords.items():
            if as_int(coord) not in range(self[axis]):
                problems.append(
                    f"coordinate {axis}={coord!r} is outside the axis; its coordinates are the "
                    f"ints 0 to {self[axis] - 1}"
                )
        if problems:
            raise LayoutError(*problems)

    def _find_first_rank(self, coords: Mapping[str, int]) -> int:
        """Return the lowest rank at some coordinates: the one with 0 on the other axes."""
        rank = self.rank_offset
        for axis, coord in coords.items():
            rank += coord * self.strides[self._find_index(axis)]
        return rank

    def _merge_adjacent_axes(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return (size, stride) of some axes, slowest first, with adjacent axes merged into one.

        Axes of size 1 are omitted. Two axes are adjacent if the ranks along both are equidistant, as
        along a single axis.
        """
        merged: list[tuple[int, int]] = []
        for index in indices:
            size = self.sizes[index]
            stride = self.strides[index]
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                previous_size = merged[-1][0]
                merged[-1] = (previous_size * size, stride)
            else:
                merged.append((size, stride))
        return merged

    def _compute_offsets(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the members of a group over some axes, relative to its first rank, ascending."""
        offsets: Sequence[int] = range(1)
        for size, stride in self._merge_adjacent_axes(indices):
            if len(offsets) == 1:
                # A range costs the same for any number of ranks, and most groups need no more.
                offsets = range(0, size * stride, stride)
                continue
            extended: list[int] = []
            for offset in offsets:
                extended += range(offset, offset + size * stride, stride)
            offsets = extended
        return offsets


def make_partition_key(layout: Layout, *axes: str) -> tuple[object, ...]:
    """Return a key that two layouts share exactly if their groups over the axes are the same.

    The key has the (size, stride) of each axis, without axes of size 1, and with adjacent axes
    merged. Its length depends on the number of axes, and not on the number of ranks.

    Args:
        layout: the layout.
        *axes: one or more of its axes.

    Example:
        >>> dense, expert = Layout(pp=2, dp=2, tp=2), Layout(pp=2, ep=4)
        >>> make_partition_key(dense, "dp", "tp") == make_partition_key(expert, "ep")
        True
    """
    merged = layout._merge_adjacent_axes(layout._find_indices(axes))
    return (layout.rank_offset, layout.world_size, tuple(merged))


def _add_to_each(ranks: Sequence[int], distance: int) -> tuple[int, ...]:
    """Return ranks with a distance added to each."""
    if isinstance(ranks, range):
        return tuple(range(ranks.start + distance, ranks.stop + distance, ranks.step))
    # A tuple is made faster from a list than from a generator.
    return tuple([rank + distance for rank in ranks])
