"""The guide's recipe for torchtitan: its own ``ParallelDims`` on our groups, against one that makes its own."""

from __future__ import annotations

import random
from importlib import import_module
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pages import find_blocks
from ranks import fake_world, run_ranks, summed
from torch import nn
from torch.distributed.fsdp import fully_shard

import namedmesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
NAMES = ("pp", "dp_replicate", "cp", "tp", "batch", "efsdp", "ep", "loss")
BACKENDS = {
    "spmd_types": ("dp", "dp_shard"),
    "partial_dtensor": ("fsdp",),
    "full_dtensor": ("dp_shard",),
}
pytestmark = pytest.mark.oracle("torchtitan")


def recipe() -> Any:
    """Return the function that the page on torchtitan shows."""
    source = find_blocks("python", r"file: titan_dims\.py")[0]
    names: dict[str, Any] = {}
    exec(compile(source, "the recipe", "exec"), names)  # noqa: S102  the page is ours
    return names["parallel_dims"]


def shown(dims: Any, name: str) -> Any:
    """The ranks of a mesh of one name; nothing where there is none."""
    mesh = dims.get_optional_mesh(name)
    return mesh and (mesh.mesh.tolist(), mesh.get_local_rank(), mesh.mesh_dim_names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mesh_is_that_of_dims_that_make_their_groups(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    theirs: Any = import_module("torchtitan.distributed.parallel_dims")
    monkeypatch.setattr(theirs, "device_type", "cpu")
    source = random.Random(5)
    for _ in range(6):
        sizes = {axis: source.choice((1, 2, 3)) for axis in AXES}
        world, shards = prod(sizes.values()), sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        ep = source.choice([size for size in range(1, shards + 1) if shards % size == 0])
        with fake_world(world, source.randrange(world)):
            mesh = namedmesh.init_mesh(sizes, device="cpu")
            ours = recipe()(mesh, ep, backend)
            assert isinstance(ours, theirs.ParallelDims)
            groups = [each.ranks for each in mesh.communicators]
            assert len(set(groups)) == len(groups)
            owned = {each.group.group_name for each in mesh.communicators}
            other = theirs.ParallelDims(**sizes, ep=ep, world_size=world, spmd_backend=backend)
            other.build_mesh()
            for name in NAMES + BACKENDS[backend]:
                got, expected = shown(ours, name), shown(other, name)
                assert got == expected, (sizes, ep, name)
                if got and 1 < ours.get_mesh(name).size() < world:
                    assert ours.get_mesh(name).get_group().group_name in owned, (sizes, ep, name)
            mesh.close()


def _train() -> float:
    """FSDP over the recipe's mesh; the deviation of the loss and of a gradient from one process."""
    mesh = namedmesh.init_mesh(pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=1)
    theirs: Any = import_module("torchtitan.distributed.parallel_dims")
    theirs.device_type = "cpu"
    dims = recipe()(mesh, spmd_backend="partial_dtensor")
    torch.manual_seed(0)
    model, whole = nn.Linear(8, 8), nn.Linear(8, 8)
    whole.load_state_dict(model.state_dict())
    fully_shard(model, mesh=dims.get_mesh(["dp_replicate", "fsdp"]))
    samples = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    loss = model(samples[dims.get_mesh("batch").get_local_rank()]).square().mean()
    loss.backward()
    expected = torch.stack([whole(sample).square().mean() for sample in samples]).mean()
    expected.backward()
    group = dims.get_mesh("loss").get_group()
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    grad: Any = model.weight.grad
    assert whole.weight.grad is not None
    gap: float = (grad.full_tensor() - whole.weight.grad).abs().max().item()
    mesh.close()
    return max(abs(summed(group, loss.item()) / 4 - expected.item()), gap)


def test_training_on_them_is_training_in_one_process() -> None:
    assert max(run_ranks(4, _train)) < 1e-6
