"""Weights in the format of Hugging Face's ``save_pretrained``, written and read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from namedmesh.errors import CheckpointError, format_items
from namedmesh.training import checkpoint_files as files
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_storage import StorageReader, read_metadata

_INDEX = "model.safetensors.index.json"
# The files of DCP's writer, which makes one file of weights.
_WRITTEN = {"model-00001-of-00001.safetensors", _INDEX}


def to_pretrained(path: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
    """Write the model of a checkpoint in the format of Hugging Face's ``from_pretrained``.

    The format is safetensors. Call it in one process, which has the full model in memory. If the
    ranks had different values of a buffer, such as the running mean of a BatchNorm, the value of
    the lowest rank is written, as :func:`load` does for another layout. ``config.json`` is not
    written: call ``model.config.save_pretrained()``.

    Args:
        path: a checkpoint of :func:`save`.
        directory: a new directory, or one without weights. Weights that an earlier call wrote are
            replaced.

    Raises:
        CheckpointError: there is no checkpoint at ``path``; it is corrupted; it has adapters of
            PEFT, which ``from_pretrained`` does not find under the names that they have in a
            checkpoint; or ``directory`` has other weights.
    """
    source, target = Path(path), Path(directory)
    manifest = files.read_manifest(source)
    reader = StorageReader(source, manifest | {"tensors": read_metadata(source, manifest)})
    saved = reader.read_metadata().state_dict_metadata
    # The entry of the checkpoint for each name in the model.
    entries: dict[str, str] = {}
    for entry in saved:
        if entry.startswith("model."):
            entries[entry.removeprefix("model.")] = entry
    for entry, copies in manifest["copies"].items():
        if entry.startswith("model."):
            entries[entry.removeprefix("model.")] = f"copy.{copies[min(copies)]:x}.{entry}"
    _check_target(source, target, entries)
    # Extra states are bytes, and from_pretrained() does not read them.
    tensors = {}
    for entry in entries.values():
        stored = saved[entry]
        if isinstance(stored, dcp.TensorStorageMetadata):
            tensors[entry] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    with CheckpointRanks.from_mesh(None, "to_pretrained").reraise_on_all_ranks(
        f"the model of {source} could not be written to {target}"
    ):
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        named = {name: tensors[entry] for name, entry in entries.items() if entry in tensors}
        dcp.save(named, storage_writer=dcp.HuggingFaceStorageWriter(str(target)), no_dist=True)


def _check_target(source: Path, target: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if ``from_pretrained`` would read weights of another model."""
    problems = []
    if adapters := [name for name in names if _belongs_to_adapter(name)]:
        problems.append(
            f"The checkpoint {source} has adapters of PEFT, such as {adapters[0]!r}. "
            "from_pretrained() does not find these names, and would start from random weights. Load "
            "the checkpoint into the model in one process (training.load(path, None, model)) and "
            "call the model's own save_pretrained(), or merge_and_unload() first."
        )
    weights = [*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json")]
    if others := sorted(file.name for file in weights if file.name not in _WRITTEN):
        problems.append(
            f"{target} has other weights ({format_items(others, 4)}), which from_pretrained() would "
            "read too, or instead. Give a new directory, or remove them."
        )
    if problems:
        raise CheckpointError(*problems)


def _belongs_to_adapter(name: str) -> bool:
    """Return whether a weight belongs to a layer that PEFT has wrapped, or to an adapter."""
    parts = name.split(".")
    wrapped = not {"base_layer", "modules_to_save"}.isdisjoint(parts)
    return wrapped or name.startswith("base_model.model.") or any(part.startswith("lora_") for part in parts)


class PretrainedReader(dcp.HuggingFaceStorageReader):
    """DCP's reader of a Hugging Face directory, whose metadata rank 0 has read for all.

    Args:
        path: the directory.
        manifest: the result of :func:`read_pretrained`.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        super().__init__(str(path))
        self._metadata: dcp.Metadata = manifest["tensors"]

    def read_metadata(self) -> dcp.Metadata:
        """Return the names, shapes and files of the tensors."""
        return self._metadata


class _ListedFiles(FileSystem):
    """A file system that lists only given files: DCP's reader reads every listed file."""

    def __init__(self, listed: list[Path]) -> None:
        self._listed = [str(file) for file in listed]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:  # noqa: ARG002  there is one directory
        return self._listed


def read_pretrained(path: Path) -> dict[str, Any] | None:
    """Describe a Hugging Face directory in the form of a checkpoint's manifest.

    Args:
        path: the directory.

    Returns:
        The manifest, with DCP's metadata; None if the directory has no weights in this format.

    Raises:
        CheckpointError: a tensor is in several files, or a file of the index does not exist.
    """
    if not any(path.glob("*.safetensors")) and not (path / _INDEX).exists():
        return None
    reader = dcp.HuggingFaceStorageReader(str(path))
    # A directory may have weights that the index does not name, such as the weights of its base model.
    reader.fs = _ListedFiles(_list_weight_files(path))
    metadata = reader.read_metadata()
    # DCP takes two tensors of one name for two shards of one tensor.
    duplicates = []
    for name, entry in metadata.state_dict_metadata.items():
        chunks = entry.chunks if isinstance(entry, dcp.TensorStorageMetadata) else []
        if len({chunk.offsets for chunk in chunks}) < len(chunks):
            duplicates.append(repr(name))
    if duplicates:
        raise CheckpointError(
            f"{path} has {format_items(duplicates, 4)} in more than one file. Remove the files of "
            f"another model, or name the files to read in {_INDEX}, as save_pretrained() does."
        )
    values = {"options": {}, "aliases": {}, "copies": {}, "extra": {"step": 0}, "tensors": metadata}
    return {"data": None, "layout": None, "run": None, **values}


def _list_weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that the index of a directory names; all, without an index."""
    if not (path / _INDEX).exists():
        return sorted(path.glob("*.safetensors"))
    named = set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in named if not (path / name).exists())
    if missing:
        raise CheckpointError(f"{path / _INDEX} names files that do not exist: {format_items(missing, 4)}.")
    return [path / name for name in sorted(named)]
