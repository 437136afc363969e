"""Ranks agree on a call before they do what cannot be undone, and learn whether all of them did it.

A mistake on one rank is then an error that names the rank and the field, on all of them, and not a hang.

Every rank counts its calls over a range of ranks, so the same call has the same number on all of them: it is an
*attempt*. In each one the ranks meet at stages. All *arrive*, each with what it was asked for; then each does it, and all
meet again when it is *made*. The last rank to come ends a stage with "go"; whoever finds something wrong, or waits too
long, ends all of them with the reason, which is there for those that come later.

A store may outlive the processes that use it: torchrun keeps its own when it restarts them. The count of a rank is kept
in the store. A process that finds one there goes on to the next attempt, and sends those after it that wait in the old one.

A rank asks ten questions an agreement, whatever the size of the world: the request that came first stands in the store,
and only ranks with another one add theirs. The last rank to arrive compares them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh._torch import new_connection
from namedmesh.errors import AgreementError, NamedMeshError, ranks_in_words
from namedmesh.hosts import host_identity, loopback_problem
from namedmesh.store import (
    ANSWER_LIMIT,
    LOOK_EVERY,
    NO_ANSWER,
    StoreLostError,
    ask,
    in_thread,
    open_in_thread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

    from typing_extensions import Self

    from namedmesh.store import LimitedStore

    Compare = Callable[[Sequence[Mapping[str, str]]], list[str]]

__all__ = ["Agreement", "Agreements"]

_GO, _REPLACED, _FAILED = "go", "replaced", "failed "
"""How a stage ended: the ranks go on, or another attempt takes its place, or (this begins the text) the attempt failed."""
_STAGES = _ARRIVED, _ALIVE, _MADE = "arrived", "alive", "made"
"""Where processes may be restarted, each confirms, after all have arrived, that it is still alive."""

# How long a rank waits for the one that words a failure, and the host of the store for those that are there to read it.
_READING_LIMIT = timedelta(seconds=10)
# How long the host waits for all ranks of a job, some of which may not have started; and how long a rank that cannot go
# on looks for the store, to tell the others why. One that is interrupted looks for less, and has then so long to tell.
_COMING_LIMIT, _OPENING_LIMIT, _TELLING_LIMIT = (timedelta(seconds=seconds) for seconds in (60, 3, 10))
# While a call blocks that waits for other ranks, every this many seconds this one asks whether they have given up.
_LOOK_EVERY = 2.0
# Of problems with hosts, so many are shown.
_SHOWN = 8


class Agreements:
    """What this process knows of the agreements in one store; each default group has its own.

    Args:
        open_store: opens the store within a time.
        generation: which life of the job this is, without a colon: a failure in an earlier one is none of a later
            one's. By default over how many default groups this process has agreed before.

    Attributes:
        lock: held during an agreement, so that those of several threads follow one another.
        opened: the store, once it was asked.
        process: names this process, and the life of the job.
        places: where this process said last that it is, over each range of ranks: attempt, process and stage.
        told: the keys of what this process told last, over each range of ranks.
        heard: attempts that failed for a reason that this process was told, also where it was in another one.
        alone: how often there was nobody to agree with.
    """

    _ended = 0

    def __init__(self, open_store: Callable[[timedelta], dist.Store], generation: str | None = None) -> None:
        self.open_store = open_store
        self.generation = str(Agreements._ended) if generation is None else generation
        self.lock = threading.RLock()
        self.opened: dist.Store | None = None
        self.process = f"{self.generation}:{os.urandom(6).hex()}"
        self.places: dict[range, str] = {}
        self.told: dict[range, tuple[str, ...]] = {}
        self.heard: set[str] = set()
        self.alone = 0

    def end(self) -> None:
        """Count another default group that was destroyed, if ranks have agreed on something over it."""
        self.opened = None
        if self.places:
            Agreements._ended += 1


class Agreement:
    """One call of some ranks, as this rank takes part in it: a context in which it compares, and then acts.

    An exception that leaves the context is told to the other ranks, which fail as well. Otherwise the context ends when
    all ranks have come to its end. Nothing is asked before :meth:`compare`, or an exception.

    Args:
        call: what is being called, for messages.
        ranks: the ranks that take part; all of them must call.
        rank: this one.
        known: what this process knows of earlier agreements, and their store.
        timeout: how long to wait for the other ranks, in each stage.
        of: what the ranks are those of, for messages.
        hosts_store: whether the store ends with this process, which therefore is the last to leave after a failure.
        alone: whether there is nobody to agree with.

    Attributes:
        token: names this agreement, the same on all ranks, and never used again; empty before :meth:`compare`.
    """

    def __init__(
        self,
        call: str,
        *,
        ranks: range,
        rank: int,
        known: Agreements,
        timeout: timedelta,
        of: str = "mesh",
        hosts_store: bool = False,
        alone: bool = False,
    ) -> None:
        self.call, self.ranks, self.rank, self.known = call, ranks, rank, known
        self.token = ""
        self._timeout, self._of, self._hosts_store = timeout, of, hosts_store
        self._alone = alone or len(ranks) == 1
        self._limit = min(ANSWER_LIMIT, max(5.0, timeout.total_seconds()))
        self._scope, self._number, self._attempt = f"{ranks.start}-{ranks.stop}", -1, ""
        self._entering = threading.Lock()
        # By name: what this rank tells, together with which ranks, and what takes their texts.
        self._exchanges: dict[str, tuple[str, Sequence[int], Callable[[int, str], object] | None]] = {}
        self._request = ""  # the key of that of this rank, if it differs
        self._failed = self._terminated = False

    def __enter__(self) -> Self:
        self.known.lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.token and not self._alone:
                self._finish()
        except BaseException as late:
            error = late
            raise
        finally:
            try:
                if error is not None and not self._failed and not self._alone:
                    self._tell(error)
            finally:  # a second Ctrl-C may end the telling
                self.known.lock.release()
                if self._terminated:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    signal.raise_signal(signal.SIGTERM)

    def compare(
        self,
        request: Mapping[str, str],
        compare: Compare = lambda _: [],
        *,
        may_restart: bool = False,
        uses_gloo: bool = False,
    ) -> None:
        """Return once every rank has called this with the same request; communicates.

        Args:
            request: what was asked for, field by field, as text. Fields whose names begin with "_" may differ.
            compare: returns what is wrong with the requests of all ranks, in their order, if nothing differs.
            may_restart: whether a launcher may restart a process that has called this, and the call goes on.
            uses_gloo: whether gloo will connect the ranks, which then also compare their addresses.

        Raises:
            AgreementError: on every rank, naming each field that differs and the ranks that differ in it; or, after the
                timeout, naming the ranks that did not call. A rank that calls after that gets the same error, at once;
                the next try of all ranks is compared anew.
        """
        if self._alone:
            self.known.alone += 1  # there is nobody to ask
            self.token = f"alone/{self.rank}/{self.known.alone}"
            return
        fields = {"_call": self.call, **request}
        if uses_gloo:
            fields |= {"_host": host_identity(), "_unreachable": loopback_problem() or ""}
        text = json.dumps(fields)

        def questions(store: LimitedStore) -> str:
            verdict = _REPLACED
            while verdict == _REPLACED:
                self._enter(store, self._number)
                if store.first(f"{self._attempt}/request", text) != text:
                    others = f"{self._attempt}/other requests"
                    self._request = f"{others}/{store.add(others)}"
                    store.set(self._request, json.dumps([self.rank, fields]))
                verdict = self._come_to(_ARRIVED, store, lambda: self._problems(store, compare))
                if verdict == _GO and may_restart:
                    self._say(store, _ALIVE, {})
                    verdict = self._come_to(_ALIVE, store)
            return verdict

        self._ask(questions)
        self.token = self._attempt

    def exchange(
        self, name: str, text: str, among: Sequence[int], take: Callable[[int, str], object] | None
    ) -> None:
        """Tell some ranks a text when all have come to the end; all ranks fail unless each of these does so.

        Args:
            name: what the text is, the same on these ranks.
            text: that of this rank.
            among: the ranks that tell theirs, this one included.
            take: called with each of the others, and its text; None where this rank has no use for them.
        """
        self._exchanges[name] = text, among, take

    def new_store(self) -> dist.Store:
        """Return a part of the store that nothing has written to, the same on every rank; after :meth:`compare`."""
        return (
            dist.HashStore() if self._alone else dist.PrefixStore(f"default_pg/{self.token}", self._store())
        )

    def run(self, function: Callable[[], object]) -> None:
        """Call a function that blocks on the other ranks; an error ends it as soon as one of them has given up.

        Raises:
            AgreementError: another rank gave up.
        """
        if self._alone:
            function()
            return
        connection, looks = new_connection(self._store()), 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks % int(_LOOK_EVERY / LOOK_EVERY) == 0:
                self._ask(lambda store: _verdict(store, self._attempt) or _GO, connection)

        with self._sigterm_raises():
            in_thread(function, look)

    def _finish(self) -> None:
        """Come to the end with all ranks, and take what they have to tell."""
        sizes = {name: len(among) for name, (_, among, _) in self._exchanges.items()}
        told = {f"{self._attempt}/{name}/{self.rank}": text for name, (text, _, _) in self._exchanges.items()}
        heard: list[tuple[Callable[[int, str], object], int, str]] = []
        for name, (_, among, take) in self._exchanges.items():
            if take is not None:
                heard += [
                    (take, rank, f"{self._attempt}/{name}/{rank}") for rank in among if rank != self.rank
                ]
        texts: list[str] = []
        requests = [self._request] if self._request else []

        def questions(store: LimitedStore) -> str:
            self._say(store, _MADE, {f"{self._scope}/told/{self.rank}": json.dumps(sizes), **told})
            # What was told before has been read: all ranks have arrived in this attempt.
            before, self.known.told[self.ranks] = self.known.told.get(self.ranks, ()), (*told, *requests)
            verdict = self._come_to(_MADE, store, lambda: self._unmatched(store), before)
            if verdict == _GO:
                texts[:] = store.get_all([key for _, _, key in heard])
            return verdict

        self._ask(questions)
        for (take, rank, _), text in zip(heard, texts, strict=True):
            take(rank, text)

    # The stages, in the thread that asks the store.

    def _enter(self, store: LimitedStore, left: int) -> None:
        """Leave an attempt for the one after that in which this rank was last, in this process or before it."""
        known, place = self.known, f"{self._scope}/rank/{self.rank}"
        # A rank that is interrupted here enters in another thread, to tell why.
        if not self._entering.acquire(timeout=_TELLING_LIMIT.total_seconds()):
            raise StoreLostError(NO_ANSWER)
        try:
            if self._number != left:
                return  # the other thread has entered
            own = known.places.get(self.ranks)
            before = own or store.first(place, "-1")
            number = _number(before) + 1
            if own is None:
                if number > 0:  # others may still wait for a process before this one
                    _end(store, f"{self._scope}/{number - 1}", _REPLACED)
                while self._is_of_earlier_life(_verdict(store, f"{self._scope}/{number}")):
                    number += 1
            while f"{self._scope}/{number}" in known.heard:
                number += 1
            mark = f"{number} {known.process} {_ARRIVED}"
            now = store.swap(place, before, mark)
            self._number = _number(now)
            self._attempt = f"{self._scope}/{self._number}"
            if now != mark:
                self._failed = True
                problem = (
                    f"two processes call {self.call} as rank {self.rank}; give each its own RANK, and each job on a machine "
                    "its own MASTER_PORT"
                )
                self._fail(store, problem)
                raise AgreementError(problem)
            known.places[self.ranks] = mark
        finally:
            self._entering.release()

    def _say(self, store: LimitedStore, stage: str, texts: Mapping[str, str]) -> None:
        """Put into the store at which stage this rank is, and what it tells the others."""
        mark = f"{self._number} {self.known.process} {stage}"
        store.set_all({f"{self._scope}/rank/{self.rank}": mark, **texts})
        self.known.places[self.ranks] = mark

    def _come_to(
        self,
        stage: str,
        store: LimitedStore,
        check: Callable[[], list[str]] | None = None,
        left: Sequence[str] = (),
    ) -> str:
        """Come to a stage, and return how it ended once all ranks have; the last one checks what they brought.

        Meanwhile this rank deletes what it ``left`` in the store.
        """
        count = store.add(f"{self._attempt}/{stage}/count")
        if count == len(self.ranks):
            problems = check() if check else []
            verdict = (
                self._fail(store, *problems) if problems else store.first(f"{self._attempt}/{stage}", _GO)
            )
            store.delete(*left)
            return verdict
        store.delete(*left)
        if stage == _ARRIVED:
            self._look_elsewhere(store)
        elif stage == _MADE and count == 1 and self._number > 0:
            # All ranks have arrived in this attempt, so they have left the one before.
            keys = ("request", "other requests", *_STAGES, *(f"{each}/count" for each in _STAGES))
            store.delete(*(f"{self._scope}/{self._number - 1}/{key}" for key in keys))
        return self._wait(store, stage)

    def _wait(self, store: LimitedStore, stage: str) -> str:
        """Wait until all have come to a stage, or the attempt ends; returns how. Names those that are absent."""
        key = f"{self._attempt}/{stage}"
        if store.appears(key, self._timeout):
            return store.get(key)
        span = f"{self.ranks.start} to {self.ranks.stop - 1}"
        if store.add(f"{self._attempt}/late") > 1:  # another rank looks for the absent ones
            store.appears(key, _READING_LIMIT)
            return self._fail(store, f"some ranks of {span} did not call {self.call} in time")
        absent = []
        for rank in self.ranks:
            place = store.first(f"{self._scope}/rank/{rank}", "-1")
            if _number(place) != self._number or not place.endswith(_STAGES[_STAGES.index(stage) :]):
                absent.append(rank)
        who, limit = ranks_in_words(absent), f"within {self._timeout.total_seconds():g} s"
        problem = f"{who} of {span} agreed to {self.call}, and did not end it {limit}; see the output of those ranks"
        if stage == _ARRIVED:
            problem = (
                f"{who} of {span} did not call {self.call} {limit}; every rank of the {self._of} must call it, so look at what "
                "those ranks did instead"
            )
        return self._fail(store, problem)

    def _unmatched(self, store: LimitedStore) -> list[str]:
        """Return what some ranks told, and others did not who should have: they have a group that these lacked."""
        told = store.get_all([f"{self._scope}/told/{rank}" for rank in self.ranks])
        tellers: dict[tuple[str, int], list[int]] = defaultdict(list)
        for rank, text in zip(self.ranks, told, strict=True):
            for name, size in json.loads(text).items():
                tellers[name, size].append(rank)
        return [
            f"{self.call} makes a group of {size} ranks on {ranks_in_words(ranks)} only; the others have it still, from an "
            "earlier mesh: close() that mesh on every rank"
            for (_, size), ranks in tellers.items()
            if len(ranks) != size
        ][:_SHOWN]

    def _problems(self, store: LimitedStore, compare: Compare) -> list[str]:
        """Return what is wrong with the requests of all ranks, of which one stands for those that are the same."""
        key = f"{self._attempt}/other requests"
        others = store.get_all([f"{key}/{place + 1}" for place in range(store.add(key, 0))])
        if not others:
            return []
        first = json.loads(store.get(f"{self._attempt}/request"))
        requests: dict[int, dict[str, str]] = dict.fromkeys(self.ranks, first) | dict(map(json.loads, others))
        given = [*requests.values()]
        problems = differences(given, self.ranks) or compare(given)
        if not problems and len({request.get("_host") for request in given}) > 1:
            told = ((rank, request.get("_unreachable")) for rank, request in requests.items())
            problems = [f"{ranks_in_words([rank])}: {problem}" for rank, problem in told if problem][:_SHOWN]
        return problems

    def _look_elsewhere(self, store: LimitedStore) -> None:
        """Fail where a rank that this one waits for is in a call of other ranks, and waits for this one there.

        Whoever looks second finds the first: each says where it is, and lists its ranks, before it looks.
        """
        listed = store.first("scopes", self._scope)
        while self._scope not in listed.split():
            listed = store.swap("scopes", listed, f"{listed} {self._scope}")
        for scope in listed.split():
            there = range(*map(int, scope.split("-")))
            if there == self.ranks or self.rank not in there:
                continue
            left = self.known.places.get(there) or store.first(f"{scope}/rank/{self.rank}", "-1")
            number = _number(left) + 1
            while store.has(f"{scope}/{number}/{_ARRIVED}"):  # it failed
                number += 1
            if store.has(f"{scope}/{number}/request"):
                for rank in range(max(self.ranks.start, there.start), min(self.ranks.stop, there.stop)):
                    place = store.first(f"{scope}/rank/{rank}", "-1")
                    if place.startswith(f"{number} {self.known.generation}:"):  # none of an earlier life
                        self._fail_both(store, there, f"{scope}/{number}", rank)
                        return

    def _fail_both(self, store: LimitedStore, there: range, attempt: str, rank: int) -> None:
        """Let this attempt fail, and one of other ranks, in which a rank waits for this one."""
        call = json.loads(store.get(f"{attempt}/request"))["_call"]
        sides = [(self.ranks, self.call, self.rank), (there, call, rank)]
        sides.sort(key=lambda side: (side[0].start, side[0].stop))
        places = [f"rank {one} is in {name} of ranks {of.start} to {of.stop - 1}" for of, name, one in sides]
        problem = (
            f"{' and '.join(places)}, and each waits for the other; give these ranks the same sizes, and let them make their "
            "meshes in the same order"
        )
        self._fail(store, problem, also=attempt)

    # How an attempt ends.

    def _fail(self, store: LimitedStore, *problems: str, also: str = "") -> str:
        """Let the attempt fail unless it has ended, and also one of other ranks; returns how it did."""
        reason = json.dumps([problems, self._attempt, also])
        verdict = f"{_FAILED}{self.known.generation}:{reason}"
        if also:
            _end(store, also, verdict)
        return _end(store, self._attempt, verdict)

    def _is_of_earlier_life(self, verdict: str) -> bool:
        """Return whether an attempt ended before the job was started again."""
        of_this_one = verdict.startswith(f"{_FAILED}{self.known.generation}:")
        return verdict == _REPLACED or (verdict.startswith(_FAILED) and not of_this_one)

    def _leave(self, connection: dist.Store | None = None, *, gave_up: bool = False) -> None:
        """Leave a failed attempt. The host of the store waits for those that have come, or for all ranks where it gave up."""
        key = f"{self._attempt}/read"

        def questions(store: LimitedStore) -> None:
            # A rank that gave up before it arrived has come, too.
            come = store.add(f"{self._attempt}/{_ARRIVED}/count", int(gave_up and not self.token))
            readers, limit = (len(self.ranks), _COMING_LIMIT) if gave_up else (come, _READING_LIMIT)
            store.set(f"{key}/{store.add(key)}", "")
            if self._hosts_store:
                store.appears(f"{key}/{readers}", limit)

        with suppress(StoreLostError):
            ask(connection or self._store(), questions, limit=self._limit)

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks know why this one gives up."""
        reason = str(error)
        if not isinstance(error, NamedMeshError):
            reason = f"{type(error).__name__}: {reason}".partition("\n")[0].removesuffix(": ")
        problem = f"rank {self.rank} gave up on {self.call}: {reason}"

        def questions(store: LimitedStore) -> None:
            self._enter(store, -1)
            while self._is_of_earlier_life(self._fail(store, problem)):
                self._enter(store, self._number)

        with suppress(StoreLostError, NamedMeshError, dist.DistError):  # there may be nobody to tell
            if isinstance(error, Exception):
                ask(self._store(_COMING_LIMIT), questions, limit=self._limit)
                self._leave(gave_up=True)
            else:
                # The connection may still wait for the other ranks, in a thread that nobody waits for any more.
                connection = new_connection(self._store(_OPENING_LIMIT))
                ask(connection, questions, limit=_TELLING_LIMIT.total_seconds())

    # The store.

    def _ask(self, questions: Callable[[LimitedStore], str], connection: dist.Store | None = None) -> None:
        """Ask the store how an attempt ended, and raise the error of one that failed."""
        try:
            with self._sigterm_raises():
                verdict = ask(connection or self._store(), questions, limit=self._limit)
        except StoreLostError as error:
            self._failed = True  # there is nobody to tell
            raise AgreementError(f"the store of the job is lost during {self.call}: {error}") from None
        if verdict == _GO:
            return
        self._failed = True
        self._leave(connection)  # the other one may be that of a call which still waits for other ranks
        if verdict == _REPLACED:
            raise AgreementError(
                f"another process calls {self.call} as rank {self.rank}, and takes its place"
            )
        problems, *attempts = json.loads(verdict.partition(":")[2])
        self.known.heard.update(attempts)
        raise AgreementError(*problems)

    @contextmanager
    def _sigterm_raises(self) -> Iterator[None]:
        """Let SIGTERM, unless the program handles it, leave the context first: the others are told, and it takes effect."""

        def leave(_number: int, _frame: FrameType | None) -> None:
            self._terminated = True
            raise SystemExit("SIGTERM")

        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _store(self, limit: timedelta | None = None) -> dist.Store:
        """Return the store, opened within the limit the first time."""
        if self.known.opened is None:
            within = limit or self._timeout
            try:
                opened = open_in_thread(self.known.open_store, within, self._limit)
            except NamedMeshError:
                self._failed = True  # there is nobody to tell
                raise
            self.known.opened = dist.PrefixStore("namedmesh/agreements", opened)
        return self.known.opened


def _number(place: str) -> int:
    """Return the number of the attempt in which a rank says that it is."""
    return int(place.partition(" ")[0])


def _verdict(store: LimitedStore, attempt: str) -> str:
    """Return how an attempt ended; empty if it has not."""
    key = f"{attempt}/{_MADE}"
    return store.get(key) if store.has(key) else ""


def _end(store: LimitedStore, attempt: str, verdict: str) -> str:
    """End every stage that has not ended, with one verdict; returns that of the last stage, which decides."""
    final = store.first(f"{attempt}/{_MADE}", verdict)
    for stage in (_ARRIVED, _ALIVE):
        store.first(f"{attempt}/{stage}", final)
    return final


def differences(requests: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return one sentence for each field in which the requests of some ranks differ.

    Example:
        >>> differences([{"layout": "tp=2"}, {"layout": "tp=2"}, {"layout": "tp=1"}], [0, 1, 2])
        ['layout differs between ranks: tp=2 on ranks 0, 1; tp=1 on rank 2; give every rank the same']
    """
    problems = []
    for field in dict.fromkeys(field for request in requests for field in request):
        if field.startswith("_"):
            continue
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, request in zip(ranks, requests, strict=True):
            holders[request.get(field, "nothing")].append(rank)
        if len(holders) > 1:
            # The value that most ranks hold first: the others are likely the mistake.
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = "; ".join(f"{value} on {ranks_in_words(holding)}" for value, holding in ordered)
            problems.append(f"{field} differs between ranks: {values}; give every rank the same")
    return problems
