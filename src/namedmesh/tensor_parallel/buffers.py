"""Buffers that no checkpoint fills: a model that was made on the meta device has to compute them again."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from namedmesh._torch import is_persistent, was_written
from namedmesh.errors import format_items

# The names of non-persistent buffers that were on the meta device, by module, until somebody computes them again.
_uncomputed: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_watching: list[Any] = []
_first_forward: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def watch_buffers(model: nn.Module) -> None:
    """Warn once, in the first forward, of non-persistent buffers that ``to_empty()`` left as uninitialized memory.

    Such a buffer, as the frequencies of rotary embeddings often are, is in no state dict, so neither a checkpoint nor
    ``init_parameters`` fills it. It counts as computed once it was assigned or written in place.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and not is_persistent(module, name):
                _uncomputed.setdefault(module, set()).add(name)
    if not _uncomputed:
        return
    if not _watching:
        _watching.append(register_module_buffer_registration_hook(_note_assignment))
    _first_forward[model] = model.register_forward_pre_hook(_name_uncomputed)


def _note_assignment(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    """Take note of a buffer that was assigned; ``to_empty()`` goes past this hook of torch's."""
    if module in _uncomputed and buffer is not None and not buffer.is_meta:
        _uncomputed[module].discard(name)


def _name_uncomputed(model: nn.Module, _args: Any) -> None:
    # A copy of the model has the hook, and no entry here.
    if torch.compiler.is_compiling() or model not in _first_forward:
        return
    _first_forward.pop(model).remove()
    names = []
    for prefix, module in model.named_modules():
        for name in sorted(_uncomputed.pop(module, ())):
            qualified = f"{prefix}.{name}".removeprefix(".")
            if not was_written(module.get_buffer(name)):
                names.append(qualified)
    if names:
        warnings.warn(
            f"{format_items(names)}: non-persistent buffers of a model that was on the meta device. No checkpoint has them, and after "
            "to_empty() they hold uninitialized memory. Compute them again after to_empty(), before the first forward.",
            stacklevel=2,
        )
