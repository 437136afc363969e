"""Compare two layouts: which kinds of groups have the same ranks in both, and which do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.dialects import DialectLayout, GroupSpec
from namedmesh.errors import LayoutError
from namedmesh.plan.core import resolve
from namedmesh.plan.members import Members, first_groups, in_words
from namedmesh.plan.tables import Document, Table, rendered

if TYPE_CHECKING:
    from namedmesh.layout import Layout

_EXAMPLES = 4
_PARTS = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Difference:
    """The groups over some axes in two layouts.

    Args:
        axes: the axes.
        same: whether the groups are the same ranks. Groups of two row-major layouts are either all the same,
            or no two of them are, those of a single rank aside.
        sizes: how many ranks a group has in each; None where there are no such axes.
        counts: how many groups there are in each; None likewise.
        examples: the first groups of each.
    """

    axes: tuple[str, ...]
    same: bool
    sizes: tuple[int | None, int | None]
    counts: tuple[int | None, int | None]
    examples: tuple[tuple[Members, ...], tuple[Members, ...]]


@dataclass(frozen=True)
class Comparison:
    """Two arrangements of one world, and their differences by kind of group."""

    first: DialectLayout
    second: DialectLayout
    kinds: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether all groups are the same."""
        return all(kind.same for kind in self.kinds)

    def __str__(self) -> str:
        """Return the tables that ``namedmesh diff`` prints."""
        return rendered(diff_document(self), "text").rstrip()


def compare(first: str, second: str, *, world_size: int | None = None) -> Comparison:
    """Compare the groups of two layouts, axis by axis, and the model replicas.

    Args:
        first: a spec string.
        second: another.
        world_size: how many ranks there are.

    Raises:
        SpecError: a spec string cannot be read.
        LayoutError: sizes that do not fit, or two worlds of different size.

    Example:
        >>> comparison = compare("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16)
        >>> {" x ".join(kind.axes): kind.same for kind in comparison.kinds}
        {'pp': False, 'dp': False, 'cp': True, 'tp': True, 'pp x tp': False}
    """
    one, other = resolve(first, world_size=world_size), resolve(second, world_size=world_size)
    if one.dense.world_size != other.dense.world_size:
        raise LayoutError(
            f"{one.dense} and {other.dense} are not over the same ranks; give sizes that fit one world_size"
        )
    axes = list(dict.fromkeys((*one.dense, *other.dense)))
    if "dp" in axes:  # where only one of them splits dp in two, both parts together are the other's dp
        axes = [axis for axis in axes if axis not in _PARTS]
    kinds_of_groups: list[tuple[str, ...]] = [(axis,) for axis in axes]
    kinds_of_groups += [("pp", "tp")] if {"pp", "tp"} <= {*one.dense, *other.dense} else []
    kinds = [_difference(one.dense, other.dense, axes) for axes in kinds_of_groups]
    if one.expert is not None and other.expert is not None:
        expert_axes = dict.fromkeys((*one.expert, *other.expert))
        kinds += [
            _difference(one.expert, other.expert, (axis,))
            for axis in expert_axes
            if (axis,) not in kinds_of_groups
        ]
    return Comparison(one, other, tuple(kinds))


def _difference(first: Layout, second: Layout, axes: tuple[str, ...]) -> Difference:
    names = {*axes, *(_PARTS if "dp" in axes else ())}
    both = [(layout, tuple(axis for axis in layout if axis in names)) for layout in (first, second)]
    # An axis that a layout does not have is one of size 1.
    partitions = [layout.partition(*own)[2] if own else () for layout, own in both]
    sizes = [layout.size(*own) if own else None for layout, own in both]
    counts = [layout.count(*own) if own else None for layout, own in both]
    examples = [
        tuple(first_groups(layout, GroupSpec("", own), _EXAMPLES)) if own else () for layout, own in both
    ]
    return Difference(
        axes,
        partitions[0] == partitions[1],
        (sizes[0], sizes[1]),
        (counts[0], counts[1]),
        (examples[0], examples[1]),
    )


def diff_document(comparison: Comparison) -> Document:
    """Write a comparison as text and tables."""
    head = "\n".join(
        f"{letter}: {side.dialect.name} {side.dense}"
        for letter, side in (("a", comparison.first), ("b", comparison.second))
    )
    differing = [kind for kind in comparison.kinds if not kind.same]
    table = Table(
        ("groups over", "size a", "size b", "groups a", "groups b", "ranks"),
        tuple(
            (" x ".join(kind.axes), *kind.sizes, *kind.counts, "same" if kind.same else "different")
            for kind in comparison.kinds
        ),
    )
    examples = [
        f"{' x '.join(kind.axes)}\n  a: {_shown(kind, 0)}\n  b: {_shown(kind, 1)}" for kind in differing
    ]
    summary = (
        f"{len(differing)} of {len(comparison.kinds)} kinds of groups differ"
        if differing
        else f"all {len(comparison.kinds)} kinds of groups are the same"
    )
    data = {
        "world_size": comparison.first.dense.world_size,
        "a": dict(comparison.first.dense.items()),
        "b": dict(comparison.second.dense.items()),
        "same": comparison.same,
        "kinds": [
            {**vars(kind), "examples": [[group[:16] for group in side] for side in kind.examples]}
            for kind in comparison.kinds
        ],
    }
    return Document((head, table, *examples, summary), lambda: data, lambda: table)


def _shown(kind: Difference, side: int) -> str:
    groups = kind.examples[side]
    count = kind.counts[side]
    if count is None:
        return "no such axis"
    more = f" and {count - len(groups)} more" if count > len(groups) else ""
    return " ".join(f"({in_words(group)})" for group in groups) + more
