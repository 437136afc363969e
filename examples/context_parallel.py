"""Shard long sequences over ranks.

Run it: ``torchrun --nproc-per-node 4 examples/context_parallel.py``
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import namedmesh
from namedmesh import training

WORDS, WIDTH, HEADS, LENGTH = 32, 32, 4, 64


class Model(nn.Module):
    """One layer of attention over full sequences; all other layers work on the local tokens."""

    def __init__(self, mesh: namedmesh.NamedMesh) -> None:
        super().__init__()
        self.context = mesh["cp"]
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Return the sum of the losses of the local tokens, which are at these positions."""
        x = self.words(tokens) + self.places(positions)
        projected = [layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v)]
        q, k, v = (heads.transpose(1, 2) for heads in projected)
        seen = training.context_attention(q, k, v, self.context, is_causal=True)
        logits = self.head(x + seen.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


mesh = namedmesh.init_mesh(dp=-1, cp=2)
model = Model(mesh).to(mesh.device)
fully_shard(model, mesh=training.fsdp_mesh(mesh))  # over dp and cp, along which tokens differ
training.init_parameters(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
generator = torch.Generator().manual_seed(mesh.rank("dp"))  # equal along cp
text = torch.randint(8, (2, LENGTH + 1), generator=generator).cumsum(1) % WORDS
text = text.to(mesh.device)
for step in range(20):
    # Targets are shifted before the sequence is sharded; positions count in the full sequence.
    tokens, targets, positions = training.shard_sequence(text[:, :-1], text[:, 1:], mesh=mesh["cp"])
    count = training.count_tokens(targets.numel(), mesh)  # of all ranks
    loss = training.normalize_loss(model(tokens, targets, positions), count, mesh)
    loss.backward()
    training.clip_grad_norm_(model.parameters(), 1.0, mesh)
    optimizer.step()
    optimizer.zero_grad()
    mean = training.mean_loss(loss, mesh)
    if mesh.global_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {mean.item():.3f} of {count.item()} tokens, {targets.numel()} on a rank")
dist.destroy_process_group()
