"""The ranks of Megatron's groups, from a mesh's layout or from sizes and an order string.

Upstream takes every set of ranks from ``RankGenerator.get_ranks(token)``, in which the token names
axes, such as ``"tp-dp"``. :class:`MeshRanks` returns the sets of a layout, and
:class:`RankGenerator` has upstream's interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from namedmesh.axes import DENSE_COUNTERPARTS
from namedmesh.compat import ContractError, ContractRuntimeError
from namedmesh.compat.state import find_mesh_axes
from namedmesh.layout import Layout
from namedmesh.legacy import parse_order

MEGATRON_NAMES = {**DENSE_COUNTERPARTS, "egtp_remat": "gtp_remat"}
"""Megatron's names for the experts' axes, which its generator shares with the dense axes."""

EXPERT_AXES_BY_NAME = {name: (axis,) for axis, name in MEGATRON_NAMES.items()}
"""The experts' axes by Megatron's names for them."""

AxesByRanks: TypeAlias = "dict[tuple[int, ...], tuple[Layout, tuple[str, ...]]]"
"""The ranks of a group -> the layout and its axes along which they differ."""


class MeshRanks:
    """A replacement for upstream's ``RankGenerator``: the ranks of a layout.

    Args:
        layout: the layout, whose axes may have any order.
        axes_by_ranks: a dict that :meth:`get_ranks` fills: the axes of every set of ranks that it
            returns, for :class:`GroupFactory`.
        axes_by_name: the axes of the layout for Megatron's names that are not axes of the
            layout.
    """

    def __init__(
        self,
        layout: Layout,
        axes_by_ranks: AxesByRanks,
        axes_by_name: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.layout = layout
        self.axes_by_ranks = axes_by_ranks
        self.axes_by_name = axes_by_name or {}

    @classmethod
    def from_generator(cls, generator: Any, axes_by_ranks: AxesByRanks, *, experts: bool) -> MeshRanks:
        """Make the equivalent of an upstream ``RankGenerator``, with our names of the axes.

        Args:
            generator: the upstream generator. An axis of size 1 is omitted, except for the usual
                ones.
            axes_by_ranks: as for the class.
            experts: whether the generator is for the experts.
        """
        axes_by_name = EXPERT_AXES_BY_NAME if experts else {}
        always = {"pp", "dp", "tp", "ep" if experts else "cp"}
        sizes: dict[str, int] = {}
        for name, size in zip(generator.order.split("-"), generator.ordered_size, strict=True):
            if size > 1 or name in always:
                (axis,) = axes_by_name.get(name, (name,))
                sizes[axis] = size
        # An order string starts with the fastest axis, a layout with the slowest.
        layout = Layout.from_shape(list(sizes)[::-1], list(sizes.values())[::-1])
        return cls(layout, axes_by_ranks, axes_by_name)

    def find_layout_axes(self, *names: str) -> tuple[str, ...]:
        """Return the axes of the layout for some of Megatron's names, without axes of size 1."""
        wanted: list[str] = []
        for name in names:
            wanted += self.axes_by_name.get(name, (name,))
        return tuple(axis for axis in find_mesh_axes(self.layout, wanted) if self.layout[axis] > 1)

    def size(self, name: str) -> int:
        """Return the number of ranks along one of Megatron's axes."""
        axes = self.find_layout_axes(name)
        if not axes:
            return 1
        return self.layout.size(*axes)

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of every group over the axes that a token names.

        Args:
            token: Megatron's names of axes, joined by hyphens, such as ``"tp-dp"``.
        """
        axes = self.find_layout_axes(*token.split("-"))
        if not axes:
            return [[rank] for rank in self.layout.ranks]
        groups = self.layout.groups(*axes)
        for ranks in groups:
            # The dense layers and the experts may share a set, which keeps the axes of the first.
            self.axes_by_ranks.setdefault(ranks, (self.layout, axes))
        return [list(ranks) for ranks in groups]

    def get_gtp_ranks(self, _size: int) -> list[list[int]]:
        """Return the ranks of every group over ``gtp_remat``, whose size the layout has."""
        return self.get_ranks("gtp_remat")


class RankGenerator(MeshRanks):
    """The ranks of every kind of group, from sizes and an order, with upstream's interface.

    Args:
        tp: the number of tensor-parallel ranks.
        ep: the number of expert-parallel ranks; 1 in the generator for the dense layers.
        dp: the number of data-parallel ranks.
        pp: the number of pipeline stages.
        cp: the number of context-parallel ranks; 1 in the generator for the experts.
        order: the names of these axes, joined by hyphens, fastest first. An axis of size 1 can be
            omitted.
        rank_offset: the first rank.

    Raises:
        ContractError: both ``ep`` and ``cp`` are larger than 1.
        ContractRuntimeError: the order omits an axis of several ranks.
    """

    def __init__(  # noqa: PLR0917  upstream's signature
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        if ep != 1 and cp != 1:
            raise ContractError(
                f"ep is {ep} and cp is {cp}, but a RankGenerator takes one of them only: cp for "
                "the dense layers, or ep for the experts"
            )
        self.tp = tp
        self.ep = ep
        self.dp = dp
        self.pp = pp
        self.cp = cp
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        parsed = parse_order(order.lower(), tuple(self.name_to_size))
        for name in parsed.omitted:
            # Upstream searches the text of the order, in which "dpp" contains both "dp" and "pp".
            if name not in order.lower() and self.name_to_size[name] != 1:
                raise ContractRuntimeError(
                    f"{name} has size {self.name_to_size[name]}, but the order {order!r} does not "
                    f"name it; add {name!r}"
                )
        self.order = "-".join(parsed.tokens)
        self.rank_offset = rank_offset
        self.ordered_size = [self.name_to_size[name] for name in parsed.tokens]
        layout = Layout.from_shape(parsed.tokens[::-1], self.ordered_size[::-1], rank_offset=rank_offset)
        super().__init__(layout, {})
        self.world_size = layout.world_size

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return, for each name of an order, whether a token such as ``"tp-pp"`` contains it."""
        names = order.split("-")
        positions = [names.index(name) for name in token.split("-")]
        return [position in positions for position in range(len(names))]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of every group over a token's axes; ValueError if one is unknown."""
        # As upstream, an unknown name is an error; MeshRanks ignores names that a mesh may lack.
        self.get_mask(self.order, token)
        return super().get_ranks(token)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the ranks of every group over the sizes that a mask selects.

    Args:
        world_size: the number of ranks.
        parallel_size: the sizes of the axes, fastest first.
        mask: for each size, whether the ranks of a group differ along its axis.

    Raises:
        ContractError: the sizes multiply to less than ``world_size``.
    """
    names = [f"axis{position}" for position in range(len(parallel_size))]
    layout = Layout.from_shape(names[::-1], list(parallel_size)[::-1])
    selected = [name for name, is_selected in zip(names, mask, strict=True) if is_selected]
    groups = MeshRanks(layout, {}).get_ranks("-".join(selected))
    count = world_size // len(groups[0])
    if count > len(groups):
        raise ContractError(
            f"the sizes {list(parallel_size)} multiply to less than the world size {world_size}; "
            "change a size"
        )
    # Upstream ignores the ranks beyond the world size.
    return groups[:count]


def split_ranks(sets: Sequence[Sequence[int]], size: int, stride: int = 1) -> list[list[int]]:
    """Split the concatenation of sets of ranks into new sets.

    Args:
        sets: the sets of ranks.
        size: the number of ranks of a new set.
        stride: the distance of its ranks in the concatenation.

    Example:
        >>> split_ranks([range(8)], 2, 2)
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    ranks = list(chain(*sets))
    span = size * stride
    # Each block of `span` ranks holds `stride` interleaved sets.
    starts = [start for start in range(len(ranks)) if start % span < stride]
    return [ranks[start : start + span : stride] for start in starts]


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold word embeddings: the first and the last."""
    if len(pp_ranks) == 1:
        return [pp_ranks[0]]
    return [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold position embeddings: the first."""
    return [pp_ranks[0]]
