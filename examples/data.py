"""Load the right samples and draw the right random numbers: ``torchrun --nproc-per-node 4 examples/data.py``."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import namedmesh
from namedmesh import training

mesh = namedmesh.init_mesh(dp=-1, tp=2)
training.seed_all(0, mesh)

samples = TensorDataset(torch.arange(16))
sampler = DistributedSampler(samples, seed=0, **training.sampler_kwargs(mesh))  # of dp, not of all ranks
loader = DataLoader(samples, 4, sampler=sampler, generator=training.data_generator())
for epoch in range(2):
    sampler.set_epoch(epoch)
    seen = []
    for batch in loader:
        training.check_same_batch(batch, mesh)  # the ranks of a tp group have one batch, those of dp others
        seen.append(batch[0])
    told: list[list[int]] = [[]] * mesh.size()
    dist.all_gather_object(told, torch.cat(seen).tolist())
    if mesh.global_rank == 0:
        print(f"epoch {epoch}: tp ranks 0 and 1 alike: {told[0] == told[1]}")
        print(f"  every sample once over dp: {sorted(told[0] + told[2]) == list(range(16))}")

# Three kinds of random numbers: for what tp ranks hold in common, for what each has of its own, and for samples.
drawn = {"default": torch.rand(1).item()}
for stream in ("tensor", "data"):
    with training.streams(stream):
        drawn[stream] = torch.rand(1).item()
of_all: list[dict[str, float]] = [{}] * mesh.size()
dist.all_gather_object(of_all, drawn)
if mesh.global_rank == 0:
    for name in drawn:
        over_tp = "equal" if of_all[0][name] == of_all[1][name] else "different"
        over_dp = "equal" if of_all[0][name] == of_all[2][name] else "different"
        print(f"{name}: {over_tp} on the ranks of tp, {over_dp} on those of dp")
mesh.close()
dist.destroy_process_group()
