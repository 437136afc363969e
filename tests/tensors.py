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
    return (
        float("inf") if math.isnan(distance) else distance
    )  # the largest of several distances may leave a NaN out
