"""Runs that go on in another way than they were saved: gradients, dtypes, frozen layers, data ranks, other folders."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from messages import error_of
from ranks import run_ranks
from tensors import full_tensor, random_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR

import namedmesh
from namedmesh import training


def make_job(dtype: torch.dtype = torch.float32, optimizer: type[Optimizer] = AdamW) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    return model, optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]


def add_gradient(model: nn.Linear, seed: int) -> None:
    data = random_tensor(4, 3, seed=seed).to(model.weight.dtype)
    model(data).square().mean().backward()


def test_a_gradient_before_the_first_step_of_a_resumed_run_is_saved(tmp_path: Path) -> None:
    model, optimizer = make_job()
    add_gradient(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    training.save(tmp_path / "after a step", None, model, optimizer)
    for seed in (1, 2):
        add_gradient(model, seed)
    optimizer.step()
    resumed, other = make_job()
    training.load(tmp_path / "after a step", None, resumed, other)
    add_gradient(resumed, 1)
    training.save(tmp_path / "between", None, resumed, other)
    for source, target in (("between", "again"), ("again", "once more")):
        resumed, other = make_job()
        training.load(tmp_path / source, None, resumed, other)
        training.save(tmp_path / target, None, resumed, other)
    add_gradient(resumed, 2)
    other.step()
    assert torch.equal(resumed.weight, model.weight)
    # After a step a gradient has no effect, also if the loop keeps it.
    training.save(tmp_path / "used", None, resumed, other)
    resumed, other = make_job()
    training.load(tmp_path / "used", None, resumed, other)
    assert resumed.weight.grad is None


@pytest.mark.parametrize("optimizer", [AdamW, RMSprop, partial(SGD, momentum=0.9)])
def test_a_cast_converts_the_state_as_torch_does(optimizer: Any, tmp_path: Path) -> None:
    model, saved = make_job(optimizer=optimizer)
    add_gradient(model, 0)
    saved.step()
    saved.zero_grad()
    training.save(tmp_path / "one", None, model, saved)
    (cast, found), (expected, by_torch) = (make_job(torch.bfloat16, optimizer) for _ in range(2))
    training.load(tmp_path / "one", None, cast, found, cast=True)
    expected.load_state_dict(model.state_dict())
    by_torch.load_state_dict(saved.state_dict())
    for job in ((cast, found), (expected, by_torch)):
        add_gradient(job[0], 1)
        job[1].step()
    assert torch.equal(cast.weight, expected.weight)


def test_without_strict_an_optimizer_may_have_more_parameters(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    head = AdamW(model[1].parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    head.step()
    head.zero_grad()
    training.save(tmp_path / "head", None, model, head)
    optimizer = AdamW(model.parameters(), lr=0.1)
    load = partial(training.load, tmp_path / "head", None, model, optimizer)
    assert "'0.weight', '0.bias': not optimized in" in error_of(load)
    load(strict=False)
    assert set(optimizer.state) == set(model[1].parameters())
    for param in model[1].parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], head.state[param]["exp_avg"])


def test_gradients_made_in_inference_mode_can_be_used() -> None:
    model, optimizer = make_job(optimizer=SGD)
    before = model.weight.detach().clone()
    with torch.inference_mode():
        for param in model.parameters():
            param.grad = torch.ones_like(param)  # as evolution strategies do
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's, about a save of one process
def test_folders_of_other_programs_are_neither_replaced_nor_passed_over(tmp_path: Path) -> None:
    model, optimizer = make_job()
    folder = tmp_path / "step-000003"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    manager = training.CheckpointManager(tmp_path, None)
    assert "is a checkpoint of another program" in error_of(
        partial(manager.resume_or_start, model, optimizer)
    )
    assert "is not a namedmesh checkpoint" in error_of(partial(training.save, folder, None, model))
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before}
    assert after == before
    manager.resume_or_start(model, optimizer, resume=False)
    old = tmp_path / "old"
    shutil.copytree(Path(__file__).parents[1] / "support" / "checkpoint_0_3", old)
    manager = training.CheckpointManager(old, None)
    assert "0.3 or before" in error_of(partial(manager.resume_or_start, model, optimizer))


def test_other_objects_than_models_optimizers_and_steps_are_named(tmp_path: Path) -> None:
    model, optimizer = make_job()
    save = partial(training.save, tmp_path / "one", None)
    for arguments, got in (
        ((model.state_dict(), optimizer), "Module, or a list of them, got OrderedDict"),
        ((None, None), "Module, or a list of them, got NoneType"),
        ((model, optimizer.state_dict()), "Optimizer, or a list of them, got dict"),
        ((model, [StepLR(optimizer, 1)]), "Optimizer, or a list of them, got StepLR"),
    ):
        assert got in error_of(partial(save, *arguments))
    text = error_of(partial(save, model, where=Path("here")))
    assert "where is not plain data (it has pathlib" in text
    manager = training.CheckpointManager(tmp_path, None)
    for step in ("best", -1, 1.5):
        assert f"step is {step!r}" in error_of(partial(manager.save, step, model))  # type: ignore[arg-type]


class Loader:
    """A data loader that knows which part of the samples it loads."""

    def __init__(self, part: int) -> None:
        self.part = part

    def state_dict(self) -> dict[str, int]:
        return {"part": self.part}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.part = state["part"]


def load_data_of_the_same_position(root: Path) -> None:
    """The axes may have other names and sizes: the samples of a rank depend on its position among all data ranks."""
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    layouts = [{"dp": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 1, "dp_shard": 4}]
    for saved in layouts:
        mesh = namedmesh.init_mesh(saved, device="cpu")
        path = root / " ".join(saved)
        training.save(path, mesh, model, data=Loader(training.sampler_kwargs(mesh)["rank"]))
        mesh.close()
        for sizes in layouts:
            mesh = namedmesh.init_mesh(sizes, device="cpu")
            loader = Loader(-1)
            training.load(path, mesh, model, data=loader)
            assert loader.part == training.sampler_kwargs(mesh)["rank"]
            mesh.close()


@pytest.mark.ci
def test_data_loaders_resume_at_their_position(tmp_path: Path) -> None:
    run_ranks(4, load_data_of_the_same_position, tmp_path)


def keep_the_gradient_of_a_micro_batch(root: Path) -> tuple[Tensor, Tensor]:
    """FSDP2 with foreach and gradients that are set to zero: what changes is the local tensor of a gradient."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    optimizer = AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 4)).sum().backward()
    before: Any = model.weight.grad
    training.save(root / "one", mesh, model, optimizer)
    optimizer.zero_grad()
    training.load(root / "one", mesh, model, optimizer)
    mesh_gradient = full_tensor(model.weight.grad), full_tensor(before)
    mesh.close()
    return mesh_gradient


def refuse_shards_that_look_replicated(root: Path) -> list[str]:
    """Attributes say that each rank has another tensor, and not which part of a full one it is."""
    found = []
    for sizes, attribute in (({"tp": 2}, {"model_parallel": True}), ({"dp": 2}, {"allreduce": False})):
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        if "dp" in sizes:
            mesh.add_view("expert", edp=1, ep=2)
        model = nn.Linear(2, 2, bias=False)
        nn.init.constant_(model.weight, mesh.rank())
        vars(model.weight).update(attribute)
        found.append(error_of(partial(training.save, root / "shards", mesh, model)))
        mesh.close()
    return found


def name_state_that_one_rank_lacks(root: Path) -> str:
    """Experts without tokens have no gradient, and AdamW makes no state for them."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    weight: Any = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh["dp"], [Shard(0)]))
    model = nn.ParameterDict({"weight": weight})
    optimizer = AdamW(model.parameters())
    if mesh.rank() == 0:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    text = error_of(partial(training.save, root / "experts", mesh, model, optimizer))
    mesh.close()
    return text


def save_and_load_on_two_ranks(root: Path) -> tuple[Any, ...]:
    return (
        keep_the_gradient_of_a_micro_batch(root),
        refuse_shards_that_look_replicated(root),
        name_state_that_one_rank_lacks(root),
    )


def test_gradients_and_plain_shards_on_two_ranks(tmp_path: Path) -> None:
    for (loaded, saved), (shard, expert), text in run_ranks(2, save_and_load_on_two_ranks, tmp_path):
        assert "'weight:exp_avg', 'weight:exp_avg_sq': some ranks do not have their shards" in text
        assert torch.equal(loaded, saved)
        assert loaded.abs().sum() > 0
        assert "'weight': a local shard over 'tp', and its attributes do not say of which dim" in shard
        assert "'weight' is another expert on other ranks of 'ep'" in expert
