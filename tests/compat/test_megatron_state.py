"""Megatron's parallel state on our groups, compared with megatron-core's."""

from __future__ import annotations

import inspect
import random
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from legacy import arguments, comparable, outcome
from megatron_cases import (
    GTP_ARGUMENTS,
    collect_answers,
    last_only,
    make_arguments,
    middle_and_last,
    random_case,
    reset,
    variable_names,
    without_gtp,
)
from megatron_newest import NEWEST, RELEASES, release
from ranks import fake_world, live_groups, run_ranks, summed
from torch.utils._pytree import tree_leaves

import namedmesh
from namedmesh import GroupOptions, NamedMeshError
from namedmesh.compat import megatron
from namedmesh.compat.megatron import parallel_state
from namedmesh.layout.orders import MEGATRON_GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_CASES, MORE_CASES = 40, 110  # of each release
NO_GLOO: dict[str, Any] = {"create_gloo_process_groups": False}  # a fake world cannot make gloo groups


@pytest.fixture(autouse=True)
def _reset_fallback() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    assert not parallel_state.is_initialized()


@pytest.fixture(params=RELEASES)
def upstream(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Upstream's parallel state, of one of two releases."""
    with release(request.param) as module:
        yield module


# The names.


def test_every_upstream_name_exists_with_the_same_arguments(upstream: Any) -> None:
    """An argument whose position differs between releases is keyword-only in ours."""
    functions = dict(inspect.getmembers(upstream, inspect.isfunction)) | {
        "RankGenerator": upstream.RankGenerator
    }
    names = [
        name for name in functions if functions[name].__module__ == upstream.__name__ and "gtp" not in name
    ]
    assert len(names) >= 84
    for name in names:
        ours = inspect.signature(getattr(parallel_state, name)).parameters
        wanted = [(one, default) for one, default in arguments(functions[name]) if one not in GTP_ARGUMENTS]
        assert wanted == [(one, comparable(ours[one].default)) for one, _ in wanted], name
        by_position = [one for one in ours if ours[one].kind is not inspect.Parameter.KEYWORD_ONLY]
        assert by_position == [one for one, _ in wanted][: len(by_position)], name
    for name in ("initialize_model_parallel", "destroy_model_parallel"):
        assert getattr(parallel_state, name).__doc__
    variables = {name for name in variable_names(upstream) if "GTP" not in name}
    assert len(variables) >= 50
    assert variables <= {*variable_names(parallel_state)}


FLAGGED = "data_parallel_group data_parallel_world_size data_parallel_rank expert_data_parallel_group"


def test_flags_that_moved_between_releases_are_keyword_only() -> None:
    for name in FLAGGED.split():
        with pytest.raises(TypeError, match="positional"):
            getattr(parallel_state, f"get_{name}")(True, True)


# The answers.


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_cases", [NUM_CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
def test_answers_equal_upstream_in_random_configurations(upstream: Any, num_cases: int) -> None:
    """Of upstream, of upstream on our groups, and of our fallback."""
    source = random.Random(20)
    newest = hasattr(upstream, "get_gtp_weight_remat_group")
    calls = [upstream.initialize_model_parallel]
    fallback = parallel_state.initialize_model_parallel
    megatron.install()
    calls.append(upstream.initialize_model_parallel)
    assert inspect.signature(calls[0]) == inspect.signature(calls[1])
    valid = rejected = on_fallback = 0
    while valid < num_cases:
        world, first, arguments = random_case(source, newest=newest)
        last = first + arguments.get("local_world_size", world) - 1
        for rank in {source.choice((first, last)), source.randrange(first, last + 1)}:
            with fake_world(world, rank):
                answers = [_initialize_and_collect(call, upstream, arguments, upstream) for call in calls]
                assert answers[0] == answers[1], (world, rank, arguments)
                if max(arguments.get("gtp_remat_size", 1), arguments.get("expert_gtp_remat_size", 1)) == 1:
                    on_fallback += 1
                    ours = _initialize_and_collect(fallback, parallel_state, arguments, upstream)
                    assert without_gtp(ours, newest) == without_gtp(answers[0], newest), (
                        world,
                        rank,
                        arguments,
                    )
        valid += isinstance(answers[0], dict)
        rejected += not isinstance(answers[0], dict)
    assert rejected > num_cases // 20
    assert on_fallback > num_cases // 2


def _initialize_and_collect(
    initialize: Callable[..., object], module: Any, arguments: dict[str, Any], reference: Any
) -> Any:
    answers = outcome(initialize, **arguments)
    if answers is None:
        answers = collect_answers(module, reference)
    reset(module)
    return answers


# Options of pipelines in addition to their size.
PIPELINE = {"virtual_pipeline_model_parallel_size": 2, "get_embedding_ranks": middle_and_last}
PIPELINE |= {"get_position_embedding_ranks": last_only}
CASES_ON_GLOO = (
    make_arguments(tp=2, pp=2),
    make_arguments(tp=2, cp=2, ep=4, etp=1, create_all_gather_group=True)
    | {"num_distributed_optimizer_instances": 2, "hierarchical_context_parallel_sizes": [2, 1]},
    make_arguments(pp=4, cp=2) | PIPELINE,
    make_arguments(cp=4, hybrid_context_parallel=True, order="dp-cp-tp-pp-ep"),
)


def _run_case_on_gloo(arguments: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as upstream

    before = live_groups()
    answers = [_initialize_and_collect(upstream.initialize_model_parallel, upstream, arguments, upstream)]
    made = live_groups() - before
    megatron.install()
    answers.append(_initialize_and_collect(upstream.initialize_model_parallel, upstream, arguments, upstream))
    megatron.uninstall()
    after = live_groups()
    parallel_state.initialize_model_parallel(**arguments)
    mesh = megatron.current_mesh()
    shared = live_groups() - after < made
    right = []
    for name in variable_names(parallel_state):
        for group in tree_leaves(getattr(parallel_state, name)):
            if isinstance(group, dist.ProcessGroup):
                total = sum(dist.get_process_group_ranks(group))
                right.append(summed(group, dist.get_rank()) == total and dist.get_backend(group) == "gloo")
    parallel_state.destroy_model_parallel()
    return answers, right, shared, mesh.closed


@pytest.mark.oracle("megatron.core")
def test_answers_equal_upstream_and_groups_work_on_gloo() -> None:
    with release("installed"):
        found = run_ranks(
            8, lambda: [_run_case_on_gloo(arguments) for arguments in CASES_ON_GLOO], timeout=180
        )
    for results in found:
        for case, (answers, right, shared, left) in zip(CASES_ON_GLOO, results, strict=True):
            assert answers[0] == answers[1], case
            assert len(right) >= 20
            assert all([*right, shared, left]), case


def _generate_ranks(module: Any, sizes: dict[str, int], order: str) -> Any:
    ranks = module.RankGenerator(**sizes, order=order, rank_offset=7)
    groups = [ranks.get_ranks(token) for token in ("tp", "dp", "pp", "tp-pp", "dp-cp", "pp-tp-dp", "cp")]
    facts = [ranks.order, ranks.ordered_size, ranks.world_size, ranks.name_to_size]
    return [*groups, *facts, ranks.get_mask(order, "tp"), outcome(ranks.get_ranks, "tp-xp")]


@pytest.mark.oracle("megatron.core")
def test_rank_generator_equals_upstream() -> None:
    source = random.Random(3)
    with release("installed") as upstream:
        for _ in range(200):
            sizes = {name: source.choice((1, 2, 3)) for name in ("tp", "dp", "pp", "cp", "ep")}
            sizes["ep" if source.random() < 0.5 else "cp"] = 1
            order = "-".join(source.sample(["tp", "dp", "pp", "cp", "ep"], source.choice((4, 5))))
            answers = [
                outcome(_generate_ranks, module, sizes, order) for module in (upstream, parallel_state)
            ]
            assert answers[0] == answers[1], (sizes, order)
        for world in (8, 24, 48, 25):
            for mask in product((True, False), repeat=3):
                calls = [
                    module.generate_masked_orthogonal_rank_groups for module in (upstream, parallel_state)
                ]
                answers = [outcome(call, world, [2, 3, 4], mask) for call in calls]
                assert answers[0] == answers[1], mask


def test_each_row_of_the_table_has_an_accessor_that_returns_a_group_of_the_mesh() -> None:
    """The accessor that a row names returns the row's variable, a group over the row's axes."""
    with fake_world(64, 13):
        options = {"hierarchical_context_parallel_sizes": [2], "hybrid_context_parallel": True}
        parallel_state.initialize_model_parallel(
            **make_arguments(2, 2, 2, 2, create_all_gather_group=True, **options)
        )
        mesh = megatron.current_mesh()
        assert mesh is namedmesh.current_mesh()
        assert mesh["tp"].get_group() is parallel_state.get_tensor_model_parallel_group()
        layouts = {"dense": mesh.layout, "expert": mesh.views["expert"]}
        compared = 0
        for row in MEGATRON_GROUPS:
            name, *flags = row.name.split()
            function = getattr(parallel_state, f"get_{name}_group", None)
            value = getattr(parallel_state, row.variable)
            if function is None or not isinstance(value, dist.ProcessGroup):
                continue  # several groups, or none on this rank; the comparison with upstream covers them
            assert function(**dict.fromkeys(flags, True)) is value, row.name
            axes = [axis for axis in row.axes if axis in layouts[row.view]]
            if row.members in {"all", "second"} and axes:
                ranks = list(layouts[row.view].group(13, *axes))
                assert dist.get_process_group_ranks(value) == ranks, row.name
                of_mesh = mesh.group(axes[0]) if len(axes) == 1 else mesh.flatten(*axes).get_group()
                assert (value is of_mesh) != ("independent_all_gather" in flags), row.name
            compared += 1
        assert compared == len(MEGATRON_GROUPS) - 3


# Meshes that are bound.


# The mesh, the view of its experts, options of bind, and arguments for the same ranks.
MESHES: tuple[tuple[dict[str, int], dict[str, int], dict[str, Any], dict[str, Any]], ...] = (
    ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, {}, {}, make_arguments(tp=2, pp=2, cp=2)),
    ({"tp": 2, "pp": 2, "dp": 8}, {}, {}, make_arguments(tp=2, pp=2, order="dp-ep-pp-tp")),
    (
        {"pp": 2, "dp": 4, "cp": 2, "tp": 2},
        {"pp": 2, "edp": 4, "ep": 4, "etp": 1},
        {"hybrid_context_parallel": True, "num_distributed_optimizer_instances": 2},
        make_arguments(tp=2, pp=2, cp=2, ep=4, etp=1),
    ),
    (
        {"dp": 4, "cp": 4, "tp": 2},
        {"edp": 2, "ep": 8, "etp": 2},
        {"hierarchical_context_parallel_sizes": [2, 2]},
        make_arguments(tp=2, cp=4, ep=8, etp=2),
    ),
    ({"pp": 4, "dp": 4, "tp": 2}, {}, PIPELINE, make_arguments(tp=2, pp=4)),
    ({"dp": 16, "sp": 2}, {}, {}, make_arguments(cp=2)),
    ({"dp": 32}, {}, {}, {}),
)


@pytest.mark.parametrize(("sizes", "experts", "options", "arguments"), MESHES)
def test_a_bound_mesh_answers_as_upstream_over_the_same_ranks(
    upstream: Any, sizes: dict[str, int], experts: dict[str, int], options: Any, arguments: Any
) -> None:
    """Upstream's parallel state and our fallback, without install(), on one set of groups."""
    options = options | NO_GLOO
    for rank in (0, 5, 21, 31):
        with fake_world(32, rank):
            answers = [
                _initialize_and_collect(
                    upstream.initialize_model_parallel, upstream, arguments | options, upstream
                )
            ]
            mesh = namedmesh.init_mesh(sizes, device="cpu")
            if experts:
                mesh.add_view("expert", options=None, **experts)
            megatron.bind(mesh, **options)
            answers += [collect_answers(module, upstream) for module in (upstream, parallel_state)]
            held = len(mesh.communicators)
            assert len({communicator.ranks for communicator in mesh.communicators}) == held
            group = upstream.get_tensor_model_parallel_group()
            assert group is parallel_state.get_tensor_model_parallel_group()
            assert "tp" not in sizes or group is mesh.group("tp")
            instance = upstream.get_intra_distributed_optimizer_instance_group()
            assert (instance is dist.group.WORLD) == ("num_distributed_optimizer_instances" not in options)
            megatron.bind(mesh, **options)
            assert len(mesh.communicators) == held
            mesh.close()
            assert not upstream.is_initialized()
            assert not parallel_state.is_initialized()
        newest = hasattr(upstream, "get_gtp_weight_remat_group")
        assert answers[0] == answers[1], rank
        assert without_gtp(answers[0], newest) == without_gtp(answers[2], newest), rank


def test_a_mesh_whose_order_megatron_does_not_have_is_not_bound() -> None:
    """In Megatron, etp is at the position of tp, and here it is outside of ep."""
    with fake_world(16, 5):
        known = namedmesh.init_mesh(dp=4, tp=4, device="cpu")
        megatron.bind(known, **NO_GLOO)
        mesh = namedmesh.init_mesh(pp=2, dp=4, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, etp=2, edp=2, ep=2)
        text = r"cannot express .*: _EXPERT_TENSOR_PARALLEL_GROUP has the ranks \[5, 7\], and 'etp' would have \[1, 5\]"
        with pytest.raises(namedmesh.LayoutError, match=text):
            megatron.bind(mesh, **NO_GLOO)
        assert megatron.current_mesh() is known
        assert parallel_state.get_tensor_model_parallel_world_size() == 4
        mesh.close()
        known.close()


@pytest.mark.oracle(NEWEST)
def test_a_bound_mesh_with_gtp_remat_needs_upstream() -> None:
    sizes: dict[str, Any] = {"gtp_remat_size": 2, "expert_gtp_remat_size": 2, **NO_GLOO}
    sizes |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with release("newest") as upstream, fake_world(32, 13):
        with pytest.raises(
            AssertionError, match="gtp_remat_size, expert_gtp_remat_size cannot be used without"
        ):
            parallel_state.initialize_model_parallel(2, 2, context_parallel_size=2, **sizes)
        answers = _initialize_and_collect(
            upstream.initialize_model_parallel, upstream, make_arguments(2, 2, 2) | sizes, upstream
        )
        megatron.install()
        mesh = namedmesh.init_mesh(pp=2, dp=-1, cp=2, gtp_remat=2, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=-1, egtp_remat=2, ep=2, etp=1)
        megatron.bind(mesh, **NO_GLOO)
        assert upstream.get_gtp_weight_remat_group() is mesh.group("gtp_remat")
        assert answers == collect_answers(upstream)
        mesh.close()


def test_groups_of_an_open_mesh_are_reused_whatever_its_timeout() -> None:
    with fake_world(8, 5):
        slow = {"tp": GroupOptions(timeout=timedelta(hours=1))}
        mesh = namedmesh.init_mesh(dp=4, tp=2, timeout=timedelta(minutes=10), options=slow, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)
        with pytest.raises(TypeError, match="takes no order, because the mesh determines it"):
            megatron.bind(mesh, order="tp-dp")
        arguments = make_arguments(tp=2, ep=4, etp=1) | NO_GLOO
        starts: list[Callable[[], object]] = [lambda: megatron.bind(mesh, **NO_GLOO)]
        starts.append(lambda: parallel_state.initialize_model_parallel(**arguments))
        for start in starts:
            start()
            assert parallel_state.get_tensor_model_parallel_group() is mesh.group("tp")
            assert parallel_state.get_expert_model_parallel_group() is mesh.group("ep")
            parallel_state.destroy_model_parallel()
            assert mesh.size("tp") == 2  # Megatron does not own this mesh, so it stays open
        mesh.close()
        own = {"tp": GroupOptions(share=False)}
        mesh = namedmesh.init_mesh(dp=4, tp=2, options=own, device="cpu")
        with pytest.warns(UserWarning, match="without a mesh: axis 'tp' cannot use this process group"):
            parallel_state.initialize_model_parallel(2, **NO_GLOO)
        assert parallel_state.get_tensor_model_parallel_group() is not mesh.group("tp")
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        mesh.close()


def _use_nccl_options() -> list[Any]:
    """Groups with NCCL options are torch's own. A second initialization makes them anew, and shares the others."""
    from megatron.core import parallel_state as upstream

    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    upstream.get_nccl_options = lambda name, _: options if name == "tp" else None
    megatron.install()
    upstream.initialize_model_parallel(2)
    group = upstream.get_tensor_model_parallel_group()
    listed = group in upstream._global_process_group_list
    facts = [group is not megatron.current_mesh().group("tp"), summed(group), listed]
    upstream.destroy_model_parallel()
    before = live_groups()
    upstream.initialize_model_parallel(2)
    upstream.destroy_model_parallel()
    return [*facts, live_groups() - before]


@pytest.mark.oracle("megatron.core")
def test_groups_with_nccl_options_are_separate() -> None:
    with release("installed"):
        assert run_ranks(4, _use_nccl_options) == [[True, 2.0, True, 1]] * 4


# A subset of the ranks.


@pytest.mark.oracle(NEWEST)
def test_upstream_makes_its_own_groups_on_a_subset_of_the_ranks() -> None:
    with release("newest") as upstream, fake_world(8, 5):
        megatron.install()
        upstream.initialize_model_parallel(2, rank_offset=4, local_world_size=4, **NO_GLOO)
        assert dist.get_process_group_ranks(upstream.get_data_parallel_group()) == [5, 7]
        with pytest.raises(namedmesh.MeshError, match="is not bound to a mesh"):
            megatron.current_mesh()
        upstream.destroy_model_parallel()
        assert not upstream.is_initialized()


# State.


SETTABLE = sorted(name[4:] for name in dir(parallel_state) if name.startswith("set_"))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # upstream's
@pytest.mark.parametrize("initialized", [True, False])
def test_assigned_sizes_and_ranks_take_precedence_as_upstream(upstream: Any, initialized: bool) -> None:
    results = []
    calls = [(upstream, upstream.initialize_model_parallel)]
    calls.append((parallel_state, parallel_state.initialize_model_parallel))
    megatron.install()
    calls.append((upstream, upstream.initialize_model_parallel))
    for module, initialize in calls:
        with fake_world(16, 13):
            module.set_tensor_model_parallel_world_size(64)  # without groups; the value stays
            if initialized:
                initialize(2, 4, **NO_GLOO)
            seen = [module.get_tensor_model_parallel_world_size()]
            for number, name in enumerate(SETTABLE):
                getattr(module, f"set_{name}")(number % 3)
                seen.append(getattr(module, f"get_{name}")())
            reset(module)
            results.append(seen)
    assert results[0] == results[1] == results[2]


def test_assigned_variables_are_used_and_can_be_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8, 3):
        parallel_state.initialize_model_parallel(2, **NO_GLOO)
        own = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        wide = parallel_state.get_data_parallel_group()
        with monkeypatch.context() as patched:
            patched.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", wide)
            assert parallel_state.get_tensor_model_parallel_group() is wide
            assert parallel_state.get_tensor_model_parallel_world_size() == 4
        assert parallel_state.get_tensor_model_parallel_group() is own
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
        assert not parallel_state.model_parallel_is_initialized()
        assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None


def test_groups_that_upstream_made_before_install(upstream: Any) -> None:
    """Values that upstream's destruction leaves are not kept; existing groups come back after a mesh."""
    with fake_world(8, 3):
        upstream.initialize_model_parallel(2, 2, **NO_GLOO)
        upstream.destroy_model_parallel()
        megatron.install()
        for sizes in ((2, 2), (4, 1)):
            upstream.initialize_model_parallel(*sizes, **NO_GLOO)
            assert megatron.current_mesh().size("tp") == sizes[0]
            upstream.destroy_model_parallel()
            assert all(not getattr(upstream, name) for name in variable_names(upstream))
        megatron.uninstall()
        upstream.initialize_model_parallel(2, **NO_GLOO)
        group = upstream.get_tensor_model_parallel_group()
        megatron.install()
        with namedmesh.init_mesh(dp=8, device="cpu") as other:
            assert not upstream.is_initialized()
        assert upstream.get_tensor_model_parallel_group() is group
        with pytest.raises(AssertionError, match="already initialized"):
            upstream.initialize_model_parallel(4, **NO_GLOO)
        upstream.destroy_model_parallel()
        upstream.initialize_model_parallel(2, **NO_GLOO)
        with pytest.raises(RuntimeError, match="is not divisible by 3"):
            upstream.initialize_model_parallel(3, **NO_GLOO)
        with pytest.raises(AssertionError, match="already initialized"):
            upstream.initialize_model_parallel(4, **NO_GLOO)
        assert upstream.get_tensor_model_parallel_world_size() == 2
        upstream.destroy_model_parallel()
        other.close()


def test_containers_belong_to_one_initialization() -> None:
    """Upstream fills lists and dicts in place, also those without a mesh and those of the import."""
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(cp=4, tp=2, device="cpu")
        for hybrid in (True, False, True, False):
            megatron.bind(mesh, hybrid_context_parallel=hybrid, **NO_GLOO)
            assert set(parallel_state._HYBRID_DP_CP_GROUPS) == ({2} if hybrid else set())
        mesh.close()
        assert not parallel_state._HYBRID_DP_CP_GROUPS


# Groups in addition to those of the mesh.


def _make_more_groups() -> list[Any]:
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(2)
    known = parallel_state._global_process_group_list
    ranks: list[Any] = []
    parallel_state.create_group([0, 3], group_desc="mine")
    named: dict[str, Any] = {"create_gloo_process_groups": True, "group_desc": "levels"}
    levels, gloo = parallel_state.create_hierarchical_groups(rank, [0, 1, 2, 3], [2, 2], **named)
    ranks.append([dist.get_process_group_ranks(level) for level in (*levels, *gloo)])
    hybrid = parallel_state.create_hybrid_dp_cp_groups(rank, [0, 1, 2, 3], None)
    ranks.append({size: dist.get_process_group_ranks(group) for size, group in hybrid.items()})
    second, none = parallel_state.create_all_gather_groups()
    ranks.append((dist.get_process_group_ranks(second), none, second in known))
    parallel_state.update_pg_timeout(timedelta(minutes=7))
    timeouts = set()
    for group in (dist.group.WORLD, *known[1:]):
        timeouts.add(group._get_backend(torch.device("cpu")).options._timeout.seconds)
    parallel_state.destroy_model_parallel()
    return [*ranks, timeouts]


def test_groups_in_addition_to_the_mesh_and_their_timeouts() -> None:
    for rank, (levels, hybrid, second, timeouts) in enumerate(run_ranks(4, _make_more_groups)):
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert levels == [pair, across, pair, across]
        assert hybrid == {2: pair}
        assert second == (across, None, True)
        assert timeouts == {420}


def test_the_global_memory_buffer_is_made_with_the_groups() -> None:
    with pytest.raises(AssertionError, match="the global memory buffer is not initialized"):
        parallel_state.get_global_memory_buffer()
    with fake_world(4):
        parallel_state.initialize_model_parallel(**NO_GLOO)
        buffer = parallel_state.get_global_memory_buffer()
        small = buffer.get_tensor((2, 3), torch.float32, "mpu")
        assert buffer.get_tensor((4,), torch.float32, "mpu").data_ptr() == small.data_ptr()
        assert buffer.get_tensor((70,), torch.float32, "mpu").shape == (70,)
        with pytest.raises(AssertionError, match="call destroy_global_memory_buffer"):
            parallel_state._set_global_memory_buffer()
        with pytest.raises(AssertionError, match="symmetric memory are not supported without megatron-core"):
            parallel_state._set_global_symmetric_memory_buffer()


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_model_parallel_size": 3}, "the sizes 3 x 1 x 1 do not divide the world size 8"),
        ({"virtual_pipeline_model_parallel_size": 2}, "set pipeline_model_parallel_size to 2 or more"),
        ({"order": "tp-dp", "pipeline_model_parallel_size": 2}, "the order .* does not name it; add 'pp'"),
        ({"num_distributed_optimizer_instances": 3}, "which does not divide dp x cp = 8"),
        (make_arguments(cp=4, hierarchical_context_parallel_sizes=[2, 3]), r"\[2, 3\] multiply to 6"),
        ({"use_sharp": True}, "^use_sharp cannot be used without megatron-core; install it and"),
        (
            {"pipeline_model_parallel_size": 2, "get_embedding_ranks": lambda _: [100, 104]},
            "Rank 100 is out of range",
        ),
    ],
)
def test_mistakes_are_explained_and_change_nothing(arguments: dict[str, Any], text: str) -> None:
    with fake_world(8):
        with pytest.raises((NamedMeshError, ValueError), match=text):
            parallel_state.initialize_model_parallel(**arguments, **NO_GLOO)
        assert all(not getattr(parallel_state, name) for name in variable_names(parallel_state))
        with pytest.raises(namedmesh.MeshError, match="no mesh is open"):
            namedmesh.current_mesh()


def test_use_before_initialization_and_a_second_one() -> None:
    with pytest.raises(AssertionError) as caught:
        parallel_state.get_tensor_model_parallel_group()
    assert str(caught.value) == (
        "the tensor model parallel group is not initialized; call initialize_model_parallel(...) with the option that "
        "makes it, or namedmesh.compat.megatron.bind(mesh)"
    )
    with pytest.raises(AssertionError, match=r"call namedmesh\.launch\.init\(\) or torch"):
        parallel_state.initialize_model_parallel()
    assert parallel_state.get_data_parallel_world_size() == 0
    with pytest.raises(namedmesh.MeshError, match="state is not bound"):
        megatron.current_mesh()
    with fake_world(8):
        parallel_state.initialize_model_parallel(2, **NO_GLOO)
        answers = collect_answers(parallel_state)
        with pytest.raises(AssertionError, match="already initialized; call destroy_model_parallel"):
            parallel_state.initialize_model_parallel(4, **NO_GLOO)
        for sizes in ((3, 1, None), (2, 1, 2)):
            with pytest.raises(RuntimeError):  # the arguments are checked first, as upstream does
                parallel_state.initialize_model_parallel(*sizes, **NO_GLOO)
        assert collect_answers(parallel_state) == answers
