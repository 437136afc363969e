"""Megatron's ``ProcessGroupCollection``: groups as arguments of a call instead of a global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.megatron.initialize import bind
from namedmesh.compat.megatron.state import STATE
from namedmesh.dialects import MEGATRON_GROUPS
from namedmesh.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.mesh import NamedMesh

__all__ = ["ProcessGroupCollection", "process_groups"]

# In the order of the original.
_ORDER = (
    *("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "hcp"),
    *("ep", "expt_tp", "tp_ep", "tp_ep_pp"),
    *(
        "tp_dp_cp",
        "dp",
        "dp_cp",
        "expt_dp",
        "intra_dp_cp",
        "intra_expt_dp",
        "inter_dist_opt",
        "intra_dist_opt",
    ),
)
_SLOTS = {row.field: row.slot for row in MEGATRON_GROUPS}
_FIELDS = {field: _SLOTS[field] for field in _ORDER}
"""The slot of the state that each field is."""


class ProcessGroupCollection:
    """Some or all of Megatron's groups, as attributes; megatron-core's layers take it as ``pg_collection=``.

    Args:
        **groups: the groups by name: ``tp``, ``pp``, ``dp_cp``, ``expt_dp`` and so on. A group that is not
            given is no attribute, so that ``hasattr`` tells.

    Raises:
        LayoutError: a name that is none of the groups.

    Example:
        >>> ProcessGroupCollection(hcp=None)
        ProcessGroupCollection(hcp(None))
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **groups: Any) -> None:
        _check(groups)
        vars(self).update(groups)

    def __repr__(self) -> str:
        shown = [f"{name}({_sizes(vars(self)[name])})" for name in _FIELDS if name in vars(self)]
        return f"ProcessGroupCollection({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Return the groups of the accessors at this moment.

        Args:
            required_pgs: which; by default all. One that there is not, such as the embedding group in the
                middle of a pipeline, is None.

        Raises:
            LayoutError: a name that is none of the groups.
        """
        names = list(_FIELDS) if required_pgs is None else list(required_pgs)
        _check(names)
        return cls(**{name: STATE.read(_FIELDS[name]) for name in names})


def process_groups(mesh: NamedMesh) -> ProcessGroupCollection:
    """Return Megatron's groups on a mesh; communicates if the mesh was never bound.

    The accessors stay bound to what they were bound to.

    Args:
        mesh: the mesh, as :func:`namedmesh.compat.megatron.bind` takes it; bound already, or bound now with
            defaults.

    Returns:
        All groups; None where this rank is in none of a kind.

    Example:
        >>> import namedmesh, torch.distributed as dist
        >>> mesh = namedmesh.init_mesh(pp=1, dp=-1, tp=1, device="cpu")
        >>> process_groups(mesh).tp is mesh.group("tp")
        True
        >>> mesh.close()
        >>> dist.destroy_process_group()
    """
    with bind(mesh), mesh:
        return ProcessGroupCollection.use_mpu_process_groups()


def _check(names: Any) -> None:
    problems = [
        f"{name!r} is none of Megatron's groups, which are {', '.join(_FIELDS)}{did_you_mean(name, _FIELDS)}"
        for name in names
        if name not in _FIELDS
    ]
    if problems:
        raise LayoutError(*problems)


def _sizes(group: Any) -> object:
    if isinstance(group, list):
        return [_sizes(each) for each in group]
    return None if group is None else group.size()
