"""Lightning Fabric with its mesh adopted: ``torchrun --nproc-per-node 4 examples/fabric.py``.

Fabric's ``ModelParallelStrategy`` makes a torch mesh of two axes, ``data_parallel`` and ``tensor_parallel``, and hands it
to a function that shards the model. ``NamedMesh.from_device_mesh`` takes it with its groups: nothing is made twice.
"""

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from namedmesh import NamedMesh, parallelize
from namedmesh.tensor_parallel import ColwiseParallel, RowwiseParallel

STEPS, SAMPLES, WIDTH = 4, 16, 8


def shard(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
    """Apply tensor parallelism first, and FSDP2 after it, each on its axis."""
    mesh = NamedMesh.from_device_mesh(device_mesh)
    parallelize(model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main(data_parallel: int = 2) -> list[float]:
    """Train a few steps, and return the mean loss of each."""
    strategy = ModelParallelStrategy(shard, data_parallel_size=data_parallel, tensor_parallel_size=2)
    fabric = Fabric(accelerator="auto", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)  # the same weights on every rank
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = fabric.setup(layers)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    mesh = NamedMesh.from_device_mesh(strategy.device_mesh)
    samples = torch.randn(SAMPLES, WIDTH).chunk(data_parallel)[mesh.rank("data_parallel")].to(fabric.device)
    losses = []
    for _ in range(STEPS):
        loss = (model(samples) - samples).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / data_parallel, group=mesh.group("data_parallel"))
        losses.append(mean.item())
    fabric.print(" ".join(f"{loss:.4f}" for loss in losses))
    return losses


if __name__ == "__main__":
    main()
