"""Tiny random models of every configuration of Hugging Face that has a tensor-parallel plan."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# The tiny size for each field of the find_configurations.
_FIELDS_BY_SIZE: dict[float, str] = {
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
SIZES: dict[str, Any] = {name: size for size, names in _FIELDS_BY_SIZE.items() for name in names.split()}
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
# Values that one configuration needs in addition, most often so that it has a layer of every kind.
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
# Configurations with that field, but with as many kv heads as query heads, such as latent
# attention.
AS_MANY_AS_QUERIES = (
    *("AXK1Config", "AXK2Config", "BailingHybridConfig", "DeepseekV2Config", "DeepseekV3Config"),
    *("DeepseekV32Config", "Dots3NoteTextConfig", "EsmcConfig", "Glm4MoeLiteConfig", "Glm5NextTextConfig"),
    *("GlmMoeDsaConfig", "KimiLinearConfig", "LongcatFlashConfig", "MiniCPM3Config", "Mistral4Config"),
    *("MistralLarge4TextConfig", "YoutuConfig"),
)
# The class of the model, for find_configurations whose name suggests another one.
CLASSES = {"T5GemmaModuleConfig": "T5GemmaEncoder"}
# Models whose eager attention fails in one process: transformers does not repeat keys and values.
NO_EAGER = ("UnlimitedOcrTextConfig",)


class Double(TorchFunctionMode):
    """Uses float64 in place of the float32 that a model's code requests.

    Most models compute their norms, softmax, routers or scans in float32, whatever dtype they have. Its
    rounding, which depends on the CPU and on the order of a sum, would hide wrong results.
    """

    def __torch_function__(
        self, function: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        named = {key: _to_double(value) for key, value in (kwargs or {}).items()}
        return function(*map(_to_double, args), **named)


def _to_double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _make_ids(*image: int) -> torch.Tensor:
    ids = torch.randint(3, 63, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[:, : len(image)] = torch.tensor(image, dtype=torch.int64)
    return ids


def _make_grid() -> torch.Tensor:
    return torch.tensor([[1, 4, 4]])


def _make_muse_inputs() -> dict[str, Any]:
    return {
        "input_ids": _make_ids(63, 63),
        "pixel_values": _random_tensor(16, 96),
        "image_grid_thw": _make_grid(),
    }


# The inputs of models that need other inputs than token ids.
INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "DeepseekOcr2VisionEncoderConfig": lambda: {"inputs_embeds": _random_tensor(2, 8, 64), "num_patches": 4},
    "Dots3NoteVisionConfig": lambda: {"pixel_values": _random_tensor(16, 48), "grid_thw": _make_grid()},
    "Ernie4_5_VLMoeVisionConfig": lambda: {"hidden_states": _random_tensor(16, 48), "grid_thw": _make_grid()},
    "Gemma4VisionConfig": lambda: {
        "pixel_values": _random_tensor(2, 16, 48),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(2, -1, -1),
    },
    "Llama4Config": lambda: {
        "input_ids": _make_ids(63, 63, 63, 63),
        "pixel_values": _random_tensor(2, 3, 16, 16),
    },
    "Llama4VisionConfig": lambda: {"pixel_values": _random_tensor(2, 3, 16, 16)},
    "MuseGlimmerConfig": _make_muse_inputs,
    "MuseSparkConfig": _make_muse_inputs,
    "MuseGlimmerVisionConfig": lambda: {"pixel_values": _random_tensor(16, 96), "grid_thw": _make_grid()},
    "MuseGlimmerAssistantConfig": lambda: {
        "noise_embeds": _random_tensor(2, 4, 64),
        "context_hidden_states": _random_tensor(2, 4, 128),
    },
    "Qwen3OmniMoeTalkerCodePredictorConfig": lambda: {"inputs_embeds": _random_tensor(2, 8, 64)},
    "Qwen3OmniMoeTalkerTextConfig": lambda: {"inputs_embeds": _random_tensor(2, 8, 64)},
    "T5Gemma2DecoderConfig": lambda: {
        "input_ids": _make_ids(),
        "encoder_hidden_states": _random_tensor(2, 8, 64),
    },
    "VoxtralRealtimeTextConfig": lambda: {"input_ids": _make_ids(), "t_cond": _random_tensor(1, 1, 64)},
}


@cache
def find_configurations() -> dict[str, type]:
    """Return every configuration class with a tensor-parallel plan, by name."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    # Llama 4 in transformers 5.24 reads this attribute, which the output of its language model
    # lacks.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    classes = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if "base_model_tp_plan" in path.read_text():
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            with_plan = [kind for kind in vars(module).values() if _has_plan(kind, module.__name__)]
            for kind in with_plan:
                # A subclass in the same module is only an old name.
                if kind.__base__ not in with_plan:
                    classes[kind.__name__] = kind
    return classes


def _has_plan(value: object, module: str) -> bool:
    return (
        inspect.isclass(value)
        and value.__module__ == module
        and bool(getattr(value, "base_model_tp_plan", None))
    )


def list_fields(config_class: type) -> set[str]:
    """Return the names of all fields of a configuration."""
    names: set[str] = set()
    for base in config_class.__mro__:
        names.update(vars(base).get("__annotations__", {}))
    return names


def _use_every_layer_type(config_class: Any) -> dict[str, Any]:
    """Return options with which a small model has a layer of every type."""
    default = config_class()
    types_by_field = {}
    for name in sorted(list_fields(config_class) & {"layer_types", "mlp_layer_types"}):
        types = list(dict.fromkeys(getattr(default, name, None) or ()))
        if types:
            types_by_field[name] = types
    layers = max((2, *map(len, types_by_field.values())))
    options: dict[str, Any] = {}
    for name, types in types_by_field.items():
        if len(types) > 1:
            options[name] = (types * layers)[:layers]
    return {"num_hidden_layers": layers, **options} if options else {}


def make_tiny_config(config_class: Any, kv_heads: int | None = None) -> Any:
    """Make a configuration with tiny sizes.

    Args:
        config_class: its class.
        kv_heads: the number of kv heads; None for as many as query heads.
    """
    field_names = list_fields(config_class)
    options = {key: value for key, value in SIZES.items() if key in field_names}
    options.update(_use_every_layer_type(config_class))
    for name, sub_class in (config_class.sub_configs or {}).items():
        options[name] = make_tiny_config(sub_class, kv_heads)
    options.update(OVERRIDES.get(config_class.__name__, {}))
    if kv_heads is not None:
        options.update({name: kv_heads for name in KV_HEADS if name in field_names})
    return config_class(**options)


def has_kv_heads(config_class: Any) -> bool:
    """Return whether the plan of a model shards kv heads, whose number the configuration has."""
    if config_class.__name__ in AS_MANY_AS_QUERIES:
        return False
    plan = getattr(config_class, "base_model_tp_plan", None) or {}
    keys = ("k_proj", "v_proj", "qkv_proj")
    is_named = any(key.endswith(keys) and style.startswith("colwise") for key, style in plan.items())
    if is_named and not list_fields(config_class).isdisjoint(KV_HEADS):
        return True
    return any(map(has_kv_heads, (config_class.sub_configs or {}).values()))


def find_model_class(config_class: Any) -> Any:
    """Return the causal language model of a configuration, or its base model."""
    from transformers import AutoModelForCausalLM

    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:  # the model of another architecture
        return AutoModelForCausalLM._model_mapping[config_class]
    if config_class.__name__ in CLASSES:
        return getattr(module, CLASSES[config_class.__name__])
    candidates = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and getattr(value, "config_class", None) is config_class
        and not value.__name__.endswith("PreTrainedModel")
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "TextModel", "Model", ""):
        for candidate in candidates:
            if candidate.__name__.endswith(ending):
                return candidate
    raise LookupError(f"{module.__name__} has no model for {config_class.__name__}")


def make_tiny_model(name: str, kv_heads: int | None = None, attention: str | None = None) -> Any:
    """Make a random model in float64, in which every parameter changes the output.

    Args:
        name: the name of its configuration.
        kv_heads: the number of kv heads; None for as many as query heads.
        attention: the implementation of attention; None for the default.
    """
    torch.manual_seed(0)
    config_class = find_configurations()[name]
    model_class = find_model_class(config_class)
    config = make_tiny_config(config_class, kv_heads)
    with torch.device("meta"):
        numel = sum(param.numel() for param in model_class._from_config(config).parameters())
    assert numel < 1e6, f"{name} has {numel:,} parameters: a name of its sizes is missing in SIZES"
    if attention is not None and name not in NO_EAGER:
        config._attn_implementation = attention
    model = model_class._from_config(config, experts_implementation="eager").eval().double()
    for param in model.parameters():
        if param.ndim > 1:
            # Some models leave parameters uninitialized.
            param.data.normal_(std=param.shape[-1] ** -0.5)
        else:
            param.data.add_(torch.randn_like(param), alpha=0.1)
    return model


def make_inputs(name: str) -> dict[str, Any]:
    make = INPUTS.get(name)
    return {"input_ids": _make_ids()} if make is None else make()


def run_forward(model: Any, name: str) -> torch.Tensor:
    """Return the logits or the last hidden states; eager attention gets a batch with padding.

    Args:
        model: the model.
        name: the name of its configuration.
    """
    options = make_inputs(name)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if model.config._attn_implementation == "eager" and "input_ids" in options and takes_mask:
        options["attention_mask"] = torch.ones_like(options["input_ids"])
        # One token of padding only: transformers returns NaN for a window that is all padding.
        options["attention_mask"][1, -1:] = 0
    if hasattr(model.config, "use_cache"):
        options["use_cache"] = False
    with Double():
        output = model(**options)
    value: torch.Tensor = output[0]
    return value
