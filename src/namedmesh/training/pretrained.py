"""Checkpoints in the format of Hugging Face's ``save_pretrained``; :func:`namedmesh.training.load` reads those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from namedmesh.training.checkpoint_files import Reader, read_about

if TYPE_CHECKING:
    import os


def to_pretrained(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, shard_bytes: int = 5 * 2**30
) -> None:
    """Write the model of a checkpoint as Hugging Face's ``save_pretrained`` does; one process calls this.

    Needs ``safetensors``. The files are of at most ``shard_bytes``, or one tensor. ``config.json`` is the model's to write.

    Raises:
        CheckpointError: there is no checkpoint at ``path``.
    """
    from safetensors.torch import save_file

    source, target = Path(path), Path(directory)
    reader = Reader(source, read_about(source))
    parts: list[dict[str, torch.Tensor]] = []
    free = 0
    for name, each in reader.read_metadata().state_dict_metadata.items():
        if name.startswith("model.") and isinstance(each, dcp.TensorStorageMetadata):
            tensor = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            if tensor.nbytes > free or not parts:
                parts, free = [*parts, {}], shard_bytes
            parts[-1][name] = tensor
            free -= tensor.nbytes
    target.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        several = f"model-{number:05}-of-{len(parts):05}.safetensors"
        file = several if len(parts) > 1 else "model.safetensors"
        tensors = {name: torch.empty_like(each, device="cpu") for name, each in part.items()}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
        named = {name.removeprefix("model."): each for name, each in tensors.items()}
        save_file(named, target / file, metadata={"format": "pt"})
        index |= dict.fromkeys(named, file)
        total += sum(each.nbytes for each in named.values())
    if len(parts) > 1:
        weights = {"metadata": {"total_size": total}, "weight_map": index}
        (target / "model.safetensors.index.json").write_text(json.dumps(weights, indent=2), encoding="utf-8")
