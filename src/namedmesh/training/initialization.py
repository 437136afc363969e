"""First weights that do not depend on the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from namedmesh.errors import TrainingError, listing
from namedmesh.mesh import current_mesh
from namedmesh.training.seeds import derived_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from namedmesh.mesh import NamedMesh


def normal(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the mean and the deviation of a parameter's first weights: 0 and 0.02, but 1 for norms and 0 for biases."""
    if parameter.ndim > 1:
        return 0.0, 0.02
    return (0.0 if name.endswith("bias") else 1.0), 0.0


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model as it was written, without torch's wrappers."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def shard_of(parameter: Tensor | None, mesh: NamedMesh | None) -> tuple[str, int, int] | None:
    """Return the axis over which a plain tensor is cut, the dim and the number of blocks, by Megatron's marks."""
    if (
        mesh is None
        or isinstance(parameter, DTensor)
        or not getattr(parameter, "tensor_model_parallel", False)
    ):
        return None
    axis = "tp" if getattr(parameter, "allreduce", True) or "etp" not in mesh.coords else "etp"
    if axis not in mesh.coords or mesh.size(axis) == 1:
        return None
    return axis, int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1))


@torch.no_grad()
def init_parameters(
    model: nn.Module, seed: int, *, distribution: Callable[[str, Tensor], tuple[float, float]] = normal
) -> None:
    """Fill a model's parameters with random numbers that depend on the seed and on each one's name only.

    Prevents: weights that depend on the layout, so that runs cannot be compared; and, on a sharded model, the same
    numbers in every shard, which is what ``nn.init`` draws on ranks with one seed.

    Call it where the model is parallelized and sharded: each rank draws one whole parameter after the other, on the CPU in float32,
    and keeps its shard, as torch's ``distribute_tensor`` cuts it; marked shards of Megatron's over the tp (experts: etp) of the
    current mesh. A pipeline stage has the names of the whole model. Buffers are left alone.

    Args:
        model: the model, or a stage.
        seed: any int, the same on every rank.
        distribution: gets the name and the parameter (of a DTensor, with the whole shape), and returns the mean and
            the deviation of a normal distribution.

    Raises:
        TrainingError: parameters are on the meta device.

    Example:
        >>> one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> for each in (one, other):
        ...     init_parameters(each, seed=0)
        >>> torch.equal(one.weight, other.weight), one.bias.tolist()
        (True, [0.0, 0.0, 0.0, 0.0])
    """
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise TrainingError(
            f"{listing(on_meta, 4)}: on the meta device, where there is nothing to fill; call "
            "model.to_empty(device=mesh.device) first"
        )
    for wrapped, parameter in model.named_parameters():
        name = plain_name(wrapped)
        mean, deviation = distribution(name, parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if deviation == 0:
            local.fill_(mean)
            continue
        mesh = current_mesh() if getattr(parameter, "tensor_model_parallel", False) else None
        cut = shard_of(parameter, mesh)
        shape = list(parameter.shape)
        if mesh is not None and cut is not None:
            shape[cut[1]] *= mesh.size(cut[0])
        generator = torch.Generator().manual_seed(derived_seed(seed, name))
        whole = torch.empty(shape).normal_(mean, deviation, generator=generator)
        if isinstance(parameter, DTensor):
            local.copy_(_part_of(whole, parameter))
        elif mesh is not None and cut is not None:
            axis, dim, blocks = cut
            by_rank = whole.unflatten(dim, (blocks, mesh.size(axis), -1))
            local.copy_(by_rank.select(dim + 1, mesh.rank(axis)).flatten(dim, dim + 1))
        else:
            local.copy_(whole)


def _part_of(whole: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's shard of a whole parameter; nothing is sent."""
    shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shard.to_local()
