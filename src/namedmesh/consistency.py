"""Ranks compare what they were asked for before they create a group, so that a mistake is an error, not a hang.

Every rank counts itself under a small hash in the store of the default group: a handful of requests a rank,
whatever the size of the world. Only when the hashes differ are the texts exchanged, and one rank writes the
verdict for all. The number of an attempt is kept in the store, not in the ranks: ranks that failed at different
moments agree again at their next try.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from namedmesh._torch import default_store, default_timeout, state_of_default_group
from namedmesh.errors import AgreementError, NamedMeshError, listing, ranks_in_words
from namedmesh.rendezvous import key_appeared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MISTAKE = "mistake"
"""The field of a request in which a rank says why it fails; the others then need no comparison."""

_HELD = "held groups"

# How long ranks that know of a failure wait for the one that words it, and for each other to read it.
_VERDICT_TIMEOUT = timedelta(seconds=60)

# Failures from before this moment belong to an earlier default group over the same store.
_born = time.time()


class Held(NamedTuple):
    """A group that a call wants, and which of its kind this rank holds already: its members must hold the same.

    Attributes:
        label: its axes, for messages.
        token: names the group that this rank holds; empty if it holds none.
        groups: lists the ranks of every group of this kind.
    """

    label: str
    token: str
    groups: Callable[[], Iterable[Sequence[int]]]


class _Attempts:
    """What this rank knows of the comparisons of one default group.

    Attributes:
        reported: the failed attempts that this rank has raised an error for, by scope and number.
        scopes: the sets of ranks that have compared anything, as far as this rank knows.
        alone: how many calls needed no comparison.
    """

    def __init__(self) -> None:
        self.reported: set[tuple[object, ...]] = set()
        self.scopes: list[range] = []
        self.alone = 0

    def end(self) -> None:
        """Date the next default group: failures before this moment are not its own."""
        global _born  # noqa: PLW0603  the start of the next default group's life
        _born = time.time()


def check_consistency(
    call: str,
    request: Mapping[str, str],
    *,
    ranks: range,
    rank: int,
    timeout: timedelta | None = None,
    held: Sequence[Held] = (),
) -> str:
    """Return once every rank of ``ranks`` has called this with the same request; communicates.

    Args:
        call: what is being called, for the message.
        request: what was asked for, field by field, as text.
        ranks: the global ranks that take part; all of them must call.
        rank: this rank.
        timeout: how long to wait for the other ranks; by default the timeout of the default group.
        held: the groups that the call wants.

    Returns:
        A text that no other comparison has, the same on every rank: groups created by this call exchange their
        addresses under it.

    Raises:
        AgreementError: on every rank, naming each field that differs and the ranks that differ in it; or,
            after ``timeout``, naming the ranks that did not call. A rank that calls after that gets the same
            error, at once; the next try of all ranks is compared anew.
    """
    attempts = state_of_default_group(_Attempts)
    scope = f"namedmesh/{ranks.start}-{ranks.stop}"
    if len(ranks) == 1 or dist.get_backend() == "fake":
        attempts.alone += 1  # there is nobody to ask
        return f"{scope}/alone{attempts.alone}"
    try:
        comparison = _Comparison(call, request, ranks, rank, timeout, held, attempts)
        problems = comparison.problems()
    except dist.DistNetworkError:
        raise AgreementError(
            f"the store of the default group is gone during {call}: the rank that hosts it, usually rank 0, has ended; "
            "see its output for why"
        ) from None
    if problems:
        raise AgreementError(*problems)
    return f"{scope}/{comparison.number}"


@contextmanager
def report_failure(call: str, ranks: range, timeout: timedelta | None = None) -> Iterator[None]:
    """Let the other ranks, which may be waiting in :func:`check_consistency`, know if this one fails before.

    Args:
        call: what is being called, as in the comparison that the others wait in.
        ranks: the global ranks that take part.
        timeout: how long to wait for them.
    """
    try:
        yield
    except NamedMeshError as error:
        check_consistency(call, {MISTAKE: str(error)}, ranks=ranks, rank=dist.get_rank(), timeout=timeout)
        raise


class _Comparison:
    """One attempt of some ranks to agree, as this rank takes part in it."""

    def __init__(  # noqa: PLR0917  one call
        self,
        call: str,
        request: Mapping[str, str],
        ranks: range,
        rank: int,
        timeout: timedelta | None,
        held: Sequence[Held],
        attempts: _Attempts,
    ) -> None:
        self.call, self.ranks, self.rank, self.held, self.attempts = call, ranks, rank, held, attempts
        self.request = {"call": call, **request, _HELD: json.dumps([group.token for group in held])}
        self.timeout = timeout or default_timeout() or timedelta(minutes=30)
        self.name = f"{ranks.start}-{ranks.stop}"
        self.scope = _scope(ranks)
        self.number = -1

    def problems(self) -> list[str]:
        """Take part, and return what is wrong; nothing if all ranks agree."""
        self.number = self.scope.add("attempt", 0)
        missed = (
            self._missed_failure()
        )  # after the number: a failure is recorded before the next attempt begins
        if missed:
            return missed
        store = self.store = dist.PrefixStore(str(self.number), self.scope)
        text = json.dumps(self.request, sort_keys=True)
        digest = f"digest/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        here = f"here/{self.rank}"
        store.set(here, self.call)
        store.add(digest, 1)
        if store.add("arrived", 1) < len(self.ranks):
            self._check_other_scopes()
        elif self._conclude():
            self.scope.add("attempt", 1)  # before anybody leaves this one
            store.set("verdict", "same" if store.add(digest, 0) == len(self.ranks) else "differ")
        if not key_appeared(store, "verdict", self.timeout) and self._conclude():
            self._report_absence()
        if not key_appeared(store, "verdict", _VERDICT_TIMEOUT):
            return [f"{self.call} failed on some ranks, and they ended before they could say why"]
        verdict = store.get("verdict").decode()
        if verdict == "differ":
            verdict = self._exchange()
        if verdict != "same":
            return self._read_problems(verdict)
        store.delete_key(here)
        if store.add("read", 1) == len(self.ranks):
            for key in (digest, "arrived", "concluded", "verdict", "read"):
                store.delete_key(key)
        return []

    def _conclude(self) -> bool:
        """Return whether this rank is the one that writes the verdict."""
        return self.store.add("concluded", 1) == 1

    def _missed_failure(self) -> list[str]:
        """Return the problems of the last failed attempt, if it failed because this rank did not come."""
        if not self.scope.check(["absence"]):
            return []
        absence = json.loads(self.scope.get("absence"))
        attempts = {tuple(attempt) for attempt in absence["attempts"]}
        if self.rank not in absence["ranks"] or attempts & self.attempts.reported or absence["time"] < _born:
            return []
        self.attempts.reported |= attempts
        problems: list[str] = absence["problems"]
        return problems

    def _report_absence(self) -> None:
        """Name the ranks that did not come, for those that did and for those that come now."""
        absent = [rank for rank in self.ranks if not self.store.check([f"here/{rank}"])]
        problem = (
            f"{ranks_in_words(absent)} of {self.ranks.start} to {self.ranks.stop - 1} did not call {self.call} within "
            f"{self.timeout.total_seconds():g} s; every rank of the mesh must call it, so look at what those ranks did "
            "instead"
        )
        self._fail(self.ranks, self.number, problem, absent, [(self.name, self.number)])

    def _fail(
        self, ranks: range, number: int, problem: str, absent: Sequence[int], attempts: list[tuple[str, int]]
    ) -> None:
        """Write why an attempt failed, also for the ranks that come to it later.

        ``attempts`` are those that failed for the same reason: no rank needs to hear of it twice.
        """
        scope = _scope(ranks)
        outcome = {"problems": [problem], "attempts": attempts}
        # In this order: whoever comes to the next attempt finds why this one failed.
        scope.set("absence", json.dumps(outcome | {"ranks": absent, "time": time.time()}))
        scope.add("attempt", 1)
        scope.set(f"{number}/verdict", json.dumps(outcome | {"readers": len(ranks) - len(absent)}))

    def _check_other_scopes(self) -> None:
        """Fail where a rank that this one waits for has come to a comparison of other ranks, and waits for this one.

        Whoever comes second finds the first: each says that it is here before it looks.
        """
        everything = dist.PrefixStore("namedmesh", default_store())
        if self.scope.add("registered", 1) == 1:
            everything.set(f"scope/{everything.add('scopes', 1)}", self.name)
        known = self.attempts.scopes
        for place in range(len(known), everything.add("scopes", 0)):
            start, _, stop = everything.get(f"scope/{place + 1}").decode().partition("-")
            known.append(range(int(start), int(stop)))
        for ranks in known:
            if ranks == self.ranks or self.rank not in ranks:
                continue
            scope = _scope(ranks)
            number = scope.add("attempt", 0)
            if scope.add(f"{number}/arrived", 0) > 0:
                self._check_scope(ranks, number)

    def _check_scope(self, ranks: range, number: int) -> None:
        scope = _scope(ranks)
        here = [rank for rank in ranks if scope.check([f"{number}/here/{rank}"])]
        waiting = [rank for rank in here if rank in self.ranks]
        if not waiting:
            return
        call = scope.get(f"{number}/here/{waiting[0]}").decode()
        sides = sorted(
            [
                (ranks.start, ranks.stop, call, waiting[0]),
                (self.ranks.start, self.ranks.stop, self.call, self.rank),
            ]
        )
        places = (
            f"rank {rank} is in {name} of ranks {first} to {end - 1}" for first, end, name, rank in sides
        )
        problem = (
            f"{' and '.join(places)}, and each waits for the other; give these ranks the same sizes, and let them make their "
            "meshes in the same order"
        )
        attempts = [(f"{ranks.start}-{ranks.stop}", number), (self.name, self.number)]
        arrived = [rank for rank in self.ranks if self.store.check([f"here/{rank}"])]
        for failed, attempt, present in ((ranks, number, here), (self.ranks, self.number, arrived)):
            if _scope(failed).add(f"{attempt}/concluded", 1) == 1:
                absent = [rank for rank in failed if rank not in present]
                self._fail(failed, attempt, problem, absent, attempts)

    def _exchange(self) -> str:
        """Write this rank's request to the store; the last rank to do so compares all of them."""
        store, everybody = self.store, len(self.ranks)
        store.set(f"request/{self.rank}", json.dumps(self.request))
        if store.add("exchanged", 1) == everybody:
            requests = [json.loads(store.get(f"request/{other}")) for other in self.ranks]
            problems = _differences(requests, self.ranks) or self._held_differences(requests)
            text = json.dumps({"readers": everybody, "problems": problems}) if problems else "same"
            store.set("problems", text)
            for other in self.ranks:
                store.delete_key(f"request/{other}")
        if not key_appeared(store, "problems", _VERDICT_TIMEOUT):
            problems = [
                f"the ranks do not agree on {self.call}, and some ended before they could say on what"
            ]
            return json.dumps({"readers": 0, "problems": problems})
        return store.get("problems").decode()

    def _held_differences(self, requests: Sequence[Mapping[str, str]]) -> list[str]:
        """Return one sentence for each group that only some of its members hold already, with the same request."""
        tokens = [json.loads(request[_HELD]) for request in requests]
        problems = []
        for place, requested in enumerate(self.held):
            for members in requested.groups():
                holders = [rank for rank in members if tokens[rank - self.ranks.start][place]]
                if len({tokens[rank - self.ranks.start][place] for rank in members}) > 1:
                    problems.append(
                        f"{self.call} needs the group over {requested.label} of ranks {listing(members)}, and it still belongs to "
                        f"an earlier mesh on {ranks_in_words(holders)} only; close() that mesh on every rank"
                    )
        return problems[:8]

    def _read_problems(self, verdict: str) -> list[str]:
        """Read a verdict, and stay until all have: a rank that hosts the store takes it along when it ends."""
        outcome = json.loads(verdict)
        self.attempts.reported |= {tuple(attempt) for attempt in outcome.get("attempts", ())}
        if self.store.add("read", 1) >= outcome["readers"]:
            self.store.set("all_read", "")
        key_appeared(self.store, "all_read", _VERDICT_TIMEOUT)
        problems: list[str] = outcome["problems"]
        return problems


def _scope(ranks: range) -> dist.Store:
    """Return where a set of ranks compares."""
    return dist.PrefixStore(f"namedmesh/{ranks.start}-{ranks.stop}", default_store())


def _differences(requests: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return one sentence for each field in which the requests differ.

    Example:
        >>> _differences([{"layout": "tp=2"}, {"layout": "tp=2"}, {"layout": "tp=1"}], [0, 1, 2])
        ['layout differs between ranks: tp=2 on ranks 0, 1; tp=1 on rank 2; give every rank the same']
    """
    mistakes: dict[str, list[int]] = defaultdict(list)
    for rank, request in zip(ranks, requests, strict=True):
        if MISTAKE in request:
            mistakes[f"gave up on {request['call']}: {request[MISTAKE]}"].append(rank)
    if mistakes:
        return [f"{ranks_in_words(who)} {text}" for text, who in [*mistakes.items()][:8]]
    problems = []
    fields = dict.fromkeys(field for request in requests for field in request if field != _HELD)
    for field in fields:
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, request in zip(ranks, requests, strict=True):
            holders[request.get(field, "nothing")].append(rank)
        if len(holders) > 1:
            # The value that most ranks hold first: the others are likely the mistake.
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = "; ".join(f"{value} on {ranks_in_words(holding)}" for value, holding in ordered)
            problems.append(f"{field} differs between ranks: {values}; give every rank the same")
    return problems
