"""Convert the tensor-parallel plans of Hugging Face's models to plans for ``parallelize``.

transformers states a plan as a dict of module names to names of styles, in ``_tp_plan``. Most names
are styles of torch. The rest depends on the model: on the number of its heads, on its attention, or
on bare parameters that the plan names like modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh._errors import PlanError, did_you_mean, format_items
from namedmesh.launch.tested_releases import warn_if_untested
from namedmesh.tensor_parallel.experts import ExpertTensorParallel
from namedmesh.tensor_parallel.hf_styles import (
    GROUPS_ATTRIBUTE,
    KeyValueGroups,
    RowwiseEmbedding,
)
from namedmesh.tensor_parallel.modules import AllReduceOutputGradient, LocalParameters
from namedmesh.tensor_parallel.plan_entries import key_matches
from namedmesh.tensor_parallel.styles import ColwiseParallel, KeyValueParallel, RowwiseParallel

_LOCAL_PARAMETERS = "replicated_with_grad_allreduce"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseEmbedding, input_layouts=Replicate()),
    _LOCAL_PARAMETERS: LocalParameters,
}
# The styles of a module whose bare parameters have entries of their own, and the styles of those.
_PARAMETER_OWNERS = ("local_params", "moe_tp_experts")
_PARAMETER_STYLES = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
# Column layers whose output features are interleaved per head, and may be several times as many as
# the row layer takes: with keys, a gate, or latent features.
_INTERLEAVED_PER_HEAD = ("query_key_value", "kv_b_proj", "q_b_proj", "q_proj", "q_gate_proj")
# The attributes under which torch.compile and activation checkpointing register the wrapped module.
_WRAPPER_ATTRIBUTES = ("_orig_mod", "_checkpoint_wrapped_module")
# For a module that works on the features of a column layer next to it: the name of that layer. The
# plans of some models have no entry for the module.
_COLUMN_BEFORE = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}
# Types of models whose plans shard the attention, although a part of it needs the features of all
# heads.
_UNSHARDABLE_ATTENTION = {
    "doge": "dt_proj computes a value for every head, but a rank has a shard of the heads",
    "esmc": "k_norm normalizes over the features of all heads, but k_proj leaves each rank a shard",
    "neomme": "value_embeddings adds the features of all heads, but v_proj leaves each rank a shard",
}


class _UnsupportedStyleError(Exception):
    """A style of a plan cannot be converted. The message continues "<key>: <style> ..."."""


def plan_from_hf(model: nn.Module, *, adapters: bool = False) -> dict[str, ParallelStyle]:
    """Convert a Hugging Face model's own tensor-parallel plan to one for ``parallelize``.

    The plan is the ``_tp_plan`` of the model, or of the models inside it if it is a wrapper, such
    as a ``PeftModel`` or the result of ``torch.compile``. Entries for modules that the model does
    not have, and modules that stay replicated (``"replicate"``), are omitted.

    It warns once about releases of transformers that are not tested.

    Args:
        model: the model; it is not changed.
        adapters: whether linears may have LoRA adapters of PEFT. The adapters are then sharded with
            their linear: the second matrix under a column layer, the first one under a row layer.

    Returns:
        A style for each name of a module.

    Raises:
        PlanError: the model has no plan, or one that is known not to work or names none of its
            modules; or the plan uses styles, or the model has adapters, that are not supported.
    """
    warn_if_untested("transformers")
    tp_plan = _load_tp_plan(model)
    # Plans use the names of modules without wrappers. A wrapper and the module inside have the same
    # name then; the module inside comes later, and is used.
    modules: dict[str, nn.Module] = {}
    wrapped_names: dict[str, str] = {}
    for wrapped_name, module in model.named_modules():
        fqn = _strip_wrappers(wrapped_name)
        modules[fqn] = module
        wrapped_names[fqn] = wrapped_name
    plan: dict[str, ParallelStyle] = {}
    problems = []
    for fqn, module in modules.items():
        key, style_name = _find_module_entry(tp_plan, fqn)
        if not key or style_name == "replicate" or isinstance(module, nn.ModuleList):
            continue
        try:
            style = _make_style(modules, tp_plan, fqn, style_name)
            if style is not None and adapters:
                plan.update(_add_adapters(fqn, module, style))
            elif style is not None:
                plan[fqn] = style
            if not adapters and hasattr(module, "base_layer"):
                problems.append(f"{key!r}: has adapters; call plan_from_hf(..., adapters=True)")
        except _UnsupportedStyleError as error:
            problems.append(f"{key!r}: {style_name!r} {error}; change or remove it in model._tp_plan")
    if not plan and not problems:
        problems.append(
            f"{type(model).__name__} has no module that its _tp_plan names ({format_items(tp_plan, 3)})"
        )
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    _add_key_value_groups(modules, plan)
    return {wrapped_names[fqn]: style for fqn, style in plan.items()}


def _load_tp_plan(model: nn.Module) -> dict[str, str]:
    """Return the ``_tp_plan`` of a model: names of styles, by names of modules and parameters.

    If the model wraps others, their plans are merged, with the full names of modules.
    """
    tp_plan: dict[str, str] = {}
    prefixes: list[str] = []
    for fqn, module in model.named_modules():
        # A wrapper forwards attributes of the model inside, whose plan has shorter names. The
        # static lookup does not see them.
        module_plan = inspect.getattr_static(module, "_tp_plan", None)
        # The plan of a model already contains the plans of the models inside it.
        if not module_plan or f"{fqn}.".startswith(tuple(prefixes)):
            continue
        prefixes.append(f"{fqn}." if fqn else "")
        reason = _UNSHARDABLE_ATTENTION.get(getattr(getattr(module, "config", None), "model_type", ""))
        if reason and any(".self_attn." in key for key in module_plan):
            remedy = "remove the entries of self_attn from model._tp_plan"
            raise PlanError(f"attention cannot be sharded as the plan states: {reason}; {remedy}")
        for key, style_name in module_plan.items():
            tp_plan[f"{_strip_wrappers(fqn)}.{key}".lstrip(".")] = style_name
    if not tp_plan:
        remedy = "write one, a dict of names to styles"
        raise PlanError(f"{type(model).__name__} states no plan in its _tp_plan; {remedy}")
    return tp_plan


def _find_tp_entry(tp_plan: Mapping[str, str], fqn: str) -> tuple[str, str]:
    """Return the first key that matches a name, and its style; two empty strings if none does."""
    for key, style_name in tp_plan.items():
        if key_matches(key, fqn):
            return key, style_name
    return "", ""


def _find_module_entry(tp_plan: Mapping[str, str], fqn: str) -> tuple[str, str]:
    """Return the key and the style of a module; two empty strings if it has none."""
    key, style_name = _find_tp_entry(tp_plan, fqn)
    parent, _, name = fqn.rpartition(".")
    if not key and name in _COLUMN_BEFORE:
        key, column_style = _find_tp_entry(tp_plan, f"{parent}.{_COLUMN_BEFORE[name]}")
        style_name = _LOCAL_PARAMETERS if column_style == "colwise" else "replicate"
    return key, style_name


def _strip_wrappers(fqn: str) -> str:
    """Return the name of a module without the attributes of torch's wrappers."""
    return ".".join(token for token in fqn.split(".") if token not in _WRAPPER_ATTRIBUTES)


# --- from the name of a style to the style ------------------------------------------------------


def _make_style(
    modules: Mapping[str, nn.Module], tp_plan: Mapping[str, str], fqn: str, style_name: str
) -> ParallelStyle | None:
    """Return the style of one module; None if the module stays replicated.

    Raises:
        _UnsupportedStyleError: there is no such style, or it does not fit the module.
    """
    module = getattr(modules[fqn], "base_layer", modules[fqn])
    if style_name in _PARAMETER_OWNERS:
        return _make_parameter_style(tp_plan, fqn, module, style_name)
    if style_name == "mla_kv_a_proj":
        attention = modules[fqn.rpartition(".")[0]]
        width = getattr(attention, "qk_rope_head_dim", None)
        if width is None:
            raise _UnsupportedStyleError("depends on the model: its attention has no qk_rope_head_dim")
        return AllReduceOutputGradient(slice(-width, None))
    if style_name not in _STYLES:
        suggestion = did_you_mean(style_name, [*_STYLES, *_PARAMETER_OWNERS])
        raise _UnsupportedStyleError(f"is not supported{suggestion}")
    if style_name == "colwise" and isinstance(module, nn.Linear):
        heads = _find_head_counts(modules, fqn)
        if heads and any(token in _KEYS_AND_VALUES for token in fqn.split(".")[-2:]):
            return KeyValueParallel(*heads)
        if heads and fqn.endswith(_INTERLEAVED_PER_HEAD):
            return ColwiseParallel(heads=heads[0])
    return _STYLES[style_name]()


def _make_parameter_style(
    tp_plan: Mapping[str, str], fqn: str, module: nn.Module, style_name: str
) -> ParallelStyle | None:
    """Return the style of a module whose own parameters have entries in the plan.

    None if the plan names none of the parameters that this module has.
    """
    placements: dict[str, Placement] = {}
    fused: dict[str, int] = {}
    for name, param in module.named_parameters(recurse=False):
        _, param_style = _find_tp_entry(tp_plan, f"{fqn}.{name}")
        if param_style not in _PARAMETER_STYLES:
            continue
        if param_style.endswith("colwise"):
            # Dim 0 of a weight, or of one value for each head; dim 1 of stacked experts.
            placements[name] = Shard(max(param.ndim - 2, 0))
        else:
            placements[name] = Shard(param.ndim - 1)
        # Gate and up are fused even if the plan says "colwise". Experts state whether the two are
        # concatenated; if not, their rows alternate, and each rank's shard has both.
        is_fused = param_style.startswith("packed") or name == "gate_up_proj"
        if is_fused and getattr(module, "is_concatenated", True):
            fused[name] = 2
    if not placements:
        return None
    if style_name == "local_params":
        return LocalParameters(placements)
    return ExpertTensorParallel(placements, fused=fused)


def _add_adapters(fqn: str, module: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of a module and of its LoRA adapters, by name.

    Raises:
        _UnsupportedStyleError: the adapters of the module cannot be sharded.
    """
    if not hasattr(module, "base_layer") or isinstance(style, AllReduceOutputGradient):
        return {fqn: style}
    # The matrix of an adapter whose features are sharded as the features of its linear.
    sharded_matrices = {ColwiseParallel: "lora_B", KeyValueParallel: "lora_B", RowwiseParallel: "lora_A"}
    matrix = sharded_matrices.get(type(style), "")
    adapters: Any = getattr(module, matrix, None)
    # Variants, such as DoRA, use the norm of the full weight.
    if not adapters or getattr(module, "lora_variant", None):
        raise _UnsupportedStyleError(
            "does not support adapters other than plain LoRA of a linear; merge them"
        )
    styles = {f"{fqn}.base_layer": style}
    for adapter in adapters:
        styles[f"{fqn}.{matrix}.{adapter}"] = style
    return styles


# --- attention heads ----------------------------------------------------------------------------


def _add_key_value_groups(modules: Mapping[str, nn.Module], plan: dict[str, ParallelStyle]) -> None:
    """Add a style for each sharded attention that reads its ``num_key_value_groups``.

    It also covers layers that use the keys and values of another layer.
    """
    for fqn, module in modules.items():
        if not hasattr(module, GROUPS_ATTRIBUTE):
            continue
        heads = _find_head_counts(modules, f"{fqn}.")
        if heads is None or heads[0] == heads[1] or not _shards_heads(plan, fqn):
            continue
        style = plan.get(fqn, LocalParameters({}))
        if type(style) is LocalParameters:
            plan[fqn] = KeyValueGroups(style.layout(module, 1), *heads)


def _shards_heads(plan: Mapping[str, ParallelStyle], fqn: str) -> bool:
    """Return whether a column layer inside of an attention module leaves each rank some heads."""
    for name, style in plan.items():
        if not name.startswith(f"{fqn}.") or not isinstance(style, ColwiseParallel):
            continue
        # If the output is all-gathered, every rank computes all heads.
        if style.output_layouts == (Shard(-1),):
            return True
    return False


def _find_head_counts(modules: Mapping[str, nn.Module], fqn: str) -> tuple[int, int] | None:
    """Return the numbers of query heads and of kv heads of an attention.

    They are read from the nearest module around ``fqn`` that states them itself, or in its
    configuration; None if no module does.
    """
    while fqn:
        fqn = fqn.rpartition(".")[0]
        module = modules[fqn]
        config = getattr(module, "config", None)
        layer_index = getattr(module, "layer_idx", None)
        layer_configs = getattr(config, "per_layer_config", None)
        if layer_configs is not None and layer_index is not None:
            config = layer_configs[layer_index]
        for source in (module, config):
            query_heads = _read_count(source, "num_heads", "num_attention_heads")
            if not query_heads:
                continue
            # The attribute of the module takes precedence over its configuration.
            groups = _read_count(module, GROUPS_ATTRIBUTE)
            if groups:
                return query_heads, query_heads // groups
            kv_heads = _read_count(source, "num_key_value_heads", "num_kv_heads")
            return query_heads, kv_heads or query_heads
    return None


def _read_count(source: object, *names: str) -> int | None:
    """Return the first of several attributes that is a positive int; None if none is."""
    for name in names:
        # transformers raises a RuntimeError for a setting that differs between layers.
        with suppress(RuntimeError):
            count = getattr(source, name, None)
            if isinstance(count, int) and count > 0:
                return count
    return None
