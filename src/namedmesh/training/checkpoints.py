"""Checkpoints that any layout reads, over torch.distributed.checkpoint, and a directory of them as one run."""

from __future__ import annotations

import re
import secrets
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from namedmesh.errors import CheckpointError, listing, ranks_in_words
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_load import load_into, opened
from namedmesh.training.checkpoint_ranks import CheckpointGroup, Saving
from namedmesh.training.checkpoint_state import State, plain
from namedmesh.training.comparison import contradictions, differing, digest, table_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_state import Model, Optimizers


@dataclass
class Lineage:
    """Which run the checkpoints of this process belong to, and which of them the next one goes on from."""

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    parent: str | None = None


_lineage = Lineage()
"""That of what this process saves and loads without a directory of checkpoints."""


def save(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    async_: bool = False,
    **extra: Any,
) -> Future[Path] | None:
    """Write a model, its optimizers, the random states and any values of yours; every rank of the mesh calls this.

    DCP writes the tensors, every rank what it holds, to a directory of a new name in ``path``; the file ``namedmesh.pt``,
    which names it, is put in its place last. Killed at any moment, :func:`load` finds the last one that was finished. For a
    run that saves again and again see :class:`Checkpoints`.

    What is saved is what ``state_dict()`` returns, of the model and of the optimizers. Parameters have to be the same on all
    ranks that have the same part of them. Everything else that is no DTensor (buffers, extra states, what an optimizer keeps
    for the shard of a rank) is saved once where it is the same on all ranks, and otherwise for each rank, with one warning
    for buffers; :func:`load` says who gets what.

    Prevents: stages of a pipeline, or shards without marks, that overwrite each other under one name; an optimizer that never
    stepped and has counted a step after the checkpoint; replicas that have come apart; a directory that is half of this
    checkpoint and half of the last, or that lies on several hosts, a part on each.

    Args:
        path: a directory of the checkpoint's own, on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        model: what this rank holds, or a list of it (several stages of a pipeline). Plain tensors that carry
            Megatron's marks are saved as the whole tensors that they are shards of, over ``tp`` (experts: ``etp``).
        optimizer: the optimizer of the model's parameters, stepped or not, or a list of them.
        data: what knows the place in the data, such as torchdata's ``StatefulDataLoader``, or a list of such; anything with
            ``state_dict()`` and ``load_state_dict()``.
        async_: return once the tensors are copied, and write them in the background. The next :func:`save` or :func:`load`
            and ``mesh.close()`` wait for it, and raise what went wrong on every rank, as does the end of the interpreter.
            Close the mesh before ``destroy_process_group()``. Without a mesh it is written at once.
        **extra: values that are the same on every rank, such as the number of the step or ``scheduler.state_dict()``:
            numbers, texts, tensors, and lists, tuples and dicts of them.

    Returns:
        With ``async_`` a future; its ``result()`` is the path, once the checkpoint is in its place.

    Raises:
        CheckpointError: a name stands for different tensors, ranks give different extra values, something is no plain
            data, or ``path`` is a directory that holds something else; all problems at once, on every rank, before anything
            is written. Or it cannot be written, such as for want of permission or room, or because not all ranks see the
            directory, or the one before could not be: what was there is kept.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     training.save(f"{directory}/last", None, model, optimizer, step=3)
        ...     training.load(f"{directory}/last", None, model, optimizer)
        {'step': 3}
    """
    collect = partial(State, mesh, model, optimizer, data)
    saved = _save(Path(path), mesh, collect, extra, _lineage, async_=async_)
    return saved if async_ else None


def _save(
    path: Path,
    mesh: NamedMesh | None,
    collect: Callable[[], State],
    extra: Mapping[str, Any],
    lineage: Lineage,
    *,
    async_: bool,
    after: Callable[[], None] = lambda: None,
) -> Future[Path]:
    """Save what ``collect`` returns as a part of a run; ``after`` is called on the first rank, once it is in its place."""
    ranks = CheckpointGroup.of(mesh)

    def local_part() -> tuple[State, dict[str, Any], dict[str, Any], Tensor]:
        if names := extra.keys() & {"keep", "async_", "resume", "cast"}:
            raise CheckpointError(
                f"{listing(sorted(names))}: an option of another call, and no name for an extra value; give it to Checkpoints(), "
                "resume_or_start() or load()"
            )
        ranks.finish()
        state = collect()
        copies = {key: plain(each, f"the extra value {key}") for key, each in extra.items()}
        return state, state.objects(), copies, table_of(state.compared())

    state, objects, copies, table = ranks.on_all(local_part)
    wrong, own = differing(mesh, state.compared(), table)
    checked = {"contradictions": wrong, "extra": digest(extra), "per_rank": own}
    with files.refuse_io(path):
        made, per_rank = ranks.on_first(partial(_checked, path, ranks, extra), checked)
    values = {}
    for name, value in (objects | state.tensors()).items():
        values[f"rank.{ranks.rank}.{name}" if name in own else name] = value
    about = {
        "run": lineage.run,
        "id": made,
        "parent": lineage.parent,
        "layout": None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset],
        "extra": copies,
        "per_rank": per_rank,
    }

    def write() -> Path:
        _write(path, ranks, values, about, after)
        lineage.parent = made
        return path

    if async_ and mesh is not None:
        values = ranks.on_all(partial(_copied, values))
        return ranks.begin(write)
    done = Saving()
    done.set_result(write())
    return done


def _checked(
    path: Path, ranks: CheckpointGroup, extra: Mapping[str, Any], by_rank: Sequence[dict[str, Any]]
) -> tuple[str, dict[str, dict[int, int]]]:
    """Make room on the first rank if all ranks agree; returns its name, and which ranks have what of their own."""
    problems = contradictions([one["contradictions"] for one in by_rank])
    others = [rank for rank, one in enumerate(by_rank) if one["extra"] != by_rank[0]["extra"]]
    if others:
        problems.append(
            f"the extra values ({listing(extra)}) are not on {ranks_in_words(others)} what they are on rank 0; give "
            "every rank the same, such as a list of what each of them has"
        )
    if problems:
        raise CheckpointError(*problems)
    copies: dict[str, dict[int, int]] = {}
    for rank, one in enumerate(by_rank):
        for name, value in one["per_rank"].items():
            copies.setdefault(name, {})[rank] = value
    models = {name.removeprefix("model.") for name in copies if name.startswith("model.")}
    if new := sorted(models - ranks.warned):
        ranks.warned.update(new)
        warnings.warn(
            f"{listing(new)}: not the same on all ranks, so a checkpoint has the value of each rank; another layout loads their "
            "mean, of integers and other objects the first",
            stacklevel=2,
        )
    return files.make_room(path), copies


def _write(
    path: Path,
    ranks: CheckpointGroup,
    values: dict[str, Any],
    about: dict[str, Any],
    after: Callable[[], None],
) -> None:
    """Write the values and put the checkpoint in its place; what cannot be finished is removed."""
    data = files.data_of(path, about)
    # Without torch's caching of plans: it has one cache for all that a process saves, which a save that fails leaves wrong.
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def finish(by_rank: Sequence[files.Files]) -> None:
        order = max((other["order"] for _, other in files.in_order(path.parent) if "run" in other), default=0)
        about["order"] = order + 1
        about["files"] = {name: each for one in by_rank for name, each in one.items()}
        files.finish(path, about)
        after()

    try:
        ranks.on_all(partial(files.require_room, path, about))
        with files.refuse_io(path):
            # Filters of warnings belong to all threads.
            with files.without_warnings() if ranks.group is None else nullcontext():
                writer = dcp.FileSystemWriter(data)
                dcp.save(values, storage_writer=writer, planner=planner, **ranks.arguments)
            written = ranks.on_all(partial(files.written_by, ranks.rank, data))
            ranks.on_first(finish, written)
    except Exception:
        if ranks.rank == 0:
            files.clear(path)
        raise


@torch.no_grad()
def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of tensors on the CPU, which do not change while they are written."""
    return {
        name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


def load(
    path: str | os.PathLike[str],
    mesh: NamedMesh | None,
    model: Model,
    optimizer: Optimizers = None,
    *,
    data: object = None,
    cast: bool = False,
) -> dict[str, Any]:
    """Fill a model and its optimizers from a checkpoint of any layout; every rank of the mesh calls this.

    What was saved for each rank goes to the rank that stands for it: the one with its coordinates on the axes that have the
    same size now. Where several ranks had other values, a buffer of floating point gets their mean, and any other the first;
    random generators stay as the job seeded them; what an optimizer keeps for the shard of a rank, and the place in the data,
    are refused.

    Prevents: a part of the model that keeps its first weights because the checkpoint has no such name; an optimizer that starts
    again, or has counted a step that it never made; a model that was filled from half of a file.

    Args:
        path: a checkpoint that :func:`save` wrote, or a directory in the format of Hugging Face's
            ``save_pretrained`` (safetensors), which holds no optimizer. No code that a file names is run.
        mesh: the mesh of now; None in a process without process groups.
        model: what this rank holds, or a list of it.
        optimizer: the optimizer of the model's parameters, or a list of them, of the kinds that were saved.
        data: as for :func:`save`.
        cast: whether tensors may have another type in the model than in the checkpoint.

    Returns:
        The extra values.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing, cut off or not as it was written; a name is missing
            in it or in the model, or has another shape or type; its optimizer is of another kind or does not fit. All
            problems at once, on every rank, before anything is changed. Where reading itself fails on the way, as a disk
            does, it says which tensors of the model have changed on this rank.
    """
    ranks = CheckpointGroup.of(mesh)
    ranks.on_all(ranks.finish)
    about = opened(Path(path), ranks)
    load_into(partial(State, mesh, model, optimizer, data), Path(path), about, ranks, cast=cast)
    _lineage.run, _lineage.parent = about["run"], about["id"]
    extra: dict[str, Any] = about["extra"]
    return extra


_NAME = re.compile(r"step-\d+")


class Checkpoints:
    """A directory of checkpoints of one run, ``step-000100`` and so on; every rank of the mesh makes one.

    Prevents: a run that starts afresh where another one saved, and ends with files of both; one that went back to an older
    checkpoint, is started again, and goes on from what it had abandoned; a disk that is full of what interrupted saves left.

    A run begins with the first save after a fresh start, and goes on with every checkpoint that is loaded here. Nothing of
    another run, or of another name (``best``), is ever removed. Leftovers of interrupted saves and removals in the directory are
    removed at the next save.

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
                files.finish_removals(self.directory)
                for each in self.directory.glob("step-*"):
                    if _NAME.fullmatch(each.name):
                        files.clear(each)
            return State(self.mesh, model, optimizer, data)

        path, values = self.directory / f"step-{step:06}", {"step": step} | extra
        how: dict[str, Any] = {"async_": self.async_, "after": self._remove_older}
        return _save(path, self.mesh, collect, values, self._lineage, **how)

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

    def _remove_older(self) -> None:
        if self.keep is not None:
            found = files.in_order(self.directory)
            run = [path for path, about in found if about.get("run") == self._lineage.run]
            mine = [path for path in run if _NAME.fullmatch(path.name)]
            for path in mine[: -self.keep]:
                files.remove(path)


def _refuse_other_choices(by_rank: Sequence[str]) -> None:
    """Refuse to go on where ranks would load other checkpoints."""
    others = [rank for rank, choice in enumerate(by_rank) if choice != by_rank[0]]
    if others:
        raise CheckpointError(
            f"resume is {by_rank[0]} on rank 0, and {by_rank[others[0]]} on {ranks_in_words(others)}; give all ranks the same"
        )
