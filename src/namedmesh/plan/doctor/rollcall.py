"""Who is there: before any group is made, so that a rank that does not come is named instead of waited for."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.errors import LaunchError
from namedmesh.launch import check_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RollCall", "call_the_roll"]

_FAREWELL = timedelta(seconds=10)


@dataclass(frozen=True)
class RollCall:
    """What the ranks found out about each other.

    Args:
        rank: this rank.
        world_size: how many there should be.
        absent: those that did not come in time; the same on every rank that did.
        hosts: the machines of those that came, by rank.
        store: where they meet, also later.
        hosting: whether the store lives in this process.
    """

    rank: int
    world_size: int
    absent: tuple[int, ...]
    hosts: Mapping[int, str]
    store: dist.Store
    hosting: bool = False

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that prints: the lowest that is there."""
        return self.rank == min(self.hosts, default=self.rank)

    def part(self, name: str) -> None:
        """The last thing a rank does: who hosts the store stays until the others have read all they need."""
        board = dist.PrefixStore(f"farewell/{name}", self.store)
        if board.add("gone", 1) == self.world_size - len(self.absent):
            board.set("all", "")
        if self.hosting:
            _waited(board, "all", _FAREWELL)


def call_the_roll(timeout: timedelta, environment: Mapping[str, str] | None = None) -> RollCall:
    """Wait for every rank of the job; communicates through a store, and makes no group.

    Args:
        timeout: how long to wait for the last one.
        environment: a launcher's variables; by default those of this process. Without any, a world of one.

    Raises:
        LaunchError: the variables do not describe a job, or the store cannot be reached, which is rank 0's
            absence unless the launcher hosts it.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in ("RANK", "WORLD_SIZE")):
        return RollCall(0, 1, (), {0: platform.node()}, dist.HashStore())
    check_environment(environment)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _connected(environment, timeout, hosting=rank == 0 and not agent, agent=agent)
    # A launcher that starts the ranks again keeps its store, and what the last attempt left in it.
    attempt = (
        f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    )
    shared = dist.PrefixStore(f"namedmesh/doctor/{attempt}", store)
    board = dist.PrefixStore("roll", shared)
    board.set(f"here/{rank}", platform.node())
    if board.add("arrived", 1) == world:
        board.compare_set("verdict", "", "[]")
    if not _waited(board, "verdict", timeout):
        missing = [other for other in range(world) if not board.check([f"here/{other}"])]
        board.compare_set("verdict", "", json.dumps(missing))  # the first verdict is everybody's
    absent = tuple(json.loads(board.get("verdict")))
    hosts = {other: board.get(f"here/{other}").decode() for other in range(world) if other not in absent}
    return RollCall(rank, world, absent, hosts, shared, hosting=rank == 0 and not agent)


def _connected(
    environment: Mapping[str, str], timeout: timedelta, *, hosting: bool, agent: bool
) -> dist.TCPStore:
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        return dist.TCPStore(address, port, is_master=hosting, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        who = "the launcher" if agent else "rank 0"
        raise LaunchError(
            f"{who}, which hosts the store at {address}:{port}, did not answer within {timeout.total_seconds():g} s; "
            f"look at what became of it, or at MASTER_ADDR and MASTER_PORT ({str(error).splitlines()[0]})"
        ) from None


def _waited(board: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        board.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True
