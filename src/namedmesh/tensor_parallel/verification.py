"""Compare a model under a tensor-parallel plan with the same model in one process."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._checks import digest
from namedmesh._torch import all_gather_object, tree_leaves, tree_map
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import NamedMeshError, PlanError, format_count, format_items, get_first_line
from namedmesh.sharding import to_full
from namedmesh.tensor_parallel.plan import parallelize
from namedmesh.tensor_parallel.plan_checks import resolve_plan
from namedmesh.tensor_parallel.plan_entries import Plan

# A report of about 20 lines is read.
_SHOWN_MISMATCHES = 15


@dataclass(frozen=True)
class VerifyReport:
    """The result of :func:`verify`: which tensors were compared, and which of them differ.

    It prints as one line for each of the first mismatches, and a summary.

    Attributes:
        tp_size: the number of ranks.
        compared: the names of all tensors: ``"output 0"``, ``"output 0 under no_grad"``,
            ``"gradient of input 0"``, ``"gradient of layers.0.weight"``.
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
    mesh = one_axis(mesh, "tp", "verify")
    # Before the copies are made: a plan that does not fit needs no memory.
    resolve_plan(model, mesh.size(), plan)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            raise PlanError(f"{name} is on the meta device or sharded; verify an unsharded model with values")
    reference = copy.deepcopy(model).eval().double()
    arguments = tree_map(_copy_argument, (inputs, named))
    _broadcast_values(reference, arguments, mesh)
    # Without the comparison of gradients between ranks, which would raise at the first difference.
    sharded = parallelize(copy.deepcopy(reference), mesh, plan, check_gradients=False)
    expected, _ = _run(reference, arguments, {}, mesh)
    try:
        actual, gathered = _run(sharded, arguments, expected, mesh)
    except NamedMeshError:
        raise
    except Exception as error:
        raise PlanError(_describe_failure(sharded, plan, error)) from error
    # A gradient may consist of the rounding errors of terms that cancel out. They are small next to
    # the largest gradient.
    largest = max((_max_abs(expected[name]) for name in expected if "gradient" in name), default=0.0)
    rounding = 1e-13 * largest
    differences = {}
    for name, tensor in (expected | actual).items():
        # A tensor that only one of the models returns is compared with zeros.
        zeros = torch.zeros_like(tensor)
        differences[name] = _describe_difference(
            actual.get(name, zeros), expected.get(name, zeros), tolerance, rounding
        )
    reports = all_gather_object(mesh.get_group(), differences)
    mismatches = {}
    for name in differences:
        texts = [report[name] for report in reports if report.get(name)]
        if texts:
            mismatches[name] = "; ".join(texts)
    report = VerifyReport(mesh.size(), tuple(differences), mismatches, tuple(gathered))
    if report.passed:
        return report
    return replace(report, first_wrong=_find_first_wrong(reference, sharded, arguments, mesh, tolerance))


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
    if not value.is_floating_point():
        return value
    return value.double().requires_grad_()


def _run(
    model: nn.Module, arguments: Any, expected: Mapping[str, Tensor], mesh: DeviceMesh
) -> tuple[dict[str, Tensor], list[str]]:
    """Run the forward and the backward of a model.

    The backward starts at a sum of all outputs with fixed random weights.

    Args:
        model: the model.
        arguments: its arguments.
        expected: the full outputs by name, if the model is sharded: local shards are gathered.
        mesh: the mesh of the shards.

    Returns:
        The outputs, with and without gradients enabled, and the gradients of inputs and parameters,
        as full tensors by name; and the names of the outputs that were gathered.
    """
    leaves = tree_map(_copy_argument, arguments)
    outputs = {f"output {index}": output for index, output in enumerate(_run_forward(model, leaves))}
    dims = {}
    for name, output in outputs.items():
        dims[name] = _find_sharded_dim(output, expected.get(name, output), mesh.size())
    _run_backward(outputs, dims, mesh)
    # A module may have another code path for inference, such as torch's fused encoder.
    with torch.no_grad():
        for index, output in enumerate(_run_forward(model, leaves)):
            outputs[f"output {index} under no_grad"] = output
    results = {}
    for name, output in outputs.items():
        dim = dims.get(name.removesuffix(" under no_grad"))
        results[name] = _gather_shards(output.detach(), dim, mesh)
    inputs = {f"input {index}": tensor for index, tensor in enumerate(_list_tensors(leaves))}
    for name, tensor in (inputs | dict(model.named_parameters())).items():
        if not tensor.requires_grad:
            continue
        grad: Any = tensor.grad
        # A parameter that the forward does not use on this rank has no gradient.
        if grad is None:
            grad = torch.zeros_like(tensor)
        results[f"gradient of {name}"] = to_full(grad).to_dense()
    return results, [name for name, dim in dims.items() if dim is not None]


def _run_backward(outputs: Mapping[str, Tensor], dims: Mapping[str, int | None], mesh: DeviceMesh) -> None:
    """Run the backward of a sum of outputs with random weights, sharded as the outputs.

    The gradient of a plain sum would be zero behind a softmax.
    """
    # On the CPU, so that the weights do not depend on the device.
    generator = torch.Generator("cpu").manual_seed(0)
    differentiable = []
    weights = []
    for name, output in outputs.items():
        if not output.requires_grad:
            continue
        shape = list(output.shape)
        dim = dims[name]
        if dim is not None:
            shape[dim] *= mesh.size()
        weight = torch.randn(shape, generator=generator, dtype=output.dtype, device="cpu")
        if dim is not None:
            weight = weight.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        differentiable.append(output)
        weights.append(weight.to(output))
    if differentiable:
        torch.autograd.backward(differentiable, weights)


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
    reference: nn.Module, sharded: nn.Module, arguments: Any, mesh: DeviceMesh, tolerance: float
) -> str:
    """Return the name and type of the first layer whose output differs; empty if none does.

    Outputs are compared if they are replicated, or shards along one dim. Those that ranks compute
    for other ranks, such as partial sums, are not.
    """
    expected = _record_outputs(reference, arguments)
    actual = _record_outputs(sharded, arguments)
    modules = dict(sharded.named_modules())
    differing = []
    for name, full in expected.items():
        local = actual.get(name)
        # The heads of a KeyValueParallel are in another order than those of the model.
        if local is None or getattr(modules.get(name), "rows", None) is not None:
            continue
        dim = _find_sharded_dim(local, full, mesh.size())
        value = _gather_shards(local, dim, mesh)
        if value.shape == full.shape:
            text = _describe_difference(value, full, tolerance, 0.0)
            differing.append((name, digest(value), bool(text)))
    for reports in zip(*all_gather_object(mesh.get_group(), differing), strict=True):
        names, digests, flags = zip(*reports, strict=True)
        if any(flags) and len(set(digests)) == 1:
            return f"{names[0] or 'the model'} ({type(modules[names[0]]).__name__})"
    return ""


def _record_outputs(model: nn.Module, arguments: Any) -> dict[str, Tensor]:
    """Return the first tensor that each module returns in a forward, innermost first."""
    records: dict[str, Tensor] = {}

    def record(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        tensors = _list_tensors(output)
        if tensors and name not in records:
            records[name] = to_full(tensors[0]).detach().clone()

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(partial(record, name)))
    _run_forward(model, tree_map(_copy_argument, arguments))
    for handle in handles:
        handle.remove()
    return records


def _describe_failure(sharded: nn.Module, plan: Plan, error: Exception) -> str:
    """Describe an error of the sharded copy: the innermost module, and the plan."""
    names = {id(module): name for name, module in sharded.named_modules()}
    place = "the model"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if names.get(id(owner)):
            place = f"{names[id(owner)]} ({type(owner).__name__})"
    styles = {"": plan} if isinstance(plan, ParallelStyle) else plan
    entries = [f"{key or 'the model'}: {type(style).__name__}" for key, style in styles.items()]
    return (
        f"the sharded copy raises in {place}: {type(error).__name__}: {get_first_line(error)}. A "
        "layer that works on a shard may be missing in the plan, which is "
        f"{format_items(entries, _SHOWN_MISMATCHES)}"
    )


def _run_forward(model: nn.Module, leaves: Any) -> list[Tensor]:
    """Return the tensors that a model returns, as full tensors.

    The random numbers are the same in each call; afterwards the generators are restored.
    """
    # The model may write into its inputs in place. autograd forbids that for leaves.
    args, kwargs = tree_map(_clone_tensor, leaves)
    with torch.random.fork_rng(range(torch.accelerator.device_count())):
        torch.manual_seed(0)
        output = model(*args, **kwargs)
    outputs = [to_full(tensor) for tensor in _list_tensors(output)]
    if not outputs:
        kind = type(output).__name__
        raise PlanError(f"the output, of type {kind}, has no tensors; return them in plain containers")
    return outputs


def _clone_tensor(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _max_abs(tensor: Tensor) -> float:
    """Return the largest finite absolute value in a tensor; 0 if there is none."""
    if not tensor.numel():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


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
