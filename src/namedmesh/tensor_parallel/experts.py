"""Styles for stacked experts: expert tensor parallelism and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from namedmesh._errors import LayoutError, ShapeError, format_items
from namedmesh._torch.meshes import concatenate_meshes
from namedmesh.layout.axes import SAME_TOKEN_AXES
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh
from namedmesh.tensor_parallel.base_styles import Style
from namedmesh.tensor_parallel.collectives import Group, all_to_all_single, copy_to_tp_region
from namedmesh.tensor_parallel.modules import LocalForward, LocalParameters, reduce_output
from namedmesh.tensor_parallel.styles import replace_parameter, shard_parameters


class ExpertTensorParallel(LocalParameters):
    """Run stacked experts on the local shard of every expert (expert tensor parallelism).

    For a module that owns the weights of all its experts as parameters with three dims. The inputs
    (hidden states, routing weights) are replicated.

    Forward: all-reduce of the output, which is partial on each rank. Backward: all-reduce of the
    partial gradients of all inputs.

    Args:
        placements: the placement of each parameter, by name. All parameters must be sharded: each
            rank would add a replicated one to the sum.
        fused: for a fused parameter, by name: the number of equal blocks of its sharded dim, such
            as 2 for gate and up. The parameter becomes ``(experts, 2, features, ...)``, so that
            each rank gets a shard of both; ``full_tensor().flatten(1, 2)`` is the weight of the
            full model, and the forward gets the local tensor flattened in the same way.
    """

    def __init__(
        self, placements: Mapping[str, Placement], *, fused: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(placements)
        self.fused: dict[str, int] = dict(fused or {})

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks.
        """
        placements = self.layout(module, tp_size)
        messages = []
        for name in self.fused:
            if not isinstance(placements.get(name), Shard):
                got = f"{name!r} names blocks of a parameter that no layout shards"
                messages.append(f"{got}; name a layout with Shard(dim)")
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(placements.get(name, Replicate()), Replicate):
                got = f"{name!r} of {type(module).__name__} is replicated and would count once per rank"
                messages.append(f"{got}; name a layout that shards it")
        return messages

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        placements: dict[str, Any] = self.layout(module, device_mesh.size())
        block_dims = {}
        for name, blocks in self.fused.items():
            dim = placements[name].dim
            fused_param = module.get_parameter(name).detach()
            replace_parameter(module, name, fused_param.unflatten(dim, (blocks, -1)))
            # The features of each block are now in the next dim.
            block_dims[name] = dim
            placements[name] = Shard(dim + 1)
        shard_parameters(module, device_mesh, placements, self.src_data_rank)
        module.forward = LocalForward(module, placements, block_dims)
        group = Group.of(device_mesh)
        module.register_forward_pre_hook(partial(_copy_inputs, group), with_kwargs=True)
        module.register_forward_hook(partial(reduce_output, group))
        return module


def _copy_inputs(group: Group, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Copy all inputs to the tensor-parallel region. Backward: all-reduce of their gradients."""

    def copy_input(value: Any) -> Any:
        if isinstance(value, Tensor) and value.requires_grad:
            return copy_to_tp_region(value, group)
        return value

    copied = {name: copy_input(value) for name, value in kwargs.items()}
    return tuple(map(copy_input, args)), copied


class ExpertParallel(Style):
    """Shard stacked experts over ``ep``, and send each token to the rank that has its expert.

    For a module that owns the weights of all its experts as parameters ``(experts, ...)``, and is
    called with tokens ``(tokens, features)``, sorted by expert, and the number of tokens for each
    expert ``(experts,)``. Its forward then gets the local experts only: their weights as local
    tensors, the tokens of all ranks for them, sorted by expert, and the number of tokens for each.
    It returns one row for each token. No token is dropped or padded.

    Forward: all-to-all of the numbers and the tokens (dispatch), and of the output rows (combine).
    Backward: the same in the opposite direction.

    Every rank along ``ep`` and ``edp`` must have **different tokens**, or their gradients count
    several times. If tp is inside of ep, shard the sequence (``SequenceParallel``), or shard the
    experts over ``etp`` first, with :class:`ExpertTensorParallel` on ``mesh["etp"]``. The ranks
    compare a fingerprint of their tokens before the first optimizer steps, of the first module
    with experts that runs. Compiled code does not compare.

    Afterwards call ``fully_shard(experts, mesh=mesh["edp"])``. It divides the gradients of experts
    by the number of ranks along edp, while all other gradients are divided by the number of ranks
    along dp and cp. The style therefore multiplies the gradients of experts by ``edp / (dp * cp)``.
    ``torch.compile`` traces the module as one graph if
    ``torch.compiler.config.capture_scalar_outputs`` is set before the first step.

    Args:
        mesh: the named mesh, with a view that has ``edp`` and ``ep``. The view must have the same
            ``pp`` as the mesh. Its ``etp`` must have size 1, or be over the same ranks as ``tp``.

    Raises:
        LayoutError: groups of the experts span several pipeline stages, or ranks along ``etp`` have
            different tokens.
        ShapeError: in the forward: there is not one number of tokens for each expert.
        GradientError: before the optimizer's step, on every rank: several ranks send the same
            tokens.
    """

    # Parameters may be DTensors that ExpertTensorParallel has sharded over etp.
    takes_distributed = True
    # The ranks have different tokens, so their gradients cannot be compared.
    ranks_have_own_data = True

    def __init__(self, mesh: NamedMesh) -> None:
        mesh = require_named_mesh(mesh, "ExpertParallel")
        _check_expert_axes(mesh)
        super().__init__()
        averaged = [axis for axis in mesh.layout if axis not in SAME_TOKEN_AXES]
        averaged_size = mesh.layout.size(*averaged) if averaged else 1
        self.gradient_scale: float = mesh.size("edp") / averaged_size
        self.replica_groups: list[Group] = [Group.of(mesh.group("edp"))]

    def layout(self, module: nn.Module, tp_size: int) -> dict[str, Placement]:
        """Return the placement of each parameter that the module itself owns: ``Shard(0)``.

        Args:
            module: the module.
            tp_size: the number of ranks. It does not matter here.
        """
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        return dict.fromkeys(params, Shard(0))

    def problems(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return the reasons why this style cannot be applied to a module (empty if it can).

        Args:
            module: the module.
            tp_size: the number of ranks along ``ep``.
        """
        shapes = {}
        for name, param in module.named_parameters(recurse=False):
            shapes[name] = tuple(param.shape)
        # The first dim of all parameters must be the same number of experts; scalars have none.
        numbers = {shape[:1] for shape in shapes.values()}
        if len(numbers) != 1 or () in numbers:
            got = f"{type(module).__name__} owns {shapes or 'none'}"
            return [f"ExpertParallel takes a module that owns parameters (experts, ...), but {got}"]
        ((num_experts,),) = numbers
        if num_experts % tp_size:
            return [f"the ep size {tp_size} does not divide {num_experts} experts; choose one that does"]
        return []

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            replace_parameter(module, name, _shard_experts(param, device_mesh, self.src_data_rank))
        module.forward = ExpertForward(module, Group.of(device_mesh), self)
        return module


def _check_expert_axes(mesh: NamedMesh) -> None:
    """Raise a LayoutError if groups of the experts have ranks that must not work together."""
    within_stage = [axis for axis in mesh.layout if axis != "pp"]
    stage_ranks = mesh.ranks(*within_stage) if within_stage else (mesh.global_rank,)
    axes = [axis for axis in ("edp", "ep", "etp") if axis in mesh]
    # Such a group would wait in a collective for ranks that wait for its stage.
    crossing = [axis for axis in axes if not set(mesh.ranks(axis)) <= set(stage_ranks)]
    if crossing:
        raise LayoutError(
            f"groups along {format_items(crossing)} span several pipeline stages; give the view of "
            f'the experts the same axis pp: mesh.add_view("expert", pp={mesh.size("pp")}, ...)'
        )
    tp_ranks = mesh.ranks("tp") if "tp" in mesh else (mesh.global_rank,)
    # ExpertTensorParallel sums over etp, where the ranks need the same tokens, as along tp.
    if "etp" in mesh and mesh.ranks("etp") not in {tp_ranks, (mesh.global_rank,)}:
        raise LayoutError(
            f"etp={mesh.size('etp')} must have size 1, or the same ranks as tp={len(tp_ranks)}: "
            "ranks along etp need the same tokens"
        )


def _shard_experts(param: Tensor, mesh: DeviceMesh, src_data_rank: int | None) -> DTensor:
    """Shard dim 0 of a parameter over ``mesh``. It may be a DTensor over another axis."""
    if not isinstance(param, DTensor):
        return distribute_tensor(param, mesh, [Shard(0)], src_data_rank=src_data_rank)
    local = param.to_local().detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    both_meshes = concatenate_meshes([mesh, param.device_mesh])
    return DTensor.from_local(local, both_meshes, (Shard(0), *param.placements), run_check=False)


class ExpertForward(LocalForward):
    """Dispatches tokens to the ranks of their experts, and combines the outputs.

    Args:
        module: the module, with its sharded parameters.
        group: the expert-parallel ranks.
        style: the style that is applied.
    """

    def __init__(self, module: nn.Module, group: Group, style: ExpertParallel) -> None:
        super().__init__(module, style.layout(module, group.size))
        self.group = group
        self.first_param: str = next(iter(self.shards))
        self.experts: int = module.get_parameter(self.first_param).shape[0]
        self.gradient_scale: float = style.gradient_scale
        self.token_groups: list[Group] = [group, *style.replica_groups]
        # Keeps the tokens, which the ranks compare before the first steps.
        self.keep_input: Callable[[Tensor], None] | None = None

    def __call__(self, tokens: Tensor, counts: Tensor) -> Any:
        """Return the module's output for the local tokens.

        Collective: every rank of the group must call it.

        Args:
            tokens: the local tokens, ``(tokens, features)``, sorted by expert.
            counts: the number of local tokens for each expert, ``(experts,)``.

        Raises:
            ShapeError: there is not one number for each expert.
        """
        if counts.shape != (self.experts,):
            got = f"the numbers of tokens have shape {tuple(counts.shape)}"
            raise ShapeError(f"{got}; pass one number for each of the {self.experts} experts")
        is_trained = self.module.get_parameter(self.first_param).requires_grad
        if not torch.compiler.is_compiling() and self.keep_input is not None and is_trained:
            self.keep_input(tokens)
        ranks = self.group.size
        if ranks == 1:
            return super().__call__(tokens, counts)
        # received_counts[rank, expert]: how many tokens ``rank`` sends to each local expert.
        received_counts = all_to_all_single(counts, self.group).view(ranks, -1)
        sent_to_rank = counts.view(ranks, -1).sum(1)
        # One copy to the host for both lists, because each copy waits for the device.
        send_sizes, receive_sizes = torch.stack([sent_to_rank, received_counts.sum(1)]).tolist()
        received = all_to_all_single(tokens, self.group, (send_sizes, receive_sizes))
        by_expert, by_rank = _find_permutation(received_counts, received.shape[0])
        output = super().__call__(_permute(received, by_expert, by_rank), received_counts.sum(0))
        output = _permute(output, by_rank, by_expert)
        return all_to_all_single(output, self.group, (receive_sizes, send_sizes))

    def local_param(self, name: str, shard: Tensor) -> Tensor:
        """Return the local experts of a parameter; their gradient is scaled in the backward.

        Args:
            name: the name of the parameter.
            shard: its local tensor.
        """
        weight = super().local_param(name, shard)
        if self.gradient_scale == 1:
            return weight
        return _scale_gradient(weight, self.gradient_scale)


def _find_permutation(received_counts: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the permutation of received tokens, and its inverse.

    Received tokens are sorted by rank and then by expert, but the module expects them sorted by
    expert only. Tokens of one rank and one expert stay together, so nothing has to be sorted.

    Args:
        received_counts: how many tokens each rank sends to each local expert, ``(ranks, experts)``.
        num_tokens: their sum, which the host knows already.

    Returns:
        For each token sorted by expert: its index among the received tokens. For each received
        token: its index among the tokens sorted by expert.
    """
    by_expert = received_counts.t()
    start_by_rank = received_counts.flatten().cumsum(0).view_as(received_counts) - received_counts
    start_by_expert = by_expert.flatten().cumsum(0).view_as(by_expert) - by_expert
    shift = start_by_rank - start_by_expert.t()
    positions = torch.arange(num_tokens, device=received_counts.device)
    shift_by_expert = shift.t().flatten().repeat_interleave(by_expert.flatten(), output_size=num_tokens)
    shift_by_rank = shift.flatten().repeat_interleave(received_counts.flatten(), output_size=num_tokens)
    return positions + shift_by_expert, positions - shift_by_rank


class _Permute(torch.autograd.Function):
    """Forward: gather rows of a tensor. Backward: gather by the inverse permutation."""

    # The backward of an index would add rows to zeros, for which GPUs sort the indices.

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _permute(grad, inverse, order), None, None


_permute: Callable[[Tensor, Tensor, Tensor], Tensor] = _Permute.apply


class _ScaleGradient(torch.autograd.Function):
    """Forward: identity. Backward: multiplication of the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


_scale_gradient: Callable[[Tensor, float], Tensor] = _ScaleGradient.apply
