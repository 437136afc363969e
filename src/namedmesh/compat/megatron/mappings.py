"""Megatron's region mappings, its vocabulary-parallel loss, and helpers of its layers.

The backward of each mapping is its adjoint: copy and all-reduce, scatter and gather, all-gather and
reduce-scatter. ``group`` is the tensor parallel group by default. In the shapes below, t is its
size; a dimension that t does not divide raises a ContractError. Results are new tensors, never
views of an input or of a shared buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from namedmesh.compat import layers
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import VocabUtility, divide, ensure_divisibility, split_tensor_along_last_dim
from namedmesh.compat.state import add_function
from namedmesh.tensor_parallel.collectives import Group, all_gather_to_tp_region, all_to_all_single, gather

OptionalGroup: TypeAlias = "ProcessGroup | None"

# The groups of layers by name. A layer keeps the name only: a process group cannot be copied or pickled
# with the layer.
groups_by_name: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def resolve_group(group: OptionalGroup, *, is_expert: bool = False) -> Group:
    """Return the group that a function was called with, or the tensor parallel group.

    Args:
        group: the argument of the function; None without one.
        is_expert: whether the default is the experts' tensor parallel group.

    Returns:
        The group; a group of one rank if ``torch.distributed`` is not initialized and no group was
        passed.
    """
    if group is None and not dist.is_initialized():
        return layers.SELF_GROUP
    if group is None:
        # Import it now, because install() replaces the module by megatron-core's.
        from namedmesh.compat.megatron import parallel_state

        if is_expert:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
    groups_by_name[group.group_name] = group
    return Group.of(group)


# --- region mappings ------------------------------------------------------------------------------

_MAPPINGS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "scatter_to_sequence_parallel_region": (layers.scatter, (0,)),
    "all_gather_last_dim_from_tensor_parallel_region": (all_gather_to_tp_region, (-1,)),
    "reduce_scatter_last_dim_to_tensor_parallel_region": (layers.sum_partial, (-1,)),
}
"""Functions of a tensor, a group, and the dim that they shard, by Megatron's names."""

for _kind, _region in layers.REGIONS.items():
    _MAPPINGS[f"{_kind}_tensor_model_parallel_region"] = _region


def _add_mapping(name: str, function: Callable[..., Tensor], dims: tuple[int, ...]) -> None:
    """Add the mapping of a row of the table to this module."""

    def mapping(input_: Tensor, group: OptionalGroup = None) -> Tensor:
        return function(input_, resolve_group(group), *dims)

    add_function(globals(), name, mapping, layers.describe_region(function))


if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _name, _row in _MAPPINGS.items():
    _add_mapping(_name, *_row)

__all__ = ["VocabUtility", "divide", "ensure_divisibility", "split_tensor_along_last_dim"]
__all__ += ["all_to_all", "all_to_all_hp2sp", "all_to_all_sp2hp", "gather_from_sequence_parallel_region"]
__all__ += ["param_is_not_tensor_parallel_duplicate", "reduce_scatter_to_sequence_parallel_region"]
__all__ += ["set_tensor_model_parallel_attributes", "vocab_parallel_cross_entropy"]
__all__ += list(_MAPPINGS)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: OptionalGroup = None,
    *,
    use_global_buffer: bool = False,  # noqa: ARG001  a new tensor cannot be overwritten by the next call
) -> Tensor:
    """Forward: all-gather along the sequence. Backward: reduce-scatter.

    Args:
        input_: the local shard, ``(s / t, ...)``.
        tensor_parallel_output_grad: whether the gradient is partial, as in a tensor parallel
            region. If it is False, all ranks compute the same gradient, and backward keeps the
            local shard without a sum.
        group: the group of the ranks.
        use_global_buffer: no effect.

    Returns:
        The full tensor, ``(s, ...)``.
    """
    ranks = resolve_group(group)
    if tensor_parallel_output_grad:
        return all_gather_to_tp_region(input_, ranks, 0)
    return gather(input_, ranks, 0)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: OptionalGroup = None,
    *,
    use_global_buffer: bool = False,  # noqa: ARG001  as above
) -> Tensor:
    """Forward: reduce-scatter along the sequence. Backward: all-gather.

    Args:
        input_: a partial tensor, ``(s, ...)``.
        group: the group of the ranks.
        use_global_buffer: no effect.

    Returns:
        The local shard of the sum, ``(s / t, ...)``.
    """
    return layers.sum_partial(input_, resolve_group(group), 0)


def all_to_all(
    group: OptionalGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Forward: all-to-all along dim 0. Backward: all-to-all in the opposite direction.

    Args:
        group: the group of the ranks, which has no default here.
        input_: the local tensor.
        output_split_sizes_: the number of rows received from each rank; by default equal shards.
        input_split_sizes: the number of rows sent to each rank; by default equal shards.

    Raises:
        ContractError: there is no group, or dim 0 cannot be split into equal shards.
    """
    if group is None:
        raise ContractError("all_to_all was called without a group; pass the process group of its ranks")
    ranks = resolve_group(group)
    if input_split_sizes is None:
        layers.check_even(input_, 0, ranks.size)
    return all_to_all_single(input_, ranks, (input_split_sizes, output_split_sizes_))


def all_to_all_sp2hp(input_: Tensor, group: OptionalGroup = None) -> Tensor:
    """Forward: all-to-all from sharded tokens to sharded features. Backward: the opposite.

    Args:
        input_: the local tokens, ``(tokens / t, h)``, with any number of token dims.
        group: the group of the ranks.

    Returns:
        All tokens, with the local shard of the features: ``(tokens, h / t)``.
    """
    ranks = resolve_group(group)
    layers.check_even(input_, -1, ranks.size)
    rows = input_.reshape(-1, input_.shape[-1])
    # The collective splits dim 0, so the features for each rank become a block of rows.
    return all_to_all_single(torch.cat(rows.chunk(ranks.size, dim=1)), ranks)


def all_to_all_hp2sp(input_: Tensor, group: OptionalGroup = None) -> Tensor:
    """Forward: all-to-all from sharded features to sharded tokens. Backward: the opposite.

    Args:
        input_: all tokens, with the local shard of the features: ``(tokens, h / t)``.
        group: the group of the ranks.

    Returns:
        The local tokens, ``(tokens / t, h)``.
    """
    ranks = resolve_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    layers.check_even(rows, 0, ranks.size)
    # Each rank sent its features of the local tokens: one block of rows each.
    return torch.cat(all_to_all_single(rows, ranks).chunk(ranks.size), dim=-1)


# --- loss -----------------------------------------------------------------------------------------


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: OptionalGroup = None,
) -> Tensor:
    """Return the cross entropy of each token in float32, from vocabulary-sharded logits.

    Smoothing is, as in Megatron, over the **local shard** of the vocabulary: the losses of the
    ranks differ. The loss of an id outside of the vocabulary is meaningless.

    Args:
        vocab_parallel_logits: the local shard of the logits, ``(s, b, v / t)``.
        target: the ids in the full vocabulary, ``(s, b)``, replicated.
        label_smoothing: the probability that is taken from the target, from 0 to 1.
        tp_group: the group of the ranks.

    Returns:
        The losses, ``(s, b)``.
    """
    group = resolve_group(tp_group)
    return layers.cross_entropy(vocab_parallel_logits, target, group, torch.float32, label_smoothing)


# --- attributes of parameters ---------------------------------------------------------------------


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the attributes by which Megatron recognizes how a tensor is sharded.

    Args:
        tensor: the local shard, or a replicated tensor.
        is_parallel: whether the tensor is a shard.
        dim: the sharded dim.
        stride: the number of fused blocks along this dim. Each block is sharded.

    Raises:
        ContractError: the tensor has the attributes already.
    """
    if hasattr(tensor, "tensor_model_parallel"):
        raise ContractError(
            f"the tensor of shape {tuple(tensor.shape)} has the tensor parallel attributes "
            "already; set them once, or delete them first"
        )
    vars(tensor).update(tensor_model_parallel=is_parallel, partition_dim=dim, partition_stride=stride)


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: OptionalGroup = None) -> bool:
    """Return whether this rank counts a parameter, for example in a norm.

    Every rank counts its shard of a sharded parameter. Only the first rank counts a replicated
    parameter.
    """
    # As upstream: a parameter without the attributes is replicated.
    return getattr(param, "tensor_model_parallel", False) or resolve_group(tp_group).rank == 0
