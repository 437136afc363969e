"""Read the sizes of a model from its Hugging Face ``config.json``, without transformers."""

from __future__ import annotations

import re
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
# Types of models whose feed-forward network is not gated, and those whose head is the embedding unless they say otherwise.
_TIED_UNGATED = ("gpt2", "gpt_bigcode", "bloom", "falcon", "opt", "mpt", "starcoder2")
_UNGATED = {*_TIED_UNGATED, "gpt_neox", "gpt_neo", "gptj", "phi", "codegen", "nemotron"}
_TIED = {*_TIED_UNGATED, "gemma", "gemma2", "gemma3_text"}
# Words in the names of keys that may change the number of parameters, and names with them that do not.
_SHAPE = re.compile(r"layer|expert|head|dim|rank|size|freq|step|period|interval")
_HARMLESS = {
    *(key for keys in _KEYS.values() for key in keys),
    *("moe_layer_freq", "decoder_sparse_step"),  # unless experts are in some layers only: not 1
    *("max_window_layers", "attention_chunk_size", "chunk_size_feed_forward", "qk_head_dim", "n_head_kv"),
    *("head_dim", "type_vocab_size", "ep_size", "router_aux_loss_coef", "num_return_sequences"),
}


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
    sizes, problems = _sizes(data)
    if problems:
        raise UsageError(*(f"{path}: {problem}" for problem in problems))
    kind = str(data.get("model_type", ""))
    inner = sizes.pop("ffn", None) if kind in _UNGATED else None
    if inner not in {None, 4 * sizes["hidden"]}:
        notes.append(f"an ungated network of width {inner} is taken to be 4 x hidden")
    if kind not in _UNGATED and "ffn" not in sizes and "expert_ffn" not in sizes:
        notes.append("no width of the feed-forward network: 4 x hidden, not gated, is taken")
    unread = [key for key, value in data.items() if _matters(key, value)]
    if unread:
        notes.append(f"{', '.join(unread)} may change the sizes and cannot be read; give --params if they do")
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
    """Return whether a key may say something about the sizes that a model cannot."""
    if key == "layer_types" and isinstance(value, list):
        return len(set(value)) > 1
    if key in _HARMLESS:
        return key in {"moe_layer_freq", "decoder_sparse_step"} and value not in {None, 1}
    return type(value) is int and value > 0 and _SHAPE.search(key) is not None
