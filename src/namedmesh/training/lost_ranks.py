"""Which ranks a job has lost, when a collective fails: a thread of each rank answers the others over the store."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from namedmesh._torch import default_store, new_connection
from namedmesh.errors import LostRanksError, NamedMeshError, listing
from namedmesh.store import LimitedStore, StoreLostError, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from namedmesh.mesh import NamedMesh


T = TypeVar("T")


@contextmanager
def report_lost_ranks(mesh: NamedMesh, *, timeout: timedelta = timedelta(seconds=10)) -> Iterator[None]:
    """Name the ranks that were lost, where a collective fails because of them; every rank of the mesh enters this.

    A rank that is killed makes the collectives of the others fail, with an error of the backend about a
    connection; one that hangs or is stopped does so after the timeout of the group. Neither says which rank it was.
    Here the rank whose collective failed asks all ranks over the store of the default group. A thread of each rank
    answers, also while the rank waits in a collective. Without a failure nothing is sent.

    Only failures that the backend raises are seen, as gloo does; NCCL's watchdog ends the process by default.

    Args:
        mesh: the mesh.
        timeout: how long the ranks have to answer, and the store.

    Raises:
        LostRanksError: in place of a ``RuntimeError`` from the body, where a rank does not answer, or has left the
            body with an exception. It names each such rank, the exception, and the groups of the axes that it was
            in. ``first`` is true on one of the ranks that raise it, for a
            message that is printed once; on one rank of each host where the store of the job is lost.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, device="cpu")
        >>> with training.report_lost_ranks(mesh):
        ...     dist.all_reduce(torch.ones(1), group=mesh.group("dp"))
        >>> mesh.close(); dist.destroy_process_group()
    """
    if mesh.size() == 1 or dist.get_backend() == "fake":
        yield
        return
    answers = _Answers(mesh, timeout)
    ending = ""
    try:
        yield
    except BaseException as error:
        of_backend = isinstance(error, RuntimeError) and not isinstance(error, NamedMeshError)
        found = answers.verdict() if of_backend else None
        if found is not None:
            raise found from None
        ending = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
        raise
    finally:
        answers.leave(ending)


class _Answers:
    """The thread that answers for this rank, and the questions to the others.

    Under ``answer/N`` stands how rank N left the body: with an exception, or empty; empty also if it answers.
    """

    def __init__(self, mesh: NamedMesh, timeout: timedelta) -> None:
        self.mesh, self.rank = mesh, mesh.global_rank
        self.lost = False
        self.timeout, self.limit = timeout, max(5.0, timeout.total_seconds())
        self.store = _connection(mesh)
        self._ask(lambda store: store.delete(f"answer/{self.rank}"))
        # A connection of its own: one that waits is not to be had for anything else.
        self.thread = Thread(target=self._answer, args=(_connection(mesh),), daemon=True)
        self.thread.start()

    def _answer(self, connection: dist.Store) -> None:
        store = LimitedStore(connection, math.inf)
        with suppress(RuntimeError):  # the store is gone
            # The longest that poll() takes.
            while not store.appears(f"asked/{self.rank}", timedelta(days=20)):
                pass
            store.first(f"answer/{self.rank}", "")

    def leave(self, ending: str) -> None:
        """Record how this rank leaves, and end its thread."""

        def questions(store: LimitedStore) -> None:
            store.set(f"answer/{self.rank}", ending)
            store.set(f"asked/{self.rank}", "")
            self.thread.join(self.limit)  # a set that is lost on the way is not noticed
            store.delete(f"asked/{self.rank}")

        with suppress(LostRanksError):
            self._ask(questions)

    def verdict(self) -> LostRanksError | None:
        """Return the error about the lost ranks, the same on every rank; None if there are none."""

        def questions(store: LimitedStore) -> str:
            if not store.has("verdict"):
                found = self._lost(store)
                if not found:
                    return ""
                store.first("verdict", json.dumps({"by": self.rank, "lost": found}))
            return store.get("verdict")

        try:
            answer = self._ask(questions)
        except LostRanksError as lost:
            lost.first = os.environ.get("LOCAL_RANK", "0") == "0"  # this host may be cut off from the others
            return lost
        if not answer:
            return None
        verdict = json.loads(answer)
        found = LostRanksError(*verdict["lost"].values())
        found.ranks = tuple(map(int, verdict["lost"]))
        found.first = verdict["by"] == self.rank
        return found

    def _ask(self, questions: Callable[[LimitedStore], T]) -> T:
        if self.lost:
            raise LostRanksError("the store of the default group is lost")
        try:
            return ask(self.store, questions, limit=self.limit)
        except StoreLostError as error:
            self.lost = True
            raise LostRanksError(f"the store of the default group is lost: {error}") from None

    def _lost(self, store: LimitedStore) -> dict[int, str]:
        """Return one sentence for each rank that does not answer, or has left with an exception."""
        others = [rank for rank in self.mesh.layout.ranks if rank != self.rank]
        for rank in others:
            store.set(f"asked/{rank}", "")
        deadline = time.monotonic() + self.timeout.total_seconds()
        found = {}
        for rank in others:
            answer = f"answer/{rank}"
            # A wait that ends with its timeout is a warning of torch's.
            while not (answered := store.has(answer)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not answered:
                found[rank] = "does not answer: it was killed, was stopped, or is cut off"
            elif ending := store.get(answer):
                found[rank] = f"ended with {ending}"
        layout = self.mesh.layout
        sentences = {}
        for rank, what in found.items():
            place = ", ".join(f"{axis} {where}" for axis, where in layout.coords(rank).items())
            groups = [
                f"{axis} (ranks {listing(layout.group(rank, axis))})"
                for axis, size in layout.items()
                if size > 1
            ]
            sentences[rank] = (
                f"rank {rank} ({place}) {what}; lost with it: {', '.join(groups)}; end the job, and start it again from its last "
                "checkpoint"
            )
        return sentences


def _connection(mesh: NamedMesh) -> dist.Store:
    """Return another connection to the store of the default group."""
    ranks = mesh.layout.ranks
    return dist.PrefixStore(f"namedmesh/lost/{ranks[0]}-{ranks[-1]}", new_connection(default_store()))
