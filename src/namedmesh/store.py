"""Questions to the store of a job: each has a limit, and signals take effect while an answer is awaited.

torch's own client waits without limit for the answer of a host that it cannot reach any more, and Python sees no signal
before the answer is there. So whatever asks the store does so in a thread, and the caller waits for the thread.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

T = TypeVar("T")

ANSWER_LIMIT = 60.0
"""The seconds after which a store that does not answer a question counts as unreachable."""

NO_ANSWER = "its host did not answer, so it hangs, or this host is cut off"
"""Why a store counts as lost that nobody answers for."""

LOOK_EVERY = 0.5
"""How often, in seconds, :func:`in_thread` looks at what it was given to look at."""


class StoreLostError(Exception):
    """The store cannot be asked any more; the text says why. Callers add what they were doing."""


class _AbandonedError(Exception):
    """Nobody waits any more for what a thread asks."""


class LimitedStore:
    """A store as a thread of :func:`ask` sees it; keys and values are texts.

    Args:
        store: the store.
        limit: the seconds within which it answers a question that waits for no other rank.

    Attributes:
        deadline: when the store ought to have answered the question that it is asked.
        abandoned: whether nobody waits any more: the thread ends with its next question.
    """

    def __init__(self, store: dist.Store, limit: float) -> None:
        self._store, self._limit = store, limit
        extended: Any = store
        self._extended = extended if extended.has_extended_api() else None
        self.abandoned = False
        self.deadline = math.inf

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a number, which begins at 0, and return the sum."""
        return self._answer(self._store.add, key, amount)

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._answer(self._store.set, key, value)

    def set_all(self, values: Mapping[str, str]) -> None:
        """Set keys, in one question where the store can take it."""
        if self._extended is not None:
            self._answer(self._extended.multi_set, [*values], [*values.values()])
        else:
            for key, value in values.items():
                self.set(key, value)

    def get(self, key: str) -> str:
        """Return the value of a key that is set."""
        return self._answer(self._store.get, key).decode()

    def get_all(self, keys: list[str]) -> list[str]:
        """Return the values of keys that are set, in one question where the store can take it."""
        if keys and self._extended is not None:
            return [value.decode() for value in self._answer(self._extended.multi_get, keys)]
        return [self.get(key) for key in keys]

    def has(self, key: str) -> bool:
        """Return whether a key is set."""
        return self._answer(self._store.check, [key])

    def first(self, key: str, value: str) -> str:
        """Set a key unless it is set; returns the value that it has then."""
        return self.swap(key, "", value)

    def swap(self, key: str, expected: str, value: str) -> str:
        """Set a key if it has the expected value (empty: none); returns the value that it has then."""
        return self._answer(self._store.compare_set, key, expected, value).decode()

    def delete(self, *keys: str) -> None:
        """Delete keys."""
        for key in keys:
            self._answer(self._store.delete_key, key)

    def appears(self, key: str, timeout: timedelta) -> bool:
        """Wait for a key; returns whether it was set in time."""
        try:
            self._answer(self._store.wait, [key], timeout, waits=timeout.total_seconds())
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a FileStore raises no DistStoreError
            return False
        return True

    def _answer(self, question: Callable[..., T], *arguments: Any, waits: float = 0.0) -> T:
        if self.abandoned:
            raise _AbandonedError
        self.deadline = time.monotonic() + self._limit + waits
        try:
            return question(*arguments)
        finally:
            self.deadline = math.inf


def ask(store: dist.Store, questions: Callable[[LimitedStore], T], *, limit: float = ANSWER_LIMIT) -> T:
    """Return what ``questions`` returns, which asks the store in a thread of its own.

    Args:
        store: any store.
        questions: called with the store in its limited form.
        limit: the seconds within which the store has to answer each question that waits for no other rank.

    Raises:
        StoreLostError: the host of the store has ended, or does not answer.
    """
    limited = LimitedStore(store, limit)

    def look() -> None:
        if time.monotonic() > limited.deadline:
            raise StoreLostError(
                f"its host did not answer within {limit:g} s, so it hangs, or this host or the link between them is cut off; "
                "see to the network, and start the job again from its last checkpoint"
            )

    try:
        return in_thread(lambda: questions(limited), look)
    except dist.DistNetworkError:
        raise StoreLostError(
            "the process that hosts it, rank 0 or torchrun's agent, has ended; see its output for why"
        ) from None
    finally:
        limited.abandoned = True


def open_in_thread(
    open_store: Callable[[timedelta], dist.Store], within: timedelta, limit: float
) -> dist.Store:
    """Return a store that a function opens within a time, in a thread of its own.

    Raises:
        StoreLostError: its host cannot be reached, or does not answer ``limit`` seconds after that time.
    """
    # torch tries again after a pause, which may be as long as its limit.
    pause = min(within.total_seconds(), ANSWER_LIMIT)
    overdue = time.monotonic() + within.total_seconds() + pause + limit

    def look() -> None:
        if time.monotonic() > overdue:
            raise StoreLostError(NO_ANSWER)

    try:
        return in_thread(lambda: open_store(within), look)
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise StoreLostError(
            f"its host cannot be reached ({reason}), so this host or the link between them is cut off"
        ) from None


def in_thread(function: Callable[[], T], look: Callable[[], None]) -> T:
    """Return what a function returns that may block, called in a thread; signals take effect meanwhile.

    Args:
        function: what to call.
        look: called now and then while the thread runs; where it raises an error, the thread is left alone.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001  raised by the caller
            outcome.append((None, error))
        ended.set()

    threading.Thread(target=run, daemon=True, name="namedmesh").start()
    while not ended.wait(LOOK_EVERY):
        look()
    value, error = outcome.pop()
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and with it the store
    return value  # type: ignore[return-value]  # there is one where there is no error
