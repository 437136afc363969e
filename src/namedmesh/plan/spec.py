"""Read what users write: ``pp=2,dp=-1,tp=2`` or ``megatron tp=2,pp=4``; numbers of parameters; amounts of memory; JSON."""

from __future__ import annotations

import json
import re
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from namedmesh.dialects import DIALECTS, PLAIN, DialectLayout, layouts_for
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from namedmesh.dialects import Dialect

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class UsageError(LayoutError):
    """Arguments that cannot be read, or that do not go together, whatever the layout."""


def parse_spec(text: str) -> tuple[str | None, dict[str, int]]:
    """Parse a layout as users write it.

    Args:
        text: axes with their sizes, slowest first, separated by commas or blanks. A size of -1 is whatever is left. A
            dialect may stand in front; it sets the order.

    Returns:
        The dialect, if there is one, and the sizes.

    Raises:
        UsageError: whatever cannot be read, all at once.

    Example:
        >>> parse_spec("pp=2,dp=-1,tp=2")
        (None, {'pp': 2, 'dp': -1, 'tp': 2})
        >>> parse_spec("megatron tp=2, pp=4")
        ('megatron', {'tp': 2, 'pp': 4})
    """
    dialect, sizes, problems = None, dict[str, int](), []
    for place, item in enumerate(re.split(r"[\s,]+", text.strip())):
        name, equals, size = item.partition("=")
        if place == 0 and not equals and name in DIALECTS:
            dialect = name
        elif place == 0 and not equals and did_you_mean(name, DIALECTS):
            problems.append(f"{name!r} is not one of {', '.join(DIALECTS)}{did_you_mean(name, DIALECTS)}")
        elif re.fullmatch(r"-1|0*[1-9][0-9]*", size, re.ASCII) is None:
            problems.append(
                f"{item!r} is no axis with a size; write it like tp=2, or dp=-1 for whatever is left"
            )
        elif name in sizes:
            problems.append(f"axis {name!r} has a size already; give each axis one")
        else:
            sizes[name] = int(size)
    if problems:
        raise UsageError(*(f"layout {text!r}: {problem}" for problem in problems))
    return dialect, sizes


def resolve(
    spec: str | Layout = "",
    /,
    *,
    world_size: int | None = None,
    like: str | None = None,
    order: str | None = None,
    **sizes: int,
) -> DialectLayout:
    """Return the layouts that a spec, a layout or sizes describe; arguments and errors as for ``make_plan``."""
    if isinstance(spec, Layout):
        if sizes or like or order:
            raise UsageError("a layout has its sizes and its order; leave out what was given beside it")
        if world_size not in {None, spec.world_size}:
            raise LayoutError(f"{spec} is not the world of {world_size} ranks; leave out one of them")
        return DialectLayout(PLAIN, spec)
    name = like
    if spec.strip():
        if sizes:
            raise UsageError(f"both {spec!r} and sizes for {', '.join(sizes)} were given; give one of them")
        name, sizes = parse_spec(spec)
        if name is not None and like is not None:
            raise UsageError(f"{spec!r} is {name}'s, and like {like} was given too; leave one of them out")
        name = name or like
        if name is None and order is None:
            return DialectLayout(PLAIN, Layout.from_shape(sizes, sizes.values(), world_size=world_size))
        if name is None:
            raise UsageError(f"{spec!r} has its order already; leave the order out, or give sizes by name")
    elif not sizes and world_size is None:
        raise UsageError(
            "neither sizes nor the number of ranks were given; name sizes, such as tp=2, or the number"
        )
    return layouts_for(_dialect(name), sizes, world_size=world_size, order=order)


def _dialect(name: str | None) -> Dialect:
    if name is not None and name not in DIALECTS:
        raise UsageError(f"{name!r} is not one of {', '.join(DIALECTS)}{did_you_mean(name, DIALECTS)}")
    return PLAIN if name is None else DIALECTS[name]


def size_problems(sizes: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for each size below 1, by name; None is no size."""
    return [
        f"{name} is {size}; it is an int of at least 1"
        for name, size in sizes.items()
        if size is not None and size < 1
    ]


def parse_amount(text: str, what: Literal["parameters", "memory"]) -> int:
    """Parse a number of parameters, ``7B`` or ``350M``, or an amount of memory, ``80GB`` or ``80GiB``.

    Raises:
        UsageError: the text is none.

    Example:
        >>> parse_amount("7B", "parameters"), parse_amount("80GB", "memory"), parse_amount("1 GiB", "memory")
        (7000000000, 80000000000, 1073741824)
    """
    units, example = (_COUNTS, "7B or 350M") if what == "parameters" else (_BYTES, "80GB or 80GiB")
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?) *([a-z]*)", text.strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not 0 < float(match[1]) < inf:
        raise UsageError(f"{text!r} is no amount of {what}, such as {example}")
    return round(float(match[1]) * units[match[2]])


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file; a UsageError if it cannot be read, or holds none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path!r} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path!r} holds no JSON object, but a {type(data).__name__}")
    return data
