"""Coordinated calls: every rank proceeds, or every rank raises the same error.

torch hangs when ranks create different process groups, or when some ranks do not take part. Before
such an operation, each rank therefore compares a digest of its request with the first one in the
store of the default group, and counts itself as arrived. The last rank to arrive publishes whether
all are equal, for which all ranks wait: a constant number of operations for each rank.

Only after a failure do the ranks write their requests, from which one of them finds the problems:
when digests differ, when a rank has failed, or when one has waited too long for the others. A
second round after the operation confirms that it succeeded on every rank. After an error the job is
expected to exit: there is no retry.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from namedmesh._errors import AgreementError, NamedMeshError, format_ranks, print_in_one_line
from namedmesh._torch.groups import get_timeout
from namedmesh.launch.coordinator import (
    StoreCoordinator,
    find_existing_keys,
    format_missing,
    get_default_coordinator,
    get_values,
    wait_for_readers,
    wait_for_value,
)

# How long a failed rank waits for the others before it publishes its failure. Ranks that are
# missing at that time can be reported too.
_FAILURE_GRACE_PERIOD = timedelta(seconds=5)
# The time limit of store operations that do not depend on other ranks.
_STORE_TIMEOUT = timedelta(seconds=15)
# The result of a phase that succeeded.
_SUCCESS = "ok"
# A rank that differs from the first one counts itself as arrived with this number besides.
_DIFFERENT = 1 << 32

T = TypeVar("T")


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
    """

    failure: str
    request: Mapping[str, str]


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
            request: the fields of the request. Their texts must be the same on every rank.

        Raises:
            AgreementError: the requests differ, or some ranks are missing or have failed.
        """
        texts = {name: str(value) for name, value in request.items()}
        record = _Record("", {"call": self.call, **texts} if self.phase == "request" else {})
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
        record = _Record(first_line, {})
        try:
            self._run_in_thread(
                2 * _FAILURE_GRACE_PERIOD, lambda: self._exchange(record, _FAILURE_GRACE_PERIOD)
            )
        except AgreementError as result:
            if not isinstance(error, NamedMeshError):
                raise result from error

    def _exchange(self, record: _Record, patience: timedelta) -> list[str]:
        """Take part in a phase, and return the problems that it has as its result.

        Args:
            record: the record of this rank.
            patience: how long to wait for the other ranks, within the deadline of the phase.

        Returns:
            The problems, the same on every rank; an empty list if the phase succeeded.
        """
        coordinator = self.coordinator
        run_store = coordinator.run_store(self.call, patience)
        self.store = store = dist.PrefixStore(f"{self.number}/{self.phase}", run_store)
        num_arrived = store.add("arrived", 1 if self._is_equal(record) else 1 + _DIFFERENT)
        report = f"report of rank {self.rank}"
        result = ""
        if num_arrived % _DIFFERENT == self.world_size:
            # This rank is the last one. A result that exists is not replaced: all ranks must read
            # the same one.
            outcome = _SUCCESS if num_arrived == self.world_size else report
            result = store.compare_set("result", "", outcome).decode()
        deadline = min(self.deadline, time.monotonic() + patience.total_seconds())
        coordinator.serve_run_prefix(store, "result", deadline)
        remaining = max(deadline - time.monotonic(), 0.01)
        try:
            result = result or wait_for_value(store, "result", timedelta(seconds=remaining))
        except dist.DistStoreError:
            result = store.compare_set("result", "", report).decode()
        if result == _SUCCESS:
            coordinator.delete_finished_keys(store, ["first", "arrived", "result"])
            return []
        problems = self._exchange_records(record, is_reporter=result == report)
        coordinator.publish_prefix()
        wait_for_readers(store, self.rank, lambda: store.add("arrived", 0) % _DIFFERENT)
        return problems

    def _is_equal(self, record: _Record) -> bool:
        """Return whether the request of this rank is equal to the first one in the store."""
        if record.failure or not record.request:
            return not record.failure
        digest = hashlib.sha256(json.dumps(record.request).encode()).hexdigest()
        return bool(self.store.compare_set("first", "", digest) == digest.encode())

    def _exchange_records(self, record: _Record, *, is_reporter: bool) -> list[str]:
        """Write the record of this rank after a failed phase, and return the problems of all.

        Args:
            record: the record of this rank.
            is_reporter: whether this rank finds the problems for all.
        """
        store = self.store
        store.set(f"record/{self.rank}", json.dumps(record))
        num_records = store.add("records", 1)
        if is_reporter:
            # All ranks that have arrived write their records at once.
            deadline = time.monotonic() + _FAILURE_GRACE_PERIOD.total_seconds()
            while num_records < store.add("arrived", 0) % _DIFFERENT and time.monotonic() < deadline:
                time.sleep(0.01)
                num_records = store.add("records", 0)
            store.set("problems", json.dumps(self._find_problems()))
        problems: list[str] = json.loads(wait_for_value(store, "problems", _STORE_TIMEOUT))
        return problems

    def _find_problems(self) -> list[str]:
        """Return the problems in the records of a failed phase."""
        failures = {}
        requests = {}
        for rank, record in self._read_records().items():
            if record.failure:
                failures[rank] = record.failure
            requests[rank] = record.request
        problems = []
        if not failures:
            # A failed rank has no request. It would differ in every field.
            problems += find_differences(requests)
        missing = sorted(set(range(self.world_size)) - set(requests))
        # Before the deadline, a missing rank may just be blocked inside torch, where it waits for
        # the rank that has failed. Then it is not to blame.
        if missing and (not failures or time.monotonic() > self.deadline):
            action = f"call {self.call}"
            if self.phase == "done":
                action = f"reach the end of {self.call}"
            problems.append(format_missing(missing, self.world_size, action, self.timeout))
        for rank in list(failures)[:3]:
            problems.append(f"rank {rank} failed in {self.call}: {failures[rank]}")
        return problems

    def _read_records(self) -> dict[int, _Record]:
        """Return the records of the ranks that have written one in this phase, by rank."""
        keys = find_existing_keys(self.store, [f"record/{rank}" for rank in range(self.world_size)])
        records = {}
        for key, text in zip(keys, get_values(self.store, keys), strict=True):
            rank = int(key.removeprefix("record/"))
            records[rank] = _Record(*json.loads(text))
        return records

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
