"""Checkpoints that any layout reads, over torch.distributed.checkpoint, and a directory of them as one run."""

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
from namedmesh.training.checkpoint_files import DamagedError, Ranks
from namedmesh.training.checkpoint_loading import LoadPlanner
from namedmesh.training.checkpoint_locks import Lock
from namedmesh.training.checkpoint_plans import SavePlanner, joined_aliases
from namedmesh.training.checkpoint_state import Model, Names, Optimizers, State, plain
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
    """Write a model, its optimizers, the random states and any values of yours; every rank of the mesh calls this.

    DCP writes what each rank has to a new directory in ``path``; the file ``namedmesh.pt``, which names it, is put in its place last.
    Parameters have to be the same on all ranks that have the same shard of them, and so does every
    DTensor that an optimizer keeps. Other values may differ, and are saved for each rank: buffers, plain
    tensors of optimizers, random states, the place in the data. A parameter with two names, or tied by
    :func:`tie_stages`, is one weight.

    Args:
        path: a directory of the checkpoint's own, on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        model: what this rank has, or a list of it (several stages of a pipeline). Plain tensors with Megatron's marks are
            saved as the whole tensors that they are shards of, over ``tp`` (experts: ``etp``).
        optimizer: the model's, stepped or not, or a list.
        data: what knows the place in the data, or a list of such; anything with ``state_dict()`` and ``load_state_dict()``.
        async_: write in the background, once the tensors are copied to the CPU. Copies from an
            accelerator go to pinned memory, which is kept for the next save. The next save or load
            waits for it, and raises its error on every rank. Get the ``result()`` before
            ``destroy_process_group()``.
        **extra: values that are the same on every rank, such as the number of the step or ``scheduler.state_dict()``:
            numbers, texts, tensors, and lists, tuples and dicts of them.

    Returns:
        A future, done already unless ``async_``; its ``result()`` is the path.

    Raises:
        CheckpointError: on every rank, with all problems at once; what was there before is kept.
    """
    path, mesh = checkpoint_place(path, mesh, "save")
    return _save(Path(path), mesh, (model, optimizer, data), extra, async_=async_)


def _save(
    path: Path,
    mesh: NamedMesh | None,
    saved: tuple[Any, ...],
    extra: dict[str, Any],
    *,
    async_: bool,
    run: str | None = None,
    finished: Callable[[], None] = lambda: None,
) -> Future[Path]:
    ranks = Ranks.of(mesh)
    ranks.finish()
    background = async_ and mesh is not None
    state = State(mesh, *saved)

    def collect() -> Names:
        names = state.collect()
        state.extra = {key: plain(each, f"the extra value {key}") for key, each in extra.items()}
        return names

    def prepare() -> None:
        state.reduce_partial()
        if background:
            state.copy(ranks.pinned)

    what = f"the checkpoint {path} could not be written"
    aliases = joined_aliases(ranks.from_all(what, collect))
    ranks.from_all(what, prepare)
    name = ranks.from_first(what, partial(files.new_directory, path))
    layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
    writer = files.Writer(path, {"data": name, "layout": layout, "run": run}, finished, on_cpu=background)
    # A new thread begins with the first accelerator of the host, and would take memory there.
    device = None
    if mesh is not None and mesh.device.type != "cpu" and background:
        device = torch.accelerator.current_device_index()

    def write() -> Path:
        try:
            if device is not None:
                torch.accelerator.set_device_index(device)
            with ranks.told(what):
                planner = SavePlanner(state, aliases, writer)
                dcp.save({}, storage_writer=writer, planner=planner, **ranks.arguments)
        except BaseException:  # what is interrupted, too
            # The checkpoint may be in its place: where a peer dies after finish(), only DCP's last broadcast fails.
            if ranks.rank == 0:
                files.clear(path)
            raise
        return path

    if background:
        thread = ThreadPoolExecutor(1)
        ranks.saving = future = thread.submit(write)
        thread.shutdown(wait=False)
    else:
        future = Future()
        future.set_result(write())
    return future


class Loaded(dict[str, Any]):
    """The extra values of a checkpoint, and the names that were not loaded."""

    missing_keys: list[str]
    """Parameters and buffers of the model, on any rank, that keep their values."""
    unexpected_keys: list[str]
    """Parameters and buffers that only the checkpoint has."""


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
    - The place in the data is restored if the number of data ranks is the same. Otherwise it raises
      CheckpointError, because a sampler counts the samples of one rank. A position that counts the
      samples of all ranks can be an extra value.
    - A tensor that an optimizer keeps for the shard of one rank is restored if a rank has that
      shard now. Otherwise it raises CheckpointError.

    Until everything is read, a rank has its shards in memory twice. It reads all of every saved
    shard that overlaps with its own, to verify the checksum. In another layout, these may be
    several times the bytes that it keeps.

    Args:
        path: what :func:`save` wrote, or a directory in the format of Hugging Face's ``save_pretrained`` (safetensors), which
            holds no optimizer. No code that a file names is run.
        mesh: the current mesh.
        model: as for :func:`save`. It must not be on the meta device: call
            ``model.to_empty(device=...)`` first.
        optimizer: the same, of the kinds that were saved.
        data: the same.
        cast: whether tensors may have another type in the model than in the checkpoint.
        strict: whether the model and the checkpoint must have the same names. If it is False, a new
            layer keeps its values, and a layer that the model no longer has is skipped. A tensor of
            another shape is still an error.
        select: which parameters and buffers to load: a function of the name, the same on every
            rank, such as ``lambda name: not name.startswith("head.")``. Everything else keeps its
            values, and may have other shapes, or be in the model or the checkpoint only.

    Returns:
        The extra values, as a dict with two more attributes, as from ``load_state_dict()``.
        ``missing_keys`` are the names in the model that were not loaded, ``unexpected_keys`` those
        that only the checkpoint has. The optimizer keeps the state of parameters that were not
        loaded.

    Raises:
        CheckpointError: on every rank, with all problems at once, before anything is changed: a file is missing or not as it was
            written, or something does not fit.

    Example:
        A pretrained backbone under a new head::

            backbone = lambda name: not name.startswith("head.")
            loaded = training.load("pretrained", mesh, model, select=backbone)
            print(loaded.missing_keys)  # ["head.weight", "head.bias"]
    """
    path, mesh = checkpoint_place(path, mesh, "load")
    filled = (model, optimizer, data)
    loaded, _ = _load(Path(path), mesh, filled, cast=cast, strict=strict, select=select)
    return loaded


def _about(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, or of a folder of Hugging Face, with DCP's metadata."""
    pretrained = None if files.is_whole(path) else read_pretrained(path)
    if pretrained is not None:
        return pretrained
    about = files.read_about(path)
    return about | {"tensors": files.read_metadata(path, about)}


def _load(
    path: Path, mesh: NamedMesh | None, filled: tuple[Any, ...], **how: Any
) -> tuple[Loaded, dict[str, Any]]:
    ranks = Ranks.of(mesh)
    ranks.finish()
    what = f"the checkpoint {path} could not be read"
    about: dict[str, Any] = ranks.from_first(what, partial(_about, path))

    state = State(mesh, *filled)

    def collect() -> Names:
        if not files.appears(path / (about["data"] or "")):
            raise CheckpointError(f"{path} is not seen here, but on rank 0; put it where all hosts see it")
        return state.collect()

    aliases = joined_aliases(ranks.from_all(what, collect))
    planner = LoadPlanner(state, aliases, about, path, **how)
    reader = files.Reader(path, about) if about["data"] else PretrainedReader(path, about)
    with ranks.told(what):
        dcp.load({}, storage_reader=reader, planner=planner, **ranks.arguments)
    ranks.from_all(what, planner.refuse_untied)
    ranks.from_all(what, planner.put)
    loaded = Loaded(about["extra"])
    loaded.missing_keys = planner.missing_keys
    loaded.unexpected_keys = planner.unexpected_keys
    return loaded, about


class CheckpointManager:
    """A directory of checkpoints of one run, ``step-000100`` and so on; every rank of the mesh makes one.

    A run begins with the first save after a fresh start, and goes on with every checkpoint that is
    loaded here. Nothing of another run, or of another name (``best``), or behind a symbolic link, is
    ever removed; leftovers of interrupted saves are, at the next save. The end of a ``with`` block
    waits for what is written, and raises its error.

    From ``resume_or_start()`` or the first save to ``close()``, no other job can save in the
    directory: it gets a CheckpointError that names this host and process. The lock of a job that was
    killed does not stop the next one.

    Args:
        directory: on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        keep: how many checkpoints of the run stay, those that were finished last; None for all.
        async_: as for :func:`save`.
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
        self.directory, self.mesh, self.keep, self.async_ = Path(directory), mesh, keep, async_
        self._ranks = Ranks.of(mesh)
        self._run = ""
        self._lock: Lock | None = None  # of the first rank

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # or the ranks that failed would be waited for
            self.close()
        self._lock = None

    def close(self) -> None:
        """Wait for the save in the background, and raise its error; then another job may save here."""
        try:
            self._ranks.finish()
        finally:
            self._lock = None

    def latest(self) -> Path | None:
        """Return the checkpoint that was finished last, after what is written now; None if there is none.

        After a run went back to step 800, the first one that it saves is the last, and not an older one of step 1000. One of which
        files are missing or cut off is left out, with a warning; :func:`load` checks what is in them.
        """
        if self._ranks.saving is not None:
            self._ranks.saving.exception()  # which the next save or load raises, on every rank
        return files.latest(self.directory)

    def resume_or_start(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        data: object = None,
        resume: bool | str | os.PathLike[str] = True,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Go on from the last checkpoint, or begin; every rank calls this, with the arguments of :func:`load`.

        ``resume`` is True for the checkpoint that was finished last, or to begin if there is none, as a job that is queued again
        wants it; one that is damaged is left out, with a warning. False begins. A path goes on from there: a checkpoint of this
        directory, or of another one, whose run then goes on here, or Hugging Face's, from which a run begins. The first rank's
        counts.

        Returns:
            The extra values of the checkpoint, and the number of its step; ``{"step": 0}`` at the beginning.
        """
        self._ranks.finish()
        about: dict[str, Any] = {}
        candidates = self._from_first(partial(self._candidates, resume))
        for path in candidates:
            try:
                _, about = _load(path, self.mesh, (model, optimizer, data), cast=cast)
                break
            except DamagedError as error:
                if resume is not True:
                    raise
                if self._ranks.rank == 0:
                    warnings.warn(f"left out: {error}", stacklevel=2)
        if candidates and not about:
            raise CheckpointError(f"no checkpoint in {self.directory} is whole; begin in another directory")
        self._run = about.get("run") or ""
        self._run = self._from_first(self._own_run)
        return dict(about.get("extra", {"step": 0}))

    def _candidates(self, resume: bool | str | os.PathLike[str]) -> list[Path]:
        """Return the checkpoints to load until one is whole; the first rank calls this."""
        self._lock = Lock.of(self.directory)
        if resume is False:
            return []
        if resume is True:
            known = reversed(files.in_order(self.directory))
            return [path for path, _ in known if _NAME.fullmatch(path.name)]
        if "step" not in _about(Path(resume))["extra"]:
            raise CheckpointError(f"{resume} has no step to go on from; load it with training.load")
        return [Path(resume)]

    def save(
        self, step: int, model: Model, optimizer: Optimizers = None, *, data: object = None, **extra: Any
    ) -> Future[Path]:
        """Save after ``step`` steps, which is one of the extra values; every rank calls this, with the arguments of :func:`save`.

        A directory that holds another run is refused.
        """
        self._ranks.finish()
        self._run = self._from_first(self._ready)
        how: dict[str, Any] = {"async_": self.async_, "run": self._run, "finished": self._remove_older}
        saved, values = (model, optimizer, data), {"step": step} | extra
        return _save(self.directory / f"step-{step:06}", self.mesh, saved, values, **how)

    def _from_first(self, function: Callable[[], Any]) -> Any:
        return self._ranks.from_first(f"{self.directory} could not be read", function)

    def _runs(self) -> list[tuple[Path, str]]:
        """Return the checkpoints of runs, as they were finished, and the run of each."""
        known = files.in_order(self.directory)
        return [(path, about["run"]) for path, about in known if about.get("run")]

    def _own_run(self) -> str:
        """Return what the run is called; refuse a directory that holds another one."""
        runs = self._runs()
        if runs and self._run not in {run for _, run in runs}:
            last = runs[-1][0]
            numbered = [path for path, _ in runs if _NAME.fullmatch(path.name)]
            # Without a path, resume_or_start() looks for the names that save() gives.
            call = "resume_or_start()" if numbered else f"resume_or_start(..., resume={str(last)!r})"
            remedy = f"go on with it by {call}, or give this run a directory of its own"
            raise CheckpointError(f"{self.directory} holds another run, up to {last.name}; {remedy}")
        return self._run or secrets.token_hex(8)

    def _ready(self) -> str:
        """Remove what interrupted saves have left, and return what the run is called."""
        self._lock = Lock.of(self.directory)
        run = self._own_run()
        for path in self.directory.glob("step-*"):
            if not path.is_symlink():
                files.clear(path)
        return run

    def _remove_older(self) -> None:
        own = [path for path, run in self._runs() if run == self._run and _NAME.fullmatch(path.name)]
        older = own[: -self.keep] if self.keep else []
        for path in older:
            if path.is_symlink():
                continue  # somebody has moved the checkpoint to an archive
            # First, so that an interruption leaves nothing that is taken for a checkpoint.
            (path / files.ABOUT).unlink()
            shutil.rmtree(path, ignore_errors=True)
