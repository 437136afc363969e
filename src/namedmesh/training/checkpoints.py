"""Checkpoints that any layout reads, over torch.distributed.checkpoint, and a directory of them as one run."""

from __future__ import annotations

import re
import secrets
import shutil
import warnings
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp

from namedmesh.errors import CheckpointError, listing
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_plans import LoadPlanner, SavePlanner, joined_aliases, layout_of
from namedmesh.training.checkpoint_ranks import Ranks, error_of_dcp
from namedmesh.training.checkpoint_state import State, plain, shown
from namedmesh.training.comparison import alike

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from typing_extensions import Self

    from namedmesh.layout import Layout
    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_state import Model, Optimizers

_NAME = re.compile(r"step-\d+")
_OPTIONS = {"keep", "async_", "resume", "cast"}


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

    DCP writes the tensors, every rank what it has, to a new directory in ``path``; the file ``namedmesh.pt``, which names it, is put
    in its place last. Killed at any moment, :func:`load` finds the last one that was finished.

    Parameters have to be the same on all ranks that have the same part of them. What is no DTensor otherwise (buffers, extra states,
    what an optimizer keeps for a shard) is saved once where it is the same on all ranks, and else for each rank, with one warning for
    buffers. A parameter with two names, or tied by :func:`tie_stages`, is one weight.

    Prevents: stages, or shards without marks, that overwrite each other under one name; an optimizer that never stepped and has
    counted a step afterwards; replicas that have come apart; a directory that is half of this checkpoint and half of the last, or
    that lies on several hosts.

    Args:
        path: a directory of the checkpoint's own, on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        model: what this rank has, or a list of it (several stages of a pipeline). Plain tensors that carry
            Megatron's marks are saved as the whole tensors that they are shards of, over ``tp`` (experts: ``etp``).
        optimizer: the optimizer of the model's parameters, stepped or not, or a list of them.
        data: what knows the place in the data, such as torchdata's ``StatefulDataLoader``, or a list of such; anything with
            ``state_dict()`` and ``load_state_dict()``.
        async_: return once the tensors are copied, and write in the background. The next save or load waits for it, and
            raises what went wrong on every rank; get the ``result()`` before ``destroy_process_group()``.
        **extra: values that are the same on every rank, such as the number of the step or ``scheduler.state_dict()``:
            numbers, texts, tensors, and lists, tuples and dicts of them.

    Returns:
        With ``async_`` a future; its ``result()`` is the path, once the checkpoint is in its place.

    Raises:
        CheckpointError: a name stands for different tensors, ranks give different extra values, something is no plain
            data, or ``path`` holds something else; all problems at once, on every rank, before anything is written. Or it cannot
            be written, or not all ranks see the directory, or the one before could not be: what was there is kept.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(f"{directory}/last", None, model, optimizer, step=3)
        ...     load(f"{directory}/last", None, model, optimizer)
        {'step': 3}
    """
    collect = partial(State, mesh, model, optimizer, data)
    saved = _save(Path(path), mesh, collect, extra, None, async_=async_)
    return saved if async_ else None


def _save(
    path: Path,
    mesh: NamedMesh | None,
    collect: Callable[[], State],
    extra: dict[str, Any],
    run: str | None,
    *,
    async_: bool,
    finished: Callable[[], None] = lambda: None,
) -> Future[Path]:
    ranks = Ranks.of(mesh)
    ranks.finish()
    layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
    state, failed = None, None
    try:  # what fails here is told on every rank by DCP's first step
        if wrong := sorted(extra.keys() & _OPTIONS):
            raise CheckpointError(  # noqa: TRY301
                f"{listing(wrong)}: an option of another call, and no name for an extra value; give it to Checkpoints(), "
                "resume_or_start() or load()"
            )
        state = collect()
        extra = {key: plain(each, f"the extra value {key}") for key, each in extra.items()}
    except Exception as error:  # noqa: BLE001
        failed = error
    writer = files.Writer(path, {"layout": layout, "run": run}, finished)
    planner = SavePlanner(state, extra, writer, failed)
    arguments = {"storage_writer": writer, "planner": planner, **ranks.arguments}
    values = {} if state is None else state.values
    saved: Future[Path] = Future()

    def end(error: BaseException | None) -> None:
        if error is None:
            saved.set_result(path)
            return
        if writer.made:  # the checkpoint may be in its place: where a peer dies after finish(), only DCP's last broadcast fails
            files.clear(path)
        saved.set_exception(error_of_dcp(error, f"the checkpoint {path} could not be written", ranks.rank))

    if async_ and mesh is not None:
        saved.set_running_or_notify_cancel()  # nobody can cancel it, which the other ranks would not hear of
        ranks.saving = saved
        started: Any = dcp.async_save(values, **arguments)
        started.add_done_callback(lambda future: end(future.exception()))
        return saved
    try:
        with _without_warnings():
            dcp.save(values, **arguments)
    except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
        end(error)
    else:
        end(None)
    saved.result()
    return saved


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
    same size now. Where several ranks had other values, a buffer is the first one's; random generators stay as they are; what an
    optimizer keeps for the shard of a rank, and the place in the data, are refused.

    Prevents: a part of the model that keeps its first weights because the checkpoint has no such name; an optimizer that starts
    again; half of a file, or one with a changed bit; tied weights that were saved as two.

    Args:
        path: a checkpoint that :func:`save` wrote, or a directory in the format of Hugging Face's
            ``save_pretrained`` (safetensors), which holds no optimizer. No code that a file names is run.
        mesh: the mesh of now; None in a process without process groups.
        model: what this rank has, or a list of it.
        optimizer: the optimizer of the model's parameters, or a list of them, of the kinds that were saved.
        data: as for :func:`save`.
        cast: whether tensors may have another type in the model than in the checkpoint.

    Returns:
        The extra values.

    Raises:
        CheckpointError: there is no checkpoint, or a file of it is missing or not as it was written; a name is missing in it or in
            the model, or has another shape or type; its optimizer does not fit. All problems at once, on every rank, before
            anything is changed. Where reading fails on the way, it says which tensors of the model have changed on this rank.
    """
    ranks = Ranks.of(mesh)
    ranks.finish()
    return dict(_load(Path(path), ranks, partial(State, mesh, model, optimizer, data), cast=cast)["extra"])


def _about(path: Path) -> dict[str, Any]:
    if not files.is_whole(path) and any(path.glob("*.safetensors")):
        nothing: dict[str, Any] = {"options": {}, "aliases": {}, "copies": {}, "extra": {"step": 0}}
        return nothing | dict.fromkeys(("data", "layout", "run"))
    about = files.read_about(path)
    files.check_metadata(path, about)
    return about


def _load(path: Path, ranks: Ranks, collect: Callable[[], State], *, cast: bool) -> dict[str, Any]:
    """Load, and return what the checkpoint says about itself."""
    about = ranks.from_first(partial(_about, path))
    state: list[State] = []

    def names() -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not seen here, but on rank 0; put it where all hosts see it")
        state.append(collect())
        return state[0].aliases, state[0].ties

    aliases = joined_aliases(ranks.from_all(names))
    planner = LoadPlanner(state[0], aliases, about, path, cast=cast)
    try:
        with _without_warnings():
            own = files.Reader(path, about, ranks.rank, ranks.size) if about["data"] else None
            reader = own or dcp.HuggingFaceStorageReader(str(path))
            dcp.load({}, storage_reader=reader, planner=planner, **ranks.arguments)
    except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
        found = error_of_dcp(error, f"the checkpoint {path} could not be read", ranks.rank)
        changed = [shown(name) for name in sorted(planner.changed) if name.startswith("model.")]
        if changed and isinstance(found, CheckpointError):
            found = CheckpointError(
                *found.problems,
                f"{listing(changed)} of the model were read before, so it has some of the checkpoint {path} and some of what it had; load "
                "again, or another checkpoint, before it is used",
            )
        raise found from None
    first: dict[object, tuple[str, list[float]]] = {}
    problems = []
    for tied, name, numbers in chain.from_iterable(ranks.from_all(planner.put)):
        other, expected = first.setdefault(tied, (name, numbers))
        if not alike(numbers, expected):
            problems.append(
                f"{other!r} and {name!r} are tied here, and are two weights with other values in the checkpoint {path}; untie them, or "
                "load another checkpoint before the model is used"
            )
    if problems:
        raise CheckpointError(*dict.fromkeys(problems))
    return about


def checkpoint_info(path: str | os.PathLike[str]) -> tuple[Layout | None, dict[str, Any]]:
    """Return the layout that a checkpoint was saved from, and its extra values; no mesh is needed.

    Raises:
        CheckpointError: there is no finished checkpoint, or what it says about itself is damaged.
    """
    about = files.read_about(Path(path))
    return layout_of(about), about["extra"]


class Checkpoints:
    """A directory of checkpoints of one run, ``step-000100`` and so on; every rank of the mesh makes one.

    Prevents: a run that starts afresh where another one saved; one that went back to an older checkpoint, is started again, and goes
    on from what it had abandoned; a disk that is full of what interrupted saves left.

    A run begins with the first save after a fresh start, and goes on with every checkpoint that is loaded here. Nothing of
    another run, or of another name (``best``), is ever removed; leftovers of interrupted saves are, at the next save. The end of a
    ``with`` block waits for what is written, and raises its error.

    Args:
        directory: on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        keep: how many checkpoints of the run stay, those that were finished last; None for all.
        async_: as for :func:`save`.

    Raises:
        CheckpointError: ``keep`` is below 1.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with Checkpoints(directory, None, keep=2) as checkpoints:
        ...         start = checkpoints.resume_or_start(model)["step"]
        ...         for step in range(start, 4):
        ...             _ = checkpoints.save(step + 1, model)
        ...     start, checkpoints.latest().name, Checkpoints(directory, None).resume_or_start(model)
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
        self._run = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # or the ranks that failed would be waited for
            self.close()

    def close(self) -> None:
        """Wait for what is written, and raise its error if it was not reported."""
        Ranks.of(self.mesh).finish()

    def latest(self) -> Path | None:
        """Return the checkpoint that was finished last, after what is written now."""
        Ranks.of(self.mesh).wait()
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

        Raises:
            CheckpointError: the run is to begin, and the directory holds another one; no checkpoint in it is sound; the one that
                was named has no step; or as for :func:`load`.
        """
        ranks = Ranks.of(self.mesh)
        ranks.finish()
        collect = partial(State, self.mesh, model, optimizer, data)
        left: list[str] = []
        about: dict[str, Any] | None = None
        while about is None and (path := ranks.from_first(partial(self._candidate, resume, left))):
            try:
                about = _load(path, ranks, collect, cast=cast)
            except files.DamagedError as error:  # noqa: PERF203  one of a few
                if resume is not True:
                    raise
                left.append(path.name)
                if ranks.rank == 0:
                    warnings.warn(f"left out: {error}", stacklevel=2)
        self._run = (about and about["run"]) or ranks.from_first(lambda: secrets.token_hex(8))
        ranks.from_first(self._refuse_other_run)
        return dict(about["extra"]) if about else {"step": 0}

    def _candidate(self, resume: bool | str | os.PathLike[str], left: list[str]) -> Path | None:
        """Return the checkpoint to load next; the first rank calls this."""
        if isinstance(resume, bool):
            known = [path for path, _ in files.in_order(self.directory) if _NAME.fullmatch(path.name)]
            sound = [path for path in known if path.name not in left] if resume else []
            if resume and known and not sound:
                raise CheckpointError(
                    f"no checkpoint in {self.directory} is as it was written; name one to load by resume=, or begin in another directory"
                )
            return sound[-1] if sound else None
        if "step" not in _about(Path(resume))["extra"]:
            raise CheckpointError(
                f"the checkpoint {resume} has no step to go on from; save it with step=, or load it with training.load"
            )
        return Path(resume)

    def save(
        self, step: int, model: Model, optimizer: Optimizers = None, *, data: object = None, **extra: Any
    ) -> Future[Path]:
        """Save after ``step`` steps, which is one of the extra values; every rank calls this, with the arguments of :func:`save`.

        Returns:
            A future; its ``result()`` is the path. Done already, unless ``async_``.

        Raises:
            CheckpointError: the directory holds another run; or as for :func:`namedmesh.training.save`.
        """
        ranks = Ranks.of(self.mesh)
        ranks.finish()
        self._run = self._run or ranks.from_first(lambda: secrets.token_hex(8))

        def collect() -> State:
            if ranks.rank == 0:
                self._refuse_other_run()
                self._remove_leftovers()
            return State(self.mesh, model, optimizer, data)

        path, values = self.directory / f"step-{step:06}", {"step": step} | extra
        how: dict[str, Any] = {"async_": self.async_, "finished": self._remove_older}
        return _save(path, self.mesh, collect, values, self._run, **how)

    def _of_runs(self) -> list[tuple[Path, dict[str, Any]]]:
        return [(path, about) for path, about in files.in_order(self.directory) if about.get("run")]

    def _refuse_other_run(self) -> None:
        """Refuse to save in a directory of which this run has loaded nothing."""
        runs = self._of_runs()
        if runs and self._run not in {about["run"] for _, about in runs}:
            raise CheckpointError(
                f"{self.directory} holds another run, up to {runs[-1][0].name}; go on with it by "
                "resume_or_start(..., resume=True), or give this run a directory of its own"
            )

    def _remove_leftovers(self) -> None:
        for each in self.directory.glob("step-*"):
            if _NAME.fullmatch(each.name):
                files.clear(each)
        for each in self.directory.glob("*-" + 16 * "[0-9a-f]" + ".removed"):
            shutil.rmtree(each, ignore_errors=True)

    def _remove_older(self) -> None:
        own = [path for path, about in self._of_runs() if about["run"] == self._run]
        own = [path for path in own if _NAME.fullmatch(path.name)]
        for path in own[: -self.keep] if self.keep else ():
            files.remove(path)


class _without_warnings(warnings.catch_warnings):  # noqa: N801
    """Keep torch from telling that one process is one process; filters belong to all threads, so for the foreground only."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
