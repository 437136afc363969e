"""A training step sends and saves no more bytes than with torch's own styles."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from tensors import full_tensor
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    loss_parallel,
    parallelize_module,
)
from torch_plans import REPLICATED, SEQUENCE, TORCH, make_torchs_plan
from tp_compare import OperationRecorder, make_tp_mesh, parallelize_copy
from tp_models import FeedForward, Llama, make_llama_plan

from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, SharedInput, parallelize

pytestmark = pytest.mark.ci

TP = 2
IDS = (2, 16)


@dataclass(frozen=True)
class Case:
    """A comparison of two plans.

    Attributes:
        plan: the plan of namedmesh.
        torchs_plan: the plan with torch's styles.
        loss: whether the loss is computed in ``loss_parallel``.
    """

    plan: dict[str, Any]
    torchs_plan: dict[str, Any]
    loss: bool = False


OURS = (ColwiseParallel, RowwiseParallel)
CASES = {
    "plain": Case(make_llama_plan(), make_torchs_plan(*TORCH, REPLICATED, prepared=False)),
    "plain, prepared": Case(make_llama_plan(), make_torchs_plan(*TORCH, REPLICATED, prepared=True)),
    "plain, loss": Case(
        make_llama_plan(loss_parallel=True),
        make_torchs_plan(*TORCH, REPLICATED, prepared=True, loss=True),
        loss=True,
    ),
    "sequence": Case(
        make_llama_plan(sequence_parallel=True), make_torchs_plan(*TORCH, SEQUENCE, prepared=True)
    ),
    "sequence, loss": Case(
        make_llama_plan(sequence_parallel=True, loss_parallel=True),
        make_torchs_plan(*TORCH, SEQUENCE, prepared=True, loss=True),
        loss=True,
    ),
    "torch's PrepareModuleInput": Case(
        make_torchs_plan(*OURS, SEQUENCE, prepared=True), make_torchs_plan(*TORCH, SEQUENCE, prepared=True)
    ),
    "torch's PrepareModuleInput, plain": Case(
        make_torchs_plan(*OURS, REPLICATED, prepared=True),
        make_torchs_plan(*TORCH, REPLICATED, prepared=True),
    ),
    "each layer gathers": Case(
        make_torchs_plan(*OURS, SEQUENCE, prepared=False), make_torchs_plan(*TORCH, SEQUENCE, prepared=False)
    ),
}


Steps = tuple[dict[str, float], dict[str, float]]


def count_saved_bytes(saved: list[torch.Tensor], params: set[int]) -> int:
    """Return the memory of saved tensors, without the storages of parameters."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    return sum(size for pointer, size in storages.items() if pointer not in params)


def to_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside of a DTensor or an AsyncCollectiveTensor."""
    tensor = tiny.shard(tensor)
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def run_step(model: nn.Module, ids: torch.Tensor, case: Case) -> dict[str, float]:
    """Run a training step.

    Returns:
        The number of collectives in the forward and in the step, the bytes sent and saved, the
        loss.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    saved: list[torch.Tensor] = []

    def record_saved(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(to_plain_tensor(tensor))
        return tensor

    with (
        OperationRecorder() as forward,
        torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor),
        loss_parallel() if case.loss else nullcontext(),
    ):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    params = {to_plain_tensor(param).untyped_storage().data_ptr() for param in model.parameters()}
    with OperationRecorder() as backward, loss_parallel() if case.loss else nullcontext():
        loss.backward()
        optimizer.step()
    assert not forward.writes_in_place
    assert not backward.writes_in_place
    sent = forward.sent + backward.sent
    return {
        "collectives in forward": len(forward.sent),
        "collectives": len(sent),
        "sent bytes": sum(sent),
        "saved bytes": count_saved_bytes(saved, params),
        "loss": full_tensor(loss).item(),
    }


def run_both(mesh: DeviceMesh, case: Case) -> Steps:
    """Return the second step with each plan. The first one initializes what torch caches."""
    torch.manual_seed(0)
    model = Llama(dim=64, hidden=96, layers=1)
    ours = parallelize_copy(model, case.plan, check_gradients=False)
    torchs = parallelize_module(copy.deepcopy(model), mesh, case.torchs_plan)
    ids = torch.randint(0, 32, IDS)
    for _ in range(2):
        steps = (run_step(ours, ids, case), run_step(torchs, ids, case))
    return steps


def run_cases() -> dict[str, Steps]:
    return {name: run_both(make_tp_mesh(), case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Steps]]:
    return run_ranks(TP, run_cases)


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_and_saves_no_more_than_torchs(name: str, steps: list[dict[str, Steps]]) -> None:
    for results in steps:
        ours, torchs = results[name]
        assert abs(ours.pop("loss") - torchs.pop("loss")) < 1e-5
        # The mask of ids of other ranks, one byte for each. torch saves its mask outside of
        # autograd.
        torchs["saved bytes"] += IDS[0] * IDS[1]
        assert all(ours[key] <= torchs[key] for key in torchs), (ours, torchs)


def count_backward_bytes() -> list[tuple[float, float]]:
    """Return the bytes of a backward in float32 and under autocast, for two layouts of the input."""
    columns: dict[str, Any] = {"w1": ColwiseParallel(), "w3": ColwiseParallel()}
    counts = []
    for layout, x in ((REPLICATED, torch.ones(2, 4, 8)), (SEQUENCE, torch.ones(2, 2, 8))):
        plan = columns | {"w2": RowwiseParallel(output_layouts=layout), "": SharedInput(input_layouts=layout)}
        sent = []
        for enabled in (False, True):
            model = parallelize(FeedForward(8, 12), make_tp_mesh(), plan)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model(x.clone().requires_grad_())
            with OperationRecorder() as backward:
                output.sum().backward()
            sent.append(sum(backward.sent))
        counts.append((sent[0], sent[1]))
    return counts


def test_autocast_halves_the_bytes_of_the_gradient_of_a_shared_input() -> None:
    for counts in run_ranks(TP, count_backward_bytes):
        assert [float32 / autocast for float32, autocast in counts] == [2, 2]
