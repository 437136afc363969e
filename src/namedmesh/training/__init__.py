"""What every training job needs beside a mesh: few functions over torch, each usable alone."""

from namedmesh.training.checkpoint_files import checkpoint_info, latest
from namedmesh.training.checkpoint_load import to_pretrained
from namedmesh.training.checkpoints import Checkpoints, load, save
from namedmesh.training.context import context_attention, shard_sequence
from namedmesh.training.data import (
    check_same_batch,
    data_axes,
    fsdp_mesh,
    loader_kwargs,
    sampler_kwargs,
    set_expert_divisor,
    token_mean,
)
from namedmesh.training.initialization import init_parameters
from namedmesh.training.lost_ranks import report_lost_ranks
from namedmesh.training.pipelines import pipeline, stage_indices, stage_layers, tie_stages
from namedmesh.training.reduction import clip_grad_norm_
from namedmesh.training.seeds import seed_all, streams

__all__ = [
    "Checkpoints",
    "check_same_batch",
    "checkpoint_info",
    "clip_grad_norm_",
    "context_attention",
    "data_axes",
    "fsdp_mesh",
    "init_parameters",
    "latest",
    "load",
    "loader_kwargs",
    "pipeline",
    "report_lost_ranks",
    "sampler_kwargs",
    "save",
    "seed_all",
    "set_expert_divisor",
    "shard_sequence",
    "stage_indices",
    "stage_layers",
    "streams",
    "tie_stages",
    "to_pretrained",
    "token_mean",
]
