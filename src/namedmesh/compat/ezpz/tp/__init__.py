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

from namedmesh.compat.ezpz.dialect import DIALECT
from namedmesh.compat.ezpz.tp import layers, mappings, utils
from namedmesh.compat.ezpz.tp.utils import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)
from namedmesh.compat.model_parallel import first_rank

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup

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
_rank_group: Any = None  # the tensor-parallel ranks, as the layers want them

DIALECT.fill(sys.modules[__name__])

destroy_tensor_parallel = DIALECT.binding.destroy


def initialize_tensor_parallel(  # noqa: PLR0917  the original's signature
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_backend: str | None = None,
    pipeline_parallel_backend: str | None = None,
    context_parallel_backend: str | None = None,
    data_parallel_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Make a mesh of axes dp, pp, cp and tp over the world, and answer from it; communicates.

    Every rank of the world calls it with the same arguments. :func:`namedmesh.compat.ezpz.current_mesh` returns
    the mesh. Of 16 ranks with sizes 2, 2 and 2, tensor groups are (0, 1), (2, 3), ..., context groups (0, 2),
    (1, 3), ..., pipeline groups (0, 4), (1, 5), ..., and data groups (0, 8), (1, 9), ...

    Args:
        tensor_parallel_size: how many ranks share each layer (tp). A size above that of the world is reduced
            to it, with a warning.
        pipeline_parallel_size: how many stages the layers are in (pp).
        context_parallel_size: how many ranks share each sequence (cp).
        tensor_parallel_backend: the backend of the tensor groups; by default the default group's.
        pipeline_parallel_backend: that of the pipeline groups.
        context_parallel_backend: that of the context groups.
        data_parallel_backend: that of the data groups.
        timeout: the timeout of all these groups; by default the default group's.

    Raises:
        ContractError: there is no default group, a second initialization, or sizes that do not divide the
            world. After an error everything is as before.
        AgreementError: the other ranks did not call this, or not with the same arguments.
    """
    DIALECT.initialize(
        {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size},
        {
            "tp": tensor_parallel_backend,
            "pp": pipeline_parallel_backend,
            "cp": context_parallel_backend,
            "dp": data_parallel_backend,
        },
        timeout,
    )


def tensor_parallel_is_initialized() -> bool:
    """Return whether there are tensor-, pipeline-, context- and data-parallel groups."""
    if _TENSOR_PARALLEL_GROUP is None or _PIPELINE_PARALLEL_GROUP is None:
        return False
    return _CONTEXT_PARALLEL_GROUP is not None and _DATA_PARALLEL_GROUP is not None


def get_tensor_parallel_group() -> ProcessGroup:
    """Return the tensor-parallel group."""
    return _TENSOR_PARALLEL_GROUP or DIALECT.missing("the tensor-parallel group")


def get_tensor_parallel_ranks() -> list[int]:
    """Return the list of tensor-parallel ranks."""
    return _TENSOR_PARALLEL_RANKS or DIALECT.missing("the list of tensor-parallel ranks")


def get_pipeline_parallel_group() -> ProcessGroup:
    """Return the pipeline-parallel group."""
    return _PIPELINE_PARALLEL_GROUP or DIALECT.missing("the pipeline-parallel group")


def get_pipeline_parallel_ranks() -> list[int]:
    """Return the list of pipeline-parallel ranks."""
    return _PIPELINE_PARALLEL_RANKS or DIALECT.missing("the list of pipeline-parallel ranks")


def get_pipeline_parallel_world_size() -> int:
    """Return the number of ranks in the pipeline-parallel group."""
    return get_pipeline_parallel_group().size()


def get_pipeline_parallel_rank() -> int:
    """Return the index of this rank in the pipeline-parallel group."""
    return get_pipeline_parallel_group().rank()


def get_context_parallel_group() -> ProcessGroup:
    """Return the context-parallel group."""
    return _CONTEXT_PARALLEL_GROUP or DIALECT.missing("the context-parallel group")


def get_context_parallel_ranks() -> list[int]:
    """Return the list of context-parallel ranks."""
    return _CONTEXT_PARALLEL_GROUP_RANKS or DIALECT.missing("the list of context-parallel ranks")


def get_context_parallel_world_size() -> int:
    """Return the number of ranks in the context-parallel group."""
    return get_context_parallel_group().size()


def get_context_parallel_rank() -> int:
    """Return the index of this rank in the context-parallel group."""
    return get_context_parallel_group().rank()


def get_data_parallel_group() -> ProcessGroup:
    """Return the data-parallel group."""
    return _DATA_PARALLEL_GROUP or DIALECT.missing("the data-parallel group")


def get_data_parallel_ranks() -> list[int]:
    """Return the list of data-parallel ranks."""
    return _DATA_PARALLEL_RANKS or DIALECT.missing("the list of data-parallel ranks")


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in the data-parallel group."""
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    """Return the index of this rank in the data-parallel group."""
    return get_data_parallel_group().rank()


def get_tensor_parallel_rank() -> int:
    """Return the index of this rank in the tensor-parallel group; 0 before there is one."""
    return 0 if _TENSOR_PARALLEL_GROUP is None else _TENSOR_PARALLEL_GROUP.rank()


def get_tensor_parallel_world_size() -> int:
    """Return the number of ranks in the tensor-parallel group; 1 before there is one."""
    return 1 if _TENSOR_PARALLEL_GROUP is None else _TENSOR_PARALLEL_GROUP.size()


def get_tensor_parallel_src_rank() -> int:
    """Return the global rank of the first of the tensor-parallel ranks."""
    return first_rank(get_tensor_parallel_group())
