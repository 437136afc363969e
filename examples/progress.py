"""What a person sees: the mesh as a table, and how training comes along."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from namedmesh import training

if TYPE_CHECKING:
    from namedmesh import Layout

__all__ = ["Progress", "picture"]

BAR = 24  # characters
LINES = 15  # about as many when the output is no terminal


def picture(layout: Layout, layers: int) -> str:
    """A table of the ranks: a column for each pipeline stage, a row for each data-parallel rank.

    Example:
        >>> from namedmesh import Layout
        >>> print(picture(Layout(pp=2, dp=2, tp=2), layers=4))
                pp 0        pp 1
                layers 0-1  layers 2-3
          dp 0  [0 1]       [4 5]
          dp 1  [2 3]       [6 7]
        In brackets: the ranks that work together on these layers and this part of the batch.
    """
    head: list[str] = []
    below: list[str] = []
    for stage in range(layout["pp"]):
        here = training.stage_layers(layers, None, stage=stage, stages=layout["pp"])
        head.append(f"pp {stage}")
        below.append(f"layers {here[0]}-{here[-1]}" if len(here) > 1 else f"layer {here[0]}")
    rows = [["", *head], ["", *below]]
    for replica in range(layout["dp"]):
        teams = [layout.where(pp=stage, dp=replica) for stage in range(layout["pp"])]
        rows.append([f"dp {replica}", *(f"[{' '.join(map(str, team))}]" for team in teams)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows]
    return "\n".join(
        [*lines, "In brackets: the ranks that work together on these layers and this part of the batch."]
    )


class Progress:
    """A bar on a terminal; elsewhere a line now and then, since a log cannot be overwritten.

    Args:
        first: the step that training starts at.
        steps: the step that it ends before.
        tokens: how many tokens a step has.
        shown: whether to print anything; one rank is enough.
    """

    def __init__(self, first: int, steps: int, tokens: int, *, shown: bool) -> None:
        self._first = first
        self._steps = steps
        self._tokens = tokens
        self._shown = shown
        self._live = sys.stdout.isatty()
        self._between = max(1, math.ceil((steps - first) / LINES))
        self._began = self._measured = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._began

    def update(self, step: int, loss: float) -> None:
        """Tell that a step is done."""
        done, left = step + 1 - self._first, self._steps - step - 1
        if done == 1:
            # The first step also sets things up: it says nothing about the speed of the others.
            self._measured = time.monotonic()
        if not self._shown or not (self._live or done == 1 or left == 0 or done % self._between == 0):
            return
        facts = f"step {step + 1:{len(str(self._steps))}}/{self._steps}  loss {loss:.3f}"
        if done > 1:
            pace = (time.monotonic() - self._measured) / (done - 1)
            facts += f"  {self._tokens / pace:,.0f} tokens/s  {_clock(left * pace)} left"
        if self._live:
            filled = BAR * (step + 1) // self._steps
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r[{bar}] {facts}\x1b[K", end="" if left else "\n", flush=True)
        else:
            print(facts, flush=True)

    def tell(self, words: str) -> None:
        """Print something else without spoiling the bar."""
        if self._shown:
            print(f"\r{words}\x1b[K" if self._live else words, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
