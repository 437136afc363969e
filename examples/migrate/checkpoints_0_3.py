"""Convert a checkpoint of namedmesh 0.3 to the format of this release, in one process.

$ python checkpoints_0_3.py OLD NEW

OLD is the folder of the checkpoint, such as run/step-000100, and NEW the folder to write. This
process holds the whole checkpoint in memory. Tensors of 0.3 have no checksums.
"""

from __future__ import annotations

import io
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.training.checkpoint_folders import prepare_folder
from namedmesh.training.checkpoint_formats import Checkpoint
from namedmesh.training.checkpoint_names import GROUPS, Names
from namedmesh.training.checkpoint_saving import SavePlanner
from namedmesh.training.checkpoint_storage import Progress, StorageWriter, unpickle_metadata


def read_checked(file: Path, checksum: int) -> bytes:
    contents = file.read_bytes()
    if zlib.crc32(contents) != checksum:
        raise SystemExit(f"{file} is corrupted")
    return contents


def convert_name(name: str, owners: dict[str, tuple[str, str]]) -> str:
    """Return the name of an entry in this release, and note the parameter and the key of an optimizer's."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return name
    if kind == "copy":
        number, _, copied = rest.partition(".")
        return f"namedmesh.copy.{number}.{convert_name(copied, owners)}"
    if kind != "optimizer":
        return f"namedmesh.{name}"
    param, key = (part.replace("%3A", ":").replace("%25", "%") for part in rest.rsplit(":", 1))
    owners[f"optimizer.state.{param}.{key}"] = (param, key)
    return f"optimizer.state.{param}.{key}"


def convert(old: Path, new: Path) -> None:
    checksum, _, text = (old / "namedmesh.pt").read_bytes().partition(b"\n")
    if not checksum.isdigit() or int(checksum) != zlib.crc32(text):
        raise SystemExit(f"{old} is corrupted, or was written before namedmesh 0.3: save it again with 0.3")
    manifest = json.loads(text)
    folder = old / Path(manifest["data"]).name
    tables = io.BytesIO(read_checked(folder / "values.pt", manifest["values"]))
    tables = torch.load(tables, weights_only=True, map_location="cpu")
    metadata = unpickle_metadata(read_checked(folder / ".metadata", manifest["metadata"]), folder)
    owners: dict[str, tuple[str, str]] = {}
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for source, stored in metadata.state_dict_metadata.items():
        name = convert_name(source, owners)
        sources[name], values[name] = source, None
        if isinstance(stored, dcp.TensorStorageMetadata):
            values[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    checkpoint = Checkpoint(folder, metadata, {})
    checkpoint.read(checkpoint.plan_reads(values, sources), values)
    copies: dict[str, dict[int, int]] = {}
    for source, numbers in tables["copies"].items():
        name = convert_name(source, owners)
        first = numbers[min(numbers)]  # this copy has the name of the entry
        values[name] = values.pop(f"namedmesh.copy.{first:x}.{name}")
        copies[name] = {rank: 0 if number == first else number for rank, number in numbers.items()}
    names = Names.merge([])
    names.aliases.update(tables["aliases"])
    names.local.update(dict.fromkeys(convert_name(name, {}) for name in tables["local"]))
    for param, (classes, options, group, options_of_groups) in tables["options"].items():
        names.params[param] = group
        for position, others in enumerate(options_of_groups):
            names.groups[group // GROUPS * GROUPS + position] = (classes, others)
        names.groups[group] = (classes, options)
    table = {"names": tuple(names), "copies": copies, "extra": tables["extra"]}
    lock, order = prepare_folder(new)
    about = {"layout": manifest["layout"], "run": manifest["run"], "order": order}
    planner = SavePlanner(values, owners, Progress(f"saving {new}", is_shown=True))
    dcp.save({}, storage_writer=StorageWriter(new, table, about, lambda: None), planner=planner, no_dist=True)
    del lock


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
