"""The dialects: each module answers for one legacy API from a :class:`namedmesh.NamedMesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from namedmesh.plan import Comparison

__all__ = ["diff"]


def diff(a: str, b: str, *, world_size: int | None = None) -> Comparison:
    """Return which groups differ between two dialects, so that a move from one to the other is never silent.

    Needs neither torch nor a process group; ``python -m namedmesh diff`` prints the same.

    Args:
        a: a dialect and sizes, such as ``"megatron tp=2,pp=4"``; the dialects are megatron, deepspeed,
            fairscale, ezpz, torchtitan and process_groups. Without a dialect, the axes of a mesh, slowest first.
        b: another.
        world_size: how many ranks there are; by default as many as the sizes need.

    Returns:
        For each kind of group whether it is the same ranks in both, with the first groups of either.

    Raises:
        UsageError: a text cannot be read.
        LayoutError: sizes that do not fit, or two worlds of different size.

    Example:
        >>> found = diff("megatron tp=2,pp=4", "fairscale tp=2,pp=4", world_size=16)
        >>> found.same, [kind.axes for kind in found.kinds if not kind.same]
        (False, [('pp',), ('dp',), ('pp', 'tp')])
        >>> diff("fairscale tp=2", "ezpz tp=2", world_size=4).same
        True
    """
    from namedmesh.plan import compare

    return compare(a, b, world_size=world_size)
