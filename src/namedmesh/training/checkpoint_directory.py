"""The checkpoints of one run in a directory: saved, kept, found again and continued."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namedmesh.errors import CheckpointError, ranks_in_words
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_load import load_into, opened
from namedmesh.training.checkpoint_ranks import CheckpointGroup
from namedmesh.training.checkpoint_state import State
from namedmesh.training.checkpoints import Lineage, save_as

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from concurrent.futures import Future

    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_state import Model, Optimizers

_NAME = re.compile(r"step-\d+")


class Checkpoints:
    """A directory of checkpoints of one run, ``step-000100`` and so on; every rank of the mesh makes one.

    Prevents: a run that starts afresh where another one saved, and ends with files of both; one that went back to an older
    checkpoint, is started again, and goes on from what it had abandoned; a disk that is full of what interrupted saves left.

    A run begins with the first save after a fresh start, and goes on with every checkpoint that is loaded here. Nothing of
    another run is ever removed. Leftovers of interrupted saves and removals in the directory are removed at the next save.

    Args:
        directory: on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        keep: how many checkpoints of the run stay, those that were finished last; None for all.
        async_: as for :func:`save`.

    Raises:
        CheckpointError: ``keep`` is below 1.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     checkpoints = training.Checkpoints(directory, None, keep=2)
        ...     start = checkpoints.resume_or_start(model)["step"]
        ...     for step in range(start, 4):
        ...         _ = checkpoints.save(step + 1, model)
        ...     checkpoints.close()
        ...     start, checkpoints.latest().name, training.Checkpoints(directory, None).resume_or_start(model)
        (0, 'step-000004', {'step': 4})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mesh: NamedMesh | None,
        *,
        keep: int | None = 3,
        async_: bool = False,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep is {keep}; it must be at least 1, or None to keep all checkpoints")
        self.directory, self.mesh, self.keep, self.async_ = Path(directory), mesh, keep, async_
        self._lineage = Lineage()

    def latest(self) -> Path | None:
        """Return the checkpoint that was finished last, as :func:`latest` does, after what is written now."""
        CheckpointGroup.of(self.mesh).wait()
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
        """Go on from the last checkpoint, or begin; every rank calls this.

        Args:
            model: as for :func:`load`, as are all arguments.
            optimizer: the same.
            data: the same.
            resume: True to go on from the checkpoint that was finished last, or to begin if there is none, as a job that is
                queued again wants it; one that is damaged is left out, with a warning. False to begin. A path to go on
                from there: a checkpoint of this directory, or of another one, whose run then goes on here.
            cast: the same.

        Returns:
            The extra values of the checkpoint, and the number of its step; ``{"step": 0}`` at the beginning.

        Raises:
            CheckpointError: the run is to begin, and the directory holds another one; no checkpoint in it is sound; ranks give
                another ``resume``; or as for :func:`load`.
        """
        ranks = CheckpointGroup.of(self.mesh)
        ranks.on_all(ranks.finish)
        ranks.on_first(_refuse_other_choices, str(resume))
        collect = partial(State, self.mesh, model, optimizer, data)
        found = None
        if resume is True:
            found = self._last_sound(ranks)
        elif resume is not False:
            found = Path(resume), opened(Path(resume), ranks)
        self._lineage, extra = Lineage(), {"step": 0}
        if found is not None:
            path, about = found
            load_into(collect, path, about, ranks, cast=cast)
            self._lineage = Lineage(about["run"], about["id"])
            extra |= about["extra"]
        ranks.on_first(lambda _: self._refuse_other_run())
        return extra

    def save(
        self, step: int, model: Model, optimizer: Optimizers = None, *, data: object = None, **extra: Any
    ) -> Future[Path]:
        """Save after a step; every rank calls this.

        Args:
            step: how many steps are done; it is one of the extra values.
            model: as for :func:`namedmesh.training.save`, as are all others.
            optimizer: the same.
            data: the same.
            **extra: the same.

        Returns:
            A future; its ``result()`` is the path. Done already, unless ``async_``.

        Raises:
            CheckpointError: the directory holds another run; or as for :func:`namedmesh.training.save`.
        """
        ranks = CheckpointGroup.of(self.mesh)

        def collect() -> State:
            if ranks.rank == 0:
                self._refuse_other_run()
                self._clear()
            return State(self.mesh, model, optimizer, data)

        path = self.directory / f"step-{step:06}"
        values = {"step": step} | extra
        return save_as(
            path, self.mesh, collect, values, self._lineage, async_=self.async_, after=self._remove_older
        )

    def close(self) -> None:
        """Wait for what is written, and raise its error if it was not reported."""
        CheckpointGroup.of(self.mesh).finish()

    def _refuse_other_run(self) -> None:
        """Refuse to save in a directory of which this run has loaded nothing."""
        runs = [(about["run"], path.name) for path, about in files.in_order(self.directory) if "run" in about]
        if runs and self._lineage.run not in dict(runs):
            raise CheckpointError(
                f"{self.directory} holds another run, up to {runs[-1][1]}; go on with it by "
                "resume_or_start(..., resume=True), or give this run a directory of its own"
            )

    def _clear(self) -> None:
        """Remove what interrupted saves and removals of this run left."""
        for path in self.directory.glob("step-*"):
            if _NAME.fullmatch(path.name):
                files.clear(path)

    def _last_sound(self, ranks: CheckpointGroup) -> tuple[Path, dict[str, Any]] | None:
        """Return the checkpoint that was finished last and is as it was written; None where none was ever finished."""
        paths = ranks.on_first(lambda _: [path for path, _ in files.in_order(self.directory)])
        for path in reversed(paths):
            try:
                return path, opened(path, ranks)
            except CheckpointError as error:  # noqa: PERF203  one of a few
                if ranks.rank == 0:
                    warnings.warn(f"left out: {error}", stacklevel=3)
        if paths:
            raise CheckpointError(
                f"no checkpoint in {self.directory} is as it was written; name one to load by resume=, or begin in another directory"
            )
        return None

    def _remove_older(self, about: dict[str, Any]) -> None:
        if self.keep is None:
            return
        mine = [path for path, other in files.in_order(self.directory) if other.get("run") == about["run"]]
        for path in mine[: -self.keep]:
            files.remove(path)


def _refuse_other_choices(by_rank: Sequence[str]) -> None:
    """Refuse to go on where ranks would load other checkpoints."""
    others = [rank for rank, choice in enumerate(by_rank) if choice != by_rank[0]]
    if others:
        raise CheckpointError(
            f"resume is {by_rank[0]} on rank 0, and {by_rank[others[0]]} on {ranks_in_words(others)}; give all ranks the same"
        )
