"""A training step of a Llama under tensor parallelism, against the same one by hand: the processor's time of a rank.

    python benchmarks/tp_llama.py [--rounds N]

"By hand" is the least that tensor parallelism in PyTorch takes: plain tensors, four autograd functions and no checks. A
step is forward, loss over the sharded vocabulary, backward, clipping of the norm, and AdamW. Beside it torch's own styles.
Of four gloo ranks with one thread each; also with four micro-batches a step, and with FSDP2 over two times two ranks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import paired
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from ranks import run_ranks
from test_tp_collectives import TORCH, llama
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from tp_models import Llama, llama_plan

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


# --- by hand ------------------------------------------------------------------------------------------------


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
        ctx.group, size = group, group.size()
        out = x.new_empty(x.shape[0] * size, *x.shape[1:])
        dist.all_gather_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        out = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


class _Scatter(torch.autograd.Function):
    """Sum parts, and keep a shard of dim 0; join the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, size = group, group.size()
        out = x.new_empty(x.shape[0] // size, *x.shape[1:])
        dist.reduce_scatter_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = ctx.group.size()
        out = gradient.new_empty(gradient.shape[0] * size, *gradient.shape[1:])
        dist.all_gather_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


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


# --- contestants --------------------------------------------------------------------------------------------


def contestants(kind: str, mesh: Any) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Return each contestant's model, and a function that makes its loss of ids."""
    torch.manual_seed(0)
    whole = Llama(**SIZES)
    sequence = "sequence" in kind
    between: Any = Shard(1) if sequence else Replicate()
    models: dict[str, Any] = {
        "by hand": ByHand(whole, mesh.group("tp"), sequence=sequence),
        "namedmesh": parallelize(
            copy.deepcopy(whole), mesh["tp"], llama_plan(sequence_parallel=sequence, loss_parallel=True)
        ),
        "torch's styles": parallelize_module(
            copy.deepcopy(whole), mesh["tp"], llama(*TORCH, between, prepared=True, loss=True)
        ),
    }
    if "FSDP2" in kind:
        for model in models.values():
            inner = getattr(model, "whole", model)
            for layer in inner.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])

    def by_hand(ids: Tensor) -> Tensor:
        model = models["by hand"]
        found: Tensor = model.loss(model(ids), ids.roll(-1, 1))
        return found

    def ours(ids: Tensor) -> Tensor:
        return cross_entropy(models["namedmesh"](ids).to_local(), ids.roll(-1, 1), mesh["tp"])

    def torchs(ids: Tensor) -> Tensor:
        logits = models["torch's styles"](ids)
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())

    losses = {"by hand": by_hand, "namedmesh": ours, "torch's styles": torchs}
    return {name: (models[name], losses[name]) for name in models}


def step(  # noqa: PLR0917  one call
    name: str, model: Any, loss_of: Any, optimizer: Any, batches: list[Tensor], mesh: Any
) -> float:
    """Take a step; return its loss. Without FSDP2 it clips, under which by hand would need a function for that, too."""
    total = 0.0
    for ids in batches:
        if name == "torch's styles":
            with loss_parallel():
                loss = loss_of(ids) / len(batches)
                loss.backward()
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        else:
            loss = loss_of(ids) / len(batches)
            loss.backward()
        total += loss.item()
    if name == "by hand":
        model.finish()
    if mesh.size("dp") == 1:
        if name == "by hand":
            model.clip(1.0)
        else:
            clip_grad_norm_(model.parameters(), 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    return total


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, which takes plain and distributed parameters in groups of their own."""
    kinds: dict[type, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    return torch.optim.AdamW([{"params": some} for some in kinds.values()], lr=1e-3, fused=True)


KINDS = {
    "a step": (1, 4),
    "a step, sequence parallel": (1, 4),
    "4 micro-batches, sequence parallel": (4, 4),
    "FSDP2 2 x 2": (1, 2),
}


def measure(kind: str, rounds: int) -> dict[str, list[float]]:
    """Return this rank's seconds of the processor of every step, by contestant."""
    torch.set_num_threads(1)
    micro_batches, tp = KINDS[kind]
    mesh = namedmesh.init_mesh(dp=-1, tp=tp, device="cpu")
    found = contestants(kind, mesh)
    optimizers = {name: optimizer_of(model) for name, (model, _) in found.items()}
    torch.manual_seed(1 + mesh.rank("dp"))
    batches = [torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)) for _ in range(micro_batches)]
    seconds: dict[str, list[float]] = {name: [] for name in found}
    losses: dict[str, list[float]] = {name: [] for name in found}
    for turn, order in enumerate(paired.turns(list(found), rounds + 3)):
        for name in order:
            dist.barrier()
            start = time.process_time()
            losses[name].append(step(name, *found[name], optimizers[name], batches, mesh))
            if turn > 2:  # noqa: PLR2004  the first ones warm up
                seconds[name].append(time.process_time() - start)
    for name in found:  # the same work, or the figures mean nothing
        torch.testing.assert_close(
            torch.tensor(losses[name]), torch.tensor(losses["by hand"]), rtol=1e-3, atol=0
        )
    return seconds


def main() -> None:
    """Print one line for each kind of step."""
    parser = argparse.ArgumentParser(description="A Llama's training step under tensor parallelism, on gloo.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kind", choices=list(KINDS), help="only this one")
    arguments = parser.parse_args()
    print(f"{'':36} {'by hand':>9} {'namedmesh':>9} {'torch':>9}  {'/by hand':>8} {'/torch':>8}")
    for kind in [arguments.kind] if arguments.kind else KINDS:
        ranks = run_ranks(RANKS, measure, kind, arguments.rounds, timeout=600)
        seconds = {
            name: [statistics.mean(rank[name][i] for rank in ranks) for i in range(arguments.rounds)]
            for name in ranks[0]
        }
        cells = [f"{statistics.median(seconds[name]) * 1e3:9.1f}" for name in seconds]
        ratios = [
            f"{statistics.median(a / b for a, b in zip(seconds['namedmesh'], seconds[other], strict=True)):8.2f}"
            for other in ("by hand", "torch's styles")
        ]
        print(f"{kind:36} {' '.join(cells)}  {' '.join(ratios)}")


if __name__ == "__main__":
    main()
