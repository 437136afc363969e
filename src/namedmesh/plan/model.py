"""The sizes of a transformer, how many parameters its parts have, and how to read them from Hugging Face's ``config.json``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from namedmesh.plan.spec import UsageError, read_json, size_problems

# By field of a model its keys in config.json, of which the first that is there counts.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
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
_UNGATED = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"}  # fmt: skip
# Words in the names of keys that may change the number of parameters, and names with them that do not.
_SHAPE = re.compile(r"layer|expert|head|dim|rank|size|freq|step|period|interval")
_HARMLESS = {
    "attention_chunk_size", "chunk_size_feed_forward", "ep_size", "max_window_layers", "n_head_kv", "num_return_sequences",
    "qk_head_dim", "router_aux_loss_coef", "type_vocab_size",
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer; None is unknown, and what needs it is then left out.

    Args:
        layers: how many layers.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values; by default as many as heads.
        head_dim: features of a head; by default ``hidden / heads``. With ``kv_rank``, those without rotary positions.
        ffn: inner width of the feed-forward network of a dense layer, gated then; by default 4 x hidden, not gated.
        vocab: entries of the vocabulary.
        tied: whether the head is the embedding, as in GPT-2.
        params: parameters in all, those of the experts included; by default what the sizes amount to.
        experts: routed experts of a layer.
        top_k: routed experts that a token goes to.
        expert_ffn: inner width of an expert, which is gated; by default ``ffn``.
        shared_experts: experts that every token goes to.
        dense_layers: the first layers that have no experts.
        expert_groups: into how many groups of experts a token goes at most; by default any number.
        q_rank: with latent attention (MLA), the rank of the queries, if they have one.
        kv_rank: the rank of keys and values: latent attention.
        rope_dim: with latent attention, the features of a head that hold positions.
        value_dim: with latent attention, the features of a value head.

    Example:
        >>> llama = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
        >>> llama.total                                                          # Llama 3.1 8B, as published
        8030261248
    """

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    tied: bool = False
    params: int | None = None
    experts: int | None = None
    top_k: int = 1
    expert_ffn: int | None = None
    shared_experts: int | None = None
    dense_layers: int | None = None
    expert_groups: int | None = None
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None

    def problems(self) -> list[str]:
        """Return a sentence for each size that does not go with another."""
        sizes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "tied"}
        for name in ("shared_experts", "dense_layers"):  # these may be 0
            sizes[name] = sizes[name] or None
        problems = size_problems(sizes)
        if problems:
            return problems
        if self.experts is not None and self.top_k > self.experts:
            problems.append(
                f"a token goes to {self.top_k} of {self.experts} experts; top_k is {self.experts} at most"
            )
        if (self.dense_layers or 0) > (self.layers or self.dense_layers or 0):
            problems.append(
                f"{self.dense_layers} of {self.layers} layers are dense; give {self.layers} at most"
            )
        if self.kv_rank is not None and None in {self.rope_dim, self.value_dim, self.head_dim}:
            problems.append("kv_rank is given: latent attention; give head_dim, rope_dim and value_dim too")
        if self.heads and self.hidden and self.head_dim is None and self.hidden % self.heads:
            problems.append(
                f"{self.hidden} hidden features do not divide by {self.heads} heads; give head_dim"
            )
        if self.params is not None and self.body < 0:
            problems.append(
                f"the sizes have more than {self.params} parameters; give other sizes, or another number"
            )
        return problems

    @property
    def gated(self) -> bool:
        """Whether the feed-forward network is gated."""
        return self.ffn is not None

    @cached_property
    def inner(self) -> int:
        """The inner width of the feed-forward network of a dense layer."""
        return self.ffn or 4 * (self.hidden or 0)

    @cached_property
    def expert_inner(self) -> int:
        """The inner width of an expert."""
        return self.expert_ffn or self.inner

    @cached_property
    def kv(self) -> int:
        """The heads of keys and values."""
        return self.kv_heads or self.heads or 1

    @cached_property
    def features(self) -> tuple[int, int]:
        """The features of a head of queries and keys, and of a head of values and of the output."""
        own = self.head_dim or (self.hidden or 0) // (self.heads or 1)
        return own + (self.rope_dim or 0), own if self.value_dim is None else self.value_dim

    @cached_property
    def attention(self) -> int:
        """The parameters of one attention layer."""
        hidden, heads = self.hidden or 0, self.heads or 1
        query, value = self.features
        if self.kv_rank is None:
            return hidden * (heads * (query + value) + self.kv * (query + value))
        into = hidden * (self.kv_rank + (self.rope_dim or 0))
        queries = hidden * heads * query if self.q_rank is None else self.q_rank * (hidden + heads * query)
        keys_values = self.kv_rank * heads * (query - (self.rope_dim or 0) + value)
        return into + queries + keys_values + heads * value * hidden

    @cached_property
    def expert_layers(self) -> int:
        """How many layers have experts; without a number of layers, one stands for all."""
        if not self.experts:
            return 0
        return 1 if self.layers is None else self.layers - (self.dense_layers or 0)

    @cached_property
    def of_experts(self) -> int:
        """The parameters of all routed experts, as far as the sizes tell."""
        return 3 * (self.hidden or 0) * self.expert_inner * (self.experts or 0) * self.expert_layers

    @cached_property
    def embedding(self) -> int:
        """The parameters of the embedding, and of the head where it is another matrix."""
        return (self.hidden or 0) * (self.vocab or 0)

    @property
    def ends(self) -> int:
        """The parameters of embedding and head."""
        return self.embedding * (1 if self.tied else 2)

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """The parameters of a dense layer and of one with experts, without the routed ones, as the sizes have them."""
        hidden = self.hidden or 0
        around = self.attention + 2 * hidden
        dense = around + (3 if self.gated else 2) * hidden * self.inner
        shared = 3 * hidden * self.expert_inner * (self.shared_experts or 0)
        return dense, around + shared + hidden * (self.experts or 0)

    @cached_property
    def total(self) -> int:
        """The parameters in all: as given, or as the sizes have them."""
        if self.params is not None:
            return self.params
        dense, expert = self._sizes
        in_layers = dense * ((self.layers or 0) - self.expert_layers) + expert * self.expert_layers
        return in_layers + self.of_experts + self.ends + (self.hidden or 0)

    @cached_property
    def body(self) -> int:
        """The parameters outside of routed experts, embedding and head."""
        return self.total - self.of_experts - self.ends

    @cached_property
    def layer(self) -> tuple[float, float, float]:
        """The parameters of a dense layer, of one with experts without the routed ones, and of its routed experts.

        If a total was given, the layers share what is left of it in the proportion of their sizes.
        """
        dense, expert = self._sizes if self.hidden else (1, 1)
        layers = self.layers or 1
        scale = self.body / (dense * (layers - self.expert_layers) + expert * self.expert_layers)
        return dense * scale, expert * scale, self.of_experts / (self.expert_layers or 1)


def read_config(path: str) -> tuple[Model, list[str]]:
    """Read a model's sizes from the ``config.json`` that Hugging Face's models have.

    Args:
        path: the file, or the directory that has it.

    Returns:
        The model, and a sentence for each thing in the file that the sizes cannot express.

    Raises:
        UsageError: the file cannot be read, or lacks a size that nothing can be said without.
    """
    data = read_json(path if path.endswith(".json") else f"{path.rstrip('/')}/config.json")
    notes = [
        f"{key} is not read: only the text model is counted" for key in data if key.endswith("vision_config")
    ]
    if isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    kind = str(data.get("model_type", ""))
    sizes, problems = _sizes(data)
    if problems:
        raise UsageError(*(f"{path}: {problem}" for problem in problems))
    if data.get("multi_query") and not data.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
        sizes["kv_heads"] = 1
    if kind in _UNGATED:
        inner = sizes.pop("ffn", None)
        if inner not in {None, 4 * sizes["hidden"]}:
            notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    elif "ffn" not in sizes and "expert_ffn" not in sizes:
        notes.append("no width of the feed-forward network: 4 x hidden, not gated, is taken")
    unread = [key for key, value in data.items() if _may_matter(key, value)]
    if unread:
        notes.append(f"{', '.join(unread)} may change the sizes and cannot be read; give --params if they do")
    return Model(**sizes, tied=bool(data.get("tie_word_embeddings", kind in _TIED))), notes


def _sizes(data: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the sizes, and a sentence for each that is missing or no int."""
    sizes, problems = dict[str, int](), []
    for name, keys in _KEYS.items():
        key = next((key for key in keys if data.get(key) is not None), None)
        if key is not None and type(data[key]) is int:
            sizes[name] = data[key]
        elif key is not None:
            problems.append(f"{key} is {data[key]!r}; it is an int")
        elif name in _NEEDED:
            problems.append(
                f"there is no {' or '.join(keys)}; add it, or give --{name} and the other sizes by flags"
            )
    return sizes, problems


def _may_matter(key: str, value: object) -> bool:
    """Return whether a key may say something about the sizes that a model cannot."""
    if key == "layer_types" and isinstance(value, list):
        return len(set(value)) > 1
    if key in {"moe_layer_freq", "decoder_sparse_step"}:  # then experts are in some layers only
        return value is not None and value != 1
    if key in _HARMLESS or any(key in keys for keys in _KEYS.values()):
        return False
    return type(value) is int and value > 0 and _SHAPE.search(key) is not None
