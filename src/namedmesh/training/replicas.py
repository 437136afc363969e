"""Weights and gradients that must be equal on several ranks, and the few calls in which the ranks compare them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch import from_all, held_unsharded, is_capturing, sharding_under_ddp
from namedmesh.axes import TOKEN_AXES
from namedmesh.errors import GradientError, TrainingError, listing
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh
from namedmesh.tensor_parallel.gradients import LAST_STEP, NOTHING, TOLERANCE, fingerprint

# The axes along which a parameter is replicated unless it is a DTensor or has attributes that say otherwise. The meaning of other
# names, which an adopted mesh may have, is not known.
_REPLICATING = (*TOKEN_AXES, "tp", "edp", "etp")

_CAUSES = (
    "The two commonest causes: the gradients are not averaged over this axis, because fully_shard was called on a mesh without "
    "it, or not at all (fully_shard(model, mesh=training.fsdp_mesh(mesh)) covers dp and cp); or the weights were never made "
    "equal (use one seed on every rank, or training.init_parameters). A plain tensor that is a shard needs the attribute "
    "tensor_model_parallel. If the ranks are meant to differ, pass check=False"
)

# The number of calls with each mesh. Every rank of a mesh makes the same calls, whatever parameters it has.
_calls: weakref.WeakKeyDictionary[NamedMesh, int] = weakref.WeakKeyDictionary()

Differences = dict[tuple[str, str, int], dict[int, tuple[tuple[int, ...], float]]]
"""By kind (weights or gradients), axis and pipeline stage: the position of each parameter, its shape, and the difference."""


def marked_axes(param: Tensor) -> list[str]:
    """Return the axes over which Megatron's and DeepSpeed's attributes shard a parameter."""
    expert = not getattr(param, "allreduce", True)
    axes = ["ep"] if expert else []
    if getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False):
        axes.append("etp" if expert else "tp")
    return axes


def sharding_of(param: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh and the placements of a DTensor, or of a local shard that DDP has in its place; None for other tensors."""
    if isinstance(param, DTensor):
        return param.device_mesh, param.placements
    return sharding_under_ddp(param)


def layout_key(param: Tensor) -> object:
    """Return a key that is equal for parameters that are sharded over the same ranks."""
    return sharding_of(param), *marked_axes(param)


def check_sharded(without_grad: dict[int, Tensor]) -> None:
    """Raise if FSDP2 holds parameters unsharded: the gradients belong to the sharded ones, which the model does not show then.

    Args:
        without_grad: the parameters that have no gradient, by position.
    """
    if torch.compiler.is_compiling() or not any(param.requires_grad for param in without_grad.values()):
        return
    held = {id(param) for param in held_unsharded()}
    hidden = {at: tuple(param.shape) for at, param in without_grad.items() if id(param) in held}
    if hidden:
        raise TrainingError(
            f"Parameters {_describe(hidden)} are unsharded by FSDP2, as after a forward without a backward. Their gradients belong "
            "to the sharded parameters, and an optimizer made from these trains nothing. Clip before the next forward, or first call "
            "reshard() on every FSDPModule of the model"
        )


def compare(params: Sequence[Tensor], mesh: NamedMesh) -> None:
    """Compare weights and gradients over each axis along which they must be equal, on calls 1, 2, 4 and so on.

    Collective: every rank of the mesh must call it.

    Raises:
        GradientError: on every rank of the mesh, with all differences.
    """
    # Compiled code and a CUDA graph cannot read values.
    if torch.compiler.is_compiling() or is_capturing():
        return
    call = _calls[mesh] = _calls.get(mesh, 0) + 1
    if call > LAST_STEP or call & (call - 1) or mesh.size() == 1 or dist.get_backend() == "fake":
        return
    found = _find_differences(params, mesh)
    for axis in mesh.layout:
        if mesh.size(axis) > 1:
            for of_rank in from_all(mesh.group(axis), found):
                _merge(found, of_rank)
    if found:
        raise GradientError(*_messages(found, mesh))


def _find_differences(params: Sequence[Tensor], mesh: NamedMesh) -> Differences:
    """Return the differences between the ranks along each axis, as this rank sees them."""
    # The ranks of the same pipeline stage, whatever the axes of a view span.
    stage = mesh.rank("pp") if "pp" in mesh.layout else 0
    stage_ranks = set(mesh.layout.where(pp=stage) if "pp" in mesh.layout else mesh.ranks())
    known: dict[object, dict[str, dist.ProcessGroup]] = {}
    compared: dict[tuple[str, dist.ProcessGroup], list[int]] = {}
    for position, param in enumerate(params):
        layout = layout_key(param)
        if layout not in known:
            known[layout] = _replica_groups(param, mesh, stage_ranks)
        for axis_and_group in known[layout].items():
            compared.setdefault(axis_and_group, []).append(position)
    prints = {}
    for position in {position for positions in compared.values() for position in positions}:
        param = params[position]
        prints[position] = [_numbers_of(param), _numbers_of(param.grad)]

    found: Differences = {}
    # By name: every rank goes through the axes in the same order, or ranks would wait for each other.
    for axis, group in sorted(compared, key=lambda axis_and_group: axis_and_group[0]):
        positions = compared[axis, group]
        most, least = _extremes([len(positions)], group, mesh.device)
        if most != least:
            continue  # a rank has parameters that others lack, such as the bias of a sharded layer
        highest, lowest = _extremes([prints[position] for position in positions], group, mesh.device)
        for index, kind in enumerate(("weights", "gradients")):
            differences = _differences([each[index] for each in highest], [each[index] for each in lowest])
            if differences:
                of_axis = found.setdefault((kind, axis, stage), {})
                for at, far in differences.items():
                    of_axis[positions[at]] = tuple(params[positions[at]].shape), far
                break  # different weights have different gradients
    return found


def _numbers_of(tensor: Tensor | None) -> list[float]:
    """Return the norm of a tensor, a weighted sum, and 1 if both are finite. A gradient that does not exist counts as zeros."""
    if tensor is None:
        return [0.0, 0.0, 1.0]
    norm, weighted = fingerprint(tensor)
    return [norm, weighted, 1.0] if math.isfinite(norm) and math.isfinite(weighted) else [0.0, 0.0, 0.0]


def _extremes(numbers: list[Any], group: dist.ProcessGroup, device: torch.device) -> tuple[Any, Any]:
    """Return the highest and the lowest value of each number over the ranks of a group, in one all-reduce.

    Its cost does not grow with the number of ranks, as that of a gather would.
    """
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    both = torch.stack([values, -values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0].tolist(), (-both[1]).tolist()


def _replica_groups(param: Tensor, mesh: NamedMesh, stage: set[int]) -> dict[str, dist.ProcessGroup]:
    """Return the groups, of ranks of the same stage, whose ranks must have the same of a parameter, by axis."""
    marked = marked_axes(param)
    candidates = [axis for axis in _layout_of(param, mesh) if axis in _REPLICATING and axis not in marked]
    found: dict[str, dist.ProcessGroup] = {}
    known: list[set[int]] = []
    everyone, shards, copies = _ranks_of(param)
    for axis in candidates:
        ranks = set(mesh.ranks(axis))
        # If the parameter's own mesh has the axis, all ranks along it must have a copy of the same shard there.
        is_replicated = len(ranks & shards) <= 1 and (len(ranks & everyone) <= 1 or ranks <= copies)
        if len(ranks) > 1 and ranks <= stage and is_replicated:
            found[axis] = mesh.group(axis)
            known.append(ranks)
    mesh_of_param, placements = sharding_of(param) or (mesh.device_mesh, ())
    names = mesh_of_param.mesh_dim_names or [f"dim {dim} of a mesh" for dim in range(mesh_of_param.ndim)]
    for dim, placement in enumerate(placements):
        group = mesh_of_param.get_group(dim)
        ranks = set(dist.get_process_group_ranks(group))
        if isinstance(placement, Replicate) and len(ranks) > 1 and ranks <= stage and ranks not in known:
            found[names[dim]] = group
    return found


def _layout_of(param: Tensor, mesh: NamedMesh) -> Layout | tuple[str, ...]:
    """Return the layout to which a parameter belongs: the mesh's own, or the view of experts and of a DTensor's axes."""
    names: set[str] = set()
    sharding = sharding_of(param)
    if sharding is not None:
        names = set(sharding[0].mesh_dim_names or ())
    elif "ep" in marked_axes(param):
        names = {"ep"}
    for layout in (mesh.layout, *mesh.views.values()):
        if names <= set(layout):
            return layout
    return () if "ep" in marked_axes(param) else mesh.layout


def _ranks_of(param: Tensor) -> tuple[set[int], set[int], set[int]]:
    """Return the ranks of a DTensor's mesh, those of them with the other shards, and those with copies of the same shard."""
    sharding = sharding_of(param)
    if sharding is None:
        return set(), set(), set()
    mesh, placements = sharding
    ranks = mesh.mesh
    of_shards: list[Any] = [*(mesh.get_coordinate() or ())]
    of_copies = list(of_shards)
    for dim, placement in enumerate(placements):
        chosen = of_copies if isinstance(placement, Replicate) else of_shards
        chosen[dim] = slice(None)
    chosen_ranks = (ranks, ranks[tuple(of_shards)], ranks[tuple(of_copies)])
    everyone, shards, copies = (set(each.flatten().tolist()) for each in chosen_ranks)
    return everyone, shards, copies


def _differences(highest: list[list[float]], lowest: list[list[float]]) -> dict[int, float]:
    """Return how far tensors are apart in relation to their norm, by position, if they differ by more than rounding."""
    largest = max(norm for norm, *_ in highest)
    found = {}
    for position, (high, low) in enumerate(zip(highest, lowest, strict=True)):
        norm, _, is_finite = high
        if low[2] != is_finite:
            # NaN or infinite on some of the ranks only. If it is on every rank, the norm says so.
            found[position] = math.inf
        far = max(high[0] - low[0], high[1] - low[1])
        if far > TOLERANCE * norm and far > NOTHING * largest:
            found.setdefault(position, far / norm)
    return found


def _merge(found: Differences, other: Differences) -> None:
    """Add the differences that another rank found: the larger one if both did."""
    for key, differences in other.items():
        mine = found.setdefault(key, {})
        for position, (shape, far) in differences.items():
            mine[position] = shape, max(far, mine.get(position, (shape, far))[1])


def _messages(found: Differences, mesh: NamedMesh) -> list[str]:
    """Return a message for each axis, the same on every rank."""
    messages = []
    for (kind, axis, stage), differences in sorted(found.items()):
        shapes = {position: shape for position, (shape, _) in sorted(differences.items())}
        far = max(far for _, far in differences.values())
        where = f" of stage {stage} of pp" if "pp" in mesh.layout and mesh.size("pp") > 1 else ""
        messages.append(
            f"The {kind} of parameters {_describe(shapes)}{where} differ between the ranks of {axis}, by up to {far:.2g} of the "
            f"norm. They must be equal there. {_CAUSES}"
        )
    return messages


def _describe(shapes: dict[int, tuple[int, ...]]) -> str:
    """Return parameters by their position among those that were given, and their shape."""
    return listing(f"{position} {shape}" for position, shape in shapes.items())
