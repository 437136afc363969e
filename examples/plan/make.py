"""Make the files beside this one: a terminal with the planner's commands, and one picture.

python examples/plan/make.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
from pathlib import Path

from namedmesh.__main__ import main as namedmesh
from namedmesh.tools.plan import draw_svg, make_plan

COMMANDS = (
    "plan --world-size 16 --tp 2 --pp 4",
    "plan --world-size 16 --tp 2 --pp 4 --rank 5",
    "plan --world-size 64 --tp 4 --pp 4 --order pp-tp-dp --gpus-per-node 8",
    "plan megatrn tp=2,pp=4",
    "plan --world-size 16 --tp 3",
    "plan megatron tp=2,pp=4,ep=2 --world-size 16",
    "plan --world-size 4096 --tp 8",
    "partitions --world-size 8 --layers 12 --heads 12 --hidden 768 --vocab 50304 --tied --seq 1024 --global-batch 64 --best 4",
    (
        "partitions --world-size 64 --layers 32 --hidden 4096 --ffn 14336 --heads 32 --kv-heads 8 --vocab 32000 --experts 8 "
        "--top-k 2 --seq 4096 --global-batch 1024 --best 4 --explain"
    ),
    "partitions --world-size 16 --heads 12 --layers 6 --ffn 1000",
    (
        "partitions --world-size 8 --hardware a100 --layers 80 --hidden 8192 --ffn 28672 --heads 64 --kv-heads 8 --vocab 128256 "
        "--seq 8192 --global-batch 64 --best 4"
    ),
    'diff --a "megatron tp=2,pp=4" --b "fairscale tp=2,pp=4" --world-size 16',
)
"""What the terminal shows."""


def terminal() -> str:
    """Return every command with what it prints and, if it is not 0, its exit status."""
    return "\n".join(_shown(command) for command in COMMANDS)


def _shown(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = namedmesh(shlex.split(command))
    said = f"exit status {status}\n" if status else ""
    return f"$ namedmesh {command}\n{printed.getvalue()}{said}"


def files() -> dict[str, str]:
    """Return the files by name."""
    plan = make_plan(world_size=16, tp=2, pp=4, gpus_per_node=8)
    return {"terminal.txt": terminal(), "ranks.svg": draw_svg(plan.layout, gpus_per_node=plan.gpus_per_node)}


def main() -> None:
    """Write them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
