"""The commands of the planner: what they print, in which format, and with which exit status."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from installing import interpreter
from plan_session import FILE, run, session

import namedmesh
import namedmesh.plan
from namedmesh.__main__ import COMMANDS, main
from namedmesh.plan.tables import Table, as_text

SOURCE = str(Path(__file__).parents[1] / "src")


def as_json(command: str) -> Any:
    status, out, _ = run(f"{command} --format json")
    assert status == 0
    return json.loads(out)


def as_csv(command: str) -> list[dict[str, str]]:
    status, out, _ = run(f"{command} --format csv")
    assert status == 0
    return list(csv.DictReader(io.StringIO(out)))


def test_the_commands_print_what_they_are_known_to_print() -> None:
    """Reports, mistakes and statuses; ``python tests/plan_session.py`` writes the file anew, to be read before it is kept."""
    known = FILE.read_text(encoding="utf-8")
    assert session(known) == known


def test_json_and_csv_hold_the_same_numbers() -> None:
    command = "plan megatron tp=2,pp=4,ep=2 --world-size 16 --gpus-per-node 8"
    data, rows = as_json(command), as_csv(command)
    assert data["axes"] == {"pp": 4, "dp": 2, "cp": 1, "tp": 2}
    assert data["expert_axes"] == {"pp": 4, "edp": 1, "ep": 2, "etp": 2}
    for kind in data["kinds"]:
        mine = [row for row in rows if row["kind"] == kind["name"]]
        assert [[int(rank) for rank in row["ranks"].split()] for row in mine] == kind["groups"]
        assert {int(row["size"]) for row in mine} == {kind["size"]}
        assert {int(row["count"]) for row in mine} == {kind["count"]} == {len(kind["groups"])}
    assert data["replicas"]["groups"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert data["communicators"] == {"asked": 20, "held": 7, "groups_in_world": 140}
    assert [place["axis"] for place in data["placements"] if place["across_nodes"]] == ["pp"]
    for row in rows:
        nodes = {int(rank) // 8 for rank in row["ranks"].split()}
        assert (row["crosses_nodes"], row["crosses_domains"]) == (str(int(len(nodes) > 1)), "")
    rows = as_csv("plan pp=2,tp=4 --gpus-per-node 2 --nvlink-domain 4")
    assert [row["crosses_domains"] for row in rows if row["kind"] in {"tp", "pp"}] == ["1"] * 4 + ["0"] * 2
    rows = as_csv("plan dp=2,tp=4 --gpus-per-node 2")
    assert rows[-1]["kind"] == "warning"
    assert rows[-1]["warning"].startswith("tp=4 leaves a node of 2 GPUs")


def test_a_long_list_is_cut_short_unless_all_is_wanted() -> None:
    _, short, _ = run("plan --world-size 4096 --tp 8")
    _, long, _ = run("plan --world-size 4096 --tp 8 --all")
    assert "... and 503 more" in short
    assert "..." not in long
    assert "(4088, 4089, 4090, 4091, 4092, 4093, 4094, 4095)" in long
    large = as_json("plan --world-size 1048576 --tp 8")
    tp = next(kind for kind in large["kinds"] if kind["name"] == "tp")
    assert (tp["count"], len(tp["groups"])) == (131072, 512)
    assert as_json("plan dp=4")["replicas"]["groups"] == [[0], [1], [2], [3]]
    rows = as_csv("plan dp=1048576")
    assert [(row["count"], row["ranks"]) for row in rows] == [("1", "")]
    one = as_json("plan --world-size 1048576 --tp 8 --rank 9")
    assert one["copies"]["ranks"] is None
    assert one["copies"] | {"ranks": 0} == {
        "size": 131072,
        "first": 1,
        "runs": [{"size": 131072, "stride": 8}],
        "ranks": 0,
    }


def test_the_best_partitions_come_first_in_every_format() -> None:
    command = (
        "partitions --world-size 16 --gpus-per-node 8 --params 100M --expert-params 80M --layers 4 --hidden 64 --seq 128 "
        "--heads 4 --experts 4 --top-k 2 --global-batch 16 --micro-batch 2 --checkpointing full --best 3"
    )
    data, rows = as_json(command)["partitions"], as_csv(command)
    _, out, _ = run(command)
    lines = [line.split() for line in out.splitlines()[3:6]]
    assert len(data) == len(rows) == 3
    for one, row, line in zip(data, rows, lines, strict=True):
        assert [one[axis] for axis in ("tp", "cp", "pp", "dp", "ep", "etp")] == [
            int(size) for size in line[:6]
        ]
        assert row["ep"] == line[4]
        assert (
            float(row["tokens_per_second"])
            == one["tokens_per_second"]
            == pytest.approx(16 * 128 / sum(one["step"].values()))
        )
        assert int(row["micro_batches"]) == one["micro_batches"] == 16 // 2 // one["dp"]
        assert float(row["bytes_activations"]) == one["memory"]["activations"] > 0
        assert float(row["bytes"]) == one["memory"]["total"]
        assert str(round(one["tokens_per_second"])) in line
    speeds = [one["tokens_per_second"] for one in data]
    assert speeds == sorted(speeds, reverse=True)


LLAMA_8B = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 8192"


def test_a_job_is_read_from_the_flags() -> None:
    command = f"partitions --world-size 8 {LLAMA_8B} --global-batch 8 --best 1"
    compiled, eager, unfused = (
        as_json(f"{command} {flags}")["partitions"][0]["step"]["elementwise"]
        for flags in ("", "--eager", "--eager --no-fused-norms")
    )
    assert compiled < eager < unfused


def test_every_field_of_a_job_has_a_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["partitions", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for one in (*fields(namedmesh.plan.Model), *fields(namedmesh.plan.Job)):
        flag = {"compiled": "eager", "model": "config"}.get(one.name, one.name.replace("_", "-"))
        assert f"--{flag} " in text or f"--{flag}, " in text
    assert "--hidden N width of the residual stream --heads N" in text
    assert (
        "--dropout, --no-dropout whether the layers have dropout, whose masks are kept (default: False)"
        in text
    )


def test_the_first_two_are_explained() -> None:
    command = f"partitions --world-size 16 {LLAMA_8B} --global-batch 64 --best 2"
    best = as_json(f"{command} --explain")
    one, other = (
        ",".join(f"{axis}={each[axis]}" for axis in ("tp", "cp", "pp", "dp", "ep", "etp") if each[axis] > 1)
        for each in best["partitions"]
    )
    assert best["explanation"].startswith(f"{one} is faster than {other}: ")


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("", 2, "the following arguments are required: COMMAND"),
        ("migrat", 2, "invalid choice: 'migrat'"),
        ("migrate", 2, "the following arguments are required: PATH"),
        ("migrate --format xml .", 2, "invalid choice: 'xml'"),
        ("migrate nowhere", 2, "argument PATH: there is no file or folder 'nowhere'"),
        ("plan --word-size 8", 2, "unrecognized arguments: --word-size; did you mean '--world-size'?\n"),
        ("plan tp=2 --like nobody", 2, "invalid choice: 'nobody'"),
        ("shard", 2, "the following arguments are required: --in, --out, --tp, --style"),
        (
            "partitions --world-size 8 --batch 4",
            2,
            "--batch: 4 is of one data-parallel rank; give --global-batch",
        ),
        ("--version", 0, f"namedmesh {namedmesh.__version__}\n"),
        *(("--help", 0, f"\n    {name}") for name in COMMANDS),
    ],
)
def test_arguments_that_do_not_exist_end_with_a_message(
    command: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(command))
    assert caught.value.code == status
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("plan tp=3 --world-size 8", 1, "namedmesh plan: tp=3 needs 3 ranks"),
        ("plan tp=a", 2, "namedmesh plan: cannot read the layout"),
        ("plan tp=2 >&-", 1, "namedmesh plan: standard output is closed\n"),
        (
            "plan tp=2 >/dev/full",
            1,
            "namedmesh plan: standard output cannot be written: No space left on device\n",
        ),
        ("plan --world-size 100000 --all --tp 2 | head -1", 0, ""),
        ("plan t\N{LATIN SMALL LETTER E WITH ACUTE}=2 >/dev/null", 0, ""),
    ],
)
def test_a_process_of_its_own_ends_with_the_status(command: str, status: int, message: str) -> None:
    done = subprocess.run(  # noqa: S602  redirections of our own
        f"{shlex.quote(sys.executable)} -m namedmesh {command}",
        check=False,
        shell=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == status
    assert done.stderr == message or (message and done.stderr.startswith(message))


def test_torch_is_not_imported(tmp_path: Path) -> None:
    commands = (
        "plan --world-size 16 --tp 2 --svg a.svg --html a.html",
        "plan tp=2 --rank 1",
        "partitions --world-size 8 --params 1B",
        "shard --in 8 --out 8 --tp 2 --style row --svg a.svg --html a.html",
        "diff --a tp=2 --b dp=2",
        "--help",
        "doctor --help",
    )
    code = (
        "import contextlib, shlex, sys\nfrom namedmesh.__main__ import main\n"
        "for command in sys.argv[1:]:\n    with contextlib.suppress(SystemExit):\n        main(shlex.split(command))\n"
        "    assert not {'torch', 'numpy'} & {*sys.modules}, command\n"
        "import namedmesh.plan\n[getattr(namedmesh.plan, name) for name in namedmesh.plan.__all__]\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    done = interpreter("-c", code, *commands, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_says_what_it_does() -> None:
    for name, home in COMMANDS.items():
        summary, _, _ = importlib.import_module(home).COMMANDS[name]
        assert summary
        assert not summary.endswith(".")


def test_everything_exported_is_there() -> None:
    assert sorted(namedmesh.plan.__all__) == dir(namedmesh.plan)
    for name in namedmesh.plan.__all__:
        assert getattr(namedmesh.plan, name) is not None
    with pytest.raises(AttributeError, match=r"module 'namedmesh\.plan' has no attribute 'mak_plan'"):
        namedmesh.plan.mak_plan  # noqa: B018


def test_a_narrow_terminal_does_without_some_columns() -> None:
    table = Table(("a", "long words", "b"), ((1, "many words here", 2),), optional=("long words",))
    assert as_text(table) == "a  long words       b\n1  many words here  2"
    assert as_text(table, 20) == "a  long words      b\n1  many words      2\n   here"
    assert as_text(table, 10) == "a  b\n1  2"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in {"COLUMNS": "120", "COLORTERM": "", "NO_COLOR": "", **environment}.items():
        monkeypatch.setenv(name, value)
    with contextlib.redirect_stdout(Terminal()) as out:
        assert main(shlex.split(command)) == 0
    return out.getvalue()


def test_a_wide_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"partitions --world-size 131072 {LLAMA_8B} --global-batch 4096 --experts 64 --expert-ffn 512"
    table = on_a_terminal(command, monkeypatch).split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 120
    assert "ruled out" in table
    assert "4096" in table


def test_a_terminal_of_many_colors_gets_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "plan --world-size 16 --tp 4 --gpus-per-node 8"
    _, plain, _ = run(command)
    assert on_a_terminal(command, monkeypatch) == plain
    assert on_a_terminal(command, monkeypatch, COLORTERM="truecolor", NO_COLOR="1") == plain
    out = on_a_terminal(command, monkeypatch, COLORTERM="truecolor")
    legend, _, *nodes = out.splitlines()[:4]
    assert "dp 3" in legend
    assert [node.split("\x1b")[0].strip() for node in nodes] == ["node 0", "node 1"]
    colors = re.findall(r"\x1b\[48;2;([0-9;]+)m\x1b\[38;2;[0-9;]+m +([0-9]+) +\x1b\[0m", "".join(nodes))
    assert [int(rank) for _, rank in colors] == list(range(16))
    assert [len({color for color, _ in colors[i : i + 4]}) for i in range(0, 16, 4)] == [1] * 4
    assert len({color for color, _ in colors}) == 4
    assert out.endswith(f"\n\n{plain}")
