"""Nothing of the training functions breaks a compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training_checks as checks
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Shard

import namedmesh
from namedmesh import training
from namedmesh._torch import TORCH
from namedmesh.tensor_parallel import ExpertParallel, parallelize


def compiled_step() -> list[float]:
    mesh = namedmesh.init_mesh(dp=2, cp=2)
    counter = CompileCounterWithBackend("eager")
    logits = torch.randn(
        4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    targets = torch.tensor([1, 2, checks.IGNORED, 3])

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return training.token_mean(total, (targets != checks.IGNORED).sum(), mesh)

    differences = []
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    for some in (targets, targets.flip(0)):
        found, expected = compiled(logits, some), loss(logits, some)
        differences.append((found - expected).abs().item())
        (one,), (other,) = (torch.autograd.grad(each, logits) for each in (found, expected))
        differences.append((one - other).abs().max().item())
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()

    mesh = namedmesh.init_mesh(dp=2, tp=2)
    plain = nn.Parameter(torch.zeros(3))
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["tp"], [Shard(0)]))
    both = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh["dp", "tp"], [Shard(0), Shard(0)]))

    def fill() -> None:
        for parameter in (plain, sharded, both):
            parameter.grad = torch.full_like(parameter, 3.0)

    def clip() -> Tensor:
        return training.clip_grad_norm_([plain, sharded, both], 1.0, mesh)

    fill()
    expected = clip()
    scaled = [checks.whole(parameter.grad).clone() for parameter in (plain, sharded, both)]
    fill()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    # Up to torch 2.10 its own clip_grad_norm_ breaks the graph, and so does what it shares with ours.
    unbroken = TORCH.release >= (2, 11)
    found = torch.compile(clip, backend=counter, fullgraph=unbroken)()
    differences.append((found - expected).abs().item())
    for parameter, other in zip((plain, sharded, both), scaled, strict=True):
        differences.append((checks.whole(parameter.grad) - other).abs().max().item())
    assert counter.frame_count == 1 or not unbroken
    torch.distributed.barrier()
    mesh.close()
    return differences


class Experts(nn.Module):
    """One weight for each expert, without a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.weight = nn.Parameter(values)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        expert = torch.arange(counts.shape[0]).repeat_interleave(counts, output_size=tokens.shape[0])
        return torch.einsum("ti,tij->tj", tokens, self.weight[expert])


# How many tokens each of two ranks has for each of four experts.
COUNTS = (((3, 0, 1, 1), (0, 5, 0, 2)), ((0, 0, 0, 0), (1, 0, 2, 0)), ((0, 0, 0, 0), (0, 0, 0, 0)))


def travelling_tokens(compiled: bool) -> list[float]:
    """Experts on two ranks beside all of them on each: outputs, and gradients of tokens and of weights."""
    mesh = namedmesh.init_mesh(dp=2)
    mesh.add_view("expert", edp=1, ep=2)
    here: Any = parallelize(Experts(), mesh["ep"], ExpertParallel())
    training.set_expert_divisor(here, mesh)
    call: Any = here
    if compiled:
        call = torch.compile(here, backend="aot_eager", fullgraph=True)
    differences = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for counts_of_ranks in COUNTS:
            counts = torch.tensor(counts_of_ranks[mesh.rank("dp")])
            tokens = torch.randn(int(counts.sum()), 3, dtype=torch.float64).requires_grad_()
            everywhere = Experts()
            expected, found = everywhere(tokens, counts), call(tokens, counts)
            wanted = torch.autograd.grad(expected.square().sum(), [tokens, everywhere.weight])
            got = torch.autograd.grad(found.square().sum(), [tokens, here.weight])
            weights = wanted[1] / 2
            torch.distributed.all_reduce(weights)
            pairs = [(found, expected), (got[0], wanted[0]), (checks.whole(got[1]), weights)]
            differences += [(one - other).abs().max().item() for one, other in pairs if one.numel()]
    torch.distributed.barrier()
    mesh.close()
    return differences


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_travel_to_their_experts_and_back(compiled: bool) -> None:
    for differences in run_ranks(2, travelling_tokens, compiled):
        assert max(differences) < 1e-9


def test_loss_and_clipping_are_one_graph_each() -> None:
    for differences in run_ranks(4, compiled_step):
        assert max(differences) < 1e-9
