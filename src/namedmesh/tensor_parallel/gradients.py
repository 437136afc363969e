"""Gradients that are parts are summed over their ranks, and those of what every rank has whole are compared.

What a forward does with a whole parameter, on a rank's own features, cannot be known from the outside; that the gradients then
differ can. One hook of torch's optimizers does both, for compiled models, zero-bubble schedules and FSDP2 alike.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import at_end_of_backward, from_all, gradient_like, group_named, synchronous
from namedmesh.errors import GradientError, listing
from namedmesh.tensor_parallel.collectives import Group, all_reduce

# The ranks compare before the steps 1, 2, 4 and so on up to this one of each optimizer.
LAST_STEP = 1024
# How far two gradients may be apart, as a part of their size. Of what every rank computes alike they are the same to the bit,
# but where a kernel or a sum takes another order: 16 bits then round off some thousandths. Parts differ by much of their size.
TOLERANCE = 1e-2
# What part of the largest gradient is taken for zero: the rounding of terms that cancel out may be all of a gradient.
NOTHING = 1e-6


def reduce_gradients(parameters: nn.Module | Iterable[Tensor]) -> None:
    """Sum the gradients that are parts over their ranks: one collective for all that have the same ranks and type.

    Every step of a ``torch.optim.Optimizer`` does this first, and so does :func:`namedmesh.training.clip_grad_norm_`. Call it
    yourself, after the last micro-batch, before code that takes ``grad.to_local()`` for the gradient, or that writes into
    gradients what is no multiple of them, as ``clip_grad_value_`` does. All ranks give the same parameters, in the same order.
    """
    together: dict[Any, list[Any]] = {}
    parameter: Any
    for parameter in parameters.parameters() if isinstance(parameters, nn.Module) else parameters:
        layout = _partial_layout(parameter)
        if not layout:
            continue
        summed = tuple(Replicate() if isinstance(each, Partial) else each for each in layout)
        if summed == parameter.placements:
            gradient = parameter if parameter.grad is None else parameter.grad
            together.setdefault((gradient.device_mesh, layout, gradient.dtype), []).append(parameter)
        else:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    for (mesh, layout, _), some in together.items():
        _all_reduce_together(some, mesh, layout)


def _partial_layout(parameter: Any) -> tuple[Placement, ...]:
    """Return the placements of a partial gradient; nothing for any other gradient.

    A rank without a gradient, such as one whose tokens did not go to an expert, must take part with
    the others. This follows from the parameter: ``LocalParameters`` has set an attribute.
    """
    gradient = parameter.grad
    if gradient is None:
        is_partial = parameter.requires_grad and getattr(parameter, "gradient_is_partial", False)
        # A parameter that FSDP2 has sharded has another layout.
        return (Partial(),) if is_partial and parameter.placements == (Replicate(),) else ()
    layout = gradient.placements if isinstance(gradient, DTensor) else ()
    return layout if any(isinstance(each, Partial) for each in layout) else ()


def _all_reduce_together(parameters: Sequence[Any], mesh: DeviceMesh, layout: tuple[Placement, ...]) -> None:
    """Sum the gradients of some parameters in one all-reduce; those that no rank has stay None."""
    parts = []
    for parameter in parameters:
        if parameter.grad is None:
            parts.append(torch.zeros_like(parameter.to_local().detach()))
        else:
            parts.append(synchronous(parameter.grad.to_local().detach()))
    ranks_with_gradient = parts[0].new_ones(len(parts))
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            ranks_with_gradient[index] = 0
    total = torch.cat([*(part.flatten() for part in parts), ranks_with_gradient])
    for dim, placement in enumerate(layout):
        if isinstance(placement, Partial):
            total = all_reduce(total, Group.of(mesh.get_group(dim)))
    *sums, ranks_with_gradient = total.split([*(part.numel() for part in parts), len(parts)])
    for index, (parameter, part, whole) in enumerate(zip(parameters, parts, sums, strict=True)):
        # The count is read on ranks without a gradient only.
        if parameter.grad is not None or ranks_with_gradient[index] > 0:
            parameter.grad = gradient_like(parameter, whole.view_as(part), parameter.placements)


# Those that the optimizers' hook asks, in the same order on every rank. A copy of a model comes in with its first forward.
_watched: weakref.WeakKeyDictionary[nn.Module, dict[_Watch, None]] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def compare_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the ranks of an axis compare the gradients of what is whole on each of them: at the first backward, and before steps.

    For a model that was sharded along the axis by whatever means; ``parallelize`` calls this itself. Compared is every parameter
    that the axis does not shard: a plain tensor, or a DTensor that is replicated along it, but for gradients that are
    ``Partial``, and plain tensors that are marked as shards (``tensor_model_parallel``). The ranks send two numbers for each at the
    end of the first backward, and before the steps 1, 2, 4 and so on up to 1024 of each optimizer of torch's: what was zero or
    frozen at first, and what compiled code, zero-bubble schedules and FSDP2 compute, is compared there.

    Args:
        model: the model; all ranks of the axis call this, and run its forward and backward, on the same data.
        mesh: the one-dimensional mesh of the axis.

    Raises:
        GradientError: in the backward, or before the optimizer's step, on every rank: gradients differ, by name.
    """
    sum_before_steps()
    if mesh.size() > 1 and dist.get_backend(mesh.get_group()) != "fake":
        watch = _Watch(mesh)
        model.register_forward_pre_hook(watch)
        _watched.setdefault(model, {})[watch] = None


@cache
def sum_before_steps() -> None:
    """Let every optimizer of this process sum parts, and compare, before its step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    reduce_gradients(parameters)
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if step > LAST_STEP or step & (step - 1):
        return
    own = {id(parameter) for parameter in parameters}
    for model, watches in list(_watched.items()):
        # As they are now: fully_shard has replaced them.
        mine = {name: each for name, each in model.named_parameters() if id(each) in own}
        for watch in watches if mine else ():
            watch.compare(mine)


class _Watch:
    """An axis over which gradients are compared: a hook before the model's forward, copied and pickled with the model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.begun = Group.of(mesh), False
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.ranks = frozenset(dist.get_process_group_ranks(mesh.get_group()))

    def __call__(self, model: nn.Module, _args: Any) -> None:
        """Watch the backward of the first forward that trains: parameters may be frozen until then."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.begun:
            return
        self.begun = True
        _watched.setdefault(model, {})[self] = None
        parameters = {name: each for name, each in model.named_parameters() if self.is_whole(each)}
        layouts = [each.placements for each in parameters.values() if isinstance(each, DTensor)]
        if any(set(layout) != {Replicate()} for layout in layouts):
            return  # under FSDP2, whose gradients are there after the backward

        def with_first_gradient(_gradient: Tensor) -> None:
            handle.remove()
            at_end_of_backward(partial(self.compare, parameters))

        trained = [each for each in parameters.values() if each.requires_grad and not each.is_meta]
        handle = register_multi_grad_hook(trained, with_first_gradient, mode="any")

    def is_whole(self, tensor: Tensor) -> bool:
        """Return whether every rank of the axis has the same of a parameter or a gradient."""
        if not isinstance(tensor, DTensor):
            marks = ("tensor_model_parallel", "model_parallel")
            return not any(getattr(tensor, mark, False) for mark in marks)
        # Of its own mesh, which may cut the ranks otherwise, as those of experts do.
        mesh = tensor.device_mesh
        place: list[Any] = [*(mesh.get_coordinate() or ())]
        for dim, placement in enumerate(tensor.placements):
            if not isinstance(placement, Replicate):
                place[dim] = slice(None)
        return len(self.ranks.intersection(mesh.mesh[tuple(place)].flatten().tolist())) <= 1

    def compare(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise if gradients differ, on all ranks, those too that see other parts of the parameters, as those of FSDP2 do."""
        mine = {}
        across: dict[frozenset[int], dist.ProcessGroup] = {}
        for name, each in parameters.items():
            gradient: Any = each.grad
            if self.is_whole(each):
                some = gradient is not None and self.is_whole(gradient)
                mine[name] = fingerprint(gradient) if some else [0.0, 0.0]
            for group in each.device_mesh.get_all_groups() if isinstance(each, DTensor) else ():
                across.setdefault(frozenset(dist.get_process_group_ranks(group)), group)
        wrong = _different(from_all(group_named(self.group.name), mine))
        for ranks, group in across.items():
            for found in from_all(group, wrong) if ranks != self.ranks else ():
                wrong.update(found)
        if wrong:
            raise GradientError(
                f"{listing(wrong)}: whole on each of the {self.group.size} ranks of {self.axis}, but their gradients differ, by "
                f"up to {max(wrong.values()):.2g} of the size: each has a part, and they would train apart; give a module that "
                f"works on a rank's own features or tokens LocalParameters(), which sums the parts, and a linear whose "
                f"features they use in part ColwiseParallel(), or KeyValueParallel(...) for keys and values"
            )


def _different(found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return how far gradients are apart that are not the same, as a part of their size, of those that all ranks have."""
    apart, sizes = {}, {}
    for name in found[0]:
        if all(name in each for each in found):  # a bias may be on the first one only
            numbers = [*zip(*(each[name] for each in found), strict=True)]
            apart[name] = max(max(each) - min(each) for each in numbers)
            sizes[name] = max(numbers[0])
    largest = max(filter(math.isfinite, sizes.values()), default=0.0)
    return {
        name: far / sizes[name]
        for name, far in apart.items()
        if math.isfinite(far) and far > TOLERANCE * sizes[name] and far > NOTHING * largest
    }


def fingerprint(tensor: Tensor, rates: Sequence[float] = (0.7,)) -> list[float]:
    """Return the size of a tensor, and sums of it with weights, in double precision, a chunk at a time."""
    flat = synchronous(tensor.to_local()) if isinstance(tensor, DTensor) else tensor
    flat = flat.detach().coalesce().values() if flat.is_sparse else flat.detach()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).flatten()
    squares, sums = 0.0, [0.0] * len(rates)
    for chunk in flat.split(1 << 20):
        part = chunk.double()
        place = torch.arange(len(part), dtype=torch.float64, device=part.device)
        squares += float(part @ part)
        for index, rate in enumerate(rates):
            sums[index] += float(part @ (rate * place).cos())
    return [math.sqrt(squares), *sums]
