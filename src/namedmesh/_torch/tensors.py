"""Local tensors of DTensors, functional collectives, and operators over many tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import _functional_collectives
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves as tree_leaves  # noqa: PLC0414
from torch.utils._pytree import tree_map as tree_map  # noqa: PLC0414

if TYPE_CHECKING:  # importing DTensor takes more than a second, and a mesh does not need it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def run_functional_collective(name: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
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
    # torch differentiates these operators in Python, which takes longer than a small collective. Here
    # the caller differentiates.
    is_compiling = torch.compiler.is_compiling()
    with nullcontext() if is_compiling else torch._C._AutoDispatchBelowAutograd():
        pending = getattr(operators, name).default(contiguous, *arguments)
        result: torch.Tensor = operators.wait_tensor.default(pending)
    return result


def hide_redistribution_warnings() -> None:
    """Hide torch's warning that several collectives gather a tensor over several axes.

    It is the same on every rank, and harmless. torch has no setting for it.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_no_redistribution_warning)


def _is_no_redistribution_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("While redistributing")


def wait_if_async(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for an AsyncCollectiveTensor, and return its plain tensor.

    Other tensors are returned as they are. The result is not differentiable.

    Args:
        tensor: any tensor.
    """
    if isinstance(tensor, _functional_collectives.AsyncCollectiveTensor):
        waited: torch.Tensor = tensor.wait()
        return waited
    return tensor


def is_async(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the result of a functional collective that may still run.

    Args:
        tensor: any tensor.
    """
    return isinstance(tensor, _functional_collectives.AsyncCollectiveTensor)


def count_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; 0 for an inference tensor.

    Args:
        tensor: a plain tensor. A DTensor does not count what is done to its local tensor.
    """
    return 0 if tensor.is_inference() else tensor._version


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Raise on the device if a condition is false. The host does not wait for the result.

    Args:
        condition: a tensor with one value.
        message: the message of the error.
    """
    torch._assert_async(condition, message)


class _ToLocal(torch.autograd.Function):
    """Forward: local tensors of DTensor parameters. Backward: DTensors around local gradients.

    The gradients get the placements that were passed to the forward. Nothing is communicated.
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
    """Return the local tensors of several parameters, differentiably.

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
    if not torch.is_grad_enabled():
        return [param._local_tensor for param in params]
    local: Sequence[torch.Tensor] = _ToLocal.apply(tuple(placements), *params)  # type: ignore[no-untyped-call]  # torch's
    return local


def wrap_replicated(local: torch.Tensor, mesh: DeviceMesh, grad_placements: tuple[Placement, ...]) -> DTensor:
    """Return a replicated DTensor around a tensor that is identical on all ranks.

    The public ``DTensor.from_local`` passes through autograd. For one token without gradients, that
    takes longer than the linears which get the tensor.

    Args:
        local: the local tensor.
        mesh: a mesh with one axis.
        grad_placements: the placements of the gradient.
    """
    from torch.distributed.tensor import DTensor, Replicate

    placements = (Replicate(),)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return DTensor.from_local(local, mesh, placements, run_check=False, grad_placements=grad_placements)
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, placements, TensorMeta(local.shape, local.stride(), local.dtype))
    result: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return result


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


def get_local_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, for code that is not differentiated.

    The public ``DTensor.to_local`` passes through autograd, which costs ten times as much.

    Args:
        tensor: the DTensor.
    """
    return tensor._local_tensor


def find_local_box(tensor: DTensor) -> tuple[tuple[int, int], ...] | None:
    """Return the range of indices of the local tensor, along each dim of the full tensor.

    torch has no public function for it. Does not communicate.

    Args:
        tensor: the DTensor.

    Returns:
        The ranges; None if this rank is not in the mesh of the tensor.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if tensor.device_mesh.get_coordinate() is None:
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((start, start + length) for start, length in zip(offset, shape, strict=True))


def replace_local_tensor(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor like another one, with a local tensor that may be on any device.

    The public ``DTensor.from_local`` moves the local tensor to the device of the mesh.

    Args:
        tensor: the DTensor whose mesh, placements and shape the result has.
        local: the local tensor.
    """
    dtensor = type(tensor)
    result: DTensor = dtensor.__new__(dtensor, local, tensor._spec, requires_grad=False)
    return result


class _View(NamedTuple):
    """A view of a result that is computed again: which result, and which view of it."""

    position: int
    shape: Any
    stride: Any
    offset: Any


class RecomputedTensors:
    """Tensors that autograd computes again in the backward, in place of saving them.

    For an all-gather that the backward repeats: only the shards are saved. Unlike
    ``torch.utils.checkpoint``, nothing but the all-gather runs again, and there is no dispatch mode.

    The private function returns the hooks of the caller, such as the hooks of activation checkpointing
    around this code. torch calls the innermost hooks only, so all other tensors are passed on to
    the hooks of the caller.

    Args:
        compute: returns the results from ``inputs``: new, contiguous tensors. A collective in it is
            called once more in each backward.
        inputs: the tensors to save.
        results: what ``compute`` has returned.
    """

    def __init__(
        self,
        compute: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        self.compute = compute
        pack, self.unpack_input = _get_saved_tensors_hooks()
        self.inputs = [pack(tensor.detach()) for tensor in inputs]
        self.positions: dict[StorageWeakRef, int] = {}
        for position, result in enumerate(results):
            self.positions[StorageWeakRef(result.untyped_storage())] = position
        self.num_views = 0
        self.num_unpacked = 0
        self.results: Sequence[torch.Tensor] = ()

    @contextmanager
    def replace_saved(self) -> Iterator[None]:
        """Let operations in this context save the results, and views of them, as recipes."""
        pack_other, unpack_other = _get_saved_tensors_hooks()

        def pack(tensor: torch.Tensor) -> Any:
            position = self.positions.get(StorageWeakRef(tensor.untyped_storage()))
            if position is None:
                return pack_other(tensor)
            self.num_views += 1
            return _View(position, tensor.shape, tensor.stride(), tensor.storage_offset())

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, _View):
                return self._compute_view(packed)
            tensor: torch.Tensor = unpack_other(packed)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _compute_view(self, view: _View) -> torch.Tensor:
        if not self.results:
            inputs = [self.unpack_input(packed) for packed in self.inputs]
            with torch.no_grad():
                self.results = self.compute(*inputs)
        result = self.results[view.position].as_strided(view.shape, view.stride, view.offset)
        self.num_unpacked += 1
        if self.num_unpacked == self.num_views:
            # The last operation of this backward has its tensor. There may be another backward.
            self.results = ()
            self.num_unpacked = 0
        return result


def _get_saved_tensors_hooks() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the hooks for saved tensors that are active now."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (_return_unchanged, _return_unchanged)


def _return_unchanged(tensor: Any) -> Any:
    """Return the argument: a hook that saves a tensor as it is."""
    return tensor


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
