"""Next tokens from vocabulary-sharded logits, without an all-gather of the logits.

The logits of a rank are its local shard of the vocabulary, as for the losses. Shards may differ in
size, and be empty. Results are replicated.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor

from namedmesh._errors import ShapeError
from namedmesh.mesh.internal import AxisMesh, get_axis_mesh
from namedmesh.tensor_parallel.collectives import Group, all_gather
from namedmesh.tensor_parallel.loss import logits_problems

# The constants of splitmix64, as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@torch.no_grad()
def argmax(logits: Tensor, mesh: AxisMesh) -> Tensor:
    """Return the id of the largest logit over a sharded vocabulary; the same on every rank.

    As in torch, the first one of several equal logits, and NaN counts as the largest.

    Collective: every rank of ``mesh`` must call it. Two all-gathers: of one number, and of two
    numbers for each row.

    Args:
        logits: ``(..., local vocabulary)``, the local shard, as for :func:`cross_entropy`.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.

    Returns:
        ``(...)``, ids in the full vocabulary.

    Raises:
        ShapeError: the logits are a DTensor or no floating-point numbers.

    Example:
        >>> import namedmesh
        >>> mesh = namedmesh.init_mesh(tp=1, device="cpu")
        >>> argmax(torch.tensor([[0.5, 2.0, 1.0]]), mesh)
        tensor([1])
        >>> mesh.close(); torch.distributed.destroy_process_group()
    """
    group = Group.of(get_axis_mesh(mesh, "tp", "argmax"))
    if problems := logits_problems(logits):
        raise ShapeError(*problems)
    offset, _ = _share(logits, group, torch.empty(0, dtype=torch.int64, device=logits.device))
    return _pick_largest(*_gather_largest(logits, offset, 1, group))


@torch.no_grad()
def sample(
    logits: Tensor,
    mesh: AxisMesh,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw an id for each row of logits over a sharded vocabulary; the same on every rank.

    The id has the largest sum of logit and Gumbel noise, which follows from one random number for
    each row and from the id. So the result does not depend on the number of ranks: one
    process with the full logits and an equal generator draws the same id.

    Collective: every rank of ``mesh`` must call it. Two all-gathers: of one number for each row, and
    of two numbers for each row (times ``top_k``).

    Args:
        logits: ``(..., local vocabulary)``, the local shard, as for :func:`cross_entropy`.
        mesh: the NamedMesh, whose ``tp`` axis is used, or a mesh with the one axis over which the
            vocabulary is sharded.
        temperature: the logits are divided by it; 0 for :func:`argmax`.
        top_k: draw from this number of largest logits, the first ones of equal logits; None for
            all.
        generator: draws one number for each row. The numbers of the first rank count. By default
            torch's own generator of the device.

    Returns:
        ``(...)``, ids in the full vocabulary.

    Raises:
        ShapeError: the logits are a DTensor or no floating-point numbers, or an option is out of
            range.

    Example:
        >>> import namedmesh
        >>> mesh = namedmesh.init_mesh(tp=1, device="cpu")
        >>> sample(torch.tensor([[0.5, 2.0, 1.0]]), mesh, top_k=1)
        tensor([1])
        >>> mesh.close(); torch.distributed.destroy_process_group()
    """
    mesh = get_axis_mesh(mesh, "tp", "sample")
    problems = logits_problems(logits)
    if not 0 <= temperature < math.inf:
        problems.append(f"temperature is {temperature}; it can be 0 or a positive number")
    if top_k is not None and top_k < 1:
        problems.append(f"top_k is {top_k}; it can be 1 or more, or None for the full vocabulary")
    if problems:
        raise ShapeError(*problems)
    if temperature == 0:
        return argmax(logits, mesh)
    group = Group.of(mesh)
    device = generator.device if generator else logits.device
    seeds = torch.randint(2**63 - 1, logits.shape[:-1], generator=generator, device=device)
    offset, seeds = _share(logits, group, seeds.to(logits.device))
    # In float64, rounding does not change which of two sums is larger, whatever the kernel.
    scores = logits.double() / temperature
    if top_k is None:
        ids = offset + torch.arange(logits.shape[-1], device=logits.device)
        return _pick_largest(*_gather_largest(scores + _draw_gumbel(seeds, ids), offset, 1, group))
    scores, ids = _gather_largest(scores, offset, top_k, group)
    # Candidates of equal scores are in the order of their ids, which a stable sort keeps.
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)[..., :top_k]
    return _pick_largest(scores[..., :top_k] + _draw_gumbel(seeds, ids), ids)


def _share(logits: Tensor, group: Group, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id of the first local logit, and the seeds of the first rank."""
    width = torch.full((1,), logits.shape[-1], device=logits.device)
    by_rank = all_gather(torch.cat([width, seeds.flatten()]).unsqueeze(0), group, 0)
    return by_rank[: group.rank, 0].sum(), by_rank[0, 1:].view(seeds.shape)


def _gather_largest(scores: Tensor, offset: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each rank and their ids, in rank order. One all-gather."""
    # Every rank sends equally many, also one with a small or empty shard.
    padded = F.pad(scores, (0, max(0, count - scores.shape[-1])), value=-math.inf)
    if count == 1:
        largest, ids = padded.max(-1, keepdim=True)
    else:
        largest, ids = padded.sort(dim=-1, descending=True, stable=True)
    # float64 has every id, and every score of a smaller dtype.
    pairs = torch.stack([largest[..., :count].double(), (ids[..., :count] + offset).double()])
    gathered = all_gather(pairs, group, -1)
    return gathered[0], gathered[1].long()


def _pick_largest(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the id of the largest score of each row, the first one of equal scores."""
    return ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


def _draw_gumbel(seeds: Tensor, ids: Tensor) -> Tensor:
    """Return Gumbel noise for each row and id, a function of the row's seed and of the id.

    torch's generators cannot skip to a column, so a rank would have to draw the noise of the full
    vocabulary. This is splitmix64, a generator that can.
    """
    bits = seeds.unsqueeze(-1) + ids * _STEP
    for shift, factor in _ROUNDS:
        bits = (bits ^ _shift_right(bits, shift)) * factor
    # 52 bits and a half: neither 0 nor 1 after rounding.
    uniform = (_shift_right(bits ^ _shift_right(bits, 31), 12).double() + 0.5) * 2.0**-52
    return -(-uniform.log()).log()


def _shift_right(bits: Tensor, shift: int) -> Tensor:
    """Shift unsigned 64-bit numbers; torch's operator repeats the sign."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
