"""Clipping by one norm over the whole model, whatever meshes and stages hold the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._torch import compute_norms, functional_collective, scale_
from namedmesh.arguments import named_mesh
from namedmesh.errors import TrainingError
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import find_attribute_axes, find_placements, to_local
from namedmesh.tensor_parallel import reduce_gradients
from namedmesh.training import replicas
from namedmesh.training.tying import is_counted_elsewhere

# The type of the factor by which gradients of a type are scaled, if it is not float32. On CUDA
# torch's fused kernel takes a factor of the gradients' own type only. float16 is the exception,
# with a kernel for each gradient: a small factor would be rounded to zero.
_FACTOR_TYPES = {
    torch.bfloat16: torch.bfloat16,
    torch.float64: torch.float64,
    torch.complex128: torch.float64,
}

Groups = tuple[ProcessGroup, ...]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    mesh: NamedMesh,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    check: bool = True,
) -> Tensor:
    """Scale the gradients down to ``max_norm`` over the whole model, as torch's function does.

    Every number of the model's gradient counts once. DTensors count by their placements, on any
    slice or view of the mesh. Plain tensors count as replicas, except those with the attributes of
    Megatron and DeepSpeed: ``tensor_model_parallel`` and ``model_parallel`` for shards over tp,
    ``allreduce = False`` for experts over ep and etp. Every stage of ``pp`` counts, except copies
    of another stage's parameter with ``shared`` (by :func:`tie_stages`) or ``ds_pipe_replicated``.
    There is one small reduction for each axis that parameters are sharded over.

    On the first call with a mesh, and on calls 2, 4, 8 and so on up to 1024, the ranks also compare
    the weights and the gradients of parameters that must be equal on several ranks.

    Collective: every rank of the mesh must call it, with the same parameters in the same order. A
    rank may lack some of the gradients.

    Args:
        parameters: a tensor, or several, such as ``model.parameters()``.
        max_norm: the largest norm that is not scaled down.
        mesh: the mesh.
        norm_type: the order of the norm, greater than 0; ``math.inf`` for the largest value.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.
        foreach: False for one kernel per gradient instead of one per device and type.
        check: whether the ranks compare weights and gradients on the calls above. Pass False if
            replicas are meant to differ, for example if gradients are averaged after clipping.

    Returns:
        The norm that the gradients had, the same on every rank: a tensor without dims, in float32,
        or in float64 if a parameter is.

    Raises:
        TrainingError: on every rank, and nothing is scaled: the norm is not finite and
            ``error_if_nonfinite`` is set, ``norm_type`` is not greater than 0, or FSDP2 holds
            parameters unsharded, or DDP over tensor parallelism has taken them out of the model,
            so that their gradients cannot be seen.
        GradientError: on every rank, and nothing is scaled: weights or gradients differ between
            ranks that must have the same.
    """
    mesh = named_mesh(mesh, "clip_grad_norm_")
    if not norm_type > 0:
        raise TrainingError(f"norm_type is {norm_type}; it must be greater than 0, or math.inf")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reduce_gradients(params)
    grads = [param.grad for param in params]
    replicas.check_sharded({at: params[at] for at, grad in enumerate(grads) if grad is None})
    if check:
        replicas.compare(params, mesh)
    total = _total_power(_counted_shards(params, grads, mesh), norm_type, mesh, foreach)
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        remedy = "skip this step, or pass error_if_nonfinite=False"
        value = norm.item()
        raise TrainingError(f"the norm of order {norm_type} of all gradients is {value}; {remedy}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local_grads = [to_local(grad) for grad in grads if grad is not None]
    for (device, dtype), some in _by_device_and_type(local_grads).items():
        scale_(some, factor.to(device, _FACTOR_TYPES.get(dtype, torch.float32)), foreach)
    return norm if any(param.dtype == torch.float64 for param in params) else norm.float()


def _counted_shards(
    params: Sequence[Any], grads: Sequence[Tensor | None], mesh: NamedMesh
) -> dict[Groups, list[Tensor]]:
    """Return the local gradients that count, by the groups whose ranks have the other shards.

    The groups follow from the parameters: a rank without gradients, such as one whose experts got
    no tokens, takes part in the same reductions as the others.
    """
    shards: dict[Groups, list[Tensor]] = {}
    known: dict[object, Groups] = {}
    for param, grad in zip(params, grads, strict=True):
        if is_counted_elsewhere(param):
            continue
        key = replicas.layout_key(param)
        if key not in known:
            known[key] = _sharding_groups(param, mesh)
        counted = shards.setdefault(known[key], [])
        if isinstance(grad, DTensor) and grad.placements != param.placements:
            # torch's operators may leave a gradient in another layout than the parameter's.
            grad = grad.redistribute(placements=param.placements)  # noqa: PLW2901
        if grad is not None:
            counted.append(to_local(grad))
    return shards


def _sharding_groups(param: Tensor, mesh: NamedMesh) -> Groups:
    """Return the groups that a parameter is sharded over, by its placements and its attributes."""
    own_mesh, placements = find_placements(param) or (None, ())
    groups: list[ProcessGroup] = []
    own_ranks: set[int] = set()
    if own_mesh is not None:
        for dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                groups.append(own_mesh.get_group(dim))
    marked = [axis for axis in find_attribute_axes(param) if axis in mesh]
    if own_mesh is not None and marked:
        own_ranks.update(own_mesh.mesh.flatten().tolist())
    # The mesh of a DTensor may have such an axis already, with a placement of its own.
    new = [axis for axis in marked if len(own_ranks.intersection(mesh.ranks(axis))) <= 1]
    groups += [mesh.group(axis) for axis in new]
    return tuple(groups)


def _total_power(
    shards: dict[Groups, list[Tensor]], norm_type: float, mesh: NamedMesh, foreach: bool | None
) -> Tensor:
    """Return the sum of powers, or the largest absolute value, over all gradients of the model.

    Collective: one all-gather for each group, and one over ``pp``.
    """
    powers: dict[Groups, Tensor] = {}
    for groups, some in shards.items():
        powers[groups] = _local_power(some, norm_type, mesh.device, foreach)
    every_group = dict.fromkeys(group for groups in shards for group in groups)
    for group in every_group:
        spread = [groups for groups in shards if group in groups]
        together = _join_ranks(torch.stack([powers[groups] for groups in spread]), norm_type, group)
        powers.update(zip(spread, together, strict=True))
    total = _join([*powers.values()], norm_type, mesh.device)
    if "pp" in mesh.layout:
        total = _join_ranks(total[None], norm_type, mesh.group("pp"))[0]
    return total


def _local_power(
    shards: list[Tensor], norm_type: float, device: torch.device, foreach: bool | None
) -> Tensor:
    """Return the sum of powers, or the largest absolute value, over local tensors, in float64."""
    powers: list[Tensor] = []
    # An empty shard has no largest value.
    for some in _by_device_and_type([shard for shard in shards if shard.numel()]).values():
        norms = torch.stack(compute_norms(some, norm_type, foreach))
        norm = torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64).to(device)
        powers.append(norm if math.isinf(norm_type) else norm.pow(norm_type))
    return _join(powers, norm_type, device)


def _by_device_and_type(
    tensors: list[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return lists of tensors that one kernel takes together."""
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return together


def _join(powers: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of powers, or the largest absolute value; zero if there is none."""
    if not powers:
        return torch.zeros((), dtype=torch.float64, device=device)
    if len(powers) == 1:
        return powers[0]
    together = torch.stack(powers)
    return together.amax() if math.isinf(norm_type) else together.sum()


def _join_ranks(powers: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """Join each power with those of the other ranks of a group."""
    if group.size() == 1:
        return powers
    # They are gathered, because the maximum of some backends loses NaN.
    size = group.size()
    gathered = functional_collective("all_gather_into_tensor", powers, size, group.group_name)
    by_rank = gathered.view(size, -1)
    return by_rank.amax(0) if math.isinf(norm_type) else by_rank.sum(0)
