"""Which ranks a job has lost, when a collective fails: a thread of each rank answers the others over the store."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh._torch import new_store_connection
from namedmesh.errors import LostRanksError, NamedMeshError, listing
from namedmesh.rendezvous import key_appeared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from namedmesh.mesh import NamedMesh


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
        timeout: how long the ranks have to answer.

    Raises:
        LostRanksError: in place of a ``RuntimeError`` from the body, where a rank does not answer, or has left the
            body with an exception. It names each such rank, the exception, and the groups of the axes that it was
            in. ``first`` is true on one of the ranks that raise it, for a message that is printed once.

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
    answers = _Answers(mesh)
    ending = ""
    try:
        yield
    except RuntimeError as error:
        found = None if isinstance(error, NamedMeshError) else answers.verdict(timeout)
        if found is not None:
            raise found from None
        ending = _words(error)
        raise
    except BaseException as error:
        ending = _words(error)
        raise
    finally:
        answers.leave(ending)


def _words(error: BaseException) -> str:
    """Return the type of an error and its first line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


class _Answers:
    """The thread that answers for this rank, and the questions to the others.

    Under ``answer/N`` stands how rank N left the body: with an exception, or empty; empty also if it answers.
    """

    def __init__(self, mesh: NamedMesh) -> None:
        self.mesh, self.rank = mesh, mesh.global_rank
        self.store = _connection(mesh)
        self.store.delete_key(f"answer/{self.rank}")
        # A connection of its own: one that waits is not to be had for anything else.
        self.thread = Thread(target=self._answer, args=(_connection(mesh),), daemon=True)
        self.thread.start()

    def _answer(self, store: dist.Store) -> None:
        with suppress(RuntimeError):  # the store is gone
            while not key_appeared(
                store, f"asked/{self.rank}", timedelta(days=20)
            ):  # the longest that poll() takes
                pass
            store.compare_set(f"answer/{self.rank}", "", "")

    def leave(self, ending: str) -> None:
        """Record how this rank leaves, and end its thread."""
        with suppress(RuntimeError):
            self.store.set(f"answer/{self.rank}", ending)
            self.store.set(f"asked/{self.rank}", "")
            self.thread.join()
            self.store.delete_key(f"asked/{self.rank}")

    def verdict(self, timeout: timedelta) -> LostRanksError | None:
        """Return the error about the lost ranks, the same on every rank; None if there are none."""
        try:
            if not self.store.check(["verdict"]):
                found = self._lost(timeout)
                if not found:
                    return None
                mine = json.dumps({"by": self.rank, "lost": found})
                self.store.compare_set("verdict", "", mine)
            verdict = json.loads(self.store.get("verdict"))
        except dist.DistNetworkError:
            return LostRanksError(
                "the store of the default group is gone: the process that hosts it, rank 0 or torchrun's agent, has ended; "
                "see its output for why"
            )
        error = LostRanksError(*verdict["lost"].values())
        error.ranks = tuple(map(int, verdict["lost"]))
        error.first = verdict["by"] == self.rank
        return error

    def _lost(self, timeout: timedelta) -> dict[int, str]:
        """Return one sentence for each rank that does not answer, or has left with an exception."""
        others = [rank for rank in self.mesh.layout.ranks if rank != self.rank]
        for rank in others:
            self.store.set(f"asked/{rank}", "")
        deadline = time.monotonic() + timeout.total_seconds()
        found = {}
        for rank in others:
            answer = [f"answer/{rank}"]
            # A wait that ends with its timeout is a warning of torch's.
            while not (answered := self.store.check(answer)) and time.monotonic() < deadline:
                time.sleep(0.02)
            if not answered:
                found[rank] = "does not answer: it was killed, was stopped, or is cut off"
            elif ending := self.store.get(f"answer/{rank}").decode():
                found[rank] = f"ended with {ending}"
        return {rank: self._sentence(rank, what) for rank, what in found.items()}

    def _sentence(self, rank: int, what: str) -> str:
        layout = self.mesh.layout
        place = ", ".join(f"{axis} {where}" for axis, where in layout.coords(rank).items())
        groups = [
            f"{axis} (ranks {listing(layout.group(rank, axis))})" for axis, size in layout.items() if size > 1
        ]
        return (
            f"rank {rank} ({place}) {what}; lost with it: {', '.join(groups)}; end the job, and start it again from its last "
            "checkpoint"
        )


def _connection(mesh: NamedMesh) -> dist.Store:
    """Return another connection to the store of the default group."""
    ranks = mesh.layout.ranks
    return dist.PrefixStore(f"namedmesh/lost/{ranks[0]}-{ranks[-1]}", new_store_connection())
