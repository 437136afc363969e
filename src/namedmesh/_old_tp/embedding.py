"""Sharded embeddings: DTensor weights, the lookup on this rank's plain shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import synchronous
from namedmesh.tensor_parallel.collectives import all_gather, gather, local_shard, sum_forward, sum_scatter
from namedmesh.tensor_parallel.module_setup import LAST, WHOLE, StyleContext, check_divides, sharded_dim


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
            return setup.deliver(self, gather(output, setup.group, ids.ndim))
        return setup.deliver(self, output, LAST)


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
            return setup.deliver(self, sum_forward(partial, setup.group), WHOLE)
        check_divides(self, "the output", partial.shape, scatter_dim, setup.group.size)
        return setup.deliver(self, sum_scatter(partial, setup.group, scatter_dim))

    def _my_rows(self, ids: Tensor) -> Tensor:
        """Return the vectors of the ids that are in this rank's shard of the vocabulary, zeros for the others."""
        refuse_strangers(ids, self.num_embeddings, "index out of range in self: the ids")
        weight = local_shard(self.weight)
        first = self._setup.group.rank * weight.shape[0]
        elsewhere, mine = in_part(ids, first, weight.shape[0])
        padding = padding_in_part(self.padding_idx, first, weight.shape[0])
        return F.embedding(mine, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)


def _whole_ids(setup: StyleContext, ids: Tensor) -> Tensor:
    """Return the ids of all ranks as a plain tensor, gathered if they are sharded."""
    dim = sharded_dim(setup.input_layout, ids.ndim)
    if dim is not None and not isinstance(ids, DTensor):
        return all_gather(ids, setup.group, dim)
    if setup.whole_input and not isinstance(ids, DTensor):
        return ids
    return synchronous(setup.redistribute_input(ids, WHOLE).to_local())


def refuse_strangers(ids: Tensor, vocabulary: int, what: str) -> None:
    """Refuse an id outside the vocabulary: it belongs to no rank, and its vector would silently be zeros."""
    # The compiler does not look at values, and on a CPU it costs little.
    unseen = torch.compiler.is_compiling() or type(ids) is not Tensor or ids.device.type != "cpu"
    if unseen or not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if low < 0 or high >= vocabulary:
        raise IndexError(
            f"{what} run from {int(low)} to {int(high)}, the vocabulary from 0 to {vocabulary - 1}"
        )


def in_part(ids: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which ids are outside this rank's part; and each id's place in it, with 0 standing in for those outside.

    Part number r of equal parts of n entries holds the ids from r * n up to, and without, (r + 1) * n.
    """
    elsewhere = (ids < first) | (ids >= first + length)
    return elsewhere, (ids - first).masked_fill(elsewhere, 0)


def padding_in_part(padding_idx: int | None, first: int, length: int) -> int | None:
    """Return the place in this rank's part of the id whose vector gets no gradient; None where it is elsewhere."""
    return padding_idx - first if padding_idx is not None and first <= padding_idx < first + length else None
