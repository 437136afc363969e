"""The one file that touches private torch API, and the one that knows about torch versions.

Everything here stands in for something that torch does not offer publicly; each function says what, and why.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
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
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414  for targets of any form
from torch.utils._pytree import tree_map as tree_map  # noqa: PLC0414  the same

from namedmesh.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# The types of what it holds differ between versions.
c10d: Any = distributed_c10d

F = TypeVar("F", bound="Callable[..., Any]")

# --- meshes and groups ---


def default_store() -> dist.Store:
    """Return the store of the default group: torch has no public way to reach it."""
    store: dist.Store = c10d._get_default_store()
    return store


def usual_timeout() -> timedelta:
    """Return the timeout of a group that is made without one, whatever the default group has."""
    timeout: timedelta = c10d._get_default_timeout(c10d.Backend(dist.get_backend()))
    return timeout


def default_timeout() -> timedelta:
    """Return the timeout of the default group."""
    for device_type in ("cuda", "cpu", "xpu"):
        try:
            backend: Any = dist.group.WORLD._get_backend(torch.device(device_type))
        except RuntimeError:  # the group has none for this kind of device
            continue
        options = getattr(backend, "options", None)
        if options is not None:  # the fake backend has none
            timeout: timedelta = options._timeout
            return timeout
    return usual_timeout()


def bound_device() -> torch.device | None:
    """Return the device that the default group is bound to, if any; a bound group makes subgroups by splitting."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has a group, or somebody destroyed it."""
    return group in c10d._world.pg_map


def forget_operations() -> None:
    """Clear what DTensor remembers of operations in this thread: it may hold groups that have just been destroyed."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    # As torch.distributed.tensor.debug does, which takes seconds to import.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def flattened(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Return a 1-D mesh over some axes of a root mesh, on a group that exists; it goes together with the root's slices.

    ``DeviceMesh._flatten`` would make a second group. Where the axes adjoin, public calls do: see ``NamedMesh``.
    """
    layout = root[axes]._layout
    mesh: Any = DeviceMesh(
        root.device_type,
        _layout=_one_axis(layout),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group.group_name]
    if hasattr(root, "_pg_registry"):  # torch 2.14
        root._pg_registry[group.group_name] = group
    flat: DeviceMesh = mesh
    return flat


def _one_axis(layout: Any) -> Any:
    """Return the layout of a mesh as that of a mesh with one axis over the same ranks."""
    if hasattr(layout, "collapse"):  # from torch 2.13 on
        return type(layout)([layout.collapse()])
    merged = layout.coalesce()
    return merged.nest() if len(merged) > 1 else merged


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of several slices and flattened meshes of one root, in the given order."""
    together: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return together


def constant_under_compile(function: F) -> F:
    """Let the compiler call a function while it traces, and keep the result.

    ``torch.compiler.assume_constant_result`` does no more, but imports the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_modes(function: F) -> F:
    """Let a function make real tensors, whatever modes its caller is in: those of fake tensors and inference are such."""

    @wraps(function)
    def call(*args: Any) -> Any:
        with _python_dispatch._disable_current_modes(), torch.inference_mode(False):
            return function(*args)

    return call  # type: ignore[return-value]



# What the old rooms use of the old adapter; it goes with them.
forget_group_caches = forget_operations


def constant_of_mesh(function):
    @wraps(function)
    def call(mesh, *args):
        return function(mesh, *args)

    return constant_under_compile(call)


def before_default_group_ends(finish):
    pass


def new_connection(store):
    return store.clone()


# --- tensor parallelism, training, dialects: the old parts ---

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

# Up to 2.12 the compiler takes the sums of attention in float64 for float32.
_COMPILES_SUMS_OF_DOUBLES = Version("2.13.0a0") <= TORCH

# The compiler of torch 2.11 drops the gradient of what a custom function returns, if an operation wrote into it.
_DROPS_GRADIENTS = Version("2.11.0a0") <= TORCH < Version("2.12.0a0")

# Before, nn.utils.clip_grad_norm_ leaves a gradient that is a part of a sum as it is, without a word.
CLIPS_PARTIAL_GRADIENTS = Version("2.12.0a0") <= TORCH

# torch 2.13 renamed both and warns at the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch 2.15 made it public under another name and warns at the old one.


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


# Pipelines.


def remove_backwards(schedule: Any) -> None:
    """Remove the backwards from a pipeline schedule with several stages on a rank.

    torch's ``eval`` skips each backward when its turn comes, and looks for its gradient first: it fails where two
    stages that follow each other are on one rank (up to 2.13, in ZBV, DualPipeV, and with one rank in all).
    """
    kinds = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    if hasattr(schedule, "pipeline_order_with_comms"):
        schedule.pipeline_order_with_comms = {
            rank: [
                each
                for action in actions
                for each in getattr(action, "sub_actions", None) or (action,)
                if each.computation_type.name in kinds
            ]
            for rank, actions in schedule.pipeline_order_with_comms.items()
        }
    else:  # torch 2.8, for some of them
        schedule.pipeline_order = {
            rank: [
                each if each is not None and each.computation_type.name in kinds else None for each in actions
            ]
            for rank, actions in schedule.pipeline_order.items()
        }


if _missing:
    warnings.warn(f"torch {torch.__version__} has no {', '.join(_missing)}{_REMEDY}", stacklevel=2)


# Attention.


def has_attention_with_lse(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether :func:`attention_with_lse` can do this: torch's kernel for the CPU, and widths that are one."""
    op = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if not _COMPILES_SUMS_OF_DOUBLES and query.dtype == torch.float64 and torch.compiler.is_compiling():
        return False
    return op is not None and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attention_with_lse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the logarithm of its sums of exponentials, which torch's public function keeps to itself."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: tuple[torch.Tensor, torch.Tensor] = op(
        query, key, value, 0.0, causal, attn_mask=None, scale=scale
    )
    return result


def attention_backward(
    tensors: tuple[torch.Tensor, ...], causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    Args:
        tensors: the gradient of the output, query, key, value, the output, and its sums as of :func:`attention_with_lse`;
            the last two may be those over more keys than these.
        causal: as before.
        scale: as before.
    """
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = op(
        *tensors, 0.0, causal, attn_mask=None, scale=scale
    )
    return result


# --- dialects ---


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, such as functional collectives take; torch has no public way to find it."""
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group that exists; None is the default group."""
    c10d._set_pg_timeout(timeout, group)
