"""A replacement for Megatron's ``create_group`` that returns the process groups of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from namedmesh._internal import call_before_close, get_groups
from namedmesh._torch import is_registered
from namedmesh.compat.megatron.ranks import AxesByRanks
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions


class GroupFactory:
    """Replaces ``create_group`` while ``initialize_model_parallel`` runs.

    There is one group for each set of ranks. As upstream, every rank asks for the groups of all
    ranks, in the same order. The first request for a group over some axes makes the groups over
    these axes on all ranks. Upstream's own function makes the other groups: those over ranks that
    differ along no axes (embeddings), duplicates of a group, and groups with settings of their own.

    Args:
        module: the parallel state, upstream's or our fallback.

    Attributes:
        axes_by_ranks: the axes of each set of ranks, which the generators of the ranks fill.
        mesh: the mesh whose groups are returned, once :meth:`use` was called.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = vars(module)
        self.upstream_create_group = module.create_group
        self.axes_by_ranks: AxesByRanks = {}
        self.mesh: Any = None
        self._groups: dict[Any, Any] = {}
        self._default_options = False

    def use(self, mesh: NamedMesh, *, default_options: bool = False) -> None:
        """Set the mesh whose groups are returned.

        Args:
            mesh: the mesh.
            default_options: whether groups over several axes have default options, instead of those
                of their axes.
        """
        self.mesh = mesh
        self._default_options = default_options
        # Upstream concatenates several sets to one of all ranks, which then has no axes of its own.
        self.axes_by_ranks.setdefault(tuple(mesh.layout.ranks), (mesh.layout, mesh.layout.axes))

    def create_group(  # noqa: PLR0917  upstream's signature
        self,
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: Any = None,
    ) -> Any:
        """Return the mesh's group over ``ranks``; on ranks outside, ``NON_GROUP_MEMBER``.

        Collective: every rank must call it.
        """
        # The purpose of an all-gather group is to be another communicator over the ranks of an
        # existing group.
        is_duplicate = str(group_desc).endswith("_AG")
        if is_duplicate or pg_options is not None or backend not in {None, "gloo"}:
            return self._create_upstream_group(
                ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
            )
        members = tuple(sorted(ranks))
        layout_and_axes = self.axes_by_ranks.get(members)
        key = (layout_and_axes or members, backend)
        if key not in self._groups:
            self._groups[key] = self._make_group(members, layout_and_axes, backend, group_desc)
        if self.mesh.global_rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self._groups[key]
        # Upstream lists the groups of this rank, after None, which is the default group there.
        listed = self.module.get("_global_process_group_list") or [None]
        if group not in listed:
            self.module["_global_process_group_list"] = [*listed, group]
        return group

    def _make_group(self, members: Sequence[int], layout_and_axes: Any, backend: Any, group_desc: Any) -> Any:
        """Create the groups over the axes, and return this rank's; without axes, one group.

        Collective: every rank must call it.
        """
        groups = get_groups(self.mesh)
        if len(members) == 1:
            return groups.get_self_group()
        if layout_and_axes is None:
            timeout = groups.defaults.timeout
            return self._create_upstream_group(members, timeout, backend, None, False, group_desc)
        layout, axes = layout_and_axes
        has_default_options = self._default_options and len(axes) > 1
        options = GroupOptions() if has_default_options else groups.get_options(axes)
        if backend == "gloo":
            options = groups.make_gloo_options(options)
        return groups.get_or_create(layout, axes, options)

    def _create_upstream_group(self, ranks: Any, *arguments: Any) -> Any:
        """Create a group with upstream's function, to be destroyed when the mesh is closed.

        Collective: every rank must call it.
        """
        group = self.upstream_create_group(list(ranks), *arguments)
        if dist.get_rank() in ranks:
            call_before_close(self.mesh, partial(_destroy_group, group))
        return group


def _destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group unless it was destroyed already."""
    if is_registered(group):
        dist.destroy_process_group(group)
