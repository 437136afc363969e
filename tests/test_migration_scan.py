"""Finding the legacy calls of a code base, the report about them, and the command line."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path

import pytest
from installing import interpreter
from migrate_cases import cases, reported, write_files

from namedmesh.__main__ import main
from namedmesh.compat.migration import scan
from namedmesh.migrate.rewrite import is_certain


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py").replace("_nb", ".ipynb")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def test_modules_that_import_everything_of_each_other_end(tmp_path: Path) -> None:
    modules = [f"m{number}" for number in range(12)]
    for module in modules:
        stars = [f"from {other} import *\n" for other in modules if other != module]
        _write(tmp_path, **{f"{module}_py": "".join(stars) + "get_data_parallel_rank()\n"})
    assert scan([tmp_path]).findings == ()
    _write(tmp_path, m3_py="from m4 import *\nfrom megatron.core.parallel_state import *\nmpu = None\n")
    assert [(one.line, one.certain) for one in scan([tmp_path]).findings] == [(12, True)] * 11


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

CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_a_code_base_has_the_report_that_is_known(name: str) -> None:
    """``python tests/migrate_cases.py`` writes the reports anew, to be read before they are kept."""
    assert reported(CASES[name]) == CASES[name]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(CASES["the report in full"], tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_the_command_runs_as_a_module_without_torch_or_megatron(code: Path) -> None:
    report = CASES["the report in full"].partition("train.py utils.py\n")[2].removesuffix("\n")
    program = (
        "import sys; from namedmesh.__main__ import main; status = main(sys.argv[1:]); "
        "sys.exit(status or 3 * any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    for command in (["-m", "namedmesh"], ["-c", program]):
        done = interpreter(*command, "migrate", "train.py", "utils.py", cwd=code)
        assert (done.returncode, done.stdout, done.stderr) == (0, report, "")
