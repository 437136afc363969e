"""First weights that do not depend on the layout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from namedmesh._torch import parts_of_shard
from namedmesh.current import current_mesh
from namedmesh.errors import TrainingError, listing
from namedmesh.tensor_parallel.collectives import local_shard
from namedmesh.training.seeds import derived_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from namedmesh.mesh import NamedMesh

Runs = list[tuple[int, int]]
"""Along one dim, where in the whole tensor the shard's runs of indices begin, and how long each is."""

# Part of the contract, as is the word that the seeds below are derived from: with others the weights are others.
NUMBERS_AT_ONCE = 2**20


def normal(name: str, parameter: Tensor) -> tuple[float, float]:
    """Return the mean and the deviation of a parameter's first weights: 0 and 0.02, but 1 for norms and 0 for biases.

    Example:
        >>> import torch
        >>> normal("up.weight", torch.ones(2, 2)), normal("norm.weight", torch.ones(2)), normal("up.bias", torch.ones(2))
        ((0.0, 0.02), (1.0, 0.0), (0.0, 0.0))
    """
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
        or parameter is None
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

    Call it where the model is parallelized and sharded: each rank draws the rows that its shards lie in, about a million numbers
    at a time, on the CPU in float32, whatever the device and the precision. Of a shard that is cut along its columns these are
    all numbers, as a generator cannot leave some out: 160 ms for a weight of 4096 x 11008 over tp=8, and 24 ms cut along its
    rows. The
    parameters may be DTensors, plain tensors, and Megatron's marked shards over the tp (experts: etp) of the current mesh. What a
    model has besides, such as buffers after ``to_empty``, is left alone.

    Args:
        model: the model, or a pipeline stage whose parameters have the names that they have in the whole model.
        seed: any int, the same on every rank.
        distribution: gets the name and the parameter (of a DTensor, with the whole shape), and returns the mean and
            the deviation of a normal distribution.

    Raises:
        TrainingError: parameters are on the meta device.

    Example:
        >>> import torch
        >>> from namedmesh import training
        >>> one, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        >>> training.init_parameters(one, seed=0)
        >>> training.init_parameters(other, seed=0)
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
        local = local_shard(parameter)
        if deviation == 0:
            local.fill_(mean)
        elif local.numel():
            shape, runs = _place(parameter) if parameter.ndim else ((1,), [[(0, 1)]])
            _fill(
                local if parameter.ndim else local[None],
                shape,
                runs,
                derived_seed(seed, name),
                (mean, deviation),
            )


def _fill(
    local: Tensor, shape: tuple[int, ...], runs: list[Runs], seed: int, distribution: tuple[float, float]
) -> None:
    """Write a shard from the rows of the whole tensor that it lies in, some at a time."""
    rows_at_once = max(1, NUMBERS_AT_ONCE // math.prod(shape[1:]))
    filled = 0
    for start, length in runs[0]:
        stop = start + length
        for index in range(start // rows_at_once, -(-stop // rows_at_once)):
            first = index * rows_at_once
            rows = min(rows_at_once, shape[0] - first)
            generator = torch.Generator().manual_seed(derived_seed(seed, "piece", index))
            drawn = torch.empty(rows, *shape[1:]).normal_(*distribution, generator=generator)
            low, high = max(start, first) - first, min(stop, first + rows) - first
            mine = drawn[low:high]
            for dim, some in enumerate(runs[1:], 1):
                mine = torch.cat([mine.narrow(dim, *run) for run in some], dim)
            local[filled : filled + high - low] = mine
            filled += high - low


def _place(parameter: Tensor) -> tuple[tuple[int, ...], list[Runs]]:
    """Return the shape of the whole parameter, and where this rank's shard lies in it."""
    if isinstance(parameter, DTensor):
        return tuple(parameter.shape), parts_of_shard(parameter)
    shape = list(parameter.shape)
    runs: list[Runs] = [[(0, length)] for length in shape]
    if getattr(parameter, "tensor_model_parallel", False):
        mesh = current_mesh()
        if cut := shard_of(parameter, mesh):
            axis, dim, blocks = cut
            size, rank, block = mesh.size(axis), mesh.rank(axis), shape[dim] // blocks
            shape[dim] *= size
            runs[dim] = [((each * size + rank) * block, block) for each in range(blocks)]
    return tuple(shape), runs
