"""Styles for modules other than linears and embeddings.

They replace the parameters of a module with DTensors, and run the module's own forward on the local
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch.modules import replace_parameters
from namedmesh.tensor_parallel.base_styles import Style
from namedmesh.tensor_parallel.collectives import Group, copy_to_tp_region, reduce_from_tp_region
from namedmesh.tensor_parallel.layers import Shards, local_params, shard_shapes
from namedmesh.tensor_parallel.styles import shard_parameters


class LocalParameters(Style):
    """Run a module's forward on the local tensors of its own parameters.

    For a norm over the features of each head or over a rank's tokens (the weight is replicated), or
    for a bare parameter with one value for each head (it is sharded). The gradient of a replicated
    parameter is partial (``Partial``) until :func:`reduce_gradients` or the optimizer step
    all-reduces it. The gradient of a sharded parameter is the local one. The forward and the
    backward do not communicate.

    A ``GroupNorm`` whose weight is sharded normalizes the local groups: its ``num_groups`` is
    divided by the number of ranks. A ``LayerNorm`` or ``RMSNorm`` needs all features, so its weight
    cannot be sharded.

    Args:
        placements: the placement of each parameter, by name; by default all parameters that the
            module itself owns are replicated.
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = placements

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placement of each parameter that the module itself owns.

        Args:
            module: the module.
            tp_size: the number of ranks. The placements of this style do not depend on it.
        """
        # A tied parameter has two names. Both of them get the same DTensor.
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if self.placements is None:
            return dict.fromkeys(params, Replicate())
        placements = dict(self.placements)
        for name, placement in placements.items():
            if isinstance(placement, Shard) and placement.dim < 0 and name in params:
                placements[name] = Shard(placement.dim + params[name].ndim)
        return placements

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        if not isinstance(self.layout(module, tp_size).get("weight"), Shard):
            return []
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            got = f"{type(module).__name__} normalizes over all features, of which each rank has a shard"
            return [f"{got}; gather them (ColwiseParallel(output_layouts=Replicate())) or norm each head"]
        if isinstance(module, nn.GroupNorm) and module.num_groups % tp_size:
            got = f"{module.num_groups} groups of GroupNorm are not divisible by the tp size {tp_size}"
            return [f"{got}; choose one that divides them"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.layout(module, device_mesh.size())
        if isinstance(module, nn.GroupNorm) and isinstance(placements.get("weight"), Shard):
            module.num_groups //= device_mesh.size()
        shard_parameters(module, device_mesh, placements, self.src_data_rank)
        for name, placement in placements.items():
            # A rank that did not use the module has no gradient. This attribute lets it join the
            # all-reduce of reduce_gradients nevertheless.
            param: Any = module.get_parameter(name)
            param.gradient_is_partial = isinstance(placement, Replicate)
        module.forward = LocalForward(module, placements)
        return module


class LocalForward:
    """Calls a module's own forward with local tensors in place of its parameters.

    It replaces ``module.forward`` and therefore runs inside of all hooks: FSDP2's pre-forward hook
    has all-gathered the parameters by then. It is an object and not a closure, because a deep copy
    of the module must not call the forward of the module that was copied.

    Attributes:
        shards: the shapes of the local shards, by the names of the parameters to replace.

    Args:
        module: the module, with its sharded parameters.
        names: the names of the parameters to replace.
        block_dims: for a parameter that is fused out of blocks, by name: the dim of the blocks. The
            forward gets this dim and the next one flattened.
    """

    def __init__(
        self, module: nn.Module, names: Iterable[str], block_dims: Mapping[str, int] | None = None
    ) -> None:
        self.module = module
        self.original: Callable[..., Any] = module.forward
        self.block_dims: dict[str, int] = dict(block_dims or {})
        self.shards: Shards = shard_shapes(module, names)
        if isinstance(self.original, LocalForward):
            # Experts may be sharded over etp, and then over ep. This forward replaces the other.
            self.block_dims |= self.original.block_dims
            self.original = self.original.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's own forward on local tensors.

        Raises:
            ShapeError: a parameter has another shape than the local shard.
        """
        params = {}
        for name, shard in zip(self.shards, local_params(self.module, self.shards), strict=True):
            params[name] = self.local_param(name, shard)
        with replace_parameters(self.module, params):
            return self.original(*args, **kwargs)

    def local_param(self, name: str, shard: Tensor) -> Tensor:
        """Return the local tensor of a parameter in the shape that the forward expects.

        Args:
            name: the name of the parameter.
            shard: its local tensor.
        """
        dim = self.block_dims.get(name)
        return shard if dim is None else shard.flatten(dim, dim + 1)


class NoParallel(Style):
    """Leave a module replicated and unchanged.

    Use it in a plan for a module that computes the same on every rank, such as the router of a
    mixture of experts. It makes no DTensors and does not communicate.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class AllReduceOutput(Style):
    """All-reduce the output of a module, which is partial on each rank.

    All parameters inside must be sharded: a replicated one, such as a bias, would count once per
    rank. The same holds for a residual that the module adds, which no plan shows.

    Forward: all-reduce of the output. Backward: identity.
    """

    # The plan reports parameters inside that are not sharded.
    sums_ranks = True

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Unlike a closure, a partial can be pickled with the model.
        module.register_forward_hook(partial(reduce_output, Group.of(device_mesh)))
        return module


def reduce_output(group: Group, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """All-reduce a partial output: a forward hook, if ``group`` is bound by ``partial``.

    Forward: all-reduce. Backward: identity. Collective: every rank of ``group`` must call it.

    Args:
        group: the ranks.
        output: the module's output.
    """
    return reduce_from_tp_region(output, group)


class AllReduceOutputGradient(Style):
    """All-reduce the gradient of some output features of a replicated module.

    For a replicated projection whose output each rank uses in part, outside of a column layer. The
    gradient of these features, and of the rows of the weight that compute them, would be partial:
    each rank adds the terms of its heads only. Example: the compressed keys and values of multi-head
    latent attention. A column layer takes all of them except the last 64 features, the rotary key,
    which the local heads of each rank use directly::

        plan["layers.*.attention.kv_a"] = AllReduceOutputGradient(slice(-64, None))

    Forward: identity. Backward: all-reduce of the gradient of the features.

    Args:
        features: a slice of the last dim of the output, with step 1; by default all features. Leave
            out the features that only column layers take: these all-reduce the gradient themselves,
            and it would be summed twice.
    """

    def __init__(self, features: slice = slice(None)) -> None:
        super().__init__()
        self.features = features

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks. It does not matter here.
        """
        if not isinstance(self.features, slice) or self.features.step not in {None, 1}:
            return [f"features must be a slice with step 1, got {self.features!r}; pass slice(start, stop)"]
        width = getattr(module, "out_features", None)
        if width is not None and not range(width)[self.features]:
            got = f"{self.features!r} selects none of the {width} output features"
            return [f"{got}; pass a slice(start, stop) of them"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_copy_features, Group.of(device_mesh), self.features))
        return module


def _copy_features(group: Group, features: slice, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Forward: identity. Backward: all-reduce for some output features. A forward hook."""
    start, stop, _ = features.indices(output.shape[-1])
    before, selected, after = output.tensor_split([start, stop], dim=-1)
    return torch.cat([before, copy_to_tp_region(selected, group), after], dim=-1)
