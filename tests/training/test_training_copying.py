"""``copy_weights`` gives what gathering a full state dict and distributing it gives, bit for bit."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
from messages import list_problems
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import namedmesh
from namedmesh._sharding import to_local
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
from namedmesh.training import copy_weights, fsdp_mesh


class Model(nn.Module):
    """A model whose sizes do not divide evenly, with buffers and several dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(21, 10)
        self.up, self.down = nn.Linear(10, 20), nn.Linear(20, 10)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 21, bias=False)
        self.head.weight = self.embedding.weight
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.short = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.norm.running_mean = torch.randn(10)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.up(self.embedding(ids)).relu()))
        return out


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def shard(layout: str, seed: int) -> Any:
    """Make the model in a layout over four ranks."""
    model: Any = Model(seed)
    axes: Any = {"tp4": {"tp": 4}, "tp2": {"dp": 2, "tp": 2}}.get(layout, {"dp": 4})
    if layout == "fsdp2 tp2":
        axes = {"dp": 2, "tp": 2}
    elif layout == "hsdp":
        axes = {"dp_replicate": 2, "dp_shard": 2}
    elif layout == "tp2 outside":
        axes = {"tp": 2, "dp": 2}
    mesh = namedmesh.init_mesh(**axes, device="cpu")
    if "tp" in axes:
        parallelize(model, mesh["tp"], PLAN)
    if "fsdp" in layout or layout == "hsdp":
        fully_shard(model.up, mesh=fsdp_mesh(mesh))
        fully_shard(model, mesh=fsdp_mesh(mesh))
    if layout == "ddp":
        model.up.forward = torch.compile(model.up.forward, backend="eager")
        model = DistributedDataParallel(model)
    return model


LAYOUTS = ["plain", "ddp", "tp4", "tp2", "tp2 outside", "fsdp4", "fsdp2 tp2", "hsdp"]


def compare_layouts(layouts: list[str]) -> list[str]:
    """Return the names of tensors that are not bit-equal, for each pair of layouts."""
    wrong = []
    models = {layout: shard(layout, seed=0) for layout in layouts}
    options = StateDictOptions(full_state_dict=True)
    for number, (one, other) in enumerate(permutations(layouts, 2)):
        source, target = models[one], models[other]
        values = Model(number).state_dict()
        values["mask"] = torch.arange(9) % (number + 2) == 0
        # torch turns the values of the dict into those of the layout.
        set_model_state_dict(source, dict(values), options=options)
        copy_weights(source, target, bucket_bytes=100 if number % 2 else 2**20)
        state_dict: Any = get_model_state_dict(target)
        copied = {name: to_local(value).clone() for name, value in state_dict.items()}
        set_model_state_dict(target, dict(values), options=options)
        state_dict = get_model_state_dict(target)
        for name, value in state_dict.items():
            if not torch.equal(copied[name], to_local(value)):
                wrong.append(f"{one} -> {other}: {name}")
        assert len(copied) == len(values) == 14
    return wrong


@pytest.mark.parametrize(
    "layouts", [["ddp", "tp4", "fsdp2 tp2", "hsdp"], pytest.param(LAYOUTS, marks=pytest.mark.slow)]
)
def test_copies_are_those_of_a_full_state_dict(layouts: list[str]) -> None:
    assert run_ranks(4, compare_layouts, layouts) == [[]] * 4


def copy_between_stages() -> bool:
    """Copy a model of two pipeline stages into one that is tensor parallel, in another dtype, and back."""
    pp = namedmesh.init_mesh(pp=2, tp=2, device="cpu")
    tp = namedmesh.init_mesh(tp=4, device="cpu")
    layers = {str(number): nn.Linear(8, 8) for number in range(4)}
    full: Any = nn.ModuleDict(copy.deepcopy(layers)).double()
    stage = nn.ModuleDict(dict(list(layers.items())[2 * pp.rank("pp") :][:2]))
    parallelize(stage, pp["tp"], {"*": ColwiseParallel()})
    parallelize(full, tp["tp"], {"*": RowwiseParallel()})
    with torch.no_grad():
        for name in stage:
            for param in stage[name].parameters():
                param.copy_(torch.full_like(param, int(name) + 1 / 3))
    copy_weights(stage, full, cast=True)
    for number in range(4):
        expected = torch.full((8, 8), number + 1 / 3).double()
        assert torch.equal(full[str(number)].weight.full_tensor(), expected)
    before = {name: to_local(value).clone() for name, value in stage.state_dict().items()}
    for param in stage.parameters():
        to_local(param.detach()).zero_()
    copy_weights(full, stage, cast=True)
    return all(torch.equal(before[name], to_local(value)) for name, value in stage.state_dict().items())


def test_stages_and_dtypes_may_differ() -> None:
    assert run_ranks(4, copy_between_stages) == [True] * 4


def find_problems() -> list[list[str]]:
    """Return the problems of models that differ, on every rank."""
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    source, target = Model(0), Model(1)
    del source.norm, target.phase
    target.double()
    target.short = nn.Parameter(torch.zeros(2, 2))
    source.head = nn.Linear(10, 21, bias=False)
    source.up.weight = nn.Parameter(DTensor.from_local(torch.ones(20, 10), mesh["tp"], [Partial()]))
    target.down.weight = nn.Parameter(torch.empty(10, 20, device="meta"))
    if mesh.rank("tp"):
        target.down.bias = nn.Parameter(torch.zeros(11))
    target.embedding.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    before = {name: value.clone() for name, value in target.state_dict().items()}
    found = [list_problems(lambda: copy_weights(source, target))]
    for name, value in target.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name])
    return found


def test_every_problem_is_named_on_every_rank() -> None:
    dtypes = (
        "has dtype torch.float32 in the source, and torch.float64 in the target; pass cast=True to convert it"
    )
    for (problems,) in run_ranks(2, find_problems):
        assert problems == [
            "up.weight of the source is partial, (Partial(sum),); all-reduce it first",
            "down.weight of the target is on the meta device; call to_empty() on the model first",
            "embedding.weight of the target is a shard by its attributes; make it a DTensor",
            "down.bias of the target differs between ranks: torch.float64 (10,) and torch.float32 (11,)",
            "phase is not in the target",
            "short has shape (5, 3) in the source, and (2, 2) in the target",
            "short has dtype torch.bfloat16 in the source, and torch.float32 in the target; pass cast=True to convert it",
            f"embedding.weight {dtypes}",
            f"up.weight {dtypes}",
            f"up.bias {dtypes}",
            f"down.bias {dtypes}",
            "norm.weight is not in the source",
            "norm.bias is not in the source",
            "norm.running_mean is not in the source",
            "norm.running_var is not in the source",
            "norm.num_batches_tracked is not in the source",
            f"head.weight {dtypes}",
            "head.weight and embedding.weight are one tensor in the target, and two in the source; untie them",
        ]
