"""Expert parallelism compared with replicated experts, and modules that it does not accept."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import train
from messages import error_of
from plain_experts import Experts
from ranks import fake_world, run_ranks
from tensors import compute_difference
from torch import nn

import namedmesh
from namedmesh.tensor_parallel import ExpertParallel, parallelize

# In several batches, the number of tokens of each of two ranks for each of four experts.
COUNTS = (((3, 0, 1, 1), (0, 5, 0, 2)), ((0, 0, 0, 0), (1, 0, 2, 0)), ((0, 0, 0, 0), (0, 0, 0, 0)))


def check_expert_parallel(compiled: bool) -> None:
    """Outputs and gradients of tokens and weights equal those of replicated experts."""
    mesh = namedmesh.init_mesh(dp=2)
    mesh.add_view("expert", edp=1, ep=2)
    local_experts: Any = parallelize(Experts(), mesh["ep"], ExpertParallel(mesh))
    run_experts: Any = local_experts
    if compiled:
        run_experts = torch.compile(local_experts, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for counts_by_rank in COUNTS:
            counts = torch.tensor(counts_by_rank[mesh.rank("dp")])
            tokens = torch.randn(int(counts.sum()), 3, dtype=torch.float64).requires_grad_()
            replicated = Experts()
            expected = replicated(tokens, counts)
            output = run_experts(tokens, counts)
            expected_grads = torch.autograd.grad(expected.square().sum(), [tokens, replicated.weight])
            token_grad, weight_grad = torch.autograd.grad(
                output.square().sum(), [tokens, local_experts.weight]
            )
            expected_token_grad, expected_weight_grad = expected_grads
            # Averaged over all ranks, as the gradients of everything else.
            expected_weight_grad = expected_weight_grad.clone()
            torch.distributed.all_reduce(expected_weight_grad)
            expected_weight_grad /= 2
            assert compute_difference(output, expected) < 1e-9
            assert compute_difference(token_grad, expected_token_grad) < 1e-9
            assert compute_difference(weight_grad, expected_weight_grad) < 1e-9
    torch.distributed.barrier()
    mesh.close()


# torch.compile instantiates a deprecated class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_expert_parallelism_equals_replicated_experts(compiled: bool) -> None:
    run_ranks(2, check_expert_parallel, compiled)


def test_a_module_without_stacked_experts_is_an_error() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)

        def find_error(module: nn.Module) -> str:
            return error_of(lambda: parallelize(module, mesh["ep"], ExpertParallel(mesh)))

        takes = (
            "PlanError: the model: ExpertParallel takes a module that owns parameters (experts, ...), but "
        )
        mixed = "ConvTranspose1d owns {'weight': (8, 3, 2), 'bias': (3,)}"
        assert find_error(nn.ConvTranspose1d(8, 3, 2)) == takes + mixed
        assert find_error(nn.ReLU()) == takes + "ReLU owns none"
        with mock.patch.object(train, "EXPERTS", 6):
            message = "PlanError: the model: the ep size 4 does not divide 6 experts; choose one that does"
            assert find_error(train.Experts(2, 2)) == message
        experts = parallelize(train.Experts(2, 2), mesh["ep"], ExpertParallel(mesh))
        with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):  # torch's
            find_error(experts)  # a second time
        assert error_of(lambda: experts(torch.ones(3, 2), torch.tensor([2, 1]))) == (
            "ShapeError: the numbers of tokens have shape (2,); pass one number for each of the 8 experts"
        )
        mesh.close()


@pytest.mark.parametrize(
    ("sizes", "view", "message"),
    [
        ({"pp": 2, "dp": 4}, {"edp": -1, "ep": 2}, "groups along edp span several pipeline stages"),
        ({"pp": 2, "dp": 4}, {"edp": 1, "ep": 8}, "groups along ep span several pipeline stages"),
        ({"dp": 8}, {"edp": 2, "ep": 2, "etp": 2}, "etp=2 must have size 1, or the same ranks as tp=1"),
        ({"dp": 2, "tp": 4}, {"edp": 2, "ep": 2, "etp": 2}, "etp=2 must have size 1, or the same ranks"),
        ({"pp": 2, "dp": 4}, {"pp": 2, "edp": 2, "ep": 2}, ""),
        ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "edp": 1, "ep": 2, "etp": 2}, ""),
        ({"dp": 4, "tp": 2}, {"edp": 2, "ep": 4}, ""),
    ],
)
def test_experts_on_axes_that_would_hang_or_be_wrong_are_an_error(
    sizes: dict[str, int], view: dict[str, int], message: str
) -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(**sizes, device="cpu")  # type: ignore[arg-type]
        mesh.add_view("expert", **view)  # type: ignore[arg-type]
        found = error_of(lambda: ExpertParallel(mesh))
        assert found.startswith(f"LayoutError: {message}") if message else not found
        mesh.close()
