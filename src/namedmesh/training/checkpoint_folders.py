"""Folders of checkpoints: complete ones, leftovers, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NamedTuple
from weakref import WeakValueDictionary, finalize

from namedmesh._errors import CheckpointError, format_items
from namedmesh.training.checkpoint_storage import DATA_FILE, METADATA_NAME, CorruptedError, read_manifest

_LOCK_NAME = ".namedmesh.lock"


class CheckpointEntry(NamedTuple):
    """A checkpoint in a directory of checkpoints.

    Attributes:
        path: the folder of the checkpoint.
        order: the position in the order in which checkpoints were saved. A corrupted checkpoint
            comes after all others.
        files: the size of each file with data; None if the checkpoint is corrupted.
        run: the run that it belongs to; None if it belongs to no run.
        error: the error of a corrupted checkpoint, about which nothing else is known.
    """

    path: Path
    order: float
    files: dict[str, int] | None = None
    run: str | None = None
    error: CorruptedError | None = None


def is_complete(path: Path) -> bool:
    """Return whether a folder has the file that makes it a complete checkpoint.

    Raises:
        OSError: the file system cannot tell, for example because of an I/O error.
    """
    try:  # is_file() of Python 3.14 returns False for every error
        (path / METADATA_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read_entry(path: Path) -> CheckpointEntry | None:
    """Return the entry of a checkpoint; None if there is no complete checkpoint of namedmesh."""
    try:
        manifest = read_manifest(path) if is_complete(path) else None
    except FileNotFoundError:  # another job has removed it in the meantime
        return None
    except CorruptedError as error:
        return CheckpointEntry(path, order=float("inf"), error=error)
    if manifest is None:
        return None
    return CheckpointEntry(path, manifest["order"], manifest["files"], manifest["run"])


def list_checkpoints(directory: Path) -> list[CheckpointEntry]:
    """Return the checkpoints in a directory, in the order in which they were saved."""
    entries = [read_entry(path) for path in sorted(directory.glob("*"))]
    return sorted(filter(None, entries), key=lambda entry: entry.order)


def find_latest(directory: Path) -> Path | None:
    """Return the checkpoint that was saved last, among those that have all of their files.

    It warns about each corrupted checkpoint that it skips.
    """
    for entry in reversed(list_checkpoints(directory)):
        # Sizes are enough here: the checksums of large files take long, and load() checks them.
        incomplete = []
        for name, size in (entry.files or {}).items():
            file = entry.path / name
            if not file.is_file() or file.stat().st_size != size:
                incomplete.append(name)
        if entry.error is None and not incomplete:
            return entry.path
        if incomplete and read_entry(entry.path) != entry:
            return find_latest(directory)  # another job has replaced or removed it in the meantime
        problem = entry.error or f"{entry.path}: {format_items(incomplete, 4)} is missing or has another size"
        warnings.warn(f"skipped: {problem}", stacklevel=2)
    return None


# --- writing and removing ---


def prepare_folder(target: Path) -> tuple[Lock, int]:
    """Make and lock the folder of a checkpoint, and remove leftovers there.

    Returns:
        The lock, which the save keeps until it has finished, and the position of the checkpoint in
        the order of those in the directory.

    Raises:
        CheckpointError: another job saves there; it is a symbolic link; or it has files of other
            programs and no checkpoint.
    """
    if target.is_symlink():
        raise CheckpointError(
            f"{target} is a symbolic link, and a save would replace what is behind it; remove the "
            "link, or give another path"
        )
    lock = Lock.acquire(target)
    remove_leftovers(target)
    others = [file for file in target.iterdir() if file.name != _LOCK_NAME]
    if others and read_entry(target) is None:
        raise CheckpointError(f"{target} exists and is not a namedmesh checkpoint; give another path")
    orders = [int(entry.order) for entry in list_checkpoints(target.parent) if entry.error is None]
    return lock, max(orders, default=0) + 1


def remove_leftovers(path: Path) -> None:
    """Remove the files of interrupted saves, and of a checkpoint that was replaced.

    Nothing is removed behind a symbolic link, while another job saves there, or if the checkpoint
    is corrupted, because it may name any of the files.
    """
    if path.is_symlink() or not path.is_dir():
        return
    entry = read_entry(path)
    if (entry is None and is_complete(path)) or (entry is not None and entry.error):
        return
    kept = {} if entry is None else entry.files or {}
    leftovers = [file for file in path.iterdir() if DATA_FILE.fullmatch(file.name) and file.name not in kept]
    leftovers += path.glob(f"{METADATA_NAME}.tmp")
    # The lock of a process that was killed is a leftover, too: to acquire and release removes it.
    if leftovers or (entry is None and (path / _LOCK_NAME).exists()):
        try:
            lock = Lock.acquire(path)
        except CheckpointError:
            return
        for file in leftovers:
            file.unlink(missing_ok=True)
        del lock  # with its file, unless a save of this process holds it
    if entry is None:
        with suppress(OSError):  # it has other files, or does not exist
            path.rmdir()


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, unless it is a symbolic link: it was moved to an archive then."""
    if not path.is_symlink():
        # The file that makes it complete goes first. An interrupted removal leaves no checkpoint.
        (path / METADATA_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


# --- locks ---


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
        path = directory / _LOCK_NAME
        self.descriptor: int = _lock_file(path)
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
                f"{path.parent} is in use by {holder}, which saves its checkpoints there. Give "
                "this job a directory of its own, or end that process."
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
