"""What the README shows runs as it stands there."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

import namedmesh
from namedmesh.__main__ import main
from namedmesh._torch import TORCH

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def _run_code(sources: list[str]) -> list[str]:
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, "README.md", "exec"), names)  # noqa: S102  the README is ours
        names["mesh"].close()
    weight = names["model"][0].weight
    return [repr(weight.placements), repr(tuple(weight.to_local().shape)), repr(weight.grad is not None)]


@pytest.mark.skipif(TORCH.release[:2] == (2, 9), reason="torch 2.9's pipelines end the process on gloo")
def test_python_blocks_run_on_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block saves a checkpoint
    sources = blocks("python")
    assert len(sources) == 5
    told = run_ranks(8, _run_code, sources)
    # 256 rows over tp=2, then over dp=4; torch has several spellings of the two cuts on one dim.
    assert {tuple(lines[1:]) for lines in told} == {("(32, 64)", "True")}


def _quickstart() -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    return shown.getvalue()


def test_the_quickstart_prints_what_is_shown() -> None:
    assert run_ranks(8, _quickstart, init=False) == [blocks("text")[0], *[""] * 7]
    assert len((ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8").splitlines()) <= 30


def test_without_a_launcher_an_error_names_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(namedmesh.LayoutError) as caught:
        namedmesh.init_mesh(dp=-1, tp=2, device="cpu")
    assert str(caught.value).endswith(
        "No launcher has started this process, so it is a world of its own; start 8 of them with: torchrun "
        "--nproc-per-node 8 SCRIPT"
    )


def test_sessions_show_what_python_answers() -> None:
    sessions = "\n".join(blocks("pycon"))
    test = doctest.DocTestParser().get_doctest(sessions, {}, "README.md", "README.md", 0)
    assert len(test.examples) > 8
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


def test_the_shown_disagreement_is_the_real_one() -> None:
    def call() -> str:
        try:
            namedmesh.init_mesh(dp=4 if dist.get_rank() == 2 else 2, tp=-1)
        except namedmesh.AgreementError as error:
            return f"namedmesh.errors.{type(error).__name__}: {error}\n"
        return ""

    assert run_ranks(4, call) == [blocks("text")[1]] * 4


def test_the_example_is_at_most_ten_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 10


def test_there_are_two_commands() -> None:
    commands = re.findall(r"^<!-- command: (\w+) -->\n```bash\n([^\n]+)\n```$", TEXT, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "test"]
    assert len(blocks("bash")) == 2


LEGACY = """
mpu.initialize_model_parallel(2, 4, context_parallel_size=2)
group = mpu.get_data_parallel_group(with_context_parallel=True)
if mpu.is_pipeline_last_stage(ignore_virtual=True):
    send_to = mpu.get_pipeline_model_parallel_next_rank()
"""


def test_the_shown_migration_is_the_real_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"from megatron.core import mpu{LEGACY}", encoding="utf-8")
    assert main(["migrate", "train.py"]) == 0
    command, _, shown = blocks("text")[2].partition("\n")
    assert command == "$ python -m namedmesh migrate train.py"
    assert capsys.readouterr().out.startswith(shown)


def test_the_shown_planning_is_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    (session,) = blocks("console")
    for step in session.removeprefix("$ ").split("\n$ "):
        command, _, shown = step.partition("\n")
        main(shlex.split(command)[1:])
        told = capsys.readouterr()
        assert (told.out + told.err).strip() == shown.strip()
