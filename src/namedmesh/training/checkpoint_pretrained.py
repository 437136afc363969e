"""Checkpoints in the format of Hugging Face's ``save_pretrained``."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.errors import CheckpointError
from namedmesh.training.checkpoint_files import (
    Reader,
    find,
    refuse_damaged,
    shapes_in,
    without_warnings,
)

if TYPE_CHECKING:
    import os

    from torch import Tensor


def require_safetensors() -> None:
    """Refuse to go on without the package that reads and writes the format."""
    if find_spec("safetensors") is None:
        raise CheckpointError(
            "Hugging Face's format needs the package safetensors, which is not installed; pip install safetensors"
        )


def to_pretrained(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write the model of a checkpoint as Hugging Face's ``save_pretrained`` does; one process calls this.

    ``from_pretrained`` reads the result once ``model.config.save_pretrained(directory)`` was called, too, and
    :func:`load` reads such a directory into any layout. The names are those of your model: they fit if it is one
    of Hugging Face's. It takes the memory of one file.

    Args:
        path: the checkpoint.
        directory: where to write ``model.safetensors``, or several such files and their index.
        shard_bytes: the largest size of a file (or one tensor, if that is larger).

    Raises:
        CheckpointError: there is no checkpoint, or the package safetensors is not installed.
    """
    require_safetensors()
    from safetensors.torch import save_file

    place, about = find(Path(path))
    if about is None:
        raise CheckpointError(f"{place} is in the format of save_pretrained already")
    refuse_damaged(place, about["files"])
    shapes = shapes_in(Reader(place))
    files: list[dict[str, Tensor]] = []
    free = 0
    for key, (shape, dtype) in shapes.items():
        if key.startswith("model."):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            if tensor.nbytes > free or not files:
                files, free = [*files, {}], shard_bytes
            files[-1][key] = tensor
            free -= tensor.nbytes
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        several = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        tensors = {key: torch.empty_like(each, device="cpu") for key, each in file.items()}
        with without_warnings():
            dcp.load(tensors, storage_reader=Reader(place), no_dist=True)
        named = {key.removeprefix("model."): each for key, each in tensors.items()}
        save_file(named, target / f"model{several}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(named, f"model{several}.safetensors")
    if len(files) > 1:
        size = sum(each.nbytes for file in files for each in file.values())
        contents = {"metadata": {"total_size": size}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(contents, indent=2), encoding="utf-8")
