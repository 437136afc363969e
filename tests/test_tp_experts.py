"""Stacked experts: shards of all of them, gate and up in one weight, or whole ones to which the tokens travel."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import error_of
from ranks import run_ranks
from tensors import apart, numbers, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from tp_compare import assert_no_difference, get_plan_error, make_tp_mesh
from tp_models import Net, stacked_experts

import namedmesh
from namedmesh import NamedMesh
from namedmesh.tensor_parallel import ExpertParallel, ExpertTensorParallel, parallelize

EXPERTS, WIDTH = 4, 4
COUNTS = torch.full((EXPERTS,), 2)
SAME_TOKENS = "GradientError: ranks 0, 1 of the 2 ranks that share experts send the same tokens"


# --- a shard of every expert ----------------------------------------------------------------------------------


def packed() -> Any:
    """Gate and up in one weight, as most models of Hugging Face have them."""

    def compute(m: Any, x: Tensor) -> Tensor:
        gate, up = torch.einsum("...i,eoi->...eo", x, m.gate_up).chunk(2, -1)
        return torch.einsum("...eo,eio->...i", torch.sigmoid(gate) * up, m.down)

    torch.manual_seed(0)
    gate_up = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH))
    down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))
    return Net(compute, gate_up=gate_up, down=down).double()


PACKED = ExpertTensorParallel({"gate_up": Shard(-2), "down": Shard(-1)}, fused={"gate_up": 2})


def sharded(dims: tuple[str, ...] = ("tp",)) -> Any:
    mesh = make_tp_mesh() if dims == ("tp",) else dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    model: Any = parallelize(copy.deepcopy(packed()), mesh["tp"], PACKED)
    return fully_shard(model, mesh=mesh["dp"]) if "dp" in dims else model


def packed_difference(dims: tuple[str, ...], directory: str) -> list[float]:
    """A step, the weights, and those that another layout loads from a checkpoint."""
    reference: Any = packed()
    model, x = sharded(dims), numbers(3, WIDTH, seed=0)
    found = []
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for each in (model, reference):
        each(x).square().sum().backward()
    found.append(apart(whole(model.gate_up.grad).flatten(1, 2), reference.gate_up.grad))
    for optimizer in optimizers:
        optimizer.step()
    assert model.gate_up.shape == (EXPERTS, 2, 8, WIDTH)
    assert model(x).shape == x.shape
    dcp.save(model.state_dict(), checkpoint_id=directory)
    other = sharded()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=directory)
    other.load_state_dict(state)
    for each in (model, other):
        found.append(apart(whole(each.gate_up).flatten(1, 2), reference.gate_up))
        found.append(apart(whole(each.down), reference.down))
    return [value / 100 for value in found]


@pytest.mark.filterwarnings("default")  # torch's own, of its checkpoints
@pytest.mark.parametrize(("ranks", "dims"), [(2, ("tp",)), (4, ("dp", "tp"))])
def test_gate_and_up_in_one_weight_train_and_are_saved(
    ranks: int, dims: tuple[str, ...], tmp_path: Path
) -> None:
    assert_no_difference(run_ranks(ranks, packed_difference, dims, str(tmp_path)), cases=5)


def test_what_would_count_on_every_rank_is_refused() -> None:
    text = "'down' of Net is replicated and would count once per rank"
    assert text in get_plan_error(packed(), ExpertTensorParallel({"gate_up": Shard(1)}, fused={"up": 2}))
    assert "'up' names blocks" in get_plan_error(
        packed(), ExpertTensorParallel({"gate_up": Shard(1)}, fused={"up": 2})
    )


# --- whole experts --------------------------------------------------------------------------------------------


def mixture() -> Any:
    """The book's: a router that gives each token to one expert."""

    def compute(m: Any, x: Tensor) -> Tensor:
        best, chosen = m.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        output: Tensor = m.experts(x[order], chosen.bincount(minlength=EXPERTS)) * best[order, None]
        return x + output[order.argsort()]

    torch.manual_seed(0)
    model: Any = Net(compute, router=nn.Linear(WIDTH, EXPERTS), experts=stacked_experts()).double()
    nn.init.normal_(model.experts.weight)
    return model


def shared_experts(mesh: NamedMesh, **sizes: Any) -> Any:
    """The experts alone, over a view with an axis ep."""
    mesh.add_view("expert", **sizes)
    return parallelize(mixture().experts, mesh["ep"], ExpertParallel(mesh))


def batch(index: int) -> Tensor:
    return numbers(16, WIDTH, seed=index)


def trained(tp: int, *, own_tokens: bool = False) -> float:
    """How far the experts' gradients are from those of one process on all tokens, as the book's page trains them."""
    mesh = namedmesh.init_mesh(dp=-1, tp=tp)
    mesh.add_view("expert", edp=-1, ep=2)
    model = mixture()
    parallelize(model.experts, mesh["ep"], ExpertParallel(mesh))
    fully_shard(model.experts, mesh=mesh["edp"])
    fully_shard(model, mesh=mesh["dp"])
    ranks, reference = mesh.size("dp"), mixture()
    part = mesh.rank("tp") if own_tokens else 0
    x = batch(mesh.rank("dp"))
    x = x.chunk(tp)[part] if own_tokens else x
    model(x).square().sum().backward()
    for index in range(ranks):
        (reference(batch(index)).square().sum() / ranks).backward()
    return apart(whole(model.experts.weight.grad), reference.experts.weight.grad)


@pytest.mark.parametrize(("tp", "own_tokens"), [(1, False), (2, True)])
def test_the_experts_of_the_books_page_learn_as_fast_as_in_one_process(tp: int, own_tokens: bool) -> None:
    assert_no_difference(run_ranks(4, partial(trained, tp, own_tokens=own_tokens)), 1e-10)


def test_the_same_tokens_on_several_ranks_are_refused() -> None:
    for text in run_ranks(4, partial(error_of, partial(trained, 2))):
        assert text.startswith(f"{SAME_TOKENS}, whose gradients would")
        assert "SequenceParallel" in text
        assert "etp" in text


def copies_with_the_same_tokens() -> str:
    """With one rank for all experts it is the ranks of edp that would be averaged, and counted twice, if one rounds them, too."""
    mesh = namedmesh.init_mesh(dp=1, tp=2)
    experts, tokens = shared_experts(mesh, edp=2, ep=1), batch(0)[:8]
    return error_of(lambda: experts(tokens.bfloat16().double() if mesh.rank("tp") else tokens, COUNTS))


def test_copies_of_experts_with_the_same_tokens_are_refused() -> None:
    for text in run_ranks(2, copies_with_the_same_tokens):
        assert text.startswith(SAME_TOKENS)


def behind_a_pipeline() -> list[str]:
    """torch runs a stage on whatever lies in memory, to find shapes: that says nothing of the tokens, whatever it is."""
    told = []
    for first in (batch(0), batch(dist.get_rank())):
        mesh = namedmesh.init_mesh(pp=2, dp=2)
        experts = shared_experts(mesh, pp=2, edp=1, ep=2)
        experts(first[:8], COUNTS)
        told.append(error_of(partial(experts, batch(0)[:8], COUNTS)))
        mesh.close()
    return told


def test_the_first_forward_of_a_pipeline_is_not_compared_and_the_second_is() -> None:
    for told in run_ranks(4, behind_a_pipeline):
        assert all(text.startswith(SAME_TOKENS) for text in told)


def no_false_alarm() -> int:
    """Zeros, as pipelines send to find shapes, tokens of one size, evaluation, and no tokens at all, say nothing."""
    mesh = namedmesh.init_mesh(dp=2)
    experts = shared_experts(mesh, edp=1, ep=2)
    experts(torch.zeros(8, WIDTH, dtype=torch.float64), COUNTS)
    experts(torch.zeros(0, WIDTH, dtype=torch.float64), torch.zeros_like(COUNTS))
    with torch.no_grad():
        experts(batch(0)[:8], COUNTS)
    unit = nn.functional.normalize(batch(mesh.rank("dp"))[:8], dim=-1)
    experts(unit, COUNTS).sum().backward()
    experts(batch(0)[:8], COUNTS)  # the first forward has said it
    mesh.close()
    return int(isinstance(experts.weight.grad, DTensor))


def test_what_says_nothing_is_no_error() -> None:
    assert run_ranks(2, no_false_alarm) == [1, 1]
