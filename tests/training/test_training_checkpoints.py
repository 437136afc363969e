"""Saving and loading: every value is restored, and an error is raised on every rank."""

from __future__ import annotations

import resource
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_checks import (
    DISK_FULL,
    collect_values,
    describe_states,
    list_files,
    make_adam,
    max_difference,
    run_in_turn,
)
from messages import error_of, list_problems
from ranks import run_ranks
from tensors import random_tensor
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh._checks.digests import digest
from namedmesh.compat.megatron.tensor_parallel import set_tensor_model_parallel_attributes
from namedmesh.training import checkpoint_storage, seeds
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_state import State

if TYPE_CHECKING:
    from collections.abc import Callable


def test_mismatches_are_reported_by_name(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2, bias=False)})
    path = tmp_path / "last"
    assert list_problems(lambda: training.load(path, None, saved)) == [
        f"there is no complete checkpoint at {path}; name one that was saved"
    ]
    training.save(path, None, saved)
    other = nn.ModuleDict({"a": nn.Linear(2, 4, bias=False), "c": nn.Linear(1, 1)})
    before = [each.clone() for each in other.state_dict().values()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert list_problems(lambda: training.load(path, None, other, optimizer)) == [
        f"'a.weight': of shape (4, 2) here, and (3, 2) in the checkpoint {path}",
        f"'c.weight', 'c.bias': not in the checkpoint {path}",
        f"the checkpoint {path}: has no optimizer that namedmesh saved; load it without the optimizer",
        f"'a.bias', 'b.weight': in the checkpoint {path}, and on no rank in the model",
    ]
    assert all(torch.equal(one, two) for one, two in zip(before, other.state_dict().values(), strict=True))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    assert list_problems(lambda: training.save(path, None, saved, stranger)) == [
        "the optimizer has parameters of shape (5,) that are not in the model; create it from the current parameters of the model, "
        "after parallelize() and fully_shard()"
    ]
    grouped = [{"params": saved["a"].parameters(), "lr": 0.1}, {"params": saved["b"].parameters(), "lr": 0.2}]
    training.save(path, None, saved, torch.optim.SGD(grouped))
    together = torch.optim.SGD(saved.parameters(), lr=0.1)
    assert list_problems(lambda: training.load(path, None, saved, together)) == [
        f"'b.weight': in one group of the optimizer with parameters that had other options in the checkpoint {path}; group them "
        "as they were"
    ]
    assert list_files(tmp_path) == ["last"]


def test_several_optimizers_resume_and_mismatches_are_reported(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def optimizers(rate: float, first: Any = torch.optim.RMSprop) -> list[torch.optim.Optimizer]:
        return [first(model[0].parameters(), lr=rate), torch.optim.AdamW(model[1].parameters(), lr=rate / 2)]

    pair, again = optimizers(0.3), optimizers(0.0)
    model(torch.ones(1, 2)).sum().backward()
    for each in pair:
        each.step()
    training.save(tmp_path / "two", None, model, pair, step=1)
    training.load(tmp_path / "two", None, model, list(reversed(again)))
    for one, other in zip(again, pair, strict=True):
        assert str(one.state_dict()["param_groups"]) == str(other.state_dict()["param_groups"])
        assert describe_states(one) == describe_states(other)
    unlike = optimizers(0.3, torch.optim.Adagrad)
    message = error_of(lambda: training.load(tmp_path / "two", None, model, unlike))
    assert message == (
        f"CheckpointError: '0.weight', '0.bias': optimized by RMSprop in the checkpoint {tmp_path}/two, and by Adagrad here; create the "
        "saved class, or load without the optimizer"
    )
    twice = [torch.optim.AdamW(model[1].parameters()), pair[1]]
    twice[0].step()
    message = error_of(lambda: training.save(tmp_path / "twice", None, model, twice))
    assert "'1.weight:step' is the name of two values; " in message
    half: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    before = half[0].weight.clone()
    message = error_of(lambda: training.load(tmp_path / "two", None, half))
    assert "torch.float16 here, and torch.float32 in the checkpoint" in message
    assert torch.equal(half[0].weight, before)
    training.load(tmp_path / "two", None, half, cast=True)
    assert torch.equal(half[0].weight, model[0].weight.half())


class TiedEnds(nn.Module):
    """The first stage, the last stage, or both, of a model whose embedding is also its output layer."""

    def __init__(self, first: bool = True, last: bool = True, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(first)
        self.embed = nn.Embedding(4, 2).double() if first else None
        self.head = nn.Linear(2, 4, bias=False).double() if last else None
        if self.embed is not None and self.head is not None and tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        return x if self.head is None else self.head(x)

    def stepped(self) -> torch.optim.Optimizer:
        self(torch.arange(4)).square().sum().backward()
        optimizer = make_adam(self.parameters())
        optimizer.step()
        return optimizer

    def tie(self, mesh: namedmesh.NamedMesh) -> Callable[[], None]:
        ends = [None if each is None else each.weight for each in (self.embed, self.head)]
        return training.tie_stages(ends[0], ends[1], mesh)


def test_a_weight_with_two_names_is_saved_once_and_loads_as_one_or_two(tmp_path: Path) -> None:
    one, two = (TiedEnds(tied=each) for each in (True, False))
    embedding, head = two.parameters()
    optimizer, other = one.stepped(), two.stepped()
    training.save(tmp_path / "tied", None, one, optimizer)
    training.load(tmp_path / "tied", None, two, other)
    assert torch.equal(head, embedding)
    kept = [other.state[each]["exp_avg"] for each in two.parameters()]
    assert all(torch.equal(each, optimizer.state[next(one.parameters())]["exp_avg"]) for each in kept)
    assert kept[0].data_ptr() != kept[1].data_ptr()
    training.save(tmp_path / "equal", None, two, other)
    training.load(tmp_path / "equal", None, one, optimizer)  # two equal tensors
    with torch.no_grad():
        head.add_(1)
    training.save(tmp_path / "apart", None, two, other)
    assert error_of(lambda: training.load(tmp_path / "apart", None, one, optimizer)) == (
        "CheckpointError: 'embed.weight' and 'head.weight' are tied here, and are two different weights in the checkpoint "
        f"{tmp_path}/apart; untie them, or load another checkpoint"
    )


# --- what is refused and fails on several ranks -------------------------------------------------------------------------------------------


def mismatches_between_ranks_are_reported_by_name(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    torch.manual_seed(mesh.rank())
    stage = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert error_of(lambda: training.save(root / "last", mesh, stage)) == (
        "CheckpointError: '0.weight' has other values on other stages, and a checkpoint has one tensor of each name. The "
        "name of a layer has its number in the full model (training.stage_layers), and tied weights are equal"
    )
    named = nn.ModuleDict({str(mesh.rank()): nn.Linear(2, 2, bias=False)})
    for async_ in (False, True):  # before it returns, in both cases
        extra: Any = {"tokens": 5, "sched": {"a": 1, "b": [mesh.rank()]}}
        assert error_of(partial(training.save, root / "last", mesh, named, async_=async_, **extra)) == (
            "CheckpointError: the extra values differ between ranks: sched is {'a': 1, 'b': [0]} on rank 0, {'a': 1, 'b': [1]} on rank 1; give every rank "
            "the same, such as a list of the values of all ranks"
        )
    training.save(root / "last", mesh, named, noise=torch.ones(3), step=1)
    renamed = nn.ModuleDict({str(mesh.rank() * 2): nn.Linear(2, 2, bias=False)})
    missing = error_of(lambda: training.load(root / "last", mesh, renamed))
    assert "rank 1: '2.weight': not in" in missing
    assert "\n  - '1.weight': in" in missing
    mesh.close()


def a_failed_write_is_one_message(root: Path) -> None:
    """No disk space on one rank, and a file instead of a directory."""
    mesh = namedmesh.init_mesh(dp=2)
    model: Any = fully_shard(nn.Linear(300, 300), mesh=mesh["dp"])
    (root / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mesh.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    save = partial(training.save, mesh=mesh, model=model)
    full, below = (error_of(partial(save, root / name)) for name in ("full", "file/below"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.startswith(f"CheckpointError: the checkpoint {root}/full could not be written by rank 1 (")
    assert full.endswith("); check the disk space and the permissions there, and restart the job")
    assert full.count("could not be") == 1
    assert f"the checkpoint {root}/file/below could not be written by rank 0 (NotADirectoryError: " in below
    mesh.close()


class OddError(Exception):
    """An error that cannot be pickled: its constructor takes two arguments, and pickle gives one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Loader:
    """A data loader with a position, which differs between data ranks."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def an_error_on_one_rank_is_raised_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, second = nn.Linear(1, 1), mesh.rank() == 1
    training.save(root / "one", mesh, model, data=Loader(0))
    for call, method in ((training.save, "state_dict"), (training.load, "load_state_dict")):
        fails = mock.patch.object(Loader, method, side_effect=OddError(method, "failed"))
        with fails if second else nullcontext():
            message = error_of(partial(call, root / "one", mesh, model, data=Loader(0)))
        assert message == f"CheckpointError: rank 1: OddError: {method} failed"
    run = training.CheckpointManager(root / "run", mesh)
    assert run.resume_or_start(model, resume=second) == {"step": 0}  # the argument of rank 0 counts
    with mock.patch.object(State, "copy_to_cpu", side_effect=MemoryError("full") if second else None):
        message = error_of(lambda: training.save(root / "two", mesh, model, async_=True))
        assert message == "CheckpointError: rank 1: MemoryError: full"
    mesh.close()


# Whole shape, and dim that is cut (None: whole on every rank).
SHAPES_AND_DIMS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "up": ((12, 10), 0),
    "down": ((10, 12), 1),
    "norm": ((10,), None),
}


class PlainShards(nn.Module):
    """The tensors of SHAPES_AND_DIMS, or a rank's shards of them with Megatron-LM's attributes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        for number, (name, (shape, dim)) in enumerate(SHAPES_AND_DIMS.items()):
            tensor = random_tensor(*shape, seed=number)
            shard = tensor if dim is None else tensor.chunk(size, dim)[rank]
            self.register_parameter(name, parameter := nn.Parameter(shard.clone()))
            parameter.grad = shard.sin()
            if dim is not None and size > 1:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)

    def stepped(self, count: int) -> torch.optim.Optimizer:
        optimizer = make_adam(self.parameters())
        for _ in range(count):
            optimizer.step()
        return optimizer


def plain_shards_with_attributes_are_saved_as_full_tensors(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    place = mesh.rank("tp"), 2
    shards, one = PlainShards(*place), PlainShards()
    training.save(root / "marked", mesh, shards, shards.stepped(1))
    compiled: Any = torch.compile(one, backend="eager")
    training.load(root / "marked", None, compiled, filled := one.stepped(0))
    expected = PlainShards()
    assert max_difference(collect_values(one, filled), collect_values(expected, expected.stepped(1))) == 0
    filled.step()
    if mesh.rank() == 0:
        training.save(root / "whole", None, one, filled)
    dist.barrier()
    training.load(root / "whole", mesh, shards, optimizer := shards.stepped(1))
    wanted = PlainShards(*place)
    assert max_difference(collect_values(shards, optimizer), collect_values(wanted, wanted.stepped(2))) == 0
    mesh.close()


def an_error_in_the_background_is_raised_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
    training.save(root / "good", mesh, model)
    more = training.CheckpointManager(root / "more", mesh, async_=True)
    for call in (
        lambda: training.save(root / "next", mesh, model),
        lambda: training.load(root / "good", mesh, model),
        lambda: more.save(1, model),
    ):
        with DISK_FULL if mesh.rank() == 1 else mock.MagicMock():
            training.save(root / "bad", mesh, model, async_=True).exception()
        message = f"CheckpointError: the checkpoint {root}/bad could not be written by rank 1 ("
        assert error_of(call).startswith(message)
    training.save(root / "next", mesh, model)  # the error was raised once
    assert more.save(1, model).result().name == "step-000001"
    more.save(2, model)
    assert more.latest() == root / "more" / "step-000002"
    mesh.close()
    dist.barrier()
    assert list_files(root) == ["good", "more", "next"]


def the_end_of_a_with_block_waits_for_the_last_save(root: Path) -> None:
    """The end raises the error of a failed save, unless the block has raised an error."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)

    def run(name: str, failing: type[Exception] | None = None) -> None:
        with training.CheckpointManager(root / name, mesh, async_=True) as checkpoints:
            checkpoints.resume_or_start(model)
            checkpoints.save(1, model)
            if failing is not None:
                raise failing

    run("fine")
    assert (root / "fine" / "step-000001" / ".metadata").exists()
    with DISK_FULL if mesh.rank() == 0 else nullcontext():
        message = error_of(lambda: run("bad"))
    place = root / "bad" / "step-000001"
    assert message.startswith(f"CheckpointError: the checkpoint {place} could not be written by rank 0 (")
    with pytest.raises(ZeroDivisionError):
        run("other", ZeroDivisionError)
    CheckpointRanks.from_mesh(mesh, "save").wait_for_save()
    mesh.close()


def later_steps_do_not_change_a_checkpoint_that_is_being_written(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net: Any = fully_shard(nn.Linear(4, 4).double(), mesh=mesh["dp"])
        return net, make_adam(net.parameters())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return collect_values(net, optimizer)

    net, optimizer = make()
    then = step(net, optimizer)
    changed = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def write_later(*args: Any) -> Any:
        assert changed.wait(60)
        return write(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_later):
        written = training.save(root / "last", mesh, net, optimizer, async_=True)
        assert not written.cancel()  # a save that has started cannot be cancelled
        now = step(net, optimizer)
        changed.set()
        assert written.result() == root / "last"
    training.load(root / "last", mesh, *(other := make()))
    loaded = collect_values(*other)
    mesh.close()
    assert max_difference(loaded, then) == 0
    assert max_difference(loaded, now) > 0.01


def states_are_restored_as_they_were_saved(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    optimizer = make_adam(model.parameters())
    torch.manual_seed(mesh.rank("tp"))
    before = torch.get_rng_state()
    training.save(root / "fresh", mesh, model, optimizer)
    assert not optimizer.state
    torch.rand(3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    training.load(root / "fresh", mesh, model, optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    mesh.close()

    # tp has another size now, and the saved states differ along it: the generators keep theirs.
    mesh = namedmesh.init_mesh(dp=4, tp=1, device="cpu")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    torch.manual_seed(7)
    seeded = torch.get_rng_state()
    training.load(root / "fresh", mesh, model)
    assert torch.equal(torch.get_rng_state(), seeded)
    mesh.close()


class DifferentOnEachRank(nn.Module):
    """A module with buffers of other values, and an extra state of another size, on each rank."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.average = nn.Buffer(torch.full((2,), float(number)))
        self.count = nn.Buffer(torch.tensor(number))
        self.amax = torch.arange(float(number + 1))

    def get_extra_state(self) -> Tensor:
        return self.amax.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.amax = state.clone()


def values_that_differ_between_ranks_are_restored_on_each_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    rank = mesh.rank()
    model, sharded = DifferentOnEachRank(rank), nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(sharded, mesh=mesh["dp"])
    both = [model, sharded]
    optimizer, fresh = (torch.optim.SGD(sharded.parameters()) for _ in range(2))
    optimizer.state[next(sharded.parameters())] = {  # state of one shard, of several dtypes and shapes
        "scale": torch.full((3,), float(rank)),
        "absmax": torch.tensor([rank, 200], dtype=torch.uint8),
        "factors": {"left": torch.eye(2) * rank},
        "step": 7,
        "shared": torch.tensor([1.0, 2.0], dtype=torch.float64),
    }
    training.save(root / "one", mesh, both, optimizer)
    other = DifferentOnEachRank(5)
    training.load(root / "one", mesh, [other, sharded], fresh)
    assert other.average.tolist() == [rank, rank]
    assert [int(other.count), other.amax.tolist()] == [rank, list(range(rank + 1))]
    assert describe_states(fresh) == describe_states(optimizer)
    mesh.close()
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    fresh = torch.optim.SGD(plain.parameters())
    moved = error_of(lambda: training.load(root / "one", mesh, [other, plain], fresh))
    kept = "'0.weight:scale', '0.weight:absmax', '0.weight:factors': kept by the optimizer for the shard of one rank"
    assert kept in moved
    training.load(root / "one", mesh, [other, plain])
    assert [other.average.tolist(), int(other.count)] == [[0.0, 0.0], 0]  # the value of rank 0
    mesh.close()


def random_states_and_data_loaders_resume(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    model = nn.Linear(1, 1)
    training.seed_all(0, mesh)
    then, text = digest(seeds.collect_rng_states()), "a text that is written once"
    extra: Any = {"a": 1.5, "texts": [text, text]}
    if mesh.rank() == 1:  # equal, but pickled differently
        extra = {"texts": [text, "".join(list(text))], "a": 1.5}
    training.save(root / "one", mesh, model, data=Loader(10 + mesh.rank()), values=extra)
    training.seed_all(1, mesh)
    training.load(root / "one", mesh, model, data=(loader := Loader(0)))
    assert digest(seeds.collect_rng_states()) == then
    assert loader.place == 10 + mesh.rank()
    mesh.close()
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    refused = error_of(lambda: training.load(root / "one", mesh, model, data=loader))
    assert "no state of the data loader for this rank in" in refused
    mesh.close()


def tied_stages_are_one_weight_in_every_layout(root: Path) -> None:
    """Saved on one and on two stages, and resumed on the other: losses and norms of one process."""

    def job(pp: int, source: Path | None, target: Path | None, count: int) -> list[float]:
        mesh = namedmesh.init_mesh(pp=pp, dp=2 // pp, device="cpu")
        model = TiedEnds(mesh.is_first("pp"), mesh.is_last("pp"))
        sum_gradients, optimizer = model.tie(mesh), make_adam(model.parameters())
        if source is not None:
            training.load(source, mesh, model, optimizer)
        pipe = training.Pipeline(
            model, mesh, n_microbatches=2, loss_fn=lambda out, y: (out - y).square().mean()
        )
        results = []
        for _ in range(count):
            loss = pipe.step(torch.arange(4), target=torch.eye(4, dtype=torch.float64))
            results.append(training.mean_loss(loss, mesh).item())
            sum_gradients()
            results.append(training.clip_grad_norm_(model.parameters(), 0.5, mesh).item())
            optimizer.step()
            optimizer.zero_grad()
        if target is not None:
            training.save(target, mesh, model, optimizer)
        dist.barrier()
        mesh.close()
        return results

    expected = job(1, None, None, 6)
    found = job(1, None, root / "1", 2) + job(2, root / "1", root / "2", 2) + job(1, root / "2", None, 2)
    assert found == [pytest.approx(each, abs=1e-9) for each in expected]
    saved = dcp.FileSystemReader(root / "2").read_metadata()
    both = ("model.embed.weight", "model.head.weight")  # torch finds both names, of one stored tensor
    first, second = (
        [place for index, place in saved.storage_data.items() if index.fqn == name] for name in both
    )
    assert first == second
    assert first
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    model = TiedEnds(mesh.is_first("pp"), mesh.is_last("pp"))
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    training.save(root / "untied", mesh, model)
    model.tie(mesh)
    assert "are tied here" in error_of(lambda: training.load(root / "untied", mesh, model))
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    message = error_of(lambda: training.save(root / "apart", mesh, model))
    assert "has other values on other stages" in message
    mesh.close()


def a_rank_that_dies_after_finish_leaves_a_complete_checkpoint(root: Path) -> None:
    """The last broadcast of DCP fails after the checkpoint is complete, and must not remove it."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    finish = checkpoint_storage.StorageWriter.finish

    def die(self: Any, *arguments: Any, **named: Any) -> None:
        finish(self, *arguments, **named)
        raise RuntimeError("Connection closed by peer")

    with mock.patch.object(checkpoint_storage.StorageWriter, "finish", die):
        message = error_of(lambda: training.save(root / "one", mesh, nn.Linear(2, 2), step=4))
    assert "closed by peer" in message
    assert training.load(root / "one", mesh, nn.Linear(2, 2)) == {"step": 4}
    mesh.close()


# --- all of them, in a world of two ranks and one of four ------------------------------------------------------

ON_RANKS = {
    2: (
        mismatches_between_ranks_are_reported_by_name,
        a_failed_write_is_one_message,
        an_error_on_one_rank_is_raised_on_every_rank,
        plain_shards_with_attributes_are_saved_as_full_tensors,
        values_that_differ_between_ranks_are_restored_on_each_rank,
        random_states_and_data_loaders_resume,
        an_error_in_the_background_is_raised_on_every_rank,
        the_end_of_a_with_block_waits_for_the_last_save,
        later_steps_do_not_change_a_checkpoint_that_is_being_written,
        tied_stages_are_one_weight_in_every_layout,
        a_rank_that_dies_after_finish_leaves_a_complete_checkpoint,
    ),
    4: (states_are_restored_as_they_were_saved,),
}


@pytest.mark.ci
@pytest.mark.parametrize("ranks", ON_RANKS)
def test_checkpoints_of_several_ranks(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, run_in_turn, ON_RANKS[ranks], tmp_path)


def export_and_load_pretrained(root: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True  # one tensor with two names: save_pretrained keeps one
    torch.manual_seed(0)
    model: Any = fully_shard(LlamaForCausalLM(config), mesh=mesh["dp"])
    training.save(root / "ours", mesh, model)
    if mesh.rank() == 0:
        training.to_pretrained(root / "ours", root / "theirs")
        config.save_pretrained(root / "theirs")
        loaded = LlamaForCausalLM.from_pretrained(root / "theirs")
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.mul_(2)
        loaded.save_pretrained(root / "changed")
    dist.barrier()
    before = [each.full_tensor() for each in model.parameters()]
    training.load(root / "changed", mesh, model)
    after = [each.full_tensor() for each in model.parameters()]
    mesh.close()
    assert len(before) > 8
    assert all(torch.equal(2 * one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.oracle("transformers", "safetensors")
def test_exported_weights_load_in_transformers_and_back(tmp_path: Path) -> None:
    import transformers  # noqa: F401  once, before the ranks are forked

    run_ranks(2, export_and_load_pretrained, tmp_path)
