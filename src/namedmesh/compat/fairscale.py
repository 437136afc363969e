"""Compatibility layer for ``fairscale.nn.model_parallel``, backed by a NamedMesh.

- *Unchanged code*: call :func:`install`. An installed fairscale then uses the groups of our meshes.
  If fairscale is not installed, this module can be imported under its name.
- *Code that imports this module*: it serves as every module of upstream's package, such as
  ``namedmesh.compat.fairscale.layers``.
- *Code with a mesh*: :func:`bind` lets accessors and layers use the groups of a mesh, and
  :func:`current_mesh` returns the mesh that they use.

The axes are (dp, pp, cp, tp), tp fastest; fairscale's *model* parallelism is tp. The accessors of
cp and of lists of ranks exist in later sources of fairscale only. Variables, such as
``_MODEL_PARALLEL_GROUP``, can be read and assigned.

Example:
    >>> import namedmesh, torch.distributed as dist
    >>> _ = namedmesh.launch.init("cpu")
    >>> initialize_model_parallel(1)
    >>> get_model_parallel_rank(), get_pipeline_parallel_ranks(), current_mesh().layout
    (0, [0], Layout(dp=1, pp=1, cp=1, tp=1))
    >>> destroy_model_parallel()
    >>> dist.destroy_process_group()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.compat import layers as _layers
from namedmesh.compat.errors import ContractError
from namedmesh.compat.layers import *
from namedmesh.compat.layers import ColumnLayer, Initializer, ParallelLayer, RowLayer, VocabEmbedding
from namedmesh.compat.model_parallel import ModelParallelLibrary
from namedmesh.tensor_parallel.collectives import Group, all_gather, gather, reduce_from_tp_region

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


# --- groups --------------------------------------------------------------------------------------


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
    context_parallel_size: int = 1,
    cp_backend: str | None = None,
) -> None:
    """Make a mesh with the axes dp, pp, cp and tp over all ranks, and bind it.

    Collective: every rank must call it with the same arguments.

    Args:
        model_parallel_size_: the size of tp. If it is larger than the world, it is reduced to the
            world size with a warning.
        pipeline_length: the size of pp.
        model_parallel_backend: the backend of the tp groups; by default the default group's
            backend.
        pipeline_backend: the same for the pp groups.
        ddp_backend: the same for the dp groups.
        context_parallel_size: the size of cp. It is keyword-only, because its position differs
            between sources of fairscale.
        cp_backend: the same for the cp groups.

    Raises:
        ContractError: there is no default group, model parallelism is already initialized, or the
            sizes do not divide the world size.
        AgreementError: the other ranks did not call this, or called it with different arguments.
    """
    _layer.make_all_groups(locals())


_UPSTREAM = "fairscale.nn.model_parallel"
_PARTS = ("cross_entropy", "initialize", "layers", "mappings", "utils")
_layer = ModelParallelLibrary(
    "fairscale",
    initialize_model_parallel,
    {
        "tp": ("model_parallel_size_", "model_parallel_backend"),
        "pp": ("pipeline_length", "pipeline_backend"),
        "cp": ("context_parallel_size", "cp_backend"),
        "dp": ("", "ddp_backend"),
    },
    modules={"": _UPSTREAM} | {part: f"{_UPSTREAM}.{part}" for part in _PARTS},
)
# initialize_model_parallel, get_data_parallel_rank, copy_to_model_parallel_region, bind and so on.
globals().update(_layer.names)

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["model_parallel_is_initialized", "vocab_parallel_cross_entropy"]
__all__ += _layers.__all__
__all__ += list(_layer.names)


def model_parallel_is_initialized() -> bool:
    """Return whether model-, data- and pipeline-parallel groups exist."""
    return _layer.has_groups("tp", "dp", "pp")


# --- loss and layers -----------------------------------------------------------------------------


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each token from sharded logits.

    Forward: all-reduces of one value per token. Backward: no communication. Unlike upstream, this
    does not overwrite the logits.

    Args:
        vocab_parallel_logits: the local shard ``(..., v / t)``, for t model-parallel ranks.
        target: ids in the global vocabulary, ``(...)``, replicated.

    Returns:
        The losses ``(...)``, replicated, in the dtype of the logits.

    Raises:
        ContractError: the shapes do not fit.
    """
    return _layers.cross_entropy(
        vocab_parallel_logits, target, _layer.get_tensor_group(), vocab_parallel_logits.dtype
    )


class _Layer(ParallelLayer):
    """Base class of layers over the model-parallel group at the time of their creation.

    All ranks must have the same RNG state, because ``init_method`` fills the full weight on each of
    them. ``keep_master_weight_for_test`` keeps it in ``master_weight``. With ``stride``, a weight
    consists of that many blocks of features, and each block is sharded separately.
    """

    model_parallel: ClassVar[ModelParallelLibrary] = _layer

    def find_group(self, arguments: Mapping[str, Any]) -> Group:  # noqa: ARG002  the same for all
        """Return the model-parallel group."""
        return self.model_parallel.get_tensor_group()

    def get_master_weight(self) -> Tensor:
        """All-gather the weight of a linear layer.

        Collective: every rank of the group must call it.

        Shards are concatenated in rank order, as upstream does. With a stride other than 1, this is
        not the order of the full weight.
        """
        return all_gather(self.weight.data, self.group, self.dim)


class ColumnParallelLinear(_Layer, ColumnLayer):
    """A linear layer whose output features are sharded across the model-parallel ranks.

    The local weight is ``(out_features / t, in_features)``, the local bias ``(out_features / t,)``.
    Unlike Megatron's layer, it returns a tensor only.

    Forward: all-gather of the output if ``gather_output``. Backward: all-reduce of the input's
        gradient.

    Args:
        in_features: the size of the input.
        out_features: the size of the full output.
        bias: whether the layer has a bias.
        gather_output: whether to all-gather the output features.
        init_method: fills the full weight in place.
        stride: the number of separately sharded blocks of output features.
        keep_master_weight_for_test: whether to keep the full weight in ``master_weight``.

    Raises:
        ContractError: the output features cannot be split into equal shards.
    """

    def __init__(  # noqa: PLR0917  upstream's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__(locals())

    def forward(self, input_: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            input_: a replicated tensor ``(..., in_features)``.

        Returns:
            The replicated output ``(..., out_features)`` or, without ``gather_output``, the local
            shard ``(..., out_features / t)``.
        """
        return self.project(input_, self.weight, self.gather_output)


class RowParallelLinear(_Layer, RowLayer):
    """A linear layer whose input features are sharded across the model-parallel ranks.

    The local weight is ``(out_features, in_features / t)``. The bias is replicated.

    Forward: all-reduce of the output. Backward: all-gather of the input's gradient, unless
    ``input_is_parallel``.

    Args:
        in_features: the size of the full input.
        out_features: the size of the output.
        bias: whether the layer has a bias.
        input_is_parallel: whether the input is a local shard already. A replicated input is
            sharded.
        init_method: fills the full weight in place.
        stride: the number of separately sharded blocks of input features.
        keep_master_weight_for_test: whether to keep the full weight in ``master_weight``.

    Raises:
        ContractError: the input features cannot be split into equal shards.
    """

    def __init__(  # noqa: PLR0917  upstream's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__(locals())

    def forward(self, input_: Tensor) -> Tensor:
        """Apply the layer.

        Args:
            input_: the local shard ``(..., in_features / t)``, or a replicated tensor without
                ``input_is_parallel``.

        Returns:
            The replicated output ``(..., out_features)``.
        """
        output = self.project(input_, self.group)
        # The bias is replicated, so it is added after the all-reduce.
        if self.bias is not None:
            output = output + self.bias
        return output


class _Embedding(_Layer):
    """Base class of the two embeddings, with the arguments of ``nn.Embedding``.

    Args:
        num_embeddings: the size of the global vocabulary.
        embedding_dim: the size of the full embeddings.
        padding_idx: the id in the global vocabulary that gets no gradient.
        max_norm: not supported, because the norm of a shard is not the norm of an embedding.
        norm_type: unused.
        scale_grad_by_freq: not supported.
        sparse: whether the gradient of the weight is sparse.
        init_method: fills the full weight in place.
        keep_master_weight_for_test: whether to keep the full weight in ``master_weight``.

    Raises:
        ContractError: an argument is not supported, ``padding_idx`` is outside of the vocabulary,
            or the weight cannot be split into equal shards.
    """

    shape_attributes: ClassVar[tuple[str, str]] = ("num_embeddings", "embedding_dim")

    def __init__(  # noqa: PLR0917  upstream's signature
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        if max_norm is not None or scale_grad_by_freq:
            raise ContractError(
                "max_norm and scale_grad_by_freq are not supported for sharded embeddings; omit them"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ContractError(
                f"padding_idx must be an id from 0 to {num_embeddings - 1} or None, got {padding_idx}"
            )
        super().__init__(locals())
        self.embedding_dim_per_partition: int = self.weight.shape[1]


class VocabParallelEmbedding(_Embedding, VocabEmbedding):
    """An embedding whose vocabulary is sharded across the model-parallel ranks.

    The local weight is ``(num_embeddings / t, embedding_dim)``. It holds the ids from
    ``vocab_start_index`` to ``vocab_end_index - 1``. ``padding_idx`` is an id in the global
    vocabulary; upstream takes it for a local one on every rank.

    Forward: all-reduce of the output. Backward: no communication.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Return the replicated embeddings ``(..., embedding_dim)`` of replicated ids.

        Ids that are outside of the vocabulary get zeros.
        """
        return reduce_from_tp_region(self.look_up(input_), self.group)


class ParallelEmbedding(_Embedding):
    """An embedding whose features are sharded across the model-parallel ranks.

    The local weight is ``(num_embeddings, embedding_dim / t)``.

    Forward: all-gather of the output. Backward: keep the local shard of the gradient.
    """

    dim = 1
    local_attribute = "embedding_dim_per_partition"

    def forward(self, input_: Tensor) -> Tensor:
        """Return the replicated embeddings ``(..., embedding_dim)`` of replicated ids."""
        local_embeddings = F.embedding(input_, self.weight, self.padding_idx, sparse=self.sparse)
        return gather(local_embeddings, self.group, -1)
