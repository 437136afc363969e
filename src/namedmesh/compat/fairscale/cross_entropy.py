"""fairscale's loss for logits whose vocabulary is sharded over the model-parallel ranks."""

from torch import Tensor

from namedmesh.compat.fairscale.initialize import DIALECT
from namedmesh.compat.layers import cross_entropy


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each token, ``(...)``, in the type of the logits and the same on every rank.

    The logits are this rank's ``(..., v / t)``, left as they are (the original overwrites them), and the target ``(...)`` ids
    in the whole vocabulary, the same on every rank; a ContractError where the shapes do not go together.
    """
    return cross_entropy(vocab_parallel_logits, target, DIALECT.group(), vocab_parallel_logits.dtype)
