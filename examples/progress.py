"""What a person sees: the mesh as a table, and how training comes along."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from namedmesh import training

if TYPE_CHECKING:
    from namedmesh import Layout


LINES = 15  # about as many


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
    stages = range(layout["pp"])
    here = [training.stage_layers(layers, None, stage=stage, stages=len(stages)) for stage in stages]
    rows = [
        ["", *(f"pp {stage}" for stage in stages)],
        ["", *(f"layers {each[0]}-{each[-1]}" if len(each) > 1 else f"layer {each[0]}" for each in here)],
    ]
    for replica in range(layout["dp"]):
        teams = [layout.where(pp=stage, dp=replica) for stage in stages]
        rows.append([f"dp {replica}", *(f"[{' '.join(map(str, team))}]" for team in teams)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows]
    note = "In brackets: the ranks that work together on these layers and this part of the batch."
    return "\n".join([*lines, note])


def with_unit(loss: float) -> str:
    """A loss in both units.

    Example:
        >>> with_unit(2.0)
        '2.000 nats a byte (2.885 bits)'
    """
    return f"{loss:.3f} nats a byte ({loss / math.log(2):.3f} bits)"


class Progress:
    """A line now and then, for steps from ``first`` to before ``steps`` of so many bytes; one rank shows them."""

    def __init__(self, first: int, steps: int, tokens: int, *, shown: bool) -> None:
        self._first, self._steps, self._tokens, self._shown = first, steps, tokens, shown
        self._began = self._measured = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._began

    def update(self, step: int, loss: float) -> None:
        """Tell that a step is done."""
        done = step + 1 - self._first
        if done == 1:  # which also set things up: it says nothing about the speed of the others
            self._measured = time.monotonic()
        if done == 1 or step + 1 == self._steps or done % max(1, (self._steps - self._first) // LINES) == 0:
            pace = (time.monotonic() - self._measured) / max(1, done - 1)
            speed = f"  {self._tokens / pace:,.0f} bytes/s" if done > 1 else ""
            self.tell(f"step {step + 1:{len(str(self._steps))}}/{self._steps}  loss {with_unit(loss)}{speed}")

    def tell(self, words: str) -> None:
        """Print something else."""
        if self._shown:
            print(words, flush=True)
