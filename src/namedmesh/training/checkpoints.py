"""Checkpoints that any layout can load, over torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.arguments import checkpoint_place
from namedmesh.errors import CheckpointError
from namedmesh.mesh import NamedMesh
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_files import CorruptedError
from namedmesh.training.checkpoint_loading import LoadPlanner
from namedmesh.training.checkpoint_locks import Lock
from namedmesh.training.checkpoint_plans import SavePlanner, merge_aliases
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_state import Model, Names, Optimizers, State, to_plain_data
from namedmesh.training.checkpoint_storage import StorageReader, StorageWriter, read_metadata
from namedmesh.training.pretrained import PretrainedReader, read_pretrained

_NAME = re.compile(r"step-\d+")


def save(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    async_: bool = False,
    **extra: Any,
) -> Future[Path]:
    """Write a model, its optimizers, the random states and extra values to a checkpoint.

    Collective: every rank of the mesh must call it.

    DCP writes the local shards of each rank to a new data directory in ``path``. The manifest
    ``namedmesh.pt``, which names this directory, is replaced last: the checkpoint is complete or
    absent.

    Parameters, and all DTensors of optimizers, must be equal on all ranks that have the same shard.
    Buffers, plain tensors of optimizers, random states and the state of data loaders may differ
    between ranks. If they do, they are saved for each rank. A parameter with two names, or tied by
    :func:`tie_stages`, is saved once.

    Args:
        path: the directory of this checkpoint, on a file system that all hosts share.
        mesh: the mesh; None in a process without process groups.
        model: the model of this rank, or a list, such as several pipeline stages. Plain tensors
            with Megatron-LM's attributes are saved as full tensors, which they shard over ``tp``
            (experts: ``etp``).
        optimizer: the optimizer of the model, or a list.
        data: the data loader or sampler, or a list: anything with ``state_dict()`` and
            ``load_state_dict()``.
        async_: whether to write in the background, once the tensors are copied to the CPU. Copies
            from an accelerator go to pinned memory, which is kept for the next save. The next save
            or load waits for it, and raises its error on every rank. Get the ``result()`` before
            ``destroy_process_group()``.
        **extra: values that are equal on every rank, such as the number of the step or
            ``scheduler.state_dict()``: numbers, strings, tensors, and lists, tuples and dicts of
            them.

    Returns:
        A future with the path, which is done already unless ``async_`` is set.

    Raises:
        CheckpointError: on every rank, with all problems at once. An earlier checkpoint at ``path``
            is kept.
        AgreementError: some ranks did not call it within the timeout of the mesh.
    """
    path, mesh = checkpoint_place(path, mesh, "save")
    CheckpointRanks.from_mesh(mesh, "save").begin("save")
    return _save(Path(path), mesh, (model, optimizer, data), extra, async_=async_)


def _save(
    path: Path,
    mesh: NamedMesh | None,
    objects: tuple[Any, ...],
    extra: dict[str, Any],
    *,
    async_: bool,
    run: str | None = None,
    on_finish: Callable[[], None] = lambda: None,
) -> Future[Path]:
    """Save a model, its optimizers and data loaders (``objects``) and extra values.

    Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

    Args:
        path: as for :func:`save`.
        mesh: as for :func:`save`.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        extra: as for :func:`save`.
        async_: as for :func:`save`.
        run: the run that the checkpoint belongs to.
        on_finish: called on rank 0 after the checkpoint is complete.
    """
    ranks = CheckpointRanks.from_mesh(mesh, "save")
    # Without a mesh, every call has its own CheckpointRanks, and could not wait for this save.
    in_background = async_ and mesh is not None
    state = State(mesh, *objects)

    def collect() -> Names:
        names = state.collect()
        state.extra = {key: to_plain_data(value, f"the extra value {key}") for key, value in extra.items()}
        return names

    def prepare() -> None:
        state.all_reduce_partial()
        if in_background:
            state.copy_to_cpu(ranks.pinned)

    problem = f"the checkpoint {path} could not be written"
    # Two calls: all_reduce_partial() communicates, and all ranks must have collected without an
    # error.
    aliases = merge_aliases(ranks.run_on_all_ranks(problem, collect))
    ranks.run_on_all_ranks(problem, prepare)
    name = ranks.run_on_rank0(problem, partial(files.make_data_directory, path))
    layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
    manifest = {"data": name, "layout": layout, "run": run}
    writer = StorageWriter(path, manifest, on_finish, on_cpu=in_background)
    # The current device of a new thread is device 0, on which it would allocate memory.
    device = None
    if mesh is not None and mesh.device.type != "cpu" and in_background:
        device = torch.accelerator.current_device_index()

    def write() -> Path:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            with ranks.reraise_on_all_ranks(problem):
                planner = SavePlanner(state, aliases, writer)
                dcp.save({}, storage_writer=writer, planner=planner, **ranks.dcp_arguments)
        except BaseException:  # also if it is interrupted
            # The checkpoint may be complete nevertheless: if a rank dies after finish(), only the
            # last broadcast of DCP fails. remove_leftovers() keeps a complete checkpoint.
            if ranks.rank == 0:
                files.remove_leftovers(path)
            raise
        return path

    if in_background:
        thread = ThreadPoolExecutor(1)
        future = thread.submit(write)
        ranks.saving = future
        thread.shutdown(wait=False)  # the thread ends after this one task
    else:
        future = Future()
        future.set_result(write())
    return future


class Loaded(dict[str, Any]):
    """The extra values of a checkpoint, and the names that were not loaded.

    Attributes:
        missing_keys: parameters and buffers of the model, on any rank, that keep their values.
        unexpected_keys: parameters and buffers that only the checkpoint has.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    cast: bool = False,
    strict: bool = True,
    select: Callable[[str], bool] | None = None,
) -> Loaded:
    """Fill a model and its optimizers from a checkpoint of any layout.

    Collective: every rank of the mesh must call it.

    Per-rank values are matched by coordinates, on the axes whose size has not changed. If several
    saved ranks match and their values differ, buffers take the value of the lowest rank.

    - Random states are restored if the axes that they depend on have the same sizes as when they
      were saved. Otherwise the generators stay as :func:`seed_all` has seeded them.
    - The state of data loaders is restored if the number of data ranks is the same. Otherwise it
      raises CheckpointError, because a sampler counts the samples of one rank. A position that
      counts the samples of all ranks can be an extra value.
    - A tensor that an optimizer keeps for the shard of one rank is restored if a rank has that
      shard now. Otherwise it raises CheckpointError.

    Until everything is read, a rank has its shards in memory twice. It reads all of every saved
    shard that overlaps with its own, to verify the checksum. In another layout, these may be
    several times the bytes that it keeps.

    Args:
        path: a checkpoint of :func:`save`, or a directory in the format of Hugging Face's
            ``save_pretrained`` (safetensors), which has no optimizer. No code that a file names is
            run.
        mesh: the current mesh.
        model: as for :func:`save`. It must not be on the meta device: call
            ``model.to_empty(device=...)`` first.
        optimizer: as for :func:`save`, of the classes that were saved.
        data: as for :func:`save`.
        cast: whether tensors may have another dtype in the model than in the checkpoint.
        strict: whether the model and the checkpoint must have the same names. If it is False, a new
            layer keeps its values, and a layer that the model no longer has is skipped. A tensor of
            another shape is still an error.
        select: which parameters and buffers to load: a function of the name, the same on every
            rank, such as ``lambda name: not name.startswith("head.")``. Everything else keeps its
            values, and may have other shapes, or be in the model or the checkpoint only.

    Returns:
        The extra values, as a dict with two more attributes, as from ``load_state_dict()``:
        ``missing_keys`` (names in the model that were not loaded) and ``unexpected_keys`` (names
        that only the checkpoint has). The optimizer keeps the state of parameters that were not
        loaded.

    Raises:
        CheckpointError: on every rank, with all problems at once, before anything is changed: a
            file is missing or corrupted, or an entry does not fit.
        AgreementError: some ranks did not call it within the timeout of the mesh.

    Example:
        A pretrained backbone under a new head::

            backbone = lambda name: not name.startswith("head.")
            loaded = training.load("pretrained", mesh, model, select=backbone)
            print(loaded.missing_keys)  # ["head.weight", "head.bias"]
    """
    path, mesh = checkpoint_place(path, mesh, "load")
    CheckpointRanks.from_mesh(mesh, "load").begin("load")
    objects = (model, optimizer, data)
    return _load(Path(path), mesh, objects, cast=cast, strict=strict, select=select)[0]


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint or of a Hugging Face directory, with DCP's metadata."""
    if not files.is_complete(path) and (pretrained := read_pretrained(path)) is not None:
        return pretrained
    manifest = files.read_manifest(path)
    return manifest | {"tensors": read_metadata(path, manifest)}


def _load(
    path: Path, mesh: NamedMesh | None, objects: tuple[Any, ...], **options: Any
) -> tuple[Loaded, dict[str, Any]]:
    """Load a checkpoint, and return its extra values and its manifest.

    Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

    Args:
        path: as for :func:`load`.
        mesh: as for :func:`load`.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        **options: the options of :class:`LoadPlanner`.
    """
    ranks = CheckpointRanks.from_mesh(mesh, "load")
    problem = f"the checkpoint {path} could not be read"
    manifest: dict[str, Any] = ranks.run_on_rank0(problem, partial(_read_manifest, path))
    state = State(mesh, *objects)

    def collect() -> Names:
        if not files.wait_until_visible(path / (manifest["data"] or "")):
            remedy = "put it on a file system that all hosts share"
            raise CheckpointError(f"{path} is visible on rank 0, but not here; {remedy}")
        return state.collect()

    aliases = merge_aliases(ranks.run_on_all_ranks(problem, collect))
    planner = LoadPlanner(state, aliases, manifest, path, **options)
    reader = StorageReader(path, manifest) if manifest["data"] else PretrainedReader(path, manifest)
    with ranks.reraise_on_all_ranks(problem):
        dcp.load({}, storage_reader=reader, planner=planner, **ranks.dcp_arguments)
    # Nothing has changed until here. An error in apply() may leave some values loaded.
    ranks.run_on_all_ranks(problem, planner.check_tied_equal)
    ranks.run_on_all_ranks(problem, planner.apply)
    loaded = Loaded(manifest["extra"])
    loaded.missing_keys = planner.missing_keys
    loaded.unexpected_keys = planner.unexpected_keys
    return loaded, manifest


class CheckpointManager:
    """A directory of the checkpoints of one run: ``step-000100`` and so on.

    Collective: every rank of the mesh must create one, and must call its methods.

    A run starts with the first save after a fresh start, and continues with every checkpoint that
    is loaded here. A save removes the oldest checkpoints of its run, and the files of interrupted
    saves. It removes nothing of another run, nothing with another name (such as ``best``), and
    nothing behind a symbolic link. The end of a ``with`` block waits for the save in the
    background, and raises its error.

    From ``resume_or_start()`` or the first save to ``close()``, no other job can save in the
    directory: it gets a CheckpointError that names this host and process. The lock of a job that
    was killed does not stop the next one.

    Args:
        directory: the directory, on a file system that all hosts share.
        mesh: the mesh; None in a process without process groups.
        keep: how many checkpoints of the run to keep, those that were finished last; None for all.
        async_: as for :func:`save`.

    Raises:
        CheckpointError: ``keep`` is less than 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mesh: NamedMesh | None,
        *,
        keep: int | None = 3,
        async_: bool = False,
    ) -> None:
        directory, mesh = checkpoint_place(directory, mesh, "CheckpointManager")
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}; it must be at least 1, or None to keep all checkpoints")
        self.directory = Path(directory)
        self.mesh = mesh
        self.keep = keep
        self.async_ = async_
        self._ranks = CheckpointRanks.from_mesh(mesh, "CheckpointManager")
        self._run = ""
        self._lock: Lock | None = None  # only rank 0 has it

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error, a save in the background may wait for ranks that have failed.
        if kind is None:
            self.close()
        self._lock = None

    def close(self) -> None:
        """Wait for the save in the background, and let another job save in the directory.

        Raises:
            CheckpointError: on every rank, if the save has failed.
        """
        try:
            self._ranks.wait_for_save()
        finally:
            self._lock = None

    def latest(self) -> Path | None:
        """Return the checkpoint that was finished last, after the save in the background.

        The order is the order of saving, not of steps: after a run went back to step 800, its next
        checkpoint is the latest one, even if there is an older one of step 1000. It skips
        checkpoints with missing or truncated files, with a warning. Their contents are only
        verified by :func:`load`.

        Returns:
            The path, or None if there is no checkpoint.
        """
        if self._ranks.saving is not None:
            self._ranks.saving.exception()  # the next save or load raises it on every rank
        return files.find_latest(self.directory)

    def resume_or_start(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        data: object = None,
        resume: bool | str | os.PathLike[str] = True,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Resume from the latest checkpoint, or start a run if there is none.

        Collective: every rank of the mesh must call it.

        Args:
            model: as for :func:`load`.
            optimizer: as for :func:`load`.
            data: as for :func:`load`.
            resume: True to load the checkpoint that was finished last, or to start if there is
                none, as a job that is queued again needs it. Corrupted checkpoints are skipped,
                with a warning. False starts a run. A path is a checkpoint to resume from: its run
                continues here, also if it is in another directory. From a directory of Hugging
                Face, a run starts. The value of rank 0 counts.
            cast: as for :func:`load`.

        Returns:
            The extra values of the checkpoint, and its ``step``; ``{"step": 0}`` at the start.

        Raises:
            CheckpointError: on every rank: as for :func:`load`; all checkpoints are corrupted;
                the directory has another run; or another job saves there.
        """
        self._ranks.begin("resume_or_start")
        # All ranks try the same checkpoints, and load() raises the same error on every rank.
        manifest: dict[str, Any] = {}
        candidates = self._run_on_rank0(partial(self._find_candidates, resume))
        for path in candidates:
            try:
                _, manifest = _load(path, self.mesh, (model, optimizer, data), cast=cast)
                break
            except CorruptedError as error:
                if resume is not True:
                    raise
                if self._ranks.rank == 0:
                    warnings.warn(f"skipped: {error}", stacklevel=2)
        if candidates and not manifest:
            problem = f"no checkpoint in {self.directory} is complete"
            raise CheckpointError(f"{problem}; start in another directory")
        self._run = manifest.get("run") or ""
        self._run = self._run_on_rank0(self._check_run)
        return dict(manifest.get("extra", {"step": 0}))

    def _find_candidates(self, resume: bool | str | os.PathLike[str]) -> list[Path]:
        """Lock the directory, and return the checkpoints to try, on rank 0, the latest first."""
        self._lock = Lock.acquire(self.directory)
        if resume is False:
            return []
        # Only the names that save() gives: a copy such as "best" may be newer.
        if resume is True:
            entries = reversed(files.list_checkpoints(self.directory))
            return [entry.path for entry in entries if _NAME.fullmatch(entry.path.name)]
        if "step" not in _read_manifest(Path(resume))["extra"]:
            raise CheckpointError(f"{resume} has no step to resume from; load it with training.load")
        return [Path(resume)]

    def save(
        self, step: int, model: Model, optimizer: Optimizers = None, *, data: object = None, **extra: Any
    ) -> Future[Path]:
        """Save a checkpoint after ``step`` steps, and remove the oldest ones of this run.

        Collective: every rank of the mesh must call it.

        Args:
            step: the number of steps, which becomes one of the extra values.
            model: as for :func:`namedmesh.training.save`.
            optimizer: as for :func:`namedmesh.training.save`.
            data: as for :func:`namedmesh.training.save`.
            **extra: as for :func:`namedmesh.training.save`.

        Returns:
            A future with the path, which is done already unless ``async_`` is set.

        Raises:
            CheckpointError: on every rank: as for :func:`namedmesh.training.save`; the directory
                has another run; or another job saves there.
        """
        self._ranks.begin("save")
        self._run = self._run_on_rank0(self._prepare_directory)
        path = self.directory / f"step-{step:06}"
        how: dict[str, Any] = {"async_": self.async_, "run": self._run, "on_finish": self._remove_older}
        return _save(path, self.mesh, (model, optimizer, data), {"step": step} | extra, **how)

    def _run_on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0, and broadcast its result. Collective."""
        return self._ranks.run_on_rank0(f"{self.directory} could not be read", function)

    def _list_runs(self) -> list[tuple[Path, str]]:
        """Return path and run of each checkpoint that belongs to a run, the oldest first."""
        entries = files.list_checkpoints(self.directory)
        return [(entry.path, entry.run) for entry in entries if entry.run]

    def _check_run(self) -> str:
        """Return the identifier of this run, on rank 0; a new one in an empty directory.

        Raises:
            CheckpointError: the directory has checkpoints, and none of this run.
        """
        runs = self._list_runs()
        if runs and self._run not in {run for _, run in runs}:
            last = runs[-1][0]
            is_numbered = any(_NAME.fullmatch(path.name) for path, _ in runs)
            # Without a path, resume_or_start() only finds the names that save() gives.
            call = "resume_or_start()" if is_numbered else f"resume_or_start(..., resume={str(last)!r})"
            problem = f"{self.directory} has another run, up to {last.name}; resume it with {call}"
            raise CheckpointError(f"{problem}, or give this run a directory of its own")
        return self._run or secrets.token_hex(8)

    def _prepare_directory(self) -> str:
        """Lock the directory, remove leftovers, and return the run's identifier, on rank 0."""
        self._lock = Lock.acquire(self.directory)
        run = self._check_run()
        for path in self.directory.glob("step-*"):
            if not path.is_symlink():
                files.remove_leftovers(path)
        return run

    def _remove_older(self) -> None:
        """Remove the checkpoints of this run except the last ``keep``. Only rank 0 calls it."""
        runs = self._list_runs()
        paths = [path for path, run in runs if run == self._run and _NAME.fullmatch(path.name)]
        for path in paths[: -self.keep] if self.keep else []:
            # A checkpoint behind a link was moved to an archive.
            if not path.is_symlink():
                # The manifest goes first. An interrupted removal leaves no checkpoint then.
                (path / files.MANIFEST_NAME).unlink()
                shutil.rmtree(path, ignore_errors=True)
