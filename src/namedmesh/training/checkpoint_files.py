"""Where a checkpoint lies, and who writes it: DCP's writer and reader with our checks in their steps, directories, and ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import shutil
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh._internal import get_groups
from namedmesh._torch import make_dcp_wrapper
from namedmesh.errors import CheckpointError, NamedMeshError, format_items, format_ranks
from namedmesh.mesh import NamedMesh

_SHARE = "give a path on a file system that all hosts share, such as NFS or Lustre"
ABOUT = "namedmesh.pt"
"""The manifest. It names the directory of tensors next to it, and has what finds and orders
checkpoints. It is replaced last, in one step. Every save reads the manifests of all checkpoints in a
directory, so they are small: a checksum and JSON. Earlier releases wrote a file of this name with
torch.save, with all that a checkpoint says about itself."""
VALUES = "values.pt"
"""The rest of what a checkpoint says about itself, in the directory of tensors."""
LATE = 20.0
"""Seconds for which a host of a network file system may not see what another host has just made."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


class AbsentError(CheckpointError):
    """There is no finished checkpoint at a path."""


def new_directory(target: Path) -> str:
    """Make a directory for tensors in ``target``, and return its name; the first rank calls this."""
    clear(target)
    if target.exists() and not is_whole(target) and any(target.iterdir()):
        raise CheckpointError(f"{target} exists and is no checkpoint of ours; give another path")
    name = f"data-{secrets.token_hex(8)}"
    (target / name).mkdir(parents=True)
    return name


class Writer(dcp.FileSystemWriter):
    """DCP's, into a new directory in ``target``, which ``namedmesh.pt`` names once all ranks have written."""

    def __init__(
        self, target: Path, about: dict[str, Any], finished: Callable[[], None], *, on_cpu: bool
    ) -> None:
        super().__init__(target / about["data"])
        if on_cpu:
            # Tensors on the CPU need no stream of an accelerator, on which DCP otherwise copies ahead.
            self.per_thread_copy_ahead = 0
        self.target, self.about, self._finished = target, about, finished

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Raise CheckpointError if the directory is a different one on this host than on rank 0."""
        if not appears(Path(self.path)):
            raise CheckpointError(f"{self.target} is another directory than on rank 0; {_SHARE}")
        return plan

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Put the checkpoint in its place, on the first rank, after all have written."""
        super().finish(metadata, results)
        data = self.target / self.about["data"]
        # Another host has written some of the files, and this one may see them late.
        written = {result.storage_data.relative_path for some in results for result in some}
        if unseen := [name for name in sorted(written) if not appears(data / name)]:
            raise CheckpointError(
                f"{data} has no {format_items(unseen, 4)} on rank 0, but on the rank that wrote it; {_SHARE}"
            )
        manifest = {key: self.about.pop(key) for key in ("data", "layout", "run")}
        values = io.BytesIO()
        torch.save(self.about, values)
        _write(data / VALUES, values.getvalue())
        manifest["values"] = zlib.crc32(values.getvalue())
        manifest["metadata"] = zlib.crc32((data / ".metadata").read_bytes())
        manifest["files"] = {file.name: file.stat().st_size for file in data.iterdir()}
        orders = [about["order"] for _, about in in_order(self.target.parent) if "error" not in about]
        manifest["order"] = max(orders, default=0) + 1
        contents = json.dumps(manifest).encode()
        _write(data / ABOUT, b"%d\n%s" % (zlib.crc32(contents), contents))
        _sync(data)
        (data / ABOUT).replace(self.target / ABOUT)
        _sync(self.target)
        _sync(self.target.parent)
        clear(self.target)
        self._finished()


def appears(path: Path) -> bool:
    """Return whether this host sees a file or directory of another host, after a while at most."""
    deadline = time.monotonic() + LATE
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
        # NFS looks again for a name that it did not find once it has listed the directory.
        with suppress(OSError):
            list(path.parent.iterdir())
    return True


def _write(path: Path, contents: bytes) -> None:
    """Write a file, which outlives a power failure once its directory is synchronized."""
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Let the names in a directory outlive a power failure: an older checkpoint may be removed next."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Metadata(pickle.Unpickler):
    """Reads DCP's file about its tensors, which is pickled, and calls nothing that is not needed for that."""

    def find_class(self, module: str, name: str) -> Any:
        known = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
        known |= {
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        }
        value = getattr({"torch": torch, dcp_metadata.__name__: dcp_metadata}.get(module), name, None)
        of_dcp = getattr(value, "__module__", "") == dcp_metadata.__name__
        if of_dcp or isinstance(value, torch.dtype) or (module, name) in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")


def read_metadata(path: Path, about: dict[str, Any]) -> dcp.Metadata:
    """Return what DCP says about the tensors of a checkpoint; refuse what is not as it was written."""
    file = path / about["data"] / ".metadata"
    contents = file.read_bytes() if file.exists() else b""
    if zlib.crc32(contents) != about["metadata"]:
        raise _damaged(file.name, path)
    metadata: dcp.Metadata = _Metadata(io.BytesIO(contents)).load()
    return metadata


class Reader(dcp.FileSystemReader):
    """DCP's, with metadata that the first rank has read and sent; it refuses what is not as it was written."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        super().__init__(path / about["data"])
        self._where = path
        self._metadata: dcp.Metadata = about["tensors"]

    def read_metadata(self) -> dcp.Metadata:
        """Return what DCP says about the tensors."""
        return self._metadata

    @torch.no_grad()
    def read_data(self, plan: dcp.LoadPlan, planner: Any) -> Any:
        """Read this rank's part; each byte once, as it is checked."""
        for item in plan.items:
            self._read(item, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item: Any, planner: Any) -> None:
        place = self.storage_data[item.storage_index]
        try:
            with (Path(self.path) / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                contents = _checked(file.read(place.length))
            if item.type == dcp.planner.LoadItemType.BYTE_IO:
                planner.load_bytes(item, contents)
                return
            tensor = torch.load(contents, map_location="cpu", weights_only=True)
        except Exception as error:
            raise _damaged(place.relative_path, self._where) from error
        room = planner.lookup_tensor(item.dest_index)
        # Equal shapes are not enough: the stored shard may be another part of the tensor.
        is_all_of_both = item.lengths == room.shape == tensor.shape
        if room.is_cpu and is_all_of_both and room.stride() == tensor.stride():
            room.set_(tensor)  # without a copy
            return
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        planner.resolve_tensor(item).copy_(tensor)


def _damaged(name: str, path: Path) -> DamagedError:
    return DamagedError(f"{name} in the checkpoint {path} is not as it was written; load an older checkpoint")


def _checked(contents: bytes) -> io.BytesIO:
    """Return what torch.load reads, if it is as torch.save wrote it: with checksums, which torch does not compare.

    ``ZipFile.testzip`` does the same, and copies all of it several times.
    """
    file, view = io.BytesIO(contents), memoryview(contents)
    for each in zipfile.ZipFile(file).infolist():
        name = each.header_offset + 30  # behind a header of this size, which ends with two lengths
        length, padding = struct.unpack_from("<HH", contents, name - 4)
        start = name + length + padding
        known = contents[name : name + length] == each.filename.encode()
        if not known or zlib.crc32(view[start : start + each.file_size]) != each.CRC:
            raise zipfile.BadZipFile
    file.seek(0)
    return file


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint; any other error than its absence is raised."""
    return _stat(path) is not None


def _stat(path: Path) -> os.stat_result | None:
    """Return the state of a manifest; None if there is none."""
    try:  # is_file() of Python 3.14 returns False for all errors
        return (path / ABOUT).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def clear(path: Path) -> None:
    """Remove what interrupted saves have left, and then ``path`` if it is empty.

    Of a checkpoint whose manifest is damaged, nothing is removed.
    """
    place = _place(path) if is_whole(path) else {}
    if "error" in place:
        return
    for directory in path.glob("data-" + 16 * "[0-9a-f]"):
        if directory.name != place.get("data"):
            shutil.rmtree(directory, ignore_errors=True)
    if not place:
        with suppress(OSError):  # something is left, or it does not exist
            path.rmdir()


def read_about(path: Path) -> dict[str, Any]:
    """Return all that a checkpoint says about itself."""
    about = _read_manifest(path)
    if "values" not in about:
        return about  # of an earlier release
    file = path / about["data"] / VALUES
    contents = file.read_bytes() if file.exists() else b""
    if zlib.crc32(contents) != about["values"]:
        raise _damaged(VALUES, path)
    values: dict[str, Any] = torch.load(_checked(contents), weights_only=True)
    return about | values


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        return _parse_manifest((path / ABOUT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise AbsentError(_describe_absence(path)) from None
    except Exception as error:
        raise _damaged(ABOUT, path) from error


def _parse_manifest(contents: bytes) -> dict[str, Any]:
    about: dict[str, Any]
    if zipfile.is_zipfile(io.BytesIO(contents)):  # of an earlier release
        about = torch.load(_checked(contents), weights_only=True)
        return about
    checksum, _, text = contents.partition(b"\n")
    if int(checksum) != zlib.crc32(text):
        raise ValueError(checksum)
    about = json.loads(text)
    return about


def _describe_absence(path: Path) -> str:
    """Return what is at a path that has no finished checkpoint."""
    if path.is_file():
        return (
            f"{path} is a file, and a checkpoint is a directory that namedmesh.training.save() wrote. "
            "Read what torch.save() wrote with torch.load()."
        )
    if (path / ".metadata").exists():
        return (
            f"{path} is a folder of torch.distributed.checkpoint without {ABOUT}. Read it with "
            f"torch.distributed.checkpoint.load(), or give the directory that has {ABOUT}."
        )
    return f"there is no finished checkpoint at {path}; name one that was saved"


_places: dict[Path, tuple[tuple[int, ...], dict[str, Any]]] = {}
"""The order of each checkpoint, with the state of its manifest when it was read: a save asks
several times for all checkpoints of a directory."""


def _place(path: Path) -> dict[str, Any]:
    """Return the directory of tensors of a checkpoint, its run and its position in the order.

    Of a damaged manifest return the ``error``, and a position behind all others.
    """
    stat = _stat(path)
    if stat is None:
        raise AbsentError(_describe_absence(path))
    state = stat.st_ino, stat.st_mtime_ns, stat.st_size
    known = _places.get(path)
    if known is None or known[0] != state:
        try:
            about = _read_manifest(path)
        except DamagedError as error:
            return {"order": float("inf"), "error": error}
        known = _places[path] = state, {key: about[key] for key in ("data", "run", "order")}
    return known[1]


def in_order(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in a directory as they were finished, and damaged ones, with the ``error``, behind them."""
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(directory.glob("*")):
        # It may be something else, or a job that writes here may remove it meanwhile.
        with suppress(AbsentError):
            found[path] = _place(path)
    return sorted(found.items(), key=lambda item: item[1]["order"])


def latest(directory: Path) -> Path | None:
    """Return the checkpoint in a directory that was finished last and has all of its files."""
    path: Path
    for path, about in reversed(in_order(directory)):
        problem = about.get("error")
        if problem is None:
            try:
                incomplete = _incomplete_files(path)
            except AbsentError:
                continue
            if not incomplete:
                return path
            problem = f"{path}, of which {format_items(incomplete, 4)} is missing or has another size"
        warnings.warn(f"left out: {problem}", stacklevel=2)
    return None


def _incomplete_files(path: Path) -> list[str]:
    """Return the files of a checkpoint that are missing or cut off.

    Raises:
        AbsentError: a job has removed the checkpoint meanwhile.
    """
    about = _read_manifest(path)
    sizes: dict[str, int] = {}
    with suppress(FileNotFoundError):
        for file in (path / about["data"]).glob("*"):
            sizes[file.name] = file.stat().st_size
    incomplete = [name for name, size in about["files"].items() if sizes.get(name) != size]
    if incomplete and _read_manifest(path)["data"] != about["data"]:
        return _incomplete_files(path)  # a job has replaced it meanwhile
    return incomplete


# --- ranks ---


class Ranks:
    """All ranks of a mesh (without one, this process), on a gloo group that only checkpoints use.

    The group is held weakly, because ``destroy_process_group()`` has to end it with its threads.
    """

    _of: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Ranks]] = WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else ref(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.saving: Future[Path] | None = None
        self.pinned: dict[str, torch.Tensor] = {}  # into which saves in the background copy

    @classmethod
    def of(cls, mesh: NamedMesh | None) -> Ranks:
        """Return the ranks of a mesh. Collective: every rank of the mesh must call it."""
        if mesh is None:
            return cls(None)
        group = get_groups(mesh).get_checkpoint_group(mesh.layout)
        return cls._of.setdefault(group, cls(group))

    @property
    def arguments(self) -> dict[str, Any]:
        """What DCP takes: the group, or that there is none."""
        if self._group is None:
            return {"no_dist": True, "process_group": None}
        group = self._group()
        if group is None:
            raise CheckpointError(
                "The default group was destroyed, and the group of checkpoints with it. Before "
                "destroy_process_group(), wait for a save in the background: get its result(), or leave the "
                "'with' block of CheckpointManager."
            )
        return {"no_dist": False, "process_group": group}

    def finish(self) -> None:
        """Wait for the end of the save in the background, and raise its error, once; every rank has the same."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def from_first(self, what: str, function: Callable[[], Any]) -> Any:
        """Return on every rank what a function returns, or raise what it raises, on the first."""
        with self.told(what):
            return make_dcp_wrapper(**self.arguments).broadcast("checkpoint", partial(_sendable, function))

    def from_all(self, what: str, function: Callable[[], Any]) -> Any:
        """Call a function on every rank, and return all results; all raise what it raises on any."""
        with self.told(what):
            return make_dcp_wrapper(**self.arguments).all_gather("checkpoint", partial(_sendable, function))

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Raise what DCP raises in the block as an error of ours, and leave out what it says of one process alone."""
        alone = self._group is None
        try:
            with warnings.catch_warnings() if alone else nullcontext():
                if alone:
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  DCP's is no Exception
            raise _error_of_dcp(error, what, self.rank) from None


def _sendable(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or raise what can be sent to another rank."""
    try:
        return function()
    except (NamedMeshError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def by_ranks(problems: Mapping[int, Iterable[str]]) -> list[str]:
    """Return the problems of ranks, each once, with the ranks that have it; what the first one says concerns all of them."""
    ranks_of: dict[str, list[int]] = {}
    for rank, some in problems.items():
        for each in some:
            ranks_of.setdefault(each, []).append(rank)
    return [each if 0 in ranks else f"{format_ranks(ranks)}: {each}" for each, ranks in ranks_of.items()]


def _error_of_dcp(error: BaseException, what: str, rank: int) -> BaseException:
    """Return what DCP raises on every rank as one error, with a sentence for each cause and its ranks."""
    failures = error.failures if isinstance(error, dcp.api.CheckpointException) else {rank: (error, None)}
    causes: dict[int, Any] = {each: cause for each, (cause, _) in failures.items()}
    if isinstance(causes.get(rank), KeyboardInterrupt | SystemExit):  # DCP catches these, too
        return causes[rank]  # type: ignore[no-any-return]
    ours: dict[int, Iterable[str]] = {}
    others: dict[str, list[int]] = {}
    for each, cause in sorted(causes.items()):
        if isinstance(cause, NamedMeshError):
            ours[each] = cause.problems
        else:
            others.setdefault(_first_line(cause), []).append(each)
    problems = by_ranks(ours)
    for how, ranks in others.items():
        problems.append(
            f"{what} by {format_ranks(ranks)} ({how}); see to room and permission there, and start the job again"
        )
    damaged = all(isinstance(cause, DamagedError) for cause in causes.values())
    return (DamagedError if damaged else CheckpointError)(*problems)
