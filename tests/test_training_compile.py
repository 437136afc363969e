"""Nothing of the training functions breaks a compiled graph."""

from __future__ import annotations

import torch
import training_checks as checks
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Shard

import namedmesh
from namedmesh import training


def compiled_step() -> list[float]:
    mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2)
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
    scaled = plain.grad
    fill()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    found = torch.compile(clip, backend=counter, fullgraph=True)()
    differences.append((found - expected).abs().item())
    assert plain.grad is not None
    assert scaled is not None
    differences.append((plain.grad - scaled).abs().max().item())
    assert counter.frame_count == 1
    torch.distributed.barrier()
    mesh.close()
    return differences


def test_loss_and_clipping_are_one_graph_each() -> None:
    for differences in run_ranks(8, compiled_step):
        assert max(differences) < 1e-9
