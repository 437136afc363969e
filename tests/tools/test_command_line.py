"""Whatever is typed, a command answers with its output, or with a message and status 2; never with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from messages import capture_printed
from ranks import run_ranks

from namedmesh.__main__ import COMMANDS, main
from namedmesh.tools.plan.hardware import CARDS

HUGE = "1" * 5000
LONG = "x" * 5000

# Words that have made commands fail. None of them is a file, a module or a folder in the folder of the test.
WORDS = (
    *("", " ", "-", "--", "=", ",", ":", ":x", "x:", "..x", "..:x", "a.b.c", "nowhere:f", "os:nothing", "\0", "\x1b[31m", "²", "\udcff"),
    *("nan", "inf", "-inf", "1e30", "1e-30", "-1", "0", "1", "2", "3", "1.5", "10000000000", HUGE, f"-{HUGE}", "0x10", "1_0", LONG),
    *("tpu", "meta", "cpu", "cpu:-1", "tp", "zz", "tp-dp", "tp-tp", "/nonexistent/x", "/dev/full", "/dev", "x.json", "megatron"),
    *("tp=2", "dp=-1", "dp=2,tp=2", "tp=2,tp=2", "shape=1000000000", f"dp={HUGE}", f"{LONG}=2", "dp=99999999999999999999"),
    *("foo=1000003,world=64,ep=2", "megatron tp=2,pp=4", "deepspeed pp=2", ",".join(f"{letter}=2" for letter in "abcdefghijklmnopqrst")),
)  # fmt: skip

FLAGS = {
    "plan": ("--world-size", "--gpus-per-node", "--rank", "--svg", "--color-by", "--tp", "--dp", "--ep", "--order"),
    "diff": ("--a", "--b", "--world-size"),
    "partitions": (
        *("--world-size", "--config", "--hardware", "--memory", "--margin", "--best", "--explain", "--dp-replicate"),
        *("--layers", "--hidden", "--heads", "--kv-heads", "--experts", "--top-k", "--seq", "--global-batch", "--stage"),
        *("--micro-batch", "--stages-per-rank", "--tied", "--precision"),
    ),
    "doctor": ("--timeout", "--megabytes", "--device", "--tp", "--dp", "--order"),
    "verify": ("--tolerance",),
    "run": ("-m",),
    "migrate": ("--diff", "--write", "--force"),
}  # fmt: skip


@st.composite
def command_lines(draw: st.DrawFn, commands: list[str]) -> list[str]:
    """Draw a command with words and flags in any order; a number of flags have valid values."""
    command = draw(st.sampled_from(commands))
    word = st.sampled_from(WORDS)
    pair = st.tuples(st.sampled_from([*FLAGS[command], "--unknown"]), word)
    typed = draw(st.lists(st.one_of(st.tuples(word), pair), max_size=6))
    words = [part for parts in typed for part in parts]
    if command == "partitions" and draw(st.booleans()):
        words += [
            "--world-size",
            "4",
            "--layers",
            "2",
            "--hidden",
            "8",
            "--heads",
            "2",
            "--seq",
            "8",
            "--global-batch",
            "4",
        ]
    return [command, *words]


def check_answer(words: list[str]) -> None:
    """Run a command line in an empty folder; check that it prints its output or reports what is wrong."""

    def call() -> object:
        try:
            return main(words)
        except SystemExit as end:
            return end.code

    status, printed, errors = capture_printed(call)
    # A picture of --svg would be a program for the next command.
    for path in Path().iterdir():
        path.unlink()
    if status in {0, 3}:
        assert printed
        assert not errors
        return
    # Status 1 would be a fault of the job, and not of the words.
    assert status == 2
    assert not printed
    lines = errors.splitlines()
    assert lines[0].startswith("namedmesh")
    assert len(lines) <= 25
    assert all(line.isprintable() and len(line) < 1200 for line in lines)


WITHOUT_TORCH = ["plan", "diff", "partitions", "run", "migrate"]


@settings(max_examples=300)
@given(command_lines(WITHOUT_TORCH))
@example(["plan", "dp=2", "--svg", "/dev/full"])
@example(["plan", "dp=2", "--svg", "/nonexistent/x"])
@example(["plan", "dp=2", "--color-by", "zz"])
@example(["plan", "shape=1000000000"])
@example(["plan", "foo=1000003,world=64,ep=2"])
@example(["plan", f"dp={HUGE}"])
@example(["plan", "dp=99999999999999999999"])
@example(["partitions", "--world-size", "8", "--margin", "nan"])
@example(["partitions", "--world-size", "720720", "--experts", "8"])
@example(["run", "-m", "..x"])
@example(["migrate", "nowhere.py"])
@example(["migrate", LONG])
def check_commands_without_torch(words: list[str]) -> None:
    check_answer(words)


@settings(max_examples=60)
@given(command_lines(["doctor", "verify"]))
@example(["doctor", "dp=1", "--timeout", "nan"])
@example(["doctor", "dp=1", "--timeout", "1e30"])
@example(["doctor", "dp=1", "--megabytes", "-1"])
@example(["doctor", "dp=1", "--megabytes", "1e9"])
@example(["doctor", "dp=1", "--device", "tpu"])
@example(["doctor", "dp=1", "--device", "meta"])
@example(["verify", "nowhere:f"])
@example(["verify", "os:nothing"])
@example(["verify", "..:x"])
@example(["verify", "--tolerance", "nan", "os:getpid"])
@example(["verify", "--tolerance", "inf", "os:getpid"])
def check_commands_with_torch(words: list[str]) -> None:
    check_answer(words)


def _check_in_folder(folder: Path) -> None:
    os.chdir(folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    check_commands_without_torch()
    check_commands_with_torch()


@pytest.mark.ci
def test_no_command_line_ends_in_a_traceback(tmp_path: Path) -> None:
    assert {*FLAGS} == {*COMMANDS}
    run_ranks(1, _check_in_folder, tmp_path, init=False, timeout=180)


HARDWARE = (
    "{",
    "[]",
    '{"name": 1}',
    "CARD:domain:1e400",
    "CARD:domain:99999999999999999999",
    'CARD:memory:"many"',
    "CARD:memory:-1",
    "CARD:peak:{}",
    'CARD:peak:{"bf16": 0}',
    'CARD:matmul:{"bf16": 1}',
)


@pytest.mark.parametrize("text", HARDWARE)
def test_files_of_hardware_are_checked(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json
    from dataclasses import asdict

    path = tmp_path / "card.json"
    if text.startswith("CARD:"):
        _, name, value = text.split(":", 2)
        text = json.dumps(asdict(CARDS["h100"]) | {name: "VALUE"}).replace('"VALUE"', value)
    path.write_text(text, encoding="utf-8")
    job = ["--layers", "2", "--hidden", "8", "--heads", "2", "--seq", "8", "--global-batch", "4"]
    assert main(["partitions", "--world-size", "4", "--hardware", str(path), *job]) == 2
    assert not capsys.readouterr().out


def test_output_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "namedmesh", "plan", "größe=2"]
    for target, status in (("/dev/full", 1), (str(tmp_path / "out"), 0)):
        with Path(target).open("w", encoding="utf-8") as out:
            done = subprocess.run(
                command, stdout=out, stderr=subprocess.PIPE, text=True, env=environment, check=False
            )
        assert done.returncode == status
        assert len(done.stderr.splitlines()) == status
    assert "gr\\xf6\\xdfe=2" in (tmp_path / "out").read_text(encoding="utf-8")
