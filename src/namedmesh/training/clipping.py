"""Clipping by one norm over all that a model's gradients are spread over: DTensors of any mesh, marked shards, pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from namedmesh._torch import functional_collective
from namedmesh.errors import TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.tensor_parallel import reduce_gradients

_SHORT = {torch.float16, torch.bfloat16}


class _Clipped(NamedTuple):
    """What torch scales: something with a gradient. The compiler follows no SimpleNamespace."""

    grad: Tensor


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
    """Scale the gradients down to ``max_norm`` over the whole model, as torch's function does; every rank calls this.

    Every number of the model's gradient counts once: DTensors by their placements, on any slice or view of the mesh; plain tensors
    as replicas, but for those marked as shards by Megatron and DeepSpeed: ``tensor_model_parallel`` and ``model_parallel`` (over tp),
    ``allreduce = False`` (experts, over ep and etp); every stage of ``pp``, but for copies of what another stage has, marked ``shared``
    (by :func:`tie_stages`) or ``ds_pipe_replicated``. There is one small reduction for each axis that gradients are spread over.

    Returns:
        The norm that the gradients had, the same on every rank: of no dims, in float32, or float64 where a gradient is.

    Raises:
        TrainingError: on every rank, with ``error_if_nonfinite``, and nothing is scaled; or ``norm_type`` is not greater than 0.
    """
    if not norm_type > 0:
        raise TrainingError(f"norm_type is {norm_type}; it must be greater than 0, or math.inf")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reduce_gradients(parameters)
    spread: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}  # by the groups whose ranks have other parts
    clipped: list[Any] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            clipped.append(_Clipped(grad.to_local() if isinstance(grad, DTensor) else grad))
            counted = _summed(grad)  # on every rank, as it communicates
            if not (getattr(parameter, "shared", False) or getattr(parameter, "ds_pipe_replicated", False)):
                spread.setdefault(_groups(parameter, grad, mesh), []).append(counted)
    powers = {groups: _power(shards, norm_type, foreach) for groups, shards in spread.items()}
    for group in dict.fromkeys(group for groups in powers for group in groups):
        over = [groups for groups in powers if group in groups]
        together = _joined(torch.stack([powers[groups] for groups in over]), norm_type, group)
        powers.update(zip(over, together, strict=True))
    nothing = torch.zeros((), dtype=torch.float64, device=mesh.device)
    total = _joined(torch.stack([*powers.values(), nothing]), norm_type)
    if "pp" in mesh.layout:
        total = _joined(total[None], norm_type, mesh.group("pp"))[0]
    if not math.isinf(norm_type):
        total = total ** (1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        remedy = "skip this step, or pass error_if_nonfinite=False"
        raise TrainingError(f"the norm of order {norm_type} of all gradients is {total.item()}; {remedy}")
    clip_grads_with_norm_(clipped, max_norm, total, foreach)
    return total if any(each.grad.dtype == torch.float64 for each in clipped) else total.float()


def _summed(grad: Tensor) -> Tensor:
    """Return what this rank has of a gradient; one that is a part of a sum is summed."""
    if not isinstance(grad, DTensor):
        return grad
    if any(isinstance(each, Partial) for each in grad.placements):
        whole = [Replicate() if isinstance(each, Partial) else each for each in grad.placements]
        grad = grad.redistribute(placements=whole)
    return grad.to_local()


def _groups(parameter: Tensor, grad: Tensor, mesh: NamedMesh) -> tuple[ProcessGroup, ...]:
    """Return the groups over which a gradient is cut: by its placements, and by the marks of Megatron and DeepSpeed."""
    groups: list[ProcessGroup] = []
    if isinstance(grad, DTensor):
        cut = [dim for dim, each in enumerate(grad.placements) if not isinstance(each, Replicate | Partial)]
        groups = [grad.device_mesh.get_group(dim) for dim in cut]
    expert = not getattr(parameter, "allreduce", True)
    marks = ["ep"] if expert else []
    if getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False):
        marks.append("etp" if expert else "tp")
    for axis in marks:  # of which its own mesh may tell already
        known = grad.device_mesh.mesh.flatten().tolist() if isinstance(grad, DTensor) else []
        if axis in mesh.coords and len(set(known) & set(mesh.ranks(axis))) <= 1:
            groups.append(mesh.group(axis))
    return tuple(groups)


def _power(shards: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return what is added up over ranks: the power of a norm; or the largest number. A norm in a short type soon is infinite."""
    norms = [
        torch.linalg.vector_norm(each, norm_type, dtype=torch.float32)
        for each in shards
        if each.dtype in _SHORT
    ]
    others = [each for each in shards if each.dtype not in _SHORT]
    norms += [get_total_norm(others, norm_type, foreach=foreach)] if others else []
    together = torch.stack([each.to(norms[0].device, torch.float64) for each in norms])
    norm: Tensor = torch.linalg.vector_norm(together, norm_type)
    return norm if math.isinf(norm_type) else norm.pow(norm_type)


def _joined(powers: Tensor, norm_type: float, group: ProcessGroup | None = None) -> Tensor:
    """Join powers, over the ranks of a group. They are gathered: not every backend's maximum keeps what is not a number."""
    if group is not None:
        powers = functional_collective("all_gather_into_tensor", powers, group.size(), group.group_name)
        powers = powers.view(group.size(), -1)
    return powers.amax(0) if math.isinf(norm_type) else powers.sum(0)
