"""Megatron's ``parallel_state``: the same names, signatures and answers, over the groups of one NamedMesh.

The functions read one object, :data:`namedmesh.compat.megatron.state.STATE`. The original's variables, such as
``_TENSOR_MODEL_PARALLEL_GROUP``, can be read and assigned here as there; what is assigned wins over the mesh
until it is deleted, or the state is destroyed.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> from namedmesh.compat.megatron import parallel_state
    >>> _ = namedmesh.launch.init("cpu")
    >>> parallel_state.initialize_model_parallel()
    >>> parallel_state.get_all_ranks()          # tp, dp, cp, pp and ep rank
    '0_0_0_0_0'
    >>> parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS
    [0]
    >>> parallel_state.destroy_model_parallel()
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.accessors.data import *
from namedmesh.compat.megatron.accessors.data import __all__ as _data
from namedmesh.compat.megatron.accessors.expert import *
from namedmesh.compat.megatron.accessors.expert import __all__ as _expert
from namedmesh.compat.megatron.accessors.pipeline import *
from namedmesh.compat.megatron.accessors.pipeline import __all__ as _pipeline
from namedmesh.compat.megatron.accessors.tensor import *
from namedmesh.compat.megatron.accessors.tensor import __all__ as _tensor
from namedmesh.compat.megatron.buffers import GlobalMemoryBuffer, GlobalSymmetricMemoryBuffer
from namedmesh.compat.megatron.lifecycle import destroy_model_parallel, initialize_model_parallel
from namedmesh.compat.megatron.ranks import (
    RankGenerator,
    default_embedding_ranks,
    default_position_embedding_ranks,
    generate_masked_orthogonal_rank_groups,
)
from namedmesh.compat.megatron.single_groups import *
from namedmesh.compat.megatron.single_groups import __all__ as _single_groups
from namedmesh.compat.megatron.state import STATE, VARIABLES, late, warn_deprecated
from namedmesh.compat.state import make_patchable

__all__ = [  # noqa: PLE0604  lists of names, which ruff does not look into
    *_data,
    *_expert,
    *_pipeline,
    *_single_groups,
    *_tensor,
    "GlobalMemoryBuffer",
    "GlobalSymmetricMemoryBuffer",
    "RankGenerator",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "destroy_global_memory_buffer",
    "destroy_global_symmetric_memory_buffer",
    "destroy_model_parallel",
    "generate_masked_orthogonal_rank_groups",
    "get_all_ranks",
    "get_global_memory_buffer",
    "get_global_symmetric_memory_buffer",
    "initialize_model_parallel",
    "is_initialized",
    "is_unitialized",
    "model_parallel_is_initialized",
]

_SYMMETRIC_MEGABYTES = 256


def is_initialized() -> bool:
    """Whether there are groups."""
    return STATE.initialised


def is_unitialized() -> bool:
    """Whether there are no groups; deprecated, as in the original, spelling included."""
    warn_deprecated("is_unitialized is deprecated; call is_initialized instead")
    return not is_initialized()


def model_parallel_is_initialized() -> bool:
    """Whether there are tensor-, pipeline- and data-parallel groups."""
    return STATE.model_parallel


def get_all_ranks() -> str:
    """This rank's place in tp, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """The buffer for temporary tensors, which is made with the groups."""
    return STATE.memory_buffer or late("memory_buffer", "the global memory buffer", "it was destroyed")


def get_global_symmetric_memory_buffer() -> GlobalSymmetricMemoryBuffer:
    """The buffer in symmetric memory, once ``_set_global_symmetric_memory_buffer()`` has made it."""
    return STATE.symmetric_buffer or late(
        "symmetric_buffer",
        "the global symmetric memory buffer",
        "call _set_global_symmetric_memory_buffer() on every rank",
    )


def destroy_global_memory_buffer() -> None:
    """Let the buffer for temporary tensors go."""
    STATE.memory_buffer = None


def destroy_global_symmetric_memory_buffer() -> None:
    """Let the buffer in symmetric memory go."""
    STATE.symmetric_buffer = None


def _set_global_memory_buffer() -> None:
    """Make the buffer for temporary tensors."""
    if STATE.memory_buffer is not None:
        raise ContractError("there is a global memory buffer; call destroy_global_memory_buffer() first")
    STATE.memory_buffer = GlobalMemoryBuffer(None if STATE.mesh is None else STATE.mesh.device)


def _set_global_symmetric_memory_buffer() -> None:
    """Make the buffer in the symmetric memory of the tensor-parallel ranks, all of which call this."""
    if STATE.symmetric_buffer is not None:
        raise ContractError(
            "there is a global symmetric memory buffer; call destroy_global_symmetric_memory_buffer() first"
        )
    STATE.symmetric_buffer = GlobalSymmetricMemoryBuffer(
        size_in_mb=_SYMMETRIC_MEGABYTES, process_group=get_tensor_model_parallel_group()
    )


make_patchable(__name__, STATE, VARIABLES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
