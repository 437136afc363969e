"""The errors of namedmesh: one root over the builtin that fits, and one way to word them.

A message says what was got, what is allowed and what to do; when several things are wrong at once, one
error carries all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class NamedMeshError(Exception):
    """The root of every error that namedmesh raises; ``problems`` has one sentence for each thing that is wrong.

    Example:
        >>> print(NamedMeshError("no axis is named", "rank 9 is outside the world of 8"))
        2 problems:
          - no axis is named
          - rank 9 is outside the world of 8
    """

    problems: tuple[str, ...]

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        # KeyError would show the repr of its argument: a sentence in quotation marks.
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:\n{lines}"


class AxisError(NamedMeshError, KeyError):
    """An axis was named that is not there."""


class CheckpointError(NamedMeshError, ValueError):
    """A checkpoint is not there, or does not fit the model; or a model cannot be saved as it is."""


class GradientError(NamedMeshError, RuntimeError):
    """The ranks of an axis have different gradients, inputs or weights where they must be equal."""


class LayoutError(NamedMeshError, ValueError):
    """Names, sizes, coordinates or ranks that no layout can have."""


class UsageError(LayoutError):
    """Arguments of a command that cannot be read, or that do not go together, whatever the layout."""


class MeshError(NamedMeshError, RuntimeError):
    """A mesh was asked for something that its present state cannot give."""


class AgreementError(NamedMeshError, RuntimeError):
    """The ranks of one job asked for different things, or some of them did not ask at all."""


class LaunchError(NamedMeshError, RuntimeError):
    """The environment of this process does not describe a job, or names a device that is not there."""


class PlanError(NamedMeshError, ValueError):
    """A tensor-parallel plan does not fit the model."""


class ShapeError(NamedMeshError, ValueError):
    """A tensor's size cannot be split the way a parallel style has to split it."""


class TrainingError(NamedMeshError, RuntimeError):
    """A training function was given gradients, modules or numbers that it can do nothing with."""


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """Return the tail of a message about an unknown name: the nearest allowed one, or nothing."""
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def count_of(count: int, word: str) -> str:
    """Return a number with its noun."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def listing(items: Iterable[object], limit: int = 8) -> str:
    """Return items separated by commas, the rest counted once there are more than ``limit``.

    Example:
        >>> listing(range(3)), listing(range(100), limit=4)
        ('0, 1, 2', '0, 1, 2, 3 and 96 more')
    """
    shown = [str(item) for item in items]
    if len(shown) <= limit:
        return ", ".join(shown)
    return f"{', '.join(shown[:limit])} and {len(shown) - limit} more"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return some ranks as messages name them."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listing(ranks)}"
