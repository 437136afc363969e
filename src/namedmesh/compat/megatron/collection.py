"""Process groups handed from call to call instead of kept in a global state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from namedmesh.compat.megatron.lifecycle import bind
from namedmesh.compat.megatron.state import STATE
from namedmesh.errors import LayoutError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from namedmesh.mesh import NamedMesh

__all__ = ["ProcessGroupCollection", "process_groups"]

# What each field is in the state.
_FIELDS = {
    "tp": "tp_group",
    "pp": "pp_group",
    "mp": "mp_group",
    "embd": "embedding_group",
    "pos_embd": "position_embedding_group",
    "cp": "cp_group",
    "tp_cp": "tp_cp_group",
    "hcp": "cp_levels",
    "ep": "ep_group",
    "expt_tp": "etp_group",
    "tp_ep": "etp_ep_group",
    "tp_ep_pp": "etp_ep_pp_group",
    "tp_dp_cp": "tp_dp_cp_group",
    "dp": "dp_group",
    "dp_cp": "dp_cp_group",
    "expt_dp": "edp_group",
    "intra_dp_cp": "intra_dp_cp_group",
    "intra_expt_dp": "intra_edp_group",
    "inter_dist_opt": "inter_edp_group",
    "intra_dist_opt": "optimizer_group",
}


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
        said = [f"{name}({_shown(vars(self)[name])})" for name in _FIELDS if name in vars(self)]
        return f"ProcessGroupCollection({', '.join(said) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """The groups that the accessors answer with at this moment.

        Args:
            required_pgs: which; by default all. One that there is not, such as the embedding group in the
                middle of a pipeline, is None.

        Raises:
            LayoutError: a name that is none of the groups.
        """
        chosen = list(_FIELDS) if required_pgs is None else list(required_pgs)
        _check(chosen)
        return cls(**{name: STATE.read(_FIELDS[name]) for name in chosen})


def process_groups(mesh: NamedMesh) -> ProcessGroupCollection:
    """Megatron's groups on a mesh; communicates if the mesh was never bound.

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


def _shown(group: Any) -> object:
    if isinstance(group, list):
        return [_shown(each) for each in group]
    return None if group is None else group.size()
