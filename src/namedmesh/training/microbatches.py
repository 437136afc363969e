"""A batch on its way through a pipeline: its rows, and the arguments and outputs of its stages."""

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

ROWLESS = (
    "the last stage returns a tensor without the rows of its micro-batch, which can be neither cut "
    "nor joined; give a target, and as many rows as fill the micro-batches, or return rows"
)


@dataclass
class Built:
    """One of torch's schedules, and what it was built for."""

    key: object
    rows: int  # of one micro-batch
    stages: list[PipelineStage]
    schedule: Any
    # Whether the last stage returns a tensor without rows, such as an auxiliary loss.
    rowless: bool = False


@dataclass
class Batch:
    """One call of ``step`` or ``eval``. torch hands it on to the loss of each micro-batch."""

    args: tuple[Any, ...]
    by_row: dict[str, Any]
    whole: dict[str, Any]  # keyword arguments that are not cut
    target: Any
    backward: bool
    count: int = 0  # of rows
    problems: list[str] = field(default_factory=list)
    # Only in the first run of a schedule.
    checks_output: bool = False
    checks_reduction: bool = False

    def __post_init__(self) -> None:
        """Count the rows, and find the values that cannot be cut into micro-batches."""
        named: dict[object, Any] = dict(enumerate(self.args))
        named.update(self.by_row)
        named["target"] = self.target
        counts: set[int] = set()
        for name, value in named.items():
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    counts.add(leaf.shape[0] if leaf.ndim else 0)
                elif tensors_of(list(getattr(leaf, "__dict__", {}).values())):
                    # torch gives objects whole to every micro-batch, and cuts a BlockMask without
                    # the rows that fill up the last micro-batches.
                    self.problems.append(
                        f"the argument {name} is a {type(leaf).__name__}, which cannot be cut into "
                        "micro-batches; give tensors, or name it in Pipeline(..., replicate_kwargs=...)"
                    )
        if len(counts) != 1 or not self.args or 0 in counts:
            remedy = (
                "give all as many, one at least; name keyword arguments without rows in "
                "Pipeline(..., replicate_kwargs=...)"
            )
            self.problems.append(f"the batch has {sorted(counts)} rows; {remedy}")
        self.count = max(counts, default=0)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def describe(dims_of_rows: int, value: Any) -> object:
    """Return what the shapes between stages may depend on: of numbers and objects, their types."""
    if isinstance(value, Tensor):
        return value.shape[dims_of_rows:], value.dtype, value.requires_grad
    return value if value is None or isinstance(value, bool | str) else type(value)


def take_rows(rows: slice | Tensor, value: Any) -> Any:
    """Return some rows of a tensor; other values as they are."""
    return value[rows] if isinstance(value, Tensor) and value.ndim else value


def twice(value: Any) -> Any:
    """Return the rows of a tensor twice; other values as they are."""
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value


@contextmanager
def stage_hooks(modules: list[nn.Module], batch: Batch, built: Built) -> Iterator[None]:
    """Give the stages the keyword arguments that are not cut, and check the output in a first run.

    torch is not given these arguments: it drops the gradients of all that it knows after each
    micro-batch.
    """

    def add_arguments(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | batch.whole

    handles: list[Any] = []
    if batch.whole:
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


def _check_output(batch: Batch, built: Built, _module: nn.Module, _args: Any, output: Any) -> Any:
    """Find out whether an output can be cut. Return one with which torch comes to the end."""
    parts = output if isinstance(output, tuple | list) else [output]
    tensors = tensors_of(output)
    if not all(isinstance(part, Tensor) for part in parts):
        kind = type(output).__name__
        problem = f"the last stage must return a tensor, or a tuple of tensors, got {kind}"
        batch.problems[:] = [f"{problem}; take the tensors out of it"]
        return tuple(tensors)
    if any(tensor.shape[:1] != (built.rows,) for tensor in tensors):
        built.rowless = True
        if batch.target is None:  # torch joins the outputs, for which each needs a dim
            return tuple(tensor.reshape(-1) for tensor in tensors)
    return output
