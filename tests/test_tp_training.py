"""Tensor parallelism beside the rest of a training job: FSDP2, checkpoints, the meta device, pickling."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from test_tp_fused_experts import mixture, needs_blocks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from tp_compare import tp_mesh
from tp_models import llama_plan as llama_plan
from tp_models import TORCHS_NORMS, Llama

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import parallelize, plan_from_hf

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

STEPS = 3


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 32, (4, 8), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def reference_run(*, tied: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the whole model in one process, and its parameters afterwards."""
    torch.manual_seed(0)
    model = Llama(tied=tied).double()
    optimizer = tiny.AdamWOfShards(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def full(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key] - other[key]).abs().max().item() for key in one)


PLANS = {
    "plain": llama_plan(),
    "sequence": llama_plan(sequence_parallel=True),
    "torch's norms": llama_plan(sequence_parallel=True) | TORCHS_NORMS,
}


def fsdp_differences(plan: str, tied: bool, ddp: bool = False) -> tuple[float, float]:
    """Two data-parallel halves of two tensor-parallel ranks each, by FSDP2 or by DDP, against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = parallelize(Llama(tied=tied).double(), mesh["tp"], PLANS[plan])
    assert isinstance(model, Llama)
    for layer in [] if ddp else model.layers:
        assert isinstance(layer, torch.nn.Module)
        if plan == "sequence":
            assert isinstance(layer.attention_norm, torch.nn.Module)
            fully_shard(layer.attention_norm, mesh=mesh["dp"])
        fully_shard(layer, mesh=mesh["dp"])
    runs: nn.Module = model
    if ddp:
        runs = DistributedDataParallel(model, device_mesh=mesh["dp"])
    else:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = tiny.AdamWOfShards(model.parameters(), lr=1e-2)
    wanted_losses, wanted = reference_run(tied=tied)
    worst = 0.0
    for step in range(STEPS):
        mine = batch(step).chunk(2)[mesh["dp"].get_local_rank()]
        loss = loss_of(runs, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        worst = max(worst, abs(total.item() / 2 - wanted_losses[step]))
    if ddp:  # which leaves no parameters in the model that it wraps
        return worst, 0.0
    return worst, farthest(full(model.state_dict()), wanted)


def all_fsdp_differences() -> dict[str, tuple[float, float]]:
    found = {plan: fsdp_differences(plan, tied=False) for plan in PLANS}
    found |= {f"{plan}, DDP": fsdp_differences(plan, tied=False, ddp=True) for plan in PLANS}
    return found | {"plain, tied": fsdp_differences("plain", tied=True)}


def test_fsdp_over_tensor_parallel_trains_as_one_process() -> None:
    for found in run_ranks(4, all_fsdp_differences):
        assert len(found) == 2 * len(PLANS) + 1
        assert max(map(max, found.values())) < 1e-9, found


# --- checkpoints --------------------------------------------------------------------------------------------


def numbers(model: nn.Module) -> list[float]:
    """All parameters in a row: tensors do not outlive the rank that sends them."""
    return torch.cat([value.flatten() for value in full(model.state_dict()).values()]).tolist()


def made(kind: str, tp: int, dp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on some ranks, or the whole one, and its optimizer."""
    torch.manual_seed(dp)  # what is loaded has other numbers
    model: nn.Module = Llama().double() if kind == "llama" else mixture("packed_colwise").double()
    if tp > 1:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        plan = PLANS["sequence" if dp == 1 else "plain"] if kind == "llama" else plan_from_hf(model)
        parallelize(model, mesh["tp"], plan)
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def stepped(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All parameters after a step."""
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(batch(0) if kind == "llama" else x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return numbers(model)


def saved(path: str, kind: str, tp: int, dp: int, ours: bool) -> list[float]:
    model, optimizer = made(kind, tp, dp)
    after = stepped(kind, model, optimizer)
    if ours:
        training.save(path, namedmesh.init_mesh(dp=dp, tp=tp), model, optimizer)
    else:
        state, moments = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path)
    return after


def loaded(path: str, kind: str, tp: int, dp: int, ours: bool) -> tuple[list[float], list[float]]:
    """The parameters that were loaded, and those after another step."""
    model, optimizer = made(kind, tp, dp)
    if ours:
        training.load(path, namedmesh.init_mesh(dp=dp, tp=tp), model, optimizer)
    else:
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    return numbers(model), stepped(kind, model, optimizer)


@pytest.mark.filterwarnings("default")  # torch's own, from its checkpoint code
@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ("llama", False),
        pytest.param("fused experts", False, marks=needs_blocks),
        pytest.param("fused experts", True, marks=needs_blocks),
    ],
)
def test_a_checkpoint_is_that_of_the_whole_model(tmp_path: Path, kind: str, ours: bool) -> None:
    """Written by two ranks, read by four, by two times two under FSDP2, and by one process; and back."""
    path = str(tmp_path / "two")
    (wanted, *_) = run_ranks(2, saved, path, kind, 2, 1, ours)
    afterwards = []
    for tp, dp in ((4, 1), (2, 2), (1, 1)):
        for found, after in run_ranks(tp * dp, loaded, path, kind, tp, dp, ours):
            assert found == wanted
            assert after != found
            afterwards.append(after)
    far = max(abs(a - b) for after in afterwards for a, b in zip(after, afterwards[0], strict=True))
    assert far < 1e-12
    path = str(tmp_path / "four")
    (wanted, *_) = run_ranks(4, saved, path, kind, 2, 2, ours)
    for found, _ in run_ranks(1, loaded, path, kind, 1, 1, ours):
        assert found == wanted


def meta_differences() -> float:
    """Parallelized on the meta device, given memory, and filled from a whole model's values."""
    torch.manual_seed(0)
    whole = Llama().double()
    with torch.device("meta"):
        model = Llama().double()
    parallelize(model, tp_mesh(), PLANS["sequence"], src_data_rank=None)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            placed = torch.distributed.tensor.distribute_tensor(
                theirs.detach(), mine.device_mesh, mine.placements
            )
            mine.copy_(placed)
    difference: Tensor = (model(batch(0)) - whole(batch(0))).abs().max()
    difference.backward()
    return difference.item()


def test_a_model_from_the_meta_device() -> None:
    assert max(run_ranks(2, meta_differences)) < 1e-12


def source_values() -> list[float]:
    """What the ranks hold when each starts from its own values: rank 0's, rank 1's, or their own."""
    found = []
    for source in (0, 1, None):
        model = torch.nn.Linear(2, 4, bias=False)
        torch.nn.init.constant_(model.weight, float(dist.get_rank()))
        parallelize(model, tp_mesh(), {"": llama_plan()["layers.*.attention.wq"]}, src_data_rank=source)
        assert isinstance(model.weight, DTensor)
        assert model.weight.placements == (Shard(0),)
        (value,) = model.weight.to_local().unique().tolist()
        found.append(value)
    return found


def test_the_values_come_from_the_source_rank() -> None:
    assert run_ranks(2, source_values) == [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0]]


@pytest.mark.filterwarnings("default")
def test_a_pickled_model_computes_the_same() -> None:
    assert max(run_ranks(2, pickled_difference)) == 0


def pickled_difference() -> float:
    model = parallelize(Llama().double(), tp_mesh(), PLANS["sequence"])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(loaded)
    difference: Tensor = (copied(batch(0)) - model(batch(0))).abs().max()
    return difference.item()
