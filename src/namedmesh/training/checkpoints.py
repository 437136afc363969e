"""Checkpoints that any layout can load, over torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from namedmesh._errors import CheckpointError
from namedmesh.mesh.internal import parse_checkpoint_arguments
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.training.checkpoint_folders import (
    Lock,
    find_latest,
    list_checkpoints,
    remove_checkpoint,
    remove_leftovers,
)
from namedmesh.training.checkpoint_formats import is_foreign, read_checkpoint
from namedmesh.training.checkpoint_loading import LoadResult, Matching
from namedmesh.training.checkpoint_names import Names
from namedmesh.training.checkpoint_ranks import CheckpointRanks, SaveFuture
from namedmesh.training.checkpoint_saving import Save
from namedmesh.training.checkpoint_state import Model, Optimizers, State
from namedmesh.training.checkpoint_storage import CorruptedError, Progress

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
) -> SaveFuture:
    """Write a model, its optimizers, the random states and extra values to a checkpoint.

    Collective: every rank of the mesh must call it.

    The result is a plain checkpoint of torch.distributed.checkpoint (DCP), which torch can load
    without namedmesh. DCP writes the local shards of each rank, and replaces ``.metadata`` last:
    the checkpoint is complete or absent.

    Parameters, and all DTensors of optimizers, must be equal on all ranks that have the same shard.
    The parameters are compared, all elements of them. Buffers, plain tensors of optimizers, random
    states and the state of data loaders may differ between ranks. If they do, they are saved for
    each rank. Gradients that the optimizers have not used yet are saved: those
    of a backward since the last step. A parameter with two names, or tied by :func:`tie_stages`, is
    saved once.

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
            or load waits for it, and raises its error on every rank, unless ``result()`` has. Get
            the ``result()`` before ``destroy_process_group()``.
        **extra: values that are equal on every rank, such as the number of the step or
            ``scheduler.state_dict()``: numbers, strings, tensors, and lists, tuples and dicts of
            them.

    Returns:
        A future with the path, which is done already unless ``async_`` is set.

    Raises:
        CheckpointError: on every rank, with all problems at once. An earlier checkpoint at ``path``
            is kept.
        AgreementError: some ranks did not call it within the timeout of the mesh, or with another
            path.
    """
    path, mesh = parse_checkpoint_arguments(path, mesh, "save")
    CheckpointRanks.from_mesh(mesh, "save").begin("save", path)
    return Save(path, mesh, (model, optimizer, data), extra).start(async_=async_)


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
) -> LoadResult:
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

    A rank first checks all of every saved shard that overlaps with its own. In another layout,
    these may be several times the bytes that it keeps. Then it reads into the tensors of the model,
    one saved shard at a time.

    Args:
        path: a checkpoint of :func:`save`; for the weights alone, a folder that another program
            wrote with torch.distributed.checkpoint, such as torchtitan or Fabric, or one in the
            format of Hugging Face's ``save_pretrained`` (safetensors). These have no checksums. No
            code that a file names is run.
        mesh: the current mesh.
        model: as for :func:`save`. It must not be on the meta device: call
            ``model.to_empty(device=...)`` first.
        optimizer: as for :func:`save`, of the classes that were saved.
        data: as for :func:`save`.
        cast: whether tensors may have another dtype in the model than in the checkpoint.
        strict: whether the model and the checkpoint must have the same names, and the optimizers
            the same parameters. If it is False, a new layer keeps its values, and the checkpoint
            may have layers and optimizer state that are not used. A tensor of another shape is
            still an error.
        select: which parameters and buffers to load: a function of the name, the same on every
            rank, such as ``lambda name: not name.startswith("head.")``. Everything else keeps its
            values, and may have other shapes, or be in the model or the checkpoint only.

    Returns:
        The extra values, as a dict with more attributes, as from ``load_state_dict()``:
        ``missing_keys`` (names in the model that were not loaded), ``unexpected_keys`` (names that
        only the checkpoint has) and ``unused_optimizer_keys``. The optimizer keeps the state of
        parameters that were not loaded. Gradients stay as they are, unless the checkpoint has them.

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
    path, mesh = parse_checkpoint_arguments(path, mesh, "load")
    CheckpointRanks.from_mesh(mesh, "load").begin("load", path)
    objects = (model, optimizer, data)
    return load_objects(path, mesh, objects, cast=cast, strict=strict, select=select)[0]


def load_objects(
    path: Path, mesh: NamedMesh | None, objects: tuple[Any, ...], **options: Any
) -> tuple[LoadResult, str | None]:
    """Load a checkpoint, and return its extra values and its run.

    Collective: every rank of the mesh must call it, after :meth:`CheckpointRanks.begin`.

    Args:
        path: as for :func:`load`.
        mesh: as for :func:`load`.
        objects: the arguments of :class:`State` after the mesh: model, optimizers and data loaders.
        **options: the options of :class:`Matching`.
    """
    ranks = CheckpointRanks.from_mesh(mesh, "load")
    problem = f"the checkpoint {path} could not be read"
    state = State(mesh, *objects)
    here: Names = ranks.run_on_all_ranks(problem, state.collect, Names.merge)
    checkpoint = ranks.run_on_rank0(problem, lambda: read_checkpoint(path, here.model.keys()))
    matching = Matching(state, here, checkpoint, **options)
    progress = Progress(f"loading {path}", is_shown=ranks.rank == 0)
    ranks.run_on_all_ranks(problem, matching.find_problems, matching.raise_problems)
    ranks.run_on_all_ranks(problem, lambda: matching.check(progress))
    # Nothing has changed until here. An error after it may leave some values loaded.
    ranks.run_on_all_ranks(problem, matching.fill)
    progress.end()
    return matching.loaded, checkpoint.run


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
        CheckpointError: ``keep`` is no integer of at least 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mesh: NamedMesh | None,
        *,
        keep: int | None = 3,
        async_: bool = False,
    ) -> None:
        directory, mesh = parse_checkpoint_arguments(directory, mesh, "CheckpointManager")
        if keep is not None and not (isinstance(keep, int) and keep >= 1):
            raise CheckpointError(f"keep is {keep!r}; it must be at least 1, or None to keep all checkpoints")
        self.directory: Path = Path(directory)
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
        return find_latest(self.directory)

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
        self._ranks.begin("resume_or_start", self.directory)
        # All ranks try the same checkpoints, and load() raises the same error on every rank.
        loaded: LoadResult | None = None
        run: str | None = None
        candidates = self._run_on_rank0(partial(self._find_candidates, resume))
        for path in candidates:
            try:
                loaded, run = load_objects(path, self.mesh, (model, optimizer, data), cast=cast)
                break
            except CorruptedError as error:
                if resume is not True:
                    raise
                if self._ranks.rank == 0:
                    warnings.warn(f"skipped: {error}", stacklevel=2)
        if candidates and loaded is None:
            problem = f"no checkpoint in {self.directory} is complete"
            raise CheckpointError(f"{problem}; start in another directory")
        self._run = run or ""
        self._run = self._run_on_rank0(self._check_run)
        return {"step": 0} if loaded is None else dict(loaded)

    def _find_candidates(self, resume: bool | str | os.PathLike[str]) -> list[Path]:
        """Lock the directory, and return the checkpoints to try, on rank 0, the latest first."""
        self._lock = Lock.acquire(self.directory)
        if resume is False:
            return []
        # Only the names that save() gives: a copy such as "best" may be newer.
        if resume is True:
            entries = reversed(list_checkpoints(self.directory))
            found = [entry.path for entry in entries if _NAME.fullmatch(entry.path.name)]
            for path in self.directory.glob("step-*"):
                # To start over would look like a run that has lost its checkpoints.
                if not found and is_foreign(path):
                    raise CheckpointError(
                        f"{path} is a checkpoint of another program, or of namedmesh 0.3 or before; "
                        "load it with training.load, convert one of 0.3 with "
                        "examples/migrate/checkpoints_0_3.py, or give this run its own directory"
                    )
            return found
        if "step" not in read_checkpoint(Path(resume), ()).extra:
            raise CheckpointError(f"{resume} has no step to resume from; load it with training.load")
        return [Path(resume)]

    def save(
        self, step: int, model: Model, optimizer: Optimizers = None, *, data: object = None, **extra: Any
    ) -> SaveFuture:
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
            CheckpointError: on every rank: as for :func:`namedmesh.training.save`; ``step`` is no
                number of steps; the directory has another run; or another job saves there.
        """
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step is {step!r}; it must be the number of steps, 0 or more")
        path = self.directory / f"step-{step:06}"
        self._ranks.begin("save", path)
        self._run = self._run_on_rank0(self._prepare_directory)
        objects = (model, optimizer, data)
        how: dict[str, Any] = {"run": self._run, "on_finish": self._remove_older}
        return Save(path, self.mesh, objects, {"step": step} | extra, **how).start(async_=self.async_)

    def _run_on_rank0(self, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0, and broadcast its result. Collective."""
        return self._ranks.run_on_rank0(f"{self.directory} could not be read", function)

    def _list_runs(self) -> list[tuple[Path, str]]:
        """Return path and run of each checkpoint that belongs to a run, the oldest first."""
        entries = list_checkpoints(self.directory)
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
            remove_leftovers(path)
        return run

    def _remove_older(self) -> None:
        """Remove the checkpoints of this run except the last ``keep``. Only rank 0 calls it."""
        paths = [path for path, run in self._list_runs() if run == self._run and _NAME.fullmatch(path.name)]
        for path in paths[: -self.keep] if self.keep else []:
            remove_checkpoint(path)
