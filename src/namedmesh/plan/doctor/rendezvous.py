"""Find the ranks of a job before any group is made, so that an absent rank is named instead of waited for."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.agreement import agree as check_consistency
from namedmesh.errors import AgreementError, LaunchError
from namedmesh.launch import check_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Rendezvous", "rendezvous"]

_LEAVE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Rendezvous:
    """The ranks of a job, and the store that they share.

    Args:
        rank: this rank.
        world_size: how many ranks the job has.
        absent: those that did not come in time; the same on every rank that did.
        hosts: the host names of those that came, by rank.
        store: the store, for this attempt of the job.
        is_host: whether the store is in this process.
    """

    rank: int
    world_size: int
    absent: tuple[int, ...]
    hosts: Mapping[int, str]
    store: dist.Store
    is_host: bool = False

    @property
    def reports(self) -> bool:
        """Whether this rank prints for all: the lowest that is there."""
        return self.rank == min(self.hosts, default=self.rank)

    def leave(self) -> None:
        """End the use of the store, as each rank's last call: its host waits until the others have called this too."""
        store = dist.PrefixStore("leave", self.store)
        if store.add("count", 1) == self.world_size - len(self.absent):
            store.set("all", "")
        if self.is_host:
            with suppress(dist.DistStoreError):
                store.wait(["all"], _LEAVE_TIMEOUT)


def rendezvous(timeout: timedelta, environment: Mapping[str, str] | None = None) -> Rendezvous:
    """Wait for every rank of the job; communicates through a store, and makes no group.

    Args:
        timeout: how long to wait for the last rank.
        environment: a launcher's variables; by default those of this process. Without any, a world of one.

    Raises:
        LaunchError: the variables do not describe a job, or the store cannot be reached; unless the launcher hosts
            it, that means that rank 0 is absent.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in ("RANK", "WORLD_SIZE")):
        return Rendezvous(0, 1, (), {0: platform.node()}, dist.HashStore())
    check_environment(environment)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    by_launcher = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = rank == 0 and not by_launcher
    server = _connect(environment, timeout, is_host=is_host, by_launcher=by_launcher)
    # A launcher that starts the ranks again keeps its store, and the keys of the last attempt in it.
    attempt = (
        f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    store = dist.PrefixStore(f"namedmesh/doctor/{attempt}", server)
    store.set(f"host/{rank}", platform.node())
    missing: list[int] = []
    try:
        check_consistency("doctor", {}, ranks=range(world), rank=rank, store=store, timeout=timeout)
    except AgreementError:
        missing = [other for other in range(world) if not store.check([f"host/{other}"])]
    # The first list counts for all ranks: one that comes late finds itself in it.
    absent = tuple(json.loads(store.compare_set("absent", "", json.dumps(missing))))
    hosts = {other: store.get(f"host/{other}").decode() for other in range(world) if other not in absent}
    return Rendezvous(rank, world, absent, hosts, store, is_host)


def _connect(
    environment: Mapping[str, str], timeout: timedelta, *, is_host: bool, by_launcher: bool
) -> dist.TCPStore:
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        return dist.TCPStore(address, port, is_master=is_host, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        host = "the launcher" if by_launcher else "rank 0"
        raise LaunchError(
            f"{host}, which hosts the store at {address}:{port}, did not answer within {timeout.total_seconds():g} s; "
            f"look at what became of it, or at MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0]})"
        ) from None
