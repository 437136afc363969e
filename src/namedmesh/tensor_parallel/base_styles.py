"""The base class of parallel styles, and the adapter of torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from namedmesh.tensor_parallel.collectives import check_divides


class Style(ParallelStyle):
    """The base class of parallel styles, with all that ``parallelize`` asks of a style.

    A style has to define ``_apply(module, device_mesh)``, as torch's styles do. The plan is checked
    and reported by the other members; override those for which the defaults are not right. Torch's
    own styles, and other subclasses of ``ParallelStyle``, can be used in a plan as they are.

    Attributes:
        heads: the number of equal consecutive groups of the output features of a column layer, of
            which each rank gets complete ones; None if the features are not grouped.
        fused: for a parameter that is fused out of equal blocks, by name: the number of blocks.
            Each rank gets a shard of every block.
        sums_ranks: whether the style sums the output of the module over the ranks. The module must
            not contain a replicated parameter then.
        takes_distributed: whether parameters may be sharded over another axis already.
        ranks_have_own_data: whether the ranks run the module on different data. Their gradients are
            not compared then.

    Example:
        >>> class ScaledOutput(Style):
        ...     def problems(self, module, tp_size):
        ...         return [] if hasattr(module, "scale") else ["has no scale; leave it out"]
        ...
        ...     def _apply(self, module, device_mesh):
        ...         module.scale /= device_mesh.size()
        ...         return module
    """

    heads: int | None = None
    fused: Mapping[str, int] = {}
    sums_ranks = False
    takes_distributed = False
    ranks_have_own_data = False

    @property
    def name(self) -> str:
        """The name of the style in messages."""
        return type(self).__name__

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placement that the style gives to parameters, by name.

        Other parameters stay as they are.

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        return {}

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why the style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        return []


LAYER_STYLES = (torch_styles.ColwiseParallel, torch_styles.RowwiseParallel)
"""The styles for linears and embeddings: torch's own, and the subclasses of namedmesh."""


class TorchStyle(Style):
    """Adapts a style of torch, or of a third party, which states less about itself.

    Args:
        style: the style.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    @property
    def name(self) -> str:
        """The name of torch's style."""
        return type(self.style).__name__

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placements of a layer style or ``SequenceParallel``; empty for other styles.

        Args:
            module: the module.
            tp_size: the number of ranks. It does not matter here.
        """
        if isinstance(self.style, LAYER_STYLES):
            return layer_placements(self.style, module)
        if isinstance(self.style, torch_styles.SequenceParallel):
            return dict.fromkeys(dict(module.named_parameters(remove_duplicate=False)), Replicate())
        return {}

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reason why a layer style does not fit a module (empty if it does).

        Args:
            module: the module.
            tp_size: the number of ranks. It does not matter here.
        """
        return check_layer_type(self, module) if isinstance(self.style, LAYER_STYLES) else []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(self.style, LAYER_STYLES):
            check_before_split(module, self.style.output_layouts[0], device_mesh.size())
        return parallelize_module(module, device_mesh, self.style, src_data_rank=self.src_data_rank)


def check_layer_type(style: Style, module: nn.Module) -> list[str]:
    """Return the reason why a column or row style does not fit a module (empty if it does).

    Args:
        style: the style.
        module: the module.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        return []
    got = f"{style.name} fits nn.Linear and nn.Embedding, not {type(module).__name__}"
    return [f"{got}; use SequenceParallel for a norm, or name the linear inside (base_layer of an adapter)"]


def check_before_split(module: nn.Module, layout: Placement, tp_size: int) -> None:
    """Let a module raise a ShapeError before torch's style makes unequal shards of its output.

    The collective of unequal shards would end the process. It must be called before torch's style
    is applied, so that its forward hook runs before the hook of the style.

    Args:
        module: the module.
        layout: the output layout of the style.
        tp_size: the number of ranks.
    """
    if isinstance(layout, Shard):
        module.register_forward_hook(partial(_check_output_divides, layout, tp_size))


def _check_output_divides(layout: Shard, tp_size: int, _module: nn.Module, _args: Any, output: Any) -> None:
    """Check the size of an output, which is still a DTensor: a forward hook."""
    if output.placements[0] not in {layout, Shard(layout.dim % output.ndim)}:
        check_divides(output.shape, layout.dim, tp_size)


def layer_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """Return the parameter placements of a linear or an embedding under a column or row style.

    Args:
        style: a column style, or else a row style; torch's own are accepted too.
        module: the linear or the embedding.
    """
    is_column = isinstance(style, torch_styles.ColwiseParallel)
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(1) if is_column else Shard(0)}
    placements: dict[str, Placement] = {"weight": Shard(0) if is_column else Shard(1)}
    if getattr(module, "bias", None) is not None:
        placements["bias"] = Shard(0) if is_column else Replicate()
    return placements
