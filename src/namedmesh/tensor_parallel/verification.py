"""Compare a model under a tensor-parallel plan with the same model in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from namedmesh._torch import all_gather_object, tree_leaves, tree_map
from namedmesh.arguments import AxisMesh, one_axis
from namedmesh.errors import PlanError, format_count
from namedmesh.sharding import to_full
from namedmesh.tensor_parallel.plan import parallelize
from namedmesh.tensor_parallel.plan_checks import resolve_plan
from namedmesh.tensor_parallel.plan_entries import Plan


@dataclass(frozen=True)
class VerifyReport:
    """The result of :func:`verify`: which tensors were compared, and which of them differ.

    It prints as one line for each mismatch, and a summary.

    Attributes:
        tp_size: the number of ranks.
        compared: the names of all tensors: ``"output 0"``, ``"output 0 under no_grad"``,
            ``"gradient of input 0"``, ``"gradient of layers.0.weight"``.
        mismatches: the name of each tensor that differs, and the differences on all ranks. It is
            the same on every rank.
    """

    tp_size: int
    compared: tuple[str, ...]
    mismatches: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether no tensor differs."""
        return not self.mismatches

    def __str__(self) -> str:
        lines = [f"{name}: {text}" for name, text in self.mismatches.items()]
        count = format_count(len(self.compared), "tensor")
        lines.append(f"{len(lines)} of {count} on {self.tp_size} ranks differ from one process")
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
        PlanError: the plan does not fit the model; or the model is on the meta device, is sharded
            already, or returns no tensors.
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
    expected = _run(reference, arguments)
    actual = _run(sharded, arguments)
    # A gradient may consist of the rounding errors of terms that cancel out. They are small next to
    # the largest gradient.
    largest = 0.0
    for name, tensor in expected.items():
        if "gradient" in name:
            largest = max(largest, _max_abs(tensor))
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
    return VerifyReport(mesh.size(), tuple(differences), mismatches)


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


def _run(model: nn.Module, arguments: Any) -> dict[str, Tensor]:
    """Run the forward and the backward of a model.

    The backward starts at a sum of all outputs with fixed random weights.

    Returns:
        The outputs, with and without gradients enabled, and the gradients of inputs and parameters,
        as full tensors by name.
    """
    leaves = tree_map(_copy_argument, arguments)
    outputs = _run_forward(model, leaves)
    differentiable = [output for output in outputs if output.requires_grad]
    # Random weights, because the gradient of a plain sum would be zero behind a softmax. They are
    # drawn on the CPU, so that they do not depend on the device.
    generator = torch.Generator("cpu").manual_seed(0)
    weights = []
    for output in differentiable:
        weight = torch.randn(output.shape, generator=generator, dtype=output.dtype, device="cpu")
        weights.append(weight.to(output))
    if differentiable:
        torch.autograd.backward(differentiable, weights)
    results = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    # A module may have another code path for inference, such as torch's fused encoder.
    with torch.no_grad():
        for index, output in enumerate(_run_forward(model, leaves)):
            results[f"output {index} under no_grad"] = output
    inputs = {f"input {index}": tensor for index, tensor in enumerate(_list_tensors(leaves))}
    for name, tensor in (inputs | dict(model.named_parameters())).items():
        if not tensor.requires_grad:
            continue
        grad: Any = tensor.grad
        # A parameter that the forward does not use on this rank has no gradient.
        if grad is None:
            grad = torch.zeros_like(tensor)
        results[f"gradient of {name}"] = to_full(grad).to_dense()
    return results


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
