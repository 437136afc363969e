"""Compare two layouts: which kinds of groups have the same ranks in both, and which do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from namedmesh.errors import LayoutError
from namedmesh.plan.describe import first_groups, in_words
from namedmesh.plan.spec import resolve

if TYPE_CHECKING:
    from namedmesh.dialects import DialectLayout
    from namedmesh.layout import Layout

_SHOWN = 4
_PARTS = ("dp", "dp_replicate", "dp_shard")


class Difference(NamedTuple):
    """The groups over some axes in two layouts: whether they are the same ranks, and the first groups of each."""

    axes: tuple[str, ...]
    same: bool
    first: tuple[tuple[int, ...], ...]
    second: tuple[tuple[int, ...], ...]


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
        first: axes and sizes, or a dialect and sizes, as for :func:`namedmesh.plan.make_plan`.
        second: another.
        world_size: how many ranks there are.

    Raises:
        UsageError: a layout cannot be read.
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
        axes = [axis for axis in axes if axis not in _PARTS[1:]]
    kinds: list[tuple[str, ...]] = [(axis,) for axis in axes]
    if {"pp", "tp"} <= {*one.dense, *other.dense}:
        kinds.append(("pp", "tp"))
    found = [_difference(names, one.dense, other.dense) for names in kinds]
    if one.expert is not None and other.expert is not None:
        own = [axis for axis in dict.fromkeys((*one.expert, *other.expert)) if axis not in axes]
        found += [_difference((axis,), one.expert, other.expert) for axis in own]
    return Comparison(one, other, tuple(found))


def _difference(axes: tuple[str, ...], one: Layout, other: Layout) -> Difference:
    """Return whether two layouts have the same groups over some axes; one that they do not have is of size 1."""
    names = {*axes, *(_PARTS if "dp" in axes else ())}
    sides = [tuple(axis for axis in layout if axis in names) for layout in (one, other)]
    keys = [layout.partition(*own)[2] if own else () for layout, own in zip((one, other), sides, strict=True)]
    first, second = first_groups(one, sides[0], _SHOWN), first_groups(other, sides[1], _SHOWN)
    return Difference(axes, keys[0] == keys[1], tuple(first), tuple(second))


def comparison_text(comparison: Comparison) -> str:
    """Write a comparison for people."""
    lines = [f"a: {comparison.first.dialect.name} {comparison.first.dense}"]
    lines += [f"b: {comparison.second.dialect.name} {comparison.second.dense}", ""]
    for kind in comparison.kinds:
        lines.append(f"{' x '.join(kind.axes)}: {'same' if kind.same else 'different'}")
        for name, groups in (("a", kind.first), ("b", kind.second)):
            if not kind.same:
                lines.append(f"  {name}: {' '.join(f'({in_words(group)})' for group in groups)} ...")
    differing = sum(not kind.same for kind in comparison.kinds)
    return "\n".join([*lines, "", f"{differing} of {len(comparison.kinds)} kinds of groups differ"])
