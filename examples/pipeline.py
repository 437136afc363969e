"""Train a model in two pipeline stages, and generate.

Run it: ``torchrun --nproc-per-node 4 examples/pipeline.py``
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training

WORDS, WIDTH, LAYERS = 16, 32, 4


class Stage(nn.Module):
    """The layers of one stage. The embedding of the first and the output of the last are tied."""

    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        super().__init__()
        first, last = mesh.is_first("pp"), mesh.is_last("pp")
        self.embed = nn.Embedding(WORDS, WIDTH) if first else None
        layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
        self.layers = training.stage_layers(layers, mesh)  # named as in the whole model
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:  # tokens, or the output of the stage before
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = x + F.gelu(layer(x))
        return x if self.head is None else self.head(x)


mesh = namedmesh.init_mesh(pp=2, dp=-1)
stage = Stage(mesh).to(mesh.device)
fully_shard(stage, mesh=mesh["dp"])
training.init_parameters(stage, seed=0)
# With pp=1 a rank has both weights. Stages in the middle have neither.
first, last = (module.weight if module else None for module in (stage.embed, stage.head))
sum_tied = training.tie_stages(first, last, mesh)
optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
pipe = training.Pipeline(
    stage,
    mesh,
    "1F1B",
    n_microbatches=4,
    loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
)
# Each word is one more than the last. The batch is the same on every rank of pp.
counting = (torch.arange(8)[:, None] + torch.arange(9) + 8 * mesh.rank("dp")) % WORDS
inputs, targets = (part.contiguous().to(mesh.device) for part in (counting[:, :-1], counting[:, 1:]))
for step in range(21):
    loss = training.mean_loss(pipe.step(inputs, target=targets), mesh)
    sum_tied()
    training.clip_grad_norm_(stage.parameters(), 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.global_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
words = torch.zeros(1, 8, dtype=torch.int64, device=mesh.device)
words[0, 0] = 5
for position in range(1, 8):
    logits = pipe.eval(words)  # None except on the last stage
    if logits is not None:
        words[0, position] = logits[0, position - 1].argmax()
    dist.broadcast(words, group=mesh.group("pp"), group_src=mesh.size("pp") - 1)
if mesh.global_rank == 0:
    print("generated:", *words[0].tolist())
dist.destroy_process_group()
