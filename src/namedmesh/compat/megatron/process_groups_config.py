"""Megatron's ``ProcessGroupCollection``: groups as arguments of a call instead of a global state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from namedmesh._torch import state_of_default_group
from namedmesh.compat.megatron import release
from namedmesh.compat.megatron.initialize import bind
from namedmesh.compat.megatron.state import STATE
from namedmesh.dialects import MEGATRON_GROUPS
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.groups import GroupPool
from namedmesh.making import group_of_one

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch.distributed as dist

    from namedmesh.mesh import NamedMesh

__all__ = ["MultiModuleProcessGroupCollection", "ProcessGroupCollection", "fields", "process_groups"]

# fmt: off
_NAMES = [
    "tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "hcp", "ep", "expt_tp", "tp_ep", "tp_ep_pp",
    "tp_ep_pp_with_egtp_remat", "tp_dp_cp", "dp", "dp_cp", "dp_cp_gtp_remat", "dp_cp_ag", "gtp_remat", "expt_gtp_remat",
    "expt_dp", "expt_dp_gtp_remat", "expt_dp_ag", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt",
]
# fmt: on
_SLOTS = {row.field: row.slot for row in MEGATRON_GROUPS if row.field}
_SHARED = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "gtp_remat", "expt_gtp_remat")
_OPTIMIZER = {
    **{name: name for name in (*_SHARED, "inter_dist_opt", "mp", "intra_dist_opt")},
    "expt_tp_pp": "tp_ep_pp",
    "expt_tp_pp_with_egtp_remat": "tp_ep_pp_with_egtp_remat",
}
_DDP = (*_SHARED, "inter_dist_opt", "tp", "pp", "ep")


def fields() -> list[str]:
    """Return the names of the groups of a collection, in the order of the original, in the selected release."""
    return [name for name in _NAMES if release.newest() or not ("gtp" in name or name.endswith("_ag"))]


class ProcessGroupCollection:
    """Some or all of Megatron's groups, as attributes; megatron-core's layers take it as ``pg_collection=``.

    Args:
        **groups: the groups by name: ``tp``, ``pp``, ``dp_cp``, ``expt_dp`` and so on. One that is not given is
            None; before release 0.19 it is no attribute.

    Raises:
        LayoutError: a name that is none of the groups.

    Example:
        >>> ProcessGroupCollection(hcp=None).hcp is None
        True
    """

    def __init__(self, **groups: Any) -> None:
        _check(groups)
        vars(self).update(groups)

    def __getattr__(self, name: str) -> Any:
        if release.newest() and name in _NAMES:
            return None
        raise AttributeError(f"the collection has no group {name!r}{did_you_mean(name, _NAMES)}")

    def __repr__(self) -> str:
        given = [(name, vars(self)[name]) for name in _NAMES if name in vars(self)]
        shown = [
            f"{name}({_sizes(group)})" for name, group in given if group is not None or not release.newest()
        ]
        return f"ProcessGroupCollection({', '.join(shown) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(cls, required_pgs: Sequence[str] | None = None) -> ProcessGroupCollection:
        """Return the groups of the accessors at this moment.

        Args:
            required_pgs: the names of the groups, by default all; LayoutError is raised for any other. A group that
                there is not, such as the embedding group in the middle of a pipeline, is None.
        """
        names = fields() if required_pgs is None else list(required_pgs)
        _check(names)
        # The second groups for all-gathers, which have no slot, are the user's to make.
        return cls(**{name: getattr(STATE, _SLOTS[name]) if name in _SLOTS else None for name in names})

    @staticmethod
    def is_gtp_remat_active(process_group_dict: Mapping[str, Any]) -> bool:
        """Return whether a group over which weights are sharded, of the dictionaries below, has several ranks."""
        groups = (process_group_dict.get(key) for key in ("gtp_remat_group", "expt_gtp_remat_group"))
        return any(group is not None and group.size() > 1 for group in groups)

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Any]:
        """Return the groups of an optimizer, by the names that megatron-core has for them.

        Args:
            pg_collection: the groups to take them from; None for those of the accessors.
            model_chunks: the parts of the model; the first tells whether there are several optimizer instances.
            use_gloo_process_groups: with gloo groups, which a collection does not have.

        Raises:
            LayoutError: a group that is needed is not in the collection.
        """
        ddp_config = getattr(model_chunks[0], "ddp_config", None)
        if pg_collection is None:
            given = _of_accessors(_OPTIMIZER.values(), ddp_config)
        else:
            config = _config_of(model_chunks[0])
            given = _of_collection(pg_collection, config, ddp_config, ("expt_dp", "mp", "tp_ep_pp"))
            given.setdefault("tp_ep_pp_with_egtp_remat", given["tp_ep_pp"])
            if ddp_config is None or not ddp_config.use_distributed_optimizer:
                given["intra_dist_opt"] = None
            _check_given(given, ("intra_dist_opt",))
            if use_gloo_process_groups:
                raise LayoutError(
                    "a collection has no gloo groups; say use_gloo_process_groups=False, or leave pg_collection out"
                )
        result = {f"{key}_group": given.get(name) for key, name in _OPTIMIZER.items()}
        gloo = use_gloo_process_groups and not ProcessGroupCollection.is_gtp_remat_active(result)
        for slot, name in (("intra_dp_cp_gloo", "intra_dp_cp"), ("intra_edp_gloo", "intra_expt_dp")):
            result[f"{name}_group_gloo"] = STATE.require(slot) if gloo else None
        return result

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, Any]:
        """Return the groups of Megatron's ``DistributedDataParallel``, by the names that megatron-core has for them.

        Args:
            pg_collection: the groups to take them from; None for those of the accessors. Where it has none of the
                experts' replicas, a group of this rank alone stands in.
            config: the configuration of the model, for its context-parallel size.
            ddp_config: the configuration of the data parallelism.

        Raises:
            LayoutError: a group that is needed is not in the collection.
        """
        if pg_collection is not None:
            if vars(pg_collection).get("expt_dp") is None:
                pg_collection = ProcessGroupCollection(**{**vars(pg_collection), "expt_dp": _alone()})
            given = _of_collection(pg_collection, config, ddp_config, ("tp", "pp", "ep"))
            return {f"{name}_group": given.get(name) for name in _DDP}
        instance = ("intra_dist_opt",) if ddp_config.use_distributed_optimizer else ()
        given = _of_accessors((*_DDP, *instance), ddp_config)
        return {f"{name}_group": given.get(name) for name in (*_DDP, "intra_dist_opt")}


@dataclass
class MultiModuleProcessGroupCollection:
    """The collections of several modules that this rank is part of, such as an encoder and a language model.

    Args:
        module_pgs: the collection of each module, by its name.
        language_model_module_name: which of them is the language model; None if this rank has none.

    Raises:
        LayoutError: no module, or a language model that is none of them.

    Example:
        >>> groups = MultiModuleProcessGroupCollection({"encoder": ProcessGroupCollection(tp=None)})
        >>> list(groups.keys()), groups.has_language_model()
        (['encoder'], False)
    """

    module_pgs: dict[str, ProcessGroupCollection]
    language_model_module_name: str | None = None

    def __post_init__(self) -> None:
        if not self.module_pgs:
            raise LayoutError("module_pgs is empty; give the collection of at least one module")
        if self.language_model_module_name is not None:
            self.get_module_collection(self.language_model_module_name)

    def get_language_model_collection(self) -> ProcessGroupCollection:
        """Return the collection of the language model; raise LayoutError where this rank has none."""
        if self.language_model_module_name is None:
            raise LayoutError("this rank has no language model; ask has_language_model() first")
        return self.module_pgs[self.language_model_module_name]

    def get_language_model_cp_size(self) -> int:
        """Return the context-parallel size of the language model."""
        return int(self.get_language_model_collection().cp.size())

    def has_language_model(self) -> bool:
        """Return whether this rank has a language model."""
        return self.language_model_module_name is not None

    def get_module_collection(self, module_name: str) -> ProcessGroupCollection:
        """Return the collection of a module; raise LayoutError where there is no such module."""
        if module_name not in self.module_pgs:
            raise LayoutError(
                f"{module_name!r} is none of the modules {', '.join(self.module_pgs)}"
                f"{did_you_mean(module_name, self.module_pgs)}"
            )
        return self.module_pgs[module_name]

    def __len__(self) -> int:
        return len(self.module_pgs)

    def __getitem__(self, module_name: str) -> ProcessGroupCollection:
        return self.module_pgs[module_name]

    def __iter__(self) -> Iterator[ProcessGroupCollection]:
        return iter(self.module_pgs.values())

    def keys(self) -> Iterable[str]:
        """Return the names of the modules."""
        return self.module_pgs.keys()

    def values(self) -> Iterable[ProcessGroupCollection]:
        """Return the collections."""
        return self.module_pgs.values()

    def items(self) -> Iterable[tuple[str, ProcessGroupCollection]]:
        """Return the names of the modules and their collections."""
        return self.module_pgs.items()

    def __repr__(self) -> str:
        name = self.language_model_module_name
        language = f", language_model_module_name='{name}'" if name else ""
        return f"MultiModuleProcessGroupCollection(modules=[{', '.join(self.module_pgs)}]{language})"


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


def _check(names: Iterable[str]) -> None:
    known = fields()
    _raise_all(
        f"{name!r} is none of Megatron's groups, which are {', '.join(known)}{did_you_mean(name, known)}"
        for name in names
        if name not in known
    )


def _sizes(group: Any) -> object:
    if isinstance(group, list):
        return [_sizes(each) for each in group]
    return None if group is None else group.size()


def _several(ddp_config: Any) -> bool:
    return bool(getattr(ddp_config, "num_distributed_optimizer_instances", 1) > 1)


def _of_accessors(names: Iterable[str], ddp_config: Any) -> dict[str, Any]:
    """Return groups of the accessors, all of which there have to be."""
    names = [name for name in names if name != "inter_dist_opt" or _several(ddp_config)]
    return {name: STATE.require(_SLOTS[name]) for name in names}


def _of_collection(
    collection: ProcessGroupCollection, config: Any, ddp_config: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Return the groups of a collection, which has to have some; others may stand for those that it lacks.

    With one context-parallel rank dp stands for dp_cp, and with one optimizer instance a group for its part.
    """
    given = dict(vars(collection))
    if getattr(config, "context_parallel_size", 1) == 1 and "dp" in given:
        given.setdefault("dp_cp", given["dp"])
    parts = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt") if _several(ddp_config) else ()
    _check_given(given, ("dp", "dp_cp", *names, *parts))
    if not parts:
        given |= {"intra_dp_cp": given["dp_cp"], "intra_expt_dp": given["expt_dp"], "inter_dist_opt": None}
    return given


def _check_given(given: Mapping[str, Any], names: Iterable[str]) -> None:
    _raise_all(
        f"the collection has no {name!r}, which is needed here; give it, or None if there is no such group"
        for name in names
        if name not in given
    )


def _raise_all(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise LayoutError(*problems)


def _config_of(model: Any) -> Any:
    """Return the configuration of a model, or of the model inside a wrapper."""
    while not hasattr(model, "config") and hasattr(model, "module"):
        model = model.module
    return getattr(model, "config", None)


def _alone() -> dist.ProcessGroup:
    """Return a group of this rank alone."""
    pool = state_of_default_group(GroupPool)  # one for all calls, until the default group ends
    return group_of_one(pool)
