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

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat import fairscale
from namedmesh.compat import layers as _layers
from namedmesh.compat.binding import Api
from namedmesh.compat.layers import *
from namedmesh.compat.model_parallel import Accessors, ModelParallel, are_assigned, list_variables

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


# --- groups --------------------------------------------------------------------------------------

for _name in list_variables("ezpz"):
    globals()[_name] = None


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
    _fallback.make_all_groups(
        {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size},
        {
            "tp": tensor_parallel_backend,
            "pp": pipeline_parallel_backend,
            "cp": context_parallel_backend,
            "dp": data_parallel_backend,
        },
        timeout,
    )


def destroy_tensor_parallel() -> None:
    """End all bindings, and close the mesh that :func:`initialize_tensor_parallel` made."""


def _make_binding(module: Any) -> ModelParallel:
    """Return the binding of upstream's module, or of this one."""
    axes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}
    parameters = {}
    for axis, name in axes.items():
        parameters[axis] = (f"{name}_parallel_size", f"{name}_parallel_backend")
    binding = ModelParallel(
        "ezpz", module, "initialize_tensor_parallel", "destroy_tensor_parallel", parameters
    )
    if module is not sys.modules[__name__]:
        # Upstream's function is right only if tensor-parallel ranks are neighbors.
        binding.replacements["get_tensor_parallel_src_rank"] = get_tensor_parallel_src_rank
    return binding


# As for fairscale, this module serves as the package ``tp`` and all of its submodules.
_SUBMODULES = ("tp", "tp.layers", "tp.mappings", "tp.utils")
tp = layers = mappings = utils = sys.modules[__name__]
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]

_fallback = _make_binding(sys.modules[__name__])
# The functions above know no mesh, so the replacements are the ones that users call.
globals().update(_fallback.replacements)
_names = {f"ezpz.{name}": __name__ for name in _SUBMODULES}
_api = Api("ezpz", _make_binding, _fallback, _names)
# Before initialization, these three describe one rank by itself, as in a program without tensor
# parallelism. All other accessors raise.
_before = {
    "get_tensor_parallel_rank": lambda: 0,
    "get_tensor_parallel_world_size": lambda: 1,
    "get_tensor_parallel_src_rank": dist.get_rank,
}
_accessors = Accessors(_api, _before)
globals().update(_accessors.functions)

bind = _api.bind
unbind = _api.unbind
current_mesh = _api.current_mesh
install = _api.patch.install
uninstall = _api.patch.uninstall

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]
__all__ += ["destroy_tensor_parallel", "initialize_tensor_parallel", "tensor_parallel_is_initialized"]
__all__ += _layers.__all__
__all__ += list(_accessors.functions)


def tensor_parallel_is_initialized() -> bool:
    """Return whether tensor-, pipeline-, context- and data-parallel groups exist."""
    return are_assigned(_api, "tp", "pp", "cp", "dp")


# --- layers --------------------------------------------------------------------------------------


class _Layer:
    """Mixin: a fairscale layer uses the tensor-parallel group of ezpz when it is created."""

    accessors = _accessors


class ColumnParallelLinear(_Layer, fairscale.ColumnParallelLinear):
    """A linear layer whose output features are sharded across the tensor-parallel ranks."""


class RowParallelLinear(_Layer, fairscale.RowParallelLinear):
    """A linear layer whose input features are sharded across the tensor-parallel ranks."""


class VocabParallelEmbedding(_Layer, fairscale.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded across the tensor-parallel ranks."""


class ParallelEmbedding(_Layer, fairscale.ParallelEmbedding):
    """An embedding whose features are sharded across the tensor-parallel ranks."""
