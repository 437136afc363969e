"""Styles that only Hugging Face's tensor-parallel plans need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from namedmesh.layout.sizes import find_shared_heads
from namedmesh.tensor_parallel.layers import RowEmbedding
from namedmesh.tensor_parallel.modules import LocalParameters
from namedmesh.tensor_parallel.styles import RowwiseParallel

GROUPS_ATTRIBUTE = "num_key_value_groups"
"""transformers' attribute for the number of query heads for each kv head."""


class RowwiseEmbedding(RowwiseParallel):
    """``RowwiseParallel`` for an embedding with its own forward, such as a scaled one.

    The forward gets the replicated embeddings from ``super().forward()``, as in one process.

    Forward: all-reduce of the embeddings. Backward: identity.
    """

    def fast_path_class(self, module: nn.Module) -> type | None:
        """Return a subclass of the module's class whose ``super().forward`` is the fast path.

        Args:
            module: the embedding.
        """
        layer_class = super().fast_path_class(module)
        if layer_class is not None:
            return layer_class
        # The forward of the module's class finds the fast path next in the order of the bases.
        module_class: Any = type(module)
        bases = (module_class, RowEmbedding)
        return type(module_class.__name__, bases, {"__module__": module_class.__module__})


class KeyValueGroups(LocalParameters):
    """Set ``num_key_value_groups`` of an attention module to its value on this rank.

    The number of query heads for each kv head changes if ranks share kv heads
    (:class:`KeyValueParallel`). The own parameters of the module, such as attention sinks, are
    local, as for :class:`LocalParameters`.

    Args:
        placements: the placement of each parameter that the module itself owns, by name.
        query_heads: the number of query heads of the full model.
        kv_heads: the number of kv heads of the full model.
    """

    def __init__(self, placements: Mapping[str, Placement], query_heads: int, kv_heads: int) -> None:
        super().__init__(placements)
        self.query_heads = query_heads
        self.kv_heads = kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp_size = device_mesh.size()
        if self.kv_heads % tp_size:
            heads_by_rank = find_shared_heads(self.query_heads, self.kv_heads, tp_size)
            # A kv head that several ranks compute counts on each of them.
            computed_heads = sum(map(len, heads_by_rank))
            setattr(module, GROUPS_ATTRIBUTE, self.query_heads // computed_heads)
        return super()._apply(module, device_mesh)
