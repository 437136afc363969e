"""Compare the weights and gradients that must be equal on several ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate

from namedmesh._torch import (
    all_gather_object,
    find_sharding_under_ddp,
    is_capturing,
    iter_params_hidden_by_ddp,
    iter_unsharded_parameters,
)
from namedmesh.axes import EXPERT_AXES, TOKEN_AXES
from namedmesh.errors import GradientError, TrainingError, format_items
from namedmesh.fingerprints import fingerprint
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import find_attribute_axes, find_placements
from namedmesh.tensor_parallel.gradients import (
    LAST_STEP,
    RELATIVE_TOLERANCE,
    ZERO_GRAD_THRESHOLD,
    list_checked_models,
)
from namedmesh.training.tying import get_tie

_CAUSES = (
    "They must be equal there. The two commonest causes: the gradients are not averaged over this "
    "axis, because fully_shard was called on a mesh without it, or not at all (fully_shard(model, "
    "mesh=training.fsdp_mesh(mesh)) covers dp and cp); or the weights were never made equal (use "
    "one seed on every rank, or training.init_parameters). A plain tensor that is a shard needs the "
    "attribute tensor_model_parallel. If the ranks are meant to differ, pass check=False"
)

_CAUSES_OF_TIES = (
    "Call the function that tie_stages returned after the last backward of each step, before "
    "clipping, and tie after the weights have their first values. If the ends are meant to differ, "
    "pass check=False"
)

# The number of calls with each mesh. A count for each set of parameters would differ between
# pipeline stages, and then only some of the ranks would communicate.
_calls: weakref.WeakKeyDictionary[NamedMesh, int] = weakref.WeakKeyDictionary()


def make_layout_key(param: Tensor) -> object:
    """Return a dict key that is equal for parameters that are sharded in the same way.

    Args:
        param: a DTensor, keyed by its placements, or a plain tensor, keyed by Megatron-LM's
            attributes.
    """
    return find_placements(param), *find_attribute_axes(param)


def check_not_unsharded(without_grad: dict[int, Tensor]) -> None:
    """Check that these are not FSDP2's unsharded parameters, which get no gradients.

    ``model.parameters()`` returns them between a forward and its backward. The gradients belong to
    the sharded parameters. Does not communicate.

    Args:
        without_grad: the caller's parameters without a gradient, by position in its arguments.

    Raises:
        TrainingError: some of these parameters are unsharded.
    """
    is_trained = any(param.requires_grad for param in without_grad.values())
    if torch.compiler.is_compiling() or not is_trained:
        return
    unsharded = {id(param) for param in iter_unsharded_parameters()}
    hidden = {at: param for at, param in without_grad.items() if id(param) in unsharded}
    if hidden:
        raise TrainingError(
            f"Parameters {_format_params(hidden.items())} are unsharded by FSDP2, as after a forward "
            "without a backward. Their gradients belong to the sharded parameters, and an "
            "optimizer made from these trains nothing. Clip before the next forward, or first "
            "call reshard() on every FSDPModule of the model"
        )


def _check_not_removed_by_ddp(params: Sequence[Tensor]) -> None:
    """Raise TrainingError if DDP over tensor parallelism has removed parameters.

    Does not communicate.
    """
    ids = {id(param) for param in params}
    if any(find_sharding_under_ddp(param) for param in params):
        return  # the caller has kept the local shards from before the first forward
    for model in list_checked_models():
        hidden = list(iter_params_hidden_by_ddp(model))
        # Only a model that has some of these parameters concerns this call.
        is_of_call = not ids or ids.intersection(id(param) for param in model.parameters())
        if hidden and is_of_call:
            raise TrainingError(
                f"{len(hidden)} sharded parameters are missing: the first forward of "
                "DistributedDataParallel over tensor parallelism took them out of the model. Keep "
                "params = list(model.parameters()) from before the first forward, for the "
                "optimizer and for clipping, or use fully_shard"
            )


def check_replicas_equal(params: Sequence[Tensor], mesh: NamedMesh) -> None:
    """Check that replicated weights and gradients are equal on all ranks of each axis.

    The two ends of a weight that :func:`tie_stages` tied are compared, too. It compares on calls
    1, 2, 4 and so on up to 1024 with a mesh, and returns at once otherwise.

    Collective: every rank of the mesh must call it. Calls that compare run a few small all-reduces
    for each axis, one all-gather of the ties, and one of the messages.

    Args:
        params: the parameters, in the same order on every rank.
        mesh: the mesh.

    Raises:
        GradientError: on every rank of the mesh, with the differences of all axes and stages.
        TrainingError: DDP over tensor parallelism has taken parameters out of the model.
    """
    # Compiled code and a CUDA graph cannot read values.
    if torch.compiler.is_compiling() or is_capturing():
        return
    call = _calls[mesh] = _calls.get(mesh, 0) + 1
    if call > LAST_STEP or call & (call - 1) or dist.get_backend() == "fake":
        return
    _check_not_removed_by_ddp(params)
    problems = set(_find_differences(params, mesh))
    if "pp" in mesh.layout:
        problems.update(_find_unequal_ties(params, mesh))
    # Every rank raises, whichever stage or shard the ranks that differ have.
    for axis in mesh.layout:
        if mesh.size(axis) > 1:
            problems.update(*all_gather_object(mesh.group(axis), problems))
    if problems:
        raise GradientError(*sorted(problems))


def _find_differences(params: Sequence[Tensor], mesh: NamedMesh) -> list[str]:
    """Return a message for each axis of this rank along which weights or gradients differ.

    Collective: every rank of the mesh must call it. The ranks of a group get the same messages.
    """
    known: dict[object, list[str]] = {}
    compared: dict[str, list[int]] = {}
    for position, param in enumerate(params):
        layout = make_layout_key(param)
        if layout not in known:
            known[layout] = _find_replicated_axes(param, mesh)
        for axis in known[layout]:
            compared.setdefault(axis, []).append(position)
    problems = []
    # In one order on every rank, or ranks would wait for each other.
    for axis in sorted(compared):
        positions, group = compared[axis], mesh.group(axis)
        most, least = _all_reduce_extremes([len(positions)], group, mesh.device)
        if most != least:
            continue  # a rank has more parameters than others, such as the bias of a sharded layer
        # Different weights have different gradients, so the weights come first.
        for kind in ("weights", "gradients"):
            chosen = [params[at] if kind == "weights" else params[at].grad for at in positions]
            numbers = [_summarize(tensor) for tensor in chosen]
            extremes = _all_reduce_extremes(numbers, group, mesh.device)
            different = _find_unequal_tensors(*extremes)
            if different:
                described = _format_params((positions[at], params[positions[at]]) for at in different)
                stage = f" of stage {mesh.rank('pp')}" if "pp" in mesh.layout else ""
                where = f"{described}{stage} differ between the ranks of {axis}"
                problems.append(f"The {kind} of parameters {where}. {_CAUSES}")
                break
    return problems


def _find_unequal_ties(params: Sequence[Tensor], mesh: NamedMesh) -> list[str]:
    """Return a message for each tie whose ends have different weights or gradients.

    Collective: every rank of ``pp`` must call it. All get the same messages.
    """
    here: dict[tuple[str, str], tuple[list[float], list[float], str]] = {}
    for position, param in enumerate(params):
        tie = get_tie(param)
        if tie is not None:
            described = _format_params([(position, param)])
            here[tie] = _summarize(param), _summarize(param.grad), described
    ends: dict[tuple[str, str], tuple[list[float], list[float], str]] = {}
    for ends_of_rank in all_gather_object(mesh.group("pp"), here):
        ends.update(ends_of_rank)
    problems = []
    for (number, end), first in sorted(ends.items()):
        last = ends.get((number, "last"))
        if end != "first" or last is None:
            continue  # this call has parameters of one of the two stages only
        for index, kind in enumerate(("weights", "gradients")):
            values = torch.tensor([first[index], last[index]], dtype=torch.float64, device="cpu")
            if _find_unequal_tensors([values.amax(0).tolist()], [values.amin(0).tolist()]):
                problems.append(
                    f"The {kind} of parameters {first[2]} of the first stage and {last[2]} of the last "
                    f"differ, but are tied. {_CAUSES_OF_TIES}"
                )
                break
    return problems


def _find_replicated_axes(param: Tensor, mesh: NamedMesh) -> list[str]:
    """Return the axes along which other ranks must have the same values of a parameter."""
    own_mesh, placements = find_placements(param) or (mesh.device_mesh, ())
    names = (own_mesh.mesh_dim_names or ())[: len(placements)]
    attribute_axes = find_attribute_axes(param)
    is_expert = "ep" in attribute_axes or any(name in EXPERT_AXES for name in names)
    # The meaning of other axes is not known, except in a DTensor that is replicated over them.
    axes = ["edp", "etp"] if is_expert else [*TOKEN_AXES, "tp"]
    for name, placement in zip(names, placements, strict=False):
        if isinstance(placement, Replicate) and name not in axes:
            axes.append(name)
    # The ranks of the parameter's own mesh, and the ranks that have replicas of this shard. A plain
    # tensor has none, and is replicated along every axis that its attributes do not name.
    own_ranks: set[int] = set()
    replicas: set[int] = set()
    if placements:
        ranks = own_mesh.mesh
        index: list[Any] = [*(own_mesh.get_coordinate() or ())]
        for dim, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                index[dim] = slice(None)
        own_ranks.update(ranks.flatten().tolist())
        replicas.update(ranks[tuple(index)].flatten().tolist())
    axes = [axis for axis in axes if axis in mesh and axis not in attribute_axes and mesh.size(axis) > 1]
    return [axis for axis in axes if own_ranks.intersection(mesh.ranks(axis)) <= replicas]


def _summarize(tensor: Tensor | None) -> list[float]:
    """Return norm and weighted sum of a tensor, and 1 if both are finite; 0, 0, 1 for None."""
    if tensor is None:
        return [0.0, 0.0, 1.0]
    norm, weighted = fingerprint(tensor)
    is_finite = math.isfinite(norm) and math.isfinite(weighted)
    return [norm, weighted, 1.0] if is_finite else [0.0, 0.0, 0.0]


def _all_reduce_extremes(
    numbers: list[Any], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[Any], list[Any]]:
    """Return the highest and the lowest value of each number over the ranks of a group.

    Collective: one all-reduce (MAX), whose cost does not grow with the number of ranks.
    """
    values = torch.tensor(numbers, dtype=torch.float64, device=device)
    both = torch.stack([values, -values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)
    return both[0].tolist(), (-both[1]).tolist()


def _find_unequal_tensors(highest: list[list[float]], lowest: list[list[float]]) -> list[int]:
    """Return the positions of tensors that differ between ranks by more than rounding.

    Args:
        highest: for each tensor, the highest value over the ranks of each number of its summary.
        lowest: the lowest values.
    """
    largest = max(norm for norm, *_ in highest)
    different = []
    for position, (high, low) in enumerate(zip(highest, lowest, strict=True)):
        far = max(high[0] - low[0], high[1] - low[1])
        # If it is finite on no rank, the ranks agree: the norm for clipping is not finite either.
        is_far = far > RELATIVE_TOLERANCE * high[0] and far > ZERO_GRAD_THRESHOLD * largest
        if high[2] != low[2] or is_far:
            different.append(position)
    return different


def _format_params(params: Iterable[tuple[int, Tensor]]) -> str:
    """Format parameters for a message: the position in the caller's arguments, and the shape."""
    return format_items(f"{position} {tuple(param.shape)}" for position, param in params)
