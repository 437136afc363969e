"""Experts on ranks of their own: tokens travel to them and back, and what is no stack of experts is refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import train
from messages import error_of
from ranks import fake_world, run_ranks
from tensors import apart, numbers
from torch import Tensor, nn

import namedmesh
from namedmesh.tensor_parallel import ExpertParallel, parallelize


class Experts(nn.Module):
    """One weight for each expert, without a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 3, 3, seed=0))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(counts.shape[0]).repeat_interleave(counts, output_size=tokens.shape[0])
        return torch.einsum("ti,tij->tj", tokens, self.weight[expert])


# How many tokens each of two ranks has for each of four experts.
COUNTS = (((3, 0, 1, 1), (0, 5, 0, 2)), ((0, 0, 0, 0), (1, 0, 2, 0)), ((0, 0, 0, 0), (0, 0, 0, 0)))


def travelling_tokens(compiled: bool) -> None:
    """Experts on two ranks beside all of them on each: outputs, and gradients of tokens and of weights."""
    mesh = namedmesh.init_mesh(dp=2)
    mesh.add_view("expert", edp=1, ep=2)
    here: Any = parallelize(Experts(), mesh["ep"], ExpertParallel(mesh))
    call: Any = here
    if compiled:
        call = torch.compile(here, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for counts_of_ranks in COUNTS:
            counts = torch.tensor(counts_of_ranks[mesh.rank("dp")])
            tokens = torch.randn(int(counts.sum()), 3, dtype=torch.float64).requires_grad_()
            everywhere = Experts()
            expected, found = everywhere(tokens, counts), call(tokens, counts)
            wanted = torch.autograd.grad(expected.square().sum(), [tokens, everywhere.weight])
            got = torch.autograd.grad(found.square().sum(), [tokens, here.weight])
            weights = wanted[1].clone()
            torch.distributed.all_reduce(weights)
            weights /= 2  # as many ranks as everything else is averaged over
            for one, other in ((found, expected), (got[0], wanted[0]), (got[1], weights)):
                assert apart(one, other) < 1e-9
    torch.distributed.barrier()
    mesh.close()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_travel_to_their_experts_and_back(compiled: bool) -> None:
    run_ranks(2, travelling_tokens, compiled)


def test_what_is_no_stack_of_experts_is_refused() -> None:
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)

        def refused(module: nn.Module) -> str:
            return error_of(lambda: parallelize(module, mesh["ep"], ExpertParallel(mesh)))

        takes = (
            "PlanError: the model: ExpertParallel takes a module that owns parameters (experts, ...), but "
        )
        mixed = "ConvTranspose1d owns {'weight': (8, 3, 2), 'bias': (3,)}"
        assert refused(nn.ConvTranspose1d(8, 3, 2)) == takes + mixed
        assert refused(nn.ReLU()) == takes + "ReLU owns none"
        with mock.patch.object(train, "EXPERTS", 6):
            assert "dim 0 of gate 6 is not divisible" in refused(train.Experts(2, 2))
        experts = parallelize(train.Experts(2, 2), mesh["ep"], ExpertParallel(mesh))
        with pytest.raises(RuntimeError, match="Cannot concatenate overlapping meshes"):  # torch's
            refused(experts)  # a second time
        assert error_of(lambda: experts(torch.ones(3, 2), torch.tensor([2, 1]))) == (
            "ShapeError: the numbers of tokens have shape (2,); pass one number for each of the 8 experts"
        )
        mesh.close()
