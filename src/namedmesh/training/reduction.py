"""Sums and maxima over named axes, where the groups stand ready, and the norm of gradients over all of them."""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from namedmesh._torch import constant_of_mesh, functional_collective, synchronous, wait_tensor
from namedmesh.errors import MeshError, TrainingError
from namedmesh.tensor_parallel.gradients import reduce_gradients

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from namedmesh.mesh import NamedMesh


def all_reduced(tensor: Tensor, mesh: NamedMesh, axes: Sequence[str], operation: str = "sum") -> Tensor:
    """Return a tensor's sum (or ``"max"``) over the ranks along some axes, in a new tensor; communicates.

    One collective where the mesh has a group over all the axes, and otherwise one for each axis.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> all_reduced(torch.ones(2), mesh, ("dp", "tp"))
        tensor([1., 1.])
        >>> mesh.close(); dist.destroy_process_group()
    """
    for name in _group_names(mesh, tuple(axes)):
        tensor = wait_tensor(functional_collective("all_reduce", tensor, operation, group=name))
    return tensor


@constant_of_mesh
def _group_names(mesh: NamedMesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the groups that together span some axes; none where they have one rank."""
    large = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not large:
        return ()
    try:
        return (mesh.group(*large).group_name,)
    except MeshError:
        return tuple(mesh.group(axis).group_name for axis in large)  # raises where the mesh is closed


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    mesh: NamedMesh,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients down to ``max_norm`` over the whole model, as torch's function does; communicates.

    Prevents: each rank clips by the norm of what it holds. Shards and pipeline stages are then scaled by
    different factors, which turns the gradient; or replicas are counted once for each rank that has one, which
    clips too early. torch's own function raises for DTensors of two meshes, and leaves the other stages out.

    Every rank of the mesh calls it, after the gradients were averaged. Every number of the model's gradient
    counts once: DTensors by their placements, on any slice or view of the mesh; plain tensors by the marks of
    Megatron and DeepSpeed, and without marks as replicas. What each stage of ``pp`` has counts, but for a
    parameter marked as a copy of another stage's, such as a tied embedding: ``parameter.shared = True`` (set it
    after ``fully_shard``, which makes parameters anew). There is one reduction, over all ranks of the mesh, and
    for a mesh over a part of the world one for each axis. A gradient that is ``Partial`` is summed before.

    Marks: ``tensor_model_parallel`` and ``model_parallel`` for another shard on each rank of tp; ``allreduce =
    False`` for experts, of which each rank of ep has others; ``shared`` and ``ds_pipe_replicated`` for copies.

    Args:
        parameters: those of this rank's part of the model; ones without a gradient count nothing.
        max_norm: the largest norm that is left as it is.
        mesh: the mesh.
        norm_type: the p of the norm, greater than 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise for a norm that is infinite or not a number.
        foreach: as for torch's function.

    Returns:
        The norm that the gradients had: a plain tensor of no dims, the same on every rank, in the precision of
        the parameters, or float32 where that is more.

    Raises:
        TrainingError: on every rank: the norm is not finite, where that is an error, and nothing was scaled; or
            ``norm_type`` is not greater than 0.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> training.clip_grad_norm_([weight], 1.0, mesh)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
        >>> mesh.close(); dist.destroy_process_group()
    """
    if not norm_type > 0:
        raise TrainingError(f"norm_type is {norm_type}; it must be greater than 0, or math.inf")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not torch.compiler.is_compiling():
        reduce_gradients(parameters)  # all at once, and not one after the other
    held = [(_holders(each, each.grad), each.grad) for each in parameters if each.grad is not None]
    counts = {holders: _counts_here(mesh, *holders) for holders in dict(held)}
    shards = [_shard(_summed(grad)) for _, grad in held]  # on every rank, as it may communicate
    counted = [shard for (holders, _), shard in zip(held, shards, strict=True) if counts[holders]]
    # Without any it is no constant: the compiler computes with those while it traces, collectives included.
    mine = _norm(counted, norm_type, foreach) if counted else torch.zeros(())
    total = _over_ranks(mine.to(mesh.device, torch.float64), norm_type, mesh)
    if error_if_nonfinite and not total.isfinite():
        raise TrainingError(
            f"the norm of order {norm_type} over the gradients of the whole model is {total.item()}, so they cannot be "
            "clipped, and were left as they are; skip this step, or pass error_if_nonfinite=False"
        )
    total = total.to(reduce(torch.promote_types, (each.dtype for each in parameters), torch.float32))
    # The shards themselves: torch 2.8 scales a DTensor that is a part of a sum to something else.
    scaled: list[Any] = [_Clipped(_shard(grad)) for _, grad in held]
    clip_grads_with_norm_(scaled, max_norm, total, foreach)
    return total


def _norm(shards: list[Any], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of this rank's numbers; torch's own is computed in their type, where a square soon is infinite."""
    norms, others = [], []
    for each in shards:
        if each.dtype in {torch.float16, torch.bfloat16}:
            norms.append(torch.linalg.vector_norm(each, norm_type, dtype=torch.float32))
        else:
            others.append(each)
    if others:
        norms.append(get_total_norm(others, norm_type, foreach=foreach))
    together = torch.stack([each.to(norms[0].device, torch.float64) for each in norms])
    result: Tensor = torch.linalg.vector_norm(together, norm_type)
    return result


def _over_ranks(mine: Tensor, norm_type: float, mesh: NamedMesh) -> Tensor:
    """Return the norm over all ranks' parts, of which each has its norm."""
    if not math.isinf(norm_type):
        return all_reduced(mine**norm_type, mesh, mesh.layout.axes) ** (1 / norm_type)
    # Not every backend's maximum keeps what is not a number.
    both = torch.stack([mine.nan_to_num(nan=0.0, posinf=math.inf), mine.isnan().double()])
    largest, undefined = all_reduced(both, mesh, mesh.layout.axes, "max").unbind()
    return largest.masked_fill(undefined > 0, math.nan)


class _Clipped(NamedTuple):
    """What torch scales: something with a gradient."""

    grad: Tensor


def _holders(
    parameter: Tensor, grad: Tensor
) -> tuple[DeviceMesh | None, tuple[bool, ...], tuple[str, ...], bool]:
    """Return what decides which ranks hold the same numbers of a gradient.

    The mesh of a DTensor, and along which of its dims they do; the axes along which marks say that they do not; and whether it
    is marked as a copy of what another stage has.
    """

    def is_marked(*marks: str) -> bool:
        return any(getattr(parameter, mark, False) for mark in marks)

    expert = not getattr(parameter, "allreduce", True)
    marks = ["ep"] if expert else []
    if is_marked("tensor_model_parallel", "model_parallel"):
        marks.append("etp" if expert else "tp")
    copy = is_marked("shared", "ds_pipe_replicated")
    if not isinstance(grad, DTensor):
        return None, (), tuple(marks), copy
    whole = tuple(isinstance(placement, Replicate | Partial) for placement in grad.placements)
    return grad.device_mesh, whole, tuple(marks), copy


def _shard(grad: Tensor) -> Tensor:
    """Return what this rank holds of a gradient: the same memory."""
    return synchronous(grad.to_local()) if isinstance(grad, DTensor) else grad


def _summed(grad: Tensor) -> Tensor:
    """Return a gradient without parts of a sum, which are added up."""
    if isinstance(grad, DTensor) and any(isinstance(each, Partial) for each in grad.placements):
        whole = [Replicate() if isinstance(each, Partial) else each for each in grad.placements]
        return grad.redistribute(placements=whole)
    return grad


@constant_of_mesh
def _counts_here(
    mesh: NamedMesh, over: DeviceMesh | None, whole: tuple[bool, ...], marks: tuple[str, ...], copy: bool
) -> bool:
    """Return whether this rank is the first of those that hold the same numbers, by what :func:`_holders` returns."""
    rank = mesh.global_rank
    members = {rank} if over is None else set(over.mesh.flatten().tolist())
    same = set(mesh.layout.ranks)  # the ranks that hold the tensor, or a shard of it
    layouts = (mesh.layout, *mesh.views.values())
    for axis in ("pp", *marks):
        layout = next((layout for layout in layouts if axis in layout), None)
        if layout is not None:
            others = [other for other in layout if other != axis]
            beside = set(layout.group(rank, *others)) if others else {rank}
            if members <= beside:  # a DTensor's own mesh may tell of this axis already
                same &= beside
    coordinate = () if over is None else over.get_coordinate() or ()
    return (
        not copy
        and min(members) == min(same)
        and not any(place for place, replicated in zip(coordinate, whole, strict=True) if replicated)
    )
