"""Megatron's loss for logits whose vocabulary is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.compat.cross_entropy import cross_entropy
from namedmesh.compat.megatron.tensor_parallel.utils import current_group

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return the cross entropy of each token, ``(s, b)``, in float32 whatever the logits are.

    Args:
        vocab_parallel_logits: ``(s, b, v / t)``, this rank's part of the vocabulary; left as it is.
        target: ``(s, b)``, ids in the whole vocabulary, the same on every rank. The loss of an id outside of
            it means nothing, and the loss mask has to leave it out.
        label_smoothing: from 0 up to, and without, 1. What is taken off the target is spread over **this
            rank's part** of the vocabulary, as Megatron has it: with smoothing, ranks get different losses.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Raises:
        ContractError: the shapes do not go together, or the smoothing is out of range.

    Example:
        >>> import torch
        >>> logits, target = torch.zeros(2, 1, 4), torch.tensor([[0], [3]])
        >>> vocab_parallel_cross_entropy(logits, target)    # plain python: one rank
        tensor([[1.3863],
                [1.3863]])
    """
    return cross_entropy(
        vocab_parallel_logits, target, current_group(tp_group), torch.float32, label_smoothing
    )
