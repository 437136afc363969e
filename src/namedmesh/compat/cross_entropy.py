"""The loss of the dialects, over a sharded vocabulary, which smooths over a rank's own part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from namedmesh.compat.errors import ContractError
from namedmesh.tensor_parallel.loss import Rows, rows_cross_entropy, target_problems

if TYPE_CHECKING:
    from torch import Tensor

    from namedmesh.compat.regions import RankGroup


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: RankGroup,
    label_smoothing: float = 0.0,
    *,
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return the cross entropy of each token, from logits of which each rank has a part of the vocabulary.

    The loss is computed in ``dtype`` and of that type, or of that of the logits. What smoothing takes off the target is spread
    over this rank's part of the vocabulary: ranks get different losses, whose mean is the loss smoothed over all of it
    but for the factor that normalizes it.

    Raises:
        ContractError: the target has another shape than the logits without their last dim, the smoothing is out
            of range, or there is one entry only to spread it over.
    """
    part = logits.shape[-1]
    problems = target_problems(logits.shape, target)
    if not 0 <= label_smoothing < 1:
        problems.append(f"label_smoothing is {label_smoothing}; it can be 0, or between 0 and 1")
    elif label_smoothing and part == 1:
        problems.append(
            f"label_smoothing is {label_smoothing}, but a rank's part of the vocabulary has one entry only, and "
            "nothing to spread it over; cut the vocabulary over fewer ranks, or pass 0"
        )
    if problems:
        raise ContractError(*problems)
    # Spread over the other entries of the part, as the dialects have it.
    spread = label_smoothing * part / (part - 1) if label_smoothing else 0.0
    dtype = dtype or logits.dtype
    if torch.promote_types(logits.dtype, dtype) is not dtype:
        logits = logits.to(dtype)
    ranks: Any = group
    return rows_cross_entropy(logits, target, None, ranks, Rows(dtype, spread, over_part=True))
