"""A small Llama as model code for fairscale writes one; it knows nothing of namedmesh."""

from __future__ import annotations

from typing import Any

import fairscale.nn.model_parallel.initialize as fs_init
import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from fairscale.nn.model_parallel.initialize import get_model_parallel_rank, initialize_model_parallel
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import Tensor, nn

VOCAB, DIM, HEADS, HIDDEN, LAYERS = 32, 16, 4, 24, 2


def setup(ranks: int) -> int:
    """Initialize model parallelism, and return this rank's position in its group."""
    initialize_model_parallel(ranks)
    torch.manual_seed(1)
    rank: int = get_model_parallel_rank()
    return rank


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS // fs_init.get_model_parallel_world_size()
        make = {"bias": False, "gather_output": False, "init_method": lambda x: x}
        self.wq, self.wk, self.wv = (ColumnParallelLinear(DIM, DIM, **make) for _ in range(3))
        self.wo = RowParallelLinear(DIM, DIM, bias=False, input_is_parallel=True, init_method=lambda x: x)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (one(x).unflatten(-1, (self.heads, -1)) for one in (self.wq, self.wk, self.wv))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = {"bias": False, "gather_output": False, "init_method": lambda x: x}
        self.w1 = ColumnParallelLinear(DIM, HIDDEN, **make)
        self.w2 = RowParallelLinear(HIDDEN, DIM, bias=False, input_is_parallel=True, init_method=lambda x: x)
        self.w3 = ColumnParallelLinear(DIM, HIDDEN, **make)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        mixed: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return mixed


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = ParallelEmbedding(VOCAB, DIM, init_method=lambda x: x)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = ColumnParallelLinear(DIM, VOCAB, bias=False, init_method=lambda x: x)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
