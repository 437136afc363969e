"""The ranks of a job meet in a store before they make the default group; who waits in vain says for whom.

A store may outlive the processes that use it: torchrun keeps its own when it restarts them, and a call that
failed may be made again. So the ranks meet in rounds. A rank that was in the present round before opens the
next one and sends on whoever waits in the old one; what its predecessors left there misleads nobody. A rank
that comes after the others gave up is told why, and takes part in the next round when it calls again.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.errors import AgreementError, LaunchError, listing

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["hosts_store", "meet", "open_store"]

# What becomes of a round: all ranks were there, or they go on to the next one, or what follows is why they gave up.
_TOGETHER, _MOVED, _GAVE_UP = "together", "moved", "gave up in life "
# How long ranks that know of a failure stay for the others.
_FAREWELL = timedelta(seconds=60)
# The stores that this process hosts for ranks that failed to meet: latecomers, and the next try, find them.
_kept: list[dist.Store] = []


def hosts_store(environment: Mapping[str, str], rank: int) -> bool:
    """Whether this rank hosts the store: rank 0 does, unless torchrun's agent has one already."""
    return rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """The store at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        LaunchError: rank 0 cannot host it there.
        AgreementError: another rank does not reach it within ``timeout``.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    hosting = hosts_store(environment, rank)
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=hosting,
            timeout=timeout,
            wait_for_workers=False,  # meet() does, and says who is missing
            multi_tenant=True,
            use_libuv=environment.get("USE_LIBUV", "1") == "1",
        )
    except dist.DistError as error:
        if hosting:
            reason = str(error).partition("\n")[0]
            raise LaunchError(
                f"rank 0 cannot host the store of the job at {host}:{port} ({reason}); set MASTER_ADDR to its host and "
                "MASTER_PORT to a port that is free there, the same on every rank"
            ) from None
        owner = "rank 0" if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else "torchrun's agent"
        raise AgreementError(
            f"rank {rank} did not reach the store of the job at {host}:{port} within {timeout.total_seconds():g} s; "
            f"{owner} hosts it there, so look at what became of that, and whether the address is right"
        ) from None


def meet(
    store: dist.Store,
    call: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    hosting: bool = False,
    life: str = "",
    mistake: str | None = None,
) -> dist.Store:
    """Return once every rank is here; communicates.

    Args:
        store: any store that all ranks share.
        call: what the ranks have called, for the message.
        rank: this rank.
        world_size: how many ranks there are.
        timeout: how long to wait for the others.
        hosting: whether the store ends with this process, which then stays until the others know.
        life: how often the processes were restarted, if the store outlives that; no colon.
        mistake: why this rank gives up; the others are told, and this one returns.

    Returns:
        A part of the store that nothing has written to: on every rank the same, at each meeting another.

    Raises:
        AgreementError: some ranks did not come within ``timeout``, or one gave up; on every rank the same,
            also on one that comes later. The next meeting of all ranks works.
    """
    board = dist.PrefixStore("namedmesh/launch", store)
    try:
        verdict = _MOVED
        while verdict == _MOVED:
            number, told = _entered(board, rank, life)
            hall = _hall(board, number)
            if told is not None:
                verdict = told
            elif mistake is not None:
                hall.add("arrived", 1)
                verdict = _decided(hall, f"{_GAVE_UP}{life}:rank {rank} gave up on {call}: {mistake}")
            else:
                verdict = _awaited(board, hall, number, call, rank, world_size, timeout, life)
        if verdict != _TOGETHER:
            _part(hall, store, world_size if mistake else hall.add("arrived", 0), hosting=hosting)
    except dist.DistNetworkError:
        if mistake is None:
            raise AgreementError(
                f"the store of the job ended while rank {rank} waited in {call}; look at what became of rank 0"
            ) from None
        return store
    if verdict == _TOGETHER:
        _kept.clear()
    elif mistake is None:
        raise AgreementError(verdict.partition(":")[2])
    return dist.PrefixStore(f"default_pg/{number}", store)


def _hall(board: dist.Store, number: int) -> dist.Store:
    return dist.PrefixStore(str(number), board)


def _entered(board: dist.Store, rank: int, life: str) -> tuple[int, str | None]:
    """The number of the round that this rank takes part in; or of one that it missed, and why it failed."""
    number = int(board.compare_set("round", "", "0"))
    mark = _mark(board, rank).partition(" ")[0]
    last = int(mark) if mark else -1
    for missed in range(max(last + 1, number - 1), number + 1):
        hall = _hall(board, missed)
        verdict = hall.get("verdict").decode() if hall.check(["verdict"]) else ""
        if verdict.startswith(f"{_GAVE_UP}{life}:"):
            board.set(f"rank/{rank}", str(missed))
            return missed, verdict
    if (
        last == number or verdict
    ):  # it, or its predecessor, was in this one; or the others were, in another life
        # Another rank may have been faster, and in the next one already.
        old, number = number, int(board.compare_set("round", str(number), str(number + 1)))
        _decided(_hall(board, old), _MOVED)
    board.set(f"rank/{rank}", str(number))
    return number, None


def _mark(board: dist.Store, rank: int) -> str:
    """Which round a rank was in last, and whether it saw that everybody had arrived."""
    return board.compare_set(f"rank/{rank}", "", " nowhere").decode()


def _awaited(  # noqa: PLR0917
    board: dist.Store,
    hall: dist.Store,
    number: int,
    call: str,
    rank: int,
    world_size: int,
    timeout: timedelta,
    life: str,
) -> str:
    """What becomes of a round.

    Ranks arrive, and once all have, confirm it: in the place of one that arrived and was restarted since, its
    successor arrives in vain, because it does not confirm.
    """
    here = [f"{number}", f"{number} confirmed"]
    if hall.add("arrived", 1) == world_size:
        hall.set("arrived by all", "")
    if _waited(hall, "arrived by all", timeout):
        here = here[1:]
        board.set(f"rank/{rank}", here[0])
        if hall.add("confirmed", 1) == world_size:
            _decided(hall, _TOGETHER)
        if _waited(hall, "verdict", timeout):
            return hall.get("verdict").decode()
    if hall.check(["verdict"]) or hall.add("late", 1) > 1:
        # Another rank looks for those who are missing.
        _waited(hall, "verdict", _FAREWELL)
        return _decided(
            hall, f"{_GAVE_UP}{life}:some ranks of 0 to {world_size - 1} did not call {call} in time"
        )
    absent = [other for other in range(world_size) if _mark(board, other) not in here]
    who = "rank " + listing(absent) if len(absent) == 1 else "ranks " + listing(absent)
    return _decided(
        hall,
        f"{_GAVE_UP}{life}:{who} of 0 to {world_size - 1} did not call {call} within {timeout.total_seconds():g} s; every rank of the "
        "job must call it, so look at what those ranks did instead",
    )


def _decided(hall: dist.Store, verdict: str) -> str:
    """Decide what becomes of a round, unless it is decided already; what was decided first holds for all."""
    decided = hall.compare_set("verdict", "", verdict).decode()
    hall.set("arrived by all", "")  # nobody needs to wait for more
    return decided


def _part(hall: dist.Store, store: dist.Store, readers: int, *, hosting: bool) -> None:
    """Leave a round that failed; who hosts the store stays until the others have read why."""
    with suppress(dist.DistNetworkError):  # it may be gone at once
        hall.set(f"read/{hall.add('read', 1)}", "")
    if hosting:
        _waited(hall, f"read/{readers}", _FAREWELL)
        _kept[:] = [store]


def _waited(store: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # a FileStore knows no DistStoreError
        return False
    return True
