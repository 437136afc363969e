"""What every training job needs beside its model: a few functions over torch for each need, each usable alone."""

from namedmesh.training.checkpoint_files import checkpoint_info
from namedmesh.training.checkpoints import load, save, to_pretrained
from namedmesh.training.context import context_attention, shard_sequence
from namedmesh.training.pipeline import pipeline, stage_indices, stage_layers

__all__ = [
    "checkpoint_info",
    "context_attention",
    "load",
    "pipeline",
    "save",
    "shard_sequence",
    "stage_indices",
    "stage_layers",
    "to_pretrained",
]
