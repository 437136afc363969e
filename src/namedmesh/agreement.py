"""All ranks of the job agree on a call, before and after its work: all of them go on, or all of them hear why not.

Torch hangs where ranks ask for different groups, or where some do not ask. So each rank first leaves its request in the
store of the default group; the last one to come compares, and leaves a verdict that all wait for. Who waits too long
leaves one that names the absent. Afterwards the job ends: there is no second try.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import ref

import torch.distributed as dist

from namedmesh._torch import default_store, default_timeout
from namedmesh.errors import AgreementError, NamedMeshError, format_ranks

_TELLING = timedelta(seconds=5)
"""How long a rank that has failed waits for the others before it tells them, so that it can name those that are absent."""
_ANSWER = timedelta(seconds=15)
"""Within which the store answers a question that waits for no other rank."""
_POLLS = (0.001, 0.1)
"""The shortest and the longest seconds after which rank 0 looks for questions: torch logs each wait that ends in vain."""
_READING = 10.0
"""The seconds for which the host of the store stays after a failure, so that the others can read the verdict."""


class Distinct(NamedTuple):
    """A value of a request that no two ranks may have, and what to do if two of them have it.

    A rank to which the question does not apply gives an empty value.
    """

    value: str
    remedy: str


class Meetings:
    """The calls on which the ranks of a job agree, one after the other, over a store that every rank reaches."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls = 0  # the same on every rank, as all make the same calls in the same order
        self._whole = dist.PrefixStore("namedmesh", store)
        self._chosen = uuid4().hex if rank == 0 else ""
        self._told = False
        self._left: tuple[dist.Store, str] | None = None

    def forget_previous(self, store: dist.Store, stage: str) -> None:
        """Delete the keys of the stage before this one: every rank has come to this one, so nobody reads them any more."""
        if self._left is not None:
            old_store, old_stage = self._left
            names = [str(self.rank)]
            if self.rank == 0:
                names += ["come", "verdict"]
            for name in names:
                old_store.delete_key(f"{old_stage}/{name}")
        self._left = (store, stage)

    def part(self, call: str, timeout: timedelta) -> dist.Store:
        """Return a part of the store that no earlier life of the job has used, the same on every rank.

        torchrun starts the ranks of a job again on the same store, where what the ranks before have left looks like
        what is left now. So rank 0 chooses a part, and answers each rank's question under a name that nobody had before.
        """
        if not self._chosen:
            question = uuid4().hex
            self._whole.set(f"question/{self._whole.add('asked', 1)}", question)
            try:
                self._whole.wait([f"answer/{question}"], timeout)
                self._chosen = self._whole.get(f"answer/{question}").decode()
            except dist.DistStoreError:
                # Rank 0 does not answer any more once the call has failed. Then this rank is the late one.
                self._chosen = self._part_for_late_ranks()
                if not self._chosen:
                    raise AgreementError(_absent([0], self.size, f"call {call}", timeout)) from None
            self._whole.add(f"{self._chosen}/read", 1)
        return dist.PrefixStore(self._chosen, self._whole)

    def leave_part(self) -> None:
        """Leave the part on rank 0 for ranks that come after the call has failed, so that they find its result."""
        if self.rank == 0 and not self._told:
            self._whole.set("late", json.dumps([_life(), self._chosen]))

    def _part_for_late_ranks(self) -> str:
        """Return the part that rank 0 left in this life of the job; nothing if it left none."""
        if not self._whole.check(["late"]):
            return ""
        life, part = json.loads(self._whole.get("late"))
        return str(part) if life == _life() else ""

    def tell_part(self, store: dist.Store, verdict: str, end: float) -> None:
        """Answer on rank 0 those that ask for the part, until all have read it, there is a verdict, or the time is over."""
        asked, places = 0, set[int]()  # of questions, those of an earlier life too, to answer
        pause, longest = _POLLS
        while self.rank == 0 and not self._told and time.monotonic() < end and not store.check([verdict]):
            before, asked = asked, self._whole.add("asked", 0)
            places |= {*range(before + 1, asked + 1)}
            for place in sorted(places):
                if self._whole.check([f"question/{place}"]):
                    question = self._whole.get(f"question/{place}").decode()
                    self._whole.set(f"answer/{question}", self._chosen)
                    places.remove(place)
            self._told = self._whole.add(f"{self._chosen}/read", 0) == self.size - 1
            pause = min(2 * pause, longest)
            time.sleep(0.0 if self._told else pause)


def _life() -> str:
    """Return what torchrun counts when it starts the ranks again on the same store."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


_known: list[tuple[ref[dist.Store], Meetings]] = []
"""Those of the default group, with its store, once there are any. The store ends with the group."""


def meet_on(meetings: Meetings) -> None:
    """Take the meetings that made the default group for those of its meshes too."""
    _known[:] = [(ref(default_store()), meetings)]


@contextmanager
def agreed(
    call: str, timeout: timedelta | None = None, meetings: Meetings | None = None
) -> Iterator[Callable[..., None]]:
    """Do what every rank of the world does, in a context which they leave together: all in peace, or all with an error.

    Args:
        call: what is being called, for messages.
        timeout: how long to wait for the others; by default as long as a collective of the default group may take.
        meetings: those of the job where there is no default group yet.

    Yields:
        A function that compares what was asked for with the other ranks, field by field. Call it once, before the work.

    Raises:
        AgreementError: the ranks differ, some did not come in time, or one failed. A rank whose own mistake it is gets
            its own error instead.
    """
    size = dist.get_world_size() if meetings is None else meetings.size
    if size == 1 or (meetings is None and dist.get_backend() == "fake"):
        yield lambda request: None  # noqa: ARG005
        return
    if meetings is None:
        store = default_store()
        if not _known or _known[0][0]() is not store:
            meet_on(Meetings(store, dist.get_rank(), size))
        meetings = _known[0][1]
    meeting = _Meeting(meetings, call, timeout or default_timeout())
    try:
        yield meeting.compare
    except AgreementError:
        raise
    except Exception as error:
        meeting.fail(error)
        raise
    else:
        meeting.compare({})


class _Meeting:
    """One call. It has two stages: ``asked``, before the work, and ``made``, after it."""

    def __init__(self, meetings: Meetings, call: str, timeout: timedelta) -> None:
        self.meetings, self.call, self.timeout = meetings, call, timeout
        self.rank, self.size = meetings.rank, meetings.size
        meetings.calls += 1
        self.number = meetings.calls
        self.store: Any = None
        self.stage, self.end = "asked", time.monotonic() + self.timeout.total_seconds()

    def compare(self, request: Mapping[str, object]) -> None:
        """Leave what this rank was asked for, and continue once all ranks have left the same.

        Values of the kind :class:`Distinct` have to differ between all ranks instead.
        """
        texts = {"call": self.call}
        distinct: dict[str, Distinct] = {}
        for name, value in request.items():
            if isinstance(value, Distinct):
                distinct[name] = value
            else:
                texts[name] = str(value)
        self._within(self.timeout, lambda: self._meet(texts, distinct))
        self.stage, self.end = "made", time.monotonic() + self.timeout.total_seconds()

    def fail(self, error: Exception) -> None:
        """Tell the others why this rank gives up; raise what all hear where its error may come of another's, as torch's do."""
        own = error.problems if isinstance(error, NamedMeshError) else None
        reason = "; ".join(own or [f"{type(error).__name__}: {error}"])
        try:
            self._within(2 * _TELLING, lambda: self._meet({}, failure=reason.partition("\n")[0]))
        except AgreementError as verdict:
            if own is None:
                raise verdict from error

    def _meet(
        self,
        request: Mapping[str, str],
        distinct: Mapping[str, Distinct] | None = None,
        failure: str = "",
    ) -> list[str]:
        """Return the problems that all ranks hear of."""
        wait = _TELLING if failure else self.timeout
        store = self.store = dist.PrefixStore(str(self.number), self.meetings.part(self.call, wait))
        stage = self.stage
        store.set(f"{stage}/{self.rank}", json.dumps([failure, request, distinct or {}]))
        if store.add(f"{stage}/come", 1) == self.size:
            self._decide(list(range(self.size)))
        end = min(self.end, time.monotonic() + wait.total_seconds())
        self.meetings.tell_part(store, f"{stage}/verdict", end)
        try:
            store.wait([f"{stage}/verdict"], timedelta(seconds=max(end - time.monotonic(), 0.01)))
        except dist.DistStoreError:
            # The first one looks: all at once would ask for every rank on every rank.
            if store.add(f"{stage}/over", 1) == 1:
                self._decide([rank for rank in range(self.size) if store.check([f"{stage}/{rank}"])])
            store.wait([f"{stage}/verdict"], _ANSWER)
        problems: list[str] = json.loads(store.get(f"{stage}/verdict"))
        if problems:
            self.meetings.leave_part()
            self._stay()
        else:
            self.meetings.forget_previous(store, stage)
        return problems

    def _decide(self, come: Sequence[int]) -> None:
        """Leave the verdict, unless there is one."""
        keys = [f"{self.stage}/{rank}" for rank in come]
        texts = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
        left = [json.loads(text) for text in texts]
        failed = [rank for rank, (failure, *_) in zip(come, left, strict=True) if failure]
        problems = []
        if not failed:
            problems += differences([request for _, request, _ in left], come)
            problems += coincidences([distinct for *_, distinct in left], come)
        absent = sorted({*range(self.size)} - {*come})
        # Before the time is over they may wait, in torch, for one that has failed.
        if absent and (not failed or time.monotonic() > self.end):
            did = "call" if self.stage == "asked" else "come to the end of"
            problems.append(_absent(absent, self.size, f"{did} {self.call}", self.timeout))
        problems += [
            f"rank {rank} gave up on {self.call}: {left[come.index(rank)][0]}" for rank in failed[:3]
        ]
        self.store.compare_set(f"{self.stage}/verdict", "", json.dumps(problems))

    def _stay(self) -> None:
        """Where this rank hosts the store, and is about to end: wait until the others have read the verdict."""
        self.store.add("read", 1)
        if self.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        end = time.monotonic() + _READING
        while self.store.add("read", 0) < self.store.add(f"{self.stage}/come", 0) and time.monotonic() < end:
            time.sleep(0.05)

    def _within(self, timeout: timedelta, meet: Callable[[], list[str]]) -> None:
        """Meet in a thread: torch's client waits without limit for a host that it cannot reach, and deaf to signals."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(meet())
            except Exception as error:  # noqa: BLE001  raised below
                outcome.append(error)

        thread = Thread(target=run, daemon=True, name="namedmesh")
        thread.start()
        thread.join((timeout + _ANSWER).total_seconds())
        found = outcome.pop() if outcome else "its host does not answer, or this host is cut off from it"
        if isinstance(found, dist.DistNetworkError):
            found = "the process that hosts it, rank 0 or torchrun's agent, has ended"
        if isinstance(found, str):
            raise AgreementError(
                f"the store of the job is lost during {self.call}: {found}; see to that, and start the job again"
            )
        if isinstance(found, Exception):
            raise found
        if found:
            raise AgreementError(*found)


def _absent(ranks: Sequence[int], size: int, did: str, timeout: timedelta) -> str:
    return (
        f"{format_ranks(ranks)} of {size} did not {did} within {timeout.total_seconds():g} s; see what they did instead, "
        "and make the same calls on every rank"
    )


def differences(requests: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> list[str]:
    """Return one sentence for each field in which the requests of some ranks differ.

    Example:
        >>> differences([{"layout": "tp=2"}, {"layout": "tp=2"}, {"layout": "tp=1"}], [0, 1, 2])
        ['layout differs between ranks: tp=2 on ranks 0, 1; tp=1 on rank 2; give every rank the same']
    """
    problems = []
    for field in dict.fromkeys(field for request in requests for field in request):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, request in zip(ranks, requests, strict=True):
            holders[request.get(field, "nothing")].append(rank)
        if len(holders) > 1:
            # The value that most ranks hold first: the others are likely the mistake.
            ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = "; ".join(f"{value} on {format_ranks(holding)}" for value, holding in ordered)
            problems.append(f"{field} differs between ranks: {values}; give every rank the same")
    return problems


def coincidences(requests: Sequence[Mapping[str, Sequence[str]]], ranks: Sequence[int]) -> list[str]:
    """Return one sentence for each value that several ranks have and only one of them may have.

    Args:
        requests: for each rank, a :class:`Distinct` by field, as a tuple or a list.
        ranks: the ranks that made the requests.

    Example:
        >>> coincidences([{"GPU": Distinct("0 of host a", "set LOCAL_RANK")}] * 2, [0, 1])
        ['ranks 0, 1 have the same GPU, 0 of host a; set LOCAL_RANK']
    """
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    remedies: dict[tuple[str, str], str] = {}
    for rank, request in zip(ranks, requests, strict=True):
        for field, (value, remedy) in request.items():
            if value:
                holders[field, value].append(rank)
                remedies[field, value] = remedy
    problems = []
    for (field, value), holding in holders.items():
        if len(holding) > 1:
            remedy = remedies[field, value]
            problems.append(f"{format_ranks(holding)} have the same {field}, {value}; {remedy}")
    return problems
