"""Weights that the first and the last pipeline stage share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import local_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from namedmesh.mesh import NamedMesh


@torch.no_grad()
def tie_stages(mesh: NamedMesh, parameter: Tensor | None) -> Callable[[], None]:
    """Tie a parameter of the first pipeline stage to one of the last, such as an embedding to the output; communicates.

    Prevents: two copies of one weight that learn apart, each from the gradients of its stage; and a norm of the gradients
    that counts them twice. The last stage's copy takes the first one's values, and is marked as ``shared`` for
    :func:`clip_grad_norm_`. Call it after ``fully_shard``, on every rank; both copies are sharded alike.

    Args:
        mesh: a mesh with an axis ``pp``.
        parameter: the first and the last stage's; None on the stages between them.

    Returns:
        A function that sums the two gradients: every rank calls it once a step, before clipping.

    Raises:
        ShapeError: the two have other shapes or types, or a stage has none; on the ranks of both.

    Example:
        >>> import namedmesh, torch, torch.distributed as dist
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(pp=1, device="cpu")
        >>> weight = torch.nn.Parameter(torch.ones(4, 2))
        >>> sum_gradients = training.tie_stages(mesh, weight)   # nothing to do on one stage
        >>> sum_gradients()
        >>> mesh.close(); dist.destroy_process_group()
    """
    if mesh.size("pp") == 1:
        return lambda: None
    with mesh.agreed("tie_stages") as maker:
        maker.compare({})
        made = maker.make_sets([(each[0], each[-1]) for each in mesh.layout.groups("pp")], "first_last_pp")
    if not (mesh.is_first("pp") or mesh.is_last("pp")):
        return lambda: None
    ((ranks, group),) = [(ranks, group) for ranks, group in made.items() if mesh.global_rank in ranks]
    described: list[Any] = [None, None]
    mine = None if parameter is None else (tuple(local_shard(parameter).shape), str(parameter.dtype))
    dist.all_gather_object(described, mine, group=group)
    if parameter is None or described[0] != described[1]:
        raise ShapeError(
            f"ranks {ranks[0]} and {ranks[1]} tie {described[0]} and {described[1]}; give both stages a parameter of one shape "
            "and type"
        )
    dist.broadcast(local_shard(parameter), src=ranks[0], group=group)
    if mesh.is_last("pp"):
        parameter.shared = True  # type: ignore[attr-defined]
    tied = parameter

    @torch.no_grad()
    def sum_gradients() -> None:
        if tied.grad is None:
            tied.grad = torch.zeros_like(tied)
        dist.all_reduce(local_shard(tied.grad), group=group)

    return sum_gradients
