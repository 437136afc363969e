"""The ranks that save and load together, and what each of them raises."""

from __future__ import annotations

import warnings
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from namedmesh._torch import dcp_ranks, default_timeout
from namedmesh.errors import CheckpointError, NamedMeshError, ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future
    from pathlib import Path

    from namedmesh.mesh import NamedMesh


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


class Ranks:
    """All ranks of a mesh (without one, this process), on a gloo group that nothing else uses: DCP communicates in the background."""

    _of: ClassVar[WeakKeyDictionary[Any, dict[tuple[int, ...], Ranks]]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._dcp = dcp_ranks(group)
        self.rank: int = self._dcp.rank
        self.arguments: dict[str, Any] = {"no_dist": True} if group is None else {"process_group": group}
        self.saving: Future[Path] | None = None

    @classmethod
    def of(cls, mesh: NamedMesh | None) -> Ranks:
        """Return those of a mesh; the first time, in the life of the default group, every rank calls this."""
        if mesh is None:
            return cls(None)
        ranks = tuple(mesh.layout.ranks)
        known = cls._of.setdefault(dist.group.WORLD, {})
        if ranks not in known:
            part = len(ranks) < dist.get_world_size()  # then the others do not call this
            limit = default_timeout()  # torch gives a new group its own
            known[ranks] = cls(dist.new_group(ranks, limit, "gloo", use_local_synchronization=part))
        return known[ranks]

    def wait(self) -> None:
        """Wait for the end of the save in the background."""
        if self.saving is not None:
            wait([self.saving])

    def finish(self) -> None:
        """Wait for the end of the save in the background, and raise its error, once; every rank has the same."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Return on every rank what a function returns, or raise what it raises, on the first."""
        return self._together(self._dcp.broadcast, function)

    def from_all(self, function: Callable[[], Any]) -> Any:
        """Call a function on every rank, and return all results; all raise what it raises on any."""
        return self._together(self._dcp.all_gather, function)

    def _together(self, collective: Any, function: Callable[[], Any]) -> Any:
        def call() -> Any:
            try:
                return function()
            except Exception as error:
                raise in_words(error) from error

        with self.told(""):
            return collective("checkpoint", call)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Raise what DCP raises in the block as an error of ours."""
        try:
            with _quiet() if "no_dist" in self.arguments else nullcontext():
                yield
        except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
            raise _error_of_dcp(error, what, self.rank) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what DCP says where one process saves or loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def by_ranks(problems: Mapping[int, Iterable[str]]) -> list[str]:
    """Return the problems of ranks, each once, with the ranks that have it; what the first one says concerns all of them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, some in problems.items():
        for each in some:
            ranks_of.setdefault(each, []).append(rank)
    return [each if 0 in ranks else f"{ranks_in_words(ranks)}: {each}" for each, ranks in ranks_of.items()]


def in_words(error: Exception) -> NamedMeshError:
    """Return an error that can be sent to another rank."""
    if isinstance(error, NamedMeshError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}".partition("\n")[0])


def _error_of_dcp(error: BaseException, what: str, rank: int) -> BaseException:
    """Return what DCP raises on every rank as one error, with a sentence for each cause and its ranks."""
    failures = error.failures if isinstance(error, dcp.api.CheckpointException) else {rank: (error, None)}
    causes = {each: cause for each, (cause, _) in failures.items()}
    own = causes.get(rank)
    if isinstance(own, KeyboardInterrupt | SystemExit):  # DCP catches these, too
        return own
    ours = {each: cause for each, cause in causes.items() if isinstance(cause, NamedMeshError)}
    problems = by_ranks({each: cause.problems for each, cause in ours.items()})
    others: dict[str, list[int]] = {}
    for each in sorted(causes.keys() - ours.keys()):
        how = f"{type(causes[each]).__name__}: {causes[each]}".partition("\n")[0]
        others.setdefault(how, []).append(each)
    for how, ranks in others.items():
        problems.append(
            f"{what} by {ranks_in_words(ranks)} ({how}); see to room and permission there, and start the job again"
        )
    damaged = all(isinstance(cause, DamagedError) for cause in causes.values())
    return (DamagedError if damaged else CheckpointError)(*problems)
