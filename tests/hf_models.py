"""Every configuration of Hugging Face that states a tensor-parallel plan, as a tiny random model."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What the sizes of a configuration become, by the name of the field.
_NAMES: dict[float, str] = {
    0.0: """attention_dropout hidden_dropout resid_pdrop embd_pdrop residual_dropout embedding_dropout
        router_jitter_noise input_jitter_noise""",
    1: """n_group topk_group first_k_dense_replace num_dense_layers mamba_n_groups attn_layer_offset
        num_blocks indexer_kv_heads""",
    2: """num_hidden_layers num_layers depth num_layers_per_stack num_experts_per_tok moe_k moe_topk
        top_k_experts n_layer pooling_kernel_size index_kpool indexer_compress_ratio heads_per_ngram
        attn_layer_period""",
    4: """sliding_window sliding_window_size keep_window_size index_topk rotary_dim mamba_chunk_size
        chunk_size patch_size pos_emb_height pos_emb_width zero_expert_num indexer_budget""",
    8: """num_attention_heads num_key_value_heads num_heads swa_num_attention_heads swa_num_key_value_heads
        linear_num_key_heads linear_num_value_heads linear_num_heads head_dim swa_head_dim
        linear_head_dim qk_head_dim linear_key_head_dim linear_value_head_dim v_head_dim
        qk_nope_head_dim qk_rope_head_dim index_head_dim indexer_head_dim index_n_heads
        indexer_n_heads num_experts n_routed_experts num_local_experts moe_num_experts n_head
        mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size laurel_rank nemo_conv_channels
        bias_max_distance make_ngram_vocab_size_divisible_by split_ngram_parts""",
    16: """kv_lora_rank hidden_size_per_layer_input mamba_d_head mamba_head_dim position_embedding_size
        image_size crop_size hc_lowrank""",
    32: """q_lora_rank o_lora_rank embedding_rank""",
    48: """moe_intermediate_size expert_ffn_hidden_size share_expert_dim shared_expert_intermediate_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size""",
    64: """hidden_size embedding_dim moe_hidden_size vocab_size vocab_size_per_layer_input unpadded_vocab_size
        codebook_size max_position_embeddings n_embd n_inner n_positions adapter_in_dim
        adapter_out_dim projector_input_dim projector_output_dim vision_output_dim
        projector_hidden_size ext_pw_out_channel depthwise_separable_out_channel""",
    96: """intermediate_size ffn_hidden_size intermediate_size_mlp dense_intermediate_size
        prefix_dense_intermediate_size shared_intermediate_size""",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES |= {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_mamba_kernels": False,
    "image_token_index": 63,
    "target_layer_ids": [0, 1],
    "patch_sizes": (4, 2, 2, 2),
    "hidden_sizes": (8, 8, 8, 8),
    "depths": (1, 1, 1, 1),
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "mamba_d_ssm": 128,
    "num_code_groups": 10,
    "ngram_vocab_size_base": 50,
}
_HALVES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_WHOLE_HEADS = {**_HALVES, "partial_rotary_factor": 1.0}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_DENSE_AND_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
_GLOBAL_HEADS = {"global_head_dim": 16}
_LAYERS_THAT_REUSE_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
_MUSE = {"image_token_id": 63, "out_hidden_size": 256}
_MUSE_VISION = {"layer_types": ["full_attention", "window_attention"]}
# Where a configuration needs other values than its fields' names say: above all, a layer of every kind.
OVERRIDES: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _HALVES}},
    "Cosmos3EdgeTextConfig": {"rope_parameters": _HALVES},
    "DeepseekOcr2TextConfig": _DENSE_AND_SPARSE,
    "DiffusionGemmaTextConfig": _GLOBAL_HEADS,
    "Dots1Config": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "Dots3NoteVisionConfig": _DENSE_AND_SPARSE,
    "Dots3NoteTextConfig": {
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"), 16),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 24),
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 8,
    },
    "EmbeddingGemma2TextConfig": _GLOBAL_HEADS,
    "Ernie4_5_VLMoeTextConfig": {
        "moe_intermediate_size": [48, 48],
        "rope_parameters": {**_HALVES, "mrope_section": [1, 1, 2]},
    },
    "Gemma3nTextConfig": _LAYERS_THAT_REUSE_KEYS,
    "Gemma4TextConfig": {**_GLOBAL_HEADS, **_LAYERS_THAT_REUSE_KEYS},
    "Gemma4UnifiedTextConfig": _GLOBAL_HEADS,
    "Glm4MoeConfig": {"use_qk_norm": True},
    "Glm4vTextConfig": {"rope_parameters": _WHOLE_HEADS},
    "Glm4vMoeTextConfig": {"rope_parameters": _WHOLE_HEADS},
    "GlmImageTextConfig": {"rope_parameters": _WHOLE_HEADS},
    "GlmOcrTextConfig": {"rope_parameters": _WHOLE_HEADS},
    "Glm5NextTextConfig": {
        **_INDEXED,
        **_DENSE_AND_SPARSE,
        "indexer_types": ["full", "full"],
        "qk_rope_head_dim": 0,
    },
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HunYuanVLTextConfig": {"rope_parameters": _HALVES},
    "HYV4VLTextConfig": {"rope_parameters": _HALVES, "indexer_types": ["full", "shared"]},
    "Inkling2LoopTextConfig": {
        "num_hidden_layers": 3,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
    "JambaConfig": {"num_hidden_layers": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"qk_head_dim": None},
    "Llama4VisionConfig": {"intermediate_size": 256},
    "MiMoV2FlashConfig": {
        "num_attention_heads": 16,
        "rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN},
    },
    "MuseGlimmerConfig": _MUSE,
    "MuseGlimmerVisionConfig": _MUSE_VISION,
    "MuseSparkConfig": {**_MUSE, "audio_token_id": 62},
    "MuseSparkAudioConfig": {"out_hidden_size": 64, "num_hidden_layers": 4},
    "MuseSparkVisionConfig": _MUSE_VISION,
    "MuseGlimmerAssistantConfig": {"block_size": 4, "layer_types": ["full_attention"] * 2},
    "NeoMMEConfig": {"head_dim": 16},
    "PaddleOCRTextConfig": {"rope_parameters": _HALVES},
    "Qwen2_5OmniTextConfig": {"rope_parameters": _HALVES},
    "Qwen2_5_VLTextConfig": {"rope_parameters": _HALVES},
    "Qwen2VLTextConfig": {"rope_parameters": _HALVES},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 48},
    "Qwen4ExpTextConfig": _INDEXED,
    "T5GemmaModuleConfig": {"dropout_rate": 0.0},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
}
KV_HEADS = ("num_key_value_heads", "swa_num_key_value_heads")
# What has that field, but as many heads of keys and values as of queries: above all, latent attention.
AS_MANY_AS_QUERIES = (
    *("AXK1Config", "AXK2Config", "BailingHybridConfig", "DeepseekV2Config", "DeepseekV3Config"),
    *("DeepseekV32Config", "Dots3NoteTextConfig", "EsmcConfig", "Glm4MoeLiteConfig", "Glm5NextTextConfig"),
    *("GlmMoeDsaConfig", "KimiLinearConfig", "LongcatFlashConfig", "MiniCPM3Config", "Mistral4Config"),
    *("MistralLarge4TextConfig", "YoutuConfig"),
)
# Where the model to build is not the first that its name suggests.
CLASSES = {"T5GemmaModuleConfig": "T5GemmaEncoder"}
# What does not run with eager attention in one process: transformers leaves out the repetition of keys and values.
NO_EAGER = ("UnlimitedOcrTextConfig",)
# Models that mix single precision into what they compute, which would hide what is right in its rounding.
SINGLE = ("Inkling2TextConfig", "Inkling2LoopTextConfig")


class _Double(TorchFunctionMode):
    """Double precision where the code of a model says single precision."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {key: _doubled(value) for key, value in (kwargs or {}).items()}
        return function(*map(_doubled, args), **named)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _ids(*image: int) -> torch.Tensor:
    ids = torch.randint(3, 63, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[:, : len(image)] = torch.tensor(image, dtype=torch.int64)
    return ids


def _grid() -> torch.Tensor:
    return torch.tensor([[1, 4, 4]])


def _muse() -> dict[str, Any]:
    return {"input_ids": _ids(63, 63), "pixel_values": _noise(16, 96), "image_grid_thw": _grid()}


# What goes into the models that want more than the ids of tokens.
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "DeepseekOcr2VisionEncoderConfig": lambda: {"inputs_embeds": _noise(2, 8, 64), "num_patches": 4},
    "Dots3NoteVisionConfig": lambda: {"pixel_values": _noise(16, 48), "grid_thw": _grid()},
    "Ernie4_5_VLMoeVisionConfig": lambda: {"hidden_states": _noise(16, 48), "grid_thw": _grid()},
    "Gemma4VisionConfig": lambda: {
        "pixel_values": _noise(2, 16, 48),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
    },
    "Llama4Config": lambda: {"input_ids": _ids(63, 63, 63, 63), "pixel_values": _noise(2, 3, 16, 16)},
    "Llama4VisionConfig": lambda: {"pixel_values": _noise(2, 3, 16, 16)},
    "MuseGlimmerConfig": _muse,
    "MuseSparkConfig": _muse,
    "MuseGlimmerVisionConfig": lambda: {"pixel_values": _noise(16, 96), "grid_thw": _grid()},
    "MuseGlimmerAssistantConfig": lambda: {
        "noise_embeds": _noise(2, 4, 64),
        "context_hidden_states": _noise(2, 4, 128),
    },
    "Qwen3OmniMoeTalkerCodePredictorConfig": lambda: {"inputs_embeds": _noise(2, 8, 64)},
    "Qwen3OmniMoeTalkerTextConfig": lambda: {"inputs_embeds": _noise(2, 8, 64)},
    "T5Gemma2DecoderConfig": lambda: {"input_ids": _ids(), "encoder_hidden_states": _noise(2, 8, 64)},
    "VoxtralRealtimeTextConfig": lambda: {"input_ids": _ids(), "t_cond": _noise(1, 1, 64)},
}


@cache
def configurations() -> dict[str, type]:
    """Every configuration class with a tensor-parallel plan, by name."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    # What Llama 4 in 5.24 reads from the answer of its language model, which lacks it.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if "base_model_tp_plan" in path.read_text():
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            own = [kind for kind in vars(module).values() if _states_a_plan(kind, module.__name__)]
            # A class that only gives another one an old name states nothing of its own.
            found.update({kind.__name__: kind for kind in own if kind.__base__ not in own})
    return found


def _states_a_plan(value: object, module: str) -> bool:
    return (
        inspect.isclass(value)
        and value.__module__ == module
        and bool(getattr(value, "base_model_tp_plan", None))
    )


def fields(config_class: type) -> set[str]:
    return {name for kind in config_class.__mro__ for name in vars(kind).get("__annotations__", {})}


def _a_layer_of_every_kind(config_class: Any) -> dict[str, Any]:
    default = config_class()
    names = fields(config_class) & {"layer_types", "mlp_layer_types"}
    stated = {name: getattr(default, name, None) for name in sorted(names)}
    kinds = {name: list(dict.fromkeys(value)) for name, value in stated.items() if value}
    layers = max((2, *map(len, kinds.values())))
    lists = {name: (found * layers)[:layers] for name, found in kinds.items() if len(found) > 1}
    return {"num_hidden_layers": layers, **lists} if lists else {}


def tiny_config(config_class: Any, kv_heads: int | None = None) -> Any:
    known = fields(config_class)
    options = {key: value for key, value in SIZES.items() if key in known}
    options.update(_a_layer_of_every_kind(config_class))
    options.update(
        {name: tiny_config(kind, kv_heads) for name, kind in (config_class.sub_configs or {}).items()}
    )
    options.update(OVERRIDES.get(config_class.__name__, {}))
    if kv_heads is not None:
        options.update({name: kv_heads for name in KV_HEADS if name in known})
    return config_class(**options)


def has_kv_heads(config_class: Any) -> bool:
    """Whether keys and values have a number of heads of their own, and the plan shards them or gathers them."""
    if config_class.__name__ in AS_MANY_AS_QUERIES:
        return False
    plan = getattr(config_class, "base_model_tp_plan", None) or {}
    keys = ("k_proj", "v_proj", "qkv_proj")
    named = any(key.endswith(keys) and style.startswith("colwise") for key, style in plan.items())
    return (named and not fields(config_class).isdisjoint(KV_HEADS)) or any(
        map(has_kv_heads, (config_class.sub_configs or {}).values())
    )


def model_class(config_class: Any) -> Any:
    """The causal language model of a configuration, or its base model."""
    from transformers import AutoModelForCausalLM

    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # another architecture's model
        return AutoModelForCausalLM._model_mapping[config_class]
    wanted = CLASSES.get(config_class.__name__)
    if wanted is not None:
        return getattr(module, wanted)
    candidates = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and getattr(value, "config_class", None) is config_class
        and not value.__name__.endswith("PreTrainedModel")
    ]
    endings = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "TextModel", "Model", "")
    return next(kind for ending in endings for kind in candidates if kind.__name__.endswith(ending))


def tiny_model(name: str, kv_heads: int | None = None, attention: str | None = None) -> Any:
    """A random model whose every parameter matters, in double precision."""
    torch.manual_seed(0)
    config_class = configurations()[name]
    kind, config = model_class(config_class), tiny_config(config_class, kv_heads)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    assert size < 1e6, f"{name} has {size:,} parameters: a name of its sizes is missing in SIZES"
    if attention is not None and name not in NO_EAGER:
        config._attn_implementation = attention
    model = kind._from_config(config, experts_implementation="eager").eval().double()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # some are left as they were allocated
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def inputs(name: str) -> dict[str, Any]:
    make = INPUTS.get(name)
    return {"input_ids": _ids()} if make is None else make()


def forward(model: Any, name: str) -> torch.Tensor:
    """The logits, or the last hidden states; with eager attention, of a batch with padding."""
    options = inputs(name)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if model.config._attn_implementation == "eager" and "input_ids" in options and takes_mask:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
        # No more than one: where a window has only padding, transformers returns NaN.
        options["attention_mask"][1, -1:] = 0
    if hasattr(model.config, "use_cache"):
        options["use_cache"] = False
    with _Double() if name in SINGLE else nullcontext():
        output = model(**options)
    value: torch.Tensor = output[0]
    return value
