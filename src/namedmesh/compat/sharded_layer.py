"""What the layers of all dialects share: a weight of which each rank of the tensor-parallel group has a shard.

Legacy code reads ``weight.shape`` as the shape of the shard, marks the shard with attributes and hands it to optimizers
of its own, so parameters are plain tensors and no DTensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import check_shards
from namedmesh.tensor_parallel.collectives import ALONE, RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable

Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


def draw_whole(  # noqa: PLR0917  what a weight is
    shard: Tensor,
    shape: tuple[int, int],
    dim: int,
    group: RankGroup,
    initialize: Initializer,
    stride: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draw a whole weight, copy this rank's shard of ``dim`` into ``shard``, and return the whole one.

    Ranks that are seeded alike draw the same numbers, so that the shards do not depend on the number of ranks.
    """
    whole = torch.empty(shape, dtype=dtype or shard.dtype, device=shard.device)
    initialize(whole)
    with torch.no_grad():
        shard.copy_(block_shard(whole, group, dim, stride))
    return whole


def block_shard(whole: Tensor, group: RankGroup, dim: int, stride: int = 1) -> Tensor:
    """Return this rank's shard of each of ``stride`` blocks of a weight, joined.

    The projections of queries, keys and values in one weight are three blocks: sharded as one, the first rank
    would get the queries and the last the values.

    Example:
        >>> from types import SimpleNamespace
        >>> whole = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
        >>> block_shard(whole, SimpleNamespace(size=2, rank=1), 0, stride=2).tolist()    # the second half of each block
        [2, 3, 12, 13]
    """
    blocks: Tensor = whole.unflatten(dim, (stride, group.size, -1))
    return blocks.select(dim + 1, group.rank).flatten(dim, dim + 1)


def fill_shard(shard: Tensor, initialize: Initializer, group: RankGroup) -> None:
    """Fill this rank's shard with numbers of its own, on its device.

    Ranks that are seeded alike would draw the same numbers. So one number is drawn as the seed of the shard,
    the same on all of them, and the rank is added to it; a rank's next layer starts from another one.
    """
    device = shard.device
    seed = int(torch.randint(2**62, (), device=device)) + group.rank
    others = [device] if device.type not in {"cpu", "meta"} else []
    with torch.random.fork_rng(devices=others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed)
        initialize(shard)


class ParallelLayer(nn.Module):
    """A layer whose weight is sharded along ``dim`` over the ranks of a group.

    Parameters are of ``params_dtype``. With a ``params_device`` each rank draws its own shard, there; otherwise all draw
    the whole weight, in ``init_dtype``. Without ``perform_initialization`` it is left as the allocator hands it out.
    """

    dim: ClassVar[int] = 0
    shape_names: ClassVar[tuple[str, str]]  # of the arguments that the weight's lengths are
    params_dtype: torch.dtype | None = None
    params_device: torch.device | None = None
    init_dtype: torch.dtype | None = None
    perform_initialization = True
    weight: nn.Parameter
    master_weight: Tensor | None

    def __init__(self, group: RankGroup) -> None:
        super().__init__()
        self._made_for = group.size, group.rank

    def current_group(self) -> RankGroup:
        """Return the tensor-parallel group; a dialect overrides this."""
        return ALONE

    @property
    def group(self) -> RankGroup:
        """The current group.

        Raises:
            ContractError: it is of another size than when the weight was sharded, or this rank has another place in it.
        """
        group = self.current_group()
        if (group.size, group.rank) != self._made_for:
            size, rank = self._made_for
            raise ContractError(
                f"{type(self).__name__} was made as rank {rank} of {size}, and is used as rank {group.rank} of {group.size}; "
                "use it with the mesh that it was made with, or make it anew"
            )
        return group

    def make_weight(
        self, shape: tuple[int, int], initialize: Initializer, stride: int = 1, *, keep: bool = False
    ) -> None:
        """Make this rank's shard of the weight, and keep the whole one if requested and drawn.

        Raises:
            ContractError: the ranks, times the stride, do not divide the length that is sharded.
        """
        group, lengths, whole = self.group, list(shape), None
        check_shards(shape[self.dim], group.size, stride, what=self.shape_names[self.dim])
        lengths[self.dim] //= group.size
        shard = torch.empty(lengths, dtype=self.params_dtype, device=self.params_device)
        if self.perform_initialization and self.params_device is not None:
            fill_shard(shard, initialize, group)
        elif self.perform_initialization:
            whole = draw_whole(shard, shape, self.dim, group, initialize, stride, self.init_dtype)
        self.weight = nn.Parameter(shard)
        self.master_weight = whole if keep else None

    def make_bias(self, length: int) -> nn.Parameter:
        """Return a bias of zeros."""
        return nn.Parameter(torch.zeros(length, dtype=self.params_dtype, device=self.params_device))
