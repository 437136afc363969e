"""``namedmesh migrate``: every row of its tables beside the original, and rewritten programs that print the same."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from ranks import fake_world, run_ranks

import namedmesh
from namedmesh import Layout, NamedMesh
from namedmesh.__main__ import main
from namedmesh.migrate import FAIRSCALE, MEGATRON, Row, initialize

pytest.importorskip("libcst")
from namedmesh.migrate.codemod import Changes

if TYPE_CHECKING:
    from pathlib import Path

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
        mesh: NamedMesh = eval(initialize("fairscale.nn.model_parallel", [("", "2"), ("", "4")]).new)  # noqa: S307
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
        mesh = names["mesh"] = eval(advice.new, names)  # noqa: S307
        for statement in advice.once:
            exec(statement, names)  # noqa: S102
        for axis, name in getters.items():
            group = getattr(parallel_state, f"get_{name}_parallel_group")()
            assert list(mesh.ranks(axis)) == dist.get_process_group_ranks(group), axis
        mesh.close()
        parallel_state.destroy_model_parallel()
    assert bool(advice.doubt) == ("expert" in arguments)


FROM = '"""Doc."""\nfrom megatron.core.parallel_state import'
FAIR = "from fairscale.nn.model_parallel.initialize import"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{USE}mpu.get_data_parallel_rank()\n", f"import namedmesh\n\n{NEW}\n"),
        ("import megatron.core.parallel_state as ps\nx = ps.get_data_parallel_rank() + 1\n", f"import namedmesh\n\nx = {NEW} + 1\n"),
        ("import megatron.core\nmegatron.core.mpu.get_data_parallel_rank()\n", f"import megatron.core\nimport namedmesh\n\n{NEW}\n"),
        (f"{FROM} get_data_parallel_rank as r, other\nr(), other\n", f"{FROM} other\nimport namedmesh\n\n{NEW}, other\n"),
        (f"import namedmesh\n{USE}mpu.get_data_parallel_rank()\n", f"import namedmesh\n{NEW}\n"),
        (f"{FAIR} get_model_parallel_rank as r\nr()\n", 'import namedmesh\n\nnamedmesh.current_mesh().rank("tp")\n'),
        (f"{USE}x = mpu._TENSOR_MODEL_PARALLEL_GROUP\n", 'import namedmesh\n\nx = namedmesh.current_mesh().group("tp")\n'),
        (f"{USE}-mpu.get_data_parallel_rank(True)\n", 'import namedmesh\n\n-namedmesh.current_mesh().rank("dp", "cp")\n'),
        (f"{USE}if x:\r\n    mpu.get_data_parallel_rank()\r\n", f"import namedmesh\n\nif x:\r\n    {NEW}\r\n"),
    ],
)  # fmt: skip
def test_what_is_certain_is_replaced(before: str, after: str) -> None:
    assert Changes(before).after == after


@pytest.mark.parametrize(
    ("line", "doubt"),
    [
        ("use(mpu.get_data_parallel_rank)", "passed on, not called"),
        ("mpu.get_data_parallel_rank(flag)", "what with_context_parallel is decides it"),
        ("mpu.get_data_parallel_rank(*flags)", "what * is decides it"),
        ("mpu.get_data_parallel_rank(partial_data_parallel=True)", "what partial_data_parallel is decides"),
        ("mpu.get_tensor_model_parallel_group(check_initialized=False)", "what check_initialized is decides"),
        ("mpu.initialize_model_parallel(order='tp-dp-pp')", "what order asks for is missing here"),
        ("mpu.initialize_model_parallel(num_distributed_optimizer_instances=2)", "what num_distributed_"),
        ("mpu.get_model_parallel_group()", "run once before, on every rank"),
        ("mpu.get_expert_model_parallel_rank()", "run once before, on every rank"),
        (
            "mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)",
            "what ignore_virtual and vp_stage is ",
        ),
        ("mpu.get_data_parallel_rank(  # why\n)", "a comment stands between its arguments"),
        ("f'{mpu.get_data_parallel_rank()}'", "in an f-string"),
        ("mpu._TENSOR_MODEL_PARALLEL_GROUP = x", "an assignment changes what legacy calls answer"),
        ("mpu.get_data_paralel_rank()", "not in the table: it stays"),
        ("if x:\n    import mine as mpu\nmpu.get_data_parallel_rank()", "the name can be something else"),
        ("from mytools import namedmesh\nmpu.get_data_parallel_rank()", "the file has a namedmesh of its"),
        ("import mine as namedmesh\nmpu.get_data_parallel_rank()", "the file has a namedmesh of its own"),
        ("def namedmesh(): ...\nmpu.get_data_parallel_rank()", "the file has a namedmesh of its own"),
        ("from .utils import state\nstate.get_data_parallel_rank()", "through "),
    ],
)
def test_what_is_not_certain_is_reported_and_stays(line: str, doubt: str) -> None:
    found = Changes(f"{USE}{line}\n")
    assert found.after == f"{USE}{line}\n"
    assert [finding.advice.doubt.startswith(doubt) for finding in found.findings] == [True], found.findings


PROGRAM = """\
from megatron.core import mpu, parallel_state as ps
import torch.distributed as dist
def answers():
    ps.initialize_model_parallel(2, context_parallel_size=2, create_gloo_process_groups=False)
    groups = [mpu.get_tensor_model_parallel_group(), ps.get_context_parallel_group(), mpu.get_model_parallel_group()]
    numbers = [mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_world_size(with_context_parallel=True)]
    stages = [mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage(), f"{mpu.get_data_parallel_rank()}"]
    found = numbers + stages + [dist.get_process_group_ranks(group) for group in groups]
    mpu.destroy_model_parallel()
    return found
"""


def answers(program: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(program, "program.py", "exec", dont_inherit=True), names)  # noqa: S102  what is tested
    return names["answers"]()


def migrate(*words: str | Path) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return main(["migrate", *map(str, words)]), out.getvalue()


@pytest.mark.oracle("megatron.core", "einops")
def test_a_rewritten_program_answers_the_same(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    assert migrate("--write", "--force", path)[0] == 0
    after = path.read_text(encoding="utf-8")
    assert "namedmesh.compat.megatron.bind(namedmesh.init_mesh(pp=1, dp=-1, cp=2, tp=2))" in after
    assert after.count("namedmesh.current_mesh()") == 7
    assert "mpu.get_model_parallel_group()" in after  # needs a statement of its own, and answers all the same
    assert run_ranks(4, answers, after) == run_ranks(4, answers, PROGRAM)
    assert migrate("--write", "--force", path)[0] == 0
    assert path.read_text(encoding="utf-8") == after


INIT, MESH = "mpu.initialize_model_parallel(2)\n", "namedmesh.init_mesh(pp=1, dp=-1, cp=1, tp=2)"
OTHERS = "from torch.distributed import get_rank  # mpu\nfrom mine import data_parallel\nget_rank(), data_parallel.rank()\n"
READER = "from megatron.core import tensor_parallel  # parallel_state\n"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (USE + INIT, f"-> {MESH}\n"),
        (READER + USE + INIT, f"-> namedmesh.compat.megatron.bind({MESH})\n"),
        (READER, "/train.py: megatron.core.tensor_parallel\n"),
        (OTHERS, "No use of megatron.core.parallel_state in 1 file.\n"),
        ("def mpu(:\n", "/train.py: cannot be read: "),
        ("# mpu \xff\n", "/train.py: cannot be read: "),
    ],
)
def test_reports_name_who_still_reads_parallel_state(source: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source, encoding="latin-1")
    (tmp_path / "data.ipynb").write_text("{}", encoding="utf-8")
    status, out = migrate(tmp_path)
    assert (status, shown in out, "1 notebook: not read\n" in out) == ("cannot be read" in out, True, True)
    assert ("No use" in out) == (source == OTHERS) or status


def test_an_import_that_another_file_takes_stays(tmp_path: Path) -> None:
    utils, train = tmp_path / "utils.py", tmp_path / "train.py"
    utils.write_text(f"{USE}rank = mpu.get_data_parallel_rank()\n", encoding="utf-8")
    train.write_text("from utils import mpu\nmpu.get_data_parallel_rank()\n", encoding="utf-8")
    assert migrate("--write", "--force", tmp_path)[0] == 0
    assert utils.read_text(encoding="utf-8") == f"{USE}import namedmesh\n\nrank = {NEW}\n"
    assert train.read_text(encoding="utf-8") == "from utils import mpu\nmpu.get_data_parallel_rank()\n"


def test_git_is_the_backup(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)  # noqa: S607

    path, text = tmp_path / "a.py", f"{USE}mpu.get_data_parallel_rank()\n"
    path.write_text(text, encoding="utf-8")
    status, out = migrate("--write", path)
    assert (status, "git says of" in out) == (2, True)
    git("init", "-q")
    status, out = migrate("--write", tmp_path)
    assert (status, "uncommitted changes" in out, path.read_text(encoding="utf-8")) == (2, True, text)
    git("add", ".")
    git("commit", "-qm", "a")
    status, out = migrate("--diff", path)
    assert f"-mpu.get_data_parallel_rank()\n+import namedmesh\n+\n+{NEW}\n" in out
    assert (status, path.read_text(encoding="utf-8")) == (0, text)
    status, out = migrate("--write", path)
    assert (status, out.splitlines()[0]) == (0, f"{path}: rewritten")
    assert path.read_text(encoding="utf-8") == f"import namedmesh\n\n{NEW}\n"
