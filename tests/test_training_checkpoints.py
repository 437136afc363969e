"""What a checkpoint promises: any layout reads it, nothing is lost in silence, and what fails on one rank is told on every rank."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import threading
import traceback
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from messages import error_of, problems_of
from ranks import run_ranks
from tensors import apart, numbers, whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh.compat.megatron.tensor_parallel import set_tensor_model_parallel_attributes
from namedmesh.errors import CheckpointError
from namedmesh.fingerprints import digest
from namedmesh.training import checkpoint_files, checkpoint_storage, seeds
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

INTERRUPTED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=KeyboardInterrupt)
REFUSED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left"))


# --- the directory ---------------------------------------------------------------------------------------------


def files_left(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if not each.name.startswith("."))


def test_the_one_that_was_finished_last_is_gone_on_from(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.CheckpointManager(tmp_path, None, keep=4)
    assert run.resume_or_start(model) == {"step": 0}
    for step in (600, 800, 1000):
        run.save(step, model, note=f"first {step}")
    again = training.CheckpointManager(tmp_path, None, keep=4)
    assert again.resume_or_start(model, resume=tmp_path / "step-000800")["step"] == 800
    again.save(850, model)
    requeued = training.CheckpointManager(tmp_path, None, keep=3)
    assert requeued.latest() == tmp_path / "step-000850"
    assert requeued.resume_or_start(model)["step"] == 850
    requeued.save(900, model)  # three are left: what was finished last
    assert files_left(tmp_path) == ["step-000850", "step-000900", "step-001000"]


def test_another_run_is_refused_and_nothing_of_it_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    first = training.CheckpointManager(tmp_path, None, keep=1)
    assert first.latest() is None
    assert training.CheckpointManager(tmp_path / "none", None).latest() is None
    first.save(3, model)
    second = training.CheckpointManager(tmp_path, None, keep=1)
    for call in (lambda: second.resume_or_start(model, resume=False), lambda: second.save(1, model)):
        assert error_of(call) == (
            f"CheckpointError: {tmp_path} has another run, up to step-000003; resume it with resume_or_start(), "
            "or give this run a directory of its own"
        )
    assert files_left(tmp_path) == ["step-000003"]
    assert second.resume_or_start(model) == {"step": 3}  # what the sentence says
    second.save(4, model)
    training.save(tmp_path / "mine", None, model)  # by itself, of no run of theirs
    second.save(5, model)
    assert error_of(lambda: second.resume_or_start(model, resume=tmp_path / "mine")) == (
        f"CheckpointError: {tmp_path}/mine has no step to resume from; load it with training.load"
    )
    assert files_left(tmp_path) == ["mine", "step-000005"]
    refused = error_of(lambda: training.CheckpointManager(tmp_path, None, keep=0))
    assert refused.startswith("CheckpointError: keep is 0; ")


def test_what_interrupted_saves_leave_is_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.CheckpointManager(tmp_path, None, keep=2)
    with REFUSED, pytest.raises(CheckpointError, match="No space left"):
        run.save(1, model)
    assert files_left(tmp_path) == []
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(2, model)
    assert files_left(tmp_path) == []
    assert run.latest() is None
    for step in (3, 4):
        run.save(step, model)
    # A removal that is interrupted leaves nothing that looks like a checkpoint, or is in the way of one.
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert files_left(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        training.load(tmp_path / "step-000003", None, model)
    run.save(3, model)
    assert files_left(tmp_path) == ["step-000003", "step-000005"]
    # Replaced, and the replacement interrupted: the one before is whole all the while.
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert len(files_left(tmp_path / "step-000005")) == 2
    assert training.load(tmp_path / "step-000005", None, model) == {"step": 5}
    (tmp_path / "step-000005" / "tokenizer.json").touch()
    for step in (5, 6, 7):  # what somebody put there stays with it, and goes with it
        assert (tmp_path / "step-000005" / "tokenizer.json").exists()
        run.save(step, model)
    assert files_left(tmp_path) == ["step-000006", "step-000007"]
    assert [len(files_left(tmp_path / name)) for name in files_left(tmp_path)] == [2, 2]


def test_what_is_not_ours_is_not_removed(tmp_path: Path) -> None:
    """Directories of others, and checkpoints that somebody copied or renamed."""
    model = nn.Linear(1, 1)
    mine = [tmp_path / name / "notes" for name in ("step-000001/data-mine", "step-000002", "step-mine")]
    for each in mine:
        each.parent.mkdir(parents=True)
        each.touch()
    run = training.CheckpointManager(tmp_path, None, keep=1)
    run.save(3, model)
    shutil.copytree(tmp_path / "step-000003", tmp_path / "step-000003-copy")
    (tmp_path / "step-000003").rename(tmp_path / "best")
    for step in (4, 5):
        run.save(step, model)
    kept = ["best", "step-000001", "step-000002", "step-000003-copy", "step-000005", "step-mine"]
    assert files_left(tmp_path) == kept
    assert run.latest() == tmp_path / "step-000005"
    with pytest.raises(CheckpointError, match="exists and is not a namedmesh checkpoint"):
        run.save(1, model)
    assert all(each.exists() for each in mine)


def test_a_checkpoint_that_cannot_be_looked_at_is_not_removed(tmp_path: Path) -> None:
    """An I/O error is not the absence of a file, which it is for is_file() of Python 3.14."""
    model = nn.Linear(1, 1)
    run = training.CheckpointManager(tmp_path, None)
    run.save(1, model)
    stat = Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == tmp_path / "step-000001" / "namedmesh.pt":
            raise OSError(5, "Input/output error")
        return stat(path, **options)

    with (
        mock.patch.object(Path, "stat", failing),
        mock.patch.object(Path, "is_file", os.path.isfile),
        pytest.raises(CheckpointError, match="Input/output error"),
    ):
        run.save(2, model)
    assert training.load(tmp_path / "step-000001", None, model) == {"step": 1}


def numbered(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer of which every number is the same."""
    model = nn.ModuleDict({str(each): nn.Linear(4, 4) for each in range(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return model, optimizer


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    return {value for each in everything(model, optimizer).values() for value in each.flatten().tolist()}


def test_a_damaged_one_is_refused_and_the_one_before_is_taken(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    run = training.CheckpointManager(tmp_path, None, keep=None)
    good, last = (run.save(step, model).result() for step in (1, 2))
    again = training.CheckpointManager(tmp_path, None)
    for file in [each for each in last.rglob("*") if each.is_file()]:
        contents, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
        for harm in (contents[:9], flipped, None):
            if harm is None and file.name == "namedmesh.pt":
                continue  # then it is no checkpoint
            file.unlink()
            if harm is not None:
                file.write_bytes(harm)
            for call in (partial(training.load, last, None), partial(again.resume_or_start, resume=last)):
                with pytest.raises(CheckpointError, match=file.name):
                    call(model)
            with pytest.warns(UserWarning, match="skipped"):
                assert again.resume_or_start(model) == {"step": 1}
            if harm != flipped or file.name == "namedmesh.pt":  # without reading all of it
                with pytest.warns(UserWarning, match="skipped"):
                    assert again.latest() == good
            file.write_bytes(contents)
    for each in (good, last):
        (each / "namedmesh.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped"):
        said = error_of(lambda: again.resume_or_start(model))  # which does not begin again
    assert said == f"CheckpointError: no checkpoint in {tmp_path} is complete; start in another directory"


def test_any_changed_byte_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """Of what a checkpoint has, all but padding and what torch does not read."""
    model, optimizer = numbered(1)
    training.save(tmp_path / "one", None, model, optimizer, number=1)
    files = [each for each in (tmp_path / "one").rglob("*") if each.is_file()]
    bytes_of = {each: each.read_bytes() for each in files}
    flips, refused = random.Random(0), 0
    for number in range(240):
        file = files[number % len(files)]
        changed = bytearray(bytes_of[file])
        changed[flips.randrange(len(changed))] ^= 1 << flips.randrange(8)
        file.write_bytes(changed)
        other = numbered(2)
        try:
            training.load(tmp_path / "one", None, *other)
        except CheckpointError:
            refused += 1
            assert values_of(*other) == {2.0}
        else:
            assert values_of(*other) == {1.0}
        file.write_bytes(bytes_of[file])
    assert refused > 190


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
    torch.save({"extra": Harm()}, written := io.BytesIO())
    for part, refused in (
        ("values", "is corrupted"),
        ("names", "not a part of a checkpoint"),
        ("tensors", "failed its checksum|could not be read"),
    ):
        path = tmp_path / part
        training.save(path, None, model, things=[1, {"a": (2.0, None, "b")}, torch.ones(2)])
        about = checkpoint_files.read_manifest(path)
        (data,) = path.glob("data-*/*.distcp")
        if part == "values":
            (path / "namedmesh.pt").write_bytes(written.getvalue())
        elif part == "names":
            (data.parent / ".metadata").write_bytes(pickle.dumps(Harm()))
            torch.save(about | {"metadata": zlib.crc32(pickle.dumps(Harm()))}, path / "namedmesh.pt")
        else:
            places = checkpoint_storage.read_metadata(path, about).storage_data.values()
            last = max(each.offset for each in places)
            data.write_bytes(data.read_bytes()[:last] + written.getvalue())
        with pytest.raises(CheckpointError, match=refused):
            training.load(path, None, model)
    assert not (tmp_path / "harm").exists()


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save_and_be_killed(directory: Path, number: int, at: int) -> bool:
    """Save in a child that is killed before it does so much to the file system; whether it was."""
    child = os.fork()
    if child == 0:
        left = [at]

        def before(event: str, about: tuple[Any, ...]) -> None:
            if event in WRITES or (event == "open" and about[2] & (os.O_WRONLY | os.O_RDWR)):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            run = training.CheckpointManager(directory, None, keep=1)
            run.resume_or_start(*numbered(0))
            sys.addaudithook(before)
            run.save(number, *numbered(number))
            os._exit(0)
        except BaseException:  # noqa: BLE001  nothing of pytest's may run twice
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_killed_at_any_write_the_last_good_one_loads(tmp_path: Path) -> None:
    training.CheckpointManager(tmp_path, None, keep=1).save(1, *numbered(1))
    at, number = 0, 2
    while save_and_be_killed(tmp_path, number, at):
        model, optimizer = numbered(-1)
        found = training.CheckpointManager(tmp_path, None).resume_or_start(model, optimizer)["step"]
        assert found in {number - 1, number}
        assert values_of(model, optimizer) == {found}
        number, at = found + 1, at + 1
    assert at > 10
    assert files_left(tmp_path) == [f"step-{number:06}"]  # nothing is left of all that were killed


def test_power_may_fail_before_the_pointer_is_there_but_not_lose_what_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files, the pointer too, and their names are on the disk before it gets its name; then that name is."""
    events: list[
        Any
    ] = []  # files and directories that were synced, by number; of a rename all in the directory
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append({each.stat().st_ino for each in (path.parent, *path.parent.iterdir())})
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    training.save(tmp_path / "one", None, *numbered(1))
    (place,) = (number for number, each in enumerate(events) if isinstance(each, set))
    assert events[place] <= {*events[:place]}
    assert len(events[place]) > 3
    assert {each.stat().st_ino for each in (tmp_path, tmp_path / "one")} <= {*events[place + 1 :]}


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2, bias=False)})
    path = tmp_path / "last"
    assert problems_of(lambda: training.load(path, None, saved)) == [
        f"there is no complete checkpoint at {path}; name one that was saved"
    ]
    training.save(path, None, saved)
    other = nn.ModuleDict({"a": nn.Linear(2, 4, bias=False), "c": nn.Linear(1, 1)})
    before = [each.clone() for each in other.state_dict().values()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert problems_of(lambda: training.load(path, None, other, optimizer)) == [
        f"'a.weight': of shape (4, 2) here, and (3, 2) in the checkpoint {path}",
        f"'c.weight', 'c.bias': not in the checkpoint {path}",
        f"'a.weight', 'c.weight', 'c.bias': not optimized in the checkpoint {path}; load it without the optimizer",
        f"'a.bias', 'b.weight': in the checkpoint {path}, and on no rank in the model",
    ]
    assert all(torch.equal(one, two) for one, two in zip(before, other.state_dict().values(), strict=True))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    assert problems_of(lambda: training.save(path, None, saved, stranger)) == [
        "the optimizer has parameters of shape (5,) that are not in the model; create it from the current parameters of the model, "
        "after parallelize() and fully_shard()"
    ]
    grouped = [{"params": saved["a"].parameters(), "lr": 0.1}, {"params": saved["b"].parameters(), "lr": 0.2}]
    training.save(path, None, saved, torch.optim.SGD(grouped))
    together = torch.optim.SGD(saved.parameters(), lr=0.1)
    assert problems_of(lambda: training.load(path, None, saved, together)) == [
        f"'b.weight': in one group of the optimizer with parameters that had other options in the checkpoint {path}; group them "
        "as they were"
    ]
    assert files_left(tmp_path) == ["last"]


def test_several_optimizers_and_what_does_not_fit(tmp_path: Path) -> None:
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
        assert states_of(one) == states_of(other)
    unlike = optimizers(0.3, torch.optim.Adagrad)
    said = error_of(lambda: training.load(tmp_path / "two", None, model, unlike))
    assert said == (
        f"CheckpointError: '0.weight', '0.bias': optimized by RMSprop in the checkpoint {tmp_path}/two, and by Adagrad here; create the "
        "saved class, or load without the optimizer"
    )
    twice = [torch.optim.AdamW(model[1].parameters()), pair[1]]
    twice[0].step()
    said = error_of(lambda: training.save(tmp_path / "twice", None, model, twice))
    assert "'1.weight:step' is the name of two values; " in said
    half: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    before = half[0].weight.clone()
    said = error_of(lambda: training.load(tmp_path / "two", None, half))
    assert "torch.float16 here, and torch.float32 in the checkpoint" in said
    assert torch.equal(half[0].weight, before)
    training.load(tmp_path / "two", None, half, cast=True)
    assert torch.equal(half[0].weight, model[0].weight.half())


class Ends(nn.Module):
    """The first stage, the last one, or both, of an embedding that is the output, too, unless it is untied."""

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
        optimizer = adam(self.parameters())
        optimizer.step()
        return optimizer

    def tie(self, mesh: namedmesh.NamedMesh) -> Callable[[], None]:
        ends = [None if each is None else each.weight for each in (self.embed, self.head)]
        return training.tie_stages(ends[0], ends[1], mesh)


def test_a_weight_with_two_names_is_saved_once_and_loads_as_one_or_two(tmp_path: Path) -> None:
    one, two = (Ends(tied=each) for each in (True, False))
    embedding, head = two.parameters()
    optimizer, other = one.stepped(), two.stepped()
    training.save(tmp_path / "tied", None, one, optimizer)
    training.load(tmp_path / "tied", None, two, other)
    assert torch.equal(head, embedding)
    kept = [other.state[each]["exp_avg"] for each in two.parameters()]
    assert all(torch.equal(each, optimizer.state[next(one.parameters())]["exp_avg"]) for each in kept)
    assert kept[0].data_ptr() != kept[1].data_ptr()
    training.save(tmp_path / "equal", None, two, other)
    training.load(tmp_path / "equal", None, one, optimizer)  # two of one value
    with torch.no_grad():
        head.add_(1)
    training.save(tmp_path / "apart", None, two, other)
    assert error_of(lambda: training.load(tmp_path / "apart", None, one, optimizer)) == (
        "CheckpointError: 'embed.weight' and 'head.weight' are tied here, and are two different weights in the checkpoint "
        f"{tmp_path}/apart; untie them, or load another checkpoint"
    )


# --- what is refused and fails on several ranks -------------------------------------------------------------------------------------------


def what_does_not_fit_is_refused_by_name(root: Path) -> None:
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    torch.manual_seed(mesh.rank())
    stage = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert error_of(lambda: training.save(root / "last", mesh, stage)) == (
        "CheckpointError: '0.weight': other values on rank 1 than on rank 0, and a checkpoint has one tensor of each name. Replicas "
        "must be equal; the name of a layer has its number in the full model (training.stage_layers); plain shards have the "
        "attributes tensor_model_parallel and partition_dim; optimizer state that differs between ranks must not be a DTensor"
    )
    named = nn.ModuleDict({str(mesh.rank()): nn.Linear(2, 2, bias=False)})
    assert error_of(lambda: training.save(root / "last", mesh, named, place=mesh.rank())) == (
        "CheckpointError: the extra values (place) differ on rank 1 from those on rank 0; give every rank the same, such as a list "
        "of the values of all ranks"
    )
    training.save(root / "last", mesh, named, noise=torch.ones(3), step=1)
    renamed = nn.ModuleDict({str(mesh.rank() * 2): nn.Linear(2, 2, bias=False)})
    missing = error_of(lambda: training.load(root / "last", mesh, renamed))
    assert "rank 1: '2.weight': not in" in missing
    assert "\n  - '1.weight': in" in missing
    mesh.close()


def what_cannot_be_written_is_one_sentence(root: Path) -> None:
    """No room on one rank, and a file where a directory has to be."""
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
    """What cannot be sent to another rank: it is made from two arguments, and pickled with one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


class Loader:
    """What knows its place in the data, which is another one on each data rank."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def what_fails_on_one_rank_is_told_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, second = nn.Linear(1, 1), mesh.rank() == 1
    training.save(root / "one", mesh, model, data=Loader(0))
    for call, method in ((training.save, "state_dict"), (training.load, "load_state_dict")):
        fails = mock.patch.object(Loader, method, side_effect=OddError(method, "failed"))
        with fails if second else nullcontext():
            said = error_of(partial(call, root / "one", mesh, model, data=Loader(0)))
        assert said == f"CheckpointError: rank 1: OddError: {method} failed"
    run = training.CheckpointManager(root / "run", mesh)
    assert run.resume_or_start(model, resume=second) == {"step": 0}  # what the first rank says
    with mock.patch.object(State, "copy_to_cpu", side_effect=MemoryError("full") if second else None):
        said = error_of(lambda: training.save(root / "two", mesh, model, async_=True))
        assert said == "CheckpointError: rank 1: MemoryError: full"
    mesh.close()


# Whole shape, and dim that is cut (None: whole on every rank).
CUTS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "up": ((12, 10), 0),
    "down": ((10, 12), 1),
    "norm": ((10,), None),
}


class Marked(nn.Module):
    """The tensors of CUTS, or a rank's shards of them with Megatron's marks, and gradients."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        for number, (name, (shape, dim)) in enumerate(CUTS.items()):
            tensor = numbers(*shape, seed=number)
            shard = tensor if dim is None else tensor.chunk(size, dim)[rank]
            self.register_parameter(name, parameter := nn.Parameter(shard.clone()))
            parameter.grad = shard.sin()
            if dim is not None and size > 1:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)

    def stepped(self, count: int) -> torch.optim.Optimizer:
        optimizer = adam(self.parameters())
        for _ in range(count):
            optimizer.step()
        return optimizer


def states_of(optimizer: torch.optim.Optimizer) -> list[str]:
    return [str(sorted(each.items())) for each in optimizer.state.values()]


def adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
    return {key: whole(each).clone() for key, each in found.items()}


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return torch.tensor([apart(value, other[key]) for key, value in one.items()]).max().item()


def marked_shards_are_whole_tensors(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    place = mesh.rank("tp"), 2
    shards, one = Marked(*place), Marked()
    training.save(root / "marked", mesh, shards, shards.stepped(1))
    compiled: Any = torch.compile(one, backend="eager")
    training.load(root / "marked", None, compiled, filled := one.stepped(0))
    expected = Marked()
    assert largest(everything(one, filled), everything(expected, expected.stepped(1))) == 0
    filled.step()
    if mesh.rank() == 0:
        training.save(root / "whole", None, one, filled)
    dist.barrier()
    training.load(root / "whole", mesh, shards, optimizer := shards.stepped(1))
    wanted = Marked(*place)
    assert largest(everything(shards, optimizer), everything(wanted, wanted.stepped(2))) == 0
    mesh.close()


def a_failure_in_the_background_is_told_on_every_rank(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model: Any = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
    training.save(root / "good", mesh, model)
    more = training.CheckpointManager(root / "more", mesh, async_=True)
    for call in (
        lambda: training.save(root / "next", mesh, model),
        lambda: training.load(root / "good", mesh, model),
        lambda: more.save(1, model),
    ):
        with REFUSED if mesh.rank() == 1 else mock.MagicMock():
            training.save(root / "bad", mesh, model, async_=True).exception()
        said = f"CheckpointError: the checkpoint {root}/bad could not be written by rank 1 ("
        assert error_of(call).startswith(said)
    training.save(root / "next", mesh, model)  # it was told once
    assert more.save(1, model).result().name == "step-000001"
    more.save(2, model)
    assert more.latest() == root / "more" / "step-000002"
    mesh.close()
    dist.barrier()
    assert files_left(root) == ["good", "more", "next"]


def the_end_of_the_block_waits_for_the_last_save(root: Path) -> None:
    """What is under way is finished; where it failed, the end of the block says so, but hides no other error."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)

    def run(name: str, failing: type[Exception] | None = None) -> None:
        with training.CheckpointManager(root / name, mesh, async_=True) as checkpoints:
            checkpoints.resume_or_start(model)
            checkpoints.save(1, model)
            if failing is not None:
                raise failing

    run("fine")
    assert (root / "fine" / "step-000001" / "namedmesh.pt").exists()
    with REFUSED if mesh.rank() == 0 else nullcontext():
        said = error_of(lambda: run("bad"))
    place = root / "bad" / "step-000001"
    assert said.startswith(f"CheckpointError: the checkpoint {place} could not be written by rank 0 (")
    with pytest.raises(ZeroDivisionError):
        run("other", ZeroDivisionError)
    CheckpointRanks.of(mesh).wait_for_save()
    mesh.close()


def what_changes_while_it_is_written_is_not_in_the_checkpoint(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net: Any = fully_shard(nn.Linear(4, 4).double(), mesh=mesh["dp"])
        return net, adam(net.parameters())

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        return everything(net, optimizer)

    net, optimizer = make()
    then = step(net, optimizer)
    changed = threading.Event()
    write = dcp.FileSystemWriter.write_data

    def write_later(*args: Any) -> Any:
        assert changed.wait(60)
        return write(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write_later):
        written = training.save(root / "last", mesh, net, optimizer, async_=True)
        assert not written.cancel()  # what is written is not given up
        now = step(net, optimizer)
        changed.set()
        assert written.result() == root / "last"
    training.load(root / "last", mesh, *(other := make()))
    loaded = everything(*other)
    mesh.close()
    assert largest(loaded, then) == 0
    assert largest(loaded, now) > 0.01


def states_before_a_checkpoint_are_those_after_it(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    optimizer = adam(model.parameters())
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

    # tp has another size now, and the states differed along it: they stay as they are.
    mesh = namedmesh.init_mesh(dp=4, tp=1, device="cpu")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    torch.manual_seed(7)
    seeded = torch.get_rng_state()
    training.load(root / "fresh", mesh, model)
    assert torch.equal(torch.get_rng_state(), seeded)
    mesh.close()


class Fresh(nn.Module):
    """A module whose state dict is made afresh each time: a tensor of another size on each rank, and other values."""

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


def what_ranks_have_for_themselves_they_get_back(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    rank = mesh.rank()
    model, sharded = Fresh(rank), nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(sharded, mesh=mesh["dp"])
    both = [model, sharded]
    optimizer, fresh = (torch.optim.SGD(sharded.parameters()) for _ in range(2))
    optimizer.state[next(sharded.parameters())] = {  # for the shard of a rank, of several types and shapes
        "scale": torch.full((3,), float(rank)),
        "absmax": torch.tensor([rank, 200], dtype=torch.uint8),
        "factors": {"left": torch.eye(2) * rank},
        "step": 7,
        "shared": torch.tensor([1.0, 2.0], dtype=torch.float64),
    }
    training.save(root / "one", mesh, both, optimizer)
    other = Fresh(5)
    training.load(root / "one", mesh, [other, sharded], fresh)
    assert other.average.tolist() == [rank, rank]
    assert [int(other.count), other.amax.tolist()] == [rank, list(range(rank + 1))]
    assert states_of(fresh) == states_of(optimizer)
    with torch.no_grad():
        model.weight.add_(rank)
    refused = "CheckpointError: 'weight': other values on rank 1 than on rank 0, "
    assert error_of(lambda: training.save(root / "one", mesh, both)).startswith(refused)
    mesh.close()
    mesh = namedmesh.init_mesh(tp=2, device="cpu")
    plain = nn.Sequential(nn.Linear(4, 4, bias=False))
    fresh = torch.optim.SGD(plain.parameters())
    moved = error_of(lambda: training.load(root / "one", mesh, [other, plain], fresh))
    kept = "'0.weight:scale', '0.weight:absmax', '0.weight:factors': kept by the optimizer for the shard of one rank"
    assert kept in moved
    training.load(root / "one", mesh, [other, plain])
    assert [other.average.tolist(), int(other.count)] == [[0.0, 0.0], 0]  # the first
    mesh.close()


def random_numbers_and_loaders_go_on_where_they_were(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    model = nn.Linear(1, 1)
    training.seed_all(0, mesh)
    then, text = digest(seeds.random_state()), "a text that is written once"
    extra: Any = {"a": 1.5, "texts": [text, text]}
    if mesh.rank() == 1:  # equal, but not for pickle
        extra = {"texts": [text, "".join(list(text))], "a": 1.5}
    training.save(root / "one", mesh, model, data=Loader(10 + mesh.rank()), values=extra)
    training.seed_all(1, mesh)
    training.load(root / "one", mesh, model, data=(loader := Loader(0)))
    assert digest(seeds.random_state()) == then
    assert loader.place == 10 + mesh.rank()
    mesh.close()
    mesh = namedmesh.init_mesh(dp=1, tp=2, device="cpu")
    refused = error_of(lambda: training.load(root / "one", mesh, model, data=loader))
    assert "no state of the data loader for this rank in" in refused
    mesh.close()


def tied_stages_are_one_weight_in_every_layout(root: Path) -> None:
    """Saved on two stages and on one, gone on with on the other: the losses and norms of one process."""

    def job(pp: int, source: Path | None, target: Path | None, count: int) -> list[float]:
        mesh = namedmesh.init_mesh(pp=pp, dp=2 // pp, device="cpu")
        model = Ends(mesh.is_first("pp"), mesh.is_last("pp"))
        sum_gradients, optimizer = model.tie(mesh), adam(model.parameters())
        if source is not None:
            training.load(source, mesh, model, optimizer)
        pipe = training.Pipeline(
            model, mesh, n_microbatches=2, loss_fn=lambda out, y: (out - y).square().mean()
        )
        told = []
        for _ in range(count):
            loss = pipe.step(torch.arange(4), target=torch.eye(4, dtype=torch.float64))
            told.append(training.mean_loss(loss, mesh).item())
            sum_gradients()
            told.append(training.clip_grad_norm_(model.parameters(), 0.5, mesh).item())
            optimizer.step()
            optimizer.zero_grad()
        if target is not None:
            training.save(target, mesh, model, optimizer)
        dist.barrier()
        mesh.close()
        return told

    expected = job(1, None, None, 6)
    found = job(1, None, root / "1", 2) + job(2, root / "1", root / "2", 2) + job(1, root / "2", None, 2)
    assert found == [pytest.approx(each, abs=1e-9) for each in expected]
    about = checkpoint_files.read_manifest(root / "2")
    saved = checkpoint_storage.read_metadata(root / "2", about).state_dict_metadata
    assert [name for name in saved if name.startswith("model.")] == ["model.embed.weight"]
    mesh = namedmesh.init_mesh(pp=2, device="cpu")
    model = Ends(mesh.is_first("pp"), mesh.is_last("pp"))
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    training.save(root / "untied", mesh, model)
    model.tie(mesh)
    assert "are tied here" in error_of(lambda: training.load(root / "untied", mesh, model))
    with torch.no_grad():
        next(model.parameters()).add_(mesh.rank())
    said = error_of(lambda: training.save(root / "apart", mesh, model))
    assert "other values on rank 1 than on rank 0" in said
    mesh.close()


def a_rank_that_dies_after_the_end_leaves_the_checkpoint(root: Path) -> None:
    """The last broadcast of DCP fails, and the checkpoint is in its place: cleaning up must not remove it."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    finish = checkpoint_storage.StorageWriter.finish

    def die(self: Any, *arguments: Any, **named: Any) -> None:
        finish(self, *arguments, **named)
        raise RuntimeError("Connection closed by peer")

    with mock.patch.object(checkpoint_storage.StorageWriter, "finish", die):
        said = error_of(lambda: training.save(root / "one", mesh, nn.Linear(2, 2), step=4))
    assert "closed by peer" in said
    assert training.load(root / "one", mesh, nn.Linear(2, 2)) == {"step": 4}
    mesh.close()


# --- all of them, in a world of two ranks and one of four ------------------------------------------------------

ON_RANKS = {
    2: (
        what_does_not_fit_is_refused_by_name,
        what_cannot_be_written_is_one_sentence,
        what_fails_on_one_rank_is_told_on_every_rank,
        marked_shards_are_whole_tensors,
        what_ranks_have_for_themselves_they_get_back,
        random_numbers_and_loaders_go_on_where_they_were,
        a_failure_in_the_background_is_told_on_every_rank,
        the_end_of_the_block_waits_for_the_last_save,
        what_changes_while_it_is_written_is_not_in_the_checkpoint,
        tied_stages_are_one_weight_in_every_layout,
        a_rank_that_dies_after_the_end_leaves_the_checkpoint,
    ),
    4: (states_before_a_checkpoint_are_those_after_it,),
}


def in_turn(cases: tuple[Callable[[Path], None], ...], root: Path) -> None:
    for case in cases:
        torch.manual_seed(0)
        (root / case.__name__).mkdir(exist_ok=True)
        case(root / case.__name__)


@pytest.mark.parametrize("ranks", ON_RANKS)
def test_what_checkpoints_of_several_ranks_promise(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, in_turn, ON_RANKS[ranks], tmp_path)


def through_pretrained(root: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True  # one tensor under two names: theirs keeps one of them
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
def test_save_pretrained_and_back(tmp_path: Path) -> None:
    import transformers  # noqa: F401  once, before the ranks are forked

    run_ranks(2, through_pretrained, tmp_path)
