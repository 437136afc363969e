"""Let DeepSpeed use the groups of meshes: ``bind()`` and ``install()``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh._errors import AgreementError, NamedMeshError
from namedmesh.compat.deepspeed import topology as our_topology
from namedmesh.compat.deepspeed.units import mpu
from namedmesh.compat.patching import UPSTREAM, Patch
from namedmesh.compat.state import (
    AccessorState,
    BindingContext,
    check_open,
    list_rank_sets,
    make_groups,
    read_variables,
)
from namedmesh.mesh.init import init_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.mesh.sharing import share_groups


class _GridPatch(Patch):
    """Lets DeepSpeed's pipelines use the groups of meshes."""

    def replace(self, module: ModuleType) -> Mapping[str, object]:
        """Return the replacement of upstream's grid: its own, with groups of a mesh."""
        upstream: Any = module.PipelineParallelGrid

        class PipelineParallelGrid(upstream):  # type: ignore[misc]
            """DeepSpeed's own grid, on the groups of a mesh that is its attribute ``mesh``."""

            def __init__(self, topology: Any = None, process_group: Any = None) -> None:
                sizes = our_topology.read_sizes(topology or our_topology.make_default_topology())
                with ExitStack() as stack:
                    try:
                        self.mesh = init_mesh(sizes)
                        stack.enter_context(share_groups(self.mesh))
                    except AgreementError:
                        raise  # no rank can make groups any more
                    except NamedMeshError as error:
                        text = f"DeepSpeed's grid makes its own groups, without a mesh: {error}"
                        warnings.warn(text, stacklevel=2)
                    upstream.__init__(self, topology, process_group)

        return {"PipelineParallelGrid": PipelineParallelGrid}


_patch = _GridPatch(UPSTREAM["deepspeed"], {UPSTREAM["deepspeed"]: our_topology.__name__})
install = _patch.install
uninstall: Callable[[], None] = _patch.uninstall


def bind(mesh: NamedMesh) -> BindingContext:
    """Let DeepSpeed's engine, MoE layers and ZeRO use the groups of a mesh.

    Call it before ``deepspeed.initialize(...)``. It sets the variables of
    ``deepspeed.utils.groups``, including ``mpu``, until the mesh is closed. Groups that DeepSpeed
    makes later are its own; inside of :func:`namedmesh.share_groups`, they belong to the mesh.

    Collective: every rank of the mesh must call it when a mesh is bound for the first time.

    Args:
        mesh: a mesh that :func:`mpu` accepts. If it has a view with the axes ``ep`` and ``edp``,
            and ``etp`` for sharded experts, then MoE layers whose ``ep_size`` is the size of ``ep``
            use its groups.

    Returns:
        The binding. In ``with bind(mesh):`` the mesh is selected, and the binding ends with the
        block.

    Raises:
        LayoutError: the mesh has an axis for which DeepSpeed has no group.
        MeshError: the argument is not an open mesh.
        AgreementError: the other ranks did not call this, or called it with a different mesh.
    """
    check_open(mesh, "deepspeed.bind")
    state = _get_state()
    return BindingContext(mesh, {state: state.bind(mesh, partial(_assign_groups, mesh))})


def unbind() -> None:
    """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
    _get_state().unbind()


@cache
def _get_state() -> AccessorState:
    """Return the variables of ``deepspeed.utils.groups``, which is imported on the first call."""
    module = import_module("deepspeed.utils.groups")
    # These variables have no underscore.
    more = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
    return AccessorState("DeepSpeed", "deepspeed.initialize", module, read_variables(module, more))


def _assign_groups(mesh: NamedMesh) -> None:
    """Assign the groups of a mesh, and their ranks, to DeepSpeed's variables."""
    unit = mpu(mesh)
    tensor_group = unit.get_tensor_model_parallel_group()
    values: dict[str, Any] = {
        "mpu": unit,
        "_TENSOR_MODEL_PARALLEL_GROUP": tensor_group,
        "_MODEL_PARALLEL_GROUP": tensor_group,
        "_DATA_PARALLEL_GROUP": unit.get_data_parallel_group(),
        "_WORLD_GROUP": dist.group.WORLD,
    }
    if "ep" in mesh:
        expert_groups = {
            "_EXPERT_PARALLEL_GROUP": mesh.group("ep"),
            "_EXPERT_DATA_PARALLEL_GROUP": mesh.group("edp")
            if "edp" in mesh
            else make_groups(list_rank_sets(mesh.layout, ())),
        }
        # DeepSpeed has a dict of groups for the expert-parallel sizes of its MoE layers, under this
        # name.
        size_name = f"ep_size_{mesh.size('ep')}"
        for variable, group in expert_groups.items():
            values[variable] = {size_name: group}
            values[f"{variable}_RANKS"] = {size_name: dist.get_process_group_ranks(group)}
        values["expert_tensor_parallel_world_size"] = mesh.size("etp") if "etp" in mesh else 1
    vars(_get_state().module).update(values)
