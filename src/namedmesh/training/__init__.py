"""Tools for the training loop: small functions over torch and a mesh."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from namedmesh.training.checkpoint_formats import to_pretrained
from namedmesh.training.checkpoints import CheckpointManager, load, save
from namedmesh.training.clipping import clip_grad_norm_
from namedmesh.training.context import context_attention, shard_sequence
from namedmesh.training.copying import copy_weights
from namedmesh.training.data import check_same_batch, sampler_kwargs
from namedmesh.training.fsdp import fsdp_mesh
from namedmesh.training.loss import count_tokens, mean_loss, normalize_loss
from namedmesh.training.scaling import sync_found_inf
from namedmesh.training.seeds import data_generator, init_parameters, rng_stream, seed_all
from namedmesh.training.throughput import Throughput
from namedmesh.training.tying import tie_stages

if TYPE_CHECKING:
    from namedmesh.training.pipelines import Pipeline
    from namedmesh.training.stages import stage_indices, stage_layers

__all__ = [
    "CheckpointManager",
    "Pipeline",
    "Throughput",
    "check_same_batch",
    "clip_grad_norm_",
    "context_attention",
    "copy_weights",
    "count_tokens",
    "data_generator",
    "fsdp_mesh",
    "init_parameters",
    "load",
    "mean_loss",
    "normalize_loss",
    "rng_stream",
    "sampler_kwargs",
    "save",
    "seed_all",
    "shard_sequence",
    "stage_indices",
    "stage_layers",
    "sync_found_inf",
    "tie_stages",
    "to_pretrained",
]

# torch.distributed.pipelining imports torch.compile, which takes seconds. A data worker or a job that
# generates needs neither.
_PIPELINE_MODULES = {"Pipeline": "pipelines", "stage_indices": "stages", "stage_layers": "stages"}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _PIPELINE_MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_PIPELINE_MODULES[name]}")
        value = globals()[name] = getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
