"""What the dialects with one group for each of tp, pp, cp and dp share: fairscale's and ezpz's.

Their ranks are laid out as (dp, pp, cp, tp), tp fastest. A dialect is one :class:`ModelParallel`, and functions of
its own names that read the slots of its state.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from weakref import WeakSet

import torch
import torch.distributed as dist

from namedmesh._torch import backward_pass
from namedmesh.compat.axis_map import DENSE_AXES, AxisMap, axis_groups
from namedmesh.compat.binding import Bindings, Bound, LegacyState, ask_group, require_default_group
from namedmesh.compat.errors import ContractError
from namedmesh.dialects import DIALECTS
from namedmesh.errors import MeshError
from namedmesh.groups import GroupPool
from namedmesh.init import create_root_mesh, version_fields
from namedmesh.launch import default_group_device
from namedmesh.layout import Layout
from namedmesh.making import agreed
from namedmesh.mesh import NamedMesh
from namedmesh.options import GroupOptions
from namedmesh.tensor_parallel.collectives import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from namedmesh.making import GroupMaker

__all__ = ["AxisState", "ModelParallel"]

T = TypeVar("T")

_ORDER = DIALECTS["fairscale"].axes
_WORDS = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}
_DESCRIBED = {
    "group": "the {} group",
    "ranks": "the list of {} ranks",
    "size": "the size of the {} group",
    "rank": "the rank in the {} group",
}


class AxisState(LegacyState):
    """For each axis this rank's group, the ranks in it, their number, and the index of this rank.

    Attributes:
        peers: the tensor-parallel ranks, as the layers want them.
    """

    slots = (*(f"{axis}_{answer}" for axis in DENSE_AXES for answer in _DESCRIBED), "peers")
    __slots__ = slots

    tp_group: dist.ProcessGroup | None
    pp_group: dist.ProcessGroup | None
    cp_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None
    tp_size: int | None
    tp_rank: int | None
    peers: RankGroup | None

    def update(self) -> None:
        """Compute sizes and ranks from the groups, also from groups that were assigned by hand."""
        for axis in DENSE_AXES:
            group = getattr(self, f"{axis}_group")
            for answer in ("size", "rank"):
                setattr(self, f"{axis}_{answer}", ask_group(group, answer))
        # A stand-in that was assigned by hand may have neither.
        known = self.tp_size is not None and self.tp_rank is not None
        self.peers = RankGroup(self.tp_group) if known else None

    def touched(self) -> bool:
        """Return whether there is a group, or ranks, of a mesh or set by hand."""
        filled = [slot for slot in self.slots if slot.endswith(("_group", "_ranks"))]
        return any(getattr(self, slot) is not None for slot in filled)


class ModelParallel:
    """One dialect: its state, and the mesh behind it.

    Args:
        name: whose API it is, for messages.
        module: the module of namedmesh that it is.
        function: the name of its initialize function.
        sizes: the name of the argument for the size of tp, pp and cp.
        tensor: what it calls tensor parallelism.
    """

    def __init__(
        self, name: str, module: str, function: str, sizes: Mapping[str, str], *, tensor: str = "tensor"
    ) -> None:
        self.name = name
        self.module = module
        self.function = function
        self.sizes = dict(sizes)
        self.words = {**_WORDS, "tp": tensor}
        self.state = AxisState()
        self.bindings = Bindings(self.state)
        self._used: WeakSet[RankGroup] = WeakSet()  # the state keeps them, for as long as their mesh is open

    def bind(self, mesh: NamedMesh) -> Bound:
        """Answer from a mesh that exists; communicates the first time.

        Every rank of the mesh calls it.

        Args:
            mesh: a mesh of axes ``tp``, ``cp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``) and ``pp``, in any
                order; one that it lacks is of size 1.

        Returns:
            A handle: in ``with bind(mesh):`` the binding ends with the block. Otherwise it lasts until the next
            one, :meth:`unbind`, or the mesh's end.

        Raises:
            LayoutError: the mesh has axes that the dialect has no group for.
            MeshError: what was given is no open mesh.
            AgreementError: the other ranks did not call this, or not with the same mesh.

        Example:
            >>> import namedmesh, torch.distributed as dist
            >>> from namedmesh.compat import ezpz, fairscale
            >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
            >>> with fairscale.bind(mesh), ezpz.bind(mesh):
            ...     fairscale.get_model_parallel_group() is ezpz.tp.get_tensor_parallel_group() is mesh.group("tp")
            True
            >>> mesh.close()
            >>> dist.destroy_process_group()
        """
        bound = self.bindings.rebind(mesh, ())
        if bound is not None:
            return bound
        with mesh.agreed(f"{self.name}.bind") as maker:
            AxisMap.from_layout(mesh.layout, self.name)
            maker.compare({"layout": repr(mesh.layout)})
            groups = self._groups(mesh, maker)
        return self.bindings.fill(mesh, (), groups, owned=False)

    def unbind(self) -> None:
        """Forget the mesh that is bound; it stays as it is, with its groups."""
        self.bindings.unbind()

    def current_mesh(self) -> NamedMesh:
        """Return the mesh that the accessors answer from at this moment.

        Raises:
            MeshError: they answer from none.
        """
        mesh = self.state.mesh
        if mesh is None:
            raise MeshError(
                f"{self.name}'s model parallelism is not bound to a mesh; call {self.function}(...) or bind(mesh) first"
            )
        return mesh

    def destroy(self) -> None:
        """Forget every answer and whatever was assigned; groups that were made with them are destroyed.

        A mesh that was bound with :meth:`bind` stays, with its groups.
        """
        self.bindings.destroy()

    def initialize(
        self,
        sizes: Mapping[str, int],
        backends: Mapping[str, str | None],
        timeout: timedelta | None = None,
    ) -> None:
        """Make a mesh over the world, and answer from it; communicates.

        Args:
            sizes: the size of tp, pp and cp; dp is what is left.
            backends: the backend of the groups of an axis, or None for the default group's.
            timeout: the timeout of the groups.

        Raises:
            ContractError: no default group, a second initialization, or sizes that do not divide the world.
            AgreementError: the other ranks did not call this, or not with the same arguments.
        """
        require_default_group()
        world = dist.get_world_size()
        call = f"{self.name}.{self.function}"
        arguments = {name: repr(sizes[axis]) for axis, name in self.sizes.items()}
        arguments |= {"backends": repr(dict(backends)), "timeout": repr(timeout)}
        pool = GroupPool(defaults=GroupOptions(timeout=timeout))
        with ExitStack() as on_error:
            on_error.callback(pool.close)
            with agreed(pool, call, range(world)) as maker:
                if self.state.touched():
                    raise ContractError(
                        f"{self.name}'s model parallelism is already initialized, for {self.state.described}; call the "
                        f"function that destroys it first, or bind another mesh beside it with {self.module}.bind(mesh)"
                    )
                fitted = {**sizes, "tp": min(sizes["tp"], world)}
                self._check(fitted, world)
                options = {
                    axis: GroupOptions(backend=name) for axis, name in backends.items() if name is not None
                }
                layout = Layout(**{axis: fitted.get(axis, -1) for axis in _ORDER}, world_size=world)
                maker.compare(
                    arguments | version_fields(),
                    [(layout, (axis,), options.get(axis, GroupOptions())) for axis in layout],
                )
                if fitted["tp"] < sizes["tp"]:
                    warnings.warn(
                        f"{self.sizes['tp']} is {sizes['tp']}, but the world has {world} ranks; {self.name}'s "
                        f"{self.function} goes on with {world}",
                        stacklevel=3,
                    )
                device = default_group_device()
                root = create_root_mesh(layout, maker, device, options)
                mesh = NamedMesh(layout, root, pool, device, options)
                on_error.callback(mesh.close)
                groups = self._groups(mesh, maker)
            on_error.pop_all()
        self.bindings.fill(mesh, (), groups, owned=True)

    def require(self, value: T | None, what: str) -> T:
        """Return a value that is not None.

        Raises:
            ContractError: it is None; the message says why ``what`` is not there.
        """
        if value is None:
            if self.state.mesh is not None:
                raise ContractError(f"{what} is not there: it was set to None")
            raise ContractError(
                f"{what} is not there: {self.name}'s model parallelism is not initialized; call {self.function}(...), or "
                f"{self.module}.bind(mesh) with a mesh that exists (once, on every rank)"
            )
        return value

    @overload
    def accessor(self, axis: str, answer: Literal["group"]) -> Callable[[], dist.ProcessGroup]: ...
    @overload
    def accessor(self, axis: str, answer: Literal["ranks"]) -> Callable[[], list[int]]: ...
    @overload
    def accessor(self, axis: str, answer: Literal["rank", "size"]) -> Callable[[], int]: ...
    def accessor(self, axis: str, answer: str) -> Callable[[], Any]:
        """Make an accessor of the dialect.

        Args:
            axis: the axis of a group.
            answer: the group of this rank, the global ranks in it, the index of this rank, or the number of ranks.

        Returns:
            A function without arguments, which raises a ContractError where there is no answer.
        """
        state, slot = self.state, f"{axis}_{answer}"
        what = _DESCRIBED[answer].format(f"{self.words[axis]}-parallel")

        def accessor() -> Any:
            value = getattr(state, slot)
            return self.require(value, what) if value is None else value

        accessor.__name__ = f"get_{self.words[axis]}_parallel_{'world_size' if answer == 'size' else answer}"
        accessor.__doc__ = f"Return {what}."
        return accessor

    def first_rank(self) -> int:
        """Return the global rank of the first of the tensor-parallel ranks.

        Raises:
            ContractError: there are none.
        """
        group: object = self.require(self.state.tp_group, "the tensor-parallel group")
        if isinstance(group, dist.ProcessGroup):
            return dist.get_process_group_ranks(group)[0]
        # A stand-in for neighboring ranks, as tensor-parallel ones are in this layout.
        size = self.require(self.state.tp_size, "the size of the tensor-parallel group")
        return dist.get_rank() // size * size

    def peers(self) -> RankGroup:
        """Return the tensor-parallel ranks of this moment.

        A backward pass repeats the forwards that were checkpointed, and may do so after the ``with`` block that
        selected their mesh: there they are the ranks that forwards had before, if all had the same.
        """
        if backward_pass() >= 0 and len(self._used) == 1:
            (used,) = self._used
            return used
        peers = self.require(self.state.peers, "the tensor-parallel group")
        # Code that was compiled for a forward is what repeats it; and up to torch 2.9 the compiler cannot look into the set.
        if not torch.compiler.is_compiling() and peers not in self._used:
            self._used.add(peers)
        return peers

    def _groups(self, mesh: NamedMesh, maker: GroupMaker) -> dict[str, Any]:
        """Return the groups of the mesh and their ranks, slot by slot."""
        values: dict[str, Any] = {}
        for axis, (group, ranks) in axis_groups(mesh, maker, self.name).items():
            values |= {f"{axis}_group": group, f"{axis}_ranks": ranks}
        return values

    def _check(self, sizes: Mapping[str, int], world: int) -> None:
        given = [f"{name}={sizes[axis]}" for axis, name in self.sizes.items()]
        if min(sizes.values()) < 1:
            raise ContractError(f"{', '.join(given)}: each of the sizes has to be 1 or more")
        product = prod(sizes.values())
        if world % product:
            raise ContractError(
                f"the world of {world} ranks cannot be divided by {' x '.join(given)} = {product}; change a size, or start "
                "another number of ranks"
            )
