"""The example's model on any layout, step by step with the functions of namedmesh.training, and alone."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import train
from parallel import HEAD, IGNORED, llama_plan, shard_model
from ranks import TORCH
from tensors import full_tensor
from tiny import AdamWOfShards
from torch import Tensor, nn

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import cross_entropy, parallelize

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS, LENGTH, CLIP = 8, 8, 0.5  # which is below the norms that come up
ORDERS = (2.0, math.inf)
SETTINGS = train.Settings(dim=64, layers=4, verify=True)
WITH_EXPERTS = replace(SETTINGS, dim=32, layers=2, moe=True)

Job = tuple[dict[str, Any], str, int, dict[str, Any]]
"""The sizes of the axes, the schedule, the number of microbatches, and the sizes of the experts' view."""
# On as many ranks as a layout needs: what one job saved another reads that has more of them.
# Up to torch 2.12 schedules of two backward passes refuse functions written in Python, such as our layers' and DTensor's.
ZBV = "ZBV" if TORCH.release >= (2, 13) else "Interleaved1F1B"
ON_TWO: list[Job] = [({"pp": 2, "dp": 1, "tp": 1}, ZBV, 4, {})]
ON_FOUR: list[Job] = [
    ({"pp": 1, "dp": 4, "tp": 1}, "1F1B", 1, {}),
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 1}, "1F1B", 1, {}),
    ({"pp": 1, "dp": 2, "tp": 2}, "GPipe", 3, {}),
    ({"pp": 1, "tp": 4}, "1F1B", 2, {}),
]
ON_EIGHT: list[Job] = [
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}, "1F1B", 2, {}),
    ({"pp": 2, "dp": 2, "tp": 2}, ZBV, 4, {}),
    ({"pp": 4, "tp": 2}, "1F1B", 4, {}),
]
EXPERTS_ON_FOUR: list[Job] = [
    ({"pp": 1, "dp": 4, "tp": 1}, "1F1B", 1, {"ep": 4, "etp": 1}),
    ({"pp": 1, "dp": 2, "tp": 2}, "1F1B", 1, {"ep": 2, "etp": 1}),
    ({"pp": 1, "dp": 2, "tp": 2}, "1F1B", 1, {"ep": 1, "etp": 2}),
]
EXPERTS_ON_EIGHT: list[Job] = [
    ({"pp": 1, "dp": 4, "tp": 2}, "1F1B", 1, {"ep": 8, "etp": 1}),
    ({"pp": 2, "dp": 2, "tp": 2}, "1F1B", 2, {"ep": 2, "etp": 2}),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows each of them, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, train.VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = IGNORED
    return text[:, :-1].contiguous(), targets


def mean_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of one process."""
    logits = model(tokens, torch.arange(LENGTH)).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)


def optimizer_for(*model: nn.Module) -> torch.optim.Optimizer:
    """The example's AdamW; on many ranks that of shards, of which torch's own would need most of the time."""
    many = dist.is_initialized() and dist.get_world_size() > 4
    with mock.patch("torch.optim.AdamW", AdamWOfShards if many else torch.optim.AdamW):
        optimizer = train.make_optimizer(nn.ModuleList(model))
    train.set_rate(optimizer, train.Settings(lr=0.1), 0)
    return optimizer


def alone(settings: train.Settings, first: str, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Of one process the losses before and after each step and the norms between, and all that it has in the end; its start is saved."""
    model = train.new_model(settings)
    optimizer = optimizer_for(model)
    training.save(first, None, model, optimizer, step=0)
    told = []
    for step in range(steps):
        optimizer.zero_grad()
        (before := mean_loss(model, *batch(step))).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms = [nn.utils.get_total_norm(gradients, order) for order in ORDERS]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        told.append([each.item() for each in (before, mean_loss(model, *batch(step)), *norms)])
    return told, state_of(model, optimizer)


def loaded_alone(settings: train.Settings, path: str) -> list[list[float]]:
    model = train.new_model(settings)
    optimizer = optimizer_for(model)
    training.load(path, None, model, optimizer)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """All numbers of a run, as lists: tensors do not leave the process that they are in."""
    remembered = [kept[key] for kept in optimizer.state.values() for key in sorted(kept)]
    return [each.flatten().tolist() for each in (*model.state_dict().values(), *remembered)]


def check_first_weights(settings: train.Settings, model: Sequence[nn.Module]) -> None:
    alone = train.new_model(settings)
    for each in (alone, *model):
        training.init_parameters(each, 5)
    expected = dict(alone.named_parameters())
    for part in model:
        for name, parameter in part.named_parameters():
            assert torch.equal(full_tensor(parameter), expected[name]), name


def train_through(
    settings: train.Settings, layouts: list[Job], paths: list[str], compiled: bool
) -> list[list[float]]:
    """One step on each layout, each from the checkpoint of the one before; compiled, with a compiled layer."""
    if compiled:
        warnings.simplefilter("ignore")  # the compiler warns about what torch itself does
    steps = zip(layouts, itertools.pairwise(paths), strict=True)
    return [train_one_step(settings, layout, *pair, compiled) for layout, pair in steps]


def train_one_step(
    settings: train.Settings, job: Job, source: str, target: str, compiled: bool
) -> list[float]:
    """Continue from a checkpoint for one step, and save: the loss before and after the step, and the norms between."""
    sizes, schedule, microbatches, expert = job
    mesh = namedmesh.init_mesh(**sizes, device="cpu")
    if expert:
        settings = replace(settings, **expert)
        mesh.add_view("expert", pp=sizes["pp"], edp=-1, **expert)
    per_rank = 1 if schedule in {"1F1B", "GPipe"} else 2
    model = []
    for index in training.stage_indices(mesh, schedule, per_rank):
        count = per_rank * mesh.size("pp")
        part = train.new_model(
            settings, training.stage_layers(settings.layers, None, stage=index, stages=count)
        )
        for name, layer in part.layers.items():
            if compiled and name == "1":  # without one break in its graph; one layer is enough
                layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
        if {"dp", "dp_shard"} & sizes.keys():
            shard_model(part, settings, mesh)
        else:  # without FSDP2
            parallelize(part, mesh["tp"], llama_plan(settings.dim // HEAD, None), strict=False)
        for layer in part.layers.values():
            if "cp" in mesh.layout and microbatches > 1:
                attention: Any = layer.attention
                attention.attend = partial(training.context_attention, mesh=mesh["cp"], ulysses=True)
        model.append(part)
    check_first_weights(settings, model)
    optimizer = optimizer_for(*model)
    step = training.load(source, mesh, model, optimizer)["step"]
    tokens, targets = batch(step)
    positions = torch.arange(LENGTH)
    if "cp" in mesh.layout:
        tokens, targets, positions = training.shard_sequence(tokens, targets, mesh=mesh["cp"])
    share = training.sampler_kwargs(mesh)
    tokens, targets = (each.chunk(share["num_replicas"])[share["rank"]] for each in (tokens, targets))
    counted = training.count_tokens(targets != IGNORED, mesh)

    def loss(logits: Tensor, some: Tensor) -> Tensor:
        total = cross_entropy(logits, some, mesh["tp"], ignore_index=IGNORED, reduction="sum")
        return training.normalize_loss(total, counted, mesh)

    how: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": loss, "reduction": "sum"}
    pipe = training.Pipeline(model, mesh, schedule, replicate_kwargs=("positions",), **how)
    parameters = [each for part in model for each in part.parameters()]
    before = training.mean_loss(pipe.step(tokens, target=targets, positions=positions), mesh)
    norms = [training.clip_grad_norm_(parameters, math.inf, mesh, order).item() for order in ORDERS]
    training.clip_grad_norm_(parameters, CLIP, mesh)
    optimizer.step()
    saved = training.save(target, mesh, model, optimizer, async_=True, step=step + 1)
    # While it is written: without gradients.
    evaluated = pipe.eval(tokens, target=targets, positions=positions)
    assert evaluated is not None
    after = training.mean_loss(evaluated, mesh)
    assert str(saved.result()) == target
    dist.barrier()
    mesh.close()
    return [before.item(), after.item(), *norms]
