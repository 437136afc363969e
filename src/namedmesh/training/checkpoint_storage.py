"""The files of a checkpoint: a plain folder of torch.distributed.checkpoint (DCP).

DCP's ``.metadata`` describes the tensors and names their files. A save replaces it last, in one
step, so a checkpoint is complete or absent. namedmesh adds to DCP's format

- a trailer behind the pickle in ``.metadata``, which unpickling ignores: JSON about the checkpoint,
  with the checksum of the pickle, so that a folder can be listed without reading much;
- the checksum of the stored bytes of each item, as an attribute of its place in a file;
- further entries, whose names start with ``namedmesh.``.
"""

from __future__ import annotations

import io
import mmap
import os
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex

from namedmesh.errors import CheckpointError, format_items
from namedmesh.training.checkpoint_metadata import METADATA_NAME, make_corrupted_error, pack_metadata

VALUES_NAME = "namedmesh.values"
"""The entry with the extra values, the options of optimizers, and aliases of names."""
VISIBILITY_TIMEOUT = 20.0
"""Seconds until a host of a network file system sees a file of another host."""

_REMEDY = "give a path on a file system that all hosts share, such as NFS or Lustre"
_QUIET_SECONDS = 2
# Checksums of smaller files take less time than to start threads.
_THREADS_MIN_BYTES = 1 << 25


# --- progress and checksums ---


class Progress:
    """One line on a terminal about the bytes that rank 0 has written or read.

    It appears after two seconds, and never if the error output is not a terminal.

    Args:
        label: what is done, such as "saving checkpoints/step-000100".
        is_shown: whether this rank shows it.
    """

    def __init__(self, label: str, *, is_shown: bool) -> None:
        self.label = label
        self._is_shown = is_shown and sys.stderr.isatty()
        self._start = self._last = time.monotonic()
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count bytes that were written or read, and show the line once a second."""
        self._bytes += count
        now = time.monotonic()
        if self._is_shown and now > max(self._start + _QUIET_SECONDS, self._last + 1):
            self._last = now
            self._show("")

    def end(self) -> None:
        """End the line, if it was shown."""
        if self._last > self._start:
            self._show("\n")

    def _show(self, end: str) -> None:
        seconds = time.monotonic() - self._start
        sys.stderr.write(f"\r{self.label}: {self._bytes / 1e6:,.0f} MB on rank 0, {seconds:.0f} s{end}")
        sys.stderr.flush()


def compute_checksums(file: Path, places: Sequence[Any], add_bytes: Callable[[int], None]) -> list[int]:
    """Return the checksum of the stored bytes of each place in a file.

    The file is mapped, so nothing is copied. zlib releases the GIL, so large files are read in
    threads.

    Args:
        file: the file.
        places: objects with an offset and a length.
        add_bytes: is called with the length of each place.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    sums: list[int] = []
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(4) as pool,
    ):

        def compute(place: Any) -> int:
            return zlib.crc32(view[place.offset : place.offset + place.length])

        compute_all = pool.map if len(view) > _THREADS_MIN_BYTES else map
        for place, checksum in zip(places, compute_all(compute, places), strict=True):
            sums.append(checksum)
            add_bytes(place.length)
    return sums


def group_by_file(places: Iterable[Any]) -> dict[str, list[Any]]:
    """Return places in files by the name of the file."""
    by_file: dict[str, list[Any]] = {}
    for place in places:
        by_file.setdefault(place.relative_path, []).append(place)
    return by_file


# --- files ---


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


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- writing ---


class StorageWriter(dcp.FileSystemWriter):
    """DCP's writer. An earlier checkpoint in the folder stays until the end.

    The names of its files have a random part, so they do not meet the files of another save.

    Args:
        target: the folder of the checkpoint.
        manifest: the layout and the run, for the trailer of ``.metadata``.
        add_names: adds names to the metadata.
        order: returns the position in the order in which checkpoints were finished.
        on_finish: called on rank 0 after the checkpoint is complete.
        on_cpu: whether all tensors are on the CPU.
    """

    def __init__(
        self,
        target: Path,
        manifest: dict[str, Any],
        add_names: Callable[[dcp.Metadata], None],
        order: Callable[[], int],
        on_finish: Callable[[], None],
        *,
        on_cpu: bool,
    ) -> None:
        super().__init__(target)
        if on_cpu:
            # Otherwise DCP copies ahead on a stream of an accelerator, which the CPU does not need.
            self.per_thread_copy_ahead = 0
        self._target = target
        self._manifest = manifest
        self._add_names = add_names
        self._order = order
        self._on_finish = on_finish

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Check that this host sees the folder that rank 0 has made.

        Raises:
            CheckpointError: it does not.
        """
        if not wait_until_visible(self._target):
            raise CheckpointError(f"{self._target} is not the folder that rank 0 sees; {_REMEDY}")
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Add a random part to the names of the files. DCP calls it on rank 0."""
        token = secrets.token_hex(8)
        prepared: list[dcp.SavePlan] = super().prepare_global_plan(plans)
        for plan in prepared:
            storage: Any = plan.storage_data
            storage.prefix = f"__{token}{storage.prefix}"
        return prepared

    def write_data(self, plan: dcp.SavePlan, planner: Any) -> Any:
        """Write this rank's items, and add the checksum of the stored bytes to each result."""
        done = super().write_data(plan, planner)
        results = done.value()
        for name, places in group_by_file(result.storage_data for result in results).items():
            checksums = compute_checksums(self._target / name, places, lambda _: None)
            for place, checksum in zip(places, checksums, strict=True):
                place.crc32 = checksum
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Replace ``.metadata``, after all ranks have written. DCP calls it on rank 0.

        Raises:
            CheckpointError: a file is missing or cut off, or this host does not see it.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {}
        for result in chain.from_iterable(results):
            metadata.storage_data[result.index] = result.storage_data
        metadata.storage_meta = self.storage_meta()
        sizes: dict[str, int] = {}
        for name, places in group_by_file(metadata.storage_data.values()).items():
            sizes[name] = max(place.offset + place.length for place in places)
        self._check_files(sizes)
        self._add_names(metadata)
        manifest = self._manifest | {"files": sizes, "order": self._order()}
        temporary = self._target / f"{METADATA_NAME}.tmp"
        with temporary.open("wb") as file:
            file.write(pack_metadata(metadata, manifest))
            file.flush()
            os.fsync(file.fileno())
        # The rename makes the checkpoint complete. Everything that ``.metadata`` names has to be on
        # the disk before, and the new name after it: an older checkpoint may be removed next.
        sync_directory(self._target)
        temporary.replace(self._target / METADATA_NAME)
        sync_directory(self._target)
        sync_directory(self._target.parent)
        self._on_finish()

    def _check_files(self, sizes: dict[str, int]) -> None:
        """Check that rank 0 sees each file as it was written. Another host may have written it."""
        problems = []
        for name, size in sorted(sizes.items()):
            file = self._target / name
            if not wait_until_visible(file) or file.stat().st_size != size:
                problems.append(name)
        if problems:
            found = f"rank 0 does not see {format_items(problems, 4)} in {self._target} as they were written"
            raise CheckpointError(f"{found}; {_REMEDY}, and check that nothing removes files there")


# --- reading ---


def find_corrupted_files(folder: Path, places: Iterable[Any], add_bytes: Callable[[int], None]) -> list[str]:
    """Return the names of files that are missing, or whose stored bytes failed a checksum.

    Args:
        folder: the folder.
        places: the places to check. Those of other programs have no checksum.
        add_bytes: is called with the number of bytes that were read.
    """
    corrupted = []
    checked = [place for place in places if getattr(place, "crc32", None) is not None]
    for name, in_file in sorted(group_by_file(checked).items()):
        try:
            checksums = compute_checksums(folder / name, in_file, add_bytes)
        except (OSError, ValueError):
            checksums = []
        if checksums != [place.crc32 for place in in_file]:
            corrupted.append(name)
    return corrupted


def load_values(path: Path, metadata: dcp.Metadata) -> dict[str, Any]:
    """Return the values that a save has stored in addition to the entries.

    Raises:
        CorruptedError: the file is missing or failed its checksum.
    """
    place: Any = metadata.storage_data[MetadataIndex(VALUES_NAME)]
    if find_corrupted_files(path, [place], lambda _: None):
        raise make_corrupted_error(place.relative_path, path)
    with (path / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        stored = io.BytesIO(file.read(place.length))
    values: dict[str, Any] = torch.load(stored, weights_only=True, map_location="cpu")
    return values


class StorageReader(dcp.FileSystemReader):
    """DCP's reader, which checks all bytes before a tensor is changed.

    Args:
        folder: the folder with the files.
        metadata: DCP's metadata, which rank 0 has read for all.
        before_read: is called once with a function that checks the bytes, before one is read.
        progress: counts the bytes.
    """

    def __init__(
        self,
        folder: Path,
        metadata: dcp.Metadata,
        before_read: Callable[[Callable[[], None]], object],
        progress: Progress,
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata
        self._before_read = before_read
        self._progress = progress

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Return DCP's metadata about the tensors."""
        return self._metadata

    def set_up_storage_reader(self, metadata: dcp.Metadata, *arguments: Any, **named: Any) -> None:
        """Check that this host sees the folder that rank 0 has read.

        Raises:
            CheckpointError: it does not.
        """
        super().set_up_storage_reader(metadata, *arguments, **named)
        if not wait_until_visible(self._folder):
            raise CheckpointError(f"{self._folder} is visible on rank 0, but not here; {_REMEDY}")

    @torch.no_grad()
    def read_data(self, plan: dcp.LoadPlan, planner: Any) -> Any:
        """Check the bytes of this rank's plan, and read them.

        Raises:
            CorruptedError: a file is missing or failed its checksum.
        """

        def check() -> None:
            # Several items may be parts of one stored shard.
            places: dict[int, Any] = {}
            for item in plan.items:
                place = self.storage_data[item.storage_index]
                places[id(place)] = place
            for name in find_corrupted_files(self._folder, places.values(), self._progress.add):
                raise make_corrupted_error(name, self._folder)

        self._before_read(check)
        return super().read_data(plan, planner)
