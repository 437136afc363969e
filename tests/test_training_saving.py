"""What a checkpoint promises: nothing lost in silence, the right one found again, and everything given back as it was."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import signal
import sys
import traceback
import zlib
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from messages import error_of, problems_of
from torch import nn
from training_checks import states_of

from namedmesh import training
from namedmesh.errors import CheckpointError
from namedmesh.training import checkpoint_files
from namedmesh.training.data import digest

INTERRUPTED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=KeyboardInterrupt)
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
            f"CheckpointError: {tmp_path} holds another run, up to step-000003; go on with it by resume_or_start(), "
            "or give this run a directory of its own"
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


def test_what_interrupted_saves_leave_is_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.Checkpoints(tmp_path, None, keep=2)
    with REFUSED, pytest.raises(CheckpointError, match="No space left"):
        run.save(1, model)
    assert files_left(tmp_path) == []
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(2, model)
    assert files_left(tmp_path) == []
    assert training.latest(tmp_path) is None
    for step in (3, 4):
        run.save(step, model)
    # A removal that is interrupted leaves nothing that looks like a checkpoint, or is in the way of one.
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert files_left(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    assert training.latest(tmp_path) == tmp_path / "step-000005"
    run.save(3, model)
    assert files_left(tmp_path) == ["step-000003", "step-000005"]
    # Replaced, and the replacement interrupted: the one before is whole all the while.
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert len(files_left(tmp_path / "step-000005")) == 2
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
    names = ("step-000001/data-mine", "step-000002", "step-mine", "mine.removed")
    mine = [tmp_path / name for name in names]
    for each in mine:
        each.mkdir(parents=True)
        (each / "notes").touch()
    training.Checkpoints(tmp_path, None, keep=1).save(3, model)
    assert all((each / "notes").exists() for each in mine)
    for name in ("step-000001", "mine.removed"):
        with pytest.raises(CheckpointError, match="exists and is no checkpoint"):
            training.save(tmp_path / name, None, model)
    assert all((each / "notes").exists() for each in mine)


def test_a_checkpoint_that_was_copied_or_renamed_is_kept(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.Checkpoints(tmp_path, None, keep=1)
    run.save(1, model)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001-copy")
    (tmp_path / "step-000001").rename(tmp_path / "best")
    for step in (2, 3):
        run.save(step, model)
    assert files_left(tmp_path) == ["best", "step-000001-copy", "step-000003"]
    assert training.latest(tmp_path) == tmp_path / "step-000003"


def test_a_checkpoint_that_cannot_be_looked_at_is_not_removed(tmp_path: Path) -> None:
    """An I/O error is not the absence of a file, which it is for is_file() of Python 3.14."""
    model = nn.Linear(1, 1)
    run = training.Checkpoints(tmp_path, None)
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
    found = [*model.parameters(), *(kept["momentum_buffer"] for kept in optimizer.state.values())]
    return {value for each in found for value in each.flatten().tolist()}


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

    def shorten(path: Path) -> None:
        os.truncate(path, 9)

    harms: tuple[Any, ...] = flip, shorten, Path.unlink
    for name, harm in product((data, data.with_name(".metadata"), Path("namedmesh.pt")), harms):
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


def test_a_run_of_which_nothing_is_whole_does_not_begin_again(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    training.Checkpoints(tmp_path, None).save(1, model)
    (tmp_path / "step-000001" / "namedmesh.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="left out"):
        said = error_of(lambda: training.Checkpoints(tmp_path, None).resume_or_start(model))
    assert said == (f"CheckpointError: no checkpoint in {tmp_path} is whole; begin in another directory")


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
        (place / "namedmesh.pt").write_bytes(contents)
        with pytest.raises(CheckpointError, match="in the checkpoint"):
            training.load(place, None, model)
    training.save(tmp_path / "two", None, model)
    (data,) = (tmp_path / "two").glob("data-*")
    (data / ".metadata").write_bytes(pickle.dumps(Harm()))
    about = checkpoint_files.read_about(tmp_path / "two")
    torch.save(about | {"metadata": zlib.crc32(pickle.dumps(Harm()))}, tmp_path / "two" / "namedmesh.pt")
    with pytest.raises(CheckpointError, match="not a part of a checkpoint"):
        training.load(tmp_path / "two", None, model)
    training.save(tmp_path / "three", None, model)
    (data,) = (tmp_path / "three").glob("data-*/*.distcp")
    about = checkpoint_files.read_about(tmp_path / "three")
    places = checkpoint_files.read_metadata(tmp_path / "three", about).storage_data.values()
    offset = max(each.offset for each in places)
    data.write_bytes(data.read_bytes()[:offset] + contents)
    with pytest.raises(CheckpointError, match=r"not as it was written|could not be read"):
        training.load(tmp_path / "three", None, model)
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
            run = training.Checkpoints(directory, None, keep=1)
            run.resume_or_start(*numbered(0))
            sys.addaudithook(before)
            run.save(number, *numbered(number))
            os._exit(0)
        except BaseException:  # noqa: BLE001  nothing of pytest's may run twice
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_killed_at_any_write_the_last_good_one_loads(tmp_path: Path) -> None:
    training.Checkpoints(tmp_path, None, keep=1).save(1, *numbered(1))
    at, number = 0, 2
    while save_and_be_killed(tmp_path, number, at):
        model, optimizer = numbered(-1)
        found = training.Checkpoints(tmp_path, None).resume_or_start(model, optimizer)["step"]
        assert found in {number - 1, number}
        assert values_of(model, optimizer) == {found}
        number, at = found + 1, at + 1
    assert at > 10
    assert files_left(tmp_path) == [f"step-{number:06}"]  # nothing is left of all that were killed


# --- what is refused -------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    root = tmp_path
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2, bias=False)})
    path = root / "last"
    assert problems_of(lambda: training.load(path, None, saved)) == [
        f"there is no finished checkpoint at {path}; name one that was saved"
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
    used = root / "used"
    used.mkdir()
    (used / "notes").write_text("mine")
    assert problems_of(lambda: training.save(used, None, saved)) == [
        f"{used} exists and is no checkpoint of ours; give another path"
    ]
    assert (used / "notes").exists()
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(5))], lr=0.1)
    assert problems_of(lambda: training.save(path, None, saved, stranger)) == [
        "the optimizer has parameters of shape (5,) that the model has not; make it from the parameters that "
        "the model has now"
    ]
    grouped = [{"params": saved["a"].parameters(), "lr": 0.1}, {"params": saved["b"].parameters(), "lr": 0.2}]
    training.save(path, None, saved, torch.optim.SGD(grouped))
    together = torch.optim.SGD(saved.parameters(), lr=0.1)
    assert problems_of(lambda: training.load(path, None, saved, together)) == [
        f"'b.weight': in a group of the optimizer with others, that had other options in the checkpoint {path}; group them as they "
        "were"
    ]
    assert {each.name for each in root.iterdir()} == {"last", "used"}


# --- what state_dict means -------------------------------------------------------------------------------------


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
        f"CheckpointError: '0.weight', '0.bias': optimized by SGD in the checkpoint {tmp_path}/two, and by Adagrad here; make that "
        "one, or load without the optimizer"
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


# --- weights with two names ------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def stepped(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        self.head(self.embed(torch.arange(4))).square().sum().backward()
        optimizer.step()
        return optimizer


def test_a_weight_with_two_names_is_saved_once_and_loads_as_one_or_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = Tied(tied=True), Tied(tied=False)
    optimizer, other = one.stepped(), two.stepped()
    training.save(tmp_path / "tied", None, one, optimizer)
    training.load(tmp_path / "tied", None, two, other)
    assert torch.equal(two.head.weight, two.embed.weight)
    kept = [other.state[each]["exp_avg"] for each in two.parameters()]
    assert all(torch.equal(each, optimizer.state[one.embed.weight]["exp_avg"]) for each in kept)
    assert kept[0].data_ptr() != kept[1].data_ptr()
    training.save(tmp_path / "equal", None, two, other)
    training.load(tmp_path / "equal", None, one, optimizer)  # two of one value
    with torch.no_grad():
        two.head.weight.add_(1)
    training.save(tmp_path / "apart", None, two, other)
    assert error_of(lambda: training.load(tmp_path / "apart", None, one, optimizer)) == (
        "CheckpointError: 'embed.weight' and 'head.weight' are tied here, and are two weights with other values in the checkpoint "
        f"{tmp_path}/apart; untie them, or load another checkpoint"
    )


def test_a_checkpoint_without_a_step_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    training.save(tmp_path / "one", None, model)
    run = training.Checkpoints(tmp_path / "run", None)
    assert error_of(lambda: run.resume_or_start(model, resume=tmp_path / "one")) == (
        f"CheckpointError: {tmp_path}/one has no step to go on from; load it with training.load"
    )


def test_a_conjugate_is_another_value() -> None:
    z = torch.tensor([1 + 2j])
    assert digest(z) != digest(z.conj()) == digest(z.conj().resolve_conj())
