"""Groups as a first rank and strides, so that their cost does not depend on the size of the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from namedmesh.dialects import GroupSpec
    from namedmesh.layout import Layout

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Members(Sequence[int]):
    """The ranks of a group, ascending, none of them stored.

    Args:
        first: the lowest rank.
        runs: (size, stride) of each loop over the ranks, slowest first.

    Example:
        >>> ranks = Members(2, ((2, 8), (2, 1)))
        >>> tuple(ranks), len(ranks), 10 in ranks, 4 in ranks, ranks[-1]
        ((2, 3, 10, 11), 4, True, False, 11)
    """

    first: int
    runs: Runs

    def __len__(self) -> int:
        return prod(size for size, _ in self.runs)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self._at(i) for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"a group of {len(self)} ranks has no rank at {index}")
        return self._at(index % len(self))

    def _at(self, index: int) -> int:
        rank = self.first
        for size, stride in reversed(self.runs):
            index, at = divmod(index, size)
            rank += at * stride
        return rank

    def __iter__(self) -> Iterator[int]:
        return map(self._at, range(len(self)))

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int) or rank < self.first:
            return False
        left = rank - self.first
        for size, stride in self.runs:
            at = left // stride
            if at >= size:
                return False
            left -= at * stride
        return left == 0


def _runs(layout: Layout, axes: Iterable[str]) -> Runs:
    axes = tuple(axes)
    return cast("Runs", layout.partition(*axes)[2]) if axes else ()


def group_of(layout: Layout, rank: int, *axes: str) -> Members:
    """Return the group over ``axes`` that a rank is in: the same ranks as :meth:`namedmesh.Layout.group`.

    Raises:
        AxisError: a name that is no axis.
        LayoutError: the rank is not in the layout.
    """
    coords = layout.coords(rank)
    own = sum(
        coords[axis] * stride
        for axis, stride in zip(layout.axes, layout.strides, strict=True)
        if axis in axes
    )
    return Members(rank - own, _runs(layout, axes))


def nth_group(layout: Layout, index: int, *axes: str) -> Members:
    """Return one group of the partition, by its index in :meth:`namedmesh.Layout.groups`."""
    others = [axis for axis in layout.axes if axis not in axes]
    firsts = Members(layout.rank_offset, _runs(layout, others))
    return Members(firsts[index], _runs(layout, axes))


def first_groups(layout: Layout, kind: GroupSpec, limit: int) -> list[Members]:
    """Return the first groups of a kind, in the order of the partition; over no axis, each rank is a group."""
    count = min(limit, layout.count(*kind.axes) if kind.axes else layout.world_size)
    return [_part(nth_group(layout, index, *kind.axes), kind) for index in range(count)]


def group_of_kind(layout: Layout, rank: int, kind: GroupSpec) -> Members | None:
    """Return the group of a kind that a rank is in, if it is in one."""
    group = _part(group_of(layout, rank, *kind.axes), kind)
    return group if rank in group else None


def _part(ranks: Members, kind: GroupSpec) -> Members:
    if kind.members == "first" or (kind.members == "ends" and len(ranks) == 1):
        return Members(ranks.first, ())
    if kind.members == "ends":
        return Members(ranks.first, ((2, ranks[-1] - ranks.first),))
    return ranks


def in_words(ranks: Sequence[int], limit: int = 16) -> str:
    """Write ranks for people: all of them, or the first ones, the last one and how many."""
    if len(ranks) <= limit:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: limit - 1]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"
