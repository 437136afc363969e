"""The one file that touches private torch API, and the one that knows about torch versions.

Everything here stands in for something that torch does not offer publicly; each function says what, and why.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _python_dispatch

from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# The types of what it holds differ between versions.
c10d: Any = distributed_c10d

TORCH = Version(torch.__version__)
TESTED_UP_TO = "2.15"
"""The newest release of torch that the tests have run with."""

# Up to 2.9 torch keeps the relations between meshes in one table beside them, later on the meshes themselves.
_MESHES_KNOW_THEIR_ROOT = Version("2.10.0a0") <= TORCH
# From 2.13 on the layout of a mesh is a list of one layout for each axis; before, one nested tuple.
_LAYOUTS_ARE_LISTS = Version("2.13.0a0") <= TORCH
# Up to 2.13 the name of a group with local synchronization contains how many groups this process has.
_NAMES_COUNT_GROUPS = Version("2.14.0a0") > TORCH

# Up to 2.11 DTensor gathers what is sharded in blocks in the wrong order, or not at all.
HAS_BLOCKS = Version("2.12.0a0") <= TORCH


# The compiler of torch 2.11 drops the gradient of what a custom function returns, if an operation wrote into it.
_DROPS_GRADIENTS = Version("2.11.0a0") <= TORCH < Version("2.12.0a0")

# Before, nn.utils.clip_grad_norm_ leaves a gradient that is a part of a sum as it is, without a word.
CLIPS_PARTIAL_GRADIENTS = Version("2.12.0a0") <= TORCH

# torch 2.13 renamed both and warns at the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch 2.15 made it public under another name and warns at the old one.
_set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)


F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")

_missing: list[str] = []


def requires_private(owner: Any, *names: str, fallback: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Mark a function that uses private names of torch, which a newer torch may no longer have.

    If one of them is missing, the function does what ``fallback`` does, or raises a MeshError. Importing this module
    warns once, and names what is missing.

    Args:
        owner: a module, a class, or a function, whose arguments and attributes are meant.
        *names: what it uses of it.
        fallback: what public torch alone can do.
    """
    known = getattr(owner, "__code__", None)
    there = (*known.co_varnames, *known.co_names) if known else dir(owner)
    where = getattr(owner, "__qualname__", owner.__name__).removeprefix("torch.distributed.")
    missing = [f"{where}.{name}" for name in names if name not in there]
    _missing.extend(name for name in missing if name not in _missing)

    def refuse(*_: object, **__: object) -> None:
        raise MeshError(f"torch {torch.__version__} has no {', '.join(missing)}{_REMEDY}")

    def mark(function: F) -> F:
        instead: Any = fallback or refuse
        return instead if missing else function

    return mark


_REMEDY = (
    f", which this version of namedmesh needs; it was tested up to torch {TESTED_UP_TO}: install that one, or a newer "
    "namedmesh"
)

# The default group.

_TAG = "namedmesh"


class _EndsWithDefaultGroup(list[Any]):
    """torch drops this entry of its table of group tags when it destroys the default group.

    Its finalizer is our only notice.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        weakref.finalize(self, _end_state, state, os.getpid())


@requires_private(c10d, "_world")
def state_of_default_group(create: Callable[[], T]) -> T:
    """Return our one object that belongs to the default group; created by ``create``, ended with the group.

    It has a flag ``ended``, and a method ``end()`` that drops every reference to process groups.

    Whoever keeps a reference to a group when torch destroys the default group risks an abort when the interpreter
    exits: a thread of the group may outlive the interpreter.
    """
    tags: dict[str, Any] = c10d._world.tags_to_pg
    if _TAG not in tags:
        tags[_TAG] = _EndsWithDefaultGroup(create())
    state: T = tags[_TAG].state
    return state


def _end_state(state: Any, process: int) -> None:
    """Run when the default group is destroyed, or at the interpreter's exit if it never was."""
    if os.getpid() != process:
        # A fork has the objects, and not the threads behind them: nothing is dropped there.
        state.ended = True
        return
    state.end()
    exits_with_error = getattr(sys, "last_value", None) is not None
    if _TAG in c10d._world.tags_to_pg and not exits_with_error:
        # At exit. The threads of gloo groups must end before the interpreter does. After an error a collective
        # may be under way that would be waited for, and the process is lost anyway.
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()


@requires_private(c10d, "_get_default_store")
def default_store() -> dist.Store:
    """Return the store of the default group: torch has no public way to reach it."""
    store: dist.Store = c10d._get_default_store()
    return store


@requires_private(c10d, "_world", fallback=lambda: None)
def number_groups_anew() -> None:
    """Let the default group that is made next have the number that it has on other ranks.

    torch names it by a number, which goes on where a default group could not be made on this rank, and begins anew where one
    was destroyed. Ranks with different names wait for each other until their timeout.
    """
    c10d._world.group_count = 0


def new_connection(store: Any) -> dist.Store:
    """Return another connection to a store: one over which a thread waits serves no other."""
    connection: dist.Store = store.clone()
    return connection


@requires_private(dist.ProcessGroup, "_get_backend", fallback=lambda: None)
def default_timeout() -> timedelta | None:
    """Return the timeout of the default group, or None where its backend has none (the fake one)."""
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


@requires_private(c10d, "_get_default_timeout", fallback=lambda: False)
def default_timeout_is_torchs() -> bool:
    """Return whether groups that are made without a timeout get the one that the default group has."""
    own = default_timeout()
    return own is None or own == c10d._get_default_timeout(c10d.Backend(dist.get_backend()))


def bound_device() -> torch.device | None:
    """Return the device that the default group is bound to, if any; a bound group makes subgroups by splitting."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


# Groups.


@requires_private(c10d, "_world")
def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has a group, or somebody destroyed it."""
    return group in c10d._world.pg_map


def group_name(identity: object) -> str:
    """Return the name of a group that only its members create; the same in every life of the same group.

    A name that repeats lets compiled code and cached DTensor layouts, which refer to groups by name, find the
    group again after a mesh was closed and opened.
    """
    return f"{_TAG}_{hashlib.sha256(repr(identity).encode()).hexdigest()[:40]}"


@requires_private(
    c10d, "_get_default_timeout", "_new_process_group_helper", "_register_process_group", "_world"
)
@requires_private(
    dist.ProcessGroup, "_register_backend", "_set_default_backend", "_set_group_desc", "_set_group_name"
)
def new_group_among_members(
    ranks: Sequence[int],
    *,
    name: str,
    store_prefix: str,
    backend: str,
    timeout: timedelta | None,
    pg_options: object = None,
    group_desc: str,
    addresses: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Create a group under a given name; only the members call it.

    ``new_group(use_local_synchronization=True)`` takes no name. Up to torch 2.13 it derives one from the number
    of groups that this process has, which differs between ranks as soon as some have a group that others lack;
    a group that is created again gets the name of the first one, and finds its addresses in the store.

    Args:
        ranks: the members, ascending.
        name: the name, the same on all members and unique among the groups of this process.
        store_prefix: where the members exchange their addresses; never used twice for the same name.
        backend: a backend as ``new_group`` takes it.
        timeout: the timeout; by default torch's own for the backend.
        pg_options: options of an NCCL group.
        group_desc: a description, for torch's messages.
        addresses: a store of this process alone, into which gloo writes this rank's addresses, and where it looks for
            those of the others at the first collective; so this call does not block on other ranks, nor does it
            with NCCL. Without it gloo connects the members now.

    Raises:
        MeshError: torch created the group under another name.
    """
    members, world = list(ranks), c10d._world
    rank = members.index(dist.get_rank())
    store = dist.PrefixStore(store_prefix, default_store())
    full = c10d.Backend(backend)
    timeout = timeout or c10d._get_default_timeout(full)
    devices = c10d.BackendConfig(full).get_device_backend_map()
    # new_group reads from the environment only whether gloo is to connect at the first collective.
    late, at_once = [], []
    for device, part in devices.items():
        if part == "gloo" and addresses is not None:
            late.append(device)
        else:
            at_once.append(f"{device}:{part}")
    group: Any
    if at_once:
        group, _ = c10d._new_process_group_helper(
            len(members),
            rank,
            members,
            c10d.Backend(",".join(at_once)) if late else full,
            store,
            name,
            backend_options=pg_options,
            timeout=timeout,
            group_desc=group_desc,
        )
    else:
        group = dist.ProcessGroup(addresses, rank, len(members))  # type: ignore[arg-type]
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    if late:
        gloo = _unconnected_gloo(members, rank, addresses, name, timeout)
        for device in late:
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        world.pg_map[group] = full, dist.PrefixStore(f"{name}/", store)
        world.pg_backend_config[group] = str(c10d.BackendConfig(full))
    if not at_once:  # what the helper does
        group._set_group_name(name)
        tag = f"ptd:{name}"
        world.pg_names[group], world.pg_to_tag[group] = name, tag
        for each in ("", tag):
            world.tags_to_pg.setdefault(each, []).append(group)
        c10d._register_process_group(name, group)
    group._set_group_desc(group_desc)
    world.pg_group_ranks[group] = dict(zip(members, range(len(members)), strict=True))
    if group.group_name != name:
        raise MeshError(
            f"torch {torch.__version__} created a group under the name {group.group_name!r} instead of {name!r}; this "
            "version of namedmesh does not know that torch, so install another version of one of them"
        )
    made: dist.ProcessGroup = group
    return made


def _unconnected_gloo(members: list[int], rank: int, addresses: Any, name: str, timeout: timedelta) -> Any:
    """Return a backend that connects at its first collective, constructed as torch's own is without options.

    Groups cannot share a device, which takes most of the time: on one that connects late, gloo numbers the connections of each
    group by rank, takes those of one group for another's, and hangs now and then.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(interfaces) > 1:  # a single letter torch takes for nothing
        options._devices = [
            gloo.create_device(interface=each, lazy_init=True) for each in interfaces.split(",")
        ]
    else:
        options._devices = [gloo.create_default_device(lazy_init=True)]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    options.global_ranks_in_group = members
    options.group_name = name
    backend = gloo(addresses, rank, len(members), options)
    backend._set_sequence_number_for_group()
    return backend


def connects_without_blocking(backend: str) -> bool:
    """Return whether :func:`new_group_among_members` with ``addresses`` returns without the other members."""
    parts = set(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().values())
    return (
        parts <= {"gloo", "nccl", "fake"}
        and not int(os.environ.get("TORCH_DIST_INIT_BARRIER", "0"))
        and dist.get_debug_level() != dist.DebugLevel.DETAIL  # torch then wraps what it makes, and compares
    )


def forget_group_caches() -> None:
    """Clear what DTensor remembers of operations: it may hold meshes whose groups have just been destroyed.

    DTensor takes equal meshes for one, and hands out the layout of the first result it saw.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    # As torch.distributed.tensor.debug does, which takes seconds to import on a busy machine.
    clear_native = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear_native is not None:
        propagator.propagate_op_sharding.cache_clear()
        clear_native()
    else:  # up to torch 2.9 there is one cache, and no function that clears it
        cache = type(propagator.propagate_op_sharding)
        propagator.propagate_op_sharding = cache(propagator.propagate_op_sharding_non_cached)


def _leave_counting_to_torch() -> None:
    """Let torch's own names of local groups count torch's own groups only, which every member has.

    Otherwise a group of ours that only some ranks have makes torch's next ``new_group(...,
    use_local_synchronization=True)`` hang, as in FSDP2's ``set_separate_reduce_scatter_group``.
    """

    def hash_ranks_to_str(ranks: Sequence[int]) -> str:
        counted = sum(not name.startswith(_TAG) for name in list(c10d._world.pg_names.values()))
        text = "_".join([*map(str, ranks), str(counted)])
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    c10d._hash_ranks_to_str = hash_ranks_to_str


if _NAMES_COUNT_GROUPS:
    _leave_counting_to_torch()


_FIELDS_OF_MESHES = (
    "_layout",
    "_rank_map",
    "_root_mesh",
    "_init_backend",
    "_dim_group_names",
    "_flatten_mapping",
)


def make_flat_mesh(
    root: DeviceMesh, axes: tuple[str, ...], name: str, group: dist.ProcessGroup
) -> DeviceMesh:
    """Return a 1-D mesh over the product of some axes of ``root``, on a group that exists, and known to its root.

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


@requires_private(DeviceMesh.__init__, *_FIELDS_OF_MESHES if _LAYOUTS_ARE_LISTS else ())
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
    """Return the layout of a mesh as that of a mesh with one axis over the same ranks."""
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


@requires_private(DeviceMesh, *(["_concatenate"] if _MESHES_KNOW_THEIR_ROOT else []))
def concatenate_meshes(meshes: Sequence[Any]) -> DeviceMesh:
    """Return the mesh with the axes of several slices and flattened products of one root, in the given order.

    A public slice of the root takes a product's name up to torch 2.9, and warns later.
    """
    if _MESHES_KNOW_THEIR_ROOT:
        together: DeviceMesh = DeviceMesh._concatenate(list(meshes))
        return together
    from torch.distributed.device_mesh import _mesh_resources

    root: Any = _mesh_resources.get_root_mesh(meshes[0])
    sliced: DeviceMesh = root[tuple(name for mesh in meshes for name in mesh.mesh_dim_names)]
    return sliced


def forget(root: Any) -> None:
    """Drop the groups of a root mesh and its slices, so that a reference to one of them keeps no group alive."""
    getattr(root, "_pg_registry", {}).clear()
    if _MESHES_KNOW_THEIR_ROOT:
        return
    from torch.distributed.device_mesh import _mesh_resources

    table = _mesh_resources
    for child in [child for child, its_root in table.child_to_root_mapping.items() if its_root is root]:
        del table.child_to_root_mapping[child]
    table.root_to_flatten_mapping.pop(root, None)
    table.flatten_name_to_root_dims.pop(root, None)


# Compiled code.


def constant_under_compile(function: F) -> F:
    """Let the compiler call a function while it traces, and keep the result.

    ``torch.compiler.assume_constant_result`` does no more, but imports the compiler for it. The function takes
    whatever its result depends on as an argument, which compiled code then guards.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@requires_private(_python_dispatch, "_disable_current_modes", fallback=lambda function: function)
def without_modes(function: F) -> F:
    """Let a function make real tensors, whatever modes its caller is in: those of fake tensors and inference are such."""

    @wraps(function)
    def call(*args: Any) -> Any:
        with _python_dispatch._disable_current_modes(), torch.inference_mode(False):
            return function(*args)

    return call  # type: ignore[return-value]


# Tensors and modules.


@requires_private(torch._C, "_len_torch_dispatch_stack", fallback=lambda _: True)
def needs_functional_collectives(tensor: torch.Tensor) -> bool:
    """Return whether the result of an operation on this tensor may be kept, so that nothing may write into it.

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
        group: the ranks, or the name of their group.
    """
    operator = getattr(torch.ops._c10d_functional, name).default
    group_name = group if isinstance(group, str) else group.group_name
    started: torch.Tensor = operator(tensor, *arguments, group_name)
    return started


def fix_dropped_gradient_2_11(tensor: torch.Tensor) -> torch.Tensor:
    """Return the output of a custom autograd function as the compiler of every version takes it."""
    return tensor.view_as(tensor) if _DROPS_GRADIENTS and torch.compiler.is_compiling() else tensor


def wait_tensor(started: torch.Tensor) -> torch.Tensor:
    """Return the result of a functional collective, once it is there."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor.default(started)
    return waited


def apply_style(
    module: torch.nn.Module, mesh: DeviceMesh, style: Any, src_data_rank: int | None
) -> torch.nn.Module:
    """Apply one style by ``parallelize_module``, along any axis: torch 2.8 takes the innermost of a mesh only."""
    style.src_data_rank = src_data_rank
    applied: torch.nn.Module = style._apply(module, mesh)
    return applied


_autocast_sentinels: dict[str, torch.nn.Parameter] = {}


def cast_in_autocast_cache(parameter: torch.Tensor, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a shard of a parameter in another type; the same tensor each time, up to the end of the autocast block.

    That is what autocast does itself, and torch has no way to put something into its cache, and none to be notified
    when it is emptied. So autocast casts a parameter of our own, and what is kept is kept in the metadata of the
    node that made this cast.
    """
    shard = shard.detach()
    if not parameter.requires_grad or shard.is_inference() or needs_functional_collectives(shard):
        return shard.to(dtype)
    device = shard.device.type
    if device not in _autocast_sentinels:
        _autocast_sentinels[device] = torch.nn.Parameter(torch.zeros(1, 1, device=device))
    with torch.enable_grad():
        node: Any = torch.mm(_autocast_sentinels[device], _autocast_sentinels[device]).grad_fn
    if node is None:  # inference mode
        return shard.to(dtype)
    kept: dict[Any, Any] = node.next_functions[0][0].metadata
    key = id(parameter), dtype
    known = kept.get(key)
    if known is None or known[0] is not parameter or known[1] != shard._version:
        known = kept[key] = parameter, shard._version, shard.to(dtype)
    cast: torch.Tensor = known[2]
    return cast


def as_non_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a function made, as autograd hands it out for users to write into: not as a view."""
    if torch.compiler.is_compiling():  # which cannot ask, and keeps views apart itself
        return fix_dropped_gradient_2_11(tensor)
    return tensor.data if tensor._is_view() else tensor


@requires_private(torch._C, "_will_engine_execute_node", fallback=lambda ctx: ctx.needs_input_grad)
def grads_wanted_by_this_pass(ctx: Any) -> tuple[bool, ...]:
    """Return for which tensor inputs of a function this backward pass computes gradients; only in its backward.

    ``ctx.needs_input_grad`` says for which of them some pass may: zero-bubble schedules ask for the gradients of
    inputs and of weights in two passes.
    """
    if torch.compiler.is_compiling():  # it traces one pass for all of them
        needed: tuple[bool, ...] = ctx.needs_input_grad
        return needed
    return tuple(node is not None and _executes(node) for node, _ in ctx.next_functions)


def _executes(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf that was asked for by name
        return True


@requires_private(torch._C, "_current_graph_task_id")
def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, -1 outside of any."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


@requires_private(torch._C, "_are_functorch_transforms_active", fallback=lambda: False)
def in_function_transform() -> bool:
    """Return whether a transform of ``torch.func`` is at work, such as ``vmap`` or ``grad``."""
    return torch._C._are_functorch_transforms_active()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether somebody looks at the gradient of a tensor: by a hook, or because it is to be kept."""
    if torch.compiler.is_compiling():
        return False
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks) or tensor.retains_grad


def has_forward_hooks(module: torch.nn.Module) -> bool:
    """Return whether somebody gets the output of a module, and may change it."""
    return bool(module._forward_hooks)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module gets or returns: a tensor, or containers of them, dataclasses too.

    Example:
        >>> [tuple(tensor.shape) for tensor in tensors_in((torch.ones(2), {"loss": torch.ones(())}, None))]
        [(2,), ()]
    """
    inside: Iterable[object] = ()
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, tuple | list):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in fields(value)]
    for each in inside:
        yield from tensors_in(each)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often operations have written into a tensor; 0 while the compiler traces, which does not say."""
    return 0 if torch.compiler.is_compiling() else tensor._version


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something once the backward pass that runs in this thread has ended, after what FSDP2 does there.

    Such calls are made in the order in which they were asked for, and FSDP2 may ask after us: so this asks again, at
    the end. What the call raises is raised by the backward.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


def communicates(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Return whether ranks can compare a tensor: it has numbers, nothing stands in for them, and the group is real."""
    stands_in = (
        torch._C._len_torch_dispatch_stack() or in_function_transform() or dist.get_backend(group) == "fake"
    )
    return not (tensor.is_meta or stands_in)


@requires_private(_functional_collectives, "AsyncCollectiveTensor", fallback=lambda tensor: tensor)
def synchronous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor behind an asynchronous result, waited for; any other tensor as it is. Not differentiable."""
    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor itself, inside an autograd function; a plain tensor as it is.

    ``to_local`` makes a view of a parameter's shard at every call.
    """
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def gradient_like(
    parameter: DTensor,
    local: torch.Tensor,
    placements: tuple[Placement, ...] | None = None,
    *,
    differentiable: bool = False,
) -> DTensor:
    """Return a gradient of ``parameter``, of its own layout or another, around this rank's contiguous ``local`` tensor.

    The public ``DTensor.from_local`` works out the global shape again and passes through autograd: ten times
    the cost, once per parameter and step.
    """
    if local.dtype != parameter.dtype:  # a backward under autocast that the forward was not under
        local = local.to(parameter.dtype)
    # A gradient is contiguous, whatever the strides of its parameter.
    if differentiable or not parameter.is_contiguous():
        strides = torch.empty(parameter.shape, device="meta").stride()
        return type(parameter).from_local(
            local,
            parameter.device_mesh,
            placements or parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=strides,
        )
    known: Any = parameter._spec
    if placements is None:
        # A copy, because torch may write into the specification of a tensor that it dispatches on; copy.copy takes seven times as long.
        hash(known)  # which is kept with it, and so with the copies
        spec = object.__new__(type(known))
        spec.__dict__.update(known.__dict__)
    else:
        spec = type(known)(known.mesh, placements, known.tensor_meta)
    # The parameter's class is DTensor; importing that here would cost whoever only wants a mesh. Its __init__ does nothing
    # but to turn the compiler off for that, which takes most of the time.
    kind: Any = type(parameter)
    gradient: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return gradient


class _Local(torch.autograd.Function):
    """This rank's tensor of a parameter; its gradient has the given placements."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        ctx.parameter, ctx.placements = parameter, placements
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        if gradient is None:
            return None, None
        local, again = gradient.contiguous(), torch.is_grad_enabled()  # for the gradient of the gradient
        return gradient_like(ctx.parameter, local, ctx.placements, differentiable=again), None


def local_parameter(parameter: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Return this rank's tensor of a parameter, whose gradient gets the placements; ``to_local`` takes several times as long."""
    if torch.compiler.is_compiling():
        return parameter.to_local(grad_placements=placements)
    local: torch.Tensor = _Local.apply(parameter, placements)  # type: ignore[no-untyped-call]  # torch's
    return local


def distribute_blocks(
    tensor: torch.Tensor, mesh: DeviceMesh, dim: int, count: int, src_data_rank: int | None
) -> DTensor:
    """Return a tensor as a DTensor of which each rank has its part of every one of ``count`` equal blocks along a dim.

    The placement that says so is private: FSDP2 uses it for what is sharded already. torch writes and reads checkpoints
    of such a tensor only where the parts that a rank has are next to each other.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    _let_checkpoints_have_parts(DTensor)
    apart = tensor.detach().unflatten(dim, (count, -1))
    local = distribute_tensor(apart, mesh, [Shard(dim + 1)], src_data_rank=src_data_rank).to_local()
    strides = torch.empty(tensor.shape, device="meta").stride()
    placements = [_StridedShard(dim, split_factor=count)]
    return DTensor.from_local(
        local.flatten(dim, dim + 1), mesh, placements, run_check=False, shape=tensor.shape, stride=strides
    )


def parts_of_shard(tensor: DTensor) -> list[list[tuple[int, int]]]:
    """Return where this rank's shard lies in the whole tensor: for each dim, the start and length of each part of it."""
    where: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    found = []
    for dim, size in enumerate(tensor.shape):
        index = torch.arange(size)
        for placement, ranks, rank in zip(tensor.placements, tensor.device_mesh.shape, where, strict=False):
            if getattr(placement, "dim", None) == dim:
                blocks = index.chunk(getattr(placement, "split_factor", 1))
                parts = [part for block in blocks for part in block.chunk(ranks)[rank : rank + 1]]
                index = torch.cat([index[:0], *parts])
        starts = [0, *(index.diff() != 1).nonzero().flatten().add(1).tolist(), len(index)]
        found.append([(int(index[i]), j - i) for i, j in pairwise(starts) if j > i])
    return found


@cache
def _let_checkpoints_have_parts(kind: Any) -> None:
    """Let DCP write and read a DTensor whose shard is several parts of the whole, each of them for itself.

    It takes the shard for one part, which would lie over those of other ranks.
    """
    items, chunks, shard = kind.__create_write_items__, kind.__create_chunk_list__, kind.__get_tensor_shard__

    def parts(tensor: DTensor) -> list[tuple[torch.Size, torch.Size]]:
        if not any(getattr(placement, "split_factor", 1) > 1 for placement in tensor.placements):
            return []
        found = list(product(*parts_of_shard(tensor)))
        if len(found) == 1:
            return []
        return [(torch.Size(run[0] for run in part), torch.Size(run[1] for run in part)) for part in found]

    def create_write_items(tensor: Any, name: str, value: Any) -> list[Any]:
        (item,) = items(tensor, name, value)
        found = []
        for offsets, sizes in parts(tensor):
            chunk = replace(item.tensor_data.chunk, offsets=offsets, sizes=sizes)
            data = replace(item.tensor_data, chunk=chunk)
            found.append(replace(item, index=replace(item.index, offset=offsets), tensor_data=data))
        return found or [item]

    def create_chunk_list(tensor: Any) -> list[Any]:
        (whole,) = chunks(tensor)
        return [replace(whole, offsets=offsets, sizes=sizes) for offsets, sizes in parts(tensor)] or [whole]

    def get_tensor_shard(tensor: Any, index: Any) -> torch.Tensor:
        local: torch.Tensor = shard(tensor, index)
        found = parts(tensor)
        if not found:
            return local
        (sizes,) = (sizes for offsets, sizes in found if offsets == index.offset)
        for dim, runs in enumerate(parts_of_shard(tensor)):
            before = sum(length for start, length in runs if start < index.offset[dim])
            local = local.narrow(dim, before, sizes[dim])
        return local

    kind.__create_write_items__ = create_write_items
    kind.__create_chunk_list__ = create_chunk_list
    kind.__get_tensor_shard__ = get_tensor_shard


@contextmanager
def replaced_parameters(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module see other tensors in place of some of its own parameters, for one forward."""
    if torch.compiler.is_compiling():  # which follows this way only
        with torch.nn.utils.stateless._reparametrize_module(module, dict(values)):
            yield
        return
    parameters: dict[str, Any] = module._parameters  # no public way to put a plain tensor here
    # DDP over DTensors keeps them as plain attributes.
    places = {name: parameters if name in parameters else vars(module) for name in values}
    own = {name: place[name] for name, place in places.items()}
    try:
        for name, place in places.items():
            place[name] = values[name]
        yield
    finally:
        for name, place in places.items():
            place[name] = own[name]


def avoid_native_encoders(model: torch.nn.Module) -> None:
    """Make encoder layers with sharded parts run their Python forward in evaluation too.

    Without gradients torch hands the weights of such a layer to one native function, past the modules, and what is not
    padding to the layers as a nested tensor, which only that function takes.
    """
    for module in model.modules():
        if all(type(parameter.data) is torch.Tensor for parameter in module.parameters()):
            continue
        if isinstance(module, torch.nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # neither: the native function knows these two only
        elif isinstance(module, torch.nn.TransformerEncoder):
            module.use_nested_tensor = False


def absent_children(model: torch.nn.Module) -> list[str]:
    """Return the names of the submodules that were set to None, as pipeline stages do."""
    absent = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        for name, child in module._modules.items():  # named_children() leaves None out
            if child is None:
                absent.append(f"{fqn}.{name}" if fqn else name)
    return absent


# For the dialects.


@requires_private(c10d, *(["_set_pg_timeout"] if _set_timeout is None else []))
def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group that exists; None is the default group."""
    _set_timeout(timeout, group)


def symmetric_memory(size: int, group: dist.ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Return a buffer of bytes that the ranks of a group map into each other's memory, and its handle.

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


if _missing:
    warnings.warn(f"torch {torch.__version__} has no {', '.join(_missing)}{_REMEDY}", stacklevel=2)


# --- training ---


def frees_after_forward(module: Any) -> bool | None:
    """Return whether FSDP2 was told to put the weights of a module away after its forward; None where it decides itself."""
    state = module._get_fsdp_state()
    if state._auto_reshard_after_forward:
        return None
    one = [] if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # of torch 2.12
    groups = one or state._fsdp_param_groups
    return any(group is not None and group.post_forward_mesh_info is not None for group in groups)


def all_reduced(tensor: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the ``"sum"`` or ``"max"`` over a group in a new tensor, also in compiled code; torch has no public function for it."""
    started = torch.ops._c10d_functional.all_reduce(tensor, operation, group.group_name)
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return result


def check_archive(contents: Any) -> None:
    """Raise a RuntimeError where torch could not read an archive of ``torch.save``; ``torch.load`` takes several times as long."""
    reader: Any = torch._C.PyTorchFileReader(contents)
    for name in reader.get_all_records():
        if not name.startswith("data/"):
            reader.get_record(name)
        else:
            reader.get_record_offset(name)


def remove_backwards(schedule: Any) -> None:
    """Remove the backwards from a pipeline schedule with several stages on a rank.

    torch's ``eval`` skips each backward when its turn comes, and looks for its gradient first: it fails where two
    stages that follow each other are on one rank (up to 2.13, in ZBV, DualPipeV, and with one rank in all).
    """
    kinds = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    for rank, actions in schedule.pipeline_order_with_comms.items():
        single = [each for action in actions for each in getattr(action, "sub_actions", None) or (action,)]
        forward = [each for each in single if each.computation_type.name in kinds]
        schedule.pipeline_order_with_comms[rank] = forward
