"""What a checkpoint promises: nothing lost in silence, the right one found again, and everything given back as it was."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import threading
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from installing import interpreter
from messages import error_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh._torch import tells_before_destruction
from namedmesh.errors import CheckpointError
from namedmesh.training import checkpoint_files, checkpoints

REFUSED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left"))


# --- the directory ---------------------------------------------------------------------------------------------


def files_left(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir())


def test_the_one_that_was_finished_last_is_gone_on_from(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.Checkpoints(tmp_path, None, keep=4)
    assert run.resume_or_start(model) == {"step": 0}
    for step in (600, 800, 1000):
        run.save(step, model, note=f"first {step}")
    again = training.Checkpoints(tmp_path, None, keep=4)
    assert again.resume_or_start(model, resume=tmp_path / "step-000800")["step"] == 800
    again.save(850, model)
    requeued = training.Checkpoints(tmp_path, None, keep=3)
    assert requeued.latest() == tmp_path / "step-000850"
    assert requeued.resume_or_start(model)["step"] == 850
    requeued.save(900, model)  # three are left: what was finished last
    assert files_left(tmp_path) == ["step-000850", "step-000900", "step-001000"]
    assert training.latest(tmp_path / "step-001000") == tmp_path / "step-001000"


def test_another_run_is_refused_and_nothing_of_it_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    assert training.latest(tmp_path) is None
    assert training.latest(tmp_path / "none") is None
    first = training.Checkpoints(tmp_path, None, keep=1)
    first.save(3, model)
    second = training.Checkpoints(tmp_path, None, keep=1)
    for call in (lambda: second.resume_or_start(model, resume=False), lambda: second.save(1, model)):
        assert error_of(call) == (
            f"CheckpointError: {tmp_path} holds another run, up to step-000003; go on with it by resume_or_start(..., "
            "resume=True), or give this run a directory of its own"
        )
    assert files_left(tmp_path) == ["step-000003"]
    assert second.resume_or_start(model) == {"step": 3}  # what the sentence says
    second.save(4, model)
    training.save(tmp_path / "mine", None, model)  # by itself, of no run of theirs
    second.save(5, model)
    assert files_left(tmp_path) == ["mine", "step-000005"]
    assert error_of(lambda: training.Checkpoints(tmp_path, None, keep=0)).startswith(
        "CheckpointError: keep is 0; "
    )


def test_options_of_other_calls_are_no_extra_values(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    assert error_of(lambda: training.save(tmp_path / "one", None, model, keep=3)) == (
        "CheckpointError: keep: an option of another call, and no name for an extra value; give it to Checkpoints(), "
        "resume_or_start() or load()"
    )
    run = training.Checkpoints(tmp_path, None)
    for name in ("keep", "async_", "resume", "cast"):
        option: Any = {name: True}
        assert f"{name}: an option" in error_of(partial(run.save, 1, model, **option))
    assert files_left(tmp_path) == []


def test_what_interrupted_saves_leave_is_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.Checkpoints(tmp_path, None, keep=2)
    with REFUSED, pytest.raises(CheckpointError, match="No space left"):
        run.save(1, model)
    assert files_left(tmp_path) == []
    with mock.patch.object(dcp, "save", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(2, model)
    assert files_left(tmp_path) == ["step-000002"]
    assert training.latest(tmp_path) is None
    for step in (3, 4):
        run.save(step, model)
    third, fourth = (checkpoint_files.read_about(tmp_path / f"step-00000{step}") for step in (3, 4))
    assert (third["parent"], fourth["parent"]) == (None, third["id"])  # what failed is nobody's parent
    # A removal that is interrupted leaves nothing that looks like a checkpoint, or is in the way of one.
    (tmp_path / "step-000003" / "tokenizer.json").touch()
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert [path.name for path, _ in checkpoint_files.in_order(tmp_path)] == ["step-000004", "step-000005"]
    assert training.latest(tmp_path) == tmp_path / "step-000005"
    run.save(3, model)
    assert files_left(tmp_path) == ["step-000003", "step-000005"]
    # Replaced, and the replacement interrupted: the one before is whole all the while.
    with mock.patch.object(dcp, "save", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert len(files_left(tmp_path / "step-000005")) == 3
    assert training.load(tmp_path / "step-000005", None, model) == {"step": 5}
    (tmp_path / "step-000005" / "tokenizer.json").touch()
    run.save(5, model)
    assert (
        len(files_left(tmp_path / "step-000005")) == 3
    )  # what somebody put there stays with it, and goes with it
    run.save(6, model)
    run.save(7, model)
    assert files_left(tmp_path) == ["step-000006", "step-000007"]
    assert [len(files_left(tmp_path / name)) for name in files_left(tmp_path)] == [2, 2]


def test_what_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    mine = [tmp_path / "step-000001" / "data-mine", tmp_path / "step-000002", tmp_path / "step-mine"]
    for each in mine:
        each.mkdir(parents=True)
        (each / "notes").touch()
    training.Checkpoints(tmp_path, None, keep=1).save(3, model)
    assert all((each / "notes").exists() for each in mine)
    with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
        training.save(tmp_path / "step-000001", None, model)


def test_a_file_that_was_written_elsewhere_is_missed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    training.save(tmp_path / "one", None, model, step=1)
    elsewhere = mock.patch.object(checkpoint_files, "written_by", return_value={"of another host": (7, 0)})
    soon = mock.patch.object(checkpoint_files, "_APPEARS_WITHIN", 0.0)
    with (
        elsewhere,
        soon,
        pytest.raises(CheckpointError, match=r"of another host of .* is not there on rank 0"),
    ):
        training.save(tmp_path / "one", None, model, step=2)
    assert training.load(tmp_path / "one", None, model) == {"step": 1}
    assert files_left(tmp_path) == ["one"]


def test_directories_are_written_to_the_disk(tmp_path: Path) -> None:
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    with mock.patch("os.fsync", sync):
        training.save(tmp_path / "one", None, nn.Linear(1, 1))
    (data,) = (tmp_path / "one").glob("data-*")
    assert {str(tmp_path), str(tmp_path / "one"), str(data)} <= set(synced)


def test_a_damaged_one_is_refused_before_anything_changes_and_the_one_before_is_taken(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    run = training.Checkpoints(tmp_path, None, keep=None)
    for step in (1, 2):
        run.save(step, model)
    good, last = tmp_path / "step-000001", tmp_path / "step-000002"
    shutil.copytree(last, tmp_path / "copy" / "step-000002")
    other = nn.Linear(64, 64)
    before = other.weight.detach().clone()
    data = next(last.glob("data-*/*.distcp")).relative_to(last)

    def flip(path: Path) -> None:
        found = bytearray(path.read_bytes())
        found[len(found) // 2] ^= 1
        path.write_bytes(found)

    for name in (data, data.with_name(".metadata"), Path("namedmesh.pt")):
        for harm in (flip, lambda path: os.truncate(path, 9), Path.unlink):
            if (name.name, harm) == ("namedmesh.pt", Path.unlink):
                continue  # then it is no checkpoint
            harm(last / name)
            with pytest.raises(CheckpointError, match=name.name):
                training.load(last, None, other)
            assert torch.equal(other.weight, before)
            with pytest.warns(UserWarning, match="left out"):
                assert training.Checkpoints(tmp_path, None).resume_or_start(other) == {"step": 1}
            if harm is not flip or name.name == "namedmesh.pt":  # without reading all of it
                with pytest.warns(UserWarning, match="left out"):
                    assert training.latest(tmp_path) == good
            shutil.rmtree(last)
            shutil.copytree(tmp_path / "copy" / "step-000002", last)
            with torch.no_grad():
                other.weight.copy_(before)


def test_a_read_that_fails_on_the_way_says_what_has_changed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    training.save(tmp_path / "one", None, model)
    read = dcp.FileSystemReader.read_data

    def read_one(self: Any, plan: Any, planner: Any) -> Any:
        read(self, replace(plan, items=plan.items[:1]), planner).wait()
        raise OSError(5, "Input/output error")

    other = nn.Linear(2, 2)
    with mock.patch.object(dcp.FileSystemReader, "read_data", read_one):
        said = error_of(lambda: training.load(tmp_path / "one", None, other))
    (changed,) = [
        name for name, each in other.state_dict().items() if torch.equal(each, model.state_dict()[name])
    ]
    assert "could not be read by rank 0 (OSError: [Errno 5] Input/output error)" in said
    assert f"- {changed!r} of the model were read before, so it has some of the checkpoint" in said


def test_a_run_of_which_nothing_is_whole_does_not_begin_again(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    training.Checkpoints(tmp_path, None).save(1, model)
    (tmp_path / "step-000001" / "namedmesh.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="left out"):
        said = error_of(lambda: training.Checkpoints(tmp_path, None).resume_or_start(model))
    assert said == (
        f"CheckpointError: no checkpoint in {tmp_path} is as it was written; name one to load by resume=, or begin in another "
        "directory"
    )


class OddError(Exception):
    """What cannot be sent to another rank: it is made from two arguments, and pickled with one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class OnOneRank(nn.Module):
    """A module of which one rank can write the state, and another one cannot read it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.fails = ""

    def fail(self, call: str) -> None:
        if self.fails == call:
            raise OddError(call, "failed")

    def get_extra_state(self) -> list[int]:
        self.fail("get")
        return [1]

    def set_extra_state(self, state: list[int]) -> None:  # noqa: ARG002
        self.fail("set")


def trouble_on_one_rank(root: Path) -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, second = OnOneRank(), mesh.rank() == 1
    training.save(root / "one", mesh, model)
    told = []

    def tell(call: Any) -> None:
        told.append(error_of(call))
        dist.barrier()

    model.fails = "get" if second else ""
    tell(lambda: training.save(root / "two", mesh, model))
    model.fails = "set" if second else ""
    tell(lambda: training.load(root / "one", mesh, model))
    model.fails = ""
    run = training.Checkpoints(root / "run", mesh)
    tell(lambda: run.resume_or_start(model, resume=second))
    with mock.patch.object(checkpoints, "_copied", side_effect=MemoryError("full") if second else dict):
        tell(lambda: training.save(root / "two", mesh, model, async_=True))
    mesh.close()
    return told


def test_what_fails_on_one_rank_is_told_on_every_rank(tmp_path: Path) -> None:
    for told in run_ranks(2, trouble_on_one_rank, tmp_path, timeout=45.0):
        assert told == [
            "CheckpointError: rank 1: OddError: get failed",
            "CheckpointError: rank 1: OddError: set failed",
            "CheckpointError: resume is False on rank 0, and True on rank 1; give all ranks the same",
            "CheckpointError: rank 1: MemoryError: full",
        ]


class Harm:
    """What runs code when it is read."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["HARM"]),)


def test_no_code_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    model = nn.Linear(1, 1)
    said = error_of(lambda: training.save(tmp_path / "one", None, model, thing=Harm()))
    assert said.startswith("CheckpointError: the extra value thing is not plain data (")
    (tmp_path / "harm").unlink(missing_ok=True)
    training.save(tmp_path / "one", None, model, things=[1, {"a": (2.0, None, "b")}, torch.ones(2)])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").touch()
    written = io.BytesIO()
    torch.save({"extra": Harm()}, written)
    contents = written.getvalue()
    for place in (tmp_path / "theirs", tmp_path / "one"):
        for head in (b"", b"namedmesh checkpoint 3 %08x\n" % zlib.crc32(contents)):
            (place / "namedmesh.pt").write_bytes(head + contents)
            with pytest.raises(CheckpointError, match="damaged"):
                training.load(place, None, model)
    training.save(tmp_path / "two", None, model)
    (data,) = (tmp_path / "two").glob("data-*")
    with (data / ".metadata").open("wb") as file:
        pickle.dump(Harm(), file)
    with pytest.raises(pickle.UnpicklingError, match="not a part of a checkpoint"):
        checkpoint_files.Reader(data).read_metadata()
    with checkpoint_files.without_warnings():
        dcp.save({"thing": Harm()}, checkpoint_id=tmp_path / "three", no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="Weights only load failed"):
        checkpoint_files.read(checkpoint_files.Reader(tmp_path / "three"), {"thing": None}, no_dist=True)
    assert not (tmp_path / "harm").exists()


# --- in the background -----------------------------------------------------------------------------------------


def failing_in_the_background(root: Path) -> list[str]:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=mesh["dp"])
    training.save(root / "good", mesh, model)
    told = []

    def begin() -> None:
        with REFUSED if mesh.rank() == 1 else mock.MagicMock():
            training.save(root / "bad", mesh, model, async_=True)
            training.checkpoint_ranks.CheckpointGroup.of(mesh).wait()

    begin()
    told.append(error_of(lambda: training.save(root / "next", mesh, model)))
    training.save(root / "next", mesh, model)  # it was told once
    begin()
    told.append(error_of(lambda: training.load(root / "good", mesh, model)))
    begin()
    more = training.Checkpoints(root / "more", mesh, async_=True)
    told.append(error_of(lambda: more.save(1, model)))
    told.append(more.save(1, model).result().name)
    mesh.close()
    return told


def closing(root: Path) -> list[str]:
    """What is under way when the mesh is closed is finished; where it failed, closing says so."""
    told = []
    for name in ("fine", "bad"):
        mesh = namedmesh.init_mesh(dp=2, device="cpu")
        model = nn.Linear(2, 2)
        with REFUSED if name == "bad" and mesh.rank() == 0 else mock.MagicMock():
            training.save(root / name, mesh, model, async_=True)
            told.append(error_of(mesh.close))
        assert mesh.closed
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    write = dcp.FileSystemWriter.write_data
    may_write = threading.Event()

    def later(*args: Any) -> Any:
        may_write.wait()
        return write(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", later):
        training.save(root / "last", mesh, nn.Linear(2, 2), async_=True)
        dist.barrier()
        if tells_before_destruction():
            threading.Timer(0.5, may_write.set).start()
        dist.destroy_process_group()
        told.append(str((root / "last" / "namedmesh.pt").exists()))
        may_write.set()
    return told


def test_closing_waits_for_the_last_save(tmp_path: Path) -> None:
    for told in run_ranks(2, closing, tmp_path):
        assert told[0] == ""
        assert told[1].startswith(
            f"CheckpointError: the checkpoint {tmp_path}/bad could not be written by rank 0 ("
        )
        assert told[2] == str(tells_before_destruction())


EXIT = """
import atexit, os, sys
atexit.register(lambda: print("the first handler", flush=True))  # which is called last
from unittest import mock
import torch, namedmesh, torch.distributed as dist, torch.distributed.checkpoint as dcp
from namedmesh import training
kind = "fine"
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    kind = "bad"
    mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left")).start()
mesh = namedmesh.init_mesh(dp=1, device="cpu")
training.save(f"{sys.argv[1]}/{kind}", mesh, torch.nn.Linear(2, 2), async_=True)
"""


def test_the_end_of_the_interpreter_waits_and_tells(tmp_path: Path) -> None:
    done = interpreter("-W", "ignore", "-c", EXIT, str(tmp_path))
    # Up to torch 2.8 gloo itself talks about the world of one.
    told = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert told == ["the first handler", "120", "the first handler"], done.stderr
    assert done.returncode == 0
    assert files_left(tmp_path) == ["fine"]
    assert done.stderr.count(f"CheckpointError: the checkpoint {tmp_path}/bad could not be written") == 1


def test_a_failure_in_the_background_is_told_on_every_rank(tmp_path: Path) -> None:
    for told in run_ranks(2, failing_in_the_background, tmp_path):
        said = f"CheckpointError: the checkpoint {tmp_path}/bad could not be written by rank 1 ("
        assert [text.startswith(said) for text in told] == [True, True, True, False]
        assert told[3] == "step-000001"
    assert files_left(tmp_path) == ["good", "more", "next"]


# --- what state_dict means -------------------------------------------------------------------------------------


class Fresh(nn.Module):
    """A module whose state dict is made afresh each time: a tensor of another size on each rank, and other values."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.average: Tensor
        self.count: Tensor
        self.register_buffer("average", torch.full((2,), float(number)))
        self.register_buffer("count", torch.tensor(number))
        self.amax, self.note = torch.arange(float(number + 1)), {"number": number}

    def get_extra_state(self) -> Tensor:
        return self.amax.clone()

    def set_extra_state(self, state: Tensor) -> None:
        self.amax = state.clone()


class Noted(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.inside, self.note = Fresh(number), {"number": number}

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state


class OwnState(torch.optim.SGD):
    """An optimizer that keeps what only this rank has, of several types and shapes, for the shard of a rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for each in group["params"]:
                rank = dist.get_rank()
                self.state[each] = {
                    "scale": torch.full((3,), float(rank)),
                    "absmax": torch.tensor([rank, 200], dtype=torch.uint8),
                    "factors": {"left": torch.eye(2) * rank},
                    "step": 7,
                    "shared": torch.tensor([1.0, 2.0], dtype=torch.float64),
                }


def numbers_of(model: Noted) -> list[Any]:
    inside = model.inside
    return [inside.average.tolist(), int(inside.count), inside.amax.tolist(), model.note["number"]]


def states_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [str(sorted(each.items())) for each in optimizer.state.values()]


def what_is_per_rank(root: Path) -> list[Any]:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    rank = mesh.rank()
    model, sharded = Noted(rank), nn.Linear(4, 4, bias=False)
    fully_shard(sharded, mesh=mesh["dp"])
    optimizer = OwnState(sharded.parameters(), lr=0.1)
    optimizer.step()
    saved = states_of(optimizer)
    both = [model, sharded]
    if rank == 0:
        with pytest.warns(UserWarning, match="inside.average, inside.count.*not the same on all ranks"):
            training.save(root / "one", mesh, both, optimizer)
    else:
        training.save(root / "one", mesh, both, optimizer)
    training.save(root / "one", mesh, both, optimizer)  # it was said once
    other, fresh = Noted(5), OwnState(sharded.parameters(), lr=0.1)
    training.load(root / "one", mesh, [other, sharded], fresh)
    told = [numbers_of(other), states_of(fresh) == saved]
    with torch.no_grad():
        model.inside.weight.add_(rank)
    told.append(error_of(lambda: training.save(root / "one", mesh, both)))
    mesh.close()
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    plain = nn.Linear(4, 4, bias=False)
    told.append(
        error_of(lambda: training.load(root / "one", mesh, [other, plain], OwnState(plain.parameters())))
    )
    training.load(root / "one", mesh, [other, plain])
    told.append(numbers_of(other)[:2])
    mesh.close()
    return told


def test_what_ranks_have_for_themselves_they_get_back(tmp_path: Path) -> None:
    by_rank = run_ranks(2, what_is_per_rank, tmp_path)
    for rank, (numbers, same, refused, moved, averaged) in enumerate(by_rank):
        assert numbers == [[rank, rank], rank, list(range(rank + 1)), rank]
        assert same
        assert refused.startswith("CheckpointError: 'inside.weight': other values on rank 1 than on rank 0, ")
        assert "the optimizer keeps 'weight:scale' for the part that a rank had" in moved
        assert averaged == [[0.5, 0.5], 0]  # the mean, and the first


def test_several_optimizers_and_what_does_not_fit(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def optimizers(first: Any = torch.optim.SGD) -> list[torch.optim.Optimizer]:
        options = {"momentum": 0.9} if first is torch.optim.SGD else {}
        return [
            first(model[0].parameters(), lr=0.3, **options),
            torch.optim.AdamW(model[1].parameters(), lr=0.2),
        ]

    pair = optimizers()
    model(torch.ones(1, 2)).sum().backward()
    for each in pair:
        each.step()
    training.save(tmp_path / "two", None, model, pair, step=1)
    again = optimizers()
    for each in again:
        each.param_groups[0]["lr"] = 0.0
    training.load(tmp_path / "two", None, model, list(reversed(again)))
    for one, other in zip(again, pair, strict=True):
        assert str(one.state_dict()["param_groups"]) == str(other.state_dict()["param_groups"])
        assert states_of(one) == states_of(other)
    said = error_of(lambda: training.load(tmp_path / "two", None, model, optimizers(torch.optim.Adagrad)))
    assert said == (
        f"CheckpointError: the optimizer of '0.weight', '0.bias' was SGD in the checkpoint {tmp_path}/two, and is Adagrad here; "
        "make the one that was saved, or load without the optimizer"
    )
    twice = [torch.optim.AdamW(model[1].parameters()), pair[1]]
    twice[0].step()
    said = error_of(lambda: training.save(tmp_path / "twice", None, model, twice))
    assert "'1.weight:exp_avg' is the name of two values; " in said
    half: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    before = half[0].weight.clone()
    said = error_of(lambda: training.load(tmp_path / "two", None, half))
    assert "'0.weight' is torch.float16 here, and torch.float32 in the checkpoint" in said
    assert torch.equal(half[0].weight, before)
    training.load(tmp_path / "two", None, half, cast=True)
    assert torch.equal(half[0].weight, model[0].weight.half())


SAME = "a text that is written once"


class Loader:
    """What knows its place in the data, which is another one on each data rank."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def the_place_in_everything(root: Path) -> list[Any]:
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    model = nn.Linear(1, 1)
    training.init_parameters(model, 0)
    training.seed_all(0, mesh)

    def draw() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),  # noqa: NPY002  the state that a job has
            torch.rand(1).item(),
            *drawn_from("data"),
            *drawn_from("tensor"),
        ]

    extra: Any = {"a": np.float64(1.5).item(), "texts": [SAME, SAME]}
    if mesh.rank() == 1:  # equal, but not for pickle
        extra = {"texts": [SAME, "".join(list(SAME))], "a": 1.5}
    training.save(root / "one", mesh, model, data=Loader(10 + mesh.rank()), values=extra)
    expected, loader = draw(), Loader(0)
    training.load(root / "one", mesh, model, data=loader)
    told: list[Any] = [draw() == expected, loader.place]
    mesh.close()
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    told.append(error_of(lambda: training.load(root / "one", mesh, model, data=loader)))
    mesh.close()
    return told


def drawn_from(name: str) -> list[float]:
    with training.streams(name):
        return [torch.rand(1).item()]


def test_random_numbers_and_loaders_go_on_where_they_were(tmp_path: Path) -> None:
    for rank, (same, place, refused) in enumerate(run_ranks(2, the_place_in_everything, tmp_path)):
        assert (same, place) == (True, 10 + rank)
        assert "another place in the data for each rank that this one stands for" in refused
