"""Parallel layers, mappings and the loss, once for all compatibility layers.

The classes of each legacy API are subclasses with its arguments. Legacy code reads ``weight.shape``
as the shape of the local shard, and sets attributes on parameters. Parameters are therefore plain
tensors and not DTensors. A layer keeps the group that it was created with. A size that the ranks of
the group do not divide raises a ContractError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat.errors import ContractError
from namedmesh.tensor_parallel import collectives
from namedmesh.tensor_parallel.collectives import Group, enter_tp_region, gather
from namedmesh.tensor_parallel.loss import rows_cross_entropy, target_problems

__all__ = ["VocabUtility", "divide_and_check_no_remainder", "ensure_divisibility"]
__all__ += ["split_tensor_along_last_dim"]

SELF_GROUP = Group("", 1, 0)
"""A group of one rank. It has no process group, because nothing is communicated over it."""

Initializer: TypeAlias = "Callable[[Tensor], Any]"
"""A function that fills a tensor in place, such as ``torch.nn.init.zeros_``."""


# --- arithmetic of shards ------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise a ContractError, which is an AssertionError, if a division leaves a remainder."""
    if numerator % denominator:
        raise ContractError(f"{numerator} is not divisible by {denominator}; use a multiple of {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of a division; raise a ContractError if it leaves a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


divide_and_check_no_remainder = divide


def check_shards(length: int, ranks: int, stride: int = 1, *, name: str) -> None:
    """Raise a ContractError if a length cannot be split into blocks of equal shards.

    A collective on unequal shards would abort the process inside the backend.

    Args:
        length: the length of the sharded dim.
        ranks: the number of shards in a block.
        stride: the number of blocks.
        name: the name of the length, for the message.
    """
    # One rank holds the full tensor, which is not split into blocks.
    if ranks > 1 and length % (ranks * stride):
        blocks = "" if stride == 1 else f" for each of {stride} blocks (the stride)"
        raise ContractError(
            f"{name} is {length}, which cannot be split into {ranks} equal shards{blocks}; "
            f"use a multiple of {ranks * stride}"
        )


def check_even(tensor: Tensor, dim: int, ranks: int) -> None:
    """Raise a ContractError if a dim of a tensor cannot be split into equal shards."""
    check_shards(
        tensor.shape[dim], ranks, name=f"the size of dim {dim} of a tensor of shape {tuple(tensor.shape)}"
    )


def scatter(tensor: Tensor, group: Group, dim: int) -> Tensor:
    """Forward: keep the local shard of a replicated tensor. Backward: all-gather.

    Raises:
        ContractError: the dim cannot be split into equal shards.
    """
    check_even(tensor, dim, group.size)
    return collectives.split(tensor, group, dim)


def sum_partial(partial: Tensor, group: Group, dim: int | None) -> Tensor:
    """Forward: all-reduce, or reduce-scatter along ``dim``. Backward: identity, or all-gather.

    Raises:
        ContractError: the dim cannot be split into equal shards.
    """
    if dim is not None:
        check_even(partial, dim, group.size)
    return collectives.exit_tp_region(partial, group, dim)


REGIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "copy_to": (collectives.copy_to_tp_region, ()),
    "reduce_from": (collectives.reduce_from_tp_region, ()),
    "scatter_to": (scatter, (-1,)),
    "gather_from": (gather, (-1,)),
}
"""The mappings of a tensor-parallel region, by the start of their legacy names.

Each is a function of a tensor and a group, and has the dim that it shards as a further argument.
Results are new tensors: selective activation checkpointing may have kept the inputs.
"""


def describe_region(function: Callable[..., Tensor]) -> str:
    """Return the docstring of a mapping: the first lines of the docstring of its function."""
    return (function.__doc__ or "").partition("\n\n")[0]


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor along its last dim into equal chunks.

    Args:
        tensor: a tensor ``(..., n)``.
        num_partitions: the number of chunks.
        contiguous_split_chunks: whether to copy the chunks into contiguous memory.

    Returns:
        Chunks ``(..., n / num_partitions)``. They are views of ``tensor``, unless copies were
        requested.
    """
    chunks: tuple[Tensor, ...] = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    if contiguous_split_chunks:
        return tuple(chunk.contiguous() for chunk in chunks)
    return chunks


class VocabUtility:
    """The range of vocabulary ids that a rank holds, as (first, last + 1).

    Example:
        >>> [VocabUtility.vocab_range_from_global_vocab_size(12, rank, 4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 12)]
    """

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int,
        rank: int,
        world_size: int,  # noqa: ARG004  the legacy signature has it
    ) -> tuple[int, int]:
        """Return the (first, last + 1) ids of a group rank, from the number of ids per rank."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the (first, last + 1) ids of a group rank, from the size of the vocabulary.

        Raises:
            ContractError: ``world_size`` does not divide the vocabulary.
        """
        local_vocab_size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(local_vocab_size, rank, world_size)


# --- layers with sharded weights ---------------------------------------------------------------


# The arguments of legacy layers that say how their parameters are made.
_USED_BY_CONSTRUCTORS = {"self", "__class__", "init_method", "stride", "bias", "tp_group"}
_USED_BY_CONSTRUCTORS |= {"keep_master_weight_for_test", "skip_weight_param_allocation"}


class ParallelLayer(nn.Module):
    """Base class of layers with a weight that is sharded across the ranks of a group.

    All ranks must have the same RNG state: each rank initializes the full weight and keeps its
    shard, so that the values do not depend on the number of ranks.

    Args:
        arguments: the arguments of the legacy class by name, from ``locals()``. Those that do not
            say how the parameters are made become attributes.

    Attributes:
        dim: the sharded dim of the weight.
        shape_attributes: the names of the attributes with the sizes of the full weight.
        local_attribute: the name of the attribute with the size of the local shard.
        group: the ranks that share the weight.
        params_dtype: the dtype of the parameters; None for torch's default.
        params_device: the device of the parameters; None for torch's default.
        init_dtype: the dtype in which the full weight is initialized; None for ``params_dtype``.
        perform_initialization: False to leave the weight as uninitialized memory.
        master_weight: the full weight, if the caller asked to keep it.
    """

    dim: ClassVar[int] = 0
    shape_attributes: ClassVar[tuple[str, str]] = ("out_features", "in_features")
    local_attribute: ClassVar[str] = "output_size_per_partition"
    group: Group
    params_dtype: torch.dtype | None = None
    params_device: torch.device | None = None
    init_dtype: torch.dtype | None = None
    perform_initialization = True
    weight: nn.Parameter
    bias: nn.Parameter | None
    master_weight: Tensor | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in arguments.items():
            if name not in _USED_BY_CONSTRUCTORS:
                setattr(self, name, value)
        self.group = self.find_group(arguments)
        self.make_parameters(arguments)

    def find_group(self, arguments: Mapping[str, Any]) -> Group:
        """Return the group for the arguments of the layer."""
        raise NotImplementedError

    def make_parameters(self, arguments: Mapping[str, Any]) -> None:
        """Create the local shard of the weight, and a bias of zeros for its output features.

        Args:
            arguments: the arguments of the layer. With a ``stride``, the dim has that many blocks,
                and each block is sharded separately. Fused weights (q, k and v, for example) have
                one block for each of them.

        Raises:
            ContractError: the dim cannot be split into equal shards.
        """
        stride = arguments.get("stride", 1)
        full_shape = [getattr(self, name) for name in self.shape_attributes]
        num_ranks = self.group.size
        check_shards(full_shape[self.dim], num_ranks, stride, name=self.shape_attributes[self.dim])
        local_shape = list(full_shape)
        local_shape[self.dim] //= num_ranks
        setattr(self, self.local_attribute, local_shape[self.dim])
        self.register_parameter("weight", None)
        if not arguments.get("skip_weight_param_allocation", False):
            shard = torch.empty(local_shape, dtype=self.params_dtype, device=self.params_device)
            if self.perform_initialization:
                dtype = self.init_dtype or shard.dtype
                full_weight = torch.empty(full_shape, dtype=dtype, device=shard.device)
                arguments["init_method"](full_weight)
                # On one rank, upstream ignores the stride, and the dim need not be a multiple of it.
                num_blocks = stride if num_ranks > 1 else 1
                blocks = full_weight.unflatten(self.dim, (num_blocks, num_ranks, -1))
                local_blocks = blocks.select(self.dim + 1, self.group.rank)
                shard.copy_(local_blocks.flatten(self.dim, self.dim + 1))
                if arguments.get("keep_master_weight_for_test", False):
                    self.master_weight = full_weight
            self.weight = nn.Parameter(shard)
        self.register_parameter("bias", None)
        if arguments.get("bias", False):
            zeros = torch.zeros(local_shape[0], dtype=self.params_dtype, device=self.params_device)
            self.bias = nn.Parameter(zeros)


class ColumnLayer(ParallelLayer):
    """Base class of linear layers with sharded output features.

    Attributes:
        gather_output: whether to all-gather the output features.
    """

    skip_bias_add = False

    def enter(self, input_: Tensor) -> Tensor:
        """Forward: identity. Backward: all-reduce of the input's gradient."""
        return enter_tp_region(input_, self.group, None)

    def project(self, input_: Tensor, weight: Tensor, gather_output: bool) -> Tensor:
        """Apply the layer; with ``gather_output``, all-gather the features.

        Args:
            input_: the replicated input.
            weight: the local shard of the weight.
            gather_output: whether the output is replicated.
        """
        output = F.linear(self.enter(input_), weight, None if self.skip_bias_add else self.bias)
        return gather(output, self.group, -1) if gather_output else output


class RowLayer(ParallelLayer):
    """Base class of linear layers with sharded input features.

    Attributes:
        input_is_parallel: whether the input is a local shard. A replicated input is sharded.
    """

    dim = 1
    local_attribute = "input_size_per_partition"

    def project(self, input_: Tensor, group: Group, *, sequence_dim: int | None = None) -> Tensor:
        """Apply the layer without its bias, which is replicated.

        Forward: all-reduce of the output, or reduce-scatter along ``sequence_dim``. Backward:
        identity, or all-gather.

        Args:
            input_: the local shard of the features, or the replicated input.
            group: the ranks across which the output is summed.
            sequence_dim: the dim along which the output is sharded.
        """
        if not self.input_is_parallel:
            input_ = scatter(input_, self.group, -1)
        return sum_partial(F.linear(input_, self.weight), group, sequence_dim)


class VocabEmbedding(ParallelLayer):
    """Base class of embeddings with a vocabulary that is sharded across the ranks of a group.

    Attributes:
        vocab_start_index: the first local id.
        vocab_end_index: the first id after the local ones.
        num_embeddings_per_partition: the number of local ids.
    """

    shape_attributes: ClassVar[tuple[str, str]] = ("num_embeddings", "embedding_dim")
    local_attribute = "num_embeddings_per_partition"
    padding_idx: int | None = None
    sparse = False

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.vocab_start_index: int = self.group.rank * self.num_embeddings_per_partition
        self.vocab_end_index: int = self.vocab_start_index + self.num_embeddings_per_partition

    def look_up(self, ids: Tensor, *, deterministic: bool = False) -> Tensor:
        """Return the embeddings of local ids, and zeros for ids that are out of shard.

        The result is partial; an all-reduce of it gives the embeddings of all ids.

        Args:
            ids: global ids, of any shape.
            deterministic: whether to index the weight, whose backward is deterministic, instead of
                calling ``F.embedding``.
        """
        out_of_shard = (ids < self.vocab_start_index) | (ids >= self.vocab_end_index)
        local_ids = (ids - self.vocab_start_index).masked_fill(out_of_shard, 0)
        if deterministic:
            embeddings = self.weight[local_ids]
        else:
            embeddings = F.embedding(local_ids, self.weight, self._local_padding_idx(), sparse=self.sparse)
        # Out-of-shard ids were looked up as local id 0. Masking also zeroes the gradient that this
        # row would get from them.
        return embeddings.masked_fill(out_of_shard.unsqueeze(-1), 0)

    def _local_padding_idx(self) -> int | None:
        """Return the padding id relative to the local vocabulary, or None if it is out of shard."""
        if self.padding_idx is None:
            return None
        # A negative padding id counts from the end of the global vocabulary, as in nn.Embedding.
        local_padding_idx = self.padding_idx % self.num_embeddings - self.vocab_start_index
        is_local = local_padding_idx in range(self.num_embeddings_per_partition)
        return local_padding_idx if is_local else None


# --- loss --------------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor, target: Tensor, group: Group, dtype: torch.dtype, label_smoothing: float = 0.0
) -> Tensor:
    """Return the cross entropy of each token, from logits with a sharded vocabulary.

    Forward: all-reduces of one value per token. Backward: no communication.

    With label smoothing the ranks return different losses: as in Megatron, the probability that is
    taken from the target is distributed over the entries of the local shard only.

    Args:
        logits: the local shard ``(..., v / t)``.
        target: global ids ``(...)``, replicated.
        group: the ranks that share the vocabulary.
        dtype: the dtype of the result, in which the loss is computed.
        label_smoothing: the probability that is taken from the target.

    Raises:
        ContractError: shapes or dtypes do not fit, or ``label_smoothing`` is out of range.
    """
    num_entries = logits.shape[-1]
    problems = target_problems(logits.shape, target)
    if not 0 <= label_smoothing < 1 or (label_smoothing and num_entries == 1):
        problems.append(
            "label_smoothing must be 0, or between 0 and 1 if each rank has several entries of the "
            f"vocabulary, got {label_smoothing} with {num_entries} entries"
        )
    if problems:
        raise ContractError(*problems)
    # Megatron rescales the smoothing, because its mean over the entries includes the target.
    smoothing = label_smoothing * num_entries / max(num_entries - 1, 1)
    if torch.promote_types(logits.dtype, dtype) is not dtype:
        logits = logits.to(dtype)
    return rows_cross_entropy(logits, target, None, group, dtype, smoothing, True)
