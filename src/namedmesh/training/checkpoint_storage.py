"""DCP's storage writer and reader, with a manifest and checksums."""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from namedmesh.errors import CheckpointError, format_items
from namedmesh.training import checkpoint_files as files

_REMEDY = "give a path on a file system that all hosts share, such as NFS or Lustre"


class StorageWriter(dcp.FileSystemWriter):
    """DCP's writer, into a data directory that the manifest names once it is complete.

    Args:
        target: the directory of the checkpoint.
        manifest: the name of the data directory, the layout and the run. The save planner adds to
            it on rank 0.
        on_finish: called on rank 0 after the checkpoint is complete.
        on_cpu: whether all tensors are on the CPU.
    """

    def __init__(
        self, target: Path, manifest: dict[str, Any], on_finish: Callable[[], None], *, on_cpu: bool
    ) -> None:
        super().__init__(target / manifest["data"])
        if on_cpu:
            # Otherwise DCP copies ahead on a stream of an accelerator, which the CPU does not need.
            self.per_thread_copy_ahead = 0
        self.target = target
        self.manifest = manifest
        self._on_finish = on_finish

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Check that this host sees the data directory that rank 0 has made.

        Raises:
            CheckpointError: it does not.
        """
        if not files.wait_until_visible(Path(self.path)):
            raise CheckpointError(f"{self.target} is a different directory than on rank 0; {_REMEDY}")
        return plan

    def finish(self, metadata: dcp.Metadata, results: list[list[Any]]) -> None:
        """Write the manifest, after all ranks have written. DCP calls it on rank 0.

        Raises:
            CheckpointError: this host does not see a file that another host has written.
        """
        super().finish(metadata, results)
        data = self.target / self.manifest["data"]
        # Another host has written some of the files, and this one may see them late.
        written = {result.storage_data.relative_path for result in chain.from_iterable(results)}
        if unseen := [name for name in sorted(written) if not files.wait_until_visible(data / name)]:
            names = format_items(unseen, 4)
            problem = f"rank 0 does not see {names} in {data}, which other ranks have written"
            raise CheckpointError(f"{problem}; {_REMEDY}")
        self._write_manifest(data)
        # The rename makes the checkpoint complete. Everything that the manifest names has to be on
        # the disk before, and the new name after it: an older checkpoint may be removed next.
        files.sync_directory(data)
        (data / files.MANIFEST_NAME).replace(self.target / files.MANIFEST_NAME)
        files.sync_directory(self.target)
        files.sync_directory(self.target.parent)
        files.remove_leftovers(self.target)
        self._on_finish()

    def _write_manifest(self, data: Path) -> None:
        """Write the values and the manifest into the data directory."""
        manifest = {key: self.manifest.pop(key) for key in ("data", "layout", "run")}
        values = io.BytesIO()
        torch.save(self.manifest, values)
        files.write_file(data / files.VALUES_NAME, values.getvalue())
        manifest["values"] = zlib.crc32(values.getvalue())
        manifest["metadata"] = zlib.crc32((data / ".metadata").read_bytes())
        manifest["files"] = {file.name: file.stat().st_size for file in data.iterdir()}
        checkpoints = files.list_checkpoints(self.target.parent)
        orders = [entry.order for entry in checkpoints if entry.error is None]
        manifest["order"] = max(orders, default=0) + 1
        contents = json.dumps(manifest).encode()
        files.write_file(data / files.MANIFEST_NAME, b"%d\n%s" % (zlib.crc32(contents), contents))


# The classes and functions in a pickled ``.metadata`` in addition to DCP's own classes and dtypes.
# pathlib._local is the module of pathlib's classes in Python 3.13.
_ALLOWED = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
_ALLOWED |= {("pathlib._local", "PosixPath"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the pickled ``.metadata`` of DCP, and rejects every other class."""

    def find_class(self, module: str, name: str) -> Any:
        is_allowed = (module, name) in _ALLOWED
        if module == "torch":
            is_allowed = is_allowed or isinstance(getattr(torch, name, None), torch.dtype)
        elif module == dcp_metadata.__name__:
            # The module's own classes, but nothing that it has imported.
            is_allowed = getattr(getattr(dcp_metadata, name, None), "__module__", "") == module
        if not is_allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a part of a checkpoint")
        return super().find_class(module, name)


def read_metadata(path: Path, manifest: dict[str, Any]) -> dcp.Metadata:
    """Return the metadata that DCP wrote about the tensors of a checkpoint.

    Args:
        path: the checkpoint.
        manifest: its manifest.

    Raises:
        CorruptedError: the file is missing or failed its checksum.
    """
    file = path / manifest["data"] / ".metadata"
    contents = file.read_bytes() if file.exists() else b""
    if zlib.crc32(contents) != manifest["metadata"]:
        raise files.make_corrupted_error(file.name, path)
    metadata: dcp.Metadata = _MetadataUnpickler(io.BytesIO(contents)).load()
    return metadata


class StorageReader(dcp.FileSystemReader):
    """DCP's reader, which verifies the checksum of every tensor that it reads.

    Args:
        path: the checkpoint.
        manifest: its manifest, with DCP's metadata (``tensors``), which rank 0 has read for all.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        super().__init__(path / manifest["data"])
        self._checkpoint = path
        self._metadata: dcp.Metadata = manifest["tensors"]

    def read_metadata(self) -> dcp.Metadata:
        """Return DCP's metadata about the tensors."""
        return self._metadata

    @torch.no_grad()
    def read_data(self, plan: dcp.LoadPlan, planner: Any) -> Any:
        """Read the entries of this rank's plan.

        Raises:
            CorruptedError: a file is missing or failed its checksum.
        """
        for item in plan.items:
            self._read_item(item, planner)
        # DCP waits for a future. Everything has been read already.
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _read_item(self, item: Any, planner: Any) -> None:
        location = self.storage_data[item.storage_index]
        try:
            with (Path(self.path) / location.relative_path).open("rb") as file:
                file.seek(location.offset)
                contents = files.verify_archive(file.read(location.length))
            if item.type == dcp.planner.LoadItemType.BYTE_IO:
                planner.load_bytes(item, contents)
                return
            tensor = torch.load(contents, map_location="cpu", weights_only=True)
        except Exception as error:
            raise files.make_corrupted_error(location.relative_path, self._checkpoint) from error
        target = planner.lookup_tensor(item.dest_index)
        # Equal shapes are not enough: the stored shard may be another shard of the tensor.
        is_all_of_both = item.lengths == target.shape == tensor.shape
        if target.is_cpu and is_all_of_both and target.stride() == tensor.stride():
            target.set_(tensor)  # without a copy
            return
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        planner.resolve_tensor(item).copy_(tensor)
