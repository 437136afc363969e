"""The ranks that save and load together, and what each of them raises."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from namedmesh._torch import default_timeout
from namedmesh.errors import CheckpointError, NamedMeshError, ranks_in_words
from namedmesh.training.checkpoint_files import DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from namedmesh.mesh import NamedMesh

T = TypeVar("T")


class Ranks:
    """All ranks of a mesh (without one, this process), on a gloo group that nothing else uses: DCP communicates in the background.

    The group lives as long as the default group.
    """

    _of: ClassVar[WeakKeyDictionary[Any, dict[tuple[int, ...], Ranks]]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.saving: Future[Path] | None = None

    @classmethod
    def of(cls, mesh: NamedMesh | None) -> Ranks:
        """Return those of a mesh; the first time every rank calls this, as the group is made then."""
        if mesh is None:
            return cls(None)
        ranks = tuple(mesh.layout.ranks)
        known = cls._of.setdefault(dist.group.WORLD, {})
        if ranks not in known:
            part = len(ranks) < dist.get_world_size()  # then the others do not call this
            limit = default_timeout()  # torch gives a new group its own
            group = dist.new_group(ranks, limit, "gloo", use_local_synchronization=part)
            known[ranks] = cls(group)
        return known[ranks]

    @property
    def arguments(self) -> dict[str, Any]:
        """The ranks, as DCP takes them."""
        if self.group is not None:
            return {"process_group": self.group}
        return {"no_dist": True} if dist.is_initialized() else {}

    def wait(self) -> None:
        """Wait for the end of the save in the background."""
        if self.saving is not None:
            wait([self.saving])

    def finish(self) -> None:
        """Wait for the end of the save in the background, and raise its error, once; every rank has the same."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def from_first(self, function: Callable[[], T]) -> T:
        """Return on every rank what a function returns, or raise what it raises, on the first."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = function()
            except Exception as error:  # noqa: BLE001
                answer[1] = in_words(error)
        if self.group is not None:
            dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if answer[1] is not None:
            raise answer[1]
        result: T = answer[0]
        return result

    def from_all(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return all results; all raise what it raises on any."""
        answer: list[Any] = [None, None]
        try:
            answer[0] = function()
        except Exception as error:  # noqa: BLE001
            answer[1] = in_words(error)
        answers = [answer] * self.size
        if self.group is not None:
            dist.all_gather_object(answers, answer, group=self.group)
        failed = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if failed:
            raise CheckpointError(
                *by_ranks({rank: error.problems for rank, error in failed.items()}, self.size)
            )
        return [result for result, _ in answers]


def by_ranks(problems: dict[int, Sequence[str]], size: int) -> list[str]:
    """Return the problems of ranks, one sentence for each, with the ranks where it is not that of all."""
    ranks_of: dict[str, list[int]] = {}
    for rank, some in problems.items():
        for each in some:
            ranks_of.setdefault(each, []).append(rank)
    return [
        each if len(ranks) == size else f"{ranks_in_words(ranks)}: {each}" for each, ranks in ranks_of.items()
    ]


def in_words(error: Exception) -> CheckpointError:
    """Return an error that can be sent to another rank."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, NamedMeshError):
        return CheckpointError(*error.problems)
    return CheckpointError(f"{type(error).__name__}: {error}".partition("\n")[0])


def error_of_dcp(error: BaseException, what: str, rank: int) -> BaseException:
    """Return what DCP raises on every rank as one error, with a sentence for each cause and its ranks."""
    failures = error.failures if isinstance(error, dcp.api.CheckpointException) else {rank: (error, None)}
    own = failures.get(rank, (None, None))[0]
    if isinstance(own, KeyboardInterrupt | SystemExit):  # DCP catches these, too
        return own
    found: dict[str, list[int]] = {}
    causes: dict[str, list[int]] = {}
    for one, (cause, _) in failures.items():
        if isinstance(cause, NamedMeshError):
            for each in cause.problems:
                found.setdefault(each, []).append(one)
        else:
            causes.setdefault(f"{type(cause).__name__}: {cause}".partition("\n")[0], []).append(one)
    # What concerns all of them the first one says.
    problems = [each if 0 in ranks else f"{ranks_in_words(ranks)}: {each}" for each, ranks in found.items()]
    for how, ranks in causes.items():
        lost = "imed out" in how or "onnection" in how
        remedy = "start the job again" if lost else "see to room and permission there"
        problems.append(f"{what} by {ranks_in_words(ranks)} ({how}); {remedy}")
    damaged = all(isinstance(cause, DamagedError) for cause, _ in failures.values())
    return (DamagedError if damaged else CheckpointError)(*problems)
