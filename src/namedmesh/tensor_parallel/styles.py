"""Column and row styles: torch's own by type and options, with native operations on local tensors inside."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch import has_hooks, to_local_parameters
from namedmesh.errors import PlanError, ShapeError
from namedmesh.sizes import shared_heads
from namedmesh.tensor_parallel.collectives import Group, enter, gather, leave, refuse_strangers, split

_WHOLE, _PARTS = (Replicate(),), (Partial(),)


# The shape of this rank's shard of each parameter of a module, by name; None for a parameter that is None.
Shards: TypeAlias = "Mapping[str, torch.Size | None]"


class Wiring(NamedTuple):
    """How a sharded layer is connected: its ranks, and the sharded dim of its input and of its output (None: whole)."""

    group: Group
    input_dim: int | None
    output_dim: int | None
    use_local_output: bool


class ColumnLinear(nn.Linear):
    """An ``nn.Linear`` of whose output features each rank computes some. Made by :class:`ColwiseParallel`."""

    wiring: Wiring
    shards: Shards
    rows: Sequence[int] | None = None  # the output features to compute, of a weight that every rank has whole

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return this rank's output features, or those of all ranks."""
        group, input_dim, output_dim, _ = self.wiring
        if isinstance(input, DTensor):
            # Whoever made it sums the parts of its gradient, of all its users at once.
            whole = input if input.placements == _WHOLE else input.redistribute(placements=_WHOLE)
            x = whole.to_local(grad_placements=_PARTS)
        else:
            x = enter(autocast(input), group, input_dim)
        weight, bias = local(self, self.shards)
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        y = F.linear(x, weight, bias)
        return delivered(self, y if output_dim is not None else gather(y, group, -1))


class RowLinear(nn.Linear):
    """An ``nn.Linear`` of whose input features each rank has some. Made by :class:`RowwiseParallel`."""

    wiring: Wiring
    shards: Shards

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        """Return the sum of all ranks' products: whole, or this rank's shard of another dim."""
        group, input_dim, output_dim, _ = self.wiring
        if isinstance(input, DTensor):
            x = input.redistribute(placements=(Shard(input.ndim - 1),)).to_local()
        else:
            x = input if input_dim is not None else split(input, group, input.ndim - 1)
        # Where each rank has some of the tokens, it makes a part of the bias's gradient.
        weight, bias = local(self, self.shards, parts=output_dim is not None)
        y = leave(F.linear(x, weight), group, output_dim)
        if bias is not None:  # after the sum, so that it counts once
            y = y + bias.to(y.dtype)
        return delivered(self, y)


class RowEmbedding(nn.Embedding):
    """An ``nn.Embedding`` of whose vocabulary each rank has a part. Made by :class:`RowwiseParallel`."""

    wiring: Wiring
    shards: Shards

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Embedding gives it
        """Return the sum of all ranks' vectors, of which one is not zero: whole, or this rank's shard of a dim."""
        group, input_dim, output_dim, _ = self.wiring
        ids = input.full_tensor() if isinstance(input, DTensor) else input
        if ids is input and input_dim is not None:
            ids = gather(input, group, input_dim)
        refuse_strangers(ids, self.num_embeddings, "index out of range in self")
        (weight,) = local(self, self.shards)
        rows = weight.shape[0]
        first = group.rank * rows
        mine = ids - first
        elsewhere = (mine < 0) | (mine >= rows)
        padding = None
        if self.padding_idx is not None and first <= self.padding_idx < first + rows:
            padding = self.padding_idx - first
        y = F.embedding(mine.masked_fill(elsewhere, 0), weight, padding)
        return delivered(self, leave(y.masked_fill(elsewhere.unsqueeze(-1), 0), group, output_dim))


def local(module: nn.Module, shards: Shards, *, parts: bool = True) -> list[Any]:
    """Return this rank's shards of a module's parameters, in the order of ``shards``; None for a parameter that is None.

    A parameter may be a plain tensor that is the shard, as in torch's DistributedDataParallel. If it is the whole tensor,
    as after ``load_state_dict(..., assign=True)``, every rank would add the whole product to the sum.

    Args:
        module: the module.
        shards: the shape of this rank's shard of each parameter.
        parts: whether each rank computes a partial gradient of a replicated parameter.

    Raises:
        ShapeError: a parameter has another shape on this rank.
    """
    parameters = [getattr(module, name) for name in shards]
    distributed = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    layouts = [_PARTS if parts and each.placements == _WHOLE else each.placements for each in distributed]
    tensors = iter(to_local_parameters(distributed, layouts) if distributed else ())
    result = [next(tensors) if isinstance(parameter, DTensor) else parameter for parameter in parameters]
    for (name, shape), tensor in zip(shards.items(), result, strict=True):
        if shape is not None and tensor.shape != shape:
            got = f"{name} has shape {tuple(tensor.shape)} on this rank, whose shard has shape {tuple(shape)}"
            remedy = "load with set_model_state_dict or without assign=True, and call with DTensors or shards"
            raise ShapeError(f"{got}; {remedy}")
    return result


def shards_of(module: nn.Module, names: Iterable[str]) -> Shards:
    """Return the shapes of this rank's shards of a module's parameters, which are DTensors or None."""
    shapes: dict[str, torch.Size | None] = {}
    for name in names:
        parameter = getattr(module, name)
        shapes[name] = None if parameter is None else parameter.to_local().shape
    return shapes


def autocast(x: Tensor) -> Tensor:
    """Return an activation in the type that a linear gives it under autocast, so that no more is sent than that."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def delivered(module: Any, y: Tensor) -> Tensor:
    """Return a layer's output as its style says: this rank's plain tensor, or a DTensor around it."""
    if module.wiring.use_local_output:
        return y
    dim = module.wiring.output_dim
    layout = Replicate() if dim is None else Shard(y.ndim - 1 if dim == -1 else dim)
    return DTensor.from_local(y, module.weight.device_mesh, (layout,), run_check=False)


def shard_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], src_data_rank: int | None
) -> None:
    """Replace a module's own parameters with DTensors."""
    for name, placement in placements.items():
        shard = distribute_tensor(module.get_parameter(name), mesh, [placement], src_data_rank=src_data_rank)
        replace_parameter(module, name, shard)


def replace_parameter(module: nn.Module, name: str, shard: Tensor) -> None:
    """Put a shard in the place of a parameter: frozen as that is, with what users have noted on it, such as no weight decay."""
    old = module.get_parameter(name)
    new = nn.Parameter(shard, requires_grad=old.requires_grad)
    vars(new).update({**vars(old), **vars(new)})
    module.register_parameter(name, new)


class _Short:
    """A style with a short way for the layers and layouts that it knows; all others go torch's way."""

    def __init__(self, *, heads: int | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.heads = heads

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return what of a module the style cannot keep, a sentence each."""
        found = [
            f"{type(self).__name__} cannot keep {option}={vars(module)[option]} of an embedding; leave it out"
            for option in ("max_norm", "sparse", "scale_grad_by_freq")
            if vars(module).get(option)
        ]
        if self.heads and self.heads % tp_size:
            got = f"{self.heads} heads are not divisible by the tp size {tp_size}"
            found.append(f"{got}; choose one that divides them")
        return found

    def layout(self: Any, module: nn.Module, tp_size: int) -> dict[str, Placement]:  # noqa: ARG002  for any number
        """Return how the parameters are laid out."""
        return layer_placements(self, module)

    def _partition_linear_fn(self: Any, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        if not name:  # torch's own would take the modules inside of a subclass for linears, too
            layout = self.layout(module, device_mesh.size())
            shard_parameters(module, device_mesh, layout, self.src_data_rank)

    _partition_embedding_fn = _partition_linear_fn

    def short_way(self: Any, module: nn.Module) -> type | None:
        """Return the class whose forward has its arithmetic on plain tensors; None for torch's way."""
        return None if "forward" in vars(module) or has_hooks(module) else self.kind_for(module)

    def _apply(self: Any, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        kind = self.short_way(module)
        if kind is None:
            applied: nn.Module = super()._apply(module, device_mesh)  # type: ignore[misc]  # torch's style
            applied.register_forward_hook(_synchronous)
            return applied
        self._partition_linear_fn("", module, device_mesh)
        module.__class__ = kind
        (given,), (made,) = self.input_layouts, self.output_layouts
        dims = getattr(given, "dim", None), getattr(made, "dim", None)
        module.wiring = Wiring(Group.of(device_mesh), *dims, self.use_local_output)
        names = ("weight",) if issubclass(kind, nn.Embedding) else ("weight", "bias")
        module.shards = shards_of(module, names)
        return module  # type: ignore[no-any-return]  # with an attribute that no module has


def _synchronous(_module: nn.Module, _args: Any, output: Any) -> Any:
    # torch hands out an asynchronous tensor, which compiled code takes for another one, silently.
    return output.clone() if isinstance(output, Tensor) and type(output) not in {Tensor, DTensor} else output


class ColwiseParallel(_Short, torch_styles.ColwiseParallel):
    """Shard an ``nn.Linear``'s output features, or an ``nn.Embedding``'s vectors, over the ranks.

    torch's style of this name, with the same options, parameters and results, but for the arithmetic of a linear: ``F.linear`` on
    plain tensors. Other layouts, an embedding, a subclass and a module with a forward or hooks of its own take torch's way.

    What a model does with the sharded features until a row layer takes them has to be right for a part of them.
    ``nn.Dropout`` there draws one mask on all ranks that are seeded alike, but from :func:`namedmesh.training.streams`.

    Args:
        input_layouts: ``Replicate()`` (the default), or ``Shard(dim)`` to gather a plain input first (sequence parallelism).
        output_layouts: ``Shard(-1)`` (the default), ``Replicate()`` to gather the features, or another.
        use_local_output: hand out this rank's plain tensor (the default) instead of a DTensor.
        heads: of how many heads, or other equal groups, one after the other, the output features are. Each rank then gets
            whole ones, and a layer that is several in one, head by head, is known to be right as it is.
    """

    def kind_for(self, module: nn.Module) -> type | None:
        """Return the class with the short way for a module, if it has the style's layouts."""
        (given,), (made,) = self.input_layouts, self.output_layouts
        known = isinstance(given, Shard | Replicate) and made in {Shard(-1), Replicate()}
        return ColumnLinear if known and type(module) is nn.Linear else None


class RowwiseParallel(_Short, torch_styles.RowwiseParallel):
    """Shard an ``nn.Linear``'s input features, or an ``nn.Embedding``'s vocabulary, over the ranks.

    As :class:`ColwiseParallel`, torch's style of this name on plain tensors, except that the output is synchronous:
    torch's asynchronous one is wrong under ``torch.compile`` together with FSDP2.

    Args:
        input_layouts: ``Shard(-1)`` (the default, also for the ids of an embedding: say ``Replicate()`` there), or
            ``Replicate()`` to let each rank take its features.
        output_layouts: ``Replicate()`` (the default) sums over the ranks; ``Shard(dim)`` leaves each rank its shard of the
            sum (sequence parallelism), in equal parts, or the forward raises a ShapeError.
        use_local_output: as for :class:`ColwiseParallel`.
    """

    def kind_for(self, module: nn.Module) -> type | None:
        """Return the class with the short way for a module, if it has the style's layouts."""
        (given,), (made,) = self.input_layouts, self.output_layouts
        kind = {nn.Linear: RowLinear, nn.Embedding: RowEmbedding}.get(type(module))
        takes = given in {Replicate(), Shard(-1)} or (isinstance(given, Shard) and kind is RowEmbedding)
        makes = made == Replicate() or (isinstance(made, Shard) and made.dim >= 0)
        return kind if takes and makes else None


def layer_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    """Return how a column or row style, torch's too, lays out the parameters of a linear or an embedding."""
    column = isinstance(style, torch_styles.ColwiseParallel)
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(1) if column else Shard(0)}
    placements: dict[str, Placement] = {"weight": Shard(0) if column else Shard(1)}
    if getattr(module, "bias", None) is not None:
        placements["bias"] = Shard(0) if column else Replicate()
    return placements


class SharedInput(ParallelStyle):
    """Gather a module's first input once for all the column styles inside, and sum its gradient once.

    For an attention or a feed-forward module: the column styles inside keep their default input layout. The module gets a
    DTensor, whole on every rank, of which each column layer makes a part of the gradient. It may be a DTensor before.

    Args:
        input_layouts: ``Shard(dim)`` to gather a plain input (sequence parallelism), or ``Replicate()`` (the default) for
            the sum of the gradient only.
    """

    def __init__(self, *, input_layouts: Placement | None = None) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # A partial: a model with it can be pickled.
        hook = partial(_share, Group.of(device_mesh), getattr(self.input_layouts, "dim", None), device_mesh)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


def _share(  # noqa: PLR0917  a hook's
    group: Group, dim: int | None, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    def shared(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            return x if x.placements == _WHOLE else x.redistribute(placements=_WHOLE)
        whole = enter(autocast(x), group, dim)
        return DTensor.from_local(whole, mesh, _WHOLE, run_check=False, grad_placements=_PARTS)

    if args:
        return (shared(args[0]), *args[1:]), kwargs
    first = next(iter(inspect.signature(module.forward).parameters))
    name = first if first in kwargs else next(iter(kwargs))  # wrappers take ``*args, **kwargs``
    return args, kwargs | {name: shared(kwargs[name])}


# --- heads, and layers that are several in one --------------------------------------------------------------


class KeyValueParallel(ColwiseParallel):
    """Give each rank the keys, or the values, of the heads that its queries attend to.

    Where the number of ranks divides the kv heads, it is ``ColwiseParallel``. Where it does not (one head for two ranks), every
    rank keeps the whole weight and computes the heads that its queries need; the gradients are summed. The attention then
    finds one kv head for each group of its queries, and has to take the number of repetitions from the shapes.
    """

    def __init__(
        self, query_heads: int, kv_heads: int | None = None, *, input_layouts: Placement | None = None
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        self.query_heads, self.kv_heads = query_heads, kv_heads or query_heads

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return how the parameters are laid out: whole where ranks share heads."""
        columns = super().layout(module, tp_size)
        return columns if self.kv_heads % tp_size == 0 else dict.fromkeys(columns, Replicate())

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return why so many ranks cannot share the heads."""
        queries, heads, features = self.query_heads, self.kv_heads, getattr(module, "out_features", 1)
        if features % heads:
            return [f"{heads} kv heads do not divide out_features {features}"]
        if heads % tp_size and not shared_heads(queries, heads, tp_size):
            counts = f"{queries} query heads and {heads} kv heads"
            return [f"{counts} cannot be shared by {tp_size} ranks; choose a tp size that divides {queries}"]
        if heads % tp_size and not self.short_way(module):
            kind = type(module).__name__
            return [f"ranks share kv heads with the forward of nn.Linear only, without hooks, not {kind}'s"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied: nn.Module = super()._apply(module, device_mesh)
        size = device_mesh.size()
        if self.kv_heads % size:
            heads = shared_heads(self.query_heads, self.kv_heads, size)[device_mesh.get_local_rank()]
            width = len(applied.get_parameter("weight")) // self.kv_heads
            applied.rows = [head * width + row for head in heads for row in range(width)]  # type: ignore[assignment]  # of no tensor
        return applied


class Joined(nn.ModuleList):
    """Linears with the same input, their outputs one after the other. Made by :func:`split_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what the one linear would, or this rank's part of every one."""
        return torch.cat([part(x) for part in self], -1)


def split_linear(model: nn.Module, name: str, sizes: Sequence[int]) -> None:
    """Replace a linear that is several in one (q|k|v, gate|up, one after the other) by those, their outputs joined.

    The parts are modules ``{name}.0``, ``{name}.1`` and so on, for a plan to name; the model's own ``chunk`` or ``split`` of the
    output has to take the sizes from the shapes. Names in the state dict change, too: load a checkpoint of the one linear
    before, and join ``{name}.0.weight`` and the others along dim 0 to write one.

    Raises:
        PlanError: the module is not an ``nn.Linear`` with the forward of that class and without hooks, its parameters are
            shared with other modules, or the sizes do not add up to its output features.
    """
    fused = model.get_submodule(name)
    if type(fused) is not nn.Linear or sum(sizes) != fused.out_features:
        raise PlanError(
            f"{name} is {fused}; give an nn.Linear and sizes that add up to its out_features, not {list(sizes)}"
        )
    own = dict(fused.named_parameters())
    problems = []
    if "forward" in vars(fused) or has_hooks(fused) or any(has_hooks(param) for param in own.values()):
        problems.append(f"{name} has hooks or a forward that its parts would not have; split it first")
    for fqn, param in model.named_parameters(remove_duplicate=False):
        module_name, _, key = fqn.rpartition(".")
        if param is own.get(key) and model.get_submodule(module_name) is not fused:
            got = f"{name}.{key} is shared with {fqn}, which would keep the fused one"
            problems.append(f"{got}; untie them first")
    if problems:
        raise PlanError(*problems)
    bias = fused.bias is not None
    parts = Joined(nn.Linear(fused.in_features, size, bias, device="meta") for size in sizes)
    for key, whole in own.items():
        for part, rows in zip(parts, whole.detach().split([*sizes]), strict=True):
            part.register_parameter(key, nn.Parameter(rows.clone(), requires_grad=whole.requires_grad))
            vars(part.get_parameter(key)).update(vars(whole))
    parts.train(fused.training)
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if module is fused:
            model.set_submodule(fqn, parts)
