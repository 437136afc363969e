"""Gradients that are parts are summed over their ranks, and those of what every rank has whole are compared.

Where the ranks have parts of a model's features, each makes a part of the gradient of what it uses on them. Of a parameter
that is whole on every rank that part would be taken for the gradient, and the ranks would train apart without a word.
What a forward does with a parameter cannot be known from the outside; that the gradients differ can.

One hook of torch's optimizers does both, so that it holds for compiled models, zero-bubble schedules and FSDP2 alike.
"""

from __future__ import annotations

import weakref
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import at_end_of_backward, gradient_like, synchronous
from namedmesh.errors import GradientError, listing
from namedmesh.tensor_parallel.collectives import Group, all_gather, all_reduce

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

LAST_STEP = 1024
"""The ranks compare before the steps 1, 2, 4 and so on up to this one of each optimizer."""

TOLERANCE = 1e-2
"""How far two gradients may be apart, as a part of their size.

Of what every rank computes alike they are the same to the bit, but where a kernel or a sum takes another order: a type of 16
bits then rounds off some thousandths. The parts of ranks that work on other features differ by much of their size.
"""

NOTHING = 1e-6
"""What part of the largest gradient is taken for zero: the rounding of terms that cancel out may be all of a gradient."""

_AXES, _BEGUN = "_namedmesh_axes", "_namedmesh_compared"
"""Attributes of a model: the axes over which it is compared, and whether the first backward is behind it."""


def reduce_gradients(parameters: nn.Module | Iterable[Tensor]) -> None:
    """Sum the gradients that are parts over their ranks: one collective for all that have the same ranks and type.

    Every step of a ``torch.optim.Optimizer`` does this first, and so does :func:`namedmesh.training.clip_grad_norm_`;
    torch's optimizers and clipping are right without it, and sum each gradient for itself, some of them several times.
    Call it yourself, after the last micro-batch, before code that takes ``grad.to_local()`` for the gradient, such as an
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
        parts = [dim for dim, each in enumerate(gradient.placements) if isinstance(each, Partial)]
        if not parts:
            continue
        summed = list(gradient.placements)
        for dim in parts:
            summed[dim] = Replicate()
        if tuple(summed) == parameter.placements:
            for dim in parts:
                together.setdefault((gradient.device_mesh, dim, gradient.dtype), []).append(parameter)
        else:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    for (mesh, dim, _), some in together.items():
        locals_ = [synchronous(parameter.grad.to_local().detach()) for parameter in some]
        total = all_reduce(torch.cat([part.flatten() for part in locals_]), Group.of(mesh.get_group(dim)))
        sums = total.split([part.numel() for part in locals_])
        for parameter, part, whole in zip(some, locals_, sums, strict=True):
            layouts = list(parameter.grad.placements)
            layouts[dim] = Replicate()
            parameter.grad = gradient_like(parameter, whole.view_as(part), tuple(layouts))


class Axis(NamedTuple):
    """The ranks over which a model is sharded, their global ranks, and the name of the axis in errors."""

    group: Group
    ranks: tuple[int, ...]
    name: str


# Those that the optimizers' hook asks, in the same order on every rank. A copy of a model comes in with its first forward.
_models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def compare_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let the ranks of an axis compare the gradients of what is whole on each of them: at the first backward, and before steps.

    For a model that was sharded along the axis by whatever means: by ``parallelize``, which calls this itself, by torch's
    ``parallelize_module``, by hand. Compared is every parameter that the axis does not shard: a plain tensor, or a
    DTensor that is replicated along it. (A gradient that is ``Partial`` is summed by whoever uses it, and a plain tensor
    that is marked as a shard, with ``tensor_model_parallel``, is left out.) The ranks send two numbers for each, at the end
    of the first backward, and before the steps 1, 2, 4 and so on up to 1024 of each optimizer of torch's: what was zero or
    frozen at first, and what compiled code, zero-bubble schedules and FSDP2 compute, is compared there.

    Args:
        model: the model; all ranks of the axis call this, and run its forward and backward, on the same data.
        mesh: the one-dimensional mesh of the axis.

    Raises:
        GradientError: in the backward, or before the optimizer's step, on every rank: the gradients of some parameters
            differ, by name.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh.tensor_parallel import compare_gradients
        >>> mesh = namedmesh.init_mesh(tp=-1, device="cpu")
        >>> model = torch.nn.Linear(4, 4)
        >>> compare_gradients(model, mesh["tp"])
        >>> model(torch.ones(2, 4)).sum().backward()    # every rank has the same gradients
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    sum_before_steps()
    if mesh.size() == 1 or dist.get_backend(mesh.get_group()) == "fake":
        return
    ranks = tuple(dist.get_process_group_ranks(mesh.get_group()))
    axis = Axis(Group.of(mesh), ranks, (mesh.mesh_dim_names or ("the mesh",))[0])
    if _AXES not in vars(model):
        model.register_forward_pre_hook(_before_forward)
    setattr(model, _AXES, [*vars(model).get(_AXES, ()), axis])
    setattr(model, _BEGUN, False)
    _models[model] = None


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
    for model in list(_models):
        # As they are now: fully_shard has replaced them.
        mine = {name: each for name, each in model.named_parameters() if id(each) in own}
        for axis in vars(model)[_AXES] if mine else ():
            whole = {name: each for name, each in mine.items() if _is_whole(each, axis)}
            _compare(axis, whole, _across(mine.values(), axis))


def _before_forward(model: nn.Module, _args: Any) -> None:
    """Watch the backward of the first forward that trains: parameters may be frozen until then."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or vars(model)[_BEGUN]:
        return
    setattr(model, _BEGUN, True)
    _models[model] = None
    for axis in vars(model)[_AXES]:
        whole = {name: each for name, each in model.named_parameters() if _is_whole(each, axis)}
        trained = {name: each for name, each in whole.items() if each.requires_grad and not each.is_meta}
        if not any(_is_sharded(each) for each in whole.values()):
            _FirstBackward(axis, trained)


def _is_sharded(tensor: Tensor) -> bool:
    """Return whether ranks have parts of a parameter, as under FSDP2, whose gradients are there after the backward."""
    return isinstance(tensor, DTensor) and not all(isinstance(each, Replicate) for each in tensor.placements)


class _FirstBackward:
    """Hooks of parameters, until one of them has a gradient: all have at the end of that backward."""

    def __init__(self, axis: Axis, parameters: dict[str, nn.Parameter]) -> None:
        self.axis, self.parameters = axis, parameters
        self.handles = [each.register_post_accumulate_grad_hook(self) for each in parameters.values()]

    def __call__(self, _parameter: Tensor) -> None:
        for handle in self.handles:
            handle.remove()
        if self.handles:
            self.handles = []
            at_end_of_backward(self.compare)

    def compare(self) -> None:
        """Compare the gradients that the backward has left."""
        _compare(self.axis, self.parameters, [])


def _is_whole(tensor: Tensor, axis: Axis) -> bool:
    """Return whether every rank of an axis has the same of a parameter or a gradient."""
    if not isinstance(tensor, DTensor):
        marks = (getattr(tensor, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
        return not any(marks)
    # Of its own mesh, which may cut the ranks otherwise, as those of experts do.
    dims = [dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    return len(_ranks_along(tensor.device_mesh, dims).intersection(axis.ranks)) <= 1


def _ranks_along(mesh: DeviceMesh, dims: Sequence[int]) -> set[int]:
    """Return the ranks along some dims of a mesh, among them this one."""
    place: list[Any] = [*(mesh.get_coordinate() or ())]
    for dim in dims:
        place[dim] = slice(None)
    return {*mesh.mesh[tuple(place)].flatten().tolist()}


def _across(parameters: Iterable[Tensor], axis: Axis) -> list[Group]:
    """Return the groups over which parameters are sharded besides, as by FSDP2, whose ranks see other parts of them."""
    found: dict[frozenset[int], Group] = {}
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    for mesh in dict.fromkeys(meshes):
        for dim in range(mesh.ndim):
            ranks = frozenset(_ranks_along(mesh, [dim]))
            if len(ranks) > 1 and ranks != frozenset(axis.ranks):
                found.setdefault(ranks, Group.of(mesh.get_group(dim)))
    return list(found.values())


def _compare(axis: Axis, parameters: dict[str, nn.Parameter], across: Sequence[Group]) -> None:
    """Raise on every rank if gradients differ, in their size or in a sum with weights.

    Raises:
        GradientError: with the name of each parameter.
    """
    gradients = {name: each.grad for name, each in parameters.items()}
    mixed = [
        name
        for name, each in parameters.items()
        if isinstance(each.grad, DTensor) > isinstance(each, DTensor)
    ]
    if mixed:
        raise GradientError(
            f"{listing(mixed)}: a plain tensor, whose gradient is a DTensor, because it was used together with one, such as the "
            f"input that SharedInput hands out; leave SharedInput out of the plan there, or call to_local() on that input"
        )
    device = next((each.device for each in gradients.values() if each is not None), torch.device("cpu"))
    if device.type == "cpu" and torch.accelerator.is_available() and "nccl" in dist.get_backend():
        device = torch.device("cuda", torch.cuda.current_device())  # of a rank without any
    names = _on_every_rank(axis.group, [*gradients], device)
    if not names:
        return
    found = [
        None if each is None or not _is_whole(each, axis) else each for each in map(gradients.get, names)
    ]
    mine = torch.stack([_fingerprint(each).to(device) for each in found])
    every = all_gather(mine.unsqueeze(0), axis.group, 0)
    sizes = every[..., 0].amax(0)
    apart = (every.amax(0) - every.amin(0)).amax(-1)
    largest = sizes.nan_to_num(0.0, 0.0, 0.0).max()
    wrong = (apart > TOLERANCE * sizes) & (apart > NOTHING * largest) & apart.isfinite()
    part = torch.where(wrong, apart / sizes, 0.0)
    for group in across:
        part = all_reduce(part, group, "max")
    if not part.any():
        return
    worst = [name for name, far in zip(names, part.tolist(), strict=True) if far]
    raise GradientError(
        f"{listing(worst)}: whole on each of the {axis.group.size} ranks of {axis.name}, but their gradients differ, by up to "
        f"{float(part.max()):.2g} of the size: each has a part, and they would train apart; where the ranks use a module on "
        f"their own features or tokens only, give it LocalParameters(), which sums the parts, and a linear whose features "
        f"they use in part a style of its own: ColwiseParallel(), KeyValueParallel(...) for keys and values; what all use "
        f"alike can differ because of what follows it only"
    )


def _on_every_rank(group: Group, names: list[str], device: torch.device) -> list[str]:
    """Return the names that all ranks have: a bias may be on the first one only, and there have to be as many rows."""
    mark = zlib.crc32(repr(names).encode())
    if all_reduce(torch.tensor([mark, -mark], device=device), group, "max").sum() == 0:
        return names
    found = {zlib.crc32(name.encode()): name for name in names}
    marks = torch.tensor(sorted(found), device=device)
    most = int(all_reduce(torch.tensor([len(marks)], device=device), group, "max"))
    padded = torch.nn.functional.pad(marks, (0, most - len(marks)), value=-1)
    counts = all_gather(padded, group, 0).unique(return_counts=True)
    return [
        found[mark]
        for mark, count in zip(*map(Tensor.tolist, counts), strict=True)
        if mark >= 0 and count == group.size
    ]


_CHUNK = 1 << 20


def _fingerprint(gradient: Tensor | None) -> Tensor:
    """Return the size of a gradient, and its sum with weights, in double precision; zeros where there is none."""
    sums = torch.zeros(2, dtype=torch.float64)
    if gradient is None:
        return sums
    gradient = gradient.detach()
    flat = synchronous(gradient.to_local()) if isinstance(gradient, DTensor) else gradient
    flat = flat.coalesce().values() if flat.is_sparse else flat
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).flatten()
    sums = sums.to(flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].double()
        weights = (
            torch.arange(start, start + part.numel(), dtype=torch.float64, device=flat.device)
            .mul_(0.7)
            .cos_()
        )
        sums += torch.stack([part @ part, part @ weights])
    return torch.stack([sums[0].sqrt(), sums[1]])
