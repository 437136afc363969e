"""Fingerprints of tensors: five numbers, by which ranks find out whether they have the same tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 6
"""How many numbers a rank sends for each name: the state of the tensor, the fingerprint, and how it rounds."""

ABSENT, PRESENT, PART, NEEDS_NONE = 0.0, 1.0, 2.0, 3.0
"""The states: this rank has none, it has one, a part of a sum over the ranks, or a parameter that needs no gradient."""

SETTLED, FROZEN = 1.0, -1.0
"""What :func:`verdicts` says of a tensor that all ranks have alike, and of a parameter that needs a gradient on none."""

_CHUNK = 1 << 20
_FREQUENCIES = (1.0, 0.7, 0.3)


def row_of(state: float) -> list[float]:
    """Return the row of what has no numbers to compare."""
    return [state, *[0.0] * (COLUMNS - 1)]


def fingerprint(value: Tensor, dtypes: set[torch.dtype]) -> list[float]:
    """Return the row of a tensor: its size, and three weighted sums, whatever its shape.

    Args:
        value: this rank's plain tensor.
        dtypes: what it was computed in, beside its own type.

    Example:
        >>> row = fingerprint(torch.tensor([3.0, 4.0]), {torch.float32})
        >>> row[0], row[1]
        (1.0, 5.0)
    """
    value = value.detach()
    kinds = {kind for kind in (*dtypes, value.dtype) if kind.is_floating_point or kind.is_complex}
    eps = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    if value.is_sparse:
        value = value.coalesce().values()
    if value.is_complex():
        value = torch.view_as_real(value)
    flat = value.flatten()
    sums = torch.zeros(1 + len(_FREQUENCIES), dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        place = torch.arange(start, start + part.numel(), dtype=torch.float64, device=flat.device)
        sums += torch.stack([part @ part, *(part @ (place * rate).cos() for rate in _FREQUENCIES)])
    squares, *weighted = sums.tolist()
    return [PRESENT, math.sqrt(squares), *weighted, eps]


def verdicts(rows: Tensor) -> list[float]:
    """Return what the rows of all ranks, ``(ranks, tensors, numbers)``, say about each tensor.

    Two tensors count as different where a number of theirs is apart by more than the square root of what their type
    rounds off: sums in another order come near to none of that. Where all of it is within the rounding of the largest
    tensor, nothing is settled: it may be zero.

    Returns:
        For each tensor 0 where nothing is settled, :data:`SETTLED`, :data:`FROZEN`, or for ranks that have different ones
        the first and how far they are apart, as a part of the size.
    """
    rows = rows.cpu()
    largest = float(rows[:, :, 1].nan_to_num(0.0, 0.0, 0.0).max()) if rows.numel() else 0.0
    return [_verdict(rows[:, i], largest) for i in range(rows.shape[1])]


def _verdict(rows: Tensor, largest: float) -> float:
    has, numbers, eps = rows[:, 0], rows[:, 1:-1], float(rows[:, -1].max())
    if bool((has == PART).all()):
        return SETTLED
    if bool((has == NEEDS_NONE).all()):
        return FROZEN
    size = float(numbers[:, 0].max())
    # Where a gradient is zero but for rounding, the terms that cancel out in it may be much larger than eps says; but a
    # type of 16 bits rounds so coarsely that small gradients would hide behind the largest.
    nothing = min(1000 * eps, 1e-4) * largest
    if not torch.isfinite(rows).all() or size <= nothing:
        return 0.0
    difference = float((numbers.amax(0) - numbers.amin(0)).max()) / size
    if difference > math.sqrt(eps) and difference * size > nothing:
        return SETTLED + difference
    return SETTLED if bool(has.all()) else 0.0
