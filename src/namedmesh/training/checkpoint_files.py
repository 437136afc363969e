"""Where a checkpoint lies: its tensors in a directory of a new name, and the file that names it, which is put in its place last."""

from __future__ import annotations

import errno
import io
import os
import pickle
import secrets
import shutil
import stat
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

ABOUT = "namedmesh.pt"  # put in its place last: it names the directory beside it, and replaces the one before it at once
_HEAD = b"namedmesh checkpoint 3 %08x\n"  # the format, and the checksum of what follows
_ANY_DATA = "data-" + 16 * "[0-9a-f]"
_ANY_REMOVED = "*-" + 16 * "[0-9a-f]" + ".removed"  # what is being removed
_SHARE = "give a path on a file system that all hosts share, such as NFS or Lustre"
_METADATA = ".metadata"  # DCP's own name for what it says about the tensors
# Some network file systems show a file on other hosts after a while only.
_APPEARS_WITHIN = 10.0

T = TypeVar("T")
Shapes = dict[str, "tuple[tuple[int, ...], torch.dtype] | None"]
"""The whole shape and the type of each tensor; None for what is no tensor."""
Files = dict[str, tuple[int, int]]
"""The size of each file, and its checksum."""


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


class _Planner(dcp.DefaultLoadPlanner):
    """DCP's, which for what is no tensor runs no code that a file names either, and knows which tensors have changed."""

    def __init__(self, filled: set[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.filled = filled

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:  # noqa: ARG002
        """Note that a part of a tensor was read."""
        self.filled.add(read_item.dest_index.fqn)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read one value."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = torch.load(value, weights_only=True, map_location="cpu")


def read(
    reader: dcp.StorageReader, wanted: dict[str, Any], filled: set[str] | None = None, **ranks: Any
) -> None:
    """Fill tensors, noting their names, and replace what is none, on the ranks that the arguments for DCP say."""
    with without_warnings():
        planner = _Planner(set() if filled is None else filled)
        dcp.load(wanted, storage_reader=reader, planner=planner, **ranks)


def data_of(path: Path, about: dict[str, Any]) -> Path:
    """Return the directory of a checkpoint's tensors."""
    return path / f"data-{about['id']}"


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint; any other error than its absence is raised."""
    try:
        found = (path / ABOUT).stat()
    except OSError as error:  # is_file() of Python 3.14 returns False for all of them
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return False
        raise
    return stat.S_ISREG(found.st_mode)


def make_room(path: Path) -> str:
    """Make the directory that tensors are written to, unless the path is no checkpoint's, and remove what interrupted saves left."""
    clear(path)
    if path.exists() and not is_whole(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint of namedmesh.training; give the checkpoint a path of its own"
        )
    about = {"id": secrets.token_hex(8)}
    data_of(path, about).mkdir(parents=True)
    return about["id"]


def clear(path: Path) -> None:
    """Remove what interrupted saves left: all directories of tensors but that of the finished checkpoint."""
    kept = None
    if is_whole(path):
        try:
            kept = data_of(path, read_about(path))
        except CheckpointError:
            return  # of what is damaged, nothing is removed
    for each in path.glob(_ANY_DATA):
        if each != kept:
            shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):
        path.rmdir()  # where nothing is left


def require_room(path: Path, about: dict[str, Any]) -> None:
    """Refuse a path that is another directory on this host than where the first rank has called :func:`make_room`."""
    if _still(lambda: not data_of(path, about).is_dir()):
        raise CheckpointError(f"{path} is another directory than on rank 0; {_SHARE}")


def _still(missing: Callable[[], T]) -> T:
    """Return what is missing, once nothing is, or some time has passed."""
    deadline = time.monotonic() + _APPEARS_WITHIN
    while (found := missing()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def written_by(rank: int, directory: Path) -> Files:
    """Return the sizes and checksums of the files that DCP wrote on a rank."""
    return {each.name: _measure(each) for each in directory.glob(f"__{rank}_*")}


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


def refuse_damaged(path: Path, about: dict[str, Any], names: Iterable[str]) -> None:
    """Refuse a checkpoint of which some files are not as they were written."""
    if broken := damaged(data_of(path, about), {name: about["files"][name] for name in names}):
        raise CheckpointError(
            f"{listing(broken, 4)} in the checkpoint {path} is missing, or not as it was written; load an older checkpoint"
        )


def finish(path: Path, about: dict[str, Any]) -> None:
    """Put a checkpoint, of which all files are there, in the place of the one before."""
    data = data_of(path, about)
    about["files"][_METADATA] = _measure(data / _METADATA)
    if absent := _still(lambda: damaged(data, about["files"], contents=False)):
        raise CheckpointError(
            f"{listing(absent, 4)} of {path} was written, and is not there on rank 0; {_SHARE}"
        )
    contents = io.BytesIO()
    torch.save(about, contents)
    with (data / ABOUT).open("wb") as file:
        file.write(_HEAD % zlib.crc32(contents.getbuffer()))
        file.write(contents.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    _sync(data, path)
    (data / ABOUT).replace(path / ABOUT)
    _sync(path, path.parent)
    clear(path)


def _sync(*directories: Path) -> None:
    """Let the names in directories outlive a power failure."""
    for each in directories:
        with suppress(OSError):  # not every file system can
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint, with what else is in its directory; an interruption leaves none, and none of it in its place."""
    aside = path.with_name(f"{path.name}-{secrets.token_hex(8)}.removed")
    path.rename(aside)
    _sync(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def finish_removals(directory: Path) -> None:
    """Remove what interrupted removals left."""
    for path in directory.glob(_ANY_REMOVED):
        shutil.rmtree(path, ignore_errors=True)


def read_about(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself."""
    if not is_whole(path):
        raise CheckpointError(
            f"there is no finished checkpoint at {path}; name the path that it was saved to"
        )
    with suppress(OSError, pickle.UnpicklingError):
        head, _, contents = (path / ABOUT).read_bytes().partition(b"\n")
        if head + b"\n" == _HEAD % zlib.crc32(contents):
            about: dict[str, Any] = torch.load(io.BytesIO(contents), weights_only=True, map_location="cpu")
            return about
    raise CheckpointError(
        f"{path / ABOUT} is damaged, not readable, or of another version; load an older checkpoint"
    )


def find(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says about itself, or refuse it; one in Hugging Face's format has no ``id``."""
    if not is_whole(path) and any(path.glob("*.safetensors")):
        run = secrets.token_hex(8)
        return {"id": None, "run": run, "layout": None, "extra": {}, "per_rank": {}, "files": {}}
    return read_about(path)


def shapes_in(reader: dcp.StorageReader) -> Shapes:
    """Return what a checkpoint holds, by name."""
    return {
        name: (tuple(each.size), each.properties.dtype)
        if isinstance(each, dcp.TensorStorageMetadata)
        else None
        for name, each in reader.read_metadata().state_dict_metadata.items()
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
    for path in sorted(directory.glob("*")):
        if is_whole(path) and not path.match(_ANY_REMOVED):
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
    if is_whole(path):
        return path
    each: Path
    for each, about in reversed(in_order(path)):
        problem = about.get("error")
        if problem is None and (absent := damaged(data_of(each, about), about["files"], contents=False)):
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
        causes = {str(error): ""}
    except dcp.api.CheckpointException as error:
        ranks_of: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            ranks_of.setdefault(f"{type(cause).__name__}: {cause}".partition("\n")[0], []).append(rank)
        causes = {cause: f" by {ranks_in_words(ranks)}" for cause, ranks in ranks_of.items()}
    else:
        return
    raise CheckpointError(
        *(
            f"the checkpoint {path} could not be {what}{ranks} ({cause}); see to room and permission there"
            for cause, ranks in causes.items()
        )
    )


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep torch from telling that one process is one process, and (2.8) something about itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
