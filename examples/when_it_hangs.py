"""Provoke mistakes on one rank and print the errors of the others: ``torchrun --nproc-per-node 4 examples/when_it_hangs.py``."""

from datetime import timedelta

import torch.distributed as dist

import namedmesh

namedmesh.launch.init(timeout=timedelta(minutes=5))
rank = dist.get_rank()

# Rank 2 has another size. With torch alone, all ranks would wait for each other until a timeout.
try:
    namedmesh.init_mesh(dp=4 if rank == 2 else 2, tp=-1)
except namedmesh.AgreementError as error:
    if rank == 0:
        print(f"another size: {error}")

# Rank 3 does not call init_mesh in time, as if the call were inside an `if`. When it does, it gets the same error.
if rank == 3:
    dist.barrier()
try:
    namedmesh.init_mesh(dp=2, tp=-1, timeout=timedelta(seconds=1))
except namedmesh.AgreementError as error:
    if rank in {0, 3}:
        print(f"rank {rank} gets: {error}")
if rank != 3:
    dist.barrier()

# Describe a group, e.g. one that a log names.
mesh = namedmesh.init_mesh(dp=2, tp=-1)
if rank == 0:
    print(mesh.explain(mesh.group("tp")))
dist.destroy_process_group()
