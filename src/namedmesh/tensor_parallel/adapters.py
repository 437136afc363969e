"""Low-rank adapters (LoRA, as PEFT puts them around linears): sharded as the layer that they adapt needs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from namedmesh.errors import listing
from namedmesh.tensor_parallel.local import LocalParameters
from namedmesh.tensor_parallel.styles import RowwiseParallel as FastRowwiseParallel

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from namedmesh.tensor_parallel.placements import Entry


def adapted_model(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the model inside of a ``PeftModel``, and its name there; None for any other model."""
    if not hasattr(model, "get_base_model"):
        return None
    inner: nn.Module = model.get_base_model()  # type: ignore[operator]  # a method, not a module
    name = next((fqn for fqn, module in model.named_modules() if module is inner), None)
    return None if name is None else (name, inner)


def with_adapters(entries: list[Entry]) -> tuple[list[Entry], list[str]]:
    """Return the entries, with those of adapted linears for what is inside; and a sentence for each that has no answer.

    An adapter adds ``B(A(x))`` to the layer's output. Beside a column layer every rank computes the few features
    of ``A(x)``, and B is a column layer, too; beside a row layer A is one, and B gets the sum.
    """
    found: list[Entry] = []
    places: dict[str, list[str]] = {}
    for entry in entries:
        if not isinstance(getattr(entry.module, "base_layer", None), nn.Module):
            found.append(entry)
            continue
        reason = _reason(entry)
        if reason is None:
            found += _inside(entry)
        else:
            places.setdefault(reason, []).append(entry.fqn)
    return found, [f"{listing(fqns, 3)}: {reason}" for reason, fqns in places.items()]


def _reason(entry: Entry) -> str | None:
    """Return why an adapted module cannot be sharded."""
    module = entry.module
    kind = f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"
    if not isinstance(entry.style, ColwiseParallel | RowwiseParallel) or not isinstance(
        module.base_layer, nn.Linear
    ):
        around = type(module.base_layer).__name__
        return f"{kind} is an adapter around {around}, and only LoRA around nn.Linear can be sharded, by a column or row style"
    first, second = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    if not isinstance(first, nn.ModuleDict) or not isinstance(second, nn.ModuleDict):
        return f"{kind} is an adapter other than LoRA, which cannot be sharded; merge it into the model first"
    variant = [name for name in ("lora_magnitude_vector", "lora_variant") if len(getattr(module, name, ()))]
    if variant:
        return f"{kind} is a variant of LoRA ({variant[0]}), which cannot be sharded; merge it into the model first"
    return None


def _inside(entry: Entry) -> list[Entry]:
    module: Any = entry.module
    style: Any = entry.style
    column = isinstance(style, ColwiseParallel)
    found = [replace(entry, fqn=f"{entry.fqn}.base_layer", module=module.base_layer)]
    for name in module.lora_A:
        pair = {"lora_A": module.lora_A[name], "lora_B": module.lora_B[name]}
        sharded, whole = ("lora_B", "lora_A") if column else ("lora_A", "lora_B")
        own: ParallelStyle = copy.copy(style) if column else _row_like(style)
        found.append(replace(entry, fqn=f"{entry.fqn}.{sharded}.{name}", module=pair[sharded], style=own))
        between = style.input_layouts[0] if column else style.output_layouts[0]
        if isinstance(
            between, Shard
        ):  # each rank has its shard of the sequence, and makes a part of the gradient
            fqn = f"{entry.fqn}.{whole}.{name}"
            found.append(replace(entry, fqn=fqn, module=pair[whole], style=LocalParameters()))
    return found


def _row_like(style: RowwiseParallel) -> RowwiseParallel:
    return FastRowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=style.output_layouts[0])
