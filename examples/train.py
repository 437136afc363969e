"""Train a small Llama-style language model on bytes, over pipeline x data x context x tensor parallel ranks.

    torchrun --nproc-per-node 8 examples/train.py --pp 2 --tp 2
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --cp 2 --tp 2 --verify
    torchrun --nproc-per-node 8 examples/train.py --tp 2 --moe --ep 4
    torchrun --nproc-per-node 4 examples/train.py --tp 4 --resume checkpoints --steps 200
    python examples/train.py --steps 20

The batch and the order of the data do not depend on the layout, so neither does the loss; ``--verify`` shows it.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print(f"importing torch, world size {os.environ.get('WORLD_SIZE', '1')} ...", flush=True)

import torch
import torch.distributed as dist
from parallel import Step, make_model
from plain import largest_difference, make_optimizer, reference_losses, set_learning_rate
from progress import Progress, picture, with_unit
from settings import Settings, parse
from text import Corpus, find_corpus

import namedmesh
from namedmesh import AgreementError, CheckpointError, LaunchError, LostRanksError, TrainingError, training

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-4  # nats
SAMPLE = 32  # bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    settings = parse(arguments)
    # More threads than cores would stand in each other's way.
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > (os.cpu_count() or 1):
        torch.set_num_threads(1)
    try:
        device = namedmesh.launch.init(settings.device, timeout=timedelta(seconds=settings.timeout))
    except (AgreementError, LaunchError) as error:
        refuse(error.problems, rank=int(os.environ.get("RANK", "0")))
    rank = dist.get_rank()
    try:
        agree = run(settings, device)
    except (CheckpointError, LostRanksError, TrainingError) as error:  # the same on every rank that is left
        speaks = getattr(error, "first", rank == 0)
        refuse([*error.problems, how_to_go_on(settings)], rank=rank, speaker=rank if speaks else -1)
    except KeyboardInterrupt:
        if rank == 0:
            print(f"interrupted; {how_to_go_on(settings)}", flush=True)
        raise SystemExit(130 if rank == 0 else 0) from None
    dist.destroy_process_group()
    return 0 if agree else 1


def run(settings: Settings, device: torch.device) -> bool:
    """Check, train, show a sample, and compare if asked to: whether it agreed."""
    corpus = find_corpus(settings.data)
    refuse_together(check(settings, corpus), device)
    mesh = make_mesh(settings, device)
    with training.report_lost_ranks(mesh):
        losses, sample = train(settings, corpus, mesh)
        if mesh.global_rank == 0:
            print(
                f"a sample: {sample}\n{how_to_go_on(settings)}; --verify compares the losses with one process"
            )
        agree = not settings.verify or verify(settings, corpus, mesh, losses)
        # Together: a rank that left early would take the store with it that the others still talk to.
        dist.barrier()
    mesh.close()
    return agree


def check(settings: Settings, corpus: Corpus) -> list[str]:
    """Everything that is wrong with the job as this rank sees it."""
    found = settings.problems(dist.get_world_size())
    if find_spec("numpy") is None:
        found.append("numpy is missing, and torch moves objects between ranks with it: pip install numpy")
    if not corpus.files:
        found.append(f"--data {settings.data}: there is no such file or directory, or no file in it")
    elif corpus.size <= settings.seq:
        found.append(f"--data {settings.data}: {corpus.size} bytes are too few for --seq {settings.seq}")
    if settings.checkpoint:
        try:
            Path(settings.checkpoint).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.checkpoint).close()
        except OSError as error:
            found.append(
                f"--checkpoint {settings.checkpoint}: {error.strerror}; give another directory, or '' for none"
            )
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
    context = {"cp": settings.cp} if settings.cp > 1 else {}
    mesh = namedmesh.init_mesh(
        {"pp": settings.pp, "dp": settings.dp, **context, "tp": settings.tp}, device=device
    )
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


def how_to_go_on(settings: Settings) -> str:
    """What to type to continue."""
    found = find_checkpoint(settings.checkpoint) if settings.checkpoint else None
    if found is None:
        return "no checkpoint was saved; --save-every N saves one every N steps"
    return f"to go on from step {found[1]['step']}: --resume {settings.checkpoint} --steps N"


def prune(settings: Settings, step: int) -> None:
    """Remove all but the last checkpoints up to this step, on one rank."""
    if settings.keep and dist.get_rank() == 0:
        last = place(settings, step)
        for old in sorted(each for each in last.parent.glob("step-[0-9]*") if each <= last)[: -settings.keep]:
            shutil.rmtree(old, ignore_errors=True)


def resume_problems(settings: Settings) -> list[str]:
    """What keeps the run from continuing where it was asked to, one sentence each."""
    found = find_checkpoint(settings.resume) if settings.resume else None
    if settings.resume and found is None:
        return [f"--resume {settings.resume}: there is no finished checkpoint"]
    if found and found[1]["step"] >= settings.steps:
        return [f"{found[0]} has done {found[1]['step']} steps already; ask for more with --steps"]
    return []


def train(settings: Settings, corpus: Corpus, mesh: namedmesh.NamedMesh) -> tuple[list[float], str]:
    """Train from the start or a checkpoint, save what was asked for; the loss of every step, and a sample of text."""
    training.seed_all(settings.seed, mesh)
    found = find_checkpoint(settings.resume) if settings.resume else None
    start = 0 if found is None else found[1]["step"]
    progress = Progress(start, settings.steps, settings.batch * settings.seq, shown=dist.get_rank() == 0)
    progress.tell(f"{mesh.layout} on {mesh.device.type}, {settings.precision}")
    progress.tell(picture(mesh.layout, settings.layers))
    progress.tell("making the model, and the first step, which sets up what the others use ...")
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model)
    if found:
        training.load(found[0], mesh, model, optimizer)
    run_step = Step(model, mesh, settings.pieces)
    mine = training.sampler_kwargs(mesh)
    share = settings.batch // mine["num_replicas"]
    part = slice(mine["rank"] * share, (mine["rank"] + 1) * share)
    asked_to_stop, losses = torch.zeros(1, device=mesh.device), []
    for each in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what torchrun makes of it: stop after a step
        signal.signal(each, lambda *_: asked_to_stop.fill_(1) and None)
    for step in range(start, settings.steps):
        batch = corpus.batch(seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq, part=part)
        if step == start:
            training.check_same_batch(batch, mesh)
        optimizer.zero_grad()
        loss = run_step(*(each.to(mesh.device) for each in batch))
        norm = training.clip_grad_norm_(model.parameters(), settings.clip, mesh)
        set_learning_rate(optimizer, step=step, steps=settings.steps, highest=settings.lr)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1] + norm.item()):
            raise TrainingError(
                f"the loss of step {step + 1} is {losses[-1]:g}, and the norm of its gradient {norm.item():g}; choose a lower "
                f"--lr than {settings.lr:g}"
            )
        progress.update(step, losses[-1])
        dist.all_reduce(stopping := asked_to_stop.clone())  # any rank
        if settings.saves_after(step) or (stopping and settings.checkpoint):
            # The next batch is a function of the seed and the step, so the step is the position in the data.
            training.save(place(settings, step + 1), mesh, model, optimizer, step=step + 1)
            prune(settings, step + 1)
            progress.tell(f"saved {place(settings, step + 1)}")
        if stopping:
            raise KeyboardInterrupt
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    progress.tell(f"loss {with_unit(losses[0])} -> {with_unit(losses[-1])} in {progress.seconds:.0f} s")
    unseen = corpus.batch(
        seed=settings.seed, step=settings.steps, batch=1, seq=settings.seq, part=slice(None)
    )
    prompt = bytes(unseen[0][0, : max(1, settings.seq // 2)].tolist())
    return losses, f"{prompt!r} + {generate(run_step, prompt, settings.seq)!r}"


def generate(run_step: Step, prompt: bytes, seq: int) -> bytes:
    """What the model takes to be the likeliest text after some; communicates."""
    text = bytearray(prompt)
    while len(text) < min(seq, len(prompt) + SAMPLE):
        text.append(run_step.next_byte(text, seq))
    return bytes(text[len(prompt) :])


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
