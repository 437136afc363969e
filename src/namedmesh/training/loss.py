"""Normalize a loss by the tokens of all ranks, which may have unequal numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from namedmesh._errors import ShapeError, TrainingError
from namedmesh._sharding import to_full
from namedmesh.layout.axes import TOKEN_AXES
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training.data import all_reduce_over_axes, find_data_axes


def _find_token_axes(mesh: NamedMesh) -> list[str]:
    """Return the axes along which ranks have different tokens.

    Raises:
        AxisError: the mesh has an axis of unknown meaning.
    """
    find_data_axes(mesh)
    return [axis for axis in mesh.layout if axis in TOKEN_AXES]


def _count_token_ranks(mesh: NamedMesh) -> int:
    """Return the number of ranks over which FSDP2 or DDP averages gradients."""
    ranks = 1
    # mesh.size(*axes) would flatten the axes. torch.compile can trace only the size of one axis.
    for axis in _find_token_axes(mesh):
        ranks *= mesh.size(axis)
    return ranks


def count_tokens(mask_or_count: Tensor | int, mesh: NamedMesh) -> Tensor:
    """Count the supervised tokens of the global batch of a step.

    Call it once a step, before the first micro-batch.

    Collective: every rank along the dp and cp axes of the mesh must call it. One all-reduce for
    each of these axes.

    Args:
        mask_or_count: a boolean mask of the supervised targets of this rank, for all micro-batches
            of the step, such as ``targets != -100``; or their number, as an int or as a tensor
            without dims.
        mesh: the mesh.

    Returns:
        The number, as a tensor without dims, identical on all ranks that called it together.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has an axis of unknown meaning.
        ShapeError: ``mask_or_count`` is a tensor with dims that is not boolean, such as the targets
            themselves.
        TrainingError: ``mask_or_count`` is a negative int.
    """
    mesh = require_named_mesh(mesh, "count_tokens")
    # The sign of a tensor is not checked: the host would have to wait for the device.
    if isinstance(mask_or_count, int) and mask_or_count < 0:
        raise TrainingError(
            f"mask_or_count must be at least 0, got {mask_or_count}; pass a mask such as targets != -100"
        )
    counts = torch.as_tensor(mask_or_count, device=mesh.device)
    if counts.ndim and counts.dtype != torch.bool:
        raise ShapeError(
            f"mask_or_count must be a boolean mask or a number, got {counts.dtype} of shape "
            f"{tuple(counts.shape)}; pass a mask such as targets != -100, or the sum of a mask of "
            "another dtype"
        )
    return all_reduce_over_axes(counts.sum(), mesh, _find_token_axes(mesh))


def normalize_loss(loss_sum: Tensor, num_tokens: Tensor, mesh: NamedMesh) -> Tensor:
    """Scale a summed loss so that gradients equal the mean over all tokens of the step.

    Call ``backward()`` on the result. FSDP2 and DDP average gradients over the ranks of
    :func:`fsdp_mesh`, so the sum is multiplied by the number of these ranks and divided by the
    global number of tokens. This is correct when ranks have different numbers of supervised tokens.
    An average of per-rank means is not. Results of micro-batches can be added. A step without a
    supervised token has loss 0 and zero gradients.

    Args:
        loss_sum: the sum of the losses of some of this rank's tokens, without dims, in float32 or
            float64. With ``loss_parallel`` it is a DTensor.
        num_tokens: the result of :func:`count_tokens` for the step.
        mesh: the mesh.

    Returns:
        This rank's contribution to the mean, in the dtype of ``loss_sum``. The average over all
        ranks is the mean, as :func:`mean_loss` computes it.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has an axis of unknown meaning.
        ShapeError: ``loss_sum`` or ``num_tokens`` is not a tensor, or ``loss_sum`` has dims or is
            in half precision.
    """
    mesh = require_named_mesh(mesh, "normalize_loss")
    problems = _check_is_tensor(
        "loss_sum", loss_sum, "pass the summed loss itself, without float() or item()"
    )
    is_tensor = not problems
    if is_tensor and loss_sum.ndim:
        problems.append(
            f"loss_sum must be a tensor without dims, got shape {tuple(loss_sum.shape)}; pass "
            'reduction="sum" to the loss'
        )
    if is_tensor and loss_sum.dtype in (torch.bfloat16, torch.float16):
        # The sum and its gradient, 1 / num_tokens, would be rounded to 8 bits in bfloat16. The
        # gradients of the step would all have the same relative error of up to 0.4 %, which does
        # not average out.
        problems.append(
            f"loss_sum must be in float32 or float64, got {loss_sum.dtype}, which is not exact "
            "enough; compute the loss from logits.float()"
        )
    problems += _check_is_tensor("num_tokens", num_tokens, "pass the result of count_tokens")
    if problems:
        raise ShapeError(*problems)
    loss_sum = to_full(loss_sum)
    # Without a supervised token the sum is 0, and 0 / 1 is the mean. 0 / 0 would make every
    # gradient NaN, on every rank.
    divisor = (num_tokens + (num_tokens == 0)).double()
    return (loss_sum.double() * (_count_token_ranks(mesh) / divisor)).to(loss_sum.dtype)


def _check_is_tensor(name: str, value: object, remedy: str) -> list[str]:
    """Return a list with a message if an argument is not a tensor, else an empty list."""
    if isinstance(value, Tensor):
        return []
    return [f"{name} must be a tensor, got {type(value).__name__}; {remedy}"]


def mean_loss(losses: Tensor | Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Compute the mean loss of a step, for logs and for comparisons between runs.

    Collective: every rank of the mesh must call it, also the ranks of pipeline stages without a
    loss. They pass zeros or an empty list. One all-reduce for each axis of pp, dp and cp.

    Args:
        losses: the tensors on which this rank called ``backward()`` in the step, one for each
            micro-batch, or their sum; or the result of ``Pipeline.step`` or ``Pipeline.eval``. They
            are results of :func:`normalize_loss`, or means that are divided by the number of
            micro-batches.
        mesh: the mesh.

    Returns:
        The mean in float64, without a graph, identical on every rank.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        AxisError: the mesh has an axis of unknown meaning.
        TrainingError: ``losses`` holds something other than tensors.
    """
    mesh = require_named_mesh(mesh, "mean_loss")
    values: list[Tensor] = [losses] if isinstance(losses, Tensor) else []
    is_valid = isinstance(losses, Tensor | Iterable)
    if isinstance(losses, Iterable) and not isinstance(losses, Tensor):
        values = [*losses]
        is_valid = all(isinstance(value, Tensor) for value in values)
    if not is_valid:
        raise TrainingError(
            f"losses must be a tensor or an iterable of tensors, got {losses!r}; pass the losses "
            "on which backward() was called"
        )
    total = sum_losses(values, mesh)
    axes = _find_token_axes(mesh)
    if "pp" in mesh.layout:
        axes.append("pp")
    return all_reduce_over_axes(total, mesh, axes) / _count_token_ranks(mesh)


def sum_losses(losses: Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Return the sum of this rank's losses, in float64 and without a graph.

    All-reduces or all-gathers DTensors over their own mesh; plain tensors are only added.

    Args:
        losses: tensors, or DTensors, whose full value counts.
        mesh: the mesh, on whose device the sum is.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        total = total + to_full(loss).detach().to(total).sum()
    return total
