"""Low-rank adapters (LoRA, as PEFT puts them around linears): sharded as the layer that they adapt needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from namedmesh.tensor_parallel.local import LocalParameters
from namedmesh.tensor_parallel.styles import RowwiseParallel as FastRowwiseParallel

if TYPE_CHECKING:
    from namedmesh.tensor_parallel.placements import Entry


def with_adapters(entries: list[Entry]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the entries, with those of adapted linears for what is inside; and the names of those with no answer, and why.

    An adapter adds ``B(A(x))`` to the layer's output. Beside a column layer every rank computes the few features
    of ``A(x)``, and B is a column layer, too; beside a row layer A is one, and B gets the sum.
    """
    found: list[Entry] = []
    reasons = []
    for entry in entries:
        if not isinstance(getattr(entry.module, "base_layer", None), nn.Module):
            found.append(entry)
        elif reason := _reason(entry):
            reasons.append((entry.fqn, reason))
        else:
            found += _inside(entry)
    return found, reasons


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
    layouts = style.input_layouts[0], style.output_layouts[0]
    if isinstance(style, ColwiseParallel):
        sharded, whole, between = "lora_B", "lora_A", layouts[0]
    else:
        sharded, whole, between = "lora_A", "lora_B", layouts[1]
        style = FastRowwiseParallel(input_layouts=layouts[0], output_layouts=layouts[1])
    found = [replace(entry, fqn=f"{entry.fqn}.base_layer", module=module.base_layer)]
    for name in module.lora_A:
        inner = getattr(module, sharded)[name]
        found.append(replace(entry, fqn=f"{entry.fqn}.{sharded}.{name}", module=inner, style=style))
        # Where each rank has its shard of the sequence, it makes a part of the gradient.
        if isinstance(between, Shard):
            inner = getattr(module, whole)[name]
            fqn = f"{entry.fqn}.{whole}.{name}"
            found.append(replace(entry, fqn=fqn, module=inner, style=LocalParameters()))
    return found
