"""Compare the groups of two layouts over the same ranks: ``namedmesh diff``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import NamedTuple

from namedmesh._command_line import int_between
from namedmesh._errors import LayoutError
from namedmesh.layout.axes import DATA_AXES, DATA_PARTS
from namedmesh.layout.layout import Layout, make_partition_key
from namedmesh.layout.orders import JobLayout
from namedmesh.tools.plan.describe import Group, format_groups, list_first_groups
from namedmesh.tools.plan.spec import EXIT_MISMATCH, make_layouts

_SHOWN_GROUPS = 4  # groups of each layout that are shown for a difference


class Comparison(NamedTuple):
    """The groups of two layouts that differ; ``str`` formats them as text.

    Attributes:
        first: the first layout.
        second: the second layout, over the same ranks.
        kinds: by axes, the first groups of both layouts if they differ, None if they are identical.
    """

    first: JobLayout
    second: JobLayout
    kinds: dict[tuple[str, ...], tuple[list[Group], list[Group]] | None]

    def __str__(self) -> str:
        lines = [
            f"a: {self.first.api.name} {self.first.dense}",
            f"b: {self.second.api.name} {self.second.dense}",
            "",
        ]
        differing = 0
        for axes, groups in self.kinds.items():
            name = " x ".join(axes)
            if groups is None:
                lines.append(f"{name}: same")
            else:
                differing += 1
                lines.append(f"{name}: different")
                lines.append(f"  a: {format_groups(groups[0])} ...")
                lines.append(f"  b: {format_groups(groups[1])} ...")
        lines += ["", f"{differing} of {len(self.kinds)} kinds of groups differ"]
        return "\n".join(lines)


def compare(first: str, second: str, *, world_size: int | None = None) -> Comparison:
    """Compare the groups of two layouts over the same ranks, axis by axis.

    The model-parallel groups, pp x tp, are compared in addition.

    Args:
        first: a specification, as for :func:`make_plan`.
        second: another specification.
        world_size: the number of ranks; needed if a size is inferred.

    Raises:
        LayoutError: if the two layouts have different numbers of ranks.

    Example:
        >>> compare("tp=2,dp=2", "dp=2,tp=2").kinds[("tp",)]
        ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
    """
    layouts_a = make_layouts(first, world_size=world_size)
    layouts_b = make_layouts(second, world_size=world_size)
    dense_a = layouts_a.dense
    dense_b = layouts_b.dense
    if dense_a.world_size != dense_b.world_size:
        raise LayoutError(f"{dense_a} and {dense_b} are not over the same ranks; give one world_size")
    axes = list(dict.fromkeys((*dense_a, *dense_b)))
    kinds: dict[tuple[str, ...], tuple[list[Group], list[Group]] | None] = {}
    if "dp" in axes:
        # If only one layout splits dp in two, both of its parts together are compared with the
        # other's dp.
        axes = [axis for axis in axes if axis not in DATA_PARTS]
    for axis in axes:
        kinds[axis,] = _find_difference((axis,), dense_a, dense_b)
    if "pp" in axes and "tp" in axes:
        kinds["pp", "tp"] = _find_difference(("pp", "tp"), dense_a, dense_b)
    if layouts_a.expert is not None and layouts_b.expert is not None:
        # An axis such as pp is in both the dense and the expert layout, where it has the same
        # groups.
        for axis in (*layouts_a.expert, *layouts_b.expert):
            if axis not in dense_a and axis not in dense_b:
                kinds[axis,] = _find_difference((axis,), layouts_a.expert, layouts_b.expert)
    return Comparison(layouts_a, layouts_b, kinds)


def _find_difference(
    axes: tuple[str, ...], layout_a: Layout, layout_b: Layout
) -> tuple[list[Group], list[Group]] | None:
    """Return the first groups of both layouts over some axes; None if all groups are equal.

    An axis that a layout does not have is of size 1; ``dp`` includes both parts that it may be
    split into.
    """
    names = {*axes}
    if "dp" in names:
        names.update(DATA_AXES)
    keys = []
    axes_by_side = []
    for layout in (layout_a, layout_b):
        # In each layout's own order: the same ranks may be written as pp x tp in one and as tp x pp
        # in the other.
        own_axes = [axis for axis in layout if axis in names]
        axes_by_side.append(own_axes)
        # Enumerating the groups of a million ranks would take seconds; the runs of the ranks are
        # compared instead.
        keys.append(make_partition_key(layout, *own_axes)[2] if own_axes else ())
    if keys[0] == keys[1]:
        return None
    groups_a = list_first_groups(layout_a, axes_by_side[0], limit=_SHOWN_GROUPS)
    groups_b = list_first_groups(layout_b, axes_by_side[1], limit=_SHOWN_GROUPS)
    return groups_a, groups_b


def _configure(parser: ArgumentParser) -> None:
    for name in ("--a", "--b"):
        parser.add_argument(name, metavar="SPEC", required=True, help="a layout, such as megatron tp=2,pp=4")
    parser.add_argument("--world-size", type=int_between(1), metavar="N", help="how many ranks there are")


def _run(arguments: Namespace) -> tuple[int, str]:
    comparison = compare(arguments.a, arguments.b, world_size=arguments.world_size)
    status = EXIT_MISMATCH if any(comparison.kinds.values()) else 0
    return status, f"{comparison}\n"


_SUMMARY = "which groups differ between two layouts; the exit status is 3 if some do"
COMMANDS = {"diff": (_SUMMARY, _configure, _run)}
"""The summary of the command, and the functions that declare its arguments and run it."""
