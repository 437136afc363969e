"""Stages of torch's pipelines to which each micro-batch brings its shapes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _derive_grad_metas, extract_tensor_meta
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple

from namedmesh._errors import TrainingError


class MicrobatchStage(PipelineStage):
    """A pipeline stage that never runs its module except on micro-batches.

    torch's own stage runs the module once more before the first batch, to infer the shapes between
    stages. That run changes buffers and attributes, and behind the first stage its inputs are
    uninitialized memory. No other run can do without traces: a copy of the module prints and counts
    in global variables too, and fake tensors fail where the module reads a value. ``input_args``
    and ``output_args``, which torch offers, need shapes that are known and never change.

    Here each stage sends the shapes of its outputs ahead of them, over a group on the CPU. Nothing
    has to be inferred. torch still computes, sends and receives: this class makes the entries of
    torch's tables that torch would make in its first run.

    The next stage posts a receive before it knows the shape: in 1F1B together with the send of a
    gradient, for which this stage waits before it computes the activation. Therefore the first
    micro-batch of a batch, which is the largest, determines the size of all messages. Later ones
    are padded to it, and viewed with their own shapes when they are used.

    Args:
        module: the module of the stage.
        index: the index of the stage.
        num_stages: the number of stages of the pipeline.
        device: the device of the stage.
        group: the group over ``pp``, for the tensors.
        cpu_group: a group over the same ranks for tensors on the CPU. It may be the same group.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup,
        cpu_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(module, index, num_stages, device, group=group)
        self._cpu_group = cpu_group
        self._extra_kwargs: dict[str, Any] = {}
        # Shape, stride, dtype and requires_grad: of each input by micro-batch, and of each output of
        # the first micro-batch.
        self._input_metas: dict[int, tuple[Any, ...]] = {}
        self._first_output_metas: tuple[Any, ...] = ()
        # A tensor must live until it is sent.
        self._unfinished_sends: list[tuple[Any, Tensor]] = []
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch would compare the shapes of all micro-batches.
        self._runtime_validate = False

    def begin(self, extra_kwargs: dict[str, Any]) -> None:
        """Prepare for a batch.

        Args:
            extra_kwargs: keyword arguments of the module that torch must not know. torch sets the
                gradients of all arguments that it knows to None after each micro-batch.
        """
        self._extra_kwargs = extra_kwargs
        self._input_metas.clear()
        self._first_output_metas = ()

    def finish(self) -> None:
        """Forget the batch, after the next stage has received all shapes."""
        self.begin({})
        for work, _ in self._unfinished_sends:
            work.wait()
        self._unfinished_sends.clear()

    # torch calls the next four before the first batch, to infer the shapes and to undo the effects.

    def _prepare_forward_infra(self, num_microbatches: int, *_args: Any, **_kwargs: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = {0: ()}  # torch looks for stages in it that are not adjacent

    def _prepare_backward_infra(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def _pre_metadata_inference_backup(self) -> None:
        pass

    def _post_metadata_inference_cleanup(self) -> None:
        """Do nothing. torch would set the gradients of FSDP2's parameters to None."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        if not self._input_metas:
            metas = self._receive_metas()
            self._expect_inputs(fwd_chunk_id, metas, list(map(_flatten, metas)))
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        metas = list(map(extract_tensor_meta, _normalize_model_output_as_tuple(prev_stage_outputs)))
        self._expect_inputs(mb_index, metas, metas)
        super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def _expect_inputs(self, chunk_id: int, metas: Sequence[Any], message_metas: Sequence[Any]) -> None:
        """Make torch's entries for received inputs, if this is the first micro-batch of a batch."""
        if not self._input_metas:
            # New tensors in each batch. torch uses the same ones, which keep the hooks of all batches.
            self._stage_meta.inputs = tuple(message_metas)
            self._setup_forward_recv_info(self.chunks or 0, self.has_backward)
        self._input_metas[chunk_id] = tuple(metas)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        messages = super()._retrieve_recv_activations(fwd_chunk_id)
        if fwd_chunk_id not in self._input_metas:
            self._input_metas[fwd_chunk_id] = self._receive_metas()
        inputs: list[Tensor] = []
        for message, meta in zip(messages, self._input_metas[fwd_chunk_id], strict=True):
            tensor = message.detach().as_strided(meta.shape, meta.stride)  # without the padding
            inputs.append(tensor.requires_grad_(meta.requires_grad))
        return tuple(inputs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_first:
            # The inputs are leaves of autograd. Of a leaf, torch takes the gradient away after the
            # backward, and retain_grad() has no effect. With views, both are as in one process.
            args = tuple([arg.view_as(arg) if arg.requires_grad else arg for arg in args])
        kwargs |= self._extra_kwargs
        return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        outputs = _normalize_model_output_as_tuple(output)
        if not all(isinstance(value, Tensor) for value in outputs):
            raise TrainingError(
                f"stage {self.stage_index} must return a tensor, or a tuple of tensors, got "
                f"{type(output).__name__}; return only the tensors in it"
            )
        if not self.is_last:
            self._announce_outputs(fwd_chunk_id, outputs)
        elif not self.has_backward and not save_forward_output:
            # Free the output after its loss. torch keeps it for a backward, and evaluation runs none.
            self.clear_runtime_states()
        return output

    def _announce_outputs(self, chunk_id: int, outputs: tuple[Tensor, ...]) -> None:
        """Send the shapes of the outputs, and prepare to receive their gradients."""
        metas = tuple(map(_describe, outputs))
        if not self._first_output_metas:
            self._first_output_metas = metas
        # If the numbers differ, zip stops, and torch compares them when it sends.
        for meta, first in zip(metas, self._first_output_metas, strict=False):
            if meta.dtype != first.dtype or meta.shape.numel() > first.shape.numel():
                raise TrainingError(
                    f"stage {self.stage_index} returned {meta.dtype} of shape {tuple(meta.shape)} "
                    f"for a later micro-batch, after {first.dtype} of shape {tuple(first.shape)} "
                    "for the first; return tensors of one dtype, the largest first"
                )
        self._stage_meta.outputs = metas
        self._setup_forward_send_info()
        if self.has_backward:
            self._stage_meta.output_grads = _derive_grad_metas(metas)
            self.grad_recv_info[chunk_id] = self._create_grad_recv_info(self.act_send_info)
        if not self._is_same_rank(self.stage_index + 1):
            self._send_metas(metas)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        for operation, first_meta in zip(operations, self._first_output_metas, strict=True):
            operation.tensor = _make_message(operation.tensor, first_meta.shape.numel())
        return operations

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        metas = self._input_metas.get(bwd_chunk_id, ())
        self._stage_meta.inputs = metas
        if not self.is_first and not any(meta.requires_grad for meta in metas):
            # Behind frozen stages. A split backward looks for weight gradients on the way to the
            # inputs only, and finds none if no input requires a gradient. So it is not split.
            full_backward = True
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self.backward_state:  # not after a backward that was not split
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        metas = self._input_metas[bwd_chunk_id]
        self._stage_meta.input_grads = _derive_grad_metas(metas)
        self.grad_send_info = []
        grads: list[Tensor | None] = []
        for grad, meta in zip(self.bwd_cache[bwd_chunk_id], metas, strict=True):
            self.grad_send_info.append(self.stage_index - 1 if meta.requires_grad else None)
            if meta.requires_grad and grad is None:
                grad = torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)  # noqa: PLW2901
            grads.append(None if grad is None else grad.contiguous())
        self.bwd_cache[bwd_chunk_id] = tuple(grads)
        return super().get_bwd_send_ops(bwd_chunk_id)

    # torch's schedules with several stages on a rank call the next two in an evaluation, too.

    def get_local_bwd_output(self, mb_index: int) -> Any:
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _send_metas(self, metas: tuple[Any, ...]) -> None:
        """Send the shapes to the next stage. Does not wait until it receives them."""
        peer = self.stage_index_to_group_rank[self.stage_index + 1]
        data = pickle.dumps(metas)
        for message in (len(data).to_bytes(8, "little"), data):
            tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            # The tag is the index of the receiving stage. Activations and gradients have the tag 0.
            work = dist.isend(tensor, group=self._cpu_group, group_dst=peer, tag=self.stage_index + 1)
            self._unfinished_sends.append((work, tensor))

    def _receive_metas(self) -> tuple[Any, ...]:
        """Wait for the shapes from the previous stage. The device does not wait."""
        peer = self.stage_index_to_group_rank[self.stage_index - 1]
        message = bytearray(8)
        for length in (8, None):
            message = bytearray(length or int.from_bytes(message, "little"))
            tensor = torch.frombuffer(message, dtype=torch.uint8)
            dist.recv(tensor, group=self._cpu_group, group_src=peer, tag=self.stage_index)
        metas: tuple[Any, ...] = pickle.loads(message)  # noqa: S301  it comes from a rank of this job
        return metas


def _describe(tensor: Tensor) -> Any:
    """Return shape, dtype and requires_grad of a tensor, and the strides of a contiguous copy.

    gloo sends contiguous tensors only. NCCL sends the memory of others, also if the receiver has
    other strides.
    """
    stride = torch.empty(tensor.shape, device="meta").stride()
    return replace(extract_tensor_meta(tensor), stride=stride)


def _flatten(meta: Any) -> Any:
    """Return the description of the message in which a tensor is sent."""
    return replace(meta, shape=torch.Size([meta.shape.numel()]), stride=(1,), requires_grad=False)


def _make_message(tensor: Tensor, capacity: int) -> Tensor:
    """Return the elements of a tensor, padded to a number of elements."""
    elements = tensor.flatten().contiguous()
    if len(elements) == capacity:
        return elements
    message = tensor.new_empty(capacity)
    message[: len(elements)] = elements
    return message


@contextmanager
def set_schedule_loss(schedule: Any, loss_fn: Callable[..., Tensor]) -> Iterator[None]:
    """Return a context in which a pipeline schedule computes the loss with ``loss_fn``.

    torch takes a loss function when a schedule is created. Such a function would have to find the
    target of each batch in an object that outlives the batch.

    Args:
        schedule: a pipeline schedule of torch.
        loss_fn: the loss function, as the constructor of a schedule takes it.
    """
    previous = schedule._loss_fn
    schedule._loss_fn = loss_fn
    try:
        yield
    finally:
        schedule._loss_fn = previous
