"""The fast column and row styles: torch's own by type and by options, with local compute inside."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel

from namedmesh._torch import distribute_blocks, has_forward_hooks
from namedmesh.tensor_parallel.collectives import RankGroup
from namedmesh.tensor_parallel.embedding import ColwiseEmbedding, RowwiseEmbedding
from namedmesh.tensor_parallel.linear import ColwiseLinear, RowwiseLinear
from namedmesh.tensor_parallel.module_setup import Rows, StyleContext
from namedmesh.tensor_parallel.placements import parameter_placements, refuse_incompatible

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


class _FastStyle:
    """What the two fast styles have beside torch's."""

    def __init__(self, *, local_forward: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.local_forward = local_forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_module(self, module, device_mesh)


class ColwiseParallel(_FastStyle, TorchColwiseParallel):
    """Shard an ``nn.Linear``'s output features, or an ``nn.Embedding``'s vectors, over the ranks.

    The same options, parameters and results as torch's style of this name. The parameters are DTensors, so
    checkpoints, FSDP2, clipping and ``full_tensor()`` see whole tensors; the arithmetic is on plain tensors,
    with the sum of the input's gradient running while the weight's gradient is computed. A layout that this
    short way does not know, any subclass and any module with a forward of its own take torch's way: its forward
    gets and gives DTensors, and is right by their placements.

    What a model does with the sharded features until a row layer takes them has to be right for a part of them.
    ``nn.Dropout`` there draws one mask, the same on all ranks that are seeded alike, each for its own features: let the
    ranks draw from streams of their own (:func:`namedmesh.training.streams`).

    Args:
        input_layouts: how a plain input is laid out: ``Replicate()`` (the default), or ``Shard(dim)`` to
            gather it first (sequence parallelism).
        output_layouts: ``Shard(-1)`` (the default), ``Replicate()`` to gather the features, or another.
        use_local_output: hand out this rank's plain tensor (the default) instead of a DTensor.
        local_forward: let the forward of a subclass work on plain tensors, too: what its ``super().forward`` returns
            is this rank's shard, and what it does with that has to be right for a shard.

    Raises:
        PlanError: when applied to another kind of module, or to one that is already parallelized.

    Example:
        On 2 ranks each gets 4 of the 8 output features, and 4 rows of the weight:

        >>> import torch
        >>> from namedmesh.tensor_parallel import ColwiseParallel, plan_report
        >>> with torch.device("meta"):
        ...     layer = torch.nn.Linear(6, 8)
        >>> plan_report(layer, 2, {"": ColwiseParallel()}).rows[0].local_shape
        (4, 6)
    """


class RowwiseParallel(_FastStyle, TorchRowwiseParallel):
    """Shard an ``nn.Linear``'s input features, or an ``nn.Embedding``'s vocabulary, over the ranks.

    The same options, parameters and results as torch's style of this name, except that the output is
    synchronous: torch's asynchronous one is wrong under ``torch.compile`` together with FSDP2.

    Args:
        input_layouts: how a plain input is laid out: ``Shard(-1)`` (the default, also for the ids of an
            embedding: say ``Replicate()`` there), or ``Replicate()`` to let each rank take its features.
        output_layouts: ``Replicate()`` (the default) sums over the ranks; ``Shard(dim)`` leaves each rank
            its shard of the sum (sequence parallelism).
        use_local_output: as for :class:`ColwiseParallel`.
        local_forward: as for :class:`ColwiseParallel`.

    Raises:
        PlanError: when applied to another kind of module, or to one that is already parallelized.
        ShapeError: in the forward, on every rank, when the output cannot be split into equal shards.

    Example:
        On 2 ranks each gets 3 of the 6 input features, and the whole bias:

        >>> import torch
        >>> from namedmesh.tensor_parallel import RowwiseParallel, plan_report
        >>> with torch.device("meta"):
        ...     layer = torch.nn.Linear(6, 8)
        >>> [row.local_shape for row in plan_report(layer, 2, {"": RowwiseParallel()}).rows]
        [(8, 3), (8,)]
    """


def shard_module(style: Any, module: nn.Module, mesh: DeviceMesh, rows: Rows | None = None) -> nn.Module:
    """Shard the parameters, then give the module the forward for them; ``rows`` as in StyleContext."""
    refuse_incompatible(style, module)
    column = isinstance(style, ColwiseParallel)
    local_compute: dict[type[nn.Module], type[nn.Module]] = {
        nn.Linear: ColwiseLinear if column else RowwiseLinear,
        nn.Embedding: ColwiseEmbedding if column else RowwiseEmbedding,
    }
    layouts = style.input_layouts[0], style.output_layouts[0]
    setup = StyleContext(RankGroup(mesh), *layouts, use_local_output=style.use_local_output, rows=rows)
    partition = shard_parameters(style)
    # A subclass may do anything in its forward, and so may a forward set on the instance, or a hook with the output.
    own: Any = type(module)
    hooked = has_forward_hooks(module) and not (setup.whole_output or style.local_forward or rows)
    kind: Any = None if "forward" in vars(module) or hooked else local_compute.get(own)
    if kind is None and style.local_forward:
        sharded: Any = next(ours for base, ours in local_compute.items() if isinstance(module, base))
        kind = _on_sharded_base(own, sharded)
    if kind is None:
        # A forward that is not torch's own gets and gives DTensors.
        desired = Replicate() if column or isinstance(module, nn.Embedding) else Shard(-1)
        distribute_module(
            module,
            mesh,
            partition,
            # torch's annotations leave out what the functions return.
            lambda _module, inputs, _mesh: (setup.redistribute_input(inputs[0], desired), *inputs[1:]),  # type: ignore[arg-type]
            lambda module, output, _mesh: setup.redistribute_output(module, output),  # type: ignore[arg-type]
        )
        return module
    partition("", module, mesh)  # and not the modules inside, which work on plain tensors
    module.__class__ = kind
    module._setup = setup  # type: ignore[assignment]  # noqa: SLF001  it is one of ours now
    return module


@cache
def _on_sharded_base(kind: Any, ours: Any) -> type[nn.Module]:
    """Return the class again, with ours where its ``super().forward`` goes."""
    return type(kind.__name__, (kind, ours), {"__module__": kind.__module__})


def shard_parameters(style: ParallelStyle) -> Callable[[str, nn.Module, DeviceMesh], None]:
    """Replace the module's own parameters with DTensors, frozen ones included; for ``distribute_module``."""
    fused: dict[str, int] = getattr(style, "fused", {})

    def partition(fqn: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if fqn:  # a child of a subclass; torch replicates what it owns
            return
        for name, placement in (parameter_placements(style, module) or {}).items():
            parameter = getattr(module, name)
            if name in fused and isinstance(placement, Shard):
                shard = distribute_blocks(parameter, mesh, placement.dim, fused[name], style.src_data_rank)
            else:
                shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=style.src_data_rank)
            replace_parameter(module, name, shard)

    return partition


def replace_parameter(module: nn.Module, name: str, shard: Tensor) -> None:
    """Put a shard in the place of a parameter, with what users have noted on that, such as that it has no weight decay."""
    parameter = module.get_parameter(name)
    replacement = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    vars(replacement).update({**vars(parameter), **vars(replacement)})
    module.register_parameter(name, replacement)
