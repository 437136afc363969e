"""Small checks that together pass through every collective of the tensor-parallel styles and layers.

Each runs as one rank of a world, and yields pairs: what this rank has, and what it should have by the arithmetic
of one process.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from tp_compare import tp_mesh
from tp_models import Llama, Net, llama_plan

from namedmesh.errors import GradientError
from namedmesh.tensor_parallel import (
    ColwiseParallel,
    ExpertParallel,
    LocalParameters,
    RowwiseParallel,
    ShardedExperts,
    SumOutput,
    parallelize,
    reduce_gradients,
)
from namedmesh.tensor_parallel import cross_entropy as sharded_cross_entropy
from namedmesh.tensor_parallel.collectives import Group, enter, exchange
from namedmesh.tensor_parallel.hf import RowwiseEmbedding, TailGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Pairs: TypeAlias = Iterator[tuple[Tensor, Tensor]]

SEQUENCE, WHOLE = Shard(1), Replicate()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def filled(module: nn.Module) -> nn.Module:
    """The same values on every rank, whose threads share one generator of random numbers."""
    generator = torch.Generator().manual_seed(0)
    module = module.double()
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return module


def shard(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def against_whole(
    module: nn.Module,
    plan: dict[str, Any],
    value: Tensor,
    *,
    cut_in: int | None = None,
    cut_out: int | None = None,
) -> Pairs:
    """A module under a plan against itself: output, input gradient, parameter gradients whole and as shards."""
    reference = filled(module)
    model = parallelize(copy.deepcopy(reference), tp_mesh(), plan, src_data_rank=None)
    differentiable = value.is_floating_point()
    theirs = value.clone().requires_grad_(differentiable)
    mine = shard(value, cut_in).clone().requires_grad_(differentiable)
    wanted, got = reference(theirs), model(mine)
    weights = noise(*wanted.shape)
    (wanted * weights).sum().backward()
    (got * shard(weights, cut_out)).sum().backward()
    yield got, shard(wanted, cut_out)
    if mine.grad is not None and theirs.grad is not None:
        yield mine.grad, shard(theirs.grad, cut_in)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert other.grad is not None, name
        if isinstance(parameter.grad, DTensor):
            yield parameter.grad.full_tensor(), other.grad
            reduce_gradients([parameter])
            assert isinstance(parameter, DTensor)
            cut = distribute_tensor(
                other.grad, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            yield parameter.grad.to_local(), cut.to_local()
        else:
            yield parameter.grad, other.grad


def against_function(
    mine: Callable[..., Tensor],
    whole: Callable[..., Tensor],
    arguments: list[tuple[Tensor, int | None]],
    cut_out: int | None,
) -> Pairs:
    """A function of shards against one of whole tensors; each argument with the dim along which it is cut."""
    theirs = [value.clone().requires_grad_() for value, _ in arguments]
    ours = [shard(value, dim).clone().requires_grad_() for value, dim in arguments]
    wanted, got = whole(*theirs), mine(*ours)
    weights = noise(*wanted.shape)
    (wanted * weights).sum().backward()
    (got * shard(weights, cut_out)).sum().backward()
    yield got, shard(wanted, cut_out)
    for (_, dim), one, other in zip(arguments, ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        yield one.grad, shard(other.grad, dim)


# --- styles -------------------------------------------------------------------------------------------------


def column_and_row() -> Pairs:
    two = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    yield from against_whole(two, {"0": ColwiseParallel(), "2": RowwiseParallel()}, noise(2, 4, 8))


def sequence_column_and_row() -> Pairs:
    two = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    plan = {"0": ColwiseParallel(input_layouts=SEQUENCE), "2": RowwiseParallel(output_layouts=SEQUENCE)}
    yield from against_whole(two, plan, noise(2, 4, 8), cut_in=1, cut_out=1)


def gathered_and_split() -> Pairs:
    two = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    plan = {"0": ColwiseParallel(output_layouts=WHOLE), "2": RowwiseParallel(input_layouts=WHOLE)}
    yield from against_whole(two, plan, noise(2, 4, 8))
    # Alone: the gather's backward would not look at more of the gradient than its own shard.
    yield from against_whole(nn.Sequential(nn.Linear(12, 8)), {"0": plan["2"]}, noise(2, 4, 12))


class Normed(nn.Embedding):
    """Adds to the forward of its base, with a module of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        out: Tensor = self.norm(super().forward(input)) * torch.ones((), dtype=self.weight.dtype)
        return out


def embeddings() -> Pairs:
    ids = torch.tensor([[1, 7, 3, 3], [0, 5, 6, 2]])
    rows = RowwiseParallel(input_layouts=WHOLE)
    yield from against_whole(nn.Sequential(nn.Embedding(8, 8)), {"0": rows}, ids)
    own = RowwiseEmbedding()
    yield from against_whole(nn.Sequential(Normed()), {"0": own}, ids)
    scattered = RowwiseParallel(input_layouts=WHOLE, output_layouts=SEQUENCE)
    yield from against_whole(nn.Sequential(nn.Embedding(8, 8)), {"0": scattered}, ids, cut_out=1)
    columns = ColwiseParallel(output_layouts=WHOLE)
    yield from against_whole(nn.Sequential(nn.Embedding(8, 8)), {"0": columns}, ids)
    of_shards = RowwiseParallel(input_layouts=SEQUENCE)
    yield from against_whole(nn.Sequential(nn.Embedding(8, 8)), {"0": of_shards}, ids, cut_in=1)


def llamas() -> Pairs:
    ids = torch.tensor([[1, 7, 3, 3], [0, 5, 6, 2]])
    for sequence_parallel in (False, True):
        for kv_heads in (2, 1):
            model = Llama(dim=16, n_heads=4, n_kv_heads=kv_heads, hidden=12, layers=1)
            yield from against_whole(model, llama_plan(4, kv_heads, sequence_parallel=sequence_parallel), ids)


def heads_and_tail() -> Net:
    """A norm over each head's features, a number for each head, and a tail that every head uses."""

    def compute(m: Any, x: Tensor) -> Any:
        heads = m.norm(m.up(x).unflatten(-1, (-1, 4))) * m.scale.unsqueeze(-1)
        rest, tail = m.latent(x).split([4, 2], -1)
        keys = m.expand(rest).unflatten(-1, (-1, 4)) + tail.sum(-1)[..., None, None]
        return m.down(torch.tanh(heads * keys).flatten(-2))

    widths = {"up": (8, 16), "down": (16, 8), "latent": (8, 6), "expand": (4, 16)}
    linears = {name: nn.Linear(*width) for name, width in widths.items()}
    return Net(compute, scale=nn.Parameter(torch.randn(4)), norm=nn.LayerNorm(4), **linears)


def heads() -> Pairs:
    plan = {
        "0": LocalParameters({"scale": Shard(0)}),
        "0.up": ColwiseParallel(),
        "0.norm": LocalParameters(),
        "0.latent": TailGradient(2),
        "0.expand": ColwiseParallel(),
        "0.down": RowwiseParallel(),
    }
    yield from against_whole(nn.Sequential(heads_and_tail()), plan, noise(2, 3, 8))


def parts() -> Pairs:
    module = Net(lambda m, x: torch.tanh(m.inner(x)).sum(-1, keepdim=True), inner=nn.Linear(4, 8))
    plan = {"0": SumOutput(), "0.inner": ColwiseParallel()}
    yield from against_whole(nn.Sequential(module), plan, noise(2, 3, 4))


def mixture() -> Net:
    """Two experts, weighted by a router."""

    def compute(m: Any, x: Tensor, *, weights: Tensor) -> Any:
        hidden = torch.tanh(torch.einsum("...i,eoi->...eo", x, m.up))
        out = torch.einsum("...eo,eio->...ei", hidden, m.down)
        return (out * weights[..., None]).sum(-2)

    up, down = nn.Parameter(torch.empty(2, 8, 4)), nn.Parameter(torch.empty(2, 4, 8))
    experts = Net(compute, up=up, down=down)
    return Net(
        lambda m, x: m.experts(x, weights=m.router(x).softmax(-1)), router=nn.Linear(4, 2), experts=experts
    )


def experts() -> Pairs:
    plan = {"experts": ShardedExperts({"up": Shard(1), "down": Shard(2)})}
    yield from against_whole(mixture(), plan, noise(2, 3, 4))


def routed() -> Net:
    """Four experts; the signs of a token's first two features name its expert."""

    def each(m: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = zip(tokens.split(counts.tolist()), m.weight, strict=True)
        return torch.cat([torch.tanh(part @ weight) for part, weight in parts])

    def compute(m: Any, x: Tensor) -> Any:
        chosen = (x[:, 0] > 0) * 2 + (x[:, 1] > 0) * 1
        order = chosen.argsort(stable=True)
        return m.experts(x[order], chosen.bincount(minlength=4))[order.argsort()]

    return Net(compute, experts=Net(each, weight=nn.Parameter(torch.empty(4, 4, 4))))


class Undivided(ExpertParallel):
    """Where the caller sums the gradients of all tokens."""

    def __init__(self) -> None:
        ParallelStyle.__init__(self)
        self.gradient_scale, self.copies, self.skipped = 1.0, [], 0


def exchanged_tokens() -> Pairs:
    plan = {"experts": Undivided()}
    yield from against_whole(routed(), plan, noise(16, 4), cut_in=0, cut_out=0)


def vocabulary_loss() -> Pairs:
    mesh = tp_mesh()
    target = torch.tensor([1, 7, -100])
    yield from against_function(
        lambda logits: sharded_cross_entropy(logits, target, mesh, label_smoothing=0.1, reduction="none"),
        lambda logits: F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none"),
        [(noise(3, 8) * 4, 1)],
        None,
    )


def regions() -> Pairs:
    mesh = tp_mesh()
    peers, size = Group.of(mesh), mesh.size()

    # Every rank makes another part of the gradient.
    even = noise(2 * size, 4)
    start = shard(even, 0).clone().requires_grad_()
    joined = enter(start, peers, 0)
    (joined * even * (peers.rank + 1)).sum().backward()
    assert start.grad is not None
    yield joined, even
    yield start.grad, shard(even * sum(range(1, size + 1)), 0)

    sent = [noise(size, 4) * (rank + 1) for rank in range(size)]
    start = sent[peers.rank].clone().requires_grad_()
    received = exchange(start, peers)
    (received * noise(size, 4)).sum().backward()
    assert start.grad is not None
    yield received, torch.stack([rows[peers.rank] for rows in sent])
    yield start.grad, noise(size, 4)[peers.rank].expand(size, 4)


def comparison() -> Pairs:
    """The ranks find out that they have other gradients of a number between sharded layers."""

    linears = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    between = Net(lambda m, x: m.down(m.act(m.up(x))), act=nn.PReLU(), **linears)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize(filled(between), tp_mesh(), plan, src_data_rank=None)
    found = torch.zeros(1)
    try:
        model(noise(2, 8)).square().sum().backward()
    except GradientError:
        found = torch.ones(1)
    yield found, torch.ones(1)


CHECKS: tuple[Callable[[], Pairs], ...] = (
    column_and_row,
    sequence_column_and_row,
    gathered_and_split,
    embeddings,
    llamas,
    heads,
    parts,
    comparison,
    experts,
    exchanged_tokens,
    vocabulary_loss,
    regions,
)


def largest_difference(check: Callable[[], Pairs]) -> float:
    """Of one check on one rank; infinite where shapes differ."""
    worst = 0.0
    for mine, wanted in check():
        if mine.shape != wanted.shape or not torch.isfinite(mine).all():
            return math.inf
        worst = max(worst, float((mine - wanted).detach().abs().max()))
    return worst
