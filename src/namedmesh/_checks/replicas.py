"""Comparison of the weights and gradients that must be equal on several ranks of a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh._checks import fingerprints, models
from namedmesh._checks.fingerprints import Entry
from namedmesh._checks.replication import find_replicated_axes, group_by_layout
from namedmesh._torch import disable_dispatch_modes, is_capturing
from namedmesh.errors import format_items
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import to_local

_CAUSES = (
    "They must be equal there. The two commonest causes: the gradients are not averaged over "
    "this axis, because fully_shard was called on a mesh without it, or not at all "
    "(fully_shard(model, mesh=training.fsdp_mesh(mesh)) covers dp and cp); or the weights were "
    "never made equal (use one seed on every rank, or training.init_parameters). A plain tensor "
    "that is a shard needs the attribute tensor_model_parallel"
)

_CAUSES_OF_TIES = (
    "Call the function that tie_stages returned after the last backward of each step, before "
    "clipping, and tie after the weights have their first values"
)
_OPT_OUT = ". If the ranks are meant to differ, pass check=False"

# The number of calls with each mesh. A count for each set of parameters would differ between
# pipeline stages, and then only some of the ranks would communicate.
_calls: weakref.WeakKeyDictionary[NamedMesh, int] = weakref.WeakKeyDictionary()


def compare_replicas(params: Sequence[Tensor], mesh: NamedMesh, ties: Mapping[int, str]) -> None:
    """Compare replicated weights and gradients over each axis of a mesh.

    It returns at once on calls that are not due: others than 1, 2, 4 and so on up to 1024. It compares the models of the parameters first, whose messages have names.

    Collective: every rank of the mesh must call it.

    Args:
        params: the parameters, in the same order on every rank.
        mesh: the mesh.
        ties: the parameters that are tied over ``pp``, by position: a name that is equal for both
            ends.

    Raises:
        GradientError: on every rank of the mesh, with the differences of all axes and stages.
    """
    # Compiled code and a CUDA graph cannot read values.
    if torch.compiler.is_compiling() or is_capturing() or dist.get_backend() == "fake":
        return
    call = _calls[mesh] = _calls.get(mesh, 0) + 1
    if fingerprints.is_due(call):
        models.compare_before_clipping(params)
        _compare(params, mesh, ties, ("weights", "gradients"))


def compare_weights(params: Sequence[Tensor], mesh: NamedMesh) -> None:
    """Compare replicated weights over each axis of a mesh, in every call.

    Collective: every rank of the mesh must call it.

    Args:
        params: the parameters, in the same order on every rank.
        mesh: the mesh.

    Raises:
        GradientError: on every rank of the mesh: weights differ.
    """
    if dist.get_backend() != "fake":
        _compare(params, mesh, {}, ("weights",))


@disable_dispatch_modes
@torch.no_grad()
def _compare(
    params: Sequence[Tensor], mesh: NamedMesh, ties: Mapping[int, str], kinds: Sequence[str]
) -> None:
    """Compare replicated and tied parameters, and raise the differences on every rank."""
    by_position = dict(enumerate(params))
    positions_by_axis: dict[str, list[int]] = {}
    for positions in group_by_layout(by_position).values():
        for axis in find_replicated_axes(params[positions[0]], mesh):
            positions_by_axis.setdefault(axis, []).extend(positions)
    names_by_axis: dict[str, dict[int, str]] = {}
    for axis, positions in positions_by_axis.items():
        # A rank may have more parameters than others, such as the bias of a sharded layer.
        # Positions mean nothing then, and the count gives the parameters other names.
        names_by_axis[axis] = {position: f"{position} of {len(positions)}" for position in sorted(positions)}
    if ties or ("pp" in mesh.layout and mesh.size("pp") > 1):
        names_by_axis["pp"] = dict(ties)
    problems = []
    # In one order on every rank, or ranks would wait for each other.
    for axis in sorted(names_by_axis):
        problems += _compare_over_axis(params, names_by_axis[axis], axis, mesh, kinds)
    models.raise_on_all_ranks(problems, [mesh.group(axis) for axis in mesh.layout], mesh.device)


def _compare_over_axis(
    params: Sequence[Tensor], names: Mapping[int, str], axis: str, mesh: NamedMesh, kinds: Sequence[str]
) -> list[str]:
    """Return the message about parameters that differ along an axis (empty if none does).

    Collective: every rank along the axis must call it.

    Args:
        params: the parameters.
        names: the names of those to compare, by position.
        axis: the axis. Over ``pp`` the two ends of a tie are compared.
        mesh: the mesh.
        kinds: ``"weights"``, or weights and ``"gradients"``.
    """
    computing_dtypes = models.list_computing_dtypes()
    entries = []
    for position, name in names.items():
        param = params[position]
        tolerance = models.find_gradient_tolerance(param.dtype, computing_dtypes)
        numel = to_local(param).numel()
        if fingerprints.is_comparable(param) and fingerprints.is_comparable(param.grad):
            entries.append(Entry("weights", name, param, numel, fingerprints.LENIENT))
            if "gradients" in kinds:
                entries.append(Entry("gradients", name, param.grad, numel, tolerance))
    differences = fingerprints.find_differences(entries, mesh.group(axis), mesh.device)
    # Different weights have different gradients, so the weights come first.
    for kind in kinds:
        different = [position for position, name in names.items() if (kind, name) in differences]
        if different:
            described = format_params((position, params[position]) for position in different)
            stage = f" of stage {mesh.rank('pp')}" if "pp" in mesh.layout else ""
            where, causes = f"between the ranks of {axis}", _CAUSES
            if axis == "pp":
                where, causes = "from the other end of their tie", _CAUSES_OF_TIES
            if "gradients" in kinds:
                causes += _OPT_OUT
            return [f"The {kind} of parameters {described}{stage} differ {where}. {causes}"]
    return []


def format_params(params: Iterable[tuple[int, Tensor]]) -> str:
    """Format parameters for a message: the position in the caller's arguments, and the shape.

    Args:
        params: the parameters and their positions.
    """
    return format_items(f"{position} {tuple(param.shape)}" for position, param in params)
