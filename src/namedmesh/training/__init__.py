"""What every training job needs beside a mesh: few functions over torch, each usable alone."""

from namedmesh.training.clipping import clip_grad_norm_
from namedmesh.training.data import check_same_batch, data_axes, fsdp_mesh, sampler_kwargs
from namedmesh.training.experts import set_expert_divisor
from namedmesh.training.loss import token_mean

__all__ = [
    "check_same_batch",
    "clip_grad_norm_",
    "data_axes",
    "fsdp_mesh",
    "sampler_kwargs",
    "set_expert_divisor",
    "token_mean",
]
