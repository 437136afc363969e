"""Hugging Face's tensor-parallel plans: names of styles, read into the styles themselves."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.errors import PlanError, did_you_mean
from namedmesh.tensor_parallel.adapters import adapted_model
from namedmesh.tensor_parallel.experts import IdentityExpert, ShardedExperts
from namedmesh.tensor_parallel.fused import FusedColwiseParallel
from namedmesh.tensor_parallel.kv_heads import KeyValueParallel
from namedmesh.tensor_parallel.local import LocalParameters, SumOutput, SumTailGradient
from namedmesh.tensor_parallel.plan import matches
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement


def _gathered_columns() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _whole_input_rows() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def _embedding_rows() -> ParallelStyle:
    # Embeddings of transformers that have a forward of their own work on what that of nn.Embedding returns: all of it.
    return RowwiseParallel(input_layouts=Replicate(), local_forward=True)


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gathered_columns,
    "colwise_rep": _gathered_columns,
    "rowwise_split_input": _whole_input_rows,
    "rowwise_rep": _whole_input_rows,
    "embedding_rowwise": _embedding_rows,
    "embedding_colwise": _gathered_columns,
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    _SUMMED: LocalParameters,
    "all_reduce": SumOutput,
    "moe_identity_expert": IdentityExpert,
}
_EXPERTS = (
    "it gives each rank whole experts (expert parallelism), while tensor parallelism gives each rank a shard of "
    "every expert"
)
_UNSUPPORTED = {"grouped_gemm": _EXPERTS, "ep_dispatch_experts": _EXPERTS}
# What shards a bare parameter, one that is no module's weight or bias, and what its module needs for that.
_BARE = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_COLUMNS = ("colwise", "packed_colwise")
_OWNERS = ("local_params", "moe_tp_experts", "all_reduce")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
"""What the plans of transformers call the projections to keys and values, or the module around one."""
_HEAD_NORMS = {"self_attn.q_proj": "self_attn.q_norm", "self_attn.k_proj": "self_attn.k_norm"}
# What the plan of a configuration leaves out, by its model type: beside which entry, a module on each rank's features.
_LEFT_OUT: dict[str, dict[str, str]] = {
    "apertus": {"mlp.up_proj": "mlp.act_fn"},
    **dict.fromkeys(("doge", "muse_glimmer_assistant"), _HEAD_NORMS),
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), _HEAD_NORMS),
}
# Where a plan shards attention of which something needs the features of all heads.
_WRONG_ATTENTION = {
    "doge": "dt_proj makes a number for each head, those of all heads on every rank, where each rank has its heads",
    "esmc": "k_norm normalizes over the features of all heads, of which k_proj leaves each rank a part",
    "neomme": "value_embeddings adds the features of all heads, of which v_proj leaves each rank a part",
}
# Handled one by one, with a look at the model or at the rest of the plan.
_SPECIAL = (
    "replicate",
    "mla_kv_a_proj",
    "packed_colwise",
    "packed_rowwise",
    "local_params",
    "moe_tp_experts",
)


def plan_from_hf(
    model_or_plan: nn.Module | Mapping[str, str], *, leave_out: Sequence[str] = ()
) -> dict[str, ParallelStyle]:
    """Read a Hugging Face tensor-parallel plan into one for ``parallelize``.

    From a model, the plan is its configuration's ``base_model_tp_plan`` (with the base model's prefix) and
    its own ``_tp_plan``; from a ``PeftModel``, that of the model inside. Such a plan is written for all
    variants of an architecture, so what it says about modules that this model does not have is left out, and
    so is a row layer whose input no column layer makes. If the output head of the model is tied to its input
    embedding, the embedding is sharded along the vocabulary too, as the head is.

    Args:
        model_or_plan: a ``PreTrainedModel``, or a plan: a dict of module names to style names.
        leave_out: patterns of entries of the plan to leave out, such as ``"*.self_attn.*"`` (``*`` stands for
            any text, dots included). What they name stays whole on every rank.

    Returns:
        A dict of module names to styles. A module that every rank keeps whole (``"replicate"``) is not in it.

    Raises:
        PlanError: if the model has no plan, if a pattern matches no entry of it, or if it is known not to work;
            or with every style that is unknown or not supported.

    Example:
        >>> from namedmesh.tensor_parallel import plan_from_hf
        >>> plan = plan_from_hf({"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})
        >>> for name, style in plan.items():
        ...     print(name, type(style).__name__)
        layers.*.mlp.up_proj ColwiseParallel
        layers.*.mlp.down_proj RowwiseParallel
    """
    if isinstance(model_or_plan, nn.Module) and (adapted := adapted_model(model_or_plan)):
        prefix, inner = adapted
        return {f"{prefix}.{key}": style for key, style in plan_from_hf(inner, leave_out=leave_out).items()}
    model = None
    if isinstance(model_or_plan, Mapping):
        names = dict(model_or_plan)
    else:
        model = model_or_plan
        names = _names_of(model)
    idle = [pattern for pattern in leave_out if not fnmatch.filter(names, pattern)]
    if idle:
        raise PlanError(*(f"leave_out: {pattern!r} matches no entry of the plan" for pattern in idle))
    names = {
        key: name
        for key, name in names.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in leave_out)
    }
    reason = _WRONG_ATTENTION.get(_model_type(model))
    if reason is not None and any(".self_attn." in key for key in names):
        raise PlanError(
            f"the attention of {type(model).__name__} cannot be sharded as its plan says: {reason}; leave it out: "
            f"plan_from_hf(model, leave_out=['*.self_attn.*'])"
        )
    bare = _bare_parameters(model, names)
    plan: dict[str, ParallelStyle] = {}
    problems = []
    for key, name in names.items():
        if name == "replicate" or key in bare:
            continue
        entries = _entries(model, key, name, names)
        if entries is None:
            problems.append(f"{key!r}: {_reason(model, name)}; change or remove this entry")
        else:
            plan.update(entries)
    problems += [
        f"{key!r}: {name!r} shards a bare parameter, which needs 'local_params' or 'moe_tp_experts' at its module; "
        f"change or remove this entry"
        for key, (owner, name) in bare.items()
        if names.get(owner) not in _OWNERS or name not in _BARE
    ]
    if problems:
        raise PlanError(*problems)
    if model is not None:
        _shard_tied_embedding(model, plan)
    return plan


def _names_of(model: nn.Module) -> dict[str, str]:
    """Return the style names that a model states, by names of modules and parameters that it has."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"plan_from_hf reads a model or a dict of style names, not a {type(model).__name__}")
    stated: dict[str, str] = {}
    prefix = _base_prefix(model)
    for plan in (
        getattr(getattr(model, "config", None), "base_model_tp_plan", None),
        getattr(getattr(model, "base_model", None), "_tp_plan", None),
    ):
        stated.update({prefix + key: name for key, name in (plan or {}).items()})
    stated.update(getattr(model, "_tp_plan", None) or {})
    if not stated:
        raise PlanError(
            f"{type(model).__name__} states no tensor-parallel plan, neither in its configuration's "
            f"base_model_tp_plan nor in its _tp_plan; write a plan for it, a dict of names to styles"
        )
    for beside, added in _LEFT_OUT.get(_model_type(model), {}).items():
        for key in [key for key in stated if key.endswith(f".{beside}")]:
            stated.setdefault(key.removesuffix(beside) + added, _SUMMED)
    there = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    there += [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return {key: name for key, name in stated.items() if any(matches(key, fqn) for fqn in there)}


def _model_type(model: nn.Module | None) -> str:
    """Return the model type that a configuration states, that of its text model where it has one."""
    return str(getattr(_text_config(model), "model_type", ""))


def _base_prefix(model: nn.Module) -> str:
    """Return what the base model's names start with in this model: ``"model."``, or nothing for the base model."""
    base = getattr(model, "base_model", model)
    return next((f"{fqn}." for fqn, module in model.named_modules() if module is base and fqn), "")


def _bare_parameters(model: nn.Module | None, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the keys that name parameters instead of modules, with their owners' keys and their styles."""
    if model is None:
        return {}
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    modules = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    return {
        key: (key.rpartition(".")[0], name)
        for key, name in names.items()
        if name not in _UNSUPPORTED
        and not any(matches(key, fqn) for fqn in modules)
        and any(matches(key, fqn) for fqn in parameters)
    }


def _entries(
    model: nn.Module | None, key: str, name: str, names: Mapping[str, str]
) -> dict[str, ParallelStyle] | None:
    """Return what one key comes to: itself, or one entry a module where they differ; None if it cannot be told."""
    if model is None:
        return {key: _STYLES[name]()} if name in _STYLES else None
    found = {fqn: module for fqn, module in model.named_modules() if matches(key, fqn)}
    if found and all(isinstance(module, nn.ModuleList) for module in found.values()):
        return _entries(model, f"{key}.*", name, names)
    makers = {"mla_kv_a_proj": _tail, "rowwise": _row, **dict.fromkeys(_OWNERS, _owner)}
    if name not in makers:
        style = _column(model, key, name)
        return None if style is None else {key: style}
    try:
        return _same_or_apart(key, {fqn: makers[name](model, fqn, name, names) for fqn in found})
    except LookupError:
        return None


def _same_or_apart(key: str, styles: Mapping[str, ParallelStyle | None]) -> dict[str, ParallelStyle]:
    """Return one entry for all modules that a key matches, if they get the same; without those that get none."""
    distinct = {repr(style): style for style in styles.values()}
    if len(distinct) == 1:
        ((_, style),) = distinct.items()
        return {} if style is None else {key: style}
    return {fqn: style for fqn, style in styles.items() if style is not None}


def _column(model: nn.Module, key: str, name: str) -> ParallelStyle | None:
    """Return a style by its name alone, or by that of the layer too; None if there is none of that name."""
    if name == "packed_colwise":
        return FusedColwiseParallel(blocks=2)
    if name == "colwise" and any(token in _KEYS_AND_VALUES for token in key.split(".")[-2:]):
        return KeyValueParallel()
    if name == "colwise" and key.endswith("query_key_value"):  # GPT-NeoX's: head by head
        heads = getattr(_text_config(model), "num_attention_heads", None)
        return ColwiseParallel() if heads is None else FusedColwiseParallel(interleaved=heads)
    return _STYLES[name]() if name in _STYLES else None


def _owner(model: nn.Module, fqn: str, name: str, names: Mapping[str, str]) -> ParallelStyle | None:
    """Return the style of a module whose own parameters the plan names, for those that it has."""
    module = model.get_submodule(fqn)
    placements, fused = {}, {}
    for parameter, value in module.named_parameters(recurse=False):
        style = next((style for key, style in names.items() if matches(key, f"{fqn}.{parameter}")), None)
        if style in _BARE:
            placements[parameter] = _bare_placement(value.ndim, style)
            if _is_fused(module, parameter, style):
                fused[parameter] = 2
    if not placements:
        return SumOutput() if name == "all_reduce" else None
    return LocalParameters(placements) if name == "local_params" else ShardedExperts(placements, fused=fused)


def _row(model: nn.Module, fqn: str, _name: str, names: Mapping[str, str]) -> ParallelStyle | None:
    """Return the style of a row layer, if a column layer of the plan makes its input."""
    return None if _input_is_whole(model, fqn, names) else RowwiseParallel()


def _bare_placement(ndim: int, name: str) -> Placement:
    """Return how a bare parameter is sharded: a linear's weight, experts stacked in front, or one number a head."""
    return Shard(max(ndim - 2, 0) if name.endswith("colwise") else ndim - 1)


def _is_fused(module: nn.Module, parameter: str, name: str) -> bool:
    """Return whether a bare parameter is gate and up, one after the other.

    Experts say how the two are fused: so, or row by row, whose halves are no parts. Some plans say "colwise" of
    the former.
    """
    fused = name.startswith("packed") or parameter == "gate_up_proj"
    return fused and bool(getattr(module, "is_concatenated", True))


def _tail(model: nn.Module, fqn: str, _name: str, _names: Mapping[str, str]) -> ParallelStyle | None:
    """Return the style of a latent projection, of whose features the last go to every head, as its attention says.

    Raises:
        LookupError: neither the attention module nor the configuration says how many.
    """
    for source in (model.get_submodule(fqn.rpartition(".")[0]), _text_config(model)):
        width = getattr(source, "qk_rope_head_dim", None)
        if isinstance(width, int):
            return SumTailGradient(width) if width else None
    raise LookupError(fqn)


def _text_config(model: nn.Module | None) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _input_is_whole(model: nn.Module, fqn: str, names: Mapping[str, str]) -> bool:
    """Return whether the plan has no column layer beside a row layer, to make its input.

    A plan may name a layer that only some variants of a block share, such as the output projection of linear
    attention, whose other projections it leaves whole.
    """
    scope = fqn
    while scope and isinstance(model.get_submodule(fqn), nn.Linear):
        scope = scope.rpartition(".")[0]
        inside = [
            f"{scope}.{name}".lstrip(".")
            for name, module in model.get_submodule(scope).named_modules()
            if isinstance(module, nn.Linear)
        ]
        if len(inside) > 1:
            columns = [key for key, name in names.items() if name in _COLUMNS]
            return not any(matches(key, other) for key in columns for other in inside)
    return False


def _reason(model: nn.Module | None, name: object) -> str:
    """Return why a style name has no answer."""
    if name in _UNSUPPORTED:
        return f"{name!r} is not supported: {_UNSUPPORTED[str(name)]}"
    if name in _SPECIAL:
        return f"{name!r} depends on the model: {_missing(model, name)}"
    known = (*_STYLES, *_UNSUPPORTED, *_SPECIAL)
    return f"{name!r} is not a style that transformers has{did_you_mean(name, known)}"


def _missing(model: nn.Module | None, name: object) -> str:
    """Return what of the model a style would need to know."""
    if model is None:
        return "pass the model instead of a dict"
    if name == "mla_kv_a_proj":
        return "its config has no qk_rope_head_dim"
    return "here it names a module, not a parameter of experts; name the parameter"


def _shard_tied_embedding(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Shard the input embedding as the tied output head is sharded; older plans name only the head."""
    modules = dict(model.named_modules())
    heads = [fqn for fqn, m in modules.items() if isinstance(m, nn.Linear) and _style_for(plan, fqn)]
    tied = {id(modules[fqn].weight) for fqn in heads}
    for fqn, module in modules.items():
        if isinstance(module, nn.Embedding) and id(module.weight) in tied and not _style_for(plan, fqn):
            plan[fqn] = _embedding_rows()


def _style_for(plan: Mapping[str, ParallelStyle], fqn: str) -> ParallelStyle | None:
    return next((style for key, style in plan.items() if matches(key, fqn)), None)
