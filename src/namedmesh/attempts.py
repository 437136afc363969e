"""How ranks meet in a store: numbered attempts, each of which has stages that all ranks come to.

All ranks *arrive*, each with what it was asked for; then each does it, and says when it is *made*. The number of an
attempt is kept in the store, and whoever comes late finds how that attempt ended. A store may outlive the processes that
use it: torchrun keeps its own when it restarts them. A rank that took part in the current attempt before, itself or
before a restart, starts the next one, and the ranks that wait in the old one follow.

A rank asks for a dozen keys an attempt, whatever the size of the world: the request that came first stands in the store,
and only ranks with another one add theirs. The last rank to arrive compares them.

Everything here runs in the thread that asks the store (:func:`namedmesh.store.ask`).
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.errors import ranks_in_words
from namedmesh.store import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from namedmesh.store import LimitedStore

    Compare = Callable[[Sequence[Mapping[str, str]]], list[str]]

GO, REPLACED = "go", "replaced"
"""What a stage holds that has ended, unless the attempt failed: the ranks go on, or another attempt takes its place."""
ARRIVED, ALIVE, MADE = "arrived", "alive", "made"
"""The stages. Where processes may be restarted, each confirms, after all have arrived, that it is still alive."""

# How long a rank waits for the one that words a failure, and the host of the store for those that are there to read it.
_LISTING_LIMIT = timedelta(seconds=5)
_READING_LIMIT = timedelta(seconds=10)
# How long the host waits for all ranks of a job, some of which may not have started.
_COMING_LIMIT = timedelta(seconds=60)

_FAILED = "failed "
_STAGES = (ARRIVED, ALIVE, MADE)
# Lists of texts in the store: of requests that differ from the first, and of what is wrong where there are several hosts.
_OTHER_REQUESTS, _UNREACHABLE = "other requests", "unreachable"
_SHOWN = 8


class Attempt(NamedTuple):
    """One attempt of some ranks: where its keys are."""

    scope: str  # names the ranks
    number: int

    @property
    def name(self) -> str:
        """A text that names this attempt only."""
        return f"{self.scope}/{self.number}"

    def key(self, key: str) -> str:
        """Return a key of this attempt."""
        return f"{self.name}/{key}"

    def place(self, rank: int) -> str:
        """Return the key under which a rank says where it is: the number of an attempt, its stage, the process."""
        return f"{self.scope}/rank/{rank}"

    def verdict(self, store: LimitedStore, stage: str) -> str:
        """Return how a stage ended; empty if it has not."""
        key = self.key(stage)
        return store.get(key) if store.has(key) else ""

    def end(self, store: LimitedStore, verdict: str) -> str:
        """End every stage that has not ended, with one verdict; returns that of the last stage, which decides."""
        final = store.first(self.key(MADE), verdict)
        for stage in (ARRIVED, ALIVE):
            store.first(self.key(stage), final)
        return final

    def count_in(self, store: LimitedStore, stage: str) -> int:
        """Count this rank among those that have come to a stage, and return how many have."""
        return store.add(self.key(f"{stage}/count"))


@dataclass
class Progress:
    """The last attempt of some ranks that this process entered, its mark there, and what it told the others."""

    entered: int = -1
    mark: str = ""
    told: list[str] = field(default_factory=list)


class Agreements:
    """What this process knows of the attempts in one store; each default group has its own.

    Args:
        generation: which life of the job this is, without a colon: a failure in an earlier one is none of a later
            one's. By default over how many default groups this process has agreed before.

    Attributes:
        lock: held during an agreement, so that those of several threads follow one another.
        store: the connection over which the ranks agree; one that waits serves nobody else meanwhile.
    """

    _ended = 0

    def __init__(self, generation: str | None = None) -> None:
        self.generation = str(Agreements._ended) if generation is None else generation
        self.lock = threading.RLock()
        self.store: dist.Store | None = None
        self.process = os.urandom(6).hex()
        self.progress: defaultdict[range, Progress] = defaultdict(Progress)
        self.scopes: list[str] = []
        # Attempts that failed for a reason that this process has heard.
        self.heard: set[str] = set()
        self.alone = 0

    def end(self) -> None:
        """Count another default group that was destroyed, if ranks have agreed on something over it."""
        self.store = None
        if self.progress:
            Agreements._ended += 1


class Participant:
    """One rank in the attempts of one call; what it is made with is said at :class:`namedmesh.agreement.Agreement`."""

    def __init__(  # noqa: PLR0917  one call
        self, call: str, of: str, ranks: range, rank: int, timeout: timedelta, known: Agreements
    ) -> None:
        self.call, self.of, self.ranks, self.rank = call, of, ranks, rank
        self.timeout, self.known = timeout, known
        self.scope = f"{ranks.start}-{ranks.stop}"
        self.attempt = Attempt(self.scope, -1)
        # Whoever gives up because of a signal waits for the thread that was entering an attempt, and enters no other one.
        self._entering = threading.RLock()

    def enter(self, store: LimitedStore) -> str:
        """Enter the current attempt, or start the next one; returns the verdict of a failed one that was missed."""
        with self._entering:
            return self._enter(store)

    def _enter(self, store: LimitedStore) -> str:
        progress, place = self.known.progress[self.ranks], self.attempt.place(self.rank)
        before = progress.mark or store.first(place, "-1")
        entered = latest = progress.entered if progress.mark else int(before.partition(" ")[0])
        verdict = REPLACED
        while verdict:
            old = "" if latest < 0 else str(latest)
            number = int(store.swap(f"{self.scope}/attempt", old, str(latest + 1)))
            # One after the other: each stands for a call of this rank, unless it was started again since.
            restarted = latest >= 0 and not progress.mark
            for missed in range(max(latest + 1, number - 1) if restarted else latest + 1, number + 1):
                verdict = Attempt(self.scope, missed).verdict(store, MADE)
                if self._is_news(verdict):
                    self._go_to(missed, progress)
                    store.set(place, progress.mark)
                    self.attempt.count_in(store, ARRIVED)
                    return verdict
            latest = number  # if it has ended, then without this rank, before the job was started again
        if entered >= 0 and not progress.mark:
            # This rank was in that one before a restart, and others may still wait for it there.
            Attempt(self.scope, entered).end(store, REPLACED)
        self._go_to(number, progress)
        if store.swap(place, before, progress.mark) != progress.mark:
            return self.fail(
                store,
                f"two processes call {self.call} as rank {self.rank}; give each its own RANK, and each job on a machine its "
                "own MASTER_PORT",
            )
        return GO

    def note_host(self, store: LimitedStore, host: str, problem: str | None) -> None:
        """Say on which host this rank is, and what is wrong where there are several; before it arrives."""
        if store.first(self.attempt.key("host"), host) != host:
            store.set(self.attempt.key("several hosts"), "")
        if problem is not None:
            self._append(store, _UNREACHABLE, f"{ranks_in_words([self.rank])}: {problem}")

    def arrive(self, store: LimitedStore, request: Mapping[str, str], compare: Compare) -> str:
        """Arrive with a request, and return the verdict once all ranks have; the last one compares their requests."""
        text = json.dumps({"_call": self.call, **request})
        first = store.first(self.attempt.key("request"), text)
        if first != text:
            self._append(store, _OTHER_REQUESTS, json.dumps([self.rank, json.loads(text)]))
        if self.attempt.count_in(store, ARRIVED) < len(self.ranks):
            self._look_elsewhere(store)
            return self._wait(store, ARRIVED)
        problems: list[str] = []
        if others := self._list(store, _OTHER_REQUESTS):
            requests: dict[int, Mapping[str, str]] = dict.fromkeys(self.ranks, json.loads(first))
            requests |= dict(json.loads(other) for other in others)
            problems = compare([*requests.values()])
        if not problems and store.has(self.attempt.key("several hosts")):
            problems = self._list(store, _UNREACHABLE)[:_SHOWN]
        if problems:
            return self.fail(store, *problems)
        verdict = store.first(self.attempt.key(ARRIVED), GO)
        self._tidy(store)
        return verdict

    def come_to(self, stage: str, store: LimitedStore) -> str:
        """Say that this rank has come to a stage after the first, and return the verdict once all have."""
        store.set(self.attempt.place(self.rank), self._mark(stage))
        if self.attempt.count_in(store, stage) == len(self.ranks):
            store.first(self.attempt.key(stage), GO)
        return self._wait(store, stage)

    def tell(self, store: LimitedStore, texts: Mapping[str, str]) -> None:
        """Put texts into the store that the others read after a later stage of this attempt, and not in the next one."""
        named = {self.attempt.key(key): text for key, text in texts.items()}
        store.set_all(named)
        self.known.progress[self.ranks].told = list(named)

    def hear(self, store: LimitedStore, keys: list[str]) -> list[str] | None:
        """Return what others told in this attempt; None if some of it is not there."""
        names = [self.attempt.key(key) for key in keys]
        return store.get_all(names) if not names or store.has(*names) else None

    def forget(self, store: LimitedStore) -> None:
        """Delete what this rank told in the attempt before, now that all ranks have come to this one."""
        progress = self.known.progress[self.ranks]
        store.delete(*progress.told)
        progress.told = []

    def give_up(self, store: LimitedStore, reason: str) -> str:
        """Let the attempt fail because of this rank, which enters one unless it has; returns the verdict."""
        if not self._entering.acquire(timeout=_READING_LIMIT.total_seconds()):
            raise StoreLostError("it does not answer a thread that was interrupted")
        try:
            verdict = REPLACED if self.attempt.number < 0 else GO
            while verdict == REPLACED:
                verdict = self.enter(store)
                if verdict == GO:
                    self.attempt.count_in(store, ARRIVED)
        finally:
            self._entering.release()
        return self.fail(store, f"rank {self.rank} gave up on {self.call}: {reason}")

    def leave(self, store: LimitedStore, readers: int, *, is_host: bool) -> None:
        """Leave a failed attempt. The host of the store waits for those that have arrived, or for ``readers`` ranks."""
        key = self.attempt.key
        store.set(key(f"read/{store.add(key('read'))}"), "")
        if is_host:
            expected = readers or store.add(key(f"{ARRIVED}/count"), 0)
            store.appears(key(f"read/{expected}"), _COMING_LIMIT if readers else _READING_LIMIT)

    def fail(self, store: LimitedStore, *problems: str) -> str:
        """Let the attempt fail, unless it has; returns its verdict."""
        return self.attempt.end(store, self.failure(problems))

    def failure(self, problems: Sequence[str], *others: Attempt) -> str:
        """Return the verdict of this attempt, if it fails, and of others for the same reason: no rank hears it twice."""
        attempts = [each.name for each in (*others, self.attempt)]
        return f"{_FAILED}{self.known.generation}:{json.dumps([problems, attempts])}"

    def read(self, verdict: str) -> list[str]:
        """Return why an attempt failed, from its verdict, and remember that this process has heard of it."""
        problems, attempts = json.loads(verdict.partition(":")[2])
        self.known.heard |= set(attempts)
        return list(problems)

    def _is_news(self, verdict: str) -> bool:
        """Return whether a verdict is a failure in this life of the job, of which this process has not heard."""
        if not verdict.startswith(f"{_FAILED}{self.known.generation}:"):
            return False
        _, attempts = json.loads(verdict.partition(":")[2])
        return self.known.heard.isdisjoint(attempts)

    def _wait(self, store: LimitedStore, stage: str) -> str:
        """Wait until all have come to a stage, or the attempt ends; returns the verdict. Names those that are absent."""
        if store.appears(self.attempt.key(stage), self.timeout):
            return store.get(self.attempt.key(stage))
        span = f"{self.ranks.start} to {self.ranks.stop - 1}"
        if store.add(self.attempt.key("late")) > 1:  # another rank looks for the absent ones
            store.appears(self.attempt.key(stage), _READING_LIMIT)
            return self.fail(store, f"some ranks of {span} did not call {self.call} in time")
        here = [f"{self.attempt.number} {each}" for each in _STAGES[_STAGES.index(stage) :]]
        places = {rank: store.first(self.attempt.place(rank), "-1").rpartition(" ")[0] for rank in self.ranks}
        who = ranks_in_words([rank for rank, place in places.items() if place not in here])
        limit = f"within {self.timeout.total_seconds():g} s"
        if stage == ARRIVED:
            return self.fail(
                store,
                f"{who} of {span} did not call {self.call} {limit}; every rank of the {self.of} must call it, so look at what "
                "those ranks did instead",
            )
        return self.fail(
            store,
            f"{who} of {span} agreed to {self.call}, and did not end it {limit}; see the output of those ranks",
        )

    def _look_elsewhere(self, store: LimitedStore) -> None:
        """Fail where a rank that this one waits for has come to an attempt of other ranks, and waits for this one.

        Whoever comes second finds the first: each says that it is here, and its ranks are listed, before it looks.
        """
        scopes, listed = self.known.scopes, f"{self.scope}/listed"
        if self.scope not in scopes:
            first = store.add(f"{listed}/count") == 1
            if first or not store.appears(listed, _LISTING_LIMIT):  # the first one may have ended in between
                store.set(f"scopes/{store.add('scopes')}", self.scope)
                store.set(listed, "")
        for place in range(len(scopes), store.add("scopes", 0)):
            key = f"scopes/{place + 1}"
            listed_there = store.has(key)  # a rank may have ended before it set its own
            scopes.append(store.get(key) if listed_there else "")
        for scope in scopes:
            if scope in {"", self.scope}:
                continue
            ranks = range(*map(int, scope.split("-")))
            if self.rank in ranks:
                self._look_at(store, scope, ranks)

    def _look_at(self, store: LimitedStore, scope: str, ranks: range) -> None:
        """Fail, and let the current attempt of other ranks fail, if one of these waits there."""
        number = store.first(f"{scope}/attempt", "0")
        there = Attempt(scope, int(number))
        if there.verdict(store, ARRIVED):
            return
        here = [rank for rank in ranks if store.first(there.place(rank), "-1").partition(" ")[0] == number]
        waiting = [rank for rank in here if rank in self.ranks]
        if not waiting or not store.has(there.key("request")):
            return
        call = json.loads(store.get(there.key("request")))["_call"]
        sides = [(ranks.start, ranks.stop, call, waiting[0])]
        sides.append((self.ranks.start, self.ranks.stop, self.call, self.rank))
        places = [
            f"rank {rank} is in {name} of ranks {start} to {stop - 1}"
            for start, stop, name, rank in sorted(sides)
        ]
        problem = (
            f"{' and '.join(places)}, and each waits for the other; give these ranks the same sizes, and let them make their "
            "meshes in the same order"
        )
        verdict = self.failure([problem], there)
        for attempt in (there, self.attempt):
            attempt.end(store, verdict)

    def _tidy(self, store: LimitedStore) -> None:
        """Delete what the attempt before put into the store: whoever has come to this one has left it."""
        before = Attempt(self.scope, self.attempt.number - 1)
        keys = ("request", "host", *_STAGES, *(f"{stage}/count" for stage in _STAGES))
        store.delete(*map(before.key, keys))

    def _go_to(self, number: int, progress: Progress) -> None:
        self.attempt = Attempt(self.scope, number)
        progress.entered, progress.mark = number, self._mark(ARRIVED)

    def _mark(self, stage: str) -> str:
        mark = f"{self.attempt.number} {stage} {self.known.process}"
        self.known.progress[self.ranks].mark = mark
        return mark

    def _append(self, store: LimitedStore, key: str, text: str) -> None:
        whole = self.attempt.key(key)
        store.set(f"{whole}/{store.add(whole)}", text)

    def _list(self, store: LimitedStore, key: str) -> list[str]:
        whole = self.attempt.key(key)
        return [store.get(f"{whole}/{place + 1}") for place in range(store.add(whole, 0))]
