"""Read the sizes of a model from its Hugging Face ``config.json``, without transformers."""

from __future__ import annotations

from typing import Any

from namedmesh.plan.hardware import read_json
from namedmesh.plan.model import Model
from namedmesh.plan.spec import UsageError

# The field of a model, and the keys that it has in configurations; the first that is there counts.
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
_UNGATED = (
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
    "bloom",
    "falcon",
    "opt",
    "mpt",
    "phi",
    "starcoder2",
    "codegen",
)
"""The types of models whose feed-forward network is not gated."""
_TIED = (
    "gpt2",
    "gpt_bigcode",
    "gemma",
    "gemma2",
    "gemma3_text",
    "bloom",
    "falcon",
    "opt",
    "mpt",
    "starcoder2",
)
"""The types whose head is the embedding unless their configuration says otherwise."""
_UNKNOWN_SHAPES = {
    "moe_layer_freq": "experts in some layers only",
    "decoder_sparse_step": "experts in some layers only",
    "shared_expert_intermediate_size": "a shared expert of another width",
    "layer_types": "layers of several types",
    "vision_config": "a vision tower",
}
"""Keys that change the number of parameters in a way that a :class:`Model` cannot say, and what they mean."""
_HARMLESS = {"moe_layer_freq": 1, "decoder_sparse_step": 1}


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
    if isinstance(data.get("text_config"), dict):  # a model of text and pictures
        data = data["text_config"]
    sizes, problems = _sizes(data)
    if problems:
        raise UsageError(*(f"{path}: {problem}" for problem in problems))
    kind, notes = str(data.get("model_type", "")), []
    inner = sizes.pop("ffn", None) if kind in _UNGATED else None
    if inner not in {None, 4 * sizes["hidden"]}:
        notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    if kind not in _UNGATED and "ffn" not in sizes and "expert_ffn" not in sizes:
        notes.append("no width of the feed-forward network: 4 x hidden, not gated, is taken")
    for key, words in _UNKNOWN_SHAPES.items():
        if _matters(key, data.get(key)):
            notes.append(f"{key} ({words}) is not read; give --params if it matters")
    tied = bool(data.get("tie_word_embeddings", kind in _TIED))
    return Model(**sizes, tied=tied), notes


def _sizes(data: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the sizes, and a sentence for each that is missing or no int."""
    sizes: dict[str, int] = {}
    problems = []
    for name, keys in _KEYS.items():
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
                f"there is no {' or '.join(_KEYS[name])}; add it, or give --{flag} and the other sizes by flags"
            )
    return sizes, problems


def _matters(key: str, value: object) -> bool:
    """Return whether a key says something that a model cannot."""
    if key == "layer_types" and isinstance(value, list):
        return len(set(value)) > 1
    return value is not None and value != _HARMLESS.get(key)
