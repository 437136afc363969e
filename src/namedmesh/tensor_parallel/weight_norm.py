"""Linears under ``torch.nn.utils.weight_norm``, whose weight is computed before every forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils.weight_norm import WeightNorm

from namedmesh._torch import pre_hooks
from namedmesh.tensor_parallel.collectives import local_shard, sum_backward, sum_forward, whole_parameter

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.collectives import RankGroup

MAGNITUDE, DIRECTION = "weight_g", "weight_v"


def weight_norm(module: nn.Module) -> WeightNorm | None:
    """Return the weight norm of a module, if it has one."""
    found = pre_hooks(module).values()
    return next((hook for hook in found if isinstance(hook, WeightNorm) and hook.name == "weight"), None)


def norm_placements(norm: WeightNorm, sharded: Shard) -> dict[str, Placement]:
    """Return how the two parameters of a weight are laid out, of which one dim is sharded."""
    return {MAGNITUDE: sharded if norm.dim == sharded.dim else Replicate(), DIRECTION: sharded}


@dataclass(frozen=True)
class LocalWeightNorm:
    """Computes this rank's shard of the weight, in place of torch's hook.

    Args:
        dim: the dim of which every slice has a norm of its own, -1 for one norm of the whole weight.
        sharded: the dim that is sharded over the ranks.
        group: the ranks.
    """

    dim: int
    sharded: int
    group: RankGroup

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        """Leave the shard where the module's forward looks for its weight."""
        magnitude, direction = module.get_parameter(MAGNITUDE), module.get_parameter(DIRECTION)
        shard = local_shard(direction)
        dims = [i for i in range(shard.ndim) if i != self.dim]
        if self.dim == self.sharded:
            size = local_shard(magnitude)
            norm = torch.linalg.vector_norm(shard, dim=dims, keepdim=True)
        else:
            size = whole_parameter(magnitude)
            squares = sum_forward(shard.abs().square().sum(dims, keepdim=True), self.group)
            norm = sum_backward(squares, self.group).sqrt()
        module.weight = shard * (size / norm)


def use_local_norm(module: nn.Module, norm: WeightNorm, sharded: Shard, group: RankGroup) -> None:
    """Replace torch's hook with ours."""
    hooks = pre_hooks(module)
    key = next(key for key, hook in hooks.items() if hook is norm)
    hooks[key] = LocalWeightNorm(norm.dim, sharded.dim, group)
    module.weight = None  # type: ignore[assignment]  # the next forward computes it
