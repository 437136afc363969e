"""Mixed precision in float16: all ranks of a model skip the same optimizer steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from namedmesh._torch import get_found_infs
from namedmesh.arguments import named_mesh
from namedmesh.errors import TrainingError
from namedmesh.mesh import NamedMesh


@torch.no_grad()
def sync_found_inf(scaler: GradScaler, optimizer: Optimizer, mesh: NamedMesh) -> None:
    """Let every rank skip the optimizer step if a gradient of any rank is not finite.

    A GradScaler looks at the gradients of its own rank. Without this call pipeline stages and
    shards of tensor parallelism decide differently, and have different scales from then on. Call it
    between ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)``, once for each optimizer.

    Collective: every rank must call it.

    Args:
        scaler: the scaler of this rank. One that is not enabled is left alone, on every rank.
        optimizer: the optimizer whose gradients were unscaled.
        mesh: the mesh over which the model is spread.

    Raises:
        TrainingError: if ``scaler.unscale_(optimizer)`` was not called in this step.

    Example:
        A pipeline stage without a loss has nothing to scale. Its scaler gets its scale when it
        scales the zero that ``step`` returns.

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
    mesh = named_mesh(mesh, "sync_found_inf")
    if not scaler.is_enabled():
        return
    by_device = get_found_infs(scaler, optimizer)
    if by_device is None:
        raise TrainingError(
            "the gradients are still scaled; call scaler.unscale_(optimizer) before sync_found_inf"
        )
    found = torch.zeros((), device=mesh.device)
    for of_device in by_device.values():
        found = torch.maximum(found, of_device.to(found))
    for axis, size in mesh.layout.items():
        if size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.group(axis))
    for of_device in by_device.values():
        of_device.copy_(found)
    # A stage without gradients skips the same steps. Without an entry, scaler.step and
    # scaler.update would raise.
    by_device.setdefault(found.device, found)
