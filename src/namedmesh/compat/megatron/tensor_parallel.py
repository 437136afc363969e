"""Megatron's parallel layers, region mappings, loss and helpers, under its names, on namedmesh's arithmetic.

Older code passes no ``config``, newer code passes one: any object with megatron-core's attributes, of which
``params_dtype``, ``sequence_parallel``, ``expert_model_parallel_size``, ``perform_initialization``,
``use_cpu_initialization`` and ``deterministic_mode`` are read. Parameters are plain tensors that hold this rank's shard,
marked with the attributes that Megatron's optimizers look for. Ranks must be seeded alike: each draws the whole weight and
keeps its shard, on an accelerator the shard only. In the shapes below t is the number of tensor-parallel ranks.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from namedmesh._torch import group_named
from namedmesh.compat import ContractError, ContractRuntimeError
from namedmesh.compat.layers import SELF_GROUP, Initializer, ParallelLayer, VocabEmbedding, scatter
from namedmesh.compat.megatron import mappings as _functions
from namedmesh.compat.megatron.mappings import *
from namedmesh.launch import default_group_device
from namedmesh.tensor_parallel.collectives import enter, gather, leave

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += _functions.__all__

Result: TypeAlias = "tuple[Tensor, nn.Parameter | None]"


def accelerator() -> torch.device | None:
    """Return the current accelerator, if this is where the ranks compute."""
    if dist.is_initialized():
        kind = default_group_device().type
    else:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return None if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


class _Layer(ParallelLayer):
    """What the three layers share: what they read of the configuration, and the group that they were made with."""

    def __init__(self, config: object, tp_group: ProcessGroup | None, *, is_expert: bool = False) -> None:
        super().__init__()
        self.group = _functions.current_group(tp_group, is_expert=is_expert)
        self.params_dtype = getattr(config, "params_dtype", None)
        self.params_device = None if getattr(config, "use_cpu_initialization", False) else accelerator()
        self.init_dtype = torch.float32  # whatever the dtype is: the same numbers, rounded
        self.perform_initialization = getattr(config, "perform_initialization", True)
        if getattr(config, "gradient_accumulation_fusion", False):
            raise ContractRuntimeError(
                f"{type(self).__name__}: gradient_accumulation_fusion needs APEX's CUDA extension, which namedmesh's layers "
                "do not call; set gradient_accumulation_fusion=False"
            )

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The ranks that share the layer; None where ``torch.distributed`` has not been initialized."""
        return group_named(self.group.name) if self.group.name else None


class _Linear(_Layer):
    """What the column and the row layer share: the marks of the parameters, and an extra state that is empty."""

    shape_attributes = ("output_size", "input_size")

    def __init__(
        self, sizes: tuple[int, int], config: object, tp_group: ProcessGroup | None, is_expert: bool
    ) -> None:
        super().__init__(config, tp_group, is_expert=is_expert)
        self.input_size, self.output_size = sizes
        self.config, self.is_expert = config, is_expert
        self.expert_parallel = getattr(config, "expert_model_parallel_size", 1) > 1
        self.sequence_parallel = getattr(config, "sequence_parallel", False)
        # The experts' tokens are gathered and summed by who dispatches them.
        self.explicit_expert_comm = is_expert and (self.group.size > 1 or self.expert_parallel)
        self.register_load_state_dict_pre_hook(_ignore_extra_state)  # type: ignore[no-untyped-call]

    def make_parameters(
        self, initialize: Initializer, stride: int, *, bias: bool, keep: bool, allocate: bool = True
    ) -> None:
        """Make this rank's shards, and mark them."""
        self.make_weight(initialize, stride, keep=keep, allocate=allocate)
        self.make_bias(bias)
        for parameter in self.parameters(recurse=False):
            if parameter is self.weight or self.dim == 0:
                _functions.set_tensor_model_parallel_attributes(
                    parameter, is_parallel=True, dim=self.dim, stride=stride
                )
            # Experts differ between data-parallel ranks, so their gradients are not summed over these.
            parameter.allreduce = not (self.is_expert and self.expert_parallel)  # type: ignore[attr-defined]

    def get_extra_state(self) -> None:
        """Return None: the entry ``_extra_state`` is in the state because Transformer Engine's layers have one."""


def _ignore_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    """Load a state without an extra one, as of a plain linear layer, too; another implementation's means nothing here."""
    state.pop(f"{prefix}_extra_state", None)


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features are sharded over the tensor-parallel ranks.

    The weight is this rank's ``(output_size / t, input_size)``, the bias its ``(output_size / t,)``.

    Args:
        gather_output: join the output features on every rank; by default only where no ``config`` is given.
        skip_bias_add: hand the bias out instead of adding it, to be fused with what follows.
        skip_weight_param_allocation: make no weight; one is passed to every forward.
        disable_grad_reduce: leave the input's gradient this rank's part, to be summed later.
        is_expert: the layer's ranks are the experts', and whoever dispatches the tokens communicates.
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
        embedding_activation_buffer: list[Tensor] | None = None,  # noqa: ARG002  no gradient is put off
        grad_output_buffer: list[Tensor] | None = None,  # noqa: ARG002
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,  # noqa: ARG002  the legacy signature has it
        disable_grad_reduce: bool = False,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__((input_size, output_size), config, tp_group, is_expert)
        ranks = self.group.size
        self.output_size_per_partition = output_size // ranks
        self.gather_output = config is None if gather_output is None else gather_output
        self.skip_bias_add, self.disable_grad_reduce = skip_bias_add, disable_grad_reduce
        if self.sequence_parallel and ranks == 1:
            warnings.warn(
                "sequence_parallel is set, but there is one tensor-parallel rank only; ColumnParallelLinear goes on without it",
                stacklevel=2,
            )
            self.sequence_parallel = False
        allocate = not skip_weight_param_allocation
        self.make_parameters(
            init_method, stride, bias=bias, keep=keep_master_weight_for_test, allocate=allocate
        )

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Result:
        """Return ``(s, b, output_size / t)`` or, gathered, ``(s, b, output_size)``, and the bias that was not added.

        The input is the same ``(s, b, input_size)`` on every rank; with sequence parallelism this rank's
        ``(s / t, b, input_size)``. ``weight`` takes the place of the layer's own.
        """
        weight = self.weight if weight is None else weight
        expected = (self.output_size_per_partition, self.input_size)
        if weight is None or weight.shape != expected:
            got = "no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
            raise ContractRuntimeError(
                f"ColumnParallelLinear got {got}; pass this rank's shard, of shape {expected}, to its forward"
            )
        if self.sequence_parallel and not self.explicit_expert_comm:
            input_ = enter(input_, self.group, 0)
        elif not (self.disable_grad_reduce or self.explicit_expert_comm):
            input_ = enter(input_, self.group)
        output = F.linear(input_, weight, None if self.skip_bias_add else self.bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather(output, self.group, -1)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_Linear):
    """A linear layer whose input features are sharded over the tensor-parallel ranks.

    The weight is this rank's ``(output_size, input_size / t)``; every rank has the whole bias, whose gradient with
    sequence parallelism is to be summed over the ranks later. With ``input_is_parallel`` the input is this rank's shard;
    otherwise each rank takes its own. An expert's layer leaves its output this rank's part of the sum.
    """

    dim = 1

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
        super().__init__((input_size, output_size), config, tp_group, is_expert)
        if self.sequence_parallel and not input_is_parallel:
            raise ContractRuntimeError(
                "sequence_parallel needs an input that is sharded already; pass input_is_parallel=True"
            )
        if self.explicit_expert_comm and not skip_bias_add:
            raise ContractError(
                "the bias of is_expert would count several times in a sum; pass skip_bias_add=True"
            )
        self.input_size_per_partition = input_size // self.group.size
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self.make_parameters(init_method, stride, bias=bias, keep=keep_master_weight_for_test)
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        if self.master_weight is not None:
            self.master_weight = self.master_weight.to(self.weight.dtype)

    def forward(self, input_: Tensor) -> Result:
        """Return ``(s, b, output_size)``, with sequence parallelism this rank's ``(s / t, b, output_size)``, and the bias.

        The input is ``(s, b, input_size)``, or this rank's ``(s, b, input_size / t)``.
        """
        group = SELF_GROUP if self.explicit_expert_comm else self.group
        if not self.input_is_parallel:
            input_ = scatter(input_, self.group, -1)
        parts = F.linear(input_, self.weight)
        output = _functions.sum_shards(parts, group, 0) if self.sequence_parallel else leave(parts, group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class VocabParallelEmbedding(_Layer, VocabEmbedding):
    """An embedding whose vocabulary is sharded over the tensor-parallel ranks.

    The weight is this rank's ``(num_embeddings / t, embedding_dim)``: the ids from ``vocab_start_index`` up to,
    and without, ``vocab_end_index``. With ``reduce_scatter_embeddings`` the first two dims of the output are swapped, and
    each rank keeps its shard of the sequence, as sequence parallelism wants it.
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
        super().__init__(config, tp_group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.deterministic_mode = getattr(config, "deterministic_mode", False)
        self.make_weight(init_method)
        _functions.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(b, s, embedding_dim)`` of ids ``(b, s)``; scattered, this rank's ``(s / t, b, embedding_dim)``.

        An id outside of the vocabulary gets zeros; on one rank it is an IndexError.
        """
        if self.group.size == 1:
            vectors = self.weight[input_] if self.deterministic_mode else F.embedding(input_, self.weight)
        else:
            vectors = self.look_up(input_, deterministic=self.deterministic_mode)
        if not self.reduce_scatter_embeddings:
            return leave(vectors, self.group)
        return _functions.sum_shards(vectors.transpose(0, 1), self.group, 0)


# Both parts of the original's package are this module.
layers = mappings = sys.modules[__name__]
sys.modules.update({f"{__name__}.{part}": layers for part in ("layers", "mappings")})
