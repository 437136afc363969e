"""The ezpz dialect: ``ezpz.tp``, its accessors and its layers, over one NamedMesh.

It is :mod:`namedmesh.compat.fairscale` in other words: *tensor* for *model*. :func:`install` puts it under ``ezpz.tp``; code
that imports the dialect writes ``from namedmesh.compat.ezpz import tp``, and ``tp`` and its parts, such as ``tp.layers``, are
this one module. Variables, such as ``_TENSOR_PARALLEL_GROUP``, are read and assigned by clients.

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
from namedmesh.compat import layers as _helpers
from namedmesh.compat.fairscale import ModelParallel, first_rank, itself
from namedmesh.compat.layers import *
from namedmesh.compat.patching import Patch

_DIALECT = ModelParallel("ezpz", "initialize_tensor_parallel", sys.modules[__name__])
bind, unbind, current_mesh = _DIALECT.bind, _DIALECT.state.unbind, _DIALECT.state.current_mesh
destroy_tensor_parallel = _DIALECT.state.destroy
get_tensor_parallel_group = _DIALECT.getter("_TENSOR_PARALLEL_GROUP", itself)
get_tensor_parallel_ranks = _DIALECT.getter("_TENSOR_PARALLEL_RANKS", itself)
get_tensor_parallel_src_rank = _DIALECT.getter("_TENSOR_PARALLEL_GROUP", first_rank)
get_tensor_parallel_rank = _DIALECT.getter("_TENSOR_PARALLEL_GROUP", dist.get_rank, before=0)
get_tensor_parallel_world_size = _DIALECT.getter("_TENSOR_PARALLEL_GROUP", dist.get_world_size, before=1)
get_pipeline_parallel_group = _DIALECT.getter("_PIPELINE_PARALLEL_GROUP", itself)
get_pipeline_parallel_ranks = _DIALECT.getter("_PIPELINE_PARALLEL_RANKS", itself)
get_pipeline_parallel_rank = _DIALECT.getter("_PIPELINE_PARALLEL_GROUP", dist.get_rank)
get_pipeline_parallel_world_size = _DIALECT.getter("_PIPELINE_PARALLEL_GROUP", dist.get_world_size)
get_context_parallel_group = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", itself)
get_context_parallel_ranks = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP_RANKS", itself)
get_context_parallel_rank = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", dist.get_rank)
get_context_parallel_world_size = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", dist.get_world_size)
get_data_parallel_group = _DIALECT.getter("_DATA_PARALLEL_GROUP", itself)
get_data_parallel_ranks = _DIALECT.getter("_DATA_PARALLEL_RANKS", itself)
get_data_parallel_rank = _DIALECT.getter("_DATA_PARALLEL_GROUP", dist.get_rank)
get_data_parallel_world_size = _DIALECT.getter("_DATA_PARALLEL_GROUP", dist.get_world_size)

copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region = _DIALECT.copy, _DIALECT.reduce
scatter_to_tensor_parallel_region, gather_from_tensor_parallel_region = _DIALECT.scatter, _DIALECT.gather


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
    """Make a mesh of axes dp, pp, cp and tp over the world as fairscale's ``initialize_model_parallel`` does; communicates.

    Of 16 ranks with sizes 2, 2 and 2, tensor groups are (0, 1), (2, 3), ..., context groups (0, 2), (1, 3), ..., pipeline
    groups (0, 4), (1, 5), ..., and data groups (0, 8), (1, 9), ... ``timeout`` is by default that of the default group.
    """
    sizes = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size}
    backends = {"tp": tensor_parallel_backend, "pp": pipeline_parallel_backend}
    backends |= {"cp": context_parallel_backend, "dp": data_parallel_backend}
    _DIALECT.initialize(sizes, backends, timeout)


def tensor_parallel_is_initialized() -> bool:
    """Return whether there are tensor-, pipeline-, context- and data-parallel groups."""
    kinds = ("TENSOR", "PIPELINE", "CONTEXT", "DATA")
    return _DIALECT.are_there(*(f"_{kind}_PARALLEL_GROUP" for kind in kinds))


# The layers are fairscale's, over the tensor-parallel ranks of the moment in which they are made.


class _Layer:
    dialect = _DIALECT


class ColumnParallelLinear(_Layer, fairscale.ColumnParallelLinear):
    """A linear layer whose output features are sharded over the tensor-parallel ranks."""


class RowParallelLinear(_Layer, fairscale.RowParallelLinear):
    """A linear layer whose input features are sharded over the tensor-parallel ranks."""


class VocabParallelEmbedding(_Layer, fairscale.VocabParallelEmbedding):
    """An embedding whose vocabulary is sharded over the tensor-parallel ranks."""


class ParallelEmbedding(_Layer, fairscale.ParallelEmbedding):
    """An embedding whose features are sharded over the tensor-parallel ranks."""


# ``tp``, and every part of it, is this module. The interface is not published as it is here: there is no original to fill.
_PARTS = ("tp", "tp.layers", "tp.mappings", "tp.utils")
tp = layers = mappings = utils = sys.modules[__name__]
sys.modules.update({f"{__name__}.{part}": tp for part in _PARTS})

_PATCH = Patch("ezpz.tp", None, dict.fromkeys([f"ezpz.{part}" for part in _PARTS], __name__))
install, uninstall = _PATCH.install, _PATCH.uninstall
__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["bind", "current_mesh", "install", "tp", "unbind", "uninstall"]
__all__ += _helpers.__all__
__all__ += [name for name in dir() if "_parallel" in name and not name.startswith("_")]
