"""Sharded embeddings: DTensor weights, the lookup on this rank's plain shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from namedmesh._torch import synchronous
from namedmesh.tensor_parallel.collectives import all_gather, gather, local_shard, sum_forward, sum_scatter
from namedmesh.tensor_parallel.module_setup import StyleContext, check_divides, sharded_dim


class ColwiseEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose vectors are sharded over the ranks. Made by ``ColwiseParallel``."""

    _setup: StyleContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return this rank's shard of every looked-up vector, or whole vectors if the output layout is replicated."""
        setup = self._setup
        ids = _whole_ids(setup, input)
        weight = local_shard(self.weight)
        output = F.embedding(ids, weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        if setup.whole_output:
            return setup.deliver(self, gather(output, setup.group, ids.ndim), Replicate())
        return setup.deliver(self, output, Shard(-1))


class RowwiseEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose vocabulary is sharded over the ranks. Made by ``RowwiseParallel``."""

    _setup: StyleContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return the sum of all ranks' lookups, of which one is not zero: whole, or sharded along the output layout."""
        setup = self._setup
        ids = _whole_ids(setup, input)
        partial = self._my_rows(ids)
        scatter_dim = sharded_dim(setup.output_layout, partial.ndim)
        if scatter_dim is None:
            return setup.deliver(self, sum_forward(partial, setup.group), Replicate())
        check_divides(self, "the output", partial.shape, scatter_dim, setup.group.size)
        return setup.deliver(self, sum_scatter(partial, setup.group, scatter_dim), setup.output_layout)

    def _my_rows(self, ids: Tensor) -> Tensor:
        """Return the vectors of the ids that are in this rank's shard of the vocabulary, zeros for the others."""
        rows = self.num_embeddings // self._setup.group.size
        self._refuse_strangers(ids)
        first = self._setup.group.rank * rows
        return lookup(ids, local_shard(self.weight), first, padding_idx=self.padding_idx)

    def _refuse_strangers(self, ids: Tensor) -> None:
        """Refuse an id outside the vocabulary: it belongs to no rank, and its vector would silently be zeros."""
        if torch.compiler.is_compiling():  # which does not look at values
            return
        plain = type(ids) is Tensor and ids.device.type == "cpu"  # looking at values there costs little
        if plain and ids.numel() and ids.dtype in {torch.int32, torch.int64}:
            low, high = torch.aminmax(ids)
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"index out of range in self: the ids run from {int(low)} to {int(high)}, "
                    f"the vocabulary from 0 to {self.num_embeddings - 1}"
                )


def _whole_ids(setup: StyleContext, ids: Tensor) -> Tensor:
    """Return the ids of all ranks as a plain tensor, gathered if they are sharded."""
    dim = sharded_dim(setup.input_layout, ids.ndim)
    if dim is not None and not isinstance(ids, DTensor):
        return all_gather(ids, setup.group, dim)
    if setup.whole_input and not isinstance(ids, DTensor):
        return ids
    return synchronous(setup.redistribute_input(ids, Replicate()).to_local())


def lookup(
    ids: Tensor,
    weight: Tensor,
    first: int,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    by_index: bool = False,
) -> Tensor:
    """Return the vectors of the ids that are in this rank's part of the vocabulary, zeros for the others.

    Part number r of equal parts of n entries holds the ids from r * n up to, and without, (r + 1) * n.

    Args:
        ids: any shape.
        weight: this rank's rows, as a plain tensor.
        first: the id of the first of them.
        padding_idx: the id, in the whole vocabulary, whose vector gets no gradient; not negative.
        scale_grad_by_freq: divide each vector's gradient by how often it was looked up.
        sparse: make the gradient a sparse tensor.
        by_index: index the weight instead of calling ``embedding``, whose gradient adds up in another order
            each time on some devices.

    Example:
        >>> part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])    # of the ids 2 and 3
        >>> lookup(torch.tensor([0, 3, 2]), part, first=2).tolist()
        [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]]
    """
    rows = weight.shape[0]
    elsewhere, mine = in_part(ids, first, rows)
    in_mine = padding_idx is not None and first <= padding_idx < first + rows
    padding = padding_idx - first if padding_idx is not None and in_mine else None
    if scale_grad_by_freq:
        # Without the others, which would count as the id that stands in for them.
        vectors = F.embedding(mine[~elsewhere], weight, padding, scale_grad_by_freq=True, sparse=sparse)
        return vectors.new_zeros(*ids.shape, weight.shape[1]).index_put((~elsewhere,), vectors)
    vectors = weight[mine] if by_index else F.embedding(mine, weight, padding, sparse=sparse)
    return vectors.masked_fill(elsewhere.unsqueeze(-1), 0)


def in_part(ids: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which ids are outside this rank's part; and each id's place in it, with 0 standing in for those outside."""
    elsewhere = (ids < first) | (ids >= first + length)
    return elsewhere, (ids - first).masked_fill(elsewhere, 0)
