"""GRPO with a policy and a rollout copy: ``torchrun --nproc-per-node 4 examples/rl.py STEPS``."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import namedmesh
from namedmesh import tensor_parallel, training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel

WORDS, WIDTH, LENGTH, PROMPTS, GROUP = 16, 32, 8, 4, 8
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Any:  # logits, sharded over the vocabulary
        x = self.embed(ids).cumsum(1) / torch.ones_like(ids).cumsum(1)[..., None]  # mean so far
        return self.head(x + self.down(nn.functional.gelu(self.up(x))))

    def log_probs(self, ids: Tensor, tp: Any) -> Tensor:
        return tensor_parallel.token_log_probs(self.forward(ids[:, :-1]), ids[:, 1:], tp)


# 1. Two layouts of the same ranks.
mesh, serving = namedmesh.init_mesh(dp=-1, tp=2), namedmesh.init_mesh(tp=-1)
policy = Model().to(mesh.device)
reference, rollout = (Model().to(mesh.device).requires_grad_(False) for _ in range(2))
for model in (policy, reference):
    tensor_parallel.parallelize(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    register_fsdp_forward_method(model, "log_probs")  # FSDP2 gathers the weights for it, too
    training.init_parameters(model, seed=0)
tensor_parallel.parallelize(rollout, serving["tp"], PLAN)
optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)  # the same samples on every rank
data = training.sampler_kwargs(mesh)
for step in range(int(sys.argv[1])):
    # 2. Generate. All ranks serve one copy of the policy.
    training.copy_weights(policy, rollout)
    ids = torch.arange(PROMPTS, device=mesh.device).repeat_interleave(GROUP)[:, None]  # prompts
    for _ in range(LENGTH):
        logits = rollout(ids)[:, -1]
        token = tensor_parallel.sample(logits, serving["tp"], generator=generator)
        ids = torch.cat([ids, token[:, None]], dim=1)
    # 3. Reward even tokens, in comparison with the other answers to the same prompt.
    rewards = (ids[:, 1:] % 2 == 0).double().mean(1).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    # 4. Train on the rows of this data-parallel rank, twice.
    own = ids[data["rank"] :: data["num_replicas"]]
    advantage = advantages.view(-1, 1)[data["rank"] :: data["num_replicas"]].to(logits.dtype)
    tokens = training.count_tokens(own[:, 1:].numel(), mesh)
    with torch.no_grad():
        old, fixed = policy.log_probs(own, mesh["tp"]), reference.log_probs(own, mesh["tp"])
    for _ in range(2):
        new = policy.log_probs(own, mesh["tp"])
        ratio, drift = (new - old).exp(), fixed - new
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        penalty = drift.exp() - drift - 1  # estimates the KL divergence from the reference
        loss = training.normalize_loss((0.02 * penalty - gain).sum(), tokens, mesh)
        loss.backward()
        training.clip_grad_norm_(policy.parameters(), 0.05, mesh)
        optimizer.step()
        optimizer.zero_grad()
    mean = training.mean_loss(loss, mesh)
    if mesh.global_rank == 0:
        print(f"step {step}: reward {rewards.mean():.2f}, loss {mean:.3f}")
torch.distributed.destroy_process_group()
