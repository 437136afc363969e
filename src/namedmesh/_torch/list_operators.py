"""Operators over lists of tensors, for lists that mix DTensors and plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

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


def _run_without_handler(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator through DTensor, without the handler that namedmesh has registered."""
    from torch.distributed.tensor import DTensor

    # DTensor looks for a handler in C++, before anything else. It cannot be asked to ignore one.
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def _run_list_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator over lists of tensors.

    One call takes all local tensors. The DTensors for which local tensors are not enough need one
    call for each mesh.
    """
    length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    lists = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == length]
    # An operator that writes into its tensors does so element by element: no norm and no matrix
    # product is among them.
    in_place = operator._schema.is_mutable
    positions_by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for position, tensors in enumerate(zip(*lists, strict=True)):
        mesh = _find_mesh_to_run_on(tensors, in_place)
        positions_by_mesh.setdefault(mesh, []).append(position)
    args = [arg.full_tensor() if hasattr(arg, "full_tensor") else arg for arg in args]
    results: list[Any] = [None] * length
    returned: Any = None
    for mesh, positions in positions_by_mesh.items():
        mesh_args = []
        for arg in args:
            if isinstance(arg, list | tuple) and len(arg) == length:
                selected = [arg[position] for position in positions]
                if mesh is None:
                    selected = list(map(_to_local, selected))
                mesh_args.append(selected)
            else:
                mesh_args.append(arg)
        returned = _run_without_handler(operator, mesh_args, kwargs)
        # An operator that works in place returns nothing.
        for position, result in zip(positions, returned or (), strict=False):
            results[position] = result
    return results if returned else None


def _find_mesh_to_run_on(tensors: Sequence[Any], in_place: bool) -> DeviceMesh | None:
    """Return the mesh on which DTensor must run one position; None for local tensors."""
    dtensors = [tensor for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not dtensors:
        return None
    mesh: DeviceMesh = dtensors[0].device_mesh
    placements = dtensors[0].placements
    equal = all(tensor.placements == placements for tensor in dtensors)
    if not in_place or not equal or any(placement.is_partial() for placement in placements):
        return mesh
    if not all(placement.is_replicate() for placement in placements):
        # A plain tensor, such as a full average of a sharded parameter, would be combined with a
        # shard, and shapes may broadcast. DTensor rejects it. Numbers, such as steps, are right.
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and not hasattr(tensor, "device_mesh"):
                return mesh
    return None


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


def _stack_norms(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
        return _run_without_handler(operator, args, kwargs)
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
