"""Random tensors that are equal in every process, and differences of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Return normal random values in double precision, the same in every process."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def full_tensor(tensor: Tensor | None) -> Tensor:
    """Return the full tensor of a DTensor, and any other tensor as it is."""
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compute_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference of two full tensors.

    It is infinite if only one exists, or if shapes, dtypes or layouts differ.
    """
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    one, other = full_tensor(one.detach()), full_tensor(other.detach())
    if one.shape != other.shape or one.dtype != other.dtype or one.is_sparse != other.is_sparse:
        return float("inf")
    one, other = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other))
    difference = (one - other).abs().max().item() if one.numel() else 0.0
    # max() of several differences may ignore a NaN.
    return float("inf") if math.isnan(difference) else difference


def rounding_tolerance(dtype: torch.dtype, terms: int, size: float = 1.0) -> float:
    """Return how far apart rounding may put two correct results, for what cannot be computed in float64.

    Each addition rounds by at most half an eps. How a sum is split into partial sums depends on the CPU, on the
    kernel and on the number of ranks, so that either result may be off by that much for each of its terms. This is
    the worst case: most of these errors cancel, and what is measured is about the square root of the terms. A
    tolerance that is close to what one CPU gives fails on the next.

    Args:
        dtype: the dtype of the computation.
        terms: the number of values that are summed, or of operations one after the other.
        size: the largest value that is rounded, for an absolute difference.
    """
    return terms * torch.finfo(dtype).eps * size


def relative_difference(mine: Tensor | None, theirs: Tensor | None, least: float) -> float:
    """Return the largest difference relative to the largest value of ``theirs``, or to ``least``.

    None counts as zeros.
    """
    if mine is None or theirs is None:
        one = mine if theirs is None else theirs
        return 0.0 if one is None else float(full_tensor(one.detach()).abs().max())
    difference = compute_difference(mine, theirs)
    expected = full_tensor(theirs.detach())
    expected = expected.to_dense() if expected.is_sparse else expected
    # A difference that is no number stays infinite, whatever it is divided by.
    if math.isinf(difference) or not expected.numel():
        return difference
    return difference / max(float(expected.abs().max()), least)
