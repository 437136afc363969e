"""Stacked experts: shards of every expert, fused gate and up, and expert parallelism."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import error_of
from ranks import run_ranks
from tensors import compute_difference, full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from tp_compare import OperationRecorder, assert_no_difference, get_plan_error, make_tp_mesh
from tp_models import Net, make_stacked_experts

import namedmesh
from namedmesh import NamedMesh
from namedmesh.tensor_parallel import ExpertParallel, ExpertTensorParallel, parallelize

EXPERTS, WIDTH = 4, 4
COUNTS = torch.full((EXPERTS,), 2)
SAME_TOKENS = "GradientError: ranks 0, 1 of the 2 ranks that share experts send the same tokens"


# --- expert tensor parallelism ------------------------------------------------------------------


def make_fused_experts() -> Any:
    """Make experts with gate and up in one weight, as most models of Hugging Face have them."""

    def compute(m: Any, x: Tensor) -> Tensor:
        gate, up = torch.einsum("...i,eoi->...eo", x, m.gate_up).chunk(2, -1)
        return torch.einsum("...eo,eio->...i", torch.sigmoid(gate) * up, m.down)

    torch.manual_seed(0)
    gate_up = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH))
    down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))
    return Net(compute, gate_up=gate_up, down=down).double()


FUSED = ExpertTensorParallel({"gate_up": Shard(-2), "down": Shard(-1)}, fused={"gate_up": 2})


def make_sharded(axes: tuple[str, ...] = ("tp",)) -> Any:
    """Make the experts sharded over tp, and over dp with FSDP2 if it is one of the axes."""
    mesh = make_tp_mesh() if axes == ("tp",) else dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    model: Any = parallelize(make_fused_experts(), mesh["tp"], FUSED)
    return fully_shard(model, mesh=mesh["dp"]) if "dp" in axes else model


def train_and_save(axes: tuple[str, ...], directory: str) -> list[float]:
    """Train one step and save a checkpoint, which experts sharded over tp only load.

    Returns:
        The relative differences of the gradients and the weights from one process.
    """
    reference: Any = make_fused_experts()
    model = make_sharded(axes)
    x = random_tensor(3, WIDTH, seed=0)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (model, reference)]
    for trained in (model, reference):
        trained(x).square().sum().backward()
    differences = [compute_difference(full_tensor(model.gate_up.grad).flatten(1, 2), reference.gate_up.grad)]
    for optimizer in optimizers:
        optimizer.step()
    assert model.gate_up.shape == (EXPERTS, 2, 8, WIDTH)
    assert model(x).shape == x.shape
    dcp.save(model.state_dict(), checkpoint_id=directory)
    loaded = make_sharded()
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=directory)
    loaded.load_state_dict(state)
    for trained in (model, loaded):
        differences.append(compute_difference(full_tensor(trained.gate_up).flatten(1, 2), reference.gate_up))
        differences.append(compute_difference(full_tensor(trained.down), reference.down))
    return [difference / 100 for difference in differences]


@pytest.mark.ci
@pytest.mark.filterwarnings("default")  # torch's own, of its checkpoints
@pytest.mark.parametrize(("ranks", "axes"), [(2, ("tp",)), (4, ("dp", "tp"))])
def test_fused_experts_train_and_are_saved(ranks: int, axes: tuple[str, ...], tmp_path: Path) -> None:
    assert_no_difference(run_ranks(ranks, train_and_save, axes, str(tmp_path)), cases=5)


def test_replicated_parameters_and_wrong_blocks_raise() -> None:
    style = ExpertTensorParallel({"gate_up": Shard(1)}, fused={"up": 2})
    message = get_plan_error(make_fused_experts(), style)
    assert "'down' of Net is replicated and would count once per rank" in message
    assert "'up' names blocks" in message


# --- expert parallelism -------------------------------------------------------------------------


def make_mixture() -> Any:
    """Make the mixture of experts of the guide: a router sends each token to one expert."""

    def compute(m: Any, x: Tensor) -> Tensor:
        best, chosen = m.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        output: Tensor = m.experts(x[order], chosen.bincount(minlength=EXPERTS)) * best[order, None]
        return x + output[order.argsort()]

    torch.manual_seed(0)
    model: Any = Net(compute, router=nn.Linear(WIDTH, EXPERTS), experts=make_stacked_experts()).double()
    nn.init.normal_(model.experts.weight)
    return model


def make_parallel_experts(mesh: NamedMesh, **sizes: Any) -> Any:
    """Make the experts without a router, over a view with an axis ep."""
    mesh.add_view("expert", **sizes)
    return parallelize(make_mixture().experts, mesh["ep"], ExpertParallel(mesh))


def step_experts(experts: Any, tokens: Tensor) -> None:
    """Train one step, before which the ranks compare their tokens."""
    experts(tokens, COUNTS).square().sum().backward()
    torch.optim.SGD(experts.parameters(), lr=0.0).step()


def make_batch(index: int) -> Tensor:
    return random_tensor(16, WIDTH, seed=index)


def compare_expert_grads(tp: int, *, shard_tokens: bool = False) -> float:
    """Train as the guide does; return the difference of the experts' gradients from one process.

    Args:
        tp: the size of tp.
        shard_tokens: whether the ranks of tp have different tokens.
    """
    mesh = namedmesh.init_mesh(dp=-1, tp=tp)
    mesh.add_view("expert", edp=-1, ep=2)
    model = make_mixture()
    parallelize(model.experts, mesh["ep"], ExpertParallel(mesh))
    fully_shard(model.experts, mesh=mesh["edp"])
    fully_shard(model, mesh=mesh["dp"])
    x = make_batch(mesh.rank("dp"))
    if shard_tokens:
        x = x.chunk(tp)[mesh.rank("tp")]
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    reference = make_mixture()
    dp = mesh.size("dp")
    for index in range(dp):
        (reference(make_batch(index)).square().sum() / dp).backward()
    return compute_difference(full_tensor(model.experts.weight.grad), reference.experts.weight.grad)


@pytest.mark.ci
@pytest.mark.parametrize(("tp", "shard_tokens"), [(1, False), (2, True)])
def test_gradients_of_experts_equal_one_process(tp: int, shard_tokens: bool) -> None:
    compare = partial(compare_expert_grads, tp, shard_tokens=shard_tokens)
    assert_no_difference(run_ranks(4, compare), 1e-10)


@pytest.mark.ci
def test_the_same_tokens_on_several_ranks_raise() -> None:
    for message in run_ranks(4, partial(error_of, partial(compare_expert_grads, 2))):
        assert message.startswith(f"{SAME_TOKENS}, whose gradients would")
        assert "SequenceParallel" in message
        assert "etp" in message


def send_same_tokens_to_replicas() -> str:
    """Give the same tokens to replicas of all experts; one rank has rounded them."""
    mesh = namedmesh.init_mesh(dp=1, tp=2)
    experts = make_parallel_experts(mesh, edp=2, ep=1)
    tokens = make_batch(0)[:8]
    if mesh.rank("tp"):
        tokens = tokens.bfloat16().double()
    return error_of(lambda: step_experts(experts, tokens))


def record_permutations() -> None:
    mesh = namedmesh.init_mesh(dp=-1)
    experts = make_parallel_experts(mesh, edp=1, ep=2)
    rank = torch.distributed.get_rank()
    counts = torch.tensor([[3, 0, 1, 4], [2, 1, 5, 0]][rank])  # different on each rank, and zeros
    tokens = random_tensor(8, WIDTH, seed=rank).requires_grad_()
    with OperationRecorder() as forward:
        output = experts(tokens, counts)
    with OperationRecorder() as backward:
        output.sum().backward()
    expected = make_mixture().experts(tokens.detach(), counts)
    assert compute_difference(output, expected) < 1e-12
    operations = {*forward.names, *backward.names}
    # A GPU sorts the indices of index_put, too.
    assert not operations & {"sort", "argsort", "index_put", "index_put_", "_index_put_impl_", "index_add_"}
    assert backward.names.count("index_select") == 2
    dist.barrier()


def test_tokens_are_permuted_without_a_sort() -> None:
    run_ranks(2, record_permutations)


def test_replicas_of_experts_with_the_same_tokens_raise() -> None:
    for message in run_ranks(2, send_same_tokens_to_replicas):
        assert message.startswith(SAME_TOKENS)


def run_in_pipeline() -> list[str]:
    """Return the errors of a step, if an earlier forward has the same or different tokens."""
    messages = []
    for first in (make_batch(0), make_batch(dist.get_rank())):
        mesh = namedmesh.init_mesh(pp=2, dp=2)
        experts = make_parallel_experts(mesh, pp=2, edp=1, ep=2)
        experts(first[:8], COUNTS)
        messages.append(error_of(partial(step_experts, experts, make_batch(0)[:8])))
        mesh.close()
    return messages


@pytest.mark.ci
def test_the_tokens_of_the_last_forward_are_compared() -> None:
    for messages in run_ranks(4, run_in_pipeline):
        assert all(message.startswith(SAME_TOKENS) for message in messages)


def run_without_signal() -> int:
    """Run tokens that cannot be told apart, or are not compared; none of them may raise."""
    mesh = namedmesh.init_mesh(dp=2)
    experts = make_parallel_experts(mesh, edp=1, ep=2)
    step_experts(experts, torch.zeros(8, WIDTH, dtype=torch.float64))
    with torch.no_grad():
        experts(make_batch(0)[:8], COUNTS)
    # Different tokens with the same norm.
    step_experts(experts, nn.functional.normalize(make_batch(mesh.rank("dp"))[:8], dim=-1))
    # The tokens of a later step are not compared.
    step_experts(experts, make_batch(0)[:8])
    mesh.close()
    return int(isinstance(experts.weight.grad, DTensor))


def test_tokens_that_cannot_be_compared_do_not_raise() -> None:
    assert run_ranks(2, run_without_signal) == [1, 1]
