"""Partial gradients are all-reduced; gradients of replicated parameters are compared between ranks.

Whether a forward uses a replicated parameter on a rank's own features cannot be known from outside.
That the gradients then differ can. One hook of torch's optimizers does both, also for compiled
models, zero-bubble schedules and FSDP2.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook

from namedmesh._torch import (
    all_gather_object,
    get_group_by_name,
    is_capturing,
    make_gradient,
    queue_backward_callback,
    sharding_under_ddp,
    wait_if_async,
)
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import GradientError, format_items
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
            parts.append(wait_if_async(parameter.grad.to_local().detach()))
    ranks_with_gradient = parts[0].new_ones(len(parts))
    for index, parameter in enumerate(parameters):
        if parameter.grad is None:
            ranks_with_gradient[index] = 0
    total = torch.cat([*(part.flatten() for part in parts), ranks_with_gradient])
    # A sum in half precision is rounded after every rank: over eight ranks it may be off by a percent.
    total = total.to(torch.promote_types(total.dtype, torch.float32))
    for dim, placement in enumerate(layout):
        if isinstance(placement, Partial):
            total = all_reduce(total, Group.of(mesh.get_group(dim)))
    total = total.to(parts[0].dtype)
    *sums, ranks_with_gradient = total.split([*(part.numel() for part in parts), len(parts)])
    for index, (parameter, part, whole) in enumerate(zip(parameters, parts, sums, strict=True)):
        # The count is read on ranks without a gradient only.
        if parameter.grad is not None or ranks_with_gradient[index] > 0:
            parameter.grad = make_gradient(parameter, whole.view_as(part), parameter.placements)


# The watches of all models of this process, by number: every rank makes them in the same order.
_watches: weakref.WeakValueDictionary[int, _Watch] = weakref.WeakValueDictionary()
_numbers = count()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def compare_gradients(model: nn.Module, mesh: AxisMesh) -> None:
    """Let the ranks of an axis compare gradients of replicated parameters, and their inputs.

    For a model that was sharded along the axis by other means; ``parallelize`` calls this itself.
    Every parameter is compared that the axis does not shard: a plain tensor, or a DTensor that is
    replicated along it. Gradients that are ``Partial`` are not compared, nor plain tensors that are
    tagged as shards (``tensor_model_parallel``). A copy of the model is compared like a new one.

    The ranks send two numbers for each gradient at the end of the first backward, and before the
    steps 1, 2, 4 and so on up to 1024 of each of torch's optimizers. The steps find what was zero
    or frozen at first, and what compiled code, zero-bubble schedules and FSDP2 compute. Nothing is
    compared while a CUDA graph is captured.

    With the first gradients they compare the input of the first layer that ``parallelize`` has
    sharded, such as the ids of tokens: ranks of one axis have to work on the same samples. The
    shape of the input is compared in the first forward. Layers that gather their input (sequence
    parallelism) and compiled layers are skipped.

    Args:
        model: the model; all ranks of the axis call this, and run its forward and backward, on the
            same data.
        mesh: the NamedMesh, of which ``tp`` is taken, or the one axis.

    Raises:
        GradientError: in the first forward or backward, or before the optimizer's step, on every
            rank of the axis: gradients or inputs differ, by name.
    """
    mesh = one_axis(mesh, "tp", "compare_gradients")
    sum_before_steps()
    if mesh.size() > 1 and dist.get_backend(mesh.get_group()) != "fake":
        model.register_forward_pre_hook(_Watch(model, mesh))


@cache
def sum_before_steps() -> None:
    """Let every optimizer of this process sum parts, and compare, before its step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    reduce_gradients(parameters)
    # Neither compiled code nor a CUDA graph can contain a read of values by the host.
    if torch.compiler.is_compiling() or is_capturing():
        return
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if step > LAST_STEP or step & (step - 1):
        return
    in_optimizer = {id(parameter) for parameter in parameters}
    for watch in list(_watches.values()):
        model = watch.model()
        # The parameters as they are now: fully_shard has replaced those of before.
        named = {} if model is None else dict(model.named_parameters())
        stepped = {name: param for name, param in named.items() if id(param) in in_optimizer}
        if stepped:
            watch.compare(stepped)


def watched_models() -> list[nn.Module]:
    """Return the models of this process whose gradients are compared."""
    models = [watch.model() for watch in list(_watches.values())]
    return [model for model in models if model is not None]


class _Watch:
    """An axis over which the gradients of a model are compared: a forward pre-hook of the model.

    It is copied and pickled with the model. The copy of a model starts anew, like a new model.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.group = Group.of(mesh)
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.ranks = frozenset(dist.get_process_group_ranks(mesh.get_group()))
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)  # a model is freed as soon as nobody else holds it
        self.begun = False
        self.inputs = _InputCheck(self.group, self.axis)
        # By mesh and placements: thousands of parameters share a few of them.
        self.replicated: dict[Any, bool] = {}
        _watches[next(_numbers)] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps; its model is the copied one."""
        return {"group": self.group, "axis": self.axis, "ranks": self.ranks, "model": self.model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start(state["model"])

    def __call__(self, model: nn.Module, _args: Any) -> None:
        """Watch the backward of the first forward that trains: parameters may be frozen until then."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_capturing():
            return
        self.inputs.expect(model)
        if self.begun:
            return
        parameters = dict(model.named_parameters())
        if not all(param.is_leaf for param in parameters.values()):
            # torch.func.functional_call with computed weights, which have no gradients to compare.
            # A later forward, with the parameters themselves, is watched.
            return
        self.begun = True
        replicated = {name: param for name, param in parameters.items() if self.is_whole(param)}
        for param in replicated.values():
            if isinstance(param, DTensor) and set(param.placements) != {Replicate()}:
                return  # FSDP2 sets its gradients after the backward

        def compare_at_end(_parameter: Tensor) -> None:
            if not handles or is_capturing():
                return
            for handle in handles:
                handle.remove()
            handles.clear()
            # A callback in a callback runs last: after that of DDP, which finishes its gradients.
            queue_backward_callback(partial(queue_backward_callback, partial(self.compare, replicated)))

        # A gradient that is only returned, by torch.autograd.grad, is not accumulated, and does not count.
        trained = [param for param in parameters.values() if param.requires_grad and not param.is_meta]
        handles = [param.register_post_accumulate_grad_hook(compare_at_end) for param in trained]

    def is_whole(self, tensor: Tensor) -> bool:
        """Return whether a parameter or a gradient is the same on every rank of the axis."""
        if isinstance(tensor, DTensor):
            sharding: Any = tensor.device_mesh, tensor.placements
        else:
            sharding = sharding_under_ddp(tensor)
        if sharding is None:
            marks = ("tensor_model_parallel", "model_parallel")
            return not any(getattr(tensor, mark, False) for mark in marks)
        if sharding not in self.replicated:
            self.replicated[sharding] = self._is_replicated(*sharding)
        return self.replicated[sharding]

    def _is_replicated(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
        # The tensor's own mesh may split the ranks in another way, as the mesh of experts does.
        peers: list[Any] = [*(mesh.get_coordinate() or ())]
        for dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                peers[dim] = slice(None)
        return len(self.ranks.intersection(mesh.mesh[tuple(peers)].flatten().tolist())) <= 1

    def compare(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise an error if gradients differ, on every rank.

        Under FSDP2 other ranks have other shards of the same parameters: they raise it, too.
        """
        fingerprints = {}
        meshes: dict[DeviceMesh, None] = {}
        for name, param in parameters.items():
            if isinstance(param, DTensor):
                meshes[param.device_mesh] = None
            if self.is_whole(param):
                grad: Any = param.grad
                counts = grad is not None and self.is_whole(grad)
                fingerprints[name] = fingerprint(grad) if counts else [0.0, 0.0]
        reports = all_gather_object(get_group_by_name(self.group.name), (fingerprints, self.inputs.noted))
        wrong = _different([found for found, _ in reports])
        problems = self.inputs.problems([noted for _, noted in reports])
        across: dict[frozenset[int], dist.ProcessGroup] = {}
        for mesh in meshes:
            for group in mesh.get_all_groups():
                across.setdefault(frozenset(dist.get_process_group_ranks(group)), group)
        across.pop(self.ranks, None)
        for group in across.values():
            for found, noted in all_gather_object(group, (wrong, problems)):
                wrong.update(found)
                problems = problems or noted
        if wrong and not problems:  # other inputs make other gradients
            problems.append(
                f"{format_items(wrong)}: whole on each of the {self.group.size} ranks of {self.axis}, but their gradients differ, by "
                f"up to {max(wrong.values()):.2g} of the size: each has a part, and they would train apart; give a module that "
                f"works on a rank's own features or tokens LocalParameters(), which sums the parts, and a linear whose "
                f"features they use in part ColwiseParallel(), or KeyValueParallel(...) for keys and values"
            )
        if problems:
            raise GradientError(*problems)


class _InputCheck:
    """Compares the input of the first layer in a forward that takes its input replicated.

    Ranks with different samples would train on a mixture of them silently: a sharded embedding
    all-reduces the vectors of different ids, and then all gradients agree. Shapes are compared in
    the first forward, because collectives with different shapes end the process or hang. Values are
    noted in the first two forwards, and compared with the first gradients: the first forward of a
    pipeline stage may be the one in which torch infers shapes, on uninitialized memory.
    """

    def __init__(self, group: Group, axis: str) -> None:
        self.group, self.axis = group, axis
        self.forwards = 0
        self.expected = False
        self.noted: tuple[str, float, list[float]] | None = None
        self.hooks: list[Any] = []

    def expect(self, model: nn.Module) -> None:
        """Prepare for a forward of the model that begins: the first two note an input."""
        self.forwards += 1
        self.expected = self.forwards <= 2  # noqa: PLR2004  the first two
        if self.forwards == 1:
            for name, module in model.named_modules():
                wiring = getattr(module, "wiring", None)
                if wiring is not None and wiring.input_dim is None and wiring.group == self.group:
                    note = partial(self.note, name)
                    self.hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        if not self.expected:
            while self.hooks:
                self.hooks.pop().remove()

    def note(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the input of a layer: a forward pre-hook of every layer that may be the first."""
        if torch.compiler.is_compiling() or not self.expected:
            return
        self.expected = False
        x = args[0] if args else next(iter(kwargs.values()))
        if isinstance(x, DTensor):
            if set(x.placements) != {Replicate()}:
                return
            x = x.to_local()
        x = wait_if_async(x)
        if type(x) is not Tensor or x.is_meta:  # such as a fake tensor
            return
        if self.forwards == 1:
            shapes = dict.fromkeys(all_gather_object(get_group_by_name(self.group.name), tuple(x.shape)))
            if len(shapes) > 1:
                raise GradientError(self._problem(name, f" (shapes {format_items(shapes)})"))
        # Rounding may differ in what layers before it computed, but not in the ids of tokens.
        tolerance = TOLERANCE if x.is_floating_point() else 0.0
        self.noted = name, tolerance, fingerprint(x, (1.0, 0.7, 0.3))

    def problems(self, noted: Sequence[tuple[str, float, list[float]] | None]) -> list[str]:
        """Return a sentence if what the ranks noted differs."""
        known = [each for each in noted if each is not None]
        for numbers in zip(*(numbers for _, _, numbers in known), strict=True):
            name, tolerance, (norm, *_) = known[0]
            if max(numbers) - min(numbers) > tolerance * norm:
                return [self._problem(name, "")]
        return []

    def _problem(self, name: str, detail: str) -> str:
        return (
            f"{name or 'the model'}: the {self.group.size} ranks of {self.axis} have different "
            f"inputs{detail}, but must work on the same samples; give their samplers the rank on the "
            f"data axes (training.sampler_kwargs(mesh)), and the same seed to dropout before this layer"
        )


def _different(found: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the gradients that differ between ranks, of those that all ranks have.

    Args:
        found: the fingerprints of each rank, by the names of parameters; a bias may exist on one rank only.

    Returns:
        How far each is apart, relative to its norm: infinitely if it is finite on some of the ranks only.
    """
    wrong, apart, norms = {}, {}, {}
    for name in found[0]:
        by_rank = [fingerprints[name] for fingerprints in found if name in fingerprints]
        finite = [math.isfinite(numbers[0]) for numbers in by_rank]
        if len(by_rank) < len(found) or not any(finite):
            continue
        if not all(finite):
            wrong[name] = math.inf
            continue
        apart[name] = max(max(numbers) - min(numbers) for numbers in zip(*by_rank, strict=True))
        norms[name] = max(numbers[0] for numbers in by_rank)
    largest = max(norms.values(), default=0.0)
    for name, far in apart.items():
        if far > TOLERANCE * norms[name] and far > NOTHING * largest:
            wrong[name] = far / norms[name]
    return wrong


def fingerprint(tensor: Tensor, rates: Sequence[float] = (0.7,)) -> list[float]:
    """Return the size of a tensor, and sums of it with weights, in double precision, a chunk at a time."""
    flat = wait_if_async(tensor.to_local()) if isinstance(tensor, DTensor) else tensor
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
