"""Train a small Llama-style language model on bytes, over pipeline x data x context x tensor parallel ranks.

    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --cp 2 --tp 2 --verify
    torchrun --nproc-per-node 8 examples/train.py --tp 2 --moe --ep 4
    torchrun --nproc-per-node 4 examples/train.py --tp 4 --resume checkpoints --steps 200
    python examples/train.py --steps 20

The batch and the order of the data do not depend on the layout, so neither does the loss; ``--verify`` shows it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from parallel import Step, make_model
from plain import largest_difference, make_optimizer, reference_losses, set_learning_rate
from progress import Progress, picture
from settings import Settings, parse
from text import Corpus, find_corpus

import namedmesh
from namedmesh import CheckpointError, training

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-4  # nats


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    settings = parse(arguments)
    # More threads than cores would stand in each other's way.
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > (os.cpu_count() or 1):
        torch.set_num_threads(1)
    try:
        device = namedmesh.launch.init(settings.device)
    except namedmesh.LaunchError as error:
        refuse(error.problems, rank=int(os.environ.get("RANK", "0")))
    corpus = find_corpus(settings.data)
    refuse_together(check(settings, corpus), device)
    mesh = make_mesh(settings, device)
    losses = train(settings, corpus, mesh)
    agree = not settings.verify or verify(settings, corpus, mesh, losses)
    # Together: a rank that left early would take the store with it that the others still talk to.
    dist.barrier()
    mesh.close()
    dist.destroy_process_group()
    return 0 if agree else 1


def check(settings: Settings, corpus: Corpus) -> list[str]:
    """Everything that is wrong with the job as this rank sees it."""
    found = settings.problems(dist.get_world_size())
    if find_spec("numpy") is None:
        found.append("numpy is missing, and torch moves objects between ranks with it: pip install numpy")
    if not corpus.files:
        found.append(f"--data {settings.data}: there is no such file or directory, or no file in it")
    elif corpus.size <= settings.seq:
        found.append(f"--data {settings.data}: {corpus.size} bytes are too few for --seq {settings.seq}")
    return found + resume_problems(settings)


def refuse_together(problems: Sequence[str], device: torch.device) -> None:
    """End the job if any rank has problems, in the words of the first that has; communicates."""
    rank, troubled = dist.get_rank(), torch.zeros(dist.get_world_size(), device=device)
    troubled[rank] = len(problems)
    dist.all_reduce(troubled)
    if troubled.any():
        dist.destroy_process_group()
        refuse(problems, rank=rank, speaker=int(troubled.gt(0).int().argmax()))


def refuse(problems: Sequence[str], *, rank: int, speaker: int = 0) -> NoReturn:
    """Tell the problems and fail, on one rank: torchrun stops the others, and shows one failure."""
    if rank != speaker:
        raise SystemExit(0)
    lines = "\n".join(f"  - {problem}" for problem in problems)
    print(f"cannot train (rank {rank}):\n{lines}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def make_mesh(settings: Settings, device: torch.device) -> namedmesh.NamedMesh:
    """The mesh, and with experts another view of the same ranks."""
    context: dict[str, Any] = {"cp": settings.cp} if settings.cp > 1 else {}
    mesh = namedmesh.init_mesh(pp=settings.pp, dp=settings.dp, **context, tp=settings.tp, device=device)
    if settings.moe:
        mesh.add_view("expert", pp=settings.pp, edp=-1, ep=settings.ep, etp=1)
    return mesh


def place(settings: Settings, step: int) -> Path:
    """Where the checkpoint after ``step`` steps goes."""
    return Path(settings.checkpoint) / f"step-{step:06}"


def find_checkpoint(path: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint at ``path``, or the latest one in it, and its values; None where there is none."""
    for found in (Path(path), *sorted(Path(path).glob("step-*"), reverse=True)):
        with suppress(CheckpointError):  # not there, or not finished
            return found, training.checkpoint_info(found)[1]
    return None


def resume_problems(settings: Settings) -> list[str]:
    """What keeps the run from continuing where it was asked to, one sentence each."""
    found = find_checkpoint(settings.resume) if settings.resume else None
    if settings.resume and found is None:
        return [f"--resume {settings.resume}: there is no finished checkpoint"]
    if found and found[1]["step"] >= settings.steps:
        return [f"{found[0]} has done {found[1]['step']} steps already; ask for more with --steps"]
    return []


def train(settings: Settings, corpus: Corpus, mesh: namedmesh.NamedMesh) -> list[float]:
    """Train from the start or a checkpoint, save what was asked for, and return the loss of every step."""
    training.seed_all(settings.seed, mesh)
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model)
    run_step = Step(model, mesh, settings.pieces)
    found = find_checkpoint(settings.resume) if settings.resume else None
    start = 0 if found is None else training.load(found[0], mesh, model, optimizer)["step"]
    progress = Progress(start, settings.steps, settings.batch * settings.seq, shown=dist.get_rank() == 0)
    progress.tell(f"{mesh.layout} on {mesh.device.type}, {settings.precision}")
    progress.tell(picture(mesh.layout, settings.layers))
    mine = training.sampler_kwargs(mesh)
    share = settings.batch // mine["num_replicas"]
    part = slice(mine["rank"] * share, (mine["rank"] + 1) * share)
    losses = []
    for step in range(start, settings.steps):
        batch = corpus.batch(seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq, part=part)
        if step == start:
            training.check_same_batch(batch, mesh)
        optimizer.zero_grad()
        loss = run_step(*(each.to(mesh.device) for each in batch))
        training.clip_grad_norm_(model.parameters(), settings.clip, mesh)
        set_learning_rate(optimizer, step=step, steps=settings.steps, highest=settings.lr)
        optimizer.step()
        losses.append(loss.item())
        progress.update(step, losses[-1])
        if settings.saves_after(step):
            # The next batch is a function of the seed and the step, so the step is the position in the data.
            training.save(place(settings, step + 1), mesh, model, optimizer, step=step + 1)
            progress.tell(f"saved {place(settings, step + 1)}")
    progress.tell(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {progress.seconds:.0f} s")
    return losses


def verify(settings: Settings, corpus: Corpus, mesh: namedmesh.NamedMesh, losses: Sequence[float]) -> bool:
    """Repeat the run on rank 0 alone, without any of the parallel machinery; the others wait at the end."""
    if dist.get_rank() != 0:
        return True
    print("verifying in one process ...", flush=True)
    difference = largest_difference(losses, reference_losses(settings, corpus, mesh.device))
    agree = difference <= TOLERANCE
    print(
        f"largest difference of the loss over {len(losses)} steps in {settings.precision}: {difference:.1e}, "
        f"{'is within' if agree else 'IS NOT WITHIN'} {TOLERANCE:.0e}"
    )
    return agree


if __name__ == "__main__":
    sys.exit(main())
