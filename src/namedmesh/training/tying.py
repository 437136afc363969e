"""One weight in the first and in the last pipeline stage: its values, its gradient, and the marks that say so."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from namedmesh._torch import from_all
from namedmesh.errors import ShapeError
from namedmesh.mesh import NamedMesh

# Every rank of a pipeline ties in the same order, so the ranks count alike.
_numbers = count()

# The marks by the parameter's id, while the function that sums its gradients, and with it the parameter, lives.
# ``module.to(dtype)`` keeps a DTensor parameter and replaces all its attributes. A weak reference to the parameter
# would be safer than its id, but torch refuses to convert a parameter that has one.
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

    True for the last stage's end of :func:`tie_stages`, and for Megatron's and DeepSpeed's attributes of such copies.
    """
    if getattr(parameter, "shared", False) or getattr(parameter, "ds_pipe_replicated", False):
        return True
    tie = tie_of(parameter)
    return tie is not None and tie[1] == "last"


@torch.no_grad()
def tie_stages(first: Tensor | None, last: Tensor | None, mesh: NamedMesh) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, such as an embedding to the output.

    The last stage's copy takes the first one's values, :func:`clip_grad_norm_` counts them once, and a checkpoint has
    one weight for both. Call it after ``fully_shard``. A copy of the model keeps the marks for clipping and for
    checkpoints; to train the copy, tie its parameters again.

    Collective: every rank must call it.

    Args:
        first: the first stage's parameter on the rank that has this stage, and None on the others.
        last: the last stage's parameter, sharded as the first. With ``pp=1`` or ZBV a rank gives both.
        mesh: a mesh with an axis ``pp``.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping. A frozen parameter
        gets no gradient.

    Raises:
        ShapeError: on every rank, if not exactly one rank gives each end, or if the ends differ in shape, dtype or
            ``requires_grad``.
    """
    ends = (first, last)
    described: list[tuple[Any, ...] | None] = []
    for parameter in ends:
        if parameter is None:
            described.append(None)
        else:
            training = "trained" if parameter.requires_grad else "frozen"
            described.append((tuple(_local(parameter).shape), str(parameter.dtype), training))
    group = mesh.group("pp")
    by_rank = from_all(group, (described, next(_numbers)))
    ranks: list[list[int]] = [[], []]  # of each end
    found: list[tuple[Any, ...]] = []
    for end in range(2):
        for rank, (of_rank, _) in enumerate(by_rank):
            description = of_rank[end]
            if description is not None:
                ranks[end].append(rank)
                found.append(description)
    if [len(of_end) for of_end in ranks] != [1, 1] or found[0] != found[1]:
        remedy = (
            "give one of the first stage and one of the last, of one shape and type, both trained or both frozen; "
            "None elsewhere"
        )
        raise ShapeError(f"the ranks {ranks[0]} and {ranks[1]} of pp tie {found}; {remedy}")
    here: dict[str, Tensor] = {}
    if first is not last:
        here = {
            end: parameter
            for end, parameter in zip(("first", "last"), ends, strict=True)
            if parameter is not None
        }
    (first_rank,), (last_rank,) = ranks
    number = str(by_rank[first_rank][1])
    tied = _TiedStages(here, number, group, last_rank if last is None else first_rank)
    if here:
        others = tied.exchange([_local(parameter) for parameter in here.values()])
        if "last" in here:
            _local(here["last"]).copy_(others[-1])
    return tied


class _TiedStages:
    """The ends of one tie that this rank has; a call sums their gradients with those of the other end."""

    def __init__(self, here: dict[str, Tensor], number: str, group: dist.ProcessGroup, peer: int) -> None:
        self._here = here
        self._number = number
        self._group = group
        self._peer = peer  # the group rank of the other end
        self._mark()
        for end, parameter in here.items():
            _marks[id(parameter)] = (number, end)
            weakref.finalize(self, _marks.pop, id(parameter), None).atexit = False

    def _mark(self) -> None:
        for end, parameter in self._here.items():
            marked: Any = parameter
            marked.tied_stages = (self._number, end)
            marked.shared = end == "last"  # as Megatron marks it
            if type(parameter) is nn.Parameter:
                # torch copies a plain parameter without its attributes. Without a method of its own for deepcopy it is
                # copied the way it is pickled, which keeps them. DTensors keep them anyway.
                marked.__deepcopy__ = None

    @torch.no_grad()
    def __call__(self) -> None:
        # Parameters that were converted since, or copies of them, are found by their attributes again.
        self._mark()
        gradients: list[Tensor] = []
        for parameter in self._here.values():
            if not parameter.requires_grad:
                # The peer waits for this rank's tensor, whether this end trains or not.
                gradients.append(torch.zeros_like(_local(parameter)))
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(_local(parameter.grad))
        others = self.exchange(gradients) if gradients else []
        for parameter, gradient, other in zip(self._here.values(), gradients, others, strict=True):
            if parameter.requires_grad:
                gradient.add_(other)

    def exchange(self, here: list[Tensor]) -> list[Tensor]:
        """Return the other end's tensor for each of this rank's: the peer's, or copies if this rank has both ends."""
        if len(here) > 1:
            return [tensor.clone() for tensor in reversed(here)]
        received = torch.empty_like(here[0])
        operations = [
            dist.P2POp(dist.isend, here[0].contiguous(), group=self._group, group_peer=self._peer),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=self._peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [received]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
