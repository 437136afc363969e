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
from typing import Any

from namedmesh.compat.model_parallel import ModelParallel, first_rank, itself, rank, ranks, world_size

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

_SIZES = {"tp": "model_parallel_size_", "pp": "pipeline_length", "cp": "context_parallel_size"}
DIALECT = ModelParallel("fairscale", "initialize_model_parallel", sys.modules[__name__], _SIZES)

bind, unbind, current_mesh = DIALECT.bind, DIALECT.unbind, DIALECT.current_mesh
destroy_model_parallel = DIALECT.destroy
get_model_parallel_group = DIALECT.getter("_MODEL_PARALLEL_GROUP", itself)
get_model_parallel_world_size = DIALECT.getter("_MODEL_PARALLEL_GROUP", world_size)
get_model_parallel_rank = DIALECT.getter("_MODEL_PARALLEL_GROUP", rank)
get_model_parallel_ranks = DIALECT.getter("_MODEL_PARALLEL_GROUP", ranks)
get_model_parallel_src_rank = DIALECT.getter("_MODEL_PARALLEL_GROUP", first_rank)
get_data_parallel_group = DIALECT.getter("_DATA_PARALLEL_GROUP", itself)
get_data_parallel_world_size = DIALECT.getter("_DATA_PARALLEL_GROUP", world_size)
get_data_parallel_rank = DIALECT.getter("_DATA_PARALLEL_GROUP", rank)
get_data_parallel_ranks = DIALECT.getter("_DATA_PARALLEL_GROUP", ranks)
get_context_parallel_group = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", itself)
get_context_parallel_world_size = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", world_size)
get_context_parallel_rank = DIALECT.getter("_CONTEXT_PARALLEL_GROUP", rank)
get_context_parallel_ranks = DIALECT.getter("_CONTEXT_PARALLEL_GROUP_RANKS", itself)
get_pipeline_parallel_group = DIALECT.getter("_PIPELINE_PARALLEL_GROUP", itself)
get_pipeline_parallel_ranks = DIALECT.getter("_PIPELINE_PARALLEL_RANKS", itself)


def initialize_model_parallel(  # noqa: D417  four in one line
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
    context_parallel_size: int = 1,
    cp_backend: str | None = None,
) -> None:
    """Make a mesh of axes dp, pp, cp and tp over the world, and answer from it; every rank calls it alike; communicates.

    Args:
        model_parallel_size_: how many ranks share each layer (tp). A size above that of the world is reduced
            to it, with a warning.
        pipeline_length: how many stages the layers are in (pp).
        model_parallel_backend, pipeline_backend, ddp_backend, cp_backend: the backends of the groups over tp, pp, dp and
            cp; by default the default group's.
        context_parallel_size: how many ranks share each sequence (cp); by name only, because where it stands
            among the arguments depends on the version of fairscale.

    Raises:
        ContractError: there is no default group, a second initialization, or sizes that do not divide the world.
        AgreementError: the other ranks did not call this, or not with the same arguments.
    """
    DIALECT.initialize(
        {"tp": int(model_parallel_size_), "pp": pipeline_length, "cp": context_parallel_size},
        {"tp": model_parallel_backend, "pp": pipeline_backend, "cp": cp_backend, "dp": ddp_backend},
    )


def model_parallel_is_initialized() -> bool:
    """Return whether there are model-, data- and pipeline-parallel groups."""
    return DIALECT.are_there("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_PIPELINE_PARALLEL_GROUP")
