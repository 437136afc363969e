"""What the README shows runs as it stands there."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import train
from ranks import run_ranks

import namedmesh

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def _run_code(sources: list[str]) -> list[str]:
    names: dict[str, Any] = {}
    told = []
    for source in sources:
        exec(compile(source, "README.md", "exec"), names)  # noqa: S102  the README is ours
        names["mesh"].close()
        if source is sources[0]:
            weight = names["model"][0].weight
            told = [repr(tuple(weight.to_local().shape)), repr(weight.grad is not None)]
    return told


def test_python_blocks_run_on_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block saves a checkpoint
    sources = blocks("python")
    assert len(sources) == 3
    told = run_ranks(8, _run_code, sources)
    # 256 rows over tp=2, then over dp=4.
    assert {tuple(lines) for lines in told} == {("(32, 64)", "True")}


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
    assert len(test.examples) > 4
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


def _train(directory: str) -> str:
    out = io.StringIO()
    options = f"--pp 2 --tp 2 --steps 1 --batch 4 --seq 16 --dim 32 --device cpu --data {ROOT / 'examples'} --checkpoint {directory}"
    with contextlib.redirect_stdout(out):
        assert train.main(options.split()) == 0
    return out.getvalue()


def test_the_shown_training_is_the_real_one(tmp_path: Path) -> None:
    told = run_ranks(8, _train, str(tmp_path), init=False)
    layout, first, last = blocks("text")[0].split("...\n")
    assert layout in told[0]
    assert told[1:] == [""] * 7
    pattern = r"^step 1/\d+  loss (\d\.\d+) nats a byte$"
    (real,) = re.findall(pattern, told[0], flags=re.MULTILINE)
    (shown,) = re.findall(pattern, first, flags=re.MULTILINE)
    assert float(real) == pytest.approx(float(shown), abs=0.2)  # of another text
    going_on = last[last.index("to go on") :]
    assert going_on.replace("checkpoints", str(tmp_path)) in told[0]


def test_it_is_short_and_so_is_its_example() -> None:
    assert len(TEXT.splitlines()) <= 165
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 10


def test_there_are_two_commands() -> None:
    commands = re.findall(r"^<!-- command: (\w+) -->\n```bash\n([^\n]+)\n```$", TEXT, flags=re.MULTILINE)
    assert [name for name, _ in commands] == ["train", "test"]
    assert len(blocks("bash")) == 2
