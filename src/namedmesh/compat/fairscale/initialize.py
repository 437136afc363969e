"""fairscale's ``model_parallel.initialize``: the same names and answers, over the groups of one NamedMesh.

Ranks are laid out as (dp, pp, cp, tp), tp fastest: fairscale's *model* parallelism is tp. Also here are what later
sources of fairscale have: the context-parallel accessors and the lists of ranks. The original's variables, such as
``_MODEL_PARALLEL_GROUP``, can be read and assigned; an assignment takes precedence until it is deleted, or the groups are destroyed.

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

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.binding import make_patchable
from namedmesh.compat.model_parallel import ModelParallel
from namedmesh.dialects import DIALECTS, variables_of

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

DIALECT = ModelParallel(
    "fairscale",
    "namedmesh.compat.fairscale",
    "initialize_model_parallel",
    {"tp": "model_parallel_size_", "pp": "pipeline_length", "cp": "context_parallel_size"},
    tensor="model",
)
_STATE = DIALECT.state

bind = DIALECT.bind
unbind = DIALECT.unbind
current_mesh = DIALECT.current_mesh
destroy_model_parallel = DIALECT.destroy
get_context_parallel_group = DIALECT.accessor("cp", "group")
get_context_parallel_rank = DIALECT.accessor("cp", "rank")
get_context_parallel_ranks = DIALECT.accessor("cp", "ranks")
get_context_parallel_world_size = DIALECT.accessor("cp", "size")
get_data_parallel_group = DIALECT.accessor("dp", "group")
get_data_parallel_rank = DIALECT.accessor("dp", "rank")
get_data_parallel_world_size = DIALECT.accessor("dp", "size")
get_model_parallel_group = DIALECT.accessor("tp", "group")
get_model_parallel_rank = DIALECT.accessor("tp", "rank")
get_model_parallel_world_size = DIALECT.accessor("tp", "size")
get_model_parallel_src_rank = DIALECT.first_rank
get_pipeline_parallel_group = DIALECT.accessor("pp", "group")
get_pipeline_parallel_ranks = DIALECT.accessor("pp", "ranks")

VARIABLES = variables_of(DIALECTS["fairscale"].kinds)
"""The original's variables, later sources' included, and the slot that each of them is."""


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

    Warns:
        UserWarning: the size was reduced.
    """
    DIALECT.initialize(
        {"tp": int(model_parallel_size_), "pp": pipeline_length, "cp": context_parallel_size},
        {"tp": model_parallel_backend, "pp": pipeline_backend, "cp": cp_backend, "dp": ddp_backend},
    )


def model_parallel_is_initialized() -> bool:
    """Return whether there are model-, data- and pipeline-parallel groups."""
    groups = _STATE.tp_group, _STATE.dp_group, _STATE.pp_group  # no set: torch 2.9's compiler hashes no group
    return all(group is not None for group in groups)


def get_model_parallel_ranks() -> list[int]:
    """Return the global ranks of the model-parallel group."""
    return dist.get_process_group_ranks(get_model_parallel_group())


def get_data_parallel_ranks() -> list[int]:
    """Return the global ranks of the data-parallel group; the original has no variable for them."""
    return dist.get_process_group_ranks(get_data_parallel_group())


make_patchable(__name__, _STATE, VARIABLES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
