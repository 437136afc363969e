"""Finding the legacy calls of a code base, the report about them, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from namedmesh.__main__ import COMMANDS, main
from namedmesh.compat.migration import Finding, scan
from namedmesh.migrate.report import merge_setup
from namedmesh.migrate.rules import _UNCHECKED

FORMS = """
import megatron.core
import megatron.core as mc
import megatron.core.parallel_state as ps
from megatron import core
from megatron.core import mpu
from megatron.core import parallel_state
from megatron.core import parallel_state as state
from megatron.core.parallel_state import get_data_parallel_group as dp_group, _PIPELINE_GLOBAL_RANKS
from namedmesh.compat.megatron import parallel_state as ours

megatron.core.parallel_state.get_data_parallel_rank()
mc.parallel_state.get_data_parallel_rank()
ps.get_data_parallel_rank()
core.mpu.get_data_parallel_rank()
mpu.get_data_parallel_rank()
parallel_state.get_data_parallel_rank()
state.get_data_parallel_rank(with_context_parallel=True).bit_length()
dp_group(with_context_parallel=flag)
_PIPELINE_GLOBAL_RANKS[0]
ours.get_data_parallel_rank()
alias = ps
alias.get_data_parallel_rank()
run(callback=mpu.get_data_parallel_world_size)
getattr(mpu, "get_data_parallel_rank")()
getattr(mpu, "get_data_parallel_rank")
getattr(mpu, name)
hasattr(mpu, "get_data_parallel_rank")
mpu._TENSOR_MODEL_PARALLEL_GROUP = group
del mpu._TENSOR_MODEL_PARALLEL_GROUP
setattr(mpu, "_DATA_PARALLEL_GROUP", group)
mock.patch("megatron.core.parallel_state.get_data_parallel_rank")
mock.patch.object(ps, "get_data_parallel_rank")
mpu.set_data_parallel_rank(0)
mpu.get_data_paralel_rank()
get_data_parallel_rank()
""".lstrip()


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py").replace("_nb", ".ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _brief(findings: tuple[Finding, ...]) -> list[tuple[int, str, str]]:
    return [(one.line, one.legacy, one.replacement) for one in findings]


def test_every_form_of_import_and_use_is_found(tmp_path: Path) -> None:
    _write(tmp_path, forms_py=FORMS)
    rank = ("get_data_parallel_rank()", 'mesh.rank("dp")')
    found = scan([tmp_path]).findings
    assert _brief(found) == [
        *((line, *rank) for line in range(11, 17)),
        (17, "get_data_parallel_rank(with_context_parallel=True)", 'mesh.rank("dp", "cp")'),
        (
            18,
            "get_data_parallel_group(with_context_parallel=flag)",
            'mesh.group("dp", "cp") if flag else mesh.group("dp")',
        ),
        (19, "_PIPELINE_GLOBAL_RANKS", 'list(mesh.ranks("pp"))'),
        (20, *rank),
        (22, *rank),
        (23, "get_data_parallel_world_size", 'lambda: mesh.size("dp")'),
        (24, *rank),
        (25, "get_data_parallel_rank", 'lambda: mesh.rank("dp")'),
        (26, "getattr(mpu, name)", ""),
        (28, "_TENSOR_MODEL_PARALLEL_GROUP = ...", ""),
        (29, "del _TENSOR_MODEL_PARALLEL_GROUP", ""),
        (30, "setattr(mpu, '_DATA_PARALLEL_GROUP', group)", ""),
        (31, "'megatron.core.parallel_state.get_data_parallel_rank'", ""),
        (32, "mock.patch.object(ps, 'get_data_parallel_rank')", ""),
        (33, "set_data_parallel_rank(0)", ""),
        (34, "get_data_paralel_rank", ""),
    ]
    assert all(one.certain for one in found)
    assert [one.line for one in found if not one.known] == [26, 34]
    assert found[-1].notes == ("the table has no such name; did you mean 'get_data_parallel_rank'?",)


def test_scopes_are_distinguished(tmp_path: Path) -> None:
    _write(
        tmp_path,
        scopes_py="""
def late():
    return mpu.get_data_parallel_rank()

def shadowed(ps, grid):
    return ps.get_data_parallel_rank(), grid.get_data_parallel_rank()

def by_name(mpu):
    return mpu.get_data_parallel_rank(), mpu.barrier()

class Layer:
    from megatron.core import mpu as inside
    rank = inside.get_data_parallel_rank()
    def __init__(self, mpu=None):
        self.mpu = mpu
        self.rank = self.mpu.get_data_parallel_rank()
        inside.get_data_parallel_rank()

try:
    from megatron.core import mpu
    import megatron.core.parallel_state as ps
except ImportError:
    mpu = None
use = lambda x=ps.get_data_parallel_rank(): mpu.get_data_parallel_rank
""".lstrip(),
    )
    found = scan([tmp_path]).findings
    assert [(one.line, one.column, one.certain) for one in found] == [
        (2, 12, True),
        (8, 12, False),
        (12, 12, True),
        (15, 21, False),
        (23, 16, True),
        (23, 45, True),
    ]


def test_a_star_import_is_followed_for_public_names(tmp_path: Path) -> None:
    _write(
        tmp_path,
        star_py="from megatron.core.parallel_state import *\n"
        "f(get_data_parallel_rank, _PIPELINE_GLOBAL_RANKS)\n"
        "def is_initialized(): ...\n"
        "is_initialized(), get_context_parallel_rank()\n",
    )
    found = scan([tmp_path]).findings
    assert _brief(found) == [
        (2, "get_data_parallel_rank", 'lambda: mesh.rank("dp")'),
        (4, "get_context_parallel_rank()", 'mesh.rank("cp")'),
    ]
    assert found[0].notes[-1] == "it came with 'import *'"


def test_relative_imports_are_by_name_only(tmp_path: Path) -> None:
    _write(
        tmp_path,
        inside_py="from .parallel_state import get_data_parallel_rank\nfrom . import parallel_state\n"
        "get_data_parallel_rank()\nparallel_state.get_data_parallel_rank()\n",
    )
    assert [(one.line, one.certain) for one in scan([tmp_path]).findings] == [(3, False), (4, False)]


def test_notebooks_are_read_cell_by_cell(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["mpu.get_data_parallel_rank()"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "from megatron.core import mpu"]},
        {"cell_type": "code", "source": ["%%bash\n", "mpu ("]},
        {"cell_type": "code", "source": "if x:\n    !ls\n    mpu.get_data_parallel_rank()"},
    ]
    _write(tmp_path, book_nb=json.dumps({"cells": cells}), broken_nb="{}")
    result = scan([tmp_path])
    (found,) = result.findings
    assert (found.path, found.line, found.column) == (f"{tmp_path / 'book.ipynb'}[cell 3]", 3, 5)
    assert [(Path(one.path).name, one.message) for one in result.problems] == [
        ("broken.ipynb", "is not a notebook: 'cells'")
    ]


def test_folders_that_hold_no_own_code_are_left_out(tmp_path: Path) -> None:
    text = "from megatron.core import mpu\nmpu.get_data_parallel_rank()\n"
    _write(
        tmp_path,
        **dict.fromkeys(("a_py", "lib__b_py", ".git__c_py", "x__site-packages__d_py", "build__e_py"), text),
    )
    _write(tmp_path, venv__pyvenv="", venv__f_py=text)
    (tmp_path / "venv" / "pyvenv").rename(tmp_path / "venv" / "pyvenv.cfg")
    (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
    names = [Path(one.path).name for one in scan([tmp_path, tmp_path / "a.py"]).findings]
    assert names == ["a.py", "b.py"]
    assert len(scan([tmp_path / "build"]).findings) == 1  # it is what was asked for
    assert len(scan([tmp_path / "notes.txt"]).findings) == 1


def test_files_that_cannot_be_read_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    _write(tmp_path, a_py="def (", z_py="from megatron.core import mpu\nmpu.get_data_parallel_rank()\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\xfe\n")
    (tmp_path / "c.py").write_bytes(b"x = 1\x00")
    (tmp_path / "d.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9\\d'\n")
    (tmp_path / "e.py").symlink_to(tmp_path / "nowhere.py")
    result = scan([tmp_path])
    assert len(result.findings) == 1
    assert [Path(one.path).name for one in result.problems] == ["a.py", "b.py", "c.py", "e.py"]
    assert result.problems[1].message.startswith("cannot be decoded: ")
    assert result.problems[0].message.startswith("is not Python: line 1: ")
    assert result.problems[3].message == "cannot be read: No such file or directory"
    assert result.files == 6


@pytest.mark.oracle("megatron.core")
def test_megatron_itself_is_scanned_whole_and_quickly() -> None:
    spec = find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    start = time.perf_counter()
    result = scan(spec.submodule_search_locations)
    assert time.perf_counter() - start < 60
    assert result.problems == ()
    assert sum(bool(one.replacement) for one in result.findings) >= 200
    assert {one.name for one in result.findings if not one.known} <= {"get_data_and_context_parallel_group"}


# The report, the page and the command.

CODE = """
from megatron.core import parallel_state, mpu
parallel_state.initialize_model_parallel(2, 4, expert_model_parallel_size=2)
group = parallel_state.get_data_parallel_group(with_context_parallel=True)
experts = mpu.get_expert_model_parallel_group()
mpu.set_data_parallel_rank(0)
""".lstrip()
MORE = "def f(mpu):\n    mpu.get_context_parallel_group(check_initialized=False)\n    mpu.get_nothing()\n"
REPORT = f"""\
train.py:2: initialize_model_parallel(2, 4, expert_model_parallel_size=2) -> namedmesh.init_mesh(pp=4, dp=-1, tp=2) [1]
train.py:3: get_data_parallel_group(with_context_parallel=True) -> mesh.group("dp", "cp")
train.py:4: get_expert_model_parallel_group() -> mesh.group("ep")
train.py:5: set_data_parallel_rank(0) -> stays in namedmesh.compat.megatron.parallel_state [2]

utils.py:2: get_context_parallel_group(check_initialized=False) (by name only) -> mesh.group("cp") [3]

Once, on every rank, after init_mesh:
    mesh.add_view("expert", pp=4, edp=-1, ep=2, etp=2)
    mesh.flatten("dp", "cp")

[2] it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with \
part=True) and select it with 'with mesh:'
[3] {_UNCHECKED}

5 uses of 5 names in 2 files (of 2): 4 with a replacement, 1 to stay in namedmesh.compat.megatron.parallel_state.
1 by name only: no import says where the name comes from; check them.
Until all have moved, the code runs unchanged on a mesh with: import namedmesh.compat.megatron; \
namedmesh.compat.megatron.install()
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _write(tmp_path, train_py=CODE, utils_py=MORE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_view_that_several_calls_need_is_made_once(tmp_path: Path) -> None:
    _write(
        tmp_path,
        many_py="from megatron.core import mpu\nmpu.get_expert_data_parallel_group(partial_expert_data_parallel=True)\n"
        "mpu.get_expert_data_parallel_group_gloo(True)\nmpu.get_expert_model_parallel_group()\n"
        "mpu.initialize_model_parallel(2, expert_model_parallel_size=4, num_distributed_optimizer_instances=2)\n",
    )
    assert merge_setup(scan([tmp_path]).findings) == [
        'mesh.add_view("expert", pp=1, edp=-1, ep=4, etp=2)',
        'mesh.add_view("expert_optimizer", options={"edp_shard": namedmesh.GroupOptions(gloo_twin=True)}, '
        'pp=mesh.size("pp"), edp_replicate=num_distributed_optimizer_instances, edp_shard=-1, ep=mesh.size("ep"), '
        'etp=mesh.size("etp"))',
        'mesh.add_view("optimizer", pp=1, dp_replicate=2, dp_shard=-1, tp=2)',
    ]


@pytest.mark.usefixtures("code")
def test_the_report_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "train.py", "utils.py"]) == 0
    assert capsys.readouterr().out == REPORT


def test_the_report_as_json(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code / "broken.py").write_text("(", encoding="utf-8")
    assert main(["migrate", "--format", "json", "."]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["replacement"] for one in report["findings"]][1:3] == [
        'mesh.group("dp", "cp")',
        'mesh.group("ep")',
    ]
    assert report["findings"][4]["certain"] is False
    assert report["once"] == [
        'mesh.add_view("expert", pp=4, edp=-1, ep=2, etp=2)',
        'mesh.flatten("dp", "cp")',
    ]
    assert report["problems"][0]["path"] == "broken.py"
    assert report["summary"] == {
        "uses": 5,
        "names": 5,
        "files_with_uses": 2,
        "files": 3,
        "mesh": 4,
        "dialect": 1,
        "unknown": 0,
        "by_name_only": 1,
        "unreadable": 1,
    }


def test_broken_files_are_at_the_top_of_the_text(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code / "broken.py").write_text("(", encoding="utf-8")
    assert main(["migrate", "broken.py"]) == 1
    captured = capsys.readouterr().out
    assert captured.startswith("broken.py: is not Python: line 1: ")
    assert captured.endswith(" in 1 file.\n")


def test_nothing_found_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path, a_py="x = 1")
    assert main(["migrate", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "No use of megatron.core.parallel_state in 1 file.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["migrat"], "invalid choice: 'migrat'"),
        (["migrate"], "the following arguments are required: PATH"),
        (["migrate", "--format", "xml", "."], "invalid choice: 'xml'"),
        (["migrate", "nowhere"], "argument PATH: there is no file or folder 'nowhere'"),
    ],
)
def test_wrong_usage_exits_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    captured = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in captured] == []


def test_the_command_runs_as_a_module_without_torch_or_megatron(code: Path) -> None:
    program = (
        "import sys; from namedmesh.__main__ import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 3 * any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    for command in (["-m", "namedmesh"], ["-c", program]):
        done = subprocess.run(
            [sys.executable, *command, "migrate", "train.py", "utils.py"],
            capture_output=True,
            text=True,
            check=False,
            cwd=code,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, REPORT, "")
