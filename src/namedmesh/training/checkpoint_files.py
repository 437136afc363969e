"""Where a checkpoint lies: written beside its place and moved there, so that there is always a whole one."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from namedmesh.errors import CheckpointError, ranks_in_words
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

ABOUT = "namedmesh.pt"  # written last: a directory that has it is a whole checkpoint
_PROBE = "seen-by-all-ranks"  # written first, read by all ranks, and removed
# Some network file systems show a file on other hosts after a while only.
_APPEARS_WITHIN = 10.0


class Writer(dcp.FileSystemWriter):
    """DCP's, but ``async_save`` copies every tensor once: torch copies it twice, and one of the CPU with its mesh."""

    def stage(self, state_dict: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each part as they are now, on the CPU."""
        self.per_thread_copy_ahead = 0  # bytes that are fetched from the device while others are written
        return {
            part: {name: _copied(each.detach()) for name, each in tensors.items()}
            for part, tensors in state_dict.items()
        }


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and tensor.device.type == "cpu":
        return DTensor.from_local(
            tensor.to_local().clone(),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.to("cpu", copy=True)


def beside(path: Path, what: str) -> Path:
    """Return the directory next to ``path`` for what is not in its place."""
    return path.with_name(f".{path.name}.{what}")


def is_whole(path: Path) -> bool:
    """Return whether there is a finished checkpoint at this very place."""
    return (path / ABOUT).is_file()


def make_room(path: Path) -> str:
    """Make the directory that a checkpoint is written to, and undo what an interrupted one left.

    Returns:
        A text for :func:`sees_room`, which finds it there on a rank that sees the directory.

    Raises:
        CheckpointError: ``path`` is something else than a checkpoint, which would be lost.
    """
    unfinished, replaced = beside(path, "unfinished"), beside(path, "replaced")
    if not is_whole(path) and is_whole(replaced):
        replaced.rename(path)  # interrupted between the two moves
    if path.exists() and not is_whole(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint of namedmesh.training; give the checkpoint a path of its own"
        )
    for left in (unfinished, replaced):
        if left.exists():
            shutil.rmtree(left)
    unfinished.mkdir(parents=True)
    nonce = secrets.token_hex(8)
    (unfinished / _PROBE).write_text(nonce, encoding="ascii")
    return nonce


def sees_room(path: Path, nonce: str) -> bool:
    """Return whether this rank sees the directory that :func:`make_room` made on the first one."""
    probe = beside(path, "unfinished") / _PROBE
    deadline = time.monotonic() + _APPEARS_WITHIN
    while True:
        with suppress(OSError):
            if probe.read_text(encoding="ascii") == nonce:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def move(path: Path, about: dict[str, Any], keep: int | None = None) -> None:
    """Finish what was written beside ``path``, put it in the place of what was there, and ``keep`` so many like it."""
    unfinished, replaced = beside(path, "unfinished"), beside(path, "replaced")
    (unfinished / _PROBE).unlink()
    with (unfinished / ABOUT).open("wb") as file:
        torch.save(about, file)
        file.flush()
        os.fsync(file.fileno())
    if is_whole(path):
        path.rename(replaced)
    unfinished.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None:
        remove_older(path, keep)


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def read_about(path: Path) -> dict[str, Any]:
    """Return the metadata of the checkpoint at ``path``, and its ``place``: one that was being replaced has another.

    Raises:
        CheckpointError: there is none.
    """
    for place in (path, beside(path, "replaced")):
        if is_whole(place):
            # Values of any class: documented where they come from.
            about: dict[str, Any] = torch.load(place / ABOUT, weights_only=False, map_location="cpu")
            return about | {"place": place}
    raise CheckpointError(f"there is no finished checkpoint at {path}; name the path that it was saved to")


def find(path: Path) -> tuple[Path, dict[str, Any] | None, Shapes]:
    """Return where the last finished checkpoint is, what it says about itself (None: of Hugging Face), and its tensors.

    Raises:
        CheckpointError: there is none.
    """
    if not is_whole(path) and any(path.glob("*.safetensors")):
        return path, None, shapes_in(dcp.HuggingFaceStorageReader(str(path)))
    about = read_about(path)
    return about["place"], about, shapes_in(dcp.FileSystemReader(about["place"]))


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
        CheckpointError: there is no finished checkpoint.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     training.save(f"{directory}/last", None, torch.nn.Linear(2, 2), step=3)
        ...     training.checkpoint_info(f"{directory}/last")
        (None, {'step': 3})
    """
    about = read_about(Path(path))
    layout = about["layout"]
    return None if layout is None else Layout(rank_offset=layout[1], **layout[0]), about["extra"]


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the finished checkpoint at ``path``, or the one in that directory whose name ends in the highest number.

    The silent mistake it prevents: going on from a checkpoint that was never finished, or from ``step-900`` where there is
    ``step-1000``.

    Returns:
        Its path, or None if there is none. The same on every rank if no rank saves meanwhile.

    Example:
        >>> import tempfile, torch
        >>> from namedmesh import training
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     for step in (900, 1000):
        ...         training.save(f"{directory}/step-{step}", None, torch.nn.Linear(2, 2))
        ...     training.latest(directory).name
        'step-1000'
    """
    # One that was being replaced is found under its own name.
    names = {each.name.removeprefix(".").removesuffix(".replaced") for each in Path(path).glob("*")}
    inside = sorted((Path(path) / name for name in names), key=lambda each: (_number(each), each.name))
    found = [each for each in (*inside, Path(path)) if is_whole(each) or is_whole(beside(each, "replaced"))]
    return found[-1] if found else None


def _number(path: Path) -> int:
    """Return the number at the end of a name; -1 if there is none."""
    digits = re.search(r"\d+$", path.name)
    return int(digits[0]) if digits else -1


def remove_older(path: Path, keep: int) -> None:
    """Remove the checkpoints beside ``path`` that differ from it in a lower number only, but for the last ones."""
    stem = path.name.rstrip("0123456789")
    others = [each for each in path.parent.glob("*") if is_whole(each) and _number(each) <= _number(path)]
    alike = sorted((each for each in others if each.name.rstrip("0123456789") == stem), key=_number)
    for old in alike[:-keep]:
        (old / ABOUT).unlink(missing_ok=True)  # first: what is left of it is no checkpoint
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def refuse_io(path: Path) -> Iterator[None]:
    """Turn what keeps a checkpoint from being written into one sentence for each cause.

    Raises:
        CheckpointError: some ranks could not write; DCP tells all of them, with every traceback.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(_unwritten(path, "", error)) from None
    except dcp.api.CheckpointException as error:
        causes: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            causes.setdefault(f"{type(cause).__name__}: {cause}".partition("\n")[0], []).append(rank)
        raise CheckpointError(
            *(_unwritten(path, f" by {ranks_in_words(ranks)}", cause) for cause, ranks in causes.items())
        ) from None


def _unwritten(path: Path, ranks: str, cause: object) -> str:
    return f"the checkpoint {path} could not be written{ranks} ({cause}); see to room and permission there"


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep torch from telling that one process is one process, and (2.8) something about itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield
