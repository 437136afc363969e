"""Tokens per second, memory and utilization, in one line."""

from __future__ import annotations

import time

import torch

from namedmesh.mesh.internal import require_named_mesh
from namedmesh.mesh.mesh import NamedMesh


class Throughput:
    """Measures a training loop: tokens per second, memory, and utilization of the hardware.

    The first step is not counted, because it opens connections and compiles. Does not communicate
    and does not wait for the device: call :meth:`summary` after a call that does, such as
    ``loss.item()``.

    Args:
        mesh: the mesh of the job.
        flops_per_token: the operations of the model for one token, forward and backward, without
            recomputation: 6 for each parameter that is used in a matrix product, and 6 times
            layers, features of all heads and sequence length for causal attention. 0 if unknown.
        peak_flops: the operations per second of one device, from its data sheet. 0 if unknown.

    Raises:
        MeshError: ``mesh`` is not a NamedMesh.

    Example:
        >>> import namedmesh
        >>> mesh = namedmesh.init_mesh(dp=1, device="cpu")
        >>> throughput = Throughput(mesh)
        >>> for step in range(3):
        ...     throughput.update(1024)  # after each step
        >>> throughput.summary().endswith(" tokens/s")
        True
        >>> mesh.close(); torch.distributed.destroy_process_group()
    """

    def __init__(self, mesh: NamedMesh, *, flops_per_token: float = 0, peak_flops: float = 0) -> None:
        self.mesh: NamedMesh = require_named_mesh(mesh, "Throughput")
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.tokens: int = 0
        self.start: float | None = None

    def update(self, num_tokens: int) -> None:
        """Count the tokens of a step, after it.

        Args:
            num_tokens: the tokens of the step over all ranks.
        """
        if self.start is None:
            self.start = time.monotonic()
        else:
            self.tokens += num_tokens

    def summary(self) -> str:
        """Return a line about the steps since the last summary.

        Returns:
            Tokens per second over all ranks. On an accelerator, also the most memory that this rank
            has allocated so far and its share of the device. If both numbers of operations are
            given, the utilization: the operations of the model over the peak of all devices. Empty
            after the first step.
        """
        if self.start is None or not self.tokens:
            return ""
        rate = self.tokens / (time.monotonic() - self.start)
        parts = [f"{rate:,.0f} tokens/s"]
        device = self.mesh.device
        if device.type != "cpu":
            allocated = torch.accelerator.max_memory_allocated(device)
            share = allocated / torch.accelerator.get_memory_info(device)[1]
            parts.append(f"{allocated / 2**30:.2f} GiB ({share:.0%})")
        if self.flops_per_token and self.peak_flops:
            utilization = rate * self.flops_per_token / (self.peak_flops * self.mesh.layout.world_size)
            parts.append(f"{utilization:.1%} utilization")
        self.start = time.monotonic()
        self.tokens = 0
        return ", ".join(parts)
