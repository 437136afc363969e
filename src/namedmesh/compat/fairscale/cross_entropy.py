"""fairscale's loss for logits whose vocabulary is sharded over the model-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.compat.cross_entropy import cross_entropy
from namedmesh.compat.fairscale.initialize import DIALECT

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each token, ``(...)``, in the type of the logits and the same on every rank.

    Args:
        vocab_parallel_logits: ``(..., v / t)``, this rank's part of the vocabulary; left as it is (the original overwrites it).
        target: ``(...)``, ids in the whole vocabulary, the same on every rank.

    Raises:
        ContractError: the shapes do not go together; or there are no ranks yet.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from namedmesh import launch
        >>> from namedmesh.compat import fairscale
        >>> _ = launch.init("cpu")
        >>> fairscale.initialize_model_parallel(1)
        >>> vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([1.3863, 1.3863])
        >>> fairscale.destroy_model_parallel()
        >>> dist.destroy_process_group()
    """
    return cross_entropy(vocab_parallel_logits, target, DIALECT.peers(), dtype=None)
