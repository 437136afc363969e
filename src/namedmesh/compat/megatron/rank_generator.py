"""Megatron's ``RankGenerator`` and its rank arithmetic, on :class:`namedmesh.Layout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError, ContractKeyError, ContractRuntimeError
from namedmesh.dialects import parse_order
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RankGenerator", "generate_masked_orthogonal_rank_groups"]


class RankGenerator:
    """The groups of every kind of parallelism, as lists of ranks.

    Args:
        tp, ep, dp, pp, cp, gtp_remat: the size of each parallelism; a generator has ``ep`` or ``cp``, not both.
        order: their names, fastest first, joined by hyphens.
        rank_offset: the first rank.

    Raises:
        ContractError: both ``ep`` and ``cp`` are larger than 1.
        ContractRuntimeError: a parallelism of a size other than 1 has no place in the order.
        ContractKeyError: the order names something else.

    Example:
        >>> RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order="tp-dp-pp").get_ranks("pp")
        [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
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
        self.tp, self.ep, self.dp, self.pp, self.cp, self.gtp_remat = tp, ep, dp, pp, cp, gtp_remat
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": gtp_remat}
        tokens = self._tokens(order.lower())
        self.order, self.rank_offset = "-".join(tokens), rank_offset
        self.ordered_size = [self.name_to_size[name] for name in tokens]
        self.layout = Layout.from_shape(tokens[::-1], self.ordered_size[::-1], rank_offset=rank_offset)
        self.world_size = self.layout.world_size

    def _tokens(self, order: str) -> list[str]:
        parsed = parse_order(order, tuple(self.name_to_size))
        for name in parsed.omitted:
            if name not in order and self.name_to_size[name] != 1:  # as the original, which looks for a part
                raise ContractRuntimeError(
                    f"the size of {name} is {self.name_to_size[name]}, but the order {order!r} has no place for it; add {name!r}"
                )
        for name in parsed.unknown:
            raise ContractKeyError(
                f"{name!r} in the order {order!r} is not one of {', '.join(self.name_to_size)}"
                f"{did_you_mean(name, self.name_to_size)}"
            )
        return parsed.tokens

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return for each name of an order whether a token such as ``"tp-pp"`` has it."""
        unknown = set(token.split("-")) - set(order.split("-"))
        if unknown:
            raise LayoutError(
                f"{', '.join(sorted(unknown))} of {token!r} is not in the order {order!r}; name what is"
            )
        return [name in token.split("-") for name in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return every group over the parallelisms that a token such as ``"tp-pp"`` names."""
        self.get_mask(self.order, token)
        return [list(ranks) for ranks in self.layout.groups(*token.split("-"))]

    def get_gtp_ranks(self, gtp_remat_size: int) -> list[list[int]]:
        """Return every group over ``gtp_remat``, whose size is given."""
        if gtp_remat_size != self.gtp_remat:
            raise ContractError(
                f"gtp_remat_size is {gtp_remat_size}, but the generator has {self.gtp_remat}; give that"
            )
        return self.get_ranks("gtp_remat")


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups over the sizes that are masked, the first size being that of neighbors."""
    names = [f"axis{place}" for place in range(len(parallel_size))]
    layout = Layout.from_shape(names[::-1], list(parallel_size)[::-1])
    axes = [name for name, inside in zip(names, mask, strict=True) if inside]
    groups = [list(ranks) for ranks in layout.groups(*axes)] if axes else [[rank] for rank in layout.ranks]
    count = world_size // len(groups[0])
    if count > len(groups):
        raise ContractError(
            f"the world has {world_size} ranks, but the sizes {list(parallel_size)} multiply to {layout.world_size}; change a "
            "size"
        )
    return groups[:count]
