"""Two layouts side by side: which kinds of groups are the same ranks in both, and which are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.dialects import Arrangement, Kind
from namedmesh.errors import LayoutError
from namedmesh.plan.core import resolve
from namedmesh.plan.members import Members, first_groups, in_words
from namedmesh.plan.tables import Document, Table, rendered

if TYPE_CHECKING:
    from namedmesh.layout import Layout

__all__ = ["Comparison", "Difference", "compare", "diff_document"]

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

    first: Arrangement
    second: Arrangement
    kinds: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether all groups are the same."""
        return all(kind.same for kind in self.kinds)

    def __str__(self) -> str:
        """The tables that ``namedmesh diff`` prints."""
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
        >>> found = compare("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16)
        >>> {" x ".join(kind.axes): kind.same for kind in found.kinds}
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
    chosen: list[tuple[str, ...]] = [(axis,) for axis in axes]
    chosen += [("pp", "tp")] if {"pp", "tp"} <= {*one.dense, *other.dense} else []
    kinds = [_difference(one.dense, other.dense, axes) for axes in chosen]
    if one.expert is not None and other.expert is not None:
        more = dict.fromkeys(axis for axis in (*one.expert, *other.expert) if (axis,) not in chosen)
        kinds += [_difference(one.expert, other.expert, (axis,)) for axis in more]
    return Comparison(one, other, tuple(kinds))


def _difference(one: Layout, other: Layout, axes: tuple[str, ...]) -> Difference:
    sides = [_side(layout, axes) for layout in (one, other)]
    # An axis that a layout does not have is one of size 1.
    keys = [layout.partition(*here)[2] if here else () for layout, here, _, _, _ in sides]
    return Difference(
        axes,
        keys[0] == keys[1],
        (sides[0][2], sides[1][2]),
        (sides[0][3], sides[1][3]),
        (sides[0][4], sides[1][4]),
    )


def _side(
    layout: Layout, axes: tuple[str, ...]
) -> tuple[Layout, tuple[str, ...], int | None, int | None, tuple[Members, ...]]:
    wanted = {*axes, *(_PARTS if "dp" in axes else ())}
    here = tuple(axis for axis in layout if axis in wanted)
    if not here:
        return layout, here, None, None, ()
    groups = tuple(first_groups(layout, Kind("", here), _EXAMPLES))
    return layout, here, layout.size(*here), layout.count(*here), groups


def diff_document(found: Comparison) -> Document:
    """A comparison in words and tables."""
    head = "\n".join(
        f"{letter}: {side.dialect.name} {side.dense}"
        for letter, side in (("a", found.first), ("b", found.second))
    )
    differing = [kind for kind in found.kinds if not kind.same]
    table = Table(
        ("groups over", "size a", "size b", "groups a", "groups b", "ranks"),
        tuple(
            (" x ".join(kind.axes), *kind.sizes, *kind.counts, "same" if kind.same else "different")
            for kind in found.kinds
        ),
    )
    examples = [
        f"{' x '.join(kind.axes)}\n  a: {_shown(kind, 0)}\n  b: {_shown(kind, 1)}" for kind in differing
    ]
    verdict = (
        f"{len(differing)} of {len(found.kinds)} kinds of groups differ"
        if differing
        else f"all {len(found.kinds)} kinds of groups are the same"
    )
    data = {
        "world_size": found.first.dense.world_size,
        "a": dict(found.first.dense.items()),
        "b": dict(found.second.dense.items()),
        "same": found.same,
        "kinds": [
            {
                "axes": list(kind.axes),
                "same": kind.same,
                "sizes": list(kind.sizes),
                "counts": list(kind.counts),
                "examples": [[list(group[:16]) for group in side] for side in kind.examples],
            }
            for kind in found.kinds
        ],
    }
    return Document((head, table, *examples, verdict), lambda: data, lambda: table)


def _shown(kind: Difference, side: int) -> str:
    groups = kind.examples[side]
    count = kind.counts[side]
    if count is None:
        return "no such axis"
    more = f" and {count - len(groups)} more" if count > len(groups) else ""
    return " ".join(f"({in_words(group)})" for group in groups) + more
