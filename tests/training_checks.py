"""A small language model in parts, and its training over any layout with the functions of namedmesh.training, and alone."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import TORCH
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh

# Plain torch does so too: the first exchange of a pipeline's stages has two sizes at its two ends.
NO_PIPELINES = TORCH.release[:2] == (2, 9)
PIPELINES = pytest.mark.skipif(NO_PIPELINES, reason="torch 2.9's pipelines end the process on gloo")
WIDTH, HEADS, KV_HEADS, INNER, LAYERS, VOCABULARY = 32, 8, 4, 20, 4, 24
ROWS, LENGTH = 8, 8
IGNORED = -100
CLIP = 0.5  # below the norms that come up
ORDERS = (1.0, 2.0, 3.0, math.inf)

Job = tuple[dict[str, Any], str, int]
"""The sizes of the axes, the schedule and the number of microbatches."""
# On as many ranks as a layout needs: what one job saved another reads that has more of them.
ON_FOUR: list[Job] = [
    ({"pp": 1, "dp": 4}, "1F1B", 1),
    ({"pp": 1, "dp": 2, "tp": 2}, "GPipe", 3),
    ({"pp": 1, "tp": 4}, "1F1B", 2),
]
ON_EIGHT: list[Job] = [
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "tp": 2}, "1F1B", 1),
    ({"pp": 1, "dp": 2, "cp": 2, "tp": 2}, "1F1B", 1),
    ({"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 2}, "1F1B", 1),
    ({"pp": 1, "dp_replicate": 2, "cp": 2, "tp": 2}, "1F1B", 2),
]
PIPELINED: list[Job] = [
    # Up to torch 2.12 schedules of two backward passes refuse functions written in Python, such as our layers' and DTensor's.
    ({"pp": 2, "dp": 2, "tp": 2}, "ZBV" if TORCH.release >= (2, 13) else "Interleaved1F1B", 4),
    ({"pp": 4, "tp": 2}, "1F1B", 4),
]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv = WIDTH * KV_HEADS // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, size, bias=False) for size in (WIDTH, kv, kv))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.cp: DeviceMesh | None = None
        self.ulysses = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if self.cp is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = training.context_attention(q, k, v, self.cp, ulysses=self.ulysses)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """One of the layers; only layer 1 has both parts, because what a parameter costs does not depend on its size."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention() if number != 2 else None
        self.wide = number in {1, 2}
        if self.wide:
            self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(self.norm(x))
        if self.wide:
            x = x + self.down(torch.tanh(self.up(x if self.attention is not None else self.norm(x))))
        return x


class Part(nn.Module):
    """A run of the layers, with what comes before the first and after the last."""

    def __init__(self, layers: nn.ModuleDict, ends: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers
        self.embedding = ends["embedding"] if "0" in layers else None
        self.place = ends["place"] if "0" in layers else None
        self.head = ends["head"] if str(LAYERS - 1) in layers else None
        self.positions = torch.arange(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.place is not None:
            x = self.embedding(x) + self.place(self.positions)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def parts(stages: Iterable[int], count: int) -> list[Part]:
    torch.manual_seed(0)
    layers = [Block(number) for number in range(LAYERS)]
    ends = nn.ModuleDict(
        {
            "embedding": nn.Embedding(VOCABULARY, WIDTH),
            "place": nn.Embedding(LENGTH, WIDTH),
            "head": nn.Linear(WIDTH, VOCABULARY, bias=False),
        }
    )
    return [
        Part(training.stage_layers(layers, None, stage=stage, stages=count), ends).double()
        for stage in stages
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows each of them, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = IGNORED
    return text[:, :-1].contiguous(), targets


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def optimizer_for(model: Iterable[nn.Module]) -> torch.optim.Optimizer:
    parameters = itertools.chain.from_iterable(each.parameters() for each in model)
    return tiny.AdamWOfShards(parameters, lr=0.01)


def alone(first: str, steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Of one process the losses before and after each step and the norms between, and all that it has in the end; its start is saved."""
    (model,) = parts([0], 1)
    optimizer = optimizer_for([model])
    training.save(first, None, model, optimizer, step=0)
    told = []
    for step in range(steps):
        tokens, targets = batch(step)
        before = loss_sum(model(tokens), targets) / (targets != IGNORED).sum()
        optimizer.zero_grad()
        before.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms = [nn.utils.get_total_norm(gradients, order) for order in ORDERS]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        after = loss_sum(model(tokens), targets) / (targets != IGNORED).sum()
        told.append([each.item() for each in (before, after, *norms)])
    return told, state_of(model, optimizer)


def loaded_alone(path: str) -> list[list[float]]:
    (model,) = parts([0], 1)
    optimizer = optimizer_for([model])
    training.load(path, None, model, optimizer)
    return state_of(model, optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """All numbers of a run, as lists: tensors do not leave the process that they are in."""
    remembered = [kept[key] for kept in optimizer.state.values() for key in sorted(kept)]
    return [each.flatten().tolist() for each in (*model.state_dict().values(), *remembered)]


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def states_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [str(sorted(each.items())) for each in optimizer.state.values()]


def parallelized(model: Part, mesh: namedmesh.NamedMesh, *, ulysses: bool) -> Part:
    if "tp" in mesh.layout:
        columns, rows = (
            ("attention.query", "attention.key", "attention.value", "up"),
            ("attention.out", "down"),
        )
        styles: dict[str, Any] = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(
            rows, RowwiseParallel()
        )
        plan = {
            f"layers.{number}.{name}": style
            for number, layer in model.layers.items()
            for name, style in styles.items()
            if name in dict(layer.named_modules())
        }
        if model.embedding is not None:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        if model.head is not None:
            plan["head"] = ColwiseParallel(use_local_output=False)  # for loss_parallel
        parallelize(model, mesh["tp"], plan)
    for layer in model.layers.values():
        attention: Any = layer.attention
        if "cp" in mesh.layout and attention is not None:
            attention.cp, attention.ulysses = mesh["cp"], ulysses
    return model


def sharded(model: Part, mesh: namedmesh.NamedMesh) -> Part:
    if not {"dp", "dp_shard", "cp"} & {*mesh.layout}:
        return model
    over = training.fsdp_mesh(mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over)
    return model


def check_first_weights(model: list[Part]) -> None:
    (alone,) = parts([0], 1)
    for each in (alone, *model):
        training.init_parameters(each, 5)
    expected = dict(alone.named_parameters())
    for part in model:
        for name, parameter in part.named_parameters():
            assert torch.equal(whole(parameter), expected[name.replace("_orig_mod.", "")]), name


def train_through(layouts: list[Job], paths: list[str]) -> list[list[float]]:
    """One step on each layout, each from the checkpoint of the one before."""
    steps = zip(layouts, itertools.pairwise(paths), strict=True)
    return [train_one_step(*layout, *pair) for layout, pair in steps]


def train_one_step(
    sizes: dict[str, Any],
    schedule: str,
    microbatches: int,
    source: str,
    target: str,
    *,
    compiled: bool = False,
) -> list[float]:
    """Continue from a checkpoint for one step, and save: the loss before and after the step, and the norms between."""
    mesh = namedmesh.init_mesh(**sizes, device="cpu")
    per_rank = 1 if schedule in {"1F1B", "GPipe"} else 2
    indices = training.stage_indices(mesh, schedule, per_rank)
    model = parts(indices, per_rank * mesh.size("pp"))
    for part in model:
        parallelized(part, mesh, ulysses="cp" in sizes and microbatches > 1)
        for name, layer in part.layers.items():
            if compiled and name == "1":  # without one break in its graph; one layer is enough
                unbroken: Any = torch.compile(layer, backend="eager", fullgraph=True)
                part.layers[name] = unbroken
        sharded(part, mesh)
    check_first_weights(model)
    optimizer = optimizer_for(model)
    step = training.load(source, mesh, model, optimizer)["step"]
    tokens, targets = batch(step)
    if "cp" in mesh.layout:
        tokens, targets, positions = training.shard_sequence(tokens, targets, mesh=mesh["cp"])
        for part in model:
            part.positions = positions
    share = training.sampler_kwargs(mesh)
    tokens, targets = (each.chunk(share["num_replicas"])[share["rank"]] for each in (tokens, targets))
    count = training.count_tokens(targets != IGNORED, mesh)

    def loss(logits: Tensor, some: Tensor) -> Tensor:
        return training.token_mean(loss_sum(logits, some), count, mesh)

    pipe = training.pipeline(model, mesh, schedule, microbatches=microbatches, loss=loss, reduction="sum")
    parameters = [each for part in model for each in part.parameters()]
    with loss_parallel() if "tp" in mesh.layout else nullcontext():
        before = training.mean_loss(pipe.step(tokens, target=targets), mesh)
        norms = [training.clip_grad_norm_(parameters, math.inf, mesh, order).item() for order in ORDERS]
        training.clip_grad_norm_(parameters, CLIP, mesh)
        optimizer.step()
        saved = training.save(target, mesh, model, optimizer, async_=True, step=step + 1)
        # While it is written: without gradients.
        evaluated = pipe.eval(tokens, target=targets)
    assert evaluated is not None
    after = training.mean_loss(evaluated, mesh)
    assert saved is not None
    assert str(saved.result()) == target
    dist.barrier()
    mesh.close()
    return [before.item(), after.item(), *norms]
