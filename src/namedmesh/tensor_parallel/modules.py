"""Styles for what is no plain linear: own parameters as plain tensors, what stays whole, sums, several layers in one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._torch import local_parameters, replaced_parameters
from namedmesh.errors import PlanError
from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel.collectives import Group, leave
from namedmesh.tensor_parallel.styles import (
    ColumnLinear,
    ColwiseParallel,
    column_input,
    delivered,
    local,
    rewire,
    shard_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class LocalParameters(ParallelStyle):
    """Run a module's forward on this rank's shards of its own parameters, as plain tensors.

    For a norm over each head's features or over a rank's tokens (the weight is whole), or for a bare parameter with
    one number a head. Of the gradient of a replicated one each rank makes a part: it is ``Partial`` until
    :func:`reduce_gradients` or an optimizer's step sums it. A sharded one's gradient is this rank's own.

    Args:
        placements: the layout of each parameter by name; by default all of the module's own are replicated.
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = placements

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placements or ''})"

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:  # noqa: ARG002  for any number
        """Return how the parameters are laid out."""
        if self.placements is not None:
            return dict(self.placements)
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return a sentence for each parameter that the module does not own."""
        own = [name for name, _ in module.named_parameters(recurse=False)]
        return [
            f"{type(self).__name__} names {name!r}, but {type(module).__name__} owns {tuple(own)}"
            for name in self.layout(module, tp_size)
            if name not in own
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = self.layout(module, device_mesh.size())
        shard_parameters(module, device_mesh, layout, self.src_data_rank)
        module.forward = LocalForward(module, layout)
        return module


class LocalForward:
    """A module's own forward, with plain tensors where its parameters are, inside all hooks: FSDP2 has put whole ones there.

    An object, and no closure, because a deep copy of the module must not call the forward of the original. ``blocks``: the dims
    of which some parameters have two, for blocks that the forward sees one after the other.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], blocks: Any = ()) -> None:
        self.module, self.original = module, module.forward
        self.names, self.blocks = tuple(names), dict(blocks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward does."""
        with replaced_parameters(self.module, {name: self.plain(name) for name in self.names}):
            return self.original(*args, **kwargs)

    def plain(self, name: str) -> Tensor:
        """Return this rank's shard of a parameter, or all of it, of whose gradient each rank then makes a part."""
        shard: Tensor = getattr(self.module, name)
        if isinstance(shard, DTensor):
            layouts = tuple(Partial() if isinstance(each, Replicate) else each for each in shard.placements)
            shard = local_parameters([shard], [layouts])[0]
        dim = self.blocks.get(name)
        return shard if dim is None else shard.flatten(dim, dim + 1)


class KeepWhole(ParallelStyle):
    """Say in a plan that a module stays as it is, because every rank computes the same with it; nothing is changed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        return module


class SumOutput(ParallelStyle):
    """Sum a module's output over the ranks, each of which computed a part of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(sum_output, Group.of(device_mesh)))
        return module


def sum_output(group: Group, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Return the sum of the ranks' outputs: a hook that can be pickled, once the group is given."""
    return leave(output, group)


# --- heads, and layers that are several in one --------------------------------------------------------------


class KeyValueLinear(ColumnLinear):
    """A linear for keys or values that every rank has whole, of which it computes the heads of its queries."""

    rows: list[int]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return the features of the heads that this rank's queries attend to."""
        weight, bias = local(self.weight, self.bias, parts=(True, True))
        mine = None if bias is None else bias[self.rows]
        return delivered(self, F.linear(column_input(input, self.wiring), weight[self.rows], mine))


class KeyValueParallel(ColwiseParallel):
    """Give each rank the keys, or the values, of the heads that its queries attend to.

    Where the number of ranks divides the kv heads, it is ``ColwiseParallel``. Where it does not (one head for two ranks), every
    rank keeps the whole weight and computes the heads that its queries need; the gradients are summed. The attention then
    finds one kv head for each group of its queries, and has to take the number of repetitions from the shapes.
    """

    def __init__(
        self, query_heads: int, kv_heads: int | None = None, *, input_layouts: Placement | None = None
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        self.query_heads, self.kv_heads = query_heads, kv_heads or query_heads

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return how the parameters are laid out: whole where ranks share heads."""
        columns = super().layout(module, tp_size)
        return columns if self.kv_heads % tp_size == 0 else dict.fromkeys(columns, Replicate())

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return why so many ranks cannot share the heads."""
        queries, heads, features = self.query_heads, self.kv_heads, getattr(module, "out_features", 1)
        if features % heads:
            return [f"{heads} kv heads do not divide out_features {features}"]
        if heads % tp_size and not SharedHeads(queries, heads, tp_size).possible:
            counts = f"{queries} query heads and {heads} kv heads"
            return [f"{counts} cannot be shared by {tp_size} ranks; choose a tp size that divides {queries}"]
        if heads % tp_size and (type(module) is not nn.Linear or "forward" in vars(module)):
            return [f"ranks share kv heads with the forward of nn.Linear only, not {type(module).__name__}'s"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.kv_heads % device_mesh.size() == 0:
            applied: nn.Module = super()._apply(module, device_mesh)
            return applied
        problems = self.problems(module, device_mesh.size())  # torch's parallelize_module asks nobody
        if problems:
            raise PlanError(*problems)
        linear: Any = module
        self._partition_linear_fn("", linear, device_mesh)
        rewire(linear, KeyValueLinear, self, device_mesh)
        heads = SharedHeads(self.query_heads, self.kv_heads, device_mesh.size())
        width = linear.out_features // self.kv_heads
        mine = heads.of_rank(device_mesh.get_local_rank())
        linear.rows = [head * width + row for head in mine for row in range(width)]
        return module


class Joined(nn.ModuleList):
    """Linears with the same input, their outputs one after the other. Made by :func:`split_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the one linear would, or this rank's part of every one."""
        return torch.cat([part(x) for part in self], -1)


def split_linear(model: nn.Module, name: str, sizes: Sequence[int]) -> None:
    """Replace a linear that is several in one (q|k|v, gate|up, one after the other) by those, their outputs joined.

    The parts are modules ``{name}.0``, ``{name}.1`` and so on, for a plan to name; the model's own ``chunk`` or ``split`` of the
    output has to take the sizes from the shapes. Names in the state dict change, too: load a checkpoint of the one linear
    before, and join ``{name}.0.weight`` and the others along dim 0 to write one.

    Raises:
        PlanError: the module is no ``nn.Linear``, or the sizes do not add up to its output features.
    """
    fused = model.get_submodule(name)
    if type(fused) is not nn.Linear or sum(sizes) != fused.out_features:
        raise PlanError(
            f"{name} is {fused}; give an nn.Linear and sizes that add up to its out_features, not {list(sizes)}"
        )
    bias = fused.bias is not None
    parts = Joined(nn.Linear(fused.in_features, size, bias, device="meta") for size in sizes)
    for key, whole in fused.named_parameters():
        for part, rows in zip(parts, whole.detach().split([*sizes]), strict=True):
            part.register_parameter(key, nn.Parameter(rows.clone(), requires_grad=whole.requires_grad))
    model.set_submodule(name, parts.train(fused.training))
