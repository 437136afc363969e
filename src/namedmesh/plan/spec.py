"""Parse spec strings, ``pp=2,dp=-1,tp=2`` or ``megatron tp=2,pp=4``; numbers of parameters; amounts of memory."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from namedmesh.dialects import AXES, DIALECTS, EXPERT_AXES, Dialect
from namedmesh.errors import LayoutError, NamedMeshError, did_you_mean
from namedmesh.sizes import axis_name_problems, nearest_axis

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ITEM = re.compile(r"[^,\s]+")
_USUAL = (*AXES, *EXPERT_AXES)
_NO_SIZE = "{0!r} has no size; write {0}=2, or {0}=-1 for whatever is left"
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {"b": 1}
_BYTES |= {f"{letter}b": 10 ** (3 * (i + 1)) for i, letter in enumerate("kmgt")}
_BYTES |= {f"{letter}ib": 2 ** (10 * (i + 1)) for i, letter in enumerate("kmgt")}
_UNITS = {
    "parameters": (_COUNTS, "a number of parameters, such as 7B or 350M"),
    "memory": (_BYTES, "an amount of memory, such as 80GB or 80GiB"),
}


@dataclass(frozen=True)
class Spec:
    """The sizes, and the dialect, of a spec string.

    Args:
        text: the string.
        sizes: the axes and their sizes, in the order they were written.
        dialect: the dialect in front of them, if there is one.
    """

    text: str
    sizes: dict[str, int]
    dialect: str | None = None


class UsageError(LayoutError):
    """Arguments that cannot be read, or that do not go together, whatever the layout."""


class SpecError(UsageError):
    """A spec string that cannot be read; its text points at each mistake.

    Args:
        text: the string.
        marks: for each mistake where it starts, where it ends, and a sentence about it.
    """

    def __init__(self, text: str, marks: Iterable[tuple[int, int, str]]) -> None:
        self.text = text
        self.marks = tuple(marks)
        super().__init__(*(sentence for _, _, sentence in self.marks))

    def __reduce__(self) -> tuple[type[SpecError], tuple[object, ...]]:
        return type(self), (self.text, self.marks)

    def __str__(self) -> str:
        lines = [f"cannot read the layout {self.text!r}:"]
        for start, stop, sentence in self.marks:
            lines += [f"  {self.text}", f"  {' ' * start}{'^' * max(1, stop - start)} {sentence}"]
        return "\n".join(lines)


@contextmanager
def kept(errors: list[NamedMeshError]) -> Iterator[None]:
    """Keep an error of some arguments, for :func:`raise_all` once the others were looked at too."""
    try:
        yield
    except NamedMeshError as error:
        errors.append(error)


def raise_all(errors: list[NamedMeshError]) -> None:
    """Raise the error that was kept; where there are several, one with the problems of all."""
    if len(errors) == 1:
        raise errors[0]
    kind: type[LayoutError] = LayoutError
    problems: list[str] = []
    for error in errors:
        if isinstance(error, UsageError):
            kind = UsageError
        prefix = f"{error.text!r}: " if isinstance(error, SpecError) else ""
        problems += [f"{prefix}{problem}" for problem in error.problems]
    if problems:
        raise kind(*problems)


def parse_spec(text: str) -> Spec:
    """Parse a spec string.

    Args:
        text: axes with their sizes, slowest first, separated by commas or blanks: ``pp=2,dp=-1,tp=2``. A size
            of -1 is whatever is left. A dialect may stand in front, ``megatron tp=2,pp=4``; it sets the order.

    Raises:
        SpecError: whatever is wrong with it, all at once.

    Example:
        >>> parse_spec("pp=2,dp=-1,tp=2").sizes
        {'pp': 2, 'dp': -1, 'tp': 2}
        >>> parse_spec("megatron tp=2, pp=4").dialect
        'megatron'
        >>> parse_spec("megatron tq=2")
        Traceback (most recent call last):
        namedmesh.plan.spec.SpecError: cannot read the layout 'megatron tq=2':
          megatron tq=2
                   ^^ axis 'tq' is not one of megatron's ('pp', 'dp', 'cp', 'tp', 'edp', 'ep', 'etp'); did you mean 'tp'?
    """
    text = text.strip()
    marks: list[tuple[int, int, str]] = []
    sizes: dict[str, int] = {}
    dialect: Dialect | None = None
    items = list(_ITEM.finditer(text))
    named = bool(items) and "=" not in items[0].group()
    if named:
        name = items[0].group()
        dialect = DIALECTS.get(name)
        if dialect is None:
            what = f"{name!r} is not one of {', '.join(DIALECTS)}{did_you_mean(name, DIALECTS)}"
            marks.append((*items[0].span(), _NO_SIZE.format(name) if name in _USUAL else what))
    for item in items[named:]:
        _read_item(item, dialect, sizes, marks)
    if not items[named:]:
        marks.append((len(text), len(text) + 1, "no axis is named; name one or more, such as tp=2"))
    if marks:
        raise SpecError(text, marks)
    return Spec(text, sizes, dialect.name if dialect is not None else None)


def near_misses(axes: Iterable[str]) -> list[str]:
    """Return a warning for each axis whose name is nearly a usual one: allowed, but perhaps a typo."""
    unusual = {axis: did_you_mean(axis, _USUAL) for axis in axes if axis not in _USUAL}
    return [f"axis {axis!r} is not one of the usual names{hint}" for axis, hint in unusual.items() if hint]


def size_problems(sizes: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for each size below 1, by name; None is no size."""
    return [
        f"{name} is {size}; it is an int of at least 1"
        for name, size in sizes.items()
        if size is not None and size < 1
    ]


def _read_item(
    item: re.Match[str], dialect: Dialect | None, sizes: dict[str, int], marks: list[tuple[int, int, str]]
) -> None:
    name, equals, value = item.group().partition("=")
    start, stop = item.span()
    if not equals:
        marks.append((start, stop, _NO_SIZE.format(name)))
        return
    middle = start + len(name)
    problem = _name_problem(name, dialect, sizes)
    if problem:
        marks.append((start, max(middle, start + 1), problem))
    if re.fullmatch(r"-1|0*[1-9][0-9]*", value, flags=re.ASCII) is None:
        what = f"{value!r} is no size; a size is an int of at least 1, or -1 for whatever is left"
        marks.append((middle + 1, stop, what))
        return
    if not problem:
        sizes[name] = int(value)


def _name_problem(name: str, dialect: Dialect | None, sizes: dict[str, int]) -> str:
    if name in sizes:
        return f"axis {name!r} has a size already; give each axis one"
    wrong = axis_name_problems([name])
    if wrong:
        return wrong[0]
    allowed = tuple(dict.fromkeys((*dialect.axes, *dialect.expert))) if dialect is not None else (name,)
    if dialect is not None and name not in allowed:
        return f"axis {name!r} is not one of {dialect.name}'s {allowed}{nearest_axis(name, allowed)}"
    return ""


def parse_amount(text: str, what: Literal["parameters", "memory"]) -> int:
    """Parse a number of parameters, ``7B`` or ``350M``, or an amount of memory, ``80GB`` or ``80GiB``.

    Raises:
        UsageError: the text is none.

    Example:
        >>> parse_amount("7B", "parameters"), parse_amount("350_000_000", "parameters")
        (7000000000, 350000000)
        >>> parse_amount("80GB", "memory"), parse_amount("1 GiB", "memory")
        (80000000000, 1073741824)
    """
    units, words = _UNITS[what]
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?) *([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not 0 < float(match[1]) < inf:
        raise UsageError(f"{text!r} is not {words}")
    return round(float(match[1]) * units[match[2]])
