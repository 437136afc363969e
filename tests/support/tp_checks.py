"""Checks that together run every collective, layout and option of the tensor-parallel styles.

A check runs on every rank, and yields pairs: a local tensor, and the value that one process
computes for it.
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
from tensors import compute_difference
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from tp_compare import get_grad, make_tp_mesh, parallelize_copy
from tp_models import (
    UP_DOWN,
    Attention,
    Llama,
    Mlp,
    Net,
    OwnForward,
    make_attention_plan,
    make_llama_plan,
    make_stacked_experts,
)

from namedmesh.tensor_parallel import (
    AllReduceOutput,
    AllReduceOutputGradient,
    ColwiseParallel,
    ExpertParallel,
    ExpertTensorParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
    argmax,
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
from namedmesh.tensor_parallel.hf_styles import RowwiseEmbedding

Pairs: TypeAlias = Iterator[tuple[Tensor, Tensor]]

SEQUENCE, REPLICATED, LAST = Shard(1), Replicate(), Shard(-1)


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def fill(module: nn.Module) -> nn.Module:
    """Fill a module with the same values on every rank, also if ranks are threads of a process."""
    generator = torch.Generator().manual_seed(0)
    module = module.double()
    for param in module.parameters():
        param.data.copy_(torch.randn(param.shape, dtype=torch.float64, generator=generator) / 2)
    return module


def local_shard(tensor: Tensor, dim: int | None) -> Tensor:
    """Return this rank's shard of ``dim``; the tensor itself for None (replicated)."""
    if dim is None:
        return tensor
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def compare_module(
    make: Callable[[], nn.Module],
    plan: Any,
    value: Tensor,
    input_dim: int | None = None,
    output_dim: int | None = None,
    *,
    as_dtensor: bool = False,
) -> Pairs:
    """Yield the output and all gradients of a parallelized module, each with the expected value.

    Args:
        make: makes the unsharded module.
        plan: its plan.
        value: the full input.
        input_dim: the dim along which the input is sharded; None if it is replicated.
        output_dim: the dim along which the output is sharded; None if it is replicated.
        as_dtensor: pass the input as a DTensor.
    """
    reference = fill(make())
    mesh = make_tp_mesh()
    model = parallelize_copy(reference, plan, src_data_rank=None)
    is_differentiable = value.is_floating_point()
    full_input = value.clone().requires_grad_(is_differentiable)
    local_input = local_shard(value, input_dim).clone()
    if as_dtensor:
        placement = REPLICATED if input_dim is None else Shard(input_dim)
        local_input = DTensor.from_local(local_input, mesh, [placement])
    local_input.requires_grad_(is_differentiable)
    expected = reference(full_input)
    output = model(local_input)
    weights = random_tensor(*expected.shape)
    (expected * weights).sum().backward()
    if isinstance(output, DTensor):
        (output.full_tensor() * weights).sum().backward()
        output = output.to_local()
    else:
        assert type(output) is Tensor
        (output * local_shard(weights, output_dim)).sum().backward()
    yield output, local_shard(expected, output_dim)
    if isinstance(local_input.grad, DTensor):
        yield local_input.grad.full_tensor(), get_grad(full_input)
    elif is_differentiable:
        yield get_grad(local_input), local_shard(get_grad(full_input), input_dim)
    for param, full_param in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.requires_grad == full_param.requires_grad
        assert (param.grad is None) == (full_param.grad is None)
        if full_param.grad is None:
            continue
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            yield param.grad.full_tensor(), full_param.grad
            reduce_gradients([param])
            full_param.grad = distribute_tensor(full_param.grad, mesh, param.placements, src_data_rank=None)
        yield tiny.shard(get_grad(param)), tiny.shard(get_grad(full_param))


def compare_function(
    sharded: Callable[..., Tensor],
    unsharded: Callable[..., Tensor],
    arguments: list[tuple[Tensor, int | None]],
    output_dim: int | None,
) -> Pairs:
    """Yield the output and the gradients of a function of shards, each with the expected value.

    Args:
        sharded: the function of local tensors.
        unsharded: the function of full tensors.
        arguments: each full argument, and the dim along which it is sharded.
        output_dim: the dim along which the output is sharded; None if it is replicated.
    """
    full_arguments = [value.clone().requires_grad_() for value, _ in arguments]
    local_arguments = [local_shard(value, dim).clone().requires_grad_() for value, dim in arguments]
    expected = unsharded(*full_arguments)
    output = sharded(*local_arguments)
    weights = random_tensor(*expected.shape)
    (expected * weights).sum().backward()
    (output * local_shard(weights, output_dim)).sum().backward()
    yield output, local_shard(expected, output_dim)
    for (_, dim), local, full in zip(arguments, local_arguments, full_arguments, strict=True):
        yield get_grad(local), local_shard(get_grad(full), dim)


# --- modules
# ------------------------------------------------------------------------------------------------


class NormalizedEmbedding(nn.Embedding):
    """An embedding that extends the forward of its base class."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        out: Tensor = self.norm(super().forward(input)) * torch.ones((), dtype=self.weight.dtype)
        return out


def make_latent_attention() -> Net:
    """Make a module with a norm and a scale for each head, and a tail that all heads use."""

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
    "latent": AllReduceOutputGradient(slice(-2, None)),
    "expand": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def make_shared_features() -> Net:
    """Make a replicated projection whose middle features scale the features of a column layer."""

    def compute(m: Any, x: Tensor) -> Tensor:
        before, shared, after = m.shared(x).split([3, 1, 2], -1)
        hidden = torch.tanh(m.up(before)) * shared
        output: Tensor = m.down(hidden) + after.sum(-1, keepdim=True)
        return output

    return Net(compute, shared=nn.Linear(4, 6), up=nn.Linear(3, 8), down=nn.Linear(8, 4))


def make_group_norm() -> Net:
    """Make a norm over groups of features between a column layer and a row layer."""
    modules = {"up": nn.Linear(4, 16), "norm": nn.GroupNorm(4, 16), "down": nn.Linear(16, 4)}
    return Net(lambda m, x: m.down(m.norm(m.up(x))), **modules)


def make_partial_output() -> Net:
    """Make a module whose output is partial if its linear is column-parallel."""
    return Net(lambda m, x: torch.tanh(m.inner(x)).sum(-1, keepdim=True), inner=nn.Linear(4, 8))


def make_dense_mixture() -> Net:
    """Make two experts, all of them used by every token with the weights of a router."""

    def compute(m: Any, x: Tensor, *, weights: Tensor) -> Any:
        hidden = torch.tanh(torch.einsum("...i,eoi->...eo", x, m.up))
        out = torch.einsum("...eo,eio->...ei", hidden, m.down)
        return (out * weights[..., None]).sum(-2)

    up, down = nn.Parameter(torch.empty(2, 8, 4)), nn.Parameter(torch.empty(2, 4, 8))
    experts = Net(compute, up=up, down=down)
    return Net(
        lambda m, x: m.experts(x, weights=m.router(x).softmax(-1)), router=nn.Linear(4, 2), experts=experts
    )


def make_routed_mixture() -> Net:
    """Make four experts; the signs of a token's first two features select its expert."""

    def compute(m: Any, x: Tensor) -> Any:
        chosen = (x[:, 0] > 0) * 2 + (x[:, 1] > 0) * 1
        order = chosen.argsort(stable=True)
        return m.experts(x[order], chosen.bincount(minlength=4))[order.argsort()]

    return Net(compute, experts=make_stacked_experts())


class UnscaledExpertParallel(ExpertParallel):
    """Expert parallelism for a caller that sums the gradients of all tokens itself."""

    def __init__(self) -> None:
        ParallelStyle.__init__(self)
        self.gradient_scale = 1.0
        self.replica_groups = []
        self.forwards_to_skip = 0


# --- other functions
# ----------------------------------------------------------------------------------------


def compare_argmax() -> Pairs:
    """The largest logit is in the shard of the last rank, and then in that of the first one."""
    mesh = make_tp_mesh()
    full = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6], [6.0, 5, 4, 3, 2, 1, 0]])  # uneven shards
    local = full.chunk(mesh.size(), -1)[mesh.get_local_rank()]
    yield argmax(local, mesh).double(), full.argmax(-1).double()


def compare_cross_entropy() -> Pairs:
    mesh = make_tp_mesh()
    target = torch.tensor([1, 7, -100])
    yield from compare_function(
        lambda logits: sharded_cross_entropy(logits, target, mesh, label_smoothing=0.1, reduction="none"),
        lambda logits: F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none"),
        [(random_tensor(3, 8) * 4, 1)],
        None,
    )


def compare_logsumexp_and_entropy() -> Pairs:
    mesh = make_tp_mesh()
    for sharded, unsharded in (
        (logsumexp, lambda logits: logits.logsumexp(-1)),
        (entropy, lambda logits: torch.distributions.Categorical(logits=logits).entropy()),
    ):
        logits = random_tensor(3, 8) * 4
        yield from compare_function(partial(sharded, mesh=mesh), unsharded, [(logits, 1)], None)


def compare_regions() -> Pairs:
    mesh = make_tp_mesh()
    group = Group.of(mesh)
    size = mesh.size()

    # The gradient is partial: each rank computes another multiple.
    full = random_tensor(2 * size, 4)
    shard = local_shard(full, 0).clone().requires_grad_()
    gathered = all_gather_to_tp_region(shard, group, 0)
    (gathered * full * (group.rank + 1)).sum().backward()
    yield gathered, full
    yield get_grad(shard), local_shard(full * sum(range(1, size + 1)), 0)

    sent_by_rank = [random_tensor(size, 4) * (rank + 1) for rank in range(size)]
    sent = sent_by_rank[group.rank].clone().requires_grad_()
    received = all_to_all_single(sent, group)
    (received * random_tensor(size, 4)).sum().backward()
    yield received, torch.stack([rows[group.rank] for rows in sent_by_rank])
    yield get_grad(sent), random_tensor(size, 4)[group.rank].expand(size, 4)


# --- a table: module, plan, data, and the dims along which input and output are sharded ----------


def make_mlp(linear: type[nn.Linear] = nn.Linear, *frozen: str) -> Mlp:
    """Make a feed-forward with linears of a class, and frozen parameters."""
    model = Mlp()
    model.up.__class__ = model.down.__class__ = linear
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def make_plan(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    return {"up": ColwiseParallel(**up), "down": RowwiseParallel(**down)}


DATA, IDS = random_tensor(4, 8, 8), torch.tensor([[1, 7, 5, 3], [0, 5, 6, 2], [5, 5, 5, 5], [4, 15, 8, 9]])
IN, OUT = "input_layouts", "output_layouts"
SEQUENCE_PARALLEL = make_plan({IN: SEQUENCE}, {OUT: SEQUENCE}), DATA, 1, 1
TORCHS_PATH = make_plan({IN: LAST, OUT: SEQUENCE}, {IN: SEQUENCE}), DATA, 2
CASES: dict[str, tuple[Any, ...]] = {
    "default": (make_mlp, UP_DOWN, DATA),
    "sequence": (make_mlp, *SEQUENCE_PARALLEL),
    "sequence, gathered again": (
        make_mlp,
        {
            "": SharedInput(input_layouts=SEQUENCE, reshard_after_forward=True),
            **make_plan({}, {OUT: SEQUENCE}),
        },
        DATA,
        1,
        1,
    ),
    "dim 0": (make_mlp, make_plan({IN: Shard(0)}, {OUT: Shard(-3)}), DATA, 0, 0),
    "replicated between": (make_mlp, make_plan({OUT: REPLICATED}, {IN: REPLICATED}), DATA),
    "DTensor between": (make_mlp, make_plan({"use_local_output": False}, {}), DATA),
    "DTensor out": (make_mlp, make_plan({}, {OUT: SEQUENCE, "use_local_output": False}), DATA, None, 1),
    "output features sharded": (make_mlp, make_plan({}, {OUT: LAST}), DATA, None, 2),
    "positive dims": (make_mlp, make_plan({OUT: Shard(2)}, {IN: Shard(2)}), DATA),
    "torch's path": (make_mlp, *TORCHS_PATH),
    "sequence sharded between": (
        make_mlp,
        make_plan({OUT: SEQUENCE}, {IN: SEQUENCE, OUT: SEQUENCE}),
        DATA,
        None,
        1,
    ),
    # A single layer: behind a gather, the backward would read only the local shard of the gradient.
    "split": (partial(nn.Linear, 8, 4), RowwiseParallel(input_layouts=REPLICATED), DATA),
}
for _name, _case in (
    ("default", (UP_DOWN, DATA)),
    ("sequence", SEQUENCE_PARALLEL),
    ("torch's path", TORCHS_PATH),
):
    CASES[f"{_name}, own forward"] = (partial(make_mlp, OwnForward), *_case)
    for _frozen in (("up.weight",), ("down.weight", "up.bias"), ("down.bias", "up.bias", "up.weight")):
        CASES[f"{_name}, {_frozen} frozen"] = (partial(make_mlp, nn.Linear, *_frozen), *_case)
for _padding in (None, 0, 5, -1):
    _make = partial(nn.Embedding, 16, 8, padding_idx=_padding)
    CASES[f"rows, padding {_padding}"] = _make, RowwiseParallel(input_layouts=REPLICATED), IDS
    CASES[f"columns, padding {_padding}"] = _make, ColwiseParallel(), IDS, None, 2
_embedding, _rows = partial(nn.Embedding, 16, 8), partial(RowwiseParallel, input_layouts=REPLICATED)
CASES |= {
    "rows, sequence": (_embedding, _rows(output_layouts=SEQUENCE), IDS, None, 1),
    "rows, ids sharded": (_embedding, RowwiseParallel(input_layouts=SEQUENCE), IDS, 1),
    "rows, DTensor out": (_embedding, _rows(use_local_output=False), IDS),
    "rows, own forward": (NormalizedEmbedding, {"": RowwiseEmbedding(input_layouts=Replicate())}, IDS % 8),
    "columns, gathered": (_embedding, ColwiseParallel(output_layouts=REPLICATED), IDS),
    "columns, sequence": (_embedding, ColwiseParallel(output_layouts=SEQUENCE), IDS, None, 1),
    "heads": (make_latent_attention, HEADS, random_tensor(2, 3, 8)),
    "biases of shared heads": (
        partial(Attention, 32, 8, 1, bias=True),
        make_attention_plan(8, 1),
        random_tensor(2, 5, 32),
    ),
    "some shared features": (
        make_shared_features,
        {"shared": AllReduceOutputGradient(slice(3, 4)), **UP_DOWN},
        random_tensor(2, 3, 4),
    ),
    "group norm": (
        make_group_norm,
        {"norm": LocalParameters({"weight": Shard(0), "bias": Shard(0)}), **UP_DOWN},
        random_tensor(6, 4),
    ),
    "partial output": (
        make_partial_output,
        {"": AllReduceOutput(), "inner": ColwiseParallel()},
        random_tensor(2, 3, 4),
    ),
    "experts": (
        make_dense_mixture,
        {"experts": ExpertTensorParallel({"up": Shard(1), "down": Shard(2)})},
        random_tensor(2, 3, 4),
    ),
    "dispatched tokens": (
        make_routed_mixture,
        {"experts": UnscaledExpertParallel()},
        random_tensor(16, 4),
        0,
        0,
    ),
}
for _sequence in (False, True):
    for _heads in (2, 1):
        _llama = partial(Llama, dim=16, n_heads=4, n_kv_heads=_heads, hidden=12, layers=1)
        _plan = make_llama_plan(4, _heads, sequence_parallel=_sequence)
        CASES[f"llama, {_heads}, {_sequence}"] = (_llama, _plan, IDS)
CHECKS: dict[str, Callable[[], Pairs]] = {
    name: partial(compare_module, *case) for name, case in CASES.items()
}
for _name in ("default", "sequence", "torch's path"):
    CHECKS[f"{_name}, DTensor in"] = partial(compare_module, *CASES[_name], as_dtensor=True)
CHECKS |= {
    "argmax": compare_argmax,
    "cross entropy": compare_cross_entropy,
    "logsumexp and entropy": compare_logsumexp_and_entropy,
    "regions": compare_regions,
}


def run_check(check: Callable[[], Pairs]) -> float:
    """Return the largest difference in one check on one rank; infinity if shapes differ."""
    largest = 0.0
    for actual, expected in check():
        largest = max(largest, compute_difference(actual, expected))
        if math.isinf(largest):
            break
    return largest
