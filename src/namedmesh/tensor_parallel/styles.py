"""Styles for linears and embeddings: torch's own, with a fast path on local tensors.

Each style is a subclass of torch's, with the same options, parameter names and results, so that it
also works with ``torch.distributed.tensor.parallel.parallelize_module``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch.modules import has_hooks
from namedmesh._torch.tensors import RecomputedTensors, wrap_replicated
from namedmesh.layout.sizes import find_shared_heads
from namedmesh.tensor_parallel.base_styles import (
    Style,
    check_before_split,
    check_layer_type,
    layer_placements,
)
from namedmesh.tensor_parallel.collectives import Group, all_gather, enter_tp_region
from namedmesh.tensor_parallel.layers import (
    GATHERED_INPUT,
    PARTIAL,
    REPLICATED,
    ColumnLinear,
    LayerLayouts,
    RowEmbedding,
    RowLinear,
    shard_shapes,
    to_autocast_dtype,
)


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], src_data_rank: int | None
) -> None:
    """Replace a module's own parameters with DTensors.

    Collective: every rank of ``mesh`` must call it, unless ``src_data_rank`` is None.

    Args:
        module: the module.
        mesh: the one-dimensional mesh of the tensor-parallel ranks.
        placements: the placement of each parameter, by name.
        src_data_rank: the group rank whose parameters are scattered to the others; None to keep the
            local shard of each rank's own parameters.
    """
    for name, placement in placements.items():
        full = module.get_parameter(name)
        dtensor = distribute_tensor(full, mesh, [placement], src_data_rank=src_data_rank)
        replace_parameter(module, name, dtensor)


def replace_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter, and keep its ``requires_grad`` and its attributes.

    Args:
        module: the module that owns the parameter.
        name: its name.
        tensor: the new parameter.
    """
    old = module.get_parameter(name)
    new = nn.Parameter(tensor, requires_grad=old.requires_grad)
    # Optimizer setups read such attributes, for example to exclude a parameter from weight decay.
    vars(new).update({**vars(old), **vars(new)})
    module.register_parameter(name, new)


class _LayerStyle(Style):
    """Adds a fast path on local tensors to a torch style.

    Unsupported modules and layouts fall back to torch's DTensor path.
    """

    def __init__(self, *, heads: int | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.heads = heads

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        messages = check_layer_type(self, module)
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            value = vars(module).get(option)
            if value:
                messages.append(f"{self.name} does not support {option}={value} of an embedding; remove it")
        if self.heads and self.heads % tp_size:
            got = f"{self.heads} heads are not divisible by the tp size {tp_size}"
            messages.append(f"{got}; choose one that divides them")
        return messages

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placement of each parameter of a module, by name.

        Args:
            module: the linear or the embedding.
            tp_size: the number of ranks.
        """
        return layer_placements(self, module)

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """Shard the parameters of the module to which the style is applied."""
        # torch calls this for every submodule. In a subclass of nn.Linear with linears inside, its
        # own function would shard those too. Only the module itself has the name "".
        if not name:
            placements = self.layout(module, device_mesh.size())
            shard_parameters(module, device_mesh, placements, self.src_data_rank)

    _partition_embedding_fn = _partition_linear_fn

    def fast_path_class(self, module: nn.Module) -> type | None:
        """Return the class to set on a module, whose forward computes on local tensors.

        Args:
            module: the module.

        Returns:
            The class; None if the module must take torch's DTensor path.
        """
        raise NotImplementedError

    def _apply(self: Any, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        (input_layout,) = self.input_layouts
        (output_layout,) = self.output_layouts
        layer_class = self.fast_path_class(module)
        if layer_class is None:
            check_before_split(module, output_layout, device_mesh.size())
            applied: nn.Module = super()._apply(module, device_mesh)  # type: ignore[safe-super]  # torch's style
            applied.register_forward_hook(_wait_for_output)
            return applied
        self._partition_linear_fn("", module, device_mesh)
        module.__class__ = layer_class
        module.layouts = LayerLayouts(
            group=Group.of(device_mesh),
            input_dim=getattr(input_layout, "dim", None),
            output_dim=getattr(output_layout, "dim", None),
            use_local_output=self.use_local_output,
        )
        names = ["weight"] if isinstance(module, nn.Embedding) else ["weight", "bias"]
        module.shards = shard_shapes(module, names)
        return module  # type: ignore[no-any-return]  # with an attribute that no module has


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether a module needs torch's path: hooks may expect DTensors.

    A forward that is set on the instance hides the one of a class.
    """
    return "forward" in vars(module) or has_hooks(module)


def _wait_for_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Wait for an asynchronous output: a forward hook on torch's DTensor path."""
    # torch's styles return an AsyncCollectiveTensor. Compiled code silently takes it for a plain
    # tensor, before the collective has finished. A copy waits for it.
    if isinstance(output, Tensor) and type(output) not in {Tensor, DTensor}:
        return output.clone()
    return output


class ColwiseParallel(_LayerStyle, torch_styles.ColwiseParallel):
    """Shard the output features of a linear, or the embedding dim of an embedding.

    Forward: identity, or all-gather of a sharded input; for a replicated output also all-gather of
    the features. Backward: all-reduce, or reduce-scatter, of the input's gradient.

    It has the options, parameters and results of torch's style of this name, but a linear computes
    ``F.linear`` on local tensors. Other layouts, embeddings, subclasses, and modules with hooks or
    with a forward set on the instance take torch's DTensor path.

    The code between a column and a row layer works on a shard of the features, and must be correct
    for a shard. ``nn.Dropout`` there draws the same mask on all ranks with the same seed, except
    from :func:`namedmesh.training.rng_stream`.

    Args:
        input_layouts: ``Replicate()`` (the default), or ``Shard(dim)`` to all-gather a plain input
            first (sequence parallelism).
        output_layouts: ``Shard(-1)`` (the default), ``Replicate()`` to all-gather the features, or
            another.
        use_local_output: return the local tensor (the default) instead of a DTensor.
        heads: the number of heads, or other equal consecutive groups, of the output features. Each
            rank then gets complete heads. A fused layer that is interleaved per head may be sharded
            with it.
    """

    def fast_path_class(self, module: nn.Module) -> type | None:
        """Return the class of the fast path for a module and the layouts of this style.

        Args:
            module: the module.

        Returns:
            None if only torch's DTensor path supports the combination.
        """
        (input_layout,) = self.input_layouts
        (output_layout,) = self.output_layouts
        supports_layouts = isinstance(input_layout, Shard | Replicate) and output_layout in {
            Shard(-1),
            Replicate(),
        }
        is_supported = type(module) is nn.Linear and supports_layouts and not _has_own_forward(module)
        return ColumnLinear if is_supported else None


class RowwiseParallel(_LayerStyle, torch_styles.RowwiseParallel):
    """Shard the input features of a linear, or the vocabulary of an embedding.

    Forward: all-reduce, or reduce-scatter, of the output. Backward: identity, or all-gather of the
    output's gradient; for a replicated input also all-gather of its gradient.

    Like :class:`ColwiseParallel`, it is torch's style of this name on local tensors. The output is
    synchronous: torch's asynchronous one is wrong under ``torch.compile`` together with FSDP2.

    Args:
        input_layouts: ``Shard(-1)`` (the default, also for the ids of an embedding: pass
            ``Replicate()`` there), or ``Replicate()`` to use the local shard of the features.
        output_layouts: ``Replicate()`` (the default) to all-reduce; ``Shard(dim)`` to
            reduce-scatter into equal shards (sequence parallelism). The forward raises a
            ShapeError if the shards would be unequal.
        use_local_output: as for :class:`ColwiseParallel`.
    """

    def fast_path_class(self, module: nn.Module) -> type | None:
        """Return the class of the fast path for a module and the layouts of this style.

        Args:
            module: the module.

        Returns:
            None if only torch's DTensor path supports the combination.
        """
        layer_class = {nn.Linear: RowLinear, nn.Embedding: RowEmbedding}.get(type(module))
        (input_layout,) = self.input_layouts
        (output_layout,) = self.output_layouts
        # Ids can be sharded along any dim: they are all-gathered.
        supports_input = input_layout in {Replicate(), Shard(-1)} or (
            isinstance(input_layout, Shard) and layer_class is RowEmbedding
        )
        supports_output = output_layout == Replicate() or (
            isinstance(output_layout, Shard) and output_layout.dim >= 0
        )
        if supports_input and supports_output and not _has_own_forward(module):
            return layer_class
        return None


class SharedInput(Style):
    """All-gather a module's first input once for all column styles inside of the module.

    For an attention or a feed-forward module. The column styles inside keep their default input
    layout. The module gets a replicated DTensor; the gradients that its column layers compute are
    partial.

    Forward: identity, or all-gather. Backward: one all-reduce, or reduce-scatter, of the input's
    gradient for all column layers. An input that is a DTensor already is redistributed.

    With ``reshard_after_forward``, the column layers save their local shard of the input for the
    backward in place of the gathered input. Of ``n`` ranks, each saves ``1 / n`` of it. Backward:
    one more all-gather, as in Megatron-LM. It saves no memory in a block that activation
    checkpointing recomputes. The compiler decides in compiled code, and layers on torch's DTensor
    path save the gathered input.

    Args:
        input_layouts: ``Shard(dim)`` to all-gather a plain input (sequence parallelism), or
            ``Replicate()`` (the default) to all-reduce the gradient only.
        reshard_after_forward: whether the backward all-gathers the input again, as the option of
            this name of ``fully_shard`` does with parameters.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, reshard_after_forward: bool = False
    ) -> None:
        super().__init__()
        self.input_layouts: Placement = input_layouts or Replicate()
        self.reshard_after_forward = reshard_after_forward

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks. It does not matter here.
        """
        if self.reshard_after_forward and not isinstance(self.input_layouts, Shard):
            got = f"reshard_after_forward needs a sharded input, got {self.input_layouts!r}"
            return [f"{got}; pass input_layouts=Shard(dim), or reshard_after_forward=False"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Unlike a closure, a partial can be pickled with the model.
        hook = partial(_share_input, self, Group.of(device_mesh), device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


def _share_input(  # noqa: PLR0917  a hook's
    style: SharedInput, group: Group, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Replace the first argument of a module with a replicated DTensor: a forward pre-hook."""
    dim: Any = getattr(style.input_layouts, "dim", None)

    def replicate(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            if x.placements == REPLICATED:
                return x
            # DTensor gathers shards of different sizes, and shards of another dim.
            if x.placements != (style.input_layouts,) or x.shape[dim] % group.size:
                return x.redistribute(placements=REPLICATED)
            x = x.to_local()
        shard = to_autocast_dtype(x)
        full = enter_tp_region(shard, group, dim)
        replicated = wrap_replicated(full, mesh, PARTIAL)
        if style.reshard_after_forward and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gather_again = partial(_gather_again, group, dim)
            setattr(replicated, GATHERED_INPUT, RecomputedTensors(gather_again, [shard], [full]))
        return replicated

    if args:
        return (replicate(args[0]), *args[1:]), kwargs
    name = next(iter(inspect.signature(module.forward).parameters))
    if name not in kwargs:  # The forward of a wrapper may take ``*args, **kwargs``.
        name = next(iter(kwargs))
    return args, kwargs | {name: replicate(kwargs[name])}


def _gather_again(group: Group, dim: int, shard: Tensor) -> list[Tensor]:
    """All-gather the input of column layers once more, in the backward."""
    return [all_gather(shard, group, dim)]


class KeyValueParallel(ColwiseParallel):
    """Shard a key or value linear; each rank gets the kv heads that its queries attend to.

    If the number of ranks divides the kv heads, it is ``ColwiseParallel``. If not (one kv head and
    two ranks), the weight is replicated, and each rank computes the kv heads that its queries need;
    the weight's gradient is partial until it is all-reduced. The attention then has one kv head for
    each group of its queries, and must compute the number of repetitions from the shapes.

    Forward and backward: the collectives of :class:`ColwiseParallel`. A replicated weight adds the
    all-reduce of its gradient before the optimizer step.

    Args:
        query_heads: the number of query heads of the full model.
        kv_heads: the number of kv heads of the full model; by default as many as query heads.
        input_layouts: as for :class:`ColwiseParallel`.
    """

    def __init__(
        self, query_heads: int, kv_heads: int | None = None, *, input_layouts: Placement | None = None
    ) -> None:
        # torch's style takes None for the default layout.
        super().__init__(heads=kv_heads or query_heads, input_layouts=input_layouts)
        self.query_heads = query_heads
        self.kv_heads: int = kv_heads or query_heads

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placement of each parameter: replicated if ranks share kv heads.

        Args:
            module: the linear.
            tp_size: the number of ranks.
        """
        placements = super().layout(module, tp_size)
        if self.kv_heads % tp_size == 0:
            return placements
        return dict.fromkeys(placements, Replicate())

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        features = getattr(module, "out_features", 1)
        if features % self.kv_heads:
            return [f"{self.kv_heads} kv heads do not divide out_features {features}"]
        if self.kv_heads % tp_size == 0:
            return []
        if not find_shared_heads(self.query_heads, self.kv_heads, tp_size):
            counts = f"{self.query_heads} query heads and {self.kv_heads} kv heads"
            remedy = f"choose a tp size that divides {self.query_heads}"
            return [f"{counts} cannot be shared by {tp_size} ranks; {remedy}"]
        if not self.fast_path_class(module):
            kind = type(module).__name__
            return [f"ranks share kv heads with the forward of nn.Linear only, without hooks, not {kind}'s"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied: Any = super()._apply(module, device_mesh)
        tp_size = device_mesh.size()
        if self.kv_heads % tp_size == 0:
            return applied  # type: ignore[no-any-return]  # with an attribute that no module has
        heads = find_shared_heads(self.query_heads, self.kv_heads, tp_size)[device_mesh.get_local_rank()]
        width = len(applied.get_parameter("weight")) // self.kv_heads
        applied.rows = [(head * width, width) for head in heads]
        return applied  # type: ignore[no-any-return]
