"""Experts with gate and up in one weight: each rank keeps its part of both, in the order of the whole weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from messages import says
from ranks import run_ranks
from test_tp_collectives import Traffic
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from tp_compare import sharded, tp_mesh, training_difference, whole
from tp_models import Net

from namedmesh import training
from namedmesh._torch import TORCH
from namedmesh.errors import PlanError
from namedmesh.tensor_parallel import ShardedExperts, local, parallelize, plan_from_hf, plan_report

needs_blocks = pytest.mark.skipif(not TORCH, reason="torch up to 2.11 cannot gather DTensors of blocks")


def mixture(style: str, *, is_concatenated: bool = True) -> Any:
    """A router and three experts, stacked, with gate and up fused as transformers does; they state their plan."""

    def experts(m: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        fused = torch.einsum("ti,koi->tko", x, m.gate_up_proj)
        gate, up = fused.chunk(2, -1) if m.is_concatenated else (fused[..., ::2], fused[..., 1::2])
        out = torch.einsum("tko,kio->tki", torch.tanh(gate) * up, m.down_proj)
        picked = out.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (picked * weights.unsqueeze(-1)).sum(1)

    def compute(m: Any, x: Tensor) -> Any:
        weights, chosen = m.router(x).softmax(-1).topk(2)
        return m.experts(x, chosen, weights)

    shapes = {"gate_up_proj": (3, 16, 4), "down_proj": (3, 4, 8)}
    stacked: Any = Net(experts, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    stacked.is_concatenated = is_concatenated
    model: Any = Net(compute, router=nn.Linear(4, 3), experts=stacked)
    model._tp_plan = {
        "experts.gate_up_proj": style,
        "experts.down_proj": "rowwise",
        "experts": "moe_tp_experts",
    }
    return model


def mixture_difference(style: str, is_concatenated: bool) -> float:
    torch.manual_seed(0)
    reference = mixture(style, is_concatenated=is_concatenated).double()
    model = sharded(reference, plan_from_hf(reference))
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
    reference = mixture("packed_colwise").double()
    model = sharded(reference, plan_from_hf(reference))
    model.compile(backend="aot_eager", fullgraph=True)
    return training_difference(model, reference, torch.randn(6, 4, dtype=torch.float64), steps=1)


@needs_blocks
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_fused_experts_compile_to_one_graph() -> None:
    assert max(run_ranks(2, compiled_difference)) < 1e-12


def traffic(tokens: int) -> tuple[Traffic, Traffic]:
    model = parallelize(mixture("packed_colwise"), tp_mesh(), plan_from_hf(mixture("packed_colwise")))
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


def drawn() -> list[list[float]]:
    found = []
    for is_sharded in (False, True):
        model: nn.Module = mixture("packed_colwise").double()
        if is_sharded:
            parallelize(model, tp_mesh(), plan_from_hf(model))
        training.init_parameters(model, 5)
        found.append(torch.cat([whole(each.detach()).flatten() for each in model.parameters()]).tolist())
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
    with pytest.raises(PlanError, match="'gate_up_proj' of Net fused along its first dim"):
        plan_report(mixture("packed_colwise"), 1, plan)


def test_before_torch_2_12_fused_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HAS_BLOCKS", False)
    model = mixture("packed_colwise")
    with pytest.raises(PlanError, match=r"experts: ShardedExperts with fused=.* needs torch 2\.12 or newer"):
        plan_report(model, 2, plan_from_hf(model))
    # In rows of gate and up by turns nothing is fused.
    plan_report(
        mixture("colwise", is_concatenated=False), 2, plan_from_hf(mixture("colwise", is_concatenated=False))
    )


@needs_blocks
def test_fused_halves_that_do_not_divide() -> None:
    model = mixture("packed_colwise")
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
        "experts: ShardedExperts sums the output over the ranks, but 'down_proj' of Net is whole on every rank "
        "and would count once for each; name a layout that shards it"
    )
    report = plan_report(mixture("packed_colwise"), 2, plan_from_hf(mixture("packed_colwise")))
    assert [(row.placement, row.local_shape) for row in report.rows] == [
        ("Shard(1)", (3, 8, 4)),
        ("Shard(2)", (3, 4, 4)),
    ]
