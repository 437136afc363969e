"""The torch meshes of a named mesh: one over the groups of each view, and what is sliced off them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from namedmesh._torch import concatenate_meshes, flattened, without_modes
from namedmesh.views import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.distributed as dist

    from namedmesh.groups import Groups
    from namedmesh.layout import Layout
    from namedmesh.options import GroupOptions
    from namedmesh.views import Views


class Roots(dict[object, DeviceMesh]):
    """torch's mesh of each view by the view's name, and those with products in the place of their axes.

    Args:
        views: the layouts and the products.
        groups: this mesh's process groups.
        device_type: the kind of device.
        options_of: the options of the group over some axes.
    """

    def __init__(
        self,
        views: Views,
        groups: Groups,
        device_type: str,
        options_of: Callable[[tuple[str, ...]], GroupOptions],
    ) -> None:
        super().__init__()
        self.views, self.groups, self.device_type, self.options_of = views, groups, device_type, options_of

    def make_group(self, layout: Layout, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return this rank's group over some axes, on which all ranks agree; and make the gloo group beside it."""
        options = self.options_of(axes)
        if options.gloo_twin:
            self.groups.over(layout, axes, self.groups.gloo_options(options))
        return self.groups.over(layout, axes, options)

    @without_modes
    def make(self, layout: Layout) -> DeviceMesh:
        """Return the torch mesh over the axes of a layout, on groups that exist or are made now.

        ``init_device_mesh`` makes those of several axes at once where all of them are new; it would make one more for each
        axis of size 1, and for sets of ranks that have a group.
        """
        root: DeviceMesh | None = None
        large = {axis: size for axis, size in layout.items() if size > 1}
        keys = {axis: self.groups.key(layout, (axis,), self.options_of((axis,))) for axis in large}
        overrides = self.groups.overrides(keys)
        if len(large) > 1 and overrides is not None:
            root = init_device_mesh(
                self.device_type,
                tuple(large.values()),
                mesh_dim_names=tuple(large),
                backend_override=overrides or None,
            )
            for axis, key in keys.items():
                self.groups.take(key, axis, partial(root.get_group, axis))
        for axis in layout:
            self.make_group(layout, (axis,))
        if root is not None and len(large) == len(layout):
            return root
        return self.over(layout, {axis: (axis,) for axis in layout})

    @without_modes
    def over(self, layout: Layout, axes: Mapping[str, tuple[str, ...]]) -> DeviceMesh:
        """Return a torch mesh of all ranks of a layout, with these names, over groups that exist."""
        groups: Any = [self.groups.find(layout, each, self.options_of(each)) for each in axes.values()]
        ranks = torch.arange(layout.ranks.start, layout.ranks.stop, dtype=torch.int, device="cpu")
        return DeviceMesh.from_group(
            groups,
            self.device_type,
            mesh=ranks.reshape([layout.size(*each) for each in axes.values()]),
            mesh_dim_names=tuple(axes),
        )

    @without_modes
    def slice(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh over some axes and flattened products.

        Where the axes of each product adjoin it is a slice of a root that has the products in their place, which public
        calls make.
        """
        view, _ = self.views.find(names)
        root, layout = self[view], self.views.layouts[view]
        self.views.check_order(names, root.mesh_dim_names or ())
        products = {name: axes for name, axes in self.views.products.items() if name in names}
        if not products:
            return root[names]
        together = merged(layout, products)
        if together is not None:
            key = tuple(together.items())
            if key not in self:
                self[key] = self.over(layout, together)
            return self[key][names]
        parts = []
        for name in names:
            axes = products.get(name)
            if axes is None:
                parts.append(root[name])
            else:
                group: Any = self.groups.find(layout, axes, self.options_of(axes))
                parts.append(flattened(root, axes, name, group))
        return parts[0] if len(parts) == 1 else concatenate_meshes(parts)
