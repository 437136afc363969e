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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import namedmesh
from namedmesh._sharding import to_local
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
from namedmesh.training import copy_weights, fsdp_mesh, tie_stages


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


@pytest.mark.ci
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
            "embedding.weight of the target is a shard in a plain tensor; make it a DTensor",
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


class Ends(nn.Module):
    """An embedding and a head, or one of the two, whose weights are all one value."""

    def __init__(self, value: float, *names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Embedding(6, 4) if name == "embed" else nn.Linear(4, 6, bias=False)
            self.add_module(name, layer)
            nn.init.constant_(layer.weight, value)


def copy_tied_stages(mesh: namedmesh.NamedMesh) -> list[float]:
    """Copy two stages, tied by tie_stages, into a model with one tied weight."""
    stage: Any = Ends(5.0, "embed" if mesh.is_first("pp") else "head")
    first, last = getattr(stage, "embed", None), getattr(stage, "head", None)
    tie_stages(first and first.weight, last and last.weight, mesh)
    target: Any = Ends(0.0, "embed", "head")
    target.head.weight = target.embed.weight
    copy_weights(stage, target)
    return target.head.weight.unique().tolist()  # type: ignore[no-any-return]


def copy_from_one_rank_to_the_other() -> list[float]:
    """Each rank has one of the two models, and no tensor of the other one."""
    models: list[nn.Module] = [Ends(5.0, "embed"), Ends(0.0, "embed")]
    models[1 - torch.distributed.get_rank()] = nn.ReLU()
    copy_weights(*models)
    return [value for param in models[1].parameters() for value in param.unique().tolist()]


def copy_a_scalar_of_one_rank() -> float:
    """The mesh of a DTensor without dimensions lacks this rank."""
    source, target = nn.Module(), nn.Module()
    scale = distribute_tensor(
        torch.tensor(7.0), DeviceMesh("cpu", [0], mesh_dim_names=("tp",)), [Replicate()]
    )
    source.scale, target.scale = nn.Parameter(scale), nn.Parameter(torch.zeros(()))
    copy_weights(source, target)
    return target.scale.item()


def copy_in_inference_mode(mesh: namedmesh.NamedMesh) -> list[float]:
    source, target = Ends(5.0, "head"), Ends(0.0, "head")
    for model in (source, target):
        parallelize(model, mesh["pp"], {"head": ColwiseParallel()})
    with torch.inference_mode():
        copy_weights(source, target)
    head: Any = target.head
    return head.weight.full_tensor().unique().tolist()  # type: ignore[no-any-return]


def find_hidden_shards(mesh: namedmesh.NamedMesh) -> list[str]:
    """A forward of DDP over tensor parallelism leaves only replicated parameters in the state dict."""
    models = []
    for value in (5.0, 0.0):
        ends: Any = Ends(value, "head")
        model = nn.Sequential(nn.LayerNorm(4), ends.head)
        parallelize(model, mesh["pp"], {"1": ColwiseParallel()})
        models.append(DistributedDataParallel(model, device_mesh=mesh["dp"]))
        models[-1](torch.ones(2, 4)).sum().backward()
    return list_problems(lambda: copy_weights(*models))


def copy_special_cases() -> tuple[Any, ...]:
    mesh = namedmesh.init_mesh(dp=1, pp=2, device="cpu")
    return (
        copy_tied_stages(mesh),
        copy_from_one_rank_to_the_other(),
        copy_a_scalar_of_one_rank(),
        copy_in_inference_mode(mesh),
        [problem.partition(",")[0] for problem in find_hidden_shards(mesh)],
    )


def test_ties_ranks_without_tensors_scalars_and_inference_mode() -> None:
    hidden = [f"the {role} is under DDP over tensor parallelism" for role in ("source", "target")]
    first, second = run_ranks(2, copy_special_cases, timeout=60)
    assert first == ([5.0], [], 7.0, [5.0], hidden)
    assert second == ([5.0], [5.0], 7.0, [5.0], hidden)


def test_values_that_a_state_dict_makes_are_not_copied_into_nothing() -> None:
    source: Any = Ends(5.0, "head")
    target: Any = Ends(0.0, "head")

    def clone(_module: Any, values: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        values.update({name: value.clone() for name, value in values.items()})

    target.register_state_dict_post_hook(clone)
    [problem] = list_problems(lambda: copy_weights(source, target))
    assert problem.startswith("head.weight of the target is a tensor that its state_dict() makes")
