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
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh._torch import check_archive
from namedmesh.errors import CheckpointError, listing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.planner import LoadPlan

ABOUT = "namedmesh.pt"  # names the directory of tensors beside it; put in its place last, and at once
_SHARE = "give a path on a file system that all hosts share, such as NFS or Lustre"
_APPEARS_WITHIN = 10.0  # some network file systems show a directory on other hosts after a while only


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


class Writer(dcp.FileSystemWriter):
    """DCP's, into a new directory in ``target``, which the file ``namedmesh.pt`` names once all ranks have written."""

    def __init__(self, target: Path, about: dict[str, Any], finished: Callable[[], None]) -> None:
        super().__init__(target)
        self.target, self.about, self._finished = target, about, finished
        self.made = False  # the directory, by this rank
        self.failed: Exception | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copies for the background; DCP's own copying takes a DTensor's gradient along, and fails at FSDP2's."""
        try:
            return self._copies(state_dict)
        except Exception as error:  # noqa: BLE001  the planner tells it on every rank
            self.failed = error
            return {}

    @staticmethod
    @torch.no_grad()
    def _copies(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: each.to("cpu", copy=True) if isinstance(each, Tensor) else each
            for name, each in values.items()
        }

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
                raise CheckpointError(f"{self.target} is another directory than on rank 0; {_SHARE}")
            time.sleep(0.1)
        return super().write_data(plan, planner)

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Put the checkpoint in its place, on the first rank, after all have written."""
        super().finish(metadata, results)
        data = self.target / self.about["data"]
        sizes = {each.name: each.stat().st_size for each in data.iterdir()}
        for each in (item.storage_data for one in results for item in one):
            if sizes.get(each.relative_path, 0) < each.offset + each.length:
                raise CheckpointError(
                    f"{each.relative_path} of {self.target} was written, and is not there on rank 0; {_SHARE}"
                )
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
    """DCP's, but no code that a file names is run, and what is not as it was written is refused before anything is read."""

    def __init__(self, path: Path, about: dict[str, Any], rank: int = 0, size: int = 1) -> None:
        super().__init__(path / about["data"])
        self._where, self._share = path, slice(rank, None, size)

    def read_metadata(self) -> dcp.Metadata:
        """Return what DCP says about the tensors."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: dcp.Metadata = _Metadata(file).load()
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check this rank's share of the checkpoint: torch writes a checksum beside each tensor, and does not read it itself."""
        places = sorted((each.relative_path, each.offset, each.length) for each in self.storage_data.values())
        name = ""
        try:
            for name, offset, length in places[self._share]:
                with (Path(self.path) / name).open("rb") as file:
                    file.seek(offset)
                    contents = io.BytesIO(file.read(length))
                _check_zip(contents)
                check_archive(contents)
        except Exception as error:
            raise _damaged(name, self._where) from error
        return plan


def check_metadata(path: Path, about: dict[str, Any]) -> None:
    """Refuse what DCP says about the tensors where it is not as it was written; DCP itself hides the error of its reader."""
    file = path / about["data"] / ".metadata"
    if not file.exists() or zlib.crc32(file.read_bytes()) != about["metadata"]:
        raise _damaged(file.name, path)


def _damaged(name: str, path: Path) -> DamagedError:
    return DamagedError(
        f"{name} in the checkpoint {path} is missing, or not as it was written; load an older checkpoint"
    )


def _check_zip(contents: io.BytesIO) -> None:
    with zipfile.ZipFile(contents) as archive:
        if archive.testzip() is not None:
            raise zipfile.BadZipFile
    contents.seek(0)


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint; any other error than its absence is raised."""
    try:
        return stat.S_ISREG(
            (path / ABOUT).stat().st_mode
        )  # is_file() of Python 3.14 returns False for all errors
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
        contents = io.BytesIO((path / ABOUT).read_bytes())
        _check_zip(contents)
        about: dict[str, Any] = torch.load(contents, weights_only=True, map_location="cpu")
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
    """Return the finished checkpoint at ``path``, or the one in that directory that was finished last and is whole by its sizes.

    After a run went back to step 800, the first one that it saves is the last, and not an older one of step 1000. One of which files
    are missing or cut off is left out, with a warning. The contents of files are read by :func:`load` only.
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
