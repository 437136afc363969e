"""The sizes of a transformer, how many parameters its parts have, and how to read them from Hugging Face's ``config.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from namedmesh.errors import UsageError

# By field of a model its keys in config.json, of which the first that is there counts.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok", "top_k_experts"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "expert_groups": ("topk_group",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
_NEEDED = ("layers", "hidden", "heads", "vocab")
# Types of models whose head is the embedding unless they say otherwise, and whose feed-forward network is not gated.
_TIED = {"bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "opt", "starcoder2"}
_UNGATED = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi"}
_UNGATED |= {"starcoder2"}
# What a configuration says that the sizes of a model cannot, unless it says 1.
_UNREAD = {
    "vision_config": "only the text model is counted",
    "decoder_sparse_step": "all layers are taken to have experts",
    "moe_layer_freq": "all layers are taken to have experts",
    "layer_types": "all layers are taken to be alike",
}


def knob(words: str, default: Any = 0, allowed: tuple[Any, ...] = ()) -> Any:
    """Return a field of a dataclass, with what the help of its flag says, and the values that it may have if they are few."""
    return field(default=default, metadata={"words": words, "allowed": allowed})


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer; 0 is unknown, or none.

    Example:
        >>> llama = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
        >>> llama.total                                                          # Llama 3.1 8B, as published
        8030261248
    """

    layers: int = knob("how many layers")
    hidden: int = knob("width of the residual stream")
    heads: int = knob("attention heads")
    kv_heads: int = knob("heads of keys and values, if fewer")
    head_dim: int = knob(
        "features of a head, if not hidden / heads; with kv_rank, those without rotary positions"
    )
    ffn: int = knob(
        "inner width of a dense layer's gated network; without it, it is 4 x hidden and not gated"
    )
    vocab: int = knob("entries of the vocabulary")
    tied: bool = knob("whether the head is the embedding, as in GPT-2", default=False)
    experts: int = knob("routed experts of a layer")
    top_k: int = knob("routed experts that a token goes to", 1)
    expert_ffn: int = knob("inner width of an expert, which is gated, if not ffn")
    shared_experts: int = knob("experts that every token goes to")
    dense_layers: int = knob("the first layers that have no experts")
    expert_groups: int = knob("into how many groups of experts a token goes at most, if not any number")
    q_rank: int = knob("with latent attention (MLA), the rank of the queries, if they have one")
    kv_rank: int = knob("the rank of keys and values: latent attention")
    rope_dim: int = knob("with latent attention, the features of a head that hold positions")
    value_dim: int = knob("with latent attention, the features of a value head")

    def problems(self) -> list[str]:
        """Return a sentence for each size that does not go with another."""
        problems = [f"{name} is {size}; it is not below 0" for name, size in asdict(self).items() if size < 0]
        if self.experts and self.top_k > self.experts:
            problems.append(f"a token goes to {self.top_k} of {self.experts} experts; give fewer as top_k")
        if self.layers and self.dense_layers > self.layers:
            problems.append(f"{self.dense_layers} of {self.layers} layers are dense; give fewer dense_layers")
        if self.kv_rank and not (self.head_dim and self.rope_dim and self.value_dim):
            problems.append("kv_rank is given: latent attention; give head_dim, rope_dim and value_dim too")
        if self.heads and not self.head_dim and self.hidden % self.heads:
            problems.append(
                f"{self.hidden} hidden features do not divide by {self.heads} heads; give head_dim"
            )
        return problems

    @cached_property
    def inner(self) -> int:
        """The inner width of the feed-forward network of a dense layer."""
        return self.ffn or 4 * self.hidden

    @cached_property
    def expert_inner(self) -> int:
        """The inner width of an expert."""
        return self.expert_ffn or self.inner

    @cached_property
    def kv(self) -> int:
        """The heads of keys and values."""
        return self.kv_heads or self.heads

    @cached_property
    def features(self) -> tuple[int, int]:
        """The features of a head of queries and keys, and of a head of values and of the output."""
        own = self.head_dim or self.hidden // self.heads
        return own + self.rope_dim, self.value_dim or own

    @cached_property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def embedding(self) -> int:
        """The parameters of the embedding, and of the head where it is another matrix."""
        return self.hidden * self.vocab

    @cached_property
    def layer(self) -> tuple[int, int, int]:
        """The parameters of a dense layer, of one with experts without the routed ones, and of its routed experts."""
        hidden, heads, (query, value) = self.hidden, self.heads, self.features
        attention = hidden * (heads + self.kv) * (query + value)
        if self.kv_rank:
            queries = self.q_rank * (hidden + heads * query) if self.q_rank else hidden * heads * query
            keys_and_values = self.kv_rank * (hidden + heads * (query - self.rope_dim + value))
            attention = queries + keys_and_values + hidden * self.rope_dim + heads * value * hidden
        around, one = attention + 2 * hidden, 3 * hidden * self.expert_inner
        dense = around + (3 if self.ffn else 2) * hidden * self.inner
        return dense, around + one * self.shared_experts + hidden * self.experts, one * self.experts

    @cached_property
    def total(self) -> int:
        """The parameters in all."""
        dense, expert, routed = self.layer
        ends = self.embedding * (1 if self.tied else 2) + self.hidden
        return dense * (self.layers - self.expert_layers) + (expert + routed) * self.expert_layers + ends


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object from a file; a UsageError if it cannot be read."""
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def read_config(path: str) -> tuple[Model, list[str]]:
    """Read a model's sizes from the ``config.json`` that Hugging Face's models have, and say what they cannot express.

    Args:
        path: the file, or the directory that has it.

    Raises:
        UsageError: the file cannot be read, lacks a size that all estimates need, or has one that is no int.
    """
    whole = read_json(path if path.endswith(".json") else Path(path, "config.json"))
    data, notes = {**whole, **whole.get("text_config", {})}, []
    for key, words in _UNREAD.items():
        value = data.get(key)
        kinds = len(set(value)) if isinstance(value, list) else value
        if kinds is not None and kinds != 1:
            notes.append(f"{key} is not read: {words}")
    sizes = _sizes(path, data)
    kind = data.get("model_type", "")
    if data.get("multi_query") and not data.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
        sizes["kv_heads"] = 1
    inner = sizes.pop("ffn", 0) if kind in _UNGATED else 0
    if inner not in {0, 4 * sizes["hidden"]}:
        notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    if kind not in _UNGATED and "ffn" not in sizes and "expert_ffn" not in sizes:
        notes.append("no width of the feed-forward network: 4 x hidden, not gated, is taken")
    return Model(**sizes, tied=bool(data.get("tie_word_embeddings", kind in _TIED))), notes


def _sizes(path: str, data: dict[str, Any]) -> dict[str, int]:
    sizes, problems = dict[str, int](), []
    for name, keys in _KEYS.items():
        key = next((key for key in keys if data.get(key) is not None), keys[0])
        value = data.get(key)
        if type(value) is int:
            sizes[name] = value
        elif value is not None:
            problems.append(f"{path}: {key} is {value!r}; it is an int")
        elif name in _NEEDED:
            problems.append(f"{path}: there is no {' or '.join(keys)}; add it")
    if problems:
        raise UsageError(*problems)
    return sizes
