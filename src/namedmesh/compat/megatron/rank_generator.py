"""Megatron's ``RankGenerator`` and its rank arithmetic, on :class:`namedmesh.Layout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.config import ordered_tokens
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence


class RankGenerator:
    """The groups of every kind of parallelism, as lists of ranks.

    Args:
        tp, ep, dp, pp, cp: the size of each parallelism; a generator has ``ep`` or ``cp``, not both.
        order: their names, fastest first, joined by hyphens.
        rank_offset: the first rank.
        gtp_remat: over how many ranks the weights are sharded that are gathered for each use.

    Attributes:
        layout: the same as a :class:`namedmesh.Layout`.

    Raises:
        ContractError: both ``ep`` and ``cp`` are larger than 1.
        ContractRuntimeError: a parallelism of a size other than 1 has no place in the order.
        ContractKeyError: the order names something else.

    Example:
        >>> ranks = RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order="tp-dp-pp")
        >>> ranks.get_ranks("pp")
        [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
        >>> ranks.get_ranks("tp-pp")
        [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
        >>> ranks.get_mask("tp-dp-pp", "tp-pp")
        [True, False, True]
    """

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if ep != 1 and cp != 1:
            raise ContractError(
                f"ep is {ep} and cp is {cp}: one generator has one of them; cp is for the dense ranks, ep for the experts'"
            )
        self.tp, self.ep, self.dp, self.pp, self.cp = tp, ep, dp, pp, cp
        self.rank_offset, self.gtp_remat = rank_offset, gtp_remat
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": gtp_remat}
        tokens = ordered_tokens(order, self.name_to_size)
        self.order = "-".join(tokens)
        self.ordered_size = [self.name_to_size[token] for token in tokens]
        self.layout = _layout_from_fastest(tokens, self.ordered_size, rank_offset)
        self.world_size = self.layout.world_size

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return which names of ``order`` are in ``token``, such as ``"tp-dp"``; raise LayoutError for any other."""
        ordered, given = order.split("-"), token.split("-")
        unknown = [part for part in given if part not in ordered]
        if unknown:
            raise LayoutError(
                *(
                    f"{part!r} of {token!r} is not in the order {order!r}{did_you_mean(part, ordered)}"
                    for part in unknown
                )
            )
        return [part in given for part in ordered]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the parallelisms that ``token`` names, such as ``"tp"`` or ``"tp-dp"``."""
        self.get_mask(self.order, token)
        return [list(ranks) for ranks in self.layout.groups(*token.split("-"))]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Return the groups over ``gtp_remat``; raise ContractError where the generator has another size of it."""
        if gtp_remat_size != self.gtp_remat:
            raise ContractError(
                f"gtp_remat_size is {gtp_remat_size}, but the generator has {self.gtp_remat}; give that"
            )
        return self.get_ranks("gtp_remat")


def _layout_from_fastest(fastest_first: Sequence[str], sizes: Sequence[int], rank_offset: int = 0) -> Layout:
    return Layout.from_shape(reversed(fastest_first), reversed(sizes), rank_offset=rank_offset)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups over some of the parallelisms that factor a world.

    Args:
        world_size: how many ranks there are.
        parallel_size: the size of each parallelism, fastest first.
        mask: which of them vary inside a group.

    Raises:
        ContractError: there are more ranks than the sizes multiply to.

    Example:
        >>> generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, False, True])
        [[0, 4], [1, 5], [2, 6], [3, 7]]
    """
    masked = {f"axis{i}": inside for i, (_, inside) in enumerate(zip(parallel_size, mask, strict=False))}
    layout = _layout_from_fastest(list(masked), parallel_size[: len(masked)])
    axes = [axis for axis, inside in masked.items() if inside]
    groups = [list(ranks) for ranks in layout.groups(*axes)] if axes else [[rank] for rank in layout.ranks]
    # As many groups as the world has room for, whatever the sizes multiply to, as in the original.
    count = world_size // len(groups[0])
    if count > len(groups):
        raise ContractError(
            f"the world has {world_size} ranks, but the sizes {list(parallel_size)} multiply to {layout.world_size}; "
            "change a size"
        )
    return groups[:count]
