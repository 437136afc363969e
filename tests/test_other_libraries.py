"""What ``examples/README.md`` says about other libraries' meshes."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import LayoutError, NamedMesh

if TYPE_CHECKING:
    from collections.abc import Callable


def _without_fabric() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.randn(16, 8)
    losses = []
    for _ in range(4):
        loss = (model(samples) - samples).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_book_shows_the_losses_of_one_process_for_fabric() -> None:
    book = Path(__file__).parents[1].joinpath("examples", "README.md").read_text(encoding="utf-8")
    page = book.partition("## Lightning Fabric\n")[2].partition("\n## ")[0]
    (expected,) = run_ranks(1, _without_fabric, init=False)
    assert re.findall(r"^loss (\S+)$", page, flags=re.MULTILINE) == [f"{loss:.4f}" for loss in expected]


def _reduced_over_replicas() -> list[float]:
    """A replica of two ranks; what the other replicas have comes in by the hook, as torchft's groups do it."""
    mesh = namedmesh.init_mesh(dp_shard=2, device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["dp_shard"])
    gradients: list[torch.Tensor] = []
    sharded: Any = model
    sharded.set_all_reduce_hook(lambda reduced: gradients.append(reduced.mul_(0.5).clone()))
    model(torch.ones(2, 4)).sum().backward()
    weight: Any = model.weight
    whole = weight.grad.full_tensor()
    mesh.close()
    return [float(len(gradients)), *whole.unique().tolist()]


def test_a_hook_reduces_over_replicas_that_are_in_no_mesh() -> None:
    assert (
        run_ranks(2, _reduced_over_replicas) == [[1.0, 1.0]] * 2
    )  # the gradient is 2, of which the hook keeps half


def test_a_group_that_torch_does_not_know_is_refused() -> None:
    class Managed(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 2)  # type: ignore[call-arg]  # the other constructor

        def size(self) -> int:
            return 2

    with fake_world(4):
        mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
        with pytest.raises(LayoutError) as caught:
            NamedMesh.from_groups({"dp_replicate": Managed(), "tp": mesh.group("tp")}, device="cpu")
        assert str(caught.value) == (
            "the group of axis 'dp_replicate' is a Managed that torch.distributed does not know, so that its ranks cannot be "
            "told; leave the axis out of the mesh"
        )
        mesh.close()


# What the README's table says of others.


def test_torch_makes_groups_again_and_takes_a_part_of_the_world() -> None:
    def made_twice(make: Callable[[], object]) -> tuple[int, int]:
        before = live_groups()
        kept = [make()]
        once = live_groups() - before
        kept.append(make())
        return once, live_groups() - before - once

    with fake_world(16):
        assert made_twice(lambda: init_device_mesh("cpu", (8, 2), mesh_dim_names=("dp", "tp"))) == (2, 2)
        assert made_twice(lambda: namedmesh.init_mesh(dp=8, tp=2, device="cpu")) == (2, 0)
        assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).size() == 4
        with pytest.raises(RuntimeError):
            init_device_mesh("cpu", (-1, 2), mesh_dim_names=("dp", "tp"))
    assert "may lead to hanging" in (init_device_mesh.__doc__ or "")


def _groups_that_megatron_leaves() -> list[int]:
    parallel_state: Any = importlib.import_module("megatron.core.parallel_state")
    counts = [live_groups()]
    for _ in range(2):
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        parallel_state.destroy_model_parallel()
        counts.append(live_groups())
    return counts


@pytest.mark.oracle("megatron.core", "accelerate")
def test_megatron_leaves_groups_and_accelerate_has_five_axes() -> None:
    importlib.import_module("megatron.core.parallel_state")
    for before, once, twice in run_ranks(4, _groups_that_megatron_leaves):
        assert before < once < twice
    configuration: Any = importlib.import_module("accelerate").ParallelismConfig
    axes = {
        field.name.removesuffix("_size") for field in fields(configuration) if field.name.endswith("_size")
    }
    assert axes == {"dp_replicate", "dp_shard", "cp", "sp", "tp"}
