"""Coordinated calls: every rank proceeds, or every rank raises the same error.

torch hangs when ranks create different process groups, or when some ranks do not take part. Before
such an operation, each rank therefore writes its request to the store of the default group. The
last rank to arrive compares the requests and publishes the result, for which all ranks wait. A rank
that times out publishes a result that names the missing ranks. A second round after the operation
confirms that it succeeded on every rank. After an error the job is expected to exit: there is no
retry.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from namedmesh._torch import get_timeout
from namedmesh.coordinator import StoreCoordinator, format_missing, get_default_coordinator
from namedmesh.errors import AgreementError, NamedMeshError, format_ranks, print_in_one_line

# How long a failed rank waits for the others before it publishes its failure. Ranks that are
# missing at that time can be reported too.
_FAILURE_GRACE_PERIOD = timedelta(seconds=5)
# The time limit of store operations that do not depend on other ranks.
_STORE_TIMEOUT = timedelta(seconds=15)
# How long the process that hosts the store stays alive after a failure, so that the other ranks can
# read the result.
_RESULT_GRACE_SECONDS = 10.0

T = TypeVar("T")


class Distinct(NamedTuple):
    """A value in a request that must differ between all ranks.

    Attributes:
        value: the value; empty on a rank to which the check does not apply.
        remedy: the advice in the error if two ranks have the same value.
    """

    value: str
    remedy: str


@contextmanager
def agree_on(
    call: str, timeout: timedelta | None = None, coordinator: StoreCoordinator | None = None
) -> Iterator[Callable[..., None]]:
    """Run a block that either succeeds on every rank or raises on every rank.

    Collective: every rank of the world must enter it.

    Args:
        call: the call that runs the block, for messages.
        timeout: how long to wait for the other ranks; by default the timeout of the default group.
        coordinator: the coordinator of a job that has no default group yet.

    Yields:
        A function that compares the requests of all ranks, field by field. Call it once, before the
        operation.

    Raises:
        AgreementError: the requests differ, some ranks did not arrive in time, or one failed. A
            rank that failed by its own mistake raises its own error instead.
    """
    world_size = dist.get_world_size() if coordinator is None else coordinator.world_size
    if world_size == 1 or (coordinator is None and dist.get_backend() == "fake"):
        yield lambda request: None  # noqa: ARG005
        return
    if coordinator is None:
        coordinator = get_default_coordinator()
    coordinated = _CoordinatedCall(coordinator, call, timeout or get_timeout())
    try:
        yield coordinated.compare
    except AgreementError:
        # The other ranks have read the same result.
        raise
    except Exception as error:
        coordinated.report_failure(error)
        raise
    else:
        coordinated.compare({})


class _Record(NamedTuple):
    """The record that one rank writes to the store in one phase of a call.

    Attributes:
        failure: the reason why the rank failed; empty if it did not.
        request: the fields that must be the same on every rank.
        distinct: the fields that must differ between all ranks.
    """

    failure: str
    request: Mapping[str, str]
    distinct: Mapping[str, Distinct]


class _CoordinatedCall:
    """One coordinated call of this rank.

    The phase ``request`` comes before the operation, and the phase ``done`` after it.

    Args:
        coordinator: the coordinator of the job.
        call: the call that the user made, for messages.
        timeout: how long each phase waits for the other ranks.
    """

    def __init__(self, coordinator: StoreCoordinator, call: str, timeout: timedelta) -> None:
        self.coordinator = coordinator
        self.call = call
        self.timeout = timeout
        self.rank = coordinator.rank
        self.world_size = coordinator.world_size
        coordinator.num_calls += 1
        self.number = coordinator.num_calls
        self.store: Any = None
        self.phase = "request"
        self.deadline = time.monotonic() + timeout.total_seconds()

    def compare(self, request: Mapping[str, object]) -> None:
        """Compare the requests of all ranks, and enter the next phase.

        Collective: every rank of the world must call it, or :meth:`report_failure`.

        Args:
            request: the fields of the request. A value of type :class:`Distinct` must differ
                between all ranks, any other value must be the same.

        Raises:
            AgreementError: the requests differ, or some ranks are missing or have failed.
        """
        texts = {"call": self.call}
        distinct: dict[str, Distinct] = {}
        for name, value in request.items():
            if isinstance(value, Distinct):
                distinct[name] = value
            else:
                texts[name] = str(value)
        record = _Record("", texts, distinct)
        self._run_in_thread(self.timeout, lambda: self._exchange(record, self.timeout))
        self.phase = "done"
        self.deadline = time.monotonic() + self.timeout.total_seconds()

    def report_failure(self, error: Exception) -> None:
        """Report to the other ranks why this rank has failed, in place of a request.

        Args:
            error: the exception that this rank has raised.

        Raises:
            AgreementError: the result that all ranks read, if ``error`` is not a NamedMeshError. An
                error of torch's may only be a consequence of a failure on another rank.
        """
        own_problems: tuple[str, ...] = ()
        if isinstance(error, NamedMeshError):
            own_problems = error.problems
        reason = "; ".join(own_problems) or f"{type(error).__name__}: {error}"
        first_line = reason.partition("\n")[0]
        record = _Record(first_line, {}, {})
        try:
            self._run_in_thread(
                2 * _FAILURE_GRACE_PERIOD, lambda: self._exchange(record, _FAILURE_GRACE_PERIOD)
            )
        except AgreementError as result:
            if not isinstance(error, NamedMeshError):
                raise result from error

    def _exchange(self, record: _Record, patience: timedelta) -> list[str]:
        """Write this rank's record, and wait for the problems that the phase has as its result.

        Args:
            record: the record of this rank.
            patience: how long to wait for the other ranks, within the deadline of the phase.

        Returns:
            The problems, the same on every rank; an empty list if the phase succeeded.
        """
        coordinator = self.coordinator
        run_store = coordinator.run_store(self.call, patience)
        self.store = store = dist.PrefixStore(str(self.number), run_store)
        result_key = f"{self.phase}/result"
        store.set(f"{self.phase}/{self.rank}", json.dumps(record))
        if store.add(f"{self.phase}/arrived", 1) == self.world_size:
            self._publish_result(range(self.world_size))
        deadline = min(self.deadline, time.monotonic() + patience.total_seconds())
        coordinator.serve_run_prefix(store, result_key, deadline)
        remaining = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([result_key], timedelta(seconds=remaining))
        except dist.DistStoreError:
            # Only the first rank to time out looks for missing ranks. If every rank did, the store
            # would be read world_size**2 times.
            if store.add(f"{self.phase}/timed_out", 1) == 1:
                self._publish_result(self._find_arrived())
            store.wait([result_key], _STORE_TIMEOUT)
        problems: list[str] = json.loads(store.get(result_key))
        if problems:
            coordinator.publish_prefix()
            self._wait_for_readers()
        else:
            coordinator.delete_finished_phase(store, self.phase)
        return problems

    def _find_arrived(self) -> list[int]:
        """Return the ranks that have written a record in this phase."""
        return [rank for rank in range(self.world_size) if self.store.check([f"{self.phase}/{rank}"])]

    def _publish_result(self, arrived: Sequence[int]) -> None:
        """Find the problems in the records of a phase, and publish them as its result.

        A result that exists is not replaced: all ranks must read the same one.

        Args:
            arrived: the ranks that have written a record.
        """
        records = self._read_records(arrived)
        failures = {}
        requests = {}
        distinct = {}
        for rank, record in records.items():
            if record.failure:
                failures[rank] = record.failure
            requests[rank] = record.request
            distinct[rank] = record.distinct
        problems = []
        if not failures:
            # A failed rank has no request. It would differ in every field.
            problems += find_differences(requests)
            problems += find_duplicates(distinct)
        missing = sorted(set(range(self.world_size)) - set(arrived))
        # Before the deadline, a missing rank may just be blocked inside torch, where it waits for
        # the rank that has failed. Then it is not to blame.
        if missing and (not failures or time.monotonic() > self.deadline):
            action = f"call {self.call}"
            if self.phase == "done":
                action = f"reach the end of {self.call}"
            problems.append(format_missing(missing, self.world_size, action, self.timeout))
        for rank in list(failures)[:3]:
            problems.append(f"rank {rank} failed in {self.call}: {failures[rank]}")
        self.store.compare_set(f"{self.phase}/result", "", json.dumps(problems))

    def _read_records(self, ranks: Sequence[int]) -> dict[int, _Record]:
        """Return the records of some ranks in this phase."""
        keys = [f"{self.phase}/{rank}" for rank in ranks]
        # A FileStore has no multi_get.
        texts = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
        records = {}
        for rank, text in zip(ranks, texts, strict=True):
            records[rank] = _Record(*json.loads(text))
        return records

    def _wait_for_readers(self) -> None:
        """Wait until the other ranks have read the result, if this process hosts the store.

        The process is about to exit, and the store ends with it. torchrun's agent hosts the store
        itself.
        """
        self.store.add("num_readers", 1)
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        deadline = time.monotonic() + _RESULT_GRACE_SECONDS
        while time.monotonic() < deadline:
            num_arrived = self.store.add(f"{self.phase}/arrived", 0)
            if self.store.add("num_readers", 0) >= num_arrived:
                return
            time.sleep(0.05)

    def _run_in_thread(self, timeout: timedelta, exchange: Callable[[], list[str]]) -> None:
        """Run an exchange in a thread, and raise its problems.

        torch's store client blocks without limit on a host that it cannot reach, and ignores
        signals while it does. The main thread stays responsive.

        Args:
            timeout: how long the exchange may take.
            exchange: the function that communicates over the store and returns problems.

        Raises:
            AgreementError: the problems that the exchange returned, or the store cannot be reached.
        """
        outcome = call_in_thread(exchange, timeout + _STORE_TIMEOUT)
        if outcome is None:
            raise self._make_connection_error("its host does not answer, or this host cannot reach it")
        try:
            problems = outcome()
        except dist.DistNetworkError:
            raise self._make_connection_error(
                "the process that hosts it (rank 0 or torchrun's agent) has exited"
            ) from None
        if problems:
            error = AgreementError(*problems)
            if self.rank != 0:
                print_in_one_line(error, self.rank, printing_rank=0)
            raise error

    def _make_connection_error(self, reason: str) -> AgreementError:
        """Return the error about a store that cannot be reached."""
        return AgreementError(
            f"lost the connection to the store of the job during {self.call}: {reason}; check that "
            "host and the network between the hosts, then start the job again"
        )


def call_in_thread(call: Callable[[], T], timeout: timedelta) -> Callable[[], T] | None:
    """Call a function in a thread, and stop waiting for it after a timeout.

    A call that hangs inside torch cannot be interrupted; its thread stays behind. The main thread
    stays responsive to signals.

    Args:
        call: the function.
        timeout: how long to wait for it.

    Returns:
        A function that returns the result of the call, or raises its error; None if the call did
        not end in time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised by the result
            future.set_exception(error)

    Thread(target=run, daemon=True, name="namedmesh").start()
    wait([future], timeout.total_seconds())
    return future.result if future.done() else None


def find_differences(requests: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a message for each field that differs between ranks.

    Args:
        requests: by rank, the fields of its request.

    Example:
        >>> find_differences({0: {"layout": "tp=2"}, 1: {"layout": "tp=1"}})
        ['layout differs between ranks: tp=2 on rank 0; tp=1 on rank 1; give every rank the same']
    """
    # A dictionary keeps the order in which the requests name the fields; a set does not.
    names: dict[str, None] = {}
    for request in requests.values():
        names.update(dict.fromkeys(request))
    problems = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, request in requests.items():
            ranks_by_value[request.get(name, "nothing")].append(rank)
        if len(ranks_by_value) == 1:
            continue
        # The most common value comes first: the others are probably the mistake.
        ordered = sorted(ranks_by_value.items(), key=lambda item: -len(item[1]))
        values = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ordered)
        problems.append(f"{name} differs between ranks: {values}; give every rank the same")
    return problems


def find_duplicates(requests: Mapping[int, Mapping[str, Sequence[str]]]) -> list[str]:
    """Return a message for each value that several ranks have, but only one rank may have.

    Args:
        requests: by rank, the :class:`Distinct` of each field, as a tuple or a list.

    Example:
        >>> gpu = Distinct("0 of host a", "set LOCAL_RANK")
        >>> find_duplicates({0: {"GPU": gpu}, 1: {"GPU": gpu}})
        ['ranks 0, 1 have the same GPU, 0 of host a; set LOCAL_RANK']
    """
    ranks_by_value: dict[tuple[str, str], list[int]] = defaultdict(list)
    remedies: dict[tuple[str, str], str] = {}
    for rank, request in requests.items():
        for name, (value, remedy) in request.items():
            if value:
                ranks_by_value[name, value].append(rank)
                remedies[name, value] = remedy
    problems = []
    for (name, value), ranks in ranks_by_value.items():
        if len(ranks) > 1:
            remedy = remedies[name, value]
            problems.append(f"{format_ranks(ranks)} have the same {name}, {value}; {remedy}")
    return problems
