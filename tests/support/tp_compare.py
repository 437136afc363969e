"""Compare a parallelized model with the unsharded one: gradients, training steps, state dict."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import tiny
import torch
from tensors import compute_difference, full_tensor, relative_difference
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from namedmesh._errors import PlanError
from namedmesh.tensor_parallel import parallelize, plan_from_hf, plan_report, reduce_gradients


def make_tp_mesh() -> DeviceMesh:
    """Return a mesh with one axis over all ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def get_grad(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor, which must have one."""
    assert tensor.grad is not None
    return tensor.grad


class OperationRecorder(TorchDispatchMode):
    """Records the operations below DTensors, and the bytes of their collectives.

    Attributes:
        names: the operations, in order.
        sent: for each collective: the bytes that a rank sends if the collective uses a ring.
        writes_in_place: whether a collective wrote into a tensor, which activation checkpointing
            may have saved.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sent: list[float] = []
        self.writes_in_place = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        self.names.append(name)
        self.writes_in_place |= space == "c10d"
        if space == "_c10d_functional" and name != "wait_tensor":
            ranks = torch.distributed.get_world_size()
            sent = max(args[0].nbytes, result.nbytes) * (ranks - 1) / ranks
            # An all-reduce is a reduce-scatter and an all-gather.
            self.sent.append(2 * sent if name == "all_reduce" else sent)
        return result


def max_grad_difference(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of the full gradients of two models."""
    largest = 0.0
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        largest = max(largest, compute_difference(get_grad(param), get_grad(expected)))
    return largest


def parallelize_copy(reference: nn.Module, plan: Any, **options: Any) -> Any:
    """Return a copy of a model, parallelized over all ranks."""
    return parallelize(copy.deepcopy(reference), make_tp_mesh(), plan, **options)


def assert_no_difference(ranks: Iterable[Any], tolerance: float = 1e-12, cases: int | None = None) -> None:
    """Assert that the differences which every rank returned are below the tolerance.

    Args:
        ranks: what each rank returned: one difference, a list, or a dict by case.
        tolerance: the largest allowed difference.
        cases: the number of differences; None if it does not matter.
    """
    for differences in ranks:
        if isinstance(differences, dict):
            values = list(differences.values())
        elif isinstance(differences, list):
            values = differences
        else:
            values = [differences]
        assert cases in {None, len(values)}
        assert all(value < tolerance for value in values), differences


def compare_training(
    model: nn.Module, reference: nn.Module, data: Tensor, *, steps: int = 3, pick: str = ""
) -> float:
    """Train both models with AdamW, and return the largest difference of anything.

    Compared are the output, the input's gradient (if the data has one), every parameter's full and
    local gradient, and in the end every entry of the state dict.

    Args:
        model: the parallelized model.
        reference: the unsharded model.
        data: the input of the first step.
        steps: the number of steps.
        pick: the attribute of the output to compare; empty for the output itself.
    """
    models = (model, reference)
    # Some gradients are zero except for rounding (a bias of keys). A small eps would turn the
    # rounding into steps.
    optimizers = [tiny.AdamWOfShards(m.parameters(), lr=0.01, eps=1e-3) for m in models]
    differences = [0.0]
    for step in range(steps):
        inputs = []
        outputs = []
        for trained in models:
            x = data.roll(step, 0).clone().requires_grad_(data.is_floating_point())
            output: Any = trained(x)
            output = getattr(output, pick) if pick else output
            full_tensor(output).square().sum().backward()
            inputs.append(x)
            outputs.append(output)
        differences.append(_compare(*outputs))
        if data.is_floating_point():
            differences.append(_compare(*map(get_grad, inputs)))
        for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), name
            if expected.grad is not None:
                differences += _compare_grads(param, expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected_state = reference.state_dict()
    assert list(model.state_dict()) == list(expected_state)
    for name, value in model.state_dict().items():
        assert value.shape == expected_state[name].shape, name
        differences.append(_compare(value, expected_state[name]))
    return max(differences)


def compare_hf_training(reference: Any, *, steps: int = 3) -> float:
    """Compare the training of a Hugging Face model under its own plan; runs on each rank."""
    model = parallelize_copy(reference, plan_from_hf(reference))
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    return compare_training(model, reference, ids, steps=steps, pick="logits")


def _compare(mine: Tensor | None, theirs: Tensor | None) -> float:
    """Return the difference, relative to the largest value where that is above one: rounding grows with it."""
    return relative_difference(mine, theirs, 1.0)


def _compare_grads(param: Tensor, expected: Tensor) -> list[float]:
    """Return the differences of the full gradient, and of the local one after the all-reduce."""
    differences = [_compare(get_grad(param), expected)]
    if isinstance(param, DTensor):
        reduce_gradients([param])
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        shard = distribute_tensor(expected, param.device_mesh, param.placements, src_data_rank=None)
        differences.append(_compare(param.grad.to_local(), shard.to_local()))
    return differences


def get_plan_error(model: nn.Module, plan: Any, tp_size: Any = 2, **options: Any) -> str:
    """Return the text of the PlanError that a plan raises, before anything is sharded."""
    with pytest.raises(PlanError) as caught:
        plan_report(model, tp_size, plan, **options)
    return str(caught.value)
