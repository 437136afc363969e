"""A parallelized model against the whole one: forward, gradients, training steps and what a checkpoint gets; or the error."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import tiny
import torch
from tensors import apart, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import parallelize, plan_from_hf, plan_report, reduce_gradients


def tp_mesh() -> DeviceMesh:
    """One axis over all ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class Recorded(TorchDispatchMode):
    """The operations below DTensors, in order, and the bytes that a rank sends around a ring in those that communicate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.sent: list[float] = []
        self.writes = False  # whether a collective wrote into a tensor, which recomputation may have kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        self.names.append(name)
        self.writes |= space == "c10d"
        if space == "_c10d_functional" and name != "wait_tensor":
            ranks = torch.distributed.get_world_size()
            larger = max(args[0].nbytes, result.nbytes) * (ranks - 1) / ranks
            self.sent.append(2 * larger if name == "all_reduce" else larger)
        return result


def gradients_apart(model: nn.Module, reference: nn.Module) -> float:
    """How far the whole gradients of all parameters are from those of one process."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(apart(gradient_of(mine), gradient_of(theirs)) for mine, theirs in pairs)


def sharded(reference: nn.Module, plan: Any, **options: Any) -> Any:
    """A copy of a model under a plan, over all ranks."""
    return parallelize(copy.deepcopy(reference), tp_mesh(), plan, **options)


def assert_right(ranks: Iterable[Any], tolerance: float = 1e-12, cases: int | None = None) -> None:
    """What every rank found is next to no difference; for so many cases, if it is to be said."""
    for found in ranks:
        values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
        assert cases in {None, len(values)}
        assert all(value < tolerance for value in values), found


def training_difference(
    model: nn.Module, reference: nn.Module, data: Tensor, *, steps: int = 3, pick: str = ""
) -> float:
    """The largest difference of anything in some steps of AdamW: 0 where parallel training is right.

    Compared are the output, the input's gradient (of data that has one), every parameter's gradient, whole and
    as this rank's shard, and in the end every entry of the state dict.
    """
    # Some gradients are zero but for rounding (a bias of keys): a small eps would make steps of the rounding.
    optimizers = [tiny.AdamWOfShards(each.parameters(), lr=0.01, eps=1e-3) for each in (model, reference)]
    differences = [0.0]
    for step in range(steps):
        inputs = [data.roll(step, 0).clone().requires_grad_(data.is_floating_point()) for _ in optimizers]
        outputs: list[Any] = [m(x) for m, x in zip((model, reference), inputs, strict=True)]
        got, wanted = (getattr(out, pick) for out in outputs) if pick else outputs
        differences.append(apart(got, wanted))
        for output in (got, wanted):
            whole(output).square().sum().backward()
        if data.is_floating_point():
            gradients = [gradient_of(x) for x in inputs]
            differences.append(apart(*gradients))
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                differences += _gradient_differences(mine, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted_state = reference.state_dict()
    assert list(model.state_dict()) == list(wanted_state)
    for name, value in model.state_dict().items():
        assert value.shape == wanted_state[name].shape, name
        differences.append(apart(value, wanted_state[name]))
    return max(differences)


def hf_difference(reference: Any, *, steps: int = 3) -> float:
    """On one rank of a world: the largest difference for a model of Hugging Face, by its own plan."""
    model = sharded(reference, plan_from_hf(reference))
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    return training_difference(model, reference, ids, steps=steps, pick="logits")


def _gradient_differences(mine: Tensor, wanted: Tensor) -> list[float]:
    differences = [apart(gradient_of(mine), wanted)]
    if isinstance(mine, DTensor):
        reduce_gradients([mine])
        assert isinstance(mine.grad, DTensor)
        assert mine.grad.placements == mine.placements
        shard = distribute_tensor(wanted, mine.device_mesh, mine.placements, src_data_rank=None)
        differences.append(apart(mine.grad.to_local(), shard.to_local()))
    return differences


def problem_of(model: nn.Module, plan: Any, tp_size: Any = 2, **options: Any) -> str:
    """The text of the error that a plan ends in, before anything is sharded."""
    with pytest.raises(PlanError) as caught:
        plan_report(model, tp_size, plan, **options)
    return str(caught.value)
