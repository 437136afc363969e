"""What the dialects with one group for each of tp, pp, cp and dp share: fairscale's and ezpz's.

Their ranks are laid out as (dp, pp, cp, tp), tp fastest. A dialect is a module with variables, whose accessors read
them, and one :class:`ModelParallel`, which fills them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from namedmesh._torch import backward_pass
from namedmesh.compat.axis_map import check_axes, compare_mesh, group_over
from namedmesh.compat.binding import Binding, Bound, require_default_group
from namedmesh.compat.errors import ContractError
from namedmesh.compat.partition import scatter
from namedmesh.compat.regions import RankGroup, gather, sum_backward, sum_forward
from namedmesh.dialects import DIALECTS
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupPool, agreed
from namedmesh.init import make_mesh
from namedmesh.layout import Layout
from namedmesh.options import GroupOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta
    from types import ModuleType

    from torch import Tensor

    from namedmesh.groups import GroupMaker
    from namedmesh.mesh import NamedMesh

__all__ = ["ModelParallel", "first_rank"]


def first_rank(group: Any) -> int:
    """Return the global rank of the first of a group, or of a stand-in for neighboring ranks, as they are in this layout."""
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)[0]
    size: int = group.size()
    return dist.get_rank() // size * size


class ModelParallel:
    """One dialect: the variables of its module, and the mesh behind them.

    Args:
        name: whose API it is.
        function: the name of its initialize function.
        sizes: the name of the argument for the size of tp, pp and cp.
    """

    def __init__(self, name: str, function: str, sizes: Mapping[str, str]) -> None:
        self.name, self.function, self.sizes = name, function, dict(sizes)
        self.place = f"namedmesh.compat.{name}"
        self._rows = DIALECTS[name].kinds
        self._of_tp = next(row.variable for row in self._rows if row.axes == ("tp",))
        self.binding = Binding(f"{name}'s model parallelism", function, f"{self.place}.bind")
        self._module: Any = None
        self._used: WeakSet[RankGroup] = WeakSet()  # the module keeps them, for as long as their mesh is open

    def fill(self, module: ModuleType) -> None:
        """Let a module of namedmesh have the variables; its name is that of the original's."""
        self._module = module
        self.binding.add_module(module)

    def bind(self, mesh: NamedMesh) -> Bound:
        """Answer from a mesh that exists; communicates the first time.

        Every rank of the mesh calls it.

        Args:
            mesh: a mesh of axes ``tp``, ``cp``, ``dp`` (or ``dp_replicate`` and ``dp_shard``) and ``pp``, in any
                order; one that it lacks is of size 1.

        Returns:
            A handle: in ``with bind(mesh):`` the mesh is selected, and the binding ends with the block. Otherwise it
            lasts until the next one, :meth:`unbind`, or the mesh's end.

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
        bound = self.binding.rebind(mesh, ())
        if bound is not None:
            return bound
        with mesh.agreed(f"{self.name}.bind") as maker:
            check_axes(mesh.layout, self.name)
            compare_mesh(mesh, maker, [row.axes for row in self._rows])
            groups = self._groups(mesh, maker)
        return self.binding.take(mesh, (), groups)

    def initialize(
        self,
        sizes: Mapping[str, int],
        backends: Mapping[str, str | None],
        timeout: timedelta | None = None,
    ) -> None:
        """Make a mesh over the world, of sizes of tp, pp and cp, with a backend for each axis, and answer from it."""
        require_default_group()
        world = dist.get_world_size()
        arguments = {name: repr(sizes[axis]) for axis, name in self.sizes.items()}
        arguments |= {"backends": repr(dict(backends)), "timeout": repr(timeout)}
        pool = GroupPool(defaults=GroupOptions(timeout=timeout))
        with agreed(pool, f"{self.name}.{self.function}", range(world)) as maker:
            self.binding.refuse_second()
            tp = min(sizes["tp"], world)
            fitted = {"dp": -1, **sizes, "tp": tp}
            try:
                axes = DIALECTS[self.name].axes
                layout = Layout.from_shape(axes, [fitted[axis] for axis in axes], world_size=world)
            except LayoutError as error:
                raise ContractError(*error.problems) from None
            options = {
                axis: GroupOptions(backend=name) for axis, name in backends.items() if name is not None
            }
            if tp < sizes["tp"]:
                warnings.warn(
                    f"{self.sizes['tp']} is {sizes['tp']}, but the world has {world} ranks; {self.name}'s {self.function} goes on "
                    f"with {world}",
                    stacklevel=3,
                )
            mesh = make_mesh(maker, layout, arguments, options)
            groups = self._groups(mesh, maker)
        self.binding.take(mesh, (), groups, owned=True)

    def missing(self, what: str) -> Any:
        """Raise the ContractError of an accessor that has no value; it says why ``what`` is not there."""
        shown = self.binding.shown
        if shown is not None and self.binding.is_bound(shown):
            raise ContractError(f"{what} is not there: it was set to None")
        raise ContractError(
            f"{what} is not there: {self.name}'s model parallelism is not initialized; call {self.function}(...), or "
            f"{self.place}.bind(mesh) with a mesh that exists (once, on every rank)"
        )

    def peers(self) -> RankGroup:
        """Return the tensor-parallel ranks of this moment.

        A backward pass repeats the forwards that were checkpointed, and may do so after the ``with`` block that
        selected their mesh: there they are the ranks that forwards had before, if all had the same.
        """
        if backward_pass() >= 0 and len(self._used) == 1:
            (used,) = self._used
            return used
        group = getattr(self._module, self._of_tp) or self.missing("the tensor-parallel group")
        peers: RankGroup | None = self._module._rank_group  # noqa: SLF001  a variable of the dialect
        if peers is None or peers.process_group is not group:  # a group that was assigned by hand
            peers = RankGroup(group)
            self._module._rank_group = peers  # noqa: SLF001
        # Code that was compiled for a forward is what repeats it; and up to torch 2.9 the compiler cannot look into the set.
        if not torch.compiler.is_compiling() and peers not in self._used:
            self._used.add(peers)
        return peers

    # The ways in and out of tensor-parallel regions, each with its partner as backward.

    def copy(self, input_: Tensor) -> Tensor:
        """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
        return sum_backward(input_, self.peers())

    def reduce(self, input_: Tensor) -> Tensor:
        """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
        return sum_forward(input_, self.peers())

    def scatter(self, input_: Tensor) -> Tensor:
        """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; a ContractError if t does not divide n."""
        return scatter(input_, self.peers(), -1)

    def gather(self, input_: Tensor) -> Tensor:
        """Join the ranks' ``(..., n / t)`` to ``(..., n)``, on every rank; each gets its shard of the gradient."""
        return gather(input_, self.peers(), -1)

    def _groups(self, mesh: NamedMesh, maker: GroupMaker) -> dict[str, Any]:
        """Return the value of each variable: the groups of the mesh, and their ranks."""
        values: dict[str, Any] = {}
        for row in self._rows:
            values[row.variable], ranks = group_over(mesh, maker, row.axes)
            if row.ranks:
                values[row.ranks] = ranks
        return values | {"_rank_group": RankGroup(values[self._of_tp])}
