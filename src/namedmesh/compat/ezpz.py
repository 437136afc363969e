"""Compatibility layer for ``ezpz.tp``, backed by a NamedMesh.

The interface equals :mod:`namedmesh.compat.fairscale`, with *tensor* instead of *model*.
:func:`install` makes this module importable as ``ezpz.tp``. Code that imports it writes ``from
namedmesh.compat.ezpz import tp``; ``tp`` and its submodules, such as ``tp.layers``, are this
module. Variables, such as ``_TENSOR_PARALLEL_GROUP``, can be read and assigned.

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
from datetime import timedelta

import torch.distributed as dist

from namedmesh.compat import fairscale
from namedmesh.compat import layers as _layers
from namedmesh.compat.layers import *
from namedmesh.compat.model_parallel import ModelParallel, get_first_rank, return_value
from namedmesh.compat.patching import Patch

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]
__all__ += ["destroy_tensor_parallel", "initialize_tensor_parallel", "tensor_parallel_is_initialized"]
__all__ += ["get_context_parallel_group", "get_context_parallel_rank"]
__all__ += ["get_context_parallel_ranks", "get_context_parallel_world_size"]
__all__ += ["get_data_parallel_group", "get_data_parallel_rank"]
__all__ += ["get_data_parallel_ranks", "get_data_parallel_world_size"]
__all__ += ["get_pipeline_parallel_group", "get_pipeline_parallel_rank"]
__all__ += ["get_pipeline_parallel_ranks", "get_pipeline_parallel_world_size"]
__all__ += ["get_tensor_parallel_group", "get_tensor_parallel_rank"]
__all__ += ["get_tensor_parallel_ranks", "get_tensor_parallel_src_rank", "get_tensor_parallel_world_size"]
__all__ += ["copy_to_tensor_parallel_region", "gather_from_tensor_parallel_region"]
__all__ += ["reduce_from_tensor_parallel_region", "scatter_to_tensor_parallel_region"]
__all__ += _layers.__all__

# --- groups --------------------------------------------------------------------------------------

_tensor_parallel = ModelParallel("ezpz", "initialize_tensor_parallel", sys.modules[__name__])
bind = _tensor_parallel.bind
unbind = _tensor_parallel.state.unbind
current_mesh = _tensor_parallel.state.current_mesh
destroy_tensor_parallel = _tensor_parallel.state.destroy

# The groups of a mesh are in the variables of this module, which ModelParallel created.
_make_accessor = _tensor_parallel.make_accessor
get_tensor_parallel_group = _make_accessor("_TENSOR_PARALLEL_GROUP", return_value)
get_tensor_parallel_ranks = _make_accessor("_TENSOR_PARALLEL_RANKS", return_value)
get_tensor_parallel_src_rank = _make_accessor("_TENSOR_PARALLEL_GROUP", get_first_rank)
# Before initialization, these two describe one rank by itself. All other accessors raise.
get_tensor_parallel_rank = _make_accessor("_TENSOR_PARALLEL_GROUP", dist.get_rank, default=0)
get_tensor_parallel_world_size = _make_accessor("_TENSOR_PARALLEL_GROUP", dist.get_world_size, default=1)

get_pipeline_parallel_group = _make_accessor("_PIPELINE_PARALLEL_GROUP", return_value)
get_pipeline_parallel_ranks = _make_accessor("_PIPELINE_PARALLEL_RANKS", return_value)
get_pipeline_parallel_rank = _make_accessor("_PIPELINE_PARALLEL_GROUP", dist.get_rank)
get_pipeline_parallel_world_size = _make_accessor("_PIPELINE_PARALLEL_GROUP", dist.get_world_size)

get_context_parallel_group = _make_accessor("_CONTEXT_PARALLEL_GROUP", return_value)
get_context_parallel_ranks = _make_accessor("_CONTEXT_PARALLEL_GROUP_RANKS", return_value)
get_context_parallel_rank = _make_accessor("_CONTEXT_PARALLEL_GROUP", dist.get_rank)
get_context_parallel_world_size = _make_accessor("_CONTEXT_PARALLEL_GROUP", dist.get_world_size)

get_data_parallel_group = _make_accessor("_DATA_PARALLEL_GROUP", return_value)
get_data_parallel_ranks = _make_accessor("_DATA_PARALLEL_RANKS", return_value)
get_data_parallel_rank = _make_accessor("_DATA_PARALLEL_GROUP", dist.get_rank)
get_data_parallel_world_size = _make_accessor("_DATA_PARALLEL_GROUP", dist.get_world_size)


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
    sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size}
    backends = {
        "tp": tensor_parallel_backend,
        "pp": pipeline_parallel_backend,
        "cp": context_parallel_backend,
        "dp": data_parallel_backend,
    }
    _tensor_parallel.initialize(sizes, backends, timeout)


def tensor_parallel_is_initialized() -> bool:
    """Return whether tensor-, pipeline-, context- and data-parallel groups exist."""
    return _tensor_parallel.has_values_for(
        "_TENSOR_PARALLEL_GROUP",
        "_PIPELINE_PARALLEL_GROUP",
        "_CONTEXT_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
    )


# --- region functions and layers -----------------------------------------------------------------

copy_to_tensor_parallel_region = _tensor_parallel.copy_to_region
reduce_from_tensor_parallel_region = _tensor_parallel.reduce_from_region
scatter_to_tensor_parallel_region = _tensor_parallel.scatter_to_region
gather_from_tensor_parallel_region = _tensor_parallel.gather_from_region


class _Layer:
    """Mixin: a fairscale layer uses the tensor-parallel group of ezpz when it is created."""

    model_parallel = _tensor_parallel


class ColumnParallelLinear(_Layer, fairscale.ColumnParallelLinear):
    """A linear layer whose output features are sharded across the tensor-parallel ranks."""


class RowParallelLinear(_Layer, fairscale.RowParallelLinear):
    """A linear layer whose input features are sharded across the tensor-parallel ranks."""


class VocabParallelEmbedding(_Layer, fairscale.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded across the tensor-parallel ranks."""


class ParallelEmbedding(_Layer, fairscale.ParallelEmbedding):
    """An embedding whose features are sharded across the tensor-parallel ranks."""


# --- upstream's import paths ---------------------------------------------------------------------

_SUBMODULES = ("tp", "tp.layers", "tp.mappings", "tp.utils")

# As for fairscale, this module serves as the package ``tp`` and all of its submodules.
tp = layers = mappings = utils = sys.modules[__name__]
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]

# ezpz is not published with this interface, so there is no upstream module whose functions to
# replace.
_patch = Patch("ezpz.tp", None, dict.fromkeys([f"ezpz.{name}" for name in _SUBMODULES], __name__))
install = _patch.install
uninstall = _patch.uninstall
