"""Split a batch into micro-batches along dim 0, and check inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from namedmesh._torch import tree_leaves

UNBATCHED_OUTPUT = (
    "the last stage returns a tensor without the batch dim of its micro-batch, which can be neither "
    "split nor concatenated; pass a target and a batch that fills every micro-batch, or return "
    "tensors with a batch dim"
)


@dataclass
class BuiltSchedule:
    """One of torch's schedules with its stages, and the inputs that it was built for.

    Attributes:
        inputs_key: everything on this rank that the tensors between the stages depend on.
        microbatch_size: the size of dim 0 of every micro-batch.
        stages: this rank's stages.
        schedule: torch's schedule over these stages.
        has_unbatched_output: whether the last stage returns a tensor without a batch dim, such as
            an auxiliary loss.
    """

    inputs_key: object
    microbatch_size: int
    stages: list[PipelineStage]
    schedule: Any
    has_unbatched_output: bool = False


@dataclass
class PipelineBatch:
    """The inputs of one call of ``step`` or ``eval``, and the problems found in them.

    Attributes:
        args: positional arguments, whose tensors have the batch dim.
        split_kwargs: keyword arguments whose tensors have the batch dim.
        replicate_kwargs: keyword arguments that every micro-batch gets unchanged.
        target: the target of the loss; None if there is no loss.
        backward: whether the schedule runs backward passes.
        size: the size of the batch dim; 0 if the tensors do not have one size.
        problems: the reasons why this rank cannot run the batch.
        checks_output: whether to check the output of the last stage: in the first run of a
            schedule.
        checks_reduction: whether to check the reduction of the loss: in the first run with a
            backward.
    """

    args: tuple[Any, ...]
    split_kwargs: dict[str, Any]
    replicate_kwargs: dict[str, Any]
    target: Any
    backward: bool
    size: int = 0
    problems: list[str] = field(default_factory=list)
    checks_output: bool = False
    checks_reduction: bool = False

    def __post_init__(self) -> None:
        """Find the batch size, and the values that cannot be split into micro-batches."""
        values: dict[object, Any] = dict(enumerate(self.args))
        values.update(self.split_kwargs)
        values["target"] = self.target
        sizes: set[int] = set()
        for name, value in values.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    sizes.add(leaf.shape[0] if leaf.ndim else 0)
                elif find_tensors(list(getattr(leaf, "__dict__", {}).values())):
                    # torch passes such objects unchanged to every micro-batch. It does split a
                    # BlockMask, but without the padding rows of the last micro-batches.
                    self.problems.append(
                        f"the argument {name} is a {type(leaf).__name__}, which cannot be split into "
                        "micro-batches; pass tensors, or name it in Pipeline(..., replicate_kwargs=...)"
                    )
        if len(sizes) != 1 or not self.args or 0 in sizes:
            self.problems.append(
                f"the batch sizes of the inputs and the target are {sorted(sizes)}; pass at least one "
                "positional input, and tensors of one batch size of at least 1; name keyword arguments "
                "without a batch dim in Pipeline(..., replicate_kwargs=...)"
            )
        self.size = max(sizes, default=0)


def find_tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def make_shape_key(value: Any, *, skip_batch_dim: bool) -> object:
    """Return a key with the properties of an input that shapes between stages may depend on.

    Args:
        value: a leaf of the inputs.
        skip_batch_dim: whether dim 0 of a tensor is the batch dim, which changes from batch to
            batch.

    Returns:
        Shape, dtype and ``requires_grad`` of a tensor; the value itself of flags and text; the type
        of everything else, as a model may get a new number or object with each batch.
    """
    if isinstance(value, Tensor):
        shape = value.shape[1:] if skip_batch_dim else value.shape
        return shape, value.dtype, value.requires_grad
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)


def select_rows(rows: slice | Tensor, value: Any) -> Any:
    """Return the given rows (dim 0) of a tensor. Return scalars and other objects unchanged."""
    if isinstance(value, Tensor) and value.ndim:
        return value[rows]
    return value


def repeat_rows(value: Any) -> Any:
    """Concatenate a tensor with itself along dim 0; leave scalars and objects unchanged."""
    if isinstance(value, Tensor) and value.ndim:
        return torch.cat([value, value])
    return value


@contextmanager
def register_stage_hooks(
    modules: list[nn.Module], batch: PipelineBatch, built: BuiltSchedule
) -> Iterator[None]:
    """Context manager: add forward hooks that pass ``replicate_kwargs`` and check the output.

    The output of the last stage is checked in the first run of a schedule. The arguments are not
    passed through torch's schedule, which sets the gradients of all inputs that it knows to None
    after each micro-batch.
    """

    def add_arguments(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | batch.replicate_kwargs

    handles: list[Any] = []
    if batch.replicate_kwargs:
        for module in modules:
            handle = module.register_forward_pre_hook(add_arguments, with_kwargs=True)
            handles.append(handle)
    if batch.checks_output and built.stages[-1].is_last:
        handles.append(modules[-1].register_forward_hook(partial(_check_output, batch, built)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_output(
    batch: PipelineBatch, built: BuiltSchedule, _module: nn.Module, _args: Any, output: Any
) -> Any:
    """Check that the output of the last stage can be split and concatenated along dim 0.

    A problem is recorded in the batch instead of raised. The other stages still wait for this one,
    so an output is returned with which torch can finish the run.
    """
    values = output if isinstance(output, tuple | list) else [output]
    tensors = find_tensors(output)
    if not all(isinstance(value, Tensor) for value in values):
        # This hook runs for each micro-batch. The problem is reported once.
        problem = (
            f"the last stage must return a tensor, or a tuple of tensors, got {type(output).__name__}; "
            "return only the tensors in it"
        )
        batch.problems[:] = [problem]
        return tuple(tensors)
    if any(tensor.shape[:1] != (built.microbatch_size,) for tensor in tensors):
        built.has_unbatched_output = True
        if batch.target is None:
            # torch concatenates the outputs of the micro-batches, which fails for scalars.
            return tuple([tensor.reshape(-1) for tensor in tensors])
    return output
