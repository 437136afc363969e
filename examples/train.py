"""Train a small Llama-style language model on bytes, over pipeline x data x context x tensor x expert parallel ranks.

    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --cp 2 --tp 2 --verify
    torchrun --nproc-per-node 8 examples/train.py --tp 2 --moe --ep 4
    torchrun --nproc-per-node 4 examples/train.py --tp 4 --resume checkpoints --steps 200
    python examples/train.py --steps 20

The batch and the order of the data do not depend on the layout, so neither does the loss; ``--verify`` shows it.
Here is what any script has: options, model, data, the loop. ``parallel.py`` is the part that knows of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print(f"importing torch, world size {os.environ.get('WORLD_SIZE', '1')} ...", flush=True)

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from parallel import IGNORED, Step, make_mesh, picture, shard_model
from torch import Tensor, nn

import namedmesh
from namedmesh import CheckpointError, Layout, LayoutError, NamedMesh, NamedMeshError, TrainingError, training

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
TOLERANCE = 1e-4  # nats
LINES = 15  # of progress, about
VOCABULARY, EXPERTS, CHOSEN = 256, 8, 2  # a token is a byte


# --- the command line


def option(default: object, words: str, **more: Any) -> Any:
    """Return a field that is also an option of the command line, explained in ``words``."""
    return field(default=default, metadata={"help": words, "type": type(default), **more})


@dataclass(frozen=True)
class Settings:
    """One field for each option; ``kv_heads`` is ``--kv-heads``."""

    pp: int = option(1, "pipeline stages")
    dp: int = option(-1, "data-parallel ranks; -1 for whatever is left")
    cp: int = option(1, "context-parallel ranks: each has a part of every sequence")
    tp: int = option(1, "tensor-parallel ranks")
    moe: bool = option(False, "a mixture of experts in place of each feed-forward network")
    ep: int = option(1, "expert-parallel ranks, with --moe")
    etp: int = option(1, "ranks that share each expert's features, with --moe: 1, or as many as --tp")
    steps: int = option(80, "where training ends, counted from the very first step")
    batch: int = option(32, "sequences in a step, over all ranks")
    seq: int = option(64, "bytes in a sequence")
    dim: int = option(128, "width of the model")
    layers: int = option(4, "number of layers")
    heads: int = option(16, "attention heads")
    kv_heads: int = option(8, "heads of keys and values, shared by the attention heads")
    lr: float = option(0.008, "highest learning rate")
    clip: float = option(1.0, "largest norm of the gradients that is not scaled down")
    microbatches: int = option(0, "parts of a rank's batch, whose gradients are added; 0 for one a stage")
    recompute: bool = option(False, "keep only what goes into a layer, and compute the rest again")
    compile: bool = option(False, "compile each layer")
    evaluate_every: int = option(0, "steps between two looks at the loss on other text; 0 for none")
    seed: int = option(0, "of the first weights and of the order of the data")
    data: str | None = option(None, "a file or directory to learn from (default: Python's library)", type=str)
    checkpoint: str = option("checkpoints", "directory to save to; '' to save nothing")
    save_every: int = option(0, "steps between checkpoints; 0 to save at the end only")
    keep: int = option(3, "how many of the checkpoints up to the last one stay; 0 for all")
    timeout: float = option(600.0, "seconds that ranks wait for each other, before one that hangs is named")
    resume: str | None = option(
        None, "a checkpoint, or a directory; auto: --checkpoint, if it has any", type=str
    )
    verify: bool = option(False, "repeat the run in one process and compare the losses")
    dtype: str | None = option(None, "default: float32; float64 to verify", type=str, choices=list(DTYPES))
    device: str | None = option(None, "cpu, cuda, ... (default: what torch finds)", type=str)

    @property
    def feed_forward(self) -> int:
        """The inner width of the feed-forward network: 8/3 of ``dim``, rounded up so that 16 ranks divide it."""
        return -(-8 * self.dim // (3 * 16)) * 16

    @property
    def precision(self) -> torch.dtype:
        """What everything is computed in; a comparison in less than double precision sees rounding alone."""
        return DTYPES[self.dtype or ("float64" if self.verify else "float32")]

    def problems(self, world_size: int) -> list[str]:
        """Return what is wrong with these settings in a world of this size, one sentence each."""
        above = ("steps", "batch", "seq", "dim", "layers", "heads", "kv_heads", "ep", "etp", "lr", "clip")
        found = [
            f"--{name.replace('_', '-')} must be a number above 0, not {getattr(self, name)}"
            for name in above
            if not 0 < getattr(self, name) < math.inf
        ]
        try:
            layout = Layout(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, world_size=world_size)
        except LayoutError as error:
            return [*found, *error.problems]
        # A number that is out of range is reported once, not again for what it does not divide.
        return found or self._misfits(**dict(layout.items()), world_size=world_size)

    def _misfits(self, pp: int, dp: int, cp: int, tp: int, world_size: int) -> list[str]:
        found = []
        microbatches = self.microbatches or pp
        if self.layers < pp:
            found.append(f"{self.layers} layers cannot fill pp={pp} stages; give at least one a stage")
        if microbatches < pp:
            found.append(f"--microbatches {microbatches} is too few for pp={pp}; give one a stage")
        if self.ep * self.etp > 1 and not self.moe:
            found.append("--ep and --etp are for experts; give --moe, too")
        if self.etp not in {1, tp}:
            found.append(f"--etp {self.etp} must be 1 or tp={tp}: these ranks have the same tokens")
        parts = (2 * cp if cp > 1 else 1) * tp  # two chunks of a sequence for each cp rank
        divided = (
            ("--dim", self.dim, 2 * self.heads, f"2 * --heads {self.heads}"),  # rotary: pairs of features
            ("--heads", self.heads, self.kv_heads, f"--kv-heads {self.kv_heads}"),
            ("--batch", self.batch, dp * microbatches, f"dp={dp} times {microbatches} microbatches"),
            ("--seq", self.seq, parts, f"{parts}, for cp={cp} and tp={tp}"),
            ("--heads", self.heads, tp, f"tp={tp}"),
            ("--kv-heads", self.kv_heads, tp, f"tp={tp}"),
            ("the vocabulary", VOCABULARY, tp, f"tp={tp}"),
            ("the feed-forward width", self.feed_forward, tp, f"tp={tp}"),
            ("the number of experts", EXPERTS, self.ep, f"ep={self.ep}"),
            ("the number of ranks of a stage", world_size // pp, self.ep * self.etp, "ep times etp"),
        )
        return found + [
            f"{name} {size} is not divisible by {words}; the next that is: {-(-size // divisor) * divisor}"
            for name, size, divisor, words in divided
            if size % divisor
        ]


class _Parser(argparse.ArgumentParser):
    """A parser of which only rank 0 speaks, and only rank 0 fails: one message, not one for each rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        raise SystemExit(0)


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Return the settings that the command line asks for."""
    parser = _Parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    for item in fields(Settings):
        name, about = "--" + item.name.replace("_", "-"), dict(item.metadata)
        if about["type"] is bool:
            parser.add_argument(name, action="store_true", help=about["help"])
        else:
            parser.add_argument(name, default=item.default, **about)
    return Settings(**vars(parser.parse_args(arguments)))


# --- the model, in plain torch


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share one key and value head."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, self.head_dim = settings.dim, settings.dim // settings.heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, settings.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, settings.kv_heads * self.head_dim, bias=False)
        # Another function where a rank has a part of each sequence only.
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Mix the positions of ``x``, of shape (batch, sequence, dim)."""
        # -1: under tensor parallelism this rank has only some of the heads.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.wq, self.wk, self.wv)
        )
        mixed = self.attend(rotate(query, positions), rotate(key, positions), value)
        joined: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return joined


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.w1 = nn.Linear(settings.dim, settings.feed_forward, bias=False)
        self.w3 = nn.Linear(settings.dim, settings.feed_forward, bias=False)
        self.w2 = nn.Linear(settings.feed_forward, settings.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` on its own."""
        transformed: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return transformed


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

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.router = nn.Linear(settings.dim, EXPERTS, bias=False)
        self.experts = Experts(settings.dim, settings.feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` on its own."""
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
        self.attention_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.attention = Attention(settings)
        self.ffn_norm = nn.RMSNorm(settings.dim, eps=1e-5)
        self.feed_forward = MixtureOfExperts(settings) if settings.moe else FeedForward(settings)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return one step of refinement of ``x``, of shape (batch, sequence, dim)."""
        x = x + self.attention(self.attention_norm(x), positions=positions)
        refined: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return refined


class Llama(nn.Module):
    """The model, or the layers of it that one pipeline stage runs; every parameter has the same name in all of them."""

    def __init__(self, settings: Settings, layers: Iterable[int] | None = None) -> None:
        super().__init__()
        here = list(range(settings.layers) if layers is None else layers)
        first, last = here[0] == 0, here[-1] == settings.layers - 1
        self.tok_embeddings = nn.Embedding(VOCABULARY, settings.dim) if first else None
        # A dict keyed by the layer's number, not a list: "layers.3" is the same layer in every part.
        self.layers = nn.ModuleDict({str(index): Block(settings) for index in here})
        self.norm = nn.RMSNorm(settings.dim, eps=1e-5) if last else None
        self.output = nn.Linear(settings.dim, VOCABULARY, bias=False) if last else None
        self.positions: Tensor | None = None  # of the tokens in their sequence; from 0 on where it is None

    def forward(self, x: Tensor) -> Tensor:
        """Turn tokens (or what the part before returned) into logits (or what the part behind expects)."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions=self.positions)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of each position to itself and those before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turn each pair of features of ``x`` by an angle that grows with the position: rotary positions."""
    sequence, head_dim = x.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    angles = (torch.arange(sequence, device=x.device) if positions is None else positions)[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def new_model(settings: Settings, layers: Iterable[int] | None = None) -> Llama:
    """Return the model, or some of its layers, with first weights that do not depend on who makes it."""

    def normal(name: str, _: Tensor) -> tuple[float, float]:
        """Return the mean and the deviation of a parameter's first weights, by its name."""
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if name == "tok_embeddings.weight":  # not smaller than what the first layers add to it
            return 0.0, 0.5
        # These add to the residual path, twice a layer: keep its size independent of the depth.
        adds = name.endswith(("wo.weight", "w2.weight", "experts.down"))
        return 0.0, 0.02 / math.sqrt(2 * settings.layers) if adds else 0.02

    model = Llama(settings, layers)
    training.init_parameters(model, settings.seed, distribution=normal)
    return model


def make_model(settings: Settings, mesh: NamedMesh) -> Llama:
    """Return this rank's part of the model."""
    model = new_model(settings, training.stage_layers(settings.layers, mesh))
    shard_model(model.to(mesh.device, settings.precision), settings, mesh)
    return model


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """Return AdamW that lets the matrices decay, but not the norms, with one call for each group."""
    groups = []
    # Norms, matrices, and stacks of experts, on ranks of their own.
    for ndim, decay in ((1, 0.0), (2, 0.1), (3, 0.1)):
        if parameters := [each for each in model.parameters() if each.ndim == ndim]:
            groups.append({"params": parameters, "weight_decay": decay})
    # Large eps: a gradient as small as its own rounding error should not make a full step.
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-5, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a linear warm-up and a cosine down to a tenth; a checkpoint has its state, which is the number of the step."""

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / 10) * (0.1 + 0.9 * cosine)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# --- the data


def read_text(path: str | None) -> Tensor:
    """Return the bytes under ``path``, a file or a directory; without one, of the running Python's standard library."""
    files: Iterable[Path]
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        # Installed packages differ between machines; tests are as large as all the rest, and duller.
        not_it = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
        files = (file for file in root.rglob("*.py") if not not_it & set(file.relative_to(root).parts))
    else:
        files = Path(path).rglob("*") if Path(path).is_dir() else [Path(path)]
    found = bytearray().join(file.read_bytes() for file in sorted(files) if file.is_file())
    return torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)


def draw_batch(
    text: Tensor, settings: Settings, step: int, rows: slice = slice(None), *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return some of the sequences of a step, and their targets: target i is the byte after input i."""
    digest = hashlib.blake2b(f"{settings.seed + seed} {step}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    # Every rank draws the starts of the whole batch, so that the batch is the same however it is divided.
    starts = torch.randint(len(text) - settings.seq, (settings.batch,), generator=generator)[rows]
    windows = text[starts[:, None] + torch.arange(settings.seq + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# --- the loop


def train(settings: Settings, text: Tensor, mesh: NamedMesh) -> list[float]:  # noqa: C901  as a script has it
    """Train from the start or a checkpoint, and save what was asked for: the loss of every step."""
    show = print if mesh.global_rank == 0 else lambda *_, **__: None
    training.seed_all(settings.seed, mesh)
    show(f"{mesh.layout} on {mesh.device.type}, {settings.precision}")
    show(picture(mesh.layout, settings.layers))
    show("making the model, and the first step, which sets up what the others use ...", flush=True)
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model, settings.lr)
    schedule = make_schedule(optimizer, settings.steps)
    checkpoints = training.Checkpoints(settings.checkpoint, mesh, keep=settings.keep or None)
    found = begin(settings, checkpoints, model, optimizer)
    if "schedule" in found:
        schedule.load_state_dict(found["schedule"])
    run_step = Step(model, mesh, microbatches=settings.microbatches or settings.pp)
    sampler = training.sampler_kwargs(mesh)
    count = settings.batch // sampler["num_replicas"]
    rows = slice(sampler["rank"] * count, (sampler["rank"] + 1) * count)
    interrupted, losses, times = torch.zeros(1, device=mesh.device), [], []
    for each in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what torchrun makes of it: stop after a step
        signal.signal(each, lambda *_: interrupted.fill_(1) and None)
    for step in range(found["step"], settings.steps):
        batch = draw_batch(text, settings, step, rows)
        if step == found["step"]:
            training.check_same_batch(batch, mesh)
        loss = run_step(*batch)
        norm = training.clip_grad_norm_(model.parameters(), settings.clip, mesh)
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + norm.item()):  # on all ranks: both numbers are the same on each
            raise TrainingError(
                f"the loss of step {step + 1} is {losses[-1]:g}, and the norm of its gradient {norm.item():g}; "
                f"choose a lower --lr than {settings.lr:g}"
            )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(time.monotonic())
        if len(times) == 1 or is_due(step, settings.steps, max(1, settings.steps // LINES)):
            show(progress(settings, step, losses[-1], times), flush=True)
        if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
            evaluated = run_step.evaluate(*draw_batch(text, settings, 0, rows, seed=1)).item()
            show(f"loss on other text after step {step + 1}: {with_unit(evaluated)}", flush=True)
        dist.all_reduce(stopping := interrupted.clone())  # any rank
        if settings.checkpoint and (stopping or is_due(step, settings.steps, settings.save_every)):
            # The next batch is a function of the seed and the step, so the step is the position in the data.
            saved = checkpoints.save(step + 1, model, optimizer, schedule=schedule.state_dict())
            show(f"saved {saved.result()}", flush=True)
        if stopping:
            raise KeyboardInterrupt
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    show(f"loss {with_unit(losses[0])} -> {with_unit(losses[-1])}" if losses else "no step was left to do")
    return losses


def begin(
    settings: Settings, checkpoints: training.Checkpoints, model: Llama, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Go on from what the command line says, or begin: what the checkpoint has beside tensors."""
    named = settings.resume if settings.resume != "auto" else None
    last = training.latest(named) if named else None
    if named and last is None:
        raise CheckpointError(f"--resume {named}: there is no finished checkpoint")
    if settings.checkpoint:
        return checkpoints.resume_or_start(model, optimizer, resume=last or settings.resume == "auto")
    return training.load(last, checkpoints.mesh, model, optimizer) if last else {"step": 0}


def is_due(step: int, steps: int, every: int) -> bool:
    """Return whether something that is done every some steps, and at the end, is due when ``step`` is done."""
    return step + 1 == steps or (every > 0 and (step + 1) % every == 0)


def with_unit(loss: float) -> str:
    """Write a loss in both units."""
    return f"{loss:.3f} nats a byte ({loss / math.log(2):.3f} bits)"


def progress(settings: Settings, step: int, loss: float, times: list[float]) -> str:
    """Write what a person sees of a step; the first one also set things up, and says nothing about speed."""
    done = settings.batch * settings.seq * (len(times) - 1)
    speed = f"  {done / (times[-1] - times[0]):,.0f} bytes/s" if done else ""
    return f"step {step + 1:{len(str(settings.steps))}}/{settings.steps}  loss {with_unit(loss)}{speed}"


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the tokens that count, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def reference_losses(settings: Settings, text: Tensor, device: torch.device) -> list[float]:
    """Return the loss of every step, from the first one on, of an unsharded model on whole batches."""
    model = new_model(settings).to(device, settings.precision)
    optimizer = make_optimizer(model, settings.lr)
    schedule = make_schedule(optimizer, settings.steps)
    losses = []
    for step in range(settings.steps):
        inputs, targets = draw_batch(text, settings, step)
        loss = loss_sum(model(inputs.to(device)), targets.to(device)) / targets.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def verify(settings: Settings, text: Tensor, mesh: NamedMesh, losses: Sequence[float]) -> bool:
    """Repeat the run on rank 0 alone, without any of the parallel machinery; the others wait at the end."""
    print("verifying in one process ...", flush=True)
    reference = reference_losses(settings, text, mesh.device)[
        -len(losses) :
    ]  # this run may have been resumed
    largest = max(abs(loss - expected) for loss, expected in zip(losses, reference, strict=True))
    agree = largest <= TOLERANCE
    print(
        f"largest difference of the loss over {len(losses)} steps in {settings.precision}: {largest:.1e}, "
        f"{'is within' if agree else 'IS NOT WITHIN'} {TOLERANCE:.0e}"
    )
    return agree


def problems_of(settings: Settings, text: Tensor) -> list[str]:
    """Return everything that is wrong with the job."""
    found = settings.problems(dist.get_world_size())
    if len(text) <= settings.seq:
        found.append(f"--data {settings.data}: {len(text)} bytes are too few for --seq {settings.seq}")
    try:
        Path(settings.checkpoint).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found.append(f"--checkpoint {settings.checkpoint}: {error.strerror}; give another directory, or ''")
    return found


def how_to_go_on(settings: Settings) -> str:
    """Return what to type to continue."""
    last = training.latest(settings.checkpoint) if settings.checkpoint else None
    if last is None:
        return "no checkpoint was saved; --save-every N saves one every N steps"
    step = int(last.name.rpartition("-")[2])
    return f"to go on from step {step}: --resume {settings.checkpoint} --steps N"


def refuse(problems: Iterable[str]) -> NoReturn:
    """Print the problems and fail, once on each host, which may be cut off from the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise SystemExit(0)
    lines = "\n".join(f"  - {problem}" for problem in problems)
    print(f"cannot train (rank {os.environ.get('RANK', '0')}):\n{lines}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    settings = parse(arguments)
    agree = True
    try:
        device = namedmesh.launch.init(settings.device, timeout=timedelta(seconds=settings.timeout))
        text = read_text(settings.data)
        if problems := problems_of(settings, text):
            refuse(problems)
        mesh = make_mesh(settings, device)
        losses = train(settings, text, mesh)
    except NamedMeshError as error:
        ran = isinstance(error, CheckpointError | TrainingError)
        refuse([*error.problems, how_to_go_on(settings)] if ran else error.problems)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(0) from None
        print(f"interrupted; {how_to_go_on(settings)}", flush=True)
        raise SystemExit(130) from None
    if mesh.global_rank == 0:
        print(f"{how_to_go_on(settings)}; --verify compares the losses with one process", flush=True)
        agree = not settings.verify or not losses or verify(settings, text, mesh, losses)
    # Together: a rank that left early would take the store with it that the others still talk to.
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
