"""The loss of the dialects, over a sharded vocabulary, which smooths over a rank's own part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from namedmesh.compat.errors import ContractError
from namedmesh.tensor_parallel.loss import rows_cross_entropy, target_problems

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.tensor_parallel.collectives import Group


def cross_entropy(
    logits: Tensor, target: Tensor, group: Group, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of each token, in ``dtype``, from logits of which each rank has a part of the vocabulary.

    What smoothing takes off the target is spread over the other entries of this rank's part: ranks get different losses.

    Raises:
        ContractError: the target has another shape than the logits without their last dim, the smoothing is out
            of range, or there is one entry only to spread it over.
    """
    part = logits.shape[-1]
    problems = target_problems(logits.shape, target)
    if not 0 <= label_smoothing < 1 or (label_smoothing and part == 1):
        problems.append(
            f"label_smoothing is {label_smoothing}, for a part of {part} entries; it can be 0, or between 0 and 1 where there "
            "are several entries"
        )
    if problems:
        raise ContractError(*problems)
    spread = label_smoothing * part / (part - 1) if label_smoothing else 0.0
    if torch.promote_types(logits.dtype, dtype) is not dtype:
        logits = logits.to(dtype)
    return rows_cross_entropy(logits, target, None, group, dtype, spread, True)
