"""Which axes of a NamedMesh DeepSpeed's kinds of parallelism are, and the groups over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from namedmesh.compat.deepspeed.process_topology import ProcessTopology
from namedmesh.errors import LayoutError, MeshError, did_you_mean
from namedmesh.layout import Layout
from namedmesh.mesh import NamedMesh
from namedmesh.views import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

__all__ = ["Places", "checked_mesh", "group_over", "places_of", "topology_of"]

_NAMES = {
    "pipe": ("pp", "pipe"),
    "data": ("dp", "data", "dp_replicate", "dp_shard"),
    "model": ("tp", "model"),
    "sequence": ("sp", "cp"),
}
# Axes that are one kind of parallelism together; two others of the same kind are a mistake.
_TOGETHER = ({"dp_replicate", "dp_shard"}, {"sp", "cp"})
_EXPERT = ("edp", "ep", "etp")


@dataclass(frozen=True)
class Places:
    """The axes of a mesh that stand for each kind of parallelism, in the order of the layout; none if it has none.

    Args:
        pipe: pp, or pipe.
        data: dp, or data, or dp_replicate and dp_shard together.
        model: tp, or model.
        sequence: sp (DeepSpeed's Ulysses), cp, or both: the ranks have the same parameters and a part of each
            sequence, so their gradients are summed as those of data-parallel ranks are.
        other: what DeepSpeed has no word for.
    """

    pipe: tuple[str, ...]
    data: tuple[str, ...]
    model: tuple[str, ...]
    sequence: tuple[str, ...]
    other: tuple[str, ...]

    def check_no_others(self) -> None:
        """Refuse axes that DeepSpeed has no word for.

        Raises:
            LayoutError: there are some; all of them.
        """
        words = [name for names in _NAMES.values() for name in names]
        problems = [
            f"axis {axis!r} is one of the experts', and DeepSpeed makes its own groups for them; leave it out of the mesh"
            if axis in _EXPERT
            else f"axis {axis!r} is no kind of parallelism of DeepSpeed's, which are over {', '.join(words)}"
            f"{did_you_mean(axis, words)}"
            for axis in self.other
        ]
        if problems:
            raise LayoutError(*problems)


def places_of(layout: Layout) -> Places:
    """The axes of a layout by DeepSpeed's kinds of parallelism.

    Raises:
        LayoutError: two axes stand for the same kind.

    Example:
        >>> places_of(Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)).data
        ('dp_replicate', 'dp_shard')
    """
    found = {kind: tuple(axis for axis in layout.axes if axis in names) for kind, names in _NAMES.items()}
    problems = [
        f"axes {named(axes)} of {layout} both are what DeepSpeed calls {kind}; use one of them"
        for kind, axes in found.items()
        if len(axes) > 1 and set(axes) not in _TOGETHER
    ]
    if problems:
        raise LayoutError(*problems)
    known = {axis for axes in found.values() for axis in axes}
    return Places(**found, other=tuple(axis for axis in layout.axes if axis not in known))


def topology_of(layout: Layout) -> tuple[ProcessTopology, dict[str, tuple[str, ...]]]:
    """A topology over the ranks of a layout, and the layout's axes for each of its own.

    Axes that DeepSpeed has no word for keep their names. A grid needs pipe and data: one that the layout lacks has
    size 1.

    Raises:
        LayoutError: two axes stand for the same kind; dp_replicate and dp_shard do not adjoin, and so are no axis.

    Example:
        >>> topology_of(Layout(dp=4, tp=2))
        (ProcessTopology(axes=['pipe', 'data', 'model'], dims=[1, 4, 2]), {'pipe': (), 'data': ('dp',), 'model': ('tp',)})
    """
    places = places_of(layout)
    kinds = {"pipe": places.pipe, "data": places.data, "model": places.model}
    words = {axis: kind for kind, own in kinds.items() for axis in own}
    axes = {kind: () for kind in ("pipe", "data") if not kinds[kind]} | {
        # A pair of axes stands where the first of them does.
        words.get(axis, axis): kinds.get(words.get(axis, ""), (axis,))
        for axis in layout.axes
    }
    topology = ProcessTopology(list(axes), [layout.size(*own) if own else 1 for own in axes.values()])
    own_names = dict(zip(axes, topology.layout.axes, strict=True))
    if any(
        own and topology.layout.partition(own_names[axis]) != layout.partition(*own)
        for axis, own in axes.items()
    ):
        raise LayoutError(
            f"axes {named(places.data)} do not adjoin in {layout}, and a topology of DeepSpeed's has one data axis; put "
            "one right after the other"
        )
    return topology, axes


def group_over(mesh: NamedMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over some axes of a mesh, made unless it exists; communicates.

    Args:
        mesh: the mesh, whose group it is.
        axes: in any order; for none, the group of this rank alone.
    """
    layout = mesh.layout
    ordered = tuple(axis for axis in layout.axes if axis in axes)
    if ordered:
        return mesh.pool.make(layout, ordered, mesh.options_of(ordered))
    # The pool has a group of one for any axis of size 1.
    alone = Layout(alone=1, others=layout.world_size, rank_offset=layout.rank_offset)
    return mesh.pool.make(alone, ("alone",), mesh.pool.defaults)


def checked_mesh(mesh: object, call: str) -> NamedMesh:
    """An open mesh.

    Raises:
        MeshError: it is something else, or closed.
    """
    if not isinstance(mesh, NamedMesh):
        raise MeshError(
            f"{call} got a {type(mesh).__name__}; give it a NamedMesh, such as NamedMesh.from_device_mesh(...)"
        )
    if mesh.closed:
        raise MeshError(f"the mesh over {mesh.layout} was closed; give {call} an open one")
    return mesh
