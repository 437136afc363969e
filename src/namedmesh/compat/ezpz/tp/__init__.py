"""``ezpz.tp``: tensor, pipeline, context and data parallelism by ezpz's names, over the groups of one NamedMesh.

Ranks are laid out as (dp, pp, cp, tp), tp fastest. It is a module with variables, such as ``_TENSOR_PARALLEL_GROUP``,
which clients read and assign.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> _ = namedmesh.launch.init("cpu")
    >>> initialize_tensor_parallel(tensor_parallel_size=1)
    >>> get_tensor_parallel_rank(), get_tensor_parallel_world_size(), get_data_parallel_ranks()
    (0, 1, [0])
    >>> layers.ColumnParallelLinear(6, 8)(mappings.copy_to_tensor_parallel_region(torch.zeros(5, 6))).shape
    torch.Size([5, 8])
    >>> destroy_tensor_parallel()
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from namedmesh.compat import partition as utils
from namedmesh.compat.model_parallel import ModelParallel, first_rank, itself, rank, world_size
from namedmesh.compat.partition import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)
