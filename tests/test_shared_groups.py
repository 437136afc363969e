"""Meshes that come one after another, and meshes that are alive together: one group for one set of ranks."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import fake_world, live_groups, run_ranks, summed
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import namedmesh
from namedmesh import GroupOptions, Layout, MeshError
from namedmesh.compat import fairscale
from namedmesh.compat.megatron import parallel_state
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def make() -> namedmesh.NamedMesh:
    return namedmesh.init_mesh(dp=2, tp=2)


def trained(mesh: namedmesh.NamedMesh, *, compiled: bool = False) -> list[float]:
    """Losses and gradient norms of some steps of tensor and data parallelism with clipping."""
    net = parallelize(tiny.model(), mesh["tp"], PLAN)
    for block in net.children():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    forward = torch.compile(net, backend="aot_eager") if compiled else net
    rows = tiny.batch(8).chunk(2)[mesh.rank("dp")]
    told = []
    for _ in range(2):
        loss = forward(rows).pow(2).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()]
    get_state_dict(net, optimizer)
    return told


def _lives() -> dict[str, list[list[float]]]:
    """The numbers of one life of a mesh after another; and of meshes with a timeout of their own.

    The default group of the forked ranks has another timeout than torch's own.
    """
    timeouts: list[timedelta | None] = [None, None, timedelta(seconds=50), timedelta(seconds=70)]
    found: dict[str, list[list[float]]] = {"eager": [], "compiled": []}
    for timeout in timeouts:
        mesh = namedmesh.init_mesh(dp=2, tp=2, timeout=timeout)
        found["eager"].append(trained(mesh))
        mesh.close()
        assert live_groups() == 1
    for _ in range(2):
        mesh = make()
        found["compiled"].append(trained(mesh, compiled=True))
        mesh.close()
        assert live_groups() == 1
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler asks for it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # and does it
def test_a_mesh_closed_and_made_again_trains_alike() -> None:
    for found in run_ranks(4, _lives, timeout=150):
        for lives in found.values():
            assert len(lives[0]) == 4
            assert all(life == lives[0] for life in lives)


def _dialects_again() -> list[float]:
    told = []
    for _ in range(3):
        parallel_state.initialize_model_parallel(2)
        mesh = namedmesh.current_mesh()
        net = parallelize(tiny.model(), mesh["tp"], PLAN)
        told.append(tiny.losses(net, tiny.batch(4))[-1])
        told.append(summed(parallel_state.get_tensor_and_data_parallel_group()))
        parallel_state.destroy_model_parallel()
        fairscale.initialize_model_parallel(2)
        told.append(summed(fairscale.get_model_parallel_group(), dist.get_rank()))
        fairscale.destroy_model_parallel()
    told.append(live_groups())
    return told


def test_dialects_initialized_again_and_again() -> None:
    for rank, told in enumerate(run_ranks(4, _dialects_again)):
        assert told[:9] == told[:3] * 3
        assert told[1:3] == [4.0, rank // 2 * 4 + 1.0]
        assert told[9] == 1


def _together(second: Callable[[], namedmesh.NamedMesh]) -> list[Any]:
    """Two meshes at once, on the same groups; the one that outlives the other goes on."""
    first = make()
    expected = trained(first)
    other = second()
    names = [name for name in ("tp", "dp") if name in other.layout]
    told = [first.group(name) is other.group(name) for name in names]
    told.append(first["tp"] == other["tp"])
    tensor = distribute_tensor(torch.arange(4.0), other["tp"], [Shard(0)])
    first.close()
    added: Any = tensor.add(1)  # typed as a plain tensor
    told.append(added.redistribute(placements=[Replicate()]).to_local().tolist())
    told.append(trained(other) == expected)
    other.close()
    other.close()
    return [*told, live_groups()]


def test_two_equal_meshes_share_every_group() -> None:
    expected = [True, True, True, [1.0, 2.0, 3.0, 4.0], True, 1]
    assert run_ranks(4, _together, make) == [expected] * 4


def _overlapping() -> list[Any]:
    """A mesh over the world, one over a part, and views of both."""
    rank = dist.get_rank()
    whole = namedmesh.init_mesh(dp=4, tp=2)
    part = namedmesh.init_mesh(dp=2, tp=2, rank_offset=rank // 4 * 4, part=True)
    part.add_view("expert", edp=1, ep=4)
    whole.add_view("expert", edp=2, ep=4)
    told: list[Any] = [part.group("tp") is whole.group("tp"), part.group("ep") is whole.group("ep")]
    told.append(part.group("dp") is whole.group("dp"))
    summed(None)  # a group may be destroyed when all its members have it
    whole.close()
    told += [summed(part.group("tp")), summed(part.group("ep")), summed(part.group("dp"))]
    part.close()
    return [*told, live_groups()]


def test_overlapping_meshes_and_views_share_what_is_the_same() -> None:
    assert run_ranks(8, _overlapping) == [[True, True, False, 2.0, 4.0, 2.0, 1]] * 8


APART = (
    "'tp' would be on another process group than the 'tp' of the open mesh over dp=2 x tp=2 (4 ranks), and torch takes "
    "meshes with the same names and ranks for one; share the groups (the same options on both meshes), close the other "
    "mesh first, or choose another name"
)


def _apart() -> list[Any]:
    """What would mix two meshes up is refused, and each remedy works."""
    before = live_groups()
    first = make()
    slow = {"tp": GroupOptions(timeout=timedelta(seconds=44))}
    told: list[Any] = []
    for arguments in ({"share_groups": False}, {"options": slow}):
        try:
            namedmesh.init_mesh(Layout(dp=2, tp=2), **cast("Any", arguments))
        except MeshError as error:
            told.append(APART in str(error))
    named = namedmesh.init_mesh(data=2, tensor=2, share_groups=False)
    told += [named.group("tensor") is first.group("tp"), trained_names(named)]
    named.close()
    shared = namedmesh.init_mesh(dp=2, tp=2)
    told.append(shared.group("tp") is first.group("tp"))
    shared.close()
    first.close()
    alone = namedmesh.init_mesh(dp=2, tp=2, share_groups=False, options=slow)
    told.append(summed(alone.group("tp")))
    alone.close()
    return [*told, live_groups() - before]


def trained_names(mesh: namedmesh.NamedMesh) -> float:
    return tiny.losses(parallelize(tiny.model(), mesh["tensor"], PLAN), tiny.batch(4))[-1]


def test_meshes_that_torch_cannot_tell_apart_are_refused() -> None:
    outcomes = run_ranks(4, _apart)
    expected = tiny.losses(tiny.model(), tiny.batch(4))[-1]
    for told in outcomes:
        assert told[3] == pytest.approx(expected, abs=1e-9)
        assert told[:3] + told[4:] == [True, True, False, True, 2.0, 0]


def _closing() -> list[Any]:
    """One group destroyed by hand, and made again by the next mesh."""
    mesh = make()
    summed(mesh.group("tp"))
    dist.destroy_process_group(mesh.group("tp"))
    mesh.close()
    told: list[Any] = [live_groups(), mesh.closed]
    again = make()
    told.append(summed(again.group("tp")))
    again.close()
    return told


def test_close_goes_through_whatever_was_destroyed_by_hand() -> None:
    assert run_ranks(4, _closing) == [[1, True, 2.0]] * 4


def test_a_mesh_lives_until_it_is_closed() -> None:
    with fake_world(4):
        namedmesh.init_mesh(dp=2, tp=2, device="cpu")  # nobody keeps it
        mesh = namedmesh.current_mesh()
        with mesh:
            mesh.close()
            with pytest.raises(MeshError, match="was closed; leave the block first"):
                namedmesh.current_mesh()
        with pytest.raises(MeshError, match="no mesh is alive"):
            namedmesh.current_mesh()
        assert live_groups() == 1


class Worker(torch.utils.data.Dataset[int]):
    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        self.mesh = mesh

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_copies_share_the_mesh_and_pickles_say_what_to_send() -> None:
    text = (
        r"the mesh over dp=2 x tp=2 \(4 ranks\) cannot be pickled: its process groups live in this process only; send "
        r"mesh\.layout, mesh\.coords or the numbers that the other process needs, which can be pickled"
    )
    with fake_world(4, 3):
        mesh = namedmesh.init_mesh(dp=2, tp=2, device="cpu")
        holder = copy.deepcopy({"mesh": mesh, "sizes": [1]})
        assert holder["mesh"] is mesh is copy.copy(mesh)
        with pytest.raises(MeshError, match=text):
            pickle.dumps(mesh)
        loader = torch.utils.data.DataLoader(Worker(mesh), num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(MeshError, match=text):
            iter(loader)
        sent = pickle.dumps((mesh.layout, mesh.coords))
        assert pickle.loads(sent) == (mesh.layout, {"dp": 1, "tp": 1})  # noqa: S301  our own
        mesh.close()
