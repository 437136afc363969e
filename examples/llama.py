"""A small Llama-style language model over bytes, in plain torch, and its tensor-parallel plan.

A part of the model holds any run of the layers, with or without the embedding in front and the head behind, and every
parameter has the same name whichever part holds it. ``llama_plan`` alone knows about ranks: it says which modules they share.
Attention reads its number of heads from the tensors it is given, so a tensor-parallel rank may own a few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows it by
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.tensor.parallel import ParallelStyle


VOCABULARY = 256  # one token for each value of a byte
ROTARY_BASE = 10_000.0
FEED_FORWARD_MULTIPLE = 16  # so that any tensor-parallel size up to 16 divides it


@dataclass(frozen=True)
class ModelSizes:
    """Everything that decides the shapes of the parameters."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = VOCABULARY

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.dim // self.heads

    @property
    def feed_forward(self) -> int:
        """The inner width of the feed-forward network: 8/3 of ``dim``, rounded up to a handy multiple."""
        return -(-8 * self.dim // (3 * FEED_FORWARD_MULTIPLE)) * FEED_FORWARD_MULTIPLE

    def problems(self) -> list[str]:
        """Return what keeps these sizes from being a model, one sentence each."""
        found = [
            f"{name} must be at least 1, not {size}"
            for name, size in vars(self).items()
            if size < 1  # the checks below divide by them
        ]
        if found:
            return found
        if self.dim % self.heads:
            found.append(f"dim {self.dim} is not divisible by {self.heads} heads")
        elif self.head_dim % 2:
            found.append(f"dim / heads must be even for rotary embeddings, not {self.head_dim}")
        if self.heads % self.kv_heads:
            found.append(f"{self.heads} heads cannot share {self.kv_heads} kv heads evenly")
        return found


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share one key and value head."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.dim, bias=False)
        # Another function where a rank has a part of each sequence only.
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Mix the positions of ``x``, of shape (batch, sequence, dim)."""
        query, key, value = (self._split_heads(project(x)) for project in (self.wq, self.wk, self.wv))
        mixed = self.attend(rotate(query, positions), rotate(key, positions), value)
        joined: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split_heads(self, x: Tensor) -> Tensor:
        # -1: under tensor parallelism this rank has only some of the heads.
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a gated feed-forward network."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.feed_forward, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` on its own."""
        transformed: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return transformed


class Block(nn.Module):
    """One layer: attention and feed-forward network, each behind a norm and beside a residual path."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return one step of refinement of ``x``, of shape (batch, sequence, dim)."""
        x = x + self.attention(self.attention_norm(x), positions=positions)
        refined: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return refined


class Llama(nn.Module):
    """The whole model, or the part of it that one pipeline stage runs.

    Args:
        sizes: the sizes of the *whole* model.
        layers: which layers this part has; all of them by default. The part with the first layer has the
            embedding, the part with the last one has the final norm and the head.
    """

    def __init__(self, sizes: ModelSizes, layers: Iterable[int] | None = None) -> None:
        super().__init__()
        here = list(range(sizes.layers) if layers is None else layers)
        first, last = here[0] == 0, here[-1] == sizes.layers - 1
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim) if first else None
        # A dict keyed by the layer's number, not a list: "layers.3" is the same layer in every part.
        self.layers = nn.ModuleDict({str(index): Block(sizes) for index in here})
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5) if last else None
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False) if last else None
        self.positions: Tensor | None = None  # of the tokens in their sequence; from 0 on where it is None

    def forward(self, x: Tensor) -> Tensor:
        """Turn tokens (or what the part before returned) into logits (or what the part behind expects)."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x, positions=self.positions)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of each position to itself and those before it."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Turn each pair of features of ``x`` by an angle that grows with the position: rotary positions."""
    sequence, head_dim = x.shape[-2:]
    speeds = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=x.device) / head_dim)
    if positions is None:
        positions = torch.arange(sequence, device=x.device)
    angles = positions[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def first_weights(sizes: ModelSizes, name: str, _parameter: Tensor) -> tuple[float, float]:
    """Return the mean and the deviation of a parameter's first weights, by its name."""
    if name.endswith("norm.weight"):
        return 1.0, 0.0
    if name == "tok_embeddings.weight":
        # Not smaller than what the first layers add to it, or the start is rough.
        return 0.0, 0.5
    # These add to the residual path, twice a layer: keep its size independent of the depth.
    adds = name.endswith(("wo.weight", "w2.weight"))
    return 0.0, 0.02 / (2 * sizes.layers) ** 0.5 if adds else 0.02


def llama_plan(
    heads: int,
    kv_heads: int,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    sequence_dim: int = 1,
) -> dict[str, ParallelStyle]:
    """Return the plan for ``parallelize``: a fresh one, to change as needed.

    The input of ``attention``, and of ``feed_forward``, is gathered once for its column layers where the sequence is sharded,
    and its gradient summed once.

    Args:
        heads: the number of query heads.
        kv_heads: the number of key and value heads; there may be fewer of them than ranks.
        sequence_parallel: between the sharded parts each rank keeps its shard of the sequence; the norms run
            on it, and every length must be a multiple of the tp size.
        loss_parallel: leave the logits sharded over the vocabulary, as a DTensor, for ``cross_entropy``; otherwise
            every rank gets all logits.
        sequence_dim: the dim of the sequence in the activations.
    """
    between = Shard(sequence_dim) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    for name in ("attention", "feed_forward"):
        plan[f"layers.*.{name}"] = SharedInput(input_layouts=between)
    for name in ("attention.wq", "feed_forward.w1", "feed_forward.w3"):
        plan[f"layers.*.{name}"] = ColwiseParallel()
    for name in ("attention.wk", "attention.wv"):
        plan[f"layers.*.{name}"] = KeyValueParallel(heads, kv_heads)
    for name in ("attention.wo", "feed_forward.w2"):
        plan[f"layers.*.{name}"] = RowwiseParallel(output_layouts=between)
    if sequence_parallel:
        for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"):
            plan[name] = LocalParameters()  # as torch's SequenceParallel, on plain tensors
    return plan
