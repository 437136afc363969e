"""Megatron's parallel state on our groups, against megatron-core's own."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import (
    VARIABLES,
    answers,
    kind_of,
    last_only,
    middle_and_last,
    random_case,
    reset,
    variable_names,
    variables,
)
from megatron_newest import NEWEST, RELEASES, release
from messages import says
from ranks import fake_world, live_groups, run_ranks

import namedmesh
from namedmesh import NamedMesh, NamedMeshError
from namedmesh.compat import megatron
from namedmesh.compat.megatron import groups, parallel_state
from namedmesh.dialects import MEGATRON_GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator

VALID_CASES = 110  # of each release


@pytest.fixture(autouse=True)
def _nothing_bound() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    assert not parallel_state.is_initialized()


@pytest.fixture(params=RELEASES)
def theirs(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The original's parallel state, of one of two releases."""
    with release(request.param) as module:
        yield module


def oracle() -> Any:
    return importlib.import_module("megatron.core.parallel_state")


# The names.


@pytest.mark.oracle(NEWEST)
def test_every_public_name_is_there_with_the_same_signature() -> None:
    with release("newest") as theirs:
        functions = {
            name: value
            for name, value in vars(theirs).items()
            if inspect.isfunction(value) and value.__module__ == theirs.__name__
        }
        del functions["_inject_gtp_remat_axis"]
        assert len(functions) >= 88
        for name, function in functions.items():
            ours, original = (inspect.signature(each) for each in (getattr(parallel_state, name), function))
            told = [
                [
                    (parameter.name, parameter.kind, parameter.default)
                    for parameter in each.parameters.values()
                ]
                for each in (ours, original)
            ]
            # What release 0.16 has more stands behind, by name.
            assert told[0][: len(told[1])] == told[1], name
            assert all(default is not inspect.Parameter.empty for _, _, default in told[0][len(told[1]) :]), (
                name
            )
        ours, original = (
            inspect.signature(kind) for kind in (parallel_state.RankGenerator, theirs.RankGenerator)
        )
        assert list(ours.parameters) == list(original.parameters)


def test_each_row_of_the_table_is_what_its_accessor_answers() -> None:  # noqa: C901  one loop over the rows
    """The accessor that a row names answers with the row's variable, over the row's axes."""
    with fake_world(64, 13):
        parallel_state.initialize_model_parallel(
            2,
            2,
            gtp_remat_size=2,
            expert_gtp_remat_size=2,
            context_parallel_size=2,
            hierarchical_context_parallel_sizes=[2],
            hybrid_context_parallel=True,
            expert_model_parallel_size=2,
            create_all_gather_group=True,
        )
        mesh = megatron.current_mesh()
        layouts = {"dense": mesh.layout, "expert": mesh.views["expert"]}
        for row in MEGATRON_GROUPS:
            name, *flags = row.name.split()
            arguments: dict[str, Any] = dict.fromkeys(flags, True)
            if name in {"data_parallel", "expert_data_parallel"}:
                arguments.setdefault("with_gtp_remat", False)
            ranks = list(layouts[row.view].group(13, *row.axes))
            if name == "hierarchical_context_parallel":
                assert [
                    dist.get_process_group_ranks(group) for group in getattr(parallel_state, row.variable)
                ] == [ranks]
                assert parallel_state.get_hierarchical_context_parallel_groups() is getattr(
                    parallel_state, row.variable
                )
                continue
            if name == "hybrid_data_context_parallel":
                assert getattr(parallel_state, row.variable) == {
                    size: parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)
                    for size in (2, 4)
                }
                continue
            if name == "inter_distributed_optimizer_instance":  # there is one instance only
                assert getattr(parallel_state, row.variable) is None
                continue
            if row.name in {"embedding", "position_embedding"}:
                ranks = ranks[:1] if row.members == "first" else [ranks[0], ranks[-1]]
                assert getattr(parallel_state, row.ranks) == (ranks if 13 in ranks else None)
                if 13 not in ranks:
                    continue
            group = getattr(parallel_state, f"get_{name}_group")(**arguments)
            assert group is getattr(parallel_state, row.variable), row.name
            assert dist.get_process_group_ranks(group) == ranks, row.name
            if row.ranks:
                assert getattr(parallel_state, row.ranks) == ranks
            if row.gloo:  # there are none beside weights that are gathered for each use
                assert getattr(parallel_state, row.gloo) is None
    with fake_world(32, 13):
        parallel_state.initialize_model_parallel(2, 2, context_parallel_size=2)
        for row in MEGATRON_GROUPS:
            if row.gloo:
                name, *flags = row.name.split()
                arguments = dict.fromkeys(flags, True)
                gloo = getattr(parallel_state, f"get_{name}_group_gloo")(**arguments)
                assert gloo is getattr(parallel_state, row.gloo)


def test_every_module_level_variable_is_there(theirs: Any) -> None:
    names = set(variable_names(theirs))
    assert len(names) >= 50
    assert names <= set(VARIABLES) <= set(dir(parallel_state))


# The answers.


@pytest.mark.timeout(600)
def test_the_same_answers_in_random_configurations(theirs: Any) -> None:
    """Of the original, of the original on our groups, and of the newest one of our own module."""
    source = random.Random(20)
    newest = hasattr(theirs, "get_gtp_weight_remat_group")
    calls = [theirs.initialize_model_parallel]
    megatron.install()
    calls.append(theirs.initialize_model_parallel)
    assert inspect.signature(calls[0]) == inspect.signature(calls[1])
    valid = refused = 0
    while valid < VALID_CASES:
        world, first, arguments = random_case(source, newest=newest)
        last = first + arguments.get("local_world_size", world) - 1
        for rank in {source.choice((first, last)), source.randrange(first, last + 1)}:
            with fake_world(world, rank):
                told = [_outcome(call, theirs, arguments, theirs) for call in calls]
                if newest:
                    initialize = parallel_state.initialize_model_parallel
                    told.append(_outcome(initialize, parallel_state, arguments, theirs))
            assert told[1:] == told[:1] * (len(told) - 1), (world, rank, arguments)
        valid += isinstance(told[0], dict)
        refused += not isinstance(told[0], dict)
    assert refused > VALID_CASES // 20


def _outcome(initialize: Any, module: Any, arguments: dict[str, Any], original: Any) -> Any:
    try:
        initialize(**arguments)
    except Exception as error:  # noqa: BLE001  which one is what is compared
        told: Any = kind_of(error)
    else:
        told = answers(module, original) | variables(module, original)
    reset(module)
    return told


CASES_ON_GLOO: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "num_distributed_optimizer_instances": 2,
        "hierarchical_context_parallel_sizes": [2, 1],
        "create_all_gather_group": True,
        "use_sharp": True,
        "sharp_enabled_group": "dp_replica",
    },
    {
        "pipeline_model_parallel_size": 4,
        "context_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "get_embedding_ranks": middle_and_last,
        "get_position_embedding_ranks": last_only,
    },
    {
        "context_parallel_size": 4,
        "hybrid_context_parallel": True,
        "order": "dp-cp-tp-pp-ep",
        "use_sharp": True,
    },
)


def _on_gloo() -> list[Any]:
    return [_case_on_gloo(arguments) for arguments in CASES_ON_GLOO]


def _case_on_gloo(arguments: dict[str, Any]) -> Any:
    theirs = oracle()
    before = live_groups()
    told = [_outcome_and_sharp(theirs, arguments)]
    megatron.install()
    told.append(_outcome_and_sharp(theirs, arguments))
    megatron.uninstall()
    reset_groups = live_groups()
    parallel_state.initialize_model_parallel(**arguments)
    sums = {}
    for name in VARIABLES:
        for group in _groups_of(getattr(parallel_state, name)):
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=group)
            sums[name] = (tensor.item(), sum(dist.get_process_group_ranks(group)), dist.get_backend(group))
    parallel_state.destroy_model_parallel()
    return told, sums, live_groups() == reset_groups >= before


def _outcome_and_sharp(theirs: Any, arguments: dict[str, Any]) -> Any:
    """Also for which ranks NCCL would make a communicator with SHARP, and what it would read then and afterwards."""
    told = set()

    def barrier(group: Any, device_ids: list[int]) -> None:
        assert device_ids == [0]
        told.add((tuple(dist.get_process_group_ranks(group)), os.environ.get("NCCL_COLLNET_ENABLE")))

    def build_groups(mesh: NamedMesh, *others: Any) -> Any:
        device, mesh.device = mesh.device, torch.device("cuda", 0)
        values = groups.build_groups(mesh, *others)
        mesh.device = device
        return values

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NCCL_COLLNET_ENABLE", "1")  # of somebody else, for every group
        patched.setattr(dist, "barrier", barrier)
        patched.setattr(f"{megatron.__name__}.initialize.build_groups", build_groups)
        patched.setattr(torch.cuda, "current_device", lambda: 0)
        patched.setattr(torch.cuda, "synchronize", lambda: None)
        outcome = _outcome(theirs.initialize_model_parallel, theirs, arguments, theirs)
        return outcome, told, os.environ.get("NCCL_COLLNET_ENABLE")


def _groups_of(value: Any) -> list[dist.ProcessGroup]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, dist.ProcessGroup)]


@pytest.mark.oracle("megatron.core")
def test_the_same_answers_and_working_groups_on_gloo() -> None:
    for results in run_ranks(8, _on_gloo, timeout=180):
        for arguments, (told, sums, left) in zip(CASES_ON_GLOO, results, strict=True):
            assert told[0] == told[1], arguments
            assert bool(told[0][1]) == ("use_sharp" in arguments)
            assert len(sums) >= 20
            assert all(measured == expected for measured, expected, _ in sums.values())
            assert {backend for _, _, backend in sums.values()} == {"gloo"}
            assert left


@pytest.mark.oracle(NEWEST)
def test_rank_generator_as_the_original() -> None:
    with release("newest") as theirs:
        _compare_rank_generators(theirs)


def _compare_rank_generators(theirs: Any) -> None:
    source = random.Random(3)
    for _ in range(200):
        sizes = {name: source.choice((1, 2, 3)) for name in ("tp", "dp", "pp", "cp", "ep")}
        sizes["ep" if source.random() < 0.5 else "cp"] = 1
        order = "-".join(source.sample(["tp", "dp", "pp", "cp", "ep"], source.choice((4, 5))))
        told: list[Any] = []
        for module in (theirs, parallel_state):
            try:
                ranks = module.RankGenerator(**sizes, order=order, rank_offset=7)
                tokens = ["tp", "dp", "pp", "tp-pp", "dp-cp", "pp-tp-dp", "cp"]
                told.append(
                    [ranks.get_ranks(token) for token in tokens]
                    + [
                        ranks.order,
                        ranks.ordered_size,
                        ranks.world_size,
                        ranks.name_to_size,
                        ranks.rank_offset,
                    ]
                    + [ranks.get_mask(ranks.order, "tp-dp")]
                )
            except Exception as error:  # noqa: BLE001  which one is what is compared
                told.append(kind_of(error))
        assert told[0] == told[1], (sizes, order)


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("world", [8, 24, 48, 25])
def test_masked_groups_as_the_original(world: int) -> None:
    source = random.Random(world)
    for _ in range(50):
        mask = [source.random() < 0.5 for _ in range(3)]
        told = []
        for module in (oracle(), parallel_state):
            try:
                told.append(module.generate_masked_orthogonal_rank_groups(world, [2, 3, 4], mask))
            except Exception as error:  # noqa: BLE001  which one is what is compared
                told.append(kind_of(error))
        assert told[0] == told[1], mask


def test_the_worked_example_of_sixteen_ranks() -> None:
    data = [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    replica = [0, 1, 4, 5, 8, 9, 12, 13]
    for rank in range(16):
        with fake_world(16, rank):
            parallel_state.initialize_model_parallel(2, 4, create_gloo_process_groups=False)
            group = parallel_state.get_data_parallel_group()
            assert tuple(dist.get_process_group_ranks(group)) == next(pair for pair in data if rank in pair)
            mine = dist.get_process_group_ranks(parallel_state.get_model_parallel_group())
            assert (mine == replica) == (rank in replica)
            assert parallel_state.get_pipeline_model_parallel_first_rank() == rank % 4
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("world", "tp", "pp", "sp"), [(8, 1, 1, 2), (8, 1, 1, 8), (6, 1, 1, 3), (8, 2, 2, 1), (8, 2, 1, 1)]
)
@pytest.mark.parametrize("axis", ["sp", "cp", None])
def test_the_names_of_megatron_deepspeed(world: int, tp: int, pp: int, sp: int, axis: str | None) -> None:
    """Against its arithmetic: sp neighbors share a sequence, and sp above 1 goes without tp and pp."""
    for rank in range(world):
        with fake_world(world, rank):
            if axis is None:
                parallel_state.initialize_model_parallel(
                    tp, pp, context_parallel_size=sp, create_gloo_process_groups=False
                )
            else:
                sizes = {"pp": pp, "dp": -1, axis: sp, "tp": tp}
                mesh = namedmesh.init_mesh(namedmesh.Layout(**sizes, world_size=world), device="cpu")
                megatron.bind(mesh)
            sequence = list(range(rank // sp * sp, rank // sp * sp + sp))
            stage = world // pp
            data = list(range(rank // stage * stage + rank % (tp * sp), (rank // stage + 1) * stage, tp * sp))
            both = list(range(world)) if sp > 1 else data
            told = {
                name: getattr(parallel_state, f"get_{name}")
                for name in ("sequence_parallel", "sequence_data_parallel", "model_parallel")
                for name in (f"{name}_group", f"{name}_world_size", f"{name}_rank")
            }
            for name, ranks in (("sequence_parallel", sequence), ("sequence_data_parallel", both)):
                assert dist.get_process_group_ranks(told[f"{name}_group"]()) == ranks
                assert told[f"{name}_world_size"]() == len(ranks)
                assert told[f"{name}_rank"]() == ranks.index(rank)
            assert parallel_state.get_sequence_parallel_src_rank() == sequence[0]
            assert parallel_state.get_data_parallel_group_ranks() == data
            assert parallel_state.sequence_parallel_is_initialized()
            assert parallel_state.sequence_data_parallel_is_initialized()
            if pp == 1:
                assert told["model_parallel_world_size"]() == tp
                assert told["model_parallel_rank"]() == rank % tp
            else:
                with pytest.raises(AssertionError, match="there are 2 pipeline stages"):
                    told["model_parallel_rank"]()
            megatron.current_mesh().close()
            assert not parallel_state.sequence_parallel_is_initialized()
            assert not parallel_state.sequence_data_parallel_is_initialized()


def test_the_mpu_has_the_names_of_tensor_parallelism_as_before_megatron_core() -> None:
    for name in ("divide", "split_tensor_into_1d_equal_chunks", "copy_to_tensor_model_parallel_region"):
        assert getattr(megatron.mpu, name) is getattr(megatron.tensor_parallel, name)
    assert not hasattr(megatron.mpu, "get_expert_groups")


# Releases, and parts of a world.


@pytest.mark.oracle("megatron.core")
def test_releases_that_were_not_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = oracle()
    core = importlib.import_module("megatron.core")
    for version in ("0.12.3", "0.13.1", "0.20.0"):
        with monkeypatch.context() as patched:
            patched.setattr(core, "__version__", version)
            with pytest.raises(
                RuntimeError, match=rf"^megatron-core {version} is imported, .* releases 0\.14 to 0\.19"
            ):
                megatron.install()
    with monkeypatch.context() as patched:
        patched.delattr(core, "__version__")  # as in the tree of Megatron-DeepSpeed
        with pytest.raises(RuntimeError, match="megatron-core without a version is imported"):
            megatron.install()
    with monkeypatch.context() as patched:
        patched.setattr(theirs, "_SLICE_PARALLEL_GROUP", None, raising=False)
        with pytest.raises(RuntimeError, match=r"has _SLICE_PARALLEL_GROUP, which namedmesh does not know"):
            megatron.install()
    assert theirs.initialize_model_parallel is not parallel_state.initialize_model_parallel


def _two_worlds() -> list[Any]:
    rank = dist.get_rank()
    before = live_groups()
    start = rank // 4 * 4
    parallel_state.initialize_model_parallel(2, gtp_remat_size=2, rank_offset=start, local_world_size=4)
    told: list[Any] = [parallel_state._MODEL_PARALLEL_GLOBAL_RANKS]
    for group in (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_gtp_weight_remat_group(),
    ):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        told.append(tensor.item())
    parallel_state.destroy_model_parallel()
    # A rank outside of the mesh may call, and has no groups.
    parallel_state.initialize_model_parallel(2, local_world_size=4)
    told.append([parallel_state.is_initialized(), parallel_state.get_global_memory_buffer() is not None])
    parallel_state.destroy_model_parallel()
    return [*told, live_groups() == before]


def test_two_parallel_states_side_by_side() -> None:
    for rank, told in enumerate(run_ranks(8, _two_worlds)):
        start, place = rank // 4 * 4, rank % 4
        members = [start, start + 1, start + 2, start + 3]
        assert told[0] == members
        assert told[1] == sum(members[:2] if place < 2 else members[2:])
        assert told[2] == sum(members[place % 2 :: 2])
        assert told[3:] == [[rank < 4, True], True]


def _all_gather_groups() -> list[Any]:
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2, order="dp-tp-cp-ep-pp")
    dense, expert = parallel_state.create_all_gather_groups(for_expert_parallelism=True)
    same = dense is not parallel_state.get_data_parallel_group(with_context_parallel=True)
    told = [dist.get_process_group_ranks(group) for group in (dense, expert)]
    expected = [parallel_state._DATA_PARALLEL_GLOBAL_RANKS_WITH_CP]
    expected.append(dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group()))
    none = parallel_state.create_all_gather_groups()[1]
    parallel_state.destroy_model_parallel()
    return [told == expected, same, none]


def test_a_second_group_for_all_gathers_where_groups_are_not_shared() -> None:
    with fake_world(8, 5):
        mesh = namedmesh.init_mesh(dp=2, cp=2, tp=2, share_groups=False, device="cpu")
        megatron.bind(mesh, create_all_gather_group=True)
        usual = parallel_state.get_data_parallel_group(True)
        second = parallel_state.get_data_parallel_group(True, independent_all_gather=True)
        assert second is not usual
        assert dist.get_process_group_ranks(second) == dist.get_process_group_ranks(usual) == [1, 3, 5, 7]
        assert len({parallel_state.get_data_parallel_group(), usual, second}) == 3
        mesh.close()


def test_groups_for_all_gathers_are_second_ones_over_the_same_ranks() -> None:
    with pytest.raises(RuntimeError, match="call initialize_model_parallel"):
        parallel_state.create_all_gather_groups()
    assert run_ranks(4, _all_gather_groups) == [[True, True, None]] * 4


# State.


def test_the_accessors_and_the_mesh_hand_out_the_same_groups() -> None:
    with fake_world(16, 5):
        parallel_state.initialize_model_parallel(
            2, 2, context_parallel_size=2, expert_model_parallel_size=2, create_gloo_process_groups=False
        )
        mesh = megatron.current_mesh()
        assert mesh is namedmesh.current_mesh()
        assert mesh["tp"].get_group() is parallel_state.get_tensor_model_parallel_group()
        pairs = {
            parallel_state.get_pipeline_model_parallel_group(): mesh.group("pp"),
            parallel_state.get_data_parallel_group(): mesh.group("dp"),
            parallel_state.get_data_parallel_group(with_context_parallel=True): mesh.group("dp", "cp"),
            parallel_state.get_model_parallel_group(): mesh.group("pp", "tp"),
            parallel_state.get_expert_model_parallel_group(): mesh["ep"].get_group(),
            parallel_state.get_expert_data_parallel_group(): mesh.group("edp"),
            parallel_state.get_expert_tensor_and_model_parallel_group(): mesh.group("ep", "etp"),
        }
        assert all(group is of_mesh for group, of_mesh in pairs.items())
        assert mesh.flatten("dp", "cp").get_group() is parallel_state.get_data_parallel_group(True)


def test_binding_a_mesh_that_exists() -> None:
    with fake_world(16, 5):
        mesh = namedmesh.init_mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2, device="cpu")
        megatron.bind(mesh)
        assert parallel_state.get_data_parallel_world_size() == 4
        assert parallel_state.get_tensor_model_parallel_group() is mesh.group("tp")
        assert parallel_state.get_context_parallel_world_size() == 1
        assert parallel_state._DATA_PARALLEL_GLOBAL_RANKS == [1, 3, 5, 7]
        assert parallel_state.get_expert_data_parallel_group() is parallel_state.get_data_parallel_group()
        held = len(mesh.communicators)
        megatron.bind(mesh)
        assert len(mesh.communicators) == held
        assert parallel_state.get_data_parallel_group_gloo().size() == 4
        megatron.bind(mesh, create_gloo_process_groups=False)
        assert parallel_state._DATA_PARALLEL_GROUP_GLOO is None
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()
        assert mesh.size("tp") == 2  # it was not ours to close
        mesh.close()


def test_a_bound_expert_view_is_the_original_s_expert_groups() -> None:
    with fake_world(16, 5):
        mesh = namedmesh.init_mesh(pp=2, dp=-1, cp=2, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=-1, ep=4, etp=1)
        megatron.bind(mesh)
        told = answers(parallel_state)
        mesh.close()
        assert not parallel_state.is_initialized()
        parallel_state.initialize_model_parallel(
            2, 2, context_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1
        )
        assert told == answers(parallel_state)


def test_a_bound_mesh_shards_weights_that_are_gathered_for_each_use() -> None:
    with fake_world(32, 13):
        mesh = namedmesh.init_mesh(pp=2, dp=-1, cp=2, gtp_remat=2, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=-1, egtp_remat=2, ep=2, etp=1)
        megatron.bind(mesh)
        assert parallel_state.get_gtp_weight_remat_group() is mesh.group("gtp_remat")
        assert parallel_state.get_data_parallel_group() is mesh.group("dp", "gtp_remat")
        told = answers(parallel_state)
        mesh.close()
        parallel_state.initialize_model_parallel(
            2,
            2,
            context_parallel_size=2,
            gtp_remat_size=2,
            expert_model_parallel_size=2,
            expert_gtp_remat_size=2,
            expert_tensor_parallel_size=1,
        )
        assert told == answers(parallel_state)


def test_what_is_set_stays_with_its_mesh() -> None:
    with fake_world(8, 5):
        first, second = (namedmesh.init_mesh(dp=-1, tp=size, device="cpu") for size in (2, 4))
        megatron.bind(first)
        with megatron.bind(second):
            parallel_state.set_tensor_model_parallel_rank(9)
            with first:
                assert parallel_state.get_tensor_model_parallel_rank() == 1
            assert parallel_state.get_tensor_model_parallel_rank() == 9
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        for mesh in (first, second):
            mesh.close()


SETTABLE = [
    f"{kind}_{answer}"
    for kind in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
        "virtual_pipeline_model_parallel",
    )
    for answer in ("world_size", "rank")
]


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("initialized", [True, False])
def test_what_is_set_takes_precedence_as_in_the_original(initialized: bool) -> None:
    told = []
    theirs = oracle()
    calls = [theirs.initialize_model_parallel]
    megatron.install()
    calls.append(theirs.initialize_model_parallel)
    for module, initialize in (*((theirs, call) for call in calls), (parallel_state, calls[1])):
        with fake_world(16, 13):
            if initialized:
                initialize(2, 4, create_gloo_process_groups=False)
            seen = []
            for number, name in enumerate([*SETTABLE, "data_parallel_rank"]):
                getattr(module, f"set_{name}")(number % 3)
                seen.append(getattr(module, f"get_{name}")())
            if module is theirs:
                seen.append(answers(theirs))
            reset(module)
            told.append(seen)
    megatron.uninstall()
    assert told[0] == told[1]
    assert told[2] == told[0][:-1]


def test_what_was_set_before_the_groups_are_made_still_wins() -> None:
    with fake_world(8, 3):
        parallel_state.set_tensor_model_parallel_world_size(64)
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        assert parallel_state.get_tensor_model_parallel_world_size() == 64
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        parallel_state.set_tensor_model_parallel_world_size(None)
        assert parallel_state.get_tensor_model_parallel_world_size() == 2


def test_variables_can_be_assigned_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from unittest import mock

    with fake_world(8, 3):
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        own = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        wide = parallel_state.get_data_parallel_group()
        with monkeypatch.context() as patched:
            patched.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", wide)
            assert parallel_state.get_tensor_model_parallel_group() is wide
            assert parallel_state.get_tensor_model_parallel_world_size() == 4
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        with mock.patch.object(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", wide):
            assert parallel_state.get_tensor_model_parallel_rank() == 1
        with mock.patch("namedmesh.compat.megatron.parallel_state._MPU_TENSOR_MODEL_PARALLEL_RANK", 5):
            assert parallel_state.get_tensor_model_parallel_rank() == 5
        assert parallel_state.get_tensor_model_parallel_group() is own
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
        assert not parallel_state.model_parallel_is_initialized()
        assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
        with pytest.raises(AssertionError, match=r"the tensor model parallel group .*: it was set to None"):
            parallel_state.get_tensor_model_parallel_group()
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = own
        assert parallel_state.get_tensor_model_parallel_world_size() == 2


# What is made beside the mesh.


def _own_groups() -> list[Any]:
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(2)
    told: list[Any] = []
    group = parallel_state.create_group([0, 3], group_desc="mine")
    told.append(len(parallel_state._global_process_group_list))
    if rank in {0, 3}:
        told.append(dist.get_process_group_ranks(group))
    levels, gloo = parallel_state.create_hierarchical_groups(
        rank, [0, 1, 2, 3], [2, 2], create_gloo_process_groups=True, group_desc="levels"
    )
    told.append([dist.get_process_group_ranks(level) for level in (*levels, *gloo)])
    hybrid = parallel_state.create_hybrid_dp_cp_groups(rank, [0, 1, 2, 3], None)
    told.append({size: dist.get_process_group_ranks(group) for size, group in hybrid.items()})
    from datetime import timedelta

    parallel_state.update_pg_timeout(timedelta(minutes=7))
    told.append(
        {
            str(each._get_backend(torch.device("cpu")).options._timeout)
            for each in (dist.group.WORLD, *parallel_state._global_process_group_list[1:])
        }
    )
    parallel_state.update_pg_timeout(timedelta(minutes=3), parallel_state.get_tensor_model_parallel_group())
    tp = parallel_state.get_tensor_model_parallel_group()
    told.append(str(tp._get_backend(torch.device("cpu")).options._timeout))
    parallel_state.destroy_model_parallel()
    return told


def test_groups_beside_the_mesh_and_their_timeouts() -> None:
    for rank, told in enumerate(run_ranks(4, _own_groups)):
        first, *members = told[:-4]
        assert members == ([[0, 3]] if rank in (0, 3) else [])
        assert first >= 4
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert told[-4] == [pair, across, pair, across]
        assert told[-3] == {2: pair}
        assert told[-2] == {"0:07:00"}
        assert told[-1] == "0:03:00"


def test_the_memory_buffer_is_made_and_destroyed_with_the_groups() -> None:
    with pytest.raises(AssertionError, match="the global memory buffer is not initialized"):
        parallel_state.get_global_memory_buffer()
    with fake_world(4):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        buffer = parallel_state.get_global_memory_buffer()
        small = buffer.get_tensor((2, 3), torch.float32, "mpu")
        assert buffer.get_tensor((4,), torch.float32, "mpu").data_ptr() == small.data_ptr()
        assert buffer.get_tensor((70,), torch.float32, "mpu").shape == (70,)
        with pytest.raises(AssertionError, match="call destroy_global_memory_buffer"):
            parallel_state._set_global_memory_buffer()
        parallel_state.destroy_global_memory_buffer()
        parallel_state._set_global_memory_buffer()
        parallel_state._set_global_symmetric_memory_buffer()
        symmetric = parallel_state.get_global_symmetric_memory_buffer()
        if not torch.cuda.is_available():
            assert symmetric.maybe_get_tensor((2,), torch.int8) == {"tensor": None, "handle": None}
        parallel_state.destroy_global_symmetric_memory_buffer()
        with pytest.raises(AssertionError, match="call _set_global_symmetric_memory_buffer"):
            parallel_state.get_global_symmetric_memory_buffer()


def test_nccl_settings() -> None:
    assert parallel_state.get_nccl_options("tp", {}) is None
    if not dist.is_nccl_available():
        with pytest.raises(namedmesh.MeshError, match="this torch was built without NCCL"):
            parallel_state.get_nccl_options("tp", {"tp": {"max_ctas": 8}})
    with pytest.raises(RuntimeError, match="net_name of 'tp' is 'tcp'; it is 'IB' or 'socket'"):
        parallel_state.get_nccl_options("tp", {"tp": {"net_name": "tcp"}})
    with pytest.raises(RuntimeError, match="tp: NCCL has no setting 'max_cta'"):
        parallel_state.get_nccl_options("tp", {"tp": {"max_cta": 1}})


def test_options_reach_the_groups_that_they_name(tmp_path: Any) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("tp: {max_ctas: 8}\ndp_cp: {min_ctas: 2}\nintra_dp_cp: {max_ctas: 4}\n")
    with fake_world(16, 5):
        parallel_state.initialize_model_parallel(
            2,
            context_parallel_size=2,
            num_distributed_optimizer_instances=2,
            nccl_communicator_config_path=str(path),
            high_priority_stream_groups=["ep_dp", "tp"],
            create_gloo_process_groups=False,
        )
        mesh = megatron.current_mesh()
        told = {axes: mesh.options_of(axes) for axes in (("tp",), ("dp", "cp"), ("cp", "tp"), ("edp",))}
        assert told["tp",] == namedmesh.GroupOptions(nccl={"max_ctas": 8}, high_priority=True)
        assert told["dp", "cp"] == namedmesh.GroupOptions(nccl={"min_ctas": 2})
        assert told["cp", "tp"] == namedmesh.GroupOptions()
        assert told["edp",] == namedmesh.GroupOptions(high_priority=True)
        # Groups over the same ranks with different options are not shared.
        assert mesh.group("edp") is not mesh.group("dp", "cp")
        assert mesh.group("edp").size() == mesh.group("dp", "cp").size()


# Mistakes.


MISTAKES: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"tensor_model_parallel_size": 3},
        "2 problems:\n"
        "  - tp=3 x pp=1 x cp=1 = 3 does not divide the world of 8 ranks; change a size, or the number of ranks to a multiple of "
        "3\n"
        "  - etp=3 x ep=1 x pp=1 = 3 does not divide the world of 8 ranks; ...",
    ),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        "virtual_pipeline_model_parallel_size is 2, but pipeline_model_parallel_size is 1; virtual stages interleave "
        "the stages of a pipeline, which needs 2 or more",
    ),
    (
        {"order": "tp-dpp-pp"},
        "'dpp' in the order 'tp-dpp-pp' is not one of tp, pp, dp, ep, cp; did you mean 'pp'?",
    ),
    (
        {"order": "tp-dp", "pipeline_model_parallel_size": 2},
        "the size of pp is 2, but the order 'tp-dp' has no place for it; add 'pp'",
    ),
    ({"expert_model_parallel_size": 3}, "etp=1 x ep=3 x pp=1 = 3 does not divide ..."),
    (
        {"nccl_communicator_config_path": "/no/such.yaml"},
        "nccl_communicator_config_path is '/no/such.yaml', and there is no such file; give the path of a YAML file such "
        "as 'tp: {max_ctas: 32}', or leave it out",
    ),
    (
        {"num_distributed_optimizer_instances": 3},
        "2 problems:\n"
        "  - num_distributed_optimizer_instances is 3, which does not divide dp x cp = 8\n"
        "  - num_distributed_optimizer_instances is 3, which does not divide edp = 8",
    ),
    (
        {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 3]},
        "hierarchical_context_parallel_sizes are [2, 3], which multiply to 6; they have to multiply to the "
        "context-parallel size, which is 4",
    ),
    (
        {"pipeline_model_parallel_comm_backend": "mpi"},
        "pipeline_model_parallel_comm_backend is 'mpi'; it is None (the default backend), 'nccl' or 'ucc'",
    ),
    (
        {"gtp_remat_size": 2, "num_distributed_optimizer_instances": 2},
        "num_distributed_optimizer_instances is 2 and gtp_remat_size is 2; weights that are gathered for each use go "
        "with one optimizer instance only",
    ),
    (
        {"tensor_model_parallel_size": 2, "gtp_remat_size": 3},
        "tp=2 x pp=1 x cp=1 x gtp_remat=3 = 6 does not divide ...",
    ),
    (
        {"rank_offset": 6, "local_world_size": 4},
        "rank_offset is 6 and local_world_size is 4, which are not ranks of the world of 8; change one of them",
    ),
    (
        {"sharp_enabled_group": "dp"},
        "sharp_enabled_group is 'dp', but use_sharp is off; say use_sharp=True, or leave the group out",
    ),
    (
        {"use_sharp": True, "sharp_enabled_group": "tp"},
        "sharp_enabled_group is 'tp'; it is 'dp' or 'dp_replica'",
    ),
    (
        {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "order": "tp-pp-dp",
        },
        "the pipelines of cp=1 x dp=2 x pp=2 x tp=2 (8 ranks) and of the experts' ep=1 x edp=4 x pp=2 x etp=1 (8 ranks) do not fit "
        "together in the order 'tp-pp-dp'; put pp last in the order, or choose expert sizes that leave edp = dp",
    ),
)


@pytest.mark.parametrize(("arguments", "text"), MISTAKES)
def test_mistakes_are_explained_and_change_nothing(arguments: dict[str, Any], text: str) -> None:
    with fake_world(8):
        before = live_groups()
        with pytest.raises(NamedMeshError, match=says(text)):
            parallel_state.initialize_model_parallel(**arguments, create_gloo_process_groups=False)
        assert live_groups() == before
        assert all(getattr(parallel_state, name) in (None, {}) for name in VARIABLES)
        with pytest.raises(namedmesh.MeshError, match="no mesh is alive"):
            namedmesh.current_mesh()


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize(
    "arguments",
    [
        arguments
        for arguments, _ in MISTAKES
        if not {"pipeline_model_parallel_comm_backend", "gtp_remat_size", "rank_offset"} & set(arguments)
    ],
)
def test_mistakes_have_the_original_s_type(arguments: dict[str, Any]) -> None:
    with fake_world(8):
        told = [
            _outcome(
                module.initialize_model_parallel,
                module,
                arguments | {"create_gloo_process_groups": False},
                oracle(),
            )
            for module in (oracle(), parallel_state)
        ]
    assert told[0] == told[1]
    assert isinstance(told[0], type)


def test_use_before_and_twice() -> None:
    with pytest.raises(AssertionError) as caught:
        parallel_state.get_tensor_model_parallel_group()
    assert str(caught.value) == (
        "the tensor model parallel group is not initialized; call initialize_model_parallel(...), or "
        "namedmesh.compat.megatron.bind(mesh) with a mesh that exists (once, on every rank)"
    )
    with pytest.raises(AssertionError, match=r"call namedmesh\.launch\.init\(\) or torch"):
        parallel_state.initialize_model_parallel()
    assert parallel_state.get_data_parallel_world_size() == 0
    with pytest.raises(namedmesh.MeshError, match="state is not bound"):
        megatron.current_mesh()
    with fake_world(8):
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        told = answers(parallel_state)
        with pytest.raises(AssertionError) as caught:
            parallel_state.initialize_model_parallel(4, create_gloo_process_groups=False)
        assert str(caught.value) == (
            "Megatron's parallel state is already initialized, for pp=1 x dp=4 x cp=1 x tp=2 (8 ranks); call the function "
            "that destroys it first, or bind another mesh beside it with namedmesh.compat.megatron.bind(mesh)"
        )
        assert answers(parallel_state) == told
        # Sizes that do not fit come first, as in the original.
        with pytest.raises(RuntimeError, match="tp=3 x pp=1 x cp=1 = 3 does not divide"):
            parallel_state.initialize_model_parallel(3, create_gloo_process_groups=False)
        assert answers(parallel_state) == told


def nowhere(pp_ranks: list[int]) -> list[int]:
    """A callback that makes no sense."""
    return [rank + 100 for rank in pp_ranks]


def test_a_callback_that_leaves_its_pipeline() -> None:
    with fake_world(8):
        before = live_groups()
        with pytest.raises(
            AssertionError, match=re.escape("nowhere chose [100, 104] of the pipeline [0, 4]")
        ):
            parallel_state.initialize_model_parallel(
                1, 2, get_embedding_ranks=nowhere, create_gloo_process_groups=False
            )
        assert live_groups() == before
        assert not parallel_state.is_initialized()
