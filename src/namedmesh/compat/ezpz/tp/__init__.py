"""``ezpz.tp``: tensor, pipeline, context and data parallelism by ezpz's names, over the groups of one NamedMesh.

Ranks are laid out as (dp, pp, cp, tp), tp fastest. It is a module with variables, such as ``_TENSOR_PARALLEL_GROUP``,
which clients read and assign.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> _ = namedmesh.launch.init("cpu")
    >>> initialize_tensor_parallel(tensor_parallel_size=1)
    >>> get_tensor_parallel_rank(), get_tensor_parallel_world_size(), get_data_parallel_ranks()
    (0, 1, [0])
    >>> destroy_tensor_parallel()
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from namedmesh.compat.model_parallel import ModelParallel, first_rank, itself, rank, world_size
from namedmesh.compat.partition import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = [
    "VocabUtility",
    "destroy_tensor_parallel",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_ranks",
    "get_pipeline_parallel_world_size",
    "get_tensor_parallel_group",
    "get_tensor_parallel_rank",
    "get_tensor_parallel_ranks",
    "get_tensor_parallel_src_rank",
    "get_tensor_parallel_world_size",
    "initialize_tensor_parallel",
    "layers",
    "mappings",
    "split_tensor_along_last_dim",
    "tensor_parallel_is_initialized",
    "utils",
]

_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_RANKS: Any = None
_PIPELINE_PARALLEL_GROUP: Any = None
_PIPELINE_PARALLEL_RANKS: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GROUP_RANKS: Any = None
_TENSOR_PARALLEL_GROUP: Any = None
_TENSOR_PARALLEL_RANKS: Any = None

_SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "cp": "context_parallel_size"}
DIALECT = ModelParallel("ezpz", "initialize_tensor_parallel", sys.modules[__name__], _SIZES)

from namedmesh.compat.ezpz.tp import layers, mappings, utils  # noqa: E402  they need the dialect

destroy_tensor_parallel = DIALECT.destroy
get_tensor_parallel_group = DIALECT.getter("_TENSOR_PARALLEL_GROUP", itself)
get_tensor_parallel_ranks = DIALECT.getter("_TENSOR_PARALLEL_RANKS", itself)
get_tensor_parallel_rank = DIALECT.getter(
    "_TENSOR_PARALLEL_GROUP", rank, 0
)  # as the original before there is one
get_tensor_parallel_world_size = DIALECT.getter("_TENSOR_PARALLEL_GROUP", world_size, 1)
get_pipeline_parallel_group = DIALECT.getter("_PIPELINE_PARALLEL_GROUP", itself)
get_pipeline_parallel_ranks = DIALECT.getter("_PIPELINE_PARALLEL_RANKS", itself)
get_pipeline_parallel_rank = DIALECT.getter("_PIPELINE_PARALLEL_GROUP", rank)
get_pipeline_parallel_world_size = DIALECT.getter("_PIPELINE_PARALLEL_GROUP", world_size)
get_context_parallel_group = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", itself)
get_context_parallel_ranks = DIALECT.getter("_CONTEXT_PARALLEL_GROUP_RANKS", itself)
get_context_parallel_rank = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", rank)
get_context_parallel_world_size = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", world_size)
get_data_parallel_group = DIALECT.getter("_DATA_PARALLEL_GROUP", itself)
get_data_parallel_ranks = DIALECT.getter("_DATA_PARALLEL_RANKS", itself)
get_data_parallel_rank = DIALECT.getter("_DATA_PARALLEL_GROUP", rank)
get_data_parallel_world_size = DIALECT.getter("_DATA_PARALLEL_GROUP", world_size)
get_tensor_parallel_src_rank = DIALECT.getter("_TENSOR_PARALLEL_GROUP", first_rank)


def initialize_tensor_parallel(  # noqa: D417, PLR0917  the original's signature, four in one line
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_backend: str | None = None,
    pipeline_parallel_backend: str | None = None,
    context_parallel_backend: str | None = None,
    data_parallel_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Make a mesh of axes dp, pp, cp and tp over the world, and answer from it; every rank calls it alike; communicates.

    Of 16 ranks with sizes 2, 2 and 2, tensor groups are (0, 1), (2, 3), ..., context groups (0, 2), (1, 3), ..., pipeline
    groups (0, 4), (1, 5), ..., and data groups (0, 8), (1, 9), ...

    Args:
        tensor_parallel_size: how many ranks share each layer (tp). A size above that of the world is reduced
            to it, with a warning.
        pipeline_parallel_size: how many stages the layers are in (pp).
        context_parallel_size: how many ranks share each sequence (cp).
        tensor_parallel_backend, pipeline_parallel_backend, context_parallel_backend, data_parallel_backend: the backends
            of the groups; by default the default group's.
        timeout: the timeout of all these groups; by default the default group's.

    Raises:
        ContractError: there is no default group, a second initialization, or sizes that do not divide the world.
        AgreementError: the other ranks did not call this, or not with the same arguments.
    """
    sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size}
    backends = {"tp": tensor_parallel_backend, "pp": pipeline_parallel_backend}
    backends |= {"cp": context_parallel_backend, "dp": data_parallel_backend}
    DIALECT.initialize(sizes, backends, timeout)


def tensor_parallel_is_initialized() -> bool:
    """Return whether there are tensor-, pipeline-, context- and data-parallel groups."""
    groups = (
        "_TENSOR_PARALLEL_GROUP",
        "_PIPELINE_PARALLEL_GROUP",
        "_CONTEXT_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
    )
    return DIALECT.are_there(*groups)
