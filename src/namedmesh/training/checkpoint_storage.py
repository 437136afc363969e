"""The files of a checkpoint: a plain folder of torch.distributed.checkpoint (DCP).

DCP's ``.metadata`` describes the tensors and names their files. A save replaces it last, in one
step, so a checkpoint is complete or absent. namedmesh adds to DCP's format

- the checksum of the stored bytes of each item, as an attribute of its place in a file;
- behind the pickle in ``.metadata``, which unpickling ignores: a table with the extra values and
  what the loader needs to know about the ranks, and the manifest, a JSON text by which a folder is
  listed without reading much.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import re
import secrets
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import MetadataIndex

from namedmesh._errors import CheckpointError, format_items, get_first_line
from namedmesh._torch.modules import make_storage_unpicklers
from namedmesh.training.checkpoint_names import Names

METADATA_NAME = ".metadata"
DATA_FILE = re.compile(r"__[0-9a-f]{16}__\d+_\d+\.distcp")
"""The names of files with tensors. Those of other programs have no random part."""
VISIBILITY_TIMEOUT = 20.0
"""Seconds until a host of a network file system sees a file of another host."""

_MAGIC = b"namedmesh 1\n"
# The end of ``.metadata``: the length of the manifest in front of it, its checksum, and the magic.
_FOOTER = struct.Struct(f">II{len(_MAGIC)}s")
_REMEDY = "give a path on a file system that all hosts share, such as NFS or Lustre"
_QUIET_SECONDS = 2
# Checksums of smaller files take less time than to start threads.
_THREADS_MIN_BYTES = 1 << 25


class CorruptedError(CheckpointError):
    """A file of a checkpoint is missing, or its checksum is wrong."""


def make_corrupted_error(name: str, path: Path) -> CorruptedError:
    """Return the error for a file of the checkpoint at ``path``."""
    problem = f"the checkpoint {path} is corrupted: {name} is missing, or failed its checksum"
    return CorruptedError(f"{problem}; load an older checkpoint")


# --- the metadata ---


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the pickled ``.metadata`` of DCP, and rejects everything that is no part of one.

    The allowed names stand for functions and classes of this object, so that a file cannot change
    the attributes of torch's.
    """

    def __init__(self, contents: bytes) -> None:
        super().__init__(io.BytesIO(contents))
        self._allowed = make_storage_unpicklers()

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.get((module, name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")
        return found


def pack_metadata(metadata: dcp.Metadata, table: Mapping[str, Any], manifest: Mapping[str, Any]) -> bytes:
    """Return the contents of a ``.metadata``.

    Args:
        metadata: DCP's metadata.
        table: what the loader needs to know about the ranks, and the extra values.
        manifest: what the listing of a directory needs to know.
    """
    written = io.BytesIO(pickle.dumps(metadata))
    start = written.seek(0, os.SEEK_END)
    torch.save(dict(table), written)
    contents = written.getvalue()
    text = json.dumps({**manifest, "table": start, "checksum": zlib.crc32(contents)}).encode()
    return contents + text + _FOOTER.pack(len(text), zlib.crc32(text), _MAGIC)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint; None for a folder of another program.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CorruptedError: the manifest is cut off, or failed its checksum.
    """
    with (path / METADATA_NAME).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        if len(footer) < _FOOTER.size or not footer.endswith(_MAGIC):
            if any(DATA_FILE.fullmatch(other.name) for other in path.iterdir()):
                raise make_corrupted_error(METADATA_NAME, path)
            return None
        length, checksum, _ = _FOOTER.unpack(footer)
        start = max(0, size - _FOOTER.size - length)
        file.seek(start)
        text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise make_corrupted_error(METADATA_NAME, path)
    manifest: dict[str, Any] = json.loads(text)
    return manifest | {"start": start}


def unpickle_metadata(contents: bytes, path: Path) -> dcp.Metadata:
    """Return the metadata in a pickle of DCP, without running code that it names.

    Args:
        contents: the pickle.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: it is not DCP's metadata, or it names a file that is not in the folder.
    """
    try:
        metadata: Any = _MetadataUnpickler(contents).load()
        names = {place.relative_path for place in metadata.storage_data.values()}
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: its {METADATA_NAME} is not the metadata of "
            f"torch.distributed.checkpoint ({get_first_line(error)})"
        ) from error
    for name in names:
        check_file_name(name, path)
    return metadata  # type: ignore[no-any-return]


def read_metadata(path: Path) -> tuple[dcp.Metadata, dict[str, Any]]:
    """Return DCP's metadata of a folder, and the table with the manifest.

    Args:
        path: the folder. The table of another program's is empty.

    Raises:
        CorruptedError: the file failed its checksum.
        CheckpointError: it is not DCP's metadata, or it names a file that is not in the folder.
    """
    manifest = read_manifest(path)
    contents = (path / METADATA_NAME).read_bytes()
    if manifest is None:
        return unpickle_metadata(contents, path), {}
    contents = contents[: manifest["start"]]
    if zlib.crc32(contents) != manifest["checksum"]:
        raise make_corrupted_error(METADATA_NAME, path)
    stored = io.BytesIO(contents[manifest["table"] :])
    table = torch.load(stored, weights_only=True, map_location="cpu")
    return unpickle_metadata(contents, path), {**manifest, **table}


def check_file_name(name: object, path: Path) -> None:
    """Check that a name in a file of a checkpoint is the name of a file in its folder.

    Raises:
        CheckpointError: it may be outside.
    """
    if not isinstance(name, str) or name in {"", ".", ".."} or Path(name).name != name:
        raise CheckpointError(f"the checkpoint {path} names the file {name!r}, which is not in its folder")


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


def group_by_file(places: Iterable[Any]) -> dict[str, list[Any]]:
    """Return places in files by the name of the file."""
    by_file: dict[str, list[Any]] = {}
    for place in places:
        by_file.setdefault(place.relative_path, []).append(place)
    return by_file


def compute_checksums(file: Path, places: Iterable[Any]) -> list[int]:
    """Return the checksum of the stored bytes of each place in a file.

    The file is mapped, so nothing is copied. zlib releases the GIL, so large files are read in
    threads.

    Args:
        file: the file.
        places: objects with an offset and a length.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(4) as pool,
    ):

        def compute(place: Any) -> int:
            return zlib.crc32(view[place.offset : place.offset + place.length])

        compute_all = pool.map if len(view) > _THREADS_MIN_BYTES else map
        return list(compute_all(compute, places))


def check_places(path: Path, places: Iterable[Any], progress: Progress) -> None:
    """Check the stored bytes of places in the files of a checkpoint.

    Args:
        path: the checkpoint.
        places: the places. Those of other programs have no checksum, and are not checked.
        progress: counts the bytes.

    Raises:
        CorruptedError: a file is missing, or failed its checksum.
        CheckpointError: this host does not see the folder.
    """
    if not wait_until_visible(path):
        raise CheckpointError(f"{path} is visible on rank 0, but not here; {_REMEDY}")
    checked = [place for place in places if getattr(place, "crc32", None) is not None]
    for name, in_file in group_by_file(checked).items():
        checksums: list[int] = []
        with suppress(OSError, ValueError):
            checksums = compute_checksums(path / name, in_file)
        if checksums != [place.crc32 for place in in_file]:
            raise make_corrupted_error(name, path)
        progress.add(sum(place.length for place in in_file))


# --- writing ---


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


class StorageWriter(dcp.FileSystemWriter):
    """DCP's writer. An earlier checkpoint in the folder stays until the end.

    The names of its files have a random part, so they do not meet the files of another save.

    Args:
        target: the folder of the checkpoint.
        table: the table of the checkpoint, which rank 0 writes.
        manifest: the layout, the run and the order for the manifest.
        on_finish: called on rank 0 after the checkpoint is complete.
    """

    def __init__(
        self,
        target: Path,
        table: Mapping[str, Any],
        manifest: Mapping[str, Any],
        on_finish: Callable[[], object],
    ) -> None:
        super().__init__(target)
        self._target = target
        self._table = table
        self._manifest = manifest
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
        for name, places in group_by_file(result.storage_data for result in done.value()).items():
            checksums = compute_checksums(self._target / name, places)
            for place, checksum in zip(places, checksums, strict=True):
                place.crc32 = checksum
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Replace ``.metadata``, after all ranks have written. DCP calls it on rank 0.

        Raises:
            CheckpointError: a file is missing or cut off, or this host does not see it.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}
        for result in chain.from_iterable(results):
            metadata.storage_data[result.index] = result.storage_data
        sizes: dict[str, int] = {}
        for name, places in group_by_file(metadata.storage_data.values()).items():
            sizes[name] = max(place.offset + place.length for place in places)
        self._check_files(sizes)
        _add_names(metadata, Names(*self._table["names"]).aliases)
        temporary = self._target / f"{METADATA_NAME}.tmp"
        with temporary.open("wb") as file:
            file.write(pack_metadata(metadata, self._table, {**self._manifest, "files": sizes}))
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


def _add_names(metadata: dcp.Metadata, aliases: Mapping[str, str]) -> None:
    """Let torch's tools find the weights of a checkpoint under further names.

    The further names share the stored bytes: those of tied weights, and those of weights without
    "model.", by which torchtitan finds them.

    Args:
        metadata: the metadata, which is changed.
        aliases: the further names of parameters, and the names that they are saved under.
    """
    entries = metadata.state_dict_metadata
    paths: dict[str, tuple[str, ...]] = metadata.planner_data
    keys = {entry: [entry.removeprefix("model.")] for entry in entries if entry.startswith("model.")}
    for alias, name in aliases.items():
        keys.get(f"model.{name}", []).append(alias)
    places: dict[Any, Any] = metadata.storage_data
    for index, place in list(places.items()):
        for key in keys.get(index.fqn, ()):
            for name in (f"model.{key}", key):
                # With the path of the long name, DCP's converters make one weight of both. The name
                # may be that of another entry already.
                if paths.setdefault(name, ("model", key)) == ("model", key):
                    entries[name] = entries[index.fqn]
                    places[MetadataIndex(name, index.offset, index.index)] = place
