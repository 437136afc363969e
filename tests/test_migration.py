"""The migration table: complete, executed name by name, and compared with Megatron."""

from __future__ import annotations

import datetime as dt
import inspect
import logging
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_newest import NEWEST, RELEASES, release
from ranks import fake_world, run_ranks

import namedmesh
from namedmesh import GroupOptions, Layout, NamedMesh
from namedmesh.compat import migration
from namedmesh.compat.migration import TABLE, advise
from namedmesh.migrate.report import page, rows
from namedmesh.migrate.rules import Signature
from namedmesh.migrate.table import SECTIONS

GATHERED = "Weights that are gathered for each use"  # of newer releases
SEQUENCE = "Sequence parallelism of Megatron-DeepSpeed"
NAMES = frozenset(
    row.name for section, rows_ in SECTIONS.items() if section not in {GATHERED, SEQUENCE} for row in rows_
)
NEWER = frozenset(row.name for row in SECTIONS[GATHERED])

EXAMPLES = [
    legacy for section in SECTIONS if section not in {GATHERED, SEQUENCE} for legacy, _ in rows(section)
]
# Sizes, and what goes with them: two worlds, one with a data axis that is no power of two, one with tp=1.
WORLDS = {
    "24 ranks": {"pp": 2, "dp": 3, "cp": 2, "tp": 2},
    "16 ranks": {"pp": 2, "dp": 2, "cp": 4, "tp": 1},
}
LEVELS = {"24 ranks": [2, 1], "16 ranks": [2, 2]}
# Calls that start and end things have tests of their own, and gloo groups need a real world.
APART = ("initialize_model_parallel", "destroy_model_parallel")


def _name(legacy: str) -> str:
    return legacy.split("(", maxsplit=1)[0]


def _in_a_fake_world(legacy: str) -> bool:
    return _name(legacy) not in APART and "gloo" not in legacy.lower()


def _namespace(mesh: NamedMesh, tmp_path: Path, stage: int, levels: list[int]) -> dict[str, Any]:
    """The variables that replacements and examples name."""
    nccl = tmp_path / "nccl.yaml"
    nccl.write_text("tp:\n  max_ctas: 8\n", encoding="utf-8")
    return {
        "mesh": mesh,
        "namedmesh": namedmesh,
        "torch": torch,
        "logging": logging,
        "datetime": dt,
        "stage": stage,
        "vp_stage": stage,
        "virtual_stages": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "num_distributed_optimizer_instances": 2,
        "hierarchical_context_parallel_sizes": levels,
        "hierarchical_group_sizes": levels,
        "group_size": 2,
        "nccl_communicator_config_path": nccl,
        "nccl_comm_cfgs": {},
        "pg_name": "tp",
        "pg_options": None,
        "timeout": dt.timedelta(minutes=5),
        "pp_ranks": list(mesh.ranks("pp")),
        "rank": mesh.global_rank,
        "ranks": list(mesh.ranks("cp")),
    }


def _run(legacy: str, names: dict[str, Any], done: set[str]) -> Any:
    """Evaluate the replacement of a call, after what it needs once."""
    advice = advise(legacy)
    for statement in advice.once:
        if statement not in done:
            done.add(statement)
            exec(statement, names)  # noqa: S102  that the table can be executed is the point
    return eval(advice.replacement, names)  # noqa: S307


def _plain(answer: Any) -> Any:
    """An answer with groups as lists of ranks and tuples as lists, so that two can be compared."""
    if isinstance(answer, dist.ProcessGroup):
        return {"group": dist.get_process_group_ranks(answer)}
    if isinstance(answer, (list, tuple)):
        return [_plain(one) for one in answer]
    if isinstance(answer, dict):
        return {key: _plain(value) for key, value in answer.items()}
    return answer


# The table.


@pytest.mark.parametrize("which", RELEASES)
def test_every_name_of_megatron_has_an_entry(which: str) -> None:
    with release(which) as parallel_state:
        own = {
            name
            for name, value in vars(parallel_state).items()
            if getattr(value, "__module__", parallel_state.__name__) == parallel_state.__name__
            and not name.startswith("__")
            and not inspect.ismodule(value)
            and not name.startswith("HAVE_")
        }
        assert own - set(TABLE) == set()
        # It is no function of the module
        assert NAMES - own <= ({"logger"} if which == "installed" else NAMES)
        assert {"initialize_model_parallel", "_PIPELINE_GLOBAL_RANKS"} <= own
        assert bool(own & NEWER) == (which == "newest")


@pytest.mark.oracle(NEWEST)
@pytest.mark.parametrize("rank", [0, 9, 30])
def test_groups_of_gathered_weights_are_those_of_megatron(rank: int, tmp_path: Path) -> None:
    call = (
        "initialize_model_parallel(2, 2, context_parallel_size=2, gtp_remat_size=2, expert_model_parallel_size=2, "
        "expert_tensor_parallel_size=1, expert_gtp_remat_size=2, create_gloo_process_groups=False)"
    )
    with fake_world(32, rank), release("newest") as oracle:
        eval(call, vars(oracle))  # noqa: S307
        advice = advise(call)
        mesh: NamedMesh = eval(advice.replacement, {"namedmesh": namedmesh})  # noqa: S307
        assert dict(mesh.layout.items()) == {"pp": 2, "dp": 2, "cp": 2, "gtp_remat": 2, "tp": 2}
        names, done = _namespace(mesh, tmp_path, 0, [2, 1]), set(advice.once)
        names |= {"expert_gtp_remat_size": 2}
        (statement,) = advice.once
        exec(statement, names)  # noqa: S102
        compared = set()
        for legacy, found in rows(GATHERED):
            if found.replacement and "PARTIAL" not in legacy and "create" not in legacy:
                done |= {once for once in found.once if "add_view" in once}
                expected = _plain(eval(legacy, vars(oracle)))  # noqa: S307
                assert _plain(_run(legacy, names, done)) == expected, legacy
                compared.add(_name(legacy))
        assert len(NEWER - compared) == 4
        mesh.close()
        oracle.destroy_model_parallel()


@pytest.mark.oracle("megatron.core")
def test_parameters_are_those_of_megatron_in_its_order() -> None:
    from megatron.core import parallel_state

    for name in NAMES:
        row, function = TABLE[name], getattr(parallel_state, name)
        assert callable(function) == row.is_function, name
        if row.is_function:
            given = inspect.signature(function).parameters.values()
            defaults = {one.name: repr(one.default) for one in given if one.default is not one.empty}
            assert row.signature == Signature(tuple(one.name for one in given), defaults), name


@pytest.mark.parametrize("world", WORLDS)
def test_every_replacement_can_be_executed(world: str, tmp_path: Path) -> None:
    layout = Layout(**WORLDS[world])
    with fake_world(layout.world_size, 5):
        mesh = namedmesh.init_mesh(layout)
        names, done = _namespace(mesh, tmp_path, 0, LEVELS[world]), set[str]()
        for legacy in EXAMPLES:
            if _in_a_fake_world(legacy) and advise(legacy).replacement:
                _run(legacy, names, done)
        _run("destroy_model_parallel()", names, done)
        assert mesh.closed


# The same questions to Megatron.


def _oracle(sizes: dict[str, int], levels: list[int], **more: Any) -> Any:
    """Megatron's module, initialized for the default group; only what it takes gloo for is left out."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        context_parallel_size=sizes["cp"],
        virtual_pipeline_model_parallel_size=2 if sizes["pp"] > 1 else None,
        hierarchical_context_parallel_sizes=levels,
        expert_model_parallel_size=more.pop("ep", 2),
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=2,
        **more,
    )
    return parallel_state


def _compared(legacy: str, answer: Any, expected: Any) -> tuple[Any, Any]:
    """Both answers, with what is known to differ made alike."""
    name = _name(legacy)
    if name == "RankGenerator":
        tokens = ("tp-dp", "pp", "dp-pp")
        return (
            [_plain(answer.groups(*token.split("-"))) for token in tokens],
            [expected.get_ranks(token) for token in tokens],
        )
    if name == "create_hierarchical_groups":
        expected = expected[0]  # beside gloo groups
    if name in {"create_hybrid_dp_cp_groups", "_HYBRID_DP_CP_GROUPS"}:
        expected = {2: expected[2]}  # it makes groups of every power of two
    if expected is None:  # a rank that is in no such group or list
        assert name in {
            "_POSITION_EMBEDDING_GROUP",
            "_POSITION_EMBEDDING_GLOBAL_RANKS",
            "get_position_embedding_group",
        }
        answer = None
    return _plain(answer), _plain(expected)


# What makes a thing of another kind than Megatron's.
OTHER_KIND = (
    "logger",
    "get_nccl_options",
    "overwrite_nccl_comm_cfgs",
    "update_pg_timeout",
    "_global_process_group_list",
    "has_separate_all_gather_group",
)


@pytest.mark.oracle("megatron.core", "einops")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rank", [0, 6, 15])
def test_every_replacement_answers_as_megatron_does(world: str, rank: int, tmp_path: Path) -> None:
    sizes, levels = WORLDS[world], LEVELS[world]
    layout = Layout(**sizes)
    with fake_world(layout.world_size, rank):
        oracle = _oracle(
            sizes,
            levels,
            create_gloo_process_groups=False,
            hybrid_context_parallel=True,
            create_all_gather_group=True,
        )
        mesh = namedmesh.init_mesh(layout)
        count = 0
        for stage in (0, 1):
            names, done = _namespace(mesh, tmp_path, stage, levels), {"again"} if stage else set[str]()
            for legacy in EXAMPLES:
                if (
                    not _in_a_fake_world(legacy)
                    or not advise(legacy).replacement
                    or _name(legacy) in OTHER_KIND
                ):
                    continue
                if stage and "stage=stage" not in legacy:
                    continue
                if _name(legacy) == "create_hybrid_dp_cp_groups":
                    names["ranks"] = list(mesh.ranks("dp", "cp"))
                try:
                    expected = eval(legacy, {**names, **vars(oracle)})  # noqa: S307
                except AssertionError:
                    expected = None
                answer, expected = _compared(legacy, _run(legacy, names, done), expected)
                assert answer == expected, legacy
                names["ranks"] = list(mesh.ranks("cp"))
                count += 1
        assert count > 95
        asked = advise("has_separate_all_gather_group()").replacement
        assert oracle.has_separate_all_gather_group() is eval(asked, names) is True  # noqa: S307
        assert mesh.group("dp_cp_gather") is not mesh.group("dp", "cp")
        mesh.close()
        oracle.destroy_model_parallel()
        oracle._HYBRID_DP_CP_GROUPS.clear()


def _gloo_answers(tmp_path: Path) -> list[tuple[str, Any]]:
    with_gloo = GroupOptions(gloo_twin=True)
    mesh = namedmesh.init_mesh(
        pp=1,
        dp=2,
        cp=2,
        tp=1,
        device="cpu",
        options={"dp": with_gloo, "dp_shard": with_gloo, "edp": with_gloo},
    )
    names, done = _namespace(mesh, tmp_path, 0, [1, 2]), set[str]()
    names["expert_model_parallel_size"] = 1
    answers = [
        (legacy, _plain(_run(legacy, names, done)))
        for legacy in EXAMPLES
        if "gloo" in legacy.lower() and advise(legacy).replacement
    ]
    mesh.close()
    return answers


def _gloo_answers_of_megatron(legacies: list[str]) -> list[Any]:
    oracle = _oracle({"pp": 1, "dp": 2, "cp": 2, "tp": 1}, [], ep=1)
    answers = [_plain(eval(legacy, dict(vars(oracle)))) for legacy in legacies]  # noqa: S307
    oracle.destroy_model_parallel()
    return answers


def test_gloo_groups_can_be_executed(tmp_path: Path) -> None:
    for answers in run_ranks(4, _gloo_answers, tmp_path):
        assert len(answers) == 10
        assert {type(answer) for _, answer in answers} == {dict}


@pytest.mark.oracle("megatron.core", "einops")
def test_gloo_groups_are_those_of_megatron(tmp_path: Path) -> None:
    by_rank = run_ranks(4, _gloo_answers, tmp_path)
    legacies = [legacy for legacy, _ in by_rank[0]]
    expected = run_ranks(4, _gloo_answers_of_megatron, legacies)
    assert [[answer for _, answer in answers] for answers in by_rank] == expected


# initialize_model_parallel, argument by argument; what becomes of each stands in migrate_cases.txt.

INITIALIZATIONS = [
    "",
    "2, 4",
    "tensor_model_parallel_size=2, pipeline_model_parallel_size=4",
    "tensor_model_parallel_size=2, context_parallel_size=2",
    "2, context_parallel_size=1, order='tp-pp-cp-dp'",
    "2, 2, context_parallel_size=2, order='TP-DP-CP-pp'",
    "2, 2, expert_model_parallel_size=2",
    "2, 2, expert_model_parallel_size=4, expert_tensor_parallel_size=1, context_parallel_size=2",
    "2, 2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, order='tp-ep-pp-dp', num_distributed_optimizer_instances=2",
    "2, context_parallel_size=2, num_distributed_optimizer_instances=2, expert_tensor_parallel_size=None",
    "2, distributed_timeout_minutes=7",
]


@pytest.mark.oracle("megatron.core")
@pytest.mark.parametrize("arguments", INITIALIZATIONS)
def test_initialization_gives_the_groups_of_megatron(arguments: str) -> None:
    from megatron.core import parallel_state

    call = f"initialize_model_parallel({arguments}{', ' * bool(arguments)}create_gloo_process_groups=False)"
    advice = advise(call)
    names: dict[str, Any] = {"namedmesh": namedmesh, "datetime": dt, "torch": torch}
    with fake_world(16, 9):
        eval(call, dict(vars(parallel_state)))  # noqa: S307
        mesh = names["mesh"] = eval(advice.replacement, names)  # noqa: S307
        for statement in advice.once:
            exec(statement, names)  # noqa: S102
        axes = {
            "tp": "get_tensor_model_parallel_group()",
            "pp": "get_pipeline_model_parallel_group()",
            "dp": "get_data_parallel_group()",
            "cp": "get_context_parallel_group()",
            "ep": "get_expert_model_parallel_group()",
            "etp": "get_expert_tensor_parallel_group()",
            "edp": "get_expert_data_parallel_group()",
            "dp_shard": "get_data_parallel_group(True, True)",
            "edp_shard": "get_expert_data_parallel_group(partial_expert_data_parallel=True)",
            "edp_replicate": "get_inter_distributed_optimizer_instance_group()",
        }
        known = {axis: legacy for axis, legacy in axes.items() if axis in mesh.coords}
        for axis, legacy in known.items():
            group = eval(legacy, dict(vars(parallel_state)))  # noqa: S307
            assert list(mesh.ranks(axis)) == dist.get_process_group_ranks(group), axis
        assert len(known) >= 3 + 3 * ("expert_model" in arguments) + ("instances" in arguments)
        mesh.close()
        parallel_state.destroy_model_parallel()


# The page.


def test_the_page_has_every_entry_with_its_replacement() -> None:
    text = migration.__doc__
    assert text is not None
    assert text.endswith(page())
    for section in SECTIONS:
        for legacy, advice in rows(section):
            assert f"    {legacy}" in text
            assert (advice.replacement or "stays") in text


def test_the_page_in_the_examples_is_the_one_that_help_shows() -> None:
    page = Path(__file__).parents[1] / "examples" / "migration.txt"
    assert page.read_text(encoding="utf-8") == migration.__doc__
    assert pydoc.render_doc(migration).count("get_all_ranks()") == 1


def test_all_lists_what_can_be_imported() -> None:
    assert sorted(migration.__all__) == sorted(set(migration.__all__), key=str)
    assert [name for name in migration.__all__ if not hasattr(migration, name)] == []
