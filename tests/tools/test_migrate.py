"""``namedmesh migrate``: every row of its tables beside the original, and rewritten programs that print the same."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import fake_world, run_ranks

import namedmesh
from namedmesh import Layout, NamedMesh
from namedmesh.__main__ import main
from namedmesh.compat import fairscale
from namedmesh.tools.migrate import FAIRSCALE, MEGATRON, Row, initialize
from namedmesh.tools.migrate.program import Program
from namedmesh.tools.migrate.uses import FileUses, read_file

# Of Megatron: groups that follow from no axes, what has the values of one run, and what is said otherwise.
STAY = {
    "get_data_modulo_expert_parallel_group", "get_data_parallel_group_gloo", "get_expert_data_parallel_group_gloo",
    "get_hierarchical_context_parallel_groups", "get_hybrid_data_context_parallel_groups",
    "get_virtual_pipeline_model_parallel_rank", "get_virtual_pipeline_model_parallel_world_size",
}  # fmt: skip
# Two worlds, one with a data axis that is no power of two, one with tp=1.
WORLDS = [{"pp": 2, "dp": 3, "cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "cp": 4, "tp": 1}]
USE = "from megatron.core import mpu\n"
NEW = 'namedmesh.current_mesh().rank("dp")'
INIT = "mpu.initialize_model_parallel(2)\n"


def plain(answer: Any) -> Any:
    """Groups as lists of ranks, so that two can be compared."""
    return dist.get_process_group_ranks(answer) if isinstance(answer, dist.ProcessGroup) else answer


def calls(name: str, row: Row) -> list[str]:
    """The calls of a function that its row distinguishes, as arguments; a variable is asked once."""
    if "ignore_virtual" in row.parameters:
        return ["", "ignore_virtual=True"]
    found = [", ".join(f"{flag}=True" for flag in flags) for flags in row.axes]
    # Likewise by position.
    usual = "check_initialized"
    found += [
        ", ".join(str(each in {*flags, usual}) for each in row.parameters) for flags in row.axes if flags
    ]
    return found if not name.startswith("_") else [""]


def arguments_of(text: str) -> list[tuple[str, str]]:
    given = []
    for one in filter(None, text.split(", ")):
        name, equals, value = one.rpartition("=")
        given.append((name if equals else "", value))
    return given


def mesh_of(new: str) -> str:
    """The call of init_mesh in the advice for an initialization, without what it is bound to."""
    return re.search(r"namedmesh\.init_mesh\([^)]*\)", new)[0]  # type: ignore[index]


def compare_rows(table: dict[str, Row], original: Any, mesh: NamedMesh) -> set[str]:
    """Run every row of a table beside the original, and return the names."""
    compared, done = set[str](), set[str]()
    names: dict[str, Any] = {"mesh": mesh, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    for name, row in table.items():
        if not hasattr(original, name) or name.startswith("destroy"):
            continue
        for given in calls(name, row):
            advice = row.advise(arguments_of(given))
            for statement in {*advice.once} - done:
                exec(statement, names)  # noqa: S102  that a row can be executed is the point
            done |= {*advice.once}
            call = f"original.{name}" + (f"({given})" if callable(getattr(original, name)) else "")
            try:
                expected = eval(call, {"original": original})  # noqa: S307
            except AssertionError:
                assert "True, True" in given, call  # a combination that Megatron refuses
                continue
            assert plain(eval(advice.new, names)) == plain(expected), call  # noqa: S307
            compared.add(name)
    return compared


@pytest.mark.oracle("megatron.core", "einops")
@pytest.mark.parametrize("sizes", WORLDS)
@pytest.mark.parametrize("rank", [0, 6, 15])
@pytest.mark.parametrize("virtual", [None, 2])
def test_every_row_answers_as_megatron_does(sizes: dict[str, int], rank: int, virtual: int | None) -> None:
    from megatron.core import parallel_state

    layout = Layout(**sizes)
    with fake_world(layout.world_size, rank):
        parallel_state.initialize_model_parallel(
            sizes["tp"], sizes["pp"], virtual, context_parallel_size=sizes["cp"], expert_model_parallel_size=2,
            expert_tensor_parallel_size=1, create_gloo_process_groups=False,
        )  # fmt: skip
        mesh = namedmesh.init_mesh(layout)
        compared = compare_rows(MEGATRON, parallel_state, mesh)
        mesh.close()
        parallel_state.destroy_model_parallel()
    asked = {
        name for name in dir(parallel_state) if re.match(r"(get|is|destroy)_.*(parallel|pipeline)_", name)
    }
    assert asked - compared == STAY


@pytest.mark.oracle("fairscale")
@pytest.mark.parametrize("rank", [0, 5])
def test_every_row_answers_as_fairscale_does(rank: int) -> None:
    from fairscale.nn.model_parallel import initialize as original

    with fake_world(16, rank):
        original.initialize_model_parallel(2, 4)
        advice = initialize("fairscale.nn.model_parallel", [("", "2"), ("", "4")])
        mesh: NamedMesh = eval(mesh_of(advice.new))  # noqa: S307
        assert dict(mesh.layout.items()) == {"dp": 2, "pp": 4, "tp": 2}
        compared = compare_rows(FAIRSCALE, original, mesh)
        mesh.close()
        original.destroy_model_parallel()
    asked = {name for name in dir(original) if re.match(r"_?get_|_.*_PARALLEL_", name)}
    assert asked - compared == set()


@pytest.mark.oracle("megatron.core", "einops")
@pytest.mark.parametrize(
    "arguments",
    [
        "", "2, 4", "tensor_model_parallel_size=2, pipeline_model_parallel_size=4",
        "tensor_model_parallel_size=2, context_parallel_size=2",
        "2, 2, expert_model_parallel_size=2", "2, 2, expert_model_parallel_size=4, expert_tensor_parallel_size=1",
    ],
)  # fmt: skip
def test_initialization_gives_the_groups_of_megatron(arguments: str) -> None:
    from megatron.core import parallel_state

    advice, names = initialize("megatron.core.mpu", arguments_of(arguments)), {"namedmesh": namedmesh}
    getters = {"tp": "tensor_model", "pp": "pipeline_model", "dp": "data", "cp": "context"}
    if advice.once:
        getters |= {"ep": "expert_model", "etp": "expert_tensor", "edp": "expert_data"}
    with fake_world(16, 9):
        init = partial(parallel_state.initialize_model_parallel, create_gloo_process_groups=False)
        eval(f"init({arguments})", {"init": init})  # noqa: S307
        mesh = names["mesh"] = eval(mesh_of(advice.new), names)  # noqa: S307
        for statement in advice.once:
            exec(statement, names)  # noqa: S102
        for axis, name in getters.items():
            group = getattr(parallel_state, f"get_{name}_parallel_group")()
            assert list(mesh.ranks(axis)) == dist.get_process_group_ranks(group), axis
        mesh.close()
        parallel_state.destroy_model_parallel()
    assert bool(advice.doubt) == ("expert" in arguments)


def migrate(*words: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return main(["migrate", *map(str, words)]), out.getvalue()


FROM = '"""Doc."""\nfrom megatron.core.parallel_state import'
FAIR = "from fairscale.nn.model_parallel.initialize import"
LAYER = "namedmesh.compat.megatron"
# A program has to make groups: in each of these, a second file does.
MAKES_GROUPS = {
    "megatron": "from megatron.core import parallel_state\nparallel_state.initialize_model_parallel(2)\n",
    "fairscale": f"{FAIR} initialize_model_parallel\ninitialize_model_parallel(2)\n",
}


def program_of(folder: Path, **sources: str) -> tuple[Program, dict[str, FileUses]]:
    """The program of some files, by their names, and the uses in each of them."""
    files = {}
    for name, source in sources.items():
        path = folder / f"{name}.py"
        path.write_bytes(source.encode())
        found = read_file(path)
        assert isinstance(found, FileUses)
        files[name] = found
    return Program(list(files.values())), files


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{USE}mpu.get_data_parallel_rank()\n", f"{USE}import namedmesh\n{NEW}\n"),
        ("import megatron.core.parallel_state as ps\nx = ps.get_data_parallel_rank() + 1\n", f"import megatron.core.parallel_state as ps\nimport namedmesh\nx = {NEW} + 1\n"),
        ("import megatron.core\nmegatron.core.mpu.get_data_parallel_rank()\n", f"import megatron.core\nimport namedmesh\n{NEW}\n"),
        (f"{FROM} get_data_parallel_rank as r, other\nr(), other\n", f"{FROM} get_data_parallel_rank as r, other\nimport namedmesh\n{NEW}, other\n"),
        (f"import namedmesh\n{USE}mpu.get_data_parallel_rank()\n", f"import namedmesh\n{USE}{NEW}\n"),
        (f"def f():\n    {USE}    return mpu.get_data_parallel_rank()\n", f"import namedmesh\ndef f():\n    {USE}    return {NEW}\n"),
        (f"{USE}x = mpu._TENSOR_MODEL_PARALLEL_GROUP\n", f'{USE}import namedmesh\nx = namedmesh.current_mesh().group("tp")\n'),
        (f"{USE}-mpu.get_data_parallel_rank(True)\n", f'{USE}import namedmesh\n-namedmesh.current_mesh().rank("dp", "cp")\n'),
        (f"{USE}s = 'ä'; mpu.get_data_parallel_rank()\n", f"{USE}import namedmesh\ns = 'ä'; {NEW}\n"),
        (f"\ufeff{USE}mpu.get_data_parallel_rank()\n", f"\ufeff{USE}import namedmesh\n{NEW}\n"),
        (f"{USE}x = (  # why\n    mpu.get_data_parallel_rank()\n)\n", f"{USE}import namedmesh\nx = (  # why\n    {NEW}\n)\n"),
        (f"import os; {USE}x = 1; y = mpu.get_data_parallel_rank()\n", f"import os; {USE}import namedmesh\nx = 1; y = {NEW}\n"),
        (f"import os; x = 1\n{USE}mpu.get_data_parallel_rank()\n", f"import namedmesh\nimport os; x = 1\n{USE}{NEW}\n"),
        (f"{USE}if x:\r\n    mpu.get_data_parallel_rank()\r\n".replace("mpu\n", "mpu\r\n"), f"{USE}import namedmesh\nif x:\n    {NEW}\n".replace("\n", "\r\n")),
    ],
)  # fmt: skip
def test_what_is_certain_is_replaced(before: str, after: str, tmp_path: Path) -> None:
    program, files = program_of(tmp_path, train=MAKES_GROUPS["megatron"], file=before)
    assert program.rewrite(files["file"]).decode() == after


def test_the_layer_is_installed_where_the_groups_are_made(tmp_path: Path) -> None:
    source = f'def setup():\n    """Doc."""\n    {USE}    mpu.initialize_model_parallel(2)\n'
    reads = f"{USE}mpu.get_data_parallel_rank()\n"
    program, files = program_of(tmp_path, train=source, file=reads)
    expected = source.replace(f"    {USE}", f"    {LAYER}.install()\n    {USE}")
    after = program.rewrite(files["train"])
    assert after.decode() == f"import {LAYER}\n{expected}"
    # A body without a line of its own has no place for another statement.
    for signature in ("def setup():", "def setup(a,\n          b=1):"):
        program, files = program_of(
            tmp_path, train=f"{USE}@wrap\n{signature} mpu.initialize_model_parallel(2)\n", file=reads
        )
        lines = program.rewrite(files["train"]).decode().splitlines()
        assert lines[2:4] == [f"{LAYER}.install()", "@wrap"]
    program, files = program_of(tmp_path, train=source, file=reads)
    # A second time there is nothing left to write.
    program, files = program_of(tmp_path, train=after.decode(), file=reads)
    assert program.rewrite(files["train"]) == after


@pytest.mark.parametrize(
    ("line", "doubt"),
    [
        ("use(mpu.get_data_parallel_rank)", "it is passed on, not called"),
        ("mpu.get_data_parallel_rank(flag)", "the value of with_context_parallel decides it"),
        ("mpu.get_data_parallel_rank(*flags)", "the value of * decides it"),
        ("mpu.get_data_parallel_rank(partial_data_parallel=True)", "the value of partial_data_parallel decides"),
        ("mpu.get_tensor_model_parallel_group(check_initialized=False)", "the value of check_initialized decides"),
        ("mpu.get_model_parallel_group()", "every rank has to run a statement once before"),
        ("mpu.get_expert_model_parallel_rank()", "every rank has to run a statement once before"),
        ("mpu.destroy_model_parallel()", "it has no replacement"),
        ("mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)", "the value of ignore_virtual and vp_stage"),
        ("mpu.get_data_parallel_rank(  # why\n)", "a comment stands between its arguments"),
        ("f'{mpu.get_data_parallel_rank()}'", "in an f-string"),
        ("mpu.get_data_paralel_rank()", "it has no replacement"),
        ("getattr(mpu, name)()", "the module itself is passed on"),
        ("setup(mpu=mpu)", "the module itself is passed on"),
        ("from megatron.core.parallel_state import _TENSOR_MODEL_PARALLEL_GROUP as g\ng", "an imported variable keeps"),
        ("if x:\n    import mine as mpu\nmpu.get_data_parallel_rank()", "the name can be something else"),
        ("from mytools import namedmesh\nmpu.get_data_parallel_rank()", "the file has another object"),
        ("import mine as namedmesh\nmpu.get_data_parallel_rank()", "the file has another object"),
        ("def f():\n    global mpu\n    import mine as mpu\nmpu.get_data_parallel_rank()", "the name can be something else"),
        ("class A:\n    mpu = 1\n    def f(self):\n        use(mpu.get_data_parallel_rank)", "it is passed on, not called"),
        ("def namedmesh(): ...\nmpu.get_data_parallel_rank()", "the file has another object"),
        ("from .utils import state\nstate.get_data_parallel_rank()", "through "),
    ],
)  # fmt: skip
def test_what_is_not_certain_is_reported_and_stays(line: str, doubt: str, tmp_path: Path) -> None:
    program, files = program_of(tmp_path, train=MAKES_GROUPS["megatron"], file=f"{USE}{line}\n")
    file = files["file"]
    assert program.rewrite(file) == file.source
    doubts = [program.advise(use).doubt for use in file.uses]
    assert [text.startswith(doubt) for text in doubts] == [True], doubts


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({}, "none of the files makes Megatron's groups"),
        ({"train": f"{USE}mpu.initialize_model_parallel(2)\nmpu.set_tensor_model_parallel_rank(1)\n"}, "train.py:3 changes answers by hand"),
        ({"train": f"{USE}mpu.initialize_model_parallel(2)\nmpu._MODEL_PARALLEL_GROUP = x\n"}, "train.py:3 changes answers by hand"),
        ({"train": f"{USE}mpu.initialize_model_parallel(2, rank_offset=2)\n"}, "train.py:2 makes groups over a part"),
        ({**MAKES_GROUPS}, "the program has groups of Megatron and fairscale"),
    ],
)  # fmt: skip
def test_the_whole_program_decides(more: dict[str, str], obstacle: str, tmp_path: Path) -> None:
    reads = f"{USE}mpu.get_data_parallel_rank()\n"
    program, files = program_of(tmp_path, file=reads, **more)
    assert obstacle in program.obstacles["Megatron"]
    assert all(program.rewrite(file) == file.source for file in files.values())


def write_files(folder: Path, **sources: str) -> None:
    """Write modules by their paths without the suffix."""
    for name, source in sources.items():
        path = folder.joinpath(f"{name}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_a_vendored_copy_is_served_by_the_layer(tmp_path: Path) -> None:
    """Its own relative imports are followed, too."""
    source = f"{USE}mpu.initialize_model_parallel(2)\nmpu.get_data_parallel_rank()\n"
    inside = "from . import parallel_state\nparallel_state.get_data_parallel_rank()\n"
    core = "megatron/core/"
    write_files(tmp_path, **{f"{core}parallel_state": "", f"{core}utils": inside}, train=source)
    status, out = migrate("--write", "--force", tmp_path)
    assert (status, "3 uses in 3 files, 2 of them certain." in out) == (0, True)
    assert NEW in (tmp_path / "train.py").read_text(encoding="utf-8")
    assert NEW in (tmp_path / "megatron" / "core" / "utils.py").read_text(encoding="utf-8")


MAKE = "mpu.initialize_model_parallel(2)\n"


@pytest.mark.parametrize(
    ("start", "certain"),
    [
        (MAKE, True),
        (f"def setup():\n    {MAKE}setup()\n", True),
        (f"def setup():\n    {MAKE}if __name__ == '__main__':\n    setup()\n", True),
        (f"if not dist.is_initialized():\n    {MAKE}", True),
        (f"if world > 1:\n    {MAKE}", False),
        (f"def setup():\n    {MAKE}if world > 1:\n    setup()\n", False),
        (f"def setup():\n    if world > 1:\n        {MAKE}setup()\n", False),
        (f"world > 1 and {MAKE}", True),
    ],
)
def test_reads_that_answer_in_one_process_need_an_unconditional_initialization(
    start: str, certain: bool, tmp_path: Path
) -> None:
    """Megatron returns 0 for them without torch.distributed; the group and tp raise there, too."""
    reads = "mpu.get_data_parallel_rank(), mpu.get_context_parallel_world_size()\n"
    always = "mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_group()\n"
    program, files = program_of(tmp_path, file=USE + start + reads + always)
    doubts = [program.advise(use).doubt for use in files["file"].uses if not use.makes_groups]
    assert [not doubt for doubt in doubts] == [certain, certain, True, True], doubts
    assert certain or "in one process" in doubts[0]


def test_two_meanings_of_a_name_are_both_said(tmp_path: Path) -> None:
    source = "from sat import mpu\nprint(mpu.get_model_parallel_rank())\n"
    write_files(tmp_path, train=source)
    _, out = migrate(tmp_path)
    assert 'two meanings: mesh.rank("tp") in fairscale' in out
    assert 'mesh.rank("pp", "tp") in megatron.core' in out
    assert "flatten" not in out
    makes = "from sat import mpu\nmpu.initialize_model_parallel(2)\n"
    write_files(tmp_path, make=makes)
    _, out = migrate("--diff", "--module", "sat.mpu=fairscale", tmp_path)
    assert '+namedmesh.compat.fairscale.install("sat.mpu")' in out
    assert '+print(namedmesh.current_mesh().rank("tp"))' in out
    write_files(tmp_path, train="from sat.mpu import get_model_parallel_rank as rank\nprint(rank())\n")
    _, out = migrate("--diff", "--module", "sat.mpu=fairscale", tmp_path)
    assert '+print(namedmesh.current_mesh().rank("tp"))' in out
    status, out = migrate("--module", "sat.mpu=deepspeed", tmp_path)
    assert (status, "is not NAME=API, with one of the APIs megatron, fairscale, ezpz" in out) == (2, True)


def test_an_obstacle_can_be_accepted(tmp_path: Path) -> None:
    lazy = "if lazy:\n    mpu.set_tensor_model_parallel_rank(1)\n"
    write_files(tmp_path, train=f"{USE}{INIT}{lazy}mpu.get_tensor_model_parallel_rank()\n")
    path = tmp_path / "train.py"
    _, out = migrate(path)
    assert f"--accept {path}:4 takes it upon yourself" in out
    assert "0 of them certain" in out
    _, out = migrate("--accept", f"{path}:4", path)
    assert "1 of them certain" in out
    status, out = migrate("--accept", f"{path}", path)
    assert (status, "is not FILE:LINE" in out) == (2, True)


def test_re_exports_are_followed_through_several_modules(tmp_path: Path) -> None:
    state = "from megatron.core import parallel_state as parallel\n"
    state += "from megatron.core.parallel_state import get_pipeline_model_parallel_world_size as get_world\n"
    train = f"{USE}{INIT}import lib\nfrom lib import mine\n"
    train += "mine.get_tensor_model_parallel_rank(), lib.get_world()\n"
    package = {"lib/__init__": "from .state import parallel as mine, get_world\n", "lib/state": state}
    write_files(tmp_path, train=train, **package)
    status, out = migrate("--diff", tmp_path)
    assert status == 0
    assert '+namedmesh.current_mesh().rank("tp"), namedmesh.current_mesh().size("pp")' in out


def test_names_of_ezpz_and_of_deepspeed_are_in_the_table(tmp_path: Path) -> None:
    write_files(
        tmp_path,
        train="import ezpz.tp\nezpz.tp.initialize_tensor_parallel(2, 1, 1)\n"
        "ezpz.tp.get_tensor_parallel_group(), ezpz.tp.get_data_parallel_rank()\n",
        sequence=f"{USE}mpu.get_sequence_parallel_world_size()\n",
    )
    _, out = migrate(tmp_path)
    assert 'get_tensor_parallel_group() -> mesh.group("tp")' in out
    assert 'get_data_parallel_rank() -> mesh.rank("dp")' in out
    assert "init_mesh(dp=-1, pp=1, cp=1, tp=2)" in out
    assert (
        'the mesh needs an axis sp, which Megatron\'s initialization does not make) -> mesh.size("sp")' in out
    )


def test_files_that_cannot_be_read_cost_one_line_each(tmp_path: Path) -> None:
    inside, outside = tmp_path / "repository", tmp_path / "outside.py"
    source = f"{USE}{INIT}mpu.get_data_parallel_rank()\n"
    write_files(inside, train=source, deep=f"{USE}x = {'-' * 3000}1\n", sum=f"{USE}x = {'1 + ' * 5000}1\n")
    outside.write_text(source, encoding="utf-8")
    (inside / "out.py").symlink_to(outside)
    (inside / "loop.py").symlink_to(inside / "loop.py")
    (inside / "folder").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe.py")
    status, out = migrate("--write", "--force", inside)
    assert status == 1
    lines = out.splitlines()
    for name, text in {
        "out": f"not read: a link to {outside}, which was not given",
        "loop": "not read: ",
        "pipe": "not read: not a regular file",
        "deep": "cannot be read: ",
        "sum": "cannot be read: ",
    }.items():
        assert sum(line.startswith(f"{inside / name}.py: {text}") for line in lines) == 1, name
    assert outside.read_text(encoding="utf-8") == source
    assert NEW in (inside / "train.py").read_text(encoding="utf-8")


# Programs as they are found, one for each thing that a rewritten program could get wrong: what each rank answers must be the same
# after `--write`. The last entry is the number of calls that are replaced.
RANKS = "[g and dist.get_process_group_ranks(g) for g in ({})]"
HEAD = "import torch.distributed as dist\nfrom megatron.core import mpu, parallel_state as ps\n"
PROGRAMS = {
    "calls of every kind": (HEAD + f"""
def answers():
    ps.initialize_model_parallel(2, context_parallel_size=2, create_gloo_process_groups=False)
    numbers = [mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_world_size(with_context_parallel=True)]
    stages = [mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage(), f"{{mpu.get_data_parallel_rank()}}"]
    groups = {RANKS.format("mpu.get_tensor_model_parallel_group(), ps.get_context_parallel_group(), mpu.get_model_parallel_group()")}
    mpu.destroy_model_parallel()
    return numbers, stages, groups, ps.model_parallel_is_initialized()
""", 6),
    "virtual stages": (HEAD + """
def answers():
    mpu.initialize_model_parallel(1, 2, 2, create_gloo_process_groups=False)
    found = [mpu.get_pipeline_model_parallel_rank(), mpu.get_virtual_pipeline_model_parallel_world_size()]
    for chunk in range(2):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        found += [mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk), mpu.is_pipeline_last_stage()]
        found += [mpu.get_virtual_pipeline_model_parallel_rank(), mpu.is_pipeline_last_stage(ignore_virtual=True)]
    return found
""", 2),
    "an order, a timeout and experts": (HEAD + f"""
def answers():
    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=2, order="tp-pp-cp-ep-dp", distributed_timeout_minutes=5,
        create_gloo_process_groups=False,
    )
    found = [mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_next_rank()]
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        2, expert_model_parallel_size=2, expert_tensor_parallel_size=1, create_gloo_process_groups=False,
    )
    groups = {RANKS.format("mpu.get_data_parallel_group(), mpu.get_expert_model_parallel_group()")}
    return found, groups, mpu.get_tensor_model_parallel_rank()
""", 4),
    "names that are computed, and the module passed on": (HEAD + """
def ask(state, kind):
    return [getattr(state, f"get_{kind}_parallel_{what}")() for what in ("rank", "world_size")]
def answers():
    assert not mpu.model_parallel_is_initialized()
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2, create_gloo_process_groups=False)
    kinds = ("tensor_model", "data", "pipeline_model")
    return [ask(mpu, kind) for kind in kinds] + [mpu.get_data_parallel_rank(), mpu.get_tensor_model_parallel_rank()]
""", 2),
    "answers set by hand": (HEAD + """
def answers():
    mpu.set_tensor_model_parallel_rank(3)
    mpu.set_tensor_model_parallel_world_size(8)
    found = [mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()]
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2, create_gloo_process_groups=False)
    mpu._MODEL_PARALLEL_GROUP = None
    return found + [mpu.get_model_parallel_group(False), mpu.get_data_parallel_world_size()]
""", 0),
    "an import in the function that makes the groups": ("""
def setup():
    from megatron.core.parallel_state import initialize_model_parallel
    initialize_model_parallel(2, create_gloo_process_groups=False)
def answers():
    setup()
    from megatron.core.parallel_state import get_data_parallel_rank, get_tensor_model_parallel_src_rank
    return get_data_parallel_rank(), get_tensor_model_parallel_src_rank()
""", 2),
    "layers of fairscale": ("""
import torch
from fairscale.nn.model_parallel import initialize as fs
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear
def answers():
    fs.initialize_model_parallel(2)
    torch.manual_seed(0)
    column, row = ColumnParallelLinear(4, 8, gather_output=False), RowParallelLinear(8, 4, input_is_parallel=True)
    y = row(column(torch.ones(2, 4)))
    return y.tolist(), fs.get_model_parallel_rank(), fs.get_data_parallel_world_size(), fs.get_model_parallel_src_rank()
""", 3),
}  # fmt: skip


def answers(path: str) -> Any:
    sys.path.insert(0, str(Path(path).parent))
    return runpy.run_path(path)["answers"]()


@pytest.mark.oracle("megatron.core", "einops", "fairscale")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rewritten_program_answers_the_same(name: str, tmp_path: Path) -> None:
    source, replaced = PROGRAMS[name]
    path = tmp_path / "program.py"
    path.write_text(source, encoding="utf-8")
    before = run_ranks(4, answers, str(path))
    assert migrate("--write", "--force", path)[0] == 0
    after = path.read_text(encoding="utf-8")
    assert after.count("namedmesh.current_mesh()") == replaced
    assert run_ranks(4, answers, str(path)) == before
    assert migrate("--write", "--force", path)[0] == 0
    assert path.read_text(encoding="utf-8") == after


@pytest.mark.oracle("megatron.core", "einops")
def test_a_program_of_several_files_answers_the_same(tmp_path: Path) -> None:
    sources = {
        "state": "from megatron.core import mpu\ndef rank():\n    return mpu.get_data_parallel_rank()\n",
        "groups": "from megatron.core.parallel_state import initialize_model_parallel\n"
        "def setup():\n    initialize_model_parallel(2, create_gloo_process_groups=False)\n",
        "program": "from state import mpu, rank\nfrom groups import setup\n"
        "def answers():\n    setup()\n    return rank(), mpu.get_tensor_model_parallel_rank()\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    path = str(tmp_path / "program.py")
    before = run_ranks(4, answers, path)
    assert migrate("--write", "--force", tmp_path)[0] == 0
    after = {name: (tmp_path / f"{name}.py").read_text(encoding="utf-8") for name in sources}
    assert "current_mesh()" in after["state"]
    assert f"{LAYER}.install()" in after["groups"]
    assert "current_mesh()" in after["program"]  # through its own module
    assert run_ranks(4, answers, path) == before


# The own module of a program, in the style of gpt-neox; the second one has another order of ranks.
OWN_MPU = """
import torch.distributed as dist
_MODEL_PARALLEL_GROUP = None
_DATA_PARALLEL_GROUP = None
def initialize_model_parallel(model_parallel_size, topology=None):
    global _MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    world, size = dist.get_world_size(), model_parallel_size
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _MODEL_PARALLEL_GROUP = group
    for first in range(size):
        ranks = list(range(first, world, size))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            _DATA_PARALLEL_GROUP = group
def get_model_parallel_group():
    return _MODEL_PARALLEL_GROUP
def get_model_parallel_rank():
    return dist.get_rank(_MODEL_PARALLEL_GROUP)
"""
OWN_PROGRAM = """
import torch.distributed as dist
from own import mpu
def answers():
    mpu.initialize_model_parallel(2)
    return mpu.get_model_parallel_rank(), dist.get_process_group_ranks(mpu.get_model_parallel_group())
"""


def test_a_program_with_a_module_of_its_own_answers_the_same(tmp_path: Path) -> None:
    write_files(tmp_path, **{"own/__init__": "", "own/mpu": OWN_MPU}, program=OWN_PROGRAM)
    path = str(tmp_path / "program.py")
    before = run_ranks(4, answers, path)
    assert migrate("--write", "--force", "--module", "own.mpu=fairscale", path)[0] == 0
    source = Path(path).read_text(encoding="utf-8")
    assert source.count("current_mesh()") == 2
    assert 'install("own.mpu")' in source
    assert run_ranks(4, answers, path) == before


def make_groups_in_another_order(folder: str) -> list[object]:
    sys.path.insert(0, folder)
    fairscale.install("own.mpu")
    module: Any = importlib.import_module("own.mpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.initialize_model_parallel(2)
    text = str(caught[0].message)
    ranks = dist.get_process_group_ranks(module.get_model_parallel_group())
    fairscale.uninstall()
    return [ranks, text.partition(": ")[0], text.count("_MODEL_PARALLEL_GROUP has the ranks")]


def test_a_fork_with_another_order_of_ranks_gets_no_mesh(tmp_path: Path) -> None:
    other = OWN_MPU.replace("range(0, world, size)", "range(world // size)")
    other = other.replace("list(range(first, first + size))", "list(range(first, world, world // size))")
    write_files(tmp_path, **{"own/__init__": "", "own/mpu": other})
    for rank, found in enumerate(run_ranks(4, make_groups_in_another_order, str(tmp_path))):
        assert found == [[rank % 2, rank % 2 + 2], "initialize_model_parallel() has no mesh", 1]


OTHERS = "from torch.distributed import get_rank  # mpu\nfrom mine import data_parallel\nget_rank(), data_parallel.rank()\n"
STAR = ": import those that are used, and run this command again) -> stays\n"
READER = "from megatron.core import tensor_parallel  # parallel_state\n"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (USE + INIT, "by hand -> namedmesh.compat.megatron.bind(namedmesh.init_mesh(pp=1, dp=-1, cp=1, tp=2))\n"),
        (READER, "No use of megatron.core.parallel_state in 1 file.\n"),
        (OTHERS, "No use of megatron.core.parallel_state in 1 file.\n"),
        ("from megatron.core.parallel_state import *\nget_data_parallel_group()\n", STAR),
        ("def mpu(:\n", "/train.py: cannot be read: "),
        ("import mpu  # \xff\n", "/train.py: cannot be read: "),
    ],
)  # fmt: skip
def test_the_report_covers_every_kind_of_file(source: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source, encoding="latin-1")
    (tmp_path / "data.ipynb").write_text("{}", encoding="utf-8")
    status, out = migrate(tmp_path)
    assert (status, shown in out, "1 notebook: not read\n" in out) == ("cannot be read" in out, True, True)
    assert ("No use" in out) == (source in {OTHERS, READER}) or status


def test_many_files_are_reported_in_order(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"file{number:02}.py").write_text(
            f"{USE}x = mpu.get_data_parallel_rank()\n", encoding="utf-8"
        )
    (tmp_path / "train.py").write_text(USE + INIT, encoding="utf-8")
    lines = migrate(tmp_path)[1].splitlines()
    assert lines[0] == f'{tmp_path / "file00.py"}:2: get_data_parallel_rank() -> mesh.rank("dp")'
    assert lines[-1] == "51 uses in 51 files, 50 of them certain."


def test_git_is_the_backup(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)  # noqa: S607

    path, text = tmp_path / "a.py", f"{USE}{INIT}mpu.get_data_parallel_rank()\n"
    path.write_text(text, encoding="utf-8")
    status, out = migrate("--write", path)
    assert (status, "git says of" in out) == (2, True)
    git("init", "-q")
    status, out = migrate("--write", tmp_path)
    assert (status, "uncommitted changes" in out, path.read_text(encoding="utf-8")) == (2, True, text)
    git("add", ".")
    git("commit", "-qm", "a")
    status, out = migrate("--diff", path)
    assert (
        f"+{LAYER}.install()\n mpu.initialize_model_parallel(2)\n-mpu.get_data_parallel_rank()\n+{NEW}\n"
        in out
    )
    assert (status, path.read_text(encoding="utf-8")) == (0, text)
    status, out = migrate("--write", path)
    assert (status, out.splitlines()[0]) == (0, f"{path}: rewritten")
    written = f"{USE}import namedmesh\nimport {LAYER}\n{LAYER}.install()\n{INIT}{NEW}\n"
    assert path.read_text(encoding="utf-8") == written
