"""Gradient clipping by one norm over the full model, on any meshes and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from namedmesh._checks.models import list_checks
from namedmesh._checks.replicas import compare_replicas, format_params
from namedmesh._errors import TrainingError
from namedmesh._sharding import find_attribute_axes, find_placements, make_layout_key, to_local
from namedmesh._torch.modules import (
    find_sharding_under_ddp,
    iter_params_hidden_by_ddp,
    iter_unsharded_parameters,
)
from namedmesh._torch.tensors import compute_norms, run_functional_collective, scale_
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.tensor_parallel import reduce_gradients
from namedmesh.training.tying import get_tie, is_counted_on_other_stage

# The dtype of the factor by which gradients of a dtype are scaled, if it is not float32. On CUDA
# torch's fused kernel needs a factor of the gradients' own dtype. float16 is the exception, with one
# kernel for each gradient, because a small factor would be rounded to zero.
_FACTOR_DTYPES = {
    torch.bfloat16: torch.bfloat16,
    torch.float64: torch.float64,
    torch.complex128: torch.float64,
}

# The process groups over which a parameter is sharded.
ShardGroups = tuple[ProcessGroup, ...]


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
    """Clip gradients by the norm over the full model; see torch's ``clip_grad_norm_``.

    Every element of the model's gradient counts once, whatever mesh its parameter is on:

    - DTensors count by their placements. Partial gradients are all-reduced first.
    - Plain tensors are replicated, except those with the attributes of Megatron-LM and DeepSpeed:
      ``tensor_model_parallel`` or ``model_parallel`` for shards over tp, and ``allreduce = False``
      for experts, which are sharded over ep and etp.
    - All stages of ``pp`` are summed. A copy of another stage's parameter does not count, if
      :func:`tie_stages` tied it or it has the attribute ``shared`` or ``ds_pipe_replicated``.

    The norm needs one small all-gather for each group over which parameters are sharded. On the
    first call with a mesh, and on calls 2, 4, 8 and so on up to 1024, the ranks also compare
    weights and gradients of replicated parameters, and of the two ends of a tied weight.

    Collective: every rank of the mesh must call it, with the same parameters in the same order. A
    rank may lack some of the gradients.

    Args:
        parameters: a tensor, or an iterable of tensors such as ``model.parameters()``.
        max_norm: the largest norm that is not scaled down.
        mesh: the mesh.
        norm_type: the order of the norm, greater than 0; ``math.inf`` for the largest absolute
            value.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.
        foreach: False to use one kernel per gradient instead of one per device and dtype.
        check: whether the ranks compare weights and gradients on the calls above. Pass False if
            replicas are meant to differ, for example if gradients are averaged after clipping.

    Returns:
        The norm before clipping, identical on every rank: a tensor without dims, in float32, or in
        float64 if a parameter is.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        TrainingError: on every rank, before any gradient is scaled: ``norm_type`` is not greater
            than 0, the norm is not finite and ``error_if_nonfinite`` is set, or gradients cannot be
            read because FSDP2 has not resharded parameters, or because DDP over tensor parallelism
            has replaced them by local shards.
        GradientError: on every rank, before any gradient is scaled: weights or gradients of
            replicated or tied parameters differ between ranks. As in torch, parameters have no names here,
            so the message has their positions in ``parameters`` and their shapes.
    """
    mesh = require_named_mesh(mesh, "clip_grad_norm_")
    if not norm_type > 0:
        raise TrainingError(f"norm_type must be greater than 0, or math.inf, got {norm_type}")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    reduce_gradients(params)
    grads: list[Tensor | None] = []
    without_grad: dict[int, Tensor] = {}
    for position, param in enumerate(params):
        grads.append(param.grad)
        if param.grad is None:
            without_grad[position] = param
    check_not_unsharded(without_grad)
    if check:
        _check_not_removed_by_ddp(params)
        ties: dict[int, str] = {}
        for position, param in enumerate(params):
            tie = get_tie(param)
            if tie is not None:
                ties[position] = tie[0]
        compare_replicas(params, mesh, ties)
    norm = _compute_norm(_group_local_grads(params, grads, mesh), norm_type, mesh, foreach)
    if error_if_nonfinite and not norm.isfinite():
        raise TrainingError(
            f"the gradient norm of order {norm_type} is {norm.item()}; skip this step, or pass "
            "error_if_nonfinite=False"
        )
    # torch's formula. It does not compare the norm, so that the host need not wait for a device.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    local_grads = [to_local(grad) for grad in grads if grad is not None]
    for (device, dtype), tensors in _group_by_device_and_dtype(local_grads).items():
        scale_(tensors, factor.to(device, _FACTOR_DTYPES.get(dtype, torch.float32)), foreach)
    has_double = any(param.dtype == torch.float64 for param in params)
    return norm if has_double else norm.float()


def check_not_unsharded(without_grad: dict[int, Tensor]) -> None:
    """Check that these are not FSDP2's unsharded parameters, which get no gradients.

    ``model.parameters()`` returns them between a forward and its backward. The gradients belong to
    the sharded parameters. Does not communicate.

    Args:
        without_grad: the caller's parameters without a gradient, by position in its arguments.

    Raises:
        TrainingError: some of these parameters are unsharded.
    """
    is_trained = any(param.requires_grad for param in without_grad.values())
    if torch.compiler.is_compiling() or not is_trained:
        return
    unsharded = set(map(id, iter_unsharded_parameters()))
    hidden = {}
    for position, param in without_grad.items():
        if id(param) in unsharded:
            hidden[position] = param
    if hidden:
        raise TrainingError(
            f"Parameters {format_params(hidden.items())} are unsharded by FSDP2, as after a "
            "forward without a backward. Their gradients belong to the sharded parameters, and "
            "an optimizer made from these trains nothing. Clip before the next forward, or first "
            "call reshard() on every FSDPModule of the model"
        )


def _check_not_removed_by_ddp(params: Sequence[Tensor]) -> None:
    """Raise TrainingError if DDP over tensor parallelism has removed parameters.

    Does not communicate.
    """
    if torch.compiler.is_compiling():
        return
    ids = set(map(id, params))
    if any(map(find_sharding_under_ddp, params)):
        return  # the caller has kept the local shards from before the first forward
    for _, model in list_checks():
        hidden = list(iter_params_hidden_by_ddp(model))
        # Only a model that has some of these parameters concerns this call.
        is_of_call = not ids or ids.intersection(map(id, model.parameters()))
        if hidden and is_of_call:
            raise TrainingError(
                f"{len(hidden)} sharded parameters are missing: the first forward of "
                "DistributedDataParallel over tensor parallelism took them out of the model. Keep "
                "params = list(model.parameters()) from before the first forward, for the "
                "optimizer and for clipping, or use fully_shard"
            )


def _group_local_grads(
    params: Sequence[Any], grads: Sequence[Tensor | None], mesh: NamedMesh
) -> dict[ShardGroups, list[Tensor]]:
    """Return the local gradients that this rank counts, by the groups that shard them.

    The keys depend on the parameters only. So a rank without gradients, for example because its
    experts got no tokens, takes part in the same collectives as the other ranks.
    """
    local_grads: dict[ShardGroups, list[Tensor]] = {}
    # The parameters of a model have few different layouts, so the groups are found once for each.
    groups_by_layout: dict[object, ShardGroups] = {}
    for param, grad in zip(params, grads, strict=True):
        if is_counted_on_other_stage(param):
            continue
        layout = make_layout_key(param)
        if layout not in groups_by_layout:
            groups_by_layout[layout] = _find_shard_groups(param, mesh)
        same_groups = local_grads.setdefault(groups_by_layout[layout], [])
        if isinstance(grad, DTensor) and grad.placements != param.placements:
            # torch's operators may return a gradient with other placements than the parameter's.
            grad = grad.redistribute(placements=param.placements)  # noqa: PLW2901
        if grad is not None:
            same_groups.append(to_local(grad))
    return local_grads


def _find_shard_groups(param: Tensor, mesh: NamedMesh) -> ShardGroups:
    """Return the process groups over which a parameter is sharded.

    They follow from the placements of a DTensor, or from the attributes of a plain tensor.
    """
    device_mesh, placements = find_placements(param) or (None, ())
    groups: list[ProcessGroup] = []
    ranks_of_placements: set[int] = set()
    attribute_axes = [axis for axis in find_attribute_axes(param) if axis in mesh]
    if device_mesh is not None:
        for dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                groups.append(device_mesh.get_group(dim))
        if attribute_axes:
            ranks_of_placements.update(device_mesh.mesh.flatten().tolist())
    for axis in attribute_axes:
        # If the DTensor's own mesh has this axis, its placement decides, and not the attribute.
        shared_ranks = ranks_of_placements.intersection(mesh.ranks(axis))
        if len(shared_ranks) <= 1:
            groups.append(mesh.group(axis))
    return tuple(groups)


def _compute_norm(
    local_grads: Mapping[ShardGroups, Sequence[Tensor]],
    norm_type: float,
    mesh: NamedMesh,
    foreach: bool | None,
) -> Tensor:
    """Return the norm of all gradients of the model, in float64, equal on every rank.

    It is computed from powers: the sum of ``|g| ** norm_type`` over the elements of gradients, or the
    largest ``|g|`` if ``norm_type`` is infinite. Powers of shards can be combined, unlike norms.

    Collective: one all-gather for each group that shards parameters, and one over ``pp``.
    """
    powers: dict[ShardGroups, Tensor] = {}
    for groups, grads in local_grads.items():
        local_powers: list[Tensor] = []
        # An empty shard has no largest element: torch's norm raises if norm_type is infinite.
        for tensors in _group_by_device_and_dtype([grad for grad in grads if grad.numel()]).values():
            norms = torch.stack(compute_norms(tensors, norm_type, foreach))
            norm = torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64).to(mesh.device)
            local_powers.append(norm if math.isinf(norm_type) else norm.pow(norm_type))
        powers[groups] = _combine(local_powers, norm_type, mesh.device)
    # After the all-gather over a group, the power of its shards is identical on its ranks. A
    # parameter that several groups shard takes part in the all-gather of each of them.
    for group in dict.fromkeys(chain.from_iterable(local_grads)):
        keys = [groups for groups in powers if group in groups]
        stacked = torch.stack([powers[groups] for groups in keys])
        powers.update(zip(keys, _combine_over_ranks(stacked, norm_type, group), strict=True))
    total = _combine([*powers.values()], norm_type, mesh.device)
    if "pp" in mesh.layout:
        (total,) = _combine_over_ranks(total[None], norm_type, mesh.group("pp"))
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _group_by_device_and_dtype(
    tensors: list[Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype: one fused kernel can process each group."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _combine(powers: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of powers, or their maximum for the infinity norm. Local."""
    if not powers:
        return torch.zeros((), dtype=torch.float64, device=device)
    if len(powers) == 1:
        return powers[0]
    return torch.stack(powers).amax(0) if math.isinf(norm_type) else torch.stack(powers).sum(0)


def _combine_over_ranks(powers: Tensor, norm_type: float, group: ProcessGroup) -> Tensor:
    """Combine each power over the ranks of a group. Collective: one all-gather."""
    # All-gather instead of all-reduce: the MAX of some backends loses NaN.
    size = group.size()
    gathered = powers
    if size > 1:
        gathered = run_functional_collective("all_gather_into_tensor", powers, size, group.group_name)
    return _combine([*gathered.view(size, -1)], norm_type, powers.device)
