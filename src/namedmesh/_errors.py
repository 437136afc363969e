"""The errors of namedmesh, and the functions that format their messages.

A message names the argument, the expected and the given value, and the remedy. If several things
are wrong at once, one error carries all of them. This module imports nothing of namedmesh.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from types import TracebackType


class NamedMeshError(Exception):
    """The base class of every error that namedmesh raises.

    Each subclass also derives from the built-in error that fits, so that code that does not import
    namedmesh can catch it.

    Args:
        *problems: one message for each thing that is wrong.

    Attributes:
        problems: the messages.

    Example:
        >>> print(NamedMeshError("no axis is named", "rank 9 is outside the world of 8"))
        2 problems:
          - no axis is named
          - rank 9 is outside the world of 8
    """

    problems: tuple[str, ...]

    def __init__(self, *problems: str) -> None:
        # pickle creates an exception from the arguments of Exception.__init__.
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        # KeyError, a base of AxisError, would show the repr of its argument: the message in
        # quotation marks.
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems:\n{lines}"


class AxisError(NamedMeshError, KeyError):
    """An axis does not exist."""


class CheckpointError(NamedMeshError, ValueError):
    """A checkpoint is missing, corrupted or does not fit, or the model cannot be saved."""


class GradientError(NamedMeshError, RuntimeError):
    """Gradients, inputs or weights differ between ranks on which they must be equal."""


class LayoutError(NamedMeshError, ValueError):
    """Names, sizes, coordinates or ranks do not form a layout."""


class UsageError(LayoutError):
    """Arguments of a command cannot be parsed or contradict each other."""


class OptionError(NamedMeshError, ValueError):
    """A timeout, a backend or a setting of NCCL is not valid."""


class MeshError(NamedMeshError, RuntimeError):
    """The state of a mesh does not allow an operation, e.g. because it is closed."""


class AgreementError(NamedMeshError, RuntimeError):
    """The ranks of one job made different calls, or some ranks made none."""


class LaunchError(NamedMeshError, RuntimeError):
    """The environment of this process does not describe a job, or a device does not exist."""


class PlanError(NamedMeshError, ValueError):
    """A tensor-parallel plan does not fit the model."""


class ShapeError(NamedMeshError, ValueError):
    """A tensor cannot be split as a parallel style has to split it."""


class TrainingError(NamedMeshError, RuntimeError):
    """A training function got arguments, gradients or modules that it cannot use."""


def did_you_mean(name: object, allowed: Iterable[str]) -> str:
    """Return a suggestion for a message about an unknown name; empty if no name is similar.

    Args:
        name: the unknown name.
        allowed: the known names.

    Example:
        >>> did_you_mean("tpz", ["dp", "tp"]), did_you_mean("expert", ["dp", "tp"])
        ("; did you mean 'tp'?", '')
    """
    # The cutoff accepts "tq" for "tp", but not "expert" for "tp".
    matches = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    if not matches:
        return ""
    return f"; did you mean {matches[0]!r}?"


def format_count(count: int, noun: str) -> str:
    """Format a number and its noun, in the plural if it is not 1.

    Args:
        count: the number.
        noun: the noun in the singular. Its plural must end with "s".

    Example:
        >>> format_count(1, "rank"), format_count(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_items(items: Iterable[object], limit: int = 8) -> str:
    """Format items as a comma-separated list, cut after ``limit`` items.

    Args:
        items: the items, in any iterable.
        limit: how many items are written out. The others are counted.

    Example:
        >>> format_items(range(3)), format_items(range(100), limit=4)
        ('0, 1, 2', '0, 1, 2, 3 and 96 more')
    """
    texts = [str(item) for item in items]
    if len(texts) <= limit:
        return ", ".join(texts)
    return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"


def get_first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class.

    Args:
        error: an error of torch or another library, whose message may have many lines.
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def format_ranks(ranks: Sequence[int]) -> str:
    """Format the numbers of at least one rank.

    Args:
        ranks: the ranks.

    Example:
        >>> format_ranks([3]), format_ranks([0, 1])
        ('rank 3', 'ranks 0, 1')
    """
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_items(ranks)}"


def print_in_one_line(error: NamedMeshError, rank: int, printing_rank: int) -> None:
    """Let the interpreter print an uncaught error in one line, without its traceback.

    All ranks of a job raise the same error. One rank prints all of it, and a rank that has failed
    for another reason prints its own error, which would be hard to find among thousands of lines.

    Args:
        error: the error.
        rank: the global rank of this process.
        printing_rank: the rank that prints all of the error.
    """
    print_uncaught = sys.excepthook

    def print_error(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            first_line = error.problems[0].partition("\n")[0]
            name = type(error).__name__
            sys.stderr.write(f"{name} on rank {rank}: {first_line} (rank {printing_rank} prints all of it)\n")
        else:
            print_uncaught(kind, value, traceback)

    sys.excepthook = print_error
