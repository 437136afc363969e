"""What DeepSpeed reads besides an mpu: the variables of ``deepspeed.utils.groups``, and a mark on sharded parameters."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from namedmesh.compat.binding import Binding, Bound
from namedmesh.compat.deepspeed.model_parallel_unit import mpu as make_mpu
from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.errors import PlanError, listing
from namedmesh.groups import group_of_one

if TYPE_CHECKING:
    from torch import nn

    from namedmesh.mesh import NamedMesh

__all__ = ["bind", "mark_parameters", "unbind"]

_BINDING = Binding(
    "DeepSpeed",
    "deepspeed.initialize",
    "namedmesh.compat.deepspeed.bind",
    [
        "_ALL_TO_ALL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_MODEL_PARALLEL_GROUP",
        "_MPU_TENSOR_MODEL_PARALLEL_RANK",
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_WORLD_GROUP",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
        "expert_tensor_parallel_world_size",
        "mesh_device",
        "mpu",
    ],
)


def bind(mesh: NamedMesh) -> Bound:
    """Let DeepSpeed's engine, MoE layers and ZeRO take their groups from a mesh.

    Call it on every rank of the mesh before ``deepspeed.initialize``. The variables of ``deepspeed.utils.groups`` are
    filled until the mesh is closed; its mpu is the mesh's. A view with axes ``ep`` and ``edp``, and ``etp`` where the
    experts' layers are sharded, gives the groups of MoE layers whose ``ep_size`` is the size of ``ep``. For anything else
    DeepSpeed makes groups of its own.

    Args:
        mesh: a mesh that :func:`namedmesh.compat.deepspeed.mpu` takes.

    Returns:
        A handle: in ``with bind(mesh):`` the mesh is selected, and the binding ends with the block.

    Raises:
        ContractRuntimeError: DeepSpeed is not installed, or has none of these variables.
        LayoutError: the mesh has an axis of no kind of parallelism of DeepSpeed's.
        MeshError: ``mesh`` is no open mesh.

    Example, before ``deepspeed.initialize``::

        mesh = namedmesh.init_mesh(dp=-1, tp=2)
        namedmesh.compat.deepspeed.bind(mesh)
    """
    _add_original()
    return _BINDING.rebind(mesh, ()) or _BINDING.take(mesh, (), _values(mesh))


unbind = _BINDING.unbind


@cache
def _add_original() -> None:
    try:
        module = import_module("deepspeed.utils.groups")
    except ModuleNotFoundError as error:
        raise ContractRuntimeError(
            f"bind() fills the groups of DeepSpeed, which cannot be imported ({error}); install it, or give mpu(mesh) to "
            "what takes one"
        ) from None
    absent = [name for name in _BINDING.variables if not hasattr(module, name)]
    if absent:
        raise ContractRuntimeError(
            f"deepspeed.utils.groups has no {', '.join(absent)}; namedmesh was compared with DeepSpeed 0.19 only: install "
            "a release of it"
        )
    _BINDING.add_module(module)


def _values(mesh: NamedMesh) -> dict[str, Any]:
    """Return the variables that a mesh determines."""
    unit = make_mpu(mesh)
    tensor = unit.get_tensor_model_parallel_group()
    values: dict[str, Any] = {
        "mpu": unit,
        "_TENSOR_MODEL_PARALLEL_GROUP": tensor,
        "_MODEL_PARALLEL_GROUP": tensor,
        "_DATA_PARALLEL_GROUP": unit.get_data_parallel_group(),
    }
    if mesh.layout.world_size == dist.get_world_size():
        values["_WORLD_GROUP"] = dist.group.WORLD
    if "ep" in mesh:
        name = f"ep_size_{mesh.size('ep')}"
        replicas = mesh.group("edp") if "edp" in mesh else group_of_one(mesh.pool)
        for variable, group in (("_EXPERT_PARALLEL", mesh.group("ep")), ("_EXPERT_DATA_PARALLEL", replicas)):
            values[f"{variable}_GROUP"] = {name: group}
            values[f"{variable}_GROUP_RANKS"] = {name: dist.get_process_group_ranks(group)}
        values["expert_tensor_parallel_world_size"] = mesh.size("etp") if "etp" in mesh else 1
    return values


def mark_parameters(model: nn.Module) -> list[str]:
    """Mark the shards of tensor-parallel parameters as every version of DeepSpeed expects them.

    DeepSpeed counts a parameter that is not marked on the first model-parallel rank only, so without the mark the
    norm of the gradients, and what is clipped by it, is silently too small. Call it before
    ``deepspeed.initialize``. The layers of namedmesh's Megatron dialect mark their shards with
    ``tensor_model_parallel``, which DeepSpeed 0.19 reads; this adds ``model_parallel``, which all versions do.

    Args:
        model: a model of plain parameters.

    Returns:
        The names of the parameters that are shards.

    Raises:
        PlanError: there are DTensors among the parameters, which DeepSpeed's optimizers cannot work with.

    Example:
        >>> import torch, namedmesh
        >>> from namedmesh.compat.megatron.tensor_parallel import RowParallelLinear
        >>> _ = namedmesh.launch.init("cpu")
        >>> layer = RowParallelLinear(4, 4, input_is_parallel=True, tp_group=torch.distributed.group.WORLD)
        >>> mark_parameters(layer)
        ['weight']
        >>> layer.weight.model_parallel
        True
        >>> torch.distributed.destroy_process_group()
    """
    parameters = dict(model.named_parameters())
    dtensors = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
    if dtensors:
        raise PlanError(
            f"parameters {listing(dtensors)} are DTensors, which DeepSpeed's optimizers cannot work with; use layers whose "
            "parameters are plain shards, such as those of namedmesh.compat.megatron.tensor_parallel"
        )
    shards = []
    for name, parameter in parameters.items():
        if getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False):
            parameter.model_parallel = True  # type: ignore[attr-defined]
            shards.append(name)
    return shards
