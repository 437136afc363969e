"""DeepSpeed's ``deepspeed.utils.groups``: the groups that its engine asks for, over one NamedMesh.

The original creates a process group for each set of ranks that it is asked for. Here they come from the pool of one
mesh: a set of ranks that a mesh has a group over already gets that group. The mesh is the one of :func:`bind`; else
that of the mpu, if it is one of namedmesh's; else one over the world, made when the first group is asked for.

Names, arguments and answers are those of DeepSpeed. ``install()`` of the package puts the module in its place.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from namedmesh.compat.binding import LegacyState, make_patchable, require_default_group
from namedmesh.compat.deepspeed.model_parallel_unit import mpu as make_mpu
from namedmesh.compat.errors import ContractError, ContractKeyError, ContractRuntimeError
from namedmesh.compat.partition import ensure_divisibility as _ensure_divisibility
from namedmesh.errors import LayoutError
from namedmesh.init import init_mesh
from namedmesh.layout import Layout
from namedmesh.making import group_of_one
from namedmesh.mesh import NamedMesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "bind",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
    "initialize_mesh_device",
    "set_tensor_model_parallel_rank",
    "set_tensor_model_parallel_world_size",
]

_VARIABLES = {
    "_ALL_TO_ALL_GROUP": "all_to_all",
    "_DATA_PARALLEL_GROUP": "data",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS": "edp_ranks",
    "_EXPERT_PARALLEL_GROUP": "ep",
    "_EXPERT_PARALLEL_GROUP_RANKS": "ep_ranks",
    "_MODEL_PARALLEL_GROUP": "model",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK": "tensor_rank",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": "tensor_size",
    "_TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "_WORLD_GROUP": "world",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "zero_param",
    "expert_tensor_parallel_world_size": "etp_size",
    "mesh_device": "mesh_device",
    "mpu": "mpu",
}


class _State(LegacyState):
    """The original's variables: slots of one object, emptied when the default group is destroyed."""

    __slots__ = tuple(_VARIABLES.values())
    slots = __slots__
    etp_size: int

    def clear(self) -> None:
        """Forget every group."""
        super().clear()
        for slot in ("all_to_all", "edp", "edp_ranks", "ep", "ep_ranks"):
            setattr(self, slot, {})
        self.etp_size = 1


_state: Any = _State()
make_patchable(__name__, _state, _VARIABLES)


def bind(mesh: NamedMesh) -> None:
    """Answer from a mesh that exists, and create further groups through it; communicates.

    Every rank of the mesh calls it, before ``deepspeed.initialize``. The mesh becomes the mpu. A view with axes
    ``ep`` and ``edp``, and ``etp`` where the experts' layers are sharded, gives the groups of MoE layers whose
    ``ep_size`` is the size of ``ep``; without one they are DeepSpeed's own choice of ranks.

    Args:
        mesh: a mesh that :func:`namedmesh.compat.deepspeed.mpu` takes.

    Raises:
        LayoutError: the mesh has an axis of no kind of parallelism of DeepSpeed's.
        MeshError: ``mesh`` is no open mesh.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> bind(mesh)
        >>> _get_data_parallel_group() is mesh.group("dp"), _get_model_parallel_world_size()
        (True, 1)
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    unit = make_mpu(mesh)
    _state.clear()
    _state.mpu = unit
    _mesh()
    _state.tensor = _state.model = unit.get_tensor_model_parallel_group()
    _state.data = unit.get_data_parallel_group()
    if "ep" in mesh:
        name = f"ep_size_{mesh.size('ep')}"
        replicas = "edp" if "edp" in mesh else None
        _state.ep[name], _state.ep_ranks[name] = mesh.group("ep"), list(mesh.ranks("ep"))
        _state.edp[name] = mesh.group(replicas) if replicas else group_of_one(mesh.pool)
        _state.edp_ranks[name] = list(mesh.ranks(replicas)) if replicas else [mesh.global_rank]
        _state.etp_size = mesh.size("etp") if "etp" in mesh else 1


def _mesh() -> NamedMesh:
    """Return the mesh whose pool the groups come from."""
    mesh: Any = _state.mesh
    if mesh is not None and mesh.closed:
        _state.clear()
        mesh = None
    mesh = mesh or getattr(_state.mpu, "mesh", None)
    if not isinstance(mesh, NamedMesh) or mesh.closed:
        mesh = init_mesh(dp=-1)
    _state.mesh = mesh
    mesh.pool.registry.users[id(_state)] = _state.clear
    bound: NamedMesh = mesh
    return bound


def _create(sets: Iterable[Sequence[int]], label: str) -> Any:
    """Return this rank's group among disjoint sets of ranks, created unless it exists; every rank calls it."""
    mesh = _mesh()
    in_order = [sorted(ranks) for ranks in sets]
    with mesh.agreed(f"deepspeed.groups, for {label}") as maker:
        maker.compare({"sets of ranks": repr(in_order)})
        groups = maker.make_sets(in_order, label)
    return next(group for ranks, group in groups.items() if mesh.global_rank in ranks)


def _stages(count: int) -> list[range]:
    """Return the ranks of each stage of a pipeline."""
    world = dist.get_world_size()
    size = world // count
    return [range(first, first + size) for first in range(0, world, size)]


def _check_initialized() -> None:
    require_default_group("deepspeed.init_distributed()")


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Refuse, as DeepSpeed does: the size goes to its MoE layers.

    Raises:
        ContractRuntimeError: always.
    """
    del mpu
    raise ContractRuntimeError(f"groups.initialize is gone from DeepSpeed; give MoE(..., ep_size={ep_size})")


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return the torch mesh for ``deepspeed.initialize(mesh_param=...)``, on the groups of the mesh; communicates.

    Args:
        mesh_shape: how many ranks each axis has; the first axis is the slowest.
        mesh_dim_names: their names; DeepSpeed says ``("data_parallel", "sequence_parallel")``.

    Raises:
        LayoutError: the sizes do not make up the ranks of the mesh.
    """
    mesh = _mesh()
    layout = Layout(
        **dict(zip(mesh_dim_names, mesh_shape, strict=True)),
        world_size=mesh.layout.world_size,
        rank_offset=mesh.layout.rank_offset,
    )
    with mesh.agreed("deepspeed.initialize_mesh_device") as maker:
        maker.compare({"layout": repr(layout)})
        return maker.mesh_from_groups(layout, mesh.device.type, {})


def _release_process_group_references(group: Any = None) -> None:
    """Forget a group that was destroyed; None for all."""
    if group is None:
        _state.clear()
        return
    for groups, ranks in (
        (_state.ep, _state.ep_ranks),
        (_state.edp, _state.edp_ranks),
        (_state.all_to_all, {}),
    ):
        for name in [name for name, known in groups.items() if known is group]:
            del groups[name]
            ranks.pop(name, None)
    if _state.tensor is group:
        _state.tensor_size = _state.tensor_rank = None
    for slot in ("world", "zero_param", "tensor", "model", "data"):
        if getattr(_state, slot) is group:
            setattr(_state, slot, None)


# Tensor parallelism of DeepSpeed's own (AutoTP).


def _init_tp_mesh_device(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any] | None:
    """Create the tensor- and data-parallel groups, unless they exist; returns the data- and the model-parallel one."""
    if _state.tensor is not None:
        if dist.get_world_size(_state.tensor) != tensor_model_parallel_size and _state.mpu is not None:
            raise LayoutError(
                f"DeepSpeed asks for tensor parallelism of {tensor_model_parallel_size}, and the mesh that is bound has "
                f"{dist.get_world_size(_state.tensor)}; give both the same size"
            )
        return None
    return _init_tp_groups_with_new_group(tensor_model_parallel_size, data_parallel_size)


def _init_tp_groups_with_new_group(
    tensor_model_parallel_size: int = 1, data_parallel_size: int | None = None
) -> tuple[Any, Any]:
    """Replace the groups that exist by those of :func:`_init_tp_mesh_device`."""
    world, size = dist.get_world_size(), tensor_model_parallel_size
    _ensure_divisibility(world, size)
    if data_parallel_size not in {None, world // size}:
        raise ContractError(
            f"data_parallel_size={data_parallel_size} x tensor_model_parallel_size={size} is not the world of {world} "
            "ranks; leave data_parallel_size out"
        )
    _state.data, _state.tensor = _create_model_parallel(size)
    _state.model = _state.tensor
    return _state.data, _state.model


def _create_model_parallel(model_parallel_size_: int) -> tuple[Any, Any]:
    """Create the groups of (data, model), model fastest; returns the data- and the model-parallel one."""
    _check_initialized()
    world = dist.get_world_size()
    size = min(model_parallel_size_, world)
    _ensure_divisibility(world, size)
    layout = Layout(data=world // size, model=size, world_size=world)
    return _create(layout.groups("data"), "data"), _create(layout.groups("model"), "model")


def _created(group: Any, what: str) -> Any:
    if group is None:
        raise ContractError(f"the {what} group is not initialized; call bind(mesh) first")
    return group


def get_tensor_model_parallel_group() -> Any:
    """Return this rank's tensor-parallel group."""
    return _created(_state.tensor, "tensor-parallel")


def get_model_parallel_group() -> Any:
    """Return this rank's model-parallel group: the tensor-parallel one."""
    return _created(_state.model, "model-parallel")


def get_data_parallel_group() -> Any:
    """Return the data-parallel group beside the tensor-parallel one."""
    return _created(_state.data, "data-parallel")


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Override the size of the tensor-parallel group."""
    _state.tensor_size = world_size


def get_tensor_model_parallel_world_size() -> int:
    """Return the size of the tensor-parallel group, or what it was set to."""
    if _state.tensor_size is not None:
        return _state.tensor_size
    return dist.get_world_size(get_tensor_model_parallel_group())


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Override this rank's position in the tensor-parallel group."""
    _state.tensor_rank = rank


def get_tensor_model_parallel_rank() -> int:
    """Return this rank's position in the tensor-parallel group, or what it was set to."""
    if _state.tensor_rank is not None:
        return _state.tensor_rank
    return dist.get_rank(get_tensor_model_parallel_group())


get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of this rank's block of tensor-parallel ranks."""
    size = get_tensor_model_parallel_world_size()
    return dist.get_rank() // size * size


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Return this rank's position in the data-parallel group."""
    return dist.get_rank(get_data_parallel_group())


# Experts.


def _unit_size(names: Sequence[str], unit: Any = None) -> int:
    """Return the size that a unit answers to the first of the names that it has; 1 without a unit."""
    return next((getattr(unit, name)() for name in names if hasattr(unit, name)), 1)


def _pipe_size(unit: Any) -> int:
    return _unit_size(("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), unit)


def _split(
    lanes: Iterable[Sequence[int]], size: int, *, data_first: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ``size`` experts in each lane of ranks, and those of the ranks with the same experts.

    Neighbors have different experts, or with ``data_first`` the same ones.
    """
    ep: list[list[int]] = []
    edp: list[list[int]] = []
    for ranks in lanes:
        width = len(ranks) // size if data_first else size
        rows = [list(ranks[i : i + width]) for i in range(0, len(ranks), width)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        ep += columns if data_first else rows
        edp += rows if data_first else columns
    return ep, edp


def _create_experts(size: int, ep: Sequence[Sequence[int]], edp: Sequence[Sequence[int]]) -> None:
    """Create the groups for an ``ep_size``, unless they exist."""
    name, rank = f"ep_size_{size}", dist.get_rank()
    for sets, label in ((edp, "edp"), (ep, "ep")):
        groups = getattr(_state, label)
        if name not in groups:
            groups[name] = _create(sets, label)
            getattr(_state, f"{label}_ranks")[name] = next(ranks for ranks in sets if rank in ranks)


def _create_expert_and_data_parallel(  # noqa: PLR0917  its contract
    expert_parallel_size_: int,
    mp_size: int | None = None,
    pp_size: int | None = None,
    mp_mode: str = "tp",
    use_data_before_expert_parallel_: bool = False,
    folding_spec: Any = None,
) -> None:
    """Create the groups of experts, and those of the ranks with the same experts, unless they exist.

    Within a stage neighbors have different experts, or with ``use_data_before_expert_parallel_`` the same ones. With
    ``mp_size`` above 1, and ``mp_mode`` "tp", ranks with the same shard of a layer come first.
    """
    _check_initialized()
    size, width = expert_parallel_size_, mp_size or 1
    stages = _stages(pp_size if pp_size is not None else _pipe_size(_state.mpu))
    _ensure_divisibility(len(stages[0]), size)
    if width > 1 and use_data_before_expert_parallel_:
        raise ContractRuntimeError(
            f"use_data_before_expert_parallel_ goes with mp_size=1 only, and mp_size is {mp_size}; leave one of them out"
        )
    if width > 1 and folding_spec is not None:
        _create_folded_experts(size, folding_spec)
        return
    if mp_mode == "tp":
        lanes = [[rank for lane in range(width) for rank in stage[lane::width]] for stage in stages]
    else:
        lanes = [list(stage) for stage in stages]
    _create_experts(size, *_split(lanes, size, data_first=use_data_before_expert_parallel_))


def _create_folded_experts(size: int, folding_spec: Any) -> None:
    """Create the groups that DeepSpeed's AutoEP specifies, as :func:`_create_expert_and_data_parallel` does."""
    folding = import_module("deepspeed.module_inject.auto_ep_folding")
    name = f"ep_size_{size}"
    if name in _state.ep:
        known = {"ep": [_state.ep_ranks[name]], "edp": [_state.edp_ranks[name]]}
        folding.assert_group_matches_spec(known, folding_spec)
        return
    tables = folding.expected_folding_group_tables(folding_spec)
    _create_experts(
        size, [list(each) for each in tables.ep_groups], [list(each) for each in tables.edp_groups]
    )


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of the groups of experts, and of those with the same ones, in a world with tensor parallelism."""
    pp, tp, size = pipeline_parallel_size_, tensor_parallel_size_, expert_parallel_size_
    _ensure_divisibility(world_size, tp * pp)
    _ensure_divisibility(world_size // (tp * pp), size)
    layout = Layout(pp=pp, dp=-1, tp=tp, world_size=world_size)
    lanes = [layout.where(pp=stage, tp=shard) for stage in range(pp) for shard in range(tp)]
    return _split(lanes, size, data_first=use_data_before_expert_parallel_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Create the groups of experts whose layers are sharded over the mpu's tensor axis."""
    _check_initialized()
    kinds = ("tensor_model", "slice", "model")
    tp = _state.etp_size = _unit_size([f"get_{kind}_parallel_world_size" for kind in kinds], mpu)
    world, size = dist.get_world_size(), expert_parallel_size_
    _ensure_divisibility(world, tp)
    _ensure_divisibility(_get_data_parallel_world_size(), size)
    sets = _get_expert_parallel_ranks(world, tp, size, _pipe_size(mpu), use_data_before_expert_parallel_)
    _create_experts(size, *sets)


def _get_max_expert_size() -> int | None:
    return max((int(name.rpartition("_")[2]) for name in _state.ep), default=None)


def _get_max_expert_size_name() -> str:
    return f"ep_size_{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _entry(known: dict[str, Any], group_name: str) -> Any:
    if group_name not in known:
        raise ContractError(
            f"the groups of experts {group_name!r} are not initialized, of {', '.join(known) or 'none'}; give the MoE "
            "layers to deepspeed.initialize, or bind a mesh with a view of ep and edp"
        )
    return known[group_name]


def _get_expert_parallel_group(group_name: str) -> Any:
    return _entry(_state.ep, group_name)


def _get_expert_parallel_group_ranks(group_name: str) -> Any:
    return _entry(_state.ep_ranks, group_name)


def _get_expert_data_parallel_group(group_name: str) -> Any:
    return _entry(_state.edp, group_name)


def _get_expert_data_parallel_group_ranks(group_name: str) -> Any:
    return _entry(_state.edp_ranks, group_name)


def _asking(ask: Callable[[Any], int], group: Callable[[str], Any]) -> Callable[[str], int]:
    """Make a getter of what ``ask`` returns for the group of experts ``group_name``."""
    return lambda group_name: ask(group(group_name))


_get_expert_parallel_world_size = _asking(dist.get_world_size, _get_expert_parallel_group)
_get_expert_parallel_rank = _asking(dist.get_rank, _get_expert_parallel_group)
_get_expert_data_parallel_world_size = _asking(dist.get_world_size, _get_expert_data_parallel_group)
_get_expert_data_parallel_rank = _asking(dist.get_rank, _get_expert_data_parallel_group)
_get_expert_broadcast_src_rank = _asking(
    lambda group: dist.get_global_rank(group, 0), _get_expert_data_parallel_group
)


def _get_expert_parallel_src_rank(group_name: str) -> int:
    size = _get_expert_parallel_world_size(group_name)
    return dist.get_rank() // size * size


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return _state.ep


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return _state.edp


def _get_expert_model_parallel_world_size() -> int:
    return _state.etp_size


# Data and sequence parallelism: from the mesh of mesh_param, from the mpu, or over the world.


def _clone_world_group() -> Any:
    """Return the default group, where the original creates another over the world."""
    _check_initialized()
    if _state.world is None:
        _state.world = _create([range(dist.get_world_size())], "world")
    return _state.world


def _axis_group(axis: str) -> Any:
    return _state.mesh_device.get_group(mesh_dim=axis)


def _mpu_has(name: str) -> bool:
    """Return whether there is an mpu with a method of this name."""
    return _state.mpu is not None and hasattr(_state.mpu, name)


def _get_data_parallel_group() -> Any:
    _check_initialized()
    if _state.mesh_device is not None:
        return _axis_group("data_parallel")
    if _state.mpu is None:
        return _clone_world_group()
    return None if _mpu_has("initialize_sequence_parallel") else _state.mpu.get_data_parallel_group()


def _get_data_parallel_group_ranks() -> Any:
    _check_initialized()
    return range(dist.get_world_size()) if _state.mpu is None else _state.mpu.get_data_parallel_group_ranks()


def _get_data_parallel_world_size() -> Any:
    _check_initialized()
    if _state.mesh_device is not None or _state.mpu is None:
        return dist.get_world_size(_get_data_parallel_group())
    return None if _mpu_has("initialize_sequence_parallel") else _state.mpu.get_data_parallel_world_size()


def _get_data_parallel_rank() -> int:
    _check_initialized()
    return dist.get_rank(_get_data_parallel_group())


def _get_broadcast_src_rank() -> int:
    _check_initialized()
    return dist.get_global_rank(_get_sequence_data_parallel_group(), 0)


def _get_model_parallel_world_size() -> Any:
    if _state.mpu is None or _mpu_has("initialize_sequence_parallel"):
        return 1
    return _state.mpu.get_model_parallel_world_size()


def _get_sequence_parallel_world_size() -> Any:
    _check_initialized()
    if _state.mesh_device is not None:
        return dist.get_world_size(_axis_group("sequence_parallel"))
    name = "get_sequence_parallel_world_size"
    return getattr(_state.mpu, name)() if _mpu_has(name) else 1


def _mpu_or(name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    """Make a getter of what the mpu answers to a name, or without such a method of what ``otherwise`` returns."""
    return lambda: getattr(_state.mpu, name)() if _mpu_has(name) else otherwise()


def _sequence_parallel_rank() -> int:
    return 0 if _state.mesh_device is None else dist.get_rank(_axis_group("sequence_parallel"))


def _sequence_parallel_group() -> Any:
    if _state.mesh_device is None:
        raise ContractKeyError(
            "there is no sequence-parallel group; bind a mesh with an axis 'sp', or give deepspeed.initialize mesh_param"
        )
    return _axis_group("sequence_parallel")


_get_sequence_parallel_rank = _mpu_or("get_sequence_parallel_rank", _sequence_parallel_rank)
_get_sequence_parallel_group = _mpu_or("get_sequence_parallel_group", _sequence_parallel_group)
_get_sequence_data_parallel_world_size = _mpu_or(
    "get_sequence_data_parallel_world_size", _get_data_parallel_world_size
)
_get_sequence_data_parallel_rank = _mpu_or("get_sequence_data_parallel_rank", _get_data_parallel_rank)
_get_sequence_data_parallel_group = _mpu_or("get_sequence_data_parallel_group", _get_data_parallel_group)


# ZeRO++.


def _create_zero_param_parallel_group(group_size: int) -> None:
    """Create the groups of neighbors that keep a second copy of the parameters (hpZ).

    Raises:
        ContractError: they exist.
    """
    _check_initialized()
    if _state.zero_param is not None:
        raise ContractError("the groups of hpZ exist already; they are created once for all models")
    world = dist.get_world_size()
    size = min(group_size, world)
    _ensure_divisibility(world, size)
    _state.zero_param = _create(Layout(outer=-1, inner=size, world_size=world).groups("inner"), "hpz")


def _get_zero_param_intra_parallel_group() -> Any:
    return _state.zero_param


def _zero_param_parallel_is_initialized() -> bool | None:
    """Return False without any such group; otherwise, as the original has it, None."""
    return False if _state.zero_param is None and _state.data is None else None


def _get_zero_param_intra_parallel_rank_in_mygroup() -> int:
    return dist.get_rank(_state.zero_param)


def _get_zero_param_intra_parallel_group_world_size() -> int:
    return dist.get_world_size(_state.zero_param)


def _get_zero_param_intra_parallel_group_ranks() -> list[int]:
    return [] if _state.zero_param is None else dist.get_process_group_ranks(_state.zero_param)


def _get_local_all_to_all_group() -> dict[str, Any]:
    """Return the groups of the ranks of a node, and of those with the same place in each, for quantized gradients.

    Of the groups that this rank is not in, torch's sign for that. A node has as many ranks as DeepSpeed's accelerator
    counts devices there, by which DeepSpeed then asks for the groups; without DeepSpeed, LOCAL_WORLD_SIZE.

    Raises:
        ContractError: the nodes are not equal.
    """
    _check_initialized()
    world = dist.get_world_size()
    accelerator = sys.modules.get("deepspeed.accelerator")
    devices = accelerator.get_accelerator().device_count() if accelerator else 0
    local = min(world, devices or int(os.environ.get("LOCAL_WORLD_SIZE") or world))
    _ensure_divisibility(world, local)
    layout = Layout(node=-1, local=local, world_size=world)
    for axis, name in (("local", "local"), ("node", "global")):
        if axis == "node" and layout["node"] == 1:
            continue
        sets = layout.groups(axis)
        mine = _create(sets, f"all_to_all_{name}")
        for i, ranks in enumerate(sets):
            member = dist.get_rank() in ranks
            _state.all_to_all[f"{name}_{i}"] = mine if member else dist.GroupMember.NON_GROUP_MEMBER
    return _state.all_to_all
