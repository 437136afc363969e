"""The only file that touches private torch API, and that knows about torch releases.

Each function replaces something that torch does not offer publicly. Its docstring names the public
function that comes closest, and the reason why it is not used.
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
from torch.distributed.nn import functional as differentiable_collectives
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414
from torch.utils._pytree import tree_map as tree_map  # noqa: PLC0414

if TYPE_CHECKING:  # importing DTensor takes more than a second, and a mesh does not need it
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# The types of the module's attributes differ between releases.
c10d: Any = distributed_c10d

# These functions of torch have the default group of the moment of their import as the default of an
# argument. torch imports them at the first DTensor. The default group would then never be freed, and
# after destroy_process_group() its threads would still run: one that frees a tensor while the
# interpreter is being finalized ends the process with SIGABRT. None is the default group, too.
for _function in vars(differentiable_collectives).values():
    _defaults = getattr(_function, "__defaults__", None) or ()
    if any(isinstance(value, c10d.ProcessGroup) for value in _defaults):
        _function.__defaults__ = tuple(
            None if isinstance(value, c10d.ProcessGroup) else value for value in _defaults
        )

T = TypeVar("T")
F = TypeVar("F", bound="Callable[..., Any]")

# --- meshes and groups ---


def default_store() -> dist.Store:
    """Return the store of the default group, which torch does not expose."""
    return c10d._get_default_store()  # type: ignore[no-any-return]


def add_default_group_finalizer(call: Callable[[], None]) -> weakref.finalize[..., Any]:
    """Call a function after the default group is destroyed.

    torch has no hook for it. But it creates a store object for the default group, and drops both
    together.

    Returns:
        The handle; its ``detach()`` cancels the call.
    """
    handle = weakref.finalize(default_store(), call)
    # At the exit of the interpreter, nobody uses the state that the function would update.
    handle.atexit = False
    return handle


def release_groups_with_default_group(mesh: DeviceMesh) -> None:
    """Let ``destroy_process_group()`` end the groups that a torch mesh refers to, with their threads.

    Every DTensor refers to its mesh, and the mesh to its groups. A model that lives until the end of
    the program would keep the threads of gloo, and one that frees a tensor while the interpreter is
    being finalized ends the process with SIGABRT.
    """
    reference = weakref.ref(mesh)

    def release() -> None:
        # torch 2.12 looks groups up by name and has no registry.
        registry = getattr(reference(), "_pg_registry", None)
        if registry is not None:
            registry.clear()

    add_default_group_finalizer(release)


def backend_default_timeout() -> timedelta:
    """Return torch's timeout for a group that is created without one.

    The default group may have a different timeout.
    """
    return c10d._get_default_timeout(c10d.Backend(dist.get_backend()))  # type: ignore[no-any-return]


def default_timeout() -> timedelta:
    """Return the timeout of the default group."""
    group: Any = dist.group.WORLD
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        # The fake backend has no options.
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return backend_default_timeout()


def bound_device() -> torch.device | None:
    """Return the device to which the default group is bound; None if it is not bound.

    torch creates subgroups of a bound group by splitting its communicator.
    """
    return getattr(dist.group.WORLD, "bound_device_id", None)


def guesses_device(backend: str) -> bool:
    """Return whether torch guesses the device of the default group without ``device_id``.

    From torch 2.15 on, "nccl" connects when the group is created. The guess is the global rank
    modulo the number of visible GPUs, which is wrong if the job uses only some GPUs of a host. Up
    to 2.14, hangs were reported with ``device_id`` (pytorch#153960).
    """
    return "nccl" in backend.lower() and Version(torch.__version__).release >= (2, 15)


def abort_groups() -> None:
    """Abort every process group without waiting for collectives that hang.

    ``destroy_process_group`` does this with NCCL only.
    """
    c10d._abort_process_group()


def all_gather_object(group: dist.ProcessGroup, value: T) -> list[T]:
    """Return the objects of all ranks of a group, in the order of their group ranks.

    It is torch's ``all_gather_object`` without NumPy, which that function needs.
    Collective: every rank of the group must call it.

    Args:
        group: the group.
        value: the object of this rank. It is pickled.
    """
    if group.size() == 1:
        return [value]
    device = c10d._get_object_coll_device(group)
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(group.size())]
    dist.all_gather(lengths, length, group)
    # all_gather needs tensors of the same size on every rank.
    longest = int(torch.cat(lengths).max())
    padded = torch.nn.functional.pad(data, (0, longest - len(data)))
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group)
    values = []
    for tensor, size in zip(gathered, lengths, strict=True):
        pickled = bytes(tensor[: int(size)].tolist())
        values.append(pickle.loads(pickled))  # noqa: S301  it comes from a rank of this job
    return values


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows a group. It forgets a group that is destroyed."""
    return group in c10d._world.pg_map


def clear_dtensor_op_cache() -> None:
    """Let no thread find entries of DTensor's caches that refer to destroyed groups.

    DTensor caches the result layout of each operation, with the mesh that it saw first. Equal
    meshes share the entry. A mesh that is made again would thus get the names of the groups of its
    predecessor.

    ``torch.distributed.tensor.debug._clear_sharding_prop_cache`` clears the caches of this thread
    too, but takes seconds to import.
    """
    if "torch.distributed.tensor" not in sys.modules:
        # Nobody has used DTensor, so nothing is cached.
        return
    from torch.distributed.tensor import DTensor

    # One cache is in Python, the other one in C++.
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    # The caches of other threads, such as autograd's threads of the GPUs, are out of reach. Their
    # entries are not found again if no new mesh is equal to a mesh of destroyed groups.
    existing = set(c10d._world.pg_names.values())
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh and not existing.issuperset(getattr(mesh, "_dim_group_names", ())):
            mesh._thread_id = next(_unused_thread_ids)
            mesh._hash = None
            # A mesh that a model still holds would keep the memory of the destroyed groups.
            registry = getattr(mesh, "_pg_registry", {})
            for name in set(registry) - existing:
                del registry[name]


# torch gives these numbers to no thread. Meshes with different thread ids are not equal.
_unused_thread_ids = itertools.count(-1, -1)


def flatten_mesh(root: Any, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> DeviceMesh:
    """Return a 1-D mesh over several axes of a root mesh, on a group that exists.

    ``DeviceMesh._flatten`` would create another group. As after that call, the root knows the mesh
    by its name, and the mesh can be combined with slices of the root.

    Args:
        root: the root mesh.
        axes: axes of the root, in any order.
        name: the name of the flattened axis.
        group: this rank's group over the axes.
    """
    # A slice would need the axes in the order of the root, which may not be the order of the ranks.
    selected: Any = concatenate_meshes([root[axis] for axis in axes])
    mesh: Any = DeviceMesh(
        root.device_type,
        _layout=_collapse_layout(selected._layout),
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


def _collapse_layout(layout: Any) -> Any:
    """Return torch's layout of a 1-D mesh over the ranks of a layout with several axes."""
    if hasattr(layout, "collapse"):  # from torch 2.13 on
        return type(layout)([layout.collapse()])
    merged = layout.coalesce()
    return merged.nest() if len(merged) > 1 else merged


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh over the axes of several meshes, in the given order.

    Args:
        meshes: slices and flattened meshes of one root.
    """
    mesh: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return mesh


def constant_under_compile(function: F) -> F:
    """Decorate a function whose result is a constant for torch.compile.

    The compiler calls the function once, while it traces.

    ``torch.compiler.assume_constant_result`` sets the same attribute, but imports the compiler to
    do so.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disable_dispatch_modes(function: F) -> F:
    """Decorate a function to run with fake-tensor, inference and other modes disabled.

    Code that is called under such a mode, and that keeps the tensors it makes, must make real ones.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        with _python_dispatch._disable_current_modes(), torch.inference_mode(False):
            return function(*args)

    return call  # type: ignore[return-value]


# --- tensor parallelism ---


def functional_collective(name: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Run a functional collective, wait for it, and return its result.

    torch.compile and selective checkpointing can handle these operators, but not the in-place
    collectives of ``torch.distributed``. torch has no public ones.

    Args:
        name: the name of the operator, such as ``"all_reduce"``.
        tensor: the local tensor of this rank.
        *arguments: the other arguments of the operator. The last one is the name of the group.
    """
    operators = torch.ops._c10d_functional
    contiguous = tensor.contiguous().resolve_conj()
    pending: torch.Tensor = getattr(operators, name).default(contiguous, *arguments)
    result: torch.Tensor = operators.wait_tensor.default(pending)
    return result


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Raise on the device if a condition is false. The host does not wait for the result."""
    torch._assert_async(condition, message)


def wait_if_async(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for an AsyncCollectiveTensor, and return its plain tensor.

    Other tensors are returned as they are.

    The result is not differentiable.
    """
    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


class _ToLocal(torch.autograd.Function):
    """From DTensor parameters to their local tensors.

    The gradient of each parameter gets the placements that are given for it.
    """

    @staticmethod
    def forward(ctx: Any, placements: Any, *params: Any) -> Any:
        ctx.params = params
        ctx.placements = placements
        # A parameter without a gradient then has None instead of zeros.
        ctx.set_materialize_grads(False)
        return tuple(param._local_tensor.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *local_grads: torch.Tensor | None) -> Any:
        grads: list[Any] = [None]  # for the argument ``placements``
        for param, local_grad, placements in zip(ctx.params, local_grads, ctx.placements, strict=True):
            grad = None
            if local_grad is not None:
                grad = make_gradient(param, local_grad.contiguous(), placements)
            grads.append(grad)
        return tuple(grads)


def to_local_parameters(
    params: Sequence[DTensor], placements: Sequence[tuple[Placement, ...]]
) -> Sequence[torch.Tensor]:
    """Return the local tensors of parameters.

    The public ``DTensor.to_local`` takes one parameter at a time. With 64 features that would cost
    a quarter of a training step.

    Args:
        params: the parameters.
        placements: the placements of the gradient of each parameter.
    """
    if torch.compiler.is_compiling():
        # The compiler traces to_local, and removes its cost.
        pairs = zip(params, placements, strict=True)
        return [param.to_local(grad_placements=grad_placements) for param, grad_placements in pairs]
    local: Sequence[torch.Tensor] = _ToLocal.apply(tuple(placements), *params)  # type: ignore[no-untyped-call]  # torch's
    return local


def make_gradient(param: DTensor, local_grad: torch.Tensor, placements: tuple[Placement, ...]) -> DTensor:
    """Return the gradient of a parameter as a DTensor around the local tensor of this rank.

    The public ``DTensor.from_local`` infers the global shape again, and passes through autograd.
    That costs ten times as much, once for each parameter and step.

    Args:
        param: the parameter.
        local_grad: the contiguous local gradient. It may require a gradient, for double backward.
        placements: the placements of the gradient.
    """
    # The class comes from the parameter, as an import of DTensor would slow down programs without
    # it.
    dtensor = type(param)
    if local_grad.requires_grad or not param.is_contiguous():
        mesh = param.device_mesh
        shape = param.shape
        # The gradient is contiguous, even if the parameter is not.
        stride = torch.empty(shape, device="meta").stride()
        return dtensor.from_local(local_grad, mesh, placements, run_check=False, shape=shape, stride=stride)
    spec = param._spec
    if placements != spec.placements:
        # A new spec costs ten times as much as the rest of this function.
        spec = type(spec)(spec.mesh, placements, spec.tensor_meta)
    grad: DTensor = dtensor.__new__(dtensor, local_grad, spec, requires_grad=False)
    return grad


@cache
def accept_mixed_lists() -> None:
    """Let operators over lists of tensors take plain tensors and DTensors in one list.

    ``torch.optim`` (foreach and fused), ``torch.nn.utils.clip_grad_norm_``,
    ``torch.amp.GradScaler`` and ``torch.optim.swa_utils`` pass all parameters of a model in one
    list. DTensor rejects a list that mixes both, or DTensors of several meshes, although these
    operators treat every position independently. Plain tensors stay plain, and so does the state of
    optimizers.
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


def _run_without_handler(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator as DTensor does if namedmesh has not registered a handler for it."""
    from torch.distributed.tensor import DTensor

    # DTensor looks for a handler in C++, before anything else. It cannot be asked to ignore one.
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def _run_list_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator over lists of tensors.

    One call takes all local tensors. The DTensors for which local tensors are not enough need one
    call for each mesh.
    """
    length = next(len(arg) for arg in args if isinstance(arg, list | tuple))
    lists = [arg for arg in args if isinstance(arg, list | tuple) and len(arg) == length]
    # An operator that writes into its tensors does so element by element: no norm and no matrix
    # product is among them.
    in_place = operator._schema.is_mutable
    positions_by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for position, tensors in enumerate(zip(*lists, strict=True)):
        mesh = _find_mesh_to_run_on(tensors, in_place)
        positions_by_mesh.setdefault(mesh, []).append(position)
    args = [arg.full_tensor() if hasattr(arg, "full_tensor") else arg for arg in args]
    results: list[Any] = [None] * length
    returned: Any = None
    for mesh, positions in positions_by_mesh.items():
        mesh_args = []
        for arg in args:
            if isinstance(arg, list | tuple) and len(arg) == length:
                selected = [arg[position] for position in positions]
                if mesh is None:
                    selected = list(map(_to_local, selected))
                mesh_args.append(selected)
            else:
                mesh_args.append(arg)
        returned = _run_without_handler(operator, mesh_args, kwargs)
        # An operator that works in place returns nothing.
        for position, result in zip(positions, returned or (), strict=False):
            results[position] = result
    return results if returned else None


def _find_mesh_to_run_on(tensors: Sequence[Any], in_place: bool) -> DeviceMesh | None:
    """Return the mesh of the DTensors at one position; None if their local tensors are enough."""
    dtensors = [tensor for tensor in tensors if hasattr(tensor, "device_mesh")]
    if not dtensors:
        return None
    mesh: DeviceMesh = dtensors[0].device_mesh
    placements = dtensors[0].placements
    equal = all(tensor.placements == placements for tensor in dtensors)
    if not in_place or not equal or any(placement.is_partial() for placement in placements):
        return mesh
    if not all(placement.is_replicate() for placement in placements):
        # A plain tensor, such as a full average of a sharded parameter, would be combined with a
        # shard, and shapes may broadcast. DTensor rejects it. Numbers, such as steps, are right.
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and not hasattr(tensor, "device_mesh"):
                return mesh
    return None


def _to_local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and anything else as it is."""
    return wait_if_async(tensor._local_tensor) if hasattr(tensor, "device_mesh") else tensor


def _unscale_gradients(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Unscale gradients; report a gradient that is not finite to all ranks of its mesh.

    torch uses the mesh and the placements of the first gradient for all gradients. Tensor-parallel
    ranks would then disagree on whether to skip the step.
    """
    grads, found_inf, *rest = args
    operator(list(map(_to_local, grads)), found_inf, *rest, **kwargs)
    meshes = {grad.device_mesh for grad in grads if hasattr(grad, "device_mesh")}
    # In one order on every rank: a rank may lack the first gradients, as those of experts without
    # tokens.
    for mesh in sorted(meshes, key=lambda mesh: mesh.mesh_dim_names or ()):
        for group in mesh.get_all_groups():
            found_inf.copy_(functional_collective("all_reduce", found_inf, "max", group.group_name))


def _stack_norms(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Stack scalars, such as norms of gradients, that are plain or DTensors of several meshes.

    The result is a plain tensor. As everywhere in DTensor, a plain scalar counts as replicated.
    """
    tensors = args[0]
    positions_by_kind: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        kind = None
        if hasattr(tensor, "device_mesh"):
            kind = (tensor.device_mesh, tensor.placements)
        positions_by_kind.setdefault(kind, []).append(position)
    meshes = {kind and kind[0] for kind in positions_by_kind}
    if len(meshes) == 1 or any(tensor.ndim for tensor in tensors):
        return _run_without_handler(operator, args, kwargs)
    values = list(map(_to_local, tensors))
    for kind, positions in positions_by_kind.items():
        if kind is None:
            continue
        # One collective serves all scalars with the same mesh and placements.
        local = torch.stack([values[position] for position in positions])
        dtensor = type(tensors[positions[0]])
        full = dtensor.from_local(local, *kind, run_check=False).full_tensor()
        for position, value in zip(positions, full.unbind(), strict=True):
            values[position] = value
    return torch.stack(values)


def has_run_forward(stage: Any) -> bool:
    """Return whether a pipeline stage holds a micro-batch of a step, for its backward.

    It holds none while torch only finds out the shapes of a stage.
    """
    # Before torch 2.15 the attribute is fwd_cache.
    name = "_forward_chunk_states" if hasattr(stage, "_forward_chunk_states") else "fwd_cache"
    return bool(getattr(stage, name))


def queue_backward_callback(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs in this thread.

    An exception of the function is raised by ``backward()``.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def sharding_under_ddp(parameter: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return the mesh and the placements of a parameter that DDP has made local.

    DDP over tensor parallelism does so for the time of a forward. The result is None for other
    parameters.
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
    """Return whether the current CUDA stream is being captured into a graph.

    torch's function raises if CUDA is not initialized. Here the result is False.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_hooks(owner: torch.Tensor | torch.nn.Module) -> bool:
    """Return whether hooks may change the gradient of a parameter, or the output of a module."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks", "_forward_hooks")
    return any(getattr(owner, kind, None) for kind in kinds)


def is_persistent(module: torch.nn.Module, name: str) -> bool:
    """Return whether a buffer is part of the module's state dict."""
    return name not in module._non_persistent_buffers_set


def was_written(tensor: torch.Tensor) -> bool:
    """Return whether an in-place operation has changed a tensor since its creation."""
    return tensor._version > 0


def replace_parameters(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> AbstractContextManager[None]:
    """Context manager: the module has other tensors in place of some of its own parameters.

    Args:
        module: the module.
        tensors: by the name of the parameter.
    """
    context: AbstractContextManager[None] = torch.nn.utils.stateless._reparametrize_module(module, tensors)
    return context


# --- training ---


def _fsdp_groups(state: Any) -> list[Any]:
    """Return the parameter groups in FSDP2's state of a module.

    Other kinds of state have none.
    """
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.12
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def make_rng_tracker(seed: int, mesh: DeviceMesh) -> None:
    """Seed torch's default generators and DTensor's RNG tracker.

    DTensor has a tracker on accelerators only. It is created if it does not exist.

    Without a tracker, the first random operation on a DTensor creates one that broadcasts the RNG
    state of rank 0 over the world. All data-parallel ranks would then draw the same dropout masks.
    This tracker does not communicate.
    """
    from torch.distributed.tensor import _random

    _random.manual_seed(seed, mesh)


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

    For accelerators.

    It is ``scaled_dot_product_attention`` with the mask ``causal_lower_right``. That mask is a
    tensor subclass. Its creation fails under every dispatch mode, such as selective checkpointing
    and FlopCounterMode, and breaks the graph of compiled code.

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


def reshards_after_forward(module: Any) -> bool | None:
    """Return whether FSDP2 reshards the parameters of a module after its forward.

    The result is None if ``reshard_after_forward`` was left to FSDP2.
    """
    state = module._get_fsdp_state()
    if state._auto_reshard_after_forward:
        return None
    return any(group.post_forward_mesh_info is not None for group in _fsdp_groups(state))


def iter_unsharded_parameters() -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters of every FSDP2 module of this process.

    From a forward to the end of its backward they take the place of the module's sharded
    parameters. They have no gradients, and no attribute by which they can be told apart from other
    parameters.
    """
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        for group in _fsdp_groups(reference()):
            for param in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    unsharded = getattr(param, name, None)
                    if unsharded is not None:
                        yield unsharded


def compute_norms(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """Return the norm of each tensor, in float32 for half-precision tensors.

    ``torch.nn.utils.get_total_norm`` computes in half precision, in which the squares overflow
    early.

    Args:
        tensors: tensors of one device and dtype.
        order: the order of the norm.
        foreach: whether to use one kernel for all tensors; None means True.
    """
    dtype = torch.float32 if tensors[0].dtype in {torch.float16, torch.bfloat16} else None
    if foreach is False:
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def scale_(tensors: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    """Multiply tensors by a factor, in place.

    ``torch.nn.utils.clip_grads_with_norm_`` computes the factor in the dtype of the norm. If that
    is not the dtype of the tensors, it starts a kernel for each tensor on CUDA.

    Args:
        tensors: tensors of one device and dtype.
        factor: the factor, a scalar tensor.
        foreach: whether to use one kernel for all tensors; None means True.
    """
    if foreach is False:
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor like another one, with a local tensor that may be on any device.

    The public ``DTensor.from_local`` moves the local tensor to the device of the mesh.
    """
    dtensor = type(tensor)
    result: DTensor = dtensor.__new__(dtensor, local, tensor._spec, requires_grad=False)
    return result


def make_dcp_wrapper(*, no_dist: bool, process_group: dist.ProcessGroup | None) -> Any:
    """Return DCP's ``_DistWrapper``.

    It runs functions on ranks, and raises their errors on every rank.

    Make one for each call. It refers to the group, whose threads would otherwise survive
    ``destroy_process_group()``.
    """
    from torch.distributed.checkpoint.utils import _DistWrapper

    return _DistWrapper(process_group, use_dist=not no_dist, coordinator_rank=0)


def remove_backwards(schedule: Any) -> None:
    """Remove the backward actions from a pipeline schedule with several stages on a rank.

    torch's ``eval`` skips each backward when its turn comes, but looks for its gradient first. Up
    to torch 2.13 this fails if two consecutive stages are on one rank: in ZBV and DualPipeV, and in
    every schedule on one rank.
    """
    kept_kinds = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    orders = {}
    for rank, actions in schedule.pipeline_order_with_comms.items():
        kept = []
        for action in actions:
            # DualPipeV overlaps a forward and a backward in one action.
            for part in getattr(action, "sub_actions", None) or (action,):
                if part.computation_type.name in kept_kinds:
                    kept.append(part)  # noqa: PERF401  a comprehension would have three levels
        orders[rank] = kept
    schedule.pipeline_order_with_comms = orders


@contextmanager
def set_schedule_loss(schedule: Any, loss_fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Context manager: a pipeline schedule computes the loss with ``loss_fn``.

    torch takes a loss function when a schedule is created. Such a function would have to find the
    target of each batch in some place that outlives the batch.
    """
    previous = schedule._loss_fn
    schedule._loss_fn = loss_fn
    try:
        yield
    finally:
        schedule._loss_fn = previous


def get_found_infs(scaler: Any, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor] | None:
    """Return by device whether ``scaler.unscale_(optimizer)`` found a non-finite value.

    torch does not expose it before ``scaler.step``. That call skips the step if one of the tensors
    is not zero, so the caller may write into them. The result is None before ``unscale_``.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"].name != "UNSCALED":
        return None
    return state["found_inf_per_device"]  # type: ignore[no-any-return]


# --- compatibility layers ---


def get_group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with a name, such as functional collectives take."""
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Change the timeout of a group; None is the default group."""
    _set_timeout(timeout, group)


# torch 2.15 has a public function under a new name, and warns at the old one.
_set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)
