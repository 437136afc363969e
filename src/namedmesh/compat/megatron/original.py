"""megatron-core where it is installed: its own code, on the groups of our meshes."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import signature
from itertools import combinations
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from namedmesh.compat.binding import require_open
from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.compat.install import Original
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.megatron.config import ParallelConfig
from namedmesh.compat.megatron.initialize import destroy_model_parallel, initialize_model_parallel
from namedmesh.compat.megatron.variables import BINDING
from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from types import ModuleType

    from namedmesh.mesh import NamedMesh

__all__ = ["ORIGINAL", "hyper_comm_grid"]

_MODULE = "megatron.core.parallel_state"
_FIRST, _AFTER_LAST = Version("0.14"), Version("0.20.dev0")
_COMPARED = "releases 0.14 to 0.19"
_OURS = "namedmesh.compat.megatron"
_OF_MEGATRON_DEEPSPEED = (
    "get_data_parallel_group_ranks",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_data_parallel_group",
    "get_sequence_data_parallel_rank",
    "get_sequence_data_parallel_world_size",
    "get_sequence_parallel_group",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_src_rank",
    "get_sequence_parallel_world_size",
    "sequence_data_parallel_is_initialized",
    "sequence_parallel_is_initialized",
)
_GROUP = re.compile(r"_[A-Z_]+_(GROUP|RANKS)[A-Z_]*")


def _replace(module: ModuleType) -> dict[tuple[str, str], object]:
    """Return what takes the place of the functions that make and destroy groups, and Megatron-DeepSpeed's names.

    Raises:
        ContractRuntimeError: a release that was not compared, or one with groups or arguments that nobody fills.
    """
    found = getattr(sys.modules["megatron.core"], "__version__", None)
    if found is None or not _FIRST <= Version(found) < _AFTER_LAST:
        raise ContractRuntimeError(
            f"megatron-core {found or 'without a version'} is imported, and namedmesh was compared with {_COMPARED} only; install one of those, or "
            "import the dialect as namedmesh.compat... without install()"
        )
    groups = [name for name in vars(module) if _GROUP.fullmatch(name) and name not in BINDING.variables]
    accepted = signature(module.initialize_model_parallel)
    arguments = [name for name in accepted.parameters if name not in signature(ParallelConfig).parameters]
    if groups or arguments:
        raise ContractRuntimeError(
            f"megatron-core {found} has {', '.join(groups + arguments)}, which namedmesh does not know; install one of "
            f"{_COMPARED}"
        )

    @wraps(module.initialize_model_parallel)
    def initialize(*args: Any, **kwargs: Any) -> None:
        initialize_model_parallel(**accepted.bind(*args, **kwargs).arguments)

    end = module.destroy_model_parallel

    @wraps(end)
    def destroy() -> None:
        # It ends what the release keeps beside groups, and would destroy those of gloo, which others may share.
        kept = {name: vars(module)[name] for name in BINDING.variables if hasattr(module, name)}
        vars(module).update((name, None) for name in kept if name.endswith("_GLOO"))
        try:
            end()
        finally:
            vars(module).update(kept)
            destroy_model_parallel()

    return {
        (_MODULE, "initialize_model_parallel"): initialize,
        (_MODULE, "destroy_model_parallel"): destroy,
        **{(_MODULE, name): getattr(parallel_state, name) for name in _OF_MEGATRON_DEEPSPEED},
    }


ORIGINAL = Original(
    _MODULE,
    BINDING,
    _replace,
    {
        _MODULE: f"{_OURS}.parallel_state",
        "megatron.core.mpu": f"{_OURS}.parallel_state",
        "megatron.core.tensor_parallel": f"{_OURS}.tensor_parallel",
        **{
            f"megatron.core.tensor_parallel.{part}": f"{_OURS}.tensor_parallel.{part}"
            for part in ("cross_entropy", "layers", "mappings", "utils")
        },
    },
)


def hyper_comm_grid(mesh: NamedMesh) -> Any:
    """Return megatron-core's ``HyperCommGrid`` over a mesh, with the groups of its axes; does not communicate.

    Args:
        mesh: the mesh. Its axes are the grid's dims, and a product that was flattened has its group there too; groups
            over other dims are the grid's own ``create_pg``'s.

    Raises:
        ContractRuntimeError: megatron-core is not installed.
        MeshError: ``mesh`` is no open mesh.
    """
    require_open(mesh, "megatron.hyper_comm_grid")
    try:
        kind = import_module("megatron.core.hyper_comm_grid").HyperCommGrid
    except ModuleNotFoundError as error:
        raise ContractRuntimeError(
            f"hyper_comm_grid() fills the HyperCommGrid of megatron-core, which cannot be imported ({error}); install it"
        ) from None
    layout = mesh.layout
    grid = kind(list(layout.sizes[::-1]), list(layout.axes[::-1]), layout.rank_offset)
    for count in range(1, len(layout) + 1):
        for axes in combinations(layout.axes, count):
            with suppress(MeshError):  # this product was not flattened
                grid._pgs["-".join(axes)] = mesh.group(*axes)  # noqa: SLF001  it has no public way to take a group
    return grid
