"""Finding the legacy calls of a code base, the report about them, and the command line."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import pytest
from installing import interpreter

from namedmesh.__main__ import COMMANDS, main
from namedmesh.compat.migration import Finding, scan
from namedmesh.migrate.report import merge_setup
from namedmesh.migrate.rewrite import is_certain
from namedmesh.migrate.rules import _UNCHECKED
from namedmesh.migrate.uses import _BY_NAME

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
        (28, "get_data_paralel_rank", ""),
    ]
    assert all(one.certain for one in found)
    assert [one.line for one in found if not one.known] == [26, 28]
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


def test_modules_that_import_everything_of_each_other_end(tmp_path: Path) -> None:
    modules = [f"m{number}" for number in range(12)]
    for module in modules:
        stars = [f"from {other} import *\n" for other in modules if other != module]
        _write(tmp_path, **{f"{module}_py": "".join(stars) + "get_data_parallel_rank()\n"})
    assert scan([tmp_path]).findings == ()
    _write(tmp_path, m3_py="from m4 import *\nfrom megatron.core.parallel_state import *\nmpu = None\n")
    assert [(one.line, one.certain) for one in scan([tmp_path]).findings] == [(12, True)] * 11


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


USE = "from megatron.core import mpu\nmpu.get_data_parallel_rank()\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"\x0c\nx = 1\n\x0c\n{USE}", 5),
        ("from megatron.core import mpu\ndef f():\n\x0c    return mpu.get_data_parallel_rank()\n", 3),
        (f"x = 'a\u2028b'  # \u2028\n{USE}", 3),
        (f"x = 'a\x85b'  # \x85\n{USE}", 3),
        (f"x = 'a\x1cb'  # \x1c\n{USE}", 3),
        ("from megatron.core import mpu\n\x0c\nx = '\x1c'\nf'{mpu.get_data_parallel_rank()}'\n", 4),
        (f"\ufeff{USE}", 2),
        (f"# coding: latin-1\nx = '\xe9'\n{USE}".encode("latin-1"), 4),
        (USE.replace("\n", "\r\n"), 2),
        (f"{USE.rstrip()}", 2),
        (f"x = {'[' * 90}1{']' * 90}\n{USE}", 3),
    ],
)
def test_lines_are_those_of_python(tmp_path: Path, content: str | bytes, line: int) -> None:
    (tmp_path / "a.py").write_bytes(content.encode() if isinstance(content, str) else content)
    result = scan([tmp_path])
    assert [(one.line, one.replacement.replace("'", '"')) for one in result.findings] == [
        (line, 'mesh.rank("dp")')
    ]
    assert (result.problems, [one.certain for one in result.findings]) == ((), [True])


def test_files_that_cannot_be_read_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    broken = {
        "a.py": b"def (",
        "b.py": b"# \xff\xfe\n",
        "c.py": b"x = 1\x00",
        "d.py": b"print 'Python 2'",
        "e.py": b"# coding: nothing",
        "f.py": b"x = " + b"+".join([b"1"] * 9000),
        "g.py": b"# coding: rot13",
        "h.py": USE.replace("()", f"({'-' * 900}x)").encode(),
        "i.py": USE.replace("mpu\n", "mpu as m0\n").encode()
        + b"".join(b"m%d = m%d\n" % (n + 1, n) for n in range(3000)),
    }
    for name, code in broken.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" * (name == "a.py") + code + b"\nmpu\n")
        if b"mpu" not in code:
            (tmp_path / f"other_{name}").write_bytes(code)  # names nothing legacy, and is not parsed
    _write(tmp_path, z_py=USE, empty_py="", book_nb="[" * 100_000)
    (tmp_path / "y.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    (tmp_path / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    result = scan([tmp_path])
    assert len(result.findings) == 1
    other = ["book.ipynb", "loop.py", "pipe.py", "y.py"]
    assert [Path(one.path).name for one in result.problems] == sorted([*broken, *other])
    messages = {Path(one.path).name: one.message for one in result.problems}
    assert [messages[name].partition(":")[0] for name in list(broken)[:5]] == [
        "is not Python",
        "cannot be decoded",
        "is not Python",
        "is not Python",
        "cannot be decoded",
    ]
    assert {messages["h.py"], messages["i.py"]} == {"is nested too deeply"}
    assert messages["y.py"] == "cannot be read: No such file or directory"
    assert messages["pipe.py"] == "is not a file"
    assert result.files == 9 + 7 + 6


# What makes a use uncertain.


@pytest.mark.parametrize(
    "change",
    [
        "mpu.set_tensor_model_parallel_rank(5)",
        "mpu.set_tensor_model_parallel_world_size(world_size=n)",
        "mpu._TENSOR_MODEL_PARALLEL_GROUP = group",
        "mpu._MPU_TENSOR_MODEL_PARALLEL_RANK = 0",
        "del mpu._TENSOR_MODEL_PARALLEL_GROUP",
        "mpu.get_tensor_model_parallel_rank = lambda: 3",
        "mpu.get_tensor_model_parallel_src_rank, x = f, 1",
        'setattr(mpu, "_TENSOR_MODEL_PARALLEL_GROUP", group)',
        "setattr(mpu, name, group)",
        'mock.patch("megatron.core.parallel_state.get_tensor_model_parallel_rank")',
        'mock.patch.object(mpu, "get_tensor_model_parallel_rank")',
        'monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", f)',
        "mc.parallel_state = Fake()",
        "def f(mpu):\n    mpu.set_tensor_model_parallel_rank(1)",
    ],
)
def test_what_changes_an_answer_makes_it_uncertain(change: str, tmp_path: Path) -> None:
    calls = "mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()"
    _write(
        tmp_path,
        job_py=f"from megatron.core import mpu\n{calls}\n",
        test_py=f"import megatron.core as mc\nfrom megatron.core import mpu\n{change}\n",
    )
    tensor, pipeline = [one for one in scan([tmp_path]).findings if one.path.endswith("job.py")]
    assert not tensor.certain
    assert f"{tmp_path / 'test.py'}:" in tensor.notes[-1]
    everything = "name" in change or "mc." in change
    assert pipeline.certain is not everything
    _write(tmp_path, test_py="from megatron.core import mpu\nmpu.set_tensor_model_parallel_rank(None)\n")
    assert all(one.certain for one in scan([tmp_path]).findings)


@pytest.mark.parametrize(
    ("binding", "certain"),
    [
        ("from megatron.core import mpu", True),
        ("try:\n    from megatron.core import mpu\nexcept ImportError:\n    mpu = None", True),
        ("try:\n    from megatron.core import mpu\nexcept ImportError:\n    mpu = Fake()", False),
        ("from megatron.core import mpu as m\nmpu = m if fast else None", True),
        ("from megatron.core import mpu as m\nmpu = m if fast else Fake()", False),
        ("from megatron.core import mpu as m\nmpu = m or fake", False),
        ("from megatron.core import mpu\nfrom other import mpu", False),
        ("from megatron.core import mpu\nfor mpu in several: pass", False),
        ("from megatron.core import mpu\ndef f():\n    global mpu\n    mpu = 1", False),
        ("from megatron.core import mpu\nmpu += 1", False),
        ("import megatron.core\nmpu = state = megatron.core.parallel_state", True),
        ("from megatron.core import mpu, parallel_state\nmpu: object = parallel_state", True),
        ("(mpu := __import__('megatron'))", False),
        ("from megatron.core import mpu\n[(mpu := x) for x in several]", False),
        ("from megatron.core import mpu\n[mpu for mpu in several]", True),
        ("from megatron.core import mpu\ndef f(mpu): mpu = 1", True),
        (
            "from megatron.core import mpu\ndef f():\n    mpu = 1\n    def g():\n        nonlocal mpu\n        mpu = 2",
            True,
        ),
        ("def f():\n    global mpu\n    from megatron.core import mpu", True),
        (
            "if x:\n    from megatron.core import mpu\nelse:\n    from megatron.core import parallel_state as mpu",
            True,
        ),
    ],
)
def test_every_binding_of_a_name_counts(binding: str, certain: bool, tmp_path: Path) -> None:
    _write(tmp_path, a_py=f"{binding}\nmpu.get_data_parallel_rank()\n")
    (found,) = scan([tmp_path]).findings
    assert (found.replacement, found.certain) == ('mesh.rank("dp")', certain)
    assert bool(found.notes) is not certain


def test_a_name_that_several_files_claim_is_uncertain(tmp_path: Path) -> None:
    _write(
        tmp_path,
        a__train_py="from megatron.core import mpu as state\nfrom train import other\n",
        b__train_py="from megatron.core import mpu as state\nfrom train import other\n",
        job_py="from train import state\nfrom a.train import state as mine\nstate.get_data_parallel_rank()\n"
        "mine.get_data_parallel_rank()\n",
    )
    assert [(one.line, one.certain) for one in scan([tmp_path]).findings] == [(3, False), (4, True)]


def test_names_that_the_code_base_gives_itself_are_found(tmp_path: Path) -> None:
    _write(
        tmp_path, pkg__state_py="from megatron.core.parallel_state import get_data_parallel_rank as rank\n"
    )
    _write(tmp_path, pkg__broken_py="(mpu", job_py="from pkg.state import rank\nrank(  f'{rank()}')\n")
    _write(tmp_path, other_py="import megatron.training\n")
    result = scan([tmp_path])
    assert [(one.line, one.column) for one in result.findings] == [(2, 1), (2, 11)]
    assert (len(result.problems), len(result.missing), result.files) == (1, 1, 4)


STAGE = "from megatron.core import mpu\nmpu.is_pipeline_first_stage()\n"
DEFINITION = "def is_pipeline_first_stage(ignore_virtual={}, vp_stage=None): ...\n"


@pytest.mark.parametrize(
    ("definitions", "release", "certain", "replaced"),
    [
        ([], None, False, False),
        ([], "0.12.3", False, False),
        ([], "0.13", True, True),
        ([True], None, True, True),
        ([False], "0.13", True, False),
        ([True, True], None, False, False),
    ],
)
def test_the_default_of_ignore_virtual_is_read(
    definitions: list[bool], release: str | None, certain: bool, replaced: bool, tmp_path: Path
) -> None:
    _write(tmp_path, a_py=STAGE, b_py=STAGE.replace("()", "(ignore_virtual=True)"))
    for number, default in enumerate(definitions):
        _write(tmp_path, **{f"copy{number}__megatron__core__parallel_state_py": DEFINITION.format(default)})
    found, explicit = scan([tmp_path], megatron=release).findings
    assert (found.certain, is_certain(found)) == (certain, replaced)
    assert is_certain(explicit)
    assert found.replacement == (
        'mesh.is_first("pp") and vp_stage == 0' if definitions == [False] else 'mesh.is_first("pp")'
    )


# Whose name it is.

NEOX = "def get_pipe_parallel_group(): ...\ndef get_model_parallel_group(): ...\n"


@pytest.mark.parametrize(
    ("files", "replacement", "certain"),
    [
        ({"a_py": "from fairscale.nn.model_parallel import initialize as mpu"}, 'mesh.group("tp")', True),
        ({"a_py": "import fairscale.nn.model_parallel as mpu"}, 'mesh.group("tp")', True),
        ({"a_py": "from megatron.core import mpu"}, 'mesh.group("pp", "tp")', True),
        ({"a_py": "from megatron import mpu"}, 'mesh.group("tp")', False),
        (
            {"a_py": "from megatron import mpu", "megatron__mpu__initialize_py": NEOX},
            'mesh.group("tp")',
            True,
        ),
        (
            {
                "a_py": "from megatron import mpu",
                "megatron__mpu__initialize_py": NEOX.replace("_pipe_", "_pipeline_model_"),
            },
            'mesh.group("pp", "tp")',
            True,
        ),
        ({"a_py": "from vllm.distributed import parallel_state as mpu"}, None, False),
    ],
)
def test_the_import_says_whose_name_it_is(
    files: dict[str, str], replacement: str | None, certain: bool, tmp_path: Path
) -> None:
    files = {**files, "a_py": f"{files['a_py']}\nmpu.get_model_parallel_group()\n"}
    _write(tmp_path, **files)
    found = [(one.replacement, one.certain) for one in scan([tmp_path]).findings]
    assert found == ([(replacement, certain)] if replacement else [])


def test_a_name_without_an_import_is_shown_for_each_api(tmp_path: Path) -> None:
    _write(
        tmp_path, a_py="def f(mpu):\n    mpu.get_model_parallel_group()\n    mpu.get_io_parallel_group()\n"
    )
    found, only = scan([tmp_path]).findings
    assert (found.replacement, found.certain) == ('mesh.group("pp", "tp")', False)
    assert 'in megatron.mpu it is mesh.group("tp")' in found.notes
    assert only.origin == "megatron.mpu"


@pytest.mark.oracle("megatron.core")
def test_megatron_itself_is_scanned() -> None:
    (core,) = import_module("megatron").__path__
    parts = ("tensor_parallel", "distributed/finalize_model_grads.py")
    result = scan([Path(core, "core", part) for part in parts])
    assert result.problems == ()
    assert sum(bool(one.replacement) for one in result.findings) >= 15
    assert all(one.known for one in result.findings)
    assert all(one.certain or one.name.startswith("is_pipeline") for one in result.findings)


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
train.py:2: initialize_model_parallel(2, 4, expert_model_parallel_size=2) -> namedmesh.init_mesh(pp=4, dp=-1, cp=1, tp=2)
train.py:3: get_data_parallel_group(with_context_parallel=True) (not certain) -> mesh.group("dp", "cp") [1]
train.py:4: get_expert_model_parallel_group() -> mesh.group("ep")
train.py:5: set_data_parallel_rank(0) -> stays in namedmesh.compat.megatron.parallel_state [2]

utils.py:2: get_context_parallel_group(check_initialized=False) (not certain) -> mesh.group("cp") [3] [4]

Once, on every rank, after init_mesh:
    mesh.add_view("expert", pp=4, edp=-1, ep=2, etp=2)
    mesh.flatten("dp", "cp")

[1] set_data_parallel_rank(0) in train.py:5 can change the answer
[2] it overrides an answer and makes no group: make a second mesh of the sizes wanted (over part of the world with \
part=True) and select it with 'with mesh:'
[3] {_UNCHECKED}
[4] {_BY_NAME}

5 uses of 5 names in 2 files (of 2): 4 with a replacement, 1 without one.
2 not certain: their remarks say why; check them.
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
    (code / "broken.py").write_text("(mpu", encoding="utf-8")
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
        "not_certain": 2,
        "unreadable": 1,
    }


def test_broken_files_are_at_the_top_of_the_text(code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code / "broken.py").write_text("(mpu", encoding="utf-8")
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
        done = interpreter(*command, "migrate", "train.py", "utils.py", cwd=code)
        assert (done.returncode, done.stdout, done.stderr) == (0, REPORT, "")
