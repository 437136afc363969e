"""Send tokens to the ranks that have their experts.

Run it: ``torchrun --nproc-per-node 4 examples/experts.py``
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ExpertParallel, parallelize

EXPERTS, WIDTH = 8, 16


class Experts(nn.Module):
    """The stacked weights of all experts, for tokens that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = zip(tokens.split(counts.tolist()), self.weight, strict=True)
        return torch.cat([part @ weight for part, weight in parts])


class Mixture(nn.Module):
    """A router that gives each token to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        output = self.experts(x[order], chosen.bincount(minlength=EXPERTS)) * best[order, None]
        return x + output[order.argsort()]


mesh = namedmesh.init_mesh(dp=-1)
mesh.add_view("expert", edp=-1, ep=2)  # the same ranks again: each group of 2 has all experts
model = Mixture().to(mesh.device)
parallelize(model.experts, mesh["ep"], ExpertParallel(mesh))
fully_shard(model.experts, mesh=mesh["edp"])  # the ranks with the same experts
fully_shard(model, mesh=mesh["dp"])
training.init_parameters(model, seed=0, distribution=lambda *_: (0.0, 0.3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
generator = torch.Generator().manual_seed(mesh.rank("dp"))
x = torch.randn(64, WIDTH, generator=generator).to(mesh.device)
for step in range(20):
    loss = (model(x) - x.roll(1, -1)).square().mean()
    loss.backward()
    training.clip_grad_norm_(model.parameters(), 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    mean = training.mean_loss(loss, mesh)
    if mesh.global_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {mean.item():.3f}")
if mesh.global_rank == 0:
    print(mesh.explain(rank=0))
dist.destroy_process_group()
