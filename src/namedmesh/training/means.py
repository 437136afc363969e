"""Means over a global batch: the loss of a token, and the gradients of experts, which fewer ranks average."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from namedmesh.errors import ShapeError, TrainingError
from namedmesh.tensor_parallel.expert_parallel import ExpertForward
from namedmesh.training.data import token_axes
from namedmesh.training.reduction import all_reduced

if TYPE_CHECKING:
    from torch import Tensor, nn

    from namedmesh.mesh import NamedMesh


def token_mean(loss_sum: Tensor, token_count: Tensor | int, mesh: NamedMesh) -> Tensor:
    """Return the mean loss of a token over the whole global batch; communicates.

    Prevents the most common silent bug of the field: each rank takes the mean over its own tokens, and FSDP2 or
    DDP averages those means. With padding or masked prompts the ranks have different numbers of tokens, so that
    a token counts more where there are few; nothing fails, and the loss looks as it always does.

    The gradients, after FSDP2 or DDP averaged them over the ranks of :func:`fsdp_mesh`, are those of one process
    with all the tokens. The ranks along dp and cp have different tokens; those along tp and pp do not count.

    **Micro-batches** that add up to one step: pass each one's own ``loss_sum``, and every time the tokens of all
    of them. The results, and the gradients, then add up to the mean over the whole step. **Pipeline schedules**
    call the loss for each micro-batch, so the same holds there; make the schedule with ``scale_grads=False``, as
    there is nothing left to divide. **With** ``loss_parallel`` pass the DTensor that comes out of it.

    Args:
        loss_sum: the sum of the losses of this rank's tokens (``reduction="sum"``), of no dims.
        token_count: how many they are: the targets that are not ignored. Other ranks may have other numbers.
        mesh: the mesh; every rank along its dp and cp axes calls this.

    Returns:
        A tensor of no dims, the same on all ranks that call, to call ``backward()`` on. It is not a number where
        no token of the whole batch counts, as ``cross_entropy`` has it.

    Raises:
        ShapeError: ``loss_sum`` has dims, so it is no sum.
        AxisError: as for :func:`data_axes`.

    Example:
        Two ranks, one with 3 tokens of loss 1 each and one with a single token of loss 5, get 2.0, and not the
        mean of means, 3.0.

        >>> import torch, torch.distributed as dist
        >>> import torch.nn.functional as F
        >>> import namedmesh
        >>> from namedmesh import training
        >>> mesh = namedmesh.init_mesh(dp=-1, tp=1, device="cpu")
        >>> logits = torch.zeros(4, 10, requires_grad=True)
        >>> targets = torch.tensor([3, -100, 5, -100])
        >>> loss_sum = F.cross_entropy(logits, targets, reduction="sum")
        >>> loss = training.token_mean(loss_sum, (targets != -100).sum(), mesh)
        >>> loss.backward()
        >>> round(loss.item(), 4) == round(F.cross_entropy(logits, targets).item(), 4)
        True
        >>> mesh.close(); dist.destroy_process_group()
    """
    if loss_sum.ndim:
        raise ShapeError(
            f"loss_sum has shape {tuple(loss_sum.shape)}, and must be one number: the sum over this rank's tokens, as "
            'cross_entropy(..., reduction="sum") returns it'
        )
    loss_sum = _plain(loss_sum)
    count = _plain(torch.as_tensor(token_count, device=loss_sum.device))
    axes = token_axes(mesh)
    ranks = mesh.size(*axes) if axes else 1
    together = torch.stack([loss_sum.detach().double(), count.double()])
    total, tokens = all_reduced(together, mesh, axes).unbind()
    # Averaging divides by the number of ranks, so it is multiplied by here.
    scaled = loss_sum.double() * (ranks / tokens)
    # The value of the mean, exactly, with the gradient of the scaled sum.
    return (total / tokens + (scaled - scaled.detach())).to(loss_sum.dtype)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_expert_divisor(model: nn.Module, mesh: NamedMesh) -> None:
    """Divide the gradients of a model's experts by as many ranks as all others.

    Prevents: experts that learn faster than the rest of the model. A rank's experts get the tokens of all ranks
    along ep, but FSDP2 and DDP divide the sum of their gradients by the ranks along edp only, while everything
    else is divided by those along dp and cp: the experts' gradients are too large, by the factor ``dp * cp / edp``,
    and nothing fails.

    Call it once, for modules that are parallelized with :class:`namedmesh.tensor_parallel.ExpertParallel`, with or
    without ``fully_shard(experts, mesh=mesh["edp"])`` (over one rank too: a ``fully_shard`` of what is around the
    experts must not take them). It is the same for any precision and backend; leave FSDP2's own
    ``set_gradient_divide_factor`` alone, which in torch up to 2.13 divides twice where edp is 1 and the gradients
    are float16 or float64.

    Args:
        model: the experts, or a model that contains some.
        mesh: a mesh with a view that has ``edp``.

    Raises:
        TrainingError: no module of the model is parallelized with ``ExpertParallel``.
        AxisError: the mesh has no axis ``edp``; or as for :func:`data_axes`.

    Example:
        >>> import torch, torch.distributed as dist
        >>> import namedmesh
        >>> from namedmesh import training
        >>> from namedmesh.tensor_parallel import ExpertParallel, parallelize
        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.ones(8, 4, 4))
        >>> mesh = namedmesh.init_mesh(dp=-1, device="cpu")
        >>> _ = mesh.add_view("expert", edp=-1, ep=1)
        >>> experts = parallelize(Experts(), mesh["ep"], ExpertParallel())
        >>> training.set_expert_divisor(experts, mesh)
        >>> mesh.close(); dist.destroy_process_group()
    """
    axes = token_axes(mesh)
    scale = mesh.size("edp") / (mesh.size(*axes) if axes else 1)
    found = [each.forward for each in model.modules() if isinstance(each.forward, ExpertForward)]
    if not found:
        raise TrainingError(
            f"no module of {type(model).__name__} is parallelized with ExpertParallel; call this after "
            'parallelize(model, mesh["ep"], {...: ExpertParallel()}), on every pipeline stage that has experts'
        )
    for forward in found:
        forward.gradient_scale = scale
