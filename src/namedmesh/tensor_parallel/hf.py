"""Hugging Face's tensor-parallel plans: names of styles, read into the styles themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from namedmesh.errors import PlanError, did_you_mean, format_items
from namedmesh.sizes import shared_heads
from namedmesh.tensor_parallel.collectives import Group, copy_to_tp_region
from namedmesh.tensor_parallel.experts import ExpertTensorParallel
from namedmesh.tensor_parallel.layers import RowEmbedding
from namedmesh.tensor_parallel.modules import LocalParameters
from namedmesh.tensor_parallel.plan import matches
from namedmesh.tensor_parallel.styles import ColwiseParallel, KeyValueParallel, RowwiseParallel


class RowwiseEmbedding(RowwiseParallel):
    """Embeddings that have a forward of their own, as transformers', work on what that of ``nn.Embedding`` returns: all of it."""

    def fast_path_class(self, module: nn.Module) -> type | None:
        """Return a subclass of the module's class, in which ``super().forward`` is the fast path."""
        own: Any = type(module)
        known = super().fast_path_class(module)
        return known or type(own.__name__, (own, RowEmbedding), {"__module__": own.__module__})


class AttentionGroups(LocalParameters):
    """Say to an attention module how many of a rank's queries share a kv head, where the ranks do not divide those."""

    def __init__(self, placements: Mapping[str, Placement], query_heads: int, kv_heads: int) -> None:
        super().__init__(placements)
        self.heads = query_heads, kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        queries, heads = self.heads
        if heads % device_mesh.size():
            handed_out = shared_heads(queries, heads, device_mesh.size())
            setattr(module, _GROUPS, queries // sum(map(len, handed_out)))
        return super()._apply(module, device_mesh)


class TailGradient(ParallelStyle):
    """Sum the gradient of the last features of a module's output, which each rank's heads use directly, over the ranks (latent attention)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(_copy_tail_to_tp_region, Group.of(device_mesh), self.width))
        return module


def _copy_tail_to_tp_region(
    group: Group, width: int, _module: nn.Module, _args: Any, output: Tensor
) -> Tensor:
    rest, tail = output.split([output.shape[-1] - width, width], dim=-1)
    return torch.cat([rest, copy_to_tp_region(tail, group)], dim=-1)


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseEmbedding, input_layouts=Replicate()),
    _SUMMED: LocalParameters,
}
# What shards a bare parameter, one that is no module's weight or bias; and how its module has to be named for that.
_BARE = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_OWNERS = ("local_params", "moe_tp_experts")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
# Layers whose features lie head by head, each with what the row layer does not take: keys, a gate, what is latent.
_BY_HEAD = ("query_key_value", "kv_b_proj", "q_b_proj", "q_proj", "q_gate_proj")
_GROUPS = "num_key_value_groups"
# The names that torch.compile and activation checkpointing give the module inside a wrapper.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_HEAD_NORMS = {"self_attn.q_proj": "self_attn.q_norm", "self_attn.k_proj": "self_attn.k_norm"}
# What a plan leaves out, by the type of the model: beside which entry, a module on each rank's features.
_LEFT_OUT: dict[str, dict[str, str]] = {
    "apertus": {"mlp.up_proj": "mlp.act_fn"},
    "apertus1p5_text": {"mlp.up_proj": "mlp.act_fn"},
    **dict.fromkeys(
        ("glm4_moe", "muse_glimmer_assistant", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "sarvam_moe"),
        _HEAD_NORMS,
    ),
}
# Where a plan shards attention of which something needs the features of all heads.
_WRONG_ATTENTION = {
    "doge": "dt_proj makes a number for each head, those of all heads on every rank, where each rank has its heads",
    "esmc": "k_norm normalizes over the features of all heads, of which k_proj leaves each rank a part",
    "neomme": "value_embeddings adds the features of all heads, of which v_proj leaves each rank a part",
}


def plan_from_hf(model: nn.Module, *, adapters: bool = False) -> dict[str, ParallelStyle]:
    """Read a Hugging Face model's own tensor-parallel plan into one for ``parallelize``.

    The plan is the ``_tp_plan`` of the model, or of the models inside it if it is a wrapper, such
    as a ``PeftModel`` or what ``torch.compile`` returns. Entries for modules that the model does
    not have, and modules that stay replicated (``"replicate"``), are omitted.

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
    stated = _stated(model)
    # The names in the model as it was written. A wrapper has that of the module inside, which comes after it.
    modules, names = {}, {}
    for name, module in model.named_modules():
        modules[_plain(name)] = module
        names[_plain(name)] = name
    plan: dict[str, ParallelStyle] = {}
    problems = []
    for fqn, module in modules.items():
        key, kind = _stated_for(stated, fqn)
        if not key or kind == "replicate" or isinstance(module, nn.ModuleList):
            continue
        try:
            style = _style(modules, stated, fqn, kind)
            if style is not None:
                plan.update(_with_adapters(fqn, module, style) if adapters else {fqn: style})
            if not adapters and hasattr(module, "base_layer"):
                problems.append(f"{key!r}: has adapters; call plan_from_hf(..., adapters=True)")
        except LookupError as error:
            problems.append(f"{key!r}: {kind!r} {error.args[0]}; change or remove it in model._tp_plan")
    if not plan and not problems:
        problems.append(
            f"{type(model).__name__} has no module that its _tp_plan names ({format_items(stated, 3)})"
        )
    if problems:
        raise PlanError(*dict.fromkeys(problems))
    _tell_attention(modules, plan)
    return {names[fqn]: style for fqn, style in plan.items()}


def _stated(model: nn.Module) -> dict[str, str]:
    """Return the names of styles that a model states, by names of modules and parameters."""
    stated: dict[str, str] = {}
    stating: list[str] = []
    for fqn, module in model.named_modules():
        # Wrappers forward attributes of the model inside, in which modules have shorter names.
        own = inspect.getattr_static(module, "_tp_plan", None)
        inside = any(f"{fqn}.".startswith(f"{outer}." if outer else "") for outer in stating)
        if own and not inside:
            stating.append(fqn)
            for key, name in _plan_of(module, own).items():
                stated[f"{_plain(fqn)}.{key}".lstrip(".")] = name
    if not stated:
        remedy = "write one, a dict of names to styles"
        raise PlanError(f"{type(model).__name__} states no plan in its _tp_plan; {remedy}")
    return stated


def _plan_of(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan that one model states, completed where it is known to lack entries."""
    stated = dict(plan)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    kind = getattr(config, "model_type", "")
    if kind in _WRONG_ATTENTION and any(".self_attn." in key for key in stated):
        remedy = "take the entries of self_attn out of model._tp_plan"
        raise PlanError(f"attention cannot be sharded as the plan says: {_WRONG_ATTENTION[kind]}; {remedy}")
    for beside, added in _LEFT_OUT.get(kind, {}).items():
        for key in [key for key in stated if key.endswith(f".{beside}")]:
            stated.setdefault(key.removesuffix(beside) + added, _SUMMED)
    return stated


def _with_adapters(fqn: str, module: nn.Module, style: ParallelStyle) -> dict[str, ParallelStyle]:
    """Return the styles of a linear and of its LoRA adapters, by name; or of a module without any.

    A LookupError says why the adapters of the module cannot be sharded.
    """
    if not hasattr(module, "base_layer") or isinstance(style, TailGradient):
        return {fqn: style}
    kinds = {ColwiseParallel: "lora_B", KeyValueParallel: "lora_B", RowwiseParallel: "lora_A"}
    adapters: Any = getattr(module, kinds.get(type(style), ""), None)
    # Variants, such as DoRA, compute with the norms of whole weights.
    if not adapters or getattr(module, "lora_variant", None):
        raise LookupError("is for a layer whose adapters are not plain LoRA of a linear; merge them")
    inside = ["base_layer", *(f"{kinds[type(style)]}.{name}" for name in adapters)]
    return {f"{fqn}.{name}": style for name in inside}


def _style(
    modules: Mapping[str, nn.Module], stated: Mapping[str, str], fqn: str, name: str
) -> ParallelStyle | None:
    """Return the style of one module, None where it stays whole; a LookupError says why there is none."""
    module = getattr(modules[fqn], "base_layer", modules[fqn])
    if name in _OWNERS:
        return _owner(stated, fqn, module, name)
    if name == "mla_kv_a_proj":
        width = getattr(modules[fqn.rpartition(".")[0]], "qk_rope_head_dim", None)
        if width is None:
            raise LookupError("depends on the model: its attention has no qk_rope_head_dim")
        return TailGradient(width)
    if name not in _STYLES:
        raise LookupError(f"is not supported{did_you_mean(name, [*_STYLES, *_OWNERS])}")
    heads = _heads(modules, fqn) if name == "colwise" and isinstance(module, nn.Linear) else None
    if heads and any(token in _KEYS_AND_VALUES for token in fqn.split(".")[-2:]):
        return KeyValueParallel(*heads)
    if heads and fqn.endswith(_BY_HEAD):
        return ColwiseParallel(heads=heads[0])
    return _STYLES[name]()


def _owner(stated: Mapping[str, str], fqn: str, module: nn.Module, name: str) -> ParallelStyle | None:
    """Return the style of a module whose own parameters the plan names, for those that it has."""
    placements: dict[str, Placement] = {}
    fused = {}
    for parameter, value in module.named_parameters(recurse=False):
        _, style = _stated_for(stated, f"{fqn}.{parameter}")
        if style not in _BARE:
            continue
        # A linear's weight, experts stacked in front, or one number a head.
        rows = max(value.ndim - 2, 0)
        placements[parameter] = Shard(rows if style.endswith("colwise") else value.ndim - 1)
        # Gate and up, one after the other, of which some plans say "colwise"; experts say if it is row by row.
        packed = style.startswith("packed") or parameter == "gate_up_proj"
        if packed and getattr(module, "is_concatenated", True):
            fused[parameter] = 2
    if not placements:
        return None
    return (
        LocalParameters(placements)
        if name == "local_params"
        else ExpertTensorParallel(placements, fused=fused)
    )


def _tell_attention(modules: Mapping[str, nn.Module], plan: dict[str, ParallelStyle]) -> None:
    """Add a style for each attention that counts the queries of a kv head and has a rank's heads.

    Some layers have no keys and values of their own, and use those of another layer.
    """
    for fqn, module in modules.items():
        heads = _heads(modules, f"{fqn}.") if hasattr(module, _GROUPS) else None
        if heads is None or heads[0] == heads[1]:
            continue
        shards_heads = any(
            name.startswith(f"{fqn}.")
            and isinstance(style, ColwiseParallel)
            # Where columns are gathered, every rank computes all heads, as one process does.
            and style.output_layouts == (Shard(-1),)
            for name, style in plan.items()
        )
        known = plan.get(fqn, LocalParameters({}))
        if type(known) is LocalParameters and shards_heads:
            plan[fqn] = AttentionGroups(known.layout(module, 1), *heads)


def _heads(modules: Mapping[str, nn.Module], fqn: str) -> tuple[int, int] | None:
    """Return how many heads of queries, and of keys and values, the nearest module around one states, or its configuration."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        module = modules[fqn]
        config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
        layers = getattr(config, "per_layer_config", None)  # where layers differ
        for source in (module, config if layers is None or index is None else layers[index]):
            queries = _first_count(source, "num_heads", "num_attention_heads")
            if queries:
                groups = _first_count(module, _GROUPS)  # what the module says of itself counts more
                kv_heads = _first_count(source, "num_key_value_heads", "num_kv_heads")
                return queries, queries // groups if groups else kv_heads or queries
    return None


def _first_count(source: object, *names: str) -> int | None:
    for name in names:
        with suppress(RuntimeError):  # transformers', of what differs between layers
            count = getattr(source, name, None)
            if isinstance(count, int) and count > 0:
                return count
    return None


def _stated_for(stated: Mapping[str, str], fqn: str) -> tuple[str, str]:
    """Return the first key that matches a name, and its style; two empty strings without one."""
    return next(((key, name) for key, name in stated.items() if matches(key, fqn)), ("", ""))


def _plain(fqn: str) -> str:
    """Return the name of a module in the model as it was written, without torch's wrappers."""
    return ".".join(token for token in fqn.split(".") if token not in _WRAPPERS)
