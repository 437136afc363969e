"""What Megatron calls the axes of a mesh: their sizes, and the ranks of every group over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.axis_map import USUAL_AXES, check_axes, own_axes
from namedmesh.compat.megatron.stand_in import MEGATRON_WORDS, groups_over, split
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from namedmesh.mesh import NamedMesh

__all__ = ["MEGATRON_WORDS", "MeshRanks", "experts_of", "groups_over", "layout_of", "sets_like", "split"]

_EXPERT = {word: own for own, word in MEGATRON_WORDS.items()}
_WITHOUT_VIEW = {"tp": ("tp",), "dp": ("dp", "cp", "gtp_remat"), "pp": ("pp",)}
"""The axes of the mesh that stand for the experts' where these have no view: as everything else."""


class MeshRanks:
    """Takes the place of a ``RankGenerator``: the ranks are those of a mesh, in whatever order its axes are.

    Args:
        layout: the layout of the mesh, or of the view of its experts.
        axes: its axes for each of Megatron's words.

    Attributes:
        note: is told the layout and its axes whenever groups are asked for.
    """

    def __init__(self, layout: Layout, axes: dict[str, tuple[str, ...]]) -> None:
        self.layout, self.axes = layout, axes
        self.note: Callable[[Layout, tuple[str, ...]], None] = lambda _layout, _axes: None

    @classmethod
    def of_mesh(cls, mesh: NamedMesh) -> tuple[MeshRanks, MeshRanks]:
        """Return the ranks of a mesh, and those of its experts.

        Raises:
            LayoutError: the mesh has axes that Megatron does not know.
        """
        check_axes(
            mesh.layout,
            "Megatron",
            (*USUAL_AXES, "sp", "gtp_remat"),
            experts=("ep", *_EXPERT.values()),
            instead="they factor the world another way; leave it out of the mesh and add a view for it: "
            "mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
        )
        return cls.of_layouts(mesh.layout, experts_of(mesh))

    @classmethod
    def of_layouts(cls, layout: Layout, expert: Layout | None) -> tuple[MeshRanks, MeshRanks]:
        """Return the ranks of a layout, and those of the experts', which have axes of it where they have no layout."""
        dense = cls(layout, {word: (word,) for word in ("tp", "pp", "dp", "cp", "gtp_remat")})
        words = ("tp", "pp", "dp", "ep", "gtp_remat")
        if expert is None:
            return dense, cls(layout, {word: _WITHOUT_VIEW.get(word, ()) for word in words})
        return dense, cls(expert, {word: (_EXPERT.get(word, word),) for word in words})

    def own(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the layout for some of Megatron's words."""
        return own_axes(self.layout, [axis for word in words for axis in self.axes[word]])

    def size(self, word: str) -> int:
        """Return the number of ranks over one of Megatron's axes."""
        own = self.own([word])
        return self.layout.size(*own) if own else 1

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the axes that a token such as ``"tp-dp"`` names."""
        own = self.own(token.split("-"))
        self.note(self.layout, own)
        return [list(ranks) for ranks in groups_over(self.layout, own)]

    def get_gtp_ranks(self, _size: int) -> list[list[int]]:
        """Return the groups over ``gtp_remat``."""
        return self.get_ranks("gtp_remat")


def experts_of(mesh: NamedMesh) -> Layout | None:
    """Return the layout of the experts in a mesh: that of its first view with one of their axes."""
    for view in mesh.views.values():
        if not {"ep", *_EXPERT.values()}.isdisjoint(view):
            return view
    return None


def layout_of(generator: Any, *, experts: bool) -> Layout:
    """Return the layout of a RankGenerator: the axes of Megatron that have a size, in its order, as we call them."""
    wanted = ("pp", "dp", "ep", "tp") if experts else ("pp", "dp", "cp", "tp")
    axes = {}
    for word, size in zip(
        reversed(generator.order.split("-")), reversed(generator.ordered_size), strict=True
    ):
        if word in wanted or size > 1:
            axes[_EXPERT.get(word, word) if experts else word] = size
    return Layout.from_shape(list(axes), list(axes.values()))


def sets_like(ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return sets of ranks that do not overlap, one of which is given: parts of the groups of a kind, or several in one.

    Every group is cut in the same places: into parts of one size where that works out, or one part of it is taken.

    Example:
        >>> sets_like([0, 4], [(0, 2, 4, 6), (1, 3, 5, 7)])
        [[0, 4], [2, 6], [1, 5], [3, 7]]
        >>> sets_like([0, 6], [(0, 2, 4, 6), (1, 3, 5, 7)])
        [[0, 6], [1, 7]]
    """
    group = next((each for each in groups if {*ranks} <= {*each}), None)
    if group is None:
        every = [rank for each in groups for rank in each]
        return [sorted(part) for part in split(every, len(ranks))]
    places = [group.index(rank) for rank in sorted(ranks)]
    stride = places[1] - places[0] if len(places) > 1 else 1
    if len(group) % (len(places) * stride) == 0:
        sets = [part for each in groups for part in split(each, len(places), stride)]
        if sorted(ranks) in sets:
            return sets
    return [[each[place] for place in places] for each in groups]
