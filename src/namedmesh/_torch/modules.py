"""Modules under DDP and FSDP2; attention, random numbers, scaling and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:  # importing DTensor takes more than a second, and a mesh does not need it
    from torch.distributed.tensor.placement_types import Placement


def has_hooks(owner: torch.Tensor | torch.nn.Module) -> bool:
    """Return whether hooks may change the gradient of a parameter, or the output of a module.

    Args:
        owner: the parameter or the module.
    """
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks")
    return any(getattr(owner, kind, None) for kind in kinds)


def replace_parameters(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> AbstractContextManager[None]:
    """Return a context in which a module has other tensors in place of its own parameters.

    Args:
        module: the module.
        tensors: the tensors, by the name of the parameter. Other parameters stay.
    """
    context: AbstractContextManager[None] = torch.nn.utils.stateless._reparametrize_module(module, tensors)
    return context


def find_sharding_under_ddp(parameter: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh and the placements of a parameter that DDP has made local.

    DDP over tensor parallelism does so for the time of a forward.

    Args:
        parameter: any parameter.

    Returns:
        The mesh and placements that the parameter had as a DTensor; None for other parameters.
    """
    # DDP keeps the spec of the DTensor in this attribute, to make it a DTensor again.
    spec = getattr(parameter, "_st_info", None)
    return None if spec is None else (spec.mesh, spec.placements)


def iter_params_hidden_by_ddp(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the DTensors that DDP has turned from parameters of a model into plain attributes.

    A forward of DDP over tensor parallelism does so. Their gradients belong to the local shards
    that were the parameters before the first forward.

    Args:
        model: the model, which may contain several DDP modules.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel.ddp import _reconstruct_dtensor

    for wrapped in model.modules():
        # DDP registers this hook on a module with parameters that are DTensors.
        if _reconstruct_dtensor not in wrapped._forward_pre_hooks.values():
            continue
        for module in wrapped.modules():
            yield from (value for value in vars(module).values() if isinstance(value, DTensor))


def reshards_after_forward(module: Any) -> bool | None:
    """Return whether FSDP2 reshards the parameters of a module after its forward.

    Args:
        module: a module that ``fully_shard`` was applied to.

    Returns:
        None if the caller of ``fully_shard`` left ``reshard_after_forward`` to FSDP2.
    """
    state = module._get_fsdp_state()
    if state._auto_reshard_after_forward:
        return None
    return any(group.post_forward_mesh_info is not None for group in _list_fsdp_groups(state))


def iter_unsharded_parameters() -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters of every FSDP2 module of this process.

    From a forward to the end of its backward, they replace the module's sharded parameters. They
    have no gradients, and no attribute that distinguishes them from other parameters.
    """
    from torch.distributed._composable_state import _module_state_mapping

    # The mapping has weak references, so a module may be gone.
    for reference in list(_module_state_mapping.values()):
        for group in _list_fsdp_groups(reference()):
            for param in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    unsharded = getattr(param, name, None)
                    if unsharded is not None:
                        yield unsharded


def has_unsharded_gradients(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 holds gradients of a module that it has not reduced yet.

    It does between the backwards of a step, if ``set_requires_gradient_sync`` is off.

    Args:
        module: the module, with its submodules.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for submodule in module.modules():
        reference = _module_state_mapping.get(submodule)
        for group in [] if reference is None else _list_fsdp_groups(reference()):
            for param in group.fsdp_params:
                unsharded = getattr(param, "_unsharded_param", None)
                if (
                    param.unsharded_accumulated_grad is not None
                    or getattr(unsharded, "grad", None) is not None
                ):
                    return True
    return False


def runs_code_on_load(module: torch.nn.Module) -> bool:
    """Return whether ``load_state_dict`` does more than to copy into parameters and buffers.

    It does if a module has a hook, or a method of its own, for it. Hooks of torch's own modules and
    of FSDP2 change nothing in tensors that have their names and shapes.

    Args:
        module: the module, with its submodules.
    """
    for submodule in module.modules():
        kind = type(submodule)
        functions: list[Any] = [kind.load_state_dict, kind._load_from_state_dict]
        functions.extend(submodule._load_state_dict_pre_hooks.values())
        functions.extend(submodule._load_state_dict_post_hooks.values())
        for function in functions:
            # torch wraps some hooks in an object. A hook without a module is the user's.
            source = getattr(getattr(function, "hook", function), "__module__", None)
            if not str(source).startswith("torch."):
                return True
    return False


def _list_fsdp_groups(state: Any) -> list[Any]:
    """Return the parameter groups in FSDP2's state of a module.

    The state that ``replicate`` keeps for a module has none.
    """
    groups: list[Any] = getattr(state, "_fsdp_param_groups", [])
    return groups


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
