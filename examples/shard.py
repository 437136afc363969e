"""Shard a transformer block over the ranks of one axis: ``torchrun --nproc-per-node 2 examples/shard.py``."""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import namedmesh
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, plan_report

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    """Attention and a feed-forward network; what a rank has of the heads it reads from the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(rows, tokens, width)``."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # -1: this rank's heads
            for layer in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        update: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + update


PLAN = {
    "[qkv]": ColwiseParallel(),
    "o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}

if __name__ == "__main__":
    mesh = namedmesh.init_mesh(tp=-1)
    torch.manual_seed(0)  # the same weights and samples on every rank
    model, x = Block().to(mesh.device), torch.randn(2, 8, WIDTH, device=mesh.device)
    whole = model(x)
    report = plan_report(model, mesh.size("tp"), PLAN)
    namedmesh.parallelize(model, mesh["tp"], PLAN)
    sharded = model(x)
    sharded.square().mean().backward()  # at the first backward the ranks compare what must be equal
    if mesh.global_rank == 0:
        print(report)
        print("output of the whole model:", torch.allclose(sharded, whole, atol=1e-5))
    mesh.close()
    dist.destroy_process_group()
