"""DCP's ``.metadata``: its pickle, read without running code, and the trailer behind it."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from namedmesh._torch import make_storage_unpicklers
from namedmesh.errors import CheckpointError, get_first_line

METADATA_NAME = ".metadata"
DATA_FILE = re.compile(r"__[0-9a-f]{16}__\d+_\d+\.distcp")
"""The names of files with tensors. Those of other programs have no random part."""

_MAGIC = b"namedmesh 1\n"
# The end of ``.metadata``: the length of the JSON text in front of it, its checksum, and the magic.
_FOOTER = struct.Struct(f">II{len(_MAGIC)}s")


class CorruptedError(CheckpointError):
    """A file of a checkpoint is missing, or its checksum is wrong."""


class MissingError(CheckpointError):
    """There is no complete checkpoint at a path."""


def make_corrupted_error(name: str, path: Path) -> CorruptedError:
    """Return the error for a file of the checkpoint at ``path``."""
    problem = f"the checkpoint {path} is corrupted: {name} is missing, or failed its checksum"
    return CorruptedError(f"{problem}; load an older checkpoint")


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the pickled ``.metadata`` of DCP, and rejects everything that is no part of one.

    The allowed names stand for functions and classes of this object, so that a file cannot change
    the attributes of torch's.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._allowed = make_storage_unpicklers()

    def find_class(self, module: str, name: str) -> Any:
        found = self._allowed.get((module, name))
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")
        return found


def unpickle_metadata(contents: bytes, path: Path) -> dcp.Metadata:
    """Return the metadata in a pickle of DCP, without running code that it names.

    Args:
        contents: the pickle.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: it is not DCP's metadata, or it names a file that is not in the folder.
    """
    try:
        metadata: Any = _MetadataUnpickler(io.BytesIO(contents)).load()
        names = {place.relative_path for place in metadata.storage_data.values()}
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: its {METADATA_NAME} is not the metadata of "
            f"torch.distributed.checkpoint ({get_first_line(error)})"
        ) from error
    for name in names:
        check_file_name(name, path)
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(
            f"{path} is not a checkpoint: its {METADATA_NAME} is a {type(metadata).__name__}"
        )
    return metadata


def check_file_name(name: object, path: Path) -> None:
    """Check that a name in a file of a checkpoint is the name of a file in its folder.

    Raises:
        CheckpointError: it may be outside.
    """
    if not isinstance(name, str) or name in {"", ".", ".."} or Path(name).name != name:
        raise CheckpointError(f"the checkpoint {path} names the file {name!r}, which is not in its folder")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the JSON in the trailer of a ``.metadata``; None for a folder of another program.

    Raises:
        FileNotFoundError: there is no ``.metadata``.
        CorruptedError: the trailer is cut off, or failed its checksum.
    """
    with (path / METADATA_NAME).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _FOOTER.size))
        footer = file.read()
        if len(footer) < _FOOTER.size or not footer.endswith(_MAGIC):
            if any(DATA_FILE.fullmatch(other.name) for other in path.iterdir()):
                raise make_corrupted_error(METADATA_NAME, path)
            return None
        length, checksum, _ = _FOOTER.unpack(footer)
        start = size - _FOOTER.size - length
        file.seek(max(0, start))
        text = file.read(length)
    if start < 0 or zlib.crc32(text) != checksum:
        raise make_corrupted_error(METADATA_NAME, path)
    manifest: dict[str, Any] = json.loads(text)
    return manifest | {"start": start}


def read_metadata(path: Path, manifest: dict[str, Any] | None) -> dcp.Metadata:
    """Return DCP's metadata of a folder.

    Args:
        path: the folder.
        manifest: the trailer of its ``.metadata``; None for a folder of another program.

    Raises:
        CorruptedError: the file failed its checksum.
        CheckpointError: the file is not DCP's metadata.
    """
    contents = (path / METADATA_NAME).read_bytes()
    if manifest is not None:
        contents = contents[: manifest["start"]]
        if zlib.crc32(contents) != manifest["metadata"]:
            raise make_corrupted_error(METADATA_NAME, path)
    return unpickle_metadata(contents, path)


def pack_metadata(metadata: dcp.Metadata, manifest: dict[str, Any]) -> bytes:
    """Return the contents of a ``.metadata``: the pickle, and the trailer that describes it.

    Args:
        metadata: the metadata.
        manifest: what the trailer says about the checkpoint.
    """
    pickled = pickle.dumps(metadata)
    text = json.dumps(manifest | {"metadata": zlib.crc32(pickled)}).encode()
    return pickled + text + _FOOTER.pack(len(text), zlib.crc32(text), _MAGIC)
