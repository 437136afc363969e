"""Which parameters a style shards, and how: arithmetic on a module's shapes, with nothing communicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from namedmesh._torch import has_hooks
from namedmesh.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor.placement_types import Placement

_SHARDING = (ColwiseParallel, RowwiseParallel)
_PREPARING = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)


@dataclass(frozen=True)
class Entry:
    """One module of the model and the style that the plan gives it.

    Args:
        fqn: the module's fully qualified name; empty for the model itself.
        module: the module.
        style: what will be applied to it.
        key: the key of the plan that names it.
    """

    fqn: str
    module: nn.Module
    style: ParallelStyle
    key: str


class ActivationStyle(ParallelStyle):
    """A style that leaves a module's parameters alone: it works on what goes in or comes out."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def parameter_placements(self, module: nn.Module) -> dict[str, Placement]:  # noqa: ARG002  none, for any
        """Return nothing: the style touches no parameters."""
        return {}


def parameter_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement] | None:
    """Return how a style lays out each parameter of a module that it fits; None if only the style itself knows.

    A style of somebody else's may answer with a method ``parameter_placements(module)``.
    """
    own: Callable[[nn.Module], dict[str, Placement]] | None = getattr(style, "parameter_placements", None)
    if own is not None:
        return own(module)
    if isinstance(style, _SHARDING):
        return _sharded_placements(style, module)
    if isinstance(style, SequenceParallel):
        return {name: Replicate() for name, _ in module.named_parameters()}
    if isinstance(style, _PREPARING):
        return {}
    return None


def _sharded_placements(style: ParallelStyle, module: nn.Module) -> dict[str, Placement]:
    column = isinstance(style, ColwiseParallel)
    if isinstance(module, nn.Embedding):
        return {"weight": Shard(1) if column else Shard(0)}
    placements: dict[str, Placement] = {"weight": Shard(0) if column else Shard(1)}
    if getattr(module, "bias", None) is not None:
        placements["bias"] = Shard(0) if column else Replicate()
    return placements


def incompatibilities(style: ParallelStyle, module: nn.Module) -> list[str]:
    """Return why a style cannot be applied to a module whatever the number of ranks: a sentence for each reason.

    A style of somebody else's may answer with a method ``incompatibilities(module)``.
    """
    name = type(style).__name__
    touched = parameter_placements(style, module)
    named = [each for each in module.named_parameters() if touched is None or each[0] in touched]
    already = [each for each, parameter in named if isinstance(parameter, DTensor)]
    hooked = [each for each, parameter in named if has_hooks(parameter)]
    if hooked:
        return [
            f"{' and '.join(hooked)} has a hook, which the DTensor in its place would not have; register it afterwards"
        ]
    if already and not accepts_sharded_module(style):
        reason = (
            f"{name} finds a module that is already distributed ({', '.join(already)} is a DTensor); "
            f"parallelize a model once, and before fully_shard"
        )
        return [reason]
    own: Callable[[nn.Module], list[str]] | None = getattr(style, "incompatibilities", None)
    if own is not None:
        return own(module)
    if isinstance(style, _SHARDING):
        return _sharding_problems(style, module)
    if isinstance(style, SequenceParallel):
        return _nesting_problems(style, module)
    return []


def refuse_incompatible(style: ParallelStyle, module: nn.Module) -> None:
    """Raise a PlanError if a style cannot be applied to a module."""
    problems = incompatibilities(style, module)
    if problems:
        raise PlanError(*(f"{type(module).__name__}: {problem}" for problem in problems))


def _nesting_problems(style: ParallelStyle, module: nn.Module) -> list[str]:
    nested = next((name for name, _ in module.named_parameters() if "." in name), None)
    if nested is None:
        return []
    reason = (
        f"{type(style).__name__} takes a module that owns its parameters itself, such as a norm, but this "
        f"one has {nested!r}; name the inner modules in the plan"
    )
    return [reason]


def _sharding_problems(style: ParallelStyle, module: nn.Module) -> list[str]:
    name = type(style).__name__
    if not isinstance(module, nn.Linear | nn.Embedding):
        reason = (
            f"{name} fits nn.Linear and nn.Embedding, not {type(module).__name__}; use SequenceParallel for "
            f"a norm, or leave this module out of the plan"
        )
        return [reason]
    reasons = []
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        reasons.append(
            "nn.MultiheadAttention computes with its weight and does not call it; leave it out of the plan"
        )
    own_names = {each for each, _ in module.named_parameters(recurse=False)}
    reasons += [
        f"its {computed} is computed from other parameters at every forward; remove the parametrization (torch.nn.utils."
        "parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm), or leave the module out of the plan"
        for computed in sorted({*_sharded_placements(style, module)} - own_names)
    ]
    if isinstance(module, nn.Linear):
        return reasons
    if module.max_norm is not None:
        reasons.append(f"{name} cannot keep max_norm={module.max_norm} of an embedding; use max_norm=None")
    if module.sparse:
        reasons.append(f"{name} has no sparse gradients for an embedding; use sparse=False")
    if module.scale_grad_by_freq and isinstance(style, RowwiseParallel):
        reasons.append(
            f"{name} cannot scale an embedding's gradients by frequency; use ColwiseParallel, or "
            f"scale_grad_by_freq=False"
        )
    return reasons


def whole_sides(style: ParallelStyle) -> tuple[bool, bool]:
    """Return whether a module's first input, and its output, are the same on every rank, as its style has them.

    A style of somebody else's may answer with attributes ``whole_input`` and ``whole_output``.
    """
    if isinstance(style, _SHARDING):
        whole_output = isinstance(style.output_layouts[0], Replicate) and style.use_local_output
        return isinstance(style.input_layouts[0], Replicate), whole_output
    return bool(getattr(style, "whole_input", False)), bool(getattr(style, "whole_output", False))


def accepts_sharded_module(style: ParallelStyle) -> bool:
    """Return whether a style takes a module that another style has distributed over another axis."""
    return bool(getattr(style, "takes_distributed", False))


def placement_name(placement: Placement) -> str:
    """Return a placement in words that mean the same on every version of torch.

    Example:
        >>> placement_name(Shard(0)), placement_name(Replicate())
        ('Shard(0)', 'Replicate()')
    """
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else f"{type(placement).__name__}()"
