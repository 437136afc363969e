"""The files of a checkpoint, their checksums, and the checkpoints in a directory.

A checkpoint is a directory. Its tensors are in a data directory with a random name, which the
manifest ``namedmesh.pt`` names. The manifest is replaced last, in one step, so a checkpoint is
complete or absent.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import struct
import time
import warnings
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from namedmesh.errors import CheckpointError, format_items

MANIFEST_NAME = "namedmesh.pt"
"""The manifest: it names the data directory, and orders the checkpoints.
Every save reads the manifests of all checkpoints in a directory, so they are small: a checksum and
JSON. Earlier releases wrote a file of this name with ``torch.save``, which had the values, too."""
VALUES_NAME = "values.pt"
"""The large values of a manifest, such as extra values, in the data directory."""
VISIBILITY_TIMEOUT = 20.0
"""Seconds until a host of a network file system sees a file of another host."""


class CorruptedError(CheckpointError):
    """A file of a checkpoint is missing, or its checksum is wrong."""


class MissingError(CheckpointError):
    """There is no complete checkpoint at a path."""


# --- one checkpoint ---


def make_data_directory(target: Path) -> str:
    """Make a new data directory in a checkpoint. Only rank 0 calls it.

    Args:
        target: the directory of the checkpoint, which is made if it does not exist.

    Returns:
        The name of the new directory.

    Raises:
        CheckpointError: the directory has other files, and is not a checkpoint.
    """
    remove_leftovers(target)
    if target.exists() and not is_complete(target) and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is not a namedmesh checkpoint; give another path")
    name = f"data-{secrets.token_hex(8)}"
    (target / name).mkdir(parents=True)
    return name


def wait_until_visible(path: Path) -> bool:
    """Wait until this host sees a file or directory that another host has made.

    Returns:
        True, or False if the path has not appeared before the timeout.
    """
    deadline = time.monotonic() + VISIBILITY_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        # NFS caches that a name does not exist, until the directory is listed.
        with suppress(OSError):
            list(path.parent.iterdir())
    return True


def write_file(path: Path, contents: bytes) -> None:
    """Write a file that survives a power failure once its directory is synchronized."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_corrupted_error(name: str, path: Path) -> CorruptedError:
    """Return the error for a file of the checkpoint at ``path``."""
    problem = f"the checkpoint {path} is corrupted: {name} is missing, or failed its checksum"
    return CorruptedError(f"{problem}; load an older checkpoint")


def verify_archive(contents: bytes) -> io.BytesIO:
    """Verify the checksums in a file that ``torch.save`` wrote, which ``torch.load`` does not.

    ``ZipFile.testzip`` would do the same, but copies the contents several times.

    Returns:
        The contents, for ``torch.load``.

    Raises:
        BadZipFile: the contents are not as they were written. Other errors of the modules zipfile
            and struct are raised for other kinds of corruption.
    """
    file = io.BytesIO(contents)
    view = memoryview(contents)
    for member in zipfile.ZipFile(file).infolist():
        # A header of 30 bytes, which ends with the lengths of the name and of an extra field,
        # precedes the name, the extra field and the contents of each member.
        name_start = member.header_offset + 30
        name_length, extra_length = struct.unpack_from("<HH", contents, name_start - 4)
        start = name_start + name_length + extra_length
        has_name = contents[name_start : name_start + name_length] == member.filename.encode()
        if not has_name or zlib.crc32(view[start : start + member.file_size]) != member.CRC:
            raise zipfile.BadZipFile
    file.seek(0)
    return file


def is_complete(path: Path) -> bool:
    """Return whether there is a complete checkpoint at a path.

    Raises:
        OSError: the file system cannot tell, for example because of an I/O error.
    """
    return _stat_manifest(path) is not None


def _stat_manifest(path: Path) -> os.stat_result | None:
    """Return the file status of a manifest, or None if there is no manifest."""
    try:  # is_file() of Python 3.14 returns False for every error
        return (path / MANIFEST_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_leftovers(path: Path) -> None:
    """Remove the data directories of interrupted saves, and then ``path`` if it is empty.

    Nothing is removed if the manifest is corrupted, because it may name any of the directories.
    """
    entry = _read_entry(path) if is_complete(path) else None
    if entry is not None and entry.error is not None:
        return
    for directory in path.glob("data-" + 16 * "[0-9a-f]"):
        if entry is None or directory.name != entry.data:
            shutil.rmtree(directory, ignore_errors=True)
    if entry is None:
        with suppress(OSError):  # it has other files, or does not exist
            path.rmdir()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, with the non-tensor values of its data directory.

    Raises:
        MissingError: there is no complete checkpoint at ``path``.
        CorruptedError: a file is missing or failed its checksum.
    """
    manifest = _read_manifest_file(path)
    if "values" not in manifest:
        return manifest  # of an earlier release
    file = path / manifest["data"] / VALUES_NAME
    contents = file.read_bytes() if file.exists() else b""
    if zlib.crc32(contents) != manifest["values"]:
        raise make_corrupted_error(VALUES_NAME, path)
    values: dict[str, Any] = torch.load(verify_archive(contents), weights_only=True)
    return manifest | values


def _read_manifest_file(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint without the values; raise as :func:`read_manifest`."""
    try:
        manifest: dict[str, Any] = _parse_manifest((path / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(_describe_absence(path)) from None
    except Exception as error:
        raise make_corrupted_error(MANIFEST_NAME, path) from error
    return manifest


def _parse_manifest(contents: bytes) -> Any:
    """Verify the checksum of a manifest file and decode it. Any error means corruption."""
    if zipfile.is_zipfile(io.BytesIO(contents)):  # of an earlier release
        return torch.load(verify_archive(contents), weights_only=True)
    checksum, _, text = contents.partition(b"\n")
    if int(checksum) != zlib.crc32(text):
        raise ValueError(checksum)
    return json.loads(text)


def _describe_absence(path: Path) -> str:
    """Return the message of a MissingError: the path has no complete checkpoint, and why."""
    if path.is_file():
        problem = f"{path} is a file, and a checkpoint is a directory that namedmesh.training.save() wrote"
        return f"{problem}. Read a file of torch.save() with torch.load()."
    if (path / ".metadata").exists():
        problem = f"{path} is a directory of torch.distributed.checkpoint without {MANIFEST_NAME}"
        remedy = f"with torch.distributed.checkpoint.load(), or give the directory that has {MANIFEST_NAME}"
        return f"{problem}. Read it {remedy}."
    return f"there is no complete checkpoint at {path}; name one that was saved"


# --- the checkpoints in a directory ---


class CheckpointEntry(NamedTuple):
    """A checkpoint in a directory of checkpoints, as its manifest describes it.

    Attributes:
        path: the directory of the checkpoint.
        order: the position in the order in which checkpoints were finished. A corrupted checkpoint
            comes after all others.
        data: the name of the data directory.
        run: the run that it belongs to; None if it belongs to no run.
        error: the error of a corrupted manifest. The data directory and the run are unknown then.
    """

    path: Path
    order: float
    data: str = ""
    run: str | None = None
    error: CorruptedError | None = None


_entries: dict[Path, tuple[tuple[int, ...], CheckpointEntry]] = {}
"""The entries that were read, each with the status of its manifest file at that time.

A save lists all checkpoints of a directory several times.
"""


def _read_entry(path: Path) -> CheckpointEntry:
    """Return the entry of a checkpoint, from a cache if its manifest file has not changed.

    Raises:
        MissingError: there is no complete checkpoint at ``path``.
    """
    stat = _stat_manifest(path)
    if stat is None:
        raise MissingError(_describe_absence(path))
    status = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if path not in _entries or _entries[path][0] != status:
        try:
            manifest = _read_manifest_file(path)
        except CorruptedError as error:
            return CheckpointEntry(path, order=float("inf"), error=error)
        entry = CheckpointEntry(path, manifest["order"], manifest["data"], manifest["run"])
        _entries[path] = (status, entry)
    return _entries[path][1]


def list_checkpoints(directory: Path) -> list[CheckpointEntry]:
    """Return the checkpoints in a directory, in the order in which they were finished."""
    entries = []
    for path in sorted(directory.glob("*")):
        # It may be something else, or another job may remove it at the same time.
        with suppress(MissingError):
            entries.append(_read_entry(path))
    return sorted(entries, key=lambda entry: entry.order)


def find_latest(directory: Path) -> Path | None:
    """Return the checkpoint that was finished last, among those that have all of their files.

    It warns about each corrupted checkpoint that it skips.
    """
    for entry in reversed(list_checkpoints(directory)):
        problem: object = entry.error
        if problem is None:
            try:
                incomplete = _find_incomplete_files(entry.path)
            except MissingError:
                continue
            if not incomplete:
                return entry.path
            problem = f"{entry.path}: {format_items(incomplete, 4)} is missing or has another size"
        warnings.warn(f"skipped: {problem}", stacklevel=2)
    return None


def _find_incomplete_files(path: Path) -> list[str]:
    """Return the names of the files of a checkpoint that are missing or truncated.

    Raises:
        MissingError: another job has removed the checkpoint in the meantime.
    """
    # Sizes are enough here: the checksums of large files take long, and load() verifies them.
    manifest = _read_manifest_file(path)
    sizes: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for file in (path / manifest["data"]).glob("*"):
            sizes[file.name] = file.stat().st_size
    incomplete = [name for name, size in manifest["files"].items() if sizes.get(name) != size]
    if incomplete and _read_manifest_file(path)["data"] != manifest["data"]:
        return _find_incomplete_files(path)  # another job has replaced it in the meantime
    return incomplete
