"""Parse layouts as users write them, declare their command-line flags, and format tables.

The commands ``plan``, ``partitions``, ``diff``, ``doctor`` and ``verify`` share this module.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from math import prod
from typing import Any

from namedmesh._command_line import MOST_RANKS, int_between
from namedmesh._errors import UsageError, did_you_mean
from namedmesh.layout import Layout
from namedmesh.layout.axes import USUAL_AXES
from namedmesh.layout.orders import LEGACY_APIS, NAMEDMESH_API, JobLayout, compute_layouts

EXIT_MISMATCH = 3
"""Exit status if layouts differ or nothing fits; 2 is a wrong argument."""


def parse_spec(text: str) -> tuple[str | None, dict[str, int]]:
    """Parse a layout specification into the name of a legacy API and the axis sizes.

    Args:
        text: axes with their sizes, slowest first, where -1 is inferred; or the name of a legacy
            API and sizes.

    Returns:
        The name of the legacy API, None without one, and the sizes by axis.

    Raises:
        UsageError: for every item that is neither a size nor a known name, and every repeated axis.

    Example:
        >>> parse_spec("pp=2,dp=-1,tp=2"), parse_spec("megatron tp=2, pp=4")
        ((None, {'pp': 2, 'dp': -1, 'tp': 2}), ('megatron', {'tp': 2, 'pp': 4}))
    """
    api_name: str | None = None
    sizes: dict[str, int] = {}
    problems: list[str] = []
    for position, item in enumerate(text.replace(",", " ").split()):
        # All mistakes are collected, so that one correction is enough.
        axis, _, size = item.partition("=")
        if position == 0 and item in LEGACY_APIS:
            api_name = item
        elif not size.removeprefix("-").isdecimal():
            names = f"none of {', '.join(LEGACY_APIS)}"
            if position == 0:  # The name of a legacy API can only come first.
                names += did_you_mean(item, LEGACY_APIS)
            problems.append(f"{item!r} is no size, such as tp=2 or dp=-1, and {names}")
        elif axis in sizes:
            problems.append(f"axis {axis!r} has a size already; give each axis one")
        elif len(size) > len(str(MOST_RANKS)) or int(size) > MOST_RANKS:
            problems.append(f"the size of {axis!r} must be at most {MOST_RANKS}")
        else:
            sizes[axis] = int(size)
    if problems:
        raise UsageError(*(f"layout {text!r}: {problem}" for problem in problems))
    return api_name, sizes


def make_layouts(
    spec: str | Layout = "", /, *, world_size: int | None = None, order: str | None = None, **sizes: int
) -> JobLayout:
    """Make the dense and the expert layout of a specification, a layout or sizes.

    Args:
        spec: as for :func:`namedmesh.tools.plan.make_plan`.
        world_size: the number of ranks; needed to infer a size of -1.
        order: the axes, fastest first.
        **sizes: the axis sizes, if ``spec`` has none.

    Raises:
        UsageError: if sizes are given twice, or ``order`` in addition to a specification that has
            an order.
        LayoutError: if the sizes do not fit together.
    """
    if isinstance(spec, Layout):
        api_name = None
        spec_sizes = dict(spec.items())
    else:
        api_name, spec_sizes = parse_spec(spec)
    if spec_sizes and sizes:
        raise UsageError(f"both {spec!r} and sizes for {', '.join(sizes)} were given; give one of them")
    if spec_sizes and api_name is None:
        # Sizes without a legacy API are written in the order of the mesh, so no table decides it.
        _check_number_of_ranks(prod(abs(size) for size in spec_sizes.values()))
        if order is not None:
            raise UsageError(f"{spec!r} has its order already; leave the order out, or give sizes by name")
        layout = Layout.from_shape(spec_sizes, spec_sizes.values(), world_size=world_size)
        return JobLayout(NAMEDMESH_API, layout)
    api = LEGACY_APIS.get(api_name or "", NAMEDMESH_API)
    layouts = compute_layouts(api, spec_sizes or sizes, world_size=world_size, order=order)
    _check_number_of_ranks(layouts.dense.world_size)
    return layouts


def _check_number_of_ranks(number: int) -> None:
    """Raise a UsageError for a layout whose groups would be too long to list."""
    if number > MOST_RANKS:
        raise UsageError(f"the layout has more than {MOST_RANKS} ranks; choose smaller sizes")


def add_layout_arguments(parser: ArgumentParser) -> None:
    """Declare a specification, a flag for each usual axis, and the order."""
    text = f"axes and sizes, slowest first: pp=2,dp=-1,tp=2; or one of {', '.join(LEGACY_APIS)} and sizes"
    parser.add_argument("spec", nargs="*", metavar="SPEC", help=text)
    # Flags that are not given do not appear: their defaults depend on the specification.
    for axis in USUAL_AXES:
        flag = f"--{axis.replace('_', '-')}"
        help_text = f"the size of {axis}"
        parser.add_argument(flag, type=int_between(-1), metavar="N", default=SUPPRESS, help=help_text)
    text = "the order of the axes, fastest first (default: tp-cp-ep-dp-pp)"
    parser.add_argument("--order", default=SUPPRESS, help=text)


def read_layout_arguments(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the specification and the keyword arguments for :func:`make_layouts`."""
    given = vars(arguments)
    return " ".join(arguments.spec), {name: given[name] for name in (*USUAL_AXES, "order") if name in given}


def format_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format rows under named columns; columns of numbers are aligned to the right.

    Args:
        columns: the heading of each column.
        rows: the cells of each row; an empty text is a missing number. A column without any cell
            is not shown.
    """
    padded_columns = []
    for heading, *cells in zip(columns, *rows, strict=True):
        texts = [heading, *map(str, cells)]
        if not any(texts[1:]):
            continue
        width = max(map(len, texts))
        # A number that is not known is an empty text, and does not make a column one of texts.
        is_numeric = not any(isinstance(cell, str) and cell for cell in cells)
        padded_columns.append([text.rjust(width) if is_numeric else text.ljust(width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded_columns, strict=True))
