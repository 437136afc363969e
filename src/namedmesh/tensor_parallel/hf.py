"""Hugging Face's tensor-parallel plans: names of styles, read into the styles themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh._torch import strided_shard
from namedmesh.errors import PlanError, did_you_mean
from namedmesh.tensor_parallel.experts import IdentityExpert, ShardedExperts
from namedmesh.tensor_parallel.kv_heads import KeyValueParallel, names_keys_or_values
from namedmesh.tensor_parallel.local import LocalParameters, SumOutput, SumTailGradient
from namedmesh.tensor_parallel.plan import matches
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement


def _gathered_columns() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _whole_input_rows() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _gathered_columns,
    "colwise_rep": _gathered_columns,
    "rowwise_split_input": _whole_input_rows,
    "rowwise_rep": _whole_input_rows,
    "embedding_rowwise": _whole_input_rows,
    "embedding_colwise": _gathered_columns,
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "replicated_with_grad_allreduce": LocalParameters,
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
_OWNERS = ("local_params", "moe_tp_experts", "all_reduce")
# Handled one by one, with a look at the model or at the rest of the plan.
_SPECIAL = ("replicate", "mla_kv_a_proj", "packed_colwise", "packed_rowwise", "local_params", "moe_tp_experts")


def plan_from_hf(model_or_plan: nn.Module | Mapping[str, str]) -> dict[str, ParallelStyle]:
    """Read a Hugging Face tensor-parallel plan into one for ``parallelize``.

    From a model, the plan is its configuration's ``base_model_tp_plan`` (with the base model's prefix) and
    its own ``_tp_plan``. Such a plan is written for all variants of an architecture, so what it says about
    modules that this model does not have is left out; and if the output head of the model is tied to its
    input embedding, the embedding is cut along the vocabulary too, as the head is.

    Args:
        model_or_plan: a ``PreTrainedModel``, or a plan: a dict of module names to style names.

    Returns:
        A dict of module names to styles. A module that every rank keeps whole (``"replicate"``) is not in it.

    Raises:
        PlanError: if the model has no plan; or with every style that is unknown or not supported.

    Example:
        >>> from namedmesh.tensor_parallel import plan_from_hf
        >>> plan = plan_from_hf({"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"})
        >>> for name, style in plan.items():
        ...     print(name, type(style).__name__)
        layers.*.mlp.up_proj ColwiseParallel
        layers.*.mlp.down_proj RowwiseParallel
    """
    model = None
    if isinstance(model_or_plan, Mapping):
        names = dict(model_or_plan)
    else:
        model = model_or_plan
        names = _names_of(model)
    bare = _bare_parameters(model, names)
    plan: dict[str, ParallelStyle] = {}
    problems = []
    for key, name in names.items():
        if name == "replicate" or key in bare:
            continue
        style = _style(model, key, name, bare)
        if style is None:
            problems.append(f"{key!r}: {_reason(model, name)}; change or remove this entry")
        else:
            plan[key] = style
    problems += [
        f"{key!r}: {name!r} shards a bare parameter, which needs 'local_params' or 'moe_tp_experts' at its module; "
        f"change or remove this entry"
        for key, (owner, name) in bare.items()
        if names.get(owner) not in _OWNERS or name not in _BARE
    ]
    if problems:
        raise PlanError(*problems)
    if model is not None:
        _cut_tied_embedding(model, plan)
    return plan


def _names_of(model: nn.Module) -> dict[str, str]:
    """The style names that a model states, by names of modules and parameters that it has."""
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
    there = [fqn for fqn, _ in model.named_modules(remove_duplicate=False)]
    there += [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return {key: name for key, name in stated.items() if any(matches(key, fqn) for fqn in there)}


def _base_prefix(model: nn.Module) -> str:
    """What the base model's names start with in this model: ``"model."``, or nothing for the base model."""
    base = getattr(model, "base_model", model)
    return next((f"{fqn}." for fqn, module in model.named_modules() if module is base and fqn), "")


def _bare_parameters(model: nn.Module | None, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The keys that name parameters instead of modules, with their owners' keys and their styles."""
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


def _style(
    model: nn.Module | None, key: str, name: str, bare: Mapping[str, tuple[str, str]]
) -> ParallelStyle | None:
    """The style that a name means, some with a look at the model; None if it cannot be told."""
    placements = {
        param.rpartition(".")[2]: _bare_placement(model, param, style)
        for param, (owner, style) in bare.items()
        if model is not None and owner == key
    }
    if name == "colwise" and names_keys_or_values(key):
        return KeyValueParallel()
    if name in _STYLES and not (name in _OWNERS and placements):
        return _STYLES[name]()
    if model is None:
        return None
    if name in _OWNERS:
        return LocalParameters(placements) if name == "local_params" else ShardedExperts(placements)
    width = getattr(_text_config(model), "qk_rope_head_dim", None)
    if name == "mla_kv_a_proj" and isinstance(width, int):
        return SumTailGradient(width)
    return None


def _bare_placement(model: nn.Module, key: str, name: str) -> Placement:
    """How a bare parameter is sharded: a linear's weight, experts stacked in front, or one number a head."""
    fqn, ndim = next((fqn, p.ndim) for fqn, p in model.named_parameters() if matches(key, fqn))
    dim = max(ndim - 2, 0) if name.endswith("colwise") else ndim - 1
    owner, _, own_name = fqn.rpartition(".")
    fused = name.startswith("packed") or own_name == "gate_up_proj"
    # Experts say how gate and up are fused: one after the other, or row by row, whose halves are no parts. Some
    # plans say "colwise" of the former.
    fused = fused and getattr(model.get_submodule(owner), "is_concatenated", True)
    return strided_shard(dim, 2) if fused else Shard(dim)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _reason(model: nn.Module | None, name: object) -> str:
    """Why a style name has no answer."""
    if name in _UNSUPPORTED:
        return f"{name!r} is not supported: {_UNSUPPORTED[str(name)]}"
    if name in _SPECIAL:
        return f"{name!r} depends on the model: {_missing(model, name)}"
    known = (*_STYLES, *_UNSUPPORTED, *_SPECIAL)
    return f"{name!r} is not a style that transformers has{did_you_mean(name, known)}"


def _missing(model: nn.Module | None, name: object) -> str:
    """What of the model a style would need to know."""
    if model is None:
        return "pass the model instead of a dict"
    if name == "mla_kv_a_proj":
        return "its config has no qk_rope_head_dim"
    return "here it names a module, not a parameter of experts; name the parameter"


def _cut_tied_embedding(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Cut the input embedding as the tied output head is cut; older plans name only the head."""
    modules = dict(model.named_modules())
    heads = [fqn for fqn, m in modules.items() if isinstance(m, nn.Linear) and _style_for(plan, fqn)]
    tied = {id(modules[fqn].weight) for fqn in heads}
    for fqn, module in modules.items():
        if isinstance(module, nn.Embedding) and id(module.weight) in tied and not _style_for(plan, fqn):
            plan[fqn] = _whole_input_rows()


def _style_for(plan: Mapping[str, ParallelStyle], fqn: str) -> ParallelStyle | None:
    return next((style for key, style in plan.items() if matches(key, fqn)), None)
