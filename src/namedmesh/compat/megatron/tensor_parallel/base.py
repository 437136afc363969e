"""What Megatron's layers share: their ranks, their parameters and the state that is more than parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from namedmesh.compat.megatron.tensor_parallel.attributes import set_tensor_model_parallel_attributes
from namedmesh.compat.megatron.tensor_parallel.peers import peers_of
from namedmesh.compat.megatron.tensor_parallel.settings import Settings
from namedmesh.compat.partition import shapes_as_contract
from namedmesh.tensor_parallel.layers import check_blocks

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from namedmesh.tensor_parallel.collectives import RankGroup
    from namedmesh.tensor_parallel.layers import Initializer


class ParallelLayer(nn.Module):
    """What the three layers share: a weight of which this rank has a shard."""

    _peers: RankGroup

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The ranks that share the layer; None where ``torch.distributed`` has not been initialized."""
        return self._peers.group


class ParallelLinear(ParallelLayer):
    """What the column and the row layer share: making the parameters, and an extra state that is empty."""

    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: object,
        *,
        is_expert: bool,
        tp_group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.settings = settings = Settings.of(config, type(self).__name__)
        self.config = settings if config is None else config
        self.is_expert = is_expert
        self.expert_parallel = settings.expert_model_parallel_size > 1
        self.sequence_parallel = settings.sequence_parallel
        self.gradient_accumulation_fusion = settings.gradient_accumulation_fusion
        self._peers = peers_of(tp_group, is_expert=is_expert)
        # The experts' tokens are gathered and summed by who dispatches them.
        self.explicit_expert_comm = is_expert and (self._peers.size > 1 or self.expert_parallel)
        self.master_weight = None
        # A state from before there was an extra one, or from a plain linear layer, loads all the same.
        self.register_load_state_dict_pre_hook(_allow_no_extra_state)  # type: ignore[no-untyped-call]

    def make_parameters(
        self, initialize: Initializer, dim: int, stride: int, *, weight: bool, bias: bool
    ) -> None:
        """Make this rank's shard of the weight, sharded along ``dim``, and its bias: sharded too, if the rows are."""
        rows, columns = self.output_size, self.input_size
        with shapes_as_contract():
            what = ("output_size", "input_size")[dim]
            check_blocks((rows, columns)[dim], self._peers.size, stride, what=what)
        recipe = self.settings.recipe(initialize, stride)
        if weight:
            shard, whole = recipe.weight(rows, columns, dim, self._peers)
            set_tensor_model_parallel_attributes(shard, is_parallel=True, dim=dim, stride=stride)
            self.register_parameter("weight", shard)
            self.master_weight = whole
        else:
            self.register_parameter("weight", None)
        if bias:
            mine = recipe.bias(rows if dim == 1 else rows // self._peers.size)
            if dim == 0:
                set_tensor_model_parallel_attributes(mine, is_parallel=True, dim=0, stride=stride)
            self.register_parameter("bias", mine)
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters(recurse=False):
            # Experts differ between data-parallel ranks, so their gradients are not summed over these.
            parameter.allreduce = not (self.is_expert and self.expert_parallel)  # type: ignore[attr-defined]

    def get_extra_state(self) -> None:
        """Return None: the entry ``_extra_state`` is in the state because Transformer Engine's layers have one."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state: what another implementation keeps there means nothing here."""

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer, and over how many ranks it is sharded."""
        return (
            f"in_features={self.input_size}, out_features={self.output_size}, bias={self.bias is not None}, "
            f"TP={self._peers.size}"
        )


def _allow_no_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    state.setdefault(f"{prefix}_extra_state", None)
