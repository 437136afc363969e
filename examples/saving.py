"""Checkpoints that any layout can read, written so that an interruption never costs the one before.

Tensors go through torch.distributed.checkpoint: every rank writes what it holds, under the global names of the
parameters, and reads what it needs. ``about.json`` beside them says where training stood, for people and for
the checks that come before a mesh exists.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

if TYPE_CHECKING:
    from settings import Settings
    from text import Corpus
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["about_run", "find_checkpoint", "load", "read_about", "resume_notes", "resume_problems", "save"]

ABOUT = "about.json"
# The optimizer's state under the names of the parameters, not under their numbers: numbers are different in
# every pipeline stage.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def about_run(settings: Settings, corpus: Corpus, step: int) -> dict[str, Any]:
    """What a checkpoint tells about the run it is from, after ``step`` steps."""
    run = {name: getattr(settings, name) for name in ("steps", "batch", "seq", "lr", "seed")}
    # The next batch is a function of the seed and the step, so these two are the position in the data.
    run |= {"dtype": str(settings.precision), "data_bytes": corpus.size}
    return {"step": step, "sizes": vars(settings.sizes), "run": run}


def save(directory: Path, model: nn.Module, optimizer: Optimizer, about: dict[str, Any]) -> Path:
    """Write a checkpoint into ``directory``, all ranks together, and return where it is."""
    final = directory / f"step-{about['step']:06}"
    unfinished, replaced = final.with_suffix(".unfinished"), final.with_suffix(".replaced")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    with warnings.catch_warnings():
        # torch 2.8 to itself.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        dcp.save(_state(model, optimizer), checkpoint_id=unfinished)
    if first:
        (unfinished / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        # The name that readers look for appears only now, when everything is there.
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()
    return final


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Fill a model and its optimizer, however they are sharded now, from a checkpoint of any layout."""
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": of_model, "optimizer": of_optimizer}


def find_checkpoint(path: str) -> Path | None:
    """The checkpoint at ``path``, or the latest one in it; None where there is none."""
    root = Path(path)
    if (root / ABOUT).is_file():
        return root
    # Names without a suffix: what is unfinished or replaced has one.
    found = [each for each in root.glob("step-*") if not each.suffix and (each / ABOUT).is_file()]
    return max(found, key=lambda each: read_about(each)["step"], default=None)


def read_about(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint tells about its run."""
    about: dict[str, Any] = json.loads((checkpoint / ABOUT).read_text(encoding="utf-8"))
    return about


def resume_problems(settings: Settings) -> list[str]:
    """What keeps the run from continuing where it was asked to, one sentence each."""
    if settings.resume is None:
        return []
    checkpoint = find_checkpoint(settings.resume)
    if checkpoint is None:
        return [f"--resume {settings.resume}: there is no finished checkpoint"]
    about = read_about(checkpoint)
    found = [
        f"{checkpoint} is of a model with {name} {size}, not {getattr(settings.sizes, name)}"
        for name, size in about["sizes"].items()
        if size != getattr(settings.sizes, name)
    ]
    if about["step"] >= settings.steps:
        found.append(f"{checkpoint} has done {about['step']} steps already; ask for more with --steps")
    return found


def resume_notes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is allowed to differ from the checkpoint's run, but changes the losses that follow."""
    return [
        f"note: {name} was {value} in the checkpoint's run and is {now['run'][name]} now"
        for name, value in before["run"].items()
        if value != now["run"][name]
    ]
