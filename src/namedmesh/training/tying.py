"""One weight in the first and in the last pipeline stage: its values, gradient and marks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from namedmesh._torch import all_gather_object
from namedmesh.arguments import named_mesh
from namedmesh.errors import ShapeError
from namedmesh.mesh import NamedMesh
from namedmesh.sharding import is_copy_of_stage, set_copy_of_stage, to_local

# Every rank of a pipeline ties in the same order, so the ranks count alike.
_numbers = count()

# The marks by the parameter's id, while the function that sums its gradients lives, which keeps the
# parameter alive. ``module.to(dtype)`` keeps the object of a DTensor parameter and replaces all its
# attributes. torch refuses to convert a parameter that has a weak reference.
_marks: dict[int, tuple[str, str]] = {}


def tie_of(parameter: Tensor) -> tuple[str, str] | None:
    """Return the tie of a parameter and its end, ``"first"`` or ``"last"``; None if it is not tied.

    Copies of the parameter (``copy.deepcopy``, ``pickle``) have the same tie.
    """
    mark: tuple[str, str] | None = getattr(parameter, "tied_stages", None)
    if mark is None and _marks:
        mark = _marks.get(id(parameter))
    return mark


def is_counted_elsewhere(parameter: Tensor) -> bool:
    """Return whether another pipeline stage counts the gradient of this parameter.

    True for the last stage's end of :func:`tie_stages`, and for copies that Megatron or DeepSpeed
    marked with ``shared`` or ``ds_pipe_replicated``.
    """
    if is_copy_of_stage(parameter):
        return True
    tie = tie_of(parameter)
    return tie is not None and tie[1] == "last"


@torch.no_grad()
def tie_stages(first: Tensor | None, last: Tensor | None, mesh: NamedMesh) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, e.g. embedding and output.

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
        A function that sums the two gradients: every rank calls it once a step, before clipping.
            A frozen parameter gets no gradient.

    Raises:
        ShapeError: on every rank, if not exactly one rank gives each end, or if the ends differ in
            shape, dtype or ``requires_grad``.
    """
    mesh = named_mesh(mesh, "tie_stages")
    ends = (("first", first), ("last", last))
    here = {end: param for end, param in ends if param is not None}
    descriptions: dict[str, Any] = {}
    for end, param in here.items():
        trained = "trained" if param.requires_grad else "frozen"
        descriptions[end] = (tuple(to_local(param).shape), str(param.dtype), trained)
    by_rank = all_gather_object(mesh.group("pp"), (descriptions, next(_numbers)))
    peer = _check_ends([found for found, _ in by_rank], here)
    number = str(by_rank[0][1])
    if not here or first is last:  # with pp=1 both may be one parameter
        return lambda: None

    @torch.no_grad()
    def sum_gradients() -> None:
        local_grads: list[Tensor] = []
        for end, param in here.items():
            _mark(param, (number, end))  # again, for copies of parameters that were converted since
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
            grad = param.grad if param.requires_grad else None
            # The peer waits for a tensor, whether this end trains or not.
            local_grads.append(torch.zeros_like(to_local(param)) if grad is None else to_local(grad))
        for grad, other in zip(local_grads, _exchange(local_grads, mesh, peer), strict=True):
            grad.add_(other)

    for end, param in here.items():
        mark = (number, end)
        _mark(param, mark)
        _marks[id(param)] = mark
        weakref.finalize(sum_gradients, _forget, id(param), mark).atexit = False
    others = _exchange([to_local(param) for param in here.values()], mesh, peer)
    if last is not None:
        to_local(last).copy_(others[-1])
    return sum_gradients


def _check_ends(by_rank: list[dict[str, Any]], here: dict[str, Tensor]) -> int:
    """Return the group rank of the other end; raise unless there is one of each, and they match."""
    ranks: dict[str, list[int]] = {"first": [], "last": []}
    found: list[Any] = []
    for end, of_end in ranks.items():
        for rank, descriptions in enumerate(by_rank):
            if end in descriptions:
                of_end.append(rank)
                found.append(descriptions[end])
    if len(ranks["first"]) != 1 or len(ranks["last"]) != 1 or found[0] != found[1]:
        remedy = (
            "give one of the first stage and one of the last, of one shape and type, both trained "
            "or both frozen; None elsewhere"
        )
        of_first, of_last = ranks.values()
        raise ShapeError(f"the ranks {of_first} and {of_last} of pp tie {found}; {remedy}")
    return ranks["last" if "first" in here else "first"][0]


def _mark(parameter: Any, mark: tuple[str, str]) -> None:
    parameter.tied_stages = mark
    set_copy_of_stage(parameter, mark[1] == "last")
    if type(parameter) is nn.Parameter:
        # torch copies a plain parameter without its attributes. Without a ``__deepcopy__`` it is
        # copied the way it is pickled, which keeps them. A DTensor keeps them anyway.
        vars(parameter)["__deepcopy__"] = None


def _forget(number: int, mark: tuple[str, str]) -> None:
    if _marks.get(number) == mark:  # unless the parameter was tied again
        del _marks[number]


def _exchange(here: list[Tensor], mesh: NamedMesh, peer: int) -> list[Tensor]:
    """Return the other end's tensors: the peer's, or copies if this rank has both ends."""
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
