"""Megatron's parallel state on our groups, against megatron-core's own."""

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
    NOT_OWED,
    answers,
    asked,
    last_only,
    middle_and_last,
    owed,
    random_case,
    reset,
    variable_names,
)
from megatron_newest import NEWEST, RELEASES, release
from ranks import fake_world, live_groups, run_ranks, summed
from torch.utils._pytree import tree_leaves

import namedmesh
from namedmesh import GroupOptions, NamedMeshError
from namedmesh.compat import megatron
from namedmesh.compat.megatron import parallel_state
from namedmesh.legacy import MEGATRON_GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VALID_CASES = 110  # of each release
NO_GLOO: dict[str, Any] = {"create_gloo_process_groups": False}  # a fake world makes none


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


# The names.


def test_every_name_is_there_with_the_same_arguments(theirs: Any) -> None:
    """What stands at another place in other releases is taken by name only."""
    functions = dict(inspect.getmembers(theirs, inspect.isfunction)) | {"RankGenerator": theirs.RankGenerator}
    names = [
        name for name in functions if functions[name].__module__ == theirs.__name__ and "gtp" not in name
    ]
    assert len(names) >= 84
    for name in names:
        ours = inspect.signature(getattr(parallel_state, name)).parameters
        wanted = [(one, default) for one, default in arguments(functions[name]) if one not in NOT_OWED]
        assert wanted == [(one, comparable(ours[one].default)) for one, _ in wanted], name
        by_position = [one for one in ours if ours[one].kind is not inspect.Parameter.KEYWORD_ONLY]
        assert by_position == [one for one, _ in wanted][: len(by_position)], name
    for name in ("initialize_model_parallel", "destroy_model_parallel"):
        assert getattr(parallel_state, name).__doc__
    variables = {name for name in variable_names(theirs) if "GTP" not in name}
    assert len(variables) >= 50
    assert variables <= {*variable_names(parallel_state)}


FLAGGED = "data_parallel_group data_parallel_world_size data_parallel_rank expert_data_parallel_group"


def test_flags_that_moved_between_releases_are_keywords() -> None:
    for name in FLAGGED.split():
        with pytest.raises(TypeError, match="positional"):
            getattr(parallel_state, f"get_{name}")(True, True)


# The answers.


@pytest.mark.timeout(600)
def test_the_same_answers_in_random_configurations(theirs: Any) -> None:
    """Of the original, of the original on our groups, and of our own module."""
    source = random.Random(20)
    newest = hasattr(theirs, "get_gtp_weight_remat_group")
    calls = [theirs.initialize_model_parallel]
    stand_in = parallel_state.initialize_model_parallel
    megatron.install()
    calls.append(theirs.initialize_model_parallel)
    assert inspect.signature(calls[0]) == inspect.signature(calls[1])
    valid = refused = stood_in = 0
    while valid < VALID_CASES:
        world, first, arguments = random_case(source, newest=newest)
        last = first + arguments.get("local_world_size", world) - 1
        for rank in {source.choice((first, last)), source.randrange(first, last + 1)}:
            with fake_world(world, rank):
                told = [_outcome(call, theirs, arguments, theirs) for call in calls]
                assert told[0] == told[1], (world, rank, arguments)
                if max(arguments.get("gtp_remat_size", 1), arguments.get("expert_gtp_remat_size", 1)) == 1:
                    stood_in += 1
                    ours = _outcome(stand_in, parallel_state, arguments, theirs)
                    assert owed(ours, newest) == owed(told[0], newest), (world, rank, arguments)
        valid += isinstance(told[0], dict)
        refused += not isinstance(told[0], dict)
    assert refused > VALID_CASES // 20
    assert stood_in > VALID_CASES // 2


def _outcome(initialize: Callable[..., object], module: Any, arguments: dict[str, Any], original: Any) -> Any:
    told = outcome(initialize, **arguments)
    if told is None:
        told = answers(module, original)
    reset(module)
    return told


# What a pipeline is asked for beside its size.
PIPELINE = {"virtual_pipeline_model_parallel_size": 2, "get_embedding_ranks": middle_and_last}
PIPELINE |= {"get_position_embedding_ranks": last_only}
CASES_ON_GLOO = (
    asked(tp=2, pp=2),
    asked(tp=2, cp=2, ep=4, etp=1, create_all_gather_group=True)
    | {"num_distributed_optimizer_instances": 2, "hierarchical_context_parallel_sizes": [2, 1]},
    asked(pp=4, cp=2) | PIPELINE,
    asked(cp=4, hybrid_context_parallel=True, order="dp-cp-tp-pp-ep"),
)


def _case_on_gloo(arguments: dict[str, Any]) -> Any:
    from megatron.core import parallel_state as theirs

    before = live_groups()
    told = [_outcome(theirs.initialize_model_parallel, theirs, arguments, theirs)]
    made = live_groups() - before
    megatron.install()
    told.append(_outcome(theirs.initialize_model_parallel, theirs, arguments, theirs))
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
    return told, right, shared, mesh.closed and live_groups() == after


@pytest.mark.oracle("megatron.core")
def test_the_same_answers_and_working_groups_on_gloo() -> None:
    with release("installed"):
        found = run_ranks(8, lambda: [_case_on_gloo(arguments) for arguments in CASES_ON_GLOO], timeout=180)
    for results in found:
        for case, (told, right, shared, left) in zip(CASES_ON_GLOO, results, strict=True):
            assert told[0] == told[1], case
            assert len(right) >= 20
            assert all([*right, shared, left]), case


def _generated(module: Any, sizes: dict[str, int], order: str) -> Any:
    ranks = module.RankGenerator(**sizes, order=order, rank_offset=7)
    groups = [ranks.get_ranks(token) for token in ("tp", "dp", "pp", "tp-pp", "dp-cp", "pp-tp-dp", "cp")]
    facts = [ranks.order, ranks.ordered_size, ranks.world_size, ranks.name_to_size]
    return [*groups, *facts, ranks.get_mask(order, "tp"), outcome(ranks.get_ranks, "tp-xp")]


@pytest.mark.oracle("megatron.core")
def test_ranks_are_generated_as_by_the_original() -> None:
    source = random.Random(3)
    with release("installed") as theirs:
        for _ in range(200):
            sizes = {name: source.choice((1, 2, 3)) for name in ("tp", "dp", "pp", "cp", "ep")}
            sizes["ep" if source.random() < 0.5 else "cp"] = 1
            order = "-".join(source.sample(["tp", "dp", "pp", "cp", "ep"], source.choice((4, 5))))
            told = [outcome(_generated, each, sizes, order) for each in (theirs, parallel_state)]
            assert told[0] == told[1], (sizes, order)
        for world in (8, 24, 48, 25):
            for mask in product((True, False), repeat=3):
                calls = [each.generate_masked_orthogonal_rank_groups for each in (theirs, parallel_state)]
                told = [outcome(call, world, [2, 3, 4], mask) for call in calls]
                assert told[0] == told[1], mask


def test_each_row_of_the_table_is_what_its_accessor_answers_on_the_mesh_s_groups() -> None:
    """The accessor that a row names answers with the row's variable, over the row's axes."""
    with fake_world(64, 13):
        options = {"hierarchical_context_parallel_sizes": [2], "hybrid_context_parallel": True}
        parallel_state.initialize_model_parallel(**asked(2, 2, 2, 2, create_all_gather_group=True, **options))
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
                continue  # several, or none on this rank: in the comparison with the original
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


# The mesh, the view of its experts, options of bind, and what Megatron is asked for the same ranks.
MESHES: tuple[tuple[dict[str, int], dict[str, int], dict[str, Any], dict[str, Any]], ...] = (
    ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, {}, {}, asked(tp=2, pp=2, cp=2)),
    ({"tp": 2, "pp": 2, "dp": 8}, {}, {}, asked(tp=2, pp=2, order="dp-ep-pp-tp")),
    (
        {"pp": 2, "dp": 4, "cp": 2, "tp": 2},
        {"pp": 2, "edp": 4, "ep": 4, "etp": 1},
        {"hybrid_context_parallel": True, "num_distributed_optimizer_instances": 2},
        asked(tp=2, pp=2, cp=2, ep=4, etp=1),
    ),
    (
        {"dp": 4, "cp": 4, "tp": 2},
        {"edp": 2, "ep": 8, "etp": 2},
        {"hierarchical_context_parallel_sizes": [2, 2]},
        asked(tp=2, cp=4, ep=8, etp=2),
    ),
    ({"pp": 4, "dp": 4, "tp": 2}, {}, PIPELINE, asked(tp=2, pp=4)),
    ({"dp": 16, "sp": 2}, {}, {}, asked(cp=2)),
    ({"dp": 32}, {}, {}, {}),
)


@pytest.mark.parametrize(("sizes", "experts", "options", "arguments"), MESHES)
def test_a_bound_mesh_answers_as_the_original_over_the_same_ranks(
    theirs: Any, sizes: dict[str, int], experts: dict[str, int], options: Any, arguments: Any
) -> None:
    """Without install(), too: both parallel states, from one set of groups."""
    options = options | NO_GLOO
    for rank in (0, 5, 21, 31):
        with fake_world(32, rank):
            told = [_outcome(theirs.initialize_model_parallel, theirs, arguments | options, theirs)]
            mesh = namedmesh.init_mesh(sizes, device="cpu")
            if experts:
                mesh.add_view("expert", options=None, **experts)
            megatron.bind(mesh, **options)
            told += [answers(each, theirs) for each in (theirs, parallel_state)]
            held = len(mesh.communicators)
            assert len({each.ranks for each in mesh.communicators}) == held
            group = theirs.get_tensor_model_parallel_group()
            assert group is parallel_state.get_tensor_model_parallel_group()
            assert "tp" not in sizes or group is mesh.group("tp")
            whole = theirs.get_intra_distributed_optimizer_instance_group()
            assert (whole is dist.group.WORLD) == ("num_distributed_optimizer_instances" not in options)
            megatron.bind(mesh, **options)
            assert len(mesh.communicators) == held
            mesh.close()
            assert not theirs.is_initialized()
            assert not parallel_state.is_initialized()
        newest = hasattr(theirs, "get_gtp_weight_remat_group")
        assert told[0] == told[1], rank
        assert owed(told[0], newest) == owed(told[2], newest), rank


@pytest.mark.oracle(NEWEST)
def test_a_bound_mesh_shards_weights_that_are_gathered_for_each_use() -> None:
    sizes: dict[str, Any] = {"gtp_remat_size": 2, "expert_gtp_remat_size": 2, **NO_GLOO}
    sizes |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with release("newest") as theirs, fake_world(32, 13):
        with pytest.raises(AssertionError, match=r"\(gtp_remat\) are megatron-core's"):
            parallel_state.initialize_model_parallel(2, 2, context_parallel_size=2, **sizes)
        told = _outcome(theirs.initialize_model_parallel, theirs, asked(2, 2, 2) | sizes, theirs)
        megatron.install()
        mesh = namedmesh.init_mesh(pp=2, dp=-1, cp=2, gtp_remat=2, tp=2, device="cpu")
        mesh.add_view("expert", pp=2, edp=-1, egtp_remat=2, ep=2, etp=1)
        megatron.bind(mesh, **NO_GLOO)
        assert theirs.get_gtp_weight_remat_group() is mesh.group("gtp_remat")
        assert told == answers(theirs)
        mesh.close()


def test_axes_of_an_open_mesh_with_another_timeout_are_on_its_groups() -> None:
    with fake_world(8, 5):
        slow = {"tp": GroupOptions(timeout=timedelta(hours=1))}
        mesh = namedmesh.init_mesh(dp=4, tp=2, timeout=timedelta(minutes=10), options=slow, device="cpu")
        mesh.add_view("expert", edp=2, ep=4)
        with pytest.raises(TypeError, match="takes no order: the mesh determines it"):
            megatron.bind(mesh, order="tp-dp")
        arguments = asked(tp=2, ep=4, etp=1) | NO_GLOO
        starts: list[Callable[[], object]] = [lambda: megatron.bind(mesh, **NO_GLOO)]
        starts.append(lambda: parallel_state.initialize_model_parallel(**arguments))
        for start in starts:
            start()
            assert parallel_state.get_tensor_model_parallel_group() is mesh.group("tp")
            assert parallel_state.get_expert_model_parallel_group() is mesh.group("ep")
            parallel_state.destroy_model_parallel()
            assert mesh.size("tp") == 2  # it was not Megatron's to close
        mesh.close()
        own = {"tp": GroupOptions(share=False)}
        mesh = namedmesh.init_mesh(dp=4, tp=2, options=own, device="cpu")
        with pytest.raises(namedmesh.MeshError, match="'tp' would be on another process group"):
            parallel_state.initialize_model_parallel(2, **NO_GLOO)
        mesh.close()


def _settings() -> list[Any]:
    """Groups with settings of their own come from the original's function, and end with the rest."""
    from megatron.core import parallel_state as theirs

    mine = object()
    theirs.get_nccl_options = lambda name, _: mine if name == "tp" else None
    new_group = dist.new_group

    def without_settings(*args: Any, pg_options: Any = None, **kwargs: Any) -> Any:
        assert pg_options in {None, mine}
        return new_group(*args, **kwargs)

    vars(dist)["new_group"] = without_settings
    megatron.install()
    before = live_groups()
    theirs.initialize_model_parallel(2)
    group = theirs.get_tensor_model_parallel_group()
    listed = group in theirs._global_process_group_list
    told = [group is not megatron.current_mesh().group("tp"), summed(group), listed]
    theirs.destroy_model_parallel()
    return [*told, live_groups() == before]


@pytest.mark.oracle("megatron.core")
def test_groups_with_settings_are_the_original_s_own_and_end_with_the_rest() -> None:
    with release("installed"):
        assert run_ranks(4, _settings) == [[True, 2.0, True, True]] * 4


# Parts of a world.


@pytest.mark.oracle(NEWEST)
def test_a_part_of_the_world_has_the_original_s_groups_and_no_mesh() -> None:
    with release("newest") as theirs, fake_world(8, 5):
        megatron.install()
        theirs.initialize_model_parallel(2, rank_offset=4, local_world_size=4, **NO_GLOO)
        assert dist.get_process_group_ranks(theirs.get_data_parallel_group()) == [5, 7]
        with pytest.raises(namedmesh.MeshError, match="is not bound to a mesh"):
            megatron.current_mesh()
        theirs.destroy_model_parallel()
        assert not theirs.is_initialized()


# State.


SETTABLE = sorted(name[4:] for name in dir(parallel_state) if name.startswith("set_"))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # the original's
@pytest.mark.parametrize("initialized", [True, False])
def test_what_is_set_takes_precedence_as_in_the_original(theirs: Any, initialized: bool) -> None:
    told = []
    calls = [(theirs, theirs.initialize_model_parallel)]
    calls.append((parallel_state, parallel_state.initialize_model_parallel))
    megatron.install()
    calls.append((theirs, theirs.initialize_model_parallel))
    for module, initialize in calls:
        with fake_world(16, 13):
            module.set_tensor_model_parallel_world_size(64)  # before there are groups, and it stays
            if initialized:
                initialize(2, 4, **NO_GLOO)
            seen = [module.get_tensor_model_parallel_world_size()]
            for number, name in enumerate(SETTABLE):
                getattr(module, f"set_{name}")(number % 3)
                seen.append(getattr(module, f"get_{name}")())
            reset(module)
            told.append(seen)
    assert told[0] == told[1] == told[2]


def test_variables_can_be_assigned_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_original_s_own_initializations_before(theirs: Any) -> None:
    """Its destruction leaves variables behind, which are nobody's assignment; what is not destroyed comes back after a mesh."""
    with fake_world(8, 3):
        theirs.initialize_model_parallel(2, 2, **NO_GLOO)
        theirs.destroy_model_parallel()
        megatron.install()
        for sizes in ((2, 2), (4, 1)):
            theirs.initialize_model_parallel(*sizes, **NO_GLOO)
            assert megatron.current_mesh().size("tp") == sizes[0]
            theirs.destroy_model_parallel()
            assert all(not getattr(theirs, name) for name in variable_names(theirs))
        megatron.uninstall()
        theirs.initialize_model_parallel(2, **NO_GLOO)
        group = theirs.get_tensor_model_parallel_group()
        megatron.install()
        with namedmesh.init_mesh(dp=8, device="cpu") as other:
            assert not theirs.is_initialized()
        assert theirs.get_tensor_model_parallel_group() is group
        with pytest.raises(AssertionError, match="already initialized"):
            theirs.initialize_model_parallel(4, **NO_GLOO)
        theirs.destroy_model_parallel()
        theirs.initialize_model_parallel(2, **NO_GLOO)
        with pytest.raises(RuntimeError, match="is not divisible by 3"):
            theirs.initialize_model_parallel(3, **NO_GLOO)
        with pytest.raises(AssertionError, match="already initialized"):
            theirs.initialize_model_parallel(4, **NO_GLOO)
        assert theirs.get_tensor_model_parallel_world_size() == 2
        theirs.destroy_model_parallel()
        other.close()


def test_containers_belong_to_one_initialization() -> None:
    """The original fills them in place, those of no mesh and those of an import, too."""
    with fake_world(8, 3):
        mesh = namedmesh.init_mesh(cp=4, tp=2, device="cpu")
        for hybrid in (True, False, True, False):
            megatron.bind(mesh, hybrid_context_parallel=hybrid, **NO_GLOO)
            assert set(parallel_state._HYBRID_DP_CP_GROUPS) == ({2} if hybrid else set())
        mesh.close()
        assert not parallel_state._HYBRID_DP_CP_GROUPS


# What is made beside the mesh.


def _own_groups() -> list[Any]:
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(2)
    known = parallel_state._global_process_group_list
    told: list[Any] = []
    parallel_state.create_group([0, 3], group_desc="mine")
    named: dict[str, Any] = {"create_gloo_process_groups": True, "group_desc": "levels"}
    levels, gloo = parallel_state.create_hierarchical_groups(rank, [0, 1, 2, 3], [2, 2], **named)
    told.append([dist.get_process_group_ranks(level) for level in (*levels, *gloo)])
    hybrid = parallel_state.create_hybrid_dp_cp_groups(rank, [0, 1, 2, 3], None)
    told.append({size: dist.get_process_group_ranks(group) for size, group in hybrid.items()})
    second, none = parallel_state.create_all_gather_groups()
    told.append((dist.get_process_group_ranks(second), none, second in known))
    parallel_state.update_pg_timeout(timedelta(minutes=7))
    timeouts = set()
    for group in (dist.group.WORLD, *known[1:]):
        timeouts.add(group._get_backend(torch.device("cpu")).options._timeout.seconds)
    parallel_state.destroy_model_parallel()
    return [*told, timeouts]


def test_groups_beside_the_mesh_and_their_timeouts() -> None:
    for rank, (levels, hybrid, second, timeouts) in enumerate(run_ranks(4, _own_groups)):
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert levels == [pair, across, pair, across]
        assert hybrid == {2: pair}
        assert second == (across, None, True)
        assert timeouts == {420}


def test_the_memory_buffer_is_made_and_destroyed_with_the_groups() -> None:
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
        with pytest.raises(AssertionError, match="symmetric memory are megatron-core's"):
            parallel_state._set_global_symmetric_memory_buffer()


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tensor_model_parallel_size": 3}, "the sizes 3 x 1 x 1 do not divide the world of 8 ranks"),
        ({"virtual_pipeline_model_parallel_size": 2}, "set pipeline_model_parallel_size to 2 or more"),
        ({"order": "tp-dp", "pipeline_model_parallel_size": 2}, "the order .* has no place for it; add 'pp'"),
        ({"num_distributed_optimizer_instances": 3}, "which does not divide dp x cp = 8"),
        (asked(cp=4, hierarchical_context_parallel_sizes=[2, 3]), r"\[2, 3\] multiply to 6"),
        ({"use_sharp": True}, "settings of NCCL and SHARP, .* are megatron-core's: let it be installed"),
        (
            {"pipeline_model_parallel_size": 2, "get_embedding_ranks": lambda _: [100, 104]},
            r"get_embedding_ranks chose the ranks \[100, 104\] of the pipeline \[0, 4\]; ",
        ),
    ],
)
def test_mistakes_are_explained_and_change_nothing(arguments: dict[str, Any], text: str) -> None:
    with fake_world(8):
        before = live_groups()
        with pytest.raises(NamedMeshError, match=text):
            parallel_state.initialize_model_parallel(**arguments, **NO_GLOO)
        assert live_groups() == before
        assert all(not getattr(parallel_state, name) for name in variable_names(parallel_state))
        with pytest.raises(namedmesh.MeshError, match="no mesh is alive"):
            namedmesh.current_mesh()


def test_use_before_and_twice() -> None:
    with pytest.raises(AssertionError) as caught:
        parallel_state.get_tensor_model_parallel_group()
    assert str(caught.value) == (
        "the tensor model parallel group is not initialized; call initialize_model_parallel(...), with the option that "
        "makes this group, or namedmesh.compat.megatron.bind(mesh)"
    )
    with pytest.raises(AssertionError, match=r"call namedmesh\.launch\.init\(\) or torch"):
        parallel_state.initialize_model_parallel()
    assert parallel_state.get_data_parallel_world_size() == 0
    with pytest.raises(namedmesh.MeshError, match="state is not bound"):
        megatron.current_mesh()
    with fake_world(8):
        parallel_state.initialize_model_parallel(2, **NO_GLOO)
        told = answers(parallel_state)
        text = r"already initialized, for pp=1 x dp=4 x cp=1 x tp=2 .8 ranks.; "
        with pytest.raises(AssertionError, match=text):
            parallel_state.initialize_model_parallel(4, **NO_GLOO)
        for sizes in ((3, 1, None), (2, 1, 2)):
            with pytest.raises(RuntimeError):  # the arguments are checked first, as in the original
                parallel_state.initialize_model_parallel(*sizes, **NO_GLOO)
        assert answers(parallel_state) == told
