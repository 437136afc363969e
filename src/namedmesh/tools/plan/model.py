"""The input of the estimates: a model, a job that trains it, and the sizes of the axes.

A model is given by its sizes, or read from the ``config.json`` of a Hugging Face model.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from namedmesh._errors import UsageError
from namedmesh.tools.plan.hardware import Hardware, load_hardware, read_json

_REQUIRED_SIZES = ("layers", "hidden", "heads", "vocab")
# Model types of Hugging Face whose head is the embedding by default: their config.json need not say
# so.
_TIED_TYPES = {
    "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "opt", "starcoder2",
}  # fmt: skip
# Model types whose feed-forward network is not gated; their config.json does not say so.
_UNGATED_TYPES = {
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2",
}  # fmt: skip
# Keys of config.json that make layers differ in ways that the sizes of a model cannot express,
# unless they are 1.
_UNSUPPORTED_KEYS = ("vision_config", "decoder_sparse_step", "moe_layer_freq", "layer_types")


def option(
    text: str, default: Any = 0, choices: tuple[Any, ...] = (), keys: str = "", most: int = 10**9
) -> Any:
    """Declare a dataclass field that is a flag of ``namedmesh partitions``, too.

    Args:
        text: the help of the flag.
        default: the default value.
        choices: the allowed values; by default all.
        keys: the keys in ``config.json`` that have the value, the first one that exists is taken.
        most: the largest int that the estimates take.
    """
    metadata = {"text": text, "choices": choices, "keys": keys.split(), "most": most}
    return field(default=default, metadata=metadata)


def list_options(kind: type[Model | Job]) -> list[Field[Any]]:
    """Return the dataclass fields that were declared with :func:`option`."""
    return [entry for entry in fields(kind) if entry.metadata]


@dataclass(frozen=True)
class Model:
    """The sizes of a transformer. A size of 0 is unknown, or the model does not have it.

    The text of each field describes it; it is also the help of the command-line flag.
    """

    # The estimates list the layers of each stage.
    layers: int = option("how many layers", keys="num_hidden_layers n_layer num_layers", most=10_000)
    hidden: int = option("width of the residual stream", keys="hidden_size n_embd d_model")
    heads: int = option("attention heads", keys="num_attention_heads n_head")
    kv_heads: int = option("heads of keys and values, if fewer", keys="num_key_value_heads num_kv_heads")
    head_dim: int = option("features of a head, if not hidden / heads", keys="qk_nope_head_dim head_dim")
    ffn: int = option(
        "inner width, gated; else 4 x hidden, ungated", keys="intermediate_size n_inner ffn_dim"
    )
    vocab: int = option("entries of the vocabulary", keys="vocab_size")
    tied: bool = option("whether the head is the embedding, as in GPT-2", default=False)
    experts: int = option("routed experts of a layer", keys="n_routed_experts num_local_experts num_experts")
    top_k: int = option("routed experts that a token goes to", 1, keys="num_experts_per_tok top_k_experts")
    expert_ffn: int = option("inner width of an expert, gated, if not ffn", keys="moe_intermediate_size")
    shared_experts: int = option("experts that every token goes to", keys="n_shared_experts")
    dense_layers: int = option("the first layers that have no experts", keys="first_k_dense_replace")
    expert_groups: int = option("groups of experts that a token goes to at most", keys="topk_group")
    q_rank: int = option("with latent attention (MLA), the rank of the queries, if any", keys="q_lora_rank")
    kv_rank: int = option("the rank of keys and values: latent attention", keys="kv_lora_rank")
    rope_dim: int = option(
        "then features of a head for positions, in addition to head_dim", keys="qk_rope_head_dim"
    )
    value_dim: int = option("then features of a value head", keys="v_head_dim")

    @cached_property
    def inner(self) -> int:
        """The inner width of the feed-forward network of a dense layer."""
        return self.ffn or 4 * self.hidden

    @cached_property
    def kv(self) -> int:
        """The number of key and value heads."""
        return self.kv_heads or self.heads

    @cached_property
    def features(self) -> tuple[int, int]:
        """The number of features of a query or key head, and of a value head."""
        head_dim = self.head_dim or self.hidden // self.heads
        return head_dim + self.rope_dim, self.value_dim or head_dim

    @cached_property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def embedding(self) -> int:
        """The number of parameters of the embedding, and of the head if it is not tied."""
        return self.hidden * self.vocab

    @cached_property
    def layer(self) -> tuple[int, int, int]:
        """The numbers of parameters of layers, as (dense layer, expert layer, routed experts).

        The expert layer is counted without its routed experts, which are the third number.
        """
        hidden = self.hidden
        heads = self.heads
        query, value = self.features
        # Biases are not counted: they are too few to matter.
        if self.kv_rank:
            # Latent attention: queries, keys and values are products of two factors, through the
            # latent vectors.
            queries = hidden * heads * query
            if self.q_rank:
                queries = self.q_rank * (hidden + heads * query)
            keys_and_values = self.kv_rank * (hidden + heads * (query - self.rope_dim + value))
            attention = queries + keys_and_values + hidden * self.rope_dim + heads * value * hidden
        else:
            attention = hidden * (heads + self.kv) * (query + value)
        attention_and_norms = attention + 2 * hidden
        matrices = 3 if self.ffn else 2  # a gated network has a third matrix, for the gate
        dense = attention_and_norms + matrices * hidden * self.inner
        expert = 3 * hidden * (self.expert_ffn or self.inner)
        # The router and the shared experts are not sharded over ep, so they count with the rest of
        # the layer.
        router = hidden * self.experts
        return dense, attention_and_norms + expert * self.shared_experts + router, expert * self.experts

    @cached_property
    def total(self) -> int:
        """The number of parameters of the model."""
        dense, expert, routed = self.layer
        ends = self.embedding if self.tied else 2 * self.embedding
        layers = dense * (self.layers - self.expert_layers) + (expert + routed) * self.expert_layers
        return layers + ends + self.hidden  # the norm before the head


def read_config(path: str) -> tuple[Model, list[str]]:
    """Read the sizes of a model from the ``config.json`` of a Hugging Face model.

    Args:
        path: the file, or the directory that holds it.

    Returns:
        The model, and notes about settings that the sizes cannot express.

    Raises:
        UsageError: if the file cannot be read, or a size is missing or not an int.
    """
    config = read_json(path if path.endswith(".json") else Path(path, "config.json"))
    # A model of text and images has the sizes of its language model in a configuration of its own.
    config = {**config, **(config.get("text_config") or {})}
    sizes = _read_sizes(config, path)
    notes = []
    for key in _UNSUPPORTED_KEYS:
        value = config.get(key)
        # With a list of equal entries, too, all layers are equal.
        is_uniform = len(set(value)) == 1 if isinstance(value, list) else value in (None, 1)
        if not is_uniform:
            notes.append(f"{key} is not read: only text is counted, in layers that are alike")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        # Falcon 7B and StarCoder have one kv head. Falcon's newer models keep the flag, and have
        # num_kv_heads.
        sizes["kv_heads"] = 1
    model_type = config.get("model_type", "")
    if model_type in _UNGATED_TYPES:
        inner = sizes.pop("ffn", 0)
        if inner not in {0, 4 * sizes["hidden"]}:
            notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    tied = bool(config.get("tie_word_embeddings", model_type in _TIED_TYPES))
    return Model(**sizes, tied=tied), notes


def _read_sizes(config: dict[str, Any], path: str) -> dict[str, int]:
    """Return the sizes in a ``config.json`` by field of :class:`Model`, or raise a UsageError."""
    sizes: dict[str, int] = {}
    problems = []
    for entry in list_options(Model):
        keys = entry.metadata["keys"]
        found = [key for key in keys if config.get(key) is not None]
        if not found:
            if entry.name in _REQUIRED_SIZES:
                problems.append(f"{path}: there is no {' or '.join(keys)}; add it")
            continue
        sizes[entry.name] = config[found[0]]
        if type(sizes[entry.name]) is not int:  # a bool is an int, too, but no size
            problems.append(f"{path}: {found[0]} is {sizes[entry.name]!r}; it is an int")
    if problems:
        raise UsageError(*problems)
    return sizes


class Axes(NamedTuple):
    """The size of each axis.

    Ranks are in Megatron's order: tp-cp-dp-pp, and etp-ep-edp-pp for experts.

    Attributes:
        tp: tensor parallelism.
        cp: context parallelism.
        pp: pipeline parallelism.
        dp: data parallelism, including ``dp_replicate``.
        dp_replicate: the number of replicas of the sharded model (HSDP).
        ep: expert parallelism.
        etp: tensor parallelism of the experts.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    dp_replicate: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """The number of ranks over which ZeRO shards everything except the routed experts."""
        return self.dp * self.cp // self.dp_replicate

    @property
    def edp(self) -> int:
        """The number of replicas of each expert."""
        return max(1, self.tp * self.dp * self.cp // (self.ep * self.etp))

    @property
    def expert_shards(self) -> int:
        """The number of ranks over which ZeRO shards the routed experts."""
        return max(1, self.edp // self.dp_replicate)


@dataclass(frozen=True)
class Job:
    """A model, the hardware, and how the model is trained.

    The text of each field describes it; it is also the help of the command-line flag.

    ``list_partitions`` searches the policies that are None. An estimate takes a micro-batch of 1,
    stage 0 and no checkpointing for them.
    """

    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=lambda: load_hardware("h100"))
    seq: int = option("tokens of a sequence")
    global_batch: int = option("sequences of a step, over all ranks")
    micro_batch: int | None = option("sequences that a data-parallel rank works on at a time", None)
    stage: int | None = option("of ZeRO: 1 shards states, 2 gradients, 3 (FSDP) weights", None, (0, 1, 2, 3))
    precision: str = option("of the matrix products; activations are in bf16", "bf16", ("bf16", "fp8"))
    trainer: str = option(
        "whose layers and gradients; bridge: Megatron's, in NVIDIA's recipes",
        "torch",
        ("torch", "megatron", "bridge"),
    )
    checkpointing: str | None = option(
        "activations that the backward pass recomputes", None, ("none", "selective", "full")
    )
    sequence_parallel: bool = option("whether tp shards the norms and the residual stream too", default=True)
    fused_loss: bool = option("whether the loss is one compiled kernel, not eager operations", default=False)
    stages_per_rank: int = option("of a pipeline; 2 or more is the interleaved schedule", 1)

    @cached_property
    def missing(self) -> list[str]:
        """The names of the sizes that the estimates need and that are not known."""
        # Without a vocabulary, the embedding and the loss are not counted; the rest is right.
        sizes = vars(self.model) | vars(self)
        return [name for name in ("layers", "hidden", "heads", "seq", "global_batch") if not sizes[name]]

    @property
    def is_torch(self) -> bool:
        """Whether the job uses torch's layers, with FSDP2."""
        return self.trainer == "torch"

    def problems(self) -> list[str]:
        """Return a message for each invalid field of the job or its model; empty if it is valid."""
        problems = _find_wrong_values(self.model) + _find_wrong_values(self)
        model = self.model
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
        """Return the number of micro-batches of a rank in a step; 0 if it is not an integer.

        Args:
            dp: the number of data-parallel ranks.
        """
        sequences = dp * (self.micro_batch or 1)
        return 0 if self.global_batch % sequences else self.global_batch // sequences


def _find_wrong_values(owner: Model | Job) -> list[str]:
    """Return a message for each option whose value is out of its choices or its range."""
    problems = []
    for entry in list_options(type(owner)):
        value = getattr(owner, entry.name)
        choices = entry.metadata["choices"]
        # 0 is allowed only as a default that means unknown, or none.
        least = 0 if entry.default == 0 else 1
        if choices:
            if value not in {*choices, entry.default}:
                problems.append(f"{entry.name} is {value!r}; it is one of {choices}")
        elif type(value) is int and not least <= value <= entry.metadata["most"]:
            most = entry.metadata["most"]
            problems.append(f"{entry.name} is {value}; it is an int of at least {least}, at most {most}")
    return problems
