"""Linear and embedding layers that compute on local shards, outside of DTensor.

A style sets one of these classes as the class of a module, so that parameter names, hooks and the
rest of the module stay as they are. Parameters are DTensors; the forward computes on their local
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from namedmesh._errors import ShapeError
from namedmesh._torch.tensors import to_local_parameters
from namedmesh.tensor_parallel.collectives import (
    Group,
    check_ids_in_vocab,
    enter_tp_region,
    exit_tp_region,
    gather,
    split,
)

# The placements of a DTensor on a mesh with one axis.
REPLICATED = (Replicate(),)
PARTIAL = (Partial(),)

GATHERED_INPUT = "gathered_input"
"""The attribute of an input that the backward all-gathers again (:class:`SharedInput`)."""

Shards: TypeAlias = "Mapping[str, torch.Size | None]"
"""The shape of the local shard of each parameter, by name; None if the parameter is None."""


class LayerLayouts(NamedTuple):
    """The input and output layouts of a sharded layer.

    Attributes:
        group: the tensor-parallel ranks.
        input_dim: the dim along which the input is sharded; None if it is replicated.
        output_dim: the dim along which the output is sharded; None if it is replicated.
        use_local_output: whether the output is the local tensor, or a DTensor.
    """

    group: Group
    input_dim: int | None
    output_dim: int | None
    use_local_output: bool


class ShardedLayer:
    """The attributes of every sharded layer.

    Attributes:
        layouts: the input and output layouts.
        shards: the shapes of the local shards of the parameters.
        keep_input: takes the input, which the ranks compare before the first steps; None if they do
            not.
        keep_gradient: the same for the gradient of an all-gathered output.
    """

    layouts: LayerLayouts
    shards: Shards
    keep_input: Callable[[Tensor], None] | None = None
    keep_gradient: Callable[[Tensor], None] | None = None

    def note_input(self, x: Tensor) -> None:
        """Keep the input for the comparison.

        Args:
            x: the input.
        """
        # Compiled code must not read the attribute: a change of it would compile the code again.
        if not torch.compiler.is_compiling() and self.keep_input is not None:
            self.keep_input(x)


class ColumnLinear(ShardedLayer, nn.Linear):
    """A column-parallel ``nn.Linear``: each rank holds a shard of the output features.

    Forward: identity, or all-gather of a sharded input; for a replicated output also all-gather of
    the features. Backward: all-reduce, or reduce-scatter, of the input's gradient. Made by
    :class:`ColwiseParallel`.

    Attributes:
        rows: the output features that this rank computes if the weight is replicated
            (:class:`KeyValueParallel`), in runs of (first feature, number of features); None for
            all.
    """

    rows: Sequence[tuple[int, int]] | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return the local shard of the output features, or the replicated output.

        Args:
            input: ``(..., in_features)``: a local tensor in the input layout, or a DTensor.

        Raises:
            ShapeError: a parameter has another shape than the local shard.
        """
        group = self.layouts.group
        self.note_input(input)
        gathered = None
        if isinstance(input, DTensor):
            gathered = getattr(input, GATHERED_INPUT, None)
            if input.placements != REPLICATED:
                input = input.redistribute(placements=REPLICATED)  # noqa: A001
            # The producer of this DTensor (such as SharedInput) all-reduces the partial gradients
            # of all its consumers at once.
            x = input.to_local(grad_placements=PARTIAL)
        else:
            x = enter_tp_region(to_autocast_dtype(input), group, self.layouts.input_dim)
        weight, bias = local_params(self, self.shards)
        if self.rows is not None:
            weight = select_rows(weight, self.rows)
            bias = None if bias is None else select_rows(bias, self.rows)
        if gathered is None:
            y = F.linear(x, weight, bias)
        else:
            with gathered.replace_saved():
                y = F.linear(x, weight, bias)
        if self.layouts.output_dim is None:
            keep_gradient = None
            if not torch.compiler.is_compiling():
                keep_gradient = self.keep_gradient
            y = gather(y, group, -1, keep_gradient)
        return to_output_layout(self, y)


class RowLinear(ShardedLayer, nn.Linear):
    """A row-parallel ``nn.Linear``: each rank holds a shard of the input features.

    Forward: all-reduce, or reduce-scatter, of the partial output. Backward: identity, or all-gather
    of the output's gradient. Made by :class:`RowwiseParallel`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return the replicated output, or the local shard of another dim than the features.

        Args:
            input: ``(..., in_features)``: a local tensor in the input layout, or a DTensor. The
                local shard of the features of a replicated one is used.

        Raises:
            ShapeError: a parameter has another shape than the local shard, or the output cannot be
                split into equal shards.
        """
        group, input_dim, output_dim, _ = self.layouts
        self.note_input(input)
        if isinstance(input, DTensor):
            x = input.redistribute(placements=(Shard(input.ndim - 1),)).to_local()
        elif input_dim is None:
            x = split(input, group, input.ndim - 1)
        else:
            x = input
        # With a sequence-sharded output each rank adds the bias to some tokens only, so the bias
        # gradient is partial.
        weight, bias = local_params(self, self.shards, partial_grads=output_dim is not None)
        y = exit_tp_region(F.linear(x, weight), group, output_dim)
        if bias is not None:
            # The bias is replicated. Adding it before the all-reduce would count it once per rank.
            y = y + bias.to(y.dtype)
        return to_output_layout(self, y)


class RowEmbedding(ShardedLayer, nn.Embedding):
    """A vocabulary-parallel ``nn.Embedding``: each rank holds the rows of a shard of the ids.

    Forward: all-gather of sharded ids; all-reduce, or reduce-scatter, of the embeddings. Backward:
    identity, or all-gather of the output's gradient. Made by :class:`RowwiseParallel`.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return the replicated embeddings, or the local shard of a dim of them.

        Args:
            input: ids in the full vocabulary: a local tensor in the input layout, or a DTensor.

        Raises:
            IndexError: on a CPU: an id is outside of the vocabulary.
            ShapeError: the weight has another shape than the local shard, or the output cannot be
                split into equal shards.
        """
        group, input_dim, output_dim, _ = self.layouts
        self.note_input(input)
        if isinstance(input, DTensor):
            ids = input.full_tensor()
        elif input_dim is not None:
            ids = gather(input, group, input_dim)
        else:
            ids = input
        check_ids_in_vocab(ids, self.num_embeddings, "index out of range in self")
        (weight,) = local_params(self, self.shards)
        rows = weight.shape[0]
        first = group.rank * rows
        local_ids = ids - first
        not_local = (local_ids < 0) | (local_ids >= rows)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + rows:
            padding = self.padding_idx - first
        # Exactly one rank has the row of an id. All others contribute zeros to the sum.
        y = F.embedding(local_ids.masked_fill(not_local, 0), weight, padding)
        y = y.masked_fill(not_local.unsqueeze(-1), 0)
        return to_output_layout(self, exit_tp_region(y, group, output_dim))


def select_rows(param: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """Return runs of rows of a parameter, one after another.

    An index would do the same. But torch copies a list of ints to the device in each forward, for
    which the host waits, and adds the gradients of the rows one by one.

    Args:
        param: the parameter.
        rows: the first row and the number of rows of each run.
    """
    runs = [param.narrow(0, first, length) for first, length in rows]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def local_params(module: nn.Module, shards: Shards, *, partial_grads: bool = True) -> list[Any]:
    """Return the local tensors of a module's parameters.

    A parameter may be a plain tensor that is the local shard, as under DistributedDataParallel. If
    it is the full tensor, as after ``load_state_dict(..., assign=True)``, every rank would add the
    full product to the sum; its shape shows this.

    Args:
        module: the module.
        shards: the shape of the local shard of each parameter.
        partial_grads: whether each rank computes a partial gradient of a replicated parameter.

    Returns:
        The tensors in the order of ``shards``; None if a parameter is None.

    Raises:
        ShapeError: a parameter has another shape than its local shard.
    """
    params = [getattr(module, name) for name in shards]
    dtensors = [param for param in params if isinstance(param, DTensor)]
    grad_placements = []
    for param in dtensors:
        is_partial = partial_grads and param.placements == REPLICATED
        grad_placements.append(PARTIAL if is_partial else param.placements)
    # One call for all DTensors: a to_local() for each costs a quarter of the step of a small layer.
    local_tensors = iter(to_local_parameters(dtensors, grad_placements) if dtensors else ())
    result = []
    for (name, shape), param in zip(shards.items(), params, strict=True):
        local = next(local_tensors) if isinstance(param, DTensor) else param
        if shape is not None and local.shape != shape:
            remedy = "load with set_model_state_dict or without assign=True, and call with DTensors or shards"
            if name not in dict(module.named_parameters(recurse=False)):
                remedy = (
                    "it is no parameter any more, as after weight_norm or another "
                    "parametrization: remove that (remove_parametrizations, remove_weight_norm), "
                    "or leave the module out of the plan"
                )
            raise ShapeError(
                f"{name} has shape {tuple(local.shape)} on this rank, whose shard has shape "
                f"{tuple(shape)}; {remedy}"
            )
        result.append(local)
    return result


def shard_shapes(module: nn.Module, names: Iterable[str]) -> Shards:
    """Return the shapes of the local shards of a module's parameters.

    Args:
        module: the module; each of the parameters is a DTensor or None.
        names: the names of the parameters.
    """
    shapes: dict[str, torch.Size | None] = {}
    for name in names:
        param = getattr(module, name)
        shapes[name] = None if param is None else param.to_local().shape
    return shapes


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Cast an activation as autocast would in the linear after it, so that less data is sent.

    Args:
        x: the activation. It is returned unchanged if autocast would not cast it.
    """
    device = x.device.type
    can_cast = x.is_floating_point() and x.dtype != torch.float64 and device != "meta"
    if can_cast and torch.is_autocast_enabled(device):
        return x.to(torch.get_autocast_dtype(device))
    return x


def to_output_layout(module: Any, y: Tensor) -> Tensor:
    """Convert the output of a layer to the type that the options of its style ask for.

    Args:
        module: the layer.
        y: its local output.

    Returns:
        The local tensor, or a DTensor around it if the style has ``use_local_output=False``.
    """
    _, _, dim, use_local_output = module.layouts
    if use_local_output:
        return y
    placement: Any = Replicate()
    if dim is not None:
        # DTensors have no negative dims.
        placement = Shard(dim % y.ndim)
    return DTensor.from_local(y, module.weight.device_mesh, (placement,), run_check=False)
