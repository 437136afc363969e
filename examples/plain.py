"""What knows nothing of ranks: the optimizer, and the same training in one process, to compare with."""

from __future__ import annotations

import math

import torch
from parallel import loss_sum, whole_model
from settings import Settings
from text import Corpus
from torch import nn

WARM_UP = 10  # steps
LOWEST = 0.1  # of the highest learning rate, at the end


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return AdamW that lets the matrices decay, but not the norms, with one call for each group."""
    groups = []
    for ndim, decay in (
        (1, 0.0),
        (2, 0.1),
        (3, 0.1),
    ):  # norms, matrices, and stacks of experts, on ranks of their own
        if parameters := [each for each in model.parameters() if each.ndim == ndim]:
            groups.append({"params": parameters, "weight_decay": decay})
    # Large eps: a gradient as small as its own rounding error should not make a full step.
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-5, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return torch's own schedule: a linear warm-up and a cosine. A checkpoint has its state, which is the number of the step."""

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / WARM_UP) * (LOWEST + (1 - LOWEST) * cosine)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def reference_losses(settings: Settings, corpus: Corpus, device: torch.device) -> list[float]:
    """Return the loss of every step, from the first one on, of an unsharded model on whole batches."""
    model = whole_model(settings).to(device, settings.precision)
    optimizer = make_optimizer(model, settings.lr)
    schedule = make_schedule(optimizer, settings.steps)
    losses = []
    for step in range(settings.steps):
        inputs, targets = corpus.batch(seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq)
        loss = loss_sum(model(inputs.to(device)), targets.to(device)) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses
