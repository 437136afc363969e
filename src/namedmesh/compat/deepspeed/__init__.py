"""The DeepSpeed dialect: topologies, the pipeline grid, the mpu and DeepSpeed's groups, over one NamedMesh.

- *Unchanged code*: :func:`install` lets DeepSpeed's own pipelines make topologies and grids of ours; :func:`bind` lets
  its engine, experts, sequence parallelism and ZeRO take their groups from a mesh.
- *Code that builds topologies or a grid*: :class:`ProcessTopology` and its kin, and :class:`PipelineParallelGrid`.
- *Code with a mesh*: ``deepspeed.initialize(model=model, mpu=mpu(mesh), ...)``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch.distributed as dist

from namedmesh.axes import DENSE_AXES, EXPERT_AXES
from namedmesh.compat.deepspeed import topology
from namedmesh.compat.deepspeed.topology import *
from namedmesh.compat.deepspeed.topology import Getters, getter
from namedmesh.compat.patching import Patch, reload_fresh
from namedmesh.compat.state import Bound, State, agreed_groups, check_axes
from namedmesh.mesh import NamedMesh

__all__ = ["ModelParallelUnit", "SequenceParallelUnit", "bind", "install", "mpu"]
__all__ += ["unbind", "uninstall"]
__all__ += topology.__all__

_PLACE = "deepspeed.runtime.pipe.topology"
_PATCH = Patch(
    _PLACE,
    lambda _module: {name: getattr(topology, name) for name in topology.__all__},
    {_PLACE: f"{__name__}.topology"},
)
install, uninstall = _PATCH.install, _PATCH.uninstall


@cache
def _state() -> State:
    module = import_module("deepspeed.utils.groups")
    more = ("mpu", "mesh_device", "expert_tensor_parallel_world_size")
    return State("DeepSpeed", "deepspeed.initialize", module, reload_fresh(module), more)


def bind(mesh: NamedMesh) -> Bound:
    """Let DeepSpeed's engine, MoE layers and ZeRO take their groups from a mesh.

    Every rank calls it before ``deepspeed.initialize(...)``, with a mesh that :func:`mpu` takes. The variables of
    ``deepspeed.utils.groups``, of a release of 0.19, are filled until the mesh is closed; its mpu is the mesh's.
    A view with axes ``ep`` and ``edp``, and ``etp`` where the experts' layers are sharded, gives the groups of MoE layers
    whose ``ep_size`` is the size of ``ep``. For anything else DeepSpeed makes groups of its own. In ``with bind(mesh):`` the
    mesh is selected, and the binding ends with the block.
    """
    state = _state()
    return state.bind(mesh) if state.has_values(mesh) else state.bind_with_values(mesh, _values(mesh))


def unbind() -> None:
    """Forget the mesh that is bound; it stays as it is, with its groups."""
    _state().unbind()


def _values(mesh: NamedMesh) -> dict[str, Any]:
    """Return the variables that a mesh determines."""
    unit = mpu(mesh)
    tensor = unit.get_tensor_model_parallel_group()
    values: dict[str, Any] = {
        "mpu": unit,
        "_TENSOR_MODEL_PARALLEL_GROUP": tensor,
        "_MODEL_PARALLEL_GROUP": tensor,
        "_DATA_PARALLEL_GROUP": unit.get_data_parallel_group(),
        "_WORLD_GROUP": dist.group.WORLD,
    }
    if "ep" in mesh:
        name = f"ep_size_{mesh.size('ep')}"
        with agreed_groups(mesh, "deepspeed.bind"):
            replicas = mesh.group("edp") if "edp" in mesh else mesh.groups.alone()
        for variable, group in (("_EXPERT_PARALLEL", mesh.group("ep")), ("_EXPERT_DATA_PARALLEL", replicas)):
            values[f"{variable}_GROUP"] = {name: group}
            values[f"{variable}_GROUP_RANKS"] = {name: dist.get_process_group_ranks(group)}
        values["expert_tensor_parallel_world_size"] = mesh.size("etp") if "etp" in mesh else 1
    return values


def mpu(mesh: NamedMesh) -> ModelParallelUnit:
    """Make the unit of a mesh, for ``deepspeed.initialize(mpu=...)``; every rank calls it; communicates.

    The mesh has any of the axes dp (or dp_replicate and dp_shard), tp, pp, and sp or cp. sp is DeepSpeed's Ulysses; cp,
    Megatron's context parallelism, means the same to an optimizer: ranks with the same parameters, each with a part of a
    sequence. With both, sequences are sharded over their product.

    DeepSpeed counts a shard whose attribute ``tensor_model_parallel`` is not True on the first model-parallel rank only: the
    norm that it clips by is silently too small. The layers of the Megatron dialect mark their parameters.

    Returns:
        A :class:`ModelParallelUnit`; with sp or cp a :class:`SequenceParallelUnit`.

    Raises:
        LayoutError: the mesh has an axis of no kind of parallelism of DeepSpeed's.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> unit = mpu(mesh)
        >>> unit.get_data_parallel_group() is mesh.group("dp"), hasattr(unit, "get_sequence_parallel_group")
        (True, False)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    with agreed_groups(mesh, "deepspeed.mpu"):
        instead = "DeepSpeed makes its own groups for them; leave it out of the mesh"
        check_axes(mesh.layout, "DeepSpeed", (*DENSE_AXES, "sp"), experts=EXPERT_AXES, instead=instead)
        kinds = {"pipe": ["pp"], "data": ["dp"], "model": ["pp", "tp"], "slice": ["tp"]}
        if "sp" not in mesh and "cp" not in mesh:
            return ModelParallelUnit(mesh, kinds)
        kinds |= {"sequence": ["cp"], "sequence_data": ["dp", "cp"]}
        return SequenceParallelUnit(mesh, kinds)


class ModelParallelUnit(Getters):
    """Ranks, sizes and groups of one mesh under DeepSpeed's names; :func:`mpu` makes it. ``mesh`` is the mesh.

    DeepSpeed knows many names, and checks with ``hasattr`` which exist: a name that exists changes what it does. So a unit
    has the names that mean something on its mesh, and no others.

    *Model*-parallel are the ranks of one replica, all its stages and slices: pp and tp. *Tensor-* (or slice-)
    parallel are those that share a layer: tp. Groups of one rank are groups, too.
    """

    get_model_parallel_src_rank = getter("model", "first_rank")
    get_data_parallel_src_rank = getter("data", "first_rank")
    get_tensor_model_parallel_group = Getters.get_slice_parallel_group
    get_tensor_model_parallel_src_rank = getter("slice", "first_rank")
    get_pipeline_model_parallel_group = Getters.get_pipe_parallel_group


class SequenceParallelUnit(ModelParallelUnit):
    """The unit of a mesh with an axis sp or cp; it adds the getters of DeepSpeed's sequence parallelism.

    DeepSpeed reduces gradients, and shards optimizer states, over the *sequence-data*-parallel ranks: those of the
    data- and sequence-parallel axes together. Up to ZeRO stage 2 it divides the sum by the number of data-parallel
    ranks only: a rank's loss has to be the mean over its own tokens, divided by the number of parts.

    With stage 3 ``deepspeed.initialize`` shards the parameters over the data-parallel ranks alone, and silently never
    adds the gradients of the parts. Shard them before, over all ranks that have the same ones; the loss is then the mean
    over a rank's own tokens, undivided::

        group = unit.get_sequence_data_parallel_group()
        deepspeed.zero.Init(module=model, data_parallel_group=group, config_dict_or_path=config, mpu=unit)
        engine, *_ = deepspeed.initialize(model=model, mpu=unit, config=config)
    """

    get_sequence_parallel_group = getter("sequence", "group")
    get_sequence_parallel_world_size = getter("sequence", "size")
    get_sequence_parallel_rank = getter("sequence", "rank")
    get_sequence_data_parallel_group = getter("sequence_data", "group")
    get_sequence_data_parallel_world_size = getter("sequence_data", "size")
    get_sequence_data_parallel_rank = getter("sequence_data", "rank")
