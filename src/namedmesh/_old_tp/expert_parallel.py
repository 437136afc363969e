"""Experts that are whole on one rank each: tokens travel to the ranks that have their experts, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from namedmesh._torch import concatenate_meshes
from namedmesh.errors import ShapeError
from namedmesh.tensor_parallel.collectives import RankGroup, all_to_all, exchange, passed, with_backward
from namedmesh.tensor_parallel.local import LocalForward
from namedmesh.tensor_parallel.placements import refuse_incompatible
from namedmesh.tensor_parallel.styles import replace_parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


class ExpertParallel(ParallelStyle):
    """Give each rank some of a module's stacked experts, and send every token to the rank that has its expert.

    For a module that owns the weights of all its experts as parameters ``(experts, ...)``, and is called with
    tokens ``(tokens, features)``, sorted by expert, and the number of each expert's tokens ``(experts,)``. Its
    forward then sees its own experts only: their weights as plain tensors, the tokens of all ranks for them,
    sorted by expert, and their numbers, any of which may be 0. What it returns, one row for each token, travels
    back to where the tokens came from.

    Prevents: tokens that are dropped or padded where the ranks have different numbers of them.

    Every rank along the axis has **tokens of its own**. Where tp is inside ep, as in a view of ``edp, ep`` over
    ``dp, tp``, leave each rank its part of the sequence (``SequenceParallel``): ranks that send the same tokens
    have them counted twice in the experts' gradients. With ``etp`` inside, cut the experts over it first, with
    :class:`ShardedExperts` on ``mesh["etp"]``; the ranks along etp have the same tokens. Afterwards
    ``fully_shard(experts, mesh=mesh["edp"])``, and :func:`namedmesh.training.set_expert_divisor`.

    ``torch.compile`` follows it in one graph where ``torch.compiler.config.capture_scalar_outputs`` is set: how
    many tokens travel is known from the tokens only. Without it the graph breaks once in each forward, where the numbers
    are read (torch reports ``aten._local_scalar_dense``), and the results are the same; set it before the first step.

    Raises:
        PlanError: when applied to a module that owns no parameters, or whose parameters do not all have the same
            number of experts in front.
        ShapeError: in the forward: the numbers of tokens are not one for each expert, or do not add up.

    Example:
        On 4 ranks each has 2 of the 8 experts:

        >>> import torch
        >>> from namedmesh.tensor_parallel import ExpertParallel, plan_report
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(8, 4, 4))
        ...
        ...     def forward(self, tokens, counts):
        ...         parts = tokens.split(counts.tolist())
        ...         return torch.cat([part @ weight for part, weight in zip(parts, self.weight)])
        >>> plan_report(Experts(), 4, {"": ExpertParallel()}).rows[0].local_shape
        (2, 4, 4)
    """

    takes_distributed = True  # what ShardedExperts cut over etp
    ranks_have_own_data = True

    def __repr__(self) -> str:
        return "ExpertParallel()"

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:
        """Return the placements: every parameter of the module's own is sharded along its first dim."""
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence if the parameters are not stacked experts, or travel already."""
        if isinstance(module.forward, ExpertForward):
            return ["ExpertParallel finds experts that it was applied to before; apply it once"]
        shapes = {name: tuple(each.shape) for name, each in module.named_parameters(recurse=False)}
        if shapes and len({shape[:1] for shape in shapes.values()}) == 1 and () not in shapes.values():
            return []
        reason = (
            f"ExpertParallel takes a module that owns the weights of all its experts as parameters (experts, ...), but "
            f"{type(module).__name__} owns {shapes or 'none'}"
        )
        return [reason]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_incompatible(self, module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            replace_parameter(module, name, _cut(parameter, device_mesh, self.src_data_rank))
        module.forward = ExpertForward(module, RankGroup(device_mesh))
        return module


def _cut(parameter: Tensor, mesh: DeviceMesh, source: int | None) -> DTensor:
    """Return this rank's experts of a parameter, which may be cut over another axis already."""
    if not isinstance(parameter, DTensor):
        return distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
    mine = parameter.to_local().detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    both = concatenate_meshes([mesh, parameter.device_mesh])
    placements = (Shard(0), *parameter.placements)
    return DTensor.from_local(
        mine, both, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class ExpertForward(LocalForward):
    """The forward of a module of experts, between the way of the tokens to their experts and the way back."""

    def __init__(self, module: nn.Module, group: RankGroup) -> None:
        super().__init__(module, tuple(name for name, _ in module.named_parameters(recurse=False)))
        self.group, self.experts = group, module.get_parameter(self.names[0]).shape[0]
        self.gradient_scale = 1.0
        """What the gradients of the weights are multiplied by."""

    def __call__(self, tokens: Tensor, counts: Tensor) -> Any:
        """Return the module's output for this rank's tokens, of which each expert has a number."""
        if counts.shape != (self.experts,):
            raise ShapeError(
                f"the numbers of tokens have shape {tuple(counts.shape)}; pass one number for each of the {self.experts} "
                "experts"
            )
        ranks = self.group.size
        if ranks == 1:
            return super().__call__(tokens, counts)
        # Of each rank, how many tokens come for each of this rank's experts.
        arriving = all_to_all(counts, self.group).view(ranks, -1)
        totals = torch.stack([counts.view(ranks, -1).sum(1), arriving.sum(1)])
        send, receive = totals.tolist()
        arrived = exchange(tokens, self.group, (send, receive))
        expert = torch.arange(arriving.shape[1], device=tokens.device).repeat(ranks)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=arrived.shape[0])
        order = expert.argsort(stable=True)
        output = super().__call__(arrived[order], arriving.sum(0))
        return exchange(output[order.argsort()], self.group, (receive, send))

    def plain(self, name: str) -> Tensor:
        """Return this rank's experts of a weight."""
        weight = super().plain(name)
        scale = self.gradient_scale
        return weight if scale == 1 else _scale_gradient(weight, self.group, scale)


_scale_gradient = with_backward(passed, lambda gradient, _group, scale: gradient * scale, on_one_rank=True)
"""Pass a tensor; multiply its gradient."""
