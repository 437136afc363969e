"""What all dialects have in common, and every dialect on one mesh at the same time."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from messages import error_of, says
from ranks import fake_world, live_groups, run_ranks

import namedmesh
from namedmesh import Layout, LayoutError, MeshError, NamedMesh
from namedmesh.compat import deepspeed, diff, ezpz, fairscale, megatron
from namedmesh.compat.ezpz import tp as ezpz_tp
from namedmesh.compat.fairscale import initialize
from namedmesh.compat.megatron import parallel_state
from namedmesh.compat.process_groups import ProcessGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Dialect(NamedTuple):
    """A dialect with variables: what binds, its module, and its names."""

    package: Any
    module: Any
    initialize: str
    destroy: str
    initialized: str
    tp: str
    variable: str

    def start(self, *sizes: int) -> None:
        getattr(self.module, self.initialize)(*sizes)

    def stop(self) -> None:
        getattr(self.module, self.destroy)()

    def is_initialized(self) -> bool:
        return bool(getattr(self.module, self.initialized)())

    def tp_size(self) -> int:
        return int(getattr(self.module, f"get_{self.tp}_parallel_world_size")())


DIALECTS = [
    Dialect(
        megatron,
        parallel_state,
        "initialize_model_parallel",
        "destroy_model_parallel",
        "is_initialized",
        "tensor_model",
        "_PIPELINE_GLOBAL_RANKS",
    ),
    Dialect(
        fairscale,
        initialize,
        "initialize_model_parallel",
        "destroy_model_parallel",
        "model_parallel_is_initialized",
        "model",
        "_PIPELINE_PARALLEL_RANKS",
    ),
    Dialect(
        ezpz,
        ezpz_tp,
        "initialize_tensor_parallel",
        "destroy_tensor_parallel",
        "tensor_parallel_is_initialized",
        "tensor",
        "_PIPELINE_PARALLEL_RANKS",
    ),
]
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.package.__name__)


@pytest.fixture(autouse=True)
def _nothing_bound() -> Iterator[None]:
    yield
    for dialect in DIALECTS:
        dialect.stop()
        assert not dialect.is_initialized()


# Sharing.


def groups(mesh: NamedMesh) -> dict[str, list[dist.ProcessGroup]]:
    """Every dialect's group over each axis, and the mesh's."""
    unit: Any = deepspeed.mpu(mesh)
    found = {
        "tp": [
            parallel_state.get_tensor_model_parallel_group(),
            initialize.get_model_parallel_group(),
            ezpz_tp.get_tensor_parallel_group(),
            unit.get_tensor_model_parallel_group(),
        ],
        "pp": [
            parallel_state.get_pipeline_model_parallel_group(),
            initialize.get_pipeline_parallel_group(),
            ezpz_tp.get_pipeline_parallel_group(),
            unit.get_pipeline_model_parallel_group(),
        ],
        "dp": [
            parallel_state.get_data_parallel_group(),
            initialize.get_data_parallel_group(),
            ezpz_tp.get_data_parallel_group(),
            unit.get_data_parallel_group(),
        ],
        "cp": [
            parallel_state.get_context_parallel_group(),
            initialize.get_context_parallel_group(),
            ezpz_tp.get_context_parallel_group(),
        ],
    }
    if "cp" not in mesh.layout:
        bound = ProcessGroups.bind(mesh)
        for axis, group in (("tp", bound.tp_group), ("pp", bound.pp_group), ("dp", bound.dp_group)):
            found[axis].append(group)
    for axis in found.keys() & {*mesh.layout}:
        found[axis] += [mesh.group(axis), mesh[axis].get_group()]
    return found


BOUND: tuple[dict[str, int], ...] = (
    {"pp": 2, "dp": 2, "tp": 2},
    {"tp": 2, "cp": 2, "dp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"dp": 8},
)


def bind_all(sizes: dict[str, int], order: list[int]) -> list[Any]:
    mesh = namedmesh.init_mesh(Layout(**sizes), device="cpu")
    for one in order:
        DIALECTS[one].package.bind(mesh)
    assert all(dialect.package.current_mesh() is mesh for dialect in DIALECTS)
    told: list[Any] = []
    for name, asked in groups(mesh).items():
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=asked[0])
        ranks = dist.get_process_group_ranks(asked[0])
        told.append(
            (name, len({id(group) for group in asked}), tensor.item() in {sum(ranks), dist.get_rank()})
        )
    held = len(mesh.communicators)
    for dialect in DIALECTS:
        dialect.package.bind(mesh)
    told.append(len(mesh.communicators) == held)
    fairscale.destroy_model_parallel()
    ezpz.unbind()
    told.append(not mesh.closed and not ezpz_tp.tensor_parallel_is_initialized())
    dist.barrier()
    mesh.close()
    return [*told, any(dialect.is_initialized() for dialect in DIALECTS)]


SHARED = [("tp", 1, True), ("pp", 1, True), ("dp", 1, True), ("cp", 1, True), True, True, False]


@pytest.mark.parametrize("sizes", BOUND)
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
def test_dialects_that_are_bound_to_one_mesh_share_its_groups(
    sizes: dict[str, int], order: list[int]
) -> None:
    with fake_world(8, 5):
        assert bind_all(sizes, order) == SHARED


def test_dialects_share_groups_on_gloo() -> None:
    for told in run_ranks(8, lambda: [bind_all(BOUND[which], [1, 0, 2]) for which in (0, 2)]):
        assert told == [SHARED] * 2


def _again_and_again() -> list[Any]:
    """Ten times each dialect's groups: whether they add up their ranks, and how many groups stay."""
    before, told = live_groups(), []
    for turn in range(10):
        parallel_state.initialize_model_parallel(
            2, expert_model_parallel_size=2, num_distributed_optimizer_instances=1 + turn % 2
        )
        used = [parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)]
        told.append(_sums(used))
        parallel_state.destroy_model_parallel()
        fairscale.initialize_model_parallel(2, 2)
        fairscale.layers.RowParallelLinear(4, 4)(torch.ones(1, 4)).sum().backward()
        told.append(_sums([fairscale.get_model_parallel_group(), fairscale.get_pipeline_parallel_group()]))
        fairscale.destroy_model_parallel()
        ezpz_tp.initialize_tensor_parallel(
            2, 2, tensor_parallel_backend="gloo", timeout=timedelta(seconds=60)
        )
        told.append(
            _sums(
                getattr(ezpz_tp, f"get_{axis}_parallel_group")()
                for axis in ("tensor", "context", "pipeline", "data")
            )
        )
        ezpz_tp.destroy_tensor_parallel()
        three = ProcessGroups(tp=2, pp=2, dp=2)
        told.append(_sums([three.tp_group, three.pp_group, three.dp_group]))
        three.close()
        told.append(three.mesh.closed and live_groups() == before)
    return told


def _sums(asked: Any) -> bool:
    right = []
    for group in asked:
        tensor = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(tensor, group=group)
        right.append(tensor.item() == sum(dist.get_process_group_ranks(group)))
    return all(right)


def test_groups_work_on_gloo_and_ten_times_leave_nothing_behind() -> None:
    assert run_ranks(8, _again_and_again, timeout=180) == [[True] * 50] * 8


# Several meshes.


@each_dialect
def test_with_switches_between_meshes(dialect: Dialect) -> None:
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        stranger = namedmesh.init_mesh(dp=8, device="cpu")
        dialect.package.bind(first)
        with dialect.package.bind(second) as bound:
            assert bound is second is dialect.package.current_mesh()
            assert dialect.tp_size() == 4
            setattr(dialect.module, dialect.variable, "patched")
            with first:
                assert dialect.tp_size() == 2
                assert getattr(dialect.module, dialect.variable) == [5]
            assert getattr(dialect.module, dialect.variable) == "patched"  # it stays with its mesh
        assert dialect.tp_size() == 2
        with stranger:
            if dialect.package is ezpz:
                assert dialect.tp_size() == 1  # as before initialization
            else:
                with pytest.raises(AssertionError, match=rf"call {dialect.initialize}\(\.\.\.\), or"):
                    dialect.tp_size()
        with second:
            assert getattr(dialect.module, dialect.variable) == "patched"
            second.close()
            assert not dialect.is_initialized()
        assert dialect.package.current_mesh() is first
        dialect.package.unbind()
        assert not dialect.is_initialized()
        for mesh in (first, stranger):
            mesh.close()


@each_dialect
def test_leaving_a_binding_goes_back_even_if_the_mesh_before_is_closed(dialect: Dialect) -> None:
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        dialect.package.bind(first)
        with dialect.package.bind(second):
            first.close()
            assert dialect.tp_size() == 4
        assert not dialect.is_initialized()
        second.close()


@each_dialect
def test_initialization_inside_of_another_mesh_is_refused(dialect: Dialect) -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(dp=4, tp=2, device="cpu")
        before = live_groups()
        with mesh, pytest.raises(MeshError, match=r"the mesh over dp=4 x tp=2 .* is selected, and "):
            dialect.start(2)
        assert live_groups() == before
        dialect.start(2)
        own = dialect.package.current_mesh()
        with mesh, pytest.raises(AssertionError, match="already initialized, for "):
            dialect.start(2)
        dialect.stop()
        assert own.closed
        mesh.close()


# Mistakes.

BINDS: list[Callable[[Any], object]] = [
    megatron.bind,
    fairscale.bind,
    ezpz.bind,
    deepspeed.mpu,
    deepspeed.PipelineParallelGrid.from_mesh,
    ProcessGroups.bind,
]


@pytest.mark.parametrize("bind", [*BINDS, megatron.hyper_comm_grid])
def test_what_is_no_open_mesh_is_refused(bind: Callable[[Any], object]) -> None:
    for value, kind in ((None, "NoneType"), (3, "int")):
        with pytest.raises(MeshError, match=rf"^\S+ got a {kind}; give it a NamedMesh, such as"):
            bind(value)
    with fake_world(8):
        mesh = namedmesh.init_mesh(dp=8, device="cpu")
        mesh.close()
        with pytest.raises(
            MeshError, match=r"^the mesh over dp=8 \(8 ranks\) was closed; give \S+ an open one"
        ):
            bind(mesh)


@pytest.mark.parametrize(
    ("bind", "sizes", "text"),
    [
        (
            megatron.bind,
            {"dp": 4, "xp": 2},
            "axis 'xp' has no place in Megatron's groups, which are over pp, dp, cp, tp, dp_replicate, dp_shard, sp, "
            "gtp_remat; did you mean 'tp'?",
        ),
        (
            megatron.bind,
            {"dp": 4, "ep": 2},
            "axis 'ep' is one of the experts', and they factor the world another way; leave it out of the mesh and "
            "add a view for it: mesh.add_view('expert', pp=..., edp=-1, ep=..., etp=...)",
        ),
        (
            fairscale.bind,
            {"dp": 4, "ep": 2},
            "axis 'ep' has no place in fairscale's groups, which are over pp, dp, cp, tp, dp_replicate, dp_shard; did you mean 'tp'?",
        ),
        (
            ProcessGroups.bind,
            {"dp": 4, "cp": 2},
            "axis 'cp' of dp=4 x cp=2 (8 ranks) has no place in ProcessGroups, which are over tp, pp and dp; use the mesh itself",
        ),
        (
            deepspeed.PipelineParallelGrid.from_mesh,
            {"dp_shard": 2, "tp": 2, "dp_replicate": 2},
            "axes 'dp_shard' and 'dp_replicate' do not adjoin in dp_shard=2 x tp=2 x dp_replicate=2 (8 ranks), and a "
            "topology of DeepSpeed's has one data axis; put one right after the other",
        ),
        (
            deepspeed.PipelineParallelGrid.from_mesh,
            {"pp": 2, "pipe": 2, "dp": 2},
            "axes 'pp' and 'pipe' of pp=2 x pipe=2 x dp=2 (8 ranks) both are what DeepSpeed calls pipe; use one of them",
        ),
        (
            deepspeed.mpu,
            {"dp": 2, "ep": 2, "tq": 2},
            "2 problems:\n"
            "  - axis 'ep' is one of the experts', and DeepSpeed makes its own groups for them; leave it out of the mesh\n"
            "  - axis 'tq' has no place in DeepSpeed's groups, which are over pp, pipe, dp, data, dp_replicate, "
            "dp_shard, tp, model, sp, cp; did you mean 'tp'?",
        ),
    ],
)
def test_meshes_that_a_dialect_cannot_be_bound_to(
    bind: Callable[[NamedMesh], object], sizes: dict[str, int], text: str
) -> None:
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(Layout(**sizes), device="cpu")
        with pytest.raises(LayoutError, match=says(text)):
            bind(mesh)
        mesh.close()


@pytest.mark.parametrize(
    ("dialect", "size", "function"),
    [
        (DIALECTS[1], "model_parallel_size_", "fairscale's initialize_model_parallel"),
        (DIALECTS[2], "tensor_parallel_size", "ezpz's initialize_tensor_parallel"),
    ],
)
def test_a_size_above_the_world_is_cut_down(dialect: Dialect, size: str, function: str) -> None:
    with fake_world(4):
        with pytest.warns(UserWarning, match="is 8") as caught:
            getattr(dialect.module, dialect.initialize)(8)
        assert dialect.tp_size() == 4
        dialect.stop()
    assert str(caught[0].message) == f"{size} is 8, but the world has 4 ranks; {function} goes on with 4"
    assert caught[0].filename == __file__


# A call that gets a size of tensor parallelism, or of the pipeline; 2 is right, and 3 is not.
STARTS: dict[str, Callable[[int], Any]] = {
    "megatron.initialize_model_parallel": parallel_state.initialize_model_parallel,
    "fairscale.initialize_model_parallel": fairscale.initialize_model_parallel,
    "ezpz.initialize_tensor_parallel": ezpz_tp.initialize_tensor_parallel,
    "init_mesh": lambda size: ProcessGroups(size, 1, 4 // size if size != 3 else 2),
    "deepspeed.PipelineParallelGrid": lambda size: deepspeed.PipelineParallelGrid(
        deepspeed.PipeDataParallelTopology(size, 4 // size if size != 3 else 2)
    ),
}


def _disagree() -> list[list[str]]:
    last = dist.get_rank() == 3
    return [
        [error_of(lambda start=start, size=size: start(size if last else 2)) for start in STARTS.values()]  # type: ignore[misc]
        for size in (4, 3)
    ]


def test_ranks_that_differ_or_fail_are_reported_instead_of_hanging() -> None:
    fields = (
        "tensor_model_parallel_size",
        "model_parallel_size_",
        "tensor_parallel_size",
        "layout",
        "layout",
    )
    *others, guilty = run_ranks(4, _disagree)
    for differs, _ in (*others, guilty):
        for text, field in zip(differs, fields, strict=True):
            assert text.startswith(f"AgreementError: {field} differs between ranks: "), text
            assert " on ranks 0, 1, 2; " in text
            assert " on rank 3" in text
    for _, failed in others:
        for text, call in zip(failed, STARTS, strict=True):
            assert f"rank 3 gave up on {call}" in text
    assert not any(text.startswith("AgreementError") for text in guilty[1])
    assert all("3 " in text for text in guilty[1])


def _closed_by_rank_0() -> list[str]:
    """A group that a mesh lacks, and that another mesh has on all ranks but one."""
    closed, mesh = (namedmesh.init_mesh(pp=2, dp_replicate=2, dp_shard=2) for _ in range(2))
    closed.flatten("dp_replicate", "dp_shard")
    if dist.get_rank() == 0:
        closed.close()
    return [error_of(lambda bind=bind: bind(mesh)) for bind in BINDS]  # type: ignore[misc]


def test_a_group_that_only_some_ranks_have_is_named_on_every_rank() -> None:
    for errors in run_ranks(8, _closed_by_rank_0):
        assert len(errors) == len(BINDS)
        for error in errors:
            assert error.startswith("AgreementError: ")
            assert "the group over dp_replicate x dp_shard of ranks 0, 1, 2, 3" in error
            assert "still belongs to an earlier mesh on ranks 1 to 3 only" in error or "1, 2, 3 only" in error


def test_the_difference_between_dialects_is_that_of_their_groups() -> None:
    """What `diff` says of Megatron and fairscale is what their own initializations make."""
    said = {
        kind.axes: kind.same
        for kind in diff("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16).kinds
    }
    same = dict.fromkeys([("tp",), ("pp",), ("dp",)], True)
    for rank in range(16):
        seen: list[dict[tuple[str, ...], list[int]]] = []
        with fake_world(16, rank):
            for dialect in DIALECTS[:2]:
                dialect.start(2, 4)
                mesh = dialect.package.current_mesh()
                seen.append({(axis,): list(mesh.ranks(axis)) for axis in ("tp", "pp", "dp")})
                dialect.stop()
        for axes in same:
            same[axes] = same[axes] and seen[0][axes] == seen[1][axes]
    assert {axes: said[axes] for axes in same} == same == {("tp",): True, ("pp",): False, ("dp",): False}
