"""Sharded embeddings: DTensor weights, the lookup on this rank's plain shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from namedmesh.tensor_parallel.collectives import all_gather, gather, local_shard, sum_forward, sum_scatter
from namedmesh.tensor_parallel.module_setup import StyleContext, check_divides, sharded_dim
from namedmesh.tensor_parallel.vocabulary import Lookup, lookup


class ColwiseEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose vectors are sharded over the ranks. Made by ``ColwiseParallel``."""

    _setup: StyleContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return this rank's shard of every looked-up vector, or whole vectors if the output layout is replicated."""
        setup = self._setup
        ids = _whole_ids(setup, input)
        last = input.ndim
        whole_output = isinstance(setup.output_layout, Replicate)
        if ids is None or not (whole_output or sharded_dim(setup.output_layout, input.ndim + 1) == last):
            return _through_dtensor(self, input)
        output = F.embedding(
            ids, local_shard(self.weight), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        if whole_output:
            output = gather(output, setup.peers, last)
        return setup.wrap_output(output)


class RowwiseEmbedding(nn.Embedding):
    """An ``nn.Embedding`` whose vocabulary is sharded over the ranks. Made by ``RowwiseParallel``."""

    _setup: StyleContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return the sum of all ranks' lookups, of which one is not zero: whole, or sharded along the output layout."""
        setup = self._setup
        scatter_dim = sharded_dim(setup.output_layout, input.ndim + 1)
        ids = _whole_ids(setup, input)
        if ids is None or (scatter_dim is None and not isinstance(setup.output_layout, Replicate)):
            return _through_dtensor(self, input)
        partial = self._my_rows(ids)
        if scatter_dim is None:
            output = sum_forward(partial, setup.peers)
        else:
            check_divides(self, "the output", partial.shape, scatter_dim, setup.peers.size)
            output = sum_scatter(partial, setup.peers, scatter_dim)
        return setup.wrap_output(output)

    def _my_rows(self, ids: Tensor) -> Tensor:
        """Return the vectors of the ids that are in this rank's shard of the vocabulary, zeros for the others."""
        rows = self.num_embeddings // self._setup.peers.size
        self._refuse_strangers(ids)
        first = self._setup.peers.rank * rows
        return lookup(ids, local_shard(self.weight), first, Lookup(padding_idx=self.padding_idx))

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


def _whole_ids(setup: StyleContext, ids: Tensor) -> Tensor | None:
    """Return the ids of all ranks as a plain tensor, gathered if they are sharded; None if the layout is another."""
    local = setup.local_input(ids)
    if local is None or isinstance(setup.input_layout, Replicate):
        return local
    dim = sharded_dim(setup.input_layout, local.ndim)
    return None if dim is None else all_gather(local, setup.peers, dim)


def _through_dtensor(module: ColwiseEmbedding | RowwiseEmbedding, ids: Tensor) -> Tensor:
    """Return the same lookup in DTensor arithmetic: for other layouts."""
    setup = module._setup  # noqa: SLF001  the module is one of ours
    output = F.embedding(
        setup.redistribute_input(ids, Replicate()),
        module.weight,
        module.padding_idx,
        scale_grad_by_freq=module.scale_grad_by_freq,
    )
    return setup.redistribute_output(module, output)
