"""Experts with gate and up in one weight: each rank keeps its part of both, in the order of the whole weight."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import says
from ranks import run_ranks
from test_tp_collectives import Traffic
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from tp_compare import tp_mesh, training_difference, whole

import namedmesh
from namedmesh import training
from namedmesh._torch import HAS_BLOCKS
from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import ShardedExperts, local, parallelize, plan_from_hf, plan_report

if TYPE_CHECKING:
    from pathlib import Path

needs_blocks = pytest.mark.skipif(not HAS_BLOCKS, reason="torch up to 2.11 cannot gather DTensors of blocks")


class Experts(nn.Module):
    """Three experts, stacked, with gate and up fused as transformers does."""

    def __init__(self, *, is_concatenated: bool = True) -> None:
        super().__init__()
        self.is_concatenated = is_concatenated
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 4))
        self.down_proj = nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        fused = torch.einsum("ti,koi->tko", x, self.gate_up_proj)
        gate, up = fused.chunk(2, -1) if self.is_concatenated else (fused[..., ::2], fused[..., 1::2])
        out = torch.einsum("tko,kio->tki", torch.tanh(gate) * up, self.down_proj)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        summed: torch.Tensor = (picked * weights.unsqueeze(-1)).sum(1)
        return summed


class Mixture(nn.Module):
    """A router and experts, which state their plan."""

    def __init__(self, style: str, *, is_concatenated: bool = True) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(4, 3), Experts(is_concatenated=is_concatenated)
        self._tp_plan = {
            "experts.gate_up_proj": style,
            "experts.down_proj": "rowwise",
            "experts": "moe_tp_experts",
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out: torch.Tensor = self.experts(x, chosen, weights)
        return out


def mixture_difference(style: str, is_concatenated: bool) -> float:
    mesh = tp_mesh()
    torch.manual_seed(0)
    reference = Mixture(style, is_concatenated=is_concatenated).double()
    model = parallelize(copy.deepcopy(reference), mesh, plan_from_hf(reference))
    # What a checkpoint gets is the whole weight, its parts in their order.
    stored = model.state_dict()["experts.gate_up_proj"].full_tensor()
    assert torch.equal(stored, reference.experts.gate_up_proj)
    return training_difference(model, reference, torch.randn(6, 4, dtype=torch.float64))


@needs_blocks
@pytest.mark.parametrize(
    ("style", "is_concatenated"), [("packed_colwise", True), ("colwise", True), ("colwise", False)]
)
def test_experts_are_sharded_inside_whatever_their_plan_says_of_gate_and_up(
    style: str, is_concatenated: bool
) -> None:
    assert max(run_ranks(2, mixture_difference, style, is_concatenated)) < 1e-12


def compiled_difference() -> float:
    torch.manual_seed(0)
    reference = Mixture("packed_colwise").double()
    model = parallelize(copy.deepcopy(reference), tp_mesh(), plan_from_hf(reference))
    model.compile(backend="aot_eager", fullgraph=True)
    return training_difference(model, reference, torch.randn(6, 4, dtype=torch.float64), steps=1)


@needs_blocks
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_fused_experts_compile_to_one_graph() -> None:
    assert max(run_ranks(2, compiled_difference)) < 1e-12


def traffic(tokens: int) -> tuple[Traffic, Traffic]:
    model = parallelize(Mixture("packed_colwise"), tp_mesh(), plan_from_hf(Mixture("packed_colwise")))
    x = torch.randn(tokens, 4, requires_grad=True)
    with Traffic() as forward:
        out = model(x)
    with Traffic() as backward:
        out.sum().backward()
    return forward, backward


def sent() -> list[tuple[Counter[str], float, Counter[str], float]]:
    found = [traffic(tokens) for tokens in (1, 6)]
    return [(forward.calls, forward.bytes, backward.calls, backward.bytes) for forward, backward in found]


@needs_blocks
def test_only_activations_travel() -> None:
    number = 4  # bytes
    for found in run_ranks(2, sent):
        for tokens, (forward, there, backward, back) in zip((1, 6), found, strict=True):
            assert (forward, there) == (Counter(all_reduce=1), tokens * 4 * number)
            # Of the input, and of the weights of the two experts of a token.
            assert (backward, back) == (Counter(all_reduce=2), tokens * (4 + 2) * number)


# --- checkpoints --------------------------------------------------------------------------------------------


def made(tp: int, dp: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on some ranks, or the whole one, and its optimizer."""
    torch.manual_seed(dp)  # what is loaded has other numbers
    model: nn.Module = Mixture("packed_colwise").double()
    if tp > 1:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        model = parallelize(model, mesh["tp"], plan_from_hf(model))
        if dp > 1:
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All parameters after a step."""
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return numbers(model)


def numbers(model: nn.Module) -> list[float]:
    return torch.cat([whole(parameter.detach()).flatten() for parameter in model.parameters()]).tolist()


def saved(path: str, tp: int, dp: int, ours: bool) -> list[float]:
    model, optimizer = made(tp, dp)
    after = step(model, optimizer)
    if ours:
        mesh = namedmesh.init_mesh(dp=dp, tp=tp)
        training.save(path, mesh, model, optimizer)
    else:
        state, moments = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path)
    return after


def loaded(path: str, tp: int, dp: int, ours: bool) -> tuple[list[float], list[float]]:
    """The parameters that were loaded, and those after another step."""
    model, optimizer = made(tp, dp)
    if ours:
        training.load(path, namedmesh.init_mesh(dp=dp, tp=tp), model, optimizer)
    else:
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    found = numbers(model)
    return found, step(model, optimizer)


@needs_blocks
@pytest.mark.filterwarnings("default")  # torch's own, from its checkpoint code
@pytest.mark.parametrize("ours", [False, True])
def test_a_checkpoint_is_that_of_the_whole_model(tmp_path: Path, ours: bool) -> None:
    """Written by two ranks, read by four, by two times two under FSDP2, and by one process; and back."""
    path = str(tmp_path / "two")
    (wanted, *_) = run_ranks(2, saved, path, 2, 1, ours)
    afterwards = []
    for tp, dp in ((4, 1), (2, 2), (1, 1)):
        for found, after in run_ranks(tp * dp, loaded, path, tp, dp, ours):
            assert found == wanted
            afterwards.append(after)
    far = max(abs(a - b) for after in afterwards for a, b in zip(after, afterwards[0], strict=True))
    assert far < 1e-12
    path = str(tmp_path / "four")
    (wanted, *_) = run_ranks(4, saved, path, 2, 2, ours)
    for found, _ in run_ranks(1, loaded, path, 1, 1, ours):
        assert found == wanted


def drawn() -> list[list[float]]:
    found = []
    for tp in (1, dist.get_world_size()):
        model, _ = made(tp, 1)
        training.init_parameters(model, 5)
        found.append(numbers(model))
    return found


@needs_blocks
def test_first_weights_do_not_depend_on_the_layout() -> None:
    for one, other in run_ranks(2, drawn):
        assert one == other


def test_a_first_dim_cannot_be_fused() -> None:
    plan: Any = {
        "experts": ShardedExperts(
            {"gate_up_proj": Shard(0), "down_proj": Shard(2)}, fused={"gate_up_proj": 2}
        )
    }
    with pytest.raises(PlanError, match="'gate_up_proj' of Experts fused along its first dim"):
        plan_report(Mixture("packed_colwise"), 1, plan)


def test_before_torch_2_12_fused_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HAS_BLOCKS", False)
    model = Mixture("packed_colwise")
    with pytest.raises(PlanError, match=r"experts: ShardedExperts with fused=.* needs torch 2\.12 or newer"):
        plan_report(model, 2, plan_from_hf(model))
    # In rows of gate and up by turns nothing is fused.
    plan_report(
        Mixture("colwise", is_concatenated=False), 2, plan_from_hf(Mixture("colwise", is_concatenated=False))
    )


@needs_blocks
def test_fused_halves_that_do_not_divide() -> None:
    model = Mixture("packed_colwise")
    text = (
        "2 problems:\n  - experts: dim 1 of gate_up_proj 16 is not divisible by 2 times the tp size 3; pad it to 18\n"
        "  - experts: dim 2 of down_proj 8 ... the tp size 3; pad it to 9"
    )
    with pytest.raises(PlanError, match=says(text)):
        plan_report(model, 3, plan_from_hf(model))
    model._tp_plan.pop("experts.down_proj")
    with pytest.raises(PlanError) as caught:
        plan_report(model, 2, plan_from_hf(model))
    assert str(caught.value) == (
        "experts: ShardedExperts sums the output over the ranks, but 'down_proj' of Experts is whole on every rank "
        "and would count once for each; name a layout that shards it"
    )
    report = plan_report(Mixture("packed_colwise"), 2, plan_from_hf(Mixture("packed_colwise")))
    assert [(row.placement, row.local_shape) for row in report.rows] == [
        ("Shard(1)", (3, 8, 4)),
        ("Shard(2)", (3, 4, 4)),
    ]
