"""A directory of the checkpoints of one run."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from namedmesh.arguments import checkpoint_place
from namedmesh.errors import CheckpointError
from namedmesh.mesh import NamedMesh
from namedmesh.training.checkpoint_folders import (
    Lock,
    find_latest,
    list_checkpoints,
    remove_checkpoint,
    remove_leftovers,
)
from namedmesh.training.checkpoint_formats import read_checkpoint
from namedmesh.training.checkpoint_ranks import CheckpointRanks, SaveFuture
from namedmesh.training.checkpoint_state import Model, Optimizers
from namedmesh.training.checkpoint_storage import CorruptedError
from namedmesh.training.checkpoints import Loaded, load_objects, save_objects

_NAME = re.compile(r"step-\d+")


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
        loaded: Loaded | None = None
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
            return [entry.path for entry in entries if _NAME.fullmatch(entry.path.name)]
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
            CheckpointError: on every rank: as for :func:`namedmesh.training.save`; the directory
                has another run; or another job saves there.
        """
        path = self.directory / f"step-{step:06}"
        self._ranks.begin("save", path)
        self._run = self._run_on_rank0(self._prepare_directory)
        how: dict[str, Any] = {"async_": self.async_, "run": self._run, "on_finish": self._remove_older}
        return save_objects(path, self.mesh, (model, optimizer, data), {"step": step} | extra, **how)

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
