"""What every training job needs beside a mesh: few functions over torch, each usable alone."""

from namedmesh.training.clipping import clip_grad_norm_
from namedmesh.training.data import check_same_batch, data_axes, fsdp_mesh, sampler_kwargs
from namedmesh.training.experts import set_expert_divisor
from namedmesh.training.initialization import init_parameters
from namedmesh.training.loss import token_mean
from namedmesh.training.seeds import seed_all, streams

__all__ = [
    "check_same_batch",
    "clip_grad_norm_",
    "data_axes",
    "fsdp_mesh",
    "init_parameters",
    "sampler_kwargs",
    "seed_all",
    "set_expert_divisor",
    "streams",
    "token_mean",
]
