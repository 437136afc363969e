"""What a person sees: which ranks have which layers, and how training comes along."""

from __future__ import annotations

import math
import time

from settings import Settings

from namedmesh import Layout, training

LINES = 15  # about as many


def picture(layout: Layout, layers: int) -> str:
    """Draw a table of the ranks: a column for each pipeline stage, a row for each data-parallel rank."""
    stages = range(layout["pp"])
    here = [training.stage_layers(layers, None, stage=stage, stages=len(stages)) for stage in stages]
    rows = [["", *(f"pp {stage}, layers {each[0]}-{each[-1]}" for stage, each in enumerate(here))]]
    for dp in range(layout["dp"]):
        together = [" ".join(map(str, layout.where(pp=stage, dp=dp))) for stage in stages]
        rows.append([f"dp {dp}", *(f"[{ranks}]" for ranks in together)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(["", *map(str.ljust, row, widths)]).rstrip() for row in rows]
    note = "In brackets: the ranks that work together on these layers and this part of the batch."
    return "\n".join([*lines, note])


def with_unit(loss: float) -> str:
    """Write a loss in both units."""
    return f"{loss:.3f} nats a byte ({loss / math.log(2):.3f} bits)"


class Progress:
    """A line now and then, on one rank."""

    def __init__(self, settings: Settings, *, shown: bool) -> None:
        self._steps, self._bytes, self._shown = settings.steps, settings.batch * settings.seq, shown
        self._times: list[float] = []

    def update(self, step: int, loss: float) -> None:
        """Show that a step is done."""
        self._times.append(time.monotonic())
        done = (
            len(self._times) - 1
        )  # the first also set things up: it says nothing about the speed of the others
        if not done or step + 1 == self._steps or (step + 1) % max(1, self._steps // LINES) == 0:
            pace = done / (self._times[-1] - self._times[0]) if done else 0.0
            speed = f"  {self._bytes * pace:,.0f} bytes/s" if done else ""
            counted = f"step {step + 1:{len(str(self._steps))}}/{self._steps}"
            self.show(f"{counted}  loss {with_unit(loss)}{speed}")

    def show(self, words: str) -> None:
        """Print something."""
        if self._shown:
            print(words, flush=True)
