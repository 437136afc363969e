"""Gradients that are parts of a sum: they add up on each rank, and are summed over the ranks once a step.

A norm that each rank applies to its own heads, or to its part of the sequence, gets a part of its gradient on every
rank: a DTensor that is ``Partial``. The parts of several micro-batches add up without communication. DTensor arithmetic
is right with such a gradient, but sums it anew in each operation that needs the sum.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import CLIPS_PARTIAL_GRADIENTS, gradient_like, synchronous
from namedmesh.tensor_parallel.collectives import RankGroup, all_reduce

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh


def reduce_gradients(parameters: nn.Module | Iterable[Tensor]) -> None:
    """Sum the gradients that are parts over their ranks: one collective for all that have the same ranks and type.

    Every step of a ``torch.optim.Optimizer`` does this first (up to torch 2.11 it is done at once, in the backward: its
    clipping leaves such gradients as they are), and so does :func:`namedmesh.training.clip_grad_norm_`. Call
    it yourself, after the last micro-batch, before code that takes ``grad.to_local()`` for the gradient, such as an
    optimizer of your own, or that writes into gradients what is no multiple of them, as
    ``torch.nn.utils.clip_grad_value_`` does. ``grad.full_tensor()`` is the whole gradient before and afterwards.

    Args:
        parameters: a model, or parameters; on all ranks the same ones, in the same order.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh.tensor_parallel import LocalParameters, parallelize, reduce_gradients
        >>> mesh = namedmesh.init_mesh(tp=-1, device="cpu")
        >>> norm = parallelize(torch.nn.LayerNorm(4), mesh["tp"], LocalParameters())
        >>> norm(torch.ones(2, 4)).sum().backward()
        >>> norm.bias.grad.placements
        (Partial(sum),)
        >>> reduce_gradients(norm)
        >>> norm.bias.grad.placements
        (Replicate(),)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    together: dict[tuple[DeviceMesh, int, torch.dtype], list[Any]] = {}
    for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements == parameter.placements or gradient.device_mesh != parameter.device_mesh:
            continue
        layouts = enumerate(zip(gradient.placements, parameter.placements, strict=True))
        different = {dim: layout for dim, layout in layouts if layout[0] != layout[1]}
        if [*different.values()] == [(Partial(), Replicate())]:
            key = gradient.device_mesh, next(iter(different)), gradient.dtype
            together.setdefault(key, []).append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, dim, _), some in together.items():
        parts = [synchronous(parameter.grad.to_local().detach()) for parameter in some]
        joined = torch.cat([part.flatten() for part in parts])
        total = all_reduce(joined, RankGroup(mesh.get_group(dim)), mine=True)
        sums = total.split([part.numel() for part in parts])
        for parameter, part, whole in zip(some, parts, sums, strict=True):
            parameter.grad = gradient_like(parameter, whole.view_as(part))


def reduce_before_use(model: nn.Module) -> None:
    """Let the gradients of a model be summed before they are used: before a step, or at once where torch clips no parts."""
    reduce_before_steps()
    if CLIPS_PARTIAL_GRADIENTS:
        return
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and Replicate() in parameter.placements:
            trainable = parameter.requires_grad
            parameter.requires_grad_()  # or it takes no hook
            parameter.register_post_accumulate_grad_hook(_sum_at_once)  # type: ignore[no-untyped-call]  # torch's
            parameter.requires_grad_(trainable)


def _sum_at_once(parameter: Tensor) -> None:
    reduce_gradients([parameter])


@cache
def reduce_before_steps() -> None:
    """Let every optimizer of this process sum such gradients before its step; torch's optimizers are not right with all of them.

    In torch 2.8 SGD with momentum drops the update. An optimizer that works on shards would take a part for the gradient.
    """
    register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    reduce_gradients(parameters)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def reducing() -> Any:
        loss = closure()  # which runs the backward inside the step
        reduce_gradients(parameters)
        return loss

    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], reducing, *args[2:]), rest
