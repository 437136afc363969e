"""Loading in other layouts: the saved values, or an error that names the values that do not fit."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from messages import error_of, list_problems
from ranks import run_ranks
from tensors import full_tensor, random_tensor
from tiny import shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import namedmesh
from namedmesh import training
from namedmesh._checks.digests import digest
from namedmesh.compat.megatron.tensor_parallel import set_tensor_model_parallel_attributes
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize
from namedmesh.training import seeds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# --- any two layouts -------------------------------------------------------------------------------------------

LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"dp": 2}, {"pp": 2, "dp": 1}],
    3: [{"dp": 3}],
    6: [{"dp": 3, "tp": 2}],
}
MORE_LAYOUTS = {**LAYOUTS, 6: [*LAYOUTS[6], {"dp_replicate": 2, "dp_shard": 3}, {"pp": 3, "dp": 2}]}
# Sizes that the ranks do not divide evenly: their shards have equal lengths at different offsets.
WIDTHS = [(5, 12), (50, 12), (5, 12)]


def make_expected_values() -> dict[str, Tensor]:
    """Return the value of each entry in one process."""
    values: dict[str, Tensor] = {}
    for number, (narrow, wide) in enumerate(WIDTHS):
        shapes = {"up.weight": (wide, narrow), "up.bias": (wide,), "down.weight": (narrow, wide)}
        for name, shape in shapes.items():
            values[f"{number}.{name}"] = random_tensor(*shape, seed=len(values))
    return values


def make_sharded_model(mesh: namedmesh.NamedMesh) -> nn.Sequential:
    """Return the layers of this rank's stage, with tensor parallelism over tp and FSDP over dp."""
    stages = mesh.size("pp") if "pp" in mesh.layout else 1
    stage = mesh.rank("pp") if stages > 1 else 0
    model = nn.Sequential()
    for number in range(stage, len(WIDTHS), stages):
        narrow, wide = WIDTHS[number]
        up, down = nn.Linear(narrow, wide), nn.Linear(wide, narrow, bias=False)
        model.add_module(str(number), nn.ModuleDict({"up": up, "down": down}).double())
    for name, parameter in model.named_parameters():
        parameter.data = make_expected_values()[name]
    if "tp" in mesh.layout:
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        parallelize(model, mesh["tp"], plan, strict=False)
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    return model


def make_adam_with_state(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose moments are twice the parameters."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = torch.empty_like(parameter)
        shard(moment).copy_(2 * shard(parameter.detach()))
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment}
    return optimizer


def save_and_load_in_layouts(layouts: list[dict[str, int]], root: Path, sources: list[str]) -> None:
    expected = make_expected_values()
    for sizes in layouts:
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        model = make_sharded_model(mesh)
        optimizer = make_adam_with_state(model)
        name = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        training.save(root / name, mesh, model, optimizer)
        others = random.Random(name).sample(sources, min(2, len(sources)))
        for source in others:
            for parameter in model.parameters():
                shard(parameter.detach()).zero_()
            optimizer = torch.optim.AdamW(model.parameters())
            training.load(root / source, mesh, model, optimizer)
            for key, parameter in model.named_parameters():
                state = optimizer.state[parameter]
                assert torch.equal(full_tensor(parameter), expected[key]), (source, name, key)
                assert torch.equal(full_tensor(state["exp_avg"]), 2 * expected[key]), (source, name, key)
                assert torch.equal(shard(state["exp_avg"]), shard(state["exp_avg_sq"])), (source, name, key)
                assert state["step"] == 7
        sources = [*sources, name]
        dist.barrier()
        mesh.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    "layouts_by_world", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_any_layout_loads_checkpoints_of_any_other(
    layouts_by_world: dict[int, list[dict[str, int]]], tmp_path: Path
) -> None:
    for ranks, layouts in layouts_by_world.items():
        saved = sorted(path.name for path in tmp_path.iterdir())
        run_ranks(ranks, save_and_load_in_layouts, layouts, tmp_path, saved)


# --- optimizers ------------------------------------------------------------------------------------------------


class ExtraStateSGD(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    scale: Any = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict.pop("scale")
        super().load_state_dict(state_dict)


def make_sgd_with_momentum(model: nn.Module, value: float) -> torch.optim.Optimizer:
    """Return an optimizer whose momentum is one value, in plain tensors of the parameters' shapes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        momentum = torch.full(parameter.shape, value)
        optimizer.state[parameter] = {"momentum_buffer": momentum, "absmax": torch.full((3,), value)}
    return optimizer


def list_values(optimizer: torch.optim.Optimizer, key: str) -> list[float]:
    return sorted(
        {number for kept in optimizer.state.values() for number in shard(kept[key]).flatten().tolist()}
    )


def test_optimizer_keys_empty_groups_and_any_names_are_restored(tmp_path: Path) -> None:
    def job() -> tuple[nn.Module, list[ExtraStateSGD], list[Any]]:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "a:b%3A": nn.Linear(2, 2)})
        groups: list[dict[str, Any]] = [{"params": model["a"].parameters()}, {"params": []}]
        optimizers = [
            ExtraStateSGD(groups, lr=0.5, momentum=0.9),
            ExtraStateSGD(model["a:b%3A"].parameters(), lr=0.5, momentum=0.9),
        ]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
        return model, optimizers, schedulers

    def train(model: nn.Module, optimizers: list[ExtraStateSGD], schedulers: list[Any]) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        for each in (*optimizers, *schedulers):
            each.step()

    model, optimizers, schedulers = job()
    train(model, optimizers, schedulers)
    for number, optimizer in enumerate(optimizers):
        optimizer.scale = {"growth": number}
        optimizer.state["all"] = {"calls": number}  # type: ignore[index]  # torch leaves it as it is
    training.save(tmp_path / "one", None, model, optimizers)
    other, again, _ = job()
    for optimizer in again:
        for group in optimizer.param_groups:
            del group["initial_lr"]
    training.load(
        tmp_path / "one", None, other, again[::-1]
    )  # state follows the parameters, not the position
    for found, expected in zip(again, optimizers, strict=True):
        assert digest(found.state_dict()) == digest(expected.state_dict())
    train(other, again, [torch.optim.lr_scheduler.ExponentialLR(each, 0.5, last_epoch=1) for each in again])
    train(model, optimizers, schedulers)
    assert digest(other.state_dict()) == digest(model.state_dict())
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    training.save(tmp_path / "without", None, model, plain)
    both = ExtraStateSGD(model.parameters(), lr=0.5)
    for name in ("one", "without"):  # saved by two optimizers, and by one without extra state
        message = error_of(partial(training.load, tmp_path / name, None, model, both))
        assert "optimizer 0: its state in addition to the state of its parameters is not in" in message


def optimizer_state_of_one_rank_is_restored_or_rejected(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    rank = float(mesh.rank())
    model, sharded = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded, mesh=mesh["dp"])
    for each in (model, sharded):
        for parameter in each.parameters():
            shard(parameter.detach()).fill_(1)
    for name, net in (("plain", model), ("sharded", sharded)):
        training.save(root / name, mesh, net, make_sgd_with_momentum(net, rank))
        training.load(root / name, mesh, net, optimizer := torch.optim.SGD(net.parameters()))
        assert list_values(optimizer, "momentum_buffer") == list_values(optimizer, "absmax") == [rank]
        assert not isinstance(optimizer.state[next(net.parameters())]["momentum_buffer"], DTensor)
    training.save(root / "equal", mesh, model, make_sgd_with_momentum(model, 5.0))
    # The coordinates are equal, but the ranks have other shards than when the state was saved.
    kept = "'0.weight:momentum_buffer', '0.weight:absmax', '0.bias:momentum_buffer', '0.bias:absmax': kept by the optimizer"
    for name, net in (("plain", sharded), ("sharded", model)):
        optimizer = torch.optim.SGD(net.parameters())
        assert error_of(partial(training.load, root / name, mesh, net, optimizer)).startswith(
            f"CheckpointError: {kept}"
        )
        training.load(root / name, mesh, net)
    own = ExtraStateSGD(model.parameters(), lr=0.1)
    own.scale = rank
    training.save(root / "own", mesh, model, own)
    own.scale = None
    training.load(root / "own", mesh, model, own)
    assert own.scale == rank
    # State that is equal on all ranks is sharded as the parameters.
    training.load(root / "equal", mesh, sharded, optimizer := torch.optim.SGD(sharded.parameters()))
    assert isinstance(optimizer.state[next(sharded.parameters())]["momentum_buffer"], DTensor)
    assert list_values(optimizer, "momentum_buffer") == [5.0]
    mesh.close()
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    assert "optimizer 0: its state" in error_of(partial(training.load, root / "own", mesh, model, own))
    mesh.close()


class RowsAndNorms(torch.optim.Optimizer):
    """An optimizer with a moment for each row and column, as Adafactor, and norms, as LAMB."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # noqa: ARG002  torch's signature
        for parameter in self.param_groups[0]["params"]:
            state, squares = self.state[parameter], parameter.grad.square()
            for key, moment in (
                ("rows", squares.mean(-1)),
                ("kept", squares.mean(-1, keepdim=True)),
                ("columns", squares.mean(0)),
            ):
                state[key] = state[key] * 0.9 + moment if key in state else moment
            state["norm"] = state.get("norm", 0.0) * 0.5 + parameter.norm()
            denominator = state["rows"].unsqueeze(-1) + state["kept"] + state["columns"]
            parameter.sub_(parameter.grad / denominator.sqrt() * state["norm"] * 0.1)


def optimizer_state_of_other_shapes_resumes_in_any_layout(root: Path) -> None:
    def job(sharded: bool, source: Path | None, target: Path | None) -> Tensor:
        net = nn.Linear(6, 5, bias=False).double()
        net.weight.data = random_tensor(5, 6, seed=0)
        if sharded:
            fully_shard(net, mesh=mesh["dp"])
        optimizer = RowsAndNorms(net.parameters())
        where = mesh if sharded else None
        if source is not None:
            training.load(source, where, net, optimizer)
        value = random_tensor(5, 6, seed=1)
        net.weight.grad = value
        if sharded:
            weight: Any = net.weight
            net.weight.grad = torch.distributed.tensor.distribute_tensor(
                value, weight.device_mesh, weight.placements, src_data_rank=None
            )
        optimizer.step()
        if target is not None and (sharded or mesh.rank() == 0):
            training.save(target, where, net, optimizer)
        dist.barrier()
        return full_tensor(net.weight).clone()

    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    job(False, None, root / "plain")
    expected = job(False, root / "plain", None)
    job(True, None, root / "sharded")
    for source in ("plain", "sharded"):
        for sharded in (True, False):
            torch.testing.assert_close(job(sharded, root / source, None), expected)
    mesh.close()
    # The attributes of a plain shard do not tell which of the moments belong to it.
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    net = nn.Linear(6, 5, bias=False).double()
    net.weight = nn.Parameter(random_tensor(5, 6, seed=0).chunk(2, 1)[mesh.rank()])
    set_tensor_model_parallel_attributes(net.weight, is_parallel=True, dim=1, stride=1)
    message = error_of(lambda: training.load(root / "plain", mesh, net, RowsAndNorms(net.parameters())))
    assert (
        "'weight:rows', 'weight:kept', 'weight:columns': kept by the optimizer for the shard of one rank"
        in message
    )
    training.load(root / "plain", mesh, net)
    mesh.close()


# --- random states and data loaders -----------------------------------------------------------------


class Loader:
    """A data loader that counts the samples of one rank, as torch's samplers."""

    place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def random_values_and_samples_are_not_repeated_on_more_ranks(root: Path) -> None:
    model = nn.Linear(1, 1)
    layouts: dict[str, dict[str, int]] = {
        "one": {"dp": 1, "tp": 2},
        "stages": {"pp": 2, "dp": 1},
        "two": {"dp": 2, "tp": 1},
        "shards": {"dp_replicate": 1, "dp_shard": 2},
    }
    states: dict[str, dict[str, int]] = {}
    for name, sizes in layouts.items():
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        training.seed_all(0, mesh)
        torch.rand(1)
        loader = Loader()
        loader.place = 7
        training.save(root / name, mesh, model, data=loader)
        states[name] = {key: digest(value) for key, value in seeds.collect_rng_states().items()}
        mesh.close()
    default = {"cpu", "python"}
    for source, target, kept in (
        ("one", "one", {*default, "data"}),
        ("one", "stages", {"data"}),
        ("stages", "one", {"data"}),
        ("one", "two", set()),
        ("two", "one", set()),
        ("two", "two", {*default, "data"}),
        ("two", "shards", set()),
    ):
        mesh = namedmesh.init_mesh(layouts[target], device="cpu")
        training.seed_all(1, mesh)
        fresh = {key: digest(value) for key, value in seeds.collect_rng_states().items()}
        training.load(root / source, mesh, model)
        found = {key: digest(value) for key, value in seeds.collect_rng_states().items()}
        for key in (*default, "data"):
            assert found[key] == (states[source] if key in kept else fresh)[key], (source, target, key)
        loader = Loader()
        message = error_of(partial(training.load, root / source, mesh, model, data=loader))
        if {source, target} in ({"one", "two"}, {"stages", "two"}):
            assert "'0': no state of the data loader for this rank in" in message
        else:
            assert (message, loader.place) == ("", 7)
        mesh.close()


# --- wrappers, and partial loads ----------------------------------------------------------------------------


def entry_names_do_not_depend_on_wrappers(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def net(value: float) -> nn.Sequential:
        made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        for parameter in made.parameters():
            parameter.data.fill_(value)
        return made

    inside = net(3.0)
    inside[1] = DistributedDataParallel(inside[1])
    wrapped: list[Any] = [
        torch.compile(DistributedDataParallel(net(1.0)), backend="eager"),
        DistributedDataParallel(torch.compile(net(2.0), backend="eager")),
        inside,
    ]
    for value, model in enumerate(wrapped, 1):
        training.save(root / str(value), mesh, model)
        training.load(root / str(value), mesh, plain := net(0.0))
        assert {each.mean().item() for each in plain.parameters()} == {value}
        training.load(root / "1", mesh, model)
        assert {each.mean().item() for each in model.parameters()} == {1.0}
    mesh.close()


def test_a_model_on_meta_is_rejected(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    training.save(tmp_path / "one", None, model)
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    for call in (training.save, training.load):
        assert error_of(partial(call, tmp_path / "one", None, other)) == (
            "CheckpointError: weight, bias: on the meta device; call model.to_empty(device=...) first"
        )
    other.to_empty(device="cpu")
    training.load(tmp_path / "one", None, other)
    assert torch.equal(other.weight, model.weight)


def test_partial_loads_report_missing_and_unexpected_names(tmp_path: Path) -> None:
    def net(classes: int, *names: str) -> tuple[Any, torch.optim.Optimizer]:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
        model["head"] = nn.Linear(2, classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * classes, momentum=0.9)
        for parameter in model.parameters():
            parameter.data.fill_(classes)
            optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, classes)}
        return model, optimizer

    def values(*job: Any) -> dict[str, float]:
        model, optimizer = job
        found = {}
        for name, parameter in model.named_parameters():
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter)
            found[name.removesuffix(".weight")] = parameter.mean().item()
        return found

    path = tmp_path / "one"
    training.save(path, None, *net(3, "a", "b"), step=4)
    # The model has a new layer, and has lost one.
    job = net(3, "a", "c")
    job[0]["c"].weight.data.fill_(8)
    job[1].state[job[0]["c"].weight]["momentum_buffer"].fill_(8)
    loaded = training.load(path, None, *job, strict=False)
    assert (loaded, loaded.missing_keys, loaded.unexpected_keys) == ({"step": 4}, ["c.weight"], ["b.weight"])
    assert values(*job) == {"a": 3, "c": 8, "head": 3, "head.bias": 3}
    # A head of another size is an error, unless it is not selected.
    job = net(5, "a", "b")
    assert list_problems(lambda: training.load(path, None, *job, strict=False)) == [
        f"'head.weight': of shape (5, 2) here, and (3, 2) in the checkpoint {path}",
        f"'head.bias': of shape (5,) here, and (3,) in the checkpoint {path}",
    ]
    assert set(values(*job).values()) == {5}
    loaded = training.load(path, None, *job, select=lambda name: not name.startswith("head."))
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["head.weight", "head.bias"], [])
    assert values(*job) == {"a": 3, "b": 3, "head": 5, "head.bias": 5}
    assert job[1].param_groups[0]["lr"] == pytest.approx(0.3)
    # All selected names must exist on both sides.
    job = net(5, "a", "c")
    assert list_problems(
        partial(training.load, path, None, job[0], select=lambda name: "head" not in name)
    ) == [
        f"'c.weight': not in the checkpoint {path}",
        f"'b.weight': in the checkpoint {path}, and on no rank in the model",
    ]
    loaded = training.load(path, None, *net(3, "a", "b"))
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])


def all_stages_report_the_names_that_any_stage_does_not_load(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    stage = mesh.rank()
    training.save(
        root / "one", mesh, nn.ModuleDict({f"{stage}": nn.Linear(1, 1), f"old{stage}": nn.Linear(1, 1)})
    )
    model = nn.ModuleDict({f"{stage}": nn.Linear(1, 1), f"new{stage}": nn.Linear(1, 1, bias=False)})
    loaded = training.load(root / "one", mesh, model, strict=False)
    assert loaded.missing_keys == ["new0.weight", "new1.weight"]
    assert loaded.unexpected_keys == ["old0.bias", "old0.weight", "old1.bias", "old1.weight"]
    mesh.close()


def tied_stages_stay_tied_after_a_conversion_and_in_a_copy(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, dp=1, device="cpu")

    def stage(sharded: bool) -> nn.ModuleDict:
        linear = nn.Linear(2, 2, bias=False)
        nn.init.ones_(linear.weight)
        if sharded:
            fully_shard(linear, mesh=mesh["dp"])
        first = linear.weight if mesh.is_first("pp") else None
        last = None if mesh.is_first("pp") else linear.weight
        ties.append(training.tie_stages(first, last, mesh))
        return nn.ModuleDict({"embed" if mesh.is_first("pp") else "head": linear})

    ties: list[Any] = []
    for name, model in (
        ("converted", stage(True).to(torch.float64)),
        ("copied", copy.deepcopy(stage(False))),
    ):
        training.save(root / name, mesh, model)
        for parameter in model.parameters():
            shard(parameter.detach()).add_(mesh.rank())
        message = error_of(partial(training.save, root / "apart", mesh, model))
        assert "'embed.weight' has other values on other stages" in message
    mesh.close()


# --- all of them, in a world of two ranks ----------------------------------------------------------------------

ON_TWO_RANKS = (
    optimizer_state_of_one_rank_is_restored_or_rejected,
    optimizer_state_of_other_shapes_resumes_in_any_layout,
    random_values_and_samples_are_not_repeated_on_more_ranks,
    entry_names_do_not_depend_on_wrappers,
    all_stages_report_the_names_that_any_stage_does_not_load,
    tied_stages_stay_tied_after_a_conversion_and_in_a_copy,
)


def run_in_turn(cases: tuple[Callable[[Path], None], ...], root: Path) -> None:
    for case in cases:
        (root / case.__name__).mkdir(exist_ok=True)
        case(root / case.__name__)


@pytest.mark.ci
def test_two_ranks_resume(tmp_path: Path) -> None:
    run_ranks(2, run_in_turn, ON_TWO_RANKS, tmp_path)
