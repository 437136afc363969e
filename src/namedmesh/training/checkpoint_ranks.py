"""The ranks that write or read a checkpoint together: on a group of their own, and what they compare."""

from __future__ import annotations

import atexit
import io
import os
import sys
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, TypeVar
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
    """A save in the background; whoever asks for its result gets its failure, which is reported then."""

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


class Background:
    """The save in the background of some ranks, and its failure until it is reported."""

    def __init__(self) -> None:
        self._last: Saving | None = None

    def begin(self, work: Callable[[], Path]) -> Saving:
        """Call a function in the background."""
        saving = self._last = Saving()
        _unreported.add(saving)

        def run() -> None:
            try:
                saving.set_result(work())
                _unreported.discard(saving)
            except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it
                saving.set_exception(error)

        # No daemon: the interpreter waits for it.
        Thread(target=run, name="namedmesh checkpoint", daemon=False).start()
        return saving

    def wait(self) -> None:
        """Wait for the end of the save."""
        if self._last is not None:
            wait([self._last])

    def failure(self) -> BaseException | None:
        """Wait for the end of the save; returns its error, if it was not reported."""
        self.wait()
        saving = self._last
        if saving is None or saving not in _unreported:
            return None
        _unreported.remove(saving)
        return saving.exception()

    def finish(self) -> None:
        """Wait for the end of the save, and raise its error if it was not reported."""
        if error := self.failure():
            raise error


def _wait_for_all() -> None:
    wait(list(_unreported))


class _FailsAtExit(io.TextIOBase):
    """Standard output of an interpreter that ends: its last flush fails, so that the exit status is 120.

    The interpreter has no other way to a status from here that lets the other exit handlers run.
    """

    def __init__(self, stream: TextIO, error: BaseException) -> None:
        self._stream, self._error = stream, error

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise self._error


@atexit.register
def _fail_at_exit() -> None:
    """Let torchrun, and whoever starts the job again, see that a save failed."""
    _wait_for_all()
    errors = [error for each in _unreported if (error := each.exception()) is not None]
    if errors:
        sys.stdout = _FailsAtExit(sys.stdout, errors[0])


class CheckpointGroup:
    """All ranks of a mesh, on a gloo group that nothing else uses: a background thread communicates on it.

    Attributes:
        group: the group; None in a process without process groups.
        background: the save in the background.
        warned: what the ranks were warned of already.
    """

    _of: ClassVar[WeakKeyDictionary[NamedMesh, CheckpointGroup]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.background = group, _of_process if group is None else Background()
        self.warned: set[str] = set()

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
        cls._of.pop(mesh).background.finish()

    @property
    def arguments(self) -> dict[str, Any]:
        """The ranks, as DCP takes them; its functions of torch 2.8 know no ``no_dist=False``."""
        if self.group is not None:
            return {"process_group": self.group}
        return {"no_dist": True} if dist.is_initialized() else {}

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self.group is None else self.group.size()

    def run_on_first_rank(self, function: Callable[[list[Any]], T], mine: object = None) -> T:
        """Call ``function`` on the first rank, with a value of each rank; all get its result, or its error.

        A value that is an error is raised on every rank instead.
        """
        first = self.rank == 0
        values: list[Any] = [mine] if self.group is None else [None] * self.size
        if self.group is not None:
            dist.gather_object(mine, values if first else None, group=self.group, group_dst=0)
        answer: list[Any] = [None, None]
        if first:
            try:
                _raise_errors(values)
                answer[0] = function(values)
            except Exception as error:  # noqa: BLE001  every rank raises it
                answer[1] = error
        if self.group is not None:
            dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def raise_on_all(self, error: BaseException | None) -> None:
        """Raise the error of any rank on every rank; without one this is a single reduction."""
        flag = torch.tensor([error is not None], dtype=torch.uint8)
        if self.group is not None:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        if flag.item():
            self.run_on_first_rank(lambda _: None, error)


def attempted(function: Callable[[], T]) -> T | Exception:
    """Return what a function returns or raises, for :meth:`CheckpointGroup.run_on_first_rank`."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  raised on every rank
        return error


def _raise_errors(values: list[Any]) -> None:
    """Raise what ranks have instead of a value, one sentence for each cause."""
    causes: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if isinstance(value, NamedMeshError):
            for problem in value.problems:
                causes.setdefault(problem, []).append(rank)
        elif isinstance(value, BaseException):
            cause = f"{type(value).__name__}: {value}".partition("\n")[0]
            causes.setdefault(cause, []).append(rank)
    problems = []
    for cause, ranks in causes.items():
        where = "" if len(ranks) == len(values) else f"{ranks_in_words(ranks)}: "
        problems.append(f"{where}{cause}")
    if problems:
        raise CheckpointError(*problems)


_of_process = Background()
