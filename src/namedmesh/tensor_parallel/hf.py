"""Hugging Face's tensor-parallel plans: names of styles, read into the styles themselves."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from namedmesh.errors import PlanError, did_you_mean
from namedmesh.sizes import SharedHeads
from namedmesh.tensor_parallel.experts import IdentityExpert, ShardedExperts
from namedmesh.tensor_parallel.heads import KeyValueParallel
from namedmesh.tensor_parallel.modules import LocalParameters, SumOutput, SumTailGradient
from namedmesh.tensor_parallel.plan import matches
from namedmesh.tensor_parallel.styles import ColwiseParallel, RowEmbedding, RowwiseParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.distributed.tensor.placement_types import Placement

T = TypeVar("T")


class RowwiseEmbedding(RowwiseParallel):
    """Embeddings that have a forward of their own, as transformers', work on what that of ``nn.Embedding`` returns: all of it."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate())

    def kind_of(self, module: nn.Module) -> type | None:
        """Return the module's class again, with the short way's where its ``super().forward`` goes."""
        own: Any = type(module)
        return super().kind_of(module) or _on_row_embedding(own)


@cache
def _on_row_embedding(own: Any) -> type:
    return type(own.__name__, (own, RowEmbedding), {"__module__": own.__module__})


class AttentionGroups(LocalParameters):
    """Say to an attention module how many of a rank's queries share a kv head, where the ranks do not divide those."""

    def __init__(self, placements: Mapping[str, Placement], query_heads: int, kv_heads: int) -> None:
        super().__init__(placements)
        self.heads = query_heads, kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.heads[1] % device_mesh.size():
            setattr(module, _GROUPS, SharedHeads(*self.heads, device_mesh.size()).repeats)
        return super()._apply(module, device_mesh)


_SUMMED = "replicated_with_grad_allreduce"
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(
        ("colwise_gather_output", "colwise_rep", "embedding_colwise"),
        lambda: ColwiseParallel(output_layouts=Replicate()),
    ),
    **dict.fromkeys(
        ("rowwise_split_input", "rowwise_rep"), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
    "embedding_rowwise": RowwiseEmbedding,
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    _SUMMED: LocalParameters,
    "all_reduce": SumOutput,
    "moe_identity_expert": IdentityExpert,
}
_OF_WHOLE_EXPERTS = ("grouped_gemm", "ep_dispatch_experts")
# What shards a bare parameter, one that is no module's weight or bias, and what its module needs for that.
_BARE = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
_COLUMNS = ("colwise", "packed_colwise")
_OWNERS = ("local_params", "moe_tp_experts", "all_reduce")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value")
"""What the plans of transformers call the projections to keys and values, or the module around one."""
_BY_HEAD = ("query_key_value", "kv_b_proj", "q_b_proj", "q_proj")
"""What they call layers whose features lie head by head, each with what the row layer does not take: keys, a gate, what is latent."""
_GROUPS = "num_key_value_groups"
"""The attribute in which an attention module of transformers keeps how many queries share a kv head."""
_QUERY_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
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
_OTHER = ("replicate", "mla_kv_a_proj", "packed_colwise", "packed_rowwise", "local_params", "moe_tp_experts")


def plan_from_hf(
    model_or_plan: nn.Module | Mapping[str, str], *, leave_out: Sequence[str] = ()
) -> dict[str, ParallelStyle]:
    """Read a Hugging Face tensor-parallel plan into one for ``parallelize``.

    From a model, the plan is its configuration's ``base_model_tp_plan`` (with the base model's prefix) and
    its own ``_tp_plan``. Such a plan is written for all
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
    if isinstance(model_or_plan, Mapping):
        model, names = None, dict(model_or_plan)
    else:
        model, names = model_or_plan, _names_of(model_or_plan)
    left_out = {pattern: fnmatch.filter(names, pattern) for pattern in leave_out}
    idle = [pattern for pattern, keys in left_out.items() if not keys]
    if idle:
        raise PlanError(*(f"leave_out: {pattern!r} matches no entry of the plan" for pattern in idle))
    for key in {key for keys in left_out.values() for key in keys}:
        del names[key]
    reason = _WRONG_ATTENTION.get(_model_type(model))
    if reason is not None and any(".self_attn." in key for key in names):
        raise PlanError(
            f"the attention of {type(model).__name__} cannot be sharded as its plan says: {reason}; leave it out: "
            f"plan_from_hf(model, leave_out=['*.self_attn.*'])"
        )
    plan = _Reader(model, names).plan()
    if model is not None:
        _shard_tied_embedding(model, plan)
    return plan


def _names_of(model: nn.Module) -> dict[str, str]:
    """Return the style names that a model states, by names of modules and parameters that it has."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"plan_from_hf reads a model or a dict of style names, not a {type(model).__name__}")
    stated: dict[str, str] = {}
    base = getattr(model, "base_model", model)
    prefix = next((f"{fqn}." for fqn, module in model.named_modules() if module is base and fqn), "")
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


class _Reader:
    """What names of styles, by names of modules and parameters, say of a model, or of any model."""

    def __init__(self, model: nn.Module | None, names: Mapping[str, str]) -> None:
        self.model, self.names = model, names
        self.modules = {} if model is None else dict(model.named_modules(remove_duplicate=False))
        self.counts: list[tuple[str, str, KeyValueParallel]] = []  # keys and values, by their key and name

    def plan(self) -> dict[str, ParallelStyle]:
        """Return the whole plan; a PlanError names every entry that has no answer."""
        plan: dict[str, ParallelStyle] = {}
        problems = []
        for key, name in self.names.items():
            try:
                plan.update(self._entries(key, name))
            except LookupError as error:  # noqa: PERF203  all of them at once
                problems.append(f"{key!r}: {name!r} {error.args[0]}; change or remove this entry")
        if problems:
            raise PlanError(*problems)
        self._add_attention(plan)
        return plan

    def _entries(self, key: str, name: str) -> dict[str, ParallelStyle]:  # noqa: C901  one question after the other
        """Return what one key comes to: itself, one entry a module where they differ, or nothing.

        Raises:
            LookupError: why the name has no answer.
        """
        if name == "replicate":
            return {}
        if name in _OF_WHOLE_EXPERTS:
            raise LookupError(
                "is not supported: it gives each rank whole experts (expert parallelism), while tensor parallelism gives "
                "each rank a shard of every expert"
            )
        if self.model is None:
            if name in _OTHER:
                raise LookupError("depends on the model: pass the model instead of a dict")
            return {key: _style_of(name)}
        found = [fqn for fqn in self.modules if matches(key, fqn)]
        if not found:
            owner = self.names.get(key.rpartition(".")[0])
            if owner in _OWNERS and name in _BARE:  # whose entry shards it
                return {}
            raise LookupError(
                "shards a bare parameter, which needs 'local_params' or 'moe_tp_experts' at its module"
            )
        if all(isinstance(self.modules[fqn], nn.ModuleList) for fqn in found):
            key = f"{key}.*"
            found = [fqn for fqn in self.modules if matches(key, fqn)]
        styles = {fqn: self._style(fqn, name) for fqn in found}
        alike = len({repr(style) for style in styles.values()}) == 1
        for fqn, style in styles.items():
            if isinstance(style, KeyValueParallel) and style.query_heads != style.kv_heads:
                self.counts.append((key if alike else fqn, fqn, style))
        if alike:
            styles = {key: styles[found[0]]}
        return {fqn: style for fqn, style in styles.items() if style is not None}

    def _add_attention(self, plan: dict[str, ParallelStyle]) -> None:
        """Add the attention around keys and values that has to be told how many queries share a head."""
        for key, fqn, style in self.counts:
            around = next((each for each in _around(fqn) if hasattr(self.modules[each], _GROUPS)), None)
            if around is None:
                continue
            place = ".".join(key.split(".")[: around.count(".") + 1])
            if any(
                each != place and matches(place, each) for each in plan
            ):  # each layer has an entry of its own
                place = around
            known = plan.get(place)
            if known is None or type(known) is LocalParameters:
                given = known.parameter_placements(self.modules[around]) if known else {}
                plan[place] = AttentionGroups(given, style.query_heads, style.kv_heads)

    def _style(self, fqn: str, name: str) -> ParallelStyle | None:
        """Return the style of one module; None where it stays whole."""
        if name in _OWNERS:
            return self._owner(fqn, name)
        if name == "mla_kv_a_proj":
            return self._tail(fqn)
        if name == "colwise" and isinstance(self.modules[fqn], nn.Linear):
            heads = self._heads(fqn)
            if heads is not None and any(token in _KEYS_AND_VALUES for token in fqn.split(".")[-2:]):
                return KeyValueParallel(*heads)
            return ColwiseParallel(heads=heads[0] if heads and fqn.endswith(_BY_HEAD) else None)
        if name == "rowwise" and self._input_is_whole(fqn):
            return None
        return _style_of(name)

    def _owner(self, fqn: str, name: str) -> ParallelStyle | None:
        """Return the style of a module whose own parameters the plan names, for those that it has."""
        module = self.modules[fqn]
        placements: dict[str, Placement] = {}
        fused = {}
        for parameter, value in module.named_parameters(recurse=False):
            style = _stated_for(self.names, f"{fqn}.{parameter}") or ""
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
            return SumOutput() if name == "all_reduce" else None
        return (
            LocalParameters(placements) if name == "local_params" else ShardedExperts(placements, fused=fused)
        )

    def _heads(self, fqn: str) -> tuple[int, int] | None:
        """Return how many heads of queries, and of keys and values, the nearest module around one states, or its configuration."""
        for around in _around(fqn):
            module = self.modules[around]
            for source in (module, _own_config(module)):
                queries, keys = _first_count(source, _QUERY_HEADS), _first_count(source, _KV_HEADS)
                groups = _first_count(module, (_GROUPS,))  # what the module says of itself counts more
                if queries and groups and queries % groups == 0:
                    keys = queries // groups
                if queries:
                    return queries, keys or queries
        return None

    def _tail(self, fqn: str) -> ParallelStyle | None:
        """Return the style of a latent projection, of whose features the last go to every head, as its attention says."""
        for source in (self.modules[fqn.rpartition(".")[0]], _text_config(self.model)):
            width = getattr(source, "qk_rope_head_dim", None)
            if isinstance(width, int):
                return SumTailGradient(width) if width else None
        raise LookupError("depends on the model: its config has no qk_rope_head_dim")

    def _input_is_whole(self, fqn: str) -> bool:
        """Return whether the plan has no column layer beside a row layer, to make its input.

        A plan may name a layer that only some variants of a block share, such as the output projection of linear
        attention, whose other projections it leaves whole.
        """
        columns = [key for key, name in self.names.items() if name in _COLUMNS]
        scope = fqn
        while scope and isinstance(self.modules[fqn], nn.Linear):
            scope = scope.rpartition(".")[0]
            inside = [
                f"{scope}.{name}".lstrip(".")
                for name, module in self.modules[scope].named_modules()
                if isinstance(module, nn.Linear)
            ]
            if len(inside) > 1:
                return not any(matches(key, other) for key in columns for other in inside)
        return False


def _style_of(name: str) -> ParallelStyle:
    """Return the style that a name alone means."""
    if name in _STYLES:
        return _STYLES[name]()
    if name in _OTHER:
        raise LookupError(
            "depends on the model: here it names a module, not a parameter of experts; name the parameter"
        )
    known = (*_STYLES, *_OF_WHOLE_EXPERTS, *_OTHER)
    raise LookupError(f"is not a style that transformers has{did_you_mean(name, known)}")


def _around(fqn: str) -> list[str]:
    """Return the names of the modules around one, the nearest first."""
    found = []
    while fqn:
        fqn = fqn.rpartition(".")[0]
        found.append(fqn)
    return found


def _own_config(module: nn.Module) -> object:
    """Return a module's configuration; that of its layer, where transformers' layers differ."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None or index is None else layers[index]


def _first_count(source: object, names: Sequence[str]) -> int | None:
    """Return the first attribute that is a count; one that differs between layers is a RuntimeError in transformers."""
    for name in names:
        with suppress(RuntimeError):
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _text_config(model: nn.Module | None) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _shard_tied_embedding(model: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Shard the input embedding as the tied output head is sharded; older plans name only the head."""
    modules = dict(model.named_modules())
    planned = {fqn for fqn in modules if _stated_for(plan, fqn) is not None}
    tied = {id(modules[fqn].weight) for fqn in planned if isinstance(modules[fqn], nn.Linear)}
    for fqn, module in modules.items():
        if isinstance(module, nn.Embedding) and id(module.weight) in tied and fqn not in planned:
            plan[fqn] = RowwiseEmbedding()


def _stated_for(plan: Mapping[str, T], fqn: str) -> T | None:
    """Return what a plan says of a name, by the first of its keys that matches."""
    return next((style for key, style in plan.items() if matches(key, fqn)), None)
