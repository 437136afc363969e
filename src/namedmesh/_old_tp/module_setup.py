"""What a sharded module knows about its parallel style: its group, its layouts, and its name in errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.tensor import DTensor, Replicate, Shard

from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, own_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor
    from torch.distributed.tensor.placement_types import Placement

NAME = "_namedmesh_name"
"""The attribute in which ``parallelize`` leaves a module's fully qualified name, for error messages."""


WHOLE, LAST = Replicate(), Shard(-1)
"""The layouts of what every rank has all of, and of which each has some features."""

Rows: TypeAlias = "Callable[[Tensor, RankGroup], Tensor]"


class StyleContext:
    """The style of one sharded module, bound to ranks.

    Args:
        group: the ranks, of a one-dimensional mesh.
        input_layout: how a plain input tensor is laid out over the mesh.
        output_layout: how the output is.
        use_local_output: hand out this rank's plain tensor instead of a DTensor.
        rows: of a column layer's parameter, the plain rows that this rank works on, if not those that it holds.
    """

    def __init__(
        self,
        group: RankGroup,
        input_layout: Placement,
        output_layout: Placement,
        *,
        use_local_output: bool = True,
        rows: Rows | None = None,
    ) -> None:
        self.group, self.input_layout, self.output_layout = group, input_layout, output_layout
        self.use_local_output, self.rows = use_local_output, rows
        # To ask a layout for its class takes long, in every forward.
        self.whole_input = isinstance(input_layout, Replicate)
        self.whole_output = isinstance(output_layout, Replicate)

    @property
    def mesh(self) -> Any:
        """The mesh."""
        return self.group.source

    def deliver(self, module: torch.nn.Module, local: Tensor, made: Placement | None = None) -> Tensor:
        """Return the output, from this rank's plain tensor in the layout that the module made, if not that of the style."""
        if made is not None and not same_layout(made, self.output_layout, local.ndim):
            return self.redistribute_output(module, self._as_dtensor(local, made))
        return local if self.use_local_output else self._as_dtensor(local, self.output_layout)

    def _as_dtensor(self, tensor: Tensor, layout: Placement) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, (layout,), run_check=False)

    def redistribute_input(self, tensor: Tensor, desired: Placement) -> DTensor:
        """Return an input as a DTensor, moved from the layout that it has, or that the style declares."""
        annotated = self._as_dtensor(tensor, self.input_layout)
        if annotated.placements != (desired,) or annotated.device_mesh != self.mesh:
            annotated = annotated.redistribute(self.mesh, (desired,))
        return annotated

    def redistribute_output(self, module: torch.nn.Module, output: Tensor) -> Tensor:
        """Return the output of DTensor arithmetic in the layout of the style; synchronous.

        An asynchronous one would be a tensor of another class, which torch.compile and FSDP2 together get
        silently wrong.
        """
        if not isinstance(output, DTensor):
            return output
        if not same_layout(output.placements[0], self.output_layout, output.ndim):
            dim = sharded_dim(self.output_layout, output.ndim)
            if dim is not None:
                check_divides(module, "the output", output.shape, dim, self.group.size)
            output = output.redistribute(placements=(self.output_layout,))
        return own_tensor(output.to_local(), self.group) if self.use_local_output else output


def same_layout(one: Placement, other: Placement, ndim: int) -> bool:
    """Return whether two layouts are the same for a tensor of ``ndim`` dims, counting dims from either end."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim % ndim == other.dim % ndim
    return one == other


def sharded_dim(layout: Placement, ndim: int) -> int | None:
    """Return the dim that is sharded, counted from the front; None where nothing is, or where it is out of range."""
    if not isinstance(layout, Shard) or not -ndim <= layout.dim < ndim:
        return None
    return layout.dim % ndim


def check_features(module: torch.nn.Module, value: Tensor, features: int) -> None:
    """Refuse an input of another number of features, of which each rank would take its part all the same.

    Raises:
        ShapeError: the last dim of the input has another length.
    """
    if value.shape[-1] != features:
        raise ShapeError(
            f"{name_of(module)}: the input, of shape {tuple(value.shape)}, has {value.shape[-1]} features, but the "
            f"layer takes {features}; pass all {features} of them"
        )


def name_of(module: torch.nn.Module) -> str:
    """Return a module's name in error messages."""
    return getattr(module, NAME, None) or type(module).__name__


def check_divides(module: torch.nn.Module, what: str, shape: torch.Size, dim: int, tp_size: int) -> None:
    """Refuse to split a dim into shards of different lengths.

    A collective of unequal shards ends the process from inside the backend, with no traceback; every rank
    sees the same global shape, so all of them raise.

    Raises:
        ShapeError: if ``dim`` has a length that ``tp_size`` does not divide.
    """
    length = shape[dim]
    if length % tp_size == 0:
        return
    longer = -(-length // tp_size) * tp_size
    raise ShapeError(
        f"{name_of(module)}: dim {dim} of {what}, of shape {tuple(shape)}, has length {length}, which cannot be split "
        f"into {tp_size} equal shards (the tp size); pad it to {longer}, or to another multiple of {tp_size}"
    )
