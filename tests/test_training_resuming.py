"""What a checkpoint gives back in another layout: the saved values, or an error that names what cannot be kept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from tensors import numbers, whole
from tiny import shard
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

# --- any two layouts -------------------------------------------------------------------------------------------

LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"dp": 2}, {"pp": 2, "dp": 1}],
    3: [{"dp": 3}],
    6: [{"dp": 3, "tp": 2}, {"dp_replicate": 2, "dp_shard": 3}, {"pp": 3, "dp": 2}],
}
# Sizes that ranks do not divide evenly: their shards have equal lengths at different offsets.
WIDTHS = [(5, 12), (50, 12), (5, 12)]


def expected_values() -> dict[str, Tensor]:
    """What each entry is in one process."""
    values = {}
    for number, (narrow, wide) in enumerate(WIDTHS):
        shapes = {"up.weight": (wide, narrow), "up.bias": (wide,), "down.weight": (narrow, wide)}
        for name, shape in shapes.items():
            values[f"{number}.{name}"] = numbers(*shape, seed=len(values))
    return values


def sharded_model(mesh: namedmesh.NamedMesh) -> nn.Sequential:
    """The layers of this rank's stage, with tensor parallelism over tp and FSDP over the axes of dp."""
    stages = mesh.size("pp") if "pp" in mesh.layout else 1
    stage = mesh.rank("pp") if stages > 1 else 0
    model = nn.Sequential()
    for number in range(stage, len(WIDTHS), stages):
        narrow, wide = WIDTHS[number]
        up, down = nn.Linear(narrow, wide), nn.Linear(wide, narrow, bias=False)
        model.add_module(str(number), nn.ModuleDict({"up": up, "down": down}).double())
    for name, parameter in model.named_parameters():
        parameter.data = expected_values()[name]
    if "tp" in mesh.layout:
        plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        parallelize(model, mesh["tp"], plan, missing="ignore")
    fully_shard(model, mesh=training.fsdp_mesh(mesh))
    return model


def adam_with_state(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose moments are the parameters, doubled."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moment = torch.empty_like(parameter)
        shard(moment).copy_(2 * shard(parameter.detach()))
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moment, "exp_avg_sq": moment}
    return optimizer


def save_and_load_in_layouts(layouts: list[dict[str, int]], root: Path, sources: list[str]) -> None:
    expected = expected_values()
    for sizes in layouts:
        mesh = namedmesh.init_mesh(**sizes, device="cpu")
        model = sharded_model(mesh)
        optimizer = adam_with_state(model)
        name = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        training.save(root / name, mesh, model, optimizer)
        others = random.Random(name).sample(sources, min(2, len(sources)))
        for source in others:
            for parameter in model.parameters():
                shard(parameter.detach()).zero_()
            optimizer = torch.optim.AdamW(model.parameters())
            training.load(root / source, mesh, model, optimizer)
            for key, parameter in model.named_parameters():
                state = optimizer.state[parameter]
                assert torch.equal(whole(parameter), expected[key]), (source, name, key)
                assert torch.equal(whole(state["exp_avg"]), 2 * expected[key]), (source, name, key)
                assert torch.equal(shard(state["exp_avg"]), shard(state["exp_avg_sq"])), (source, name, key)
                assert state["step"] == 7
        sources = [*sources, name]
        dist.barrier()
        mesh.close()


def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    for ranks, layouts in LAYOUTS.items():
        saved = sorted(path.name for path in tmp_path.iterdir())
        run_ranks(ranks, save_and_load_in_layouts, layouts, tmp_path, saved)
