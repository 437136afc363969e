"""The same training in one process, with nothing but plain torch: what the parallel run has to agree with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from optim import make_optimizer, set_learning_rate
from parallel import loss_sum, whole_model
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from settings import Settings
    from text import Corpus

__all__ = ["largest_difference", "reference_losses"]


def reference_losses(settings: Settings, corpus: Corpus, device: torch.device) -> list[float]:
    """The loss of every step, from the first one on, of an unsharded model on whole batches."""
    model = whole_model(settings).to(device, settings.precision)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(settings.steps):
        inputs, targets = corpus.batch(
            seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq, part=slice(None)
        )
        loss = loss_sum(model(inputs.to(device)), targets.to(device)) / targets.numel()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), settings.clip)
        set_learning_rate(optimizer, step=step, steps=settings.steps, highest=settings.lr)
        optimizer.step()
        losses.append(loss.item())
    return losses


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest difference between the losses and the end of the reference, which may have begun earlier."""
    pairs = zip(losses, reference[len(reference) - len(losses) :], strict=True)
    differences = [abs(loss - expected) for loss, expected in pairs]
    # A difference that is not a number is larger than any; max() would pass over it.
    return max(math.inf if math.isnan(each) else each for each in differences)
