"""The one file that touches private torch API, and the one that knows about torch versions.

Everything here stands in for something that torch does not offer publicly; each function says what, and why.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414
from torch.utils._pytree import tree_map as tree_map  # noqa: PLC0414

if TYPE_CHECKING:  # a second and a half, for whoever only wants a mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# The types of what it holds differ between versions.
c10d: Any = distributed_c10d

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

# --- meshes and groups ---


def default_store() -> dist.Store:
    """Return the store of the default group: torch has no public way to reach it."""
    return c10d._get_default_store()  # type: ignore[no-any-return]


def when_default_group_ends(call: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call a function once the default group is destroyed, and return the handle that takes this back.

    torch has no hook for it. It makes a store object for the default group, keeps it beside the group, and drops both together.
    """
    handle = weakref.finalize(default_store(), call)
    handle.atexit = False
    return handle


def usual_timeout() -> timedelta:
    """Return the timeout of a group that is made without one, whatever the default group has."""
    return c10d._get_default_timeout(c10d.Backend(dist.get_backend()))  # type: ignore[no-any-return]


def default_timeout() -> timedelta:
    """Return the timeout of the default group."""
    group: Any = dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:  # the fake backend has none
            timeout: timedelta = options._timeout
            return timeout
    return usual_timeout()


def bound_device() -> torch.device | None:
    """Return the device that the default group is bound to, if any; a bound group makes subgroups by splitting."""
    return getattr(dist.group.WORLD, "bound_device_id", None)


def guesses_device(backend: str) -> bool:
    """Return whether a default group of this backend connects at once, to a device that torch guesses unless it is told.

    From 2.15 on, "nccl" does. Its guess is the global rank modulo the number of visible GPUs, which is wrong where the
    ranks use a part of a host's GPUs. Up to 2.14 hangs were reported with a bound device (pytorch#153960).
    """
    return "nccl" in backend.lower() and Version(torch.__version__).release >= (2, 15)


def abort_groups() -> None:
    """End every process group without waiting for collectives that are stuck, as ``destroy_process_group`` does on NCCL."""
    c10d._abort_process_group()


def from_all(group: dist.ProcessGroup, own: T) -> list[T]:
    """Return every rank's object, as ``all_gather_object`` does, which needs NumPy."""
    if group.size() == 1:
        return [own]
    device = c10d._get_object_coll_device(group)
    data = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group)
    padded = torch.nn.functional.pad(data, (0, int(torch.cat(lengths).max()) - len(data)))
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group)
    return [pickle.loads(bytes(each[:size].tolist())) for each, size in zip(found, lengths, strict=True)]  # noqa: S301  of this job


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has a group, or somebody destroyed it."""
    return group in c10d._world.pg_map


def forget_operations() -> None:
    """Let no thread use what DTensor remembers of operations on groups that have been destroyed.

    DTensor caches the layout of each operation's result, with the mesh that it first saw. Equal meshes share the entry:
    one that is made again would get the names of its predecessor's groups.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    # As torch.distributed.tensor.debug does, which takes seconds to import.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # That cleared the caches of this thread. Those of others, such as autograd's threads of the GPUs, are out of reach.
    # Their entries are never found again if no new mesh is equal to a mesh of destroyed groups.
    existing = set(c10d._world.pg_names.values())
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh and not existing.issuperset(getattr(mesh, "_dim_group_names", ())):
            mesh._thread_id, mesh._hash = next(_retired), None


# Numbers that torch gives to no thread: a mesh is equal only to meshes with the same one.
_retired = itertools.count(-1, -1)


def flattened(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Return a 1-D mesh over some axes of a root mesh, on a group that exists, and known to the root by its name.

    It goes together with the root's slices. ``DeviceMesh._flatten`` would make a second group.
    """
    # A slice would need the axes in the order of the root, which may not be that of the ranks.
    selected: Any = concatenate_meshes([root[axis] for axis in axes])
    mesh: Any = DeviceMesh(
        root.device_type,
        _layout=_one_axis(selected._layout),
        _rank_map=root._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=root,
        _init_backend=False,
    )
    mesh._dim_group_names = [group.group_name]
    if hasattr(root, "_pg_registry"):  # torch 2.14
        root._pg_registry[group.group_name] = group
    root._flatten_mapping[name] = mesh
    return mesh  # type: ignore[no-any-return]


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


# --- tensor parallelism ---


def functional_collective(name: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the new tensor that a collective makes of another; compiled code and selective checkpointing know these.

    ``name`` is that of the operator, such as ``"all_reduce"``, whose last argument is the name of the group.
    """
    operators = torch.ops._c10d_functional
    sent = tensor.contiguous().resolve_conj()
    started: torch.Tensor = getattr(operators, name).default(sent, *arguments)
    result: torch.Tensor = operators.wait_tensor.default(started)
    return result


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Let the device fail, once it has computed a condition that is false; the host does not wait."""
    torch._assert_async(condition, message)


def synchronous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor behind an asynchronous result, waited for; any other tensor as it is. Not differentiable."""
    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


class _Local(torch.autograd.Function):
    """This rank's tensors of some parameters; the gradient of each has the placements given for it."""

    @staticmethod
    def forward(ctx: Any, placements: Any, *parameters: Any) -> Any:
        ctx.parameters, ctx.placements = parameters, placements
        ctx.set_materialize_grads(False)
        return tuple(parameter._local_tensor.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found: list[Any] = [None]
        for parameter, gradient, layout in zip(ctx.parameters, gradients, ctx.placements, strict=True):
            found.append(
                None if gradient is None else gradient_like(parameter, gradient.contiguous(), layout)
            )
        return tuple(found)


def local_parameters(
    parameters: Sequence[DTensor], placements: Sequence[tuple[Placement, ...]]
) -> Sequence[torch.Tensor]:
    """Return this rank's tensors of parameters, whose gradients get the placements.

    Public ``to_local`` does it one by one, and costs a quarter of a step of 64 features.
    """
    if torch.compiler.is_compiling():
        pairs = zip(parameters, placements, strict=True)
        return [parameter.to_local(grad_placements=layout) for parameter, layout in pairs]
    local: Sequence[torch.Tensor] = _Local.apply(tuple(placements), *parameters)  # type: ignore[no-untyped-call]  # torch's
    return local


def gradient_like(parameter: DTensor, local: torch.Tensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return a gradient of ``parameter`` around this rank's contiguous ``local`` tensor, which may be differentiated again.

    The public ``DTensor.from_local`` works out the global shape again and passes through autograd: ten times the cost, once
    per parameter and step.
    """
    # Importing DTensor here would cost whoever only wants a mesh.
    known, kind = parameter._spec, type(parameter)
    if local.requires_grad or not parameter.is_contiguous():
        shape, mesh = parameter.shape, parameter.device_mesh
        stride = torch.empty(shape, device="meta").stride()  # of a gradient, whatever the parameter's are
        return kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    # To make one costs ten times what everything else here does.
    spec = known if placements == known.placements else type(known)(known.mesh, placements, known.tensor_meta)
    gradient: DTensor = kind.__new__(kind, local, spec, requires_grad=False)
    return gradient


@cache
def accept_mixed_lists() -> None:
    """Let operators over lists of tensors take plain tensors and DTensors, also of several meshes, in one list.

    ``torch.optim`` (foreach and fused), ``torch.nn.utils.clip_grad_norm_``, ``torch.amp.GradScaler`` and
    ``torch.optim.swa_utils`` pass all parameters of a model in one list. DTensor refuses lists of two kinds, although
    these operators treat every position independently. Plain tensors stay plain, and so does the state of optimizers.
    """
    from torch.distributed.tensor import DTensor

    aten = torch.ops.aten
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for full_name in torch._C._dispatch_get_all_op_names():
        name, _, overload = full_name.partition(".")
        if name.startswith(("aten::_foreach_", "aten::_fused_")):
            operator = getattr(getattr(aten, name.removeprefix("aten::")), overload or "default")
            if any(str(argument.type) == "List[Tensor]" for argument in operator._schema.arguments):
                handlers[operator] = _run_list_operator
    handlers[aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale_gradients
    handlers[aten.stack.default] = _stack_norms


def _dispatch(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator as DTensor runs it without our handler."""
    from torch.distributed.tensor import DTensor

    # DTensor looks for a handler in C++, before anything else, and offers no way around it.
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def _run_list_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator over lists in one call for all local tensors, and in one for each mesh of the other DTensors."""
    length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    lists = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == length]
    # An operator that writes into its tensors does so element by element: no norm and no matrix product is among them.
    in_place = operator._schema.is_mutable
    positions: dict[DeviceMesh | None, list[int]] = {}
    for position, tensors in enumerate(zip(*lists, strict=True)):
        positions.setdefault(_mesh_to_run_on(tensors, in_place), []).append(position)
    args = [arg.full_tensor() if hasattr(arg, "full_tensor") else arg for arg in args]
    results: list[Any] = [None] * length
    returned: Any = None
    for mesh, mine in positions.items():
        part = []
        for arg in args:
            if isinstance(arg, list | tuple) and len(arg) == length:
                chosen = [arg[position] for position in mine]
                arg = chosen if mesh is not None else list(map(_local_of, chosen))  # noqa: PLW2901
            part.append(arg)
        returned = _dispatch(operator, part, kwargs)
        for position, result in zip(mine, returned or (), strict=False):
            results[position] = result
    return results if returned else None


def _mesh_to_run_on(tensors: Sequence[Any], in_place: bool) -> DeviceMesh | None:
    """Return the mesh of the DTensors at one position of some lists; None if their local tensors are enough."""
    distributed = [tensor for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not distributed:
        return None
    mesh: DeviceMesh = distributed[0].device_mesh
    placements = distributed[0].placements
    equal = all(tensor.placements == placements for tensor in distributed)
    if not in_place or not equal or any(placement.is_partial() for placement in placements):
        return mesh
    if not all(placement.is_replicate() for placement in placements):
        # A plain tensor, such as a full average of a sharded parameter, would be combined with a
        # shard, and shapes may broadcast. DTensor rejects it. Numbers, such as steps, are right.
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and not hasattr(tensor, "device_mesh"):
                return mesh
    return None


def _local_of(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and anything else as it is."""
    return synchronous(tensor._local_tensor) if hasattr(tensor, "device_mesh") else tensor


def _unscale_gradients(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients; a gradient that is not finite on one rank is reported to all ranks of its mesh.

    torch takes the mesh and the placements of the first gradient for those of all: tensor parallel ranks then
    disagree on skipping the step.
    """
    gradients, found_inf, *rest = args
    operator(list(map(_local_of, gradients)), found_inf, *rest, **kwargs)
    meshes = {gradient.device_mesh for gradient in gradients if hasattr(gradient, "device_mesh")}
    # In one order on every rank: a rank may lack the first gradients, as those of experts without tokens.
    for mesh in sorted(meshes, key=lambda mesh: mesh.mesh_dim_names or ()):
        for group in mesh.get_all_groups():
            found_inf.copy_(functional_collective("all_reduce", found_inf, "max", group.group_name))


def _stack_norms(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Stack numbers that are plain or DTensors of several meshes, such as the norms of gradients, to a plain tensor.

    As everywhere in DTensor, a plain number is taken for replicated.
    """
    tensors = args[0]
    kinds: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        kind = (tensor.device_mesh, tensor.placements) if hasattr(tensor, "device_mesh") else None
        kinds.setdefault(kind, []).append(position)
    meshes = {kind and kind[0] for kind in kinds}
    if len(meshes) == 1 or any(tensor.ndim for tensor in tensors):
        return _dispatch(operator, args, kwargs)
    values = list(map(_local_of, tensors))
    for kind, positions in kinds.items():
        if kind is not None:  # One collective for all numbers with these placements.
            local = torch.stack([values[position] for position in positions])
            make = type(tensors[positions[0]]).from_local
            complete = make(local, *kind, run_check=False).full_tensor()
            for position, value in zip(positions, complete.unbind(), strict=True):
                values[position] = value
    return torch.stack(values)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something once the backward pass that runs in this thread has ended, which raises what it raises."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def sharding_under_ddp(parameter: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh and the placements of the DTensor for which a parameter stands in under DDP, if it does.

    DDP over tensor parallelism replaces the parameters of a module by their local shards.
    """
    spec = getattr(parameter, "_st_info", None)
    return None if spec is None else (spec.mesh, spec.placements)


def hidden_by_ddp(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the DTensors that the modules of a model have as attributes, and no longer as parameters.

    A forward of DDP over tensor parallelism leaves them so. Their gradients belong to the local
    shards that were the parameters before the first forward.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel.ddp import _reconstruct_dtensor

    for wrapped in model.modules():
        if _reconstruct_dtensor not in wrapped._forward_pre_hooks.values():
            continue
        for module in wrapped.modules():
            yield from (value for value in vars(module).values() if isinstance(value, DTensor))


def is_capturing() -> bool:
    """Return whether the current CUDA stream is being captured into a graph; False without CUDA, where torch's raises."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_hooks(owner: torch.Tensor | torch.nn.Module) -> bool:
    """Return whether somebody gets the gradient of a parameter, or the output of a module, and may change it."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks")
    return any(getattr(owner, kind, None) for kind in kinds)


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Return whether the state dict of a module has one of its buffers."""
    return name not in module._non_persistent_buffers_set


def was_written(tensor: torch.Tensor) -> bool:
    """Return whether an operation wrote into a tensor in place since it was made."""
    return tensor._version > 0


def replaced_parameters(
    module: torch.nn.Module, values: dict[str, torch.Tensor]
) -> AbstractContextManager[None]:
    """Let a module see other tensors in place of some of its own parameters, for one forward."""
    replaced: AbstractContextManager[None] = torch.nn.utils.stateless._reparametrize_module(module, values)
    return replaced


# --- training ---


def _fsdp_groups(state: Any) -> list[Any]:
    """Return the groups of parameters in FSDP2's state of a module; none for other kinds of state."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.12
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def make_rng_tracker(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's default generators, and make DTensor's RNG tracker of an accelerator.

    If no tracker exists, the first random operation on a DTensor makes one that broadcasts the
    generator of rank 0 over the world: all data-parallel ranks would draw the same dropout masks. A
    tracker that this makes does not communicate.
    """
    from torch.distributed.tensor import _random

    _random.manual_seed(seed, mesh)


class _LowerRight:
    """What torch's ``CausalBias`` knows, without being a tensor."""

    def __init__(self, variant: object, queries: int, keys: int) -> None:
        self.variant = variant
        self.seq_len_q = queries
        self.seq_len_kv = keys

    def _materialize(self, device: torch.device) -> torch.Tensor:
        """Return the mask as a tensor, for when no kernel fits."""
        mask = torch.ones(self.seq_len_q, self.seq_len_kv, dtype=torch.bool, device=device)
        return mask.tril(self.seq_len_kv - self.seq_len_q)


def attend_lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return causal attention of the last queries of a sequence to all of its keys.

    For accelerators. It is ``scaled_dot_product_attention`` with ``causal_lower_right``, which is a
    subclass of tensors: to make one fails under every dispatch mode (selective checkpointing,
    counters of operations), and breaks the graph of compiled code.
    """
    from torch.nn.attention.bias import CausalBias, CausalVariant  # which imports the compiler

    bias: Any = _LowerRight(CausalVariant.LOWER_RIGHT, query.shape[2], key.shape[2])
    how: Any = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    result: torch.Tensor = CausalBias._dispatch(query, key, value, bias, **how)
    return result


def frees_after_forward(module: Any) -> bool | None:
    """Return whether FSDP2 was told to put the weights of a module away after its forward; None where it decides itself."""
    state = module._get_fsdp_state()
    if state._auto_reshard_after_forward:
        return None
    return any(group.post_forward_mesh_info is not None for group in _fsdp_groups(state))


def held_unsharded() -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters that FSDP2 uses from a forward to the end of its backward.

    A module has them as its parameters then, without gradients. The tensors themselves do not tell
    what they are.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        for group in _fsdp_groups(reference()):
            for param in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    held = getattr(param, name, None)
                    if held is not None:
                        yield held


def norms_of(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """Return the norms of tensors of one device and type; in float32 for half precision.

    ``torch.nn.utils.get_total_norm`` computes them in half precision, where they soon are infinite.
    """
    dtype = torch.float32 if tensors[0].dtype in {torch.float16, torch.bfloat16} else None
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiply tensors of one device and type by a factor, in place.

    ``torch.nn.utils.clip_grads_with_norm_`` computes the factor in the type of the norm. On CUDA it
    then takes a kernel for each tensor if that is not the tensors' own type.
    """
    if foreach is False:
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the layout of another one, and a local tensor that may be on the CPU.

    The public ``DTensor.from_local`` moves the local tensor to the device of the mesh.
    """
    made: DTensor = type(tensor).__new__(type(tensor), local, tensor._spec, requires_grad=False)
    return made


def dcp_ranks(*, no_dist: bool, process_group: dist.ProcessGroup | None) -> Any:
    """Return the object with which DCP calls functions on ranks and shares their errors.

    Make one for each call. It holds the group, which would keep the threads of the group after
    ``destroy_process_group()``.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(process_group, use_dist=not no_dist, coordinator_rank=0)


def remove_backwards(schedule: Any) -> None:
    """Remove the backwards from a pipeline schedule with several stages on a rank.

    torch's ``eval`` skips each backward when its turn comes, and looks for its gradient first: it fails where two
    stages that follow each other are on one rank (up to 2.13, in ZBV, DualPipeV, and with one rank in all).
    """
    kinds = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    schedule.pipeline_order_with_comms = {
        rank: [
            each
            for action in actions
            for each in getattr(action, "sub_actions", None) or (action,)
            if each.computation_type.name in kinds
        ]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }


@contextmanager
def loss_of_schedule(schedule: Any, loss: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let a pipeline schedule compute the loss of one batch by ``loss``, and forget it then.

    torch takes a loss when a schedule is made. Such a loss would have to find each batch's target in some lasting place.
    """
    usual = schedule._loss_fn
    schedule._loss_fn = loss
    try:
        yield
    finally:
        schedule._loss_fn = usual


def found_infs(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor] | None:
    """Return what ``scaler.unscale_(optimizer)`` found, by device: 1 if a gradient was not finite. None before that call.

    torch keeps it to itself until ``scaler.step``. What is written into the dict and its tensors decides about the step.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"].name != "UNSCALED":
        return None
    return state["found_inf_per_device"]  # type: ignore[no-any-return]


# --- dialects ---


def group_named(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, such as functional collectives take; torch has no public way to find it."""
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group that exists; None is the default group."""
    _set_timeout(timeout, group)


# torch 2.15 made it public under another name and warns at the old one.
_set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)
