"""Small checks that together pass through every collective, layout and option of the tensor-parallel styles and layers.

Each runs as one rank of a world, and yields pairs: what this rank has, and what it should have by the arithmetic
of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from tensors import apart
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from tp_compare import gradient_of, sharded, tp_mesh
from tp_models import (
    UP_DOWN,
    Attention,
    Llama,
    Mlp,
    Net,
    OwnForward,
    attention_plan,
    llama_plan,
    stacked_experts,
)

from namedmesh.tensor_parallel import (
    AllReduceOutput,
    ColwiseParallel,
    ExpertParallel,
    ExpertTensorParallel,
    LocalParameters,
    RowwiseParallel,
    entropy,
    logsumexp,
    reduce_gradients,
)
from namedmesh.tensor_parallel import cross_entropy as sharded_cross_entropy
from namedmesh.tensor_parallel.collectives import (
    Group,
    all_gather_to_tp_region,
    all_to_all_single,
)
from namedmesh.tensor_parallel.hf_styles import AllReduceTailGradient, RowwiseEmbedding

Pairs: TypeAlias = Iterator[tuple[Tensor, Tensor]]

SEQUENCE, WHOLE, LAST = Shard(1), Replicate(), Shard(-1)


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


def as_whole(
    make: Callable[[], nn.Module],
    plan: Any,
    value: Tensor,
    cut_in: int | None = None,
    cut_out: int | None = None,
    *,
    as_dtensor: bool = False,
) -> Pairs:
    """A module under a plan against itself: output, input gradient, parameter gradients whole and as shards."""
    reference, mesh = filled(make()), tp_mesh()
    model = sharded(reference, plan, src_data_rank=None)
    differentiable = value.is_floating_point()
    theirs, mine = value.clone().requires_grad_(differentiable), shard(value, cut_in).clone()
    if as_dtensor:
        mine = DTensor.from_local(mine, mesh, [WHOLE if cut_in is None else Shard(cut_in)])
    mine.requires_grad_(differentiable)
    wanted, got = reference(theirs), model(mine)
    weights = noise(*wanted.shape)
    (wanted * weights).sum().backward()
    if isinstance(got, DTensor):
        (got.full_tensor() * weights).sum().backward()
        got = got.to_local()
    else:
        assert type(got) is Tensor
        (got * shard(weights, cut_out)).sum().backward()
    yield got, shard(wanted, cut_out)
    if isinstance(mine.grad, DTensor):
        yield mine.grad.full_tensor(), gradient_of(theirs)
    elif differentiable:
        yield gradient_of(mine), shard(gradient_of(theirs), cut_in)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is None:
            continue
        if isinstance(mine, DTensor) and isinstance(mine.grad, DTensor):
            yield mine.grad.full_tensor(), theirs.grad
            reduce_gradients([mine])
            theirs.grad = distribute_tensor(theirs.grad, mesh, mine.placements, src_data_rank=None)
        yield tiny.shard(gradient_of(mine)), tiny.shard(gradient_of(theirs))


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
        yield gradient_of(one), shard(gradient_of(other), dim)


# --- modules ------------------------------------------------------------------------------------------------


class Normed(nn.Embedding):
    """Adds to the forward of its base, with a module of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        out: Tensor = self.norm(super().forward(input)) * torch.ones((), dtype=self.weight.dtype)
        return out


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


HEADS = {
    "": LocalParameters({"scale": Shard(0)}),
    "up": ColwiseParallel(),
    "norm": LocalParameters(),
    "latent": AllReduceTailGradient(2),
    "expand": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def parts() -> Net:
    return Net(lambda m, x: torch.tanh(m.inner(x)).sum(-1, keepdim=True), inner=nn.Linear(4, 8))


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


def routed() -> Net:
    """Four experts; the signs of a token's first two features name its expert."""

    def compute(m: Any, x: Tensor) -> Any:
        chosen = (x[:, 0] > 0) * 2 + (x[:, 1] > 0) * 1
        order = chosen.argsort(stable=True)
        return m.experts(x[order], chosen.bincount(minlength=4))[order.argsort()]

    return Net(compute, experts=stacked_experts())


class Undivided(ExpertParallel):
    """Where the caller sums the gradients of all tokens."""

    def __init__(self) -> None:
        ParallelStyle.__init__(self)
        self.gradient_scale = 1.0
        self.replica_groups = []
        self.forwards_to_skip = 0


# --- other functions ----------------------------------------------------------------------------------------


def vocabulary_loss() -> Pairs:
    mesh = tp_mesh()
    target = torch.tensor([1, 7, -100])
    yield from against_function(
        lambda logits: sharded_cross_entropy(logits, target, mesh, label_smoothing=0.1, reduction="none"),
        lambda logits: F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none"),
        [(noise(3, 8) * 4, 1)],
        None,
    )


def vocabulary_distribution() -> Pairs:
    mesh = tp_mesh()
    for mine, whole in (
        (logsumexp, lambda logits: logits.logsumexp(-1)),
        (entropy, lambda logits: torch.distributions.Categorical(logits=logits).entropy()),
    ):
        yield from against_function(partial(mine, mesh=mesh), whole, [(noise(3, 8) * 4, 1)], None)


def regions() -> Pairs:
    mesh = tp_mesh()
    peers, size = Group.of(mesh), mesh.size()

    # Every rank makes another part of the gradient.
    even = noise(2 * size, 4)
    start = shard(even, 0).clone().requires_grad_()
    joined = all_gather_to_tp_region(start, peers, 0)
    (joined * even * (peers.rank + 1)).sum().backward()
    yield joined, even
    yield gradient_of(start), shard(even * sum(range(1, size + 1)), 0)

    sent = [noise(size, 4) * (rank + 1) for rank in range(size)]
    start = sent[peers.rank].clone().requires_grad_()
    received = all_to_all_single(start, peers)
    (received * noise(size, 4)).sum().backward()
    yield received, torch.stack([rows[peers.rank] for rows in sent])
    yield gradient_of(start), noise(size, 4)[peers.rank].expand(size, 4)


# --- a table of module x plan x data x the dim along which the input, and the output, is cut ------------------


def mlp(linear: type[nn.Linear] = nn.Linear, *frozen: str) -> Mlp:
    """With linears of a kind, and frozen parameters."""
    model = Mlp()
    model.up.__class__ = model.down.__class__ = linear
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def up_down(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    return {"up": ColwiseParallel(**up), "down": RowwiseParallel(**down)}


DATA, IDS = noise(4, 8, 8), torch.tensor([[1, 7, 5, 3], [0, 5, 6, 2], [5, 5, 5, 5], [4, 15, 8, 9]])
IN, OUT = "input_layouts", "output_layouts"
CUT = up_down({IN: SEQUENCE}, {OUT: SEQUENCE}), DATA, 1, 1
UNKNOWN = up_down({IN: LAST, OUT: SEQUENCE}, {IN: SEQUENCE}), DATA, 2
CASES: dict[str, tuple[Any, ...]] = {
    "default": (mlp, UP_DOWN, DATA),
    "sequence": (mlp, *CUT),
    "dim 0": (mlp, up_down({IN: Shard(0)}, {OUT: Shard(-3)}), DATA, 0, 0),
    "gathered between": (mlp, up_down({OUT: WHOLE}, {IN: WHOLE}), DATA),
    "DTensor between": (mlp, up_down({"use_local_output": False}, {}), DATA),
    "DTensor out": (mlp, up_down({}, {OUT: SEQUENCE, "use_local_output": False}), DATA, None, 1),
    "output features cut": (mlp, up_down({}, {OUT: LAST}), DATA, None, 2),
    "positive dims": (mlp, up_down({OUT: Shard(2)}, {IN: Shard(2)}), DATA),
    "unknown to the short way": (mlp, *UNKNOWN),
    "cut between": (mlp, up_down({OUT: SEQUENCE}, {IN: SEQUENCE, OUT: SEQUENCE}), DATA, None, 1),
    # Alone: the gather's backward would not look at more of the gradient than its own shard.
    "split": (partial(nn.Linear, 8, 4), RowwiseParallel(input_layouts=WHOLE), DATA),
}
for _name, _case in (("default", (UP_DOWN, DATA)), ("sequence", CUT), ("unknown", UNKNOWN)):
    CASES[f"{_name}, own forward"] = (partial(mlp, OwnForward), *_case)
    for _frozen in (("up.weight",), ("down.weight", "up.bias"), ("down.bias", "up.bias", "up.weight")):
        CASES[f"{_name}, {_frozen} frozen"] = (partial(mlp, nn.Linear, *_frozen), *_case)
for _padding in (None, 0, 5, -1):
    _make = partial(nn.Embedding, 16, 8, padding_idx=_padding)
    CASES[f"rows, padding {_padding}"] = _make, RowwiseParallel(input_layouts=WHOLE), IDS
    CASES[f"columns, padding {_padding}"] = _make, ColwiseParallel(), IDS, None, 2
_embedding, _rows = partial(nn.Embedding, 16, 8), partial(RowwiseParallel, input_layouts=WHOLE)
CASES |= {
    "rows, sequence": (_embedding, _rows(output_layouts=SEQUENCE), IDS, None, 1),
    "rows, ids cut": (_embedding, RowwiseParallel(input_layouts=SEQUENCE), IDS, 1),
    "rows, DTensor out": (_embedding, _rows(use_local_output=False), IDS),
    "rows, own forward": (Normed, {"": RowwiseEmbedding(input_layouts=Replicate())}, IDS % 8),
    "columns, gathered": (_embedding, ColwiseParallel(output_layouts=WHOLE), IDS),
    "columns, sequence": (_embedding, ColwiseParallel(output_layouts=SEQUENCE), IDS, None, 1),
    "heads": (heads_and_tail, HEADS, noise(2, 3, 8)),
    "biases of shared heads": (
        partial(Attention, 32, 8, 1, bias=True),
        attention_plan(8, 1),
        noise(2, 5, 32),
    ),
    "parts": (parts, {"": AllReduceOutput(), "inner": ColwiseParallel()}, noise(2, 3, 4)),
    "experts": (
        mixture,
        {"experts": ExpertTensorParallel({"up": Shard(1), "down": Shard(2)})},
        noise(2, 3, 4),
    ),
    "exchanged tokens": (routed, {"experts": Undivided()}, noise(16, 4), 0, 0),
}
for _sequence in (False, True):
    for _heads in (2, 1):
        _llama = partial(Llama, dim=16, n_heads=4, n_kv_heads=_heads, hidden=12, layers=1)
        _plan = llama_plan(4, _heads, sequence_parallel=_sequence)
        CASES[f"llama, {_heads}, {_sequence}"] = (_llama, _plan, IDS)
CHECKS: dict[str, Callable[[], Pairs]] = {name: partial(as_whole, *case) for name, case in CASES.items()}
for _name in ("default", "sequence", "unknown to the short way"):
    CHECKS[f"{_name}, DTensor in"] = partial(as_whole, *CASES[_name], as_dtensor=True)
CHECKS |= {"loss": vocabulary_loss, "distribution": vocabulary_distribution, "regions": regions}


def largest_difference(check: Callable[[], Pairs]) -> float:
    """Of one check on one rank; infinite where shapes differ."""
    worst = 0.0
    for mine, wanted in check():
        worst = max(worst, apart(mine, wanted))
        if math.isinf(worst):
            break
    return worst
