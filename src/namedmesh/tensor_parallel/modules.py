"""Styles for modules that are no linears: own parameters used as plain tensors, what stays whole, sums of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._torch import local_parameters, replaced_parameters
from namedmesh.errors import PlanError
from namedmesh.tensor_parallel.collectives import Group, enter, leave
from namedmesh.tensor_parallel.styles import shard_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class LocalParameters(ParallelStyle):
    """Run a module's forward on this rank's shards of its own parameters, as plain tensors.

    For a norm over each head's features or over a rank's tokens (the weight is whole), or for a bare parameter with
    one number a head. The parameters become DTensors. A replicated one takes part on every rank with other
    data, so each makes a part of its gradient: a DTensor that is ``Partial`` until :func:`reduce_gradients` or an
    optimizer's step sums it. A sharded one's gradient is this rank's own.

    Args:
        placements: the layout of each parameter by name; by default all of the module's own are replicated.

    Raises:
        PlanError: when applied to a module that does not own a parameter of such a name.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel import LocalParameters, plan_report
        >>> norm = torch.nn.LayerNorm(8, bias=False, device="meta")
        >>> plan_report(norm, 2, LocalParameters()).rows[0].placement
        'Replicate()'
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = placements

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placements or ''})"

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the layout of every parameter that this style touches."""
        if self.placements is not None:
            return dict(self.placements)
        return {name: Replicate() for name, _ in module.named_parameters(recurse=False)}

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each parameter that the module does not own."""
        own = [name for name, _ in module.named_parameters(recurse=False)]
        return [
            f"{type(self).__name__} names {name!r}, but {type(module).__name__} owns {tuple(own)}"
            for name in self.placements or ()
            if name not in own
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        problems = self.incompatibilities(module)
        if problems:
            raise PlanError(*problems)
        placements = self.parameter_placements(module)
        shard_parameters(module, device_mesh, placements, self.src_data_rank)
        module.forward = LocalForward(module, tuple(placements))
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
        parameter: Tensor = getattr(self.module, name)
        if not isinstance(parameter, DTensor):
            return parameter
        layouts = tuple(Partial() if isinstance(each, Replicate) else each for each in parameter.placements)
        return local_parameters([parameter], [layouts])[0]


class KeepWhole(ParallelStyle):
    """Say in a plan that a module stays as it is, because every rank computes the same with it; nothing is changed.

    Example:
        >>> plan = {"layers.*.mlp.router": KeepWhole()}
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:  # noqa: ARG002  none, for any
        """Return nothing: the style touches no parameters."""
        return {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        return module


class SumOutput(KeepWhole):
    """Sum a module's output over the ranks, each of which computed a part of it.

    Example:
        >>> plan = {"layers.*.mlp.experts": SumOutput()}
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(_SumOutput(Group.of(device_mesh)))
        return module


class _SumOutput:
    """The hook: an object, so that the module can be pickled."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return leave(output, self.group)


class SumTailGradient(KeepWhole):
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
        module.register_forward_hook(_SumTail(Group.of(device_mesh), self.width))
        return module


class _SumTail(_SumOutput):
    def __init__(self, group: Group, width: int) -> None:
        super().__init__(group)
        self.width = width

    def __call__(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        rest, tail = output.split([output.shape[-1] - self.width, self.width], dim=-1)
        return torch.cat([rest, enter(tail, self.group)], dim=-1)
