"""Styles for modules whose own parameters are used as plain shards: norms of heads, sums of parts, stacked experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._torch import HAS_BLOCKS, TORCH, replaced_parameters
from namedmesh.tensor_parallel.collectives import (
    RankGroup,
    local_shard,
    sum_backward,
    sum_forward,
    whole_parameter,
)
from namedmesh.tensor_parallel.placements import ActivationStyle, refuse_incompatible
from namedmesh.tensor_parallel.styles import shard_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class LocalParameters(ParallelStyle):
    """Run a module's forward on this rank's shards of its own parameters, as plain tensors.

    For a norm over each head's features (the heads are sharded, the weight is not), or for a bare parameter with
    one number a head. The parameters become DTensors. A replicated one takes part on every rank with other
    data, so each makes a part of its gradient: a DTensor that is ``Partial`` until :func:`reduce_gradients` or an
    optimizer's step sums it. A sharded one's gradient is this rank's own.

    Args:
        placements: the layout of each parameter by name; by default all of the module's own are replicated.

    Raises:
        PlanError: when applied to a module that does not own a parameter of such a name.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Shard
        >>> from namedmesh.tensor_parallel import LocalParameters, plan_report
        >>> norm = torch.nn.LayerNorm(8, bias=False, device="meta")
        >>> plan_report(norm, 2, LocalParameters()).rows[0].placement
        'Replicate()'
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = None if placements is None else dict(placements)

    def __repr__(self) -> str:
        return f"LocalParameters({self.placements or ''})"

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the layout of every parameter that this style touches."""
        if self.placements is not None:
            return self.placements
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each parameter that the module does not own."""
        own = [name for name, _ in module.named_parameters(recurse=False)]
        return [
            f"LocalParameters names {name!r}, but {type(module).__name__} owns {tuple(own)}"
            for name in self.placements or ()
            if name not in own
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_incompatible(self, module)
        shard_parameters(self)("", module, device_mesh)
        module.forward = LocalForward(module, tuple(self.parameter_placements(module)))
        return module


class LocalForward:
    """A module's own forward, with plain tensors where its parameters are.

    Inside all hooks, where FSDP2 has put the whole parameters already. An object, and no closure, because a deep copy
    of the module must not call the forward of the original.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module, self.original, self.names = module, module.forward, names

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward does."""
        with replaced_parameters(self.module, {name: self.plain(name) for name in self.names}):
            return self.original(*args, **kwargs)

    def plain(self, name: str) -> Tensor:
        """Return this rank's shard of a parameter, or all of it, of whose gradient each rank then makes a part."""
        parameter = getattr(self.module, name)
        if isinstance(parameter, DTensor) and parameter.placements == (Replicate(),):
            return whole_parameter(parameter)
        return local_shard(parameter)


class KeepWhole(ActivationStyle):
    """Say in a plan that a module stays as it is, because every rank computes the same with it; nothing is changed.

    Example:
        >>> plan = {"layers.*.mlp.router": KeepWhole()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        return module


class SumOutput(ActivationStyle):
    """Sum a module's output over the ranks, each of which computed a part of it.

    Example:
        >>> plan = {"layers.*.mlp.experts": SumOutput()}
    """

    whole_output = True

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = RankGroup(device_mesh)
        module.register_forward_hook(lambda _module, _args, output: sum_forward(output, group))
        return module


class SumTailGradient(ActivationStyle):
    """Sum the gradient of the last features of a module's output over the ranks.

    For a projection that every rank computes whole, of which each rank's heads use the tail directly, while
    the rest passes through a column style, which sums its gradient already (multi-head latent attention).

    Args:
        width: how many of the last features.

    Example:
        >>> plan = {"layers.*.self_attn.kv_a_proj_with_mqa": SumTailGradient(64)}
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def __repr__(self) -> str:
        return f"SumTailGradient({self.width})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, width = RankGroup(device_mesh), self.width

        def sum_tail(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            rest, tail = output.split([output.shape[-1] - width, width], dim=-1)
            return torch.cat([rest, sum_backward(tail, group)], dim=-1)

        module.register_forward_hook(sum_tail)
        return module


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
        >>> plan = {"layers.*.mlp.experts": ShardedExperts({"up_proj": Shard(1), "down_proj": Shard(2)})}
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
        kind, placements = type(module).__name__, self.parameter_placements(module)
        reasons = super().incompatibilities(module)
        for name in self.fused:
            if getattr(placements.get(name), "dim", None) == 0:
                reasons.append(
                    f"ShardedExperts finds {name!r} of {kind} fused along its first dim, which fully_shard cuts; name a "
                    f"later dim of stacked experts"
                )
        if self.fused and not HAS_BLOCKS:
            reasons.append(
                f"ShardedExperts with fused={self.fused} needs torch 2.12 or newer, and this is {TORCH}: its DTensors cannot "
                "be gathered from parts of gate and up; update torch, or have gate and up as two parameters"
            )
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(placements.get(name, Replicate()), Replicate):
                reasons.append(
                    f"ShardedExperts sums the output over the ranks, but {name!r} of {kind} is whole on every rank and "
                    f"would count once for each; name a layout that shards it"
                )
        return reasons

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
        >>> plan = {"layers.*.mlp.experts.identity": IdentityExpert()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        module.register_forward_pre_hook(lambda _module, args: (args[0] / size, *args[1:]))
        return module
