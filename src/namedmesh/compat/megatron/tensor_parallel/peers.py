"""Which ranks a call means: those of the group that it names, or the tensor-parallel ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from namedmesh.tensor_parallel.collectives import RankGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def peers_of(group: ProcessGroup | None, *, is_expert: bool = False) -> RankGroup:
    """Return the ranks of a group, or of the tensor-parallel group where none is named.

    Args:
        group: the group, or None.
        is_expert: where none is named, take the tensor-parallel group of the expert layout.

    Returns:
        The ranks; this process alone, where ``torch.distributed`` has not been initialized.

    Raises:
        ContractError: no group is named and model parallelism has not been initialized.

    Example:
        >>> peers_of(None).size    # plain python, nothing initialized
        1
    """
    if group is None and dist.is_initialized():
        # Here, not at the top: whoever names his groups needs no global state.
        from namedmesh.compat.megatron import parallel_state

        if is_expert:
            group = parallel_state.get_expert_tensor_parallel_group()
        else:
            group = parallel_state.get_tensor_model_parallel_group()
    return RankGroup(group)
