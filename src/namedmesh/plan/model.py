"""The sizes of a transformer, how many parameters its parts have, and how to read them from Hugging Face's ``config.json``."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from namedmesh.plan.hardware import read_json
from namedmesh.plan.spec import UsageError, size_problems

_NEEDED = ("layers", "hidden", "heads", "vocab")
# Words in the names of keys that may change the number of parameters.
_SHAPE = re.compile(r"layer|expert|head|dim|rank|size|freq|step|period|interval")
_IF_NOT_1 = {"moe_layer_freq", "decoder_sparse_step"}  # then experts are in some layers only


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
        expert_params: parameters of all routed experts; by default three matrices for each.
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
    expert_params: int | None = None
    expert_groups: int | None = None
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None

    def problems(self) -> list[str]:
        """Return a sentence for each size that does not go with another."""
        sizes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "tied"}
        may_be_zero = [name for name in ("shared_experts", "dense_layers") if sizes[name] == 0]
        problems = size_problems({name: size for name, size in sizes.items() if name not in may_be_zero})
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
        if self.params is not None and self.of_experts > self.params:
            problems.append(
                f"the experts have {self.of_experts} parameters of {self.params} in all; give expert_params, or other sizes"
            )
        elif self.params is not None and self.body < 0:
            problems.append(
                f"embedding and head have {self.ends} parameters of {self.params} in all; give another number of "
                "parameters, or tied"
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
    def features(self) -> tuple[int, int, int]:
        """The features of a head of queries and keys, of a kv head's values, and of a head's output."""
        own = self.head_dim or (self.hidden or 0) // (self.heads or 1)
        value = own if self.value_dim is None else self.value_dim
        return own + (self.rope_dim or 0), value, value

    @cached_property
    def attention(self) -> int:
        """The parameters of one attention layer."""
        hidden, heads = self.hidden or 0, self.heads or 1
        query, value, output = self.features
        if self.kv_rank is None:
            return hidden * (heads * query + self.kv * (query + value) + heads * output)
        into_latent = self.kv_rank + (self.rope_dim or 0) + (self.q_rank or 0)
        queries = hidden * heads * query if self.q_rank is None else 0
        return hidden * into_latent + queries + self.from_latent + heads * output * hidden

    @cached_property
    def from_latent(self) -> int:
        """The parameters of one layer that make queries, keys and values of latent vectors."""
        heads = self.heads or 1
        query, value, _ = self.features
        keys_values = (self.kv_rank or 0) * heads * (query - (self.rope_dim or 0) + value)
        return keys_values + (self.q_rank or 0) * heads * query

    @cached_property
    def expert_layers(self) -> int:
        """How many layers have experts."""
        return (self.layers or 0) - (self.dense_layers or 0) if self.experts else 0

    @cached_property
    def of_experts(self) -> int:
        """The parameters of all routed experts, as far as the sizes tell."""
        if self.expert_params is not None or not self.experts:
            return self.expert_params or 0
        return 3 * (self.hidden or 0) * self.expert_inner * self.experts * self.expert_layers

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
        layers = self.layers or 1
        with_experts = self.expert_layers or (layers if self.experts else 0)
        dense, expert = self._sizes if self.hidden else (1, 1)
        scale = self.body / (dense * (layers - with_experts) + expert * with_experts)
        return dense * scale, expert * scale, self.of_experts / (with_experts or 1)


# huggingface.json has by field of a model its keys, of which the first that is there counts; the types of models whose head
# is the embedding unless they say otherwise, and whose feed-forward network is not gated; and keys that name sizes, but
# change no number of parameters.
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
    known = read_json(str(Path(__file__).with_name("huggingface.json")))
    sizes, problems = _sizes(data, known["fields"])
    if problems:
        raise UsageError(*(f"{path}: {problem}" for problem in problems))
    kind = str(data.get("model_type", ""))
    inner = sizes.pop("ffn", None) if kind in known["ungated"] else None
    if inner not in {None, 4 * sizes["hidden"]}:
        notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    if kind not in known["ungated"] and "ffn" not in sizes and "expert_ffn" not in sizes:
        notes.append("no width of the feed-forward network: 4 x hidden, not gated, is taken")
    read = {*known["harmless"], *chain.from_iterable(known["fields"].values())}
    unread = [key for key, value in data.items() if _matters(key, value, read)]
    if unread:
        notes.append(f"{', '.join(unread)} may change the sizes and cannot be read; give --params if they do")
    tied = bool(data.get("tie_word_embeddings", kind in known["tied"]))
    return Model(**sizes, tied=tied), notes


def _sizes(data: dict[str, Any], fields: dict[str, list[str]]) -> tuple[dict[str, int], list[str]]:
    """Return the sizes, and a sentence for each that is missing or no int."""
    sizes: dict[str, int] = {}
    problems = []
    for name, keys in fields.items():
        key = next((key for key in keys if data.get(key) is not None), None)
        if key is None:
            continue
        if isinstance(data[key], bool) or not isinstance(data[key], int):
            problems.append(f"{key} is {data[key]!r}; it is an int")
        sizes[name] = data[key]
    for name in _NEEDED:
        if name not in sizes:
            flag = name.replace("_", "-")
            problems.append(
                f"there is no {' or '.join(fields[name])}; add it, or give --{flag} and the other sizes by flags"
            )
    return sizes, problems


def _matters(key: str, value: object, read: set[str]) -> bool:
    """Return whether a key may say something about the sizes that a model cannot."""
    if key == "layer_types" and isinstance(value, list):
        return len(set(value)) > 1
    if key in _IF_NOT_1:
        return value is not None and value != 1  # it may be a list
    return type(value) is int and value > 0 and key not in read and _SHAPE.search(key) is not None
