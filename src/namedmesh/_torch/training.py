"""Pipelines, attention, random numbers, gradient scaling and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class _LowerRightBias:
    """The attributes of torch's ``CausalBias``, in an object that is not a tensor."""

    def __init__(self, variant: object, queries: int, keys: int) -> None:
        self.variant = variant
        self.seq_len_q = queries
        self.seq_len_kv = keys

    def _materialize(self, device: torch.device) -> torch.Tensor:
        """Return the mask as a tensor. torch needs it if no fused kernel supports the inputs."""
        mask = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return mask.tril(self.seq_len_kv - self.seq_len_q)


def attend_lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return causal attention of the last queries of a sequence to all of its keys.

    Use it on accelerators. It is ``scaled_dot_product_attention`` with the mask
    ``causal_lower_right``. torch's mask of this name is a tensor subclass. Its creation fails under
    every dispatch mode, such as selective checkpointing and FlopCounterMode, and breaks the graph
    of compiled code.

    Args:
        query: the queries of this rank's shard of the sequence.
        key: the keys up to the last of these queries.
        value: the values of the keys.
        scale: the scale of the scores; None for torch's default.
    """
    # The module imports the compiler, which takes seconds.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    bias: Any = _LowerRightBias(CausalVariant.LOWER_RIGHT, query.shape[2], key.shape[2])
    options: Any = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    result: torch.Tensor = CausalBias._dispatch(query, key, value, bias, **options)
    return result


def make_rng_tracker(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's default generators and DTensor's RNG tracker.

    DTensor has a tracker on accelerators only. It is created if it does not exist.

    Without a tracker, the first random operation on a DTensor creates one that broadcasts the RNG
    state of rank 0 over the world. All data-parallel ranks would then draw the same dropout masks.
    This tracker does not communicate.

    Args:
        seed: the seed of this rank.
        mesh: a mesh of DTensors.
    """
    from torch.distributed.tensor import _random

    _random.manual_seed(seed, mesh)


def get_found_infs(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor] | None:
    """Return by device whether ``scaler.unscale_(optimizer)`` found a non-finite value.

    torch does not expose it before ``scaler.step``. That call skips the step if one of the tensors
    is not zero, so the caller may write into them.

    Args:
        scaler: a ``GradScaler`` of torch.
        optimizer: the optimizer whose gradients were unscaled.

    Returns:
        By device, a tensor that is not zero if a value was found; None before ``unscale_``.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"].name != "UNSCALED":
        return None
    return state["found_inf_per_device"]  # type: ignore[no-any-return]


def make_dcp_wrapper(*, no_dist: bool, process_group: dist.ProcessGroup | None) -> Any:
    """Return DCP's ``_DistWrapper``, which raises errors of one rank on every rank.

    Make one for each call. It refers to the group, whose threads would otherwise survive
    ``destroy_process_group()``.

    Args:
        no_dist: whether to run in this process only, without communication.
        process_group: the group; None for the default group.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(process_group, use_dist=not no_dist, coordinator_rank=0)


def make_storage_unpicklers() -> dict[tuple[str, str], Any]:
    """Return the classes and functions that a pickled ``.metadata`` of DCP may name.

    They are new ones at each call. pickle can set attributes on every class and function that it
    gets, and a file that does must not change those of the process.

    Returns:
        By module and name: for a dataclass, a class that creates objects of the dataclass; for
        everything else, a function.
    """
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.serialization import _get_layout

    functions: dict[tuple[str, str], Any] = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
        # pathlib._local is the module of pathlib's classes in Python 3.13.
        ("pathlib", "PosixPath"): PurePosixPath,
        ("pathlib._local", "PosixPath"): PurePosixPath,
    }
    allowed: dict[tuple[str, str], Any] = {}
    for name, function in functions.items():
        allowed[name] = partial(function)
    for kind in (*[getattr(metadata, name) for name in metadata.__all__], filesystem._StorageInfo):
        # pickle calls __new__, and then sets the attributes of the object.
        allowed[kind.__module__, kind.__name__] = type(kind.__name__, (), {"__new__": _make_creator(kind)})
    return allowed


def _make_creator(kind: type) -> Callable[..., Any]:
    """Return a ``__new__`` that creates an object of another class."""
    return lambda _, *arguments: kind.__new__(kind, *arguments)
