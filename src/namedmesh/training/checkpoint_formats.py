"""The formats of checkpoints that ``load`` reads, and the export to Hugging Face's.

There are four formats: this release's, namedmesh 0.3's, any folder of torch.distributed.checkpoint
(DCP), such as torchtitan's and Fabric's, and the safetensors of ``save_pretrained``.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex

from namedmesh.errors import CheckpointError, format_items
from namedmesh.training import checkpoint_metadata, seeds
from namedmesh.training.checkpoint_metadata import MissingError
from namedmesh.training.checkpoint_names import GROUPS, Options, find_owner
from namedmesh.training.checkpoint_ranks import CheckpointRanks
from namedmesh.training.checkpoint_storage import Progress, StorageReader, load_values

OLD_MANIFEST_NAME = "namedmesh.pt"
"""The manifest of checkpoints of namedmesh 0.3, which names the folder with their tensors."""
OLD_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_INDEX = "model.safetensors.index.json"
# The files of DCP's writer, which makes one file of weights.
_WRITTEN = {"model-00001-of-00001.safetensors", _INDEX}


class Checkpoint(NamedTuple):
    """A checkpoint, as rank 0 has read it for all ranks.

    Attributes:
        path: the path that the caller gave.
        folder: the folder with the files.
        metadata: DCP's metadata.
        entries: by the name that a :class:`State` has for an entry, its name in the metadata.
        options: how parameters were optimized.
        owners: the parameter and the key of the entries of optimizers.
        aliases: the further names of parameters, and the names that they are saved under.
        copies: by entry, the number of the copy of each rank, if they differ.
        local: the entries of optimizers that were plain tensors of sharded parameters.
        extra: the extra values.
        layout: the sizes of the axes and the first rank; None without a mesh.
        run: the run that it belongs to; None if it belongs to no run.
        is_own: whether namedmesh has written it.
        is_pretrained: whether it is in Hugging Face's format.
    """

    path: Path
    folder: Path
    metadata: dcp.Metadata
    entries: dict[str, str]
    options: Options = Options({}, {})
    owners: dict[str, tuple[str, str]] = {}  # noqa: RUF012  never changed
    aliases: dict[str, str] = {}  # noqa: RUF012
    copies: dict[str, dict[int, int]] = {}  # noqa: RUF012
    local: Collection[str] = ()
    extra: dict[str, Any] = {"step": 0}  # noqa: RUF012
    layout: tuple[dict[str, int], int] | None = None
    run: str | None = None
    is_own: bool = False
    is_pretrained: bool = False

    def make_reader(
        self, before_read: Callable[[Callable[[], None]], object], progress: Progress
    ) -> dcp.StorageReader:
        """Return a storage reader.

        Args:
            before_read: is called once, before a tensor is changed, with a function that checks the
                bytes that this process will read.
            progress: counts the bytes.
        """
        if self.is_pretrained:
            return _PretrainedReader(self.folder, self.metadata, before_read)
        return StorageReader(self.folder, self.metadata, before_read, progress)


def read_checkpoint(path: Path, names: Collection[str]) -> Checkpoint:
    """Read everything except the tensors of a checkpoint.

    Args:
        path: the path.
        names: the names in the model, by which the weights in another program's folder are found.

    Raises:
        MissingError: there is no complete checkpoint at ``path``.
        CorruptedError: a file is missing or failed its checksum.
        CheckpointError: the folder cannot be loaded.
    """
    if (path / checkpoint_metadata.METADATA_NAME).exists():
        manifest = checkpoint_metadata.read_manifest(path)
        metadata = checkpoint_metadata.read_metadata(path, manifest)
        if manifest is None:
            return Checkpoint(path, path, metadata, _find_weights(metadata, names))
        return _read_own(path, manifest, metadata)
    if (path / OLD_MANIFEST_NAME).exists():
        return _read_old(path)
    weights = _list_weight_files(path)
    if not weights:
        raise MissingError(_describe_absence(path))
    return _read_pretrained(path, weights)


def _describe_absence(path: Path) -> str:
    """Return the message of a MissingError: the path has no complete checkpoint, and why."""
    if path.is_file():
        problem = f"{path} is a file, and a checkpoint is a directory that namedmesh.training.save() wrote"
        return f"{problem}. Read a file of torch.save() with torch.load()."
    return f"there is no complete checkpoint at {path}; name one that was saved"


def _read_own(path: Path, manifest: dict[str, Any], metadata: dcp.Metadata) -> Checkpoint:
    """Read a checkpoint of this release."""
    values = load_values(path, metadata)
    options = Options(*values["options"])
    entries: dict[str, str] = {}
    owners: dict[str, tuple[str, str]] = {}
    for name in metadata.state_dict_metadata:
        # The other names are those of weights without "model.".
        if (
            name.startswith(("model.", "optimizer.", "namedmesh."))
            and ".".join(metadata.planner_data[name]) == name
        ):
            entries[name] = name
            owner = find_owner(name, options.params)
            if owner is not None:
                owners[name] = owner
    tables = {key: values[key] for key in ("aliases", "copies", "local", "extra")}
    about = {"layout": manifest["layout"], "run": manifest["run"], "is_own": True}
    return Checkpoint(path, path, metadata, entries, options, owners, **tables, **about)


def add_names(metadata: dcp.Metadata, aliases: Mapping[str, str], params: Container[str]) -> None:
    """Let torch's tools find the entries of a checkpoint: add paths and further names.

    ``planner_data`` has the keys of the nested dict that DCP makes of an entry. The further names
    share the stored bytes: those of tied weights, and those of weights without "model.", by which
    torchtitan finds them.

    Args:
        metadata: the metadata, which is changed.
        aliases: the further names of parameters, and the names that they are saved under.
        params: the names of all optimized parameters.
    """
    entries = metadata.state_dict_metadata
    paths: dict[str, tuple[str, ...]] = {}
    names: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        if f"model.{name}" in entries:
            names.setdefault(f"model.{name}", []).append(f"model.{alias}")
    for name in chain(entries, *names.values()):
        owner = find_owner(name, params)
        is_state = owner is not None and name.startswith("optimizer.")
        paths[name] = ("optimizer", "state", *owner) if owner and is_state else tuple(name.split(".", 1))
    for entry in list(entries):
        further = names.get(entry, [])
        for name in (entry, *further):
            short = name.removeprefix("model.")
            if short not in paths:
                # With the path of the long name, DCP's converters make one weight of both.
                paths[short] = paths[name]
                names.setdefault(entry, further).append(short)
    places: dict[Any, Any] = metadata.storage_data
    for index, place in list(places.items()):
        for name in names.get(index.fqn, ()):
            entries[name] = entries[index.fqn]
            places[MetadataIndex(name, index.offset, index.index)] = place
    metadata.planner_data = paths


def _find_weights(metadata: dcp.Metadata, names: Collection[str]) -> dict[str, str]:
    """Return the entries of a model in another program's folder, under this package's names.

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
    return {f"model.{key}": name for key, name in weights.items()}


# --- checkpoints of namedmesh 0.3 ---


def read_old_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint of namedmesh 0.3: a checksum and JSON.

    Raises:
        CorruptedError: the file is missing or failed its checksum.
        CheckpointError: an earlier release wrote it.
    """
    try:
        contents = (path / OLD_MANIFEST_NAME).read_bytes()
        checksum, _, text = contents.partition(b"\n")
        if contents.startswith(b"PK"):
            raise CheckpointError(
                f"{path} was written before namedmesh 0.3; save it again with namedmesh 0.3"
            )
        if int(checksum) != zlib.crc32(text):
            raise checkpoint_metadata.make_corrupted_error(OLD_MANIFEST_NAME, path)
        manifest: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise checkpoint_metadata.make_corrupted_error(OLD_MANIFEST_NAME, path) from error
    if not OLD_FOLDER.fullmatch(str(manifest["data"])):
        raise CheckpointError(f"{path}: its manifest names {manifest['data']!r}, which is not in the folder")
    return manifest


def _read_old(path: Path) -> Checkpoint:
    """Read a checkpoint of namedmesh 0.3. Its tensors are not checked."""
    manifest = read_old_manifest(path)
    folder = path / manifest["data"]
    contents: dict[str, bytes] = {}
    for name, key in ((checkpoint_metadata.METADATA_NAME, "metadata"), ("values.pt", "values")):
        contents[key] = (folder / name).read_bytes() if (folder / name).exists() else b""
        if zlib.crc32(contents[key]) != manifest[key]:
            raise checkpoint_metadata.make_corrupted_error(name, path)
    values = torch.load(io.BytesIO(contents["values"]), weights_only=True, map_location="cpu")
    metadata = checkpoint_metadata.unpickle_metadata(contents["metadata"], path)
    options = Options({}, {})
    for name, (class_names, group_options, group, options_of_groups) in values["options"].items():
        options.params[name] = (class_names, group, group_options)
        for position, found in enumerate(options_of_groups):
            options.groups[group // GROUPS * GROUPS + position] = found
    copies: dict[str, dict[int, int]] = {}
    entries: dict[str, str] = {}
    owners: dict[str, tuple[str, str]] = {}
    for old_name, numbers in values["copies"].items():
        name = _convert_old_name(old_name, owners)
        first = numbers[min(numbers)]
        copies[name] = {rank: 0 if number == first else number for rank, number in numbers.items()}
        for number in set(numbers.values()):
            key = name if number == first else f"namedmesh.copy.{number:x}.{name}"
            entries[key] = f"copy.{number:x}.{old_name}"
    for old_name in metadata.state_dict_metadata:
        if not old_name.startswith("copy."):
            entries[_convert_old_name(old_name, owners)] = old_name
    tables = {"aliases": values["aliases"], "copies": copies, "extra": values["extra"]}
    local = {_convert_old_name(name, {}) for name in values["local"]}
    about = {"layout": manifest["layout"], "run": manifest["run"], "is_own": True}
    return Checkpoint(path, folder, metadata, entries, options, owners, local=local, **tables, **about)


def _convert_old_name(name: str, owners: dict[str, tuple[str, str]]) -> str:
    """Return the name of an entry of namedmesh 0.3 in this release, and note its owner."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return name
    if kind != "optimizer":
        return f"namedmesh.{name}"
    param, _, key = rest.rpartition(":")
    param, key = (part.replace("%3A", ":").replace("%25", "%") for part in (param, key))
    owners[f"optimizer.state.{param}.{key}"] = (param, key)
    return f"optimizer.state.{param}.{key}"


# --- Hugging Face ---


class _PretrainedReader(dcp.HuggingFaceStorageReader):
    """DCP's reader of a Hugging Face directory, whose metadata rank 0 has read for all."""

    def __init__(
        self, path: Path, metadata: dcp.Metadata, before_read: Callable[[Callable[[], None]], object]
    ) -> None:
        super().__init__(str(path))
        self._metadata = metadata
        self._before_read = before_read

    def read_metadata(self) -> dcp.Metadata:
        """Return the names, shapes and files of the tensors."""
        return self._metadata

    @torch.no_grad()
    def read_data(self, plan: dcp.LoadPlan, planner: Any) -> Any:
        """Read this rank's plan. The format has no checksums."""
        self._before_read(lambda: None)
        return super().read_data(plan, planner)


class _ListedFiles(FileSystem):
    """A file system that lists only given files: DCP's reader reads every listed file."""

    def __init__(self, listed: list[Path]) -> None:
        self._listed = [str(file) for file in listed]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:  # noqa: ARG002  there is one directory
        return self._listed


def _read_pretrained(path: Path, files: list[Path]) -> Checkpoint:
    """Read the names and shapes in a Hugging Face directory.

    Args:
        path: the directory.
        files: its files of weights.

    Raises:
        CheckpointError: a tensor is in several files.
    """
    reader = dcp.HuggingFaceStorageReader(str(path))
    # A directory may have weights that the index does not name, such as those of its base model.
    reader.fs = _ListedFiles(files)
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
    entries = {f"model.{name}": name for name in metadata.state_dict_metadata}
    return Checkpoint(path, path, metadata, entries, is_pretrained=True)


def _list_weight_files(path: Path) -> list[Path]:
    """Return the safetensors files that the index of a directory names; all, without an index."""
    if not (path / _INDEX).exists():
        return sorted(path.glob("*.safetensors"))
    named = set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    for name in named:
        checkpoint_metadata.check_file_name(name, path)
    missing = sorted(name for name in named if not (path / name).exists())
    if missing:
        raise CheckpointError(f"{path / _INDEX} names files that do not exist: {format_items(missing, 4)}.")
    return [path / name for name in sorted(named)]


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
    with ranks.reraise_on_all_ranks(f"the model of {source} could not be written to {target}"):
        ranks.run_on_all_ranks(f"{source} could not be read", lambda: _export(source, target))


def _export(source: Path, target: Path) -> None:
    """Read the model of a checkpoint, and write it as safetensors."""
    checkpoint = read_checkpoint(source, ())
    names = {}
    for name, entry in checkpoint.entries.items():
        key = name.removeprefix("model.")
        # Extra states are bytes, and a tied weight has one name in this format.
        is_tensor = isinstance(checkpoint.metadata.state_dict_metadata[entry], dcp.TensorStorageMetadata)
        if key != name and is_tensor and key not in checkpoint.aliases:
            names[key] = entry
    _check_target(source, target, names)
    tensors: dict[str, torch.Tensor] = {}
    for entry in names.values():
        stored: Any = checkpoint.metadata.state_dict_metadata[entry]
        tensors[entry] = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    progress = Progress(f"reading {source}", is_shown=True)
    reader = checkpoint.make_reader(lambda check: check(), progress)
    dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    named = {name: tensors[entry] for name, entry in names.items()}
    dcp.save(named, storage_writer=dcp.HuggingFaceStorageWriter(str(target)), no_dist=True)


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
