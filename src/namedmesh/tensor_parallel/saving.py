"""``save_pretrained`` of a Hugging Face model whose parameters are DTensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn


def save_whole_tensors(model: nn.Module) -> None:
    """Let the ``save_pretrained`` of a Hugging Face model write whole tensors, on rank 0; others are left alone.

    Afterwards every rank that shares a parameter calls ``model.save_pretrained(...)``, which gathers one parameter
    after the other.
    """
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = partial(_save_pretrained, model)


def _save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Any] | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Write what ``save_pretrained`` of the class would of the model that is not sharded."""
    writes = is_main_process and dist.get_rank() == 0
    whole = _whole(model.state_dict() if state_dict is None else state_dict, keep=writes)
    saved = type(model).save_pretrained(model, save_directory, writes, whole, *arguments, **options)
    dist.barrier()  # nobody reads what is being written
    return saved


def _whole(state_dict: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return the tensors of a state dict, gathered on the CPU; those that share memory still do."""
    whole: dict[str, Any] = {}
    gathered: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for name, value in state_dict.items():
        result = value
        if isinstance(value, DTensor):
            place = (value.to_local().data_ptr(), value.shape)
            if place not in gathered:
                full = value.full_tensor().detach()
                gathered[place] = full.cpu() if keep else full[:0]
            result = gathered[place]
        if keep:
            whole[name] = result
    return whole
