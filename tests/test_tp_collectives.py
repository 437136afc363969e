"""What a training step communicates and keeps: never more than with torch's own styles, counted."""

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
from tensors import whole
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from tp_compare import OperationRecorder, make_tp_mesh, parallelize_copy
from tp_models import NORMS, FeedForward, Llama, make_llama_plan

from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, SharedInput, parallelize

TP = 2
IDS = (2, 16)
WHOLE, SEQUENCE = Replicate(), Shard(1)
COLUMNS = tuple(f"layers.*.{name}" for name in ("attention.wq", "attention.wk", "attention.wv"))
COLUMNS += tuple(f"layers.*.feed_forward.{name}" for name in ("w1", "w3"))
ROWS = ("layers.*.attention.wo", "layers.*.feed_forward.w2")


def llama(columns: Any, rows: Any, between: Any, *, prepared: bool, loss: bool = False) -> dict[str, Any]:
    """A Llama plan of the given column and row styles, as torch's documentation writes it."""
    plan: dict[str, Any] = dict.fromkeys(ROWS, rows(output_layouts=between))
    plan |= dict.fromkeys(COLUMNS, columns() if prepared else columns(input_layouts=between))
    plan["tok_embeddings"] = rows(input_layouts=WHOLE, output_layouts=between)
    logits = Shard(-1) if loss else WHOLE
    plan["output"] = columns(input_layouts=between, output_layouts=logits, use_local_output=not loss)
    if prepared:
        style = PrepareModuleInput(input_layouts=between, desired_input_layouts=WHOLE)
        plan |= {"layers.*.attention": style, "layers.*.feed_forward": style}
    if between == SEQUENCE:
        plan |= dict.fromkeys(NORMS, SequenceParallel())
    return plan


@dataclass(frozen=True)
class Case:
    """Our plan, torch's for the same, and how the model is trained."""

    ours: dict[str, Any]
    torchs: dict[str, Any]
    loss: bool = False


TORCH, OURS = (TorchColwise, TorchRowwise), (ColwiseParallel, RowwiseParallel)
CASES = {
    "plain": Case(make_llama_plan(), llama(*TORCH, WHOLE, prepared=False)),
    "plain, prepared": Case(make_llama_plan(), llama(*TORCH, WHOLE, prepared=True)),
    "plain, loss": Case(
        make_llama_plan(loss_parallel=True), llama(*TORCH, WHOLE, prepared=True, loss=True), loss=True
    ),
    "sequence": Case(make_llama_plan(sequence_parallel=True), llama(*TORCH, SEQUENCE, prepared=True)),
    "sequence, loss": Case(
        make_llama_plan(sequence_parallel=True, loss_parallel=True),
        llama(*TORCH, SEQUENCE, prepared=True, loss=True),
        loss=True,
    ),
    "torch's preparation": Case(
        llama(*OURS, SEQUENCE, prepared=True), llama(*TORCH, SEQUENCE, prepared=True)
    ),
    "torch's preparation, plain": Case(
        llama(*OURS, WHOLE, prepared=True), llama(*TORCH, WHOLE, prepared=True)
    ),
    "each layer for itself": Case(
        llama(*OURS, SEQUENCE, prepared=False), llama(*TORCH, SEQUENCE, prepared=False)
    ),
}


Steps = tuple[dict[str, float], dict[str, float]]


def kept_bytes(kept: list[torch.Tensor], parameters: set[int]) -> int:
    """The memory behind saved tensors, each once, without that of the parameters."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with the memory."""
    tensor = tiny.shard(tensor)
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def step(model: nn.Module, ids: torch.Tensor, case: Case) -> dict[str, float]:
    """What one training step took: collectives, in the forward and in all, bytes sent and kept; and its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(local(tensor))
        return tensor

    with (
        OperationRecorder() as forward,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        loss_parallel() if case.loss else nullcontext(),
    ):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    with OperationRecorder() as later, loss_parallel() if case.loss else nullcontext():
        loss.backward()
        optimizer.step()
    assert not forward.writes_in_place
    assert not later.writes_in_place
    return {
        "forward": len(forward.sent),
        "all": len(forward.sent + later.sent),
        "bytes": sum(forward.sent + later.sent),
        "kept": kept_bytes(kept, parameters),
        "loss": whole(loss).item(),
    }


def both(mesh: DeviceMesh, case: Case) -> Steps:
    """A step of ours and one of torch's, of the same model; the second, when nothing is new any more."""
    torch.manual_seed(0)
    model = Llama(dim=64, hidden=96)
    ours = parallelize_copy(model, case.ours, check_gradients=False)
    torchs = parallelize_module(copy.deepcopy(model), mesh, case.torchs)
    ids = torch.randint(0, 32, IDS)
    steps = [[step(one, ids, case) for one in (ours, torchs)] for _ in range(2)]
    return steps[1][0], steps[1][1]


def all_cases() -> dict[str, Steps]:
    return {name: both(make_tp_mesh(), case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Steps]]:
    return run_ranks(TP, all_cases)


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_and_keeps_no_more_than_torchs(name: str, steps: list[dict[str, Steps]]) -> None:
    for found in steps:
        ours, torchs = found[name]
        assert abs(ours.pop("loss") - torchs.pop("loss")) < 1e-5
        # The mask of the ids that other ranks have, a byte for each; torch keeps its own out of autograd's sight.
        torchs["kept"] += IDS[0] * IDS[1]
        assert all(ours[key] <= torchs[key] for key in torchs), (ours, torchs)


def bytes_in_backward() -> list[tuple[float, float]]:
    """What a backward sends in float32, and under autocast: of a shared input that is whole, and of one that is gathered."""
    layers: dict[str, Any] = {"w1": ColwiseParallel(), "w3": ColwiseParallel()}
    found = []
    for layout, value in ((WHOLE, torch.ones(2, 4, 8)), (SEQUENCE, torch.ones(2, 2, 8))):
        plan = layers | {"w2": RowwiseParallel(output_layouts=layout), "": SharedInput(input_layouts=layout)}
        sent = []
        for enabled in (False, True):
            model = parallelize(FeedForward(8, 12), make_tp_mesh(), plan)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = model(value.clone().requires_grad_())
            with OperationRecorder() as backward:
                out.sum().backward()
            sent.append(sum(backward.sent))
        found.append((sent[0], sent[1]))
    return found


def test_under_autocast_the_gradient_of_a_shared_input_is_sent_in_its_type() -> None:
    for found in run_ranks(TP, bytes_in_backward):
        assert [float32 / autocast for float32, autocast in found] == [2, 2]
