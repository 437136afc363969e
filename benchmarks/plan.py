"""What ``namedmesh plan`` costs beyond an empty interpreter: for 1,024 ranks, for 1,048,576, and for one rank.

    python benchmarks/plan.py [--rounds N]

Every contestant is a process of its own, timed from its start to its end, in turns with an interpreter that does
nothing; the figures are the medians of the differences within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import paired

SOURCE = Path(__file__).parents[1] / "src"
SIZES = "--tp 8 --pp 8 --gpus-per-node 8"
CONTESTANTS = {
    "plan, 1,024 ranks": f"plan --world-size 1024 {SIZES}",
    "plan, 1,048,576 ranks": f"plan --world-size 1048576 {SIZES}",
    "plan like megatron, 1,048,576 ranks": f"plan --world-size 1048576 {SIZES} --like megatron --ep 8 --etp 1",
    "--rank, 8 ranks": "plan --world-size 8 --tp 2 --pp 2 --gpus-per-node 8 --rank 7",
    "--rank, 1,048,576 ranks": f"plan --world-size 1048576 {SIZES} --rank 1048575",
    "partitions --best, 1,048,576 ranks": "partitions --world-size 1048576 --layers 128 --hidden 16384 --heads 128 "
    "--vocab 131072 --seq 8192 --global-batch 1048576 --best 5",
    "--svg, 512 ranks": f"plan --world-size 512 {SIZES} --svg {os.devnull}",
}


def seconds(words: list[str]) -> float:
    """Return the time of one interpreter, on the wall."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env=environment)  # noqa: S603
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The planner against an empty interpreter.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    contestants = {"empty interpreter": partial(seconds, ["-c", "pass"])}
    contestants |= {
        name: partial(seconds, ["-m", "namedmesh", *command.split()]) for name, command in CONTESTANTS.items()
    }
    measured = paired.interleaved(contestants, rounds)
    print(paired.machine())
    print(f"seconds, medians of {rounds} rounds")
    print(paired.row(["command", "in all", "beyond empty"], [38, 8, 14]))
    for name, taken in measured.items():
        beyond = statistics.median(
            mine - empty for mine, empty in zip(taken, measured["empty interpreter"], strict=True)
        )
        print(paired.row([name, f"{statistics.median(taken):.3f}", f"{beyond:.3f}"], [38, 8, 14]))


if __name__ == "__main__":
    main()
