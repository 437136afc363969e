"""The fairscale dialect: ``fairscale.nn.model_parallel``, its accessors and its layers, over one NamedMesh.

- *Unchanged code*: :func:`install` lets ``fairscale.nn.model_parallel`` answer from our meshes, or where fairscale is
  not installed puts the dialect under its import path.
- *Code that imports the dialect*: this one module is every part of the original's package, such as ``fairscale.layers``.
- *Code with a mesh*: :func:`bind` lets accessors and layers answer from a mesh that exists, and
  :func:`current_mesh` leads from them back to the mesh; both have the same process groups.

Ranks are laid out as (dp, pp, cp, tp), tp fastest: fairscale's *model* parallelism is tp. The accessors of cp and the
lists of ranks are of its later sources. Variables, such as ``_MODEL_PARALLEL_GROUP``, may be read and assigned.

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

import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn

from namedmesh.agreement import agreed
from namedmesh.compat import ContractError
from namedmesh.compat import layers as _helpers
from namedmesh.compat.layers import *
from namedmesh.compat.layers import Initializer, ParallelLayer, VocabEmbedding, scatter
from namedmesh.compat.patching import Patch
from namedmesh.compat.state import (
    Bound,
    State,
    agreed_groups,
    check_axes,
    check_default_group,
    group_over,
)
from namedmesh.errors import LayoutError
from namedmesh.groups import GroupOptions
from namedmesh.init import make_mesh
from namedmesh.legacy import LEGACY_APIS, compute_layouts
from namedmesh.mesh import NamedMesh
from namedmesh.tensor_parallel.collectives import Group, all_gather, enter, gather, leave

T = TypeVar("T")


def itself(value: Any) -> Any:
    """Return what a variable is."""
    return value


def first_rank(group: Any) -> int:
    """Return the global rank of the first of a group."""
    return dist.get_process_group_ranks(group)[0]


class ModelParallel:
    """One dialect: the variables of its module, made here, which the function of a name initializes, and the mesh behind them."""

    def __init__(self, name: str, function: str, module: ModuleType) -> None:
        self.name, self.function, self.rows = name, function, LEGACY_APIS[name].groups
        names = [variable for row in self.rows for variable in (row.variable, row.ranks) if variable]
        vars(module).update(dict.fromkeys(names))
        self.state = State(f"{name}'s model parallelism", function, module)
        (tensor_group,) = (row.variable for row in self.rows if row.axes == ("tp",))
        self._tensor_group = self.getter(tensor_group, itself)

    def answer_from(self, module: ModuleType) -> None:
        """Let the variables of a module answer from now on, namedmesh's own or the original's; the meshes of before are forgotten."""
        self.state.destroy()
        self.state.module = module

    def bind(self, mesh: NamedMesh) -> Bound:
        """Answer from a mesh that exists; communicates the first time, and then every rank of the world calls it.

        Its axes are any of ``tp``, ``cp``, ``pp``, and ``dp`` or ``dp_replicate`` and ``dp_shard``, in any order. In
        ``with bind(mesh):`` the mesh is selected, and the binding ends with the block. Otherwise it lasts until the next
        one, ``unbind()``, or the mesh's end.

        Raises:
            LayoutError: the mesh has axes that the dialect has no group for.
            MeshError: what was given is no open mesh.
            AgreementError: the other ranks did not call this, or not with the same mesh.
        """
        call = f"{self.name}.bind"
        if self.state.has_values(mesh):
            return self.state.bind(mesh)
        with agreed_groups(mesh, call):
            check_axes(mesh.layout, self.name)
            values = self._values(mesh)
        return self.state.bind_with_values(mesh, values)

    def initialize(
        self, sizes: Mapping[str, int], backends: Mapping[str, str | None], timeout: timedelta | None = None
    ) -> None:
        """Make a mesh over the world, of sizes of tp, pp and cp, with a backend for each axis, and answer from it."""
        check_default_group()
        options = {axis: GroupOptions(backend=name) for axis, name in backends.items() if name is not None}
        with agreed(f"{self.name}.{self.function}") as compare:
            assigned = [name for name in self.state.names if self.are_there(name)]
            try:
                ranks = compute_layouts(
                    LEGACY_APIS[self.name], {"dp": -1, **sizes}, world_size=dist.get_world_size()
                )
            except LayoutError as error:
                raise ContractError(*error.problems) from None
            self.state.check_uninitialized()
            if assigned:
                raise ContractError(
                    f"{', '.join(assigned)} were assigned; destroy {self.name}'s groups first"
                )
            for note in ranks.notes:
                warnings.warn(note, stacklevel=3)
            mesh = make_mesh(compare, ranks.dense, {}, options, GroupOptions(timeout=timeout))
            values = self._values(mesh)
        self.state.bind_with_values(mesh, values, owned=True)

    def are_there(self, *variables: str) -> bool:
        """Return whether variables have values."""
        return all(getattr(self.state.module, name) is not None for name in variables)

    def getter(self, variable: str, answer: Callable[[Any], T], before: T | None = None) -> Callable[[], T]:
        """Return a function that says something of a variable; without a value it returns ``before``, or raises ContractError."""

        def get() -> T:
            value = getattr(self.state.module, variable)
            if value is not None:
                return answer(value)
            if before is not None:
                return before
            raise ContractError(
                f"{variable} is None: {self.name}'s model parallelism is not initialized; call {self.function}(...), or "
                f"namedmesh.compat.{self.name}.bind(mesh) with a mesh that exists"
            )

        get.__doc__ = f"Return {variable}." if answer is itself else f"Return {answer.__name__}({variable})."
        return get

    def group(self) -> Group:
        """Return the tensor-parallel ranks of this moment."""
        return Group.of(self._tensor_group())

    # The ways in and out of tensor-parallel regions, each with its partner as backward; results are new tensors.

    def copy(self, input_: Tensor) -> Tensor:
        """Hand in a tensor of any shape that every rank has; its gradient, a part on each rank, is summed."""
        return enter(input_, self.group())

    def reduce(self, input_: Tensor) -> Tensor:
        """Sum the ranks' parts, of any shape, on every rank; the gradient is handed through."""
        return leave(input_, self.group())

    def scatter(self, input_: Tensor) -> Tensor:
        """Keep this rank's ``(..., n / t)`` of an ``(..., n)`` that every rank has; a ContractError if t does not divide n."""
        return scatter(input_, self.group(), -1)

    def gather(self, input_: Tensor) -> Tensor:
        """Join the ranks' ``(..., n / t)`` to ``(..., n)``, on every rank; each gets its shard of the gradient."""
        return gather(input_, self.group(), -1)

    def _values(self, mesh: NamedMesh) -> dict[str, Any]:
        """Return the value of each variable: the groups of the mesh, and their ranks."""
        values: dict[str, Any] = {}
        for row in self.rows:
            values[row.variable], ranks = group_over(mesh, row.axes)
            if row.ranks:
                values[row.ranks] = ranks
        return values


_DIALECT = ModelParallel("fairscale", "initialize_model_parallel", sys.modules[__name__])
bind, unbind, current_mesh = _DIALECT.bind, _DIALECT.state.unbind, _DIALECT.state.current_mesh
destroy_model_parallel = _DIALECT.state.destroy
get_model_parallel_group = _DIALECT.getter("_MODEL_PARALLEL_GROUP", itself)
get_model_parallel_world_size = _DIALECT.getter("_MODEL_PARALLEL_GROUP", dist.get_world_size)
get_model_parallel_rank = _DIALECT.getter("_MODEL_PARALLEL_GROUP", dist.get_rank)
get_model_parallel_ranks = _DIALECT.getter("_MODEL_PARALLEL_GROUP", dist.get_process_group_ranks)
get_model_parallel_src_rank = _DIALECT.getter("_MODEL_PARALLEL_GROUP", first_rank)
get_data_parallel_group = _DIALECT.getter("_DATA_PARALLEL_GROUP", itself)
get_data_parallel_world_size = _DIALECT.getter("_DATA_PARALLEL_GROUP", dist.get_world_size)
get_data_parallel_rank = _DIALECT.getter("_DATA_PARALLEL_GROUP", dist.get_rank)
get_data_parallel_ranks = _DIALECT.getter("_DATA_PARALLEL_GROUP", dist.get_process_group_ranks)
get_context_parallel_group = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", itself)
get_context_parallel_world_size = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", dist.get_world_size)
get_context_parallel_rank = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP", dist.get_rank)
get_context_parallel_ranks = _DIALECT.getter("_CONTEXT_PARALLEL_GROUP_RANKS", itself)
get_pipeline_parallel_group = _DIALECT.getter("_PIPELINE_PARALLEL_GROUP", itself)
get_pipeline_parallel_ranks = _DIALECT.getter("_PIPELINE_PARALLEL_RANKS", itself)

copy_to_model_parallel_region, reduce_from_model_parallel_region = _DIALECT.copy, _DIALECT.reduce
scatter_to_model_parallel_region, gather_from_model_parallel_region = _DIALECT.scatter, _DIALECT.gather


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
    """Make a mesh of axes dp, pp, cp and tp over the world, and answer from it; every rank calls it alike; communicates.

    A tp (``model_parallel_size_``) above the world is reduced to it, with a warning. Backends are those of the groups over
    one axis, by default the default group's. ``context_parallel_size`` is by name only: its place differs between releases.

    Raises:
        ContractError: there is no default group, a second initialization, or sizes that do not divide the world.
        AgreementError: the other ranks did not call this, or not with the same arguments.
    """
    _DIALECT.initialize(
        {"tp": int(model_parallel_size_), "pp": pipeline_length, "cp": context_parallel_size},
        {"tp": model_parallel_backend, "pp": pipeline_backend, "cp": cp_backend, "dp": ddp_backend},
    )


def model_parallel_is_initialized() -> bool:
    """Return whether there are model-, data- and pipeline-parallel groups."""
    return _DIALECT.are_there("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_PIPELINE_PARALLEL_GROUP")


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy of each token, ``(...)``, in the type of the logits and the same on every rank.

    The logits are this rank's ``(..., v / t)``, left as they are (the original overwrites them), and the target ``(...)`` ids
    in the whole vocabulary, the same on every rank; a ContractError where the shapes do not go together.
    """
    dtype = vocab_parallel_logits.dtype
    return _helpers.cross_entropy(vocab_parallel_logits, target, _DIALECT.group(), dtype)


class _Layer(ParallelLayer):
    """A layer over the model-parallel ranks of the moment in which it is made, t of them; plain parameters, of which each has a shard.

    Ranks must be seeded alike: ``init_method`` draws the whole weight on each, and with ``keep_master_weight_for_test`` it
    stays in ``master_weight``. With ``stride`` a weight is made of that many blocks of features, each sharded on its own.
    """

    dialect: ClassVar = _DIALECT

    def __init__(self) -> None:
        super().__init__()
        self.group = self.dialect.group()

    def get_master_weight(self) -> Tensor:
        """Gather the shards of all ranks of a linear layer, in rank order (as the original, whatever the stride); communicates."""
        return all_gather(self.weight.data, self.group, self.dim)


class ColumnParallelLinear(_Layer):
    """A linear layer whose output features are sharded over the model-parallel ranks; it returns a tensor.

    The weight is this rank's ``(out_features / t, in_features)``, the bias its ``(out_features / t,)``. With
    ``gather_output`` the output features are joined on every rank.
    """

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.make_weight(init_method, stride, keep=keep_master_weight_for_test)
        self.make_bias(bias)
        self.output_size_per_partition = self.weight.shape[0]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)`` or, not gathered, ``(..., out_features / t)``."""
        output = F.linear(enter(input_, self.group), self.weight, self.bias)
        return gather(output, self.group, -1) if self.gather_output else output


class RowParallelLinear(_Layer):
    """A linear layer whose input features are sharded over the model-parallel ranks; it returns a tensor.

    The weight is this rank's ``(out_features, in_features / t)``; every rank has the whole bias. With ``input_is_parallel``
    the input is this rank's shard already; otherwise each rank takes its own.
    """

    dim = 1

    def __init__(  # noqa: PLR0917  the original's signature
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: Initializer = nn.init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.make_weight(init_method, stride, keep=keep_master_weight_for_test)
        self.make_bias(bias)
        self.input_size_per_partition = self.weight.shape[1]

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., out_features)``, the same on every rank."""
        part = input_ if self.input_is_parallel else scatter(input_, self.group, -1)
        output = leave(F.linear(part, self.weight), self.group)
        return output if self.bias is None else output + self.bias


class _Embedding(_Layer):
    lengths = "num_embeddings", "embedding_dim"

    def __init__(  # noqa: PLR0917  the original's signature
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
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        if max_norm is not None or scale_grad_by_freq:
            raise ContractError(
                "max_norm and scale_grad_by_freq are for whole embeddings, not for shards; leave them out"
            )
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ContractError(
                f"padding_idx is {padding_idx}, and the ids run from 0 to {num_embeddings - 1}; name one of them, or None"
            )
        self.make_weight(init_method, keep=keep_master_weight_for_test)
        self.embedding_dim_per_partition = self.weight.shape[1]


class VocabParallelEmbedding(_Embedding, VocabEmbedding):
    """An embedding whose vocabulary is sharded over the model-parallel ranks; ``padding_idx`` is an id in the whole vocabulary.

    The weight is this rank's ``(num_embeddings / t, embedding_dim)``: the ids from ``vocab_start_index`` up to,
    and without, ``vocab_end_index``.
    """

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank; an id outside of the vocabulary gets zeros."""
        return leave(self.look_up(input_), self.group)


class ParallelEmbedding(_Embedding):
    """An embedding whose features are sharded over the model-parallel ranks: the weight is this rank's ``(num_embeddings, embedding_dim / t)``."""

    dim = 1

    def forward(self, input_: Tensor) -> Tensor:
        """Return ``(..., embedding_dim)``, the same on every rank."""
        vectors = F.embedding(input_, self.weight, self.padding_idx, sparse=self.sparse)
        return gather(vectors, self.group, -1)


# Every part of the original's package is this module.
_PLACE, _PARTS = "fairscale.nn.model_parallel", ("cross_entropy", "initialize", "layers", "mappings", "utils")
cross_entropy = initialize = layers = mappings = utils = sys.modules[__name__]
sys.modules.update({f"{__name__}.{part}": layers for part in _PARTS})


def _replace(module: ModuleType) -> dict[str, object]:
    """Return what makes and destroys groups, and the first rank: the original's is right for neighboring ranks only."""
    for name in _DIALECT.state.names:
        if name not in vars(module):  # it is of later sources
            _PATCH.set(vars(module), name, None)
    _DIALECT.answer_from(module)
    names = ("initialize_model_parallel", "destroy_model_parallel", "get_model_parallel_src_rank")
    return {name: globals()[name] for name in names}


_PATCH = Patch(
    f"{_PLACE}.initialize",
    _replace,
    dict.fromkeys([_PLACE, *(f"{_PLACE}.{part}" for part in _PARTS)], __name__),
    lambda: _DIALECT.answer_from(layers),
)
install, uninstall = _PATCH.install, _PATCH.uninstall
__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "VocabParallelEmbedding"]
__all__ += ["bind", "current_mesh", "install", "unbind", "uninstall"]
__all__ += _helpers.__all__
__all__ += [name for name in dir() if "_parallel" in name and not name.startswith("_")]
