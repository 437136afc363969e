"""Name the axes, shard a model over two of them, train: ``torchrun --nproc-per-node 8 examples/quickstart.py``."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import GELU, Linear, Sequential

import namedmesh
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

mesh = namedmesh.init_mesh(dp=-1, tp=2)  # -1: whatever is left of the ranks
torch.manual_seed(0)  # the same weights on every rank, of which each keeps its shard
model = Sequential(Linear(64, 256), GELU(), Linear(256, 64)).to(mesh.device)
parallelize(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
if dist.get_rank() == 0:
    shards = [tuple(each.to_local().shape) for each in model.parameters() if isinstance(each, DTensor)]
    print(f"{mesh.explain()}\n  of weights (256, 64) and (64, 256) it has {shards[0]} and {shards[2]}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(mesh.rank("dp"))  # the ranks of one tp group have the same samples
batch = torch.randn(32, 64, device=mesh.device)
for step in range(4):
    (loss := (model(batch) - batch).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / mesh.size("dp"), group=mesh.group("dp"))
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean:.4f}")
dist.destroy_process_group()
