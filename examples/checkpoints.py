"""Train for some steps, save, and go on in any layout: ``torchrun --nproc-per-node 4 examples/checkpoints.py TP DIRECTORY``."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Linear, Sequential
from torch.utils.data import DataLoader, DistributedSampler

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel

STEPS = 4  # of each start of the job

mesh = namedmesh.init_mesh(dp=-1, tp=int(sys.argv[1]))
training.seed_all(0, mesh)
model = Sequential(Linear(16, 64), GELU(), Linear(64, 16)).to(mesh.device)
namedmesh.parallelize(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
training.init_parameters(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
samples = torch.linspace(-1, 1, 64 * 16).view(64, 16).sin()
sampler = DistributedSampler(samples, shuffle=False, **training.sampler_kwargs(mesh))
batches = list(DataLoader(samples, 8 // mesh.size("dp"), sampler=sampler))

with training.Checkpoints(sys.argv[2], mesh, keep=2, async_=True) as checkpoints:
    start = checkpoints.resume_or_start(model, optimizer)["step"]  # 0 where there is no checkpoint yet
    for step in range(start, start + STEPS):
        batch = batches[step % len(batches)].to(mesh.device)
        loss = (model(batch) - batch.roll(1, -1)).square().mean()
        loss.backward()
        training.clip_grad_norm_(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        mean = training.mean_loss(loss, mesh)
        if mesh.global_rank == 0:
            print(f"step {step} in {mesh.layout}: loss {mean.item():.4f}")
    checkpoints.save(start + STEPS, model, optimizer)  # in the background; the end of the block waits for it
mesh.close()
dist.destroy_process_group()
