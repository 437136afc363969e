"""Directories of checkpoints: locks, background saves, export, and several jobs in one directory."""

from __future__ import annotations

import errno
import fcntl
import gc
import multiprocessing
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from checkpoint_checks import distinct_values, list_files, make_constant_job
from messages import error_of
from ranks import run_ranks
from tensors import full_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh._errors import CheckpointError
from namedmesh.compat import megatron
from namedmesh.training import checkpoint_saving, checkpoint_storage, seeds
from namedmesh.training.checkpoint_ranks import CheckpointRanks

if TYPE_CHECKING:
    from collections.abc import Iterator


def list_groups_that_outlive_the_default_group(root: Path, closed: bool) -> list[str]:
    """Destroy all groups while all objects that use them are still referenced, as in a script."""
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    mesh.add_view("expert", ep=2)
    mesh.flatten("dp", "tp")
    kept: list[Any] = [megatron.bind(mesh), mesh]
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    checkpoints = training.CheckpointManager(root / "run", mesh, async_=True)
    kept += [checkpoints, checkpoints.save(1, model)]
    checkpoints.close()
    training.save(root / "one", mesh, model)
    groups = {known.label: ref(known.group) for known in mesh.communicators}
    groups["world"] = ref(dist.group.WORLD)  # type: ignore[arg-type]
    assert {"checkpoints", "self", "world"} <= groups.keys()
    if closed:
        mesh.close()
    dist.destroy_process_group()
    gc.collect()
    assert kept
    return [label for label, group in groups.items() if group() is not None]


ENDS = """
import gc, torch, torch.distributed as dist, namedmesh
from weakref import ref
from torch.distributed.tensor import DTensor, Replicate
mesh = namedmesh.init_mesh(dp=1, tp=1, device="cpu")
kept = DTensor.from_local(torch.ones(2), mesh["tp"], [Replicate()])
world = ref(dist.group.WORLD)
mesh.close()
dist.destroy_process_group()
gc.collect()
print("freed" if world() is None else "held")
"""
MAKES_THE_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [MAKES_THE_GROUP, ""])
def test_a_referenced_tensor_does_not_keep_the_default_group_alive(before: str) -> None:
    # In a new interpreter: torch keeps the group in modules that it imports after the group was made.
    words = [sys.executable, "-c", before + ENDS]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "freed"


@pytest.mark.parametrize("closed", [True, False])
def test_no_group_outlives_the_default_group(tmp_path: Path, closed: bool) -> None:
    """A gloo thread that still runs when the interpreter exits may abort the process."""
    assert run_ranks(2, list_groups_that_outlive_the_default_group, tmp_path, closed, init=False) == [[], []]


# --- calls on one rank ---------------------------------------------------------------------------


def save_on_one_rank(path: Path, who: int, saved_before: bool) -> str:
    mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu", timeout=timedelta(seconds=5))
    model = nn.Linear(2, 2)
    if saved_before:
        training.save(path, mesh, model)
    return error_of(lambda: training.save(path, mesh, model)) if mesh.global_rank == who else ""


@pytest.mark.parametrize(
    ("who", "saved_before", "message"),
    [
        pytest.param(
            3,
            False,
            "AgreementError: ranks 0, 1, 2 of 4 did not call save within 5 s; ",
            marks=pytest.mark.slow,
        ),
        (
            0,
            True,
            "AgreementError: some ranks did not call save within the timeout of the mesh ([Rank 0]: Ranks 1, 2, 3 ",
        ),
    ],
)
def test_a_save_on_one_rank_names_the_others(
    tmp_path: Path, who: int, saved_before: bool, message: str
) -> None:
    reports = run_ranks(4, save_on_one_rank, tmp_path, who, saved_before)
    assert reports.pop(who).startswith(message)
    assert reports == [""] * 3


# --- the background ------------------------------------------------------------------------------


def save_in_background_on_fake_gpus(root: Path) -> None:
    """Save in the background as if there were GPUs: the current device of a new thread is GPU 0."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    chosen: list[tuple[bool, int]] = []

    def choose(device: int) -> None:
        chosen.append((threading.current_thread() is threading.main_thread(), device))

    never = AssertionError("no stream is needed for tensors on the CPU")
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_stream", side_effect=never),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=3),
        mock.patch.object(torch.accelerator, "set_device_index", choose),
        mock.patch.object(seeds, "collect_rng_states", return_value={}),
        mock.patch.object(checkpoint_saving, "compare_weights"),  # on the device of the mesh
    ):
        training.save(root / "cpu", mesh, model, async_=True).result()
        assert not chosen
        mesh.device = torch.device("cuda", 3)
        training.save(root / "cuda", mesh, model, async_=True).result()
    assert chosen == [(False, 3)]
    mesh.close()


def test_a_background_save_uses_the_device_of_the_rank(tmp_path: Path) -> None:
    run_ranks(2, save_in_background_on_fake_gpus, tmp_path)


@pytest.mark.gpu
def test_background_saves_copy_to_pinned_memory_and_reuse_it(tmp_path: Path) -> None:
    with mesh_of_one_gpu(tmp_path) as mesh:
        model: Any = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda(), mesh=mesh["dp"])
        other: Any = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda(), mesh=mesh["dp"])
        ranks = CheckpointRanks.from_mesh(mesh, "save")
        places = []
        for number in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(number)
            saved = training.save(tmp_path / str(number), mesh, model, async_=True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(-1)  # while it is written
            saved.result()
            assert all(tensor.is_pinned() for tensor in ranks.pinned.values())
            places.append({name: tensor.data_ptr() for name, tensor in ranks.pinned.items()})
        assert places[0] == places[1]
        training.load(tmp_path / "1", mesh, other)
        assert all((full_tensor(parameter) == 1).all() for parameter in other.parameters())


@contextmanager
def mesh_of_one_gpu(directory: Path) -> Iterator[namedmesh.NamedMesh]:
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    mesh = namedmesh.init_mesh(dp=1, device="cuda")
    try:
        yield mesh
    finally:
        mesh.close()
        dist.destroy_process_group()


# --- Hugging Face --------------------------------------------------------------------------------


class Normed(nn.Sequential):
    """A model with a buffer that differs between ranks."""

    def __init__(self, mean: float) -> None:
        super().__init__(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)
        norm: Any = self[1]
        norm.running_mean.fill_(mean)


def save_means_that_differ(root: Path) -> None:
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    training.save(root / "ours", mesh, Normed(mesh.rank() + 5.0))
    mesh.close()


@pytest.mark.oracle("safetensors")
def test_exported_weights_are_complete_and_not_mixed_with_others(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run_ranks(2, save_means_that_differ, tmp_path)
    target = tmp_path / "theirs"
    target.mkdir()
    base = {name: tensor + 1 for name, tensor in Normed(8.0).state_dict().items()}
    save_file(base, target / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"has other weights \(model.safetensors\), which from_pretrained"
    ):
        training.to_pretrained(tmp_path / "ours", target)
    (target / "model.safetensors").rename(tmp_path / "base.safetensors")
    for _ in range(2):  # it replaces its own files
        training.to_pretrained(tmp_path / "ours", target)
    (weights,) = target.glob("*.safetensors")
    written, expected = load_file(weights), Normed(5.0).state_dict()  # of the lowest rank
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())

    # An index says which files are the model's.
    (tmp_path / "base.safetensors").rename(target / "model.safetensors")
    model: Any = Normed(0.0)
    training.load(target, None, model)
    assert model[1].running_mean.tolist() == [5.0, 5.0]
    index = target / "model.safetensors.index.json"
    index.rename(target / "index")
    message = error_of(lambda: training.load(target, None, model))
    assert (
        f"{target} has '0.bias', '0.weight', '1.bias', '1.num_batches_tracked' and 3 more in more than one"
        in message
    )
    (target / "index").rename(index)
    weights.unlink()
    assert f"names files that do not exist: {weights.name}." in error_of(
        lambda: training.load(target, None, model)
    )


@pytest.mark.oracle("peft", "transformers")
def test_adapters_of_peft_are_not_exported(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=1)
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules=["q_proj"], r=1))
    for name, part in (("with", model), ("inside", model.get_base_model())):
        training.save(tmp_path / name, None, part)
        with pytest.raises(CheckpointError, match="has adapters of PEFT, such as"):
            training.to_pretrained(tmp_path / name, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


# --- directories ---------------------------------------------------------------------------------


def hold_a_directory(directory: Path, pipe: Any) -> None:
    training.CheckpointManager(directory, None).resume_or_start(nn.Linear(1, 1))
    kept = training.CheckpointManager(directory, None)
    kept.resume_or_start(nn.Linear(1, 1))
    pipe.send("held")
    pipe.recv()


def test_one_job_at_a_time_writes_in_a_directory(tmp_path: Path) -> None:
    """The message names the process that writes; the lock of a killed process is stale."""
    model, context = nn.Linear(1, 1), multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=hold_a_directory, args=(tmp_path, theirs), daemon=True)
    other.start()
    assert ours.recv() == "held"
    run = training.CheckpointManager(tmp_path, None)
    for call in (lambda: run.resume_or_start(model), lambda: run.save(1, model)):
        assert error_of(call) == (
            f"CheckpointError: {tmp_path} is in use by process {other.pid} on host {socket.gethostname()}, which saves its "
            "checkpoints there. Give this job a directory of its own, or end that process."
        )
    assert run.latest() is None  # latest() needs no lock
    other.kill()
    other.join()
    assert run.resume_or_start(model) == {"step": 0}
    run.save(1, model)
    second = training.CheckpointManager(tmp_path, None)  # of the same process
    assert second.resume_or_start(model) == {"step": 1}
    run.close()
    with second:
        second.save(2, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    no_locks = mock.patch.object(fcntl, "lockf", side_effect=OSError(errno.ENOLCK, "No locks available"))
    with no_locks, pytest.warns(UserWarning, match="cannot be locked"):
        run.save(3, model)


@pytest.mark.parametrize("action", ["remove", "replace"])
@pytest.mark.parametrize("moment", ["stat", "open"])
def test_latest_ignores_checkpoints_that_another_job_removes_or_replaces(
    tmp_path: Path, moment: str, action: str
) -> None:
    """latest() in an evaluation job, while the training job removes the checkpoint."""
    model, moved = nn.Linear(1, 1), tmp_path / "moved"
    run = training.CheckpointManager(tmp_path / "run", None, keep=None)
    run.save(1, model)
    run.save(2, model)
    run.directory.rename(moved)  # this process has not read the files at their new place
    before, last = moved / "step-000001", moved / "step-000002"
    look, left = getattr(Path, moment), ["once"]

    def remove_or_replace(path: Path, *arguments: Any, **options: Any) -> Any:
        result = look(path, *arguments, **options)
        if path == last / ".metadata" and left:
            left.clear()
            shutil.rmtree(last)
            if action == "replace":
                training.save(last, None, model, step=2)
        return result

    evaluation = training.CheckpointManager(moved, None)
    with mock.patch.object(Path, moment, remove_or_replace):
        assert evaluation.latest() == (before if action == "remove" else last)
    assert not left


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_converted_checkpoints_of_namedmesh_0_3_are_loaded_and_the_run_continues(tmp_path: Path) -> None:
    """The fixture was written by namedmesh 0.3 on two ranks: make_constant_job(3), and a buffer that differs."""
    tests = Path(__file__).parents[1]
    old, new = tests / "support" / "checkpoint_0_3" / "step-000007", tmp_path / "run" / "step-000007"
    converter = tests.parent / "examples" / "migrate" / "checkpoints_0_3.py"

    def run_converter(*words: str) -> str:
        sys.argv = [str(converter), *words]
        try:
            runpy.run_path(str(converter), run_name="__main__")
        except SystemExit as error:
            return str(error)
        return ""

    def convert(source: Path, target: Path) -> str:
        return run_ranks(1, run_converter, str(source), str(target), init=False)[0]

    model, optimizer = make_constant_job(0)
    model.register_buffer("seen", torch.zeros(2))
    message = error_of(lambda: training.load(old, None, model))
    assert f"{old} was written by namedmesh 0.3 or before; convert" in message
    assert convert(old, new) == ""
    run = training.CheckpointManager(tmp_path / "run", None, keep=1)
    assert run.latest() == new
    assert run.resume_or_start(model, optimizer) == {"step": 7, "note": "kept"}
    assert distinct_values(model, optimizer) == {3.0, 0.0}  # the buffer of rank 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    run.save(8, model, optimizer)
    assert list_files(tmp_path / "run") == ["step-000008"]
    manifest = tmp_path / "older" / "namedmesh.pt"
    manifest.parent.mkdir()
    torch.save({"data": "data-0"}, manifest)
    assert "was written before namedmesh 0.3: save it again with 0.3" in convert(manifest.parent, new)


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of read bytes")
def test_a_save_reads_no_large_file_of_another_checkpoint(tmp_path: Path) -> None:
    """Every save lists all checkpoints: the bytes that it reads do not grow with the model."""

    def count_read_bytes() -> int:
        return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])

    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(300)])
    run = training.CheckpointManager(tmp_path, None, keep=None)
    for step in range(3):
        run.save(step, model)
    large = sum(path.stat().st_size for path in tmp_path.glob("*/.metadata"))
    before = count_read_bytes()
    assert run.latest() == tmp_path / "step-000002"
    assert 2 * (count_read_bytes() - before) < large


def test_messages_name_the_problem_and_the_remedy(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    (tmp_path / "runs").mkdir()
    first = training.CheckpointManager(tmp_path / "first", None)
    copied = tmp_path / "runs" / "best"
    shutil.copytree(first.save(7, model).result(), copied)
    run = training.CheckpointManager(tmp_path / "runs", None)
    remedy = f"resume_or_start(..., resume={str(copied)!r})"
    assert remedy in error_of(lambda: run.resume_or_start(model))
    assert run.resume_or_start(model, resume=str(copied)) == {"step": 7}

    torch.save(model.state_dict(), tmp_path / "model.pt")
    message = error_of(lambda: training.load(tmp_path / "model.pt", None, model))
    assert message.startswith(
        f"CheckpointError: {tmp_path}/model.pt is a file, and a checkpoint is a directory"
    )
    message = error_of(lambda: training.save(tmp_path / "pair", None, [model, nn.Linear(1, 1)]))
    assert "'weight' is the name of two values; save two models as one, nn.ModuleDict(" in message


def test_checkpoints_behind_a_symbolic_link_are_neither_removed_nor_replaced(tmp_path: Path) -> None:
    model, archive = nn.Linear(1, 1), tmp_path / "archive"
    run = training.CheckpointManager(tmp_path / "run", None, keep=1)
    first = run.save(1, model).result()
    shutil.move(first, archive)
    first.symlink_to(archive)
    archived = sorted(path.name for path in archive.iterdir())
    run.save(2, model)
    run.save(3, model)
    for save in (lambda: run.save(1, model), lambda: training.save(first, None, model)):
        message = f"CheckpointError: {first} is a symbolic link, and a save would replace what is behind it; remove the link"
        assert error_of(save).startswith(message)
    assert sorted(path.name for path in archive.iterdir()) == archived
    assert training.load(archive, None, nn.Linear(1, 1)) == {"step": 1}
    assert sorted(path.name for path in run.directory.glob("step-*")) == ["step-000001", "step-000003"]
    # A link to a folder that is no checkpoint, with files that look like those of an interrupted save.
    foreign = tmp_path / "foreign" / "__0123456789abcdef__0_0.distcp"
    foreign.parent.mkdir()
    foreign.touch()
    (run.directory / "step-000009").symlink_to(foreign.parent)
    run.save(4, model)
    assert error_of(lambda: run.save(9, model)).startswith("CheckpointError: ")
    assert foreign.exists()


def save_with_delayed_visibility(root: Path) -> list[str]:
    """Save and load if rank 1 sees a new name only when it looks for the fourth time, or never."""
    mesh = namedmesh.init_mesh(dp=2, device="cpu")
    model, exists, looks = nn.Linear(2, 2), Path.exists, dict[Path, int]()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    messages = []

    def exists_late(path: Path, **options: Any) -> bool:
        looks[path] = looks.get(path, 0) + 1
        return looks[path] > 3 and exists(path, **options)

    late = mock.patch.object(Path, "exists", exists_late) if mesh.rank() == 1 else nullcontext()
    with late:
        messages.append(error_of(lambda: training.save(root / "one", mesh, model)))
        messages.append(error_of(lambda: training.load(root / "one", mesh, model)))
    never = mock.patch.object(Path, "exists", return_value=False) if mesh.rank() == 1 else nullcontext()
    with never, mock.patch.object(checkpoint_storage, "VISIBILITY_TIMEOUT", 0.1):
        messages.append(error_of(lambda: training.save(root / "two", mesh, model)))
    mesh.close()
    return messages


def test_a_host_may_see_a_new_directory_late(tmp_path: Path) -> None:
    for saved, loaded, refused in run_ranks(2, save_with_delayed_visibility, tmp_path):
        assert (saved, loaded) == ("", "")
        assert refused.startswith(
            f"CheckpointError: rank 1: {tmp_path}/two is not the folder that rank 0 sees; "
        )
