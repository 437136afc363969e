"""Compare a model under a tensor-parallel plan with the same model in one process."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from namedmesh._checks.digests import digest
from namedmesh._errors import NamedMeshError, PlanError, format_count, format_items, get_first_line
from namedmesh._sharding import to_full
from namedmesh._torch.groups import all_gather_object
from namedmesh._torch.tensors import tree_leaves, tree_map
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.plan import parallelize
from namedmesh.tensor_parallel.plan_checks import resolve_plan
from namedmesh.tensor_parallel.plan_entries import Plan, PlanEntry

# A report of about 20 lines is read.
_SHOWN_MISMATCHES = 15


@dataclass(frozen=True)
class VerifyReport:
    """The result of :func:`verify`: which tensors were compared, and which of them differ.

    It prints as one line for each of the first mismatches, and a summary.

    Attributes:
        tp_size: the number of ranks.
        compared: the names of all tensors: ``"output 0"``, ``"gradient of input 0"``,
            ``"gradient of layers.0.weight"``.
        mismatches: the name of each tensor that differs, and the differences on all ranks. It is
            the same on every rank.
        gathered: the outputs that the plan leaves sharded, such as logits over the vocabulary. Their
            shards were gathered for the comparison.
        first_wrong: the first layer, in the order of the forward, whose output differs; empty if
            none does.
    """

    tp_size: int
    compared: tuple[str, ...]
    mismatches: dict[str, str]
    gathered: tuple[str, ...] = ()
    first_wrong: str = ""

    @property
    def passed(self) -> bool:
        """Whether no tensor differs."""
        return not self.mismatches

    def __str__(self) -> str:
        return self.format(_SHOWN_MISMATCHES)

    def format(self, limit: int | None = None) -> str:
        """Format the report.

        Args:
            limit: the number of mismatches that are written out; by default all.
        """
        lines = [f"{name}: {text}" for name, text in self.mismatches.items()][:limit]
        hidden = len(self.mismatches) - len(lines)
        if hidden:
            lines.append(f"and {format_count(hidden, 'more tensor')}; report.format() has all")
        if self.first_wrong:
            lines.append(f"the first layer with a wrong output is {self.first_wrong}")
        elif self.mismatches:
            lines.append("no layer has a wrong output where layers can be compared")
        if self.gathered:
            lines.append(f"gathered from shards before the comparison: {', '.join(self.gathered)}")
        count = format_count(len(self.compared), "tensor")
        mismatches = len(self.mismatches)
        lines.append(f"{mismatches} of {count} on {self.tp_size} ranks differ from one process")
        return "\n".join(lines)


@torch.inference_mode(False)
@torch.enable_grad()
def verify(
    model: nn.Module, mesh: AxisMesh, plan: Plan, *inputs: Any, tolerance: float = 1e-5, **named: Any
) -> VerifyReport:
    """Run a model unsharded and sharded, forward and backward, and compare the results.

    It finds, for one input, every difference between the sharded and the unsharded model. The
    comparison of gradients between ranks cannot: ranks may agree on wrong gradients. Every rank
    holds two full copies of the model in double precision, so use a small configuration of it.

    An output that is a local shard, as logits that are sharded over the vocabulary, is compared
    with the others gathered, and its gradient starts at the shard on each rank, as with a loss that
    takes shards.

    The copies run in evaluation mode with the same random numbers, and with the parameters and
    inputs of the first rank. Parameters that are all zero get random values, because zeros would
    hide differences in the layers behind them.

    Collective: every rank of ``mesh`` must call it.

    Args:
        model: the model, not parallelized. It is not changed.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with one axis.
        plan: the plan that ``parallelize`` would get.
        *inputs: the positional arguments of the model. The gradients of tensors, also of those in
            containers, are compared.
        tolerance: the allowed absolute difference, relative to the largest value of a tensor.
        **named: the keyword arguments of the model.

    Returns:
        The report, the same on every rank.

    Raises:
        PlanError: the plan does not fit the model; the forward or backward of the sharded copy
            raises; or the model is on the meta device, is sharded already, or returns no tensors.
    """
    mesh = get_axis_mesh(mesh, "tp", "verify")
    # Before the copies are made: a plan that does not fit needs no memory.
    entries, _ = resolve_plan(model, mesh.size(), plan)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            raise PlanError(f"{name} is on the meta device or sharded; verify an unsharded model with values")
    reference = copy.deepcopy(model).eval().double()
    arguments = tree_map(_copy_argument, (inputs, named))
    _broadcast_values(reference, arguments, mesh)
    # Without the comparison of gradients between ranks, which would raise at the first difference.
    sharded = parallelize(copy.deepcopy(reference), mesh, plan, check_gradients=False)
    expected = _run(reference, arguments, mesh, _Results({}, {}, {}))
    try:
        actual = _run(sharded, arguments, mesh, expected)
    except NamedMeshError:
        raise
    except Exception as error:
        raise PlanError(_describe_failure(sharded, entries, error)) from error
    # A gradient may consist of the rounding errors of terms that cancel out. They are small next to
    # the largest gradient.
    gradients = [tensor for name, tensor in expected.tensors.items() if "gradient" in name]
    rounding = 1e-13 * max(map(_max_abs, gradients), default=0.0)
    differences = {}
    for name, tensor in (expected.tensors | actual.tensors).items():
        # A tensor that only one of the models returns is compared with zeros.
        zeros = torch.zeros_like(tensor)
        pair = (actual.tensors.get(name, zeros), expected.tensors.get(name, zeros))
        differences[name] = _describe_difference(*pair, tolerance, rounding)
    mismatches = {}
    reports = all_gather_object(mesh.get_group(), differences)
    for name in differences:
        texts = [report[name] for report in reports if report.get(name)]
        if texts:
            mismatches[name] = "; ".join(texts)
    gathered = tuple(name for name, dim in actual.dims.items() if dim is not None)
    first_wrong = _find_first_wrong(sharded, expected, actual, mesh, tolerance) if mismatches else ""
    return VerifyReport(mesh.size(), tuple(differences), mismatches, gathered, first_wrong)


class _Results(NamedTuple):
    """The results of a run of a model.

    Attributes:
        tensors: the outputs, and the gradients of inputs and parameters, as full tensors by name.
        dims: the dim over which each output was sharded, before it was gathered.
        layers: the first tensor that each module has returned, innermost first.
    """

    tensors: dict[str, Tensor]
    dims: dict[str, int | None]
    layers: dict[str, Tensor]


def _broadcast_values(model: nn.Module, arguments: Any, mesh: DeviceMesh) -> None:
    """Broadcast the parameters, buffers and inputs of the first rank, in place."""
    for tensor in (*model.parameters(), *model.buffers(), *_list_tensors(arguments)):
        # Integer parameters, such as quantized ones, cannot be drawn from a normal distribution.
        is_float_param = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        if is_float_param and not tensor.count_nonzero():
            generator = torch.Generator(tensor.device).manual_seed(0)
            nn.init.normal_(tensor, std=0.02, generator=generator)
        dist.broadcast(tensor.detach(), group=mesh.get_group(), group_src=0)


def _list_tensors(value: object) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _copy_argument(value: Any) -> Any:
    """Copy a leaf of the inputs; floating-point tensors in double precision, with a gradient."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    value = value.detach().clone()
    return value.double().requires_grad_() if value.is_floating_point() else value


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _run(model: nn.Module, arguments: Any, mesh: DeviceMesh, expected: _Results) -> _Results:
    """Run the forward and the backward of a model.

    The random numbers are the same in each run; afterwards the generators are restored. The
    backward starts at a sum of all outputs with fixed random weights: the gradient of a plain sum
    would be zero behind a softmax.

    Args:
        model: the model.
        arguments: its arguments.
        mesh: the mesh of the shards, if the model is sharded: shards of outputs are gathered.
        expected: the results of the model that is not sharded.
    """
    leaves = tree_map(_copy_argument, arguments)
    results = _Results({}, {}, {})
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(_record_output, results.layers, name)))
    # The model may write into its inputs in place. autograd forbids that for leaves.
    args, kwargs = tree_map(_clone_tensor, leaves)
    with torch.random.fork_rng(range(torch.accelerator.device_count())):
        torch.manual_seed(0)
        output = model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    outputs = [to_full(tensor) for tensor in _list_tensors(output)]
    if not outputs:
        kind = type(output).__name__
        raise PlanError(f"the output, of type {kind}, has no tensors; return them in plain containers")
    # On the CPU, so that the weights do not depend on the device.
    generator = torch.Generator("cpu").manual_seed(0)
    differentiable = []
    weights = []
    for index, output in enumerate(outputs):
        name = f"output {index}"
        dim = results.dims[name] = _find_sharded_dim(output, expected.tensors.get(name, output), mesh.size())
        full = results.tensors[name] = _gather_shards(output.detach(), dim, mesh)
        if output.requires_grad:
            weight = torch.randn(full.shape, generator=generator, dtype=output.dtype, device="cpu")
            if dim is not None:
                weight = weight.chunk(mesh.size(), dim)[mesh.get_local_rank()]
            differentiable.append(output)
            weights.append(weight.to(output))
    if differentiable:
        torch.autograd.backward(differentiable, weights)
    inputs = {f"input {index}": tensor for index, tensor in enumerate(_list_tensors(leaves))}
    for name, tensor in (inputs | dict(model.named_parameters())).items():
        if tensor.requires_grad:
            # A parameter that the forward does not use on this rank has no gradient.
            grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            results.tensors[f"gradient of {name}"] = to_full(grad).to_dense()
    return results


def _record_output(layers: dict[str, Tensor], name: str, _module: nn.Module, _args: Any, output: Any) -> None:
    """Record the first tensor that a module returns in its first forward: a forward hook."""
    tensors = _list_tensors(output)
    if tensors and name not in layers:
        layers[name] = to_full(tensors[0]).detach().clone()


def _find_sharded_dim(local: Tensor, full: Tensor, num_ranks: int) -> int | None:
    """Return the dim along which a tensor is a shard of another; None if it is not a shard."""
    if local.ndim != full.ndim:
        return None
    dims = [dim for dim in range(full.ndim) if local.shape[dim] != full.shape[dim]]
    if len(dims) == 1 and local.shape[dims[0]] * num_ranks == full.shape[dims[0]]:
        return dims[0]
    return None


def _gather_shards(tensor: Tensor, dim: int | None, mesh: DeviceMesh) -> Tensor:
    """Return the shards of all ranks joined along a dim; the tensor itself without a dim."""
    if dim is None:
        return tensor
    tensor = tensor.contiguous()
    shards = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(shards, tensor, mesh.get_group())
    return torch.cat(shards, dim)


def _find_first_wrong(
    sharded: nn.Module, expected: _Results, actual: _Results, mesh: DeviceMesh, tolerance: float
) -> str:
    """Return the name and type of the first layer whose output differs; empty if none does.

    Outputs are compared if they are replicated, or shards along one dim. Those that ranks compute
    for other ranks, such as partial sums, are not.
    """
    modules = dict(sharded.named_modules())
    for name, full in expected.layers.items():
        local = actual.layers.get(name, torch.empty(0, device="cpu"))
        value = _gather_shards(local, _find_sharded_dim(local, full, mesh.size()), mesh)
        is_wrong = value.shape == full.shape and _describe_difference(value, full, tolerance, 0.0) != ""
        reports = all_gather_object(mesh.get_group(), (is_wrong, digest(value)))
        # The heads of a KeyValueParallel are not in the order of the model.
        has_own_order = getattr(modules.get(name), "rows", None) is not None
        if any(wrong for wrong, _ in reports) and len(set(reports)) == 1 and not has_own_order:
            return f"{name or 'the model'} ({type(modules[name]).__name__})"
    return ""


def _describe_failure(sharded: nn.Module, entries: Sequence[PlanEntry], error: Exception) -> str:
    """Describe an error of the sharded copy: the innermost module, and the plan."""
    names = {}
    for name, module in sharded.named_modules():
        names[id(module)] = name
    place = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if names.get(id(owner)):
            place = f"{names[id(owner)]} ({type(owner).__name__})"
    styles = dict.fromkeys(f"{entry.key or 'the model'}: {entry.style.name}" for entry in entries)
    return (
        f"the sharded copy raises in {place}: {type(error).__name__}: {get_first_line(error)}. A "
        "layer that works on a shard may be missing in the plan, which is "
        f"{format_items(styles, _SHOWN_MISMATCHES)}"
    )


def _max_abs(tensor: Tensor) -> float:
    """Return the largest finite absolute value in a tensor; 0 if there is none."""
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _describe_difference(actual: Tensor, expected: Tensor, tolerance: float, rounding: float) -> str:
    """Return torch's description of the difference of two tensors; empty if they are close."""
    if actual.numel() == expected.numel():
        # A fused expert parameter has one dim more when it is sharded.
        actual = actual.reshape(expected.shape)
    allowed = max(tolerance * _max_abs(expected), rounding)
    try:
        torch.testing.assert_close(actual, expected, rtol=0, atol=allowed, equal_nan=True)
    except AssertionError as error:
        return f"on rank {dist.get_rank()}, {' '.join(str(error).split())}"
    return ""
