"""A job with pp x HSDP x tp: ``torchrun --nproc-per-node 8 examples/pretrain.py PP TP STEPS DIR``."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.nn import GELU, LayerNorm, Linear, Sequential

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, cross_entropy, parallelize

WORDS, DIM, LENGTH, BATCH, SAVE_EVERY = 32, 32, 8, 16, 2
PLAN = {"layers.*.1": ColwiseParallel(), "layers.*.3": RowwiseParallel(), "head": ColwiseParallel()}
PLAN["embed"] = RowwiseParallel(input_layouts=Replicate())


class Stage(nn.Module):
    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM) if mesh.is_first("pp") else None
        layers = [Sequential(LayerNorm(DIM), Linear(DIM, DIM), GELU(), Linear(DIM, DIM)) for _ in range(4)]
        self.layers = training.stage_layers(layers, mesh)
        self.head = Linear(DIM, WORDS, bias=False) if mesh.is_last("pp") else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = x + layer(x)
        return x if self.head is None else self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    loss_sum = cross_entropy(logits, targets, mesh["tp"], reduction="sum")  # -100 does not count
    return training.normalize_loss(loss_sum, tokens, mesh)


pp, tp, steps = (int(size) for size in sys.argv[1:4])
mesh = namedmesh.init_mesh(pp=pp, dp_replicate=2, dp_shard=-1, tp=tp)
training.seed_all(0, mesh)
stage: Any = Stage(mesh).to(mesh.device)
parallelize(stage, mesh["tp"], PLAN, strict=False)  # a stage has some modules of the plan
fully_shard(stage, mesh=training.fsdp_mesh(mesh))
training.init_parameters(stage, seed=0)
first, last = (module.weight if module else None for module in (stage.embed, stage.head))
sum_tied = training.tie_stages(first, last, mesh)
optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 4, 1.0))
pipe = training.Pipeline(stage, mesh, n_microbatches=2, loss_fn=loss_fn, reduction="sum")
data = training.sampler_kwargs(mesh)
rows = slice(data["rank"], None, data["num_replicas"])  # of the global batch, for this rank
with training.CheckpointManager(sys.argv[4], mesh, async_=True) as checkpoints:
    restored = checkpoints.resume_or_start(stage, optimizer)
    schedule.load_state_dict(restored.get("schedule", schedule.state_dict()))
    for step in range(restored["step"], steps):
        # The global batch is a function of the step. Rows have different numbers of targets.
        words = torch.randint(WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
        text = (words[rows] + torch.arange(LENGTH + 1)).to(mesh.device) % WORDS
        inputs, targets = text[:, :-1], text[:, 1:].masked_fill(text[:, 1:] < text[:, :1], -100)
        tokens = training.count_tokens(targets != -100, mesh)
        losses = [pipe.step(x, target=y) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        sum_tied()
        training.clip_grad_norm_(stage.parameters(), 1.0, mesh)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = training.mean_loss(losses, mesh)
        if mesh.global_rank == 0:
            print(f"step {step}: loss {mean:.4f}, next rate {schedule.get_last_lr()[0]:.4f}")
        if (step + 1) % SAVE_EVERY == 0:
            checkpoints.save(step + 1, stage, optimizer, schedule=schedule.state_dict())
torch.distributed.destroy_process_group()
