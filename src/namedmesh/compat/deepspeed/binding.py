"""Make DeepSpeed use our groups and topologies: ``bind()`` and ``install()``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh._internal import get_groups
from namedmesh.compat.deepspeed import topology
from namedmesh.compat.deepspeed.units import mpu
from namedmesh.compat.patching import Patch, reload_fresh
from namedmesh.compat.state import Bound, State, agree_before_creation
from namedmesh.mesh import NamedMesh

_UPSTREAM_TOPOLOGY = "deepspeed.runtime.pipe.topology"


def _list_replacements(_module: ModuleType) -> dict[str, object]:
    """Return the replacements of upstream's topology classes, by name."""
    return {name: getattr(topology, name) for name in topology.__all__}


_patch = Patch(_UPSTREAM_TOPOLOGY, _list_replacements, {_UPSTREAM_TOPOLOGY: topology.__name__})
install = _patch.install
uninstall = _patch.uninstall


def bind(mesh: NamedMesh) -> Bound:
    """Let DeepSpeed's engine, MoE layers and ZeRO use the groups of a mesh.

    Call it before ``deepspeed.initialize(...)``. It sets the variables of
    ``deepspeed.utils.groups`` (of DeepSpeed 0.19), including ``mpu``, until the mesh is closed.
    DeepSpeed creates all other groups itself.

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
    state = _get_state()
    if state.has_values(mesh):
        return state.bind(mesh)
    return state.bind_with_values(mesh, _collect_values(mesh))


def unbind() -> None:
    """End the binding of the mesh that is bound. The mesh stays open, with its groups."""
    _get_state().unbind()


@cache
def _get_state() -> State:
    """Return the variables of ``deepspeed.utils.groups``, which is imported on the first call."""
    module = import_module("deepspeed.utils.groups")
    # These variables have no underscore, so State does not find them by itself.
    more = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
    # DeepSpeed may have set variables before the first call; a fresh copy has the values at import.
    return State("DeepSpeed", "deepspeed.initialize", module, reload_fresh(module), more)


def _collect_values(mesh: NamedMesh) -> dict[str, Any]:
    """Return the values of DeepSpeed's variables for a mesh: its groups and their ranks.

    Collective: every rank of the mesh must call it.
    """
    unit = mpu(mesh)
    tensor_group = unit.get_tensor_model_parallel_group()
    values: dict[str, Any] = {
        "mpu": unit,
        "_TENSOR_MODEL_PARALLEL_GROUP": tensor_group,
        "_MODEL_PARALLEL_GROUP": tensor_group,
        "_DATA_PARALLEL_GROUP": unit.get_data_parallel_group(),
        "_WORLD_GROUP": dist.group.WORLD,
    }
    if "ep" not in mesh:
        return values
    with agree_before_creation(mesh, "deepspeed.bind"):
        replica_group = mesh.group("edp") if "edp" in mesh else get_groups(mesh).get_self_group()
    expert_groups = {
        "_EXPERT_PARALLEL_GROUP": mesh.group("ep"),
        "_EXPERT_DATA_PARALLEL_GROUP": replica_group,
    }
    # DeepSpeed has a dict of groups for the expert-parallel sizes of its MoE layers, under this
    # name.
    size_name = f"ep_size_{mesh.size('ep')}"
    for variable, group in expert_groups.items():
        values[variable] = {size_name: group}
        values[f"{variable}_RANKS"] = {size_name: dist.get_process_group_ranks(group)}
    values["expert_tensor_parallel_world_size"] = mesh.size("etp") if "etp" in mesh else 1
    return values
