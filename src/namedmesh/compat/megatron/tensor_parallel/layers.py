"""Megatron's parallel layers: their names, arguments, attributes and results, on namedmesh's arithmetic.

Both generations of the interface work: older code passes no ``config``, newer code passes one (any object with
megatron-core's attributes; those that it lacks have their defaults). Parameters are plain tensors that hold
this rank's shard, marked with the attributes that Megatron's optimizers look for.

In the shapes below, t is the number of tensor-parallel ranks, s and b are the length of the sequence and the
batch size. With sequence parallelism, activations outside of the layers are ``(s / t, b, ...)``.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.megatron.tensor_parallel.attributes import (
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from namedmesh.compat.megatron.tensor_parallel.base import ParallelLayer, ParallelLinear
from namedmesh.compat.megatron.tensor_parallel.peers import peers_of
from namedmesh.compat.megatron.tensor_parallel.settings import Settings
from namedmesh.compat.partition import shapes_as_contract
from namedmesh.tensor_parallel.layers import check_blocks, column_linear, row_linear, vocabulary_embedding
from namedmesh.tensor_parallel.vocabulary import Lookup

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from namedmesh.tensor_parallel.layers import Initializer

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]

Result: TypeAlias = "tuple[Tensor, nn.Parameter | None]"


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are sharded over the tensor-parallel ranks.

    The weight is this rank's ``(output_size / t, input_size)``, the bias its ``(output_size / t,)``.

    Args:
        input_size: input features.
        output_size: output features, of all ranks together.
        config: megatron-core's configuration, or any object with some of its attributes. See :class:`Settings`.
        init_method: fills a weight. Ranks must be seeded alike: each draws the whole weight and keeps its
            shard.
        bias: with a bias, of zeros at first.
        gather_output: join the output features on every rank. Left out, it is False where a ``config`` is
            given and True where none is: each as its generation of the interface has it.
        stride: the number of blocks that the output features are made of, each sharded on its own.
        keep_master_weight_for_test: keep the whole weight as first drawn, in ``master_weight``.
        skip_bias_add: hand the bias out instead of adding it, for the caller to fuse with what follows.
        skip_weight_param_allocation: make no weight; one is passed to every forward.
        embedding_activation_buffer: kept, and not used.
        grad_output_buffer: kept, and not used.
        is_expert: the layer belongs to an expert: its ranks are those of the expert layout, and whoever
            dispatches the tokens communicates.
        tp_comm_buffer_name: taken, and not used.
        disable_grad_reduce: leave the input's gradient this rank's part, to be summed later.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Raises:
        ContractError: the ranks, times the stride, do not divide ``output_size``.
        ContractRuntimeError: the configuration asks for fused accumulation of gradients.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> layer = ColumnParallelLinear(6, 8, tp_group=torch.distributed.group.WORLD)
        >>> output, bias = layer(torch.zeros(5, 2, 6))
        >>> output.shape, bias, layer.weight.partition_dim
        (torch.Size([5, 2, 8]), None, 0)
        >>> torch.distributed.destroy_process_group()
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: object = None,
        init_method: Initializer = nn.init.xavier_normal_,
        bias: bool = True,
        gather_output: bool | None = None,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # noqa: ARG002  the legacy signature has it
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(input_size, output_size, config, is_expert=is_expert, tp_group=tp_group)
        ranks = self._peers.size
        self.output_size_per_partition = output_size // ranks
        self.gather_output = config is None if gather_output is None else gather_output
        self.skip_bias_add = skip_bias_add
        self.disable_grad_reduce = disable_grad_reduce
        self.embedding_activation_buffer = embedding_activation_buffer
        self.grad_output_buffer = grad_output_buffer
        if self.sequence_parallel and ranks == 1:
            warnings.warn(
                "sequence_parallel is set, but there is one tensor-parallel rank only and nothing to cut; "
                "ColumnParallelLinear goes on without it",
                stacklevel=2,
            )
            self.sequence_parallel = False
        self.allreduce_dgrad = ranks > 1 and not self.sequence_parallel and not disable_grad_reduce
        weight = not skip_weight_param_allocation
        self.make_parameters(init_method, 0, stride, weight=weight, bias=bias)
        if not keep_master_weight_for_test:
            self.master_weight = None

    @shapes_as_contract()
    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Result:
        """Return the output, and the bias if it is still to be added.

        Args:
            input_: ``(s, b, input_size)``, the same on every rank; with sequence parallelism
                ``(s / t, b, input_size)``, this rank's shard.
            weight: the shard of the weight to use instead of the layer's own.
            runtime_gather_output: join the output features or not, whatever the layer was made with.

        Returns:
            The output, ``(s, b, output_size / t)``, or ``(s, b, output_size)`` where it is gathered; and the
            bias with ``skip_bias_add``, else None.

        Raises:
            ContractRuntimeError: there is no weight, or it has another shape.
        """
        sequence = self.sequence_parallel and not self.explicit_expert_comm
        output = column_linear(
            input_,
            self._weight_for(weight),
            None if self.skip_bias_add else self.bias,
            self._peers,
            gather_dim=0 if sequence else None,
            gather_output=self.gather_output if runtime_gather_output is None else runtime_gather_output,
            sum_gradient=not (self.disable_grad_reduce or self.explicit_expert_comm),
        )
        return output, self.bias if self.skip_bias_add else None

    def _weight_for(self, weight: Tensor | None) -> Tensor:
        if weight is None:
            if self.weight is None:
                raise ContractRuntimeError(
                    "ColumnParallelLinear was made with skip_weight_param_allocation=True, and its forward got "
                    "no weight; pass weight="
                )
            return self.weight
        expected = (self.output_size_per_partition, self.input_size)
        if weight.shape != expected:
            raise ContractRuntimeError(
                f"ColumnParallelLinear got a weight of shape {tuple(weight.shape)}; pass this rank's shard, of "
                f"shape {expected}"
            )
        return weight

    def backward_dw(self) -> None:
        """Do nothing: the weight's gradient is never put off."""


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are sharded over the tensor-parallel ranks.

    The weight is this rank's ``(output_size, input_size / t)``; every rank has the whole bias.

    Args:
        input_size: input features, of all ranks together.
        output_size: output features.
        config: megatron-core's configuration, or any object with some of its attributes. See :class:`Settings`.
        init_method: fills a weight. Ranks must be seeded alike: each draws the whole weight and keeps its
            shard.
        bias: with a bias, of zeros at first. With sequence parallelism it is marked ``sequence_parallel``,
            and its gradient is that of this rank's shard of the sequence, to be summed over the ranks later.
        input_is_parallel: the input is this rank's shard already; otherwise each rank takes its own.
        skip_bias_add: hand the bias out instead of adding it, for the caller to fuse with what follows.
        stride: the number of blocks that the input features are made of, each sharded on its own.
        keep_master_weight_for_test: keep the whole weight as first drawn, in ``master_weight``.
        is_expert: the layer belongs to an expert: its ranks are those of the expert layout, and the output is
            left this rank's part of the sum, for whoever dispatches the tokens.
        tp_comm_buffer_name: taken, and not used.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Raises:
        ContractError: the ranks, times the stride, do not divide ``input_size``; or an expert's layer on
            several ranks is to add its bias, which would then count several times.
        ContractRuntimeError: sequence parallelism with an input that is not sharded yet, or the configuration asks
            for fused accumulation of gradients.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> layer = RowParallelLinear(8, 6, input_is_parallel=True, tp_group=torch.distributed.group.WORLD)
        >>> output, bias = layer(torch.zeros(5, 2, 8))
        >>> output.shape, bias, layer.weight.partition_dim
        (torch.Size([5, 2, 6]), None, 1)
        >>> torch.distributed.destroy_process_group()
    """

    weight: nn.Parameter

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: object = None,
        init_method: Initializer = nn.init.xavier_normal_,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # noqa: ARG002  the legacy signature has it
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(input_size, output_size, config, is_expert=is_expert, tp_group=tp_group)
        if self.sequence_parallel and not input_is_parallel:
            raise ContractRuntimeError(
                "RowParallelLinear got sequence_parallel with input_is_parallel=False; its input features must "
                "be cut already, as ColumnParallelLinear leaves them: pass input_is_parallel=True"
            )
        if self.explicit_expert_comm and not skip_bias_add:
            raise ContractError(
                "RowParallelLinear got is_expert with skip_bias_add=False; each rank's output is a part of a sum, "
                "in which the bias would count several times: pass skip_bias_add=True"
            )
        self.input_size_per_partition = input_size // self._peers.size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.make_parameters(init_method, 1, stride, weight=True, bias=bias)
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.master_weight is not None:
            keep = self.master_weight.to(self.settings.params_dtype)
            self.master_weight = keep if keep_master_weight_for_test else None

    @shapes_as_contract()
    def forward(self, input_: Tensor) -> Result:
        """Return the output, and the bias if it is still to be added.

        Args:
            input_: ``(s, b, input_size / t)``, this rank's features, where the input is parallel; otherwise
                ``(s, b, input_size)``, the same on every rank.

        Returns:
            The output, ``(s, b, output_size)``, the same on every rank; with sequence parallelism
            ``(s / t, b, output_size)``, this rank's shard. And the bias with ``skip_bias_add``, else None.

        Raises:
            ContractError: the input features or, with sequence parallelism, s cannot be split into equal shards.
        """
        output = row_linear(
            input_,
            self.weight,
            self._peers,
            input_is_parallel=self.input_is_parallel,
            scatter_dim=0 if self.sequence_parallel else None,
            sum_output=not self.explicit_expert_comm,
        )
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class VocabParallelEmbedding(ParallelLayer):
    """An embedding whose vocabulary is sharded over the tensor-parallel ranks.

    The weight is this rank's ``(num_embeddings / t, embedding_dim)``: the ids from ``vocab_start_index`` up to,
    and without, ``vocab_end_index``.

    Args:
        num_embeddings: the number of ids, of all ranks together.
        embedding_dim: features of a vector.
        init_method: fills a weight. Ranks must be seeded alike: each draws the whole weight and keeps its
            shard.
        reduce_scatter_embeddings: swap the first two dims of the output and leave each rank its shard of the
            sequence, as sequence parallelism wants it.
        config: megatron-core's configuration, or any object with some of its attributes. See :class:`Settings`.
        tp_group: the ranks; left out, the tensor-model-parallel group.

    Raises:
        ContractError: the ranks do not divide ``num_embeddings``; pad the vocabulary.

    Example:
        >>> import torch
        >>> from namedmesh import launch
        >>> _ = launch.init("cpu")
        >>> embedding = VocabParallelEmbedding(16, 6, tp_group=torch.distributed.group.WORLD)
        >>> embedding(torch.tensor([[0, 15, 3]])).shape
        torch.Size([1, 3, 6])
        >>> torch.distributed.destroy_process_group()
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Initializer = nn.init.xavier_normal_,
        *,
        reduce_scatter_embeddings: bool = False,
        config: object = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        settings = Settings.of(config, type(self).__name__)
        self._peers = peers_of(tp_group)
        with shapes_as_contract():
            check_blocks(num_embeddings, self._peers.size, what="num_embeddings")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = settings.deterministic_mode
        recipe = settings.recipe(init_method)
        self.weight, _ = recipe.weight(num_embeddings, embedding_dim, 0, self._peers)
        rows = self.num_embeddings_per_partition = self.weight.shape[0]
        self.vocab_start_index = self._peers.rank * rows
        self.vocab_end_index = self.vocab_start_index + rows
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    @shapes_as_contract()
    def forward(self, input_: Tensor) -> Tensor:
        """Return the vectors of some ids.

        Args:
            input_: ``(b, s)``, the same on every rank. On several ranks an id outside of the vocabulary
                gets zeros.

        Returns:
            ``(b, s, embedding_dim)``, the same on every rank; with ``reduce_scatter_embeddings`` this rank's
            ``(s / t, b, embedding_dim)``.

        Raises:
            ContractError: with ``reduce_scatter_embeddings``, t does not divide s.
        """
        return vocabulary_embedding(
            input_,
            self.weight,
            self._peers,
            Lookup(by_index=self.deterministic_mode),
            scatter_swapped=self.reduce_scatter_embeddings,
        )

    def extra_repr(self) -> str:
        """Return the sizes of the whole layer, and over how many ranks it is sharded."""
        return f"{self.num_embeddings}, {self.embedding_dim}, TP={self._peers.size}"
