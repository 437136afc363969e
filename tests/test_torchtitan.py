"""torchtitan's ``ParallelDims`` on our groups, against one that makes its own, against an own calculation, and in training."""

from __future__ import annotations

import random
import sys
from dataclasses import make_dataclass
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks, summed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import namedmesh
from namedmesh import LayoutError
from namedmesh._torch import TORCH
from namedmesh.compat.errors import ContractRuntimeError
from namedmesh.compat.torchtitan import parallel_dims

needs_torchtitan = pytest.mark.oracle("torchtitan")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
# In the order of the ranks, so that any selection can be asked for.
NAMES = ("pp", "batch", "dp", "dp_replicate", "dp_shard", "fsdp", "cp", "efsdp", "tp", "ep", "loss", "none")


def random_degrees(rng: random.Random) -> tuple[dict[str, int], int, str]:
    """Degrees by axis, the number of ranks that share the experts, and a backend."""
    degrees = {
        "pp": rng.choice([1, 2]),
        "dp_replicate": rng.choice([1, 1, 2, 3]),
        "dp_shard": rng.choice([1, 2, 3, 4]),
        "cp": rng.choice([1, 2]),
        "tp": rng.choice([1, 2, 4]),
    }
    experts = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = rng.choice([1, *(ep for ep in range(1, experts + 1) if experts % ep == 0)])
    return degrees, ep, rng.choice(BACKENDS)


def expected_groups(degrees: dict[str, int], ep: int, rank: int) -> dict[str, list[int]]:
    """The ranks of this rank's group under each name, counted out from the order of the ranks."""
    dense = tuple(degrees.values())
    ranks = torch.arange(prod(dense))

    def mine(shape: tuple[int, ...], *over: int) -> list[int]:
        grid = ranks.reshape(shape)
        place = (grid == rank).nonzero()[0].tolist()
        picked = grid[tuple(slice(None) if i in over else place[i] for i in range(len(shape)))]
        return picked.flatten().tolist()

    sparse = (degrees["pp"], degrees["dp_replicate"], -1, ep)
    groups = {axis: mine(dense, place) for place, axis in enumerate(AXES)}
    groups |= {"batch": mine(dense, 1, 2), "dp": mine(dense, 1, 2), "fsdp": mine(dense, 2, 3)}
    return groups | {"loss": mine(dense, 1, 2, 3), "efsdp": mine(sparse, 2), "ep": mine(sparse, 3)}


@needs_torchtitan
def test_every_answer_is_that_of_dims_that_make_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtitan.distributed.parallel_dims as theirs

    monkeypatch.setattr(theirs, "device_type", "cpu")
    rng = random.Random(5)
    for _ in range(12):
        degrees, ep, backend = random_degrees(rng)
        world = prod(degrees.values())
        rank = rng.randrange(world)
        with fake_world(world, rank):
            mesh = namedmesh.init_mesh(degrees, device="cpu")
            ours = parallel_dims(mesh, ep=ep, spmd_backend=backend)
            assert isinstance(ours, theirs.ParallelDims)
            groups = [each.ranks for each in mesh.communicators]
            assert len(set(groups)) == len(groups)  # one group for each set of ranks
            for name, expected in expected_groups(degrees, ep, rank).items():
                if name in ours._single_axis_meshes:
                    of_axis = ours.get_optional_mesh(name, include_singleton_axes=True)
                    ranks = dist.get_process_group_ranks(of_axis.get_group())
                    assert of_axis.mesh.tolist() == ranks == expected, (degrees, name)
            other = theirs.ParallelDims(**degrees, ep=ep, world_size=world, spmd_backend=backend)
            other.build_mesh()
            for call, *arguments in _calls(rng):
                got, expected_answer = _answer(ours, call, *arguments), _answer(other, call, *arguments)
                assert got == expected_answer, (degrees, call, arguments)
            for name, kind in vars(theirs.ParallelDims).items():
                if isinstance(kind, property):
                    assert _shown(getattr(ours, name)) == _shown(getattr(other, name)), name
            ours._validate_meshes()
            mesh.close()


def _calls(rng: random.Random) -> list[tuple[Any, ...]]:
    selections: list[Any] = [*NAMES, *([name] for name in NAMES)]
    selections += [sorted(rng.sample(NAMES[:-1], rng.randint(2, 4)), key=NAMES.index) for _ in range(30)]
    calls: list[tuple[Any, ...]] = []
    for names in selections:
        calls += [("get_optional_mesh", names), ("get_mesh", names)]
        if not isinstance(names, str):
            calls.append(("get_activated_mesh", names))
            if not {"batch", "loss", "none"} & set(names):  # no names of a layout
                calls.append(("resolve_mesh", names))
    calls += [(name,) for name in ("spmd_dense_mesh", "spmd_sparse_mesh", "get_dense_tp_mesh", "spmd_meshes")]
    return [*calls, ("get_all_one_dimensional_meshes",)]


def _shown(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_shown(mesh) for mesh in answer]
    if isinstance(answer, dict):
        return {name: _shown(mesh) for name, mesh in sorted(answer.items())}
    if hasattr(answer, "mesh_dim_names"):
        return answer.mesh_dim_names, answer.mesh.tolist(), answer.get_coordinate()
    return answer


def _answer(dims: Any, call: str, *arguments: Any) -> Any:
    try:
        return _shown(getattr(dims, call)(*arguments))
    except (ValueError, KeyError, RuntimeError, AssertionError):
        return "refused"


@needs_torchtitan
def test_a_mesh_is_used_with_its_groups() -> None:
    with fake_world(16):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        before = {each.ranks for each in mesh.communicators}
        dims = parallel_dims(mesh, ep=4)
        assert (dims.pp, dims.dp_shard, dims.tp, dims.ep) == (2, 4, 2, 4)
        assert dims.get_mesh("tp").get_group() is mesh.group("tp")
        assert dims.get_mesh("dp").get_group() is dims.get_mesh("dp_shard").get_group() is mesh.group("dp")
        assert dims.get_mesh(["efsdp", "ep"]).shape == (2, 4)
        assert dims.get_mesh(["efsdp", "ep"]) is dims.get_mesh(["efsdp", "ep"])
        new = {each.ranks for each in mesh.communicators} - before
        # This rank alone, and what only the experts have: efsdp and ep.
        assert new == {(0,), (0, 4), (0, 1, 2, 3)}
        assert parallel_dims(mesh).ep == 4  # a second one finds the factorings
        with pytest.raises(LayoutError, match="axis 'efsdp' groups rank 0 with"):
            parallel_dims(mesh, ep=2)
        mesh.close()
        assert live_groups() == 1


@needs_torchtitan
@pytest.mark.parametrize(
    ("sizes", "options", "text"),
    [
        ({"tp": 2, "dp_shard": 8}, {}, "axis 'dp_shard' groups rank 0 with"),
        ({"dp": 8, "sp": 2}, {}, "axis 'sp' has no place in torchtitan's groups"),
        ({"dp": 16}, {"ep": 3}, "ep=3.*does not divide the world of 16 ranks"),
        ({"dp": 16}, {"spmd_backend": "spmd_type"}, "did you mean 'spmd_types'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    sizes: dict[str, int], options: dict[str, Any], text: str
) -> None:
    with fake_world(16):
        mesh = namedmesh.init_mesh(sizes, device="cpu")
        with pytest.raises(LayoutError, match=text):
            parallel_dims(mesh, **options)
        mesh.close()


def test_without_the_release_that_was_compared_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "torchtitan.distributed.parallel_dims"
    monkeypatch.setitem(sys.modules, place, None)
    with pytest.raises(ContractRuntimeError, match=r"which cannot be imported .* install it"):
        parallel_dims(None)  # type: ignore[arg-type]
    other = ModuleType(place)
    other.ParallelDims = make_dataclass("ParallelDims", ["dp", "tp"])  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, place, other)
    with pytest.raises(ContractRuntimeError, match="other fields than in release"):
        parallel_dims(None)  # type: ignore[arg-type]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.experts: Any = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = x + self.down(self.up(x).relu())
        return hidden.square().mean()


def _train() -> float:
    """HSDP with tensor parallelism, and experts over two axes; the greatest deviation of a gradient."""
    mesh = namedmesh.init_mesh(dp_replicate=2, dp_shard=2, tp=2)
    dims = parallel_dims(mesh, ep=2, spmd_backend="partial_dtensor")
    model, whole = _Model(), _Model()
    tp, ep = dims.get_mesh("tp"), dims.get_mesh("ep")
    parallelize_module(model, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.experts.weight = nn.Parameter(distribute_tensor(whole.experts.weight.detach(), ep, [Shard(0)]))
    fully_shard(model.experts, mesh=dims.get_mesh(["dp_replicate", "efsdp"]))
    fully_shard(model, mesh=dims.get_mesh(["dp_replicate", "fsdp"]))
    assert isinstance(model.experts.weight, DTensor)
    assert model.experts.weight.device_mesh.mesh_dim_names == ("dp_replicate", "efsdp", "ep")
    samples = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))
    batch, loss_mesh = dims.get_mesh("batch"), dims.get_mesh("loss")
    loss = model(samples[batch.get_local_rank()])
    loss.backward()
    expected = torch.stack([whole(sample) for sample in samples]).mean()
    expected.backward()
    deviations = [summed(loss_mesh.get_group(), loss.item()) / 4 - expected.item()]
    deviations.append((model.experts.weight.full_tensor() - whole.experts.weight).abs().max().item())
    for name in ("up", "down"):
        grad, right = getattr(model, name).weight.grad, getattr(whole, name).weight.grad
        deviations.append((grad.full_tensor() - right).abs().max().item())
    mesh.close()
    return max(map(abs, deviations))


@needs_torchtitan
@pytest.mark.skipif(
    TORCH.release < (2, 9), reason="torch 2.8's full_tensor misplaces what HSDP and tensor parallelism shard"
)
def test_training_on_them_is_training_in_one_process() -> None:
    assert max(run_ranks(8, _train)) < 1e-6
