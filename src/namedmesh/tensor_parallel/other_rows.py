"""Column layers that work on other rows of their weight than the ones that a rank holds: blocks, and shared heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_module

from namedmesh.tensor_parallel.collectives import exchange, local_shard, whole_parameter
from namedmesh.tensor_parallel.linear import column, column_operand
from namedmesh.tensor_parallel.module_setup import StyleContext
from namedmesh.tensor_parallel.styles import shard_parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel

    from namedmesh.tensor_parallel.collectives import RankGroup


def with_forward(
    style: ColwiseParallel, module: nn.Module, mesh: DeviceMesh, kind: type[nn.Module], **attributes: Any
) -> nn.Module:
    """Lay out a linear's parameters as its style says, and give it the forward of another class."""
    distribute_module(module, mesh, shard_parameters(style))
    module.__class__ = kind
    setup = StyleContext(mesh, style.input_layouts[0], Shard(-1), use_local_output=True)
    for name, value in {"_setup": setup, **attributes}.items():
        setattr(module, name, value)
    return module


def rows_of(parameter: Tensor, blocks: Sequence[int], count: int) -> Tensor:
    """Return some of the ``count`` equal blocks of rows of a parameter that every rank has whole, as a plain tensor.

    The gradient of the parameter is summed over the ranks, each of which makes the part of its own blocks.
    """
    whole = whole_parameter(parameter)
    width = whole.shape[0] // count
    first, last = blocks[0], blocks[-1]
    if list(blocks) == list(range(first, last + 1)):
        return whole.narrow(0, first * width, (last + 1 - first) * width)
    index = torch.tensor(blocks, device=whole.device)
    picked: Tensor = whole.unflatten(0, (count, width)).index_select(0, index).flatten(0, 1)
    return picked


def column_of(module: nn.Module, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a column layer of this rank's rows: as many on every rank, wherever they come from."""
    setup: StyleContext = module._setup  # type: ignore[assignment]  # noqa: SLF001  the module is one of ours
    operand = column_operand(module, setup, value)
    return column(operand.value, weight, bias, *operand[1:])


@dataclass(frozen=True)
class Blocks:
    """Rows that lie in blocks, of each of which every rank works on its part, and holds others.

    What a rank holds is its shard of all rows, one after the other, as of any sharded weight.

    Args:
        sizes: the number of rows of each block.
        size: the number of ranks, which divides each of them.

    Example:
        Two blocks of 4 rows on 2 ranks: rank 0 holds rows 0 to 3 and works on 0, 1, 4 and 5, the last two of
        which rank 1 holds:

        >>> Blocks((4, 4), 2).moved(0, 0), Blocks((4, 4), 2).moved(1, 0)
        ([(0, 2)], [(4, 6)])
    """

    sizes: tuple[int, ...]
    size: int

    def moved(self, holder: int, worker: int) -> list[tuple[int, int]]:
        """Return the rows, from and to, that one rank holds and another one works on."""
        width = sum(self.sizes) // self.size
        start, found = 0, []
        for rows in self.sizes:
            part = rows // self.size
            low = max(holder * width, start + worker * part)
            high = min((holder + 1) * width, start + (worker + 1) * part)
            if low < high:
                found.append((low, high))
            start += rows
        return found

    def select(self, whole: Tensor, rank: int) -> Tensor:
        """Return the rows that a rank works on, out of all rows."""
        moves = [move for holder in range(self.size) for move in self.moved(holder, rank)]
        return torch.cat([whole[low:high] for low, high in moves])

    def collect(self, shard: Tensor, group: RankGroup) -> Tensor:
        """Return the rows that this rank works on, from the ranks that hold them; their gradients go back."""
        first = group.rank * shard.shape[0]
        sent = [self.moved(group.rank, worker) for worker in range(self.size)]
        received = [self.moved(holder, group.rank) for holder in range(self.size)]
        outgoing = torch.cat([shard[low - first : high - first] for ranges in sent for low, high in ranges])
        return exchange(outgoing, group, _lengths(sent), _lengths(received))

    def of(self, parameter: Tensor, group: RankGroup) -> Tensor:
        """Return the plain rows that this rank works on, of a parameter whose rows are sharded."""
        if torch.compiler.is_compiling() and isinstance(parameter, DTensor):
            # What the compiler knows to trace: all rows are gathered, and the parts of their gradients summed.
            return self.select(whole_parameter(parameter), group.rank)
        return self.collect(local_shard(parameter), group)


def _lengths(moves: list[list[tuple[int, int]]]) -> list[int]:
    return [sum(high - low for low, high in ranges) for ranges in moves]
