"""A loop with HSDP x tp: ``torchrun --nproc-per-node 8 examples/hsdp_tp.py STEPS DIRECTORY``."""

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, cross_entropy, parallelize

WORDS, DIM, LENGTH, BATCH, MICROBATCHES = 32, 32, 16, 32, 2
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel(), "3": ColwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + update


mesh = namedmesh.init_mesh(dp_replicate=2, dp_shard=-1, tp=2)
training.seed_all(0, mesh)
blocks: list[Any] = [Block(), Block()]
head = nn.Linear(DIM, WORDS, bias=False)
model: Any = nn.Sequential(nn.Embedding(WORDS, DIM), *blocks, head).to(mesh.device)
# 1. Tensor parallelism. The logits stay sharded over the vocabulary.
parallelize(model, mesh["tp"], PLAN)
# 2. Compilation, recomputation around it, and FSDP2 last: each block first, then the model.
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in blocks:
    if mesh.device.type != "cpu":  # there it takes longer than these steps
        block.forward = torch.compile(block.forward)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    fully_shard(block, mesh=training.fsdp_mesh(mesh), mp_policy=precision)
fully_shard(model, mesh=training.fsdp_mesh(mesh), mp_policy=precision)
# 3. Values that do not depend on the layout, then the optimizer and the schedule.
training.init_parameters(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))
data = training.sampler_kwargs(mesh)  # the rank and the number of ranks along the data axes
with training.CheckpointManager(sys.argv[2], mesh) as checkpoints:
    restored = checkpoints.resume_or_start(model, optimizer)
    if "schedule" in restored:
        schedule.load_state_dict(restored["schedule"])
    for step in range(restored["step"], int(sys.argv[1])):
        # The global batch is a function of the step; each data-parallel rank takes its rows.
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(WORDS, (BATCH, 1), generator=generator) + torch.arange(LENGTH + 1)
        text = text[data["rank"] :: data["num_replicas"]].to(mesh.device) % WORDS
        tokens = training.count_tokens(text[:, 1:].numel(), mesh)  # of the step, on all ranks
        losses = []
        for number, rows in enumerate(text.chunk(MICROBATCHES)):
            model.set_requires_gradient_sync(number == MICROBATCHES - 1)  # reduce once a step
            loss_sum = cross_entropy(model(rows[:, :-1]), rows[:, 1:], mesh["tp"], reduction="sum")
            losses.append(training.normalize_loss(loss_sum, tokens, mesh))
            losses[-1].backward()
        training.clip_grad_norm_(model.parameters(), 1.0, mesh)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = training.mean_loss(losses, mesh)
        if mesh.global_rank == 0:
            print(f"step {step}: loss {mean:.2f}, next rate {schedule.get_last_lr()[0]:.4f}")
    checkpoints.save(int(sys.argv[1]), model, optimizer, schedule=schedule.state_dict())
torch.distributed.destroy_process_group()
