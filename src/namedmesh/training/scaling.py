"""Gradient scaling for float16: all ranks of a model skip the same optimizer steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from namedmesh._errors import TrainingError
from namedmesh._torch.modules import get_found_infs
from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh


@torch.no_grad()
def sync_found_inf(scaler: GradScaler, optimizer: Optimizer, mesh: NamedMesh) -> None:
    """Skip the optimizer step on every rank if a gradient of any rank is not finite.

    A GradScaler checks the gradients of its own rank. Without this call, pipeline stages and
    tensor-parallel ranks decide differently, and their scales differ from then on. Call it between
    ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)``, once for each optimizer.

    Collective: every rank of the mesh must call it. One all-reduce for each axis.

    Args:
        scaler: the scaler of this rank. With ``enabled=False``, on every rank, nothing is done.
        optimizer: the optimizer whose gradients were unscaled.
        mesh: the mesh over which the model is distributed.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.
        TrainingError: ``scaler.unscale_(optimizer)`` was not called in this step.

    Example:
        Scale the loss in ``loss_fn``. The other pipeline stages have no loss, so their scalers
        get their first scale from the zero that ``step`` returns.

        ::

            def scaled_loss(output, target):
                return scaler.scale(loss(output, target))

            pipe = training.Pipeline(stage, mesh, n_microbatches=4, loss_fn=scaled_loss)
            scaler.scale(pipe.step(inputs, target=targets))
            scaler.unscale_(optimizer)
            training.sync_found_inf(scaler, optimizer, mesh)
            scaler.step(optimizer)
            scaler.update()
    """
    mesh = require_named_mesh(mesh, "sync_found_inf")
    if not scaler.is_enabled():
        return
    flags_by_device = get_found_infs(scaler, optimizer)
    if flags_by_device is None:
        raise TrainingError(
            "the gradients are still scaled; call scaler.unscale_(optimizer) before sync_found_inf"
        )
    # torch has one flag for each device that has gradients: 1.0 if one of them is not finite.
    found_inf = torch.zeros((), device=mesh.device)
    for flag in flags_by_device.values():
        found_inf = torch.maximum(found_inf, flag.to(found_inf))
    for axis, size in mesh.layout.items():
        if size > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, mesh.group(axis))
    for flag in flags_by_device.values():
        flag.copy_(found_inf)
    # A pipeline stage without gradients must skip the same steps. Without an entry, scaler.step and
    # scaler.update would raise on its rank.
    flags_by_device.setdefault(found_inf.device, found_inf)
