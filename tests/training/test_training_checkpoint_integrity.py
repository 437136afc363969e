"""Directories of checkpoints: interrupted saves, corrupted files, and files that nobody may remove."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import traceback
import zlib
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_checks import DISK_FULL, INTERRUPTED, distinct_values, list_files, make_constant_job
from messages import error_of
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh import training
from namedmesh._errors import CheckpointError
from namedmesh.training.checkpoint_storage import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_run_resumes_from_the_checkpoint_that_was_finished_last(tmp_path: Path) -> None:
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
    requeued.save(900, model)  # the three that were finished last are kept
    assert list_files(tmp_path) == ["step-000850", "step-000900", "step-001000"]


def test_a_directory_of_another_run_is_rejected_and_kept(tmp_path: Path) -> None:
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
    assert list_files(tmp_path) == ["step-000003"]
    assert second.resume_or_start(model) == {"step": 3}  # the remedy of the message
    second.save(4, model)
    training.save(tmp_path / "mine", None, model)  # it belongs to no run
    second.save(5, model)
    assert error_of(lambda: second.resume_or_start(model, resume=tmp_path / "mine")) == (
        f"CheckpointError: {tmp_path}/mine has no step to resume from; load it with training.load"
    )
    assert list_files(tmp_path) == ["mine", "step-000005"]
    refused = error_of(lambda: training.CheckpointManager(tmp_path, None, keep=0))
    assert refused.startswith("CheckpointError: keep is 0; ")


def test_files_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    run = training.CheckpointManager(tmp_path, None, keep=2)
    with DISK_FULL, pytest.raises(CheckpointError, match="No space left"):
        run.save(1, model)
    assert list_files(tmp_path) == []
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(2, model)
    assert list_files(tmp_path) == []
    assert run.latest() is None
    for step in (3, 4):
        run.save(step, model)
    # An interrupted removal leaves no checkpoint, and does not prevent the next save.
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert list_files(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        training.load(tmp_path / "step-000003", None, model)
    run.save(3, model)
    assert list_files(tmp_path) == ["step-000003", "step-000005"]
    # If the replacement of a checkpoint is interrupted, the previous one stays complete.
    with INTERRUPTED, pytest.raises(KeyboardInterrupt):
        run.save(5, model)
    assert len(list_files(tmp_path / "step-000005")) == 1
    assert training.load(tmp_path / "step-000005", None, model) == {"step": 5}
    (tmp_path / "step-000005" / "tokenizer.json").touch()
    for step in (5, 6, 7):  # other files in a checkpoint are kept, and removed with it
        assert (tmp_path / "step-000005" / "tokenizer.json").exists()
        run.save(step, model)
    assert list_files(tmp_path) == ["step-000006", "step-000007"]
    assert [len(list_files(tmp_path / name)) for name in list_files(tmp_path)] == [1, 1]


def test_foreign_files_and_renamed_checkpoints_are_not_removed(tmp_path: Path) -> None:
    """Directories of other programs, and checkpoints that were copied or renamed."""
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
    assert list_files(tmp_path) == kept
    assert run.latest() == tmp_path / "step-000005"
    with pytest.raises(CheckpointError, match="exists and is not a namedmesh checkpoint"):
        run.save(1, model)
    assert all(each.exists() for each in mine)


def test_an_unreadable_checkpoint_is_not_removed(tmp_path: Path) -> None:
    """An I/O error does not mean that there is no file, as is_file() of Python 3.14 reports."""
    model = nn.Linear(1, 1)
    run = training.CheckpointManager(tmp_path, None)
    run.save(1, model)
    stat = Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == tmp_path / "step-000001" / ".metadata":
            raise OSError(5, "Input/output error")
        return stat(path, **options)

    with (
        mock.patch.object(Path, "stat", failing),
        mock.patch.object(Path, "is_file", os.path.isfile),
        pytest.raises(CheckpointError, match="Input/output error"),
    ):
        run.save(2, model)
    assert training.load(tmp_path / "step-000001", None, model) == {"step": 1}


def test_corrupted_checkpoints_are_rejected_and_an_older_one_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    run = training.CheckpointManager(tmp_path, None, keep=None)
    good, last = (run.save(step, model).result() for step in (1, 2))
    again = training.CheckpointManager(tmp_path, None)
    for file in [each for each in last.rglob("*") if each.is_file()]:
        contents, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]
        for harm in (contents[:9], flipped, None):
            if harm is None and file.name == ".metadata":
                continue  # a directory without a manifest is not a checkpoint
            file.unlink()
            if harm is not None:
                file.write_bytes(harm)
            for call in (partial(training.load, last, None), partial(again.resume_or_start, resume=last)):
                with pytest.raises(CheckpointError, match=file.name):
                    call(model)
            with pytest.warns(UserWarning, match="skipped"):
                assert again.resume_or_start(model) == {"step": 1}
            if harm != flipped:  # latest() does not read tensors, and only the end of .metadata
                with pytest.warns(UserWarning, match="skipped"):
                    assert again.latest() == good
            file.write_bytes(contents)
    for each in (good, last):
        (each / ".metadata").write_bytes(b"")
    with pytest.warns(UserWarning, match="skipped"):
        message = error_of(lambda: again.resume_or_start(model))  # it must not start again silently
    assert message == f"CheckpointError: no checkpoint in {tmp_path} is complete; start in another directory"


@pytest.mark.ci
def test_a_flipped_bit_is_detected_or_does_not_matter(tmp_path: Path) -> None:
    """Only padding, and bytes that torch does not read, do not matter."""
    model, optimizer = make_constant_job(1)
    training.save(tmp_path / "one", None, model, optimizer, number=1)
    files = [each for each in (tmp_path / "one").rglob("*") if each.is_file()]
    bytes_of = {each: each.read_bytes() for each in files}
    flips, refused = random.Random(0), 0
    for number in range(240):
        file = files[number % len(files)]
        changed = bytearray(bytes_of[file])
        changed[flips.randrange(len(changed))] ^= 1 << flips.randrange(8)
        file.write_bytes(changed)
        other = make_constant_job(2)
        try:
            training.load(tmp_path / "one", None, *other)
        except CheckpointError:
            refused += 1
            assert distinct_values(*other) == {2.0}
        else:
            assert distinct_values(*other) == {1.0}
        file.write_bytes(bytes_of[file])
    assert refused > 190


class RunsCode:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["HARM"]),)


def rewrite_metadata(path: Path, change: Callable[[Any], object]) -> None:
    """Replace the pickle in a ``.metadata``, as an attacker would: without the trailer, or with a valid one."""
    file = path / ".metadata"
    contents = file.read_bytes()
    manifest = read_manifest(path)
    assert manifest is not None
    metadata = pickle.loads(contents)  # noqa: S301  it was written by this test
    changed = change(metadata)
    pickled = (
        changed if isinstance(changed, bytes) else pickle.dumps(metadata if changed is None else changed)
    )
    table = contents[manifest["table"] : manifest["start"]]
    checked = {"table": len(pickled), "checksum": zlib.crc32(pickled + table)}
    text = json.dumps(manifest | checked).encode()
    magic = b"namedmesh 1\n"
    file.write_bytes(pickled + table + text + struct.pack(">II", len(text), zlib.crc32(text)) + magic)


def return_value(value: object, _: object) -> object:
    return value


def list_loads(path: Path, model: nn.Module) -> list[Callable[[], object]]:
    return [
        lambda: training.load(path, None, model),
        lambda: training.CheckpointManager(path.parent, None).resume_or_start(model, resume=path),
        lambda: training.to_pretrained(path, path.parent / "exported"),
    ]


def test_loading_runs_no_code_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    model = nn.Linear(1, 1)
    message = error_of(lambda: training.save(tmp_path / "one", None, model, thing=RunsCode()))
    assert message.startswith("CheckpointError: the extra value thing is not plain data (")
    (tmp_path / "harm").unlink(missing_ok=True)
    torch.save({"extra": RunsCode()}, written := io.BytesIO())

    def replace_tensors(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length, place.crc32 = (
                0,
                len(written.getvalue()),
                zlib.crc32(written.getvalue()),
            )

    changes: dict[str, Callable[[Any], object]] = {
        "pickle": lambda _: RunsCode(),
        "nested": lambda metadata: setattr(metadata, "planner_data", RunsCode()),
        "dotted": lambda _: b"\x80\x04\x8c\x05torch\x8c\x10serialization.os\x93.",
        "tensors": replace_tensors,
    }
    for name, change in changes.items():
        path = tmp_path / name
        training.save(path, None, model, things=[1, {"a": (2.0, None, "b")}, torch.ones(2)])
        if change is replace_tensors:
            (data,) = path.glob("*.distcp")
            data.write_bytes(written.getvalue())
        rewrite_metadata(path, change)
        for load in list_loads(path, model):
            assert error_of(load).startswith(("CheckpointError: ", "CorruptedError: ")), name
    assert not (tmp_path / "harm").exists()


class WithExtraState(nn.Linear):
    """A module with an extra state."""

    extra: Any = "kept"

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_object_that_would_run_code_is_named_and_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    saved, loaded = WithExtraState(1, 1), WithExtraState(1, 1)
    saved.extra = RunsCode()
    dcp.save(dict(saved.state_dict()), checkpoint_id=tmp_path / "foreign", no_dist=True)
    assert error_of(lambda: training.load(tmp_path / "foreign", None, loaded)) == (
        "CheckpointError: '_extra_state' is not plain data, and to read it would run code that the file names; "
        "omit it with select"
    )
    assert not torch.equal(loaded.weight, saved.weight)
    training.load(tmp_path / "foreign", None, loaded, select=lambda name: "extra" not in name)
    assert torch.equal(loaded.weight, saved.weight)
    assert loaded.extra == "kept"
    assert not (tmp_path / "harm").exists()


def test_a_hostile_file_changes_no_class_and_names_no_file_outside(tmp_path: Path) -> None:
    """pickle sets attributes on every class that it gets, and a file may name any file."""
    model = nn.Linear(1, 1)
    before = {
        kind: dict(vars(kind)) for kind in (Path, PosixPath, PurePosixPath, dcp_metadata.Metadata, torch.Size)
    }
    for name in ("pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata", "torch\nSize"):
        # BUILD with (None, {"exists": 1}): the attributes of slots, which pickle sets one by one.
        training.save(tmp_path / "class", None, model)
        pickled = f"c{name}\n".encode() + b"(N(S'exists'\nI1\ndtb."
        rewrite_metadata(tmp_path / "class", partial(return_value, pickled))
        for load in list_loads(tmp_path / "class", model):
            assert error_of(load).startswith("CheckpointError: ")
    assert {kind: dict(vars(kind)) for kind in before} == before
    training.save(tmp_path / "other", None, model)
    (data,) = (tmp_path / "other").glob("*.distcp")
    for name in (str(data), f"../other/{data.name}", "..", ""):
        training.save(tmp_path / "names", None, model)

        def rename(metadata: Any, name: str = name) -> None:
            for place in metadata.storage_data.values():
                place.relative_path = name

        rewrite_metadata(tmp_path / "names", rename)
        for load in list_loads(tmp_path / "names", model):
            assert f"names the file {name!r}, which is not in its folder" in error_of(load)


WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save_until_killed(directory: Path, number: int, at: int) -> bool:
    """Save in a child that is killed before its n-th write; return whether it was killed."""
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
            run.resume_or_start(*make_constant_job(0))
            sys.addaudithook(before)
            run.save(number, *make_constant_job(number))
            os._exit(0)
        except BaseException:  # noqa: BLE001  nothing of pytest's may run twice
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.ci
def test_a_complete_checkpoint_loads_after_a_kill_at_any_write(tmp_path: Path) -> None:
    training.CheckpointManager(tmp_path, None, keep=1).save(1, *make_constant_job(1))
    at, number = 0, 2
    while save_until_killed(tmp_path, number, at):
        model, optimizer = make_constant_job(-1)
        found = training.CheckpointManager(tmp_path, None).resume_or_start(model, optimizer)["step"]
        assert found in {number - 1, number}
        assert distinct_values(model, optimizer) == {found}
        number, at = found + 1, at + 1
    assert at > 10
    assert list_files(tmp_path) == [f"step-{number:06}"]  # no file of the killed saves is left


def test_all_files_are_synced_before_the_manifest_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and their names are on the disk before the manifest gets its final name."""
    # The inode of each file or directory that was synced. A rename adds all inodes in the directory.
    events: list[Any] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        others = [each for each in path.parent.iterdir() if each.name != ".namedmesh.lock"]
        events.append({each.stat().st_ino for each in (path.parent, *others)})
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    training.save(tmp_path / "one", None, *make_constant_job(1))
    (place,) = (number for number, each in enumerate(events) if isinstance(each, set))
    assert events[place] <= {*events[:place]}
    assert len(events[place]) == 3  # the folder, the data and the metadata
    assert {each.stat().st_ino for each in (tmp_path, tmp_path / "one")} <= {*events[place + 1 :]}
