"""Lose a host, and train on with the others: a job that restarts by itself in a smaller layout.

Run it on each of at most two hosts; a restart takes those that are left::

    torchrun --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node0:29500 \
        examples/elastic.py DIRECTORY STEPS
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Linear, Sequential

import namedmesh
from namedmesh import training

BATCH = 8  # samples of a step, on any number of ranks that divides it

# dp=-1: all ranks of this attempt. With NCCL the timeout ends the ranks that wait for one that is lost.
mesh = namedmesh.init_mesh(dp=-1, timeout=timedelta(minutes=5))
model = Sequential(Linear(16, 64), GELU(), Linear(64, 16)).to(mesh.device)
fully_shard(model, mesh=mesh["dp"])
training.init_parameters(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

with training.CheckpointManager(Path(sys.argv[1]), mesh, keep=2) as checkpoints:
    # The first attempt starts at 0, and every other one at the last step that was saved.
    start = checkpoints.resume_or_start(model, optimizer)["step"]
    for step in range(start, int(sys.argv[2])):
        # The batch is a function of the step, so the step is the position in the data.
        samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
        batch = samples[mesh.rank("dp") :: mesh.size("dp")].to(mesh.device)
        loss = (model(batch) - batch.roll(1, -1)).square().mean()
        loss.backward()
        training.clip_grad_norm_(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        mean = training.mean_loss(loss, mesh)
        if mesh.global_rank == 0:
            print(f"step {step} in {mesh.layout}: loss {mean.item():.4f}", flush=True)
        checkpoints.save(step + 1, model, optimizer)
dist.destroy_process_group()
