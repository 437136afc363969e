"""Compare two layouts: which kinds of groups have the same ranks in both, and which do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from namedmesh.dialects import DialectLayout, GroupSpec
from namedmesh.errors import LayoutError
from namedmesh.plan.core import resolve
from namedmesh.plan.members import Groups, Members, in_words
from namedmesh.plan.spec import kept, raise_all
from namedmesh.plan.tables import Document, Table

if TYPE_CHECKING:
    from namedmesh.errors import NamedMeshError
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
    errors: list[NamedMeshError] = []
    with kept(errors):
        one = resolve(first, world_size=world_size)
    with kept(errors):
        other = resolve(second, world_size=world_size)
    raise_all(errors)
    if one.dense.world_size != other.dense.world_size:
        raise LayoutError(
            f"{one.dense} and {other.dense} are not over the same ranks; give sizes that fit one world_size"
        )
    axes = list(dict.fromkeys((*one.dense, *other.dense)))
    if "dp" in axes:  # where only one of them splits dp in two, both parts together are the other's dp
        axes = [axis for axis in axes if axis not in _PARTS]
    kinds_of_groups: list[tuple[str, ...]] = [(axis,) for axis in axes]
    kinds_of_groups += [("pp", "tp")] if {"pp", "tp"} <= {*one.dense, *other.dense} else []
    kinds = [_difference(axes, one.dense, other.dense) for axes in kinds_of_groups]
    if one.expert is not None and other.expert is not None:
        expert_axes = dict.fromkeys((*one.expert, *other.expert))
        own = [(axis,) for axis in expert_axes if (axis,) not in kinds_of_groups]
        kinds += [_difference(axes, one.expert, other.expert) for axes in own]
    return Comparison(one, other, tuple(kinds))


def _difference(axes: tuple[str, ...], *layouts: Layout) -> Difference:
    """Return whether two layouts have the same groups over some axes, and the size, count and first ones of each."""
    names = {*axes, *(_PARTS if "dp" in axes else ())}
    sides: list[tuple[Any, int | None, int | None, tuple[Members, ...]]] = []
    for layout in layouts:
        own = tuple(axis for axis in layout if axis in names)
        groups = Groups(GroupSpec("", own), layout)
        if own:
            first = tuple(groups.first(_EXAMPLES))
            sides.append((layout.partition(*own)[2], groups.size, groups.count, first))
        else:  # an axis that a layout does not have is one of size 1
            sides.append(((), None, None, ()))
    one, other = sides
    return Difference(axes, one[0] == other[0], (one[1], other[1]), (one[2], other[2]), (one[3], other[3]))


def diff_document(comparison: Comparison) -> Document:
    """Write a comparison as text and tables."""
    one, other = comparison.first, comparison.second
    head = f"a: {one.dialect.name} {one.dense}\nb: {other.dialect.name} {other.dense}"
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
    summary = f"all {len(comparison.kinds)} kinds of groups are the same"
    if differing:
        summary = f"{len(differing)} of {len(comparison.kinds)} kinds of groups differ"
    data = {
        "world_size": one.dense.world_size,
        "a": dict(one.dense.items()),
        "b": dict(other.dense.items()),
        "same": comparison.same,
        "kinds": [
            {**vars(kind), "examples": [[group[:16] for group in side] for side in kind.examples]}
            for kind in comparison.kinds
        ],
    }
    return Document((head, table, *examples, summary), lambda: data, lambda: table)


def _shown(kind: Difference, side: int) -> str:
    groups, count = kind.examples[side], kind.counts[side]
    if count is None:
        return "no such axis"
    more = f" and {count - len(groups)} more" if count > len(groups) else ""
    return " ".join(f"({in_words(group)})" for group in groups) + more
