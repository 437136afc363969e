"""The mean of a loss over all tokens of a step, which the ranks have in unequal numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh.arguments import named_mesh
from namedmesh.axes import TOKEN_AXES
from namedmesh.errors import ShapeError, TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.training.data import data_axes, sum_over_axes


def _token_axes(mesh: NamedMesh) -> list[str]:
    """Return the axes along which ranks have different tokens; all axes must be known."""
    data_axes(mesh)
    return [axis for axis in mesh.layout if axis in TOKEN_AXES]


def _token_ranks(mesh: NamedMesh) -> int:
    ranks = 1
    for axis in _token_axes(mesh):  # which the compiler follows
        ranks *= mesh.size(axis)
    return ranks


def count_tokens(mask_or_count: Tensor | int, mesh: NamedMesh) -> Tensor:
    """Count the supervised tokens of a step over the whole global batch.

    Call it once a step, before its micro-batches. Collective: every rank along the dp and cp axes
    of the mesh must call it.

    Args:
        mask_or_count: a mask of this rank's targets that count, of all micro-batches of the step, such as
            ``targets != -100``; or their number. It may be a tensor without dims, such as the sum
            of a mask of floats.
        mesh: the mesh.

    Raises:
        AxisError: the mesh has an axis of unknown meaning.
        ShapeError: ``mask_or_count`` is a tensor of something else than booleans, such as the targets
            themselves.
    """
    mesh = named_mesh(mesh, "count_tokens")
    counts = torch.as_tensor(mask_or_count, device=mesh.device)
    if counts.ndim and counts.dtype != torch.bool:
        raise ShapeError(
            f"mask_or_count must be a mask of booleans, or a number, got {counts.dtype} of shape "
            f"{tuple(counts.shape)}; give a mask such as targets != -100, or the sum of a mask of "
            "another type"
        )
    return sum_over_axes(counts.sum(), mesh, _token_axes(mesh))


def normalize_loss(loss_sum: Tensor, num_tokens: Tensor, mesh: NamedMesh) -> Tensor:
    """Compute what a sum of losses adds to the mean over all tokens of a step.

    Call ``backward()`` on it. The gradients, after FSDP2 or DDP averaged them over the ranks of
    :func:`fsdp_mesh`, are those of one process with all the tokens, however many of them each rank
    has: a mean of the ranks' means is not. Micro-batches add up. A step without a supervised token
    has loss 0 and gradients 0. It does not communicate.

    Args:
        loss_sum: the sum of the losses of some of this rank's tokens, without dims, in float32 or
            float64; from ``loss_parallel`` the DTensor that it is.
        num_tokens: the result of :func:`count_tokens` for the step.
        mesh: the mesh.

    Raises:
        AxisError: the mesh has an axis of unknown meaning.
        ShapeError: ``loss_sum`` has dims, or is in half precision.
    """
    mesh = named_mesh(mesh, "normalize_loss")
    problems = []
    if loss_sum.ndim:
        problems.append(f'a loss of shape {tuple(loss_sum.shape)} is no sum; give it reduction="sum"')
    if loss_sum.dtype in (torch.bfloat16, torch.float16):
        # The sum and its gradient, which is 1 / num_tokens, would be rounded to 8 bits. All gradients
        # of the step would be off by the same 0.4 % at most, as no mean evens that out.
        remedy = "compute the loss of logits.float()"
        problems.append(f"a sum of losses in {loss_sum.dtype} is not exact; {remedy}")
    if problems:
        raise ShapeError(*problems)
    if isinstance(loss_sum, DTensor):
        loss_sum = loss_sum.full_tensor()
    # Without a supervised token the sum is 0, and 0 / 1 is the mean: 0 / 0 would make every
    # gradient NaN, on every rank.
    divisor = (num_tokens + (num_tokens == 0)).double()
    return (loss_sum.double() * (_token_ranks(mesh) / divisor)).to(loss_sum.dtype)


def mean_loss(losses: Tensor | Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Compute the mean loss of a step, to print and to compare between runs.

    It is in float64 and the same on every rank. Collective: every rank of the mesh must call it,
    pipeline stages without a loss too, with zeros or nothing.

    Args:
        losses: what this rank called ``backward()`` on in the step, one for each micro-batch, or
            their sum; or what ``pipe.step`` or ``pipe.eval`` returned. Parts of a mean, as of
            :func:`normalize_loss`, or means divided by the number of micro-batches.
        mesh: the mesh.

    Raises:
        AxisError: the mesh has an axis of unknown meaning.
    """
    mesh = named_mesh(mesh, "mean_loss")
    given: list[object] = [losses]
    if isinstance(losses, Iterable) and not isinstance(losses, Tensor):
        given = [*losses]
    parts = [loss for loss in given if isinstance(loss, Tensor)]
    if len(parts) != len(given):
        raise TrainingError(
            f"losses must be a tensor, or tensors, got {losses!r}; give the losses that backward() was called on"
        )
    total = sum_losses(parts, mesh)
    axes = [*_token_axes(mesh), *(["pp"] if "pp" in mesh.layout else [])]
    return sum_over_axes(total, mesh, axes) / _token_ranks(mesh)


def sum_losses(losses: Iterable[Tensor], mesh: NamedMesh) -> Tensor:
    """Return the sum of losses on this rank, in float64 and without a graph."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for loss in losses:
        local = loss.full_tensor() if isinstance(loss, DTensor) else loss
        total = total + local.detach().to(total).sum()
    return total
