"""Where a checkpoint lies: written beside its place and moved there, so that there is always a whole one."""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
import shutil
import sys
import time
import warnings
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh.errors import CheckpointError, listing, ranks_in_words
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ABOUT = "namedmesh.pt"  # written last: a directory that has it is a whole checkpoint
_HEAD = b"namedmesh checkpoint 2 %08x\n"  # the format, and the checksum of what follows
_PROBE = "seen-by-all-ranks"  # written first, read by all ranks, and removed
_METADATA = ".metadata"  # DCP's own name for what it says about the tensors
# Some network file systems show a file on other hosts after a while only.
_APPEARS_WITHIN = 10.0

T = TypeVar("T")
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Files = dict[str, tuple[int, int]]
"""The size of each file, and its checksum."""


class Writer(dcp.FileSystemWriter):
    """DCP's, which also knows the files that this rank wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.names: set[str] = set()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's tensors."""
        written = super().write_data(plan, planner)
        self.names |= {each.storage_data.relative_path for each in written.value()}
        return written


class _Metadata(pickle.Unpickler):
    """Reads what DCP says about tensors, and calls nothing that is not needed for that."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
        of_dcp = module == dcp_metadata.__name__ and "." not in name
        own = of_dcp and getattr(getattr(dcp_metadata, name, None), "__module__", "") == module
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or dtype or (module, name) in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")


class Reader(dcp.FileSystemReader):
    """DCP's, but no code that a file names is run."""

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        """Return what DCP says about the tensors."""
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata: dcp.Metadata = _Metadata(file).load()
        metadata.storage_meta = dcp_metadata.StorageMeta(load_id=self.load_id)
        return metadata


def beside(path: Path, what: str) -> Path:
    """Return the directory next to ``path`` for what is not in its place."""
    return path.with_name(f".{path.name}.{what}")


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint at this very place."""
    return (path / ABOUT).is_file()


def place_of(path: Path) -> Path | None:
    """Return where the finished checkpoint of a path is: one that was being replaced has another place."""
    places = [place for place in (path, beside(path, "replaced")) if is_whole(place)]
    return places[0] if places else None


def make_room(path: Path) -> str:
    """Make the directory that a checkpoint is written to, and undo what an interrupted one left; returns a text in it.

    Raises:
        CheckpointError: ``path`` is something else than a checkpoint, which would be lost.
    """
    clear(path)
    if path.exists() and not is_whole(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint of namedmesh.training; give the checkpoint a path of its own"
        )
    unfinished = beside(path, "unfinished")
    unfinished.mkdir(parents=True)
    nonce = secrets.token_hex(8)
    (unfinished / _PROBE).write_text(nonce, encoding="ascii")
    return nonce


def clear(path: Path) -> None:
    """Remove what an interrupted save or removal of this checkpoint left; one that was being replaced is put back."""
    replaced = beside(path, "replaced")
    if not is_whole(path) and is_whole(replaced):
        replaced.rename(path)  # interrupted between the two moves
    for left in (beside(path, "unfinished"), replaced, beside(path, "removed")):
        if left.exists():
            shutil.rmtree(left)


def names_in(directory: Path) -> set[str]:
    """Return the names of the checkpoints in a directory, also of those of which parts are left only."""
    names = set()
    for each in directory.glob("*"):
        left = re.fullmatch(r"\.(.+)\.(unfinished|replaced|removed)", each.name)
        names.add(left[1] if left else each.name)
    return names


def require_room(path: Path, nonce: str) -> None:
    """Refuse a path that is another directory on this host than where the first rank has called :func:`make_room`."""
    probe = beside(path, "unfinished") / _PROBE

    def is_other() -> bool:
        with suppress(OSError):
            return probe.read_text(encoding="ascii") != nonce
        return True

    if _still(is_other):
        raise CheckpointError(
            f"{path} is another directory than on rank 0; give a path on a file system that all hosts share, such as NFS or "
            "Lustre"
        )


def _still(missing: Callable[[], T]) -> T:
    """Return what is missing, once nothing is, or some time has passed."""
    deadline = time.monotonic() + _APPEARS_WITHIN
    while (found := missing()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def measured(directory: Path, names: Iterable[str]) -> Files:
    """Return the sizes and checksums of files."""
    return {name: _measure(directory / name) for name in names}


def _measure(path: Path) -> tuple[int, int]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        while part := file.read(2**22):
            size += len(part)
            checksum = zlib.crc32(part, checksum)
    return size, checksum


def damaged(directory: Path, files: Files, *, contents: bool = True) -> list[str]:
    """Return the files that are not there, or not as they were written; without ``contents`` by their sizes."""

    def is_as_written(name: str) -> bool:
        with suppress(OSError):
            if contents:
                return _measure(directory / name) == tuple(files[name])
            return (directory / name).stat().st_size == files[name][0]
        return False

    return [name for name in files if not is_as_written(name)]


def refuse_damaged(place: Path, files: Files) -> None:
    """Refuse a checkpoint of which files are not as they were written."""
    if broken := damaged(place, files):
        raise CheckpointError(
            f"{listing(broken, 4)} in the checkpoint {place} is missing, or not as it was written; load an older checkpoint"
        )


def move(path: Path, about: dict[str, Any], files: Files) -> None:
    """Finish what was written beside ``path``, and put it in the place of what was there.

    Raises:
        CheckpointError: not all that the ranks wrote is there.
    """
    unfinished, replaced = beside(path, "unfinished"), beside(path, "replaced")
    files |= measured(unfinished, [_METADATA])
    if absent := _still(lambda: damaged(unfinished, files, contents=False)):
        raise CheckpointError(
            f"{listing(absent, 4)} of {path} was written, and is not there on rank 0; give a path on a file system that all "
            "hosts share, such as NFS or Lustre"
        )
    (unfinished / _PROBE).unlink()
    contents = io.BytesIO()
    torch.save(about | {"files": files}, contents)
    with (unfinished / ABOUT).open("wb") as file:
        file.write(_HEAD % zlib.crc32(contents.getbuffer()))
        file.write(contents.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    _sync(unfinished)
    if is_whole(path):
        path.rename(replaced)
    unfinished.rename(path)
    _sync(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Let the names in a directory outlive a power failure."""
    with suppress(OSError):  # not every file system can
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint; an interruption leaves nothing in its place."""
    removed = beside(path, "removed")
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def read_about(path: Path) -> dict[str, Any]:
    """Return what the checkpoint of a path says about itself, and its ``place``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    place = place_of(path)
    if place is None:
        raise CheckpointError(
            f"there is no finished checkpoint at {path}; name the path that it was saved to"
        )
    with suppress(OSError, pickle.UnpicklingError):
        head, _, contents = (place / ABOUT).read_bytes().partition(b"\n")
        if head + b"\n" == _HEAD % zlib.crc32(contents):
            about: dict[str, Any] = torch.load(io.BytesIO(contents), weights_only=True, map_location="cpu")
            return about | {"place": str(place)}
    raise CheckpointError(
        f"{place / ABOUT} is damaged, not readable, or of another version; load an older checkpoint"
    )


def find(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """Return where the last finished checkpoint is, and what it says about itself (None: of Hugging Face).

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not is_whole(path) and any(path.glob("*.safetensors")):
        return path, None
    about = read_about(path)
    return Path(about["place"]), about


def shapes_in(reader: dcp.StorageReader) -> Shapes:
    """Return the whole shape and type of every tensor in a checkpoint, by name."""
    found = reader.read_metadata().state_dict_metadata
    return {
        key: (tuple(each.size), each.properties.dtype)
        for key, each in found.items()
        if isinstance(each, dcp.TensorStorageMetadata)
    }


def checkpoint_info(path: str | os.PathLike[str]) -> tuple[Layout | None, dict[str, Any]]:
    """Return the layout that a checkpoint was saved from, and its extra values; no mesh is needed.

    Raises:
        CheckpointError: there is no finished checkpoint, or what it says about itself is damaged.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     training.save(f"{directory}/last", None, torch.nn.Linear(2, 2), step=3)
        ...     training.checkpoint_info(f"{directory}/last")
        (None, {'step': 3})
    """
    about = read_about(Path(path))
    return layout_of(about), about["extra"]


def layout_of(about: dict[str, Any]) -> Layout | None:
    """Return the layout that a checkpoint was saved from; None for that of one process."""
    if not about["layout"]:
        return None
    sizes, offset = about["layout"]
    return Layout(rank_offset=offset, **sizes)


def in_order(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the checkpoints in a directory as they were finished, and damaged ones, with the ``error``, behind them."""
    found: list[tuple[Path, dict[str, Any]]] = []
    for name in sorted(names_in(directory)):
        path = directory / name
        if place_of(path) is not None:
            try:
                found.append((path, read_about(path)))
            except CheckpointError as error:
                found.append((path, {"order": sys.maxsize, "error": error}))
    return sorted(found, key=lambda each: each[1]["order"])


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the finished checkpoint at ``path``, or the one in that directory that was finished last.

    Prevents: going on from a checkpoint that was never finished, or was abandoned: after a run went back to
    step 800, the first one that it saves is the last, and not an older one of step 1000. One of which files are
    missing or cut off is left out, with a warning. The contents of files are read by :func:`load` only.

    Returns:
        Its path, or None if there is none. The same on every rank if no rank saves meanwhile.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (1000, 850):
        ...         training.save(f"{directory}/step-{step}", None, torch.nn.Linear(2, 2))
        ...     training.latest(directory).name
        'step-850'
    """
    path = Path(path)
    if place_of(path) is not None:
        return path
    each: Path
    for each, about in reversed(in_order(path)):
        problem = about.get("error")
        if problem is None and (absent := damaged(Path(about["place"]), about["files"], contents=False)):
            problem = f"{each}, of which {listing(absent, 4)} is missing or has another size"
        if problem is None:
            return each
        warnings.warn(f"left out: {problem}", stacklevel=2)
    return None


@contextmanager
def refuse_io(path: Path, what: str = "written") -> Iterator[None]:
    """Turn what keeps a checkpoint from being written or read into one sentence for each cause.

    Raises:
        CheckpointError: some ranks could not; DCP tells all of them, with every traceback.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(_failed(path, what, "", error)) from None
    except dcp.api.CheckpointException as error:
        causes: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            causes.setdefault(f"{type(cause).__name__}: {cause}".partition("\n")[0], []).append(rank)
        raise CheckpointError(
            *(_failed(path, what, f" by {ranks_in_words(ranks)}", cause) for cause, ranks in causes.items())
        ) from None


def _failed(path: Path, what: str, ranks: str, cause: object) -> str:
    return f"the checkpoint {path} could not be {what}{ranks} ({cause}); see to room and permission there"


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep torch from telling that one process is one process, and (2.8) something about itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
