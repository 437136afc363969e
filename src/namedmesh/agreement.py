"""Ranks agree on a call before they do what cannot be undone, and learn whether all of them did it.

A mistake on one rank is then an error that names the rank and the field, on all of them, and not a hang.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh._torch import new_connection
from namedmesh.attempts import ALIVE, GO, MADE, REPLACED, Participant
from namedmesh.errors import AgreementError, NamedMeshError, ranks_in_words
from namedmesh.hosts import host_identity, loopback_problem
from namedmesh.store import ANSWER_LIMIT, LOOK_EVERY, StoreLostError, ask, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

    from typing_extensions import Self

    from namedmesh.attempts import Agreements, Compare
    from namedmesh.store import LimitedStore

__all__ = ["Agreement"]

# A rank that is interrupted has this many seconds to tell the others.
_TELLING_LIMIT = 10.0
# A rank that cannot go on looks so long for the store, to tell the others why.
_OPENING_LIMIT = timedelta(seconds=60)
# While a call blocks that waits for other ranks, every this many seconds this one asks whether they have given up.
_LOOK_EVERY = 2.0


class Agreement:
    """One call of some ranks, as this rank takes part in it: a context in which it compares, and then acts.

    An exception that leaves the context is told to the other ranks, which fail as well. Otherwise the context ends when
    all ranks have come to its end. Nothing is asked before :meth:`compare`, or an exception.

    Args:
        call: what is being called, for messages.
        ranks: the ranks that take part; all of them must call.
        rank: this one.
        store: the store that the ranks share, or a function that opens it within a time.
        known: what this process knows of earlier agreements over this store.
        timeout: how long to wait for the other ranks, in each stage.
        of: what the ranks are those of, for messages.
        hosts_store: whether the store ends with this process, which therefore is the last to leave after a failure.
        alone: whether there is nobody to agree with.

    Attributes:
        token: names this agreement, the same on all ranks, and never used again; empty before :meth:`compare`.
        exchange: what the ranks tell each other once all have come to its end: ``texts()`` of this one by key, and
            ``take(texts)`` those of others that ``keys()`` names.
        opened: the store that the ranks share, once it was asked.
    """

    def __init__(
        self,
        call: str,
        *,
        ranks: range,
        rank: int,
        store: dist.Store | Callable[[timedelta], dist.Store],
        known: Agreements,
        timeout: timedelta,
        of: str = "mesh",
        hosts_store: bool = False,
        alone: bool = False,
    ) -> None:
        self.call, self.ranks, self.rank = call, ranks, rank
        self.token = ""
        self.exchange: Any = None
        self.opened: dist.Store | None = None
        self._participant = Participant(call, of, ranks, rank, timeout, known)
        self._given, self._hosts_store = store, hosts_store
        self._limit = min(ANSWER_LIMIT, max(5.0, timeout.total_seconds()))
        self._alone = alone or len(ranks) == 1
        self._failed = False

    def __enter__(self) -> Self:
        self._participant.known.lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.token and not self._alone:
                self._settle(self._ask(self._finish))
            elif error is not None and not self._failed and not self._alone:
                self._tell(error)
        finally:
            self._participant.known.lock.release()

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
        me = self._participant
        if self._alone:
            me.known.alone += 1  # there is nobody to ask
            self.token = f"alone/{self.rank}/{me.known.alone}"
            return
        host = (host_identity(), loopback_problem()) if uses_gloo else None

        def questions(store: LimitedStore) -> str:
            verdict = REPLACED
            while verdict == REPLACED:
                verdict = me.enter(store)
                if verdict == GO:
                    if host is not None:
                        me.note_host(store, *host)
                    verdict = me.arrive(
                        store, request, lambda given: differences(given, self.ranks) or compare(given)
                    )
                if verdict == GO:
                    me.forget(store)
                if verdict == GO and may_restart:
                    verdict = me.come_to(ALIVE, store)
            return verdict

        self._settle(self._ask(questions))
        self.token = me.attempt.name

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
        attempt, connection, looks = self._participant.attempt, new_connection(self._store()), 0

        def look() -> None:
            nonlocal looks
            looks += 1
            if looks % int(_LOOK_EVERY / LOOK_EVERY) == 0:
                self._settle(self._ask(lambda store: attempt.verdict(store, MADE) or GO, connection))

        with _told_when_terminated(self._tell):
            in_thread(function, look)

    def _finish(self, store: LimitedStore) -> str:
        """Come to the end with all ranks, and exchange what they have to tell each other."""
        me, exchange = self._participant, self.exchange
        if exchange is None:
            return me.come_to(MADE, store)
        me.tell(store, exchange.texts())
        verdict = me.come_to(MADE, store)
        if verdict == GO:
            keys = exchange.keys()
            texts = me.hear(store, keys)
            if texts is None:
                return me.failure([f"some ranks did not create what rank {self.rank} did in {self.call}"])
            exchange.take(dict(zip(keys, texts, strict=True)))
        return verdict

    def _settle(self, verdict: str) -> None:
        """Raise the error of an attempt that failed."""
        if verdict == GO:
            return
        self._leave(0)
        if verdict == REPLACED:
            raise AgreementError(
                f"another process calls {self.call} as rank {self.rank}, and takes its place"
            )
        raise AgreementError(*self._participant.read(verdict))

    def _leave(self, readers: int) -> None:
        self._failed = True
        with suppress(StoreLostError):
            ask(
                self._store(),
                lambda store: self._participant.leave(store, readers, is_host=self._hosts_store),
                limit=self._limit,
            )

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks know why this one gives up."""
        me, interrupted = self._participant, not isinstance(error, Exception)
        if interrupted and self.opened is None:
            return

        def questions(store: LimitedStore) -> None:
            me.give_up(store, _reason(error))

        with suppress(StoreLostError, NamedMeshError):  # there may be nobody to tell
            if interrupted and self.opened is not None:
                # The connection may still wait for the other ranks, in a thread that nobody waits for any more.
                ask(new_connection(self.opened), questions, limit=_TELLING_LIMIT)
            else:
                ask(self._store(_OPENING_LIMIT), questions, limit=self._limit)
                self._leave(len(self.ranks))

    def _ask(self, questions: Callable[[LimitedStore], str], connection: dist.Store | None = None) -> str:
        try:
            with _told_when_terminated(self._tell):
                return ask(connection or self._store(), questions, limit=self._limit)
        except StoreLostError as error:
            self._failed = True
            raise AgreementError(f"the store of the job is lost during {self.call}: {error}") from None

    def _store(self, limit: timedelta | None = None) -> dist.Store:
        """Return the store, opened within the limit the first time.

        Raises:
            StoreLostError: its host cannot be reached.
        """
        if self.opened is None:
            given, within = self._given, limit or self._participant.timeout
            # torch tries again after a pause, which may be as long as its limit.
            pause = min(within.total_seconds(), ANSWER_LIMIT)
            overdue = time.monotonic() + within.total_seconds() + pause + self._limit

            def look() -> None:
                if time.monotonic() > overdue:
                    raise StoreLostError("its host did not answer, so it hangs, or this host is cut off")

            try:
                opened = given if isinstance(given, dist.Store) else in_thread(lambda: given(within), look)
            except dist.DistError as error:
                self._failed = True  # there is nobody to tell
                reason = str(error).partition("\n")[0]
                raise StoreLostError(
                    f"its host cannot be reached ({reason}), so this host or the link between them is cut off"
                ) from None
            except BaseException:
                self._failed = True
                raise
            self.opened = dist.PrefixStore("namedmesh/agreements", opened)
        return self.opened


def _reason(error: BaseException) -> str:
    """Return why a rank gives up, for the others."""
    if isinstance(error, NamedMeshError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


@contextmanager
def _told_when_terminated(tell: Callable[[BaseException], None]) -> Iterator[None]:
    """Tell the other ranks, if SIGTERM ends this process while it waits for them and the program does not handle it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        tell(SystemExit("SIGTERM"))
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
