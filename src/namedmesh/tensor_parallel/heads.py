"""Layers that are several in one: keys and values of fewer heads than ranks, and q|k|v or gate|up in one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

from namedmesh.errors import PlanError
from namedmesh.sizes import SharedHeads
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
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


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

    Where the number of ranks divides the kv heads, it is ``ColwiseParallel``. Where it does not (one head for
    two ranks, six for four), every rank keeps the whole weight, computes the heads that its queries need, and
    the gradients are summed over the ranks that share a head. The attention then finds one kv head for each
    group of its queries, and has to take the number of repetitions from the shapes.

    Args:
        query_heads: the number of query heads.
        kv_heads: the number of key and value heads; by default as many.
        input_layouts: as for :class:`ColwiseParallel`.

    Raises:
        PlanError: by ``parallelize``: the heads cannot be shared by the ranks, or the module is no ``nn.Linear``.

    Example:
        One kv head of 4 features; of 2 ranks each computes it whole:

        >>> import torch
        >>> from namedmesh.tensor_parallel import KeyValueParallel, plan_report
        >>> wk = torch.nn.Linear(16, 4, bias=False, device="meta")
        >>> plan_report(wk, 2, KeyValueParallel(4, 1)).rows[0].placement
        'Replicate()'
    """

    def __init__(
        self, query_heads: int, kv_heads: int | None = None, *, input_layouts: Placement | None = None
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        self.query_heads, self.kv_heads = query_heads, kv_heads or query_heads

    def __repr__(self) -> str:
        return f"KeyValueParallel({self.query_heads}, {self.kv_heads}, input_layouts={self.input_layouts})"

    def size_placements(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return how the parameters are laid out over so many ranks."""
        if self.kv_heads % tp_size == 0:
            return self.placements(module)
        return dict.fromkeys(self.placements(module), Replicate())

    def size_problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return a sentence for each reason why so many ranks cannot share the heads."""
        heads, problems = self.kv_heads, []
        if module.out_features % heads:  # type: ignore[operator]  # of an nn.Linear
            problems.append(f"{heads} kv heads do not divide out_features {module.out_features}")
        if heads % tp_size and not SharedHeads(self.query_heads, heads, tp_size).possible:
            problems.append(
                f"{self.query_heads} query heads and {heads} kv heads cannot be shared by {tp_size} ranks (the tp size), which "
                f"would cut heads; choose a tp size that divides {self.query_heads}"
            )
        if heads % tp_size and (type(module) is not nn.Linear or "forward" in vars(module)):
            kind = type(module).__name__
            problems.append(
                f"KeyValueParallel needs the forward of nn.Linear where ranks share kv heads, not {kind}'s"
            )
        return problems

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.kv_heads % device_mesh.size() == 0:
            applied: nn.Module = super()._apply(module, device_mesh)
            return applied
        problems = self.size_problems(module, device_mesh.size())
        if problems:
            raise PlanError(*problems)
        placements = self.size_placements(module, device_mesh.size())
        shard_parameters(module, device_mesh, placements, self.src_data_rank)
        linear: Any = module
        width = linear.out_features // self.kv_heads
        heads = SharedHeads(self.query_heads, self.kv_heads, device_mesh.size()).of_rank(
            device_mesh.get_local_rank()
        )
        rewire(module, KeyValueLinear, self, device_mesh)
        linear.rows = [head * width + row for head in heads for row in range(width)]
        return module


class Joined(nn.ModuleList):
    """Linears with the same input, their outputs one after the other. Made by :func:`split_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the one linear would, or this rank's part of every one."""
        return torch.cat([part(x) for part in self], -1)


def split_linear(model: nn.Module, name: str, sizes: Sequence[int]) -> None:
    """Replace a linear that is several in one (q|k|v, gate|up, one after the other) by those, their outputs joined.

    ``ColwiseParallel`` would cut such a layer rank after rank, through the blocks. Afterwards the parts are modules
    ``{name}.0``, ``{name}.1`` and so on, for a plan to name; the model's own ``chunk`` or ``split`` of the output finds this
    rank's part of each block where it takes the sizes from the shapes. Names in the state dict change with them: load a
    checkpoint of the one linear before, and join ``{name}.0.weight`` and the others along dim 0 to write one.

    Args:
        model: changed in place.
        name: the fully qualified name of the linear.
        sizes: the output features of each part.

    Raises:
        PlanError: the module is no ``nn.Linear``, or the sizes do not add up to its output features.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel import ColwiseParallel, split_linear
        >>> model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(8, 24), "o": torch.nn.Linear(8, 8)})
        >>> split_linear(model, "qkv", [8, 8, 8])
        >>> model["qkv"](torch.ones(2, 8)).shape, [*model["qkv"].state_dict()][:2]
        (torch.Size([2, 24]), ['0.weight', '0.bias'])
        >>> plan = {"qkv.*": ColwiseParallel()}
    """
    fused = model.get_submodule(name)
    if type(fused) is not nn.Linear or sum(sizes) != fused.out_features:
        raise PlanError(
            f"{name} is {fused}; give an nn.Linear and sizes that add up to its out_features, not {list(sizes)}"
        )
    parts, first = Joined(), 0
    for size in sizes:
        part = nn.Linear(fused.in_features, size, bias=fused.bias is not None, device="meta")
        for key, whole in fused.named_parameters():
            rows = whole.detach()[first : first + size].clone()
            part.register_parameter(key, nn.Parameter(rows, requires_grad=whole.requires_grad))
        parts.append(part)
        first += size
    model.set_submodule(name, parts.train(fused.training))
