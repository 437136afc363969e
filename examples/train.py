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
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback of an import
    if os.environ.get("RANK", "0") == "0":
        print(f"importing torch, world size {os.environ.get('WORLD_SIZE', '1')} ...", flush=True)

import torch
import torch.distributed as dist
from parallel import Step, make_model, new_model
from plain import make_optimizer, make_schedule, reference_losses
from progress import Progress, picture, with_unit
from settings import Settings, parse
from text import Corpus, find_corpus

import namedmesh
from namedmesh import AgreementError, CheckpointError, LaunchError, TrainingError, training

TOLERANCE = 1e-4  # nats
SAMPLE = 32  # bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line says; the exit status."""
    settings = parse(arguments)
    rank = int(os.environ.get("RANK", "0"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        device = namedmesh.launch.init(settings.device, timeout=timedelta(seconds=settings.timeout))
        rank = dist.get_rank()
        agree = run(settings, device)
    except (AgreementError, LaunchError) as error:  # on each host once: it may be cut off from the others
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        refuse(error.problems, rank=rank, speaker=rank if speaks else -1)
    except (CheckpointError, TrainingError) as error:  # the same on every rank
        refuse([*error.problems, how_to_go_on(settings)], rank=rank)
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
    losses, sample = train(settings, corpus, mesh)
    if mesh.global_rank == 0:
        print(f"a sample: {sample}\n{how_to_go_on(settings)}; --verify compares the losses with one process")
    agree = not settings.verify or verify(settings, corpus, mesh, losses)
    # Together: a rank that left early would take the store with it that the others still talk to.
    dist.barrier()
    mesh.close()
    return agree


def check(settings: Settings, corpus: Corpus) -> list[str]:
    """Return everything that is wrong with the job as this rank sees it."""
    found = settings.problems(dist.get_world_size())
    if find_spec("numpy") is None:
        found.append("numpy is missing, and torch moves objects between ranks with it: pip install numpy")
    if not corpus.files:
        found.append(f"--data {settings.data}: there is no such file or directory, or no file in it")
    elif corpus.size <= settings.seq:
        found.append(f"--data {settings.data}: {corpus.size} bytes are too few for --seq {settings.seq}")
    if settings.resume and settings.resume != "auto":
        last = training.latest(settings.resume)
        done = training.checkpoint_info(last)[1]["step"] if last else -1
        if last is None:
            found.append(f"--resume {settings.resume}: there is no finished checkpoint")
        elif done >= settings.steps:
            found.append(f"{last} has done {done} steps already; ask for more with --steps")
    if settings.checkpoint:
        try:
            Path(settings.checkpoint).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.checkpoint).close()
        except OSError as error:
            found.append(
                f"--checkpoint {settings.checkpoint}: {error.strerror}; give another directory, or '' for none"
            )
    return found or no_room(settings)


def no_room(settings: Settings) -> list[str]:
    """Return a sentence if a checkpoint has no room on the disk: weights, and two numbers of the optimizer for each."""
    if not settings.checkpoint:
        return []
    with torch.device("meta"):
        parameters = sum(each.numel() for each in new_model(settings).parameters())
    needed, free = 3 * parameters * settings.precision.itemsize, shutil.disk_usage(settings.checkpoint).free
    sentence = (
        f"--checkpoint {settings.checkpoint}: a checkpoint has {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are "
        "free there; give another directory, or '' for none"
    )
    return [sentence] if needed > free else []


def refuse_together(problems: Sequence[str], device: torch.device) -> None:
    """End the job if any rank has problems, in the words of the first that has; communicates."""
    rank, troubled = dist.get_rank(), torch.zeros(dist.get_world_size(), device=device)
    troubled[rank] = len(problems)
    dist.all_reduce(troubled)
    if troubled.any():
        dist.destroy_process_group()
        refuse(problems, rank=rank, speaker=int(troubled.gt(0).int().argmax()))


def refuse(problems: Sequence[str], *, rank: int, speaker: int = 0) -> NoReturn:
    """Print the problems and fail, on one rank: torchrun stops the others, and shows one failure."""
    if rank != speaker:
        raise SystemExit(0)
    lines = "\n".join(f"  - {problem}" for problem in problems)
    print(f"cannot train (rank {rank}):\n{lines}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def how_to_go_on(settings: Settings) -> str:
    """Return what to type to continue."""
    last = training.latest(settings.checkpoint) if settings.checkpoint else None
    if last is None:
        return "no checkpoint was saved; --save-every N saves one every N steps"
    step = training.checkpoint_info(last)[1]["step"]
    return f"to go on from step {step}: --resume {settings.checkpoint} --steps N"


def make_mesh(settings: Settings, device: torch.device) -> namedmesh.NamedMesh:
    """Make the mesh, and with experts another view of the same ranks."""
    context = {"cp": settings.cp} if settings.cp > 1 else {}
    sizes = {"pp": settings.pp, "dp": settings.dp, **context, "tp": settings.tp}
    mesh = namedmesh.init_mesh(sizes, device=device)
    if settings.moe:
        mesh.add_view("expert", pp=settings.pp, edp=-1, ep=settings.ep, etp=1)
    return mesh


def train(  # noqa: C901  one thing after the other, as a script has it
    settings: Settings, corpus: Corpus, mesh: namedmesh.NamedMesh
) -> tuple[list[float], str]:
    """Train from the start or a checkpoint, save what was asked for; the loss of every step, and a sample of text."""
    training.seed_all(settings.seed, mesh)
    progress = Progress(settings, shown=mesh.global_rank == 0)
    progress.show(f"{mesh.layout} on {mesh.device.type}, {settings.precision}")
    progress.show(picture(mesh.layout, settings.layers))
    progress.show("making the model, and the first step, which sets up what the others use ...")
    model = make_model(settings, mesh)
    optimizer = make_optimizer(model, settings.lr)
    schedule = make_schedule(optimizer, settings.steps)
    checkpoints = training.Checkpoints(settings.checkpoint, mesh, keep=settings.keep or None)
    found = begin(settings, checkpoints, mesh, model, optimizer)
    start, skipped = found["step"], 0
    if "schedule" in found:
        schedule.load_state_dict(found["schedule"])
    run_step = Step(model, mesh, microbatches=settings.microbatches or settings.pp)
    sampler = training.sampler_kwargs(mesh)
    rows = settings.batch // sampler["num_replicas"]
    mine = slice(sampler["rank"] * rows, (sampler["rank"] + 1) * rows)
    interrupted, losses = torch.zeros(1, device=mesh.device), []
    for each in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C, and what torchrun makes of it: stop after a step
        signal.signal(each, lambda *_: interrupted.fill_(1) and None)
    for step in range(start, settings.steps):
        batch = corpus.batch(seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq, rows=mine)
        if step == start:
            training.check_same_batch(batch, mesh)
        optimizer.zero_grad()
        loss = run_step(*(each.to(mesh.device) for each in batch))
        norm = training.clip_grad_norm_(model.parameters(), settings.clip, mesh)
        losses.append(loss.item())
        if math.isfinite(losses[-1] + norm.item()):
            optimizer.step()
            schedule.step()
        elif skipped < settings.skip:  # on all ranks: both numbers are the same on each
            skipped += 1
            progress.show(f"step {step + 1} is skipped: its gradient is not finite")
        else:
            raise TrainingError(
                f"the loss of step {step + 1} is {losses[-1]:g}, and the norm of its gradient {norm.item():g}; choose a lower "
                f"--lr than {settings.lr:g}"
            )
        progress.update(step, losses[-1])
        if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
            other = corpus.batch(
                seed=settings.seed + 1, step=0, batch=settings.batch, seq=settings.seq, rows=mine
            )
            evaluated = with_unit(run_step.evaluate(*other).item())
            progress.show(f"loss on other text after step {step + 1}: {evaluated}")
        dist.all_reduce(stopping := interrupted.clone())  # any rank
        if settings.checkpoint and (stopping or settings.saves_after(step)):
            # The next batch is a function of the seed and the step, so the step is the position in the data.
            progress.show(
                f"saved {checkpoints.save(step + 1, model, optimizer, schedule=schedule.state_dict()).result()}"
            )
        if stopping:
            raise KeyboardInterrupt
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.default_int_handler)
    progress.show(f"loss {with_unit(losses[0])} -> {with_unit(losses[-1])}")
    unseen, _ = corpus.batch(seed=settings.seed, step=settings.steps, batch=1, seq=settings.seq)
    prompt = bytes(unseen[0, : max(1, settings.seq // 2)].tolist())
    return losses, f"{prompt!r} + {run_step.generate(prompt, settings.seq, SAMPLE)!r}"


def begin(
    settings: Settings,
    checkpoints: training.Checkpoints,
    mesh: namedmesh.NamedMesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Go on from what the command line says, or begin: what the checkpoint has beside tensors."""
    last = training.latest(settings.resume) if settings.resume and settings.resume != "auto" else None
    if settings.checkpoint:
        return checkpoints.resume_or_start(
            model, optimizer, resume=settings.resume == "auto" or last or False
        )
    return {"step": 0} if last is None else training.load(last, mesh, model, optimizer)


def verify(settings: Settings, corpus: Corpus, mesh: namedmesh.NamedMesh, losses: Sequence[float]) -> bool:
    """Repeat the run on rank 0 alone, without any of the parallel machinery; the others wait at the end."""
    if mesh.global_rank != 0:
        return True
    print("verifying in one process ...", flush=True)
    reference = reference_losses(settings, corpus, mesh.device)[
        -len(losses) :
    ]  # this run may have been resumed
    differences = [abs(loss - expected) for loss, expected in zip(losses, reference, strict=True)]
    agree = all(each <= TOLERANCE for each in differences)
    print(
        f"largest difference of the loss over {len(losses)} steps in {settings.precision}: {max(differences):.1e}, "
        f"{'is within' if agree else 'IS NOT WITHIN'} {TOLERANCE:.0e}"
    )
    return agree


if __name__ == "__main__":
    sys.exit(main())
