"""Keys and values of grouped attention, whatever the number of their heads and of ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel.collectives import whole_parameter
from namedmesh.tensor_parallel.styles import ColwiseParallel, shard_module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.collectives import RankGroup

GROUPS = "num_key_value_groups"
"""The attribute in which an attention module of transformers keeps how many queries share a kv head."""


class KeyValueParallel(ColwiseParallel):
    """Give each rank the keys, or the values, of the heads that its queries attend to.

    Where the number of ranks divides the kv heads, it is ``ColwiseParallel``. Where it does not (one head for
    two ranks, six for four), every rank keeps the whole weight, computes the heads that its queries need, and
    the gradients are summed over the ranks that share a head. The attention then finds one kv head for each
    group of its queries: it takes the number of repetitions from the shapes, or from an attribute
    ``num_key_value_groups`` of the module that owns the linear, which is set; so is that of attention with the
    same counts that has no keys and values of its own, but those of another layer.

    ``parallelize`` finds the head counts on the attention module or on its configuration; where nothing
    states them, and none are given, the style is ``ColwiseParallel``.

    Args:
        input_layouts: how a plain input is laid out: ``Replicate()`` (the default), or ``Shard(dim)`` to
            gather it first.
        query_heads: the number of query heads, if no module states it.
        kv_heads: the number of kv heads, if no module states it.

    Raises:
        PlanError: when applied to another kind of module, or to one that is already parallelized.

    Example:
        One kv head of 4 features; of 2 ranks each computes it whole:

        >>> import torch
        >>> from namedmesh.tensor_parallel import KeyValueParallel, plan_report
        >>> wk = torch.nn.Linear(16, 4, bias=False, device="meta")
        >>> plan_report(wk, 2, KeyValueParallel(query_heads=4, kv_heads=1)).rows[0].placement
        'Replicate()'
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        query_heads: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        self.query_heads, self.kv_heads = query_heads, kv_heads
        self.shared: SharedHeads | None = None
        self.attentions: Sequence[nn.Module] = ()

    def __repr__(self) -> str:
        counts = (
            "" if self.kv_heads is None else f", query_heads={self.query_heads}, kv_heads={self.kv_heads}"
        )
        return f"KeyValueParallel(input_layouts={self.input_layouts}{counts})"

    def on_ranks(
        self, size: int, queries: int | None, heads: int | None, attentions: Sequence[nn.Module]
    ) -> KeyValueParallel:
        """Return the style for ``size`` ranks, with the counts that a model states unless it has its own.

        ``attentions`` are the modules that use the heads, of which each may keep the number of its groups.
        """
        queries, heads = self.query_heads or queries, self.kv_heads or heads
        bound = KeyValueParallel(input_layouts=self.input_layouts[0], query_heads=queries, kv_heads=heads)
        if queries and heads and heads % size and SharedHeads(queries, heads, size).possible:
            bound.shared, bound.attentions = SharedHeads(queries, heads, size), attentions
        return bound

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placements: sharded where the ranks divide the heads, or else whole."""
        placement = Shard(0) if self.shared is None else Replicate()
        return {name: placement for name in ("weight", "bias") if getattr(module, name, None) is not None}

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each reason why the module cannot have its heads shared."""
        if not isinstance(module, nn.Linear):
            return [f"KeyValueParallel fits nn.Linear, not {type(module).__name__}; leave it out of the plan"]
        reasons = []
        if self.kv_heads and module.out_features % self.kv_heads:
            reasons.append(f"{self.kv_heads} kv heads do not divide out_features {module.out_features}")
        if self.shared is not None and (type(module) is not nn.Linear or "forward" in vars(module)):
            reasons.append(
                f"KeyValueParallel needs the forward of nn.Linear where ranks share kv heads, but "
                f"{type(module).__name__} has its own"
            )
        return reasons

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        bound = self.on_ranks(device_mesh.size(), None, None, self.attentions)
        if bound.shared is None:
            return super()._apply(module, device_mesh)
        bound.src_data_rank = self.src_data_rank
        for attention in self.attentions:
            setattr(attention, GROUPS, bound.shared.repeats)
        return shard_module(bound, module, device_mesh, partial(_rows_of, bound.shared))


def _rows_of(heads: SharedHeads, parameter: Tensor, group: RankGroup) -> Tensor:
    """Return the rows of the heads that this rank's queries attend to, of a parameter that every rank has whole.

    The gradient of the parameter is summed over the ranks, each of which makes the part of its own heads.
    """
    mine, whole = list(heads.of_rank(group.rank)), whole_parameter(parameter)
    width = whole.shape[0] // heads.heads
    first, last = mine[0], mine[-1]
    if mine == [*range(first, last + 1)]:
        return whole.narrow(0, first * width, (last + 1 - first) * width)
    index = torch.tensor(mine, device=whole.device)
    picked: Tensor = whole.unflatten(0, (heads.heads, width)).index_select(0, index).flatten(0, 1)
    return picked
