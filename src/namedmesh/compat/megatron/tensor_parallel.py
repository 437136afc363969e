"""Megatron's tensor parallel layers, and its region mappings, loss and helpers.

``config`` is any object with megatron-core's attributes. The layers read ``params_dtype``,
``sequence_parallel``, ``expert_model_parallel_size``, ``perform_initialization``,
``use_cpu_initialization``, ``deterministic_mode`` and ``gradient_accumulation_fusion``. Older code
passes no ``config``.

Parameters are plain tensors that hold the local shard, with the attributes that Megatron's
optimizers read. Seed the ranks of a tensor parallel group identically: each rank initializes the full
weight and keeps its shard.
In the shapes below, t is the number of tensor parallel ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from namedmesh.compat import layers as shared  # `layers` is another name below
from namedmesh.compat.errors import ContractError, ContractRuntimeError
from namedmesh.compat.layers import Initializer
from namedmesh.compat.megatron import mappings as _mappings  # the same
from namedmesh.compat.megatron.mappings import *
from namedmesh.compat.megatron.mappings import set_tensor_model_parallel_attributes
from namedmesh.launch.default_group import default_group_device
from namedmesh.tensor_parallel.collectives import Group, enter_tp_region

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += _mappings.__all__

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


Result: TypeAlias = "tuple[Tensor, nn.Parameter | None]"


def find_accelerator() -> torch.device | None:
    """Return the current device of the default group's accelerator; None for a CPU."""
    if dist.is_initialized():
        kind = default_group_device().type
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return None
    return torch.device(kind, torch.get_device_module(kind).current_device())


class _Layer(shared.ParallelLayer):
    """Base class of the three layers: the group, and the attributes from ``config``."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        config = arguments["config"]
        self.params_dtype: torch.dtype | None = getattr(config, "params_dtype", None)
        on_cpu = getattr(config, "use_cpu_initialization", False)
        self.params_device: torch.device | None = None if on_cpu else find_accelerator()
        # As upstream: the full weight is initialized in float32, so that all dtypes round the same
        # values.
        self.init_dtype: torch.dtype = torch.float32
        self.perform_initialization: bool = getattr(config, "perform_initialization", True)
        if getattr(config, "gradient_accumulation_fusion", False):
            raise ContractRuntimeError(
                f"{type(self).__name__}: gradient_accumulation_fusion is not supported, because it "
                "needs APEX's CUDA extension; set gradient_accumulation_fusion=False"
            )
        super().__init__(arguments)

    def find_group(self, arguments: Mapping[str, Any]) -> Group:
        """Return the group for the arguments of the layer."""
        return _mappings.resolve_group(arguments["tp_group"], is_expert=arguments.get("is_expert", False))

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The group of the layer; None if ``torch.distributed`` was not initialized."""
        return _mappings.groups_by_name.get(self.group.name)


class _Linear(_Layer):
    """Base class of the two linear layers: Megatron's parameter attributes, extra state."""

    shape_attributes: ClassVar[tuple[str, str]] = ("output_size", "input_size")

    def make_parameters(self, arguments: Mapping[str, Any]) -> None:
        """Make the parameters, with Megatron's attributes."""
        super().make_parameters(arguments)
        self.sequence_parallel: bool = getattr(self.config, "sequence_parallel", False)
        expert_parallel = getattr(self.config, "expert_model_parallel_size", 1) > 1
        # The token dispatcher all-gathers the tokens of experts and reduce-scatters their outputs.
        self.explicit_expert_comm: bool = self.is_expert and (self.group.size > 1 or expert_parallel)
        for param in self.parameters(recurse=False):
            # The bias of a row layer is replicated.
            if param is self.weight or self.dim == 0:
                set_tensor_model_parallel_attributes(param, True, self.dim, arguments["stride"])
            # Data parallel ranks have different experts, so the gradients of experts are not
            # all-reduced over them.
            param.allreduce = not (self.is_expert and expert_parallel)  # type: ignore[attr-defined]
        self.register_load_state_dict_pre_hook(_ignore_extra_state)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> None:
        """Return None: state dicts have an extra state as with Transformer Engine's layers."""


def _ignore_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    """Load hook: remove the extra state, which saved state dicts may or may not have."""
    state.pop(f"{prefix}_extra_state", None)


class ColumnParallelLinear(_Linear, shared.ColumnLayer):
    """A linear layer whose output features are sharded over the tensor parallel ranks.

    The local shard of the weight is ``(output_size / t, input_size)``, the local bias
    ``(output_size / t,)``.

    Forward: identity, or with sequence parallelism all-gather of the sequence; with
    ``gather_output`` also all-gather of the output features. Backward: all-reduce of the input's
    gradient, or with sequence parallelism reduce-scatter.

    Args:
        input_size: the number of input features.
        output_size: the number of output features, of the full weight.
        config: the configuration; see the module.
        init_method: fills the weight in place.
        bias: whether there is a bias.
        gather_output: whether to all-gather the output features; by default only without a
            ``config``.
        stride: the number of fused blocks of output features. Each block is sharded.
        keep_master_weight_for_test: whether to keep the full weight as ``master_weight``.
        skip_bias_add: whether to return the bias instead of adding it, for a fused kernel.
        skip_weight_param_allocation: whether to make no weight, because one is passed to each
            forward.
        embedding_activation_buffer: no effect; upstream defers the weight's gradient with it.
        grad_output_buffer: no effect; the same.
        is_expert: whether the layer is an expert's: its group is the experts' tensor parallel
            group, and with several ranks or expert parallelism the token dispatcher communicates
            instead of the layer.
        tp_comm_buffer_name: no effect.
        disable_grad_reduce: whether to leave the input's gradient partial, for a later all-reduce.
        tp_group: the group of the layer; by default the tensor parallel group.
    """

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
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        # The default of older releases, which have no config, is True.
        if gather_output is None:
            gather_output = config is None
        super().__init__(locals())
        if self.sequence_parallel and self.group.size == 1:
            warnings.warn(
                "sequence_parallel has no effect, because there is one tensor parallel rank only; "
                "ColumnParallelLinear continues without it",
                stacklevel=2,
            )
            self.sequence_parallel = False

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Result:
        """Return the output, and the bias if it was not added.

        Args:
            input_: ``(s, b, input_size)``, replicated. With sequence parallelism, the local shard
                ``(s / t, b, input_size)``.
            weight: a local shard to use instead of the layer's weight.
            runtime_gather_output: overrides ``gather_output``.

        Returns:
            The local shard of the output, ``(s, b, output_size / t)``, or the gathered ``(s, b,
            output_size)``; and the bias with ``skip_bias_add``, otherwise None.
        """
        if weight is None:
            weight = self.weight
        expected = (self.output_size_per_partition, self.input_size)
        if weight is None or weight.shape != expected:
            got = "no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
            raise ContractRuntimeError(
                f"ColumnParallelLinear got {got}; pass the local shard, of shape {expected}, to its forward"
            )
        if runtime_gather_output is None:
            runtime_gather_output = self.gather_output
        output = self.project(input_, weight, runtime_gather_output)
        return output, self.bias if self.skip_bias_add else None

    def enter(self, input_: Tensor) -> Tensor:
        """Forward: identity, or all-gather. Backward: all-reduce, or reduce-scatter."""
        if self.sequence_parallel and not self.explicit_expert_comm:
            return enter_tp_region(input_, self.group, 0)
        if self.disable_grad_reduce or self.explicit_expert_comm:
            return input_
        return super().enter(input_)


class RowParallelLinear(_Linear, shared.RowLayer):
    """A linear layer whose input features are sharded over the tensor parallel ranks.

    The weight is the local shard ``(output_size, input_size / t)``. The bias is replicated, and
    with sequence parallelism its gradient is partial: Megatron's ``finalize_model_grads``
    all-reduces it, because its attribute ``sequence_parallel`` is True.

    Forward: all-reduce of the output, or with sequence parallelism reduce-scatter along the
    sequence. Backward: identity, or with sequence parallelism all-gather. The output of an expert's
    layer stays partial, for the token dispatcher.

    Args:
        input_size: the number of input features, of the full weight.
        output_size: the number of output features.
        config: the configuration; see the module.
        init_method: fills the weight in place.
        bias: whether there is a bias.
        input_is_parallel: whether the input is the local shard; otherwise it is replicated, and the
            layer keeps the local shard of its features.
        skip_bias_add: whether to return the bias instead of adding it, for a fused kernel.
        stride: the number of fused blocks of input features. Each block is sharded.
        keep_master_weight_for_test: whether to keep the full weight as ``master_weight``.
        is_expert: whether the layer is an expert's, as for :class:`ColumnParallelLinear`.
        tp_comm_buffer_name: no effect.
        tp_group: the group of the layer; by default the tensor parallel group.

    Raises:
        ContractRuntimeError: sequence parallelism with a replicated input.
        ContractError: an expert's layer that would add its bias on every rank.
    """

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
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(locals())
        if self.sequence_parallel and not input_is_parallel:
            raise ContractRuntimeError("sequence_parallel needs a sharded input; pass input_is_parallel=True")
        if self.explicit_expert_comm and not skip_bias_add:
            raise ContractError(
                "the bias of an expert would be added once on every rank and then summed; pass "
                "skip_bias_add=True"
            )
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.master_weight is not None:
            self.master_weight = self.master_weight.to(self.weight.dtype)

    def forward(self, input_: Tensor) -> Result:
        """Return the output, and the bias if it was not added.

        Args:
            input_: the local shard ``(s, b, input_size / t)``; without ``input_is_parallel`` the
                replicated ``(s, b, input_size)``.

        Returns:
            The output, ``(s, b, output_size)``, or with sequence parallelism the local shard
            ``(s / t, b, output_size)``; and the bias with ``skip_bias_add``, otherwise None.
        """
        # On a group of one rank the reduction is the identity, which leaves the output partial.
        group = shared.SELF_GROUP if self.explicit_expert_comm else self.group
        output = self.project(input_, group, sequence_dim=0 if self.sequence_parallel else None)
        if self.skip_bias_add:
            return output, self.bias
        # After the reduction, which would otherwise sum the bias over the ranks.
        if self.bias is not None:
            output = output + self.bias
        return output, None


class VocabParallelEmbedding(_Layer, shared.VocabEmbedding):
    """An embedding whose vocabulary is sharded over the tensor parallel ranks.

    The weight is the local shard ``(num_embeddings / t, embedding_dim)``, with the ids from
    ``vocab_start_index`` to ``vocab_end_index`` (exclusive).

    Forward: all-reduce, in which each rank contributes the ids of its shard. Backward: identity.

    Args:
        num_embeddings: the size of the full vocabulary.
        embedding_dim: the number of features.
        init_method: fills the weight in place.
        reduce_scatter_embeddings: whether to return the layout of sequence parallelism: the first
            two dims are swapped, and a reduce-scatter along the sequence replaces the all-reduce.
        config: the configuration; see the module.
        tp_group: the group of the layer; by default the tensor parallel group.
    """

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
        super().__init__(locals())
        self.deterministic_mode: bool = getattr(config, "deterministic_mode", False)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of ids.

        The embedding of an id outside of the vocabulary is zero. On one rank, such an id raises an
        IndexError.

        Args:
            input_: the ids, ``(b, s)``, replicated.

        Returns:
            ``(b, s, embedding_dim)``; with ``reduce_scatter_embeddings`` the local shard ``(s / t,
            b, embedding_dim)``.
        """
        if self.group.size == 1:
            vectors = self.weight[input_] if self.deterministic_mode else F.embedding(input_, self.weight)
        else:
            vectors = self.look_up(input_, deterministic=self.deterministic_mode)
        if not self.reduce_scatter_embeddings:
            return shared.sum_partial(vectors, self.group, None)
        return shared.sum_partial(vectors.transpose(0, 1), self.group, 0)


# Code that imports upstream's submodules gets this module, which has the names of both.
layers = mappings = sys.modules[__name__]
sys.modules.update({f"{__name__}.{part}": layers for part in ("layers", "mappings")})
