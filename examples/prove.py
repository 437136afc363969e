"""Compare a sharded model with itself in one process: ``torchrun --nproc-per-node 2 examples/prove.py``.

``torchrun --nproc-per-node 2 -m namedmesh verify prove:wrong``, in this directory, does the same from a shell.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import namedmesh
from namedmesh import GradientError
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel, verify

COLUMN_ROW = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Gated(nn.Module):
    """Two layers with something between them, where each rank has some of the features."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, 16), between, nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(rows, 8)``."""
        output: Tensor = self.down(self.between(self.up(x)))
        return output


def right() -> tuple[nn.Module, object, tuple[Tensor, ...]]:
    """Return a model, its plan and inputs: a function of each feature alone may stand between the layers."""
    return Gated(nn.GELU()), COLUMN_ROW, (torch.randn(4, 8),)


def wrong() -> tuple[nn.Module, object, tuple[Tensor, ...]]:
    """Return the same with a softmax over the features, of which each rank sees its own."""
    return Gated(nn.Softmax(-1)), COLUMN_ROW, (torch.randn(4, 8),)


if __name__ == "__main__":
    mesh = namedmesh.init_mesh(tp=-1)
    torch.manual_seed(0)
    for job in (right, wrong):
        model, plan, inputs = job()
        report = verify(model.to(mesh.device), mesh["tp"], plan, *inputs)
        if mesh.global_rank == 0:
            print(f"{job.__name__}:\n{report}")
    # What the ranks disagree about stops the first backward: a gain of which each rank trains a copy.
    model = namedmesh.parallelize(Gated(nn.PReLU()).to(mesh.device), mesh["tp"], COLUMN_ROW)
    try:
        model(torch.ones(4, 8, device=mesh.device)).square().mean().backward()
    except GradientError as error:
        if mesh.global_rank == 0:
            print(f"refused: {error}")
    mesh.close()
    dist.destroy_process_group()
