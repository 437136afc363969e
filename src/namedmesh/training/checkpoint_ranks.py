"""The ranks that write or read a checkpoint together, on a group of their own, also in the background."""

from __future__ import annotations

import atexit
import io
import os
import sys
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from namedmesh._torch import before_default_group_ends
from namedmesh.errors import CheckpointError, NamedMeshError, ranks_in_words
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from namedmesh.mesh import NamedMesh

T = TypeVar("T")


class Saving(Future[Path]):
    """A save in the background, reported once somebody got its result or its error."""

    def result(self, timeout: float | None = None) -> Path:
        """Return the path of the checkpoint, once it is in its place."""
        try:
            return super().result(timeout)
        finally:
            if self.done():
                _unreported.discard(self)


_unreported: set[Saving] = set()
"""The saves that are under way, and those whose failure was not raised anywhere."""
os.register_at_fork(after_in_child=_unreported.clear)


def _wait_for_all() -> None:
    wait(list(_unreported))


@atexit.register
def _fail_at_exit() -> None:
    """Let torchrun, and whoever starts the job again, see that a save failed: the exit status is 120.

    That of an interpreter whose last flush fails; there is no other way from here that lets the other exit handlers run.
    """
    _wait_for_all()
    errors = [error for each in _unreported if (error := each.exception()) is not None]
    if not errors:
        return
    if sys.stdout is None or sys.stdout.closed:  # neither is flushed
        sys.stdout = io.StringIO()
    flush = sys.stdout.flush

    def fail() -> None:
        flush()
        if sys.is_finalizing():
            raise errors[0]

    sys.stdout.flush = fail  # type: ignore[method-assign]


class CheckpointGroup:
    """All ranks of a mesh, on a gloo group (none in a process without) that nothing else uses: a background thread communicates."""

    _of: ClassVar[WeakKeyDictionary[NamedMesh, CheckpointGroup]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.saving: Saving | None = None  # the last one in the background
        self.warned: set[str] = set()  # the names of which the ranks were warned already
        # A collective in the background that failed, as after a rank was lost: others may still wait in one before or after it.
        self.broken: RuntimeError | None = None

    @classmethod
    def of(cls, mesh: NamedMesh | None) -> CheckpointGroup:
        """Return those of a mesh; the first time every rank calls this, as the group is made then."""
        if mesh is None:
            return cls(None)
        if mesh not in cls._of or mesh.closed:
            with mesh.agreed("training, for its checkpoints") as maker:
                maker.compare({})
                alone = GroupOptions(backend="gloo", share=False)
                cls._of[mesh] = cls(maker.make(mesh.layout, mesh.layout.axes, alone))
            mesh.before_close(partial(cls._leave, mesh))
            before_default_group_ends(_wait_for_all)
        return cls._of[mesh]

    @classmethod
    def _leave(cls, mesh: NamedMesh) -> None:
        cls._of.pop(mesh).finish()

    @property
    def arguments(self) -> dict[str, Any]:
        """The ranks, as DCP takes them; its functions of torch 2.8 know no ``no_dist=False``."""
        if self.group is not None:
            return {"process_group": self.group}
        return {"no_dist": True} if dist.is_initialized() else {}

    def begin(self, work: Callable[[], Path]) -> Saving:
        """Save in the background."""
        saving = self.saving = Saving()
        saving.set_running_or_notify_cancel()  # so that nobody can cancel it, which the other ranks would not hear of
        _unreported.add(saving)

        def run() -> None:
            try:
                saving.set_result(work())
                _unreported.discard(saving)
            except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
                if isinstance(error, RuntimeError) and not isinstance(error, NamedMeshError):
                    self.broken = error
                saving.set_exception(error)

        Thread(target=run, name="namedmesh checkpoint", daemon=False).start()  # the interpreter waits for it
        return saving

    def wait(self) -> None:
        """Wait for the end of the save in the background."""
        if self.saving is not None:
            wait([self.saving])

    def finish(self) -> None:
        """Wait for the end of the save in the background, and raise its error if it was not reported."""
        self.wait()
        if self.saving in _unreported:
            self.saving.result()

    def on_first(self, function: Callable[[list[Any]], T], mine: object = None) -> T:
        """Call ``function`` on the first rank, with a value of each rank; all get its result, or its error."""
        values: list[Any] = [mine]
        if self.group is not None:
            values = [None] * self.size
            dist.gather_object(mine, values if self.rank == 0 else None, group=self.group, group_dst=0)
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function(values)
            except (NamedMeshError, OSError) as error:
                answer[1] = error
            except Exception as error:  # noqa: BLE001  every rank raises it
                answer[1] = CheckpointError(*_problems(error))
                answer[1].__cause__ = error
        if self.group is not None:
            dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def on_all(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; all raise what it raises on any. Without an error it is a single reduction."""
        result, error = None, None
        try:
            result = function()
        except Exception as raised:  # noqa: BLE001  every rank raises it
            error = raised
        if self.broken is not None:  # nothing can be told over this group
            raise self.broken
        failed = torch.tensor([int(error is not None)])
        if self.group is not None:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self.group)
        if failed.item():
            try:
                self.on_first(_raise_all, _problems(error))
            except CheckpointError as found:
                raise found from (None if isinstance(error, NamedMeshError) else error)
        return cast("T", result)


def _problems(error: Exception | None) -> list[str]:
    """Return an error in words: not every one can be sent to another rank."""
    if error is None:
        return []
    if isinstance(error, NamedMeshError):
        return list(error.problems)
    return [f"{type(error).__name__}: {error}".partition("\n")[0]]


def _raise_all(by_rank: list[list[str]]) -> None:
    """Raise the problems of all ranks, one sentence for each."""
    ranks_of: dict[str, list[int]] = {}
    for rank, problems in enumerate(by_rank):
        for problem in problems:
            ranks_of.setdefault(problem, []).append(rank)
    found = []
    for problem, ranks in ranks_of.items():
        everywhere = len(ranks) == len(by_rank)
        found.append(problem if everywhere else f"{ranks_in_words(ranks)}: {problem}")
    raise CheckpointError(*found)
