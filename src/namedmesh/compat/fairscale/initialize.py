"""fairscale's ``model_parallel.initialize``: the same names and answers, over the groups of one NamedMesh.

Ranks are laid out as (dp, pp, cp, tp), tp fastest: fairscale's *model* parallelism is tp. Also here are what later
sources of fairscale have: the context-parallel accessors and the lists of ranks. Like the original it is a module with
variables, such as ``_MODEL_PARALLEL_GROUP``, which may be read and assigned.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> _ = namedmesh.launch.init("cpu")
    >>> initialize_model_parallel(1)
    >>> get_model_parallel_rank(), get_model_parallel_world_size(), get_pipeline_parallel_ranks()
    (0, 1, [0])
    >>> current_mesh().layout
    Layout(dp=1, pp=1, cp=1, tp=1)
    >>> destroy_model_parallel()
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.model_parallel import ModelParallel, first_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "bind",
    "current_mesh",
    "destroy_model_parallel",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_ranks",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "unbind",
]

_DATA_PARALLEL_GROUP: Any = None
_PIPELINE_PARALLEL_GROUP: Any = None
_PIPELINE_PARALLEL_RANKS: Any = None
_MODEL_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GROUP: Any = None
_CONTEXT_PARALLEL_GROUP_RANKS: Any = None
_rank_group: Any = None  # the model-parallel ranks, as the layers want them

DIALECT = ModelParallel(
    "fairscale",
    "initialize_model_parallel",
    {"tp": "model_parallel_size_", "pp": "pipeline_length", "cp": "context_parallel_size"},
)
DIALECT.fill(sys.modules[__name__])

bind = DIALECT.bind
unbind = DIALECT.binding.unbind
current_mesh = DIALECT.binding.current_mesh
destroy_model_parallel = DIALECT.binding.destroy


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
    context_parallel_size: int = 1,
    cp_backend: str | None = None,
) -> None:
    """Make a mesh of axes dp, pp, cp and tp over the world, and answer from it; communicates.

    Every rank of the world calls it with the same arguments. :func:`current_mesh` returns the mesh.

    Args:
        model_parallel_size_: how many ranks share each layer (tp). A size above that of the world is reduced
            to it, with a warning.
        pipeline_length: how many stages the layers are in (pp).
        model_parallel_backend: the backend of the model-parallel groups; by default the default group's.
        pipeline_backend: that of the pipeline groups.
        ddp_backend: that of the data-parallel groups.
        context_parallel_size: how many ranks share each sequence (cp); by name only, because where it stands
            among the arguments depends on the version of fairscale.
        cp_backend: the backend of the context-parallel groups.

    Raises:
        ContractError: there is no default group, a second initialization, or sizes that do not divide the
            world. After an error everything is as before.
        AgreementError: the other ranks did not call this, or not with the same arguments.
    """
    DIALECT.initialize(
        {"tp": int(model_parallel_size_), "pp": pipeline_length, "cp": context_parallel_size},
        {"tp": model_parallel_backend, "pp": pipeline_backend, "cp": cp_backend, "dp": ddp_backend},
    )


def model_parallel_is_initialized() -> bool:
    """Return whether there are model-, data- and pipeline-parallel groups."""
    if _MODEL_PARALLEL_GROUP is None or _DATA_PARALLEL_GROUP is None:
        return False
    return _PIPELINE_PARALLEL_GROUP is not None


def get_model_parallel_group() -> ProcessGroup:
    """Return the model-parallel group."""
    return _MODEL_PARALLEL_GROUP or DIALECT.missing("the model-parallel group")


def get_model_parallel_world_size() -> int:
    """Return the number of ranks in the model-parallel group."""
    return get_model_parallel_group().size()


def get_model_parallel_rank() -> int:
    """Return the index of this rank in the model-parallel group."""
    return get_model_parallel_group().rank()


def get_data_parallel_group() -> ProcessGroup:
    """Return the data-parallel group."""
    return _DATA_PARALLEL_GROUP or DIALECT.missing("the data-parallel group")


def get_data_parallel_world_size() -> int:
    """Return the number of ranks in the data-parallel group."""
    return get_data_parallel_group().size()


def get_data_parallel_rank() -> int:
    """Return the index of this rank in the data-parallel group."""
    return get_data_parallel_group().rank()


def get_context_parallel_group() -> ProcessGroup:
    """Return the context-parallel group."""
    return _CONTEXT_PARALLEL_GROUP or DIALECT.missing("the context-parallel group")


def get_context_parallel_world_size() -> int:
    """Return the number of ranks in the context-parallel group."""
    return get_context_parallel_group().size()


def get_context_parallel_rank() -> int:
    """Return the index of this rank in the context-parallel group."""
    return get_context_parallel_group().rank()


def get_context_parallel_ranks() -> list[int]:
    """Return the list of context-parallel ranks."""
    return _CONTEXT_PARALLEL_GROUP_RANKS or DIALECT.missing("the list of context-parallel ranks")


def get_pipeline_parallel_group() -> ProcessGroup:
    """Return the pipeline-parallel group."""
    return _PIPELINE_PARALLEL_GROUP or DIALECT.missing("the pipeline-parallel group")


def get_pipeline_parallel_ranks() -> list[int]:
    """Return the list of pipeline-parallel ranks."""
    return _PIPELINE_PARALLEL_RANKS or DIALECT.missing("the list of pipeline-parallel ranks")


def get_model_parallel_src_rank() -> int:
    """Return the global rank of the first of the model-parallel ranks."""
    return first_rank(get_model_parallel_group())


def get_model_parallel_ranks() -> list[int]:
    """Return the global ranks of the model-parallel group."""
    return dist.get_process_group_ranks(get_model_parallel_group())


def get_data_parallel_ranks() -> list[int]:
    """Return the global ranks of the data-parallel group; the original has no variable for them."""
    return dist.get_process_group_ranks(get_data_parallel_group())
