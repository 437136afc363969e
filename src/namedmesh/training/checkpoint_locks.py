"""Locks on directories of checkpoints: one process at a time writes there, also of several hosts."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary, finalize

from namedmesh.errors import CheckpointError

_NAME = ".namedmesh.lock"


class Lock:
    """The right of this process to write in a directory, until nothing refers to the lock any more.

    The operating system holds it (``fcntl.lockf``, which NFS and Lustre know, too), and ends it with
    the process. Therefore the file of a process that was killed is stale, and the next job takes it
    over.
    """

    _held: ClassVar[WeakValueDictionary[tuple[int, Path], Lock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        path = directory / _NAME
        self.descriptor = _lock(path)
        _write_holder(self.descriptor)
        finalize(self, _release, self.descriptor, path, os.getpid())

    @classmethod
    def of(cls, directory: Path) -> Lock:
        """Return the lock of this process on a directory, which is made.

        Raises:
            CheckpointError: another process has the lock.
        """
        directory.mkdir(parents=True, exist_ok=True)
        # A forked process has the memory of the first one, but not its locks.
        key = os.getpid(), directory.resolve()
        lock = cls._held.get(key)
        if lock is None:
            lock = cls._held[key] = cls(directory)
        return lock


def _lock(path: Path) -> int:
    """Return the descriptor of a file that this process has locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EAGAIN}:
                # Such as Lustre that is mounted without flock.
                warnings.warn(
                    f"{path.parent} can have no lock ({error}); let one job at a time save there",
                    stacklevel=2,
                )
                return descriptor
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise CheckpointError(
                f"{path.parent} is in use by {holder}, which saves its checkpoints there. Give this job a "
                "directory of its own, or end that process."
            ) from None
        # The process before may have removed the file after it was opened here. Then the lock is on a
        # file without a name.
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())


def _release(descriptor: int, path: Path, process: int) -> None:
    if os.getpid() == process:
        path.unlink(missing_ok=True)
    os.close(descriptor)
