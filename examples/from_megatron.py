"""Old and new calls on the same groups: ``torchrun --nproc-per-node 4 examples/from_megatron.py``."""

import torch
import torch.distributed as dist

import namedmesh
from namedmesh.compat import megatron
from namedmesh.compat.megatron import parallel_state, tensor_parallel

# Unchanged code: Megatron's call creates the groups, and its accessors return them.
namedmesh.launch.init()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
mesh = megatron.current_mesh()  # the mesh behind the accessors

# New code asks the mesh. Both get the same groups, so functions can be moved one at a time.
same = parallel_state.get_data_parallel_group() is mesh.group("dp")
ones = torch.ones(1, device=mesh.device)
dist.all_reduce(ones, group=mesh.group("tp"))

# Megatron's layers, also if megatron-core is not installed.
torch.manual_seed(0)
up = tensor_parallel.ColumnParallelLinear(16, 64, gather_output=False).to(mesh.device)
down = tensor_parallel.RowParallelLinear(64, 16, input_is_parallel=True).to(mesh.device)
hidden, _ = up(torch.ones(2, 16, device=mesh.device))
output, _ = down(hidden)
if mesh.global_rank == 0:
    print(f"{mesh.layout}: tp has {ones.item():.0f} ranks")
    print(f"one data-parallel group for both: {same}, with ranks {list(mesh.ranks('dp'))}")
    print(f"shards {tuple(up.weight.shape)} and {tuple(down.weight.shape)}, output {tuple(output.shape)}")
dist.destroy_process_group()
