"""What the layers of legacy code share: plain parameters that hold this rank's shard, and their arithmetic.

Legacy code reads ``weight.shape`` as the shape of the shard, marks the shard with attributes and hands it to
optimizers of its own, so the parameters here are no DTensors. A dialect's layer makes them with a
:class:`Recipe`, keeps them under the names of its API, and calls one function in its forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import nn

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, gather, split, sum_forward, sum_scatter
from namedmesh.tensor_parallel.linear import column, row
from namedmesh.tensor_parallel.vocabulary import Lookup, lookup, shorten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


@dataclass(frozen=True)
class Recipe:
    """How a layer makes its parameters.

    Args:
        initialize: fills a weight.
        dtype: of the parameters.
        drawn_in: the dtype in which the whole weight is drawn before it is sharded; ``dtype`` by default.
        device: None draws the whole weight on every rank (where torch puts new tensors), from the generator
            that all ranks have seeded alike, and shards it: the shards do not depend on the number of ranks.
            A device draws only the shard, there.
        stride: how many blocks the weight is made of, each of which is sharded over the ranks on its own.
        fill: without it, the parameters are left as the allocator hands them out.
    """

    initialize: Initializer
    dtype: torch.dtype
    drawn_in: torch.dtype | None = None
    device: torch.device | None = None
    stride: int = 1
    fill: bool = True

    def weight(
        self, rows: int, columns: int, dim: int, peers: RankGroup
    ) -> tuple[nn.Parameter, Tensor | None]:
        """Return this rank's shard of a ``(rows, columns)`` weight that is sharded along ``dim``, and the whole one if it was drawn.

        The ranks, times the stride, divide the length of ``dim``: see :func:`check_blocks`.
        """
        shape = [rows, columns]
        shape[dim] //= peers.size
        shard = torch.empty(shape, dtype=self.dtype, device=self.device)
        whole = None
        if self.fill and self.device is not None:
            fill_shard(shard, self.initialize, peers)
        elif self.fill:
            whole = torch.empty(rows, columns, dtype=self.drawn_in or self.dtype)
            self.initialize(whole)
            shard.copy_(block_shard(whole, peers, dim, self.stride))
        return nn.Parameter(shard), whole

    def bias(self, length: int) -> nn.Parameter:
        """Return a bias of zeros."""
        make = torch.zeros if self.fill else torch.empty
        return nn.Parameter(make(length, dtype=self.dtype, device=self.device))


def check_blocks(length: int, ranks: int, stride: int = 1, *, what: str = "the length") -> None:
    """Refuse a length that cannot be split into ``stride`` blocks of ``ranks`` equal shards.

    A collective of unequal shards ends the process from inside the backend, and splitting for oneself would
    silently leave the rest out.

    Raises:
        ShapeError: it cannot.

    Example:
        >>> check_blocks(10, ranks=2, stride=2, what="output_size")
        Traceback (most recent call last):
        ...
        namedmesh.errors.ShapeError: output_size is 10, which cannot be split into 2 equal shards for each of 2 blocks (the \
stride); use 8 or 12, or another multiple of 4
    """
    shards = ranks * stride
    if stride < 1:
        raise ShapeError(f"the stride is {stride}; it is a number of blocks, 1 or more")
    if length % shards:
        below = length // shards * shards
        nearest = f"{below} or {below + shards}" if below else f"{shards}"
        blocks = "" if stride == 1 else f" for each of {stride} blocks (the stride)"
        raise ShapeError(
            f"{what} is {length}, which cannot be split into {ranks} equal shards{blocks}; use {nearest}, or another "
            f"multiple of {shards}"
        )


def block_shard(whole: Tensor, peers: RankGroup, dim: int, stride: int = 1) -> Tensor:
    """Return this rank's shard of each of ``stride`` blocks of a weight, joined.

    The projections of queries, keys and values in one weight are three blocks: sharded as one, the first rank
    would get the queries and the last the values.

    Example:
        Rank 1 of 2 gets the second half of each of the two blocks:

        >>> import torch
        >>> from types import SimpleNamespace
        >>> whole = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
        >>> block_shard(whole, SimpleNamespace(size=2, rank=1), 0, stride=2).tolist()
        [2, 3, 12, 13]
    """
    blocks: Tensor = whole.unflatten(dim, (stride, peers.size, -1))
    return blocks.select(dim + 1, peers.rank).flatten(dim, dim + 1)


def fill_shard(shard: Tensor, initialize: Initializer, peers: RankGroup) -> None:
    """Fill this rank's shard with numbers of its own, on its device.

    Ranks that are seeded alike would draw the same numbers. So one number is drawn as the seed of the shard,
    the same on all of them, and the rank is added to it; a rank's next layer starts from another one.
    """
    device = shard.device
    seed = int(torch.randint(2**62, (), device=device)) + peers.rank
    others = [device] if device.type not in {"cpu", "meta"} else []
    with torch.random.fork_rng(devices=others, device_type=device.type if others else "cuda"):
        torch.manual_seed(seed)
        initialize(shard)


def column_linear(
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    peers: RankGroup,
    *,
    gather_dim: int | None = None,
    gather_output: bool = False,
    sum_gradient: bool = True,
) -> Tensor:
    """Return a linear layer whose output features are sharded over the peers.

    Args:
        value: ``(..., inputs)``, the same on every peer; or a shard of it along ``gather_dim``.
        weight: this rank's rows, ``(local outputs, inputs)``.
        bias: this rank's part of it, or None.
        peers: the ranks, over whom the gradient of the input is summed.
        gather_dim: the dim along which the input is sharded (0 for Megatron's sequence parallelism).
        gather_output: join the output features of all peers.
        sum_gradient: without it, a whole input gets this rank's part of its gradient only, for the caller to
            sum later.

    Returns:
        ``(..., local outputs)``, or ``(..., outputs)`` where they are gathered.
    """
    over = peers if sum_gradient or gather_dim is not None else RankGroup(None)
    output = column(value, weight, bias, over, gather_dim, gather_again=True)
    return gather(output, peers, output.ndim - 1) if gather_output else output


def row_linear(
    value: Tensor,
    weight: Tensor,
    peers: RankGroup,
    *,
    input_is_parallel: bool = True,
    scatter_dim: int | None = None,
    sum_output: bool = True,
) -> Tensor:
    """Return a linear layer whose input features are sharded over the peers, without its bias.

    The bias is the caller's to add: where the output is sharded (``scatter_dim``), legacy code expects each rank's
    bias gradient to be of its own shard only, and sums it later.

    Args:
        value: ``(..., local inputs)``; or ``(..., inputs)``, of which each peer takes its own.
        weight: this rank's columns, ``(outputs, local inputs)``.
        peers: the ranks, over whom the output is summed.
        input_is_parallel: the input is sharded already.
        scatter_dim: leave each peer its shard of the sum along this dim.
        sum_output: without it, this rank's part of the sum comes out, for the caller to sum later.

    Returns:
        ``(..., outputs)``, the same on every peer or sharded.

    Raises:
        ShapeError: an input that is not sharded yet, or an output that is to be, cannot be split into equal shards.
    """
    if not input_is_parallel:
        check_blocks(value.shape[-1], peers.size, what="the length of the last dim of the input")
        value = split(value, peers, value.ndim - 1)
    if not sum_output:
        return row(value, weight, None, RankGroup(None))
    if scatter_dim is not None:
        check_blocks(
            value.shape[scatter_dim], peers.size, what=f"the length of dim {scatter_dim} of the output"
        )
    return row(value, weight, None, peers, scatter_dim)


def vocabulary_embedding(
    ids: Tensor,
    weight: Tensor,
    peers: RankGroup,
    how: Lookup | None = None,
    *,
    scatter_swapped: bool = False,
) -> Tensor:
    """Return an embedding whose vocabulary is sharded over the peers.

    Args:
        ids: the same on every peer; one that is outside of the vocabulary gets zeros.
        weight: this rank's rows, ``(local part of the vocabulary, features)``.
        peers: the ranks.
        how: how to look up.
        scatter_swapped: swap the first two dims, and leave each peer its shard of the first.

    Raises:
        ShapeError: the dim that is to be scattered cannot be split into equal shards.
    """
    partial = lookup(ids, weight, peers.rank * weight.shape[0], how)
    if scatter_swapped:
        check_blocks(partial.shape[1], peers.size, what="the length of dim 1 of the ids")
        return sum_scatter(partial.transpose(0, 1), peers, 0)
    return sum_forward(partial, peers)


def feature_embedding(ids: Tensor, weight: Tensor, peers: RankGroup, how: Lookup | None = None) -> Tensor:
    """Return an embedding whose features are sharded over the peers.

    Args:
        ids: the same on every peer.
        weight: this rank's columns, ``(ids, local features)``.
        peers: the ranks.
        how: how to look up; with ``max_norm``, the norm is that of whole vectors.

    Returns:
        ``(..., features)``, the same on every peer.
    """
    how = how or Lookup()
    if how.max_norm is not None:
        shorten(weight, ids, how.max_norm, how.norm_type, peers)
    mine = F.embedding(
        ids, weight, how.padding_idx, scale_grad_by_freq=how.scale_grad_by_freq, sparse=how.sparse
    )
    return gather(mine, peers, mine.ndim - 1)
