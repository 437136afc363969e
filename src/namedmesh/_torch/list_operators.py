"""Operators over lists of tensors, for lists that mix DTensors and plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from namedmesh._torch.tensors import run_functional_collective, wait_if_async


@cache
def accept_mixed_lists() -> None:
    """Let operators over lists of tensors take plain tensors and DTensors in one list.

    ``torch.optim`` (foreach and fused), ``torch.nn.utils.clip_grad_norm_``,
    ``torch.amp.GradScaler`` and ``torch.optim.swa_utils`` pass all parameters of a model in one
    list. DTensor rejects a list that mixes both, or DTensors of several meshes, although these
    operators treat every position independently. Plain tensors stay plain, and so does the state of
    optimizers.
    """
    from torch.distributed.tensor import DTensor

    aten = torch.ops.aten
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.partition(".")
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            operator = getattr(getattr(aten, name.removeprefix("aten::")), overload or "default")
            if any(str(argument.type) == "List[Tensor]" for argument in operator._schema.arguments):
                handlers[operator] = _run_list_operator
    handlers[aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale_gradients
    handlers[aten.stack.default] = _stack_norms


# A list operator is named after the operator for one tensor, with two exceptions.
_NAMES_FOR_ONE = {"norm": "linalg_vector_norm", "powsum": "linalg__powsum"}
# The result of these has another shape than their input.
_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_powsum", "aten::_foreach_max")


def _run_list_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator over lists of tensors.

    One call takes the local tensors of all positions for which these are enough. The operator for
    one tensor takes the others, as DTensors. DTensor finds this handler in a table of the process,
    so the list operator itself must not be called with a DTensor.
    """
    from torch.distributed.tensor import DTensor

    # A single tensor next to the lists, such as a coefficient, belongs to every position.
    args = [arg.full_tensor() if isinstance(arg, DTensor) else arg for arg in args]
    length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    lists = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == length]
    is_elementwise = operator._schema.name not in _REDUCTIONS
    local_positions = _find_local_positions(lists, is_elementwise, DTensor)
    results: list[Any] = [None] * length
    for position in set(range(length)).difference(local_positions):
        results[position] = _run_for_one(operator, _select(args, [position], length), kwargs)
    if local_positions:
        local_args = args if len(local_positions) == length else _select(args, local_positions, length)
        local_args = [
            list(map(_to_local, arg)) if isinstance(arg, list | tuple) else arg for arg in local_args
        ]
        local_results = operator(*local_args, **kwargs) or ()  # None if it works in place
        for position, result in zip(local_positions, local_results, strict=False):
            results[position] = _wrap_like([values[position] for values in lists], result)
    return None if operator._schema.is_mutable else results


def _find_local_positions(lists: Sequence[Sequence[Any]], is_elementwise: bool, dtensor: type) -> list[int]:
    """Return the positions at which an operator on local tensors gives the local results.

    Args:
        lists: for each position the plain tensors, DTensors and numbers.
        is_elementwise: whether the operator works element by element.
        dtensor: torch's class.
    """
    positions = []
    last_placements: Any = None
    is_replicated = is_partial = False
    for position, values in enumerate(zip(*lists, strict=True)):
        placements, has_plain_tensor, are_equal = _find_placements(values, dtensor)
        if placements is None:
            positions.append(position)
            continue
        if placements != last_placements:
            last_placements = placements
            is_replicated = all(placement.is_replicate() for placement in placements)
            is_partial = any(placement.is_partial() for placement in placements)
        # A plain tensor, such as a full average of a sharded parameter, would be combined with a
        # shard, and shapes may broadcast. DTensor rejects it. Numbers, such as steps, are right.
        is_combined = has_plain_tensor and not is_replicated
        if is_elementwise and are_equal and not is_partial and not is_combined:
            positions.append(position)
    return positions


def _find_placements(values: Sequence[Any], dtensor: type) -> tuple[Any, bool, bool]:
    """Return the placements of the DTensors of one position, and its other tensors.

    An optimizer calls this for each parameter in each of its list operators.

    Args:
        values: plain tensors, DTensors and numbers.
        dtensor: torch's class.

    Returns:
        The placements of the first DTensor, or None; whether there is a plain tensor with dims; and
        whether all DTensors have the same placements.
    """
    placements: Any = None
    has_plain_tensor = False
    are_equal = True
    for value in values:
        if isinstance(value, dtensor):
            other = value._spec.placements  # type: ignore[attr-defined]
            if placements is None:
                placements = other
            elif other is not placements and other != placements:
                are_equal = False
        elif isinstance(value, torch.Tensor) and value.dim() > 0:
            has_plain_tensor = True
    return placements, has_plain_tensor, are_equal


def _select(args: Sequence[Any], positions: Sequence[int], length: int) -> list[Any]:
    """Return arguments with the values of some positions only.

    Args:
        args: the arguments. Those that are no lists of this length belong to every position.
        positions: the positions.
        length: the number of positions.
    """
    selected = []
    for arg in args:
        if isinstance(arg, list | tuple) and len(arg) == length:
            selected.append([arg[position] for position in positions])
        else:
            selected.append(arg)
    return selected


def _run_for_one(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the operator for one tensor in place of a list operator, through DTensor.

    Args:
        operator: the list operator.
        args: its arguments, with lists of one value.
        kwargs: its keyword arguments.
    """
    name = operator._schema.name.removeprefix("aten::_foreach_")
    values = [arg[0] if isinstance(arg, list) else arg for arg in args]
    named = dict(kwargs)
    if name.startswith("addc") and len(values) > 3:  # noqa: PLR2004  the coefficient of addcdiv and addcmul
        named["value"] = values.pop()
    if "dtype" in {argument.name for argument in operator._schema.arguments}:
        named.setdefault("dtype", values.pop() if len(values) > 2 else None)  # noqa: PLR2004  tensor, order, dtype
    return getattr(torch.ops.aten, _NAMES_FOR_ONE.get(name, name))(*values, **named)


def _wrap_like(values: Sequence[Any], result: torch.Tensor) -> Any:
    """Return a result as a DTensor, if one of the values of its position is one."""
    from torch.distributed.tensor import DTensor

    for value in values:
        if isinstance(value, DTensor):
            # The public from_local passes through autograd and infers the shape again.
            return DTensor.__new__(DTensor, result, value._spec, requires_grad=False)
    return result


def _to_local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and anything else as it is."""
    return wait_if_async(tensor._local_tensor) if hasattr(tensor, "device_mesh") else tensor


def _unscale_gradients(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients, and all-reduce over each mesh whether one is not finite.

    torch uses the mesh and the placements of the first gradient for all gradients. Tensor-parallel
    ranks would then disagree on whether to skip the step.
    """
    grads, found_inf, *rest = args
    operator(list(map(_to_local, grads)), found_inf, *rest, **kwargs)
    meshes = {grad.device_mesh for grad in grads if hasattr(grad, "device_mesh")}
    # The order must be the same on every rank, and gradients cannot give it: experts without tokens
    # have none.
    for mesh in sorted(meshes, key=lambda mesh: mesh.mesh_dim_names or ()):
        for group in mesh.get_all_groups():
            found_inf.copy_(run_functional_collective("all_reduce", found_inf, "max", group.group_name))


def _stack_norms(_operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Stack scalars, such as norms of gradients, that are plain or DTensors of several meshes.

    The result is a plain tensor. As everywhere in DTensor, a plain scalar counts as replicated.
    """
    tensors = args[0]
    positions_by_kind: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        kind = None
        if hasattr(tensor, "device_mesh"):
            kind = (tensor.device_mesh, tensor.placements)
        positions_by_kind.setdefault(kind, []).append(position)
    meshes = {kind and kind[0] for kind in positions_by_kind}
    if len(meshes) == 1 or any(tensor.ndim for tensor in tensors):
        # The handler must not call the operator with DTensors again: concatenate them instead.
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)
    values = list(map(_to_local, tensors))
    for kind, positions in positions_by_kind.items():
        if kind is None:
            continue
        # One collective serves all scalars with the same mesh and placements.
        local = torch.stack([values[position] for position in positions])
        dtensor = type(tensors[positions[0]])
        full = dtensor.from_local(local, *kind, run_check=False).full_tensor()
        for position, value in zip(positions, full.unbind(), strict=True):
            values[position] = value
    return torch.stack(values)
