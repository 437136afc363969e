"""Tensors that are the same in every process, and how far two are from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def apart(one: Tensor | None, other: Tensor | None) -> float:
    """How far two tensors are from each other as wholes; infinitely, if only one is there or they are not alike."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    one, other = whole(one.detach()), whole(other.detach())
    if one.shape != other.shape or one.dtype != other.dtype or one.is_sparse != other.is_sparse:
        return float("inf")
    one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
    distance = (one - other).abs().max().item() if one.numel() else 0.0
    # The largest of several distances may leave a NaN out.
    return float("inf") if math.isnan(distance) else distance


def apart_by_size(mine: Tensor | None, theirs: Tensor | None, least: float) -> float:
    """The distance as a part of the second one's size, where that is more than ``least``; none is as good as zeros."""
    if mine is None or theirs is None:
        one = mine if theirs is None else theirs
        return 0.0 if one is None else float(whole(one.detach()).abs().max())
    return apart(mine, theirs) / max(float(theirs.abs().max()), least)
