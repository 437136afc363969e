"""Styles for modules other than linears and embeddings.

They replace the parameters of a module with DTensors, and run the module's own forward on the local
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch import replace_parameters
from namedmesh.tensor_parallel.collectives import Group, reduce_from_tp_region
from namedmesh.tensor_parallel.layers import local_params, shard_shapes
from namedmesh.tensor_parallel.styles import shard_parameters


class LocalParameters(ParallelStyle):
    """Run a module's forward on the local tensors of its own parameters.

    For a norm over the features of each head or over a rank's tokens (the weight is replicated), or
    for a bare parameter with one value for each head (it is sharded). The gradient of a replicated
    parameter is partial (``Partial``) until :func:`reduce_gradients` or the optimizer step
    all-reduces it. The gradient of a sharded parameter is the local one. The forward and the
    backward do not communicate.

    Args:
        placements: the placement of each parameter, by name; by default all parameters that the
            module itself owns are replicated.
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = placements

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:  # noqa: ARG002  as for the other styles
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

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements = self.layout(module, device_mesh.size())
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
        self.original = module.forward
        self.names = tuple(names)
        self.block_dims = dict(block_dims or {})
        self.shards = shard_shapes(module, self.names)
        inner = self.original
        while isinstance(inner, LocalForward):
            # Several styles may be applied to one module: experts are sharded over etp, and then
            # over ep. The inner forward gets parameters that are sharded over both.
            shapes = {}
            for name, shape in inner.shards.items():
                shapes[name] = self.shards.get(name, shape)
            inner.shards = shapes
            inner = inner.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's own forward on local tensors.

        Raises:
            ShapeError: a parameter has another shape than the local shard.
        """
        shards = local_params(self.module, self.shards)
        params = {}
        for name, shard in zip(self.names, shards, strict=True):
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


class NoParallel(ParallelStyle):
    """Leave a module replicated and unchanged.

    Use it in a plan for a module that computes the same on every rank, such as the router of a
    mixture of experts. It makes no DTensors and does not communicate.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        return module


class AllReduceOutput(ParallelStyle):
    """All-reduce the output of a module, which is partial on each rank.

    Forward: all-reduce of the output. Backward: identity.
    """

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
