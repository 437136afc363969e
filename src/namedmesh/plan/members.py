"""Groups as a first rank and strides, so that their cost does not depend on the size of the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(*index.indices(len(self)))))
        left, rank = range(len(self))[index], self.first
        for size, stride in reversed(self.runs):
            left, at = divmod(left, size)
            rank += at * stride
        return rank

    def __contains__(self, rank: object) -> bool:
        if not isinstance(rank, int) or rank < self.first:
            return False
        left = rank - self.first
        for size, stride in self.runs:
            left -= min(left // stride, size - 1) * stride
        return left == 0


def runs_over(layout: Layout, axes: Iterable[str]) -> Runs:
    """Return (size, stride) of each loop over the ranks of a group; none over no axis."""
    axes = tuple(axes)
    return cast("Runs", layout.partition(*axes)[2]) if axes else ()


def group_of(layout: Layout, rank: int, *axes: str) -> Members:
    """Return the group over ``axes`` that a rank is in: the same ranks as :meth:`namedmesh.Layout.group`."""
    runs = runs_over(layout, axes)
    offset = Members(0, runs)[layout.group_rank(rank, *axes)] if axes else 0
    return Members(rank - offset, runs)


@dataclass(frozen=True)
class Groups:
    """The groups of one kind.

    Args:
        kind: the kind, with its axes.
        layout: the layout that the axes are of.
        communicator: what serves it if groups over the same ranks are shared: ``"own"``, ``"world"`` (the
            default group), ``"none"`` (a single rank), or the name of the kind that has the same ranks.
    """

    kind: GroupSpec
    layout: Layout
    communicator: str = ""

    @property
    def name(self) -> str:
        """The dialect's name of the kind."""
        return self.kind.name

    @property
    def size(self) -> int:
        """How many ranks a group has."""
        size = self.layout.size(*self.kind.axes) if self.kind.axes else 1
        return {"all": size, "ends": min(size, 2), "first": 1}[self.kind.members]

    @property
    def count(self) -> int:
        """How many groups there are."""
        return self.layout.count(*self.kind.axes) if self.kind.axes else self.layout.world_size

    @property
    def process_groups(self) -> int:
        """How many process groups a rank has of this kind, those of gloo included."""
        return self.kind.gloo_groups + 1

    def first(self, limit: int) -> list[Members]:
        """Return the first groups, by their lowest rank; the cost is that of ``limit``.

        Example:
            >>> from namedmesh.plan import make_plan
            >>> [group[:] for group in make_plan("pp=2,tp=2").groups("tp").first(1)]
            [(0, 1)]
        """
        others = [axis for axis in self.layout if axis not in self.kind.axes]
        firsts = Members(self.layout.rank_offset, runs_over(self.layout, others))
        runs = runs_over(self.layout, self.kind.axes)
        return [self._part(Members(first, runs)) for first in firsts[:limit]]

    def of_rank(self, rank: int) -> Members | None:
        """Return the group that a rank is in, if it is in one."""
        group = self._part(group_of(self.layout, rank, *self.kind.axes))
        return group if rank in group else None

    def _part(self, ranks: Members) -> Members:
        if self.kind.members == "all":
            return ranks
        ends = self.kind.members == "ends" and len(ranks) > 1
        return Members(ranks.first, ((2, ranks[-1] - ranks.first),) if ends else ())


def in_words(ranks: Sequence[int], limit: int = 16) -> str:
    """Write ranks for people: all of them, or the first ones, the last one and how many."""
    if len(ranks) <= limit:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: limit - 1]))}, ..., {ranks[-1]} ({len(ranks)} ranks)"
