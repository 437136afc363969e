"""Small models for the tensor-parallel tests, and their plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own spelling
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.tensor_parallel import (
    ColwiseParallel,
    KeyValueParallel,
    LocalParameters,
    RowwiseParallel,
    SharedInput,
)

UP_DOWN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")
TORCHS_NORMS = dict.fromkeys(NORMS, SequenceParallel(use_local_output=True))


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, *, bias: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias)  # Qwen2 has biases here only
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.wq, self.wk, self.wv)
        )
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    def __init__(
        self,
        *,
        vocab: int = 32,
        dim: int = 32,
        n_heads: int = 8,
        n_kv_heads: int = 4,
        hidden: int = 48,
        layers: int = 2,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class Mlp(nn.Module):
    """A feed-forward of two linears with biases."""

    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """A module whose forward is a function of itself and the inputs.

    Args:
        compute: the function.
        **members: the modules and parameters, by name.
    """

    def __init__(self, compute: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


class Gain(nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OfHeads(nn.Module):
    """Applies a module to the four features of each head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.unflatten(-1, (-1, 4))).flatten(-2)
        return out


class Lora(nn.Module):
    """A linear with a LoRA adapter, with the names of PEFT."""

    def __init__(self, base_layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * 0.5
        return out


def make_stacked_experts() -> Net:
    """Make four experts in one weight, called with tokens sorted by expert and their numbers."""

    def compute(m: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        tokens_by_expert = tokens.split(counts.tolist())
        outputs = [torch.tanh(rows @ weight) for rows, weight in zip(tokens_by_expert, m.weight, strict=True)]
        return torch.cat(outputs)

    return Net(compute, weight=nn.Parameter(torch.empty(4, 4, 4)))


class OwnForward(nn.Linear):
    """A subclass of nn.Linear with its own forward, which the fast path must not replace."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name nn.Linear gives it
        return 2 * super().forward(input)


def make_hf_model(kind: str, **options: Any) -> Any:
    """Make a causal language model of Hugging Face with random weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(pad_token_id=0, **sizes | heads | options)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def make_llama_plan(
    heads: int = 8, kv_heads: int = 4, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, Any]:
    """Make a plan for :class:`Llama`."""
    between = Shard(1) if sequence_parallel else Replicate()
    logits = Shard(-1) if loss_parallel else Replicate()
    plan: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel
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
        plan |= dict.fromkeys(NORMS, LocalParameters())
    return plan


def make_attention_plan(queries: int, heads: int) -> dict[str, Any]:
    """Make a plan for :class:`Attention`."""
    kv = KeyValueParallel(queries, heads)
    return {"wq": ColwiseParallel(), "wk": kv, "wv": kv, "wo": RowwiseParallel()}
