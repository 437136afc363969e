"""The torchtitan dialect: ``ParallelDims`` over one NamedMesh.

torchtitan makes a process group for every axis of four to five factorings of the world. Here each factoring is a view
of one mesh, so axes over the same ranks have one group::

    from namedmesh.compat.torchtitan import ParallelDims

    dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=2, pp=1, ep=1, world_size=8)
    dims.get_mesh("tp"), dims.get_optional_mesh("pp"), dims.mesh

:meth:`ParallelDims.bind` takes a mesh that exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from namedmesh.compat.axis_map import check_axes
from namedmesh.compat.errors import ContractError, ContractTypeError
from namedmesh.errors import LayoutError, did_you_mean
from namedmesh.init import init_mesh
from namedmesh.layout import Layout
from namedmesh.views import join_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from namedmesh.mesh import NamedMesh

__all__ = ["MeshAxisName", "ParallelDims", "SpmdLayout", "unfold_dp_axes"]

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
_SPARSE = ("dp_replicate", "efsdp", "ep")
_PRODUCTS = {
    "batch": ("dp_replicate", "dp_shard"),
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
}
# The names of the meshes of one axis, in torchtitan's order; each backend has those of its factorings.
_NAMES = ("pp", "batch", "loss", "dp_replicate", "cp", "tp", "ep", "efsdp", "fsdp", "dp", "dp_shard")


class _Backend(NamedTuple):
    """What an ``spmd_backend`` means.

    A mesh of one axis is a slice of the first factoring that has it. Dense is what the parameters outside of the experts
    are sharded over, and the boundary what a boundary between modules may be redistributed over: None is everything.
    """

    factorings: dict[str, tuple[str, ...]]
    dense: tuple[str, ...]
    boundary: tuple[str, ...] | None


_EVERY = {"data": ("pp", "batch", "cp", "tp"), "sparse": ("pp", *_SPARSE)}
_BACKENDS = {
    "partial_dtensor": _Backend(
        {"dense": ("pp", "dp_replicate", "fsdp", "tp"), **_EVERY},
        ("dp_replicate", "fsdp", "tp"),
        ("tp", "ep"),
    ),
    "full_dtensor": _Backend({"dense": _AXES, **_EVERY}, _AXES[1:], None),
    "spmd_types": _Backend(
        {"dense": _AXES, **_EVERY, "spmd": ("pp", "dp", "cp", "tp")},
        ("dp", "cp", "tp"),
        ("dp", "cp", "tp", "ep"),
    ),
}


def _above_one(what: str, *axes: str) -> property:
    """Make a property: whether one of some degrees is above 1; ``what`` follows from that."""

    def enabled(self: ParallelDims) -> bool:
        return any(getattr(self, axis) > 1 for axis in axes)

    return property(enabled, doc=f"Whether {what}.")


class MeshAxisName(str, Enum):
    """The names of the axes; each is equal to its text.

    Example:
        >>> MeshAxisName("tp") is MeshAxisName.TP, MeshAxisName.TP == "tp"
        (True, True)
    """

    DP = "dp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    FSDP = "fsdp"
    TP = "tp"
    CP = "cp"
    PP = "pp"
    EP = "ep"
    EFSDP = "efsdp"


def unfold_dp_axes(axes: Iterable[MeshAxisName | str]) -> list[str]:
    """Return the names of axes, with ``dp_replicate`` and ``dp_shard`` in place of ``dp``.

    Example:
        >>> unfold_dp_axes(["pp", MeshAxisName.DP])
        ['pp', 'dp_replicate', 'dp_shard']
    """
    names: list[str] = []
    for name in _texts(axes):
        names += _PRODUCTS["dp"] if name == "dp" else (name,)
    return names


def _texts(axes: Iterable[MeshAxisName | str]) -> list[str]:
    return [str(getattr(axis, "value", axis)) for axis in axes]  # torchtitan's own names, too


@dataclass(frozen=True)
class SpmdLayout:
    """How a tensor is laid out, axis by axis.

    Args:
        axis_types: for each axis a type of ``spmd_types``.
        partition_spec: for each dim of the tensor the axis or axes that shard it, or None.
    """

    axis_types: Mapping[MeshAxisName, Any]
    partition_spec: Sequence[Any] | None = None

    def axes(self) -> tuple[MeshAxisName, ...]:
        """Return the axes."""
        return tuple(self.axis_types)

    def shard_types(self) -> dict[MeshAxisName, Any]:
        """Return the type of each axis, that of one that shards a dim as ``S(dim)`` of the package ``spmd_types``.

        Raises:
            ContractTypeError: the partition names something else than a :class:`MeshAxisName`.
        """
        types = dict(self.axis_types)
        for dim, entry in enumerate(self.partition_spec or ()):
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(axis, MeshAxisName):
                    types[axis] = import_module("spmd_types").S(dim)
                elif axis is not None:
                    raise ContractTypeError(
                        f"partition_spec names {axis!r} for dim {dim}; give a MeshAxisName, such as MeshAxisName.TP"
                    )
        return types


@dataclass
class ParallelDims:
    """The degrees of parallelism of a job, and the torch meshes over them, under torchtitan's names.

    Ranks are laid out as (pp, dp_replicate, dp_shard, cp, tp), tp fastest; the experts' factoring is (pp,
    dp_replicate, efsdp, ep). Derived axes: ``batch`` is dp_replicate x dp_shard, ``loss`` that and cp, ``fsdp``
    dp_shard x cp, ``efsdp`` dp_shard x cp x tp / ep, and ``dp``, with spmd_types, the same ranks as batch.

    Args:
        dp_replicate: how many replicas of the sharded parameters there are.
        dp_shard: how many ranks shard the parameters; -1 for whatever is left.
        cp: how many ranks share a sequence.
        tp: how many ranks share a layer.
        pp: how many stages the layers are in.
        ep: how many ranks share the experts of a layer; no factor of the world size.
        world_size: how many ranks there are.
        spmd_backend: ``"partial_dtensor"`` (the axis ``fsdp``), ``"full_dtensor"`` (``dp_shard``) or
            ``"spmd_types"`` (``dp_shard`` and ``dp``).

    Attributes:
        mesh: the mesh behind it; None before :meth:`build_mesh`.

    Raises:
        ContractError: an ``AssertionError``, too: degrees that are below 1, or do not make up the world.
        LayoutError: of its methods, a ``ValueError``, too.

    Example:
        >>> import torch.distributed as dist
        >>> dims = ParallelDims(dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=1, world_size=1)
        >>> dims.get_optional_mesh("tp") is None, dims.get_mesh("dp_shard").size(), dims.mesh.layout
        (True, 1, Layout(pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1))
        >>> dims.mesh.close()
        >>> dist.destroy_process_group()
    """

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    world_size: int
    spmd_backend: str = "spmd_types"
    dp_enabled = _above_one("there is data parallelism of either kind", "dp_replicate", "dp_shard")
    dp_replicate_enabled = _above_one("parameters are replicated", "dp_replicate")
    dp_shard_enabled = _above_one("data-parallel ranks shard the parameters", "dp_shard")
    cp_enabled = _above_one("ranks share sequences", "cp")
    dp_cp_enabled = _above_one("the loss is reduced over ranks", "dp_replicate", "dp_shard", "cp")
    fsdp_enabled = _above_one("data- or context-parallel ranks shard the parameters", "dp_shard", "cp")
    tp_enabled = _above_one("ranks share layers", "tp")
    pp_enabled = _above_one("there is a pipeline", "pp")
    ep_enabled = _above_one("ranks share experts", "ep")

    def __post_init__(self) -> None:
        """Check the degrees, and infer dp_shard."""
        self.mesh: NamedMesh | None = None
        self._roots: dict[str, DeviceMesh] = {}
        self._single_axis_meshes: dict[str, DeviceMesh] = {}
        self._slices: dict[tuple[str, ...], DeviceMesh] = {}
        problems = []
        for name in (*_AXES, "ep"):
            degree = getattr(self, name)
            if degree < 1 and (name, degree) != ("dp_shard", -1):
                problems.append(f"{name}={degree} is below 1; a degree is 1 where it is not used")
        if self.spmd_backend not in _BACKENDS:
            problems.append(
                f"spmd_backend={self.spmd_backend!r} is not one of {tuple(_BACKENDS)}"
                f"{did_you_mean(self.spmd_backend, _BACKENDS)}"
            )
        if problems:
            raise ContractError(*problems)
        try:
            dense = Layout.from_shape(
                _AXES, [getattr(self, axis) for axis in _AXES], world_size=self.world_size
            )
            self.dp_shard = dense["dp_shard"]
            self._layout(("pp", *_SPARSE))
        except LayoutError as error:
            raise ContractError(*error.problems) from None

    @classmethod
    def from_config(cls, parallelism_config: Any, world_size: int) -> Self:
        """Return the dims of a ``ParallelismConfig`` of torchtitan, with ``data_parallel_replicate_degree`` and so on."""
        config = parallelism_config
        return cls(
            dp_replicate=config.data_parallel_replicate_degree,
            dp_shard=config.data_parallel_shard_degree,
            cp=config.context_parallel_degree,
            tp=config.tensor_parallel_degree,
            pp=config.pipeline_parallel_degree,
            ep=config.expert_parallel_degree,
            world_size=world_size,
            spmd_backend=config.spmd_backend,
        )

    @classmethod
    def bind(cls, mesh: NamedMesh, *, ep: int | None = None, spmd_backend: str = "spmd_types") -> Self:
        """Return the dims of a mesh that exists, on its groups; communicates for the factorings that it lacks.

        Every rank of the mesh calls it. The factorings become views of the mesh.

        Args:
            mesh: a mesh of axes ``pp``, ``dp_replicate``, ``dp_shard`` (or ``dp``), ``cp`` and ``tp`` in this
                order; one that it lacks is of size 1.
            ep: how many ranks share the experts; by default the size of the axis ``ep`` of a view, or 1.
            spmd_backend: as for the class.

        Raises:
            LayoutError: the mesh has other axes, or its ranks are in another order.
        """
        check_axes(mesh.layout, "torchtitan")
        sizes = dict.fromkeys(_AXES, 1)
        for axis, size in mesh.layout.items():
            sizes["dp_shard" if axis == "dp" else axis] = size
        if ep is None:
            ep = mesh.size("ep") if "ep" in mesh else 1
        dims = cls(**sizes, ep=ep, world_size=mesh.layout.world_size, spmd_backend=spmd_backend)
        dims.mesh = mesh
        dims.build_mesh()
        return dims

    def build_mesh(self) -> DeviceMesh:
        """Make the meshes, once; communicates. Every rank calls it, or the first accessor does.

        Returns:
            The 1-D mesh over all ranks, named ``world``.

        Raises:
            LayoutError: the world has another size.
            AgreementError: the ranks have other degrees, or some did not call.
        """
        if self._single_axis_meshes:
            return self._roots["world"]
        factorings = self._backend.factorings
        if self.mesh is None:
            self.mesh = init_mesh(self._layout(factorings["dense"]))
        mesh = self.mesh
        for name, axes in factorings.items():
            layout = self._layout(axes, mesh.layout.rank_offset)
            if layout not in (mesh.layout, *mesh.views.values()):
                mesh.add_view(f"torchtitan {name}", options={}, **dict(layout.items()))
            self._roots[name] = mesh[axes]
        whole = mesh.layout.axes
        self._roots["world"] = mesh.flatten(*whole, name="world") if len(whole) > 1 else mesh.device_mesh
        meshes = {"loss": mesh.flatten("batch", "cp", name="loss_mesh")}
        for root, axes in reversed(factorings.items()):
            meshes |= {axis: self._roots[root][axis] for axis in axes}
        self._single_axis_meshes = {name: meshes[name] for name in _NAMES if name in meshes}
        return self._roots["world"]

    def get_optional_mesh(
        self, dims: str | list[str], *, include_singleton_axes: bool = False
    ) -> DeviceMesh | None:
        """Return the mesh over one axis or several, or None where one of them is not in use; the same object each time.

        In use are axes larger than 1; ``fsdp`` and ``dp_shard`` always, and ``efsdp`` where ep is larger than 1.

        Args:
            dims: a name, or names in the order of the ranks.
            include_singleton_axes: whether axes that are not in use count, too.

        Raises:
            LayoutError: an unknown name, or names that are in no factoring together, out of order or repeated.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        known = self._known()
        for name in names:
            if name not in known:
                raise LayoutError(
                    f"Invalid mesh dim {name!r}: the meshes with {self.spmd_backend} are {', '.join(known)}"
                    f"{did_you_mean(name, known)}"
                )
        if not include_singleton_axes and not all(self._in_use(name) for name in names):
            return None
        return known[names[0]] if len(names) == 1 else self._slice(names)

    def get_mesh(self, dims: str | list[str]) -> DeviceMesh:
        """Return the mesh of :meth:`get_optional_mesh`; a LayoutError, as there, where an axis is not in use, too."""
        mesh = self.get_optional_mesh(dims)
        if mesh is None:
            raise LayoutError(
                f"the mesh over {dims!r} is not available: an axis of size 1, or efsdp without experts, is not in use; ask "
                "get_optional_mesh, which returns None, or give the degree a size above 1"
            )
        return mesh

    def get_activated_mesh(self, axes: Sequence[str]) -> DeviceMesh | None:
        """Return the mesh over those of ``axes`` that exist and are in use; None where none is."""
        known = self._known()
        used = [axis for axis in axes if axis in known and self._in_use(axis)]
        return self.get_optional_mesh(used) if used else None

    def get_all_one_dimensional_meshes(self) -> dict[str, DeviceMesh]:
        """Return the meshes of one axis that are in use and have more than one rank, by name."""
        used = {name: mesh for name, mesh in self._known().items() if self._in_use(name)}
        return {name: mesh for name, mesh in used.items() if mesh.size() > 1}

    def spmd_meshes(self) -> list[DeviceMesh]:
        """Return the meshes that parameters are sharded over: that of the dense ones, and that of the experts."""
        meshes = [self.get_activated_mesh(axes) for axes in (self._backend.dense, _SPARSE)]
        return [mesh for mesh in meshes if mesh is not None]

    def spmd_dense_mesh(self) -> DeviceMesh:
        """Return the mesh (dp, cp, tp) of spmd_types, axes of size 1 included; LayoutError with another backend."""
        if self.spmd_backend != "spmd_types":
            raise LayoutError(
                f"spmd_dense_mesh is of the backend 'spmd_types', and this is {self.spmd_backend!r}; use spmd_meshes()"
            )
        return self._slice(self._backend.dense)

    def spmd_sparse_mesh(self) -> DeviceMesh | None:
        """Return the mesh (dp_replicate, efsdp, ep) of spmd_types; None without experts, or with another backend."""
        return self._slice(_SPARSE) if self.spmd_backend == "spmd_types" and self.ep > 1 else None

    def get_dense_tp_mesh(self) -> DeviceMesh:
        """Return the mesh over tp that the dense layers compute on; LayoutError where tp is not in use, except in spmd_types."""
        return self.spmd_dense_mesh()["tp"] if self.spmd_backend == "spmd_types" else self.get_mesh("tp")

    def resolve_mesh(self, axes: Iterable[str]) -> DeviceMesh | None:
        """Return the mesh that a boundary between modules is redistributed over; None where there is nothing to do.

        Args:
            axes: the axes of the boundary's layout. Only those that the backend redistributes over count; with
                full_dtensor ``dp`` stands for dp_replicate and dp_shard.

        Raises:
            LayoutError: with full_dtensor, these are not all the axes of one of :meth:`spmd_meshes`.
        """
        names = _texts(axes)
        boundary = self._backend.boundary
        if boundary is not None:
            return self.get_activated_mesh([name for name in names if name in boundary])
        mesh = self.get_activated_mesh(unfold_dp_axes(names))
        if mesh is None or mesh in self.spmd_meshes():
            return mesh
        whole = [each.mesh_dim_names for each in self.spmd_meshes()]
        raise LayoutError(
            f"axes {join_names(mesh.mesh_dim_names or ())} are not all of a mesh of parameters; name all those of one of {whole}"
        )

    def resolve_shared_mesh(self, placements: Iterable[Any]) -> DeviceMesh | None:
        """Return the mesh of :meth:`resolve_mesh` for layouts over the same axes; ContractError where they differ.

        Args:
            placements: objects with a method ``axes()``, or None, which are skipped.
        """
        axes = {tuple(_texts(layout.axes())) for layout in placements if layout is not None}
        if len(axes) > 1:
            raise ContractError(
                f"the layouts of one boundary are over {sorted(axes)}; give all of them the same axes"
            )
        return self.resolve_mesh(axes.pop()) if axes else None

    @property
    def world_mesh(self) -> DeviceMesh:
        """The 1-D mesh over all ranks."""
        return self.build_mesh()

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks see the same samples: cp x tp x pp."""
        return self.cp * self.tp * self.pp

    @property
    def seq_len_divisor(self) -> int:
        """What divides the length of a sequence: tp, times twice cp for its balanced shards."""
        return self.tp * self.cp * 2

    @property
    def _backend(self) -> _Backend:
        return _BACKENDS[self.spmd_backend]

    def _known(self) -> dict[str, DeviceMesh]:
        """Return the meshes of one axis, made before if need be."""
        if not self._single_axis_meshes:
            self.build_mesh()
        return self._single_axis_meshes

    def _layout(self, axes: tuple[str, ...], rank_offset: int = 0) -> Layout:
        """Return one factoring of the ranks."""
        sizes = dict.fromkeys(axes, -1)  # efsdp is what is left
        for axis in axes:
            if axis != "efsdp":
                sizes[axis] = prod(getattr(self, part) for part in _PRODUCTS.get(axis, (axis,)))
        return Layout(**sizes, world_size=self.world_size, rank_offset=rank_offset)

    def _in_use(self, axis: str) -> bool:
        if axis in {"fsdp", "dp_shard"}:
            return True  # fully_shard takes them at size 1, for its mixed precision
        return self.ep > 1 if axis == "efsdp" else self._single_axis_meshes[axis].size() > 1

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh over several axes of one factoring, the same object each time."""
        self._known()
        if names in self._slices:
            return self._slices[names]
        factorings = self._backend.factorings
        for root, axes in factorings.items():
            if names == tuple(axis for axis in axes if axis in names):
                self._slices[names] = self._roots[root][names]
                return self._slices[names]
        raise LayoutError(
            f"axes {join_names(names)} are not together in one factoring of the ranks, each once and in its order; those are "
            f"{', '.join(map(str, factorings.values()))}"
        )
