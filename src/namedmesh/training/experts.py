"""The gradients of experts, which fewer ranks average than those of everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from namedmesh.errors import TrainingError
from namedmesh.tensor_parallel.expert_parallel import ExpertForward
from namedmesh.training.data import token_axes

if TYPE_CHECKING:
    from torch import nn

    from namedmesh.mesh import NamedMesh


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
