"""A training step of a Llama under tensor parallelism, against the same one by hand: the processor's time of a rank.

    python benchmarks/tp_llama.py [--rounds N]

"By hand" is the least that tensor parallelism in PyTorch takes: plain tensors, four autograd functions and no checks. A
step is forward, loss over the sharded vocabulary, backward, clipping of the norm, and AdamW. Beside it torch's own styles.
Of four gloo ranks with one thread each; also with four micro-batches a step, and with FSDP2 over two times two ranks.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch_plans import TORCH, make_torchs_plan
from tp_models import Llama, make_llama_plan

import namedmesh
from namedmesh.tensor_parallel import cross_entropy, parallelize
from namedmesh.training import clip_grad_norm_

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, VOCABULARY, BATCH, SEQUENCE = 4, 1024, 4, 64
SIZES: dict[str, Any] = {
    "vocab": VOCABULARY,
    "dim": 256,
    "n_heads": 8,
    "n_kv_heads": 4,
    "hidden": 768,
    "layers": 4,
}


class _Copy(torch.autograd.Function):
    """Pass a whole tensor; sum its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """Sum parts; pass the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Join shards of dim 0; sum the gradient, and keep a shard of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return joined(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Sum parts, and keep a shard of dim 0; join the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return joined(gradient, ctx.group), None


def joined(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=group)
    return out


def summed(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous(), group=group)
    return out


# torch leaves apply without types.
_copy: Callable[[Tensor, Any], Tensor] = _Copy.apply
_reduce: Callable[[Tensor, Any], Tensor] = _Reduce.apply
_gather: Callable[[Tensor, Any], Tensor] = _Gather.apply
_scatter: Callable[[Tensor, Any], Tensor] = _Scatter.apply


class ByHand(nn.Module):
    """The Llama of the tests with this rank's shards as plain parameters; the sequence first where it is sharded."""

    def __init__(self, whole: Llama, group: Any, *, sequence: bool) -> None:
        super().__init__()
        self.group, self.rank, self.size, self.sequence = group, group.rank(), group.size(), sequence
        self.whole = copy.deepcopy(whole)
        rows = ("wo", "w2")
        for name, module in self.whole.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                dim = 1 if name.rpartition(".")[2] in rows else 0
                shard = module.weight.detach().chunk(self.size, dim)[self.rank].clone()
                module.weight = nn.Parameter(shard)

        for layer in self.whole.layers:
            layer.forward = partial(self.block, layer)

    def block(self, layer: Any, x: Tensor) -> Tensor:
        """Return the output of a layer."""
        x = x + self.leave(layer.attention(self.enter(layer.attention_norm(x))))
        return x + self.leave(layer.feed_forward(self.enter(layer.ffn_norm(x))))

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole input of column layers, sequence in dim 1."""
        return _gather(x, self.group).transpose(0, 1) if self.sequence else _copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of row layers' parts, or this rank's part of the sequence in dim 0."""
        if self.sequence:
            return _scatter(x.transpose(0, 1), self.group)
        return _reduce(x, self.group)

    def forward(self, ids: Tensor) -> Tensor:
        """Return this rank's part of the logits."""
        model: Any = self.whole
        rows = model.tok_embeddings.weight.shape[0]
        local = ids - self.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), model.tok_embeddings.weight)
        x = self.leave(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))
        for layer in model.layers:
            x = layer(x)
        logits: Tensor = model.output(self.enter(model.norm(x)))
        return logits

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        part = logits.shape[-1]
        highest = logits.detach().amax(-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, self.group)
        shifted = logits - highest.unsqueeze(-1)
        local = target - self.rank * part
        elsewhere = (local < 0) | (local >= part)
        picked = shifted.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        sums = torch.stack([picked.masked_fill(elsewhere, 0), shifted.exp().sum(-1)])
        of_target, total = _reduce(sums, self.group).unbind()
        return (total.log() - of_target).mean()

    def finish(self) -> None:
        """Sum the parts of the norms' gradients."""
        if self.sequence:
            norms = [parameter for name, parameter in self.named_parameters() if "norm" in name]
            flat = torch.cat([parameter.grad for parameter in norms if parameter.grad is not None])
            dist.all_reduce(flat, group=self.group)
            for parameter, part in zip(norms, flat.split([norm.numel() for norm in norms]), strict=True):
                parameter.grad = part

    def clip(self, largest: float) -> None:
        """Clip by the norm over all ranks: norms count once."""
        named = [(name, parameter.grad) for name, parameter in self.named_parameters()]
        shards = [grad for name, grad in named if "norm" not in name and grad is not None]
        whole = [grad for name, grad in named if "norm" in name and grad is not None]
        square = nn.utils.get_total_norm(shards).square()
        dist.all_reduce(square, group=self.group)
        norm = (square + nn.utils.get_total_norm(whole).square()).sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), largest, norm)


KINDS = {
    "a step": (1, 4),
    "a step, sequence parallel": (1, 4),
    "4 micro-batches, sequence parallel": (4, 4),
    "FSDP2 2 x 2": (1, 2),
}


def step(model: Any, loss_of: Any, optimizer: Any, batches: list[Tensor], mesh: Any) -> float:
    """Take a step; return its loss. Without FSDP2 it clips, under which by hand would need a function for that, too."""
    total = 0.0
    for ids in batches:
        with loss_parallel():  # which changes what works on DTensors only
            loss = loss_of(model(ids), ids.roll(-1, 1)) / len(batches)
            loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    by_hand = isinstance(model, ByHand)
    if by_hand:
        model.finish()
    if mesh.size("dp") == 1:
        clip = model.clip if by_hand else partial(clip_grad_norm_, model.parameters(), mesh=mesh)
        clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, which takes plain and distributed parameters in groups of their own."""
    kinds: dict[type, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=1e-3, fused=True)


def contestants(kind: str) -> dict[str, Callable[[], float]]:
    micro_batches, tp = KINDS[kind]
    mesh = namedmesh.init_mesh(dp=-1, tp=tp, device="cpu")
    torch.manual_seed(0)
    whole = Llama(**SIZES)
    sequence = "sequence" in kind
    between: Any = Shard(1) if sequence else Replicate()
    plan = make_llama_plan(sequence_parallel=sequence, loss_parallel=True)
    models: dict[str, Any] = {
        "namedmesh": parallelize(copy.deepcopy(whole), mesh["tp"], plan),
        "by hand": ByHand(whole, mesh.group("tp"), sequence=sequence),
        "torch's styles": parallelize_module(
            copy.deepcopy(whole), mesh["tp"], make_torchs_plan(*TORCH, between, prepared=True, loss=True)
        ),
    }
    if "FSDP2" in kind:
        for model in models.values():
            for layer in getattr(model, "whole", model).layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    losses = {
        "namedmesh": lambda logits, ids: cross_entropy(logits.to_local(), ids, mesh["tp"]),
        "by hand": models["by hand"].loss,
        "torch's styles": lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    }
    torch.manual_seed(1 + mesh.rank("dp"))
    batches = [torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for _ in range(micro_batches)]
    return {
        name: partial(step, model, losses[name], optimizer_of(model), batches, mesh)
        for name, model in models.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A Llama's training step under tensor parallelism, on gloo.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    print(f"{paired.machine()}; {RANKS} ranks, {rounds} rounds; ms of the processor's time")
    for kind in KINDS:
        paired.show(kind, paired.on_ranks(RANKS, rounds, contestants, kind, clock=time.process_time))


if __name__ == "__main__":
    main()
