"""What Megatron's groups need beside a layout: twins, instances, levels, callbacks, options."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import prod
from typing import TYPE_CHECKING

from namedmesh.compat.errors import ContractError
from namedmesh.compat.megatron.ranks import default_embedding_ranks, default_position_embedding_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from namedmesh.compat.megatron.shape import Shape
    from namedmesh.options import GroupOptions

__all__ = ["Wish"]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is wanted of the groups, beside the layouts.

    Args:
        gloo: whether the data-parallel groups have gloo twins.
        instances: the number of optimizer instances that a data-parallel group is cut into.
        levels: the sizes of the levels of the context-parallel group, none for no levels.
        hybrid: whether the data- and context-parallel group has a group for each power of two.
        gather_group: whether the data- and context-parallel group has a second communicator for all-gathers.
        virtual_size: the number of virtual stages, if any.
        embedding_ranks: which ranks of a pipeline hold the word embeddings.
        position_embedding_ranks: which ranks of a pipeline hold the position embeddings.
        options: options by Megatron's names of the groups, such as ``"intra_dp_cp"``.
        pp_backend: the backend of the pipeline groups, if another.
        sharp: which groups use SHARP: ``"dp"``, ``"dp_replica"`` or none.
    """

    gloo: bool = True
    instances: int = 1
    levels: tuple[int, ...] = ()
    hybrid: bool = False
    gather_group: bool = False
    virtual_size: int | None = None
    embedding_ranks: Callable[[list[int]], list[int]] = default_embedding_ranks
    position_embedding_ranks: Callable[[list[int]], list[int]] = default_position_embedding_ranks
    options: Mapping[str, GroupOptions] = field(default_factory=dict)
    pp_backend: str | None = None
    sharp: str | None = None

    def words(self, shape: Shape) -> dict[str, str]:
        """Every wish in words, for the comparison between ranks; of a callback, what it says of one pipeline."""
        layout, axes = shape.place(("pp",))
        first = list(layout.group(layout.rank_offset, *axes))
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: repr(value(first) if callable(value) else value) for name, value in values.items()}

    def check(self, shape: Shape) -> None:
        """Refuse what the sizes do not allow.

        Raises:
            ContractError: all problems at once.
        """
        dp_cp, edp, cp, pp = (_size(shape, *axes) for axes in (("dp", "cp"), ("edp",), ("cp",), ("pp",)))
        problems = [
            f"num_distributed_optimizer_instances is {self.instances}, which does not divide {name} = {size}"
            for name, size in (("dp x cp", dp_cp), ("edp", edp))
            if self.instances < 1 or size % self.instances
        ]
        if self.hybrid and dp_cp % 2:
            problems.append(f"hybrid_context_parallel needs an even dp x cp, and it is {dp_cp}")
        if self.levels and prod(self.levels) != cp:
            problems.append(
                f"hierarchical_context_parallel_sizes are {list(self.levels)}, which multiply to {prod(self.levels)}; "
                f"they have to multiply to the context-parallel size, which is {cp}"
            )
        if self.virtual_size is not None and pp == 1:
            problems.append(
                f"there are to be {self.virtual_size} virtual stages, but pp is 1; they need 2 or more"
            )
        if problems:
            raise ContractError(*problems)


def _size(shape: Shape, *names: str) -> int:
    layout, axes = shape.place(names)
    return layout.size(*axes)
