"""Styles for mixture-of-experts layers whose experts are all on every rank, a shard of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Replicate

from namedmesh._torch import HAS_BLOCKS, TORCH
from namedmesh.tensor_parallel.collectives import RankGroup, sum_backward, sum_forward
from namedmesh.tensor_parallel.local import LocalParameters
from namedmesh.tensor_parallel.placements import ActivationStyle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class ShardedExperts(LocalParameters):
    """Run stacked experts on this rank's shard of every expert, and sum their outputs over the ranks.

    For a module that owns the weights of all its experts as parameters of three dims. Each rank computes a
    part of every expert's hidden features, and so a part of the sum that is the module's output. The inputs
    (hidden states, routing weights) are the same on every rank; the gradient of each, of which a rank computes
    a part, is summed.

    Where gate and up are fused into one weight, each rank has its part of both, and the parameter is a DTensor that says
    so: ``full_tensor()``, checkpoints and optimizers see the weight of the whole model. ``fully_shard`` afterwards
    has to cut it along another dim than the fused one, as it does by itself.

    Args:
        placements: the layout of each sharded parameter, by name.
        fused: how many equal blocks the sharded dim of a parameter is made of, by name: 2 for gate and up.

    Raises:
        PlanError: when applied to a module that does not own a parameter of such a name, or that owns a
            trainable one that is not named: every rank would add it to the sum; or with ``fused`` before torch 2.12.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> from namedmesh.tensor_parallel import ShardedExperts
        >>> ShardedExperts({"up_proj": Shard(1), "down_proj": Shard(2)})
        ShardedExperts({'up_proj': Shard(dim=1), 'down_proj': Shard(dim=2)})
    """

    whole_input = whole_output = True

    def __init__(
        self, placements: Mapping[str, Placement], *, fused: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(placements)
        self.fused = dict(fused or {})

    def __repr__(self) -> str:
        return f"ShardedExperts({self.placements}{f', fused={self.fused}' if self.fused else ''})"

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each parameter that the module does not own, or that would be added more than once."""
        placements = self.parameter_placements(module)
        whole = [
            name
            for name, _ in module.named_parameters(recurse=False)
            if isinstance(placements.get(name, Replicate()), Replicate)
        ]
        fused = [
            f"ShardedExperts finds {name!r} of {type(module).__name__} fused along its first dim, which fully_shard cuts; "
            f"name a later dim of stacked experts"
            for name in self.fused
            if getattr(placements.get(name), "dim", None) == 0
        ]
        if self.fused and not HAS_BLOCKS:
            fused.append(
                f"ShardedExperts with fused={self.fused} needs torch 2.12 or newer, and this is {TORCH}: its DTensors cannot "
                "be gathered from parts of gate and up; update torch, or have gate and up as two parameters"
            )
        return (
            super().incompatibilities(module)
            + fused
            + [
                f"ShardedExperts sums the output over the ranks, but {name!r} of {type(module).__name__} is whole on "
                f"every rank and would count once for each; name a layout that shards it"
                for name in whole
            ]
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        group = RankGroup(device_mesh)

        def shared(value: Any) -> Any:
            differentiable = isinstance(value, torch.Tensor) and value.requires_grad
            return sum_backward(value, group) if differentiable else value

        def prepare(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(map(shared, args)), {name: shared(value) for name, value in kwargs.items()}

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, output: sum_forward(output, group))
        return module


class IdentityExpert(ActivationStyle):
    """Divide the input of an expert that returns its input by the number of ranks.

    For such an expert inside :class:`ShardedExperts`, whose output is summed: every rank adds the same.

    Example:
        >>> from namedmesh.tensor_parallel import IdentityExpert
        >>> IdentityExpert()
        IdentityExpert()
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        module.register_forward_pre_hook(lambda _module, args: (args[0] / size, *args[1:]))
        return module
