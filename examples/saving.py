"""Where the checkpoints are, and whether a run can continue from one; training.save and training.load do the rest."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from namedmesh import CheckpointError, training

if TYPE_CHECKING:
    from settings import Settings
    from text import Corpus

__all__ = ["about_run", "find_checkpoint", "place", "resume_notes", "resume_problems"]


def about_run(settings: Settings, corpus: Corpus, step: int) -> dict[str, Any]:
    """What a checkpoint tells about the run it is from, after ``step`` steps."""
    run = {name: getattr(settings, name) for name in ("steps", "batch", "seq", "lr", "seed")}
    # The next batch is a function of the seed and the step, so these two are the position in the data.
    run |= {"dtype": str(settings.precision), "data_bytes": corpus.size}
    return {"step": step, "sizes": vars(settings.sizes), "run": run}


def place(settings: Settings, step: int) -> Path:
    """Where the checkpoint after ``step`` steps goes."""
    return Path(settings.checkpoint) / f"step-{step:06}"


def find_checkpoint(path: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint at ``path``, or the latest one in it, and what it tells; None where there is none."""
    for found in (Path(path), *sorted(Path(path).glob("step-*"), reverse=True)):
        with suppress(CheckpointError):  # not there, or not finished
            return found, training.checkpoint_info(found)[1]
    return None


def resume_problems(settings: Settings) -> list[str]:
    """What keeps the run from continuing where it was asked to, one sentence each."""
    found = find_checkpoint(settings.resume) if settings.resume else None
    if found is None:
        return [f"--resume {settings.resume}: there is no finished checkpoint"] if settings.resume else []
    checkpoint, about = found
    problems = [
        f"{checkpoint} is of a model with {name} {size}, not {getattr(settings.sizes, name)}"
        for name, size in about["sizes"].items()
        if size != getattr(settings.sizes, name)
    ]
    if about["step"] >= settings.steps:
        problems.append(f"{checkpoint} has done {about['step']} steps already; ask for more with --steps")
    return problems


def resume_notes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is allowed to differ from the checkpoint's run, but changes the losses that follow."""
    return [
        f"note: {name} was {value} in the checkpoint's run and is {now['run'][name]} now"
        for name, value in before["run"].items()
        if value != now["run"][name]
    ]
