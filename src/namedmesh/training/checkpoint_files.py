"""The files of a checkpoint: DCP's writer and reader with our checks in their steps, and the directories that they work in."""

from __future__ import annotations

import io
import os
import pickle
import secrets
import shutil
import stat
import time
import warnings
import zipfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh.errors import CheckpointError, listing
from namedmesh.training.checkpoint_ranks import DamagedError

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = "namedmesh.pt"  # names the directory of tensors beside it; put in its place last, and at once
_APPEARS_WITHIN = 10.0  # some network file systems show a directory on other hosts after a while only


class Writer(dcp.FileSystemWriter):
    """DCP's, into a new directory in ``target``, which the file ``namedmesh.pt`` names once all ranks have written."""

    def __init__(self, target: Path, about: dict[str, Any], finished: Callable[[], None]) -> None:
        super().__init__(target)
        self.target, self.about, self._finished = target, about, finished
        self.made = False  # the directory, by this rank

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy nothing: what is given has been copied; DCP would take a DTensor's gradient along, and fails at FSDP2's."""
        return state_dict

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make nothing: the first rank does."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the directory, on the first rank, and tell all others its name."""
        clear(self.target)
        if self.target.exists() and not is_whole(self.target) and any(self.target.iterdir()):
            raise CheckpointError(
                f"{self.target} exists and is no checkpoint of namedmesh.training; give the checkpoint a path of its own"
            )
        self.about["data"] = f"data-{secrets.token_hex(8)}"
        (self.target / self.about["data"]).mkdir(parents=True)
        self.made = True
        return [replace(plan, planner_data=self.about["data"]) for plan in super().prepare_global_plan(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        """Write, unless the directory is another one on this host than on that of the first rank."""
        self.path = data = self.target / plan.planner_data
        deadline = time.monotonic() + _APPEARS_WITHIN
        while not data.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self.target} is another directory than on rank 0; give a path on a file system that all hosts share, such as "
                    "NFS or Lustre"
                )
            time.sleep(0.1)
        return super().write_data(plan, planner)

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Put the checkpoint in its place, on the first rank, after all have written."""
        super().finish(metadata, results)
        data = self.target / self.about["data"]
        sizes = {each.name: each.stat().st_size for each in data.iterdir()}
        orders = [about["order"] for _, about in in_order(self.target.parent) if "error" not in about]
        written = zlib.crc32((data / ".metadata").read_bytes())
        self.about |= {"files": sizes, "metadata": written, "order": max(orders, default=0) + 1}
        with (data / ABOUT).open("wb") as file:
            torch.save(self.about, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(data, self.target)
        (data / ABOUT).replace(self.target / ABOUT)
        _sync(self.target, self.target.parent)
        clear(self.target)
        self._finished()


class _Metadata(pickle.Unpickler):
    """Reads DCP's file about its tensors, which is pickled, and calls nothing that is not needed for that."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
        own = module == dcp_metadata.__name__
        own = own and getattr(getattr(dcp_metadata, name, None), "__module__", "") == module
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or dtype or (module, name) in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")


class Reader(dcp.FileSystemReader):
    """DCP's, but it runs no code that a file names, and refuses what is not as it was written."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        super().__init__(path / about["data"])
        self._where = path

    def read_metadata(self) -> dcp.Metadata:
        """Return what DCP says about the tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: dcp.Metadata = _Metadata(file).load()
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        """Read this rank's part; each byte once, as it is checked."""
        for item in plan.items:
            self._read(item, planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read(self, item: Any, planner: dcp.LoadPlanner) -> None:
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
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        planner.resolve_tensor(item).detach().copy_(tensor)


def check_metadata(path: Path, about: dict[str, Any]) -> None:
    """Refuse what DCP says about the tensors where it is not as it was written; DCP itself hides the error of its reader."""
    file = path / about["data"] / ".metadata"
    if not file.exists() or zlib.crc32(file.read_bytes()) != about["metadata"]:
        raise _damaged(file.name, path)


def _damaged(name: str, path: Path) -> DamagedError:
    return DamagedError(
        f"{name} in the checkpoint {path} is missing, or not as it was written; load an older checkpoint"
    )


def _checked(contents: bytes) -> io.BytesIO:
    """Return what torch.load reads, if it is as torch.save wrote it: with checksums, which torch does not compare."""
    file = io.BytesIO(contents)
    if zipfile.ZipFile(file).testzip() is not None:
        raise zipfile.BadZipFile
    file.seek(0)
    return file


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint; any other error than its absence is raised."""
    try:  # is_file() of Python 3.14 returns False for all errors
        return stat.S_ISREG((path / ABOUT).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def clear(path: Path) -> None:
    """Remove the directories of tensors of interrupted saves, and one that is empty then; of what is damaged nothing is removed."""
    try:
        kept = read_about(path)["data"] if is_whole(path) else None
    except CheckpointError:
        return
    for each in path.glob("data-" + 16 * "[0-9a-f]"):
        if each.name != kept:
            shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):  # something is left, or it is not there
        path.rmdir()


def _sync(*directories: Path) -> None:
    """Let the names in directories outlive a power failure."""
    for each in directories:
        with suppress(OSError):  # not every file system can
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def read_about(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself."""
    if not is_whole(path):
        raise CheckpointError(
            f"there is no finished checkpoint at {path}; name the path that it was saved to"
        )
    try:
        about: dict[str, Any] = torch.load(_checked((path / ABOUT).read_bytes()), weights_only=True)
    except Exception as error:
        raise DamagedError(
            f"{path / ABOUT} is damaged, not readable, or of another version; load an older checkpoint"
        ) from error
    return about


def in_order(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in a directory as they were finished, and damaged ones, with the ``error``, behind them."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(directory.glob("*")):
        if is_whole(path) and path.suffix != ".removed":
            try:
                found.append((path, read_about(path)))
            except CheckpointError as error:
                found.append((path, {"order": float("inf"), "error": error}))
    return sorted(found, key=lambda each: each[1]["order"])


def remove(path: Path) -> None:
    """Remove a checkpoint; an interruption leaves nothing that is taken for one."""
    aside = path.with_name(f"{path.name}-{secrets.token_hex(8)}.removed")
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the finished checkpoint at ``path``, or the one in that directory that was finished last.

    After a run went back to step 800, the first one that it saves is the last, and not an older one of step 1000. One of which files
    are missing or cut off is left out, with a warning; :func:`load` checks what is in them.
    """
    if is_whole(Path(path)):
        return Path(path)
    each: Path
    for each, about in reversed(in_order(Path(path))):
        problem = about.get("error")
        if problem is None:
            sizes = {file.name: file.stat().st_size for file in (each / about["data"]).glob("*")}
            absent = [name for name, size in about["files"].items() if sizes.get(name) != size]
            if not absent:
                return each
            problem = f"{each}, of which {listing(absent, 4)} is missing or has another size"
        warnings.warn(f"left out: {problem}", stacklevel=2)
    return None
