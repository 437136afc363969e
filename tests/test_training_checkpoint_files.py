"""Directories of checkpoints: who may write there, what is found and removed, and what Hugging Face reads of them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import namedmesh
from namedmesh import training
from namedmesh.compat import megatron

if TYPE_CHECKING:
    from pathlib import Path


def groups_that_outlive_the_default_group(root: Path) -> list[str]:
    """Destroy all groups while everything that used them is still referenced, as by the variables of a script."""
    mesh = namedmesh.init_mesh(dp=2, tp=1, device="cpu")
    mesh.add_view("expert", ep=2)
    mesh.flatten("dp", "tp")
    kept: list[Any] = [megatron.bind(mesh), mesh]
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    checkpoints = training.Checkpoints(root / "run", mesh, async_=True)
    kept += [checkpoints, checkpoints.save(1, model)]
    checkpoints.close()
    training.save(root / "one", mesh, model)
    groups = {known.label: ref(known.group) for known in mesh.communicators}
    groups["world"] = ref(dist.group.WORLD)  # type: ignore[arg-type]
    assert {"checkpoints", "self", "world"} <= groups.keys()
    mesh.close()
    dist.destroy_process_group()
    gc.collect()
    assert kept
    return [label for label, group in groups.items() if group() is not None]


def test_no_group_outlives_the_default_group(tmp_path: Path) -> None:
    """A thread of gloo that is left at the end of the interpreter aborts the process now and then."""
    assert run_ranks(2, groups_that_outlive_the_default_group, tmp_path) == [[], []]
