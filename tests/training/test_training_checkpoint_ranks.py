"""Saves and loads of several ranks: who made which call, who is lost, and what resumes exactly."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_checks import DISK_FULL, list_files, run_in_turn
from messages import error_of
from ranks import run_ranks
from tensors import full_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh._errors import CheckpointError
from namedmesh._torch.groups import get_timeout
from namedmesh.training import checkpoint_storage

# --- the same call on every rank -----------------------------------------------------------------


def different_calls_are_named(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, second = nn.Linear(2, 2), mesh.rank() == 1
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    training.save(root / "one", mesh, model)
    manager = training.CheckpointManager(root / "run", mesh)
    calls: list[tuple[str, Any, Any]] = [
        (
            "save",
            lambda: training.save(root / "one", mesh, model),
            lambda: training.save(root / "two", mesh, model),
        ),
        (
            "load",
            lambda: training.load(root / "one", mesh, model),
            lambda: training.save(root / "one", mesh, model),
        ),
        ("step", lambda: manager.save(1, model), lambda: manager.save(2, model)),
    ]
    texts = {
        "save": f"rank 1 called save('{root}/two'), and rank 0 called save('{root}/one')",
        "load": f"rank 1 called save('{root}/one'), and rank 0 called load('{root}/one')",
        "step": f"rank 1 called save('{root}/run/step-000002'), and rank 0 called save('{root}/run/step-000001')",
    }
    for name, first_call, second_call in calls:
        assert error_of(second_call if second else first_call) == (
            f"AgreementError: {texts[name]}; make the same call, with the same path and step, on every rank"
        )
    mesh.close()
    dist.barrier()
    assert list_files(root) == ["one"]


def an_error_that_was_raised_from_result_is_not_raised_again(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    with DISK_FULL:
        failed = training.save(root / "bad", mesh, model, async_=True)
        if mesh.rank() == 1:  # one rank is enough, and all agree
            with pytest.raises(CheckpointError, match="No space left"):
                failed.result()
        failed.exception()
    training.save(root / "good", mesh, model)
    mesh.close()
    dist.barrier()
    assert list_files(root) == ["good"]


def a_file_that_vanishes_leaves_no_checkpoint(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    finish = checkpoint_storage.StorageWriter.finish

    def lose(self: Any, *arguments: Any, **named: Any) -> None:
        next(Path(self.path).glob("*__1_0.distcp")).unlink()
        finish(self, *arguments, **named)

    late = mock.patch.object(checkpoint_storage, "VISIBILITY_TIMEOUT", 0.1)
    with mock.patch.object(checkpoint_storage.StorageWriter, "finish", lose), late:
        message = error_of(lambda: training.save(root / "one", mesh, model))
    assert "rank 0 does not see " in message
    assert f"__1_0.distcp in {root}/one as they were written" in message
    mesh.close()
    dist.barrier()
    assert list_files(root) == []


def a_rank_may_write_for_longer_than_a_collective_may_take(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu", timeout=timedelta(seconds=5))
    training.save(root / "one", mesh, nn.Module())
    (group,) = (known.group for known in mesh.communicators if known.label == "checkpoints")
    assert get_timeout(group) == timedelta(minutes=30)
    mesh.close()


def unlike_replicas_are_refused_whatever_their_width(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    for number, width in enumerate((512, 1024, 2048)):
        model = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            model.weight.fill_(1)
            model.weight[:, 1:] += mesh.rank()
        # The ranks compare on the schedule of clip_grad_norm_: the first call of a new mesh is on it.
        other = namedmesh.init_mesh(dp=2, device="cpu")
        message = error_of(partial(training.save, root / str(number), other, model))
        assert message.startswith("CheckpointError: The weights of parameters 0 ")
        other.close()
    mesh.close()


# --- gradients -----------------------------------------------------------------------------------


def gradients_between_two_backwards_are_saved(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def job() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = nn.Linear(8, 4)
        fully_shard(model, mesh=training.fsdp_mesh(mesh))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def accumulate(model: nn.Module, number: int) -> None:
        (model(torch.full((4, 8), number + 1.0)).square().mean() / 2).backward()

    model, optimizer = job()
    accumulate(model, 0)
    training.save(root / "half", mesh, model, optimizer)
    training.save(root / "weights", mesh, model)
    accumulate(model, 1)
    optimizer.step()
    expected = model.weight.full_tensor()
    model, optimizer = job()
    training.load(root / "half", mesh, model, optimizer)
    accumulate(model, 1)
    optimizer.step()
    assert torch.equal(model.weight.full_tensor(), expected)
    # A checkpoint without gradients leaves them as they are, as load_state_dict() does.
    optimizer.zero_grad()
    training.save(root / "clean", mesh, model, optimizer)
    accumulate(model, 0)
    training.load(root / "clean", mesh, model, optimizer)
    assert model.weight.grad is not None
    model.set_requires_gradient_sync(False)
    accumulate(model, 0)
    assert "gradients are accumulated on each rank, and not reduced yet" in error_of(
        lambda: training.save(root / "unreduced", mesh, model, optimizer)
    )
    mesh.close()


def print_uncaught_error(path: str) -> str:
    """Return the text that the interpreter prints for the uncaught error of a load."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    printed = io.StringIO()
    try:
        training.load(path, mesh, nn.Linear(2, 2))
    except namedmesh.CheckpointError as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    mesh.close()
    return printed.getvalue()


def test_one_rank_prints_the_whole_error_of_a_load(tmp_path: Path) -> None:
    first, second = run_ranks(2, print_uncaught_error, str(tmp_path / "absent"))
    assert "Traceback" in first
    assert second.startswith("CheckpointError on rank 1: there is no complete checkpoint at ")
    assert second.count("\n") == 1


# --- optimizers ----------------------------------------------------------------------------------


class Stages(nn.Module):
    """The layers of this rank's stages of a model, and a projection that the first stage has."""

    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        super().__init__()
        self.layers = training.stage_layers([nn.Linear(2, 2).double() for _ in range(2)], mesh)
        self.projection = nn.Linear(2, 2).double() if mesh.is_first("pp") else None

    def train_once(self, optimizers: list[Any], schedulers: list[Any], average: nn.ParameterDict) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.detach().sin()
        for each in (*optimizers, *schedulers):
            each.step()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                average[name.replace(".", "-")].lerp_(parameter, 0.5)
        for optimizer in optimizers:
            optimizer.zero_grad()


def run_stages(sizes: dict[str, int], source: Path | None, target: Path, steps: int) -> dict[str, Any]:
    mesh = namedmesh.init_mesh(sizes, device="cpu")
    model = Stages(mesh)
    training.init_parameters(model, seed=0)
    average = nn.ParameterDict(
        {
            name.replace(".", "-"): nn.Parameter(value.detach().clone())
            for name, value in model.named_parameters()
        }
    )
    projection: list[Any] = [] if model.projection is None else list(model.projection.parameters())
    optimizers = [
        torch.optim.AdamW(model.layers.parameters(), lr=0.01),
        torch.optim.SGD([{"params": projection}, {"params": []}], lr=0.05, momentum=0.9),
    ]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 20) for each in optimizers]
    both = [model, nn.ModuleDict({"average": average})]
    if source is not None:
        restored = training.load(source, mesh, both, optimizers)
        for scheduler, state in zip(schedulers, restored["schedulers"], strict=True):
            scheduler.load_state_dict(state)
    for _ in range(steps):
        model.train_once(optimizers, schedulers, average)
    training.save(target, mesh, both, optimizers, schedulers=[each.state_dict() for each in schedulers])
    results: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    results |= {f"average.{name}": value.detach().clone() for name, value in average.items()}
    results["rates"] = [group["lr"] for each in optimizers for group in each.param_groups]
    mesh.close()
    return results


def schedulers_averages_and_two_optimizers_resume_exactly_across_stages(root: Path) -> None:
    one, two = {"pp": 1, "dp": 2}, {"pp": 2, "dp": 1}
    expected = run_stages(one, None, root / "whole", 6)
    for first, second in ((one, two), (two, one), (two, two)):
        name = f"{first['pp']}-{second['pp']}"
        run_stages(first, None, root / name, 3)
        dist.barrier()
        found = run_stages(second, root / name, root / f"{name}-resumed", 3)
        assert found["rates"] == expected["rates"]
        for key, value in found.items():
            assert key == "rates" or torch.equal(value, expected[key]), (name, key)


def state_that_no_optimizer_takes_is_an_error(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def make() -> tuple[Any, list[nn.Parameter], list[nn.Parameter]]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        fully_shard(model, mesh=training.fsdp_mesh(mesh))
        return model, list(model[0].parameters()), list(model[1].parameters())

    model, body, head = make()
    groups: Any = [{"params": head}, {"params": body, "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    training.save(root / "one", mesh, model, optimizer)
    training.save(root / "two", mesh, model, [torch.optim.AdamW(head), optimizer_of(body, optimizer)])
    without_bias: Any = [{"params": head[:1]}, {"params": body}]
    cases: list[tuple[str, Any]] = [("one", head), ("two", head), ("one", without_bias)]
    for name, params in cases:
        half = torch.optim.AdamW(params)
        left = "'0.bias', '0.weight'" if params is head else "'1.bias'"
        assert error_of(partial(training.load, root / name, mesh, model, half)) == (
            f"CheckpointError: {left}: optimized in the checkpoint {root}/{name}, and by no optimizer here; give the "
            "optimizers that were saved, or pass strict=False to leave their state out"
        )
        loaded = training.load(root / name, mesh, model, half, strict=False)
        assert [repr(name) for name in loaded.unused_optimizer_keys] == left.split(", ")
    training.load(root / "one", mesh, model)  # without an optimizer, the model alone
    mesh.close()


def optimizer_of(params: list[nn.Parameter], other: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for param in params:
        optimizer.state[param] = other.state[param]
    return optimizer


GATHERS = ("gather_object", "all_gather_object")


def a_plan_has_few_bytes_more_than_that_of_dcp(root: Path) -> None:
    """Every rank sends its plan to rank 0."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    moments = {}
    for name, parameter in model.named_parameters():
        moments[name] = torch.zeros_like(parameter)
        optimizer.state[parameter] = {"exp_avg": moments[name]}
    sent: list[int] = []

    def measure(function: Any, **named: Any) -> None:
        sent.append(len(pickle.dumps(named["obj"])))
        function(**named)

    gathers = [mock.patch.object(dist, name, partial(measure, getattr(dist, name))) for name in GATHERS]
    with gathers[0], gathers[1]:
        dcp.save({"model": model.state_dict(), "moments": moments}, checkpoint_id=root / "theirs")
        theirs = sent.copy()
        sent.clear()
        training.save(root / "ours", mesh, model, optimizer)
    # The last gather is that of the results, after the data was written.
    if mesh.rank() == 1:  # rank 0 sends the options of the optimizer, which all ranks have
        assert sum(sent[:-1]) < 1.2 * sum(theirs[:-1])
    mesh.close()


ON_TWO_RANKS = (
    different_calls_are_named,
    an_error_that_was_raised_from_result_is_not_raised_again,
    a_file_that_vanishes_leaves_no_checkpoint,
    a_rank_may_write_for_longer_than_a_collective_may_take,
    unlike_replicas_are_refused_whatever_their_width,
    gradients_between_two_backwards_are_saved,
    schedulers_averages_and_two_optimizers_resume_exactly_across_stages,
    state_that_no_optimizer_takes_is_an_error,
    a_plan_has_few_bytes_more_than_that_of_dcp,
)


@pytest.mark.ci
def test_two_ranks_agree_and_resume(tmp_path: Path) -> None:
    run_ranks(2, run_in_turn, ON_TWO_RANKS, tmp_path)


# --- lost ranks, and other jobs ------------------------------------------------------------------


def save_while_a_rank_is_killed(root: Path, moment: str, pipe: Any) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu", timeout=timedelta(seconds=60))
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    training.save(root / "one", mesh, model)

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    in_write = mock.patch.object(dcp.FileSystemWriter, "write_data", die)
    if mesh.rank() == 1 and moment == "before":
        die()
    with in_write if mesh.rank() == 1 else nullcontext():
        pipe.send(error_of(lambda: training.save(root / "one", mesh, model)))
    os._exit(0)


@pytest.mark.parametrize("moment", ["before", "write"])
def test_a_killed_rank_is_not_taken_for_a_full_disk(tmp_path: Path, moment: str) -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    with pytest.raises(AssertionError, match="2 of 2 ranks failed"):  # both end without a result
        run_ranks(2, save_while_a_rank_is_killed, tmp_path, moment, theirs)
    message = ours.recv()
    assert "another rank has ended, or does not answer (RuntimeError: " in message
    assert message.endswith("Read the output of the other ranks for the cause, and restart the job.")
    assert "disk" not in message
    training.load(tmp_path / "one", None, nn.Linear(4, 4))


def hold_a_save(path: Path, pipe: Any) -> None:
    write = dcp.FileSystemWriter.write_data

    def wait(*arguments: Any) -> Any:
        pipe.send("held")
        pipe.recv()
        return write(*arguments)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", wait):
        training.save(path, None, nn.Linear(1, 1), job=1)
    pipe.send("saved")


def test_two_jobs_that_save_to_one_path_are_told_apart(tmp_path: Path) -> None:
    path, context = tmp_path / "one", multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold_a_save, args=(path, theirs), daemon=True)
    other.start()
    assert ours.recv() == "held"
    message = error_of(lambda: training.save(path, None, nn.Linear(1, 1), job=2))
    assert message.startswith(f"CheckpointError: {path} is in use by process {other.pid} on host ")
    ours.send("go on")
    assert ours.recv() == "saved"
    other.join()
    assert training.load(path, None, nn.Linear(1, 1)) == {"job": 1}
    training.save(path, None, nn.Linear(1, 1), job=2)
    assert training.load(path, None, nn.Linear(1, 1)) == {"job": 2}
    assert full_tensor(torch.ones(1)) == 1
