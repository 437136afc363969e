"""``ParallelDims`` against torchtitan's where it is installed, against an own calculation, and in training."""

from __future__ import annotations

import random
import sys
from math import prod
from types import SimpleNamespace
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
from namedmesh.compat import torchtitan
from namedmesh.compat.errors import ContractError
from namedmesh.compat.torchtitan import ParallelDims

BACKENDS = ("partial_dtensor", "full_dtensor", "spmd_types")
# In the order of the ranks, so that any selection can be asked for.
NAMES = ("pp", "batch", "dp", "dp_replicate", "dp_shard", "fsdp", "cp", "efsdp", "tp", "ep", "loss", "none")


def make(**degrees: Any) -> ParallelDims:
    """Dims of the degrees that are named, the others being 1."""
    chosen = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1) | degrees
    world_size = prod(chosen[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    return ParallelDims(**({"world_size": world_size} | chosen))


def random_degrees(rng: random.Random) -> dict[str, Any]:
    degrees: dict[str, Any] = {
        "dp_replicate": rng.choice([1, 1, 2, 3]),
        "dp_shard": rng.choice([1, 2, 3, 4]),
        "cp": rng.choice([1, 2]),
        "tp": rng.choice([1, 2, 4]),
        "pp": rng.choice([1, 2]),
    }
    experts = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    degrees["ep"] = rng.choice([1, *(ep for ep in range(1, experts + 1) if experts % ep == 0)])
    return degrees | {"spmd_backend": rng.choice(BACKENDS)}


def expected_groups(dims: ParallelDims, rank: int) -> dict[str, list[int]]:
    """The ranks of this rank's group under each name, counted out from the order of the ranks."""
    dense = (dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp)
    ranks = torch.arange(prod(dense))
    experts = dims.dp_shard * dims.cp * dims.tp

    def mine(shape: tuple[int, ...], over: tuple[int, ...]) -> list[int]:
        grid = ranks.reshape(shape)
        place = (grid == rank).nonzero()[0].tolist()
        return (
            grid[tuple(slice(None) if i in over else place[i] for i in range(len(shape)))].flatten().tolist()
        )

    sparse = (dims.pp, dims.dp_replicate, experts // dims.ep, dims.ep)
    return {
        "pp": mine(dense, (0,)),
        "dp_replicate": mine(dense, (1,)),
        "dp_shard": mine(dense, (2,)),
        "cp": mine(dense, (3,)),
        "tp": mine(dense, (4,)),
        "batch": mine(dense, (1, 2)),
        "dp": mine(dense, (1, 2)),
        "fsdp": mine(dense, (2, 3)),
        "loss": mine(dense, (1, 2, 3)),
        "efsdp": mine(sparse, (2,)),
        "ep": mine(sparse, (3,)),
    }


def test_every_name_has_the_ranks_that_counting_gives() -> None:
    rng = random.Random(3)
    for _ in range(12):
        degrees = random_degrees(rng)
        dims = make(**degrees)
        rank = rng.randrange(dims.world_size)
        with fake_world(dims.world_size, rank):
            expected = expected_groups(dims, rank)
            backend = dims.spmd_backend
            absent = {
                "partial_dtensor": ("dp", "dp_shard"),
                "full_dtensor": ("dp", "fsdp"),
                "spmd_types": ("fsdp",),
            }
            for name, ranks in expected.items():
                if name in absent[backend]:
                    with pytest.raises(ValueError, match=f"Invalid mesh dim '{name}'"):
                        dims.get_optional_mesh(name)
                    continue
                always = name in {"fsdp", "dp_shard"} or (name == "efsdp" and dims.ep > 1)
                never = name == "efsdp" and dims.ep == 1
                mesh = dims.get_optional_mesh(name)
                assert (mesh is not None) == ((len(ranks) > 1 or always) and not never), (degrees, name)
                mesh = mesh or dims.get_optional_mesh(name, include_singleton_axes=True)
                assert mesh is not None
                assert mesh.mesh.tolist() == ranks == dist.get_process_group_ranks(mesh.get_group())
            assert dims.world_mesh.mesh.tolist() == list(range(dims.world_size))
            assert dims.mesh is not None
            groups = [each.ranks for each in dims.mesh.communicators]
            assert len(set(groups)) == len(groups)  # one group for each set of ranks
            dims.mesh.close()
            assert live_groups() == 1


def test_the_package_gives_the_same_answers() -> None:
    theirs = pytest.importorskip("torchtitan.distributed.parallel_dims", reason="needs torchtitan")
    theirs.device_type = "cpu"
    rng = random.Random(5)
    for _ in range(10):
        degrees = random_degrees(rng)
        ours = make(**degrees)
        with fake_world(ours.world_size, rng.randrange(ours.world_size)):
            ours.build_mesh()
            other = theirs.ParallelDims(**degrees, world_size=ours.world_size)
            selections: list[Any] = [*NAMES, *([name] for name in NAMES)]
            selections += [
                sorted(rng.sample(NAMES[:-1], rng.randint(2, 4)), key=NAMES.index) for _ in range(30)
            ]
            for names in selections:
                for call in ("get_optional_mesh", "get_mesh", "get_activated_mesh", "resolve_mesh"):
                    if call in {"get_activated_mesh", "resolve_mesh"} and isinstance(names, str):
                        continue
                    if "pp" in names and "dp" in names:
                        continue  # theirs has no mesh of both
                    if call == "resolve_mesh" and {"batch", "loss", "none"} & set(names):
                        continue  # no names of a layout
                    got = _answer(ours, call, names)
                    assert got == _answer(other, call, names), (degrees, call, names)
            for call in ("spmd_dense_mesh", "spmd_sparse_mesh", "get_dense_tp_mesh"):
                assert _answer(ours, call) == _answer(other, call), (degrees, call)
            assert [_shown(mesh) for mesh in ours.spmd_meshes()] == [
                _shown(mesh) for mesh in other.spmd_meshes()
            ]
            assert list(ours.get_all_one_dimensional_meshes()) == list(other.get_all_one_dimensional_meshes())
            for name, kind in vars(theirs.ParallelDims).items():
                if isinstance(kind, property) and name != "world_mesh":
                    assert getattr(ours, name) == getattr(other, name), name
            assert ours.mesh is not None
            ours.mesh.close()


def _shown(mesh: Any) -> Any:
    return mesh and (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate())


def _answer(dims: Any, call: str, *arguments: Any) -> Any:
    try:
        return _shown(getattr(dims, call)(*arguments))
    except (ValueError, KeyError, RuntimeError):
        return "refused"


def test_a_mesh_that_exists_is_used_with_its_groups() -> None:
    with fake_world(16):
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        before = {each.ranks for each in mesh.communicators}
        dims = ParallelDims.bind(mesh, ep=4)
        assert (dims.pp, dims.dp_shard, dims.tp, dims.ep) == (2, 4, 2, 4)
        assert dims.get_mesh("tp").get_group() is mesh.group("tp")
        assert dims.get_mesh("dp").get_group() is dims.get_mesh("dp_shard").get_group() is mesh.group("dp")
        assert dims.get_mesh(["efsdp", "ep"]).shape == (2, 4)
        assert dims.get_mesh(["efsdp", "ep"]) is dims.get_mesh(["efsdp", "ep"])
        new = {each.ranks for each in mesh.communicators} - before
        # This rank alone, and what only the experts have: efsdp and ep.
        assert new == {(0,), (0, 4), (0, 1, 2, 3)}
        assert ParallelDims.bind(mesh).ep == 4  # a second one finds the factorings
        with pytest.raises(LayoutError, match="axis 'efsdp' groups rank 0 with"):
            ParallelDims.bind(mesh, ep=2)
        mesh.close()
        wrong = namedmesh.init_mesh(tp=2, dp_shard=8, device="cpu")
        with pytest.raises(LayoutError, match="axis 'dp_shard' groups rank 0 with"):
            ParallelDims.bind(wrong)
        wrong.close()
        wrong = namedmesh.init_mesh(dp=8, sp=2, device="cpu")
        with pytest.raises(LayoutError, match="axis 'sp' has no place in torchtitan's groups"):
            ParallelDims.bind(wrong)
        wrong.close()


def test_degrees_that_do_not_fit_are_refused_all_at_once() -> None:
    with pytest.raises(ContractError) as caught:
        make(tp=0, dp_shard=0, spmd_backend="spmd_type")
    assert str(caught.value) == (
        "3 problems:\n"
        "  - dp_shard=0 is below 1; a degree is 1 where it is not used\n"
        "  - tp=0 is below 1; a degree is 1 where it is not used\n"
        "  - spmd_backend='spmd_type' is not one of ('partial_dtensor', 'full_dtensor', 'spmd_types'); did you mean "
        "'spmd_types'?"
    )
    with pytest.raises(
        AssertionError, match="x dp_shard=2 x cp=1 x tp=2 needs 4 ranks, but the world has 10"
    ):
        make(dp_shard=2, tp=2, world_size=10)
    with pytest.raises(AssertionError, match="cp=1 x tp=3 = 3 does not divide the world of 8 ranks"):
        make(dp_shard=-1, tp=3, world_size=8)
    assert make(dp_shard=-1, tp=2, world_size=8).dp_shard == 4
    with fake_world(4):
        dims = make(dp_shard=2, tp=2, spmd_backend="full_dtensor")
        with pytest.raises(ValueError, match="the mesh over 'cp' is not available: an axis of size 1"):
            dims.get_mesh("cp")
        with pytest.raises(LayoutError, match="axes 'dp_replicate' and 'batch' are not together"):
            dims.get_optional_mesh(["dp_replicate", "batch"], include_singleton_axes=True)
        with pytest.raises(
            LayoutError, match=r"axes 'tp' and 'dp_shard' are not together in one .* in its order"
        ):
            dims.get_mesh(["tp", "dp_shard"])
        with pytest.raises(LayoutError, match="axes 'tp' are not all of a mesh of parameters"):
            dims.resolve_mesh(["tp"])
        whole, part = (SimpleNamespace(axes=lambda axes=axes: axes) for axes in (["dp", "tp"], ["tp"]))
        assert dims.resolve_shared_mesh([whole, None]) is dims.get_mesh(["dp_shard", "tp"])
        assert dims.resolve_shared_mesh([None]) is None
        with pytest.raises(AssertionError, match="the layouts of one boundary are over"):
            dims.resolve_shared_mesh([whole, part])
        with pytest.raises(LayoutError, match="is of the backend 'spmd_types', and this is 'full_dtensor'"):
            dims.spmd_dense_mesh()
        assert dims.mesh is not None
        dims.mesh.close()


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
    dims = make(dp_replicate=2, dp_shard=2, tp=2, ep=2, spmd_backend="partial_dtensor")
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
    assert dims.mesh is not None
    dims.mesh.close()
    return max(map(abs, deviations))


@pytest.mark.skipif(
    TORCH.release < (2, 9), reason="torch 2.8's full_tensor misplaces what HSDP and tensor parallelism shard"
)
def test_training_on_them_is_training_in_one_process() -> None:
    assert max(run_ranks(8, _train)) < 1e-6


def test_layouts_by_the_names_of_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    name = torchtitan.MeshAxisName
    monkeypatch.setitem(sys.modules, "spmd_types", SimpleNamespace(S=lambda dim: f"S({dim})"))
    layout = torchtitan.SpmdLayout({name.DP: "R", name.CP: "V", name.TP: "V"}, (None, (name.CP, name.TP)))
    assert layout.axes() == ("dp", "cp", "tp")
    assert layout.shard_types() == {name.DP: "R", name.CP: "S(1)", name.TP: "S(1)"}
    with pytest.raises(TypeError, match="names 'tp' for dim 0; give a MeshAxisName"):
        torchtitan.SpmdLayout({name.TP: "R"}, ("tp",)).shard_types()


def test_an_ep_that_does_not_divide_is_refused_at_once() -> None:
    with pytest.raises(
        AssertionError, match="dp_replicate=2 x ep=3 = 6 does not divide the world of 8 ranks"
    ):
        torchtitan.ParallelDims(2, 2, 1, 2, 1, 3, 8)
