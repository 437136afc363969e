"""The ranks of Megatron's groups, from sizes and an order string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.state import list_rank_sets
from namedmesh.layout import Layout
from namedmesh.layout.orders import split_order

__all__ = ["RankGenerator", "default_embedding_ranks", "default_position_embedding_ranks"]
__all__ += ["generate_masked_orthogonal_rank_groups"]


class RankGenerator:
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
        self.name_to_size: dict[str, int] = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        vars(self).update(self.name_to_size)
        tokens = split_order(order.lower(), tuple(self.name_to_size))
        for name, size in self.name_to_size.items():
            # Upstream searches the text of the order, in which "dpp" contains both "dp" and "pp".
            if name not in order.lower() and size != 1:
                raise ContractRuntimeError(
                    f"{name} has size {size}, but the order {order!r} does not name it; add {name!r}"
                )
        self.order: str = "-".join(tokens)
        self.rank_offset = rank_offset
        self.ordered_size: list[int] = [self.name_to_size[name] for name in tokens]
        # An order string starts with the fastest axis, a layout with the slowest.
        self.layout: Layout = Layout.from_shape(
            tokens[::-1], self.ordered_size[::-1], rank_offset=rank_offset
        )
        self.world_size: int = self.layout.world_size

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return, for each name of an order, whether a token such as ``"tp-pp"`` contains it."""
        names = order.split("-")
        positions = [names.index(name) for name in token.split("-")]
        return [position in positions for position in range(len(names))]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of every group over a token's axes; ValueError if one is unknown."""
        self.get_mask(self.order, token)
        return list_rank_sets(self.layout, token.split("-"))


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
    groups = list_rank_sets(layout, selected)
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
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that hold position embeddings: the first."""
    return [pp_ranks[0]]
