"""Train a small Llama-style language model on bytes, over pipeline x data x context x tensor x expert parallel ranks.

    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2 --checkpoint checkpoints
    torchrun --nproc-per-node 4 examples/train.py --tp 4 --checkpoint checkpoints --steps 80     # resumes
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --cp 2 --tp 2 --verify
    torchrun --nproc-per-node 8 examples/train.py --tp 2 --moe --ep 4 --verify
    python examples/train.py --steps 20

The batch and the order of the data do not depend on the layout, so neither does the loss; ``--verify`` shows it.
Here is what any script has: options, model, data, the loop. ``parallel.py`` has the parallel part.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from parallel import HEAD, IGNORED, Step, make_mesh, shard_model
from torch import Tensor, nn

from namedmesh import NamedMesh, NamedMeshError, training

VOCABULARY, EXPERTS, CHOSEN = 256, 8, 2  # a token is a byte
TOLERANCE = 1e-4  # of losses in nats, for --verify


# --- the command line


def option(default: Any, words: str) -> Any:
    return field(default=default, metadata={"help": words})


@dataclass(frozen=True)
class Settings:
    """One field for each option; ``save_every`` is ``--save-every``."""

    pp: int = option(1, "pipeline stages")
    dp: int = option(-1, "data-parallel ranks; -1: the remaining ranks")
    cp: int = option(1, "context-parallel ranks: each has a shard of every sequence")
    tp: int = option(1, "tensor-parallel ranks")
    moe: bool = option(False, "a mixture of experts in place of each feed-forward network")
    ep: int = option(1, "expert-parallel ranks, with --moe")
    etp: int = option(1, "ranks that share each expert's features, with --moe: 1, or as many as --tp")
    steps: int = option(12, "where training ends, counted from the very first step")
    batch: int = option(32, "sequences in a step, over all ranks")
    seq: int = option(64, "bytes in a sequence")
    dim: int = option(128, "width of the model")
    layers: int = option(4, "number of layers")
    lr: float = option(0.0, "highest learning rate; 0 for 0.008, and with --moe for 0.002")
    clip: float = option(1.0, "largest norm of the gradients that is not scaled down")
    microbatches: int = option(0, "parts of a rank's batch, whose gradients are added; 0 for one a stage")
    recompute: bool = option(False, "keep only what goes into a layer, and compute the rest again")
    compile: bool = option(False, "compile each layer")
    evaluate_every: int = option(0, "steps between two looks at the loss on other samples; 0 for none")
    data: str = option(sysconfig.get_paths()["stdlib"], "a directory of files to learn from")
    checkpoint: str = option(
        "", "directory to save to; if it has checkpoints, the last one is where to begin"
    )
    save_every: int = option(0, "steps between checkpoints; 0 to save at the end only")
    verify: bool = option(False, "float64; repeat the run in one process and compare the losses")
    device: str = option("", "cpu, cuda, ... (default: what torch finds)")

    @property
    def dtype(self) -> torch.dtype:
        """A comparison in less than double precision sees rounding alone."""
        return torch.float64 if self.verify else torch.float32


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Return the settings that the command line asks for."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for each in fields(Settings):
        kind: dict[str, Any] = {"type": type(each.default), "default": each.default}
        if each.default is False:
            kind = {"action": "store_true"}
        parser.add_argument("--" + each.name.replace("_", "-"), help=each.metadata["help"], **kind)
    return Settings(**vars(parser.parse_args(arguments)))


# --- the model, in plain torch


class Attention(nn.Module):
    """Causal self-attention with rotary positions; two query heads share one of keys and values."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = nn.Linear(dim, dim // 2, bias=False), nn.Linear(dim, dim // 2, bias=False)
        # Another function where a rank has a part of each sequence only.
        self.attend: Callable[..., Tensor] = partial(
            F.scaled_dot_product_attention, is_causal=True, enable_gqa=True
        )

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        # -1: under tensor parallelism this rank has only some of the heads.
        query, key, value = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.wq, self.wk, self.wv)
        )
        mixed = self.attend(rotate(query, positions), rotate(key, positions), value)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Gated feed-forward networks, stacked; tokens come sorted by expert."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(EXPERTS, dim, hidden))
        self.up = nn.Parameter(torch.empty(EXPERTS, dim, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, hidden, dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return one row for each token; ``counts`` says how many are each expert's."""
        parts = zip(tokens.split(counts.tolist()), self.gate, self.up, self.down, strict=True)
        return torch.cat([(F.silu(part @ gate) * (part @ up)) @ down for part, gate, up, down in parts])


class MixtureOfExperts(nn.Module):
    """Each token goes to the experts that its router scores highest."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, EXPERTS, bias=False), Experts(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        token = order // CHOSEN
        output = self.experts(tokens[token], counts) * scores.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token, output).view_as(x)


class Block(nn.Module):
    """One layer: attention and feed-forward network, each behind a norm and beside a residual path."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(settings.dim, eps=1e-5) for _ in range(2))
        self.attention = Attention(settings.dim)
        network = MixtureOfExperts if settings.moe else FeedForward
        self.feed_forward = network(settings.dim, 3 * settings.dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions=positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The model, or the layers of it that one pipeline stage runs; every parameter has the same name in all of them."""

    def __init__(self, settings: Settings, layers: Sequence[int]) -> None:
        super().__init__()
        first, last = layers[0] == 0, layers[-1] == settings.layers - 1
        self.tok_embeddings = nn.Embedding(VOCABULARY, settings.dim) if first else None
        # A dict keyed by the layer's number, not a list: "layers.3" is the same layer in every part.
        self.layers = nn.ModuleDict({str(index): Block(settings) for index in layers})
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5) if last else None
        self.output = nn.Linear(settings.dim, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn tokens (or what the part before returned) into logits (or what the part behind expects)."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions=positions)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of features of ``x`` by an angle that grows with the position: rotary positions."""
    angles = positions[:, None] / 10_000.0 ** (torch.arange(0, HEAD, 2, device=x.device) / HEAD)
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def new_model(settings: Settings, layers: Sequence[int] | None = None) -> Llama:
    """Return the model, or some of its layers, with first weights that do not depend on who makes it."""

    def normal(name: str, _: Tensor) -> tuple[float, float]:
        """Return the mean and the deviation of a parameter's first weights."""
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if name == "tok_embeddings.weight":  # not smaller than what the first layers add to it
            return 0.0, 0.5
        # These add to the residual path, twice a layer: keep its size independent of the depth.
        adds = name.endswith(("wo.weight", "w2.weight", "experts.down"))
        return 0.0, 0.02 / math.sqrt(2 * settings.layers) if adds else 0.02

    model = Llama(settings, layers or range(settings.layers))
    training.init_parameters(model, seed=0, distribution=normal)
    return model.to(settings.dtype)


def make_model(settings: Settings, mesh: NamedMesh) -> Llama:
    """Return this rank's part of the model."""
    model = new_model(settings, training.stage_layers(settings.layers, mesh)).to(mesh.device)
    shard_model(model, settings, mesh)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW that lets the matrices decay, but not the norms, with one call for each group."""
    groups = []
    # Norms, matrices, and stacks of experts, on ranks of their own.
    for ndim, decay in ((1, 0.0), (2, 0.1), (3, 0.1)):
        if parameters := [each for each in model.parameters() if each.ndim == ndim]:
            groups.append({"params": parameters, "weight_decay": decay})
    # Large eps: a gradient as small as its own rounding error should not make a full step.
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, settings: Settings, step: int) -> None:
    """Set the learning rate of a step, which does not depend on where training ends: so it can be resumed."""
    # Experts do not train stably at a higher rate: rounding alone grows from step to step, in one process, too.
    highest = settings.lr or (0.002 if settings.moe else 0.008)
    for group in optimizer.param_groups:
        group["lr"] = highest * min((step + 1) / 10, math.sqrt(10 / (step + 1)))


# --- the data


def read_text(directory: str) -> Tensor:
    """Return the bytes of all files in a directory."""
    files = sorted(each for each in Path(directory).iterdir() if each.is_file())
    return torch.frombuffer(bytearray().join(each.read_bytes() for each in files), dtype=torch.uint8)


def draw_batch(
    text: Tensor, settings: Settings, step: int, rows: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return some of the sequences of a step, and their targets: target i is the byte after input i."""
    # Every rank draws the starts of the whole batch, so that the batch is the same however it is divided.
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - settings.seq, (settings.batch,), generator=generator)[rows]
    windows = text[starts[:, None] + torch.arange(settings.seq + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- the loop


def train(settings: Settings, text: Tensor, mesh: NamedMesh) -> list[float]:
    """Train from the start or the last checkpoint, and save: the loss of every step."""
    interrupted = torch.zeros(1, device=mesh.device)
    for each in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what a cluster sends: stop after a step
        signal.signal(each, lambda *_: interrupted.fill_(1) and None)
    training.seed_all(0, mesh)
    show = print if mesh.global_rank == 0 else lambda *_, **__: None
    show(f"{mesh.layout} on {mesh.device.type}, {settings.dtype}")
    for stage in range(settings.pp):
        layers = training.stage_layers(settings.layers, None, stage=stage, stages=settings.pp)
        show(f"  layers {layers[0]}-{layers[-1]}: ranks", *mesh.layout.where(pp=stage))
    show("making the model, and the first step, which sets up what the others use ...", flush=True)
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model)
    run_step = Step(model, mesh, microbatches=settings.microbatches or settings.pp)
    checkpoints = training.CheckpointManager(settings.checkpoint, mesh)
    # The next batch is a function of the step, so the step is the position in the data.
    first = checkpoints.resume_or_start(model, optimizer)["step"] if settings.checkpoint else 0
    share = training.sampler_kwargs(mesh)
    rows = slice(share["rank"], None, share["num_replicas"])
    losses: list[float] = []
    throughput = training.Throughput(mesh)
    for step in range(first, settings.steps):
        set_rate(optimizer, settings, step)
        batch = draw_batch(text, settings, step, rows)
        if step == first:
            training.check_same_batch(batch, mesh)
        losses.append(run_step(*batch).item())
        # The norm is the same on every rank, and so is the error where it is no number: choose a lower --lr.
        training.clip_grad_norm_(model.parameters(), settings.clip, mesh, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        throughput.update(settings.batch * settings.seq)
        if step == first or is_due(step, settings.steps, max(1, settings.steps // 16)):
            line = (
                f"step {step + 1}/{settings.steps}  loss {losses[-1]:.3f} nats a byte  {throughput.summary()}"
            )
            show(line.rstrip(), flush=True)
        if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
            evaluated = run_step(*draw_batch(text, settings, -1, rows), evaluate=True).item()
            show(f"loss on other samples after step {step + 1}: {evaluated:.3f}", flush=True)
        dist.all_reduce(stopping := interrupted.clone())  # any rank
        if settings.checkpoint and (stopping or is_due(step, settings.steps, settings.save_every)):
            show("saved", checkpoints.save(step + 1, model, optimizer).result(), flush=True)
        if stopping:
            raise SystemExit(130)
    if settings.checkpoint:
        show(f"to continue, in any layout: --checkpoint {settings.checkpoint} --steps N", flush=True)
    return losses


def is_due(step: int, steps: int, every: int) -> bool:
    """Return whether something that is done every some steps, and at the end, is due when ``step`` is done."""
    return step + 1 == steps or (every > 0 and (step + 1) % every == 0)


def reference_losses(settings: Settings, text: Tensor, device: torch.device) -> list[float]:
    """Return the loss of every step, from the first one on, of an unsharded model on whole batches."""
    model = new_model(settings).to(device)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(settings.steps):
        set_rate(optimizer, settings, step)
        inputs, targets = (each.to(device) for each in draw_batch(text, settings, step))
        logits = model(inputs, torch.arange(settings.seq, device=device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def verify(settings: Settings, text: Tensor, device: torch.device, losses: Sequence[float]) -> bool:
    """Repeat the run on rank 0 alone, without any of the parallel machinery."""
    print("verifying in one process ...", flush=True)
    expected = reference_losses(settings, text, device)
    last = expected[-len(losses) :]  # this run may have begun at a checkpoint
    largest = max(abs(one - other) for one, other in zip(losses, last, strict=True))
    print(f"largest difference of a loss in {len(losses)} steps: {largest:.1e}; allowed: {TOLERANCE:.0e}")
    return largest <= TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    settings = parse(arguments)
    try:
        mesh = make_mesh(settings)
        text = read_text(settings.data)
        losses = train(settings, text, mesh)
    except NamedMeshError as error:  # one message on each host, which may be cut off from the others
        sys.exit(f"cannot train: {error}" if os.environ.get("LOCAL_RANK", "0") == "0" else 0)
    agree = True
    if mesh.global_rank == 0:
        agree = not settings.verify or not losses or verify(settings, text, mesh.device, losses)
    # Together: a rank that left early would take the store with it that the others still talk to.
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
