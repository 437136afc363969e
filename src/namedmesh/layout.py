"""Layouts: named axes, their sizes and their order, and the ranks that follow from them.

A layout is arithmetic on ints, without torch, and the one place where namedmesh computes ranks. They are row-major, as
in torch's ``DeviceMesh``: the first axis is the slowest, the last one the fastest.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from namedmesh.errors import AxisError, LayoutError, did_you_mean, format_count, format_items
from namedmesh.sizes import as_int, format_sizes, infer_sizes, suggest_axis


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Layout:
    """Named axes over a range of ranks.

    Args:
        world_size: how many ranks the layout covers. Needed only for an axis of size -1; otherwise it is the
            product of the sizes, and a different number is an error.
        rank_offset: the first rank of the layout, for a layout over a part of a larger world.
        **sizes: one keyword for each axis, slowest first: its name and its size. One size may be -1, which
            stands for whatever is left of ``world_size``.

    Raises:
        LayoutError: names or sizes that no layout can have; all problems at once. The methods raise it for ranks and
            coordinates outside the layout, and AxisError for a name that is no axis.

    Example:
        >>> layout = Layout(pp=2, dp=-1, tp=2, world_size=8)
        >>> layout, layout.groups("tp"), layout.groups("pp")
        (Layout(pp=2, dp=2, tp=2), ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)))
        >>> layout.coords(5)
        {'pp': 1, 'dp': 0, 'tp': 1}
    """

    axes: tuple[str, ...]
    """The names, slowest axis first."""
    sizes: tuple[int, ...]
    """The size of each axis, in the order of :attr:`axes`."""
    rank_offset: int
    """The first rank that the layout covers."""
    strides: tuple[int, ...]
    """The distance between neighboring ranks on each axis, in the order of :attr:`axes`."""
    world_size: int
    """How many ranks the layout covers."""

    def __init__(self, /, *, world_size: int | None = None, rank_offset: int = 0, **sizes: int) -> None:
        self._fill(tuple(sizes), tuple(sizes.values()), world_size, rank_offset)

    @classmethod
    def from_shape(
        cls, axes: Iterable[str], sizes: Iterable[int], *, world_size: int | None = None, rank_offset: int = 0
    ) -> Layout:
        """Return a layout from names and sizes, the way ``init_device_mesh`` takes them.

        Example:
            >>> Layout.from_shape(("dp", "tp"), (4, 2))
            Layout(dp=4, tp=2)
        """
        axes, sizes = tuple(axes), tuple(sizes)
        if len(axes) != len(sizes):
            raise LayoutError(
                f"{len(axes)} axes {axes} but {len(sizes)} sizes {sizes}; give one size for each axis"
            )
        layout = cls.__new__(cls)
        layout._fill(axes, sizes, world_size, rank_offset)
        return layout

    @classmethod
    def from_order(
        cls, order: str, /, *, world_size: int | None = None, rank_offset: int = 0, **sizes: int
    ) -> Layout:
        """Return a layout from Megatron's order string, in which the first axis is the *fastest*.

        Args:
            order: the names joined by ``-``, fastest first, such as ``"tp-cp-ep-dp-pp"``.
            world_size: how many ranks there are; needed when an axis is to be inferred.
            rank_offset: as for :class:`Layout`.
            **sizes: a size for each axis. A single axis without a size is inferred from ``world_size``. When
                several have none, ``dp`` is inferred and the others are 1, as Megatron does. An axis of size
                1 need not be in the order.

        Example:
            >>> Layout.from_order("tp-pp-dp", tp=2, pp=2, world_size=8).groups("pp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        fastest_first = order.split("-")
        problems = [
            f"axis {axis!r} has size {size} but no place in the order {order!r}{did_you_mean(axis, fastest_first)}"
            for axis, size in sizes.items()
            if size != 1 and axis not in fastest_first
        ]
        open_axes = [axis for axis in dict.fromkeys(fastest_first) if axis not in sizes]
        if -1 in sizes.values() or not open_axes:
            inferred = None
        elif len(open_axes) == 1 or "dp" in open_axes:
            inferred = open_axes[0] if len(open_axes) == 1 else "dp"
        else:
            inferred = None
            problems.append(
                f"axes {format_items(map(repr, open_axes))} of the order {order!r} have no size, and none of them is "
                "'dp'; give all of them but one"
            )
        if problems:
            raise LayoutError(*problems)
        known = sizes if inferred is None else {**sizes, inferred: -1}
        axes = fastest_first[::-1]
        return cls.from_shape(
            axes, [known.get(axis, 1) for axis in axes], world_size=world_size, rank_offset=rank_offset
        )

    def _fill(self, axes: tuple[str, ...], sizes: tuple[Any, ...], world_size: Any, rank_offset: Any) -> None:
        fitted, problems = infer_sizes(axes, sizes, world_size, rank_offset)
        if problems:
            raise LayoutError(*problems)
        strides, stride = [1] * len(axes), 1
        for i in reversed(range(len(axes))):
            strides[i] = stride
            stride *= fitted[i]
        set_once = object.__setattr__
        set_once(self, "axes", axes)
        set_once(self, "sizes", fitted)
        set_once(self, "strides", tuple(strides))
        set_once(self, "world_size", stride)
        set_once(self, "rank_offset", operator.index(rank_offset))

    def __repr__(self) -> str:
        parts = [f"{axis}={size}" for axis, size in self.items()]
        if self.rank_offset:
            parts.append(f"rank_offset={self.rank_offset}")
        return f"Layout({', '.join(parts)})"

    def __str__(self) -> str:
        """Return the sizes in words, as messages show them: ``pp=2 x dp=2 x tp=2 (8 ranks)``."""
        return f"{format_sizes(self.axes, self.sizes)} ({format_count(self.world_size, 'rank')})"

    def __contains__(self, axis: object) -> bool:
        return axis in self.axes

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis: ``layout["tp"]``."""
        return self.sizes[self._index(axis)]

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield names and sizes, slowest axis first."""
        return zip(self.axes, self.sizes, strict=True)

    @property
    def ranks(self) -> range:
        """Every rank that the layout covers."""
        return range(self.rank_offset, self.rank_offset + self.world_size)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group over ``axes``: the product of their sizes."""
        # A list: a graph of torch.compile takes no generator.
        return prod([self.sizes[i] for i in self._chosen(axes)])

    def count(self, *axes: str) -> int:
        """Return the number of groups over ``axes``."""
        return self.world_size // self.size(*axes)

    def coords(self, rank: int) -> dict[str, int]:
        """Return where a rank stands on each axis."""
        local = self._local(rank)
        return {
            axis: local // stride % size
            for axis, size, stride in zip(self.axes, self.sizes, self.strides, strict=True)
        }

    def rank(self, /, **coords: int) -> int:
        """Return the rank at the given coordinates, one for each axis; an axis of size 1 may be left out.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).rank(pp=1, dp=0, tp=1)
            5
        """
        self._check_coords(coords)
        missing = [axis for axis, size in self.items() if size > 1 and axis not in coords]
        if missing:
            raise LayoutError(
                f"no coordinate for {format_items(map(repr, missing))} of {self}; "
                "give one for each axis, or ask where() for all ranks that share some"
            )
        return self.rank_offset + sum(
            coords.get(axis, 0) * stride for axis, stride in zip(self.axes, self.strides, strict=True)
        )

    def where(self, /, **coords: int) -> tuple[int, ...]:
        """Return every rank at the given coordinates, ascending.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).where(pp=1, tp=0)
            (4, 6)
        """
        self._check_coords(coords)
        first = self.rank_offset + sum(at * self.strides[self._index(axis)] for axis, at in coords.items())
        free = [i for i, axis in enumerate(self.axes) if axis not in coords]
        return _shifted(self._offsets(free), first)

    def group(self, rank: int, /, *axes: str) -> tuple[int, ...]:
        """Return the ranks that a rank shares a group over ``axes`` with, itself included, ascending.

        The axes may be in any order. The cost is that of the group's size, whatever the size of the world.

        Example:
            >>> layout = Layout(pp=2, dp=2, tp=2)
            >>> layout.group(5, "tp"), layout.group(5, "pp", "tp")
            ((4, 5), (0, 1, 4, 5))
        """
        chosen = self._chosen(axes)
        local, first = self._local(rank), rank
        for i in chosen:
            first -= local // self.strides[i] % self.sizes[i] * self.strides[i]
        return _shifted(self._offsets(chosen), first)

    def group_rank(self, rank: int, /, *axes: str) -> int:
        """Return the position of a rank inside its group over ``axes``."""
        local = self._local(rank)
        position = 0
        for i in self._chosen(axes):
            position = position * self.sizes[i] + local // self.strides[i] % self.sizes[i]
        return position

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group over ``axes``, a partition of :attr:`ranks`: by their first rank, ranks ascending.

        Example:
            >>> Layout(pp=2, dp=2, tp=2).groups("pp", "tp")
            ((0, 1, 4, 5), (2, 3, 6, 7))
        """
        chosen = self._chosen(axes)
        inside = self._offsets(chosen)
        firsts = _shifted(
            self._offsets([i for i in range(len(self.axes)) if i not in chosen]), self.rank_offset
        )
        if len(inside) > len(firsts):
            return tuple(_shifted(inside, first) for first in firsts)
        # Many small groups: one column per member, and zip builds the tuples without a Python step for each.
        return tuple(zip(*(_shifted(firsts, offset) for offset in inside), strict=True))

    def _index(self, axis: str) -> int:
        try:
            return self.axes.index(axis)
        except ValueError:
            raise AxisError(self._unknown(axis)) from None

    def _unknown(self, axis: object) -> str:
        return f"axis {axis!r} is not one of {self.axes}{suggest_axis(axis, self.axes)}"

    def _chosen(self, axes: Sequence[str]) -> list[int]:
        """Return the places of the axes in layout order; every problem with them is in one error."""
        chosen = [i for i, axis in enumerate(self.axes) if axis in axes]
        if len(chosen) != len(axes) or not axes:
            problems = [self._unknown(axis) for axis in axes if axis not in self]
            if not axes:
                problems.append(f"no axis is named; name one or more of {self.axes}")
            if problems:
                raise AxisError(*problems)
        return chosen

    def _local(self, rank: int) -> int:
        number = as_int(rank)
        if number is None:
            raise LayoutError(f"rank {rank!r} is not an int; give one of the ranks of {self}")
        local = number - self.rank_offset
        if not 0 <= local < self.world_size:
            ranks = self.ranks
            raise LayoutError(
                f"rank {rank} is outside {self}; its ranks are {ranks.start} to {ranks.stop - 1}"
            )
        return local

    def _check_coords(self, coords: Mapping[str, int]) -> None:
        unknown = [self._unknown(axis) for axis in coords if axis not in self]
        if unknown:
            raise AxisError(*unknown)
        outside = [
            f"coordinate {axis}={at!r} is outside the axis; its coordinates are the ints 0 to {self[axis] - 1}"
            for axis, at in coords.items()
            if as_int(at) not in range(self[axis])
        ]
        if outside:
            raise LayoutError(*outside)

    def _runs(self, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Return (size, stride) of the chosen axes, slowest first, with adjoining axes merged into one run."""
        runs: list[tuple[int, int]] = []
        for i in chosen:
            size, stride = self.sizes[i], self.strides[i]
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = (runs[-1][0] * size, stride)
            else:
                runs.append((size, stride))
        return runs

    def _offsets(self, chosen: Sequence[int]) -> Sequence[int]:
        """Return the distances from the first rank of a group over the chosen axes to its members, ascending."""
        offsets: Sequence[int] = range(1)
        for size, stride in self._runs(chosen):
            steps = range(0, size * stride, stride)
            offsets = steps if len(offsets) == 1 else [base + step for base in offsets for step in steps]
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
    return (layout.rank_offset, layout.world_size, tuple(layout._runs(layout._chosen(axes))))


def format_axes(axes: Sequence[str]) -> str:
    """Format axes for a sentence, such as ``'dp' and 'tp'``."""
    return " and ".join(repr(axis) for axis in axes)


def quote_axes(axes: Sequence[str]) -> str:
    """Format axes as arguments in code, such as ``"dp", "tp"``."""
    return ", ".join(f'"{axis}"' for axis in axes)


def _shifted(ranks: Sequence[int], by: int) -> tuple[int, ...]:
    if isinstance(ranks, range):
        return tuple(range(ranks.start + by, ranks.stop + by, ranks.step))
    return tuple([rank + by for rank in ranks])  # a list is built faster than a generator is drained
