"""What is trained, how, on what, and over which ranks: a model, hardware, a job, and the sizes of axes.

The cards of ``cards.json`` have a source for each number; a model is also read from Hugging Face's ``config.json``.
"""

from __future__ import annotations

import json
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from namedmesh.errors import UsageError, did_you_mean

_NEEDED = ("layers", "hidden", "heads", "vocab")
# Types of models whose head is the embedding unless they say otherwise, and whose feed-forward network is not gated.
_TIED = {"bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "opt", "starcoder2"}
_UNGATED = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi"}
_UNGATED |= {"starcoder2"}
# What a configuration says that the sizes of a model cannot, unless it says 1.
_UNREAD = ("vision_config", "decoder_sparse_step", "moe_layer_freq", "layer_types")


def knob(words: str, default: Any = 0, allowed: tuple[Any, ...] = (), keys: str = "") -> Any:
    """Return a field of a dataclass: what the help of its flag says, the values that it may have, its keys in config.json."""
    return field(default=default, metadata={"words": words, "allowed": allowed, "keys": keys.split()})


def knobs(kind: type[Model | Job]) -> list[Field[Any]]:
    """Return the fields that are made by :func:`knob`."""
    return [one for one in fields(kind) if one.metadata]


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer; 0 is unknown, or none."""

    layers: int = knob("how many layers", keys="num_hidden_layers n_layer num_layers")
    hidden: int = knob("width of the residual stream", keys="hidden_size n_embd d_model")
    heads: int = knob("attention heads", keys="num_attention_heads n_head")
    kv_heads: int = knob("heads of keys and values, if fewer", keys="num_key_value_heads num_kv_heads")
    head_dim: int = knob("features of a head, if not hidden / heads", keys="qk_nope_head_dim head_dim")
    ffn: int = knob("inner width, gated; else 4 x hidden, ungated", keys="intermediate_size n_inner ffn_dim")
    vocab: int = knob("entries of the vocabulary", keys="vocab_size")
    tied: bool = knob("whether the head is the embedding, as in GPT-2", default=False)
    experts: int = knob("routed experts of a layer", keys="n_routed_experts num_local_experts num_experts")
    top_k: int = knob("routed experts that a token goes to", 1, keys="num_experts_per_tok top_k_experts")
    expert_ffn: int = knob("inner width of an expert, gated, if not ffn", keys="moe_intermediate_size")
    shared_experts: int = knob("experts that every token goes to", keys="n_shared_experts")
    dense_layers: int = knob("the first layers that have no experts", keys="first_k_dense_replace")
    expert_groups: int = knob("groups of experts that a token goes to at most", keys="topk_group")
    q_rank: int = knob("with latent attention (MLA), the rank of the queries, if any", keys="q_lora_rank")
    kv_rank: int = knob("the rank of keys and values: latent attention", keys="kv_lora_rank")
    rope_dim: int = knob("then features of a head for positions, beside head_dim", keys="qk_rope_head_dim")
    value_dim: int = knob("then features of a value head", keys="v_head_dim")

    @cached_property
    def inner(self) -> int:
        """The inner width of the feed-forward network of a dense layer."""
        return self.ffn or 4 * self.hidden

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
        around, one = attention + 2 * hidden, 3 * hidden * (self.expert_ffn or self.inner)
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
    """Read a model's sizes from the ``config.json`` that Hugging Face's models have, or its directory; say what they cannot express."""
    whole = read_json(path if path.endswith(".json") else Path(path, "config.json"))
    data, notes = {**whole, **(whole.get("text_config") or {})}, []
    for key in _UNREAD:
        value = data.get(key)
        kinds = len(set(value)) if isinstance(value, list) else value
        if kinds is not None and kinds != 1:
            notes.append(f"{key} is not read: only text is counted, in layers that are alike")
    sizes, problems = dict[str, int](), []
    for one in knobs(Model):
        keys = one.metadata["keys"]
        key = next((key for key in keys if data.get(key) is not None), "")
        if key and type(data[key]) is int:
            sizes[one.name] = data[key]
        elif key:
            problems.append(f"{path}: {key} is {data[key]!r}; it is an int")
        elif one.name in _NEEDED:
            problems.append(f"{path}: there is no {' or '.join(keys)}; add it")
    if problems:
        raise UsageError(*problems)
    kind = data.get("model_type", "")
    if data.get("multi_query") and not data.get("new_decoder_architecture"):  # Falcon 7B, StarCoder
        sizes["kv_heads"] = 1
    inner = sizes.pop("ffn", 0) if kind in _UNGATED else 0
    if inner not in {0, 4 * sizes["hidden"]}:
        notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    return Model(**sizes, tied=bool(data.get("tie_word_embeddings", kind in _TIED))), notes


@dataclass(frozen=True, eq=False)  # by identity: it holds dicts
class Hardware:
    """One GPU, its node and its links. Bandwidths are bytes a second in one direction, fractions those that kernels reach.

    ``matmul`` is 0.85 of what the best shape reaches, as ordinary shapes reach 80 to 90 % of it (github.com/stas00/ml-engineering,
    compute/accelerator); ``memory_fraction`` and ``nic_fraction`` are those of Calculon (Isaev et al., SC 2023, systems/*.json).
    """

    name: str
    peak: dict[str, float]  # operations a second by precision, dense
    matmul: dict[str, float]  # the fraction of it that large matrix products reach
    attention: float  # the fraction of the bf16 peak that causal attention reaches, forward and backward
    memory: float  # bytes of a GPU, by its data sheet
    memory_bandwidth: float
    memory_fraction: float  # that elementwise kernels reach
    gpus_per_node: int  # which share its NICs
    domain: int  # consecutive ranks that fast links (NVLink, Infinity Fabric) join
    domain_bandwidth: float  # what one GPU sends by them
    domain_fraction: float  # that collectives reach
    nics_per_node: float
    nic_bandwidth: float  # of one of them
    nic_fraction: float
    sources: dict[str, str] = field(default_factory=dict)  # by the names of fields

    @property
    def memory_rate(self) -> float:
        """The bytes that elementwise kernels read or write in a second."""
        return self.memory_bandwidth * self.memory_fraction

    @property
    def domain_rate(self) -> float:
        """The bytes that collectives move over fast links in a second."""
        return self.domain_bandwidth * self.domain_fraction

    @property
    def nic_rate(self) -> float:
        """The bytes that a GPU's share of its node's NICs moves in a second."""
        return self.nic_bandwidth * self.nic_fraction * self.nics_per_node / self.gpus_per_node

    def fit_domain(self, world_size: int) -> Hardware:
        """Return the hardware as a job fills it: as many whole nodes of each domain as divide the world."""
        used = range(self.domain, 0, -self.gpus_per_node) if world_size > self.domain else (world_size,)
        domain = next((ranks for ranks in used if world_size % ranks == 0), self.domain)
        return self if domain == self.domain else replace(self, domain=domain)

    def members(self, size: int, stride: int) -> int:
        """Return how many ranks of a group, ``stride`` apart, lie in one domain; the fewest, where groups lie differently."""
        return gcd(size, max(1, self.domain // stride))

    def bandwidth(self, size: int, stride: int) -> float:
        """Return the bytes a second that a collective moves over each link of a group (nccl-tests' bus bandwidth).

        A group that leaves its domain goes in and out through the NICs of all its members there: eight members have
        eight NICs, one member has its own.
        """
        members = self.members(size, stride)
        return self.domain_rate if members == size else min(self.domain_rate, members * self.nic_rate)


CARDS = {name: Hardware(**card) for name, card in read_json(Path(__file__).with_name("cards.json")).items()}


def load_hardware(name: str) -> Hardware:
    """Return a card by its name, or read one from a JSON file with the fields of :class:`Hardware`."""
    if name.endswith(".json"):
        try:
            return Hardware(**read_json(name))
        except TypeError as error:  # which names the field that is missing or unknown
            raise UsageError(f"{name}: {error}") from None
    if name not in CARDS:
        near = did_you_mean(name, CARDS)
        raise UsageError(f"hardware {name!r} is not one of {', '.join(CARDS)}, nor a file.json{near}")
    return CARDS[name]


class Axes(NamedTuple):
    """The size of each axis, in Megatron's order of ranks: tp-cp-dp-pp, and etp-ep-edp-pp for experts."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1  # a part of dp
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO divides what is not of experts."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def edp(self) -> int:
        """How many ranks have the same experts."""
        return max(1, self.tp * self.dp * self.cp // (self.ep * self.etp))

    @property
    def expert_shards(self) -> int:
        """Over how many ranks ZeRO divides experts."""
        return max(1, self.edp // self.dp_replicate)


@dataclass(frozen=True)
class Job:
    """A model, on what and how it is trained; ``list_partitions`` searches what is None, an estimate takes 1, stage 0, and "none"."""

    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=lambda: load_hardware("h100"))
    seq: int = knob("tokens of a sequence")
    global_batch: int = knob("sequences of a step, over all ranks")
    micro_batch: int | None = knob("sequences that a data-parallel rank works on at a time", None)
    stage: int | None = knob("of ZeRO: 1 shards states, 2 gradients, 3 (FSDP) weights", None, (0, 1, 2, 3))
    precision: str = knob("of the matrix products; activations are in bf16", "bf16", ("bf16", "fp8"))
    trainer: str = knob(
        "whose layers and gradients; bridge: Megatron's, in NVIDIA's recipes",
        "torch",
        ("torch", "megatron", "bridge"),
    )
    checkpointing: str | None = knob("what is computed again backward", None, ("none", "selective", "full"))
    sequence_parallel: bool = knob("whether tp shares the norms and the residual stream too", default=True)
    fused_loss: bool = knob("whether the loss is one compiled kernel, not eager operations", default=False)
    stages_per_rank: int = knob("of a pipeline; 2 or more is the interleaved schedule", 1)

    @cached_property
    def missing(self) -> list[str]:
        """The names of the sizes that the estimates follow from, and that are not known."""
        sizes = vars(self.model) | vars(self)
        return [name for name in ("layers", "hidden", "heads", "seq", "global_batch") if not sizes[name]]

    @property
    def is_torch(self) -> bool:
        """Whether torch's layers are counted, with FSDP2."""
        return self.trainer == "torch"

    def problems(self) -> list[str]:
        """Return a sentence for each thing that does not go with another."""
        problems, model = [], self.model
        for owner in (model, self):
            for one in knobs(type(owner)):
                value, allowed = getattr(owner, one.name), one.metadata["allowed"]
                least = 0 if one.default == 0 else 1
                if allowed and value not in {*allowed, one.default}:
                    problems.append(f"{one.name} is {value!r}; it is one of {allowed}")
                elif not allowed and type(value) is int and value < least:
                    problems.append(f"{one.name} is {value}; it is an int of at least {least}")
        if model.experts and model.top_k > model.experts:
            problems.append(f"a token goes to {model.top_k} of {model.experts} experts; give fewer as top_k")
        if model.layers and model.dense_layers > model.layers:
            problems.append(
                f"{model.dense_layers} of {model.layers} layers are dense; give fewer dense_layers"
            )
        if model.kv_rank and not (model.head_dim and model.rope_dim and model.value_dim):
            problems.append("kv_rank is given: latent attention; give head_dim, rope_dim and value_dim too")
        if model.heads and not model.head_dim and model.hidden % model.heads:
            problems.append(
                f"{model.heads} heads do not divide {model.hidden} hidden features; give head_dim"
            )
        if self.precision == "fp8" and "fp8" not in self.hardware.peak:
            problems.append(f"{self.hardware.name} has no fp8; it has {', '.join(self.hardware.peak)}")
        return problems

    def micro_batches(self, dp: int) -> int:
        """Return how many micro-batches a data-parallel rank has in a step; 0 where they do not divide it."""
        each = dp * (self.micro_batch or 1)
        return 0 if self.global_batch % each else self.global_batch // each
