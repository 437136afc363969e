"""See what a mistake on one rank looks like on the others: ``torchrun --nproc-per-node 4 examples/when_it_hangs.py``."""

from datetime import timedelta

import torch.distributed as dist

import namedmesh

namedmesh.launch.init(timeout=timedelta(minutes=5))
rank = dist.get_rank()

# One rank was given another size. With torch alone, the ranks wait for each other until a timeout ends them.
try:
    namedmesh.init_mesh(dp=4 if rank == 2 else 2, tp=-1)
except namedmesh.AgreementError as error:
    if rank == 0:
        print(f"another size: {error}")

# One rank does not come, as after an `if` around a call that all ranks make; when it comes, it is told at once.
if rank == 3:
    dist.barrier()
try:
    namedmesh.init_mesh(dp=2, tp=-1, timeout=timedelta(seconds=1))
except namedmesh.AgreementError as error:
    if rank in {0, 3}:
        print(f"rank {rank} is told: {error}")
if rank != 3:
    dist.barrier()

# Which group is it that a log names?
mesh = namedmesh.init_mesh(dp=2, tp=-1)
if rank == 0:
    print(mesh.explain(mesh.group("tp")))
dist.destroy_process_group()
