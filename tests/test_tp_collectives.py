"""What a training step communicates and keeps: never more than with torch's own styles, counted."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.utils._python_dispatch import TorchDispatchMode
from tp_compare import sharded, tp_mesh
from tp_models import NORMS, FeedForward, Llama, llama_plan

from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, SharedInput, parallelize

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

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
    "plain": Case(llama_plan(), llama(*TORCH, WHOLE, prepared=False)),
    "plain, prepared": Case(llama_plan(), llama(*TORCH, WHOLE, prepared=True)),
    "plain, loss": Case(
        llama_plan(loss_parallel=True), llama(*TORCH, WHOLE, prepared=True, loss=True), loss=True
    ),
    "sequence": Case(llama_plan(sequence_parallel=True), llama(*TORCH, SEQUENCE, prepared=True)),
    "sequence, loss": Case(
        llama_plan(sequence_parallel=True, loss_parallel=True),
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


class Traffic(TorchDispatchMode):
    """Counts collectives, and the bytes that a rank sends in them around a ring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # to see what its arithmetic communicates
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        kind = name.removeprefix("_c10d_functional::")
        if kind in {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}:
            self.calls[kind] += 1
            larger = max(args[0].nbytes, result.nbytes)
            self.bytes += larger * (TP - 1) / TP * (2 if kind == "all_reduce" else 1)
        elif name.startswith("c10d::"):
            raise AssertionError(f"{name} writes into a tensor that this mode may have kept")
        return result


@dataclass(frozen=True)
class Step:
    """What one training step took."""

    forward: dict[str, int]
    backward: dict[str, int]
    update: dict[str, int]
    sent: float
    kept: int
    loss: float


def kept_bytes(kept: list[torch.Tensor], parameters: set[int]) -> int:
    """The memory behind saved tensors, each once, without that of the parameters."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with the memory."""
    tensor = tiny.shard(tensor)
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def step(model: nn.Module, ids: torch.Tensor, case: Case) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(local(tensor))
        return tensor

    with (
        Traffic() as forward,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        loss_parallel() if case.loss else nullcontext(),
    ):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    with Traffic() as backward, loss_parallel() if case.loss else nullcontext():
        loss.backward()
    with Traffic() as update:
        optimizer.step()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    modes = forward, backward, update
    return Step(
        forward=dict(forward.calls),
        backward=dict(backward.calls),
        update=dict(update.calls),
        sent=sum(mode.bytes for mode in modes),
        kept=kept_bytes(kept, parameters),
        loss=loss.item(),
    )


def both(mesh: DeviceMesh, case: Case) -> tuple[Step, Step]:
    """A step of ours and one of torch's, of the same model; the second, when nothing is new any more."""
    torch.manual_seed(0)
    model = Llama(dim=64, hidden=96)
    ours = sharded(model, case.ours, check=False)
    torchs = parallelize_module(copy.deepcopy(model), mesh, case.torchs)
    ids = torch.randint(0, 32, IDS)
    steps = [[step(one, ids, case) for one in (ours, torchs)] for _ in range(2)]
    return steps[1][0], steps[1][1]


def all_cases() -> dict[str, tuple[Step, Step]]:
    return {name: both(tp_mesh(), case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def steps() -> list[dict[str, tuple[Step, Step]]]:
    return run_ranks(TP, all_cases)


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_and_keeps_no_more_than_torchs(
    name: str, steps: list[dict[str, tuple[Step, Step]]]
) -> None:
    for found in steps:
        ours, torchs = found[name]
        assert abs(ours.loss - torchs.loss) < 1e-5
        assert sum(ours.forward.values()) <= sum(torchs.forward.values()), (ours, torchs)
        calls = [
            sum(sum(part.values()) for part in (s.forward, s.backward, s.update)) for s in (ours, torchs)
        ]
        assert calls[0] <= calls[1], (ours, torchs)
        assert ours.sent <= torchs.sent, (ours, torchs)
        # The mask of the ids that other ranks have, a byte for each; torch keeps its own out of autograd's sight.
        assert ours.kept <= torchs.kept + IDS[0] * IDS[1], (ours, torchs)


def bytes_in_backward() -> list[tuple[float, float]]:
    """What a backward sends in float32, and under autocast: of a shared input that is whole, and of one that is gathered."""
    layers: dict[str, Any] = {"w1": ColwiseParallel(), "w3": ColwiseParallel()}
    found = []
    for layout, value in ((WHOLE, torch.ones(2, 4, 8)), (SEQUENCE, torch.ones(2, 2, 8))):
        plan = layers | {"w2": RowwiseParallel(output_layouts=layout), "": SharedInput(input_layouts=layout)}
        sent = []
        for enabled in (False, True):
            model = parallelize(FeedForward(8, 12), tp_mesh(), plan)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out = model(value.clone().requires_grad_())
            with Traffic() as backward:
                out.sum().backward()
            sent.append(backward.bytes)
        found.append((sent[0], sent[1]))
    return found


def test_under_autocast_the_gradient_of_a_shared_input_is_sent_in_its_type() -> None:
    for found in run_ranks(TP, bytes_in_backward):
        assert [float32 / autocast for float32, autocast in found] == [2, 2]
