"""What every training job needs beside its model: a few functions over torch for each need, each usable alone."""

from namedmesh.training.checkpoint_files import checkpoint_info
from namedmesh.training.checkpoints import load, save, to_pretrained

__all__ = [
    "checkpoint_info",
    "load",
    "save",
    "to_pretrained",
]
