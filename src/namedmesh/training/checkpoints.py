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

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.errors import CheckpointError
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_plans import LoadPlanner, SavePlanner, joined_aliases, refuse_untied
from namedmesh.training.checkpoint_ranks import DamagedError, Ranks, error_of_dcp
from namedmesh.training.checkpoint_state import State, plain

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from typing_extensions import Self

    from namedmesh.mesh import NamedMesh
    from namedmesh.training.checkpoint_state import Model, Optimizers

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

    DCP writes the tensors, every rank what it has, to a new directory in ``path``; the file ``namedmesh.pt``, which names it, is put
    in its place last. Killed at any moment, :func:`load` finds the last one that was finished.

    Parameters have to be the same on all ranks that have the same part of them. What is no DTensor otherwise (buffers, extra states,
    what an optimizer keeps for a shard) is saved once where it is the same on all ranks, and else for each rank, with one warning for
    buffers. A parameter with two names, or tied by :func:`tie_stages`, is one weight.

    Args:
        path: a directory of the checkpoint's own, on a file system that all ranks see.
        mesh: the mesh; None in a process without process groups.
        model: what this rank has, or a list of it (several stages of a pipeline). Plain tensors that carry
            Megatron's marks are saved as the whole tensors that they are shards of, over ``tp`` (experts: ``etp``).
        optimizer: the optimizer of the model's parameters, stepped or not, or a list of them.
        data: what knows the place in the data, or a list of such; anything with ``state_dict()`` and ``load_state_dict()``.
        async_: return once the tensors are copied, and write in the background. The next save or load waits for it, and
            raises what went wrong on every rank; get the ``result()`` before ``destroy_process_group()``.
        **extra: values that are the same on every rank, such as the number of the step or ``scheduler.state_dict()``:
            numbers, texts, tensors, and lists, tuples and dicts of them.

    Returns:
        A future, done already unless ``async_``; its ``result()`` is the path.

    Raises:
        CheckpointError: a name stands for different tensors, ranks give different extra values, something is no plain data, or
            ``path`` holds something else: all problems at once, before anything is written; or it cannot be written. It is
            raised on every rank, and what was there before is kept.
    """
    collect = partial(State, mesh, model, optimizer, data)
    return _save(Path(path), mesh, collect, extra, async_=async_)


def _save(
    path: Path,
    mesh: NamedMesh | None,
    collect: Callable[[], State],
    extra: dict[str, Any],
    *,
    async_: bool,
    run: str | None = None,
    finished: Callable[[], None] = lambda: None,
) -> Future[Path]:
    ranks = Ranks.of(mesh)
    ranks.finish()
    async_ = async_ and mesh is not None
    state: State | Exception
    try:
        state = collect()
        state.extra = {key: plain(each, f"the extra value {key}") for key, each in extra.items()}
        if async_:
            state.copy()
        values = state.values
    except Exception as error:  # noqa: BLE001  DCP's first step tells it on every rank
        state, values = error, {}
    layout = None if mesh is None else [dict(mesh.layout.items()), mesh.layout.rank_offset]
    writer = files.Writer(path, {"layout": layout, "run": run}, finished)
    arguments = {"storage_writer": writer, "planner": SavePlanner(state, writer), **ranks.arguments}
    saved: Future[Path] = Future()

    def end(error: BaseException | None) -> None:
        if error is None:
            saved.set_result(path)
            return
        if writer.made:  # the checkpoint may be in its place: where a peer dies after finish(), only DCP's last broadcast fails
            files.clear(path)
        saved.set_exception(error_of_dcp(error, f"the checkpoint {path} could not be written", ranks.rank))

    if async_:
        saved.set_running_or_notify_cancel()  # nobody can cancel it, which the other ranks would not hear of
        ranks.saving = saved
        started: Any = dcp.async_save(values, **arguments)
        started.add_done_callback(lambda future: end(future.exception()))
        return saved
    try:
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
    optimizer keeps for the shard of a rank, and the place in the data, are refused. Until all is read, this rank's part is in
    memory twice.

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
            the model, or has another shape or type; its optimizer does not fit; weights that are tied were saved as two. All
            problems at once, on every rank, before anything is changed.
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
    own = files.Reader(path, about) if about["data"] else None
    try:
        reader = own or dcp.HuggingFaceStorageReader(str(path))
        dcp.load({}, storage_reader=reader, planner=planner, **ranks.arguments)
    except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
        raise error_of_dcp(error, f"the checkpoint {path} could not be read", ranks.rank) from None
    refuse_untied(chain.from_iterable(ranks.from_all(planner.tied)), path)
    ranks.from_all(planner.put)
    return about


def to_pretrained(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write the model of a checkpoint as Hugging Face's ``save_pretrained`` does; one process, which holds all of it, calls this.

    Needs ``safetensors``. The files are of at most ``shard_bytes``, or one tensor. ``config.json`` is the model's to write.

    Raises:
        CheckpointError: there is no checkpoint at ``path``, or it is damaged.
    """
    about = _about(Path(path))
    reader = files.Reader(Path(path), about)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    number = free = 0
    for name, each in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model.") and isinstance(each, dcp.TensorStorageMetadata):
            tensors[name] = torch.empty(each.size, dtype=each.properties.dtype)
            if tensors[name].nbytes > free:
                number, free = number + 1, shard_bytes
            numbers[name.removeprefix("model.")] = number
            free -= tensors[name].nbytes
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    named = {name.removeprefix("model."): each for name, each in tensors.items()}
    dcp.save(named, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), numbers), no_dist=True)


class Checkpoints:
    """A directory of checkpoints of one run, ``step-000100`` and so on; every rank of the mesh makes one.

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
            except DamagedError as error:  # noqa: PERF203  one of a few
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
        how: dict[str, Any] = {"async_": self.async_, "run": self._run, "finished": self._remove_older}
        return _save(path, self.mesh, collect, values, **how)

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
