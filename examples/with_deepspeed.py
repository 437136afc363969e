"""DeepSpeed's ZeRO with tensor parallelism on one mesh: ``torchrun --nproc-per-node 4 examples/with_deepspeed.py``."""

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import namedmesh
from namedmesh.compat.deepspeed import mpu
from namedmesh.compat.megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class Model(nn.Module):
    """Two layers whose parameters are local shards, as DeepSpeed's optimizers need them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(16, 64, gather_output=False, tp_group=group)
        self.down = RowParallelLinear(64, 16, input_is_parallel=True, tp_group=group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)[0]))[0]


mesh = namedmesh.init_mesh(dp=-1, tp=2)
torch.manual_seed(0)
model = Model(mesh.group("tp")).to(mesh.device)
engine, *_ = deepspeed.initialize(
    model=model,
    mpu=mpu(mesh),  # data- and tensor-parallel groups are those of the mesh
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    dist_init_required=False,
    config={
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    },
)
generator = torch.Generator().manual_seed(mesh.rank("dp"))  # tp ranks have the same samples
x = torch.randn(8, 16, generator=generator).to(engine.device)
for step in range(20):
    loss = (engine(x) - x.roll(1, -1)).square().mean()
    engine.backward(loss)
    engine.step()
    dist.all_reduce(mean := loss.detach() / mesh.size("dp"), group=mesh.group("dp"))
    if mesh.global_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {mean.item():.3f}")
dist.destroy_process_group()
