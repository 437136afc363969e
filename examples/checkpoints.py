"""Train, save, resume in any layout.

Run it: ``torchrun --nproc-per-node 4 examples/checkpoints.py TP DIRECTORY``
"""

import sys
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Linear, Sequential
from torch.utils.data import DataLoader, DistributedSampler

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

STEPS = 4  # in each run of the script

mesh = namedmesh.init_mesh(dp=-1, tp=int(sys.argv[1]))
training.seed_all(0, mesh)
model = Sequential(Linear(16, 64), GELU(), Linear(64, 16)).to(mesh.device)
parallelize(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
training.init_parameters(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
samples = torch.linspace(-1, 1, 64 * 16).view(64, 16).sin()
sampler = DistributedSampler(samples, seed=0, **training.sampler_kwargs(mesh))  # over dp
loader = DataLoader(samples, 8 // mesh.size("dp"), sampler=sampler, generator=training.data_generator())


def batches(step: int) -> Iterator[Tensor]:
    """Yield the batches after ``step`` steps. A step has 8 samples, with any number of dp ranks."""
    while True:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)  # its order depends on seed and epoch
        yield from islice(loader, done, None)
        step += len(loader) - done


with training.CheckpointManager(sys.argv[2], mesh, keep=2, async_=True) as checkpoints:
    start = checkpoints.resume_or_start(model, optimizer)["step"]  # 0 without a checkpoint
    for step, loaded in enumerate(islice(batches(start), STEPS), start):
        training.check_same_batch(loaded, mesh)  # equal in a tp group, different along dp
        batch = loaded.to(mesh.device)
        loss = (model(batch) - batch.roll(1, -1)).square().mean()
        loss.backward()
        training.clip_grad_norm_(model.parameters(), 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        mean = training.mean_loss(loss, mesh)
        if mesh.global_rank == 0:
            print(f"step {step} in {mesh.layout}: loss {mean.item():.4f}")
    checkpoints.save(start + STEPS, model, optimizer)  # the end of the block waits for it
dist.destroy_process_group()
