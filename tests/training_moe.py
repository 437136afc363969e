"""The mixture of experts of the example on any layout, compared with one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from parallel import IGNORED, Step, loss_sum, make_model, whole_model
from settings import Settings
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from namedmesh import training

if TYPE_CHECKING:
    from llama import Llama

    import namedmesh

SETTINGS = Settings(dim=16, layers=2, heads=4, kv_heads=2, moe=True, dtype="float64")
BATCH, SEQUENCE = 8, 8


def whole_batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SETTINGS.sizes.vocabulary, (BATCH, SEQUENCE + 1), generator=generator)
    padding = torch.rand(BATCH, SEQUENCE, generator=generator) < torch.linspace(0, 0.9, BATCH)[:, None]
    return tokens[:, :-1], tokens[:, 1:].masked_fill(padding, IGNORED)


def enlarge(model: Llama) -> Llama:
    """Larger weights of the experts and routers, so that their gradients are not tiny."""
    for name, parameter in model.named_parameters():
        parameter.data *= 10 if "feed_forward" in name else 1
    return model


def differences(mesh: namedmesh.NamedMesh) -> dict[str, float]:
    """How far this rank's loss, gradients and their norm are from those of one process."""
    alone = enlarge(whole_model(SETTINGS).double())
    inputs, targets = whole_batch()
    expected = loss_sum(alone(inputs), targets) / (targets != IGNORED).sum()
    expected.backward()
    model = enlarge(make_model(SETTINGS, mesh))
    share = training.sampler_kwargs(mesh)
    mine = (each[share["rank"] :: share["num_replicas"]].contiguous() for each in (inputs, targets))
    found = Step(model, mesh, mesh.size("pp"))(*mine)
    wanted = {name: each.grad for name, each in alone.named_parameters()}
    gradients = 0.0
    for name, each in model.named_parameters():
        grad = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        gradients = max(gradients, (grad - wanted[name]).abs().max().item())  # type: ignore[operator]
    norm = training.clip_grad_norm_(model.parameters(), 0.1, mesh)
    whole_norm = clip_grad_norm_(alone.parameters(), 0.1)
    return {
        "loss": (found - expected).abs().item(),
        "gradients": gradients,
        "norm": (norm - whole_norm).abs().item(),
    }
