"""Warn about uncomputed buffers of a model that was created on the meta device."""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from namedmesh._torch import is_persistent, was_written
from namedmesh.errors import format_items

# By module: the names of non-persistent buffers that were on the meta device and have not been
# assigned since.
_uncomputed: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
# The handle of torch's hook for buffers. There is one hook for the process.
_registration_hooks: list[Any] = []
# The handles of the hooks that warn in the first forward, by model.
_forward_hooks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def watch_buffers(model: nn.Module) -> None:
    """Warn in the first forward about non-persistent buffers with uninitialized memory.

    ``to_empty()`` allocates such a buffer, often the frequencies of rotary embeddings. It is in no
    state dict, so neither a checkpoint nor ``init_parameters`` fills it. A buffer counts as
    computed once it was assigned or written in place. The warning is given once for a model.

    Args:
        model: the model, which may have buffers on the meta device.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and not is_persistent(module, name):
                _uncomputed.setdefault(module, set()).add(name)
    if not _uncomputed:
        return
    if not _registration_hooks:
        _registration_hooks.append(register_module_buffer_registration_hook(_mark_computed))
    _forward_hooks[model] = model.register_forward_pre_hook(_warn_of_uncomputed)


def _mark_computed(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    """Mark a buffer as computed: a hook of its assignment, but not of ``to_empty()``."""
    if module in _uncomputed and buffer is not None and not buffer.is_meta:
        _uncomputed[module].discard(name)


def _warn_of_uncomputed(model: nn.Module, _args: Any) -> None:
    """Warn about buffers that are still uncomputed: a pre-hook of the first forward."""
    # A copy of the model has the hook, but it is not in the table.
    if torch.compiler.is_compiling() or model not in _forward_hooks:
        return
    _forward_hooks.pop(model).remove()
    names = []
    for prefix, module in model.named_modules():
        for name in sorted(_uncomputed.pop(module, ())):
            qualified_name = f"{prefix}.{name}".removeprefix(".")
            if not was_written(module.get_buffer(name)):
                names.append(qualified_name)
    if names:
        warnings.warn(
            f"{format_items(names)}: non-persistent buffers of a model that was on the meta device. No "
            f"checkpoint has them, and after to_empty() they hold uninitialized memory. Compute them "
            f"again after to_empty(), before the first forward.",
            stacklevel=2,
        )
