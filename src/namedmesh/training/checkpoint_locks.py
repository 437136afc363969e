"""Locks on directories of checkpoints: one process at a time writes there, on any host."""

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
    """A lock on a directory, which ends when nothing refers to the object any more.

    The operating system keeps the lock (``fcntl.lockf``, also on NFS and Lustre), and releases it
    when the process ends. The lock file of a process that was killed is therefore stale, and the
    next job takes it over.

    Args:
        directory: the directory, which exists.

    Raises:
        CheckpointError: another process has the lock.
    """

    _held: ClassVar[WeakValueDictionary[tuple[int, Path], Lock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        path = directory / _NAME
        self.descriptor = _lock_file(path)
        os.ftruncate(self.descriptor, 0)
        os.write(self.descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())
        finalize(self, _release_file, self.descriptor, path, os.getpid())

    @classmethod
    def acquire(cls, directory: Path) -> Lock:
        """Return the lock that this process holds on a directory; acquire it if it holds none.

        Does not wait for another process.

        Args:
            directory: the directory, which is made if it does not exist.

        Raises:
            CheckpointError: another process has the lock.
        """
        directory.mkdir(parents=True, exist_ok=True)
        # A forked process has the memory of its parent, but not its locks.
        key = os.getpid(), directory.resolve()
        lock = cls._held.get(key)
        if lock is None:
            lock = cls._held[key] = cls(directory)
        return lock


def _lock_file(path: Path) -> int:
    """Open and lock a file, and return its descriptor.

    If the file system has no locks, it warns, and returns the descriptor of the unlocked file.

    Raises:
        CheckpointError: another process has the lock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EAGAIN}:
                # The file system has no locks, such as Lustre that is mounted without flock.
                problem = f"{path.parent} cannot be locked ({error})"
                warnings.warn(f"{problem}; make sure that one job at a time saves there", stacklevel=2)
                return descriptor
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise CheckpointError(
                f"{path.parent} is in use by {holder}, which saves its checkpoints there. Give this job a "
                "directory of its own, or end that process."
            ) from None
        # The previous process may have removed the file after it was opened here. Then the lock is
        # on a file without a name.
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)


def _release_file(descriptor: int, path: Path, process: int) -> None:
    """Close the lock file, and delete it unless this is a fork of the process that locked it."""
    if os.getpid() == process:
        path.unlink(missing_ok=True)
    os.close(descriptor)
