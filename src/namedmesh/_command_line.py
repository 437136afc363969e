"""Convert the words of a command line to values, within bounds.

Every command uses the converters of this module as the ``type`` of its arguments. Their bounds keep
the memory and the time of a command in proportion to its output: a number of ranks without a bound
would be a list of as many ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

MOST_RANKS = 2**20
"""The largest number of ranks that a command describes, and the largest size of an axis."""

# A word of the user's appears in messages. Nobody reads a longer line.
_LONGEST_LINE = 1000
_MOST_LINES = 20


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, which reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2.

        Args:
            message: what is wrong.
        """
        self.exit(2, f"{self.prog}: {shorten(message)}; see {self.prog} --help\n")


def shorten(message: str) -> str:
    """Cut the lines of a message, and replace control characters, for a terminal.

    Args:
        message: any text, also with words that the user has typed.
    """
    lines = []
    every_line = message.splitlines()
    for line in every_line[:_MOST_LINES]:
        printable = line
        if not line.isprintable():
            printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
        if len(printable) > _LONGEST_LINE:
            # The remedy is at the end.
            half = _LONGEST_LINE // 2
            printable = f"{printable[:half]} ... {printable[-half:]}"
        lines.append(printable)
    if len(every_line) > _MOST_LINES:
        lines.append(f"  and {len(every_line) - _MOST_LINES} more lines")
    return "\n".join(lines)


def int_between(least: int, most: int = MOST_RANKS) -> Callable[[str], int]:
    """Return a converter for an int in a range.

    Args:
        least: the smallest int that is accepted.
        most: the largest int that is accepted.
    """

    def convert(text: str) -> int:
        # int() itself rejects a number of thousands of digits.
        return int(_check_range(int, text, least, most, "an int"))

    return convert


def float_between(least: float, most: float) -> Callable[[str], float]:
    """Return a converter for a number in a range, which is never infinite or NaN.

    Args:
        least: the smallest number that is accepted.
        most: the largest number that is accepted.
    """

    def convert(text: str) -> float:
        return _check_range(float, text, least, most, "a number")

    return convert


def _check_range(convert: Callable[[str], float], text: str, least: float, most: float, kind: str) -> float:
    """Convert a word to a number, and raise an ArgumentTypeError if it is not in a range."""
    try:
        number = convert(text)
    except ValueError:
        number = float("nan")
    # The comparison is false for NaN, too.
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must be {kind} from {least} to {most}, got {text!r}")
    return number


def existing_path(text: str) -> Path:
    """Convert a word to the path of a file or a folder that exists.

    Args:
        text: the path.

    Raises:
        ArgumentTypeError: it does not exist, or its folder cannot be read.
    """
    path = Path(text)
    try:
        # An empty word would be the current folder, and to read a pipe would wait for ever.
        exists = bool(text) and (path.is_file() or path.is_dir())
    except (OSError, ValueError):
        # The name is too long, or has a null character; or a folder cannot be read.
        exists = False
    if not exists:
        raise argparse.ArgumentTypeError(f"must be a file or a folder that exists, got {text!r}")
    return path


def dotted_name(text: str) -> str:
    """Convert a word to the name of a module, such as ``package.module``.

    Args:
        text: the name.

    Raises:
        ArgumentTypeError: a part of it is empty, as in a relative name.
    """
    if "" in text.split(".") or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must be the name of a module, such as package.module, got {text!r}"
        )
    return text
