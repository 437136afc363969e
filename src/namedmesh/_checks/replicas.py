"""Comparison of the weights and gradients that must be equal on several ranks of a mesh."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from namedmesh._checks import models
from namedmesh._checks.fingerprints import (
    LENIENT,
    Comparison,
    Differences,
    Entry,
    Problem,
    find_tolerance,
    is_comparable,
    is_due,
)
from namedmesh._errors import format_items
from namedmesh._sharding import find_replicated_axes, group_by_layout, to_local
from namedmesh._torch.execution import is_capturing
from namedmesh.mesh.mesh import NamedMesh

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

    It returns at once on calls that are not due: others than 1, 2, 4 and so on up to 1024. It also
    compares the models of the parameters. Their messages have names, and take precedence.

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
    if is_due(call):
        comparisons = _list_comparisons(params, mesh, ties, ("weights", "gradients"))
        models.compare_models({id(param) for param in params}, comparisons)


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
        models.compare_models(set(), _list_comparisons(params, mesh, {}, ("weights",)))


def _list_comparisons(
    params: Sequence[Tensor], mesh: NamedMesh, ties: Mapping[int, str], kinds: Sequence[str]
) -> list[Comparison]:
    """Return a comparison over each axis of the mesh, in the same order on every rank.

    Args:
        params: the parameters.
        mesh: the mesh.
        ties: the names of the parameters that are tied over ``pp``, by position.
        kinds: ``"weights"``, or weights and ``"gradients"``.
    """
    positions_by_axis: dict[str, list[int]] = defaultdict(list)
    for positions in group_by_layout(dict(enumerate(params))).values():
        for axis in find_replicated_axes(params[positions[0]], mesh):
            positions_by_axis[axis].extend(positions)
    # The axes of views, such as the view of experts, come last. The order is the same on every rank.
    comparisons = []
    for axis in dict.fromkeys([*mesh.layout, *sorted(positions_by_axis)]):
        # A rank may have more parameters than others, such as the bias of a sharded layer.
        # Positions mean nothing then, and the count gives the parameters other names.
        positions = sorted(positions_by_axis[axis])
        names = {position: f"{position} of {len(positions)}" for position in positions}
        if axis == "pp":
            names = dict(ties)  # The two ends of a tie are compared.
        comparisons.append(_compare_over_axis(params, names, axis, mesh, kinds))
    return comparisons


def _compare_over_axis(
    params: Sequence[Tensor], names: Mapping[int, str], axis: str, mesh: NamedMesh, kinds: Sequence[str]
) -> Comparison:
    """Return the comparison of some parameters over an axis.

    Args:
        params: the parameters.
        names: the names of those to compare, by position.
        axis: the axis.
        mesh: the mesh.
        kinds: ``"weights"``, or weights and ``"gradients"``.
    """
    computing_dtypes = models.list_computing_dtypes()
    entries = []
    for position, name in names.items():
        param = params[position]
        numel = to_local(param).numel()
        tolerance = find_tolerance(param.dtype, *computing_dtypes)
        if is_comparable(param) and is_comparable(param.grad):
            entries.append(Entry("weights", name, param, numel, LENIENT))
            if "gradients" in kinds:
                entries.append(Entry("gradients", name, param.grad, numel, tolerance))
    where, causes = f"between the ranks of {axis}", _CAUSES
    if axis == "pp":
        where, causes = "from the other end of their tie", _CAUSES_OF_TIES
    if "gradients" in kinds:
        causes += _OPT_OUT

    def describe(differences: Differences) -> list[Problem]:
        """Return a problem for each kind of tensor that differs."""
        problems = []
        # The messages of models name parameters, and different weights have different gradients.
        for priority, kind in enumerate(kinds, models.NUM_PRIORITIES):
            different = [position for position, name in names.items() if (kind, name) in differences]
            if different:
                described = format_params((position, params[position]) for position in different)
                stage = f" of stage {mesh.rank('pp')}" if "pp" in mesh.layout else ""
                message = f"The {kind} of parameters {described}{stage} differ {where}. {causes}"
                problems.append((priority, message))
        return problems

    return Comparison(entries, mesh.group(axis), mesh.device, describe)


def format_params(params: Iterable[tuple[int, Tensor]]) -> str:
    """Format parameters for a message: the position in the caller's arguments, and the shape.

    Args:
        params: the parameters and their positions.
    """
    return format_items(f"{position} {tuple(param.shape)}" for position, param in params)
