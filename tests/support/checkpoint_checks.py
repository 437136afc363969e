"""Helpers of the tests of checkpoints: small models with optimizers, failing writes, comparisons."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from tensors import compute_difference, full_tensor
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

INTERRUPTED = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=KeyboardInterrupt)
DISK_FULL = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError(28, "No space left"))


def list_files(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if not each.name.startswith("."))


def make_constant_job(number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer in which every value is ``number``."""
    model = nn.ModuleDict({str(each): nn.Linear(4, 4) for each in range(2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return model, optimizer


def distinct_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    return {value for each in collect_values(model, optimizer).values() for value in each.flatten().tolist()}


def describe_states(optimizer: torch.optim.Optimizer) -> list[str]:
    return [str(sorted(each.items())) for each in optimizer.state.values()]


def make_adam(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def collect_values(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(net.state_dict())
    for name, parameter in net.named_parameters():
        found |= {f"{name}:{key}": value for key, value in optimizer.state[parameter].items()}
    return {key: full_tensor(each).clone() for key, each in found.items()}


def max_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return torch.tensor([compute_difference(value, other[key]) for key, value in one.items()]).max().item()


def run_in_turn(cases: tuple[Callable[[Path], None], ...], root: Path) -> None:
    for case in cases:
        torch.manual_seed(0)
        (root / case.__name__).mkdir(exist_ok=True)
        case(root / case.__name__)
