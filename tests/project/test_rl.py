"""The example of reinforcement learning: samples, losses and weights are those of one process in plain torch."""

from __future__ import annotations

import copy
import runpy
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from pages import ROOT
from ranks import run_ranks
from tensors import full_tensor
from torch import Tensor, nn

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import sample

pytestmark = pytest.mark.ci

STEPS = 2


def run_example() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the last samples, the last loss and the weights of the example."""
    torch.set_default_dtype(torch.float64)
    sys.argv = ["rl.py", str(STEPS)]
    with mock.patch("torch.distributed.destroy_process_group"):  # the weights are gathered below
        found = runpy.run_path(str(ROOT / "examples" / "rl.py"))
    weights = {name: full_tensor(param.detach()) for name, param in found["policy"].named_parameters()}
    return found["ids"], found["mean"], weights


class Plain(nn.Module):
    """The model of the example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        means = [self.embed(ids[:, :end]).mean(1) for end in range(1, 1 + ids.shape[1])]
        x = torch.stack(means, dim=1)
        logits: Tensor = self.head(x + self.down(F.gelu(self.up(x))))
        return logits


def log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probability of each token after the first."""
    all_tokens = model(ids[:, :-1]).log_softmax(-1)
    chosen: Tensor = all_tokens.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen


def run_in_one_process() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return what ``run_example`` does, from one model that is trained and generates."""
    torch.set_default_dtype(torch.float64)
    mesh = namedmesh.init_mesh(tp=1)
    policy: Any = Plain()
    training.init_parameters(policy, seed=0)
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = torch.tensor([[prompt] for prompt in range(4) for _ in range(8)])
        for _ in range(8):
            token = sample(policy(ids)[:, -1], mesh, generator=generator)
            ids = torch.cat([ids, token[:, None]], dim=1)
        rewards = 1.0 - (ids[:, 1:] % 2).double().mean(1)
        advantages = []
        for group in rewards.split(8):
            advantages.append((group - group.mean()) / (group.std() + 1e-4))
        advantage = torch.cat(advantages)[:, None]
        old = log_probs(policy, ids).detach()
        fixed = log_probs(reference, ids).detach()
        for _ in range(2):
            new = log_probs(policy, ids)
            ratio = torch.exp(new - old)
            clipped = torch.where(advantage > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
            loss = (0.02 * (torch.exp(fixed - new) - (fixed - new) - 1) - clipped * advantage).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return ids, loss.detach(), {name: param.detach() for name, param in policy.named_parameters()}


def test_the_example_is_exact_in_two_layouts() -> None:
    ((ids, loss, weights),) = run_ranks(1, run_in_one_process)
    for found_ids, found_loss, found_weights in run_ranks(4, run_example, init=False):
        assert torch.equal(found_ids, ids)
        torch.testing.assert_close(found_loss, loss, rtol=0, atol=1e-12)
        assert found_weights.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(found_weights[name], value, rtol=0, atol=1e-12)
