"""All-reduce partial gradients, and register models whose gradients are compared.

One pre-hook of torch's optimizers reduces and compares gradients, also for compiled models,
zero-bubble schedules and FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._checks.models import ModelCheck, compare_before_step
from namedmesh._sharding import to_local
from namedmesh._torch.tensors import make_gradient, wait_if_async
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.collectives import Group, all_reduce
from namedmesh.tensor_parallel.experts import ExpertForward
from namedmesh.tensor_parallel.layers import ShardedLayer


def reduce_gradients(parameters: nn.Module | Iterable[Tensor]) -> None:
    """All-reduce partial gradients, with one collective for each mesh, placement and dtype.

    Every step of a ``torch.optim.Optimizer`` does this first, and so does
    :func:`namedmesh.training.clip_grad_norm_`. Call it after the last micro-batch and before code
    that reads ``grad.to_local()``, or that changes gradients in a way that is not a multiplication,
    such as ``clip_grad_value_``.

    Collective: every rank must call it with the same parameters in the same order.

    Args:
        parameters: a model, or its parameters. Gradients that are not partial are left as they are.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    buckets: dict[Any, list[Any]] = {}
    param: Any
    for param in parameters:
        placements = _partial_placements(param)
        if not placements:
            continue
        reduced = [Replicate() if isinstance(p, Partial) else p for p in placements]
        if tuple(reduced) != param.placements:
            # The gradient is also sharded in another way than the parameter.
            param.grad = param.grad.redistribute(placements=param.placements)
            continue
        tensor = param if param.grad is None else param.grad
        buckets.setdefault((tensor.device_mesh, placements, tensor.dtype), []).append(param)
    for (mesh, placements, _), params in buckets.items():
        _all_reduce_bucket(params, mesh, placements)


def _partial_placements(param: Any) -> tuple[Placement, ...]:
    """Return the placements of a partial gradient; an empty tuple if it is not partial.

    A rank without a gradient, e.g. because no token was sent to its expert, must take part in the
    all-reduce. This follows from the parameter: ``LocalParameters`` has set an attribute.
    """
    if param.grad is None:
        is_partial = param.requires_grad and getattr(param, "gradient_is_partial", False)
        # After FSDP2 has sharded the parameter, its placements are different.
        if is_partial and param.placements == (Replicate(),):
            return (Partial(),)
        return ()
    if isinstance(param.grad, DTensor) and any(isinstance(p, Partial) for p in param.grad.placements):
        placements: tuple[Placement, ...] = param.grad.placements
        return placements
    return ()


@torch.no_grad()
def _all_reduce_bucket(params: Sequence[Any], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """All-reduce the gradients of several parameters in one collective.

    A gradient that is None counts as zero, and stays None if it is None on every rank.
    Collective: every rank of ``mesh`` must call it.

    Args:
        params: the parameters, of one dtype.
        mesh: their mesh.
        placements: the placements of their gradients, some of which are ``Partial``.
    """
    local_grads = []
    ranks_with_grad = to_local(params[0]).new_ones(len(params))
    for index, param in enumerate(params):
        if param.grad is None:
            local_grads.append(torch.zeros_like(to_local(param)))
            ranks_with_grad[index] = 0
        else:
            local_grads.append(wait_if_async(to_local(param.grad)))
    bucket = torch.cat([*(grad.flatten() for grad in local_grads), ranks_with_grad])
    # In half precision the sum is rounded after every rank: a percent of error over eight ranks.
    bucket = bucket.to(torch.promote_types(bucket.dtype, torch.float32))
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            bucket = all_reduce(bucket, Group.of(mesh.get_group(dim)))
    bucket = bucket.to(local_grads[0].dtype)
    sizes = [grad.numel() for grad in local_grads]
    *sums, ranks_with_grad = bucket.split([*sizes, len(sizes)])
    for index, (param, local_grad, total) in enumerate(zip(params, local_grads, sums, strict=True)):
        # Reading the count waits for the device, so only ranks without a gradient read it.
        if param.grad is not None or ranks_with_grad[index] > 0:
            param.grad = make_gradient(param, total.view_as(local_grad), param.placements)


def register_gradient_check(model: nn.Module, mesh: AxisMesh) -> None:
    """Register a check that gradients of replicated parameters match on all ranks.

    For a model that was sharded along the axis by other means; ``parallelize`` calls this itself.
    It covers parameters that are not sharded along the axis: plain tensors, and DTensors that are
    replicated along it. ``Partial`` gradients are skipped, and so are plain tensors that are tagged
    as shards (``tensor_model_parallel``). A copy of the model is compared like a new model.

    The ranks compare before the steps 1, 2, 4 and so on up to 1024 of each of torch's optimizers,
    or in ``clip_grad_norm_`` before such a step. A loop without one of torch's optimizers does not
    compare. Nothing is compared while a CUDA graph is captured.

    Before the first two of these steps they also compare two kinds of activations of layers that
    ``parallelize`` has sharded. The input of the first of these layers, such as token ids: ranks of
    one axis must work on the same samples. And the gradients of outputs that are all-gathered, which
    count as replicated. Layers that all-gather their input (sequence parallelism) and compiled
    layers are skipped.

    Args:
        model: the model. Every rank of the axis must call this, and run the forward and backward of
            the model on the same data.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with one axis.

    Raises:
        GradientError: in the first forward, on every rank of the axis: inputs have different
            shapes. Before the optimizer's step, or in ``clip_grad_norm_``: gradients or inputs
            differ, by name.
    """
    mesh = get_axis_mesh(mesh, "tp", "register_gradient_check")
    install_optimizer_step_hook()
    if mesh.size() == 1 or dist.get_backend(mesh.get_group()) == "fake":
        return
    kept = ModelCheck(model, mesh).kept
    group = Group.of(mesh)
    for name, module in model.named_modules():
        if isinstance(module, ShardedLayer) and module.layouts.group == group:
            is_replicated = module.layouts.input_dim is None
            # Unlike a closure, a partial can be copied and pickled with the model.
            module.keep_input = partial(kept.keep_input, name, is_replicated=is_replicated)
            module.keep_gradient = partial(kept.keep_gradient, name)


def register_token_check(model: nn.Module, mesh: DeviceMesh) -> None:
    """Register a check that the ranks that share the experts of a model have different tokens.

    Args:
        model: the model, to whose experts ``ExpertParallel`` was applied.
        mesh: the mesh of the axis ``ep``.
    """
    forwards = {}
    token_groups: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module.forward, ExpertForward):
            forwards[name] = module.forward
            token_groups |= {group.name: None for group in module.forward.token_groups if group.size > 1}
    if token_groups and dist.get_backend() != "fake":
        kept = ModelCheck(model, mesh, [*token_groups]).kept
        for name, forward in forwards.items():
            forward.keep_input = partial(kept.keep_input, name)


@cache
def install_optimizer_step_hook() -> None:
    """Let every optimizer of this process reduce and compare gradients before its step.

    It installs one hook for the process; further calls have no effect.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Reduce and compare the gradients of an optimizer: a pre-hook of its step."""
    params: list[Tensor] = []
    for param_group in optimizer.param_groups:
        params.extend(param_group["params"])
    reduce_gradients(params)
    compare_before_step(optimizer, params)
