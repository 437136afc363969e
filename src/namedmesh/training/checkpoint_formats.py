"""The formats of checkpoints that ``load`` reads, and the export to Hugging Face's.

There are three formats: namedmesh's, any folder of torch.distributed.checkpoint (DCP), such as
torchtitan's and Fabric's, and the safetensors of ``save_pretrained``.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from namedmesh._errors import CheckpointError, format_items
from namedmesh.training import seeds
from namedmesh.training.checkpoint_folders import is_complete, read_entry
from namedmesh.training.checkpoint_names import Names, find_owner
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_storage import (
    METADATA_NAME,
    Progress,
    check_file_name,
    check_places,
    read_metadata,
)

_OLD_MANIFEST_NAME = "namedmesh.pt"
_INDEX = "model.safetensors.index.json"
# The files of DCP's writer, which makes one file of weights.
_WRITTEN = {"model-00001-of-00001.safetensors", _INDEX}


class Checkpoint(NamedTuple):
    """A checkpoint, as rank 0 has read it for all ranks.

    Attributes:
        path: the path that the caller gave.
        metadata: DCP's metadata.
        entries: by the name that a :class:`State` has for an entry, its name in the metadata.
        owners: the parameter and the key of the entries of optimizers.
        names: the names of all ranks that saved it.
        copies: by entry, the number of the copy of each rank, if they differ.
        extra: the extra values.
        layout: the sizes of the axes and the first rank; None without a mesh.
        run: the run that it belongs to; None if it belongs to no run.
        is_pretrained: whether it is in Hugging Face's format.
    """

    path: Path
    metadata: dcp.Metadata
    entries: dict[str, str]
    owners: dict[str, tuple[str, str]] = {}  # noqa: RUF012  never changed
    names: Names = Names.merge([])
    copies: dict[str, dict[int, int]] = {}  # noqa: RUF012
    extra: dict[str, Any] = {"step": 0}  # noqa: RUF012
    layout: tuple[dict[str, int], int] | None = None
    run: str | None = None
    is_pretrained: bool = False

    def plan_reads(self, targets: Mapping[str, Any], sources: Mapping[str, str]) -> dcp.LoadPlan:
        """Return the reads of this process.

        Args:
            targets: by name, the tensor to read into; None for another object.
            sources: by name, the entry in the metadata.
        """
        items = []
        for name, target in targets.items():
            source = sources[name]
            for item in create_default_local_load_plan({source: target}, self.metadata).items:
                if name != source:
                    item = replace(item, dest_index=replace(item.dest_index, fqn=name))  # noqa: PLW2901
                items.append(item)
        return dcp.LoadPlan(items)

    def check(self, plan: dcp.LoadPlan, progress: Progress) -> None:
        """Check all bytes of a plan.

        Args:
            plan: the plan.
            progress: counts the bytes.

        Raises:
            CorruptedError: a file is missing, or failed its checksum.
        """
        # Several items may be parts of one stored shard.
        places = {}
        for item in plan.items:
            place = self.metadata.storage_data[item.storage_index]
            places[id(place)] = place
        check_places(self.path, places.values(), progress)

    @torch.no_grad()
    def read(self, plan: dcp.LoadPlan, targets: dict[str, Any]) -> None:
        """Read the items of a plan.

        Args:
            plan: the plan.
            targets: the tensors, which are filled, by name. Other objects are added.
        """
        reader_of = dcp.HuggingFaceStorageReader if self.is_pretrained else dcp.FileSystemReader
        reader: Any = reader_of(str(self.path))
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.state_dict = targets
        reader.read_data(plan, planner).wait()


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's load planner, which runs no code that a file names."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read an object that is not a tensor."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            # torch's message advises to set weights_only=False, which runs the code.
            raise CheckpointError(
                f"{name.removeprefix('model.')!r} is not plain data, and to read it would run code "
                "that the file names; omit it with select"
            ) from error


def read_checkpoint(path: Path, names: Collection[str]) -> Checkpoint:
    """Read everything except the tensors of a checkpoint.

    Args:
        path: the path.
        names: the names in the model, by which the weights in another program's folder are found.

    Raises:
        CorruptedError: a file is missing or failed its checksum.
        CheckpointError: there is no complete checkpoint at ``path``, or it cannot be loaded.
    """
    if (path / METADATA_NAME).exists():
        metadata, table = read_metadata(path)
        return _make_own(path, metadata, table) if table else _make_foreign(path, metadata, names)
    if weights := _list_weight_files(path):
        return _read_pretrained(path, weights)
    problem = f"there is no complete checkpoint at {path}; name one that was saved"
    if path.is_file():
        problem = (
            f"{path} is a file, and a checkpoint is a directory that namedmesh.training.save() wrote. "
            "Read a file of torch.save() with torch.load()."
        )
    elif (path / _OLD_MANIFEST_NAME).exists():
        problem = (
            f"{path} was written by namedmesh 0.3 or before; convert one of 0.3 with "
            "examples/migrate/checkpoints_0_3.py"
        )
    raise CheckpointError(problem)


def is_foreign(path: Path) -> bool:
    """Return whether a folder is a checkpoint of another program, or of an older namedmesh.

    Args:
        path: the folder.
    """
    if (path / _OLD_MANIFEST_NAME).exists():
        return True
    return is_complete(path) and read_entry(path) is None


def _make_own(path: Path, metadata: dcp.Metadata, table: Mapping[str, Any]) -> Checkpoint:
    """Make a checkpoint of namedmesh."""
    entries: dict[str, str] = {}
    owners: dict[str, tuple[str, str]] = {}
    for name, keys in metadata.planner_data.items():
        if ".".join(keys) == name:  # the other names are those of weights without "model."
            entries[name] = name
            owner = find_owner(name, keys)
            if owner is not None:
                owners[name] = owner
    about = {key: table[key] for key in ("copies", "extra", "layout", "run")}
    return Checkpoint(path, metadata, entries, owners, Names(*table["names"]), **about)


def _make_foreign(path: Path, metadata: dcp.Metadata, names: Collection[str]) -> Checkpoint:
    """Make a checkpoint of the weights in another program's folder.

    DCP's planner makes one name of nested dicts, and stores their keys. The weights are in the dict
    with the most names of the model.
    """
    paths = metadata.planner_data or {}
    dicts: dict[Any, dict[str, str]] = {}
    for name, entry in metadata.state_dict_metadata.items():
        *keys, last = paths.get(name, (name,))
        if isinstance(entry, dcp.TensorStorageMetadata) or str(last).endswith("_extra_state"):
            dicts.setdefault(tuple(keys), {})[seeds.strip_wrapper_names(str(last))] = name
    weights = max(dicts.values(), key=lambda found: (len(found.keys() & names), len(found)), default={})
    return Checkpoint(path, metadata, {f"model.{key}": name for key, name in weights.items()})


# --- Hugging Face ---


def _list_weight_files(path: Path) -> list[str]:
    """Return the safetensors files that the index of a directory names; all, without an index."""
    if not (path / _INDEX).exists():
        return sorted(map(str, path.glob("*.safetensors")))
    named = sorted(set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    for name in named:
        check_file_name(name, path)
    missing = [name for name in named if not (path / name).exists()]
    if missing:
        raise CheckpointError(f"{path / _INDEX} names files that do not exist: {format_items(missing, 4)}.")
    return [str(path / name) for name in named]


def _read_pretrained(path: Path, files: list[str]) -> Checkpoint:
    """Read the names and shapes in a Hugging Face directory.

    Args:
        path: the directory.
        files: its files of weights.

    Raises:
        CheckpointError: a tensor is in several files.
    """
    reader: Any = dcp.HuggingFaceStorageReader(str(path))
    # A directory may have weights that the index does not name, such as those of its base model,
    # and DCP's reader reads every listed file.
    reader.fs.ls = lambda _: files
    metadata = reader.read_metadata()
    # DCP takes two tensors of one name for two shards of one tensor.
    duplicates = []
    for name, entry in metadata.state_dict_metadata.items():
        if len({chunk.offsets for chunk in entry.chunks}) < len(entry.chunks):
            duplicates.append(repr(name))
    if duplicates:
        raise CheckpointError(
            f"{path} has {format_items(duplicates, 4)} in more than one file. Remove the files of "
            f"another model, or name the files to read in {_INDEX}, as save_pretrained() does."
        )
    entries = {f"model.{name}": name for name in metadata.state_dict_metadata}
    return Checkpoint(path, metadata, entries, is_pretrained=True)


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
    ranks = CheckpointRanks.from_mesh(None, "to_pretrained")
    problem = f"the model of {source} could not be written to {target}"
    with ranks.reraise_on_all_ranks(problem):
        tensors = ranks.run_on_rank0(problem, lambda: _read_model(source, target))
        dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(target)), no_dist=True)


def _read_model(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of the model of a checkpoint, if they can be written to a directory."""
    checkpoint = read_checkpoint(source, ())
    entries: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in checkpoint.entries.items():
        key = name.removeprefix("model.")
        stored: Any = checkpoint.metadata.state_dict_metadata[entry]
        # Extra states are bytes, and a tied weight has one name in this format.
        is_tensor = isinstance(stored, dcp.TensorStorageMetadata)
        if key != name and is_tensor and key not in checkpoint.names.aliases:
            entries[key] = entry
            tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    _check_target(source, target, tensors)
    plan = checkpoint.plan_reads(tensors, entries)
    checkpoint.check(plan, Progress(f"reading {source}", is_shown=True))
    checkpoint.read(plan, tensors)
    return tensors


def _check_target(source: Path, target: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if ``from_pretrained`` would read weights of another model."""
    problems = []
    if adapters := [name for name in names if _belongs_to_adapter(name)]:
        problems.append(
            f"The checkpoint {source} has adapters of PEFT, such as {adapters[0]!r}. "
            "from_pretrained() does not find these names, and would start from random weights. "
            "Load the checkpoint into the model in one process (training.load(path, None, "
            "model)) and call the model's own save_pretrained(), or merge_and_unload() first."
        )
    weights = [*target.glob("*.safetensors"), *target.glob("*.safetensors.index.json")]
    if others := sorted(file.name for file in weights if file.name not in _WRITTEN):
        problems.append(
            f"{target} has other weights ({format_items(others, 4)}), which from_pretrained() "
            "would read too, or instead. Give a new directory, or remove them."
        )
    if problems:
        raise CheckpointError(*problems)


def _belongs_to_adapter(name: str) -> bool:
    """Return whether a weight belongs to a layer that PEFT has wrapped, or to an adapter."""
    parts = name.split(".")
    wrapped = not {"base_layer", "modules_to_save"}.isdisjoint(parts)
    return wrapped or name.startswith("base_model.model.") or any(part.startswith("lora_") for part in parts)
