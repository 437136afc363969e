"""Weights that the first and the last pipeline stage share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from namedmesh._errors import ShapeError
from namedmesh._sharding import is_copy_of_stage, set_copy_of_stage, to_local
from namedmesh._torch.groups import all_gather_object
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh

# Every rank of a pipeline ties in the same order, so the numbers are equal on all ranks.
_numbers = count()

# The tie of each parameter by its id, as long as the function that sums its gradients exists, which
# keeps the parameter alive. The attribute is not enough: ``module.to(dtype)`` keeps the object of a
# DTensor parameter, but replaces all its attributes. A weak reference would not do either,
# because torch does not convert a parameter that has one.
_ties: dict[int, tuple[str, str]] = {}


def get_tie(parameter: Tensor) -> tuple[str, str] | None:
    """Return the identifier of a parameter's tie, and its end of the tie.

    Copies of the parameter (``copy.deepcopy``, ``pickle``) have the same tie.

    Args:
        parameter: any tensor.

    Returns:
        The identifier, equal on both stages, and ``"first"`` or ``"last"``; None if the parameter
        is not tied.
    """
    tie: tuple[str, str] | None = getattr(parameter, "tied_stages", None)
    if tie is None and _ties:
        tie = _ties.get(id(parameter))
    return tie


def is_counted_on_other_stage(parameter: Tensor) -> bool:
    """Return whether the gradient of this parameter is counted on another pipeline stage.

    True for the last stage's end of :func:`tie_stages`, and for copies to which Megatron-LM or
    DeepSpeed gave the attribute ``shared`` or ``ds_pipe_replicated``.

    Args:
        parameter: any tensor.
    """
    if is_copy_of_stage(parameter):
        return True
    tie = get_tie(parameter)
    return tie is not None and tie[1] == "last"


@torch.no_grad()
def tie_stages(first: Tensor | None, last: Tensor | None, mesh: NamedMesh) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last.

    The last stage's copy takes the first one's values, :func:`clip_grad_norm_` counts them once,
    and a checkpoint has one weight for both. Call it after ``fully_shard``. A copy of the model
    stays tied for clipping and checkpoints; to train the copy, tie its parameters again.

    Collective: every rank must call it.

    Args:
        first: the first stage's parameter on the rank that has this stage, and None on the others.
        last: the last stage's parameter, sharded as the first. With ``pp=1`` or ZBV a rank gives
            both.
        mesh: a mesh with an axis ``pp``.

    Returns:
        A function that sums the two gradients. Collective: every rank must call it once a step,
            before clipping. A frozen parameter gets no gradient.

    Raises:
        ShapeError: on every rank, if not exactly one rank gives each end, or if the ends differ in
            shape, dtype or ``requires_grad``.
    """
    mesh = require_named_mesh(mesh, "tie_stages")
    ends = (("first", first), ("last", last))
    here = {end: param for end, param in ends if param is not None}
    descriptions: dict[str, Any] = {}
    for end, param in here.items():
        trained = "trained" if param.requires_grad else "frozen"
        descriptions[end] = (tuple(to_local(param).shape), str(param.dtype), trained)
    by_rank = all_gather_object(mesh.group("pp"), (descriptions, next(_numbers)))
    peer = _check_ends([reported for reported, _ in by_rank], here)
    number = str(by_rank[0][1])
    if not here or first is last:  # with pp=1 both may be one parameter
        return lambda: None

    @torch.no_grad()
    def sum_gradients() -> None:
        local_grads: list[Tensor] = []
        for end, param in here.items():
            # Again, because the parameter may have been converted since.
            _set_attributes(param, (number, end))
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = param.grad if param.requires_grad else None
            # The peer waits for a tensor, whether this end trains or not.
            local_grads.append(torch.zeros_like(to_local(param)) if grad is None else to_local(grad))
        for grad, peer_grad in zip(local_grads, _exchange_with_peer(local_grads, mesh, peer), strict=True):
            grad.add_(peer_grad)

    for end, param in here.items():
        tie = (number, end)
        _set_attributes(param, tie)
        _ties[id(param)] = tie
        weakref.finalize(sum_gradients, _forget_tie, id(param), tie).atexit = False
    peer_values = _exchange_with_peer([to_local(param) for param in here.values()], mesh, peer)
    if last is not None:
        to_local(last).copy_(peer_values[-1])
    return sum_gradients


def _check_ends(by_rank: list[dict[str, Any]], here: dict[str, Tensor]) -> int:
    """Check the two ends of a tie, and return the group rank of the end that is not here.

    Does not communicate.

    Args:
        by_rank: the shape, the dtype and ``requires_grad`` of the ends that each rank has.
        here: the ends that this rank has.

    Raises:
        ShapeError: there is not exactly one of each end, or they do not match.
    """
    ranks: dict[str, list[int]] = {"first": [], "last": []}
    ends: list[Any] = []
    for end, ranks_of_end in ranks.items():
        for rank, descriptions in enumerate(by_rank):
            if end in descriptions:
                ranks_of_end.append(rank)
                ends.append(descriptions[end])
    if len(ranks["first"]) != 1 or len(ranks["last"]) != 1 or ends[0] != ends[1]:
        raise ShapeError(
            f"the ranks {ranks['first']} and {ranks['last']} of pp tie {ends}; give one of the "
            "first stage and one of the last, of one shape and dtype, both trained or both "
            "frozen; None on other ranks"
        )
    return ranks["last" if "first" in here else "first"][0]


def _set_attributes(parameter: Any, tie: tuple[str, str]) -> None:
    """Set the attributes by which a parameter and its copies are known to be tied."""
    parameter.tied_stages = tie
    set_copy_of_stage(parameter, tie[1] == "last")
    if type(parameter) is nn.Parameter:
        # torch copies a plain parameter without its attributes. Without a ``__deepcopy__`` it is
        # copied the way it is pickled, which keeps them. A DTensor keeps them anyway.
        vars(parameter)["__deepcopy__"] = None


def _forget_tie(param_id: int, tie: tuple[str, str]) -> None:
    """Remove the tie of a parameter that may have been freed: its id may be used again."""
    if _ties.get(param_id) == tie:  # unless the parameter was tied again
        del _ties[param_id]


def _exchange_with_peer(here: list[Tensor], mesh: NamedMesh, peer: int) -> list[Tensor]:
    """Return the tensors of the other end: the peer's, or copies if this rank has both ends.

    Collective: both ends of the tie must call it.
    """
    if len(here) > 1:
        return [tensor.clone() for tensor in reversed(here)]
    group = mesh.group("pp")
    received = torch.empty_like(here[0])
    operations = [
        dist.P2POp(dist.isend, here[0].contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [received]
