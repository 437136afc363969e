"""The one file that touches private torch API, and the one that knows about torch versions.

Everything here stands in for something that torch does not offer publicly; each function says what, and why.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

TORCH = Version(torch.__version__)

# Up to 2.9 torch keeps the relations between meshes in one table beside them, later on the meshes themselves.
_MESHES_KNOW_THEIR_ROOT = Version("2.10.0a0") <= TORCH
# From 2.13 on the layout of a mesh is a list of one layout for each axis; before, one nested tuple.
_LAYOUTS_ARE_LISTS = Version("2.13.0a0") <= TORCH

# torch 2.13 renamed both and warns at the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch 2.15 made it public under another name and warns at the old one.
_set_timeout: Any = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout

# How many groups this process has made over each set of ranks; the same on every member of the set.
_made_over: Counter[tuple[int, ...]] = Counter()


def default_store() -> dist.Store:
    """The store of the default group: torch has no public way to reach it."""
    return c10d._get_default_store()


def default_timeout() -> timedelta | None:
    """The timeout of the default group, or None where its backend does not tell (the fake one)."""
    group = dist.group.WORLD
    if group is None:
        return None
    for device_type in ("cuda", "cpu", "xpu"):
        try:
            backend = group._get_backend(torch.device(device_type))
        except RuntimeError:
            continue
        options = getattr(backend, "options", None)
        return getattr(options, "_timeout", None)
    return None


def default_timeout_is_torchs() -> bool:
    """Whether groups made without a timeout get the one that the default group has."""
    own = default_timeout()
    return own is None or own == c10d._get_default_timeout(c10d.Backend(dist.get_backend()))


def bound_device() -> torch.device | None:
    """The device that the default group is bound to, if any; a bound group makes subgroups by splitting."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


def reserved_name(ranks: Sequence[int]) -> str:
    """The name of the next group over exactly these ranks; the members reserve names in the same order.

    Up to torch 2.13 the name of a group with local synchronisation is a hash of its ranks and of the number of
    groups this process has: a group made again after the first one was destroyed gets the name of the first,
    finds its addresses in the store and hangs; so do ranks that have different numbers of groups. Later
    versions count calls instead, which goes wrong as soon as only some ranks call. Here the name is a hash of
    the ranks and of how many groups were made over exactly these ranks, which only members change.
    """
    members = tuple(ranks)
    _made_over[members] += 1
    text = f"namedmesh {_made_over[members]} over {'_'.join(map(str, members))}"
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def new_group_among_members(
    ranks: Sequence[int], *, name: str | None = None, **options: Any
) -> dist.ProcessGroup:
    """``new_group`` with local synchronisation, under a name that is never used twice. Only members call it.

    Args:
        ranks: the members.
        name: a name that was reserved for it; with one, gloo connects at the first collective, as NCCL does
            anyway, so that the call waits for nobody.
        **options: for ``new_group``.
    """
    calls = c10d._world.group_count
    with _group_named(name or reserved_name(ranks)), _gloo_connects_late() if name else nullcontext():
        group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    # torch counts calls to name the groups that everyone makes; a call of some ranks must not count.
    c10d._world.group_count = calls
    return group


def waits_for_nobody(backend: str) -> bool:
    """Whether :func:`new_group_among_members` under a reserved name returns without the other members."""
    made_of = {part.rpartition(":")[2] for part in backend.split(",")}
    return made_of <= {"gloo", "nccl", "fake"} and not int(os.environ.get("TORCH_DIST_INIT_BARRIER", "0"))


@contextmanager
def _gloo_connects_late() -> Iterator[None]:
    """Set what torch reads whenever it makes a gloo group, having no argument for it."""
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCH_GLOO_LAZY_INIT"]
        else:
            os.environ["TORCH_GLOO_LAZY_INIT"] = before


@contextmanager
def _group_named(name: str) -> Iterator[None]:
    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005  torch passes it by position
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = original


def flattened(root: DeviceMesh, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """A 1-D mesh over the product of some axes of ``root``, on a group that exists, and known to its root.

    ``DeviceMesh.from_group`` would make a mesh that FSDP2 refuses beside tensor parallelism on ``root``,
    because the two have no common root; ``_flatten`` of torch would make a second group.

    Args:
        root: a mesh that is no slice.
        axes: some of its axes, in its order.
        name: the name of the product.
        group: this rank's group over the product.
    """
    if _MESHES_KNOW_THEIR_ROOT:
        return _flattened_on_root(root, axes, name, group)
    return _flattened_in_table(root, axes, name, group)


def _flattened_on_root(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    mesh = DeviceMesh(
        root.device_type,
        _layout=_one_axis(root[axes]._layout),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group.group_name]
    if hasattr(root, "_pg_registry"):
        root._pg_registry[group.group_name] = group
    root._flatten_mapping[name] = mesh
    return mesh


def _one_axis(layout: Any) -> Any:
    """The layout of a mesh as that of a mesh with one axis over the same ranks."""
    if _LAYOUTS_ARE_LISTS:
        return type(layout)([layout.collapse()])
    merged = layout.coalesce()
    return merged.nest() if len(merged) > 1 else merged


def _flattened_in_table(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    from torch.distributed.device_mesh import _mesh_resources

    mesh = DeviceMesh.from_group(group, root.device_type, mesh_dim_names=(name,))
    _mesh_resources.child_to_root_mapping[mesh] = root
    _mesh_resources.root_to_flatten_mapping.setdefault(root, {})[name] = mesh
    places = [root.mesh_dim_names.index(axis) for axis in axes]
    between = range(places[0], places[-1] + 1)
    if all(i in places or root.size(i) == 1 for i in between):
        # This torch slices adjoining axes only; those of size 1 between them change nothing.
        places = list(between)
    _mesh_resources.flatten_name_to_root_dims.setdefault(root, {})[name] = tuple(places)
    return mesh


def forget(root: Any) -> None:
    """Drop what torch's table of meshes keeps of a root and its slices, so that a closed mesh can go."""
    if _MESHES_KNOW_THEIR_ROOT:
        return
    from torch.distributed.device_mesh import _mesh_resources

    table = _mesh_resources
    for child in [child for child, its_root in table.child_to_root_mapping.items() if its_root is root]:
        del table.child_to_root_mapping[child]
    table.root_to_flatten_mapping.pop(root, None)
    table.flatten_name_to_root_dims.pop(root, None)


# Tensors and modules.


def is_observed(tensor: torch.Tensor) -> bool:
    """Whether somebody may keep what an operation on this tensor returns, so that nothing may write into it later.

    A dispatch mode sees every operation: selective activation checkpointing is one, and keeps outputs. So are
    the modes of fake tensors, which like meta tensors and the compiler know functional collectives only.
    """
    if torch.compiler.is_compiling():
        return True
    return bool(torch._C._len_torch_dispatch_stack()) or type(tensor) is not torch.Tensor or tensor.is_meta


def functional_collective(name: str, tensor: torch.Tensor, *arguments: Any, group: Any) -> torch.Tensor:
    """Start a collective that writes into a new tensor; the result is for :func:`wait_tensor`.

    Args:
        name: of the operator, such as ``"all_reduce"``.
        tensor: contiguous.
        *arguments: what the operator takes between the tensor and the group.
        group: the ranks.
    """
    operator = getattr(torch.ops._c10d_functional, name).default
    started: torch.Tensor = operator(tensor, *arguments, group.group_name)
    return started


def wait_tensor(started: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective, once it is there."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return waited


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a function made, as autograd hands it out for users to write into: not as a view."""
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape) if tensor._is_view() else tensor


def computed_now(ctx: Any) -> tuple[bool, ...]:
    """For which tensor inputs of a function this backward pass computes gradients; only in its backward.

    ``ctx.needs_input_grad`` says for which of them some pass may: zero-bubble schedules ask for the gradients of
    inputs and of weights in two passes.
    """
    return tuple(node is not None and _executes(node) for node, _ in ctx.next_functions)


def _executes(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that was asked for by name
        return True


def backward_pass() -> int:
    """The number of the backward pass that runs in this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


def all_gather_single(out: torch.Tensor, local: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start to write every rank's ``local``, one after the other along dim 0, into ``out``."""
    work: dist.Work = _all_gather(out, local, group=group, async_op=True)
    return work


def reduce_scatter_single(
    out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Start summing ``full`` over the ranks, each keeping its piece of dim 0 in ``out``."""
    work: dist.Work = _reduce_scatter(out, full, group=group, async_op=True)
    return work


def synchronous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind an asynchronous result, waited for; any other tensor as it is. Not differentiable."""
    if isinstance(tensor, AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


def gradient_like(parameter: DTensor, local: torch.Tensor) -> DTensor:
    """A gradient of ``parameter``'s own layout around this rank's ``local`` piece.

    The public ``DTensor.from_local`` works out the global shape again and passes through autograd: ten times
    the cost, once per parameter and step.
    """
    if local.dtype != parameter.dtype:  # a backward under autocast that the forward was not under
        local = local.to(parameter.dtype)
    if not parameter.is_contiguous():  # a gradient is: the strides are not the parameter's
        strides = torch.empty(parameter.shape, device="meta").stride()
        return type(parameter).from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=strides,
        )
    # A copy, because torch may write into the specification of a tensor that it dispatches on.
    spec = copy.copy(parameter._spec)
    # The parameter's class is DTensor; importing that here would cost whoever only wants a mesh.
    return type(parameter)(local, spec, requires_grad=False)


def strided_shard(dim: int, parts: int) -> Placement:
    """A dim of several equal parts, one after the other, of each of which a rank has its shard.

    A public ``Shard`` would give the first ranks the first part. ``full_tensor()`` and checkpoints see the
    parts in their order.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Placement = _StridedShard(dim, split_factor=parts)
    return placement


def sharded_parts(placement: Placement) -> tuple[int, int] | None:
    """The dim that a placement shards, and how many parts of it one by one; None if it shards nothing."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    # Up to torch 2.9 the one class is a subclass of the other.
    if isinstance(placement, _StridedShard):
        return placement.dim, placement.split_factor
    return (placement.dim, 1) if isinstance(placement, Shard) else None


@contextmanager
def replaced_parameters(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module see other tensors in place of some of its own parameters, for one forward."""
    if torch.compiler.is_compiling():  # which follows this way only
        with torch.nn.utils.stateless._reparametrize_module(module, dict(values)):
            yield
        return
    parameters: dict[str, Any] = module._parameters  # no public way to put a plain tensor here
    own = {name: parameters[name] for name in values}
    parameters.update(values)
    try:
        yield
    finally:
        parameters.update(own)


def pre_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """The forward pre-hooks of a module by their numbers, to look at and to change."""
    return module._forward_pre_hooks


def absent_children(model: torch.nn.Module) -> list[str]:
    """The names of the submodules that were deliberately set to None, as pipeline stages do."""
    absent = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():  # named_children() leaves None out
            if child is None:
                absent.append(f"{fqn}.{name}" if fqn else name)
    return absent


# For the dialects.


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group that exists; None is the default group."""
    _set_timeout(timeout, group)


def symmetric_memory(size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """A buffer of bytes that the ranks of a group map into each other's memory, and its handle.

    Both are None where it cannot be: without CUDA, or where the ranks do not reach each other's memory.
    """
    if not torch.cuda.is_available():
        return None, None
    import torch.distributed._symmetric_memory as symmetric

    try:
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except RuntimeError:
        return None, None
