"""Compatibility layer for ``ezpz.tp``, backed by a NamedMesh.

The interface equals :mod:`namedmesh.compat.fairscale`, with *tensor* instead of *model*. After
:func:`install`, an ``ezpz.tp`` that can be imported uses the groups of our meshes; otherwise this
module is importable under that name. Code that imports it writes ``from namedmesh.compat.ezpz
import tp``; ``tp`` and its submodules, such as ``tp.layers``, are this module. Variables, such as
``_TENSOR_PARALLEL_GROUP``, can be read and assigned.

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

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat import fairscale
from namedmesh.compat import layers as _layers
from namedmesh.compat.layers import *
from namedmesh.compat.model_parallel import ModelParallelLibrary

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


# --- groups --------------------------------------------------------------------------------------


def initialize_tensor_parallel(  # noqa: PLR0917  upstream's signature
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_backend: str | None = None,
    pipeline_parallel_backend: str | None = None,
    context_parallel_backend: str | None = None,
    data_parallel_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Make a mesh with the axes dp, pp, cp and tp over all ranks, and bind it.

    With 16 ranks and the sizes 2, 2 and 2, the tensor-parallel groups are (0, 1), (2, 3), ..., the
    context-parallel groups (0, 2), (1, 3), ..., the pipeline-parallel groups (0, 4), (1, 5), ...,
    and the data-parallel groups (0, 8), (1, 9), ...

    Collective: every rank must call it with the same arguments.

    Args:
        tensor_parallel_size: the size of tp. If it is larger than the world, it is reduced to the
            world size with a warning.
        pipeline_parallel_size: the size of pp.
        context_parallel_size: the size of cp.
        tensor_parallel_backend: the backend of the tp groups; by default the default group's
            backend.
        pipeline_parallel_backend: the same for the pp groups.
        context_parallel_backend: the same for the cp groups.
        data_parallel_backend: the same for the dp groups.
        timeout: the timeout of all groups; by default the default group's timeout.

    Raises:
        ContractError: there is no default group, tensor parallelism is already initialized, or the
            sizes do not divide the world size.
        AgreementError: the other ranks did not call this, or called it with different arguments.
    """
    _layer.make_all_groups(locals())


_parameters = {}
for _axis, _name in {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}.items():
    _parameters[_axis] = (f"{_name}_parallel_size", f"{_name}_parallel_backend")
_layer = ModelParallelLibrary(
    "ezpz",
    initialize_tensor_parallel,
    _parameters,
    modules={part: f"ezpz.{part}" for part in ("tp", "tp.layers", "tp.mappings", "tp.utils")},
    # Before initialization, these three describe one rank by itself, as in a program without tensor
    # parallelism. All other accessors raise.
    before={
        "get_tensor_parallel_rank": lambda: 0,
        "get_tensor_parallel_world_size": lambda: 1,
        "get_tensor_parallel_src_rank": dist.get_rank,
    },
)
# initialize_tensor_parallel, get_data_parallel_rank, copy_to_tensor_parallel_region, bind and so on.
globals().update(_layer.names)

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["tensor_parallel_is_initialized"]
__all__ += _layers.__all__
__all__ += list(_layer.names)


def tensor_parallel_is_initialized() -> bool:
    """Return whether tensor-, pipeline-, context- and data-parallel groups exist."""
    return _layer.has_groups("tp", "pp", "cp", "dp")


# --- layers --------------------------------------------------------------------------------------


class _Layer:
    """Mixin: a fairscale layer uses the tensor-parallel group of ezpz when it is created."""

    model_parallel = _layer


class ColumnParallelLinear(_Layer, fairscale.ColumnParallelLinear):
    """A linear layer whose output features are sharded across the tensor-parallel ranks."""


class RowParallelLinear(_Layer, fairscale.RowParallelLinear):
    """A linear layer whose input features are sharded across the tensor-parallel ranks."""


class VocabParallelEmbedding(_Layer, fairscale.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded across the tensor-parallel ranks."""


class ParallelEmbedding(_Layer, fairscale.ParallelEmbedding):
    """An embedding whose features are sharded across the tensor-parallel ranks."""
