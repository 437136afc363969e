"""The coordinator of a job, which numbers its coordinated calls over a common store.

The ranks of a job number their coordinated calls (:mod:`namedmesh.launch.agreement`) in the same order, so
that each call has its own keys in the store. torchrun restarts a job on the same store. Each run of
the job therefore has its own random prefix.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4
from weakref import ref

import torch.distributed as dist

from namedmesh._errors import AgreementError, format_ranks
from namedmesh._torch.groups import get_default_store

# Rank 0 polls the store for nonces, because torch logs each wait that times out.
_SHORTEST_POLL_SECONDS = 0.001
_LONGEST_POLL_SECONDS = 0.02
_NONCE = "[0-9a-f]{32}"
# torch's store takes more than linearly longer for more keys in one operation.
_KEYS_IN_ONE_OPERATION = 128
# How long the host of the store waits for ranks that may have failed.
_READER_GRACE_SECONDS = 10.0


class StoreCoordinator:
    """Numbers the coordinated calls of one job, and gives each run of the job its own keys.

    Args:
        store: a store that every rank can reach.
        rank: the global rank of this process.
        world_size: the number of ranks.

    Attributes:
        num_calls: the number of calls so far, which is the same on every rank.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        # The number is the same on every rank, since all ranks make the same calls in the same
        # order.
        self.num_calls = 0
        self._root_store: Any = dist.PrefixStore("namedmesh", store)
        self._run_prefix = uuid4().hex if rank == 0 else ""
        self._prefix_read_by_all = False
        if not store.has_extended_api():
            # No nonces can be appended to a FileStore. torch demands a new file for each run.
            self._run_prefix = "run"
            self._prefix_read_by_all = True
        self._finished_keys: list[tuple[dist.Store, str]] = []

    def run_store(self, call: str, timeout: timedelta) -> dist.Store:
        """Return a namespace of the store that only this run of the job uses.

        torchrun restarts the ranks of a job on the same store, so that the keys of previous
        attempts still exist and cannot be told from new ones. Rank 0 therefore generates a random
        prefix, and sends it to each rank in reply to a nonce that nobody has used before.

        Args:
            call: the call that needs the store, for the error.
            timeout: how long to wait for the reply of rank 0.

        Raises:
            AgreementError: rank 0 did not reply.
        """
        if not self._run_prefix:
            nonce = uuid4().hex
            self._root_store.append("nonces", nonce)
            try:
                self._run_prefix = wait_for_value(self._root_store, f"reply/{nonce}", timeout)
            except dist.DistStoreError:
                # Rank 0 stops replying once the call has failed. Then this rank is the late one,
                # and finds the result of the call under the prefix that rank 0 has published.
                self._run_prefix = self._find_published_prefix()
                if not self._run_prefix:
                    problem = format_missing([0], self.world_size, f"call {call}", timeout)
                    raise AgreementError(problem) from None
        return dist.PrefixStore(self._run_prefix, self._root_store)

    def serve_run_prefix(self, store: dist.Store, result_key: str, deadline: float) -> None:
        """Send the prefix of :meth:`run_store` from rank 0 to the ranks that request it.

        Returns once the call has a result, or the deadline is over.

        Args:
            store: the store of the call.
            result_key: the key of the call's result.
            deadline: the end of the wait, in seconds of :func:`time.monotonic`.
        """
        if self.rank != 0:
            return
        num_answered = 0
        pause = _SHORTEST_POLL_SECONDS
        while not self._prefix_read_by_all:
            if self._root_store.check(["nonces"]):
                text = self._root_store.get("nonces").decode()
                # The nonces of previous attempts are among them. Replies to them do no harm.
                replies = [f"reply/{nonce}" for nonce in re.findall(_NONCE, text)]
                for keys in split_keys(replies[num_answered:]):
                    self._root_store.multi_set(keys, [self._run_prefix] * len(keys))
                num_answered = len(replies)
            if time.monotonic() >= deadline or store.check([result_key]):
                return
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)
            time.sleep(pause)

    def publish_prefix(self) -> None:
        """Publish the prefix after a failed call, if this is rank 0.

        Ranks that arrive after rank 0 has exited can then read the result of the call.
        """
        if self.rank == 0 and not self._prefix_read_by_all:
            self._root_store.set("late", json.dumps([_get_restart_count(), self._run_prefix]))

    def _find_published_prefix(self) -> str:
        """Return the prefix that rank 0 has published in this run; empty if it has not."""
        if not self._root_store.check(["late"]):
            return ""
        restart_count, prefix = json.loads(self._root_store.get("late"))
        return str(prefix) if restart_count == _get_restart_count() else ""

    def delete_finished_keys(self, store: dist.Store, keys: Sequence[str]) -> None:
        """Delete the keys of the phase before this one. Each rank deletes its part of them.

        Nobody reads them any more, since every rank has arrived at this phase. So every rank has
        the prefix of the run, too.

        Args:
            store: the store of the call.
            keys: the keys of this phase, for the next call.
        """
        self._prefix_read_by_all = True
        for index, (old_store, key) in enumerate(self._finished_keys):
            if index % self.world_size == self.rank:
                old_store.delete_key(key)
        self._finished_keys = [(store, key) for key in keys]


def _get_restart_count() -> str:
    """Return torchrun's number of restarts on the same store; empty without torchrun."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


# The coordinator of the default group, if there is one, and a weak reference to the store of that
# group. torch drops the store together with the group. A dead reference thus marks a coordinator of
# an old group.
_default_coordinator: list[tuple[ref[dist.Store], StoreCoordinator]] = []


def set_default_coordinator(coordinator: StoreCoordinator) -> None:
    """Keep the coordinator of a new default group for later calls, such as ``init_mesh``.

    Args:
        coordinator: the coordinator. It is kept until the default group is destroyed.
    """
    _default_coordinator[:] = [(ref(get_default_store()), coordinator)]


def get_default_coordinator() -> StoreCoordinator:
    """Return the coordinator of the default group; create it if there is none."""
    store = get_default_store()
    if not _default_coordinator or _default_coordinator[0][0]() is not store:
        set_default_coordinator(StoreCoordinator(store, dist.get_rank(), dist.get_world_size()))
    return _default_coordinator[0][1]


def exchange_values(name: str, value: Any, missing: Any = None, *, timeout: timedelta) -> list[Any]:
    """Return the values of all ranks through the store of the default group.

    Collective: every rank of the world must call it.

    Args:
        name: the name of the value, which is used once.
        value: the value of this rank, as JSON can express it.
        missing: the value of a rank that has given none in time.
        timeout: how long to wait for the other ranks.
    """
    # A separate connection: a communicator that is being created may block the other one.
    store: Any = get_default_store()
    store = dist.PrefixStore(f"namedmesh/{name}", store.clone())
    rank = dist.get_rank()
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(str(rank), json.dumps(value))
    keys = [str(other) for other in range(dist.get_world_size())]
    found: list[str] = []
    for part in split_keys(keys):
        found += _wait_for_keys(store, part, deadline)
    texts = dict(zip(found, get_values(store, found), strict=True))
    wait_for_readers(store, rank, lambda: len(found))
    return [json.loads(texts[key]) if key in texts else missing for key in keys]


def split_keys(keys: Sequence[str]) -> list[Sequence[str]]:
    """Return keys in parts for one operation of the store each."""
    return [keys[i : i + _KEYS_IN_ONE_OPERATION] for i in range(0, len(keys), _KEYS_IN_ONE_OPERATION)]


def find_existing_keys(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the keys that exist in a store."""
    found: list[str] = []
    for part in split_keys(keys):
        # Usually all exist.
        if store.check(list(part)):
            found += part
        else:
            found += [key for key in part if store.check([key])]
    return found


def get_values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys that exist in a store."""
    if not store.has_extended_api():  # a FileStore
        return [store.get(key) for key in keys]
    values: list[bytes] = []
    for part in split_keys(keys):
        values += store.multi_get(list(part))
    return values


def wait_for_value(store: Any, key: str, timeout: timedelta) -> str:
    """Return the value of a key, once it exists.

    Args:
        store: the store.
        key: the key.
        timeout: how long to wait for it.

    Raises:
        DistStoreError: torch's, if the key does not exist in time.
    """
    # ``get`` waits, too, but always for the timeout of the store. A second does not matter.
    if timeout + timedelta(seconds=1) < store.timeout:
        store.wait([key], timeout)
    value: bytes = store.get(key)
    return value.decode()


def wait_for_readers(store: dist.Store, rank: int, count_expected: Callable[[], int]) -> None:
    """Count this rank as a reader, and let the host of the store wait for the others.

    The process is about to exit, and the store ends with it. torchrun's agent hosts the store
    itself.

    Args:
        store: the store, whose values this rank has read.
        rank: the global rank. Rank 0 hosts the store.
        count_expected: returns the number of ranks that will read.
    """
    store.add("num_readers", 1)
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    deadline = time.monotonic() + _READER_GRACE_SECONDS
    while time.monotonic() < deadline and store.add("num_readers", 0) < count_expected():
        time.sleep(_LONGEST_POLL_SECONDS)


def _wait_for_keys(store: dist.Store, keys: Sequence[str], deadline: float) -> list[str]:
    """Wait until all keys exist or the deadline is over, and return those that exist."""
    remaining = max(deadline - time.monotonic(), 0.01)
    try:
        store.wait(list(keys), timedelta(seconds=remaining))
    except dist.DistStoreError:
        return find_existing_keys(store, keys)
    return list(keys)


def format_missing(ranks: Sequence[int], world_size: int, action: str, timeout: timedelta) -> str:
    """Format the message about ranks that did not take part in a call.

    Args:
        ranks: the missing ranks.
        world_size: the number of ranks.
        action: the action that is missing, such as "call init_mesh".
        timeout: how long the other ranks have waited.
    """
    return (
        f"{format_ranks(ranks)} of {world_size} did not {action} within "
        f"{timeout.total_seconds():g} s; make sure that every rank makes the same calls in the "
        "same order"
    )
