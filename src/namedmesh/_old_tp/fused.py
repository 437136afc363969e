"""Column layers that are several layers in one: q, k and v, or gate and up, in one weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import RowwiseParallel

from namedmesh.errors import PlanError
from namedmesh.tensor_parallel.attention_heads import sharded_features
from namedmesh.tensor_parallel.collectives import exchange, local_shard
from namedmesh.tensor_parallel.placements import refuse_incompatible
from namedmesh.tensor_parallel.styles import ColwiseParallel, shard_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from namedmesh.tensor_parallel.collectives import RankGroup
    from namedmesh.tensor_parallel.placements import Entry


def rows_moved(sizes: Sequence[int], size: int, holder: int, worker: int) -> list[tuple[int, int]]:
    """Return the rows, from and to, that one of ``size`` ranks holds and another one works on, its part of each block.

    Example:
        Two blocks of 4 rows on 2 ranks: rank 0 holds rows 0 to 3 and works on 0, 1, 4 and 5, the last two of
        which rank 1 holds:

        >>> rows_moved((4, 4), 2, 0, 0), rows_moved((4, 4), 2, 1, 0)
        ([(0, 2)], [(4, 6)])
    """
    width = sum(sizes) // size
    start, found = 0, []
    for rows in sizes:
        part = rows // size
        low = max(holder * width, start + worker * part)
        high = min((holder + 1) * width, start + (worker + 1) * part)
        if low < high:
            found.append((low, high))
        start += rows
    return found


def _rows_of(sizes: Sequence[int], parameter: Tensor, group: RankGroup) -> Tensor:
    """Return the plain rows that this rank works on, from the ranks that hold them; their gradients go back."""
    shard = local_shard(parameter)
    first = group.rank * shard.shape[0]
    sent = [rows_moved(sizes, group.size, group.rank, worker) for worker in range(group.size)]
    received = [rows_moved(sizes, group.size, holder, group.rank) for holder in range(group.size)]
    outgoing = torch.cat([shard[low - first : high - first] for ranges in sent for low, high in ranges])
    return exchange(outgoing, group, (_lengths(sent), _lengths(received)))


def _lengths(moves: list[list[tuple[int, int]]]) -> list[int]:
    return [sum(high - low for low, high in ranges) for ranges in moves]


class FusedColwiseParallel(ColwiseParallel):
    """Give each rank its part of every layer that one ``nn.Linear`` is made of.

    The output features of such a linear lie in blocks (all queries, then all keys, then all values; gate, then
    up), of which the model takes its parts with ``chunk`` or ``split`` by the sizes that it finds; or they lie
    head by head, each with its queries, keys and values. ``ColwiseParallel`` would cut blocks in the middle.

    The parameters are sharded like any other, rank after rank, so that checkpoints, FSDP2 and optimizers see
    the weight of the whole model. Where they lie in blocks the ranks exchange rows in every forward, and their
    gradients in every backward: as many numbers as a rank holds.

    Args:
        blocks: the number of equal blocks, or the output features of each; 1 where the model's features may be shared
            out rank after rank.
        interleaved: instead, the number of heads (or of groups of heads) that lie one after the other.
        input_layouts: as for :class:`ColwiseParallel`.

    Raises:
        PlanError: neither or both are given; or when applied to another kind of module, to one that is already
            parallelized, or where the sizes do not fit.

    Example:
        >>> import torch
        >>> from namedmesh.tensor_parallel import FusedColwiseParallel, plan_report
        >>> qkv = torch.nn.Linear(16, 48, bias=False, device="meta")
        >>> plan_report(qkv, 2, FusedColwiseParallel(blocks=3)).rows[0].local_shape
        (24, 16)
    """

    def __init__(
        self,
        *,
        blocks: int | Sequence[int] | None = None,
        interleaved: int | None = None,
        input_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts)
        if (blocks is None) == (interleaved is None):
            raise PlanError(
                f"FusedColwiseParallel got blocks={blocks} and interleaved={interleaved}; give one of them: blocks "
                f"for q|k|v or gate|up, one after the other, interleaved for q, k and v head by head"
            )
        self.blocks = tuple(blocks) if isinstance(blocks, Sequence) else blocks
        self.interleaved = interleaved

    def __repr__(self) -> str:
        layout = f"blocks={self.blocks}" if self.interleaved is None else f"interleaved={self.interleaved}"
        return f"FusedColwiseParallel({layout}, input_layouts={self.input_layouts})"

    def sizes(self, module: Any) -> tuple[int, ...]:
        """Return the output features of each block."""
        if isinstance(self.blocks, int):
            return (module.out_features // self.blocks,) * self.blocks
        return self.blocks or (module.out_features,)

    def incompatibilities(self, module: nn.Module) -> list[str]:
        """Return a sentence for each reason why the module is not made of such parts."""
        if not isinstance(module, nn.Linear):
            return [f"FusedColwiseParallel fits nn.Linear, not {type(module).__name__}"]
        reasons = []
        features = module.out_features
        if self.interleaved is not None and features % self.interleaved:
            reasons.append(f"{self.interleaved} interleaved heads do not divide out_features {features}")
        if self.blocks is not None and sum(self.sizes(module)) != features:
            reasons.append(f"blocks={self.blocks} do not add up to out_features {features}")
        if self.blocks is not None and (type(module) is not nn.Linear or "forward" in vars(module)):
            reasons.append(f"blocks need the forward of nn.Linear, but {type(module).__name__} has its own")
        return reasons

    def size_incompatibilities(self, module: nn.Module, tp_size: int) -> list[str]:
        """Return a sentence for each part that the ranks cannot share equally."""
        if self.interleaved is not None:
            counts, what = [self.interleaved], "interleaved heads"
        else:
            counts, what = list(dict.fromkeys(self.sizes(module))), "output features of a block"
        return [
            f"{count} {what} are not divisible by the tp size {tp_size}; choose a tp size that divides {count}"
            for count in counts
            if count % tp_size
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        refuse_incompatible(self, module)
        problems = self.size_incompatibilities(module, device_mesh.size())
        if problems:
            raise PlanError(*(f"{type(module).__name__}: {problem}" for problem in problems))
        if self.interleaved is not None or len(self.sizes(module)) == 1:
            return super()._apply(module, device_mesh)
        return shard_module(self, module, device_mesh, partial(_rows_of, self.sizes(module)))


def fused_reasons(entries: list[Entry], tp_size: int) -> Iterator[tuple[str, str]]:
    """Yield the names of layers with parts that the ranks cannot share equally, or that the plan does not tell; and why.

    It does not tell where the only column layer of a module makes more features than a row layer beside it takes. The
    code between them decides whether rank after rank is right, and nothing else finds it: where a forward takes gate and
    up from a rank's rows with ``chunk``, the shapes fit, and the ranks agree on wrong gradients.
    """
    columns: dict[str, list[Entry]] = defaultdict(list)
    rows: dict[str, dict[str, int]] = defaultdict(dict)
    for entry in entries:
        if isinstance(entry.style, FusedColwiseParallel) and isinstance(entry.module, nn.Linear):
            for reason in entry.style.size_incompatibilities(entry.module, tp_size):
                yield entry.fqn, reason
        owner, features = entry.fqn.rpartition(".")[0], sharded_features(entry)
        if features is not None and isinstance(entry.style, RowwiseParallel):
            rows[owner][entry.key] = features
        elif features is not None:
            columns[owner].append(entry)
    for owner, (column, *others) in columns.items():
        features, taken = sharded_features(column) or 0, max(rows[owner].values(), default=0)
        told = others or tp_size == 1 or isinstance(column.style, FusedColwiseParallel)
        if 0 < taken < features and not told:
            reason = (
                f"{features} output features, of which {', '.join(rows[owner])} takes {taken}: several layers in one, "
                f"whose features may lie in blocks (q|k|v, gate|up) or head by head; say which, with "
                f"FusedColwiseParallel(blocks=...) or FusedColwiseParallel(interleaved=...); blocks=1 where rank after "
                f"rank is right"
            )
            yield column.fqn, reason
