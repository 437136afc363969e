"""All ranks of a job wait for each other in a store before they create the default group; absent ranks are named.

A store may outlive the processes that use it: torchrun keeps its own when it restarts them, and a call that
failed may be repeated. So attempts are numbered in the store. A rank that took part in the current attempt before,
itself or before a restart, starts the next one, and the ranks that wait in the old attempt follow; keys that an
earlier process left are of no effect. A rank that calls after the others have failed gets the same error, and takes
part in the next attempt when it calls again.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.errors import AgreementError, LaunchError, listing

if TYPE_CHECKING:
    from collections.abc import Mapping

# The outcomes of an attempt; after the last one follow a colon and the reason.
_COMPLETE, _REPLACED, _FAILED = "complete", "replaced", "failed in restart "
# How long ranks that know of a failure wait for the rank that words it, and for the others to read it.
_OUTCOME_TIMEOUT = timedelta(seconds=60)
# The store that this process hosts, after a failed attempt: ranks that call late and the next attempt use it.
_store_of_failure: list[dist.Store] = []


def hosts_store(environment: Mapping[str, str], rank: int) -> bool:
    """Return whether this rank hosts the store: rank 0 does, unless torchrun's agent has one already."""
    return rank == 0 and not _hosted_by_agent(environment)


def _hosted_by_agent(environment: Mapping[str, str]) -> bool:
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(environment: Mapping[str, str], rank: int, timeout: timedelta) -> dist.Store:
    """Return the store at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        LaunchError: rank 0 cannot host it there, or another rank does not reach it within ``timeout``.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    is_host = hosts_store(environment, rank)
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,  # wait_for_ranks() does, and names the absent ones
            multi_tenant=True,
            use_libuv=environment.get("USE_LIBUV", "1") == "1",
        )
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        if is_host:
            raise LaunchError(
                f"rank 0 cannot host the store of the job at {host}:{port} ({reason}); set MASTER_ADDR to its host and "
                "MASTER_PORT to a port that is free there, the same on every rank"
            ) from None
        owner = "torchrun's agent" if _hosted_by_agent(environment) else "rank 0"
        raise LaunchError(
            f"{owner}, which hosts the store of the job at {host}:{port}, did not answer within "
            f"{timeout.total_seconds():g} s; see its output for why, and check MASTER_ADDR and MASTER_PORT ({reason})"
        ) from None


def wait_for_ranks(
    store: dist.Store,
    call: str,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    is_host: bool = False,
    restart: str = "",
    mistake: str | None = None,
) -> dist.Store:
    """Return once every rank has called this; communicates.

    Args:
        store: any store that all ranks share.
        call: what the ranks have called, for the message.
        rank: this rank.
        world_size: how many ranks there are.
        timeout: how long to wait for the others.
        is_host: whether the store ends with this process, which then waits until the others know of a failure.
        restart: how often the job was restarted over this store; no colon.
        mistake: why this rank cannot go on; it is reported to the others, and this one returns.

    Returns:
        A part of the store that nothing has written to, the same on every rank; after each call another.

    Raises:
        AgreementError: some ranks did not call within ``timeout``, or one made a mistake; the same on every
            rank, also on one that calls later. The next attempt of all ranks works.
    """
    attempts = _Attempts(store, call, rank, world_size, timeout, restart)
    outcome = _REPLACED
    try:
        while outcome == _REPLACED:
            missed = attempts.enter()
            if mistake is not None:
                outcome = _REPLACED if missed else attempts.fail(f"rank {rank} gave up on {call}: {mistake}")
            else:
                outcome = missed or attempts.outcome()
        if outcome != _COMPLETE:
            attempts.leave(world_size if mistake else 0, is_host=is_host)
    except dist.DistNetworkError:
        if mistake is None:
            raise AgreementError(
                f"the store of the job is gone during {call}: the process that hosts it, usually rank 0, has ended; "
                "see its output for why"
            ) from None
        return store
    if outcome == _COMPLETE:
        _store_of_failure.clear()
    elif mistake is None:
        raise AgreementError(outcome.partition(":")[2])
    return dist.PrefixStore(f"default_pg/{attempts.number}", store)


class _Attempts:
    """The attempts of the ranks to find each other, as one rank takes part in them."""

    def __init__(  # noqa: PLR0917  one call
        self, store: dist.Store, call: str, rank: int, world_size: int, timeout: timedelta, restart: str
    ) -> None:
        self.store, self.call, self.rank, self.world_size = store, call, rank, world_size
        self.timeout, self.failed = timeout, f"{_FAILED}{restart}:"
        self.shared = dist.PrefixStore("namedmesh/launch", store)
        self.number, self.again = 0, False
        self.current = self._keys_of(0)

    def enter(self) -> str | None:
        """Enter the current attempt, or the next one; returns the outcome of a failed one that this rank missed."""
        self.number = int(self.shared.compare_set("attempt", "", "0"))
        last = self._last_of(self.rank).partition(" ")[0]
        entered = int(last) if last else -1
        outcome = ""
        for missed in range(max(entered + 1, self.number - 1), self.number + 1):
            outcome = self._outcome_of(missed)
            if outcome.startswith(self.failed):
                self._enter(missed)
                return outcome
        old, others = self.number, self.again and entered == self.number
        if not others and (entered == old or outcome):
            # It was here before, or the other ranks were, before a restart; another may have started the next already.
            self.number = int(self.shared.compare_set("attempt", str(old), str(old + 1)))
        if self._enter(self.number) > 1 or others:
            return self.fail(
                f"two processes call {self.call} as rank {self.rank}; give each its own RANK, and each job on a machine its "
                "own MASTER_PORT"
            )
        if self.number != old:
            self._conclude(self._keys_of(old), _REPLACED)
        self.again = True
        return None

    def outcome(self) -> str:
        """Wait for the outcome of the attempt.

        Ranks arrive, and once all have arrived, each confirms it. A rank that arrived and was restarted since is
        counted twice as arrived, but the process that is gone does not confirm.
        """
        keys, here = self.current, [f"{self.number}", f"{self.number} confirmed"]
        if key_appeared(keys, "all_arrived", self.timeout):
            here = here[1:]
            self.shared.set(f"rank/{self.rank}", here[0])
            if keys.add("confirmed", 1) == self.world_size:
                self._conclude(keys, _COMPLETE)
            if key_appeared(keys, "outcome", self.timeout):
                return keys.get("outcome").decode()
        if keys.add("late", 1) > 1:  # another rank looks for the absent ones
            key_appeared(keys, "outcome", _OUTCOME_TIMEOUT)
            return self.fail(f"some ranks of 0 to {self.world_size - 1} did not call {self.call} in time")
        absent = [rank for rank in range(self.world_size) if self._last_of(rank) not in here]
        who = "rank " + listing(absent) if len(absent) == 1 else "ranks " + listing(absent)
        return self.fail(
            f"{who} of 0 to {self.world_size - 1} did not call {self.call} within {self.timeout.total_seconds():g} s; "
            "every rank of the job must call it, so look at what those ranks did instead"
        )

    def fail(self, reason: str) -> str:
        """Let the attempt fail, unless it has an outcome; returns that."""
        return self._conclude(self.current, self.failed + reason)

    def leave(self, readers: int, *, is_host: bool) -> None:
        """Leave a failed attempt. The host of the store waits for those that have arrived, or for ``readers`` ranks."""
        with suppress(dist.DistNetworkError):  # the host may be gone already
            self.current.set(f"read/{self.current.add('read', 1)}", "")
        if is_host:
            key_appeared(self.current, f"read/{readers or self.current.add('arrived', 0)}", _OUTCOME_TIMEOUT)
            _store_of_failure[:] = [self.store]

    def _enter(self, number: int) -> int:
        """Enter an attempt; returns how many processes have entered it as this rank."""
        self.number, self.current = number, self._keys_of(number)
        self.shared.set(f"rank/{self.rank}", str(number))
        if self.current.add("arrived", 1) == self.world_size:
            self.current.set("all_arrived", "")
        return self.current.add(f"entered/{self.rank}", 1)

    def _keys_of(self, number: int) -> dist.Store:
        return dist.PrefixStore(str(number), self.shared)

    def _last_of(self, rank: int) -> str:
        """Return the last attempt that a rank entered, and whether it confirmed that all had arrived."""
        return self.shared.compare_set(f"rank/{rank}", "", " none").decode()

    def _outcome_of(self, number: int) -> str:
        keys = self._keys_of(number)
        return keys.get("outcome").decode() if keys.check(["outcome"]) else ""

    @staticmethod
    def _conclude(keys: dist.Store, outcome: str) -> str:
        """Set the outcome of an attempt, unless it has one; returns the one that it has."""
        first = keys.compare_set("outcome", "", outcome).decode()
        keys.set("all_arrived", "")  # nobody needs to wait for more
        return first


def key_appeared(store: dist.Store, key: str, timeout: timedelta) -> bool:
    """Return whether a key appeared in time. A FileStore reports it as a plain RuntimeError."""
    try:
        store.wait([key], timeout)
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        return False
    return True
