"""Rewriting the calls whose replacement is certain, and running scripts with the dialects in place."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import fake_world, run_ranks

from namedmesh.__main__ import main
from namedmesh.compat.cli import DIALECTS
from namedmesh.compat.megatron.original import ORIGINAL
from namedmesh.compat.migration import scan
from namedmesh.migrate.apis import PROVIDED
from namedmesh.migrate.rewrite import RewriteError, rewrite, write

SOURCE = str(Path(__file__).parents[1] / "src")
SCRIPT = """\
#!/usr/bin/env python
\"\"\"A script with an \u00e9.\"\"\"
from __future__ import annotations
from namedmesh.compat.megatron import parallel_state as mpu
from namedmesh.compat.megatron.parallel_state import get_pipeline_model_parallel_rank as stage

mpu.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
print("\u00e9", mpu.get_tensor_model_parallel_rank(), f"{mpu.get_data_parallel_rank()} of {mpu.get_data_parallel_world_size()!r:>4}", mpu.get_tensor_model_parallel_world_size() * 2)
print(f'{stage()} {mpu.get_context_parallel_world_size()}' f"\u00e9{mpu.get_pipeline_model_parallel_world_size()}")
print(f\"\"\"
{mpu.get_pipeline_model_parallel_next_rank()} {mpu.get_tensor_model_parallel_src_rank(
)}\"\"\")
print(not mpu.is_pipeline_first_stage(), -mpu.get_pipeline_model_parallel_last_rank())
print(mpu.get_data_parallel_world_size(with_context_parallel=True), f"{'a' + str(mpu.get_data_parallel_rank())}")
print(f"{mpu.get_data_parallel_rank()=}")
print(f"{f'{mpu.get_data_parallel_rank()}'}", f'{stage()} "x"', f"{mpu.get_data_parallel_rank()} it's {mpu.get_data_parallel_rank()}")
mpu.destroy_model_parallel()
"""


def prints(source: str) -> str:
    out = io.StringIO()
    with fake_world(16, 5), contextlib.redirect_stdout(out):
        exec(compile(source, "script.py", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102  what is tested
    return out.getvalue()


def test_a_rewritten_script_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    for encoding, ending in (("utf-8", "\n"), ("latin-1", "\r\n")):
        text = SCRIPT.replace("#!/usr/bin/env python", f"# -*- coding: {encoding} -*-").replace("\n", ending)
        path.write_bytes(text.encode(encoding))
        assert main(["migrate", "--write", str(path)]) == 0
        after = path.read_bytes().decode(encoding)
        assert prints(after) == prints(text) != ""
        # Inside two f-strings, where both quotation marks are used, and where the f-string shows the expression.
        assert after.count("mpu.get_") == 4
        assert after.splitlines()[3] == "import namedmesh"
        assert after.count(ending) == text.count(ending)  # a call of two lines is one, and there is an import
    assert 'f\'{namedmesh.current_mesh().rank("pp")} "x"\'' in after
    assert after.count("{namedmesh.current_mesh().rank('dp')}") == 3
    report = capsys.readouterr().out
    assert f"{path}: rewritten; it was {path}.orig\n" in report
    assert f"{path}: rewritten; it was {path}.orig.1\n" in report
    assert (tmp_path / "script.py.orig").read_text(encoding="utf-8").startswith("# -*- coding: utf-8")
    assert "in this f-string it stays" in report
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_bytes().decode("latin-1") == after


def test_a_diff_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    text = "from megatron.core import mpu\nx = mpu.get_data_parallel_rank()\ny = mpu.get_data_parallel_group(flag)"
    path.write_text(text, encoding="utf-8")
    assert main(["migrate", "--diff", str(path)]) == 0
    out = capsys.readouterr().out
    assert path.read_text(encoding="utf-8") == text
    assert out.startswith(
        f"--- a/{path}\n+++ b/{path}\n@@ -1,3 +1,4 @@\n+import namedmesh\n from megatron.core"
    )
    assert '-x = mpu.get_data_parallel_rank()\n+x = namedmesh.current_mesh().rank("dp")\n' in out
    assert f"{path}:3: get_data_parallel_group(flag) -> " in out
    assert f"{path}:2:" not in out
    path.chmod(0o400)
    (tmp_path / "a.py.orig").mkdir()
    assert main(["migrate", "--diff", "--format", "json", str(path)]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "use(mpu.get_data_parallel_rank)",
        "mpu.get_data_parallel_group(mesh.flag)",
        "mpu.get_expert_model_parallel_rank()",
        "self.mpu.get_data_parallel_rank()",
        "mpu.get_data_parallel_rank(  # why\n)",
        "use(mpu.initialize_model_parallel)\nmpu.get_data_parallel_rank()",
        "def make(mpu):\n    mpu.initialize_model_parallel(2)\nmpu.get_data_parallel_rank()",
        "mpu.get_data_parallel_rank()\ndef f(namedmesh): ...",
        "mpu.is_rank_in_embedding_group(ignore_virtual=True)",
    ],
)
def test_what_is_not_certain_stays(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.py"
    text = f"from megatron.core import mpu\n{line}\n"
    path.write_text(text, encoding="utf-8")
    assert main(["migrate", "--write", str(path)]) == ("namedmesh" in line)
    assert path.read_text(encoding="utf-8") == text
    assert f"{path}:" in capsys.readouterr().out


IMPORT = "import namedmesh\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", IMPORT),
        ('"""Doc."""\n', f'"""Doc."""\n{IMPORT}'),
        ('"""Doc."""; x = 1\n', '"""Doc."""; import namedmesh; x = 1\n'),
        (
            '"""Doc."""; from __future__ import annotations; x = 1\n',
            '"""Doc."""; from __future__ import annotations; import namedmesh; x = 1\n',
        ),
        ("#!/bin/python\n# Note.\n", f"#!/bin/python\n# Note.\n{IMPORT}"),
        (
            "'a' 'b'\nfrom __future__ import annotations\n\n",
            f"'a' 'b'\nfrom __future__ import annotations\n{IMPORT}\n",
        ),
        ("import sys, namedmesh\n", "import sys, namedmesh\n"),
        ("import sys\nsys.exit\nimport namedmesh\n", f"{IMPORT}import sys\nsys.exit\nimport namedmesh\n"),
        ("import namedmesh as nm\n", f"{IMPORT}import namedmesh as nm\n"),
        ("\ufeffx = 1\n", f"\ufeff{IMPORT}x = 1\n"),
    ],
)
def test_the_import_comes_before_its_first_use(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    use = "from megatron.core import mpu\nmpu.get_data_parallel_rank()\n"
    path.write_bytes((before + use).encode())
    assert main(["migrate", "--write", str(path)]) == 0
    replaced = use.replace("mpu.get_data_parallel_rank()", 'namedmesh.current_mesh().rank("dp")')
    assert path.read_bytes().decode() == after + replaced


PROGRAM = """\
from megatron.core import mpu, parallel_state as ps
import torch.distributed as dist
def answers():
    ps.initialize_model_parallel(2, context_parallel_size=2, create_gloo_process_groups=False)
    groups = [mpu.get_tensor_model_parallel_group(), ps.get_context_parallel_group(), mpu.get_model_parallel_group()]
    numbers = [mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_world_size(with_context_parallel=True)]
    found = numbers + [dist.get_process_group_ranks(group) for group in groups]
    mpu.destroy_model_parallel()
    return found
"""


def _answers(program: str) -> list[object]:
    names: dict[str, Any] = {}
    exec(compile(program, "program.py", "exec", dont_inherit=True), names)  # noqa: S102  what is tested
    return list(names["answers"]())


@pytest.mark.oracle("megatron.core")
def test_a_rewritten_program_runs_alone(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    assert main(["migrate", "--write", str(path)]) == 0
    after = path.read_text(encoding="utf-8")
    assert after.startswith("import namedmesh.compat.megatron\nnamedmesh.compat.megatron.install()\n")
    assert after.count("namedmesh.current_mesh()") == 4
    assert "mpu.get_model_parallel_group()" in after  # needs a statement of its own, and answers all the same
    assert run_ranks(4, _answers, after) == run_ranks(4, _answers, PROGRAM)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == after


def test_a_write_that_fails_says_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use = "from megatron.core import mpu\nmpu.get_data_parallel_rank()\n"
    paths = [tmp_path / name for name in ("a.py", "b.py", "c.py")]
    for path in paths:
        path.write_text(use, encoding="utf-8")
    paths[0].chmod(0o750)
    link = tmp_path / "a_link.py"
    link.symlink_to(paths[0])
    replace = Path.replace

    def fails_on_b(self: Path, target: Path) -> Path:
        if target.name == "b.py":
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails_on_b)
    assert main(["migrate", "--write", str(link), *map(str, paths[1:])]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        f"namedmesh migrate: {str(paths[1])!r} cannot be rewritten: No space left on device; rewritten before it: {link}\n"
    )
    assert f"{link}: rewritten; it was {link}.orig\n" in captured.out
    assert link.is_symlink()
    assert paths[0].stat().st_mode & 0o777 == 0o750
    assert "namedmesh" in paths[0].read_text(encoding="utf-8")
    assert [path.read_text(encoding="utf-8") for path in paths[1:]] == [use, use]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.py",
        "a_link.py",
        "a_link.py.orig",
        "b.py",
        "c.py",
    ]


def test_a_file_that_changes_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    use = "from megatron.core import mpu\nx = mpu.get_data_parallel_rank()\n"
    path.write_text(use, encoding="utf-8")
    result = scan([path])
    changed = use.replace("_data_", "_pipe_")
    path.write_text(changed, encoding="utf-8")
    ((file,), _) = rewrite(result)
    assert file.before.code == use.encode()
    with pytest.raises(RewriteError, match=r"a\.py"):
        write(file)
    assert [path.read_text(encoding="utf-8") for path in tmp_path.iterdir()] == [changed]


def test_form_feeds_and_line_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    use = "from megatron.core import mpu\r\nif x:\r    y = '\x1c'\n\x0c    mpu.get_data_parallel_rank()"
    path.write_bytes(use.encode())
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    replaced = use.replace("mpu.get_data_parallel_rank()", 'namedmesh.current_mesh().rank("dp")')
    assert path.read_bytes().decode() == f"import namedmesh\r\n{replaced}"


def test_what_install_provides_is_not_missing() -> None:
    assert {"megatron", "megatron.core", *ORIGINAL.stand_ins} == PROVIDED


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text("word = 'beside'\n", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, near\nfrom ezpz import tp\nprint(tp.__name__, __name__, near.word, sys.argv[1:])\n"
        "raise OSError('its own')\n",
        encoding="utf-8",
    )

    def run() -> tuple[str, str]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(OSError, match="its own") as caught:
            main(["run", "--dialect", "ezpz", str(script), "--lr", "3"])
        return out.getvalue(), str(caught.value)

    out = "namedmesh.compat.ezpz.tp __main__ beside ['--lr', '3']\n"
    assert run_ranks(1, run, init=False) == [(out, "its own")]
    assert set(DIALECTS) <= {path.stem for path in (Path(SOURCE) / "namedmesh" / "compat").iterdir()}
    with pytest.raises(SystemExit) as caught:
        main(["run", "nowhere.py"])
    assert caught.value.code == 2


def test_a_module_runs_unchanged(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("from ezpz import tp\n", encoding="utf-8")
    (package / "near.py").write_text("word = 'beside'\n", encoding="utf-8")
    (package / "job.py").write_text(
        "import sys\nfrom . import near, tp\n"
        "print(tp.__name__, __name__, near.word, sys.argv[1:], sys.modules['__main__'].near is near)\n",
        encoding="utf-8",
    )

    def run() -> tuple[str, str]:
        os.chdir(tmp_path)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(["run", "--dialect", "ezpz", "-m", "package.job", "-m", "--lr"]) == 0
            for missing in ("package.jobs", "packages.job"):
                with pytest.raises(SystemExit):
                    main(["run", "--dialect", "ezpz", "-m", missing])
        errors = [line for line in err.getvalue().splitlines(keepends=True) if ": error: " in line]
        return out.getvalue(), "".join(errors)

    out = "namedmesh.compat.ezpz.tp __main__ beside ['-m', '--lr'] True\n"
    err = "namedmesh run: error: there is no module 'package.jobs'\nnamedmesh run: error: there is no module 'packages.job'\n"
    assert run_ranks(1, run, init=False) == [(out, err)]
