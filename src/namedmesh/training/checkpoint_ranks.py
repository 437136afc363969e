"""The ranks that save or load a checkpoint together, and raise one error."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from namedmesh._errors import AgreementError, CheckpointError, NamedMeshError, format_ranks, print_in_one_line
from namedmesh._torch.modules import make_dcp_wrapper
from namedmesh.mesh.internal import agree_on_call, get_groups
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.options import GroupOptions
from namedmesh.training.checkpoint_storage import CorruptedError

# Writes take longer than collectives.
_SHORTEST_TIMEOUT = timedelta(minutes=30)
# The words of gloo about a rank that has ended, or that does not answer.
_LOST_RANK = re.compile("[Cc]onnect|[Tt]imed out|peer|[Ss]ocket|Broken pipe")


class SaveFuture(Future[Path]):
    """The future of a save, which knows whether its error was raised from :meth:`result`."""

    was_raised: bool = False

    def result(self, timeout: float | None = None) -> Path:
        """Return the path, or raise the error of the save."""
        try:
            return super().result(timeout)
        finally:
            self.was_raised = self.done()


class CheckpointRanks:
    """The ranks of a mesh on a gloo group of their own, or one process without a mesh.

    There is one object for each group, so a mesh has one save in the background at most.

    Attributes:
        rank: the group rank, 0 without a mesh.
        timeout: how long to wait for a rank that does not make a call: the timeout of the mesh. The
            group has a longer one, because a rank may write for a long time.
        saving: the running or finished save in the background that was not waited for, or None.
        pinned: the pinned memory into which saves in the background copy, by entry.
    """

    _instances: ClassVar[WeakKeyDictionary[dist.ProcessGroup, CheckpointRanks]] = WeakKeyDictionary()
    _meshes: ClassVar[WeakSet[NamedMesh]] = WeakSet()  # those whose group was created or found

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # A weak reference, because destroy_process_group() has to end the group with its threads.
        self._group = None if group is None else ref(group)
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.timeout: timedelta = timedelta(0)
        self.saving: SaveFuture | None = None
        self.pinned: dict[str, torch.Tensor] = {}

    @classmethod
    def from_mesh(cls, mesh: NamedMesh | None, call: str) -> CheckpointRanks:
        """Return the ranks of a mesh, with the gloo group that they share.

        Collective: every rank of the mesh must call it, because the group may have to be created.

        Args:
            mesh: the mesh; None in a process without process groups.
            call: the call of the user, for messages.

        Raises:
            AgreementError: some ranks did not make the call within the timeout of the mesh.
        """
        if mesh is None:
            return cls(None)
        groups = get_groups(mesh)
        # Ranks outside of the mesh do not save its model, so there is nothing to agree on with them.
        is_whole_world = mesh.size() == groups.world_size
        if is_whole_world and mesh not in cls._meshes:
            with agree_on_call(mesh, call) as compare:
                compare({"layout": repr(mesh.layout)})
                group = groups.get_gloo_group(mesh.ranks(), "checkpoints", _SHORTEST_TIMEOUT)
            cls._meshes.add(mesh)
        else:
            group = groups.get_gloo_group(mesh.ranks(), "checkpoints", _SHORTEST_TIMEOUT)
        ranks = cls._instances.setdefault(group, cls(group))
        ranks.timeout = groups.normalize(GroupOptions()).timeout or ranks.timeout
        return ranks

    @property
    def dcp_arguments(self) -> dict[str, Any]:
        """The arguments ``no_dist`` and ``process_group`` of DCP.

        Raises:
            CheckpointError: the default group was destroyed.
        """
        if self._group is None:
            return {"no_dist": True, "process_group": None}
        group = self._group()
        if group is None:
            raise CheckpointError("the default group was destroyed; wait for a save in the background before")
        return {"no_dist": False, "process_group": group}

    def begin(self, call: str, path: Path) -> None:
        """Wait for the save in the background, and until every rank has made the same call.

        Saves and loads share the pinned memory and the group, so there is one at a time.
        Collective: every rank must call it.

        Args:
            call: the call of the user, for messages.
            path: the path that the call names.

        Raises:
            AgreementError: some ranks did not make the call within the timeout of the mesh, have
                ended, or made another call. Rank 0 has the numbers of missing ranks, the others may
                have the number of rank 0.
            CheckpointError: a rank has ended; or on every rank, the error of the save in the
                background, unless a rank has raised it from ``result()``.
        """
        saving, self.saving = self.saving, None
        error = None if saving is None else saving.exception()
        group = self.dcp_arguments["process_group"]
        if group is None:  # a process without a mesh saves in the foreground
            return
        start = time.monotonic()
        try:
            dist.monitored_barrier(group, self.timeout, wait_all_ranks=True)
        except RuntimeError as failure:
            if time.monotonic() - start < 0.8 * self.timeout.total_seconds():
                raise _make_lost_rank_error(call, failure) from None
            raise AgreementError(
                f"some ranks did not call {call} within the timeout of the mesh ({failure}); call "
                "it on every rank, and not only on one of them"
            ) from None
        requests = self.run_on_all_ranks(
            f"{call} could not start",
            lambda: (f"{call}({str(path)!r})", saving is not None and saving.was_raised),
        )
        different = [rank for rank, (request, _) in enumerate(requests) if request != requests[0][0]]
        if different:
            raise AgreementError(
                f"{format_ranks(different)} called {requests[different[0]][0]}, and rank 0 called "
                f"{requests[0][0]}; make the same call, with the same path and step, on every rank"
            )
        # The ranks must agree on it, or some would wait here for the others.
        if error is not None and not any(was_raised for _, was_raised in requests):
            raise error

    def wait_for_save(self) -> None:
        """Wait for the save in the background, and raise its error once.

        Does not communicate: DCP has raised the same error on every rank.
        """
        saving, self.saving = self.saving, None
        if saving is not None and not saving.was_raised:
            saving.result()

    def run_on_all_ranks(
        self, problem: str, function: Callable[[], Any], merge: Callable[[list[Any]], Any] = list
    ) -> Any:
        """Call a function on every rank, merge the results on rank 0, and broadcast the result.

        Collective: every rank must call it.

        Args:
            problem: the start of the message for unexpected errors, such as "x could not be read".
            function: the function, which gets no arguments.
            merge: called on rank 0 with the results in the order of the ranks.

        Returns:
            The result of ``merge``.

        Raises:
            CheckpointError: on every rank, if a function raises an error on any rank.
        """
        call, merge = _make_errors_sendable(function), _make_errors_sendable(merge)
        with self.reraise_on_all_ranks(problem):
            # A wrapper for each call: it refers to the group, which is only held weakly here.
            return make_dcp_wrapper(**self.dcp_arguments).all_reduce("checkpoint", call, merge)

    def run_on_rank0(self, problem: str, function: Callable[[], Any]) -> Any:
        """Call a function on rank 0, and broadcast its result or its error.

        Collective: every rank must call it.

        Args:
            problem: the start of the message for unexpected errors.
            function: the function, which gets no arguments.
        """
        return self.run_on_all_ranks(problem, lambda: None, lambda _: function())

    @contextmanager
    def reraise_on_all_ranks(self, problem: str) -> Iterator[None]:
        """Context manager that raises the errors of a collective call of DCP as a CheckpointError.

        DCP has gathered the errors of all ranks already, so this does not communicate.

        Args:
            problem: the start of the message for unexpected errors, such as "x could not be read".
        """
        is_single = self._group is None
        try:
            # With a group this may run in a thread, and warning filters are global.
            with warnings.catch_warnings() if is_single else nullcontext():
                if is_single:  # on purpose, and DCP warns about it
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
            found = _make_error(error, problem, self.rank)
            group = None if self._group is None else self._group()
            # DCP's exception has the errors of all ranks, so rank 0 is alive and raises them, too.
            is_shared = isinstance(error, dcp.api.CheckpointException) and self.rank != 0
            if isinstance(found, NamedMeshError) and group is not None and is_shared:
                print_in_one_line(found, dist.get_rank(), printing_rank=dist.get_global_rank(group, 0))
            raise found from None


def group_by_rank(problems: Mapping[int, Iterable[str]]) -> list[str]:
    """Return each problem once, with the ranks that have it.

    A problem that rank 0 has names no ranks, because it usually concerns all of them.

    Args:
        problems: the messages of each rank.
    """
    ranks_by_message: dict[str, list[int]] = {}
    for rank, messages in problems.items():
        for message in messages:
            ranks_by_message.setdefault(message, []).append(rank)
    grouped = ranks_by_message.items()
    return [text if 0 in ranks else f"{format_ranks(ranks)}: {text}" for text, ranks in grouped]


def _make_errors_sendable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors can be pickled for the other ranks."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (NamedMeshError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(_format_first_line(error)) from error

    return call


def _format_first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _make_error(error: BaseException, problem: str, rank: int) -> BaseException:
    """Merge the errors of all ranks into one error, with the ranks of each cause.

    Args:
        error: the error of DCP, which has the errors of all ranks, or an error of this rank.
        problem: the start of the message for unexpected errors.
        rank: the rank of this process.
    """
    causes: dict[int, Any] = {rank: error}
    if isinstance(error, dcp.api.CheckpointException):
        causes = {failed: cause for failed, (cause, _) in error.failures.items()}
    if isinstance(causes.get(rank), KeyboardInterrupt | SystemExit):  # DCP catches these, too
        return causes[rank]  # type: ignore[no-any-return]
    expected: dict[int, Iterable[str]] = {}
    unexpected: dict[str, list[int]] = {}
    for failed, cause in sorted(causes.items()):
        # Only errors of this package have messages for users. Others get the name of their class.
        if isinstance(cause, NamedMeshError):
            expected[failed] = cause.problems
        elif isinstance(cause, RuntimeError) and _LOST_RANK.search(str(cause)):
            return _make_lost_rank_error(problem, cause)
        else:
            unexpected.setdefault(_format_first_line(cause), []).append(failed)
    problems = group_by_rank(expected)
    for message, ranks in unexpected.items():
        problems.append(
            f"{problem} by {format_ranks(ranks)} ({message}); check the disk space and the "
            "permissions there, and restart the job"
        )
    # resume_or_start() tries an older checkpoint after a CorruptedError.
    is_corrupted = set(map(type, causes.values())) == {CorruptedError}
    return (CorruptedError if is_corrupted else CheckpointError)(*problems)


def _make_lost_rank_error(what: str, error: BaseException) -> CheckpointError:
    """Return the error for a rank that has ended, or that does not answer."""
    return CheckpointError(
        f"{what}: another rank has ended, or does not answer ({_format_first_line(error)}). Read "
        "the output of the other ranks for the cause, and restart the job."
    )
