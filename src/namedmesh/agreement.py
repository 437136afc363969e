"""Ranks compare what they were asked for before they make a group, so that a mistake is an error, not a hang.

Every rank counts itself under a small hash in the store of the default group: a handful of requests a rank,
whatever the size of the world. Only when the hashes differ are the texts exchanged, and one rank writes the
verdict for all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh._torch import default_store, default_timeout
from namedmesh.errors import AgreementError, NamedMeshError, listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MISTAKE", "agree", "telling"]

MISTAKE = "mistake"
"""The field of a request in which a rank says why it gives up; the others then need no comparison."""

# Serial number of the next comparison among the same ranks, so that no two share their keys in the store.
_serials: Counter[tuple[int, int]] = Counter()

# How long ranks that know of a failure wait for the one that words it.
_VERDICT_TIMEOUT = timedelta(seconds=60)


def agree(
    call: str,
    request: Mapping[str, str],
    *,
    ranks: range,
    rank: int,
    store: dist.Store | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Return once every rank of ``ranks`` has called this with the same request; communicates.

    Args:
        call: what is being called, for the message.
        request: what was asked for, field by field, in words.
        ranks: the global ranks that take part; all of them must call.
        rank: this rank.
        store: where to compare; by default the store of the default group.
        timeout: how long to wait for the other ranks; by default the timeout of the default group.

    Raises:
        AgreementError: on every rank, naming each field that differs and the ranks that differ in it; or,
            after ``timeout``, naming the ranks that did not call.
    """
    if len(ranks) == 1 or (store is None and dist.get_backend() == "fake"):
        return  # there is nobody to ask
    timeout = timeout or default_timeout() or timedelta(minutes=30)
    scope = (ranks.start, ranks.stop)
    _serials[scope] += 1
    prefix = f"namedmesh/{ranks.start}-{ranks.stop}/{_serials[scope]}"
    board = dist.PrefixStore(prefix, store or default_store())
    text = json.dumps(dict(request), sort_keys=True)
    digest = f"digest/{hashlib.sha256(f'{call} {text}'.encode()).hexdigest()[:16]}"
    here = f"here/{rank}"
    board.set(here, "")
    board.add(digest, 1)
    if board.add("arrived", 1) == len(ranks):
        if board.add(digest, 0) != len(ranks):
            board.set("differ", "")
        board.set("compared", "")
    if not _waited(board, "compared", timeout):
        raise AgreementError(_absence(board, call, ranks, timeout))
    if not board.check(["differ"]):
        board.delete_key(here)
        return
    _tell(board, {"call": call, **request}, ranks, rank)
    if not _waited(board, "problems", _VERDICT_TIMEOUT):
        raise AgreementError(
            f"the ranks do not agree on {call}, and some ended before they could say on what"
        )
    problems = json.loads(board.get("problems"))
    # A rank that hosts the store takes it along when it ends: stay until all have read.
    if board.add("read", 1) == len(ranks):
        board.set("all_read", "")
    _waited(board, "all_read", _VERDICT_TIMEOUT)
    raise AgreementError(*problems)


@contextmanager
def telling(call: str, ranks: range, timeout: timedelta | None = None) -> Iterator[None]:
    """Let the other ranks, which may be fine and waiting in :func:`agree`, know if this one gives up.

    Args:
        call: what is being called, as in the comparison that the others wait in.
        ranks: the global ranks that take part.
        timeout: how long to wait for them.
    """
    try:
        yield
    except NamedMeshError as error:
        agree(call, {MISTAKE: str(error)}, ranks=ranks, rank=dist.get_rank(), timeout=timeout)
        raise


def _waited(board: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        board.wait([key], timeout)
    except dist.DistStoreError:
        return False
    return True


def _absence(board: dist.Store, call: str, ranks: range, timeout: timedelta) -> str:
    """Who did not come; worded by the first rank that asks, because it has to look at every rank."""
    if board.add("late", 1) == 1:
        absent = [rank for rank in ranks if not board.check([f"here/{rank}"])]
        who = "rank " + listing(absent) if len(absent) == 1 else "ranks " + listing(absent)
        board.set(
            "absence",
            f"{who} of {ranks.start} to {ranks.stop - 1} did not call {call} within {timeout.total_seconds():g} s; "
            "every rank of the mesh must call it, so look at what those ranks did instead",
        )
    if not _waited(board, "absence", _VERDICT_TIMEOUT):
        return f"some ranks of {ranks.start} to {ranks.stop - 1} did not call {call} in time"
    return board.get("absence").decode()


def _tell(board: dist.Store, request: Mapping[str, str], ranks: range, rank: int) -> None:
    """Put this rank's request on the board; the last one to do so compares all of them."""
    board.set(f"request/{rank}", json.dumps(dict(request)))
    if board.add("told", 1) == len(ranks):
        requests = [json.loads(board.get(f"request/{other}")) for other in ranks]
        board.set("problems", json.dumps(_differences(requests, ranks)))


def _differences(requests: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """One sentence for each field in which the requests differ.

    Example:
        >>> _differences([{"layout": "tp=2"}, {"layout": "tp=2"}, {"layout": "tp=1"}], [0, 1, 2])
        ['layout differs between ranks: tp=2 on ranks 0, 1; tp=1 on rank 2; give every rank the same']
    """
    gave_up = [
        f"rank {rank} gave up on {request['call']}: {request[MISTAKE]}"
        for rank, request in zip(ranks, requests, strict=True)
        if MISTAKE in request
    ]
    if gave_up:
        return gave_up
    problems = []
    for field in dict.fromkeys(field for request in requests for field in request):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, request in zip(ranks, requests, strict=True):
            holders[request.get(field, "nothing")].append(rank)
        if len(holders) > 1:
            # The value that most ranks hold first: the others are likely the mistake.
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            said = "; ".join(
                f"{value} on rank{'s' * (len(who) > 1)} {listing(who)}" for value, who in ordered
            )
            problems.append(f"{field} differs between ranks: {said}; give every rank the same")
    return problems
