"""The processor's time of saves and loads, beside torch.distributed.checkpoint (DCP) with the same tensors.

$ python benchmarks/saves.py            # 1,200 small tensors on one and two ranks
$ python benchmarks/saves.py --megabytes 64

The second command saves and loads few large tensors.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from paired import on_ranks, show
from torch import nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training

if TYPE_CHECKING:
    from collections.abc import Callable


def make_job(mesh: namedmesh.NamedMesh, layers: int, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of linear layers under FSDP, and AdamW with its state."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


def list_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what DCP saves and loads, in place."""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {"model": model.state_dict(), "optimizer": {"state": states}}


def build(root: Path, layers: int, width: int) -> dict[str, Callable[[], object]]:
    mesh = namedmesh.init_mesh(dp=-1, device="cpu")
    model, optimizer = make_job(mesh, layers, width)
    kept, ours, theirs = root / "kept", root / "ours", root / "theirs"
    training.save(kept, mesh, model, optimizer)

    # Each returns what takes away the files that it made, which is not timed.
    def save_ours() -> object:
        training.save(ours, mesh, model, optimizer)
        return partial(shutil.rmtree, ours, ignore_errors=True)

    def save_theirs() -> object:
        dcp.save(list_tensors(model, optimizer), checkpoint_id=theirs)
        return partial(shutil.rmtree, theirs, ignore_errors=True)

    def load_ours() -> object:
        training.load(kept, mesh, model, optimizer)
        return int

    def load_theirs() -> object:
        dcp.load(list_tensors(model, optimizer), checkpoint_id=kept)
        return int

    return {"save": save_ours, "save, DCP": save_theirs, "load": load_ours, "load, DCP": load_theirs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    size = (4, int((given.megabytes * 2**20 / 48) ** 0.5)) if given.megabytes else (150, 8)
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            measured = on_ranks(ranks, given.rounds, build, Path(folder), *size, clock=time.process_time)
        for name in ("save", "load"):
            pair = {name: measured[name], "DCP": measured[f"{name}, DCP"]}
            show(f"{name} on {ranks} ranks, {size[0]} layers of width {size[1]}, in ms", pair)
