"""All-reduce partial gradients, and compare gradients of replicated parameters.

A plan does not show whether a forward applies a replicated parameter to a local shard of the
features. The gradients show it: they are then partial, and differ between ranks. One pre-hook of
torch's optimizers reduces and compares gradients, also for compiled models, zero-bubble schedules
and FSDP2.
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
    wait_if_async,
)
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import GradientError, format_items
from namedmesh.fingerprints import fingerprint
from namedmesh.sharding import find_placements, is_tp_shard
from namedmesh.tensor_parallel.collectives import Group, all_reduce
from namedmesh.tensor_parallel.input_checks import InputCheck

# The ranks compare before the steps 1, 2, 4 and so on up to this one of each optimizer.
LAST_STEP = 1024
# Relative tolerance between ranks. Gradients of replicated parameters are usually equal bit by bit,
# but kernels with another order of summation differ by some 1e-3 in half precision. Partial
# gradients differ by much of their norm.
RELATIVE_TOLERANCE = 1e-2
# A norm below this fraction of the largest gradient norm counts as zero: such a gradient may
# consist of the rounding errors of terms that cancel out.
ZERO_GRAD_THRESHOLD = 1e-6


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
    for param in params:
        if param.grad is None:
            local_grads.append(torch.zeros_like(param.to_local().detach()))
        else:
            local_grads.append(wait_if_async(param.grad.to_local().detach()))
    ranks_with_grad = local_grads[0].new_ones(len(local_grads))
    for index, param in enumerate(params):
        if param.grad is None:
            ranks_with_grad[index] = 0
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


# All checks of this process, by number. Every rank creates them in the same order, and therefore
# compares in the same order.
_checks: weakref.WeakValueDictionary[int, _GradientCheck] = weakref.WeakValueDictionary()
_check_ids = count()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


def register_gradient_check(model: nn.Module, mesh: AxisMesh) -> None:
    """Register a check that gradients of replicated parameters match on all ranks.

    For a model that was sharded along the axis by other means; ``parallelize`` calls this itself.
    It covers parameters that are not sharded along the axis: plain tensors, and DTensors that are
    replicated along it. ``Partial`` gradients are skipped, and so are plain tensors that are tagged
    as shards (``tensor_model_parallel``). A copy of the model is compared like a new model.

    The ranks send two numbers for each gradient at the end of the first backward, and before the
    steps 1, 2, 4 and so on up to 1024 of each of torch's optimizers. The later steps cover
    parameters that were zero or frozen at first, and gradients of compiled code, zero-bubble
    schedules and FSDP2. Nothing is compared while a CUDA graph is captured.

    With the first gradients they compare the input of the first layer that ``parallelize`` has
    sharded, such as token ids: ranks of one axis must work on the same samples. The shape of the
    input is compared in the first forward. Layers that all-gather their input (sequence
    parallelism) and compiled layers are skipped.

    Args:
        model: the model. Every rank of the axis must call this, and run the forward and backward of
            the model on the same data.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with one axis.

    Raises:
        GradientError: in the first forward or backward, or before the optimizer's step, on every
            rank of the axis: gradients or inputs differ, by name.
    """
    mesh = one_axis(mesh, "tp", "register_gradient_check")
    install_optimizer_step_hook()
    if mesh.size() > 1 and dist.get_backend(mesh.get_group()) != "fake":
        model.register_forward_pre_hook(_GradientCheck(model, mesh))


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
    # Neither compiled code nor a CUDA graph can contain a read of values by the host.
    if torch.compiler.is_compiling() or is_capturing():
        return
    step = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    is_power_of_two = step & (step - 1) == 0
    if step > LAST_STEP or not is_power_of_two:
        return
    ids = set(map(id, params))
    for check, model in _list_checks():
        # Look the parameters up again: fully_shard may have replaced them since.
        stepped = {name: param for name, param in model.named_parameters() if id(param) in ids}
        if stepped:
            check.compare(stepped)


def list_checked_models() -> list[nn.Module]:
    """Return the models of this process whose gradients are compared."""
    return [model for _, model in _list_checks()]


def _list_checks() -> list[tuple[_GradientCheck, nn.Module]]:
    """Return the checks of this process, and their models, which may be deleted at any time."""
    checks = []
    for check in list(_checks.values()):
        model = check.model()
        if model is not None:
            checks.append((check, model))
    return checks


class _GradientCheck:
    """Compares the gradients of a model across an axis: a forward pre-hook of the model.

    It is copied and pickled with the model. The copy starts over, like the check of a new model.

    Args:
        model: the model.
        mesh: the mesh with one axis.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self.group = Group.of(mesh)
        self.axis = (mesh.mesh_dim_names or ("the mesh",))[0]
        self.ranks = frozenset(dist.get_process_group_ranks(mesh.get_group()))
        self._start(model)

    def _start(self, model: nn.Module) -> None:
        """Register the check for a model that has not been compared yet."""
        self.model = weakref.ref(model)  # The global table must not keep models alive.
        self.has_started = False
        self.inputs = InputCheck(self.group, self.axis, RELATIVE_TOLERANCE)
        # Cached by mesh and placements: thousands of parameters share a few of them.
        self.replicated: dict[Any, bool] = {}
        _checks[next(_check_ids)] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle; the model among them is copied, too."""
        return {"group": self.group, "axis": self.axis, "ranks": self.ranks, "model": self.model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, and register it for the copy of the model."""
        vars(self).update(state)
        self._start(state["model"])

    def __call__(self, model: nn.Module, _args: Any) -> None:
        """Prepare a comparison at the end of the backward, in the first forward that trains.

        The parameters to compare are chosen here: before this forward they may still be frozen.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_capturing():
            return
        self.inputs.prepare_forward(model)
        if self.has_started:
            return
        params = dict(model.named_parameters())
        if not all(param.is_leaf for param in params.values()):
            # torch.func.functional_call with computed weights, which have no gradients to compare.
            # A later forward, with the parameters themselves, is checked.
            return
        self.has_started = True
        replicated = {name: param for name, param in params.items() if self.is_replicated(param)}
        for param in replicated.values():
            if isinstance(param, DTensor) and set(param.placements) != {Replicate()}:
                return  # FSDP2 sets gradients after the backward; the optimizer step compares.
        trained = [param for param in params.values() if param.requires_grad and not param.is_meta]
        self._compare_after_backward(trained, replicated)

    def _compare_after_backward(
        self, trained: Sequence[nn.Parameter], replicated: Mapping[str, nn.Parameter]
    ) -> None:
        """Register hooks that compare at the end of the next backward with a gradient.

        torch.autograd.grad returns gradients without accumulating them, and is not compared.

        Args:
            trained: the parameters of the model that get gradients.
            replicated: the parameters to compare, by name.
        """
        compare = partial(self.compare, replicated)

        def compare_at_end(_parameter: Tensor) -> None:
            """Queue the comparison at the first gradient: a hook of every trained parameter."""
            if not handles or is_capturing():
                return
            for handle in handles:
                handle.remove()
            handles.clear()
            # DDP finishes its gradients in such a callback. One that is queued by a callback runs
            # after all others.
            queue_backward_callback(partial(queue_backward_callback, compare))

        handles = [param.register_post_accumulate_grad_hook(compare_at_end) for param in trained]

    def is_replicated(self, tensor: Tensor) -> bool:
        """Return whether a tensor is replicated along the axis.

        Args:
            tensor: a parameter or a gradient.
        """
        sharding = find_placements(tensor)
        if sharding is None:
            return not is_tp_shard(tensor)
        if sharding not in self.replicated:
            self.replicated[sharding] = self._has_no_other_shards(*sharding)
        return self.replicated[sharding]

    def _has_no_other_shards(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
        """Return whether all ranks of the axis hold the same shard of a tensor.

        Ranks with different shards differ in their coordinates along the sharded dims of the mesh.
        The mesh may be from another view than the axis, such as the view of experts.

        Args:
            mesh: the mesh of the tensor.
            placements: its placements.
        """
        index: list[Any] = [*(mesh.get_coordinate() or ())]
        for dim, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                index[dim] = slice(None)
        ranks_of_shards = mesh.mesh[tuple(index)].flatten().tolist()
        return len(self.ranks.intersection(ranks_of_shards)) <= 1

    def compare(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Compare the gradients of replicated parameters, and the inputs, across the axis.

        Collective: every rank of the axis, and of the meshes of the parameters, must call it. Under
        FSDP2 the ranks of another shard of a parameter raise the error too.

        Args:
            parameters: the parameters to compare, by name. The others are skipped.

        Raises:
            GradientError: gradients or inputs differ.
        """
        fingerprints = {}
        meshes: dict[DeviceMesh, None] = {}
        for name, param in parameters.items():
            if isinstance(param, DTensor):
                meshes[param.device_mesh] = None
            if self.is_replicated(param):
                grad: Any = param.grad
                is_compared = grad is not None and self.is_replicated(grad)
                fingerprints[name] = fingerprint(grad) if is_compared else [0.0, 0.0]
        tp_group = get_group_by_name(self.group.name)
        reports = all_gather_object(tp_group, (fingerprints, self.inputs.noted))
        differences = _find_differences([report for report, _ in reports])
        problems = self.inputs.problems([noted for _, noted in reports])
        # Pass the result on along every other axis of the parameters' meshes.
        other_groups: dict[frozenset[int], dist.ProcessGroup] = {}
        for mesh in meshes:
            for group in mesh.get_all_groups():
                other_groups.setdefault(frozenset(dist.get_process_group_ranks(group)), group)
        other_groups.pop(self.ranks, None)
        for group in other_groups.values():
            for remote_differences, remote_problems in all_gather_object(group, (differences, problems)):
                differences.update(remote_differences)
                problems = problems or remote_problems
        if differences and not problems:  # Different inputs explain different gradients.
            largest = max(differences.values())
            problems.append(
                f"{format_items(differences)}: replicated on the {self.group.size} ranks of {self.axis}, "
                f"but the gradients differ, by up to {largest:.2g} of their norm. Each rank has a "
                f"partial gradient, and the replicas would diverge. Give a module that works on a "
                f"local shard of features or tokens LocalParameters(), which all-reduces its "
                f"gradients, and a linear whose features it uses shard by shard ColwiseParallel(), "
                f"or KeyValueParallel(...) for keys and values"
            )
        if problems:
            raise GradientError(*problems)


def _find_differences(reports: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return the gradients that differ between ranks, among those that all ranks have.

    Args:
        reports: the fingerprints of each rank, by the names of parameters. A bias may exist on one
            rank only.

    Returns:
        By the name of the parameter, the difference of its gradient relative to the norm; infinity
        if it is finite on some ranks only.
    """
    result = {}
    differences = {}
    norms = {}
    for name in reports[0]:
        fingerprints = [report[name] for report in reports if name in report]
        finite = [math.isfinite(norm) for norm, *_ in fingerprints]
        # If a gradient is finite on no rank, the ranks agree, and the loss scaler skips the step.
        if len(fingerprints) < len(reports) or not any(finite):
            continue
        if not all(finite):
            result[name] = math.inf
            continue
        # Column by column: the norms of all ranks, then each weighted sum of all ranks.
        columns = list(zip(*fingerprints, strict=True))
        norms[name] = max(columns[0])
        differences[name] = max(max(column) - min(column) for column in columns)
    zero = ZERO_GRAD_THRESHOLD * max(norms.values(), default=0.0)
    for name, difference in differences.items():
        if difference > RELATIVE_TOLERANCE * norms[name] and difference > zero:
            result[name] = difference / norms[name]
    return result
