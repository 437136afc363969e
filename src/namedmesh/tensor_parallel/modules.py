"""Styles for what is no plain linear: own parameters as plain tensors, what stays whole, sums, and stacked experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh._torch import all_gather_object, concatenate_meshes, get_group_by_name, replace_parameters
from namedmesh.arguments import named_mesh
from namedmesh.axes import SAME_TOKEN_AXES
from namedmesh.errors import GradientError, ShapeError, format_ranks
from namedmesh.mesh import NamedMesh
from namedmesh.tensor_parallel.collectives import Group, enter, exchange, leave
from namedmesh.tensor_parallel.gradients import fingerprint
from namedmesh.tensor_parallel.styles import local, replace_parameter, shard_parameters, shards_of


class LocalParameters(ParallelStyle):
    """Run a module's forward on this rank's shards of its own parameters, as plain tensors.

    For a norm over each head's features or over a rank's tokens (the weight is whole), or for a bare parameter with
    one number a head. Of the gradient of a replicated one each rank makes a part: it is ``Partial`` until
    :func:`reduce_gradients` or an optimizer's step sums it. A sharded one's gradient is this rank's own.

    Args:
        placements: the layout of each parameter by name; by default all of the module's own are replicated.
    """

    def __init__(self, placements: Mapping[str, Placement] | None = None) -> None:
        super().__init__()
        self.placements = placements

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:  # noqa: ARG002  for any number
        """Return how the parameters are laid out."""
        # One parameter may have two names; both are given its DTensor.
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if self.placements is None:
            return dict.fromkeys(own, Replicate())
        placements = dict(self.placements)
        for name, placement in placements.items():
            if isinstance(placement, Shard) and placement.dim < 0 and name in own:
                placements[name] = Shard(placement.dim + own[name].ndim)
        return placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout = self.layout(module, device_mesh.size())
        shard_parameters(module, device_mesh, layout, self.src_data_rank)
        for name, placement in layout.items():
            # reduce_gradients needs it on ranks that do not use the module.
            param: Any = module.get_parameter(name)
            param.gradient_is_partial = isinstance(placement, Replicate)
        module.forward = LocalForward(module, layout)
        return module


class LocalForward:
    """A module's own forward, with plain tensors where its parameters are, inside all hooks: FSDP2 has put whole ones there.

    An object, and no closure, because a deep copy of the module must not call the forward of the original. ``blocks``: the dims
    of which some parameters have two, for blocks that the forward sees one after the other.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], blocks: Any = ()) -> None:
        self.module, self.original = module, module.forward
        self.names, self.blocks = tuple(names), dict(blocks)
        self.shards = shards_of(module, self.names)
        inner = self.original
        while isinstance(inner, LocalForward):
            # Styles may follow each other on one module: experts are sharded over etp, and then over
            # ep. The inner forward sees shards of both.
            inner.shards = {name: self.shards.get(name, shape) for name, shape in inner.shards.items()}
            inner = inner.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward does."""
        tensors = dict(zip(self.names, local(self.module, self.shards), strict=True))
        with replace_parameters(
            self.module, {name: self.plain(name, each) for name, each in tensors.items()}
        ):
            return self.original(*args, **kwargs)

    def plain(self, name: str, shard: Tensor) -> Tensor:
        """Return what the forward sees of this rank's shard of a parameter."""
        dim = self.blocks.get(name)
        return shard if dim is None else shard.flatten(dim, dim + 1)


class KeepWhole(ParallelStyle):
    """Say in a plan that a module stays as it is, because every rank computes the same with it; nothing is changed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  its signature
        return module


class SumOutput(ParallelStyle):
    """Sum a module's output over the ranks, each of which computed a part of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(sum_output, Group.of(device_mesh)))
        return module


def sum_output(group: Group, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    """Return the sum of the ranks' outputs: a hook that can be pickled, once the group is given."""
    return leave(output, group)


# --- experts -----------------------------------------------------------------------------------------------


class ShardedExperts(LocalParameters):
    """Run stacked experts on this rank's shard of every expert, and sum their outputs over the ranks.

    For a module that owns the weights of all its experts as parameters of three dims. The inputs (hidden states, routing
    weights) are the same on every rank; the gradient of each, of which a rank computes a part, is summed.

    Args:
        placements: the layout of each parameter, by name; one that every rank had whole would be added by each.
        fused: how many equal blocks the sharded dim of a parameter is made of, by name: 2 for gate and up. Such a parameter
            becomes ``(experts, 2, features, ...)``, so that a shard has its part of both; ``full_tensor().flatten(1, 2)`` is
            the weight of the whole model, and the forward sees the like.
    """

    def __init__(
        self, placements: Mapping[str, Placement], *, fused: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(placements)
        self.fused = dict(fused or {})

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why the style cannot be applied: parameters that would be added more than once."""
        layout = self.layout(module, tp_size)
        kind = type(module).__name__
        return [
            f"{name!r} names blocks of a parameter that no layout shards; name a layout with Shard(dim)"
            for name in self.fused
            if not isinstance(layout.get(name), Shard)
        ] + [
            f"{name!r} of {kind} is whole on every rank and would count once for each; name a layout that shards it"
            for name, _ in module.named_parameters(recurse=False)
            if isinstance(layout.get(name, Replicate()), Replicate)
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layout: dict[str, Any] = self.layout(module, device_mesh.size())
        dims = {name: layout[name].dim for name in self.fused}
        for name, dim in dims.items():
            blocks = module.get_parameter(name).detach().unflatten(dim, (self.fused[name], -1))
            replace_parameter(module, name, blocks)
            layout[name] = Shard(dim + 1)
        shard_parameters(module, device_mesh, layout, self.src_data_rank)
        module.forward = LocalForward(module, layout, dims)
        group = Group.of(device_mesh)
        module.register_forward_pre_hook(partial(_enter_all, group), with_kwargs=True)
        module.register_forward_hook(partial(sum_output, group))
        return module


def _enter_all(group: Group, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Let each rank make a part of the gradients of all inputs."""

    def entered(value: Any) -> Any:
        return enter(value, group) if isinstance(value, Tensor) and value.requires_grad else value

    return tuple(map(entered, args)), {name: entered(each) for name, each in kwargs.items()}


class ExpertParallel(ParallelStyle):
    """Give each rank some of a module's stacked experts, and send every token to the rank that has its expert.

    For a module that owns the weights of all its experts as parameters ``(experts, ...)``, and is called with
    tokens ``(tokens, features)``, sorted by expert, and the number of each expert's tokens ``(experts,)``. Its
    forward then sees its own experts only: their weights as plain tensors, the tokens of all ranks for them,
    sorted by expert, and their numbers. What it returns, one row for each token, travels back; none is dropped or padded.

    Every rank along ``ep`` and ``edp`` has **tokens of its own**, or their gradients count several times. Where tp is inside ep,
    leave each rank its part of the sequence (``SequenceParallel``), or cut the experts over ``etp`` first, with
    :class:`ShardedExperts` on ``mesh["etp"]``. The ranks compare a digest of their tokens in the first forward that trains
    (with pipelines the second: torch runs the first one on memory as it lies there); not in compiled code.

    Afterwards ``fully_shard(experts, mesh=mesh["edp"])``, which divides the sum of the gradients by the ranks along edp only, and
    that of everything else by those along dp and cp: the experts' are multiplied by ``edp / (dp * cp)``. ``torch.compile`` follows
    it in one graph where ``torch.compiler.config.capture_scalar_outputs`` is set before the first step.

    Args:
        mesh: the named mesh, with a view that has ``edp`` and ``ep``.

    Raises:
        ShapeError: in the forward: the numbers of tokens are not one for each expert.
        GradientError: in the forward, on every rank: ranks send the same tokens.
    """

    takes_distributed = True  # what ShardedExperts cut over etp
    ranks_have_own_data = True

    def __init__(self, mesh: NamedMesh) -> None:
        mesh = named_mesh(mesh, "ExpertParallel")
        super().__init__()
        averaged = [axis for axis in mesh.layout if axis not in SAME_TOKEN_AXES]
        self.gradient_scale = mesh.size("edp") / (mesh.layout.size(*averaged) if averaged else 1)
        self.copies = [Group.of(mesh.group("edp"))]
        self.skipped = int("pp" in mesh and mesh.size("pp") > 1)

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:  # noqa: ARG002  for any number
        """Return how the parameters are laid out."""
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        return dict.fromkeys(own, Shard(0))

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:  # noqa: ARG002  for any number
        """Return a sentence if the parameters are not stacked experts."""
        shapes = {name: tuple(each.shape) for name, each in module.named_parameters(recurse=False)}
        if len({shape[:1] for shape in shapes.values()} - {()}) == 1:
            return []
        got = f"{type(module).__name__} owns {shapes or 'none'}"
        return [f"ExpertParallel takes a module that owns parameters (experts, ...), but {got}"]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            replace_parameter(module, name, _cut(parameter, device_mesh, self.src_data_rank))
        module.forward = ExpertForward(module, Group.of(device_mesh), self)
        return module


def _cut(parameter: Tensor, mesh: DeviceMesh, source: int | None) -> DTensor:
    """Return this rank's experts of a parameter, which may be cut over another axis already."""
    if not isinstance(parameter, DTensor):
        return distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
    mine = parameter.to_local().detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    both = concatenate_meshes([mesh, parameter.device_mesh])
    return DTensor.from_local(mine, both, (Shard(0), *parameter.placements), run_check=False)


class ExpertForward(LocalForward):
    """The forward of a module of experts, between the way of the tokens to their experts and the way back."""

    def __init__(self, module: nn.Module, group: Group, style: ExpertParallel) -> None:
        super().__init__(module, style.layout(module, group.size))
        self.group, self.experts = group, module.get_parameter(self.names[0]).shape[0]
        self.scale, self.skipped = style.gradient_scale, style.skipped
        self.to_compare = [group, *style.copies]

    def __call__(self, tokens: Tensor, counts: Tensor) -> Any:
        """Return the module's output for this rank's tokens, of which each expert has a number."""
        if counts.shape != (self.experts,):
            got = f"the numbers of tokens have shape {tuple(counts.shape)}"
            raise ShapeError(f"{got}; pass one number for each of the {self.experts} experts")
        if torch.is_grad_enabled() and self.module.get_parameter(self.names[0]).requires_grad:
            if self.skipped:
                self.skipped -= 1
            elif self.to_compare and not torch.compiler.is_compiling():
                self.to_compare = [group for group in self.to_compare if not _have_their_own(tokens, group)]
        ranks = self.group.size
        if ranks == 1:
            return super().__call__(tokens, counts)
        # Of each rank, how many tokens come for each of this rank's experts.
        arriving = exchange(counts, self.group).view(ranks, -1)
        totals = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)])
        send, receive = totals.tolist()
        arrived = exchange(tokens, self.group, (send, receive))
        expert = torch.arange(arriving.shape[1], device=tokens.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=arrived.shape[0])
        order = expert.argsort(stable=True)
        output = super().__call__(arrived[order], arriving.sum(0))
        return exchange(output[order.argsort()], self.group, (receive, send))

    def plain(self, name: str, shard: Tensor) -> Tensor:
        """Return this rank's experts of a weight."""
        weight = super().plain(name, shard)
        return weight if self.scale == 1 else _scaled(weight, self.scale)


class _ScaleGradient(torch.autograd.Function):
    """Pass a tensor; multiply its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


_scaled: Callable[[Tensor, float], Tensor] = _ScaleGradient.apply

# How far sums of the same tokens may be apart, as a part of their size: two ranks may round otherwise, in 16 bits.
_ALIKE = 5e-3


def _have_their_own(tokens: Tensor, group: Group) -> bool:
    """Return whether the ranks of a group are known to have different tokens, and raise if some have the same.

    Tokens that are all alike, or no numbers, say nothing.
    """
    if tokens.is_meta or dist.get_backend() == "fake":
        return False
    says = bool(len(tokens) and (tokens != tokens[0]).any() and tokens.isfinite().all())
    # Several sums, because tokens that were normalized have the same size.
    digests = all_gather_object(
        get_group_by_name(group.name), fingerprint(tokens, (1.0, 0.7, 0.3)) if says else []
    )
    for one in filter(None, digests):
        alike = [i for i, each in enumerate(digests) if each and math.dist(one, each) <= _ALIKE * one[0]]
        if len(alike) > 1:
            got = f"{format_ranks(alike)} of the {group.size} ranks that share experts send the same tokens"
            remedy = "leave each rank its part of the sequence (SequenceParallel), or cut the experts over etp (ShardedExperts)"
            raise GradientError(f"{got}, whose gradients would count {len(alike)} times; {remedy}")
    return all(digests)
